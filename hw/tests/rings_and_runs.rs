//! What bounds a run from outside its flags: the room of the device-to-host ring and of the queues, and when a run is over.

#[path = "../../kernels/tests/small/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

#[allow(dead_code, reason = "each suite uses a part of it")]
mod toy;

use small::cases;
use tilewire_hw::values::{Config, ExecError, RunEnd, Scheduler, run};
use tilewire_kernels::check::{Limits, Rule, report_fatal};
use tilewire_kernels::schedule::{Place, Publish};
use tilewire_kernels::{Blocked, Fabric, OptionSet, RoleKind};
use toy::{Lists, ROWS, Toy, Want, X, Y, copy, landed, put, rows};

/// A ring of one command and one write in flight per queue hold nothing up, however late the proxy is: what drains them
/// needs no CTA.
#[test]
fn the_smallest_ring_and_cap_are_enough_for_every_kernel() {
    let mut puts = 0;
    for set in [OptionSet::Tilewire, OptionSet::Published] {
        for case in cases(set, Fabric::EfaSrd).iter().filter(|case| case.spec.cluster.nodes > 1) {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            for scheduler in [Scheduler::DelayedPuts, Scheduler::Laggards, Scheduler::Starve(RoleKind::InterReduce)] {
                let config = Config { scheduler, runs: 1, fifo_depth: 1, in_flight: 1, ..Config::default() };
                match run(&schedule, case.kernel, &case.spec, &config) {
                    Ok(_) => puts += 1,
                    // Published sets have races; what they compute is for other suites.
                    Err(ExecError::Wrong(..)) if set == OptionSet::Published => puts += 1,
                    Err(error) => panic!("{} {scheduler:?}: {error}", case.name()),
                }
            }
        }
    }
    assert!(puts > 100, "{puts} runs");
}

/// One node sends, the other copies what has landed.
fn sender() -> Toy {
    let lists: Lists = |_| vec![vec![put(Publish::Immediate, false)], vec![landed()]];
    let want: Want = |cluster, rank, row, col, x| {
        let other = (cluster.number(rank) + 1) % 2;
        x(other as u64 * ROWS + row, col)
    };
    Toy { fabric: Fabric::EfaSrd, ..Toy::new((2, 1), lists, want) }
}

/// The checker and the executor agree: no room at all is fatal, and the blocked CTA is named.
#[test]
fn no_room_at_all_holds_a_run_up_for_ever() {
    let toy = sender();
    toy.is_right();
    let fatal = |limits: &Limits| {
        let report = report_fatal(&toy.schedule(), limits, None);
        report.findings.iter().filter(|finding| finding.problem.rule() == Rule::Machine).count()
    };
    let hopper = Limits::hopper(132);
    assert_eq!(fatal(&hopper), 0);
    assert_eq!(fatal(&Limits { fifo_depth: 0, ..hopper }), 1);
    assert_eq!(fatal(&Limits { in_flight: 0, ..hopper }), 1);

    match toy.run(&Config { fifo_depth: 0, ..Config::default() }) {
        Err(ExecError::Stuck { left: 4, puts: 0, blocked, .. }) => {
            let at_ring: Vec<&Blocked> = blocked.iter().filter(|blocked| blocked.flag == Blocked::RING).collect();
            assert_eq!(at_ring.len(), 2, "{blocked:?}");
            assert!(at_ring.iter().all(|blocked| (blocked.have, blocked.need) == (0, 1)));
        }
        other => panic!("{other:?}"),
    }
    match toy.run(&Config { in_flight: 0, ..Config::default() }) {
        Err(ExecError::Stuck { left: 2, puts: 2, .. }) => {}
        other => panic!("{other:?}"),
    }
}

/// A put whose word nobody waits for. A run that ends without it meets it in the next one, in the other bank.
#[test]
fn a_put_of_an_earlier_run_is_an_error_and_the_end_of_a_run_prevents_it() {
    let lists: Lists = |_| {
        let own = copy(Place::me(rows(X, 0, ROWS)), Place::me(rows(Y, 0, ROWS)));
        vec![vec![put(Publish::Immediate, false)], vec![own]]
    };
    let want: Want = |cluster, rank, row, col, x| x(cluster.number(rank) as u64 * ROWS + row, col);
    let toy = Toy { fabric: Fabric::EfaSrd, ..Toy::new((2, 1), lists, want) };
    let mut late = 0;
    for seed in 0..40 {
        for scheduler in Scheduler::ALL {
            let config = Config { seed, scheduler, runs: 3, ..Config::default() };
            let proper = toy.run(&config);
            assert!(proper.is_ok(), "{scheduler:?} {seed}: {proper:?}");
            match toy.run(&Config { end: RunEnd::TasksDone, ..config }) {
                Ok(_) => {}
                Err(ExecError::LateWord { flag, slot, of_run, run, .. }) => {
                    assert_eq!((flag.as_str(), slot), ("arrived", 0));
                    assert_eq!((run - of_run) % 2, 1, "the word names the other bank");
                    late += 1;
                }
                // Two runs late, a word names the right bank: only the rule keeps it out.
                Err(ExecError::RaisedTwice { .. }) => {}
                Err(error) => panic!("{scheduler:?} {seed}: {error}"),
            }
        }
    }
    assert!(late > 20, "only {late} late words");
}

/// A wrong element is named with the task that writes it.
#[test]
fn a_wrong_value_names_its_tile() {
    // The word is on a queue of its own, so the copy may come before the data.
    let lists: Lists = |_| vec![vec![put(Publish::SeparateWrite { queue: 1 }, false)], vec![landed()]];
    let toy = Toy { lists, ..sender() };
    let wrong = (0..40).find_map(|seed| match toy.run(&Config { seed, ..Config::default() }) {
        Err(ExecError::Wrong(mismatch, races)) => Some((seed, mismatch, races)),
        _ => None,
    });
    let (seed, mismatch, races) = wrong.expect("one of 40 seeds shows it");
    assert_eq!(mismatch.seed, seed);
    let [writer] = &mismatch.writers[..] else { panic!("{mismatch}") };
    assert_eq!((writer.rank, writer.role, writer.task, writer.op), (mismatch.rank, RoleKind::IntraComm, 0, "copy"));
    assert_eq!(races[0].signature(), "tmp: copy read / put write");
    // The seed alone brings it back.
    match toy.run(&Config { seed, ..Config::default() }) {
        Err(ExecError::Wrong(again, _)) => assert_eq!(again.to_string(), mismatch.to_string()),
        other => panic!("{other:?}"),
    }
}

//! Each op and each rule of the executor on hand-made schedules.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod toy;

use smallvec::smallvec;
use tilewire_hw::values::{Config, ExecError, Scheduler};
use tilewire_kernels::schedule::{
    At, CollectiveKind, Flag, Op, Partial, Place, Publish, Region, Signal, TableSlice, Wait,
};
use tilewire_kernels::{Blocked, Cluster, Fabric, Rank, RoleKind, RoleSplit, Task};
use toy::*;

fn my_row(cluster: Cluster, rank: Rank) -> u64 {
    cluster.number(rank) as u64 * ROWS
}

#[test]
fn a_multicast_reaches_every_gpu_of_the_node() {
    // GPU g sends its row g to all; everyone waits for all.
    let lists: Lists = |rank| {
        let g = u64::from(rank.gpu);
        let mut tasks =
            vec![
                copy(Place::me(rows(X, g, 1)), Place { at: At::AllLocal, region: rows(TMP, g, 1) })
                    .signal(Signal::one(At::AllLocal, F, 0)),
            ];
        tasks.push(copy(Place::me(rows(TMP, 0, 4)), Place::me(rows(Y, 0, 4))).wait(Wait::on(F, 0, 4)));
        vec![tasks]
    };
    let want: Want = |_, rank, row, col, x| x((u64::from(rank.node) * 4 + row) * ROWS + row, col);
    Toy { rows: 4, ..Toy::new((2, 4), lists, want) }.is_right();
}

#[test]
fn a_read_from_all_gpus_is_their_sum() {
    let lists: Lists =
        |_| vec![vec![reduce(&[Place { at: At::AllLocal, region: rows(X, 0, ROWS) }], Place::me(rows(Y, 0, ROWS)))]];
    let want: Want =
        |_, rank, row, col, x| (0..2).map(|g| x((u64::from(rank.node) * 2 + g) * ROWS + row, col)).sum::<f64>();
    let toy = Toy::new((2, 2), lists, want);
    // Terms of either sign: only their sum is compared, so the bound must not be that of the sum.
    for seed in 0..4 {
        let result = toy.run(&Config { seed, ..Config::default() });
        match result {
            Ok(_) => {}
            Err(ExecError::Wrong(mismatch, _)) => {
                assert!((mismatch.expected - mismatch.got).abs() < 0.01, "{mismatch}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn gathers_fetch_from_neighbours_and_fill_gaps_with_zeros() {
    let lists: Lists = |_| {
        vec![vec![Task::new(Op::GatherRows {
            table: TableSlice { start: 0, len: 3 },
            src: X,
            dst: rows(Y, 0, 3),
            in_flight_rows: 4,
            load_store_overlap: true,
            box_bytes: 0,
        })]]
    };
    let want: Want = |cluster, rank, row, col, x| match row {
        0 => x(u64::from((rank.gpu + 1) % cluster.gpus_per_node) * ROWS + 5, col),
        1 => 0.0,
        _ => x(u64::from(rank.gpu) * ROWS + 2, col),
    };
    Toy { rows: 3, ..Toy::new((1, 3), lists, want) }.is_right();
}

fn collective(kind: CollectiveKind, src: Region, dst: Region) -> Vec<Vec<Task>> {
    // After a copy, so that ranks come at different times.
    let first = copy(Place::me(rows(X, 0, ROWS)), Place::me(rows(TMP, 8, ROWS))).signal(Signal::one(At::ME, F, 0));
    vec![vec![first], vec![Task::new(Op::Collective { kind, src, dst }).wait(Wait::on(F, 0, 1))]]
}

#[test]
fn collectives_move_what_their_names_say() {
    let gather: Lists = |_| collective(CollectiveKind::AllGather, rows(X, 0, ROWS), rows(Y, 0, 4 * ROWS));
    Toy { rows: 4 * ROWS, ..Toy::new((2, 2), gather, |_, _, row, col, x| x(row, col)) }.is_right();

    let exchange: Lists = |_| collective(CollectiveKind::AllToAll, rows(X, 0, ROWS), rows(Y, 0, ROWS));
    let want: Want = |cluster, rank, row, col, x| {
        let me = cluster.number(rank) as u64;
        x(row / 2 * ROWS + me * 2 + row % 2, col)
    };
    Toy::new((2, 2), exchange, want).is_right();
}

#[test]
fn collectives_sum_what_their_names_say() {
    // The terms of the sums have either sign, so the errors are compared with the terms.
    let near = |toy: &Toy| match toy.run(&Config::default()) {
        Ok(_) => {}
        Err(ExecError::Wrong(m, _)) => assert!((m.expected - m.got).abs() < 0.01, "{m}"),
        Err(error) => panic!("{error}"),
    };
    let scatter: Lists = |_| collective(CollectiveKind::ReduceScatter, rows(X, 0, ROWS), rows(Y, 0, 2));
    let want: Want = |cluster, rank, row, col, x| {
        let me = cluster.number(rank) as u64;
        (0..4).map(|from| x(from * ROWS + me * 2 + row, col)).sum::<f64>()
    };
    near(&Toy { rows: 2, ..Toy::new((2, 2), scatter, want) });

    let all: Lists = |_| collective(CollectiveKind::AllReduce, rows(X, 0, ROWS), rows(Y, 0, ROWS));
    near(&Toy::new((2, 2), all, |_, _, row, col, x| (0..4).map(|from| x(from * ROWS + row, col)).sum::<f64>()));
}

/// Attention of the first two rows over KV rows `from..to` of x, K and V alike.
fn attention(from: u64, to: u64, row: u64, col: u64, x: &dyn Fn(u64, u64) -> f64) -> f64 {
    let score = |k: u64| (0..COLS).map(|i| x(row, i) * x(k, i)).sum::<f64>() / (COLS as f64).sqrt();
    let total: f64 = (from..to).map(|k| score(k).exp()).sum();
    (from..to).map(|k| score(k).exp() * x(k, col)).sum::<f64>() / total
}

fn attention_tile(from: u64, to: u64, state: bool, out: Option<u64>, first: bool) -> Task {
    let partial = |row| Partial { o: rows(TMP, row, 2), l: Region::contiguous(TMP, (row + 2) * ROW_BYTES, 1, 8) };
    Task::new(Op::AttentionTile {
        q: rows(X, 0, 2),
        k: rows(X, from, to - from),
        v: rows(X, from, to - from),
        // Two rows of 16 + 2 f32.
        state: state.then_some(Region::contiguous(TMP, 20 * ROW_BYTES, 2, 72)),
        out: out.map(partial),
        first,
        last: out.is_some(),
        tile: [2, 2],
        stages: 2,
        main_loop: tilewire_kernels::schedule::MainLoop::Pipelined,
    })
}

#[test]
fn attention_by_stages_and_by_merged_parts_is_attention() {
    let staged: Lists = |_| {
        vec![vec![
            attention_tile(0, 4, true, None, true).signal(Signal::one(At::ME, F, 0)),
            attention_tile(4, 8, true, Some(0), false).wait(Wait::on(F, 0, 1)).signal(Signal::one(At::ME, F, 1)),
            copy(Place::me(rows(TMP, 0, 2)), Place::me(rows(Y, 0, 2))).wait(Wait::on(F, 1, 1)),
        ]]
    };
    let merged: Lists = |_| {
        let partial = |row| Partial { o: rows(TMP, row, 2), l: Region::contiguous(TMP, (row + 2) * ROW_BYTES, 1, 8) };
        vec![vec![
            attention_tile(0, 6, false, Some(0), true).signal(Signal::one(At::ME, F, 0)),
            attention_tile(6, 8, false, Some(4), true).signal(Signal::one(At::ME, F, 0)),
            // In place.
            Task::new(Op::AttentionMerge { parts: smallvec![partial(0), partial(4)], out: partial(0) })
                .wait(Wait::on(F, 0, 2))
                .signal(Signal::one(At::ME, F, 1)),
            copy(Place::me(rows(TMP, 0, 2)), Place::me(rows(Y, 0, 2))).wait(Wait::on(F, 1, 1)),
        ]]
    };
    for lists in [staged, merged] {
        let toy = Toy { rows: 2, ..Toy::new((1, 1), lists, |_, _, row, col, x| attention(0, 8, row, col, x)) };
        for seed in 0..10 {
            match toy.run(&Config { seed, ..Config::default() }) {
                Ok(_) => {}
                // Values of V have either sign: an element near zero has a bound below the rounding of its terms.
                Err(ExecError::Wrong(m, _)) => assert!((m.expected - m.got).abs() < 0.01, "{m}"),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

const SWAPPED: Want = |cluster, rank, row, col, x| {
    let peer = Rank { node: 1 - rank.node, ..rank };
    x(my_row(cluster, peer) + row, col)
};

#[test]
fn a_put_lands_before_its_word_where_the_fabric_says_so() {
    let same: Lists = |_| vec![vec![put(Publish::SameQueueWrite, false), landed()]];
    let immediate: Lists = |_| vec![vec![put(Publish::Immediate, false), landed()]];
    let separate: Lists = |_| vec![vec![put(Publish::SeparateWrite { queue: 1 }, false), landed()]];
    let late = vec!["tmp: copy read / put write".to_owned()];
    for (fabric, lists, right) in [
        (Fabric::IbRc, same, true),
        (Fabric::EfaSrd, same, false),
        (Fabric::EfaSrd, immediate, true),
        (Fabric::Loopback, immediate, true),
        (Fabric::IbRc, separate, false),
        (Fabric::EfaSrd, separate, false),
    ] {
        let toy = Toy { fabric, ..Toy::new((2, 1), lists, SWAPPED) };
        if right {
            toy.is_right();
        } else {
            assert_eq!(toy.goes_wrong(), (late.clone(), true), "{fabric}");
        }
    }
}

/// On a queue in order a word that follows vouches for everything before it; without order it does not.
#[test]
fn a_later_word_of_a_queue_in_order_vouches_for_earlier_puts() {
    let ordered: Lists = |_| {
        let word = Task::new(Op::Put {
            src: rows(X, 0, 1),
            dst: Place { at: At::node(1), region: Region::contiguous(TMP, 0, 0, 0) },
            queue: 0,
            publish: Publish::SameQueueWrite,
            arrived: Flag { family: ARRIVED, slot: 1 },
            sent: None,
        });
        let mut landed = landed();
        landed.waits[0].flag.slot = 1;
        let data = put(Publish::SameQueueWrite, false).signal(Signal::one(At::ME, F, 0));
        vec![vec![data, word.wait(Wait::on(F, 0, 1)), landed]]
    };
    Toy::new((2, 1), ordered, SWAPPED).is_right();
    let (races, wrong) = Toy { fabric: Fabric::EfaSrd, ..Toy::new((2, 1), ordered, SWAPPED) }.goes_wrong();
    assert!(wrong && !races.is_empty());
}

#[test]
fn the_source_of_a_put_is_read_until_it_is_sent() {
    // The source is overwritten after the put was posted, with and without waiting for `sent`.
    let lists = |wait: bool| -> Lists {
        if wait {
            |_| {
                let over = copy(Place::me(rows(TMP, 8, ROWS)), Place::me(rows(X, 0, ROWS)));
                let fill = Task::new(Op::Fill { dst: Place::me(rows(TMP, 8, ROWS)) }).signal(Signal::one(At::ME, F, 0));
                let over = over.wait(Wait::on(F, 0, 1)).wait(Wait::on(SENT, 0, 1));
                vec![vec![put(Publish::SameQueueWrite, true), landed()], vec![fill, over]]
            }
        } else {
            |_| {
                let over = copy(Place::me(rows(TMP, 8, ROWS)), Place::me(rows(X, 0, ROWS)));
                let posted = put(Publish::SameQueueWrite, true).signal(Signal::one(At::ME, F, 1));
                let fill = Task::new(Op::Fill { dst: Place::me(rows(TMP, 8, ROWS)) }).signal(Signal::one(At::ME, F, 0));
                let over = over.wait(Wait::on(F, 0, 1)).wait(Wait::on(F, 1, 1));
                vec![vec![posted, landed()], vec![fill, over]]
            }
        }
    };
    Toy::new((2, 1), lists(true), SWAPPED).is_right();
    let toy = Toy::new((2, 1), lists(false), SWAPPED);
    assert_eq!(toy.goes_wrong(), (vec!["x: copy write / put read".to_owned()], true));
}

#[test]
fn an_early_signal_is_seen_before_the_write() {
    let lists: Lists = |_| {
        let mut first =
            copy(Place::me(rows(X, 0, ROWS)), Place::me(rows(TMP, 0, ROWS))).signal(Signal::one(At::ME, F, 0));
        first.signals[0].early = true;
        let second = copy(Place::me(rows(TMP, 0, ROWS)), Place::me(rows(Y, 0, ROWS))).wait(Wait::on(F, 0, 1));
        vec![vec![first, second]]
    };
    let want: Want = |_, _, row, col, x| x(row, col);
    assert_eq!(Toy::new((1, 1), lists, want).goes_wrong(), (vec!["tmp: copy read / copy write".to_owned()], true));
}

/// In the second run scratch still holds the values of the first: right values by luck are no longer right.
#[test]
fn values_of_an_earlier_run_are_wrong_in_the_next() {
    let lists: Lists = |_| {
        let first = copy(Place::me(rows(X, 0, ROWS)), Place::me(rows(TMP, 0, ROWS)));
        let second = copy(Place::me(rows(TMP, 0, ROWS)), Place::me(rows(Y, 0, ROWS)));
        vec![vec![second], vec![first]]
    };
    let toy = Toy::new((1, 1), lists, |_, _, row, col, x| x(row, col));
    let starved = Config { scheduler: Scheduler::Starve(RoleKind::Compute), runs: 1, ..Config::default() };
    assert!(toy.run(&starved).is_ok());
    let hasty = Config { scheduler: Scheduler::Starve(RoleKind::IntraComm), ..starved };
    match toy.run(&hasty) {
        Err(ExecError::Wrong(mismatch, _)) => assert!(mismatch.got.is_nan(), "poison: {mismatch}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_word_raised_twice_is_an_error() {
    let lists: Lists = |_| vec![vec![put(Publish::Immediate, false), put(Publish::Immediate, false), landed()]];
    let error = Toy::new((2, 1), lists, SWAPPED).run(&Config::default()).unwrap_err();
    assert!(matches!(error, ExecError::RaisedTwice { slot: 0, .. }), "{error}");
}

#[test]
fn a_stuck_run_names_every_cta_that_waits() {
    let lists: Lists = |_| {
        let wait = |slot, level| Task::new(Op::Sync).wait(Wait::on(F, slot, level));
        vec![vec![Task::new(Op::Sync).signal(Signal::one(At::ME, F, 0))], vec![wait(0, 2), wait(3, 1)]]
    };
    let error = Toy::new((1, 2), lists, SWAPPED).run(&Config::default()).unwrap_err();
    let ExecError::Stuck { left: 4, ref blocked, .. } = error else { panic!("{error}") };
    let named = |gpu, cta, task, slot, have, need| Blocked {
        rank: Rank { node: 0, gpu },
        launch: "main".into(),
        role: RoleKind::IntraComm,
        cta,
        task,
        flag: "f".into(),
        slot,
        have,
        need,
    };
    // Which CTA took which task is the scheduler's choice.
    let mut tasks: Vec<Blocked> = blocked.iter().map(|b| Blocked { cta: 0, ..b.clone() }).collect();
    tasks.sort();
    let want = [named(0, 0, 0, 0, 1, 2), named(0, 0, 1, 3, 0, 1), named(1, 0, 0, 0, 1, 2), named(1, 0, 1, 3, 0, 1)];
    assert_eq!(tasks, want);
    assert!(error.to_string().contains("task 1: waits for f[3], has 0, needs 1"), "{error}");
}

#[test]
fn a_role_without_ctas_is_an_error_before_anything_runs() {
    let lists: Lists = |_| vec![vec![], vec![Task::new(Op::Sync)]];
    let config = Config { split: RoleSplit { compute: 2, ..RoleSplit::default() }, ..Config::default() };
    let error = Toy::new((1, 1), lists, SWAPPED).run(&config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "main/intra_comm has tasks, but no CTA of its own and none that recycles into it; \
         split: compute=2,intra=0,send=0,reduce=0"
    );
}

#[test]
fn a_region_outside_its_buffer_is_an_error_before_anything_runs() {
    let lists: Lists = |_| vec![vec![copy(Place::me(rows(X, 4, ROWS)), Place::me(rows(Y, 0, ROWS)))]];
    let error = Toy::new((1, 1), lists, SWAPPED).run(&Config::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "illegal: rank (0, 0) main/compute task 0 (copy): region of x ends at byte 384, the buffer has 256"
    );
}

#[test]
fn a_seed_gives_one_run() {
    let lists: Lists = |_| vec![vec![put(Publish::SameQueueWrite, false), landed()]];
    let toy = Toy::new((2, 1), lists, SWAPPED);
    let steps = |seed| toy.run(&Config { seed, ..Config::default() }).map_or(0, |report| report.steps);
    assert_eq!((0..20).map(steps).collect::<Vec<_>>(), (0..20).map(steps).collect::<Vec<_>>());
}

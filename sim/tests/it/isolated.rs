//! Launches timed one by one: a rank comes late, helpers have ended before the clock starts.

use crate::support::*;
use tilewire_kernels::schedule::{At, Claim, CtaCount, Role};
use tilewire_kernels::{Fabric, OptionSet, RoleKind, RoleSplit, Schedule};
use tilewire_sim::bound::LowerBound;
use tilewire_sim::compile::{Compiled, Form, Late};
use tilewire_sim::engine::{self, Run};
use tilewire_sim::{Config, Execution, Machine, Prediction, Protocol, Simulation};

const ISOLATED: Protocol = Protocol::Published { stale_arrivals: false, isolated: true, launches: 20 };

fn isolated(execution: Execution) -> Config {
    Config { execution, protocol: ISOLATED, ..Config::default() }
}

fn predicted(schedule: &Schedule, machine: &Machine, config: &Config, split: RoleSplit) -> Prediction {
    Simulation::new(schedule, machine, config).expect("compiles").predict(&split).expect("runs")
}

fn time_ps(schedule: &Schedule, machine: &Machine, config: &Config, split: RoleSplit) -> u64 {
    Simulation::new(schedule, machine, config).expect("compiles").time_ps(&split).expect("runs")
}

fn compiled(schedule: &Schedule, machine: &Machine) -> Compiled {
    Compiled::new(schedule, machine, &isolated(Execution::Full)).expect("compiles")
}

/// What the clock of each rank shows, ps.
fn times(compiled: &Compiled, run: &Run) -> Vec<u64> {
    run.rank_ends.iter().enumerate().map(|(rank, end)| end - run.clock - compiled.late.of(rank)).collect()
}

/// A helper of 16 CTAs, then one tile-like copy of 1 us per rank behind a flag of the rank before.
fn in_a_row(gpus: u16) -> Schedule {
    let zero = Role { ctas: CtaCount::Fixed(16), ..role(RoleKind::IntraComm, Claim::Strided) };
    let launches = vec![launch("zero", vec![], vec![zero]), launch("main", vec![0], vec![compute()])];
    Toy::node(gpus, Vec::new()).launches(launches).symmetric().tasks(move |_, launch, _| {
        if launch == 0 {
            return vec![copy(At::ME, At::ME, 500_000); 16];
        }
        let first = copy(At::ME, At::ME, 50_000).signal(signal(At::local(1), 0));
        vec![first, copy(At::ME, At::ME, 50_000).wait(wait(0))]
    })
}

#[test]
fn early_ranks_wait_for_the_late_one_and_nobody_pays_for_the_helper() {
    let machine = round_machine(Fabric::IbRc);
    let schedule = in_a_row(4);
    let compiled = compiled(&schedule, &machine);
    assert_eq!(compiled.late, Late { rank: 3, ps: 200 * US, alike_ps: 0 });
    let run = engine::run(&compiled, &split(1, 0, 0, 0), Form::Whole, false).expect("runs");
    // 3 us for the command, 1 us of latency and 10 us of copies at 50 GB/s; the barrier takes a picosecond.
    assert_eq!(run.clock, 14 * US + 1);
    // A copy takes 1 us of latency and 1 us. Rank 0 waits for the late rank's first copy and its flag, 1 us over NVLink.
    let alone = 3 * US + 2 * 2 * US;
    assert_eq!(times(&compiled, &run), [3 * US + 200 * US + 2 * US + US + 2 * US, alone + US, alone + US, alone]);
    assert_eq!(time_ps(&schedule, &machine, &isolated(Execution::Full), split(1, 0, 0, 0)), 208 * US);
}

/// gemm_rs as published: its helper fills staging with zeros.
fn published(nodes: u16, gpus: u16, machine: &Machine) -> Case {
    let cases = kernels(OptionSet::Published, cluster(nodes, gpus), machine.fabric, 1);
    cases.into_iter().find(|case| case.schedule.kernel == "gemm_rs").expect("a published form")
}

#[test]
fn the_published_helper_ends_on_every_rank_before_the_clock_starts() {
    let machine = shipped_machine("h200-efa");
    let case = published(2, 4, &machine);
    let compiled = compiled(&case.schedule, &machine);
    let run = engine::run(&compiled, &case.usual_split(), Form::Whole, false).expect("runs");
    for (rank, launches) in run.launches_of.iter().enumerate() {
        let &[zero, main] = launches.as_slice() else { panic!("a helper and the kernel, not {launches:?}") };
        assert!(zero.1 > zero.0 && zero.1 < run.clock, "rank {rank}: {zero:?} and {}", run.clock);
        assert_eq!(main.0, run.clock + compiled.times.launch + compiled.late.of(rank), "rank {rank}");
    }
    let slow = with(machine.clone(), &[("sm.fill_cta_gbs", 2.0)]);
    let time = |machine: &Machine, config: &Config| time_ps(&case.schedule, machine, config, case.usual_split());
    assert!(time(&slow, &full()) > time(&machine, &full()) + 5 * US, "the helper takes time");
    for execution in [Execution::Full, Execution::Mirror] {
        let config = isolated(execution);
        assert_eq!(time(&slow, &config), time(&machine, &config), "{execution:?}");
    }
}

#[test]
fn ranks_that_are_late_alike_add_their_delay() {
    let machine = shipped_machine("h200-efa");
    let prompt = with(machine.clone(), &[("launch.isolated_us", 0.0)]);
    let late = machine.launch.isolated_us.value;
    for case in
        kernels(OptionSet::Tilewire, cluster(2, 2), machine.fabric, 1).into_iter().chain([published(2, 2, &machine)])
    {
        let of = |machine, execution| predicted(&case.schedule, machine, &isolated(execution), case.usual_split());
        let (alike, none) = (of(&machine, Execution::Mirror), of(&prompt, Execution::Full));
        for (alike, none) in [(alike.time_us, none.time_us), (alike.comm_only_us, none.comm_only_us)] {
            assert!((alike - none - late).abs() < 1e-6, "{}: {alike} and {none}", case.name);
        }
    }
}

/// Also where compute waits for the late rank's compute: stores of a rank's own tiles open chunks to the adds of others.
#[test]
fn compute_alone_holds_no_delay_whichever_ranks_are_simulated() {
    let machine = shipped_machine("h200-efa");
    let prompt = with(machine.clone(), &[("launch.isolated_us", 0.0)]);
    let cases = kernels(OptionSet::Tilewire, cluster(2, 2), machine.fabric, 1).into_iter();
    for case in cases.chain([published(2, 2, &machine)]).filter(|case| case.schedule.symmetry.is_full()) {
        let of = |machine, execution| {
            predicted(&case.schedule, machine, &isolated(execution), case.usual_split()).compute_only_us.to_bits()
        };
        let prompt = of(&prompt, Execution::Full);
        for execution in [Execution::Full, Execution::Mirror, Execution::Folded] {
            assert_eq!(of(&machine, execution), prompt, "{} {execution:?}", case.name);
        }
    }
}

/// Compute alone is timed as if all started together, communication alone waits for the late rank.
#[test]
fn the_parts_are_timed_by_the_same_clock() {
    let machine = shipped_machine("h200-efa");
    let prompt = with(machine.clone(), &[("launch.isolated_us", 0.0)]);
    let case = published(2, 4, &machine);
    let of = |machine| predicted(&case.schedule, machine, &isolated(Execution::Full), case.usual_split());
    let (late, none) = (of(&machine), of(&prompt));
    let us = machine.launch.isolated_us.value;
    assert!((late.compute_only_us - none.compute_only_us).abs() < 1e-9);
    for (late, none) in [(late.time_us, none.time_us), (late.comm_only_us, none.comm_only_us)] {
        assert!(late > none + 0.9 * us && late < none + 1.1 * us, "{late} and {none}");
    }
}

/// By symmetry exactly; where ranks have different lists, to a few percent.
#[test]
fn which_rank_is_late_hardly_matters() {
    let machine = shipped_machine("h200-efa");
    let mut symmetric = 0;
    for (nodes, gpus) in [(2, 2), (2, 4)] {
        for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1)) {
            let mut compiled = compiled(&case.schedule, &machine);
            let longest: Vec<u64> = (0..compiled.ranks.len())
                .map(|rank| {
                    compiled.late.rank = rank;
                    let run = engine::run(&compiled, &case.usual_split(), Form::Whole, false).expect("runs");
                    times(&compiled, &run).into_iter().max().expect("some ranks")
                })
                .collect();
            let (least, most) = longest.iter().fold((u64::MAX, 0), |(a, b), &time| (a.min(time), b.max(time)));
            println!("{}: {least} to {most} ps", case.name);
            if case.schedule.symmetry.is_full() {
                assert_eq!(least, most, "{}", case.name);
                symmetric += 1;
            }
            assert!((most - least) as f64 <= 0.05 * least as f64, "{}: {least} to {most} ps", case.name);
        }
    }
    assert!(symmetric > 10, "only {symmetric}");
}

#[test]
fn the_seed_draws_the_late_rank_and_noise_adds_to_its_delay() {
    let silent = [("noise.network_sigma", 0.0), ("noise.flag_sigma", 0.0), ("noise.clock_sigma", 0.0)];
    let machine = with(round_machine(Fabric::IbRc), &silent);
    let schedule = in_a_row(4);
    let mut ranks: Vec<usize> = (0..30)
        .map(|seed| {
            let config = Config { noise_seed: Some(seed), ..isolated(Execution::Full) };
            let late = Compiled::new(&schedule, &machine, &config).expect("compiles").late;
            assert_eq!((late.ps, late.alike_ps), (300 * US, 0), "seed {seed}");
            assert_eq!(time_ps(&schedule, &machine, &config, split(1, 0, 0, 0)), 308 * US, "seed {seed}");
            late.rank
        })
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    assert_eq!(ranks, [0, 1, 2, 3]);
}

/// Nobody waits for the late rank here: the link of rank 0 is in use for longer than any rank's clock runs.
#[test]
fn what_ranks_share_may_take_longer_than_any_rank() {
    let narrow = [("nvlink.ingress_gbs", 10.0)];
    let machine = with(round_machine(Fabric::IbRc), &narrow);
    let schedule = Toy::node(4, vec![compute()]).tasks(|rank, _, _| {
        let to_first = At::local((4 - rank.gpu) % 4);
        if rank.gpu == 0 { vec![copy(At::ME, At::ME, 1000)] } else { vec![copy(At::ME, to_first, 1_000_000)] }
    });
    let time_and_bound = |machine: &Machine| {
        let simulation = Simulation::new(&schedule, machine, &isolated(Execution::Full)).expect("compiles");
        let time = simulation.time_ps(&split(1, 0, 0, 0)).expect("runs");
        (time, LowerBound::new(&simulation).at_most([1, 0, 0, 0]))
    };
    let (together, all) = time_and_bound(&with(machine.clone(), &[("launch.isolated_us", 0.0)]));
    let (time, least) = time_and_bound(&machine);
    assert!(all > 300 * US && together >= all, "{together} and {all} ps: three megabytes through the link");
    assert!(time < 220 * US && time >= least, "{time} and {least} ps: two of them, the third comes late");
}

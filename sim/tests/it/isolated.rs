//! Launches timed one by one: what the host takes, helpers that have ended before the clock starts, a late rank.

use crate::support::*;
use tilewire_kernels::schedule::{At, Claim, CtaCount, Role};
use tilewire_kernels::{Fabric, OptionSet, RoleKind, RoleSplit, Schedule};
use tilewire_sim::bound::LowerBound;
use tilewire_sim::compile::{Compiled, Form, Late};
use tilewire_sim::engine::{self, Run};
use tilewire_sim::{Config, Execution, Machine, Prediction, Simulation};

/// Noise that is nothing but a late rank.
const SILENT: &[(&str, f64)] = &[("noise.network_sigma", 0.0), ("noise.flag_sigma", 0.0), ("noise.clock_sigma", 0.0)];

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
fn the_clock_starts_behind_the_helper_with_the_hosts_work() {
    let machine = round_machine(Fabric::IbRc);
    let schedule = in_a_row(4);
    let compiled = compiled(&schedule, &machine);
    assert_eq!(compiled.late.ps, 0);
    let run = engine::run(&compiled, &split(1, 0, 0, 0), Form::Whole, false).expect("runs");
    // 3 us for the command, 1 us of latency and 10 us of copies at 50 GB/s; the barrier takes a picosecond.
    assert_eq!(run.clock, 14 * US + 1);
    // Two copies, each 1 us of latency and 1 us, and between them the flag of the rank before, 1 us over NVLink.
    assert_eq!(times(&compiled, &run), [3 * US + 2 * US + US + 2 * US; 4]);
    for execution in [Execution::Full, Execution::Folded, Execution::Mirror] {
        assert_eq!(time_ps(&schedule, &machine, &isolated(execution), split(1, 0, 0, 0)), 208 * US, "{execution:?}");
    }
}

#[test]
fn early_ranks_wait_for_the_late_one() {
    let machine = round_machine(Fabric::IbRc);
    let schedule = in_a_row(4);
    let mut compiled = compiled(&schedule, &machine);
    compiled.late = Late { rank: 3, ps: 200 * US };
    let run = engine::run(&compiled, &split(1, 0, 0, 0), Form::Whole, false).expect("runs");
    assert_eq!(run.clock, 14 * US + 1);
    // Rank 0 waits for the late rank's first copy and its flag, 1 us over NVLink.
    let alone = 3 * US + 2 * 2 * US;
    assert_eq!(times(&compiled, &run), [3 * US + 200 * US + 2 * US + US + 2 * US, alone + US, alone + US, alone]);
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
        assert_eq!(main.0, run.clock + compiled.times.launch, "rank {rank}");
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
fn what_the_host_takes_is_added_to_every_time() {
    let machine = shipped_machine("h200-efa");
    let prompt = with(machine.clone(), &[("launch.isolated_us", 0.0)]);
    let us = machine.launch.isolated_us.value;
    for case in
        kernels(OptionSet::Tilewire, cluster(2, 2), machine.fabric, 1).into_iter().chain([published(2, 2, &machine)])
    {
        let of = |machine, execution| predicted(&case.schedule, machine, &isolated(execution), case.usual_split());
        let none = of(&prompt, Execution::Full);
        let of_none = [none.time_us, none.compute_only_us, none.comm_only_us];
        let executions = if case.schedule.symmetry.is_full() {
            vec![Execution::Full, Execution::Folded, Execution::Mirror]
        } else {
            vec![Execution::Full, Execution::Folded]
        };
        for execution in executions {
            let some = of(&machine, execution);
            for (some, none) in [some.time_us, some.compute_only_us, some.comm_only_us].into_iter().zip(of_none) {
                assert!((some - none - us).abs() < 1e-6, "{} {execution:?}: {some} and {none}", case.name);
            }
        }
    }
}

#[test]
fn which_rank_is_late_does_not_matter_where_all_are_alike() {
    let machine = shipped_machine("h200-efa");
    let mut symmetric = 0;
    for (nodes, gpus) in [(2, 2), (2, 4)] {
        let cases = SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1));
        for case in cases.filter(|case| case.schedule.symmetry.is_full()) {
            let mut compiled = compiled(&case.schedule, &machine);
            let longest: Vec<u64> = (0..compiled.ranks.len())
                .map(|rank| {
                    compiled.late = Late { rank, ps: 200 * US };
                    let run = engine::run(&compiled, &case.usual_split(), Form::Whole, false).expect("runs");
                    times(&compiled, &run).into_iter().max().expect("some ranks")
                })
                .collect();
            let (least, most) = longest.iter().fold((u64::MAX, 0), |(a, b), &time| (a.min(time), b.max(time)));
            assert_eq!(least, most, "{}", case.name);
            symmetric += 1;
        }
    }
    assert!(symmetric > 10, "only {symmetric}");
}

#[test]
fn the_seed_draws_the_late_rank() {
    let machine = with(round_machine(Fabric::IbRc), SILENT);
    let schedule = in_a_row(4);
    let mut ranks: Vec<usize> = (0..30)
        .map(|seed| {
            let config = Config { noise_seed: Some(seed), ..isolated(Execution::Full) };
            let late = Compiled::new(&schedule, &machine, &config).expect("compiles").late;
            assert_eq!(late.ps, 100 * US, "seed {seed}");
            // The rank after the late one waits for it; 200 us of the host.
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
    let narrow = [("nvlink.ingress_gbs", 10.0), ("launch.isolated_us", 0.0)];
    let machine = with(with(round_machine(Fabric::IbRc), SILENT), &narrow);
    let schedule = Toy::node(4, vec![compute()]).tasks(|rank, _, _| {
        let to_first = At::local((4 - rank.gpu) % 4);
        if rank.gpu == 0 { vec![copy(At::ME, At::ME, 1000)] } else { vec![copy(At::ME, to_first, 1_000_000)] }
    });
    let time_and_bound = |late_us: f64, noise_seed| {
        let machine = with(machine.clone(), &[("noise.late_rank_us", late_us)]);
        let config = Config { noise_seed, ..isolated(Execution::Full) };
        let simulation = Simulation::new(&schedule, &machine, &config).expect("compiles");
        let time = simulation.time_ps(&split(1, 0, 0, 0)).expect("runs");
        (time, LowerBound::new(&simulation).at_most([1, 0, 0, 0]), simulation.compiled().late.rank)
    };
    let (together, all, _) = time_and_bound(0.0, None);
    assert!(all > 300 * US && together >= all, "{together} and {all} ps: three megabytes through the link");
    let another = (0..20).map(|seed| time_and_bound(200.0, Some(seed))).find(|&(_, _, rank)| rank > 0);
    let (time, least, _) = another.expect("some seed");
    assert!(time < 220 * US && time >= least, "{time} and {least} ps: two of them, the third comes late");
}

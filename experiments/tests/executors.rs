//! The simulator and the functional executor run the same schedules and share no code: they must agree on which tasks ran,
//! and where a run gets stuck on who waits for what.

#[path = "../../hw/tests/mutate/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod mutate;
#[path = "../../hw/tests/random/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod random;
#[path = "../../kernels/tests/small/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use mutate::{Mutation, broken, mutants};
use random::Random;
use small::{case, cases};
use std::collections::BTreeSet;
use tilewire_hw::values::{self, ExecError, Scheduler};
use tilewire_kernels::schedule::CtaCount;
use tilewire_kernels::{
    Blocked, Cluster, Fabric, KERNELS, Kernel, OptionSet, Rank, RoleKind, RoleSplit, Schedule, Spec,
};
use tilewire_sim::compile::Form;
use tilewire_sim::{Config, Execution, Machine, SimError, Simulation};

/// Who waits for what, whichever CTA it is.
type Waiting = BTreeSet<(Rank, String, RoleKind, u32, String, u32, u32, u32)>;

/// How a run ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// So many tasks ran.
    All(u64),
    Stuck(Waiting),
}

fn machine(fabric: Fabric) -> Machine {
    let (name, text) = match fabric {
        Fabric::IbRc => ("h200-cx7.toml", include_str!("../../data/machines/h200-cx7.toml")),
        Fabric::EfaSrd => ("h200-efa.toml", include_str!("../../data/machines/h200-efa.toml")),
        Fabric::Loopback => ("h200-1gpu.toml", include_str!("../../data/machines/h200-1gpu.toml")),
    };
    Machine::parse(name, text).expect("a shipped machine")
}

fn waiting(blocked: &[Blocked]) -> Waiting {
    let key = |b: &Blocked| (b.rank, b.launch.clone(), b.role, b.task, b.flag.clone(), b.slot, b.have, b.need);
    blocked.iter().map(key).collect()
}

/// Tasks of all ranks.
fn all_tasks(schedule: &Schedule) -> BTreeSet<(u32, u32, u32)> {
    let mut all = BTreeSet::new();
    for rank in schedule.cluster.iter() {
        for (role, (l, r)) in schedule.role_indices().enumerate() {
            let mut index = 0;
            schedule.for_each_task(rank, l, r, |_| {
                all.insert((schedule.cluster.number(rank) as u32, role as u32, index));
                index += 1;
            });
        }
    }
    all
}

/// So many CTAs for each role that has work; the simulator takes no others.
fn split(schedule: &Schedule, ctas: u32) -> RoleSplit {
    let mut split = RoleSplit::default();
    for (l, r) in schedule.role_indices() {
        let role = &schedule.launches[l].roles[r];
        let works = schedule.cluster.iter().any(|rank| !schedule.tasks(rank, l, r).is_empty());
        if works && role.ctas == CtaCount::FromSplit {
            split.set(role.kind, ctas);
        }
    }
    split
}

fn simulated(schedule: &Schedule, machine: &Machine, split: &RoleSplit) -> End {
    let config = Config { execution: Execution::Full, ..Config::default() };
    let simulation = Simulation::new(schedule, machine, &config).expect("it compiles");
    match simulation.run(split, Form::Whole, true) {
        Ok(run) => {
            let compiled = simulation.compiled();
            let ran: Vec<(u32, u32, u32)> = run
                .timeline
                .iter()
                .map(|time| {
                    let number = schedule.cluster.number(compiled.ranks[time.rank as usize]) as u32;
                    let roles = &compiled.programs[compiled.program_of[time.rank as usize] as usize].roles;
                    let first: u32 = roles[..time.role as usize].iter().map(|role| role.tasks).sum();
                    (number, time.role, time.task - first)
                })
                .collect();
            let set: BTreeSet<_> = ran.iter().copied().collect();
            assert_eq!(set.len(), ran.len(), "a task ran twice");
            assert_eq!(set, all_tasks(schedule), "other tasks than those of the schedule ran");
            End::All(ran.len() as u64)
        }
        Err(SimError::Stuck { blocked, .. }) => End::Stuck(waiting(&blocked)),
        Err(error) => panic!("{error}"),
    }
}

/// None where the executor refuses for a reason that the simulator does not look at.
fn executed(
    schedule: &Schedule,
    kernel: &dyn Kernel,
    spec: &Spec,
    split: RoleSplit,
    sms: u32,
    seed: u64,
) -> Option<End> {
    let config = values::Config {
        split,
        sms,
        seed,
        scheduler: Scheduler::ALL[seed as usize % Scheduler::ALL.len()],
        runs: 1,
        check_races: false,
        ..values::Config::default()
    };
    match values::run(schedule, kernel, spec, &config) {
        Ok(report) => Some(End::All(report.tasks)),
        // Wrong or not, all tasks ran.
        Err(ExecError::Wrong(..)) => Some(End::All(all_tasks(schedule).len() as u64)),
        Err(ExecError::Stuck { blocked, .. }) => Some(End::Stuck(waiting(&blocked))),
        Err(ExecError::RaisedTwice { .. } | ExecError::Illegal { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn they_run_the_same_tasks_of_random_schedules() {
    for seed in 0..128 {
        let program = Random::new(seed, 2 + (seed % 20) as u32);
        let (schedule, spec) = (program.schedule(), program.spec());
        let machine = machine(schedule.fabric);
        let split = split(&schedule, 1 + (seed % 4) as u32);
        let ran = simulated(&schedule, &machine, &split);
        assert!(matches!(ran, End::All(_)), "{seed}: {ran:?}");
        assert_eq!(Some(ran), executed(&schedule, &program, &spec, split, 132, seed), "{seed}");
    }
}

#[test]
fn they_run_the_same_tasks_of_every_kernel() {
    for set in [OptionSet::Tilewire, OptionSet::Published] {
        for (i, case) in cases(set, Fabric::EfaSrd).iter().enumerate() {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            let split = split(&schedule, 1 + i as u32 % 3);
            let ran = simulated(&schedule, &machine(Fabric::EfaSrd), &split);
            assert!(matches!(ran, End::All(_)), "{}: {ran:?}", case.name());
            assert_eq!(
                Some(ran),
                executed(&schedule, case.kernel, &case.spec, split, 132, i as u64),
                "{}",
                case.name()
            );
        }
    }
}

/// Broken schedules: where one gets stuck, so does the other, with the same tasks at the same flags.
#[test]
fn they_get_stuck_at_the_same_flags() {
    let (mut stuck, mut ended) = (0, 0);
    let mut compare = |name: &str, kernel: &dyn Kernel, spec: &Spec, build: &dyn Fn() -> Schedule| {
        let machine = machine(build().fabric);
        let order = |mutation: &Mutation| {
            !matches!(
                mutation,
                Mutation::ShiftRegion(_) | Mutation::Shrink | Mutation::Early(_) | Mutation::SeparateWord
            )
        };
        for (i, mutant) in mutants(&build()).into_iter().filter(|mutant| order(&mutant.mutation)).enumerate() {
            let schedule = broken(build, mutant);
            let split = split(&schedule, 1 + i as u32 % 3);
            let Some(executed) = executed(&schedule, kernel, spec, split, 132, i as u64) else { continue };
            let simulated = simulated(&schedule, &machine, &split);
            assert_eq!(executed, simulated, "{name}: {mutant:?} with {split}");
            *(if matches!(executed, End::Stuck(_)) { &mut stuck } else { &mut ended }) += 1;
        }
    };
    for &kernel in KERNELS {
        for (nodes, gpus_per_node) in [(1, 2), (2, 1)] {
            let cluster = Cluster { nodes, gpus_per_node };
            let Ok(case) = case(kernel, OptionSet::Tilewire, cluster, Fabric::EfaSrd) else { continue };
            compare(&case.name(), kernel, &case.spec, &|| kernel.build(&case.spec).expect("a small case builds"));
        }
    }
    for seed in 0..12 {
        let program = Random::new(seed, 12);
        compare(&format!("random {seed}"), &program, &program.spec(), &|| program.schedule());
    }
    println!("{stuck} stuck, {ended} ended");
    assert!(stuck > 200 && ended > 200, "{stuck} stuck, {ended} ended: too few of one kind to show anything");
}

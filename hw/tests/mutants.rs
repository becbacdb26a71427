//! Broken schedules must be told: by the checker, by a run that gets stuck, by a race, or by a wrong value.
//!
//! Every kernel's `tilewire` schedule is broken in one place on all ranks alike, so that it stays symmetric.

#[path = "../../kernels/tests/small/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

#[allow(dead_code, reason = "each suite uses a part of it")]
mod mutate;
#[path = "random/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod random;

use mutate::{Mutant, Mutation, broken, is_equivalent, mutants};
use random::Random;
use small::{Case, case};
use std::collections::BTreeMap;
use tilewire_hw::values::{Config, ExecError, Scheduler, run};
use tilewire_kernels::check::{Problem, access_order, check_fatal, check_hazards, has_fatal};
use tilewire_kernels::text::task_text;
use tilewire_kernels::{Cluster, Fabric, KERNELS, Kernel, OptionSet, RoleKind, RoleSplit, Schedule, Spec};

fn build(case: &Case) -> Schedule {
    case.kernel.build(&case.spec).expect("a small case builds")
}

/// Clusters that show every wait of a kernel at work: landing buffers of ring attention come back at four nodes.
fn small_cases(set: OptionSet, clusters: &[(u16, u16)]) -> Vec<Case> {
    let mut all = Vec::new();
    for &kernel in KERNELS {
        for &(nodes, gpus_per_node) in clusters {
            all.extend(case(kernel, set, Cluster { nodes, gpus_per_node }, Fabric::EfaSrd));
        }
    }
    all
}

const SCHEDULERS: [Scheduler; 8] = [
    Scheduler::Random,
    Scheduler::DelayedPuts,
    Scheduler::ReorderedPuts,
    Scheduler::Starve(RoleKind::Compute),
    Scheduler::Starve(RoleKind::IntraComm),
    Scheduler::Starve(RoleKind::InterSend),
    Scheduler::Starve(RoleKind::InterReduce),
    Scheduler::RoundRobin,
];

fn config(attempt: usize, ctas: u32) -> Config {
    let split = RoleSplit { compute: ctas, intra_comm: ctas, inter_send: ctas, inter_reduce: ctas };
    // Laggards find most, so every second attempt is theirs.
    let scheduler =
        if attempt.is_multiple_of(2) { Scheduler::Laggards } else { SCHEDULERS[attempt / 2 % SCHEDULERS.len()] };
    Config { split, sms: 4 * ctas, seed: attempt as u64, scheduler, runs: 1, ..Config::default() }
}

/// How a mutant was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    /// By the static checker: it cannot run.
    Fatal,
    /// By the static checker: it may compute wrong values.
    Hazard,
    /// By a run only: a wrong value, of data that flows in order to the wrong place.
    Value,
    /// By a run only, although it is about order. There must be none.
    Missed,
    /// Not at all, and shown to be equivalent.
    Equivalent,
    /// Not at all. There must be none.
    Survived,
}

/// Tells a mutant: by the checker, or else by some runs.
///
/// A mutant that only permutes lists, or only raises a level, needs no runs when the checker calls it clean: what comes
/// before what is said by flags, of which it takes none away, so that all conflicting accesses keep their order.
fn told(
    kernel: &dyn Kernel,
    spec: &Spec,
    whole: &Schedule,
    schedule: &Schedule,
    mutant: Mutant,
    attempts: usize,
) -> Told {
    let found = check_hazards(schedule, None);
    if has_fatal(&found) {
        return Told::Fatal;
    }
    if !found.is_empty() {
        return Told::Hazard;
    }
    for attempt in 0..attempts {
        let ctas = [64, 64, 2, 64, 64, 1][attempt / 2 % 6];
        match run(schedule, kernel, spec, &config(attempt, ctas)) {
            Ok(report) if report.races.is_empty() => {}
            Err(ExecError::Wrong(_, races)) if races.is_empty() => return Told::Value,
            _ => return Told::Missed,
        }
    }
    let equivalent = mutant.mutation.is_stricter()
        || is_equivalent(whole, mutant)
        || match mutant.mutation {
            // The same bytes from another place, or bytes that nobody needs. Without races every run computes the same,
            // and each attempt had inputs of its own.
            Mutation::ShiftRegion(_) | Mutation::Shrink => attempts >= 16,
            Mutation::DropTask => false,
            // The same tasks, and every byte is touched in the same order.
            _ => access_order(schedule) == access_order(whole),
        };
    if equivalent { Told::Equivalent } else { Told::Survived }
}

/// Counts how mutants were told, and keeps those that were not.
#[derive(Default)]
struct Table {
    counts: BTreeMap<&'static str, BTreeMap<Told, u32>>,
    wrong: Vec<String>,
}

impl Table {
    fn add(&mut self, name: &str, kernel: &dyn Kernel, spec: &Spec, build: &dyn Fn() -> Schedule, attempts: usize) {
        let whole = build();
        for mutant in mutants(&whole) {
            let schedule = broken(build, mutant);
            let how = told(kernel, spec, &whole, &schedule, mutant, attempts);
            *self.counts.entry(mutant.mutation.name()).or_default().entry(how).or_default() += 1;
            if matches!(how, Told::Missed | Told::Survived) {
                let Mutant { launch, role, index, mutation } = mutant;
                let task = &whole.tasks(whole.representatives()[0], launch, role)[index];
                let kind = &whole.launches[launch].roles[role].kind;
                self.wrong
                    .push(format!("{how:?} {name}: {mutation:?} {kind} task {index}: {}", task_text(&whole, task)));
            }
        }
    }

    fn print(&self) -> u32 {
        let mut total = 0;
        println!("{:26} mutants  fatal hazard  value equivalent missed", "mutation");
        for (name, how) in &self.counts {
            let of = |told: Told| how.get(&told).copied().unwrap_or(0);
            let all: u32 = how.values().sum();
            total += all;
            println!(
                "{name:26} {all:7} {:6} {:6} {:6} {:10} {:6}",
                of(Told::Fatal),
                of(Told::Hazard),
                of(Told::Value),
                of(Told::Equivalent),
                of(Told::Missed) + of(Told::Survived)
            );
        }
        println!("{:26} {total:7}", "all");
        total
    }
}

/// Every mutant of every kernel, and of random schedules, is told or equivalent; what is about order, statically.
#[test]
fn mutants_are_told() {
    let mut table = Table::default();
    for case in small_cases(OptionSet::Tilewire, &[(1, 2), (2, 2), (4, 1)]) {
        table.add(&case.name(), case.kernel, &case.spec, &|| build(&case), 16);
    }
    for seed in 0..24 {
        let program = Random::new(seed, 12);
        table.add(&format!("random {seed}"), &program, &program.spec(), &|| program.schedule(), 16);
    }
    let total = table.print();
    assert!(total >= 2000, "{total} mutants are too few");
    assert!(table.wrong.is_empty(), "{} mutants\n{}", table.wrong.len(), table.wrong.join("\n"));
}

/// The checker and the executor agree on what ends, also where they have not been tuned to agree.
#[test]
fn the_checker_knows_exactly_which_mutants_get_stuck() {
    let (mut stuck, mut ended) = (0, 0);
    let sets = [OptionSet::Tilewire, OptionSet::Published];
    for case in sets.iter().flat_map(|&set| small_cases(set, &[(1, 2), (2, 2), (3, 1)])) {
        for mutant in mutants(&build(&case)) {
            // Where bytes lie holds nobody back.
            if matches!(mutant.mutation, Mutation::ShiftRegion(_) | Mutation::Early(_)) {
                continue;
            }
            let mut schedule = broken(&|| build(&case), mutant);
            // The checker does not count on lanes.
            schedule.launches.iter_mut().flat_map(|launch| &mut launch.roles).for_each(|role| role.lanes = 1);
            let findings = check_fatal(&schedule, None);
            let blocks = |problem: &Problem| {
                matches!(problem, Problem::Cycle(_) | Problem::Unreachable { .. } | Problem::NeverRuns { .. })
            };
            let expected = findings.iter().any(|finding| blocks(&finding.problem));
            if has_fatal(&findings) && !expected && findings.iter().any(|f| matches!(f.problem, Problem::Shape(_))) {
                continue;
            }
            let config = Config { check_races: false, ..config(0, 1) };
            let got = match run(&schedule, case.kernel, &case.spec, &config) {
                Err(ExecError::Stuck { .. }) => true,
                Err(ExecError::RaisedTwice { .. }) => continue,
                _ => false,
            };
            assert_eq!(got, expected, "{}: {mutant:?}\n{findings:?}", case.name());
            if got { stuck += 1 } else { ended += 1 }
        }
    }
    println!("{stuck} stuck, {ended} ended");
    assert!(stuck > 100 && ended > 100, "{stuck} stuck, {ended} ended: too few of one kind to show anything");
}

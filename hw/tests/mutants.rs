//! Broken schedules must be told: by the checker, by a run that gets stuck, by a race, or by a wrong value.
//!
//! Every kernel's `tilewire` schedule is broken in one place on all ranks alike, so that it stays symmetric.

#[path = "../../kernels/tests/small/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::{Case, case, changed};
use std::collections::BTreeMap;
use tilewire_hw::values::{Config, ExecError, Scheduler, run};
use tilewire_kernels::check::{Problem, check_fatal, has_fatal};
use tilewire_kernels::schedule::{Flag, Op, Publish, Region, Wait};
use tilewire_kernels::text::task_text;
use tilewire_kernels::{Cluster, Fabric, KERNELS, OptionSet, RoleKind, RoleSplit, Schedule, Task};

/// How a task is broken; the number picks one of its waits, signals or regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mutation {
    DropWait(usize),
    RaiseLevel(usize),
    LowerLevel(usize),
    MoveWait(usize),
    DropSignal(usize),
    RaiseAdd(usize),
    MoveSignal(usize),
    Early(usize),
    ShiftRegion(usize),
    DropSent,
    /// The word of a put on a queue of its own.
    SeparateWord,
    DropTask,
    /// With the next task of the list.
    Swap,
    ReverseList,
}

impl Mutation {
    const fn name(self) -> &'static str {
        match self {
            Self::DropWait(_) => "drop a wait",
            Self::RaiseLevel(_) => "raise a level",
            Self::LowerLevel(_) => "lower a level",
            Self::MoveWait(_) => "wait on the next slot",
            Self::DropSignal(_) => "drop a signal",
            Self::RaiseAdd(_) => "raise an add",
            Self::MoveSignal(_) => "signal the next slot",
            Self::Early(_) => "make a signal early",
            Self::ShiftRegion(_) => "shift a region",
            Self::DropSent => "drop sent",
            Self::SeparateWord => "move a word to another queue",
            Self::DropTask => "drop a task",
            Self::Swap => "swap two tasks",
            Self::ReverseList => "reverse a list",
        }
    }

    /// Whether it only takes orders away, or changes the order of a list: what still ends is still right.
    const fn is_stricter(self) -> bool {
        matches!(self, Self::Swap | Self::ReverseList | Self::RaiseLevel(_))
    }

    /// All mutations of a task.
    fn of(task: &Task) -> Vec<Self> {
        let mut all = vec![Self::DropTask, Self::Swap, Self::ReverseList];
        for i in 0..task.waits.len() {
            all.extend([Self::DropWait(i), Self::RaiseLevel(i), Self::MoveWait(i)]);
            if task.waits[i].at_least > 1 {
                all.push(Self::LowerLevel(i));
            }
        }
        for i in 0..task.signals.len() {
            all.extend([Self::DropSignal(i), Self::RaiseAdd(i), Self::MoveSignal(i), Self::Early(i)]);
        }
        if let Op::Put { sent, .. } = task.op {
            all.push(Self::SeparateWord);
            all.extend(sent.map(|_| Self::DropSent));
        }
        all.extend((0..regions(&mut task.op.clone()).len()).map(Self::ShiftRegion));
        all
    }

    fn apply(self, schedule: &Schedule, tasks: &mut Vec<Task>, index: usize) {
        // Ranks with skeletons of their own may have another task here.
        if !Self::of(&tasks[index]).contains(&self) {
            return;
        }
        let slots = |family: tilewire_kernels::schedule::FamilyId| schedule.family(family).slots;
        match self {
            Self::DropWait(i) => {
                tasks[index].waits.remove(i);
            }
            Self::RaiseLevel(i) => tasks[index].waits[i].at_least += 1,
            Self::LowerLevel(i) => tasks[index].waits[i].at_least -= 1,
            Self::MoveWait(i) => {
                let wait = &mut tasks[index].waits[i];
                wait.flag.slot = (wait.flag.slot + 1) % slots(wait.flag.family).max(1);
            }
            Self::DropSignal(i) => {
                tasks[index].signals.remove(i);
            }
            Self::RaiseAdd(i) => tasks[index].signals[i].add += 1,
            Self::MoveSignal(i) => {
                let signal = &mut tasks[index].signals[i];
                signal.flag.slot = (signal.flag.slot + 1) % slots(signal.flag.family).max(1);
            }
            Self::Early(i) => tasks[index].signals[i].early = true,
            Self::ShiftRegion(i) => {
                if let Some(region) = regions(&mut tasks[index].op).into_iter().nth(i) {
                    let bytes = schedule.buffer(region.buffer).bytes;
                    // By the length of a row, so that it is whole pieces and other data; backwards at the end.
                    let step = u64::from(region.row_bytes);
                    region.offset = if region.end() + step <= bytes {
                        region.offset + step
                    } else {
                        region.offset.saturating_sub(step)
                    };
                }
            }
            Self::DropSent => {
                if let Op::Put { sent, .. } = &mut tasks[index].op {
                    *sent = None;
                }
            }
            Self::SeparateWord => {
                if let Op::Put { queue, publish, .. } = &mut tasks[index].op {
                    *publish = Publish::SeparateWrite { queue: *queue + 1 };
                }
            }
            Self::DropTask => {
                tasks.remove(index);
            }
            Self::Swap => {
                if index + 1 < tasks.len() {
                    tasks.swap(index, index + 1);
                }
            }
            Self::ReverseList => tasks.reverse(),
        }
    }
}

/// The regions of an op.
fn regions(op: &mut Op) -> Vec<&mut Region> {
    match op {
        Op::GemmTile { a, b, outs, .. } => {
            [a, b].into_iter().chain(outs.iter_mut().map(|out| &mut out.place.region)).collect()
        }
        Op::AttentionTile { q, k, v, state, out, .. } => {
            let out = out.iter_mut().flat_map(|out| [&mut out.o, &mut out.l]);
            [q, k, v].into_iter().chain(state.iter_mut()).chain(out).collect()
        }
        Op::AttentionMerge { parts, out } => {
            parts.iter_mut().chain([out]).flat_map(|part| [&mut part.o, &mut part.l]).collect()
        }
        Op::Copy { src, dsts, .. } => [src].into_iter().chain(dsts).map(|place| &mut place.region).collect(),
        Op::GatherRows { dst, .. } => vec![dst],
        Op::Reduce { inputs, outputs, .. } => inputs.iter_mut().chain(outputs).map(|place| &mut place.region).collect(),
        Op::Put { src, dst, .. } => vec![src, &mut dst.region],
        Op::Collective { src, dst, .. } => vec![src, dst],
        Op::Fill { dst } => vec![&mut dst.region],
        Op::Sync => vec![],
    }
}

/// One broken place of a case's schedule.
#[derive(Clone, Copy, Debug)]
struct Mutant {
    launch: usize,
    role: usize,
    index: usize,
    mutation: Mutation,
}

fn build(case: &Case) -> Schedule {
    case.kernel.build(&case.spec).expect("a small case builds")
}

fn broken(case: &Case, mutant: Mutant) -> Schedule {
    let whole = build(case);
    changed(build(case), move |_, launch, role, tasks| {
        if (launch, role) == (mutant.launch, mutant.role) && mutant.index < tasks.len() {
            mutant.mutation.apply(&whole, tasks, mutant.index);
        }
    })
}

/// Mutants of the first two, of three middle and of the last task of every role.
fn mutants(case: &Case) -> Vec<Mutant> {
    let schedule = build(case);
    let rank = schedule.representatives()[0];
    let mut mutants = Vec::new();
    for (launch, role) in schedule.role_indices() {
        let tasks = schedule.tasks(rank, launch, role);
        let n = tasks.len();
        let mut places = vec![0, 1, n / 3, n / 2, 2 * n / 3, n.saturating_sub(1)];
        places.sort_unstable();
        places.dedup();
        for index in places.into_iter().filter(|&index| index < tasks.len()) {
            mutants.extend(Mutation::of(&tasks[index]).into_iter().map(|mutation| Mutant {
                launch,
                role,
                index,
                mutation,
            }));
        }
    }
    mutants
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
    Config { split, sms: 4 * ctas, seed: attempt as u64, scheduler, runs: 1, check_races: true }
}

/// How a mutant was told, within some attempts.
fn killed_by(case: &Case, schedule: &Schedule, attempts: usize) -> Option<&'static str> {
    if !check_fatal(schedule, None).is_empty() {
        return Some("checker");
    }
    (0..attempts).find_map(|attempt| {
        let ctas = [64, 64, 2, 64, 64, 1][attempt / 2 % 6];
        match run(schedule, case.kernel, &case.spec, &config(attempt, ctas)) {
            Ok(report) if report.races.is_empty() => None,
            Ok(_) => Some("race"),
            Err(ExecError::Stuck { .. }) => Some("stuck"),
            Err(ExecError::Wrong(..)) => Some("value"),
            Err(_) => Some("error"),
        }
    })
}

/// Whether a mutant that no run told apart cannot be told apart, by one of three arguments.
///
/// *A put of no bytes* has no data that its word could overtake and no bytes that could be elsewhere.
/// *Lower level*: the adds to a flag are multiples of g, so its value is, and a level means the next multiple of g.
/// *Larger add* of a task that itself waits for level w of the flag: with the old add the value was at least w + add
/// afterwards, and nobody waits for more.
fn is_equivalent(schedule: &Schedule, Mutant { launch, role, index, mutation }: Mutant) -> bool {
    let rank = schedule.representatives()[0];
    let task = &schedule.tasks(rank, launch, role)[index];
    let all: Vec<Task> = schedule.role_indices().flat_map(|(l, r)| schedule.tasks(rank, l, r)).collect();
    let slots = |wait: &Wait| wait.slots().map(|slot| Flag { slot, ..wait.flag }).collect::<Vec<_>>();
    match mutation {
        Mutation::LowerLevel(i) => {
            let wait = &task.waits[i];
            let flags = slots(wait);
            let adds = all.iter().flat_map(|task| &task.signals).filter(|s| flags.contains(&s.flag)).map(|s| s.add);
            let divisor = adds.fold(0, gcd);
            divisor > 0 && wait.at_least.div_ceil(divisor) == (wait.at_least - 1).div_ceil(divisor)
        }
        Mutation::RaiseAdd(i) => {
            let signal = task.signals[i];
            let levels = |tasks: &[Task]| {
                let waits = tasks.iter().flat_map(|task| &task.waits);
                waits.filter(|wait| slots(wait).contains(&signal.flag)).map(|wait| wait.at_least).max()
            };
            let own = levels(std::slice::from_ref(task));
            own.is_some_and(|own| levels(&all).is_some_and(|highest| highest <= own + signal.add))
        }
        Mutation::SeparateWord | Mutation::ShiftRegion(_) => {
            matches!(&task.op, Op::Put { dst, .. } if dst.region.bytes() == 0)
        }
        _ => false,
    }
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[test]
fn mutants_are_told() {
    let mut tally: BTreeMap<&str, BTreeMap<&str, u32>> = BTreeMap::new();
    let mut survivors = Vec::new();
    for case in small_cases(OptionSet::Tilewire, &[(1, 2), (2, 2), (4, 1)]) {
        for mutant in mutants(&case) {
            if mutant.mutation.is_stricter() {
                continue;
            }
            let schedule = broken(&case, mutant);
            let how = killed_by(&case, &schedule, 64).unwrap_or("equivalent");
            *tally.entry(mutant.mutation.name()).or_default().entry(how).or_default() += 1;
            let whole = build(&case);
            if how == "equivalent" && !is_equivalent(&whole, mutant) {
                let Mutant { launch, role, index, mutation } = mutant;
                let task = &whole.tasks(whole.representatives()[0], launch, role)[index];
                let name = &whole.launches[launch].roles[role].kind;
                let text = task_text(&whole, task);
                survivors.push(format!("{}: {mutation:?} {name} task {index}: {text}", case.name()));
            }
        }
    }
    for (name, how) in &tally {
        println!("{name:22} {how:?}");
    }
    assert!(survivors.is_empty(), "{} mutants survive\n{}", survivors.len(), survivors.join("\n"));
}

/// The checker and the executor agree on what ends, also where they have not been tuned to agree.
#[test]
fn the_checker_knows_exactly_which_mutants_get_stuck() {
    let (mut stuck, mut ended) = (0, 0);
    let sets = [OptionSet::Tilewire, OptionSet::Published];
    for case in sets.iter().flat_map(|&set| small_cases(set, &[(1, 2), (2, 2), (3, 1)])) {
        for mutant in mutants(&case) {
            // Where bytes lie holds nobody back.
            if matches!(mutant.mutation, Mutation::ShiftRegion(_) | Mutation::Early(_)) {
                continue;
            }
            let mut schedule = broken(&case, mutant);
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

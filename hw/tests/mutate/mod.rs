//! Ways to break a schedule in one place, on all ranks alike, so that it stays symmetric.

use crate::small::changed;
use tilewire_kernels::schedule::{Flag, FlagFamily, Op, Publish, Region, Wait};
use tilewire_kernels::{Schedule, Task};

/// How a task is broken; the number picks one of its waits, signals or regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mutation {
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
    LowerAdd(usize),
    /// With a signal of the same family of a later task.
    SwapSlots(usize),
    /// All regions of a copy, put or fill lose a row.
    Shrink,
    /// A wait looks at the other bank, which is zero.
    WaitBank(usize),
    /// A signal goes to the other bank, which nobody reads in this run.
    SignalBank(usize),
}

impl Mutation {
    pub const fn name(self) -> &'static str {
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
            Self::LowerAdd(_) => "lower an add",
            Self::SwapSlots(_) => "swap two slots",
            Self::Shrink => "shrink a region",
            Self::WaitBank(_) => "wait on the wrong bank",
            Self::SignalBank(_) => "signal the wrong bank",
        }
    }

    /// Whether it only takes orders away, or changes the order of a list: what still ends is still right.
    pub const fn is_stricter(self) -> bool {
        matches!(self, Self::Swap | Self::ReverseList | Self::RaiseLevel(_))
    }

    /// All mutations of a task.
    pub fn of(task: &Task) -> Vec<Self> {
        let mut all = vec![Self::DropTask, Self::Swap, Self::ReverseList];
        for i in 0..task.waits.len() {
            all.extend([Self::DropWait(i), Self::RaiseLevel(i), Self::MoveWait(i), Self::WaitBank(i)]);
            if task.waits[i].at_least > 1 {
                all.push(Self::LowerLevel(i));
            }
        }
        for i in 0..task.signals.len() {
            all.extend([Self::DropSignal(i), Self::RaiseAdd(i), Self::MoveSignal(i), Self::Early(i)]);
            all.extend([Self::SwapSlots(i), Self::SignalBank(i)]);
            if task.signals[i].add > 1 {
                all.push(Self::LowerAdd(i));
            }
        }
        if let Op::Put { sent, .. } = task.op {
            all.push(Self::SeparateWord);
            all.extend(sent.map(|_| Self::DropSent));
        }
        if matches!(task.op, Op::Copy { .. } | Op::Put { .. } | Op::Fill { .. }) {
            all.push(Self::Shrink);
        }
        all.extend((0..regions(&mut task.op.clone()).len()).map(Self::ShiftRegion));
        all
    }

    pub fn apply(self, schedule: &Schedule, tasks: &mut Vec<Task>, index: usize) {
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
            Self::LowerAdd(i) => tasks[index].signals[i].add -= 1,
            Self::SwapSlots(i) => {
                let mine = tasks[index].signals[i];
                let other = (index + 1..tasks.len()).find_map(|at| {
                    let found = tasks[at].signals.iter().position(|signal| {
                        signal.to == mine.to
                            && signal.flag.family == mine.flag.family
                            && signal.flag.slot != mine.flag.slot
                    });
                    found.map(|found| (at, found))
                });
                if let Some((at, found)) = other {
                    tasks[index].signals[i].flag.slot = tasks[at].signals[found].flag.slot;
                    tasks[at].signals[found].flag.slot = mine.flag.slot;
                }
            }
            Self::Shrink => {
                for region in regions(&mut tasks[index].op) {
                    if region.rows > 1 {
                        region.rows -= 1;
                    } else if region.row_bytes > 16 {
                        region.row_bytes -= 16;
                    }
                }
            }
            Self::WaitBank(i) => tasks[index].waits[i].flag.family.0 += schedule.flags.len() as u16,
            Self::SignalBank(i) => tasks[index].signals[i].flag.family.0 += schedule.flags.len() as u16,
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
pub struct Mutant {
    pub launch: usize,
    pub role: usize,
    pub index: usize,
    pub mutation: Mutation,
}

/// The mutant of a schedule, which is built twice for it.
pub fn broken(build: &dyn Fn() -> Schedule, mutant: Mutant) -> Schedule {
    let whole = build();
    let mut schedule = changed(build(), move |_, launch, role, tasks| {
        if (launch, role) == (mutant.launch, mutant.role) && mutant.index < tasks.len() {
            mutant.mutation.apply(&whole, tasks, mutant.index);
        }
    });
    if matches!(mutant.mutation, Mutation::WaitBank(_) | Mutation::SignalBank(_)) {
        let other =
            |family: &FlagFamily| FlagFamily { name: format!("{} (other bank)", family.name), ..family.clone() };
        let others: Vec<FlagFamily> = schedule.flags.iter().map(other).collect();
        schedule.flags.extend(others);
    }
    schedule
}

/// Mutants of the first two, of three middle and of the last task of every role.
pub fn mutants(schedule: &Schedule) -> Vec<Mutant> {
    let rank = schedule.representatives()[0];
    let mut mutants = Vec::new();
    for (launch, role) in schedule.role_indices() {
        let tasks = schedule.tasks(rank, launch, role);
        let n = tasks.len();
        let mut places = vec![0, 1, n / 3, n / 2, 2 * n / 3, n.saturating_sub(1)];
        places.sort_unstable();
        places.dedup();
        for index in places.into_iter().filter(|&index| index < tasks.len()) {
            let of = Mutation::of(&tasks[index]);
            mutants.extend(of.into_iter().map(|mutation| Mutant { launch, role, index, mutation }));
        }
    }
    mutants
}

/// Whether a mutant that no run told apart cannot be told apart, by one of three arguments.
///
/// *A put of no bytes* has no data that its word could overtake and no bytes that could be elsewhere.
/// *Lower level*: the adds to a flag are multiples of g, so its value is, and a level means the next multiple of g.
/// *Larger add* of a task that itself waits for level w of the flag: with the old add the value was at least w + add
/// afterwards, and nobody waits for more.
pub fn is_equivalent(schedule: &Schedule, Mutant { launch, role, index, mutation }: Mutant) -> bool {
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
        Mutation::Shrink => {
            matches!(&task.op, Op::Put { dst, .. } if dst.region.bytes() == 0)
        }
        Mutation::SwapSlots(i) => {
            // No later task of the list has another slot of the family: nothing was swapped.
            let mut tasks = schedule.tasks(rank, launch, role);
            mutation.apply(schedule, &mut tasks, index);
            tasks[index].signals[i] == task.signals[i]
        }
        Mutation::Swap => index + 1 == schedule.tasks(rank, launch, role).len(),
        _ => false,
    }
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

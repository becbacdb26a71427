//! A schedule reduced to what its progress depends on: who waits for which flag, who raises it, in which order.
//!
//! One set of lists per class of ranks that share a skeleton. A flag of a class stands for the same flag of each of its
//! ranks: a signal at an offset leads from every rank of one class to every rank of another, once each, so what one
//! rank of the class raises in another is what each of them receives.

use super::finding::{Finding, Problem, TaskAt};
use super::needs::Needs;
use super::shape::check_task;
use crate::cluster::{Fabric, Offset, Rank};
use crate::schedule::{At, Flag, Gate, Op, Publish, Schedule, Signal, Task, Wait};
use std::collections::BTreeMap;

/// Findings of one kind that are worth printing.
pub(super) const SHOWN: usize = 16;

/// A wait on flags of the own class.
#[derive(Clone, Copy)]
pub(super) struct CompactWait {
    /// Index over the flags of all classes.
    pub(super) flag: u32,
    pub(super) count: u32,
    pub(super) stride: u32,
    pub(super) at_least: u32,
    pub(super) gate: Gate,
}

/// An add to a flag of any class.
#[derive(Clone, Copy)]
pub(super) struct CompactSignal {
    pub(super) flag: u32,
    pub(super) add: u32,
    /// From the raiser to the rank whose flag it is.
    pub(super) to: Offset,
    pub(super) raiser: Raiser,
    /// Raised before the writes of its task.
    pub(super) early: bool,
}

/// Who raises a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Raiser {
    Sm,
    /// The arrival word of a put.
    Nic,
    /// `sent`.
    Host,
}

impl Raiser {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sm => "SMs",
            Self::Nic => "arriving puts",
            Self::Host => "sent puts",
        }
    }
}

/// Ends of a task's waits and signals; they begin where those of the task before end.
#[derive(Clone, Copy)]
pub(super) struct CompactTask {
    pub(super) wait_end: u32,
    pub(super) signal_end: u32,
    pub(super) kind: TaskKind,
    /// Steps that its `k_step` waits gate.
    pub(super) steps: u32,
}

/// What the checker must know of an op beside its regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskKind {
    /// Over when it ends.
    Plain,
    /// Goes on after its task has ended.
    Put {
        /// Whether the arrival word comes after the data.
        in_order: bool,
    },
    /// Meets the same task of every rank.
    Collective,
}

/// A role of a class.
#[derive(Clone, Copy)]
pub(super) struct CompactRole {
    pub(super) class: u32,
    pub(super) launch: u32,
    /// Index in the launch.
    pub(super) role: u32,
    pub(super) first: u32,
    pub(super) tasks: u32,
}

/// The compact schedule.
pub(super) struct Compact {
    pub(super) classes: Vec<Rank>,
    pub(super) roles: Vec<CompactRole>,
    pub(super) tasks: Vec<CompactTask>,
    pub(super) waits: Vec<CompactWait>,
    pub(super) signals: Vec<CompactSignal>,
    /// First flag of each family in a class.
    bases: Vec<u32>,
    pub(super) flags_per_class: u32,
    /// The class of each rank, by rank number.
    pub(super) class_of: Vec<u32>,
}

impl Compact {
    /// Streams the tasks of every class, checking each on the way.
    pub(super) fn new(schedule: &Schedule, needs: &mut Needs, findings: &mut Vec<Finding>) -> Result<Self, Finding> {
        let classes = schedule.representatives();
        let mut class_of = vec![u32::MAX; schedule.cluster.ranks()];
        for (class, &rank) in classes.iter().enumerate() {
            class_of[schedule.cluster.number(rank)] = class as u32;
        }
        for rank in schedule.cluster.iter() {
            class_of[schedule.cluster.number(rank)] =
                class_of[schedule.cluster.number(schedule.symmetry.representative(rank))];
        }
        let mut bases = Vec::with_capacity(schedule.flags.len());
        let mut flags = 0u64;
        for family in &schedule.flags {
            bases.push(flags as u32);
            flags += u64::from(family.slots);
        }
        fits("flags", flags * classes.len() as u64)?;
        let mut compact = Self {
            classes,
            roles: Vec::new(),
            tasks: Vec::new(),
            waits: Vec::new(),
            signals: Vec::new(),
            bases,
            flags_per_class: flags as u32,
            class_of,
        };
        let mut hazards = Hazards::default();
        for class in 0..compact.classes.len() as u32 {
            let rank = compact.classes[class as usize];
            let table = schedule.source.table(rank);
            for (launch, role) in schedule.role_indices() {
                let claim = schedule.launches[launch].roles[role].claim;
                let first = compact.tasks.len();
                schedule.for_each_task(rank, launch, role, |task| {
                    let index = (compact.tasks.len() - first) as u32;
                    let at = || task_at(schedule, rank, launch, role, index, task.op.name());
                    match check_task(schedule, claim, &task, &table) {
                        Ok(()) => compact.push(schedule, class, &task),
                        Err(error) => {
                            if findings.len() < SHOWN {
                                findings.push(Finding::fatal(Some(at()), Problem::Shape(error)));
                            }
                            compact.push_end(TaskKind::Plain, 0);
                        }
                    }
                    hazards.look(schedule, &task, at);
                    needs.look(&task.op, at);
                });
                fits("tasks", compact.tasks.len() as u64)?;
                fits("waits", compact.waits.len() as u64)?;
                fits("signals", compact.signals.len() as u64)?;
                compact.roles.push(CompactRole {
                    class,
                    launch: launch as u32,
                    role: role as u32,
                    first: first as u32,
                    tasks: (compact.tasks.len() - first) as u32,
                });
            }
        }
        findings.extend(hazards.findings());
        Ok(compact)
    }

    fn push(&mut self, schedule: &Schedule, class: u32, task: &Task) {
        let own = class * self.flags_per_class;
        for wait in &task.waits {
            let flag = own + self.index(wait.flag);
            let Wait { count, stride, at_least, gate, .. } = *wait;
            self.waits.push(CompactWait { flag, count, stride, at_least, gate });
        }
        let rank = self.classes[class as usize];
        let cluster = schedule.cluster;
        let flags = self.flags_per_class;
        let classes = std::mem::take(&mut self.class_of);
        let target = |to: Rank| classes[cluster.number(to)] * flags;
        for &Signal { to, flag, add, early } in &task.signals {
            let index = self.index(flag);
            match to {
                At::Offset(offset) => {
                    let flag = target(cluster.at(rank, offset)) + index;
                    self.signals.push(CompactSignal { flag, add, to: offset, raiser: Raiser::Sm, early });
                }
                At::AllLocal => {
                    self.signals.extend((0..cluster.gpus_per_node).map(|gpu| {
                        let other = Rank { node: rank.node, gpu };
                        let flag = target(other) + index;
                        CompactSignal { flag, add, to: cluster.offset(rank, other), raiser: Raiser::Sm, early }
                    }));
                }
            }
        }
        if let Op::Put { dst, arrived, sent, .. } = &task.op {
            if let At::Offset(offset) = dst.at {
                let flag = target(cluster.at(rank, offset)) + self.index(*arrived);
                self.signals.push(CompactSignal { flag, add: 1, to: offset, raiser: Raiser::Nic, early: false });
            }
            if let Some(sent) = sent {
                let flag = own + self.index(*sent);
                self.signals.push(CompactSignal { flag, add: 1, to: Offset::ME, raiser: Raiser::Host, early: false });
            }
        }
        self.class_of = classes;
        let kind = match &task.op {
            Op::Put { queue, publish, .. } => TaskKind::Put { in_order: in_order(schedule.fabric, *queue, *publish) },
            Op::Collective { .. } => TaskKind::Collective,
            _ => TaskKind::Plain,
        };
        self.push_end(kind, task.op.steps());
    }

    fn push_end(&mut self, kind: TaskKind, steps: u32) {
        self.tasks.push(CompactTask {
            wait_end: self.waits.len() as u32,
            signal_end: self.signals.len() as u32,
            kind,
            steps,
        });
    }

    fn index(&self, flag: Flag) -> u32 {
        self.bases[usize::from(flag.family.0)] + flag.slot
    }

    /// Waits of a task, as indices.
    pub(super) fn waits_of(&self, task: u32) -> std::ops::Range<usize> {
        let start = if task == 0 { 0 } else { self.tasks[task as usize - 1].wait_end };
        start as usize..self.tasks[task as usize].wait_end as usize
    }

    /// Signals of a task, as indices.
    pub(super) fn signals_range(&self, task: u32) -> std::ops::Range<usize> {
        let start = if task == 0 { 0 } else { self.tasks[task as usize - 1].signal_end };
        start as usize..self.tasks[task as usize].signal_end as usize
    }

    /// Signals of a task.
    pub(super) fn signals_of(&self, task: u32) -> &[CompactSignal] {
        &self.signals[self.signals_range(task)]
    }

    /// Family and slot of a flag.
    pub(super) fn family_of(&self, flag: u32) -> (usize, u32) {
        let index = flag % self.flags_per_class;
        let family = self.bases.partition_point(|&base| base <= index) - 1;
        (family, index - self.bases[family])
    }

    /// The role that holds a task.
    pub(super) fn role_of(&self, task: u32) -> usize {
        self.roles.partition_point(|role| role.first + role.tasks <= task)
    }
}

/// Names a task.
pub(super) fn task_at(
    schedule: &Schedule,
    rank: Rank,
    launch: usize,
    role: usize,
    task: u32,
    op: &'static str,
) -> TaskAt {
    let launch = &schedule.launches[launch];
    TaskAt { rank, launch: launch.name.clone(), role: launch.roles[role].kind, task, op }
}

/// Whether a put's arrival word can only be seen after its data.
const fn in_order(fabric: Fabric, queue: u16, publish: Publish) -> bool {
    match publish {
        Publish::Immediate => true,
        Publish::SameQueueWrite => fabric.orders_within_queue(),
        Publish::SeparateWrite { queue: other } => fabric.orders_within_queue() && other == queue,
    }
}

fn fits(what: &'static str, value: u64) -> Result<(), Finding> {
    if u32::try_from(value).is_ok() {
        return Ok(());
    }
    Err(Finding::fatal(None, Problem::TooLarge { what, value }))
}

/// Hazards that a single task shows, counted by flag family.
#[derive(Default)]
struct Hazards {
    early: BTreeMap<u16, (TaskAt, String, u64)>,
    order: BTreeMap<u16, (TaskAt, String, String, u64)>,
}

impl Hazards {
    fn look(&mut self, schedule: &Schedule, task: &Task, at: impl Fn() -> TaskAt) {
        let name = |flag: Flag| {
            schedule.flags.get(usize::from(flag.family.0)).map_or_else(String::new, |family| family.name.clone())
        };
        for signal in task.signals.iter().filter(|signal| signal.early) {
            self.early.entry(signal.flag.family.0).or_insert_with(|| (at(), name(signal.flag), 0)).2 += 1;
        }
        let Op::Put { dst, queue, publish, arrived, .. } = &task.op else { return };
        if !in_order(schedule.fabric, *queue, *publish) && dst.region.bytes() > 0 {
            let how = match publish {
                Publish::SeparateWrite { .. } => format!("a write of its own on {}", schedule.fabric),
                _ => format!("a second write on {}, which does not order a queue", schedule.fabric),
            };
            self.order.entry(arrived.family.0).or_insert_with(|| (at(), name(*arrived), how, 0)).3 += 1;
        }
    }

    fn findings(self) -> impl Iterator<Item = Finding> {
        let early = self
            .early
            .into_values()
            .map(|(at, family, count)| Finding::hazard(Some(at), Problem::EarlySignal { family, count }));
        let order = self
            .order
            .into_values()
            .map(|(at, family, how, count)| Finding::hazard(Some(at), Problem::FabricOrder { family, how, count }));
        early.chain(order)
    }
}

//! What the checker reports.

use super::limits::TooWide;
use super::shape::ShapeError;
use crate::cluster::Rank;
use crate::schedule::{Access, RoleKind};
use serde::Serialize;
use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The schedule cannot run.
    Fatal,
    /// The schedule may compute wrong values.
    Hazard,
}

/// Where a task stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TaskAt {
    /// Rank; the representative of its class when the ranks share a skeleton.
    pub rank: Rank,
    /// Launch.
    pub launch: String,
    /// Role.
    pub role: RoleKind,
    /// Place in the role's list.
    pub task: u32,
    /// Name of its op.
    pub op: &'static str,
}

impl fmt::Display for TaskAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, launch, role, task, op } = self;
        write!(f, "rank {rank} {launch}/{role} task {task} ({op})")
    }
}

/// A flag of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FlagAt {
    /// Rank that owns it.
    pub rank: Rank,
    /// Family.
    pub family: String,
    /// Slot.
    pub slot: u32,
}

impl fmt::Display for FlagAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}] of rank {}", self.family, self.slot, self.rank)
    }
}

/// A task of a dependency cycle and why it does not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CycleStep {
    /// The task that its role's list stands at.
    pub head: TaskAt,
    /// Flag that it waits for.
    pub flag: FlagAt,
    /// Adds that can have arrived.
    pub have: u32,
    /// Level that it needs.
    pub need: u32,
    /// The task that would raise the flag: at, or behind, the next step's head.
    pub raiser: TaskAt,
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    /// A task breaks a rule of its own.
    Shape(ShapeError),
    /// A role or launch breaks a rule of its own.
    Structure(String),
    /// A role has tasks and no CTA can come to it.
    NoCtas {
        /// Number of tasks.
        tasks: u32,
    },
    /// CTAs that must run at the same time and do not all find an SM.
    TooManyCtas {
        /// Launches that may run together.
        launches: Vec<String>,
        /// Their CTAs.
        have: u64,
        /// SMs of the GPU.
        sms: u32,
    },
    /// More of something than the machine has.
    Exceeds {
        /// Of what.
        what: &'static str,
        /// How much the schedule needs.
        have: u64,
        /// How much there is.
        limit: u64,
    },
    /// A value that the transport's command cannot carry.
    Width(TooWide),
    /// More flags or tasks than the checker's 32-bit indices hold.
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How many.
        value: u64,
    },
    /// A wait that all signals together do not satisfy.
    Unreachable {
        /// The flag.
        flag: FlagAt,
        /// Sum of all adds to it.
        have: u64,
        /// Level that the task needs.
        need: u32,
    },
    /// More is added to a flag than its last waiter asks for, so the waiter may run too early.
    OverSatisfied {
        /// The flag.
        flag: FlagAt,
        /// Sum of all adds to it.
        have: u64,
        /// Highest level that a task waits for.
        need: u32,
    },
    /// A flag family that SMs raise and that nobody waits for.
    Unawaited {
        /// Family.
        family: String,
    },
    /// An arrival word that does not belong to one put.
    ArrivedAgain {
        /// The flag.
        flag: FlagAt,
        /// How often it is raised.
        have: u64,
    },
    /// A family raised by more than one of SM, NIC and host.
    MixedRaisers {
        /// Family.
        family: String,
        /// Who raises it.
        raisers: String,
    },
    /// Tasks that wait for each other.
    Cycle(Vec<CycleStep>),
    /// Tasks that never run although every flag can be reached, and this is the first.
    NeverRuns {
        /// Number of such tasks, over the representative ranks.
        left: u32,
    },
    /// Ranks that should share a skeleton do not.
    Asymmetric {
        /// The rank that stands for this one.
        representative: Rank,
        /// What differs.
        what: String,
    },
    /// A signal that is raised before the op's writes.
    EarlySignal {
        /// Flag family.
        family: String,
        /// Signals like this one, over the tasks of the representative ranks.
        count: u64,
    },
    /// Two accesses to the same bytes that nothing puts in order. The finding names the second; the witness is any run in
    /// which it starts as soon as its own waits permit and the first is still under way.
    Race {
        /// Buffer.
        buffer: String,
        /// Whose memory.
        rank: Rank,
        /// First shared bytes: from, to.
        bytes: (u64, u64),
        /// What it spoils.
        kind: RaceKind,
        /// The access that should come first.
        first: Box<RaceSide>,
        /// What the second one does.
        second: Access,
        /// What is missing, and both tasks in full.
        why: String,
        /// Races between these roles in this buffer; counting ends at 16.
        count: u64,
    },
    /// Bytes of a scratch or output buffer that are read, or added to, and that no task writes before.
    NothingWritten {
        /// Buffer.
        buffer: String,
        /// Whose memory.
        rank: Rank,
        /// First such bytes: from, to.
        bytes: (u64, u64),
        /// Read or add.
        access: Access,
        /// Such pieces of the buffer.
        count: u64,
    },
    /// A put whose word may be seen before its data.
    FabricOrder {
        /// Family of the word.
        family: String,
        /// How it is published, and on what.
        how: String,
        /// Puts like this one, over the tasks of the representative ranks.
        count: u64,
    },
}

/// One of two accesses that race.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RaceSide {
    /// Its task.
    pub task: TaskAt,
    /// What it does.
    pub access: Access,
}

/// What a race spoils.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RaceKind {
    /// Read before what was written is visible.
    EarlyRead,
    /// Read before what a put brings has landed.
    PutLanding,
    /// Overwritten before its readers are done.
    Reuse,
    /// The source of a put is overwritten before it is sent.
    PutSource,
    /// Two writers, or a writer and an add, in any order.
    Writers,
}

impl RaceKind {
    const fn text(self) -> &'static str {
        match self {
            Self::EarlyRead => "read before the write is visible",
            Self::PutLanding => "read before the put has landed",
            Self::Reuse => "overwritten before its readers are done",
            Self::PutSource => "overwritten before the put has read it",
            Self::Writers => "written by two in any order",
        }
    }
}

const fn access_text(access: Access) -> &'static str {
    match access {
        Access::Read => "read",
        Access::Write => "write",
        Access::Add => "add",
    }
}

/// One finding of the checker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Fatal or hazard.
    pub severity: Severity,
    /// The task it is about, if it is about one.
    pub at: Option<TaskAt>,
    /// What is wrong.
    pub problem: Problem,
}

impl Finding {
    pub(super) const fn fatal(at: Option<TaskAt>, problem: Problem) -> Self {
        Self { severity: Severity::Fatal, at, problem }
    }

    pub(super) const fn hazard(at: Option<TaskAt>, problem: Problem) -> Self {
        Self { severity: Severity::Hazard, at, problem }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape(error) => error.fmt(f),
            Self::Structure(what) => f.write_str(what),
            Self::NoCtas { tasks } => {
                write!(f, "the role has {tasks} tasks, no CTA of its own and none that recycles into it")
            }
            Self::TooManyCtas { launches, have, sms } => {
                let names = launches.join(" and ");
                write!(
                    f,
                    "{names} need {have} resident CTAs, the GPU has {sms} SMs; take away {}",
                    have - u64::from(*sms)
                )
            }
            Self::Exceeds { what, have, limit } => write!(f, "needs {have} {what}, there are {limit}"),
            Self::Width(error) => error.fmt(f),
            Self::TooLarge { what, value } => write!(f, "{value} {what}, the checker holds {}", u32::MAX),
            Self::Unreachable { flag, have, need } => {
                write!(f, "waits for {flag} >= {need}, but all signals add up to {have}")
            }
            Self::OverSatisfied { flag, have, need } => {
                write!(f, "all signals to {flag} add up to {have}, its last waiter asks for {need}: it may run early")
            }
            Self::Unawaited { family } => write!(f, "flag family {family} is raised, but nobody waits for it"),
            Self::ArrivedAgain { flag, have } => {
                write!(f, "arrival word {flag} is raised {have} times in a run, it must belong to one put")
            }
            Self::MixedRaisers { family, raisers } => write!(f, "flag family {family} is raised by {raisers}"),
            Self::Cycle(steps) => {
                write!(f, "cycle of {} waits:", steps.len())?;
                for CycleStep { head, flag, have, need, raiser } in steps {
                    write!(f, "\n  {head} waits for {flag} >= {need}, has {have}; raised by {raiser}")?;
                    if raiser != head {
                        write!(f, " and those before it")?;
                    }
                }
                Ok(())
            }
            Self::NeverRuns { left } => {
                write!(f, "never runs, nor do {} others: a collective is not reached by all ranks", left - 1)
            }
            Self::Asymmetric { representative, what } => {
                write!(f, "differs from its representative, rank {representative}: {what}")
            }
            Self::EarlySignal { family, count } => {
                write!(f, "signals {family} before its writes are visible ({count} signals)")
            }
            Self::Race { buffer, rank, bytes, kind, first, second, why, count } => {
                let more = if *count >= 16 { "at least " } else { "" };
                write!(
                    f,
                    "{} {buffer}[{}..{}] of rank {rank} while the {} of {} is not over: {} ({more}{count} times); {why}",
                    access_text(*second),
                    bytes.0,
                    bytes.1,
                    access_text(first.access),
                    first.task,
                    kind.text()
                )
            }
            Self::NothingWritten { buffer, rank, bytes, access, count } => {
                let (from, to) = bytes;
                write!(
                    f,
                    "{} {buffer}[{from}..{to}] of rank {rank}, which nothing has written ({count} pieces)",
                    access_text(*access)
                )
            }
            Self::FabricOrder { family, how, count } => {
                write!(f, "word {family} may be seen before its data: {how} ({count} puts)")
            }
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.severity {
            Severity::Fatal => "fatal: ",
            Severity::Hazard => "hazard: ",
        })?;
        if let Some(at) = &self.at {
            write!(f, "{at}: ")?;
        }
        self.problem.fmt(f)
    }
}

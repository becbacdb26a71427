//! What a run returns.

use serde::Serialize;
use std::fmt;
use tilewire_kernels::schedule::Access;
use tilewire_kernels::{Blocked, Rank, RoleKind};

/// A task of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TaskRef {
    /// Rank.
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

impl fmt::Display for TaskRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, launch, role, task, op } = self;
        write!(f, "rank {rank} {launch}/{role} task {task} ({op})")
    }
}

/// Two accesses that were open at once, overlap, and do not commute.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Race {
    /// Buffer.
    pub buffer: String,
    /// Number of the rank whose memory it is.
    pub rank: u32,
    /// First shared bytes: from, to.
    pub bytes: (u64, u64),
    /// The access that was open.
    pub first: (TaskRef, Access),
    /// The access that came.
    pub second: (TaskRef, Access),
    /// How often this pair of ops met in this buffer, over all tasks.
    pub count: u64,
}

impl Race {
    /// Which kinds of access met where, with no rank or task in it: `staging: put read / gemm_tile add`.
    pub fn signature(&self) -> String {
        let side = |(task, access): &(TaskRef, Access)| format!("{} {}", task.op, access_name(*access));
        let (a, b) = (side(&self.first), side(&self.second));
        let (a, b) = if a <= b { (a, b) } else { (b, a) };
        format!("{}: {a} / {b}", self.buffer)
    }
}

const fn access_name(access: Access) -> &'static str {
    match access {
        Access::Read => "read",
        Access::Write => "write",
        Access::Add => "add",
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { buffer, rank, bytes, first, second, count } = self;
        write!(
            f,
            "race on {buffer}[{}..{}] of rank {rank}: {} by {} while {} by {} is open ({count} times)",
            bytes.0,
            bytes.1,
            access_name(second.1),
            second.0,
            access_name(first.1),
            first.0
        )
    }
}

/// A schedule that ran to its end with right values.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Runs in a row.
    pub runs: u32,
    /// Tasks executed, over all ranks and runs.
    pub tasks: u64,
    /// Choices that the scheduler made.
    pub steps: u64,
    /// Output elements compared.
    pub elements: u64,
    /// Largest error, as a part of its bound.
    pub worst: f64,
    /// Races, one for each signature; empty unless they were looked for.
    pub races: Vec<Race>,
}

/// An output element that is not what the reference says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mismatch {
    /// Run, from 0.
    pub run: u32,
    /// Seed that shows it again.
    pub seed: u64,
    /// Rank.
    pub rank: Rank,
    /// Output buffer.
    pub buffer: String,
    /// Row of the region, counted over its blocks.
    pub row: u64,
    /// Element of the row.
    pub col: u64,
    /// Byte offset in the buffer.
    pub offset: u64,
    /// Reference.
    pub expected: f64,
    /// Result.
    pub got: f64,
    /// Largest error allowed.
    pub bound: f64,
    /// Wrong elements of all ranks in this run.
    pub wrong: u64,
    /// Tasks that write this element: its tile.
    pub writers: Vec<TaskRef>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run, seed, rank, buffer, row, col, offset, expected, got, bound, wrong, writers } = self;
        write!(
            f,
            "rank {rank} {buffer} row {row} column {col} (byte {offset}): expected {expected} +- {bound}, got {got}; \
             {wrong} elements wrong; run {run}, seed {seed}; written by "
        )?;
        match writers.as_slice() {
            [] => f.write_str("no task"),
            [one] => one.fmt(f),
            [first, ..] => write!(f, "{} tasks, the first is {first}", writers.len()),
        }
    }
}

/// Why a schedule did not run to its end with right values.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ExecError {
    /// Nothing can move and tasks are left.
    #[error("stuck in run {run} (seed {seed}) with {left} tasks and {puts} puts left{}", list(.blocked))]
    Stuck {
        /// Run, from 0.
        run: u32,
        /// Seed.
        seed: u64,
        /// Tasks that did not end, over all ranks.
        left: u64,
        /// Puts that are not over.
        puts: u64,
        /// Every CTA that waits, in order of rank, launch, role and CTA.
        blocked: Vec<Blocked>,
    },
    /// A wrong value.
    #[error("wrong value: {0}")]
    Wrong(Box<Mismatch>, Vec<Race>),
    /// A role has tasks and no CTA can reach it.
    #[error("{launch}/{role} has tasks, but no CTA of its own and none that recycles into it; split: {split}")]
    NoCtas {
        /// Launch.
        launch: String,
        /// Role.
        role: RoleKind,
        /// The split.
        split: String,
    },
    /// A task breaks a rule that execution relies on; the static checker says more.
    #[error("illegal: {task}: {what}")]
    Illegal {
        /// Which task.
        task: Box<TaskRef>,
        /// What is wrong.
        what: String,
    },
    /// A word that belongs to one put was raised twice.
    #[error("arrival word {flag}[{slot}] of rank {rank} raised twice in a run, now by {task}")]
    RaisedTwice {
        /// The put.
        task: Box<TaskRef>,
        /// Rank that owns the word.
        rank: Rank,
        /// Flag family.
        flag: String,
        /// Slot.
        slot: u32,
    },
    /// The word of a put of an earlier run: it names the other bank, so it is an error and not stored.
    #[error("arrival word {flag}[{slot}] of rank {rank} comes in run {run}, by a put of run {of_run}: {task}")]
    LateWord {
        /// The put.
        task: Box<TaskRef>,
        /// Rank that owns the word.
        rank: Rank,
        /// Flag family.
        flag: String,
        /// Slot.
        slot: u32,
        /// Run of the put.
        of_run: u32,
        /// Present run.
        run: u32,
    },
    /// The kernel's inputs or reference do not fit its buffers.
    #[error("{kernel}: {what}")]
    Kernel {
        /// Kernel.
        kernel: String,
        /// What does not fit.
        what: String,
    },
}

pub(crate) fn list(blocked: &[Blocked]) -> String {
    const SHOWN: usize = 8;
    let mut lines: Vec<String> = blocked.iter().take(SHOWN).map(|b| format!("\n  {b}")).collect();
    if blocked.len() > SHOWN {
        lines.push(format!("\n  and {} more CTAs", blocked.len() - SHOWN));
    }
    lines.concat()
}

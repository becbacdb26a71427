//! What a rank does, and what it may expect from others: its task lists, its arrivals.

use super::HostError;
use crate::transport::Told;
use crate::transport::puts::Incoming;
use crate::transport::segment::Layout;
use crate::values::collect_rank;
use tilewire_kernels::schedule::{GatherEntry, Op, Strides, Task};
use tilewire_kernels::{Rank, Schedule};

/// A rank's part of a schedule.
pub(super) struct Plan {
    pub(super) rank: Rank,
    /// By role in the order of [`Schedule::role_indices`].
    pub(super) tasks: Vec<Vec<Task>>,
    /// Where the strides of each role begin anew.
    pub(super) restarts: Vec<Vec<u32>>,
    pub(super) table: Vec<Option<GatherEntry>>,
    pub(super) incoming: Incoming,
}

impl Plan {
    pub(super) fn new(schedule: &Schedule, layout: &Layout, rank: Rank, told: Told) -> Result<Self, HostError> {
        let (tasks, table) = collect_rank(schedule, rank)?;
        let baseline = |task: &&Task| matches!(task.op, Op::Collective { .. });
        if tasks.iter().flatten().any(|task| baseline(&task)) {
            return Err(HostError::Unsupported { what: "library collectives; run a fused schedule".to_owned() });
        }
        let restarts = tasks.iter().map(|tasks| Strides::restarts(tasks)).collect();
        Ok(Self { rank, tasks, restarts, table, incoming: Incoming::new(schedule, layout, rank, told)? })
    }
}

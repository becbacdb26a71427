//! What a rank does, and what it may expect from others: its task lists, its arrivals.

use super::HostError;
use crate::transport::Told;
use crate::transport::puts::Incoming;
use crate::transport::segment::Layout;
use crate::values::collect_rank;
use tilewire_kernels::schedule::{GatherEntry, Op, Task};
use tilewire_kernels::{Rank, Schedule};

/// A rank's part of a schedule.
pub(super) struct Plan {
    pub(super) rank: Rank,
    /// By role in the order of [`Schedule::role_indices`].
    pub(super) tasks: Vec<Vec<Task>>,
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
        Ok(Self { rank, tasks, table, incoming: Incoming::new(schedule, layout, rank, told)? })
    }
}

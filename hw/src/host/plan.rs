//! What a rank does, and what it may expect from others: its task lists, its puts as commands, its arrivals.

use super::HostError;
use crate::transport::segment::Layout;
use crate::transport::{Command, Notice, Order, Told, Word};
use crate::values::memory::ranks_of;
use crate::values::{ExecError, collect_rank};
use tilewire_kernels::schedule::{Flag, GatherEntry, Op, Publish, Region, Task};
use tilewire_kernels::{Rank, Schedule};

/// Longest single write; longer runs are cut. Every RDMA device writes at least 1 GiB at once.
const WRITE_MAX: u64 = 1 << 30;

/// A rank's part of a schedule.
pub(super) struct Plan {
    pub(super) rank: Rank,
    /// By role in the order of [`Schedule::role_indices`].
    pub(super) tasks: Vec<Vec<Task>>,
    pub(super) table: Vec<Option<GatherEntry>>,
    /// Immediates that tell of each slot's put; 0 where none does.
    pub(super) immediates: Vec<u32>,
    /// Flags that puts of other ranks raise here, in order.
    pub(super) arrivals: Vec<Flag>,
}

impl Plan {
    pub(super) fn new(schedule: &Schedule, layout: &Layout, rank: Rank, told: Told) -> Result<Self, HostError> {
        let (tasks, table) = collect_rank(schedule, rank)?;
        let baseline = |task: &&Task| matches!(task.op, Op::Collective { .. });
        if tasks.iter().flatten().any(|task| baseline(&task)) {
            return Err(HostError::Unsupported { what: "library collectives; run a fused schedule".to_owned() });
        }
        let me = schedule.cluster.number(rank);
        let mut plan = Self { rank, tasks, table, immediates: vec![0; layout.slots as usize], arrivals: Vec::new() };
        for other in schedule.cluster.iter() {
            for (l, r) in schedule.role_indices() {
                schedule.for_each_task(other, l, r, |task| {
                    let Op::Put { dst, arrived, .. } = &task.op else { return };
                    if ranks_of(schedule.cluster, other, dst.at) == [me] {
                        plan.arrivals.push(*arrived);
                        let notices = commands(schedule, layout, other, &task.op, 0, told)
                            .iter()
                            .filter(|command| matches!(command.notice, Notice::Immediate(_)))
                            .count();
                        plan.immediates[layout.slot(*arrived) as usize] += notices as u32;
                    }
                });
            }
        }
        plan.arrivals.sort_unstable();
        if let Some(pair) = plan.arrivals.windows(2).find(|pair| pair[0] == pair[1]) {
            let flag = &schedule.family(pair[0].family).name;
            let what = format!("arrival word {flag}[{}] belongs to two puts", pair[0].slot);
            return Err(ExecError::Kernel { kernel: schedule.kernel.clone(), what }.into());
        }
        Ok(plan)
    }
}

/// The contiguous writes of a put, in order; the notice as the fabric's order needs it.
pub(super) fn commands(
    schedule: &Schedule,
    layout: &Layout,
    rank: Rank,
    op: &Op,
    bank: u32,
    told: Told,
) -> Vec<Command> {
    let Op::Put { src, dst, queue, publish, arrived, sent } = op else { return Vec::new() };
    let peer = ranks_of(schedule.cluster, rank, dst.at)[0] as u32;
    let mut writes = Vec::new();
    let (from, to) = (runs(src, layout), runs(&dst.region, layout));
    let (mut i, mut j, mut skip_i, mut skip_j) = (0, 0, 0, 0);
    while i < from.len() && j < to.len() {
        let bytes = (from[i].1 - skip_i).min(to[j].1 - skip_j).min(WRITE_MAX);
        let (src, dst) = (from[i].0 + skip_i, to[j].0 + skip_j);
        writes.push(Command { src, dst, bytes: bytes as u32, peer, queue: *queue, ..Command::default() });
        (skip_i, skip_j) = (skip_i + bytes, skip_j + bytes);
        if skip_i == from[i].1 {
            (i, skip_i) = (i + 1, 0);
        }
        if skip_j == to[j].1 {
            (j, skip_j) = (j + 1, 0);
        }
    }
    if writes.is_empty() {
        writes.push(Command { peer, queue: *queue, ..Command::default() });
    }
    let word = Word::new(layout.slot(*arrived), bank);
    let notice = match *publish {
        // Both tell after the data of the queue.
        Publish::SameQueueWrite if told.by_immediates => Notice::Immediate(word),
        Publish::SameQueueWrite => Notice::Write(word),
        Publish::Immediate => Notice::Immediate(word),
        Publish::SeparateWrite { queue } => Notice::WriteOn(word, queue),
    };
    let sent = sent.map(|sent| Word::new(layout.slot(sent), bank));
    let (count, last) = (writes.len() as u32, writes.len() - 1);
    let every = told.order == Order::Unordered && matches!(notice, Notice::Immediate(_));
    for (at, write) in writes.iter_mut().enumerate() {
        if at == last || every {
            write.notice = notice;
        }
        (write.sent, write.writes) = (sent, count);
    }
    writes
}

/// Contiguous runs of a region as offsets in a segment.
fn runs(region: &Region, layout: &Layout) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let base = layout.base(region);
    region.for_each_run(|start, bytes| match runs.last_mut() {
        Some((from, len)) if *from + *len == base + start => *len += bytes,
        _ => runs.push((base + start, bytes)),
    });
    runs
}

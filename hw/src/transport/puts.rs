//! What the puts of a schedule are on a wire: the writes of each, and what comes to a rank.

use super::bounce::Landing;
use super::segment::Layout;
use super::{Command, Notice, Order, Told, Word};
use crate::values::ExecError;
use crate::values::memory::ranks_of;
use std::collections::BTreeMap;
use tilewire_kernels::schedule::{Flag, Op, Publish, Region};
use tilewire_kernels::{Rank, Schedule};

/// Longest single write; longer runs are cut. Every RDMA device writes at least 1 GiB at once.
const WRITE_MAX: u64 = 1 << 30;

/// What comes to a rank from others in a run.
#[derive(Clone, Debug, Default)]
pub struct Incoming {
    /// Immediates that tell of each slot's put; 0 where none does.
    pub immediates: Vec<u32>,
    /// Flags that puts raise here, in order, and the rank that sends.
    pub arrivals: Vec<(Flag, usize)>,
    /// Where the put of each slot lands.
    pub landings: BTreeMap<u32, Landing>,
}

impl Incoming {
    /// Of a rank.
    ///
    /// # Errors
    /// [`ExecError::Kernel`]: an arrival word of two puts.
    pub fn new(schedule: &Schedule, layout: &Layout, rank: Rank, told: Told) -> Result<Self, ExecError> {
        let me = schedule.cluster.number(rank);
        let mut incoming = Self { immediates: vec![0; layout.slots as usize], ..Self::default() };
        for (number, other) in schedule.cluster.iter().enumerate() {
            for (l, r) in schedule.role_indices() {
                schedule.for_each_task(other, l, r, |task| {
                    let Op::Put { dst, arrived, .. } = &task.op else { return };
                    if ranks_of(schedule.cluster, other, dst.at) != [me] {
                        return;
                    }
                    incoming.arrivals.push((*arrived, number));
                    let mut landing = Landing::default();
                    for command in commands(schedule, layout, other, &task.op, 0, told) {
                        landing.immediates += u32::from(matches!(command.notice, Notice::Immediate(_)));
                        if command.bytes > 0 {
                            landing.parts.push((command.dst, u64::from(command.bytes)));
                        }
                    }
                    let slot = layout.slot(*arrived);
                    incoming.immediates[slot as usize] += landing.immediates;
                    incoming.landings.insert(slot, landing);
                });
            }
        }
        incoming.arrivals.sort_unstable();
        if let Some(pair) = incoming.arrivals.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let (flag, _) = pair[0];
            let what = format!("arrival word {}[{}] belongs to two puts", schedule.family(flag.family).name, flag.slot);
            return Err(ExecError::Kernel { kernel: schedule.kernel.clone(), what });
        }
        Ok(incoming)
    }
}

/// The contiguous writes of a put, in order; the notice as the fabric's order needs it.
pub fn commands(schedule: &Schedule, layout: &Layout, rank: Rank, op: &Op, bank: u32, told: Told) -> Vec<Command> {
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

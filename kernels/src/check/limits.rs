//! What a GPU, a proxy and a wire format have room for, and whether a schedule fits.
//!
//! Inside, offsets are u64 and indices u32. A transport that packs them into fewer bits narrows with [`narrow`], which
//! names the field, the value and the limit instead of wrapping; [`check_resources`] says beforehand whether it would.

use super::compact::{SHOWN, task_at};
use super::finding::{Finding, Problem, TaskAt};
use super::residency::check_residency;
use crate::cluster::Rank;
use crate::schedule::{Drain, Engine, Op, Publish, Region, RoleSplit, Schedule};
use serde::Serialize;
use std::collections::BTreeMap;

/// Bits that a transport's command has for each field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WireFormat {
    /// Byte offset in the source or destination buffer.
    pub offset_bits: u32,
    /// Bytes of one put.
    pub length_bits: u32,
    /// Slot of the arrival word.
    pub slot_bits: u32,
    /// Number of a NIC queue.
    pub queue_bits: u32,
}

impl WireFormat {
    /// Everything as wide as the schedule has it. An immediate has 32 bits, of which one is the bank and one the family's.
    pub const WIDE: Self = Self { offset_bits: 64, length_bits: 32, slot_bits: 30, queue_bits: 16 };
    /// 32-bit offsets and 16-bit tile numbers, which mKernel had until its pull request 21.
    pub const NARROW: Self = Self { offset_bits: 32, length_bits: 32, slot_bits: 16, queue_bits: 8 };
}

/// What a schedule must fit into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// SMs of the GPU; asked of the device, for an architecture's name does not tell.
    pub sms: u32,
    /// Shared memory that one CTA may have.
    pub shared_bytes: u64,
    /// NIC queues of a rank.
    pub queues: u32,
    /// Commands that the device-to-host ring holds.
    pub fifo_depth: u32,
    /// Writes in flight per queue.
    pub in_flight: u32,
    /// Fields of a command.
    pub wire: WireFormat,
}

impl Limits {
    /// A GPU with so many SMs of compute capability 9.0 (227 KiB of shared memory per block, CUDA programming guide), 64
    /// queues, a ring of 2,048 commands and 256 writes in flight.
    pub const fn hopper(sms: u32) -> Self {
        let shared_bytes = 227 * 1024;
        Self { sms, shared_bytes, queues: 64, fifo_depth: 2048, in_flight: 256, wire: WireFormat::WIDE }
    }
}

/// A value that a field of a wire format does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{field} = {value} does not fit the wire format, which holds at most {limit}")]
pub struct TooWide {
    /// Field.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
    /// Largest value that fits.
    pub limit: u64,
}

/// The value, if a field of so many bits holds it.
///
/// # Errors
/// [`TooWide`] with the field, the value and the limit.
pub const fn narrow(field: &'static str, value: u64, bits: u32) -> Result<u64, TooWide> {
    let limit = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
    if value <= limit { Ok(value) } else { Err(TooWide { field, value, limit }) }
}

/// Shared memory that an op asks of its CTA.
///
/// Model: a GEMM tile keeps `stages` operand panels of bf16; with `drain = overlap` a strip of 64 columns of the output (as
/// wide as a 128-byte swizzle) beside them, else the output goes through a stage. An attention tile keeps Q and `stages`
/// blocks of K and of V. Bulk copies and gathers keep what they have in flight; the other ops work in registers.
pub fn shared_bytes(op: &Op) -> u64 {
    match op {
        Op::GemmTile { tile, stages, drain, .. } => {
            let [bm, bn, bk] = tile.map(u64::from);
            let strip = if *drain == Drain::Overlap { bm * bn.min(64) * 2 } else { 0 };
            u64::from(*stages) * (bm + bn) * bk * 2 + strip
        }
        Op::AttentionTile { q, k, tile, stages, .. } => {
            q.bytes() + u64::from(*stages) * 2 * u64::from(tile[1]) * u64::from(k.row_bytes)
        }
        Op::Copy { engine: Engine::Bulk, in_flight_bytes, .. } => u64::from(*in_flight_bytes),
        Op::GatherRows { dst, in_flight_rows, .. } => u64::from(*in_flight_rows) * u64::from(dst.row_bytes),
        _ => 0,
    }
}

/// Whether a schedule fits: resident CTAs (with a split), shared memory, queues, the device-to-host ring, fields of
/// commands. Looks at one rank of each class and at the last rank, whose addresses may differ.
///
/// *The ring and the caps.* A proxy serves its ring, its queues and what it receives in one loop and waits for none of
/// them, and what it posts is carried out without the help of a CTA. So a ring of any depth drains whatever the CTAs do,
/// and one with no room at all, like a cap of no write, is the only thing that can hold a schedule up for ever.
pub fn check_resources(schedule: &Schedule, split: Option<&RoleSplit>, limits: &Limits) -> Vec<Finding> {
    let mut found = Found::default();
    let mut ranks = schedule.representatives();
    ranks.push(schedule.cluster.rank(schedule.cluster.ranks() - 1));
    ranks.dedup();
    for rank in ranks {
        for (launch, role) in schedule.role_indices() {
            let mut index = 0;
            schedule.for_each_task(rank, launch, role, |task| {
                let at = || task_at(schedule, rank, launch, role, index, task.op.name());
                found.look(&task.op, limits, rank, at);
                index += 1;
            });
        }
    }
    let residency = split.and_then(|split| check_residency(schedule, split, limits.sms));
    residency.into_iter().chain(found.findings()).collect()
}

/// The worst of each kind, with its task and how many there are.
#[derive(Default)]
struct Found {
    worst: BTreeMap<&'static str, (TaskAt, Problem, u64)>,
}

impl Found {
    fn report(&mut self, what: &'static str, value: u64, at: impl Fn() -> TaskAt, problem: impl FnOnce() -> Problem) {
        match self.worst.get_mut(what) {
            None => {
                self.worst.insert(what, (at(), problem(), value));
            }
            Some((task, worst, highest)) if value > *highest => (*task, *worst, *highest) = (at(), problem(), value),
            Some(_) => {}
        }
    }

    fn look(&mut self, op: &Op, limits: &Limits, _rank: Rank, at: impl Fn() -> TaskAt) {
        let have = shared_bytes(op);
        if have > limits.shared_bytes {
            self.report("shared memory", have, &at, || Problem::Exceeds {
                what: "bytes of shared memory of a CTA",
                have,
                limit: limits.shared_bytes,
            });
        }
        let Op::Put { src, dst, queue, publish, arrived, sent: _ } = op else { return };
        for (what, limit) in
            [("commands that the ring holds", limits.fifo_depth), ("writes in flight", limits.in_flight)]
        {
            if limit == 0 {
                self.report(what, 1, &at, || Problem::Exceeds { what, have: 1, limit: 0 });
            }
        }
        let mut queues = vec![*queue];
        if let Publish::SeparateWrite { queue } = publish {
            queues.push(*queue);
        }
        for queue in queues.into_iter().map(u64::from) {
            if queue >= u64::from(limits.queues) {
                let (have, limit) = (queue + 1, u64::from(limits.queues));
                self.report("queues", have, &at, || Problem::Exceeds { what: "NIC queues", have, limit });
            }
        }
        let wire = &limits.wire;
        let last = |region: &Region| region.end().saturating_sub(u64::from(region.bytes() != 0));
        let fields = [
            ("source offset", last(src), wire.offset_bits),
            ("destination offset", last(&dst.region), wire.offset_bits),
            ("bytes of a put", dst.region.bytes(), wire.length_bits),
            ("arrival slot", u64::from(arrived.slot), wire.slot_bits),
            ("queue", u64::from(*queue), wire.queue_bits),
        ];
        for (field, value, bits) in fields {
            if let Err(error) = narrow(field, value, bits) {
                self.report(field, value, &at, || Problem::Width(error));
            }
        }
    }

    fn findings(self) -> impl Iterator<Item = Finding> {
        self.worst.into_values().take(SHOWN).map(|(at, problem, _)| Finding::fatal(Some(at), problem))
    }
}

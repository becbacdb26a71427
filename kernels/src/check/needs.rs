//! What a schedule asks of a GPU, a proxy and a wire format: the most that one task asks of each.
//!
//! *The ring and the caps.* A proxy serves its ring, its queues and what it receives in one loop and waits for none of
//! them, and what it posts is carried out without the help of a CTA: no CTA that must drain a ring can sit behind one
//! that fills it, for none must. So a ring of any depth drains whatever the CTAs do, and one with no room at all, like a
//! cap of no write, is the only thing that can hold a schedule up for ever. The functional executor and the simulator,
//! which have rings and caps, show the same.

use super::compact::task_at;
use super::finding::{Finding, Problem, TaskAt};
use super::limits::{Limits, narrow, shared_bytes};
use crate::cluster::Rank;
use crate::schedule::{Op, Publish, Region, Schedule};
use std::collections::BTreeMap;

/// Something that a limit bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    SharedBytes,
    Queues,
    Commands,
    InFlight,
    SourceOffset,
    DestinationOffset,
    PutBytes,
    ArrivalSlot,
    Queue,
}

/// The most that tasks ask, with the task that asks it.
#[derive(Default)]
pub(super) struct Needs {
    most: BTreeMap<Need, (u64, TaskAt)>,
    /// Puts, over the representative ranks.
    pub(super) puts: u64,
}

impl Needs {
    /// Looks at a task of a representative rank.
    pub(super) fn look(&mut self, op: &Op, at: impl Fn() -> TaskAt) {
        self.raise(Need::SharedBytes, shared_bytes(op), &at);
        let Op::Put { src, dst, queue, publish, arrived, sent: _ } = op else { return };
        self.puts += 1;
        self.raise(Need::Commands, 1, &at);
        self.raise(Need::InFlight, 1, &at);
        let flag_queue = if let Publish::SeparateWrite { queue } = publish { *queue } else { *queue };
        self.raise(Need::Queues, u64::from(flag_queue.max(*queue)) + 1, &at);
        self.raise(Need::PutBytes, dst.region.bytes(), &at);
        self.raise(Need::ArrivalSlot, u64::from(arrived.slot), &at);
        self.raise(Need::Queue, u64::from(*queue), &at);
        self.look_at_offsets(src, &dst.region, at);
    }

    fn look_at_offsets(&mut self, src: &Region, dst: &Region, at: impl Fn() -> TaskAt) {
        let last = |region: &Region| region.end().saturating_sub(u64::from(region.bytes() != 0));
        self.raise(Need::SourceOffset, last(src), &at);
        self.raise(Need::DestinationOffset, last(dst), &at);
    }

    /// Looks at the offsets of a rank that is no representative: all else is the same on ranks of a class.
    pub(super) fn look_at_rank(&mut self, schedule: &Schedule, rank: Rank) {
        for (launch, role) in schedule.role_indices() {
            let mut index = 0;
            schedule.for_each_task(rank, launch, role, |task| {
                if let Op::Put { src, dst, .. } = &task.op {
                    let at = || task_at(schedule, rank, launch, role, index, task.op.name());
                    self.look_at_offsets(src, &dst.region, at);
                }
                index += 1;
            });
        }
    }

    fn raise(&mut self, need: Need, value: u64, at: impl Fn() -> TaskAt) {
        if value > 0 && self.most.get(&need).is_none_or(|(most, _)| value > *most) {
            self.most.insert(need, (value, at()));
        }
    }

    /// The most that one task asks.
    fn of(&self, need: Need) -> u64 {
        self.most.get(&need).map_or(0, |&(value, _)| value)
    }

    /// Needs beyond the limits.
    pub(super) fn findings(&self, limits: &Limits) -> impl Iterator<Item = Finding> {
        let wire = limits.wire;
        self.most.iter().filter_map(move |(need, &(have, ref at))| {
            let beyond = |what, limit| (have > limit).then_some(Problem::Exceeds { what, have, limit });
            let narrowed = |field, bits| narrow(field, have, bits).err().map(Problem::Width);
            let problem = match need {
                Need::SharedBytes => beyond("bytes of shared memory of a CTA", limits.shared_bytes),
                Need::Queues => beyond("NIC queues", u64::from(limits.queues)),
                Need::Commands => beyond("places in the device-to-host ring", u64::from(limits.fifo_depth)),
                Need::InFlight => beyond("writes in flight per queue", u64::from(limits.in_flight)),
                Need::SourceOffset => narrowed("source offset", wire.offset_bits),
                Need::DestinationOffset => narrowed("destination offset", wire.offset_bits),
                Need::PutBytes => narrowed("bytes of a put", wire.length_bits),
                Need::ArrivalSlot => narrowed("arrival slot", wire.slot_bits),
                Need::Queue => narrowed("queue", wire.queue_bits),
            };
            problem.map(|problem| Finding::fatal(Some(at.clone()), problem))
        })
    }

    /// What the machine's limits were compared with.
    pub(super) fn machine_scope(&self, limits: &Limits) -> String {
        let Limits { shared_bytes, queues, fifo_depth, in_flight, .. } = limits;
        let shared = format!("{} of {shared_bytes} bytes of shared memory", self.of(Need::SharedBytes));
        if self.puts == 0 {
            return format!("{shared}; no puts");
        }
        format!(
            "{shared}, {} of {queues} queues; ring of {fifo_depth}, {in_flight} writes in flight: drained without CTAs",
            self.of(Need::Queues)
        )
    }

    /// What the fields of a command were compared with.
    pub(super) fn wire_scope(&self, limits: &Limits) -> String {
        if self.puts == 0 {
            return "no puts".into();
        }
        let wire = limits.wire;
        format!(
            "offsets up to {} in {} bits, lengths up to {} in {}, slots up to {} in {}, queues up to {} in {}",
            self.of(Need::SourceOffset).max(self.of(Need::DestinationOffset)),
            wire.offset_bits,
            self.of(Need::PutBytes),
            wire.length_bits,
            self.of(Need::ArrivalSlot),
            wire.slot_bits,
            self.of(Need::Queue),
            wire.queue_bits
        )
    }
}

//! The canonical encoding of a schedule, and its hash: what "identical schedule" means.
//!
//! ```text
//! "tilewire-schedule" version | kernel cluster fabric symmetry spec | buffers | flags | launches
//!   | for each representative rank: for each role: tasks without region offsets, end | gather table
//!   | split
//! ```
//!
//! Numbers are little-endian and of fixed width, texts and lists carry their length, enums a tag byte. In place of the
//! offset of an operand panel (of a GEMM or attention tile) stands the number of the panel in order of first appearance
//! in its role's list, so that reuse is part of the hash. All other offsets follow from the address function, whose
//! name and options are the kernel and the spec.

use crate::cluster::{Offset, Rank};
use crate::schedule::{
    At, BufferUse, Claim, CollectiveKind, CtaCount, DType, Drain, Engine, Flag, Gate, MainLoop, Op, Partial, Place,
    Publish, Region, RoleKind, RoleSplit, Schedule, Task, WriteMode,
};
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

/// Changes whenever the encoding does, so that hashes of different formats never agree.
pub const FORMAT_VERSION: u32 = 1;

/// Skeletons that are hashed at most; a schedule with more carries a mark on its hash.
pub const MAX_SKELETONS: usize = 1024;

/// BLAKE3 of a schedule's canonical encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScheduleHash {
    /// The hash.
    pub bytes: [u8; 32],
    /// Whether every distinct skeleton went into it.
    pub complete: bool,
}

impl fmt::Display for ScheduleHash {
    /// 64 hexadecimal digits, after `h!` if some skeletons were left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.complete {
            f.write_str("h!")?;
        }
        self.bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The hash of a schedule, to be finished with one split after the other: a sweep encodes its tasks once.
#[derive(Clone)]
pub struct Hashed {
    hasher: blake3::Hasher,
    complete: bool,
}

impl Hashed {
    /// Encodes a schedule.
    pub fn new(schedule: &Schedule) -> Self {
        let mut hasher = blake3::Hasher::new();
        let complete = encode(schedule, |bytes| {
            hasher.update(bytes);
        });
        Self { hasher, complete }
    }

    /// The hash of the schedule together with the split that it is run with.
    pub fn with(&self, split: &RoleSplit) -> ScheduleHash {
        let mut hasher = self.hasher.clone();
        let mut out = Out {
            buffer: Vec::new(),
            sink: |bytes: &[u8]| {
                hasher.update(bytes);
            },
        };
        for kind in RoleKind::ALL {
            out.word(split.get(kind));
        }
        out.flush();
        ScheduleHash { bytes: *hasher.finalize().as_bytes(), complete: self.complete }
    }
}

/// The hash of a schedule together with the split that it is run with.
pub fn schedule_hash(schedule: &Schedule, split: &RoleSplit) -> ScheduleHash {
    Hashed::new(schedule).with(split)
}

/// Streams the canonical encoding of a schedule, to which that of its split is appended; returns whether every distinct
/// skeleton is in it.
fn encode(schedule: &Schedule, sink: impl FnMut(&[u8])) -> bool {
    let mut out = Out { buffer: Vec::with_capacity(BUFFER_BYTES), sink };
    out.header(schedule);
    let representatives = schedule.representatives();
    out.number(representatives.len() as u64);
    for &rank in representatives.iter().take(MAX_SKELETONS) {
        out.skeleton(schedule, rank);
    }
    out.flush();
    representatives.len() <= MAX_SKELETONS
}

/// Bytes gathered before they are hashed.
const BUFFER_BYTES: usize = 1 << 16;

/// The encoding under way.
struct Out<F: FnMut(&[u8])> {
    buffer: Vec<u8>,
    sink: F,
}

/// Panels of a role's list, numbered as they appear.
type Panels = HashMap<(u16, u64), u32, BuildHasherDefault<PanelHasher>>;

/// Multiplies and shifts: panels are looked up for every operand of every tile.
#[derive(Default)]
struct PanelHasher(u64);

impl Hasher for PanelHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

impl<F: FnMut(&[u8])> Out<F> {
    fn flush(&mut self) {
        (self.sink)(&self.buffer);
        self.buffer.clear();
    }

    fn tag(&mut self, tag: u8) {
        self.buffer.push(tag);
    }

    fn short(&mut self, value: u16) {
        self.buffer.extend_from_slice(&value.to_le_bytes());
    }

    fn word(&mut self, value: u32) {
        self.buffer.extend_from_slice(&value.to_le_bytes());
    }

    fn number(&mut self, value: u64) {
        self.buffer.extend_from_slice(&value.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.buffer.extend_from_slice(text.as_bytes());
    }

    fn header(&mut self, schedule: &Schedule) {
        self.buffer.extend_from_slice(b"tilewire-schedule");
        self.word(FORMAT_VERSION);
        self.text(&schedule.kernel);
        self.short(schedule.cluster.nodes);
        self.short(schedule.cluster.gpus_per_node);
        self.text(schedule.fabric.name());
        self.tag(u8::from(schedule.symmetry.nodes));
        self.tag(u8::from(schedule.symmetry.gpus));
        self.text(&schedule.spec);
        self.number(schedule.buffers.len() as u64);
        for buffer in &schedule.buffers {
            self.text(&buffer.name);
            self.number(buffer.bytes);
            self.tag(match buffer.dtype {
                DType::Bf16 => 0,
                DType::F32 => 1,
                DType::U32 => 2,
            });
            self.tag(match buffer.usage {
                BufferUse::Input => 0,
                BufferUse::Output => 1,
                BufferUse::Scratch => 2,
            });
        }
        self.number(schedule.flags.len() as u64);
        for family in &schedule.flags {
            self.text(&family.name);
            self.word(family.slots);
        }
        self.number(schedule.launches.len() as u64);
        for launch in &schedule.launches {
            self.text(&launch.name);
            self.number(launch.after.len() as u64);
            for &after in &launch.after {
                self.number(after as u64);
            }
            self.number(launch.roles.len() as u64);
            for role in &launch.roles {
                self.text(role.kind.name());
                match role.ctas {
                    CtaCount::FromSplit => self.tag(0),
                    CtaCount::Fixed(ctas) => {
                        self.tag(1);
                        self.word(ctas);
                    }
                    CtaCount::AllBut(sms) => {
                        self.tag(2);
                        self.word(sms);
                    }
                }
                self.word(role.lanes);
                match role.claim {
                    Claim::Strided => self.tag(0),
                    Claim::Ticket => self.tag(1),
                    Claim::Ready { window } => {
                        self.tag(2);
                        self.word(window);
                    }
                }
                self.number(role.recycle.map_or(u64::MAX, |role| role as u64));
            }
        }
    }

    fn skeleton(&mut self, schedule: &Schedule, rank: Rank) {
        self.short(rank.node);
        self.short(rank.gpu);
        for (launch, role) in schedule.role_indices() {
            let mut panels = Panels::default();
            schedule.for_each_task(rank, launch, role, |task| {
                self.task(&task, &mut panels);
                if self.buffer.len() >= BUFFER_BYTES {
                    self.flush();
                }
            });
            self.tag(END);
        }
        let table = schedule.source.table(rank);
        self.number(table.len() as u64);
        for entry in table {
            match entry {
                Some(entry) => {
                    self.tag(1);
                    self.short(entry.dg);
                    self.word(entry.row);
                }
                None => self.tag(0),
            }
            if self.buffer.len() >= BUFFER_BYTES {
                self.flush();
            }
        }
    }

    fn offset(&mut self, Offset { dn, dg }: Offset) {
        self.short(dn);
        self.short(dg);
    }

    fn at(&mut self, at: At) {
        match at {
            At::Offset(offset) => {
                self.tag(0);
                self.offset(offset);
            }
            At::AllLocal => self.tag(1),
        }
    }

    fn flag(&mut self, flag: Flag) {
        self.short(flag.family.0);
        self.word(flag.slot);
    }

    /// A region without its offset.
    fn region(&mut self, region: &Region) {
        let Region { buffer, offset: _, blocks, rows, row_bytes, block_pitch, row_pitch } = *region;
        self.short(buffer.0);
        self.word(blocks);
        self.word(rows);
        self.word(row_bytes);
        self.number(block_pitch);
        self.number(row_pitch);
    }

    fn panel(&mut self, region: &Region, panels: &mut Panels) {
        self.region(region);
        let next = panels.len() as u32;
        let number = *panels.entry((region.buffer.0, region.offset)).or_insert(next);
        self.word(number);
    }

    fn place(&mut self, place: &Place) {
        self.at(place.at);
        self.region(&place.region);
    }

    fn partial(&mut self, partial: &Partial) {
        self.region(&partial.o);
        self.region(&partial.l);
    }

    fn task(&mut self, task: &Task, panels: &mut Panels) {
        if task.restart {
            self.tag(0);
        }
        self.op(&task.op, panels);
        self.word(task.waits.len() as u32);
        for wait in &task.waits {
            self.flag(wait.flag);
            self.word(wait.count);
            self.word(wait.stride);
            self.word(wait.at_least);
            self.tag(match wait.gate {
                Gate::Start => 0,
                Gate::KStep => 1,
                Gate::Output => 2,
            });
        }
        self.word(task.signals.len() as u32);
        for signal in &task.signals {
            self.at(signal.to);
            self.flag(signal.flag);
            self.word(signal.add);
            self.tag(u8::from(signal.early));
        }
    }

    fn main_loop(&mut self, main_loop: MainLoop) {
        self.tag(match main_loop {
            MainLoop::WaitEachStep => 0,
            MainLoop::Pipelined => 1,
            MainLoop::Library => 2,
        });
    }

    fn op(&mut self, op: &Op, panels: &mut Panels) {
        match op {
            Op::GemmTile { a, b, outs, tile, stages, drain, main_loop, notice } => {
                self.tag(1);
                self.panel(a, panels);
                self.panel(b, panels);
                self.tag(outs.len() as u8);
                for out in outs {
                    self.place(&out.place);
                    self.tag(u8::from(out.mode == WriteMode::Add));
                }
                for &size in tile {
                    self.short(size);
                }
                self.tag(*stages);
                self.tag(match drain {
                    Drain::Overlap => 0,
                    Drain::SmemRead => 1,
                    Drain::Visible => 2,
                });
                self.main_loop(*main_loop);
                if *notice > 0 {
                    self.tag(3);
                    self.short(*notice);
                }
            }
            Op::AttentionTile { q, k, v, state, out, first, last, tile, stages, main_loop } => {
                self.tag(2);
                for region in [q, k, v] {
                    self.panel(region, panels);
                }
                self.tag(u8::from(state.is_some()));
                if let Some(state) = state {
                    self.region(state);
                }
                self.tag(u8::from(out.is_some()));
                if let Some(out) = out {
                    self.partial(out);
                }
                self.tag(u8::from(*first));
                self.tag(u8::from(*last));
                for &size in tile {
                    self.short(size);
                }
                self.tag(*stages);
                self.main_loop(*main_loop);
            }
            Op::AttentionMerge { parts, out } => {
                self.tag(3);
                self.number(parts.len() as u64);
                for part in parts {
                    self.partial(part);
                }
                self.partial(out);
            }
            Op::Copy { src, dsts, engine, in_flight_bytes, load_store_overlap } => {
                self.tag(4);
                self.place(src);
                self.number(dsts.len() as u64);
                for dst in dsts {
                    self.place(dst);
                }
                self.tag(u8::from(*engine == Engine::LdSt));
                self.word(*in_flight_bytes);
                self.tag(u8::from(*load_store_overlap));
            }
            Op::GatherRows { table, src, dst, in_flight_rows, load_store_overlap, box_bytes } => {
                self.tag(5);
                self.word(table.start);
                self.word(table.len);
                self.short(src.0);
                self.region(dst);
                self.short(*in_flight_rows);
                self.tag(u8::from(*load_store_overlap) + 2 * u8::from(*box_bytes > 0));
                if *box_bytes > 0 {
                    self.word(*box_bytes);
                }
            }
            Op::Reduce { inputs, outputs, in_flight_bytes } => {
                self.tag(6);
                self.number(inputs.len() as u64);
                for input in inputs {
                    self.place(input);
                }
                self.number(outputs.len() as u64);
                for output in outputs {
                    self.place(output);
                }
                self.word(*in_flight_bytes);
            }
            Op::Put { src, dst, queue, publish, arrived, sent } => {
                self.tag(7);
                self.region(src);
                self.place(dst);
                self.short(*queue);
                match publish {
                    Publish::SameQueueWrite => self.tag(0),
                    Publish::Immediate => self.tag(1),
                    Publish::SeparateWrite { queue } => {
                        self.tag(2);
                        self.short(*queue);
                    }
                }
                self.flag(*arrived);
                self.tag(u8::from(sent.is_some()));
                if let Some(sent) = sent {
                    self.flag(*sent);
                }
            }
            Op::Collective { kind, src, dst } => {
                self.tag(8);
                self.tag(match kind {
                    CollectiveKind::AllGather => 0,
                    CollectiveKind::ReduceScatter => 1,
                    CollectiveKind::AllReduce => 2,
                    CollectiveKind::AllToAll => 3,
                });
                self.region(src);
                self.region(dst);
            }
            Op::Fill { dst } => {
                self.tag(9);
                self.place(dst);
            }
            Op::Sync => self.tag(10),
        }
    }
}

/// Ends a list of tasks; no op has this tag.
const END: u8 = 0;

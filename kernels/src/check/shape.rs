//! What a single task must satisfy: regions inside their buffers, sizes that agree, whole steps, slots that exist.

use crate::cluster::Offset;
use crate::schedule::{At, BufferId, Claim, Flag, Gate, GatherEntry, Op, Region, Schedule, Task, Wait};
use serde::Serialize;

/// Copies and puts move whole 16-byte pieces, the width of the widest load and store.
pub const PIECE_BYTES: u64 = 16;

/// The window of a `Ready` role is one warp's ballot.
pub const MAX_WINDOW: u32 = 32;

/// A window slot of a `Ready` role is evaluated by one lane, which has room for this many waits ...
pub const MAX_READY_WAITS: usize = 2;

/// ... and this many flags.
pub const MAX_READY_FLAGS: u64 = 32;

/// A rule that a single task breaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum ShapeError {
    /// A region leaves its buffer.
    #[error("region of {buffer} ends at byte {end}, the buffer has {bytes}")]
    OutOfBuffer {
        /// Buffer.
        buffer: String,
        /// One past the last byte.
        end: u64,
        /// Size of the buffer.
        bytes: u64,
    },
    /// A buffer or family index that the schedule does not list.
    #[error("{what} {index} does not exist, the schedule has {count}")]
    Unknown {
        /// Buffer or flag family.
        what: &'static str,
        /// Index.
        index: u64,
        /// How many there are.
        count: u64,
    },
    /// Two sizes that must agree.
    #[error("{what}: {have} bytes, need {need}")]
    Size {
        /// Which size.
        what: &'static str,
        /// Its value.
        have: u64,
        /// What it must be.
        need: u64,
    },
    /// A size that must be a positive multiple.
    #[error("{what} = {have} must be a positive multiple of {of}")]
    Multiple {
        /// Which size.
        what: &'static str,
        /// Its value.
        have: u64,
        /// Divisor.
        of: u64,
    },
    /// A flag that its family does not have.
    #[error("{flag}[{slot}] is out of range, the family has {slots} slots")]
    Slot {
        /// Family.
        flag: String,
        /// Slot.
        slot: u64,
        /// Slots of the family.
        slots: u32,
    },
    /// A signal leaves the node.
    #[error("signal to another node ({0}): only a put may raise a flag there")]
    SignalLeavesNode(Offset),
    /// A place on another node outside a put's destination.
    #[error("place on another node ({0}): only the destination of a put may be there")]
    PlaceLeavesNode(Offset),
    /// A put that does not go to the same-index GPU of another node.
    #[error("put must go to the same-index GPU of another node, not {0}")]
    PutTarget(Target),
    /// An attention tile without the region that it reads or writes.
    #[error("attention tile {0}")]
    Attention(&'static str),
    /// A gather's slice of the table.
    #[error("table slice {start}..{end} is outside the {entries} entries")]
    Table {
        /// First entry.
        start: u64,
        /// One past the last.
        end: u64,
        /// Entries of the table.
        entries: u64,
    },
    /// A wait that a `Ready` role cannot evaluate.
    #[error("a Ready role takes start waits only, at most {MAX_READY_WAITS} of {MAX_READY_FLAGS} flags in all: {0}")]
    ReadyWait(String),
    /// A restart that nothing heeds.
    #[error("restart in a list that is not strided, whose tasks go to whoever is free")]
    Restart,
    /// A gate that the op does not have.
    #[error("{gate:?} wait on a {op}, which has no such point")]
    Gate {
        /// Gate.
        gate: Gate,
        /// Op.
        op: &'static str,
    },
}

/// Who a put goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Target(pub At);

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            At::Offset(offset) => write!(f, "{offset}"),
            At::AllLocal => f.write_str("all local GPUs"),
        }
    }
}

/// The first rule that a task breaks; `table` is the gather table of its rank.
///
/// # Errors
/// [`ShapeError`], naming what, have and need.
pub fn check_task(
    schedule: &Schedule,
    claim: Claim,
    task: &Task,
    table: &[Option<GatherEntry>],
) -> Result<(), ShapeError> {
    check_regions(schedule, task)?;
    check_sizes(schedule, &task.op, table)?;
    for wait in &task.waits {
        check_wait(schedule, &task.op, wait)?;
    }
    if let Claim::Ready { .. } = claim {
        check_ready(&task.waits)?;
    }
    if task.restart && claim != Claim::Strided {
        return Err(ShapeError::Restart);
    }
    for signal in &task.signals {
        check_slot(schedule, signal.flag, u64::from(signal.flag.slot))?;
        if let At::Offset(offset) = signal.to
            && offset.dn % schedule.cluster.nodes != 0
        {
            return Err(ShapeError::SignalLeavesNode(offset));
        }
    }
    Ok(())
}

fn check_regions(schedule: &Schedule, task: &Task) -> Result<(), ShapeError> {
    let mut result = Ok(());
    let put = matches!(task.op, Op::Put { .. });
    task.op.for_each_access(|at, region, _| {
        if result.is_ok() {
            result = check_region(schedule, region);
        }
        if let At::Offset(offset) = at
            && offset.dn % schedule.cluster.nodes != 0
            && !put
            && result.is_ok()
        {
            result = Err(ShapeError::PlaceLeavesNode(offset));
        }
    });
    result
}

fn check_buffer(schedule: &Schedule, id: BufferId) -> Result<(), ShapeError> {
    let count = schedule.buffers.len() as u64;
    if u64::from(id.0) < count {
        return Ok(());
    }
    Err(ShapeError::Unknown { what: "buffer", index: u64::from(id.0), count })
}

fn check_region(schedule: &Schedule, region: &Region) -> Result<(), ShapeError> {
    check_buffer(schedule, region.buffer)?;
    let buffer = schedule.buffer(region.buffer);
    if region.end() > buffer.bytes {
        return Err(ShapeError::OutOfBuffer { buffer: buffer.name.clone(), end: region.end(), bytes: buffer.bytes });
    }
    Ok(())
}

fn check_slot(schedule: &Schedule, flag: Flag, slot: u64) -> Result<(), ShapeError> {
    let count = schedule.flags.len() as u64;
    if u64::from(flag.family.0) >= count {
        return Err(ShapeError::Unknown { what: "flag family", index: u64::from(flag.family.0), count });
    }
    let family = schedule.family(flag.family);
    if slot >= u64::from(family.slots) {
        return Err(ShapeError::Slot { flag: family.name.clone(), slot, slots: family.slots });
    }
    Ok(())
}

fn check_wait(schedule: &Schedule, op: &Op, wait: &Wait) -> Result<(), ShapeError> {
    positive("flags of a wait", u64::from(wait.count), 1)?;
    let last = u64::from(wait.flag.slot) + u64::from(wait.count - 1) * u64::from(wait.stride);
    check_slot(schedule, wait.flag, last)?;
    match wait.gate {
        Gate::Start => Ok(()),
        Gate::KStep if op.steps() == 0 => Err(ShapeError::Gate { gate: wait.gate, op: op.name() }),
        Gate::KStep => positive("steps of an op with a k_step wait", u64::from(op.steps()), u64::from(wait.count)),
        Gate::Output => {
            let writes = !matches!(op, Op::Sync | Op::Put { .. } | Op::Collective { .. });
            if writes { Ok(()) } else { Err(ShapeError::Gate { gate: wait.gate, op: op.name() }) }
        }
    }
}

fn check_ready(waits: &[Wait]) -> Result<(), ShapeError> {
    let flags: u64 = waits.iter().map(|wait| u64::from(wait.count)).sum();
    if waits.len() > MAX_READY_WAITS || flags > MAX_READY_FLAGS {
        return Err(ShapeError::ReadyWait(format!("{} waits of {flags} flags", waits.len())));
    }
    if let Some(wait) = waits.iter().find(|wait| wait.gate != Gate::Start) {
        return Err(ShapeError::ReadyWait(format!("a {:?} wait", wait.gate)));
    }
    Ok(())
}

const fn equal(what: &'static str, have: u64, need: u64) -> Result<(), ShapeError> {
    if have == need { Ok(()) } else { Err(ShapeError::Size { what, have, need }) }
}

const fn positive(what: &'static str, have: u64, of: u64) -> Result<(), ShapeError> {
    if have > 0 && of > 0 && have.is_multiple_of(of) { Ok(()) } else { Err(ShapeError::Multiple { what, have, of }) }
}

/// Offsets, pitches and rows of a region are whole 16-byte pieces.
fn pieces(what: &'static str, region: &Region) -> Result<(), ShapeError> {
    if region.bytes() == 0 {
        return Ok(());
    }
    let steps = [
        region.offset,
        u64::from(region.row_bytes),
        if region.rows > 1 { region.row_pitch } else { 0 },
        if region.blocks > 1 { region.block_pitch } else { 0 },
    ];
    match steps.into_iter().find(|step| !step.is_multiple_of(PIECE_BYTES)) {
        Some(have) => Err(ShapeError::Multiple { what, have, of: PIECE_BYTES }),
        None => Ok(()),
    }
}

fn check_sizes(schedule: &Schedule, op: &Op, table: &[Option<GatherEntry>]) -> Result<(), ShapeError> {
    match op {
        Op::GemmTile { a, b, outs, tile, .. } => {
            let [bm, bn, bk] = tile.map(u64::from);
            positive("tile rows bm", bm, 1)?;
            positive("tile columns bn", bn, 1)?;
            positive("left panel bytes", a.bytes(), 2 * bm)?;
            let depth = a.bytes() / 2 / bm;
            positive("depth K", depth, bk)?;
            equal("right panel", b.bytes(), depth * bn * 2)?;
            for out in outs {
                equal("output tile", out.place.region.bytes(), bm * bn * 2)?;
            }
            Ok(())
        }
        Op::AttentionTile { q, k, v, state, out, first, last, tile, .. } => {
            let [bq, bkv] = tile.map(u64::from);
            positive("tile rows bq", bq, 1)?;
            positive("Q block bytes", q.bytes(), 2 * bq)?;
            let row_bytes = q.bytes() / bq;
            positive("KV rows", u64::from(k.blocks) * u64::from(k.rows), bkv)?;
            equal("a row of K", u64::from(k.row_bytes), row_bytes)?;
            equal("V", v.bytes(), k.bytes())?;
            if let Some(state) = state {
                equal("state", state.bytes(), bq * (row_bytes * 2 + 8))?;
            }
            if state.is_none() && !(*first && *last) {
                return Err(ShapeError::Attention("needs a state, for it is not both first and last"));
            }
            if out.is_some() != *last {
                return Err(ShapeError::Attention("must have an out exactly when it is last"));
            }
            out.as_ref().map_or(Ok(()), |out| check_partial(&out.o, &out.l, bq, row_bytes))
        }
        Op::AttentionMerge { parts, out } => {
            let rows = out.l.bytes() / 4;
            positive("rows of a merge", rows, 1)?;
            let row_bytes = out.o.bytes() / rows;
            check_partial(&out.o, &out.l, rows, row_bytes)?;
            parts.iter().try_for_each(|part| check_partial(&part.o, &part.l, rows, row_bytes))
        }
        Op::Copy { src, dsts, .. } => {
            pieces("copy source", &src.region)?;
            for dst in dsts {
                equal("copy destination", dst.region.bytes(), src.region.bytes())?;
                pieces("copy destination", &dst.region)?;
            }
            Ok(())
        }
        Op::GatherRows { table: slice, src, dst, .. } => {
            check_buffer(schedule, *src)?;
            let (start, end) = (u64::from(slice.start), u64::from(slice.start) + u64::from(slice.len));
            let entries = table.len() as u64;
            if end > entries {
                return Err(ShapeError::Table { start, end, entries });
            }
            equal("gather destination", dst.bytes(), u64::from(slice.len) * u64::from(dst.row_bytes))?;
            pieces("gather destination", dst)?;
            let source = schedule.buffer(*src);
            for entry in table[start as usize..end as usize].iter().flatten() {
                let end = (u64::from(entry.row) + 1) * u64::from(dst.row_bytes);
                if end > source.bytes {
                    return Err(ShapeError::OutOfBuffer { buffer: source.name.clone(), end, bytes: source.bytes });
                }
            }
            Ok(())
        }
        Op::Reduce { inputs, outputs, .. } => {
            let need = inputs.first().map_or(0, |input| input.region.bytes());
            for place in inputs.iter().chain(outputs) {
                equal("reduce input or output", place.region.bytes(), need)?;
                pieces("reduce input or output", &place.region)?;
            }
            Ok(())
        }
        Op::Put { src, dst, arrived, sent, .. } => {
            match dst.at {
                At::Offset(offset)
                    if offset.dn % schedule.cluster.nodes != 0 && offset.dg % schedule.cluster.gpus_per_node == 0 => {}
                at => return Err(ShapeError::PutTarget(Target(at))),
            }
            if dst.region.bytes() != 0 {
                equal("put destination", dst.region.bytes(), src.bytes())?;
                pieces("put source", src)?;
                pieces("put destination", &dst.region)?;
            }
            check_slot(schedule, *arrived, u64::from(arrived.slot))?;
            sent.map_or(Ok(()), |sent| check_slot(schedule, sent, u64::from(sent.slot)))
        }
        Op::Collective { kind, src, dst } => {
            use crate::schedule::CollectiveKind as Kind;
            let ranks = schedule.cluster.ranks() as u64;
            let (have, need) = match kind {
                Kind::AllGather => (dst.bytes(), src.bytes() * ranks),
                Kind::ReduceScatter => (dst.bytes() * ranks, src.bytes()),
                Kind::AllReduce | Kind::AllToAll => (dst.bytes(), src.bytes()),
            };
            equal("collective result", have, need)?;
            positive("collective source bytes", src.bytes(), if *kind == Kind::AllToAll { ranks } else { 1 })
        }
        Op::Fill { dst } => pieces("fill destination", &dst.region),
        Op::Sync => Ok(()),
    }
}

fn check_partial(o: &Region, l: &Region, rows: u64, row_bytes: u64) -> Result<(), ShapeError> {
    equal("attention output", o.bytes(), rows * row_bytes)?;
    equal("log-sum-exp", l.bytes(), rows * 4)
}

//! What the cost of a task depends on.

use super::panels::Panels;
use smallvec::SmallVec;
use tilewire_kernels::schedule::{
    At, CollectiveKind, CtaCount, Drain, Engine, GatherEntry, MainLoop, Op, Place, Role, Task, WriteMode,
};

/// A place as far as cost goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Where {
    pub at: At,
    pub bytes: u64,
    pub add: bool,
}

/// Everything that a cost depends on, by op.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum CostKey {
    Gemm {
        tile: [u16; 3],
        steps: u32,
        misses: [u64; 2],
        main_loop: MainLoop,
        drain: Drain,
        notice: u16,
        outs: SmallVec<[Where; 2]>,
    },
    /// `streamed`: states and outputs, which the CTA moves beside its steps.
    Attention {
        tile: [u16; 2],
        steps: u32,
        head_dim: u32,
        read: u64,
        written: u64,
        streamed: u64,
        main_loop: MainLoop,
    },
    Merge {
        read: u64,
        written: u64,
    },
    Copy {
        src: Where,
        dsts: SmallVec<[Where; 2]>,
        engine: Engine,
        in_flight: u32,
        overlap: bool,
        lanes: u32,
    },
    Gather {
        local: u32,
        remote: u32,
        row_bytes: u32,
        zero: u32,
        in_flight: u16,
        overlap: bool,
        /// Instructions that move a row, one way; 0: they do not bind.
        boxes: u32,
    },
    Reduce {
        inputs: SmallVec<[Where; 4]>,
        outputs: SmallVec<[Where; 2]>,
        in_flight: u32,
        lanes: u32,
    },
    Put,
    Collective {
        kind: CollectiveKind,
        bytes: u64,
        in_place: bool,
        ctas: u32,
    },
    Fill {
        dst: Where,
    },
    Sync,
}

impl CostKey {
    /// Matrix work of a tile; 0 for all else.
    pub(super) fn flops(&self) -> u64 {
        match self {
            Self::Gemm { tile, steps, .. } => 2 * tile.map(u64::from).iter().product::<u64>() * u64::from(*steps),
            Self::Attention { tile, steps, head_dim, .. } => {
                4 * u64::from(tile[0]) * u64::from(tile[1]) * u64::from(*head_dim) * u64::from(*steps)
            }
            _ => 0,
        }
    }

    /// Bytes that a tile moves between memory and chip; 0 for all else.
    pub(super) fn moved(&self) -> u64 {
        match self {
            // What its outputs draw is charged where it is written, which may be a peer that does the same here.
            Self::Gemm { misses, outs, .. } => {
                let written: u64 = outs.iter().map(|out| if out.add { 2 * out.bytes } else { out.bytes }).sum();
                misses[0] + misses[1] + written
            }
            Self::Attention { read, written, .. } => read + written,
            _ => 0,
        }
    }
}

pub(super) fn cost_key(task: &Task, table: &[Option<GatherEntry>], role: &Role, panels: &mut Panels) -> CostKey {
    let place = |p: &Place| Where { at: p.at, bytes: p.region.bytes(), add: false };
    match &task.op {
        Op::GemmTile { a, b, outs, tile, drain, main_loop, notice, .. } => {
            let misses = [panels.fetch(a.buffer.0, a.offset, a.bytes()), panels.fetch(b.buffer.0, b.offset, b.bytes())];
            panels.next_tile();
            let outs = outs.iter().map(|o| Where { add: o.mode == WriteMode::Add, ..place(&o.place) }).collect();
            let (steps, main_loop, drain, notice) = (task.op.steps(), *main_loop, *drain, *notice);
            CostKey::Gemm { tile: *tile, steps, misses, main_loop, drain, notice, outs }
        }
        Op::AttentionTile { q, k, v, state, out, first, last, tile, main_loop, .. } => {
            let misses = panels.fetch(k.buffer.0, k.offset, k.bytes()) + panels.fetch(v.buffer.0, v.offset, v.bytes());
            panels.next_tile();
            let state_bytes = state.map_or(0, |s| s.bytes());
            let read = q.bytes() + if *first { 0 } else { state_bytes };
            let written = if *last { 0 } else { state_bytes } + out.map_or(0, |o| o.o.bytes() + o.l.bytes());
            CostKey::Attention {
                tile: *tile,
                steps: task.op.steps(),
                head_dim: q.row_bytes / 2,
                read: misses + read,
                written,
                streamed: written + read - q.bytes(),
                main_loop: *main_loop,
            }
        }
        Op::AttentionMerge { parts, out } => {
            let read = parts.iter().map(|p| p.o.bytes() + p.l.bytes()).sum();
            CostKey::Merge { read, written: out.o.bytes() + out.l.bytes() }
        }
        Op::Copy { src, dsts, engine, in_flight_bytes, load_store_overlap } => CostKey::Copy {
            src: place(src),
            dsts: dsts.iter().map(place).collect(),
            engine: *engine,
            in_flight: *in_flight_bytes,
            overlap: *load_store_overlap,
            lanes: role.lanes,
        },
        Op::GatherRows { table: slice, dst, in_flight_rows, load_store_overlap, box_bytes, .. } => {
            let entries = &table[slice.start as usize..(slice.start + slice.len) as usize];
            let local = entries.iter().flatten().filter(|e| e.dg == 0).count() as u32;
            let remote = entries.iter().flatten().count() as u32 - local;
            CostKey::Gather {
                local,
                remote,
                zero: slice.len - local - remote,
                row_bytes: dst.row_bytes,
                in_flight: *in_flight_rows,
                overlap: *load_store_overlap,
                boxes: if *box_bytes > 0 { dst.row_bytes.div_ceil(*box_bytes) } else { 0 },
            }
        }
        Op::Reduce { inputs, outputs, in_flight_bytes } => CostKey::Reduce {
            inputs: inputs.iter().map(place).collect(),
            outputs: outputs.iter().map(place).collect(),
            in_flight: *in_flight_bytes,
            lanes: role.lanes,
        },
        Op::Put { .. } => CostKey::Put,
        Op::Collective { kind, src, dst } => CostKey::Collective {
            kind: *kind,
            bytes: src.bytes().max(dst.bytes()),
            in_place: src == dst,
            ctas: match role.ctas {
                CtaCount::Fixed(ctas) => ctas,
                CtaCount::FromSplit | CtaCount::AllBut(_) => u32::MAX,
            },
        },
        Op::Fill { dst } => CostKey::Fill { dst: place(dst) },
        Op::Sync => CostKey::Sync,
    }
}

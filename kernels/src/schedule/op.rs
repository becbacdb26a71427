//! What a task does: the closed set of ops.

use super::{At, BufferId, Flag, Place, Region};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// How an output tile is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteMode {
    /// Plain store.
    Store,
    /// Atomic add in the memory of the target, in any order.
    Add,
}

/// When the next tile of a CTA may begin to load its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Drain {
    /// At once: the store of this tile overlaps the next main loop.
    Overlap,
    /// After the store has read shared memory (output staging aliases an input stage).
    SmemRead,
    /// After the store is visible.
    Visible,
}

/// How the main loop of a tile issues its matrix instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MainLoop {
    /// Waits for the matrix unit at every k step (the published kernels).
    WaitEachStep,
    /// Keeps one k step in flight.
    Pipelined,
    /// A vendor library's kernel (baselines).
    Library,
}

/// What moves bytes in a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// Bulk asynchronous copies (TMA) through shared memory.
    Bulk,
    /// 16-byte loads and stores through registers.
    LdSt,
}

/// How a receiver learns that a put has landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Publish {
    /// A second write on the same queue, after the data.
    SameQueueWrite,
    /// An immediate that the receiver's proxy turns into the flag.
    Immediate,
    /// A write of its own, which an unordered fabric may deliver before the data (published kernels on EFA).
    SeparateWrite {
        /// The queue of the flag write.
        queue: u16,
    },
}

/// One output of a GEMM tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TileOut {
    /// Where the tile goes.
    pub place: Place,
    /// Store or add.
    pub mode: WriteMode,
}

/// One row that a gather fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GatherEntry {
    /// GPU offset inside the node of the rank that holds the row.
    pub dg: u16,
    /// Row of the source buffer there.
    pub row: u32,
}

/// A slice of the rank's gather table, see [`TaskSource::table`](super::TaskSource::table).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TableSlice {
    /// First entry.
    pub start: u32,
    /// Number of entries, one per row of the destination.
    pub len: u32,
}

/// Flash-attention's output and log-sum-exp of one Q block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Partial {
    /// bf16 `[rows, head_dim]`, normalised.
    pub o: Region,
    /// f32 `[rows]`, natural-log sum of exponentials of the scaled scores.
    pub l: Region,
}

/// A library collective. `W` is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// `dst` is the concatenation of all ranks' `src`.
    AllGather,
    /// `src` has W parts; `dst` is the sum over ranks of the part with the own number.
    ReduceScatter,
    /// `dst` is the sum over ranks of `src`.
    AllReduce,
    /// `src` and `dst` have W parts; part j of `dst` on rank i is part i of `src` on rank j.
    AllToAll,
}

/// A unit of work for one CTA. The set is closed: a new op touches the simulator, the functional executor and the
/// device interpreter, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    /// `outs (+)= a x b`: a is bf16 `[bm, K]` row-major, b is bf16 `[K, bn]` row-major, f32 accumulation, bf16 out.
    /// Runs `K / bk` steps.
    GemmTile {
        /// Left operand panel, own rank.
        a: Region,
        /// Right operand panel, own rank.
        b: Region,
        /// One or two outputs.
        outs: SmallVec<[TileOut; 1]>,
        /// bm, bn, bk.
        tile: [u16; 3],
        /// Shared-memory stages of the operand pipeline.
        stages: u8,
        /// Epilogue rule.
        drain: Drain,
        /// Main loop.
        main_loop: MainLoop,
        /// One in so many of these tiles ends with its CTA telling another GPU of them, which it waits for: a fence for the
        /// whole system, and an atomic that returns. 0: flags are raised beside the CTA.
        #[serde(default, skip_serializing_if = "is_none")]
        notice: u16,
    },
    /// Flash attention of one Q block over a run of KV rows; one step per KV block of `tile[1]` rows.
    AttentionTile {
        /// bf16 `[bq, head_dim]`.
        q: Region,
        /// bf16 `[kv rows, head_dim]`; blocks of the region follow each other along the rows.
        k: Region,
        /// bf16 `[kv rows, head_dim]`, laid out like `k`.
        v: Region,
        /// f32 `[bq, head_dim + 2]`: unnormalised output, running maximum (of scores times log2(e)/sqrt(d)), running sum.
        state: Option<Region>,
        /// The finished block, for the tile that is `last`.
        out: Option<Partial>,
        /// Starts from an empty state instead of reading `state`.
        first: bool,
        /// Writes `out` instead of `state`.
        last: bool,
        /// bq, bkv.
        tile: [u16; 2],
        /// KV stages in shared memory.
        stages: u8,
        /// Loop over the KV blocks.
        main_loop: MainLoop,
    },
    /// Combines partial attention results of the same Q block by their log-sum-exps.
    AttentionMerge {
        /// Partial results; `out` may be one of them.
        parts: SmallVec<[Partial; 2]>,
        /// Combined result.
        out: Partial,
    },
    /// Copies one region to one or more places of the same size.
    Copy {
        /// Source.
        src: Place,
        /// Destinations.
        dsts: SmallVec<[Place; 1]>,
        /// Mechanism.
        engine: Engine,
        /// Bytes that one CTA keeps in flight.
        in_flight_bytes: u32,
        /// Whether loads of the next piece overlap stores of the last one.
        load_store_overlap: bool,
    },
    /// Fetches rows of `src` (own or neighbour GPUs) into consecutive rows of `dst`; an empty entry writes a zero row.
    GatherRows {
        /// Which entries of the rank's table.
        table: TableSlice,
        /// Source buffer; its rows are `dst.row_bytes` long and contiguous.
        src: BufferId,
        /// Destination rows, own rank.
        dst: Region,
        /// Rows in flight per CTA.
        in_flight_rows: u16,
        /// Whether loads of the next rows overlap stores of the last ones.
        load_store_overlap: bool,
        /// Bytes of a row that one instruction loads, or stores; 0: a row each. A copy engine that is told of its boxes
        /// one by one is bound by that.
        #[serde(default, skip_serializing_if = "is_none")]
        box_bytes: u32,
    },
    /// Sums bf16 inputs element by element in f32 and writes the sum to every output.
    Reduce {
        /// Inputs, all of one size.
        inputs: SmallVec<[Place; 2]>,
        /// Outputs, each of that size.
        outputs: SmallVec<[Place; 1]>,
        /// Bytes that one CTA keeps in flight, over all inputs.
        in_flight_bytes: u32,
    },
    /// Asks the proxy for an RDMA write to the same-index GPU of another node.
    Put {
        /// Source, own rank; read until `sent`.
        src: Region,
        /// Destination on another node; zero bytes raise a flag only.
        dst: Place,
        /// NIC queue.
        queue: u16,
        /// How the receiver learns of it.
        publish: Publish,
        /// Raised from 0 to 1 at the destination; belongs to this put alone.
        arrived: Flag,
        /// Counted up on the own rank when the source may be reused.
        sent: Option<Flag>,
    },
    /// A library collective over all ranks (baselines): a black box that starts when every rank has arrived and ends
    /// on all of them. Contiguous bf16 regions; parts are in rank order.
    Collective {
        /// Which collective.
        kind: CollectiveKind,
        /// What this rank gives.
        src: Region,
        /// What this rank gets; may equal `src` for an all-reduce.
        dst: Region,
    },
    /// Writes zeros.
    Fill {
        /// Destination.
        dst: Place,
    },
    /// No work: waits, then signals.
    Sync,
}

impl Op {
    /// The name used in tables, traces and errors.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::GemmTile { .. } => "gemm_tile",
            Self::AttentionTile { .. } => "attention_tile",
            Self::AttentionMerge { .. } => "attention_merge",
            Self::Copy { .. } => "copy",
            Self::GatherRows { .. } => "gather_rows",
            Self::Reduce { .. } => "reduce",
            Self::Put { .. } => "put",
            Self::Collective { .. } => "collective",
            Self::Fill { .. } => "fill",
            Self::Sync => "sync",
        }
    }

    /// Number of steps that `k_step` waits can gate; 0 for ops without steps.
    pub fn steps(&self) -> u32 {
        match self {
            Self::GemmTile { a, tile, .. } => (a.bytes() / 2 / u64::from(tile[0]) / u64::from(tile[2])) as u32,
            Self::AttentionTile { k, tile, .. } => {
                (u64::from(k.blocks) * u64::from(k.rows) / u64::from(tile[1])) as u32
            }
            _ => 0,
        }
    }

    /// Calls `f` for every region of this op in a fixed order, with the rank it lies on and how it is touched.
    ///
    /// The rows that a [`Op::GatherRows`] reads are not regions of the op; executors take them from the table.
    pub fn for_each_access(&self, mut f: impl FnMut(At, &Region, Access)) {
        match self {
            Self::GemmTile { a, b, outs, .. } => {
                f(At::ME, a, Access::Read);
                f(At::ME, b, Access::Read);
                for out in outs {
                    let access = if out.mode == WriteMode::Add { Access::Add } else { Access::Write };
                    f(out.place.at, &out.place.region, access);
                }
            }
            Self::AttentionTile { q, k, v, state, out, first, last, .. } => {
                for region in [q, k, v] {
                    f(At::ME, region, Access::Read);
                }
                if let Some(state) = state {
                    if !first {
                        f(At::ME, state, Access::Read);
                    }
                    if !last {
                        f(At::ME, state, Access::Write);
                    }
                }
                if let Some(out) = out {
                    f(At::ME, &out.o, Access::Write);
                    f(At::ME, &out.l, Access::Write);
                }
            }
            Self::AttentionMerge { parts, out } => {
                for part in parts {
                    f(At::ME, &part.o, Access::Read);
                    f(At::ME, &part.l, Access::Read);
                }
                f(At::ME, &out.o, Access::Write);
                f(At::ME, &out.l, Access::Write);
            }
            Self::Copy { src, dsts, .. } => {
                f(src.at, &src.region, Access::Read);
                for dst in dsts {
                    f(dst.at, &dst.region, Access::Write);
                }
            }
            Self::GatherRows { dst, .. } => f(At::ME, dst, Access::Write),
            Self::Reduce { inputs, outputs, .. } => {
                for input in inputs {
                    f(input.at, &input.region, Access::Read);
                }
                for output in outputs {
                    f(output.at, &output.region, Access::Write);
                }
            }
            Self::Put { src, dst, .. } => {
                f(At::ME, src, Access::Read);
                f(dst.at, &dst.region, Access::Write);
            }
            Self::Collective { src, dst, .. } => {
                f(At::ME, src, Access::Read);
                f(At::ME, dst, Access::Write);
            }
            Self::Fill { dst } => f(dst.at, &dst.region, Access::Write),
            Self::Sync => {}
        }
    }
}

/// How an op touches a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reads it.
    Read,
    /// Overwrites it.
    Write,
    /// Adds to it atomically; adds commute with each other and with nothing else.
    Add,
}

/// For serde, which passes references.
fn is_none<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

//! The one type that every executor takes: [`Schedule`].
//!
//! ```text
//! Schedule ── launches ── roles ── tasks          a task: waits ─▶ op ─▶ signals
//!    │                      │                     waits: flags of the own rank
//!    │                      └ CTA count (from the split or fixed), claim rule, recycling
//!    ├ buffers (same on every rank), flag families
//!    └ symmetry: which rotations of the cluster leave the skeleton unchanged
//! ```
//!
//! A schedule is logical: bytes, flags and order, never a speed. It does not know the split: the number of CTAs of a
//! role is applied when the schedule is run. Peers are named by [`Offset`] from the task's own rank, so tasks of
//! different ranks differ, at most, in the offsets of their regions; a task without these is its *skeleton*.
//!
//! A tiny schedule, one rank sends one block to the next node, which waits for it and copies it:
//!
//! ```text
//! inter_send   [0] Put x[0..1024] -> +(1, 0) y[0..1024]   raises arrived[0] there
//! intra_comm   [0] wait arrived[0] >= 1   Copy y[0..1024] -> out[0..1024]
//! ```

use crate::cluster::{Cluster, Fabric, Offset, Rank};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 16-bit brain float.
    Bf16,
    /// 32-bit float.
    F32,
    /// 32-bit unsigned integer.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::U32 => 4,
        }
    }
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BufferUse {
    /// Holds the input slices of its kernel before a run. What no slice names, tasks may write: landed tokens, for
    /// example, lie beside the own ones.
    Input,
    /// Holds the result after the run.
    Output,
    /// Anything else; zero before the first run only if a task fills it.
    Scratch,
}

/// Index of a buffer in [`Schedule::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BufferId(pub u16);

/// A buffer: same name and size on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// Name, unique in the schedule.
    pub name: String,
    /// Size on each rank.
    pub bytes: u64,
    /// Element type.
    pub dtype: DType,
    /// Role of the buffer in the run.
    pub usage: BufferUse,
}

/// Index of a flag family in [`Schedule::flags`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FamilyId(pub u16);

/// A family of flags: `slots` monotonic u32 counters on every rank, all zero when a run starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlagFamily {
    /// Name, unique in the schedule.
    pub name: String,
    /// Counters per rank and bank.
    pub slots: u32,
}

/// One flag: a slot of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Flag {
    /// Family.
    pub family: FamilyId,
    /// Slot in the family.
    pub slot: u32,
}

/// A strided box of bytes in a buffer: `blocks` x `rows` x `row_bytes`.
///
/// The bytes of a region are ordered block by block, row by row: row-major and tile-major are both one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// Rows of a block.
    pub rows: u32,
    /// Contiguous bytes of a row.
    pub row_bytes: u32,
    /// Bytes from one block to the next.
    pub block_pitch: u64,
    /// Bytes from one row to the next.
    pub row_pitch: u64,
}

impl Region {
    /// `rows` rows of `row_bytes`, `row_pitch` apart.
    pub const fn matrix(buffer: BufferId, offset: u64, rows: u32, row_bytes: u32, row_pitch: u64) -> Self {
        Self { buffer, offset, blocks: 1, rows, row_bytes, block_pitch: 0, row_pitch }
    }

    /// A contiguous run of bytes, as rows of `row_bytes` (a row holds at most `u32::MAX` bytes).
    pub const fn contiguous(buffer: BufferId, offset: u64, rows: u32, row_bytes: u32) -> Self {
        Self::matrix(buffer, offset, rows, row_bytes, row_bytes as u64)
    }

    /// Payload bytes.
    pub const fn bytes(&self) -> u64 {
        self.blocks as u64 * self.rows as u64 * self.row_bytes as u64
    }

    /// One past the last byte touched, or `offset` when empty.
    pub const fn end(&self) -> u64 {
        if self.bytes() == 0 {
            return self.offset;
        }
        self.offset
            + (self.blocks as u64 - 1) * self.block_pitch
            + (self.rows as u64 - 1) * self.row_pitch
            + self.row_bytes as u64
    }

    /// Calls `f(start, bytes)` for each contiguous run, in order; neighbouring rows that touch are one run.
    pub fn for_each_run(&self, mut f: impl FnMut(u64, u64)) {
        if self.bytes() == 0 {
            return;
        }
        let dense = self.row_pitch == u64::from(self.row_bytes) || self.rows == 1;
        for block in 0..u64::from(self.blocks) {
            let start = self.offset + block * self.block_pitch;
            if dense {
                f(start, u64::from(self.rows) * u64::from(self.row_bytes));
            } else {
                for row in 0..u64::from(self.rows) {
                    f(start + row * self.row_pitch, u64::from(self.row_bytes));
                }
            }
        }
    }
}

/// Whose memory or flags are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum At {
    /// The rank at this offset from the task's own rank.
    Offset(Offset),
    /// Every GPU of the own node through NVLink SHARP: a store is a multicast, a read an in-switch sum.
    AllLocal,
}

impl At {
    /// The task's own rank.
    pub const ME: Self = Self::Offset(Offset::ME);

    /// The GPU `dg` further in the own node.
    pub const fn local(dg: u16) -> Self {
        Self::Offset(Offset::local(dg))
    }

    /// The same-index GPU `dn` nodes further.
    pub const fn node(dn: u16) -> Self {
        Self::Offset(Offset::node(dn))
    }
}

/// A region on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// Whose memory.
    pub at: At,
    /// Which bytes.
    pub region: Region,
}

impl Place {
    /// A region of the own rank.
    pub const fn me(region: Region) -> Self {
        Self { at: At::ME, region }
    }
}

/// What a wait holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// The whole task.
    Start,
    /// Step `i` of an op with `K` steps waits for flag `floor(i * count / K)` of the run.
    KStep,
    /// The epilogue's writes only.
    Output,
}

/// A wait on a strided run of the own rank's flags: `count` flags, each at least `at_least`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Wait {
    /// First flag of the run.
    pub flag: Flag,
    /// Flags in the run.
    pub count: u32,
    /// Slots from one flag of the run to the next.
    pub stride: u32,
    /// Value that each flag must have reached.
    pub at_least: u32,
    /// What is held back.
    pub gate: Gate,
}

impl Wait {
    /// A start wait on a single flag.
    pub const fn on(family: FamilyId, slot: u32, at_least: u32) -> Self {
        Self { flag: Flag { family, slot }, count: 1, stride: 1, at_least, gate: Gate::Start }
    }

    /// A wait on `count` flags, `stride` slots apart.
    pub const fn run(family: FamilyId, slot: u32, count: u32, stride: u32, at_least: u32, gate: Gate) -> Self {
        Self { flag: Flag { family, slot }, count, stride, at_least, gate }
    }

    /// The slots of the run.
    pub fn slots(&self) -> impl Iterator<Item = u32> + use<> {
        let (slot, stride) = (self.flag.slot, self.stride);
        (0..self.count).map(move |i| slot + i * stride)
    }
}

/// Adds to a flag of some rank of the own node, after the op's writes to that rank are visible there (after all its
/// writes, where it writes nothing to that rank) and the op's reads are done. On a put it says only that the put was
/// posted: its source is read until `sent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signal {
    /// Whose flag.
    pub to: At,
    /// Which flag.
    pub flag: Flag,
    /// Amount added.
    pub add: u32,
    /// Published kernels only: raised without waiting for the op's writes. The checker reports it.
    pub early: bool,
}

impl Signal {
    /// Adds 1 to a flag at `to`.
    pub const fn one(to: At, family: FamilyId, slot: u32) -> Self {
        Self { to, flag: Flag { family, slot }, add: 1, early: false }
    }
}

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
    /// A write on another queue, ordered with nothing (published `gemm_ar` on EFA).
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

/// A slice of the rank's gather table, see [`TaskSource::table`].
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

/// A unit of work with its waits and signals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The work.
    #[serde(flatten)]
    pub op: Op,
    /// Flags of the own rank that it waits for.
    pub waits: SmallVec<[Wait; 2]>,
    /// Flags that it raises.
    pub signals: SmallVec<[Signal; 2]>,
}

impl Task {
    /// A task without waits and signals.
    pub fn new(op: Op) -> Self {
        Self { op, waits: SmallVec::new(), signals: SmallVec::new() }
    }

    /// Adds a wait.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.waits.push(wait);
        self
    }

    /// Adds a signal.
    #[must_use]
    pub fn signal(mut self, signal: Signal) -> Self {
        self.signals.push(signal);
        self
    }
}

/// The four kinds of role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleKind {
    /// Matrix work.
    Compute,
    /// Moves or sums data between GPUs of a node.
    IntraComm,
    /// Posts puts.
    InterSend,
    /// The receiving side: copies, notices or sums what arrived.
    InterReduce,
}

impl RoleKind {
    /// All roles in the order of a split.
    pub const ALL: [Self; 4] = [Self::Compute, Self::IntraComm, Self::InterSend, Self::InterReduce];

    /// The name used in splits, tables and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::IntraComm => "intra_comm",
            Self::InterSend => "inter_send",
            Self::InterReduce => "inter_reduce",
        }
    }

    /// The short name used on the command line.
    pub const fn short(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::IntraComm => "intra",
            Self::InterSend => "send",
            Self::InterReduce => "reduce",
        }
    }
}

impl fmt::Display for RoleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How many CTAs (one per SM) each role of the big launch gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RoleSplit {
    /// CTAs of the compute role.
    pub compute: u32,
    /// CTAs of the intra-node communication role.
    pub intra_comm: u32,
    /// CTAs of the inter-node send role.
    pub inter_send: u32,
    /// CTAs of the inter-node reduce role.
    pub inter_reduce: u32,
}

impl RoleSplit {
    /// CTAs of a role.
    pub const fn get(&self, kind: RoleKind) -> u32 {
        match kind {
            RoleKind::Compute => self.compute,
            RoleKind::IntraComm => self.intra_comm,
            RoleKind::InterSend => self.inter_send,
            RoleKind::InterReduce => self.inter_reduce,
        }
    }

    /// Sets the CTAs of a role.
    pub const fn set(&mut self, kind: RoleKind, ctas: u32) {
        match kind {
            RoleKind::Compute => self.compute = ctas,
            RoleKind::IntraComm => self.intra_comm = ctas,
            RoleKind::InterSend => self.inter_send = ctas,
            RoleKind::InterReduce => self.inter_reduce = ctas,
        }
    }

    /// CTAs over all roles.
    pub fn total(&self) -> u64 {
        RoleKind::ALL.iter().map(|&kind| u64::from(self.get(kind))).sum()
    }
}

impl fmt::Display for RoleSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "compute={},intra={},send={},reduce={}",
            self.compute, self.intra_comm, self.inter_send, self.inter_reduce
        )
    }
}

/// Where a role's CTA count comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CtaCount {
    /// From the split, by the role's kind.
    FromSplit,
    /// The same for every split (helper launches).
    Fixed(u32),
    /// All SMs of the GPU that the other roles of the launch leave, less so many that are left to a launch that runs
    /// beside this one (one-task-per-block grids, baselines).
    AllBut(u32),
}

impl CtaCount {
    /// For a count that depends on the GPU: SMs that it leaves to other launches.
    pub const fn spared(self) -> Option<u32> {
        match self {
            Self::FromSplit | Self::Fixed(_) => None,
            Self::AllBut(sms) => Some(sms),
        }
    }
}

/// How CTAs (or lanes) of a role take tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// Worker i of n takes tasks i, i + n, ...
    Strided,
    /// The next free worker takes the next task.
    Ticket,
    /// A cursor stands on the first unclaimed task; a free worker takes the lowest unclaimed task in the window whose
    /// waits are met.
    Ready {
        /// Tasks that the window spans, at most 32.
        window: u32,
    },
}

/// A role of a launch. Its tasks come from [`TaskSource::tasks`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// Kind of the role.
    pub kind: RoleKind,
    /// CTA count.
    pub ctas: CtaCount,
    /// Independent workers of a CTA; they share its throughput.
    pub lanes: u32,
    /// Claim rule.
    pub claim: Claim,
    /// Role of the same launch (by index) that a CTA joins when this list is empty.
    pub recycle: Option<usize>,
}

impl Role {
    /// A role whose CTA count the split gives, with one lane, that does not recycle.
    #[must_use]
    pub const fn new(kind: RoleKind, claim: Claim) -> Self {
        Self { kind, ctas: CtaCount::FromSplit, lanes: 1, claim, recycle: None }
    }
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Name, unique in the schedule.
    pub name: String,
    /// Launches (by index, all earlier in the list) that must have ended on this rank.
    pub after: Vec<usize>,
    /// Roles.
    pub roles: Vec<Role>,
}

/// Pairs of launches with no `after` path between them, the earlier one first: they may run at the same time.
///
/// `after` lists, launch by launch, the earlier launches that each one waits for.
pub fn side_by_side<'a>(after: impl IntoIterator<Item = &'a [usize]>) -> Vec<(usize, usize)> {
    // Everything before each launch, directly or not.
    let mut before: Vec<Vec<bool>> = Vec::new();
    let mut pairs = Vec::new();
    for (launch, direct) in after.into_iter().enumerate() {
        let mut all = vec![false; launch];
        for &earlier in direct {
            all[earlier] = true;
            all.iter_mut().zip(&before[earlier]).for_each(|(all, &more)| *all |= more);
        }
        pairs.extend((0..launch).filter(|&earlier| !all[earlier]).map(|earlier| (earlier, launch)));
        before.push(all);
    }
    pairs
}

/// Rotations of the cluster under which all skeletons are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Symmetry {
    /// Ranks (n, g) and (n', g) share a skeleton.
    pub nodes: bool,
    /// Ranks (n, g) and (n, g') share a skeleton.
    pub gpus: bool,
}

impl Symmetry {
    /// One skeleton for all ranks: such a schedule can be run in mirror mode.
    pub const FULL: Self = Self { nodes: true, gpus: true };
    /// A skeleton per rank.
    pub const NONE: Self = Self { nodes: false, gpus: false };

    /// Whether all ranks share one skeleton.
    pub const fn is_full(self) -> bool {
        self.nodes && self.gpus
    }

    /// The rank whose skeleton stands for `rank`'s.
    pub const fn representative(self, rank: Rank) -> Rank {
        Rank { node: if self.nodes { 0 } else { rank.node }, gpu: if self.gpus { 0 } else { rank.gpu } }
    }
}

/// Writes down the tasks of a schedule, role by role.
pub trait TaskSource: Send + Sync {
    /// Streams the tasks of one role of one rank in list order.
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task));

    /// The gather table of a rank; empty for kernels without [`Op::GatherRows`].
    fn table(&self, _rank: Rank) -> Vec<Option<GatherEntry>> {
        Vec::new()
    }
}

/// A fused kernel on a cluster, written down once and executed by the simulator, the functional executor and the GPU.
pub struct Schedule {
    /// Kernel name.
    pub kernel: String,
    /// Cluster.
    pub cluster: Cluster,
    /// Fabric whose puts it uses.
    pub fabric: Fabric,
    /// Problem and options in canonical text, as far as they shape the schedule.
    pub spec: String,
    /// Buffers.
    pub buffers: Vec<Buffer>,
    /// Flag families.
    pub flags: Vec<FlagFamily>,
    /// Launches; `after` edges lead to earlier ones.
    pub launches: Vec<Launch>,
    /// Which ranks share a skeleton.
    pub symmetry: Symmetry,
    /// Useful floating-point operations of the busiest rank, padding not counted.
    pub useful_flops: u64,
    /// Tasks and tables.
    pub source: Box<dyn TaskSource>,
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schedule")
            .field("kernel", &self.kernel)
            .field("cluster", &self.cluster)
            .field("fabric", &self.fabric)
            .field("spec", &self.spec)
            .field("launches", &self.launches)
            .finish_non_exhaustive()
    }
}

impl Schedule {
    /// Streams the tasks of one role of one rank in list order.
    pub fn for_each_task(&self, rank: Rank, launch: usize, role: usize, mut sink: impl FnMut(Task)) {
        self.source.tasks(rank, launch, role, &mut sink);
    }

    /// Collects the tasks of one role; for tests and small schedules.
    pub fn tasks(&self, rank: Rank, launch: usize, role: usize) -> Vec<Task> {
        let mut tasks = Vec::new();
        self.for_each_task(rank, launch, role, |task| tasks.push(task));
        tasks
    }

    /// `(launch, role)` pairs in order.
    pub fn role_indices(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.launches.iter().enumerate().flat_map(|(l, launch)| (0..launch.roles.len()).map(move |r| (l, r)))
    }

    /// Ranks that an execution must visit to see every skeleton.
    pub fn representatives(&self) -> Vec<Rank> {
        self.cluster.iter().filter(|&rank| self.symmetry.representative(rank) == rank).collect()
    }

    /// The buffer with this id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[usize::from(id.0)]
    }

    /// The flag family with this id.
    pub fn family(&self, id: FamilyId) -> &FlagFamily {
        &self.flags[usize::from(id.0)]
    }
}

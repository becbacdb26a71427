//! Ring attention: non-causal attention forward with the sequence over all ranks.
//!
//! **Shape** q, k, v `[batch * heads, seq, head_dim]`; rank r holds positions `r * s ..` of every head (s = seq/W) and
//! ends with the attention of its queries over all keys: `out` (bf16) and `l`, the natural logarithm of the sum of
//! exponentials of scaled scores (f32).
//!
//! K and V go round the GPUs of a node in G - 1 hops. That is a round; there are N of them, each with the K and V of
//! another node. A *stage* is what a rank computes between two hops: stage (j, h) of rank (n, g) uses the K and V of
//! node n - j (published: n + j), GPU g - h.
//!
//! ```text
//! ring = true_ring: one persistent launch, double buffers, everything flows through flags
//!   compute     wait full (K runs, V runs), state[q block] = stage      AttentionTile
//!               signals state, credit (to the left neighbour, which fills the buffer) or free (landing)
//!   intra_comm  wait full or arrived, credit      Copy a chunk of a head to the right neighbour; signals full there
//!   inter_send  wait arrived, credit of the node  Put the chunk to the next node, for the next round
//!               wait free, sent                   Put of 0 bytes: my landing buffer may be filled again
//!
//! ring = all_peers_landing: a sequence of launches
//!   send     Put all K and V to all nodes          then a barrier over the GPUs of the node
//!   land     (rounds 1 ..)  wait arrived   Copy from landing to K and V          then a barrier
//!   stage    AttentionTile -> partial result; meanwhile Copy K and V to the right neighbour's other buffer
//!   merge    (all but the first stage)  AttentionMerge of the partial and the result so far         then a barrier
//! ```
//!
//! In the published form K and V themselves are the sources of puts and the second buffer of the ring; nothing waits
//! for the puts before the left neighbour overwrites them in stage (0, 1). The checker reports it.

use crate::cluster::{Cluster, Rank};
use crate::kernel::{
    BuildError, EFA_PUBLISH, Element, Expected, Kernel, Posting, Problem, ProblemKind, QUEUE_ORDER, QUEUES, Slice,
    Spec, divides, fits_u32, lcm, spec_text, unused_without_neighbours,
};
use crate::options::{OptionSet, OptionSpec, Value, Values};
use crate::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, CtaCount, DType, Engine, FamilyId, Flag, FlagFamily, Gate, Launch,
    MainLoop, Op, Partial, Place, Region, Role, RoleKind, Schedule, Signal, Symmetry, Task, TaskSource, Wait,
};
use smallvec::{SmallVec, smallvec};

const NAME: &str = "ring_attention";

const Q: BufferId = BufferId(0);
const K: BufferId = BufferId(1);
const V: BufferId = BufferId(2);
const OUT: BufferId = BufferId(3);
const L: BufferId = BufferId(4);
/// What other nodes put here.
const LANDING: BufferId = BufferId(5);
/// `true_ring`: two buffers that the left neighbour fills. `all_peers_landing`: the one beside `k` and `v`.
const RING: BufferId = BufferId(6);
/// `true_ring`: running state of every Q block.
const STATE: BufferId = BufferId(7);
/// `all_peers_landing`: partial result of a stage.
const OUT_PART: BufferId = BufferId(7);
const L_PART: BufferId = BufferId(8);

// Flags of `true_ring`.
/// `[ring buffer][head][chunk]`: fills of a chunk by the left neighbour.
const FULL: FamilyId = FamilyId(0);
/// `[ring buffer][head]`: reads, by the right neighbour, of what I filled there.
const CREDIT: FamilyId = FamilyId(1);
/// `[Q block]`: stages done.
const STAGES_DONE: FamilyId = FamilyId(2);
/// `[round - 1][head][chunk]`: landed from the previous node.
const ARRIVED: FamilyId = FamilyId(3);
/// `[landing buffer][head]`: reads of a landing buffer.
const FREE: FamilyId = FamilyId(4);
/// `[landing buffer][head]`: puts out of a landing buffer that have left.
const SENT: FamilyId = FamilyId(5);
/// `[round - 1][head]`: the next node's landing buffer of that round is free again.
const NODE_CREDIT: FamilyId = FamilyId(6);

// Flags of `all_peers_landing`.
/// `[sender][chunk]`.
const LANDED: FamilyId = FamilyId(0);
/// `[barrier]`: GPUs that came.
const CAME: FamilyId = FamilyId(1);

/// Bytes that a CTA of the published landing copy has in flight: 512 threads, one 16-byte load each. Source: mKernel
/// at 68644c9; how far its loop is unrolled is not known.
const LAND_IN_FLIGHT_BYTES: u32 = 512 * 16;

/// Widest head: keeps every byte offset far inside 64 bits.
const MAX_HEAD_DIM: u64 = 4096;

/// Ring attention.
pub struct RingAttention;

const OPTIONS: &[OptionSpec] = &[
    OptionSpec {
        name: "ring",
        doc: "A ring through all ranks in one launch, or all puts at once and a launch per stage (published).",
        values: Values::Words(&["true_ring", "all_peers_landing"]),
    },
    OptionSpec { name: "tile_q", doc: "Rows of a Q block.", values: Values::Int { min: 1, max: 1024 } },
    OptionSpec { name: "tile_kv", doc: "Rows of a KV block.", values: Values::Int { min: 1, max: 1024 } },
    OptionSpec { name: "stages", doc: "KV blocks in shared memory.", values: Values::Int { min: 1, max: 16 } },
    OptionSpec {
        name: "chunk_rows",
        doc: "Rows of K or V in a put or a copy; true_ring: a divisor of the rows that a rank holds of a head.",
        values: Values::Int { min: 1, max: 1 << 20 },
    },
    OptionSpec {
        name: "copy_in_flight_bytes",
        doc: "Bytes that an intra_comm CTA keeps in flight.",
        values: Values::Int { min: 16, max: 262_144 },
    },
    OptionSpec {
        name: "recycle",
        doc: "CTAs of intra_comm and inter_send join compute when their lists are empty.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "nvls",
        doc: "Barriers of all_peers_landing signal all GPUs by one multicast.",
        values: Values::Bool,
    },
    QUEUES,
    QUEUE_ORDER,
    EFA_PUBLISH,
];

impl Kernel for RingAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn summary(&self) -> &'static str {
        "non-causal attention with the sequence over all ranks"
    }

    fn problem_kind(&self) -> ProblemKind {
        ProblemKind::Attention
    }

    fn option_specs(&self) -> &'static [OptionSpec] {
        OPTIONS
    }

    fn default_option(&self, set: OptionSet, name: &str, problem: &Problem, cluster: Cluster) -> Value {
        let published = set == OptionSet::Published;
        match name {
            "ring" => Value::Word(if published { "all_peers_landing" } else { "true_ring" }),
            "tile_q" => Value::Int(192),
            "tile_kv" => Value::Int(128),
            "stages" => Value::Int(2),
            "chunk_rows" => Value::Int(default_chunk_rows(published, problem, cluster)),
            // Seven buffers of 32 KiB. Source: mKernel at 68644c9.
            "copy_in_flight_bytes" => Value::Int(7 * 32_768),
            "recycle" => Value::Bool(true),
            "nvls" => Value::Bool(published),
            "queues" | "queue_order" | "efa_publish" => Posting::default_option(published, name),
            _ => unreachable!("{NAME} lists no option {name}"),
        }
    }

    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError> {
        let shape = Shape::new(spec)?;
        let useful_flops = (4 * shape.heads * shape.rows * shape.dim).saturating_mul(shape.seq);
        let (buffers, flags, launches, source): (_, _, _, Box<dyn TaskSource>) = if shape.true_ring {
            let ring = TrueRing::new(shape)?;
            (ring.buffers(), ring.flags()?, vec![ring.launch()], Box::new(ring))
        } else {
            let landing = Landing::new(shape)?;
            (landing.buffers(), landing.flags(), landing.launches(), Box::new(landing))
        };
        Ok(Schedule {
            kernel: NAME.into(),
            cluster: spec.cluster,
            fabric: spec.fabric,
            spec: spec_text(spec, &["queue_order=alternate", "efa_publish=immediate"]),
            buffers,
            flags,
            launches,
            symmetry: Symmetry::FULL,
            useful_flops,
            source,
        })
    }

    fn unused(&self, spec: &Spec, option: &str) -> Option<&'static str> {
        let true_ring = spec.options.word("ring") == "true_ring";
        let alone = (spec.cluster.ranks() == 1).then_some("on one rank, which has all keys");
        match option {
            "queues" | "queue_order" | "efa_publish" => Posting::unused(spec, option),
            "copy_in_flight_bytes" => unused_without_neighbours(spec),
            "nvls" if true_ring => Some("with ring = true_ring, which has no barrier"),
            "nvls" => unused_without_neighbours(spec),
            "recycle" if !true_ring => unused_without_neighbours(spec),
            "recycle" | "chunk_rows" => alone,
            _ => None,
        }
    }

    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice> {
        let Problem::Attention { seq, batch, heads, head_dim } = spec.problem else { return Vec::new() };
        let rows = seq / spec.cluster.ranks() as u64;
        let start = spec.cluster.number(rank) as u64 * rows;
        let per_head = |(tensor, buffer)| {
            (0..batch * heads).map(move |head| Slice {
                tensor,
                row: head * seq + start,
                col: 0,
                rows,
                cols: head_dim,
                region: Region::contiguous(buffer, head * rows * head_dim * 2, rows as u32, (head_dim * 2) as u32),
            })
        };
        [("q", Q), ("k", K), ("v", V)].into_iter().flat_map(per_head).collect()
    }

    /// Bound of `out`: its terms are `p_i * v_i` with the softmax probability p. Every p is rounded to bf16 for the
    /// matrix unit, every result once when it is stored, and, with `all_peers_landing`, once more by each merge. Scores
    /// and sums are f32; their error, of the order of 2^-24 times the size of a score, disappears beside that.
    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        let Problem::Attention { seq, batch, heads, head_dim } = spec.problem else { return Vec::new() };
        let (ranks, heads, dim) = (spec.cluster.ranks() as u64, batch * heads, head_dim as usize);
        let rows = seq / ranks;
        let start = spec.cluster.number(rank) as u64 * rows;
        let tensor = |name, row: u64, count: u64| -> Vec<f64> {
            (row..row + count).flat_map(|r| (0..head_dim).map(move |c| element(name, r, c))).collect()
        };
        let (mut values, mut magnitudes, mut logs) = (Vec::new(), Vec::new(), Vec::new());
        for head in 0..heads {
            let q = tensor("q", head * seq + start, rows);
            let (k, v) = (tensor("k", head * seq, seq), tensor("v", head * seq, seq));
            for q in q.chunks_exact(dim) {
                let scores: Vec<f64> = k
                    .chunks_exact(dim)
                    .map(|k| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt())
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let log = top + scores.iter().map(|score| (score - top).exp()).sum::<f64>().ln();
                let (mut sum, mut magnitude) = (vec![0.0; dim], vec![0.0; dim]);
                for (score, v) in scores.iter().zip(v.chunks_exact(dim)) {
                    let p = (score - log).exp();
                    for (c, v) in v.iter().enumerate() {
                        sum[c] += p * v;
                        magnitude[c] += p * v.abs();
                    }
                }
                values.extend(sum);
                magnitudes.extend(magnitude);
                logs.push(log);
            }
        }
        let merges = if spec.options.word("ring") == "true_ring" { 0 } else { ranks as u32 - 1 };
        let all = heads * rows;
        vec![
            Expected {
                region: Region::contiguous(OUT, 0, all as u32, (head_dim * 2) as u32),
                values,
                magnitudes,
                roundings: 2 + merges,
            },
            Expected {
                region: Region::contiguous(L, 0, all as u32, 4),
                magnitudes: logs.iter().map(|log| log.abs().max(1.0)).collect(),
                values: logs,
                roundings: 0,
            },
        ]
    }
}

/// 256 KiB in the published set; else the largest divisor of a rank's rows of a head that is no larger, of whole KV
/// blocks if there is one.
fn default_chunk_rows(published: bool, problem: &Problem, cluster: Cluster) -> u64 {
    let Problem::Attention { seq, head_dim, .. } = *problem else { return 1024 };
    let limit = (262_144 / head_dim.saturating_mul(2).max(1)).max(1);
    if published {
        return limit;
    }
    let rows = seq / cluster.ranks() as u64;
    let divisor = |step: u64| (step..=limit).rev().find(|c| c % step == 0 && rows > 0 && rows.is_multiple_of(*c));
    divisor(128).or_else(|| divisor(1)).unwrap_or(limit)
}

/// Sizes that both forms share.
struct Shape {
    nodes: u64,
    gpus: u64,
    /// Over all ranks.
    seq: u64,
    /// Of one head on a rank.
    rows: u64,
    /// Times batch.
    heads: u64,
    dim: u64,
    tile: [u64; 2],
    stages: u8,
    chunk_rows: u64,
    copy_in_flight_bytes: u32,
    recycle: bool,
    nvls: bool,
    posting: Posting,
    true_ring: bool,
}

impl Shape {
    fn new(spec: &Spec) -> Result<Self, BuildError> {
        let Problem::Attention { seq, batch, heads, head_dim } = spec.problem else {
            let what = "needs an attention shape: seq, batch, heads and head_dim".into();
            return Err(BuildError::Unsupported { kernel: NAME, what });
        };
        let options = &spec.options;
        let ranks = spec.cluster.ranks() as u64;
        let tile = [options.int("tile_q"), options.int("tile_kv")];
        let [bq, bkv] = tile;
        divides(NAME, "seq", seq, ranks * lcm(bq, bkv), || {
            format!("{ranks} ranks hold whole Q blocks of tile_q = {bq} and KV blocks of tile_kv = {bkv} rows")
        })?;
        divides(NAME, "head_dim", head_dim, 8, || "16-byte pieces".into())?;
        divides(NAME, "batch", batch, 1, || "at least one".into())?;
        divides(NAME, "heads", heads, 1, || "at least one".into())?;
        if head_dim > MAX_HEAD_DIM {
            let allowed = format!("at most {MAX_HEAD_DIM}");
            return Err(BuildError::Range { kernel: NAME, what: "head_dim", value: head_dim, allowed });
        }
        let (rows, heads) = (seq / ranks, batch.saturating_mul(heads));
        fits_u32(NAME, "rows of a rank (batch times heads times seq/ranks)", heads.saturating_mul(rows))?;
        fits_u32(NAME, "bytes of a chunk", options.int("chunk_rows").saturating_mul(head_dim * 2))?;
        Ok(Self {
            nodes: u64::from(spec.cluster.nodes),
            gpus: u64::from(spec.cluster.gpus_per_node),
            seq,
            rows,
            heads,
            dim: head_dim,
            tile,
            stages: options.int("stages") as u8,
            chunk_rows: options.int("chunk_rows"),
            copy_in_flight_bytes: options.int("copy_in_flight_bytes") as u32,
            recycle: options.flag("recycle"),
            nvls: options.flag("nvls"),
            posting: Posting::new(spec),
            true_ring: options.word("ring") == "true_ring",
        })
    }

    const fn row_bytes(&self) -> u64 {
        self.dim * 2
    }

    /// Bytes of K, or of V, on a rank.
    const fn kv_bytes(&self) -> u64 {
        self.heads * self.rows * self.row_bytes()
    }

    /// Q blocks of a head.
    const fn blocks(&self) -> u64 {
        self.rows / self.tile[0]
    }

    /// `rows` rows of a `[heads * rows, dim]` matrix that begins at byte `base`.
    fn matrix(&self, buffer: BufferId, base: u64, row: u64, rows: u64) -> Region {
        Region::contiguous(buffer, base + row * self.row_bytes(), rows as u32, self.row_bytes() as u32)
    }

    fn partial(&self, (o, l): (BufferId, BufferId), row: u64, rows: u64) -> Partial {
        Partial { o: self.matrix(o, 0, row, rows), l: Region::contiguous(l, row * 4, rows as u32, 4) }
    }

    fn copy(&self, src: Region, to: At, dst: Region) -> Op {
        Op::Copy {
            src: Place::me(src),
            dsts: smallvec![Place { at: to, region: dst }],
            engine: Engine::Bulk,
            in_flight_bytes: self.copy_in_flight_bytes,
            load_store_overlap: true,
        }
    }

    /// Buffers of both forms, up to `landing`.
    fn buffers(&self, landing_slots: u64) -> Vec<Buffer> {
        let kv = self.kv_bytes();
        let l =
            Buffer { name: "l".into(), bytes: self.heads * self.rows * 4, dtype: DType::F32, usage: BufferUse::Output };
        vec![
            bf16("q", kv, BufferUse::Input),
            bf16("k", kv, BufferUse::Input),
            bf16("v", kv, BufferUse::Input),
            bf16("out", kv, BufferUse::Output),
            l,
            bf16("landing", landing_slots * 2 * kv, BufferUse::Scratch),
        ]
    }
}

fn bf16(name: &str, bytes: u64, usage: BufferUse) -> Buffer {
    Buffer { name: name.into(), bytes, dtype: DType::Bf16, usage }
}

/// Two ring buffers, two landing buffers.
const DEPTH: u64 = 2;

/// `ring = true_ring`.
///
/// A *fill* is one hop of a round: fill f of a rank is written by its left neighbour, lies in ring buffer `f % 2` and
/// serves stage `(f / (G - 1), 1 + f % (G - 1))`. Landing use u is what the previous node puts for round u + 1; it lies
/// in landing buffer `u % 2`. All flag levels count what has happened in one buffer so far, so that a level is reached
/// only when every earlier use of it is over.
struct TrueRing {
    shape: Shape,
    /// Of K, or of V, of a head.
    chunks: u64,
}

/// Where the K and V of a stage lie.
#[derive(Clone, Copy)]
enum Source {
    /// The own inputs.
    Own,
    /// Landing use.
    Landed(u64),
    /// Fill.
    Filled(u64),
}

impl TrueRing {
    fn new(shape: Shape) -> Result<Self, BuildError> {
        let bkv = shape.tile[1];
        divides(NAME, "chunk_rows", shape.chunk_rows, bkv, || format!("whole KV blocks of tile_kv = {bkv} rows"))?;
        let ranks = shape.nodes * shape.gpus;
        divides(NAME, "seq", shape.seq, ranks * shape.chunk_rows, || {
            format!("{ranks} ranks hold whole chunks of chunk_rows = {} of each head", shape.chunk_rows)
        })?;
        let chunks = shape.rows / shape.chunk_rows;
        fits_u32(NAME, "arrived flags (chunks landed on a rank)", (shape.nodes - 1) * shape.heads * 2 * chunks)?;
        fits_u32(NAME, "full flags (chunks of a rank)", DEPTH * shape.heads * 2 * chunks)?;
        Ok(Self { shape, chunks })
    }

    /// Chunks of a head, K and V.
    const fn per_head(&self) -> u64 {
        2 * self.chunks
    }

    const fn all_chunks(&self) -> u64 {
        self.shape.heads * self.per_head()
    }

    const fn fills(&self) -> u64 {
        self.shape.nodes * (self.shape.gpus - 1)
    }

    const fn landing_uses(&self) -> u64 {
        self.shape.nodes - 1
    }

    fn source(&self, round: u64, hop: u64) -> Source {
        match (round, hop) {
            (0, 0) => Source::Own,
            (_, 0) => Source::Landed(round - 1),
            _ => Source::Filled(round * (self.shape.gpus - 1) + hop - 1),
        }
    }

    fn buffers(&self) -> Vec<Buffer> {
        let shape = &self.shape;
        let mut buffers = shape.buffers(DEPTH.min(self.landing_uses()));
        buffers.push(bf16("ring", DEPTH.min(self.fills()) * 2 * shape.kv_bytes(), BufferUse::Scratch));
        let state = if shape.nodes * shape.gpus > 1 { shape.heads * shape.rows * (shape.dim + 2) * 4 } else { 0 };
        buffers.push(Buffer { name: "state".into(), bytes: state, dtype: DType::F32, usage: BufferUse::Scratch });
        buffers
    }

    fn flags(&self) -> Result<Vec<FlagFamily>, BuildError> {
        let shape = &self.shape;
        let (intra, inter) = (u64::from(shape.gpus > 1), u64::from(self.landing_uses() > DEPTH));
        let stages_done = if shape.nodes * shape.gpus > 1 { shape.heads * shape.blocks() } else { 0 };
        [
            ("full", intra * DEPTH * self.all_chunks()),
            ("credit", intra * DEPTH * shape.heads),
            ("stages_done", stages_done),
            ("arrived", self.landing_uses() * self.all_chunks()),
            ("free", inter * DEPTH * shape.heads),
            ("sent", inter * DEPTH * shape.heads),
            ("node_credit", self.landing_uses().saturating_sub(DEPTH) * shape.heads),
        ]
        .into_iter()
        .map(|(name, slots)| Ok(FlagFamily { name: name.into(), slots: fits_u32(NAME, "flags of a family", slots)? }))
        .collect()
    }

    fn launch(&self) -> Launch {
        let recycle = self.shape.recycle.then_some(0);
        let mut roles = vec![Role::new(RoleKind::Compute, Claim::Ticket)];
        if self.shape.gpus > 1 {
            roles.push(Role { recycle, ..Role::new(RoleKind::IntraComm, Claim::Ready { window: 32 }) });
        }
        if self.shape.nodes > 1 {
            roles.push(Role { recycle, ..Role::new(RoleKind::InterSend, Claim::Ready { window: 32 }) });
        }
        Launch { name: "main".into(), after: Vec::new(), roles }
    }

    /// Left neighbour, right neighbour.
    const fn neighbours(&self) -> (At, At) {
        (At::local(self.shape.gpus as u16 - 1), At::local(1))
    }

    /// `rows` rows of a head's K (`v` = 0) or V (`v` = 1) from row `row` on.
    fn region(&self, source: Source, v: u64, head: u64, row: u64, rows: u64) -> Region {
        let kv = self.shape.kv_bytes();
        let (buffer, base) = match source {
            Source::Own => (if v == 0 { K } else { V }, 0),
            Source::Landed(use_) => (LANDING, (use_ % DEPTH * 2 + v) * kv),
            Source::Filled(fill) => (RING, (fill % DEPTH * 2 + v) * kv),
        };
        self.shape.matrix(buffer, base, head * self.shape.rows + row, rows)
    }

    fn chunk(&self, source: Source, head: u64, chunk: u64) -> Region {
        let rows = self.shape.chunk_rows;
        self.region(source, chunk / self.chunks, head, chunk % self.chunks * rows, rows)
    }

    /// Wait for `count` chunks of a head, from `chunk` on.
    fn filled(&self, source: Source, head: u64, chunk: u64, count: u64, gate: Gate) -> Option<Wait> {
        let slot = head * self.per_head() + chunk;
        let (family, slot, at_least) = match source {
            Source::Own => return None,
            Source::Landed(use_) => (ARRIVED, use_ * self.all_chunks() + slot, 1),
            Source::Filled(fill) => (FULL, fill % DEPTH * self.all_chunks() + slot, fill / DEPTH + 1),
        };
        Some(Wait::run(family, slot as u32, count as u32, 1, at_least as u32, gate))
    }

    /// Tells whoever refills `source` that a task has read a part of it; none when it is not filled again.
    fn read_signal(&self, source: Source, head: u64) -> Option<Signal> {
        let (to, family, index, uses) = match source {
            Source::Own => return None,
            Source::Landed(use_) => (At::ME, FREE, use_, self.landing_uses()),
            Source::Filled(fill) => (self.neighbours().0, CREDIT, fill, self.fills()),
        };
        let slot = index % DEPTH * self.shape.heads + head;
        (index + DEPTH < uses).then(|| Signal::one(to, family, slot as u32))
    }

    /// Tasks that read a head of fill `fill`: its Q blocks, and its copies unless the next hop would bring it home.
    const fn readers(&self, fill: u64) -> u64 {
        let last_hop = fill % (self.shape.gpus - 1) == self.shape.gpus - 2;
        self.shape.blocks() + if last_hop { 0 } else { self.per_head() }
    }

    /// Reads of a head of a ring buffer before fill `fill` may overwrite it.
    fn reads_before(&self, fill: u64) -> u64 {
        (fill % DEPTH..fill).step_by(DEPTH as usize).map(|earlier| self.readers(earlier)).sum()
    }

    fn compute_tasks(&self, sink: &mut dyn FnMut(Task)) {
        let shape = &self.shape;
        let ([bq, bkv], stages) = (shape.tile, shape.nodes * shape.gpus);
        let state_bytes = (shape.dim + 2) * 4;
        for stage in 0..stages {
            let source = self.source(stage / shape.gpus, stage % shape.gpus);
            let (first, last) = (stage == 0, stage + 1 == stages);
            for head in 0..shape.heads {
                for block in 0..shape.blocks() {
                    let row = head * shape.rows + block * bq;
                    let state = Region::contiguous(STATE, row * state_bytes, bq as u32, state_bytes as u32);
                    let mut task = Task::new(Op::AttentionTile {
                        q: shape.matrix(Q, 0, row, bq),
                        k: self.region(source, 0, head, 0, shape.rows),
                        v: self.region(source, 1, head, 0, shape.rows),
                        state: (!(first && last)).then_some(state),
                        out: last.then(|| shape.partial((OUT, L), row, bq)),
                        first,
                        last,
                        tile: [bq as u16, bkv as u16],
                        stages: shape.stages,
                        main_loop: MainLoop::Pipelined,
                    });
                    for v in 0..2 {
                        task.waits.extend(self.filled(source, head, v * self.chunks, self.chunks, Gate::KStep));
                    }
                    let slot = (head * shape.blocks() + block) as u32;
                    if !first {
                        task.waits.push(Wait::on(STAGES_DONE, slot, stage as u32));
                    }
                    if !last {
                        task.signals.push(Signal::one(At::ME, STAGES_DONE, slot));
                    }
                    task.signals.extend(self.read_signal(source, head));
                    sink(task);
                }
            }
        }
    }

    fn copy_tasks(&self, sink: &mut dyn FnMut(Task)) {
        let shape = &self.shape;
        let (_, right) = self.neighbours();
        for fill in 0..self.fills() {
            let (round, hop) = (fill / (shape.gpus - 1), fill % (shape.gpus - 1));
            let (source, target) = (self.source(round, hop), Source::Filled(fill));
            let reads = self.reads_before(fill) as u32;
            for head in 0..shape.heads {
                for chunk in 0..self.per_head() {
                    let (src, dst) = (self.chunk(source, head, chunk), self.chunk(target, head, chunk));
                    let mut task = Task::new(shape.copy(src, right, dst));
                    task.waits.extend(self.filled(source, head, chunk, 1, Gate::Start));
                    if reads > 0 {
                        task.waits.push(Wait::on(CREDIT, (fill % DEPTH * shape.heads + head) as u32, reads));
                    }
                    let full = fill % DEPTH * self.all_chunks() + head * self.per_head() + chunk;
                    task.signals.push(Signal::one(right, FULL, full as u32));
                    task.signals.extend(self.read_signal(source, head));
                    sink(task);
                }
            }
        }
    }

    fn send_tasks(&self, sink: &mut dyn FnMut(Task)) {
        let shape = &self.shape;
        for use_ in 0..self.landing_uses() {
            let (source, target) = (self.source(use_, 0), Source::Landed(use_));
            for head in 0..shape.heads {
                for chunk in 0..self.per_head() {
                    let index = head * self.per_head() + chunk;
                    let sent = match source {
                        Source::Landed(from) if from + DEPTH < self.landing_uses() => {
                            Some(Flag { family: SENT, slot: (from % DEPTH * shape.heads + head) as u32 })
                        }
                        _ => None,
                    };
                    let mut task = Task::new(Op::Put {
                        src: self.chunk(source, head, chunk),
                        dst: Place { at: At::node(1), region: self.chunk(target, head, chunk) },
                        queue: shape.posting.queue(index),
                        publish: shape.posting.publish(index),
                        arrived: Flag { family: ARRIVED, slot: (use_ * self.all_chunks() + index) as u32 },
                        sent,
                    });
                    task.waits.extend(self.filled(source, head, chunk, 1, Gate::Start));
                    if use_ >= DEPTH {
                        task.waits.push(Wait::on(NODE_CREDIT, ((use_ - DEPTH) * shape.heads + head) as u32, 1));
                    }
                    sink(task);
                }
            }
            // What these puts read, use `use_ - 1`, may be overwritten once they have left and the round has read it.
            if use_ >= 1 && use_ - 1 + DEPTH < self.landing_uses() {
                self.node_credits(use_ - 1, sink);
            }
        }
    }

    /// Tells the previous node that the landing buffer of use `use_` is free again. Only a put can carry that.
    fn node_credits(&self, use_: u64, sink: &mut dyn FnMut(Task)) {
        let shape = &self.shape;
        let copies = if shape.gpus > 1 { self.per_head() } else { 0 };
        let uses = use_ / DEPTH + 1;
        for head in 0..shape.heads {
            let slot = (use_ % DEPTH * shape.heads + head) as u32;
            sink(
                Task::new(Op::Put {
                    src: Region::contiguous(LANDING, 0, 0, 0),
                    dst: Place { at: At::node(shape.nodes as u16 - 1), region: Region::contiguous(LANDING, 0, 0, 0) },
                    queue: shape.posting.queue(head),
                    publish: shape.posting.publish(head),
                    arrived: Flag { family: NODE_CREDIT, slot: (use_ * shape.heads + head) as u32 },
                    sent: None,
                })
                .wait(Wait::on(FREE, slot, (uses * (shape.blocks() + copies)) as u32))
                .wait(Wait::on(SENT, slot, (uses * self.per_head()) as u32)),
            );
        }
    }
}

impl TaskSource for TrueRing {
    fn tasks(&self, _rank: Rank, _launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        match (role, self.shape.gpus > 1) {
            (0, _) => self.compute_tasks(sink),
            (1, true) => self.copy_tasks(sink),
            _ => self.send_tasks(sink),
        }
    }
}

/// A launch of `all_peers_landing`.
#[derive(Clone, Copy)]
enum Step {
    Send,
    /// By number.
    Barrier(u64),
    /// Round.
    Land(u64),
    /// Hop of the round; whether it is the first stage of all.
    Stage(u64, bool),
    Merge,
}

/// `ring = all_peers_landing`.
struct Landing {
    shape: Shape,
    /// Of K, or of V, of all heads; the last one may be short.
    chunks: u64,
    steps: Vec<Step>,
}

impl Landing {
    fn new(shape: Shape) -> Result<Self, BuildError> {
        let chunks = (shape.heads * shape.rows).div_ceil(shape.chunk_rows);
        fits_u32(NAME, "arrived flags (chunks landed on a rank)", (shape.nodes - 1) * 2 * chunks)?;
        let mut steps = Vec::new();
        let mut barriers = 0;
        // One GPU has no one to wait for.
        let mut barrier = |steps: &mut Vec<Step>| {
            if shape.gpus > 1 {
                steps.push(Step::Barrier(barriers));
                barriers += 1;
            }
        };
        if shape.nodes > 1 {
            steps.push(Step::Send);
            barrier(&mut steps);
        }
        for round in 0..shape.nodes {
            if round > 0 {
                steps.push(Step::Land(round));
                barrier(&mut steps);
            }
            for hop in 0..shape.gpus {
                let first = round == 0 && hop == 0;
                steps.push(Step::Stage(hop, first));
                if !first {
                    steps.push(Step::Merge);
                }
                barrier(&mut steps);
            }
        }
        Ok(Self { shape, chunks, steps })
    }

    fn buffers(&self) -> Vec<Buffer> {
        let shape = &self.shape;
        let mut buffers = shape.buffers(shape.nodes - 1);
        let (kv, l) = (shape.kv_bytes(), shape.heads * shape.rows * 4);
        let merges = u64::from(shape.nodes * shape.gpus > 1);
        buffers.push(bf16("ring", if shape.gpus > 1 { 2 * kv } else { 0 }, BufferUse::Scratch));
        buffers.push(bf16("out_part", merges * kv, BufferUse::Scratch));
        buffers.push(Buffer { name: "l_part".into(), bytes: merges * l, dtype: DType::F32, usage: BufferUse::Scratch });
        buffers
    }

    fn flags(&self) -> Vec<FlagFamily> {
        let barriers = self.steps.iter().filter(|step| matches!(step, Step::Barrier(_))).count();
        vec![
            FlagFamily { name: "arrived".into(), slots: ((self.shape.nodes - 1) * 2 * self.chunks) as u32 },
            FlagFamily { name: "came".into(), slots: barriers as u32 },
        ]
    }

    fn launches(&self) -> Vec<Launch> {
        let all_sms = Role { ctas: CtaCount::AllBut(0), ..Role::new(RoleKind::Compute, Claim::Ticket) };
        let mut stage = 0;
        let mut merge = 0;
        let launch = |(i, step): (usize, &Step)| {
            let (name, roles) = match *step {
                Step::Send => ("send".into(), vec![Role::new(RoleKind::InterSend, Claim::Strided)]),
                Step::Land(round) => (format!("land{round}"), vec![Role::new(RoleKind::InterReduce, Claim::Strided)]),
                Step::Barrier(number) => {
                    let one = Role { ctas: CtaCount::Fixed(1), ..Role::new(RoleKind::IntraComm, Claim::Strided) };
                    (format!("barrier{number}"), vec![one])
                }
                Step::Merge => {
                    merge += 1;
                    (format!("merge{merge}"), vec![all_sms.clone()])
                }
                Step::Stage(..) => {
                    let mut roles = vec![all_sms.clone()];
                    if self.shape.gpus > 1 {
                        let recycle = self.shape.recycle.then_some(0);
                        roles.push(Role { recycle, ..Role::new(RoleKind::IntraComm, Claim::Strided) });
                    }
                    stage += 1;
                    (format!("stage{}", stage - 1), roles)
                }
            };
            Launch { name, after: i.checked_sub(1).into_iter().collect(), roles }
        };
        self.steps.iter().enumerate().map(launch).collect()
    }

    fn chunk(&self, buffer: BufferId, base: u64, chunk: u64) -> Region {
        let (from, all) = (chunk * self.shape.chunk_rows, self.shape.heads * self.shape.rows);
        self.shape.matrix(buffer, base, from, self.shape.chunk_rows.min(all - from))
    }

    /// Chunk of K (`v` = 0) or V (`v` = 1) in what a sender put.
    fn landing(&self, sender: u64, v: u64, chunk: u64) -> Region {
        self.chunk(LANDING, (sender * 2 + v) * self.shape.kv_bytes(), chunk)
    }

    const fn landed_slot(&self, sender: u64, v: u64, chunk: u64) -> u32 {
        ((sender * 2 + v) * self.chunks + chunk) as u32
    }

    /// Buffer and first byte of K or V in a stage: `k` and `v` themselves in even hops.
    const fn current(&self, hop: u64, v: u64) -> (BufferId, u64) {
        match (hop.is_multiple_of(2), v) {
            (true, 0) => (K, 0),
            (true, _) => (V, 0),
            (false, _) => (RING, v * self.shape.kv_bytes()),
        }
    }

    fn send_tasks(&self, sink: &mut dyn FnMut(Task)) {
        let nodes = self.shape.nodes;
        for (v, buffer) in [(0, K), (1, V)] {
            for chunk in 0..self.chunks {
                for to in 1..nodes {
                    // I am nodes - to nodes ahead of the target.
                    let sender = nodes - to - 1;
                    sink(Task::new(Op::Put {
                        src: self.chunk(buffer, 0, chunk),
                        dst: Place { at: At::node(to as u16), region: self.landing(sender, v, chunk) },
                        queue: self.shape.posting.queue(chunk),
                        publish: self.shape.posting.publish(chunk),
                        arrived: Flag { family: LANDED, slot: self.landed_slot(sender, v, chunk) },
                        sent: None,
                    }));
                }
            }
        }
    }

    fn barrier_tasks(&self, number: u64, sink: &mut dyn FnMut(Task)) {
        let (gpus, slot) = (self.shape.gpus as u16, number as u32);
        let mut come = Task::new(Op::Sync);
        if self.shape.nvls {
            come.signals.push(Signal::one(At::AllLocal, CAME, slot));
        } else {
            come.signals.extend((0..gpus).map(|dg| Signal::one(At::local(dg), CAME, slot)));
        }
        sink(come);
        sink(Task::new(Op::Sync).wait(Wait::on(CAME, slot, u32::from(gpus))));
    }

    fn land_tasks(&self, round: u64, sink: &mut dyn FnMut(Task)) {
        let sender = round - 1;
        for (v, buffer) in [(0, K), (1, V)] {
            for chunk in 0..self.chunks {
                sink(
                    Task::new(Op::Copy {
                        src: Place::me(self.landing(sender, v, chunk)),
                        dsts: smallvec![Place::me(self.chunk(buffer, 0, chunk))],
                        engine: Engine::LdSt,
                        in_flight_bytes: LAND_IN_FLIGHT_BYTES,
                        load_store_overlap: false,
                    })
                    .wait(Wait::on(LANDED, self.landed_slot(sender, v, chunk), 1)),
                );
            }
        }
    }

    fn stage_tasks(&self, hop: u64, first: bool, sink: &mut dyn FnMut(Task)) {
        let shape = &self.shape;
        let [bq, bkv] = shape.tile;
        let whole = |v, head| {
            let (buffer, base) = self.current(hop, v);
            shape.matrix(buffer, base, head * shape.rows, shape.rows)
        };
        let out = if first { (OUT, L) } else { (OUT_PART, L_PART) };
        for head in 0..shape.heads {
            for row in (head * shape.rows..(head + 1) * shape.rows).step_by(bq as usize) {
                sink(Task::new(Op::AttentionTile {
                    q: shape.matrix(Q, 0, row, bq),
                    k: whole(0, head),
                    v: whole(1, head),
                    state: None,
                    out: Some(shape.partial(out, row, bq)),
                    first: true,
                    last: true,
                    tile: [bq as u16, bkv as u16],
                    stages: shape.stages,
                    main_loop: MainLoop::WaitEachStep,
                }));
            }
        }
    }

    /// K and V by turns, so that with an even number of CTAs each moves only one of them, as published.
    fn forward_tasks(&self, hop: u64, sink: &mut dyn FnMut(Task)) {
        for chunk in 0..self.chunks {
            for v in 0..2 {
                let [src, dst] = [hop, hop + 1].map(|hop| {
                    let (buffer, base) = self.current(hop, v);
                    self.chunk(buffer, base, chunk)
                });
                sink(Task::new(self.shape.copy(src, At::local(1), dst)));
            }
        }
    }

    fn merge_tasks(&self, sink: &mut dyn FnMut(Task)) {
        let shape = &self.shape;
        let (all, bq) = (shape.heads * shape.rows, shape.tile[0]);
        // Two Q blocks for each block of the grid. Source: mKernel at 68644c9, reduction grid of half the stage's.
        let rows = if all.is_multiple_of(2 * bq) { 2 * bq } else { bq };
        for row in (0..all).step_by(rows as usize) {
            let so_far = shape.partial((OUT, L), row, rows);
            let parts: SmallVec<[Partial; 2]> = smallvec![so_far, shape.partial((OUT_PART, L_PART), row, rows)];
            sink(Task::new(Op::AttentionMerge { parts, out: so_far }));
        }
    }
}

impl TaskSource for Landing {
    fn tasks(&self, _rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        match (self.steps[launch], role) {
            (Step::Send, _) => self.send_tasks(sink),
            (Step::Barrier(number), _) => self.barrier_tasks(number, sink),
            (Step::Land(round), _) => self.land_tasks(round, sink),
            (Step::Stage(hop, first), 0) => self.stage_tasks(hop, first, sink),
            (Step::Stage(hop, _), _) => self.forward_tasks(hop, sink),
            (Step::Merge, _) => self.merge_tasks(sink),
        }
    }
}

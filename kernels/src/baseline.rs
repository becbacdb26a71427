//! The unfused form of every kernel: library GEMM or attention and library collectives, driven by the host.
//!
//! **Shape** and output are those of the fused kernel's `tilewire` set, so that both are judged by one reference.
//!
//! ```text
//! chunks = 1    one launch after the other, each on all SMs
//!   gemm_rs             gemm -> reduce-scatter            ag_gemm          all-gather -> gemm
//!   gemm_ar             gemm -> all-reduce                ring_attention   all-gather of K, of V -> attention
//!   moe_dispatch_gemm   pack -> all-to-all -> arrange -> grouped gemm
//!
//! chunks = n    the problem in n pieces, two streams; a piece waits for itself and for the piece before on its stream
//!   main stream          gemm 0   gemm 1        gemm 2 ...
//!   collective stream             collective 0  collective 1 ...      (before the gemms for ag_gemm and attention)
//! ```
//!
//! Pieces are row blocks of every rank's part (`gemm_rs`, `ag_gemm`), row blocks (`gemm_ar`), local experts
//! (`moe_dispatch_gemm`) or heads (`ring_attention`): what lets every collective move contiguous parts in rank order.
//! A launch that a collective may run beside leaves it `collective_ctas` SMs.
//!
//! MoE: the sender copies its tokens once per chosen expert, in the order of the receiver's output rows; parts are as
//! large as the largest pair of ranks needs, for the library's all-to-all moves equal parts.

use crate::cluster::{Cluster, Offset, Rank};
use crate::kernel::{
    BuildError, Element, Expected, Kernel, Problem, ProblemKind, STAGES, Slice, Spec, TILE_K, TILE_M, TILE_N, divides,
    fits_u32,
};
use crate::moe_dispatch_gemm::{self, OutputRows};
use crate::options::{OptionSet, OptionSpec, Options, Value, Values};
use crate::schedule::{
    Buffer, BufferId, BufferUse, Claim, CollectiveKind, CtaCount, DType, Drain, GatherEntry, Launch, MainLoop, Op,
    Partial, Place, Region, Role, RoleKind, Schedule, Symmetry, TableSlice, Task, TaskSource, TileOut, WriteMode,
    side_by_side,
};
use smallvec::smallvec;

// The first buffers are those of the fused kernels, so that `inputs` and `reference` are theirs.
const A: BufferId = BufferId(0);
const B: BufferId = BufferId(1);
const OUT: BufferId = BufferId(2);
/// `gemm_rs`: partial sums of all rows. `ag_gemm`: gathered rows. MoE: token copies, by destination.
const PARTS: BufferId = BufferId(3);
/// MoE: token copies, by sender.
const RECEIVED: BufferId = BufferId(4);
/// MoE: token copies in the order of the output.
const ARRANGED: BufferId = BufferId(5);
// Attention.
const Q: BufferId = BufferId(0);
const K: BufferId = BufferId(1);
const V: BufferId = BufferId(2);
const ATTENDED: BufferId = BufferId(3);
const L: BufferId = BufferId(4);
const ALL_K: BufferId = BufferId(5);
const ALL_V: BufferId = BufferId(6);

/// Rows that a CTA of the token copies keeps in flight, and rows of one of its tasks.
const COPY_ROWS: u64 = 16;

/// The unfused form of a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// All-gather, then GEMM.
    AgGemm,
    /// GEMM, then all-reduce.
    GemmAr,
    /// GEMM, then reduce-scatter.
    GemmRs,
    /// All-to-all of token copies, then grouped GEMM.
    MoeDispatchGemm,
    /// All-gather of K and V, then attention.
    RingAttention,
}

static BASELINES: [Baseline; 5] =
    [Baseline::AgGemm, Baseline::GemmAr, Baseline::GemmRs, Baseline::MoeDispatchGemm, Baseline::RingAttention];

/// The unfused form of the fused kernel with this name.
pub fn baseline(kernel: &str) -> Option<&'static dyn Kernel> {
    BASELINES.iter().find(|form| form.fused().name() == kernel).map(|form| -> &dyn Kernel { form })
}

const CHUNKS: OptionSpec = OptionSpec {
    name: "chunks",
    doc: "Pieces of the problem: 1 runs one launch after the other, more overlap collectives with compute.",
    values: Values::Int { min: 1, max: 64 },
};
const COLLECTIVE_CTAS: OptionSpec = OptionSpec {
    name: "collective_ctas",
    doc: "CTAs of a collective; launches that run beside one leave it these SMs.",
    values: Values::Int { min: 1, max: 128 },
};
const SUPER_M: OptionSpec = OptionSpec {
    name: "super_m",
    doc: "Row blocks that are walked before the next column of tiles.",
    values: Values::Int { min: 1, max: 4096 },
};

const GEMM_OPTIONS: &[OptionSpec] = &[CHUNKS, COLLECTIVE_CTAS, TILE_M, TILE_N, TILE_K, STAGES, SUPER_M];

const MOE_OPTIONS: &[OptionSpec] = &[
    CHUNKS,
    COLLECTIVE_CTAS,
    TILE_M,
    TILE_N,
    TILE_K,
    STAGES,
    SUPER_M,
    OptionSpec {
        name: "routing",
        doc: "Experts of a token, as in the fused kernel; uniform makes the equal parts exactly full.",
        values: Values::Words(moe_dispatch_gemm::ROUTING_WORDS),
    },
    OptionSpec {
        name: "routing_seed",
        doc: "Seed of the draws of rotated and multinomial routing.",
        values: Values::Int { min: 0, max: u64::MAX },
    },
];

const ATTENTION_OPTIONS: &[OptionSpec] = &[
    CHUNKS,
    COLLECTIVE_CTAS,
    OptionSpec { name: "tile_q", doc: "Rows of a Q block.", values: Values::Int { min: 1, max: 1024 } },
    OptionSpec { name: "tile_kv", doc: "Rows of a KV block.", values: Values::Int { min: 1, max: 1024 } },
    STAGES,
];

impl Baseline {
    fn fused(self) -> &'static dyn Kernel {
        match self {
            Self::AgGemm => &crate::ag_gemm::AgGemm,
            Self::GemmAr => &crate::gemm_ar::GemmAr,
            Self::GemmRs => &crate::gemm_rs::GemmRs,
            Self::MoeDispatchGemm => &moe_dispatch_gemm::MoeDispatchGemm,
            Self::RingAttention => &crate::ring_attention::RingAttention,
        }
    }

    /// The fused kernel's spec with the same output.
    fn fused_spec(self, spec: &Spec) -> Result<Spec, BuildError> {
        let mut options = self.fused().options(OptionSet::Tilewire, &spec.problem, spec.cluster);
        if self == Self::MoeDispatchGemm {
            // What lays out the output rows.
            options.set("slice_tokens", "1")?;
            for name in ["tile_m", "tile_n", "tile_k", "routing_seed"] {
                options.set(name, &spec.options.int(name).to_string())?;
            }
            options.set("routing", spec.options.word("routing"))?;
        }
        Ok(Spec { options, ..spec.clone() })
    }
}

impl Kernel for Baseline {
    fn name(&self) -> &'static str {
        match self {
            Self::AgGemm => "ag_gemm.baseline",
            Self::GemmAr => "gemm_ar.baseline",
            Self::GemmRs => "gemm_rs.baseline",
            Self::MoeDispatchGemm => "moe_dispatch_gemm.baseline",
            Self::RingAttention => "ring_attention.baseline",
        }
    }

    fn summary(&self) -> &'static str {
        match self {
            Self::AgGemm => "library all-gather, then library GEMM",
            Self::GemmAr => "library GEMM, then library all-reduce",
            Self::GemmRs => "library GEMM, then library reduce-scatter",
            Self::MoeDispatchGemm => "library all-to-all of token copies, then grouped GEMM",
            Self::RingAttention => "library all-gather of K and V, then library attention",
        }
    }

    fn problem_kind(&self) -> ProblemKind {
        self.fused().problem_kind()
    }

    fn option_specs(&self) -> &'static [OptionSpec] {
        match self {
            Self::AgGemm | Self::GemmAr | Self::GemmRs => GEMM_OPTIONS,
            Self::MoeDispatchGemm => MOE_OPTIONS,
            Self::RingAttention => ATTENTION_OPTIONS,
        }
    }

    fn default_option(&self, set: OptionSet, name: &str, _problem: &Problem, _cluster: Cluster) -> Value {
        match name {
            "chunks" => Value::Int(1),
            // One CTA per channel; 32 are the most of NCCL and its full rate.
            "collective_ctas" => Value::Int(32),
            // FlashAttention-2, heads of 128, no dropout: 128 x 64. Source: flash_fwd_launch_template.h of v2.7.
            "tile_m" | "tile_q" => Value::Int(128),
            "tile_n" => Value::Int(256),
            "tile_k" | "tile_kv" => Value::Int(64),
            "stages" => Value::Int(if *self == Self::RingAttention { 1 } else { 4 }),
            // With as many columns a wave of 132 tiles is nearly square.
            "super_m" => Value::Int(12),
            // The published baseline sends equal parts, whatever the routing.
            "routing" => Value::Word(if set == OptionSet::Published { "uniform" } else { "rotated" }),
            "routing_seed" => Value::Int(0),
            _ => unreachable!("{} lists no option {name}", self.name()),
        }
    }

    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError> {
        let chunks = spec.options.int("chunks");
        let plan: Box<dyn Plan> = match self {
            Self::AgGemm => Box::new(Dense::ag_gemm(spec)?),
            Self::GemmAr => Box::new(Dense::gemm_ar(spec)?),
            Self::GemmRs => Box::new(Dense::gemm_rs(spec)?),
            Self::MoeDispatchGemm => Box::new(Moe::new(self.name(), spec, &self.fused_spec(spec)?)?),
            Self::RingAttention => Box::new(Attention::new(spec)?),
        };
        let stages = stages(*self, chunks, spec.cluster.ranks());
        Ok(Schedule {
            kernel: self.name().into(),
            cluster: spec.cluster,
            fabric: spec.fabric,
            spec: format!("{};{}", spec.problem, spec.options),
            buffers: plan.buffers(),
            flags: Vec::new(),
            launches: launches(*self, &stages, spec.options.int("collective_ctas") as u32),
            symmetry: plan.symmetry(),
            useful_flops: plan.useful_flops(),
            source: Box::new(Source { stages, plan }),
        })
    }

    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice> {
        self.fused_spec(spec).map_or_else(|_| Vec::new(), |spec| self.fused().inputs(&spec, rank))
    }

    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        let Ok(fused) = self.fused_spec(spec) else { return Vec::new() };
        let mut expected = self.fused().reference(&fused, rank, element);
        if matches!(self, Self::GemmAr | Self::GemmRs) {
            // The partial product, and the sum of the collective.
            for expected in &mut expected {
                expected.roundings = 2;
            }
        }
        expected
    }
}

/// What a launch does with a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// Token copies to send buffers.
    Pack,
    /// The collectives.
    Collect,
    /// Received copies to output order.
    Arrange,
    /// GEMM or attention.
    Compute,
}

/// A launch to be.
struct Stage {
    work: Work,
    piece: u64,
    after: Vec<usize>,
}

/// Appends a stage behind the last of its stream and the stages that it needs; returns its index.
fn push(stages: &mut Vec<Stage>, (work, piece): (Work, u64), last: &mut Option<usize>, needs: Option<usize>) -> usize {
    let mut after: Vec<usize> = last.iter().copied().chain(needs).collect();
    after.sort_unstable();
    after.dedup();
    stages.push(Stage { work, piece, after });
    let index = stages.len() - 1;
    *last = Some(index);
    index
}

/// All launches on two streams; with one piece they follow each other. One rank has nothing to sum with others, and its
/// product stands where the sum would be.
fn stages(of: Baseline, chunks: u64, ranks: usize) -> Vec<Stage> {
    let (mut stages, mut main, mut side) = (Vec::new(), None, None);
    match of {
        Baseline::GemmAr | Baseline::GemmRs => {
            for piece in 0..chunks {
                let gemm = push(&mut stages, (Work::Compute, piece), &mut main, None);
                if of == Baseline::GemmRs || ranks > 1 {
                    push(&mut stages, (Work::Collect, piece), &mut side, Some(gemm));
                }
            }
        }
        Baseline::AgGemm | Baseline::RingAttention => {
            for piece in 0..chunks {
                let gathered = push(&mut stages, (Work::Collect, piece), &mut side, None);
                push(&mut stages, (Work::Compute, piece), &mut main, Some(gathered));
            }
        }
        Baseline::MoeDispatchGemm => {
            let mut packed = push(&mut stages, (Work::Pack, 0), &mut main, None);
            for piece in 0..chunks {
                let sent = push(&mut stages, (Work::Collect, piece), &mut side, Some(packed));
                if piece + 1 < chunks {
                    // While this piece is on its way.
                    packed = push(&mut stages, (Work::Pack, piece + 1), &mut main, None);
                }
                push(&mut stages, (Work::Arrange, piece), &mut main, Some(sent));
                push(&mut stages, (Work::Compute, piece), &mut main, None);
            }
        }
    }
    stages
}

/// Gives every stage its SMs: all of them, unless a collective may run beside it.
fn launches(of: Baseline, stages: &[Stage], collective_ctas: u32) -> Vec<Launch> {
    let pairs = side_by_side(stages.iter().map(|stage| stage.after.as_slice()));
    let collects = |i: usize| stages[i].work == Work::Collect;
    let beside_collective = |i| pairs.iter().any(|&(a, b)| (a == i && collects(b)) || (b == i && collects(a)));
    let all_sms = |i| CtaCount::AllBut(if beside_collective(i) { collective_ctas } else { 0 });
    // Library attention is a grid of one block per Q block, the library GEMM a persistent kernel.
    let claim = if of == Baseline::RingAttention { Claim::Ticket } else { Claim::Strided };
    let launch = |(i, stage): (usize, &Stage)| {
        let (name, kind, ctas, claim) = match stage.work {
            Work::Pack => ("pack", RoleKind::IntraComm, all_sms(i), Claim::Strided),
            Work::Collect => ("collective", RoleKind::IntraComm, CtaCount::Fixed(collective_ctas), Claim::Strided),
            Work::Arrange => ("arrange", RoleKind::IntraComm, all_sms(i), Claim::Strided),
            Work::Compute => ("compute", RoleKind::Compute, all_sms(i), claim),
        };
        Launch {
            name: format!("{name} {}", stage.piece),
            after: stage.after.clone(),
            roles: vec![Role { ctas, ..Role::new(kind, claim) }],
        }
    };
    stages.iter().enumerate().map(launch).collect()
}

/// The tasks of a form.
trait Plan: Send + Sync {
    fn buffers(&self) -> Vec<Buffer>;

    fn symmetry(&self) -> Symmetry {
        Symmetry::FULL
    }

    fn useful_flops(&self) -> u64;

    fn tasks(&self, rank: Rank, work: Work, piece: u64, sink: &mut dyn FnMut(Task));

    fn table(&self, _rank: Rank) -> Vec<Option<GatherEntry>> {
        Vec::new()
    }
}

struct Source {
    stages: Vec<Stage>,
    plan: Box<dyn Plan>,
}

impl TaskSource for Source {
    fn tasks(&self, rank: Rank, launch: usize, _role: usize, sink: &mut dyn FnMut(Task)) {
        let Stage { work, piece, .. } = self.stages[launch];
        self.plan.tasks(rank, work, piece, sink);
    }

    fn table(&self, rank: Rank) -> Vec<Option<GatherEntry>> {
        self.plan.table(rank)
    }
}

fn buffer(name: &str, bytes: u64, usage: BufferUse) -> Buffer {
    Buffer { name: name.into(), bytes, dtype: DType::Bf16, usage }
}

fn collective(kind: CollectiveKind, src: Region, dst: Region) -> Task {
    Task::new(Op::Collective { kind, src, dst })
}

/// How the library GEMM computes tiles: 128 x 256 like its own Hopper kernels, super-groups of row blocks.
struct GemmRule {
    tile: [u64; 3],
    stages: u8,
    super_m: usize,
}

/// A row block of a GEMM: rows of A, rows of the output, and the B that it meets.
struct RowBlock {
    a: (BufferId, u64),
    b: u64,
    out: (BufferId, u64),
}

impl GemmRule {
    fn new(options: &Options) -> Self {
        Self {
            tile: [options.int("tile_m"), options.int("tile_n"), options.int("tile_k")],
            stages: options.int("stages") as u8,
            super_m: options.int("super_m") as usize,
        }
    }

    /// Streams the tiles of some row blocks, `n` columns wide and `k` deep.
    fn tiles(&self, blocks: &[RowBlock], (n, k): (u64, u64), sink: &mut dyn FnMut(Task)) {
        let [bm, bn, _] = self.tile;
        for group in blocks.chunks(self.super_m) {
            for col in (0..n).step_by(bn as usize) {
                for block in group {
                    let (out, offset) = block.out;
                    let out = Region::matrix(out, offset + col * 2, bm as u32, (bn * 2) as u32, n * 2);
                    sink(Task::new(Op::GemmTile {
                        a: Region::matrix(block.a.0, block.a.1, bm as u32, (k * 2) as u32, k * 2),
                        b: Region::matrix(B, block.b + col * 2, k as u32, (bn * 2) as u32, n * 2),
                        outs: smallvec![TileOut { place: Place::me(out), mode: WriteMode::Store }],
                        tile: self.tile.map(|size| size as u16),
                        stages: self.stages,
                        drain: Drain::Overlap,
                        main_loop: MainLoop::Library,
                    }));
                }
            }
        }
    }
}

/// GEMM before or after a collective over its rows.
struct Dense {
    of: Baseline,
    m: u64,
    n: u64,
    k: u64,
    nodes: u64,
    gpus: u64,
    /// Rows of a piece, in each rank's part if there are parts.
    piece_rows: u64,
    rule: GemmRule,
}

impl Dense {
    /// Checks a shape whose rows are cut into `parts`, each into pieces.
    fn new(of: Baseline, spec: &Spec, parts: u64) -> Result<Self, BuildError> {
        let name = of.name();
        let (m, n, k) = spec.gemm(name)?;
        let rule = GemmRule::new(&spec.options);
        let [bm, bn, bk] = rule.tile;
        let chunks = spec.options.int("chunks");
        divides(name, "m", m, parts * chunks * bm, || {
            format!("{parts} parts in {chunks} pieces of whole row blocks of tile_m = {bm}")
        })?;
        divides(name, "n", n, bn, || format!("tiles of tile_n = {bn} columns"))?;
        divides(name, "k", k, bk, || format!("main loop steps of tile_k = {bk}"))?;
        Ok(Self {
            of,
            m,
            n,
            k,
            nodes: u64::from(spec.cluster.nodes),
            gpus: u64::from(spec.cluster.gpus_per_node),
            piece_rows: m / parts / chunks,
            rule,
        })
    }

    fn ag_gemm(spec: &Spec) -> Result<Self, BuildError> {
        Self::new(Baseline::AgGemm, spec, spec.cluster.ranks() as u64)
    }

    fn gemm_ar(spec: &Spec) -> Result<Self, BuildError> {
        Self::new(Baseline::GemmAr, spec, 1)
    }

    fn gemm_rs(spec: &Spec) -> Result<Self, BuildError> {
        Self::new(Baseline::GemmRs, spec, spec.cluster.ranks() as u64)
    }

    const fn ranks(&self) -> u64 {
        self.nodes * self.gpus
    }

    /// First row of the logical matrix in a piece of a rank's part.
    const fn first_row(&self, number: u64, piece: u64) -> u64 {
        let part = self.m / self.ranks();
        let start = match self.of {
            // Rank (i, g) ends with sub-slice i of slice g.
            Baseline::GemmRs => (number % self.gpus * self.nodes + number / self.gpus) * part,
            _ => number * part,
        };
        start + piece * self.piece_rows
    }

    /// Row blocks of a piece in the order of its parts.
    fn row_blocks(&self, piece: u64) -> Vec<RowBlock> {
        let (bm, rows) = (self.rule.tile[0], self.piece_rows);
        let (k_bytes, n_bytes) = (self.k * 2, self.n * 2);
        let parts = if self.of == Baseline::GemmAr { 1 } else { self.ranks() };
        let mut blocks = Vec::with_capacity((parts * rows / bm) as usize);
        for part in 0..parts {
            for row in (0..rows).step_by(bm as usize) {
                // In the logical matrix, and in the buffer whose pieces hold a part of every rank.
                let logical = if parts == 1 { piece * rows } else { self.first_row(part, piece) } + row;
                let packed = (piece * parts + part) * rows + row;
                let (a, out) = match self.of {
                    Baseline::AgGemm => ((PARTS, packed * k_bytes), (OUT, logical * n_bytes)),
                    Baseline::GemmAr => ((A, logical * k_bytes), (OUT, logical * n_bytes)),
                    _ => ((A, logical * k_bytes), (PARTS, packed * n_bytes)),
                };
                blocks.push(RowBlock { a, b: 0, out });
            }
        }
        blocks
    }

    fn collective(&self, piece: u64) -> Task {
        let (rows, ranks) = (self.piece_rows, self.ranks());
        let width = if self.of == Baseline::AgGemm { self.k } else { self.n } * 2;
        let one = |buffer| Region::contiguous(buffer, piece * rows * width, rows as u32, width as u32);
        let all =
            |buffer| Region::contiguous(buffer, piece * ranks * rows * width, (ranks * rows) as u32, width as u32);
        match self.of {
            Baseline::AgGemm => collective(CollectiveKind::AllGather, one(A), all(PARTS)),
            Baseline::GemmAr => collective(CollectiveKind::AllReduce, one(OUT), one(OUT)),
            _ => collective(CollectiveKind::ReduceScatter, all(PARTS), one(OUT)),
        }
    }
}

impl Plan for Dense {
    fn buffers(&self) -> Vec<Buffer> {
        let (m, n, k, ranks) = (self.m, self.n, self.k, self.ranks());
        let (a_rows, out_rows, parts) = match self.of {
            Baseline::AgGemm => (m / ranks, m, m * k),
            Baseline::GemmAr => (m, m, 0),
            _ => (m, m / ranks, m * n),
        };
        vec![
            buffer("a", a_rows * k * 2, BufferUse::Input),
            buffer("b", k * n * 2, BufferUse::Input),
            buffer("out", out_rows * n * 2, BufferUse::Output),
            buffer("parts", parts * 2, BufferUse::Scratch),
        ]
    }

    fn useful_flops(&self) -> u64 {
        2 * self.m * self.n * self.k
    }

    fn tasks(&self, _rank: Rank, work: Work, piece: u64, sink: &mut dyn FnMut(Task)) {
        if work == Work::Collect {
            sink(self.collective(piece));
        } else {
            self.rule.tiles(&self.row_blocks(piece), (self.n, self.k), sink);
        }
    }
}

/// Copies that a rank gets, seen from it.
struct Inbox {
    /// By piece, then by number of the sender's offset: its tokens, in the order of the output rows.
    tokens: Vec<Vec<Vec<u32>>>,
    /// By output row: sender's offset and place among its copies of the piece.
    rows: Vec<Option<(u32, u32)>>,
    /// First row block of each piece, and one more.
    first_block: Vec<usize>,
    /// Local expert of each row block.
    experts: Vec<u32>,
}

/// Token copies, all-to-all, grouped GEMM. Copies are laid out by output row, piece by piece.
struct Moe {
    cluster: Cluster,
    hidden: u64,
    inter: u64,
    topk: u64,
    local_tokens: u64,
    local_experts: u64,
    chunks: u64,
    rule: GemmRule,
    /// One for all ranks, or one per rank.
    inboxes: Vec<Inbox>,
    /// Rows of a part of each piece, and the first row of each piece's parts.
    part_rows: Vec<u64>,
    first_row: Vec<u64>,
    max_blocks: u64,
}

impl Moe {
    fn new(name: &'static str, spec: &Spec, fused: &Spec) -> Result<Self, BuildError> {
        let outputs = moe_dispatch_gemm::output_rows(fused)?;
        let Problem::Moe { tokens, hidden, inter, topk, experts } = spec.problem else {
            unreachable!("the fused kernel took the shape");
        };
        let cluster = spec.cluster;
        let ranks = cluster.ranks() as u64;
        let (local_tokens, local_experts, chunks) = (tokens / ranks, experts / ranks, spec.options.int("chunks"));
        divides(name, "experts", experts, ranks * chunks, || {
            format!("{ranks} ranks cut their experts into {chunks} pieces")
        })?;
        let per_piece = local_experts / chunks;
        let inboxes: Vec<Inbox> =
            outputs.iter().map(|rows| inbox(cluster, rows, (local_tokens, per_piece, chunks))).collect();
        let largest = |piece: usize| {
            let all = inboxes.iter().flat_map(|inbox| &inbox.tokens[piece]);
            all.map(|tokens| tokens.len() as u64).max().unwrap_or(0).max(1)
        };
        let part_rows: Vec<u64> = (0..chunks as usize).map(largest).collect();
        let first_row = part_rows
            .iter()
            .scan(0, |next, rows| {
                let first = *next;
                *next += rows * ranks;
                Some(first)
            })
            .collect();
        fits_u32(name, "rows of the all-to-all buffers", part_rows.iter().sum::<u64>() * ranks)?;
        let max_blocks = inboxes.iter().map(|inbox| inbox.experts.len() as u64).max().unwrap_or(0);
        Ok(Self {
            cluster,
            hidden,
            inter,
            topk,
            local_tokens,
            local_experts,
            chunks,
            rule: GemmRule::new(&spec.options),
            inboxes,
            part_rows,
            first_row,
            max_blocks,
        })
    }

    fn inbox(&self, rank: Rank) -> &Inbox {
        &self.inboxes[self.cluster.number(rank) % self.inboxes.len()]
    }

    /// Destinations by offset, so that all ranks have equally large tasks, with their tokens of a piece.
    fn outbox(&self, rank: Rank, piece: u64) -> impl Iterator<Item = (Rank, &[u32])> {
        self.cluster.iter().map(move |ahead| {
            let to = self.cluster.at(rank, Offset { dn: ahead.node, dg: ahead.gpu });
            let back = self.cluster.offset(to, rank);
            let sender = self.cluster.number(Rank { node: back.dn, gpu: back.dg });
            (to, self.inbox(to).tokens[piece as usize][sender].as_slice())
        })
    }

    /// First row of a rank's part in the buffers of an all-to-all.
    fn part(&self, piece: u64, rank: Rank) -> u64 {
        let piece = piece as usize;
        self.first_row[piece] + self.cluster.number(rank) as u64 * self.part_rows[piece]
    }

    fn gather(&self, src: BufferId, (dst, row): (BufferId, u64), start: u64, rows: u64) -> Task {
        let row_bytes = self.hidden * 2;
        Task::new(Op::GatherRows {
            table: TableSlice { start: start as u32, len: rows as u32 },
            src,
            dst: Region::contiguous(dst, row * row_bytes, rows as u32, row_bytes as u32),
            in_flight_rows: COPY_ROWS as u16,
            load_store_overlap: true,
        })
    }

    /// The table begins with the copies of each piece by destination, as `outbox` lists them.
    fn pack_tasks(&self, rank: Rank, piece: u64, sink: &mut dyn FnMut(Task)) {
        let before = (0..piece).flat_map(|piece| self.outbox(rank, piece));
        let mut entry: u64 = before.map(|(_, tokens)| tokens.len() as u64).sum();
        for (to, tokens) in self.outbox(rank, piece) {
            let (first, count) = (self.part(piece, to), tokens.len() as u64);
            for row in (0..count).step_by(COPY_ROWS as usize) {
                let rows = COPY_ROWS.min(count - row);
                sink(self.gather(A, (PARTS, first + row), entry + row, rows));
            }
            entry += count;
        }
    }

    fn copies(&self, rank: Rank) -> u64 {
        (0..self.chunks).flat_map(|piece| self.outbox(rank, piece)).map(|(_, tokens)| tokens.len() as u64).sum()
    }

    /// The table ends with an entry per output row.
    fn arrange_tasks(&self, rank: Rank, piece: u64, sink: &mut dyn FnMut(Task)) {
        let bm = self.rule.tile[0];
        let (inbox, first_entry) = (self.inbox(rank), self.copies(rank));
        let blocks = inbox.first_block[piece as usize]..inbox.first_block[piece as usize + 1];
        for block in blocks {
            for row in (0..bm).step_by(COPY_ROWS as usize) {
                let at = block as u64 * bm + row;
                sink(self.gather(RECEIVED, (ARRANGED, at), first_entry + at, COPY_ROWS.min(bm - row)));
            }
        }
    }

    fn collective(&self, piece: u64) -> Task {
        let (first, rows) =
            (self.first_row[piece as usize], self.part_rows[piece as usize] * self.cluster.ranks() as u64);
        let all = |buffer| Region::contiguous(buffer, first * self.hidden * 2, rows as u32, (self.hidden * 2) as u32);
        collective(CollectiveKind::AllToAll, all(PARTS), all(RECEIVED))
    }

    fn gemm_tasks(&self, rank: Rank, piece: u64, sink: &mut dyn FnMut(Task)) {
        let (bm, inbox) = (self.rule.tile[0], self.inbox(rank));
        let blocks: Vec<RowBlock> = (inbox.first_block[piece as usize]..inbox.first_block[piece as usize + 1])
            .map(|block| {
                let row = block as u64 * bm;
                RowBlock {
                    a: (ARRANGED, row * self.hidden * 2),
                    b: u64::from(inbox.experts[block]) * self.hidden * self.inter * 2,
                    out: (OUT, row * self.inter * 2),
                }
            })
            .collect();
        self.rule.tiles(&blocks, (self.inter, self.hidden), sink);
    }
}

/// Sorts the output rows of a rank by piece and sender.
fn inbox(cluster: Cluster, output: &OutputRows, (local_tokens, per_piece, chunks): (u64, u64, u64)) -> Inbox {
    let bm = output.table.len() / output.experts.len().max(1);
    let mut tokens = vec![vec![Vec::new(); cluster.ranks()]; chunks as usize];
    let mut rows = Vec::with_capacity(output.table.len());
    for (entries, &expert) in output.table.chunks(bm.max(1)).zip(&output.experts) {
        let of_piece = &mut tokens[(u64::from(expert) / per_piece) as usize];
        rows.extend(entries.iter().map(|entry| {
            entry.map(|entry| {
                let row = u64::from(entry.row);
                let home = Rank { node: (row / local_tokens) as u16, gpu: entry.dg };
                let sender = cluster.number(home);
                of_piece[sender].push((row % local_tokens) as u32);
                (sender as u32, of_piece[sender].len() as u32 - 1)
            })
        }));
    }
    let first_block = (0..=chunks)
        .map(|piece| output.experts.partition_point(|&expert| u64::from(expert) < piece * per_piece))
        .collect();
    Inbox { tokens, rows, first_block, experts: output.experts.clone() }
}

impl Plan for Moe {
    fn buffers(&self) -> Vec<Buffer> {
        let row_bytes = self.hidden * 2;
        let parts = self.part_rows.iter().sum::<u64>() * self.cluster.ranks() as u64 * row_bytes;
        let rows = self.max_blocks * self.rule.tile[0];
        vec![
            buffer("tokens", self.local_tokens * row_bytes, BufferUse::Input),
            buffer("w", self.local_experts * self.hidden * self.inter * 2, BufferUse::Input),
            buffer("out", rows * self.inter * 2, BufferUse::Output),
            buffer("parts", parts, BufferUse::Scratch),
            buffer("received", parts, BufferUse::Scratch),
            buffer("arranged", rows * row_bytes, BufferUse::Scratch),
        ]
    }

    fn symmetry(&self) -> Symmetry {
        if self.inboxes.len() == 1 { Symmetry::FULL } else { Symmetry::NONE }
    }

    fn useful_flops(&self) -> u64 {
        (2 * self.local_tokens * self.topk).saturating_mul(self.hidden * self.inter)
    }

    fn tasks(&self, rank: Rank, work: Work, piece: u64, sink: &mut dyn FnMut(Task)) {
        match work {
            Work::Pack => self.pack_tasks(rank, piece, sink),
            Work::Collect => sink(self.collective(piece)),
            Work::Arrange => self.arrange_tasks(rank, piece, sink),
            Work::Compute => self.gemm_tasks(rank, piece, sink),
        }
    }

    fn table(&self, rank: Rank) -> Vec<Option<GatherEntry>> {
        let copies = (0..self.chunks).flat_map(|piece| self.outbox(rank, piece));
        let mut table: Vec<Option<GatherEntry>> =
            copies.flat_map(|(_, tokens)| tokens.iter().map(|&row| Some(GatherEntry { dg: 0, row }))).collect();
        let (inbox, bm) = (self.inbox(rank), self.rule.tile[0] as usize);
        for piece in 0..self.chunks {
            let blocks = inbox.first_block[piece as usize]..inbox.first_block[piece as usize + 1];
            table.extend(inbox.rows[blocks.start * bm..blocks.end * bm].iter().map(|row| {
                row.map(|(sender, place)| {
                    let ahead = self.cluster.rank(sender as usize);
                    let from = self.cluster.at(rank, Offset { dn: ahead.node, dg: ahead.gpu });
                    GatherEntry { dg: 0, row: (self.part(piece, from) + u64::from(place)) as u32 }
                })
            }));
        }
        table
    }
}

/// All-gather of K and V, then every Q block over all keys.
struct Attention {
    ranks: u64,
    /// Of one head on a rank.
    rows: u64,
    /// Times batch.
    heads: u64,
    dim: u64,
    tile: [u64; 2],
    stages: u8,
    /// Heads of a piece.
    piece_heads: u64,
}

impl Attention {
    fn new(spec: &Spec) -> Result<Self, BuildError> {
        let name = Baseline::RingAttention.name();
        let Problem::Attention { seq, batch, heads, head_dim } = spec.problem else {
            let what = "needs an attention shape: seq, batch, heads and head_dim".into();
            return Err(BuildError::Unsupported { kernel: name, what });
        };
        let ranks = spec.cluster.ranks() as u64;
        let [bq, bkv] = [spec.options.int("tile_q"), spec.options.int("tile_kv")];
        let chunks = spec.options.int("chunks");
        divides(name, "seq", seq, ranks * bq, || format!("{ranks} ranks hold whole Q blocks of tile_q = {bq} rows"))?;
        divides(name, "seq", seq, bkv, || format!("KV blocks of tile_kv = {bkv} rows"))?;
        divides(name, "head_dim", head_dim, 8, || "16-byte pieces".into())?;
        divides(name, "batch", batch, 1, || "at least one".into())?;
        let heads = batch.saturating_mul(heads);
        divides(name, "batch times heads", heads, chunks, || format!("{chunks} pieces of whole heads"))?;
        fits_u32(name, "rows of all ranks (batch times heads times seq)", heads.saturating_mul(seq))?;
        fits_u32(name, "head_dim in bytes", head_dim * 2)?;
        Ok(Self {
            ranks,
            rows: seq / ranks,
            heads,
            dim: head_dim,
            tile: [bq, bkv],
            stages: spec.options.int("stages") as u8,
            piece_heads: heads / chunks,
        })
    }

    fn collectives(&self, piece: u64, sink: &mut dyn FnMut(Task)) {
        let (row_bytes, rows) = (self.dim * 2, self.piece_heads * self.rows);
        let region = |buffer, parts: u64| {
            let offset = piece * parts * rows * row_bytes;
            Region::contiguous(buffer, offset, (parts * rows) as u32, row_bytes as u32)
        };
        for (own, all) in [(K, ALL_K), (V, ALL_V)] {
            sink(collective(CollectiveKind::AllGather, region(own, 1), region(all, self.ranks)));
        }
    }

    fn attention_tasks(&self, piece: u64, sink: &mut dyn FnMut(Task)) {
        let ([bq, bkv], row_bytes) = (self.tile, self.dim * 2);
        let part = self.piece_heads * self.rows * row_bytes;
        for head in 0..self.piece_heads {
            // The gathered piece holds one part per rank, each with all heads of the piece.
            let keys = |buffer| Region {
                buffer,
                offset: piece * self.ranks * part + head * self.rows * row_bytes,
                blocks: self.ranks as u32,
                rows: self.rows as u32,
                row_bytes: row_bytes as u32,
                block_pitch: part,
                row_pitch: row_bytes,
            };
            let first = (piece * self.piece_heads + head) * self.rows;
            for row in (first..first + self.rows).step_by(bq as usize) {
                let matrix = |buffer| Region::contiguous(buffer, row * row_bytes, bq as u32, row_bytes as u32);
                sink(Task::new(Op::AttentionTile {
                    q: matrix(Q),
                    k: keys(ALL_K),
                    v: keys(ALL_V),
                    state: None,
                    out: Some(Partial { o: matrix(ATTENDED), l: Region::contiguous(L, row * 4, bq as u32, 4) }),
                    first: true,
                    last: true,
                    tile: [bq as u16, bkv as u16],
                    stages: self.stages,
                    main_loop: MainLoop::Library,
                }));
            }
        }
    }
}

impl Plan for Attention {
    fn buffers(&self) -> Vec<Buffer> {
        let rows = self.heads * self.rows;
        let bytes = rows * self.dim * 2;
        let l = Buffer { name: "l".into(), bytes: rows * 4, dtype: DType::F32, usage: BufferUse::Output };
        vec![
            buffer("q", bytes, BufferUse::Input),
            buffer("k", bytes, BufferUse::Input),
            buffer("v", bytes, BufferUse::Input),
            buffer("out", bytes, BufferUse::Output),
            l,
            buffer("all_k", self.ranks * bytes, BufferUse::Scratch),
            buffer("all_v", self.ranks * bytes, BufferUse::Scratch),
        ]
    }

    fn useful_flops(&self) -> u64 {
        (4 * self.heads * self.rows * self.dim).saturating_mul(self.ranks * self.rows)
    }

    fn tasks(&self, _rank: Rank, work: Work, piece: u64, sink: &mut dyn FnMut(Task)) {
        if work == Work::Collect {
            self.collectives(piece, sink);
        } else {
            self.attention_tasks(piece, sink);
        }
    }
}

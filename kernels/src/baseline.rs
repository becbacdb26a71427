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

mod attention;
mod dense;
mod gemm;
mod moe;

use crate::cluster::{Cluster, Rank};
use crate::kernel::{
    BuildError, Element, Expected, Kernel, Problem, ProblemKind, STAGES, Slice, Spec, TILE_K, TILE_M, TILE_N,
};
use crate::moe_dispatch_gemm;
use crate::options::{OptionSet, OptionSpec, Value, Values};
use crate::schedule::{
    Buffer, BufferId, BufferUse, Claim, CollectiveKind, CtaCount, DType, GatherEntry, Launch, Op, Region, Role,
    RoleKind, Schedule, Symmetry, Task, TaskSource, side_by_side,
};
use attention::Attention;
use dense::Dense;
use moe::Moe;

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

    fn unused(&self, spec: &Spec, option: &str) -> Option<&'static str> {
        match (self, option) {
            (Self::MoeDispatchGemm, "routing_seed") => moe_dispatch_gemm::MoeDispatchGemm.unused(spec, option),
            (Self::GemmAr, "collective_ctas") => {
                (spec.cluster.ranks() == 1).then_some("on one rank, which has all sums")
            }
            _ => None,
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

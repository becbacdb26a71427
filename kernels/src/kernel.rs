//! What a kernel file provides, and the words shared by all of them.

use crate::cluster::{Cluster, Fabric, Rank};
use crate::options::{OptionError, OptionSet, OptionSpec, Options, Value, Values};
use crate::schedule::{BufferId, Drain, MainLoop, Op, Publish, Region, Schedule, TileOut};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;

/// The shape that a kernel works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    /// The GEMM that each rank computes: `[m, k] x [k, n]`.
    Gemm {
        /// Rows.
        m: u64,
        /// Columns.
        n: u64,
        /// Depth.
        k: u64,
    },
    /// A mixture-of-experts layer's dispatch and first GEMM.
    Moe {
        /// Tokens over all ranks.
        tokens: u64,
        /// Width of a token.
        hidden: u64,
        /// Columns of an expert.
        inter: u64,
        /// Experts per token.
        topk: u64,
        /// Experts over all ranks.
        experts: u64,
    },
    /// Non-causal attention forward.
    Attention {
        /// Sequence length over all ranks.
        seq: u64,
        /// Batch.
        batch: u64,
        /// Heads.
        heads: u64,
        /// Width of a head.
        head_dim: u64,
    },
}

impl Problem {
    /// The one number by which published figures index this shape: m, tokens or seq.
    pub const fn size(&self) -> u64 {
        match *self {
            Self::Gemm { m, .. } => m,
            Self::Moe { tokens, .. } => tokens,
            Self::Attention { seq, .. } => seq,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gemm { m, n, k } => write!(f, "m={m},n={n},k={k}"),
            Self::Moe { tokens, hidden, inter, topk, experts } => {
                write!(f, "tokens={tokens},hidden={hidden},inter={inter},topk={topk},experts={experts}")
            }
            Self::Attention { seq, batch, heads, head_dim } => {
                write!(f, "seq={seq},batch={batch},heads={heads},head_dim={head_dim}")
            }
        }
    }
}

/// Which shape a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProblemKind {
    /// [`Problem::Gemm`].
    Gemm,
    /// [`Problem::Moe`].
    Moe,
    /// [`Problem::Attention`].
    Attention,
}

/// Everything a builder sees. It does not see the split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Shape.
    pub problem: Problem,
    /// Cluster.
    pub cluster: Cluster,
    /// Fabric.
    pub fabric: Fabric,
    /// A value for every option.
    pub options: Options,
}

impl Spec {
    /// m, n and k of a GEMM whose rows and row bytes fit the 32-bit fields of a region.
    pub(crate) fn gemm(&self, kernel: &'static str) -> Result<(u64, u64, u64), BuildError> {
        let Problem::Gemm { m, n, k } = self.problem else {
            return Err(BuildError::Unsupported { kernel, what: "needs a GEMM shape: m, n and k".into() });
        };
        fits_u32(kernel, "m", m)?;
        fits_u32(kernel, "n in bytes", n.saturating_mul(2))?;
        fits_u32(kernel, "k in bytes", k.saturating_mul(2))?;
        Ok((m, n, k))
    }
}

/// Why a schedule cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// A size does not divide.
    #[error(
        "{kernel}: {what} = {value} must be a positive multiple of {multiple_of} ({why}); nearest legal: {nearest}"
    )]
    Divisibility {
        /// Kernel.
        kernel: &'static str,
        /// Which size.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What must divide it.
        multiple_of: u64,
        /// Where that comes from.
        why: String,
        /// Nearest legal values.
        nearest: String,
    },
    /// A size is out of range.
    #[error("{kernel}: {what} = {value}, allowed {allowed}")]
    Range {
        /// Kernel.
        kernel: &'static str,
        /// Which size.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Legal values.
        allowed: String,
    },
    /// The combination is not supported.
    #[error("{kernel}: {what}")]
    Unsupported {
        /// Kernel.
        kernel: &'static str,
        /// What, why, and what to do instead.
        what: String,
    },
    /// A bad option.
    #[error(transparent)]
    Option(#[from] OptionError),
}

/// A rectangle of a logical tensor and the region that holds it on a rank.
///
/// The rectangle is read row by row, which is the order of the region's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Logical tensor.
    pub tensor: &'static str,
    /// First row of the rectangle.
    pub row: u64,
    /// First column of the rectangle.
    pub col: u64,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// Where it lies; `rows * cols` elements.
    pub region: Region,
}

/// What an output region must hold after a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// The output region.
    pub region: Region,
    /// Reference values in the order of the region's bytes.
    pub values: Vec<f64>,
    /// Sum of the absolute values of all terms of each element, for the error bound.
    pub magnitudes: Vec<f64>,
    /// bf16 roundings on the way of an element, at most.
    pub roundings: u32,
}

/// A rank's one output matrix as part of the product `a x b` of logical tensors: any element of a large shape follows from
/// it, without the whole reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// First row of the part.
    pub first_row: u64,
    /// First column of the part.
    pub first_col: u64,
    /// Terms of an element.
    pub depth: u64,
    /// Rows of the part, and of the output.
    pub rows: u64,
    /// Likewise.
    pub cols: u64,
    /// bf16 roundings on the way of an element, at most.
    pub roundings: u32,
}

impl Product {
    /// The whole sum over ranks r of `A_r x B_r`, rounded where ranks and nodes add.
    pub(crate) fn sum_over_ranks(spec: &Spec) -> Option<Self> {
        let Problem::Gemm { m, n, k } = spec.problem else { return None };
        let ranks = spec.cluster.ranks() as u64;
        let roundings = 2 * ranks as u32 + 3;
        Some(Self { first_row: 0, first_col: 0, depth: ranks * k, rows: m, cols: n, roundings })
    }

    /// The whole output as a [`Kernel::reference`], `roundings` known more exactly for an executor.
    pub(crate) fn expected(&self, out: BufferId, roundings: u32, element: &Element<'_>) -> Expected {
        let Self { first_row, first_col, depth, rows, cols, .. } = *self;
        let (values, magnitudes) = crate::reference::matmul(first_row, rows, first_col, cols, depth, element);
        let region = Region::matrix(out, 0, rows as u32, (cols * 2) as u32, cols * 2);
        Expected { region, values, magnitudes, roundings }
    }
}

/// The value of element (row, col) of a logical tensor, already rounded to its storage type.
pub type Element<'a> = dyn Fn(&'static str, u64, u64) -> f64 + Sync + 'a;

/// A fused kernel. A kernel is one file: this trait, a line in [`crate::KERNELS`], nothing else.
pub trait Kernel: Send + Sync {
    /// Name.
    fn name(&self) -> &'static str;

    /// One sentence.
    fn summary(&self) -> &'static str;

    /// Shape that it takes.
    fn problem_kind(&self) -> ProblemKind;

    /// Options that it lists.
    fn option_specs(&self) -> &'static [OptionSpec];

    /// Default of an option in a set; may depend on the shape.
    fn default_option(&self, set: OptionSet, name: &str, problem: &Problem, cluster: Cluster) -> Value;

    /// Writes the schedule down.
    ///
    /// # Errors
    /// [`BuildError`] when the shape, cluster and options do not fit together.
    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError>;

    /// Which part of which logical tensor each input region of a rank holds.
    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice>;

    /// What the output regions of a rank hold after a run, computed in f64.
    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected>;

    /// Where the one output matrix of a rank comes from, to compare parts of large shapes on hardware; none, the default, for
    /// outputs that are no such part. Outputs of a GEMM without it are then not compared there.
    fn product(&self, _spec: &Spec, _rank: Rank) -> Option<Product> {
        None
    }

    /// Why nothing in the schedule of a spec depends on an option, where that is so: "on one node, where nothing is put".
    fn unused(&self, _spec: &Spec, _option: &str) -> Option<&'static str> {
        None
    }

    /// What a user should know of the defaults of a set that a shape forced upon it, a sentence each.
    fn notes(&self, _set: OptionSet, _spec: &Spec) -> Vec<String> {
        Vec::new()
    }

    /// Checks that the schedule of a spec depends on every option in which it differs from `defaults`: no option is silent.
    /// Off is what an unused option is anyway.
    ///
    /// # Errors
    /// [`OptionError::Unused`] for the first one that changes nothing.
    fn check_used(&self, spec: &Spec, defaults: &Options) -> Result<(), OptionError> {
        for ((name, got), (_, default)) in spec.options.iter().zip(defaults.iter()) {
            let asks = got != default && !matches!(got, Value::Bool(false) | Value::Int(0));
            if let Some(why) = self.unused(spec, name).filter(|_| asks) {
                return Err(OptionError::Unused { kernel: self.name(), name, got, why, default });
            }
        }
        Ok(())
    }

    /// All options of a set.
    fn options(&self, set: OptionSet, problem: &Problem, cluster: Cluster) -> Options {
        Options::new(self.name(), self.option_specs(), |name| self.default_option(set, name, problem, cluster))
    }
}

/// Checks that `multiple_of` divides a positive `value`.
pub(crate) fn divides(
    kernel: &'static str,
    what: &'static str,
    value: u64,
    multiple_of: u64,
    why: impl FnOnce() -> String,
) -> Result<(), BuildError> {
    if value > 0 && value.is_multiple_of(multiple_of) {
        return Ok(());
    }
    let below = value / multiple_of * multiple_of;
    let nearest = if below == 0 { multiple_of.to_string() } else { format!("{below} or {}", below + multiple_of) };
    Err(BuildError::Divisibility { kernel, what, value, multiple_of, why: why(), nearest })
}

/// Least common multiple of positive numbers: one divisibility for several, so that the nearest legal value is right.
pub(crate) const fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Checks that a size fits the 32-bit fields that count tiles, rows and flags.
pub(crate) fn fits_u32(kernel: &'static str, what: &'static str, value: u64) -> Result<u32, BuildError> {
    u32::try_from(value).map_err(|_| BuildError::Range {
        kernel,
        what,
        value,
        allowed: format!("at most {}", u32::MAX),
    })
}

/// How a kernel posts its puts: over which queues, and how the receiver is told.
pub(crate) struct Posting {
    queues: u64,
    by_rail: bool,
    separate_write: bool,
    fabric: Fabric,
}

impl Posting {
    pub fn new(spec: &Spec) -> Self {
        let options = &spec.options;
        Self {
            queues: options.int("queues"),
            by_rail: options.word("queue_order") == "by_rail",
            separate_write: options.word("efa_publish") == "separate_write",
            fabric: spec.fabric,
        }
    }

    /// Default of one of [`QUEUES`], [`QUEUE_ORDER`] and [`EFA_PUBLISH`]. Source of the published ones: mKernel at
    /// 610c6f8 and 0db10a5, `bench/run_2node.sh` and `bench/run.sh` (flags by writes of their own for every kernel on EFA,
    /// later for `gemm_ar` only; 8 queue pairs for all others), `include/comm/internode/session_efa.h` (the first half of
    /// the queue pairs on one rail).
    pub fn default_option(published: bool, name: &str) -> Value {
        match name {
            "queues" => Value::Int(if published { 8 } else { 4 }),
            "queue_order" => Value::Word(if published { "by_rail" } else { "alternate" }),
            "efa_publish" => Value::Word(if published { "separate_write" } else { "immediate" }),
            _ => unreachable!("{name} is no option of puts"),
        }
    }

    /// Why nothing depends on one of these options.
    pub fn unused(spec: &Spec, option: &str) -> Option<&'static str> {
        unused_without_puts(spec).or_else(|| match option {
            "efa_publish" if spec.fabric != Fabric::EfaSrd => {
                Some("off efa-srd, where there is one way to publish a put")
            }
            "queue_order" if spec.options.int("queues") <= 2 => Some("with one queue on a rail"),
            _ => None,
        })
    }

    /// Queue of the put with this index. Queue q lies on rail q modulo the number of rails.
    pub const fn queue(&self, index: u64) -> u16 {
        let queue = index % self.queues;
        let half = self.queues.div_ceil(2);
        (if self.by_rail { queue % half * 2 + queue / half } else { queue }) as u16
    }

    /// How the put with this index is published.
    pub const fn publish(&self, index: u64) -> Publish {
        match self.fabric {
            Fabric::IbRc => Publish::SameQueueWrite,
            Fabric::EfaSrd if self.separate_write => Publish::SeparateWrite { queue: self.queue(index) },
            Fabric::EfaSrd | Fabric::Loopback => Publish::Immediate,
        }
    }
}

// Options that kernels share, so that a name means the same everywhere.

/// Rows of a tile.
pub(crate) const TILE_M: OptionSpec =
    OptionSpec { name: "tile_m", doc: "Rows of a compute tile.", values: Values::Int { min: 8, max: 512 } };
/// Columns of a tile.
pub(crate) const TILE_N: OptionSpec =
    OptionSpec { name: "tile_n", doc: "Columns of a compute tile.", values: Values::Int { min: 8, max: 512 } };
/// Depth of a step.
pub(crate) const TILE_K: OptionSpec =
    OptionSpec { name: "tile_k", doc: "Depth of a main loop step.", values: Values::Int { min: 8, max: 256 } };
/// Operand stages.
pub(crate) const STAGES: OptionSpec =
    OptionSpec { name: "stages", doc: "Operand stages in shared memory.", values: Values::Int { min: 1, max: 16 } };
/// Epilogue rule, see [`Drain`].
pub(crate) const DRAIN: OptionSpec = OptionSpec {
    name: "drain",
    doc: "When the next tile may load.",
    values: Values::Words(&["overlap", "smem_read", "visible"]),
};
/// Issue rule, see [`MainLoop`].
pub(crate) const MAIN_LOOP: OptionSpec = OptionSpec {
    name: "main_loop",
    doc: "Issue rule of the matrix unit.",
    values: Values::Words(&["wait_each_step", "pipelined"]),
};
/// NIC queues.
pub(crate) const QUEUES: OptionSpec =
    OptionSpec { name: "queues", doc: "NIC queues that puts rotate over.", values: Values::Int { min: 1, max: 64 } };
/// Order of the queues over two rails, see [`Posting::queue`].
pub(crate) const QUEUE_ORDER: OptionSpec = OptionSpec {
    name: "queue_order",
    doc: "With two rails: one put on either by turns, or half a round of the queues on one, then on the other.",
    values: Values::Words(&["alternate", "by_rail"]),
};
/// What tells the receiver on EFA, see [`Publish`].
pub(crate) const EFA_PUBLISH: OptionSpec = OptionSpec {
    name: "efa_publish",
    doc: "On efa-srd: an immediate, or a separate flag write that nothing orders after the data (a hazard).",
    values: Values::Words(&["immediate", "separate_write"]),
};

/// Lead of the stores that open, see [`opening_order`].
pub(crate) const OPEN_LEAD_TILES: OptionSpec = OptionSpec {
    name: "open_lead_tiles",
    doc: "Tiles by which an owner's own tiles, whose stores open a chunk, come before the adds to it, rounded up to whole \
          groups of chunks; 0: just before. On one node 64, which is not used where nothing opens chunks.",
    values: Values::Int { min: 0, max: 4096 },
};

/// The `tilewire` default of [`OPEN_LEAD_TILES`].
///
/// TUNED: simulated leads of 0 to 512 tiles on h200-1gpu, h200-nvlink, h200-efa and h200-cx7, 2026-11-30. From half a
/// wave on, adds hardly wait in any split; a longer lead reads more operands again. Where puts follow the adds, the best
/// splits lose up to 1 % by it: the more adds are open, the later each of them ends, and the first puts with them.
pub(crate) const fn open_lead_tiles(cluster: Cluster) -> u64 {
    if cluster.nodes == 1 && cluster.gpus_per_node > 1 { 64 } else { 0 }
}

/// The lead that [`OPEN_LEAD_TILES`] asks for; none where nothing depends on it.
pub(crate) fn open_lead(kernel: &impl Kernel, spec: &Spec) -> u64 {
    let name = OPEN_LEAD_TILES.name;
    kernel.unused(spec, name).map_or_else(|| spec.options.int(name), |_| 0)
}

/// Why nothing depends on an option that only puts use.
pub(crate) fn unused_without_puts(spec: &Spec) -> Option<&'static str> {
    (spec.cluster.nodes == 1).then_some("on one node, where nothing is put")
}

/// Why nothing depends on an option that only GPUs of a node which work together use.
pub(crate) fn unused_without_neighbours(spec: &Spec) -> Option<&'static str> {
    (spec.cluster.gpus_per_node == 1).then_some("on nodes of one GPU, which has no neighbour")
}

/// Which tiles of a group of chunks a step of [`opening_order`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tiles {
    /// Of all slices.
    All,
    /// Of the rank's own slice: their stores open the chunks.
    Own,
    /// Of the slices of others: they add to chunks that their owners open.
    Others,
}

impl Tiles {
    /// Whether a tile is among them.
    pub const fn has(self, own: bool) -> bool {
        match self {
            Self::All => true,
            Self::Own => own,
            Self::Others => !own,
        }
    }
}

/// The order of groups of chunks in compute's list, where the own tiles of a group stand `lead` groups before the others.
///
/// All ranks have the same order, so an add never stands, on any rank, before what opens its chunk: every wait leads to
/// an earlier step, or to the own tiles of the same one.
pub(crate) fn opening_order(groups: usize, lead: usize) -> impl Iterator<Item = (usize, Tiles)> {
    let whole = (0..if lead == 0 { groups } else { 0 }).map(|group| (group, Tiles::All));
    let parts = (0..if lead == 0 { 0 } else { groups + lead }).flat_map(move |step| {
        let own = (step < groups).then_some((step, Tiles::Own));
        own.into_iter().chain(step.checked_sub(lead).map(|group| (group, Tiles::Others)))
    });
    whole.chain(parts)
}

/// What names a schedule in its hash: its options but for those that say what every schedule did before there was a
/// choice, so that what was measured then keeps its hash.
pub(crate) fn spec_text(spec: &Spec, before: &[&str]) -> String {
    let options = spec.options.to_string();
    let kept: Vec<&str> = options.split(',').filter(|option| !before.contains(option)).collect();
    format!("{};{}", spec.problem, kept.join(","))
}

/// The operands of a kernel that sums `A_r x B_r` over ranks r: each rank holds its own part of the depth.
pub(crate) fn split_depth_inputs(spec: &Spec, rank: Rank, a: BufferId, b: BufferId) -> Vec<Slice> {
    let Problem::Gemm { m, n, k } = spec.problem else { return Vec::new() };
    let deep = spec.cluster.number(rank) as u64 * k;
    vec![
        Slice {
            tensor: "a",
            row: 0,
            col: deep,
            rows: m,
            cols: k,
            region: Region::matrix(a, 0, m as u32, (k * 2) as u32, k * 2),
        },
        Slice {
            tensor: "b",
            row: deep,
            col: 0,
            rows: k,
            cols: n,
            region: Region::matrix(b, 0, k as u32, (n * 2) as u32, n * 2),
        },
    ]
}

/// How a kernel computes its GEMM tiles: the options `tile_m`, `tile_n`, `tile_k`, `stages`, `drain`, `main_loop`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileRule {
    /// bm, bn, bk.
    pub tile: [u64; 3],
    stages: u8,
    drain: Drain,
    main_loop: MainLoop,
    /// One in so many tiles tells another GPU of them, see [`Op::GemmTile`].
    pub notice: u16,
}

impl TileRule {
    /// Reads the six options.
    pub fn new(options: &Options) -> Self {
        Self {
            tile: [options.int("tile_m"), options.int("tile_n"), options.int("tile_k")],
            stages: options.int("stages") as u8,
            drain: match options.word("drain") {
                "overlap" => Drain::Overlap,
                "smem_read" => Drain::SmemRead,
                _ => Drain::Visible,
            },
            main_loop: match options.word("main_loop") {
                "pipelined" => MainLoop::Pipelined,
                _ => MainLoop::WaitEachStep,
            },
            notice: 0,
        }
    }

    /// Bytes of an output tile.
    pub const fn bytes(&self) -> u64 {
        self.tile[0] * self.tile[1] * 2
    }

    /// A tile under this rule.
    pub fn op(&self, a: Region, b: Region, outs: SmallVec<[TileOut; 1]>) -> Op {
        let tile = self.tile.map(|size| size as u16);
        let Self { stages, drain, main_loop, notice, .. } = *self;
        Op::GemmTile { a, b, outs, tile, stages, drain, main_loop, notice }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_round_of_queues_lies_on_one_rail() {
        let posting = |queues, by_rail| Posting { queues, by_rail, separate_write: false, fabric: Fabric::EfaSrd };
        let rails = |queues, by_rail| -> Vec<u16> {
            (0..2 * queues).map(|index| posting(queues, by_rail).queue(index) % 2).collect()
        };
        assert_eq!(rails(4, false), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(rails(4, true), [0, 0, 1, 1, 0, 0, 1, 1]);
        for queues in 1..=64 {
            let mut all: Vec<u16> = (0..queues).map(|index| posting(queues, true).queue(index)).collect();
            all.sort_unstable();
            assert!(all.iter().map(|&queue| u64::from(queue)).eq(0..queues), "each once: {all:?}");
        }
    }

    #[test]
    fn own_tiles_stand_the_lead_before_the_others_and_every_tile_once() {
        for (groups, lead) in [(0, 0), (0, 2), (1, 0), (1, 3), (5, 0), (5, 1), (5, 2), (5, 5), (5, 9)] {
            let order: Vec<(usize, Tiles)> = opening_order(groups, lead).collect();
            let at = |group, own| {
                let mut places = (0..order.len()).filter(|&i| order[i].0 == group && order[i].1.has(own));
                let place = places.next().expect("every group");
                assert_eq!(places.next(), None, "group {group} twice");
                place
            };
            for group in 0..groups {
                assert!(at(group, true) <= at(group, false), "{groups} groups, lead {lead}: {order:?}");
                // Between the two lie the own tiles of as many groups as the lead, or of all that are left.
                let between = (at(group, true)..at(group, false)).filter(|&i| i != at(group, true));
                let opened = between.filter(|&i| order[i].1.has(true)).count();
                assert_eq!(opened, lead.min(groups - 1 - group), "{groups} groups, lead {lead}: {order:?}");
            }
        }
    }
}

//! GEMM then all-reduce: every rank computes a partial `[m, n]` product and ends with the sum over all ranks.
//!
//! **Shape** `A [m, k]` and `B [k, n]` differ on every rank; out `[m, n]` is the same on all of them. GPU g of a node
//! owns slice g of the rows (`g * m/G ..`): it holds the node's sum of that slice and speaks with the same-index GPUs of
//! the other nodes.
//!
//! ```text
//! compute       GemmTile: adds its tile into the owner's staging (node_sum = add) or stores it locally (pull)
//!               signals ready[chunk] at the owner
//! intra_comm    pull: wait ready     Reduce the G partial tiles into staging     raises done[chunk]
//! inter_send    direct: wait ready or done     Put the chunk to every other node
//!               scatter_gather: Put it to the node that sums it; wait summed     Put the sum to every other node
//! inter_reduce  wait ready or done, arrived     Reduce own + landed into out of all local GPUs     raises summed
//! intra_comm    scatter_gather: wait final     Copy a landed sum to out of all local GPUs
//! ```
//!
//! A chunk is `chunk_tiles` neighbouring tiles of one row block of a slice, tile-major in staging, landing, result and
//! gathered, so that a put needs no packing. Nothing that a put reads is overwritten in a run: sums go to `result`, not
//! back to staging, so no wait for `sent` is needed.
//!
//! With `node_sum = add` the owner's own tile is stored and opens the chunk for the others' adds. It comes
//! `open_lead_tiles` earlier in the owner's list than the adds in theirs, so that they find the chunk open.
//!
//! Bytes that a rank sends to other nodes: `direct` (N-1) * 2mn/G, `scatter_gather` 2(N-1)/N * 2mn/G. They are equal at
//! N = 2, where `direct` has one hop less. Who sums a chunk under `scatter_gather` alternates along a row, so all nodes
//! have work from the start.
//!
//! **Published, approximated.** The published compute CTAs count the tiles of a chunk locally and raise one word at the
//! owner; here every tile adds to the owner's word. A send CTA owns whole row blocks; here send CTAs stride over
//! (chunk, peer). Arrivals are words of a queue that reduce CTAs drain into a bit mask; here they are a word per chunk
//! and peer. The inter-node sum rounds after each of its N-1 adds; here it rounds once. The static, the
//! compare-and-swap and the work-stealing reduce are `Strided`, a window of 32 and a window of 16. The flag reset in the
//! epilogue and the proxy's drain before the cross-node barrier are not written down.

use crate::cluster::{Cluster, Rank};
use crate::kernel::{
    BuildError, DRAIN, EFA_PUBLISH, Element, Expected, Kernel, MAIN_LOOP, OPEN_LEAD_TILES, Posting, Problem,
    ProblemKind, Product, QUEUE_ORDER, QUEUES, STAGES, Slice, Spec, TILE_K, TILE_M, TILE_N, TileRule, divides,
    fits_u32, open_lead, open_lead_tiles, opening_order, spec_text, split_depth_inputs, unused_without_neighbours,
    unused_without_puts,
};
use crate::options::{OptionSet, OptionSpec, Value, Values};
use crate::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, CtaCount, DType, Engine, FamilyId, Flag, FlagFamily, Gate, Launch, Op,
    Place, Region, Role, RoleKind, Schedule, Signal, Symmetry, Task, TaskSource, TileOut, Wait, WriteMode,
};
use smallvec::{SmallVec, smallvec};

const NAME: &str = "gemm_ar";

const A: BufferId = BufferId(0);
const B: BufferId = BufferId(1);
const OUT: BufferId = BufferId(2);
const PARTIAL: BufferId = BufferId(3);
const STAGING: BufferId = BufferId(4);
const NODE_SUM: BufferId = BufferId(5);
const LANDING: BufferId = BufferId(6);
const RESULT: BufferId = BufferId(7);
const GATHERED: BufferId = BufferId(8);

const READY: FamilyId = FamilyId(0);
const OPEN: FamilyId = FamilyId(1);
const DONE: FamilyId = FamilyId(2);
const ARRIVED: FamilyId = FamilyId(3);
const SUMMED: FamilyId = FamilyId(4);
const FINAL: FamilyId = FamilyId(5);
const PUBLISHED: FamilyId = FamilyId(6);
const NODE_DONE: FamilyId = FamilyId(7);
const BARRIER: FamilyId = FamilyId(8);

/// Chunks of a slice up to which the final synchronisation stays in the big launch. Source: mKernel at 68644c9.
const EPILOGUE_ABOVE_CHUNKS: u64 = 16;

/// GEMM + AllReduce.
pub struct GemmAr;

const OPTIONS: &[OptionSpec] = &[
    TILE_M,
    TILE_N,
    TILE_K,
    STAGES,
    DRAIN,
    MAIN_LOOP,
    OptionSpec { name: "chunk_tiles", doc: "Tiles of a chunk.", values: Values::Int { min: 1, max: 4096 } },
    OptionSpec {
        name: "super_m",
        doc: "Row blocks of a slice that are walked before the next column of chunks.",
        values: Values::Int { min: 1, max: 4096 },
    },
    OptionSpec {
        name: "interleave",
        doc: "What compute does of a slice before the next slice: a chunk, or a row of chunks.",
        values: Values::Words(&["chunk", "row"]),
    },
    OptionSpec {
        name: "slice_order",
        doc: "Order of the slices: from the own one on, or the same on all GPUs.",
        values: Values::Words(&["relative", "absolute"]),
    },
    OptionSpec {
        name: "node_sum",
        doc: "Tiles are added into the owner's staging, or stored locally and pulled by the owner.",
        values: Values::Words(&["add", "pull"]),
    },
    OPEN_LEAD_TILES,
    OptionSpec {
        name: "double_store",
        doc: "With pull: the node's sum is also stored row-major, and inter_reduce reads that copy.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "nvls",
        doc: "Pulls are in-switch sums; publication and its final signal are multicasts.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "exchange",
        doc: "Every node sums everything, or a part that it then gathers to the others: fewer bytes from three nodes on, \
              where n must be a multiple of nodes * tile_n.",
        values: Values::Words(&["direct", "scatter_gather"]),
    },
    OptionSpec {
        name: "publish",
        doc: "Who writes sums to the local GPUs: inter_reduce, or copies of intra_comm.",
        values: Values::Words(&["reduce", "copy"]),
    },
    OptionSpec {
        name: "intra_order",
        doc: "Pulls and copies as their inputs become ready, or in list order.",
        values: Values::Words(&["any", "in_order"]),
    },
    OptionSpec {
        name: "send_order",
        doc: "Send chunks as they become ready, or in list order (head of line).",
        values: Values::Words(&["any", "in_order"]),
    },
    OptionSpec {
        name: "reduce_order",
        doc: "Reduce chunks as they become ready, in list order, or as published for the number of chunks.",
        values: Values::Words(&["any", "in_order", "by_chunks"]),
    },
    OptionSpec {
        name: "recycle",
        doc: "CTAs whose list is empty join the next role of the flow, where that takes what is ready.",
        values: Values::Bool,
    },
    QUEUES,
    QUEUE_ORDER,
    EFA_PUBLISH,
    OptionSpec {
        name: "end_sync",
        doc: "End with a synchronisation of the node and a barrier between nodes, in a launch of its own if large.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "intra_in_flight_bytes",
        doc: "Bytes that an intra_comm CTA keeps in flight.",
        values: Values::Int { min: 16, max: 262_144 },
    },
    OptionSpec {
        name: "copy_overlap",
        doc: "Whether loads of the next piece of a copy overlap stores of the last one.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "reduce_in_flight_bytes",
        doc: "Bytes that a reduce CTA keeps in flight.",
        values: Values::Int { min: 16, max: 262_144 },
    },
];

impl Kernel for GemmAr {
    fn name(&self) -> &'static str {
        NAME
    }

    fn summary(&self) -> &'static str {
        "GEMM then all-reduce"
    }

    fn problem_kind(&self) -> ProblemKind {
        ProblemKind::Gemm
    }

    fn option_specs(&self) -> &'static [OptionSpec] {
        OPTIONS
    }

    fn default_option(&self, set: OptionSet, name: &str, problem: &Problem, cluster: Cluster) -> Value {
        let published = set == OptionSet::Published;
        let pick = |p, t| if published { Value::Word(p) } else { Value::Word(t) };
        let pick_int = |p, t| Value::Int(if published { p } else { t });
        let nodes = u64::from(cluster.nodes);
        match name {
            "tile_m" => Value::Int(128),
            "tile_n" => pick_int(256, shared_tiles(problem, nodes).map_or(256, |(tile, _)| tile)),
            "tile_k" => Value::Int(64),
            "stages" => Value::Int(4),
            "drain" => pick("smem_read", "overlap"),
            "main_loop" => pick("wait_each_step", "pipelined"),
            "chunk_tiles" => pick_int(4, chunk_tiles(problem, nodes)),
            // Four row blocks of each slice reuse a column panel of B before it leaves the L2 cache.
            "super_m" => pick_int(1, 4),
            "interleave" => pick("row", "chunk"),
            "slice_order" => pick("absolute", "relative"),
            "node_sum" => pick("pull", "add"),
            "open_lead_tiles" => Value::Int(if published { 0 } else { open_lead_tiles(cluster) }),
            "double_store" | "nvls" | "end_sync" => Value::Bool(published),
            // Fewer bytes from three nodes on.
            "exchange" if nodes > 2 && shared_tiles(problem, nodes).is_some() => pick("direct", "scatter_gather"),
            "exchange" => Value::Word("direct"),
            "publish" => Value::Word("reduce"),
            "intra_order" | "send_order" => pick("in_order", "any"),
            "reduce_order" => pick("by_chunks", "any"),
            "recycle" | "copy_overlap" => Value::Bool(!published),
            "queues" => Value::Int(4),
            "queue_order" | "efa_publish" => Posting::default_option(published, name),
            // 12 warps with 8 loads of 128 bytes each.
            "intra_in_flight_bytes" => pick_int(12_288, 131_072),
            // 384 threads with a 16-byte vector of each node's sum.
            "reduce_in_flight_bytes" => pick_int((6144 * nodes).min(262_144), 32_768),
            _ => unreachable!("{NAME} lists no option {name}"),
        }
    }

    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError> {
        let plan = Plan::new(spec)?;
        Ok(Schedule {
            kernel: NAME.into(),
            cluster: spec.cluster,
            fabric: spec.fabric,
            // Every schedule had this order before there was a choice.
            spec: spec_text(spec, &["open_lead_tiles=0", "queue_order=alternate"]),
            buffers: plan.buffers(),
            flags: plan.flags(),
            launches: plan.launches(),
            symmetry: Symmetry { nodes: true, gpus: plan.relative || plan.gpus == 1 },
            useful_flops: 2 * plan.m * plan.n * plan.k,
            source: Box::new(plan),
        })
    }

    fn unused(&self, spec: &Spec, option: &str) -> Option<&'static str> {
        let is = |name: &str, word: &str| spec.options.word(name) == word;
        let (nodes, gpus) = (spec.cluster.nodes, spec.cluster.gpus_per_node);
        let pull = gpus > 1 && is("node_sum", "pull");
        let scatter = nodes > 1 && is("exchange", "scatter_gather");
        let publish_by_copy = nodes > 1 && gpus > 1 && is("publish", "copy");
        let copies = scatter || publish_by_copy || (nodes == 1 && gpus > 1 && !pull);
        let intra = gpus > 1 && (copies || pull);
        match option {
            "queues" | "queue_order" | "efa_publish" => Posting::unused(spec, option),
            "exchange" | "send_order" | "reduce_order" | "reduce_in_flight_bytes" => unused_without_puts(spec),
            "node_sum" | "slice_order" | "interleave" | "nvls" => unused_without_neighbours(spec),
            "publish" => unused_without_puts(spec).or_else(|| unused_without_neighbours(spec)),
            "double_store" => unused_without_puts(spec)
                .or_else(|| (!pull).then_some("unless node_sum = pull, where the node's sum is stored")),
            "open_lead_tiles" => unused_without_neighbours(spec).or_else(|| {
                let relative = is("slice_order", "relative");
                match (pull, relative) {
                    (true, _) => Some("with node_sum = pull, where nobody adds"),
                    (_, false) => Some("with slice_order = absolute, where all GPUs walk the slices together"),
                    _ => None,
                }
            }),
            "intra_order" => (!intra).then_some("where intra_comm has no work"),
            "intra_in_flight_bytes" => (!intra && !copies).then_some("where intra_comm has no work"),
            "copy_overlap" => (!copies).then_some("where nothing is copied"),
            "recycle" => {
                let intra_any = intra && is("intra_order", "any");
                let reduce_any = nodes > 1 && !is("reduce_order", "in_order");
                (!intra_any && !reduce_any).then_some("where no role takes what is ready")
            }
            "end_sync" => (spec.cluster.ranks() == 1).then_some("on one rank, which waits for nobody"),
            _ => None,
        }
    }

    fn notes(&self, set: OptionSet, spec: &Spec) -> Vec<String> {
        let nodes = u64::from(spec.cluster.nodes);
        let mut notes = Vec::new();
        if set == OptionSet::Tilewire && spec.cluster.gpus_per_node > 2 && !spec.options.flag("nvls") {
            let switch = "sums without the switch, whose multicast the device code does not use: with nvls = true and \
                          node_sum = pull links carry less";
            notes.push(switch.to_owned());
        }
        let direct = spec.options.word("exchange") == "direct";
        if set == OptionSet::Published || !direct || nodes <= 2 || shared_tiles(&spec.problem, nodes).is_some() {
            return notes;
        }
        let (n, multiple) = (problem_width(&spec.problem), 128 * nodes);
        let nearest = match n / multiple * multiple {
            0 => multiple.to_string(),
            below => format!("{below} or {}", below + multiple),
        };
        notes.push(format!(
            "exchange = direct, as n = {n} is no multiple of {multiple} ({nodes} nodes share the sums by tiles of 128 \
             columns): {:.1} times the bytes that scatter_gather would send; nearest n for it: {nearest}",
            nodes as f64 / 2.0
        ));
        notes
    }

    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice> {
        split_depth_inputs(spec, rank, A, B)
    }

    fn product(&self, spec: &Spec, _rank: Rank) -> Option<Product> {
        Product::sum_over_ranks(spec)
    }

    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        let (nodes, gpus) = (u32::from(spec.cluster.nodes), u32::from(spec.cluster.gpus_per_node));
        let node_sum = match (gpus, spec.options.word("node_sum")) {
            (1, _) => 0,
            (_, "pull") => 1,
            _ => gpus - 1,
        };
        // The partial tile, its way into the node's sum (every add rounds), the sum over nodes.
        let roundings = 1 + node_sum + u32::from(nodes > 1);
        self.product(spec, rank).map(|product| product.expected(OUT, roundings, element)).into_iter().collect()
    }
}

const fn problem_width(problem: &Problem) -> u64 {
    if let Problem::Gemm { n, .. } = *problem { n } else { 0 }
}

/// The widest tile of which all nodes get as many, if there is one, and how many; two nodes each sum everything.
fn shared_tiles(problem: &Problem, nodes: u64) -> Option<(u64, u64)> {
    let nodes = if nodes > 2 { nodes } else { 1 };
    let width = problem_width(problem);
    [256, 128].into_iter().find(|tile| width.is_multiple_of(tile * nodes)).map(|tile| (tile, width / tile / nodes))
}

/// Four tiles per chunk as published, fewer where the width, shared by `nodes`, does not allow it.
fn chunk_tiles(problem: &Problem, nodes: u64) -> u64 {
    let shared = shared_tiles(problem, nodes).map_or(problem_width(problem) / 256, |(_, tiles)| tiles);
    match shared % 4 {
        0 => 4,
        2 => 2,
        _ => 1,
    }
}

/// What the tasks of a role are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Compute,
    Intra,
    Send,
    Reduce,
    Finish,
}

/// A chunk of a slice: the `index`-th of those that the node `dn` ahead sums, and its place in the slice.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    index: u64,
    dn: u64,
    position: u64,
}

/// Sizes derived from a spec. A chunk's position counts the chunks of a slice in the order of production.
struct Plan {
    m: u64,
    n: u64,
    k: u64,
    nodes: u64,
    gpus: u64,
    rule: TileRule,
    chunk_tiles: u64,
    super_m: u64,
    /// Row blocks of a slice.
    row_blocks: u64,
    /// Chunks across one row block.
    chunks_across: u64,
    /// Chunks of one slice.
    chunks: u64,
    /// Chunks of a slice that one rank sums over nodes.
    own_chunks: u64,
    /// Own chunks between two changes of the slice in compute's list.
    span: u64,
    relative: bool,
    open_lead_tiles: u64,
    pull: bool,
    double_store: bool,
    nvls: bool,
    scatter: bool,
    /// Nodes that share the sums of a slice: all with `scatter`, else 1 as each sums everything.
    sharers: u64,
    publish_by_copy: bool,
    intra_any: bool,
    send_any: bool,
    reduce_order: &'static str,
    recycle: bool,
    posting: Posting,
    end_sync: bool,
    intra_in_flight_bytes: u32,
    copy_overlap: bool,
    reduce_in_flight_bytes: u32,
}

impl Plan {
    fn new(spec: &Spec) -> Result<Self, BuildError> {
        let (m, n, k) = spec.gemm(NAME)?;
        let options = &spec.options;
        let (nodes, gpus) = (u64::from(spec.cluster.nodes), u64::from(spec.cluster.gpus_per_node));
        let rule = TileRule::new(options);
        let [bm, bn, bk] = rule.tile;
        let chunk_tiles = options.int("chunk_tiles");
        let scatter = nodes > 1 && options.word("exchange") == "scatter_gather";
        let sharers = if scatter { nodes } else { 1 };
        divides(NAME, "m", m, gpus * bm, || format!("{gpus} GPUs own a slice each in row blocks of tile_m = {bm}"))?;
        divides(NAME, "n", n, bn * chunk_tiles * sharers, || {
            let chunks = format!("chunks of {chunk_tiles} tiles of tile_n = {bn} columns");
            if scatter { format!("{chunks}, shared by {nodes} nodes under exchange = scatter_gather") } else { chunks }
        })?;
        divides(NAME, "k", k, bk, || format!("main loop steps of tile_k = {bk}"))?;
        let chunks_across = n / bn / chunk_tiles;
        let row_blocks = m / gpus / bm;
        let chunks = row_blocks * chunks_across;
        fits_u32(NAME, "flags (chunks of a slice times ranks)", chunks * nodes.max(gpus))?;
        fits_u32(NAME, "tiles of a slice", chunks * chunk_tiles)?;
        let super_m = options.int("super_m").min(row_blocks);
        let (pull, relative) = (options.word("node_sum") == "pull", options.word("slice_order") == "relative");
        Ok(Self {
            m,
            n,
            k,
            nodes,
            gpus,
            rule,
            chunk_tiles,
            super_m,
            row_blocks,
            chunks_across,
            chunks,
            own_chunks: chunks / sharers,
            span: if options.word("interleave") == "row" { super_m * chunks_across / sharers } else { 1 },
            relative,
            open_lead_tiles: open_lead(&GemmAr, spec),
            pull: pull && gpus > 1,
            double_store: options.flag("double_store"),
            nvls: options.flag("nvls") && gpus > 1,
            scatter,
            sharers,
            publish_by_copy: options.word("publish") == "copy" && gpus > 1 && nodes > 1,
            intra_any: options.word("intra_order") == "any",
            send_any: options.word("send_order") == "any",
            reduce_order: options.word("reduce_order"),
            recycle: options.flag("recycle"),
            posting: Posting::new(spec),
            end_sync: options.flag("end_sync") && nodes * gpus > 1,
            intra_in_flight_bytes: options.int("intra_in_flight_bytes") as u32,
            copy_overlap: options.flag("copy_overlap"),
            reduce_in_flight_bytes: options.int("reduce_in_flight_bytes") as u32,
        })
    }

    const fn chunk_bytes(&self) -> u64 {
        self.rule.bytes() * self.chunk_tiles
    }

    /// Whether inter_reduce reads a row-major copy of the node's sum.
    const fn row_major_sum(&self) -> bool {
        self.pull && self.double_store && self.nodes > 1
    }

    /// Whether sums are also kept tile-major, to be put or copied.
    const fn keeps_result(&self) -> bool {
        self.scatter || self.publish_by_copy
    }

    fn buffers(&self) -> Vec<Buffer> {
        let buffer = |name: &str, bytes, usage| Buffer { name: name.into(), bytes, dtype: DType::Bf16, usage };
        let scratch = |name, used, bytes| buffer(name, if used { bytes } else { 0 }, BufferUse::Scratch);
        let (slice, own) = (self.chunks * self.chunk_bytes(), self.own_chunks * self.chunk_bytes());
        vec![
            buffer("a", self.m * self.k * 2, BufferUse::Input),
            buffer("b", self.k * self.n * 2, BufferUse::Input),
            buffer("out", self.m * self.n * 2, BufferUse::Output),
            scratch("partial", self.pull, self.m * self.n * 2),
            scratch("staging", self.nodes > 1 || (self.gpus > 1 && !self.pull), slice),
            scratch("node_sum", self.row_major_sum(), slice),
            scratch("landing", true, (self.nodes - 1) * own),
            scratch("result", self.keeps_result(), own),
            scratch("gathered", self.scatter, (self.nodes - 1) * own),
        ]
    }

    fn flags(&self) -> Vec<FlagFamily> {
        let family = |name: &str, used: bool, slots: u64| FlagFamily {
            name: name.into(),
            slots: if used { slots as u32 } else { 0 },
        };
        vec![
            family("ready", self.nodes * self.gpus > 1, self.chunks),
            family("open", self.gpus > 1 && !self.pull, self.chunks * self.gpus),
            family("done", self.pull && self.nodes > 1, self.chunks),
            family("arrived", true, (self.nodes - 1) * self.own_chunks),
            family("summed", self.keeps_result(), self.own_chunks),
            family("final", self.scatter, (self.nodes - 1) * self.own_chunks),
            family("published", self.end_sync, 1),
            family("node_done", self.end_sync, 1),
            family("barrier", self.end_sync, self.nodes - 1),
        ]
    }

    /// Whether the final synchronisation is a launch of its own.
    const fn epilogue(&self) -> bool {
        self.end_sync && self.chunks > EPILOGUE_ABOVE_CHUNKS
    }

    /// Roles of the big launch.
    fn roles(&self) -> SmallVec<[Work; 4]> {
        let mut roles: SmallVec<[Work; 4]> = smallvec![Work::Compute];
        if self.gpus > 1 && (self.pull || self.nodes == 1 || self.keeps_result()) {
            roles.push(Work::Intra);
        }
        if self.nodes > 1 {
            roles.extend([Work::Send, Work::Reduce]);
        }
        roles
    }

    fn launches(&self) -> Vec<Launch> {
        let roles = self.roles();
        let claim_of = |work| match work {
            Work::Intra if self.intra_any => Claim::Ready { window: 32 },
            Work::Send if self.send_any => Claim::Ready { window: 32 },
            Work::Reduce => self.reduce_claim(),
            Work::Compute | Work::Intra | Work::Send | Work::Finish => Claim::Strided,
        };
        let joins = |work: Work| {
            let index = roles.iter().position(|&role| role == work)?;
            (self.recycle && claim_of(work) != Claim::Strided).then_some(index)
        };
        let kind_of = |work| match work {
            Work::Compute => RoleKind::Compute,
            Work::Intra => RoleKind::IntraComm,
            Work::Send => RoleKind::InterSend,
            Work::Reduce => RoleKind::InterReduce,
            Work::Finish if self.nodes > 1 => RoleKind::InterReduce,
            Work::Finish => RoleKind::IntraComm,
        };
        let role = |work, ctas| Role {
            ctas,
            recycle: match work {
                Work::Compute | Work::Send => joins(Work::Reduce).or_else(|| joins(Work::Intra)),
                Work::Reduce => joins(Work::Intra),
                Work::Intra | Work::Finish => None,
            },
            ..Role::new(kind_of(work), claim_of(work))
        };
        let mut launches = vec![Launch {
            name: "main".into(),
            after: Vec::new(),
            roles: roles.iter().map(|&work| role(work, CtaCount::FromSplit)).collect(),
        }];
        if self.epilogue() {
            launches.push(Launch {
                name: "epilogue".into(),
                after: vec![0],
                roles: vec![role(Work::Finish, CtaCount::AllBut(0))],
            });
        }
        launches
    }

    /// Source of the thresholds: mKernel at 68644c9, which reduces statically up to 64 chunks, scans a window of 32 up
    /// to 511 and steals from a window of 16 beyond.
    fn reduce_claim(&self) -> Claim {
        let window = match self.reduce_order {
            "in_order" => return Claim::Strided,
            "by_chunks" if self.chunks <= 64 => return Claim::Strided,
            "by_chunks" if self.chunks >= 512 => 16,
            _ => 32,
        };
        // A `Ready` task waits for at most 32 flags; ours waits for one and for every other node.
        if self.nodes > 32 { Claim::Ticket } else { Claim::Ready { window } }
    }

    /// Chunks `from..to` of every node that sums, in the order in which a rank produces them.
    ///
    /// Chunks of other nodes come before the own one of the same index, so that their puts start first.
    fn chunks_in(&self, rank: Rank, from: u64, to: u64) -> impl Iterator<Item = Chunk> + use<> {
        let (sharers, node) = (self.sharers, u64::from(rank.node));
        (from..to).flat_map(move |index| {
            (1..=sharers).map(move |o| {
                let dn = o % sharers;
                Chunk { index, dn, position: index * sharers + (node + dn) % sharers }
            })
        })
    }

    /// The `index`-th chunk that the node `dn` ahead sums.
    fn chunk_of(&self, rank: Rank, index: u64, dn: u64) -> Chunk {
        Chunk { index, dn, position: index * self.sharers + (u64::from(rank.node) + dn) % self.sharers }
    }

    /// Own chunks by which gathering lags behind scattering in a list that has both, so that tasks whose inputs need
    /// a round trip do not fill the window of a `Ready` role.
    fn lag(&self) -> u64 {
        (self.own_chunks / 8).clamp(1, 16)
    }

    /// Calls `scatter(i)` for all own indices and `gather(i)` for each, `lag` later.
    fn with_lag(&self, mut step: impl FnMut(Step)) {
        let lag = self.lag();
        for i in 0..self.own_chunks + lag {
            if i < self.own_chunks {
                step(Step::Scatter(i));
            }
            if i >= lag {
                step(Step::Gather(i - lag));
            }
        }
    }

    /// The flag of a chunk, equal on all ranks of a node for the same bytes: relative to the node that sums it.
    const fn slot(&self, chunk: Chunk) -> u32 {
        (chunk.index * self.sharers + chunk.dn) as u32
    }

    /// Row block in the slice and chunk across it. Neighbouring chunks of a row belong to different nodes.
    const fn coordinates(&self, position: u64) -> (u64, u64) {
        let (index, sharer) = (position / self.sharers, position % self.sharers);
        let across = self.chunks_across / self.sharers;
        let first = index / (self.super_m * across) * self.super_m;
        let left = self.row_blocks - first;
        let height = if left < self.super_m { left } else { self.super_m };
        let within = index - first * across;
        (first + within % height, within / height * self.sharers + sharer)
    }

    /// Chunk `index` of a tile-major buffer.
    fn chunk_region(&self, buffer: BufferId, index: u64) -> Region {
        let [bm, bn, _] = self.rule.tile;
        Region {
            buffer,
            offset: index * self.chunk_bytes(),
            blocks: self.chunk_tiles as u32,
            rows: bm as u32,
            row_bytes: (bn * 2) as u32,
            block_pitch: self.rule.bytes(),
            row_pitch: bn * 2,
        }
    }

    /// Chunk at `position` of a slice in a row-major buffer whose slices are `slice_rows` apart.
    fn row_major(&self, buffer: BufferId, slice_row: u64, position: u64) -> Region {
        let [bm, bn, _] = self.rule.tile;
        let (row_block, across) = self.coordinates(position);
        Region {
            buffer,
            offset: ((slice_row + row_block * bm) * self.n + across * self.chunk_tiles * bn) * 2,
            blocks: self.chunk_tiles as u32,
            rows: bm as u32,
            row_bytes: (bn * 2) as u32,
            block_pitch: bn * 2,
            row_pitch: self.n * 2,
        }
    }

    /// First row of a slice.
    const fn slice_row(&self, slice: u64) -> u64 {
        slice * self.row_blocks * self.rule.tile[0]
    }

    /// A region on every GPU of the node, neighbours first.
    fn all_local(&self, region: Region) -> SmallVec<[Place; 1]> {
        if self.nvls {
            return smallvec![Place { at: At::AllLocal, region }];
        }
        (1..=self.gpus).map(|d| Place { at: At::local((d % self.gpus) as u16), region }).collect()
    }

    /// `out` of every GPU of the node for a chunk of the own slice.
    fn out(&self, rank: Rank, position: u64) -> SmallVec<[Place; 1]> {
        self.all_local(self.row_major(OUT, self.slice_row(u64::from(rank.gpu)), position))
    }

    /// Waits for the node's sum of a chunk.
    fn sum_wait(&self, chunk: Chunk) -> Wait {
        if self.pull { Wait::on(DONE, self.slot(chunk), self.chunk_tiles as u32) } else { self.ready_wait(chunk) }
    }

    fn ready_wait(&self, chunk: Chunk) -> Wait {
        Wait::on(READY, self.slot(chunk), (self.gpus * self.chunk_tiles) as u32)
    }

    fn compute_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        let spans = self.own_chunks.div_ceil(self.span) as usize;
        for (index, tiles) in opening_order(spans, self.open_lead()) {
            let from = index as u64 * self.span;
            let to = (from + self.span).min(self.own_chunks);
            for s in 0..self.gpus {
                let first = if self.relative { u64::from(rank.gpu) } else { 0 };
                let slice = (first + s) % self.gpus;
                if !tiles.has(slice == u64::from(rank.gpu)) {
                    continue;
                }
                for chunk in self.chunks_in(rank, from, to) {
                    for t in 0..self.chunk_tiles {
                        sink(self.tile(rank, slice, chunk, t));
                    }
                }
            }
        }
    }

    /// Spans by which stores that open stand before the adds.
    fn open_lead(&self) -> usize {
        self.open_lead_tiles.div_ceil(self.span * self.sharers * self.chunk_tiles * self.gpus) as usize
    }

    fn tile(&self, rank: Rank, slice: u64, chunk: Chunk, t: u64) -> Task {
        let [bm, bn, _] = self.rule.tile;
        let dg = (slice + self.gpus - u64::from(rank.gpu)) % self.gpus;
        let owner = At::local(dg as u16);
        let (row_block, across) = self.coordinates(chunk.position);
        let row = self.slice_row(slice) + row_block * bm;
        let col = (across * self.chunk_tiles + t) * bn;
        let row_major =
            |buffer| Region::matrix(buffer, (row * self.n + col) * 2, bm as u32, (bn * 2) as u32, self.n * 2);
        let mut staging = self.chunk_region(STAGING, chunk.position);
        staging.offset += t * self.rule.bytes();
        staging.blocks = 1;
        let (place, mode) = match (self.pull, self.gpus, self.nodes) {
            (true, _, _) => (Place::me(row_major(PARTIAL)), WriteMode::Store),
            (_, 1, 1) => (Place::me(row_major(OUT)), WriteMode::Store),
            _ => (Place { at: owner, region: staging }, if dg == 0 { WriteMode::Store } else { WriteMode::Add }),
        };
        let a = Region::matrix(A, row * self.k * 2, bm as u32, (self.k * 2) as u32, self.k * 2);
        let b = Region::matrix(B, col * 2, self.k as u32, (bn * 2) as u32, self.n * 2);
        let mut task = Task::new(self.rule.op(a, b, smallvec![TileOut { place, mode }]));
        let slot = self.slot(chunk);
        if mode == WriteMode::Add {
            let open = slot * self.gpus as u32 + dg as u32;
            task.waits.push(Wait::run(OPEN, open, 1, 1, self.chunk_tiles as u32, Gate::Output));
        } else if !self.pull {
            // My store opens the chunk for the others' adds. The word that I raise at offset d is my slot -d there.
            for d in 1..self.gpus {
                let open = slot * self.gpus as u32 + (self.gpus - d) as u32;
                task.signals.push(Signal::one(At::local(d as u16), OPEN, open));
            }
        }
        if self.nodes * self.gpus > 1 {
            task.signals.push(Signal::one(owner, READY, slot));
        }
        task
    }

    fn intra_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        if self.nodes == 1 && !self.pull {
            for chunk in self.chunks_in(rank, 0, self.own_chunks) {
                let staging = self.chunk_region(STAGING, chunk.position);
                sink(self.copy_out(rank, staging, chunk.position).wait(self.ready_wait(chunk)));
            }
        } else {
            self.with_lag(|step| match step {
                Step::Scatter(i) => {
                    if self.pull {
                        self.chunks_in(rank, i, i + 1).for_each(|chunk| self.pull_tasks(rank, chunk, sink));
                    }
                }
                Step::Gather(i) => {
                    if self.publish_by_copy {
                        let own = self.chunk_of(rank, i, 0);
                        let result = self.chunk_region(RESULT, i);
                        sink(self.copy_out(rank, result, own.position).wait(Wait::on(SUMMED, i as u32, 1)));
                    }
                    self.landed_sums(rank, i, sink);
                }
            });
        }
        if self.nodes == 1 {
            self.finish_in_main(sink);
        }
    }

    /// The owner's sums over the node, tile by tile.
    fn pull_tasks(&self, rank: Rank, chunk: Chunk, sink: &mut dyn FnMut(Task)) {
        let slice_row = self.slice_row(u64::from(rank.gpu));
        let tile_of = |mut region: Region, t: u64| {
            region.offset += t * region.block_pitch;
            region.blocks = 1;
            region
        };
        for t in 0..self.chunk_tiles {
            let partial = tile_of(self.row_major(PARTIAL, slice_row, chunk.position), t);
            let out = tile_of(self.row_major(OUT, slice_row, chunk.position), t);
            let mut outputs = SmallVec::new();
            if self.nodes == 1 {
                outputs = self.all_local(out);
            } else {
                if self.row_major_sum() {
                    outputs.push(Place::me(tile_of(self.row_major(NODE_SUM, 0, chunk.position), t)));
                }
                outputs.push(Place::me(tile_of(self.chunk_region(STAGING, chunk.position), t)));
            }
            let mut task = Task::new(Op::Reduce {
                inputs: self.all_local(partial).into_iter().collect(),
                outputs,
                in_flight_bytes: self.intra_in_flight_bytes,
            })
            .wait(self.ready_wait(chunk));
            if self.nodes > 1 {
                task.signals.push(Signal::one(At::ME, DONE, self.slot(chunk)));
            } else {
                self.count_published(&mut task);
            }
            sink(task);
        }
    }

    /// Copies a finished chunk of the own slice to `out` of all local GPUs.
    fn copy_out(&self, rank: Rank, src: Region, position: u64) -> Task {
        let mut task = Task::new(Op::Copy {
            src: Place::me(src),
            dsts: self.out(rank, position),
            engine: Engine::Bulk,
            in_flight_bytes: self.intra_in_flight_bytes,
            load_store_overlap: self.copy_overlap,
        });
        self.count_published(&mut task);
        task
    }

    /// Copies of the `index`-th sum of every other node.
    fn landed_sums(&self, rank: Rank, index: u64, sink: &mut dyn FnMut(Task)) {
        if !self.scatter {
            return;
        }
        for dn in 1..self.nodes {
            let landed = (dn - 1) * self.own_chunks + index;
            let position = self.chunk_of(rank, index, dn).position;
            let copy = self.copy_out(rank, self.chunk_region(GATHERED, landed), position);
            sink(copy.wait(Wait::on(FINAL, landed as u32, 1)));
        }
    }

    fn send_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        if !self.scatter {
            for chunk in self.chunks_in(rank, 0, self.own_chunks) {
                for to in 1..self.nodes {
                    sink(
                        self.put(STAGING, chunk.position, LANDING, ARRIVED, to, chunk.index).wait(self.sum_wait(chunk)),
                    );
                }
            }
            return;
        }
        self.with_lag(|step| match step {
            Step::Scatter(i) => {
                for chunk in self.chunks_in(rank, i, i + 1).filter(|chunk| chunk.dn != 0) {
                    let put = self.put(STAGING, chunk.position, LANDING, ARRIVED, chunk.dn, i);
                    sink(put.wait(self.sum_wait(chunk)));
                }
            }
            Step::Gather(i) => {
                for to in 1..self.nodes {
                    sink(self.put(RESULT, i, GATHERED, FINAL, to, i).wait(Wait::on(SUMMED, i as u32, 1)));
                }
            }
        });
    }

    /// A put of chunk `from` of a buffer to the node `to` ahead, which sees me `nodes - to` ahead.
    fn put(&self, src: BufferId, from: u64, dst: BufferId, arrived: FamilyId, to: u64, index: u64) -> Task {
        let landed = (self.nodes - to - 1) * self.own_chunks + index;
        Task::new(Op::Put {
            src: self.chunk_region(src, from),
            dst: Place { at: At::node(to as u16), region: self.chunk_region(dst, landed) },
            queue: self.posting.queue(index),
            publish: self.posting.publish(index),
            arrived: Flag { family: arrived, slot: landed as u32 },
            sent: None,
        })
    }

    fn reduce_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        self.with_lag(|step| match step {
            Step::Scatter(i) => sink(self.reduce(rank, i)),
            // Without neighbours there is no intra_comm role.
            Step::Gather(i) if self.gpus == 1 => self.landed_sums(rank, i, sink),
            Step::Gather(_) => {}
        });
        self.finish_in_main(sink);
    }

    fn reduce(&self, rank: Rank, index: u64) -> Task {
        let own = self.chunk_of(rank, index, 0);
        let node_sum = if self.row_major_sum() {
            self.row_major(NODE_SUM, 0, own.position)
        } else {
            self.chunk_region(STAGING, own.position)
        };
        let mut inputs = smallvec![Place::me(node_sum)];
        let landed = |s| Place::me(self.chunk_region(LANDING, s * self.own_chunks + index));
        inputs.extend((0..self.nodes - 1).map(landed));
        let mut outputs = if self.publish_by_copy { SmallVec::new() } else { self.out(rank, own.position) };
        if self.keeps_result() {
            outputs.push(Place::me(self.chunk_region(RESULT, index)));
        }
        let (count, stride) = (self.nodes as u32 - 1, self.own_chunks as u32);
        let mut task = Task::new(Op::Reduce { inputs, outputs, in_flight_bytes: self.reduce_in_flight_bytes })
            .wait(self.sum_wait(own))
            .wait(Wait::run(ARRIVED, index as u32, count, stride, 1, Gate::Start));
        if self.keeps_result() {
            task.signals.push(Signal::one(At::ME, SUMMED, index as u32));
        }
        if !self.publish_by_copy {
            self.count_published(&mut task);
        }
        task
    }

    fn count_published(&self, task: &mut Task) {
        if self.end_sync {
            task.signals.push(Signal::one(At::ME, PUBLISHED, 0));
        }
    }

    /// Tasks of a rank that publish.
    const fn publishing_tasks(&self) -> u64 {
        match (self.nodes, self.pull, self.scatter) {
            (1, true, _) => self.chunks * self.chunk_tiles,
            (1, false, _) | (_, _, true) => self.chunks,
            _ => self.own_chunks,
        }
    }

    fn finish_in_main(&self, sink: &mut dyn FnMut(Task)) {
        if self.end_sync && !self.epilogue() {
            self.finish_tasks(sink);
        }
    }

    /// All of the node has published, then all nodes have.
    fn finish_tasks(&self, sink: &mut dyn FnMut(Task)) {
        let mut told = Task::new(Op::Sync).wait(Wait::on(PUBLISHED, 0, self.publishing_tasks() as u32));
        if self.nvls {
            told.signals.push(Signal::one(At::AllLocal, NODE_DONE, 0));
        } else {
            told.signals.extend((0..self.gpus).map(|d| Signal::one(At::local(d as u16), NODE_DONE, 0)));
        }
        sink(told);
        let node_done = Wait::on(NODE_DONE, 0, self.gpus as u32);
        for to in 1..self.nodes {
            let nothing = |buffer| Region::contiguous(buffer, 0, 0, 0);
            let op = Op::Put {
                src: nothing(STAGING),
                dst: Place { at: At::node(to as u16), region: nothing(LANDING) },
                queue: self.posting.queue(0),
                publish: self.posting.publish(0),
                arrived: Flag { family: BARRIER, slot: (self.nodes - to - 1) as u32 },
                sent: None,
            };
            sink(Task::new(op).wait(node_done));
        }
        let mut end = Task::new(Op::Sync).wait(node_done);
        if self.nodes > 1 {
            end.waits.push(Wait::run(BARRIER, 0, self.nodes as u32 - 1, 1, 1, Gate::Start));
        }
        sink(end);
    }
}

/// A step of [`Plan::with_lag`]: the own index whose chunks are scattered or gathered.
enum Step {
    Scatter(u64),
    Gather(u64),
}

impl TaskSource for Plan {
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        let work = if launch > 0 { Work::Finish } else { self.roles()[role] };
        match work {
            Work::Compute => self.compute_tasks(rank, sink),
            Work::Intra => self.intra_tasks(rank, sink),
            Work::Send => self.send_tasks(rank, sink),
            Work::Reduce => self.reduce_tasks(rank, sink),
            Work::Finish => self.finish_tasks(sink),
        }
    }
}

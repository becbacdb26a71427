//! GEMM then reduce-scatter: every rank computes a partial `[m, n]` product; the sum over ranks is scattered by rows.
//!
//! **Shape** `A [m, k]` and `B [k, n]` differ on every rank. With `output = per_rank` rank (i, g) ends with rows
//! `g * m/G + i * m/W ..` (length m/W); with `output = per_node` (published) with rows `g * m/G ..` (length m/G), the
//! same on every node.
//!
//! ```text
//! compute       GemmTile: stores or adds its tile into the staging of the slice's owner (GPU g owns slice g)
//!               signals ready[chunk] at the owner
//! inter_send    wait ready[chunk] = G * tiles     Put the chunk to the node that owns it
//! inter_reduce  wait ready[chunk], arrived[chunk] of every other node     out = staging + landed
//! ```
//!
//! A chunk is `chunk_tiles` neighbouring tiles of one row block of a slice, tile-major in staging, so that a put needs
//! no packing. Staging starts from zeros (`staging = helper_zero`) or from the owner's own tile, whose store opens the
//! chunk for the others' adds (`staging = owner_store`): no zeros to write, no helper launch. That tile comes
//! `open_lead_tiles` earlier in the owner's list than the adds in theirs, so that they find the chunk open.

use crate::check::MAX_READY_FLAGS;
use crate::cluster::{Cluster, Rank};
use crate::kernel::{
    BuildError, DRAIN, EFA_PUBLISH, Element, Expected, Kernel, MAIN_LOOP, OPEN_LEAD_TILES, Posting, Problem,
    ProblemKind, Product, QUEUE_ORDER, QUEUES, STAGES, Slice, Spec, TILE_K, TILE_M, TILE_N, TileRule, divides,
    fits_u32, open_lead, open_lead_tiles, opening_order, spec_text, split_depth_inputs, unused_without_neighbours,
    unused_without_puts,
};
use crate::options::{OptionSet, OptionSpec, Value, Values};
use crate::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, CtaCount, DType, FamilyId, Flag, FlagFamily, Gate, Launch, Op, Place,
    Region, Role, RoleKind, Schedule, Signal, Symmetry, Task, TaskSource, TileOut, Wait, WriteMode,
};
use smallvec::{SmallVec, smallvec};

const NAME: &str = "gemm_rs";

const A: BufferId = BufferId(0);
const B: BufferId = BufferId(1);
const OUT: BufferId = BufferId(2);
const STAGING: BufferId = BufferId(3);
const LANDING: BufferId = BufferId(4);
const WORKSPACE: BufferId = BufferId(5);

const READY: FamilyId = FamilyId(0);
const OPEN: FamilyId = FamilyId(1);
const ARRIVED: FamilyId = FamilyId(2);

/// Blocks of the published zeroing helper. Source: mKernel, 16 blocks of 128 threads before each launch.
const ZERO_BLOCKS: u32 = 16;

/// GEMM + ReduceScatter.
pub struct GemmRs;

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
        doc: "Row blocks of a rank's rows that are walked before the next column of chunks.",
        values: Values::Int { min: 1, max: 4096 },
    },
    OptionSpec {
        name: "output",
        doc: "Rows that a rank ends with: its own 1/W, or the 1/G of its GPU index on every node.",
        values: Values::Words(&["per_rank", "per_node"]),
    },
    OptionSpec {
        name: "staging",
        doc: "What the adds start from: zeros of a helper launch, or the owner's own tile.",
        values: Values::Words(&["owner_store", "helper_zero"]),
    },
    OPEN_LEAD_TILES,
    OptionSpec {
        name: "tile_order",
        doc: "Chunk by chunk through all slices, or a row block of every slice, one slice after the other.",
        values: Values::Words(&["chunk", "row_block"]),
    },
    OptionSpec {
        name: "early_ready",
        doc: "Signal a chunk ready without waiting for the add (a hazard of the published kernel).",
        values: Values::Bool,
    },
    OptionSpec {
        name: "cta_notice",
        doc: "The CTA that finishes a chunk tells its owner before it goes on, behind a fence for the whole system; the \
              model charges it with drain = visible.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "dead_store",
        doc: "Also store every tile to a local workspace that nothing reads.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "send_order",
        doc: "Send chunks as they become ready, or in list order (head of line).",
        values: Values::Words(&["any", "in_order"]),
    },
    OptionSpec {
        name: "reduce_order",
        doc: "Reduce chunks as they become ready (to 32 nodes), or in list order.",
        values: Values::Words(&["any", "in_order"]),
    },
    OptionSpec {
        name: "recycle",
        doc: "CTAs of compute and inter_send join inter_reduce when their lists are empty.",
        values: Values::Bool,
    },
    QUEUES,
    QUEUE_ORDER,
    EFA_PUBLISH,
    OptionSpec {
        name: "reduce_in_flight_bytes",
        doc: "Bytes that a reduce CTA keeps in flight.",
        values: Values::Int { min: 16, max: 262_144 },
    },
];

impl Kernel for GemmRs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn summary(&self) -> &'static str {
        "GEMM then reduce-scatter"
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
        match name {
            "tile_m" => Value::Int(128),
            "tile_n" => Value::Int(256),
            "tile_k" => Value::Int(64),
            "stages" => Value::Int(4),
            // The published storer raises a flag with a release before it frees its staging: that waits for the adds.
            "drain" => pick("visible", "overlap"),
            "main_loop" => pick("wait_each_step", "pipelined"),
            // The published sizes are those of two nodes. With more a rank would have too few chunks for its CTAs.
            "chunk_tiles" if cluster.nodes > 2 && !published => {
                Value::Int(chunk_tiles(problem.size()).min(sixteenth(problem, cluster)))
            }
            "chunk_tiles" => Value::Int(chunk_tiles(problem.size())),
            "super_m" => Value::Int(if published { 1 } else { 8 }),
            "output" => pick("per_node", "per_rank"),
            "staging" => pick("helper_zero", "owner_store"),
            "open_lead_tiles" => Value::Int(if published { 0 } else { open_lead_tiles(cluster) }),
            "tile_order" => pick("row_block", "chunk"),
            // At 68644c9 a compute CTA's first thread counts the tiles of a chunk; on the last it fences and adds to the
            // owner's counter, whose old value it needs.
            "early_ready" | "dead_store" | "cta_notice" => Value::Bool(published),
            "send_order" => Value::Word("any"),
            "reduce_order" => pick("in_order", "any"),
            "recycle" => Value::Bool(true),
            "queues" | "queue_order" | "efa_publish" => Posting::default_option(published, name),
            // 384 threads with a 16-byte vector of every operand each, one vector after the other.
            "reduce_in_flight_bytes" if published => Value::Int((6144 * u64::from(cluster.nodes)).min(262_144)),
            "reduce_in_flight_bytes" => Value::Int(32_768),
            _ => unreachable!("{NAME} lists no option {name}"),
        }
    }

    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError> {
        let plan = Plan::new(spec)?;
        let buffers = plan.buffers();
        let flags = vec![
            FlagFamily { name: "ready".into(), slots: plan.chunks as u32 },
            FlagFamily {
                name: "open".into(),
                slots: if plan.owner_store { plan.chunks as u32 * plan.gpus as u32 } else { 0 },
            },
            FlagFamily { name: "arrived".into(), slots: ((plan.nodes - 1) * plan.own_chunks) as u32 },
        ];
        let launches = plan.launches();
        Ok(Schedule {
            kernel: NAME.into(),
            cluster: spec.cluster,
            fabric: spec.fabric,
            spec: spec_text(spec, &BEFORE),
            buffers,
            flags,
            launches,
            symmetry: Symmetry::FULL,
            useful_flops: 2 * plan.m * plan.n * plan.k,
            source: Box::new(plan),
        })
    }

    fn unused(&self, spec: &Spec, option: &str) -> Option<&'static str> {
        let is = |name: &str, word: &str| spec.options.word(name) == word;
        match option {
            "queues" | "queue_order" | "efa_publish" => Posting::unused(spec, option),
            "send_order" => unused_without_puts(spec),
            "output" => (spec.cluster.nodes == 1).then_some("on one node, whose GPUs are all the ranks"),
            "staging" | "tile_order" => unused_without_neighbours(spec),
            "open_lead_tiles" => unused_without_neighbours(spec).or_else(|| {
                is("staging", "helper_zero").then_some("with staging = helper_zero, where a helper opens all chunks")
            }),
            "cta_notice" => unused_without_neighbours(spec)
                .or_else(|| (!is("drain", "visible")).then_some("unless drain = visible, where alone it is charged")),
            "reduce_order" => reduces_in_order(spec.cluster).then_some(IN_ORDER),
            _ => None,
        }
    }

    fn notes(&self, set: OptionSet, spec: &Spec) -> Vec<String> {
        let forced = set == OptionSet::Tilewire && reduces_in_order(spec.cluster);
        forced.then(|| format!("reduce_order: chunks are reduced in list order {IN_ORDER}")).into_iter().collect()
    }

    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice> {
        split_depth_inputs(spec, rank, A, B)
    }

    fn product(&self, spec: &Spec, rank: Rank) -> Option<Product> {
        let sum = Product::sum_over_ranks(spec)?;
        let slice = sum.rows / u64::from(spec.cluster.gpus_per_node);
        let per_rank = spec.options.word("output") == "per_rank";
        let (nodes, node) = if per_rank { (u64::from(spec.cluster.nodes), u64::from(rank.node)) } else { (1, 0) };
        let rows = slice / nodes;
        Some(Product { first_row: u64::from(rank.gpu) * slice + node * rows, rows, ..sum })
    }

    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        // One rounding per partial tile, one per add into staging, one for the final sum.
        let roundings = 2 * spec.cluster.ranks() as u32 + 1;
        self.product(spec, rank).map(|product| product.expected(OUT, roundings, element)).into_iter().collect()
    }
}

/// The order that every schedule had before there was a choice.
const BEFORE: [&str; 6] = [
    "tile_order=chunk",
    "super_m=1",
    "open_lead_tiles=0",
    "cta_notice=false",
    "queue_order=alternate",
    "efa_publish=immediate",
];

/// Tiles of a chunk for a size. Source: mKernel gemm_rs bench table at 68644c9, as in `data/published`.
const fn chunk_tiles(m: u64) -> u64 {
    match m {
        2048 | 4096 | 24_576 => 2,
        32_768 => 8,
        65_536 => 32,
        _ => 4,
    }
}

/// Where and why chunks cannot be reduced as they become ready.
const IN_ORDER: &str = "on more than 32 nodes, from each of which a sum has an arrival to wait for";

/// A task of a `Ready` role waits for few flags; a sum for `ready` and for an arrival from every other node.
const fn reduces_in_order(cluster: Cluster) -> bool {
    cluster.nodes as u64 > MAX_READY_FLAGS
}

/// The largest power of two of which a rank's tiles are sixteen or more.
fn sixteenth(problem: &Problem, cluster: Cluster) -> u64 {
    let Problem::Gemm { m, n, .. } = *problem else { return 1 };
    let tiles = m / (cluster.ranks() as u64 * 128) * (n / 256);
    1 << (tiles / 16).max(1).ilog2()
}

/// Sizes derived from a spec. "Chunk position" counts the chunks of a slice row block by row block.
struct Plan {
    m: u64,
    n: u64,
    k: u64,
    nodes: u64,
    gpus: u64,
    rule: TileRule,
    posting: Posting,
    chunk_tiles: u64,
    /// Chunks of one slice.
    chunks: u64,
    /// Chunks across one row block.
    chunks_across: u64,
    super_m: u64,
    /// Chunks of a slice that one rank reduces.
    own_chunks: u64,
    per_rank: bool,
    owner_store: bool,
    by_row_block: bool,
    open_lead_tiles: u64,
    early_ready: bool,
    dead_store: bool,
    any_send: bool,
    any_reduce: bool,
    recycle: bool,
    reduce_in_flight_bytes: u32,
}

impl Plan {
    fn new(spec: &Spec) -> Result<Self, BuildError> {
        let (m, n, k) = spec.gemm(NAME)?;
        let options = &spec.options;
        let (nodes, gpus) = (u64::from(spec.cluster.nodes), u64::from(spec.cluster.gpus_per_node));
        let mut rule = TileRule::new(options);
        let [bm, bn, bk] = rule.tile;
        let chunk_tiles = options.int("chunk_tiles");
        if options.flag("cta_notice") && GemmRs.unused(spec, "cta_notice").is_none() {
            rule.notice = chunk_tiles as u16;
        }
        let per_rank = options.word("output") == "per_rank";
        let parts = if per_rank { nodes * gpus } else { gpus };
        divides(NAME, "m", m, parts * bm, || {
            format!(
                "{} of {parts} slices in row blocks of tile_m = {bm}",
                if per_rank { "ranks take one each" } else { "GPU indices take one each" }
            )
        })?;
        divides(NAME, "n", n, bn * chunk_tiles, || format!("chunks of {chunk_tiles} tiles of tile_n = {bn} columns"))?;
        divides(NAME, "k", k, bk, || format!("main loop steps of tile_k = {bk}"))?;
        let chunks_across = n / bn / chunk_tiles;
        let chunks = m / gpus / bm * chunks_across;
        fits_u32(NAME, "open flags (chunks of a slice times GPUs)", chunks * gpus)?;
        let owner_store = options.word("staging") == "owner_store";
        Ok(Self {
            m,
            n,
            k,
            nodes,
            gpus,
            rule,
            posting: Posting::new(spec),
            chunk_tiles,
            chunks,
            chunks_across,
            super_m: options.int("super_m"),
            own_chunks: if per_rank { chunks / nodes } else { chunks },
            per_rank,
            owner_store: owner_store && gpus > 1,
            by_row_block: options.word("tile_order") == "row_block",
            open_lead_tiles: open_lead(&GemmRs, spec),
            early_ready: options.flag("early_ready"),
            dead_store: options.flag("dead_store"),
            any_send: options.word("send_order") == "any",
            any_reduce: options.word("reduce_order") == "any" && !reduces_in_order(spec.cluster),
            recycle: options.flag("recycle"),
            reduce_in_flight_bytes: options.int("reduce_in_flight_bytes") as u32,
        })
    }

    const fn tile_bytes(&self) -> u64 {
        self.rule.bytes()
    }

    const fn chunk_bytes(&self) -> u64 {
        self.tile_bytes() * self.chunk_tiles
    }

    fn buffers(&self) -> Vec<Buffer> {
        let buffer = |name: &str, bytes, usage| Buffer { name: name.into(), bytes, dtype: DType::Bf16, usage };
        let mut buffers = vec![
            buffer("a", self.m * self.k * 2, BufferUse::Input),
            buffer("b", self.k * self.n * 2, BufferUse::Input),
            buffer("out", self.own_chunks * self.chunk_bytes(), BufferUse::Output),
            buffer("staging", self.chunks * self.chunk_bytes(), BufferUse::Scratch),
            buffer("landing", (self.nodes - 1) * self.own_chunks * self.chunk_bytes(), BufferUse::Scratch),
        ];
        if self.dead_store {
            buffers.push(buffer("workspace", self.m * self.n * 2, BufferUse::Scratch));
        }
        buffers
    }

    /// Whether adds into staging need zeros first.
    const fn zeroes(&self) -> bool {
        !self.owner_store && self.gpus > 1
    }

    fn launches(&self) -> Vec<Launch> {
        let mut launches = Vec::new();
        if self.zeroes() {
            launches.push(Launch {
                name: "zero".into(),
                after: Vec::new(),
                roles: vec![Role {
                    ctas: CtaCount::Fixed(ZERO_BLOCKS),
                    ..Role::new(RoleKind::IntraComm, Claim::Strided)
                }],
            });
        }
        let claim = |any| if any { Claim::Ready { window: 32 } } else { Claim::Ticket };
        let reduce_index = if self.nodes > 1 { 2 } else { 1 };
        let joins_reduce =
            |kind, claim| Role { recycle: self.recycle.then_some(reduce_index), ..Role::new(kind, claim) };
        let mut roles = vec![joins_reduce(RoleKind::Compute, Claim::Strided)];
        if self.nodes > 1 {
            roles.push(joins_reduce(RoleKind::InterSend, claim(self.any_send)));
        }
        roles.push(Role::new(RoleKind::InterReduce, claim(self.any_reduce)));
        launches.push(Launch { name: "main".into(), after: (0..launches.len()).collect(), roles });
        launches
    }

    /// The order in which a rank produces chunks: (position in the slice, nodes ahead of the one that reduces it).
    ///
    /// Chunks of other nodes come before the own one of the same index, so that their puts start first.
    fn chunk_order(&self, rank: Rank) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (nodes, own, per_rank) = (self.nodes, self.own_chunks, self.per_rank);
        let node = u64::from(rank.node);
        let (across, super_m) = (self.chunks_across, self.super_m.min(own / self.chunks_across));
        (0..own).flat_map(move |index| {
            // Whole row blocks, because a rank's rows are.
            let first = index / (super_m * across) * super_m;
            let height = super_m.min(own / across - first);
            let within = index - first * across;
            let i = (first + within % height) * across + within / height;
            let owners = if per_rank { nodes } else { 1 };
            (1..=owners).map(move |o| {
                let dn = o % owners;
                (if per_rank { (node + dn) % nodes * own + i } else { i }, dn)
            })
        })
    }

    /// The flag of a chunk, equal on all ranks of a node for the same bytes: relative to the reducing node.
    const fn chunk_slot(&self, position: u64, dn: u64) -> u32 {
        (if self.per_rank { position % self.own_chunks * self.nodes + dn } else { position }) as u32
    }

    fn chunk_region(&self, buffer: BufferId, index: u64) -> Region {
        let [bm, bn, _] = self.rule.tile;
        Region {
            buffer,
            offset: index * self.chunk_bytes(),
            blocks: self.chunk_tiles as u32,
            rows: bm as u32,
            row_bytes: (bn * 2) as u32,
            block_pitch: self.tile_bytes(),
            row_pitch: bn * 2,
        }
    }

    fn zero_tasks(&self, sink: &mut dyn FnMut(Task)) {
        for part in 0..u64::from(ZERO_BLOCKS) {
            let (from, to) = (part * self.chunks / 16, (part + 1) * self.chunks / 16);
            if to > from {
                let mut region = self.chunk_region(STAGING, from);
                region.blocks = ((to - from) * self.chunk_tiles) as u32;
                sink(Task::new(Op::Fill { dst: Place::me(region) }));
            }
        }
    }

    fn compute_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        let [bm, bn, _] = self.rule.tile;
        let slice_rows = self.m / self.gpus;
        let owners = if self.per_rank { self.nodes } else { 1 };
        let group = if self.by_row_block { self.chunks_across * owners } else { 1 };
        let order: Vec<(u64, u64)> = self.chunk_order(rank).collect();
        let groups: Vec<&[(u64, u64)]> = order.chunks(group as usize).collect();
        for (index, tiles) in opening_order(groups.len(), self.open_lead(group)) {
            let chunks = groups[index];
            // The own slice first: its store opens the chunk for the others.
            for dg in (0..self.gpus).filter(|&dg| tiles.has(dg == 0)) {
                let slice = (u64::from(rank.gpu) + dg) % self.gpus;
                for &(position, dn) in chunks {
                    let row = slice * slice_rows + position / self.chunks_across * bm;
                    for t in 0..self.chunk_tiles {
                        let col = (position % self.chunks_across * self.chunk_tiles + t) * bn;
                        let slot = self.chunk_slot(position, dn);
                        sink(self.tile(dg, (row, col), (position, t), slot));
                    }
                }
            }
        }
    }

    /// Groups of `chunks` chunks by which stores that open stand before the adds.
    fn open_lead(&self, chunks: u64) -> usize {
        self.open_lead_tiles.div_ceil(chunks * self.chunk_tiles * self.gpus) as usize
    }

    /// Tile `t` of a chunk of the slice that GPU `dg` ahead owns.
    fn tile(&self, dg: u64, (row, col): (u64, u64), (position, t): (u64, u64), slot: u32) -> Task {
        let [bm, bn, _] = self.rule.tile;
        let mut staging = self.chunk_region(STAGING, position);
        staging.offset += t * self.tile_bytes();
        staging.blocks = 1;
        let opens = self.owner_store && dg == 0;
        let mode = if opens || self.gpus == 1 { WriteMode::Store } else { WriteMode::Add };
        let to = At::local(dg as u16);
        let mut outs: SmallVec<[TileOut; 1]> = SmallVec::new();
        if self.dead_store {
            let local = Region::matrix(WORKSPACE, (row * self.n + col) * 2, bm as u32, (bn * 2) as u32, self.n * 2);
            outs.push(TileOut { place: Place::me(local), mode: WriteMode::Store });
        }
        outs.push(TileOut { place: Place { at: to, region: staging }, mode });
        let mut task = Task::new(self.rule.op(
            Region::matrix(A, row * self.k * 2, bm as u32, (self.k * 2) as u32, self.k * 2),
            Region::matrix(B, col * 2, self.k as u32, (bn * 2) as u32, self.n * 2),
            outs,
        ));
        if opens {
            // The word that I raise at offset d is my slot -d there.
            for d in 1..self.gpus {
                let from = (self.gpus - d) as u32;
                task.signals.push(Signal::one(At::local(d as u16), OPEN, slot * self.gpus as u32 + from));
            }
        } else if self.owner_store {
            task.waits.push(Wait::run(
                OPEN,
                slot * self.gpus as u32 + dg as u32,
                1,
                1,
                self.chunk_tiles as u32,
                Gate::Output,
            ));
        }
        task.signals.push(Signal { early: self.early_ready, ..Signal::one(to, READY, slot) });
        task
    }

    fn ready_wait(&self, slot: u32) -> Wait {
        Wait::on(READY, slot, (self.gpus * self.chunk_tiles) as u32)
    }

    fn send_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        for (position, dn) in self.chunk_order(rank) {
            let targets = if self.per_rank { dn..dn + 1 } else { 1..self.nodes };
            for to in targets.filter(|&to| to != 0) {
                // My word and my landing slot there: I am nodes - to nodes ahead of the target.
                let index = (self.nodes - to - 1) * self.own_chunks + position % self.own_chunks;
                sink(
                    Task::new(Op::Put {
                        src: self.chunk_region(STAGING, position),
                        dst: Place { at: At::node(to as u16), region: self.chunk_region(LANDING, index) },
                        // By what is the same on all ranks, which the position of a chunk is not.
                        queue: self.posting.queue(index),
                        publish: self.posting.publish(index),
                        arrived: Flag { family: ARRIVED, slot: index as u32 },
                        sent: None,
                    })
                    .wait(self.ready_wait(self.chunk_slot(position, dn))),
                );
            }
        }
    }

    fn reduce_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        let [bm, bn, _] = self.rule.tile;
        for (position, dn) in self.chunk_order(rank) {
            if dn != 0 {
                continue;
            }
            let own = position % self.own_chunks;
            let mut inputs = smallvec![Place::me(self.chunk_region(STAGING, position))];
            inputs
                .extend((0..self.nodes - 1).map(|s| Place::me(self.chunk_region(LANDING, s * self.own_chunks + own))));
            let out = Region {
                buffer: OUT,
                offset: own / self.chunks_across * bm * self.n * 2
                    + own % self.chunks_across * self.chunk_tiles * bn * 2,
                blocks: self.chunk_tiles as u32,
                rows: bm as u32,
                row_bytes: (bn * 2) as u32,
                block_pitch: bn * 2,
                row_pitch: self.n * 2,
            };
            let mut task = Task::new(Op::Reduce {
                inputs,
                outputs: smallvec![Place::me(out)],
                in_flight_bytes: self.reduce_in_flight_bytes,
            })
            .wait(self.ready_wait(self.chunk_slot(position, 0)));
            if self.nodes > 1 {
                let (count, stride) = (self.nodes as u32 - 1, self.own_chunks as u32);
                task.waits.push(Wait::run(ARRIVED, own as u32, count, stride, 1, Gate::Start));
            }
            sink(task);
        }
    }
}

impl TaskSource for Plan {
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        let helpers = usize::from(self.zeroes());
        match (launch < helpers, role, self.nodes > 1) {
            (true, _, _) => self.zero_tasks(sink),
            (false, 0, _) => self.compute_tasks(rank, sink),
            (false, 1, true) => self.send_tasks(rank, sink),
            _ => self.reduce_tasks(rank, sink),
        }
    }
}

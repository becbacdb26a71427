//! Mixture of experts: dispatch of tokens to their experts, then a grouped GEMM; no combine.
//!
//! **Shape** `tokens [T, hidden]`, rank r holds rows `r * t ..` (t = T/W); `w [experts * hidden, inter]`, rank r holds
//! the experts `r * experts/W ..`. A rank ends with one row of `inter` columns for every token that chose one of its
//! experts: expert by expert, tokens of the own node first, each expert padded with zero rows to whole row blocks of
//! `tile_m`.
//!
//! ```text
//! inter_send    Put chunk c of the whole local token buffer to the same-index GPU of every node; raises arrived[c]
//! inter_reduce  wait arrived[c]        Sync: tells every GPU of the node that the chunk is here (ready)
//! intra_comm    wait ready             GatherRows: some rows of a row block, from the own or a neighbour's memory
//!               signals rows[block]
//! compute       wait rows[block] = tile_m     GemmTile
//! ```
//!
//! Puts do not depend on the routing. Gathers do: a rank pulls rows from `tokens [nodes][t]` of the GPUs of its node,
//! where slot 0 is their own tokens and slot d what the node d further sent. Row blocks that hold only tokens of the
//! own node come first, the others after them in `remote_passes` passes by the chunk that they need last.
//!
//! A rank without neighbours (`gpus_per_node` = 1) still gathers: tokens of one expert must lie together. So
//! `intra_comm` is there on every cluster, `inter_send` and `inter_reduce` only where there is another node.

use crate::cluster::{Cluster, Offset, Rank};
use crate::kernel::{
    BuildError, DRAIN, EFA_PUBLISH, Element, Expected, Kernel, MAIN_LOOP, Posting, Problem, ProblemKind, QUEUE_ORDER,
    QUEUES, STAGES, Slice, Spec, TILE_K, TILE_M, TILE_N, TileRule, divides, fits_u32, lcm, spec_text,
    unused_without_puts,
};
use crate::options::{OptionSet, OptionSpec, Value, Values};
use crate::routing::{SplitMix64, Urn, torch_cuda_weights};
use crate::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, DType, FamilyId, Flag, FlagFamily, Gate, GatherEntry, Launch, Op, Place,
    Region, Role, RoleKind, Schedule, Signal, Symmetry, TableSlice, Task, TaskSource, TileOut, Wait, WriteMode,
};
use smallvec::smallvec;

const NAME: &str = "moe_dispatch_gemm";

const TOKENS: BufferId = BufferId(0);
const W: BufferId = BufferId(1);
const OUT: BufferId = BufferId(2);
const GATHERED: BufferId = BufferId(3);

const ARRIVED: FamilyId = FamilyId(0);
const READY: FamilyId = FamilyId(1);
const ROWS: FamilyId = FamilyId(2);

/// Largest width, and number of experts: keeps every byte offset far inside 64 bits.
const MAX_SIZE: u64 = 1 << 20;

/// Bytes of the box by which a vector of `hidden` bf16 values is moved: the most elements, in sixteens and 256 at the most,
/// that divide it and are whole 128-byte lines, or sixteens if it is short. Source: mKernel at 610c6f8,
/// include/memory/tk_ops_thread_memory_vec_tma.cuh.
fn vector_box_bytes(problem: &Problem) -> u64 {
    let Problem::Moe { hidden, .. } = *problem else { return 0 };
    let whole = |elements: &u64| hidden.is_multiple_of(*elements) && (hidden < 256 || elements.is_multiple_of(64));
    (1..=16).rev().map(|sixteens| 16 * sixteens).find(whole).map_or(0, |elements| 2 * elements)
}

/// The words of the `routing` option.
pub(crate) const ROUTING_WORDS: &[&str] = &["rotated", "uniform", "multinomial"];

/// MoE dispatch + grouped GEMM.
pub struct MoeDispatchGemm;

const OPTIONS: &[OptionSpec] = &[
    TILE_M,
    TILE_N,
    TILE_K,
    STAGES,
    DRAIN,
    MAIN_LOOP,
    OptionSpec {
        name: "routing",
        doc: "Experts of a token: one rank's draw rotated to the others (symmetric), round robin, or drawn by one \
              weight per expert (uneven): the published bench's own weights at routing_seed 0.",
        values: Values::Words(ROUTING_WORDS),
    },
    OptionSpec {
        name: "routing_seed",
        doc: "Seed of the draws of rotated and multinomial routing; multinomial adds the tokens, as the published bench.",
        values: Values::Int { min: 0, max: u64::MAX },
    },
    OptionSpec { name: "slice_tokens", doc: "Rows of a gather.", values: Values::Int { min: 1, max: 512 } },
    OptionSpec {
        name: "put_bytes",
        doc: "Bytes of a put, a multiple of 16; a token may span two puts.",
        values: Values::Int { min: 16, max: 1 << 30 },
    },
    OptionSpec {
        name: "readiness",
        doc: "How GPUs of a node learn of landed chunks: a flag per chunk, or one counter per sender that says how \
              many of its chunks are here without a gap.",
        values: Values::Words(&["per_chunk", "prefix"]),
    },
    OptionSpec {
        name: "token_order",
        doc: "Remote tokens of an expert by sender, or by the chunk that brings them.",
        values: Values::Words(&["sender", "arrival"]),
    },
    OptionSpec {
        name: "remote_passes",
        doc: "Passes over the experts for row blocks with remote tokens, by the chunk that a block needs last.",
        values: Values::Int { min: 1, max: 64 },
    },
    OptionSpec {
        name: "claim",
        doc: "How compute and intra_comm take tasks: fixed strides, anew for each pass of row blocks, or the next \
              free CTA takes the next task.",
        values: Values::Words(&["strided", "ticket"]),
    },
    OptionSpec {
        name: "recycle",
        doc: "CTAs of the other roles join compute when their lists are empty; needs claim = ticket.",
        values: Values::Bool,
    },
    QUEUES,
    QUEUE_ORDER,
    EFA_PUBLISH,
    OptionSpec {
        name: "send_lanes",
        doc: "Warps of an inter_send CTA that post puts.",
        values: Values::Int { min: 1, max: 16 },
    },
    OptionSpec {
        name: "in_flight_rows",
        doc: "Rows that a gather keeps in flight.",
        values: Values::Int { min: 1, max: 1024 },
    },
    OptionSpec {
        name: "load_store_overlap",
        doc: "A gather loads the next rows while it stores the last ones.",
        values: Values::Bool,
    },
    OptionSpec {
        name: "gather_box_bytes",
        doc: "Bytes of a row that one instruction of a gather moves, a divisor of a row; 0: a row each.",
        values: Values::Int { min: 0, max: 1 << 20 },
    },
];

impl Kernel for MoeDispatchGemm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn summary(&self) -> &'static str {
        "MoE dispatch then grouped GEMM"
    }

    fn problem_kind(&self) -> ProblemKind {
        ProblemKind::Moe
    }

    fn option_specs(&self) -> &'static [OptionSpec] {
        OPTIONS
    }

    fn default_option(&self, set: OptionSet, name: &str, problem: &Problem, _cluster: Cluster) -> Value {
        let published = set == OptionSet::Published;
        let pick = |p, t| if published { Value::Word(p) } else { Value::Word(t) };
        match name {
            "tile_m" => Value::Int(128),
            "tile_n" => Value::Int(256),
            "tile_k" => Value::Int(64),
            "stages" => Value::Int(4),
            "queues" | "queue_order" | "efa_publish" => Posting::default_option(published, name),
            "drain" => Value::Word("overlap"),
            "main_loop" => pick("wait_each_step", "pipelined"),
            "routing" => pick("multinomial", "rotated"),
            "routing_seed" => Value::Int(0),
            "slice_tokens" | "in_flight_rows" => Value::Int(16),
            "gather_box_bytes" => Value::Int(if published { vector_box_bytes(problem) } else { 0 }),
            "put_bytes" => Value::Int(524_288),
            "readiness" => pick("per_chunk", "prefix"),
            "token_order" => pick("sender", "arrival"),
            "remote_passes" => Value::Int(if published { 1 } else { 4 }),
            "claim" => pick("strided", "ticket"),
            "recycle" | "load_store_overlap" => Value::Bool(!published),
            "send_lanes" => Value::Int(if published { 12 } else { 1 }),
            _ => unreachable!("{NAME} lists no option {name}"),
        }
    }

    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError> {
        let plan = Plan::new(spec)?;
        let flags = vec![
            FlagFamily { name: "arrived".into(), slots: ((plan.nodes - 1) * plan.chunks) as u32 },
            FlagFamily { name: "ready".into(), slots: plan.ready_flags() as u32 },
            FlagFamily { name: "rows".into(), slots: plan.max_blocks as u32 },
        ];
        Ok(Schedule {
            kernel: NAME.into(),
            cluster: spec.cluster,
            fabric: spec.fabric,
            spec: spec_text(spec, &["gather_box_bytes=0", "queue_order=alternate", "efa_publish=immediate"]),
            buffers: plan.buffers(),
            flags,
            launches: vec![plan.launch()],
            symmetry: if plan.layouts.len() == 1 { Symmetry::FULL } else { Symmetry::NONE },
            useful_flops: (2 * plan.local_tokens * plan.topk).saturating_mul(plan.hidden * plan.inter),
            source: Box::new(plan),
        })
    }

    fn unused(&self, spec: &Spec, option: &str) -> Option<&'static str> {
        match option {
            "queues" | "queue_order" | "efa_publish" => Posting::unused(spec, option),
            "send_lanes" | "put_bytes" | "readiness" | "token_order" | "remote_passes" => unused_without_puts(spec),
            "routing_seed" => {
                (spec.options.word("routing") == "uniform").then_some("with routing = uniform, where nothing is drawn")
            }
            _ => None,
        }
    }

    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice> {
        let Problem::Moe { tokens, hidden, inter, experts, .. } = spec.problem else { return Vec::new() };
        let (ranks, number) = (spec.cluster.ranks() as u64, spec.cluster.number(rank) as u64);
        let (local, deep) = (tokens / ranks, experts / ranks * hidden);
        vec![
            Slice {
                tensor: "tokens",
                row: number * local,
                col: 0,
                rows: local,
                cols: hidden,
                region: Region::contiguous(TOKENS, 0, local as u32, (hidden * 2) as u32),
            },
            Slice {
                tensor: "w",
                row: number * deep,
                col: 0,
                rows: deep,
                cols: inter,
                region: Region::contiguous(W, 0, deep as u32, (inter * 2) as u32),
            },
        ]
    }

    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        let Ok(plan) = Plan::new(spec) else { return Vec::new() };
        let (hidden, inter, bm) = (plan.hidden, plan.inter, plan.rule.tile[0] as usize);
        let layout = plan.layout(rank);
        let first_expert = spec.cluster.number(rank) as u64 * plan.local_experts;
        let (mut values, mut magnitudes) = (Vec::new(), Vec::new());
        for (block, rows) in layout.blocks.iter().zip(layout.table.chunks_exact(bm)) {
            let deep = (first_expert + u64::from(block.expert)) * hidden;
            let weights: Vec<f64> =
                (0..hidden).flat_map(|k| (0..inter).map(move |c| element("w", deep + k, c))).collect();
            for entry in rows {
                let (mut sum, mut magnitude) = (vec![0.0; inter as usize], vec![0.0; inter as usize]);
                if let Some(entry) = entry {
                    let (slot, token) = (u64::from(entry.row) / plan.local_tokens, u64::from(entry.row));
                    let home = spec.cluster.at(rank, Offset { dn: slot as u16, dg: entry.dg });
                    let row = spec.cluster.number(home) as u64 * plan.local_tokens + token % plan.local_tokens;
                    for (k, weights) in weights.chunks_exact(inter as usize).enumerate() {
                        let a = element("tokens", row, k as u64);
                        for (c, &b) in weights.iter().enumerate() {
                            sum[c] += a * b;
                            magnitude[c] += (a * b).abs();
                        }
                    }
                }
                values.extend(sum);
                magnitudes.extend(magnitude);
            }
        }
        vec![Expected {
            region: Region::contiguous(OUT, 0, layout.table.len() as u32, (inter * 2) as u32),
            values,
            magnitudes,
            // The finished tile.
            roundings: 1,
        }]
    }
}

/// A token that chose an expert, seen from the expert's rank.
#[derive(Clone, Copy)]
struct Guest {
    /// Offset of the rank that holds it.
    home: Offset,
    /// Its number there.
    token: u32,
}

/// Guests of each expert of a rank.
type Guests = Vec<Vec<Guest>>;

/// A row block of the output, in the order of the output.
struct Block {
    /// Local expert.
    expert: u32,
    /// Pass in which it is gathered and multiplied; 0 when all its tokens are of the own node.
    pass: u32,
}

/// Where the tokens of a rank's experts go, and in which order.
struct Layout {
    /// One entry per output row.
    table: Vec<Option<GatherEntry>>,
    blocks: Vec<Block>,
    /// Indices of blocks in the order of work.
    order: Vec<u32>,
    /// Highest level that a gather waits for, by ready flag: with prefix counters a number of chunks, else 0 or 1.
    ready_levels: Vec<u32>,
}

/// What the output rows of a rank hold, for the unfused form of this kernel.
pub(crate) struct OutputRows {
    /// Per output row: GPU offset of the token's home, node offset times tokens of a rank plus number of the token.
    pub table: Vec<Option<GatherEntry>>,
    /// Local expert of each row block.
    pub experts: Vec<u32>,
}

/// The output rows under a spec: one for all ranks, or one per rank.
pub(crate) fn output_rows(spec: &Spec) -> Result<Vec<OutputRows>, BuildError> {
    let rows = |layout: Layout| OutputRows {
        table: layout.table,
        experts: layout.blocks.iter().map(|block| block.expert).collect(),
    };
    Ok(Plan::new(spec)?.layouts.into_iter().map(rows).collect())
}

/// Sizes derived from a spec, and the routing.
struct Plan {
    cluster: Cluster,
    nodes: u64,
    gpus: u64,
    hidden: u64,
    inter: u64,
    topk: u64,
    local_tokens: u64,
    local_experts: u64,
    rule: TileRule,
    posting: Posting,
    slice_tokens: u64,
    put_bytes: u64,
    /// Chunks of the local token buffer.
    chunks: u64,
    prefix: bool,
    by_arrival: bool,
    remote_passes: u64,
    ticket: bool,
    recycle: bool,
    send_lanes: u32,
    in_flight_rows: u16,
    load_store_overlap: bool,
    box_bytes: u32,
    /// One for all ranks, or one per rank.
    layouts: Vec<Layout>,
    max_blocks: u64,
}

impl Plan {
    fn new(spec: &Spec) -> Result<Self, BuildError> {
        let Problem::Moe { tokens, hidden, inter, topk, experts } = spec.problem else {
            return Err(BuildError::Unsupported {
                kernel: NAME,
                what: "needs a MoE shape: tokens, hidden, inter, topk and experts".into(),
            });
        };
        let options = &spec.options;
        let ranks = spec.cluster.ranks() as u64;
        let rule = TileRule::new(options);
        let [bm, bn, bk] = rule.tile;
        let (slice_tokens, put_bytes) = (options.int("slice_tokens"), options.int("put_bytes"));
        divides(NAME, "tokens", tokens, ranks, || format!("{ranks} ranks hold equal parts"))?;
        divides(NAME, "experts", experts, ranks, || format!("{ranks} ranks own equally many"))?;
        // Rows move in pieces of 16 bytes.
        divides(NAME, "hidden", hidden, lcm(bk, 8), || format!("main loop steps of tile_k = {bk}, 16-byte pieces"))?;
        divides(NAME, "inter", inter, lcm(bn, 8), || format!("tiles of tile_n = {bn} columns, 16-byte pieces"))?;
        divides(NAME, "tile_m", bm, slice_tokens, || {
            format!("row blocks of whole gathers, slice_tokens = {slice_tokens}")
        })?;
        divides(NAME, "put_bytes", put_bytes, 16, || "16-byte pieces".into())?;
        let box_bytes = options.int("gather_box_bytes");
        if box_bytes > 0 {
            divides(NAME, "gather_box_bytes", box_bytes, 16, || "16-byte pieces".into())?;
            if !(hidden * 2).is_multiple_of(box_bytes) {
                let allowed = format!("a divisor of the {} bytes of a row, hidden * 2", hidden * 2);
                return Err(BuildError::Range { kernel: NAME, what: "gather_box_bytes", value: box_bytes, allowed });
            }
        }
        if topk == 0 || topk > experts {
            let allowed = format!("from 1 to the number of experts, {experts}");
            return Err(BuildError::Range { kernel: NAME, what: "topk", value: topk, allowed });
        }
        for (what, value) in [("hidden", hidden), ("inter", inter), ("experts", experts)] {
            if value > MAX_SIZE {
                let allowed = format!("at most {MAX_SIZE}");
                return Err(BuildError::Range { kernel: NAME, what, value, allowed });
            }
        }
        fits_u32(NAME, "weight rows of a rank (experts/ranks times hidden)", experts / ranks * hidden)?;
        // A rank can get at most all choices, and every expert a part of a block more.
        let choices = tokens.saturating_mul(topk);
        fits_u32(NAME, "tokens times topk, padded", choices.saturating_add(experts / ranks * bm))?;
        let local_tokens = tokens / ranks;
        let chunks = (local_tokens * hidden * 2).div_ceil(put_bytes);
        fits_u32(
            NAME,
            "ready flags (chunks landed in a node)",
            (ranks - u64::from(spec.cluster.gpus_per_node)) * chunks,
        )?;
        let ticket = options.word("claim") == "ticket";
        let recycle = options.flag("recycle");
        if recycle && !ticket {
            let what = "recycle = true needs claim = ticket: no CTA can join fixed strides".into();
            return Err(BuildError::Unsupported { kernel: NAME, what });
        }
        let mut plan = Self {
            cluster: spec.cluster,
            nodes: u64::from(spec.cluster.nodes),
            gpus: u64::from(spec.cluster.gpus_per_node),
            hidden,
            inter,
            topk,
            local_tokens,
            local_experts: experts / ranks,
            rule,
            posting: Posting::new(spec),
            slice_tokens,
            put_bytes,
            chunks,
            prefix: options.word("readiness") == "prefix",
            by_arrival: options.word("token_order") == "arrival",
            remote_passes: options.int("remote_passes"),
            ticket,
            recycle,
            send_lanes: options.int("send_lanes") as u32,
            in_flight_rows: options.int("in_flight_rows") as u16,
            load_store_overlap: options.flag("load_store_overlap"),
            box_bytes: box_bytes as u32,
            layouts: Vec::new(),
            max_blocks: 0,
        };
        let seed = options.int("routing_seed");
        let guests = match options.word("routing") {
            "rotated" => plan.rotated(seed),
            "uniform" => plan.by_token(|token, chosen| {
                chosen.extend((0..topk).map(|j| ((token * topk + j) % experts) as u32));
            }),
            _ => {
                // The published bench draws one weight per expert on a GPU, with its seed plus the tokens; then experts by
                // weight, here with a generator of our own. Source: mKernel bench/dispatch_gemm_bench.py.
                let seed = seed.wrapping_add(tokens);
                let mut random = SplitMix64(seed);
                let urn = Urn::new(torch_cuda_weights(seed, experts));
                plan.by_token(|_, chosen| urn.draw(topk as usize, &mut random, chosen))
            }
        };
        plan.layouts = guests.into_iter().map(|guests| plan.lay_out(guests)).collect();
        plan.max_blocks = plan.layouts.iter().map(|layout| layout.blocks.len() as u64).max().unwrap_or(0);
        Ok(plan)
    }

    /// Draws the experts of one rank's tokens, by offset from that rank, and rotates them: every rank gets the same.
    fn rotated(&self, seed: u64) -> Vec<Guests> {
        let experts = self.cluster.ranks() as u64 * self.local_experts;
        let urn = Urn::new(vec![1.0; experts as usize]);
        let (mut random, mut chosen) = (SplitMix64(seed), Vec::new());
        let mut guests = vec![Vec::new(); self.local_experts as usize];
        for token in 0..self.local_tokens as u32 {
            chosen.clear();
            urn.draw(self.topk as usize, &mut random, &mut chosen);
            for &expert in &chosen {
                let owner = self.cluster.rank(u64::from(expert) as usize / self.local_experts as usize);
                let home = self.cluster.negate(Offset { dn: owner.node, dg: owner.gpu });
                guests[expert as usize % self.local_experts as usize].push(Guest { home, token });
            }
        }
        vec![guests]
    }

    /// Guests of every rank from the experts of every token.
    fn by_token(&self, mut choose: impl FnMut(u64, &mut Vec<u32>)) -> Vec<Guests> {
        let local_experts = self.local_experts as usize;
        let mut guests = vec![vec![Vec::new(); local_experts]; self.cluster.ranks()];
        let mut chosen = Vec::new();
        for (number, from) in self.cluster.iter().enumerate() {
            let homes: Vec<Offset> = self.cluster.iter().map(|owner| self.cluster.offset(owner, from)).collect();
            for token in 0..self.local_tokens {
                chosen.clear();
                choose(number as u64 * self.local_tokens + token, &mut chosen);
                for &expert in &chosen {
                    let (owner, expert) = (expert as usize / local_experts, expert as usize % local_experts);
                    guests[owner][expert].push(Guest { home: homes[owner], token: token as u32 });
                }
            }
        }
        guests
    }

    fn lay_out(&self, guests: Guests) -> Layout {
        let bm = self.rule.tile[0] as usize;
        let last_chunk = |guest: &Guest| self.last_chunk(u64::from(guest.token));
        let (mut table, mut blocks) = (Vec::new(), Vec::new());
        for (expert, mut guests) in guests.into_iter().enumerate() {
            // A stable sort, which is fast here: the list is a few sorted runs.
            guests.sort_by_key(|guest| {
                let remote = guest.home.dn != 0;
                (remote, if remote && self.by_arrival { last_chunk(guest) } else { 0 }, guest.home, guest.token)
            });
            for rows in guests.chunks(bm) {
                table.extend(rows.iter().map(|guest| {
                    let row = u64::from(guest.home.dn) * self.local_tokens + u64::from(guest.token);
                    Some(GatherEntry { dg: guest.home.dg, row: row as u32 })
                }));
                table.resize(table.len().next_multiple_of(bm), None);
                let latest = rows.iter().filter(|guest| guest.home.dn != 0).map(last_chunk).max();
                let pass = latest.map_or(0, |chunk| 1 + chunk * self.remote_passes / self.chunks);
                blocks.push(Block { expert: expert as u32, pass: pass as u32 });
            }
        }
        let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
        order.sort_by_key(|&block| blocks[block as usize].pass);
        let mut layout = Layout { table, blocks, order, ready_levels: vec![0; self.ready_flags() as usize] };
        let (mut slots, mut waits) = (Vec::new(), Vec::new());
        for entries in layout.table.chunks(self.slice_tokens as usize) {
            waits.clear();
            self.arrival_waits(entries, &mut slots, &mut waits);
            for wait in &waits {
                for slot in wait.slots() {
                    let level = &mut layout.ready_levels[slot as usize];
                    *level = wait.at_least.max(*level);
                }
            }
        }
        layout
    }

    const fn ready_flags(&self) -> u64 {
        (self.nodes - 1) * self.gpus * if self.prefix { 1 } else { self.chunks }
    }

    fn layout(&self, rank: Rank) -> &Layout {
        &self.layouts[self.cluster.number(rank) % self.layouts.len()]
    }

    const fn row_bytes(&self) -> u64 {
        self.hidden * 2
    }

    const fn buffer_bytes(&self) -> u64 {
        self.local_tokens * self.row_bytes()
    }

    const fn first_chunk(&self, token: u64) -> u64 {
        token * self.row_bytes() / self.put_bytes
    }

    const fn last_chunk(&self, token: u64) -> u64 {
        ((token + 1) * self.row_bytes() - 1) / self.put_bytes
    }

    fn buffers(&self) -> Vec<Buffer> {
        let buffer = |name: &str, bytes, usage| Buffer { name: name.into(), bytes, dtype: DType::Bf16, usage };
        let rows = self.max_blocks * self.rule.tile[0];
        vec![
            buffer("tokens", self.nodes * self.buffer_bytes(), BufferUse::Input),
            buffer("w", self.local_experts * self.hidden * self.inter * 2, BufferUse::Input),
            buffer("out", rows * self.inter * 2, BufferUse::Output),
            buffer("gathered", rows * self.row_bytes(), BufferUse::Scratch),
        ]
    }

    fn launch(&self) -> Launch {
        let claim = if self.ticket { Claim::Ticket } else { Claim::Strided };
        let notice = if self.ticket { Claim::Ready { window: 32 } } else { Claim::Strided };
        let joins_compute = |kind, claim| Role { recycle: self.recycle.then_some(0), ..Role::new(kind, claim) };
        let mut roles = vec![Role::new(RoleKind::Compute, claim), joins_compute(RoleKind::IntraComm, claim)];
        if self.nodes > 1 {
            roles.push(Role { lanes: self.send_lanes, ..joins_compute(RoleKind::InterSend, Claim::Strided) });
            roles.push(joins_compute(RoleKind::InterReduce, notice));
        }
        Launch { name: "main".into(), after: Vec::new(), roles }
    }

    fn send_tasks(&self, sink: &mut dyn FnMut(Task)) {
        for chunk in 0..self.chunks {
            let offset = chunk * self.put_bytes;
            let bytes = self.put_bytes.min(self.buffer_bytes() - offset) as u32;
            for to in 1..self.nodes {
                // I am nodes - to nodes ahead of the target.
                let slot = self.nodes - to;
                let target = Region::contiguous(TOKENS, slot * self.buffer_bytes() + offset, 1, bytes);
                sink(Task::new(Op::Put {
                    src: Region::contiguous(TOKENS, offset, 1, bytes),
                    dst: Place { at: At::node(to as u16), region: target },
                    queue: self.posting.queue(chunk),
                    publish: self.posting.publish(chunk),
                    arrived: Flag { family: ARRIVED, slot: ((slot - 1) * self.chunks + chunk) as u32 },
                    sent: None,
                }));
            }
        }
    }

    /// The flag that says, on the rank that waits, that chunk `chunk` of the node `dn` further has landed at the GPU
    /// `dg` further; with prefix counters the counter of that sender.
    const fn ready_slot(&self, dn: u64, dg: u64, chunk: u64) -> u32 {
        let sender = (dn - 1) * self.gpus + dg;
        (if self.prefix { sender } else { sender * self.chunks + chunk }) as u32
    }

    fn notice_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        for chunk in 0..self.chunks {
            for dn in 1..self.nodes {
                let mut task = Task::new(Op::Sync).wait(Wait::on(ARRIVED, ((dn - 1) * self.chunks + chunk) as u32, 1));
                if self.prefix && chunk > 0 {
                    // In order, so that a counter of c means the first c chunks.
                    task.waits.push(Wait::on(READY, self.ready_slot(dn, 0, 0), chunk as u32));
                }
                for dg in 0..self.gpus {
                    let to = Offset::local(dg as u16);
                    // Seen from there I am -dg further.
                    let slot = self.ready_slot(dn, (self.gpus - dg) % self.gpus, chunk);
                    let level = self.layout(self.cluster.at(rank, to)).ready_levels[slot as usize];
                    let gathers = u64::from(level) > if self.prefix { chunk } else { 0 };
                    let next_notice = self.prefix && dg == 0 && chunk + 1 < self.chunks;
                    if gathers || next_notice {
                        task.signals.push(Signal::one(At::Offset(to), READY, slot));
                    }
                }
                sink(task);
            }
        }
    }

    fn gather_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        let (bm, layout) = (self.rule.tile[0], self.layout(rank));
        let (mut slots, mut waits) = (Vec::new(), Vec::new());
        let mut passes = Passes::of(self, layout);
        for &block in &layout.order {
            let mut restart = passes.begins(block);
            for start in (0..bm).step_by(self.slice_tokens as usize).map(|row| u64::from(block) * bm + row) {
                let entries = &layout.table[start as usize..(start + self.slice_tokens) as usize];
                let mut task = Task::new(Op::GatherRows {
                    table: TableSlice { start: start as u32, len: self.slice_tokens as u32 },
                    src: TOKENS,
                    dst: Region::contiguous(
                        GATHERED,
                        start * self.row_bytes(),
                        self.slice_tokens as u32,
                        self.row_bytes() as u32,
                    ),
                    in_flight_rows: self.in_flight_rows,
                    load_store_overlap: self.load_store_overlap,
                    box_bytes: self.box_bytes,
                })
                .signal(Signal { add: self.slice_tokens as u32, ..Signal::one(At::ME, ROWS, block) });
                waits.clear();
                self.arrival_waits(entries, &mut slots, &mut waits);
                task.waits.extend(waits.iter().copied());
                task.restart = std::mem::take(&mut restart);
                sink(task);
            }
        }
    }

    /// What the landed rows among `entries` wait for.
    fn arrival_waits(&self, entries: &[Option<GatherEntry>], slots: &mut Vec<u32>, waits: &mut Vec<Wait>) {
        let landed = entries.iter().flatten().filter_map(|entry| {
            let (dn, token) = (u64::from(entry.row) / self.local_tokens, u64::from(entry.row) % self.local_tokens);
            (dn != 0).then_some((dn, u64::from(entry.dg), token))
        });
        if self.prefix {
            // One level for all senders: tokens are in the order of their chunks, which senders send in step.
            if let Some(chunk) = landed.map(|(_, _, token)| self.last_chunk(token)).max() {
                let senders = ((self.nodes - 1) * self.gpus) as u32;
                waits.push(Wait::run(READY, 0, senders, 1, chunk as u32 + 1, Gate::Start));
            }
            return;
        }
        slots.clear();
        for (dn, dg, token) in landed {
            let chunks = self.first_chunk(token)..=self.last_chunk(token);
            slots.extend(chunks.map(|chunk| self.ready_slot(dn, dg, chunk)));
        }
        slots.sort_unstable();
        slots.dedup();
        for run in slots.chunk_by(|a, b| a + 1 == *b) {
            waits.push(Wait::run(READY, run[0], run.len() as u32, 1, 1, Gate::Start));
        }
    }

    fn compute_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        let ([bm, bn, _], layout) = (self.rule.tile, self.layout(rank));
        let (row_bytes, out_bytes) = (self.row_bytes(), self.inter * 2);
        let mut passes = Passes::of(self, layout);
        for &block in &layout.order {
            let mut restart = passes.begins(block);
            let row = u64::from(block) * bm;
            let weights = u64::from(layout.blocks[block as usize].expert) * self.hidden * out_bytes;
            for col in (0..self.inter).step_by(bn as usize) {
                let out = Region::matrix(OUT, row * out_bytes + col * 2, bm as u32, (bn * 2) as u32, out_bytes);
                let op = self.rule.op(
                    Region::matrix(GATHERED, row * row_bytes, bm as u32, row_bytes as u32, row_bytes),
                    Region::matrix(W, weights + col * 2, self.hidden as u32, (bn * 2) as u32, out_bytes),
                    smallvec![TileOut { place: Place::me(out), mode: WriteMode::Store }],
                );
                let task = Task::new(op).wait(Wait::on(ROWS, block, bm as u32));
                sink(Task { restart: std::mem::take(&mut restart), ..task });
            }
        }
    }
}

/// Where a new pass begins in the order of the row blocks.
struct Passes<'a> {
    blocks: &'a [Block],
    strided: bool,
    last: Option<u32>,
}

impl<'a> Passes<'a> {
    fn of(plan: &Plan, layout: &'a Layout) -> Self {
        Self { blocks: &layout.blocks, strided: !plan.ticket, last: None }
    }

    /// Whether strides begin anew with this block, the next of the order.
    fn begins(&mut self, block: u32) -> bool {
        let pass = self.blocks[block as usize].pass;
        self.last.replace(pass).is_some_and(|last| last != pass) && self.strided
    }
}

impl TaskSource for Plan {
    fn tasks(&self, rank: Rank, _launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        match role {
            0 => self.compute_tasks(rank, sink),
            1 => self.gather_tasks(rank, sink),
            2 => self.send_tasks(sink),
            _ => self.notice_tasks(rank, sink),
        }
    }

    fn table(&self, rank: Rank) -> Vec<Option<GatherEntry>> {
        self.layout(rank).table.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_is_moved_by_the_largest_box_of_whole_lines_that_divides_it() {
        let boxes =
            |hidden| vector_box_bytes(&Problem::Moe { tokens: 8192, hidden, inter: 2048, experts: 256, topk: 8 });
        // 28 boxes of 256, 7 of 192, 3 of 64 elements; shorter than 256 also of part of a line.
        assert_eq!([7168, 1344, 320, 240, 48].map(boxes), [512, 384, 128, 480, 96]);
    }
}

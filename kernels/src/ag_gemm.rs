//! All-gather then GEMM: every rank multiplies the gathered rows of A by its own columns of B.
//!
//! **Shape** `A [m, k]`, rank r holds rows `r * m/W ..` (length m/W); `B [k, W * n]`, rank r holds columns `r * n ..`
//! (length n); out `[m, n]` on every rank.
//!
//! ```text
//! first hop     Put own rows, a few per row unit: to every other node (exchange = direct) or to the next one (ring)
//! intra_comm    Copy own rows, then (wait arrived) each landed block, to the local GPUs    raises local, remote there
//! inter_send    ring only: Put each landed block onwards to the next node
//! compute       GemmTile over the rows of the own node, then those of the others as they come
//!               waits local[unit, chunk] or remote[unit, chunk] at k steps, or the whole unit at the start
//! ```
//!
//! A *unit* is `unit_tiles` row blocks of one rank's shard; a *chunk* is `chunk_k_steps * tile_k` columns of a unit and
//! what one copy task moves. Inter-node traffic runs between GPUs of the same index; what landed is read in place by its
//! own rank when `own_rows = direct`.
//!
//! **Published, approximated.** The prologue's grid is as large as the intra band of the split; here it has 4 blocks,
//! which is that band on all published shapes but one. A copy lane moves one 64 KiB chunk at a time, which the
//! schedule says as `lanes = 3`, 192 KiB in flight and no overlap of load and store. Landing memory is the shard per hop,
//! not a whole matrix per hop. A hop is forwarded from the bank in which it landed (as upstream does since; at the head
//! commit from bank 0). The end of an iteration (zeroing planes, the barrier inside the node) is the end of a run, which is
//! not timed. On a single GPU per node own and landed rows are read in place, as nobody would copy them.

use crate::cluster::{Cluster, Offset, Rank};
use crate::kernel::{
    BuildError, DRAIN, EFA_PUBLISH, Element, Expected, Kernel, MAIN_LOOP, Posting, Problem, ProblemKind, Product,
    QUEUE_ORDER, QUEUES, STAGES, Slice, Spec, TILE_K, TILE_M, TILE_N, TileRule, divides, fits_u32, spec_text,
    unused_without_neighbours, unused_without_puts,
};
use crate::options::{OptionSet, OptionSpec, Options, Value, Values};
use crate::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, CtaCount, DType, Engine, FamilyId, Flag, FlagFamily, Gate, Launch, Op,
    Place, Region, Role, RoleKind, Schedule, Signal, Symmetry, Task, TaskSource, TileOut, Wait, WriteMode,
};
use smallvec::smallvec;

const NAME: &str = "ag_gemm";

const A: BufferId = BufferId(0);
const B: BufferId = BufferId(1);
const OUT: BufferId = BufferId(2);
const GATHERED: BufferId = BufferId(3);
const LANDING: BufferId = BufferId(4);

const LOCAL: FamilyId = FamilyId(0);
const REMOTE: FamilyId = FamilyId(1);
const ARRIVED: FamilyId = FamilyId(2);
const PHASE: FamilyId = FamilyId(3);

/// Blocks of the prologue. Source: mKernel at 68644c9, its intra band (4 CTAs on all published shapes but 32768).
const PROLOGUE_BLOCKS: u32 = 4;

/// All-gather + GEMM.
pub struct AgGemm;

const READY_WORDS: &[&str] = &["k_chunk", "row_unit"];

const OPTIONS: &[OptionSpec] = &[
    TILE_M,
    TILE_N,
    TILE_K,
    STAGES,
    DRAIN,
    MAIN_LOOP,
    OptionSpec {
        name: "super_m",
        doc: "Row blocks that are walked before the next column of tiles.",
        values: Values::Int { min: 1, max: 4096 },
    },
    OptionSpec {
        name: "row_order",
        doc: "Order of the GPUs of a node in every list: from the own one on, or the same on all GPUs.",
        values: Values::Words(&["relative", "absolute"]),
    },
    OptionSpec {
        name: "remote_order",
        doc: "Which node's rows are computed first after the own ones: node + 1, node + 2, ..., or as they arrive.",
        values: Values::Words(&["ascending", "arrival"]),
    },
    OptionSpec {
        name: "compute_claim",
        doc: "How compute CTAs take tiles.",
        values: Values::Words(&["strided", "ticket"]),
    },
    OptionSpec {
        name: "own_rows",
        doc: "Where a rank reads its own and its landed rows: where they are, or in the gathered copy.",
        values: Values::Words(&["direct", "gathered"]),
    },
    OptionSpec { name: "unit_tiles", doc: "Row blocks of a row unit.", values: Values::Int { min: 1, max: 64 } },
    OptionSpec {
        name: "chunk_k_steps",
        doc: "Main loop steps that a chunk is wide.",
        values: Values::Int { min: 1, max: 4096 },
    },
    OptionSpec {
        name: "local_ready",
        doc: "What a tile waits for in rows of the own node: each chunk at its k step, or the whole unit.",
        values: Values::Words(READY_WORDS),
    },
    OptionSpec {
        name: "remote_ready",
        doc: "What a tile waits for in rows of other nodes.",
        values: Values::Words(READY_WORDS),
    },
    OptionSpec { name: "nvls", doc: "Copies and their signals are multicasts.", values: Values::Bool },
    OptionSpec {
        name: "copy_targets",
        doc: "Without NVLS: a copy task per neighbour in the order of their need, or one task for all.",
        values: Values::Words(&["each", "all"]),
    },
    OptionSpec {
        name: "copy_claim",
        doc: "How copy workers take tasks.",
        values: Values::Words(&["strided", "ticket", "ready"]),
    },
    OptionSpec {
        name: "copy_lanes",
        doc: "Workers of a copy CTA, each with a chunk.",
        values: Values::Int { min: 1, max: 16 },
    },
    OptionSpec {
        name: "copy_in_flight_bytes",
        doc: "Bytes that a copy CTA keeps in flight.",
        values: Values::Int { min: 16, max: 262_144 },
    },
    OptionSpec {
        name: "copy_overlap",
        doc: "Whether loads of the next piece overlap stores of the last one.",
        values: Values::Bool,
    },
    OptionSpec { name: "phase_gate", doc: "No landed block is copied before all own rows are.", values: Values::Bool },
    OptionSpec {
        name: "exchange",
        doc: "Own rows go to every other node, or from node to next node in a ring.",
        values: Values::Words(&["direct", "ring"]),
    },
    OptionSpec {
        name: "first_hop",
        doc: "Who posts the puts of own rows: inter_send CTAs, a launch before, or a launch beside the big one.",
        values: Values::Words(&["send_role", "prologue", "side_prologue"]),
    },
    OptionSpec {
        name: "forward",
        doc: "In a ring: inter_send forwards a block when it lands, or intra_comm once it has published it.",
        values: Values::Words(&["on_arrival", "after_publish"]),
    },
    OptionSpec { name: "puts_per_unit", doc: "Puts of a row unit.", values: Values::Int { min: 1, max: 16 } },
    OptionSpec {
        name: "send_order",
        doc: "Forwards as blocks land, or in list order (head of line).",
        values: Values::Words(&["any", "in_order"]),
    },
    QUEUES,
    QUEUE_ORDER,
    EFA_PUBLISH,
    OptionSpec {
        name: "recycle",
        doc: "CTAs of inter_send join intra_comm and those join compute, where these take tickets.",
        values: Values::Bool,
    },
];

impl Kernel for AgGemm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn summary(&self) -> &'static str {
        "All-gather then GEMM"
    }

    fn problem_kind(&self) -> ProblemKind {
        ProblemKind::Gemm
    }

    fn option_specs(&self) -> &'static [OptionSpec] {
        OPTIONS
    }

    fn default_option(&self, set: OptionSet, name: &str, problem: &Problem, _cluster: Cluster) -> Value {
        let published = set == OptionSet::Published;
        let pick = |p, t| if published { Value::Word(p) } else { Value::Word(t) };
        let pick_int = |p, t| Value::Int(if published { p } else { t });
        match name {
            "tile_m" => Value::Int(128),
            "tile_n" => Value::Int(256),
            "tile_k" => Value::Int(64),
            // Three stages in the published kernel leave room for its copy buffers.
            "stages" => pick_int(3, 4),
            "drain" => pick("visible", "overlap"),
            "main_loop" => pick("wait_each_step", "pipelined"),
            // Few row blocks at a time need few rows to have arrived; with n/256 columns they still fill a wave.
            "super_m" => pick_int(12, 4),
            "row_order" => pick("absolute", "relative"),
            "remote_order" => pick("ascending", "arrival"),
            "compute_claim" => Value::Word("strided"),
            "own_rows" => pick("gathered", "direct"),
            // Half the rows and twice the columns: as many bytes per copy, and a row block waits for itself only.
            "unit_tiles" => pick_int(2, 1),
            "chunk_k_steps" => pick_int(2, chunk_k_steps(problem)),
            "local_ready" => Value::Word("k_chunk"),
            "remote_ready" => pick("row_unit", "k_chunk"),
            "nvls" | "phase_gate" => Value::Bool(published),
            "copy_targets" => pick("all", "each"),
            "copy_claim" => pick("strided", "ticket"),
            "copy_lanes" => Value::Int(3),
            "copy_in_flight_bytes" => Value::Int(3 * 65_536),
            "copy_overlap" | "recycle" => Value::Bool(!published),
            "exchange" => pick("ring", "direct"),
            "first_hop" => pick("prologue", "send_role"),
            "forward" => pick("after_publish", "on_arrival"),
            "puts_per_unit" => Value::Int(2),
            "send_order" => pick("in_order", "any"),
            "queues" | "queue_order" | "efa_publish" => Posting::default_option(published, name),
            _ => unreachable!("{NAME} lists no option {name}"),
        }
    }

    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError> {
        let plan = Plan::new(spec)?;
        Ok(Schedule {
            kernel: NAME.into(),
            cluster: spec.cluster,
            fabric: spec.fabric,
            spec: spec_text(spec, &["queue_order=alternate", "efa_publish=immediate"]),
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
        let hops = || (nodes == 2).then_some("between two nodes, where a ring is one hop");
        let direct = || is("exchange", "direct").then_some("with exchange = direct, where nothing is forwarded");
        let by_send_role = is("first_hop", "send_role");
        let by_copies = gpus > 1 && is("forward", "after_publish");
        let sends = nodes > 1 && (by_send_role || (nodes > 2 && is("exchange", "ring") && !by_copies));
        match option {
            "queues" | "queue_order" | "efa_publish" => Posting::unused(spec, option),
            "first_hop" | "puts_per_unit" => unused_without_puts(spec),
            "exchange" => unused_without_puts(spec).or_else(hops),
            "remote_order" => unused_without_puts(spec).or_else(hops).or_else(|| {
                is("exchange", "direct").then_some("with exchange = direct, where rows arrive in that order")
            }),
            "forward" => {
                unused_without_puts(spec).or_else(hops).or_else(direct).or_else(|| unused_without_neighbours(spec))
            }
            "send_order" => (!sends).then_some("where inter_send has no list beside the big launch's others"),
            "remote_ready" | "phase_gate" => unused_without_puts(spec).or_else(|| unused_without_neighbours(spec)),
            "row_order"
            | "own_rows"
            | "chunk_k_steps"
            | "local_ready"
            | "nvls"
            | "copy_claim"
            | "copy_lanes"
            | "copy_in_flight_bytes"
            | "copy_overlap" => unused_without_neighbours(spec),
            "copy_targets" => unused_without_neighbours(spec)
                .or_else(|| spec.options.flag("nvls").then_some("with nvls = true, where a copy is a multicast"))
                .or_else(|| {
                    let one = gpus == 2 && is("own_rows", "direct");
                    one.then_some("between two GPUs with own_rows = direct, where a copy has one target")
                }),
            "unit_tiles" => (spec.cluster.ranks() == 1).then_some("on one rank, which has all rows"),
            "recycle" => {
                let [compute, copy] = ["compute_claim", "copy_claim"].map(|claim| !is(claim, "strided"));
                let joins = (gpus > 1 && compute) || (sends && (compute || (gpus > 1 && copy)));
                (!joins).then_some("where no role can be joined")
            }
            _ => None,
        }
    }

    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice> {
        let Problem::Gemm { m, n, k } = spec.problem else { return Vec::new() };
        let number = spec.cluster.number(rank) as u64;
        let rows = m / spec.cluster.ranks() as u64;
        vec![
            Slice {
                tensor: "a",
                row: number * rows,
                col: 0,
                rows,
                cols: k,
                region: Region::matrix(A, 0, rows as u32, (k * 2) as u32, k * 2),
            },
            Slice {
                tensor: "b",
                row: 0,
                col: number * n,
                rows: k,
                cols: n,
                region: Region::matrix(B, 0, k as u32, (n * 2) as u32, n * 2),
            },
        ]
    }

    fn product(&self, spec: &Spec, rank: Rank) -> Option<Product> {
        let Problem::Gemm { m, n, k } = spec.problem else { return None };
        let first_col = spec.cluster.number(rank) as u64 * n;
        Some(Product { first_row: 0, first_col, depth: k, rows: m, cols: n, roundings: 1 })
    }

    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        // Accumulated in f32, rounded once.
        self.product(spec, rank).map(|product| product.expected(OUT, 1, element)).into_iter().collect()
    }
}

/// Steps of 64 columns per chunk: chunks of 64 KiB with 128 rows, wider where a row would have over 256 of them.
fn chunk_k_steps(problem: &Problem) -> u64 {
    let Problem::Gemm { k, .. } = *problem else { return 4 };
    let fits = |steps: u64| k.is_multiple_of(64 * steps);
    let mut steps = if fits(4) { 4 } else { 2 };
    while k / (64 * steps) > 256 && fits(2 * steps) {
        steps *= 2;
    }
    steps
}

/// What the tasks of a role are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Compute,
    Copy,
    /// Puts of own rows, alone in a prologue.
    FirstHop,
    /// Puts of an inter_send role: own rows where no prologue posts them, and forwards.
    Send,
}

/// Sizes derived from a spec. `dn` and `dg` are a shard's nodes and GPUs ahead of the rank that reads it.
struct Plan {
    m: u64,
    n: u64,
    k: u64,
    nodes: u64,
    gpus: u64,
    rule: TileRule,
    super_m: u64,
    /// Lists start from the own GPU; else they are the same on all GPUs of a node.
    relative: bool,
    remote_by_arrival: bool,
    compute_claim: Claim,
    direct_rows: bool,
    unit_tiles: u64,
    /// Rows of a unit.
    unit_rows: u64,
    /// Units of a shard.
    units: u64,
    /// Columns of a chunk.
    chunk_cols: u64,
    /// Chunks of a unit.
    chunks: u64,
    local_by_chunk: bool,
    remote_by_chunk: bool,
    nvls: bool,
    /// One copy task per chunk instead of one per neighbour.
    copy_to_all: bool,
    copy_claim: Claim,
    copy_lanes: u32,
    copy_in_flight_bytes: u32,
    copy_overlap: bool,
    phase_gate: bool,
    ring: bool,
    first_hop: &'static str,
    /// Copies are followed by the forwards, in the same role.
    forward_by_copies: bool,
    puts: u64,
    send_any: bool,
    recycle: bool,
    posting: Posting,
}

impl Plan {
    fn new(spec: &Spec) -> Result<Self, BuildError> {
        let (m, n, k) = spec.gemm(NAME)?;
        let options = &spec.options;
        let (nodes, gpus) = (u64::from(spec.cluster.nodes), u64::from(spec.cluster.gpus_per_node));
        let rule = TileRule::new(options);
        let [bm, bn, bk] = rule.tile;
        let (unit_tiles, chunk_k_steps) = (options.int("unit_tiles"), options.int("chunk_k_steps"));
        let puts = options.int("puts_per_unit");
        divides(NAME, "m", m, nodes * gpus * unit_tiles * bm, || {
            format!("{} ranks hold one shard each in units of {unit_tiles} row blocks of tile_m = {bm}", nodes * gpus)
        })?;
        divides(NAME, "n", n, bn, || format!("tiles of tile_n = {bn} columns"))?;
        divides(NAME, "k", k, bk * chunk_k_steps, || {
            format!("chunks of {chunk_k_steps} main loop steps of tile_k = {bk}")
        })?;
        divides(NAME, "rows of a unit", unit_tiles * bm, puts, || format!("puts_per_unit = {puts}"))?;
        let unit_rows = unit_tiles * bm;
        let chunk_cols = chunk_k_steps * bk;
        let (units, chunks) = (m / nodes / gpus / unit_rows, k / chunk_cols);
        fits_u32(NAME, "ready flags (units times chunks)", m / unit_rows * chunks)?;
        let nvls = options.flag("nvls") && gpus > 1;
        let ring = options.word("exchange") == "ring";
        let plan = Self {
            m,
            n,
            k,
            nodes,
            gpus,
            rule,
            super_m: options.int("super_m"),
            relative: options.word("row_order") == "relative",
            remote_by_arrival: options.word("remote_order") == "arrival",
            compute_claim: claim(options, "compute_claim"),
            direct_rows: gpus == 1 || options.word("own_rows") == "direct",
            unit_tiles,
            unit_rows,
            units,
            chunk_cols,
            chunks,
            local_by_chunk: options.word("local_ready") == "k_chunk",
            remote_by_chunk: options.word("remote_ready") == "k_chunk",
            nvls,
            copy_to_all: nvls || options.word("copy_targets") == "all",
            copy_claim: claim(options, "copy_claim"),
            copy_lanes: options.int("copy_lanes") as u32,
            copy_in_flight_bytes: options.int("copy_in_flight_bytes") as u32,
            copy_overlap: options.flag("copy_overlap"),
            phase_gate: options.flag("phase_gate"),
            ring,
            first_hop: options.word("first_hop"),
            forward_by_copies: ring && gpus > 1 && nodes > 2 && options.word("forward") == "after_publish",
            puts,
            send_any: options.word("send_order") == "any",
            recycle: options.flag("recycle"),
            posting: Posting::new(spec),
        };
        plan.check_combination()?;
        Ok(plan)
    }

    fn check_combination(&self) -> Result<(), BuildError> {
        let unsupported = |what: &str| Err(BuildError::Unsupported { kernel: NAME, what: what.into() });
        if self.forward_by_copies && self.targets() > 1 {
            return unsupported(
                "forward = after_publish needs one copy task per chunk: set copy_targets = all, nvls = true, or forward = on_arrival",
            );
        }
        let ready = matches!(self.copy_claim, Claim::Ready { .. });
        if ready && self.forward_by_copies && self.remote_by_chunk && self.chunks > 32 {
            return unsupported(
                "copy_claim = ready takes tasks that wait for at most 32 flags, and a forward after_publish waits for every chunk of a row: set copy_claim = ticket, or remote_ready = row_unit",
            );
        }
        Ok(())
    }

    fn buffers(&self) -> Vec<Buffer> {
        let buffer = |name: &str, bytes, usage| Buffer { name: name.into(), bytes, dtype: DType::Bf16, usage };
        let shard = self.m / self.nodes / self.gpus * self.k * 2;
        vec![
            buffer("a", shard, BufferUse::Input),
            buffer("b", self.k * self.n * 2, BufferUse::Input),
            buffer("out", self.m * self.n * 2, BufferUse::Output),
            buffer("gathered", if self.gpus > 1 { self.m * self.k * 2 } else { 0 }, BufferUse::Scratch),
            buffer("landing", (self.nodes - 1) * shard, BufferUse::Scratch),
        ]
    }

    fn flags(&self) -> Vec<FlagFamily> {
        let family = |name: &str, slots: u64| FlagFamily { name: name.into(), slots: slots as u32 };
        let ready = |by_chunk| if self.gpus == 1 { 0 } else { self.gpus * self.units * self.ready_flags(by_chunk) };
        vec![
            family("local", ready(self.local_by_chunk)),
            family("remote", (self.nodes - 1) * ready(self.remote_by_chunk)),
            family("arrived", (self.nodes - 1) * self.units * self.puts),
            family("phase", u64::from(self.phase_gate && self.nodes > 1 && self.gpus > 1)),
        ]
    }

    /// The launches and the work of their roles.
    fn roles(&self) -> Vec<(&'static str, Vec<Work>)> {
        let mut launches = Vec::new();
        let by_send_role = self.first_hop == "send_role";
        if self.nodes > 1 && !by_send_role {
            launches.push(("prologue", vec![Work::FirstHop]));
        }
        let mut main = vec![Work::Compute];
        if self.gpus > 1 {
            main.push(Work::Copy);
        }
        let forwards = self.ring && self.nodes > 2 && !self.forward_by_copies;
        if self.nodes > 1 && (by_send_role || forwards) {
            main.push(Work::Send);
        }
        launches.push(("main", main));
        launches
    }

    fn launches(&self) -> Vec<Launch> {
        let launches = self.roles();
        let recycles = |claim| self.recycle && claim != Claim::Strided;
        let into_compute = recycles(self.compute_claim).then_some(0);
        let into_copy = if self.gpus > 1 && recycles(self.copy_claim) { Some(1) } else { into_compute };
        let role = |work: &Work| match work {
            Work::Compute => Role::new(RoleKind::Compute, self.compute_claim),
            Work::Copy => Role {
                lanes: self.copy_lanes,
                recycle: into_compute,
                ..Role::new(RoleKind::IntraComm, self.copy_claim)
            },
            Work::FirstHop => {
                Role { ctas: CtaCount::Fixed(PROLOGUE_BLOCKS), ..Role::new(RoleKind::InterSend, Claim::Strided) }
            }
            Work::Send => {
                let claim = if self.send_any { Claim::Ready { window: 32 } } else { Claim::Ticket };
                Role { recycle: into_copy, ..Role::new(RoleKind::InterSend, claim) }
            }
        };
        let launch = |(index, (name, roles)): (usize, &(&str, Vec<Work>))| Launch {
            name: (*name).into(),
            after: if self.first_hop == "side_prologue" { Vec::new() } else { (0..index).collect() },
            roles: roles.iter().map(role).collect(),
        };
        launches.iter().enumerate().map(launch).collect()
    }

    /// Flags of a row unit.
    const fn ready_flags(&self, by_chunk: bool) -> u64 {
        if by_chunk { self.chunks } else { 1 }
    }

    /// First ready flag of a unit on a rank that sees its copier `dg` GPUs ahead (`copier` is the copier's index).
    const fn ready_slot(&self, dn: u64, dg: u64, copier: u64, unit: u64) -> (FamilyId, u64) {
        let gpu = if self.relative { dg } else { copier };
        if dn == 0 {
            (LOCAL, (gpu * self.units + unit) * self.ready_flags(self.local_by_chunk))
        } else {
            (REMOTE, (((dn - 1) * self.gpus + gpu) * self.units + unit) * self.ready_flags(self.remote_by_chunk))
        }
    }

    /// Landing bank of the shard from `dn` nodes ahead: by hop in a ring (the first hop brings the node behind).
    const fn bank(&self, dn: u64) -> u64 {
        if self.ring { self.nodes - 1 - dn } else { dn - 1 }
    }

    /// The nodes ahead whose shards arrive, first one first.
    fn arrivals(&self) -> impl Iterator<Item = u64> + use<> {
        let (nodes, ring) = (self.nodes, self.ring);
        (1..nodes).map(move |i| if ring { nodes - i } else { i })
    }

    /// `rows` rows and `cols` columns of a k-wide buffer.
    const fn block(&self, buffer: BufferId, row: u64, rows: u64, col: u64, cols: u64) -> Region {
        Region::matrix(buffer, (row * self.k + col) * 2, rows as u32, (cols * 2) as u32, self.k * 2)
    }

    /// First row of a shard in the gathered matrix.
    const fn shard_row(&self, rank: Rank, dn: u64, gpu: u64) -> u64 {
        let node = (rank.node as u64 + dn) % self.nodes;
        (node * self.gpus + gpu) * self.units * self.unit_rows
    }

    /// Where the slice of the shard `dn` nodes ahead that belongs to the own GPU index lies before it is copied.
    const fn source(&self, dn: u64, row: u64, rows: u64, col: u64, cols: u64) -> Region {
        if dn == 0 {
            self.block(A, row, rows, col, cols)
        } else {
            self.block(LANDING, self.bank(dn) * self.units * self.unit_rows + row, rows, col, cols)
        }
    }

    /// Row block `j` of the shard of the node `dn` ahead, in the order of computation: (GPUs ahead, unit, tile in it).
    const fn row_block(&self, rank: Rank, dn: u64, j: u64) -> (u64, u64, u64) {
        let per_gpu = self.units * self.unit_tiles;
        if !self.relative {
            let dg = (j / per_gpu + self.gpus - rank.gpu as u64) % self.gpus;
            (dg, j % per_gpu / self.unit_tiles, j % self.unit_tiles)
        } else if dn == 0 {
            (j / per_gpu, j % per_gpu / self.unit_tiles, j % self.unit_tiles)
        } else {
            // The same unit lands on all GPUs at the same time.
            (j / self.unit_tiles % self.gpus, j / (self.unit_tiles * self.gpus), j % self.unit_tiles)
        }
    }

    fn compute_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        let blocks = self.gpus * self.units * self.unit_tiles;
        let columns = self.n / self.rule.tile[1];
        let mut shard = |dn| {
            for first in (0..blocks).step_by(self.super_m as usize) {
                for column in 0..columns {
                    for j in first..(first + self.super_m).min(blocks) {
                        sink(self.tile(rank, dn, j, column));
                    }
                }
            }
        };
        shard(0);
        if self.remote_by_arrival {
            self.arrivals().for_each(&mut shard);
        } else {
            (1..self.nodes).for_each(&mut shard);
        }
    }

    fn tile(&self, rank: Rank, dn: u64, j: u64, column: u64) -> Task {
        let [bm, bn, _] = self.rule.tile;
        let (dg, unit, t) = self.row_block(rank, dn, j);
        let gpu = (u64::from(rank.gpu) + dg) % self.gpus;
        let in_shard = unit * self.unit_rows + t * bm;
        let row = self.shard_row(rank, dn, gpu) + in_shard;
        let in_place = dg == 0 && self.direct_rows;
        let a =
            if in_place { self.source(dn, in_shard, bm, 0, self.k) } else { self.block(GATHERED, row, bm, 0, self.k) };
        let b = Region::matrix(B, column * bn * 2, self.k as u32, (bn * 2) as u32, self.n * 2);
        let out = Region::matrix(OUT, (row * self.n + column * bn) * 2, bm as u32, (bn * 2) as u32, self.n * 2);
        let outs = smallvec![TileOut { place: Place::me(out), mode: WriteMode::Store }];
        let mut task = Task::new(self.rule.op(a, b, outs));
        if !in_place {
            let (family, slot) = self.ready_slot(dn, dg, gpu, unit);
            let by_chunk = if dn == 0 { self.local_by_chunk } else { self.remote_by_chunk };
            task.waits.push(if by_chunk {
                Wait::run(family, slot as u32, self.chunks as u32, 1, 1, Gate::KStep)
            } else {
                Wait::on(family, slot as u32, self.chunks as u32)
            });
        } else if dn != 0 {
            task.waits.push(self.arrived_wait(dn, unit));
        }
        task
    }

    fn arrived_wait(&self, dn: u64, unit: u64) -> Wait {
        let slot = (self.bank(dn) * self.units + unit) * self.puts;
        Wait::run(ARRIVED, slot as u32, self.puts as u32, 1, 1, Gate::Start)
    }

    fn copy_tasks(&self, rank: Rank, sink: &mut dyn FnMut(Task)) {
        self.copy_shard(rank, 0, sink);
        for (hop, dn) in self.arrivals().enumerate() {
            self.copy_shard(rank, dn, sink);
            if self.forward_by_copies && hop as u64 + 2 < self.nodes {
                for unit in 0..self.units {
                    let (family, slot) = self.ready_slot(dn, 0, u64::from(rank.gpu), unit);
                    let wait = if self.remote_by_chunk {
                        Wait::run(family, slot as u32, self.chunks as u32, 1, 1, Gate::Start)
                    } else {
                        Wait::on(family, slot as u32, self.chunks as u32)
                    };
                    self.puts_of_unit(dn, 1, unit, Some(wait), sink);
                }
            }
        }
    }

    /// Copies the own GPU's slice of a node's rows to the local GPUs.
    fn copy_shard(&self, rank: Rank, dn: u64, sink: &mut dyn FnMut(Task)) {
        let first = u64::from(self.direct_rows);
        match (self.copy_to_all, dn) {
            (true, _) => {
                for unit in 0..self.units {
                    self.copy_unit(rank, dn, unit, None, sink);
                }
            }
            // The GPU that sees me d ahead needs my rows d-th: all units of a shard in the own node ...
            (false, 0) => {
                for d in first..self.gpus {
                    for unit in 0..self.units {
                        self.copy_unit(rank, dn, unit, Some((self.gpus - d) % self.gpus), sink);
                    }
                }
            }
            // ... and unit by unit of what lands.
            (false, _) => {
                for unit in 0..self.units {
                    for d in first..self.gpus {
                        self.copy_unit(rank, dn, unit, Some((self.gpus - d) % self.gpus), sink);
                    }
                }
            }
        }
    }

    /// Copies a unit chunk by chunk to the GPU at an offset, or to all.
    fn copy_unit(&self, rank: Rank, dn: u64, unit: u64, to: Option<u64>, sink: &mut dyn FnMut(Task)) {
        let gpu = u64::from(rank.gpu);
        let (by_chunk, gate) = if dn == 0 { (self.local_by_chunk, None) } else { (self.remote_by_chunk, self.gate()) };
        let row = unit * self.unit_rows;
        let gathered_row = self.shard_row(rank, dn, gpu) + row;
        let first = u64::from(self.direct_rows && to.is_none());
        let targets = || if let Some(to) = to { to..to + 1 } else { first..self.gpus };
        for chunk in 0..self.chunks {
            let col = chunk * self.chunk_cols;
            let dst = self.block(GATHERED, gathered_row, self.unit_rows, col, self.chunk_cols);
            let dsts = if self.nvls {
                smallvec![Place { at: At::AllLocal, region: dst }]
            } else {
                targets().map(|d| Place { at: At::local(d as u16), region: dst }).collect()
            };
            let mut task = Task::new(Op::Copy {
                src: Place::me(self.source(dn, row, self.unit_rows, col, self.chunk_cols)),
                dsts,
                engine: Engine::Bulk,
                in_flight_bytes: self.copy_in_flight_bytes,
                load_store_overlap: self.copy_overlap,
            });
            if dn != 0 {
                task.waits.push(self.arrived_wait(dn, unit));
            }
            task.waits.extend(gate);
            let mut signal = |at, dg| {
                let (family, slot) = self.ready_slot(dn, dg, gpu, unit);
                let slot = slot + if by_chunk { chunk } else { 0 };
                task.signals.push(Signal::one(at, family, slot as u32));
            };
            if self.nvls && !self.relative {
                signal(At::AllLocal, 0);
            } else {
                // The word that I raise at offset d is my slot -d there. The forwards of all hops but the last one, which
                // comes from the node ahead, wait for the own one.
                let targets = if self.forward_by_copies && dn > 1 { 0..self.gpus } else { targets() };
                targets.for_each(|d| signal(At::local(d as u16), (self.gpus - d) % self.gpus));
            }
            if dn == 0 && self.gate().is_some() {
                task.signals.push(Signal::one(At::ME, PHASE, 0));
            }
            sink(task);
        }
    }

    /// Copy tasks of a chunk.
    const fn targets(&self) -> u64 {
        if self.copy_to_all { 1 } else { self.gpus - self.direct_rows as u64 }
    }

    /// The wait of every copy of a landed block under `phase_gate`.
    fn gate(&self) -> Option<Wait> {
        let copies = self.units * self.chunks * self.targets();
        (self.phase_gate && self.nodes > 1).then(|| Wait::on(PHASE, 0, copies as u32))
    }

    fn first_hop_tasks(&self, sink: &mut dyn FnMut(Task)) {
        // The node that reads my rows d-th sees me d ahead: with direct puts it comes d-th here too.
        let targets = if self.ring { 1..2 } else { 1..self.nodes };
        for d in targets {
            let to = if self.ring { 1 } else { self.nodes - d };
            for unit in 0..self.units {
                self.puts_of_unit(0, to, unit, None, sink);
            }
        }
    }

    fn send_tasks(&self, sink: &mut dyn FnMut(Task)) {
        if self.first_hop == "send_role" {
            self.first_hop_tasks(sink);
        }
        if self.ring && !self.forward_by_copies {
            for dn in self.arrivals().take(self.nodes as usize - 2) {
                for unit in 0..self.units {
                    self.puts_of_unit(dn, 1, unit, Some(self.arrived_wait(dn, unit)), sink);
                }
            }
        }
    }

    /// Puts a unit of the shard `dn` nodes ahead to the node `to` ahead.
    fn puts_of_unit(&self, dn: u64, to: u64, unit: u64, wait: Option<Wait>, sink: &mut dyn FnMut(Task)) {
        let rows = self.unit_rows / self.puts;
        // Seen from there the shard is `to` nodes less far ahead.
        let bank = self.bank((dn + self.nodes - to) % self.nodes);
        for part in 0..self.puts {
            let row = unit * self.unit_rows + part * rows;
            let landing_row = bank * self.units * self.unit_rows + row;
            let index = unit * self.puts + part;
            let mut task = Task::new(Op::Put {
                src: self.source(dn, row, rows, 0, self.k),
                dst: Place {
                    at: At::Offset(Offset::node(to as u16)),
                    region: self.block(LANDING, landing_row, rows, 0, self.k),
                },
                queue: self.posting.queue(index),
                publish: self.posting.publish(index),
                arrived: Flag { family: ARRIVED, slot: (bank * self.units * self.puts + index) as u32 },
                sent: None,
            });
            task.waits.extend(wait);
            sink(task);
        }
    }
}

fn claim(options: &Options, name: &str) -> Claim {
    match options.word(name) {
        "strided" => Claim::Strided,
        "ticket" => Claim::Ticket,
        _ => Claim::Ready { window: 32 },
    }
}

impl TaskSource for Plan {
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        match self.roles()[launch].1[role] {
            Work::Compute => self.compute_tasks(rank, sink),
            Work::Copy => self.copy_tasks(rank, sink),
            Work::FirstHop => self.first_hop_tasks(sink),
            Work::Send => self.send_tasks(sink),
        }
    }
}

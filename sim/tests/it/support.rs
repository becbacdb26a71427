//! A machine of round numbers, schedules written by hand, and every kernel in a small shape.

use std::fmt::Write;
use tilewire_kernels::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, CtaCount, DType, Drain, Engine, FamilyId, Flag, FlagFamily, Launch,
    MainLoop, Op, Place, Publish, Region, Role, Signal, Symmetry, TaskSource, TileOut, Wait, WriteMode,
};
use tilewire_kernels::{
    BuildError, Cluster, Fabric, KERNELS, Offset, OptionSet, Problem, ProblemKind, Rank, RoleKind, RoleSplit, Schedule,
    Spec, Task, baseline,
};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine::{self, Run};
use tilewire_sim::{Config, Execution, Loop, Machine, Protocol, SimError};

pub const NS: u64 = 1_000;
pub const US: u64 = 1_000_000;

/// Launches timed one by one.
pub const ISOLATED: Protocol =
    Protocol::Published { stale_arrivals: false, isolated: true, waits_for_host: false, timed: TIMED };
/// Launches back to back, whose arrivals are met from the second one on.
pub const LOOPED: Protocol =
    Protocol::Published { stale_arrivals: true, isolated: false, waits_for_host: true, timed: TIMED };
const TIMED: Loop = Loop { warm_up: 0, launches: 8, median: true };

/// Shared resources are wide enough to hold nobody back; a test narrows those that it is about.
const WIDE: f64 = 1e6;

const ROUND: &[(&str, &[(&str, f64)])] = &[
    (
        "gpu",
        &[
            ("sms", 132.0),
            ("smem_kib", 227.0),
            ("hbm_gbs", WIDE),
            ("hbm_write_bytes_per_byte", 1.0),
            ("l2_window_mib", 32.0),
            ("l2_drift_hits", 0.0),
            ("droop_knee_tflops", WIDE),
            ("droop_static_tflops", 1e-6),
            ("hbm_power_flop_per_byte", 0.0),
            ("cold_knee_tflops", WIDE),
            ("cold_static_tflops", 1e-6),
            ("cold_ms", 45.0),
        ],
    ),
    ("attention.wait_each_step", &[("sm_tflops", 1.0), ("block_ns", 1000.0)]),
    ("attention.pipelined", &[("sm_tflops", 1.0), ("block_ns", 1000.0)]),
    ("attention.library", &[("sm_tflops", 1.0), ("block_ns", 1000.0)]),
    (
        "sm",
        &[
            ("copy_cta_gbs", 50.0),
            ("ldst_cta_gbs", 40.0),
            ("local_latency_ns", 1000.0),
            ("nvlink_latency_ns", 2000.0),
            ("add_cta_gbs", 40.0),
            ("reduce_cta_gbs", 100.0),
            ("reduce_latency_ns", 500.0),
            ("merge_cta_gbs", 100.0),
            ("gather_cta_gbs", 50.0),
            ("box_ns", 30.0),
            ("box_power_flop", 0.0),
            ("nvls_load_latency_ns", 2000.0),
            ("nvls_load_cta_gbs", 20.0),
            ("nvls_store_cta_gbs", 20.0),
            ("fill_cta_gbs", 100.0),
        ],
    ),
    (
        "nvlink",
        &[
            ("egress_gbs", WIDE),
            ("ingress_gbs", WIDE),
            ("many_peers_share", 1.0),
            ("add_link_bytes_per_byte", 1.0),
            ("nvls_load_link_bytes_per_byte", 1.0),
            ("fence_ns", 0.0),
            ("notice_ns", 0.0),
            ("domain_gpus", 72.0),
        ],
    ),
    (
        "flags",
        &[("local_ns", 500.0), ("nvlink_ns", 1000.0), ("host_ns", 1500.0), ("republish_ns", 500.0), ("nic_ns", 600.0)],
    ),
    (
        "proxy",
        &[
            ("push_ns", 1000.0),
            ("fifo_latency_ns", 1500.0),
            ("fifo_depth", 4.0),
            ("threads", 1.0),
            ("post_ns", 800.0),
            ("completion_ns", 400.0),
            ("in_flight", 2.0),
        ],
    ),
    ("nic", &[("rails", 1.0), ("rail_gbs", 25.0), ("message_ns", 100.0), ("pcie_gbs", WIDE)]),
    ("network", &[("latency_us", 10.0), ("ack_us", 5.0), ("nodes_per_leaf", 32.0), ("oversubscription", 1.0)]),
    (
        "launch",
        &[
            ("command_us", 3.0),
            ("dependent_us", 1.0),
            ("block_ns", 500.0),
            ("isolated_us", 200.0),
            ("iteration_us", 0.0),
        ],
    ),
    ("noise", &[("network_sigma", 0.1), ("flag_sigma", 0.1), ("clock_sigma", 0.1), ("late_rank_us", 100.0)]),
];

const GEMM: &[(&str, f64)] =
    &[("sm_tflops", 1.0), ("fill_ns", 100.0), ("epilogue_ns", 200.0), ("smem_read_ns", 10.0), ("visible_ns", 20.0)];

const COLLECTIVE: &[(&str, f64)] = &[
    ("latency_us", 10.0),
    ("fill_us", 0.0),
    ("fill_wire_mib", 1.0),
    ("bus_gbs", 100.0),
    ("bus_gpus", 1.0),
    ("sms", 8.0),
];

/// The machine of round numbers.
pub fn round_machine(fabric: Fabric) -> Machine {
    let mut text = format!(
        "name = \"round\"\nabout = \"round numbers\"\nfabric = \"{}\"\npeer_path = \"nvlink\"\n",
        fabric.name()
    );
    let mut section = |name: &str, values: &[(&str, f64)]| {
        writeln!(text, "[{name}]").expect("strings take everything");
        for (key, value) in values {
            let value = format!("{value:?}");
            writeln!(
                text,
                "{key} = {{ value = {value}, kind = \"assumed\", source = \"test\", date = \"2026-11-29\" }}"
            )
            .expect("strings take everything");
        }
    };
    for (name, values) in ROUND {
        section(name, values);
    }
    for name in ["gemm.wait_each_step", "gemm.pipelined", "gemm.library"] {
        section(name, GEMM);
    }
    for name in ["library.all_gather", "library.reduce_scatter", "library.all_reduce", "library.all_to_all"] {
        section(name, COLLECTIVE);
    }
    Machine::parse("round", &text).expect("the test machine is complete")
}

/// Changes parameters of a machine; every name must exist.
pub fn with(mut machine: Machine, changes: &[(&str, f64)]) -> Machine {
    for &(name, value) in changes {
        assert!(machine.set(name, value), "no parameter {name}");
    }
    machine
}

/// A machine file of the repository.
pub fn shipped_machine(name: &str) -> Machine {
    let text = match name {
        "h200-efa" => include_str!("../../../data/machines/h200-efa.toml"),
        "h200-cx7" => include_str!("../../../data/machines/h200-cx7.toml"),
        "h100-nvlink" => include_str!("../../../data/machines/h100-nvlink.toml"),
        "h200-nvlink" => include_str!("../../../data/machines/h200-nvlink.toml"),
        "h200-1gpu" => include_str!("../../../data/machines/h200-1gpu.toml"),
        other => panic!("no machine {other}"),
    };
    Machine::parse(name, text).expect("shipped machines are valid")
}

type Tasks = dyn Fn(Rank, usize, usize) -> Vec<Task> + Send + Sync;

struct Written(Box<Tasks>);

impl TaskSource for Written {
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        (self.0)(rank, launch, role).into_iter().for_each(sink);
    }
}

/// A schedule written by hand. One flag family `f` of `slots`.
pub struct Toy {
    pub cluster: Cluster,
    pub fabric: Fabric,
    pub slots: u32,
    pub launches: Vec<Launch>,
    pub symmetry: Symmetry,
}

impl Toy {
    /// One launch with these roles on one node of `gpus`.
    pub fn node(gpus: u16, roles: Vec<Role>) -> Self {
        Self::on(Cluster { nodes: 1, gpus_per_node: gpus }, roles)
    }

    pub fn on(cluster: Cluster, roles: Vec<Role>) -> Self {
        Self {
            cluster,
            fabric: Fabric::IbRc,
            slots: 1 << 14,
            launches: vec![Launch { name: "main".into(), after: Vec::new(), roles }],
            symmetry: Symmetry::NONE,
        }
    }

    pub fn fabric(self, fabric: Fabric) -> Self {
        Self { fabric, ..self }
    }

    pub fn symmetric(self) -> Self {
        Self { symmetry: Symmetry::FULL, ..self }
    }

    pub fn launches(self, launches: Vec<Launch>) -> Self {
        Self { launches, ..self }
    }

    /// `tasks(rank, launch, role)`.
    pub fn tasks(self, tasks: impl Fn(Rank, usize, usize) -> Vec<Task> + Send + Sync + 'static) -> Schedule {
        Schedule {
            kernel: "toy".into(),
            cluster: self.cluster,
            fabric: self.fabric,
            spec: String::new(),
            buffers: vec![Buffer { name: "x".into(), bytes: 1 << 50, dtype: DType::Bf16, usage: BufferUse::Scratch }],
            flags: vec![FlagFamily { name: "f".into(), slots: self.slots }],
            launches: self.launches,
            symmetry: self.symmetry,
            useful_flops: 0,
            source: Box::new(Written(Box::new(tasks))),
        }
    }
}

pub fn role(kind: RoleKind, claim: Claim) -> Role {
    Role::new(kind, claim)
}

pub fn compute() -> Role {
    role(RoleKind::Compute, Claim::Strided)
}

pub fn launch(name: &str, after: Vec<usize>, roles: Vec<Role>) -> Launch {
    Launch { name: name.into(), after, roles }
}

pub fn split(compute: u32, intra_comm: u32, inter_send: u32, inter_reduce: u32) -> RoleSplit {
    RoleSplit { compute, intra_comm, inter_send, inter_reduce }
}

pub const FAMILY: FamilyId = FamilyId(0);

pub fn bytes(bytes: u64) -> Region {
    // Rows of a kilobyte where they fit, so that large regions stay within 32 bits.
    if bytes.is_multiple_of(1000) {
        Region::contiguous(BufferId(0), 0, (bytes / 1000) as u32, 1000)
    } else {
        Region::contiguous(BufferId(0), 0, 1, bytes as u32)
    }
}

pub fn copy(from: At, to: At, size: u64) -> Task {
    copy_in_flight(from, to, size, u32::MAX)
}

pub fn copy_in_flight(from: At, to: At, size: u64, in_flight_bytes: u32) -> Task {
    let mut task = copy_region(from, to, bytes(size));
    if let Op::Copy { in_flight_bytes: in_flight, .. } = &mut task.op {
        *in_flight = in_flight_bytes;
    }
    task
}

pub fn copy_region(from: At, to: At, region: Region) -> Task {
    Task::new(Op::Copy {
        src: Place { at: from, region },
        dsts: smallvec::smallvec![Place { at: to, region }],
        engine: Engine::Bulk,
        in_flight_bytes: u32::MAX,
        load_store_overlap: true,
    })
}

/// Sums `size` bytes of each input into each output, `in_flight_bytes` of all inputs at a time.
pub fn reduce(inputs: &[At], outputs: &[At], size: u64, in_flight_bytes: u32) -> Task {
    let place = |&at: &At| Place { at, region: bytes(size) };
    let (inputs, outputs) = (inputs.iter().map(place).collect(), outputs.iter().map(place).collect());
    Task::new(Op::Reduce { inputs, outputs, in_flight_bytes })
}

pub fn sync() -> Task {
    Task::new(Op::Sync)
}

/// A tile of `k` columns of operands, written to the own memory.
pub fn gemm_tile(tile: [u16; 3], k: u32) -> Task {
    let [bm, bn, _] = tile.map(u32::from);
    let matrix = |rows, columns| Region::contiguous(BufferId(0), 0, rows, columns * 2);
    let place = Place::me(matrix(bm, bn));
    Task::new(Op::GemmTile {
        a: matrix(bm, k),
        b: matrix(k, bn),
        outs: smallvec::smallvec![TileOut { place, mode: WriteMode::Store }],
        tile,
        stages: 4,
        drain: Drain::Overlap,
        main_loop: MainLoop::Pipelined,
        notice: 0,
    })
}

/// 100 x 100 x (50 `steps`): a microsecond per step on the round machine, 20,000 bytes out.
pub fn tile(steps: u32, to: At, drain: Drain) -> Task {
    let mut task = gemm_tile([100, 100, 50], 50 * steps);
    if let Op::GemmTile { outs, drain: rule, .. } = &mut task.op {
        outs[0].place.at = to;
        *rule = drain;
    }
    task
}

pub fn put(size: u64, dn: u16, queue: u16, publish: Publish, arrived: u32, sent: Option<u32>) -> Task {
    let flag = |slot| Flag { family: FAMILY, slot };
    Task::new(Op::Put {
        src: bytes(size),
        dst: Place { at: At::Offset(Offset { dn, dg: 0 }), region: bytes(size) },
        queue,
        publish,
        arrived: flag(arrived),
        sent: sent.map(flag),
    })
}

pub fn publish(fabric: Fabric) -> Publish {
    if fabric == Fabric::IbRc { Publish::SameQueueWrite } else { Publish::Immediate }
}

pub fn wait(slot: u32) -> Wait {
    Wait::on(FAMILY, slot, 1)
}

pub fn signal(to: At, slot: u32) -> Signal {
    Signal::one(to, FAMILY, slot)
}

pub fn full() -> Config {
    Config { execution: Execution::Full, ..Config::default() }
}

pub fn mirror() -> Config {
    Config { execution: Execution::Mirror, ..Config::default() }
}

/// Every rank, whole form, with its timeline.
pub fn simulate(schedule: &Schedule, machine: &Machine, split: RoleSplit) -> Run {
    try_simulate(schedule, machine, split).expect("the schedule runs")
}

pub fn try_simulate(schedule: &Schedule, machine: &Machine, split: RoleSplit) -> Result<Run, SimError> {
    let compiled = Compiled::new(schedule, machine, &full())?;
    engine::run(&compiled, &split, Form::Whole, true)
}

/// A machine that is a latency and a bandwidth: a put takes `latency_us` and its bytes at `gbs`, nothing else.
pub fn alpha_beta_machine(latency_us: f64, gbs: f64) -> Machine {
    let nothing = [
        "flags.nic_ns",
        "proxy.push_ns",
        "proxy.fifo_latency_ns",
        "proxy.post_ns",
        "proxy.completion_ns",
        "nic.message_ns",
        "launch.command_us",
    ];
    let mut machine = with(round_machine(Fabric::IbRc), &nothing.map(|name| (name, 0.0)));
    machine = with(machine, &[("network.latency_us", latency_us), ("nic.rail_gbs", gbs)]);
    with(machine, &[("proxy.fifo_depth", 1e6), ("proxy.in_flight", 1e6)])
}

/// Ring all-reduce of `size` bytes on `ranks` nodes of one GPU: every step passes a part on to the next rank.
pub fn ring_all_reduce(ranks: u16, size: u64) -> Schedule {
    let steps = 2 * (u32::from(ranks) - 1);
    let part = size / u64::from(ranks);
    let send = role(RoleKind::InterSend, Claim::Strided);
    Toy { slots: steps, ..Toy::on(cluster(ranks, 1), vec![send]) }.symmetric().tasks(move |_, _, _| {
        (0..steps)
            .map(|step| {
                let task = put(part, 1, 0, Publish::SameQueueWrite, step, None);
                if step == 0 { task } else { task.wait(wait(step - 1)) }
            })
            .collect()
    })
}

/// `2 (N - 1) (a + S / (N b))`, ps.
pub fn ring_all_reduce_ps(ranks: u16, size: u64, latency_us: f64, gbs: f64) -> f64 {
    let n = f64::from(ranks);
    2.0 * (n - 1.0) * (latency_us * 1e6 + size as f64 / n / gbs * 1e3)
}

/// A kernel in a shape that runs in milliseconds.
pub struct Case {
    pub name: String,
    pub set: OptionSet,
    pub spec: Spec,
    pub schedule: Schedule,
}

impl Case {
    /// `ctas` for each role whose count comes from the split.
    pub fn split(&self, ctas: u32) -> RoleSplit {
        let mut split = RoleSplit::default();
        for role in self.schedule.launches.iter().flat_map(|launch| &launch.roles) {
            if role.ctas == CtaCount::FromSplit {
                split.set(role.kind, ctas);
            }
        }
        split
    }

    /// Many compute CTAs, a few of each other role.
    pub fn usual_split(&self) -> RoleSplit {
        let mut split = self.split(6);
        if split.compute > 0 {
            split.compute = 90;
        }
        split
    }
}

fn problem(kind: ProblemKind, kernel: &str, cluster: Cluster, scale: u64) -> Problem {
    let ranks = cluster.ranks() as u64;
    let m = 512 * ranks * scale;
    match kind {
        ProblemKind::Gemm if kernel == "ag_gemm" => Problem::Gemm { m, n: 512, k: 1024 },
        ProblemKind::Gemm => Problem::Gemm { m, n: 2048, k: 256 },
        ProblemKind::Moe => {
            Problem::Moe { tokens: 512 * ranks * scale, hidden: 1024, inter: 512, topk: 4, experts: 4 * ranks }
        }
        ProblemKind::Attention => Problem::Attention { seq: 384 * ranks * scale, batch: 1, heads: 4, head_dim: 128 },
    }
}

/// All kernels of an option set on a cluster, as far as the set permits it.
pub fn kernels(set: OptionSet, cluster: Cluster, fabric: Fabric, scale: u64) -> Vec<Case> {
    kernels_of(set, cluster, fabric, |kind, name| problem(kind, name, cluster, scale))
}

/// The same with a tile, a chunk, or a block or two for each rank.
pub fn tiny_kernels(set: OptionSet, cluster: Cluster, fabric: Fabric) -> Vec<Case> {
    let ranks = cluster.ranks() as u64;
    kernels_of(set, cluster, fabric, |kind, name| match kind {
        ProblemKind::Gemm if name == "ag_gemm" => Problem::Gemm { m: 256 * ranks, n: 256, k: 256 },
        ProblemKind::Gemm => Problem::Gemm { m: 128 * ranks, n: 512 * u64::from(cluster.nodes), k: 128 },
        ProblemKind::Moe => Problem::Moe { tokens: 128 * ranks, hidden: 512, inter: 256, topk: 1, experts: 2 * ranks },
        ProblemKind::Attention => Problem::Attention { seq: 384 * ranks, batch: 1, heads: 1, head_dim: 128 },
    })
}

fn kernels_of(
    set: OptionSet,
    cluster: Cluster,
    fabric: Fabric,
    problem: impl Fn(ProblemKind, &str) -> Problem,
) -> Vec<Case> {
    KERNELS
        .iter()
        .filter_map(|kernel| {
            let problem = problem(kernel.problem_kind(), kernel.name());
            let mut options = kernel.options(set, &problem, cluster);
            // Kernels that do not list these options have no such sizes.
            let _ = options.set("chunk_tiles", "2");
            let _ = options.set("chunk_rows", "128");
            let spec = Spec { problem, cluster, fabric, options };
            let name = format!("{} {} {cluster} {fabric} {}", kernel.name(), set.name(), spec.problem);
            match kernel.build(&spec) {
                Ok(schedule) => Some(Case { name, set, spec, schedule }),
                Err(BuildError::Unsupported { .. }) => None,
                Err(error) => panic!("{name}: {error}"),
            }
        })
        .collect()
}

/// The unfused forms of all kernels on a cluster, whole and in four pieces.
pub fn baselines(cluster: Cluster, fabric: Fabric) -> Vec<Case> {
    let mut cases = Vec::new();
    for kernel in KERNELS {
        let problem = problem(kernel.problem_kind(), kernel.name(), cluster, 4);
        let form = baseline(kernel.name()).expect("every kernel has an unfused form");
        for chunks in ["1", "4"] {
            let mut options = form.options(OptionSet::Tilewire, &problem, cluster);
            options.set("chunks", chunks).expect("a legal number");
            let spec = Spec { problem, cluster, fabric, options };
            let name = format!("{} {cluster} {fabric} {} in {chunks}", form.name(), spec.problem);
            let schedule = form.build(&spec).unwrap_or_else(|error| panic!("{name}: {error}"));
            cases.push(Case { name, set: OptionSet::Tilewire, spec, schedule });
        }
    }
    cases
}

pub const SETS: [OptionSet; 2] = [OptionSet::Published, OptionSet::Tilewire];

pub const fn cluster(nodes: u16, gpus_per_node: u16) -> Cluster {
    Cluster { nodes, gpus_per_node }
}

/// SplitMix64, for cases drawn by seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
}

//! From a rich schedule and a machine to the compact program that the engine runs.
//!
//! A task is 16 bytes: the index of a cost record, its waits and its signals. Regions never enter the simulator; all
//! ranks that share a skeleton share one program. Three **forms** of every cost record serve the three runs that a
//! prediction needs: whole, compute only, communication only.

use crate::SimError;
use crate::engine::UNWATCHED;
use crate::machine::{Machine, PeerPath, PowerLimit};
use crate::noise::Noise;
use crate::predict::{Clock, Config, Execution, Protocol};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use tilewire_kernels::schedule::{
    At, Claim, CollectiveKind, CtaCount, Drain, Engine, Gate, MainLoop, Op, Publish, Role, Task, WriteMode,
    side_by_side,
};
use tilewire_kernels::{Cluster, Offset, Rank, RoleKind, Schedule};

/// No index.
pub const NONE: u32 = u32::MAX;

/// The three runs behind a prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Everything.
    Whole = 0,
    /// The compute role's tasks alone, outputs local.
    ComputeOnly = 1,
    /// Compute tiles take only the time of their remote writes.
    CommOnly = 2,
}

/// Resource kinds of a rank, in the order of their indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ResourceKind {
    /// HBM, reads and writes.
    Hbm,
    /// Power of the chip, as FLOP/s of matrix work at full clock.
    Chip,
    /// NVLink out.
    Egress,
    /// NVLink in.
    Ingress,
    /// PCIe towards the NICs.
    PcieOut,
    /// PCIe from the NICs.
    PcieIn,
    /// A rail, out.
    NicOut(u8),
    /// A rail, in.
    NicIn(u8),
}

impl ResourceKind {
    /// Position among the resources of a rank.
    pub const fn index(self, rails: u32) -> u32 {
        match self {
            Self::Hbm => 0,
            Self::Chip => 1,
            Self::Egress => 2,
            Self::Ingress => 3,
            Self::PcieOut => 4,
            Self::PcieIn => 5,
            Self::NicOut(rail) => 6 + rail as u32,
            Self::NicIn(rail) => 6 + rails + rail as u32,
        }
    }

    /// Resources of a rank.
    pub const fn count(rails: u32) -> u32 {
        6 + 2 * rails
    }
}

/// Demand of a class at full speed on the resources of the rank at `offset`.
pub type Demand = (Offset, ResourceKind, u64);

/// A flow of a cost record: its class and its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flow {
    /// Class template, [`NONE`] for a flow that needs no shared resource and no time.
    pub class: u32,
    /// Picoseconds at full speed.
    pub work: u64,
}

impl Flow {
    const NOTHING: Self = Self { class: NONE, work: 0 };
}

/// One form of a cost record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Main loop or transfer; its work is `fixed + steps * step`.
    pub main: u32,
    /// Time per step.
    pub step: u64,
    /// Time beside the steps.
    pub fixed: u64,
    /// Extra time at the start unless hidden behind the task before.
    pub fill: u64,
    /// Asynchronous store of the result.
    pub out: Flow,
    /// The same when another tile follows, over whose main loop it leaves; no flow where it does not wait.
    pub deferred: Flow,
    /// What every CTA that computes at its start adds: to a tile, picoseconds; to a move, billionths of its time.
    pub crowd: u64,
}

impl Cost {
    const NOTHING: Self =
        Self { main: NONE, step: 0, fixed: 0, fill: 0, out: Flow::NOTHING, deferred: Flow::NOTHING, crowd: 0 };
}

/// What kind of work a cost record stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A tile with steps and maybe an asynchronous store.
    Tile,
    /// One flow.
    Move,
    /// A push to the proxy.
    Put,
    /// A rendezvous of all ranks.
    Collective,
    /// Nothing.
    Sync,
}

/// Cost record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostRecord {
    /// Kind.
    pub work: Work,
    /// Steps of the main loop.
    pub steps: u32,
    /// When the next task of the CTA may begin.
    pub drain: Drain,
    /// Costs by form.
    pub forms: [Cost; 3],
}

/// A task.
#[derive(Clone, Copy, Debug)]
pub struct TaskC {
    /// First wait.
    pub wait0: u32,
    /// First signal.
    pub signal0: u32,
    /// Cost record.
    pub cost: u16,
    /// Waits at the start, at k steps, at the output; in this order in the list.
    pub waits: [u8; 3],
    /// Signals; for puts without signals, zero.
    pub signals: u8,
    /// Put record, [`NONE`] otherwise.
    pub put: u32,
}

/// A wait on a flag, or on a run of flags.
#[derive(Clone, Copy, Debug)]
pub struct WaitC {
    /// The flag, over all families; with [`SPAN`], an index of [`Program::spans`].
    pub on: u32,
    /// Value that the flag must reach.
    pub level: u32,
}

/// Marks what is waited for as a span instead of a flag.
pub const SPAN: u32 = 1 << 30;

/// A run of flags that tasks wait for together, each flag in its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanC {
    /// First flag, over all families.
    pub flag: u32,
    /// Flags in the run.
    pub count: u32,
    /// From one flag to the next.
    pub stride: u32,
    /// Value that each must reach.
    pub level: u32,
}

impl SpanC {
    /// A flag of the run.
    pub const fn at(&self, index: u32) -> u32 {
        self.flag + index * self.stride
    }

    /// All its flags.
    pub fn flags(self) -> impl Iterator<Item = u32> {
        (0..self.count).map(move |index| self.at(index))
    }
}

/// A signal.
#[derive(Clone, Copy, Debug)]
pub struct SignalC {
    /// Flag.
    pub flag: u32,
    /// Amount.
    pub add: u32,
    /// GPU offset, folded.
    pub dg: u16,
    /// Goes over NVLink.
    pub remote: bool,
    /// Raised at the end of the main loop.
    pub early: bool,
}

/// A put.
#[derive(Clone, Copy, Debug)]
pub struct PutC {
    /// Node offset, folded.
    pub dn: u16,
    /// GPU offset, folded.
    pub dg: u16,
    /// NIC queue.
    pub queue: u16,
    /// How it is published.
    pub publish: PublishC,
    /// Flow on the wire.
    pub flow: Flow,
    /// Flag at the receiver.
    pub arrived: u32,
    /// Flag at the sender, [`NONE`] without one.
    pub sent: u32,
    /// Payload.
    pub bytes: u64,
}

/// Publish mode without its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishC {
    /// The NIC writes the flag.
    Nic,
    /// The receiver's proxy raises the flag.
    Proxy,
}

/// A role of a launch.
#[derive(Clone, Debug)]
pub struct RoleC {
    /// Kind.
    pub kind: RoleKind,
    /// CTA count.
    pub ctas: CtaCount,
    /// Workers per CTA.
    pub lanes: u32,
    /// Claim rule.
    pub claim: Claim,
    /// Role (over all launches) that it recycles into, [`NONE`] without one.
    pub recycle: u32,
    /// Launch.
    pub launch: u32,
    /// First task.
    pub first: u32,
    /// Number of tasks.
    pub tasks: u32,
    /// Sum over tasks of the time that they hold their CTA at full speed, whole form.
    pub work_ps: u128,
    /// Before each task: the start of a block, for one-task-per-block grids; the search for a ready task, by the
    /// interpreter.
    pub block_ps: u64,
    /// Its tasks are collectives: all CTAs work on each of them.
    pub collective: bool,
}

/// A launch.
#[derive(Clone, Debug)]
pub struct LaunchC {
    /// Name.
    pub name: String,
    /// Launches before it.
    pub after: Vec<u32>,
    /// Roles, over all launches.
    pub roles: std::ops::Range<usize>,
}

/// What ranks with one skeleton execute.
#[derive(Debug, Default)]
pub struct Program {
    /// Tasks of all roles.
    pub tasks: Vec<TaskC>,
    /// Waits.
    pub waits: Vec<WaitC>,
    /// Runs of two flags or more that tasks wait for, each once.
    pub spans: Vec<SpanC>,
    /// Signals.
    pub signals: Vec<SignalC>,
    /// Puts.
    pub puts: Vec<PutC>,
    /// Roles of all launches.
    pub roles: Vec<RoleC>,
    /// Flags whose waits all name one level that is also the sum of their adds: that level; 0 otherwise.
    pub countdown: Vec<u32>,
    /// Bytes (FLOP for the chip) per resource of a rank, over the run.
    pub totals: Vec<(ResourceKind, u64)>,
    /// Longest single task at full speed.
    pub longest_ps: u64,
    /// Bytes that the rank sends to other nodes, by puts and in collectives.
    pub put_bytes: u64,
}

impl Program {
    /// The run of flags that a wait is for; a single flag is a run of one.
    pub fn awaited(&self, wait: &WaitC) -> SpanC {
        if wait.on & SPAN == 0 {
            SpanC { flag: wait.on, count: 1, stride: 0, level: wait.level }
        } else {
            self.spans[(wait.on & !SPAN) as usize]
        }
    }

    /// All signals of a task.
    pub fn signals_of(&self, task: &TaskC) -> &[SignalC] {
        &self.signals[task.signal0 as usize..task.signal0 as usize + usize::from(task.signals)]
    }

    /// All waits of a task.
    pub fn waits_of(&self, task: &TaskC) -> &[WaitC] {
        let count: usize = task.waits.iter().map(|&n| usize::from(n)).sum();
        &self.waits[task.wait0 as usize..task.wait0 as usize + count]
    }
}

/// A compiled simulation.
pub struct Compiled {
    /// Ranks that are simulated.
    pub ranks: Vec<Rank>,
    /// Program of each simulated rank.
    pub program_of: Vec<u32>,
    /// Programs.
    pub programs: Vec<Program>,
    /// Launches, the same for all ranks.
    pub launches: Vec<LaunchC>,
    /// Pairs of launches that may run side by side, the earlier one first.
    pub side_by_side: Vec<(usize, usize)>,
    /// Cost records.
    pub costs: Vec<CostRecord>,
    /// Class templates.
    pub classes: Vec<Vec<Demand>>,
    /// Simulated cluster: nodes and GPUs per node after folding.
    pub folded: Cluster,
    /// Names of the flag families.
    pub families: Vec<String>,
    /// First flag of each family; one more at the end.
    pub family_base: Vec<u32>,
    /// Families raised by tasks of other roles than compute (dropped in compute-only runs).
    pub dropped: Vec<bool>,
    /// Roles that raise each family, and whether puts do.
    pub raisers: Vec<(Option<RoleKind>, bool)>,
    /// Timing constants.
    pub times: Times,
    /// Capacity and base demand of one rank's resources.
    pub capacities: Vec<(u64, u64)>,
    /// Put arrivals count as satisfied from the start.
    pub stale_arrivals: bool,
    /// Noise, when asked for.
    pub noise: Option<Noise>,
    /// The power limit, when it acts on the average of a run.
    pub power: Option<Power>,
    /// Leaf switches, when they are oversubscribed and the cluster has more than one.
    pub leaves: Option<Leaves>,
}

/// A power limit that acts on the average of a run, in TFLOP/s of matrix work at full clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Power {
    /// Average from which on the clock droops.
    pub knee: f64,
    /// Power that does not depend on the matrix work.
    pub fixed: f64,
}

impl Power {
    /// Slowdown, in millionths, of a run of `flops` that took `ps` with its tiles slowed by `slowdown`.
    pub fn slowdown(&self, flops: u64, ps: u64, slowdown: u64) -> u64 {
        let at_full_clock = flops as f64 / ps.max(1) as f64 * slowdown as f64 * 1e-6;
        ((self.fixed + at_full_clock) / (self.fixed + self.knee) * 1e6).round().max(1e6) as u64
    }
}

/// Leaf switches whose links to the spine carry less than those to the nodes. The network is rail-optimised: each rail
/// has its own plane, so that a leaf has an uplink and a downlink per rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaves {
    /// Nodes under one leaf.
    pub nodes: u32,
    /// Bytes/s of one rail's uplink, and of its downlink.
    pub link: u64,
}

/// Timing constants in picoseconds.
#[derive(Clone, Debug)]
pub struct Times {
    /// Flag latency inside a GPU.
    pub flag_local: u64,
    /// Flag latency over NVLink.
    pub flag_remote: u64,
    /// From the end of a task's writes until its flags are raised.
    pub raise: u64,
    /// From the last store of a tile's output until it is visible.
    pub store_visible: u64,
    /// What a flag that a step waits for costs a tile, spread over its steps.
    pub spread_flag: u64,
    /// Steps that a tile's main loop can do while the output of the tile before waits for its flags.
    pub ahead_steps: u64,
    /// NIC-written flag.
    pub flag_nic: u64,
    /// Host flag until the waiter sees it.
    pub flag_host: u64,
    /// CTA's time to push a command.
    pub push: u64,
    /// Push until the proxy can read it.
    pub fifo: u64,
    /// FIFO depth.
    pub fifo_depth: u32,
    /// Proxy threads.
    pub threads: u32,
    /// Posting time.
    pub post: u64,
    /// Completion handling time.
    pub completion: u64,
    /// Writes in flight per queue.
    pub in_flight: u32,
    /// One-way network latency.
    pub network: u64,
    /// Data in memory until the sender sees the completion.
    pub ack: u64,
    /// In order per queue: one active message per queue.
    pub ordered: bool,
    /// Launch command to first CTA.
    pub launch: u64,
    /// Dependent launch.
    pub dependent: u64,
    /// Isolated launch.
    pub isolated: u64,
    /// Cost of an iteration of a back-to-back loop.
    pub iteration: u64,
    /// Load until the clock is the sustained one.
    pub cold: u64,
    /// SMs.
    pub sms: u32,
    /// Rails.
    pub rails: u32,
}

#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }

    fn write_u16(&mut self, n: u16) {
        self.write_u64(u64::from(n));
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(23) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
}

type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// A place as far as cost goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Where {
    at: At,
    bytes: u64,
    add: bool,
}

/// Everything that a cost depends on, by op.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum CostKey {
    Gemm {
        tile: [u16; 3],
        steps: u32,
        step_flags: u32,
        misses: [u64; 2],
        main_loop: MainLoop,
        drain: Drain,
        outs: SmallVec<[Where; 2]>,
    },
    Attention {
        tile: [u16; 2],
        steps: u32,
        head_dim: u32,
        bytes: u64,
        written: u64,
        main_loop: MainLoop,
    },
    Merge {
        bytes: u64,
    },
    Copy {
        src: Where,
        dsts: SmallVec<[Where; 2]>,
        engine: Engine,
        in_flight: u32,
        overlap: bool,
        lanes: u32,
    },
    Gather {
        local: u32,
        remote: u32,
        row_bytes: u32,
        zero: u32,
        in_flight: u16,
        overlap: bool,
    },
    Reduce {
        inputs: SmallVec<[Where; 4]>,
        outputs: SmallVec<[Where; 2]>,
        in_flight: u32,
        lanes: u32,
    },
    Put,
    Collective {
        kind: CollectiveKind,
        bytes: u64,
        in_place: bool,
        ctas: u32,
    },
    Fill {
        dst: Where,
    },
    Sync,
}

const PS_PER_S: f64 = 1e12;

fn ps_from_us(us: f64) -> u64 {
    (us * 1e6).round() as u64
}

fn ps_from_ns(ns: f64) -> u64 {
    (ns * 1e3).round() as u64
}

fn rate(gbs: f64) -> u64 {
    (gbs * 1e9).round() as u64
}

/// Time to move `bytes` at `rate` bytes/s, rounded up.
fn transfer(bytes: u64, rate: u64) -> u64 {
    (u128::from(bytes) * 1_000_000_000_000).div_ceil(u128::from(rate.max(1))) as u64
}

/// `bytes` spread evenly over `work` picoseconds, in bytes/s, rounded to nearest.
fn spread(bytes: u64, work: u64) -> u64 {
    if work == 0 {
        return 0;
    }
    ((u128::from(bytes) * 1_000_000_000_000 + u128::from(work / 2)) / u128::from(work)) as u64
}

/// The section of a machine file that describes a main loop.
const fn loop_name(main_loop: MainLoop) -> &'static str {
    match main_loop {
        MainLoop::WaitEachStep => "wait_each_step",
        MainLoop::Pipelined => "pipelined",
        MainLoop::Library => "library",
    }
}

struct Compiler<'a> {
    machine: &'a Machine,
    cluster: Cluster,
    fold_nodes: bool,
    fold_gpus: bool,
    rails: u32,
    classes: Vec<Vec<Demand>>,
    class_of: HashMap<Vec<Demand>, u32>,
    costs: Vec<CostRecord>,
    cost_of: FastMap<CostKey, u16>,
    put_flow_of: FastMap<(u16, u16, u16, u64), Flow>,
}

fn add_demand(demands: &mut Vec<Demand>, at: Offset, kind: ResourceKind, rate: u64) {
    match demands.iter_mut().find(|d| d.0 == at && d.1 == kind) {
        Some(demand) => demand.2 += rate,
        None if rate > 0 => demands.push((at, kind, rate)),
        None => {}
    }
}

/// Bytes by resource while a flow's demands are gathered.
type Loads = SmallVec<[(Offset, ResourceKind, u64); 8]>;

impl Compiler<'_> {
    fn fold(&self, offset: Offset) -> Offset {
        Offset { dn: if self.fold_nodes { 0 } else { offset.dn }, dg: if self.fold_gpus { 0 } else { offset.dg } }
    }

    fn class(&mut self, loads: &Loads, work: u64) -> u32 {
        let mut alone: Loads = Loads::new();
        for &(offset, kind, bytes) in loads {
            match alone.iter_mut().find(|d| d.0 == offset && d.1 == kind) {
                Some(load) => load.2 += bytes,
                None => alone.push((offset, kind, bytes)),
            }
        }
        // Rounded before ranks are folded: one rank that stands for several takes exactly what they take.
        let mut demands: Vec<Demand> = Vec::with_capacity(alone.len());
        for &(offset, kind, bytes) in &alone {
            add_demand(&mut demands, self.fold(offset), kind, spread(bytes, work));
        }
        demands.sort_unstable();
        self.class_with(demands)
    }

    fn class_with(&mut self, demands: Vec<Demand>) -> u32 {
        if let Some(&class) = self.class_of.get(&demands) {
            return class;
        }
        let class = self.classes.len() as u32;
        self.classes.push(demands.clone());
        self.class_of.insert(demands, class);
        class
    }

    fn flow(&mut self, loads: &Loads, work: u64) -> Flow {
        if work == 0 {
            return Flow::NOTHING;
        }
        Flow { class: self.class(loads, work), work }
    }

    fn over_nvlink(&self, offset: Offset) -> bool {
        offset.dg != 0 && self.machine.peer_path == PeerPath::Nvlink
    }

    /// GPUs of the node, as offsets.
    fn node(&self) -> impl Iterator<Item = Offset> + use<> {
        (0..self.cluster.gpus_per_node).map(Offset::local)
    }

    /// A write of `bytes` to a place: loads on the links and on the target's memory.
    fn load_write(&self, loads: &mut Loads, at: At, bytes: u64, add: bool) {
        let link =
            if add { (bytes as f64 * self.machine.nvlink.add_link_bytes_per_byte.value).round() as u64 } else { bytes };
        // An add in the own memory, which stands for a peer's, takes as much as the link would.
        let memory = match self.machine.peer_path {
            PeerPath::Hbm => 2 * link,
            PeerPath::Nvlink => 2 * bytes,
        };
        let memory = if add { memory } else { bytes };
        match at {
            At::Offset(offset) => {
                if self.over_nvlink(offset) {
                    loads.push((Offset::ME, ResourceKind::Egress, link));
                    loads.push((offset, ResourceKind::Ingress, link));
                    loads.push((offset, ResourceKind::Hbm, memory));
                } else {
                    loads.push((Offset::ME, ResourceKind::Hbm, memory));
                }
            }
            At::AllLocal => {
                // A multicast store leaves once; the switch copies it to every GPU of the node.
                loads.push((Offset::ME, ResourceKind::Egress, link));
                for offset in self.node() {
                    loads.push((offset, ResourceKind::Ingress, link));
                    loads.push((offset, ResourceKind::Hbm, memory));
                }
            }
        }
    }

    /// A read of `bytes` from a place.
    fn load_read(&self, loads: &mut Loads, at: At, bytes: u64) {
        match at {
            At::Offset(offset) => {
                if self.over_nvlink(offset) {
                    loads.push((offset, ResourceKind::Egress, bytes));
                    loads.push((Offset::ME, ResourceKind::Ingress, bytes));
                    loads.push((offset, ResourceKind::Hbm, bytes));
                } else {
                    loads.push((Offset::ME, ResourceKind::Hbm, bytes));
                }
            }
            At::AllLocal => {
                // Every GPU is read; the switch sums and returns one stream.
                loads.push((Offset::ME, ResourceKind::Ingress, bytes));
                for offset in self.node() {
                    loads.push((offset, ResourceKind::Egress, bytes));
                    loads.push((offset, ResourceKind::Hbm, bytes));
                }
            }
        }
    }

    fn is_remote(&self, at: At) -> bool {
        match at {
            At::Offset(offset) => self.over_nvlink(offset),
            At::AllLocal => true,
        }
    }

    fn write_rate(&self, at: At, add: bool) -> u64 {
        let sm = &self.machine.sm;
        rate(match (at, add) {
            (At::AllLocal, _) => sm.nvls_store_cta_gbs.value,
            (_, true) => sm.add_cta_gbs.value,
            (_, false) => sm.copy_cta_gbs.value,
        })
    }

    fn latency_ns(&self, at: At) -> f64 {
        if at == At::AllLocal {
            self.machine.sm.nvls_load_latency_ns.value
        } else if self.is_remote(at) {
            self.machine.sm.nvlink_latency_ns.value
        } else {
            self.machine.sm.local_latency_ns.value
        }
    }

    /// The asynchronous store of a tile, over `at_least_ps`; `keep` selects which places count.
    fn tile_out(
        &mut self,
        outs: &[Where],
        (hold_ps, at_least_ps): (u64, u64),
        local: bool,
        keep: impl Fn(&Self, At) -> bool,
    ) -> Flow {
        let mut loads = Loads::new();
        let mut work = 0;
        for out in outs {
            if !keep(self, out.at) {
                continue;
            }
            let at = if local { At::ME } else { out.at };
            work += transfer(out.bytes, self.write_rate(at, out.add));
            self.load_write(&mut loads, at, out.bytes, out.add);
        }
        if work == 0 {
            return Flow::NOTHING;
        }
        self.flow(&loads, (work + hold_ps).max(at_least_ps))
    }

    fn one_flow(&mut self, loads: &Loads, work: u64) -> [Cost; 3] {
        let main = if work == 0 { NONE } else { self.class(loads, work) };
        let crowd = self.machine.interpreter.as_ref().map_or(0.0, |i| i.move_crowd_per_cta.value * 1e9).round() as u64;
        [Cost { main, fixed: work, crowd, ..Cost::NOTHING }; 3]
    }

    /// What taking a task costs that is no tile.
    fn task_ps(&self) -> u64 {
        self.machine.interpreter.as_ref().map_or(0, |interpreter| ps_from_ns(interpreter.task_ns.value))
    }

    /// Before each task of a role.
    fn take_ps(&self, one_per_block: bool, claim: Claim) -> u64 {
        match (&self.machine.interpreter, claim) {
            _ if one_per_block => ps_from_ns(self.machine.launch.block_ns.value),
            (Some(interpreter), Claim::Ready { .. }) => ps_from_ns(interpreter.claim_ns.value),
            _ => 0,
        }
    }

    fn record(&mut self, key: &CostKey) -> CostRecord {
        let machine = self.machine;
        let sm = &machine.sm;
        let simple = |work, forms| CostRecord { work, steps: 0, drain: Drain::Visible, forms };
        let nothing = [Cost::NOTHING; 3];
        match key {
            CostKey::Sync if self.task_ps() > 0 => {
                let forms = self.one_flow(&Loads::new(), self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Sync => simple(Work::Sync, nothing),
            CostKey::Put => {
                let mut forms = nothing;
                for form in &mut forms {
                    form.fixed = ps_from_ns(machine.proxy.push_ns.value) + self.task_ps();
                }
                simple(Work::Put, forms)
            }
            CostKey::Gemm { tile, steps, step_flags, misses, main_loop, drain, outs } => {
                let gemm = &machine.gemm[loop_name(*main_loop)];
                let [bm, bn, bk] = tile.map(u64::from);
                let step = (2.0 * (bm * bn * bk) as f64 / gemm.sm_tflops.value).round() as u64;
                let loop_ps = step * u64::from(*steps);
                let fixed = ps_from_ns(gemm.epilogue_ns.value);
                let work = loop_ps + fixed;
                let mut loads = Loads::new();
                loads.push((Offset::ME, ResourceKind::Hbm, misses[0] + misses[1]));
                loads.push((Offset::ME, ResourceKind::Chip, 2 * bm * bn * bk * u64::from(*steps)));
                let main = self.class(&loads, work);
                let hold = ps_from_ns(match drain {
                    Drain::Overlap => 0.0,
                    Drain::SmemRead => gemm.smem_read_ns.value,
                    Drain::Visible => gemm.visible_ns.value,
                });
                let fenced = *drain == Drain::Visible && outs.iter().any(|out| self.is_remote(out.at));
                let fence = if fenced { ps_from_ns(machine.nvlink.fence_ns.value) } else { 0 };
                let fill = ps_from_ns(gemm.fill_ns.value);
                let whole = self.tile_out(outs, (hold + fence, 0), false, |_, _| true);
                let local = self.tile_out(outs, (hold, 0), true, |_, _| true);
                let remote = self.tile_out(outs, (0, 0), false, Self::is_remote);
                let tile = Cost { main, step, fixed, fill, ..Cost::NOTHING };
                let mut forms =
                    [Cost { out: whole, ..tile }, Cost { out: local, ..tile }, Cost { out: remote, ..Cost::NOTHING }];
                if let Some(interpreter) = &machine.interpreter {
                    let over = u64::from(*steps).min(interpreter.store_steps.value as u64);
                    let deferred_ps = over * step;
                    for (form, local) in forms[..2].iter_mut().zip([false, true]) {
                        form.crowd = ps_from_ns(interpreter.crowd_ns.value);
                        if *drain == Drain::Overlap {
                            form.deferred = self.tile_out(outs, (0, deferred_ps), local, |_, _| true);
                        }
                    }
                    // Alone, the compute role waits for no flags that others raise.
                    forms[0].fixed += u64::from(*step_flags) * ps_from_ns(interpreter.step_flag_ns.value);
                    // The interpreter runs a tile without its arithmetic as it runs any task.
                    forms[2] = Cost { out: remote, crowd: 0, ..self.one_flow(&Loads::new(), self.task_ps())[2] };
                }
                CostRecord { work: Work::Tile, steps: *steps, drain: *drain, forms }
            }
            CostKey::Attention { tile, steps, head_dim, bytes, written, main_loop } => {
                let attention = &machine.attention[loop_name(*main_loop)];
                let flops = 4 * u64::from(tile[0]) * u64::from(tile[1]) * u64::from(*head_dim);
                let step = (flops as f64 / attention.sm_tflops.value).round() as u64;
                let fixed = ps_from_ns(attention.block_ns.value) + transfer(*written, rate(sm.copy_cta_gbs.value));
                let work = step * u64::from(*steps) + fixed;
                let mut loads = Loads::new();
                loads.push((Offset::ME, ResourceKind::Hbm, *bytes));
                let power = machine.interpreter.as_ref().map_or(1.0, |i| i.attention_power.value);
                let drawn = (flops * u64::from(*steps)) as f64 * power;
                loads.push((Offset::ME, ResourceKind::Chip, drawn.round() as u64));
                let main = self.class(&loads, work);
                let cost = Cost { main, step, fixed, ..Cost::NOTHING };
                let mut forms = [cost, cost, Cost::NOTHING];
                if machine.interpreter.is_some() {
                    forms[2] = Cost { crowd: 0, ..self.one_flow(&Loads::new(), self.task_ps())[2] };
                }
                CostRecord { work: Work::Tile, steps: *steps, drain: Drain::Visible, forms }
            }
            CostKey::Merge { bytes } => {
                let mut loads = Loads::new();
                loads.push((Offset::ME, ResourceKind::Hbm, *bytes));
                let work = transfer(*bytes, rate(sm.merge_cta_gbs.value)) + ps_from_ns(sm.local_latency_ns.value);
                let forms = self.one_flow(&loads, work + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Copy { src, dsts, engine, in_flight, overlap, lanes } => {
                let mut loads = Loads::new();
                self.load_read(&mut loads, src.at, src.bytes);
                let lane = |cta_gbs: f64| cta_gbs / f64::from(*lanes);
                let interpreter = machine.interpreter.as_ref();
                let cta = match engine {
                    Engine::Bulk => lane(sm.copy_cta_gbs.value).min(interpreter.map_or(f64::MAX, |i| i.lane_gbs.value)),
                    Engine::LdSt => lane(sm.ldst_cta_gbs.value),
                };
                let load_ns = self.latency_ns(src.at);
                let mut work = 0.0;
                for dst in dsts {
                    self.load_write(&mut loads, dst.at, dst.bytes, false);
                    let cta = if dst.at == At::AllLocal { lane(sm.nvls_store_cta_gbs.value) } else { cta };
                    let store_ns = self.latency_ns(dst.at);
                    let bytes = dst.bytes as f64;
                    let flight = f64::from(*in_flight).min(bytes.max(1.0));
                    work += if *overlap {
                        // Bytes in flight over the slower of the two latencies, up to what a CTA can move.
                        bytes / cta.min(flight / load_ns.max(store_ns))
                    } else {
                        bytes / cta + (bytes / flight).ceil() * (load_ns + store_ns)
                    };
                }
                let ends_ns = interpreter.map_or(0.0, |i| match engine {
                    Engine::Bulk => i.copy_ns.value + src.bytes as f64 / i.copy_load_gbs.value,
                    Engine::LdSt => 0.0,
                });
                let work = ps_from_ns(work + load_ns + ends_ns);
                let forms = self.one_flow(&loads, work + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Gather { local, remote, row_bytes, zero, in_flight, overlap } => {
                let bytes = |rows: u32| u64::from(rows) * u64::from(*row_bytes);
                let mut loads = Loads::new();
                let rows = local + remote + zero;
                // The share of remote rows in quarters: slices then fall into a handful of classes instead of hundreds.
                let remote_bytes = bytes(rows) * u64::from((4 * remote + rows / 2) / rows.max(1)) / 4;
                loads.push((
                    Offset::ME,
                    ResourceKind::Hbm,
                    bytes(local + remote) - remote_bytes.min(bytes(local + remote)) + bytes(rows),
                ));
                let peers = u64::from(self.cluster.gpus_per_node) - 1;
                if remote_bytes > 0 && machine.peer_path == PeerPath::Nvlink {
                    // Rows of one slice come from many GPUs; each neighbour serves an equal share.
                    loads.push((Offset::ME, ResourceKind::Ingress, remote_bytes));
                    for offset in self.node().skip(1) {
                        loads.push((offset, ResourceKind::Egress, remote_bytes / peers));
                        loads.push((offset, ResourceKind::Hbm, remote_bytes / peers));
                    }
                } else {
                    loads.push((Offset::ME, ResourceKind::Hbm, remote_bytes));
                }
                let total = bytes(rows) as f64;
                let load_ns = if *remote > 0 { self.latency_ns(At::local(1)) } else { sm.local_latency_ns.value };
                let store_ns = sm.local_latency_ns.value;
                let flight = f64::from(*in_flight) * f64::from(*row_bytes);
                let work = if *overlap {
                    load_ns + total / sm.gather_cta_gbs.value.min(flight / load_ns.max(store_ns))
                } else {
                    total / sm.copy_cta_gbs.value
                        + (f64::from(rows) / f64::from(*in_flight)).ceil() * (load_ns + store_ns)
                };
                let row_ns = machine.interpreter.as_ref().map_or(0.0, |i| i.gather_row_ns.value);
                let work = work.max(f64::from(rows) * row_ns);
                let forms = self.one_flow(&loads, ps_from_ns(work) + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Reduce { inputs, outputs, in_flight, lanes } => {
                let mut loads = Loads::new();
                let (mut moved, mut latency) = (0, 0.0_f64);
                let mut work = 0.0;
                for input in inputs {
                    self.load_read(&mut loads, input.at, input.bytes);
                    latency = latency.max(self.latency_ns(input.at));
                    if input.at == At::AllLocal {
                        let cap = sm.nvls_load_cta_gbs.value;
                        work += input.bytes as f64 / cap.min(f64::from(*in_flight) / latency);
                    } else {
                        moved += input.bytes;
                    }
                }
                for output in outputs {
                    self.load_write(&mut loads, output.at, output.bytes, false);
                    if output.at == At::AllLocal {
                        work += output.bytes as f64 / sm.nvls_store_cta_gbs.value;
                    } else {
                        moved += output.bytes;
                    }
                }
                let cta = sm.reduce_cta_gbs.value / f64::from(*lanes);
                work += latency + moved as f64 / cta.min(f64::from(*in_flight) / latency.max(1e-3) * 1.5);
                let forms = self.one_flow(&loads, ps_from_ns(work) + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Collective { kind, bytes, in_place, ctas } => {
                let mut forms = nothing;
                for form in &mut forms {
                    form.fixed = self.collective_ps(*kind, *bytes, *in_place, *ctas);
                }
                simple(Work::Collective, forms)
            }
            CostKey::Fill { dst } => {
                let mut loads = Loads::new();
                self.load_write(&mut loads, dst.at, dst.bytes, false);
                let work = transfer(dst.bytes, rate(sm.fill_cta_gbs.value));
                let forms = self.one_flow(&loads, work + self.task_ps());
                simple(Work::Move, forms)
            }
        }
    }

    /// Bytes that a rank sends in a collective whose larger buffer has `bytes`, as in the usual bus bandwidths.
    fn wire_bytes(&self, kind: CollectiveKind, bytes: u64) -> f64 {
        let ranks = self.cluster.ranks() as f64;
        let passes = if kind == CollectiveKind::AllReduce { 2.0 } else { 1.0 };
        passes * bytes as f64 * (ranks - 1.0) / ranks
    }

    /// Bytes that a rank sends to other nodes in a collective.
    ///
    /// A ring enters each node once and leaves it once, whatever the GPUs of the node; they share what crosses. In an
    /// all-to-all every rank sends its parts itself.
    fn node_bytes(&self, kind: CollectiveKind, bytes: u64) -> u64 {
        let (nodes, gpus) = (f64::from(self.cluster.nodes), f64::from(self.cluster.gpus_per_node));
        match kind {
            _ if nodes < 2.0 => 0,
            CollectiveKind::AllToAll => (bytes as f64 * (nodes - 1.0) / nodes).round() as u64,
            _ => (self.wire_bytes(kind, bytes) / gpus).round() as u64,
        }
    }

    /// Time of a collective.
    fn collective_ps(&self, kind: CollectiveKind, bytes: u64, in_place: bool, ctas: u32) -> u64 {
        if self.cluster.ranks() == 1 {
            // Nobody to talk to: a copy, unless the result stands where it was.
            return if in_place { 0 } else { transfer(2 * bytes, rate(self.machine.gpu.hbm_gbs.value)) };
        }
        let pair = self.machine.library_pair.as_ref();
        let is_pair = self.cluster.nodes == 1 && self.cluster.gpus_per_node == 2;
        let library = pair.filter(|_| is_pair).unwrap_or(&self.machine.library);
        let collective = match kind {
            CollectiveKind::AllGather => &library.all_gather,
            CollectiveKind::ReduceScatter => &library.reduce_scatter,
            CollectiveKind::AllReduce => &library.all_reduce,
            CollectiveKind::AllToAll => &library.all_to_all,
        };
        // Every CTA drives its share of the channels.
        let driven = (f64::from(ctas) / collective.sms.value).min(1.0);
        // The channels of a ring leave a node through the NICs of its GPUs: fewer GPUs, fewer NICs.
        let nics = if self.cluster.nodes > 1 {
            (f64::from(self.cluster.gpus_per_node) / collective.bus_gpus.value).min(1.0)
        } else {
            1.0
        };
        let wire = self.wire_bytes(kind, bytes);
        let fill_wire = collective.fill_wire_mib.value * 1_048_576.0;
        let filled = if wire < fill_wire { wire / fill_wire } else { 1.0 };
        let ps = (collective.latency_us.value + collective.fill_us.value * filled) * 1e6
            + wire / (collective.bus_gbs.value * driven.min(nics) * 1e9) * PS_PER_S;
        ps.round() as u64
    }

    fn cost(&mut self, key: CostKey) -> u16 {
        if let Some(&cost) = self.cost_of.get(&key) {
            return cost;
        }
        let record = self.record(&key);
        let cost = self.costs.len() as u16;
        self.costs.push(record);
        self.cost_of.insert(key, cost);
        cost
    }

    fn put_flow(&mut self, offset: Offset, rail: u16, bytes: u64) -> Flow {
        let key = (offset.dn, offset.dg, rail, bytes);
        if let Some(&flow) = self.put_flow_of.get(&key) {
            return flow;
        }
        let nic = &self.machine.nic;
        let rail_rate = rate(nic.rail_gbs.value);
        let work = (transfer(bytes, rail_rate) + ps_from_ns(nic.message_ns.value)).max(1);
        let (rail, target) = (rail as u8, self.fold(offset));
        // A message holds its rail for its whole time, message cost included, so that a rail is also a message rate.
        let mut demands: Vec<Demand> =
            vec![(Offset::ME, ResourceKind::NicOut(rail), rail_rate), (target, ResourceKind::NicIn(rail), rail_rate)];
        let moved = spread(bytes, work);
        if moved > 0 {
            for (at, kind) in [
                (Offset::ME, ResourceKind::Hbm),
                (target, ResourceKind::Hbm),
                (Offset::ME, ResourceKind::PcieOut),
                (target, ResourceKind::PcieIn),
            ] {
                add_demand(&mut demands, at, kind, moved);
            }
        }
        demands.sort_unstable();
        let flow = Flow { class: self.class_with(demands), work };
        self.put_flow_of.insert(key, flow);
        flow
    }
}

/// Operand panels that are in L2, in the order of their last use.
///
/// The tiles of a wave walk along K side by side, so that one fetch serves them all; between waves as many bytes stay as
/// the window holds. `kernels/cuda/bench/l2_window.py` is the same model, beside the reads of a profiler that the window
/// was fitted to. A wave has as many tiles as the chip has SMs, whatever the split: only how waves fall on rows of
/// tiles depends on it, not how far apart two uses of a panel are.
struct Panels {
    /// Last use of the panels in L2.
    used: FastMap<(u16, u64), u32>,
    /// Uses in order: number of the use, panel, bytes. A panel was used again since unless `used` names this use.
    uses: VecDeque<(u32, (u16, u64), u64)>,
    next: u32,
    bytes: u64,
    tile: u32,
    window: u64,
    wave: u32,
}

impl Panels {
    fn new(machine: &Machine) -> Self {
        Self {
            used: FastMap::default(),
            uses: VecDeque::new(),
            next: 0,
            bytes: 0,
            tile: 0,
            window: (machine.gpu.l2_window_mib.value * 1_048_576.0) as u64,
            wave: machine.gpu.sms.value as u32,
        }
    }

    /// Bytes that the use of a panel fetches from memory.
    fn fetch(&mut self, buffer: u16, offset: u64, bytes: u64) -> u64 {
        let panel = (buffer, offset);
        self.uses.push_back((self.next, panel, bytes));
        let known = self.used.insert(panel, self.next).is_some();
        self.next += 1;
        if known {
            return 0;
        }
        self.bytes += bytes;
        bytes
    }

    /// The panels of the next use belong to the next tile.
    fn next_tile(&mut self) {
        self.tile += 1;
        if !self.tile.is_multiple_of(self.wave) {
            return;
        }
        while self.bytes > self.window {
            let Some((use_, panel, bytes)) = self.uses.pop_front() else { break };
            if self.used.get(&panel) == Some(&use_) {
                self.used.remove(&panel);
                self.bytes -= bytes;
            }
        }
    }
}

impl Compiled {
    /// Compiles a schedule for a machine.
    ///
    /// # Errors
    /// [`SimError`] when the execution is impossible for the schedule's symmetry.
    pub fn new(schedule: &Schedule, machine: &Machine, config: &Config) -> Result<Self, SimError> {
        let cluster = schedule.cluster;
        let leafy = machine.network.oversubscription.value > 1.0
            && f64::from(cluster.nodes) > machine.network.nodes_per_leaf.value;
        let noisy = config.noise_seed.is_some();
        let (fold_nodes, fold_gpus) = match config.execution {
            Execution::Full => (false, false),
            Execution::Mirror => {
                if !schedule.symmetry.is_full() || leafy || noisy {
                    let why = if noisy {
                        "noise makes ranks differ"
                    } else if leafy {
                        "an oversubscribed leaf switch makes nodes differ"
                    } else {
                        "its ranks do not share one skeleton"
                    };
                    return Err(SimError::NotSymmetric { kernel: schedule.kernel.clone(), why });
                }
                (true, true)
            }
            Execution::Folded => (schedule.symmetry.nodes && !leafy && !noisy, schedule.symmetry.gpus && !noisy),
        };
        let folded = Cluster {
            nodes: if fold_nodes { 1 } else { cluster.nodes },
            gpus_per_node: if fold_gpus { 1 } else { cluster.gpus_per_node },
        };
        let ranks: Vec<Rank> = folded.iter().collect();
        let rails = machine.nic.rails.value as u32;
        let mut compiler = Compiler {
            machine,
            cluster,
            fold_nodes,
            fold_gpus,
            rails,
            classes: Vec::new(),
            class_of: HashMap::new(),
            costs: Vec::new(),
            cost_of: FastMap::default(),
            put_flow_of: FastMap::default(),
        };

        let mut family_base = vec![0_u32];
        for family in &schedule.flags {
            family_base.push(family_base[family_base.len() - 1] + family.slots);
        }
        let mut raisers: Vec<(Option<RoleKind>, bool)> = vec![(None, false); schedule.flags.len()];
        let mut dropped = vec![false; schedule.flags.len()];

        let mut launches = Vec::new();
        let mut first_role = 0;
        for launch in &schedule.launches {
            launches.push(LaunchC {
                name: launch.name.clone(),
                after: launch.after.iter().map(|&l| l as u32).collect(),
                roles: first_role..first_role + launch.roles.len(),
            });
            first_role += launch.roles.len();
        }

        let representatives = schedule.representatives();
        let mut programs = Vec::with_capacity(representatives.len());
        for &rank in &representatives {
            programs.push(compile_rank(
                &mut compiler,
                schedule,
                rank,
                &launches,
                &family_base,
                &mut raisers,
                &mut dropped,
            ));
        }
        set_countdowns(&mut programs, schedule, &representatives, &family_base);

        let program_of = ranks
            .iter()
            .map(|&rank| {
                let representative = schedule.symmetry.representative(rank);
                representatives.iter().position(|&r| r == representative).unwrap_or(0) as u32
            })
            .collect();
        let stale_arrivals = matches!(config.protocol, Protocol::Published { stale_arrivals: true, .. });
        Ok(Self {
            ranks,
            program_of,
            programs,
            side_by_side: side_by_side(schedule.launches.iter().map(|launch| launch.after.as_slice())),
            launches,
            costs: compiler.costs,
            classes: compiler.classes,
            folded,
            families: schedule.flags.iter().map(|f| f.name.clone()).collect(),
            family_base,
            dropped,
            raisers,
            times: Times::new(machine),
            capacities: capacities(machine, config.clock),
            stale_arrivals,
            power: (machine.power_limit == PowerLimit::Average).then(|| {
                let (knee, fixed) = droop(machine, config.clock);
                Power { knee, fixed }
            }),
            noise: config.noise_seed.map(|seed| Noise {
                seed,
                network_sigma: machine.noise.network_sigma.value,
                flag_sigma: machine.noise.flag_sigma.value,
                clock_sigma: machine.noise.clock_sigma.value,
                late_ps: ps_from_us(machine.noise.late_rank_us.value),
            }),
            leaves: leafy.then(|| {
                let nodes = machine.network.nodes_per_leaf.value;
                // A GPU that stands for all of its node brings its own share of the links.
                let rails = nodes * f64::from(folded.gpus_per_node);
                let link = rails * machine.nic.rail_gbs.value / machine.network.oversubscription.value;
                Leaves { nodes: nodes as u32, link: rate(link) }
            }),
        })
    }

    /// What a class takes from the links of its leaves: node offset, rail, bytes/s.
    pub fn leaf_demand(&self, class: &[Demand]) -> Option<(u16, u8, u64)> {
        let (to, rail) = class.iter().find_map(|d| match d.1 {
            ResourceKind::NicIn(rail) if d.0.dn != 0 => Some((d.0, rail)),
            _ => None,
        })?;
        // The NIC is held for the message's own cost too; what travels are its bytes, as over PCIe.
        let moved = class.iter().find(|d| d.0 == to && d.1 == ResourceKind::PcieIn)?;
        Some((to.dn, rail, moved.2))
    }

    /// Matrix work of a rank.
    pub fn matrix_flops(&self) -> u64 {
        let totals = self.programs.first().map(|program| program.totals.as_slice()).unwrap_or_default();
        totals.iter().find(|(kind, _)| *kind == ResourceKind::Chip).map_or(0, |&(_, flops)| flops)
    }

    /// The family that a flag belongs to.
    pub fn family_of(&self, flag: u32) -> usize {
        self.family_base.partition_point(|&base| base <= flag) - 1
    }
}

fn compile_rank(
    compiler: &mut Compiler<'_>,
    schedule: &Schedule,
    rank: Rank,
    launches: &[LaunchC],
    family_base: &[u32],
    raisers: &mut [(Option<RoleKind>, bool)],
    dropped: &mut [bool],
) -> Program {
    let mut program = Program::default();
    let mut totals: HashMap<ResourceKind, u128> = HashMap::new();
    let mut span_of: FastMap<SpanC, u32> = FastMap::default();
    let table = schedule.source.table(rank);
    for (l, launch) in schedule.launches.iter().enumerate() {
        for (r, role) in launch.roles.iter().enumerate() {
            let first = program.tasks.len() as u32;
            let mut panels = Panels::new(compiler.machine);
            let (mut work_ps, mut collective) = (0_u128, false);
            let flag = |f: tilewire_kernels::schedule::Flag| family_base[usize::from(f.family.0)] + f.slot;
            schedule.for_each_task(rank, l, r, |task| {
                let key = cost_key(&task, &table, role, &mut panels);
                let cost = compiler.cost(key);
                let record = compiler.costs[usize::from(cost)];
                let form = record.forms[0];
                let alone = form.fixed + form.step * u64::from(record.steps) + form.out.work;
                // A store that overlaps the next tile holds its CTA for no time of its own.
                let overlapped = record.work == Work::Tile && record.drain == Drain::Overlap;
                work_ps += u128::from(if overlapped { alone - form.out.work } else { alone });
                collective |= record.work == Work::Collective;
                program.longest_ps = program.longest_ps.max(alone);
                for (class, work) in
                    [(form.main, form.fixed + form.step * u64::from(record.steps)), (form.out.class, form.out.work)]
                {
                    add_totals(&mut totals, compiler, class, work);
                }
                let wait0 = program.waits.len() as u32;
                let mut counts = [0_u8; 3];
                for (i, gate) in [Gate::Start, Gate::KStep, Gate::Output].into_iter().enumerate() {
                    for wait in task.waits.iter().filter(|w| w.gate == gate) {
                        counts[i] += 1;
                        let (flag, level) = (flag(wait.flag), wait.at_least);
                        let on = if wait.count == 1 {
                            flag
                        } else {
                            let span = SpanC { flag, count: wait.count, stride: wait.stride, level };
                            SPAN | *span_of.entry(span).or_insert_with(|| {
                                program.spans.push(span);
                                program.spans.len() as u32 - 1
                            })
                        };
                        program.waits.push(WaitC { on, level });
                    }
                }
                let signal0 = program.signals.len() as u32;
                let raise = |raisers: &mut [(Option<RoleKind>, bool)], dropped: &mut [bool], family: usize, put| {
                    raisers[family].0 = raisers[family].0.or(Some(role.kind));
                    raisers[family].1 |= put;
                    dropped[family] |= put || role.kind != RoleKind::Compute;
                };
                for signal in &task.signals {
                    raise(raisers, dropped, usize::from(signal.flag.family.0), false);
                    let targets: SmallVec<[Offset; 8]> = match signal.to {
                        At::Offset(offset) => SmallVec::from_slice(&[offset]),
                        At::AllLocal => compiler.node().collect(),
                    };
                    for offset in targets {
                        program.signals.push(SignalC {
                            flag: flag(signal.flag),
                            add: signal.add,
                            dg: compiler.fold(offset).dg,
                            remote: compiler.over_nvlink(offset),
                            early: signal.early,
                        });
                    }
                }
                if let Op::Collective { kind, src, dst } = &task.op {
                    program.put_bytes += compiler.node_bytes(*kind, src.bytes().max(dst.bytes()));
                }
                let mut put = NONE;
                if let Op::Put { src, dst, queue, publish, arrived, sent } = &task.op {
                    let At::Offset(offset) = dst.at else { unreachable!("a put names one rank") };
                    raise(raisers, dropped, usize::from(arrived.family.0), true);
                    if let Some(sent) = sent {
                        raise(raisers, dropped, usize::from(sent.family.0), true);
                    }
                    let bytes = if dst.region.bytes() == 0 { 0 } else { src.bytes() };
                    let rail = (u32::from(*queue) % compiler.rails) as u16;
                    let flow = compiler.put_flow(offset, rail, bytes);
                    add_totals(&mut totals, compiler, flow.class, flow.work);
                    let folded = compiler.fold(offset);
                    put = program.puts.len() as u32;
                    program.put_bytes += bytes;
                    program.puts.push(PutC {
                        dn: folded.dn,
                        dg: folded.dg,
                        queue: *queue,
                        publish: match publish {
                            Publish::Immediate => PublishC::Proxy,
                            Publish::SameQueueWrite | Publish::SeparateWrite { .. } => PublishC::Nic,
                        },
                        flow,
                        arrived: flag(*arrived),
                        sent: sent.map_or(NONE, flag),
                        bytes,
                    });
                }
                program.tasks.push(TaskC {
                    wait0,
                    signal0,
                    cost,
                    waits: counts,
                    signals: (program.signals.len() as u32 - signal0) as u8,
                    put,
                });
            });
            let one_per_block = role.ctas.spared().is_some() && role.claim == Claim::Ticket;
            program.roles.push(RoleC {
                kind: role.kind,
                ctas: role.ctas,
                lanes: role.lanes,
                claim: role.claim,
                recycle: role.recycle.map_or(NONE, |r| (launches[l].roles.start + r) as u32),
                launch: l as u32,
                first,
                tasks: program.tasks.len() as u32 - first,
                work_ps,
                collective,
                block_ps: compiler.take_ps(one_per_block, role.claim),
            });
        }
    }
    program.totals = totals.into_iter().map(|(kind, total)| (kind, (total / 1_000_000_000_000) as u64)).collect();
    program.totals.sort_unstable();
    program
}

/// Adds what a flow takes from the own rank's resources, and, by symmetry, what others take from it.
fn add_totals(totals: &mut HashMap<ResourceKind, u128>, compiler: &Compiler<'_>, class: u32, work: u64) {
    if class == NONE {
        return;
    }
    for &(_, kind, rate) in &compiler.classes[class as usize] {
        *totals.entry(kind).or_default() += u128::from(rate) * u128::from(work);
    }
}

fn cost_key(
    task: &Task,
    table: &[Option<tilewire_kernels::schedule::GatherEntry>],
    role: &Role,
    panels: &mut Panels,
) -> CostKey {
    let place = |p: &tilewire_kernels::schedule::Place| Where { at: p.at, bytes: p.region.bytes(), add: false };
    match &task.op {
        Op::GemmTile { a, b, outs, tile, drain, main_loop, .. } => {
            let misses = [panels.fetch(a.buffer.0, a.offset, a.bytes()), panels.fetch(b.buffer.0, b.offset, b.bytes())];
            panels.next_tile();
            let outs = outs.iter().map(|o| Where { add: o.mode == WriteMode::Add, ..place(&o.place) }).collect();
            CostKey::Gemm {
                tile: *tile,
                steps: task.op.steps(),
                step_flags: task.waits.iter().filter(|wait| wait.gate == Gate::KStep).map(|wait| wait.count).sum(),
                misses,
                main_loop: *main_loop,
                drain: *drain,
                outs,
            }
        }
        Op::AttentionTile { q, k, v, state, out, first, last, tile, main_loop, .. } => {
            let misses = panels.fetch(k.buffer.0, k.offset, k.bytes()) + panels.fetch(v.buffer.0, v.offset, v.bytes());
            panels.next_tile();
            let state_bytes = state.map_or(0, |s| s.bytes());
            let read = q.bytes() + if *first { 0 } else { state_bytes };
            let written = if *last { 0 } else { state_bytes } + out.map_or(0, |o| o.o.bytes() + o.l.bytes());
            CostKey::Attention {
                tile: *tile,
                steps: task.op.steps(),
                head_dim: q.row_bytes / 2,
                bytes: misses + read + written,
                written: written + read - q.bytes(),
                main_loop: *main_loop,
            }
        }
        Op::AttentionMerge { parts, out } => {
            let bytes = parts.iter().map(|p| p.o.bytes() + p.l.bytes()).sum::<u64>() + out.o.bytes() + out.l.bytes();
            CostKey::Merge { bytes }
        }
        Op::Copy { src, dsts, engine, in_flight_bytes, load_store_overlap } => CostKey::Copy {
            src: place(src),
            dsts: dsts.iter().map(place).collect(),
            engine: *engine,
            in_flight: *in_flight_bytes,
            overlap: *load_store_overlap,
            lanes: role.lanes,
        },
        Op::GatherRows { table: slice, dst, in_flight_rows, load_store_overlap, .. } => {
            let entries = &table[slice.start as usize..(slice.start + slice.len) as usize];
            let local = entries.iter().flatten().filter(|e| e.dg == 0).count() as u32;
            let remote = entries.iter().flatten().count() as u32 - local;
            CostKey::Gather {
                local,
                remote,
                zero: slice.len - local - remote,
                row_bytes: dst.row_bytes,
                in_flight: *in_flight_rows,
                overlap: *load_store_overlap,
            }
        }
        Op::Reduce { inputs, outputs, in_flight_bytes } => CostKey::Reduce {
            inputs: inputs.iter().map(place).collect(),
            outputs: outputs.iter().map(place).collect(),
            in_flight: *in_flight_bytes,
            lanes: role.lanes,
        },
        Op::Put { .. } => CostKey::Put,
        Op::Collective { kind, src, dst } => CostKey::Collective {
            kind: *kind,
            bytes: src.bytes().max(dst.bytes()),
            in_place: src == dst,
            ctas: match role.ctas {
                CtaCount::Fixed(ctas) => ctas,
                CtaCount::FromSplit | CtaCount::AllBut(_) => u32::MAX,
            },
        },
        Op::Fill { dst } => CostKey::Fill { dst: place(dst) },
        Op::Sync => CostKey::Sync,
    }
}

/// Finds the flags that need one event in a run instead of one per signal.
fn set_countdowns(programs: &mut [Program], schedule: &Schedule, representatives: &[Rank], family_base: &[u32]) {
    let flags = family_base[family_base.len() - 1] as usize;
    let cluster = schedule.cluster;
    let index_of = |rank: Rank| {
        let representative = schedule.symmetry.representative(rank);
        representatives.iter().position(|&r| r == representative).unwrap_or(0)
    };
    let mut adds = vec![vec![0_u64; flags]; programs.len()];
    for (from, program) in programs.iter().enumerate() {
        let local: Vec<usize> = (0..cluster.gpus_per_node)
            .map(|dg| index_of(cluster.at(representatives[from], Offset::local(dg))))
            .collect();
        for signal in &program.signals {
            // A folded offset means "the representative", which is the only entry that matters then.
            adds[local[usize::from(signal.dg)]][signal.flag as usize] += u64::from(signal.add);
        }
        for put in &program.puts {
            let to = index_of(cluster.at(representatives[from], Offset { dn: put.dn, dg: put.dg }));
            adds[to][put.arrived as usize] += 1;
            if put.sent != NONE {
                adds[from][put.sent as usize] += 1;
            }
        }
    }
    for (program, adds) in programs.iter_mut().zip(adds) {
        let mut level = vec![0_u32; flags];
        let single = program.waits.iter().filter(|wait| wait.on & SPAN == 0).map(|wait| program.awaited(wait));
        for run in single.chain(program.spans.iter().copied()) {
            for flag in run.flags() {
                let level = &mut level[flag as usize];
                *level = if *level == 0 || *level == run.level { run.level } else { u32::MAX };
            }
        }
        for (level, adds) in level.iter_mut().zip(adds) {
            *level = match *level {
                0 => UNWATCHED,
                one if u64::from(one) == adds => one,
                _ => 0,
            };
        }
        program.countdown = level;
    }
}

/// Knee and static power of the droop, TFLOP/s.
const fn droop(machine: &Machine, clock: Clock) -> (f64, f64) {
    let gpu = &machine.gpu;
    match clock {
        Clock::Sustained => (gpu.droop_knee_tflops.value, gpu.droop_static_tflops.value),
        Clock::Cold => (gpu.cold_knee_tflops.value, gpu.cold_static_tflops.value),
    }
}

fn capacities(machine: &Machine, clock: Clock) -> Vec<(u64, u64)> {
    let rails = machine.nic.rails.value as u32;
    let mut capacities = vec![(0, 0); ResourceKind::count(rails) as usize];
    let mut set = |kind: ResourceKind, value| capacities[kind.index(rails) as usize] = value;
    set(ResourceKind::Hbm, (rate(machine.gpu.hbm_gbs.value), 0));
    let power = |tflops: f64| (tflops * 1e12).round() as u64;
    let (knee, fixed) = droop(machine, clock);
    set(
        ResourceKind::Chip,
        match machine.power_limit {
            PowerLimit::Moment => (power(knee + fixed), power(fixed)),
            // Never binds: the clock of the whole run is lower instead.
            PowerLimit::Average => (u64::MAX / 4, 0),
        },
    );
    set(ResourceKind::Egress, (rate(machine.nvlink.egress_gbs.value), 0));
    set(ResourceKind::Ingress, (rate(machine.nvlink.ingress_gbs.value), 0));
    set(ResourceKind::PcieOut, (rate(machine.nic.pcie_gbs.value), 0));
    set(ResourceKind::PcieIn, (rate(machine.nic.pcie_gbs.value), 0));
    for rail in 0..rails as u8 {
        set(ResourceKind::NicOut(rail), (rate(machine.nic.rail_gbs.value), 0));
        set(ResourceKind::NicIn(rail), (rate(machine.nic.rail_gbs.value), 0));
    }
    capacities
}

impl Times {
    fn new(machine: &Machine) -> Self {
        let (flags, proxy, network, launch) = (&machine.flags, &machine.proxy, &machine.network, &machine.launch);
        Self {
            flag_local: ps_from_ns(flags.local_ns.value),
            flag_remote: ps_from_ns(flags.nvlink_ns.value),
            raise: machine.interpreter.as_ref().map_or(0, |i| ps_from_ns(i.raise_ns.value)),
            store_visible: machine.interpreter.as_ref().map_or(0, |i| ps_from_ns(i.store_visible_ns.value)),
            spread_flag: machine.interpreter.as_ref().map_or(0, |i| ps_from_ns(i.spread_flag_ns.value)),
            ahead_steps: machine.interpreter.as_ref().map_or(0, |i| i.ahead_steps.value as u64),
            flag_nic: ps_from_ns(flags.nic_ns.value),
            flag_host: ps_from_ns(flags.host_ns.value + flags.republish_ns.value),
            push: ps_from_ns(proxy.push_ns.value),
            fifo: ps_from_ns(proxy.fifo_latency_ns.value),
            fifo_depth: proxy.fifo_depth.value as u32,
            threads: proxy.threads.value as u32,
            post: ps_from_ns(proxy.post_ns.value),
            completion: ps_from_ns(proxy.completion_ns.value),
            in_flight: proxy.in_flight.value as u32,
            network: ps_from_us(network.latency_us.value),
            ack: ps_from_us(network.ack_us.value),
            ordered: machine.fabric.orders_within_queue(),
            launch: ps_from_us(launch.command_us.value),
            dependent: ps_from_us(launch.dependent_us.value),
            isolated: ps_from_us(launch.isolated_us.value),
            iteration: ps_from_us(launch.iteration_us.value),
            cold: ps_from_us(machine.gpu.cold_ms.value * 1e3),
            sms: machine.gpu.sms.value as u32,
            rails: machine.nic.rails.value as u32,
        }
    }
}

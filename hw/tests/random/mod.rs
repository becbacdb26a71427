//! Random schedules that are legal by construction, with what they must compute.
//!
//! A program is a list of steps in one order; each step makes one block of scratch from earlier ones: a copy to a local
//! rank, a sum, or a put to another node. Who makes a block tells every rank that may read it, by one flag per block and
//! holder; a block that is made again waits for its readers' credits and raises its flag to the next level. Steps go to the
//! roles in the program's order, so no list waits for itself.

use tilewire_kernels::kernel::{Element, Expected, Slice};
use tilewire_kernels::options::{OptionSpec, Options, Value};
use tilewire_kernels::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, DType, Engine, FamilyId, Flag, FlagFamily, Launch, Op, Place, Publish,
    Region, Role, Signal, Symmetry, TaskSource, Wait,
};
use tilewire_kernels::{
    BuildError, Cluster, Fabric, Kernel, Offset, OptionSet, Problem, ProblemKind, Rank, RoleKind, Schedule, Spec, Task,
};

const X: BufferId = BufferId(0);
const Y: BufferId = BufferId(1);
const S: BufferId = BufferId(2);
/// `[block][holder, seen from the waiter]`: how often the block was made.
const READY: FamilyId = FamilyId(0);
/// `[block]`: readers of the block's first content that are done.
const CREDIT: FamilyId = FamilyId(1);
/// `[block]`: the put that makes it.
const ARRIVED: FamilyId = FamilyId(2);

/// Bytes and elements of a block.
const BYTES: u64 = 64;
const ELEMENTS: u64 = BYTES / 2;
/// Blocks of x.
const INPUTS: u32 = 3;

/// SplitMix64: the same program for a seed on any machine.
pub struct Rng(pub u64);

impl Rng {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % u64::from(n.max(1))) as u32
    }
}

/// A block as a step reads it: of x, or of scratch in its `version`-th content, of the rank at local offset `dg`.
#[derive(Clone, Copy, Debug)]
enum Source {
    Input(u32),
    Made { block: u32, version: u32, dg: u16 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Make {
    /// To the rank at this local offset.
    Copy(u16),
    Sum,
    /// To the node at this distance.
    Put(u16),
}

#[derive(Clone, Debug)]
struct Step {
    make: Make,
    from: Vec<Source>,
    block: u32,
    version: u32,
    role: usize,
}

/// A random program.
#[derive(Clone, Debug)]
pub struct Random {
    cluster: Cluster,
    fabric: Fabric,
    claims: Vec<Claim>,
    steps: Vec<Step>,
    blocks: u32,
    /// Blocks, in their last content, that end in y.
    outputs: Vec<Source>,
}

impl Random {
    /// The program of a seed with up to `size` steps.
    pub fn new(seed: u64, size: u32) -> Self {
        let mut rng = Rng(seed);
        let clusters = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)];
        let (nodes, gpus) = clusters[rng.below(5) as usize];
        let fabric = [Fabric::IbRc, Fabric::EfaSrd, Fabric::Loopback][rng.below(3) as usize];
        let claims = (0..3).map(|_| match rng.below(3) {
            0 => Claim::Strided,
            1 => Claim::Ticket,
            _ => Claim::Ready { window: 1 + rng.below(4) },
        });
        let claims = claims.collect();
        let mut this = Self {
            cluster: Cluster { nodes, gpus_per_node: gpus },
            fabric,
            claims,
            steps: Vec::new(),
            blocks: 0,
            outputs: Vec::new(),
        };
        // Version of each block, and whether it may be made again: by a sum, once, if no put reads or makes it.
        let mut versions: Vec<(u32, bool)> = Vec::new();
        for _ in 0..2 + rng.below(size) {
            let make = match rng.below(4) {
                0 if nodes > 1 => Make::Put(1 + rng.below(u32::from(nodes) - 1) as u16),
                1 => Make::Sum,
                _ => Make::Copy(rng.below(u32::from(gpus)) as u16),
            };
            let source = |rng: &mut Rng, versions: &[(u32, bool)], local: bool| {
                if versions.is_empty() || rng.below(4) == 0 {
                    return Source::Input(rng.below(INPUTS));
                }
                let block = rng.below(versions.len() as u32);
                let dg = if local { 0 } else { rng.below(u32::from(gpus)) as u16 };
                Source::Made { block, version: versions[block as usize].0, dg }
            };
            let reads = if make == Make::Sum { 2 } else { 1 };
            let put = matches!(make, Make::Put(_));
            // Two waits are what a Ready role takes; one is left for credits.
            let mut from = vec![source(&mut rng, &versions, put)];
            if reads == 2 {
                from.push(Source::Input(rng.below(INPUTS)));
            }
            if put {
                for source in &from {
                    if let Source::Made { block, .. } = source {
                        versions[*block as usize].1 = false;
                    }
                }
            }
            let again = (0..versions.len() as u32).filter(|&block| {
                let (version, free) = versions[block as usize];
                let mine = from.iter().any(|s| matches!(s, Source::Made { block: b, .. } if *b == block));
                let read = this.readers(block, version) > 0;
                free && version == 1 && !mine && read
            });
            let again: Vec<u32> = again.collect();
            let role = if put { 2 } else { rng.below(2) as usize };
            let block = if make == Make::Sum && !again.is_empty() {
                let block = again[rng.below(again.len() as u32) as usize];
                versions[block as usize] = (2, false);
                block
            } else {
                versions.push((1, make == Make::Sum));
                versions.len() as u32 - 1
            };
            this.steps.push(Step { make, from, block, version: versions[block as usize].0, role });
        }
        this.blocks = versions.len() as u32;
        let made = (0..this.blocks).map(|block| Source::Made { block, version: versions[block as usize].0, dg: 0 });
        this.outputs = made.collect();
        this
    }

    /// Reads of a content of a block by steps, over the ranks that read it: each rank reads one holder's.
    fn readers(&self, block: u32, version: u32) -> u32 {
        let reads = self.steps.iter().flat_map(|step| &step.from);
        reads.filter(|s| matches!(s, Source::Made { block: b, version: v, .. } if (*b, *v) == (block, version))).count()
            as u32
    }

    fn gpus(&self) -> u16 {
        self.cluster.gpus_per_node
    }

    fn ready(&self, block: u32, dg: u16) -> u32 {
        block * u32::from(self.gpus()) + u32::from(dg)
    }

    fn input(&self, source: Source) -> (Place, Option<Wait>) {
        let region = |buffer, block: u32| Region::contiguous(buffer, u64::from(block) * BYTES, 1, BYTES as u32);
        match source {
            Source::Input(block) => (Place::me(region(X, block)), None),
            Source::Made { block, version, dg } => (
                Place { at: At::local(dg), region: region(S, block) },
                Some(Wait::on(READY, self.ready(block, dg), version)),
            ),
        }
    }

    /// Tells all local ranks that the block on the rank `dg` further is made; a rank that is `d` further sees it at
    /// `dg - d`.
    fn tell(&self, task: &mut Task, (block, version): (u32, u32), dg: u16) {
        let gpus = self.gpus();
        for d in 0..gpus {
            let holder = (dg + gpus - d) % gpus;
            if version <= self.asked(block, holder) {
                task.signals.push(Signal::one(At::local(d), READY, self.ready(block, holder)));
            }
        }
    }

    /// The latest content of a block on a holder that anybody waits for: a flag must not rise beyond that.
    fn asked(&self, block: u32, holder: u16) -> u32 {
        let reads = self.steps.iter().flat_map(|step| &step.from).chain(&self.outputs);
        let levels = reads.filter_map(|source| match *source {
            Source::Made { block: b, version, dg } if (b, dg) == (block, holder) => Some(version),
            _ => None,
        });
        levels.max().unwrap_or(0)
    }

    fn lists(&self) -> Vec<Vec<Task>> {
        let mut lists = vec![Vec::new(); 3];
        let dst = |block: u32| Region::contiguous(S, u64::from(block) * BYTES, 1, BYTES as u32);
        for step in &self.steps {
            let inputs: Vec<(Place, Option<Wait>)> = step.from.iter().map(|&source| self.input(source)).collect();
            let mut task = Task::new(match step.make {
                Make::Copy(to) => Op::Copy {
                    src: inputs[0].0,
                    dsts: [Place { at: At::local(to), region: dst(step.block) }].into_iter().collect(),
                    engine: Engine::LdSt,
                    in_flight_bytes: 1024,
                    load_store_overlap: false,
                },
                Make::Sum => Op::Reduce {
                    inputs: inputs.iter().map(|(place, _)| *place).collect(),
                    outputs: [Place::me(dst(step.block))].into_iter().collect(),
                    in_flight_bytes: 1024,
                },
                Make::Put(to) => Op::Put {
                    src: inputs[0].0.region,
                    dst: Place { at: At::node(to), region: dst(step.block) },
                    queue: 0,
                    publish: if self.fabric == Fabric::IbRc { Publish::SameQueueWrite } else { Publish::Immediate },
                    arrived: Flag { family: ARRIVED, slot: step.block },
                    sent: None,
                },
            });
            task.waits.extend(inputs.iter().filter_map(|(_, wait)| *wait));
            if step.version == 2 {
                task.waits.push(Wait::on(CREDIT, step.block, self.readers(step.block, 1)));
            }
            for source in &step.from {
                if let Source::Made { block, version: 1, dg } = *source
                    && self.steps.iter().any(|other| (other.block, other.version) == (block, 2))
                {
                    // The holder makes it again when all its readers are done.
                    task.signals.push(Signal::one(At::local(dg), CREDIT, block));
                }
            }
            match step.make {
                Make::Copy(to) => self.tell(&mut task, (step.block, step.version), to),
                Make::Sum => self.tell(&mut task, (step.block, step.version), 0),
                Make::Put(_) => {
                    lists[step.role].push(task);
                    let mut notice = Task::new(Op::Sync).wait(Wait::on(ARRIVED, step.block, 1));
                    self.tell(&mut notice, (step.block, step.version), 0);
                    lists[step.block as usize % 2].push(notice);
                    continue;
                }
            }
            lists[step.role].push(task);
        }
        for (i, &output) in self.outputs.iter().enumerate() {
            let (src, wait) = self.input(output);
            let mut task = Task::new(Op::Copy {
                src,
                dsts: [Place::me(Region::contiguous(Y, i as u64 * BYTES, 1, BYTES as u32))].into_iter().collect(),
                engine: Engine::LdSt,
                in_flight_bytes: 1024,
                load_store_overlap: false,
            });
            task.waits.extend(wait);
            lists[i % 2].push(task);
        }
        lists
    }

    /// What `run` needs beside the schedule.
    pub fn spec(&self) -> Spec {
        let problem = Problem::Gemm { m: 1, n: 1, k: 1 };
        let options = Options::new("random", &[], |_| Value::Bool(false));
        Spec { problem, cluster: self.cluster, fabric: self.fabric, options }
    }

    pub fn schedule(&self) -> Schedule {
        let buffer = |name: &str, blocks: u32, usage| Buffer {
            name: name.into(),
            bytes: u64::from(blocks) * BYTES,
            dtype: DType::Bf16,
            usage,
        };
        let family = |name: &str, slots| FlagFamily { name: name.into(), slots };
        let kinds = [RoleKind::Compute, RoleKind::IntraComm, RoleKind::InterSend];
        let role = |(kind, &claim)| Role::new(kind, claim);
        Schedule {
            kernel: "random".into(),
            cluster: self.cluster,
            fabric: self.fabric,
            spec: String::new(),
            buffers: vec![
                buffer("x", INPUTS, BufferUse::Input),
                buffer("y", self.outputs.len() as u32, BufferUse::Output),
                buffer("s", self.blocks, BufferUse::Scratch),
            ],
            flags: vec![
                family("ready", self.blocks * u32::from(self.gpus())),
                family("credit", self.blocks),
                family("arrived", self.blocks),
            ],
            launches: vec![Launch {
                name: "main".into(),
                after: Vec::new(),
                roles: kinds.into_iter().zip(&self.claims).map(role).collect(),
            }],
            symmetry: Symmetry::FULL,
            useful_flops: 0,
            source: Box::new(Lists(self.lists())),
        }
    }
}

struct Lists(Vec<Vec<Task>>);

impl TaskSource for Lists {
    fn tasks(&self, _rank: Rank, _launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        self.0[role].iter().cloned().for_each(sink);
    }
}

impl Kernel for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn summary(&self) -> &'static str {
        "a random program"
    }

    fn problem_kind(&self) -> ProblemKind {
        ProblemKind::Gemm
    }

    fn option_specs(&self) -> &'static [OptionSpec] {
        &[]
    }

    fn default_option(&self, _set: OptionSet, _name: &str, _problem: &Problem, _cluster: Cluster) -> Value {
        Value::Bool(false)
    }

    fn build(&self, _spec: &Spec) -> Result<Schedule, BuildError> {
        Ok(self.schedule())
    }

    fn inputs(&self, _spec: &Spec, rank: Rank) -> Vec<Slice> {
        let rows = u64::from(INPUTS);
        vec![Slice {
            tensor: "x",
            row: self.cluster.number(rank) as u64 * rows,
            col: 0,
            rows,
            cols: ELEMENTS,
            region: Region::contiguous(X, 0, INPUTS, BYTES as u32),
        }]
    }

    /// Carries the steps out in the program's order, on all ranks.
    fn reference(&self, _spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        type Block = (Vec<f64>, Vec<f64>);
        let ranks = self.cluster.ranks();
        let mut made: Vec<Vec<Block>> = vec![vec![(Vec::new(), Vec::new()); self.blocks as usize]; ranks];
        for step in &self.steps {
            let mut results = Vec::new();
            for at in self.cluster.iter() {
                let mut sum: Block = (vec![0.0; ELEMENTS as usize], vec![0.0; ELEMENTS as usize]);
                for source in &step.from {
                    let block: Block = match *source {
                        Source::Input(block) => {
                            let row = self.cluster.number(at) as u64 * u64::from(INPUTS) + u64::from(block);
                            let values: Vec<f64> = (0..ELEMENTS).map(|col| element("x", row, col)).collect();
                            (values.clone(), values.into_iter().map(f64::abs).collect())
                        }
                        Source::Made { block, dg, .. } => {
                            made[self.cluster.number(self.cluster.at(at, Offset::local(dg)))][block as usize].clone()
                        }
                    };
                    sum.0.iter_mut().zip(block.0).for_each(|(sum, value)| *sum += value);
                    sum.1.iter_mut().zip(block.1).for_each(|(sum, value)| *sum += value);
                }
                let to = match step.make {
                    Make::Copy(to) => Offset::local(to),
                    Make::Sum => Offset::ME,
                    Make::Put(to) => Offset::node(to),
                };
                results.push((self.cluster.number(self.cluster.at(at, to)), sum));
            }
            for (to, sum) in results {
                made[to][step.block as usize] = sum;
            }
        }
        let mine = &made[self.cluster.number(rank)];
        vec![Expected {
            region: Region::contiguous(Y, 0, self.outputs.len() as u32, BYTES as u32),
            values: mine.iter().flat_map(|block| block.0.clone()).collect(),
            magnitudes: mine.iter().flat_map(|block| block.1.clone()).collect(),
            roundings: self.steps.len() as u32,
        }]
    }
}

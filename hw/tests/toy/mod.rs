//! A kernel made of lists of tasks, and the tasks that such lists are made of.

use smallvec::{SmallVec, smallvec};
use tilewire_hw::values::{Config, ExecError, Report, Scheduler, run};
use tilewire_kernels::kernel::{Element, Expected, Slice};
use tilewire_kernels::options::{OptionSpec, Value};
use tilewire_kernels::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, DType, Engine, FamilyId, Flag, FlagFamily, GatherEntry, Launch, Op, Place,
    Publish, Region, Role, Symmetry, TaskSource, Wait,
};
use tilewire_kernels::{
    BuildError, Cluster, Fabric, Kernel, OptionSet, Options, Problem, ProblemKind, Rank, RoleKind, Schedule, Spec, Task,
};

pub const X: BufferId = BufferId(0);
pub const Y: BufferId = BufferId(1);
pub const TMP: BufferId = BufferId(2);
pub const F: FamilyId = FamilyId(0);
pub const ARRIVED: FamilyId = FamilyId(1);
pub const SENT: FamilyId = FamilyId(2);

/// Elements of x and y on each rank: 8 rows of 16.
pub const ROWS: u64 = 8;
pub const COLS: u64 = 16;
pub const ROW_BYTES: u64 = COLS * 2;
pub const BYTES: u64 = ROWS * ROW_BYTES;

pub type Lists = fn(Rank) -> Vec<Vec<Task>>;

/// Expected elements of y, in rows of `COLS`, from the elements of tensor x: row, column, `x(row, col)`.
pub type Want = fn(Cluster, Rank, u64, u64, &dyn Fn(u64, u64) -> f64) -> f64;

/// A kernel made of lists, one for each of the four role kinds; x holds rows `8 * rank ..` of tensor "x".
pub struct Toy {
    pub cluster: (u16, u16),
    pub fabric: Fabric,
    pub lists: Lists,
    /// Rows of y.
    pub rows: u64,
    pub want: Want,
}

struct Source(Lists);

impl TaskSource for Source {
    fn tasks(&self, rank: Rank, _launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        (self.0)(rank).into_iter().nth(role).into_iter().flatten().for_each(sink);
    }

    fn table(&self, _rank: Rank) -> Vec<Option<GatherEntry>> {
        vec![Some(GatherEntry { dg: 1, row: 5 }), None, Some(GatherEntry { dg: 0, row: 2 })]
    }
}

impl Kernel for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn summary(&self) -> &'static str {
        "lists"
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

    fn build(&self, spec: &Spec) -> Result<Schedule, BuildError> {
        let buffer = |name: &str, bytes, usage| Buffer { name: name.into(), bytes, dtype: DType::Bf16, usage };
        let family = |name: &str| FlagFamily { name: name.into(), slots: 8 };
        let role = |kind| Role::new(kind, Claim::Ticket);
        let roles = RoleKind::ALL.into_iter().take((self.lists)(Rank { node: 0, gpu: 0 }).len()).map(role).collect();
        Ok(Schedule {
            kernel: "toy".into(),
            cluster: spec.cluster,
            fabric: spec.fabric,
            spec: String::new(),
            buffers: vec![
                buffer("x", BYTES, BufferUse::Input),
                buffer("y", self.rows * ROW_BYTES, BufferUse::Output),
                buffer("tmp", 4 * BYTES, BufferUse::Scratch),
            ],
            flags: vec![family("f"), family("arrived"), family("sent")],
            launches: vec![Launch { name: "main".into(), after: vec![], roles }],
            symmetry: Symmetry::NONE,
            useful_flops: 0,
            source: Box::new(Source(self.lists)),
        })
    }

    fn inputs(&self, spec: &Spec, rank: Rank) -> Vec<Slice> {
        let row = spec.cluster.number(rank) as u64 * ROWS;
        vec![Slice { tensor: "x", row, col: 0, rows: ROWS, cols: COLS, region: rows(X, 0, ROWS) }]
    }

    fn reference(&self, spec: &Spec, rank: Rank, element: &Element<'_>) -> Vec<Expected> {
        let x = |row, col| element("x", row, col);
        let at = |i: u64| (self.want)(spec.cluster, rank, i / COLS, i % COLS, &x);
        let values: Vec<f64> = (0..self.rows * COLS).map(at).collect();
        let magnitudes = values.iter().map(|value| value.abs().max(0.01)).collect();
        vec![Expected { region: rows(Y, 0, self.rows), values, magnitudes, roundings: 2 }]
    }
}

impl Toy {
    pub fn new(cluster: (u16, u16), lists: Lists, want: Want) -> Self {
        Self { cluster, fabric: Fabric::IbRc, lists, rows: ROWS, want }
    }

    fn spec(&self) -> Spec {
        Spec {
            problem: Problem::Gemm { m: 1, n: 1, k: 1 },
            cluster: Cluster { nodes: self.cluster.0, gpus_per_node: self.cluster.1 },
            fabric: self.fabric,
            options: Options::new("toy", &[], |_| Value::Bool(false)),
        }
    }

    pub fn schedule(&self) -> Schedule {
        self.build(&self.spec()).expect("a toy builds")
    }

    pub fn run(&self, config: &Config) -> Result<Report, ExecError> {
        run(&self.schedule(), self, &self.spec(), config)
    }

    /// Runs under many seeds; every one must be right and free of races.
    pub fn is_right(&self) {
        for seed in 0..20 {
            for scheduler in [Scheduler::Random, Scheduler::Laggards, Scheduler::ReorderedPuts] {
                match self.run(&Config { seed, scheduler, ..Config::default() }) {
                    Ok(report) => assert!(report.races.is_empty(), "{}", report.races[0]),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    /// What goes wrong under some of the seeds: races by signature, and whether a value is wrong.
    pub fn goes_wrong(&self) -> (Vec<String>, bool) {
        let (mut races, mut wrong) = (Vec::new(), false);
        for seed in 0..40 {
            let found = match self.run(&Config { seed, ..Config::default() }) {
                Ok(report) => report.races,
                Err(ExecError::Wrong(_, races)) => {
                    wrong = true;
                    races
                }
                Err(error) => panic!("{error}"),
            };
            races.extend(found.iter().map(tilewire_hw::values::Race::signature));
        }
        races.sort();
        races.dedup();
        (races, wrong)
    }
}

/// `count` rows of 16 elements.
pub fn rows(buffer: BufferId, first: u64, count: u64) -> Region {
    Region::contiguous(buffer, first * ROW_BYTES, count as u32, ROW_BYTES as u32)
}

pub fn copy(src: Place, dst: Place) -> Task {
    let dsts = smallvec![dst];
    Task::new(Op::Copy { src, dsts, engine: Engine::Bulk, in_flight_bytes: 1024, load_store_overlap: true })
}

pub fn reduce(inputs: &[Place], output: Place) -> Task {
    Task::new(Op::Reduce { inputs: SmallVec::from_slice(inputs), outputs: smallvec![output], in_flight_bytes: 1024 })
}

pub fn put(publish: Publish, sent: bool) -> Task {
    Task::new(Op::Put {
        src: rows(X, 0, ROWS),
        dst: Place { at: At::node(1), region: rows(TMP, 0, ROWS) },
        queue: 0,
        publish,
        arrived: Flag { family: ARRIVED, slot: 0 },
        sent: sent.then_some(Flag { family: SENT, slot: 0 }),
    })
}

/// The copy of what a put brought.
pub fn landed() -> Task {
    copy(Place::me(rows(TMP, 0, ROWS)), Place::me(rows(Y, 0, ROWS))).wait(Wait::on(ARRIVED, 0, 1))
}

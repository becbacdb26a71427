//! Every kernel of the registry on small clusters and shapes, for suites that are written once.

use tilewire_kernels::schedule::{GatherEntry, TaskSource};
use tilewire_kernels::{
    BuildError, Cluster, Fabric, KERNELS, Kernel, OptionSet, Problem, ProblemKind, Rank, Schedule, Spec, Task,
};

/// Clusters as nodes x GPUs.
pub const CLUSTERS: [(u16, u16); 8] = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1)];

/// Options that make small shapes legal, where a kernel lists them.
const SMALL: &[(&str, &str)] = &[
    ("tile_m", "8"),
    ("tile_n", "16"),
    ("tile_k", "8"),
    ("tile_q", "8"),
    ("tile_kv", "8"),
    ("chunk_tiles", "2"),
    ("chunk_rows", "16"),
    ("slice_tokens", "4"),
    ("put_bytes", "480"),
];

/// A kernel with a small spec that it can build.
pub struct Case {
    pub kernel: &'static dyn Kernel,
    pub set: OptionSet,
    pub spec: Spec,
}

impl Case {
    pub fn name(&self) -> String {
        let Spec { cluster, fabric, problem, .. } = &self.spec;
        format!("{} {} {cluster} {fabric} {problem}", self.kernel.name(), self.set.name())
    }
}

/// Small problems of a kind, the first that a kernel can build is taken.
fn problems(kind: ProblemKind, cluster: Cluster) -> Vec<Problem> {
    let ranks = cluster.ranks() as u64;
    match kind {
        ProblemKind::Gemm => [16, 32, 64].map(|rows| Problem::Gemm { m: rows * ranks, n: 64, k: 32 }).to_vec(),
        ProblemKind::Moe => [(16, 2), (32, 2), (32, 1)]
            .map(|(tokens, experts)| Problem::Moe {
                tokens: tokens * ranks,
                hidden: 32,
                inter: 32,
                topk: (experts * ranks).min(4),
                experts: experts * ranks,
            })
            .to_vec(),
        ProblemKind::Attention => {
            [32, 64].map(|rows| Problem::Attention { seq: rows * ranks, batch: 1, heads: 2, head_dim: 16 }).to_vec()
        }
    }
}

/// The small case of a kernel, if the option set permits one on this cluster.
pub fn case(kernel: &'static dyn Kernel, set: OptionSet, cluster: Cluster, fabric: Fabric) -> Result<Case, BuildError> {
    let mut refused = None;
    for problem in problems(kernel.problem_kind(), cluster) {
        let mut options = kernel.options(set, &problem, cluster);
        for (name, value) in SMALL {
            // A kernel that does not list the option has no such tile.
            let _ = options.set(name, value);
        }
        let spec = Spec { problem, cluster, fabric, options };
        match kernel.build(&spec) {
            Ok(_) => return Ok(Case { kernel, set, spec }),
            Err(error) => {
                refused.get_or_insert(error);
            }
        }
    }
    Err(refused.expect("every kind has a problem"))
}

/// All cases of an option set on one fabric. A refusal to build fails the suite unless it says `Unsupported`.
pub fn cases(set: OptionSet, fabric: Fabric) -> Vec<Case> {
    let mut cases = Vec::new();
    for &kernel in KERNELS {
        for (nodes, gpus_per_node) in CLUSTERS {
            match case(kernel, set, Cluster { nodes, gpus_per_node }, fabric) {
                Ok(case) => cases.push(case),
                Err(BuildError::Unsupported { .. }) => {}
                Err(error) => {
                    panic!("no small case for {} {} {nodes}x{gpus_per_node}: {error}", kernel.name(), set.name())
                }
            }
        }
    }
    cases
}

/// The tasks of another source, changed role by role.
struct Changed<F> {
    source: Box<dyn TaskSource>,
    change: F,
}

impl<F: Fn(Rank, usize, usize, &mut Vec<Task>) + Send + Sync> TaskSource for Changed<F> {
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        let mut tasks = Vec::new();
        self.source.tasks(rank, launch, role, &mut |task| tasks.push(task));
        (self.change)(rank, launch, role, &mut tasks);
        tasks.into_iter().for_each(sink);
    }

    fn table(&self, rank: Rank) -> Vec<Option<GatherEntry>> {
        self.source.table(rank)
    }
}

/// The schedule with `change(rank, launch, role, tasks)` applied to every list.
pub fn changed(
    schedule: Schedule,
    change: impl Fn(Rank, usize, usize, &mut Vec<Task>) + Send + Sync + 'static,
) -> Schedule {
    let Schedule { source, .. } = schedule;
    Schedule { source: Box::new(Changed { source, change }), ..schedule }
}

//! The unfused baselines, one launch after the other and chunked, executed with real values.

use tilewire_hw::values::{Config, Scheduler, run};
use tilewire_kernels::check::check;
use tilewire_kernels::{
    Cluster, Fabric, KERNELS, OptionSet, Problem, ProblemKind, RoleKind, RoleSplit, Spec, baseline,
};

const SCHEDULERS: [Scheduler; 4] = [
    Scheduler::RoundRobin,
    Scheduler::Random,
    Scheduler::Starve(RoleKind::Compute),
    Scheduler::Starve(RoleKind::IntraComm),
];

const CLUSTERS: [(u16, u16); 6] = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (3, 2)];

fn problem(kind: ProblemKind, ranks: u64) -> Problem {
    match kind {
        ProblemKind::Gemm => Problem::Gemm { m: 32 * ranks, n: 48, k: 16 },
        ProblemKind::Moe => Problem::Moe { tokens: 20 * ranks, hidden: 32, inter: 32, topk: 2, experts: 4 * ranks },
        ProblemKind::Attention => Problem::Attention { seq: 16 * ranks, batch: 2, heads: 2, head_dim: 8 },
    }
}

fn small(kind: ProblemKind) -> &'static [(&'static str, &'static str)] {
    match kind {
        ProblemKind::Gemm => &[("tile_m", "8"), ("tile_n", "16"), ("tile_k", "8"), ("super_m", "3")],
        ProblemKind::Moe => &[("tile_m", "24"), ("tile_n", "16"), ("tile_k", "16"), ("super_m", "2")],
        ProblemKind::Attention => &[("tile_q", "8"), ("tile_kv", "8")],
    }
}

/// Every baseline on every cluster with these options, under one scheduler each.
fn suite(options: &[(&str, &str)]) {
    for (i, fused) in KERNELS.iter().enumerate() {
        let kernel = baseline(fused.name()).expect("every kernel has a baseline");
        for (j, (nodes, gpus_per_node)) in CLUSTERS.into_iter().enumerate() {
            let cluster = Cluster { nodes, gpus_per_node };
            let problem = problem(kernel.problem_kind(), cluster.ranks() as u64);
            let set = if (i + j) % 2 == 0 { OptionSet::Tilewire } else { OptionSet::Published };
            let mut chosen = kernel.options(set, &problem, cluster);
            for (name, value) in small(kernel.problem_kind()).iter().chain(options) {
                // Routing is an option of one kernel only.
                if kernel.option_specs().iter().any(|spec| spec.name == *name) {
                    chosen.set(name, value).expect("a legal value");
                }
            }
            let spec = Spec { problem, cluster, fabric: Fabric::EfaSrd, options: chosen };
            let name = format!("{} {cluster} {}", kernel.name(), spec.options);
            let schedule = kernel.build(&spec).unwrap_or_else(|error| panic!("{name}: {error}"));
            let findings = check(&schedule, Some(&RoleSplit::default()));
            assert!(findings.is_empty(), "{name}\n{}", findings[0]);
            let config = Config {
                split: RoleSplit::default(),
                sms: 5,
                seed: (7 * i + j) as u64,
                scheduler: SCHEDULERS[(i + j) % 4],
                ..Config::default()
            };
            let report = run(&schedule, kernel, &spec, &config).unwrap_or_else(|error| panic!("{name}\n{error}"));
            assert!(report.races.is_empty(), "{name}\n{}", report.races[0]);
        }
    }
}

#[test]
fn sequential_baselines_are_right() {
    suite(&[("collective_ctas", "2")]);
}

#[test]
fn chunked_baselines_are_right() {
    suite(&[("collective_ctas", "2"), ("chunks", "2")]);
    suite(&[("collective_ctas", "1"), ("chunks", "4")]);
}

/// Uneven pairs of ranks: parts are padded, and ranks get different numbers of rows.
#[test]
fn token_copies_arrive_under_every_routing() {
    for routing in ["uniform", "rotated", "multinomial"] {
        for chunks in ["1", "2", "4"] {
            suite(&[("collective_ctas", "2"), ("routing", routing), ("routing_seed", "5"), ("chunks", chunks)]);
        }
    }
}

#[test]
fn a_name_without_a_kernel_has_no_baseline() {
    assert!(baseline("gemm").is_none());
}

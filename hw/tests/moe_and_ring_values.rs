//! `moe_dispatch_gemm` and `ring_attention` in every form that their options name, executed with real values.

use tilewire_hw::values::{Config, ExecError, Report, Scheduler, run};
use tilewire_kernels::{Cluster, Fabric, OptionSet, Problem, RoleKind, RoleSplit, Spec, kernel};

const SCHEDULERS: [Scheduler; 8] = [
    Scheduler::RoundRobin,
    Scheduler::Random,
    Scheduler::DelayedPuts,
    Scheduler::ReorderedPuts,
    Scheduler::Starve(RoleKind::Compute),
    Scheduler::Starve(RoleKind::IntraComm),
    Scheduler::Starve(RoleKind::InterSend),
    Scheduler::Starve(RoleKind::InterReduce),
];

const FABRICS: [Fabric; 3] = [Fabric::IbRc, Fabric::EfaSrd, Fabric::Loopback];

const MOE: &[(&str, &str)] = &[
    ("tile_m", "16"),
    ("tile_n", "32"),
    ("tile_k", "16"),
    ("slice_tokens", "4"),
    // Less than four tokens and no whole number of them, so that some span two puts.
    ("put_bytes", "208"),
];

const RING: &[(&str, &str)] = &[("tile_q", "8"), ("tile_kv", "8"), ("chunk_rows", "16")];

fn moe(ranks: u64) -> Problem {
    Problem::Moe { tokens: 24 * ranks, hidden: 32, inter: 64, topk: 2, experts: 2 * ranks }
}

fn attention(ranks: u64) -> Problem {
    Problem::Attention { seq: 32 * ranks, batch: 1, heads: 3, head_dim: 8 }
}

struct Variant<'a> {
    kernel: &'static str,
    set: OptionSet,
    nodes: u16,
    gpus: u16,
    fabric: Fabric,
    options: &'a [(&'static str, &'static str)],
}

fn execute(variant: &Variant<'_>, ctas: u32, seed: u64, scheduler: Scheduler) -> Result<Report, ExecError> {
    let kernel = kernel(variant.kernel).expect("registered");
    let cluster = Cluster { nodes: variant.nodes, gpus_per_node: variant.gpus };
    let ranks = cluster.ranks() as u64;
    let (problem, small) =
        if variant.kernel == "ring_attention" { (attention(ranks), RING) } else { (moe(ranks), MOE) };
    let mut options = kernel.options(variant.set, &problem, cluster);
    for (name, value) in small.iter().chain(variant.options) {
        options.set(name, value).expect("a legal value");
    }
    let spec = Spec { problem, cluster, fabric: variant.fabric, options };
    let schedule = kernel.build(&spec).expect("a small shape builds");
    let split = RoleSplit { compute: ctas, intra_comm: ctas, inter_send: ctas, inter_reduce: ctas };
    let config = Config { split, sms: 2 * ctas, seed, scheduler, ..Config::default() };
    run(&schedule, kernel, &spec, &config)
}

/// Every scheduler and fabric in turn, with 1, 2 and 3 CTAs per role.
fn for_each_run(
    (kernel, set): (&'static str, OptionSet),
    clusters: &[(u16, u16)],
    options: &[(&'static str, &'static str)],
    mut judge: impl FnMut(&str, Result<Report, ExecError>),
) {
    for (i, &(nodes, gpus)) in clusters.iter().enumerate() {
        for (j, scheduler) in SCHEDULERS.into_iter().enumerate() {
            let (fabric, ctas, seed) =
                (FABRICS[(i + j) % 3], [1, 2, 3, 3, 2, 1, 2][(i + 2 * j) % 7], (i * 8 + j) as u64);
            let variant = Variant { kernel, set, nodes, gpus, fabric, options };
            let name = format!("{kernel} {} {nodes}x{gpus} {fabric} {options:?} {ctas} CTAs {scheduler:?}", set.name());
            judge(&name, execute(&variant, ctas, seed, scheduler));
        }
    }
}

fn clean(name: &str, result: Result<Report, ExecError>) {
    match result {
        Ok(report) => assert!(report.races.is_empty(), "{name}\n{}", report.races[0]),
        Err(error) => panic!("{name}\n{error}"),
    }
}

const ALL: [(u16, u16); 7] = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2)];

#[test]
fn tilewire_moe_is_right_under_every_routing() {
    for routing in ["rotated", "uniform", "multinomial"] {
        for_each_run(("moe_dispatch_gemm", OptionSet::Tilewire), &ALL, &[("routing", routing)], clean);
    }
}

#[test]
fn published_moe_is_right_under_every_routing() {
    for routing in ["rotated", "uniform", "multinomial"] {
        let options = [("routing", routing), ("efa_publish", "immediate")];
        for_each_run(("moe_dispatch_gemm", OptionSet::Published), &ALL, &options, clean);
    }
}

#[test]
fn moe_readiness_and_order_combine_freely() {
    let clusters = [(2, 2), (3, 2)];
    for readiness in ["per_chunk", "prefix"] {
        for order in ["sender", "arrival"] {
            for passes in ["1", "3"] {
                let options = [("readiness", readiness), ("token_order", order), ("remote_passes", passes)];
                for_each_run(("moe_dispatch_gemm", OptionSet::Tilewire), &clusters, &options, clean);
            }
        }
    }
}

#[test]
fn true_ring_is_right() {
    for_each_run(("ring_attention", OptionSet::Tilewire), &ALL, &[], clean);
}

/// From four nodes on landing buffers are used again, so that credits between nodes matter.
#[test]
fn true_ring_reuses_landing_buffers() {
    for_each_run(("ring_attention", OptionSet::Tilewire), &[(4, 1), (4, 2), (5, 1), (6, 1)], &[], clean);
}

#[test]
fn true_ring_with_one_chunk_per_head_is_right() {
    for_each_run(("ring_attention", OptionSet::Tilewire), &[(1, 3), (2, 3), (4, 2)], &[("chunk_rows", "32")], clean);
}

/// Nothing protects the sources of puts: with more than one node a run may be wrong, but it ends.
#[test]
fn published_ring_ends_and_one_node_is_right() {
    for nvls in ["true", "false"] {
        let options = [("nvls", nvls)];
        for_each_run(("ring_attention", OptionSet::Published), &[(1, 1), (1, 2), (1, 3), (1, 4)], &options, clean);
        let clusters = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1), (4, 2)];
        for_each_run(("ring_attention", OptionSet::Published), &clusters, &options, |name, result| match result {
            Ok(_) | Err(ExecError::Wrong(..)) => {}
            Err(error) => panic!("{name}\n{error}"),
        });
    }
}

#[test]
fn published_ring_overwrites_the_sources_of_its_puts() {
    let mut races = Vec::new();
    for_each_run(("ring_attention", OptionSet::Published), &[(2, 2)], &[], |_, result| match result {
        Ok(report) => races.extend(report.races),
        Err(ExecError::Wrong(_, found)) => races.extend(found),
        Err(error) => panic!("{error}"),
    });
    let found: Vec<String> = races.iter().map(tilewire_hw::values::Race::signature).collect();
    assert!(found.iter().any(|race| race == "k: copy write / put read"), "{found:?}");
}

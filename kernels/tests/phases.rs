//! Bulk-synchronous forms: the same tasks by turns, which the checker accepts.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::cases;
use std::collections::BTreeMap;
use tilewire_kernels::check::{Limits, report};
use tilewire_kernels::{Fabric, OptionSet, Rank, RoleKind, Schedule, bulk_synchronous};

/// Tasks by kind of role, as text, in the order of their lists.
fn tasks(schedule: &Schedule, rank: Rank) -> BTreeMap<RoleKind, Vec<String>> {
    let mut all: BTreeMap<RoleKind, Vec<String>> = BTreeMap::new();
    for (launch, role) in schedule.role_indices() {
        let kind = schedule.launches[launch].roles[role].kind;
        let tasks = all.entry(kind).or_default();
        schedule.for_each_task(rank, launch, role, |task| tasks.push(format!("{task:?}")));
    }
    for tasks in all.values_mut() {
        tasks.sort_unstable();
    }
    all.retain(|_, tasks| !tasks.is_empty());
    all
}

#[test]
fn phases_hold_every_task_once_and_take_turns() {
    let mut phased = 0;
    for case in cases(OptionSet::Tilewire, Fabric::IbRc) {
        let build = || case.kernel.build(&case.spec).expect("a small case builds");
        let fused = build();
        let Ok(schedule) = bulk_synchronous(build()) else {
            assert!(!fused.symmetry.is_full() || fused.launches.len() > 1, "{} is refused", case.name());
            continue;
        };
        phased += 1;
        for rank in schedule.cluster.iter() {
            assert_eq!(tasks(&schedule, rank), tasks(&fused, rank), "{}", case.name());
        }
        let computes: Vec<bool> = schedule
            .launches
            .iter()
            .map(|launch| {
                let computes = |role: &tilewire_kernels::schedule::Role| role.kind == RoleKind::Compute;
                assert!(
                    launch.roles.iter().all(|role| computes(role) == computes(&launch.roles[0])),
                    "{}",
                    case.name()
                );
                computes(&launch.roles[0])
            })
            .collect();
        assert!(computes.windows(2).all(|pair| pair[0] != pair[1]), "{}: {computes:?}", case.name());
        assert_eq!(schedule.launches.len() > 1, tasks(&fused, Rank { node: 0, gpu: 0 }).len() > 1, "{}", case.name());
        let report = report(&schedule, &Limits::hopper(132), None);
        assert!(report.findings.is_empty(), "{}: {}", case.name(), report.findings[0]);
    }
    assert!(phased >= 20, "{phased} cases");
}

#[test]
fn a_fused_gemm_with_its_all_gather_has_two_phases() {
    let kernel = tilewire_kernels::kernel("ag_gemm").expect("a kernel");
    let problem = tilewire_kernels::Problem::Gemm { m: 4096, n: 512, k: 4096 };
    let cluster = tilewire_kernels::Cluster { nodes: 1, gpus_per_node: 8 };
    let options = kernel.options(OptionSet::Tilewire, &problem, cluster);
    let spec = tilewire_kernels::Spec { problem, cluster, fabric: Fabric::Loopback, options };
    let schedule = bulk_synchronous(kernel.build(&spec).expect("it builds")).expect("its ranks are alike");
    let names: Vec<&str> = schedule.launches.iter().map(|launch| launch.name.as_str()).collect();
    assert_eq!(names, ["0_communicate", "1_compute"]);
    assert_eq!(schedule.launches[1].after, [0]);
}

/// Each phase comes after all before it: there are 2^(phases - 2) ways from the last one back to the first.
#[test]
fn the_many_phases_of_a_ring_over_64_ranks_are_checked_at_once() {
    let kernel = tilewire_kernels::kernel("ring_attention").expect("a kernel");
    let problem = tilewire_kernels::Problem::Attention { seq: 64 * 384, batch: 1, heads: 1, head_dim: 128 };
    let cluster = tilewire_kernels::Cluster { nodes: 8, gpus_per_node: 8 };
    let options = kernel.options(OptionSet::Tilewire, &problem, cluster);
    let spec = tilewire_kernels::Spec { problem, cluster, fabric: Fabric::IbRc, options };
    let schedule = bulk_synchronous(kernel.build(&spec).expect("it builds")).expect("its ranks are alike");
    assert!(schedule.launches.len() > 50, "{} phases", schedule.launches.len());
    let report = report(&schedule, &Limits::hopper(132), None);
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
}

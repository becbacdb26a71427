//! Every variant of ag_gemm and gemm_ar with real values.

#[path = "../../kernels/tests/gemm_family/case.rs"]
mod case;

use case::{Case, variants};
use std::collections::BTreeSet;
use tilewire_hw::values::{Config, ExecError, Race, Scheduler, run};
use tilewire_kernels::{Fabric, OptionSet, RoleKind, RoleSplit, kernel};

const SCHEDULERS: [Scheduler; 7] = [
    Scheduler::Random,
    Scheduler::ReorderedPuts,
    Scheduler::Starve(RoleKind::InterReduce),
    Scheduler::DelayedPuts,
    Scheduler::Starve(RoleKind::IntraComm),
    Scheduler::RoundRobin,
    Scheduler::Starve(RoleKind::Compute),
];

/// The published sets on EFA write flags that nothing orders after the data.
fn is_hazardous(case: &Case) -> bool {
    (case.set, case.fabric) == (OptionSet::Published, Fabric::EfaSrd) && case.cluster.0 > 1
}

/// Runs a case and returns the races seen.
fn races(case: &Case, ctas: u32, scheduler: Scheduler, seed: usize) -> BTreeSet<String> {
    let split = RoleSplit { compute: ctas, intra_comm: ctas, inter_send: ctas, inter_reduce: ctas };
    let config = Config { split, sms: 4 * ctas, seed: seed as u64, scheduler, ..Config::default() };
    let schedule = case.build();
    let spec = case.spec();
    let found = match run(&schedule, kernel(case.kernel).expect("in the registry"), &spec, &config) {
        Ok(report) => report.races,
        Err(ExecError::Wrong(_, found)) if is_hazardous(case) => found,
        Err(error) => panic!("{} {} {}: {config:?}\n{error}", schedule.kernel, schedule.cluster, schedule.spec),
    };
    found.iter().map(Race::signature).collect()
}

/// Every variant once, with fabrics, schedulers and 1, 2 or 3 CTAs per role in turn.
fn suite(kernel: &'static str) {
    let fabrics = [Fabric::IbRc, Fabric::EfaSrd, Fabric::Loopback];
    for (seed, mut case) in variants(kernel, Fabric::IbRc).into_iter().enumerate() {
        // Counters of different periods, so that a variant meets another combination on each cluster.
        case.fabric = fabrics[seed / 5 % 3];
        if case.cluster.0 * case.cluster.1 > 6 {
            // The suite over the registry runs larger clusters, and the static checker all of these.
            continue;
        }
        let found = races(&case, 1 + seed as u32 / 7 % 3, SCHEDULERS[seed % SCHEDULERS.len()], seed);
        assert!(found.is_empty() || is_hazardous(&case), "{:?} {:?}: {found:?}", case.cluster, case.options);
    }
}

#[test]
fn every_variant_of_ag_gemm_is_right_and_free_of_races() {
    suite("ag_gemm");
}

#[test]
fn every_variant_of_gemm_ar_is_right_and_free_of_races_but_for_unordered_flags() {
    suite("gemm_ar");
}

#[test]
fn every_variant_of_gemm_rs_is_right_and_free_of_races_under_every_scheduler() {
    let cases = variants("gemm_rs", Fabric::EfaSrd).into_iter().filter(|case| case.set == OptionSet::Tilewire);
    for (seed, case) in cases.filter(|case| case.cluster.0 * case.cluster.1 <= 6).enumerate() {
        for (turn, scheduler) in SCHEDULERS.into_iter().enumerate() {
            let found = races(&case, 1 + (seed + turn) as u32 % 3, scheduler, seed);
            assert!(found.is_empty(), "{:?} {:?} {scheduler:?}: {found:?}", case.cluster, case.options);
        }
    }
}

#[test]
fn a_separately_written_flag_overtakes_its_data_on_efa() {
    let cases = variants("gemm_ar", Fabric::EfaSrd);
    let hazardous = cases.iter().filter(|case| is_hazardous(case)).take(3);
    let found: BTreeSet<String> =
        hazardous.flat_map(|case| (0..4).flat_map(|seed| races(case, 2, Scheduler::Random, seed))).collect();
    assert!(found.contains("landing: put write / reduce read"), "{found:?}");
}

//! What `efa-srd` schedules rely on, over a stand-in that reorders and delays; no EFA hardware is met here.

use super::double::{Fabric as Double, Guarantee};
use super::small::cases;
use super::{execute, split, succeed, two_by_two};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use tilewire_hw::host::{HostConfig, HostError};
use tilewire_hw::values::ExecError;
use tilewire_kernels::{Fabric, OptionSet};

#[test]
fn every_kernel_computes_right_values_without_any_order() {
    let mut overtaken = 0;
    for (turn, case) in cases(OptionSet::Tilewire, Fabric::EfaSrd).iter().enumerate() {
        let cluster = case.spec.cluster;
        if cluster.nodes == 1 || cluster.ranks() > 6 {
            continue;
        }
        let double = OnceLock::new();
        let config = HostConfig { split: split(2), seed: turn as u64, fifo_depth: 4, runs: 3, ..HostConfig::default() };
        succeed(case, config, |rank, _, segments| {
            Ok(double.get_or_init(|| Double::new(segments, Guarantee::ImmediateAfterData, turn as u64)).wires(rank))
        });
        overtaken += double.get().map_or(0, |double| double.overtaken.load(Ordering::Relaxed));
    }
    assert!(overtaken > 0, "nothing was reordered: the suite proves nothing");
}

#[test]
fn an_immediate_before_its_data_shows_as_wrong_values() {
    let case = two_by_two("gemm_rs", OptionSet::Tilewire, Fabric::EfaSrd);
    let schedule = case.kernel.build(&case.spec).expect("builds");
    let wrong = (0..20u64).any(|seed| {
        let double = OnceLock::new();
        let config = HostConfig { seed, runs: 1, ..HostConfig::default() };
        let ranks = execute(&schedule, &case, config, |rank, _, segments| {
            Ok(double.get_or_init(|| Double::new(segments, Guarantee::Nothing, seed)).wires(rank))
        });
        ranks.iter().any(|rank| matches!(rank, Err(HostError::Exec(ExecError::Wrong(..)))))
    });
    assert!(wrong, "a fabric that tells too early computed right values 20 times");
}

#[test]
fn immediates_in_place_of_flag_writes_need_no_order() {
    let case = two_by_two("gemm_ar", OptionSet::Tilewire, Fabric::IbRc);
    let double = OnceLock::new();
    let reports = succeed(&case, HostConfig { runs: 3, ..HostConfig::default() }, |rank, _, segments| {
        let mut wires = double.get_or_init(|| Double::new(segments, Guarantee::ImmediateAfterData, 11)).wires(rank);
        wires.told.by_immediates = true;
        Ok(wires)
    });
    for report in reports {
        assert!(report.served.arrivals > 0 && report.transport.ends_with("arrivals by immediates"), "{report:?}");
    }
}

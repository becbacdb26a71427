//! Every kernel of the registry with real threads over loopback, values checked.

use super::small::cases;
use super::{loopback, split, succeed, two_by_two};
use std::time::Duration;
use tilewire_hw::host::HostConfig;
use tilewire_hw::transport::loopback::Pacing;
use tilewire_kernels::{Fabric, OptionSet};

#[test]
fn gemm_rs_runs_end_to_end_on_two_nodes_of_two() {
    let case = two_by_two("gemm_rs", OptionSet::Tilewire, Fabric::IbRc);
    let reports = succeed(&case, HostConfig::default(), |rank, _, segments| Ok(loopback(rank, segments, 1, None)));
    assert_eq!(reports.len(), 4);
    for report in &reports {
        assert!(report.values.elements > 0 && report.served.commands > 0, "{report:?}");
        assert_eq!((report.values.runs, report.times_us.len()), (2, 2));
    }
}

#[test]
fn every_kernel_computes_right_values_over_loopback() {
    for (index, fabric) in [Fabric::IbRc, Fabric::Loopback].into_iter().enumerate() {
        for (turn, case) in cases(OptionSet::Tilewire, fabric).iter().enumerate() {
            if case.spec.cluster.ranks() > 4 {
                continue;
            }
            let ctas = 1 + (turn + index) as u32 % 3;
            // A FIFO of one command: every push but the first meets backpressure.
            let fifo_depth = [1, 64][turn % 2];
            let config = HostConfig {
                split: split(ctas),
                sms: 2 * ctas,
                seed: turn as u64,
                fifo_depth,
                ..HostConfig::default()
            };
            let proxies = 1 + turn % 2;
            let reports = succeed(case, config, |rank, _, segments| Ok(loopback(rank, segments, proxies, None)));
            let writes: u64 = reports.iter().map(|report| report.served.commands).sum();
            assert_eq!(writes > 0, case.spec.cluster.nodes > 1, "{}: {writes} writes", case.name());
        }
    }
}

#[test]
fn a_paced_wire_delays_its_writes_and_says_so() {
    let case = two_by_two("gemm_rs", OptionSet::Tilewire, Fabric::IbRc);
    let pacing = Pacing { latency: Duration::from_millis(20), bytes_per_s: 1 << 30, messages_per_s: 1 << 20 };
    let config = HostConfig { runs: 1, ..HostConfig::default() };
    let reports = succeed(&case, config, |rank, _, segments| Ok(loopback(rank, segments, 1, Some(pacing))));
    for report in reports {
        // A rank cannot end before the puts to it have arrived.
        assert!(report.times_us[0] >= 20_000.0, "{report:?}");
        assert!(report.transport.contains("paced to 20000 us"), "{}", report.transport);
    }
}

//! The host device, its proxies and transports, and the rendezvous of its ranks.

#[path = "../../../kernels/tests/small/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

mod behind;
mod bootstrap;
mod double;
mod exercise;
mod faults;
mod ring;
mod unordered;
mod values;

use small::Case;
use std::sync::Arc;
use tilewire_hw::host::{HostConfig, HostError, RankReport, Setup, Wires, run_threads};
use tilewire_hw::transport::loopback::{Loopback, Pacing};
use tilewire_hw::transport::segment::{Layout, Segment};
use tilewire_hw::transport::{Order, Transport};
use tilewire_kernels::{Cluster, Fabric, OptionSet, RoleSplit, Schedule, kernel};

/// The small 2x2 case of a kernel.
fn two_by_two(name: &str, set: OptionSet, fabric: Fabric) -> Case {
    let cluster = Cluster { nodes: 2, gpus_per_node: 2 };
    small::case(kernel(name).expect("registered"), set, cluster, fabric).expect("builds")
}

/// `ctas` CTAs in every role.
fn split(ctas: u32) -> RoleSplit {
    RoleSplit { compute: ctas, intra_comm: ctas, inter_send: ctas, inter_reduce: ctas }
}

/// Loopback proxies of a rank.
fn loopback(rank: usize, segments: &[Arc<Segment>], proxies: usize, pacing: Option<Pacing>) -> Wires {
    let peers: Vec<_> = segments.iter().cloned().map(Some).collect();
    let transport =
        |_| -> Box<dyn Transport> { Box::new(Loopback::new(segments[rank].clone(), peers.clone(), pacing)) };
    Wires::new(Order::Queue, (0..proxies).map(transport).collect())
}

/// Runs a schedule, built from a case, as threads; per rank what became of it.
fn execute(
    schedule: &Schedule,
    case: &Case,
    config: HostConfig,
    wires: impl Fn(usize, &Layout, &[Arc<Segment>]) -> Result<Wires, HostError> + Sync,
) -> Vec<Result<RankReport, HostError>> {
    let setup = Setup { schedule, kernel: case.kernel, spec: &case.spec, config };
    run_threads(&setup, wires).unwrap_or_else(|error| panic!("{}: {error}", case.name()))
}

/// As [`execute`], where every rank must do well.
fn succeed(
    case: &Case,
    config: HostConfig,
    wires: impl Fn(usize, &Layout, &[Arc<Segment>]) -> Result<Wires, HostError> + Sync,
) -> Vec<RankReport> {
    let schedule = case.kernel.build(&case.spec).expect("a small case builds");
    let ranks = execute(&schedule, case, config, wires);
    ranks.into_iter().map(|rank| rank.unwrap_or_else(|error| panic!("{}: {error}", case.name()))).collect()
}

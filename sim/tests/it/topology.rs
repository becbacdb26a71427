//! Oversubscribed leaf switches of a rail-optimised network.

use crate::support::*;
use tilewire_kernels::schedule::Claim;
use tilewire_kernels::{Fabric, RoleKind};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::{Config, Execution, Machine, SimError, engine};

/// Four nodes, two per leaf, links to the spine that carry half of what the nodes can send.
fn machine() -> Machine {
    with(
        round_machine(Fabric::IbRc),
        &[("network.nodes_per_leaf", 2.0), ("network.oversubscription", 2.0), ("nic.message_ns", 0.0)],
    )
}

/// Every node puts 250,000 bytes to the node `dn` ahead.
fn end(machine: &Machine, gpus: u16, dn: u16) -> Vec<u64> {
    let toy = Toy::on(cluster(4, gpus), vec![role(RoleKind::InterSend, Claim::Strided)]).symmetric();
    let toy = toy.tasks(move |_, _, _| vec![put(250_000, dn, 0, publish(Fabric::IbRc), 0, None)]);
    let compiled = Compiled::new(&toy, machine, &full()).expect("compiles");
    engine::run(&compiled, &split(0, 0, 1, 0), Form::Whole, false).expect("runs").rank_ends
}

#[test]
fn traffic_between_leaves_shares_the_uplinks() {
    // On the wire from 6.3 us on; 10 us alone, landing 10 us later.
    let alone = 26_300 * NS;
    for gpus in [1, 3] {
        // Two nodes (times GPUs) of a leaf send over an uplink that carries one: 20 us.
        assert_eq!(end(&machine(), gpus, 2), vec![alone + 10 * US; 4 * usize::from(gpus)], "{gpus} GPUs");
    }
    // dn = 1: nodes 0 and 2 reach a neighbour under their leaf; 1 and 3 have the uplink, wide enough for one, alone.
    assert_eq!(end(&machine(), 1, 1), [alone; 4]);
    // Fully provisioned, or all under one leaf, nothing is held back.
    for change in [("network.oversubscription", 1.0), ("network.nodes_per_leaf", 4.0)] {
        assert_eq!(end(&with(machine(), &[change]), 1, 2), [alone; 4]);
    }
}

#[test]
fn rails_have_planes_of_their_own() {
    // Two rails, a queue each: the second put does not cross the first one's uplink.
    let machine = with(machine(), &[("nic.rails", 2.0), ("proxy.threads", 2.0)]);
    let toy = Toy::on(cluster(4, 1), vec![role(RoleKind::InterSend, Claim::Strided)])
        .symmetric()
        .tasks(|_, _, _| (0..2).map(|q| put(250_000, 2, q, publish(Fabric::IbRc), u32::from(q), None)).collect());
    let compiled = Compiled::new(&toy, &machine, &full()).expect("compiles");
    let run = engine::run(&compiled, &split(0, 0, 2, 0), Form::Whole, false).expect("runs");
    assert_eq!(run.end, 36_300 * NS);
}

#[test]
fn nodes_are_not_folded() {
    let toy = Toy::on(cluster(4, 2), vec![role(RoleKind::InterSend, Claim::Strided)]).symmetric();
    let toy = toy.tasks(|_, _, _| vec![put(250_000, 2, 0, publish(Fabric::IbRc), 0, None)]);
    let run = |execution| {
        let compiled = Compiled::new(&toy, &machine(), &Config { execution, ..Config::default() })?;
        Ok((compiled.ranks.len(), engine::run(&compiled, &split(0, 0, 1, 0), Form::Whole, false)?.end))
    };
    assert!(matches!(run(Execution::Mirror), Err(SimError::NotSymmetric { .. })));
    // The GPUs of a node are alike; one stands for both, on its share of the uplink.
    assert_eq!(run(Execution::Folded), Ok((4, 36_300 * NS)));
    assert_eq!(run(Execution::Full), Ok((8, 36_300 * NS)));
}

//! Nothing beats its lower bound, and the number of pieces does not change what bandwidth decides.

use crate::support::*;
use tilewire_kernels::schedule::{At, Claim, Op, Wait};
use tilewire_kernels::{Fabric, RoleKind};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::predict::BoundBy;
use tilewire_sim::{Config, Prediction, Protocol, Simulation, engine};

#[test]
fn nothing_beats_bytes_over_bandwidth_and_flops_over_peak() {
    for machine in [shipped_machine("h200-efa"), shipped_machine("h200-cx7")] {
        for (nodes, gpus) in [(1, 4), (2, 2), (2, 4)] {
            for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1)) {
                let simulation = Simulation::new(&case.schedule, &machine, &full()).expect("compiles");
                for split in [case.usual_split(), case.split(2)] {
                    let run = simulation.run(&split, Form::Whole, false).expect("runs");
                    let (by, bound_us) = simulation.bound(&run);
                    let end_us = run.end as f64 / 1e6;
                    assert!(end_us >= bound_us * 0.999_999, "{}: {end_us} us beats {by:?} {bound_us} us", case.name);
                    check_by_hand(&case, &machine, end_us);
                }
                let isolated = Simulation::new(&case.schedule, &machine, &Config { protocol: ISOLATED, ..full() })
                    .expect("compiles");
                let Prediction { time_us, bound_by, bound_us, .. } =
                    isolated.predict(&case.usual_split()).expect("runs");
                let name = &case.name;
                assert!(
                    time_us >= bound_us * 0.999_999,
                    "isolated {name}: {time_us} us beats {bound_by:?} {bound_us} us"
                );
            }
        }
    }
}

/// Where a handful of chunks is all there is, posts and latencies decide, and a bound that counts what nobody waits for
/// shows: completions of the last puts, or arrivals of a launch before.
#[test]
fn nothing_beats_its_bound_however_small_it_is() {
    let protocols = [Protocol::Fair, LOOPED, ISOLATED];
    let configs: Vec<Config> = protocols
        .into_iter()
        .flat_map(|protocol| [None, Some(7)].map(|noise_seed| Config { protocol, noise_seed, ..full() }))
        .collect();
    let mut compared = 0;
    for name in ["h200-efa", "h200-cx7", "h200-1gpu"] {
        let machine = shipped_machine(name);
        for cluster in [cluster(1, 2), cluster(2, 1), cluster(4, 1), cluster(2, 2), cluster(8, 1)] {
            for case in SETS.into_iter().flat_map(|set| tiny_kernels(set, cluster, machine.fabric)) {
                for config in &configs {
                    let simulation = Simulation::new(&case.schedule, &machine, config).expect("compiles");
                    for ctas in [1, 4] {
                        let Prediction { time_us, bound_by, bound_us, .. } =
                            simulation.predict(&case.split(ctas)).expect("runs");
                        let (name, protocol) = (&case.name, config.protocol);
                        assert!(
                            bound_us <= time_us,
                            "{name} {protocol:?} by {ctas}: {time_us} us beats {bound_by:?} {bound_us} us"
                        );
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 1000, "only {compared}");
}

/// Sixteen commands of a thread, of which the last eight completions come after all is done.
#[test]
fn completions_that_nobody_waits_for_bound_nothing() {
    let proxy = [("proxy.in_flight", 8.0), ("proxy.fifo_depth", 64.0), ("proxy.push_ns", 100.0)];
    let machine = with(round_machine(Fabric::IbRc), &proxy);
    let bound = |sent: bool| {
        let send = role(RoleKind::InterSend, Claim::Strided);
        let toy = Toy::on(cluster(2, 1), vec![send]).symmetric().tasks(move |_, _, _| {
            let puts = (0..16).map(|i| put(8, 1, 0, publish(Fabric::IbRc), i, sent.then_some(16)));
            let all_sent = sync().wait(Wait::on(FAMILY, 16, 16));
            puts.chain(sent.then_some(all_sent)).collect()
        });
        let simulation = Simulation::new(&toy, &machine, &full()).expect("compiles");
        let run = simulation.run(&split(0, 0, 1, 0), Form::Whole, false).expect("runs");
        let shared = simulation.bound(&run);
        assert!(shared.1 <= run.end as f64 / 1e6);
        shared
    };
    // 800 ns a post and 400 a completion.
    assert_eq!(bound(false), (BoundBy::Proxy, 16.0));
    assert_eq!(bound(true), (BoundBy::Proxy, 19.2));
}

/// The two bounds that need nothing from the simulator.
fn check_by_hand(case: &Case, machine: &tilewire_sim::Machine, end_us: f64) {
    let (mut flops, mut put_bytes) = (0_u64, 0_u64);
    let rank = case.schedule.cluster.rank(0);
    for (launch, role) in case.schedule.role_indices() {
        case.schedule.for_each_task(rank, launch, role, |task| match &task.op {
            Op::GemmTile { a, tile, .. } => flops += a.bytes() * u64::from(tile[1]),
            Op::Put { src, dst, .. } if dst.region.bytes() > 0 => put_bytes += src.bytes(),
            _ => {}
        });
    }
    let peak = machine.gpu.sms.value * machine.gemm.values().map(|g| g.sm_tflops.value).fold(0.0, f64::max);
    assert!(end_us >= flops as f64 / peak / 1e6, "{}: faster than the chip", case.name);
    let wire = machine.nic.rails.value * machine.nic.rail_gbs.value;
    assert!(end_us >= put_bytes as f64 / wire / 1e3, "{}: faster than the wire", case.name);
}

#[test]
fn chunks_of_a_copy_cost_their_latency_only() {
    // 64 MB over a link of 100 GB/s, 8 CTAs of 50 GB/s: the link decides.
    let machine = with(round_machine(Fabric::IbRc), &[("nvlink.egress_gbs", 100.0)]);
    let end = |chunks: u64| {
        let toy = Toy::node(2, vec![role(RoleKind::Compute, Claim::Ticket)])
            .tasks(move |_, _, _| vec![copy(At::ME, At::local(1), 64_000_000 / chunks); chunks as usize]);
        simulate(&toy, &machine, split(8, 0, 0, 0)).end
    };
    let coarse = end(8);
    for chunks in [16, 32, 64, 128, 256] {
        // A chunk's latency is 1 us of load; it may also round up by a picosecond.
        let own = chunks / 8 * (US + 1);
        assert!(end(chunks).abs_diff(coarse) <= own, "{chunks} chunks: {} against {coarse}", end(chunks));
    }
}

#[test]
fn chunks_of_a_put_cost_their_message_only() {
    for fabric in [Fabric::IbRc, Fabric::EfaSrd] {
        let machine = with(round_machine(fabric), &[("proxy.in_flight", 64.0), ("proxy.fifo_depth", 64.0)]);
        let end = |chunks: u32| {
            let toy =
                Toy::on(cluster(2, 1), vec![role(RoleKind::InterSend, Claim::Strided)]).fabric(fabric).symmetric();
            let toy = toy.tasks(move |_, _, _| {
                (0..chunks).map(|i| put(64_000_000 / u64::from(chunks), 1, 0, publish(fabric), i, None)).collect()
            });
            simulate(&toy, &machine, split(0, 0, 1, 0)).end
        };
        let one = end(1);
        for chunks in [2_u32, 4, 8, 16, 32] {
            let own = u64::from(chunks - 1) * 100 * NS + u64::from(chunks);
            let now = end(chunks);
            assert!(now >= one && now - one <= own, "{fabric} {chunks} chunks: {now} against {one}");
        }
    }
}

#[test]
fn compute_only_and_comm_only_do_not_exceed_the_whole_on_an_idle_machine() {
    let machine = shipped_machine("h200-efa");
    for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 2), machine.fabric, 1)) {
        let mut compiled = Compiled::new(&case.schedule, &machine, &full()).expect("compiles");
        // Without contention a form that does less takes no longer.
        compiled.capacities.fill((1 << 60, 0));
        let end = |form| engine::run(&compiled, &case.usual_split(), form, false).expect("runs").end;
        // Claims that depend on arrival may shuffle the tail by a task.
        let slack = compiled.programs.iter().map(|p| p.longest_ps).max().unwrap_or(0);
        assert!(end(Form::ComputeOnly) <= end(Form::Whole) + slack, "{}", case.name);
        assert!(end(Form::CommOnly) <= end(Form::Whole) + slack, "{}", case.name);
    }
}

//! Questions that users of such kernels have asked in public, with the answers that are known.

use crate::support::*;
use tilewire_kernels::schedule::{At, Claim, Op, Place};
use tilewire_kernels::{Fabric, OptionSet, Problem, RoleKind, RoleSplit, Spec, Task, baseline, kernel};
use tilewire_sim::{Config, Simulation, predict};

/// C03, source: <https://github.com/HazyResearch/ThunderKittens/issues/169>, and readings on two H200s: the knee is where
/// the CTAs' bytes in flight fill the link, 8 CTAs for large bulk copies, about 76 for 5 GB/s per CTA.
#[test]
fn c03_the_knee_of_a_copy_depends_on_bytes_in_flight() {
    let machine = shipped_machine("h200-nvlink");
    let gbs = |ctas: u32, in_flight: u32| {
        let toy = Toy::node(2, vec![role(RoleKind::Compute, Claim::Ticket)]).symmetric();
        let toy = toy.tasks(move |_, _, _| vec![copy_in_flight(At::local(1), At::ME, 4_000_000, in_flight); 500]);
        2000e6 / ((simulate(&toy, &machine, split(ctas, 0, 0, 0)).end as f64 / 1e3) - 5000.0)
    };
    let latency = machine.sm.nvlink_latency_ns.value;
    for (in_flight, expected) in [(98_304, 8.0), ((5.0 * latency) as u32, 76.0)] {
        let plateau = gbs(132, in_flight);
        let knee = (1..=132).find(|&ctas| gbs(ctas, in_flight) >= 0.97 * plateau).expect("the plateau is reached");
        let error: f64 = f64::from(knee) / expected - 1.0;
        assert!(error.abs() <= 0.2, "{in_flight} B in flight: knee at {knee} CTAs, expected {expected}");
        let above = gbs((knee + 132) / 2, in_flight);
        assert!((above / plateau - 1.0).abs() < 0.1, "not flat above the knee: {above} and {plateau} GB/s");
    }
}

/// C08, source: <https://github.com/NVIDIA/nccl/issues/1428>: an all-gather at 300 GB/s touches memory two to three times
/// per byte, and a memory-bound kernel slows down although SMs are left over (measured 1.76 and 1.83).
///
/// Assumed: an A100 as a memory of 2.0 TB/s and a link of 300 GB/s each way.
#[test]
fn c08_an_all_gather_slows_a_memory_bound_kernel() {
    let changes = [
        ("gpu.hbm_gbs", 2000.0),
        ("nvlink.egress_gbs", 300.0),
        ("nvlink.ingress_gbs", 300.0),
        ("sm.copy_cta_gbs", 25.0),
    ];
    let machine = with(round_machine(Fabric::IbRc), &changes);
    let compute_end = |comm: bool| {
        // 40 CTAs that read and write 25 GB/s each ask for all of the memory.
        let mut roles = vec![compute()];
        roles.extend(comm.then(|| role(RoleKind::IntraComm, Claim::Strided)));
        let toy = Toy::node(2, roles).symmetric().tasks(|_, _, role| {
            if role == 0 { vec![copy(At::ME, At::ME, 10_000_000); 40] } else { vec![gather_step(10_000_000); 24 * 8] }
        });
        let run = simulate(&toy, &machine, split(40, if comm { 24 } else { 0 }, 0, 0));
        run.timeline.iter().filter(|t| t.role == 0).map(|t| t.end).max().expect("tiles ran")
    };
    let slowdown = compute_end(true) as f64 / compute_end(false) as f64;
    assert!((1.35..=1.95).contains(&slowdown), "{slowdown}");
}

/// A step of a ring all-gather: what comes from the neighbour goes to the output and to the buffer that the next rank
/// reads, so that a byte touches memory three times.
fn gather_step(size: u64) -> Task {
    let mut task = copy(At::local(1), At::ME, size);
    if let Op::Copy { dsts, .. } = &mut task.op {
        dsts.push(Place::me(bytes(size)));
    }
    task
}

/// C16, source: <https://github.com/ByteDance-Seed/Triton-distributed/pull/166>: GEMM + reduce-scatter on H100s.
#[test]
fn c16_overlap_pays_above_a_hundred_gflop_per_gpu() {
    let machine = shipped_machine("h100-nvlink");
    let fused = kernel("gemm_rs").expect("in the registry");
    let unfused = baseline("gemm_rs").expect("has an unfused form");
    for (gpus, m, k, pays) in
        [(2, 4096, 4096, true), (4, 4096, 2048, false), (8, 4096, 1024, false), (8, 8192, 3712, true)]
    {
        let problem = Problem::Gemm { m, n: m, k };
        let spec = |form: &dyn tilewire_kernels::Kernel, set| Spec {
            problem,
            cluster: cluster(1, gpus),
            fabric: machine.fabric,
            options: form.options(set, &problem, cluster(1, gpus)),
        };
        let time = |form: &dyn tilewire_kernels::Kernel, set, split: RoleSplit| {
            let schedule = form.build(&spec(form, set)).expect("builds");
            predict(&schedule, &machine, &split, &Config::default()).expect("runs").time_us
        };
        let alone = time(unfused, OptionSet::Tilewire, RoleSplit::default());
        for set in SETS {
            let best = (4..=48)
                .step_by(4)
                .map(|reduce| time(fused, set, split(132 - reduce, 0, 0, reduce)))
                .fold(f64::MAX, f64::min);
            println!("{gpus} GPUs {m} {k} {}: fused {best:.1} us, unfused {alone:.1} us, pays {pays}", set.name());
        }
    }
}

/// C20, source: <https://github.com/deepseek-ai/DeepEP>: 90 GB/s are reported on a NIC of 50 GB/s, because bytes that stay
/// on the own node count too.
#[test]
fn c20_logical_bandwidth_counts_bytes_that_stay_on_the_node() {
    let machine = shipped_machine("h200-cx7");
    for nodes in [2_u16, 4] {
        // 4096 tokens of 7168 bytes, 64 in a put, to the same-index GPU of every other node, which hands them on.
        let roles =
            vec![role(RoleKind::InterSend, Claim::Strided), role(RoleKind::InterReduce, Claim::Ready { window: 32 })];
        let toy = Toy::on(cluster(nodes, 8), roles).symmetric().tasks(move |_, _, role| {
            let chunks = (0..64).flat_map(|chunk| (1..nodes).map(move |dn| (chunk, dn)));
            let slot = |chunk: u32, dn: u16| chunk * u32::from(nodes) + u32::from(dn);
            if role == 0 {
                chunks
                    .map(|(chunk, dn)| {
                        put(64 * 7168, dn, (chunk % 4) as u16, publish(Fabric::IbRc), slot(chunk, dn), None)
                    })
                    .collect()
            } else {
                chunks.map(|(chunk, dn)| copy(At::ME, At::local(1), 64 * 7168).wait(wait(slot(chunk, dn)))).collect()
            }
        });
        let simulation = Simulation::new(&toy, &machine, &Config::default()).expect("compiles");
        let report = simulation.predict(&split(0, 0, 4, 12)).expect("runs");
        println!("{nodes} nodes: wire {} logical {}", report.wire_gbs, report.logical_gbs);
        let share = 1.0 - 1.0 / f64::from(nodes);
        assert!((report.wire_gbs / (report.logical_gbs * share) - 1.0).abs() < 1e-9);
        assert!((42.0..=48.0).contains(&report.wire_gbs), "{nodes} nodes: {} GB/s", report.wire_gbs);
    }
}

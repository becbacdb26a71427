//! Questions that users of such kernels have asked in public, with the answers that are known.

use crate::support::*;
use tilewire_kernels::schedule::{At, BufferId, Claim, CtaCount, Op, Place, Role, Wait};
use tilewire_kernels::{Fabric, OptionSet, Problem, RoleKind, RoleSplit, Schedule, Spec, Task, baseline};
use tilewire_sim::{Config, Machine, Simulation, predict};

/// C03, source: <https://github.com/HazyResearch/ThunderKittens/issues/169>, and readings on two H200s: the knee is where
/// the CTAs' bytes in flight fill the link, 8 CTAs for large bulk copies, about 76 for 5 GB/s per CTA.
#[test]
fn c03_the_knee_of_a_copy_depends_on_bytes_in_flight() {
    // Hard-wired copies: a lane of the interpreter lets two stores be under way, whatever is in flight.
    let machine = Machine { interpreter: None, ..shipped_machine("h200-nvlink") };
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
        let above = gbs(u32::midpoint(knee, 132), in_flight);
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

/// C16, source: <https://github.com/ByteDance-Seed/Triton-distributed/pull/166>: GEMM + reduce-scatter on 8 H100s, times in
/// ms, fused and unfused: 2 GPUs 0.259 and 0.275, 4 GPUs 0.286 and 0.205, 8 GPUs 0.323 and 0.167, a large shape on 8 GPUs
/// 0.855 and 1.045. Overlap stops paying below about 100 GFLOP per GPU.
struct C16 {
    gpus: u16,
    size: u64,
    /// Depth per GPU, in whole steps of 64.
    k: u64,
    unfused_us: f64,
    pays: bool,
}

const C16: [C16; 4] = [
    C16 { gpus: 2, size: 4096, k: 4096, unfused_us: 275.0, pays: true },
    C16 { gpus: 4, size: 4096, k: 2048, unfused_us: 205.0, pays: false },
    C16 { gpus: 8, size: 4096, k: 1024, unfused_us: 167.0, pays: false },
    C16 { gpus: 8, size: 8192, k: 3712, unfused_us: 1045.0, pays: true },
];

/// Assumed: that kernel is a GEMM that counts its tiles by segment, one host-driven copy to each peer in turn (event, wait
/// and copy: 25 us each; a copy engine as four CTAs), and a sum of all segments by 15 SMs once every peer has sent its own.
#[test]
fn c16_overlap_pays_above_a_hundred_gflop_per_gpu() {
    let machine = with(shipped_machine("h100-nvlink"), &[("launch.dependent_us", 25.0)]);
    for case in C16 {
        let schedule = host_driven_gemm_rs(case.gpus, case.size, case.k);
        let config = Config { execution: tilewire_sim::Execution::Mirror, ..Config::default() };
        let fused = Simulation::new(&schedule, &machine, &config).expect("compiles");
        let fused_us = fused.time_ps(&split(128, 0, 0, 0)).expect("runs") as f64 / 1e6;
        let C16 { gpus, size, unfused_us, .. } = case;
        assert_eq!(fused_us < unfused_us, case.pays, "{gpus} GPUs, {size}: fused {fused_us}, unfused {unfused_us} us");
    }
}

fn host_driven_gemm_rs(gpus: u16, size: u64, k: u64) -> Schedule {
    let (ranks, copiers, summers) = (u64::from(gpus), 4, 15);
    let tiles = (size / 128 * size / 256 / ranks) as u32;
    let segment = size * size * 2 / ranks;
    let fixed = |kind, ctas| Role { ctas: CtaCount::Fixed(ctas), ..role(kind, Claim::Strided) };
    let mut launches = vec![launch("gemm", vec![], vec![compute()])];
    for stage in 1..usize::from(gpus) {
        let after = if stage == 1 { vec![] } else { vec![stage - 1] };
        launches.push(launch(&format!("send {stage}"), after, vec![fixed(RoleKind::IntraComm, copiers)]));
    }
    launches.push(launch("sum", vec![0, usize::from(gpus) - 1], vec![fixed(RoleKind::InterReduce, summers)]));
    let part = move |parts: u32| {
        tilewire_kernels::schedule::Region::contiguous(BufferId(0), 0, (segment / 1024) as u32 / parts, 1024)
    };
    Toy::node(gpus, Vec::new()).launches(launches).symmetric().tasks(move |_, launch, _| {
        let launch = launch as u32;
        if launch == 0 {
            // Segments of the peers in the order of their copies, the own one last.
            let tile = |segment| gemm_tile([128, 256, 64], k as u32).signal(signal(At::ME, segment));
            (1..=u32::from(gpus)).flat_map(|segment| vec![tile(segment); tiles as usize]).collect()
        } else if launch < u32::from(gpus) {
            let to = At::local(launch as u16);
            let ready = Wait { at_least: tiles, ..wait(launch) };
            let op = copy_region(At::ME, to, part(copiers));
            vec![op.wait(ready).signal(signal(to, 100)); copiers as usize]
        } else {
            let all = Wait { at_least: copiers * (u32::from(gpus) - 1), ..wait(100) };
            let sum = Task::new(Op::Reduce {
                inputs: (0..ranks).map(|_| Place::me(part(summers))).collect(),
                outputs: smallvec::smallvec![Place::me(part(summers))],
                in_flight_bytes: 1 << 20,
            });
            vec![sum.wait(all); summers as usize]
        }
    })
}

/// The unfused form beside it: within a fifth of the published times of cuBLAS and NCCL under PyTorch.
#[test]
fn c16_unfused_times() {
    let machine = shipped_machine("h100-nvlink");
    let unfused = baseline("gemm_rs").expect("has an unfused form");
    for C16 { gpus, size, k, unfused_us, .. } in C16 {
        let problem = Problem::Gemm { m: size, n: size, k };
        let options = unfused.options(OptionSet::Tilewire, &problem, cluster(1, gpus));
        let spec = Spec { problem, cluster: cluster(1, gpus), fabric: machine.fabric, options };
        let schedule = unfused.build(&spec).expect("builds");
        let report = predict(&schedule, &machine, &RoleSplit::default(), &Config::default()).expect("runs");
        let error: f64 = report.time_us / unfused_us - 1.0;
        assert!(error.abs() <= 0.2, "{gpus} GPUs, {size}: {} us, published {unfused_us}", report.time_us);
    }
}

/// C20, source: <https://github.com/deepseek-ai/DeepEP>: 90 GB/s (2 nodes) and 61 GB/s (4 nodes) are reported on a NIC of
/// 50 GB/s, because bytes that stay on the own node count too.
///
/// Assumed: a put per token of 7168 bytes, posted by the GPU itself, so that no proxy stands in the way.
#[test]
fn c20_logical_bandwidth_counts_bytes_that_stay_on_the_node() {
    let own_posts = [
        ("proxy.threads", 64.0),
        ("proxy.push_ns", 100.0),
        ("proxy.fifo_latency_ns", 0.0),
        ("proxy.post_ns", 100.0),
        ("proxy.fifo_depth", 1e6),
    ];
    let machine = with(shipped_machine("h200-cx7"), &own_posts);
    for (nodes, reported) in [(2_u16, 90.0), (4, 61.0)] {
        let toy = Toy::on(cluster(nodes, 8), vec![role(RoleKind::InterSend, Claim::Strided)]).symmetric();
        let toy = toy.tasks(move |_, _, _| {
            let tokens = (0..4096).flat_map(|token| (1..nodes).map(move |dn| (token, dn)));
            tokens
                .enumerate()
                .map(|(i, (token, dn))| put(7168, dn, token % 64, publish(Fabric::IbRc), i as u32, None))
                .collect()
        });
        let simulation = Simulation::new(&toy, &machine, &Config::default()).expect("compiles");
        let report = simulation.predict(&split(0, 0, 24, 0)).expect("runs");
        let share = 1.0 - 1.0 / f64::from(nodes);
        assert!((report.wire_gbs / (report.logical_gbs * share) - 1.0).abs() < 1e-9);
        assert!((42.0..=48.0).contains(&report.wire_gbs), "{nodes} nodes: {} GB/s on the wire", report.wire_gbs);
        let error: f64 = report.logical_gbs / reported - 1.0;
        assert!(error.abs() < 0.05, "{nodes} nodes: {} GB/s for {reported}", report.logical_gbs);
    }
}

//! The unfused baselines in the simulator: closed forms on a round machine, executions that agree, and what overlap
//! can and cannot do.

use tilewire_kernels::{Cluster, KERNELS, OptionSet, Problem, ProblemKind, RoleSplit, Spec, baseline, kernel};
use tilewire_sim::compile::Form;
use tilewire_sim::engine::Run;
use tilewire_sim::{Config, Execution, Machine, SimError, Simulation};

const US: u64 = 1_000_000;

fn machine() -> Machine {
    Machine::parse("h200-efa.toml", include_str!("../../data/machines/h200-efa.toml")).expect("a legal machine")
}

/// 64 SMs without shared limits: steps, epilogues and stores of 1 us, fills of 2 us, collectives of 10 us + 20 us.
fn round_machine() -> Machine {
    let mut machine = machine();
    for (name, value) in [
        ("gpu.sms", 64.0),
        ("gpu.hbm_gbs", 1e6),
        ("gpu.hbm_write_bytes_per_byte", 1.0),
        ("gpu.droop_knee_tflops", 1e6),
        // 2 x 128 x 256 x 64 FLOP in 1 us; a tile of 64 KiB in 1 us.
        ("gemm.library.sm_tflops", 4.194_304),
        ("gemm.library.epilogue_ns", 1000.0),
        ("gemm.library.fill_ns", 2000.0),
        ("sm.copy_cta_gbs", 65.536),
        ("launch.command_us", 5.0),
        ("launch.dependent_us", 1.0),
    ] {
        assert!(machine.set(name, value), "{name}");
    }
    for kind in ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"] {
        for (name, value) in
            [("latency_us", 10.0), ("fill_us", 20.0), ("fill_wire_mib", 6.0), ("bus_gbs", 62.914_56), ("sms", 32.0)]
                .into_iter()
                .chain([("bus_gpus", 1.0)])
        {
            assert!(machine.set(&format!("library.{kind}.{name}"), value), "{name}");
        }
    }
    machine
}

fn problem(kind: ProblemKind, ranks: u64) -> Problem {
    match kind {
        ProblemKind::Gemm => Problem::Gemm { m: 512 * ranks, n: 1024, k: 256 },
        ProblemKind::Moe => Problem::Moe { tokens: 256 * ranks, hidden: 512, inter: 512, topk: 2, experts: 8 * ranks },
        ProblemKind::Attention => Problem::Attention { seq: 256 * ranks, batch: 2, heads: 4, head_dim: 128 },
    }
}

fn simulate(
    (name, problem, cluster): (&str, Problem, Cluster),
    options: &[(&str, &str)],
    machine: &Machine,
    execution: Execution,
) -> Result<Run, SimError> {
    let kernel = baseline(name).expect("every kernel has a baseline");
    let mut chosen = kernel.options(OptionSet::Tilewire, &problem, cluster);
    for (name, value) in options {
        chosen.set(name, value).expect("a legal value");
    }
    let schedule = kernel
        .build(&Spec { problem, cluster, fabric: machine.fabric, options: chosen })
        .unwrap_or_else(|error| panic!("{name} {problem} {cluster}: {error}"));
    let simulation = Simulation::new(&schedule, machine, &Config { execution, ..Config::default() })?;
    simulation.run(&RoleSplit::default(), Form::Whole, false)
}

/// Time of the launches of a run whose number in their piece is `of` modulo `per_piece`.
fn time_of(run: &Run, of: usize, per_piece: usize) -> u64 {
    run.launches.iter().skip(of).step_by(per_piece).map(|(start, end)| end - start).sum()
}

#[test]
fn mirror_folded_and_full_agree() {
    let machine = machine();
    for fused in KERNELS {
        let kernel = baseline(fused.name()).expect("every kernel has a baseline");
        for (nodes, gpus_per_node) in [(1, 4), (2, 2), (3, 2), (2, 4)] {
            let cluster = Cluster { nodes, gpus_per_node };
            let problem = problem(kernel.problem_kind(), cluster.ranks() as u64);
            for chunks in ["1", "2", "4"] {
                let time = |execution| {
                    simulate((fused.name(), problem, cluster), &[("chunks", chunks)], &machine, execution)
                        .unwrap_or_else(|error| panic!("{} {cluster} {chunks}: {error}", fused.name()))
                        .end
                };
                let full = time(Execution::Full);
                let name = format!("{} {cluster} in {chunks}", kernel.name());
                assert_eq!(time(Execution::Mirror), full, "mirror {name}");
                assert_eq!(time(Execution::Folded), full, "folded {name}");
            }
        }
    }
}

/// 4096 x 1024 x 256 on 2 x 2 ranks: 128 tiles of 4 steps on 64 SMs are two waves; the wire carries
/// 3/4 x 8 MiB = 6 MiB per rank in 100 us, and fills the pipeline.
#[test]
fn sequential_time_is_launches_plus_gemm_plus_collective() {
    let (machine, cluster) = (round_machine(), Cluster { nodes: 2, gpus_per_node: 2 });
    let problem = Problem::Gemm { m: 4096, n: 1024, k: 256 };
    let run = |name, options: &[(&str, &str)]| {
        simulate((name, problem, cluster), options, &machine, Execution::Folded).expect("runs")
    };
    // The second tile's loads are hidden, its store is not.
    let gemm = (2 + 4 + 1) + (4 + 1) + 1;
    let scatter = run("gemm_rs", &[]);
    assert_eq!(scatter.end, (5 + gemm + 1 + 10 + 20 + 100) * US);
    assert_eq!(scatter.launches, [(5 * US, 18 * US), (19 * US, 149 * US)]);
    // A sum over all ranks moves twice as much.
    assert_eq!(run("gemm_ar", &[]).end, (5 + gemm + 1 + 10 + 20 + 200) * US);
    // Half of the channels, half of the bandwidth.
    assert_eq!(run("gemm_rs", &[("collective_ctas", "16")]).end, (5 + gemm + 1 + 10 + 20 + 200) * US);
    // The rows of A are a quarter as wide: 1.5 MiB on the wire, a quarter of the way to a full pipeline.
    assert_eq!(run("ag_gemm", &[]).end, (5 + 10 + 5 + 25 + 1 + gemm) * US);
}

/// `bus_gbs` of nodes of eight GPUs: two GPUs of a node send through a quarter of the NICs, one node needs none.
#[test]
fn a_ring_between_nodes_has_the_nics_that_take_part() {
    let mut machine = round_machine();
    assert!(machine.set("library.reduce_scatter.bus_gpus", 8.0));
    let run = |nodes, gpus_per_node| {
        let problem = Problem::Gemm { m: 4096, n: 1024, k: 256 };
        let cluster = Cluster { nodes, gpus_per_node };
        let run = simulate(("gemm_rs", problem, cluster), &[], &machine, Execution::Folded).expect("runs");
        run.launches[1].1 - run.launches[1].0
    };
    assert_eq!(run(1, 4), (10 + 20 + 100) * US);
    assert_eq!(run(2, 2), (10 + 20 + 400) * US);
    // One GPU per node: an eighth.
    assert_eq!(run(4, 1), (10 + 20 + 800) * US);
    // 7/8 x 8 MiB at half the bandwidth; 15/16 x 8 MiB at all of it, and as much with more GPUs than NICs were read with.
    assert_eq!(run(2, 4), (10 + 20) * US + 7 * 200 * US / 6);
    assert_eq!(run(2, 8), (10 + 20 + 125) * US);
    assert_eq!(run(2, 16), (10 + 20) * US + (31 * 125 * US + 15) / 30);
}

/// Of the 6 MiB that a rank of 2 x 2 passes on in a ring, the two GPUs of a node share those that leave it; in an
/// all-to-all half of a rank's parts do.
#[test]
fn collectives_are_seen_on_the_wire() {
    let machine = round_machine();
    let wire = |name: &str, problem, (nodes, gpus_per_node)| {
        let cluster = Cluster { nodes, gpus_per_node };
        let kernel = baseline(name).expect("every kernel has a baseline");
        let options = kernel.options(OptionSet::Published, &problem, cluster);
        let spec = Spec { problem, cluster, fabric: machine.fabric, options };
        let schedule = kernel.build(&spec).expect("builds");
        let simulation = Simulation::new(&schedule, &machine, &Config::default()).expect("compiles");
        let prediction = simulation.predict(&RoleSplit::default()).expect("runs");
        prediction.wire_gbs * prediction.time_us * 1e3 / f64::from(1 << 20)
    };
    let gemm = Problem::Gemm { m: 4096, n: 1024, k: 256 };
    let near = |have: f64, want: f64| assert!((have - want).abs() < 1e-6, "{have} MiB, not {want}");
    near(wire("gemm_rs", gemm, (2, 2)), 3.0);
    near(wire("gemm_ar", gemm, (2, 2)), 6.0);
    near(wire("gemm_rs", gemm, (1, 4)), 0.0);
    // 512 tokens of 1 KiB, two copies each, to 4 ranks.
    let moe = Problem::Moe { tokens: 2048, hidden: 512, inter: 512, topk: 2, experts: 32 };
    near(wire("moe_dispatch_gemm", moe, (2, 2)), 0.5);
}

#[test]
fn one_rank_has_nobody_to_talk_to() {
    let (machine, cluster) = (round_machine(), Cluster { nodes: 1, gpus_per_node: 1 });
    let problem = Problem::Gemm { m: 4096, n: 1024, k: 256 };
    let run = |name| simulate((name, problem, cluster), &[], &machine, Execution::Folded).expect("runs");
    let gemm = (2 + 4 + 1) + (4 + 1) + 1;
    let sum = run("gemm_ar");
    assert_eq!((sum.end, sum.launches.len()), ((5 + gemm) * US, 1));
    // Its part is all of the product and has to be copied: 8 MiB read and written at 1e6 GB/s.
    assert_eq!(run("gemm_rs").end, (5 + gemm + 1) * US + 16_777_216_u64.div_ceil(1_000));
}

/// In two pieces on 64 SMs: 64 tiles on all SMs, then 64 tiles in two waves on the 32 that the collective leaves.
#[test]
fn chunked_time_is_the_longer_stream() {
    let (machine, cluster) = (round_machine(), Cluster { nodes: 2, gpus_per_node: 2 });
    let problem = Problem::Gemm { m: 4096, n: 1024, k: 256 };
    let run = simulate(("gemm_rs", problem, cluster), &[("chunks", "2")], &machine, Execution::Folded).expect("runs");
    let (first, second) = (2 + 4 + 1 + 1, (2 + 4 + 1) + (4 + 1) + 1);
    // Every piece pays the latency; half of the bytes fill half of the pipeline.
    let piece = 10 + 10 + 50;
    assert_eq!(time_of(&run, 0, 2), (first + second) * US);
    assert_eq!(time_of(&run, 1, 2), 2 * piece * US);
    assert_eq!(run.end, (5 + first + 1 + piece + 1 + piece) * US);
}

#[test]
fn overlap_is_never_faster_than_either_part_alone() {
    let (machine, cluster) = (machine(), Cluster { nodes: 2, gpus_per_node: 8 });
    // Launches per piece with one piece, the collective's place among them, and the computing launch's.
    for (name, problem, per_piece, collective, compute) in [
        ("ag_gemm", Problem::Gemm { m: 16384, n: 1024, k: 16384 }, 2, 0, 1),
        ("gemm_ar", Problem::Gemm { m: 16384, n: 16384, k: 1024 }, 2, 1, 0),
        ("gemm_rs", Problem::Gemm { m: 16384, n: 16384, k: 1024 }, 2, 1, 0),
        (
            "moe_dispatch_gemm",
            Problem::Moe { tokens: 65536, hidden: 7168, inter: 2048, topk: 8, experts: 256 },
            4,
            1,
            3,
        ),
        ("ring_attention", Problem::Attention { seq: 24576, batch: 4, heads: 16, head_dim: 128 }, 2, 0, 1),
    ] {
        let run = |chunks| {
            simulate((name, problem, cluster), &[("chunks", chunks)], &machine, Execution::Folded).expect("runs")
        };
        let sequential = run("1");
        let alone = time_of(&sequential, collective, per_piece).max(time_of(&sequential, compute, per_piece));
        assert!(sequential.end > alone, "{name}");
        for chunks in ["2", "4", "8"] {
            let chunked = run(chunks);
            assert!(chunked.end > alone, "{name} in {chunks}: {} against {alone}", chunked.end);
        }
        // With these sizes some overlap is worth its latencies.
        assert!(run("2").end < sequential.end, "{name}: {} against {}", run("2").end, sequential.end);
    }
}

#[test]
fn launches_side_by_side_must_fit() {
    let (machine, cluster) = (machine(), Cluster { nodes: 2, gpus_per_node: 2 });
    // A collective that leaves no SM.
    let problem = Problem::Gemm { m: 4096, n: 1024, k: 256 };
    let options = [("chunks", "2"), ("collective_ctas", "128")];
    let mut small = machine.clone();
    assert!(small.set("gpu.sms", 128.0));
    let refused = simulate(("gemm_rs", problem, cluster), &options, &small, Execution::Folded);
    let Err(error) = refused else { panic!("no SM is left for compute 1") };
    assert!(error.to_string().contains("\"compute 1\""), "{error}");

    // A prologue beside a big launch that takes all SMs.
    let kernel = kernel("ag_gemm").expect("registered");
    let problem = Problem::Gemm { m: 4096, n: 1024, k: 4096 };
    let mut options = kernel.options(OptionSet::Published, &problem, cluster);
    options.set("first_hop", "side_prologue").expect("a legal value");
    let spec = Spec { problem, cluster, fabric: machine.fabric, options };
    let schedule = kernel.build(&spec).expect("a legal shape");
    let simulation = Simulation::new(&schedule, &machine, &Config::default()).expect("compiles");
    let run = |compute| simulation.time_ps(&RoleSplit { compute, intra_comm: 4, inter_send: 0, inter_reduce: 0 });
    assert!(run(124).is_ok(), "{:?}", run(124));
    let Err(SimError::NoRoomBeside { first, second, need, have }) = run(128) else { panic!("{:?}", run(128)) };
    assert_eq!((first.as_str(), second.as_str(), need, have), ("prologue", "main", 136, 132));
}

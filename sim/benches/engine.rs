//! Completed tasks per second of the engine; compiling (generating) schedules apart.

#[allow(dead_code, reason = "written for the tests, of which the benches need some")]
#[path = "../tests/it/support.rs"]
mod support;

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use std::hint::black_box;
use std::time::Duration;
use support::{
    ISOLATED, NS, SETS, Toy, alpha_beta_machine, cluster, compute, full, mirror, ring_all_reduce, ring_all_reduce_ps,
    round_machine, shipped_machine, signal, split, tile, wait, with,
};
use tilewire_kernels::schedule::{At, Drain};
use tilewire_kernels::{Fabric, OptionSet, Problem, RoleSplit, Schedule, Spec, kernel};
use tilewire_sim::compile::{Compiled, Form, Late};
use tilewire_sim::engine::Scratch;
use tilewire_sim::{Config, Machine};

const SIZE: u64 = 32_768;

fn build(name: &str, set: OptionSet, size: u64, machine: &Machine) -> Schedule {
    let kernel = kernel(name).expect("in the registry");
    let (problem, cluster) = (Problem::Gemm { m: size, n: size, k: size / 16 }, cluster(2, 8));
    let options = kernel.options(set, &problem, cluster);
    kernel.build(&Spec { problem, cluster, fabric: machine.fabric, options }).expect("builds")
}

/// Times runs in memory that is used again, and says what a run is.
fn bench(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, compiled: &Compiled, split: &RoleSplit) {
    let mut scratch = Scratch::default();
    let run = scratch.run(compiled, split, Form::Whole, false).expect("runs");
    println!(
        "{name}: {} tasks, {:.2} events per task, {:.1} us simulated",
        run.tasks,
        run.events as f64 / run.tasks as f64,
        run.end as f64 / 1e6
    );
    group.throughput(Throughput::Elements(run.tasks));
    group.bench_function(name, |b| {
        b.iter(|| black_box(scratch.run(compiled, split, Form::Whole, false).expect("runs").end));
    });
}

/// In full mode all ranks do the same, and bandwidth is shared out once for all of them. What it costs where that does not
/// hold: the same run with bandwidth shared out rank by rank, and a run in which a rank is a nanosecond late, so that what
/// fell together no longer does.
fn gemm_rs(c: &mut Criterion) {
    let machine = shipped_machine("h200-efa");
    let split = split(120, 0, 4, 8);
    let late = Config { protocol: ISOLATED, ..full() };
    for (name, config) in [
        ("gemm_rs_2x8_full", full()),
        ("gemm_rs_2x8_rank_by_rank", full()),
        ("gemm_rs_2x8_late_rank", late),
        ("gemm_rs_2x8_mirror", mirror()),
    ] {
        let mut group = c.benchmark_group(name);
        for set in SETS {
            let schedule = build("gemm_rs", set, SIZE, &machine);
            let mut compiled = Compiled::new(&schedule, &machine, &config).expect("compiles");
            compiled.ranks_alike = name != "gemm_rs_2x8_rank_by_rank";
            if name == "gemm_rs_2x8_late_rank" {
                compiled.late = Late { rank: 3, ps: NS };
            }
            bench(&mut group, set.name(), &compiled, &split);
        }
        group.finish();
    }
    let mut group = c.benchmark_group("gemm_rs_2x8_compile");
    for set in SETS {
        let schedule = build("gemm_rs", set, SIZE, &machine);
        let config: Config = mirror();
        group.bench_function(set.name(), |b| {
            b.iter(|| black_box(Compiled::new(&schedule, &machine, &config).expect("compiles").costs.len()));
        });
    }
    group.finish();
}

/// One of the 900 splits of a sweep.
fn gemm_ar(c: &mut Criterion) {
    let machine = shipped_machine("h200-efa");
    let mut group = c.benchmark_group("gemm_ar_8192_2x8_full");
    for (set, split) in [(OptionSet::Published, split(100, 12, 4, 16)), (OptionSet::Tilewire, split(108, 0, 4, 20))] {
        let compiled = Compiled::new(&build("gemm_ar", set, 8192, &machine), &machine, &full()).expect("compiles");
        bench(&mut group, set.name(), &compiled, &split);
    }
    group.finish();
}

/// 8,192 ranks of 132 CTAs, each with a tile in flight: four rounds of tiles that pass a flag to the next GPU.
fn million_live_tasks(c: &mut Criterion) {
    let machine = with(round_machine(Fabric::IbRc), &[("gpu.hbm_gbs", 2_000.0)]);
    let toy = Toy { slots: 4 * 132, ..Toy::on(cluster(1024, 8), vec![compute()]) }.symmetric().tasks(|_, _, _| {
        (0..4 * 132)
            .map(|i| {
                let task = tile(10, At::ME, Drain::Overlap).signal(signal(At::local(1), i));
                if i < 132 { task } else { task.wait(wait(i - 132)) }
            })
            .collect()
    });
    let compiled = Compiled::new(&toy, &machine, &full()).expect("compiles");
    let mut group = c.benchmark_group("million_live_tasks");
    bench(&mut group, "1024x8", &compiled, &split(132, 0, 0, 0));
    group.finish();
}

fn ring(c: &mut Criterion) {
    let (ranks, size) = (1024, 64 << 20);
    let schedule = ring_all_reduce(ranks, size);
    let compiled = Compiled::new(&schedule, &alpha_beta_machine(2.0, 50.0), &full()).expect("compiles");
    let split = split(0, 0, 1, 0);
    let run = Scratch::default().run(&compiled, &split, Form::Whole, false).expect("runs");
    let error = run.end as f64 / ring_all_reduce_ps(ranks, size, 2.0, 50.0) - 1.0;
    println!("ring all-reduce on {ranks} ranks: {:.4} of the closed form", 1.0 + error);
    assert!(error.abs() < 0.01, "{error}");
    let mut group = c.benchmark_group("ring_all_reduce");
    bench(&mut group, "1024", &compiled, &split);
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).measurement_time(Duration::from_secs(5));
    targets = gemm_rs, gemm_ar, million_live_tasks, ring
}
criterion_main!(benches);

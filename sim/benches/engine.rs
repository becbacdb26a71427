//! Speed of the engine: completed tasks per second of `gemm_rs`, M = 32768, 2x8 (tasks wait, run under shared bandwidth
//! and signal), the time of one mirror run, and, apart from them, of building and compiling the schedule.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use tilewire_kernels::{Cluster, OptionSet, Problem, RoleSplit, Schedule, Spec, kernel};
use tilewire_sim::compile::Form;
use tilewire_sim::engine::Scratch;
use tilewire_sim::{Config, Execution, Machine, Simulation};

const SPLIT: RoleSplit = RoleSplit { compute: 120, intra_comm: 0, inter_send: 4, inter_reduce: 8 };

fn machine() -> Machine {
    Machine::parse("h200-efa", include_str!("../../data/machines/h200-efa.toml")).expect("a complete machine")
}

fn schedule(set: OptionSet) -> Schedule {
    let kernel = kernel("gemm_rs").expect("a kernel");
    let cluster = Cluster { nodes: 2, gpus_per_node: 8 };
    let problem = Problem::Gemm { m: 32_768, n: 32_768, k: 2048 };
    let spec = Spec { problem, cluster, fabric: machine().fabric, options: kernel.options(set, &problem, cluster) };
    kernel.build(&spec).expect("a legal shape")
}

fn engine(c: &mut Criterion) {
    let machine = machine();
    for set in [OptionSet::Tilewire, OptionSet::Published] {
        let schedule = schedule(set);
        let mut group = c.benchmark_group(format!("gemm_rs 32768 2x8 {}", set.name()));
        group.sample_size(20);
        for (name, execution) in [("full", Execution::Full), ("mirror", Execution::Mirror)] {
            let config = Config { execution, ..Config::default() };
            let simulation = Simulation::new(&schedule, &machine, &config).expect("a symmetric schedule");
            let mut scratch = Scratch::default();
            let mut run = || scratch.run(simulation.compiled(), &SPLIT, Form::Whole, false).expect("it ends");
            let first = run();
            println!("{name}: {:.2} events per task", first.events as f64 / first.tasks as f64);
            group.throughput(Throughput::Elements(first.tasks));
            group.bench_function(name, |b| b.iter(|| black_box(run().end)));
        }
        let config = Config { execution: Execution::Mirror, ..Config::default() };
        group.bench_function("compile", |b| {
            b.iter(|| Simulation::new(&schedule, &machine, &config).map(black_box).is_ok());
        });
        group.finish();
    }
}

criterion_group!(benches, engine);
criterion_main!(benches);

//! probe
use std::time::Instant;
use tilewire_kernels::*;
use tilewire_sim::compile::Form;
use tilewire_sim::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let m: u64 = args[1].parse().unwrap();
    let set = if args[2] == "published" { OptionSet::Published } else { OptionSet::Tilewire };
    let exec = match args[3].as_str() {
        "full" => Execution::Full,
        "mirror" => Execution::Mirror,
        _ => Execution::Folded,
    };
    let text = std::fs::read_to_string("data/machines/h200-efa.toml").unwrap();
    let machine = Machine::parse("h200-efa", &text).unwrap();
    let k = kernel("gemm_rs").unwrap();
    let cluster = Cluster { nodes: 2, gpus_per_node: 8 };
    let problem = Problem::Gemm { m, n: m, k: m / 16 };
    let options = k.options(set, &problem, cluster);
    let spec = Spec { problem, cluster, fabric: machine.fabric, options };
    let t = Instant::now();
    let s = k.build(&spec).unwrap();
    println!("build {:?}", t.elapsed());
    let t = Instant::now();
    let config = Config { execution: exec, ..Config::default() };
    let sim = Simulation::new(&s, &machine, &config).unwrap();
    println!("compile {:?} classes {} costs {}", t.elapsed(), sim.compiled().classes.len(), sim.compiled().costs.len());
    let split = RoleSplit { compute: 120, intra_comm: 0, inter_send: 4, inter_reduce: 8 };
    for _ in 0..5 {
        let t = Instant::now();
        let r = sim.run(&split, Form::Whole, false).unwrap();
        let e = t.elapsed();
        println!(
            "run {:?} tasks {} events {} -> {:.2} M tasks/s, {:.2} ev/task; end {:.1} us",
            e,
            r.tasks,
            r.events,
            r.tasks as f64 / e.as_secs_f64() / 1e6,
            r.events as f64 / r.tasks as f64,
            r.end as f64 / 1e6
        );
    }
    let p = sim.predict(&split).unwrap();
    println!("{p:#?}");
}

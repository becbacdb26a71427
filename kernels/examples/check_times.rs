//! Processor time and memory of the static checker on the largest published shapes and on a large symmetric cluster.
//!
//! `cargo run --release -p tilewire-kernels --example check_times [kernel [cluster [option set]]]`

use tilewire_kernels::check::{check_fatal, check_hazards, check_symmetry_sample};
use tilewire_kernels::{Cluster, Fabric, KERNELS, Kernel, OptionSet, Problem, ProblemKind, Spec};

/// The largest published problem of a kernel on two nodes of eight.
fn largest(kernel: &dyn Kernel) -> Problem {
    match (kernel.problem_kind(), kernel.name()) {
        (ProblemKind::Attention, _) => Problem::Attention { seq: 196_608, batch: 4, heads: 16, head_dim: 128 },
        (ProblemKind::Moe, _) => Problem::Moe { tokens: 131_072, hidden: 7168, inter: 2048, topk: 8, experts: 256 },
        (ProblemKind::Gemm, "gemm_rs") => Problem::Gemm { m: 65_536, n: 65_536, k: 4096 },
        (ProblemKind::Gemm, "gemm_ar") => Problem::Gemm { m: 32_768, n: 32_768, k: 2048 },
        (ProblemKind::Gemm, _) => Problem::Gemm { m: 32_768, n: 2048, k: 32_768 },
    }
}

/// A problem that 8,192 ranks can share.
fn wide(kernel: &dyn Kernel) -> Problem {
    match kernel.problem_kind() {
        ProblemKind::Attention => Problem::Attention { seq: 8192 * 384, batch: 1, heads: 1, head_dim: 128 },
        ProblemKind::Moe => Problem::Moe { tokens: 8192 * 128, hidden: 1024, inter: 512, topk: 8, experts: 8192 },
        ProblemKind::Gemm => Problem::Gemm { m: 8192 * 128, n: 2048, k: 512 },
    }
}

fn main() {
    let only: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |at: usize, name: &str| only.get(at).is_none_or(|only| only == name);
    for &kernel in KERNELS.iter().filter(|kernel| wanted(0, kernel.name())) {
        for (cluster, problem) in [((2, 8), largest(kernel)), ((1024, 8), wide(kernel))] {
            let cluster = Cluster { nodes: cluster.0, gpus_per_node: cluster.1 };
            for set in [OptionSet::Tilewire, OptionSet::Published] {
                if !wanted(1, &cluster.to_string()) || !wanted(2, set.name()) {
                    continue;
                }
                let options = kernel.options(set, &problem, cluster);
                let spec = Spec { problem, cluster, fabric: Fabric::EfaSrd, options };
                let name = format!("{:18} {:9} {:7} {problem}", kernel.name(), set.name(), cluster.to_string());
                let begin = cpu_s();
                let schedule = match kernel.build(&spec) {
                    Ok(schedule) => schedule,
                    Err(error) => {
                        println!("{name}: {error}");
                        continue;
                    }
                };
                let built = cpu_s() - begin;
                let begin = cpu_s();
                let fatal = check_fatal(&schedule, None);
                let fatal_time = cpu_s() - begin;
                let begin = cpu_s();
                let hazards = check_hazards(&schedule, None);
                let hazard_time = cpu_s() - begin;
                let begin = cpu_s();
                let symmetry = check_symmetry_sample(&schedule);
                println!(
                    "{name}: build {:.2} s, fatal {:.2} s ({}), hazards {:.2} s ({}), symmetry {:.2} s ({}), peak {} MiB",
                    built,
                    fatal_time,
                    fatal.len(),
                    hazard_time,
                    hazards.len(),
                    cpu_s() - begin,
                    symmetry.len(),
                    peak_mib()
                );
                for finding in hazards.iter().take(3) {
                    println!("    {}", finding.to_string().lines().next().unwrap_or_default());
                }
            }
        }
    }
}

/// Processor time of this process, in the system's ticks of 10 ms; 0 where the system does not tell. The checker runs on
/// one thread, so on an idle machine this is how long it takes.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

/// Most memory that this process has had; 0 where the system does not tell.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

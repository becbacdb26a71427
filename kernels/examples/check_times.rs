//! How long the static checker takes on the largest published shapes and on a large symmetric cluster.
//!
//! `cargo run --release -p tilewire-kernels --example check_times [kernel]`

use std::time::Instant;
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
        ProblemKind::Attention => Problem::Attention { seq: 8192 * 128, batch: 1, heads: 1, head_dim: 128 },
        ProblemKind::Moe => Problem::Moe { tokens: 8192 * 128, hidden: 1024, inter: 512, topk: 8, experts: 8192 },
        ProblemKind::Gemm => Problem::Gemm { m: 8192 * 128, n: 2048, k: 512 },
    }
}

fn main() {
    let only = std::env::args().nth(1);
    for &kernel in KERNELS.iter().filter(|kernel| only.as_ref().is_none_or(|name| name == kernel.name())) {
        for (cluster, problem) in [((2, 8), largest(kernel)), ((1024, 8), wide(kernel))] {
            let cluster = Cluster { nodes: cluster.0, gpus_per_node: cluster.1 };
            for set in [OptionSet::Tilewire, OptionSet::Published] {
                let options = kernel.options(set, &problem, cluster);
                let spec = Spec { problem, cluster, fabric: Fabric::EfaSrd, options };
                let name = format!("{:18} {:9} {:7} {problem}", kernel.name(), set.name(), cluster.to_string());
                let begin = Instant::now();
                let schedule = match kernel.build(&spec) {
                    Ok(schedule) => schedule,
                    Err(error) => {
                        println!("{name}: {error}");
                        continue;
                    }
                };
                let built = begin.elapsed();
                let begin = Instant::now();
                let fatal = check_fatal(&schedule, None);
                let fatal_time = begin.elapsed();
                let begin = Instant::now();
                let hazards = check_hazards(&schedule, None);
                let hazard_time = begin.elapsed();
                let begin = Instant::now();
                let symmetry = check_symmetry_sample(&schedule);
                println!(
                    "{name}: build {:.2} s, fatal {:.2} s ({}), hazards {:.2} s ({}), symmetry {:.2} s ({}), peak {} MiB",
                    built.as_secs_f64(),
                    fatal_time.as_secs_f64(),
                    fatal.len(),
                    hazard_time.as_secs_f64(),
                    hazards.len(),
                    begin.elapsed().as_secs_f64(),
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

/// Most memory that this process has had; 0 where the system does not tell.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

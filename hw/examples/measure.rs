//! Checks values of the GEMM family on one GPU.
//!
//! `measure compile CUBIN` compiles the interpreter. `measure check CUBIN [CASE]` runs small shapes in virtual and mirror
//! mode against the reference; `measure stuck CUBIN` shows what the watchdog says of a lost signal.

use std::fmt::Write as _;
use std::time::Instant;
use tilewire_hw::device::{self, Device, HwError, Module};
use tilewire_hw::launch::Runner;
use tilewire_hw::lower::{Mode, lower};
use tilewire_hw::measure::{compare, compare_samples, inputs};
use tilewire_hw::proxy::Proxy;
use tilewire_kernels::{Cluster, Fabric, OptionSet, Problem, RoleSplit, Spec, kernel};

/// Kernel, nodes and GPUs per node, shape (m, n, k; tokens, hidden, inter; seq, batch, heads), options.
type Case = (&'static str, (u16, u16), [u64; 3], &'static [(&'static str, &'static str)]);

fn spec(&(name, (nodes, gpus), [a, b, c], options): &Case) -> Spec {
    let cluster = Cluster { nodes, gpus_per_node: gpus };
    let problem = match name {
        "moe_dispatch_gemm" if a >= 8192 => Problem::Moe { tokens: a, hidden: b, inter: c, topk: 8, experts: 256 },
        "moe_dispatch_gemm" => {
            let experts = 8 * cluster.ranks() as u64;
            Problem::Moe { tokens: a, hidden: b, inter: c, topk: 2, experts }
        }
        "ring_attention" => Problem::Attention { seq: a, batch: b, heads: c, head_dim: 128 },
        _ => Problem::Gemm { m: a, n: b, k: c },
    };
    let mut set = kernel(name).expect("a kernel").options(OptionSet::Tilewire, &problem, cluster);
    for (name, value) in options {
        set.set(name, value).expect("a legal option");
    }
    Spec { problem, cluster, fabric: Fabric::Loopback, options: set }
}

fn check(device: Device, module: Module, proxy: &Proxy, only: Option<usize>) -> bool {
    const WAIT: (&str, &str) = ("main_loop", "wait_each_step");
    const Q128: (&str, &str) = ("tile_q", "128");
    let cases: [(Mode, RoleSplit, Case); 32] = {
        let split = |c, i, s, r| RoleSplit { compute: c, intra_comm: i, inter_send: s, inter_reduce: r };
        let (v, m) = (Mode::Virtual, Mode::Mirror);
        [
            (v, split(20, 0, 2, 4), ("gemm_rs", (2, 2), [1024, 1024, 256], &[])),
            (v, split(1, 0, 1, 1), ("gemm_rs", (2, 2), [512, 1024, 128], &[("drain", "smem_read"), WAIT])),
            (v, split(20, 0, 2, 4), ("gemm_rs", (2, 2), [512, 1024, 64], &[("drain", "visible")])),
            (v, split(8, 0, 2, 4), ("gemm_rs", (2, 2), [512, 1024, 256], &[("staging", "helper_zero"), WAIT])),
            (v, split(20, 0, 0, 4), ("gemm_rs", (1, 4), [1024, 1024, 192], &[])),
            (v, split(20, 4, 2, 0), ("ag_gemm", (2, 2), [1024, 512, 1024], &[])),
            (v, split(20, 4, 0, 0), ("ag_gemm", (1, 4), [1024, 512, 512], &[WAIT])),
            (v, split(16, 2, 2, 0), ("ag_gemm", (2, 2), [1024, 256, 512], &[("drain", "smem_read")])),
            (v, split(20, 2, 2, 4), ("gemm_ar", (2, 2), [1024, 1024, 256], &[])),
            (v, split(20, 4, 0, 0), ("gemm_ar", (1, 4), [1024, 1024, 256], &[WAIT])),
            (v, split(16, 2, 2, 4), ("gemm_ar", (2, 2), [1024, 1024, 128], &[("node_sum", "pull")])),
            (m, split(100, 0, 8, 16), ("gemm_rs", (2, 4), [2048, 1024, 256], &[])),
            (m, split(100, 16, 8, 0), ("ag_gemm", (2, 4), [2048, 512, 1024], &[])),
            (m, split(100, 8, 8, 16), ("gemm_ar", (2, 2), [1024, 1024, 256], &[])),
            (v, split(20, 6, 2, 2), ("moe_dispatch_gemm", (2, 2), [256, 256, 256], &[])),
            (v, split(20, 6, 2, 2), ("moe_dispatch_gemm", (2, 1), [128, 8256, 256], &[("in_flight_rows", "4")])),
            (v, split(24, 8, 0, 0), ("moe_dispatch_gemm", (1, 4), [256, 256, 512], &[WAIT])),
            (v, split(10, 6, 2, 2), ("moe_dispatch_gemm", (2, 2), [256, 256, 256], &[("routing", "multinomial")])),
            (v, split(10, 6, 2, 2), ("moe_dispatch_gemm", (2, 2), [256, 256, 256], &[("load_store_overlap", "false")])),
            (
                v,
                split(10, 6, 2, 2),
                ("moe_dispatch_gemm", (2, 2), [256, 256, 256], &[("claim", "strided"), ("recycle", "false")]),
            ),
            (v, split(1, 1, 1, 1), ("moe_dispatch_gemm", (2, 2), [256, 256, 256], &[("drain", "visible")])),
            (v, split(20, 4, 2, 0), ("ring_attention", (2, 2), [1536, 1, 2], &[])),
            (v, split(20, 4, 2, 0), ("ring_attention", (2, 2), [1024, 1, 3], &[Q128])),
            (v, split(20, 4, 0, 0), ("ring_attention", (1, 4), [1536, 1, 2], &[])),
            (v, split(20, 4, 0, 0), ("ring_attention", (1, 4), [1024, 1, 2], &[Q128])),
            (v, split(10, 0, 2, 0), ("ring_attention", (4, 1), [1536, 1, 2], &[])),
            (v, split(1, 1, 1, 0), ("ring_attention", (2, 2), [1536, 1, 1], &[])),
            (v, split(20, 4, 2, 4), ("ring_attention", (2, 2), [1536, 1, 2], &[("ring", "all_peers_landing")])),
            (v, split(20, 4, 0, 0), ("ring_attention", (1, 4), [1024, 1, 2], &[("ring", "all_peers_landing"), Q128])),
            (m, split(100, 20, 8, 4), ("moe_dispatch_gemm", (2, 8), [2048, 512, 256], &[])),
            (m, split(110, 14, 8, 0), ("ring_attention", (2, 4), [3072, 1, 4], &[])),
            (m, split(110, 14, 8, 0), ("ring_attention", (2, 4), [3072, 1, 4], &[Q128])),
        ]
    };
    let mut ok = true;
    for (index, (mode, split, case)) in cases.iter().enumerate() {
        if only.is_some_and(|only| only != index) {
            continue;
        }
        let begin = Instant::now();
        let result = (|| -> Result<String, HwError> {
            let spec = spec(case);
            let kernel = kernel(case.0).expect("a kernel");
            let schedule = kernel.build(&spec)?;
            let program = lower(&schedule, *mode, split, device.sms)?;
            let mut runner = Runner::new(device, module, proxy, &schedule, program)?;
            let mut line = String::new();
            for seed in 0..3 {
                let inputs = inputs(&schedule, kernel, &spec, *mode, seed);
                inputs.load(&runner)?;
                let time = runner.run()?;
                let compared = compare(&runner, &schedule, kernel, &spec, &inputs)?;
                if let (Mode::Mirror, Some(sampled)) =
                    (mode, compare_samples(&runner, &schedule, kernel, &spec, &inputs, 200)?)
                {
                    ok &= sampled.wrong == 0;
                }
                ok &= compared.wrong == 0 && compared.elements > 0;
                let _ = write!(
                    line,
                    " | {}/{} wrong, worst {:.3}, {:.1} us",
                    compared.wrong, compared.elements, compared.worst, time.time_us
                );
            }
            Ok(line)
        })();
        let line = result.unwrap_or_else(|error| {
            ok = false;
            format!(" ERROR {error}")
        });
        println!("check {mode:?} {case:?} [{split}]{line} ({:.1} s)", begin.elapsed().as_secs_f64());
    }
    ok
}

/// Runs a program that lacks one signal: the watchdog must end it and name who waits for what.
fn stuck(device: Device, module: Module, proxy: &Proxy) -> Result<bool, HwError> {
    let case: Case = ("gemm_rs", (1, 4), [1024, 1024, 192], &[]);
    let split = RoleSplit { compute: 20, inter_reduce: 4, ..RoleSplit::default() };
    let spec = spec(&case);
    let schedule = kernel(case.0).expect("a kernel").build(&spec)?;
    let mut program = lower(&schedule, Mode::Virtual, &split, device.sms)?;
    program.signals[0].add = 0;
    let mut runner = Runner::new(device, module, proxy, &schedule, program)?;
    match runner.run() {
        Err(HwError::Stuck(blocked)) => {
            println!("{}", HwError::Stuck(blocked));
            Ok(true)
        }
        other => {
            println!("not stuck: {other:?}");
            Ok(false)
        }
    }
}

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, file) = match &arguments[..] {
        [command, file, ..] => (command.as_str(), file.as_str()),
        _ => {
            return Err("measure compile CUBIN | check CUBIN [CASE] | stuck CUBIN".into());
        }
    };
    if command == "compile" {
        let begin = Instant::now();
        let cubin = device::compile(tilewire_kernels::cuda::INTERPRETER)?;
        std::fs::write(file, &cubin.bytes)?;
        let seconds = begin.elapsed().as_secs_f64();
        println!("NVRTC {:?}: {} bytes in {seconds:.1} s", device::nvrtc_version()?, cubin.bytes.len());
        return Ok(());
    }
    let device = Device::open()?;
    let cubin = std::fs::read(file)?;
    let module = device.load(&cubin)?;
    let proxy = Proxy::new(device, module, 4)?;
    println!("{device:?}, driver {}, copies by {:?}: {:?}", device.driver_version()?, proxy.method, proxy.tried);
    if command == "stuck" {
        std::process::exit(if stuck(device, module, &proxy)? { 0 } else { 3 });
    }
    let only = arguments.get(2).and_then(|text| text.parse().ok());
    std::process::exit(if check(device, module, &proxy, only) { 0 } else { 3 });
}

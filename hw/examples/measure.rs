//! Checks values of schedules on one GPU, and what the runner can do beside running.
//!
//! `measure compile CUBIN` compiles the interpreter. `measure check CUBIN [CASE]` runs small shapes in virtual and mirror
//! mode against the reference; `measure stuck CUBIN` shows what the watchdog says of a lost signal; `measure pace CUBIN`
//! times puts under emulated fabrics; `measure timeline CUBIN` records published shapes and says what that costs;
//! `measure moves CUBIN` says where the time of ring attention's copies goes, CTA by CTA.

use std::fmt::Write as _;
use std::time::Instant;
use tilewire_hw::device::{self, Device, HwError, Module};
use tilewire_hw::launch::Runner;
use tilewire_hw::lower::{Mode, lower};
use tilewire_hw::measure::{compare, compare_samples, inputs, spread};
use tilewire_hw::proxy::{Pacing, Proxy};
use tilewire_hw::reduced::{Part, reduced};
use tilewire_hw::timeline::TaskTime;
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

/// Records a run of a published shape, and says what its timeline holds.
fn timelines(device: Device, module: Module, proxy: &Proxy) -> Result<bool, HwError> {
    let cases: [(RoleSplit, Case); 4] = {
        let split = |c, i, s, r| RoleSplit { compute: c, intra_comm: i, inter_send: s, inter_reduce: r };
        [
            (split(116, 0, 0, 16), ("gemm_rs", (1, 8), [8192, 8192, 1024], &[])),
            (split(116, 12, 4, 0), ("ag_gemm", (2, 8), [8192, 512, 8192], &[])),
            (split(84, 40, 4, 4), ("moe_dispatch_gemm", (2, 8), [8192, 7168, 2048], &[])),
            (split(120, 8, 4, 0), ("ring_attention", (2, 8), [24576, 4, 16], &[])),
        ]
    };
    let mut ok = true;
    for (split, case) in &cases {
        let spec = spec(case);
        let kernel = kernel(case.0).expect("a kernel");
        let schedule = kernel.build(&spec)?;
        let inputs = inputs(&schedule, kernel, &spec, Mode::Mirror, 1);
        let program = lower(&schedule, Mode::Mirror, split, device.sms)?;
        let mut runner = Runner::new(device, module, proxy, &schedule, program)?;
        inputs.load(&runner)?;
        let mut times = [Vec::new(), Vec::new()];
        for run in 0..62 {
            runner.record(run % 2 == 1)?;
            let time = runner.run()?.span_us;
            if run > 1 {
                times[run % 2].push(time);
            }
        }
        let ratios = times[1].iter().zip(&times[0]).map(|(recorded, plain)| recorded / plain).collect();
        let [q1, mid, q3] = spread(ratios);
        let span_us = times[1].last().copied().unwrap_or_default();
        let tasks = runner.timeline()?;
        let in_order = tasks.iter().filter(|t| t.taken <= t.start && t.start <= t.free && t.free <= t.end).count();
        let end_us = tasks.iter().map(|t| t.end).max().unwrap_or(0) as f64 * 1e-6;
        ok &= in_order == tasks.len() && tasks.len() == runner.program().tasks.len() && end_us <= span_us + 1.0;
        println!(
            "timeline {} {}: {} tasks, {in_order} in order, last end {end_us:.2} us, span {span_us:.2} us; recorded over \
             plain, 30 pairs: {mid:.4} ({q1:.4} {q3:.4})",
            case.0,
            spec.problem,
            tasks.len()
        );
        for role in 0..schedule.launches[0].roles.len() as u32 {
            let of: Vec<_> = tasks.iter().filter(|t| t.role == role).collect();
            let mean = |f: &dyn Fn(&TaskTime) -> u64| {
                of.iter().map(|t| f(t) as f64).sum::<f64>() * 1e-6 / of.len().max(1) as f64
            };
            println!(
                "  {}: {} tasks, wait {:.2} us, work {:.2} us, to visible {:.2} us, {} waited at the start",
                schedule.launches[0].roles[role as usize].kind,
                of.len(),
                mean(&|t| t.start - t.taken),
                mean(&|t| t.free - t.start),
                mean(&|t| t.end - t.free),
                of.iter().filter(|t| t.waited_for.is_some()).count()
            );
        }
    }
    Ok(ok)
}

/// Where the time of ring attention's copies goes: between two copies of a CTA, in the copy, until its flags are raised.
fn moves(device: Device, module: Module, proxy: &Proxy) -> Result<(), HwError> {
    for (batch, intra) in [(1, 4), (1, 16), (1, 40), (4, 4), (4, 16), (4, 40)] {
        let case: Case = ("ring_attention", (1, 8), [12288, batch, 8], &[]);
        let spec = spec(&case);
        let kernel = kernel(case.0).expect("a kernel");
        let schedule = kernel.build(&spec)?;
        let split = RoleSplit { compute: device.sms - intra, intra_comm: intra, ..RoleSplit::default() };
        let whole = lower(&schedule, Mode::Mirror, &split, device.sms)?;
        let inputs = inputs(&schedule, kernel, &spec, Mode::Mirror, 1);
        let mut runner = Runner::new(device, module, proxy, &schedule, whole.clone())?;
        inputs.load(&runner)?;
        for part in [Part::Whole, Part::CommOnly] {
            runner.replace(reduced(&whole, part))?;
            let plain: Vec<f64> = (0..9).map(|_| Ok(runner.run()?.span_us)).collect::<Result<_, HwError>>()?;
            runner.record(true)?;
            runner.run()?;
            let span_us = runner.run()?.span_us;
            let tasks = runner.timeline()?;
            let mut line = String::new();
            for (role, name) in [(1, "copies"), (0, "tiles")] {
                let mut of: Vec<_> = tasks.iter().filter(|t| t.role == role).collect();
                // Recycled CTAs keep their place: a CTA's tasks follow each other.
                of.sort_unstable_by_key(|t| (t.cta, t.taken));
                let quartiles = |values: Vec<f64>| spread(values).map(|v| format!("{v:.2}")).join("/");
                let us = |f: &dyn Fn(&TaskTime) -> f64| quartiles(of.iter().map(|t| f(t) * 1e-6).collect());
                let gaps = of.windows(2).filter(|w| w[0].cta == w[1].cta);
                let claims = quartiles(gaps.map(|w| (w[1].taken as f64 - w[0].free as f64) * 1e-6).collect());
                let _ = write!(
                    line,
                    "\n  {name}: {} tasks; free to next taken {claims}, taken to start {}, start to free {}, free to end {}",
                    of.len(),
                    us(&|t| t.start as f64 - t.taken as f64),
                    us(&|t| t.free as f64 - t.start as f64),
                    us(&|t| t.end as f64 - t.free as f64),
                );
            }
            println!(
                "moves batch={batch} intra={intra} {part:?}: span {:.1} us plain, {span_us:.1} recorded; quartiles in us{line}",
                spread(plain)[1]
            );
        }
    }
    Ok(())
}

/// Times a schedule whose puts take long under emulated fabrics, beside the least time that each allows.
fn pace(device: Device, module: Module, mut proxy: Proxy) -> Result<(), HwError> {
    const G: u64 = 1_000_000_000;
    let case: Case = ("ag_gemm", (2, 8), [8192, 512, 8192], &[]);
    let spec = spec(&case);
    let kernel = kernel(case.0).expect("a kernel");
    let schedule = kernel.build(&spec)?;
    let split = RoleSplit { compute: 116, intra_comm: 12, inter_send: 4, inter_reduce: 0 };
    let inputs = inputs(&schedule, kernel, &spec, Mode::Mirror, 1);
    let fabric = |latency_ns, bytes_per_s, messages_per_s| Some(Pacing { latency_ns, bytes_per_s, messages_per_s });
    for pacing in [
        None,
        fabric(0, 1000 * G, G),
        fabric(0, 20 * G, G),
        fabric(0, 10 * G, G),
        fabric(0, 5 * G, G),
        fabric(100_000, 20 * G, G),
        fabric(1_000_000, 20 * G, G),
        fabric(0, 1000 * G, 10_000),
        None,
    ] {
        proxy.pace(pacing);
        let program = lower(&schedule, Mode::Mirror, &split, device.sms)?;
        let puts: Vec<u64> = program.puts.iter().flatten().map(|put| put.bytes).collect();
        let least = pacing.map_or(0.0, |p| {
            let each = |bytes: &u64| (*bytes as f64 / p.bytes_per_s as f64).max(1.0 / p.messages_per_s as f64);
            puts.iter().map(each).sum::<f64>() * 1e6 + p.latency_ns as f64 * 1e-3
        });
        let mut runner = Runner::new(device, module, &proxy, &schedule, program)?;
        inputs.load(&runner)?;
        let runs: Vec<f64> = (0..21).map(|_| Ok(runner.run()?.time_us)).collect::<Result<_, HwError>>()?;
        let [q1, mid, q3] = spread(runs);
        let put_bytes = puts.iter().sum::<u64>();
        println!(
            "pace {pacing:?} by {:?}: {} puts, {put_bytes} bytes: {mid:.1} us ({q1:.1} {q3:.1}), {:.1} GB/s; the fabric's \
             least {least:.1} us",
            proxy.method,
            puts.len(),
            put_bytes as f64 / mid * 1e-3
        );
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [command, file, ..] = &arguments[..] else {
        let commands = "compile CUBIN | check CUBIN [CASE] | stuck CUBIN | pace CUBIN | timeline CUBIN | moves CUBIN";
        return Err(format!("measure {commands}").into());
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
    let proxy = Proxy::new(device, module, 4, device)?;
    println!("{device:?}, driver {}, copies by {:?}: {:?}", device.driver_version()?, proxy.method, proxy.tried);
    if command == "pace" {
        return Ok(pace(device, module, proxy)?);
    }
    if command == "moves" {
        return Ok(moves(device, module, &proxy)?);
    }
    if command == "timeline" {
        std::process::exit(if timelines(device, module, &proxy)? { 0 } else { 3 });
    }
    if command == "stuck" {
        std::process::exit(if stuck(device, module, &proxy)? { 0 } else { 3 });
    }
    let only = arguments.get(2).and_then(|text| text.parse().ok());
    std::process::exit(if check(device, module, &proxy, only) { 0 } else { 3 });
}

//! Checks values and measures times of the GEMM family on all GPUs of this host, a rank each, peers over NVLink.
//!
//! `cluster check CUBIN` runs small shapes against the reference; `cluster stuck CUBIN` shows what the watchdogs say of a
//! lost signal; `cluster one CUBIN KERNEL M N K COMPUTE INTRA REDUCE [OPTION=VALUE]... [, NEXT POINT]` times points;
//! `cluster sweep CUBIN OUT.csv BUDGET_S` times shapes over splits, correctness in the same run.

use std::fmt::Write as _;
use std::time::Instant;
use tilewire_hw::cluster::{ClusterRunner, Seat};
use tilewire_hw::device::{self, Device, HwError};
use tilewire_hw::lower::{Mode, lower_cluster};
use tilewire_hw::measure::{inputs, spread};
use tilewire_kernels::{Cluster, Fabric, OptionSet, Problem, RoleSplit, Spec, kernel, schedule_hash};

type Case<'a> = (&'a str, [u64; 3], &'a [(&'a str, &'a str)]);

fn spec(&(name, [m, n, k], options): &Case<'_>, ranks: u16) -> Spec {
    let problem = Problem::Gemm { m, n, k };
    let cluster = Cluster { nodes: 1, gpus_per_node: ranks };
    let mut set = kernel(name).expect("a kernel").options(OptionSet::Tilewire, &problem, cluster);
    for (name, value) in options {
        set.set(name, value).expect("a legal option");
    }
    // One node posts no puts; the fabric is that of the machine file `h200-nvlink`, so that hashes agree.
    Spec { problem, cluster, fabric: Fabric::IbRc, options: set }
}

const fn split(compute: u32, intra_comm: u32, inter_reduce: u32) -> RoleSplit {
    RoleSplit { compute, intra_comm, inter_send: 0, inter_reduce }
}

const WAIT: (&str, &str) = ("main_loop", "wait_each_step");
const SMALL: [(Case<'static>, RoleSplit); 10] = [
    (("gemm_rs", [1024, 1024, 256], &[]), split(100, 0, 16)),
    (("gemm_rs", [512, 1024, 128], &[("drain", "smem_read"), WAIT]), split(8, 0, 4)),
    (("gemm_rs", [2048, 2048, 512], &[("drain", "visible")]), split(120, 0, 12)),
    (("gemm_rs", [512, 1024, 64], &[]), split(1, 0, 1)),
    (("ag_gemm", [1024, 512, 1024], &[]), split(100, 16, 0)),
    (("ag_gemm", [1024, 1024, 512], &[WAIT]), split(20, 4, 0)),
    (("ag_gemm", [1024, 256, 512], &[("row_order", "absolute")]), split(20, 2, 0)),
    (("gemm_ar", [1024, 1024, 256], &[]), split(100, 16, 0)),
    (("gemm_ar", [1024, 1024, 256], &[WAIT]), split(20, 4, 0)),
    (("gemm_ar", [1024, 1024, 128], &[("node_sum", "pull")]), split(16, 4, 0)),
];

fn check(seats: &[Seat]) -> bool {
    let mut ok = true;
    for (case, split) in &SMALL {
        let begin = Instant::now();
        let result = (|| -> Result<String, HwError> {
            let spec = spec(case, seats.len() as u16);
            let kernel = kernel(case.0).expect("a kernel");
            let schedule = kernel.build(&spec)?;
            let programs = lower_cluster(&schedule, split, seats[0].device.sms)?;
            let mut runner = ClusterRunner::new(seats, &schedule, programs)?;
            let mut line = String::new();
            for seed in 0..3 {
                let inputs = inputs(&schedule, kernel, &spec, Mode::Cluster, seed);
                runner.load(&inputs)?;
                // Twice without new poison: the second run must not live on the first one's flags.
                runner.run()?;
                let time = runner.run()?;
                let compared = runner.compare(kernel, &spec, &inputs)?;
                let sampled = runner.compare_samples(kernel, &spec, &inputs, 200)?.unwrap_or_default();
                let _ = write!(
                    line,
                    "{} of {} wrong, worst {:.2} of the bound; sampled {} of {}; {:.1} us, skew {:.1}; ",
                    compared.wrong,
                    compared.elements,
                    compared.worst,
                    sampled.wrong,
                    sampled.elements,
                    time.time_us,
                    time.start_skew_us
                );
                if compared.wrong > 0 || sampled.wrong > 0 || compared.elements == 0 {
                    line.push_str("WRONG ");
                }
            }
            Ok(line)
        })();
        let text = result.unwrap_or_else(|error| format!("WRONG {error}"));
        ok &= !text.contains("WRONG");
        println!("check {} {:?} {:?} [{split}]: {text}{:.1} s", case.0, case.1, case.2, begin.elapsed().as_secs_f64());
    }
    ok
}

/// A run in which rank 1 never tells the others: every watchdog must end its launch and say what it waited for.
fn stuck(seats: &[Seat]) -> Result<bool, HwError> {
    let (case, split) = &SMALL[0];
    let schedule = kernel(case.0).expect("a kernel").build(&spec(case, seats.len() as u16))?;
    let mut programs = lower_cluster(&schedule, split, seats[0].device.sms)?;
    programs[1].signals.iter_mut().filter(|signal| signal.gpu != 1).for_each(|signal| signal.add = 0);
    let ended = ClusterRunner::new(seats, &schedule, programs)?.run();
    println!("{}", ended.as_ref().map_or_else(ToString::to_string, |time| format!("not stuck: {time:?}")));
    Ok(matches!(ended, Err(HwError::Stuck(_))))
}

const HEADER: &str = "kernel,cluster,m,n,k,options,compute,intra,send,reduce,mode,transport,time_us,time_us_q1,time_us_q3,\
    skew_us,span_us,sm_mhz,tflops_per_gpu,warm_up,repeats,inputs,outputs_wrong,outputs_worst,cubin,driver,nvrtc,\
    schedule_hash\n";

/// Shapes by weight of communication; the splits of each.
fn points() -> Vec<(Case<'static>, Vec<RoleSplit>)> {
    let reduce = [2u32, 4, 6, 8, 12, 16, 24, 32, 48];
    let copy = [2u32, 4, 6, 8, 10, 12, 16, 24, 32];
    let cases: [Case<'static>; 13] = [
        ("gemm_rs", [8192, 8192, 4096], &[]),
        ("ag_gemm", [8192, 4096, 8192], &[]),
        ("gemm_ar", [8192, 8192, 4096], &[]),
        ("gemm_rs", [8192, 8192, 1024], &[]),
        ("ag_gemm", [8192, 1024, 8192], &[]),
        ("gemm_ar", [8192, 8192, 1024], &[]),
        ("gemm_rs", [4096, 4096, 2048], &[]),
        ("ag_gemm", [4096, 2048, 4096], &[]),
        ("gemm_ar", [4096, 4096, 2048], &[]),
        ("gemm_rs", [8192, 8192, 256], &[]),
        ("gemm_rs", [16384, 16384, 8192], &[]),
        ("ag_gemm", [16384, 8192, 16384], &[]),
        ("gemm_ar", [16384, 16384, 8192], &[]),
    ];
    let of = |case: Case<'static>| {
        let splits = match case.0 {
            "gemm_rs" => reduce.iter().map(|&r| split(132 - r, 0, r)).collect(),
            _ => copy.iter().map(|&c| split(132 - c, c, 0)).collect(),
        };
        (case, splits)
    };
    cases.into_iter().map(of).collect()
}

fn sweep(seats: &[Seat], cubin: &str, out: &str, budget_s: f64) -> Result<(), Box<dyn std::error::Error>> {
    const WARM_UP: u32 = 10;
    const REPEATS: u32 = 21;
    let begin = Instant::now();
    let ranks = seats.len() as u16;
    let mut csv = String::from(HEADER);
    let (driver, nvrtc) = (seats[0].device.driver_version()?, device::nvrtc_version().unwrap_or_default());
    for (case, splits) in points() {
        let spec = spec(&case, ranks);
        let kernel = kernel(case.0).expect("a kernel");
        let schedule = kernel.build(&spec)?;
        let inputs = inputs(&schedule, kernel, &spec, Mode::Cluster, 1);
        for split in splits {
            if begin.elapsed().as_secs_f64() > budget_s {
                println!("budget spent");
                return Ok(());
            }
            let programs = match lower_cluster(&schedule, &split, seats[0].device.sms) {
                Ok(programs) => programs,
                Err(error) => {
                    println!("{} [{split}]: {error}", case.0);
                    continue;
                }
            };
            let mut runner = ClusterRunner::new(seats, &schedule, programs)?;
            runner.load(&inputs)?;
            let runs = runner.time(WARM_UP, REPEATS)?;
            let compared = runner.compare_samples(kernel, &spec, &inputs, 32)?.unwrap_or_default();
            let [q1, mid, q3] = spread(runs.iter().map(|run| run.time_us).collect());
            let skew = spread(runs.iter().map(|run| run.start_skew_us).collect())[1];
            let of_ranks =
                |f: fn(&tilewire_hw::launch::RunTime) -> f64| runs.iter().map(move |run| run.ranks.iter().map(f));
            let span = spread(of_ranks(|r| r.span_us).map(|ranks| ranks.fold(0.0, f64::max)).collect())[1];
            let mhz = spread(of_ranks(|r| r.sm_mhz).map(|ranks| ranks.fold(f64::MAX, f64::min)).collect())[1];
            let tflops = schedule.useful_flops as f64 / mid * 1e-6;
            let ([m, n, k], wrong) = (case.1, compared.wrong);
            println!(
                "{} 1x{ranks} {m} {n} {k} [{split}]: {mid:.1} us ({q1:.1} {q3:.1}), span {span:.1}, skew {skew:.1}, \
                 {tflops:.0} TFLOP/s, {mhz:.0} MHz, {wrong} wrong, worst {:.2}",
                case.0, compared.worst
            );
            let _ = writeln!(
                csv,
                "{},1x{ranks},{m},{n},{k},tilewire,{},{},0,{},cluster,nvlink,{mid:.2},{q1:.2},{q3:.2},{skew:.2},{span:.2},\
                 {mhz:.0},{tflops:.1},{WARM_UP},{REPEATS},random,{wrong},{:.3},{cubin},{driver},{}.{},{}",
                case.0,
                split.compute,
                split.intra_comm,
                split.inter_reduce,
                compared.worst,
                nvrtc.0,
                nvrtc.1,
                schedule_hash(&schedule, &split)
            );
            std::fs::write(out, &csv)?;
        }
    }
    Ok(())
}

/// One point: `KERNEL M N K COMPUTE INTRA REDUCE [OPTION=VALUE]...`.
fn one(seats: &[Seat], words: &[&str]) -> Result<bool, Box<dyn std::error::Error>> {
    let [name, numbers @ ..] = words else { return Err("no kernel".into()) };
    let (numbers, options) =
        numbers.split_at_checked(6).ok_or("KERNEL M N K COMPUTE INTRA REDUCE [OPTION=VALUE]...")?;
    let numbers = numbers.iter().map(|text| text.parse()).collect::<Result<Vec<u64>, _>>()?;
    let options =
        options.iter().map(|text| text.split_once('=').ok_or("OPTION=VALUE")).collect::<Result<Vec<_>, _>>()?;
    let case = (*name, [numbers[0], numbers[1], numbers[2]], &options[..]);
    let split = split(numbers[3] as u32, numbers[4] as u32, numbers[5] as u32);
    let spec = spec(&case, seats.len() as u16);
    let kernel = kernel(name).ok_or("no such kernel")?;
    let schedule = kernel.build(&spec)?;
    let inputs = inputs(&schedule, kernel, &spec, Mode::Cluster, 1);
    let mut runner = ClusterRunner::new(seats, &schedule, lower_cluster(&schedule, &split, seats[0].device.sms)?)?;
    runner.load(&inputs)?;
    let runs = runner.time(10, 21)?;
    let compared = runner.compare_samples(kernel, &spec, &inputs, 32)?.unwrap_or_default();
    let [q1, mid, q3] = spread(runs.iter().map(|run| run.time_us).collect());
    let mhz = spread(runs.iter().map(|run| run.ranks[0].sm_mhz).collect())[1];
    println!("{}: {mid:.1} us ({q1:.1} {q3:.1}), {mhz:.0} MHz, {} wrong", words.join(" "), compared.wrong);
    Ok(compared.wrong == 0)
}

fn main() {
    match run() {
        Ok(true) => {}
        Ok(false) => std::process::exit(3),
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}

fn run() -> Result<bool, Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [command @ ("check" | "stuck" | "sweep" | "one"), file, ..] = words[..] else {
        return Err("cluster check CUBIN | stuck CUBIN | sweep CUBIN OUT.csv BUDGET_S | one CUBIN POINT...".into());
    };
    let cubin = std::fs::read(file)?;
    let seats = Seat::first(Device::all()?.len(), &cubin, 1)?;
    println!("{} GPUs, driver {}", seats.len(), seats[0].device.driver_version()?);
    match (command, &words[2..]) {
        ("check", []) => Ok(check(&seats)),
        ("one", points) => {
            let mut ok = true;
            for point in points.split(|word| *word == ",") {
                ok &= one(&seats, point)?;
            }
            Ok(ok)
        }
        ("stuck", []) => Ok(stuck(&seats)?),
        ("sweep", [out, budget_s]) => {
            let hash = blake3::hash(&cubin).to_hex();
            sweep(&seats, &hash[..16], out, budget_s.parse()?)?;
            Ok(true)
        }
        _ => Err(format!("{command} takes other arguments").into()),
    }
}

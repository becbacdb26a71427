//! Checks values of all kernels on all GPUs of this host, a rank each, peers over NVLink. Times: `tilewire measure`.
//!
//! `cluster check CUBIN` runs small shapes against the whole reference; `cluster stuck CUBIN` shows what the watchdogs say
//! of a lost signal.

use std::fmt::Write as _;
use std::time::Instant;
use tilewire_hw::cluster::{ClusterRunner, Seat};
use tilewire_hw::device::{Device, HwError};
use tilewire_hw::lower::{Mode, lower_cluster};
use tilewire_hw::measure::inputs;
use tilewire_kernels::{Cluster, Fabric, OptionSet, Problem, RoleSplit, Spec, kernel};

/// Kernel, shape (m, n, k; tokens, hidden, inter; seq, batch, heads), options.
type Case<'a> = (&'a str, [u64; 3], &'a [(&'a str, &'a str)]);

fn spec(&(name, [a, b, c], options): &Case<'_>, ranks: u16) -> Spec {
    let problem = match name {
        "moe_dispatch_gemm" => Problem::Moe { tokens: a, hidden: b, inter: c, topk: 2, experts: 4 * u64::from(ranks) },
        "ring_attention" => Problem::Attention { seq: a, batch: b, heads: c, head_dim: 128 },
        _ => Problem::Gemm { m: a, n: b, k: c },
    };
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
const SMALL: [(Case<'static>, RoleSplit); 16] = [
    (("gemm_rs", [1024, 1024, 256], &[]), split(100, 0, 16)),
    (("gemm_rs", [512, 1024, 128], &[("drain", "smem_read"), WAIT]), split(8, 0, 4)),
    (("gemm_rs", [2048, 2048, 512], &[("drain", "visible")]), split(120, 0, 12)),
    (("gemm_rs", [512, 1024, 64], &[]), split(1, 0, 1)),
    (("ag_gemm", [1024, 512, 1024], &[]), split(100, 16, 0)),
    (("ag_gemm", [1024, 1024, 512], &[WAIT]), split(20, 4, 0)),
    (("ag_gemm", [1024, 256, 512], &[("row_order", "absolute")]), split(20, 2, 0)),
    (("gemm_ar", [1024, 1024, 256], &[]), split(100, 16, 0)),
    (("gemm_ar", [1024, 1024, 256], &[WAIT]), split(20, 4, 0)),
    (("gemm_ar", [1024, 1024, 128], &[("node_sum", "pull"), ("open_lead_tiles", "0")]), split(16, 4, 0)),
    (("moe_dispatch_gemm", [1024, 512, 512], &[]), split(100, 16, 0)),
    (("moe_dispatch_gemm", [1024, 256, 512], &[WAIT, ("routing", "multinomial")]), split(20, 4, 0)),
    (("moe_dispatch_gemm", [1024, 256, 256], &[("claim", "strided"), ("recycle", "false")]), split(16, 4, 0)),
    (("ring_attention", [3072, 1, 4], &[]), split(100, 16, 0)),
    (("ring_attention", [3072, 1, 2], &[("tile_q", "128")]), split(20, 4, 0)),
    (("ring_attention", [3072, 1, 2], &[("ring", "all_peers_landing")]), split(20, 4, 0)),
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
                    time.launched_us.iter().copied().fold(0.0, f64::max)
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
    let [command @ ("check" | "stuck"), file] = words[..] else {
        return Err("cluster check CUBIN | stuck CUBIN".into());
    };
    let cubin = std::fs::read(file)?;
    let seats = Seat::first(Device::all()?.len(), &cubin, 1)?;
    println!("{} GPUs, driver {}", seats.len(), seats[0].device.driver_version()?);
    if command == "check" { Ok(check(&seats)) } else { Ok(stuck(&seats)?) }
}

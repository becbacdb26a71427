//! Whole commands as a user runs them: time, processor time and peak memory of the process, beside the goal.
//!
//! `cargo bench -p tilewire --bench commands [-- full|tune|sweep]`. Memory and processor time come from `/proc`; where
//! there is none their columns are empty.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A command line and the wall time that it should stay below.
struct Job {
    group: &'static str,
    line: String,
    goal_s: f64,
    /// Experiment file that it reads.
    file: Option<&'static str>,
}

/// The largest published shape of each kernel, and a good split with tilewire's options.
const LARGEST: [(&str, &str, &str); 5] = [
    ("gemm_rs", "--m 32768 --n 32768 --k 2048", "compute=120,send=4,reduce=8"),
    ("gemm_ar", "--m 32768 --n 32768 --k 2048", "compute=86,send=7,reduce=39"),
    ("ag_gemm", "--m 32768 --n 2048 --k 32768", "compute=123,intra=8,send=1"),
    ("moe_dispatch_gemm", "--tokens 131072", "compute=101,intra=15,send=1,reduce=15"),
    ("ring_attention", "--seq 196608", "compute=79,intra=2,send=51"),
];

/// 900 splits of a case that needs every rank.
const GEMM_AR_900: &str = r#"
question = "How fast is a sweep of 900 splits?"
kernel = "gemm_ar"
cluster = "2x8-h200-efa"
options = "published"
protocol = "fair"
execution = "full"
shape = { m = 8192, n = 8192, k = 512 }
[split]
compute = "rest"
intra = { from = 4, to = 40, step = 4 }
send = { from = 2, to = 10 }
reduce = { from = 4, to = 40, step = 4 }
"#;

/// The same number with tilewire's options, whose tiles wait for their owner's.
const GEMM_AR_900_TILEWIRE: &str = r#"
question = "How fast is a sweep of 900 splits?"
kernel = "gemm_ar"
cluster = "2x8-h200-efa"
execution = "full"
shape = { m = 8192, n = 8192, k = 512 }
[split]
compute = "rest"
send = { from = 1, to = 18 }
reduce = { from = 1, to = 50 }
"#;

/// 4,969 splits of a case that one rank stands for.
const GEMM_RS_5000: &str = r#"
question = "How fast is a sweep of 5,000 splits?"
kernel = "gemm_rs"
cluster = "2x8-h200-efa"
shape = { m = 32768, n = 32768, k = 2048 }
[split]
compute = "rest"
send = { from = 1, to = 52 }
reduce = { from = 1, to = 100 }
"#;

/// The same number of splits of the case with most tasks.
const RING_5000: &str = r#"
question = "How fast is a sweep of 5,000 splits?"
kernel = "ring_attention"
cluster = "2x8-h200-efa"
shape = { seq = 196608 }
[split]
compute = "rest"
intra = { from = 1, to = 52 }
send = { from = 1, to = 100 }
"#;

/// 5,040 splits of the case that needs every rank and shares most.
const MOE_5000: &str = r#"
question = "How fast is a sweep of 5,000 splits?"
kernel = "moe_dispatch_gemm"
cluster = "2x8-h200-efa"
options = "published"
protocol = "fair"
shape = { tokens = 131072 }
[split]
compute = "rest"
intra = { from = 2, to = 46, step = 4 }
send = { from = 1, to = 20 }
reduce = { from = 1, to = 21 }
"#;

fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    let mut job = |group, goal_s, line: String, file| jobs.push(Job { group, line, goal_s, file });
    for (kernel, shape, split) in LARGEST {
        let case = format!("predict --kernel {kernel} --cluster 2x8-h200-efa {shape} --execution full");
        job("full", 2.0, format!("{case} --split {split}"), None);
        job("full", 2.0, format!("{case} --options published"), None);
    }
    for (kernel, shape, _) in LARGEST {
        job("tune", 2.0, format!("tune --kernel {kernel} --cluster 2x8-h200-efa {shape}"), None);
    }
    for kernel in ["gemm_rs", "gemm_ar"] {
        job("tune", 2.0, format!("tune --kernel {kernel} --cluster 2x8-h200-efa --m 8192 --n 8192 --k 512"), None);
    }
    let moe = "--kernel moe_dispatch_gemm --cluster 2x8-h200-efa --tokens 131072 --options published";
    job("tune", 20.0, format!("tune {moe}"), None);
    job("tune", 20.0, format!("predict {moe} --split auto"), None);
    for (name, goal_s, text) in [
        ("gemm_ar_900", 3.0, GEMM_AR_900),
        ("gemm_ar_900_tilewire", 3.0, GEMM_AR_900_TILEWIRE),
        ("gemm_rs_5000", 30.0, GEMM_RS_5000),
        ("ring_5000", 30.0, RING_5000),
        ("moe_5000", 150.0, MOE_5000),
    ] {
        job("sweep", goal_s, format!("sweep {name}.toml -o {name}"), Some(text));
    }
    jobs
}

/// What a process has used.
#[derive(Clone, Copy, Default)]
struct Used {
    cpu_s: Option<f64>,
    peak_mib: Option<f64>,
}

/// Reads what a process has used so far; true once it has ended and only waits for its parent.
fn look(pid: u32, used: &mut Used) -> bool {
    const TICKS_PER_S: f64 = 100.0;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    used.peak_mib = peak.map(|kib: f64| kib / 1024.0).or(used.peak_mib);
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may hold spaces; state is the first field after it, times the 12th and 13th.
    let Some((_, rest)) = stat.rsplit_once(')') else { return true };
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|field| field.parse::<f64>().ok());
    used.cpu_s = ticks(11).zip(ticks(12)).map(|(user, system)| (user + system) / TICKS_PER_S).or(used.cpu_s);
    fields.first() == Some(&"Z")
}

fn watch(child: &mut Child) -> (Used, bool) {
    let mut used = Used::default();
    while !look(child.id(), &mut used) {
        std::thread::sleep(Duration::from_millis(2));
    }
    (used, child.wait().is_ok_and(|status| status.success()))
}

fn run(directory: &Path, job: &Job) {
    if let (Some(text), Some(name)) = (job.file, job.line.split_whitespace().nth(1)) {
        fs::write(directory.join(name), text).expect("a file");
    }
    let start = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewire"))
        .args(job.line.split_whitespace())
        .current_dir(directory)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary runs");
    let (used, ok) = watch(&mut child);
    let number =
        |value: Option<f64>, digits: usize| value.map_or_else(String::new, |value| format!("{value:.digits$}"));
    println!(
        "{:>8.2} {:>8} {:>9} {:>7}  {}{}",
        start.elapsed().as_secs_f64(),
        number(used.cpu_s, 2),
        number(used.peak_mib, 0),
        job.goal_s,
        job.line,
        if ok { "" } else { "  FAILED" }
    );
}

fn main() {
    // cargo adds flags of its own.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let directory = TempDir::new().expect("a temporary directory");
    println!("{:>8} {:>8} {:>9} {:>7}  command", "wall_s", "cpu_s", "peak_MiB", "goal_s");
    for job in jobs() {
        if wanted.is_empty() || wanted.iter().any(|word| job.group == word || job.line.contains(word.as_str())) {
            run(directory.path(), &job);
        }
    }
}

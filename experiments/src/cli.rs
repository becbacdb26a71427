//! The command line as it is parsed. [`crate::plan`] turns it into cases that are ready to run.

mod case;
mod measure;
mod parse;
mod schedule;

pub use case::{CaseArgs, ChecksArgs, ClockArg, DataArgs, ExecutionArg, OptionsArg, PointArgs, ProtocolArg, RunArgs};
pub use measure::{CalibrateArgs, DeviceArg, MeasureArgs, RankArgs};
pub use schedule::{CheckArgs, DiffArgs, DumpArgs, ScheduleAction, ScheduleArgs, ShowArgs};

use crate::experiment::KEYS;
use clap::{Args, Parser, Subcommand};
use parse::{percent, time, whole};
use std::path::PathBuf;

/// How many SMs should each role of a fused multi-GPU kernel get, and how much communication will be hidden?
#[derive(Debug, Parser)]
#[command(name = "tilewire", version, about, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Predict one kernel, shape and split: time, TFLOPS, overlap, waits, binding resource.
    Predict(PredictArgs),
    /// Run the points of an experiment file: CSV and plots.
    Sweep(SweepArgs),
    /// Search the best split of a shape and certify how far it can be from the optimum.
    Tune(TuneArgs),
    /// Decide the hypotheses of an experiment file by replicated, seeded runs.
    Scale(SweepArgs),
    /// Predict the published figures and plot them beside the published bars, with an error table.
    Figures(FiguresArgs),
    /// Fit the machine parameters of kind "fitted" on published rows, all of them or without a fabric or kernel.
    Fit(FitArgs),
    /// List the kernels, or explain the options of one.
    Kernels(KernelsArgs),
    /// Print a schedule: as JSON, as a table, or what differs between two.
    Schedule(ScheduleArgs),
    /// Write a simulated timeline for ui.perfetto.dev.
    Trace(TraceArgs),
    /// Prove a schedule: deadlocks, flags, resources, races; with --values also what it computes.
    Check(CheckArgs),
    /// Run the points of an experiment file on the GPU here: CSV, like sweep's.
    Measure(MeasureArgs),
    /// Measure the GPU here and fit a machine file to it.
    Calibrate(CalibrateArgs),
    /// Put predictions beside measured rows: errors, plots, cost of the recommended split.
    Compare(CompareArgs),
    /// Put an output directory into one HTML page: plots, tables and what they were made from.
    Report(ReportArgs),
    /// Say what this machine has, and what each missing part disables.
    Doctor(DoctorArgs),
}

/// `predict`.
#[derive(Args, Debug)]
pub struct PredictArgs {
    /// What to predict.
    #[command(flatten)]
    pub point: PointArgs,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Also write prediction.json and its provenance to a directory.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

/// `sweep` and `scale`.
#[derive(Args, Debug)]
#[command(after_long_help = KEYS)]
pub struct SweepArgs {
    /// Experiment.
    #[arg(value_name = "FILE.toml")]
    pub file: PathBuf,
    /// Output directory [default: out/NAME].
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Threads; 0 for one per core. Results do not depend on it.
    #[arg(long, default_value = "0", value_parser = whole(0, 1024))]
    pub threads: u64,
    /// Data.
    #[command(flatten)]
    pub data: DataArgs,
    /// Checker.
    #[command(flatten)]
    pub checks: ChecksArgs,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `compare`.
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// Rows that `measure` wrote.
    #[arg(value_name = "MEASURED.csv", required = true)]
    pub files: Vec<PathBuf>,
    /// Output directory.
    #[arg(short, long, value_name = "DIR", default_value = "out/compare")]
    pub output: PathBuf,
    /// Exit with 3 when the median error is larger.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub max_median: Option<f64>,
    /// Exit with 3 when the 95th percentile of the error is larger.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub max_p95: Option<f64>,
    /// Exit with 3 when the recommended split costs more, beyond the best measured one, in the median over shapes.
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub max_split_cost: Option<f64>,
    /// Threads; 0 for one per core. Results do not depend on it.
    #[arg(long, default_value = "0", value_parser = whole(0, 1024))]
    pub threads: u64,
    /// Data.
    #[command(flatten)]
    pub data: DataArgs,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// `report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Directory that other commands wrote, or one that holds such directories.
    #[arg(value_name = "DIR", default_value = "out")]
    pub folder: PathBuf,
    /// The page [default: DIR/report.html].
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
}

/// `tune`.
#[derive(Args, Debug)]
pub struct TuneArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// Benchmark protocol [default: fair, published with --options published].
    #[arg(long, value_enum)]
    pub protocol: Option<ProtocolArg>,
    /// Execution.
    #[command(flatten)]
    pub run: RunArgs,
    /// Search until no split can be faster.
    #[arg(long, conflicts_with_all = ["budget", "gap"])]
    pub exhaustive: bool,
    /// Simulations at most [default: 2000, fewer where a simulation has many tasks].
    #[arg(long, value_parser = whole(1, 10_000_000))]
    pub budget: Option<u64>,
    /// Stop once the certified gap is this small, in percent.
    #[arg(long, default_value = "1", value_parser = percent, value_name = "PERCENT")]
    pub gap: f64,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Also write the splits that were tried to a directory.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

/// `figures`.
#[derive(Args, Debug)]
pub struct FiguresArgs {
    /// Output directory.
    #[arg(short, long, value_name = "DIR", default_value = "out")]
    pub output: PathBuf,
    /// Also run these experiments, beside the figures; may be repeated.
    #[arg(long, value_name = "FILE.toml")]
    pub with: Vec<PathBuf>,
    /// Threads; 0 for one per core. Results do not depend on it.
    #[arg(long, default_value = "0", value_parser = whole(0, 1024))]
    pub threads: u64,
    /// Data directory instead of the embedded one.
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Checker.
    #[command(flatten)]
    pub checks: ChecksArgs,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// `fit`.
#[derive(Args, Debug)]
pub struct FitArgs {
    /// Fit without these rows and test on them: fabric=efa, kernel=gemm_rs, or all of them one by one; may be repeated.
    /// A fabric is left out twice: but for the rows that tell what its host's launches cost, as far as no error is judged
    /// on them (the output names them), and wholly. `all` also compares the errors with data/published/left_out.csv.
    #[arg(long, value_name = "fabric=NAME|kernel=NAME|all")]
    pub without: Vec<String>,
    /// Also write the values, the rows, and machine files that hold the values to a directory.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Threads; 0 for one per core. Results do not depend on it.
    #[arg(long, default_value = "0", value_parser = whole(0, 1024))]
    pub threads: u64,
    /// Data directory instead of the embedded one.
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// `kernels`.
#[derive(Args, Debug)]
pub struct KernelsArgs {
    /// Kernel whose options are explained.
    #[arg(value_name = "KERNEL")]
    pub kernel: Option<String>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Flags that say what to simulate; a file that was measured says it itself.
const OF_A_CASE: [&str; 26] = [
    "kernel",
    "cluster",
    "m",
    "n",
    "k",
    "tokens",
    "hidden",
    "inter",
    "topk",
    "experts",
    "seq",
    "batch",
    "heads",
    "head_dim",
    "options",
    "set",
    "baseline",
    "bulk_synchronous",
    "split",
    "protocol",
    "seed",
    "noise",
    "execution",
    "clock",
    "unchecked",
    "hazards",
];

/// `trace`.
#[derive(Args, Debug)]
#[command(
    mut_arg("kernel", |arg| arg.required(false).default_value("").hide_default_value(true).required_unless_present("measured")),
    mut_arg("cluster", |arg| arg.required(false).default_value("").hide_default_value(true).required_unless_present("measured"))
)]
pub struct TraceArgs {
    /// What to simulate.
    #[command(flatten)]
    pub point: PointArgs,
    /// A timeline that `measure --timelines` wrote, instead of a simulation.
    #[arg(long, value_name = "TIMELINE.csv", conflicts_with_all = OF_A_CASE)]
    pub measured: Option<PathBuf>,
    /// Also simulate what was measured, and put both into the file.
    #[arg(long, requires = "measured")]
    pub beside: bool,
    /// File that ui.perfetto.dev opens.
    #[arg(short, long, value_name = "FILE.json", default_value = "trace.json")]
    pub output: PathBuf,
    /// Ranks that are kept, numbers: 0,3 [default: all that are simulated].
    #[arg(long)]
    pub ranks: Option<String>,
    /// Roles that are kept: compute,intra,send,reduce [default: all].
    #[arg(long)]
    pub roles: Option<String>,
    /// Start of the time window.
    #[arg(long, value_name = "US", default_value = "0", value_parser = time)]
    pub from_us: f64,
    /// End of the time window [default: the end].
    #[arg(long, value_name = "US", value_parser = time)]
    pub to_us: Option<f64>,
    /// Tasks that are kept, the earliest ones.
    #[arg(long, default_value = "100000", value_parser = whole(1, 10_000_000))]
    pub max_tasks: u64,
}

/// `doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

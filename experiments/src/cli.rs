//! The command line as it is parsed. [`crate::plan`] turns it into cases that are ready to run.

use crate::checked::Checks;
use crate::experiment::KEYS;
use crate::shape;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use tilewire_hw::transport::registration::Path as Registration;
use tilewire_hw::values::Scheduler;
use tilewire_kernels::OptionSet;
use tilewire_kernels::check::{Limits, WireFormat};
use tilewire_sim::Execution;
use tilewire_sim::machine::Carrier;
use tilewire_sim::predict::Clock;

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

/// Where hardware numbers and published rows come from.
#[derive(Args, Clone, Debug, Default)]
pub struct DataArgs {
    /// Data directory instead of the embedded one.
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Machine file instead of the one that the cluster names.
    #[arg(long, value_name = "FILE.toml")]
    pub machine: Option<PathBuf>,
}

/// How a run is executed.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Threads; 0 for one per core. Results do not depend on it.
    #[arg(long, default_value = "0", value_parser = whole(0, 1024))]
    pub threads: u64,
    /// Seed of everything random.
    #[arg(long, default_value = "0", value_parser = whole(0, u64::MAX), allow_negative_numbers = true)]
    pub seed: u64,
    /// Draw latencies, clocks and a late rank from the machine's noise.
    #[arg(long)]
    pub noise: bool,
    /// Ranks that are simulated [default: folded; with the published protocol of gemm_rs, isolated launches of which one rank's is late, full].
    #[arg(long, value_enum)]
    pub execution: Option<ExecutionArg>,
    /// How warm the card is [default: sustained; with the published protocol cold where its loop ends within the machine's cold_ms].
    #[arg(long, value_enum)]
    pub clock: Option<ClockArg>,
    /// Checker.
    #[command(flatten)]
    pub checks: ChecksArgs,
}

/// What is asked of the checker before a schedule is run.
#[derive(Args, Clone, Copy, Debug)]
pub struct ChecksArgs {
    /// Run in spite of fatal findings, say a tile that needs more shared memory than there is.
    #[arg(long)]
    pub unchecked: bool,
    /// Look for data races too and count the hazards: once for each schedule, up to seconds on large shapes.
    #[arg(long)]
    pub hazards: bool,
}

impl ChecksArgs {
    /// As the engine takes it.
    pub const fn checks(self) -> Checks {
        Checks { unchecked: self.unchecked, hazards: self.hazards }
    }
}

/// How warm the card is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClockArg {
    /// Under lasting load.
    Sustained,
    /// In the first tens of milliseconds after idling.
    Cold,
}

impl ClockArg {
    /// As the simulator takes it.
    pub const fn clock(self) -> Clock {
        match self {
            Self::Sustained => Clock::Sustained,
            Self::Cold => Clock::Cold,
        }
    }
}

/// Which ranks are simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExecutionArg {
    /// As few as the symmetry of the schedule allows.
    Folded,
    /// One that stands for all.
    Mirror,
    /// All.
    Full,
}

impl ExecutionArg {
    /// As the simulator takes it.
    pub const fn execution(self) -> Execution {
        match self {
            Self::Folded => Execution::Folded,
            Self::Mirror => Execution::Mirror,
            Self::Full => Execution::Full,
        }
    }
}

/// The shape of a problem; which flags apply depends on the kernel.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Shape")]
pub struct ShapeArgs {
    /// GEMM of a rank: rows.
    #[arg(long, value_parser = size("m"), allow_negative_numbers = true)]
    pub m: Option<u64>,
    /// GEMM of a rank: columns.
    #[arg(long, value_parser = size("n"), allow_negative_numbers = true)]
    pub n: Option<u64>,
    /// GEMM of a rank: depth.
    #[arg(long, value_parser = size("k"), allow_negative_numbers = true)]
    pub k: Option<u64>,
    /// MoE: tokens over all ranks.
    #[arg(long, value_parser = size("tokens"), allow_negative_numbers = true)]
    pub tokens: Option<u64>,
    /// MoE: width of a token [default: 7168].
    #[arg(long, value_parser = size("hidden"), allow_negative_numbers = true)]
    pub hidden: Option<u64>,
    /// MoE: columns of an expert [default: 2048].
    #[arg(long, value_parser = size("inter"), allow_negative_numbers = true)]
    pub inter: Option<u64>,
    /// MoE: experts per token [default: 8].
    #[arg(long, value_parser = size("topk"), allow_negative_numbers = true)]
    pub topk: Option<u64>,
    /// MoE: experts over all ranks [default: 256].
    #[arg(long, value_parser = size("experts"), allow_negative_numbers = true)]
    pub experts: Option<u64>,
    /// Attention: sequence over all ranks.
    #[arg(long, value_parser = size("seq"), allow_negative_numbers = true)]
    pub seq: Option<u64>,
    /// Attention: batch [default: 4].
    #[arg(long, value_parser = size("batch"), allow_negative_numbers = true)]
    pub batch: Option<u64>,
    /// Attention: heads [default: 16].
    #[arg(long, value_parser = size("heads"), allow_negative_numbers = true)]
    pub heads: Option<u64>,
    /// Attention: width of a head [default: 128].
    #[arg(long, value_parser = size("head_dim"), allow_negative_numbers = true)]
    pub head_dim: Option<u64>,
}

impl ShapeArgs {
    /// The fields that are given.
    pub fn given(&self) -> Vec<(&'static str, u64)> {
        shape::names().zip(self.all()).filter_map(|(name, value)| value.map(|value| (name, value))).collect()
    }

    const fn all(&self) -> [Option<u64>; 12] {
        [
            self.m,
            self.n,
            self.k,
            self.tokens,
            self.hidden,
            self.inter,
            self.topk,
            self.experts,
            self.seq,
            self.batch,
            self.heads,
            self.head_dim,
        ]
    }
}

/// One schedule: kernel, cluster, shape, options.
#[derive(Args, Clone, Debug)]
pub struct CaseArgs {
    /// Kernel: ag_gemm, gemm_ar, gemm_rs, moe_dispatch_gemm, ring_attention.
    #[arg(long)]
    pub kernel: String,
    /// Cluster, NxG-MACHINE: 2x8-h200-efa, 1x8-h200 (means 1x8-h200-nvlink).
    #[arg(long, value_name = "NxG-MACHINE")]
    pub cluster: String,
    /// Shape.
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// Set of options to start from.
    #[arg(long, value_enum, default_value_t = OptionsArg::Tilewire, help_heading = "Schedule")]
    pub options: OptionsArg,
    /// One option of the kernel; may be repeated.
    #[arg(long = "set", value_name = "NAME=VALUE", help_heading = "Schedule")]
    pub set: Vec<String>,
    /// The unfused form: library compute, then a library collective.
    #[arg(long, help_heading = "Schedule")]
    pub baseline: bool,
    /// The fused schedule's tasks with compute and communication by turns, a launch for each phase.
    #[arg(long, help_heading = "Schedule", conflicts_with = "baseline")]
    pub bulk_synchronous: bool,
    /// Data.
    #[command(flatten)]
    pub data: DataArgs,
}

/// An option set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptionsArg {
    /// Our best schedule.
    Tilewire,
    /// As the published kernels are.
    Published,
}

impl OptionsArg {
    /// As the builders take it.
    pub const fn set(self) -> OptionSet {
        match self {
            Self::Tilewire => OptionSet::Tilewire,
            Self::Published => OptionSet::Published,
        }
    }
}

/// How launches follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProtocolArg {
    /// A fresh epoch per launch.
    Fair,
    /// What the published benchmark of the kernel did.
    Published,
}

/// A case with its split and protocol.
#[derive(Args, Clone, Debug)]
pub struct PointArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// CTAs per role: compute=112,intra=4,send=8,reduce=8 (a role left out has 0), auto (tuned) or published
    /// [default: auto, published with --options published].
    #[arg(long, help_heading = "Schedule", conflicts_with = "baseline")]
    pub split: Option<String>,
    /// Benchmark protocol [default: fair, published with --options published].
    #[arg(long, value_enum, help_heading = "Schedule")]
    pub protocol: Option<ProtocolArg>,
    /// Execution.
    #[command(flatten)]
    pub run: RunArgs,
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

/// `measure`.
#[derive(Args, Debug)]
pub struct MeasureArgs {
    /// Experiment, as for sweep.
    #[arg(value_name = "FILE.toml")]
    pub file: PathBuf,
    /// Output directory; a run that was stopped goes on from its rows [default: out/NAME-measured].
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Start no point that could end later than this after the start.
    #[arg(long, value_name = "S", value_parser = seconds, allow_negative_numbers = true)]
    pub budget_s: Option<f64>,
    /// Also record the tasks of a run of each point, to timelines/ beside the rows; `trace --measured` shows them.
    #[arg(long)]
    pub timelines: bool,
    /// Measure schedules with hazards too, and do not look for them.
    #[arg(long)]
    pub unchecked: bool,
    /// Where compiled device code is kept [default: tilewire in the user's cache directory].
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// What executes: the GPUs here, one per rank, or CPU threads, one process per rank.
    #[arg(long, value_enum, default_value_t = DeviceArg::Gpu)]
    pub device: DeviceArg,
    /// Ranks that are processes.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Data.
    #[command(flatten)]
    pub data: DataArgs,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `calibrate`.
#[derive(Args, Debug)]
pub struct CalibrateArgs {
    /// Rows that were measured before, which need no GPU; may be repeated.
    #[arg(long, value_name = "MEASURED.csv")]
    pub rows: Vec<PathBuf>,
    /// Calibrate the wire between two ranks that are processes, and the host device on both, instead of a GPU.
    #[arg(long, conflicts_with_all = ["rows", "readings", "fills", "cite", "cache"])]
    pub fabric: bool,
    /// Ranks that are processes.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Readings of flags, FIFO, launches and fills that `calibrate` wrote; without it they are read when rows are measured.
    /// May be repeated.
    #[arg(long, value_name = "READINGS.csv")]
    pub readings: Vec<PathBuf>,
    /// What `measure --timelines` wrote for experiments/measured/fit/gemm_fills.toml or attention_fills.toml; may be
    /// repeated.
    #[arg(long, value_name = "DIR")]
    pub fills: Vec<PathBuf>,
    /// What the machine file cites as the place of the rows.
    #[arg(long, value_name = "TEXT")]
    pub cite: Option<String>,
    /// Output directory; measuring that was stopped goes on from its rows.
    #[arg(short, long, value_name = "DIR", default_value = "out/calibrate")]
    pub output: PathBuf,
    /// Where compiled device code is kept [default: tilewire in the user's cache directory].
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Data; the machine is what is not fitted [default: h200-1gpu].
    #[command(flatten)]
    pub data: DataArgs,
}

/// What executes a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// The GPUs of this machine.
    Gpu,
    /// CPU threads: proves values and the wire, not speed.
    Host,
}

fn carrier(text: &str) -> Result<Carrier, String> {
    let named = Carrier::ALL.into_iter().find(|carrier| carrier.name() == text);
    named.ok_or_else(|| "allowed: loopback; verbs-rc and verbs-srd in builds with --features rdma".to_owned())
}

fn registration(text: &str) -> Result<Registration, String> {
    let named = Registration::ALL.into_iter().find(|way| way.name() == text);
    named.ok_or_else(|| "allowed: host, dmabuf, peermem, bounce".to_owned())
}

fn address(text: &str) -> Result<String, String> {
    let port =
        text.rsplit_once(':').filter(|(host, _)| !host.is_empty()).and_then(|(_, port)| port.parse::<u16>().ok());
    let allowed = || "allowed: HOST:PORT, a port from 1 to 65535".to_owned();
    port.filter(|&port| port > 0).map(|_| text.to_owned()).ok_or_else(allowed)
}

/// Ranks that are processes: who starts them, how they find each other, and what connects them.
#[derive(Args, Debug)]
#[command(next_help_heading = "Ranks as processes")]
pub struct RankArgs {
    /// Start every rank as a process of its own here, without mpirun or srun. On GPUs, ranks are threads of one process
    /// without it.
    #[arg(long)]
    pub spawn: bool,
    /// What carries puts: loopback; verbs-rc or verbs-srd in builds with the feature rdma [default: the machine's, else
    /// loopback].
    #[arg(long, value_name = "NAME", value_parser = carrier)]
    pub transport: Option<Carrier>,
    /// How NICs come to a rank's memory: host (CPU threads), dmabuf or peermem (GPUs), bounce (by copies through host
    /// memory) [default: the first that works].
    #[arg(long, value_name = "NAME", value_parser = registration)]
    pub registration: Option<Registration>,
    /// Where rank 0 listens [default: 127.0.0.1:7311, with --spawn a free port].
    #[arg(long, value_name = "HOST:PORT", value_parser = address)]
    pub address: Option<String>,
    /// RDMA devices of each node, or of one for all; a+b for two rails [default: the nearest active ones].
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub nics: Vec<String>,
    /// Proxy threads of a rank [default: the machine's].
    #[arg(long, value_name = "N", value_parser = whole(1, 64))]
    pub proxies: Option<u64>,
}

impl RankArgs {
    /// The first of these arguments that was given.
    pub fn given(&self) -> Option<&'static str> {
        let given = [("--spawn", self.spawn), ("--address", self.address.is_some())];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name).or_else(|| self.given_of_wire())
    }

    /// The first argument about NICs that was given.
    pub fn given_of_wire(&self) -> Option<&'static str> {
        let given = [
            ("--transport", self.transport.is_some()),
            ("--registration", self.registration.is_some()),
            ("--nics", !self.nics.is_empty()),
            ("--proxies", self.proxies.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
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
    #[arg(long, value_name = "PERCENT", value_parser = percent, allow_negative_numbers = true)]
    pub max_median: Option<f64>,
    /// Exit with 3 when the 95th percentile of the error is larger.
    #[arg(long, value_name = "PERCENT", value_parser = percent, allow_negative_numbers = true)]
    pub max_p95: Option<f64>,
    /// Exit with 3 when the recommended split costs more, beyond the best measured one, in the median over shapes.
    #[arg(long, value_name = "PERCENT", value_parser = percent, allow_negative_numbers = true)]
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
    /// Benchmark protocol.
    #[arg(long, value_enum, default_value_t = ProtocolArg::Fair)]
    pub protocol: ProtocolArg,
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

/// `schedule`.
#[derive(Args, Debug)]
pub struct ScheduleArgs {
    /// What to print.
    #[command(subcommand)]
    pub action: ScheduleAction,
}

/// What `schedule` prints.
#[derive(Debug, Subcommand)]
pub enum ScheduleAction {
    /// JSON of a schedule, its tasks included.
    Dump(DumpArgs),
    /// Buffers, flags, roles and the first tasks of each role.
    Show(ShowArgs),
    /// What differs between two schedules of a case.
    Diff(DiffArgs),
}

/// `schedule dump`.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// Split, which is part of the hash.
    #[arg(long, conflicts_with = "baseline")]
    pub split: Option<String>,
    /// Ranks whose tasks are written, `all` or numbers: 0,3. Default: one of each class.
    #[arg(long)]
    pub ranks: Option<String>,
    /// File instead of standard output.
    #[arg(short, long, value_name = "FILE.json")]
    pub output: Option<PathBuf>,
}

/// `schedule show`.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// Rank whose tasks are shown.
    #[arg(long, default_value = "0", value_parser = whole(0, 65_535), allow_negative_numbers = true)]
    pub rank: u64,
    /// Tasks of each role.
    #[arg(long, default_value = "4", value_parser = whole(0, 1_000_000))]
    pub limit: u64,
}

/// `schedule diff`.
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// First schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// Option set of the second schedule [default: as the first].
    #[arg(long, value_enum)]
    pub with_options: Option<OptionsArg>,
    /// An option of the second schedule; may be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pub with_set: Vec<String>,
    /// Cluster of the second schedule [default: as the first].
    #[arg(long, value_name = "NxG-MACHINE")]
    pub with_cluster: Option<String>,
    /// Tasks of each role that are printed at most.
    #[arg(long, default_value = "4", value_parser = whole(0, 1_000_000))]
    pub limit: u64,
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
    #[arg(long, value_name = "US", default_value = "0", value_parser = time, allow_negative_numbers = true)]
    pub from_us: f64,
    /// End of the time window [default: the end].
    #[arg(long, value_name = "US", value_parser = time, allow_negative_numbers = true)]
    pub to_us: Option<f64>,
    /// Tasks that are kept, the earliest ones.
    #[arg(long, default_value = "100000", value_parser = whole(1, 10_000_000))]
    pub max_tasks: u64,
}

/// `check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// CTAs per role, to be counted against the SMs: compute=112,send=8,... or published. Without, every role counts as
    /// having CTAs, and --values gives each role two.
    #[arg(long, help_heading = "Schedule", conflicts_with = "baseline")]
    pub split: Option<String>,
    /// Room.
    #[command(flatten)]
    pub limits: LimitsArgs,
    /// Also run the schedule with real values on the CPU and compare them with the reference. For small shapes: see
    /// --set tile_m and its like.
    #[arg(long, help_heading = "Values")]
    pub values: bool,
    /// First seed of inputs and interleaving.
    #[arg(long, default_value_t = 0, requires = "values", help_heading = "Values")]
    pub seed: u64,
    /// Seeds for each scheduler.
    #[arg(long, default_value = "2", value_parser = whole(1, 1_000_000), requires = "values", help_heading = "Values")]
    pub seeds: u64,
    /// Who moves next; may be repeated [default: all].
    #[arg(long, value_parser = scheduler(), requires = "values", help_heading = "Values")]
    pub scheduler: Vec<Scheduler>,
    /// Runs in a row in the same memory, with fresh inputs and the flags of the other bank.
    #[arg(long, default_value = "2", value_parser = whole(1, 1000), requires = "values", help_heading = "Values")]
    pub runs: u64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Room that a schedule must fit into, where it is not the machine's.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Limits")]
pub struct LimitsArgs {
    /// SMs of a GPU [default: the machine's].
    #[arg(long, value_parser = whole(1, 1024))]
    pub sms: Option<u64>,
    /// Bytes of shared memory of a CTA [default: the machine's].
    #[arg(long, value_parser = whole(0, u64::from(u32::MAX)))]
    pub shared_bytes: Option<u64>,
    /// NIC queues of a rank [default: 64].
    #[arg(long, value_parser = whole(0, 65_536))]
    pub queues: Option<u64>,
    /// Commands that the device-to-host ring holds [default: the machine's].
    #[arg(long, value_parser = whole(0, u64::from(u32::MAX)))]
    pub fifo_depth: Option<u64>,
    /// Writes in flight per queue [default: the machine's].
    #[arg(long, value_parser = whole(0, u64::from(u32::MAX)))]
    pub in_flight: Option<u64>,
    /// Bits of a byte offset in the transport's command [default: 64].
    #[arg(long, value_parser = whole(1, 64))]
    pub offset_bits: Option<u64>,
    /// Bits of the bytes of a put [default: 32].
    #[arg(long, value_parser = whole(1, 64))]
    pub length_bits: Option<u64>,
    /// Bits of the slot of an arrival word [default: 30].
    #[arg(long, value_parser = whole(1, 64))]
    pub slot_bits: Option<u64>,
    /// Bits of the number of a queue [default: 16].
    #[arg(long, value_parser = whole(1, 64))]
    pub queue_bits: Option<u64>,
}

impl LimitsArgs {
    /// These limits where they are given, else those.
    pub fn over(self, limits: Limits) -> Limits {
        let or = |given: Option<u64>, known: u32| given.map_or(known, |given| given as u32);
        let wire = limits.wire;
        Limits {
            sms: or(self.sms, limits.sms),
            shared_bytes: self.shared_bytes.unwrap_or(limits.shared_bytes),
            queues: or(self.queues, limits.queues),
            fifo_depth: or(self.fifo_depth, limits.fifo_depth),
            in_flight: or(self.in_flight, limits.in_flight),
            wire: WireFormat {
                offset_bits: or(self.offset_bits, wire.offset_bits),
                length_bits: or(self.length_bits, wire.length_bits),
                slot_bits: or(self.slot_bits, wire.slot_bits),
                queue_bits: or(self.queue_bits, wire.queue_bits),
            },
        }
    }
}

fn scheduler() -> impl TypedValueParser<Value = Scheduler> {
    let named = |name: String| Scheduler::ALL.into_iter().find(|scheduler| scheduler.name() == name);
    PossibleValuesParser::new(Scheduler::ALL.map(Scheduler::name))
        .map(move |name| named(name).expect("the parser takes these names only"))
}

/// `doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// A parser of whole numbers in an inclusive range.
fn whole(min: u64, max: u64) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let allowed = || format!("allowed: a whole number from {min} to {max}");
        shape::whole(text).filter(|value| (min..=max).contains(value)).ok_or_else(allowed)
    }
}

fn size(field: &'static str) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    whole(1, shape::max(field))
}

fn number(text: &str, min: f64, max: f64, unit: &str) -> Result<f64, String> {
    // Written as people write numbers: neither "+1" nor "inf" nor " 1".
    let plain = text.starts_with(|c: char| c.is_ascii_digit());
    let value: Option<f64> = text.parse().ok().filter(|value| plain && (min..=max).contains(value));
    value.ok_or_else(|| format!("allowed: a number from {min} to {max}{unit}"))
}

fn percent(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1000.0, " %")
}

fn seconds(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1e6, " s")
}

fn time(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1e12, " us")
}

//! Flags that say what is simulated: data, kernel, shape, options, split, and how the run is made.

use super::parse::{size, whole};
use crate::checked::Checks;
use crate::shape;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use tilewire_kernels::OptionSet;
use tilewire_sim::Execution;
use tilewire_sim::predict::Clock;

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
    #[arg(long, default_value = "0", value_parser = whole(0, u64::MAX))]
    pub seed: u64,
    /// Draw latencies, clocks and a late rank from the machine's noise.
    #[arg(long)]
    pub noise: bool,
    /// Ranks that are simulated [default: folded].
    #[arg(long, value_enum)]
    pub execution: Option<ExecutionArg>,
    /// How warm the card is [default: sustained; with the published protocol as its loop leaves it: launches within the machine's cold_ms are cold, and the mean or median of all is shown].
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
    #[arg(long, value_parser = size("m"))]
    pub m: Option<u64>,
    /// GEMM of a rank: columns.
    #[arg(long, value_parser = size("n"))]
    pub n: Option<u64>,
    /// GEMM of a rank: depth.
    #[arg(long, value_parser = size("k"))]
    pub k: Option<u64>,
    /// MoE: tokens over all ranks.
    #[arg(long, value_parser = size("tokens"))]
    pub tokens: Option<u64>,
    /// MoE: width of a token [default: 7168].
    #[arg(long, value_parser = size("hidden"))]
    pub hidden: Option<u64>,
    /// MoE: columns of an expert [default: 2048].
    #[arg(long, value_parser = size("inter"))]
    pub inter: Option<u64>,
    /// MoE: experts per token [default: 8].
    #[arg(long, value_parser = size("topk"))]
    pub topk: Option<u64>,
    /// MoE: experts over all ranks [default: 256].
    #[arg(long, value_parser = size("experts"))]
    pub experts: Option<u64>,
    /// Attention: sequence over all ranks.
    #[arg(long, value_parser = size("seq"))]
    pub seq: Option<u64>,
    /// Attention: batch [default: 4].
    #[arg(long, value_parser = size("batch"))]
    pub batch: Option<u64>,
    /// Attention: heads [default: 16].
    #[arg(long, value_parser = size("heads"))]
    pub heads: Option<u64>,
    /// Attention: width of a head [default: 128].
    #[arg(long, value_parser = size("head_dim"))]
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
    /// Our best schedule of those that the device code runs.
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
    /// CTAs per role: compute=112,intra=4,send=8,reduce=8 (a role left out has 0), auto (as tune finds it) or published
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

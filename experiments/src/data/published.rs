//! What published rows say, and which of them are judged.

use super::FUSED;
use serde::Serialize;
use tilewire_kernels::RoleSplit;
use tilewire_sim::{Loop, Protocol};

/// Topologies whose rows are judged, and the machine that predicts each.
pub const JUDGED_TOPOLOGIES: [(&str, &str); 2] = [("2x8-h200-efa", "h200-efa"), ("2x8-h200-cx7", "h200-cx7")];

/// Smaller shapes are shown, not judged.
pub const JUDGED_FROM_SIZE: u64 = 8192;

/// A system whose published rows are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum System {
    /// The fused kernels.
    MKernel,
    /// cuBLAS, then (or after) an NCCL collective.
    CublasNccl,
    /// FlashAttention-2 after an NCCL all-gather.
    Fa2Nccl,
}

/// What a published row is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// A bar that a prediction is judged against.
    Judged,
    /// Another measurement of a bar's case: gives the noise band.
    Replicate,
    /// Shown only.
    Shown,
}

/// Unit of a published value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Useful FLOPs per GPU and time.
    TflopsPerGpu,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// GB/s.
    Gbs,
    /// Ratio of times.
    SpeedupVsTorchNccl,
}

/// A row of `published/figures.csv`.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Kernel.
    pub kernel: String,
    /// Nodes x GPUs per node - GPU - fabric.
    pub topology: String,
    /// System, as published.
    pub system: String,
    /// Tokens, seq or m, whichever indexes the figure.
    pub size: Option<u64>,
    /// Unit of the value.
    pub metric: Metric,
    /// Value; none where the figure shows a failure.
    pub value: Option<f64>,
    /// Caveats.
    pub notes: String,
    /// Where it can be checked.
    pub source: String,
    /// Use.
    pub standing: Standing,
    /// The judged system that this row measures, also as a replicate.
    pub base: Option<System>,
    /// Line of the file.
    pub line: u64,
}

/// A published bar and the band that its replicates span.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Kernel.
    pub kernel: String,
    /// Topology.
    pub topology: String,
    /// Machine file that predicts it.
    pub machine: &'static str,
    /// System.
    pub system: System,
    /// M, tokens or seq.
    pub size: u64,
    /// The bar.
    pub tflops_per_gpu: f64,
    /// Lowest and highest of the bar and its replicates.
    pub band_tflops: (f64, f64),
    /// Replicates.
    pub num_replicates: usize,
    /// Where the bar can be checked.
    pub source: String,
}

/// A row of `published/effective_splits.csv`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffectiveSplit {
    /// Kernel.
    pub kernel: String,
    /// Nodes of eight GPUs.
    pub nodes: u16,
    /// M, tokens or seq.
    pub size: u64,
    /// The split. Roles of different launches may exceed the SM count together.
    pub split: RoleSplit,
    /// Schedule options that differ by shape.
    pub options: Vec<(String, String)>,
    /// How it was found.
    pub note: String,
    /// Where it can be checked.
    pub source: String,
}

/// A row of `published/protocols.csv`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedProtocol {
    /// Kernel.
    pub kernel: String,
    /// System.
    pub system: System,
    /// Put arrivals of one launch satisfy the next ones.
    pub stale_arrivals: bool,
    /// Launches are timed one by one.
    pub isolated: bool,
    /// Every launch of the loop costs `launch.iteration_us` beside its kernels.
    pub waits_for_host: bool,
    /// Largest size that it was used for; none: all above.
    pub up_to: Option<u64>,
    /// Launches of the loop.
    pub timed: Loop,
    /// Whether the baseline's collectives could use NVLS.
    pub nvls_in_baseline: Option<bool>,
    /// What the loop does.
    pub note: String,
    /// Where it can be checked.
    pub source: String,
}

impl System {
    /// All judged systems.
    pub const ALL: [Self; 3] = [Self::MKernel, Self::CublasNccl, Self::Fa2Nccl];

    /// The name used in published rows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MKernel => "mKernel",
            Self::CublasNccl => "cuBLAS+NCCL",
            Self::Fa2Nccl => "FA2+NCCL",
        }
    }

    /// The unfused systems.
    pub const fn is_baseline(self) -> bool {
        !matches!(self, Self::MKernel)
    }

    pub(super) fn exactly(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|system| system.name() == name)
    }

    /// The system of a name that may carry a suffix in brackets, as replicates do.
    pub(super) fn of(name: &str) -> Option<Self> {
        Self::exactly(name.split_once(" (").map_or(name, |(base, _)| base))
    }
}

impl Figure {
    /// Useful FLOPs of the busiest GPU over time; none where the row does not tell.
    ///
    /// Model: `2 m^3 / W` for the GEMM kernels, whose published shapes are square but for one side of `m / W`;
    /// `2 * 8 * tokens * 7168 * 2048 / W` for the experts, padding not counted; `4 * 4 * 16 * 128 * seq^2 / W` for
    /// attention. `W` is the number of ranks. Source: `plots/plot_tflops_efa.py` of mKernel.
    pub fn tflops_per_gpu(&self) -> Option<f64> {
        let value = self.value?;
        let seconds = match self.metric {
            Metric::TflopsPerGpu => return Some(value),
            Metric::Ms => value * 1e-3,
            Metric::Us => value * 1e-6,
            Metric::Gbs | Metric::SpeedupVsTorchNccl => return None,
        };
        let size = self.size? as f64;
        let flops = match self.kernel.as_str() {
            "ag_gemm" | "gemm_ar" | "gemm_rs" => 2.0 * size.powi(3),
            "moe_dispatch_gemm" => 2.0 * 8.0 * size * 7168.0 * 2048.0,
            "ring_attention" => 4.0 * 4.0 * 16.0 * 128.0 * size * size,
            _ => return None,
        };
        Some(flops / self.ranks()? / seconds / 1e12)
    }

    /// The machine file that predicts this row; none unless the topology is a judged one.
    pub fn machine(&self) -> Option<&'static str> {
        JUDGED_TOPOLOGIES.iter().find(|(topology, _)| *topology == self.topology).map(|(_, machine)| *machine)
    }

    fn ranks(&self) -> Option<f64> {
        let (nodes, gpus) = self.topology.split('-').next()?.split_once('x')?;
        Some(nodes.parse::<f64>().ok()? * gpus.parse::<f64>().ok()?)
    }

    pub(super) fn same_case(&self, other: &Self) -> bool {
        (&self.kernel, &self.topology, self.base, self.size) == (&other.kernel, &other.topology, other.base, other.size)
    }

    pub(super) fn standing(&self) -> Standing {
        let sized = self.size.is_some_and(|size| size >= JUDGED_FROM_SIZE);
        let fused = FUSED.contains(&self.kernel.as_str());
        if !fused || !sized || self.base.is_none() || self.machine().is_none() || self.tflops_per_gpu().is_none() {
            return Standing::Shown;
        }
        let bar = self.source.contains(" plots/") && self.source.ends_with("(bar label)");
        if System::exactly(&self.system).is_some() {
            return if bar && self.metric == Metric::TflopsPerGpu { Standing::Judged } else { Standing::Shown };
        }
        let doubtful = ["SUSPECT", "ABNORMAL", "WITHDRAWN"];
        let refuted = doubtful.iter().any(|word| self.notes.contains(word) || self.source.contains(word));
        if refuted || self.system.contains("target") { Standing::Shown } else { Standing::Replicate }
    }
}

/// A published row on which machine parameters are fitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FitRow {
    /// Fused kernel.
    pub kernel: String,
    /// System of the bar.
    pub system: String,
    /// Test bed.
    pub topology: String,
    /// `m`, tokens or sequence.
    pub size: u64,
    /// Machine parameters that are chosen on it.
    pub parameters: Vec<String>,
}

impl FitRow {
    /// Whether this is the row of a kernel, topology, system and size.
    pub fn is(&self, kernel: &str, topology: &str, system: System, size: u64) -> bool {
        (self.kernel.as_str(), self.topology.as_str(), self.system.as_str(), self.size)
            == (kernel, topology, system.name(), size)
    }
}

/// Error on rows of a kernel, test bed and system that a fit left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOutError {
    /// What was left out, as `tilewire fit --without` names it.
    pub left_out: String,
    /// Fused kernel.
    pub kernel: String,
    /// Test bed.
    pub topology: String,
    /// System of the bars.
    pub system: String,
    /// Judged rows.
    pub rows: u64,
    /// exp(mean of |ln(predicted / published)|) - 1, to four digits after the point.
    pub error: f64,
    /// Size of the worst row.
    pub worst_size: u64,
    /// Its error.
    pub worst_error: f64,
}

/// A machine parameter that is fitted.
#[derive(Clone, Debug, PartialEq)]
pub struct FitParameter {
    /// `section.name`.
    pub parameter: String,
    /// Machines that share the value.
    pub machines: Vec<String>,
    /// Where the search begins, and the value where no row identifies it.
    pub start: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

impl PublishedProtocol {
    /// The protocol as the simulator takes it.
    pub const fn simulated(&self) -> Protocol {
        let Self { stale_arrivals, isolated, waits_for_host, timed, .. } = *self;
        Protocol::Published { stale_arrivals, isolated, waits_for_host, timed }
    }
}

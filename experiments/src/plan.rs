//! Cases that are ready to run, and the checks that make them so.
//!
//! ```text
//!  flags (cli) ────────┐
//!                      ├─▶ Draft ──▶ Case      every name looked up, every range checked
//!  experiment file ────┘
//! ```
//!
//! A [`Refusal`] names the part of the draft that is wrong; the flags and the experiment file each know where that part
//! was written.

mod case;
mod refusal;
mod size;
mod target;
mod words;

pub use case::{Case, Fusion, OF_PHASES, SplitChoice};
pub use refusal::{Part, Refusal, ResolveError};
pub use target::{Source, Target};
pub use words::{assignments, kernel, role, split};

use crate::checked::Checks;
use crate::cli::{CaseArgs, ClockArg, ExecutionArg, PointArgs, ProtocolArg};
use crate::data::{Data, DataError, EffectiveSplit, System};
use crate::error::ExperimentError;
use crate::shape;
use case::ROUTING_SEED;
use size::limit_tiles;
use std::sync::Arc;
use tilewire_kernels::{Cluster, OptionSet, Problem, ProblemKind, RoleSplit, Spec};
use tilewire_sim::predict::Clock;
use tilewire_sim::{Execution, Protocol};

/// A case as it was asked for.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Kernel.
    pub kernel: String,
    /// Cluster.
    pub cluster: String,
    /// Fields of the shape.
    pub shape: Vec<(&'static str, u64)>,
    /// Option set.
    pub set: OptionSet,
    /// Single options.
    pub overrides: Vec<(String, String)>,
    /// Split as text; none: `auto`, or `published` with the published options.
    pub split: Option<String>,
    /// Protocol; none: as the options.
    pub protocol: Option<ProtocolArg>,
    /// Fused or not.
    pub fusion: Fusion,
    /// Seed.
    pub seed: u64,
    /// Whether noise is drawn.
    pub noise: bool,
    /// Ranks that are simulated; none: as few as are enough.
    pub execution: Option<Execution>,
    /// How warm the card is; none: as the protocol's loops leave it.
    pub clock: Option<Clock>,
    /// What is asked of the checker.
    pub checks: Checks,
    /// A measured row, which states all options and not only those that its schedule depends on.
    pub measured: bool,
}

impl Draft {
    /// Looks every name up and checks every range.
    ///
    /// # Errors
    /// The first part that is wrong.
    pub fn resolve(&self, source: &Source) -> Result<Case, ResolveError> {
        let fused = kernel(&self.kernel)?;
        let name = fused.name();
        let unfused = self.fusion == Fusion::Unfused;
        let kernel = if unfused {
            let none = || Refusal::new(Part::Baseline, format!("{name} has no unfused form"));
            tilewire_kernels::baseline(name).ok_or_else(none)?
        } else {
            fused
        };
        if self.noise && self.execution == Some(Execution::Mirror) {
            let problem = "mirror, where noise makes ranks differ; allowed with noise: folded, full";
            return Err(Refusal::new(Part::Execution, problem).into());
        }
        let kind = kernel.problem_kind();
        let target = Arc::new(source.target(&self.cluster)?);
        let problem = self.problem(name, kind)?;
        let defaults = shape::values(&problem)
            .into_iter()
            .filter(|(name, _)| !self.shape.iter().any(|(given, _)| given == name))
            .collect();

        let mut options = kernel.options(self.set, &problem, target.cluster);
        let default = if self.set == OptionSet::Published { "published" } else { "auto" };
        let split_text = self.split.as_deref().unwrap_or(default);
        let split = match split_text {
            // The launches of the unfused form take all SMs.
            _ if unfused => SplitChoice::Fixed(RoleSplit::default()),
            "published" if self.fusion == Fusion::BulkSynchronous => {
                return Err(Refusal::new(Part::Split, format!("\"published\", {OF_PHASES}")).into());
            }
            "auto" => SplitChoice::Auto,
            "published" => {
                let published = published_split(&source.data, name, target.cluster, &problem);
                let published = published.map_err(|error| self.without_split(error))?;
                if self.set == OptionSet::Published {
                    // The table's options are the published kernel's, which differ by shape.
                    for (name, value) in &published.options {
                        options.set(name, value).map_err(|e| Refusal::new(Part::Split, e.to_string()))?;
                    }
                }
                SplitChoice::Fixed(published.split)
            }
            text => SplitChoice::Fixed(split(text)?),
        };
        let published = match split {
            SplitChoice::Auto => published_split(&source.data, name, target.cluster, &problem).ok(),
            SplitChoice::Fixed(_) => None,
        };
        if kernel.option_specs().iter().any(|spec| spec.name == ROUTING_SEED) {
            options.set(ROUTING_SEED, &self.seed.to_string()).map_err(|e| Refusal::new(Part::Set, e.to_string()))?;
        }
        let usual = options.clone();
        for (name, value) in &self.overrides {
            options.set(name, value).map_err(|e| Refusal::new(Part::Set, e.to_string()))?;
        }
        if !self.measured {
            let spec = Spec { problem, cluster: target.cluster, fabric: target.machine.fabric, options };
            kernel.check_used(&spec, &usual).map_err(|e| Refusal::new(Part::Set, e.to_string()))?;
            options = spec.options;
        }
        limit_tiles(&problem, &options)?;

        let default = if self.set == OptionSet::Published { ProtocolArg::Published } else { ProtocolArg::Fair };
        let protocol = match self.protocol.unwrap_or(default) {
            ProtocolArg::Fair => Protocol::Fair,
            ProtocolArg::Published => source.data.protocol(name, system(kind, unfused), problem.size())?.simulated(),
        };
        Ok(Case {
            name,
            kernel,
            target,
            problem,
            set: self.set,
            options,
            named: self.overrides.iter().map(|(name, _)| name.clone()).collect(),
            split,
            published: published.map(|published| published.split),
            protocol,
            fusion: self.fusion,
            seed: self.seed,
            noise: self.noise,
            execution: self.execution.unwrap_or_default(),
            clock: self.clock.or((protocol == Protocol::Fair).then_some(Clock::Sustained)),
            checks: self.checks,
            defaults,
        })
    }

    /// The error of a published split that nobody asked for: it comes with the published options.
    fn without_split(&self, error: ResolveError) -> ResolveError {
        match error {
            ResolveError::Refused(refusal) if self.split.is_none() => {
                let problem =
                    format!("{}; the published options come with one, choose another: auto, say", refusal.problem);
                Refusal::new(refusal.part, problem).into()
            }
            error => error,
        }
    }

    fn problem(&self, name: &str, kind: ProblemKind) -> Result<Problem, Refusal> {
        let fields = shape::fields(kind);
        let known = || fields.iter().map(|field| field.name).collect::<Vec<_>>().join(", ");
        for &(given, value) in &self.shape {
            let Some(field) = fields.iter().find(|field| field.name == given) else {
                let problem = format!("does not apply to {name}, whose shape is {}", known());
                return Err(Refusal::new(Part::Shape(given), problem));
            };
            if !(1..=field.max).contains(&value) {
                let problem = format!("{value}, allowed: a whole number from 1 to {}", field.max);
                return Err(Refusal::new(Part::Shape(given), problem));
            }
        }
        let value = |name: &str| self.shape.iter().find(|(given, _)| *given == name).map(|&(_, value)| value);
        shape::problem(kind, value)
            .map_err(|field| Refusal::new(Part::Shape(field), format!("missing; {name} needs {}", known())))
    }
}

/// The system whose published rows a case stands for.
pub const fn system(kind: ProblemKind, baseline: bool) -> System {
    match (baseline, kind) {
        (false, _) => System::MKernel,
        (true, ProblemKind::Attention) => System::Fa2Nccl,
        (true, _) => System::CublasNccl,
    }
}

fn published_split(
    data: &Data,
    kernel: &str,
    cluster: Cluster,
    problem: &Problem,
) -> Result<EffectiveSplit, ResolveError> {
    let refuse = |problem: String| Refusal::new(Part::Split, problem);
    if cluster.gpus_per_node != 8 {
        return Err(refuse(format!("published splits are of 8 GPUs per node, the cluster is {cluster}")).into());
    }
    match data.effective_split(kernel, cluster.nodes, problem.size()) {
        Err(error @ DataError::NoSplit { .. }) => Err(refuse(error.to_string()).into()),
        other => Ok(other?),
    }
}

impl CaseArgs {
    /// The draft of these flags, with a fair protocol and a tuned split.
    pub fn draft(&self) -> Result<Draft, ExperimentError> {
        Ok(Draft {
            kernel: self.kernel.clone(),
            cluster: self.cluster.clone(),
            shape: self.shape.given(),
            set: self.options.set(),
            overrides: assignments(&self.set).map_err(at_flag)?,
            split: Some("auto".into()),
            protocol: Some(ProtocolArg::Fair),
            fusion: match (self.baseline, self.bulk_synchronous) {
                (true, _) => Fusion::Unfused,
                (false, true) => Fusion::BulkSynchronous,
                (false, false) => Fusion::Fused,
            },
            seed: 0,
            noise: false,
            execution: None,
            clock: None,
            checks: Checks::default(),
            measured: false,
        })
    }

    /// Data directory and machine file.
    pub fn source(&self) -> Result<Source, ExperimentError> {
        Ok(Source::new(self.data.data.as_deref(), self.data.machine.as_deref())?)
    }
}

impl PointArgs {
    /// The case of these flags.
    pub fn case(&self, source: &Source) -> Result<Case, ExperimentError> {
        let draft = Draft {
            split: self.split.clone(),
            protocol: self.protocol,
            seed: self.run.seed,
            noise: self.run.noise,
            execution: self.run.execution.map(ExecutionArg::execution),
            clock: self.run.clock.map(ClockArg::clock),
            checks: self.run.checks.checks(),
            ..self.case.draft()?
        };
        draft.resolve(source).map_err(flagged)
    }
}

/// A refusal at the flag of its part.
fn at_flag(refusal: Refusal) -> ExperimentError {
    ExperimentError::refused(refusal.part.flag(), refusal.problem)
}

/// An error of [`Draft::resolve`] at the flag of its part.
pub fn flagged(error: ResolveError) -> ExperimentError {
    match error {
        ResolveError::Refused(refusal) => at_flag(refusal),
        ResolveError::Data(error) => error.into(),
    }
}

/// The error of a case that a measured row at `place` stands for.
pub fn in_row(place: &str, error: ResolveError) -> ExperimentError {
    match error {
        ResolveError::Refused(Refusal { part, problem }) => {
            ExperimentError::refused(format!("{place}: {}", part.column()), problem)
        }
        ResolveError::Data(error) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> Source {
        Source::new(None, None).expect("the embedded data")
    }

    fn refused(text: &str) -> String {
        match source().target(text) {
            Err(ResolveError::Refused(refusal)) => refusal.problem,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn one_node_of_a_gpu_is_its_nvlink_machine() {
        assert_eq!(source().target("1x8-h200").expect("a cluster").to_string(), "1x8-h200-nvlink");
        assert_eq!(source().target("2x8-h200-1gpu").expect("a cluster").to_string(), "2x8-h200-1gpu");
    }

    #[test]
    fn clusters_are_refused_with_what_is_allowed() {
        assert!(refused("2x8-h200").contains("no machine \"h200\""));
        // A machine without a network is none for two nodes.
        assert!(!refused("2x8-h200").contains("nvlink") && refused("1x8-h300").contains("1x8-h200-nvlink"));
        assert!(refused("0x8-h200-efa").contains("from 1 to 1024"));
        assert!(refused("2x9-h200-efa").contains("h200-efa has 8"));
        assert!(refused("2x8-h200-nvlink").contains("needs a network"));
        assert!(refused("eight").contains("NxG-MACHINE"));
    }
}

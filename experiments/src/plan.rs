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

mod refusal;
mod target;

pub use refusal::{Part, Refusal, ResolveError};
pub use target::{Source, Target};

use crate::checked::Checks;
use crate::cli::{CaseArgs, ClockArg, ExecutionArg, PointArgs, ProtocolArg};
use crate::data::{Data, DataError, EffectiveSplit, System};
use crate::error::ExperimentError;
use crate::shape;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use tilewire_kernels::{Cluster, Kernel, OptionSet, Options, Problem, ProblemKind, RoleKind, RoleSplit, Spec};
use tilewire_sim::machine::PeerPath;
use tilewire_sim::predict::Clock;
use tilewire_sim::{Config, Execution, Protocol};

/// Compute tiles of a rank at most: beyond, a schedule does not fit into memory.
const MAX_TILES: u64 = 1 << 24;

/// The option that follows the seed unless it is set by itself.
const ROUTING_SEED: &str = "routing_seed";

/// Which split a case runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitChoice {
    /// This one.
    Fixed(RoleSplit),
    /// The best one that the tuner finds.
    Auto,
}

/// What a split of a bulk-synchronous form may be.
pub const OF_PHASES: &str =
    "allowed with bulk-synchronous phases: ROLE=CTAS,... for every role with work, up to all SMs for each phase";

/// How compute and communication of a kernel go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fusion {
    /// Side by side in one launch.
    Fused,
    /// Library compute, then a library collective.
    Unfused,
    /// The fused schedule's tasks by turns, a launch for each phase.
    BulkSynchronous,
}

impl Fusion {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fused, Self::Unfused, Self::BulkSynchronous];

    /// As columns have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::Unfused => "unfused",
            Self::BulkSynchronous => "bulk_synchronous",
        }
    }
}

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
    /// Ranks that are simulated; none: as the protocol needs.
    pub execution: Option<Execution>,
    /// How warm the card is; none: as the protocol's loops leave it.
    pub clock: Option<Clock>,
    /// What is asked of the checker.
    pub checks: Checks,
}

/// One prediction, every name looked up.
#[derive(Clone)]
pub struct Case {
    /// Name of the fused kernel.
    pub name: &'static str,
    /// What builds the schedule: the fused kernel or its unfused form.
    pub kernel: &'static dyn Kernel,
    /// Cluster and machine.
    pub target: Arc<Target>,
    /// Shape.
    pub problem: Problem,
    /// Option set that was started from.
    pub set: OptionSet,
    /// Options.
    pub options: Options,
    /// Those that were set by name.
    pub named: BTreeSet<String>,
    /// Split.
    pub split: SplitChoice,
    /// Protocol.
    pub protocol: Protocol,
    /// Fused or not.
    pub fusion: Fusion,
    /// Seed.
    pub seed: u64,
    /// Whether noise is drawn.
    pub noise: bool,
    /// Ranks that are simulated.
    pub execution: Execution,
    /// How warm the card is; none: as the protocol's loop leaves it.
    pub clock: Option<Clock>,
    /// What is asked of the checker.
    pub checks: Checks,
    /// Fields of the shape that were not given.
    pub defaults: Vec<(&'static str, u64)>,
}

/// `name=value`.
///
/// # Errors
/// The text, when it is not.
fn assignment(text: &str) -> Result<(String, String), Refusal> {
    let form = || Refusal::new(Part::Set, format!("\"{text}\", allowed: NAME=VALUE"));
    let (name, value) = text.split_once('=').ok_or_else(form)?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// Several `name=value`, each name once.
///
/// # Errors
/// The first text that is not, or whose name stands before.
pub fn assignments(texts: &[String]) -> Result<Vec<(String, String)>, Refusal> {
    let mut all: Vec<(String, String)> = Vec::with_capacity(texts.len());
    for text in texts {
        let (name, value) = assignment(text)?;
        if let Some((_, before)) = all.iter().find(|(known, _)| *known == name) {
            let problem = format!("{name} twice, as \"{before}\" and as \"{value}\", allowed: each option once");
            return Err(Refusal::new(Part::Set, problem));
        }
        all.push((name, value));
    }
    Ok(all)
}

/// The role with this long or short name.
pub fn role(name: &str) -> Option<RoleKind> {
    RoleKind::ALL.into_iter().find(|kind| name == kind.short() || name == kind.name())
}

/// `compute=112,intra=4,...`; a role left out has 0.
pub fn split(text: &str) -> Result<RoleSplit, Refusal> {
    let refuse = |what: String| {
        let roles = RoleKind::ALL.map(RoleKind::short).join(", ");
        Refusal::new(Part::Split, format!("{what}, allowed: ROLE=CTAS,... of {roles}; or auto; or published"))
    };
    let mut split = RoleSplit::default();
    let mut seen = BTreeSet::new();
    for pair in text.split(',') {
        let (name, ctas) = pair.split_once('=').ok_or_else(|| refuse(format!("\"{pair}\"")))?;
        let kind = role(name.trim()).ok_or_else(|| refuse(format!("role \"{}\"", name.trim())))?;
        if !seen.insert(kind) {
            return Err(refuse(format!("role {} twice", kind.short())));
        }
        let ctas = shape::whole(ctas.trim()).filter(|ctas| *ctas <= 1024);
        split
            .set(kind, ctas.map(|ctas| ctas as u32).ok_or_else(|| refuse(format!("\"{}\" (0 to 1024)", pair.trim())))?);
    }
    if split.total() == 0 {
        return Err(refuse(format!("\"{text}\" gives no role a CTA")));
    }
    Ok(split)
}

/// The kernel with this name.
///
/// # Errors
/// The name, when there is none.
pub fn kernel(name: &str) -> Result<&'static dyn Kernel, Refusal> {
    let known = || tilewire_kernels::KERNELS.iter().map(|kernel| kernel.name()).collect::<Vec<_>>().join(", ");
    tilewire_kernels::kernel(name)
        .ok_or_else(|| Refusal::new(Part::Kernel, format!("no kernel \"{name}\", allowed: {}", known())))
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
                let published = published_split(&source.data, name, target.cluster, &problem)?;
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
        if kernel.option_specs().iter().any(|spec| spec.name == ROUTING_SEED) {
            options.set(ROUTING_SEED, &self.seed.to_string()).map_err(|e| Refusal::new(Part::Set, e.to_string()))?;
        }
        for (name, value) in &self.overrides {
            options.set(name, value).map_err(|e| Refusal::new(Part::Set, e.to_string()))?;
        }
        limit_tiles(&problem, &options)?;

        let default = if self.set == OptionSet::Published { ProtocolArg::Published } else { ProtocolArg::Fair };
        let protocol = match self.protocol.unwrap_or(default) {
            ProtocolArg::Fair => Protocol::Fair,
            ProtocolArg::Published => source.data.protocol(name, system(kind, unfused))?.simulated(),
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
            protocol,
            fusion: self.fusion,
            seed: self.seed,
            noise: self.noise,
            execution: self.execution.unwrap_or_else(|| protocol.execution()),
            clock: self.clock.or((protocol == Protocol::Fair).then_some(Clock::Sustained)),
            checks: self.checks,
            defaults,
        })
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

/// Refuses shapes that would not fit into memory, before anything is built.
fn limit_tiles(problem: &Problem, options: &Options) -> Result<(), Refusal> {
    let (field, tiles) = compute_tiles(problem, options);
    if tiles > MAX_TILES {
        let problem =
            format!("{problem} has {tiles} tiles, allowed: {MAX_TILES}; choose a smaller shape or larger tiles");
        return Err(Refusal::new(Part::Shape(field), problem));
    }
    Ok(())
}

/// Compute tiles of a rank, about, and the field of the shape that decides.
fn compute_tiles(problem: &Problem, options: &Options) -> (&'static str, u64) {
    let tile = |name: &str, default: u64| {
        options.iter().find(|(option, _)| *option == name).map_or(default, |(_, value)| match value {
            tilewire_kernels::options::Value::Int(value) => value.max(1),
            _ => default,
        })
    };
    let (field, rows, cols) = match *problem {
        Problem::Gemm { m, n, .. } => ("m", m, n),
        Problem::Moe { tokens, inter, topk, .. } => ("tokens", tokens * topk, inter),
        Problem::Attention { seq, batch, heads, .. } => ("seq", seq, batch * heads * tile("tile_n", 256)),
    };
    (field, rows.div_ceil(tile("tile_m", 128)).saturating_mul(cols.div_ceil(tile("tile_n", 256))))
}

impl Case {
    /// What the builder sees.
    pub fn spec(&self) -> Spec {
        Spec {
            problem: self.problem,
            cluster: self.target.cluster,
            fabric: self.target.machine.fabric,
            options: self.options.clone(),
        }
    }

    /// Whether the seed decides anything: noise, or who chooses which expert.
    pub fn draws(&self) -> bool {
        self.noise || self.options.iter().any(|(name, _)| name == ROUTING_SEED)
    }

    /// The options that were set by name, `name=value;...` in the order of names.
    pub fn set_by_name(&self) -> String {
        self.options_of(|name| self.named.contains(name)).join(";")
    }

    /// `name=value` of some options, in the order of names.
    pub fn options_of(&self, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let wanted = self.options.iter().filter(|(name, _)| wanted(name));
        wanted.map(|(name, value)| format!("{name}={value}")).collect()
    }

    /// `name=value` of some options, in the order of names, each behind some text.
    pub fn options_behind(&self, before: &str, wanted: impl Fn(&str) -> bool) -> String {
        self.options_of(wanted).iter().fold(String::new(), |text, set| text + before + set)
    }

    /// How the simulator runs it with this clock.
    pub fn config(&self, clock: Clock) -> Config {
        Config {
            execution: self.execution,
            protocol: self.protocol,
            clock,
            noise_seed: self.noise.then_some(self.seed),
            timeline: false,
        }
    }

    /// Compute tiles of a rank, about.
    pub fn tiles(&self) -> u64 {
        compute_tiles(&self.problem, &self.options).1
    }

    /// The protocol's name.
    pub const fn protocol_name(&self) -> &'static str {
        match self.protocol {
            Protocol::Fair => "fair",
            Protocol::Published { .. } => "published",
        }
    }

    /// The execution's name.
    pub const fn execution_name(&self) -> &'static str {
        match self.execution {
            Execution::Folded => "folded",
            Execution::Mirror => "mirror",
            Execution::Full => "full",
        }
    }

    /// How hardware would run this: a GPU per rank, or one GPU whose peers are in its own memory.
    pub fn mode(&self) -> &'static str {
        match self.target.machine.peer_path {
            PeerPath::Nvlink => "cluster",
            PeerPath::Hbm => "mirror",
        }
    }

    /// Whether libraries compute and communicate.
    pub fn is_unfused(&self) -> bool {
        self.fusion == Fusion::Unfused
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = match self.fusion {
            Fusion::Fused => "",
            Fusion::Unfused => " (unfused)",
            Fusion::BulkSynchronous => " (bulk-synchronous)",
        };
        write!(f, "{}{form} {} on {}", self.name, self.problem, self.target)
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
        assert!(refused("0x8-h200-efa").contains("from 1 to 1024"));
        assert!(refused("2x9-h200-efa").contains("h200-efa has 8"));
        assert!(refused("2x8-h200-nvlink").contains("needs a network"));
        assert!(refused("eight").contains("NxG-MACHINE"));
    }

    #[test]
    fn splits_take_short_and_long_names() {
        let expected = RoleSplit { compute: 112, intra_comm: 4, inter_send: 8, inter_reduce: 0 };
        assert_eq!(split("compute=112,intra=4,send=8"), Ok(expected));
        assert_eq!(split("compute=112, intra_comm=4, inter_send=8"), Ok(expected));
        for bad in ["", "compute", "compute=-1", "compute=1,compute=2", "computer=1", "compute=0", "compute=4294967296"]
        {
            assert!(split(bad).is_err(), "{bad}");
        }
    }
}

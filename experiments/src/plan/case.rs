//! Cases that are ready to run.

use super::Target;
use super::size::compute_tiles;
use crate::checked::Checks;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use tilewire_kernels::{Kernel, OptionSet, Options, Problem, RoleSplit, Spec};
use tilewire_sim::machine::PeerPath;
use tilewire_sim::predict::Clock;
use tilewire_sim::{Config, Execution, Protocol};

/// The option that follows the seed unless it is set by itself.
pub const ROUTING_SEED: &str = "routing_seed";

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

    /// Behind a kernel in names of files; fused is what goes without saying.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Fused => "",
            Self::Unfused => "-unfused",
            Self::BulkSynchronous => "-bulk_synchronous",
        }
    }
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
    /// Where a split is searched, the one that is published for this shape.
    pub published: Option<RoleSplit>,
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

    /// What to know of defaults that the shape forced.
    pub fn notes(&self) -> Vec<String> {
        self.kernel.notes(self.set, &self.spec())
    }

    /// Whether the seed decides anything: noise, or who chooses which expert.
    pub fn draws(&self) -> bool {
        self.noise || self.draws_routing()
    }

    /// Whether the seed decides who chooses which expert.
    pub fn draws_routing(&self) -> bool {
        let seeded = self.options.iter().any(|(name, _)| name == ROUTING_SEED);
        seeded && self.options.word("routing") != "uniform"
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

    /// The execution's name. Noise makes ranks differ, so that none stands for others.
    pub const fn execution_name(&self) -> &'static str {
        match self.execution {
            Execution::Folded if self.noise => "full",
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

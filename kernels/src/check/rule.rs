//! The rules of the checker, and what became of each.

use super::finding::{Finding, Problem, Severity};
use serde::Serialize;

/// A rule, in the order in which they are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Launches come after earlier ones, roles recycle into lists that they can join.
    Structure,
    /// Each task alone: sizes, bounds, whole steps and pieces, slots, who may be named.
    Tasks,
    /// What is added to a flag against what is asked of it.
    Flags,
    /// Every task runs, on any number of CTAs.
    Progress,
    /// CTAs that run together find an SM each.
    Residency,
    /// Shared memory, NIC queues, the device-to-host ring and writes in flight.
    Machine,
    /// Fields of the transport's command hold their values.
    Wire,
    /// Ranks of a class share their skeleton.
    Symmetry,
    /// Signals come after the writes that they announce.
    Visibility,
    /// The word of a put comes after its data.
    FabricOrder,
    /// Conflicting accesses are ordered, and what is read was written.
    Races,
}

impl Rule {
    /// All rules.
    pub const ALL: [Self; 11] = [
        Self::Structure,
        Self::Tasks,
        Self::Flags,
        Self::Progress,
        Self::Residency,
        Self::Machine,
        Self::Wire,
        Self::Symmetry,
        Self::Visibility,
        Self::FabricOrder,
        Self::Races,
    ];

    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Structure => "structure",
            Self::Tasks => "tasks",
            Self::Flags => "flags",
            Self::Progress => "progress",
            Self::Residency => "residency",
            Self::Machine => "machine",
            Self::Wire => "wire",
            Self::Symmetry => "symmetry",
            Self::Visibility => "visibility",
            Self::FabricOrder => "fabric_order",
            Self::Races => "races",
        }
    }
}

impl Problem {
    /// The rule that it breaks.
    pub const fn rule(&self) -> Rule {
        match self {
            Self::Structure(_) => Rule::Structure,
            Self::Shape(_) | Self::TooLarge { .. } => Rule::Tasks,
            Self::Unreachable { .. }
            | Self::OverSatisfied { .. }
            | Self::Unawaited { .. }
            | Self::ArrivedAgain { .. }
            | Self::MixedRaisers { .. } => Rule::Flags,
            Self::NoCtas { .. } | Self::Cycle(_) | Self::NeverRuns { .. } => Rule::Progress,
            Self::TooManyCtas { .. } => Rule::Residency,
            Self::Exceeds { .. } => Rule::Machine,
            Self::Width(_) => Rule::Wire,
            Self::Asymmetric { .. } => Rule::Symmetry,
            Self::EarlySignal { .. } => Rule::Visibility,
            Self::FabricOrder { .. } => Rule::FabricOrder,
            Self::Race { .. } | Self::NothingWritten { .. } => Rule::Races,
        }
    }
}

/// What became of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing was found.
    Ok,
    /// So many findings forbid a run.
    Fatal(usize),
    /// So many findings, none of them fatal.
    Hazards(usize),
    /// Not looked at.
    NotChecked,
}

/// A rule, its verdict, and what the verdict is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleResult {
    /// The rule.
    pub rule: Rule,
    /// Verdict.
    pub verdict: Verdict,
    /// What was looked at, or why nothing was.
    pub scope: String,
}

impl RuleResult {
    /// The verdict of a rule that was looked at.
    pub(super) fn checked(rule: Rule, findings: &[Finding], scope: String) -> Self {
        let of = |severity| {
            let is = |finding: &&Finding| finding.problem.rule() == rule && finding.severity == severity;
            findings.iter().filter(is).count()
        };
        let verdict = match (of(Severity::Fatal), of(Severity::Hazard)) {
            (0, 0) => Verdict::Ok,
            (0, hazards) => Verdict::Hazards(hazards),
            (fatal, _) => Verdict::Fatal(fatal),
        };
        Self { rule, verdict, scope }
    }

    /// A rule that was not looked at.
    pub(super) fn not_checked(rule: Rule, why: impl Into<String>) -> Self {
        Self { rule, verdict: Verdict::NotChecked, scope: why.into() }
    }
}

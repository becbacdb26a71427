//! Everything that the static checker has to say of a schedule, for the command line and for those that refuse to run.

use super::compact::Compact;
use super::finding::{Finding, Severity};
use super::limits::Limits;
use super::residency::check_residency;
use super::rule::{Rule, RuleResult};
use super::{Linear, check_symmetry_sample, races, symmetry_sample};
use crate::schedule::{RoleSplit, Schedule};
use serde::Serialize;
use std::fmt;

/// Findings of a schedule, the fatal ones first, and what each rule was asked of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What was found.
    pub findings: Vec<Finding>,
    /// Fatal findings.
    pub fatal: usize,
    /// Other findings. Races are among them only where [`Rule::Races`] was looked at.
    pub hazards: usize,
    /// Every rule, in order.
    pub rules: Vec<RuleResult>,
}

impl Report {
    fn new(mut findings: Vec<Finding>, mut rules: Vec<RuleResult>) -> Self {
        findings.sort_by_key(|finding| finding.severity);
        rules.sort_by_key(|result| result.rule);
        let fatal = findings.iter().filter(|finding| finding.severity == Severity::Fatal).count();
        Self { fatal, hazards: findings.len() - fatal, findings, rules }
    }

    /// Whether there is nothing to report.
    pub const fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        write!(f, "{} fatal, {} hazards", self.fatal, self.hazards)
    }
}

/// Checks flags, progress, races, resources and symmetry.
///
/// Races are looked for where every task runs and no flag rises too far, for they need an order in which the schedule
/// ends. Without a split every role counts as having CTAs, and whether they find an SM is not asked.
pub fn report(schedule: &Schedule, limits: &Limits, split: Option<&RoleSplit>) -> Report {
    let (mut linear, mut rules) = linear(schedule, limits, split);
    let ranks = schedule.cluster.ranks();
    let Some(looked) = races(schedule, &mut linear) else {
        rules.extend([Rule::Symmetry, Rule::Races].map(|rule| RuleResult::not_checked(rule, FATAL)));
        return Report::new(linear.findings, rules);
    };
    let whole = if looked.complete { "all ranks that reach it" } else { "some of the ranks that reach it" };
    let scope = format!("memory of {} of {ranks} ranks, accesses of {whole}", looked.ranks);
    rules.push(RuleResult::checked(Rule::Races, &linear.findings, scope));
    linear.findings.extend(check_symmetry_sample(schedule));
    let scope = format!("skeletons of {} of {ranks} ranks compared", symmetry_sample(schedule).len());
    rules.push(RuleResult::checked(Rule::Symmetry, &linear.findings, scope));
    Report::new(linear.findings, rules)
}

/// [`report`] without races and symmetry: linear in the tasks of one rank of each class.
pub fn report_fatal(schedule: &Schedule, limits: &Limits, split: Option<&RoleSplit>) -> Report {
    let (linear, mut rules) = linear(schedule, limits, split);
    let why = "left out of the quick check";
    rules.extend([Rule::Symmetry, Rule::Races].map(|rule| RuleResult::not_checked(rule, why)));
    Report::new(linear.findings, rules)
}

/// Why a rule is not looked at.
const FATAL: &str = "a fatal finding comes before";

fn linear(schedule: &Schedule, limits: &Limits, split: Option<&RoleSplit>) -> (Linear, Vec<RuleResult>) {
    let mut linear = Linear::new(schedule, split);
    // Of ranks of a class only offsets differ, and those of the last one wrap around the cluster.
    if linear.compact.is_some() && limits.wire.offset_bits < 64 {
        linear.needs.look_at_rank(schedule, schedule.cluster.rank(schedule.cluster.ranks() - 1));
    }
    let residency = split.and_then(|split| check_residency(schedule, split, limits.sms));
    linear.findings.extend(residency);
    let beyond: Vec<Finding> = linear.needs.findings(limits).collect();
    linear.findings.extend(beyond);

    let checked = |rule, scope: String| RuleResult::checked(rule, &linear.findings, scope);
    let roles: usize = schedule.launches.iter().map(|launch| launch.roles.len()).sum();
    let launches = format!("launches: {}, roles: {roles}", schedule.launches.len());
    let mut rules = vec![checked(Rule::Structure, launches)];
    rules.push(split.map_or_else(
        || RuleResult::not_checked(Rule::Residency, "no split"),
        |split| checked(Rule::Residency, format!("split {split} on {} SMs", limits.sms)),
    ));
    let streamed = [Rule::Tasks, Rule::Machine, Rule::Wire, Rule::Visibility, Rule::FabricOrder];
    if linear.findings.iter().any(|finding| finding.problem.rule() == Rule::Structure) {
        rules.extend(streamed.map(|rule| RuleResult::not_checked(rule, FATAL)));
    } else {
        let scopes = [
            linear.compact.as_ref().map_or_else(|| "stopped".into(), |compact| tasks(schedule, compact)),
            linear.needs.machine_scope(limits),
            linear.needs.wire_scope(limits),
            "signals after the writes of their task".into(),
            format!("{} puts on {}", linear.needs.puts, schedule.fabric),
        ];
        rules.extend(streamed.into_iter().zip(scopes).map(|(rule, scope)| checked(rule, scope)));
    }
    if let Some(compact) = &linear.compact {
        let (waits, signals) = (compact.waits.len(), compact.signals.len());
        let scope = format!("{} flags per rank, {waits} waits, {signals} signals", compact.flags_per_class);
        rules.push(checked(Rule::Flags, scope));
        let ctas = "with one CTA of one lane in each role that has any, hence with any number";
        rules.push(checked(Rule::Progress, ctas.into()));
    } else {
        rules.extend([Rule::Flags, Rule::Progress].map(|rule| RuleResult::not_checked(rule, FATAL)));
    }
    (linear, rules)
}

fn tasks(schedule: &Schedule, compact: &Compact) -> String {
    let (classes, ranks) = (compact.classes.len(), schedule.cluster.ranks());
    format!("{} tasks, of {classes} of {ranks} ranks: one of each class", compact.tasks.len())
}

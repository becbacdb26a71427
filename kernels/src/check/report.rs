//! Everything that the static checker has to say of a schedule, for the command line and for those that refuse to run.

use super::finding::{Finding, Severity};
use super::limits::{Limits, check_resources};
use super::{check_hazards, check_symmetry_sample, has_fatal, symmetry_sample};
use crate::schedule::{RoleSplit, Schedule};
use serde::Serialize;
use std::fmt;

/// Findings of a schedule, the fatal ones first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What was found.
    pub findings: Vec<Finding>,
    /// Fatal findings.
    pub fatal: usize,
    /// Hazards.
    pub hazards: usize,
    /// Ranks whose skeleton was compared with the one that it should share.
    pub ranks_compared: usize,
    /// Ranks of the cluster.
    pub ranks: usize,
}

impl Report {
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
        let Self { fatal, hazards, ranks_compared, ranks, .. } = self;
        write!(f, "{fatal} fatal, {hazards} hazards; skeletons of {ranks_compared} of {ranks} ranks compared")
    }
}

/// Checks flags, progress, races, resources and symmetry.
///
/// Races are looked for where nothing fatal was found, for they need an order in which the schedule ends. Without a split
/// every role counts as having CTAs, and whether they find an SM is not asked.
pub fn report(schedule: &Schedule, limits: &Limits, split: Option<&RoleSplit>) -> Report {
    let mut findings = check_hazards(schedule, split);
    findings.extend(check_resources(schedule, split, limits));
    let mut ranks_compared = 0;
    if !has_fatal(&findings) {
        findings.extend(check_symmetry_sample(schedule));
        ranks_compared = symmetry_sample(schedule).len();
    }
    findings.sort_by_key(|finding| finding.severity);
    let fatal = findings.iter().filter(|finding| finding.severity == Severity::Fatal).count();
    let hazards = findings.len() - fatal;
    Report { findings, fatal, hazards, ranks_compared, ranks: schedule.cluster.ranks() }
}

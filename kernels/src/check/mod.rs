//! The static checker: what can be said of a schedule without running it.
//!
//! ```text
//! Schedule ─▶ shape: each task alone       sizes, bounds, slots, claim rules
//!          ─▶ compact form, one class of ranks at a time
//!               ├▶ flags:    sums of adds against waits, arrival words, who raises a family
//!               └▶ progress: every task runs with one CTA per role, hence with any number
//!          ─▶ symmetry:  ranks of a class have one skeleton
//!          ─▶ order and cells of memory ─▶ hazards: conflicting accesses that no flag, launch or collective orders
//! Schedule, split, limits ─▶ resources: SMs for CTAs that run together, shared memory, queues, wire format
//! ```
//!
//! [`report`] runs them all.
//!
//! [`check_fatal`] is linear in tasks, waits and signals of one rank of each class, and it depends on the split only
//! through which roles have no CTAs. A schedule without fatal findings ends; whether it computes the right values is
//! for the hazards to say.

mod compact;
mod finding;
mod flags;
mod hazards;
mod limits;
mod order;
mod progress;
mod report;
mod residency;
mod shape;
mod symmetry;
mod touches;

pub use finding::{CycleStep, Finding, FlagAt, Problem, RaceKind, RaceSide, Severity, TaskAt};
pub use limits::{Limits, TooWide, WireFormat, check_resources, narrow, shared_bytes};
pub use report::{Report, report};
pub use residency::check_residency;
pub use shape::{MAX_READY_FLAGS, MAX_READY_WAITS, MAX_WINDOW, PIECE_BYTES, ShapeError, Target, check_task};
pub use symmetry::{check_symmetry, check_symmetry_sample, symmetry_sample};

use crate::schedule::{Claim, RoleSplit, Schedule};
use compact::Compact;

/// Checks the tasks of one rank of each class: shapes, flags and progress.
///
/// Without a split every role that takes its CTAs from it counts as having some. The order is: structure, single
/// tasks (with the hazards that a single task shows), flags, progress; a level that fails hides the later ones.
pub fn check_fatal(schedule: &Schedule, split: Option<&RoleSplit>) -> Vec<Finding> {
    let mut findings = Vec::new();
    progress(schedule, split, &mut findings);
    findings
}

/// The compact schedule and a legal order of its tasks, where there is one.
fn progress(
    schedule: &Schedule,
    split: Option<&RoleSplit>,
    findings: &mut Vec<Finding>,
) -> Option<(Compact, Vec<u32>)> {
    *findings = structure(schedule);
    if !findings.is_empty() {
        return None;
    }
    let compact = match Compact::new(schedule, findings) {
        Ok(compact) => compact,
        Err(finding) => {
            *findings = vec![finding];
            return None;
        }
    };
    if has_fatal(findings) {
        return None;
    }
    flags::check(schedule, &compact, findings);
    let order = progress::check(schedule, &compact, split, findings);
    (order.len() == compact.tasks.len()).then_some((compact, order))
}

/// [`check_fatal`] and races in the memory of some ranks: of one rank of each class and, on clusters of up to 64 ranks,
/// of the last rank.
///
/// Ranks of a class differ in addresses alone, so the order of their tasks is the same. The last rank is looked at beside
/// the first because addresses that wrap around the cluster do so there; nothing is said of the addresses of others.
/// Where very many tasks of other ranks reach a memory, those of some ranks are looked at, spread over the cluster.
pub fn check_hazards(schedule: &Schedule, split: Option<&RoleSplit>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some((compact, legal)) = progress(schedule, split, &mut findings)
        && !has_fatal(&findings)
    {
        let order = order::Order::new(schedule, &compact, &legal);
        let number = |rank: &crate::Rank| schedule.cluster.number(*rank) as u32;
        let mut ranks: Vec<u32> = compact.classes.iter().map(number).collect();
        if schedule.cluster.ranks() <= 64 {
            ranks.push(schedule.cluster.ranks() as u32 - 1);
            ranks.dedup();
        }
        findings.extend(hazards::check(schedule, &order, &ranks));
    }
    findings
}

/// A hash of the order of all accesses that conflict, for a schedule that ends; for small schedules.
///
/// Two schedules of the same tasks, neither with a race, compute the same values if it is equal.
pub fn access_order(schedule: &Schedule) -> Option<u64> {
    let (compact, legal) = progress(schedule, None, &mut Vec::new())?;
    let order = order::Order::new(schedule, &compact, &legal);
    Some(hazards::access_order(schedule, &order))
}

/// [`check_fatal`] and, for the ranks of [`symmetry_sample`], the symmetry that the schedule claims.
pub fn check(schedule: &Schedule, split: Option<&RoleSplit>) -> Vec<Finding> {
    let mut findings = check_fatal(schedule, split);
    if !has_fatal(&findings) {
        findings.extend(check_symmetry_sample(schedule));
    }
    findings
}

/// Whether any finding is fatal.
pub fn has_fatal(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.severity == Severity::Fatal)
}

/// Rules of launches and roles.
fn structure(schedule: &Schedule) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut report = |what: String| findings.push(Finding::fatal(None, Problem::Structure(what)));
    for (l, launch) in schedule.launches.iter().enumerate() {
        if let Some(after) = launch.after.iter().find(|&&after| after >= l) {
            report(format!("launch {} comes after launch {after}, which is not earlier", launch.name));
        }
        for role in &launch.roles {
            let name = format!("{}/{}", launch.name, role.kind);
            if role.lanes == 0 {
                report(format!("{name} has no lanes"));
            }
            if let Claim::Ready { window } = role.claim
                && !(1..=MAX_WINDOW).contains(&window)
            {
                report(format!("{name} has a window of {window} tasks, allowed 1 to {MAX_WINDOW}"));
            }
            let mut at = role.recycle;
            for _ in 0..=launch.roles.len() {
                at = at.and_then(|next| launch.roles.get(next)).and_then(|next| next.recycle);
            }
            if at.is_some() {
                report(format!("{name} recycles in a circle"));
            }
            match role.recycle.map(|next| launch.roles.get(next)) {
                Some(None) => report(format!("{name} recycles into a role that does not exist")),
                Some(Some(next)) if next.claim == Claim::Strided => {
                    report(format!("{name} recycles into {}, whose list is strided", next.kind));
                }
                _ => {}
            }
        }
    }
    findings
}

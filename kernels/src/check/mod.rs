//! The static checker: what can be said of a schedule without running it.
//!
//! ```text
//! Schedule ─▶ shape: each task alone       sizes, bounds, slots, claim rules
//!          ─▶ compact form, one class of ranks at a time
//!               ├▶ flags:    sums of adds against waits, arrival words, who raises a family
//!               └▶ progress: every task runs with one CTA per role, hence with any number
//!          ─▶ symmetry:  ranks of a class have one skeleton
//!          ─▶ order and cells of memory ─▶ hazards: conflicting accesses that no flag, launch or collective orders
//! Schedule, split, limits ─▶ residency: SMs for CTAs that run together
//!                         ─▶ needs: shared memory, queues, ring, wire format
//! ```
//!
//! [`report`] runs them all, [`report_fatal`] those that are linear in tasks, waits and signals of one rank of each class.
//! They depend on the split only through which roles have no CTAs, and whether the CTAs fit. A schedule without fatal
//! findings ends; whether it computes the right values is for the hazards to say.

mod compact;
mod finding;
mod flags;
mod hazards;
mod limits;
mod needs;
mod order;
mod progress;
mod report;
mod residency;
mod rule;
mod shape;
mod symmetry;
mod touches;

pub use finding::{CycleStep, Finding, FlagAt, Problem, RaceKind, RaceSide, Severity, TaskAt};
pub use limits::{Limits, TooWide, WireFormat, narrow, shared_bytes};
pub use report::{Report, report, report_fatal};
pub use residency::check_residency;
pub use rule::{Rule, RuleResult, Verdict};
pub use shape::{MAX_READY_FLAGS, MAX_READY_WAITS, MAX_WINDOW, PIECE_BYTES, ShapeError, Target, check_task};
pub use symmetry::{check_symmetry, check_symmetry_sample, symmetry_sample};

use crate::schedule::{Claim, RoleSplit, Schedule};
use compact::Compact;
use needs::Needs;

/// Checks the tasks of one rank of each class: shapes, flags and progress.
///
/// Without a split every role that takes its CTAs from it counts as having some. The order is: structure, single
/// tasks (with the hazards that a single task shows), flags, progress; a level that fails hides the later ones.
pub fn check_fatal(schedule: &Schedule, split: Option<&RoleSplit>) -> Vec<Finding> {
    Linear::new(schedule, split).findings
}

/// What the linear levels found; a level that fails hides the later ones.
struct Linear {
    findings: Vec<Finding>,
    needs: Needs,
    /// Where every task alone is sound.
    compact: Option<Compact>,
    /// A legal order of all tasks, where there is one.
    order: Option<Vec<u32>>,
}

impl Linear {
    fn new(schedule: &Schedule, split: Option<&RoleSplit>) -> Self {
        let findings = structure(schedule);
        let mut this = Self { findings, needs: Needs::default(), compact: None, order: None };
        if !this.findings.is_empty() {
            return this;
        }
        let compact = match Compact::new(schedule, &mut this.needs, &mut this.findings) {
            Ok(compact) => compact,
            Err(finding) => {
                this.findings = vec![finding];
                return this;
            }
        };
        if has_fatal(&this.findings) {
            return this;
        }
        flags::check(schedule, &compact, &mut this.findings);
        let order = progress::check(schedule, &compact, split, &mut this.findings);
        this.order = (order.len() == compact.tasks.len()).then_some(order);
        this.compact = Some(compact);
        this
    }

    /// For the races: none unless every task runs and no flag rises too far.
    fn order<'a>(&'a self, schedule: &'a Schedule) -> Option<order::Order<'a>> {
        let logic = [Rule::Structure, Rule::Tasks, Rule::Flags, Rule::Progress];
        let fatal = |finding: &&Finding| finding.severity == Severity::Fatal && logic.contains(&finding.problem.rule());
        let (Some(compact), Some(legal), None) = (&self.compact, &self.order, self.findings.iter().find(fatal)) else {
            return None;
        };
        Some(order::Order::new(schedule, compact, legal))
    }
}

/// Ranks in whose memory races are looked for, and whether all that reaches it was.
struct Looked {
    ranks: usize,
    complete: bool,
}

/// [`check_fatal`] and races in the memory of some ranks: of one rank of each class and, on clusters of up to 64 ranks,
/// of the last rank.
///
/// Ranks of a class differ in addresses alone, so the order of their tasks is the same. The last rank is looked at beside
/// the first because addresses that wrap around the cluster do so there; nothing is said of the addresses of others.
/// Where very many tasks of other ranks reach a memory, those of some ranks are looked at, spread over the cluster.
pub fn check_hazards(schedule: &Schedule, split: Option<&RoleSplit>) -> Vec<Finding> {
    let mut linear = Linear::new(schedule, split);
    races(schedule, &mut linear);
    linear.findings
}

/// Adds races to the findings, where there is an order.
fn races(schedule: &Schedule, linear: &mut Linear) -> Option<Looked> {
    let order = linear.order(schedule)?;
    let number = |rank: &crate::Rank| schedule.cluster.number(*rank) as u32;
    let mut ranks: Vec<u32> = order.compact.classes.iter().map(number).collect();
    if schedule.cluster.ranks() <= 64 {
        ranks.push(schedule.cluster.ranks() as u32 - 1);
        ranks.dedup();
    }
    let (found, complete) = hazards::check(schedule, &order, &ranks);
    linear.findings.extend(found);
    Some(Looked { ranks: ranks.len(), complete })
}

/// A hash of the order of all accesses that conflict, for a schedule that ends; for small schedules.
///
/// Two schedules of the same tasks, neither with a race, compute the same values if it is equal.
pub fn access_order(schedule: &Schedule) -> Option<u64> {
    let linear = Linear::new(schedule, None);
    let order = linear.order(schedule)?;
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

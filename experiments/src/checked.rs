//! What the checker says of a schedule before it is run, once for each (kernel, problem, cluster, fabric, options).
//!
//! The linear rules cost a few milliseconds and are always asked; a fatal finding refuses the run unless `--unchecked`.
//! Races take up to seconds on large shapes, more than a prediction may, so they are looked for with `--hazards` only;
//! without, no count is given, for a 0 would not be true.

use crate::error::ExperimentError;
use crate::plan::Case;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use tilewire_kernels::Schedule;
use tilewire_kernels::check::{Finding, Limits, Report, Rule, Severity, report, report_fatal};
use tilewire_sim::Machine;

/// What a command asks of the checker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Checks {
    /// Run in spite of fatal findings.
    pub unchecked: bool,
    /// Look for races and count all hazards.
    pub hazards: bool,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Checked {
    /// Fatal findings that it is run in spite of.
    pub overridden: Vec<String>,
    /// All hazards, where races were looked for.
    pub hazards: Option<usize>,
    /// Hazards that the linear rules see.
    pub seen: usize,
}

/// The room that a machine has.
pub fn limits(machine: &Machine) -> Limits {
    Limits {
        shared_bytes: (machine.gpu.smem_kib.value * 1024.0) as u64,
        fifo_depth: machine.proxy.fifo_depth.value as u32,
        in_flight: machine.proxy.in_flight.value as u32,
        ..Limits::hopper(machine.gpu.sms.value as u32)
    }
}

/// A report that is made by who asks first.
type Shared = Arc<OnceLock<Arc<Report>>>;

/// Reports of this process, by schedule, limits, and whether races were looked for.
static REPORTS: Mutex<BTreeMap<(String, bool), Shared>> = Mutex::new(BTreeMap::new());

fn report_once(case: &Case, schedule: &Schedule) -> Arc<Report> {
    let limits = limits(&case.target.machine);
    let Schedule { kernel, cluster, fabric, spec, .. } = schedule;
    let races = case.checks.hazards;
    let key = (format!("{kernel} {cluster} {fabric} {spec} {limits:?}"), races);
    let shared = {
        let mut reports = REPORTS.lock().expect("nothing panics while it holds the lock");
        Arc::clone(reports.entry(key).or_default())
    };
    let make = || Arc::new(if races { report(schedule, &limits, None) } else { report_fatal(schedule, &limits, None) });
    Arc::clone(shared.get_or_init(make))
}

/// Asks the checker.
///
/// # Errors
/// [`ExperimentError::Finding`] for fatal findings, unless the case is to be run unchecked and can be.
pub fn check(case: &Case, schedule: &Schedule) -> Result<Checked, ExperimentError> {
    let report = report_once(case, schedule);
    // What breaks these rules cannot even be read.
    let malformed = |finding: &Finding| matches!(finding.problem.rule(), Rule::Structure | Rule::Tasks);
    let fatal: Vec<&Finding> = report.findings.iter().filter(|finding| finding.severity == Severity::Fatal).collect();
    if let Some(first) = fatal.first()
        && (!case.checks.unchecked || fatal.iter().any(|finding| malformed(finding)))
    {
        let more = if fatal.len() > 1 { format!(" and {} more", fatal.len() - 1) } else { String::new() };
        return Err(ExperimentError::Finding(format!("{first}{more}\n  in {case}; --unchecked runs it all the same")));
    }
    let overridden = fatal.iter().map(ToString::to_string).collect();
    let hazards = case.checks.hazards.then_some(report.hazards);
    Ok(Checked { overridden, hazards, seen: report.hazards })
}

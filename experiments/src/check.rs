//! `check`: what can be said of a schedule without running it.

use crate::cli::CheckArgs;
use crate::engine;
use crate::error::ExperimentError;
use crate::plan::{self, Draft, SplitChoice};
use serde_json::json;
use std::fmt::Write as _;
use tilewire_kernels::check::{Severity, check};

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError::Finding`] when a finding is fatal.
pub fn run(args: &CheckArgs) -> Result<String, ExperimentError> {
    let draft = Draft { split: Some(args.split.clone().unwrap_or_else(|| "auto".into())), ..args.case.draft()? };
    let case = draft.resolve(&args.case.source()?).map_err(plan::flagged)?;
    let schedule = engine::build(&case)?;
    let split = match case.split {
        SplitChoice::Fixed(split) => Some(split),
        SplitChoice::Auto => None,
    };
    let findings = check(&schedule, split.as_ref());
    let fatal = findings.iter().filter(|finding| finding.severity == Severity::Fatal).count();
    let hazards = findings.len() - fatal;
    let text = if args.json {
        let findings: Vec<_> = findings
            .iter()
            .map(|f| json!({ "severity": f.severity, "at": f.at, "problem": f.problem.to_string() }))
            .collect();
        json!({ "case": case.to_string(), "fatal": fatal, "hazards": hazards, "findings": findings }).to_string() + "\n"
    } else {
        let mut text = format!("{case}: {fatal} fatal, {hazards} hazards\n");
        for finding in &findings {
            let _ = writeln!(text, "  {finding}");
        }
        text
    };
    if fatal == 0 {
        return Ok(text);
    }
    crate::print(&text)?;
    Err(ExperimentError::Finding(format!("{case} cannot run: {fatal} fatal findings")))
}

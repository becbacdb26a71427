//! `tune`: the best split of a shape, and how far it can be from the model's optimum.

use crate::cli::{ClockArg, ExecutionArg, TuneArgs};
use crate::engine::{Answer, Prepared};
use crate::error::ExperimentError;
use crate::plan::{self, Case, Draft, Fusion};
use crate::predict::{self, us};
use crate::provenance::Output;
use crate::table::Table;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use tilewire_kernels::{RoleKind, RoleSplit};
use tilewire_sim::tune::{TuneConfig, Tuned};

/// Splits that are printed beside the best one.
const SHOWN: usize = 8;

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &TuneArgs) -> Result<String, ExperimentError> {
    crate::threads(args.run.threads)?;
    let source = args.case.source()?;
    let draft = Draft {
        protocol: args.protocol,
        seed: args.run.seed,
        noise: args.run.noise,
        execution: args.run.execution.map(ExecutionArg::execution),
        clock: args.run.clock.map(ClockArg::clock),
        checks: args.run.checks.checks(),
        ..args.case.draft()?
    };
    let case = draft.resolve(&source).map_err(plan::flagged)?;
    if case.fusion == Fusion::BulkSynchronous {
        let problem = "its phases do not share the SMs, so there is no split to tune; use sweep";
        return Err(ExperimentError::refused("--bulk-synchronous", problem));
    }
    if case.is_unfused() {
        return Err(ExperimentError::refused("--baseline", "the unfused form has no split to tune; use predict"));
    }
    let prepared = Prepared::new(&case)?;
    let config = if args.exhaustive {
        TuneConfig::EXHAUSTIVE
    } else {
        let budget = args.budget.map(|budget| budget as usize).or(prepared.prompt().budget);
        TuneConfig { budget, gap: args.gap / 100.0 }
    };
    let tuned = predict::search(&prepared, &case, &config)?;
    let answer = prepared.predict(&case, &tuned.split)?;
    if let Some(root) = &args.output {
        let output =
            Output::create(root, "tune", Some(case.seed), None, &source, &[&case.target.machine], &["tried.csv"])?;
        output.write("tried.csv", &csv(&tuned))?;
    }
    if args.json {
        return Ok(predict::json(&answer, Some(&tuned)));
    }
    Ok(text(&case, &answer, &tuned))
}

fn text(case: &Case, answer: &Answer, tuned: &Tuned) -> String {
    let mut text = predict::text(case, answer, " (tuned)");
    let mut table = Table::new(["compute", "intra_comm", "inter_send", "inter_reduce", "time_us", "slower"]);
    let mut fastest: BTreeSet<(u64, RoleSplit)> = BTreeSet::new();
    for tried in &tuned.tried {
        if let Some(time) = tried.time_ps {
            fastest.insert((time, tried.split));
        }
    }
    let best = tuned.time_ps.max(1) as f64;
    for &(time, split) in fastest.iter().take(SHOWN) {
        let mut row: Vec<String> = RoleKind::ALL.map(|kind| split.get(kind).to_string()).to_vec();
        row.push(format!("{:.2}", us(time)));
        row.push(format!("{:.2} %", (time as f64 / best - 1.0) * 100.0));
        table.row(row);
    }
    let _ = write!(text, "\nfastest splits, CTAs per role\n{}", table.render(2));
    let _ = writeln!(
        text,
        "\nbest split {}\n{:.2} us; no split can be faster than {:.2} us: certified gap {:.2} %, {} of {} legal splits \
         simulated",
        tuned.split,
        us(tuned.time_ps),
        us(tuned.lower_bound_ps),
        tuned.gap * 100.0,
        tuned.tried.len(),
        tuned.splits
    );
    text
}

fn csv(tuned: &Tuned) -> String {
    let mut text = "compute,intra_comm,inter_send,inter_reduce,status,time_us\n".to_owned();
    for tried in &tuned.tried {
        let counts = RoleKind::ALL.map(|kind| tried.split.get(kind).to_string()).join(",");
        let (status, time) = tried.time_ps.map_or(("failed", String::new()), |time| ("ok", format!("{:.6}", us(time))));
        let _ = writeln!(text, "{counts},{status},{time}");
    }
    text
}

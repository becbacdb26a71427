//! `tune`: the best split of a shape, and how far it can be from the model's optimum.

use crate::cli::{ClockArg, ExecutionArg, ProtocolArg, TuneArgs};
use crate::engine::{Answer, Prepared};
use crate::error::ExperimentError;
use crate::plan::{self, Case, Draft, Fusion};
use crate::provenance::Output;
use crate::table::Table;
use crate::{predict, progress};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use tilewire_kernels::{RoleKind, RoleSplit};
use tilewire_sim::tune::{TuneConfig, Tuned};

/// Simulations at most, unless `--budget` says otherwise.
const PROMPT_SIMULATIONS: usize = 2000;

/// Splits that are printed beside the best one.
const SHOWN: usize = 8;

#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    answer: &'a Answer,
    lower_bound_us: f64,
    certified_gap: f64,
    simulated_splits: usize,
    legal_splits: u64,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &TuneArgs) -> Result<String, ExperimentError> {
    crate::threads(args.run.threads)?;
    let source = args.case.source()?;
    let draft = Draft {
        protocol: Some(args.protocol),
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
    // The published split is a good start where there is one.
    let published = Draft { split: Some("published".into()), protocol: Some(ProtocolArg::Fair), ..draft };
    let start: Vec<RoleSplit> = match published.resolve(&source).map(|case| case.split) {
        Ok(plan::SplitChoice::Fixed(split)) => vec![split],
        _ => Vec::new(),
    };
    let config = if args.exhaustive {
        TuneConfig::EXHAUSTIVE
    } else {
        let prompt = TuneConfig::prompt(&prepared.simulation, PROMPT_SIMULATIONS);
        TuneConfig { budget: args.budget.map(|budget| budget as usize).or(prompt.budget), gap: args.gap / 100.0 }
    };
    let counter = progress::counter("simulations");
    let tuned = prepared.tune(&start, &config, &|done| counter.set_position(done as u64))?;
    counter.finish_and_clear();
    let answer = prepared.predict(&case, &tuned.split)?;
    if let Some(root) = &args.output {
        let output =
            Output::create(root, "tune", Some(case.seed), None, &source, &[&case.target.machine], &["tried.csv"])?;
        output.write("tried.csv", &csv(&tuned))?;
    }
    if args.json {
        let report = Report {
            answer: &answer,
            lower_bound_us: us(tuned.lower_bound_ps),
            certified_gap: tuned.gap,
            simulated_splits: tuned.tried.len(),
            legal_splits: tuned.splits,
        };
        return Ok(serde_json::to_string_pretty(&report).expect("a report has only plain fields") + "\n");
    }
    Ok(text(&case, &answer, &tuned))
}

fn us(ps: u64) -> f64 {
    ps as f64 / 1e6
}

fn text(case: &Case, answer: &Answer, tuned: &Tuned) -> String {
    let mut text = predict::text(case, answer);
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

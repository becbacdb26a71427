//! `predict`: one kernel, shape and split.

use crate::cli::PredictArgs;
use crate::engine::{Answer, Prepared};
use crate::error::ExperimentError;
use crate::plan::{Case, SplitChoice};
use crate::progress;
use crate::provenance::{self, Output};
use crate::table::Table;
use serde::Serialize;
use std::fmt::Write as _;
use tilewire_kernels::RoleSplit;
use tilewire_sim::tune::{TuneConfig, Tuned};

/// Waits that are printed.
const SHOWN_WAITS: usize = 8;

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &PredictArgs) -> Result<String, ExperimentError> {
    crate::threads(args.point.run.threads)?;
    let source = args.point.case.source()?;
    let case = args.point.case(&source)?;
    let prepared = Prepared::new(&case)?;
    let (split, tuned) = split(&prepared, &case)?;
    let answer = prepared.predict(&case, &split)?;
    let json = json(&answer, tuned.as_ref());
    if let Some(root) = &args.output {
        let output = Output::create(
            root,
            "predict",
            Some(case.seed),
            None,
            &source,
            &[&case.target.machine],
            &["prediction.json"],
        )?;
        output.write("prediction.json", &json)?;
    }
    let how = tuned.map_or_else(String::new, |tuned| {
        let (tried, gap) = (tuned.tried.len(), tuned.gap * 100.0);
        format!(" (tuned: {tried} of {} legal splits simulated, certified gap {gap:.2} %)", tuned.splits)
    });
    Ok(if args.json { json } else { text(&case, &answer, &how) })
}

/// The split of a case, and the search for it where it is tuned.
pub fn split(prepared: &Prepared, case: &Case) -> Result<(RoleSplit, Option<Tuned>), ExperimentError> {
    match case.split {
        SplitChoice::Fixed(split) => Ok((split, None)),
        SplitChoice::Auto => search(prepared, case, &prepared.prompt()).map(|tuned| (tuned.split, Some(tuned))),
    }
}

/// Searches the best split while a person looks on.
pub fn search(prepared: &Prepared, case: &Case, config: &TuneConfig) -> Result<Tuned, ExperimentError> {
    // At most so many: a search that is sure of its answer, or near it, ends early.
    let counter = match config.budget {
        Some(budget) => progress::bar(budget as u64, "simulations"),
        None => progress::counter("simulations"),
    };
    let tuned = prepared.tune(case, config, &|done| counter.set_position(done as u64));
    counter.finish_and_clear();
    tuned
}

/// An answer, and how far its split can be from the best.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    answer: &'a Answer,
    #[serde(flatten)]
    search: Option<Search>,
}

#[derive(Serialize)]
struct Search {
    lower_bound_us: f64,
    certified_gap: f64,
    simulated_splits: usize,
    legal_splits: u64,
}

/// The answer as one object, with what the search for its split found, if there was one.
pub fn json(answer: &Answer, tuned: Option<&Tuned>) -> String {
    let search = tuned.map(|tuned| Search {
        lower_bound_us: us(tuned.lower_bound_ps),
        certified_gap: tuned.gap,
        simulated_splits: tuned.tried.len(),
        legal_splits: tuned.splits,
    });
    serde_json::to_string_pretty(&Report { answer, search }).expect("an answer has only plain fields") + "\n"
}

/// Microseconds.
pub fn us(ps: u64) -> f64 {
    ps as f64 / 1e6
}

/// The answer for a person; `how` says how its split was found.
pub fn text(case: &Case, answer: &Answer, how: &str) -> String {
    let mut text = String::new();
    let out = &mut text;
    let prediction = &answer.prediction;
    let _ = writeln!(out, "{case}");
    let set = case.options_behind(", ", |name| case.named.contains(name));
    let _ = writeln!(
        out,
        "options {}{set}, protocol {}, {} execution",
        answer.option_set, answer.protocol, answer.execution
    );
    if case.is_unfused() {
        let _ = writeln!(out, "split   none: each launch takes the SMs that it can get");
    } else {
        let _ = writeln!(out, "split   {}{how}", answer.split);
    }
    if !case.defaults.is_empty() {
        let defaults: Vec<String> = case.defaults.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let _ = writeln!(out, "shape   {} by default, as published", defaults.join(", "));
    }
    for note in &answer.notes {
        let _ = writeln!(out, "note    {note}");
    }
    let bound: String = prediction.bound_by.clone().into();
    let clock = clock(case);
    let lines = [
        ("time_us", format!("{:.2}", prediction.time_us), clock.as_str()),
        ("tflops_per_gpu", format!("{:.1}", prediction.tflops_per_gpu), "useful FLOPs of the busiest rank over time"),
        ("compute_only_us", format!("{:.2}", prediction.compute_only_us), "compute role alone"),
        ("comm_only_us", format!("{:.2}", prediction.comm_only_us), "communication alone"),
        ("overlap", format!("{:.3}", prediction.overlap), "1 hides the shorter of the two wholly"),
        ("exposed_comm_us", format!("{:.2}", prediction.exposed_comm_us), "time - compute_only"),
        ("bound_by", bound, "largest lower bound; latency if none reaches 60 % of time"),
        ("bound_us", format!("{:.2}", prediction.bound_us), "that bound"),
        ("wire_gbs", format!("{:.2}", prediction.wire_gbs), "to other nodes, per GPU"),
        ("logical_gbs", format!("{:.2}", prediction.logical_gbs), "the same with bytes that stay on the node"),
        ("hazards", hazards(answer), hazards_from(answer)),
    ];
    for finding in &answer.overridden {
        let _ = writeln!(out, "unchecked: it cannot run as it is, {finding}");
    }
    let _ = writeln!(out);
    for (name, value, meaning) in lines {
        let _ = writeln!(out, "  {name:16} {value:>16}  {meaning}");
    }

    if let Some(reason) = prediction.overlap_reason {
        let _ = writeln!(out, "\n{reason}");
    }

    let mut roles = Table::new(["role", "ctas", "tasks", "busy_us", "wait_us", "idle_us", "utilisation"]);
    for role in &prediction.roles {
        let us = |value: f64| format!("{value:.1}");
        roles.row([
            role.helper.as_ref().map_or_else(|| role.role.to_string(), |launch| format!("{} ({launch})", role.role)),
            role.ctas.to_string(),
            role.tasks.to_string(),
            us(role.busy_us),
            us(role.wait_us),
            us(role.idle_us),
            format!("{:.3}", role.utilisation),
        ]);
    }
    let _ = write!(out, "\n{}", roles.render(2));
    if !prediction.waits.is_empty() {
        let mut waits = Table::new(["role", "waits for", "raised by", "us", "share"]);
        for wait in prediction.waits.iter().take(SHOWN_WAITS) {
            waits.row([
                wait.role.name().to_owned(),
                wait.flag.clone(),
                wait.cause_role.clone(),
                format!("{:.1}", wait.us),
                format!("{:.3}", wait.share),
            ]);
        }
        let _ = write!(out, "\n{}", waits.render(2));
    }
    let machine = &case.target.machine;
    let _ = writeln!(
        out,
        "\n{} tasks, {} events, {} rank(s) simulated; schedule {}",
        prediction.tasks,
        prediction.events,
        prediction.simulated_ranks,
        short_hash(&answer.schedule_hash)
    );
    let open = provenance::unsourced(machine).len();
    let _ = writeln!(out, "{open} of {} parameters of {} are assumed or fitted", machine.params().len(), machine.name);
    text
}

/// From when to when the time is.
fn clock(case: &Case) -> String {
    if case.protocol.is_isolated() {
        let host_us = case.target.machine.launch.isolated_us.value;
        format!("launch of the fused kernel to last write visible, and {host_us} us of the host before it")
    } else {
        "launch command to last write visible".into()
    }
}

fn hazards(answer: &Answer) -> String {
    match (answer.hazards, answer.hazards_seen) {
        (Some(hazards), _) => hazards.to_string(),
        (None, 0) => "not checked".into(),
        (None, seen) => format!("{seen} or more"),
    }
}

const fn hazards_from(answer: &Answer) -> &'static str {
    match answer.hazards {
        Some(_) => "of the schedule; `tilewire check` lists them",
        None => "races are counted with --hazards; `tilewire check` lists all",
    }
}

/// The first digits of a hash, enough to tell schedules apart on a terminal.
fn short_hash(hash: &str) -> &str {
    hash.get(..16).unwrap_or(hash)
}

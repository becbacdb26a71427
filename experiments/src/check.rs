//! `check`: what can be said of a schedule without running it, and with `--values` what it computes.

use crate::checked;
use crate::cli::CheckArgs;
use crate::engine;
use crate::error::ExperimentError;
use crate::plan::{self, Case, Draft, SplitChoice};
use crate::progress;
use crate::table::Table;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use tilewire_hw::values::{Config, Race, RunEnd, Scheduler, Trials, check_values};
use tilewire_kernels::check::{Finding, Limits, Report, Rule, Verdict, report};
use tilewire_kernels::{RoleSplit, Schedule};

/// CTAs that `--values` gives to each role without a split: two, so that CTAs of a role overtake each other.
const CTAS: RoleSplit = RoleSplit { compute: 2, intra_comm: 2, inter_send: 2, inter_reduce: 2 };

/// Bytes of the memory of all ranks that `--values` takes at most.
const MAX_BYTES: u64 = 1 << 30;

/// Floating-point operations of all ranks in a run that `--values` takes at most: seconds for each run and its reference.
const MAX_FLOPS: u64 = 1 << 32;

/// What the trials of a scheduler add up to.
#[derive(Default, Serialize)]
struct Row {
    trials: u64,
    tasks: u64,
    interleaving_steps: u64,
    elements: u64,
    /// Largest error, as a part of its bound.
    worst: f64,
}

/// What was run with values.
struct Values {
    config: Config,
    seeds: u64,
    rows: BTreeMap<Scheduler, Row>,
    trials: Trials,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError::Finding`] when there is one, hazards and wrong values included.
pub fn run(args: &CheckArgs) -> Result<String, ExperimentError> {
    let draft = Draft { split: Some(args.split.clone().unwrap_or_else(|| "auto".into())), ..args.case.draft()? };
    let case = draft.resolve(&args.case.source()?).map_err(plan::flagged)?;
    let split = match case.split {
        SplitChoice::Fixed(split) => Some(split),
        SplitChoice::Auto if args.split.is_some() => {
            let problem = "\"auto\", allowed: ROLE=CTAS,... or published; `tilewire tune` finds a split";
            return Err(ExperimentError::refused("--split", problem));
        }
        SplitChoice::Auto => None,
    };
    let limits = args.limits.over(checked::limits(&case.target.machine));
    let schedule = engine::build(&case)?;
    if args.values {
        fits(&case, &schedule)?;
    }
    let report = report(&schedule, &limits, split.as_ref());
    let values = args.values.then(|| values(args, &case, &schedule, &limits, split.unwrap_or(CTAS)));
    let text = if args.json {
        json_text(&case, split, &limits, &report, values.as_ref())
    } else {
        text_of(&case, split, &report, values.as_ref())
    };
    let Some(finding) = finding(&report, values.as_ref()) else { return Ok(text) };
    crate::print(&text)?;
    Err(ExperimentError::Finding(format!("{finding}\n  in {case}")))
}

/// Refuses shapes that would not fit into memory or run for minutes.
fn fits(case: &Case, schedule: &Schedule) -> Result<(), ExperimentError> {
    let ranks = schedule.cluster.ranks() as u64;
    let of_rank: u64 = schedule.buffers.iter().map(|buffer| buffer.bytes).sum();
    let (bytes, flops) = (of_rank.saturating_mul(ranks), schedule.useful_flops.saturating_mul(ranks));
    if bytes <= MAX_BYTES && flops <= MAX_FLOPS {
        return Ok(());
    }
    let problem = format!(
        "{case} has {bytes} bytes and {flops} FLOP over all ranks, allowed: {MAX_BYTES} and {MAX_FLOPS}; choose a small \
         shape and small tiles, as in --set tile_m=16 --set tile_n=32 --set tile_k=16"
    );
    Err(ExperimentError::refused("--values", problem))
}

fn values(args: &CheckArgs, case: &Case, schedule: &Schedule, limits: &Limits, split: RoleSplit) -> Values {
    let schedulers = if args.scheduler.is_empty() { &Scheduler::ALL[..] } else { &args.scheduler };
    let config = Config {
        split,
        sms: limits.sms,
        seed: args.seed,
        scheduler: schedulers[0],
        runs: args.runs as u32,
        end: RunEnd::Drained,
        fifo_depth: limits.fifo_depth,
        in_flight: limits.in_flight,
        check_races: true,
    };
    let seeds = (0..args.seeds).map(|i| args.seed.wrapping_add(i));
    let trials: Vec<(Scheduler, u64)> =
        seeds.flat_map(|seed| schedulers.iter().map(move |&scheduler| (scheduler, seed))).collect();
    let bar = progress::bar(trials.len() as u64, "values");
    let mut rows: BTreeMap<Scheduler, Row> = BTreeMap::new();
    let trials = check_values(schedule, case.kernel, &case.spec(), &config, &trials, |scheduler, _, report| {
        let row = rows.entry(scheduler).or_default();
        row.trials += 1;
        row.tasks += report.tasks;
        row.interleaving_steps += report.steps;
        row.elements += report.elements;
        row.worst = row.worst.max(report.worst);
        bar.inc(1);
    });
    bar.finish_and_clear();
    Values { config, seeds: args.seeds, rows, trials }
}

/// What makes the command fail, in a line.
fn finding(report: &Report, values: Option<&Values>) -> Option<String> {
    let mut found = Vec::new();
    if !report.is_clean() {
        found.push(counts(report));
    }
    if let Some(Values { trials, .. }) = values {
        if trials.failure.is_some() {
            found.push("a trial with values failed".into());
        }
        if !trials.races.is_empty() {
            found.push(format!("{} kinds of races seen in trials", trials.races.len()));
        }
    }
    (!found.is_empty()).then(|| found.join("; "))
}

fn counts(report: &Report) -> String {
    match hazards(report) {
        Some(hazards) => format!("{} fatal, {hazards} hazards", report.fatal),
        None if report.hazards > 0 => format!("{} fatal, {} hazards or more", report.fatal, report.hazards),
        None => format!("{} fatal, hazards not known", report.fatal),
    }
}

/// Hazards, if races were looked for.
fn hazards(report: &Report) -> Option<usize> {
    let races = report.rules.iter().find(|result| result.rule == Rule::Races);
    races.is_some_and(|result| result.verdict != Verdict::NotChecked).then_some(report.hazards)
}

fn split_text(split: Option<RoleSplit>) -> String {
    split.map_or_else(|| "any".into(), |split| split.to_string())
}

fn text_of(case: &Case, split: Option<RoleSplit>, report: &Report, values: Option<&Values>) -> String {
    let mut text = format!("{case}\noptions {}, split {}\n\n", case.set.name(), split_text(split));
    let mut rules = Table::new(["rule", "verdict", "looked at"]);
    for result in &report.rules {
        let verdict = match result.verdict {
            Verdict::Ok => "ok".into(),
            Verdict::Fatal(count) => format!("{count} fatal"),
            Verdict::Hazards(count) => format!("{count} hazards"),
            Verdict::NotChecked => "not checked".into(),
        };
        rules.row([result.rule.name().to_owned(), verdict, result.scope.clone()]);
    }
    text += &rules.render(2);
    let _ = writeln!(text);
    for finding in &report.findings {
        let _ = writeln!(text, "{finding}");
    }
    let _ = writeln!(text, "{}", counts(report));
    if let Some(values) = values {
        text += &values_text(values);
    }
    text
}

fn values_text(values: &Values) -> String {
    let Values { config, seeds, rows, trials } = values;
    let mut text = format!(
        "\nvalues: seeds {} to {}, {} runs in a row, CTAs {}\n\n",
        config.seed,
        config.seed.wrapping_add(seeds - 1),
        config.runs,
        config.split
    );
    let mut table = Table::new(["scheduler", "trials passed", "tasks", "elements", "largest error / bound"]);
    for (scheduler, row) in rows {
        let worst = format!("{:.3}", row.worst);
        let counts = [row.trials, row.tasks, row.elements].map(|count| count.to_string());
        table.row([vec![scheduler.name().to_owned()], counts.to_vec(), vec![worst]].concat());
    }
    text += &table.render(2);
    let _ = writeln!(text);
    for race in &trials.races {
        let _ = writeln!(text, "{race}");
    }
    match &trials.failure {
        None => {
            let _ =
                writeln!(text, "values: right in all {} trials, {} kinds of races", trials.passed, trials.races.len());
        }
        Some((scheduler, seed, error)) => {
            let _ = writeln!(text, "values: {error}");
            let _ =
                writeln!(text, "  once more: the same with --scheduler {} --seed {seed} --seeds 1", scheduler.name());
        }
    }
    text
}

fn json_text(
    case: &Case,
    split: Option<RoleSplit>,
    limits: &Limits,
    report: &Report,
    values: Option<&Values>,
) -> String {
    let finding = |finding: &Finding| {
        json!({
            "severity": finding.severity,
            "rule": finding.problem.rule(),
            "at": finding.at,
            "text": finding.to_string(),
            "problem": finding.problem,
        })
    };
    let values = values.map(|Values { config, seeds, rows, trials }| {
        let failure = trials.failure.as_ref().map(|(scheduler, seed, error)| {
            json!({ "scheduler": scheduler.name(), "seed": seed, "error": error.to_string() })
        });
        let race = |race: &Race| json!({ "signature": race.signature(), "text": race.to_string(), "race": race });
        json!({
            "split": config.split,
            "runs": config.runs,
            "seed": config.seed,
            "seeds": seeds,
            "passed": trials.passed,
            "schedulers": rows.iter().map(|(scheduler, row)| (scheduler.name(), row)).collect::<BTreeMap<_, _>>(),
            "failure": failure,
            "races": trials.races.iter().map(race).collect::<Vec<_>>(),
        })
    });
    let answer = json!({
        "case": case.to_string(),
        "option_set": case.set.name(),
        "options": case.options.iter().map(|(name, value)| (name, value.to_string())).collect::<BTreeMap<_, _>>(),
        "split": split,
        "limits": limits,
        "rules": report.rules,
        "fatal": report.fatal,
        "hazards": hazards(report),
        "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
        "values": values,
    });
    serde_json::to_string_pretty(&answer).expect("an answer has only plain fields") + "\n"
}

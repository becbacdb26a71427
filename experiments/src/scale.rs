//! `scale`: hypotheses about clusters that nobody here has, decided by replicated, seeded runs.
//!
//! Every replicate draws latencies, clocks, a late rank (and the routing of MoE) from a seed of its own; both points of
//! a ratio are run with the same seed. A hypothesis holds when the whole confidence interval satisfies it, fails when
//! none of it does, and is open otherwise. The interval covers what the seeds draw, not the error of the model.

use crate::cli::SweepArgs;
use crate::engine::Prepared;
use crate::error::ExperimentError;
use crate::experiment::{Experiment, Hypothesis, Study};
use crate::in_order::in_order;
use crate::plan::{Case, Source, SplitChoice};
use crate::plot::axis::Spread;
use crate::plot::line::{LinePlot, Panel, Series};
use crate::plot::style::{FUSED_SERIES, QUIET, UNFUSED_SERIES};
use crate::plot::{self, Frame};
use crate::provenance::{ExperimentText, Output, footer, wrote};
use crate::row::{self, Outcome};
use crate::table::Table;
use crate::{progress, sweep};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::json;
use statrs::distribution::{ContinuousCDF, StudentsT};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use tilewire_kernels::RoleSplit;
use tilewire_sim::Execution;

/// What the replicates say of a hypothesis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// All of the interval satisfies the claim.
    Holds,
    /// None of it does.
    Fails,
    /// Some of it does: more replicates, or less noise, would decide.
    Open,
}

/// A decided hypothesis.
#[derive(Clone, Debug, Serialize)]
struct Decision {
    claim: String,
    column: String,
    ratio: bool,
    replicates: usize,
    /// Mean of the replicates, of ratios the geometric one.
    mean: f64,
    low: f64,
    high: f64,
    at_least: Option<f64>,
    at_most: Option<f64>,
    verdict: Verdict,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`]; a hypothesis that fails or stays open is a finding.
pub fn run(args: &SweepArgs) -> Result<String, ExperimentError> {
    crate::threads(args.threads)?;
    let source = Source::new(args.data.data.as_deref(), args.data.machine.as_deref())?;
    let checks = args.checks.checks();
    let experiment = Experiment::read(&args.file, &source)?.checked(checks)?;
    let Some(study) = &experiment.study else {
        let file = args.file.display().to_string();
        return Err(ExperimentError::refused(file, "has no [[hypothesis]]; add one, or run it with `tilewire sweep`"));
    };
    let replica = |r| experiment.replicate(r, &source)?.checked(checks);
    let replicas = (0..study.replicates).map(replica).collect::<Result<Vec<_>, ExperimentError>>()?;
    let splits = splits(&experiment)?;

    let root = args.output.clone().unwrap_or_else(|| Path::new("out").join(&experiment.name));
    let mut machines = BTreeMap::new();
    for (case, _) in experiment.cases() {
        machines.insert(&case.target.machine.name, &case.target.machine);
    }
    let machines: Vec<_> = machines.into_values().collect();
    let text = ExperimentText { name: &experiment.name, text: &experiment.text };
    let output = Output::create(
        &root,
        "scale",
        Some(experiment.seed),
        Some(text),
        &source,
        &machines,
        &["rows.csv", "hypotheses.csv"],
    )?;
    let path = output.path("rows.csv");
    let points = replicas.len() * splits.len();
    if points > 1 {
        progress::say(&to_come(&experiment, splits.len(), replicas.len()));
    }
    let rows = replicates(&replicas, &splits, &path)?;
    if let Some(partial) = progress::partial(rows.len(), points) {
        output.finish(&[path], Some(partial))?;
        return Err(ExperimentError::Interrupted {
            kept: "their rows are kept; the run is partial and decides nothing",
            done: rows.len(),
            points,
        });
    }
    let rows: Vec<&[Vec<String>]> = rows.chunks(splits.len()).collect();
    let decisions: Vec<Decision> =
        study.hypotheses.iter().map(|hypothesis| decide(hypothesis, study, &rows)).collect::<Result<_, _>>()?;
    let mut files = vec![path, output.path("hypotheses.csv")];
    write_decisions(&decisions, &files[1])?;
    if let Some(plot) = by_ranks(&experiment, &rows) {
        files.extend(plot::save(&plot, &output.path("scale"))?);
    }
    output.finish(&files, None)?;
    let text = if args.json {
        json_text(&experiment, &decisions, &files)
    } else {
        text_of(&experiment, study, &decisions, &files)
    };
    let undecided = decisions.iter().filter(|decision| decision.verdict != Verdict::Holds).count();
    if undecided == 0 {
        return Ok(text);
    }
    crate::print(&text)?;
    Err(ExperimentError::Finding(format!("{undecided} of {} hypotheses do not hold or stay open", decisions.len())))
}

/// The split of every point: `auto` is tuned once, without noise, as an engineer would who cannot see the future.
fn splits(experiment: &Experiment) -> Result<Vec<RoleSplit>, ExperimentError> {
    let points: Vec<(&Case, SplitChoice)> = experiment.cases().collect();
    let split = |(case, choice): &(&Case, SplitChoice)| {
        let prepared = Prepared::new(&Case { noise: false, ..(*case).clone() })?;
        let split = match *choice {
            SplitChoice::Fixed(split) => split,
            SplitChoice::Auto => prepared.split(case)?,
        };
        prepared.check_split(&split).map_err(|error| error.at(&experiment.split_place)).map(|()| split)
    };
    let bar = progress::bar(points.len() as u64, "splits");
    let split = |point: &_| {
        let split = split(point).map_err(|error: ExperimentError| error.at(&experiment.shape_place));
        bar.inc(1);
        split
    };
    let found: Vec<Result<RoleSplit, ExperimentError>> = points.par_iter().map(split).collect();
    bar.finish_and_clear();
    found.into_iter().collect()
}

/// How many runs there will be, and how large they are.
fn to_come(experiment: &Experiment, points: usize, replicates: usize) -> String {
    // Where symmetry decides how many ranks are simulated, few are.
    let all = experiment.cases().filter(|(case, _)| case.noise || case.execution == Execution::Full);
    let ranks = all.map(|(case, _)| case.target.cluster.ranks()).max();
    let ranks = ranks.map_or_else(String::new, |ranks| format!(", every rank of up to {ranks} simulated"));
    let left = "; how long they take is known when the first has ended";
    format!("{} runs: {points} points, {replicates} times{ranks}{left}", points * replicates)
}

/// Runs all points of all replicates; returns the fields of their rows, replicate by replicate.
fn replicates(replicas: &[Experiment], splits: &[RoleSplit], path: &Path) -> Result<Vec<Vec<String>>, ExperimentError> {
    let failed = |error: csv::Error| ExperimentError::write(path, error);
    let file = File::create(path).map_err(|error| ExperimentError::write(path, error))?;
    let mut writer = csv::Writer::from_writer(file);
    writer.write_record(row::columns()).map_err(failed)?;
    let points: Vec<(&Case, &RoleSplit)> =
        replicas.iter().flat_map(|replica| replica.cases().map(|(case, _)| case).zip(splits)).collect();
    let mut rows = Vec::with_capacity(points.len());
    let run = |&(case, split): &(&Case, &RoleSplit)| {
        let answer = Prepared::new(case).and_then(|prepared| prepared.predict(case, split));
        let outcome = match answer {
            Ok(answer) => Outcome::Done(Box::new(answer)),
            Err(error) => Outcome::Failed(*split, error.to_string()),
        };
        row::fields(case, &outcome)
    };
    in_order(&points, run, |fields| {
        writer.write_record(&fields)?;
        writer.flush()?;
        rows.push(fields);
        Ok::<(), csv::Error>(())
    })
    .map_err(failed)?;
    Ok(rows)
}

/// Decides a hypothesis from the rows of every replicate.
fn decide(hypothesis: &Hypothesis, study: &Study, rows: &[&[Vec<String>]]) -> Result<Decision, ExperimentError> {
    let place = row::columns().iter().position(|column| *column == hypothesis.column);
    let place = place.expect("columns are checked on reading");
    let undefined = |what: String| ExperimentError::Finding(format!("claim \"{}\": {what}", hypothesis.claim));
    let value = |replica: &[Vec<String>], point: usize| -> Result<f64, ExperimentError> {
        let text = &replica[point][place];
        text.parse()
            .map_err(|_| undefined(format!("{} = \"{text}\" is no number; see column status", hypothesis.column)))
    };
    let mut samples = Vec::with_capacity(rows.len());
    for replica in rows {
        let of = value(replica, hypothesis.of)?;
        let Some(than) = hypothesis.than else {
            samples.push(of);
            continue;
        };
        let than = value(replica, than)?;
        if of <= 0.0 || than <= 0.0 {
            return Err(undefined(format!("{} is not positive ({of}, {than}): no ratio", hypothesis.column)));
        }
        samples.push((of / than).ln());
    }
    let (mean, half) = interval(&samples, study.confidence);
    let scale = |x: f64| if hypothesis.than.is_some() { x.exp() } else { x };
    let (low, high) = (scale(mean - half), scale(mean + half));
    Ok(Decision {
        claim: hypothesis.claim.clone(),
        column: hypothesis.column.clone(),
        ratio: hypothesis.than.is_some(),
        replicates: samples.len(),
        mean: scale(mean),
        low,
        high,
        at_least: hypothesis.at_least,
        at_most: hypothesis.at_most,
        verdict: verdict((low, high), hypothesis.at_least, hypothesis.at_most),
    })
}

/// Mean of samples, and half the width of its confidence interval (Student's t); of one, which nothing was drawn for, none.
fn interval(samples: &[f64], confidence: f64) -> (f64, f64) {
    let n = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / n;
    if samples.len() == 1 {
        return (mean, 0.0);
    }
    let variance = samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let t = StudentsT::new(0.0, 1.0, n - 1.0).expect("a degree of freedom or more");
    (mean, t.inverse_cdf(f64::midpoint(1.0, confidence)) * (variance / n).sqrt())
}

fn verdict((low, high): (f64, f64), at_least: Option<f64>, at_most: Option<f64>) -> Verdict {
    let (least, most) = (at_least.unwrap_or(f64::NEG_INFINITY), at_most.unwrap_or(f64::INFINITY));
    if low >= least && high <= most {
        Verdict::Holds
    } else if high < least || low > most {
        Verdict::Fails
    } else {
        Verdict::Open
    }
}

/// TFLOPS against the number of GPUs, a line per schedule, the band from the lowest to the highest replicate.
fn by_ranks(experiment: &Experiment, rows: &[&[Vec<String>]]) -> Option<LinePlot> {
    let place = row::columns().iter().position(|column| column == "tflops_per_gpu")?;
    let mut lines: BTreeMap<(bool, String), BTreeMap<usize, Vec<f64>>> = BTreeMap::new();
    for (point, (case, _)) in experiment.cases().enumerate() {
        let set = experiment.set_behind(", ", case);
        let name = format!("{} {}, {} options{set}", case.fusion.name(), case.name, case.set.name());
        let values = rows.iter().map(|replica| replica[point][place].parse().ok()).collect::<Option<Vec<f64>>>()?;
        let line = lines.entry((case.is_unfused(), name)).or_default();
        // Several shapes or splits of one cluster are no line.
        if line.insert(case.target.cluster.ranks(), values).is_some() {
            return None;
        }
    }
    if lines.values().all(|line| line.len() < 2) {
        return None;
    }
    let (mut fused, mut unfused) = (FUSED_SERIES.into_iter(), UNFUSED_SERIES.into_iter());
    let series = lines.iter().map(|((baseline, name), line)| {
        let color = if *baseline { unfused.next() } else { fused.next() }.unwrap_or(QUIET);
        let points =
            line.iter().map(|(&ranks, values)| (ranks as f64, values.iter().sum::<f64>() / values.len() as f64));
        let band = line.iter().map(|(&ranks, values)| {
            let low = values.iter().copied().fold(f64::INFINITY, f64::min);
            (ranks as f64, low, values.iter().copied().fold(0.0, f64::max))
        });
        Series { band: band.collect(), ..Series::line(name, color, points.collect()) }
    });
    let machines: Vec<&str> = experiment.cases().map(|(case, _)| case.target.machine.name.as_str()).collect();
    let machines = machines.first().copied().unwrap_or_default();
    Some(LinePlot {
        frame: Frame {
            title: experiment.question.clone(),
            subtitle: if rows.len() == 1 {
                "predicted without noise".into()
            } else {
                format!("mean of {} replicates, band from the lowest to the highest; predicted", rows.len())
            },
            footer: footer(&format!("experiment {}, seed {}, machine {machines}", experiment.name, experiment.seed)),
        },
        x_name: "GPUs".into(),
        x_spread: Spread::Log,
        panels: vec![Panel { y_name: "TFLOPS per GPU".into(), with_zero: true, series: series.collect() }],
    })
}

fn write_decisions(decisions: &[Decision], path: &Path) -> Result<(), ExperimentError> {
    let mut writer = csv::Writer::from_path(path).map_err(|error| ExperimentError::write(path, error))?;
    for decision in decisions {
        writer.serialize(decision).map_err(|error| ExperimentError::write(path, error))?;
    }
    writer.flush().map_err(|error| ExperimentError::write(path, error))
}

fn text_of(experiment: &Experiment, study: &Study, decisions: &[Decision], files: &[PathBuf]) -> String {
    // Without anything that is drawn there is one value and no interval.
    let drawn = study.replicates > 1;
    let head = if drawn { vec!["mean", "low", "high"] } else { vec!["value"] };
    let mut table = Table::new([vec!["verdict", "claim", "column"], head, vec!["claimed"]].concat());
    for decision in decisions {
        let verdict = match decision.verdict {
            Verdict::Holds => "holds",
            Verdict::Fails => "FAILS",
            Verdict::Open => "open",
        };
        let claimed = match (decision.at_least, decision.at_most) {
            (Some(low), Some(high)) => format!("{low} to {high}"),
            (Some(low), None) => format!(">= {low}"),
            (None, Some(high)) => format!("<= {high}"),
            (None, None) => String::new(),
        };
        let column = if decision.ratio { format!("ratio of {}", decision.column) } else { decision.column.clone() };
        let numbers = [decision.mean, decision.low, decision.high].map(|x| format!("{x:.4}"));
        let numbers = numbers.into_iter().take(if drawn { 3 } else { 1 });
        table.row([verdict.to_owned(), decision.claim.clone(), column].into_iter().chain(numbers).chain([claimed]));
    }
    let mut text = format!("{}\n\n{}", experiment.question, table.render(2));
    text += &sweep::notes(experiment);
    if !drawn {
        text.push_str(
            "\nNo noise, so nothing is drawn and one run decides. Ranks in lockstep are an optimistic case, and the model's\n\
             error is not in it: see the README for what has been compared with measurements.\n",
        );
        return text + &wrote(files);
    }
    let _ = writeln!(
        text,
        "\n{} replicates, seeds from {}; {} % interval of each mean by itself. It covers what the seeds draw ({}),\n\
         not the error of the model: see the README for what has been compared with measurements.",
        study.replicates,
        experiment.seed,
        study.confidence * 100.0,
        drawn_words(experiment),
    );
    text + &wrote(files)
}

/// What the seeds draw.
fn drawn_words(experiment: &Experiment) -> String {
    let mut words = Vec::new();
    if experiment.cases().any(|(case, _)| case.draws_routing()) {
        words.push("routing");
    }
    if experiment.cases().any(|(case, _)| case.noise) {
        words.extend(["latencies", "clocks", "one late rank"]);
    }
    words.join(", ")
}

fn json_text(experiment: &Experiment, decisions: &[Decision], files: &[PathBuf]) -> String {
    json!({
        "experiment": experiment.name,
        "question": experiment.question,
        "hypotheses": decisions,
        "files": files,
    })
    .to_string()
        + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Document;

    #[test]
    fn what_is_to_come_is_said_with_the_ranks_that_are_simulated_one_by_one() {
        let text = "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = [\"2x2-h200-efa\", \"4x2-h200-efa\"]\nsplit = \"auto\"\n\
                    shape = { m = 2048, n = 1024, k = 512 }\n";
        let said = |more: &str| {
            let source = Source::new(None, None).expect("the embedded data");
            let document = Document::new("x.toml".into(), &format!("{text}{more}"));
            to_come(&Experiment::new("x".into(), &document, &source, 0).expect("an experiment"), 2, 20)
        };
        let left = "; how long they take is known when the first has ended";
        let all = format!("40 runs: 2 points, 20 times, every rank of up to 8 simulated{left}");
        assert_eq!(said("noise = true"), all);
        assert_eq!(said("noise = false"), format!("40 runs: 2 points, 20 times{left}"));
    }

    #[test]
    fn interval_of_a_sample_worked_by_hand() {
        // Mean 3, deviation sqrt(2.5), t(0.975, 4) = 2.776445: half = 2.776445 * sqrt(2.5 / 5).
        let (mean, half) = interval(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.95);
        assert!((mean - 3.0).abs() < 1e-12 && (half - 1.963_243).abs() < 1e-5, "{mean} {half}");
    }

    #[test]
    fn an_interval_across_the_bound_decides_nothing() {
        assert_eq!(verdict((1.1, 1.2), Some(1.1), None), Verdict::Holds);
        assert_eq!(verdict((1.0, 1.2), Some(1.1), None), Verdict::Open);
        assert_eq!(verdict((1.0, 1.05), Some(1.1), None), Verdict::Fails);
        assert_eq!(verdict((1.0, 1.2), None, Some(0.9)), Verdict::Fails);
        assert_eq!(verdict((1.0, 1.2), Some(0.9), Some(1.1)), Verdict::Open);
    }
}

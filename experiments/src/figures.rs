//! `figures`: the published figures with predictions beside, and an error table.
//!
//! ```text
//!  figures/KERNEL-TOPOLOGY.png,.svg   bars: published (hatched), predicted (solid), predicted with a fair protocol (pale)
//!  figures/all.png,.svg               predicted against published, all judged bars
//!  figures/rows.csv                   a row per published bar
//!  figures/errors.csv                 a row per kernel, topology and system
//!  figures/decisions.csv              fused or unfused, published and predicted
//!  figures/assumed.csv                parameters that no source gives
//! ```
//!
//! Error of a row = |ln(predicted / published)|; of a group = exp(mean) - 1.

mod plots;
mod tables;

pub(crate) use tables::csv_of;
use tables::{assumed_csv, rows_csv, text};

use crate::checked::Checks;
use crate::cli::{FiguresArgs, ProtocolArg};
use crate::data::{Data, Figure, FitRow, Judged, Metric, System};
use crate::engine::{Answer, Prepared};
use crate::error::ExperimentError;
use crate::experiment::Experiment;
use crate::plan::{self, Case, Draft, Fusion, Source, SplitChoice};
use crate::plot;
use crate::provenance::Output;
use crate::{progress, shape, sweep};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use tilewire_kernels::{OptionSet, RoleSplit};

/// Published differences below this decide nothing.
const DECISIVE: f64 = 0.10;

/// A published bar and what is predicted for it.
struct Bar {
    kernel: String,
    topology: String,
    machine: &'static str,
    system: System,
    size: u64,
    published: f64,
    band: (f64, f64),
    judged: bool,
    /// A machine parameter was fitted on it.
    fitted: bool,
    /// Under the protocol that the bar had.
    predicted: Answer,
    /// Under a fresh epoch per launch.
    fair: Answer,
}

/// Bars in order, and why some could not be predicted.
type Bars = (Vec<Bar>, Vec<String>);

/// Error of the judged bars of a kernel, topology and system.
#[derive(Debug, Serialize)]
struct GroupError {
    kernel: String,
    topology: String,
    system: &'static str,
    rows: usize,
    error: f64,
    test_rows: usize,
    /// Over the rows on which nothing was fitted.
    test_error: f64,
    worst_size: u64,
    worst_published_tflops_per_gpu: f64,
    worst_predicted_tflops_per_gpu: f64,
    worst_error: f64,
}

/// Fused or unfused at one size.
#[derive(Debug, Serialize)]
struct Decision {
    kernel: String,
    topology: String,
    size: u64,
    published_fused_over_unfused: f64,
    predicted_fused_over_unfused: f64,
    fair_fused_over_unfused: f64,
    decisive: bool,
    right: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    failures: &'a [String],
    errors: &'a [GroupError],
    decisions: &'a [Decision],
    files: &'a [PathBuf],
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &FiguresArgs) -> Result<String, ExperimentError> {
    crate::threads(args.threads)?;
    let source = Source::new(args.data.as_deref(), None)?;
    // Read before anything is written, so that a mistake in an experiment costs no time.
    let experiments: Vec<Experiment> =
        args.with.iter().map(|file| Experiment::read(file, &source)).collect::<Result<_, _>>()?;
    for (i, experiment) in experiments.iter().enumerate() {
        // Each has a directory of its name, beside that of the figures.
        if experiment.name == "figures" || experiments[..i].iter().any(|other| other.name == experiment.name) {
            let problem =
                format!("\"{}\" is the name of another output here, allowed: names that differ", experiment.name);
            return Err(ExperimentError::refused("--with", problem));
        }
    }
    let checks = args.checks.checks();
    let experiments: Vec<Experiment> =
        experiments.into_iter().map(|experiment| experiment.checked(checks)).collect::<Result<_, _>>()?;
    let (bars, failures) = predict(&source, checks)?;
    let mut machines = BTreeMap::new();
    for bar in &bars {
        machines.insert(bar.machine, source.data.machine(bar.machine)?);
    }
    let used: Vec<_> = machines.values().collect();
    let tables = ["rows.csv", "errors.csv", "decisions.csv", "assumed.csv"];
    let output = Output::create(&args.output.join("figures"), "figures", Some(0), None, &source, &used, &tables)?;
    let errors = errors(&bars);
    let decisions = decisions(&bars);
    let mut files = Vec::new();
    for plot in plots::bars(&bars, &errors) {
        files.extend(plot::save(&plot.1, &output.path(&plot.0))?);
    }
    files.extend(plot::save(&plots::all(&bars), &output.path("all"))?);
    let texts = [rows_csv(&bars), csv_of(&errors), csv_of(&decisions), assumed_csv(&used)];
    for (name, text) in tables.into_iter().zip(texts) {
        output.write(name, &text)?;
        files.push(output.path(name));
    }
    output.finish(&files, None)?;
    let mut text = if args.json {
        let report = Report { failures: &failures, errors: &errors, decisions: &decisions, files: &files };
        serde_json::to_string_pretty(&report).expect("a report has only plain fields") + "\n"
    } else {
        text(&bars, &failures, &errors, &decisions, &used, &files)
    };
    let mut finding = (!failures.is_empty())
        .then(|| ExperimentError::Finding(format!("{} published bars could not be predicted", failures.len())));
    for experiment in &experiments {
        let summary = sweep::execute(experiment, &source, &args.output.join(&experiment.name))?;
        if !args.json {
            let _ = write!(text, "\n{}", sweep::text(experiment, &summary));
        }
        finding = finding.or(sweep::verdict(&summary));
        // The outputs of the other experiments stay as they are.
        if progress::interrupted() {
            break;
        }
    }
    match finding {
        None => Ok(text),
        Some(finding) => {
            crate::print(&text)?;
            Err(finding)
        }
    }
}

/// The bars that are predicted: every size of the judged figures, small ones included.
pub(crate) fn published(data: &Data) -> Result<Vec<(Figure, Option<Judged>)>, ExperimentError> {
    let judged = data.judged()?;
    let exact = |figure: &Figure| figure.base.is_some_and(|system| system.name() == figure.system);
    let bar = |figure: &Figure| figure.source.contains(" plots/") && figure.source.ends_with("(bar label)");
    let mut bars: Vec<(Figure, Option<Judged>)> = data
        .figures()?
        .into_iter()
        .filter(|figure| exact(figure) && bar(figure) && figure.machine().is_some())
        .filter(|figure| figure.metric == Metric::TflopsPerGpu && figure.value.is_some() && figure.size.is_some())
        .map(|figure| {
            let same = |row: &&Judged| {
                row.kernel == figure.kernel
                    && row.topology == figure.topology
                    && Some(row.system) == figure.base
                    && Some(row.size) == figure.size
            };
            let row = judged.iter().find(same).cloned();
            (figure, row)
        })
        .collect();
    bars.sort_by(|(a, _), (b, _)| {
        (&a.kernel, &a.topology, a.size, a.base).cmp(&(&b.kernel, &b.topology, b.size, b.base))
    });
    Ok(bars)
}

fn predict(source: &Source, checks: Checks) -> Result<Bars, ExperimentError> {
    let published = published(&source.data)?;
    let fit_rows = source.data.fit_rows()?;
    let bar = progress::bar(published.len() as u64, "figures");
    let predict = |(figure, judged): &(Figure, Option<Judged>)| {
        let predicted = predict_bar(source, checks, figure, judged.as_ref(), &fit_rows);
        bar.inc(1);
        predicted
    };
    // Collected in order, so that what is reported does not depend on the threads.
    let predicted: Vec<Result<Bar, ExperimentError>> = published.par_iter().map(predict).collect();
    bar.finish_and_clear();
    let (mut bars, mut failures) = (Vec::new(), Vec::new());
    for predicted in predicted {
        match predicted {
            Ok(bar) => bars.push(bar),
            // A run that gets stuck says something of one bar only; anything else is wrong with the data.
            Err(error) if error.exit_code() == 3 => failures.push(error.to_string().replace('\n', "")),
            Err(error) => return Err(error),
        }
    }
    Ok((bars, failures))
}

/// The case that a published row stands for, with the published split.
///
/// # Errors
/// [`ExperimentError`] for a row that no case stands for.
pub(crate) fn case_of(
    source: &Source,
    checks: Checks,
    figure: &Figure,
    protocol: ProtocolArg,
) -> Result<(Case, RoleSplit), ExperimentError> {
    let missing = |what: &str| ExperimentError::Finding(format!("{} {}: {what}", figure.kernel, figure.topology));
    let machine = figure.machine().ok_or_else(|| missing("no machine"))?;
    let system = figure.base.ok_or_else(|| missing("no system"))?;
    let size = figure.size.ok_or_else(|| missing("no size"))?;
    let kernel = plan::kernel(&figure.kernel).map_err(|refusal| missing(&refusal.problem))?;
    let sides = figure.topology.split('-').next().unwrap_or_default();
    let ranks: u64 = sides.split('x').filter_map(|side| side.parse::<u64>().ok()).product();
    let problem = shape::published_problem(kernel.name(), kernel.problem_kind(), size, ranks)
        .ok_or_else(|| missing("no published shape"))?;
    let draft = Draft {
        kernel: figure.kernel.clone(),
        cluster: format!("{sides}-{machine}"),
        shape: shape::values(&problem),
        set: OptionSet::Published,
        overrides: Vec::new(),
        split: Some("published".into()),
        protocol: Some(protocol),
        fusion: if system.is_baseline() { Fusion::Unfused } else { Fusion::Fused },
        seed: 0,
        noise: false,
        execution: None,
        clock: None,
        checks,
        measured: false,
    };
    let case = draft.resolve(source).map_err(plan::flagged)?;
    let SplitChoice::Fixed(split) = case.split else { return Err(missing("no split")) };
    Ok((case, split))
}

fn predict_bar(
    source: &Source,
    checks: Checks,
    figure: &Figure,
    judged: Option<&Judged>,
    fit_rows: &[FitRow],
) -> Result<Bar, ExperimentError> {
    let missing = |what: &str| ExperimentError::Finding(format!("{} {}: {what}", figure.kernel, figure.topology));
    let machine = figure.machine().ok_or_else(|| missing("no machine"))?;
    let system = figure.base.ok_or_else(|| missing("no system"))?;
    let size = figure.size.ok_or_else(|| missing("no size"))?;
    let published = figure.value.ok_or_else(|| missing("no value"))?;
    let answer = |protocol: ProtocolArg| {
        let (case, split) = case_of(source, checks, figure, protocol)?;
        Prepared::new(&case)?.predict(&case, &split)
    };
    let predicted = answer(ProtocolArg::Published)?;
    Ok(Bar {
        kernel: figure.kernel.clone(),
        topology: figure.topology.clone(),
        machine,
        system,
        size,
        published,
        band: judged.map_or((published, published), |row| row.band_tflops),
        judged: judged.is_some(),
        fitted: fit_rows.iter().any(|row| row.is(&figure.kernel, &figure.topology, system, size)),
        fair: answer(ProtocolArg::Fair)?,
        predicted,
    })
}

/// |ln(predicted / published)|.
fn log_error(bar: &Bar) -> f64 {
    (bar.predicted.prediction.tflops_per_gpu / bar.published).ln().abs()
}

fn errors(bars: &[Bar]) -> Vec<GroupError> {
    let mut groups: BTreeMap<(&str, &str, System), Vec<&Bar>> = BTreeMap::new();
    for bar in bars.iter().filter(|bar| bar.judged) {
        groups.entry((&bar.kernel, &bar.topology, bar.system)).or_default().push(bar);
    }
    groups
        .into_iter()
        .filter_map(|((kernel, topology, system), bars)| {
            let worst = bars.iter().max_by(|a, b| log_error(a).total_cmp(&log_error(b)))?;
            let mean = |bars: &[&Bar]| bars.iter().map(|bar| log_error(bar)).sum::<f64>() / bars.len().max(1) as f64;
            let tests: Vec<&Bar> = bars.iter().copied().filter(|bar| !bar.fitted).collect();
            Some(GroupError {
                kernel: kernel.to_owned(),
                topology: topology.to_owned(),
                system: system.name(),
                rows: bars.len(),
                error: mean(&bars).exp_m1(),
                test_rows: tests.len(),
                test_error: mean(&tests).exp_m1(),
                worst_size: worst.size,
                worst_published_tflops_per_gpu: worst.published,
                worst_predicted_tflops_per_gpu: worst.predicted.prediction.tflops_per_gpu,
                worst_error: log_error(worst).exp_m1(),
            })
        })
        .collect()
}

fn decisions(bars: &[Bar]) -> Vec<Decision> {
    let mut decisions = Vec::new();
    for fused in bars.iter().filter(|bar| !bar.system.is_baseline()) {
        let same = |bar: &&Bar| {
            bar.system.is_baseline()
                && (&bar.kernel, &bar.topology, bar.size) == (&fused.kernel, &fused.topology, fused.size)
        };
        let Some(unfused) = bars.iter().find(same) else { continue };
        let tflops = |answer: &Answer| answer.prediction.tflops_per_gpu;
        let published = fused.published / unfused.published;
        let predicted = tflops(&fused.predicted) / tflops(&unfused.predicted);
        decisions.push(Decision {
            kernel: fused.kernel.clone(),
            topology: fused.topology.clone(),
            size: fused.size,
            published_fused_over_unfused: published,
            predicted_fused_over_unfused: predicted,
            fair_fused_over_unfused: tflops(&fused.fair) / tflops(&unfused.fair),
            decisive: fused.judged && unfused.judged && published.ln().abs() > DECISIVE.ln_1p(),
            right: (published > 1.0) == (predicted > 1.0),
        });
    }
    decisions
}

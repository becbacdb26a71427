//! `sweep`: every point of an experiment, as CSV and plots.

use crate::cli::SweepArgs;
use crate::engine::{Answer, Prepared};
use crate::error::ExperimentError;
use crate::experiment::{Expect, Experiment, Group, Of, has};
use crate::in_order::in_order;
use crate::plan::{Fusion, OF_PHASES, Source, SplitChoice};
use crate::plot;
use crate::provenance::{ExperimentText, Output, wrote};
use crate::row::{self, Outcome};
use crate::table::Table;
use crate::{progress, sweep_plots};
use rayon::prelude::*;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tilewire_kernels::RoleSplit;
use tilewire_sim::{OverlapReason, SimError};

/// Rows of the table of best splits at most.
const SHOWN: usize = 24;

/// A finished point.
pub struct Row {
    /// Index of its group.
    pub group: usize,
    /// What became of it.
    pub outcome: Outcome,
}

/// What a sweep did.
pub struct Summary {
    /// Rows in order.
    pub rows: Vec<Row>,
    /// Points that were asked for.
    pub points: usize,
    /// Files that were written.
    pub files: Vec<PathBuf>,
    /// Claims that do not hold.
    pub broken: Vec<String>,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &SweepArgs) -> Result<String, ExperimentError> {
    crate::threads(args.threads)?;
    let source = Source::new(args.data.data.as_deref(), args.data.machine.as_deref())?;
    let experiment = Experiment::read(&args.file, &source)?.checked(args.checks.checks())?;
    if experiment.study.is_some() {
        let file = args.file.display().to_string();
        return Err(ExperimentError::refused(file, "has [[hypothesis]]; run it with `tilewire scale`"));
    }
    let root = args.output.clone().unwrap_or_else(|| Path::new("out").join(&experiment.name));
    let summary = execute(&experiment, &source, &root)?;
    let text = if args.json { json_text(&experiment, &summary) } else { text(&experiment, &summary) };
    verdict(&summary).map_or_else(
        || Ok(text.clone()),
        |finding| {
            crate::print(&text)?;
            Err(finding)
        },
    )
}

/// The error of a sweep that ended but was not all well.
pub fn verdict(summary: &Summary) -> Option<ExperimentError> {
    let failed = summary.rows.iter().filter(|row| matches!(row.outcome, Outcome::Failed(..))).count();
    if summary.rows.len() < summary.points {
        return Some(ExperimentError::Interrupted {
            kept: "their rows and plots are kept; the run is partial, and no claim was checked",
            done: summary.rows.len(),
            points: summary.points,
        });
    }
    if failed > 0 {
        return Some(ExperimentError::Finding(format!("{failed} points failed; see column status")));
    }
    if summary.broken.is_empty() { None } else { Some(ExperimentError::Finding(summary.broken.join("\n"))) }
}

/// Checks all points, then runs them and writes the directory.
///
/// # Errors
/// [`ExperimentError`]; nothing is written when a point is wrong.
pub fn execute(experiment: &Experiment, source: &Source, root: &Path) -> Result<Summary, ExperimentError> {
    let groups = check(experiment)?;
    let mut machines: BTreeMap<&str, _> = BTreeMap::new();
    for group in &experiment.groups {
        machines.insert(&group.case.target.machine.name, &group.case.target.machine);
    }
    let text = ExperimentText { name: &experiment.name, text: &experiment.text };
    let machines: Vec<_> = machines.into_values().collect();
    let output = Output::create(root, "sweep", Some(experiment.seed), Some(text), source, &machines, &["rows.csv"])?;
    let path = output.path("rows.csv");
    let file = File::create(&path).map_err(|error| ExperimentError::write(&path, error))?;
    let rows = points(experiment, &groups, csv::Writer::from_writer(file))
        .map_err(|error| ExperimentError::write(&path, error))?;
    let mut summary = Summary { rows, points: experiment.points(), files: vec![path], broken: Vec::new() };
    for (name, drawing) in sweep_plots::plots(experiment, &summary.rows) {
        summary.files.extend(match drawing {
            sweep_plots::Plot::Line(line) => plot::save(&line, &output.path(&name))?,
            sweep_plots::Plot::Heat(heat) => plot::save(&heat, &output.path(&name))?,
        });
    }
    let partial = progress::partial(summary.rows.len(), summary.points);
    if partial.is_none() {
        summary.broken =
            experiment.expect.iter().filter_map(|expect| broken(expect, experiment, &summary.rows)).collect();
    }
    output.finish(&summary.files, partial)?;
    Ok(summary)
}

/// A group's simulation while points of it are left.
struct Shared {
    left: usize,
    prepared: Option<Arc<Prepared>>,
}

/// Builds every schedule and checks every split against it. Few are kept, the others built again when their turn comes.
fn check(experiment: &Experiment) -> Result<Vec<Mutex<Shared>>, ExperimentError> {
    const KEPT: usize = 8;
    let keep = experiment.groups.len() <= KEPT;
    let bar = progress::bar(experiment.groups.len() as u64, "checking");
    let check = |group: &Group| {
        let prepared = Prepared::new(&group.case).map_err(|error| error.at(&experiment.shape_place))?;
        for split in &group.splits {
            let checked = match split {
                SplitChoice::Fixed(split) => prepared.check_split(split),
                SplitChoice::Auto if group.case.fusion == Fusion::BulkSynchronous => {
                    Err(ExperimentError::refused(&experiment.split_place, format!("\"auto\", {OF_PHASES}")))
                }
                SplitChoice::Auto => Ok(()),
            };
            checked.map_err(|error| error.at(&experiment.split_place))?;
        }
        bar.inc(1);
        Ok(Mutex::new(Shared { left: group.splits.len(), prepared: keep.then(|| Arc::new(prepared)) }))
    };
    // In order, so that the first mistake of the file is reported whatever the number of threads.
    let checked: Vec<Result<_, ExperimentError>> = experiment.groups.par_iter().map(check).collect();
    bar.finish_and_clear();
    checked.into_iter().collect()
}

fn points(
    experiment: &Experiment,
    shared: &[Mutex<Shared>],
    mut writer: csv::Writer<File>,
) -> Result<Vec<Row>, csv::Error> {
    let points: Vec<(usize, SplitChoice)> = experiment
        .groups
        .iter()
        .enumerate()
        .flat_map(|(g, group)| group.splits.iter().map(move |&split| (g, split)))
        .collect();
    writer.write_record(row::columns())?;
    let mut rows = Vec::with_capacity(points.len());
    let run =
        |&(g, split): &(usize, SplitChoice)| Row { group: g, outcome: point(&experiment.groups[g], split, &shared[g]) };
    in_order(&points, run, |row| {
        writer.write_record(row::fields(&experiment.groups[row.group].case, &row.outcome))?;
        writer.flush()?;
        rows.push(row);
        Ok::<(), csv::Error>(())
    })?;
    Ok(rows)
}

fn point(group: &Group, split: SplitChoice, shared: &Mutex<Shared>) -> Outcome {
    let mut fixed = match split {
        SplitChoice::Fixed(split) => split,
        SplitChoice::Auto => RoleSplit::default(),
    };
    let prepared = {
        let mut shared = shared.lock().expect("no point panics while it holds the lock");
        shared.left -= 1;
        let prepared = match shared.prepared.take() {
            Some(prepared) => Ok(prepared),
            None => Prepared::new(&group.case).map(Arc::new),
        };
        if let (Ok(prepared), true) = (&prepared, shared.left > 0) {
            shared.prepared = Some(Arc::clone(prepared));
        }
        prepared
    };
    let answer = prepared.and_then(|prepared| {
        if split == SplitChoice::Auto {
            fixed = prepared.split(&group.case)?;
        }
        prepared.predict(&group.case, &fixed)
    });
    match answer {
        Ok(answer) => Outcome::Done(Box::new(answer)),
        Err(ExperimentError::Sim { source: SimError::Stuck { at_us, blocked }, .. }) => {
            Outcome::Failed(fixed, format!("stuck at {at_us:.3} us with {} CTAs waiting", blocked.len()))
        }
        Err(error) => Outcome::Failed(fixed, error.to_string()),
    }
}

/// Why a claim does not hold.
fn broken(expect: &Expect, experiment: &Experiment, rows: &[Row]) -> Option<String> {
    let columns = row::columns();
    let place = |name: &str| columns.iter().position(|column| column == name).expect("columns are checked on reading");
    let fields: Vec<(f64, Vec<String>)> = rows
        .iter()
        .filter_map(|row| match &row.outcome {
            Outcome::Done(answer) => {
                Some((answer.prediction.time_us, row::fields(&experiment.groups[row.group].case, &row.outcome)))
            }
            Outcome::Failed(..) => None,
        })
        .filter(|(_, fields)| expect.filter.iter().all(|(name, value)| has(name, &fields[place(name)], value)))
        .collect();
    let judged: Vec<&(f64, Vec<String>)> = match expect.of {
        Of::Best => fields.iter().min_by(|a, b| a.0.total_cmp(&b.0)).into_iter().collect(),
        Of::Worst => fields.iter().max_by(|a, b| a.0.total_cmp(&b.0)).into_iter().collect(),
        Of::Every => fields.iter().collect(),
    };
    let allowed = match (expect.at_least, expect.at_most) {
        (Some(low), Some(high)) => format!("{low} to {high}"),
        (Some(low), None) => format!("{low} or more"),
        (None, Some(high)) => format!("{high} or less"),
        (None, None) => return None,
    };
    let complaint = |what: String| Some(format!("claim \"{}\" does not hold: {what}, claimed {allowed}", expect.claim));
    if judged.is_empty() {
        return complaint("no row matches".into());
    }
    for (_, fields) in judged {
        let text = &fields[place(&expect.column)];
        let value: f64 = text.parse().unwrap_or(f64::NAN);
        let holds = expect.at_least.is_none_or(|low| value >= low) && expect.at_most.is_none_or(|high| value <= high);
        if !holds {
            return complaint(format!("{} = {}", expect.column, if text.is_empty() { "nothing" } else { text }));
        }
    }
    None
}

/// The best row of every group.
fn best<'a>(rows: &'a [Row], groups: usize) -> Vec<Option<&'a Answer>> {
    let mut best: Vec<Option<&'a Answer>> = vec![None; groups];
    for row in rows {
        if let Outcome::Done(answer) = &row.outcome
            && best[row.group].is_none_or(|b| answer.prediction.time_us < b.prediction.time_us)
        {
            best[row.group] = Some(answer);
        }
    }
    best
}

/// Columns of the summary that stay when they say the same in every row: what was asked, and the answer.
const KEPT: [&str; 7] = ["kernel", "cluster", "best split", "time_us", "tflops_per_gpu", "overlap", "bound_by"];

/// The summary for a person.
pub fn text(experiment: &Experiment, summary: &Summary) -> String {
    let cases = || experiment.groups.iter().map(|group| &group.case);
    let shapes: BTreeSet<_> = cases().map(|case| (case.name, case.problem.to_string())).collect();
    let sizes: BTreeSet<_> = cases().map(|case| (case.name, case.problem.size())).collect();
    // The size tells shapes apart where one of its fields follows from it.
    let by_size = shapes.len() == sizes.len();
    let mut table = Table::new([
        "kernel",
        "form",
        "cluster",
        if by_size { "size" } else { "shape" },
        "options",
        "set",
        "protocol",
        "best split",
        "time_us",
        "tflops_per_gpu",
        "overlap",
        "bound_by",
    ]);
    let best = best(&summary.rows, experiment.groups.len());
    for (group, answer) in experiment.groups.iter().zip(&best).take(SHOWN) {
        let (Some(answer), case) = (answer, &group.case) else { continue };
        let bound: String = answer.prediction.bound_by.clone().into();
        table.row([
            case.name.to_owned(),
            case.fusion.name().to_owned(),
            case.target.to_string(),
            if by_size { case.problem.size().to_string() } else { case.problem.to_string() },
            case.set.name().to_owned(),
            experiment.set_behind(" ", case).trim_start().to_owned(),
            answer.protocol.to_owned(),
            if case.is_unfused() { "-".into() } else { answer.split.to_string() },
            format!("{:.2}", answer.prediction.time_us),
            format!("{:.1}", answer.prediction.tflops_per_gpu),
            format!("{:.3}", answer.prediction.overlap),
            bound,
        ]);
    }
    let mut text = format!("{}\n\n{}", experiment.question, table.without_constants(&KEPT).render(2));
    if best.len() > SHOWN {
        let _ = writeln!(text, "  and {} more in rows.csv", best.len() - SHOWN);
    }
    if experiment.too_large > 0 {
        let _ = writeln!(text, "\n{} points of the grid left out: more CTAs than SMs", experiment.too_large);
    }
    let _ = writeln!(text, "\n{} of {} points", summary.rows.len(), summary.points);
    text += &overlap_reasons(&summary.rows);
    text += &notes(experiment);
    let split_many_ways = experiment.groups.iter().skip(sweep_plots::MAX_GROUPS).filter(|group| group.splits.len() > 1);
    let left = split_many_ways.count();
    if left > 0 {
        let _ = writeln!(text, "no plots of the splits of {left} more schedules; choose fewer to see them");
    }
    let done = summary.rows.iter().filter(|row| matches!(row.outcome, Outcome::Done(_))).count();
    let drawn = summary.files.iter().any(|file| file.file_stem().is_some_and(|name| name == sweep_plots::BY_SIZE));
    if sweep_plots::several_sizes(experiment) && !drawn && done == summary.points {
        let _ = writeln!(text, "no plot over sizes, which has {} lines at most; choose fewer", sweep_plots::MAX_LINES);
    }
    text + &wrote(&summary.files)
}

/// Why `overlap` lies outside 0 to 1, and in how many rows.
fn overlap_reasons(rows: &[Row]) -> String {
    let mut counts: BTreeMap<OverlapReason, usize> = BTreeMap::new();
    for row in rows {
        if let Outcome::Done(answer) = &row.outcome
            && let Some(reason) = answer.prediction.overlap_reason
        {
            *counts.entry(reason).or_default() += 1;
        }
    }
    counts.into_iter().fold(String::new(), |mut text, (reason, count)| {
        let _ = writeln!(text, "{count} rows with overlap_reason = {}: {reason}", reason.name());
        text
    })
}

/// What to know of defaults that shapes forced, and for how many schedules.
pub fn notes(experiment: &Experiment) -> String {
    let mut cases: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Group { case, .. } in &experiment.groups {
        for note in case.notes() {
            cases.entry(note).or_default().push(case.to_string());
        }
    }
    cases.into_iter().fold(String::new(), |mut text, (note, cases)| {
        let more = if cases.len() > 1 { format!(" and {} more", cases.len() - 1) } else { String::new() };
        let _ = writeln!(text, "note for {}{more}: {note}", cases[0]);
        text
    })
}

fn json_text(experiment: &Experiment, summary: &Summary) -> String {
    let best: Vec<_> = best(&summary.rows, experiment.groups.len()).into_iter().flatten().collect();
    json!({
        "experiment": experiment.name,
        "question": experiment.question,
        "points": summary.points,
        "rows": summary.rows.len(),
        "left_out": experiment.too_large,
        "broken_claims": summary.broken,
        "files": summary.files,
        "best": best,
    })
    .to_string()
        + "\n"
}

//! `compare`: prediction beside measurement.
//!
//! Every measured row's case is simulated, and joined only where schedule hash, machine, mode and protocol agree; rows
//! that were not measured alike are refused.

use crate::cli::CompareArgs;
use crate::compare_plots;
use crate::engine::{Answer, Prepared};
use crate::error::ExperimentError;
use crate::measure_row::{self as row, MeasuredRow};
use crate::plan::{Case, Source, flagged};
use crate::plot;
use crate::progress;
use crate::provenance::Output;
use crate::table::Table;
use rayon::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use tilewire_sim::OverlapReason;

/// Rows of the table of worst ones.
const WORST: usize = 8;
/// A total that is this good while a phase is not is called out.
const TOTAL_AGREES: f64 = 0.05;
/// See [`TOTAL_AGREES`].
const PHASE_DISAGREES: f64 = 0.10;

/// The times that both sides have.
pub const PHASES: [&str; 3] = ["time_us", "compute_only_us", "comm_only_us"];

/// A measured row and its prediction.
pub struct Pair {
    /// Measured.
    pub row: MeasuredRow,
    /// Predicted.
    pub answer: Answer,
    /// Measured and predicted [`PHASES`].
    pub phases: [(f64, f64); 3],
}

/// Pairs of one schedule.
pub struct Joined {
    /// Case, without its split.
    pub case: Case,
    /// Clock.
    pub clock: String,
    /// Its rows, in the order of the file.
    pub pairs: Vec<Pair>,
}

/// How far apart two times are: 0.05 is 5 %, whichever is larger.
pub fn error((measured, predicted): (f64, f64)) -> f64 {
    (predicted / measured).ln().abs().exp() - 1.0
}

/// The value below which a share of the values lies; not a number without values.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(place).copied().unwrap_or(f64::NAN)
}

impl Joined {
    /// The pair whose measured (0) or predicted (1) time is least.
    fn best(&self, side: usize) -> &Pair {
        let time = |pair: &&Pair| if side == 0 { pair.phases[0].0 } else { pair.phases[0].1 };
        self.pairs.iter().min_by(|a, b| time(a).total_cmp(&time(b))).expect("a joined schedule has rows")
    }

    /// What the recommended split costs beyond the best measured one.
    pub fn split_cost(&self) -> f64 {
        self.best(1).phases[0].0 / self.best(0).phases[0].0 - 1.0
    }

    /// Bulk-synchronous over fused, measured and predicted: the best compute phase, then the best communication phase.
    pub fn fused_gain(&self) -> (f64, f64) {
        let least = |of: fn(&Pair) -> f64| self.pairs.iter().map(of).fold(f64::NAN, f64::min);
        let measured = least(|p| p.phases[1].0) + least(|p| p.phases[2].0);
        let predicted = least(|p| p.phases[1].1) + least(|p| p.phases[2].1);
        (measured / self.best(0).phases[0].0 - 1.0, predicted / self.best(1).phases[0].1 - 1.0)
    }

    fn errors(&self, phase: usize) -> Vec<f64> {
        // Phases are not measured with a GPU per rank.
        self.pairs.iter().map(|pair| pair.phases[phase]).filter(|times| times.0.is_finite()).map(error).collect()
    }
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`]; [`ExperimentError::Finding`] when a bound that was asked for does not hold.
pub fn run(args: &CompareArgs) -> Result<String, ExperimentError> {
    crate::threads(args.threads)?;
    let source = Source::new(args.data.data.as_deref(), args.data.machine.as_deref())?;
    let (rows, left_out) = rows(&args.files)?;
    let joined = join(rows, &source)?;
    let machines: BTreeMap<&str, _> =
        joined.iter().map(|j| (j.case.target.machine.name.as_str(), &j.case.target.machine)).collect();
    let machines: Vec<_> = machines.into_values().collect();
    let output = Output::create(&args.output, "compare", None, None, &source, &machines)?;
    let mut files = vec![output.path("pairs.csv"), output.path("shapes.csv")];
    write_csv(&files[0], &pairs_csv(&joined))?;
    write_csv(&files[1], &shapes_csv(&joined))?;
    for (name, drawing) in compare_plots::plots(&joined) {
        files.extend(match drawing {
            compare_plots::Plot::Line(line) => plot::save(&line, &output.path(&name))?,
            compare_plots::Plot::Scatter(scatter) => plot::save(&scatter, &output.path(&name))?,
        });
    }
    let summary = Summary::new(&joined);
    let mut text = if args.json { json_text(&joined, &summary, left_out) } else { text(&joined, &summary, left_out) };
    if !args.json {
        for file in files.iter().filter(|file| file.extension().is_none_or(|e| e != "svg")) {
            let _ = writeln!(text, "wrote {}", file.display());
        }
    }
    let bounds = [
        ("median error", summary.median, args.max_median),
        ("95th percentile of the error", summary.p95, args.max_p95),
        ("cost of the recommended split, median over shapes", summary.split_cost, args.max_split_cost),
    ];
    let broken: Vec<String> = bounds
        .iter()
        .filter_map(|&(what, is, max)| max.filter(|&max| is * 100.0 > max).map(|max| (what, is, max)))
        .map(|(what, is, max)| format!("{what} is {:.2} %, asked for {max} % at most", is * 100.0))
        .collect();
    if broken.is_empty() {
        return Ok(text);
    }
    crate::print(&text)?;
    Err(ExperimentError::Finding(broken.join("\n")))
}

/// Reads the rows; those without a time or with wrong outputs are counted and left out.
fn rows<F: AsRef<Path>>(files: &[F]) -> Result<(Vec<MeasuredRow>, usize), ExperimentError> {
    let mut rows: Vec<MeasuredRow> = Vec::new();
    let mut left_out = 0;
    let mut first: Option<(String, Vec<(&str, String)>)> = None;
    let mut places: BTreeMap<[String; 3], String> = BTreeMap::new();
    for file in files.iter().map(AsRef::as_ref) {
        for row in row::read(file)? {
            let place = row.place.clone();
            let point = ["schedule_hash", "machine", "clock"].map(|name| row.text(name).to_owned());
            if let Some(before) = places.insert(point, place.clone()) {
                let problem = format!("the point of {before} again; a point counts once, take one of the rows away");
                return Err(ExperimentError::refused(place, problem));
            }
            let provenance = row.provenance();
            let (from, known) = first.get_or_insert_with(|| (place.clone(), provenance.clone()));
            if let Some(((name, a), (_, b))) = known.iter().zip(&provenance).find(|(a, b)| a != b) {
                let problem = format!("{name} \"{b}\", but \"{a}\" at {from}; compare rows that were measured alike");
                return Err(ExperimentError::refused(place, problem));
            }
            if row.is_ok() && row.number(PHASES[0]).is_some_and(|time| time > 0.0) {
                rows.push(row);
            } else {
                left_out += 1;
            }
        }
    }
    if rows.is_empty() {
        let names: Vec<String> = files.iter().map(|file| file.as_ref().display().to_string()).collect();
        return Err(ExperimentError::refused(names.join(", "), "no row with times and right outputs"));
    }
    Ok((rows, left_out))
}

/// Simulates the case of every row.
///
/// # Errors
/// [`ExperimentError`] for a row that names no case, or a schedule that is no longer built like that.
pub fn join(rows: Vec<MeasuredRow>, source: &Source) -> Result<Vec<Joined>, ExperimentError> {
    let mut groups: Vec<(String, Vec<MeasuredRow>)> = Vec::new();
    for row in rows {
        let draft = row.draft().map_err(|problem| ExperimentError::refused(row.place.clone(), problem))?;
        let key = format!("{:?}", crate::plan::Draft { split: None, ..draft });
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(row),
            None => groups.push((key, vec![row])),
        }
    }
    let bar = progress::bar(groups.len() as u64, "simulating");
    let join = |(_, rows): (String, Vec<MeasuredRow>)| {
        let refuse = |row: &MeasuredRow, problem| ExperimentError::refused(row.place.clone(), problem);
        let draft = rows[0].draft().map_err(|problem| refuse(&rows[0], problem))?;
        let case = draft.resolve(source).map_err(flagged)?;
        let prepared = Prepared::new(&case)?;
        let pairs = rows
            .into_par_iter()
            .map(|row| {
                let split = row.split().map_err(|problem| refuse(&row, problem))?;
                let answer = prepared.predict(&case, &split)?;
                let measured = [("schedule_hash", &answer.schedule_hash[..]), ("mode", answer.mode)];
                for (name, value) in measured {
                    if row.text(name) != value {
                        let problem = format!(
                            "{name} {} was measured, {value} is what this version builds; measure again",
                            row.text(name)
                        );
                        return Err(refuse(&row, problem));
                    }
                }
                let p = &answer.prediction;
                let predicted = [p.time_us, p.compute_only_us, p.comm_only_us];
                let phases = std::array::from_fn(|i| (row.number(PHASES[i]).unwrap_or(f64::NAN), predicted[i]));
                Ok(Pair { row, answer, phases })
            })
            .collect::<Result<Vec<_>, ExperimentError>>()?;
        bar.inc(1);
        let clock = pairs[0].answer.clock.to_owned();
        Ok(Joined { case, clock, pairs })
    };
    let joined: Vec<Result<Joined, ExperimentError>> = groups.into_par_iter().map(join).collect();
    bar.finish_and_clear();
    joined.into_iter().collect()
}

/// Errors over all rows.
struct Summary {
    median: f64,
    p95: f64,
    split_cost: f64,
}

impl Summary {
    fn new<'a>(joined: impl IntoIterator<Item = &'a Joined> + Clone) -> Self {
        let errors: Vec<f64> = joined.clone().into_iter().flat_map(|j| j.errors(0)).collect();
        let costs: Vec<f64> = joined.into_iter().filter(|j| j.pairs.len() > 1).map(Joined::split_cost).collect();
        Self { median: quantile(&errors, 0.5), p95: quantile(&errors, 0.95), split_cost: quantile(&costs, 0.5) }
    }
}

fn write_csv(file: &Path, rows: &[Vec<String>]) -> Result<(), ExperimentError> {
    let write = |error: csv::Error| ExperimentError::write(file, error);
    let mut writer = csv::Writer::from_path(file).map_err(write)?;
    rows.iter().try_for_each(|row| writer.write_record(row)).map_err(write)?;
    writer.flush().map_err(|error| ExperimentError::write(file, error))
}

fn pairs_csv(joined: &[Joined]) -> Vec<Vec<String>> {
    let mut head = row::columns();
    for phase in PHASES {
        head.extend([format!("predicted_{phase}"), format!("predicted_over_measured_{phase}")]);
    }
    head.extend(["predicted_overlap", "predicted_overlap_reason", "predicted_bound_by"].map(str::to_owned));
    let mut rows = vec![head];
    for pair in joined.iter().flat_map(|j| &j.pairs) {
        let mut fields: Vec<String> = row::columns().iter().map(|name| pair.row.text(name).to_owned()).collect();
        for (measured, predicted) in pair.phases {
            let ratio = if measured.is_finite() { format!("{:.4}", predicted / measured) } else { String::new() };
            fields.extend([format!("{predicted:.3}"), ratio]);
        }
        let bound: String = pair.answer.prediction.bound_by.clone().into();
        let reason = pair.answer.prediction.overlap_reason.map_or("", OverlapReason::name).to_owned();
        fields.extend([format!("{:.3}", pair.answer.prediction.overlap), reason, bound]);
        rows.push(fields);
    }
    rows
}

fn shapes_csv(joined: &[Joined]) -> Vec<Vec<String>> {
    let head = [
        "kernel",
        "cluster",
        "shape",
        "clock",
        "rows",
        "median_error",
        "p95_error",
        "worst_error",
        "compute_only_median_error",
        "comm_only_median_error",
        "best_split",
        "best_time_us",
        "recommended_split",
        "recommended_measured_us",
        "split_cost",
        "measured_fused_gain",
        "predicted_fused_gain",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for j in joined {
        let split = |pair: &Pair| pair.answer.split.to_string().replace(',', ";");
        let whole = j.errors(0);
        let (measured, predicted) = j.fused_gain();
        rows.push(vec![
            j.case.name.to_owned(),
            j.case.target.to_string(),
            j.case.problem.to_string().replace(',', ";"),
            j.clock.clone(),
            j.pairs.len().to_string(),
            format!("{:.4}", quantile(&whole, 0.5)),
            format!("{:.4}", quantile(&whole, 0.95)),
            format!("{:.4}", quantile(&whole, 1.0)),
            format!("{:.4}", quantile(&j.errors(1), 0.5)),
            format!("{:.4}", quantile(&j.errors(2), 0.5)),
            split(j.best(0)),
            format!("{:.3}", j.best(0).phases[0].0),
            split(j.best(1)),
            format!("{:.3}", j.best(1).phases[0].0),
            format!("{:.4}", j.split_cost()),
            format!("{measured:.4}"),
            format!("{predicted:.4}"),
        ]);
    }
    rows
}

fn percent(value: f64) -> String {
    format!("{:.1}%", value * 100.0)
}

/// A line per kernel, the worst first.
fn by_kernel(joined: &[Joined]) -> Table {
    let mut kernels: BTreeMap<&str, Vec<&Joined>> = BTreeMap::new();
    for j in joined {
        kernels.entry(j.case.name).or_default().push(j);
    }
    let mut lines: Vec<(&str, Vec<&Joined>, Summary)> = kernels
        .into_iter()
        .map(|(kernel, joined)| {
            let summary = Summary::new(joined.iter().copied());
            (kernel, joined, summary)
        })
        .collect();
    lines.sort_by(|a, b| b.2.median.total_cmp(&a.2.median));
    let mut table = Table::new(["kernel", "shapes", "rows", "median", "p95", "split cost"]);
    for (kernel, joined, summary) in lines {
        let rows: usize = joined.iter().map(|j| j.pairs.len()).sum();
        let percents = [summary.median, summary.p95, summary.split_cost].map(percent);
        table.row([kernel.to_owned(), joined.len().to_string(), rows.to_string()].into_iter().chain(percents));
    }
    table
}

fn text(joined: &[Joined], summary: &Summary, left_out: usize) -> String {
    let mut out = String::new();
    let rows: usize = joined.iter().map(|j| j.pairs.len()).sum();
    let first = &joined[0].pairs[0].row;
    let _ = writeln!(
        out,
        "{rows} rows of {} schedules, measured on {} ({}, revision {}), {}\n",
        joined.len(),
        first.text("gpu"),
        first.text("date"),
        first.text("revision"),
        first.text("transport")
    );
    let mut table = Table::new([
        "kernel",
        "cluster",
        "shape",
        "clock",
        "rows",
        "median",
        "p95",
        "worst",
        "compute only",
        "comm only",
        "split cost",
        "fused gain measured",
        "predicted",
    ]);
    let mut worst_first: Vec<&Joined> = joined.iter().collect();
    worst_first.sort_by(|a, b| quantile(&b.errors(0), 0.5).total_cmp(&quantile(&a.errors(0), 0.5)));
    for j in &worst_first {
        let whole = j.errors(0);
        let (measured, predicted) = j.fused_gain();
        table.row([
            j.case.name.to_owned(),
            j.case.target.to_string(),
            j.case.problem.to_string(),
            j.clock.clone(),
            j.pairs.len().to_string(),
            percent(quantile(&whole, 0.5)),
            percent(quantile(&whole, 0.95)),
            percent(quantile(&whole, 1.0)),
            percent(quantile(&j.errors(1), 0.5)),
            percent(quantile(&j.errors(2), 0.5)),
            percent(j.split_cost()),
            percent(measured),
            percent(predicted),
        ]);
    }
    out += &table.without_constants(&["kernel", "cluster", "shape"]).render(2);

    let mut worst: Vec<&Pair> = joined.iter().flat_map(|j| &j.pairs).collect();
    worst.sort_by(|a, b| error(b.phases[0]).total_cmp(&error(a.phases[0])));
    let mut table = Table::new(["worst rows", "shape", "split", "measured_us", "predicted_us", "off", "bound_by"]);
    for pair in worst.iter().take(WORST) {
        let (measured, predicted) = pair.phases[0];
        let bound: String = pair.answer.prediction.bound_by.clone().into();
        let shape: Vec<String> = pair.answer.shape.iter().map(|(name, value)| format!("{name}={value}")).collect();
        table.row([
            format!("{} {}", pair.answer.kernel, pair.answer.cluster),
            shape.join(","),
            pair.answer.split.to_string(),
            format!("{measured:.1}"),
            format!("{predicted:.1}"),
            format!("{:+.1}%", (predicted / measured - 1.0) * 100.0),
            bound,
        ]);
    }
    let _ = write!(out, "\n{}", table.render(2));

    let _ = write!(out, "\n{}", by_kernel(joined).render(2));

    let deceiving = joined.iter().flat_map(|j| &j.pairs).filter(|pair| deceives(pair)).count();
    let _ = writeln!(
        out,
        "\nerror {} median, {} at the 95th percentile; the recommended split costs {} (median over shapes)",
        percent(summary.median),
        percent(summary.p95),
        percent(summary.split_cost)
    );
    let _ = writeln!(
        out,
        "{deceiving} rows agree in total (within {}) while a phase that matters is off by more than {}",
        percent(TOTAL_AGREES),
        percent(PHASE_DISAGREES)
    );
    if left_out > 0 {
        let _ = writeln!(out, "{left_out} rows left out: not measured, or with wrong outputs");
    }
    out
}

/// The total agrees, but a phase that takes a fifth of it or more does not.
fn deceives(pair: &Pair) -> bool {
    let matters = |phase: (f64, f64)| phase.0.max(phase.1) > 0.2 * pair.phases[0].0;
    error(pair.phases[0]) <= TOTAL_AGREES
        && pair.phases[1..].iter().any(|&phase| matters(phase) && error(phase) > PHASE_DISAGREES)
}

fn json_text(joined: &[Joined], summary: &Summary, left_out: usize) -> String {
    let shapes: Vec<_> = joined
        .iter()
        .map(|j| {
            let (measured, predicted) = j.fused_gain();
            json!({
                "case": j.case.to_string(),
                "clock": j.clock,
                "rows": j.pairs.len(),
                "median_error": quantile(&j.errors(0), 0.5),
                "p95_error": quantile(&j.errors(0), 0.95),
                "split_cost": j.split_cost(),
                "measured_fused_gain": measured,
                "predicted_fused_gain": predicted,
            })
        })
        .collect();
    json!({
        "rows": joined.iter().map(|j| j.pairs.len()).sum::<usize>(),
        "left_out": left_out,
        "median_error": summary.median,
        "p95_error": summary.p95,
        "split_cost": summary.split_cost,
        "shapes": shapes,
    })
    .to_string()
        + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_the_same_either_way() {
        assert!((error((100.0, 110.0)) - 0.10).abs() < 1e-12);
        assert!((error((110.0, 100.0)) - 0.10).abs() < 1e-12);
    }

    #[test]
    fn quantiles_are_values_that_occur() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!((quantile(&values, 0.5), quantile(&values, 0.95), quantile(&values, 1.0)), (3.0, 5.0, 5.0));
        assert!(quantile(&[], 0.5).is_nan());
    }
}

//! `compare`: prediction beside measurement.
//!
//! Every measured row's case is simulated, and joined only where schedule hash, machine, mode and protocol agree; rows
//! that were not measured alike are refused.

use crate::cli::CompareArgs;
use crate::compare_plots::{self, Plot};
use crate::compare_tables::{self, Shown};
use crate::compare_waits;
use crate::engine::{Answer, Prepared};
use crate::error::ExperimentError;
use crate::measure_row::{self as row, MeasuredRow};
use crate::plan::{Case, Source, in_row};
use crate::plot;
use crate::progress;
use crate::provenance::{Output, wrote};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

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
    pub fn best(&self, side: usize) -> &Pair {
        let time = |pair: &&Pair| if side == 0 { pair.phases[0].0 } else { pair.phases[0].1 };
        self.pairs.iter().min_by(|a, b| time(a).total_cmp(&time(b))).expect("a joined schedule has rows")
    }

    /// What the recommended split costs beyond the best measured one.
    pub fn split_cost(&self) -> f64 {
        self.best(1).phases[0].0 / self.best(0).phases[0].0 - 1.0
    }

    /// Errors of a phase, of the rows that have it.
    pub fn errors(&self, phase: usize) -> Vec<f64> {
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
    let recorded = compare_waits::recorded(&joined, &source)?;
    let machines: BTreeMap<&str, _> =
        joined.iter().map(|j| (j.case.target.machine.name.as_str(), &j.case.target.machine)).collect();
    let machines: Vec<_> = machines.into_values().collect();
    let plots = compare_plots::plots(&joined, &recorded);
    let mut names = vec!["pairs.csv".to_owned(), "shapes.csv".to_owned()];
    names.extend((!recorded.is_empty()).then(|| "waits.csv".to_owned()));
    names.extend(plots.iter().flat_map(|(name, _)| plot::files(name)));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let output = Output::create(&args.output, "compare", None, None, &source, &machines, &names)?;
    let mut files = vec![output.path("pairs.csv"), output.path("shapes.csv")];
    write_csv(&files[0], &compare_tables::pairs_csv(&joined))?;
    write_csv(&files[1], &compare_tables::shapes_csv(&joined))?;
    if !recorded.is_empty() {
        files.push(output.path("waits.csv"));
        write_csv(&files[2], &compare_waits::csv(&recorded))?;
    }
    for (name, drawing) in plots {
        files.extend(match drawing {
            Plot::Line(line) => plot::save(&line, &output.path(&name))?,
            Plot::Scatter(scatter) => plot::save(&scatter, &output.path(&name))?,
            Plot::Bars(bars) => plot::save(&bars, &output.path(&name))?,
        });
    }
    output.finish(&files, None)?;
    let summary = Summary::new(&joined);
    let shown = Shown { joined: &joined, summary: &summary, left_out, recorded: &recorded };
    let mut text = if args.json { compare_tables::json_text(&shown) } else { compare_tables::text(&shown) };
    if !args.json {
        let left = joined.len().saturating_sub(compare_plots::MAX_SHAPES);
        if left > 0 {
            let _ = writeln!(text, "no plots of the splits of {left} more schedules; compare fewer rows to see them");
        }
        text += &wrote(&files);
    }
    let bounds = [
        ("median error", summary.median, args.max_median),
        ("95th percentile of the error", summary.p95, args.max_p95),
        ("cost of the recommended split, median over shapes", summary.split_cost, args.max_split_cost),
    ];
    let broken: Vec<String> = bounds
        .iter()
        .filter_map(|&(what, is, max)| max.map(|max| (what, is, max)))
        .filter(|(_, is, max)| is.is_nan() || is * 100.0 > *max)
        .map(|(what, is, max)| {
            // Costs of splits are told apart by schedules that have several.
            let is = if is.is_nan() { "unknown".into() } else { format!("{:.2} %", is * 100.0) };
            format!("{what} is {is}, asked for {max} % at most")
        })
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
    let mut seen = row::Seen::default();
    for file in files.iter().map(AsRef::as_ref) {
        for row in row::read(file)? {
            let place = row.place.clone();
            seen.note(&row)?;
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
        let case = draft.resolve(source).map_err(|error| in_row(&rows[0].place, error))?;
        let prepared = Prepared::new(&case).map_err(|error| error.at(&rows[0].place))?;
        let fabric = case.target.machine.fabric.name();
        let pairs = rows
            .into_par_iter()
            .map(|row| {
                let split = row.split().map_err(|problem| refuse(&row, problem))?;
                let answer = prepared.predict(&case, &split).map_err(|error| error.at(&row.place))?;
                let measured =
                    [("schedule_hash", &answer.schedule_hash[..]), ("mode", answer.mode), ("fabric", fabric)];
                for (name, value) in measured {
                    if row.text(name) != value {
                        let problem = format!(
                            "{name} \"{}\" was measured, \"{value}\" is what this version builds; measure again",
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
pub struct Summary {
    /// Of the whole schedule.
    pub median: f64,
    /// Likewise.
    pub p95: f64,
    /// Of the recommended split, median over the schedules that have several; not a number where none has.
    pub split_cost: f64,
}

impl Summary {
    /// Of these schedules.
    pub fn new<'a>(joined: impl IntoIterator<Item = &'a Joined> + Clone) -> Self {
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

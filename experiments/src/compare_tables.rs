//! The tables of a comparison.

use crate::compare::{Joined, PHASES, Pair, Summary, error, quantile};
use crate::compare_waits::{self, Recorded};
use crate::measure_row as row;
use crate::plan::Fusion;
use crate::table::Table;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use tilewire_sim::OverlapReason;

/// Rows of the table of worst ones.
const WORST: usize = 8;
/// A total that is this good while a phase is not is called out.
const TOTAL_AGREES: f64 = 0.05;
/// See [`TOTAL_AGREES`].
const PHASE_DISAGREES: f64 = 0.10;

/// What a comparison found.
#[derive(Clone, Copy)]
pub struct Shown<'a> {
    /// Schedules with their rows.
    pub joined: &'a [Joined],
    /// Errors over all.
    pub summary: &'a Summary,
    /// Rows without times or with wrong outputs.
    pub left_out: usize,
    /// Rows whose timelines lie beside them.
    pub recorded: &'a [Recorded],
}

/// How much longer the best split takes that does compute and communication by turns.
struct Gain {
    measured: f64,
    predicted: f64,
    /// What stands for taking turns.
    over: &'static str,
}

impl Gain {
    /// Of a fused schedule: over its bulk-synchronous form if that was measured too, otherwise over the best compute phase
    /// and the best communication phase, each alone.
    fn of(fused: &Joined, all: &[Joined]) -> Option<Self> {
        if fused.case.fusion != Fusion::Fused {
            return None;
        }
        let point = |j: &Joined| {
            let case = &j.case;
            [
                case.name.to_owned(),
                case.target.to_string(),
                case.problem.to_string(),
                case.options.to_string(),
                j.clock.clone(),
            ]
        };
        let bulk = |j: &&Joined| j.case.fusion == Fusion::BulkSynchronous && point(j) == point(fused);
        let (by_turns, over) = if let Some(bulk) = all.iter().find(bulk) {
            ((bulk.best(0).phases[0].0, bulk.best(1).phases[0].1), "bulk-synchronous launches")
        } else {
            let least = |of: &dyn Fn(&Pair) -> f64| fused.pairs.iter().map(of).fold(f64::NAN, f64::min);
            let sum = |side: fn((f64, f64)) -> f64| least(&|p| side(p.phases[1])) + least(&|p| side(p.phases[2]));
            ((sum(|times| times.0), sum(|times| times.1)), "sum of its phases")
        };
        let measured = by_turns.0 / fused.best(0).phases[0].0 - 1.0;
        let predicted = by_turns.1 / fused.best(1).phases[0].1 - 1.0;
        measured.is_finite().then_some(Self { measured, predicted, over })
    }
}

/// A line per row.
pub fn pairs_csv(joined: &[Joined]) -> Vec<Vec<String>> {
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

/// Columns that name a schedule in the CSV files of `compare`.
pub const NAMED_BY: [&str; 5] = ["kernel", "form", "cluster", "shape", "clock"];

/// What stands in [`NAMED_BY`].
pub fn named(j: &Joined) -> [String; 5] {
    [
        j.case.name.to_owned(),
        j.case.fusion.name().to_owned(),
        j.case.target.to_string(),
        j.case.problem.to_string().replace(',', ";"),
        j.clock.clone(),
    ]
}

/// A line per schedule.
pub fn shapes_csv(joined: &[Joined]) -> Vec<Vec<String>> {
    let head = [
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
        "fused_gain_over",
    ];
    let mut rows = vec![NAMED_BY.into_iter().chain(head).map(str::to_owned).collect()];
    for j in joined {
        let split = |pair: &Pair| pair.answer.split.to_string().replace(',', ";");
        let whole = j.errors(0);
        let gain = Gain::of(j, joined);
        let cells = [
            j.pairs.len().to_string(),
            part(quantile(&whole, 0.5)),
            part(quantile(&whole, 0.95)),
            part(quantile(&whole, 1.0)),
            part(quantile(&j.errors(1), 0.5)),
            part(quantile(&j.errors(2), 0.5)),
            split(j.best(0)),
            format!("{:.3}", j.best(0).phases[0].0),
            split(j.best(1)),
            format!("{:.3}", j.best(1).phases[0].0),
            part(j.split_cost()),
            gain.as_ref().map_or_else(String::new, |gain| part(gain.measured)),
            gain.as_ref().map_or_else(String::new, |gain| part(gain.predicted)),
            gain.map_or("", |gain| gain.over).to_owned(),
        ];
        rows.push(named(j).into_iter().chain(cells).collect());
    }
    rows
}

/// In percent; `-` where there was nothing to take it of.
fn percent(value: f64) -> String {
    if value.is_nan() { "-".into() } else { format!("{:.1}%", value * 100.0) }
}

/// For a CSV; nothing where there was nothing to take it of.
fn part(value: f64) -> String {
    if value.is_nan() { String::new() } else { format!("{value:.4}") }
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

/// What is printed.
pub fn text(shown: &Shown<'_>) -> String {
    let Shown { joined, summary, left_out, recorded } = *shown;
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
        "form",
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
        "over",
    ]);
    let mut worst_first: Vec<&Joined> = joined.iter().collect();
    worst_first.sort_by(|a, b| quantile(&b.errors(0), 0.5).total_cmp(&quantile(&a.errors(0), 0.5)));
    for j in &worst_first {
        let whole = j.errors(0);
        let gain = Gain::of(j, joined);
        table.row([
            j.case.name.to_owned(),
            j.case.fusion.name().to_owned(),
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
            gain.as_ref().map_or_else(|| "-".into(), |gain| percent(gain.measured)),
            gain.as_ref().map_or_else(|| "-".into(), |gain| percent(gain.predicted)),
            gain.map_or("-", |gain| gain.over).to_owned(),
        ]);
    }
    out += &table.without_constants(&["kernel", "cluster", "shape", "over"]).render(2);

    let mut worst: Vec<(&Joined, &Pair)> = joined.iter().flat_map(|j| j.pairs.iter().map(move |p| (j, p))).collect();
    worst.sort_by(|(_, a), (_, b)| error(b.phases[0]).total_cmp(&error(a.phases[0])));
    let head =
        ["worst rows", "form", "shape", "split", "measured_us", "predicted_us", "off", "bound_by", "file and line"];
    let mut table = Table::new(head);
    for (j, pair) in worst.into_iter().take(WORST) {
        let (measured, predicted) = pair.phases[0];
        let bound: String = pair.answer.prediction.bound_by.clone().into();
        let place = pair.row.place.rsplit('/').next().unwrap_or_default();
        table.row([
            format!("{} {}", pair.answer.kernel, pair.answer.cluster),
            pair.answer.form.to_owned(),
            j.case.problem.to_string(),
            pair.answer.split.to_string(),
            format!("{measured:.1}"),
            format!("{predicted:.1}"),
            format!("{:+.1}%", (predicted / measured - 1.0) * 100.0),
            bound,
            place.to_owned(),
        ]);
    }
    let kept = head.map(|name| if name == "form" { "" } else { name });
    let _ = write!(out, "\n{}", table.without_constants(&kept).render(2));

    let _ = write!(out, "\n{}", by_kernel(joined).render(2));
    out += &compare_waits::text(recorded);

    let mut deceiving: Vec<&Pair> = joined.iter().flat_map(|j| &j.pairs).filter(|pair| deceives(pair)).collect();
    deceiving.sort_by(|a, b| worst_phase(b).1.total_cmp(&worst_phase(a).1));
    let cost = if summary.split_cost.is_nan() {
        "no schedule has several splits".into()
    } else {
        format!("the recommended split costs {} (median over shapes)", percent(summary.split_cost))
    };
    let (median, p95) = (percent(summary.median), percent(summary.p95));
    let _ = writeln!(out, "\nerror {median} median, {p95} at the 95th percentile; {cost}");
    let _ = writeln!(
        out,
        "{} rows agree in total (within {}) while a phase that matters is off by more than {}{}",
        deceiving.len(),
        percent(TOTAL_AGREES),
        percent(PHASE_DISAGREES),
        deceiving.first().map_or_else(String::new, |pair| {
            let (phase, off) = worst_phase(pair);
            format!("; the worst: {} by {} in {}", PHASES[phase], percent(off), pair.row.place)
        })
    );
    if left_out > 0 {
        let _ = writeln!(out, "{left_out} rows left out: not measured, or with wrong outputs");
    }
    out
}

/// A phase that takes a fifth of the total or more.
fn matters(pair: &Pair, phase: usize) -> bool {
    let (measured, predicted) = pair.phases[phase];
    measured.max(predicted) > 0.2 * pair.phases[0].0
}

/// The phase that matters and is off the most, and by how much.
fn worst_phase(pair: &Pair) -> (usize, f64) {
    let off = (1..PHASES.len()).filter(|&phase| matters(pair, phase)).map(|phase| (phase, error(pair.phases[phase])));
    off.filter(|(_, off)| off.is_finite()).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0))
}

/// The total agrees, but a phase that matters does not.
fn deceives(pair: &Pair) -> bool {
    error(pair.phases[0]) <= TOTAL_AGREES && worst_phase(pair).1 > PHASE_DISAGREES
}

/// What is printed with `--json`.
pub fn json_text(shown: &Shown<'_>) -> String {
    let Shown { joined, summary, left_out, recorded } = *shown;
    let shapes: Vec<_> = joined
        .iter()
        .map(|j| {
            let gain = Gain::of(j, joined);
            json!({
                "case": j.case.to_string(),
                "clock": j.clock,
                "rows": j.pairs.len(),
                "median_error": quantile(&j.errors(0), 0.5),
                "p95_error": quantile(&j.errors(0), 0.95),
                "split_cost": j.split_cost(),
                "measured_fused_gain": gain.as_ref().map(|gain| gain.measured),
                "predicted_fused_gain": gain.as_ref().map(|gain| gain.predicted),
                "fused_gain_over": gain.as_ref().map(|gain| gain.over),
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
        "waits": compare_waits::json(recorded),
    })
    .to_string()
        + "\n"
}

//! What `measure` prints: the fastest row of every group.

use crate::engine::clock_name;
use crate::experiment::{Experiment, Group};
use crate::measure_row::{self as row, MeasuredRow};
use crate::progress;
use crate::table::Table;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use tilewire_kernels::RoleSplit;

/// The fastest row of every group.
fn best<'a>(experiment: &'a Experiment, rows: &'a [MeasuredRow]) -> Vec<(&'a Group, &'a MeasuredRow)> {
    let fastest = |group: &Group| {
        let clock = clock_name(group.case.clock.unwrap_or_default());
        let mut point = row::point(&group.case, &RoleSplit::default(), clock);
        point.retain(|name, _| crate::plan::role(name).is_none());
        rows.iter().filter(|row| row.is_ok() && row.is_at(&point)).min_by(|a, b| {
            a.number("time_us").unwrap_or(f64::INFINITY).total_cmp(&b.number("time_us").unwrap_or(f64::INFINITY))
        })
    };
    experiment.groups.iter().filter_map(|group| fastest(group).map(|row| (group, row))).collect()
}

/// The summary for a person.
pub fn text(experiment: &Experiment, points: usize, rows: &[MeasuredRow], file: &Path) -> String {
    let mut table = Table::new([
        "kernel",
        "cluster",
        "shape",
        "clock",
        "best split",
        "time_us",
        "compute_only_us",
        "comm_only_us",
        "sm_mhz",
    ]);
    for (group, row) in best(experiment, rows) {
        table.row([
            row.text("kernel").to_owned(),
            group.case.target.to_string(),
            group.case.problem.to_string(),
            row.text("clock").to_owned(),
            row.split().map_or_else(|_| String::new(), |split| split.to_string()),
            row.text("time_us").to_owned(),
            row.text("compute_only_us").to_owned(),
            row.text("comm_only_us").to_owned(),
            row.text("sm_mhz").to_owned(),
        ]);
    }
    let mut text = format!("{}\n", experiment.question);
    if !rows.is_empty() {
        let _ =
            write!(text, "\n{}", table.without_constants(&["kernel", "cluster", "best split", "time_us"]).render(2));
    }
    let _ = writeln!(text, "\n{}", progress::done(rows.len(), points));
    let _ = writeln!(text, "wrote {}", file.display());
    text
}

/// The summary as JSON.
pub fn json_text(experiment: &Experiment, points: usize, rows: &[MeasuredRow], file: &Path) -> String {
    let best: Vec<_> = best(experiment, rows)
        .into_iter()
        .map(|(group, row)| json!({ "case": group.case.to_string(), "split": row.split().ok(), "time_us": row.number("time_us") }))
        .collect();
    json!({ "experiment": experiment.name, "points": points, "rows": rows.len(), "best": best, "file": file })
        .to_string()
        + "\n"
}

//! Tables of the figures: CSV, and the text for a person.

use super::{Bar, DECISIVE, Decision, GroupError, log_error};
use crate::data::JUDGED_FROM_SIZE;
use crate::provenance::wrote;
use crate::table::Table;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::PathBuf;
use tilewire_sim::OverlapReason;
use tilewire_sim::machine::Kind;

/// Rows as CSV, a column for each field.
pub fn csv_of<T: Serialize>(rows: &[T]) -> String {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row).expect("plain fields, written to memory");
    }
    String::from_utf8(writer.into_inner().expect("written to memory")).expect("fields are UTF-8")
}

/// All bars.
pub fn rows_csv(bars: &[Bar]) -> String {
    #[derive(Serialize)]
    struct Row<'a> {
        kernel: &'a str,
        topology: &'a str,
        system: &'static str,
        size: u64,
        judged: bool,
        published_tflops_per_gpu: f64,
        lowest_tflops_per_gpu: f64,
        highest_tflops_per_gpu: f64,
        predicted_tflops_per_gpu: String,
        fair_tflops_per_gpu: String,
        error: String,
        predicted_time_us: String,
        fair_time_us: String,
        overlap: String,
        overlap_reason: &'static str,
        bound_by: String,
        split: String,
        schedule_hash: &'a str,
    }
    let decimals = |value: f64| format!("{value:.6}");
    let rows: Vec<Row<'_>> = bars
        .iter()
        .map(|bar| Row {
            kernel: &bar.kernel,
            topology: &bar.topology,
            system: bar.system.name(),
            size: bar.size,
            judged: bar.judged,
            published_tflops_per_gpu: bar.published,
            lowest_tflops_per_gpu: bar.band.0,
            highest_tflops_per_gpu: bar.band.1,
            predicted_tflops_per_gpu: decimals(bar.predicted.prediction.tflops_per_gpu),
            fair_tflops_per_gpu: decimals(bar.fair.prediction.tflops_per_gpu),
            error: decimals(log_error(bar).exp_m1()),
            predicted_time_us: decimals(bar.predicted.prediction.time_us),
            fair_time_us: decimals(bar.fair.prediction.time_us),
            overlap: decimals(bar.predicted.prediction.overlap),
            overlap_reason: bar.predicted.prediction.overlap_reason.map_or("", OverlapReason::name),
            bound_by: bar.predicted.prediction.bound_by.clone().into(),
            split: bar.predicted.split.to_string().replace(',', ";"),
            schedule_hash: &bar.predicted.schedule_hash,
        })
        .collect();
    csv_of(&rows)
}

/// Parameters without a source of their own.
pub fn assumed_csv(machines: &[&tilewire_sim::Machine]) -> String {
    #[derive(Serialize)]
    struct Row<'a> {
        machine: &'a str,
        parameter: String,
        value: f64,
        kind: &'static str,
        source: &'a str,
    }
    let mut rows = Vec::new();
    for machine in machines {
        for (parameter, param) in machine.params() {
            let kind = match param.kind {
                Kind::Assumed => "assumed",
                Kind::Fitted => "fitted",
                _ => continue,
            };
            rows.push(Row { machine: &machine.name, parameter, value: param.value, kind, source: &param.source });
        }
    }
    csv_of(&rows)
}

/// The summary for a person.
pub fn text(
    bars: &[Bar],
    failures: &[String],
    errors: &[GroupError],
    decisions: &[Decision],
    machines: &[&tilewire_sim::Machine],
    files: &[PathBuf],
) -> String {
    let percent = |value: f64| format!("{:.1} %", value * 100.0);
    let mut table = Table::new([
        "kernel",
        "topology",
        "system",
        "rows",
        "error",
        "unfitted rows",
        "error there",
        "worst: size",
        "published",
        "predicted",
        "off by",
    ]);
    for group in errors {
        table.row([
            group.kernel.clone(),
            group.topology.clone(),
            group.system.to_owned(),
            group.rows.to_string(),
            percent(group.error),
            group.test_rows.to_string(),
            if group.test_rows == 0 { "-".into() } else { percent(group.test_error) },
            group.worst_size.to_string(),
            format!("{:.0}", group.worst_published_tflops_per_gpu),
            format!("{:.0}", group.worst_predicted_tflops_per_gpu),
            percent(group.worst_error),
        ]);
    }
    let judged = bars.iter().filter(|bar| bar.judged).count();
    let mut text = format!(
        "{} published bars, {judged} of them judged (size {JUDGED_FROM_SIZE} and up), in TFLOPS per GPU\n\n{}",
        bars.len(),
        table.render(2)
    );
    let decisive: Vec<&Decision> = decisions.iter().filter(|decision| decision.decisive).collect();
    let wrong: Vec<&&Decision> = decisive.iter().filter(|decision| !decision.right).collect();
    let _ = writeln!(
        text,
        "\nfused or unfused: {} of {} decided right where the published difference exceeds {:.0} %",
        decisive.len() - wrong.len(),
        decisive.len(),
        DECISIVE * 100.0
    );
    for decision in wrong {
        let _ = writeln!(
            text,
            "  wrong: {} {} {}: published {:.2} x, predicted {:.2} x",
            decision.kernel,
            decision.topology,
            decision.size,
            decision.published_fused_over_unfused,
            decision.predicted_fused_over_unfused
        );
    }
    for machine in machines {
        for (kind, name) in [(Kind::Fitted, "fitted"), (Kind::Assumed, "assumed")] {
            let names: Vec<String> =
                machine.params().into_iter().filter(|(_, param)| param.kind == kind).map(|(name, _)| name).collect();
            let _ = writeln!(text, "\n{} parameters of {} {name}:", names.len(), machine.name);
            text += &wrapped(&names, 108);
        }
    }
    text.push('\n');
    for failure in failures {
        let _ = writeln!(text, "not predicted: {failure}");
    }
    text + &wrote(files)
}

/// Names in lines of at most `width` characters.
fn wrapped(names: &[String], width: usize) -> String {
    let mut text = String::new();
    let mut line = String::new();
    for name in names {
        if !line.is_empty() && line.len() + name.len() + 2 > width {
            let _ = writeln!(text, "  {line},");
            line.clear();
        }
        line += if line.is_empty() { "" } else { ", " };
        line += name;
    }
    if !line.is_empty() {
        let _ = writeln!(text, "  {line}");
    }
    text
}

//! `calibrate`: what the GPU here does, as parameters of a machine file.
//!
//! ```text
//! experiments/measured/fit/*.toml ── measure ──▶ rows ── fit ──▶ values with spread ──▶ machine file
//! ```
//!
//! Some parameters follow from rows by arithmetic; the others are those with which the simulator comes closest to the
//! rows' phases. The rows are kept: `--rows` fits them again without a GPU.

mod arithmetic;
mod by_simulation;

use crate::cli::CalibrateArgs;
use crate::data::Sheet;
use crate::document::Document;
use crate::error::ExperimentError;
use crate::experiment::Experiment;
use crate::fills;
use crate::measure;
use crate::measure_row::{self as row, MeasuredRow};
use crate::plan::Source;
use crate::provenance::Output;
use crate::table::Table;
use arithmetic::arithmetic;
use by_simulation::by_simulation;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use tilewire_hw::measure::spread;
use tilewire_hw::readings;

/// The experiments whose rows fit a machine.
const EXPERIMENTS: [(&str, &str); 10] = [
    ("tiles", include_str!("../measured/fit/tiles.toml")),
    ("gemm_rs", include_str!("../measured/fit/gemm_rs.toml")),
    ("gemm_ar", include_str!("../measured/fit/gemm_ar.toml")),
    ("ag_gemm", include_str!("../measured/fit/ag_gemm.toml")),
    ("moe_dispatch_gemm", include_str!("../measured/fit/moe_dispatch_gemm.toml")),
    ("attention_tiles", include_str!("../measured/fit/attention_tiles.toml")),
    ("ring_attention", include_str!("../measured/fit/ring_attention.toml")),
    ("merges", include_str!("../measured/fit/merges.toml")),
    ("gemm_rs_2x8", include_str!("../measured/fit/gemm_rs_2x8.toml")),
    ("ag_gemm_2x8", include_str!("../measured/fit/ag_gemm_2x8.toml")),
];
/// Those whose timelines give what the first tile of a CTA takes beyond the others.
const FILLS: [(&str, &str); 2] = [
    ("gemm_fills", include_str!("../measured/fit/gemm_fills.toml")),
    ("attention_fills", include_str!("../measured/fit/attention_fills.toml")),
];
/// Machine that stands for the GPU here.
const MACHINE: &str = "h200-1gpu";

/// A parameter and what it was found from.
pub(crate) struct Fitted {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    /// Quartiles of the readings, or the values that fit as well.
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) kind: &'static str,
    pub(crate) how: String,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`]; without rows and without a GPU, nothing is written.
pub fn run(args: &CalibrateArgs) -> Result<String, ExperimentError> {
    if let Some(given) = args.ranks.given() {
        return Err(ExperimentError::refused(given, "only with --fabric; add it, or leave this away"));
    }
    let source = Source::new(args.data.data.as_deref(), args.data.machine.as_deref())?;
    // What is given is read before anything is measured.
    let mut probed = Vec::new();
    for file in &args.readings {
        read_quantities(file, &mut probed)?;
    }
    for folder in &args.fills {
        probed.push(read_fills(folder, &source)?);
    }
    let mut files = args.rows.clone();
    if files.is_empty() {
        for (name, text) in EXPERIMENTS {
            files.push(measured(name, text, args, &source, false)?.join("rows.csv"));
        }
    }
    let (mut rows, mut seen) = (Vec::new(), row::Seen::default());
    for file in &files {
        let read = row::read(file)?;
        read.iter().try_for_each(|row| seen.note(row))?;
        rows.extend(read.into_iter().filter(MeasuredRow::is_ok));
    }
    let mut machine = source.machine_or(MACHINE)?;
    let text = source.machine_text(&machine)?;
    if args.readings.is_empty() && args.rows.is_empty() {
        let read = readings::read().map_err(ExperimentError::NoHardware)?;
        probed.extend(read.into_iter().map(|q| (q.name.to_owned(), q.how.to_owned(), q.readings)));
        for (name, text) in FILLS {
            probed.push(read_fills(&measured(name, text, args, &source, true)?, &source)?);
        }
    }
    let mut fits = arithmetic(&rows);
    fits.extend(from_quantities(&probed));
    for fit in &fits {
        machine.set(fit.name, fit.value);
    }
    fits.extend(by_simulation(&rows, &mut machine, &source)?);
    if fits.is_empty() {
        let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        return Err(ExperimentError::refused(names.join(", "), "no rows of experiments/measured/fit"));
    }
    let machine_file = format!("{}.toml", machine.name);
    let files = [machine_file.as_str(), "fits.csv", "readings.csv"];
    let output = Output::create(&args.output, "calibrate", None, None, &source, &[&machine], &files)?;
    let provenance = provenance(&rows, args.cite.as_deref());
    let date = rows[0].text("date").to_owned();
    output.write(&machine_file, &machine_text(&text, &fits, &provenance, &date))?;
    let mut csv = String::from("parameter,value,low,high,kind,how\n");
    let mut table = Table::new(["parameter", "value", "low", "high", "kind", "from"]);
    for fit in &fits {
        let values = [fit.value, fit.low, fit.high].map(|value| shortest(value, 4));
        let _ = writeln!(csv, "{},{},{},\"{}\"", fit.name, values.join(","), fit.kind, fit.how);
        let [value, low, high] = values;
        table.row([fit.name.to_owned(), value, low, high, fit.kind.to_owned(), fit.how.clone()]);
    }
    output.write("fits.csv", &csv)?;
    if !probed.is_empty() {
        output.write("readings.csv", &quantities_csv(&probed))?;
    }
    Ok(format!(
        "{} rows of {}\n\n{}\n{}wrote {}\nnot calibrated: flags.local_ns and interpreter.claim_ns keep the values of {MACHINE}\n",
        rows.len(),
        rows[0].text("gpu"),
        table.render(2),
        attention_fill(&probed),
        output.path(&machine_file).display()
    ))
}

/// What the model does not have: an attention tile takes the same whether it was fetched ahead or not.
fn attention_fill(probed: &[Read]) -> String {
    let Some((_, _, readings)) = probed.iter().find(|(name, ..)| name == fills::ATTENTION) else {
        return String::new();
    };
    let [low, value, high] = spread(readings.clone());
    format!(
        "read, but no parameter of the model: the first attention tile of a CTA takes {value:.0} ns ({low:.0} to {high:.0}) \
         more than the ones after it\n"
    )
}

/// Measures the points of an experiment that are not measured yet; returns its directory.
fn measured(
    name: &str,
    text: &str,
    args: &CalibrateArgs,
    source: &Source,
    timelines: bool,
) -> Result<PathBuf, ExperimentError> {
    let experiment = Experiment::new(name.into(), &Document::new(format!("{name}.toml"), text), source, 0)?;
    let options =
        measure::Options { cache: args.cache.clone(), budget_s: None, unchecked: false, timelines, reach: None };
    let root = args.output.join(name);
    measure::execute(&experiment, source, &root, &options, None)?;
    Ok(root)
}

/// Where a file of rows is kept, and what it was measured with.
fn provenance(rows: &[MeasuredRow], cite: Option<&str>) -> String {
    let first = &rows[0];
    format!(
        "{}measured {} on {}, driver {}, revision {}",
        cite.map_or_else(String::new, |cite| format!("{cite}, ")),
        first.text("date"),
        first.text("gpu"),
        first.text("driver"),
        first.text("revision")
    )
}

/// A number with this many significant digits.
pub(crate) fn shortest(value: f64, digits: usize) -> String {
    let magnitude = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    format!("{value:.*}", (digits as i32 - 1 - magnitude).max(0) as usize)
}

fn from_readings(name: &'static str, readings: Vec<f64>, how: impl Into<String>) -> Option<Fitted> {
    let count = readings.len();
    let [low, value, high] = spread(readings);
    let how = format!("{}; median and quartiles of {count} readings", how.into());
    (count > 0).then_some(Fitted { name, value, low, high, kind: "derived", how })
}

/// A quantity that was read by itself: its name, how, its readings.
type Read = (String, String, Vec<f64>);

/// What quantities give that were read by themselves. A barrier of all SMs is no parameter of the model; a flag's way
/// behind a fence is `interpreter.raise_ns` and `flags.local_ns` together.
fn from_quantities(probed: &[Read]) -> Vec<Fitted> {
    let of = |parameter, quantity: &str, factor: f64| {
        let (_, how, readings) = probed.iter().find(|(name, ..)| name == quantity)?;
        from_readings(parameter, readings.iter().map(|reading| reading * factor).collect(), how.clone())
    };
    [
        of("flags.host_ns", "host_round_trip_ns", 0.5),
        of("proxy.fifo_latency_ns", "host_round_trip_ns", 0.5),
        of("proxy.push_ns", "fifo_push_ns", 1.0),
        of("launch.dependent_us", "launch_gap_ns", 1e-3),
        of("gemm.pipelined.fill_ns", fills::GEMM, 1.0),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn quantities_csv(probed: &[Read]) -> String {
    let mut csv = String::from("quantity,reading,value,how\n");
    for (name, how, readings) in probed {
        for (number, value) in readings.iter().enumerate() {
            let _ = writeln!(csv, "{name},{number},{value:.2},\"{how}\"");
        }
    }
    csv
}

/// What the timelines below a directory tell of the first tile of a CTA.
fn read_fills(folder: &Path, source: &Source) -> Result<Read, ExperimentError> {
    let (name, readings) = fills::readings(&fills::files(folder)?, source)?;
    Ok((name.to_owned(), fills::HOW.to_owned(), readings))
}

/// Adds the quantities of a file that `calibrate` wrote.
fn read_quantities(file: &Path, probed: &mut Vec<Read>) -> Result<(), ExperimentError> {
    let sheet = Sheet::read(file)?;
    let columns = sheet.find(["quantity", "reading", "value", "how"])?;
    for row in &sheet.rows {
        let [name, number, value, how] = columns.map(|column| sheet.cell(row, column));
        number.required("a whole number", |_: &u64| true)?;
        let value = value.required("a number", |value: &f64| value.is_finite())?;
        let name = name.filled()?;
        match probed.iter_mut().find(|(known, ..)| known == name) {
            Some((.., readings)) => readings.push(value),
            None => probed.push((name.to_owned(), how.text.to_owned(), vec![value])),
        }
    }
    Ok(())
}

/// Least squares: intercept, slope, root mean square of the residuals.
pub(crate) fn line(points: &[(f64, f64)]) -> Option<(f64, f64, f64)> {
    let n = points.len() as f64;
    if points.len() < 3 {
        return None;
    }
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let slope = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>()
        / points.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>();
    let intercept = y - slope * x;
    let residual = (points.iter().map(|p| (p.1 - intercept - slope * p.0).powi(2)).sum::<f64>() / n).sqrt();
    Some((intercept, slope, residual))
}

/// A machine file with fitted values in place of its own.
pub(crate) fn machine_text(text: &str, fits: &[Fitted], provenance: &str, date: &str) -> String {
    let mut section = String::new();
    let mut out = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            name.clone_into(&mut section);
        }
        let key = line.split(" = ").next().unwrap_or_default();
        let fit = fits.iter().find(|fit| fit.name == format!("{section}.{key}"));
        if let Some(fit) = fit {
            let [value, low, high] = [fit.value, fit.low, fit.high].map(|value| shortest(value, 4));
            let value = if value.contains('.') { value } else { format!("{value}.0") };
            let source = format!("{provenance}; {}, {low} to {high}", fit.how);
            let kind = fit.kind;
            let _ = writeln!(
                out,
                "{key} = {{ value = {value}, kind = \"{kind}\", source = \"{source}\", date = \"{date}\" }}"
            );
        } else {
            out += line;
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_through_points_is_found() {
        let points: Vec<(f64, f64)> = (0..5).map(|x| (f64::from(x), 3.0 - 0.5 * f64::from(x))).collect();
        let (intercept, slope, residual) = line(&points).expect("five points");
        assert!((intercept - 3.0).abs() < 1e-9 && (slope + 0.5).abs() < 1e-9 && residual < 1e-9);
        assert_eq!(line(&points[..2]), None);
    }

    #[test]
    fn only_fitted_values_are_replaced() {
        let text = "name = \"x\"\n\n[sm]\na_ns = { value = 1.0, kind = \"assumed\", source = \"s\", date = \"d\" }\n\n[gpu]\na_ns = { value = 2.0 }\n";
        let fit = Fitted { name: "sm.a_ns", value: 620.0, low: 610.0, high: 634.5, kind: "derived", how: "h".into() };
        let new = machine_text(text, &[fit], "rows", "2026-11-29");
        let line =
            "a_ns = { value = 620.0, kind = \"derived\", source = \"rows; h, 620.0 to 634.5\", date = \"2026-11-29\" }";
        assert_eq!(
            new,
            text.replacen(
                "a_ns = { value = 1.0, kind = \"assumed\", source = \"s\", date = \"d\" }",
                &line.replace("620.0 to", "610.0 to"),
                1
            )
        );
    }
}

//! `fit`: the machine parameters of kind "fitted", found again from published rows.
//!
//! ```text
//!  published/fit_parameters.csv   what is fitted, for which machines, from where, within which bounds
//!  published/fit_rows.csv         on which rows; every other judged row is a test row
//! ```
//!
//! One parameter after the other moves to the least sum of squared logarithms of (predicted / published) over its rows,
//! by golden-section search beside the least of a few places between its bounds, in rounds until nothing moves. The search
//! begins at the table's `start`, never at what the machine files hold, so that the result depends on the rows alone.
//! Results are rounded to three digits; machine files that hold others are a finding.
//!
//! `--without` leaves the rows of a fabric or a kernel out and tests on them, see [`left_out`]. A parameter that loses all
//! its rows is fitted on the other published rows of the kernels that carry it; without those it is taken from a machine
//! of another fabric, and last from `start`: it is then reported as not identified.

mod left_out;
mod report;
mod search;

use crate::checked::Checks;
use crate::cli::{FitArgs, ProtocolArg};
use crate::data::{Figure, FitParameter, Judged, System};
use crate::error::ExperimentError;
use crate::figures;
use crate::plan::{Case, Source};
use crate::progress;
use crate::provenance::Output;
use left_out::{LeftOut, LeftOutReport};
use rayon::prelude::*;
use report::{parameter_table, text, write};
use search::fit;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use tilewire_kernels::{RoleSplit, Schedule};
use tilewire_sim::machine::Kind;
use tilewire_sim::{Clock, Machine, Simulation};

type Published = (Figure, Option<Judged>);

type Machines = BTreeMap<&'static str, Machine>;

/// A published row with its schedule.
struct FigureRow {
    kernel: String,
    topology: String,
    system: System,
    size: u64,
    machine: &'static str,
    published: f64,
    judged: bool,
    /// Parameters that are fitted on it.
    parameters: Vec<String>,
    case: Case,
    split: RoleSplit,
    schedule: Schedule,
    /// Its loop is known to outlast the cold clock by far.
    warm: AtomicBool,
}

/// A fitted value.
#[derive(Clone, Debug, Serialize)]
struct Fitted {
    parameter: String,
    machines: String,
    value: f64,
    low: f64,
    high: f64,
    rows: usize,
    /// Where the value comes from.
    from: String,
    /// What the machine files hold.
    in_files: f64,
}

/// Error over some rows of a kernel, test bed and system.
#[derive(Clone, Debug, Serialize)]
struct TestError {
    left_out: String,
    kernel: String,
    topology: String,
    system: &'static str,
    /// `fit`, `test` (judged, not fitted on) or `left out`.
    role: &'static str,
    rows: usize,
    error: f64,
    worst_size: u64,
    worst_error: f64,
}

#[derive(Serialize)]
struct Report {
    parameters: Vec<Fitted>,
    errors: Vec<TestError>,
    left_out: BTreeMap<String, LeftOutReport>,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`]; a finding when the machine files hold other values than the fit.
pub fn run(args: &FitArgs) -> Result<String, ExperimentError> {
    crate::threads(args.threads)?;
    let source = Source::new(args.data.as_deref(), None)?;
    let parameters = source.data.fit_parameters()?;
    let published = figures::published(&source.data)?;
    let experiments = left_out::experiments(args, &published)?;
    // Refused before anything is computed.
    let held = source.data.left_out()?;
    let output = match &args.output {
        Some(directory) => Some(Output::create(
            &directory.join("fit"),
            "fit",
            None,
            None,
            &source,
            &[],
            &["parameters.csv", "errors.csv"],
        )?),
        None => None,
    };
    let rows = rows(&source, &published)?;
    let base = machines(&source, &rows, &parameters)?;
    let bar = progress::counter("fit");
    let (full, all) = fit(&parameters, &base, &rows, &LeftOut::Nothing, &bar)?;
    let errors_of_all = errors(&all, &rows, &LeftOut::Nothing)?;
    let mut report = Report { parameters: full, errors: errors_of_all, left_out: BTreeMap::new() };
    compare(&source, &mut report.parameters)?;
    for left_out in experiments {
        let (mut fitted, machines) = fit(&parameters, &base, &rows, &left_out, &bar)?;
        compare(&source, &mut fitted)?;
        report.errors.extend(errors(&machines, &rows, &left_out)?);
        report.left_out.insert(left_out.to_string(), LeftOutReport::new(&left_out, &rows, fitted));
    }
    bar.finish_and_clear();
    if let Some(output) = &output {
        write(&source, output, &report)?;
    }
    let text = if args.json {
        serde_json::to_string_pretty(&report).expect("a report has only plain fields") + "\n"
    } else {
        text(&report)
    };
    let mut stale: Vec<String> = report
        .parameters
        .iter()
        .filter(|fitted| (fitted.value - fitted.in_files).abs() > 1e-9)
        .map(|fitted| {
            format!(
                "{} of {} is {}, the fit gives {}",
                fitted.parameter, fitted.machines, fitted.in_files, fitted.value
            )
        })
        .collect();
    if args.without.iter().any(|text| text == "all") {
        stale.extend(left_out::stale(&held, &report.errors));
    }
    if stale.is_empty() {
        return Ok(text);
    }
    print!("{text}");
    Err(ExperimentError::Finding(format!(
        "data hold other values than the fit: {}; write them with -o DIR",
        stale.join("; ")
    )))
}

/// The fabric of a test bed: the end of its name.
fn fabric(topology: &str) -> &str {
    topology.rsplit('-').next().unwrap_or_default()
}

impl FigureRow {
    /// Only costs of the host are fitted on it, no property of GPUs or network, and no error is judged on it.
    fn is_host_row(&self) -> bool {
        !self.judged && !self.parameters.is_empty() && self.parameters.iter().all(|name| name.starts_with("launch."))
    }

    /// ln(predicted / published) on a machine, under the protocol that the bar had.
    fn log_error(&self, machines: &Machines) -> Result<f64, ExperimentError> {
        let refuse = |source| ExperimentError::Sim { case: self.case.to_string(), source };
        let simulation =
            |clock| Simulation::new(&self.schedule, &machines[self.machine], &self.case.config(clock)).map_err(refuse);
        let later_ps = || simulation(Clock::Sustained)?.time_ps(&self.split).map_err(refuse);
        let time_ps = if self.warm.load(Ordering::Relaxed) {
            later_ps()?
        } else {
            let cold = simulation(Clock::Cold)?;
            let cold_ps = cold.time_ps(&self.split).map_err(refuse)?;
            // Far from the limit no value of a fitted parameter leads back.
            self.warm.store(cold.cold_share(cold_ps / 3) <= 0.0, Ordering::Relaxed);
            cold.loop_ps(cold_ps, later_ps)?
        };
        Ok((self.schedule.useful_flops as f64 / time_ps as f64 / self.published).ln())
    }
}

/// All published rows that can be predicted, with their schedules.
fn rows(source: &Source, published: &[Published]) -> Result<Vec<FigureRow>, ExperimentError> {
    let fit_rows = source.data.fit_rows()?;
    let build = |(figure, judged): &Published| {
        let (case, split) = figures::case_of(source, Checks::default(), figure, ProtocolArg::Published)?;
        let missing = || ExperimentError::Finding(format!("{} {}: no row", figure.kernel, figure.topology));
        let system = figure.base.ok_or_else(missing)?;
        let size = figure.size.ok_or_else(missing)?;
        let parameters = fit_rows.iter().find(|row| row.is(&figure.kernel, &figure.topology, system, size));
        Ok(FigureRow {
            kernel: figure.kernel.clone(),
            topology: figure.topology.clone(),
            system,
            size,
            machine: figure.machine().ok_or_else(missing)?,
            published: figure.value.ok_or_else(missing)?,
            judged: judged.is_some(),
            parameters: parameters.map(|row| row.parameters.clone()).unwrap_or_default(),
            schedule: crate::engine::build(&case)?,
            case,
            split,
            warm: AtomicBool::new(false),
        })
    };
    let rows: Vec<FigureRow> = published.par_iter().map(build).collect::<Result<_, ExperimentError>>()?;
    for row in &fit_rows {
        if !rows.iter().any(|known| row.is(&known.kernel, &known.topology, known.system, known.size)) {
            let place = format!("{} {} {} {}", row.kernel, row.system, row.topology, row.size);
            return Err(ExperimentError::Finding(format!("published/fit_rows.csv: no published bar {place}")));
        }
    }
    Ok(rows)
}

/// The machines of the rows, with every fitted parameter at its start.
fn machines(source: &Source, rows: &[FigureRow], parameters: &[FitParameter]) -> Result<Machines, ExperimentError> {
    let mut machines = Machines::new();
    for row in rows {
        if !machines.contains_key(row.machine) {
            machines.insert(row.machine, source.data.machine(row.machine)?);
        }
    }
    let listed = |machine: &str, name: &str| {
        parameters.iter().any(|p| p.parameter == name && p.machines.iter().any(|known| known == machine))
    };
    for name in source.data.machine_names()? {
        for (parameter, param) in source.data.machine(&name)?.params() {
            let fitted = param.kind == Kind::Fitted;
            if fitted != listed(&name, &parameter) {
                let problem = if fitted { "is fitted, and not listed" } else { "is listed, and not of kind fitted" };
                let place = "published/fit_parameters.csv";
                return Err(ExperimentError::Finding(format!("{place}: {parameter} of {name} {problem}")));
            }
        }
    }
    for parameter in parameters {
        set(&mut machines, parameter, parameter.start);
    }
    Ok(machines)
}

fn set(machines: &mut Machines, parameter: &FitParameter, value: f64) {
    for name in &parameter.machines {
        if let Some(machine) = machines.get_mut(name.as_str()) {
            machine.set(&parameter.parameter, value);
        }
    }
}

/// The rows that identify a parameter when some are left out.
fn rows_of<'a>(parameter: &FitParameter, rows: &'a [FigureRow], left_out: &LeftOut) -> Vec<&'a FigureRow> {
    let carries = |row: &FigureRow| row.parameters.contains(&parameter.parameter);
    let own = |row: &FigureRow| parameter.machines.iter().any(|name| name == row.machine);
    let kept = || rows.iter().filter(|row| own(row) && !left_out.leaves_out(row));
    let fit: Vec<&FigureRow> = kept().filter(|row| carries(row)).collect();
    if !fit.is_empty() || *left_out == LeftOut::Nothing {
        return fit;
    }
    let same = |row: &FigureRow| {
        rows.iter().any(|other| carries(other) && (&other.kernel, other.system) == (&row.kernel, row.system))
    };
    // Costs of the host show in the smallest rows only.
    if parameter.parameter.starts_with("launch.") { Vec::new() } else { kept().filter(|row| same(row)).collect() }
}

fn errors(machines: &Machines, rows: &[FigureRow], left_out: &LeftOut) -> Result<Vec<TestError>, ExperimentError> {
    type Group<'a> = (&'static str, &'a str, &'a str, System);
    let errors: Vec<f64> =
        rows.par_iter().map(|row| row.log_error(machines).map(f64::abs)).collect::<Result<_, ExperimentError>>()?;
    let mut groups: BTreeMap<Group<'_>, Vec<(f64, u64)>> = BTreeMap::new();
    for (row, error) in rows.iter().zip(errors) {
        let role = match () {
            () if left_out.leaves_out(row) && row.judged => "left out",
            () if left_out.leaves_out(row) => continue,
            () if !row.parameters.is_empty() => "fit",
            () if row.judged && *left_out == LeftOut::Nothing => "test",
            () => continue,
        };
        groups.entry((role, &row.kernel, &row.topology, row.system)).or_default().push((error, row.size));
    }
    let mut found = Vec::new();
    for ((role, kernel, topology, system), rows) in groups {
        let worst = rows.iter().copied().fold((0.0, 0), |worst, row| if row.0 > worst.0 { row } else { worst });
        found.push(TestError {
            left_out: left_out.to_string(),
            kernel: kernel.to_owned(),
            topology: topology.to_owned(),
            system: system.name(),
            role,
            rows: rows.len(),
            error: (rows.iter().map(|row| row.0).sum::<f64>() / rows.len() as f64).exp_m1(),
            worst_size: worst.1,
            worst_error: worst.0.exp_m1(),
        });
    }
    Ok(found)
}

/// Fills in what the machine files hold; of several that share a value, one that holds another.
fn compare(source: &Source, fitted: &mut [Fitted]) -> Result<(), ExperimentError> {
    for fitted in fitted {
        fitted.in_files = fitted.value;
        for name in fitted.machines.split(' ') {
            let machine = source.data.machine(name)?;
            let held = machine.params().into_iter().find(|(known, _)| *known == fitted.parameter);
            let held = held.map_or(f64::MAX, |(_, param)| param.value);
            if (held - fitted.value).abs() > 1e-9 {
                fitted.in_files = held;
            }
        }
    }
    Ok(())
}

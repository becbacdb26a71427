//! `tilewire`: predict, sweep, tune and plot fused multi-GPU kernels.
//!
//! ```text
//!  cli (parsed) ─▶ plan (validated) ─▶ engine (schedules, checker, simulator) ─▶ table, row, plot, trace
//!                    ▲                                                            │
//!                    └ data: machines, published rows            provenance: what it was made from
//! ```
//!
//! Exit codes: 0 ok, 2 bad input (nothing written), 3 a finding, 4 hardware missing, 130 after Ctrl-C.
#![forbid(unsafe_code)]

mod calibrate;
mod calibrate_fabric;
mod check;
mod checked;
mod cli;
mod compare;
mod compare_plots;
mod compare_tables;
mod compare_waits;
#[allow(dead_code, reason = "comparisons and calibration read the rest of it")]
mod data;
mod doctor;
mod document;
mod engine;
mod error;
mod experiment;
mod figures;
mod fills;
mod fit;
mod in_order;
mod kernels;
mod lock;
mod measure;
mod measure_host;
mod measure_row;
mod plan;
mod plot;
mod predict;
mod progress;
mod provenance;
mod ranks;
mod report;
mod row;
mod scale;
mod schedule;
mod shape;
mod spawned;
mod sweep;
mod sweep_plots;
mod table;
mod timeline;
mod trace;
mod tune;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use cli::{Cli, Command, DeviceArg};
use error::ExperimentError;
use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let command = taking_negative_numbers(Cli::command());
    let cli = match command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match &cli.command {
        Command::Predict(args) => predict::run(args),
        Command::Sweep(args) => sweep::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Scale(args) => scale::run(args),
        Command::Figures(args) => figures::run(args),
        Command::Fit(args) => fit::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::Schedule(args) => schedule::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Check(args) => check::run(args),
        Command::Measure(args) if args.device == DeviceArg::Host => measure_host::run(args),
        Command::Measure(args) => measure::run(args),
        Command::Calibrate(args) if args.fabric => calibrate_fabric::run(args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Report(args) => report::run(args),
        Command::Doctor(args) => Ok(doctor::run(args)),
    };
    match result.and_then(|text| print(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("error: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

/// A command whose values may begin with a minus, so that a number below what is allowed is told what is allowed.
fn taking_negative_numbers(command: clap::Command) -> clap::Command {
    command
        .mut_args(|argument| {
            let takes = argument.get_action().takes_values();
            argument.allow_negative_numbers(takes)
        })
        .mut_subcommands(taking_negative_numbers)
}

/// Writes to standard output.
///
/// # Errors
/// [`ExperimentError::Output`] when it takes no more, unless its reader has seen enough, as `head`.
pub(crate) fn print(text: &str) -> Result<(), ExperimentError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ExperimentError::Output(error.to_string())),
        _ => Ok(()),
    }
}

/// Writes to standard error; when even that fails there is nobody left to tell.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Help as clap prints it; a mistake in one line, and where to read on.
fn usage(error: &clap::Error) -> ExitCode {
    let help = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
    if help.contains(&error.kind()) {
        let Err(failed) = print(&error.to_string()) else { return ExitCode::SUCCESS };
        complain(&format!("error: {failed}"));
        return ExitCode::from(failed.exit_code());
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        complain(error.to_string().trim_end());
        return ExitCode::from(2);
    }
    let text = error.to_string();
    let first: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    complain(&first.join(" "));
    if let Some(tip) = text.lines().map(str::trim).find(|line| line.starts_with("tip:")) {
        complain(&format!("  {tip}"));
    }
    complain("  help: tilewire --help, or tilewire COMMAND --help");
    ExitCode::from(2)
}

/// Sizes the thread pool; 0 for one thread per core.
///
/// # Errors
/// [`ExperimentError::Refused`] when the threads cannot be started.
pub(crate) fn threads(threads: u64) -> Result<(), ExperimentError> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads as usize).build_global();
    pool.map_err(|error| ExperimentError::refused("--threads", format!("{threads}: {error}")))
}

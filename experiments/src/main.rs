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

mod check;
mod cli;
#[allow(dead_code, reason = "comparisons and calibration read the rest of it")]
mod data;
mod doctor;
mod document;
mod engine;
mod error;
mod experiment;
mod figures;
mod fit;
mod plan;
mod plot;
mod predict;
mod progress;
mod provenance;
mod row;
mod schedule;
mod shape;
mod sweep;
mod sweep_plots;
mod table;
mod trace;
mod tune;

use clap::Parser;
use clap::error::ErrorKind;
use cli::{Cli, Command};
use error::ExperimentError;
use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match &cli.command {
        Command::Predict(args) => predict::run(args),
        Command::Sweep(args) => sweep::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Figures(args) => figures::run(args),
        Command::Fit(args) => fit::run(args),
        Command::Schedule(args) => schedule::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Check(args) => check::run(args),
        Command::Doctor(args) => Ok(doctor::run(args)),
    };
    match result {
        Ok(text) => {
            // A reader that has seen enough, as `head`, is no error.
            let _ = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Help as clap prints it; a mistake in one line, and where to read on.
fn usage(error: &clap::Error) -> ExitCode {
    let help = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
    if help.contains(&error.kind()) {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(2);
    }
    let text = error.to_string();
    let first: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    eprintln!("{}", first.join(" "));
    if let Some(tip) = text.lines().map(str::trim).find(|line| line.starts_with("tip:")) {
        eprintln!("  {tip}");
    }
    eprintln!("  help: tilewire --help, or tilewire COMMAND --help");
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

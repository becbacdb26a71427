//! `trace`: a timeline, simulated or measured, as a Chrome trace, which ui.perfetto.dev opens.
//!
//! ```text
//!  process = rank     thread = CTA of a role     slice OP = the task
//!                     slice "wait FLAG" = the CTA has a task and waits; "poll" = it looks for one that is ready
//!                     thread = its writes        slice OP = writes in flight while the CTA has gone on
//!  arrows  = from the task that raised a flag last to the task that waited for it
//!  counters = load of HBM, NVLink, PCIe and NIC of the first rank; simulated only
//! ```

mod events;

use crate::cli::TraceArgs;
use crate::engine::Prepared;
use crate::error::ExperimentError;
use crate::plan::{self, Case, Source};
use crate::predict;
use crate::provenance::make_folder_of;
use crate::schedule::ranks;
use crate::timeline::Measured;
use events::{Part, write};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use tilewire_kernels::{Rank, RoleKind};
use tilewire_sim::Protocol;

/// What is kept of a timeline.
struct Filter {
    ranks: Option<BTreeSet<Rank>>,
    roles: Option<BTreeSet<RoleKind>>,
    from_ps: u64,
    to_ps: u64,
    max_tasks: usize,
}

/// How much was kept.
#[derive(Default)]
struct Kept {
    tasks: usize,
    matching: usize,
    all: usize,
    arrows: usize,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &TraceArgs) -> Result<String, ExperimentError> {
    crate::threads(args.point.run.threads)?;
    let source = args.point.case.source()?;
    if let Some(file) = &args.measured {
        return measured(args, file, &source);
    }
    let case = args.point.case(&source)?;
    let filter = filter(args, &case)?;
    let prepared = Prepared::new(&case)?;
    let (split, _) = predict::split(&prepared, &case)?;
    let (run, clock) = prepared.timeline(&split)?;
    let timed = if case.protocol == Protocol::Fair {
        String::new()
    } else {
        format!(" ({clock} clock); what the benchmark's clock shows, `predict` tells")
    };
    let end_us = run.end as f64 / 1e6;
    let head = format!("{case}, {split}\n{end_us:.2} us from the first launch command to the last write{timed}\n");
    let parts = [Part { prepared: &prepared, run: &run, label: "", first_pid: 0 }];
    save(args, &head, &parts, &filter)
}

/// A timeline that was measured, alone or beside the simulation of the same schedule.
fn measured(args: &TraceArgs, file: &Path, source: &Source) -> Result<String, ExperimentError> {
    if let (Ok(output), Ok(file)) = (args.output.canonicalize(), file.canonicalize())
        && output == file
    {
        let problem = format!("{} is the timeline that is read, allowed: another file", args.output.display());
        return Err(ExperimentError::refused("-o", problem));
    }
    let Measured { case, split, prepared, run, row } = Measured::read(file, source)?;
    let filter = filter(args, &case)?;
    let told = ["device", "gpu", "transport", "date"].map(|name| row.text(name));
    let from = told.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ");
    let mut head = format!("{case}, {split}\nmeasured: {:.2} us from its first CTA, {from}\n", run.end as f64 / 1e6);
    let mut parts = vec![Part { prepared: &prepared, run: &run, label: " measured", first_pid: 0 }];
    let simulated = args.beside.then(|| prepared.timeline(&split)).transpose()?;
    if let Some((run, _)) = &simulated {
        let _ = writeln!(head, "simulated: {:.2} us from the launch command", run.end as f64 / 1e6);
        let first_pid = prepared.simulation.compiled().ranks.len() as u32;
        parts.push(Part { prepared: &prepared, run, label: " simulated", first_pid });
    }
    save(args, &head, &parts, &filter)
}

/// Writes what the filter keeps; returns what is printed.
fn save(args: &TraceArgs, head: &str, parts: &[Part<'_>], filter: &Filter) -> Result<String, ExperimentError> {
    let refuse = |error: io::Error| ExperimentError::write(&args.output, error);
    let title = head.trim_end().replace('\n', "; ");
    if write(&title, parts, filter, &mut io::sink()).map_err(refuse)?.tasks == 0 {
        let shown = parts[0].prepared.simulation.compiled().program_of.len();
        let problem = match args.measured {
            Some(_) => format!("keep none of the tasks: {shown} ranks were recorded"),
            None => format!("keep none of the tasks: {shown} ranks are simulated (all with --execution full)"),
        };
        let end_us = parts.iter().map(|part| part.run.end).max().unwrap_or(0) as f64 / 1e6;
        let problem = format!("{problem}, the run ends at {end_us:.2} us");
        return Err(ExperimentError::refused("--ranks, --roles, --from-us, --to-us", problem));
    }
    make_folder_of(&args.output)?;
    let mut writer = BufWriter::new(File::create(&args.output).map_err(refuse)?);
    let kept = write(&title, parts, filter, &mut writer).and_then(|kept| writer.flush().map(|()| kept));
    let kept = kept.map_err(refuse)?;

    let mut text = head.to_owned();
    let _ = writeln!(text, "wrote {} tasks and {} arrows to {}", kept.tasks, kept.arrows, args.output.display());
    if kept.matching < kept.all {
        let left_out = kept.all - kept.matching;
        let _ = writeln!(text, "left out {left_out} of {} tasks by rank, role and time", kept.all);
    }
    if kept.tasks < kept.matching {
        let _ = writeln!(
            text,
            "left out {} later tasks beyond --max-tasks {}; narrow --ranks, --roles, --from-us or --to-us",
            kept.matching - kept.tasks,
            filter.max_tasks
        );
    }
    text += "open it in https://ui.perfetto.dev\n";
    Ok(text)
}

fn filter(args: &TraceArgs, case: &Case) -> Result<Filter, ExperimentError> {
    let roles = |list: &String| {
        let one = |name: &str| {
            let known = || RoleKind::ALL.map(RoleKind::short).join(", ");
            plan::role(name.trim()).ok_or_else(|| {
                ExperimentError::refused("--roles", format!("\"{}\", allowed: {}", name.trim(), known()))
            })
        };
        list.split(',').map(one).collect::<Result<BTreeSet<_>, _>>()
    };
    let to_us = args.to_us.unwrap_or(1e12);
    if to_us <= args.from_us {
        let problem = format!("{to_us}, allowed: more than --from-us {}", args.from_us);
        return Err(ExperimentError::refused("--to-us", problem));
    }
    Ok(Filter {
        ranks: args.ranks.as_ref().map(|list| ranks(list, case.target.cluster)).transpose()?.map(BTreeSet::from_iter),
        roles: args.roles.as_ref().map(roles).transpose()?,
        from_ps: (args.from_us * 1e6) as u64,
        to_ps: (to_us * 1e6) as u64,
        max_tasks: args.max_tasks as usize,
    })
}

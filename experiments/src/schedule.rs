//! `schedule`: a schedule as JSON, as a table, or what differs between two.

use crate::cli::{CaseArgs, DiffArgs, DumpArgs, ScheduleAction, ScheduleArgs, ShowArgs};
use crate::engine;
use crate::error::ExperimentError;
use crate::plan::{self, Case, Draft, SplitChoice};
use crate::provenance::make_folder_of;
use crate::shape;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use tilewire_kernels::{Cluster, OptionSet, Rank, text};

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &ScheduleArgs) -> Result<String, ExperimentError> {
    match &args.action {
        ScheduleAction::Dump(args) => dump(args),
        ScheduleAction::Show(args) => show(args),
        ScheduleAction::Diff(args) => diff(args),
    }
}

fn case(args: &CaseArgs) -> Result<Case, ExperimentError> {
    args.draft()?.resolve(&args.source()?).map_err(plan::flagged)
}

fn dump(args: &DumpArgs) -> Result<String, ExperimentError> {
    let draft = Draft { split: Some(args.split.clone().unwrap_or_else(|| "auto".into())), ..args.case.draft()? };
    let case = draft.resolve(&args.case.source()?).map_err(plan::flagged)?;
    let schedule = engine::build(&case)?;
    let split = match case.split {
        SplitChoice::Fixed(split) => Some(split),
        SplitChoice::Auto => None,
    };
    let ranks = match args.ranks.as_deref() {
        None => schedule.representatives(),
        Some("all") => case.target.cluster.iter().collect(),
        Some(list) => ranks(list, case.target.cluster)?,
    };
    if let Some(path) = &args.output {
        make_folder_of(path)?;
        let file = File::create(path).map_err(|error| ExperimentError::write(path, error))?;
        let mut writer = BufWriter::new(file);
        text::dump(&schedule, split.as_ref(), &ranks, &mut writer)
            .and_then(|()| writer.flush())
            .map_err(|error| ExperimentError::write(path, error))?;
        return Ok(format!("wrote {}\n", path.display()));
    }
    // Streamed: the text of a large schedule is longer than memory should hold.
    let mut writer = BufWriter::new(io::stdout().lock());
    match text::dump(&schedule, split.as_ref(), &ranks, &mut writer).and_then(|()| writer.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ExperimentError::Output(error.to_string())),
        _ => Ok(String::new()),
    }
}

/// Rank numbers, separated by commas.
pub fn ranks(list: &str, cluster: Cluster) -> Result<Vec<Rank>, ExperimentError> {
    let one = |text: &str| {
        let number = shape::whole(text.trim()).map(|number| number as usize).filter(|n| *n < cluster.ranks());
        let allowed = || format!("\"{}\", allowed: rank numbers from 0 to {}", text.trim(), cluster.ranks() - 1);
        number.map(|number| cluster.rank(number)).ok_or_else(|| ExperimentError::refused("--ranks", allowed()))
    };
    let ranks: Vec<Rank> = list.split(',').map(one).collect::<Result<_, _>>()?;
    if let Some(twice) = ranks.iter().enumerate().find(|(i, rank)| ranks[..*i].contains(rank)) {
        return Err(ExperimentError::refused(
            "--ranks",
            format!("{} twice, allowed: each rank once", cluster.number(*twice.1)),
        ));
    }
    Ok(ranks)
}

fn show(args: &ShowArgs) -> Result<String, ExperimentError> {
    let case = case(&args.case)?;
    let cluster = case.target.cluster;
    if args.rank as usize >= cluster.ranks() {
        let problem = format!("{}, allowed: 0 to {}", args.rank, cluster.ranks() - 1);
        return Err(ExperimentError::refused("--rank", problem));
    }
    Ok(text::show(&engine::build(&case)?, cluster.rank(args.rank as usize), args.limit as usize))
}

fn diff(args: &DiffArgs) -> Result<String, ExperimentError> {
    let first = case(&args.case)?;
    let mut other = args.case.draft()?;
    if let Some(set) = args.with_options {
        other.set = set.set();
    }
    let at_flag = |refusal: plan::Refusal| ExperimentError::refused("--with-set", refusal.problem);
    for (name, value) in plan::assignments(&args.with_set).map_err(at_flag)? {
        other.overrides.retain(|(known, _)| *known != name);
        other.overrides.push((name, value));
    }
    if let Some(cluster) = &args.with_cluster {
        other.cluster.clone_from(cluster);
    }
    let second = other.resolve(&args.case.source()?).map_err(plan::flagged)?;
    let (a, b) = (engine::build(&first)?, engine::build(&second)?);
    let difference = text::diff(&a, &b, args.limit as usize);
    let name = |case: &Case| {
        format!("{case}, {} options", if case.set == OptionSet::Published { "published" } else { "tilewire" })
    };
    if difference.is_empty() {
        return Ok("the schedules are equal\n".into());
    }
    Ok(format!("- {}\n+ {}\n{difference}", name(&first), name(&second)))
}

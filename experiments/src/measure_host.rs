//! `measure --device host`: an experiment's points on CPU threads, one process per rank, values checked.
//!
//! It proves order, values and the wire; its times are those of a CPU and are compared with nothing.

use crate::cli::{Carrier, HostArgs, MeasureArgs};
use crate::engine;
use crate::error::ExperimentError;
use crate::experiment::{Experiment, Group};
use crate::measure::{hazards, splits};
use crate::measure_row::today;
use crate::plan::Source;
use crate::processes::{join, launched, lost, spawn};
use crate::provenance::{ExperimentText, Output, REVISION};
use crate::table::Table;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tilewire_hw::bootstrap::Session;
use tilewire_hw::host::{HostConfig, HostError, RankReport, Setup, Wire, run_rank, share};
use tilewire_hw::transport::segment::Layout;
use tilewire_kernels::{RoleSplit, Schedule, schedule_hash};

/// Floating-point operations of all ranks together that a point may have: some seconds of scalar arithmetic.
const MAX_FLOPS: u64 = 4_000_000_000;

/// A group that is ready to run.
struct Job<'a> {
    group: &'a Group,
    schedule: Schedule,
    splits: Vec<RoleSplit>,
    hazards: String,
}

/// Runs the command; rank 0 writes the rows and returns what to print.
///
/// # Errors
/// [`ExperimentError`].
pub fn run(args: &MeasureArgs) -> Result<String, ExperimentError> {
    let source = Source::new(args.data.data.as_deref(), args.data.machine.as_deref())?;
    let experiment = Experiment::read(&args.file, &source)?;
    let jobs = experiment.groups.iter().map(|group| job(group, args)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = jobs.first() else { return Ok(String::new()) };
    let cluster = first.schedule.cluster;
    if let Some(other) = jobs.iter().find(|job| job.schedule.cluster != cluster) {
        let problem = format!("another cluster than {cluster}; allowed: one cluster, for the ranks are processes");
        return Err(ExperimentError::refused(other.group.case.to_string(), problem));
    }
    let Some(place) = launched(cluster.ranks())? else {
        if args.host.spawn {
            return spawn(cluster.ranks());
        }
        let problem = "no launcher started this process; use mpirun or srun, or add --spawn";
        return Err(ExperimentError::refused("--device host", problem));
    };
    let session = join(&args.host, place)?;
    rank(args, &experiment, &source, &jobs, &session)
}

fn job<'a>(group: &'a Group, args: &MeasureArgs) -> Result<Job<'a>, ExperimentError> {
    let refuse = |problem: String| Err(ExperimentError::refused(group.case.to_string(), problem));
    let schedule = engine::build(&group.case)?;
    let flops = schedule.useful_flops.saturating_mul(schedule.cluster.ranks() as u64);
    if flops > MAX_FLOPS {
        return refuse(format!(
            "{:.1} GFLOP over all ranks; the host device computes with scalars, allowed: {:.1}; choose a smaller shape",
            flops as f64 / 1e9,
            MAX_FLOPS as f64 / 1e9
        ));
    }
    if !wire(&args.host, 0)?.carries(schedule.fabric) {
        return refuse(format!(
            "a schedule for {} over {:?}, which does not order what it relies on; choose another cluster or --transport",
            schedule.fabric, args.host.transport
        ));
    }
    Ok(Job { group, hazards: hazards(group, &schedule, args.unchecked)?, splits: splits(group)?, schedule })
}

/// What carries puts of a node's ranks.
fn wire(args: &HostArgs, node: u16) -> Result<Wire, ExperimentError> {
    match args.transport {
        Carrier::Loopback => Ok(Wire::Loopback(None)),
        Carrier::VerbsRc | Carrier::VerbsSrd => verbs(args, node),
    }
}

#[cfg(feature = "rdma")]
#[expect(clippy::unnecessary_wraps, reason = "a build without RDMA refuses")]
fn verbs(args: &HostArgs, node: u16) -> Result<Wire, ExperimentError> {
    let device = args.nics.get(usize::from(node)).or(args.nics.first()).cloned();
    let config = tilewire_hw::transport::verbs::VerbsConfig { device, ..Default::default() };
    Ok(match args.transport {
        Carrier::VerbsSrd => Wire::VerbsSrd(config),
        _ => Wire::VerbsRc { config, spoil: 0 },
    })
}

#[cfg(not(feature = "rdma"))]
fn verbs(args: &HostArgs, _node: u16) -> Result<Wire, ExperimentError> {
    let problem =
        format!("{:?} is not in this build; allowed: loopback, or a build with --features rdma", args.transport);
    Err(ExperimentError::refused("--transport", problem))
}

/// What a rank runs: every point.
fn rank(
    args: &MeasureArgs,
    experiment: &Experiment,
    source: &Source,
    jobs: &[Job<'_>],
    session: &Session,
) -> Result<String, ExperimentError> {
    let mut rows = Vec::new();
    for job in jobs {
        for &split in &job.splits {
            let at = |error| lost(format!("rank {}, {}", session.place().rank, job.group.case), error);
            let report = point(args, job, split, session).map_err(at)?;
            let text = serde_json::to_vec(&summary(&report)).unwrap_or_default();
            let all = session.exchange(&text).map_err(|error| at(error.into()))?;
            rows.push(row(job, &split, &all, &report.transport));
        }
    }
    if session.place().rank != 0 {
        return Ok(String::new());
    }
    let root = args.output.clone().unwrap_or_else(|| Path::new("out").join(format!("{}-host", experiment.name)));
    let machines: BTreeMap<&str, _> =
        jobs.iter().map(|job| &job.group.case.target.machine).map(|machine| (machine.name.as_str(), machine)).collect();
    let text = ExperimentText { name: &experiment.name, text: &experiment.text };
    let machines: Vec<_> = machines.into_values().collect();
    let output = Output::create(&root, "measure --device host", Some(experiment.seed), Some(text), source, &machines)?;
    let mut table = Table::new(SHOWN);
    let transport = rows.first().map_or_else(String::new, |row| row[6].clone());
    let mut csv = COLUMNS.join(",") + "\n";
    for row in rows {
        csv +=
            &(row.iter().map(|cell| format!("\"{}\"", cell.replace('"', "\"\""))).collect::<Vec<_>>().join(",") + "\n");
        let shown = SHOWN.iter().filter_map(|name| COLUMNS.iter().position(|column| column == name));
        table.row(shown.map(|at| row[at].clone()));
    }
    output.write("rows.csv", &csv)?;
    Ok(format!(
        "{}\nall values right over {transport}; times are this CPU's, no GPU was used; rows in {}\n",
        table.render(0),
        output.path("rows.csv").display()
    ))
}

fn point(args: &MeasureArgs, job: &Job<'_>, split: RoleSplit, session: &Session) -> Result<RankReport, HostError> {
    let Job { group, schedule, .. } = job;
    let (case, cluster, me) = (&group.case, schedule.cluster, session.place().rank as usize);
    let layout = Layout::new(schedule)
        .ok_or_else(|| HostError::Unsupported { what: "schedules with more than 2^31 flags per bank".to_owned() })?;
    let node = cluster.rank(me).node;
    let wire = wire(&args.host, node).map_err(|error| HostError::Unsupported { what: error.to_string() })?;
    let memory = PathBuf::from("/dev/shm");
    let directory = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let near = |rank: usize| wire.maps_all() || cluster.rank(rank).node == node;
    let segments = share(session, &layout, &directory, near)?;
    let wires = wire.connect(session, cluster, &segments, args.host.proxies as u16)?;
    let sms = case.target.machine.gpu.sms.value as u32;
    let config = HostConfig { split, sms, seed: case.seed, runs: 3, ..HostConfig::default() };
    let spec = case.spec();
    run_rank(&Setup { schedule, kernel: case.kernel, spec: &spec, config }, session, segments, wires)
}

/// What rank 0 needs of a rank: times of its runs; elements, writes and bytes; worst error.
fn summary(report: &RankReport) -> (Vec<f64>, [u64; 3], f64) {
    let counts = [report.values.elements, report.served.commands, report.served.bytes];
    (report.times_us.clone(), counts, report.values.worst)
}

const COLUMNS: [&str; 15] = [
    "kernel",
    "cluster",
    "fabric",
    "spec",
    "split",
    "device",
    "transport",
    "time_us",
    "elements",
    "outputs_worst",
    "writes",
    "bytes",
    "hazards",
    "schedule_hash",
    "made_by",
];

/// What is printed of a row.
const SHOWN: [&str; 7] = ["kernel", "cluster", "split", "time_us", "elements", "outputs_worst", "writes"];

/// A row: median over runs of the slowest rank, sums over ranks.
fn row(job: &Job<'_>, split: &RoleSplit, all: &[Vec<u8>], transport: &str) -> [String; 15] {
    let ranks: Vec<(Vec<f64>, [u64; 3], f64)> =
        all.iter().filter_map(|text| serde_json::from_slice(text).ok()).collect();
    let runs = ranks.iter().map(|(times, ..)| times.len()).min().unwrap_or(0);
    let mut slowest: Vec<f64> =
        (0..runs).map(|run| ranks.iter().map(|(times, ..)| times[run]).fold(0.0, f64::max)).collect();
    slowest.sort_by(f64::total_cmp);
    let sum = |which: usize| ranks.iter().map(|(_, counts, _)| counts[which]).sum::<u64>().to_string();
    let worst = ranks.iter().map(|&(.., worst)| worst).fold(0.0, f64::max);
    let schedule = &job.schedule;
    [
        job.group.case.name.to_owned(),
        schedule.cluster.to_string(),
        schedule.fabric.to_string(),
        schedule.spec.clone(),
        split.to_string(),
        "host".to_owned(),
        transport.to_owned(),
        slowest.get(runs / 2).map_or_else(String::new, |time| format!("{time:.1}")),
        sum(0),
        format!("{worst:.3}"),
        sum(1),
        sum(2),
        job.hazards.clone(),
        schedule_hash(schedule, split).to_string(),
        format!("{} {}", REVISION.unwrap_or("unknown revision"), today()),
    ]
}

//! `measure --device host`: an experiment's points on CPU threads, one process per rank, values checked.
//!
//! It proves order, values and the wire; its times are those of a CPU and are compared with nothing.

use crate::cli::{MeasureArgs, RankArgs};
use crate::engine::{self, clock_name};
use crate::error::ExperimentError;
use crate::experiment::{Experiment, Group};
use crate::lock::{Lock, drop_torn_row};
use crate::measure::{hazards, same_run, splits};
use crate::measure_row::{point as point_fields, today};
use crate::plan::{Case, Source};
use crate::progress;
use crate::provenance::{ExperimentText, Output, REVISION};
use crate::ranks::{Part, carrier, lost, proxies, take_part, wire, writable};
use crate::spawned;
use crate::table::Table;
use crate::timeline;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tilewire_hw::bootstrap::Session;
use tilewire_hw::host::{HostConfig, HostError, RankReport, Setup, run_rank, share};
use tilewire_hw::timeline::TaskTime;
use tilewire_hw::transport::proxy::ProxyConfig;
use tilewire_hw::transport::registration::Path as Way;
use tilewire_hw::transport::segment::Layout;
use tilewire_kernels::{RoleSplit, Schedule, schedule_hash};
use tilewire_sim::Machine;
use tilewire_sim::machine::Publishing;

/// Floating-point operations of all ranks together that a point may have: some seconds of scalar arithmetic.
const MAX_FLOPS: u64 = 4_000_000_000;

/// Runs of a point.
const RUNS: u32 = 3;

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
    let root = args.output.clone().unwrap_or_else(|| Path::new("out").join(format!("{}-host", experiment.name)));
    registration(args)?;
    let ready = || {
        writable(&root)?;
        let lock = Lock::take(&root)?;
        drop_torn_row(&root.join("rows.csv"))?;
        let rows = resumed(&root, &experiment, &source)?;
        if args.timelines {
            timelines_of(&root, &jobs, &rows)?;
        }
        Ok((lock, rows))
    };
    let session = match take_part(&args.ranks, cluster, "--device host", ready)? {
        Part::Parent => return Ok(String::new()),
        Part::Rank(session) => session,
    };
    let (_lock, known) = match session.place().rank {
        // Who started the ranks has the lock, and has mended the rows.
        0 if spawned::is_rank() => resumed(&root, &experiment, &source).map(|rows| (None, rows)),
        0 => ready().map(|(lock, rows)| (Some(lock), rows)),
        _ => Ok((None, Vec::new())),
    }
    .inspect_err(|error| session.abort(&error.to_string()))?;
    rank(args, &Run { experiment: &experiment, source: &source, jobs: &jobs, root: &root }, known, &session)
}

/// How a NIC comes to the memory of a rank, which is the host's.
fn registration(args: &MeasureArgs) -> Result<Way, ExperimentError> {
    match args.ranks.registration.unwrap_or(Way::Host) {
        way @ (Way::Host | Way::Bounce) => Ok(way),
        way => {
            let problem = format!("{way} is for the memory of a GPU; allowed with --device host: host, bounce");
            Err(ExperimentError::refused("--registration", problem))
        }
    }
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
    if !wire(&args.ranks, &group.case.target.machine, 0)?.carries(schedule.fabric) {
        return refuse(format!(
            "a schedule for {} over {}, which does not order what it relies on; choose another cluster or --transport",
            schedule.fabric,
            carrier(&args.ranks, &group.case.target.machine).name()
        ));
    }
    Ok(Job { group, hazards: hazards(group, &schedule, args.unchecked)?, splits: splits(group)?, schedule })
}

/// What a run is made of.
struct Run<'a> {
    experiment: &'a Experiment,
    source: &'a Source,
    jobs: &'a [Job<'a>],
    root: &'a Path,
}

/// Refuses to go on from rows without timelines.
fn timelines_of(root: &Path, jobs: &[Job<'_>], rows: &[Row]) -> Result<(), ExperimentError> {
    let known = |hash: &str| rows.iter().any(|row| row[column("schedule_hash")] == hash);
    let mut all = Vec::new();
    for (job, split) in jobs.iter().flat_map(|job| job.splits.iter().map(move |split| (job, split))) {
        let mut fields = named(job, split);
        fields.insert("schedule_hash".to_owned(), schedule_hash(&job.schedule, split).to_string());
        all.extend(Some(fields).filter(|fields| known(&fields["schedule_hash"])));
    }
    timeline::all_there(root, all.iter())
}

/// The fields that name a point.
fn named(job: &Job<'_>, split: &RoleSplit) -> BTreeMap<String, String> {
    let case = &job.group.case;
    point_fields(case, split, clock_name(case.clock.unwrap_or_default()))
}

/// A row, by [`COLUMNS`].
type Row = [String; COLUMNS.len()];

/// The rows that a run which was stopped has left.
fn resumed(root: &Path, experiment: &Experiment, source: &Source) -> Result<Vec<Row>, ExperimentError> {
    let file = root.join("rows.csv");
    if !file.exists() {
        return Ok(Vec::new());
    }
    let refuse = |place: &Path, what: &str| {
        let problem = format!("{what}; choose another directory with -o");
        Err(ExperimentError::refused(place.display().to_string(), problem))
    };
    same_run(root, experiment, source)?;
    let read = |error: csv::Error| ExperimentError::Read { file: file.clone(), message: error.to_string() };
    let mut reader = csv::Reader::from_path(&file).map_err(read)?;
    if reader.headers().map_err(read)?.iter().ne(COLUMNS) {
        return refuse(&file, "has other columns than this build writes");
    }
    let mut seen = BTreeMap::new();
    let row = |record: Result<csv::StringRecord, csv::Error>| {
        let record = record.map_err(read)?;
        let line = record.position().map_or(0, csv::Position::line);
        let place = format!("{}:{line}", file.display());
        let time = &record[column("time_us")];
        if !time.parse().is_ok_and(|time: f64| time > 0.0 && time.is_finite()) {
            let problem = format!("\"{}\", allowed: a time above 0, as measured", time.escape_debug());
            return Err(ExperimentError::refused(format!("{place}: time_us"), problem));
        }
        if let Some(before) = seen.insert(POINT.map(|name| record[column(name)].to_owned()), line) {
            let problem = format!("the point of line {before} again; take one of them away");
            return Err(ExperimentError::refused(place, problem));
        }
        Ok(std::array::from_fn(|at| record[at].to_owned()))
    };
    reader.records().map(row).collect()
}

fn column(name: &str) -> usize {
    COLUMNS.iter().position(|column| *column == name).expect("a column of this file")
}

/// What tells a point from the others of a run.
const POINT: [&str; 3] = ["schedule_hash", "transport", "registration"];

/// What rank 0 tells the others before a point.
const GO: &[u8] = b"go";
const KNOWN: &[u8] = b"known";
const STOP: &[u8] = b"stop";

/// What a rank runs: every point that has no row yet, while there is time.
fn rank(args: &MeasureArgs, run: &Run<'_>, mut rows: Vec<Row>, session: &Session) -> Result<String, ExperimentError> {
    let (first, begin) = (session.place().rank == 0, Instant::now());
    let points = run.jobs.iter().map(|job| job.splits.len()).sum();
    let [hash, transport, registered] = POINT.map(column);
    let way = registration(args)?;
    let mut output = None;
    let mut longest_s = 0.0_f64;
    progress::catch_interrupt(first && !spawned::is_rank());
    let bar = progress::bar(points as u64, "measuring");
    'all: for job in run.jobs {
        for &split in &job.splits {
            let at = |error| lost(format!("rank {}, {}", session.place().rank, job.group.case), error);
            let name = schedule_hash(&job.schedule, &split).to_string();
            let carrier = carrier(&args.ranks, &job.group.case.target.machine).name();
            let is_known =
                |row: &Row| row[hash] == name && row[transport].starts_with(carrier) && row[registered] == way.name();
            let known = rows.iter().any(is_known);
            let late = args.budget_s.is_some_and(|budget| begin.elapsed().as_secs_f64() + longest_s > budget);
            let mine = if known {
                KNOWN
            } else if late || progress::interrupted() {
                STOP
            } else {
                GO
            };
            let all = session.exchange(if first { mine } else { b"" }).map_err(|error| at(error.into()))?;
            match &all[0][..] {
                KNOWN => {}
                GO => {
                    let from = Instant::now();
                    let case = &job.group.case;
                    let how = Runs { count: RUNS, record: args.timelines };
                    let report = point(&args.ranks, case, &job.schedule, (split, way), session, how).map_err(at)?;
                    let text = serde_json::to_vec(&summary(&report)).unwrap_or_default();
                    let all = session.exchange(&text).map_err(|error| at(error.into()))?;
                    longest_s = longest_s.max(from.elapsed().as_secs_f64());
                    if first {
                        let row = row(job, &split, &all, &report);
                        if args.timelines {
                            let saved = save_timeline(run, job, &split, &all, &row);
                            saved.inspect_err(|error| session.abort(&error.to_string()))?;
                        }
                        write(run, &mut output, &row).inspect_err(|error| session.abort(&error.to_string()))?;
                        rows.push(row);
                    }
                }
                _ => break 'all,
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if !first {
        return Ok(String::new());
    }
    let text = if args.json { json_text(run, &rows, points) } else { text(run, &rows, points) };
    if progress::interrupted() && rows.len() < points {
        crate::print(&text)?;
        return Err(ExperimentError::Interrupted { kept: "their rows are kept", done: rows.len(), points });
    }
    Ok(text)
}

/// Appends a row; the first one of a run makes the directory.
fn write(run: &Run<'_>, output: &mut Option<csv::Writer<std::fs::File>>, row: &Row) -> Result<(), ExperimentError> {
    let file = run.root.join("rows.csv");
    let failed = |error: csv::Error| ExperimentError::write(&file, error);
    let open = |error: std::io::Error| ExperimentError::write(&file, error);
    if output.is_none() {
        let fresh = !file.exists();
        let machines: BTreeMap<&str, &Machine> = run
            .jobs
            .iter()
            .map(|job| &job.group.case.target.machine)
            .map(|machine| (machine.name.as_str(), machine))
            .collect();
        let text = ExperimentText { name: &run.experiment.name, text: &run.experiment.text };
        let machines: Vec<_> = machines.into_values().collect();
        let (command, seed) = ("measure --device host", Some(run.experiment.seed));
        Output::create(run.root, command, seed, Some(text), run.source, &machines, &["rows.csv"])?;
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&file).map_err(open)?;
        let mut writer = csv::WriterBuilder::new().quote_style(csv::QuoteStyle::Always).from_writer(file);
        if fresh {
            writer.write_record(COLUMNS).map_err(failed)?;
        }
        *output = Some(writer);
    }
    let Some(writer) = output else { return Ok(()) };
    writer.write_record(row).map_err(failed)?;
    writer.flush().map_err(open)
}

fn text(run: &Run<'_>, rows: &[Row], points: usize) -> String {
    let mut table = Table::new(SHOWN);
    for row in rows {
        table.row(SHOWN.map(|name| row[column(name)].clone()));
    }
    let done = progress::done(rows.len(), points);
    let Some(first) = rows.first() else { return format!("{done}; nothing was run or written\n") };
    format!(
        "{}\nall values right over {}; times are this CPU's, no GPU was used\n{done}\nwrote {}\n",
        table.render(0),
        first[column("transport")],
        run.root.join("rows.csv").display()
    )
}

fn json_text(run: &Run<'_>, rows: &[Row], points: usize) -> String {
    let object = |row: &Row| {
        let value =
            |text: &String| text.parse().map_or_else(|_| Value::from(text.as_str()), |number: f64| json!(number));
        COLUMNS.iter().zip(row).map(|(name, text)| ((*name).to_owned(), value(text))).collect::<serde_json::Map<_, _>>()
    };
    let rows: Vec<_> = rows.iter().map(object).collect();
    let about = "values right; times are this CPU's, no GPU was used";
    let file = run.root.join("rows.csv");
    json!({ "experiment": run.experiment.name, "about": about, "points": points, "rows": rows, "file": file })
        .to_string()
        + "\n"
}

/// How often a point is run, and whether the tasks of the last run are recorded.
#[derive(Clone, Copy)]
pub struct Runs {
    /// Runs.
    pub count: u32,
    /// Whether.
    pub record: bool,
}

/// How a rank of the host device runs a case of this machine.
fn host_config(machine: &Machine, split: RoleSplit, seed: u64, Runs { count: runs, record }: Runs) -> HostConfig {
    let default = ProxyConfig::default();
    let batch = machine.transport.batch.map_or(default.batch, |batch| batch as usize);
    let proxy = ProxyConfig { batch, ..default };
    let patience = std::time::Duration::from_secs(60);
    let sms = machine.gpu.sms.value as u32;
    HostConfig { split, sms, seed, runs, proxy, patience, record, ..HostConfig::default() }
}

/// Where the segments of ranks of a node lie: in memory, if the system has such a directory.
pub fn memory_directory() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { std::env::temp_dir() }
}

/// Runs a case on the host device: this rank's part, which all ranks call together.
///
/// # Errors
/// [`HostError`].
pub fn point(
    args: &RankArgs,
    case: &Case,
    schedule: &Schedule,
    (split, way): (RoleSplit, Way),
    session: &Session,
    runs: Runs,
) -> Result<RankReport, HostError> {
    let (cluster, me) = (schedule.cluster, session.place().rank as usize);
    let machine = &case.target.machine;
    let layout = Layout::new(schedule)
        .ok_or_else(|| HostError::Unsupported { what: "schedules with more than 2^31 flags per bank".to_owned() })?;
    let node = cluster.rank(me).node;
    let wire = wire(args, machine, node).map_err(|error| HostError::Unsupported { what: error.to_string() })?;
    let near = |rank: usize| wire.maps_all() || cluster.rank(rank).node == node;
    let segments = share(session, &layout, &memory_directory(), near)?;
    let mut wires = wire.attach(session, schedule, &segments, (way, &memory_directory()), proxies(args, machine))?;
    wires.told.by_immediates |= machine.transport.publish == Some(Publishing::Immediate);
    let config = host_config(machine, split, case.seed, runs);
    let spec = case.spec();
    run_rank(&Setup { schedule, kernel: case.kernel, spec: &spec, config }, session, segments, wires)
}

/// What rank 0 needs of a rank: times of its runs; elements, writes and bytes; worst error; tasks of its last run.
type Summary = (Vec<f64>, [u64; 3], f64, Vec<TaskTime>);

fn summary(report: &RankReport) -> Summary {
    let counts = [report.values.elements, report.served.commands, report.served.bytes];
    (report.times_us.clone(), counts, report.values.worst, report.timeline.clone())
}

fn summaries(all: &[Vec<u8>]) -> Vec<Summary> {
    all.iter().filter_map(|text| serde_json::from_slice(text).ok()).collect()
}

/// Writes the tasks of all ranks. Each rank's times begin where it left the barrier before its run.
fn save_timeline(
    run: &Run<'_>,
    job: &Job<'_>,
    split: &RoleSplit,
    all: &[Vec<u8>],
    row: &Row,
) -> Result<(), ExperimentError> {
    let mut fields = named(job, split);
    for name in ["device", "transport", "time_us", "hazards", "schedule_hash", "made_by"] {
        fields.insert(name.to_owned(), row[column(name)].clone());
    }
    fields.insert("date".to_owned(), today());
    let tasks: Vec<TaskTime> = summaries(all).into_iter().flat_map(|(.., tasks)| tasks).collect();
    timeline::write(&timeline::path(run.root, &fields), &fields, &job.schedule, &tasks)
}

const COLUMNS: [&str; 16] = [
    "kernel",
    "cluster",
    "fabric",
    "spec",
    "split",
    "device",
    "transport",
    "registration",
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
fn row(job: &Job<'_>, split: &RoleSplit, all: &[Vec<u8>], report: &RankReport) -> Row {
    let ranks = summaries(all);
    let runs = ranks.iter().map(|(times, ..)| times.len()).min().unwrap_or(0);
    let mut slowest: Vec<f64> =
        (0..runs).map(|run| ranks.iter().map(|(times, ..)| times[run]).fold(0.0, f64::max)).collect();
    slowest.sort_by(f64::total_cmp);
    let sum = |which: usize| ranks.iter().map(|(_, counts, ..)| counts[which]).sum::<u64>().to_string();
    let worst = ranks.iter().map(|&(_, _, worst, _)| worst).fold(0.0, f64::max);
    let schedule = &job.schedule;
    [
        job.group.case.name.to_owned(),
        schedule.cluster.to_string(),
        schedule.fabric.to_string(),
        schedule.spec.clone(),
        split.to_string(),
        "host".to_owned(),
        report.transport.clone(),
        report.registration.map_or("none", Way::name).to_owned(),
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

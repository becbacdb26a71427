//! `measure`: the points of an experiment on the GPUs of this machine.
//!
//! Points come in an order whose every prefix covers kernels, shapes and splits evenly; rows are kept as they end, and a
//! run that was stopped goes on from them.

use crate::checked;
use crate::cli::MeasureArgs;
use crate::engine::{self, Prepared, clock_name};
use crate::error::ExperimentError;
use crate::experiment::{Experiment, Group};
use crate::measure_row::{self as row, Measured, MeasuredRow, Reading, Setting};
use crate::plan::{Case, Source, SplitChoice};

use crate::lock::{Lock, drop_torn_row};
use crate::progress;
use crate::provenance::{ExperimentText, Output};
use crate::ranks::{carrier, check_nics, join, launched, link, spawn, starts_ranks, writable};
use crate::spawned;
use crate::table::Table;
use crate::timeline;
use rayon::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Instant;
use tilewire_hw::bootstrap::Session;
use tilewire_hw::cluster::{ClusterRunner, ClusterTime};
use tilewire_hw::device::HwError;
use tilewire_hw::gpu::Gpus;
use tilewire_hw::lower::{Mode, Program, lower, lower_cluster};
use tilewire_hw::measure::{Inputs, Load, inputs, time};
use tilewire_hw::party::Party;
use tilewire_hw::proxy::Pacing;
use tilewire_hw::reduced::{Part, reduced};
use tilewire_hw::remote::Link;
use tilewire_hw::timeline::TaskTime;
use tilewire_kernels::check::report;
use tilewire_kernels::schedule::BufferUse;
use tilewire_kernels::{Cluster, RoleSplit, Schedule, Spec, schedule_hash};
use tilewire_sim::Clock;

/// Timed runs of a point at most; of a reduced form, a third of it.
const REPEATS: usize = 21;
/// Outputs of a point that are compared with the reference; all are looked through for poison.
const SAMPLES: u64 = 64;
/// Host memory that inputs may take.
const MAX_INPUT_BYTES: u64 = 64 << 30;

/// A group that is ready to run.
struct Job {
    schedule: Schedule,
    spec: Spec,
    /// A GPU each.
    programs: Vec<Program>,
    inputs: Inputs,
    splits: Vec<RoleSplit>,
    /// Hazards, or that nobody looked.
    hazards: String,
}

/// How a run is made.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where compiled device code is kept.
    pub cache: Option<PathBuf>,
    /// Start no point that could end later than this after the start.
    pub budget_s: Option<f64>,
    /// Measure schedules with hazards too.
    pub unchecked: bool,
    /// Record the tasks of a run of each point.
    pub timelines: bool,
    /// How the nodes of a cluster are reached, where there are several.
    pub reach: Option<Reach>,
}

/// Nodes of their own.
#[derive(Clone, Debug)]
pub struct Reach {
    cluster: Cluster,
    /// GPU of the first rank of this node.
    first: usize,
    link: Link,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`]; nothing is written when the GPU, the file or a point of it is wrong.
pub fn run(args: &MeasureArgs) -> Result<String, ExperimentError> {
    let source = Source::new(args.data.data.as_deref(), args.data.machine.as_deref())?;
    let experiment = Experiment::read(&args.file, &source)?;
    let apart = apart(&experiment)?;
    if let (Some(given), None) = (args.ranks.given_of_wire(), apart) {
        let problem = "only with --device host, or nodes of their own: these ranks reach each other over NVLink, or \
                       by copies paced to a fabric";
        return Err(ExperimentError::refused(given, problem));
    }
    let root = args.output.clone().unwrap_or_else(|| Path::new("out").join(format!("{}-measured", experiment.name)));
    let mut options = Options {
        cache: args.cache.clone(),
        budget_s: args.budget_s,
        unchecked: args.unchecked,
        timelines: args.timelines,
        reach: None,
    };
    experiment.groups.iter().try_for_each(measurable)?;
    let ranks = gpus(&experiment)?;
    pacing(&experiment, args.ranks.spawn)?;
    if let Some(case) = apart {
        let (cluster, machine) = (case.target.cluster, &case.target.machine);
        check_nics(&args.ranks, cluster)?;
        if !link(&args.ranks, machine, 0)?.wire.carries(machine.fabric) {
            let carrier = carrier(&args.ranks, machine).name();
            let problem = format!("{carrier} does not order what schedules for {} rely on", machine.fabric);
            return Err(ExperimentError::refused("--transport", problem));
        }
    }
    if starts_ranks(&args.ranks)? {
        writable(&root)?;
        let _lock = Lock::take(&root)?;
        return spawn(&args.ranks, ranks).map(|()| String::new());
    }
    // One rank is a process as it is, whoever started it.
    let place = if ranks == 1 && !args.ranks.spawn { None } else { launched(ranks)? };
    if let (Some(case), None) = (apart, place) {
        let problem =
            "several nodes take a process for each rank: mpirun, srun, or --spawn with all of them on this host";
        return Err(ExperimentError::refused(case.to_string(), problem));
    }
    let session = place.map(|place| join(&args.ranks, place)).transpose()?;
    if let (Some(case), Some(place)) = (apart, place) {
        let (cluster, machine) = (case.target.cluster, &case.target.machine);
        let node = cluster.rank(place.rank as usize).node;
        // Ranks of --spawn share the host, whatever their node.
        let first = if spawned::is_rank() { usize::from(node) * usize::from(cluster.gpus_per_node) } else { 0 };
        options.reach = Some(Reach { cluster, first, link: link(&args.ranks, machine, node)? });
    }
    let leads = session.as_ref().is_none_or(|session| session.place().rank == 0);
    let points = execute(&experiment, &source, &root, &options, session)?;
    if !leads {
        return Ok(String::new());
    }
    let file = root.join("rows.csv");
    let rows = row::read(&file)?;
    let text =
        if args.json { json_text(&experiment, points, &rows, &file) } else { text(&experiment, points, &rows, &file) };
    if progress::interrupted() && rows.len() < points {
        crate::print(&text)?;
        return Err(ExperimentError::Interrupted { done: rows.len(), points });
    }
    let wrong = rows.iter().filter(|row| !row.is_ok()).count();
    if wrong > 0 {
        crate::print(&text)?;
        let what = format!(
            "{wrong} rows with wrong outputs or errors; see columns status and outputs_wrong of {}",
            file.display()
        );
        return Err(ExperimentError::Finding(what));
    }
    Ok(text)
}

/// Measures the points of an experiment that `root` has no row of; returns how many it has in all. With a session every
/// rank is a process and rank 0 writes the rows.
///
/// # Errors
/// As [`run`].
pub fn execute(
    experiment: &Experiment,
    source: &Source,
    root: &Path,
    options: &Options,
    session: Option<Session>,
) -> Result<usize, ExperimentError> {
    let begin = Instant::now();
    experiment.groups.iter().try_for_each(measurable)?;
    let count = gpus(experiment)?;
    let pacing = pacing(experiment, session.is_some())?;
    let cache = options.cache.clone().unwrap_or_else(default_cache);
    let gpu = match session {
        Some(session) => {
            let (per_node, cluster, first, link) = match &options.reach {
                Some(Reach { cluster, first, link }) => {
                    (usize::from(cluster.gpus_per_node), *cluster, *first, Some(link.clone()))
                }
                None => (count, Cluster { nodes: 1, gpus_per_node: count as u16 }, 0, None),
            };
            Party::new(session, per_node).and_then(|party| Gpus::join(&cache, party, cluster, first, link))
        }
        None => Gpus::open(&cache, count, pacing),
    }
    .map_err(|error| match error {
        HwError::Wire(source) => ExperimentError::Host { case: "connecting the nodes".to_owned(), source: *source },
        error => ExperimentError::NoHardware(error),
    })?;
    let setting = Setting { facts: gpu.facts.clone(), pacing: pacing_text(pacing), date: row::today() };
    let jobs = jobs(experiment, gpu.sms(), options.unchecked)?;
    let points = order(experiment, &jobs);
    let (mut kept, mut _lock) = (None, None);
    if gpu.party().is_none_or(|party| party.rank() == 0) {
        let file = root.join("rows.csv");
        if !spawned::is_rank() {
            _lock = Some(Lock::take(root)?);
        }
        drop_torn_row(&file)?;
        let known = if file.exists() {
            same_run(root, experiment, source)?;
            let known = resumed(&file, &setting)?;
            if options.timelines {
                timeline::all_there(root, known.iter().filter(|row| row.is_ok()).map(MeasuredRow::fields))?;
            }
            known
        } else {
            Vec::new()
        };
        output(experiment, source, root)?;
        kept = Some(Kept::open(file, known)?);
    }
    let plan =
        Plan { experiment, gpu: &gpu, jobs: &jobs, points: &points, timelines: options.timelines.then_some(root) };
    measure(&plan, kept, &setting, |measured| {
        options.budget_s.is_some_and(|budget| begin.elapsed().as_secs_f64() + measured > budget)
    })?;
    Ok(points.len())
}

/// The first case with nodes of their own, each rank a GPU; none where all GPUs are on this host.
///
/// # Errors
/// [`ExperimentError::Refused`] for nodes of their own beside another cluster or machine.
fn apart(experiment: &Experiment) -> Result<Option<&Case>, ExperimentError> {
    let is_apart = |group: &&Group| {
        let target = &group.case.target;
        mode(group) == Mode::Cluster && target.cluster.nodes > 1 && !target.machine.emulated
    };
    let Some(first) = experiment.groups.iter().find(is_apart) else { return Ok(None) };
    let target = &first.case.target;
    let same = |group: &Group| {
        group.case.target.cluster == target.cluster && group.case.target.machine.name == target.machine.name
    };
    if let Some(other) = experiment.groups.iter().find(|group| !same(group)) {
        let problem = format!("beside {target}; nodes of their own take one cluster and machine per experiment");
        return Err(ExperimentError::refused(other.case.to_string(), problem));
    }
    Ok(Some(&first.case))
}

/// The fabric that an experiment emulates between GPUs of this host: that of its machine.
fn pacing(experiment: &Experiment, processes: bool) -> Result<Option<Pacing>, ExperimentError> {
    let emulated = |group: &&Group| {
        mode(group) == Mode::Cluster && group.case.target.cluster.nodes > 1 && group.case.target.machine.emulated
    };
    let Some(first) = experiment.groups.iter().find(emulated) else { return Ok(None) };
    let refuse = |problem: &str| Err(ExperimentError::refused(first.case.to_string(), problem));
    if processes {
        return refuse(
            "emulated nodes with ranks that are processes; allowed: one process, without --spawn or a launcher",
        );
    }
    let machine = &first.case.target.machine;
    if experiment.groups.iter().any(|group| group.case.target.machine.name != machine.name) {
        return refuse("emulated nodes beside another machine; allowed: one machine per experiment");
    }
    Ok(Some(Pacing {
        latency_ns: (machine.network.latency_us.value * 1e3) as u64,
        bytes_per_s: (machine.nic.rails.value * machine.nic.rail_gbs.value * 1e9) as u64,
        messages_per_s: (1e9 / machine.nic.message_ns.value.max(1.0)) as u64,
    }))
}

/// What a row says of it.
fn pacing_text(pacing: Option<Pacing>) -> String {
    pacing.map_or_else(
        || "none".into(),
        |Pacing { latency_ns, bytes_per_s, messages_per_s }| {
            let (latency_us, gbs, rate) =
                (latency_ns as f64 * 1e-3, bytes_per_s as f64 * 1e-9, messages_per_s as f64 * 1e-6);
            format!("emulated: {latency_us} us, {gbs} GB/s and {rate:.1} M messages/s per rank")
        },
    )
}

/// Refuses what has no measurement.
fn measurable(group: &Group) -> Result<(), ExperimentError> {
    let case = &group.case;
    let refuse = |problem: String| Err(ExperimentError::refused(case.to_string(), problem));
    if case.protocol_name() != "fair" {
        return refuse("protocol \"published\", allowed: \"fair\", every run with fresh flags".into());
    }
    if case.noise {
        return refuse("noise = true, allowed: false; a card brings its own".into());
    }
    Ok(())
}

/// How ranks lie on GPUs.
fn mode(group: &Group) -> Mode {
    if group.case.mode() == "mirror" { Mode::Mirror } else { Mode::Cluster }
}

/// GPUs that an experiment takes.
fn gpus(experiment: &Experiment) -> Result<usize, ExperimentError> {
    let of = |group: &Group| if mode(group) == Mode::Mirror { 1 } else { group.case.target.cluster.ranks() };
    let mut counts = experiment.groups.iter().map(|group| (of(group), group));
    let first = counts.next().map_or(1, |(count, _)| count);
    match counts.find(|&(count, _)| count != first) {
        Some((count, group)) => {
            let problem = format!("takes {count} GPUs, the points before it {first}; an experiment takes one number");
            Err(ExperimentError::refused(group.case.to_string(), problem))
        }
        None => Ok(first),
    }
}

fn default_cache() -> PathBuf {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    base.unwrap_or_else(std::env::temp_dir).join("tilewire")
}

/// Builds, checks and lowers every schedule, and draws its inputs.
fn jobs(experiment: &Experiment, on_card: u32, unchecked: bool) -> Result<Vec<Job>, ExperimentError> {
    let bar = progress::bar(experiment.groups.len() as u64, "preparing");
    let job = |group: &Group| {
        let case = &group.case;
        let sms = case.target.machine.gpu.sms.value as u32;
        if sms != on_card {
            let problem =
                format!("{} has {sms} SMs, the GPU here {on_card}; name another machine", case.target.machine.name);
            return Err(ExperimentError::refused(case.to_string(), problem));
        }
        let schedule = engine::build(case)?;
        let hazards = hazards(group, &schedule, unchecked)?;
        let splits = splits(group)?;
        let at = |source| ExperimentError::Hardware { case: case.to_string(), source };
        let programs = match mode(group) {
            Mode::Cluster => lower_cluster(&schedule, &splits[0], on_card),
            mode => lower(&schedule, mode, &splits[0], on_card).map(|program| vec![program]),
        }
        .map_err(at)?;
        for split in &splits {
            programs[0].clone().apply_split(&schedule, split, on_card).map_err(at)?;
        }
        let spec = case.spec();
        let bytes = schedule.buffers.iter().filter(|b| b.usage == BufferUse::Input).map(|b| b.bytes).sum::<u64>();
        let all = bytes * schedule.cluster.ranks() as u64 * experiment.groups.len() as u64;
        if all > MAX_INPUT_BYTES {
            let problem =
                format!("about {} GiB of inputs, allowed: {}; split the experiment", all >> 30, MAX_INPUT_BYTES >> 30);
            return Err(ExperimentError::refused(case.to_string(), problem));
        }
        let inputs = inputs(&schedule, case.kernel, &spec, mode(group), case.seed);
        bar.inc(1);
        Ok(Job { schedule, spec, programs, inputs, splits, hazards })
    };
    let jobs: Vec<Result<Job, ExperimentError>> = experiment.groups.par_iter().map(job).collect();
    bar.finish_and_clear();
    jobs.into_iter().collect()
}

pub(crate) fn hazards(group: &Group, schedule: &Schedule, unchecked: bool) -> Result<String, ExperimentError> {
    if unchecked {
        return Ok("unchecked".into());
    }
    let report = report(schedule, &checked::limits(&group.case.target.machine), None);
    let Some(first) = report.findings.first() else { return Ok("0".into()) };
    Err(ExperimentError::Finding(format!(
        "{}: {} fatal findings, {} hazards; the first: {first}\n  `tilewire check` lists them; --unchecked measures all the same",
        group.case, report.fatal, report.hazards
    )))
}

pub(crate) fn splits(group: &Group) -> Result<Vec<RoleSplit>, ExperimentError> {
    let split = |split: &SplitChoice| match split {
        SplitChoice::Fixed(split) => Ok(*split),
        SplitChoice::Auto => Prepared::new(&group.case)?.split(&group.case),
    };
    group.splits.iter().map(split).collect()
}

/// Group and split of every point: kernels alternate, then their shapes, and splits come coarse before fine.
fn order(experiment: &Experiment, jobs: &[Job]) -> Vec<(usize, usize)> {
    let names: Vec<&str> = experiment.groups.iter().map(|group| group.case.name).collect();
    let counts: Vec<usize> = jobs.iter().map(|job| job.splits.len()).collect();
    even_order(&names, &counts)
}

fn even_order(kernels: &[&str], splits: &[usize]) -> Vec<(usize, usize)> {
    let mut turn: BTreeMap<&str, usize> = BTreeMap::new();
    let mut groups: Vec<(usize, &str, usize)> = kernels
        .iter()
        .enumerate()
        .map(|(g, &kernel)| {
            let turn = turn.entry(kernel).or_default();
            *turn += 1;
            (*turn, kernel, g)
        })
        .collect();
    groups.sort_unstable();
    let coarse_first: Vec<Vec<usize>> = splits.iter().map(|&n| bit_reversed(n)).collect();
    let rounds = splits.iter().copied().max().unwrap_or(0);
    let at = |round: usize, g: usize| coarse_first[g].get(round).map(|&split| (g, split));
    (0..rounds).flat_map(|round| groups.iter().filter_map(move |&(.., g)| at(round, g))).collect()
}

/// The numbers below `n`, so that every prefix is spread over all of them.
fn bit_reversed(n: usize) -> Vec<usize> {
    let bits = usize::BITS - n.saturating_sub(1).leading_zeros();
    let reverse = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
    (0..1_usize << bits).map(reverse).filter(|&i| i < n).collect()
}

/// The rows of a run that was stopped.
fn resumed(file: &Path, setting: &Setting) -> Result<Vec<MeasuredRow>, ExperimentError> {
    let rows = row::read(file)?;
    let facts = &setting.facts;
    let revision = crate::provenance::REVISION.unwrap_or_default();
    let now = [
        ("pacing", setting.pacing.as_str()),
        ("gpu", &facts.gpu),
        ("driver", &facts.driver),
        ("nvrtc", &facts.nvrtc),
        ("cubin", &facts.cubin),
        ("transport", &facts.transport),
        ("registration", &facts.registration),
        ("revision", revision),
    ];
    for row in &rows {
        for (name, value) in now {
            if row.text(name) != value {
                let problem =
                    format!("{name} \"{}\", here \"{value}\"; choose another directory with -o", row.text(name));
                return Err(ExperimentError::refused(row.place.clone(), problem));
            }
        }
    }
    Ok(rows)
}

/// Refuses to go on in a directory whose rows were measured for another experiment or with another machine file.
pub(crate) fn same_run(root: &Path, experiment: &Experiment, source: &Source) -> Result<(), ExperimentError> {
    let mut files = vec![(root.join("experiment.toml"), experiment.text.clone())];
    for group in &experiment.groups {
        let machine = &group.case.target.machine;
        files.push((root.join(format!("machines/{}.toml", machine.name)), source.machine_text(machine)?));
    }
    for (file, now) in files {
        if std::fs::read_to_string(&file).is_ok_and(|text| text != now) {
            let problem = "is not what this run would use; choose another directory with -o";
            return Err(ExperimentError::refused(file.display().to_string(), problem));
        }
    }
    Ok(())
}

fn output(experiment: &Experiment, source: &Source, root: &Path) -> Result<Output, ExperimentError> {
    let machines: BTreeMap<&str, _> =
        experiment.groups.iter().map(|g| (g.case.target.machine.name.as_str(), &g.case.target.machine)).collect();
    let text = ExperimentText { name: &experiment.name, text: &experiment.text };
    let machines: Vec<_> = machines.into_values().collect();
    Output::create(root, "measure", Some(experiment.seed), Some(text), source, &machines, &["rows.csv"])
}

/// The rows of a run, in the process that writes them.
struct Kept {
    file: PathBuf,
    known: Vec<MeasuredRow>,
    writer: csv::Writer<File>,
}

impl Kept {
    fn open(file: PathBuf, known: Vec<MeasuredRow>) -> Result<Self, ExperimentError> {
        let fresh = !file.exists();
        let open = OpenOptions::new().create(true).append(true).open(&file);
        let open = open.map_err(|error| ExperimentError::write(&file, error))?;
        let writer = csv::WriterBuilder::new().has_headers(false).from_writer(open);
        let mut kept = Self { file, known, writer };
        if fresh {
            kept.write(&row::columns().iter().map(|name| (name.clone(), name.clone())).collect())?;
        }
        Ok(kept)
    }

    fn write(&mut self, fields: &BTreeMap<String, String>) -> Result<(), ExperimentError> {
        let columns = row::columns();
        let record = columns.iter().map(|name| fields.get(name).map_or("", String::as_str));
        self.writer.write_record(record).map_err(|error| ExperimentError::write(&self.file, error))?;
        self.writer.flush().map_err(|error| ExperimentError::write(&self.file, error))
    }
}

/// What becomes of a point.
#[derive(Clone, Copy, PartialEq)]
enum Turn {
    Skip = 0,
    Go = 1,
    Stop = 2,
}

/// What is measured, and on what.
struct Plan<'a> {
    experiment: &'a Experiment,
    gpu: &'a Gpus,
    jobs: &'a [Job],
    /// Group and split.
    points: &'a [(usize, usize)],
    /// Directory whose folder takes timelines, if they are recorded.
    timelines: Option<&'a Path>,
}

/// Measures what is not known yet. Where ranks are processes, the one that keeps the rows decides for all.
fn measure(
    plan: &Plan<'_>,
    mut kept: Option<Kept>,
    setting: &Setting,
    over_budget: impl Fn(f64) -> bool,
) -> Result<(), ExperimentError> {
    let Plan { experiment, gpu, jobs, points, timelines } = *plan;
    progress::catch_interrupt(kept.is_some() && !spawned::is_rank());
    let bar = if kept.is_some() { progress::bar(points.len() as u64, "measuring") } else { progress::hidden() };
    let mut runners: Vec<Option<ClusterRunner<'_>>> = jobs.iter().map(|_| None).collect();
    let mut longest_s = 0.0_f64;
    for &(g, s) in points {
        let (job, case) = (&jobs[g], &experiment.groups[g].case);
        let at = |source| ExperimentError::Hardware { case: format!("{case} [{}]", job.splits[s]), source };
        let clock = case.clock.unwrap_or_default();
        let point = row::point(case, &job.splits[s], clock_name(clock));
        let turn = if kept.as_ref().is_some_and(|kept| kept.known.iter().any(|row| row.is_at(&point))) {
            Turn::Skip
        } else if progress::interrupted() || over_budget(longest_s) {
            Turn::Stop
        } else {
            Turn::Go
        };
        let turn = gpu.party().map_or_else(|| Ok(vec![turn as u8]), |party| party.told(&[turn as u8])).map_err(at)?;
        if turn == [Turn::Skip as u8] {
            bar.inc(1);
            continue;
        }
        if turn == [Turn::Stop as u8] {
            break;
        }
        let begin = Instant::now();
        let mut recorded = None;
        let record = timelines.is_some().then_some(&mut recorded);
        let outcome = measure_point(gpu, job, case.kernel, &job.splits[s], &mut runners[g], clock, record);
        let hash = schedule_hash(&job.schedule, &job.splits[s]).to_string();
        let words = outcome.as_ref().map(Clone::clone).map_err(ToString::to_string);
        let nodes = case.target.cluster.nodes;
        if let Some(kept) = &mut kept {
            let fields = row::fields(setting, &point, &words, nodes, (&job.hazards, &hash));
            // Before its row: a run that goes on from the rows lacks no timeline.
            if let (Some(root), Some((time, tasks))) = (timelines, &recorded) {
                let mut fields = fields.clone();
                fields.extend([
                    ("device".to_owned(), "gpu".to_owned()),
                    ("recorded_time_us".to_owned(), format!("{:.3}", time.time_us)),
                ]);
                timeline::write(&timeline::path(root, &fields), &fields, &job.schedule, tasks)?;
            }
            kept.write(&fields)?;
        }
        // A failed launch takes the driver's context with it.
        outcome.map_err(at)?;
        longest_s = longest_s.max(begin.elapsed().as_secs_f64());
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

fn measure_point<'a>(
    gpu: &'a Gpus,
    job: &'a Job,
    kernel: &dyn tilewire_kernels::Kernel,
    split: &RoleSplit,
    slot: &mut Option<ClusterRunner<'a>>,
    clock: Clock,
    record: Option<&mut Option<(ClusterTime, Vec<TaskTime>)>>,
) -> Result<Measured, HwError> {
    let mut programs = job.programs.clone();
    programs.iter_mut().try_for_each(|program| program.apply_split(&job.schedule, split, gpu.sms()))?;
    let runner = if let Some(runner) = slot {
        runner.replace(programs.clone())?;
        runner.poison(&job.inputs)?;
        runner
    } else {
        let runner = slot.insert(gpu.runner(&job.schedule, programs.clone())?);
        runner.load(&job.inputs)?;
        runner
    };
    let load = match clock {
        Clock::Sustained => Load::Sustained,
        Clock::Cold => Load::Cold,
    };
    let whole = time(runner, load, REPEATS)?;
    if let Some(record) = record {
        // Right behind the timed runs, so that the card is as warm; what follows compares the outputs of this run.
        *record = Some(runner.recorded()?);
    }
    let compared = runner.compare_samples(kernel, &job.spec, &job.inputs, SAMPLES)?;
    let mut part = |part| {
        // With a GPU per rank the parts of a program still write to peers: not what the simulator means by them.
        let [program] = &programs[..] else { return Ok(None) };
        runner.replace(vec![reduced(program, part)])?;
        Ok::<_, HwError>(Some(Reading::new(&time(runner, load, REPEATS / 3)?.runs)))
    };
    Ok(Measured {
        whole: Reading::new(&whole.runs),
        compute: part(Part::ComputeOnly)?,
        comm: part(Part::CommOnly)?,
        warm_up: whole.warm_up,
        repeats: whole.runs.len(),
        useful_flops: job.schedule.useful_flops,
        put_bytes: programs[0].puts.iter().flatten().map(|put| put.bytes).sum(),
        outputs: compared.map(|compared| (compared.elements, compared.wrong, compared.worst)),
    })
}

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

fn text(experiment: &Experiment, points: usize, rows: &[MeasuredRow], file: &Path) -> String {
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
        let _ = write!(text, "\n{}", table.without_constants(&["kernel", "cluster"]).render(2));
    }
    let _ = writeln!(text, "\n{}", progress::done(rows.len(), points));
    let _ = writeln!(text, "wrote {}", file.display());
    text
}

fn json_text(experiment: &Experiment, points: usize, rows: &[MeasuredRow], file: &Path) -> String {
    let best: Vec<_> = best(experiment, rows)
        .into_iter()
        .map(|(group, row)| json!({ "case": group.case.to_string(), "split": row.split().ok(), "time_us": row.number("time_us") }))
        .collect();
    json!({ "experiment": experiment.name, "points": points, "rows": rows.len(), "best": best, "file": file })
        .to_string()
        + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prefix_covers_kernels_shapes_and_splits() {
        let order = even_order(&["a", "a", "b", "b"], &[4, 4, 4, 2]);
        assert_eq!(order[..4], [(0, 0), (2, 0), (1, 0), (3, 0)], "kernels alternate before a split comes twice");
        assert_eq!(order[4..8], [(0, 2), (2, 2), (1, 2), (3, 1)], "the next split is far from the first");
        let mut all = order.clone();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 14, "every point once: {order:?}");
    }

    #[test]
    fn splits_come_coarse_before_fine() {
        assert!(bit_reversed(0).is_empty());
        assert_eq!(bit_reversed(1), [0]);
        assert_eq!(bit_reversed(6), [0, 4, 2, 1, 5, 3]);
    }
}

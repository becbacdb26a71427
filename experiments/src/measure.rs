//! `measure`: the points of an experiment on the GPUs of this machine.
//!
//! Points come in an order whose every prefix covers kernels, shapes and splits evenly; rows are kept as they end, and a
//! run that was stopped goes on from them.

mod jobs;
mod rows;
mod summary;

pub use jobs::{hazards, splits};
pub use rows::same_run;

use crate::cli::MeasureArgs;
use crate::engine::clock_name;
use crate::error::ExperimentError;
use crate::experiment::{Experiment, Group};
use crate::lock::{Lock, drop_torn_row};
use crate::measure_row::{self as row, Measured, MeasuredRow, Reading, Setting};
use crate::plan::{Case, Source};
use crate::progress;
use crate::ranks::{carrier, check_nics, join, launched, link, spawn, starts_ranks, writable};
use crate::spawned;
use crate::timeline;
use jobs::{Job, jobs, order};
use rows::{Kept, output, resumed};
use std::path::{Path, PathBuf};
use std::time::Instant;
use summary::{json_text, text};
use tilewire_hw::bootstrap::Session;
use tilewire_hw::cluster::{ClusterRunner, ClusterTime};
use tilewire_hw::device::HwError;
use tilewire_hw::gpu::Gpus;
use tilewire_hw::lower::Mode;
use tilewire_hw::measure::{Load, time};
use tilewire_hw::party::Party;
use tilewire_hw::proxy::Pacing;
use tilewire_hw::reduced::{Part, reduced};
use tilewire_hw::remote::Link;
use tilewire_hw::timeline::TaskTime;
use tilewire_kernels::{Cluster, RoleSplit, schedule_hash};
use tilewire_sim::Clock;

/// Timed runs of a point at most; of a reduced form, a third of it.
const REPEATS: usize = 21;
/// Outputs of a point that are compared with the reference; all are looked through for poison.
const SAMPLES: u64 = 64;
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
        return Err(ExperimentError::Interrupted { kept: "their rows are kept", done: rows.len(), points });
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

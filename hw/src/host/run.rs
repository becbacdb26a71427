//! Runs of a rank: inputs, barrier, CTAs and proxies until all is complete, barrier, comparison.

use super::HostError;
use super::cta::{Recorded, RoleState, Run, Window, Worker};
use super::memory::Reach;
use super::plan::Plan;
use super::watch::Watched;
use crate::bootstrap::{Session, local};
use crate::timeline::TaskTime;
use crate::transport::arrivals::Arrivals;
use crate::transport::fifo::Fifo;
use crate::transport::proxy::{Proxy, ProxyConfig, Served};
use crate::transport::registration::Path;
use crate::transport::segment::{Layout, Segment};
use crate::transport::{Order, Told, Transport, TransportError};
use crate::values::engine::claim::{cta_count, reaches};
use crate::values::random::seed_for;
use crate::values::{Config, ExecError, Report, judge};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tilewire_kernels::{Kernel, RoleSplit, Schedule, Spec};

/// How to run.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// CTAs of the roles that take theirs from the split.
    pub split: RoleSplit,
    /// SMs of a GPU, for roles that take them all.
    pub sms: u32,
    /// Seeds the inputs.
    pub seed: u64,
    /// Runs in a row, in alternating banks.
    pub runs: u32,
    /// Commands that a FIFO holds.
    pub fifo_depth: usize,
    /// How proxies serve.
    pub proxy: ProxyConfig,
    /// How long nothing may move before the run counts as stuck.
    pub patience: Duration,
    /// Record the tasks of the last run.
    pub record: bool,
}

impl Default for HostConfig {
    /// Two CTAs per role, two runs, FIFOs of 64 commands, ten seconds.
    fn default() -> Self {
        Self {
            split: RoleSplit { compute: 2, intra_comm: 2, inter_send: 2, inter_reduce: 2 },
            sms: 8,
            seed: 0,
            runs: 2,
            fifo_depth: 64,
            proxy: ProxyConfig::default(),
            patience: Duration::from_secs(10),
            record: false,
        }
    }
}

/// What runs: a schedule with the kernel that judges it.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    /// The schedule.
    pub schedule: &'a Schedule,
    /// Its kernel.
    pub kernel: &'a dyn Kernel,
    /// What it was built from.
    pub spec: &'a Spec,
    /// How.
    pub config: HostConfig,
}

/// A rank's connections to ranks of other nodes.
pub struct Wires {
    /// How receivers learn of puts.
    pub told: Told,
    /// One for each proxy thread, at least one.
    pub transports: Vec<Box<dyn Transport>>,
    /// How the NIC, or what stands for it, comes to the rank's memory.
    pub registration: Path,
}

impl Wires {
    /// Connections that tell of puts as the schedule says.
    pub fn new(order: Order, transports: Vec<Box<dyn Transport>>) -> Self {
        Self { told: Told { order, by_immediates: false }, transports, registration: Path::Host }
    }

    /// For records: the transport, and how it tells if that is not the schedule's choice.
    pub fn name(&self) -> String {
        let name = self.transports.first().map_or_else(String::new, |wire| wire.name());
        let chosen = self.told.by_immediates && self.registration != Path::Bounce;
        if chosen { format!("{name}, arrivals by immediates") } else { name }
    }
}

/// What a rank has to tell after its runs.
#[derive(Clone, Debug, Default)]
pub struct RankReport {
    /// Tasks executed and elements compared, over all runs.
    pub values: Report,
    /// Time of each run on this rank, from the barrier before it until its last put was complete and noticed.
    pub times_us: Vec<f64>,
    /// What its proxies did, summed.
    pub served: Served,
    /// Its transport.
    pub transport: String,
    /// Tasks of the last run, if they were recorded, from the barrier before it; in the order in which they were taken.
    pub timeline: Vec<TaskTime>,
    /// How the transport comes to its memory.
    pub registration: Option<Path>,
}

/// Runs a rank among others. `segments` holds, by rank number, those of the rank's own node; all ranks call this with
/// the same setup.
///
/// # Errors
/// [`HostError`]; the other ranks learn of it and end too.
pub fn run_rank(
    setup: &Setup<'_>,
    session: &Session,
    segments: Vec<Option<Arc<Segment>>>,
    mut wires: Wires,
) -> Result<RankReport, HostError> {
    let result = run_all(setup, session, segments, &mut wires);
    if let Err(error) = &result {
        session.abort(&error.to_string());
    }
    result
}

fn run_all(
    setup: &Setup<'_>,
    session: &Session,
    segments: Vec<Option<Arc<Segment>>>,
    wires: &mut Wires,
) -> Result<RankReport, HostError> {
    let Setup { schedule, kernel, spec, config } = *setup;
    let number = session.place().rank as usize;
    let rank = schedule.cluster.rank(number);
    let layout = layout(schedule)?;
    let plan = Plan::new(schedule, &layout, rank, wires.told)?;
    let reach = Reach { cluster: schedule.cluster, layout, segments };
    let mut report =
        RankReport { transport: wires.name(), registration: Some(wires.registration), ..Default::default() };
    for run in 0..config.runs {
        let seed = seed_for(config.seed, run, "values");
        reach.poison(schedule, number, run == 0);
        judge::for_each_input(schedule, kernel, spec, seed, rank, |region, values| {
            reach.fill(number, region, values);
        })?;
        session.barrier()?;
        let begin = Instant::now();
        let (served, tasks) = run_once(setup, session, &plan, &reach, wires, run)?;
        report.timeline = tasks;
        report.times_us.push(begin.elapsed().as_secs_f64() * 1e6);
        report.served.add(&served);
        session.barrier()?;
        // After the barrier nobody raises a word of this bank any more, and the next run uses the other one.
        reach.of(number).clear(run % 2);
        let mut mismatch = None;
        judge::compare(&reach, schedule, kernel, spec, seed, rank, (&mut report.values, &mut mismatch))?;
        report.values.runs += 1;
        report.values.tasks += plan.tasks.iter().map(|tasks| tasks.len() as u64).sum::<u64>();
        if let Some(mut mismatch) = mismatch {
            (mismatch.run, mismatch.seed) = (run, config.seed);
            return Err(ExecError::Wrong(Box::new(mismatch), Vec::new()).into());
        }
    }
    // Nobody leaves while another rank still needs it.
    session.barrier()?;
    Ok(report)
}

pub(super) fn layout(schedule: &Schedule) -> Result<Arc<Layout>, HostError> {
    let too_many = || HostError::Unsupported { what: "schedules with more than 2^31 flags per bank".to_owned() };
    Layout::new(schedule).map(Arc::new).ok_or_else(too_many)
}

fn run_once(
    setup: &Setup<'_>,
    session: &Session,
    plan: &Plan,
    reach: &Reach,
    wires: &mut Wires,
    number: u32,
) -> Result<(Served, Vec<TaskTime>), HostError> {
    let Setup { schedule, config, .. } = *setup;
    let pairs: Vec<(usize, usize)> = schedule.role_indices().collect();
    let workers = workers(schedule, &config, plan, &pairs)?;
    let mut launches = vec![0; schedule.launches.len()];
    for (&(launch, _), tasks) in pairs.iter().zip(&plan.tasks) {
        launches[launch] += tasks.len();
    }
    let role = |tasks: &Vec<_>| RoleState {
        next: AtomicUsize::new(0),
        window: Mutex::new(Window { cursor: 0, claimed: vec![false; tasks.len()] }),
    };
    let run = Run {
        schedule,
        plan,
        reach,
        told: wires.told,
        bank: number % 2,
        pairs: &pairs,
        roles: plan.tasks.iter().map(role).collect(),
        launches: launches.into_iter().map(AtomicUsize::new).collect(),
        fifos: wires.transports.iter().map(|_| Fifo::new(config.fifo_depth)).collect(),
        stop: session.stop(),
        progress: AtomicU64::new(0),
        pushed: AtomicU64::new(0),
        puts: AtomicU32::new(0),
        ctas_left: AtomicUsize::new(workers.len()),
        patience: config.proxy.patience,
        tasks: (config.record && number + 1 == config.runs)
            .then(|| Recorded { begin: Instant::now(), tasks: Mutex::default() }),
    };
    let arrivals = Arrivals::new(run.bank, plan.incoming.immediates.clone());
    let (done, end) = (AtomicU64::new(0), AtomicBool::new(false));
    let served = Mutex::new(Served::default());
    let failure: Mutex<Option<TransportError>> = Mutex::new(None);
    let words = &**reach.of(schedule.cluster.number(plan.rank));
    let watched = std::thread::scope(|scope| {
        for (transport, fifo) in wires.transports.iter_mut().zip(&run.fifos) {
            let (run, arrivals, done, end, served, failure) = (&run, &arrivals, &done, &end, &served, &failure);
            let proxy = Proxy {
                fifo,
                words,
                arrivals,
                stop: run.stop,
                end,
                done,
                progress: &run.progress,
                config: config.proxy,
            };
            scope.spawn(move || match proxy.serve(transport.as_mut()) {
                Ok(part) => served.lock().unwrap_or_else(PoisonError::into_inner).add(&part),
                Err(error) => {
                    let text = format!("transport: {error}");
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    session.abort(&text);
                }
            });
        }
        for worker in &workers {
            let run = &run;
            scope.spawn(move || run.work(worker));
        }
        let watched = run.watch(&done, config.patience);
        if let Watched::Stuck = watched {
            session.abort(&format!("stuck: nothing moved for {} s", config.patience.as_secs_f64()));
        }
        end.store(true, Ordering::Release);
        watched
    });
    let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    let blocked = run.blocked(&workers);
    match watched {
        _ if failure.is_some() => Err(failure.map_or_else(|| unreachable!("some"), HostError::from)),
        Watched::Complete => {
            let recorded = run.tasks.map(|recorded| recorded.tasks.into_inner());
            let mut tasks = recorded.map_or_else(Vec::new, |tasks| tasks.unwrap_or_else(PoisonError::into_inner));
            tasks.sort_unstable_by_key(|t| (t.taken, t.role, t.task));
            Ok((served.into_inner().unwrap_or_else(PoisonError::into_inner), tasks))
        }
        Watched::Stuck if blocked.is_empty() => Err(run.pending(done.load(Ordering::Acquire))),
        Watched::Stuck => {
            let left = run.launches.iter().map(|left| left.load(Ordering::Acquire) as u64).sum();
            let puts = run.pushed.load(Ordering::Acquire) - done.load(Ordering::Acquire);
            Err(ExecError::Stuck { run: number, seed: config.seed, left, puts, blocked }.into())
        }
        Watched::Stopped => {
            let error = session.failure().unwrap_or_else(|| unreachable!("a stop has a cause"));
            Err(HostError::Peer { error, blocked })
        }
    }
}

/// CTAs of all launches, lane by lane.
fn workers(
    schedule: &Schedule,
    config: &HostConfig,
    plan: &Plan,
    pairs: &[(usize, usize)],
) -> Result<Vec<Worker>, ExecError> {
    let counts = Config { split: config.split, sms: config.sms, ..Config::default() };
    let mut workers = Vec::new();
    let mut blocks = vec![0; schedule.launches.len()];
    for (home, &(l, r)) in pairs.iter().enumerate() {
        let launch = &schedule.launches[l];
        let ctas = cta_count(launch, r, &counts);
        let first_block = blocks[l];
        blocks[l] += ctas;
        let of = ctas * launch.roles[r].lanes.max(1);
        let worker = |index: u32| {
            let (cta, lane) = (index % ctas, index / ctas);
            Worker { home, cta, block: first_block + cta, lane, index, of, waiting: Mutex::new(None) }
        };
        workers.extend((0..of).map(worker));
        let fed = (0..launch.roles.len()).any(|from| reaches(schedule, l, from, r, &counts));
        if !plan.tasks[home].is_empty() && !fed {
            let (launch, role) = (launch.name.clone(), launch.roles[r].kind);
            return Err(ExecError::NoCtas { launch, role, split: config.split.to_string() });
        }
    }
    Ok(workers)
}

/// Runs all ranks of a schedule as threads of this process. `wires` connects a rank, given the segments of all.
///
/// # Errors
/// [`HostError`], per rank, in order of ranks.
pub fn run_threads(
    setup: &Setup<'_>,
    wires: impl Fn(usize, &Layout, &[Arc<Segment>]) -> Result<Wires, HostError> + Sync,
) -> Result<Vec<Result<RankReport, HostError>>, HostError> {
    let cluster = setup.schedule.cluster;
    let layout = layout(setup.schedule)?;
    let segment = |rank| Segment::private(&layout).map(Arc::new).map_err(|error| HostError::Segment { rank, error });
    let segments = (0..cluster.ranks()).map(segment).collect::<Result<Vec<_>, _>>()?;
    let sessions = local(cluster.ranks() as u32)?;
    Ok(std::thread::scope(|scope| {
        let (segments, wires, layout) = (&segments, &wires, &layout);
        let ranks: Vec<_> = sessions
            .into_iter()
            .enumerate()
            .map(|(rank, session)| {
                scope.spawn(move || {
                    let node = cluster.rank(rank).node;
                    let near = |other: usize| cluster.rank(other).node == node;
                    let reach = segments.iter().enumerate().map(|(i, s)| near(i).then(|| s.clone())).collect();
                    let wires = wires(rank, layout, segments).inspect_err(|error| session.abort(&error.to_string()))?;
                    run_rank(setup, &session, reach, wires)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    }))
}

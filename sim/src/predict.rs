//! From a schedule, a machine and a split to the numbers that a user reads.

use crate::SimError;
use crate::bound;
use crate::compile::{Compiled, Form, NONE, Program, RoleC};
use crate::engine::{self, Run};
use crate::machine::Machine;
use crate::overlap::OverlapReason;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use tilewire_kernels::schedule::CtaCount;
use tilewire_kernels::{RoleKind, RoleSplit, Schedule};

/// Which ranks are simulated.
///
/// Without noise and a late rank, ranks that share a skeleton do the same at the same picosecond, and one may stand for
/// all. That is an optimistic special case: all ranks then go through their lists in lockstep and never meet at one
/// owner. A single rank that is a nanosecond late lengthens published `gemm_rs` by 4.2 % at 16384 and 5.1 % at 32768.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Execution {
    /// As few ranks as the schedule's symmetry (and the network's) allows.
    #[default]
    Folded,
    /// One rank that stands for all; refused for schedules that are not symmetric.
    Mirror,
    /// Every rank.
    Full,
}

/// How launches follow each other, see [`Protocol`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// A fresh epoch per launch.
    #[default]
    Fair,
    /// What the published benchmark's loop did.
    Published {
        /// Put arrivals count as satisfied at once (flags of the launch before were never cleared).
        stale_arrivals: bool,
        /// Launches are timed one by one, each after a pause: the clock starts before the host's work for the launch of the
        /// fused kernel, behind its helpers, on each rank by itself, and the largest time of any rank counts.
        isolated: bool,
        /// Every launch of the loop costs `launch.iteration_us` beside its kernels.
        waits_for_host: bool,
        /// What is timed, and so how warm the card is.
        timed: Loop,
    },
}

/// Launches behind each other, from an idle card on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Loop {
    /// Launches before those that are timed, without a pause between them.
    pub warm_up: u32,
    /// Timed launches.
    pub launches: u32,
    /// The median of the timed launches counts, instead of their mean.
    pub median: bool,
}

impl Loop {
    /// The share of the time that launches on a cold card have in what the loop shows: `cold_ps` is how long a card stays
    /// cold under load, `ps` the time of such a launch.
    fn cold_share(self, cold_ps: u64, ps: u64) -> f64 {
        let cold = cold_ps as f64 / ps.max(1) as f64 - f64::from(self.warm_up);
        let share = (cold / f64::from(self.launches)).clamp(0.0, 1.0);
        // The upper median, as it is usually taken of an even number.
        if self.median { (cold - f64::from(self.launches / 2)).clamp(0.0, 1.0) } else { share }
    }
}

impl Protocol {
    /// Whether launches are timed one by one.
    pub const fn is_isolated(self) -> bool {
        matches!(self, Self::Published { isolated: true, .. })
    }
}

/// How warm the card is, and so how much the power limit slows the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Clock {
    /// Under lasting load, as in training.
    #[default]
    Sustained,
    /// In the first tens of milliseconds after idling, as in a short benchmark.
    Cold,
}

/// How one prediction is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Which ranks are simulated.
    pub execution: Execution,
    /// Benchmark protocol.
    pub protocol: Protocol,
    /// How warm the card is.
    pub clock: Clock,
    /// Seed of the noise; no noise without one.
    pub noise_seed: Option<u64>,
    /// Keep the timeline of every task.
    pub timeline: bool,
}

/// A lower bound binds where it is this part of the time, or more.
pub(crate) const BINDS: f64 = 0.6;

/// What bounds a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum BoundBy {
    /// Matrix throughput of the compute CTAs.
    Compute,
    /// HBM bandwidth.
    Hbm,
    /// NVLink egress.
    NvlinkEgress,
    /// NVLink ingress.
    NvlinkIngress,
    /// NIC bandwidth or message rate.
    Nic,
    /// The proxy threads.
    Proxy,
    /// Nothing reaches 60 % of the time.
    Latency,
    /// The throughput of a communication role's CTAs.
    Role(RoleKind),
}

impl From<BoundBy> for String {
    fn from(bound: BoundBy) -> Self {
        match bound {
            BoundBy::Compute => "compute".into(),
            BoundBy::Hbm => "hbm".into(),
            BoundBy::NvlinkEgress => "nvlink_egress".into(),
            BoundBy::NvlinkIngress => "nvlink_ingress".into(),
            BoundBy::Nic => "nic".into(),
            BoundBy::Proxy => "proxy".into(),
            BoundBy::Latency => "latency".into(),
            BoundBy::Role(kind) => format!("role:{kind}"),
        }
    }
}

/// What the CTAs of a role did, on the slowest rank: busy, wait and idle add up to `ctas * time`.
///
/// A helper launch, one whose CTAs the split does not give, has a report of its own for each of its roles. A CTA counts
/// where it starts. What it does after it has recycled into another role is its own time, and so is the time before its
/// launch, after its end and, under a published protocol, between two launches (idle).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleReport {
    /// Role.
    pub role: RoleKind,
    /// The helper launch that it is a role of; none for all launches that take CTAs from the split.
    pub helper: Option<String>,
    /// Most CTAs of the role at a time.
    pub ctas: u32,
    /// Tasks of the role, by whatever CTAs.
    pub tasks: u64,
    /// Time in tasks, of any role, summed over the CTAs that start in this one.
    pub busy_us: f64,
    /// Time waiting for flags, summed likewise.
    pub wait_us: f64,
    /// The rest of the CTAs' time.
    pub idle_us: f64,
    /// Busy share of the CTAs' time.
    pub utilisation: f64,
}

/// Whom a role waited for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaitReport {
    /// Role that waited.
    pub role: RoleKind,
    /// Flag family.
    pub flag: String,
    /// Role (or `proxy`, for flags raised by a NIC or host) that raises it.
    pub cause_role: String,
    /// Time, summed over CTAs of the slowest rank.
    pub us: f64,
    /// Share of all waiting.
    pub share: f64,
}

/// Everything that `predict` tells, named as in CSV columns and JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// From the first rank's launch command to the last write visible anywhere, helpers inside. Of isolated launches the
    /// largest time of any rank, each from its own launch command of the fused kernel, helpers outside.
    pub time_us: f64,
    /// Useful floating-point operations over time, of the busiest rank.
    pub tflops_per_gpu: f64,
    /// The compute role alone.
    pub compute_only_us: f64,
    /// Communication alone.
    pub comm_only_us: f64,
    /// `(compute_only + comm_only - time) / min(compute_only, comm_only)`.
    pub overlap: f64,
    /// Why `overlap` lies outside 0 to 1, where it does.
    pub overlap_reason: Option<OverlapReason>,
    /// `time - compute_only`; below zero only with [`OverlapReason::ComputeAloneSlower`].
    pub exposed_comm_us: f64,
    /// The resource with the largest lower bound.
    pub bound_by: BoundBy,
    /// That bound.
    pub bound_us: f64,
    /// Roles.
    pub roles: Vec<RoleReport>,
    /// Wait breakdown, largest first.
    pub waits: Vec<WaitReport>,
    /// Bytes that a rank sends to other nodes over time.
    pub wire_gbs: f64,
    /// The same with bytes that stay on the node counted too, as expert-parallel benchmarks report it.
    pub logical_gbs: f64,
    /// Tasks that completed, over all simulated ranks.
    pub tasks: u64,
    /// Events that the engine handled.
    pub events: u64,
    /// Ranks that were simulated.
    pub simulated_ranks: usize,
}

/// A schedule compiled for a machine; runs any number of splits.
pub struct Simulation {
    compiled: Compiled,
    useful_flops: u64,
    protocol: Protocol,
    nodes: f64,
    pool: engine::Pool,
    /// Time of the compute-only run by the workers that take part in it: splits of a sweep share it.
    compute_only: Mutex<BTreeMap<Vec<u32>, u64>>,
    /// Lower bounds that all splits share, once somebody asks.
    shared: OnceLock<Vec<(BoundBy, u64)>>,
}

impl Simulation {
    /// Compiles a schedule.
    ///
    /// # Errors
    /// [`SimError`] when the schedule's symmetry forbids the execution.
    pub fn new(schedule: &Schedule, machine: &Machine, config: &Config) -> Result<Self, SimError> {
        Ok(Self {
            compiled: Compiled::new(schedule, machine, config)?,
            useful_flops: schedule.useful_flops,
            protocol: config.protocol,
            nodes: f64::from(schedule.cluster.nodes),
            pool: engine::Pool::default(),
            compute_only: Mutex::default(),
            shared: OnceLock::new(),
        })
    }

    /// The compiled form.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// Runs one form with one split.
    ///
    /// # Errors
    /// [`SimError`] for a split that does not fit and for a run that gets stuck.
    pub fn run(&self, split: &RoleSplit, form: Form, timeline: bool) -> Result<Run, SimError> {
        self.pool.run(&self.compiled, split, form, timeline)
    }

    /// Time of a split, ps, with what the protocol adds.
    ///
    /// # Errors
    /// As [`Simulation::run`].
    pub fn time_ps(&self, split: &RoleSplit) -> Result<u64, SimError> {
        Ok(self.shown_ps(&self.run(split, Form::Whole, false)?))
    }

    /// What the benchmark's clock shows for a run: the largest time of any rank, and what the protocol adds, ps.
    pub fn shown_ps(&self, run: &Run) -> u64 {
        (0..run.rank_ends.len()).map(|rank| self.rank_ps(run, rank)).max().unwrap_or(0) + self.added_ps()
    }

    /// What a rank's clock shows, ps: from the first launch command of any rank, in an isolated launch from its own.
    fn rank_ps(&self, run: &Run, rank: usize) -> u64 {
        let late = if self.compiled.isolated { self.compiled.late.of(rank) } else { 0 };
        run.rank_ends[rank].saturating_sub(run.clock + late)
    }

    /// What is added to every run's time, ps: what the host does between two launches of a loop, or before an isolated
    /// launch while its clock runs.
    pub(crate) fn added_ps(&self) -> u64 {
        match self.protocol {
            Protocol::Published { isolated: true, .. } => self.compiled.times.isolated,
            Protocol::Published { waits_for_host: true, .. } => self.compiled.times.iteration,
            Protocol::Fair | Protocol::Published { .. } => 0,
        }
    }

    /// What part of what the protocol's loop shows was timed on a cold card, from 0 to 1: launches that end before the power
    /// limit takes hold. `ps` is the time of a launch on such a card.
    pub fn cold_share(&self, ps: u64) -> f64 {
        let cold_ps = self.compiled.times.cold;
        match self.protocol {
            Protocol::Fair => 0.0,
            // There is a pause before each of them.
            Protocol::Published { isolated: true, .. } => (cold_ps as f64 / ps.max(1) as f64).min(1.0),
            Protocol::Published { timed, .. } => timed.cold_share(cold_ps, ps),
        }
    }

    /// Runs one split and its reduced forms, beside each other unless others of a sweep fill the threads already.
    ///
    /// # Errors
    /// As [`Simulation::run`].
    pub fn predict(&self, split: &RoleSplit) -> Result<Prediction, SimError> {
        let whole = || self.run(split, Form::Whole, false);
        let compute = || self.compute_only_ps(split);
        let comm = || Ok(self.shown_ps(&self.run(split, Form::CommOnly, false)?));
        let (whole, (comm, compute)) = if rayon::current_thread_index().is_none() {
            rayon::join(whole, || rayon::join(comm, compute))
        } else {
            (whole(), (comm(), compute()))
        };
        let (whole, compute, comm) = (whole?, compute?, comm?);
        Ok(self.report(&whole, compute, comm))
    }

    /// Time of the compute role's tasks alone, ps, with what the protocol adds.
    fn compute_only_ps(&self, split: &RoleSplit) -> Result<u64, SimError> {
        let workers = self.compute_workers(&engine::worker_counts(&self.compiled, split)?);
        // A panic elsewhere leaves the map whole.
        let known = || self.compute_only.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&time) = known().get(&workers) {
            return Ok(time);
        }
        let time = self.shown_ps(&self.run(split, Form::ComputeOnly, false)?);
        known().insert(workers, time);
        Ok(time)
    }

    /// Workers of each role in a compute-only run. Those of a role that has no tasks then go on to the one that it recycles
    /// into when their launch starts, and are no different from the workers of that one.
    fn compute_workers(&self, counts: &[u32]) -> Vec<u32> {
        let roles = &self.compiled.programs[0].roles;
        let mut workers = vec![0; counts.len()];
        for (&count, mut at) in counts.iter().zip(0..) {
            let lanes = roles[at].lanes;
            while roles[at].kind != RoleKind::Compute && roles[at].recycle != NONE {
                at = roles[at].recycle as usize;
            }
            if roles[at].kind == RoleKind::Compute {
                workers[at] += count * lanes;
            }
        }
        workers
    }

    fn report(&self, whole: &Run, compute: u64, comm: u64) -> Prediction {
        let time = self.shown_ps(whole);
        let ranks = 0..whole.rank_ends.len();
        let slowest = ranks.max_by_key(|&rank| (self.rank_ps(whole, rank), Reverse(rank))).unwrap_or(0);
        let overlap = (compute as f64 + comm as f64 - time as f64) / compute.min(comm).max(1) as f64;
        let (bound_by, bound_us) = self.bound(whole);
        let program = &self.compiled.programs[self.compiled.program_of[slowest] as usize];
        let put_bytes = program.put_bytes as f64;
        let wire_gbs = put_bytes / (time as f64 / 1e12) / 1e9;
        let logical = if self.nodes > 1.0 { self.nodes / (self.nodes - 1.0) } else { 0.0 };
        Prediction {
            time_us: us(time),
            tflops_per_gpu: self.useful_flops as f64 / time as f64,
            compute_only_us: us(compute),
            comm_only_us: us(comm),
            overlap,
            overlap_reason: OverlapReason::of(&self.compiled, whole, [time, compute, comm]),
            exposed_comm_us: us(time) - us(compute),
            bound_by: if bound_us < BINDS * us(time) { BoundBy::Latency } else { bound_by },
            bound_us,
            roles: self.roles(whole, slowest, us(time)),
            waits: self.waits(whole, slowest),
            wire_gbs,
            logical_gbs: wire_gbs * logical,
            tasks: whole.tasks,
            events: whole.events,
            simulated_ranks: whole.rank_ends.len(),
        }
    }

    /// See [`bound::shared`].
    pub(crate) fn shared(&self) -> &[(BoundBy, u64)] {
        self.shared.get_or_init(|| bound::shared(&self.compiled))
    }

    /// The roles that run while the clock does.
    pub(crate) fn timed_roles<'a>(
        &self,
        program: &'a Program,
    ) -> impl Iterator<Item = (usize, &'a RoleC)> + use<'a, '_> {
        let timed = |role: &RoleC| !self.compiled.launches[role.launch as usize].before_clock;
        program.roles.iter().enumerate().filter(move |(_, role)| timed(role))
    }

    /// CTAs of a role when its launch runs.
    fn ctas(&self, run: &Run, role: usize) -> u32 {
        let row = &self.compiled.programs[0].roles[role];
        match row.ctas {
            // One worker stands for all CTAs of a collective.
            CtaCount::Fixed(ctas) if row.collective => ctas,
            _ => run.workers[role] / row.lanes,
        }
    }

    /// Most CTAs of a kind that a rank has at a time in some launches.
    fn most_ctas(&self, run: &Run, rank: usize, kind: RoleKind, among: &[usize]) -> u32 {
        let launches: Vec<_> = among.iter().map(|&launch| (launch, run.launches_of[rank][launch])).collect();
        let of_launch = |launch: usize| -> u32 {
            let roles = self.compiled.launches[launch].roles.clone();
            roles.filter(|&r| self.compiled.programs[0].roles[r].kind == kind).map(|r| self.ctas(run, r)).sum()
        };
        let at = |now: u64| -> u32 {
            let runs = |&&(_, (start, end)): &&(usize, (u64, u64))| start == now || (start < now && now < end);
            launches.iter().filter(runs).map(|&(launch, _)| of_launch(launch)).sum()
        };
        launches.iter().map(|&(_, (start, _))| at(start)).max().unwrap_or(0)
    }

    /// Launches that run while the clock does: those that take CTAs from the split together, then every helper by itself.
    /// Where no launch takes any, none is a helper.
    fn timed_launches(&self) -> Vec<(Option<String>, Vec<usize>)> {
        let compiled = &self.compiled;
        let timed = (0..compiled.launches.len()).filter(|&launch| !compiled.launches[launch].before_clock);
        let roles = |launch: usize| &compiled.programs[0].roles[compiled.launches[launch].roles.clone()];
        let from_split = |&launch: &usize| roles(launch).iter().any(|role| role.ctas == CtaCount::FromSplit);
        let (fused, helpers): (Vec<usize>, Vec<usize>) = timed.partition(from_split);
        if fused.is_empty() {
            return vec![(None, helpers)];
        }
        let helper = |launch: usize| (Some(compiled.launches[launch].name.clone()), vec![launch]);
        std::iter::once((None, fused)).chain(helpers.into_iter().map(helper)).collect()
    }

    fn roles(&self, run: &Run, rank: usize, time_us: f64) -> Vec<RoleReport> {
        let launches = self.timed_launches();
        let kinds = launches.iter().flat_map(|launches| RoleKind::ALL.map(|kind| (launches, kind)));
        kinds.filter_map(|((helper, among), kind)| self.role(run, rank, time_us, kind, (helper, among))).collect()
    }

    /// What a kind of role did in some launches; nothing where it has no tasks there.
    fn role(
        &self,
        run: &Run,
        rank: usize,
        time_us: f64,
        kind: RoleKind,
        (helper, among): (&Option<String>, &[usize]),
    ) -> Option<RoleReport> {
        let program = &self.compiled.programs[self.compiled.program_of[rank] as usize];
        let of_kind = || {
            let all = program.roles.iter().enumerate();
            all.filter(|(_, role)| role.kind == kind && among.contains(&(role.launch as usize)))
        };
        let tasks: u64 = of_kind().map(|(_, role)| u64::from(role.tasks)).sum();
        if tasks == 0 {
            return None;
        }
        // Lanes share their CTA's time; the worker of a collective stands for all its CTAs.
        let summed = |ps: &[u64]| -> f64 {
            let of_role = |(r, role): (usize, &RoleC)| {
                let ctas = if role.collective { f64::from(self.ctas(run, r)) } else { 1.0 };
                us(ps[r]) * ctas / f64::from(role.lanes)
            };
            of_kind().map(of_role).sum()
        };
        let ctas = self.most_ctas(run, rank, kind, among);
        let (busy_us, wait_us) = (summed(&run.busy[rank]), summed(&run.waited[rank]));
        let present_us = f64::from(ctas) * time_us;
        Some(RoleReport {
            role: kind,
            helper: helper.clone(),
            ctas,
            tasks,
            busy_us,
            wait_us,
            idle_us: present_us - busy_us - wait_us,
            utilisation: if present_us == 0.0 { 0.0 } else { busy_us / present_us },
        })
    }

    fn waits(&self, run: &Run, rank: usize) -> Vec<WaitReport> {
        let program = &self.compiled.programs[self.compiled.program_of[rank] as usize];
        let families = self.compiled.families.len();
        let mut by_pair: BTreeMap<(RoleKind, usize), u64> = BTreeMap::new();
        for (r, role) in self.timed_roles(program) {
            for family in 0..families {
                *by_pair.entry((role.kind, family)).or_default() += run.waits[rank][r * families + family];
            }
        }
        let total: u64 = by_pair.values().sum();
        let mut reports: Vec<WaitReport> = by_pair
            .into_iter()
            .filter(|&(_, ps)| ps > 0)
            .map(|((role, family), ps)| {
                let (raiser, by_put) = self.compiled.raisers[family];
                WaitReport {
                    role,
                    flag: self.compiled.families[family].clone(),
                    cause_role: if by_put { "proxy".into() } else { raiser.map_or("none".into(), |r| r.name().into()) },
                    us: us(ps),
                    share: ps as f64 / total as f64,
                }
            })
            .collect();
        reports.sort_by(|a, b| b.us.total_cmp(&a.us));
        reports
    }
}

fn us(ps: u64) -> f64 {
    ps as f64 / 1e6
}

/// Predicts one run. See [`Simulation`] to run many splits of one schedule.
///
/// # Errors
/// As [`Simulation::new`] and [`Simulation::run`].
pub fn predict(
    schedule: &Schedule,
    machine: &Machine,
    split: &RoleSplit,
    config: &Config,
) -> Result<Prediction, SimError> {
    Simulation::new(schedule, machine, config)?.predict(split)
}

//! The functional executor: runs a Schedule with real values on the CPU and compares the result with the kernel's
//! reference.
//!
//! ```text
//! Kernel::inputs ─▶ memory of every rank ─▶ engine: CTAs interleaved by a seeded scheduler ─▶ outputs
//!                     (bf16, poisoned)                │                                         │
//!                                                     └▶ races, or the CTAs that are stuck      └▶ Kernel::reference
//! ```
//!
//! Storage is bf16, accumulation f32. An element may differ from the f64 reference by
//! `(roundings + 1) * 2^-8 * magnitude`, where the kernel says how often bf16 rounds on the element's way and
//! `magnitude` is the sum of the absolute values of its terms. Each rounding is off by at most 2^-9 of what it rounds,
//! whatever the order of a sum; the factor two and the one on top leave room for f32.
//!
//! For attention the terms are `p_j v_j / sum p`. Probabilities are rounded to bf16 before they meet V: one rounding,
//! each of its own term. Scores are f32 and shift every `p_j` by about 2^-20, which the spare rounding covers. A merge
//! of partial results adds the rounding of each part, scaled by weights that add up to one, and its own.

pub(crate) mod engine;
pub(crate) mod judge;
pub(crate) mod memory;
pub(crate) mod ops;
mod race;
pub(crate) mod random;
pub(crate) mod report;

pub use report::{ExecError, Mismatch, Race, Report, TaskRef};

use engine::{Engine, Lists, task_name};
use memory::{Memory, ranks_of};
use race::Tracker;
use random::seed_for;
use std::collections::BTreeMap;
use tilewire_kernels::check::check_task;
use tilewire_kernels::schedule::{Access, GatherEntry, Task};
use tilewire_kernels::{Kernel, Rank, RoleKind, RoleSplit, Schedule, Spec};

/// Who moves next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scheduler {
    /// CTAs take turns.
    RoundRobin,
    /// Any CTA or put.
    Random,
    /// Random, but some tasks and puts, from every second to one in 32 by the seed, move only when no other can.
    Laggards,
    /// CTAs of this role move only when nobody else can.
    Starve(RoleKind),
    /// Puts move only when no CTA can.
    DelayedPuts,
    /// The youngest put first, as far as the fabric permits.
    ReorderedPuts,
}

impl Scheduler {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::RoundRobin,
        Self::Random,
        Self::Laggards,
        Self::Starve(RoleKind::Compute),
        Self::Starve(RoleKind::IntraComm),
        Self::Starve(RoleKind::InterSend),
        Self::Starve(RoleKind::InterReduce),
        Self::DelayedPuts,
        Self::ReorderedPuts,
    ];

    /// The name used on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::Laggards => "laggards",
            Self::Starve(RoleKind::Compute) => "starve-compute",
            Self::Starve(RoleKind::IntraComm) => "starve-intra",
            Self::Starve(RoleKind::InterSend) => "starve-send",
            Self::Starve(RoleKind::InterReduce) => "starve-reduce",
            Self::DelayedPuts => "delayed-puts",
            Self::ReorderedPuts => "reordered-puts",
        }
    }
}

/// When a run is over and the next may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// All tasks are done, and all puts are sent, have landed and are noticed: the rule of every transport.
    Drained,
    /// All tasks are done; puts may still be on their way. Breaks the rule, to show what it prevents.
    TasksDone,
}

/// How to run a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// CTAs of the roles that take theirs from the split.
    pub split: RoleSplit,
    /// SMs of a GPU, for roles that take them all.
    pub sms: u32,
    /// Seeds inputs and scheduler.
    pub seed: u64,
    /// Scheduler.
    pub scheduler: Scheduler,
    /// Runs in a row in the same memory: fresh inputs, poisoned outputs, flags of the other bank, scratch as it was.
    pub runs: u32,
    /// When a run is over.
    pub end: RunEnd,
    /// Commands that the ring of a rank's proxy holds; a full one blocks the CTA that pushes.
    pub fifo_depth: u32,
    /// Writes in flight per queue.
    pub in_flight: u32,
    /// Whether to look for races.
    pub check_races: bool,
}

impl Default for Config {
    /// Two CTAs per role, two runs to their proper end, a random scheduler, a ring and queues without bounds, races
    /// looked for.
    fn default() -> Self {
        Self {
            split: RoleSplit { compute: 2, intra_comm: 2, inter_send: 2, inter_reduce: 2 },
            sms: 8,
            seed: 0,
            scheduler: Scheduler::Random,
            runs: 2,
            end: RunEnd::Drained,
            fifo_depth: u32::MAX,
            in_flight: u32::MAX,
            check_races: true,
        }
    }
}

/// Runs a schedule and compares its outputs with `kernel`'s reference.
///
/// # Errors
/// [`ExecError`]: a stuck run, a wrong value, or a schedule that breaks a rule which execution relies on. Races alone
/// are no error; they are in the report, or beside the wrong value.
pub fn run(schedule: &Schedule, kernel: &dyn Kernel, spec: &Spec, config: &Config) -> Result<Report, ExecError> {
    let lists = collect(schedule)?;
    let cluster = schedule.cluster;
    let mut memory = Memory::new(cluster, &schedule.buffers);
    let mut tracker = config.check_races.then(|| Tracker::new(cluster.ranks(), schedule.buffers.len()));
    let mut report = Report { runs: config.runs, ..Report::default() };
    let mut late = Vec::new();
    for run in 0..config.runs {
        let values = seed_for(config.seed, run, "values");
        memory.poison_inputs_and_outputs();
        for rank in schedule.cluster.iter() {
            let number = schedule.cluster.number(rank);
            judge::for_each_input(schedule, kernel, spec, values, rank, |region, values| {
                memory.fill(number, region, values);
            })?;
        }
        // The bank of a run was zeroed when the run before ended. No put is late unless `config.end` lets it be.
        let mut engine = Engine::new(schedule, config, &lists, &mut memory, tracker.as_mut(), run, late)?;
        let result = engine.run();
        late = std::mem::take(&mut engine.flights);
        report.tasks += engine.tasks_done;
        report.steps += engine.steps;
        result?;
        let mut mismatch = None;
        for rank in schedule.cluster.iter() {
            judge::compare(&memory, schedule, kernel, spec, values, rank, (&mut report, &mut mismatch))?;
        }
        if let Some(mut mismatch) = mismatch {
            (mismatch.run, mismatch.seed) = (run, config.seed);
            mismatch.writers = writers(schedule, &lists, &mismatch);
            let races = tracker.map_or_else(BTreeMap::new, |tracker| tracker.races);
            return Err(ExecError::Wrong(Box::new(mismatch), races.into_values().collect()));
        }
    }
    report.races = tracker.map_or_else(BTreeMap::new, |tracker| tracker.races).into_values().collect();
    Ok(report)
}

/// Tasks that write a byte of an output, in the order of ranks and lists.
fn writers(schedule: &Schedule, lists: &Lists, mismatch: &Mismatch) -> Vec<TaskRef> {
    let roles = schedule.role_indices().count();
    let mut writers = Vec::new();
    for (role, tasks) in lists.tasks.iter().enumerate() {
        let from = schedule.cluster.rank(role / roles);
        for (index, task) in tasks.iter().enumerate() {
            let mut writes = false;
            task.op.for_each_access(|at, region, access| {
                let here = || ranks_of(schedule.cluster, from, at).contains(&schedule.cluster.number(mismatch.rank));
                let mut covers = false;
                region.for_each_run(|start, bytes| {
                    covers |= (start..start + bytes).contains(&mismatch.offset);
                });
                let same = schedule.buffer(region.buffer).name == mismatch.buffer;
                writes |= same && access != Access::Read && covers && here();
            });
            if writes {
                writers.push(task_name(schedule, lists, role, index));
            }
        }
    }
    writers
}

/// What some runs showed.
#[derive(Debug, Default)]
pub struct Trials {
    /// Trials that ended with right values.
    pub passed: u32,
    /// The first trial that did not, with its scheduler and seed.
    pub failure: Option<(Scheduler, u64, ExecError)>,
    /// Races, one for each signature, over all trials.
    pub races: Vec<Race>,
}

impl Trials {
    /// Whether all trials passed and none had a race.
    pub const fn is_clean(&self) -> bool {
        self.failure.is_none() && self.races.is_empty()
    }
}

/// Runs a schedule once for each scheduler and seed, until one fails; `seen` is told of each that passes.
pub fn check_values(
    schedule: &Schedule,
    kernel: &dyn Kernel,
    spec: &Spec,
    config: &Config,
    trials: &[(Scheduler, u64)],
    mut seen: impl FnMut(Scheduler, u64, &Report),
) -> Trials {
    let mut races = BTreeMap::new();
    let mut result = Trials::default();
    for &(scheduler, seed) in trials {
        let found = match run(schedule, kernel, spec, &Config { seed, scheduler, ..*config }) {
            Ok(report) => {
                result.passed += 1;
                seen(scheduler, seed, &report);
                report.races
            }
            Err(error) => {
                let found = if let ExecError::Wrong(_, races) = &error { races.clone() } else { Vec::new() };
                result.failure = Some((scheduler, seed, error));
                found
            }
        };
        for race in found {
            races.entry(race.signature()).or_insert(race);
        }
        if result.failure.is_some() {
            break;
        }
    }
    result.races = races.into_values().collect();
    result
}

/// Collects and checks the tasks of all ranks.
fn collect(schedule: &Schedule) -> Result<Lists, ExecError> {
    let mut lists = Lists { tasks: Vec::new(), tables: Vec::new() };
    for rank in schedule.cluster.iter() {
        let (tasks, table) = collect_rank(schedule, rank)?;
        lists.tasks.extend(tasks);
        lists.tables.push(table);
    }
    Ok(lists)
}

/// The tasks of every role of a rank, in the order of [`Schedule::role_indices`], and its gather table; all checked.
pub(crate) fn collect_rank(schedule: &Schedule, rank: Rank) -> Result<RankLists, ExecError> {
    let table = schedule.source.table(rank);
    let mut lists = Vec::new();
    for (l, r) in schedule.role_indices() {
        let launch = &schedule.launches[l];
        let role = &launch.roles[r];
        let tasks = schedule.tasks(rank, l, r);
        for (i, task) in tasks.iter().enumerate() {
            check_task(schedule, role.claim, task, &table).map_err(|error| ExecError::Illegal {
                task: Box::new(TaskRef {
                    rank,
                    launch: launch.name.clone(),
                    role: role.kind,
                    task: i as u32,
                    op: task.op.name(),
                }),
                what: error.to_string(),
            })?;
        }
        lists.push(tasks);
    }
    Ok((lists, table))
}

/// Tasks of a rank by role, and its gather table.
pub(crate) type RankLists = (Vec<Vec<Task>>, Vec<Option<GatherEntry>>);

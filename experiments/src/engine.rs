//! The one place that builds schedules and calls the checker and the simulator.

use crate::checked::{self, Checked};
use crate::error::ExperimentError;
use crate::plan::{Case, Fusion, OF_PHASES, SplitChoice};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use tilewire_kernels::encode::Hashed;
use tilewire_kernels::schedule::Symmetry;
use tilewire_kernels::{RoleSplit, Schedule, bulk_synchronous};
use tilewire_sim::compile::Form;
use tilewire_sim::engine::{Run, worker_counts};
use tilewire_sim::tune::{TuneConfig, Tuned, tune};
use tilewire_sim::{Clock, Execution, Machine, Prediction, Shown, SimError, Simulation};

/// Memory that a simulation may need, GiB.
const MAX_GIB: u64 = 32;

/// Simulations that a search for a split makes at most, unless `tune` is told otherwise.
const PROMPT_SIMULATIONS: usize = 2000;

/// A case whose schedule is built, checked and compiled: it runs any number of splits.
pub struct Prepared {
    /// Schedule.
    pub schedule: Schedule,
    /// Simulation with the case's clock, sustained where the protocol's loop decides.
    pub simulation: Simulation,
    /// The same with a cold card, where the protocol's loop decides.
    cold: Option<Simulation>,
    clock: Clock,
    /// What the checker found.
    checked: Checked,
    /// Made when the first row asks for it.
    hashed: OnceLock<Hashed>,
    name: String,
}

/// A prediction with everything that identifies it.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// Kernel.
    pub kernel: &'static str,
    /// See [`Fusion`].
    pub form: &'static str,
    /// Cluster, `NxG`.
    pub cluster: String,
    /// Machine.
    pub machine: String,
    /// Fabric.
    pub fabric: &'static str,
    /// Shape.
    pub shape: BTreeMap<&'static str, u64>,
    /// Option set.
    pub option_set: &'static str,
    /// Options.
    pub options: BTreeMap<&'static str, String>,
    /// CTAs per role.
    pub split: RoleSplit,
    /// How hardware would run it.
    pub mode: &'static str,
    /// Ranks that were simulated.
    pub execution: &'static str,
    /// Protocol.
    pub protocol: &'static str,
    /// How warm the card is; "mixed" where a loop began on a cold one.
    pub clock: &'static str,
    /// Seed.
    pub seed: u64,
    /// Whether noise was drawn.
    pub noise: bool,
    /// The prediction.
    #[serde(flatten)]
    pub prediction: Prediction,
    /// Fatal findings of the checker that it was run in spite of.
    pub overridden: Vec<String>,
    /// Hazards of the schedule; none where races were not looked for.
    pub hazards: Option<usize>,
    /// Hazards that the checker sees without looking for races.
    #[serde(skip)]
    pub hazards_seen: usize,
    /// Hash of the schedule with its split.
    pub schedule_hash: String,
    /// What to know of defaults that the shape forced.
    pub notes: Vec<String>,
}

/// The clock's name in tables and files.
pub const fn clock_name(clock: Clock) -> &'static str {
    match clock {
        Clock::Sustained => "sustained",
        Clock::Cold => "cold",
    }
}

/// Builds the schedule of a case.
///
/// # Errors
/// [`ExperimentError::Build`].
pub fn build(case: &Case) -> Result<Schedule, ExperimentError> {
    let schedule = case.kernel.build(&case.spec());
    let schedule = if case.fusion == Fusion::BulkSynchronous { schedule.and_then(bulk_synchronous) } else { schedule };
    schedule.map_err(|source| ExperimentError::Build { case: case.to_string(), source })
}

/// Refuses what would not fit into memory: tasks of every skeleton, flags of every simulated rank.
fn limit_memory(case: &Case, schedule: &Schedule) -> Result<(), ExperimentError> {
    const TASK_BYTES: u64 = 128;
    const FLAG_BYTES: u64 = 16;
    let cluster = schedule.cluster;
    let all = case.noise || case.execution == Execution::Full;
    let nodes = if all || !schedule.symmetry.nodes { u64::from(cluster.nodes) } else { 1 };
    let gpus = if all || !schedule.symmetry.gpus { u64::from(cluster.gpus_per_node) } else { 1 };
    let flags: u64 = schedule.flags.iter().map(|family| u64::from(family.slots)).sum();
    let tasks = (schedule.representatives().len() as u64).saturating_mul(case.tiles()).saturating_mul(TASK_BYTES);
    let bytes = (nodes * gpus * FLAG_BYTES).saturating_mul(flags).saturating_add(tasks);
    if bytes >> 30 < MAX_GIB {
        return Ok(());
    }
    let folds = !case.noise && case.execution == Execution::Full && schedule.symmetry != Symmetry::NONE;
    let fold = if folds { ", or folded execution" } else { "" };
    let gib = bytes >> 30;
    let problem = format!("would take some {gib} GiB, allowed: {MAX_GIB}; choose a smaller shape or cluster{fold}");
    Err(ExperimentError::refused(case.to_string(), problem))
}

impl Prepared {
    /// Builds, checks and compiles.
    ///
    /// # Errors
    /// [`ExperimentError`] for shapes that do not fit and schedules that cannot run.
    pub fn new(case: &Case) -> Result<Self, ExperimentError> {
        let schedule = build(case)?;
        limit_memory(case, &schedule)?;
        let checked = checked::check(case, &schedule)?;
        let name = case.to_string();
        let machine = case.target.machine.clone();
        // Libraries' kernels are hard-wired.
        let machine = if case.is_unfused() { Machine { interpreter: None, ..machine } } else { machine };
        let simulation = |clock| {
            Simulation::new(&schedule, &machine, &case.config(clock))
                .map_err(|source| ExperimentError::Sim { case: name.clone(), source })
        };
        let clock = case.clock.unwrap_or_default();
        let cold = if case.clock.is_none() { Some(simulation(Clock::Cold)?) } else { None };
        let simulation = simulation(clock)?;
        Ok(Self { schedule, simulation, cold, clock, checked, hashed: OnceLock::new(), name })
    }

    /// Checks that a split fits the machine and gives every role with work a CTA, and no other.
    ///
    /// # Errors
    /// [`ExperimentError::Sim`].
    pub fn check_split(&self, split: &RoleSplit) -> Result<(), ExperimentError> {
        worker_counts(self.simulation.compiled(), split).map(drop).map_err(|source| self.error(source))
    }

    /// The split of a case, tuned if it asks for that.
    ///
    /// # Errors
    /// [`ExperimentError::Sim`] when no split runs.
    pub fn split(&self, case: &Case) -> Result<RoleSplit, ExperimentError> {
        match case.split {
            SplitChoice::Fixed(split) => Ok(split),
            SplitChoice::Auto => Ok(self.tune(case, &self.prompt(), &|_| ())?.split),
        }
    }

    /// How far `auto` searches, and `tune` unless it is told otherwise.
    pub fn prompt(&self) -> TuneConfig {
        TuneConfig::prompt(&self.simulation, PROMPT_SIMULATIONS)
    }

    /// Predicts a case with a split.
    ///
    /// # Errors
    /// [`ExperimentError::Sim`].
    pub fn predict(&self, case: &Case, split: &RoleSplit) -> Result<Answer, ExperimentError> {
        let (prediction, clock) = self.predicted(split).map_err(|source| self.error(source))?;
        Ok(Answer {
            kernel: case.name,
            form: case.fusion.name(),
            cluster: case.target.cluster.to_string(),
            machine: case.target.machine.name.clone(),
            fabric: case.target.machine.fabric.name(),
            shape: crate::shape::values(&case.problem).into_iter().collect(),
            option_set: case.set.name(),
            options: case.options.iter().map(|(name, value)| (name, value.to_string())).collect(),
            split: *split,
            mode: case.mode(),
            execution: case.execution_name(),
            protocol: case.protocol_name(),
            clock,
            seed: case.seed,
            noise: case.noise,
            prediction,
            overridden: self.checked.overridden.clone(),
            hazards: self.checked.hazards,
            hazards_seen: self.checked.seen,
            schedule_hash: self.hashed.get_or_init(|| Hashed::new(&self.schedule)).with(split).to_string(),
            notes: case.notes(),
        })
    }

    /// The prediction and its clock. A loop whose first launches ran on a cold card shows the mean of both.
    fn predicted(&self, split: &RoleSplit) -> Result<(Prediction, &'static str), SimError> {
        let (prediction, share) = self.shown().predict(split)?;
        let clock = if share >= 1.0 {
            clock_name(Clock::Cold)
        } else if share > 0.0 {
            "mixed"
        } else {
            clock_name(self.clock)
        };
        Ok((prediction, clock))
    }

    fn shown(&self) -> Shown<'_> {
        Shown { cold: self.cold.as_ref(), later: &self.simulation }
    }

    /// Searches the best split of a case. The published one is a good start where there is one.
    ///
    /// # Errors
    /// [`ExperimentError::Sim`] when no split runs.
    pub fn tune(
        &self,
        case: &Case,
        config: &TuneConfig,
        progress: &(dyn Fn(usize) + Sync),
    ) -> Result<Tuned, ExperimentError> {
        if case.fusion == Fusion::BulkSynchronous {
            return Err(ExperimentError::refused(
                "split of ".to_owned() + &self.name,
                format!("\"auto\", {OF_PHASES}"),
            ));
        }
        let start = case.published.as_slice();
        tune(self.shown(), start, config, progress).map_err(|source| self.error(source))
    }

    /// Runs a split and keeps its timeline, with the clock that most launches of the protocol's loop had; its name.
    ///
    /// # Errors
    /// [`ExperimentError::Sim`].
    pub fn timeline(&self, split: &RoleSplit) -> Result<(Run, &'static str), ExperimentError> {
        let run =
            |simulation: &Simulation| simulation.run(split, Form::Whole, true).map_err(|source| self.error(source));
        if let Some(cold) = &self.cold {
            let found = run(cold)?;
            if cold.cold_share(cold.shown_ps(&found)) > 0.5 {
                return Ok((found, clock_name(Clock::Cold)));
            }
        }
        Ok((run(&self.simulation)?, clock_name(self.clock)))
    }

    fn error(&self, source: SimError) -> ExperimentError {
        ExperimentError::Sim { case: self.name.clone(), source }
    }
}

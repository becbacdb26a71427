//! One run: CTAs, flags, puts in flight, and a seeded scheduler that chooses what moves next.
//!
//! Everything that hardware may do in either order is a choice of its own: a task's reads come at its start or at its
//! end, its writes to different ranks one by one; a put reads its source, lands, raises its word and is `sent` in any
//! order that the fabric permits. A CTA that cannot move is parked on the flag it waits for, or on the ring that has no
//! room for its put, so a run that is stuck is seen at once.

mod access;
mod blocked;
pub(crate) mod claim;
mod fabric;
pub(crate) mod stages;

use super::memory::{Memory, Write};
use super::ops::Carry;
use super::race::{Handle, Tracker};
use super::random::{Rng, seed_for};
use super::report::{ExecError, TaskRef};
use super::{Config, RunEnd, Scheduler};
use claim::{cta_count, reaches};
pub(in crate::values) use fabric::Flight;
use fabric::Queue;
use stages::step_flag;
use std::collections::{BTreeMap, VecDeque};
use tilewire_kernels::schedule::{Flag, Gate, GatherEntry, Role, Strides, Task, Wait};
use tilewire_kernels::{Rank, RoleKind, Schedule};

/// The tasks of every role of every rank, and the gather tables.
pub(super) struct Lists {
    /// By rank, then by role in the order of [`Schedule::role_indices`].
    pub(super) tasks: Vec<Vec<Task>>,
    pub(super) tables: Vec<Vec<Option<GatherEntry>>>,
}

/// A role of a rank while it runs.
struct RoleState {
    launch: usize,
    kind: RoleKind,
    /// First unclaimed task (`Ready`: everything before it is claimed).
    cursor: usize,
    claimed: Vec<bool>,
    /// Where its strides begin anew.
    restarts: Vec<u32>,
    /// Workers that found nothing ready.
    idle: Vec<usize>,
}

/// A launch of a rank.
struct LaunchState {
    left: usize,
    /// Workers that wait for it to begin.
    waiting: Vec<usize>,
}

/// A CTA, or a lane of one.
struct Worker {
    rank: usize,
    /// Roles as indices into [`Engine::roles`].
    home: usize,
    role: usize,
    cta: u32,
    of: u32,
    /// What it takes next of a strided list.
    next: u32,
    live: Option<Live>,
}

/// A task in progress.
struct Live {
    task: usize,
    stage: Stage,
    /// Reads at the end instead of the start.
    late: bool,
    /// Moves only when no other CTA and no other put can.
    lags: bool,
    carry: Carry,
    writes: Vec<Write>,
    reads: Vec<Handle>,
    held: Vec<(usize, Handle)>,
    targets: Vec<usize>,
}

/// What a task does next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Waits for its start flags, then begins to read.
    Start,
    /// Waits for the flags of this step, then runs up to the next gated one.
    Steps(u32),
    /// Waits for its output flags.
    Output,
    /// Ends its reads and raises early signals.
    Finish,
    /// Writes to one rank after the other.
    Store,
    /// Waits for the other ranks.
    Rendezvous,
}

/// What became of a worker after its step.
enum Next {
    Again,
    Parked,
    Ended,
}

/// One run in progress.
pub(super) struct Engine<'a> {
    schedule: &'a Schedule,
    config: &'a Config,
    lists: &'a Lists,
    pub(super) memory: &'a mut Memory,
    pub(super) tracker: Option<&'a mut Tracker>,
    roles_per_rank: usize,
    roles: Vec<RoleState>,
    launches: Vec<LaunchState>,
    workers: Vec<Worker>,
    flags: Vec<Vec<Vec<u32>>>,
    runnable: VecDeque<usize>,
    /// How many of them are of a role that is not starved.
    fed: usize,
    /// Workers that can move, but whose task lags behind.
    lagging: Vec<usize>,
    parked: BTreeMap<(usize, Flag), Vec<usize>>,
    meeting: BTreeMap<(usize, usize), Vec<usize>>,
    /// Puts from their push into the ring until they are over, in the order of the pushes.
    pub(super) flights: Vec<Flight>,
    /// Queues of every rank that had a put.
    queues: BTreeMap<(usize, u16), Queue>,
    /// Workers of each rank that wait for a place in its ring.
    at_ring: Vec<Vec<u32>>,
    /// Which run this is.
    run: u32,
    tasks_left: usize,
    rng: Rng,
    /// One task and put in this many lags.
    lag_rate: usize,
    pub(super) tasks_done: u64,
    pub(super) steps: u64,
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        schedule: &'a Schedule,
        config: &'a Config,
        lists: &'a Lists,
        memory: &'a mut Memory,
        tracker: Option<&'a mut Tracker>,
        run: u32,
        flights: Vec<Flight>,
    ) -> Result<Self, ExecError> {
        let ranks = schedule.cluster.ranks();
        let pairs: Vec<(usize, usize)> = schedule.role_indices().collect();
        let num_launches = schedule.launches.len();
        let mut roles = Vec::new();
        let mut launches: Vec<LaunchState> =
            (0..ranks * num_launches).map(|_| LaunchState { left: 0, waiting: Vec::new() }).collect();
        let mut workers = Vec::new();
        for rank in 0..ranks {
            for (local, &(l, r)) in pairs.iter().enumerate() {
                let role = &schedule.launches[l].roles[r];
                let ctas = cta_count(&schedule.launches[l], r, config);
                let count = lists.tasks[rank * pairs.len() + local].len();
                let of = ctas * role.lanes.max(1);
                launches[rank * num_launches + l].left += count;
                let home = rank * pairs.len() + local;
                let restarts = Strides::restarts(&lists.tasks[rank * pairs.len() + local]);
                // Lane by lane, so that neighbouring tasks of a strided list go to different CTAs.
                for index in 0..of {
                    let strides = Strides { tasks: count as u32, workers: of, restarts: &restarts };
                    let next = strides.first(index);
                    workers.push(Worker { rank, home, role: home, cta: index % ctas, of, next, live: None });
                }
                let claimed = vec![false; count];
                roles.push(RoleState { launch: l, kind: role.kind, cursor: 0, claimed, restarts, idle: Vec::new() });
                let fed = (0..schedule.launches[l].roles.len()).any(|from| reaches(schedule, l, from, r, config));
                if count > 0 && !fed {
                    return Err(ExecError::NoCtas {
                        launch: schedule.launches[l].name.clone(),
                        role: role.kind,
                        split: config.split.to_string(),
                    });
                }
            }
        }
        let mut rng = Rng::new(seed_for(config.seed, run, "order"));
        let flags = (0..ranks).map(|_| schedule.flags.iter().map(|f| vec![0; f.slots as usize]).collect()).collect();
        let mut engine = Self {
            schedule,
            config,
            lists,
            memory,
            tracker,
            roles_per_rank: pairs.len(),
            roles,
            launches,
            runnable: VecDeque::new(),
            fed: 0,
            lagging: Vec::new(),
            workers,
            flags,
            parked: BTreeMap::new(),
            meeting: BTreeMap::new(),
            flights: Vec::new(),
            queues: BTreeMap::new(),
            at_ring: vec![Vec::new(); ranks],
            run,
            tasks_left: lists.tasks.iter().map(Vec::len).sum(),
            lag_rate: 2 << rng.below(5),
            rng,
            tasks_done: 0,
            steps: 0,
        };
        for worker in 0..engine.workers.len() {
            engine.let_run(worker);
        }
        for flight in flights {
            engine.note(flight);
        }
        Ok(engine)
    }

    /// Runs until every task is done and, where the run's end asks for it, every put is over.
    pub(super) fn run(&mut self) -> Result<(), ExecError> {
        loop {
            if self.tasks_left == 0 && self.config.end == RunEnd::TasksDone {
                return Ok(());
            }
            self.steps += 1;
            if self.fabric_moves()? {
                continue;
            }
            let Some(worker) = self.pick() else { break };
            match self.step(worker)? {
                Next::Again => self.wake(worker),
                Next::Parked | Next::Ended => {}
            }
        }
        let (left, puts) = (self.tasks_left as u64, self.flights.len() as u64);
        if left == 0 && puts == 0 {
            return Ok(());
        }
        let blocked = self.blocked();
        Err(ExecError::Stuck { run: self.run, seed: self.config.seed, left, puts, blocked })
    }

    /// Chooses the next worker.
    fn pick(&mut self) -> Option<usize> {
        if self.runnable.is_empty() {
            if self.lagging.is_empty() {
                return None;
            }
            let at = self.rng.below(self.lagging.len());
            return Some(self.lagging.swap_remove(at));
        }
        let picked = match self.config.scheduler {
            Scheduler::RoundRobin => self.runnable.pop_front(),
            Scheduler::Random | Scheduler::Laggards | Scheduler::DelayedPuts | Scheduler::ReorderedPuts => {
                let at = self.rng.below(self.runnable.len());
                self.runnable.swap_remove_back(at)
            }
            Scheduler::Starve(_) => {
                let start = self.rng.below(self.runnable.len());
                // Often the starved role has thousands of workers, and nobody else can move.
                let places = if self.fed > 0 { 0..self.runnable.len() } else { 0..0 };
                let fed =
                    places.map(|i| (start + i) % self.runnable.len()).find(|&at| !self.is_starved(self.runnable[at]));
                self.runnable.swap_remove_back(fed.unwrap_or(start))
            }
        };
        self.fed -= usize::from(picked.is_some_and(|worker| !self.is_starved(worker)));
        picked
    }

    fn is_starved(&self, worker: usize) -> bool {
        self.config.scheduler == Scheduler::Starve(self.kind(self.workers[worker].role))
    }

    /// Lets a worker move whose task does not lag behind.
    fn let_run(&mut self, worker: usize) {
        self.fed += usize::from(!self.is_starved(worker));
        self.runnable.push_back(worker);
    }

    /// Lets a worker move again.
    fn wake(&mut self, worker: usize) {
        if self.workers[worker].live.as_ref().is_some_and(|live| live.lags) {
            self.lagging.push(worker);
        } else {
            self.let_run(worker);
        }
    }

    fn kind(&self, role: usize) -> RoleKind {
        self.roles[role].kind
    }

    /// Whether a task or put that begins now lags behind.
    fn lags(&mut self) -> bool {
        self.config.scheduler == Scheduler::Laggards && self.rng.one_in(self.lag_rate)
    }

    fn task(&self, role: usize, task: usize) -> &'a Task {
        &self.lists.tasks[role][task]
    }

    fn name(&self, role: usize, task: usize) -> TaskRef {
        task_name(self.schedule, self.lists, role, task)
    }

    fn rank_of(&self, worker: usize) -> Rank {
        self.schedule.cluster.rank(self.workers[worker].rank)
    }

    fn value(&self, rank: usize, flag: Flag) -> u32 {
        self.flags[rank][usize::from(flag.family.0)][flag.slot as usize]
    }

    /// Adds to a flag and lets everyone look again who may have waited for it.
    fn raise(&mut self, rank: usize, flag: Flag, add: u32) {
        let word = &mut self.flags[rank][usize::from(flag.family.0)][flag.slot as usize];
        *word = word.saturating_add(add);
        for worker in self.parked.remove(&(rank, flag)).unwrap_or_default() {
            self.wake(worker);
        }
        for role in rank * self.roles_per_rank..(rank + 1) * self.roles_per_rank {
            self.wake_idle(role);
        }
    }

    /// Lets one idle worker of a role look again. If it finds a task, or the end of the list, it wakes the next; if it
    /// finds nothing ready, nor would the others.
    fn wake_idle(&mut self, role: usize) {
        let idle = self.roles[role].idle.len();
        if idle > 0 {
            let pick = self.rng.below(idle);
            let worker = self.roles[role].idle.swap_remove(pick);
            self.wake(worker);
        }
    }

    /// The first flag of the waits at a gate that has not reached its level.
    fn unmet(&self, rank: usize, task: &Task, gate: Gate) -> Option<(Flag, u32)> {
        task.waits.iter().filter(|wait| wait.gate == gate).find_map(|wait| self.unmet_slot(rank, wait))
    }

    fn unmet_slot(&self, rank: usize, wait: &Wait) -> Option<(Flag, u32)> {
        wait.slots()
            .map(|slot| Flag { family: wait.flag.family, slot })
            .find(|&flag| self.value(rank, flag) < wait.at_least)
            .map(|flag| (flag, wait.at_least))
    }

    /// The first unmet flag of step `step`'s gates.
    fn unmet_step(&self, rank: usize, task: &Task, step: u32, steps: u32) -> Option<(Flag, u32)> {
        task.waits.iter().filter(|wait| wait.gate == Gate::KStep).find_map(|wait| {
            let flag = step_flag(wait, step, steps);
            (self.value(rank, flag) < wait.at_least).then_some((flag, wait.at_least))
        })
    }

    fn park(&mut self, worker: usize, flag: Flag) -> Next {
        self.parked.entry((self.workers[worker].rank, flag)).or_default().push(worker);
        Next::Parked
    }

    fn step(&mut self, worker: usize) -> Result<Next, ExecError> {
        match &self.workers[worker].live {
            None => self.claim(worker),
            Some(live) => {
                let (stage, task) = (live.stage, self.task(self.workers[worker].role, live.task));
                match stage {
                    Stage::Start => self.start(worker, task),
                    Stage::Steps(step) => Ok(self.run_steps(worker, task, step)),
                    Stage::Output => Ok(self.pass_output_gate(worker, task)),
                    Stage::Finish => Ok(self.finish(worker, task)),
                    Stage::Store => Ok(self.store(worker, task)),
                    Stage::Rendezvous => Ok(Next::Parked),
                }
            }
        }
    }

    /// Index of a role in its launch, and the role.
    fn role_spec(&self, role: usize) -> (usize, &'a Role) {
        let launch = self.roles[role].launch;
        let before: usize = self.schedule.launches[..launch].iter().map(|l| l.roles.len()).sum();
        let index = role % self.roles_per_rank - before;
        (index, &self.schedule.launches[launch].roles[index])
    }

    fn live(&mut self, worker: usize) -> &mut Live {
        self.workers[worker].live.as_mut().expect("a worker in a stage has a task")
    }
}

pub(super) fn task_name(schedule: &Schedule, lists: &Lists, role: usize, task: usize) -> TaskRef {
    let pairs: Vec<(usize, usize)> = schedule.role_indices().collect();
    let (l, r) = pairs[role % pairs.len()];
    let launch = &schedule.launches[l];
    TaskRef {
        rank: schedule.cluster.rank(role / pairs.len()),
        launch: launch.name.clone(),
        role: launch.roles[r].kind,
        task: task as u32,
        op: lists.tasks[role].get(task).map_or("none", |task| task.op.name()),
    }
}

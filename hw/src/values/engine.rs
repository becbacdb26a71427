//! One run: CTAs, flags, puts in flight, and a seeded scheduler that chooses what moves next.
//!
//! Everything that hardware may do in either order is a choice of its own: a task's reads come at its start or at its
//! end, its writes to different ranks one by one; a put reads its source, lands, raises its word and is `sent` in any
//! order that the fabric permits. A CTA that cannot move is parked on the flag it waits for, so a run that is stuck
//! is seen at once.

use super::memory::{Memory, Write, for_each_part, ranks_of};
use super::ops::{self, Carry};
use super::race::{Handle, Tracker};
use super::random::Rng;
use super::report::{ExecError, TaskRef};
use super::{Config, Scheduler};
use std::collections::{BTreeMap, VecDeque};
use tilewire_kernels::schedule::{
    Access, At, Claim, CollectiveKind, CtaCount, Flag, Gate, GatherEntry, Launch, Op, Publish, Region, Role, Signal,
    Task, Wait,
};
use tilewire_kernels::{Blocked, Rank, RoleKind, Schedule};

/// The tasks of every role of every rank, and the gather tables.
pub(super) struct Lists {
    /// By rank, then by role in the order of [`Schedule::role_indices`].
    pub(super) tasks: Vec<Vec<Task>>,
    pub(super) tables: Vec<Vec<Option<GatherEntry>>>,
}

/// A role of a rank while it runs.
struct RoleState {
    launch: usize,
    /// First unclaimed task (`Ready`: everything before it is claimed).
    cursor: usize,
    claimed: Vec<bool>,
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
    index: usize,
    of: usize,
    /// Tasks taken from a strided list.
    taken: usize,
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Start,
    Steps(u32),
    Output,
    Finish,
    Store,
    Rendezvous,
}

/// A put on its way.
struct Flight {
    rank: usize,
    role: usize,
    task: usize,
    to: usize,
    data: Option<Vec<u8>>,
    read: bool,
    landed: bool,
    published: bool,
    sent: bool,
    lags: bool,
    source: Option<Handle>,
    destination: Option<Handle>,
}

/// What became of a worker after its step.
enum Next {
    Again,
    Parked,
    Ended,
}

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
    /// Workers that can move, but whose task lags behind.
    lagging: Vec<usize>,
    parked: BTreeMap<(usize, Flag), Vec<usize>>,
    meeting: BTreeMap<(usize, usize), Vec<usize>>,
    flights: Vec<Flight>,
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
        seed: u64,
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
                let of = ctas as usize * role.lanes.max(1) as usize;
                launches[rank * num_launches + l].left += count;
                let home = rank * pairs.len() + local;
                roles.push(RoleState { launch: l, cursor: 0, claimed: vec![false; count], idle: Vec::new() });
                // Lane by lane, so that neighbouring tasks of a strided list go to different CTAs.
                for index in 0..of {
                    let cta = index as u32 % ctas;
                    workers.push(Worker { rank, home, role: home, cta, index, of, taken: 0, live: None });
                }
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
        let mut rng = Rng::new(seed);
        let flags = (0..ranks).map(|_| schedule.flags.iter().map(|f| vec![0; f.slots as usize]).collect()).collect();
        Ok(Self {
            schedule,
            config,
            lists,
            memory,
            tracker,
            roles_per_rank: pairs.len(),
            roles,
            launches,
            runnable: (0..workers.len()).collect(),
            lagging: Vec::new(),
            workers,
            flags,
            parked: BTreeMap::new(),
            meeting: BTreeMap::new(),
            flights: Vec::new(),
            lag_rate: 2 << rng.below(5),
            rng,
            tasks_done: 0,
            steps: 0,
        })
    }

    /// Runs until every task is done and every put has landed and been noticed.
    pub(super) fn run(&mut self, run: u32) -> Result<(), ExecError> {
        loop {
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
        let left: usize = self.launches.iter().map(|launch| launch.left).sum();
        if left == 0 {
            return Ok(());
        }
        let blocked = self.blocked();
        Err(ExecError::Stuck { run, seed: self.config.seed, left: left as u64, blocked })
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
        match self.config.scheduler {
            Scheduler::RoundRobin => self.runnable.pop_front(),
            Scheduler::Random | Scheduler::Laggards | Scheduler::DelayedPuts | Scheduler::ReorderedPuts => {
                let at = self.rng.below(self.runnable.len());
                self.runnable.swap_remove_back(at)
            }
            Scheduler::Starve(kind) => {
                let start = self.rng.below(self.runnable.len());
                let fed = (0..self.runnable.len())
                    .map(|i| (start + i) % self.runnable.len())
                    .find(|&at| self.kind(self.workers[self.runnable[at]].role) != kind);
                self.runnable.swap_remove_back(fed.unwrap_or(start))
            }
        }
    }

    /// Lets a worker move again.
    fn wake(&mut self, worker: usize) {
        if self.workers[worker].live.as_ref().is_some_and(|live| live.lags) {
            self.lagging.push(worker);
        } else {
            self.runnable.push_back(worker);
        }
    }

    fn kind(&self, role: usize) -> RoleKind {
        let (launch, first) = (self.roles[role].launch, role % self.roles_per_rank);
        let before: usize = self.schedule.launches[..launch].iter().map(|l| l.roles.len()).sum();
        self.schedule.launches[launch].roles[first - before].kind
    }

    /// Whether a task or put that begins now lags behind.
    fn lags(&mut self) -> bool {
        self.config.scheduler == Scheduler::Laggards && self.rng.one_in(self.lag_rate)
    }

    /// Moves one put, perhaps. Returns whether it did.
    fn fabric_moves(&mut self) -> Result<bool, ExecError> {
        if self.flights.is_empty() {
            return Ok(false);
        }
        let turn = match self.config.scheduler {
            Scheduler::DelayedPuts => false,
            Scheduler::ReorderedPuts => self.rng.one_in(8),
            _ => self.rng.one_in(3),
        };
        if !turn && !self.runnable.is_empty() {
            return Ok(false);
        }
        // Puts that lag move with the workers that lag.
        let hold_back = !self.runnable.is_empty() || (!self.lagging.is_empty() && !self.rng.one_in(2));
        let start = self.rng.below(self.flights.len());
        let order: Vec<usize> = match self.config.scheduler {
            // The youngest first, as far as the fabric permits.
            Scheduler::ReorderedPuts => (0..self.flights.len()).rev().collect(),
            Scheduler::RoundRobin => (0..self.flights.len()).collect(),
            _ => (0..self.flights.len()).map(|i| (start + i) % self.flights.len()).collect(),
        };
        for at in order {
            let moves = self.moves_of(at);
            if moves.is_empty() || (self.flights[at].lags && hold_back) {
                continue;
            }
            let mv = moves[self.rng.below(moves.len())];
            self.advance(at, mv)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// What the fabric may do next with a put.
    fn moves_of(&self, at: usize) -> Vec<Move> {
        let flight = &self.flights[at];
        let Op::Put { queue, publish, .. } = self.task(flight.role, flight.task).op else { return Vec::new() };
        let in_order = self.schedule.fabric.orders_within_queue();
        // Earlier puts of the same queue to the same rank, all of which a queue in order publishes first.
        let behind = in_order
            && self.flights[..at].iter().any(|other| {
                let same = other.rank == flight.rank && other.to == flight.to && !other.published;
                same && matches!(self.task(other.role, other.task).op, Op::Put { queue: q, .. } if q == queue)
            });
        let after_data = match publish {
            Publish::Immediate => true,
            Publish::SameQueueWrite => in_order,
            Publish::SeparateWrite { queue: flag_queue } => in_order && flag_queue == queue,
        };
        let mut moves = Vec::with_capacity(4);
        if !flight.read {
            moves.push(Move::Read);
        }
        if flight.read && !flight.landed && !behind {
            moves.push(Move::Land);
        }
        if !flight.published && (flight.landed || !after_data) && !behind {
            moves.push(Move::Publish);
        }
        if flight.read && !flight.sent {
            moves.push(Move::Sent);
        }
        moves
    }

    fn advance(&mut self, at: usize, mv: Move) -> Result<(), ExecError> {
        let lists = self.lists;
        let (rank, role, task, to) = {
            let flight = &self.flights[at];
            (flight.rank, flight.role, flight.task, flight.to)
        };
        let Op::Put { src, dst, arrived, sent, .. } = &lists.tasks[role][task].op else { return Ok(()) };
        let data = dst.region.bytes() != 0;
        match mv {
            Move::Read => {
                self.flights[at].data = data.then(|| self.memory.read(rank, src));
                self.flights[at].read = true;
            }
            Move::Land => {
                if let Some(data) = self.flights[at].data.take() {
                    self.memory.write(&Write { rank: to, region: dst.region, data, add: false });
                }
                // What has landed has been read.
                let handles = [self.flights[at].source.take(), self.flights[at].destination.take()];
                self.close(handles.into_iter().flatten());
                self.flights[at].landed = true;
            }
            Move::Publish => {
                self.flights[at].published = true;
                if self.value(to, *arrived) != 0 {
                    return Err(ExecError::RaisedTwice {
                        task: Box::new(self.name(role, task)),
                        rank: self.schedule.cluster.rank(to),
                        flag: self.schedule.family(arrived.family).name.clone(),
                        slot: arrived.slot,
                    });
                }
                self.raise(to, *arrived, 1);
            }
            Move::Sent => {
                let handle = self.flights[at].source.take();
                self.close(handle.into_iter());
                self.flights[at].sent = true;
                if let Some(sent) = sent {
                    self.raise(rank, *sent, 1);
                }
            }
        }
        let flight = &self.flights[at];
        if flight.landed && flight.published && flight.sent {
            // Keeps the order in which puts were posted.
            self.flights.remove(at);
        }
        Ok(())
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

    fn launch_ended(&self, rank: usize, launch: usize) -> bool {
        self.launches[rank * self.schedule.launches.len() + launch].left == 0 && self.launch_begun(rank, launch)
    }

    fn launch_begun(&self, rank: usize, launch: usize) -> bool {
        self.schedule.launches[launch].after.iter().all(|&before| self.launch_ended(rank, before))
    }

    fn claim(&mut self, worker: usize) -> Result<Next, ExecError> {
        let Worker { rank, home, role, index, of, taken, .. } = self.workers[worker];
        let launch = self.roles[role].launch;
        if !self.launch_begun(rank, launch) {
            self.launches[rank * self.schedule.launches.len() + launch].waiting.push(worker);
            return Ok(Next::Parked);
        }
        let (_, spec) = self.role_spec(role);
        let count = self.roles[role].claimed.len();
        let got = match spec.claim {
            Claim::Strided if role != home => {
                let what = "a CTA recycles into a strided role".to_owned();
                return Err(ExecError::Illegal { task: Box::new(self.name(role, 0)), what });
            }
            Claim::Strided => {
                self.workers[worker].taken += 1;
                Some(index + taken * of).filter(|&task| task < count)
            }
            Claim::Ticket => {
                self.roles[role].cursor += 1;
                Some(self.roles[role].cursor - 1).filter(|&task| task < count)
            }
            Claim::Ready { window } => {
                let state = &mut self.roles[role];
                while state.cursor < count && state.claimed[state.cursor] {
                    state.cursor += 1;
                }
                let cursor = state.cursor;
                if cursor == count {
                    None
                } else {
                    let end = count.min(cursor + window as usize);
                    let state = &self.roles[role];
                    let found = (cursor..end).find(|&task| {
                        !state.claimed[task] && self.unmet(rank, self.task(role, task), Gate::Start).is_none()
                    });
                    if found.is_none() {
                        self.roles[role].idle.push(worker);
                        return Ok(Next::Parked);
                    }
                    found
                }
            }
        };
        let Some(task) = got else {
            self.wake_idle(role);
            return Ok(match spec.recycle {
                Some(next) => {
                    let first = role - self.role_spec(role).0;
                    self.workers[worker].role = first + next;
                    Next::Again
                }
                None => Next::Ended,
            });
        };
        self.roles[role].claimed[task] = true;
        // The window may have moved, and the flag that rose may serve more than one task.
        self.wake_idle(role);
        let late = self.rng.one_in(2);
        let lags = self.lags();
        self.workers[worker].live = Some(Live {
            task,
            stage: Stage::Start,
            late,
            lags,
            carry: Carry::Nothing,
            writes: Vec::new(),
            reads: Vec::new(),
            held: Vec::new(),
            targets: Vec::new(),
        });
        Ok(Next::Again)
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

    fn start(&mut self, worker: usize, task: &'a Task) -> Result<Next, ExecError> {
        let rank = self.workers[worker].rank;
        if let Some((flag, _)) = self.unmet(rank, task, Gate::Start) {
            return Ok(self.park(worker, flag));
        }
        match &task.op {
            Op::Put { src, dst, .. } => {
                self.post(worker, src, &dst.region, dst.at);
                self.signal(worker, task, |_, _| true);
                return Ok(self.complete(worker));
            }
            Op::Collective { .. } => return self.meet(worker, task),
            _ => {}
        }
        let stepped = task.op.steps() > 0;
        let gated = task.waits.iter().any(|wait| wait.gate == Gate::Output);
        self.open_accesses(worker, task, |access, panel| match access {
            // The panels of a main loop are opened step by step.
            Access::Read => !(stepped && panel),
            _ => !gated,
        });
        let at = self.rank_of(worker);
        let late = self.live(worker).late;
        if !late {
            let carry = ops::begin(self.memory, at, &task.op);
            let table = &self.lists.tables[rank];
            let writes = if stepped { Vec::new() } else { ops::finish(self.memory, at, &task.op, &carry, table) };
            let live = self.live(worker);
            (live.carry, live.writes) = (carry, writes);
        }
        self.live(worker).stage = if stepped { Stage::Steps(0) } else { Stage::Output };
        Ok(Next::Again)
    }

    fn run_steps(&mut self, worker: usize, task: &'a Task, step: u32) -> Next {
        let (rank, at, steps) = (self.workers[worker].rank, self.rank_of(worker), task.op.steps());
        if let Some((flag, _)) = self.unmet_step(rank, task, step, steps) {
            return self.park(worker, flag);
        }
        let gates = || task.waits.iter().filter(|wait| wait.gate == Gate::KStep);
        let end = (step + 1..steps)
            .find(|&next| gates().any(|wait| step_flag(wait, next, steps) != step_flag(wait, step, steps)))
            .unwrap_or(steps);
        self.open_panels(worker, task, step, end);
        if !self.live(worker).late {
            let mut carry = std::mem::replace(&mut self.live(worker).carry, Carry::Nothing);
            ops::steps(self.memory, at, &task.op, &mut carry, step, end);
            self.live(worker).carry = carry;
        }
        self.live(worker).stage = if end == steps { Stage::Output } else { Stage::Steps(end) };
        Next::Again
    }

    fn pass_output_gate(&mut self, worker: usize, task: &'a Task) -> Next {
        if let Some((flag, _)) = self.unmet(self.workers[worker].rank, task, Gate::Output) {
            return self.park(worker, flag);
        }
        if task.waits.iter().any(|wait| wait.gate == Gate::Output) {
            self.open_accesses(worker, task, |access, _| access != Access::Read);
        }
        self.live(worker).stage = Stage::Finish;
        Next::Again
    }

    /// The reads are done; early signals are out before any write.
    fn finish(&mut self, worker: usize, task: &'a Task) -> Next {
        let (rank, at) = (self.workers[worker].rank, self.rank_of(worker));
        let stepped = task.op.steps() > 0;
        let late = self.live(worker).late;
        if late || stepped {
            let mut carry = std::mem::replace(&mut self.live(worker).carry, Carry::Nothing);
            if late {
                carry = ops::begin(self.memory, at, &task.op);
                ops::steps(self.memory, at, &task.op, &mut carry, 0, task.op.steps());
            }
            let writes = ops::finish(self.memory, at, &task.op, &carry, &self.lists.tables[rank]);
            self.live(worker).writes = writes;
        }
        let reads = std::mem::take(&mut self.live(worker).reads);
        self.close(reads.into_iter());
        self.signal(worker, task, |signal, _| signal.early);
        let live = self.live(worker);
        let mut targets: Vec<usize> = live.writes.iter().map(|write| write.rank).collect();
        targets.sort_unstable();
        targets.dedup();
        (live.targets, live.stage) = (targets, Stage::Store);
        Next::Again
    }

    /// Writes to one rank and raises the flags there; after the last one, all other flags.
    fn store(&mut self, worker: usize, task: &'a Task) -> Next {
        let count = self.live(worker).targets.len();
        if count > 0 {
            let pick = self.rng.below(count);
            let live = self.live(worker);
            let target = live.targets.swap_remove(pick);
            let (now, later): (Vec<Write>, Vec<Write>) =
                std::mem::take(&mut live.writes).into_iter().partition(|write| write.rank == target);
            live.writes = later;
            let (done, held): (Vec<_>, Vec<_>) =
                std::mem::take(&mut live.held).into_iter().partition(|(rank, _)| *rank == target);
            live.held = held;
            for write in &now {
                self.memory.write(write);
            }
            self.close(done.into_iter().map(|(_, handle)| handle));
            self.signal(worker, task, |signal, to| !signal.early && to == target);
        }
        if !self.live(worker).targets.is_empty() {
            return Next::Again;
        }
        // The rendezvous of a collective wrote for it, before any of its signals.
        let collective = matches!(task.op, Op::Collective { .. });
        let written =
            if collective { Vec::new() } else { written_ranks(self.schedule, self.rank_of(worker), &task.op) };
        self.signal(worker, task, |signal, to| !signal.early && !written.contains(&to));
        self.complete(worker)
    }

    /// Raises the task's signals to the ranks that `which` accepts.
    fn signal(&mut self, worker: usize, task: &Task, which: impl Fn(&Signal, usize) -> bool) {
        let at = self.rank_of(worker);
        for signal in &task.signals {
            for to in ranks_of(self.schedule.cluster, at, signal.to) {
                if which(signal, to) {
                    self.raise(to, signal.flag, signal.add);
                }
            }
        }
    }

    fn complete(&mut self, worker: usize) -> Next {
        let Worker { rank, role, .. } = self.workers[worker];
        let launch = self.roles[role].launch;
        self.workers[worker].live = None;
        self.tasks_done += 1;
        let launches = self.schedule.launches.len();
        let state = &mut self.launches[rank * launches + launch];
        state.left -= 1;
        if state.left == 0 {
            for other in rank * launches..(rank + 1) * launches {
                let waiting = std::mem::take(&mut self.launches[other].waiting);
                self.runnable.extend(waiting);
            }
        }
        Next::Again
    }

    fn post(&mut self, worker: usize, src: &Region, dst: &Region, at: At) {
        let Worker { rank, role, .. } = self.workers[worker];
        let to = ranks_of(self.schedule.cluster, self.rank_of(worker), at)[0];
        let task = self.live(worker).task;
        let data = dst.bytes() != 0;
        let source = if data { self.open(rank, src, None, Access::Read, role, task) } else { None };
        let destination = if data { self.open(to, dst, None, Access::Write, role, task) } else { None };
        let lags = self.lags();
        self.flights.push(Flight {
            rank,
            role,
            task,
            to,
            data: None,
            read: false,
            landed: false,
            published: false,
            sent: false,
            lags,
            source,
            destination,
        });
    }

    /// Waits for every rank; the last one carries out the collective for all.
    fn meet(&mut self, worker: usize, task: &'a Task) -> Result<Next, ExecError> {
        let key = (self.workers[worker].role % self.roles_per_rank, self.live(worker).task);
        self.open_accesses(worker, task, |_, _| true);
        self.live(worker).stage = Stage::Rendezvous;
        let present = self.meeting.entry(key).or_default();
        present.push(worker);
        if present.len() < self.schedule.cluster.ranks() {
            return Ok(Next::Parked);
        }
        let mut present = self.meeting.remove(&key).unwrap_or_default();
        present.sort_unstable_by_key(|&worker| self.workers[worker].rank);
        let mut sources = Vec::new();
        for &member in &present {
            let Worker { rank, role, .. } = self.workers[member];
            let Op::Collective { src, kind, .. } = &self.task(role, key.1).op else {
                let what = format!("meets the {} of another rank", task.op.name());
                return Err(ExecError::Illegal { task: Box::new(self.name(role, key.1)), what });
            };
            sources.push((*kind, self.memory.read(rank, src), self.memory.dtype(src)));
        }
        for &member in &present {
            let Worker { rank, role, .. } = self.workers[member];
            if let Op::Collective { kind, dst, .. } = &self.task(role, key.1).op {
                let data = collective(*kind, rank, &sources);
                self.memory.write(&Write { rank, region: *dst, data, add: false });
            }
            let live = self.live(member);
            live.stage = Stage::Store;
            let handles: Vec<Handle> =
                live.reads.drain(..).chain(live.held.drain(..).map(|(_, handle)| handle)).collect();
            self.close(handles.into_iter());
            if member != worker {
                self.wake(member);
            }
        }
        Ok(Next::Again)
    }

    fn close(&mut self, handles: impl Iterator<Item = Handle>) {
        if let Some(tracker) = &mut self.tracker {
            handles.for_each(|handle| tracker.close(handle));
        }
    }

    /// Opens an access to a region, or to some pieces of it.
    fn open(
        &mut self,
        rank: usize,
        region: &Region,
        pieces: Option<Vec<(u64, u64)>>,
        access: Access,
        role: usize,
        task: usize,
    ) -> Option<Handle> {
        let tracker = self.tracker.as_mut()?;
        let runs = pieces.unwrap_or_else(|| {
            let mut runs = Vec::new();
            region.for_each_run(|start, len| runs.push((start, start + len)));
            runs
        });
        let owner = (role as u64) << 32 | task as u64;
        let (schedule, lists) = (self.schedule, self.lists);
        let name_of = |owner: u64| task_name(schedule, lists, (owner >> 32) as usize, owner as u32 as usize);
        let buffer = usize::from(region.buffer.0);
        Some(tracker.open((rank, buffer, &schedule.buffers[buffer].name), runs, access, owner, &name_of))
    }

    /// Opens those accesses of a task that `which(access, is a main loop panel)` accepts.
    fn open_accesses(&mut self, worker: usize, task: &'a Task, which: impl Fn(Access, bool) -> bool) {
        if self.tracker.is_none() {
            return;
        }
        let (at, role, index) = (self.rank_of(worker), self.workers[worker].role, self.live(worker).task);
        let mut wanted = Vec::new();
        let mut nth = 0;
        task.op.for_each_access(|place, region, access| {
            let panel = match task.op {
                Op::GemmTile { .. } => nth < 2,
                Op::AttentionTile { .. } => nth == 1 || nth == 2,
                _ => false,
            };
            nth += 1;
            if which(access, panel) {
                for rank in ranks_of(self.schedule.cluster, at, place) {
                    wanted.push((rank, *region, access));
                }
            }
        });
        if let Op::GatherRows { table, src, dst, .. } = &task.op
            && which(Access::Read, false)
        {
            let entries = &self.lists.tables[self.workers[worker].rank];
            for entry in entries[table.start as usize..(table.start + table.len) as usize].iter().flatten() {
                let from = ranks_of(self.schedule.cluster, at, At::local(entry.dg))[0];
                wanted.push((from, ops::gathered_row(*src, dst, *entry), Access::Read));
            }
        }
        for (rank, region, access) in wanted {
            let Some(handle) = self.open(rank, &region, None, access, role, index) else { continue };
            let live = self.live(worker);
            if access == Access::Read { live.reads.push(handle) } else { live.held.push((rank, handle)) }
        }
    }

    /// Opens the parts of the operand panels that steps `from..to` read.
    fn open_panels(&mut self, worker: usize, task: &'a Task, from: u32, to: u32) {
        if self.tracker.is_none() {
            return;
        }
        let Worker { rank, role, .. } = self.workers[worker];
        let index = self.live(worker).task;
        let (from, to) = (u64::from(from), u64::from(to));
        let rows = |region: &Region, row_bytes: u64, block: u64| {
            let mut runs = Vec::new();
            let (first, len) = (from * block * row_bytes, (to - from) * block * row_bytes);
            for_each_part(region, first, len, |start, len| runs.push((start, start + len)));
            (*region, runs)
        };
        let panels = match &task.op {
            Op::GemmTile { a, b, tile, .. } => {
                let [bm, bn, bk] = tile.map(u64::from);
                let pitch = a.bytes() / bm;
                let mut runs = Vec::new();
                for row in 0..bm {
                    let first = row * pitch + from * bk * 2;
                    for_each_part(a, first, (to - from) * bk * 2, |start, len| runs.push((start, start + len)));
                }
                [(*a, runs), rows(b, bn * 2, bk)]
            }
            Op::AttentionTile { k, v, tile, .. } => {
                let (row_bytes, block) = (u64::from(k.row_bytes), u64::from(tile[1]));
                [rows(k, row_bytes, block), rows(v, row_bytes, block)]
            }
            _ => return,
        };
        for (region, runs) in panels {
            if let Some(handle) = self.open(rank, &region, Some(runs), Access::Read, role, index) {
                self.live(worker).reads.push(handle);
            }
        }
    }

    /// Every worker that waits, and for what.
    fn blocked(&self) -> Vec<Blocked> {
        let mut blocked: Vec<Blocked> = Vec::new();
        for worker in &self.workers {
            let Worker { rank, role, cta, .. } = *worker;
            let entry = |task: usize, flag: String, slot, have, need| Blocked {
                rank: self.schedule.cluster.rank(rank),
                launch: self.schedule.launches[self.roles[role].launch].name.clone(),
                role: self.kind(role),
                cta,
                task: task as u32,
                flag,
                slot,
                have,
                need,
            };
            let on_flag = |task: usize, (flag, need): (Flag, u32)| {
                let name = self.schedule.family(flag.family).name.clone();
                entry(task, name, flag.slot, self.value(rank, flag), need)
            };
            if let Some(live) = &worker.live {
                let task = self.task(role, live.task);
                let unmet = match live.stage {
                    Stage::Start => self.unmet(rank, task, Gate::Start),
                    Stage::Steps(step) => self.unmet_step(rank, task, step, task.op.steps()),
                    Stage::Output => self.unmet(rank, task, Gate::Output),
                    _ => None,
                };
                if live.stage == Stage::Rendezvous {
                    let have = self.meeting.get(&(role % self.roles_per_rank, live.task)).map_or(0, Vec::len);
                    let need = self.schedule.cluster.ranks() as u32;
                    blocked.push(entry(live.task, Blocked::ALL_RANKS.to_owned(), 0, have as u32, need));
                }
                blocked.extend(unmet.map(|unmet| on_flag(live.task, unmet)));
            } else {
                let state = &self.roles[role];
                let ready = matches!(self.role_spec(role).1.claim, Claim::Ready { .. });
                if ready && self.launch_begun(rank, state.launch) {
                    let first = (state.cursor..state.claimed.len()).find(|&task| !state.claimed[task]);
                    blocked.extend(first.and_then(|task| {
                        self.unmet(rank, self.task(role, task), Gate::Start).map(|unmet| on_flag(task, unmet))
                    }));
                }
            }
        }
        blocked
    }
}

#[derive(Clone, Copy)]
enum Move {
    Read,
    Land,
    Publish,
    Sent,
}

/// The flag that gates a step.
fn step_flag(wait: &Wait, step: u32, steps: u32) -> Flag {
    let index = (u64::from(step) * u64::from(wait.count) / u64::from(steps)) as u32;
    Flag { family: wait.flag.family, slot: wait.flag.slot + index * wait.stride }
}

fn cta_count(launch: &Launch, role: usize, config: &Config) -> u32 {
    let fixed = |role: &Role| match role.ctas {
        CtaCount::FromSplit => config.split.get(role.kind),
        CtaCount::Fixed(ctas) => ctas,
        CtaCount::AllSms | CtaCount::AllBut(_) => 0,
    };
    match launch.roles[role].ctas.spared() {
        Some(spared) => config.sms.saturating_sub(launch.roles.iter().map(fixed).sum::<u32>() + spared).max(1),
        None => fixed(&launch.roles[role]),
    }
}

/// Whether a CTA of role `from` can come to role `to`, itself included.
fn reaches(schedule: &Schedule, launch: usize, from: usize, to: usize, config: &Config) -> bool {
    let roles = &schedule.launches[launch].roles;
    if cta_count(&schedule.launches[launch], from, config) == 0 {
        return false;
    }
    let mut at = from;
    for _ in 0..=roles.len() {
        if at == to {
            return true;
        }
        match roles[at].recycle {
            Some(next) => at = next,
            None => return false,
        }
    }
    false
}

fn written_ranks(schedule: &Schedule, rank: Rank, op: &Op) -> Vec<usize> {
    let mut written = Vec::new();
    op.for_each_access(|at, _, access| {
        if access != Access::Read {
            written.extend(ranks_of(schedule.cluster, rank, at));
        }
    });
    written
}

fn task_name(schedule: &Schedule, lists: &Lists, role: usize, task: usize) -> TaskRef {
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

/// What rank `me` gets from a collective.
fn collective(
    kind: CollectiveKind,
    me: usize,
    sources: &[(CollectiveKind, Vec<u8>, tilewire_kernels::schedule::DType)],
) -> Vec<u8> {
    let ranks = sources.len();
    let part = |bytes: &[u8], part: usize| {
        let len = bytes.len() / ranks;
        bytes[part * len..(part + 1) * len].to_vec()
    };
    let sum = |parts: Vec<Vec<u8>>| {
        let dtype = sources[me].2;
        let mut sum: Vec<f32> = Vec::new();
        for bytes in parts {
            let values = super::memory::floats(dtype, &bytes);
            sum.resize(values.len(), 0.0);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        super::memory::bytes_of(dtype, &sum)
    };
    match kind {
        CollectiveKind::AllGather => sources.iter().flat_map(|(_, bytes, _)| bytes.iter().copied()).collect(),
        CollectiveKind::AllToAll => sources.iter().flat_map(|(_, bytes, _)| part(bytes, me)).collect(),
        CollectiveKind::ReduceScatter => sum(sources.iter().map(|(_, bytes, _)| part(bytes, me)).collect()),
        CollectiveKind::AllReduce => sum(sources.iter().map(|(_, bytes, _)| bytes.clone()).collect()),
    }
}

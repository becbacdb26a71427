//! A CTA thread: takes tasks by its role's claim rule, waits, executes, signals.

use super::memory::Reach;
use super::plan::Plan;
use super::watch::{Waiting, What};
use crate::timeline::TaskTime;
use crate::transport::fifo::Fifo;
use crate::transport::proxy::rest;
use crate::transport::puts::commands;
use crate::transport::{Command, Told, Word};
use crate::values::engine::stages::step_flag;
use crate::values::memory::ranks_of;
use crate::values::ops::{self, Carry};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use tilewire_kernels::Schedule;
use tilewire_kernels::schedule::{Claim, Flag, Gate, Op, Signal, Strides, Task, Wait};

/// One run of a rank, as its threads share it.
pub(super) struct Run<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) plan: &'a Plan,
    pub(super) reach: &'a Reach,
    pub(super) told: Told,
    pub(super) bank: u32,
    /// Launch and role of each role index.
    pub(super) pairs: &'a [(usize, usize)],
    pub(super) roles: Vec<RoleState>,
    /// Tasks left, by launch.
    pub(super) launches: Vec<AtomicUsize>,
    pub(super) fifos: Vec<Fifo<Command>>,
    pub(super) stop: &'a AtomicBool,
    pub(super) progress: AtomicU64,
    pub(super) pushed: AtomicU64,
    pub(super) puts: AtomicU32,
    pub(super) ctas_left: AtomicUsize,
    pub(super) patience: u32,
    /// Its tasks as they end, if they are recorded.
    pub(super) tasks: Option<Recorded>,
}

/// The tasks of a run that is recorded.
pub(super) struct Recorded {
    /// Where times begin.
    pub(super) begin: Instant,
    pub(super) tasks: Mutex<Vec<TaskTime>>,
}

/// How far a role is.
pub(super) struct RoleState {
    pub(super) next: AtomicUsize,
    pub(super) window: Mutex<Window>,
}

/// The first unclaimed task, and which are claimed.
pub(super) struct Window {
    pub(super) cursor: usize,
    pub(super) claimed: Vec<bool>,
}

/// A CTA, or a lane of one.
pub(super) struct Worker {
    pub(super) home: usize,
    pub(super) cta: u32,
    /// Number of the CTA in its launch, and of its lane.
    pub(super) block: u32,
    pub(super) lane: u32,
    pub(super) index: u32,
    pub(super) of: u32,
    /// What it waits for; kept when the run stops.
    pub(super) waiting: Mutex<Option<Waiting>>,
}

/// The run has stopped.
struct Stopped;

impl Run<'_> {
    /// Executes tasks until none are left or the run stops.
    pub(super) fn work(&self, worker: &Worker) {
        let _ = self.work_through(worker);
        self.ctas_left.fetch_sub(1, Ordering::AcqRel);
    }

    fn work_through(&self, worker: &Worker) -> Result<(), Stopped> {
        let launch = self.pairs[worker.home].0;
        let after = || self.schedule.launches[launch].after.iter().all(|&before| self.ended(before));
        self.until(worker, || None, after)?;
        let mut role = worker.home;
        let mut next = self.strides(worker, role).first(worker.index);
        loop {
            let Some(task) = self.claim(worker, role, &mut next)? else {
                let (launch, index) = self.pairs[role];
                match self.schedule.launches[launch].roles[index].recycle {
                    Some(next) => role = role - index + next,
                    None => return Ok(()),
                }
                continue;
            };
            self.execute(worker, role, task)?;
            self.progress.fetch_add(1, Ordering::Relaxed);
            self.launches[launch].fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn ended(&self, launch: usize) -> bool {
        self.launches[launch].load(Ordering::Acquire) == 0
            && self.schedule.launches[launch].after.iter().all(|&before| self.ended(before))
    }

    /// Waits for `met`; `what` says what to report meanwhile.
    fn until(
        &self,
        worker: &Worker,
        what: impl Fn() -> Option<Waiting>,
        met: impl Fn() -> bool,
    ) -> Result<(), Stopped> {
        let note = |waiting| *worker.waiting.lock().unwrap_or_else(PoisonError::into_inner) = waiting;
        let mut idle = 0;
        while !met() {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Stopped);
            }
            if idle == 0 {
                note(what());
            }
            idle = rest(idle, self.patience);
        }
        if idle > 0 {
            note(None);
        }
        if self.stop.load(Ordering::Relaxed) { Err(Stopped) } else { Ok(()) }
    }

    fn strides(&self, worker: &Worker, role: usize) -> Strides<'_> {
        let (tasks, restarts) = (&self.plan.tasks[role], &self.plan.restarts[role]);
        Strides { tasks: tasks.len() as u32, workers: worker.of, restarts }
    }

    /// `next`: of a strided list.
    fn claim(&self, worker: &Worker, role: usize, next: &mut u32) -> Result<Option<usize>, Stopped> {
        let (launch, index) = self.pairs[role];
        let count = self.plan.tasks[role].len();
        let state = &self.roles[role];
        let task = match self.schedule.launches[launch].roles[index].claim {
            Claim::Strided => return Ok(self.strides(worker, role).take(next).map(|task| task as usize)),
            Claim::Ticket => state.next.fetch_add(1, Ordering::Relaxed),
            Claim::Ready { window } => {
                let found = Mutex::new(None);
                let look = || {
                    let mut state = state.window.lock().unwrap_or_else(PoisonError::into_inner);
                    while state.cursor < count && state.claimed[state.cursor] {
                        state.cursor += 1;
                    }
                    let end = count.min(state.cursor + window as usize);
                    let ready = (state.cursor..end).find(|&at| {
                        !state.claimed[at] && self.unmet(&self.plan.tasks[role][at], Gate::Start).is_none()
                    });
                    let task = if state.cursor == count { Some(count) } else { ready };
                    if let Some(task) = task.filter(|&task| task < count) {
                        state.claimed[task] = true;
                    }
                    *found.lock().unwrap_or_else(PoisonError::into_inner) = task;
                    task.is_some()
                };
                let what = || {
                    let task = state.window.lock().unwrap_or_else(PoisonError::into_inner).cursor;
                    let (flag, need) = self.unmet(self.plan.tasks[role].get(task)?, Gate::Start)?;
                    Some(Waiting { role, task, what: What::Flag(flag, need) })
                };
                self.until(worker, what, look)?;
                let found = *found.lock().unwrap_or_else(PoisonError::into_inner);
                found.unwrap_or(count)
            }
        };
        Ok(Some(task).filter(|&task| task < count))
    }

    /// The value of a flag of the own rank.
    pub(super) fn value(&self, flag: Flag) -> u32 {
        let me = self.reach.cluster.number(self.plan.rank);
        let word = Word::new(self.reach.layout.slot(flag), self.bank);
        self.reach.of(me).word(word).load(Ordering::Acquire)
    }

    fn unmet(&self, task: &Task, gate: Gate) -> Option<(Flag, u32)> {
        task.waits.iter().filter(|wait| wait.gate == gate).find_map(|wait| {
            let flags = wait.slots().map(|slot| Flag { family: wait.flag.family, slot });
            flags.map(|flag| (flag, wait.at_least)).find(|&(flag, need)| self.value(flag) < need)
        })
    }

    fn pass(&self, worker: &Worker, (role, task): (usize, usize), flag: Flag, need: u32) -> Result<(), Stopped> {
        let what = || Some(Waiting { role, task, what: What::Flag(flag, need) });
        self.until(worker, what, || self.value(flag) >= need)
    }

    /// Returns the flag that was waited for last.
    fn pass_gate(&self, worker: &Worker, at: (usize, usize), task: &Task, gate: Gate) -> Result<Option<Flag>, Stopped> {
        let mut waited_for = None;
        for wait in task.waits.iter().filter(|wait| wait.gate == gate) {
            for slot in wait.slots() {
                let flag = Flag { family: wait.flag.family, slot };
                if self.value(flag) < wait.at_least {
                    waited_for = Some(flag);
                    self.pass(worker, at, flag, wait.at_least)?;
                }
            }
        }
        Ok(waited_for)
    }

    /// Notes a task that is over.
    fn note(&self, worker: &Worker, (role, task): (usize, usize), taken: Instant, start: Instant, flag: Option<Flag>) {
        let Some(Recorded { begin, tasks }) = &self.tasks else { return };
        let ps = |at: Instant| at.saturating_duration_since(*begin).as_nanos() as u64 * 1000;
        let end = ps(Instant::now());
        let time = TaskTime {
            rank: self.reach.cluster.number(self.plan.rank) as u32,
            role: role as u32,
            block: worker.block,
            cta: worker.cta,
            lane: worker.lane,
            task: task as u32,
            taken: ps(taken),
            start: ps(start),
            free: end,
            end,
            waited_for: flag.map(|flag| (u32::from(flag.family.0), flag.slot)),
        };
        tasks.lock().unwrap_or_else(PoisonError::into_inner).push(time);
    }

    fn execute(&self, worker: &Worker, role: usize, index: usize) -> Result<(), Stopped> {
        let (task, at) = (&self.plan.tasks[role][index], (role, index));
        let rank = self.plan.rank;
        let taken = Instant::now();
        let waited_for = self.pass_gate(worker, at, task, Gate::Start)?;
        let start = Instant::now();
        if let Op::Put { .. } = task.op {
            self.push(worker, at, &task.op)?;
            self.signal(task, |_| true);
            self.note(worker, at, taken, start, waited_for);
            return Ok(());
        }
        let mut carry = ops::begin(self.reach, rank, &task.op);
        self.run_steps(worker, at, task, &mut carry)?;
        self.pass_gate(worker, at, task, Gate::Output)?;
        self.signal(task, |signal| signal.early);
        for write in ops::finish(self.reach, rank, &task.op, &carry, &self.plan.table) {
            self.reach.write(&write);
        }
        self.signal(task, |signal| !signal.early);
        self.note(worker, at, taken, start, waited_for);
        Ok(())
    }

    /// Runs all steps, each once its flags are up.
    fn run_steps(&self, worker: &Worker, at: (usize, usize), task: &Task, carry: &mut Carry) -> Result<(), Stopped> {
        let steps = task.op.steps();
        let gates: Vec<&Wait> = task.waits.iter().filter(|wait| wait.gate == Gate::KStep).collect();
        let mut from = 0;
        while from < steps {
            for wait in &gates {
                self.pass(worker, at, step_flag(wait, from, steps), wait.at_least)?;
            }
            let changes =
                |&to: &u32| gates.iter().any(|wait| step_flag(wait, to, steps) != step_flag(wait, from, steps));
            let to = (from + 1..steps).find(changes).unwrap_or(steps);
            ops::steps(self.reach, self.plan.rank, &task.op, carry, from, to);
            from = to;
        }
        Ok(())
    }

    /// Hands a put to the proxy of its queue.
    fn push(&self, worker: &Worker, (role, task): (usize, usize), op: &Op) -> Result<(), Stopped> {
        let put = self.puts.fetch_add(1, Ordering::Relaxed);
        let writes = commands(self.schedule, &self.reach.layout, self.plan.rank, op, self.bank, self.told);
        for command in writes {
            let index = usize::from(command.queue) % self.fifos.len();
            let fifo = &self.fifos[index];
            self.pushed.fetch_add(1, Ordering::AcqRel);
            let what = || Some(Waiting { role, task, what: What::Fifo(index) });
            self.until(worker, what, || fifo.push(Command { put, ..command }).is_ok())?;
        }
        Ok(())
    }

    /// Raises the task's signals that `which` accepts, after everything that this thread has written.
    fn signal(&self, task: &Task, which: impl Fn(&Signal) -> bool) {
        let cluster = self.reach.cluster;
        for signal in task.signals.iter().filter(|signal| which(signal)) {
            let word = Word::new(self.reach.layout.slot(signal.flag), self.bank);
            for to in ranks_of(cluster, self.plan.rank, signal.to) {
                self.reach.of(to).word(word).fetch_add(signal.add, Ordering::AcqRel);
            }
        }
    }
}

//! What a CTA (or a lane of one) does with a task: wait, work, write, signal, take the next.

use super::tables::CostRow;
use super::timers::kind;
use super::{Engine, Here, ended};
use crate::compile::{NONE, SPAN, TaskC, WaitC, Work};
use crate::share::NEVER;
use tilewire_kernels::schedule::Drain;

/// Where a worker stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Its launch has not begun.
    Absent,
    /// Without a task.
    Free,
    /// Waits for a flag before the task.
    Start,
    /// Waits for a flag before a step.
    Step,
    /// Waits for the first loads, or for its block to start.
    Filling,
    /// The first loads are there.
    Filled,
    /// A flow runs.
    Running,
    /// The flow has ended.
    Main,
    /// The flow of a move has ended, what the CTAs that compute add to it has not.
    Crowded,
    /// Waits for a flag before the outputs are written.
    Output,
    /// May write, once the store of the task before is done.
    StoreBusy,
    /// Waits for its own store.
    Store,
    /// Pushes a command, or waits for room in the FIFO.
    Push,
    /// Waits for the other ranks.
    Rendezvous,
    /// The collective or the move is over.
    Over,
    /// Looks for a ready task.
    Idle,
    /// Stands for all workers of its role, whose tasks only wait.
    Watch,
    /// Nothing is left to do.
    Done,
}

/// A lane of a CTA: what every task touches, two to a cache line.
#[derive(Clone, Copy)]
pub(super) struct Worker {
    /// All start waits of the task were met.
    pub start: u64,
    pub task: u32,
    /// Of a tile, steps that have begun; of a move, CTAs that computed when it began.
    pub step: u32,
    /// Next task of a strided list.
    pub position: u32,
    /// Task whose store is in flight.
    pub storing_task: u32,
    pub role: u16,
    pub state: State,
    /// A store of the task before is in flight.
    pub storing: bool,
    /// The task could start when the CTA became free: its first loads were prefetched.
    pub prefetched: bool,
    /// The task has waited since it started: see [`Pause::stalled`].
    pub stalled: bool,
    /// A tile's main loop runs.
    pub computing: bool,
    /// It has left the role that it started in, whose busy and waiting times its own still are.
    pub recycled: bool,
}

/// What a worker needs only when it waits, and for the timeline.
#[derive(Clone, Copy)]
pub(super) struct Pause {
    /// Begin of the present wait.
    pub since: u64,
    /// The CTA took the task; kept for the timeline only.
    pub taken: u64,
    /// Time that the task has spent waiting for flags since it started.
    pub stalled: u64,
    /// What the next tile's main loop has done while the output of the one before waited.
    pub ahead: u64,
    /// Who waits for the same flag.
    pub next: u32,
    /// The flag that was waited for last; during a wait, the flag or span.
    pub waited_for: u32,
}

impl Worker {
    pub const ABSENT: Self = Self {
        start: 0,
        task: NONE,
        step: 0,
        position: 0,
        storing_task: NONE,
        role: 0,
        state: State::Absent,
        storing: false,
        prefetched: false,
        stalled: false,
        computing: false,
        recycled: false,
    };
}

impl Pause {
    pub const NONE: Self = Self { since: 0, taken: 0, stalled: 0, ahead: 0, next: NONE, waited_for: NONE };
}

impl<'a> Engine<'a> {
    pub(super) fn make_runnable(&mut self, h: &Here<'a>, w: u32) {
        self.s.runnable[h.word0 + w as usize / 64] |= 1 << (w % 64);
    }

    /// Lets the workers that can go on do so, lowest first, then hands out ready tasks, until nothing moves.
    pub(super) fn advance_workers(&mut self, h: &Here<'a>) {
        loop {
            for word in 0..self.t.words {
                let mut bits = std::mem::take(&mut self.s.runnable[h.word0 + word]);
                while bits != 0 {
                    let w = word as u32 * 64 + bits.trailing_zeros();
                    bits &= bits - 1;
                    self.go_on(h, w);
                }
            }
            if !self.serve_ready_role(h) {
                break;
            }
        }
    }

    pub(super) fn worker(&mut self, h: &Here<'a>, w: u32) -> &mut Worker {
        &mut self.s.workers[h.worker0 + w as usize]
    }

    fn cost_of(&self, task: &TaskC) -> &'a CostRow {
        &self.t.costs[usize::from(task.cost)]
    }

    /// Accounts the wait that ends now.
    fn end_wait(&mut self, h: &Here<'a>, w: u32) {
        let flag = self.flag_of(h, self.s.pauses[h.worker0 + w as usize].waited_for);
        let s = &mut *self.s;
        let worker = &mut s.workers[h.worker0 + w as usize];
        let pause = &mut s.pauses[h.worker0 + w as usize];
        pause.waited_for = flag;
        let waited = s.timers.now - pause.since;
        pause.stalled = waited + if worker.stalled { pause.stalled } else { 0 };
        worker.stalled = true;
        let family = usize::from(self.t.family_of[flag as usize]);
        s.waits[(h.role0 + usize::from(worker.role)) * self.t.families + family] += waited;
        let home = self.home(h, w);
        self.s.waited[h.role0 + home] += waited;
    }

    fn wait_for(&mut self, h: &Here<'a>, w: u32, wait: WaitC, state: State) {
        self.worker(h, w).state = state;
        let pause = &mut self.s.pauses[h.worker0 + w as usize];
        pause.since = self.s.timers.now;
        pause.waited_for = wait.on;
        self.register(h, wait, w);
    }

    /// The role that a worker's CTA started in.
    #[inline]
    pub(super) fn home(&self, h: &Here<'a>, w: u32) -> usize {
        let worker = &self.s.workers[h.worker0 + w as usize];
        if worker.recycled { self.t.home(w).0 } else { usize::from(worker.role) }
    }

    /// Accounts the time of a worker's task, which has freed its CTA, waits excluded.
    #[expect(clippy::inline_always, reason = "one call per task; a call costs as much as the work")]
    #[inline(always)]
    fn account(&mut self, h: &Here<'a>, w: u32) {
        let s = &mut *self.s;
        let worker = &s.workers[h.worker0 + w as usize];
        let stalled = if worker.stalled { s.pauses[h.worker0 + w as usize].stalled } else { 0 };
        let home = if worker.recycled { self.t.home(w).0 } else { usize::from(worker.role) };
        s.busy[h.role0 + home] += s.timers.now - worker.start - stalled;
    }

    /// Moves a worker on as far as it can go now.
    pub(super) fn go_on(&mut self, h: &Here<'a>, w: u32) {
        loop {
            let worker = &self.s.workers[h.worker0 + w as usize];
            let goes_on = match worker.state {
                State::Free => match self.claim(h, w) {
                    Some(task) => self.take(h, w, task),
                    None => false,
                },
                State::Main => {
                    let task = &h.program.tasks[worker.task as usize];
                    self.main_ended(h, w, task)
                }
                State::Filled => {
                    let task = &h.program.tasks[worker.task as usize];
                    self.begin(h, w, task)
                }
                State::Start => {
                    let task = &h.program.tasks[worker.task as usize];
                    self.end_wait(h, w);
                    self.start(h, w, task, false)
                }
                State::Step => {
                    let task = &h.program.tasks[worker.task as usize];
                    self.end_wait(h, w);
                    self.run_steps(h, w, task)
                }
                State::Output => {
                    let task = &h.program.tasks[worker.task as usize];
                    self.end_wait(h, w);
                    let cost = self.cost_of(task);
                    let s = &mut *self.s;
                    let pause = &mut s.pauses[h.worker0 + w as usize];
                    pause.ahead = if cost.drain == Drain::Overlap && self.c.times.ahead_steps > 0 {
                        (s.timers.now - pause.since).min(self.c.times.ahead_steps * cost.step)
                    } else {
                        0
                    };
                    self.output(h, w, task)
                }
                State::StoreBusy => {
                    let task = &h.program.tasks[worker.task as usize];
                    self.store(h, w, task)
                }
                State::Over => {
                    self.complete(h, w);
                    true
                }
                State::Watch => {
                    self.watch(h, w);
                    false
                }
                State::Absent
                | State::Filling
                | State::Crowded
                | State::Running
                | State::Store
                | State::Push
                | State::Rendezvous
                | State::Idle
                | State::Done => false,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Gives a task to a worker; true when the worker can go on at once.
    #[inline]
    pub(super) fn take(&mut self, h: &Here<'a>, w: u32, id: u32) -> bool {
        self.take_after_wait(h, w, id, self.s.timers.now, NONE)
    }

    /// Gives a task to a worker that has looked for one since `taken`, last because of a flag.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    pub(super) fn take_after_wait(&mut self, h: &Here<'a>, w: u32, id: u32, taken: u64, waited_for: u32) -> bool {
        let worker = self.worker(h, w);
        worker.task = id;
        worker.step = 0;
        worker.stalled = false;
        if self.timeline {
            let pause = &mut self.s.pauses[h.worker0 + w as usize];
            pause.taken = taken;
            pause.waited_for = waited_for;
        }
        self.start(h, w, &h.program.tasks[id as usize], taken == self.s.timers.now)
    }

    /// Starts a task if its flags are there; true when the worker can go on at once. `at_once`: the CTA has only now
    /// become free.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn start(&mut self, h: &Here<'a>, w: u32, task: &'a TaskC, at_once: bool) -> bool {
        if task.waits[0] > 0
            && let Some(wait) = self.first_unmet(h, task.wait0, task.waits[0])
        {
            self.wait_for(h, w, wait, State::Start);
            return false;
        }
        let cost = self.cost_of(task);
        let s = &mut *self.s;
        let now = s.timers.now;
        let worker = &mut s.workers[h.worker0 + w as usize];
        worker.start = now;
        worker.stalled = false;
        // The loads of a task that could start when the CTA became free were issued behind the last tile.
        worker.prefetched = at_once && worker.storing;
        match cost.work {
            Work::Tile if task.waits[1] > 0 || cost.main == NONE => self.run_steps(h, w, task),
            Work::Tile => {
                let fill = if worker.prefetched { 0 } else { cost.fill };
                let delay = fill + self.t.roles[h.table0 + usize::from(worker.role)].block_ps;
                worker.step = cost.steps;
                if delay > 0 { self.fill(h, w, delay) } else { self.begin(h, w, task) }
            }
            Work::Move if cost.main == NONE => {
                self.complete(h, w);
                true
            }
            Work::Move => {
                let delay = self.t.roles[h.table0 + usize::from(worker.role)].block_ps;
                if delay > 0 { self.fill(h, w, delay) } else { self.begin(h, w, task) }
            }
            Work::Sync => {
                self.complete(h, w);
                true
            }
            Work::Put => {
                worker.state = State::Push;
                let delay = self.t.roles[h.table0 + usize::from(worker.role)].block_ps;
                s.timers.push(h.rank, now + delay + cost.fixed, kind::PUSHED, w, 0);
                false
            }
            Work::Collective => {
                worker.state = State::Rendezvous;
                self.arrive(h, w, cost.fixed);
                false
            }
        }
    }

    /// Starts a flow of a worker's task; true when it takes no time.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn run(&mut self, h: &Here<'a>, w: u32, class: u32, work: u64) -> bool {
        let s = &mut *self.s;
        let worker = &mut s.workers[h.worker0 + w as usize];
        if work == 0 {
            worker.state = State::Main;
            return true;
        }
        worker.state = State::Running;
        s.sharing.start(h.class0 + class, s.timers.now, work, ended::MAIN | w);
        false
    }

    /// Lets a worker wait before its task's first flow: latency, which takes nothing from shared resources.
    fn fill(&mut self, h: &Here<'a>, w: u32, delay: u64) -> bool {
        let s = &mut *self.s;
        s.workers[h.worker0 + w as usize].state = State::Filling;
        s.timers.push_fill(h.rank, s.timers.now + delay, w);
        false
    }

    /// Begins a task's first flow, after what had to come before it; true when it takes no time.
    #[inline]
    fn begin(&mut self, h: &Here<'a>, w: u32, task: &'a TaskC) -> bool {
        let cost = self.cost_of(task);
        if cost.work == Work::Move {
            let s = &mut *self.s;
            s.workers[h.worker0 + w as usize].step = s.computing[h.rank];
            return self.run(h, w, cost.main, cost.fixed);
        }
        let steps = self.s.workers[h.worker0 + w as usize].step;
        self.run_tile(h, w, task, cost, (steps, steps))
    }

    /// By how much a copy or sum that lives from the latency of memory ends later for the CTAs that compute beside it. Time
    /// that a full link or memory has cost it already hides as much.
    fn crowded(&self, h: &Here<'a>, w: u32, cost: &CostRow) -> u64 {
        if cost.crowd == 0 {
            return 0;
        }
        let worker = &self.s.workers[h.worker0 + w as usize];
        let crowd = u128::from(cost.crowd) * u128::from(worker.step);
        let least = cost.fixed + (u128::from(cost.fixed) * crowd / 1_000_000_000) as u64;
        let block = self.t.roles[h.table0 + usize::from(worker.role)].block_ps;
        (least + block).saturating_sub(self.s.timers.now - worker.start)
    }

    /// What the flags of so many of a tile's steps cost its loader.
    fn step_flags(&self, h: &Here<'a>, task: &TaskC, steps: u32) -> u64 {
        // Without its arithmetic a tile is a task like others.
        if self.cost_of(task).step == 0 {
            return 0;
        }
        let first = (task.wait0 + u32::from(task.waits[0])) as usize;
        let waits = &h.program.waits[first..first + usize::from(task.waits[1])];
        // Waits on what nobody raises in this form are not there on the device.
        let counted =
            |flag: u32| !(self.t.compute_only && self.c.dropped[usize::from(self.t.family_of[flag as usize])]);
        let runs = waits.iter().map(|wait| h.program.awaited(wait)).filter(|run| counted(run.flag));
        let flags: u64 = runs.map(|run| u64::from(run.count)).sum();
        flags * self.c.times.step_flag * u64::from(steps) / u64::from(self.cost_of(task).steps.max(1))
    }

    /// Starts so many steps of a tile's main loop, up to a step; true when that takes no time.
    #[inline]
    fn run_tile(&mut self, h: &Here<'a>, w: u32, task: &TaskC, cost: &CostRow, (steps, to): (u32, u32)) -> bool {
        let mut work = u64::from(steps) * cost.step;
        if task.waits[1] > 0 && self.c.times.step_flag > 0 {
            work += self.step_flags(h, task, steps);
        }
        if to == cost.steps {
            work += cost.fixed;
            if cost.crowd > 0 {
                work += cost.crowd * u64::from(self.s.computing[h.rank]);
            }
        }
        if work > 0 {
            self.s.computing[h.rank] += 1;
            self.worker(h, w).computing = true;
        }
        let mut work = self.clocked(h.rank, work);
        if self.c.times.ahead_steps > 0 {
            let ahead = std::mem::take(&mut self.s.pauses[h.worker0 + w as usize].ahead);
            work = work.saturating_sub(ahead);
        }
        self.run(h, w, cost.main, work)
    }

    /// The first step that cannot run now, and what holds it back.
    fn step_limit(&mut self, h: &Here<'a>, task: &TaskC, steps: u32) -> (u32, Option<WaitC>) {
        let (mut limit, mut blocked) = (steps, None);
        let first = (task.wait0 + u32::from(task.waits[0])) as usize;
        for wait in &h.program.waits[first..first + usize::from(task.waits[1])] {
            if self.is_met(h, *wait) {
                continue;
            }
            let run = h.program.awaited(wait);
            let unmet = if wait.on & SPAN == 0 { 0 } else { self.reach(h, wait.on & !SPAN) };
            // Step s needs flag floor(s * count / steps): flag i is first needed by step ceil(i * steps / count).
            let needed_by = (u64::from(unmet) * u64::from(steps)).div_ceil(u64::from(run.count)) as u32;
            if needed_by < limit {
                (limit, blocked) = (needed_by, Some(WaitC { on: run.at(unmet), level: run.level }));
            }
        }
        (limit, blocked)
    }

    /// Runs a tile's main loop up to the first step whose flag is not there; true when nothing is left to run.
    #[inline]
    fn run_steps(&mut self, h: &Here<'a>, w: u32, task: &'a TaskC) -> bool {
        let cost = self.cost_of(task);
        if cost.main == NONE {
            // Only the flags and the output remain in this form.
            let first = task.wait0 + u32::from(task.waits[0]);
            // The last one first: when it is there, most of the others are.
            let waits = &h.program.waits[first as usize..first as usize + usize::from(task.waits[1])];
            if let Some(&wait) = waits.iter().rev().find(|&&wait| !self.is_met(h, wait)) {
                self.wait_for(h, w, wait, State::Step);
                return false;
            }
            return self.output(h, w, task);
        }
        let done = self.s.workers[h.worker0 + w as usize].step;
        let mut limit = cost.steps;
        if task.waits[1] > 0 {
            let blocked;
            (limit, blocked) = self.step_limit(h, task, cost.steps);
            if let Some(wait) = blocked.filter(|_| limit <= done) {
                if done == 0 {
                    // What is not there yet cannot have been loaded ahead.
                    self.worker(h, w).prefetched = false;
                }
                self.wait_for(h, w, wait, State::Step);
                return false;
            }
        }
        let worker = &mut self.s.workers[h.worker0 + w as usize];
        worker.step = limit;
        if done == 0 {
            let fill = if worker.prefetched { 0 } else { cost.fill };
            let delay = fill + self.t.roles[h.table0 + usize::from(worker.role)].block_ps;
            return if delay > 0 { self.fill(h, w, delay) } else { self.begin(h, w, task) };
        }
        self.run_tile(h, w, task, cost, (limit - done, limit))
    }

    /// The flow of a task's main part has ended; true when the worker can go on at once.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn main_ended(&mut self, h: &Here<'a>, w: u32, task: &'a TaskC) -> bool {
        let cost = self.cost_of(task);
        let s = &mut *self.s;
        let worker = &mut s.workers[h.worker0 + w as usize];
        let step = worker.step;
        if worker.computing {
            worker.computing = false;
            s.computing[h.rank] -= 1;
        }
        if cost.work == Work::Move {
            let late = self.crowded(h, w, cost);
            if late > 0 {
                self.s.workers[h.worker0 + w as usize].state = State::Crowded;
                self.s.timers.push_fill(h.rank, self.s.timers.now + late, w);
                return false;
            }
            self.complete(h, w);
            true
        } else if step < cost.steps {
            self.run_steps(h, w, task)
        } else {
            self.output(h, w, task)
        }
    }

    /// The main loop is over: waits for the flags that gate the outputs, then writes them.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn output(&mut self, h: &Here<'a>, w: u32, task: &'a TaskC) -> bool {
        let first = task.wait0 + u32::from(task.waits[0]) + u32::from(task.waits[1]);
        if task.waits[2] > 0
            && let Some(wait) = self.first_unmet(h, first, task.waits[2])
        {
            self.wait_for(h, w, wait, State::Output);
            return false;
        }
        self.store(h, w, task)
    }

    /// Begins to write the outputs; true when the worker can go on at once.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn store(&mut self, h: &Here<'a>, w: u32, task: &'a TaskC) -> bool {
        let cost = self.cost_of(task);
        let worker = self.worker(h, w);
        if worker.storing {
            // The end of the store before wakes the worker.
            worker.state = State::StoreBusy;
            return false;
        }
        if cost.out.class == NONE {
            self.complete(h, w);
            return true;
        }
        if h.any_early {
            self.raise(h, h.program.signals_of(task), true);
        }
        let out = if cost.deferred.class != NONE && self.has_next(h, w) { cost.deferred } else { cost.out };
        let s = &mut *self.s;
        let now = s.timers.now;
        let worker = &mut s.workers[h.worker0 + w as usize];
        s.sharing.start(h.class0 + out.class, now, out.work, ended::OUT | w);
        worker.storing_task = worker.task;
        if cost.drain == Drain::Overlap {
            worker.storing = true;
            worker.state = State::Free;
            self.account(h, w);
            self.record_task(h, w, NEVER);
            true
        } else {
            worker.state = State::Store;
            false
        }
    }

    /// The outputs of a task are written.
    pub(super) fn store_ended(&mut self, h: &Here<'a>, w: u32) {
        let task = &h.program.tasks[self.worker(h, w).storing_task as usize];
        if h.any_early {
            self.raise(h, h.program.signals_of(task), false);
        } else {
            self.raise_all(h, w, task, self.c.times.store_visible);
        }
        let now = self.s.timers.now;
        let worker = &mut self.s.workers[h.worker0 + w as usize];
        let role = usize::from(worker.role);
        if worker.storing {
            worker.storing = false;
            if worker.state == State::StoreBusy {
                self.make_runnable(h, w);
            }
            self.record_end(h, w);
        } else {
            worker.state = State::Free;
            self.account(h, w);
            self.make_runnable(h, w);
            self.record_task(h, w, now);
        }
        // A worker only joins roles of its own launch, so that it does not matter which one it is in by now.
        self.task_done(h, role);
    }

    /// A task whose writes are done: signals, accounts, frees the worker.
    pub(super) fn complete(&mut self, h: &Here<'a>, w: u32) {
        let now = self.s.timers.now;
        let worker = &mut self.s.workers[h.worker0 + w as usize];
        worker.state = State::Free;
        let role = usize::from(worker.role);
        let task = &h.program.tasks[worker.task as usize];
        self.account(h, w);
        self.raise_all(h, w, task, 0);
        self.record_task(h, w, now);
        self.task_done(h, role);
    }

    /// Raises the signals of a task whose writes will be visible `after` from now.
    ///
    /// **Model.** The interpreter has a warp for them in each CTA: a task's flags take `raise`, and the next task's wait for
    /// it. On the device a fence serves all tasks that ended meanwhile; `raise` is what a task comes to in chains of them.
    #[inline]
    fn raise_all(&mut self, h: &Here<'a>, w: u32, task: &TaskC, mut after: u64) {
        let signals = h.program.signals_of(task);
        if self.c.times.raise > 0 && !signals.is_empty() {
            let now = self.s.timers.now;
            let free = &mut self.s.signallers[h.worker0 + w as usize];
            *free = (now + after).max(*free) + self.c.times.raise;
            after = *free - now;
        }
        for signal in signals {
            self.raise_one(h, signal, after);
        }
    }

    #[inline]
    pub(super) fn flow(&mut self, h: &Here<'a>, class: u32, work: u64, tag: u32) {
        self.s.sharing.start(h.class0 + class, self.s.timers.now, work, tag);
    }
}

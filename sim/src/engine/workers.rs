//! What a CTA (or a lane of one) does with a task: wait, work, write, signal, take the next.

use super::state::{State, Worker, bit_of, lowest_of};
use super::tables::CostRow;
use super::timers::kind;
use super::{Engine, Here, RankState, ended};
use crate::compile::{Flow, NONE, SPAN, TaskC, WaitC, Work};
use crate::share::NEVER;
use tilewire_kernels::schedule::Drain;

impl<'a> Here<'a> {
    fn cost_of(&self, task: &TaskC) -> &'a CostRow {
        &self.costs[usize::from(task.cost)]
    }
}

impl<'a> Engine<'a> {
    /// Accounts the wait that ends now.
    fn end_wait(&self, own: &mut RankState, cta: &mut Worker) {
        let flag = own.flag_of(own.pauses[cta.w as usize].waited_for);
        let pause = &mut own.pauses[cta.w as usize];
        pause.waited_for = flag;
        let waited = self.s.timers.now - pause.since;
        pause.stalled = waited + if cta.stalled { pause.stalled } else { 0 };
        cta.stalled = true;
        let family = usize::from(self.t.family_of[flag as usize]);
        own.waits[usize::from(cta.role) * self.t.families + family] += waited;
        own.waited[usize::from(cta.home)] += waited;
    }

    fn wait_for(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, wait: WaitC, state: State) {
        cta.state = state;
        let pause = &mut own.pauses[cta.w as usize];
        pause.since = self.s.timers.now;
        pause.waited_for = wait.on;
        self.register(h, own, wait, cta.w);
    }

    /// Accounts the time of a worker's task, which has freed its CTA, waits excluded.
    #[expect(clippy::inline_always, reason = "one call per task; a call costs as much as the work")]
    #[inline(always)]
    fn account(&self, own: &mut RankState, cta: &Worker) {
        let stalled = if cta.stalled { own.pauses[cta.w as usize].stalled } else { 0 };
        own.busy[usize::from(cta.home)] += self.s.timers.now - cta.start - stalled;
    }

    /// Moves a worker on as far as it can go now. What most tasks go through is apart from the rest: a function of all has to
    /// save a dozen registers at every call.
    #[inline]
    pub(super) fn go_on(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) {
        loop {
            let goes_on = match cta.state {
                State::Free => self.take_next(h, own, cta),
                State::Running => self.main_ended(h, own, cta),
                State::Filling => self.begin(h, own, cta),
                _ => self.resume(h, own, cta),
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Goes on after a wait, if it is over; true when the worker can go on at once.
    #[inline(never)]
    fn resume(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) -> bool {
        match cta.state {
            State::Start => {
                let task = &h.tasks[cta.task as usize];
                self.end_wait(own, cta);
                self.start(h, own, cta, task, false)
            }
            State::Step => {
                let task = &h.tasks[cta.task as usize];
                self.end_wait(own, cta);
                self.run_steps(h, own, cta, task)
            }
            State::Output => {
                let task = &h.tasks[cta.task as usize];
                self.end_wait(own, cta);
                let cost = h.cost_of(task);
                let pause = &mut own.pauses[cta.w as usize];
                pause.ahead = if cost.drain == Drain::Overlap && self.c.times.ahead_steps > 0 {
                    (self.s.timers.now - pause.since).min(self.c.times.ahead_steps * cost.step)
                } else {
                    0
                };
                self.output(h, own, cta, task)
            }
            State::StoreBusy => {
                let task = &h.tasks[cta.task as usize];
                self.store(h, own, cta, task)
            }
            State::Crowded | State::Rendezvous => {
                self.complete(h, own, cta);
                true
            }
            State::Watch => {
                self.watch(h, own, cta);
                false
            }
            _ => false,
        }
    }

    /// Gives a free worker its next task; true when it can go on at once.
    #[inline(never)]
    fn take_next(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) -> bool {
        self.claim(h, own, cta).is_some_and(|task| self.take(h, own, cta, task))
    }

    /// Gives a task to a worker; true when the worker can go on at once.
    #[inline]
    pub(super) fn take(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, id: u32) -> bool {
        self.take_after_wait(h, own, cta, id, self.s.timers.now, NONE)
    }

    /// Gives a task to a worker that has looked for one since `taken`, last because of a flag.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    pub(super) fn take_after_wait(
        &mut self,
        h: &Here<'a>,
        own: &mut RankState,
        cta: &mut Worker,
        id: u32,
        taken: u64,
        waited_for: u32,
    ) -> bool {
        cta.task = id;
        cta.step = 0;
        cta.stalled = false;
        if self.timeline {
            let pause = &mut own.pauses[cta.w as usize];
            pause.taken = taken;
            pause.waited_for = waited_for;
        }
        self.start(h, own, cta, &h.tasks[id as usize], taken == self.s.timers.now)
    }

    /// Starts a task if its flags are there; true when the worker can go on at once. `at_once`: the CTA has only now
    /// become free.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn start(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, task: &'a TaskC, at_once: bool) -> bool {
        if task.waits[0] > 0
            && let Some(wait) = self.first_unmet(h, own, task.wait0, task.waits[0])
        {
            self.wait_for(h, own, cta, wait, State::Start);
            return false;
        }
        let cost = h.cost_of(task);
        let now = self.s.timers.now;
        cta.start = now;
        cta.stalled = false;
        // The loads of a task that could start when the CTA became free were issued behind the last tile.
        cta.prefetched = at_once && cta.storing;
        match cost.work {
            Work::Tile if task.waits[1] > 0 || cost.main == NONE => self.run_steps(h, own, cta, task),
            Work::Tile => {
                let fill = if cta.prefetched { 0 } else { cost.fill };
                let delay = fill + h.roles[usize::from(cta.role)].block_ps;
                cta.step = cost.steps;
                if delay > 0 { self.fill(h, cta, delay) } else { self.begin(h, own, cta) }
            }
            Work::Move if cost.main == NONE => {
                self.complete(h, own, cta);
                true
            }
            Work::Move => {
                let delay = h.roles[usize::from(cta.role)].block_ps;
                if delay > 0 { self.fill(h, cta, delay) } else { self.begin(h, own, cta) }
            }
            Work::Sync => {
                self.complete(h, own, cta);
                true
            }
            Work::Put => {
                cta.state = State::Push;
                let delay = h.roles[usize::from(cta.role)].block_ps;
                self.s.timers.push(h.rank, now + delay + cost.fixed, kind::PUSHED, cta.w, 0);
                false
            }
            Work::Collective => {
                cta.state = State::Rendezvous;
                self.arrive(h, cta, cost.fixed);
                false
            }
        }
    }

    /// Starts a flow of a worker's task; true when it takes no time.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn run(&mut self, h: &Here<'a>, cta: &mut Worker, class: u32, work: u64) -> bool {
        cta.state = State::Running;
        if work > 0 {
            let (word, bit) = bit_of(cta.w);
            self.flow(h, Flow { class, work }, ended::MAIN | word, bit);
        }
        work == 0
    }

    /// Lets a worker wait before its task's first flow: latency, which takes nothing from shared resources.
    fn fill(&mut self, h: &Here<'a>, cta: &mut Worker, delay: u64) -> bool {
        cta.state = State::Filling;
        self.s.timers.push_fill(h.rank, self.s.timers.now + delay, cta.w);
        false
    }

    /// Begins a task's first flow, after what had to come before it; true when it takes no time.
    #[inline]
    fn begin(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) -> bool {
        let task = &h.tasks[cta.task as usize];
        let cost = h.cost_of(task);
        if cost.work == Work::Move {
            cta.step = own.computing;
            return self.run(h, cta, cost.main, cost.fixed);
        }
        let steps = cta.step;
        self.run_tile(h, own, cta, task, cost, (steps, steps))
    }

    /// By how much a copy or sum that lives from the latency of memory ends later for the CTAs that compute beside it. Time
    /// that a full link or memory has cost it already hides as much.
    fn crowded(&self, h: &Here<'a>, cta: &Worker, cost: &CostRow) -> u64 {
        if cost.crowd == 0 {
            return 0;
        }
        let crowd = u128::from(cost.crowd) * u128::from(cta.step);
        let least = cost.fixed + (u128::from(cost.fixed) * crowd / 1_000_000_000) as u64;
        let block = h.roles[usize::from(cta.role)].block_ps;
        (least + block).saturating_sub(self.s.timers.now - cta.start)
    }

    /// What the flags of so many of a tile's steps cost its loader.
    fn step_flags(&self, h: &Here<'a>, task: &TaskC, steps: u32) -> u64 {
        // Without its arithmetic a tile is a task like others.
        if h.cost_of(task).step == 0 {
            return 0;
        }
        let first = (task.wait0 + u32::from(task.waits[0])) as usize;
        let waits = &h.waits[first..first + usize::from(task.waits[1])];
        // Waits on what nobody raises in this form are not there on the device.
        let counted =
            |flag: u32| !(self.t.compute_only && self.c.dropped[usize::from(self.t.family_of[flag as usize])]);
        let runs = waits.iter().map(|wait| h.program.awaited(wait)).filter(|run| counted(run.flag));
        let flags: u64 = runs.map(|run| u64::from(run.count)).sum();
        flags * self.c.times.step_flag * u64::from(steps) / u64::from(h.cost_of(task).steps.max(1))
    }

    /// Starts so many steps of a tile's main loop, up to a step; true when that takes no time.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn run_tile(
        &mut self,
        h: &Here<'a>,
        own: &mut RankState,
        cta: &mut Worker,
        task: &TaskC,
        cost: &CostRow,
        (steps, to): (u32, u32),
    ) -> bool {
        let plain = self.steady && steps == cost.steps && cost.crowd == 0;
        let work = if plain { cost.whole } else { self.tile_work(h, own, cta.w, task, (steps, to)) };
        own.computing += 1;
        cta.computing = true;
        self.run(h, cta, cost.main, work)
    }

    /// How long so many steps of a tile take, up to a step, where more than their number decides.
    #[inline(never)]
    fn tile_work(&self, h: &Here<'a>, own: &mut RankState, w: u32, task: &TaskC, (steps, to): (u32, u32)) -> u64 {
        let cost = h.cost_of(task);
        let mut work = u64::from(steps) * cost.step;
        if task.waits[1] > 0 && self.c.times.step_flag > 0 {
            work += self.step_flags(h, task, steps);
        }
        if to == cost.steps {
            work += cost.fixed;
            if cost.crowd > 0 {
                work += cost.crowd * u64::from(own.computing);
            }
        }
        let work = self.clocked(own, work);
        if self.c.times.ahead_steps == 0 {
            return work;
        }
        work.saturating_sub(std::mem::take(&mut own.pauses[w as usize].ahead))
    }

    /// The first step that cannot run now, and what holds it back.
    fn step_limit(&mut self, h: &Here<'a>, own: &mut RankState, task: &TaskC, steps: u32) -> (u32, Option<WaitC>) {
        let (mut limit, mut blocked) = (steps, None);
        let first = (task.wait0 + u32::from(task.waits[0])) as usize;
        for wait in &h.waits[first..first + usize::from(task.waits[1])] {
            if self.is_met(h, own, *wait) {
                continue;
            }
            let run = h.program.awaited(wait);
            let unmet = if wait.on & SPAN == 0 { 0 } else { self.reach(h, own, wait.on & !SPAN) };
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
    fn run_steps(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, task: &'a TaskC) -> bool {
        let cost = h.cost_of(task);
        if cost.main == NONE {
            // Only the flags and the output remain in this form.
            let first = task.wait0 + u32::from(task.waits[0]);
            // The last one first: when it is there, most of the others are.
            let waits = &h.waits[first as usize..first as usize + usize::from(task.waits[1])];
            if let Some(&wait) = waits.iter().rev().find(|&&wait| !self.is_met_by_now(h, own, wait)) {
                self.wait_for(h, own, cta, wait, State::Step);
                return false;
            }
            return self.output(h, own, cta, task);
        }
        let done = cta.step;
        let mut limit = cost.steps;
        if task.waits[1] > 0 {
            let blocked;
            (limit, blocked) = self.step_limit(h, own, task, cost.steps);
            if let Some(wait) = blocked.filter(|_| limit <= done) {
                if done == 0 {
                    // What is not there yet cannot have been loaded ahead.
                    cta.prefetched = false;
                }
                self.wait_for(h, own, cta, wait, State::Step);
                return false;
            }
        }
        cta.step = limit;
        if done == 0 {
            let fill = if cta.prefetched { 0 } else { cost.fill };
            let delay = fill + h.roles[usize::from(cta.role)].block_ps;
            return if delay > 0 { self.fill(h, cta, delay) } else { self.begin(h, own, cta) };
        }
        self.run_tile(h, own, cta, task, cost, (limit - done, limit))
    }

    /// The flow of a task's main part has ended; true when the worker can go on at once.
    #[inline(never)]
    fn main_ended(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) -> bool {
        let task = &h.tasks[cta.task as usize];
        let cost = h.cost_of(task);
        let step = cta.step;
        if cta.computing {
            cta.computing = false;
            own.computing -= 1;
        }
        if cost.work == Work::Move {
            let late = self.crowded(h, cta, cost);
            if late > 0 {
                cta.state = State::Crowded;
                self.s.timers.push_fill(h.rank, self.s.timers.now + late, cta.w);
                return false;
            }
            self.complete(h, own, cta);
            true
        } else if step < cost.steps {
            self.run_steps(h, own, cta, task)
        } else {
            self.output(h, own, cta, task)
        }
    }

    /// The main loop is over: waits for the flags that gate the outputs, then writes them.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn output(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, task: &'a TaskC) -> bool {
        let first = task.wait0 + u32::from(task.waits[0]) + u32::from(task.waits[1]);
        if task.waits[2] > 0
            && let Some(wait) = self.first_unmet(h, own, first, task.waits[2])
        {
            self.wait_for(h, own, cta, wait, State::Output);
            return false;
        }
        self.store(h, own, cta, task)
    }

    /// Begins to write the outputs; true when the worker can go on at once.
    #[expect(clippy::inline_always, reason = "one call per task each; together they are a tenth of the run time")]
    #[inline(always)]
    fn store(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, task: &'a TaskC) -> bool {
        let cost = h.cost_of(task);
        if cta.storing {
            // The end of the store before wakes the worker.
            cta.state = State::StoreBusy;
            return false;
        }
        if cost.out.class == NONE {
            self.complete(h, own, cta);
            return true;
        }
        for signal in h.program.early_signals_of(task) {
            self.raise_one(h, own, signal, 0);
        }
        let out = if cost.deferred.class != NONE && h.has_next(own, cta) { cost.deferred } else { cost.out };
        let (word, bit) = bit_of(cta.w);
        self.flow(h, out, ended::OUT | word, bit);
        cta.storing_task = cta.task;
        if cost.drain == Drain::Overlap {
            cta.storing = true;
            cta.state = State::Free;
            self.account(own, cta);
            self.record_task(h, own, cta, NEVER);
            true
        } else {
            cta.state = State::Store;
            false
        }
    }

    /// The outputs of tasks of some workers of a word are written.
    pub(super) fn stores_ended(&mut self, h: &Here<'a>, own: &mut RankState, word: u32, mut set: u64) {
        // Put back at the end: nothing that happens here looks at workers.
        let mut workers = std::mem::take(&mut own.workers);
        let of_word = &mut workers[word as usize];
        while set != 0 {
            let cta = lowest_of(of_word, set);
            set &= set - 1;
            self.store_ended(h, own, cta);
            // A worker only joins roles of its own launch, so that it does not matter which one it is in by now.
            self.task_done(h, own, usize::from(cta.role));
        }
        own.workers = workers;
    }

    /// The outputs of a worker's task are written.
    #[inline]
    fn store_ended(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) {
        let task = &h.tasks[cta.storing_task as usize];
        if h.any_early {
            for signal in h.program.late_signals_of(task) {
                self.raise_one(h, own, signal, 0);
            }
        } else {
            self.raise_all(h, own, cta, task, self.c.times.store_visible);
        }
        if cta.storing {
            cta.storing = false;
            if cta.state == State::StoreBusy {
                own.make_runnable(cta.w);
            }
            self.record_end(own, cta.w);
        } else {
            cta.state = State::Free;
            self.account(own, cta);
            own.make_runnable(cta.w);
            self.record_task(h, own, cta, self.s.timers.now);
        }
    }

    /// A task whose writes are done: signals, accounts, frees the worker.
    pub(super) fn complete(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) {
        let now = self.s.timers.now;
        cta.state = State::Free;
        let role = usize::from(cta.role);
        let task = &h.tasks[cta.task as usize];
        self.account(own, cta);
        self.raise_all(h, own, cta, task, 0);
        self.record_task(h, own, cta, now);
        self.task_done(h, own, role);
    }

    /// Raises the signals of a task whose writes will be visible `after` from now.
    ///
    /// **Model.** The interpreter has a warp for them in each CTA: a task's flags take `raise`, and the next task's wait for
    /// it. On the device a fence serves all tasks that ended meanwhile; `raise` is what a task comes to in chains of them.
    #[inline]
    fn raise_all(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, task: &TaskC, mut after: u64) {
        let signals = h.program.signals_of(task);
        if self.c.times.raise > 0 && !signals.is_empty() {
            let now = self.s.timers.now;
            let free = &mut own.signallers[cta.w as usize];
            *free = (now + after).max(*free) + self.c.times.raise;
            after = *free - now;
        }
        for signal in signals {
            self.raise_one(h, own, signal, after);
        }
    }
}

//! When each task can begin at the earliest, and how long the run goes on after it at the least.
//!
//! With a CTA for every task, and links, memories, proxies and queues that nobody shares, a task begins as soon as its
//! launch and its flags allow. No run is faster, so that these times are the *heads* of tasks. Backwards, whoever waits for
//! all adds of a flag is a successor of everybody who raises it: the longest way to the end is the *tail*. Who waits for
//! only some of the adds gets a head (the earliest adds that suffice), and gives no tails.

use crate::compile::{Compiled, CostRecord, Form, NONE, Program, PublishC, SPAN, SignalC, TaskC, Times, WaitC, Work};
use crate::engine::UNWATCHED;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tilewire_kernels::Offset;
use tilewire_kernels::schedule::Drain;

/// Head and tail of what a task asks for, ps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    /// It begins no earlier.
    pub head: u64,
    /// The run ends no earlier than this after it has ended.
    pub tail: u64,
}

/// Windows of the tasks of all ranks, rank after rank.
pub(super) struct Chains {
    /// First task of each rank.
    pub task0: Vec<usize>,
    /// Main part of a tile, a transfer, or a push; the tail is behind it.
    pub main: Vec<Window>,
    /// Store of a tile's result.
    pub out: Vec<Window>,
    /// Message of a put.
    pub message: Vec<Window>,
    /// The end of the last task, by the same clock.
    pub longest: u64,
}

/// Which flags a wait gates.
#[derive(Clone, Copy)]
enum Gated {
    Start,
    Step,
    Output,
}

/// Somebody who waits for one flag.
#[derive(Clone, Copy)]
enum Waiter {
    Task(u32, Gated),
    /// A flag of a span.
    Span(u32),
}

/// What is left until a task's parts are known.
#[derive(Clone, Copy, Default)]
struct Pending {
    /// Start waits, and the launch.
    start: u32,
    /// Waits of steps and outputs.
    other: u32,
    /// No step runs earlier.
    first_step: u64,
    /// The main part ends no earlier, because of flags at steps.
    main_end: u64,
    /// Outputs are gated until then.
    output: u64,
}

/// A run of flags on its way.
#[derive(Clone, Default)]
struct Span {
    /// Flags that are not there.
    missing: u32,
    /// When its first flag was.
    first: u64,
    /// Tasks that wait for it.
    tasks: Vec<(u32, Gated)>,
}

struct Forward<'a> {
    c: &'a Compiled,
    task0: Vec<usize>,
    span0: Vec<usize>,
    flags: usize,
    /// Flag families that an epoch before left satisfied.
    stale: Vec<bool>,
    /// By flag of each rank, sorted by level: who waits for it, and how many have what they need.
    waiters: Vec<Vec<(u32, Waiter)>>,
    served: Vec<u32>,
    sums: Vec<u32>,
    /// By span of each rank.
    spans: Vec<Span>,
    pending: Vec<Pending>,
    /// When the main part can begin; when it has ended and the outputs may be written.
    begins: Vec<u64>,
    mains: Vec<u64>,
    /// By launch of each rank: launches before it, tasks left, end.
    launches: Vec<(u32, u32, u64)>,
    done: usize,
    longest: u64,
    events: BinaryHeap<Reverse<(u64, u32, u32, u32)>>,
}

/// Marks the start of a launch among the flags of events.
const LAUNCH: u32 = u32::MAX;

/// Time of a task's main part alone, less what it may have done while the output of the tile before waited.
pub(crate) fn main_ps(times: &Times, record: &CostRecord) -> u64 {
    rest_of_steps(times, record, 0, 1)
}

/// Time of the store of a tile's result alone.
fn out_ps(record: &CostRecord) -> u64 {
    let form = &record.forms[Form::Whole as usize];
    match form.deferred.class {
        NONE => form.out.work,
        _ => form.out.work.min(form.deferred.work),
    }
}

/// From a flag at `index` of `count` until the end of the main part that needs it at a step.
fn rest_of_steps(times: &Times, record: &CostRecord, index: u32, count: u32) -> u64 {
    let steps = u64::from(record.steps);
    let needed_by = (u64::from(index) * steps).div_ceil(u64::from(count));
    let ahead = if record.drain == Drain::Overlap { times.ahead_steps } else { 0 };
    let form = &record.forms[Form::Whole as usize];
    form.fixed + form.step * (steps - needed_by.min(steps)).saturating_sub(ahead)
}

impl Chains {
    /// `None` where the argument does not hold: noise makes latencies shorter than nominal and a rank late, and
    /// collectives end together.
    pub fn new(c: &Compiled) -> Option<Self> {
        if c.noise.is_some() || c.costs.iter().any(|record| record.work == Work::Collective) {
            return None;
        }
        let mut forward = Forward::new(c);
        forward.run();
        // A schedule that cannot end has no longest path.
        (forward.done == forward.mains.len()).then(|| forward.backward())
    }
}

impl<'a> Forward<'a> {
    fn new(c: &'a Compiled) -> Self {
        let flags = c.family_base[c.family_base.len() - 1] as usize;
        let (mut task0, mut span0) = (vec![0], vec![0]);
        for &program in &c.program_of {
            let program = &c.programs[program as usize];
            task0.push(task0[task0.len() - 1] + program.tasks.len());
            span0.push(span0[span0.len() - 1] + program.spans.len());
        }
        let mut stale = vec![false; c.dropped.len()];
        if c.stale_arrivals {
            for put in c.programs.iter().flat_map(|program| &program.puts) {
                stale[c.family_of(put.arrived)] = true;
            }
        }
        let (ranks, tasks, spans) = (c.ranks.len(), task0[task0.len() - 1], span0[span0.len() - 1]);
        let mut forward = Self {
            c,
            flags,
            stale,
            waiters: vec![Vec::new(); ranks * flags],
            served: vec![0; ranks * flags],
            sums: vec![0; ranks * flags],
            spans: vec![Span::default(); spans],
            pending: vec![Pending::default(); tasks],
            begins: vec![0; tasks],
            mains: vec![0; tasks],
            launches: Vec::new(),
            done: 0,
            longest: 0,
            events: BinaryHeap::new(),
            task0,
            span0,
        };
        for rank in 0..ranks {
            forward.register(rank);
        }
        for waiters in &mut forward.waiters {
            waiters.sort_by_key(|waiter| waiter.0);
        }
        forward
    }

    fn program(&self, rank: usize) -> &'a Program {
        &self.c.programs[self.c.program_of[rank] as usize]
    }

    /// The waits of a task and what they gate. Only tiles have gates behind their start, and no step waits for all of a run
    /// of more flags than steps.
    fn gated(&self, program: &'a Program, task: &TaskC) -> impl Iterator<Item = (Gated, &'a WaitC)> + use<'a> {
        let [start, steps, outputs] = task.waits.map(usize::from);
        let record = &self.c.costs[usize::from(task.cost)];
        let (tile, most) = (record.work == Work::Tile, record.steps);
        let gate = move |n: usize| match n {
            n if n < start => Gated::Start,
            n if n < start + steps => Gated::Step,
            _ => Gated::Output,
        };
        let counted = if tile { start + steps + outputs } else { start };
        let first = task.wait0 as usize;
        let waits = program.waits[first..first + counted].iter().enumerate().map(move |(n, wait)| (gate(n), wait));
        waits.filter(move |(gate, wait)| !matches!(gate, Gated::Step) || program.awaited(wait).count <= most)
    }

    fn register(&mut self, rank: usize) {
        let program = self.program(rank);
        let (c, stale) = (self.c, std::mem::take(&mut self.stale));
        let is_there = |flag: u32, level: u32| level == 0 || stale[c.family_of(flag)];
        for (s, span) in program.spans.iter().enumerate() {
            if !is_there(span.flag, span.level) {
                self.spans[self.span0[rank] + s].missing = span.count;
                for flag in span.flags() {
                    self.waiters[rank * self.flags + flag as usize].push((span.level, Waiter::Span(s as u32)));
                }
            }
        }
        self.run_helpers(rank);
        for (t, task) in c.timed_tasks(program) {
            self.pending[self.task0[rank] + t].start = 1;
            for (gate, wait) in self.gated(program, task) {
                let run = program.awaited(wait);
                if is_there(run.flag, run.level) {
                    continue;
                }
                let pending = &mut self.pending[self.task0[rank] + t];
                match gate {
                    Gated::Start => pending.start += 1,
                    Gated::Step | Gated::Output => pending.other += 1,
                }
                if wait.on & SPAN == 0 {
                    let waiters = &mut self.waiters[rank * self.flags + wait.on as usize];
                    waiters.push((run.level, Waiter::Task(t as u32, gate)));
                } else {
                    let span = &mut self.spans[self.span0[rank] + (wait.on & !SPAN) as usize];
                    span.tasks.push((t as u32, gate));
                }
            }
        }
        self.stale = stale;
        for (l, launch) in self.c.launches.iter().enumerate() {
            let tasks = program.roles[launch.roles.clone()].iter().map(|role| role.tasks).sum();
            let timed = |&&l: &&u32| !c.launches[l as usize].before_clock;
            let before = launch.after.iter().filter(timed).count() as u32;
            self.launches.push((before, tasks, 0));
            if before == 0 && !launch.before_clock {
                self.events.push(Reverse((c.times.launch, rank as u32, LAUNCH, l as u32)));
            }
        }
    }

    /// What has run before the clock starts has done so by then, at the latest.
    fn run_helpers(&mut self, rank: usize) {
        let program = self.program(rank);
        let helpers = program.roles.iter().filter(|role| self.c.launches[role.launch as usize].before_clock);
        for task in helpers.flat_map(|role| &program.tasks[role.first as usize..(role.first + role.tasks) as usize]) {
            self.done += 1;
            for signal in program.signals_of(task) {
                self.add(self.target(rank, signal), signal.flag, signal.add, 0);
            }
            if task.put != NONE {
                let put = &program.puts[task.put as usize];
                self.add(self.number(rank, Offset { dn: put.dn, dg: put.dg }), put.arrived, 1, 0);
                if put.sent != NONE {
                    self.add(rank, put.sent, 1, 0);
                }
            }
        }
    }

    fn run(&mut self) {
        while let Some(Reverse((now, rank, flag, value))) = self.events.pop() {
            let rank = rank as usize;
            if flag == LAUNCH {
                self.start_launch(rank, value as usize, now);
                continue;
            }
            let at = rank * self.flags + flag as usize;
            self.sums[at] = self.sums[at].saturating_add(value);
            while let Some(&(level, waiter)) = self.waiters[at].get(self.served[at] as usize)
                && level <= self.sums[at]
            {
                self.served[at] += 1;
                match waiter {
                    Waiter::Task(task, gate) => self.met(rank, task, gate, now, now, (0, 1)),
                    Waiter::Span(span) => self.met_of_span(rank, span, flag, now),
                }
            }
        }
    }

    fn met_of_span(&mut self, rank: usize, span: u32, flag: u32, now: u64) {
        let run = self.program(rank).spans[span as usize];
        let state = &mut self.spans[self.span0[rank] + span as usize];
        if flag == run.flag {
            state.first = now;
        }
        state.missing -= 1;
        if state.missing == 0 {
            let first = state.first;
            // Whichever flag came last, the part behind the last of the run comes after it.
            for (task, gate) in std::mem::take(&mut state.tasks) {
                self.met(rank, task, gate, first, now, (run.count - 1, run.count));
            }
        }
    }

    /// A wait of a task is over; its first flag was there at `first`.
    fn met(&mut self, rank: usize, task: u32, gate: Gated, first: u64, now: u64, (index, count): (u32, u32)) {
        let record = &self.c.costs[usize::from(self.program(rank).tasks[task as usize].cost)];
        let pending = &mut self.pending[self.task0[rank] + task as usize];
        match gate {
            Gated::Start => {
                pending.start -= 1;
                pending.first_step = pending.first_step.max(now);
            }
            Gated::Step => {
                pending.other -= 1;
                pending.first_step = pending.first_step.max(first);
                pending.main_end = pending.main_end.max(now + rest_of_steps(&self.c.times, record, index, count));
            }
            Gated::Output => {
                pending.other -= 1;
                pending.output = now;
            }
        }
        if (pending.start, pending.other) == (0, 0) {
            self.finish(rank, task);
        }
    }

    fn start_launch(&mut self, rank: usize, launch: usize, now: u64) {
        if self.launches[rank * self.c.launches.len() + launch].1 == 0 {
            self.end_launch(rank, launch, now);
            return;
        }
        for r in self.c.launches[launch].roles.clone() {
            let role = &self.program(rank).roles[r];
            for task in role.first..role.first + role.tasks {
                self.met(rank, task, Gated::Start, now, now, (0, 1));
            }
        }
    }

    fn end_launch(&mut self, rank: usize, launch: usize, end: u64) {
        self.longest = self.longest.max(end);
        for (next, row) in self.c.launches.iter().enumerate() {
            if row.after.contains(&(launch as u32)) {
                let state = &mut self.launches[rank * self.c.launches.len() + next];
                (state.0, state.2) = (state.0 - 1, state.2.max(end));
                if state.0 == 0 {
                    let start = state.2 + self.c.times.dependent;
                    self.events.push(Reverse((start, rank as u32, LAUNCH, next as u32)));
                }
            }
        }
    }

    fn raise(&mut self, rank: usize, signal: &SignalC, at: u64) {
        self.add(self.target(rank, signal), signal.flag, signal.add, at + self.latency(signal));
    }

    fn add(&mut self, rank: usize, flag: u32, add: u32, visible: u64) {
        if self.program(rank).countdown[flag as usize] != UNWATCHED {
            self.events.push(Reverse((visible, rank as u32, flag, add)));
        }
    }

    fn latency(&self, signal: &SignalC) -> u64 {
        let times = &self.c.times;
        (if signal.remote { times.flag_remote } else { times.flag_local }).max(1)
    }

    fn target(&self, rank: usize, signal: &SignalC) -> usize {
        self.number(rank, Offset { dn: 0, dg: signal.dg })
    }

    fn number(&self, rank: usize, offset: Offset) -> usize {
        self.c.folded.number(self.c.folded.at(self.c.ranks[rank], offset))
    }

    /// All that a task waits for is known.
    fn finish(&mut self, rank: usize, t: u32) {
        let program = self.program(rank);
        let task = &program.tasks[t as usize];
        let record = &self.c.costs[usize::from(task.cost)];
        let role = program.roles.partition_point(|role| role.first + role.tasks <= t);
        let g = self.task0[rank] + t as usize;
        let pending = self.pending[g];
        let main = pending.first_step + program.roles[role].block_ps + main_ps(&self.c.times, record);
        let main = main.max(pending.main_end).max(pending.output);
        let end = main + out_ps(record);
        (self.begins[g], self.mains[g]) = (pending.first_step, main);
        for signal in program.early_signals_of(task) {
            self.raise(rank, signal, main);
        }
        for signal in program.late_signals_of(task) {
            self.raise(rank, signal, end);
        }
        let mut last = end;
        if task.put != NONE {
            let (times, put) = (&self.c.times, &program.puts[task.put as usize]);
            let landed = end + times.fifo + times.post + put.flow.work + times.network.max(1);
            let target = self.number(rank, Offset { dn: put.dn, dg: put.dg });
            self.add(target, put.arrived, 1, landed + self.arrival(put.publish));
            if put.sent != NONE {
                self.add(rank, put.sent, 1, landed + self.acknowledgement());
            }
            last = last.max(landed);
        }
        self.done += 1;
        self.longest = self.longest.max(last);
        let launch = program.roles[role].launch as usize;
        let state = &mut self.launches[rank * self.c.launches.len() + launch];
        (state.1, state.2) = (state.1 - 1, state.2.max(end));
        if state.1 == 0 {
            let end = state.2;
            self.end_launch(rank, launch, end);
        }
    }

    /// From a message in memory until its flag is visible.
    fn arrival(&self, publish: PublishC) -> u64 {
        let times = &self.c.times;
        let before = if publish == PublishC::Proxy { times.completion } else { 0 };
        before + times.flag_by(publish).max(1)
    }

    /// From a message in memory until its sender's flag is visible.
    fn acknowledgement(&self) -> u64 {
        self.c.times.ack.max(1) + self.arrival(PublishC::Proxy)
    }

    fn backward(self) -> Chains {
        let mut backward = Backward {
            direct: vec![None; self.c.ranks.len() * self.flags],
            spans: vec![(None, Vec::new()); self.spans.len()],
            known: vec![Known::NotAsked; self.c.ranks.len() * self.flags],
            after_launch: after_launch(self.c),
            f: &self,
        };
        let tasks = self.mains.len();
        let mut order: Vec<(u64, u32, u32)> = Vec::with_capacity(tasks);
        for rank in 0..self.c.ranks.len() {
            let timed = self.c.timed_tasks(self.program(rank));
            order.extend(timed.map(|(t, _)| (self.mains[self.task0[rank] + t], rank as u32, t as u32)));
        }
        // Whoever waits for a flag ends its main part after everybody who raises it has ended his.
        order.sort_unstable_by(|a, b| b.cmp(a));
        let nothing = vec![Window::default(); tasks];
        let (mut main, mut out, mut message) = (nothing.clone(), nothing.clone(), nothing);
        for (_, rank, t) in order {
            let g = self.task0[rank as usize] + t as usize;
            [main[g], out[g], message[g]] = backward.task(rank as usize, t);
        }
        Chains { main, out, message, longest: self.longest, task0: self.task0 }
    }
}

/// The least time between the end of each launch and that of the run.
fn after_launch(c: &Compiled) -> Vec<u64> {
    let mut after = vec![0; c.launches.len()];
    for l in (0..c.launches.len()).rev() {
        for next in l + 1..c.launches.len() {
            if c.launches[next].after.contains(&(l as u32)) {
                after[l] = after[l].max(c.times.dependent + after[next]);
            }
        }
    }
    after
}

/// What tasks at steps of a span's flags have left: their cost record, and the tail behind their main part.
type StepTails = Vec<(u16, u64)>;

/// What is behind a flag.
#[derive(Clone, Copy)]
enum Known {
    NotAsked,
    Behind(Option<u64>),
}

struct Backward<'f, 'a> {
    f: &'f Forward<'a>,
    /// By flag of each rank: tail behind those who wait for it alone.
    direct: Vec<Option<u64>>,
    /// By span of each rank: tail behind those who wait for all of it, and of those who take it step by step.
    spans: Vec<(Option<u64>, StepTails)>,
    /// By flag of each rank: what is behind it, once somebody who raises it has asked. Nobody waits for it from then on.
    known: Vec<Known>,
    after_launch: Vec<u64>,
}

impl Backward<'_, '_> {
    /// The least time from the moment at which all adds of a flag are there to the end of the run; `None` where nobody
    /// waits for all of them.
    fn behind_flag(&mut self, rank: usize, flag: u32) -> Option<u64> {
        let at = rank * self.f.flags + flag as usize;
        if let Known::Behind(tail) = self.known[at] {
            return tail;
        }
        let tail = self.find_behind_flag(rank, flag);
        self.known[at] = Known::Behind(tail);
        tail
    }

    fn find_behind_flag(&self, rank: usize, flag: u32) -> Option<u64> {
        let f = self.f;
        if f.stale[f.c.family_of(flag)] {
            return None;
        }
        let program = f.program(rank);
        let at = rank * f.flags + flag as usize;
        let mut tail = self.direct[at];
        for &(level, waiter) in &f.waiters[at] {
            let Waiter::Span(s) = waiter else { continue };
            if level != f.sums[at] {
                continue;
            }
            let (all, steps) = &self.spans[f.span0[rank] + s as usize];
            let run = &program.spans[s as usize];
            let index = if run.count > 1 { (flag - run.flag) / run.stride.max(1) } else { 0 };
            let step = |&(cost, tail): &(u16, u64)| {
                rest_of_steps(&f.c.times, &f.c.costs[usize::from(cost)], index, run.count) + tail
            };
            tail = tail.max(*all).max(steps.iter().map(step).max());
        }
        tail
    }

    fn behind_signals(&mut self, rank: usize, signals: &[SignalC]) -> u64 {
        let behind = |signal: &SignalC| {
            let tail = self.behind_flag(self.f.target(rank, signal), signal.flag)?;
            Some(self.f.latency(signal) + tail)
        };
        signals.iter().filter_map(behind).max().unwrap_or(0)
    }

    /// Windows of a task whose successors are known: main part, store, message.
    fn task(&mut self, rank: usize, t: u32) -> [Window; 3] {
        let f = self.f;
        let program = f.program(rank);
        let task = &program.tasks[t as usize];
        let record = &f.c.costs[usize::from(task.cost)];
        let role = &program.roles[program.roles.partition_point(|role| role.first + role.tasks <= t)];
        let g = f.task0[rank] + t as usize;
        let late =
            self.behind_signals(rank, program.late_signals_of(task)).max(self.after_launch[role.launch as usize]);
        let mut after_main = self.behind_signals(rank, program.early_signals_of(task)).max(out_ps(record) + late);
        let mut message = Window::default();
        if task.put != NONE {
            let (times, put) = (&f.c.times, &program.puts[task.put as usize]);
            let target = f.number(rank, Offset { dn: put.dn, dg: put.dg });
            let arrived = self.behind_flag(target, put.arrived).map(|tail| f.arrival(put.publish) + tail);
            let sent = if put.sent == NONE { None } else { self.behind_flag(rank, put.sent) };
            let sent = sent.map(|tail| f.acknowledgement() + tail);
            let post = times.fifo + times.post;
            message.head = f.mains[g] + post;
            message.tail = times.network.max(1) + arrived.max(sent).unwrap_or(0);
            after_main = after_main.max(post + put.flow.work + message.tail);
        }
        self.wait_for(rank, task, role.block_ps + main_ps(&f.c.times, record) + after_main, after_main);
        let main = Window { head: f.begins[g], tail: after_main };
        [main, Window { head: f.mains[g], tail: late }, message]
    }

    /// Lets those who raise what a task waits for know what is behind it.
    fn wait_for(&mut self, rank: usize, task: &TaskC, from_start: u64, after_main: u64) {
        let f = self.f;
        let program = f.program(rank);
        let record = &f.c.costs[usize::from(task.cost)];
        for (gate, wait) in f.gated(program, task) {
            let tail = match gate {
                Gated::Start => from_start,
                Gated::Output => after_main,
                Gated::Step => rest_of_steps(&f.c.times, record, 0, 1) + after_main,
            };
            if wait.on & SPAN == 0 {
                let at = rank * f.flags + wait.on as usize;
                if wait.level == f.sums[at] {
                    self.direct[at] = self.direct[at].max(Some(tail));
                }
                continue;
            }
            let (all, steps) = &mut self.spans[f.span0[rank] + (wait.on & !SPAN) as usize];
            if let Gated::Step = gate {
                match steps.iter_mut().find(|(cost, _)| *cost == task.cost) {
                    Some((_, tail)) => *tail = (*tail).max(after_main),
                    None => steps.push((task.cost, after_main)),
                }
            } else {
                *all = (*all).max(Some(tail));
            }
        }
    }
}

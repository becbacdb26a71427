//! The event engine: runs a compiled schedule with a split.
//!
//! All that happens at one picosecond is handled in rounds, rank by rank: first flows that end and timers, then CTAs
//! that can go on, in the order of their indices; a round that raises something at the same time is followed by another.
//! Only then are rates shared anew. What happens inside a round therefore depends on neither insertion order nor
//! absolute rank numbers, and a rank that stands for all of them behaves as each of them does.
//!
//! Flags raised with a constant latency need no event of their own: a *countdown* flag (one level, equal to the sum of
//! its adds) remembers the latest time at which an add becomes visible, and wakes its waiters once.

use crate::SimError;
use crate::compile::{Compiled, Form, NONE, PublishC, ResourceKind, SignalC, Work};
use crate::share::{NEVER, Sharing, Tag};
use crate::tree::Tree;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use tilewire_kernels::schedule::{Claim, CtaCount, Drain};
use tilewire_kernels::{RoleKind, RoleSplit};

/// A flag of a family without waits: adds to it change nothing.
pub const UNWATCHED: u32 = u32::MAX;

/// Marks a waiter that is a window slot of a `Ready` role instead of a worker.
const SLOT: u32 = 1 << 31;

/// Window slots of a role.
const WINDOW: usize = 32;

/// A task of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskTime {
    /// Simulated rank.
    pub rank: u32,
    /// Role, over all launches.
    pub role: u32,
    /// CTA of the role that the CTA started in.
    pub cta: u32,
    /// Lane of the CTA.
    pub lane: u32,
    /// Task of the program.
    pub task: u32,
    /// The CTA took the task, ps.
    pub taken: u64,
    /// All start waits were met, ps.
    pub start: u64,
    /// The CTA was free for the next task, ps.
    pub free: u64,
    /// The last write was done, ps.
    pub end: u64,
    /// Flag that was waited for last, [`NONE`] without a wait.
    pub waited_for: u32,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Last write visible anywhere, ps.
    pub end: u64,
    /// End of each simulated rank.
    pub rank_ends: Vec<u64>,
    /// Tasks completed.
    pub tasks: u64,
    /// Events: flows that ended, timers.
    pub events: u64,
    /// By rank and role: time of CTAs in tasks, waits excluded, ps.
    pub busy: Vec<Vec<u64>>,
    /// By rank, role and family: time of CTAs waiting, ps.
    pub waits: Vec<Vec<u64>>,
    /// Workers of each role when it started (0 until then); the same on all ranks.
    pub workers: Vec<u32>,
    /// Start and end of each launch on rank 0, ps.
    pub launches: Vec<(u64, u64)>,
    /// Every task, when asked for.
    pub timeline: Vec<TaskTime>,
    /// Bytes/s carried by each resource of rank 0 after each change, when asked for: (ps, resource, bytes/s).
    pub carried: Vec<(u64, u32, u64)>,
}

#[derive(Clone, Copy)]
struct FlagState {
    count: u32,
    head: u32,
    ready_at: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Start,
    Step,
    Running,
    Main,
    Output,
    StoreBusy,
    Store,
    Push,
    FifoFull,
    Collective,
    Idle,
    Done,
}

#[derive(Clone, Copy)]
struct Worker {
    state: State,
    /// A store of the task before is in flight.
    storing: bool,
    /// The task could start when the CTA became free: its first loads were prefetched.
    prefetched: bool,
    role: u32,
    index: u32,
    lanes: u32,
    /// Next task of a strided list.
    position: u32,
    stride: u32,
    task: u32,
    step: u32,
    next: u32,
    waited_for: u32,
    since: u64,
    taken: u64,
    start: u64,
    stalled: u64,
}

#[derive(Clone, Default)]
struct RoleState {
    /// Next ticket, or the first task of the window that is not claimed.
    next: u32,
    /// Next task to enter the window.
    entered: u32,
    ready: u32,
    claimed: u32,
    idle: BinaryHeap<Reverse<u32>>,
    dirty: bool,
}

#[derive(Clone, Copy, Default)]
struct LaunchState {
    before: u32,
    left: u32,
    start: u64,
    end: u64,
    ended: bool,
}

#[derive(Clone, Copy)]
enum Item {
    Post(u32),
    Completion(u32),
    Immediate(u32),
}

#[derive(Default)]
struct Thread {
    items: VecDeque<Item>,
    busy: Option<Item>,
}

#[derive(Default)]
struct Queue {
    in_flight: u32,
    backlog: VecDeque<u32>,
    waiting: VecDeque<u32>,
    active: bool,
}

struct RankState {
    flags: Vec<FlagState>,
    workers: Vec<Worker>,
    roles: Vec<RoleState>,
    slot_next: Vec<u32>,
    launches: Vec<LaunchState>,
    threads: Vec<Thread>,
    queues: Vec<Queue>,
    fifo_used: u32,
    fifo_waiters: VecDeque<u32>,
    timers: BinaryHeap<Reverse<u128>>,
    runnable: Vec<u32>,
    dirty_roles: Vec<u32>,
    in_round: bool,
}

/// Timer kinds, in the order in which simultaneous ones are handled.
mod timer {
    pub const LAUNCH: u8 = 0;
    pub const FLAG_ADD: u8 = 1;
    pub const FLAG_WAKE: u8 = 2;
    pub const PUSHED: u8 = 3;
    pub const FIFO: u8 = 4;
    pub const THREAD: u8 = 5;
    pub const IMMEDIATE: u8 = 6;
    pub const ACK: u8 = 7;
    pub const COLLECTIVE: u8 = 8;
}

/// Flow tags: what ended.
mod ended {
    pub const MAIN: u32 = 0;
    pub const OUT: u32 = 1 << 30;
    pub const MESSAGE: u32 = 2 << 30;
    pub const KIND: u32 = 3 << 30;
}

/// CTAs of every role for a split, checked against the machine.
///
/// # Errors
/// [`SimError`] when CTAs do not fit, a role has work but nobody to do it, or CTAs but no work.
pub fn worker_counts(compiled: &Compiled, split: &RoleSplit) -> Result<Vec<u32>, SimError> {
    let program = &compiled.programs[0];
    let sms = compiled.times.sms;
    let mut counts = vec![0; program.roles.len()];
    let mut held = Vec::with_capacity(compiled.launches.len());
    for launch in &compiled.launches {
        let mut need = 0_u64;
        for r in launch.roles.clone() {
            let role = &program.roles[r];
            counts[r] = match role.ctas {
                CtaCount::FromSplit => split.get(role.kind),
                CtaCount::Fixed(n) => n.min(role.tasks.max(1)),
                CtaCount::AllSms | CtaCount::AllBut(_) => 0,
            };
            let mut holds = counts[r];
            if role.collective {
                // All CTAs work on one collective after the other: one worker stands for them, all hold their SMs.
                if let CtaCount::Fixed(n) = role.ctas {
                    holds = n;
                }
                counts[r] = counts[r].min(1);
            }
            need += u64::from(holds);
        }
        if need > u64::from(sms) {
            return Err(SimError::TooManyCtas {
                split: *split,
                launch: launch.name.clone(),
                need,
                have: u64::from(sms),
            });
        }
        for r in launch.roles.clone() {
            if let Some(spared) = program.roles[r].ctas.spared() {
                let rest = (sms - need as u32).saturating_sub(spared);
                need += u64::from(rest);
                counts[r] = if program.roles[r].collective { rest.min(1) } else { rest };
            }
        }
        held.push(need);
        for r in launch.roles.clone() {
            let role = &program.roles[r];
            let recycled_into = launch.roles.clone().any(|o| program.roles[o].recycle == r as u32 && counts[o] > 0);
            if role.tasks > 0 && counts[r] == 0 && !recycled_into {
                return Err(SimError::NobodyForRole {
                    role: role.kind,
                    launch: launch.name.clone(),
                    tasks: role.tasks,
                });
            }
        }
    }
    for kind in RoleKind::ALL {
        let used = program.roles.iter().any(|r| r.kind == kind && r.ctas == CtaCount::FromSplit && r.tasks > 0);
        let takes_any = program.roles.iter().any(|r| r.kind == kind && r.ctas.spared().is_some());
        if split.get(kind) > 0 && !used && !takes_any {
            return Err(SimError::RoleWithoutWork { role: kind, ctas: split.get(kind) });
        }
    }
    for &(first, second) in &compiled.side_by_side {
        let need = held[first] + held[second];
        if need > u64::from(sms) {
            let name = |launch: usize| compiled.launches[launch].name.clone();
            return Err(SimError::NoRoomBeside {
                first: name(first),
                second: name(second),
                need,
                have: u64::from(sms),
            });
        }
    }
    Ok(counts)
}

/// Runs one form of a compiled schedule.
///
/// # Errors
/// [`SimError`] for a split that does not fit and for a run that gets stuck.
pub fn run(compiled: &Compiled, split: &RoleSplit, form: Form, timeline: bool) -> Result<Run, SimError> {
    let counts = worker_counts(compiled, split)?;
    let mut engine = EngineState::new(compiled, counts, form, timeline);
    engine.run()?;
    Ok(engine.out)
}

struct EngineState<'a> {
    c: &'a Compiled,
    form: usize,
    drop_families: bool,
    counts: Vec<u32>,
    sharing: Sharing,
    classes: usize,
    tree: Tree,
    ranks: Vec<RankState>,
    round: Vec<u32>,
    next_round: Vec<u32>,
    stale_ranks: Vec<u32>,
    is_stale: Vec<bool>,
    /// Ranks that have arrived at each collective, by launch.
    arrived: Vec<u32>,
    tags: Vec<Tag>,
    timeline: bool,
    out: Run,
    now: u64,
}

impl<'a> EngineState<'a> {
    fn new(c: &'a Compiled, counts: Vec<u32>, form: Form, timeline: bool) -> Self {
        let n = c.ranks.len();
        let per_rank = ResourceKind::count(c.times.rails);
        let capacities: Vec<(u64, u64)> = (0..n).flat_map(|_| c.capacities.iter().copied()).collect();
        let mut sharing = Sharing::new(&capacities);
        for &rank in &c.ranks {
            for class in &c.classes {
                sharing.add_class(class.iter().map(|&(offset, kind, demand)| {
                    let target = c.folded.number(c.folded.at(rank, offset)) as u32;
                    (target * per_rank + kind.index(c.times.rails), demand)
                }));
            }
        }
        let flags = c.family_base[c.family_base.len() - 1] as usize;
        let families = c.dropped.len();
        let ranks = (0..n)
            .map(|r| {
                let program = &c.programs[c.program_of[r] as usize];
                let queues = program.puts.iter().map(|p| p.queue + 1).max().unwrap_or(0);
                RankState {
                    flags: vec![FlagState { count: 0, head: NONE, ready_at: 0 }; flags],
                    workers: Vec::new(),
                    roles: vec![RoleState::default(); program.roles.len()],
                    slot_next: vec![NONE; program.roles.len() * WINDOW],
                    launches: vec![LaunchState::default(); c.launches.len()],
                    threads: (0..c.times.threads).map(|_| Thread::default()).collect(),
                    queues: (0..queues).map(|_| Queue::default()).collect(),
                    fifo_used: 0,
                    fifo_waiters: VecDeque::new(),
                    timers: BinaryHeap::new(),
                    runnable: Vec::new(),
                    dirty_roles: Vec::new(),
                    in_round: false,
                }
            })
            .collect();
        let roles = c.programs[0].roles.len();
        Self {
            c,
            form: form as usize,
            drop_families: form == Form::ComputeOnly,
            counts,
            sharing,
            classes: c.classes.len(),
            tree: Tree::new(n),
            ranks,
            round: Vec::new(),
            next_round: Vec::new(),
            stale_ranks: Vec::new(),
            is_stale: vec![false; n],
            arrived: vec![0; c.launches.len()],
            tags: Vec::new(),
            timeline,
            out: Run {
                rank_ends: vec![0; n],
                busy: vec![vec![0; roles]; n],
                waits: vec![vec![0; roles * families]; n],
                workers: vec![0; roles],
                launches: vec![(0, 0); c.launches.len()],
                ..Run::default()
            },
            now: 0,
        }
    }

    fn program(&self, rank: usize) -> &'a crate::compile::Program {
        &self.c.programs[self.c.program_of[rank] as usize]
    }

    fn run(&mut self) -> Result<(), SimError> {
        for rank in 0..self.ranks.len() {
            let program = self.program(rank);
            if self.c.stale_arrivals {
                for put in &program.puts {
                    let family = self.c.family_of(put.arrived);
                    let (start, end) = (self.c.family_base[family], self.c.family_base[family + 1]);
                    for flag in start..end {
                        self.ranks[rank].flags[flag as usize].count = u32::MAX / 2;
                    }
                }
            }
            for (l, launch) in self.c.launches.iter().enumerate() {
                let left = launch.roles.clone().map(|r| self.role_tasks(rank, r)).sum();
                self.ranks[rank].launches[l].left = left;
                self.ranks[rank].launches[l].before = launch.after.len() as u32;
                if launch.after.is_empty() {
                    self.timer(rank, self.c.times.launch, timer::LAUNCH, l as u32, 0);
                }
            }
        }
        self.refresh_times();
        loop {
            let now = self.tree.min();
            if now == NEVER {
                break;
            }
            debug_assert!(now >= self.now);
            self.now = now;
            self.round.clear();
            let mut round = std::mem::take(&mut self.round);
            self.tree.ranks_at(now, &mut round);
            while !round.is_empty() {
                for &rank in &round {
                    self.ranks[rank as usize].in_round = false;
                    self.mark_stale(rank as usize);
                    self.end_flows(rank as usize);
                    self.fire_timers(rank as usize);
                }
                for &rank in &round {
                    self.advance_ranks_workers(rank as usize);
                }
                round.clear();
                std::mem::swap(&mut round, &mut self.next_round);
                round.sort_unstable();
            }
            self.round = round;
            let (classes, tree) = (self.classes, &mut self.stale_ranks);
            let is_stale = &mut self.is_stale;
            self.sharing.solve(now, |class| {
                let rank = class as usize / classes;
                if !is_stale[rank] {
                    is_stale[rank] = true;
                    tree.push(rank as u32);
                }
            });
            self.refresh_times();
            if self.timeline {
                self.sample_carried();
            }
        }
        self.finish()
    }

    fn finish(&mut self) -> Result<(), SimError> {
        let unfinished = self.ranks.iter().any(|rank| rank.launches.iter().any(|launch| !launch.ended));
        if unfinished {
            return Err(self.stuck());
        }
        for (l, launch) in self.ranks[0].launches.iter().enumerate() {
            self.out.launches[l] = (launch.start, launch.end);
        }
        self.out.end = self.out.rank_ends.iter().copied().max().unwrap_or(0);
        if self.timeline {
            self.out.timeline.sort_unstable_by_key(|t| (t.rank, t.taken, t.role, t.task));
        }
        Ok(())
    }

    fn stuck(&self) -> SimError {
        let mut blocked = Vec::new();
        for (r, rank) in self.ranks.iter().enumerate() {
            let program = self.program(r);
            for worker in &rank.workers {
                let waits = matches!(worker.state, State::Start | State::Step | State::Output);
                if waits && worker.waited_for != NONE {
                    let family = self.c.family_of(worker.waited_for);
                    let role = &program.roles[worker.role as usize];
                    blocked.push(crate::Blocked {
                        rank: self.c.ranks[r],
                        launch: role.launch as usize,
                        role: role.kind,
                        cta: worker.index / worker.lanes,
                        task: (worker.task - role.first) as usize,
                        family: family as u16,
                        slot: worker.waited_for - self.c.family_base[family],
                        have: rank.flags[worker.waited_for as usize].count,
                    });
                }
            }
        }
        SimError::Stuck { at_us: self.now as f64 / 1e6, blocked }
    }

    /// Tasks that a role runs in this form.
    fn role_tasks(&self, rank: usize, role: usize) -> u32 {
        let role = &self.program(rank).roles[role];
        if self.form == Form::ComputeOnly as usize && role.kind != RoleKind::Compute { 0 } else { role.tasks }
    }

    fn mark_stale(&mut self, rank: usize) {
        if !self.is_stale[rank] {
            self.is_stale[rank] = true;
            self.stale_ranks.push(rank as u32);
        }
    }

    fn refresh_times(&mut self) {
        let mut stale = std::mem::take(&mut self.stale_ranks);
        for &rank in &stale {
            let r = rank as usize;
            self.is_stale[r] = false;
            let due = self.sharing.due()[r * self.classes..(r + 1) * self.classes].iter().copied().min();
            let timer = self.ranks[r].timers.peek().map_or(NEVER, |t| (t.0 >> 64) as u64);
            self.tree.set(r, timer.min(due.unwrap_or(NEVER)));
        }
        stale.clear();
        self.stale_ranks = stale;
    }

    fn sample_carried(&mut self) {
        let per_rank = ResourceKind::count(self.c.times.rails);
        for resource in 0..per_rank {
            let carried = self.sharing.carried(resource);
            let last = self.out.carried.iter().rev().take(256).find(|s| s.1 == resource).map(|s| s.2);
            if last != Some(carried) {
                self.out.carried.push((self.now, resource, carried));
            }
        }
    }

    fn timer(&mut self, rank: usize, time: u64, kind: u8, a: u32, b: u32) {
        let key = u128::from(time) << 64 | u128::from(kind) << 56 | u128::from(a) << 24 | u128::from(b & 0xFF_FFFF);
        self.ranks[rank].timers.push(Reverse(key));
        self.mark_stale(rank);
        if time <= self.now && self.now > 0 {
            self.again(rank);
        }
    }

    /// Has another round at the present time for a rank.
    fn again(&mut self, rank: usize) {
        if !self.ranks[rank].in_round {
            self.ranks[rank].in_round = true;
            self.next_round.push(rank as u32);
        }
    }

    fn end_flows(&mut self, rank: usize) {
        let now = self.now;
        let mut tags = std::mem::take(&mut self.tags);
        for class in rank * self.classes..(rank + 1) * self.classes {
            if self.sharing.due()[class] <= now {
                self.sharing.finish(class as u32, now, |tag| tags.push(tag));
            }
        }
        self.out.events += tags.len() as u64;
        for tag in &tags {
            let id = tag.a & !ended::KIND;
            match tag.a & ended::KIND {
                ended::MAIN => {
                    self.ranks[rank].workers[id as usize].state = State::Main;
                    self.ranks[rank].runnable.push(id);
                }
                ended::OUT => self.out_ended(rank, id, tag.b),
                _ => self.message_ended(rank, tag.b),
            }
        }
        tags.clear();
        self.tags = tags;
    }

    fn fire_timers(&mut self, rank: usize) {
        let now = self.now;
        while let Some(&Reverse(key)) = self.ranks[rank].timers.peek() {
            if (key >> 64) as u64 > now {
                break;
            }
            self.ranks[rank].timers.pop();
            self.out.events += 1;
            let (kind, a, b) = ((key >> 56) as u8, (key >> 24) as u32, key as u32 & 0xFF_FFFF);
            match kind {
                timer::LAUNCH => self.start_launch(rank, a as usize),
                timer::FLAG_ADD => {
                    self.ranks[rank].flags[a as usize].count += b;
                    self.wake(rank, a);
                }
                timer::FLAG_WAKE => self.wake(rank, a),
                timer::PUSHED => self.pushed(rank, a),
                timer::FIFO => {
                    let thread = u32::from(self.program(rank).puts[a as usize].queue) % self.c.times.threads;
                    self.give(rank, thread as usize, Item::Post(a));
                }
                timer::THREAD => self.thread_done(rank, a as usize),
                timer::IMMEDIATE => {
                    let thread = b % self.c.times.threads;
                    self.give(rank, thread as usize, Item::Immediate(a));
                }
                timer::ACK => {
                    let thread = u32::from(self.program(rank).puts[a as usize].queue) % self.c.times.threads;
                    self.give(rank, thread as usize, Item::Completion(a));
                }
                timer::COLLECTIVE => self.ranks[rank].runnable.push(a),
                _ => unreachable!("timer kind {kind}"),
            }
        }
    }

    // ---- launches -------------------------------------------------------------------------------------------------

    fn start_launch(&mut self, rank: usize, launch: usize) {
        let now = self.now;
        self.ranks[rank].launches[launch].start = now;
        let program = self.program(rank);
        for r in self.c.launches[launch].roles.clone() {
            let role = &program.roles[r];
            let ctas = if self.form == Form::ComputeOnly as usize && role.kind != RoleKind::Compute {
                0
            } else {
                self.counts[r]
            };
            self.out.workers[r] = ctas * role.lanes;
            let workers = ctas * role.lanes;
            for index in 0..workers {
                let id = self.ranks[rank].workers.len() as u32;
                self.ranks[rank].workers.push(Worker {
                    state: State::Free,
                    storing: false,
                    prefetched: false,
                    role: r as u32,
                    index,
                    lanes: role.lanes,
                    position: index,
                    stride: workers,
                    task: NONE,
                    step: 0,
                    next: NONE,
                    waited_for: NONE,
                    since: now,
                    taken: now,
                    start: now,
                    stalled: 0,
                });
                self.ranks[rank].runnable.push(id);
            }
            if let Claim::Ready { .. } = role.claim {
                self.fill_window(rank, r);
            }
        }
        if self.ranks[rank].launches[launch].left == 0 {
            self.end_launch(rank, launch);
        }
    }

    fn end_launch(&mut self, rank: usize, launch: usize) {
        let now = self.now;
        self.ranks[rank].launches[launch].end = now;
        self.ranks[rank].launches[launch].ended = true;
        self.out.rank_ends[rank] = self.out.rank_ends[rank].max(now);
        for next in 0..self.c.launches.len() {
            if self.c.launches[next].after.contains(&(launch as u32)) {
                let state = &mut self.ranks[rank].launches[next];
                state.before -= 1;
                if state.before == 0 {
                    self.timer(rank, now + self.c.times.dependent, timer::LAUNCH, next as u32, 0);
                }
            }
        }
    }

    fn task_done(&mut self, rank: usize, role: u32) {
        self.out.tasks += 1;
        let launch = self.program(rank).roles[role as usize].launch as usize;
        let state = &mut self.ranks[rank].launches[launch];
        state.left -= 1;
        if state.left == 0 {
            self.end_launch(rank, launch);
        }
    }

    // ---- flags ----------------------------------------------------------------------------------------------------

    fn raise(&mut self, rank: usize, signals: &'a [SignalC], early: bool) {
        let home = self.c.ranks[rank];
        for signal in signals.iter().filter(|s| s.early == early) {
            let gpus = self.c.folded.gpus_per_node;
            let mut gpu = home.gpu + signal.dg;
            if gpu >= gpus {
                gpu -= gpus;
            }
            let target = usize::from(home.node) * usize::from(gpus) + usize::from(gpu);
            let latency = if signal.remote { self.c.times.flag_remote } else { self.c.times.flag_local };
            self.add(target, signal.flag, signal.add, self.now + latency);
        }
    }

    /// Adds to a flag; the add is visible at `visible`.
    fn add(&mut self, rank: usize, flag: u32, add: u32, visible: u64) {
        let level = self.program(rank).countdown[flag as usize];
        if level == UNWATCHED {
            return;
        }
        if level == 0 {
            self.timer(rank, visible, timer::FLAG_ADD, flag, add);
            return;
        }
        let state = &mut self.ranks[rank].flags[flag as usize];
        state.count += add;
        state.ready_at = state.ready_at.max(visible);
        if state.count >= level && state.head != NONE {
            let at = state.ready_at;
            self.timer(rank, at, timer::FLAG_WAKE, flag, 0);
        }
    }

    fn wake(&mut self, rank: usize, flag: u32) {
        let mut waiter = std::mem::replace(&mut self.ranks[rank].flags[flag as usize].head, NONE);
        while waiter != NONE {
            if waiter & SLOT != 0 {
                let slot = (waiter & !SLOT) as usize;
                let next = self.ranks[rank].slot_next[slot];
                self.check_slot(rank, slot);
                waiter = next;
            } else {
                let next = self.ranks[rank].workers[waiter as usize].next;
                self.ranks[rank].runnable.push(waiter);
                waiter = next;
            }
        }
    }

    fn is_met(&self, rank: usize, flag: u32, level: u32) -> bool {
        let state = &self.ranks[rank].flags[flag as usize];
        state.count >= level && state.ready_at <= self.now
    }

    /// Puts a waiter on a flag that is not met, and sees to it that it is woken.
    fn register(&mut self, rank: usize, flag: u32, level: u32, waiter: u32) {
        let state = &mut self.ranks[rank].flags[flag as usize];
        let head = std::mem::replace(&mut state.head, waiter);
        let pending = state.count >= level && state.ready_at > self.now;
        let at = state.ready_at;
        if waiter & SLOT != 0 {
            self.ranks[rank].slot_next[(waiter & !SLOT) as usize] = head;
        } else {
            self.ranks[rank].workers[waiter as usize].next = head;
        }
        if pending {
            self.timer(rank, at, timer::FLAG_WAKE, flag, 0);
        }
    }

    fn is_dropped(&self, flag: u32) -> bool {
        self.drop_families && self.c.dropped[self.c.family_of(flag)]
    }

    /// The first unmet flag of some waits, with its level.
    fn first_unmet(&self, rank: usize, first: u32, count: u8) -> Option<(u32, u32)> {
        let waits = &self.program(rank).waits[first as usize..first as usize + usize::from(count)];
        for wait in waits {
            if self.is_dropped(wait.flag) {
                continue;
            }
            for i in 0..wait.count {
                let flag = wait.flag + i * wait.stride;
                if !self.is_met(rank, flag, wait.level) {
                    return Some((flag, wait.level));
                }
            }
        }
        None
    }

    // ---- claims ---------------------------------------------------------------------------------------------------

    fn fill_window(&mut self, rank: usize, role: usize) {
        let program = self.program(rank);
        let Claim::Ready { window } = program.roles[role].claim else { return };
        let tasks = self.role_tasks(rank, role);
        loop {
            let state = &mut self.ranks[rank].roles[role];
            while state.next < state.entered && state.claimed >> (state.next % window) & 1 == 1 {
                state.claimed &= !(1 << (state.next % window));
                state.next += 1;
            }
            if state.entered >= tasks || state.entered >= state.next + window {
                return;
            }
            let slot = state.entered % window;
            state.entered += 1;
            self.check_slot(rank, role * WINDOW + slot as usize);
        }
    }

    /// Looks whether the task in a window slot can start; registers the slot on its first unmet flag otherwise.
    fn check_slot(&mut self, rank: usize, slot: usize) {
        let (role, slot_of_role) = (slot / WINDOW, (slot % WINDOW) as u32);
        let program = self.program(rank);
        let Claim::Ready { window } = program.roles[role].claim else { return };
        let state = &self.ranks[rank].roles[role];
        let index = state.next + (slot_of_role + window - state.next % window) % window;
        let task = &program.tasks[(program.roles[role].first + index) as usize];
        match self.first_unmet(rank, task.wait0, task.waits[0]) {
            Some((flag, level)) => self.register(rank, flag, level, SLOT | slot as u32),
            None => {
                let state = &mut self.ranks[rank].roles[role];
                state.ready |= 1 << slot_of_role;
                if !state.dirty {
                    state.dirty = true;
                    self.ranks[rank].dirty_roles.push(role as u32);
                }
            }
        }
    }

    /// The next task for a free worker: `None` when its list is empty (it then recycles or ends).
    fn claim(&mut self, rank: usize, w: u32) -> Option<u32> {
        let program = self.program(rank);
        loop {
            let worker = &mut self.ranks[rank].workers[w as usize];
            let r = worker.role as usize;
            let role = &program.roles[r];
            let tasks =
                if self.form == Form::ComputeOnly as usize && role.kind != RoleKind::Compute { 0 } else { role.tasks };
            match role.claim {
                Claim::Strided => {
                    let position = worker.position;
                    if position < tasks {
                        worker.position += worker.stride;
                        return Some(role.first + position);
                    }
                }
                Claim::Ticket => {
                    let state = &mut self.ranks[rank].roles[r];
                    if state.next < tasks {
                        state.next += 1;
                        return Some(role.first + state.next - 1);
                    }
                }
                Claim::Ready { .. } => {
                    let state = &mut self.ranks[rank].roles[r];
                    // Tasks below `entered` are claimed or in the window; with nothing unclaimed the list is empty.
                    let open = state.entered - state.next - state.claimed.count_ones();
                    if open > 0 || state.entered < tasks {
                        state.idle.push(Reverse(w));
                        let ready = state.ready != 0;
                        let dirty = state.dirty;
                        state.dirty |= ready;
                        if ready && !dirty {
                            self.ranks[rank].dirty_roles.push(r as u32);
                        }
                        self.ranks[rank].workers[w as usize].state = State::Idle;
                        return None;
                    }
                }
            }
            let worker = &mut self.ranks[rank].workers[w as usize];
            if role.recycle == NONE {
                worker.state = State::Done;
                return None;
            }
            worker.role = role.recycle;
        }
    }

    /// Hands ready tasks of `Ready` roles to idle workers, lowest task to lowest worker.
    fn serve_ready_roles(&mut self, rank: usize) -> bool {
        let Some(role) = self.ranks[rank].dirty_roles.pop() else { return false };
        let r = role as usize;
        let program = self.program(rank);
        let Claim::Ready { window } = program.roles[r].claim else { return true };
        self.ranks[rank].roles[r].dirty = false;
        loop {
            let state = &mut self.ranks[rank].roles[r];
            if state.ready == 0 || state.idle.is_empty() {
                break;
            }
            let shift = state.next % window;
            let mask = if window == 32 { u32::MAX } else { (1 << window) - 1 };
            let rotated =
                if shift == 0 { state.ready } else { (state.ready >> shift | state.ready << (window - shift)) & mask };
            let ahead = rotated.trailing_zeros();
            let index = state.next + ahead;
            let slot = index % window;
            state.ready &= !(1 << slot);
            state.claimed |= 1 << slot;
            let Some(Reverse(w)) = state.idle.pop() else { break };
            self.fill_window(rank, r);
            self.take(rank, w, program.roles[r].first + index);
            self.go_on(rank, w);
        }
        // Workers left over when the list ran out are free to recycle or end.
        let tasks = self.role_tasks(rank, r);
        let state = &mut self.ranks[rank].roles[r];
        if state.entered >= tasks && state.entered - state.next == state.claimed.count_ones() {
            let idle: Vec<u32> = std::mem::take(&mut state.idle).into_sorted_vec().iter().rev().map(|w| w.0).collect();
            for w in idle {
                self.ranks[rank].workers[w as usize].state = State::Free;
                self.go_on(rank, w);
            }
        }
        true
    }

    fn take(&mut self, rank: usize, w: u32, task: u32) {
        let now = self.now;
        let worker = &mut self.ranks[rank].workers[w as usize];
        worker.task = task;
        worker.state = State::Start;
        worker.taken = now;
        worker.since = now;
        worker.waited_for = NONE;
        worker.step = 0;
        worker.stalled = 0;
    }

    // ---- workers --------------------------------------------------------------------------------------------------

    fn advance_ranks_workers(&mut self, rank: usize) {
        loop {
            let mut runnable = std::mem::take(&mut self.ranks[rank].runnable);
            runnable.sort_unstable();
            for &w in &runnable {
                self.go_on(rank, w);
            }
            runnable.clear();
            if self.ranks[rank].runnable.is_empty() {
                self.ranks[rank].runnable = runnable;
            }
            self.ranks[rank].dirty_roles.sort_unstable_by(|a, b| b.cmp(a));
            let served = self.serve_ready_roles(rank);
            if !served && self.ranks[rank].runnable.is_empty() {
                break;
            }
        }
    }

    fn account_wait(&mut self, rank: usize, w: u32) {
        let families = self.c.dropped.len();
        let worker = &mut self.ranks[rank].workers[w as usize];
        if worker.waited_for != NONE {
            let waited = self.now - worker.since;
            worker.stalled += waited;
            let family = self.c.family_of(worker.waited_for);
            self.out.waits[rank][worker.role as usize * families + family] += waited;
        }
        worker.since = self.now;
    }

    fn wait_for(&mut self, rank: usize, w: u32, flag: u32, level: u32, state: State) {
        let worker = &mut self.ranks[rank].workers[w as usize];
        worker.state = state;
        worker.waited_for = flag;
        self.register(rank, flag, level, w);
    }

    /// Moves a worker on as far as it can go now.
    fn go_on(&mut self, rank: usize, w: u32) {
        let program = self.program(rank);
        loop {
            let worker = self.ranks[rank].workers[w as usize];
            match worker.state {
                State::Done | State::Idle => return,
                State::Free => match self.claim(rank, w) {
                    Some(task) => self.take(rank, w, task),
                    None => return,
                },
                State::Start => {
                    self.account_wait(rank, w);
                    let task = &program.tasks[worker.task as usize];
                    if let Some((flag, level)) = self.first_unmet(rank, task.wait0, task.waits[0]) {
                        self.wait_for(rank, w, flag, level, State::Start);
                        return;
                    }
                    let worker = &mut self.ranks[rank].workers[w as usize];
                    worker.start = self.now;
                    // The loads of a task that could start when the CTA became free were issued behind the last tile.
                    worker.prefetched = worker.start == worker.taken && worker.storing;
                    if !self.begin(rank, w) {
                        return;
                    }
                }
                State::Step => {
                    self.account_wait(rank, w);
                    if !self.run_steps(rank, w) {
                        return;
                    }
                }
                State::Main => {
                    let record = &self.c.costs[usize::from(program.tasks[worker.task as usize].cost)];
                    self.ranks[rank].workers[w as usize].since = self.now;
                    self.ranks[rank].workers[w as usize].waited_for = NONE;
                    if record.work == Work::Move {
                        self.complete(rank, w);
                    } else if worker.step < record.steps {
                        if !self.run_steps(rank, w) {
                            return;
                        }
                    } else {
                        self.ranks[rank].workers[w as usize].state = State::Output;
                    }
                }
                State::Output => {
                    self.account_wait(rank, w);
                    let task = &program.tasks[worker.task as usize];
                    let first = task.wait0 + u32::from(task.waits[0]) + u32::from(task.waits[1]);
                    if let Some((flag, level)) = self.first_unmet(rank, first, task.waits[2]) {
                        self.wait_for(rank, w, flag, level, State::Output);
                        return;
                    }
                    self.ranks[rank].workers[w as usize].waited_for = NONE;
                    self.ranks[rank].workers[w as usize].state = State::StoreBusy;
                }
                State::StoreBusy => {
                    if worker.storing {
                        // Woken again by the end of the store before.
                        return;
                    }
                    if !self.store(rank, w) {
                        return;
                    }
                }
                State::Collective => {
                    self.complete(rank, w);
                }
                State::Running | State::Store | State::Push | State::FifoFull => return,
            }
        }
    }

    /// Starts the work of a task; true when the worker can go on at once.
    fn begin(&mut self, rank: usize, w: u32) -> bool {
        let program = self.program(rank);
        let worker = self.ranks[rank].workers[w as usize];
        let task = &program.tasks[worker.task as usize];
        let record = &self.c.costs[usize::from(task.cost)];
        let cost = &record.forms[self.form];
        match record.work {
            Work::Sync => {
                self.complete(rank, w);
                true
            }
            Work::Put => {
                self.ranks[rank].workers[w as usize].state = State::Push;
                self.timer(rank, self.now + cost.fixed, timer::PUSHED, w, 0);
                false
            }
            Work::Collective => {
                self.ranks[rank].workers[w as usize].state = State::Collective;
                let launch = program.roles[worker.role as usize].launch as usize;
                self.arrived[launch] += 1;
                if self.arrived[launch] as usize == self.ranks.len() {
                    self.arrived[launch] = 0;
                    for other in 0..self.ranks.len() {
                        let waiting = self.ranks[other].workers.iter().position(|x| {
                            x.state == State::Collective
                                && self.program(other).roles[x.role as usize].launch as usize == launch
                        });
                        if let Some(id) = waiting {
                            self.timer(other, self.now + cost.fixed, timer::COLLECTIVE, id as u32, 0);
                        }
                    }
                }
                false
            }
            Work::Move => {
                let block = program.roles[worker.role as usize].block_ps;
                let work = cost.fixed + block;
                if cost.main == NONE || work == 0 {
                    self.complete(rank, w);
                    return true;
                }
                self.ranks[rank].workers[w as usize].state = State::Running;
                self.flow(rank, cost.main, work, Tag { a: ended::MAIN | w, b: worker.task });
                false
            }
            Work::Tile => {
                if cost.main == NONE {
                    // Only the k-step gates and the output remain in this form.
                    let first = task.wait0 + u32::from(task.waits[0]);
                    if let Some((flag, level)) = self.first_unmet(rank, first, task.waits[1]) {
                        self.wait_for(rank, w, flag, level, State::Step);
                        return false;
                    }
                    self.ranks[rank].workers[w as usize].step = record.steps;
                    self.ranks[rank].workers[w as usize].state = State::Main;
                    return true;
                }
                self.run_steps(rank, w)
            }
        }
    }

    /// Runs a tile's main loop up to the first step whose flag is not there; true when nothing is left to run.
    fn run_steps(&mut self, rank: usize, w: u32) -> bool {
        let program = self.program(rank);
        let worker = self.ranks[rank].workers[w as usize];
        let task = &program.tasks[worker.task as usize];
        let record = &self.c.costs[usize::from(task.cost)];
        let cost = &record.forms[self.form];
        if cost.main == NONE {
            return self.begin(rank, w);
        }
        let (mut limit, mut blocked) = (record.steps, None);
        let first = (task.wait0 + u32::from(task.waits[0])) as usize;
        for wait in &program.waits[first..first + usize::from(task.waits[1])] {
            if self.is_dropped(wait.flag) {
                continue;
            }
            let steps = u64::from(record.steps);
            let from = (u64::from(worker.step) * u64::from(wait.count) / steps) as u32;
            for i in from..wait.count {
                let flag = wait.flag + i * wait.stride;
                // Step s needs flag floor(s * count / steps): flag i is first needed by step ceil(i * steps / count).
                let needed_by = (u64::from(i) * steps).div_ceil(u64::from(wait.count)) as u32;
                if needed_by >= limit {
                    break;
                }
                if !self.is_met(rank, flag, wait.level) {
                    limit = needed_by;
                    blocked = Some((flag, wait.level));
                    break;
                }
            }
        }
        if limit <= worker.step && blocked.is_some() {
            let (flag, level) = blocked.unwrap_or_default();
            self.wait_for(rank, w, flag, level, State::Step);
            return false;
        }
        let mut work = u64::from(limit - worker.step) * cost.step;
        if worker.step == 0 {
            work += program.roles[worker.role as usize].block_ps;
            if !worker.prefetched {
                work += cost.fill;
            }
        }
        if limit == record.steps {
            work += cost.fixed;
        }
        let worker = &mut self.ranks[rank].workers[w as usize];
        worker.step = limit;
        if work == 0 {
            worker.state = State::Main;
            return true;
        }
        worker.state = State::Running;
        let tag = Tag { a: ended::MAIN | w, b: worker.task };
        self.flow(rank, cost.main, work, tag);
        false
    }

    /// The main loop is over and the outputs may be written; true when the worker can go on at once.
    fn store(&mut self, rank: usize, w: u32) -> bool {
        let program = self.program(rank);
        let worker = self.ranks[rank].workers[w as usize];
        let task = &program.tasks[worker.task as usize];
        let record = &self.c.costs[usize::from(task.cost)];
        let out = record.forms[self.form].out;
        if out.class == NONE {
            self.complete(rank, w);
            return true;
        }
        let signals = &program.signals[task.signal0 as usize..task.signal0 as usize + usize::from(task.signals)];
        self.raise(rank, signals, true);
        self.flow(rank, out.class, out.work, Tag { a: ended::OUT | w, b: worker.task });
        let now = self.now;
        let role = worker.role;
        self.out.busy[rank][role as usize] += now - worker.start.min(now) - worker.stalled.min(now - worker.start);
        let worker = &mut self.ranks[rank].workers[w as usize];
        if record.drain == Drain::Overlap {
            worker.storing = true;
            worker.state = State::Free;
            self.record_task(rank, w, now, NEVER);
            true
        } else {
            worker.state = State::Store;
            worker.since = now;
            false
        }
    }

    fn out_ended(&mut self, rank: usize, w: u32, task: u32) {
        let program = self.program(rank);
        let t = &program.tasks[task as usize];
        let signals = &program.signals[t.signal0 as usize..t.signal0 as usize + usize::from(t.signals)];
        self.raise(rank, signals, false);
        let worker = &mut self.ranks[rank].workers[w as usize];
        let role = if worker.storing {
            worker.storing = false;
            if worker.state == State::StoreBusy {
                self.ranks[rank].runnable.push(w);
            }
            self.role_of_task(rank, task)
        } else {
            let role = worker.role;
            let held = self.now - worker.since;
            worker.state = State::Free;
            self.ranks[rank].runnable.push(w);
            self.out.busy[rank][role as usize] += held;
            self.record_task(rank, w, self.now, self.now);
            role
        };
        if self.timeline {
            self.set_end(rank, role, task);
        }
        self.task_done(rank, role);
    }

    fn role_of_task(&self, rank: usize, task: u32) -> u32 {
        let roles = &self.program(rank).roles;
        (roles.partition_point(|r| r.first + r.tasks <= task)) as u32
    }

    /// A task whose writes are done: signals, accounts, frees the worker.
    fn complete(&mut self, rank: usize, w: u32) {
        let program = self.program(rank);
        let worker = self.ranks[rank].workers[w as usize];
        let task = &program.tasks[worker.task as usize];
        let signals = &program.signals[task.signal0 as usize..task.signal0 as usize + usize::from(task.signals)];
        self.raise(rank, signals, true);
        self.raise(rank, signals, false);
        self.out.busy[rank][worker.role as usize] += (self.now - worker.start).saturating_sub(worker.stalled);
        self.record_task(rank, w, self.now, self.now);
        self.ranks[rank].workers[w as usize].state = State::Free;
        self.task_done(rank, worker.role);
    }

    fn flow(&mut self, rank: usize, class: u32, work: u64, tag: Tag) {
        let class = (rank * self.classes) as u32 + class;
        self.sharing.start(class, self.now, work, tag);
        self.mark_stale(rank);
    }

    fn record_task(&mut self, rank: usize, w: u32, free: u64, end: u64) {
        if self.timeline {
            let worker = &self.ranks[rank].workers[w as usize];
            self.out.timeline.push(TaskTime {
                rank: rank as u32,
                role: worker.role,
                cta: worker.index / worker.lanes,
                lane: worker.index % worker.lanes,
                task: worker.task,
                taken: worker.taken,
                start: worker.start,
                free,
                end,
                waited_for: worker.waited_for,
            });
        }
    }

    fn set_end(&mut self, rank: usize, _role: u32, task: u32) {
        let now = self.now;
        let entry = self.out.timeline.iter_mut().rev().find(|t| t.rank as usize == rank && t.task == task);
        if let Some(entry) = entry {
            entry.end = now;
        }
    }

    // ---- puts -----------------------------------------------------------------------------------------------------

    fn pushed(&mut self, rank: usize, w: u32) {
        if self.ranks[rank].fifo_used >= self.c.times.fifo_depth {
            self.ranks[rank].workers[w as usize].state = State::FifoFull;
            self.ranks[rank].fifo_waiters.push_back(w);
            return;
        }
        self.ranks[rank].fifo_used += 1;
        let worker = self.ranks[rank].workers[w as usize];
        let put = self.program(rank).tasks[worker.task as usize].put;
        self.timer(rank, self.now + self.c.times.fifo, timer::FIFO, put, 0);
        self.complete(rank, w);
        self.ranks[rank].runnable.push(w);
    }

    fn give(&mut self, rank: usize, thread: usize, item: Item) {
        self.ranks[rank].threads[thread].items.push_back(item);
        self.serve(rank, thread);
    }

    fn serve(&mut self, rank: usize, thread: usize) {
        if self.ranks[rank].threads[thread].busy.is_some() {
            return;
        }
        let Some(item) = self.ranks[rank].threads[thread].items.pop_front() else { return };
        self.ranks[rank].threads[thread].busy = Some(item);
        let time = match item {
            Item::Post(_) => self.c.times.post,
            Item::Completion(_) | Item::Immediate(_) => self.c.times.completion,
        };
        self.timer(rank, self.now + time, timer::THREAD, thread as u32, 0);
        if let Item::Post(_) = item {
            self.ranks[rank].fifo_used -= 1;
            if let Some(w) = self.ranks[rank].fifo_waiters.pop_front() {
                self.pushed(rank, w);
            }
        }
    }

    fn thread_done(&mut self, rank: usize, thread: usize) {
        let Some(item) = self.ranks[rank].threads[thread].busy.take() else { return };
        let now = self.now;
        match item {
            Item::Post(put) => {
                let queue = usize::from(self.program(rank).puts[put as usize].queue);
                if self.ranks[rank].queues[queue].in_flight < self.c.times.in_flight {
                    self.ranks[rank].queues[queue].in_flight += 1;
                    self.post(rank, queue, put);
                } else {
                    self.ranks[rank].queues[queue].backlog.push_back(put);
                }
            }
            Item::Completion(put) => {
                let p = &self.program(rank).puts[put as usize];
                let queue = usize::from(p.queue);
                if p.sent != NONE {
                    self.add(rank, p.sent, 1, now + self.c.times.flag_host);
                }
                self.ranks[rank].queues[queue].in_flight -= 1;
                if let Some(next) = self.ranks[rank].queues[queue].backlog.pop_front() {
                    self.ranks[rank].queues[queue].in_flight += 1;
                    self.post(rank, queue, next);
                }
            }
            Item::Immediate(flag) => {
                if !self.c.stale_arrivals {
                    self.add(rank, flag, 1, now + self.c.times.flag_host);
                }
            }
        }
        self.serve(rank, thread);
    }

    fn post(&mut self, rank: usize, queue: usize, put: u32) {
        let state = &mut self.ranks[rank].queues[queue];
        if self.c.times.ordered && state.active {
            state.waiting.push_back(put);
            return;
        }
        state.active = true;
        let flow = self.program(rank).puts[put as usize].flow;
        self.flow(rank, flow.class, flow.work, Tag { a: ended::MESSAGE, b: put });
    }

    fn message_ended(&mut self, rank: usize, put: u32) {
        let p = self.program(rank).puts[put as usize];
        let queue = usize::from(p.queue);
        if self.c.times.ordered {
            let state = &mut self.ranks[rank].queues[queue];
            state.active = false;
            if let Some(next) = state.waiting.pop_front() {
                self.post(rank, queue, next);
            }
        }
        let (folded, home) = (self.c.folded, self.c.ranks[rank]);
        let target = folded.number(folded.at(home, tilewire_kernels::Offset { dn: p.dn, dg: p.dg }));
        let landed = self.now + self.c.times.network;
        self.out.rank_ends[target] = self.out.rank_ends[target].max(landed);
        match p.publish {
            PublishC::Nic => {
                if !self.c.stale_arrivals {
                    self.add(target, p.arrived, 1, landed + self.c.times.flag_nic);
                }
            }
            PublishC::Proxy => self.timer(target, landed, timer::IMMEDIATE, p.arrived, u32::from(p.queue)),
        }
        self.timer(rank, landed + self.c.times.ack, timer::ACK, put, 0);
    }
}

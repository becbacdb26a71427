//! The event engine: runs a compiled schedule with a split.
//!
//! ```text
//! timers ── next time, ranks with an event then ─▶ round, rank by rank: flows end, timers fire; then CTAs go on
//!    ▲                                                │ workers: wait, work, write, signal; claims: next task
//!    │                                                │ flags: adds and waiters; puts: FIFO, proxy, queues; launches
//!    └── when flows end ◀── share: new rates ◀────────┘
//! ```
//!
//! All that happens at one picosecond is handled in rounds, rank by rank: flows that end, timers, then CTAs that can go
//! on, in the order of their indices; a round that raises something at the same time is followed by another.
//! Only then are rates shared anew. What one rank does reaches another after at least a picosecond. What happens inside
//! a round therefore depends on neither insertion order nor absolute rank numbers, and a rank that stands for all of
//! them behaves as each of them does.

mod claims;
mod flags;
mod launches;
mod pool;
mod puts;
mod record;
mod tables;
mod timers;
mod workers;

pub use flags::UNWATCHED;
pub use pool::Pool;
pub use record::{Run, TaskTime};

use crate::SimError;
use crate::compile::{Compiled, Demand, Form, NONE, Program, ResourceKind};
use crate::noise::{Purpose, Stream};
use crate::share::Sharing;
use claims::{RoleState, WINDOW};
use flags::{Flags, SpanState};
use launches::{LaunchState, Rendezvous};
use puts::Proxy;
use tables::Tables;
use tilewire_kernels::schedule::CtaCount;
use tilewire_kernels::{Blocked, Offset, Rank, RoleKind, RoleSplit};
use timers::{Timers, kind};
use workers::{Pause, State, Worker};

/// Flow tags: what ended, above the number of a worker or put.
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
                CtaCount::AllBut(_) => 0,
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
    Scratch::default().run(compiled, split, form, timeline)
}

/// Slowdowns are in millionths.
const NO_SLOWDOWN: u64 = 1_000_000;
/// Runs at most until clock and time agree, beside the first.
const CLOCK_ROUNDS: usize = 4;
/// Clocks this close agree, in millionths.
const CLOCK_CLOSE: u64 = 2_000;

/// The memory of runs, to be used again: a run of a small case costs less than its allocations.
///
/// Belongs to the one [`Compiled`] that it is first used with.
#[derive(Default)]
pub struct Scratch {
    tables: Tables,
    state: RunState,
}

impl Scratch {
    /// Runs one form of a compiled schedule.
    ///
    /// # Errors
    /// [`SimError`] for a split that does not fit and for a run that gets stuck.
    pub fn run(&mut self, compiled: &Compiled, split: &RoleSplit, form: Form, timeline: bool) -> Result<Run, SimError> {
        let mut slowdown = NO_SLOWDOWN;
        let mut run = self.run_at(compiled, split, form, timeline, slowdown)?;
        let Some(power) = compiled.power.filter(|_| form != Form::CommOnly) else { return Ok(run) };
        // How long a run takes sets its clock, and the clock how long it takes.
        for _ in 0..CLOCK_ROUNDS {
            let next = power.slowdown(compiled.power_flops(), run.end, slowdown);
            if next.abs_diff(slowdown) < CLOCK_CLOSE {
                break;
            }
            slowdown = next;
            let used = run.used;
            run = self.run_at(compiled, split, form, timeline, slowdown)?;
            for (all, before) in run.used.iter_mut().zip(used) {
                *all = before.max(*all);
            }
        }
        Ok(run)
    }

    /// Workers of a CTA of each role in the last run; 0 where the form does not run the role's CTAs.
    fn per_cta(&self) -> Vec<u32> {
        self.tables.roles[..self.tables.roles_per_program].iter().map(|row| row.per_cta).collect()
    }

    /// Runs with the work of tiles stretched by `slowdown` millionths.
    fn run_at(
        &mut self,
        compiled: &Compiled,
        split: &RoleSplit,
        form: Form,
        timeline: bool,
        slowdown: u64,
    ) -> Result<Run, SimError> {
        let counts = worker_counts(compiled, split)?;
        self.tables.prepare(compiled, &counts, form, timeline);
        self.state.reset(compiled, &self.tables);
        let (n, launches) = (compiled.ranks.len(), compiled.launches.len());
        let mut engine = Engine {
            c: compiled,
            t: &self.tables,
            s: &mut self.state,
            gpus: usize::from(compiled.folded.gpus_per_node),
            flag_local: compiled.times.flag_local.max(1),
            flag_remote: compiled.times.flag_remote.max(1),
            timeline,
            slowdown,
            out: Run { rank_ends: vec![0; n], launches: vec![(0, 0); launches], ..Run::default() },
        };
        engine.out.workers = engine.t.roles[..engine.t.roles_per_program].iter().map(|r| r.workers).collect();
        engine.run_all()?;
        Ok(engine.out)
    }
}

/// State of all ranks. What belongs to a rank lies together, rank after rank.
#[derive(Default)]
struct RunState {
    sharing: Sharing,
    timers: Timers,
    flags: Flags,
    spans: Vec<SpanState>,
    workers: Vec<Worker>,
    pauses: Vec<Pause>,
    /// When a worker's warp that raises flags is free.
    signallers: Vec<u64>,
    /// Workers that can go on, a bit each.
    runnable: Vec<u64>,
    roles: Vec<RoleState>,
    /// Roles with ready tasks and idle workers, by rank.
    dirty_roles: Vec<Vec<u32>>,
    /// Who waits for the same flag as a window slot.
    slot_next: Vec<u32>,
    /// Flag that a window slot has waited for last.
    slot_flag: Vec<u32>,
    launches: Vec<LaunchState>,
    /// Launches of all ranks that have to end before the clock starts.
    helpers: usize,
    proxies: Vec<Proxy>,
    collectives: Vec<Rendezvous>,
    /// With noise, of each rank.
    unsteady: Vec<Unsteady>,
    /// Tiles whose main loop runs, of each rank.
    computing: Vec<u32>,
    /// By rank and role that a CTA started in.
    busy: Vec<u64>,
    /// As `busy`.
    waited: Vec<u64>,
    /// By rank, role that waited, and family.
    waits: Vec<u64>,
    /// Timeline entry whose store is in flight, by worker.
    entry_of_store: Vec<u32>,
    last_carried: Vec<Option<u64>>,
    ended: Vec<u64>,
}

/// How a rank differs from its nominal self.
struct Unsteady {
    network: Stream,
    flags: Stream,
    slowdown: f64,
}

fn refill<T: Clone>(vector: &mut Vec<T>, len: usize, value: T) {
    vector.clear();
    vector.resize(len, value);
}

impl RunState {
    fn reset(&mut self, c: &Compiled, t: &Tables) {
        let n = c.ranks.len();
        if self.sharing.is_empty() {
            self.sharing = new_sharing(c);
        } else {
            self.sharing.reset();
        }
        self.timers.reset(n);
        self.flags.reset(c, t.compute_only);
        refill(&mut self.spans, n * t.spans, SpanState::NEW);
        refill(&mut self.workers, n * t.workers, Worker::ABSENT);
        refill(&mut self.pauses, n * t.workers, Pause::NONE);
        refill(&mut self.signallers, n * t.workers, 0);
        refill(&mut self.runnable, n * t.words, 0);
        self.roles.resize_with(n * t.roles_per_program, RoleState::default);
        self.roles.iter_mut().for_each(RoleState::reset);
        self.dirty_roles.resize_with(n, Vec::new);
        self.dirty_roles.iter_mut().for_each(Vec::clear);
        refill(&mut self.slot_next, n * t.roles_per_program * WINDOW, NONE);
        refill(&mut self.slot_flag, n * t.roles_per_program * WINDOW, NONE);
        refill(&mut self.launches, n * t.launches, LaunchState::default());
        self.helpers = n * c.launches.iter().filter(|launch| launch.before_clock).count();
        self.proxies.resize_with(n, Proxy::default);
        for (proxy, &program) in self.proxies.iter_mut().zip(&c.program_of) {
            let queues = c.programs[program as usize].puts.iter().map(|p| p.queue + 1).max().unwrap_or(0);
            proxy.reset(c.times.threads as usize, usize::from(queues));
        }
        self.collectives.clear();
        self.unsteady.clear();
        if let Some(noise) = &c.noise {
            self.unsteady.extend((0..n).map(|rank| Unsteady {
                network: noise.stream(rank, Purpose::Network),
                flags: noise.stream(rank, Purpose::Flag),
                slowdown: noise.slowdown(rank),
            }));
        }
        refill(&mut self.computing, n, 0);
        refill(&mut self.busy, n * t.roles_per_program, 0);
        refill(&mut self.waited, n * t.roles_per_program, 0);
        refill(&mut self.waits, n * t.roles_per_program * t.families, 0);
        refill(&mut self.entry_of_store, n * t.workers, 0);
        refill(&mut self.last_carried, ResourceKind::count(c.times.rails) as usize, None);
        self.ended.clear();
    }
}

fn new_sharing(c: &Compiled) -> Sharing {
    let per_rank = ResourceKind::count(c.times.rails);
    let own = c.ranks.iter().flat_map(|_| c.capacities.iter().copied());
    let leaves = c.leaves.into_iter().flat_map(|leaves| {
        let links = 2 * u32::from(c.folded.nodes).div_ceil(leaves.nodes) * c.times.rails;
        std::iter::repeat_n((leaves.link, 0), links as usize)
    });
    let mut sharing = Sharing::new(own.chain(leaves));
    let mixed = main_only(c);
    for (owner, &rank) in c.ranks.iter().enumerate() {
        for (class, &mixed) in c.classes.iter().zip(&mixed) {
            let own = class.iter().map(|&(offset, kind, demand)| {
                let target = c.folded.number(c.folded.at(rank, offset)) as u32;
                (target * per_rank + kind.index(c.times.rails), demand)
            });
            sharing.add_class(owner as u32, mixed, own.chain(leaf_links(c, rank, class)));
        }
    }
    sharing
}

/// Classes only of main flows of tasks. Their ends free workers, which go on in an order of their own; ends of outputs and
/// messages count in the order in which they come.
fn main_only(c: &Compiled) -> Vec<bool> {
    let mut main_only = vec![true; c.classes.len()];
    let outputs = c.costs.iter().flat_map(|record| &record.forms).flat_map(|cost| [cost.out, cost.deferred]);
    let messages = c.programs.iter().flat_map(|program| &program.puts).map(|put| put.flow);
    for flow in outputs.chain(messages).filter(|flow| flow.class != NONE) {
        main_only[flow.class as usize] = false;
    }
    main_only
}

/// The uplink and the downlink that a class of a rank crosses between leaf switches.
fn leaf_links(c: &Compiled, rank: Rank, class: &[Demand]) -> impl Iterator<Item = (u32, u64)> + use<> {
    let first = c.ranks.len() as u32 * ResourceKind::count(c.times.rails);
    let crossed = c.leaves.zip(c.leaf_demand(class)).and_then(|(leaves, (dn, rail, demand))| {
        let target = c.folded.at(rank, Offset::node(dn));
        let [from, to] = [rank, target].map(|rank| u32::from(rank.node) / leaves.nodes);
        let link = |leaf: u32, down: u32| (first + 2 * (leaf * c.times.rails + u32::from(rail)) + down, demand);
        (from != to).then(|| [link(from, 0), link(to, 1)])
    });
    crossed.into_iter().flatten()
}

/// Where the state of the rank at hand begins.
#[derive(Clone, Copy)]
struct Here<'a> {
    rank: usize,
    program: &'a Program,
    any_early: bool,
    gpu: usize,
    /// Rank number of the node's first GPU.
    node0: usize,
    table0: usize,
    role0: usize,
    slot0: usize,
    span0: usize,
    flag0: usize,
    launch0: usize,
    worker0: usize,
    word0: usize,
    class0: u32,
}

struct Engine<'a> {
    c: &'a Compiled,
    t: &'a Tables,
    s: &'a mut RunState,
    gpus: usize,
    flag_local: u64,
    flag_remote: u64,
    timeline: bool,
    /// Of the tiles, in millionths.
    slowdown: u64,
    out: Run,
}

impl<'a> Engine<'a> {
    fn here(&self, rank: usize) -> Here<'a> {
        let t = self.t;
        let program = self.c.program_of[rank] as usize;
        let gpu = usize::from(self.c.ranks[rank].gpu);
        Here {
            rank,
            program: &self.c.programs[program],
            any_early: t.any_early[program],
            gpu,
            node0: rank - gpu,
            table0: program * t.roles_per_program,
            role0: rank * t.roles_per_program,
            slot0: rank * t.roles_per_program * WINDOW,
            span0: rank * t.spans,
            flag0: rank * t.flags,
            launch0: rank * t.launches,
            worker0: rank * t.workers,
            word0: rank * t.words,
            class0: (rank * t.classes) as u32,
        }
    }

    /// A flag latency of a rank, with its noise; at least a picosecond.
    #[inline]
    fn flag_latency(&mut self, rank: usize, nominal: u64) -> u64 {
        let Some(noise) = &self.c.noise else { return nominal.max(1) };
        self.s.unsteady[rank].flags.spread(nominal, noise.flag_sigma)
    }

    /// A network latency of a rank, with its noise; at least a picosecond.
    fn network_latency(&mut self, rank: usize, nominal: u64) -> u64 {
        let Some(noise) = &self.c.noise else { return nominal.max(1) };
        self.s.unsteady[rank].network.spread(nominal, noise.network_sigma)
    }

    /// Compute work of a rank at the speed of its clock. The demand on shared resources stays that of nominal speed.
    #[inline]
    fn clocked(&self, rank: usize, work: u64) -> u64 {
        let work = if self.slowdown == NO_SLOWDOWN {
            work
        } else {
            (u128::from(work) * u128::from(self.slowdown) / u128::from(NO_SLOWDOWN)) as u64
        };
        if self.c.noise.is_none() {
            return work;
        }
        (work as f64 * self.s.unsteady[rank].slowdown).round() as u64
    }

    fn run_all(&mut self) -> Result<(), SimError> {
        for rank in 0..self.c.ranks.len() {
            self.command_helpers(&self.here(rank));
        }
        if self.s.helpers == 0 {
            self.start_clock(0);
        }
        let ranks: Vec<Here<'a>> = (0..self.c.ranks.len()).map(|rank| self.here(rank)).collect();
        self.s.timers.refresh(&self.s.sharing);
        let mut round = Vec::new();
        while self.s.timers.advance(&mut round) {
            while !round.is_empty() {
                for &rank in &round {
                    let h = &ranks[rank as usize];
                    self.s.timers.mark_stale(h.rank);
                    self.end_flows(h);
                    self.fire_timers(h);
                    self.advance_workers(h);
                }
                self.s.timers.next_round(&mut round);
            }
            let timers = &mut self.s.timers;
            self.s.sharing.solve(timers.now, |rank| timers.mark_stale(rank as usize));
            self.s.timers.refresh(&self.s.sharing);
            if self.timeline {
                self.sample_carried();
            }
        }
        self.close();
        if self.s.launches.iter().all(|launch| launch.ended) { Ok(()) } else { Err(self.stuck()) }
    }

    fn end_flows(&mut self, h: &Here<'a>) {
        if !self.s.timers.has_ends(h.rank) {
            return;
        }
        let now = self.s.timers.now;
        let mut ended = std::mem::take(&mut self.s.ended);
        self.s.sharing.finish(h.rank as u32, now, &mut ended);
        self.out.events += ended.len() as u64;
        for class_and_tag in ended.drain(..) {
            let tag = class_and_tag as u32;
            let id = tag & !ended::KIND;
            match tag & ended::KIND {
                ended::MAIN => {
                    self.s.workers[h.worker0 + id as usize].state = State::Main;
                    self.make_runnable(h, id);
                }
                ended::OUT => self.store_ended(h, id),
                _ => self.message_ended(h, id),
            }
        }
        self.s.ended = ended;
    }

    fn fire_timers(&mut self, h: &Here<'a>) {
        while let Some(timer) = self.s.timers.pop_due(h.rank) {
            self.out.events += 1;
            let (a, b) = (timer.a, timer.b);
            match timer.kind {
                kind::LAUNCH => {
                    self.s.flags.adds_have_come(false);
                    self.start_launch(h, a as usize);
                }
                kind::FLAG_ADD => {
                    if self.s.flags.count(h.rank, a, b) {
                        self.wake(h, a);
                    }
                }
                kind::FLAG_WAKE => {
                    self.s.flags.adds_have_come(true);
                    self.wake(h, a);
                }
                kind::PUSHED => self.pushed(h, a),
                kind::FIFO => self.command(h, a),
                kind::THREAD => self.thread_done(h, a as usize),
                kind::IMMEDIATE => self.immediate(h, a, b),
                kind::ACK => self.acknowledged(h, a),
                kind::COLLECTIVE => {
                    self.s.workers[h.worker0 + a as usize].state = State::Over;
                    self.make_runnable(h, a);
                }
                kind::FILL => self.filled(h, a),
                other => unreachable!("timer kind {other}"),
            }
        }
        while let Some(worker) = self.s.timers.pop_fill(h.rank) {
            self.out.events += 1;
            self.filled(h, worker);
        }
        self.s.flags.adds_have_come(true);
    }

    fn filled(&mut self, h: &Here<'a>, w: u32) {
        let worker = self.worker(h, w);
        worker.state = if worker.state == State::Crowded { State::Over } else { State::Filled };
        self.make_runnable(h, w);
    }

    fn stuck(&self) -> SimError {
        let mut blocked = Vec::new();
        for rank in 0..self.c.ranks.len() {
            let h = self.here(rank);
            for w in 0..self.t.workers as u32 {
                let worker = &self.s.workers[h.worker0 + w as usize];
                let waits = matches!(worker.state, State::Start | State::Step | State::Output);
                let waited = if waits {
                    Some((worker.task, self.s.pauses[h.worker0 + w as usize].waited_for))
                } else {
                    self.window_head(&h, worker)
                };
                if let Some((task, on)) = waited {
                    let flag = self.flag_of(&h, on);
                    let family = self.c.family_of(flag);
                    let role = &h.program.roles[usize::from(worker.role)];
                    let (home, index) = self.t.home(w);
                    let runs = h.program.waits_of(&h.program.tasks[task as usize]).iter().map(|w| h.program.awaited(w));
                    let unmet = runs.filter(|run| run.flags().any(|f| f == flag)).map(|run| run.level).max();
                    blocked.push(Blocked {
                        rank: self.c.ranks[rank],
                        launch: self.c.launches[role.launch as usize].name.clone(),
                        role: role.kind,
                        cta: index / self.t.roles[home].lanes,
                        task: task - role.first,
                        flag: self.c.families[family].clone(),
                        slot: flag - self.c.family_base[family],
                        have: self.s.flags.value(self.c, rank, flag),
                        need: unmet.unwrap_or(0),
                    });
                }
            }
        }
        let at = self.s.timers.now.max(self.s.flags.last_noted());
        SimError::Stuck { at_us: at as f64 / 1e6, blocked }
    }
}

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
mod network;
mod pool;
mod puts;
mod record;
mod state;
mod tables;
mod timers;
mod waves;
mod workers;

pub use flags::UNWATCHED;
pub use pool::Pool;
pub use record::{Run, TaskTime};

use crate::SimError;
use crate::compile::{Compiled, Flow, Form, Program, TaskC, WaitC};
use crate::share::Flows;
use state::{RankState, RunState, State};
use tables::{CostRow, Instant, RoleRow, Tables};
use tilewire_kernels::schedule::CtaCount;
use tilewire_kernels::{Blocked, RoleKind, RoleSplit};
use timers::kind;

/// Flow tags: what ended, above the number of a put, or of a word of workers; the number of a flow is then a worker's in
/// its word.
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
        let times = &compiled.times;
        let mut engine = Engine {
            c: compiled,
            t: &self.tables,
            s: std::mem::take(&mut self.state),
            gpus: usize::from(compiled.folded.gpus_per_node),
            flag_local: compiled.times.flag_local.max(1),
            flag_remote: compiled.times.flag_remote.max(1),
            timeline,
            slowdown,
            steady: slowdown == NO_SLOWDOWN
                && times.ahead_steps == 0
                && times.step_flag == 0
                && compiled.noise.is_none(),
            out: Run { rank_ends: vec![0; n], launches: vec![(0, 0); launches], ..Run::default() },
        };
        engine.out.workers = engine.t.roles[..engine.t.roles_per_program].iter().map(|r| r.workers).collect();
        let ended = engine.run_all();
        let Engine { s, out, .. } = engine;
        self.state = s;
        ended.map(|()| out)
    }
}

/// The rank at hand, and what its tasks are.
#[derive(Clone, Copy)]
struct Here<'a> {
    rank: usize,
    program: &'a Program,
    any_early: bool,
    gpu: usize,
    /// Rank number of the node's first GPU.
    node0: usize,
    tasks: &'a [TaskC],
    waits: &'a [WaitC],
    roles: &'a [RoleRow],
    instants: &'a [Instant],
    costs: &'a [CostRow],
    /// Where its state among that of all ranks begins.
    flag0: usize,
}

struct Engine<'a> {
    c: &'a Compiled,
    t: &'a Tables,
    s: RunState,
    gpus: usize,
    flag_local: u64,
    flag_remote: u64,
    timeline: bool,
    /// Of the tiles, in millionths.
    slowdown: u64,
    /// A whole tile takes what its cost says.
    steady: bool,
    out: Run,
}

impl<'a> Engine<'a> {
    fn here(&self, rank: usize) -> Here<'a> {
        let t = self.t;
        let number = self.c.program_of[rank] as usize;
        let program = &self.c.programs[number];
        let gpu = usize::from(self.c.ranks[rank].gpu);
        let roles = number * t.roles_per_program..(number + 1) * t.roles_per_program;
        Here {
            rank,
            program,
            any_early: t.any_early[number],
            gpu,
            node0: rank - gpu,
            tasks: &program.tasks,
            waits: &program.waits,
            roles: &t.roles[roles.clone()],
            costs: &t.costs,
            instants: t.instants.get(roles).unwrap_or_default(),
            flag0: rank * t.flags,
        }
    }

    /// A flag latency of a rank, with its noise; at least a picosecond.
    #[inline]
    fn flag_latency(&self, own: &mut RankState, nominal: u64) -> u64 {
        let Some((noise, own)) = self.c.noise.as_ref().zip(own.unsteady.as_mut()) else { return nominal.max(1) };
        own.flags.spread(nominal, noise.flag_sigma)
    }

    /// A network latency of a rank, with its noise; at least a picosecond.
    fn network_latency(&self, own: &mut RankState, nominal: u64) -> u64 {
        let Some((noise, own)) = self.c.noise.as_ref().zip(own.unsteady.as_mut()) else { return nominal.max(1) };
        own.network.spread(nominal, noise.network_sigma)
    }

    /// Starts flows of a rank now, see [`network::Network::start`].
    #[expect(clippy::inline_always, reason = "twice per task; a call costs as much as the work")]
    #[inline(always)]
    fn flow(&mut self, h: &Here<'a>, flow: Flow, tag: u32, set: u64) {
        self.s.network.start(self.c, h.rank, self.s.timers.now, flow, tag, set);
    }

    /// Compute work of a rank at the speed of its clock. The demand on shared resources stays that of nominal speed.
    #[inline]
    fn clocked(&self, own: &RankState, work: u64) -> u64 {
        let work = if self.slowdown == NO_SLOWDOWN {
            work
        } else {
            (u128::from(work) * u128::from(self.slowdown) / u128::from(NO_SLOWDOWN)) as u64
        };
        own.unsteady.as_ref().map_or(work, |own| (work as f64 * own.slowdown).round() as u64)
    }

    fn run_all(&mut self) -> Result<(), SimError> {
        let mut ranks = std::mem::take(&mut self.s.ranks);
        let ended = self.run_ranks(&mut ranks);
        self.s.ranks = ranks;
        ended
    }

    fn run_ranks(&mut self, ranks: &mut [RankState]) -> Result<(), SimError> {
        let here: Vec<Here<'a>> = (0..self.c.ranks.len()).map(|rank| self.here(rank)).collect();
        for (h, own) in here.iter().zip(&mut *ranks) {
            self.command_helpers(h, own);
        }
        if self.s.helpers == 0 {
            self.start_clock(0);
        }
        self.s.timers.refresh(&self.s.network);
        let mut round = Vec::new();
        while self.s.timers.advance(&mut round) {
            while !round.is_empty() {
                for &rank in &round {
                    let (h, own) = (&here[rank as usize], &mut ranks[rank as usize]);
                    self.s.timers.mark_stale(h.rank);
                    self.end_flows(h, own);
                    self.fire_timers(h, own);
                    self.advance_workers(h, own);
                }
                self.s.timers.next_round(&mut round);
            }
            let timers = &mut self.s.timers;
            self.s.network.solve(self.c, timers.now, |rank| timers.move_ends(rank));
            self.s.timers.refresh(&self.s.network);
            if self.timeline {
                self.sample_carried();
            }
        }
        self.close(ranks);
        let mut launches = ranks.iter().flat_map(|own| &own.launches);
        if launches.all(|launch| launch.ended) { Ok(()) } else { Err(self.stuck(ranks)) }
    }

    fn end_flows(&mut self, h: &Here<'a>, own: &mut RankState) {
        if !self.s.timers.has_ends(h.rank) {
            return;
        }
        let now = self.s.timers.now;
        let mut ended = std::mem::take(&mut self.s.ended);
        self.s.network.finish(h.rank, now, &mut ended);
        for Flows { tag, set, .. } in ended.drain(..) {
            self.out.events += u64::from(set.count_ones());
            let id = tag & !ended::KIND;
            match tag & ended::KIND {
                ended::MAIN => own.runnable[id as usize] |= set,
                ended::OUT => self.stores_ended(h, own, id, set),
                _ => self.message_ended(h, own, id),
            }
        }
        self.s.ended = ended;
    }

    fn fire_timers(&mut self, h: &Here<'a>, own: &mut RankState) {
        while let Some(timer) = self.s.timers.pop_due(h.rank) {
            self.out.events += 1;
            let (a, b) = (timer.a, timer.b);
            match timer.kind {
                kind::LAUNCH => {
                    self.s.flags.adds_have_come(false);
                    self.start_launch(h, own, a as usize);
                }
                kind::FLAG_ADD => {
                    if self.s.flags.count(h.rank, a, b) {
                        self.wake(h, own, a);
                    }
                }
                kind::FLAG_WAKE => {
                    self.s.flags.adds_have_come(true);
                    self.wake(h, own, a);
                }
                kind::PUSHED => self.pushed(h, own, a),
                kind::FIFO => self.command(h, own, a),
                kind::THREAD => self.thread_done(h, own, a as usize),
                kind::IMMEDIATE => self.immediate(h, own, a, b),
                kind::ACK => self.acknowledged(h, own, a),
                kind::COLLECTIVE | kind::FILL => own.make_runnable(a),
                other => unreachable!("timer kind {other}"),
            }
        }
        while let Some((word, workers)) = self.s.timers.pop_fill(h.rank) {
            self.out.events += u64::from(workers.count_ones());
            own.runnable[word as usize] |= workers;
        }
        self.s.flags.adds_have_come(true);
    }

    fn stuck(&self, ranks: &[RankState]) -> SimError {
        let mut blocked = Vec::new();
        for (rank, own) in ranks.iter().enumerate() {
            let h = self.here(rank);
            for (w, worker) in own.workers.as_flattened().iter().enumerate() {
                let waits = matches!(worker.state, State::Start | State::Step | State::Output);
                let waited =
                    if waits { Some((worker.task, own.pauses[w].waited_for)) } else { h.window_head(own, worker) };
                if let Some((task, on)) = waited {
                    let flag = own.flag_of(on);
                    let family = self.c.family_of(flag);
                    let role = &h.program.roles[usize::from(worker.role)];
                    let (home, index) = self.t.home(w as u32);
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

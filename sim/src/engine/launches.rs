//! Launches of a rank: their CTAs start together and the launch ends with its last task.
//!
//! Helpers of an isolated launch run first, on all ranks, and a barrier behind them starts the clock.

use super::state::{Worker, worker_of};
use super::timers::kind;
use super::{Engine, Here, RankState, State};
use crate::compile::LaunchC;
use tilewire_kernels::schedule::Claim;

/// A launch on a rank.
#[derive(Clone, Copy, Default)]
pub(super) struct LaunchState {
    /// Launches that have to end before. For the fused kernel of an isolated launch helpers do not count: a barrier is
    /// behind them.
    before: u32,
    /// Tasks left.
    left: u32,
    pub start: u64,
    pub end: u64,
    pub ended: bool,
}

/// A collective that some ranks have come to.
pub(super) struct Rendezvous {
    /// Role, and task of the role: the same on all ranks.
    task: (u32, u32),
    /// Rank and worker of each that is there.
    there: Vec<(u32, u32)>,
}

impl<'a> Engine<'a> {
    /// Sets the state of all launches and commands the helpers that wait for nothing.
    pub(super) fn command_helpers(&mut self, h: &Here<'a>, own: &mut RankState) {
        for (l, launch) in self.c.launches.iter().enumerate() {
            let left = launch.roles.clone().map(|r| h.roles[r].tasks).sum();
            let before = self.before(launch);
            own.launches[l] = LaunchState { before, left, ..LaunchState::default() };
            if launch.before_clock && before == 0 {
                self.s.timers.push(h.rank, self.c.times.launch, kind::LAUNCH, l as u32, 0);
            }
        }
    }

    /// Launches that have to end before a launch; helpers do not count for others.
    fn before(&self, launch: &LaunchC) -> u32 {
        let same = |&&other: &&u32| self.c.launches[other as usize].before_clock == launch.before_clock;
        launch.after.iter().filter(same).count() as u32
    }

    /// Commands the launches that wait for nothing, or for nothing but helpers, on every rank; a late rank's come late.
    pub(super) fn start_clock(&mut self, at: u64) {
        self.out.clock = at;
        for rank in 0..self.c.ranks.len() {
            let start = at + self.c.times.launch + self.c.late.of(rank);
            for (l, launch) in self.c.launches.iter().enumerate() {
                if !launch.before_clock && self.before(launch) == 0 {
                    self.s.timers.push(rank, start, kind::LAUNCH, l as u32, 0);
                }
            }
        }
    }

    pub(super) fn start_launch(&mut self, h: &Here<'a>, own: &mut RankState, launch: usize) {
        let now = self.s.timers.now;
        own.launches[launch].start = now;
        for r in self.c.launches[launch].roles.clone() {
            let row = &h.roles[r];
            if row.instant_tasks > 0 {
                self.out.tasks += u64::from(row.instant_tasks);
                for signal in &h.instants[r].signals {
                    self.raise_one(h, own, signal, 0);
                }
            }
            let state = if row.watches { State::Watch } else { State::Free };
            for index in 0..row.workers {
                let w = row.worker0 + index;
                let position = if row.restarts { h.strides(r).first(index) } else { index };
                *worker_of(&mut own.workers, w) =
                    Worker { state, role: r as u16, home: r as u16, position, ..Worker::absent(w) };
                own.make_runnable(w);
            }
            if let Claim::Ready { .. } = row.claim {
                self.fill_window(h, own, r);
            }
        }
        if own.launches[launch].left == 0 {
            self.end_launch(h, own, launch);
        }
    }

    /// Goes on through what a role's tasks wait for; see [`super::tables::Instant`].
    pub(super) fn watch(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) {
        let (role, position) = (cta.role, cta.position);
        let waits = &h.instants[usize::from(role)].waits[position as usize..];
        if let Some(unmet) = waits.iter().position(|&wait| !self.is_met(h, own, wait)) {
            cta.position += unmet as u32;
            self.register(h, own, waits[unmet], cta.w);
        } else {
            cta.state = State::Done;
            self.task_done(h, own, usize::from(role));
        }
    }

    fn end_launch(&mut self, h: &Here<'a>, own: &mut RankState, launch: usize) {
        let now = self.s.timers.now;
        let state = &mut own.launches[launch];
        state.end = now;
        state.ended = true;
        self.out.rank_ends[h.rank] = self.out.rank_ends[h.rank].max(now);
        let before_clock = self.c.launches[launch].before_clock;
        if before_clock {
            self.s.helpers -= 1;
            if self.s.helpers == 0 {
                // Also those of other ranks: what one rank does reaches another after at least a picosecond.
                self.start_clock(now + 1);
            }
        }
        for (next, row) in self.c.launches.iter().enumerate() {
            if row.after.contains(&(launch as u32)) && row.before_clock == before_clock {
                let state = &mut own.launches[next];
                state.before -= 1;
                if state.before == 0 {
                    self.s.timers.push(h.rank, now + self.c.times.dependent, kind::LAUNCH, next as u32, 0);
                }
            }
        }
    }

    /// Counts a task whose last write is done.
    #[inline]
    pub(super) fn task_done(&mut self, h: &Here<'a>, own: &mut RankState, role: usize) {
        self.out.tasks += 1;
        let launch = h.roles[role].launch as usize;
        let state = &mut own.launches[launch];
        state.left -= 1;
        if state.left == 0 {
            self.end_launch(h, own, launch);
        }
    }

    /// A rank has come to a collective; the last one to come starts it for all.
    pub(super) fn arrive(&mut self, h: &Here<'a>, cta: &Worker, duration: u64) {
        let ranks = self.c.ranks.len();
        let role = u32::from(cta.role);
        let task = (role, cta.task - h.roles[role as usize].first);
        // Few collectives are open at a time: those of different launches or CTAs.
        let open = &mut self.s.collectives;
        let at = open.iter().position(|open| open.task == task).unwrap_or_else(|| {
            open.push(Rendezvous { task, there: Vec::with_capacity(ranks) });
            open.len() - 1
        });
        open[at].there.push((h.rank as u32, cta.w));
        if open[at].there.len() == ranks {
            let end = self.s.timers.now + duration.max(1);
            for (rank, w) in open.swap_remove(at).there {
                self.s.timers.push(rank as usize, end, kind::COLLECTIVE, w, 0);
            }
        }
    }
}

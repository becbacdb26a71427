//! What a run leaves behind: ends, times by role, and, when asked for, every task and every change of a rate.

use super::launches::LaunchState;
use super::state::Worker;
use super::tables::RoleRow;
use super::{Engine, Here, RankState};
use crate::compile::{NONE, ResourceKind};

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
    /// Flag that was waited for last, [`NONE`](crate::compile::NONE) without a wait.
    pub waited_for: u32,
}

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Last write visible anywhere, ps.
    pub end: u64,
    /// When the clock of an isolated launch starts on ranks that are not late: its helpers have ended everywhere, ps.
    pub clock: u64,
    /// End of each simulated rank.
    pub rank_ends: Vec<u64>,
    /// Tasks completed.
    pub tasks: u64,
    /// Events: flows that ended, timers.
    pub events: u64,
    /// By rank and role: time of the workers that started in the role in tasks, of any role, waits excluded, ps.
    pub busy: Vec<Vec<u64>>,
    /// By rank and role: time of the workers that started in the role waiting, ps.
    pub waited: Vec<Vec<u64>>,
    /// By rank, role and family: time of workers waiting in the role, whatever role they started in, ps.
    pub waits: Vec<Vec<u64>>,
    /// Workers of each role when it started (0 until then); the same on all ranks.
    pub workers: Vec<u32>,
    /// CTAs of each role up to the last one that took a task on any rank, with any clock that was tried: the others might
    /// as well not have been there.
    pub used: Vec<u32>,
    /// Start and end of each launch on rank 0, ps.
    pub launches: Vec<(u64, u64)>,
    /// Start and end of each launch of each rank, ps.
    pub launches_of: Vec<Vec<(u64, u64)>>,
    /// Every task, when asked for.
    pub timeline: Vec<TaskTime>,
    /// Bytes/s carried by each resource of rank 0 after each change, when asked for: (ps, resource, bytes/s).
    pub carried: Vec<(u64, u32, u64)>,
    /// Final value of each flag by rank, when asked for; 0 for flags that nobody waits for.
    pub flags: Vec<Vec<u32>>,
}

impl<'a> Engine<'a> {
    /// Notes a task whose CTA is free; its last write is done at `end`.
    #[inline]
    pub(super) fn record_task(&mut self, h: &Here<'a>, own: &mut RankState, cta: &Worker, end: u64) {
        if self.timeline {
            self.push_task(h, own, cta, end);
        }
    }

    fn push_task(&mut self, h: &Here<'a>, own: &mut RankState, cta: &Worker, end: u64) {
        let pause = &own.pauses[cta.w as usize];
        let (home, index) = self.t.home(cta.w);
        let lanes = self.t.roles[home].lanes;
        own.entry_of_store[cta.w as usize] = self.out.timeline.len() as u32;
        self.out.timeline.push(TaskTime {
            rank: h.rank as u32,
            role: u32::from(cta.role),
            cta: index / lanes,
            lane: index % lanes,
            task: cta.task,
            taken: pause.taken,
            start: cta.start,
            free: self.s.timers.now,
            end,
            waited_for: pause.waited_for,
        });
    }

    /// The store of the task before is done.
    #[inline]
    pub(super) fn record_end(&mut self, own: &RankState, w: u32) {
        if self.timeline {
            let entry = own.entry_of_store[w as usize];
            self.out.timeline[entry as usize].end = self.s.timers.now;
        }
    }

    pub(super) fn sample_carried(&mut self) {
        for resource in 0..ResourceKind::count(self.c.times.rails) {
            let carried = self.s.network.carried(resource);
            let last = &mut self.s.last_carried[resource as usize];
            if *last != Some(carried) {
                *last = Some(carried);
                self.out.carried.push((self.s.timers.now, resource, carried));
            }
        }
    }

    /// Everything that is known only at the end.
    pub(super) fn close(&mut self, ranks: &[RankState]) {
        let roles = self.t.roles_per_program;
        let times = |launches: &[LaunchState]| launches.iter().map(|launch| (launch.start, launch.end)).collect();
        self.out.launches_of = ranks.iter().map(|own| times(&own.launches)).collect();
        self.out.launches = self.out.launches_of[0].clone();
        self.out.busy = ranks.iter().map(|own| own.busy.clone()).collect();
        self.out.waited = ranks.iter().map(|own| own.waited.clone()).collect();
        self.out.waits = ranks.iter().map(|own| own.waits.clone()).collect();
        let used =
            |workers: &[Worker]| workers.iter().rposition(|worker| worker.task != NONE).map_or(0, |last| last + 1);
        let used_by = |row: &RoleRow| {
            let of_rank =
                |own: &RankState| used(&own.workers.as_flattened()[row.worker0 as usize..][..row.workers as usize]);
            let workers = ranks.iter().map(of_rank).max().unwrap_or(0);
            (workers as u32).div_ceil(row.lanes)
        };
        self.out.used = self.t.roles[..roles].iter().map(used_by).collect();
        self.out.end = self.out.rank_ends.iter().copied().max().unwrap_or(0);
        if self.timeline {
            let flags = 0..self.t.flags as u32;
            let values = |rank| flags.clone().map(|flag| self.s.flags.value(self.c, rank, flag)).collect();
            self.out.flags = (0..ranks.len()).map(values).collect();
        }
        self.out.timeline.sort_unstable_by_key(|t| (t.rank, t.taken, t.role, t.task));
    }
}

//! A task from its first wait to its last signal.

use super::super::memory::{Source, Write, bytes_of, floats, ranks_of};
use super::super::ops::{self, Carry};
use super::super::race::Handle;
use super::{Engine, ExecError, Next, Stage, Worker};
use tilewire_kernels::schedule::{Access, CollectiveKind, DType, Flag, Gate, Op, Signal, Task, Wait};
use tilewire_kernels::{Rank, Schedule};

impl<'a> Engine<'a> {
    pub(super) fn start(&mut self, worker: usize, task: &'a Task) -> Result<Next, ExecError> {
        let rank = self.workers[worker].rank;
        if let Some((flag, _)) = self.unmet(rank, task, Gate::Start) {
            return Ok(self.park(worker, flag));
        }
        match &task.op {
            Op::Put { .. } if self.ring_is_full(rank) => {
                self.at_ring[rank].push(worker as u32);
                return Ok(Next::Parked);
            }
            Op::Put { src, dst, .. } => {
                self.push(worker, src, &dst.region, dst.at);
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

    pub(super) fn run_steps(&mut self, worker: usize, task: &'a Task, step: u32) -> Next {
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

    pub(super) fn pass_output_gate(&mut self, worker: usize, task: &'a Task) -> Next {
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
    pub(super) fn finish(&mut self, worker: usize, task: &'a Task) -> Next {
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
    pub(super) fn store(&mut self, worker: usize, task: &'a Task) -> Next {
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
    pub(super) fn signal(&mut self, worker: usize, task: &Task, which: impl Fn(&Signal, usize) -> bool) {
        let at = self.rank_of(worker);
        for signal in &task.signals {
            for to in ranks_of(self.schedule.cluster, at, signal.to) {
                if which(signal, to) {
                    self.raise(to, signal.flag, signal.add);
                }
            }
        }
    }

    pub(super) fn complete(&mut self, worker: usize) -> Next {
        let Worker { rank, role, .. } = self.workers[worker];
        let launch = self.roles[role].launch;
        self.workers[worker].live = None;
        self.tasks_done += 1;
        self.tasks_left -= 1;
        let launches = self.schedule.launches.len();
        let state = &mut self.launches[rank * launches + launch];
        state.left -= 1;
        if state.left == 0 {
            for other in rank * launches..(rank + 1) * launches {
                let waiting = std::mem::take(&mut self.launches[other].waiting);
                for worker in waiting {
                    self.let_run(worker);
                }
            }
        }
        Next::Again
    }

    /// Waits for every rank; the last one carries out the collective for all.
    pub(super) fn meet(&mut self, worker: usize, task: &'a Task) -> Result<Next, ExecError> {
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
}

/// The flag that gates a step.
pub(crate) fn step_flag(wait: &Wait, step: u32, steps: u32) -> Flag {
    let index = (u64::from(step) * u64::from(wait.count) / u64::from(steps)) as u32;
    Flag { family: wait.flag.family, slot: wait.flag.slot + index * wait.stride }
}

pub(super) fn written_ranks(schedule: &Schedule, rank: Rank, op: &Op) -> Vec<usize> {
    let mut written = Vec::new();
    op.for_each_access(|at, _, access| {
        if access != Access::Read {
            written.extend(ranks_of(schedule.cluster, rank, at));
        }
    });
    written
}

/// What rank `me` gets from a collective.
pub(super) fn collective(kind: CollectiveKind, me: usize, sources: &[(CollectiveKind, Vec<u8>, DType)]) -> Vec<u8> {
    let ranks = sources.len();
    let part = |bytes: &[u8], part: usize| {
        let len = bytes.len() / ranks;
        bytes[part * len..(part + 1) * len].to_vec()
    };
    let sum = |parts: Vec<Vec<u8>>| {
        let dtype = sources[me].2;
        let mut sum: Vec<f32> = Vec::new();
        for bytes in parts {
            let values = floats(dtype, &bytes);
            sum.resize(values.len(), 0.0);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        bytes_of(dtype, &sum)
    };
    match kind {
        CollectiveKind::AllGather => sources.iter().flat_map(|(_, bytes, _)| bytes.iter().copied()).collect(),
        CollectiveKind::AllToAll => sources.iter().flat_map(|(_, bytes, _)| part(bytes, me)).collect(),
        CollectiveKind::ReduceScatter => sum(sources.iter().map(|(_, bytes, _)| part(bytes, me)).collect()),
        CollectiveKind::AllReduce => sum(sources.iter().map(|(_, bytes, _)| bytes.clone()).collect()),
    }
}

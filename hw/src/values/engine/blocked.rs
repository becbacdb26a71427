//! Who waits for what when nothing moves.

use super::{Engine, Stage, Worker};
use tilewire_kernels::Blocked;
use tilewire_kernels::schedule::{Claim, Flag, Gate};

impl Engine<'_> {
    /// Every worker that waits, and for what.
    pub(super) fn blocked(&self) -> Vec<Blocked> {
        let mut blocked: Vec<Blocked> = Vec::new();
        for (index, worker) in self.workers.iter().enumerate() {
            let Worker { rank, role, cta, .. } = *worker;
            let entry = |task: usize, flag: String, slot, have, need| Blocked {
                rank: self.schedule.cluster.rank(rank),
                launch: self.schedule.launches[self.roles[role].launch].name.clone(),
                role: self.kind(role),
                cta,
                task: task as u32,
                flag,
                slot,
                have,
                need,
            };
            let on_flag = |task: usize, (flag, need): (Flag, u32)| {
                let name = self.schedule.family(flag.family).name.clone();
                entry(task, name, flag.slot, self.value(rank, flag), need)
            };
            if let Some(live) = &worker.live {
                let task = self.task(role, live.task);
                let unmet = match live.stage {
                    Stage::Start => self.unmet(rank, task, Gate::Start),
                    Stage::Steps(step) => self.unmet_step(rank, task, step, task.op.steps()),
                    Stage::Output => self.unmet(rank, task, Gate::Output),
                    _ => None,
                };
                if live.stage == Stage::Rendezvous {
                    let have = self.meeting.get(&(role % self.roles_per_rank, live.task)).map_or(0, Vec::len);
                    let need = self.schedule.cluster.ranks() as u32;
                    blocked.push(entry(live.task, Blocked::ALL_RANKS.to_owned(), 0, have as u32, need));
                }
                if self.at_ring[rank].contains(&(index as u32)) {
                    blocked.push(entry(live.task, Blocked::RING.to_owned(), 0, 0, 1));
                }
                blocked.extend(unmet.map(|unmet| on_flag(live.task, unmet)));
            } else {
                let state = &self.roles[role];
                let ready = matches!(self.role_spec(role).1.claim, Claim::Ready { .. });
                if ready && self.launch_begun(rank, state.launch) {
                    let first = (state.cursor..state.claimed.len()).find(|&task| !state.claimed[task]);
                    blocked.extend(first.and_then(|task| {
                        self.unmet(rank, self.task(role, task), Gate::Start).map(|unmet| on_flag(task, unmet))
                    }));
                }
            }
        }
        blocked
    }
}

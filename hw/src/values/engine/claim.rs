//! How workers take tasks: strided, by ticket, or the first ready one of a window; launches and recycling.

use super::super::Config;
use super::super::ops::Carry;
use super::{Engine, ExecError, Live, Next, Stage, Worker};
use tilewire_kernels::Schedule;
use tilewire_kernels::schedule::{Claim, CtaCount, Gate, Launch, Role, Strides};

impl Engine<'_> {
    pub(super) fn launch_ended(&self, rank: usize, launch: usize) -> bool {
        self.launches[rank * self.schedule.launches.len() + launch].left == 0 && self.launch_begun(rank, launch)
    }

    pub(super) fn launch_begun(&self, rank: usize, launch: usize) -> bool {
        self.schedule.launches[launch].after.iter().all(|&before| self.launch_ended(rank, before))
    }

    pub(super) fn claim(&mut self, worker: usize) -> Result<Next, ExecError> {
        let Worker { rank, home, role, of, .. } = self.workers[worker];
        let launch = self.roles[role].launch;
        if !self.launch_begun(rank, launch) {
            self.launches[rank * self.schedule.launches.len() + launch].waiting.push(worker);
            return Ok(Next::Parked);
        }
        let (_, spec) = self.role_spec(role);
        let count = self.roles[role].claimed.len();
        let got = match spec.claim {
            Claim::Strided if role != home => {
                let what = "a CTA recycles into a strided role".to_owned();
                return Err(ExecError::Illegal { task: Box::new(self.name(role, 0)), what });
            }
            Claim::Strided => {
                let strides = Strides { tasks: count as u32, workers: of, restarts: &self.roles[role].restarts };
                strides.take(&mut self.workers[worker].next).map(|task| task as usize)
            }
            Claim::Ticket => {
                self.roles[role].cursor += 1;
                Some(self.roles[role].cursor - 1).filter(|&task| task < count)
            }
            Claim::Ready { window } => {
                let state = &mut self.roles[role];
                while state.cursor < count && state.claimed[state.cursor] {
                    state.cursor += 1;
                }
                let cursor = state.cursor;
                if cursor == count {
                    None
                } else {
                    let end = count.min(cursor + window as usize);
                    let state = &self.roles[role];
                    let found = (cursor..end).find(|&task| {
                        !state.claimed[task] && self.unmet(rank, self.task(role, task), Gate::Start).is_none()
                    });
                    if found.is_none() {
                        self.roles[role].idle.push(worker);
                        return Ok(Next::Parked);
                    }
                    found
                }
            }
        };
        let Some(task) = got else {
            self.wake_idle(role);
            return Ok(match spec.recycle {
                Some(next) => {
                    let first = role - self.role_spec(role).0;
                    self.workers[worker].role = first + next;
                    Next::Again
                }
                None => Next::Ended,
            });
        };
        self.roles[role].claimed[task] = true;
        // The window may have moved, and the flag that rose may serve more than one task.
        self.wake_idle(role);
        let late = self.rng.one_in(2);
        let lags = self.lags();
        self.workers[worker].live = Some(Live {
            task,
            stage: Stage::Start,
            late,
            lags,
            carry: Carry::Nothing,
            writes: Vec::new(),
            reads: Vec::new(),
            held: Vec::new(),
            targets: Vec::new(),
        });
        Ok(Next::Again)
    }
}

/// CTAs of a role; a role that takes all SMs gets those that the others of its launch leave, and at least one.
pub(crate) fn cta_count(launch: &Launch, role: usize, config: &Config) -> u32 {
    let fixed = |role: &Role| match role.ctas {
        CtaCount::FromSplit => config.split.get(role.kind),
        CtaCount::Fixed(ctas) => ctas,
        CtaCount::AllBut(_) => 0,
    };
    match launch.roles[role].ctas {
        CtaCount::AllBut(spared) => {
            config.sms.saturating_sub(launch.roles.iter().map(fixed).sum::<u32>() + spared).max(1)
        }
        _ => fixed(&launch.roles[role]),
    }
}

/// Whether a CTA of role `from` can come to role `to`, itself included.
pub(crate) fn reaches(schedule: &Schedule, launch: usize, from: usize, to: usize, config: &Config) -> bool {
    let roles = &schedule.launches[launch].roles;
    if cta_count(&schedule.launches[launch], from, config) == 0 {
        return false;
    }
    let mut at = from;
    for _ in 0..=roles.len() {
        if at == to {
            return true;
        }
        match roles[at].recycle {
            Some(next) => at = next,
            None => return false,
        }
    }
    false
}

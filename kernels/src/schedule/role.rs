//! Who works: roles, their CTAs and how these take tasks, launches.

use super::Task;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The four kinds of role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleKind {
    /// Matrix work.
    Compute,
    /// Moves or sums data between GPUs of a node.
    IntraComm,
    /// Posts puts.
    InterSend,
    /// The receiving side: copies, notices or sums what arrived.
    InterReduce,
}

impl RoleKind {
    /// All roles in the order of a split.
    pub const ALL: [Self; 4] = [Self::Compute, Self::IntraComm, Self::InterSend, Self::InterReduce];

    /// The name used in splits, tables and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::IntraComm => "intra_comm",
            Self::InterSend => "inter_send",
            Self::InterReduce => "inter_reduce",
        }
    }

    /// The short name used on the command line.
    pub const fn short(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::IntraComm => "intra",
            Self::InterSend => "send",
            Self::InterReduce => "reduce",
        }
    }
}

impl fmt::Display for RoleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How many CTAs (one per SM) each role of the big launch gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RoleSplit {
    /// CTAs of the compute role.
    pub compute: u32,
    /// CTAs of the intra-node communication role.
    pub intra_comm: u32,
    /// CTAs of the inter-node send role.
    pub inter_send: u32,
    /// CTAs of the inter-node reduce role.
    pub inter_reduce: u32,
}

impl RoleSplit {
    /// CTAs of a role.
    pub const fn get(&self, kind: RoleKind) -> u32 {
        match kind {
            RoleKind::Compute => self.compute,
            RoleKind::IntraComm => self.intra_comm,
            RoleKind::InterSend => self.inter_send,
            RoleKind::InterReduce => self.inter_reduce,
        }
    }

    /// Sets the CTAs of a role.
    pub const fn set(&mut self, kind: RoleKind, ctas: u32) {
        match kind {
            RoleKind::Compute => self.compute = ctas,
            RoleKind::IntraComm => self.intra_comm = ctas,
            RoleKind::InterSend => self.inter_send = ctas,
            RoleKind::InterReduce => self.inter_reduce = ctas,
        }
    }

    /// CTAs over all roles.
    pub fn total(&self) -> u64 {
        RoleKind::ALL.iter().map(|&kind| u64::from(self.get(kind))).sum()
    }
}

impl fmt::Display for RoleSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "compute={},intra={},send={},reduce={}",
            self.compute, self.intra_comm, self.inter_send, self.inter_reduce
        )
    }
}

/// Where a role's CTA count comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CtaCount {
    /// From the split, by the role's kind.
    FromSplit,
    /// The same for every split (helper launches).
    Fixed(u32),
    /// All SMs of the GPU that the other roles of the launch leave, less so many that are left to a launch that runs
    /// beside this one (one-task-per-block grids, baselines).
    AllBut(u32),
}

impl CtaCount {
    /// For a count that depends on the GPU: SMs that it leaves to other launches.
    pub const fn spared(self) -> Option<u32> {
        match self {
            Self::FromSplit | Self::Fixed(_) => None,
            Self::AllBut(sms) => Some(sms),
        }
    }
}

/// How CTAs (or lanes) of a role take tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// Worker i of n takes tasks i, i + n, ...; see [`Strides`].
    Strided,
    /// The next free worker takes the next task.
    Ticket,
    /// A cursor stands on the first unclaimed task; a free worker takes the lowest unclaimed task in the window whose
    /// waits are met.
    Ready {
        /// Tasks that the window spans, at most 32.
        window: u32,
    },
}

/// Who takes which task of a [strided](Claim::Strided) list that may begin anew: the tasks up to the first restart are shared
/// out among the workers, then those up to the second, and so on.
#[derive(Clone, Copy, Debug)]
pub struct Strides<'a> {
    /// Tasks of the list.
    pub tasks: u32,
    /// Workers that take them, at least one.
    pub workers: u32,
    /// Positions, in ascending order, of the tasks that are marked as a restart.
    pub restarts: &'a [u32],
}

impl Strides<'_> {
    /// Where a list begins anew.
    pub fn restarts(tasks: &[Task]) -> Vec<u32> {
        (0..).zip(tasks).filter(|(_, task)| task.restart).map(|(position, _)| position).collect()
    }

    /// The first task of a worker; [`Self::tasks`] or more without one.
    pub fn first(&self, worker: u32) -> u32 {
        self.enter(0, worker)
    }

    /// The task that the worker of the task at `position` takes after it; [`Self::tasks`] or more without one.
    pub fn next(&self, position: u32) -> u32 {
        let part = self.restarts.partition_point(|&restart| restart <= position);
        let next = position + self.workers;
        if next < self.end(part) { next } else { self.enter(part + 1, (position - self.start(part)) % self.workers) }
    }

    /// Takes the task at `next` for its worker, if there is one, and moves `next` on.
    pub fn take(&self, next: &mut u32) -> Option<u32> {
        let taken = Some(*next).filter(|&position| position < self.tasks)?;
        *next = self.next(taken);
        Some(taken)
    }

    fn start(&self, part: usize) -> u32 {
        if part == 0 { 0 } else { self.restarts[part - 1] }
    }

    fn end(&self, part: usize) -> u32 {
        self.restarts.get(part).copied().unwrap_or(self.tasks)
    }

    fn enter(&self, part: usize, worker: u32) -> u32 {
        let first = |part: &usize| self.start(*part) + worker;
        (part..=self.restarts.len()).find(|part| first(part) < self.end(*part)).map_or(self.tasks, |part| first(&part))
    }
}

/// A role of a launch. Its tasks come from [`TaskSource::tasks`](super::TaskSource::tasks).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// Kind of the role.
    pub kind: RoleKind,
    /// CTA count.
    pub ctas: CtaCount,
    /// Independent workers of a CTA; they share its throughput.
    pub lanes: u32,
    /// Claim rule.
    pub claim: Claim,
    /// Role of the same launch (by index) that a CTA joins when this list is empty.
    pub recycle: Option<usize>,
}

impl Role {
    /// A role whose CTA count the split gives, with one lane, that does not recycle.
    #[must_use]
    pub const fn new(kind: RoleKind, claim: Claim) -> Self {
        Self { kind, ctas: CtaCount::FromSplit, lanes: 1, claim, recycle: None }
    }
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Name, unique in the schedule.
    pub name: String,
    /// Launches (by index, all earlier in the list) that must have ended on this rank.
    pub after: Vec<usize>,
    /// Roles.
    pub roles: Vec<Role>,
}

/// Pairs of launches with no `after` path between them, the earlier one first: they may run at the same time.
///
/// `after` lists, launch by launch, the earlier launches that each one waits for.
pub fn side_by_side<'a>(after: impl IntoIterator<Item = &'a [usize]>) -> Vec<(usize, usize)> {
    // Everything before each launch, directly or not.
    let mut before: Vec<Vec<bool>> = Vec::new();
    let mut pairs = Vec::new();
    for (launch, direct) in after.into_iter().enumerate() {
        let mut all = vec![false; launch];
        for &earlier in direct {
            all[earlier] = true;
            all.iter_mut().zip(&before[earlier]).for_each(|(all, &more)| *all |= more);
        }
        pairs.extend((0..launch).filter(|&earlier| !all[earlier]).map(|earlier| (earlier, launch)));
        before.push(all);
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Part after part, worker after worker, by hand.
    fn shared_out(tasks: u32, workers: u32, restarts: &[u32]) -> Vec<Vec<u32>> {
        let mut of = vec![Vec::new(); workers as usize];
        let mut turn = 0;
        for task in 0..tasks {
            turn = if restarts.contains(&task) { 0 } else { turn };
            of[turn].push(task);
            turn = (turn + 1) % workers as usize;
        }
        of
    }

    #[test]
    fn strides_share_out_each_part_anew() {
        for tasks in 0..9 {
            for marks in 0..1_u32 << tasks {
                let restarts: Vec<u32> = (0..tasks).filter(|task| marks >> task & 1 == 1).collect();
                for workers in 1..6 {
                    let strides = Strides { tasks, workers, restarts: &restarts };
                    for (worker, want) in (0..).zip(shared_out(tasks, workers, &restarts)) {
                        let mut next = strides.first(worker);
                        let taken: Vec<u32> = std::iter::from_fn(|| strides.take(&mut next)).collect();
                        assert_eq!(taken, want, "worker {worker} of {workers}, {tasks} tasks, {restarts:?}");
                    }
                }
            }
        }
    }
}

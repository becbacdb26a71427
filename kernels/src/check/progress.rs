//! Does every task run, whatever the number of CTAs?
//!
//! Model: flags only rise and a wait asks for at least a level, so running a task never holds back another one. It
//! follows that all orders of running tasks end with the same set of tasks done, and one order decides: keep running
//! whatever can run; what is left over is what gets stuck. With one CTA per role the lists bind most (a task runs after
//! the one before it, in a `Ready` role after all up to `window` before it); more CTAs only take constraints away.
//! Hence a schedule that ends with one CTA per role ends with any number. Lanes are not counted on either: a CTA is taken
//! to have one, so a schedule that ends only because a CTA has more is refused. The order is linear in waits and signals.
//!
//! *Classes of ranks.* Ranks that share a skeleton can be run in step: the state then is the same on all of them, a
//! task that can run on one can run on all, and running it on all raises each flag of a class once for each signal that
//! leads there. In step is one of the legal orders, so by the argument above its left-over set is the left-over set of
//! the whole cluster: this is exact, not an approximation by the quotient graph (where a chain that goes once around
//! the ranks would look like a cycle although it ends).
//!
//! The edges of the design's acyclicity rule are all here: flags, list order, windows, launches, recycling. Where a
//! flag is raised beyond the level that a task waits for, this asks for enough raisers, not for all of them.

use super::compact::{Compact, CompactWait, TaskKind, task_at};
use super::finding::{CycleStep, Finding, FlagAt, Problem, TaskAt};
use crate::cluster::Rank;
use crate::schedule::{At, Claim, CtaCount, Flag, Op, RoleSplit, Schedule};
use std::collections::{BTreeMap, VecDeque};

const NONE: u32 = u32::MAX;

/// A task in the window of its role, on its way through its waits.
#[derive(Clone, Copy)]
struct Waiter {
    task: u32,
    /// Wait it stands at and flag of that wait's run.
    wait: u32,
    step: u32,
    /// Next waiter on the same flag.
    next: u32,
}

/// A role while it runs.
struct RoleRun {
    open: bool,
    /// First task that is not done, from the role's first.
    cursor: u32,
    window: u32,
    /// First of its waiters, one for each place in the window.
    waiters: u32,
}

/// State of the one order that is tried.
struct Progress<'a> {
    schedule: &'a Schedule,
    compact: &'a Compact,
    split: Option<&'a RoleSplit>,
    roles_per_class: usize,
    values: Vec<u32>,
    heads: Vec<u32>,
    waiters: Vec<Waiter>,
    roles: Vec<RoleRun>,
    done: Vec<bool>,
    /// Tasks in the order in which they were done.
    order: Vec<u32>,
    /// Tasks left, by class and launch.
    left: Vec<u32>,
    /// Waiters that may move.
    stack: Vec<u32>,
    /// Arrivals at a collective: by role in class and task in role.
    arrived: BTreeMap<(usize, u32), Vec<u32>>,
}

/// Findings about tasks that never run: one shortest cycle, and roles that no CTA comes to. Returns one legal order of
/// the tasks that do run, each of them on all ranks of its class at once.
pub(super) fn check(
    schedule: &Schedule,
    compact: &Compact,
    split: Option<&RoleSplit>,
    findings: &mut Vec<Finding>,
) -> Vec<u32> {
    let mut progress = Progress::new(schedule, compact, split);
    progress.run();
    if progress.order.len() < compact.tasks.len() {
        progress.report(findings);
    }
    progress.order
}

impl<'a> Progress<'a> {
    fn new(schedule: &'a Schedule, compact: &'a Compact, split: Option<&'a RoleSplit>) -> Self {
        let launches = schedule.launches.len();
        let mut left = vec![0; compact.classes.len() * launches];
        let mut roles = Vec::with_capacity(compact.roles.len());
        let mut waiters = Vec::new();
        for role in &compact.roles {
            left[role.class as usize * launches + role.launch as usize] += role.tasks;
            let window = match schedule.launches[role.launch as usize].roles[role.role as usize].claim {
                Claim::Ready { window } => window.clamp(1, role.tasks.max(1)),
                Claim::Strided | Claim::Ticket => 1,
            };
            roles.push(RoleRun { open: false, cursor: 0, window, waiters: waiters.len() as u32 });
            waiters.extend((0..window).map(|_| Waiter { task: NONE, wait: 0, step: 0, next: NONE }));
        }
        let flags = compact.flags_per_class as usize * compact.classes.len();
        Self {
            schedule,
            compact,
            split,
            roles_per_class: schedule.role_indices().count(),
            values: vec![0; flags],
            heads: vec![NONE; flags],
            waiters,
            roles,
            done: vec![false; compact.tasks.len()],
            order: Vec::with_capacity(compact.tasks.len()),
            left,
            stack: Vec::new(),
            arrived: BTreeMap::new(),
        }
    }

    fn run(&mut self) {
        loop {
            while let Some(waiter) = self.stack.pop() {
                self.advance(waiter);
            }
            if !self.open_roles() {
                return;
            }
        }
    }

    fn report(&self, findings: &mut Vec<Finding>) {
        let (schedule, compact) = (self.schedule, self.compact);
        let before = findings.len();
        for (i, role) in compact.roles.iter().enumerate() {
            // One class is enough: CTA counts are the same on all.
            if role.class == 0 && role.tasks > 0 && !self.is_fed(i) {
                let at = name_of(schedule, compact, role.first);
                findings.push(Finding::fatal(Some(at), Problem::NoCtas { tasks: role.tasks }));
            }
        }
        if findings.len() > before {
            return;
        }
        if let Some(cycle) = self.shortest_cycle() {
            findings.push(Finding::fatal(Some(cycle[0].head.clone()), Problem::Cycle(cycle)));
        } else if !findings.iter().any(|finding| matches!(finding.problem, Problem::Unreachable { .. })) {
            // No chain of flags comes back to itself: a collective that not every rank reaches, or what stands behind
            // one.
            let left = self.done.iter().filter(|&&done| !done).count() as u32;
            let first = self.done.iter().position(|&done| !done).unwrap_or(0) as u32;
            findings.push(Finding::fatal(Some(name_of(schedule, compact, first)), Problem::NeverRuns { left }));
        }
    }

    fn has_ctas(&self, role: usize) -> bool {
        let role = &self.compact.roles[role];
        let spec = &self.schedule.launches[role.launch as usize].roles[role.role as usize];
        match spec.ctas {
            CtaCount::FromSplit => self.split.is_none_or(|split| split.get(spec.kind) > 0),
            CtaCount::Fixed(ctas) => ctas > 0,
            CtaCount::AllBut(_) => true,
        }
    }

    /// Roles whose CTAs move on to `role`.
    fn feeders(&self, role: usize) -> impl Iterator<Item = usize> + '_ {
        let at = self.compact.roles[role];
        let specs = &self.schedule.launches[at.launch as usize].roles;
        let first = role - at.role as usize;
        specs
            .iter()
            .enumerate()
            .filter(move |(_, spec)| spec.recycle == Some(at.role as usize))
            .map(move |(i, _)| first + i)
    }

    /// Whether a CTA can ever come to a role.
    fn is_fed(&self, role: usize) -> bool {
        let mut seen = vec![role];
        let mut at = 0;
        while at < seen.len() {
            if self.has_ctas(seen[at]) {
                return true;
            }
            let more: Vec<usize> = self.feeders(seen[at]).filter(|feeder| !seen.contains(feeder)).collect();
            seen.extend(more);
            at += 1;
        }
        false
    }

    /// Whether all launches before a launch have ended; one without tasks ends as it begins.
    fn launch_begun(&self, class: usize, launch: usize) -> bool {
        let launches = &self.schedule.launches;
        // In their order, as `after` leads to earlier ones: on the way back there are too many ways through many phases.
        let mut ended: Vec<bool> = Vec::with_capacity(launch);
        let begun = |ended: &[bool], l: usize| launches[l].after.iter().all(|&before| ended.get(before) == Some(&true));
        for earlier in 0..launch {
            ended.push(self.left[class * launches.len() + earlier] == 0 && begun(&ended, earlier));
        }
        begun(&ended, launch)
    }

    /// Opens roles whose launch has begun and that a CTA has come to; returns whether any was opened.
    fn open_roles(&mut self) -> bool {
        let mut opened = false;
        for i in 0..self.roles.len() {
            if self.roles[i].open {
                continue;
            }
            let role = self.compact.roles[i];
            let exhausted = |feeder: usize| {
                self.roles[feeder].open && self.roles[feeder].cursor == self.compact.roles[feeder].tasks
            };
            let reached = self.has_ctas(i) || self.feeders(i).any(exhausted);
            if !reached || !self.launch_begun(role.class as usize, role.launch as usize) {
                continue;
            }
            self.roles[i].open = true;
            opened = true;
            for task in 0..self.roles[i].window.min(role.tasks) {
                self.enter(i, task);
            }
        }
        opened
    }

    /// Puts a task into the window of its role.
    fn enter(&mut self, role: usize, task: u32) {
        let place = self.roles[role].waiters + task % self.roles[role].window;
        let task = self.compact.roles[role].first + task;
        let wait = self.compact.waits_of(task).start as u32;
        self.waiters[place as usize] = Waiter { task, wait, step: 0, next: NONE };
        self.stack.push(place);
    }

    /// Moves a task through its waits until it stands at an unmet flag or is done.
    fn advance(&mut self, place: u32) {
        let Waiter { task, mut wait, mut step, .. } = self.waiters[place as usize];
        let end = self.compact.waits_of(task).end as u32;
        while wait < end {
            let run = self.compact.waits[wait as usize];
            while step < run.count {
                let flag = (run.flag + step * run.stride) as usize;
                if self.values[flag] < run.at_least {
                    let next = std::mem::replace(&mut self.heads[flag], place);
                    self.waiters[place as usize] = Waiter { task, wait, step, next };
                    return;
                }
                step += 1;
            }
            (wait, step) = (wait + 1, 0);
        }
        self.waiters[place as usize].wait = end;
        if self.compact.tasks[task as usize].kind == TaskKind::Collective {
            self.meet(task);
        } else {
            self.finish(task);
        }
    }

    /// A collective is done when every class has come to it.
    fn meet(&mut self, task: u32) {
        let role = self.compact.role_of(task);
        let key = (role % self.roles_per_class, task - self.compact.roles[role].first);
        let present = self.arrived.entry(key).or_default();
        present.push(task);
        if present.len() == self.compact.classes.len() {
            for task in self.arrived.remove(&key).unwrap_or_default() {
                self.finish(task);
            }
        }
    }

    fn finish(&mut self, task: u32) {
        for i in 0..self.compact.signals_of(task).len() {
            let signal = self.compact.signals_of(task)[i];
            self.raise(signal.flag as usize, signal.add);
        }
        self.done[task as usize] = true;
        self.order.push(task);
        let i = self.compact.role_of(task);
        let role = self.compact.roles[i];
        self.left[role.class as usize * self.schedule.launches.len() + role.launch as usize] -= 1;
        while self.roles[i].cursor < role.tasks && self.done[(role.first + self.roles[i].cursor) as usize] {
            self.roles[i].cursor += 1;
            let last = self.roles[i].cursor + self.roles[i].window - 1;
            if last < role.tasks {
                self.enter(i, last);
            }
        }
    }

    fn raise(&mut self, flag: usize, add: u32) {
        self.values[flag] = self.values[flag].saturating_add(add);
        let mut place = std::mem::replace(&mut self.heads[flag], NONE);
        while place != NONE {
            let waiter = self.waiters[place as usize];
            if self.compact.waits[waiter.wait as usize].at_least <= self.values[flag] {
                self.stack.push(place);
            } else {
                let next = std::mem::replace(&mut self.heads[flag], place);
                self.waiters[place as usize].next = next;
            }
            place = waiter.next;
        }
    }

    /// The shortest chain of waits that comes back to itself, among the tasks at which open roles stand.
    ///
    /// A task that would raise the flag stands at or behind the head of its own role, so heads are all the nodes that
    /// are needed. On classes of more than one rank the chain comes back to the same task of perhaps another rank.
    fn shortest_cycle(&self) -> Option<Vec<CycleStep>> {
        let mut raisers: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for task in (0..self.compact.tasks.len() as u32).filter(|&task| !self.done[task as usize]) {
            for signal in self.compact.signals_of(task) {
                raisers.entry(signal.flag).or_default().push(task);
            }
        }
        // Heads are the places at which a task waits; a role is one node, whose tasks in the window all must move.
        let standing: Vec<(usize, u32)> = (0..self.heads.len() as u32)
            .flat_map(|flag| {
                std::iter::successors(Some(self.heads[flag as usize]), |&place| {
                    (place != NONE).then(|| self.waiters[place as usize].next)
                })
                .take_while(|&place| place != NONE)
                .map(move |place| (flag as usize, place))
            })
            .collect();
        let mut of_role: BTreeMap<usize, Vec<(u32, u32)>> = BTreeMap::new();
        for (flag, place) in standing {
            let task = self.waiters[place as usize].task;
            of_role.entry(self.compact.role_of(task)).or_default().push((task, flag as u32));
        }
        // An edge leads from a task that stands still to the standing task that its raiser is, or is behind.
        let follow = |flag: u32| {
            raisers.get(&flag).into_iter().flatten().flat_map(|&raiser| {
                let role = self.gate_of(self.compact.role_of(raiser));
                let standing = of_role.get(&role).map_or(&[][..], Vec::as_slice);
                standing
                    .iter()
                    .filter(move |&&(task, _)| task <= raiser || self.compact.role_of(raiser) != role)
                    .filter(move |&&(task, _)| {
                        // In a window a raiser that stands itself waits for nobody else of its role.
                        task == raiser || !standing.iter().any(|&(other, _)| other == raiser)
                    })
                    .map(move |&(task, flag)| (raiser, task, flag))
            })
        };
        let mut best: Option<Vec<(u32, u32, u32)>> = None;
        for &(start, start_flag) in of_role.values().flatten() {
            // From each task: how it was reached.
            let mut from: BTreeMap<u32, (u32, u32, u32)> = BTreeMap::new();
            let mut queue = VecDeque::from([(start, start_flag, 1usize)]);
            'search: while let Some((task, flag, length)) = queue.pop_front() {
                if best.as_ref().is_some_and(|best| best.len() < length) {
                    break;
                }
                for (raiser, next, next_flag) in follow(flag) {
                    if next == start {
                        let mut cycle = vec![(task, flag, raiser)];
                        let mut at = task;
                        while let Some(&(before, flag, raiser)) = from.get(&at) {
                            cycle.push((before, flag, raiser));
                            at = before;
                        }
                        cycle.reverse();
                        if best.as_ref().is_none_or(|best| cycle.len() < best.len()) {
                            best = Some(cycle);
                        }
                        break 'search;
                    }
                    if next != start && !from.contains_key(&next) {
                        from.insert(next, (task, flag, raiser));
                        queue.push_back((next, next_flag, length + 1));
                    }
                }
            }
        }
        best.map(|cycle| self.describe(&cycle))
    }

    /// The role whose progress a role waits for: itself when open, else the launch or role before it.
    fn gate_of(&self, role: usize) -> usize {
        let mut at = role;
        for _ in 0..self.roles.len() {
            if self.roles[at].open {
                return at;
            }
            let here = self.compact.roles[at];
            let class = here.class as usize * self.roles_per_class..(here.class as usize + 1) * self.roles_per_class;
            let unfinished = |&other: &usize| self.roles[other].cursor < self.compact.roles[other].tasks;
            let launch = here.launch as usize;
            let before = (!self.launch_begun(here.class as usize, launch)).then(|| {
                class.clone().find(|other| {
                    self.schedule.launches[launch].after.contains(&(self.compact.roles[*other].launch as usize))
                        && unfinished(other)
                })
            });
            let Some(next) = before.flatten().or_else(|| self.feeders(at).find(unfinished)) else { return at };
            at = next;
        }
        at
    }

    fn describe(&self, cycle: &[(u32, u32, u32)]) -> Vec<CycleStep> {
        let class_rank =
            |task: u32| self.compact.classes[self.compact.roles[self.compact.role_of(task)].class as usize];
        let mut rank = class_rank(cycle[0].0);
        cycle
            .iter()
            .map(|&(task, flag, raiser)| {
                let (family, slot) = self.compact.family_of(flag);
                let need = self
                    .compact
                    .waits_of(task)
                    .map(|wait| self.compact.waits[wait])
                    .find(|wait| self.values[flag as usize] < wait.at_least && hits(wait, flag))
                    .map_or(0, |wait| wait.at_least);
                let from = self.source_of(raiser, family, slot, rank);
                let step = CycleStep {
                    head: name_on(self.schedule, self.compact, task, rank),
                    flag: FlagAt { rank, family: self.schedule.flags[family].name.clone(), slot },
                    have: self.values[flag as usize],
                    need,
                    raiser: name_on(self.schedule, self.compact, raiser, from),
                };
                rank = from;
                step
            })
            .collect()
    }

    /// The rank whose task `raiser` raises this flag of `rank`.
    fn source_of(&self, raiser: u32, family: usize, slot: u32, rank: Rank) -> Rank {
        let role = self.compact.roles[self.compact.role_of(raiser)];
        let class = self.compact.classes[role.class as usize];
        let cluster = self.schedule.cluster;
        let (mut found, mut index) = (None, role.first);
        self.schedule.for_each_task(class, role.launch as usize, role.role as usize, |task| {
            let this = index == raiser;
            index += 1;
            if !this {
                return;
            }
            let wanted = |flag: Flag| usize::from(flag.family.0) == family && flag.slot == slot;
            let mut targets: Vec<At> =
                task.signals.iter().filter(|signal| wanted(signal.flag)).map(|signal| signal.to).collect();
            if let Op::Put { dst, arrived, sent, .. } = &task.op {
                if wanted(*arrived) {
                    targets.push(dst.at);
                }
                if sent.is_some_and(wanted) {
                    targets.push(At::ME);
                }
            }
            found = targets.into_iter().find_map(|at| match at {
                At::Offset(offset) => {
                    let from = cluster.at(rank, cluster.negate(offset));
                    (self.schedule.symmetry.representative(from) == class).then_some(from)
                }
                At::AllLocal => Some(Rank { node: rank.node, gpu: class.gpu }),
            });
        });
        found.unwrap_or(class)
    }
}

/// Whether a wait's run holds a flag.
pub(super) const fn hits(wait: &CompactWait, flag: u32) -> bool {
    if flag < wait.flag {
        return false;
    }
    let (distance, stride) = (flag - wait.flag, wait.stride);
    if stride == 0 { distance == 0 } else { distance.is_multiple_of(stride) && distance / stride < wait.count }
}

/// Names a task; streams its role's list once more for the op.
pub(super) fn name_of(schedule: &Schedule, compact: &Compact, task: u32) -> TaskAt {
    name_on(schedule, compact, task, compact.classes[compact.roles[compact.role_of(task)].class as usize])
}

/// Names a task on any rank of its class.
pub(super) fn name_on(schedule: &Schedule, compact: &Compact, task: u32, rank: Rank) -> TaskAt {
    let role = compact.roles[compact.role_of(task)];
    let index = task - role.first;
    let (mut op, mut at) = ("", 0);
    let class = compact.classes[role.class as usize];
    schedule.for_each_task(class, role.launch as usize, role.role as usize, |task| {
        if at == index {
            op = task.op.name();
        }
        at += 1;
    });
    task_at(schedule, rank, role.launch as usize, role.role as usize, index, op)
}

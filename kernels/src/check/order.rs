//! What must come before what, in every run on any number of CTAs.
//!
//! **Model.** A task passes its waits, does its work and raises its signals. List order orders nothing here: with enough
//! CTAs all tasks of a role are claimed at once. What remains is flags, launches and collectives. A wait for level L of a
//! flag comes after a raiser R if the level cannot be reached without R:
//!
//! * when L is the sum of all adds, after every raiser;
//! * when L is less, one legal order of the schedule suggests the *group* of raisers that reach L first. Raisers outside
//!   the group add nothing too early if each of them comes, by these very edges, after a task that waits for level L or
//!   more of the same flag (then the wait comes after the whole group: `Ahead::Group`), or, where each raiser comes after
//!   the one before it, at least after the waits of each raiser of the group (`Ahead::Chain`);
//! * otherwise after those raisers without which all others together do not reach L (`Ahead::Pool`).
//!
//! *Why edges may vouch for each other.* Take a run and the first moment at which a group's level is reached without one
//! of its raisers R. Someone outside the group has added before; every edge on the path that made it wait held until
//! then, so a task that waits for level L had run before: the level was reached earlier without R, or R was done. Both
//! contradict the choice of the moment. Edges whose argument fails are dropped, which may take away the argument of
//! others: this is repeated until all that is left stands.
//!
//! Ranks of a class share their lists, so an edge is kept once and shifted to the rank at which it is looked at.

use super::compact::{Compact, CompactSignal, CompactWait, Raiser, TaskKind};
use super::progress::hits;
use crate::cluster::Offset;
use crate::schedule::{Gate, Schedule};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Tasks that a search looks at before it gives up: what it has not found by then counts as unordered.
const SEARCH_TASKS: usize = 1 << 16;

/// Tasks that a search for the argument of one raiser looks at.
const ARGUMENT_TASKS: usize = 1 << 14;

/// A task of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Node {
    /// Over all classes.
    pub(super) task: u32,
    /// Rank number.
    pub(super) rank: u32,
}

/// Up to where a task's waits count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Upto {
    /// Start waits.
    Start,
    /// Start waits and the flags of all steps up to this one.
    Step(u32),
    /// All waits.
    All,
}

/// One step back.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hop {
    /// This task raised a flag by its signal of this index.
    Raised { node: Node, signal: u32, ahead: Ahead },
    /// All tasks of a launch of a rank have ended.
    Ended { launch: u32, rank: u32 },
}

/// What it means that a wait comes after a raiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ahead {
    /// After its signal.
    Group,
    /// After its waits and reads; perhaps not after this very signal.
    Chain,
    /// After its signal, which none of the others can replace.
    Pool,
}

/// What is known of a level below the sum of all adds.
#[derive(Clone, Copy)]
struct Partial {
    ahead: Ahead,
    /// What the group adds beyond the level.
    excess: u32,
}

/// Multiplies and shifts; keys are small numbers.
#[derive(Default)]
pub(super) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

pub(super) type MixMap<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;
pub(super) type MixSet<K> = HashSet<K, BuildHasherDefault<Mix>>;

/// The order of a schedule's tasks.
pub(super) struct Order<'a> {
    schedule: &'a Schedule,
    pub(super) compact: &'a Compact,
    /// Place of each task in one legal order.
    pub(super) position: Vec<u32>,
    /// First entry of each flag in `raisers`.
    first: Vec<u32>,
    /// Signals that raise a flag, in the legal order.
    raisers: Vec<u32>,
    /// Task of each signal.
    task_of: Vec<u32>,
    /// What the raisers before a signal add to its flag.
    before: Vec<u32>,
    totals: Vec<u32>,
    partial: MixMap<(u32, u32), Partial>,
    /// Tasks with waits, by class and launch.
    waiting: Vec<Vec<u32>>,
    /// Whether all of a launch of a rank comes before a launch of a rank: for tasks that neither wait nor signal.
    launches: RefCell<MixMap<[u32; 4], bool>>,
    /// Searches that gave up.
    pub(super) gave_up: Cell<u64>,
}

impl<'a> Order<'a> {
    /// From a legal order of all tasks.
    pub(super) fn new(schedule: &'a Schedule, compact: &'a Compact, legal: &[u32]) -> Self {
        let mut position = vec![0; compact.tasks.len()];
        legal.iter().enumerate().for_each(|(at, &task)| position[task as usize] = at as u32);
        let flags = compact.flags_per_class as usize * compact.classes.len();
        let mut first = vec![0u32; flags + 1];
        let mut totals = vec![0u32; flags];
        for signal in &compact.signals {
            first[signal.flag as usize + 1] += 1;
            let total = &mut totals[signal.flag as usize];
            *total = total.saturating_add(signal.add);
        }
        for flag in 0..flags {
            first[flag + 1] += first[flag];
        }
        let mut task_of = vec![0; compact.signals.len()];
        let (mut next, mut raisers) = (first.clone(), vec![0u32; compact.signals.len()]);
        let mut before = vec![0; compact.signals.len()];
        let mut sums = vec![0u32; flags];
        for &task in legal {
            for index in compact.signals_range(task) {
                let signal = compact.signals[index];
                let flag = signal.flag as usize;
                task_of[index] = task;
                raisers[next[flag] as usize] = index as u32;
                next[flag] += 1;
                before[index] = sums[flag];
                sums[flag] = sums[flag].saturating_add(signal.add);
            }
        }
        let launches = schedule.launches.len();
        let mut waiting = vec![Vec::new(); launches * compact.classes.len()];
        for role in &compact.roles {
            let list = &mut waiting[role.class as usize * launches + role.launch as usize];
            list.extend((role.first..role.first + role.tasks).filter(|&task| !compact.waits_of(task).is_empty()));
        }
        let mut order = Self {
            schedule,
            compact,
            position,
            first,
            raisers,
            task_of,
            before,
            totals,
            partial: MixMap::default(),
            waiting,
            launches: RefCell::default(),
            gave_up: Cell::new(0),
        };
        order.settle_partial_levels();
        order
    }

    /// Launch of a task, as an index over launches.
    pub(super) fn launch_of(&self, task: u32) -> u32 {
        self.compact.roles[self.compact.role_of(task)].launch
    }

    fn class_of(&self, rank: u32) -> u32 {
        self.compact.class_of[rank as usize]
    }

    /// The rank from which `offset` leads to `rank`.
    pub(super) fn source(&self, rank: u32, offset: Offset) -> u32 {
        let cluster = self.schedule.cluster;
        let (gpus, nodes) = (u32::from(cluster.gpus_per_node), u32::from(cluster.nodes));
        let (node, gpu) = (rank / gpus, rank % gpus);
        let (dn, dg) = (u32::from(offset.dn) % nodes, u32::from(offset.dg) % gpus);
        (node + nodes - dn) % nodes * gpus + (gpu + gpus - dg) % gpus
    }

    /// The rank to which `offset` leads from `rank`.
    pub(super) fn target(&self, rank: u32, offset: Offset) -> u32 {
        let cluster = self.schedule.cluster;
        let (gpus, nodes) = (u32::from(cluster.gpus_per_node), u32::from(cluster.nodes));
        let (node, gpu) = (rank / gpus, rank % gpus);
        (node + u32::from(offset.dn)) % nodes * gpus + (gpu + u32::from(offset.dg)) % gpus
    }

    fn signals_to(&self, flag: u32) -> &[u32] {
        &self.raisers[self.first[flag as usize] as usize..self.first[flag as usize + 1] as usize]
    }

    /// How a wait for this level comes after this signal, if it must.
    pub(super) fn ahead(&self, signal: u32, level: u32) -> Option<Ahead> {
        let CompactSignal { flag, add, .. } = self.compact.signals[signal as usize];
        let total = self.totals[flag as usize];
        if level >= total {
            return Some(Ahead::Group);
        }
        let partial = self.partial.get(&(flag, level))?;
        match partial.ahead {
            Ahead::Pool => (add > total - level).then_some(Ahead::Pool),
            ahead => {
                let inside = self.before[signal as usize] < level;
                (inside && (add > partial.excess || ahead == Ahead::Chain)).then_some(ahead)
            }
        }
    }

    /// Flags of a wait of `task` that gate what lies before `upto`, as a number of steps along its run.
    pub(super) fn gating(&self, task: u32, wait: &CompactWait, upto: Upto) -> u32 {
        match (wait.gate, upto) {
            (Gate::Start, _) | (_, Upto::All) => wait.count,
            (Gate::KStep, Upto::Step(step)) => {
                let steps = u64::from(self.compact.tasks[task as usize].steps.max(1));
                (u64::from(step) * u64::from(wait.count) / steps) as u32 + 1
            }
            _ => 0,
        }
    }

    /// Searches back from what `node` does after its waits up to `upto`, the nearest first, until `hit` says so. Does not
    /// look at tasks that come no later than `floor` in the legal order.
    pub(super) fn search(
        &self,
        node: Node,
        upto: Upto,
        floor: u32,
        budget: usize,
        mut hit: impl FnMut(Hop) -> bool,
    ) -> bool {
        let mut seen: MixSet<Node> = MixSet::default();
        let mut ended: MixSet<(u32, u32)> = MixSet::default();
        let mut queue = VecDeque::from([(node, upto)]);
        while let Some((node, upto)) = queue.pop_front() {
            if seen.len() > budget {
                self.gave_up.set(self.gave_up.get() + 1);
                return false;
            }
            for index in self.compact.waits_of(node.task) {
                let wait = self.compact.waits[index];
                for i in 0..self.gating(node.task, &wait, upto) {
                    // The latest raisers first: they are the likeliest to come after what is looked for.
                    for &signal in self.signals_to(wait.flag + i * wait.stride).iter().rev() {
                        let Some(ahead) = self.ahead(signal, wait.at_least) else { continue };
                        let CompactSignal { to, .. } = self.compact.signals[signal as usize];
                        let from = Node { task: self.task_of[signal as usize], rank: self.source(node.rank, to) };
                        if hit(Hop::Raised { node: from, signal, ahead }) {
                            return true;
                        }
                        if self.position[from.task as usize] > floor && seen.insert(from) {
                            queue.push_back((from, Upto::All));
                        }
                    }
                }
            }
            let mut launches = vec![self.launch_of(node.task)];
            while let Some(launch) = launches.pop() {
                for &before in &self.schedule.launches[launch as usize].after {
                    if !ended.insert((before as u32, node.rank)) {
                        continue;
                    }
                    if hit(Hop::Ended { launch: before as u32, rank: node.rank }) {
                        return true;
                    }
                    launches.push(before as u32);
                    let list = self.class_of(node.rank) as usize * self.schedule.launches.len() + before;
                    for &task in self.waiting[list].iter().rev() {
                        let from = Node { task, rank: node.rank };
                        if self.position[task as usize] > floor && seen.insert(from) {
                            queue.push_back((from, Upto::All));
                        }
                    }
                }
            }
            if self.compact.tasks[node.task as usize].kind == TaskKind::Collective && upto == Upto::All {
                for other in self.peers_of_collective(node) {
                    if seen.insert(other) {
                        queue.push_back((other, Upto::All));
                    }
                }
            }
        }
        false
    }

    /// The same collective on the other ranks.
    pub(super) fn peers_of_collective(&self, node: Node) -> impl Iterator<Item = Node> + '_ {
        let role = self.compact.role_of(node.task);
        let roles = self.compact.roles.len() / self.compact.classes.len();
        let index = node.task - self.compact.roles[role].first;
        (0..self.compact.class_of.len() as u32).filter(move |&rank| rank != node.rank).filter_map(move |rank| {
            let there = &self.compact.roles[self.class_of(rank) as usize * roles + role % roles];
            (index < there.tasks).then_some(Node { task: there.first + index, rank })
        })
    }

    /// Decides which levels below the sum of all adds order what.
    fn settle_partial_levels(&mut self) {
        let mut levels: MixMap<u32, Vec<u32>> = MixMap::default();
        for wait in &self.compact.waits {
            for i in 0..wait.count {
                let flag = wait.flag + i * wait.stride;
                if wait.at_least < self.totals[flag as usize] {
                    let list = levels.entry(flag).or_default();
                    if list.last() != Some(&wait.at_least) {
                        list.push(wait.at_least);
                    }
                }
            }
        }
        let mut levels: Vec<(u32, Vec<u32>)> = levels.into_iter().collect();
        levels.sort_unstable();
        for (flag, list) in &mut levels {
            list.sort_unstable();
            list.dedup();
            for &level in &*list {
                let reached = self.signals_to(*flag).iter().map(|&signal| {
                    self.before[signal as usize].saturating_add(self.compact.signals[signal as usize].add)
                });
                let excess = reached.skip_while(|&sum| sum < level).map(|sum| sum - level).next().unwrap_or(0);
                self.partial.insert((*flag, level), Partial { ahead: Ahead::Group, excess });
            }
        }
        loop {
            let mut weaker = Vec::new();
            for (flag, list) in &levels {
                self.weaken(*flag, list, &mut weaker);
            }
            if weaker.is_empty() {
                return;
            }
            for (key, ahead) in weaker {
                if let Some(partial) = self.partial.get_mut(&key) {
                    partial.ahead = ahead;
                }
            }
        }
    }

    /// Levels of a flag whose argument does not stand.
    fn weaken(&self, flag: u32, levels: &[u32], weaker: &mut Vec<((u32, u32), Ahead)>) {
        let state = |level: u32| self.partial[&(flag, level)].ahead;
        let raisers = self.signals_to(flag);
        let rank =
            self.schedule.cluster.number(self.compact.classes[(flag / self.compact.flags_per_class) as usize]) as u32;
        let needs = levels.iter().filter(|&&level| state(level) == Ahead::Group).count();
        let mut chain = None;
        if needs > 0 {
            // The raisers outside the group of a level all lie behind it; from the last one to the first.
            let mut sound = levels.len();
            let mut at = raisers.len();
            let mut broken = false;
            while sound > 0 {
                let level = levels[sound - 1];
                while at > 0 && self.before[raisers[at - 1] as usize] >= level && !broken {
                    at -= 1;
                    broken = !self.after_waiter(raisers[at], flag, rank, level);
                }
                if broken {
                    break;
                }
                sound -= 1;
            }
            for &level in &levels[..sound] {
                if state(level) == Ahead::Group {
                    let chained = *chain.get_or_insert_with(|| self.is_chain(raisers, rank));
                    weaker.push(((flag, level), if chained { Ahead::Chain } else { Ahead::Pool }));
                }
            }
        }
        for &level in levels.iter().filter(|&&level| state(level) == Ahead::Chain) {
            if !*chain.get_or_insert_with(|| self.is_chain(raisers, rank)) {
                weaker.push(((flag, level), Ahead::Pool));
            }
        }
    }

    /// Whether a raiser comes after a task that waits for at least this level of the flag.
    fn after_waiter(&self, signal: u32, flag: u32, rank: u32, level: u32) -> bool {
        let raiser = Node {
            task: self.task_of[signal as usize],
            rank: self.source(rank, self.compact.signals[signal as usize].to),
        };
        let waits = |node: Node| {
            node.rank == rank
                && self.compact.waits_of(node.task).any(|wait| {
                    let wait = &self.compact.waits[wait];
                    wait.at_least >= level && hits(wait, flag)
                })
        };
        waits(raiser)
            || self.search(raiser, Upto::All, 0, ARGUMENT_TASKS, |hop| match hop {
                Hop::Raised { node, .. } => waits(node),
                Hop::Ended { .. } => false,
            })
    }

    /// Whether each raiser comes, by a single flag, after the one before it.
    fn is_chain(&self, raisers: &[u32], rank: u32) -> bool {
        let node = |signal: u32| Node {
            task: self.task_of[signal as usize],
            rank: self.source(rank, self.compact.signals[signal as usize].to),
        };
        raisers.windows(2).all(|pair| {
            let (before, after) = (node(pair[0]), node(pair[1]));
            self.directly(before, after, Upto::All).next().is_some()
        })
    }

    /// Signals of `before` for which `after` waits, and what that means.
    pub(super) fn directly(&self, before: Node, after: Node, upto: Upto) -> impl Iterator<Item = (u32, Ahead)> + '_ {
        self.compact.signals_range(before.task).filter_map(move |index| {
            let signal = self.compact.signals[index];
            if self.target(before.rank, signal.to) != after.rank {
                return None;
            }
            self.compact.waits_of(after.task).find_map(|wait| {
                let wait = self.compact.waits[wait];
                let gated = CompactWait { count: self.gating(after.task, &wait, upto), ..wait };
                (gated.count > 0 && hits(&gated, signal.flag))
                    .then(|| self.ahead(index as u32, wait.at_least))
                    .flatten()
                    .map(|ahead| (index as u32, ahead))
            })
        })
    }

    /// Whether `before` is done with an access, by edges that `covers` accepts, when `after` has passed its waits.
    pub(super) fn is_before(
        &self,
        before: Node,
        after: Node,
        upto: Upto,
        covers: impl Fn(u32, Ahead) -> bool,
        ends: bool,
    ) -> bool {
        if self.directly(before, after, upto).any(|(signal, ahead)| covers(signal, ahead)) {
            return true;
        }
        let floor = self.position[before.task as usize];
        let launch = self.launch_of(before.task);
        let collective = self.compact.tasks[before.task as usize].kind == TaskKind::Collective;
        let lonely = ends
            && !collective
            && self.compact.signals_range(before.task).is_empty()
            && self.compact.waits_of(after.task).is_empty()
            && self.compact.tasks[after.task as usize].kind != TaskKind::Collective;
        let key = [launch, before.rank, self.launch_of(after.task), after.rank];
        if lonely && let Some(&known) = self.launches.borrow().get(&key) {
            return known;
        }
        let peers: MixSet<Node> =
            if collective { self.peers_of_collective(before).collect() } else { MixSet::default() };
        let found = self.search(after, upto, floor, SEARCH_TASKS, |hop| match hop {
            // Looks one task further at once: long chains of counters are wide.
            Hop::Raised { node, signal, ahead } => {
                (node == before && covers(signal, ahead))
                    || peers.contains(&node)
                    || (self.position[node.task as usize] > floor
                        && self.directly(before, node, Upto::All).any(|(signal, ahead)| covers(signal, ahead)))
            }
            Hop::Ended { launch: l, rank } => ends && l == launch && (rank == before.rank || collective),
        });
        if lonely {
            self.launches.borrow_mut().insert(key, found);
        }
        found
    }

    /// Who raises what a signal raises.
    pub(super) fn raiser_of(&self, signal: u32) -> Raiser {
        self.compact.signals[signal as usize].raiser
    }
}

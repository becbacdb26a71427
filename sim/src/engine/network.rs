//! The flows of all ranks and the resources that they cross.
//!
//! Ranks of one skeleton mostly do the same at the same picosecond. As long as all of them start the same flows at the
//! same times, which is checked flow by flow, bandwidth is shared out once, among the flows of one rank that stand for
//! those of all: every rank's classes cross the resources of the same offsets, so that each resource carries for one rank
//! what it carries for another. With the first flow that differs each rank's flows go on by themselves, from where they are.

use crate::compile::{Compiled, Demand, Flow, NONE, ResourceKind};
use crate::share::{Flows, NEVER, Sharing};
use tilewire_kernels::{Offset, Rank};

/// Flows that a rank starts.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Start {
    flow: Flow,
    tag: u32,
    set: u64,
}

/// The flows of all ranks.
#[derive(Default)]
pub(super) struct Network {
    /// Every rank's flows, once ranks differ.
    each: Sharing,
    /// The flows of one rank, which stand for those of all until then.
    one: Sharing,
    in_step: bool,
    /// Ranks have begun to differ since the last solution.
    parted: bool,
    /// What ranks start at this time, in step: what the first of them to do so did.
    starts: Vec<Start>,
    /// How much of it each rank has started.
    started: Vec<u32>,
    /// When flows have ended last, in step, and which.
    ended_at: u64,
    ended: Vec<Flows>,
    /// When each rank has seen to its ended flows last, in step.
    seen_at: Vec<u64>,
    /// When the first flow of every rank ends, in step.
    next_end: u64,
}

impl Network {
    /// No flows.
    pub fn reset(&mut self, c: &Compiled) {
        let ranks = c.ranks.len();
        self.in_step = c.ranks_alike && ranks > 1;
        self.parted = false;
        self.starts.clear();
        self.started.clear();
        self.started.resize(ranks, 0);
        self.ended_at = NEVER;
        self.seen_at.clear();
        self.seen_at.resize(ranks, NEVER);
        self.next_end = NEVER;
        if self.in_step {
            fresh(&mut self.one, || one_for_all(c));
        } else {
            fresh(&mut self.each, || all_ranks(c));
        }
    }

    /// Starts flows of a rank, see [`Sharing::start`]. They take time: in step, flows end once at a time.
    #[expect(clippy::inline_always, reason = "twice per task; a call costs as much as the work")]
    #[inline(always)]
    pub fn start(&mut self, c: &Compiled, rank: usize, now: u64, flow: Flow, tag: u32, set: u64) {
        debug_assert!(flow.work > 0, "a flow without work");
        if self.in_step {
            let start = Start { flow, tag, set };
            let started = &mut self.started[rank];
            if *started as usize == self.starts.len() {
                self.starts.push(start);
            }
            if self.starts[*started as usize] == start {
                *started += 1;
                return;
            }
            self.part(c, now);
        }
        self.each.start(first_class(c, rank) + flow.class, now, flow.work, tag, set);
    }

    /// Appends the flows of a rank that have ended by `now`, see [`Sharing::finish`].
    pub fn finish(&mut self, rank: usize, now: u64, ended: &mut Vec<Flows>) {
        if self.in_step && self.ended_at != now {
            self.ended_at = now;
            self.ended.clear();
            self.one.finish(0, now, &mut self.ended);
        }
        if self.ended_at != now {
            self.each.finish(rank as u32, now, ended);
        } else if self.seen_at[rank] != now {
            // Also of a rank that does so after others have parted.
            self.seen_at[rank] = now;
            ended.extend_from_slice(&self.ended);
        }
    }

    /// Gives every flow its rate for the time after `now`; calls `changed(rank)` for each rank whose next end moved.
    pub fn solve(&mut self, c: &Compiled, now: u64, mut changed: impl FnMut(usize)) {
        let ranks = self.started.len();
        if self.in_step && !self.starts.is_empty() {
            if self.started.iter().any(|&started| started as usize != self.starts.len()) {
                self.part(c, now);
            } else {
                for Start { flow, tag, set } in self.starts.drain(..) {
                    self.one.start(flow.class, now, flow.work, tag, set);
                }
                self.started.fill(0);
            }
        }
        if self.in_step {
            let mut moved = false;
            self.one.solve(now, |_| moved = true);
            if moved {
                self.next_end = self.one.next_end(0);
                (0..ranks).for_each(changed);
            }
            return;
        }
        if std::mem::take(&mut self.parted) {
            (0..ranks).for_each(&mut changed);
        }
        self.each.solve(now, |rank| changed(rank as usize));
    }

    /// When the first flow of a rank ends, see [`Sharing::next_end`].
    pub fn next_end(&self, rank: usize) -> u64 {
        if self.in_step { self.next_end } else { self.each.next_end(rank as u32) }
    }

    /// Bytes/s that a resource of the first rank carries now.
    pub fn carried(&self, resource: u32) -> u64 {
        if self.in_step { self.one.carried(resource) } else { self.each.carried(resource) }
    }

    /// From now on ranks differ: each gets the flows that one had for all, and those that it has started since.
    #[cold]
    #[inline(never)]
    fn part(&mut self, c: &Compiled, now: u64) {
        self.in_step = false;
        self.parted = true;
        fresh(&mut self.each, || all_ranks(c));
        for (rank, &started) in self.started.iter().enumerate() {
            let first = first_class(c, rank);
            for (flows, left) in self.one.live(now) {
                self.each.resume(first + flows.class, now, left, flows.tag, flows.set);
            }
            for start in &self.starts[..started as usize] {
                self.each.start(first + start.flow.class, now, start.flow.work, start.tag, start.set);
            }
        }
    }
}

/// Where a rank's classes begin among those of all.
fn first_class(c: &Compiled, rank: usize) -> u32 {
    (rank * c.classes.len()) as u32
}

/// Without flows, and made when it is first needed.
fn fresh(sharing: &mut Sharing, make: impl FnOnce() -> Sharing) {
    if sharing.is_empty() {
        *sharing = make();
    } else {
        sharing.reset();
    }
}

/// Resources of all ranks, and the classes of flows that cross them.
fn all_ranks(c: &Compiled) -> Sharing {
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

/// The resources of one rank, and the classes of flows that cross them when all ranks do the same: what one takes from
/// another's, a third takes from its own.
fn one_for_all(c: &Compiled) -> Sharing {
    let mut sharing = Sharing::new(c.capacities.iter().copied());
    for (class, mixed) in c.classes.iter().zip(main_only(c)) {
        let mut folded: Vec<(u32, u64)> = Vec::with_capacity(class.len());
        for &(_, kind, demand) in class.iter().filter(|&&(_, _, demand)| demand > 0) {
            let resource = kind.index(c.times.rails);
            match folded.iter_mut().find(|known| known.0 == resource) {
                Some(known) => known.1 += demand,
                None => folded.push((resource, demand)),
            }
        }
        sharing.add_class(0, mixed, folded);
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

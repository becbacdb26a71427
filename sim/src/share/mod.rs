//! Shared bandwidth: exact, lazy, weighted max-min fair sharing of resources among classes of flows.
//!
//! A **flow** is a piece of a task that would take `work` picoseconds alone. A **class** is a set of flows with the same
//! demand on the same resources. Classes of an owner that cross the same resources, whatever they take of them, may form
//! a **group**: its members progress alike, so a group keeps one clock `v` (work done per member) and a list of members by
//! the value of `v` at which they end. A change of rate costs O(1) per group, not per flow.
//!
//! **Model.** Every flow progresses at `theta <= 1` of its own full speed. A resource with more demand than capacity
//! holds back all flows that cross it, in proportion (a saturated memory or link answers everybody later, and a CTA's
//! rate is its bytes in flight over that latency). Levels are max-min: raise the common `theta` until a resource is
//! full, freeze the flows that cross it, go on with the rest. For flows with equal caps this is plain max-min fairness.
//!
//! **Exactness.** Time is integer picoseconds, rates integer bytes/s, `theta` a fixed-point number with 32 fractional
//! bits, rounded down; `v` has the same 32 bits and is never rounded. A flow therefore ends at a time that does not
//! depend on how often rates were looked at, and no resource ever carries more than its capacity.
//!
//! **Laziness.** Flows come and go during a round of events; only the change that is left at its end counts, once per
//! class. Resources whose demand fits their capacity never bind, and flows that cross none that binds run at full speed.
//! Of the others, only those whose rates a change can reach are solved again.

mod group;
mod small;
mod solve;

use group::Group;
use solve::{Link, Piece, Remainder};

/// `theta` of a flow that nobody holds back.
pub const FULL_SPEED: u64 = 1 << 32;

/// "Never".
pub const NEVER: u64 = u64::MAX;

/// Flows of a class that ended together: those of the bits that are set, by the numbers that their starter gave them.
#[derive(Clone, Copy, Debug)]
pub struct Flows {
    /// Their class.
    pub class: u32,
    /// What the starter attached.
    pub tag: u32,
    /// A bit for each flow.
    pub set: u64,
}

impl Flows {
    /// Takes more flows if that leaves them in the order in which they came.
    #[inline]
    fn take(&mut self, class: u32, tag: u32, set: u64) -> bool {
        let first = set & set.wrapping_neg();
        let takes = self.class == class && self.tag == tag && first > self.set;
        if takes {
            self.set |= set;
        }
        takes
    }
}

/// What differs between the flows of a group, and how many there are.
#[derive(Clone, Copy)]
struct Class {
    group: u32,
    /// First of its demands in `Sharing::rates`, in the order of the group's resources.
    rates: u32,
    members: u32,
    /// Members that the demand of the resources counts: those at the last solution.
    counted: u32,
    touched: bool,
    /// When a flow has come last, with which work and tag; [`NEVER`] if it may not be the last of its group.
    recent: (u64, u64, u32),
}

impl Class {
    /// Notes that flows come or go.
    #[inline]
    fn touch(&mut self, id: u32, touched: &mut Vec<u32>) {
        if !self.touched {
            self.touched = true;
            touched.push(id);
        }
    }
}

/// What a solution needs to know of a group.
#[derive(Clone, Copy)]
struct Crossing {
    /// First of its resources in `Sharing::crossed`, and of what it takes from them in `Sharing::demands`.
    resources: u32,
    len: u32,
    /// Which of its resources are marked hot, a bit each; the last bit stands for all from there on.
    hot: u64,
    /// What the caller wants to be told when the next end moves.
    owner: u32,
    /// Other classes may join.
    mixed: bool,
}

/// The little that every solution asks of every group around it.
#[derive(Clone, Copy, Default)]
struct Presence {
    visited: u32,
    /// Its place among those that are solved again.
    piece: u32,
    /// Had no members at the last solution, and its speed is not found yet.
    fresh: bool,
}

#[derive(Clone, Copy)]
struct Resource {
    capacity: u64,
    /// Demand that is always there; it slows down with the flows.
    base: u64,
    /// Base and the demands of all counted flows at full speed.
    demand: u64,
    /// The speed of the flows that it holds back, [`NEVER`] when it holds back none.
    level: u64,
    /// What its flows take, 32 fractional bits; known while it is hot and has no level.
    load: u128,
    /// What they take more while a solution is looked for.
    more: i128,
    visited: u32,
    /// Its place among the resources that are solved again.
    place: u32,
    /// Demand above capacity, now or at the last solution.
    hot: bool,
    dirty: bool,
    /// Has to be solved again.
    pending: bool,
}

impl Resource {
    const fn new(capacity: u64, base: u64) -> Self {
        Self {
            capacity,
            base,
            demand: base,
            level: NEVER,
            load: 0,
            more: 0,
            visited: 0,
            place: 0,
            hot: false,
            dirty: false,
            pending: false,
        }
    }
}

/// The last bit of [`Crossing::hot`].
const REST: usize = u64::BITS as usize - 1;

/// The state of all flows and resources of a simulation.
#[derive(Default)]
pub struct Sharing {
    classes: Vec<Class>,
    groups: Vec<Group>,
    /// First group of each owner; one more at the end.
    first_group: Vec<u32>,
    /// When the first member of each group ends; [`NEVER`] when empty.
    due: Vec<u64>,
    crossings: Vec<Crossing>,
    presences: Vec<Presence>,
    /// Groups with counted members, a bit each.
    present: Vec<u64>,
    /// Resources crossed, group by group.
    crossed: Vec<u32>,
    /// What the counted members of a group take of each of them at full speed, bytes/s.
    demands: Vec<u64>,
    /// Demands of a member in bytes/s at full speed; classes of equal demands share a range.
    rates: Vec<u64>,
    resources: Vec<Resource>,
    /// Groups that can cross each resource, resource by resource; made when all classes are known.
    crossing: Vec<u32>,
    /// Where the resource stands among those of each of them.
    positions: Vec<u32>,
    /// Where each resource's groups begin; one more at the end.
    crossing_of: Vec<u32>,
    /// The same groups as words of `present` and bits in them, resource by resource: most groups have no members at a time,
    /// and are passed over 64 at once.
    words: Vec<(u32, u64)>,
    /// Where each resource's words begin; one more at the end.
    words_of: Vec<u32>,
    dirty: Vec<u32>,
    /// Classes of which flows came or went since the last solution.
    touched: Vec<u32>,
    /// Groups whose membership or speed changed since the last solution.
    touched_groups: Vec<u32>,
    /// Groups that have come since the last solution.
    fresh: Vec<u32>,
    visit: u32,
    /// Resources that are solved together, and the groups that cross them.
    alike: Vec<u32>,
    found: Vec<u32>,
    component: Vec<Remainder>,
    pieces: Vec<Piece>,
    links: Vec<Link>,
    /// What else holds pieces back, the lowest first: cap and place.
    caps: Vec<(u64, u32)>,
    /// Resources that are not solved again but carry more or less.
    loaded: Vec<u32>,
}

/// Names the groups of a range that have members: few of those of an owner at a time.
#[inline]
fn each_present(present: &[u64], groups: std::ops::Range<usize>, mut with: impl FnMut(usize)) {
    let mut first = groups.start;
    while first < groups.end {
        let word = first / 64;
        let mut bits = present[word] & u64::MAX << (first % 64);
        first = (word + 1) * 64;
        if first > groups.end {
            bits &= u64::MAX >> (first - groups.end);
        }
        while bits != 0 {
            with(word * 64 + bits.trailing_zeros() as usize);
            bits &= bits - 1;
        }
    }
}

impl Sharing {
    /// No classes; capacities and base demands in bytes/s. A base demand is always there and slows down with the flows;
    /// alone it must fit its capacity.
    pub fn new(capacities: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let resources = capacities.into_iter().map(|(capacity, base)| Resource::new(capacity, base));
        Self { resources: resources.collect(), ..Self::default() }
    }

    /// Adds a class whose flows, at full speed, take these bytes/s from these resources (each named once). `owner` is
    /// what [`Sharing::solve`] names when the next end of its classes may have moved; owners are numbers from 0 and come
    /// one after the other. `mixed`: where its flows stand among those that end together with them does not matter.
    pub fn add_class(&mut self, owner: u32, mixed: bool, demands: impl IntoIterator<Item = (u32, u64)>) -> u32 {
        let id = self.classes.len() as u32;
        let (resources, rates) = (self.crossed.len(), self.rates.len());
        for (resource, rate) in demands.into_iter().filter(|&(_, rate)| rate > 0) {
            self.crossed.push(resource);
            self.rates.push(rate);
        }
        let len = self.rates.len() - rates;
        // Ranks repeat the same few patterns of demands, and short tables stay in cache.
        let known = self.rates[..rates].windows(len.max(1)).position(|w| w == &self.rates[rates..]);
        if known.is_some() {
            self.rates.truncate(rates);
        }
        let group = self.group_of(owner, mixed, resources);
        let rates = known.unwrap_or(rates) as u32;
        self.classes.push(Class { group, rates, members: 0, counted: 0, touched: false, recent: (NEVER, 0, 0) });
        self.crossing_of.clear();
        id
    }

    /// The owner's mixed group that crosses the last resources of `crossed`, from `first` on; a new group if there is none,
    /// and for a class that is not mixed.
    fn group_of(&mut self, owner: u32, mixed: bool, first: usize) -> u32 {
        let (before, crossed) = self.crossed.split_at(first);
        let alike = |c: &Crossing| c.mixed && &before[c.resources as usize..(c.resources + c.len) as usize] == crossed;
        let own = self.crossings.iter().rev().take_while(|c| mixed && c.owner == owner);
        if let Some(back) = own.map(alike).position(|alike| alike) {
            self.crossed.truncate(first);
            return (self.crossings.len() - 1 - back) as u32;
        }
        let len = crossed.len() as u32;
        self.demands.resize(self.crossed.len(), 0);
        self.crossings.push(Crossing { resources: first as u32, len, hot: 0, owner, mixed });
        self.presences.push(Presence::default());
        self.groups.push(Group::NEW);
        self.first_group.resize(owner as usize + 1, self.groups.len() as u32 - 1);
        self.first_group.push(self.groups.len() as u32);
        self.due.push(NEVER);
        self.present.resize(self.groups.len().div_ceil(64), 0);
        self.groups.len() as u32 - 1
    }

    /// Removes all flows; classes and resources stay.
    pub fn reset(&mut self) {
        for resource in &mut self.resources {
            *resource = Resource::new(resource.capacity, resource.base);
        }
        for class in &mut self.classes {
            (class.members, class.counted, class.touched, class.recent.0) = (0, 0, false, NEVER);
        }
        self.groups.iter_mut().for_each(Group::reset);
        self.demands.fill(0);
        for crossing in &mut self.crossings {
            crossing.hot = 0;
        }
        self.presences.fill(Presence::default());
        self.present.fill(0);
        self.due.fill(NEVER);
        self.dirty.clear();
        self.touched.clear();
        self.touched_groups.clear();
        self.fresh.clear();
        self.visit = 0;
    }

    /// Whether there is no class.
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// When the first flow of an owner's classes ends, at the rates of the last solution; [`NEVER`] without flows. Moves only
    /// when [`Sharing::solve`] says so.
    pub fn next_end(&self, owner: u32) -> u64 {
        let mut next = NEVER;
        each_present(&self.present, self.groups_of(owner), |group| next = next.min(self.due[group]));
        next
    }

    fn groups_of(&self, owner: u32) -> std::ops::Range<usize> {
        let owner = owner as usize;
        self.first_group.get(owner..owner + 2).map_or(0..0, |range| range[0] as usize..range[1] as usize)
    }

    /// Flows in a class.
    pub fn active(&self, class: u32) -> usize {
        self.classes[class as usize].members as usize
    }

    /// Present speed of a class, 32 fractional bits.
    pub fn theta(&self, class: u32) -> u64 {
        self.groups[self.classes[class as usize].group as usize].theta
    }

    /// Bytes/s that a resource carries now.
    pub fn carried(&self, resource: u32) -> u64 {
        let mut sum = 0_u128;
        for class in &self.classes {
            let crossing = &self.crossings[class.group as usize];
            let crossed = &self.crossed[crossing.resources as usize..(crossing.resources + crossing.len) as usize];
            if let Some(position) = crossed.iter().position(|&r| r == resource) {
                let demand = u128::from(class.members) * u128::from(self.rates[class.rates as usize + position]);
                sum += demand * u128::from(self.groups[class.group as usize].theta);
            }
        }
        (sum >> 32) as u64
    }

    /// Lists the groups that cross each resource.
    fn find_crossing(&mut self) {
        let mut next = vec![0_u32; self.resources.len() + 1];
        for &resource in &self.crossed {
            next[resource as usize + 1] += 1;
        }
        for r in 1..next.len() {
            next[r] += next[r - 1];
        }
        self.crossing_of.clone_from(&next);
        self.crossing = vec![0; self.crossed.len()];
        self.positions = vec![0; self.crossed.len()];
        for (id, c) in self.crossings.iter().enumerate() {
            let crossed = &self.crossed[c.resources as usize..(c.resources + c.len) as usize];
            for (position, &resource) in crossed.iter().enumerate() {
                let at = &mut next[resource as usize];
                self.crossing[*at as usize] = id as u32;
                self.positions[*at as usize] = position as u32;
                *at += 1;
            }
        }
        self.words.clear();
        self.words_of = vec![0];
        for resource in 0..self.resources.len() as u32 {
            let first = self.words.len();
            // Groups are listed in the order of their numbers.
            for &group in &self.crossing[self.crossing_range(resource)] {
                let (word, bit) = (group / 64, 1 << (group % 64));
                match self.words[first..].last_mut() {
                    Some(last) if last.0 == word => last.1 |= bit,
                    _ => self.words.push((word, bit)),
                }
            }
            self.words_of.push(self.words.len() as u32);
        }
    }

    /// Starts flows of `work` picoseconds (at full speed) at time `now`, one for each bit of `set`, the lowest first; `tag`
    /// and their bits are handed out at their end. No two flows that run have the same. Rates follow at the next
    /// [`Sharing::solve`].
    #[expect(clippy::inline_always, reason = "twice per task from two places; a call costs as much as the work")]
    #[inline(always)]
    pub fn start(&mut self, class: u32, now: u64, work: u64, tag: u32, set: u64) {
        let c = &mut self.classes[class as usize];
        c.members += set.count_ones();
        c.touch(class, &mut self.touched);
        let group = &mut self.groups[c.group as usize];
        let recent = (now, work, tag);
        // Waves of equal flows are most of all.
        if c.recent == recent && group.join(class, tag, set) {
            return;
        }
        c.recent = recent;
        if !group.start(now, u128::from(work) << 32, Flows { class, tag, set }) {
            c.recent.0 = NEVER;
        }
    }

    /// As [`Sharing::start`], for flows that have `left` to do: picoseconds at full speed, 32 fractional bits.
    pub fn resume(&mut self, class: u32, now: u64, left: u128, tag: u32, set: u64) {
        let c = &mut self.classes[class as usize];
        c.members += set.count_ones();
        c.recent.0 = NEVER;
        c.touch(class, &mut self.touched);
        self.groups[c.group as usize].start(now, left, Flows { class, tag, set });
    }

    /// The flows that run, and what each of them has left at `now`, as [`Sharing::resume`] takes it: those of a class that
    /// end first come first, of those that end together those that came first.
    pub fn live(&self, now: u64) -> impl Iterator<Item = (Flows, u128)> {
        self.groups.iter().flat_map(move |group| group.live(now))
    }

    /// Removes the flows of an owner's classes that have ended by `now`, and appends them: class by class, those that are
    /// `mixed` in the place of the first they are mixed with, in the order of their ends.
    pub fn finish(&mut self, owner: u32, now: u64, ended: &mut Vec<Flows>) {
        let first = ended.len();
        let groups = self.groups_of(owner);
        each_present(&self.present, groups, |group| {
            if self.due[group] <= now {
                self.groups[group].finish(now, ended);
            }
        });
        for flows in &ended[first..] {
            let class = &mut self.classes[flows.class as usize];
            class.members -= flows.set.count_ones();
            class.touch(flows.class, &mut self.touched);
        }
    }

    /// Gives every flow its rate for the time after `now`; calls `changed(owner)` for each class whose next end moved.
    pub fn solve(&mut self, now: u64, mut changed: impl FnMut(u32)) {
        if self.crossing_of.is_empty() {
            self.find_crossing();
        }
        self.count_members();
        for i in 0..self.dirty.len() {
            let r = self.dirty[i];
            let resource = &mut self.resources[r as usize];
            if resource.hot {
                resource.pending = resource.level != NEVER || resource.may_fill(0);
            } else if resource.demand > resource.capacity {
                self.mark(r, true);
            }
        }
        for i in 0..self.dirty.len() {
            let r = self.dirty[i];
            // One solution covers all that hangs together.
            if self.resources[r as usize].pending {
                self.solve_resource(r, now);
            }
        }
        while let Some(group) = self.fresh.pop() {
            if std::mem::take(&mut self.presences[group as usize].fresh) && self.crossings[group as usize].hot != 0 {
                self.presences[group as usize].fresh = true;
                self.solve_group(group, now);
            }
        }
        for i in 0..self.dirty.len() {
            let r = self.dirty[i];
            let resource = &mut self.resources[r as usize];
            resource.dirty = false;
            if resource.hot && resource.demand <= resource.capacity {
                self.mark(r, false);
            }
        }
        self.dirty.clear();
        for &group in &self.touched_groups {
            let g = &mut self.groups[group as usize];
            g.touched = false;
            let due = g.next_end(now);
            if self.due[group as usize] != due {
                self.due[group as usize] = due;
                changed(self.crossings[group as usize].owner);
            }
        }
        self.touched_groups.clear();
    }

    /// Brings the demand of groups and resources up to date with the members of the touched classes.
    fn count_members(&mut self) {
        let (classes, groups, resources) = (&mut *self.classes, &mut *self.groups, &mut *self.resources);
        let (crossings, crossed, rates) = (&*self.crossings, &*self.crossed, &*self.rates);
        for &class in &self.touched {
            let c = &mut classes[class as usize];
            c.touched = false;
            let group = &mut groups[c.group as usize];
            if !group.touched {
                group.touched = true;
                self.touched_groups.push(c.group);
            }
            if c.members == c.counted {
                continue;
            }
            let change = i64::from(c.members) - i64::from(c.counted);
            c.counted = c.members;
            let (word, bit) = (c.group as usize / 64, 1 << (c.group % 64));
            // A group that comes takes nothing before it has a speed.
            let theta = if self.present[word] & bit == 0 { 0 } else { i128::from(group.theta) };
            let crossing = &crossings[c.group as usize];
            let range = crossing.resources as usize..(crossing.resources + crossing.len) as usize;
            let rates = &rates[c.rates as usize..(c.rates + crossing.len) as usize];
            for ((&r, &rate), demand) in crossed[range.clone()].iter().zip(rates).zip(&mut self.demands[range]) {
                let resource = &mut resources[r as usize];
                let more = rate as i64 * change;
                *demand = demand.wrapping_add_signed(more);
                resource.demand = resource.demand.wrapping_add_signed(more);
                if !resource.hot && resource.demand <= resource.capacity {
                    // Binds neither before nor after: it holds nobody back.
                    continue;
                }
                if resource.level == NEVER {
                    resource.load = resource.load.wrapping_add_signed(i128::from(more) * theta);
                }
                if !resource.dirty {
                    resource.dirty = true;
                    self.dirty.push(r);
                }
            }
        }
        self.touched.clear();
        for &group in &self.touched_groups {
            let g = &mut self.groups[group as usize];
            g.idle = g.is_empty();
            let (word, bit) = (group as usize / 64, 1 << (group % 64));
            if g.idle {
                self.present[word] &= !bit;
            } else if self.present[word] & bit == 0 {
                self.present[word] |= bit;
                self.presences[group as usize].fresh = true;
                self.fresh.push(group);
            }
        }
    }
}

//! Shared bandwidth: exact, lazy, weighted max-min fair sharing of resources among classes of flows.
//!
//! A **flow** is a piece of a task that would take `work` picoseconds alone. A **class** is a set of flows with the same
//! demand on the same resources; its members progress alike, so a class keeps one clock `v` (work done per member) and
//! a list of members by the value of `v` at which they end. A change of rate costs O(1) per class, not per flow.
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

mod class;
mod solve;

use class::{Class, Member};
use solve::{Link, Piece, Remainder};

/// `theta` of a flow that nobody holds back.
pub const FULL_SPEED: u64 = 1 << 32;

/// "Never".
pub const NEVER: u64 = u64::MAX;

/// What a solution needs to know of a class.
#[derive(Clone, Copy)]
struct Crossing {
    /// First of its resources in `Sharing::crossed`.
    resources: u32,
    /// First of its demands in `Sharing::rates`.
    rates: u32,
    len: u32,
    /// Which of its resources are marked hot, a bit each; the last bit stands for all from there on.
    hot: u64,
    /// What the caller wants to be told when the next end moves.
    owner: u32,
}

/// The little that every solution asks of every class around it.
#[derive(Clone, Copy, Default)]
struct Presence {
    /// Members that the demand of the resources counts: those at the last solution.
    counted: u32,
    visited: u32,
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
    /// When the first member of each class ends; [`NEVER`] when empty.
    due: Vec<u64>,
    crossings: Vec<Crossing>,
    presences: Vec<Presence>,
    /// Classes with counted members, a bit each.
    present: Vec<u64>,
    /// Resources crossed, class by class.
    crossed: Vec<u32>,
    /// Demands in bytes/s at full speed; classes of equal demands share a range.
    rates: Vec<u64>,
    resources: Vec<Resource>,
    /// Classes that can cross each resource, resource by resource; made when all classes are known.
    crossing: Vec<u32>,
    /// Where the resource stands among those of each of them.
    positions: Vec<u32>,
    /// Where each resource's classes begin; one more at the end.
    crossing_of: Vec<u32>,
    /// The same classes as words of `present` and bits in them, resource by resource: most classes have no members at a
    /// time, and are passed over 64 at once.
    words: Vec<(u32, u64)>,
    /// Where each resource's words begin; one more at the end.
    words_of: Vec<u32>,
    dirty: Vec<u32>,
    /// Classes whose membership or speed changed since the last solution.
    touched: Vec<u32>,
    /// Classes that have come since the last solution.
    fresh: Vec<u32>,
    visit: u32,
    component: Vec<Remainder>,
    pieces: Vec<Piece>,
    links: Vec<Link>,
    /// Resources that are not solved again but carry more or less.
    loaded: Vec<u32>,
}

impl Sharing {
    /// No classes; capacities and base demands in bytes/s. A base demand is always there and slows down with the flows;
    /// alone it must fit its capacity.
    pub fn new(capacities: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let resources = capacities.into_iter().map(|(capacity, base)| Resource::new(capacity, base));
        Self { resources: resources.collect(), ..Self::default() }
    }

    /// Adds a class whose flows, at full speed, take these bytes/s from these resources (each named once). `owner` is
    /// what [`Sharing::solve`] names when the class's next end moves.
    pub fn add_class(&mut self, owner: u32, demands: impl IntoIterator<Item = (u32, u64)>) -> u32 {
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
        self.crossings.push(Crossing {
            resources: resources as u32,
            rates: known.unwrap_or(rates) as u32,
            len: len as u32,
            hot: 0,
            owner,
        });
        self.presences.push(Presence::default());
        self.present.resize(self.classes.len().div_ceil(64) + 1, 0);
        self.classes.push(Class::NEW);
        self.due.push(NEVER);
        self.crossing_of.clear();
        id
    }

    /// Removes all flows; classes and resources stay.
    pub fn reset(&mut self) {
        for resource in &mut self.resources {
            *resource = Resource::new(resource.capacity, resource.base);
        }
        self.classes.iter_mut().for_each(Class::reset);
        for crossing in &mut self.crossings {
            crossing.hot = 0;
        }
        self.presences.fill(Presence::default());
        self.present.fill(0);
        self.due.fill(NEVER);
        self.dirty.clear();
        self.touched.clear();
        self.fresh.clear();
        self.visit = 0;
    }

    /// When the first flow of each class ends, at present rates.
    pub fn due(&self) -> &[u64] {
        &self.due
    }

    /// Flows in a class.
    pub fn active(&self, class: u32) -> usize {
        self.classes[class as usize].members() as usize
    }

    /// Present speed of a class, 32 fractional bits.
    pub fn theta(&self, class: u32) -> u64 {
        self.classes[class as usize].theta
    }

    /// Bytes/s that a resource carries now.
    pub fn carried(&self, resource: u32) -> u64 {
        let mut sum = 0_u128;
        for (class, crossing) in self.classes.iter().zip(&self.crossings) {
            if let Some((_, rate)) = self.demands(crossing).find(|d| d.0 == resource) {
                sum += u128::from(class.members()) * u128::from(rate) * u128::from(class.theta);
            }
        }
        (sum >> 32) as u64
    }

    fn demands(&self, crossing: &Crossing) -> impl Iterator<Item = (u32, u64)> {
        let (resources, rates) = (crossing.resources as usize, crossing.rates as usize);
        let len = crossing.len as usize;
        self.crossed[resources..resources + len].iter().copied().zip(self.rates[rates..rates + len].iter().copied())
    }

    /// Lists the classes that cross each resource.
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
            // Classes are listed in the order of their numbers.
            for &class in &self.crossing[self.crossing_range(resource)] {
                let (word, bit) = (class / 64, 1 << (class % 64));
                match self.words[first..].last_mut() {
                    Some(last) if last.0 == word => last.1 |= bit,
                    _ => self.words.push((word, bit)),
                }
            }
            self.words_of.push(self.words.len() as u32);
        }
    }

    /// Starts a flow of `work` picoseconds (at full speed) at time `now`; `tag` is handed out at its end. Rates follow at
    /// the next [`Sharing::solve`].
    #[expect(clippy::inline_always, reason = "twice per task from two places; a call costs as much as the work")]
    #[inline(always)]
    pub fn start(&mut self, class: u32, now: u64, work: u64, tag: u32) {
        let c = &mut self.classes[class as usize];
        if c.idle {
            (c.v, c.since, c.theta, c.idle) = (0, now, FULL_SPEED, false);
        }
        let ends = c.clock(now) + (u128::from(work) << 32);
        c.insert(Member::new(ends, tag));
        if !c.touched {
            c.touched = true;
            self.touched.push(class);
        }
    }

    /// Removes the flows of some neighbouring classes that have ended by `now`, and appends their tags, class by class
    /// in the order of their ends.
    pub fn finish(&mut self, classes: std::ops::Range<usize>, now: u64, ended: &mut Vec<u32>) {
        let first = classes.start;
        for (i, _) in self.due[classes].iter().enumerate().filter(|&(_, &due)| due <= now) {
            let class = &mut self.classes[first + i];
            class.finish(now, ended);
            if !class.touched {
                class.touched = true;
                self.touched.push((first + i) as u32);
            }
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
        while let Some(class) = self.fresh.pop() {
            if std::mem::take(&mut self.presences[class as usize].fresh) && self.crossings[class as usize].hot != 0 {
                self.presences[class as usize].fresh = true;
                self.solve_class(class, now);
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
        for &class in &self.touched {
            let c = &mut self.classes[class as usize];
            c.touched = false;
            let due = c.next_end(now);
            if self.due[class as usize] != due {
                self.due[class as usize] = due;
                changed(self.crossings[class as usize].owner);
            }
        }
        self.touched.clear();
    }

    /// Brings the demand of the resources up to date with the members of the touched classes.
    fn count_members(&mut self) {
        for &class in &self.touched {
            let c = &mut self.classes[class as usize];
            let counted = &mut self.presences[class as usize].counted;
            let members = c.members();
            c.idle = members == 0;
            if members == *counted {
                continue;
            }
            let change = i64::from(members) - i64::from(*counted);
            let comes = *counted == 0;
            *counted = members;
            let crossing = &self.crossings[class as usize];
            let mut theta = i128::from(c.theta);
            if comes {
                // It takes nothing before it has a speed.
                theta = 0;
                self.presences[class as usize].fresh = true;
                self.fresh.push(class);
            }
            let (word, bit) = (class as usize / 64, 1 << (class % 64));
            self.present[word] = if members > 0 { self.present[word] | bit } else { self.present[word] & !bit };
            let (first, len) = (crossing.resources as usize, crossing.len as usize);
            let rates = &self.rates[crossing.rates as usize..crossing.rates as usize + len];
            for (&r, &rate) in self.crossed[first..first + len].iter().zip(rates) {
                let resource = &mut self.resources[r as usize];
                let more = rate as i64 * change;
                resource.demand = resource.demand.wrapping_add_signed(more);
                resource.load = resource.load.wrapping_add_signed(i128::from(more) * theta);
                // One that binds neither before nor after holds nobody back.
                if !resource.dirty && (resource.hot || resource.demand > resource.capacity) {
                    resource.dirty = true;
                    self.dirty.push(r);
                }
            }
        }
    }

    fn set_theta(&mut self, class: u32, now: u64, theta: u64) {
        let c = &mut self.classes[class as usize];
        if c.theta != theta {
            c.v = c.clock(now);
            c.since = now;
            c.theta = theta;
            if !c.touched {
                c.touched = true;
                self.touched.push(class);
            }
        }
    }
}

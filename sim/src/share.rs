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
//! Only the connected component of binding resources around a change is solved again.

use std::collections::VecDeque;

/// `theta` of a flow that nobody holds back.
pub const FULL_SPEED: u64 = 1 << 32;

/// "Never".
pub const NEVER: u64 = u64::MAX;

/// A flow that ended: what the caller attached when it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// First word.
    pub a: u32,
    /// Second word.
    pub b: u32,
}

#[derive(Clone, Copy)]
struct Member {
    /// Value of the class clock at which the flow ends.
    ends: u128,
    tag: Tag,
}

struct Class {
    v: u128,
    /// Time at which `v` holds.
    since: u64,
    theta: u64,
    members: VecDeque<Member>,
    /// Range in `Sharing::demands`.
    demands: (u32, u32),
    /// Members that the demand of the resources counts: those at the last solution.
    counted: u32,
    visited: u32,
    frozen: bool,
    touched: bool,
}

impl Class {
    fn clock(&self, now: u64) -> u128 {
        self.v + u128::from(now - self.since) * u128::from(self.theta)
    }
}

#[derive(Clone, Copy)]
struct Resource {
    capacity: u64,
    /// Sum of the demands of all counted flows at full speed.
    demand: u64,
    /// Demand above capacity at the last solution.
    was_hot: bool,
    dirty: bool,
    visited: u32,
    /// While solving: capacity not yet given away (32 fractional bits), demand of flows not yet frozen.
    left: u128,
    open: u64,
}

impl Resource {
    const fn is_hot(&self) -> bool {
        self.was_hot || self.demand > self.capacity
    }

    /// The `theta` at which the flows not yet frozen fill what is left; at least [`FULL_SPEED`] when they cannot.
    fn level(&self) -> u64 {
        let high = (self.left >> 32) as u64;
        if high >= self.open {
            return FULL_SPEED;
        }
        // The quotient is below 2^32: a double is off by less than one, and one exact product tells which way. A
        // library division of 128-bit numbers would cost more than all the rest of a solution.
        let estimate = (high as f64 * 4_294_967_296.0 + self.left as u32 as f64) / self.open as f64;
        let mut level = estimate as u64;
        if u128::from(level) * u128::from(self.open) > self.left {
            level -= 1;
        } else if u128::from(level + 1) * u128::from(self.open) <= self.left {
            level += 1;
        }
        level
    }
}

/// The state of all flows and resources of a simulation.
#[derive(Default)]
pub struct Sharing {
    resources: Vec<Resource>,
    /// Classes that can cross each resource.
    crossing: Vec<Vec<u32>>,
    classes: Vec<Class>,
    /// (resource, bytes/s at full speed), grouped by class.
    demands: Vec<(u32, u64)>,
    /// When the first member of each class ends; [`NEVER`] when empty.
    due: Vec<u64>,
    dirty: Vec<u32>,
    /// Classes whose membership or speed changed since the last solution.
    touched: Vec<u32>,
    visit: u32,
    component_classes: Vec<u32>,
    component_resources: Vec<u32>,
    full: Vec<u32>,
}

impl Sharing {
    /// No classes, these capacities in bytes/s.
    pub fn new(capacities: impl IntoIterator<Item = u64>) -> Self {
        let resources: Vec<Resource> = capacities
            .into_iter()
            .map(|capacity| Resource {
                capacity,
                demand: 0,
                was_hot: false,
                dirty: false,
                visited: 0,
                left: 0,
                open: 0,
            })
            .collect();
        Self { crossing: vec![Vec::new(); resources.len()], resources, ..Self::default() }
    }

    /// Adds a class whose flows, at full speed, take these bytes/s from these resources (each named once).
    pub fn add_class(&mut self, demands: impl IntoIterator<Item = (u32, u64)>) -> u32 {
        let id = self.classes.len() as u32;
        let start = self.demands.len() as u32;
        for (resource, rate) in demands {
            if rate > 0 {
                self.demands.push((resource, rate));
                self.crossing[resource as usize].push(id);
            }
        }
        self.classes.push(Class {
            v: 0,
            since: 0,
            theta: FULL_SPEED,
            members: VecDeque::new(),
            demands: (start, self.demands.len() as u32),
            counted: 0,
            visited: 0,
            frozen: false,
            touched: false,
        });
        self.due.push(NEVER);
        id
    }

    /// Removes all flows; classes and resources stay.
    pub fn reset(&mut self) {
        for resource in &mut self.resources {
            *resource = Resource { demand: 0, was_hot: false, dirty: false, visited: 0, ..*resource };
        }
        for class in &mut self.classes {
            class.members.clear();
            (class.v, class.since, class.theta) = (0, 0, FULL_SPEED);
            (class.counted, class.visited, class.touched) = (0, 0, false);
        }
        self.due.fill(NEVER);
        self.dirty.clear();
        self.touched.clear();
        self.visit = 0;
    }

    /// When the first flow of each class ends, at present rates.
    pub fn due(&self) -> &[u64] {
        &self.due
    }

    /// Flows in a class.
    pub fn active(&self, class: u32) -> usize {
        self.classes[class as usize].members.len()
    }

    /// Present speed of a class, 32 fractional bits.
    pub fn theta(&self, class: u32) -> u64 {
        self.classes[class as usize].theta
    }

    /// Bytes/s that a resource carries now.
    pub fn carried(&self, resource: u32) -> u64 {
        let sum: u128 = self.crossing[resource as usize]
            .iter()
            .map(|&c| {
                let class = &self.classes[c as usize];
                let demands = &self.demands[class.demands.0 as usize..class.demands.1 as usize];
                let rate = demands.iter().find(|d| d.0 == resource).map_or(0, |d| d.1);
                class.members.len() as u128 * u128::from(rate) * u128::from(class.theta)
            })
            .sum();
        (sum >> 32) as u64
    }

    /// Starts a flow of `work` picoseconds (at full speed) at time `now`. Rates follow at the next [`Sharing::solve`].
    #[inline]
    pub fn start(&mut self, class: u32, now: u64, work: u64, tag: Tag) {
        let c = &mut self.classes[class as usize];
        if c.counted == 0 && c.members.is_empty() {
            // Nobody else: whatever the clock showed does not matter.
            (c.v, c.since, c.theta) = (0, now, FULL_SPEED);
        }
        let ends = c.clock(now) + (u128::from(work) << 32);
        let member = Member { ends, tag };
        if c.members.back().is_none_or(|last| last.ends <= ends) {
            c.members.push_back(member);
        } else {
            let at = c.members.partition_point(|m| m.ends <= ends);
            c.members.insert(at, member);
        }
        if !c.touched {
            c.touched = true;
            self.touched.push(class);
        }
    }

    /// Removes the flows of a class that have ended by `now` and hands out their tags, in the order of their ends.
    #[inline]
    pub fn finish(&mut self, class: u32, now: u64, mut ended: impl FnMut(Tag)) {
        let c = &mut self.classes[class as usize];
        let v = c.clock(now);
        while let Some(member) = c.members.front().filter(|m| m.ends <= v) {
            ended(member.tag);
            c.members.pop_front();
        }
        if !c.touched {
            c.touched = true;
            self.touched.push(class);
        }
    }

    /// Gives every flow its rate for the time after `now`; calls `changed(class)` for each class whose `due` may have
    /// moved.
    pub fn solve(&mut self, now: u64, mut changed: impl FnMut(u32)) {
        for &class in &self.touched {
            let c = &mut self.classes[class as usize];
            let members = c.members.len() as u32;
            if members == c.counted {
                continue;
            }
            let change = i64::from(members) - i64::from(c.counted);
            c.counted = members;
            for &(r, rate) in &self.demands[c.demands.0 as usize..c.demands.1 as usize] {
                let resource = &mut self.resources[r as usize];
                resource.demand = resource.demand.wrapping_add_signed(rate as i64 * change);
                if !resource.dirty {
                    resource.dirty = true;
                    self.dirty.push(r);
                }
            }
        }
        let before = self.visit;
        for i in 0..self.dirty.len() {
            let r = self.dirty[i];
            let resource = &mut self.resources[r as usize];
            resource.dirty = false;
            // A resource that binds neither before nor after holds nobody back; one visit solves a whole component.
            if resource.is_hot() && resource.visited <= before {
                self.solve_component(r, now);
            }
        }
        self.dirty.clear();
        for i in 0..self.touched.len() {
            let class = self.touched[i];
            self.classes[class as usize].touched = false;
            self.due[class as usize] = self.next_end(class, now);
            changed(class);
        }
        self.touched.clear();
    }

    fn next_end(&self, class: u32, now: u64) -> u64 {
        let c = &self.classes[class as usize];
        let Some(first) = c.members.front() else { return NEVER };
        let left = first.ends.saturating_sub(c.clock(now));
        let wait = if c.theta == FULL_SPEED {
            left.div_ceil(1 << 32)
        } else if c.theta == 0 {
            return NEVER;
        } else if let Ok(left) = u64::try_from(left) {
            u128::from(left.div_ceil(c.theta))
        } else {
            left.div_ceil(u128::from(c.theta))
        };
        u64::try_from(u128::from(now) + wait).unwrap_or(NEVER)
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

    /// Collects the component of binding resources that `seed` belongs to, and the classes that cross them.
    fn collect_component(&mut self, seed: u32) {
        self.visit += 1;
        let visit = self.visit;
        self.component_resources.clear();
        self.component_classes.clear();
        self.resources[seed as usize].visited = visit;
        self.component_resources.push(seed);
        let mut next = 0;
        while next < self.component_resources.len() {
            let r = self.component_resources[next] as usize;
            next += 1;
            let resource = &mut self.resources[r];
            resource.was_hot = resource.demand > resource.capacity;
            resource.left = u128::from(resource.capacity) << 32;
            resource.open = resource.demand;
            for &c in &self.crossing[r] {
                let class = &mut self.classes[c as usize];
                if class.counted == 0 || class.visited == visit {
                    continue;
                }
                class.visited = visit;
                class.frozen = false;
                self.component_classes.push(c);
                for &(other, _) in &self.demands[class.demands.0 as usize..class.demands.1 as usize] {
                    let resource = &mut self.resources[other as usize];
                    if resource.visited != visit && resource.is_hot() {
                        resource.visited = visit;
                        self.component_resources.push(other);
                    }
                }
            }
        }
    }

    fn solve_component(&mut self, seed: u32, now: u64) {
        self.collect_component(seed);
        let visit = self.visit;
        let mut unfrozen = self.component_classes.len();
        while unfrozen > 0 {
            // Which resources are full is decided before anybody is frozen, so that the order does not matter.
            let mut lowest = FULL_SPEED;
            self.full.clear();
            for &r in &self.component_resources {
                let resource = &self.resources[r as usize];
                if resource.open == 0 {
                    continue;
                }
                let level = resource.level();
                if level < lowest {
                    lowest = level;
                    self.full.clear();
                }
                if level == lowest {
                    self.full.push(r);
                }
            }
            if lowest >= FULL_SPEED {
                for i in 0..self.component_classes.len() {
                    if !self.classes[self.component_classes[i] as usize].frozen {
                        self.set_theta(self.component_classes[i], now, FULL_SPEED);
                    }
                }
                return;
            }
            for i in 0..self.full.len() {
                let r = self.full[i] as usize;
                for j in 0..self.crossing[r].len() {
                    let c = self.crossing[r][j];
                    let class = &mut self.classes[c as usize];
                    if class.visited != visit || class.frozen {
                        continue;
                    }
                    class.frozen = true;
                    unfrozen -= 1;
                    let members = u64::from(class.counted);
                    for &(other, rate) in &self.demands[class.demands.0 as usize..class.demands.1 as usize] {
                        let resource = &mut self.resources[other as usize];
                        if resource.visited == visit {
                            resource.left -= u128::from(members * rate) * u128::from(lowest);
                            resource.open -= members * rate;
                        }
                    }
                    self.set_theta(c, now, lowest);
                }
            }
        }
    }
}

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
//! **Laziness.** Resources whose demand fits their capacity never bind, and flows that cross none that binds run at
//! full speed. Only the connected component of binding resources around a change is solved again.

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
    visited: u32,
    frozen: bool,
}

#[derive(Clone, Copy)]
struct Resource {
    capacity: u64,
    /// Demand that is always there.
    base: u64,
    /// Sum of the demands of all flows at full speed.
    demand: u64,
    /// Demand above capacity at the last solution.
    was_hot: bool,
    dirty: bool,
    visited: u32,
    /// While solving: capacity not yet given away (32 fractional bits), demand of flows not yet frozen.
    left: u128,
    open: u64,
}

/// The state of all flows and resources of a simulation.
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
    is_touched: Vec<bool>,
    visit: u32,
    component_classes: Vec<u32>,
    component_resources: Vec<u32>,
}

impl Sharing {
    /// No classes; the resources' capacities and their base demands, in bytes/s.
    ///
    /// A base demand is always there and slows down with the flows; alone it must fit its capacity.
    pub fn new(capacities: &[(u64, u64)]) -> Self {
        Self {
            resources: capacities
                .iter()
                .map(|&(capacity, base)| Resource {
                    capacity,
                    base,
                    demand: base,
                    was_hot: false,
                    dirty: false,
                    visited: 0,
                    left: 0,
                    open: 0,
                })
                .collect(),
            crossing: vec![Vec::new(); capacities.len()],
            classes: Vec::new(),
            demands: Vec::new(),
            due: Vec::new(),
            dirty: Vec::new(),
            touched: Vec::new(),
            is_touched: Vec::new(),
            visit: 0,
            component_classes: Vec::new(),
            component_resources: Vec::new(),
        }
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
            visited: 0,
            frozen: false,
        });
        self.due.push(NEVER);
        self.is_touched.push(false);
        id
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
                let rate = self.class_demands(class).iter().find(|d| d.0 == resource).map_or(0, |d| d.1);
                class.members.len() as u128 * u128::from(rate) * u128::from(class.theta)
            })
            .sum();
        (sum >> 32) as u64
    }

    fn class_demands(&self, class: &Class) -> &[(u32, u64)] {
        &self.demands[class.demands.0 as usize..class.demands.1 as usize]
    }

    fn touch(&mut self, class: u32) {
        if !self.is_touched[class as usize] {
            self.is_touched[class as usize] = true;
            self.touched.push(class);
        }
    }

    fn change_demand(&mut self, class: u32, add: bool) {
        let (start, end) = self.classes[class as usize].demands;
        for i in start as usize..end as usize {
            let (r, rate) = self.demands[i];
            let resource = &mut self.resources[r as usize];
            resource.demand = if add { resource.demand + rate } else { resource.demand - rate };
            if !resource.dirty && (resource.was_hot || resource.demand > resource.capacity) {
                resource.dirty = true;
                self.dirty.push(r);
            }
        }
    }

    /// Starts a flow of `work` picoseconds (at full speed) at time `now`. Rates follow at the next [`Sharing::solve`].
    pub fn start(&mut self, class: u32, now: u64, work: u64, tag: Tag) {
        let c = &mut self.classes[class as usize];
        if c.members.is_empty() {
            // Nobody else: whatever the clock showed does not matter.
            c.v = 0;
            c.since = now;
            c.theta = FULL_SPEED;
        }
        let v = c.v + u128::from(now - c.since) * u128::from(c.theta);
        let ends = v + (u128::from(work) << 32);
        let mut at = c.members.len();
        while at > 0 && c.members[at - 1].ends > ends {
            at -= 1;
        }
        c.members.insert(at, Member { ends, tag });
        self.change_demand(class, true);
        self.touch(class);
    }

    /// Removes the flows of a class that have ended by `now` and hands out their tags, in the order of their ends.
    pub fn finish(&mut self, class: u32, now: u64, mut ended: impl FnMut(Tag)) {
        let c = &mut self.classes[class as usize];
        let v = c.v + u128::from(now - c.since) * u128::from(c.theta);
        let mut any = 0;
        while let Some(member) = c.members.front().filter(|m| m.ends <= v) {
            ended(member.tag);
            c.members.pop_front();
            any += 1;
        }
        for _ in 0..any {
            self.change_demand(class, false);
        }
        if any > 0 {
            self.touch(class);
        }
    }

    /// Gives every flow its rate for the time after `now`; calls `changed(class)` for each class whose `due` may have
    /// moved.
    pub fn solve(&mut self, now: u64, mut changed: impl FnMut(u32)) {
        let mut dirty = std::mem::take(&mut self.dirty);
        let before = self.visit;
        for &r in &dirty {
            let resource = &mut self.resources[r as usize];
            resource.dirty = false;
            // A resource that binds neither before nor after holds nobody back; one visit solves a whole component.
            if resource.visited <= before && (resource.was_hot || resource.demand > resource.capacity) {
                self.solve_component(r, now);
            }
        }
        dirty.clear();
        self.dirty = dirty;
        let mut touched = std::mem::take(&mut self.touched);
        for &class in &touched {
            self.is_touched[class as usize] = false;
            self.due[class as usize] = self.next_end(class, now);
            changed(class);
        }
        touched.clear();
        self.touched = touched;
    }

    fn next_end(&self, class: u32, now: u64) -> u64 {
        let c = &self.classes[class as usize];
        let Some(first) = c.members.front() else { return NEVER };
        let v = c.v + u128::from(now - c.since) * u128::from(c.theta);
        let left = first.ends.saturating_sub(v);
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
            c.v += u128::from(now - c.since) * u128::from(c.theta);
            c.since = now;
            c.theta = theta;
            self.touch(class);
        }
    }

    /// Solves the component of binding resources that `seed` belongs to.
    fn solve_component(&mut self, seed: u32, now: u64) {
        self.visit += 1;
        let visit = self.visit;
        let mut resources = std::mem::take(&mut self.component_resources);
        let mut classes = std::mem::take(&mut self.component_classes);
        resources.clear();
        classes.clear();
        self.resources[seed as usize].visited = visit;
        resources.push(seed);
        let mut next = 0;
        while next < resources.len() {
            let r = resources[next] as usize;
            next += 1;
            for i in 0..self.crossing[r].len() {
                let c = self.crossing[r][i];
                let class = &mut self.classes[c as usize];
                if class.members.is_empty() || class.visited == visit {
                    continue;
                }
                class.visited = visit;
                class.frozen = false;
                classes.push(c);
                for d in class.demands.0..class.demands.1 {
                    let other = self.demands[d as usize].0;
                    let resource = &mut self.resources[other as usize];
                    if resource.visited != visit && (resource.was_hot || resource.demand > resource.capacity) {
                        resource.visited = visit;
                        resources.push(other);
                    }
                }
            }
        }
        for &r in &resources {
            let resource = &mut self.resources[r as usize];
            resource.was_hot = resource.demand > resource.capacity;
            resource.left = u128::from(resource.capacity) << 32;
            resource.open = resource.demand;
        }
        let mut unfrozen = classes.len();
        while unfrozen > 0 {
            let level = resources
                .iter()
                .map(|&r| &self.resources[r as usize])
                .filter(|r| r.open > r.base)
                .map(level)
                .min()
                .unwrap_or(FULL_SPEED);
            if level >= FULL_SPEED {
                for i in 0..classes.len() {
                    if !self.classes[classes[i] as usize].frozen {
                        self.set_theta(classes[i], now, FULL_SPEED);
                    }
                }
                break;
            }
            // Which resources are full is decided before anybody is frozen, so that the order does not matter.
            let full: Vec<u32> = resources
                .iter()
                .copied()
                .filter(|&r| {
                    let resource = &self.resources[r as usize];
                    resource.open > resource.base && self::level(resource) == level
                })
                .collect();
            for r in full {
                for i in 0..self.crossing[r as usize].len() {
                    let c = self.crossing[r as usize][i];
                    let class = &mut self.classes[c as usize];
                    if class.visited != visit || class.frozen || class.members.is_empty() {
                        continue;
                    }
                    class.frozen = true;
                    unfrozen -= 1;
                    let members = class.members.len() as u64;
                    let (start, end) = class.demands;
                    for d in start..end {
                        let (other, rate) = self.demands[d as usize];
                        let resource = &mut self.resources[other as usize];
                        if resource.visited == visit {
                            resource.left -= u128::from(members) * u128::from(rate) * u128::from(level);
                            resource.open -= members * rate;
                        }
                    }
                    self.set_theta(c, now, level);
                }
            }
        }
        self.component_resources = resources;
        self.component_classes = classes;
    }
}

fn level(resource: &Resource) -> u64 {
    u64::try_from(resource.left / u128::from(resource.open)).unwrap_or(NEVER)
}

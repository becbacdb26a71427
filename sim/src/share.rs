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

/// Members of a class by the value of its clock at which they end.
#[derive(Default)]
struct Members {
    list: Vec<Member>,
    /// Those before have ended.
    head: usize,
}

impl Members {
    fn len(&self) -> u32 {
        (self.list.len() - self.head) as u32
    }

    fn first(&self) -> Option<&Member> {
        self.list.get(self.head)
    }

    fn clear(&mut self) {
        self.list.clear();
        self.head = 0;
    }

    #[inline]
    fn insert(&mut self, member: Member) {
        if self.list.last().is_some_and(|last| last.ends > member.ends) {
            self.insert_before_last(member);
        } else {
            self.list.push(member);
        }
    }

    /// Rare: most flows of a class have the same work. Kept out of line so that the other case stays short.
    #[cold]
    #[inline(never)]
    fn insert_before_last(&mut self, member: Member) {
        let at = self.head + self.list[self.head..].partition_point(|m| m.ends <= member.ends);
        self.list.insert(at, member);
    }

    /// Drops the members whose end was reached, and gives back their room now and then.
    fn advance(&mut self, head: usize) {
        self.head = head;
        if head == self.list.len() {
            self.clear();
        } else if head >= 64 && 2 * head >= self.list.len() {
            self.list.drain(..head);
            self.head = 0;
        }
    }
}

struct Class {
    v: u128,
    /// Time at which `v` holds.
    since: u64,
    theta: u64,
    members: Members,
    /// Range in `Sharing::demands`.
    demands: (u32, u32),
    /// Members that the demand of the resources counts: those at the last solution.
    counted: u32,
    /// What the caller wants to be told when `due` changes.
    owner: u32,
    visited: u32,
    frozen: bool,
    touched: bool,
}

impl Class {
    fn clock(&self, now: u64) -> u128 {
        self.v + u128::from(now - self.since) * u128::from(self.theta)
    }

    /// When the first member ends at the present speed.
    fn next_end(&self, now: u64) -> u64 {
        let Some(first) = self.members.first() else { return NEVER };
        let left = first.ends.saturating_sub(self.clock(now));
        let wait = if self.theta == FULL_SPEED {
            left.div_ceil(1 << 32)
        } else if self.theta == 0 {
            return NEVER;
        } else if let Ok(left) = u64::try_from(left) {
            u128::from(left.div_ceil(self.theta))
        } else {
            left.div_ceil(u128::from(self.theta))
        };
        u64::try_from(u128::from(now) + wait).unwrap_or(NEVER)
    }
}

#[derive(Clone, Copy)]
struct Resource {
    capacity: u64,
    /// Demand that is always there; it slows down with the flows.
    base: u64,
    /// Base and the demands of all counted flows at full speed.
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
    /// Classes that can cross each resource, resource by resource; made from `demands` when they are complete.
    crossing: Vec<u32>,
    /// Where each resource's classes begin; one more at the end.
    crossing_of: Vec<u32>,
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
    freeze: Vec<u32>,
}

impl Sharing {
    /// No classes; capacities and base demands in bytes/s. A base demand is always there and slows down with the flows;
    /// alone it must fit its capacity.
    pub fn new(capacities: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let resources: Vec<Resource> = capacities
            .into_iter()
            .map(|(capacity, base)| Resource {
                capacity,
                base,
                demand: base,
                was_hot: false,
                dirty: false,
                visited: 0,
                left: 0,
                open: 0,
            })
            .collect();
        Self { resources, ..Self::default() }
    }

    /// Adds a class whose flows, at full speed, take these bytes/s from these resources (each named once). `owner` is
    /// what [`Sharing::solve`] names when the class's next end moves.
    pub fn add_class(&mut self, owner: u32, demands: impl IntoIterator<Item = (u32, u64)>) -> u32 {
        let id = self.classes.len() as u32;
        let start = self.demands.len() as u32;
        self.demands.extend(demands.into_iter().filter(|&(_, rate)| rate > 0));
        self.crossing_of.clear();
        self.classes.push(Class {
            v: 0,
            since: 0,
            theta: FULL_SPEED,
            members: Members::default(),
            demands: (start, self.demands.len() as u32),
            counted: 0,
            owner,
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
            *resource = Resource { demand: resource.base, was_hot: false, dirty: false, visited: 0, ..*resource };
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
        self.classes[class as usize].members.len() as usize
    }

    /// Present speed of a class, 32 fractional bits.
    pub fn theta(&self, class: u32) -> u64 {
        self.classes[class as usize].theta
    }

    /// Bytes/s that a resource carries now.
    pub fn carried(&self, resource: u32) -> u64 {
        let mut sum = 0_u128;
        for class in self.classes.iter().filter(|class| class.members.len() > 0) {
            let demands = &self.demands[class.demands.0 as usize..class.demands.1 as usize];
            if let Some(&(_, rate)) = demands.iter().find(|d| d.0 == resource) {
                sum += u128::from(class.members.len()) * u128::from(rate) * u128::from(class.theta);
            }
        }
        (sum >> 32) as u64
    }

    fn find_crossing(&mut self) {
        let mut counts = vec![0_u32; self.resources.len() + 1];
        for &(resource, _) in &self.demands {
            counts[resource as usize + 1] += 1;
        }
        for r in 1..counts.len() {
            counts[r] += counts[r - 1];
        }
        self.crossing_of.clone_from(&counts);
        self.crossing = vec![0; self.demands.len()];
        for (id, class) in self.classes.iter().enumerate() {
            for &(resource, _) in &self.demands[class.demands.0 as usize..class.demands.1 as usize] {
                let at = &mut counts[resource as usize];
                self.crossing[*at as usize] = id as u32;
                *at += 1;
            }
        }
    }

    fn crossing_range(&self, resource: usize) -> std::ops::Range<usize> {
        self.crossing_of[resource] as usize..self.crossing_of[resource + 1] as usize
    }

    /// Starts a flow of `work` picoseconds (at full speed) at time `now`. Rates follow at the next [`Sharing::solve`].
    #[inline]
    pub fn start(&mut self, class: u32, now: u64, work: u64, tag: Tag) {
        let c = &mut self.classes[class as usize];
        if c.counted == 0 && c.members.len() == 0 {
            // Nobody else: whatever the clock showed does not matter.
            (c.v, c.since, c.theta) = (0, now, FULL_SPEED);
        }
        let ends = c.clock(now) + (u128::from(work) << 32);
        c.members.insert(Member { ends, tag });
        if !c.touched {
            c.touched = true;
            self.touched.push(class);
        }
    }

    /// Removes the flows of some neighbouring classes that have ended by `now`, and appends their tags, class by class
    /// in the order of their ends.
    pub fn finish(&mut self, classes: std::ops::Range<usize>, now: u64, ended: &mut Vec<Tag>) {
        let first = classes.start;
        for (i, _) in self.due[classes].iter().enumerate().filter(|&(_, &due)| due <= now) {
            let class = &mut self.classes[first + i];
            let v = class.clock(now);
            let mut head = class.members.head;
            while let Some(member) = class.members.list.get(head).filter(|m| m.ends <= v) {
                ended.push(member.tag);
                head += 1;
            }
            class.members.advance(head);
            if !class.touched {
                class.touched = true;
                self.touched.push((first + i) as u32);
            }
        }
    }

    /// Gives every flow its rate for the time after `now`; calls `changed(owner)` for each class whose next end
    /// moved.
    pub fn solve(&mut self, now: u64, mut changed: impl FnMut(u32)) {
        if self.crossing_of.is_empty() {
            self.find_crossing();
        }
        for &class in &self.touched {
            let c = &mut self.classes[class as usize];
            let members = c.members.len();
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
            let class = self.touched[i] as usize;
            self.classes[class].touched = false;
            let due = self.classes[class].next_end(now);
            if self.due[class] != due {
                self.due[class] = due;
                changed(self.classes[class].owner);
            }
        }
        self.touched.clear();
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
            let range = self.crossing_range(r);
            for &c in &self.crossing[range] {
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
                if resource.open == resource.base {
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
            self.freeze.clear();
            for i in 0..self.full.len() {
                let range = self.crossing_range(self.full[i] as usize);
                for &c in &self.crossing[range] {
                    let class = &mut self.classes[c as usize];
                    if class.visited == visit && !class.frozen {
                        class.frozen = true;
                        self.freeze.push(c);
                    }
                }
            }
            unfrozen -= self.freeze.len();
            for i in 0..self.freeze.len() {
                let c = self.freeze[i];
                if unfrozen > 0 {
                    self.give_away(c, lowest);
                }
                self.set_theta(c, now, lowest);
            }
        }
    }

    /// Takes what a class gets at `level` from the resources that it crosses.
    fn give_away(&mut self, class: u32, level: u64) {
        let class = &self.classes[class as usize];
        for &(r, rate) in &self.demands[class.demands.0 as usize..class.demands.1 as usize] {
            let resource = &mut self.resources[r as usize];
            if resource.visited == self.visit {
                let demand = u64::from(class.counted) * rate;
                resource.left -= u128::from(demand) * u128::from(level);
                resource.open -= demand;
            }
        }
    }
}

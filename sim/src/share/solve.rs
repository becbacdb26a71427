//! New rates around a change.
//!
//! The rates are the only ones for which, resource by resource, these hold: its **level** is the smallest speed at which
//! what slower flows leave it fills it, if there is one below full speed; and a flow is as fast as the lowest level that
//! it crosses. (From the slowest speed up, each level follows from slower ones.) A change therefore leaves alone every
//! resource whose slower flows stay as they are, and only these are solved again:
//!
//! 1. resources whose own flows came or went, if they have a level or may get one;
//! 2. resources with a level that a flow crosses whose speed the ones before have changed;
//! 3. resources without a level that such flows may fill.
//!
//! Flows that cross others too are no faster than the levels of those. Should the second and the third kind be found again
//! and again, all that hangs together is solved at once.

use super::{Crossing, FULL_SPEED, NEVER, REST, Resource, Sharing};

/// A resource that is solved again.
#[derive(Clone, Copy)]
pub(super) struct Remainder {
    /// Capacity not yet given away, 32 fractional bits.
    left: u128,
    /// Base and the demand of flows not yet frozen.
    open: u64,
    base: u64,
    resource: u32,
    /// The `theta` at which it is full; [`NEVER`] when no flow is left that it could hold back.
    level: u64,
    /// The level at which it was full.
    full_at: u64,
    /// Something was given away since the level was found.
    changed: bool,
}

/// Times that resources may be added to a solution before all that hangs together is.
const SPREADS: u32 = 4;

impl Remainder {
    pub(super) fn of(r: u32, resource: &Resource) -> Self {
        Self {
            left: u128::from(resource.capacity) << 32,
            open: resource.demand,
            base: resource.base,
            resource: r,
            level: NEVER,
            full_at: NEVER,
            changed: true,
        }
    }

    /// The `theta` at which the flows not yet frozen fill what is left; at least [`FULL_SPEED`] when they cannot.
    pub(super) fn find_level(&self) -> u64 {
        let high = (self.left >> 32) as u64;
        if high >= self.open {
            return FULL_SPEED;
        }
        // The quotient is below 2^32: a double is off by less than one, and one exact product tells which way. A
        // library division of 128-bit numbers would cost more than all the rest of a solution.
        let estimate = (high as i64 as f64 * 4_294_967_296.0 + self.left as u32 as f64) / self.open as i64 as f64;
        let mut level = estimate as i64 as u64;
        if u128::from(level) * u128::from(self.open) > self.left {
            level -= 1;
        } else if u128::from(level + 1) * u128::from(self.open) <= self.left {
            level += 1;
        }
        level
    }
}

/// What a solution begins with.
#[derive(Clone, Copy)]
enum Seed {
    Resource(u32),
    Group(u32),
}

/// A group that crosses a resource that is solved again.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    group: u32,
    /// Its resources that are solved again, in `Sharing::links`.
    links: (u32, u32),
    /// The lowest level of its other resources, at most [`FULL_SPEED`].
    cap: u64,
    /// Its speed before: 0 when it had no members.
    before: u64,
    /// Level at which it was frozen, [`NEVER`] until then.
    level: u64,
    /// It may be held back by resources that are not solved again.
    crosses_others: bool,
}

impl Piece {
    /// Takes what the group takes at a level from its resources; false if it has one already.
    fn freeze(&mut self, level: u64, component: &mut [Remainder], links: &[Link]) -> bool {
        if self.level != NEVER {
            return false;
        }
        self.level = level;
        for link in &links[self.links.0 as usize..self.links.1 as usize] {
            let remainder = &mut component[link.place as usize];
            remainder.left -= u128::from(link.demand) * u128::from(level);
            remainder.open -= link.demand;
            remainder.changed = true;
        }
        true
    }
}

/// A resource of a group while both are solved again.
#[derive(Clone, Copy)]
pub(super) struct Link {
    /// What the group takes of it at full speed.
    demand: u64,
    /// Place among the remainders.
    place: u32,
}

impl Resource {
    /// Whether its flows may fill it, were they to take so much more than now.
    ///
    /// Sure to say so even where rounding decides: without a level it has room for all its flows at a speed that is
    /// greater by the smallest step.
    pub(super) fn may_fill(&self, more: i128) -> bool {
        let load = self.load as i128 + more + i128::from(self.demand) + (i128::from(self.base) << 32);
        load > i128::from(self.capacity) << 32
    }

    /// Notes that flows of a demand have another speed; `loaded`: the resources of which that is noted.
    #[inline]
    pub(super) fn add_more(&mut self, demand: u64, before: u64, speed: u64, r: u32, loaded: &mut Vec<u32>) {
        if self.more == 0 {
            loaded.push(r);
        }
        self.more += i128::from(demand) * (i128::from(speed) - i128::from(before));
    }

    /// As [`Resource::may_fill`], with what is noted.
    pub(super) fn fills_up(&self) -> bool {
        self.may_fill(self.more)
    }
}

/// Positions of a group's resources that may hold it back, given what it knows of them.
pub(super) struct HotPositions {
    few: u64,
    /// Few groups cross so many.
    rest: std::ops::Range<usize>,
}

impl HotPositions {
    pub(super) fn of(crossing: &Crossing) -> Self {
        let end = if crossing.hot >> REST == 0 { REST } else { crossing.len as usize };
        Self { few: crossing.hot & ((1 << REST) - 1), rest: REST..end }
    }
}

impl Iterator for HotPositions {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.few == 0 {
            return self.rest.next();
        }
        let position = self.few.trailing_zeros() as usize;
        self.few &= self.few - 1;
        Some(position)
    }
}

impl Sharing {
    /// Tells the groups that cross a resource whether it may hold them back.
    pub(super) fn mark(&mut self, r: u32, hot: bool) {
        let resource = &mut self.resources[r as usize];
        resource.hot = hot;
        // What it carries is not known while it holds nobody back.
        resource.pending = hot;
        resource.level = NEVER;
        let range = self.crossing_range(r);
        for (&group, &position) in self.crossing[range.clone()].iter().zip(&self.positions[range]) {
            let crossing = &mut self.crossings[group as usize];
            if hot {
                crossing.hot |= 1 << (position as usize).min(REST);
            } else if (position as usize) < REST {
                crossing.hot &= !(1 << position);
            }
        }
    }

    pub(super) fn crossing_range(&self, resource: u32) -> std::ops::Range<usize> {
        self.crossing_of[resource as usize] as usize..self.crossing_of[resource as usize + 1] as usize
    }

    /// Solves a resource again and what hangs on it.
    pub(super) fn solve_resource(&mut self, seed: u32, now: u64) {
        if !self.solve_alike(seed, now) && !self.only_group(seed).is_some_and(|group| self.solve_lone(group, now)) {
            self.solve_around(now, Seed::Resource(seed));
        }
    }

    /// Finds the speed of a group that has come and crosses no resource with a level.
    pub(super) fn solve_group(&mut self, group: u32, now: u64) {
        if !self.solve_lone(group, now) {
            self.solve_around(now, Seed::Group(group));
        }
    }

    fn solve_around(&mut self, now: u64, seed: Seed) {
        let mut spreads = 0;
        loop {
            self.visit += 1;
            self.component.clear();
            self.pieces.clear();
            self.links.clear();
            self.collect(seed, spreads == SPREADS);
            self.fill();
            if !self.spread() {
                break;
            }
            spreads += 1;
        }
        self.commit(now);
    }

    /// Finds all that hangs on what is solved again and has to be with it; `all`: all that hangs on it.
    fn collect(&mut self, seed: Seed, all: bool) {
        let Self { component, links, pieces, visit, .. } = self;
        let visit = *visit;
        let (words, words_of, present) = (self.words.as_slice(), self.words_of.as_slice(), self.present.as_slice());
        let (crossings, crossed, demands) = (&*self.crossings, &*self.crossed, &*self.demands);
        let (resources, presences) = (&mut *self.resources, &mut *self.presences);
        let join = |component: &mut Vec<Remainder>, r: u32, resource: &mut Resource| {
            resource.visited = visit;
            resource.place = component.len() as u32;
            component.push(Remainder::of(r, resource));
        };
        let only;
        let mut groups: &[(u32, u64)] = &[];
        match seed {
            Seed::Resource(r) => join(component, r, &mut resources[r as usize]),
            Seed::Group(group) => {
                only = [(group / 64, 1 << (group % 64))];
                groups = &only;
            }
        }
        let mut next = 0;
        loop {
            for &(word, crossing) in groups {
                let mut bits = crossing & present[word as usize];
                while bits != 0 {
                    let group = word * 64 + bits.trailing_zeros();
                    bits &= bits - 1;
                    let presence = &mut presences[group as usize];
                    if presence.visited == visit {
                        continue;
                    }
                    presence.visited = visit;
                    presence.piece = pieces.len() as u32;
                    let crossing = &crossings[group as usize];
                    let range = crossing.resources as usize..(crossing.resources + crossing.len) as usize;
                    let (crossed, demands) = (&crossed[range.clone()], &demands[range]);
                    let (first, mut cap, mut crosses_others) = (links.len() as u32, FULL_SPEED, false);
                    for position in HotPositions::of(crossing) {
                        let r = crossed[position];
                        let resource = &mut resources[r as usize];
                        if resource.visited != visit {
                            if !(resource.pending || all && resource.hot) {
                                cap = cap.min(resource.level);
                                crosses_others = true;
                                continue;
                            }
                            join(component, r, resource);
                        }
                        links.push(Link { demand: demands[position], place: resource.place });
                    }
                    pieces.push(Piece {
                        group,
                        links: (first, links.len() as u32),
                        cap,
                        before: if presence.fresh { 0 } else { self.groups[group as usize].theta },
                        level: NEVER,
                        crosses_others,
                    });
                }
            }
            let Some(remainder) = component.get(next) else { break };
            let r = remainder.resource as usize;
            groups = &words[words_of[r] as usize..words_of[r + 1] as usize];
            next += 1;
        }
    }

    /// Finds the levels of the pieces, the lowest first.
    fn fill(&mut self) {
        let Self { component, pieces, links, caps, .. } = self;
        caps.clear();
        let capped = (0..).zip(&*pieces).filter(|(_, piece)| piece.cap < FULL_SPEED);
        caps.extend(capped.map(|(place, piece)| (piece.cap, place)));
        caps.sort_unstable();
        let mut caps = caps.as_slice();
        loop {
            let lowest = lowest_level(component);
            let below = caps.partition_point(|&(cap, _)| cap < lowest);
            if below > 0 {
                // May raise the lowest level, and never lowers one.
                for &(cap, piece) in &caps[..below] {
                    pieces[piece as usize].freeze(cap, component, links);
                }
                caps = &caps[below..];
                continue;
            }
            if lowest == FULL_SPEED {
                // Nobody is held back any more.
                for piece in pieces.iter_mut() {
                    piece.freeze(FULL_SPEED, component, links);
                }
                break;
            }
            // What is given away changes no level before the next round, so that the order does not matter.
            let mut frozen = false;
            for &(_, piece) in caps.iter().take_while(|&&(cap, _)| cap == lowest) {
                frozen |= pieces[piece as usize].freeze(lowest, component, links);
            }
            for place in 0..component.len() {
                if component[place].level != lowest {
                    continue;
                }
                component[place].full_at = lowest;
                let r = component[place].resource as usize;
                let words = &self.words[self.words_of[r] as usize..self.words_of[r + 1] as usize];
                for &(word, groups) in words {
                    let mut bits = groups & self.present[word as usize];
                    while bits != 0 {
                        let group = word as usize * 64 + bits.trailing_zeros() as usize;
                        bits &= bits - 1;
                        let piece = &mut pieces[self.presences[group].piece as usize];
                        frozen |= piece.freeze(lowest, component, links);
                    }
                }
            }
            debug_assert!(frozen, "the lowest level is somebody's");
        }
    }

    /// Marks resources that have to be solved again because a group that crosses them has another speed than before;
    /// false when there are none.
    fn spread(&mut self) -> bool {
        let Self { crossings, crossed, demands, resources, pieces, visit, loaded, .. } = self;
        let mut spreads = false;
        for piece in pieces.iter().filter(|piece| piece.crosses_others && piece.level != piece.before) {
            let crossing = &crossings[piece.group as usize];
            for position in HotPositions::of(crossing) {
                let at = crossing.resources as usize + position;
                let r = crossed[at];
                let resource = &mut resources[r as usize];
                if resource.visited == *visit || resource.pending || !resource.hot {
                    continue;
                }
                if resource.level != NEVER {
                    resource.pending = true;
                    spreads = true;
                    continue;
                }
                resource.add_more(demands[at], piece.before, piece.level, r, loaded);
            }
        }
        for &r in &*loaded {
            let resource = &mut resources[r as usize];
            if !resource.pending && resource.fills_up() {
                resource.pending = true;
                spreads = true;
            }
        }
        if spreads {
            for r in loaded.drain(..) {
                resources[r as usize].more = 0;
            }
        }
        spreads
    }

    /// Keeps what was found.
    fn commit(&mut self, now: u64) {
        for i in 0..self.pieces.len() {
            let Piece { group, level, .. } = self.pieces[i];
            self.presences[group as usize].fresh = false;
            if self.groups[group as usize].set_theta(now, level) {
                self.touched_groups.push(group);
            }
        }
        for remainder in &self.component {
            let resource = &mut self.resources[remainder.resource as usize];
            resource.level = remainder.full_at;
            resource.load = (u128::from(resource.capacity) << 32) - remainder.left;
            resource.pending = false;
        }
        for r in self.loaded.drain(..) {
            let resource = &mut self.resources[r as usize];
            resource.load = resource.load.wrapping_add_signed(std::mem::take(&mut resource.more));
        }
    }
}

/// The lowest level of resources, at most [`FULL_SPEED`].
fn lowest_level(component: &mut [Remainder]) -> u64 {
    let mut lowest = FULL_SPEED;
    for remainder in component {
        if remainder.changed {
            remainder.changed = false;
            remainder.level = if remainder.open > remainder.base { remainder.find_level() } else { NEVER };
        }
        lowest = lowest.min(remainder.level);
    }
    lowest
}

//! New rates for one connected component of binding resources.

use super::{FULL_SPEED, NEVER, REST, Resource, Sharing};

/// A resource while its component is solved.
#[derive(Clone, Copy)]
pub(super) struct Remainder {
    /// Capacity not yet given away, 32 fractional bits.
    left: u128,
    /// Base and the demand of flows not yet frozen.
    open: u64,
    base: u64,
    resource: u32,
    /// The newest of its links: a list through `Sharing::links`.
    last_link: u32,
    /// The `theta` at which it is full; [`NEVER`] when no flow is left that it could hold back.
    level: u64,
    /// Something was given away since the level was found.
    changed: bool,
}

/// No component is known.
pub(super) const NEVER_COLLECTED: u32 = 0;

/// End of a list of links.
const NO_LINK: u32 = u32::MAX;

impl Remainder {
    fn of(r: u32, resource: &Resource) -> Self {
        let left = u128::from(resource.capacity) << 32;
        let (open, base) = (resource.demand, resource.base);
        Self { left, open, base, resource: r, last_link: NO_LINK, level: NEVER, changed: true }
    }

    /// The `theta` at which the flows not yet frozen fill what is left; at least [`FULL_SPEED`] when they cannot.
    fn find_level(&self) -> u64 {
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

/// A class while its component is solved.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    class: u32,
    members: u32,
    /// Its binding resources in `Sharing::links`.
    links: (u32, u32),
    /// Level at which it was frozen, [`NEVER`] until then. Levels rise from one round to the next.
    level: u64,
}

/// A binding resource of a class while its component is solved.
#[derive(Clone, Copy)]
pub(super) struct Link {
    rate: u64,
    /// Place in the component.
    place: u32,
    piece: u32,
    /// The link of the same resource before this one.
    before: u32,
}

impl Sharing {
    /// Tells the classes that cross a resource whether it may hold them back.
    pub(super) fn mark(&mut self, r: u32, hot: bool) {
        self.resources[r as usize].hot = hot;
        self.collected = NEVER_COLLECTED;
        let range = self.crossing_range(r);
        for (&c, &position) in self.crossing[range.clone()].iter().zip(&self.positions[range]) {
            let crossing = &mut self.crossings[c as usize];
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

    /// The component of binding resources that `seed` belongs to, and the classes that cross them.
    ///
    /// The last one is used again while the same resources bind and no class has come to it. Classes that have no member
    /// any more ask for nothing; should they have held the component together, its parts are solved side by side.
    fn find_component(&mut self, seed: u32) {
        self.visit += 1;
        let place = self.resources[seed as usize].place as usize;
        let known = self.collected != NEVER_COLLECTED && self.component.get(place).is_some_and(|c| c.resource == seed);
        if !known {
            self.collect_component(seed);
            self.collected = self.visit;
            return;
        }
        for remainder in &mut self.component {
            let resource = &mut self.resources[remainder.resource as usize];
            resource.visited = self.visit;
            let last_link = remainder.last_link;
            *remainder = Remainder { last_link, ..Remainder::of(remainder.resource, resource) };
        }
        for piece in &mut self.pieces {
            piece.members = self.presences[piece.class as usize].counted;
            piece.level = NEVER;
        }
    }

    fn collect_component(&mut self, seed: u32) {
        self.component.clear();
        self.pieces.clear();
        self.links.clear();
        let resource = &mut self.resources[seed as usize];
        (resource.visited, resource.place) = (self.visit, 0);
        self.component.push(Remainder::of(seed, resource));
        let mut next = 0;
        while let Some(remainder) = self.component.get(next) {
            next += 1;
            let r = remainder.resource as usize;
            for i in self.words_of[r] as usize..self.words_of[r + 1] as usize {
                let (word, crossing) = self.words[i];
                let mut bits = crossing & self.present[word as usize];
                while bits != 0 {
                    let class = word * 64 + bits.trailing_zeros();
                    bits &= bits - 1;
                    let presence = &mut self.presences[class as usize];
                    if presence.visited != self.visit {
                        presence.visited = self.visit;
                        let members = presence.counted;
                        let first = self.links.len() as u32;
                        self.link(class, self.pieces.len() as u32);
                        let links = (first, self.links.len() as u32);
                        self.pieces.push(Piece { class, members, links, level: NEVER });
                    }
                }
            }
        }
    }

    /// Lists the binding resources of a class, and lets them join the component.
    fn link(&mut self, class: u32, piece: u32) {
        let Self { crossings, crossed, rates, resources, component, links, visit, .. } = self;
        let crossing = &crossings[class as usize];
        let len = crossing.len as usize;
        let crossed = &crossed[crossing.resources as usize..crossing.resources as usize + len];
        let rates = &rates[crossing.rates as usize..crossing.rates as usize + len];
        let mut link = |position: usize| {
            let r = crossed[position];
            let resource = &mut resources[r as usize];
            if resource.visited != *visit {
                resource.visited = *visit;
                resource.place = component.len() as u32;
                component.push(Remainder::of(r, resource));
            }
            let place = resource.place;
            let last = &mut component[place as usize].last_link;
            let before = std::mem::replace(last, links.len() as u32);
            links.push(Link { rate: rates[position], place, piece, before });
        };
        let mut hot = crossing.hot;
        while hot != 0 {
            let position = hot.trailing_zeros() as usize;
            hot &= hot - 1;
            if position < REST {
                link(position);
            }
        }
        if crossing.hot >> REST != 0 {
            // Few classes cross so many resources; those that hold nobody back have a level too high to matter.
            (REST..len).for_each(link);
        }
    }

    pub(super) fn solve_component(&mut self, seed: u32, now: u64) {
        self.find_component(seed);
        let mut component = std::mem::take(&mut self.component);
        let mut pieces = std::mem::take(&mut self.pieces);
        let mut frozen = std::mem::take(&mut self.frozen);
        let mut unfrozen = pieces.len();
        while unfrozen > 0 {
            let lowest = lowest_level(&mut component);
            frozen.clear();
            if lowest >= FULL_SPEED {
                // Nobody is held back any more.
                for piece in pieces.iter().filter(|piece| piece.level == NEVER && piece.members > 0) {
                    self.set_theta(piece.class, now, FULL_SPEED);
                }
                break;
            }
            // Who is frozen is decided before anything is given away, so that the order does not matter.
            for full in component.iter().filter(|remainder| remainder.level == lowest) {
                let mut link = full.last_link;
                while link != NO_LINK {
                    let Link { piece, before, .. } = self.links[link as usize];
                    if pieces[piece as usize].level == NEVER {
                        pieces[piece as usize].level = lowest;
                        frozen.push(piece);
                    }
                    link = before;
                }
            }
            debug_assert!(!frozen.is_empty(), "the lowest level is somebody's");
            unfrozen -= frozen.len();
            for &piece in &frozen {
                let piece = pieces[piece as usize];
                if piece.members == 0 {
                    continue;
                }
                self.set_theta(piece.class, now, lowest);
                for link in &self.links[piece.links.0 as usize..piece.links.1 as usize] {
                    let remainder = &mut component[link.place as usize];
                    let demand = u64::from(piece.members) * link.rate;
                    remainder.left -= u128::from(demand) * u128::from(lowest);
                    remainder.open -= demand;
                    remainder.changed = true;
                }
            }
        }
        (self.component, self.pieces, self.frozen) = (component, pieces, frozen);
    }
}

/// The lowest level of a component's resources, at most [`FULL_SPEED`].
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

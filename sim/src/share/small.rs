//! The solutions of [`super::solve`] where little hangs together, or where all that does has one speed, which most are: found
//! without looking for level after level.

use super::solve::{HotPositions, Remainder};
use super::{FULL_SPEED, NEVER, REST, Resource, Sharing};

impl Resource {
    /// The speed at which all its flows fill it; [`FULL_SPEED`] when they do not.
    fn level_of_all(&self) -> u64 {
        let remainder = Remainder::of(0, self);
        if self.demand > self.base { remainder.find_level() } else { FULL_SPEED }
    }

    /// Keeps what was found: its flows take `demand` at full speed and have this one now.
    fn keep(&mut self, demand: u64, speed: u64, full: bool) {
        self.level = if full { speed } else { NEVER };
        self.load = u128::from(demand) * u128::from(speed);
        self.pending = false;
    }
}

impl Sharing {
    /// Solves a resource together with those that hang on it, where all of them are full at one speed, as where ranks do the
    /// same, and nothing else holds their flows back more; false, and nothing done, if that is not so or if the new speed may
    /// matter to the flows of others.
    pub(super) fn solve_alike(&mut self, r: u32, now: u64) -> bool {
        self.visit += 1;
        self.alike.clear();
        self.found.clear();
        let level = self.resources[r as usize].level_of_all();
        let alike = self.find_alike(r, level) && self.loaded.iter().all(|&r| !self.resources[r as usize].fills_up());
        for r in self.loaded.drain(..) {
            let resource = &mut self.resources[r as usize];
            let more = std::mem::take(&mut resource.more);
            if alike {
                resource.load = resource.load.wrapping_add_signed(more);
            }
        }
        if !alike {
            return false;
        }
        for &r in &self.alike {
            let resource = &mut self.resources[r as usize];
            resource.keep(resource.demand - resource.base, level, level < FULL_SPEED);
        }
        for &group in &self.found {
            self.presences[group as usize].fresh = false;
            if self.groups[group as usize].set_theta(now, level) {
                self.touched_groups.push(group);
            }
        }
        true
    }

    /// Finds the resources that have to be solved with one, and their groups; false as soon as one has another level, or has
    /// one that a changed speed would change.
    fn find_alike(&mut self, r: u32, level: u64) -> bool {
        let Self { alike, found, loaded, resources, presences, .. } = self;
        let visit = self.visit;
        resources[r as usize].visited = visit;
        alike.push(r);
        let mut next = 0;
        while let Some(&r) = alike.get(next) {
            next += 1;
            let words = self.words_of[r as usize] as usize..self.words_of[r as usize + 1] as usize;
            let fits = all_present(&self.words[words], &self.present, |group| {
                let presence = &mut presences[group as usize];
                if presence.visited == visit {
                    return true;
                }
                presence.visited = visit;
                found.push(group);
                let crossing = &self.crossings[group as usize];
                if crossing.hot.is_power_of_two() && crossing.hot >> REST == 0 {
                    return true;
                }
                let before = if presence.fresh { 0 } else { self.groups[group as usize].theta };
                HotPositions::of(crossing).all(|position| {
                    let at = crossing.resources as usize + position;
                    let r = self.crossed[at];
                    let resource = &mut resources[r as usize];
                    if resource.visited == visit || !resource.hot {
                        return true;
                    }
                    if resource.pending {
                        resource.visited = visit;
                        alike.push(r);
                        return resource.level_of_all() == level;
                    }
                    if level != before && resource.level == NEVER {
                        resource.add_more(self.demands[at], before, level, r, loaded);
                    }
                    resource.level >= level && (level == before || resource.level == NEVER)
                })
            });
            if !fits {
                return false;
            }
        }
        true
    }

    /// The group with members that crosses a resource, if there is just one.
    pub(super) fn only_group(&self, r: u32) -> Option<u32> {
        let words = &self.words[self.words_of[r as usize] as usize..self.words_of[r as usize + 1] as usize];
        let mut only = None;
        let lone = all_present(words, &self.present, |group| only.replace(group).is_none());
        only.filter(|_| lone)
    }

    /// Finds the speed of a group that has all resources that have to be solved again to itself; false, and nothing done, if
    /// it has not, or if its new speed may matter to the flows of others.
    pub(super) fn solve_lone(&mut self, group: u32, now: u64) -> bool {
        let presence = &self.presences[group as usize];
        let before = if presence.fresh { 0 } else { self.groups[group as usize].theta };
        let crossing = &self.crossings[group as usize];
        let first = crossing.resources as usize;
        let (mut cap, mut lowest) = (FULL_SPEED, FULL_SPEED);
        for position in HotPositions::of(crossing) {
            let r = self.crossed[first + position];
            let resource = &self.resources[r as usize];
            if !resource.pending {
                cap = cap.min(resource.level);
            } else if self.only_group(r) == Some(group) {
                lowest = lowest.min(resource.level_of_all());
            } else {
                return false;
            }
        }
        let level = cap.min(lowest);
        let more = |demand: u64| i128::from(demand) * (i128::from(level) - i128::from(before));
        let unmoved = |position: usize| {
            let resource = &self.resources[self.crossed[first + position] as usize];
            let moves = resource.level != NEVER || resource.may_fill(more(self.demands[first + position]));
            resource.pending || !resource.hot || !moves
        };
        if level != before && !HotPositions::of(crossing).all(unmoved) {
            return false;
        }
        for position in HotPositions::of(crossing) {
            let demand = self.demands[first + position];
            let resource = &mut self.resources[self.crossed[first + position] as usize];
            if resource.pending {
                let full = level == lowest && level < FULL_SPEED && resource.level_of_all() == level;
                resource.keep(demand, level, full);
            } else if resource.hot {
                resource.load = resource.load.wrapping_add_signed(more(demand));
            }
        }
        self.presences[group as usize].fresh = false;
        if self.groups[group as usize].set_theta(now, level) {
            self.touched_groups.push(group);
        }
        true
    }
}

/// Whether something is true of all groups with members, of those that words name; ends at the first of which it is not.
#[inline]
fn all_present(words: &[(u32, u64)], present: &[u64], mut is: impl FnMut(u32) -> bool) -> bool {
    words.iter().all(|&(word, groups)| {
        let mut bits = groups & present[word as usize];
        while bits != 0 {
            if !is(word * 64 + bits.trailing_zeros()) {
                return false;
            }
            bits &= bits - 1;
        }
        true
    })
}

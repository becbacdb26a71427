//! The best split of a schedule, with a certificate.
//!
//! Branch and bound over boxes of splits, with the bounds of [`crate::bound`]. Boxes whose bound is no better than the
//! best simulated time are dropped; of the others the most promising are simulated and cut in two. What is left when the
//! budget ends gives the certified gap: no split of the model can be faster than `lower_bound`.
//!
//! Batches have a fixed size and are merged in order, so the answer does not depend on the number of threads.

use crate::SimError;
use crate::average::{Shown, ShownBound};
use crate::bound::kind_index;
use crate::compile::Compiled;
use crate::predict::Simulation;
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::atomic::{AtomicUsize, Ordering};
use tilewire_kernels::schedule::CtaCount;
use tilewire_kernels::{RoleKind, RoleSplit};

/// Splits simulated side by side; a constant, so that results do not depend on threads.
const BATCH: usize = 16;

/// How far to search.
#[derive(Clone, Copy, Debug)]
pub struct TuneConfig {
    /// Simulations at most; `None` searches until nothing can be better.
    pub budget: Option<usize>,
    /// Stop once the certified gap is this small (0.01 is 1 %).
    pub gap: f64,
}

impl TuneConfig {
    /// Until no split can be faster.
    pub const EXHAUSTIVE: Self = Self { budget: None, gap: 0.0 };

    /// For somebody who waits for the answer: at most `simulations`, fewer of large cases, and 1 % is close enough.
    ///
    /// Counted in tasks and not in seconds, so that the answer is the same on every computer.
    pub fn prompt(simulation: &Simulation, simulations: usize) -> Self {
        let compiled = simulation.compiled();
        let tasks = |&program: &u32| compiled.programs[program as usize].tasks.len();
        let per_run: usize = compiled.program_of.iter().map(tasks).sum();
        Self { budget: Some(affordable(per_run).min(simulations)), gap: 0.01 }
    }
}

/// Simulations of so many tasks each that a prompt search may make.
fn affordable(per_run: usize) -> usize {
    let within = |tasks: usize| tasks / per_run.max(1);
    within(PROMPT_TASKS).max(within(PATIENT_TASKS).clamp(FEW_SIMULATIONS, PROMPT_SIMULATIONS))
}

/// Tasks that a prompt search simulates in all, about.
const PROMPT_TASKS: usize = 15_000_000;

/// Simulations that a prompt search may make of large cases, as long as they are no more than [`PATIENT_TASKS`] in all.
const PROMPT_SIMULATIONS: usize = 64;

/// Tasks that a prompt search simulates in all of cases so large that [`PROMPT_TASKS`] would leave it few simulations.
const PATIENT_TASKS: usize = 100_000_000;

/// Simulations that a prompt search may make however large the case is: the first splits, and a step from the best.
const FEW_SIMULATIONS: usize = 16;

/// A split that was simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tried {
    /// Split.
    pub split: RoleSplit,
    /// Time, ps; `None` when it gets stuck or does not fit.
    pub time_ps: Option<u64>,
}

/// The answer of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// Best split found; of equally fast ones the one with the fewest CTAs, then the smallest.
    pub split: RoleSplit,
    /// Its time, ps.
    pub time_ps: u64,
    /// No split is faster than this, ps.
    pub lower_bound_ps: u64,
    /// `time / lower_bound - 1`.
    pub gap: f64,
    /// Everything that was simulated, in order.
    pub tried: Vec<Tried>,
    /// Splits that were searched.
    pub splits: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Bounds {
    low: [u32; 4],
    high: [u32; 4],
}

/// Which CTA counts a split may give each role: (at least, at most). None are enough for a role whose tasks are done by
/// CTAs that come from another one.
fn legal(compiled: &Compiled) -> ([u32; 4], [u32; 4]) {
    let (mut low, mut high) = ([0; 4], [0; 4]);
    for program in &compiled.programs {
        for launch in &compiled.launches {
            for r in launch.roles.clone() {
                let role = &program.roles[r];
                if role.ctas != CtaCount::FromSplit || role.tasks == 0 {
                    continue;
                }
                let k = kind_index(role.kind);
                high[k] = compiled.times.sms;
                if launch.roles.clone().all(|other| program.roles[other].recycle as usize != r) {
                    low[k] = 1;
                }
            }
        }
    }
    (low, high)
}

fn split_of(counts: [u32; 4]) -> RoleSplit {
    let mut split = RoleSplit::default();
    for (kind, n) in RoleKind::ALL.into_iter().zip(counts) {
        split.set(kind, n);
    }
    split
}

fn counts_of(split: &RoleSplit) -> [u32; 4] {
    RoleKind::ALL.map(|kind| split.get(kind))
}

/// Number of splits with every role in its range and at most `sms` CTAs.
fn count_splits(low: [u32; 4], high: [u32; 4], sms: u32) -> u64 {
    let mut ways = vec![0_u64; sms as usize + 1];
    ways[0] = 1;
    for k in 0..4 {
        let mut next = vec![0_u64; sms as usize + 1];
        for (used, &n) in ways.iter().enumerate() {
            for add in low[k]..=high[k] {
                if used + (add as usize) <= sms as usize {
                    next[used + add as usize] += n;
                }
            }
        }
        ways = next;
    }
    ways.iter().sum()
}

impl Bounds {
    /// Most CTAs that each role can have in this box when all others have their least.
    fn most(&self, sms: u32) -> Option<[u32; 4]> {
        let least: u32 = self.low.iter().sum();
        if least > sms {
            return None;
        }
        let mut most = self.high;
        for (most, low) in most.iter_mut().zip(self.low) {
            *most = (*most).min(sms - (least - low));
        }
        Some(most)
    }

    /// A promising split of the box: communication roles at the lower third, compute gets the rest.
    fn candidate(&self, sms: u32) -> [u32; 4] {
        let mut counts = self.low;
        for ((count, low), high) in counts.iter_mut().zip(self.low).zip(self.high).skip(1) {
            *count += (high.min(sms) - low) / 3;
        }
        let others: u32 = counts[1..].iter().sum();
        if others + self.low[0] > sms {
            counts = self.low;
        }
        let others: u32 = counts[1..].iter().sum();
        counts[0] = self.high[0].min(sms - others);
        counts
    }

    fn halves(&self) -> Option<[Self; 2]> {
        // Communication first, in proportion: 1..2 matters as much as 16..32.
        let k = (1..4).chain([0]).filter(|&k| self.high[k] > self.low[k]).max_by(|&a, &b| {
            let ratio = |k: usize| f64::from(self.high[k] + 1) / f64::from(self.low[k].max(1));
            ratio(a).total_cmp(&ratio(b)).then(b.cmp(&a))
        })?;
        let middle = (f64::from(self.low[k].max(1)) * f64::from(self.high[k])).sqrt() as u32;
        let middle = middle.clamp(self.low[k], self.high[k] - 1);
        let (mut a, mut b) = (*self, *self);
        a.high[k] = middle;
        b.low[k] = middle + 1;
        Some([a, b])
    }
}

/// Searches the split for which the least is shown.
///
/// `start` splits (the published one, say) are simulated first. `progress` is told the number of simulations done.
///
/// # Errors
/// [`SimError`] when no split runs at all.
pub fn tune(
    shown: Shown,
    start: &[RoleSplit],
    config: &TuneConfig,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Tuned, SimError> {
    let compiled = shown.later.compiled();
    let sms = compiled.times.sms;
    let bound = ShownBound::new(shown);
    let (low, high) = legal(compiled);
    let splits = count_splits(low, high, sms);
    let mut search = Search {
        shown,
        seen: BTreeMap::new(),
        tried: Vec::new(),
        best: None,
        error: None,
        budget: config.budget.unwrap_or(usize::MAX),
        progress,
    };
    let whole = Bounds { low, high };
    let in_range = |s: &&RoleSplit| {
        let counts = counts_of(s);
        (0..4).all(|k| (low[k]..=high[k]).contains(&counts[k])) && s.total() <= u64::from(sms)
    };
    let mut first: Vec<[u32; 4]> = start.iter().filter(in_range).map(counts_of).collect();
    // With and without CTAs of the roles that need none.
    for none in 0..16_usize {
        let may = |k: usize| none >> k & 1 == 0 || (low[k] == 0 && high[k] > 0);
        if (0..4).all(may) {
            let high = std::array::from_fn(|k| if none >> k & 1 == 1 { 0 } else { high[k] });
            first.push(Bounds { low, high }.candidate(sms));
        }
    }
    if search.budget < PROMPT_SIMULATIONS {
        first.insert(0, by_bound(&bound, first[0], low, high, sms));
    }
    search.simulate(&first);
    search.descend(low, high, sms);

    // (bound, order of creation, box): the most promising first, ties in order of creation.
    let mut boxes: BinaryHeap<Reverse<(u64, u64, Bounds)>> = BinaryHeap::new();
    let mut created = 0;
    let push = |boxes: &mut BinaryHeap<_>, b: Bounds, created: &mut u64| {
        if let Some(most) = b.most(sms) {
            boxes.push(Reverse((bound.at_most(most), *created, b)));
            *created += 1;
        }
    };
    push(&mut boxes, whole, &mut created);
    let lower = loop {
        let best = search.best.map_or(u64::MAX, |b| b.0);
        let Some(&Reverse((lowest, ..))) = boxes.peek() else { break best };
        if lowest >= best {
            break best;
        }
        let small_enough = best != u64::MAX && (best as f64 / lowest as f64 - 1.0) <= config.gap;
        if small_enough || search.tried.len() >= search.budget {
            break lowest;
        }
        let mut batch = Vec::new();
        while batch.len() < BATCH {
            let Some(Reverse((lowest, _, b))) = boxes.pop() else { break };
            if lowest >= best {
                break;
            }
            batch.push(b.candidate(sms));
            if let Some(halves) = b.halves() {
                for half in halves {
                    push(&mut boxes, half, &mut created);
                }
            }
        }
        search.simulate(&batch);
    };
    let Some((time_ps, _, counts)) = search.best else {
        return Err(search.error.unwrap_or(SimError::NoSplit));
    };
    let lower_bound_ps = lower.min(time_ps);
    Ok(Tuned {
        split: split_of(counts),
        time_ps,
        lower_bound_ps,
        gap: time_ps as f64 / lower_bound_ps.max(1) as f64 - 1.0,
        tried: search.tried,
        splits,
    })
}

/// CTAs that a local search moves between roles, one after the other.
const STEPS: [u32; 5] = [16, 8, 4, 2, 1];

/// Splits that a move of `step` CTAs to a role leads to, from idle SMs or from another role.
fn moves(counts: [u32; 4], step: u32, low: [u32; 4], high: [u32; 4], sms: u32) -> Vec<[u32; 4]> {
    let mut moves = Vec::new();
    for to in 0..4 {
        for from in 0..5 {
            let mut next = counts;
            if from == to {
                continue;
            }
            next[to] += step;
            if from < 4 {
                if next[from] < low[from] + step {
                    continue;
                }
                next[from] -= step;
            }
            let fits = next.iter().sum::<u32>() <= sms;
            if fits && (0..4).all(|k| (low[k]..=high[k]).contains(&next[k])) {
                moves.push(next);
            }
        }
    }
    moves
}

/// The split that a local search for the least bound ends at: a good first one where few can be simulated.
fn by_bound(bound: &ShownBound, from: [u32; 4], low: [u32; 4], high: [u32; 4], sms: u32) -> [u32; 4] {
    let key = |counts: [u32; 4]| (bound.at_most(counts), counts.iter().sum::<u32>(), counts);
    let mut best = key(from);
    for step in STEPS {
        while let Some(next) =
            moves(best.2, step, low, high, sms).into_iter().map(key).min().filter(|&next| next < best)
        {
            best = next;
        }
    }
    best.2
}

struct Search<'a> {
    shown: Shown<'a>,
    seen: BTreeMap<[u32; 4], Option<u64>>,
    tried: Vec<Tried>,
    /// Time, CTAs in all, counts.
    best: Option<(u64, u32, [u32; 4])>,
    error: Option<SimError>,
    budget: usize,
    progress: &'a (dyn Fn(usize) + Sync),
}

impl Search<'_> {
    fn simulate(&mut self, batch: &[[u32; 4]]) {
        let mut fresh: Vec<[u32; 4]> = Vec::new();
        for &counts in batch {
            if !self.seen.contains_key(&counts)
                && !fresh.contains(&counts)
                && self.tried.len() + fresh.len() < self.budget
            {
                fresh.push(counts);
            }
        }
        let done = AtomicUsize::new(self.tried.len());
        let time = |&counts: &[u32; 4]| {
            let time = self.shown.time_ps(&split_of(counts));
            (self.progress)(done.fetch_add(1, Ordering::Relaxed) + 1);
            time
        };
        let times: Vec<Result<u64, SimError>> = fresh.par_iter().map(time).collect();
        for (counts, time) in fresh.into_iter().zip(times) {
            let time = match time {
                Ok(time) => Some(time),
                Err(error) => {
                    self.error.get_or_insert(error);
                    None
                }
            };
            self.seen.insert(counts, time);
            self.tried.push(Tried { split: split_of(counts), time_ps: time });
            if let Some(time) = time {
                let key = (time, counts.iter().sum(), counts);
                if self.best.is_none_or(|best| key < best) {
                    self.best = Some(key);
                }
            }
        }
    }

    /// Local search: moves CTAs between roles in shrinking steps while that helps.
    fn descend(&mut self, low: [u32; 4], high: [u32; 4], sms: u32) {
        for step in STEPS {
            loop {
                let Some((before, _, counts)) = self.best else { return };
                self.simulate(&moves(counts, step, low, high, sms));
                if self.tried.len() >= self.budget || self.best.is_none_or(|b| b.0 >= before) {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_makes_fewer_simulations_the_larger_they_are_and_always_some() {
        let budgets = [1_000, 33_000, 1_400_000, 4_000_000, 8_400_000, usize::MAX].map(affordable);
        assert_eq!(budgets, [15_000, 454, 64, 25, 16, 16]);
    }
}

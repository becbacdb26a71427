//! The best split of a schedule, with a certificate.
//!
//! Branch and bound over boxes of splits. A box's lower bound is the largest of: every shared resource's bytes over its
//! bandwidth (the same for all splits), and, launch by launch, every role's work over the most CTAs that the box allows
//! it (whole tasks, so wave quantisation counts). Boxes whose bound is no better than the best simulated time are
//! dropped; of the others the most promising are simulated and cut in two. What is left when the budget ends gives the
//! certified gap: no split of the model can be faster than `lower_bound`.
//!
//! Batches have a fixed size and are merged in order, so the answer does not depend on the number of threads.

use crate::SimError;
use crate::compile::{Compiled, Form, Program, Work};
use crate::predict::Simulation;
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use tilewire_kernels::schedule::{Claim, CtaCount, Drain};
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
    /// Splits that are legal.
    pub splits: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Bounds {
    low: [u32; 4],
    high: [u32; 4],
}

/// Lower bounds on the time of a split.
pub struct LowerBound<'a> {
    compiled: &'a Compiled,
    /// Bound of the shared resources, ps.
    resources: u64,
    /// By program, role and CTAs: time of the role's work, ps.
    roles: Vec<Vec<Vec<u64>>>,
    overhead: u64,
}

impl<'a> LowerBound<'a> {
    /// Prepares bounds for all CTA counts.
    pub fn new(simulation: &'a Simulation) -> Self {
        let compiled = simulation.compiled();
        let sms = compiled.times.sms;
        let rails = compiled.times.rails;
        let resources = compiled
            .programs
            .iter()
            .flat_map(|p| p.totals.iter())
            .map(|&(kind, total)| {
                let capacity = u128::from(compiled.capacities[kind.index(rails) as usize].0.max(1));
                (u128::from(total) * 1_000_000_000_000 / capacity) as u64
            })
            .max()
            .unwrap_or(0);
        // Totals count what a rank's tasks take from everybody; only folded or symmetric runs make that its own load.
        let resources = if compiled.programs.len() == 1 { resources } else { 0 };
        let roles = compiled
            .programs
            .iter()
            .map(|program| (0..program.roles.len()).map(|r| role_bounds(compiled, program, r, sms)).collect())
            .collect();
        Self { compiled, resources, roles, overhead: compiled.times.launch }
    }

    /// No split with at most these CTAs per role is faster than this, ps.
    pub fn at_most(&self, most: [u32; 4]) -> u64 {
        let mut bound = self.resources;
        for (program, roles) in self.compiled.programs.iter().zip(&self.roles) {
            bound = bound.max(self.program(program, roles, most));
        }
        bound + self.overhead
    }

    fn program(&self, program: &Program, roles: &[Vec<u64>], most: [u32; 4]) -> u64 {
        // Longest path over the launches, each as long as its slowest role.
        let mut ends: Vec<u64> = Vec::with_capacity(self.compiled.launches.len());
        for launch in &self.compiled.launches {
            let start =
                launch.after.iter().map(|&l| ends[l as usize] + self.compiled.times.dependent).max().unwrap_or(0);
            let slowest = launch
                .roles
                .clone()
                .map(|r| {
                    let role = &program.roles[r];
                    let ctas = |r: usize| match program.roles[r].ctas {
                        // One after the other, however many CTAs work on each.
                        _ if program.roles[r].collective => 1,
                        CtaCount::FromSplit => most[kind_index(program.roles[r].kind)],
                        CtaCount::Fixed(n) => n,
                        CtaCount::AllBut(_) => self.compiled.times.sms,
                    };
                    // CTAs that may recycle into the role, directly or through others, count as its own.
                    let mut own = ctas(r);
                    let mut into = vec![r];
                    let mut next = 0;
                    while next < into.len() {
                        for other in launch.roles.clone() {
                            if program.roles[other].recycle as usize == into[next] && !into.contains(&other) {
                                own += ctas(other);
                                into.push(other);
                            }
                        }
                        next += 1;
                    }
                    let own = own.min(self.compiled.times.sms);
                    if role.tasks == 0 {
                        0
                    } else if into.len() > 1 {
                        role.work_ps.div_ceil(u128::from(own.max(1) * role.lanes)) as u64
                    } else {
                        roles[r][own as usize]
                    }
                })
                .max()
                .unwrap_or(0);
            ends.push(start + slowest);
        }
        ends.into_iter().max().unwrap_or(0)
    }
}

/// Time of a role's work by CTA count, at full speed, first loads hidden.
fn role_bounds(compiled: &Compiled, program: &Program, r: usize, sms: u32) -> Vec<u64> {
    let role = &program.roles[r];
    let tasks = &program.tasks[role.first as usize..(role.first + role.tasks) as usize];
    let time = |cost: u16| {
        let record = &compiled.costs[usize::from(cost)];
        let form = &record.forms[Form::Whole as usize];
        let held = if record.work == Work::Tile && record.drain != Drain::Overlap { form.out.work } else { 0 };
        form.fixed + form.step * u64::from(record.steps) + held
    };
    let times: Vec<u64> = tasks.iter().map(|t| time(t.cost)).collect();
    let total: u128 = times.iter().map(|&t| u128::from(t)).sum();
    let longest = times.iter().copied().max().unwrap_or(0);
    let uniform = times.iter().all(|&t| t == longest);
    (0..=sms)
        .map(|n| {
            if n == 0 {
                return if tasks.is_empty() { 0 } else { u64::MAX / 4 };
            }
            let workers = (n * role.lanes) as usize;
            match role.claim {
                Claim::Strided if !uniform => (0..workers.min(times.len()))
                    .map(|i| times.iter().skip(i).step_by(workers).sum::<u64>())
                    .max()
                    .unwrap_or(0),
                _ if uniform => times.len().div_ceil(workers) as u64 * longest,
                _ => (total.div_ceil(workers as u128) as u64).max(longest),
            }
        })
        .collect()
}

fn kind_index(kind: RoleKind) -> usize {
    RoleKind::ALL.iter().position(|&k| k == kind).unwrap_or(0)
}

/// Which CTA counts a split may give each role: (at least, at most).
fn legal(compiled: &Compiled) -> ([u32; 4], [u32; 4]) {
    let (mut low, mut high) = ([0; 4], [0; 4]);
    for program in &compiled.programs {
        for role in program.roles.iter().filter(|r| r.ctas == CtaCount::FromSplit && r.tasks > 0) {
            let k = kind_index(role.kind);
            high[k] = compiled.times.sms;
            low[k] = 1;
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

/// Searches the best split.
///
/// `start` splits (the published one, say) are simulated first. `progress` is told the number of simulations done.
///
/// # Errors
/// [`SimError`] when no split runs at all.
pub fn tune(
    simulation: &Simulation,
    start: &[RoleSplit],
    config: &TuneConfig,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Tuned, SimError> {
    let compiled = simulation.compiled();
    let sms = compiled.times.sms;
    let bound = LowerBound::new(simulation);
    let (low, high) = legal(compiled);
    let splits = count_splits(low, high, sms);
    let mut search = Search {
        simulation,
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
    first.push(whole.candidate(sms));
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
        let lowest = simulation.timed(lowest);
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
            if simulation.timed(lowest) >= best {
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

struct Search<'a> {
    simulation: &'a Simulation,
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
        let times: Vec<Result<u64, SimError>> =
            fresh.par_iter().map(|&counts| self.simulation.time_ps(&split_of(counts))).collect();
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
        (self.progress)(self.tried.len());
    }

    /// Local search: moves CTAs between roles in shrinking steps while that helps.
    fn descend(&mut self, low: [u32; 4], high: [u32; 4], sms: u32) {
        for step in [16, 8, 4, 2, 1] {
            loop {
                let Some((before, _, counts)) = self.best else { return };
                let mut moves = Vec::new();
                for to in 0..4 {
                    // From idle SMs, or from another role.
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
                self.simulate(&moves);
                if self.tried.len() >= self.budget || self.best.is_none_or(|b| b.0 >= before) {
                    break;
                }
            }
        }
    }
}

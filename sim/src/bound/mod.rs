//! Lower bounds on the time of a split: no simulation of it can be faster.
//!
//! Four arguments, each a consequence of how the engine shares and hands out work:
//!
//! - *A resource* with capacity `C` carries at most `C`: all bytes that the ranks' tasks take from it, over `C`.
//! - *A role* of `n` workers whose tasks hold them for `t` at full speed: the worker with most tasks needs their sum.
//! - *The power of the chip* has a base demand `B` that slows down with the flows. At any time the fastest flow that
//!   crosses it runs at some `theta`, and `B * theta + (what the flows get) <= C`. Over a run that moves `W` in all and
//!   whose busiest worker spends `S` in such flows at full speed, `C * time >= B * S + W`. `S` falls with the number of
//!   computing CTAs, so this is the droop of the clock as a bound: more SMs help, but less and less.
//! - *Chains of dependent tasks* (`chain`): work that can begin no earlier than `x` and has at least `y` behind it fits
//!   into the time less `x + y` (`need`), for each of the arguments above.
//!
//! What binds a run (`binding`) is the first two arguments for that run's own CTAs, and the proxies.

mod binding;
mod chain;
mod need;

pub(crate) use binding::shared;
pub(crate) use chain::main_ps;

use crate::compile::{Compiled, CostRecord, Form, NONE, Program, PublishC, ResourceKind, RoleC, Work};
use crate::engine::UNWATCHED;
use crate::predict::Simulation;
use chain::Chains;
use need::Need;
use std::ops::Range;
use tilewire_kernels::schedule::{Claim, CtaCount, Drain};
use tilewire_kernels::{Offset, RoleKind};

const PS_PER_S: u128 = 1_000_000_000_000;

/// Lower bounds on the time of any split of a compiled schedule.
pub struct LowerBound<'a> {
    compiled: &'a Compiled,
    /// Of the shared resources and the proxies, the same for all splits, ps.
    fixed: u64,
    /// By program and role.
    roles: Vec<Vec<RoleWork>>,
    /// The same with chains, and what roles need then, by program and role; without where chains bound nothing.
    chained: Option<(u64, Vec<Vec<Vec<Need>>>)>,
    /// Share of the nominal compute work that the fastest rank has: noise makes ranks differ.
    clock: f64,
    /// What the protocol adds to every run, ps.
    added: u64,
}

/// What the tasks of a role need, by number of CTAs.
struct RoleWork {
    /// Time that the busiest worker is held, full speed, ps.
    held: Vec<u64>,
    /// The part of it in flows that need the chip's power.
    powered: Vec<u64>,
    /// Sums over all tasks.
    held_sum: u128,
    powered_sum: u128,
    /// FLOP (of power) of all tasks.
    flops: u128,
}

impl<'a> LowerBound<'a> {
    /// Prepares bounds for all CTA counts.
    pub fn new(simulation: &'a Simulation) -> Self {
        let compiled = simulation.compiled();
        let shared = simulation.shared().iter().map(|&(_, ps)| ps).max().unwrap_or(0);
        let roles = compiled
            .programs
            .iter()
            .map(|program| (0..program.roles.len()).map(|r| RoleWork::of(compiled, program, r)).collect())
            .collect();
        let chained = Chains::new(compiled).map(|chains| {
            let first = |program: usize| compiled.program_of.iter().position(|&p| p as usize == program);
            let ranks = (0..compiled.programs.len()).map(|program| first(program).unwrap_or(0));
            let needs = ranks.map(|rank| need::of_roles(compiled, &chains, rank)).collect();
            (need::of_resources(compiled, &chains).max(chains.longest), needs)
        });
        Self { compiled, fixed: shared, roles, chained, clock: fastest_clock(compiled), added: simulation.added_ps() }
    }

    /// No split with at most these CTAs per role (in the order of [`RoleKind::ALL`]) is faster than this, ps; the time is
    /// that of [`Simulation::time_ps`].
    ///
    /// What a rank's CTAs do lies between its own launch and its own end. What ranks do for each other may take from the
    /// first one's launch until the last one's end. Where clocks are the ranks' own, that is longer than any rank's time by
    /// the delay of the late one at most.
    pub fn at_most(&self, most: [u32; 4]) -> u64 {
        let from_launch = |ps: u64| (ps as f64 * self.clock) as u64 + self.compiled.times.launch;
        let programs = self.compiled.programs.iter().zip(&self.roles);
        let own = programs.map(|(program, roles)| self.program(program, roles, most)).max().unwrap_or(0);
        let of_all = from_launch(self.fixed).max(self.chained(most));
        let apart = if self.compiled.isolated { self.compiled.late.ps } else { 0 };
        from_launch(own).max(of_all.saturating_sub(apart)) + self.added
    }

    /// The bound of chains; there is none with noise.
    fn chained(&self, most: [u32; 4]) -> u64 {
        let Some((fixed, needs)) = &self.chained else { return 0 };
        let mut bound = *fixed;
        for (program, needs) in self.compiled.programs.iter().zip(needs) {
            for launch in self.compiled.launches.iter().filter(|launch| !launch.before_clock) {
                for r in launch.roles.clone().filter(|&r| program.roles[r].tasks > 0) {
                    let (ctas, lanes, _) = self.workers(program, launch.roles.clone(), r, most);
                    let workers = u128::from(ctas.max(1)) * u128::from(lanes);
                    for need in &needs[r] {
                        let held = need.held.div_ceil(workers) as u64;
                        let powered = need.powered.div_ceil(workers) as u64;
                        bound = bound.max(need.outside + held.max(self.droop(powered, need.flops)));
                    }
                }
            }
        }
        bound
    }

    /// Longest path over the launches, each as long as its slowest role.
    fn program(&self, program: &Program, works: &[RoleWork], most: [u32; 4]) -> u64 {
        let mut ends: Vec<u64> = Vec::with_capacity(self.compiled.launches.len());
        for launch in &self.compiled.launches {
            if launch.before_clock {
                ends.push(0);
                continue;
            }
            let timed = |&&l: &&u32| !self.compiled.launches[l as usize].before_clock;
            let after = launch.after.iter().filter(timed).map(|&l| ends[l as usize] + self.compiled.times.dependent);
            let start = after.max().unwrap_or(0);
            let slowest = launch.roles.clone().map(|r| self.role(program, launch.roles.clone(), works, r, most));
            ends.push(start + slowest.max().unwrap_or(0));
        }
        ends.into_iter().max().unwrap_or(0)
    }

    fn role(&self, program: &Program, launch: Range<usize>, works: &[RoleWork], r: usize, most: [u32; 4]) -> u64 {
        let (role, work) = (&program.roles[r], &works[r]);
        if role.tasks == 0 {
            return 0;
        }
        let (own, lanes, helped) = self.workers(program, launch, r, most);
        let (held, powered) = if helped {
            let workers = u128::from(own.max(1)) * u128::from(lanes);
            (work.held_sum.div_ceil(workers) as u64, work.powered_sum.div_ceil(workers) as u64)
        } else {
            (work.held[own as usize], work.powered[own as usize])
        };
        held.max(self.droop(powered, work.flops))
    }

    /// CTAs that may work on a role's tasks, the most lanes of one, and whether other roles' CTAs are among them.
    fn workers(&self, program: &Program, launch: Range<usize>, r: usize, most: [u32; 4]) -> (u32, u32, bool) {
        let sms = self.compiled.times.sms;
        let ctas = |r: usize| match program.roles[r].ctas {
            // One after the other, however many CTAs work on each.
            _ if program.roles[r].collective => 1,
            CtaCount::FromSplit => most[kind_index(program.roles[r].kind)],
            CtaCount::Fixed(n) => n,
            CtaCount::AllBut(_) => sms,
        };
        let into = workers_of(program, launch, r);
        let own: u32 = into.iter().map(|&r| ctas(r)).sum();
        let lanes = into.iter().map(|&r| program.roles[r].lanes).max().unwrap_or(1);
        (own.min(sms), lanes, into.len() > 1)
    }

    /// Time in which the chip's power lets `flops` be done by workers of which one needs `powered` at full speed.
    fn droop(&self, powered: u64, flops: u128) -> u64 {
        let (capacity, base) = self.compiled.capacities[ResourceKind::Chip.index(self.compiled.times.rails) as usize];
        if flops == 0 || powered >= UNREACHABLE {
            return powered;
        }
        ((u128::from(base) * u128::from(powered) + flops * PS_PER_S) / u128::from(capacity.max(1))) as u64
    }
}

/// Roles of a launch whose workers may do a role's tasks: itself, and those that recycle into it, directly or through others.
fn workers_of(program: &Program, launch: Range<usize>, r: usize) -> Vec<usize> {
    let mut into = vec![r];
    let mut next = 0;
    while next < into.len() {
        for other in launch.clone() {
            if program.roles[other].recycle as usize == into[next] && !into.contains(&other) {
                into.push(other);
            }
        }
        next += 1;
    }
    into
}

/// Share of the nominal compute work that the fastest rank has: noise makes ranks differ.
fn fastest_clock(compiled: &Compiled) -> f64 {
    compiled.noise.as_ref().map_or(1.0, |noise| {
        (0..compiled.ranks.len()).map(|rank| noise.slowdown(rank)).fold(1.0, f64::min) * (1.0 - 1e-9)
    })
}

/// Longer than any run: work without workers.
const UNREACHABLE: u64 = u64::MAX / 4;

impl RoleWork {
    fn of(compiled: &Compiled, program: &Program, r: usize) -> Self {
        let role = &program.roles[r];
        let tasks = &program.tasks[role.first as usize..(role.first + role.tasks) as usize];
        let by_cost = held_by_cost(compiled, role);
        let column = |pick: fn(&(u64, u64, u128)) -> u64| -> Vec<u64> {
            tasks.iter().map(|t| pick(&by_cost[usize::from(t.cost)])).collect()
        };
        let (held, powered) = (column(|cost| cost.0), column(|cost| cost.1));
        let sum = |times: &[u64]| times.iter().map(|&t| u128::from(t)).sum();
        Self {
            held_sum: sum(&held),
            powered_sum: sum(&powered),
            flops: tasks.iter().map(|t| by_cost[usize::from(t.cost)].2).sum(),
            held: busiest(&held, role, compiled.times.sms),
            powered: busiest(&powered, role, compiled.times.sms),
        }
    }
}

/// Whether a CTA waits for its store before it takes another task.
fn waits_for_store(record: &CostRecord) -> bool {
    record.work == Work::Tile && record.drain != Drain::Overlap
}

/// By cost record, of a task of a role: time that a CTA is held, time in flows that need power, FLOP.
fn held_by_cost(compiled: &Compiled, role: &RoleC) -> Vec<(u64, u64, u128)> {
    let of = |record: &CostRecord| {
        let form = &record.forms[Form::Whole as usize];
        let main = main_ps(&compiled.times, record);
        let stored = if waits_for_store(record) { form.out.work } else { 0 };
        let power = power_of(compiled, form.main);
        let powered = if power > 0 { main } else { 0 };
        // A block's start needs no power.
        (role.block_ps + main + stored, powered, u128::from(power) * u128::from(powered) / PS_PER_S)
    };
    compiled.costs.iter().map(of).collect()
}

/// FLOP/s that flows of a class take from the power of their own chip.
fn power_of(compiled: &Compiled, class: u32) -> u64 {
    if class == NONE {
        return 0;
    }
    let demands = compiled.classes[class as usize].iter();
    demands.filter(|(_, kind, _)| *kind == ResourceKind::Chip).map(|&(_, _, rate)| rate).sum()
}

/// Time of the busiest worker with up to so many CTAs, from 0 to `sms`: the least over all counts of 1 or more.
fn busiest(times: &[u64], role: &RoleC, sms: u32) -> Vec<u64> {
    let total: u128 = times.iter().map(|&t| u128::from(t)).sum();
    let longest = times.iter().copied().max().unwrap_or(0);
    let uniform = times.iter().all(|&t| t == longest);
    let with = |ctas: u32| {
        if ctas == 0 {
            return if times.is_empty() { 0 } else { UNREACHABLE };
        }
        let workers = (ctas * role.lanes) as usize;
        match role.claim {
            _ if uniform && role.restarts.is_empty() => times.len().div_ceil(workers) as u64 * longest,
            Claim::Strided => {
                let starts = std::iter::once(0).chain(role.restarts.iter().map(|&restart| restart as usize));
                let mut of = vec![0; workers.min(times.len())];
                let ends = starts.clone().skip(1).chain(std::iter::once(times.len()));
                for (start, end) in starts.zip(ends) {
                    times[start..end].iter().enumerate().for_each(|(i, time)| of[i % workers] += time);
                }
                of.into_iter().max().unwrap_or(0)
            }
            Claim::Ticket | Claim::Ready { .. } => (total.div_ceil(workers as u128) as u64).max(longest),
        }
    };
    // More CTAs can hold the busiest one longer: strided tasks of unequal times meet in other ways. A bound for all
    // counts up to one must hold for the best of them.
    let least = (1..=sms).scan(UNREACHABLE, |least, ctas| {
        *least = with(ctas).min(*least);
        Some(*least)
    });
    std::iter::once(with(0)).chain(least).collect()
}

/// By kind, the largest, over all ranks, of what all tasks take from a resource over its capacity, ps.
fn resources(compiled: &Compiled) -> Vec<u64> {
    let per_rank = ResourceKind::count(compiled.times.rails) as usize;
    let work: Vec<Vec<u128>> = compiled.programs.iter().map(|program| work_by_class(compiled, program)).collect();
    let mut loads = vec![0_u128; compiled.ranks.len() * per_rank];
    for (&rank, &program) in compiled.ranks.iter().zip(&compiled.program_of) {
        for (class, &work) in compiled.classes.iter().zip(&work[program as usize]).filter(|(_, work)| **work > 0) {
            for &(offset, kind, rate) in class {
                let target = compiled.folded.number(compiled.folded.at(rank, offset));
                loads[target * per_rank + kind.index(compiled.times.rails) as usize] += u128::from(rate) * work;
            }
        }
    }
    let mut times = vec![0; per_rank];
    for rank in loads.chunks(per_rank) {
        for ((time, load), (capacity, _)) in times.iter_mut().zip(rank).zip(&compiled.capacities) {
            *time = (*time).max((load / u128::from((*capacity).max(1))) as u64);
        }
    }
    times
}

/// Picoseconds at full speed of all flows of each class.
fn work_by_class(compiled: &Compiled, program: &Program) -> Vec<u128> {
    let mut work = vec![0_u128; compiled.classes.len()];
    let mut add = |class: u32, ps: u64| {
        if class != NONE {
            work[class as usize] += u128::from(ps);
        }
    };
    for (_, task) in compiled.timed_tasks(program) {
        let record = &compiled.costs[usize::from(task.cost)];
        let form = &record.forms[Form::Whole as usize];
        add(form.main, main_ps(&compiled.times, record));
        add(form.out.class, form.out.work);
        if task.put != NONE {
            let flow = program.puts[task.put as usize].flow;
            add(flow.class, flow.work);
        }
    }
    work
}

/// The busiest thread of all proxies.
///
/// Before the last message of a queue starts, all commands of the queue were taken and posted, and as many completions
/// handled as commands exceed the cap in flight. Every completion and every immediate that raises a flag whose adds
/// somebody waits for, all of them, is handled before the run ends. For the other completions nobody waits.
fn proxies(compiled: &Compiled) -> u64 {
    let times = &compiled.times;
    let threads = times.threads.max(1) as usize;
    let mut busy = vec![0_u64; compiled.ranks.len() * threads];
    for (number, (&rank, &program)) in compiled.ranks.iter().zip(&compiled.program_of).enumerate() {
        let program = &compiled.programs[program as usize];
        let queues = program.puts.iter().map(|put| usize::from(put.queue) + 1).max().unwrap_or(0);
        // Commands, and completions that are waited for.
        let mut commands: Vec<(u64, u64)> = vec![(0, 0); queues];
        let all_awaited = |program: &Program, flag: u32| !matches!(program.countdown[flag as usize], 0 | UNWATCHED);
        let puts = compiled.timed_tasks(program).filter(|(_, task)| task.put != NONE);
        for put in puts.map(|(_, task)| &program.puts[task.put as usize]) {
            let (posts, awaited) = &mut commands[usize::from(put.queue)];
            *posts += 1;
            *awaited += u64::from(put.sent != NONE && all_awaited(program, put.sent));
            let target = compiled.folded.number(compiled.folded.at(rank, Offset { dn: put.dn, dg: put.dg }));
            let receiver = &compiled.programs[compiled.program_of[target] as usize];
            if put.publish == PublishC::Proxy && !compiled.stale_arrivals && all_awaited(receiver, put.arrived) {
                busy[target * threads + usize::from(put.queue) % threads] += times.completion;
            }
        }
        for (queue, (posts, awaited)) in commands.into_iter().enumerate() {
            let completions = posts.saturating_sub(u64::from(times.in_flight)).max(awaited);
            busy[number * threads + queue % threads] += posts * times.post + completions * times.completion;
        }
    }
    busy.into_iter().max().unwrap_or(0)
}

/// Position of a role in [`RoleKind::ALL`].
pub(crate) fn kind_index(kind: RoleKind) -> usize {
    RoleKind::ALL.iter().position(|&k| k == kind).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(restarts: Vec<u32>) -> RoleC {
        RoleC {
            kind: RoleKind::Compute,
            ctas: CtaCount::FromSplit,
            lanes: 1,
            claim: Claim::Strided,
            recycle: NONE,
            launch: 0,
            first: 0,
            tasks: 6,
            restarts,
            work_ps: 0,
            collective: false,
            block_ps: 0,
        }
    }

    #[test]
    fn more_ctas_never_raise_the_bound_of_a_strided_role() {
        // With three workers one of them gets both long tasks, 20; with two each gets one, 12.
        let times = [10, 1, 1, 10, 1, 1];
        assert_eq!(busiest(&times, &strided(vec![]), 4), [UNREACHABLE, 24, 12, 12, 11]);
    }

    #[test]
    fn strides_that_begin_anew_give_the_first_worker_one_task_more() {
        // Two and four tasks: four workers take two at the most, and two of them both; six in a row take two as well, but
        // three workers one more.
        let times = [5; 6];
        assert_eq!(busiest(&times, &strided(vec![2]), 4), [UNREACHABLE, 30, 15, 15, 10]);
        assert_eq!(busiest(&times, &strided(vec![]), 4), [UNREACHABLE, 30, 15, 10, 10]);
    }
}

//! What has to fit between heads and tails.
//!
//! All work whose heads are at least `x` and whose tails are at least `y` has to be done in a run's time less `x + y`: for
//! every pair of thresholds, what a resource carries or CTAs work on then takes at least that work over the capacity.

use super::chain::{Chains, Window, main_ps};
use super::{held_by_cost, waits_for_store};
use crate::compile::{Compiled, Form, NONE, ResourceKind, RoleC};

/// Thresholds that are tried, of heads and of tails.
const THRESHOLDS: usize = 16;

/// Loads are summed in units of 2^20 byte picoseconds per second, rounded down, so that they fit a word.
const LOAD_SHIFT: u32 = 20;

/// Work of some tasks of a role, and the time that is left outside.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    /// Heads before and tails behind it, ps.
    pub outside: u64,
    /// Time that CTAs are held, ps.
    pub held: u128,
    /// The part of it in flows that need the chip's power, ps.
    pub powered: u128,
    /// FLOP of power.
    pub flops: u128,
}

/// Values of which every `1 / THRESHOLDS` lies between two neighbours, the least one included.
fn thresholds(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut all: Vec<u64> = values.collect();
    all.sort_unstable();
    let mut chosen: Vec<u64> = (0..THRESHOLDS).filter_map(|i| all.get(i * all.len() / THRESHOLDS)).copied().collect();
    chosen.dedup();
    chosen
}

/// The largest bound of a shared resource, ps.
pub(super) fn of_resources(c: &Compiled, chains: &Chains) -> u64 {
    let per_rank = ResourceKind::count(c.times.rails) as usize;
    let mut loads: Vec<Vec<(Window, u64)>> = vec![Vec::new(); c.ranks.len() * per_rank];
    for (rank, &program) in c.program_of.iter().enumerate() {
        let program = &c.programs[program as usize];
        for (t, task) in c.timed_tasks(program) {
            let g = chains.task0[rank] + t;
            let record = &c.costs[usize::from(task.cost)];
            let form = &record.forms[Form::Whole as usize];
            let mut add = |class: u32, work: u64, window: Window| {
                let demands = if class == NONE { &[][..] } else { &c.classes[class as usize][..] };
                for &(offset, kind, rate) in demands {
                    let target = c.folded.number(c.folded.at(c.ranks[rank], offset));
                    let load = (u128::from(rate) * u128::from(work)) >> LOAD_SHIFT;
                    loads[target * per_rank + kind.index(c.times.rails) as usize].push((window, load as u64));
                }
            };
            add(form.main, main_ps(&c.times, record), chains.main[g]);
            if form.deferred.class == NONE {
                add(form.out.class, form.out.work, chains.out[g]);
            }
            if task.put != NONE {
                let flow = program.puts[task.put as usize].flow;
                add(flow.class, flow.work, chains.message[g]);
            }
        }
    }
    let bounds = loads.iter_mut().enumerate().map(|(i, loads)| {
        let capacity = u128::from(c.capacities[i % per_rank].0.max(1));
        loads.sort_unstable_by_key(|(window, _)| std::cmp::Reverse(window.head));
        let tails = thresholds(loads.iter().map(|(window, _)| window.tail));
        let with_tail = |y: u64| {
            let (mut sum, mut best) = (0_u128, 0);
            for &(window, load) in loads.iter().filter(|(window, _)| window.tail >= y) {
                sum += u128::from(load);
                best = best.max(window.head + ((sum << LOAD_SHIFT) / capacity) as u64 + y);
            }
            best
        };
        tails.into_iter().map(with_tail).max().unwrap_or(0)
    });
    bounds.max().unwrap_or(0)
}

/// What the CTAs of each role of a rank need, by role.
pub(super) fn of_roles(c: &Compiled, chains: &Chains, rank: usize) -> Vec<Vec<Need>> {
    let program = &c.programs[c.program_of[rank] as usize];
    let of_role = |role: &RoleC| {
        let by_cost = held_by_cost(c, role);
        let mut tasks: Vec<(Window, u16)> = (role.first..role.first + role.tasks)
            .map(|t| {
                let g = chains.task0[rank] + t as usize;
                let cost = program.tasks[t as usize].cost;
                let record = &c.costs[usize::from(cost)];
                let behind = if waits_for_store(record) { chains.out[g] } else { chains.main[g] };
                (Window { head: chains.main[g].head, tail: behind.tail }, cost)
            })
            .collect();
        tasks.sort_unstable_by_key(|(window, _)| std::cmp::Reverse(window.head));
        let every = tasks.len().div_ceil(THRESHOLDS).max(1);
        let mut needs = Vec::new();
        for y in thresholds(tasks.iter().map(|(window, _)| window.tail)) {
            let (mut sum, mut any) = (Need::default(), false);
            for (i, &(window, cost)) in tasks.iter().enumerate() {
                if window.tail >= y {
                    let (held, powered, flops) = by_cost[usize::from(cost)];
                    sum.held += u128::from(held);
                    sum.powered += u128::from(powered);
                    sum.flops += flops;
                    any = true;
                }
                if any && ((i + 1) % every == 0 || i + 1 == tasks.len()) {
                    needs.push(Need { outside: window.head + y, ..sum });
                }
            }
        }
        needs
    };
    program.roles.iter().map(of_role).collect()
}

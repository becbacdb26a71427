//! Flag arithmetic: what is added to a flag against what is asked of it.

use super::compact::{Compact, Raiser, SHOWN};
use super::finding::{Finding, FlagAt, Problem};
use super::progress::name_of;
use crate::schedule::Schedule;

/// What is known of one flag.
#[derive(Clone, Copy, Default)]
struct Sum {
    adds: u64,
    /// Highest level that a task waits for; 0 when nobody waits.
    level: u32,
    /// A task that waits for that level.
    waiter: u32,
    /// A task that raises it.
    raiser: u32,
    /// A task both waits for it and raises it: a counter of stages, whose last add nobody waits for.
    chain: bool,
    /// Smallest single add.
    smallest: u32,
}

/// Findings about flags.
pub(super) fn check(schedule: &Schedule, compact: &Compact, findings: &mut Vec<Finding>) {
    let mut sums = vec![Sum::default(); compact.flags_per_class as usize * compact.classes.len()];
    let mut raisers = vec![[false; 3]; schedule.flags.len()];
    let mut awaited = vec![false; schedule.flags.len()];
    for task in 0..compact.tasks.len() as u32 {
        for signal in compact.signals_of(task) {
            let sum = &mut sums[signal.flag as usize];
            sum.adds += u64::from(signal.add);
            sum.raiser = task;
            sum.smallest = if sum.smallest == 0 { signal.add } else { sum.smallest.min(signal.add) };
            raisers[compact.family_of(signal.flag).0][signal.raiser as usize] = true;
        }
        for wait in compact.waits_of(task) {
            let wait = compact.waits[wait];
            awaited[compact.family_of(wait.flag).0] = true;
            for i in 0..wait.count {
                let sum = &mut sums[(wait.flag + i * wait.stride) as usize];
                if wait.at_least > sum.level {
                    (sum.level, sum.waiter) = (wait.at_least, task);
                }
            }
        }
        for signal in compact.signals_of(task) {
            let waits = compact.waits_of(task).any(|wait| super::progress::hits(&compact.waits[wait], signal.flag));
            sums[signal.flag as usize].chain |= waits;
        }
    }
    for (family, kinds) in raisers.iter().enumerate() {
        let names: Vec<&str> = [Raiser::Sm, Raiser::Nic, Raiser::Host]
            .into_iter()
            .filter(|&raiser| kinds[raiser as usize])
            .map(Raiser::name)
            .collect();
        if names.len() > 1 {
            let family = schedule.flags[family].name.clone();
            findings.push(Finding::fatal(None, Problem::MixedRaisers { family, raisers: names.join(" and ") }));
        }
        // Of a family that some wait for, single flags may be raised in vain: an expert that gets no token from a rank.
        if kinds[Raiser::Sm as usize] && !awaited[family] {
            let family = schedule.flags[family].name.clone();
            findings.push(Finding::hazard(None, Problem::Unawaited { family }));
        }
    }
    let mut shown = [0; 3];
    let mut report = |kind: usize, finding: &dyn Fn() -> Finding| {
        shown[kind] += 1;
        if shown[kind] <= SHOWN {
            findings.push(finding());
        }
    };
    for (flag, sum) in sums.iter().enumerate() {
        if sum.adds == 0 && sum.level == 0 {
            continue;
        }
        let (family, slot) = compact.family_of(flag as u32);
        let at = || FlagAt {
            rank: compact.classes[flag / compact.flags_per_class as usize],
            family: schedule.flags[family].name.clone(),
            slot,
        };
        let [_, nic, host] = raisers[family];
        let (have, need) = (sum.adds, sum.level);
        let spare = if sum.chain { u64::from(sum.smallest) } else { 0 };
        let (waiter, raiser) = (sum.waiter, sum.raiser);
        let named = |task: u32, problem: Problem| Finding::fatal(Some(name_of(schedule, compact, task)), problem);
        if nic && have > 1 {
            report(0, &|| named(raiser, Problem::ArrivedAgain { flag: at(), have }));
        }
        if have < u64::from(need) {
            report(1, &|| named(waiter, Problem::Unreachable { flag: at(), have, need }));
        } else if need > 0 && have > u64::from(need) + spare && !host {
            report(2, &|| named(waiter, Problem::OverSatisfied { flag: at(), have, need }));
        }
    }
}

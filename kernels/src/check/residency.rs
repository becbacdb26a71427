//! Do the CTAs that run at the same time fit on the SMs?
//!
//! CTAs are persistent: one that finds no SM never starts, and the others wait for it. Launches that no `after` edge
//! orders may run together; their CTAs share the SMs. A role that takes all SMs takes what is left, and one at least.

use super::finding::{Finding, Problem};
use crate::schedule::{CtaCount, Role, RoleSplit, Schedule};

/// Compares the CTAs of launches that may overlap with the SMs of a GPU: a number that an architecture's name does not
/// tell.
pub fn check_residency(schedule: &Schedule, split: &RoleSplit, sms: u32) -> Option<Finding> {
    let count = schedule.launches.len();
    // before[b][a]: launch a ends before launch b begins. `after` leads to earlier launches only.
    let mut before = vec![vec![false; count]; count];
    for (b, launch) in schedule.launches.iter().enumerate() {
        for &a in launch.after.iter().filter(|&&a| a < b) {
            before[b][a] = true;
            let earlier = before[a].clone();
            before[b].iter_mut().zip(earlier).for_each(|(known, also)| *known |= also);
        }
    }
    let ctas: Vec<u64> = schedule
        .launches
        .iter()
        .map(|launch| {
            let of = |role: &Role| match role.ctas {
                CtaCount::FromSplit => split.get(role.kind),
                CtaCount::Fixed(ctas) => ctas,
                CtaCount::AllBut(_) => 1,
            };
            launch.roles.iter().map(|role| u64::from(of(role))).sum()
        })
        .collect();
    let together = heaviest(&before, &ctas, &(0..count).collect::<Vec<_>>());
    let have: u64 = together.iter().map(|&launch| ctas[launch]).sum();
    if have <= u64::from(sms) {
        return None;
    }
    let launches = together.iter().map(|&launch| schedule.launches[launch].name.clone()).collect();
    Some(Finding::fatal(None, Problem::TooManyCtas { launches, have, sms }))
}

/// The launches with most CTAs of which no two are ordered.
///
/// Branches on the first launch that is ordered with another one; schedules are chains with a few launches side by
/// side, so that one of the branches is short.
fn heaviest(before: &[Vec<bool>], ctas: &[u64], from: &[usize]) -> Vec<usize> {
    let ordered = |a: usize, b: usize| before[a][b] || before[b][a];
    let Some(&pivot) = from.iter().find(|&&a| from.iter().any(|&b| ordered(a, b))) else { return from.to_vec() };
    let beside: Vec<usize> = from.iter().copied().filter(|&b| !ordered(pivot, b)).collect();
    let without: Vec<usize> = from.iter().copied().filter(|&b| b != pivot).collect();
    let weight = |set: &[usize]| set.iter().map(|&launch| ctas[launch]).sum::<u64>();
    let (with, without) = (heaviest(before, ctas, &beside), heaviest(before, ctas, &without));
    if weight(&with) >= weight(&without) { with } else { without }
}

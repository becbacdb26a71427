//! Which rank comes late, and what has ended before the clock of an isolated launch starts.
//!
//! ```text
//!  all ranks    helper launches ─▶ barrier, pause ─▶ clock ─ host ─▶ launch ───────────────── end
//! ```
//!
//! Each rank's event pair starts with its own launch command; the largest time of any rank is shown.

use super::units::ps_from_us;
use crate::machine::Machine;
use crate::noise::Noise;
use crate::predict::Protocol;
use tilewire_kernels::Schedule;
use tilewire_kernels::schedule::CtaCount;

/// How late ranks command their launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Late {
    /// The rank that comes late under noise, drawn by its seed.
    pub rank: usize,
    /// Its delay, ps; 0 without noise.
    pub ps: u64,
}

impl Late {
    pub(super) fn new(machine: &Machine, noise: Option<&Noise>, ranks: usize) -> Self {
        noise.map_or_else(Self::default, |noise| Self {
            rank: noise.late_rank(ranks),
            ps: ps_from_us(machine.noise.late_rank_us.value),
        })
    }

    /// Delay of a rank, ps.
    pub fn of(&self, rank: usize) -> u64 {
        if rank == self.rank { self.ps } else { 0 }
    }
}

/// By launch: whether it has ended on every rank before the clock starts. So have those that the fused kernel, the first
/// launch with CTAs from the split, comes after, when launches are timed one by one.
pub(super) fn before_clock(schedule: &Schedule, protocol: Protocol) -> Vec<bool> {
    let launches = &schedule.launches;
    let mut before = vec![false; launches.len()];
    let from_split = |l: &usize| launches[*l].roles.iter().any(|role| role.ctas == CtaCount::FromSplit);
    let fused = (0..launches.len()).find(from_split).filter(|_| protocol.is_isolated());
    let mut next: Vec<usize> = fused.map_or_else(Vec::new, |fused| launches[fused].after.clone());
    while let Some(launch) = next.pop() {
        if !std::mem::replace(&mut before[launch], true) {
            next.extend(&launches[launch].after);
        }
    }
    before
}

//! The mean of a loop whose first launches ran on a cold card.

use crate::bound::LowerBound;
use crate::predict::{BINDS, BoundBy};
use crate::{Prediction, RoleReport, SimError, Simulation, WaitReport};
use std::collections::BTreeMap;
use tilewire_kernels::RoleSplit;

/// The simulations of a case that decide what its protocol's loop shows.
#[derive(Clone, Copy)]
pub struct Shown<'a> {
    /// On a card that was idle, where some launches of the loop may have been.
    pub cold: Option<&'a Simulation>,
    /// On a card that has been under load.
    pub later: &'a Simulation,
}

impl Shown<'_> {
    /// What the loop shows for a split, ps.
    ///
    /// # Errors
    /// As [`Simulation::time_ps`].
    pub fn time_ps(self, split: &RoleSplit) -> Result<u64, SimError> {
        let Some(cold) = self.cold else { return self.later.time_ps(split) };
        cold.loop_ps(cold.time_ps(split)?, || self.later.time_ps(split))
    }

    /// As [`Simulation::predict`], and the share that cold launches have in it.
    ///
    /// # Errors
    /// As [`Simulation::predict`].
    pub fn predict(self, split: &RoleSplit) -> Result<(Prediction, f64), SimError> {
        let Some(cold) = self.cold else { return Ok((self.later.predict(split)?, 0.0)) };
        let found = cold.predict(split)?;
        let share = cold.cold_share((found.time_us * 1e6) as u64);
        if share >= 1.0 {
            return Ok((found, share));
        }
        let later = self.later.predict(split)?;
        Ok((if share > 0.0 { found.averaged(&later, share) } else { later }, share))
    }
}

impl Simulation {
    /// What the protocol's loop shows, ps, of which a launch on a cold card, this simulation's, takes `cold_ps`. What a
    /// later one takes is asked only where there are some.
    ///
    /// # Errors
    /// Those of `later_ps`.
    pub fn loop_ps<E>(&self, cold_ps: u64, later_ps: impl FnOnce() -> Result<u64, E>) -> Result<u64, E> {
        let share = self.cold_share(cold_ps);
        if share >= 1.0 { Ok(cold_ps) } else { Ok(mean_ps(share, cold_ps, later_ps()?)) }
    }
}

/// The mean of what `share` of launches and the others show.
fn mean(share: f64, cold: f64, later: f64) -> f64 {
    share * cold + (1.0 - share) * later
}

fn mean_ps(share: f64, cold_ps: u64, later_ps: u64) -> u64 {
    mean(share, cold_ps as f64, later_ps as f64).round() as u64
}

/// Lower bounds of what the loop shows.
pub(crate) struct ShownBound<'a> {
    cold: Option<(&'a Simulation, LowerBound<'a>)>,
    later: LowerBound<'a>,
}

impl<'a> ShownBound<'a> {
    pub fn new(shown: Shown<'a>) -> Self {
        Self { cold: shown.cold.map(|cold| (cold, LowerBound::new(cold))), later: LowerBound::new(shown.later) }
    }

    /// As [`LowerBound::at_most`]. The mean of two times grows with either: a longer cold launch leaves fewer of them.
    pub fn at_most(&self, most: [u32; 4]) -> u64 {
        let later_ps = self.later.at_most(most);
        let Some((cold, bound)) = &self.cold else { return later_ps };
        let cold_ps = bound.at_most(most);
        // That holds where a warm card is no faster.
        if later_ps < cold_ps { later_ps } else { mean_ps(cold.cold_share(cold_ps), cold_ps, later_ps) }
    }
}

impl Prediction {
    /// What the mean over a loop shows, of which `share` ran like this launch on a cold card and the rest like `later`. What is
    /// no sum over time (tasks, events, which resource binds) is that of the larger part.
    #[must_use]
    pub fn averaged(self, later: &Self, share: f64) -> Self {
        let mean = |cold, later| mean(share, cold, later);
        let time_us = mean(self.time_us, later.time_us);
        let compute_only_us = mean(self.compute_only_us, later.compute_only_us);
        let comm_only_us = mean(self.comm_only_us, later.comm_only_us);
        let overlap = (compute_only_us + comm_only_us - time_us) / compute_only_us.min(comm_only_us).max(1e-6);
        let reason = self.overlap_reason.or(later.overlap_reason);
        // Where both lie within, so does the mean, but for rounding.
        let overlap = if reason.is_none() { overlap.clamp(0.0, 1.0) } else { overlap };
        let roles = self.roles.iter().zip(&later.roles).map(|(cold, later)| {
            let busy_us = mean(cold.busy_us, later.busy_us);
            let present_us = f64::from(cold.ctas) * time_us;
            RoleReport {
                busy_us,
                wait_us: mean(cold.wait_us, later.wait_us),
                idle_us: mean(cold.idle_us, later.idle_us),
                utilisation: if present_us == 0.0 { 0.0 } else { busy_us / present_us },
                ..cold.clone()
            }
        });
        let mut waits: BTreeMap<_, (WaitReport, f64)> = BTreeMap::new();
        for (part, of) in [(share, &self.waits), (1.0 - share, &later.waits)] {
            for wait in of {
                let key = (wait.role, wait.flag.clone());
                waits.entry(key).or_insert_with(|| (wait.clone(), 0.0)).1 += part * wait.us;
            }
        }
        let total: f64 = waits.values().map(|(_, us)| us).sum();
        let mut waits: Vec<WaitReport> =
            waits.into_values().map(|(wait, us)| WaitReport { us, share: us / total, ..wait }).collect();
        waits.sort_by(|a, b| b.us.total_cmp(&a.us));
        let roles = roles.collect();
        let bound_us = mean(self.bound_us, later.bound_us);
        let by = if share > 0.5 { [&self.bound_by, &later.bound_by] } else { [&later.bound_by, &self.bound_by] };
        let by = by.into_iter().find(|&by| *by != BoundBy::Latency && bound_us >= BINDS * time_us);
        let bound_by = by.unwrap_or(&BoundBy::Latency).clone();
        let larger = if share > 0.5 { self } else { later.clone() };
        let faster = larger.time_us / time_us;
        Self {
            time_us,
            tflops_per_gpu: larger.tflops_per_gpu * faster,
            compute_only_us,
            comm_only_us,
            overlap,
            overlap_reason: if (0.0..=1.0).contains(&overlap) { None } else { reason },
            exposed_comm_us: time_us - compute_only_us,
            roles,
            waits,
            bound_by,
            bound_us,
            wire_gbs: larger.wire_gbs * faster,
            logical_gbs: larger.logical_gbs * faster,
            ..larger
        }
    }
}

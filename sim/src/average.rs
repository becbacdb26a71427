//! The mean of a loop whose first launches ran on a cold card.

use crate::{Prediction, RoleReport, WaitReport};
use std::collections::BTreeMap;

impl Prediction {
    /// What the mean over a loop shows, of which `share` ran like this launch on a cold card and the rest like `later`. What is
    /// no sum over time (what binds, tasks, events) is that of the larger part.
    #[must_use]
    pub fn averaged(self, later: &Self, share: f64) -> Self {
        let mean = |cold: f64, later: f64| share * cold + (1.0 - share) * later;
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
            wire_gbs: larger.wire_gbs * faster,
            logical_gbs: larger.logical_gbs * faster,
            ..larger
        }
    }
}

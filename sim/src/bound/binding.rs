//! Which resource binds a run: the one with the largest lower bound on its time.

use super::{fastest_clock, proxies, resources, workers_of};
use crate::compile::{Compiled, ResourceKind};
use crate::engine::Run;
use crate::predict::{BoundBy, Simulation};
use tilewire_kernels::RoleKind;

/// Lower bounds that are the same for all splits, ps: by kind of resource, of what ranks share, and of the proxies.
pub(crate) fn shared(compiled: &Compiled) -> Vec<(BoundBy, u64)> {
    let rails = compiled.times.rails;
    let nic = ResourceKind::PcieOut.index(rails);
    let by = |kind: u32| match kind {
        _ if kind >= nic => BoundBy::Nic,
        _ if kind == ResourceKind::Hbm.index(rails) => BoundBy::Hbm,
        _ if kind == ResourceKind::Chip.index(rails) => BoundBy::Compute,
        _ if kind == ResourceKind::Egress.index(rails) => BoundBy::NvlinkEgress,
        _ => BoundBy::NvlinkIngress,
    };
    let resources = (0..).zip(resources(compiled)).map(|(kind, ps)| (by(kind), ps));
    resources.chain([(BoundBy::Proxy, proxies(compiled))]).collect()
}

impl Simulation {
    /// The resource with the largest lower bound on what the clock shows for a run, and that bound in us.
    pub fn bound(&self, run: &Run) -> (BoundBy, f64) {
        let compiled = self.compiled();
        let mut best = (BoundBy::Latency, 0);
        let mut offer = |by: BoundBy, ps: u64| {
            if ps > best.1 {
                best = (by, ps);
            }
        };
        for (r, role) in self.timed_roles(&compiled.programs[0]) {
            let by = if role.kind == RoleKind::Compute { BoundBy::Compute } else { BoundBy::Role(role.kind) };
            let launch = compiled.launches[role.launch as usize].roles.clone();
            let workers = workers_of(&compiled.programs[0], launch, r).into_iter().map(|r| run.workers[r]).sum::<u32>();
            let work = compiled.programs.iter().map(|program| program.roles[r].work_ps).max().unwrap_or(0);
            offer(by, (work / u128::from(workers.max(1))) as u64);
        }
        // What ranks do for each other may begin before the clock of a late one does.
        let apart = if compiled.isolated { compiled.late.ps } else { 0 };
        for (by, ps) in self.shared() {
            offer(by.clone(), ps.saturating_sub(apart));
        }
        (best.0, best.1 as f64 * fastest_clock(compiled) / 1e6)
    }
}

//! Measured timelines: when each task was taken, started, let its CTA go, and ended.
//!
//! The device notes cycles of the SM's own clock, which are cheap to read. A CTA also notes the global timer at its begin
//! and end, which are the same for all SMs: they place its cycles in time.

use crate::lower::Program;
use serde::{Deserialize, Serialize};

/// `CtaTimes` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CtaTimes {
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) begin_cycles: u64,
    pub(crate) end_cycles: u64,
}

impl CtaTimes {
    /// Time of a cycle of this CTA's SM.
    fn ps(&self, cycles: u64, origin_ns: u64) -> u64 {
        let (since, all) =
            (cycles.saturating_sub(self.begin_cycles), self.end_cycles.saturating_sub(self.begin_cycles));
        let ps = u128::from(since) * u128::from(self.end_ns - self.begin_ns) * 1000 / u128::from(all.max(1));
        (self.begin_ns - origin_ns) * 1000 + ps as u64
    }
}

/// `Stamps` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Stamps {
    taken: u64,
    start: u64,
    free: u64,
    end: u64,
    block: u32,
    lane: u32,
    waited_for: u32,
    unused: u32,
}

/// A task of a measured timeline. The fields of the simulator's record, and the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskTime {
    /// Instance: the rank in virtual and cluster mode, 0 in mirror mode.
    pub rank: u32,
    /// Role, over all launches.
    pub role: u32,
    /// CTA of the launch, whatever roles it has gone through.
    pub block: u32,
    /// CTA of the role that the CTA started in.
    pub cta: u32,
    /// Lane of the CTA.
    pub lane: u32,
    /// Number in the role's list.
    pub task: u32,
    /// The CTA took the task, ps from the first CTA's begin; of a tile that is fetched ahead, while the one before runs.
    pub taken: u64,
    /// All start waits were met, ps.
    pub start: u64,
    /// The CTA went on to the next task, ps.
    pub free: u64,
    /// The last write was visible, ps. For a put: it was handed to the proxy.
    pub end: u64,
    /// Flag family and slot of the start that was waited for last; none without a wait.
    pub waited_for: Option<(u32, u32)>,
}

/// The tasks of a run, by when they were taken.
pub(crate) fn task_times(program: &Program, stamps: &[Stamps], ctas: &[CtaTimes]) -> Vec<TaskTime> {
    let origin_ns = ctas.iter().map(|cta| cta.begin_ns).min().unwrap_or(0);
    let mut times = Vec::new();
    let (mut first_block, mut roles_before) = (0, 0);
    for launch in &program.launches {
        let blocks = &ctas[first_block..first_block + launch.starts.len()];
        for (instance, number) in (0..program.instances).flat_map(|i| (0..launch.roles).map(move |r| (i, r))) {
            let role = &program.roles[(launch.first_role + instance * launch.roles + number) as usize];
            for index in role.first_task..role.first_task + role.tasks {
                let stamp = &stamps[index as usize];
                let Some(cta) = blocks.get(stamp.block as usize) else { continue };
                let ps = |cycles: u64| cta.ps(cycles, origin_ns);
                times.push(TaskTime {
                    rank: program.gpu + instance,
                    role: roles_before + number,
                    block: stamp.block,
                    cta: launch.starts[stamp.block as usize].cta,
                    lane: stamp.lane,
                    task: program.tasks[index as usize].number,
                    taken: ps(stamp.taken),
                    start: ps(stamp.start),
                    free: ps(stamp.free),
                    end: ps(stamp.end),
                    waited_for: program.flag_of(stamp.waited_for).map(|(_, family, slot)| (family as u32, slot)),
                });
            }
        }
        first_block += launch.starts.len();
        roles_before += launch.roles;
    }
    times.sort_unstable_by_key(|t| (t.rank, t.taken, t.role, t.task));
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_lie_between_the_moments_of_the_global_timer() {
        let cta = CtaTimes { begin_ns: 1_100, end_ns: 2_100, begin_cycles: 50_000, end_cycles: 51_500 };
        assert_eq!(cta.ps(50_000, 1_000), 100_000);
        assert_eq!(cta.ps(50_750, 1_000), 600_000);
        assert_eq!(cta.ps(51_500, 1_000), 1_100_000);
    }
}

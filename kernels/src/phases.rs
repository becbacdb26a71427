//! The bulk-synchronous form of a fused schedule: the same tasks, but compute and communication take turns.
//!
//! ```text
//! fused             one launch       compute ████████████████      its CTAs do their part beside the others
//!                                    intra   ██▒▒██▒▒██▒▒██
//! bulk-synchronous  launch 0, 1, ..  intra   ████│                 a phase has all SMs; the next begins when it has ended
//!                                    compute     │████████████
//! ```
//!
//! A phase holds every task of its kind, compute or not, that could run by then: with two kinds there are as few phases as
//! flags allow. Tasks keep their waits and signals, so ranks need no barrier between phases beyond a launch's end, and
//! a tile still looks at the flags that it looked at when fused. CTAs do not go over to another phase's roles.

use crate::cluster::Rank;
use crate::kernel::BuildError;
use crate::schedule::{At, CtaCount, GatherEntry, Launch, Op, Role, RoleKind, Schedule, Task, TaskSource};

/// Tasks of the fused launch, by phase.
struct Phased {
    fused: Box<dyn TaskSource>,
    /// By role of the fused launch and task.
    phase_of: Vec<Vec<u32>>,
    /// By launch: roles of the fused one.
    roles: Vec<Vec<usize>>,
}

impl TaskSource for Phased {
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        let role = self.roles[launch][role];
        let mut phases = self.phase_of[role].iter();
        self.fused.tasks(rank, 0, role, &mut |task| {
            if phases.next().is_some_and(|&phase| phase as usize == launch) {
                sink(task);
            }
        });
    }

    fn table(&self, rank: Rank) -> Vec<Option<GatherEntry>> {
        self.fused.table(rank)
    }
}

/// What a task waits for, at whatever gate, and raises; flags are numbered over all families.
struct Step {
    /// Flags and their level.
    waits: Vec<(Vec<usize>, u32)>,
    raises: Vec<(usize, u32)>,
}

/// The bulk-synchronous form.
///
/// # Errors
/// [`BuildError::Unsupported`] for schedules of several launches, and where ranks do not share a skeleton.
pub fn bulk_synchronous(schedule: Schedule) -> Result<Schedule, BuildError> {
    let kernel = crate::kernel(&schedule.kernel).map_or("schedule", crate::Kernel::name);
    let refuse = |what: &str| Err(BuildError::Unsupported { kernel, what: format!("bulk-synchronous: {what}") });
    if !schedule.symmetry.is_full() {
        return refuse("its ranks have different tasks; choose options under which they share a skeleton");
    }
    let [launch] = &schedule.launches[..] else {
        return refuse("it has several launches already; choose options with one");
    };
    let is_compute: Vec<bool> = launch.roles.iter().map(|role| role.kind == RoleKind::Compute).collect();
    let steps = steps(&schedule, launch.roles.len());
    let orders = [true, false].map(|first| phases(&schedule, &steps, &is_compute, first));
    let Some((phase_of, kinds)) = orders.into_iter().flatten().min_by_key(|(_, kinds)| kinds.len()) else {
        return refuse("its tasks wait for each other");
    };
    let of_phase = |phase: usize| -> Vec<usize> {
        let here = |&role: &usize| phase_of[role].contains(&(phase as u32));
        (0..launch.roles.len()).filter(here).collect()
    };
    let roles: Vec<Vec<usize>> = (0..kinds.len()).map(of_phase).collect();
    let launches = roles
        .iter()
        .enumerate()
        .map(|(phase, roles)| Launch {
            name: format!("{phase}_{}", if kinds[phase] { "compute" } else { "communicate" }),
            after: (0..phase).collect(),
            roles: roles
                .iter()
                .map(|&role| {
                    let role = &launch.roles[role];
                    let recycle = role.recycle.and_then(|next| roles.iter().position(|&other| other == next));
                    let ctas = if role.ctas.spared().is_some() { CtaCount::AllBut(0) } else { role.ctas };
                    Role { ctas, recycle, ..role.clone() }
                })
                .collect(),
        })
        .collect();
    Ok(Schedule {
        spec: format!("{} bulk_synchronous", schedule.spec),
        launches,
        source: Box::new(Phased { fused: schedule.source, phase_of, roles }),
        ..schedule
    })
}

/// The tasks of all roles of the one skeleton.
fn steps(schedule: &Schedule, roles: usize) -> Vec<Vec<Step>> {
    let mut bases = Vec::with_capacity(schedule.flags.len());
    let mut flags = 0;
    for family in &schedule.flags {
        bases.push(flags);
        flags += family.slots as usize;
    }
    let step = |task: Task| {
        let number = |flag: crate::schedule::Flag| bases[usize::from(flag.family.0)] + flag.slot as usize;
        let wait = |wait: &crate::schedule::Wait| {
            let base = bases[usize::from(wait.flag.family.0)];
            (wait.slots().map(|slot| base + slot as usize).collect(), wait.at_least)
        };
        // A slot is relative to the rank that waits, and all ranks do the same: what this rank raises elsewhere, another
        // raises here. A multicast raises one word on every rank.
        let mut raises: Vec<(usize, u32)> = task
            .signals
            .iter()
            .map(|signal| (number(signal.flag), signal.add * ranks_of(schedule, signal.to)))
            .collect();
        if let Op::Put { arrived, sent, .. } = &task.op {
            raises.push((number(*arrived), 1));
            raises.extend(sent.map(|sent| (number(sent), 1)));
        }
        Step { waits: task.waits.iter().map(wait).collect(), raises }
    };
    (0..roles)
        .map(|role| {
            let mut steps = Vec::new();
            schedule.for_each_task(Rank { node: 0, gpu: 0 }, 0, role, |task| steps.push(step(task)));
            steps
        })
        .collect()
}

/// How many ranks raise a rank's word when each raises that at this place.
fn ranks_of(schedule: &Schedule, at: At) -> u32 {
    match at {
        At::Offset(_) => 1,
        At::AllLocal => u32::from(schedule.cluster.gpus_per_node),
    }
}

/// Phase of every task, and whether each phase computes; none if some task can never run.
fn phases(
    schedule: &Schedule,
    steps: &[Vec<Step>],
    is_compute: &[bool],
    compute_first: bool,
) -> Option<(Vec<Vec<u32>>, Vec<bool>)> {
    const NEVER: u32 = u32::MAX;
    let flags: usize = schedule.flags.iter().map(|family| family.slots as usize).sum();
    let mut values = vec![0_u32; flags];
    let mut phase_of: Vec<Vec<u32>> = steps.iter().map(|steps| vec![NEVER; steps.len()]).collect();
    let mut left: usize = steps.iter().map(Vec::len).sum();
    let (mut kinds, mut compute, mut idle) = (Vec::new(), compute_first, 0);
    while left > 0 && idle < 2 {
        let before = left;
        // Lists are in an order in which their tasks can run, so a few passes do.
        loop {
            let at = left;
            for (role, steps) in steps.iter().enumerate().filter(|&(role, _)| is_compute[role] == compute) {
                for (task, step) in steps.iter().enumerate() {
                    let met = |(flags, level): &(Vec<usize>, u32)| flags.iter().all(|&flag| values[flag] >= *level);
                    if phase_of[role][task] == NEVER && step.waits.iter().all(met) {
                        phase_of[role][task] = kinds.len() as u32;
                        step.raises.iter().for_each(|&(flag, add)| values[flag] += add);
                        left -= 1;
                    }
                }
            }
            if left == at {
                break;
            }
        }
        if left < before {
            kinds.push(compute);
            idle = 0;
        } else {
            idle += 1;
        }
        compute = !compute;
    }
    (left == 0).then_some((phase_of, kinds))
}

//! Counts what a schedule contains, and the checks that hold for every schedule.

use crate::case::Case;
use std::collections::HashMap;
use tilewire_kernels::check::{Problem, check};
use tilewire_kernels::schedule::{Access, At, Op, Region};
use tilewire_kernels::{Rank, RoleKind, Schedule, Task, kernel};

/// The error of a case that must not build.
pub fn error(case: &Case) -> String {
    kernel(case.kernel).expect("in the registry").build(&case.spec()).expect_err("a bad shape").to_string()
}

/// Tasks of one role kind of rank (0, 0), all launches.
pub fn tasks_of(schedule: &Schedule, kind: RoleKind) -> usize {
    let mut count = 0;
    for (launch, role) in schedule.role_indices() {
        if schedule.launches[launch].roles[role].kind == kind {
            schedule.for_each_task(Rank { node: 0, gpu: 0 }, launch, role, |_| count += 1);
        }
    }
    count
}

/// Tasks per role kind of rank (0, 0): compute, intra_comm, inter_send, inter_reduce.
pub fn task_counts(schedule: &Schedule) -> [usize; 4] {
    RoleKind::ALL.map(|kind| tasks_of(schedule, kind))
}

/// Bytes that one rank moves to others.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Puts.
    pub wire: u64,
    pub puts: u64,
    /// Writes to single neighbours.
    pub unicast: u64,
    /// Multicast stores, counted once.
    pub multicast: u64,
    /// In-switch sums, result bytes.
    pub in_switch: u64,
    /// Plain reads of neighbours.
    pub remote_reads: u64,
}

pub fn traffic(schedule: &Schedule, rank: Rank) -> Traffic {
    let mut sum = Traffic::default();
    for (launch, role) in schedule.role_indices() {
        schedule.for_each_task(rank, launch, role, |task| {
            if matches!(task.op, Op::Put { .. }) {
                sum.puts += 1;
            }
            task.op.for_each_access(|at, region, access| {
                let bytes = region.bytes();
                match (at, access) {
                    (At::Offset(offset), _) if offset.dn != 0 => sum.wire += bytes,
                    (At::Offset(offset), Access::Read) if offset.dg != 0 => sum.remote_reads += bytes,
                    (At::Offset(offset), _) if offset.dg != 0 => sum.unicast += bytes,
                    (At::Offset(_), _) => {}
                    (At::AllLocal, Access::Read) => sum.in_switch += bytes,
                    (At::AllLocal, _) => sum.multicast += bytes,
                }
            });
        });
    }
    sum
}

/// A task without its addresses: offsets become the first task that touched the same GEMM operand, or zero.
fn skeleton(task: &Task, panels: &mut HashMap<(u16, u64), usize>) -> Task {
    let mut task = task.clone();
    let mut panel = |region: &mut Region| {
        let next = panels.len();
        region.offset = *panels.entry((region.buffer.0, region.offset)).or_insert(next) as u64;
    };
    match &mut task.op {
        Op::GemmTile { a, b, outs, .. } => {
            panel(a);
            panel(b);
            outs.iter_mut().for_each(|out| out.place.region.offset = 0);
        }
        Op::Copy { src, dsts, .. } => {
            src.region.offset = 0;
            dsts.iter_mut().for_each(|dst| dst.region.offset = 0);
        }
        Op::Reduce { inputs, outputs, .. } => {
            inputs.iter_mut().for_each(|place| place.region.offset = 0);
            outputs.iter_mut().for_each(|place| place.region.offset = 0);
        }
        Op::Put { src, dst, .. } => {
            src.offset = 0;
            dst.region.offset = 0;
        }
        Op::Sync => {}
        other => panic!("{} is not used by these kernels", other.name()),
    }
    task
}

fn skeletons(schedule: &Schedule, rank: Rank) -> Vec<Task> {
    let mut panels = HashMap::new();
    let mut all = Vec::new();
    for (launch, role) in schedule.role_indices() {
        schedule.for_each_task(rank, launch, role, |task| all.push(skeleton(&task, &mut panels)));
    }
    all
}

/// Every rank has the skeleton of its representative, and the claim is not weaker than need be.
pub fn check_symmetry(schedule: &Schedule) {
    let cluster = schedule.cluster;
    let all: HashMap<Rank, Vec<Task>> = cluster.iter().map(|rank| (rank, skeletons(schedule, rank))).collect();
    for rank in cluster.iter() {
        let representative = schedule.symmetry.representative(rank);
        for (i, (task, expected)) in all[&rank].iter().zip(&all[&representative]).enumerate() {
            assert_eq!(task, expected, "{}: task {i} of {rank} and {representative}", schedule.spec);
        }
        assert_eq!(all[&rank].len(), all[&representative].len());
    }
    let first = Rank { node: 0, gpu: 0 };
    let equal = cluster.iter().all(|rank| all[&rank] == all[&first]);
    assert_eq!(equal, schedule.symmetry.is_full(), "{}", schedule.spec);
}

/// No finding of the static checker, but for words that nothing orders after their data where `unordered` permits them.
pub fn check_findings(schedule: &Schedule, unordered: bool) {
    for finding in check(schedule, None) {
        let permitted = unordered && matches!(finding.problem, Problem::FabricOrder { .. });
        assert!(permitted, "{} {}: {finding}", schedule.cluster, schedule.spec);
    }
}

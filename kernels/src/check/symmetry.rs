//! Are the skeletons of ranks that should share one equal?

use super::compact::{SHOWN, task_at};
use super::finding::{Finding, Problem};
use super::shape::check_task;
use crate::cluster::Rank;
use crate::schedule::{At, Op, Partial, Region, Schedule, Task};

/// Compares each of these ranks with its representative, and checks that the regions of its tasks lie in their buffers.
///
/// A task without the offsets of its regions is its skeleton; everything else must be equal.
pub fn check_symmetry(schedule: &Schedule, ranks: impl IntoIterator<Item = Rank>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut expected: Option<(Rank, Vec<Vec<Task>>)> = None;
    let mut ranks: Vec<Rank> = ranks.into_iter().collect();
    // Ranks of a class one after the other, so that one representative's skeletons are held at a time.
    ranks.sort_by_key(|&rank| (schedule.symmetry.representative(rank), rank));
    for rank in ranks {
        let representative = schedule.symmetry.representative(rank);
        if rank == representative {
            continue;
        }
        if expected.as_ref().is_none_or(|(of, _)| *of != representative) {
            let lists = schedule.role_indices().map(|(l, r)| skeletons(schedule, representative, l, r)).collect();
            expected = Some((representative, lists));
        }
        let table = schedule.source.table(rank);
        let lists = expected.as_ref().map_or(&[][..], |(_, lists)| lists.as_slice());
        for ((launch, role), list) in schedule.role_indices().zip(lists) {
            let claim = schedule.launches[launch].roles[role].claim;
            let mut index = 0;
            let mut report = |index: u32, op: &'static str, problem: Problem| {
                if findings.len() < SHOWN {
                    findings.push(Finding::fatal(Some(task_at(schedule, rank, launch, role, index, op)), problem));
                }
            };
            schedule.for_each_task(rank, launch, role, |mut task| {
                let op = task.op.name();
                if let Err(error) = check_task(schedule, claim, &task, &table) {
                    report(index, op, Problem::Shape(error));
                }
                strip(&mut task);
                let want = list.get(index as usize);
                if want != Some(&task) {
                    let what = want.map_or_else(|| "one task more".to_owned(), |want| difference(&task, want));
                    report(index, op, Problem::Asymmetric { representative, what });
                }
                index += 1;
            });
            if (index as usize) < list.len() {
                let what = format!("{index} tasks, not {}", list.len());
                report(index, "none", Problem::Asymmetric { representative, what });
            }
        }
    }
    findings
}

/// Clusters up to this size are compared rank by rank.
const ALL_RANKS: usize = 64;

/// The ranks that [`check_symmetry_sample`] compares with their representatives: all of a small cluster; of a large one
/// all GPUs of the first node, and on their own GPU index the nodes next to it, in the middle and at the end.
///
/// What differs from rank to rank in a builder are its node and GPU indices and what wraps around: those are the places
/// where these change.
pub fn symmetry_sample(schedule: &Schedule) -> Vec<Rank> {
    let cluster = schedule.cluster;
    let nodes = cluster.nodes;
    let near = [1, 2, nodes / 2, nodes.saturating_sub(2), nodes.saturating_sub(1)];
    let wanted = |rank: &Rank| {
        let (node, gpu) = (rank.node, rank.gpu);
        cluster.ranks() <= ALL_RANKS
            || node == 0
            || (near.contains(&node) && (gpu == 0 || gpu + 1 == cluster.gpus_per_node))
    };
    cluster.iter().filter(wanted).collect()
}

/// [`check_symmetry`] of the ranks of [`symmetry_sample`]: what it finds is so; that it finds nothing is said of these
/// ranks only.
pub fn check_symmetry_sample(schedule: &Schedule) -> Vec<Finding> {
    check_symmetry(schedule, symmetry_sample(schedule))
}

fn skeletons(schedule: &Schedule, rank: Rank, launch: usize, role: usize) -> Vec<Task> {
    let mut list = Vec::new();
    schedule.for_each_task(rank, launch, role, |mut task| {
        strip(&mut task);
        list.push(task);
    });
    list
}

/// Removes what ranks of a class may differ in: the offsets of regions.
fn strip(task: &mut Task) {
    let zero = |region: &mut Region| region.offset = 0;
    let zero_partial = |part: &mut Partial| {
        part.o.offset = 0;
        part.l.offset = 0;
    };
    match &mut task.op {
        Op::GemmTile { a, b, outs, .. } => {
            zero(a);
            zero(b);
            outs.iter_mut().for_each(|out| zero(&mut out.place.region));
        }
        Op::AttentionTile { q, k, v, state, out, .. } => {
            [q, k, v].into_iter().for_each(zero);
            state.iter_mut().for_each(zero);
            out.iter_mut().for_each(zero_partial);
        }
        Op::AttentionMerge { parts, out } => {
            parts.iter_mut().for_each(zero_partial);
            zero_partial(out);
        }
        Op::Copy { src, dsts, .. } => {
            zero(&mut src.region);
            dsts.iter_mut().for_each(|dst| zero(&mut dst.region));
        }
        Op::GatherRows { dst, .. } => zero(dst),
        Op::Reduce { inputs, outputs, .. } => {
            inputs.iter_mut().chain(outputs).for_each(|place| zero(&mut place.region));
        }
        Op::Put { src, dst, .. } => {
            zero(src);
            zero(&mut dst.region);
        }
        Op::Collective { src, dst, .. } => {
            zero(src);
            zero(dst);
        }
        Op::Fill { dst } => zero(&mut dst.region),
        Op::Sync => {}
    }
}

/// In which part two skeletons differ.
fn difference(have: &Task, want: &Task) -> String {
    if have.op.name() != want.op.name() {
        return format!("op {}, not {}", have.op.name(), want.op.name());
    }
    if have.waits != want.waits {
        return format!("waits {:?}, not {:?}", have.waits, want.waits);
    }
    if have.signals != want.signals {
        return format!("signals {:?}, not {:?}", have.signals, want.signals);
    }
    let places = |task: &Task| {
        let mut places: Vec<At> = Vec::new();
        task.op.for_each_access(|at, _, _| places.push(at));
        places
    };
    if places(have) != places(want) {
        return format!("ranks {:?}, not {:?}", places(have), places(want));
    }
    "sizes or parameters of the op".to_owned()
}

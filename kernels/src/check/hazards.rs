//! Data races: conflicting accesses that no edge of the order puts one behind the other.
//!
//! For each cell of the memory of a rank the accesses are lined up in the legal order. Two that conflict must be ordered;
//! it is enough to look at neighbouring groups (a write, reads between writes, adds between others), for an access is
//! over before the next group begins, and so on. An access begins when its task has passed the waits that gate it; it is
//! over
//!
//! * a read, when the task raises any signal, an early one too;
//! * a write, when it raises a signal on the rank written to, or one on a rank that it does not write to;
//! * any of these, when its launch ends;
//! * the source of a put, when it is `sent` or has arrived, and what it writes, when it has arrived, if its word
//!   comes after its data.

use super::compact::{Compact, Raiser, TaskKind};
use super::finding::{Finding, Problem, RaceKind, RaceSide};
use super::order::{Ahead, Mix, Order, Upto};
use super::progress::name_on;
use super::touches::{Reach, Touch, Touches};
use crate::schedule::{Access, BufferUse, Schedule};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// Races of one kind (buffer, roles, accesses) that are counted; more are like them.
const FAILURES: u64 = 16;

/// Races and reads of nothing in the memory of these ranks, and whether all ranks that reach it were looked at.
pub(super) fn check(schedule: &Schedule, order: &Order<'_>, ranks: &[u32]) -> (Vec<Finding>, bool) {
    let roles = order.compact.roles.len() / order.compact.classes.len();
    let mut complete = true;
    let reach = Reach::new(schedule, order);
    let mut races: BTreeMap<(usize, u32, u32, u8, u8), Finding> = BTreeMap::new();
    let mut empty: BTreeMap<usize, Finding> = BTreeMap::new();
    for &rank in ranks {
        let touches = Touches::new(schedule, order, rank, &reach, true);
        complete &= touches.complete;
        touches.for_each_cell(|buffer, bytes, list| {
            let place = |touch: &Touch| {
                let late = u8::from(touch.access != Access::Read);
                (order.position[touch.node.task as usize], touch.node.rank, late)
            };
            list.sort_unstable_by_key(place);
            let memory = schedule.cluster.rank(rank as usize);
            let side = |touch: &Touch| RaceSide {
                task: name_on(
                    schedule,
                    order.compact,
                    touch.node.task,
                    schedule.cluster.rank(touch.node.rank as usize),
                ),
                access: touch.access,
            };
            if let Some(first) = list.first()
                && first.access != Access::Write
                && touches.complete
                && schedule.buffers[buffer].usage != BufferUse::Input
            {
                empty.entry(buffer).and_modify(count).or_insert_with(|| {
                    let first = side(first);
                    let problem = Problem::NothingWritten {
                        buffer: schedule.buffers[buffer].name.clone(),
                        rank: memory,
                        bytes: (bytes.0, bytes.0 + bytes.1),
                        access: first.access,
                        count: 1,
                    };
                    Finding::hazard(Some(first.task), problem)
                });
            }
            let commute = |a: &Touch, b: &Touch| a.access == b.access && a.access != Access::Write;
            let mut groups = list.chunk_by(commute);
            let Some(mut before) = groups.next() else { return };
            for after in groups {
                for a in before {
                    for b in after {
                        if a.node == b.node {
                            continue;
                        }
                        // Classes have the same roles, and what goes wrong in one of them does so in all.
                        let role = |touch: &Touch| (order.compact.role_of(touch.node.task) % roles) as u32;
                        let key = (buffer, role(a), role(b), a.access as u8, b.access as u8);
                        if races.get(&key).is_some_and(|finding| failures(finding) >= FAILURES)
                            || is_ordered(order, &touches, rank, a, b)
                        {
                            continue;
                        }
                        races.entry(key).and_modify(count).or_insert_with(|| {
                            let (first, second) = (side(a), side(b));
                            let problem = Problem::Race {
                                buffer: schedule.buffers[buffer].name.clone(),
                                rank: memory,
                                bytes: (bytes.0, bytes.0 + bytes.1),
                                kind: kind(order, a, b),
                                first: Box::new(first),
                                second: second.access,
                                why: why(schedule, order, a, b),
                                count: 1,
                            };
                            Finding::hazard(Some(second.task), problem)
                        });
                    }
                }
                before = after;
            }
        });
    }
    (races.into_values().chain(empty.into_values()).collect(), complete)
}

/// A hash of who touches which bytes after whom, in the memory of all ranks. Without races it does not depend on the legal
/// order: the groups of a cell follow each other in every run.
pub(super) fn access_order(schedule: &Schedule, order: &Order<'_>) -> u64 {
    let reach = Reach::new(schedule, order);
    let mut hash = Mix::default();
    for rank in 0..schedule.cluster.ranks() as u32 {
        let touches = Touches::new(schedule, order, rank, &reach, false);
        touches.for_each_cell(|buffer, bytes, list| {
            list.sort_unstable_by_key(|touch| {
                let late = u8::from(touch.access != Access::Read);
                (order.position[touch.node.task as usize], touch.node.rank, late)
            });
            (buffer, bytes).hash(&mut hash);
            for group in list.chunk_by(|a, b| a.access == b.access && a.access != Access::Write) {
                let mut nodes: Vec<_> = group.iter().map(|touch| (touch.node.task, touch.node.rank)).collect();
                nodes.sort_unstable();
                (group[0].access as u8, nodes).hash(&mut hash);
            }
        });
    }
    hash.finish()
}

/// Whether the first access is over before the second begins.
fn is_ordered(order: &Order<'_>, touches: &Touches, rank: u32, a: &Touch, b: &Touch) -> bool {
    let kind = order.compact.tasks[a.node.task as usize].kind;
    let reads = a.access == Access::Read;
    let covers = |signal: u32, ahead: Ahead| match (kind, order.raiser_of(signal)) {
        (TaskKind::Put { .. }, Raiser::Sm) => false,
        (TaskKind::Put { in_order }, Raiser::Nic) => in_order,
        (_, Raiser::Host) => reads,
        _ if reads => true,
        (TaskKind::Collective, _) => true,
        _ => {
            let signal = order.compact.signals[signal as usize];
            let to = order.target(a.node.rank, signal.to);
            ahead != Ahead::Chain && !signal.early && (to == rank || !touches.written[a.written as usize].contains(&to))
        }
    };
    let ends = !matches!(kind, TaskKind::Put { .. });
    order.is_before(a.node, b.node, b.opens, covers, ends)
}

/// What a reader of the finding must know about why nothing orders the two.
fn why(schedule: &Schedule, order: &Order<'_>, a: &Touch, b: &Touch) -> String {
    let name = |signal: u32| {
        let (family, slot) = order.compact.family_of(order.compact.signals[signal as usize].flag);
        format!("{}[{slot}]", schedule.flags[family].name)
    };
    let put = matches!(order.compact.tasks[a.node.task as usize].kind, TaskKind::Put { .. });
    let direct = order.directly(a.node, b.node, Upto::All).next();
    let short = match direct {
        Some((signal, _)) if order.directly(a.node, b.node, b.opens).next().is_none() => {
            format!("{} gates the other's later part only", name(signal))
        }
        Some((signal, _)) if order.compact.signals[signal as usize].early => {
            format!("{} is raised before the first is visible", name(signal))
        }
        Some((signal, _)) if put && order.raiser_of(signal) == Raiser::Nic => {
            format!("{} may arrive before the data", name(signal))
        }
        Some((signal, _)) if put => format!("{} says only that the put was posted or sent", name(signal)),
        Some((signal, _)) => format!("{} says nothing of what is written to this rank", name(signal)),
        None => "no flag that it must wait for, launch or collective leads from one to the other".to_owned(),
    };
    let text = |touch: &Touch| task_text_of(schedule, order.compact, touch.node.task, touch.node.rank);
    format!("{short}\n  first:  {}\n  second: {}", text(a), text(b))
}

fn task_text_of(schedule: &Schedule, compact: &Compact, task: u32, rank: u32) -> String {
    let role = compact.roles[compact.role_of(task)];
    let (mut text, mut at) = (String::new(), role.first);
    schedule.for_each_task(schedule.cluster.rank(rank as usize), role.launch as usize, role.role as usize, |found| {
        if at == task {
            text = crate::text::task_text(schedule, &found);
        }
        at += 1;
    });
    text
}

fn kind(order: &Order<'_>, a: &Touch, b: &Touch) -> RaceKind {
    let put = |touch: &Touch| matches!(order.compact.tasks[touch.node.task as usize].kind, TaskKind::Put { .. });
    match (a.access, b.access) {
        (Access::Read, _) if put(a) => RaceKind::PutSource,
        (Access::Read, _) => RaceKind::Reuse,
        (_, Access::Read) if put(a) => RaceKind::PutLanding,
        (_, Access::Read) => RaceKind::EarlyRead,
        _ => RaceKind::Writers,
    }
}

fn count(finding: &mut Finding) {
    if let Problem::Race { count, .. } | Problem::NothingWritten { count, .. } = &mut finding.problem {
        *count += 1;
    }
}

const fn failures(finding: &Finding) -> u64 {
    match &finding.problem {
        Problem::Race { count, .. } => *count,
        _ => 0,
    }
}

//! Hash, JSON, table and diff of every kernel's schedule.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::{cases, changed};
use std::collections::BTreeMap;
use tilewire_kernels::schedule::{At, FamilyId, Op, Signal};
use tilewire_kernels::text::{diff, dump, show};
use tilewire_kernels::{Fabric, OptionSet, RoleSplit, Schedule, Task, schedule_hash};

const SPLIT: RoleSplit = RoleSplit { compute: 4, intra_comm: 2, inter_send: 1, inter_reduce: 1 };

fn schedules() -> Vec<(String, Schedule)> {
    [OptionSet::Tilewire, OptionSet::Published]
        .into_iter()
        .flat_map(|set| [Fabric::IbRc, Fabric::EfaSrd].map(|fabric| cases(set, fabric)))
        .flatten()
        .map(|case| (case.name(), case.kernel.build(&case.spec).expect("a small case builds")))
        .collect()
}

#[test]
fn equal_schedules_have_equal_hashes_and_different_ones_do_not() {
    let mut seen = BTreeMap::new();
    for ((name, schedule), (_, again)) in schedules().into_iter().zip(schedules()) {
        let hash = schedule_hash(&schedule, &SPLIT);
        assert!(hash.complete);
        assert_eq!(hash.to_string().len(), 64);
        assert_eq!(hash, schedule_hash(&again, &SPLIT), "{name}");
        assert_ne!(hash, schedule_hash(&schedule, &RoleSplit { compute: 5, ..SPLIT }), "{name}");
        if let Some(other) = seen.insert(hash, name.clone()) {
            panic!("{name} and {other} have one hash");
        }
    }
}

/// One change to the skeleton of the last rank's class changes the hash, whatever it is.
#[test]
fn every_part_of_a_skeleton_is_hashed() {
    type Change = fn(&mut Task) -> bool;
    let changes: [(&str, Change); 5] = [
        ("a signal", |task| {
            task.signals.push(Signal::one(At::ME, FamilyId(0), 0));
            true
        }),
        ("a level", |task| task.waits.iter_mut().map(|wait| wait.at_least += 1).count() > 0),
        ("a slot", |task| task.signals.iter_mut().map(|signal| signal.flag.slot += 1).count() > 0),
        ("a queue", |task| match &mut task.op {
            Op::Put { queue, .. } => {
                *queue += 1;
                true
            }
            _ => false,
        }),
        ("a tile", |task| match &mut task.op {
            Op::GemmTile { stages, .. } | Op::AttentionTile { stages, .. } => {
                *stages += 1;
                true
            }
            _ => false,
        }),
    ];
    for case in cases(OptionSet::Tilewire, Fabric::IbRc) {
        let build = || case.kernel.build(&case.spec).expect("a small case builds");
        let hash = schedule_hash(&build(), &SPLIT);
        for (what, change) in changes {
            let hits = |schedule: &Schedule| {
                let rank = schedule.representatives()[0];
                schedule.role_indices().any(|(l, r)| schedule.tasks(rank, l, r).iter_mut().any(change))
            };
            if !hits(&build()) {
                continue;
            }
            let broken = changed(build(), move |_, _, _, tasks| {
                // The first task that has the part.
                let _ = tasks.iter_mut().any(change);
            });
            assert_ne!(hash, schedule_hash(&broken, &SPLIT), "{}: {what}", case.name());
            assert!(!diff(&build(), &broken, 1).is_empty(), "{}: {what}", case.name());
        }
    }
}

/// Two tiles that read one panel are not two tiles that read two, though no offset is hashed.
#[test]
fn reuse_of_operand_panels_is_hashed() {
    for case in cases(OptionSet::Tilewire, Fabric::IbRc) {
        let build = || case.kernel.build(&case.spec).expect("a small case builds");
        let swapped = changed(build(), |_, _, _, tasks| {
            let mut tiles = tasks.iter_mut().filter_map(|task| match &mut task.op {
                Op::GemmTile { b, .. } | Op::AttentionTile { k: b, .. } => Some(b),
                _ => None,
            });
            if let (Some(first), Some(last)) = (tiles.next(), tiles.next_back()) {
                first.offset = if first.offset == last.offset { first.offset + 16 } else { last.offset };
            }
        });
        if !diff(&build(), &swapped, 1).is_empty() {
            assert_ne!(schedule_hash(&build(), &SPLIT), schedule_hash(&swapped, &SPLIT), "{}", case.name());
        }
    }
}

#[test]
fn dumps_are_json_that_holds_every_task() {
    for (name, schedule) in schedules() {
        let ranks = schedule.representatives();
        let mut bytes = Vec::new();
        dump(&schedule, Some(&SPLIT), &ranks, &mut bytes).expect("a vector takes all bytes");
        let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(json["kernel"], schedule.kernel.as_str());
        assert_eq!(json["hash"], schedule_hash(&schedule, &SPLIT).to_string().as_str());
        for (i, &rank) in ranks.iter().enumerate() {
            for (l, r) in schedule.role_indices() {
                let tasks: Vec<Task> =
                    serde_json::from_value(json["ranks"][i]["launches"][l][r].clone()).expect("tasks");
                assert_eq!(tasks, schedule.tasks(rank, l, r), "{name}");
            }
        }
    }
}

#[test]
fn tables_name_every_buffer_family_and_role() {
    for (name, schedule) in schedules() {
        let text = show(&schedule, schedule.representatives()[0], 2);
        for word in schedule.buffers.iter().map(|b| &b.name).chain(schedule.flags.iter().map(|f| &f.name)) {
            assert!(text.contains(word.as_str()), "{name}: {word}\n{text}");
        }
        assert!(!text.contains('?'), "{name}\n{text}");
    }
}

#[test]
fn a_schedule_does_not_differ_from_itself() {
    for ((name, a), (_, b)) in schedules().into_iter().zip(schedules()) {
        assert_eq!(diff(&a, &b, 3), "", "{name}");
    }
}

#[test]
fn a_diff_shows_the_tasks_that_changed() {
    let case = &cases(OptionSet::Tilewire, Fabric::IbRc)[1];
    let build = || case.kernel.build(&case.spec).expect("a small case builds");
    let shorter = changed(build(), |_, _, _, tasks| {
        tasks.pop();
    });
    let text = diff(&build(), &shorter, 3);
    assert!(text.lines().any(|line| line.starts_with("- ")), "{text}");
}

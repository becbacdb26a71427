//! Nothing is carried twice and nothing is lost.

use crate::support::*;
use tilewire_kernels::Offset;
use tilewire_kernels::schedule::{At, Op};
use tilewire_sim::compile::{Compiled, Form, NONE, ResourceKind};
use tilewire_sim::engine;
use tilewire_sim::engine::UNWATCHED;

#[test]
fn no_resource_carries_more_than_its_capacity_and_all_of_the_bytes() {
    for machine in [shipped_machine("h200-efa"), shipped_machine("h200-cx7")] {
        for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 2), machine.fabric, 1)) {
            let compiled = Compiled::new(&case.schedule, &machine, &full()).expect("compiles");
            let run = engine::run(&compiled, &case.usual_split(), Form::Whole, true).expect("runs");
            let resources = ResourceKind::count(compiled.times.rails);
            let (mut total, mut last) = (vec![0_u128; resources as usize], vec![(0, 0); resources as usize]);
            for &(at, resource, rate) in &run.carried {
                let resource = resource as usize;
                assert!(rate <= compiled.capacities[resource].0, "{}: resource {resource} at {at}", case.name);
                let (since, before) = last[resource];
                total[resource] += u128::from(at - since) * u128::from(before);
                last[resource] = (at, rate);
            }
            assert!(last.iter().all(|&(_, rate)| rate == 0), "{}: something still flows", case.name);
            if case.schedule.symmetry.is_full() {
                // By symmetry a rank's resources carry what its own tasks take from anybody's.
                for &(kind, expected) in &compiled.programs[0].totals {
                    let carried = (total[kind.index(compiled.times.rails) as usize] / 1_000_000_000_000) as u64;
                    // Samples are rounded down to a byte/s, flows end up to a picosecond late.
                    let slack = expected / 10_000 + 10_000;
                    // A tile that pays its fill goes on to ask for its rate in that time.
                    let most = expected + fills(&compiled, kind) + slack;
                    assert!(
                        (expected.saturating_sub(slack)..=most).contains(&carried),
                        "{} {kind:?}: {carried} of {expected}, at most {most}",
                        case.name
                    );
                }
            }
        }
    }
}

/// Bytes (or FLOP) that all tiles of a rank take from a resource kind during their fills and block starts.
fn fills(compiled: &Compiled, kind: ResourceKind) -> u64 {
    let program = &compiled.programs[0];
    let mut sum = 0_u128;
    for role in &program.roles {
        for task in &program.tasks[role.first as usize..(role.first + role.tasks) as usize] {
            let cost = compiled.costs[usize::from(task.cost)].forms[Form::Whole as usize];
            if cost.main != NONE {
                let demands = compiled.classes[cost.main as usize].iter().filter(|d| d.1 == kind);
                sum += demands.map(|d| u128::from(d.2)).sum::<u128>() * u128::from(cost.fill + role.block_ps);
            }
        }
    }
    (sum / 1_000_000_000_000) as u64
}

#[test]
fn the_adds_of_every_flag_are_its_final_value() {
    for machine in [shipped_machine("h200-efa"), shipped_machine("h200-cx7")] {
        for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 2), machine.fabric, 1)) {
            let (schedule, cluster) = (&case.schedule, case.schedule.cluster);
            let compiled = Compiled::new(schedule, &machine, &full()).expect("compiles");
            let run = engine::run(&compiled, &case.usual_split(), Form::Whole, true).expect("runs");
            let flags = compiled.family_base[schedule.flags.len()] as usize;
            let mut adds = vec![vec![0_u32; flags]; cluster.ranks()];
            let mut add = |rank, flag: tilewire_kernels::schedule::Flag, amount| {
                let base = compiled.family_base[usize::from(flag.family.0)];
                adds[cluster.number(rank)][(base + flag.slot) as usize] += amount;
            };
            for rank in cluster.iter() {
                for (launch, role) in schedule.role_indices() {
                    schedule.for_each_task(rank, launch, role, |task| {
                        for signal in &task.signals {
                            let to: Vec<Offset> = match signal.to {
                                At::Offset(offset) => vec![offset],
                                At::AllLocal => (0..cluster.gpus_per_node).map(Offset::local).collect(),
                            };
                            for to in to {
                                add(cluster.at(rank, to), signal.flag, signal.add);
                            }
                        }
                        if let Op::Put { dst, arrived, sent, .. } = &task.op {
                            let At::Offset(to) = dst.at else { panic!("a put names one rank") };
                            add(cluster.at(rank, to), *arrived, 1);
                            if let Some(sent) = sent {
                                add(rank, *sent, 1);
                            }
                        }
                    });
                }
            }
            for (rank, adds) in adds.iter().enumerate() {
                let watched = &compiled.programs[compiled.program_of[rank] as usize].countdown;
                for (flag, &adds) in adds.iter().enumerate().filter(|&(flag, _)| watched[flag] != UNWATCHED) {
                    assert_eq!(run.flags[rank][flag], adds, "{} rank {rank} flag {flag}", case.name);
                }
            }
        }
    }
}

#[test]
fn tasks_fill_the_time_of_their_ctas() {
    let machine = shipped_machine("h200-efa");
    for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 2), machine.fabric, 1)) {
        let compiled = Compiled::new(&case.schedule, &machine, &full()).expect("compiles");
        for form in [Form::Whole, Form::CommOnly] {
            let run = engine::run(&compiled, &case.usual_split(), form, true).expect("runs");
            for rank in 0..compiled.ranks.len() {
                let tasks: u64 = run.timeline.iter().filter(|t| t.rank == rank as u32).map(|t| t.free - t.taken).sum();
                let accounted = run.busy[rank].iter().sum::<u64>() + run.waits[rank].iter().sum::<u64>();
                assert_eq!(accounted, tasks, "{} rank {rank} {form:?}", case.name);
            }
        }
    }
}

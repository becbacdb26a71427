//! Nothing is carried twice and nothing is lost.

use crate::support::*;
use tilewire_kernels::Offset;
use tilewire_kernels::schedule::{At, Op};
use tilewire_sim::compile::{Compiled, Form, ResourceKind};
use tilewire_sim::engine;
use tilewire_sim::engine::UNWATCHED;
use tilewire_sim::{Config, Execution, Protocol, Simulation};

#[test]
fn no_resource_carries_more_than_its_capacity_and_all_of_the_bytes() {
    let mut compared = 0;
    let crowded = [("interpreter.move_crowd_per_cta", 0.01)];
    for (name, changes, cluster) in [
        ("h200-efa", &[][..], cluster(2, 2)),
        ("h200-cx7", &[][..], cluster(2, 2)),
        ("h200-nvlink", &crowded[..], cluster(1, 4)),
    ] {
        let machine = with(shipped_machine(name), changes);
        for case in SETS.into_iter().flat_map(|set| kernels(set, cluster, machine.fabric, 1)) {
            let compiled = Compiled::new(&case.schedule, &machine, &full()).expect("compiles");
            let run = engine::run(&compiled, &case.usual_split(), Form::Whole, true).expect("runs");
            let resources = ResourceKind::count(compiled.times.rails);
            let (mut total, mut last) = (vec![0_u128; resources as usize], vec![(0, 0); resources as usize]);
            for &(at, resource, rate) in &run.carried {
                let resource = resource as usize;
                assert!(rate <= compiled.capacities[resource].0, "{name} {}: resource {resource} at {at}", case.name);
                let (since, before) = last[resource];
                total[resource] += u128::from(at - since) * u128::from(before);
                last[resource] = (at, rate);
            }
            assert!(last.iter().all(|&(_, rate)| rate == 0), "{name} {}: something still flows", case.name);
            if case.schedule.symmetry.is_full() {
                // By symmetry a rank's resources carry what its own tasks take from anybody's.
                for &(kind, expected) in &compiled.programs[0].totals {
                    // What the interpreter adds to a tile is charged as if the tile computed and read meanwhile.
                    if machine.interpreter.is_some() && matches!(kind, ResourceKind::Hbm | ResourceKind::Chip) {
                        continue;
                    }
                    compared += 1;
                    let carried = (total[kind.index(compiled.times.rails) as usize] / 1_000_000_000_000) as u64;
                    // Samples are rounded down to a byte/s, flows end up to a picosecond late.
                    let slack = expected / 10_000 + 10_000;
                    assert!(
                        carried.abs_diff(expected) <= slack,
                        "{name} {} {kind:?}: {carried} of {expected}",
                        case.name
                    );
                }
            }
        }
    }
    assert!(compared > 100, "only {compared}");
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

/// Whatever the kernel, options, split and protocol, no CTA's time is lost or counted twice.
#[test]
fn busy_wait_and_idle_are_the_time_of_the_ctas() {
    let machine = shipped_machine("h200-efa");
    let mut roles = 0;
    for (nodes, gpus) in [(1, 4), (2, 2), (2, 8)] {
        let fused = SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1));
        for case in fused.chain(baselines(cluster(nodes, gpus), machine.fabric)) {
            let folded = [Protocol::Fair, ISOLATED, LOOPED].map(|protocol| (protocol, Execution::Folded));
            for (protocol, execution) in folded.into_iter().chain([(ISOLATED, Execution::Full)]) {
                let config = Config { protocol, execution, ..Config::default() };
                let simulation = Simulation::new(&case.schedule, &machine, &config).expect("compiles");
                for split in [case.usual_split(), case.split(1), case.split(3)] {
                    let prediction = simulation.predict(&split).expect("runs");
                    for role in &prediction.roles {
                        let name = format!("{} {split} {protocol:?} {execution:?} {role:?}", case.name);
                        let present = f64::from(role.ctas) * prediction.time_us;
                        let sum = role.busy_us + role.wait_us + role.idle_us;
                        assert!((sum - present).abs() <= 1e-9 * present, "{name}: {sum} of {present}");
                        // Sums over thousands of tasks in floating point.
                        assert!(role.idle_us >= -1e-9 * present, "{name}: more work than CTAs");
                        roles += 1;
                    }
                }
            }
        }
    }
    assert!(roles > 500, "only {roles}");
}

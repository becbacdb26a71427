//! The same inputs give the same bytes.

use crate::support::*;
use tilewire_kernels::{Fabric, RoleKind, RoleSplit};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine::{self, Scratch};
use tilewire_sim::machine::PowerLimit;
use tilewire_sim::{Config, Machine, Protocol, Simulation, predict};

#[test]
fn repeats_and_used_memory_change_nothing() {
    let machine = shipped_machine("h200-efa");
    for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 2), Fabric::EfaSrd, 1)) {
        for protocol in [Protocol::Fair, ISOLATED] {
            let compiled = Compiled::new(&case.schedule, &machine, &Config { protocol, ..full() }).expect("compiles");
            let mut used = Scratch::default();
            for split in [case.usual_split(), case.split(1), case.usual_split()] {
                for form in [Form::Whole, Form::CommOnly, Form::ComputeOnly] {
                    let fresh = engine::run(&compiled, &split, form, true);
                    let name = format!("{} {split} {form:?} {protocol:?}", case.name);
                    assert_eq!(used.run(&compiled, &split, form, true), fresh, "{name}");
                }
            }
        }
    }
}

/// Splits of a sweep share what they have in common: CTAs that take no task, and the compute-only run of the same CTAs,
/// whichever roles they come from.
#[test]
fn a_split_among_others_predicts_what_it_predicts_alone() {
    for machine in
        [shipped_machine("h200-efa"), Machine { power_limit: PowerLimit::Average, ..shipped_machine("h200-cx7") }]
    {
        for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 4), machine.fabric, 2)) {
            let simulation = Simulation::new(&case.schedule, &machine, &full()).expect("compiles");
            let roles = case.split(1);
            let of_role = |kind, ctas| if roles.get(kind) > 0 { ctas } else { 0 };
            let mut shared = 0;
            for seed in 0..24 {
                let mut random = Random(seed);
                let mut split = RoleSplit::default();
                // Few CTAs, or more than there are tasks.
                let most = if seed % 3 == 0 { 40 } else { 3 };
                for kind in [RoleKind::IntraComm, RoleKind::InterSend, RoleKind::InterReduce] {
                    split.set(kind, of_role(kind, random.within(1, most) as u32));
                }
                split.compute = of_role(RoleKind::Compute, (131 + seed % 2) as u32 - split.total() as u32);
                let name = format!("{} {split} {:?}", case.name, machine.power_limit);
                let alone = predict(&case.schedule, &machine, &split, &full()).expect("runs");
                assert_eq!(simulation.predict(&split).expect("runs"), alone, "{name}");
                for form in [Form::Whole, Form::CommOnly, Form::ComputeOnly] {
                    let run = engine::run(simulation.compiled(), &split, form, false).expect("runs");
                    assert_eq!(simulation.run(&split, form, false).expect("runs"), run, "{name} {form:?}");
                    shared += usize::from(run.used.iter().zip(&run.workers).any(|(used, workers)| used < workers));
                }
            }
            assert!(shared > 24, "{}: splits have nothing in common", case.name);
        }
    }
}

//! The same inputs give the same bytes.

use crate::support::*;
use tilewire_kernels::{Fabric, RoleKind, RoleSplit};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine::{self, Scratch};
use tilewire_sim::{Config, Protocol, Simulation, predict};

#[test]
fn repeats_and_used_memory_change_nothing() {
    let machine = shipped_machine("h200-efa");
    for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 2), Fabric::EfaSrd, 1)) {
        let isolated = Protocol::Published { stale_arrivals: false, isolated: true, launches: 20 };
        for protocol in [Protocol::Fair, isolated] {
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

/// Splits of a sweep share what they have in common: the same CTAs' compute-only run, whichever roles they come from.
#[test]
fn a_split_among_others_predicts_what_it_predicts_alone() {
    let machine = shipped_machine("h200-efa");
    for set in SETS {
        for case in kernels(set, cluster(2, 4), machine.fabric, 2) {
            let simulation = Simulation::new(&case.schedule, &machine, &full()).expect("compiles");
            let roles = case.split(1);
            for seed in 0..16 {
                let mut random = Random(seed);
                let mut split = RoleSplit::default();
                for kind in RoleKind::ALL.into_iter().filter(|&kind| roles.get(kind) > 0) {
                    split.set(kind, random.within(1, 3) as u32);
                }
                if roles.compute > 0 {
                    split.compute = 0;
                    split.compute = 11 + (seed % 2) as u32 - split.total() as u32;
                }
                let alone = predict(&case.schedule, &machine, &split, &full()).expect("runs");
                assert_eq!(simulation.predict(&split).expect("runs"), alone, "{} {split}", case.name);
            }
        }
    }
}

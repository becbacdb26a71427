//! The same inputs give the same bytes.

use crate::support::*;
use tilewire_kernels::Fabric;
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine::{self, Scratch};
use tilewire_sim::{Config, Protocol};

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

//! Every list completes, whatever the number of CTAs.

use crate::support::*;
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine;

/// A ring of one command and one write in flight per queue: what drains them needs no CTA.
#[test]
fn with_the_smallest_ring_and_cap() {
    let room = [("proxy.fifo_depth", 1.0), ("proxy.in_flight", 1.0)];
    for machine in [shipped_machine("h200-efa"), shipped_machine("h200-cx7")].map(|machine| with(machine, &room)) {
        for (nodes, gpus) in [(2, 1), (2, 4), (3, 2)] {
            for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1)) {
                let compiled = Compiled::new(&case.schedule, &machine, &full()).expect("compiles");
                engine::run(&compiled, &case.usual_split(), Form::Whole, false)
                    .unwrap_or_else(|error| panic!("{}: {error}", case.name));
            }
        }
    }
}

#[test]
fn with_one_two_and_three_ctas_per_role() {
    for machine in [shipped_machine("h200-efa"), shipped_machine("h200-cx7")] {
        for (nodes, gpus) in [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2)] {
            for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1)) {
                let compiled = Compiled::new(&case.schedule, &machine, &full()).expect("compiles");
                let expected: u64 = (0..compiled.ranks.len())
                    .map(|rank| compiled.programs[compiled.program_of[rank] as usize].tasks.len() as u64)
                    .sum();
                for ctas in 1..=3 {
                    let run = engine::run(&compiled, &case.split(ctas), Form::Whole, false);
                    let run = run.unwrap_or_else(|error| panic!("{} with {ctas}: {error}", case.name));
                    assert_eq!(run.tasks, expected, "{} with {ctas}", case.name);
                }
            }
        }
    }
}

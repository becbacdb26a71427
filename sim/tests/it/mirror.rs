//! One rank that stands for all equals all ranks, to the picosecond.

use crate::support::*;
use tilewire_kernels::{Fabric, Kernel, OptionSet, baseline};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine::Scratch;
use tilewire_sim::{Config, Execution, SimError};

const CLUSTERS: [(u16, u16); 4] = [(1, 4), (2, 2), (2, 8), (4, 2)];

#[test]
fn mirror_equals_full_or_is_refused() {
    let mut symmetric = 0;
    for machine in [shipped_machine("h200-efa"), shipped_machine("h200-cx7")] {
        for (nodes, gpus) in CLUSTERS {
            for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1)) {
                let mut full = Compiled::new(&case.schedule, &machine, &full()).expect("full always compiles");
                // Rank by rank, so that nothing stands for anything else.
                full.ranks_alike = false;
                let mirror = Compiled::new(&case.schedule, &machine, &mirror());
                if !case.schedule.symmetry.is_full() {
                    assert!(matches!(mirror, Err(SimError::NotSymmetric { .. })), "{}", case.name);
                    assert_ne!(case.set, OptionSet::Tilewire, "{}: tilewire sets are symmetric", case.name);
                    continue;
                }
                symmetric += 1;
                let mirror = mirror.expect("symmetric schedules can be mirrored");
                let (mut all, mut one) = (Scratch::default(), Scratch::default());
                for form in [Form::Whole, Form::ComputeOnly, Form::CommOnly] {
                    for split in [case.usual_split(), case.split(3)] {
                        let all = all.run(&full, &split, form, false).expect("runs");
                        let one = one.run(&mirror, &split, form, false).expect("runs");
                        let name = format!("{} {split} {form:?}", case.name);
                        assert!(all.rank_ends.iter().all(|&end| end == one.end), "{name}: {all:?} {one:?}");
                        assert_eq!(all.tasks, one.tasks * full.ranks.len() as u64, "{name}");
                        assert!(all.busy.iter().all(|busy| *busy == one.busy[0]), "{name}");
                        assert!(all.waits.iter().all(|waits| *waits == one.waits[0]), "{name}");
                    }
                }
            }
        }
    }
    assert!(symmetric > 40, "only {symmetric} symmetric cases");
}

#[test]
fn folded_equals_full() {
    let machine = shipped_machine("h200-efa");
    for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 4), Fabric::EfaSrd, 1)) {
        let end = |execution| {
            let compiled = Compiled::new(&case.schedule, &machine, &Config { execution, ..Config::default() });
            Scratch::default()
                .run(&compiled.expect("compiles"), &case.usual_split(), Form::Whole, false)
                .expect("runs")
                .end
        };
        assert_eq!(end(Execution::Folded), end(Execution::Full), "{}", case.name);
    }
}

#[test]
fn baselines_mirror_too() {
    let machine = shipped_machine("h200-efa");
    for case in kernels(OptionSet::Tilewire, cluster(2, 2), Fabric::EfaSrd, 1) {
        let form: &dyn Kernel = baseline(&case.schedule.kernel).expect("every kernel has an unfused form");
        let options = form.options(OptionSet::Tilewire, &case.spec.problem, case.spec.cluster);
        let schedule = form.build(&tilewire_kernels::Spec { options, ..case.spec.clone() }).expect("builds");
        let end = |execution| {
            let compiled = Compiled::new(&schedule, &machine, &Config { execution, ..Config::default() })?;
            let run = Scratch::default().run(&compiled, &split(0, 0, 0, 0), Form::Whole, false)?;
            Ok::<u64, SimError>(run.end)
        };
        let full = end(Execution::Full).expect("full always runs");
        if schedule.symmetry.is_full() {
            assert_eq!(end(Execution::Mirror), Ok(full), "{}", case.name);
        }
    }
}

//! `overlap` is within 0 to 1, or says why not; and each reason is the one that it names.

use crate::support::*;
use tilewire_kernels::{OptionSet, Problem, RoleKind, Spec, kernel};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::{OverlapReason, Prediction, Simulation, engine};

#[test]
fn no_number_outside_its_range_goes_without_a_reason() {
    let machine = shipped_machine("h200-efa");
    let (mut below, mut above) = (0, 0);
    for set in SETS {
        for case in kernels(set, cluster(2, 4), machine.fabric, 2) {
            let simulation = Simulation::new(&case.schedule, &machine, &full()).expect("compiles");
            for seed in 0..12 {
                let mut random = Random(seed);
                let (mut split, roles) = (case.split(1), case.split(1));
                for kind in RoleKind::ALL.into_iter().filter(|&kind| roles.get(kind) > 0) {
                    split.set(kind, random.within(1, 33) as u32);
                }
                let Prediction { overlap, overlap_reason, exposed_comm_us, .. } =
                    simulation.predict(&split).expect("runs");
                let name = format!("{} {split}: {overlap}, {overlap_reason:?}", case.name);
                match overlap_reason {
                    None => assert!((0.0..=1.0).contains(&overlap) && exposed_comm_us >= 0.0, "{name}"),
                    Some(OverlapReason::HelpHeld | OverlapReason::PartsHinder) => {
                        assert!(overlap < 0.0 && exposed_comm_us > 0.0, "{name}");
                        below += 1;
                    }
                    Some(OverlapReason::ComputeAloneSlower) => {
                        assert!(overlap > 1.0 && exposed_comm_us < 0.0, "{name}");
                        above += 1;
                    }
                    Some(OverlapReason::CommAloneSlower) => {
                        assert!(overlap > 1.0, "{name}");
                        above += 1;
                    }
                }
            }
        }
    }
    println!("{below} below 0, {above} above 1");
}

/// A ring whose copies wait for credits most of the time, with CTAs that would help to compute instead.
#[test]
fn help_that_communication_holds_is_missing_only_where_ctas_recycle() {
    let machine = shipped_machine("h200-efa");
    let predict = |recycle: &str| {
        let kernel = kernel("ring_attention").expect("in the registry");
        let problem = Problem::Attention { seq: 98_304, batch: 4, heads: 16, head_dim: 128 };
        let cluster = cluster(2, 4);
        let mut options = kernel.options(OptionSet::Tilewire, &problem, cluster);
        options.set("recycle", recycle).expect("an option");
        let schedule = kernel.build(&Spec { problem, cluster, fabric: machine.fabric, options }).expect("builds");
        let simulation = Simulation::new(&schedule, &machine, &mirror()).expect("compiles");
        simulation.predict(&split(37, 8, 2, 0)).expect("runs")
    };
    let (with, without) = (predict("true"), predict("false"));
    assert_eq!(with.overlap_reason, Some(OverlapReason::HelpHeld), "{}", with.overlap);
    assert_eq!(without.overlap_reason, None, "{}", without.overlap);
    assert!(with.time_us <= without.time_us, "{} > {}", with.time_us, without.time_us);
    assert!(with.compute_only_us < without.compute_only_us, "the help is in compute_only");
}

#[test]
fn communication_alone_is_slower_only_where_resources_are_shared_and_ctas_handed_over() {
    let machine = shipped_machine("h200-efa");
    let kernel = kernel("gemm_ar").expect("in the registry");
    let problem = Problem::Gemm { m: 65_536, n: 2048, k: 512 };
    let cluster = cluster(4, 8);
    let compiled = |recycle: &str| {
        let mut options = kernel.options(OptionSet::Tilewire, &problem, cluster);
        options.set("recycle", recycle).expect("an option");
        let spec = Spec { problem, cluster, fabric: machine.fabric, options };
        Compiled::new(&kernel.build(&spec).expect("builds"), &machine, &mirror()).expect("compiles")
    };
    let ends = |compiled: &Compiled| {
        let end = |form| engine::run(compiled, &split(115, 1, 8, 8), form, false).expect("runs").end;
        (end(Form::Whole), end(Form::CommOnly))
    };
    let (whole, comm) = ends(&compiled("true"));
    assert!(comm > whole, "the case is one: {comm} against {whole}");
    let (whole, comm) = ends(&compiled("false"));
    assert!(comm <= whole, "nothing handed over: {comm} against {whole}");
    let mut alone = compiled("true");
    alone.capacities.fill((1 << 60, 0));
    let (whole, comm) = ends(&alone);
    assert!(comm <= whole, "nothing shared: {comm} against {whole}");
}

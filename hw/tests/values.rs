//! The functional executor over every kernel of the registry.

#[path = "../../kernels/tests/small/mod.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::{Case, cases};
use std::collections::{BTreeMap, BTreeSet};
use tilewire_hw::values::{Config, ExecError, Race, Report, Scheduler, run};
use tilewire_kernels::{Fabric, OptionSet, RoleKind, RoleSplit, bulk_synchronous};

const SCHEDULERS: [Scheduler; 9] = [
    Scheduler::Laggards,
    Scheduler::RoundRobin,
    Scheduler::Random,
    Scheduler::DelayedPuts,
    Scheduler::ReorderedPuts,
    Scheduler::Starve(RoleKind::Compute),
    Scheduler::Starve(RoleKind::IntraComm),
    Scheduler::Starve(RoleKind::InterSend),
    Scheduler::Starve(RoleKind::InterReduce),
];

/// CTAs per role; the last is one for every task, so that only flags hold tasks back.
const CTAS: [u32; 4] = [1, 2, 3, 64];

fn config(case: usize, turn: usize) -> Config {
    let ctas = CTAS[(case + turn) % CTAS.len()];
    // Laggards always, four of the others by turns.
    let other = 1 + (4 * case + turn) % (SCHEDULERS.len() - 1);
    let scheduler = SCHEDULERS[if turn == 0 { 0 } else { other }];
    let split = RoleSplit { compute: ctas, intra_comm: ctas, inter_send: ctas, inter_reduce: ctas };
    Config { split, sms: 4 * ctas, seed: (case * 100 + turn) as u64, scheduler, ..Config::default() }
}

/// Runs of a case.
const TURNS: usize = 5;

/// Runs every case of a set a few times; schedulers and CTA counts take turns over cases and runs.
fn suite(set: OptionSet, fabric: Fabric, mut accept: impl FnMut(&Case, &Config, Result<Report, ExecError>)) {
    for (i, case) in cases(set, fabric).iter().enumerate() {
        let schedule = case.kernel.build(&case.spec).expect("a small case builds");
        for turn in 0..TURNS {
            let config = config(i, turn);
            accept(case, &config, run(&schedule, case.kernel, &case.spec, &config));
        }
    }
}

fn clean(case: &Case, config: &Config, result: Result<Report, ExecError>) {
    match result {
        Ok(report) => assert!(report.races.is_empty(), "{}: {config:?}\n{}", case.name(), report.races[0]),
        Err(error) => panic!("{}: {config:?}\n{error}", case.name()),
    }
}

#[test]
fn tilewire_sets_are_right_and_free_of_races_on_ib_rc() {
    suite(OptionSet::Tilewire, Fabric::IbRc, clean);
}

#[test]
fn tilewire_sets_are_right_and_free_of_races_on_efa_srd() {
    suite(OptionSet::Tilewire, Fabric::EfaSrd, clean);
}

#[test]
fn bulk_synchronous_forms_are_right_and_free_of_races() {
    let mut seen = BTreeSet::new();
    for (i, case) in cases(OptionSet::Tilewire, Fabric::IbRc).iter().enumerate() {
        // Whose ranks have different tasks, it says so.
        let Ok(schedule) = bulk_synchronous(case.kernel.build(&case.spec).expect("a small case builds")) else {
            continue;
        };
        seen.insert(case.kernel.name());
        for turn in 0..2 {
            let config = config(i, turn);
            clean(case, &config, run(&schedule, case.kernel, &case.spec, &config));
        }
    }
    assert_eq!(seen.len(), 5, "every kernel has one: {seen:?}");
}

/// What is known to go wrong in a published set: races, by kernel. A kernel without one computes right values.
fn known_races(kernel: &str, fabric: Fabric) -> Vec<&'static str> {
    // A word that is a write of its own may overtake its data where the fabric does not order them.
    let overtaken: &[&str] = match kernel {
        _ if fabric != Fabric::EfaSrd => &[],
        "ag_gemm" => {
            &["landing: copy read / put write", "landing: gemm_tile read / put write", "landing: put read / put write"]
        }
        "gemm_ar" | "gemm_rs" => &["landing: put write / reduce read"],
        "moe_dispatch_gemm" => &["tokens: gather_rows read / put write"],
        _ => &["landing: copy read / put write"],
    };
    let others: &[&str] = match kernel {
        "gemm_rs" => &[
            // A rank's main launch waits for its own zeroing helper, not for its neighbours'.
            "staging: fill write / gemm_tile add",
            // A chunk is signalled ready before the adds into it are visible.
            "staging: gemm_tile add / put read",
            "staging: gemm_tile add / reduce read",
            "staging: gemm_tile write / put read",
            "staging: gemm_tile write / reduce read",
        ],
        // Nothing protects the source of a put until it is sent.
        "ring_attention" => &["k: copy write / put read", "v: copy write / put read"],
        _ => &[],
    };
    [overtaken, others].concat()
}

fn published(fabric: Fabric) {
    let mut found: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    suite(OptionSet::Published, fabric, |case, config, result| {
        let races = match result {
            Ok(report) => report.races,
            Err(ExecError::Wrong(_, races)) if !known_races(case.kernel.name(), fabric).is_empty() => races,
            Err(error) => panic!("{}: {config:?}\n{error}", case.name()),
        };
        found.entry(case.kernel.name()).or_default().extend(races.iter().map(Race::signature));
    });
    for (kernel, races) in found {
        let known: BTreeSet<String> = known_races(kernel, fabric).iter().map(ToString::to_string).collect();
        assert_eq!(races, known, "{kernel} on {fabric}");
    }
}

#[test]
fn published_sets_have_known_races_only_on_ib_rc() {
    published(Fabric::IbRc);
}

#[test]
fn published_sets_have_known_races_only_on_efa_srd() {
    published(Fabric::EfaSrd);
}

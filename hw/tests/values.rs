//! The functional executor over every kernel of the registry.

#[path = "../../kernels/tests/small/mod.rs"]
mod small;

use small::{Case, cases};
use tilewire_hw::values::{Config, ExecError, Report, Scheduler, run};
use tilewire_kernels::{Fabric, OptionSet, RoleKind, RoleSplit};

const SCHEDULERS: [Scheduler; 8] = [
    Scheduler::RoundRobin,
    Scheduler::Random,
    Scheduler::DelayedPuts,
    Scheduler::ReorderedPuts,
    Scheduler::Starve(RoleKind::Compute),
    Scheduler::Starve(RoleKind::IntraComm),
    Scheduler::Starve(RoleKind::InterSend),
    Scheduler::Starve(RoleKind::InterReduce),
];

fn split(ctas: u32) -> RoleSplit {
    RoleSplit { compute: ctas, intra_comm: ctas, inter_send: ctas, inter_reduce: ctas }
}

fn execute(case: &Case, config: &Config) -> Result<Report, ExecError> {
    let schedule = case.kernel.build(&case.spec).expect("a small case builds");
    run(&schedule, case.kernel, &case.spec, config)
}

/// Runs every case of a set under every scheduler, with 1, 2, 3 and very many CTAs per role in turn.
fn suite(set: OptionSet, fabric: Fabric, accept: impl Fn(&Case, &Config, Result<Report, ExecError>)) {
    for (i, case) in cases(set, fabric).iter().enumerate() {
        for (j, scheduler) in SCHEDULERS.into_iter().enumerate() {
            let ctas = [1, 2, 3, 64][(i + j) % 4];
            let seed = (i * SCHEDULERS.len() + j) as u64;
            let config = Config { split: split(ctas), sms: 4 * ctas, seed, scheduler, ..Config::default() };
            accept(case, &config, execute(case, &config));
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
fn published_sets_end() {
    suite(OptionSet::Published, Fabric::EfaSrd, |case, config, result| {
        if let Err(error) = result
            && !matches!(error, ExecError::Wrong(..))
        {
            panic!("{}: {config:?}\n{error}", case.name());
        }
    });
}

//! The static checker over every kernel of the registry, and one broken schedule for each of its rules.

mod small;

use small::{cases, changed};
use smallvec::smallvec;
use tilewire_kernels::check::{Finding, Problem, Severity, ShapeError, check, check_fatal, has_fatal};
use tilewire_kernels::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, CtaCount, DType, Engine, FamilyId, Flag, FlagFamily, Gate, GatherEntry,
    Launch, Op, Place, Publish, Region, Role, Signal, Symmetry, TableSlice, TaskSource, Wait,
};
use tilewire_kernels::{Cluster, Fabric, Offset, OptionSet, Rank, RoleKind, RoleSplit, Schedule, Task};

fn text(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("{finding}\n")).collect()
}

#[test]
fn tilewire_sets_have_no_findings() {
    for fabric in [Fabric::IbRc, Fabric::EfaSrd] {
        for case in cases(OptionSet::Tilewire, fabric) {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            let findings = check(&schedule, None);
            assert!(findings.is_empty(), "{}\n{}", case.name(), text(&findings));
        }
    }
}

#[test]
fn published_sets_have_no_fatal_findings() {
    for case in cases(OptionSet::Published, Fabric::EfaSrd) {
        let schedule = case.kernel.build(&case.spec).expect("a small case builds");
        let findings = check(&schedule, None);
        assert!(!has_fatal(&findings), "{}\n{}", case.name(), text(&findings));
    }
}

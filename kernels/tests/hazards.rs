//! Races that the static checker finds by happens-before, over every kernel of the registry.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::cases;
use tilewire_kernels::check::{Problem, check_hazards};
use tilewire_kernels::{Fabric, OptionSet};

/// The option sets of this project have no hazard on any small cluster and fabric.
#[test]
fn tilewire_option_sets_are_clean() {
    for fabric in [Fabric::IbRc, Fabric::EfaSrd, Fabric::Loopback] {
        for case in cases(OptionSet::Tilewire, fabric) {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            let found = check_hazards(&schedule, None);
            let text: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert!(found.is_empty(), "{}\n{}", case.name(), text.join("\n"));
        }
    }
}

/// What the checker finds in the published option sets, a line for each kernel, cluster size and kind of finding.
fn published() -> String {
    let mut lines = std::collections::BTreeSet::new();
    for fabric in [Fabric::IbRc, Fabric::EfaSrd] {
        for case in cases(OptionSet::Published, fabric) {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            let at = format!("{:18} {:7} {}", case.kernel.name(), fabric.name(), case.spec.cluster);
            let found = check_hazards(&schedule, None);
            if found.is_empty() {
                lines.insert(format!("{at}  clean"));
            }
            for finding in found {
                let what = match &finding.problem {
                    Problem::Race { buffer, kind, first, second, .. } => {
                        let op = finding.at.as_ref().map_or("", |at| at.op);
                        format!(
                            "race on {buffer}: {op} {second:?} before {} {:?} is over, {kind:?}",
                            first.task.op, first.access
                        )
                    }
                    Problem::EarlySignal { family, .. } => format!("early signal {family}"),
                    Problem::FabricOrder { family, .. } => format!("fabric order of {family}"),
                    other => other.to_string(),
                };
                lines.insert(format!("{at}  {what}"));
            }
        }
    }
    lines.into_iter().map(|line| line + "\n").collect()
}

/// The snapshot stands beside this file; what a change to it means is for its reader to say.
#[test]
fn published_findings_are_as_in_the_snapshot() {
    let found = published();
    assert!(found == include_str!("published_findings.txt"), "published_findings.txt should be:\n{found}");
}

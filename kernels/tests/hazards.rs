//! Races that the static checker finds by happens-before, over every kernel of the registry.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::cases;
use tilewire_kernels::check::check_hazards;
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

#[test]
fn show_published() {
    for fabric in [Fabric::IbRc, Fabric::EfaSrd] {
        for case in cases(OptionSet::Published, fabric) {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            let found = check_hazards(&schedule, None);
            println!("== {}", case.name());
            for f in &found {
                println!("{f}");
            }
        }
    }
}

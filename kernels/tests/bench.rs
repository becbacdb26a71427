//! The benchmarks' own help.

use std::collections::BTreeSet;

#[test]
fn the_usage_of_lab_names_every_command() {
    let source = include_str!("../cuda/bench/lab.cu");
    let mut commands: BTreeSet<&str> =
        source.split("cmd == \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    let usage = source.split("usage: lab ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a usage line");
    for named in usage.split('|') {
        assert!(commands.remove(named), "{named} is no command");
    }
    assert!(commands.is_empty(), "the usage lacks {commands:?}");
}

//! What may depend on what.

use serde_json::Value;
use std::process::Command;

fn dependencies(metadata: &Value, package: &str) -> Vec<String> {
    let packages = metadata["packages"].as_array().expect("cargo metadata lists packages");
    let package = packages.iter().find(|p| p["name"] == package).unwrap_or_else(|| panic!("no package {package}"));
    let dependencies = package["dependencies"].as_array().expect("a list");
    // Tests may look across: only what ships counts.
    let ships = |d: &&Value| d["kind"].is_null();
    dependencies.iter().filter(ships).filter_map(|d| d["name"].as_str()).map(str::to_owned).collect()
}

#[test]
fn arrows_between_crates() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path", manifest])
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let ours = |package: &str| -> Vec<String> {
        let mut ours: Vec<String> =
            dependencies(&metadata, package).into_iter().filter(|d| d.starts_with("tilewire")).collect();
        ours.sort();
        ours
    };
    assert_eq!(ours("tilewire-kernels"), [""; 0]);
    assert_eq!(ours("tilewire-sim"), ["tilewire-kernels"]);
    assert_eq!(ours("tilewire-hw"), ["tilewire-kernels"]);
    assert_eq!(ours("tilewire"), ["tilewire-hw", "tilewire-kernels", "tilewire-sim"]);
    for package in ["tilewire-kernels", "tilewire-sim"] {
        for hardware in ["cudarc", "ibverbs", "ibverbs-sys", "libloading"] {
            assert!(!dependencies(&metadata, package).contains(&hardware.to_owned()), "{package} uses {hardware}");
        }
    }
}

//! Which rows a claim of an experiment is about, through the real binary.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

const EXPERIMENT: &str = "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = \"2x2-h200-efa\"\n\
    shape = { m = [1024, 2048], n = 1024, k = 256 }\nsplit = [\"compute=120,send=4,reduce=8\", \"compute=110,send=4,reduce=8\"]\n\
    [set]\nsend_order = [\"any\", \"in_order\"]\ntile_m = [64, 128]\n";

fn sweep(folder: &Path, filter: &str) -> Output {
    let claim = "[[expect]]\nclaim = \"all are large\"\nof = \"every\"\ncolumn = \"m\"\nat_least = 2048\n";
    fs::write(folder.join("x.toml"), format!("{EXPERIMENT}{claim}where = {filter}\n")).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.args(["sweep", "x.toml", "-o", "out"]).current_dir(folder).output().expect("the binary runs")
}

/// The rows are those of both shapes unless the filter says `m = 2048` too: the claim breaks exactly where some row matches.
#[test]
fn options_are_named_in_any_order_as_text_or_as_a_table() {
    for set in [
        "\"send_order=any;tile_m=64\"",
        "\"tile_m=64; send_order=any\"",
        "{ tile_m = 64, send_order = \"any\" }",
        "{ send_order = \"any\" }",
        "\"tile_m=128\"",
    ] {
        let folder = TempDir::new().expect("a temporary directory");
        let output = sweep(folder.path(), &format!("{{ m = 2048, set = {set} }}"));
        assert_eq!(output.status.code(), Some(0), "{set}: {}", String::from_utf8_lossy(&output.stderr));
        let output = sweep(folder.path(), &format!("{{ set = {set}, inter_send = 4 }}"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{set}: {error}");
        assert!(error.contains("does not hold: m = 1024"), "{set}: {error}");
    }
}

#[test]
fn a_claim_about_no_point_is_refused_with_what_is_there() {
    for (filter, expected) in [
        (
            "{ set = { send_order = \"none\" } }",
            "no point has set = send_order=none, allowed here: send_order=any;tile_m=128, send_order=any;tile_m=64, ",
        ),
        (
            "{ set = \"tile_m=64;send_order\" }",
            "no point has set = send_order, allowed here: send_order=any;tile_m=64, ",
        ),
        ("{ set = \"\" }", "no point has set = \"\", allowed here: send_order=any;tile_m=128, "),
        ("{ set = [\"tile_m=64\"] }", "where.set: a list, allowed: "),
        ("{ inter_send = 8 }", "no point has inter_send = 8, allowed here: 4"),
        ("{ m = 1024, cluster = \"2x8\" }", "no point has cluster = 2x8, allowed here: 2x2"),
        ("{ speed = 1 }", "no column \"speed\""),
    ] {
        let folder = TempDir::new().expect("a temporary directory");
        let output = sweep(folder.path(), filter);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{filter}: {error}");
        assert!(error.starts_with("error: x.toml:") && error.contains(expected), "{filter}: {error}");
        assert!(error.lines().count() <= 3 && !folder.path().join("out").exists(), "{filter}: {error}");
    }
}

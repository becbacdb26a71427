//! `scale` through the real binary.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const HEAD: &str = "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = [\"2x2-h200-efa\", \"4x2-h200-efa\"]\n\
    split = \"compute=120,send=4,reduce=8\"\nshape = { m = 2048, n = 1024, k = 512 }\nreplicates = 6\n";

fn scale(folder: &Path, text: &str, more: &[&str]) -> Output {
    let file = folder.join("study.toml");
    fs::write(&file, format!("{HEAD}{text}")).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.arg("scale").arg(&file).arg("-o").arg(folder.join("out")).args(more);
    command.output().expect("the binary")
}

fn hypothesis(of: &str, rest: &str) -> String {
    format!("[[hypothesis]]\nclaim = \"c\"\ncolumn = \"time_us\"\nof = {of}\n{rest}\n")
}

#[test]
fn hypotheses_hold_or_fail_alike_on_any_number_of_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    // More nodes share the same rows and pay for more messages: slower than half, faster than ten times.
    let text = hypothesis("{ cluster = \"4x2\" }", "than = { cluster = \"2x2\" }\nat_least = 0.5\nat_most = 10")
        + &hypothesis("{ cluster = \"2x2\" }", "at_least = 1");
    let mut bytes = Vec::new();
    for threads in ["1", "2"] {
        let output = scale(folder.path(), &text, &["--threads", threads]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let rows = fs::read_to_string(folder.path().join("out/rows.csv")).expect("rows");
        assert_eq!(rows.lines().count(), 1 + 2 * 6);
        // Every replicate drew noise of its own.
        let times: std::collections::BTreeSet<&str> = rows.lines().skip(1).collect();
        assert_eq!(times.len(), 12);
        bytes.push((rows.clone(), fs::read(folder.path().join("out/hypotheses.csv")).expect("hypotheses")));
    }
    assert_eq!(bytes[0], bytes[1]);

    let output = scale(folder.path(), &hypothesis("{ cluster = \"2x2\" }", "at_most = 1"), &[]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stdout).contains("FAILS"));
}

#[test]
fn mistakes_are_refused_and_nothing_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = |of: &str, rest: &str| hypothesis(of, rest);
    for (text, words) in [
        (text("{ kernel = \"gemm_rs\" }", "at_least = 1"), "of: matches 2 of 2 points"),
        (text("{ cluster = \"9x9\" }", "at_least = 1"), "of: no point has cluster = 9x9, allowed here: "),
        (text("{ time_us = 3 }", "at_least = 1"), "known only after a run"),
        (text("{ cluster = \"2x2\" }", ""), "claims nothing"),
        (text("{ cluster = \"2x2\" }", "at_least = 2\nat_most = 1"), "nothing satisfies both"),
        (text("{ cluster = \"2x2\" }", "at_least = 1\nnode = 3"), "hypothesis.node: unknown key"),
        (text("{ cluster = \"2x2\" }", "than = { cluster = \"2x2\" }\nat_least = 1"), "are the same point"),
        (text("{ cluster = \"2x2\" }", "at_least = 1").replace("time_us", "seq"), "has no seq"),
        (text("{ cluster = \"2x2\" }", "at_least = 1").replace("time_us", "hazards"), "with --hazards only"),
        (
            format!("execution = \"mirror\"\n{}", text("{ cluster = \"2x2\" }", "at_least = 1")),
            "study.toml:7:13: execution: mirror, where noise makes ranks differ; allowed with noise: folded, full",
        ),
        (String::new(), "belongs to [[hypothesis]]"),
    ] {
        let output = scale(folder.path(), &text, &[]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(words) && error.lines().count() <= 3, "{error}");
        assert!(!folder.path().join("out").exists());
    }
}

#[test]
fn only_what_was_drawn_is_said_to_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = |head: &str| {
        let text = head.to_owned() + &hypothesis("{ cluster = \"2x2\" }", "at_least = 1");
        fs::write(folder.path().join("study.toml"), text).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
        let output =
            command.args(["scale", "study.toml", "-o", "out"]).current_dir(&folder).output().expect("the binary");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let text = said(HEAD);
    assert!(text.contains("what the seeds draw (latencies, clocks, one late rank),"), "{text}");
    let moe = "question = \"?\"\nkernel = \"moe_dispatch_gemm\"\ncluster = \"2x2-h200-efa\"\nreplicates = 2\n\
               split = \"compute=112,intra=12,send=4,reduce=4\"\nshape = { tokens = 2048, experts = 32 }\n";
    let text = said(moe);
    assert!(text.contains("what the seeds draw (routing, latencies, clocks, one late rank),"), "{text}");
    let text = said(&format!("noise = false\n{moe}"));
    assert!(text.contains("what the seeds draw (routing),"), "{text}");
    let dense = HEAD.replace("replicates = 6\n", "noise = false\n");
    let text = said(&dense);
    assert!(text.contains("nothing is drawn") && text.contains("in lockstep"), "{text}");
}

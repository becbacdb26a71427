//! Ctrl-C: what was finished is kept and drawn, and every output says that it is not all.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Runs a command on `x.toml`, interrupts it once it has written some rows; returns its words on stderr.
fn interrupted(folder: &Path, command: &str, rows: usize) -> String {
    let mut tilewire = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    tilewire.args([command, "x.toml", "-o", "out"]).current_dir(folder).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = tilewire.spawn().expect("the binary");
    let enough = || {
        let text = fs::read_to_string(folder.join("out/rows.csv")).unwrap_or_default();
        text.lines().count() > rows
    };
    while !enough() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(killed.success());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const HEAD: &str =
    "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = \"2x8-h200-efa\"\nshape = { m = 8192, n = 4096, k = 512 }\n";

#[test]
fn a_sweep_draws_what_it_has_and_says_that_it_is_partial() {
    let folder = tempfile::tempdir().expect("a folder");
    // Few values of the role that varies first, so that the rows of the beginning vary in both.
    let text = "[split]\ncompute = \"rest\"\nsend = { from = 2, to = 60 }\nreduce = [4, 8, 16, 32, 48, 60]\n\
                [[expect]]\nclaim = \"never\"\nof = \"best\"\ncolumn = \"time_us\"\nat_most = 1\n";
    fs::write(folder.path().join("x.toml"), format!("{HEAD}{text}")).expect("a file");
    let said = interrupted(folder.path(), "sweep", 20);
    let rows = fs::read_to_string(folder.path().join("out/rows.csv")).expect("rows").lines().count() - 1;
    let partial = format!("{rows} of 354 points");
    assert!(rows < 354 && said.contains(&format!("interrupted: {partial} are done")), "{rows} rows: {said}");
    assert!(said.contains("partial") && !said.contains("does not hold"), "claims are about all rows: {said}");
    let run = fs::read_to_string(folder.path().join("out/run.toml")).expect("run.toml");
    assert!(run.contains(&format!("partial = \"{partial}\"")), "{run}");
    for plot in ["heat", "time_send", "time_reduce"] {
        let svg = fs::read_to_string(folder.path().join(format!("out/{plot}.svg"))).expect(plot);
        assert!(svg.contains(&format!("partial, {partial}")), "{plot}");
        assert!(run.contains(&format!("\"{plot}.png\"")), "the next run takes {plot} away: {run}");
    }
}

#[test]
fn a_study_keeps_its_rows_and_decides_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = "split = \"compute=120,send=4,reduce=8\"\nreplicates = 2000\n[[hypothesis]]\nclaim = \"never\"\n\
                column = \"time_us\"\nof = { kernel = \"gemm_rs\" }\nat_most = 1\n";
    fs::write(folder.path().join("x.toml"), format!("{HEAD}{text}").replace("2x8", "2x2")).expect("a file");
    let said = interrupted(folder.path(), "scale", 2);
    assert!(said.contains("of 2000 points are done") && said.contains("decides nothing"), "{said}");
    let run = fs::read_to_string(folder.path().join("out/run.toml")).expect("run.toml");
    assert!(run.contains("of 2000 points") && run.contains("files = [\"rows.csv\"]"), "{run}");
    assert!(!folder.path().join("out/hypotheses.csv").exists());
}

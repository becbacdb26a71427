//! `measure` with ranks that are processes: values are checked on the host device, and what cannot run says so.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const EXPERIMENT: &str = r#"
question = "Does it compute right values as four processes?"
kernel   = "gemm_rs"
cluster  = "2x2-h200-cx7"
options  = "tilewire"
split    = ["compute=2,send=1,reduce=1", "compute=1,send=2,reduce=2"]

[shape]
m = 128
n = 128
k = 32

[set]
tile_m = 16
tile_n = 32
tile_k = 16
"#;

/// Runs `measure` with more arguments on an experiment of this text.
fn measure(directory: &Path, text: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let file = directory.join("x.toml");
    std::fs::write(&file, text).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.arg("measure").arg(&file).args(arguments).current_dir(directory);
    if !arguments.contains(&"--device") {
        command.args(["--device", "host"]);
    }
    for name in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK", "WORLD_SIZE", "TILEWIRE_SECRET"] {
        command.env_remove(name);
    }
    command.envs(environment.iter().copied()).output().expect("the binary runs")
}

/// Exit code and errors of a run that writes nothing.
fn refused(text: &str, arguments: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let output = measure(directory.path(), text, arguments, environment);
    let files: Vec<PathBuf> = std::fs::read_dir(directory.path())
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    assert_eq!(files, [directory.path().join("x.toml")], "nothing is written");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn four_processes_compute_right_values_and_rank_0_writes_the_rows() {
    let directory = tempfile::tempdir().expect("a directory");
    let output = measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "out"], &[]);
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert_eq!(out.matches("all values right over loopback").count(), 1, "only rank 0 speaks: {out}");
    let rows = std::fs::read_to_string(directory.path().join("out/rows.csv")).expect("rows");
    assert_eq!(rows.lines().count(), 3, "{rows}");
    // Three runs of a 128 x 128 output, over all ranks.
    assert!(rows.lines().skip(1).all(|row| row.contains(&format!("\"{}\"", 3 * 128 * 128))), "{rows}");
}

#[test]
fn a_run_that_was_stopped_goes_on_and_another_experiment_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let rows = || std::fs::read_to_string(directory.path().join("out/rows.csv")).unwrap_or_default();
    // No time at all: no point is begun.
    let output = measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "out", "--budget-s", "0"], &[]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.starts_with("0 of 2 points; run again to go on"), "{text}");
    assert!(text.trim_end().ends_with("nothing was run or written"), "{text}");
    let first = EXPERIMENT.replace(r#", "compute=1,send=2,reduce=2"]"#, "]");
    assert!(measure(directory.path(), &first, &["--spawn", "-o", "out"], &[]).status.success());
    let before = rows();
    assert_eq!(before.lines().count(), 2, "{before}");
    assert!(measure(directory.path(), &first, &["--spawn", "-o", "out"], &[]).status.success());
    assert_eq!(rows(), before, "a point with a row is not measured again");
    let output = measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "out"], &[]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("is not what this run would use; choose another directory with -o"), "{text}");
    // A machine file chooses the transport: rows of another one are not mixed with this one's.
    let machines = directory.path().join("out/machines");
    let machine = std::fs::read_dir(machines).expect("kept").next().expect("one").expect("read").path();
    let other = std::fs::read_to_string(&machine).expect("kept") + "\n# other\n";
    std::fs::write(&machine, other).expect("writable");
    assert_eq!(measure(directory.path(), &first, &["--spawn", "-o", "out"], &[]).status.code(), Some(2));
    assert_eq!(rows(), before);
}

#[test]
fn arguments_of_ranks_are_refused_before_any_rank_starts() {
    for (arguments, words) in [
        (&["--spawn", "--address", "nowhere"][..], "allowed: HOST:PORT"),
        (&["--spawn", "--address", "203.0.113.1:7311"], "rank 0 cannot listen there"),
        (&["--spawn", "--nics", "mlx5_0"], "--transport loopback uses no NIC"),
        (&["--spawn", "--budget-s", "soon"], "allowed: a number"),
        (
            &["--spawn", "--transport", "verbs"],
            "allowed: loopback; verbs-rc and verbs-srd in builds with --features rdma",
        ),
        (&["--spawn", "-o", "x.toml"], "x.toml"),
        (&["--spawn", "-o", "x.toml/out"], "choose another directory with -o"),
    ] {
        let (code, text) = refused(EXPERIMENT, arguments, &[]);
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
        assert!(text.contains(words) && text.lines().count() <= 3, "{arguments:?}: {text}");
    }
    for argument in [["--transport", "verbs-rc"], ["--nics", "mlx5_0"], ["--proxies", "2"]] {
        let (code, text) = refused(EXPERIMENT, &["--device", "gpu", argument[0], argument[1]], &[]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(&format!("{}: only with --device host", argument[0])), "{text}");
    }
}

#[test]
fn a_wire_is_calibrated_and_a_run_predicted_from_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    let output = command.args(["calibrate", "--fabric", "--spawn", "-o", "out"]).current_dir(directory.path()).output();
    let output = output.expect("the binary runs");
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert!(out.contains("over loopback") && out.contains("software, no claim about hardware"), "{out}");
    let text = std::fs::read_to_string(directory.path().join("out/h200-cx7-wire.toml")).expect("a machine file");
    let rail = text.lines().find(|line| line.starts_with("rail_gbs")).expect("a bandwidth");
    assert!(rail.contains(r#"kind = "measured""#) && rail.contains("no claim about hardware"), "{rail}");
    assert!(text.contains("\n[transport]\nqueue_pairs = "), "{text}");
    let predicted = std::fs::read_to_string(directory.path().join("out/predicted.csv")).expect("predictions");
    assert_eq!(predicted.lines().count(), 3, "{predicted}");
    // The machine file is one that every command reads.
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.args(["predict", "--kernel", "gemm_rs", "--cluster", "2x1-h200-cx7-wire", "--m", "512", "--n", "1024"]);
    let output =
        command.args(["--k", "128", "--machine", "out/h200-cx7-wire.toml"]).current_dir(directory.path()).output();
    let output = output.expect("the binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn what_cannot_run_is_refused() {
    let (code, text) = refused(EXPERIMENT, &[], &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("no launcher started this process; use mpirun or srun, or add --spawn"), "{text}");
    let (code, text) = refused(EXPERIMENT, &[], &[("RANK", "0"), ("WORLD_SIZE", "3")]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("3 processes, the experiment's cluster has 4 ranks"), "{text}");
    let (code, text) = refused(EXPERIMENT, &[], &[("RANK", "0"), ("WORLD_SIZE", "4")]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("TILEWIRE_SECRET"), "{text}");
    let large = EXPERIMENT.replace("128", "8192").replace("k = 32", "k = 512");
    let (code, text) = refused(&large, &["--spawn"], &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("the host device computes with scalars"), "{text}");
    let unordered = EXPERIMENT.replace("cx7", "efa");
    let (code, text) = refused(&unordered, &["--spawn"], &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("does not order what it relies on"), "{text}");
}

/// Nodes that GPUs of one host stand for: only machines that say so, in one process, one fabric at a time.
#[test]
fn emulated_nodes_that_cannot_be_are_refused() {
    let emulated =
        EXPERIMENT.replace("2x2-h200-cx7", "2x1-h200-emulated-ib").replace("compute=1,send=2", "compute=2,send=2");
    let gpu = ["--device", "gpu"];
    let real = EXPERIMENT.replace("2x2", "2x1");
    let two = emulated.replace("\"2x1-h200-emulated-ib\"", "[\"2x1-h200-emulated-ib\", \"2x1-h200-emulated-efa\"]");
    for (text, arguments, problem) in [
        (&real, &gpu[..], "allowed: one node, nodes emulated on this host, as in 2x1-h200-emulated-ib"),
        (&emulated, &["--device", "gpu", "--spawn"], "emulated nodes with ranks that are processes"),
        (&two, &gpu, "one machine per experiment"),
    ] {
        let (code, errors) = refused(text, arguments, &[]);
        assert_eq!(code, Some(2), "{errors}");
        assert_eq!(errors.matches(problem).count(), 1, "{errors}");
    }
}

/// Without the feature RDMA is refused by name; with it, a machine without a device ends with exit code 4 on the ranks.
#[test]
fn rdma_is_missing_by_name() {
    let (code, text) = refused(EXPERIMENT, &["--spawn", "--transport", "verbs-rc", "--nics", "no_such_nic"], &[]);
    if cfg!(feature = "rdma") {
        assert_eq!(code, Some(4), "{text}");
        assert!(text.contains("no RDMA"), "{text}");
    } else {
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("not in this build"), "{text}");
    }
    assert_ne!(code, Some(0), "{text}");
}

#[test]
fn a_recorded_run_opens_as_a_trace_beside_its_simulation() {
    let directory = tempfile::tempdir().expect("a directory");
    let one = EXPERIMENT.replace(r#", "compute=1,send=2,reduce=2"]"#, "]");
    let output = measure(directory.path(), &one, &["--spawn", "-o", "out", "--timelines"], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = directory.path().join("out/timelines");
    let files: Vec<PathBuf> =
        std::fs::read_dir(&folder).expect("timelines").map(|entry| entry.expect("one").path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let trace = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
        command.arg("trace").arg("--measured").arg(file).args(arguments).current_dir(directory.path());
        command.output().expect("the binary runs")
    };
    assert!(trace(&["--beside"]).status.success());
    let text = std::fs::read_to_string(directory.path().join("trace.json")).expect("a trace");
    let trace_of: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let events = trace_of["traceEvents"].as_array().expect("events");
    let ranks: Vec<&str> = events
        .iter()
        .filter(|event| event["name"] == "process_name")
        .filter_map(|event| event["args"]["name"].as_str())
        .collect();
    assert_eq!(ranks.len(), 8, "four ranks on each side: {ranks:?}");
    for side in ["measured", "simulated"] {
        assert_eq!(ranks.iter().filter(|name| name.ends_with(side)).count(), 4, "{ranks:?}");
    }
    // Every task of both sides, under the same names.
    let tracks = |from: u64| {
        let of_side = events.iter().filter(|event| event["name"] == "thread_name");
        let pid = |event: &&serde_json::Value| (from..from + 4).contains(&event["pid"].as_u64().unwrap_or(99));
        let mut names: Vec<&str> = of_side.filter(pid).filter_map(|event| event["args"]["name"].as_str()).collect();
        names.retain(|name| !name.contains("writes"));
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    };
    assert_eq!(tracks(0), tracks(4));
    let tiles = events.iter().filter(|event| event["name"] == "gemm_tile" && event["cat"] == "compute").count();
    assert_eq!(tiles, 2 * 4 * 32, "8 x 4 tiles of each rank");

    // A run that goes on does not mix recorded points with others.
    std::fs::remove_file(file).expect("a file");
    let output = measure(directory.path(), &one, &["--spawn", "-o", "out", "--timelines"], &[]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("measured without --timelines"), "{text}");
}

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
    bare(&mut command).envs(environment.iter().copied()).output().expect("the binary runs")
}

/// Without what a launcher may have left.
fn bare(command: &mut Command) -> &mut Command {
    for name in ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK", "WORLD_SIZE", "TILEWIRE_SECRET"] {
        command.env_remove(name);
    }
    command
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

/// The memory of CPU threads behind a bounce buffer, as a GPU's that no NIC reaches; and rows as JSON.
#[test]
fn a_bounce_buffer_is_told_in_every_record() {
    let directory = tempfile::tempdir().expect("a directory");
    let arguments = ["--spawn", "-o", "out", "--registration", "bounce", "--json"];
    let output = measure(directory.path(), EXPERIMENT, &arguments, &[]);
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    let object: serde_json::Value = serde_json::from_str(&out).expect("one JSON object");
    let rows = object["rows"].as_array().expect("rows");
    assert_eq!((rows.len(), object["points"].as_u64()), (2, Some(2)));
    for row in rows {
        assert_eq!(row["registration"], "bounce", "{row}");
        assert_eq!(row["elements"], 3.0 * 128.0 * 128.0, "{row}");
        assert!(row["transport"].as_str().is_some_and(|text| text.ends_with("through a bounce buffer")), "{row}");
    }
    // A row that a killed run has written in part is measured again, and nothing is said of the others.
    let file = directory.path().join("out/rows.csv");
    let whole = std::fs::read_to_string(&file).expect("rows");
    std::fs::write(&file, &whole[..whole.len() - 20]).expect("writable");
    let output = measure(directory.path(), EXPERIMENT, &arguments, &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.contains("the last row is not whole"), "{errors}");
    let again = std::fs::read_to_string(&file).expect("rows");
    assert_eq!((again.lines().count(), again.lines().nth(1)), (3, whole.lines().nth(1)), "{again}");
}

/// Starts a run of many points in the background.
fn begun(directory: &Path, arguments: &[&str]) -> std::process::Child {
    let long = EXPERIMENT.replace("seed", "").replace("k = 32", "k = [32, 64, 96, 128, 160, 192, 224, 256]");
    std::fs::write(directory.join("long.toml"), long).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.args(["measure", "long.toml", "--device", "host", "--spawn", "-o", "out"]).args(arguments);
    let command = bare(&mut command).current_dir(directory).stderr(std::process::Stdio::piped());
    command.stdout(std::process::Stdio::null()).spawn().expect("the binary runs")
}

/// The ranks that a process has started, once all four are there.
fn ranks_of(parent: u32) -> Vec<u32> {
    let begin = std::time::Instant::now();
    loop {
        let file = format!("/proc/{parent}/task/{parent}/children");
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let ranks: Vec<u32> = text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        if ranks.len() == 4 {
            return ranks;
        }
        assert!(begin.elapsed().as_secs() < 60, "no ranks");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn signal(name: &str, process: u32) {
    let status = Command::new("kill").args([name, &process.to_string()]).status().expect("kill runs");
    assert!(status.success());
}

/// Whether a process is gone, or is a zombie whose parent has not asked for it.
fn is_over(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

#[test]
fn a_stopped_rank_ends_the_run_with_its_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let parent = begun(directory.path(), &[]);
    let ranks = ranks_of(parent.id());
    signal("-STOP", ranks[2]);
    let output = parent.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert!(errors.contains("rank 2: was stopped by a signal, and the others waited for it: killed"), "{errors}");
    assert!(ranks.into_iter().all(is_over));
}

#[test]
fn two_runs_do_not_share_a_directory_and_no_rank_outlives_who_started_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut first = begun(directory.path(), &[]);
    let ranks = ranks_of(first.id());
    let second = measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "out"], &[]);
    let errors = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{errors}");
    assert!(errors.contains(&format!("process {} writes there now", first.id())), "{errors}");
    signal("-KILL", first.id());
    first.wait().expect("it was killed");
    let begin = std::time::Instant::now();
    while !ranks.iter().copied().all(is_over) {
        assert!(begin.elapsed().as_secs() < 60, "a rank is left behind");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // The lock of a dead run is free.
    let output = measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "other"], &[]);
    assert!(output.status.success());
    std::fs::copy(directory.path().join("out/.tilewire.lock"), directory.path().join("other/.tilewire.lock"))
        .expect("a dead run leaves its file");
    let output = measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "other"], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Ranks are started by who is asked to, whatever a launcher has left; unless it started many of them.
#[test]
fn spawn_wins_over_what_a_launcher_has_left() {
    let directory = tempfile::tempdir().expect("a directory");
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "7")];
    let output = measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "out"], &slurm);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let many = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
    let (code, text) = refused(EXPERIMENT, &["--spawn"], &many);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("OMPI_COMM_WORLD_RANK = 1, OMPI_COMM_WORLD_SIZE = 4"), "{text}");
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
        (&["--spawn", "--registration", "rdma"], "allowed: host, dmabuf, peermem, bounce"),
        (&["--spawn", "--registration", "dmabuf"], "allowed with --device host: host, bounce"),
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
    let alone = EXPERIMENT.replace("2x2-h200-cx7", "1x2-h200");
    for argument in
        [["--transport", "verbs-rc"], ["--nics", "mlx5_0"], ["--proxies", "2"], ["--registration", "bounce"]]
    {
        let (code, text) = refused(&alone, &["--device", "gpu", argument[0], argument[1]], &[]);
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
    let unordered = real.replace("cx7", "efa");
    let beside = real.replace("\"2x1-h200-cx7\"", "[\"2x1-h200-cx7\", \"4x1-h200-cx7\"]");
    let two = emulated.replace("\"2x1-h200-emulated-ib\"", "[\"2x1-h200-emulated-ib\", \"2x1-h200-emulated-efa\"]");
    for (text, arguments, problem) in [
        (&real, &gpu[..], "nothing says what carries puts between them; allowed: verbs-rc, verbs-srd, or loopback"),
        (
            &real,
            &["--device", "gpu", "--transport", "loopback"],
            "take a process for each rank: mpirun, srun, or --spawn",
        ),
        (
            &real,
            &["--device", "gpu", "--transport", "loopback", "--registration", "host"],
            "allowed with --device gpu: dmabuf, peermem, bounce",
        ),
        (
            &unordered,
            &["--device", "gpu", "--transport", "loopback"],
            "does not order what schedules for efa-srd rely on",
        ),
        (&beside, &["--device", "gpu", "--transport", "loopback"], "nodes of their own take one cluster and machine"),
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
    // Both sides under the same names, but for the CTA: which of a role's CTAs find work is a race.
    let tracks = |from: u64| {
        let of_side = events.iter().filter(|event| event["name"] == "thread_name");
        let pid = |event: &&serde_json::Value| (from..from + 4).contains(&event["pid"].as_u64().unwrap_or(99));
        let mut names: Vec<&str> = of_side.filter(pid).filter_map(|event| event["args"]["name"].as_str()).collect();
        names.retain(|name| !name.contains("writes"));
        let mut names: Vec<&str> =
            names.iter().map(|name| name.rsplit_once(' ').map_or(*name, |(role, _)| role)).collect();
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    };
    assert_eq!(tracks(0), tracks(4));
    assert_eq!(tracks(0), "main/compute, main/inter_reduce, main/inter_send");
    let tiles = events.iter().filter(|event| event["name"] == "gemm_tile" && event["cat"] == "compute").count();
    assert_eq!(tiles, 2 * 4 * 32, "8 x 4 tiles of each rank");

    // A run that goes on does not mix recorded points with others.
    std::fs::remove_file(file).expect("a file");
    let output = measure(directory.path(), &one, &["--spawn", "-o", "out", "--timelines"], &[]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("measured without --timelines"), "{text}");
}

#[test]
fn an_empty_secret_is_none() {
    for arguments in [&["--spawn"][..], &[]] {
        let environment = [
            ("TILEWIRE_SECRET", ""),
            ("TILEWIRE_RANK", "0"),
            ("TILEWIRE_RANKS", "4"),
            ("TILEWIRE_ADDRESS", "127.0.0.1:1"),
        ];
        let given = if arguments.is_empty() { &environment[..] } else { &environment[..1] };
        let (code, text) = refused(EXPERIMENT, arguments, given);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("TILEWIRE_SECRET: empty"), "{text}");
    }
}

#[test]
fn rows_that_a_killed_run_left_are_mended_or_refused_by_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let run = || measure(directory.path(), EXPERIMENT, &["--spawn", "-o", "out"], &[]);
    assert!(run().status.success());
    let file = directory.path().join("out/rows.csv");
    let whole = std::fs::read_to_string(&file).expect("rows");
    std::fs::write(&file, &whole[..whole.len() - 40]).expect("rows");
    let output = run();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("the last row is not whole"), "{text}");
    let again = std::fs::read_to_string(&file).expect("rows");
    assert_eq!(again.lines().count(), whole.lines().count());
    let row = again.lines().nth(1).expect("a row");
    std::fs::write(&file, format!("{again}{row}\n")).expect("rows");
    let output = run();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("the point of line 2 again"), "{text}");
    let mut cells: Vec<&str> = again.lines().nth(1).expect("a row").split(',').collect();
    let time = cells
        .iter()
        .position(|cell| cell.trim_matches('"').parse().is_ok_and(|time: f64| time > 100.0))
        .expect("a time");
    cells[time] = "nan";
    std::fs::write(&file, again.replacen(again.lines().nth(1).expect("a row"), &cells.join(","), 1)).expect("rows");
    let output = run();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("rows.csv:2: time_us: \"nan\", allowed: a time above 0"), "{text}");
}

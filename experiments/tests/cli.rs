//! Runs the binary on good and broken input; compares output, errors and exit codes.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn tilewire(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tilewire"))
        .args(arguments)
        .current_dir(directory)
        .output()
        .expect("the binary runs")
}

/// Runs a command line in an empty directory that must stay empty; returns its errors.
fn refused(arguments: &str) -> String {
    let directory = TempDir::new().expect("a temporary directory");
    let output = tilewire(directory.path(), &arguments.split_whitespace().collect::<Vec<_>>());
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(2), "{arguments}\n{stderr}");
    assert!(output.stdout.is_empty(), "{arguments}");
    assert!((1..=3).contains(&stderr.lines().count()), "{arguments}\n{stderr}");
    assert_eq!(fs::read_dir(directory.path()).expect("the directory").count(), 0, "{arguments} wrote something");
    stderr
}

fn ran(directory: &Path, arguments: &str) -> String {
    let output = tilewire(directory, &arguments.split_whitespace().collect::<Vec<_>>());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments}\n{stderr}");
    assert!(stderr.is_empty(), "no progress where there is no terminal: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn ran_anywhere(arguments: &str) -> String {
    ran(TempDir::new().expect("a temporary directory").path(), arguments)
}

const GEMM_RS: &str = "--kernel gemm_rs --cluster 2x8-h200-efa --m 4096 --n 4096 --k 256";

#[test]
fn predict_prints_one_json_object() {
    let text = ran_anywhere(&format!("predict {GEMM_RS} --split published --options published --hazards --json"));
    let answer: Value = serde_json::from_str(&text).expect("one JSON object");
    for field in [
        "time_us",
        "tflops_per_gpu",
        "compute_only_us",
        "comm_only_us",
        "overlap",
        "exposed_comm_us",
        "bound_by",
        "roles",
        "waits",
        "wire_gbs",
        "logical_gbs",
        "hazards",
        "schedule_hash",
        "machine",
        "mode",
        "protocol",
        "seed",
        "split",
        "options",
    ] {
        assert!(!answer[field].is_null(), "{field}");
    }
    let overlap = answer["overlap"].as_f64().expect("a number");
    assert_eq!(answer["overlap_reason"].is_null(), (0.0..=1.0).contains(&overlap), "{overlap}");
    assert_eq!(answer["protocol"], "published");
    assert_eq!(answer["mode"], "cluster");
    assert_eq!(answer["split"]["compute"], 114);
    let (time, compute) = (answer["time_us"].as_f64(), answer["compute_only_us"].as_f64());
    assert!(time.zip(compute).is_some_and(|(time, compute)| time > 0.0 && compute > 0.0));
}

/// What the host takes before an isolated launch is added to its time, whichever ranks are simulated.
#[test]
fn isolated_launches_hold_what_the_host_takes_in_every_execution() {
    let directory = TempDir::new().expect("a temporary directory");
    let case = "--kernel gemm_rs --cluster 2x4-h200-efa --m 4096 --n 4096 --k 256 --split compute=114,send=10,reduce=8";
    let predict = |rest: &str| -> Value {
        let text = ran(directory.path(), &format!("predict {case} --options published --json {rest}"));
        serde_json::from_str(&text).expect("one JSON object")
    };
    let answer = predict("");
    assert_eq!(answer["execution"], "folded");
    for execution in ["full", "mirror"] {
        assert_eq!(predict(&format!("--execution {execution}"))["time_us"], answer["time_us"], "{execution}");
    }
    let text = ran(directory.path(), &format!("predict {case} --options published"));
    assert!(text.contains(" us of the host before it"), "{text}");

    let sweep = "question = \"the same?\"\nkernel = \"gemm_rs\"\ncluster = \"2x4-h200-efa\"\n\
                 options = \"published\"\nshape = { m = 4096, n = 4096, k = 256 }\n\
                 split = \"compute=114,send=10,reduce=8\"\n";
    fs::write(directory.path().join("isolated.toml"), sweep).expect("a file");
    ran(directory.path(), "sweep isolated.toml -o out");
    let mut reader = csv::Reader::from_path(directory.path().join("out/rows.csv")).expect("rows");
    let row: BTreeMap<String, String> = reader.deserialize().next().expect("a row").expect("a whole row");
    assert_eq!(row["execution"], "folded");
    assert_eq!(row["time_us"], format!("{:.6}", answer["time_us"].as_f64().expect("a number")));
}

/// Launches that take all SMs leave nothing to split; what `auto` says of them means the same when it is given back.
#[test]
fn a_split_that_auto_prints_is_taken_back() {
    let case =
        "predict --kernel ring_attention --cluster 1x1-h200 --seq 384 --batch 1 --options published --json --split";
    let answer = |split: &str| -> Value {
        serde_json::from_str(&ran_anywhere(&format!("{case} {split}"))).expect("one JSON object")
    };
    let (auto, given) = (answer("auto"), answer("compute=0,intra=0,send=0,reduce=0"));
    for field in ["time_us", "split", "roles", "schedule_hash"] {
        assert_eq!(auto[field], given[field], "{field}");
    }
}

/// The epilogue of published `gemm_ar` has all SMs: it is no more of a role than the split says.
#[test]
fn helper_launches_stand_apart_in_the_roles() {
    let case = "--kernel gemm_ar --cluster 2x8-h200-efa --m 8192 --n 8192 --k 512 --options published";
    let answer: Value =
        serde_json::from_str(&ran_anywhere(&format!("predict {case} --json"))).expect("one JSON object");
    let (roles, time) = (answer["roles"].as_array().expect("a list"), answer["time_us"].as_f64().expect("a number"));
    let mut seen = Vec::new();
    for role in roles {
        let of = |name: &str| role[name].as_f64().expect("a number");
        let sum = of("busy_us") + of("wait_us") + of("idle_us");
        assert!((sum - of("ctas") * time).abs() < 1e-6 * sum && of("idle_us") >= 0.0, "{role}");
        let name = role["role"].as_str().expect("a name");
        if role["helper"].is_null() {
            assert_eq!(role["ctas"], answer["split"][name], "{role}");
        }
        seen.push((name, role["helper"].as_str()));
    }
    let main = ["compute", "intra_comm", "inter_send", "inter_reduce"].map(|name| (name, None));
    assert_eq!(seen, [&main[..], &[("inter_reduce", Some("epilogue"))]].concat());
    assert_eq!(roles[4]["ctas"], 132);
    assert!(ran_anywhere(&format!("predict {case}")).contains("  inter_reduce (epilogue)  "));
}

#[test]
fn every_kernel_is_predicted_fused_and_unfused() {
    let shapes = [
        ("ag_gemm", "--m 8192 --n 512 --k 8192"),
        ("gemm_ar", "--m 2048 --n 2048 --k 128"),
        ("gemm_rs", "--m 2048 --n 2048 --k 128"),
        ("moe_dispatch_gemm", "--tokens 8192"),
        ("ring_attention", "--seq 12288"),
    ];
    for (kernel, shape) in shapes {
        for form in ["--options published", "--baseline"] {
            let text = ran_anywhere(&format!("predict --kernel {kernel} --cluster 2x8-h200-cx7 {shape} {form}"));
            assert!(text.contains("time_us"), "{text}");
        }
    }
}

#[test]
fn defaults_of_a_shape_are_printed() {
    let text = ran_anywhere("predict --kernel ring_attention --cluster 2x8-h200-cx7 --seq 12288 --options published");
    assert!(text.contains("batch=4, heads=16, head_dim=128 by default"), "{text}");
}

#[test]
fn wrong_arguments_are_named_with_what_is_allowed() {
    for (arguments, expected) in [
        (
            "predict --kernel gemm_rx --cluster 2x8-h200-efa --m 1 --n 1 --k 1",
            "--kernel: no kernel \"gemm_rx\", allowed: ",
        ),
        ("predict --kernel gemm_rs --cluster 2x8-h300 --m 1 --n 1 --k 1", "--cluster: no machine \"h300\", allowed: "),
        ("predict --kernel gemm_rs --cluster 0x8-h200-efa --m 1 --n 1 --k 1", "sides from 1 to 1024"),
        ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 8192", "--n: missing; gemm_rs needs m, n, k"),
        ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 0", "allowed: a whole number from 1 to 1048576"),
        ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m -4", "allowed: a whole number from 1 to 1048576"),
        ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m nan", "allowed: a whole number from 1 to 1048576"),
        ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 99999999999999999999", "allowed: a whole number"),
        ("predict --kernel gemm_rs --cluster 2x8-h200-efa --seq 4096", "--seq: does not apply to gemm_rs"),
        ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 4097 --n 4096 --k 256", "nearest legal"),
        ("predict --no-such-flag", "unexpected argument '--no-such-flag'"),
        ("trace --kernel gemm_rs --cluster 2x8-h200-efa --from-us inf", "allowed: a number from 0"),
        ("sweep no_such_file.toml", "no_such_file.toml: No such file"),
        ("fit --without fabric=ib", "--without: \"fabric=ib\", allowed: fabric=cx7|efa, kernel=ag_gemm|"),
        ("fit --keep-host", "unexpected argument '--keep-host'"),
    ] {
        let stderr = refused(arguments);
        assert!(stderr.contains(expected), "{arguments}\n{stderr}");
    }
    for (rest, expected) in [
        ("--split compute=140,send=4,reduce=8", "needs 152 SMs"),
        ("--split compute=100,intra=4,send=4,reduce=8", "role intra_comm has no work"),
        ("--split compute=100,reduce=8", "give it at least 1"),
        ("--split compute=x", "--split: \"compute=x\""),
        ("--split compute=1,compute=2", "role compute twice"),
        ("--set no_such=1", "--set: kernel gemm_rs has no option \"no_such\"; it has "),
        ("--set tile_m=0", "--set: option tile_m of gemm_rs is \"0\"; allowed: an integer from 8 to 512"),
        ("--set tile_m", "--set: \"tile_m\", allowed: NAME=VALUE"),
        ("--machine missing.toml", "missing.toml: No such file"),
        ("--data missing", "missing: no such directory"),
        ("--threads 5000", "allowed: a whole number from 0 to 1024"),
    ] {
        let stderr = refused(&format!("predict {GEMM_RS} {rest}"));
        assert!(stderr.contains(expected), "{rest}\n{stderr}");
    }
}

#[test]
fn a_machine_file_replaces_the_named_one() {
    let directory = TempDir::new().expect("a temporary directory");
    let text = include_str!("../../data/machines/h200-efa.toml").replace("\"h200-efa\"", "\"mine\"");
    fs::write(directory.path().join("mine.toml"), text).expect("a file");
    let gemm = "--kernel gemm_rs --m 4096 --n 4096 --k 256 --split compute=114,send=10,reduce=8 --machine mine.toml";
    let answer = ran(directory.path(), &format!("predict {gemm} --cluster 2x8 --json"));
    assert_eq!(serde_json::from_str::<Value>(&answer).expect("JSON")["machine"], "mine");
    let output =
        tilewire(directory.path(), &format!("predict {gemm} --cluster 2x8-h200-efa").split(' ').collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(2));
}

const SWEEP: &str = "question = \"does it end?\"
kernel = \"gemm_rs\"
cluster = [\"2x8-h200-efa\", \"2x4-h200-cx7\"]
baseline = [false, true]

[shape]
m = [2048, 4096]
n = 4096
k = 256

[split]
compute = \"rest\"
send = [1, 4]
reduce = { from = 4, to = 16, step = 4 }
";

#[test]
fn a_sweep_does_not_depend_on_threads() {
    let directory = TempDir::new().expect("a temporary directory");
    fs::write(directory.path().join("small.toml"), SWEEP).expect("a file");
    let rows = |threads: u32| {
        ran(directory.path(), &format!("sweep small.toml -o out{threads} --threads {threads}"));
        fs::read(directory.path().join(format!("out{threads}/rows.csv"))).expect("rows")
    };
    let one = rows(1);
    assert_eq!(one, rows(2));
    let mut reader = csv::Reader::from_reader(one.as_slice());
    let columns = reader.headers().expect("a header").clone();
    let status = columns.iter().position(|column| column == "status").expect("a column");
    let records: Vec<csv::StringRecord> = reader.records().collect::<Result<_, _>>().expect("even rows");
    // 2 clusters x 2 shapes x (8 splits + 1 unfused).
    assert_eq!(records.len(), 36);
    assert!(records.iter().all(|record| &record[status] == "ok"));
    for name in ["run.toml", "experiment.toml", "machines/h200-efa.toml", "machines/h200-cx7.toml"] {
        assert!(directory.path().join("out1").join(name).is_file(), "{name}");
    }
    let images = fs::read_dir(directory.path().join("out1")).expect("the output");
    let count = |extension: &str, paths: &[PathBuf]| {
        paths.iter().filter(|p| p.extension().is_some_and(|e| e == extension)).count()
    };
    let paths: Vec<PathBuf> = images.map(|entry| entry.expect("an entry").path()).collect();
    assert!(count("png", &paths) > 0 && count("png", &paths) == count("svg", &paths));
}

/// Other fields of the shape tell lines over sizes apart, and a plot that would hold too many is missed in words.
#[test]
fn sizes_are_plotted_where_other_fields_vary_too() {
    let directory = TempDir::new().expect("a temporary directory");
    let fields = "n = [2048, 4096]\nk = [256, 512]";
    let text =
        SWEEP.replace("n = 4096\nk = 256", fields).replace("[\"2x8-h200-efa\", \"2x4-h200-cx7\"]", "\"2x4-h200-cx7\"");
    let text = text.replace("send = [1, 4]\nreduce = { from = 4, to = 16, step = 4 }", "send = 4\nreduce = 8");
    fs::write(directory.path().join("small.toml"), &text).expect("a file");
    let said = ran(directory.path(), "sweep small.toml -o out");
    assert!(said.contains("wrote out/size.png and .svg") && !said.contains("no plot over sizes"), "{said}");
    let plot = fs::read_to_string(directory.path().join("out/size.svg")).expect("a plot");
    assert!(plot.contains("unfused, n=4096, k=512"), "{plot}");
    fs::write(directory.path().join("small.toml"), text.replace("[256, 512]", "[256, 512, 1024]")).expect("a file");
    let said = ran(directory.path(), "sweep small.toml -o many");
    assert!(said.contains("no plot over sizes, which has 8 lines at most") && !said.contains("size.png"), "{said}");
}

#[test]
fn a_sweep_is_refused_before_anything_is_written() {
    for (from, to, expected) in [
        ("m = [2048, 4096]", "m = [2048, 0]", "small.toml:7:12: shape.m: 0, allowed: a whole number from 1 to 1048576"),
        ("m = [2048, 4096]", "m = nan", "small.toml:7:5: shape.m: nan, allowed: a whole number"),
        ("n = 4096", "n = 4096\nn = 8192", "small.toml:9:1: duplicate key"),
        ("k = 256", "k = 256\ndepth = 3", "small.toml:10:1: shape.depth: unknown key, allowed: "),
        ("question", "questio", "small.toml:1:1: questio: unknown key, allowed: question, "),
        ("\"rest\"", "\"most\"", "small.toml:12:11: split.compute: \"most\", allowed: \"rest\""),
        ("send = [1, 4]", "send = [1, 1]", "small.toml:13:12: split.send: 1 stands twice in the list"),
        ("send = [1, 4]", "send = [1, 4]\nintra = [1, 4]", "role intra_comm has no work"),
        ("to = 16", "to = 1025", "split.reduce.to: 1025, allowed: a whole number from 0 to 1024"),
        ("baseline = [false, true]", "baseline = \"no\"", "baseline: \"no\", allowed: true or false"),
        ("n = 4096", "n = 4097", "nearest legal"),
        ("\"gemm_rs\"", "[\"gemm_rs\", \"ring\"]", "small.toml:2:22: kernel: no kernel \"ring\", allowed: "),
    ] {
        let directory = TempDir::new().expect("a temporary directory");
        let text = SWEEP;
        assert!(text.contains(from), "{from}");
        fs::write(directory.path().join("small.toml"), text.replacen(from, to, 1)).expect("a file");
        let output = tilewire(directory.path(), &["sweep", "small.toml", "-o", "out"]);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(2), "{to}\n{stderr}");
        assert!(stderr.contains(expected), "{to}\n{stderr}");
        assert!((1..=3).contains(&stderr.lines().count()), "{stderr}");
        assert!(!directory.path().join("out").exists(), "{to}");
    }
}

#[test]
fn byte_order_marks_and_windows_line_ends_are_read() {
    let directory = TempDir::new().expect("a temporary directory");
    let text = format!("\u{feff}{}", SWEEP.replace('\n', "\r\n"));
    fs::write(directory.path().join("small.toml"), text).expect("a file");
    ran(directory.path(), "sweep small.toml -o out");
}

#[test]
fn output_that_cannot_be_written_is_refused() {
    let directory = TempDir::new().expect("a temporary directory");
    fs::write(directory.path().join("small.toml"), SWEEP).expect("a file");
    fs::write(directory.path().join("taken"), "").expect("a file");
    let output = tilewire(directory.path(), &["sweep", "small.toml", "-o", "taken"]);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("error: taken: "), "{stderr}");
}

#[test]
fn a_broken_claim_is_a_finding() {
    let claim = "\n[[expect]]\nclaim = \"light is slower\"\nof = \"every\"\ncolumn = \"time_us\"\nat_most = 1\n";
    let directory = TempDir::new().expect("a temporary directory");
    fs::write(directory.path().join("small.toml"), SWEEP.to_owned() + claim).expect("a file");
    let output = tilewire(directory.path(), &["sweep", "small.toml", "-o", "out"]);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("claim \"light is slower\" does not hold: time_us = "), "{stderr}");
    assert!(directory.path().join("out/rows.csv").is_file(), "the rows are there to look at");
}

#[test]
fn experiments_of_the_repository_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = TempDir::new().expect("a temporary directory");
    for entry in fs::read_dir(folder).expect("the crate") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
        if path.extension().is_none_or(|extension| extension != "toml") || name == "Cargo" {
            continue;
        }
        // An unwritable output is noticed after the file was read and its points were resolved.
        fs::write(directory.path().join(&name), "").expect("a file");
        let text = fs::read_to_string(&path).expect("an experiment");
        let command = if text.contains("[[hypothesis]]") { "scale" } else { "sweep" };
        let output = tilewire(directory.path(), &[command, path.to_str().expect("UTF-8"), "-o", &name]);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(stderr.starts_with(&format!("error: {name}: ")), "{name}: {stderr}");
    }
}

#[test]
fn tune_certifies_its_answer() {
    let text = ran_anywhere(&format!("tune {GEMM_RS} --budget 60 --json"));
    let report: Value = serde_json::from_str(&text).expect("one JSON object");
    let number = |field: &str| report[field].as_f64().expect("a number");
    assert!(number("lower_bound_us") <= number("time_us"));
    let gap = number("time_us") / number("lower_bound_us") - 1.0;
    assert!((gap - number("certified_gap")).abs() < 1e-9);
    assert_eq!(text, ran_anywhere(&format!("tune {GEMM_RS} --budget 60 --json --threads 1")));
}

/// `auto` is what `tune` finds, with either set of options: the same object of all fields.
#[test]
fn a_split_that_predict_finds_is_the_one_that_tune_finds() {
    for options in ["", "--options published"] {
        let case = format!("--kernel ring_attention --cluster 2x8-h200-cx7 --seq 12288 {options} --json");
        let predicted = ran_anywhere(&format!("predict --split auto {case}"));
        assert_eq!(predicted, ran_anywhere(&format!("tune {case}")));
        let answer: Value = serde_json::from_str(&predicted).expect("one JSON object");
        assert!(answer["simulated_splits"].as_u64().is_some_and(|splits| splits > 16), "{predicted}");
    }
    let text = ran_anywhere(&format!("predict --split auto {GEMM_RS}"));
    assert!(text.contains(" legal splits simulated, certified gap "), "{text}");
}

#[test]
fn schedules_are_shown_dumped_and_compared() {
    let shown = ran_anywhere(&format!("schedule show {GEMM_RS} --limit 2"));
    assert!(shown.contains("inter_send") && shown.contains("and "), "{shown}");
    let dumped = ran_anywhere(&format!("schedule dump {GEMM_RS} --split compute=114,send=10,reduce=8"));
    let value: Value = serde_json::from_str(&dumped).expect("JSON");
    assert_eq!(value["kernel"], "gemm_rs");
    assert_eq!(value["hash"].as_str().map(str::len), Some(64));
    assert_eq!(ran_anywhere(&format!("schedule diff {GEMM_RS}")), "the schedules are equal\n");
    let diff = ran_anywhere(&format!("schedule diff {GEMM_RS} --with-options published"));
    assert!(diff.contains("\n- ") && diff.contains("\n+ "), "{diff}");
    assert!(refused(&format!("schedule show {GEMM_RS} --rank 16")).contains("--rank: 16, allowed: 0 to 15"));
    assert!(refused(&format!("schedule dump {GEMM_RS} --ranks 0,x")).contains("allowed: rank numbers from 0 to 15"));
}

#[test]
fn doctor_answers_on_any_machine() {
    let text = ran_anywhere("doctor");
    assert!(text.contains("driver") && text.contains("rdma"), "{text}");
    let json: Value = serde_json::from_str(&ran_anywhere("doctor --json")).expect("one JSON object");
    assert!(json["driver"]["state"].is_string());
}

struct Slice {
    start: f64,
    end: f64,
}

#[test]
fn a_trace_is_what_the_viewer_expects() {
    let directory = TempDir::new().expect("a temporary directory");
    let case = "--kernel gemm_rs --cluster 2x2-h200-efa --m 2048 --n 2048 --k 128 --execution full \
                --split compute=40,send=2,reduce=2";
    let text = ran(directory.path(), &format!("trace {case} -o trace.json"));
    assert!(text.contains("wrote ") && !text.contains("left out"), "{text}");
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(directory.path().join("trace.json")).expect("a trace")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let mut slices: BTreeMap<(u64, u64), Vec<Slice>> = BTreeMap::new();
    let mut arrows: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
    let mut processes = 0;
    for event in events {
        let ph = event["ph"].as_str().expect("a phase");
        assert!(["X", "M", "s", "f", "C"].contains(&ph), "{event}");
        if ph == "M" {
            processes += usize::from(event["name"] == "process_name");
            continue;
        }
        let start = event["ts"].as_f64().expect("a time");
        assert!(start >= 0.0, "{event}");
        if ph == "X" {
            let duration = event["dur"].as_f64().expect("a duration");
            assert!(duration >= 0.0, "{event}");
            let thread = (event["pid"].as_u64().expect("a process"), event["tid"].as_u64().expect("a thread"));
            slices.entry(thread).or_default().push(Slice { start, end: start + duration });
        }
        if ph == "s" || ph == "f" {
            arrows.entry(event["id"].as_u64().expect("an id")).or_default().push(ph);
        }
    }
    assert_eq!(processes, 4);
    assert!(arrows.len() > 10 && arrows.values().all(|ends| *ends == ["s", "f"]));
    for (thread, slices) in &mut slices {
        slices.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
        for pair in slices.windows(2) {
            // A picosecond of rounding apart, slices of a thread follow each other.
            assert!(pair[1].start >= pair[0].end - 1e-6, "thread {thread:?} overlaps at {}", pair[1].start);
        }
    }

    let text = ran(directory.path(), &format!("trace {case} -o few.json --roles send --ranks 1 --max-tasks 3"));
    assert!(text.contains("wrote 3 tasks") && text.contains("left out") && text.contains("--max-tasks 3"), "{text}");
    let stderr = refused(&format!("trace {case} --roles sender"));
    assert!(stderr.contains("--roles: \"sender\", allowed: compute, intra, send, reduce"), "{stderr}");
}

#[test]
fn figures_judge_every_published_bar() {
    let directory = TempDir::new().expect("a temporary directory");
    let text = ran(directory.path(), "figures -o out");
    assert!(text.contains("56 of them judged") && text.contains("fused or unfused: "), "{text}");
    let figures = directory.path().join("out/figures");
    let table = |name: &str| {
        let mut reader = csv::Reader::from_path(figures.join(name)).expect("a table");
        reader.deserialize().collect::<Result<Vec<BTreeMap<String, String>>, _>>().expect("even rows")
    };
    let rows = table("rows.csv");
    let errors = table("errors.csv");
    let judged = |group: &BTreeMap<String, String>| {
        let same = |row: &&BTreeMap<String, String>| {
            row["judged"] == "true" && ["kernel", "topology", "system"].iter().all(|key| row[*key] == group[*key])
        };
        rows.iter().filter(same).collect::<Vec<_>>()
    };
    let number = |text: &String| text.parse::<f64>().expect("a number");
    for group in &errors {
        let members = judged(group);
        assert_eq!(members.len().to_string(), group["rows"]);
        let logs = members.iter().map(|row| {
            (number(&row["predicted_tflops_per_gpu"]) / number(&row["published_tflops_per_gpu"])).ln().abs()
        });
        let error = (logs.sum::<f64>() / members.len() as f64).exp_m1();
        assert!((error - number(&group["error"])).abs() < 1e-6, "{group:?}");
    }
    let counts = errors.iter().map(|group| group["rows"].parse::<u32>().expect("a count"));
    assert_eq!(counts.sum::<u32>(), 56);
    assert!(table("assumed.csv").iter().all(|row| ["assumed", "fitted"].contains(&row["kind"].as_str())));
    assert_eq!(table("decisions.csv").len(), rows.len() / 2);
    for (kernel, topology) in errors.iter().map(|group| (&group["kernel"], &group["topology"])) {
        assert!(figures.join(format!("{kernel}-{topology}.png")).is_file());
    }
}

/// The published benchmark of a short kernel ends before the power limit takes hold: search, bound and headline all say so.
#[test]
fn a_tuned_split_is_bounded_by_the_clock_that_it_is_timed_with() {
    let case =
        "tune --kernel ag_gemm --cluster 2x8-h200-efa --m 8192 --n 2048 --k 8192 --protocol published --budget 40";
    let text = ran_anywhere(&format!("{case} --json"));
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let [time, bound] = ["time_us", "lower_bound_us"].map(|name| json[name].as_f64().expect("a number"));
    assert_eq!(json["clock"], "cold", "{text}");
    assert!(bound <= time, "{bound} us bound {time} us");
}

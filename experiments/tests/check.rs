//! `check` on sound and unsound schedules, and what the other commands do about findings: output and exit codes.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Exit code, standard output and standard error of a command line.
fn tilewire_in(directory: &Path, arguments: &str) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tilewire"))
        .args(arguments.split_whitespace())
        .current_dir(directory)
        .output()
        .expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code().expect("an exit code"), text(output.stdout), text(output.stderr))
}

fn tilewire(arguments: &str) -> (i32, String, String) {
    let directory = TempDir::new().expect("a temporary directory");
    let result = tilewire_in(directory.path(), arguments);
    assert_eq!(fs::read_dir(directory.path()).expect("the directory").count(), 0, "{arguments} wrote something");
    result
}

/// A command that ends with a finding: its output and its one to three lines of errors.
fn finds(arguments: &str) -> (String, String) {
    let (code, stdout, stderr) = tilewire(arguments);
    assert_eq!(code, 3, "{arguments}\n{stdout}\n{stderr}");
    assert!((1..=3).contains(&stderr.lines().count()), "{arguments}\n{stderr}");
    (stdout, stderr)
}

fn passes(arguments: &str) -> String {
    let (code, stdout, stderr) = tilewire(arguments);
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments}\n{stdout}");
    stdout
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("one JSON object")
}

const GEMM_RS: &str = "--kernel gemm_rs --cluster 2x8-h200-efa --m 4096 --n 4096 --k 256";

#[test]
fn a_sound_schedule_passes_and_says_what_was_looked_at() {
    let text = passes(&format!("check {GEMM_RS} --split compute=112,send=8,reduce=8"));
    assert!(text.contains("0 fatal, 0 hazards") && !text.contains("not checked"), "{text}");
    assert!(text.contains("memory of 2 of 16 ranks") && text.contains("skeletons of 16 of 16"), "{text}");
    let text = passes(&format!("check {GEMM_RS}"));
    assert!(text.contains("residency     not checked  no split"), "{text}");
}

#[test]
fn hazards_of_the_published_kernel_are_findings() {
    let (text, stderr) = finds(&format!("check {GEMM_RS} --options published --split published"));
    assert!(stderr.contains("0 fatal, 6 hazards"), "{stderr}");
    assert!(text.contains("before its writes are visible") && text.contains("hazard: rank (0, 0)"), "{text}");
    let (text, _) = finds(&format!("check {GEMM_RS} --options published --json"));
    let report = json(&text);
    assert_eq!((&report["fatal"], &report["hazards"]), (&0.into(), &6.into()));
    let rules: Vec<&str> =
        report["findings"].as_array().expect("a list").iter().filter_map(|finding| finding["rule"].as_str()).collect();
    assert_eq!(rules, ["visibility", "fabric_order", "races", "races", "races", "races"]);
    assert_eq!(report["rules"].as_array().map(Vec::len), Some(11));
}

/// Case C31: the CTAs of a split against the SMs that the machine has, or that are named.
#[test]
fn a_split_is_counted_against_the_real_number_of_sms() {
    let (text, stderr) = finds(&format!("check {GEMM_RS} --split compute=1,send=200"));
    assert!(text.contains("main need 201 resident CTAs, the GPU has 132 SMs; take away 69"), "{text}");
    assert!(stderr.contains("1 fatal"), "{stderr}");
    // Hazards do not depend on the split.
    assert!(stderr.contains("0 hazards"), "{stderr}");
    let grid = "--split compute=116,send=8,reduce=8";
    passes(&format!("check {GEMM_RS} {grid}"));
    let (text, _) = finds(&format!("check {GEMM_RS} {grid} --sms 78"));
    assert!(text.contains("132 resident CTAs, the GPU has 78 SMs; take away 54"), "{text}");
}

/// Case C29: offsets that a field of the command does not hold.
#[test]
fn a_field_that_is_too_narrow_is_named_with_value_and_limit() {
    let case = "--kernel gemm_ar --cluster 4x8-h200-efa --m 8192 --n 8192 --k 256";
    passes(&format!("check {case} --offset-bits 32"));
    let (text, _) = finds(&format!("check {case} --offset-bits 23"));
    assert!(text.contains("offset = 16777215 does not fit the wire format, which holds at most 8388607"), "{text}");
    let (text, _) = finds(&format!("check {case} --queue-bits 1 --json"));
    let report = json(&text);
    let width = &report["findings"][0]["problem"]["width"];
    assert_eq!((&width["field"], &width["value"], &width["limit"]), (&"queue".into(), &3.into(), &1.into()));
    assert_eq!(report["limits"]["wire"]["queue_bits"], 1);
}

/// Case C24: the published flag of gemm_ar is ordered on one reliable queue and not on EFA.
#[test]
fn a_flag_of_its_own_is_a_hazard_on_efa_only() {
    let case = |machine| format!("check --kernel gemm_ar --cluster 2x2-{machine} --m 2048 --n 2048 --k 512");
    let (text, _) = finds(&format!("{} --options published", case("h200-efa")));
    assert!(text.contains("word arrived may be seen before its data"), "{text}");
    passes(&format!("{} --options published", case("h200-cx7")));
    passes(&case("h200-efa"));
}

#[test]
fn limits_of_the_machine_are_named() {
    for (limit, expected) in [
        ("--set stages=16", "needs 802816 bytes of shared memory of a CTA, there are 232448"),
        ("--shared-bytes 100000", "of shared memory of a CTA, there are 100000"),
        ("--queues 2", "needs 4 NIC queues, there are 2"),
        ("--fifo-depth 0", "needs 1 places in the device-to-host ring, there are 0"),
        ("--in-flight 0", "needs 1 writes in flight per queue, there are 0"),
    ] {
        let (text, _) = finds(&format!("check {GEMM_RS} {limit}"));
        assert!(text.contains(expected), "{limit}\n{text}");
    }
}

/// Small shapes with small tiles, one for each kernel.
const SMALL: [&str; 5] = [
    "--kernel ag_gemm --m 256 --n 64 --k 64 --set tile_m=16 --set tile_n=32 --set tile_k=16",
    "--kernel gemm_ar --m 128 --n 128 --k 32 --set tile_m=16 --set tile_n=32 --set tile_k=16",
    "--kernel gemm_rs --m 128 --n 128 --k 32 --set tile_m=16 --set tile_n=32 --set tile_k=16",
    "--kernel moe_dispatch_gemm --tokens 128 --hidden 64 --inter 64 --topk 2 --experts 16 --set tile_m=16 \
     --set tile_n=32 --set tile_k=16",
    "--kernel ring_attention --seq 256 --batch 1 --heads 2 --head-dim 16 --set tile_q=16 --set tile_kv=16",
];

#[test]
fn values_are_right_whatever_moves_first() {
    for case in SMALL {
        let text = passes(&format!("check {case} --cluster 2x2-h200-efa --values --seeds 1"));
        assert!(text.contains("values: right in all 9 trials, 0 kinds of races"), "{text}");
        assert!(text.contains("starve-reduce") && text.contains("delayed-puts"), "{text}");
    }
    let text = passes(&format!("check {} --cluster 1x2-h200 --values --scheduler random --runs 3 --json", SMALL[2]));
    let values = &json(&text)["values"];
    assert_eq!((&values["passed"], &values["runs"]), (&2.into(), &3.into()));
    assert!(values["failure"].is_null() && values["schedulers"]["random"]["elements"].as_u64() > Some(0));
    assert!(values["schedulers"]["random"]["worst"].as_f64().is_some_and(|worst| worst > 0.0 && worst <= 1.0));
}

#[test]
fn a_wrong_value_is_named_and_comes_back() {
    let case = format!("check {} --cluster 2x2-h200-efa --options published --values", SMALL[2]);
    let (text, stderr) = finds(&format!("{case} --seeds 20"));
    assert!(stderr.contains("races seen in trials"), "{stderr}");
    let failed = text.lines().find(|line| line.starts_with("values: wrong value")).expect("a wrong value");
    for part in ["rank (", " row ", " column ", "expected ", ", got ", "written by ", "gemm_tile", "seed "] {
        assert!(failed.contains(part) || part == "gemm_tile", "{part}: {failed}");
    }
    let again =
        text.lines().find_map(|line| line.trim().strip_prefix("once more: the same with ")).expect("a way back");
    let (text, _) = finds(&format!("{case} {again}"));
    assert!(text.lines().any(|line| line == failed), "{again}\n{text}\nnot {failed}");
}

#[test]
fn check_refuses_what_it_cannot_do() {
    for (arguments, expected) in [
        ("--split auto", "--split: \"auto\", allowed: ROLE=CTAS"),
        ("--values", "--values: gemm_rs m=4096"),
        ("--seeds 3", "--values"),
        ("--values --seed x", "allowed: a whole number from 0"),
        ("--values --seed 18446744073709551615", "allowed: a whole number from 0"),
        ("--values --scheduler unfair", "round-robin"),
        ("--offset-bits 65", "allowed: a whole number from 1 to 64"),
    ] {
        let (code, stdout, stderr) = tilewire(&format!("check {GEMM_RS} {arguments}"));
        assert_eq!((code, stdout.as_str()), (2, ""), "{arguments}\n{stderr}");
        assert!(stderr.contains(expected), "{arguments}\n{stderr}");
        assert!((1..=3).contains(&stderr.lines().count()), "{arguments}\n{stderr}");
    }
}

/// More shared memory than an SM has.
const FATAL: &str = "--set stages=16";

#[test]
fn predictions_of_what_cannot_run_are_refused_unless_unchecked() {
    let split = "--split compute=112,send=8,reduce=8";
    for command in [format!("predict {GEMM_RS} {split}"), format!("tune {GEMM_RS} --budget 20")] {
        let (stdout, stderr) = finds(&format!("{command} {FATAL}"));
        assert!(stdout.is_empty(), "{stdout}");
        assert!(stderr.contains("needs 802816 bytes of shared memory") && stderr.contains("--unchecked"), "{stderr}");
        let text = passes(&format!("{command} {FATAL} --unchecked"));
        assert!(text.contains("unchecked: it cannot run as it is, fatal: rank (0, 0)"), "{text}");
    }
    let answer = json(&passes(&format!("predict {GEMM_RS} {split} {FATAL} --unchecked --json")));
    assert_eq!(answer["overridden"].as_array().map(Vec::len), Some(1));
}

const SWEEP: &str = "question = \"does it run?\"
kernel = \"gemm_rs\"
cluster = \"2x8-h200-efa\"

[shape]
m = 4096
n = 4096
k = 256

[set]
stages = STAGES

[split]
compute = 112
send = 8
reduce = [4, 8]
";

#[test]
fn sweeps_of_what_cannot_run_are_refused_unless_unchecked() {
    let directory = TempDir::new().expect("a temporary directory");
    fs::write(directory.path().join("s.toml"), SWEEP.replace("STAGES", "16")).expect("a file");
    for command in ["sweep s.toml -o out", "figures -o out --with s.toml"] {
        let (code, _, stderr) = tilewire_in(directory.path(), command);
        assert_eq!(code, 3, "{command}\n{stderr}");
        assert!(stderr.contains("needs 802816 bytes of shared memory"), "{command}\n{stderr}");
        assert!(!directory.path().join("out/rows.csv").exists() && !directory.path().join("out/s").exists());
    }
    let (code, _, stderr) = tilewire_in(directory.path(), "sweep s.toml -o out --unchecked");
    assert_eq!(code, 0, "{stderr}");
    let column = |name: &str| {
        let mut reader = csv::Reader::from_path(directory.path().join("out/rows.csv")).expect("rows");
        let at = reader.headers().expect("a header").iter().position(|column| column == name).expect("a column");
        reader.records().map(|record| record.expect("a row")[at].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((column("status"), column("hazards")), (vec!["unchecked".to_owned(); 2], vec![String::new(); 2]));
    fs::write(directory.path().join("s.toml"), SWEEP.replace("STAGES", "4")).expect("a file");
    let (code, _, stderr) = tilewire_in(directory.path(), "sweep s.toml -o out --hazards");
    assert_eq!(code, 0, "{stderr}");
    assert_eq!((column("status"), column("hazards")), (vec!["ok".to_owned(); 2], vec!["0".to_owned(); 2]));
}

/// A count is given only when races were looked for, and hazards never refuse a prediction.
#[test]
fn hazards_are_counted_when_asked_for_and_never_refuse() {
    let published = format!("predict {GEMM_RS} --options published --split published");
    assert!(json(&passes(&format!("{published} --json")))["hazards"].is_null());
    assert!(
        passes(&published).contains("2 or more  races are counted with --hazards"),
        "early signals and unordered flags are seen"
    );
    assert_eq!(json(&passes(&format!("{published} --hazards --json")))["hazards"], 6);
    let sound = format!("predict {GEMM_RS} --split compute=112,send=8,reduce=8");
    assert!(passes(&sound).contains("not checked  races are counted with --hazards"));
    assert_eq!(json(&passes(&format!("{sound} --hazards --json")))["hazards"], 0);
}

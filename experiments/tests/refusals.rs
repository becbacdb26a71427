//! Bad input, as people and adversaries give it: exit code 2, one to three lines that say what, where and what is
//! allowed, and nothing written.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Every file below a directory and its content.
fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                open.push(path.clone());
                found.insert(path, Vec::new());
            } else {
                found.insert(path.clone(), fs::read(&path).expect("a file"));
            }
        }
    }
    found
}

/// Runs a command line in a directory; what is wrong with the way in which it was refused, if anything.
fn complaint(directory: &Path, arguments: &str, words: &str) -> Option<String> {
    let before = files(directory);
    let output = Command::new(env!("CARGO_BIN_EXE_tilewire"))
        .args(arguments.split_whitespace())
        .current_dir(directory)
        .output()
        .expect("the binary runs");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let lines = stderr.lines().count();
    let problem = match output.status.code() {
        Some(2) if !output.stdout.is_empty() => "printed something".to_owned(),
        Some(2) if !(1..=3).contains(&lines) => format!("{lines} lines"),
        Some(2) if files(directory) != before => "wrote something".to_owned(),
        Some(2) if !stderr.contains(words) => format!("does not say: {words}"),
        Some(2) => return None,
        code => format!("exit code {code:?}"),
    };
    Some(format!("{arguments}\n{problem}\n{stderr}"))
}

/// Runs lines that must each be refused with some words; the mistakes of all of them in one message.
fn all_refused(directory: &Path, cases: &[(&str, &str)]) {
    let complaints: Vec<String> =
        cases.iter().filter_map(|(arguments, words)| complaint(directory, arguments, words)).collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// As [`all_refused`], each of `rests` in place of `{}` in `line`.
fn all_refused_of(directory: &Path, line: &str, rests: &[(&str, &str)]) {
    let lines: Vec<(String, &str)> = rests.iter().map(|(rest, words)| (line.replace("{}", rest), *words)).collect();
    let lines: Vec<(&str, &str)> = lines.iter().map(|(line, words)| (line.as_str(), *words)).collect();
    all_refused(directory, &lines);
}

fn empty() -> TempDir {
    TempDir::new().expect("a temporary directory")
}

const CASE: &str = "--kernel gemm_rs --cluster 2x8-h200-efa --m 4096 --n 4096 --k 256";

#[test]
fn predict_refuses() {
    let directory = empty();
    let cases = [
        ("--baseline --split compute=100,send=4,reduce=8", "'--baseline' cannot be used with '--split"),
        ("--split auto --baseline", "cannot be used with"),
        ("--set send_order=any --set send_order=in_order", "send_order twice, as \"any\" and as \"in_order\""),
        ("--set send_order=any --set send_order=any", "each option once"),
        ("--set =3", "has no option \"\""),
        ("--set send_order=", "option send_order of gemm_rs is \"\"; allowed: "),
        ("--split compute=+100,send=4,reduce=8", "\"compute=+100\" (0 to 1024)"),
        ("--split compute=0100,send=4,reduce=8", "\"compute=0100\" (0 to 1024)"),
        ("--split compute=100,,send=4", "--split: \"\", allowed: ROLE=CTAS"),
        ("--split compute=100;send=4", "allowed: ROLE=CTAS"),
        ("--split Compute=100,send=4,reduce=8", "role \"Compute\""),
        ("--split compute=1e2,send=4,reduce=8", "\"compute=1e2\""),
        ("--split compute=100,send=0,reduce=8", "role inter_send has"),
        ("--split AUTO", "or auto; or published"),
        ("--seed -1", "allowed: a whole number from 0"),
        ("--seed 18446744073709551616", "allowed: a whole number from 0"),
        ("--seed 0x10", "allowed: a whole number from 0"),
        ("--threads +2", "allowed: a whole number from 0 to 1024"),
        ("--threads 02", "allowed: a whole number from 0 to 1024"),
        ("--execution fast", "[possible values: folded, mirror, full]"),
        ("--noise --execution mirror", "noise makes ranks differ"),
        ("--protocol none", "[possible values: fair, published]"),
        ("--clock warm", "[possible values: sustained, cold]"),
        ("--options mkernel", "[possible values: tilewire, published]"),
        ("--m 8192", "cannot be used multiple times"),
        ("extra", "unexpected argument 'extra'"),
        ("--machine /dev/null", "missing field"),
        ("--machine /dev/zero", "longer than 64 MiB"),
        ("--data /dev/null", "no such directory"),
        ("--data .", "machines: No such file"),
    ];
    all_refused_of(directory.path(), &format!("predict {CASE} {{}}"), &cases);
}

#[test]
fn clusters_and_shapes_are_refused() {
    let directory = empty();
    let clusters = [
        ("+2x8-h200-efa", "allowed: NxG-MACHINE"),
        ("02x08-h200-efa", "allowed: NxG-MACHINE"),
        ("2x8x1-h200-efa", "allowed: NxG-MACHINE"),
        ("2X8-h200-efa", "allowed: NxG-MACHINE"),
        ("2x-h200-efa", "allowed: NxG-MACHINE"),
        ("65537x8-h200-efa", "sides from 1 to 1024"),
        ("2x8-", "no machine \"\""),
        ("2x8", "no machine \"\""),
        ("2x8-../machines/h200-efa", "no machine \"../machines/h200-efa\""),
        ("2x8-H200-efa", "no machine \"H200-efa\""),
        ("2x8-h200-nvlink", "needs a network"),
    ];
    all_refused_of(directory.path(), "predict --kernel gemm_rs --cluster {} --m 4096 --n 4096 --k 256", &clusters);
    all_refused(
        directory.path(),
        &[
            ("predict --kernel GEMM_RS --cluster 2x8-h200-efa --m 1", "no kernel \"GEMM_RS\""),
            ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m +4096 --n 4096 --k 256", "allowed: a whole number"),
            ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 4_096 --n 4096 --k 256", "allowed: a whole number"),
            ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 4096.0 --n 4096 --k 256", "allowed: a whole number"),
            ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 1048576 --n 1048576 --k 256", "tiles, allowed: "),
            ("predict --kernel gemm_rs --cluster 2x8-h200-efa --m 4096 --n 4096 --k 257", "nearest legal: 256 or 320"),
            ("predict --kernel moe_dispatch_gemm --cluster 2x8-h200-efa --tokens 8192 --topk 65", "from 1 to 64"),
            ("predict --kernel moe_dispatch_gemm --cluster 2x8-h200-efa --tokens 8192 --topk 8 --experts 4", "experts"),
            ("predict --kernel ring_attention --cluster 2x8-h200-efa --seq 12289", "nearest legal"),
            ("predict --kernel ring_attention --cluster 2x8-h200-efa --m 4096", "--m: does not apply"),
            (
                "predict --kernel gemm_rs --cluster 2x2-h200-efa --m 4096 --n 4096 --k 256 --options published",
                "come with one, choose another: auto, say",
            ),
            (
                "predict --kernel gemm_rs --cluster 1024x8-h200-cx7 --m 1048576 --n 262144 --k 64 --execution full",
                "GiB, allowed: ",
            ),
        ],
    );
}

#[test]
fn other_commands_refuse() {
    let directory = empty();
    fs::write(directory.path().join("file"), "").expect("a file");
    let lines = [
        ("tune {} --gap nan", "allowed: a number from 0 to 1000 %"),
        ("tune {} --gap -3", "allowed: a number from 0 to 1000 %"),
        ("tune {} --gap +1", "allowed: a number from 0 to 1000 %"),
        ("tune {} --gap 1e9", "allowed: a number from 0 to 1000 %"),
        ("tune {} --budget 0", "allowed: a whole number from 1"),
        ("tune {} --budget 9 --exhaustive", "cannot be used with"),
        ("tune {} --gap 2 --exhaustive", "cannot be used with"),
        ("tune {} --baseline", "the unfused form has no split to tune"),
        ("tune {} --split auto", "unexpected argument '--split'"),
        ("schedule dump {} --ranks 0,0", "--ranks: 0 twice"),
        ("schedule dump {} --ranks 16", "allowed: rank numbers from 0 to 15"),
        ("schedule dump {} --ranks +1", "allowed: rank numbers from 0 to 15"),
        ("schedule dump {} --ranks ALL", "allowed: rank numbers from 0 to 15"),
        ("schedule dump {} --split send=1 --baseline", "cannot be used with"),
        ("schedule show {} --rank -1", "--rank"),
        ("schedule show {} --limit 1000001", "allowed: a whole number from 0 to 1000000"),
        ("schedule diff {} --with-set send_order=any --with-set send_order=any", "--with-set: send_order twice"),
        ("schedule diff {} --with-set nothing", "--with-set: \"nothing\", allowed: NAME=VALUE"),
        ("schedule diff {} --with-cluster 2x9-h200-efa", "--cluster"),
        ("schedule dump {} --split compute=1,compute=2", "role compute twice"),
        ("trace {} --from-us 10 --to-us 10", "more than --from-us 10"),
        ("trace {} --to-us nan", "allowed: a number from 0"),
        ("trace {} --from-us -1", "allowed: a number from 0"),
        ("trace {} --max-tasks 0", "allowed: a whole number from 1"),
        ("trace {} --roles compute,", "--roles: \"\", allowed: compute, intra, send, reduce"),
        ("trace {} --ranks", "a value is required"),
        ("trace {} --ranks 3,3", "--ranks: 3 twice"),
        ("trace {} -o file/t.json", "file: "),
        ("check {} --split compute=1 --baseline", "cannot be used with"),
        ("check {} --split compute", "allowed: ROLE=CTAS"),
        ("check --kernel gemm_rs", "--cluster"),
        ("doctor --jsn", "unexpected argument '--jsn'"),
        ("doctor extra", "unexpected argument 'extra'"),
        ("sweep", "<FILE.toml>"),
        ("sweep .", "Is a directory"),
        ("figures --with nothing.toml", "nothing.toml: No such file"),
        ("figures --data .", "published"),
        ("figures --threads 9999", "allowed: a whole number from 0 to 1024"),
        ("predic", "unrecognized subcommand 'predic'"),
    ]
    .map(|(line, words)| (line.replace("{}", CASE), words));
    let lines: Vec<(&str, &str)> = lines.iter().map(|(line, words)| (line.as_str(), *words)).collect();
    all_refused(directory.path(), &lines);
}

/// Line 1 is the question; each line of the text is one key.
const SWEEP: &str = "question = \"?\"
kernel = \"gemm_rs\"
cluster = \"2x8-h200-efa\"
baseline = false
shape = { m = 4096, n = 4096, k = 256 }
split = { compute = \"rest\", send = [2, 4], reduce = 8 }
";

#[test]
fn experiment_files_are_refused_at_line_and_column() {
    let expect = |rest: &str| format!("[[expect]]\nclaim = \"c\"\nof = \"best\"\n{rest}\n");
    let columns = expect("column = \"kernel\"\nat_least = 1");
    let contradiction = expect("column = \"time_us\"\nat_least = 9\nat_most = 3");
    let nothing = expect("column = \"time_us\"");
    let nan = expect("column = \"time_us\"\nat_most = nan");
    let empty_column = expect("column = \"seq\"\nat_least = 0");
    let uncounted = expect("column = \"hazards\"\nat_most = 0");
    let twice = format!("{}{}", expect("column = \"time_us\"\nat_most = 1\nat_most = 2"), "");
    let mut complaints = Vec::new();
    for (from, to, words) in [
        ("send = [2, 4]", "send = [2, 4], intra = 3", "x.toml:6:9: split: role intra_comm has no work"),
        ("send = [2, 4]", "send = [0, 4]", "x.toml:6:9: split: role inter_send has"),
        ("reduce = 8", "reduce = 131", "x.toml:6:9: split: no split of the grid fits"),
        ("reduce = 8", "reduce = { from = 1, to = 8, step = 0 }", "x.toml:6:80: split.reduce.step: 0"),
        ("reduce = 8", "reduce = { from = 1 }", "split.reduce.to: missing"),
        ("reduce = 8", "reduce = -1", "split.reduce: -1, allowed: a whole number from 0 to 1024"),
        ("reduce = 8", "reduce = \"rest\"", "\"rest\" for more than one role"),
        ("reduce = 8", "reduce = []", "an empty list"),
        ("reduce = 8", "reduc = 8", "no role \"reduc\""),
        ("reduce = 8", "reduce = 8, inter_reduce = 8", "role reduce twice"),
        ("m = 4096", "m = 4097", "x.toml:5:9: shape: "),
        (
            "shape = { m = 4096, n = 4096, k = 256 }",
            "shape = [{ m = [4096, 8192], n = 4096, k = 256 }, { n = 4096, k = 256, m = 8192 }]",
            "m = 8192, n = 4096 is a shape that stands before",
        ),
        ("m = 4096", "m = \"4096\"", "shape.m: \"4096\", allowed: a whole number"),
        ("m = 4096", "m = 4096.0", "shape.m: 4096.0, allowed: a whole number"),
        ("m = 4096", "m = 4096, seq = 1", "does not apply to gemm_rs"),
        ("kernel = \"gemm_rs\"", "kernel = []", "x.toml:2:10: kernel: an empty list"),
        ("kernel = \"gemm_rs\"", "kernel = 3", "x.toml:2:10: kernel: 3, allowed: some text"),
        ("\"2x8-h200-efa\"", "\"+2x8-h200-efa\"", "x.toml:3:11: cluster: \"+2x8-h200-efa\""),
        ("baseline = false", "baseline = true", "x.toml:6:9: split: the unfused form has no split"),
        ("baseline = false", "seed = -1", "x.toml:4:8: seed: -1, allowed: a whole number"),
        ("baseline = false", "noise = 1", "noise: 1, allowed: true or false"),
        ("baseline = false", "set = { send_order = \"up\" }", "x.toml:4:22: set.send_order"),
        ("baseline = false", "set = { send_order = [\"any\", \"any\"] }", "stands twice in the list"),
        ("question = \"?\"", "question = \" \"", "x.toml:1:12: question"),
        ("question = \"?\"", "question = \"?", "x.toml:1:"),
        ("[2, 4], reduce = 8 }\n", &format!("[2, 4], reduce = 8 }}\n{columns}"), "\"kernel\" holds words"),
        ("8 }\n", &format!("8 }}\n{contradiction}"), "x.toml:7:1: expect: at_least = 9 above at_most = 3"),
        ("8 }\n", &format!("8 }}\n{nothing}"), "claims nothing"),
        ("8 }\n", &format!("8 }}\n{empty_column}"), "x.toml:7:1: expect: no point that the claim is about has seq"),
        ("8 }\n", &format!("8 }}\n{uncounted}"), "claim \"c\": hazards are counted with --hazards only"),
        ("8 }\n", &format!("8 }}\n{nan}"), "nan, allowed: a finite number"),
        ("8 }\n", &format!("8 }}\n{twice}"), "duplicate key"),
        (
            "split = { compute = \"rest\", send = [2, 4], reduce = 8 }",
            "split = [\"compute=100,send=2,reduce=4\", \"send=2,compute=100,reduce=4\"]",
            "x.toml:6:41: split: \"send=2,compute=100,reduce=4\" is a split that stands before",
        ),
        ("split = {", "splits = {", "splits: unknown key, allowed: question, "),
    ] {
        let directory = empty();
        assert!(SWEEP.contains(from), "{from}");
        fs::write(directory.path().join("x.toml"), SWEEP.replacen(from, to, 1)).expect("a file");
        let wrong = complaint(directory.path(), "sweep x.toml -o out", words);
        complaints.extend(wrong.map(|wrong| format!("{to}\n{wrong}")));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    let directory = empty();
    let by_turns = SWEEP.replacen("baseline = false", "bulk_synchronous = true", 1).replacen(
        "split = { compute = \"rest\", send = [2, 4], reduce = 8 }",
        "split = \"auto\"",
        1,
    );
    fs::write(directory.path().join("x.toml"), by_turns).expect("a file");
    all_refused(
        directory.path(),
        &[("sweep x.toml", "x.toml:6:9: split: \"auto\", allowed with bulk-synchronous phases")],
    );
    fs::write(directory.path().join("x.toml"), [0xff, 0xfe, 0x00]).expect("a file");
    all_refused(directory.path(), &[("sweep x.toml", "not UTF-8"), ("figures --with x.toml", "not UTF-8")]);
    fs::write(directory.path().join("figures.toml"), SWEEP).expect("a file");
    fs::create_dir(directory.path().join("other")).expect("a folder");
    fs::write(directory.path().join("x.toml"), SWEEP).expect("a file");
    fs::write(directory.path().join("other/x.toml"), SWEEP).expect("a file");
    all_refused(
        directory.path(),
        &[
            ("figures --with figures.toml", "--with: \"figures\" is the name of another output"),
            ("figures --with x.toml --with other/x.toml", "--with: \"x\" is the name of another output"),
        ],
    );
}

const MACHINE: &str = include_str!("../../data/machines/h200-efa.toml");

#[test]
fn machine_files_are_refused_at_line_and_key() {
    let hbm = MACHINE.lines().find(|line| line.starts_with("hbm_gbs")).expect("a parameter");
    let with_value = |value: &str| {
        let (head, tail) = hbm.split_once("value = ").expect("a value");
        format!("{head}value = {value}{}", &tail[tail.find(',').expect("a kind")..])
    };
    let line = MACHINE.lines().position(|line| line == hbm).expect("a line") + 1;
    let place = format!("m.toml:{line}:");
    for (to, words) in [
        (with_value("1e-30"), "allowed: a number from 0.000000001 to 1000000 GB/s"),
        (with_value("inf"), "gpu.hbm_gbs = inf, allowed: "),
        (with_value("true"), "gpu.hbm_gbs.value: invalid type"),
        (with_value("[1]"), "gpu.hbm_gbs.value: invalid type"),
        (
            hbm.replace("date = \"2026-11-30\"", "date = \"2026-11-31\""),
            "gpu.hbm_gbs.date = \"2026-11-31\", allowed: a day",
        ),
        (hbm.replace("date = \"2026-11-30\"", "date = \"\""), "allowed: a day, YYYY-MM-DD"),
        (hbm.replace("kind = \"", "kind = \"un"), "unknown variant"),
        (hbm.replace("hbm_gbs", "hbm_gb"), "unknown field `hbm_gb`"),
        (format!("{hbm} x"), ""),
    ] {
        assert_ne!(to, hbm);
        let directory = empty();
        let text = MACHINE.replacen(hbm, &to, 1).replacen("\"h200-efa\"", "\"m\"", 1);
        fs::write(directory.path().join("m.toml"), text).expect("a file");
        let arguments = "predict --kernel gemm_rs --cluster 2x8 --m 4096 --n 4096 --k 256 --machine m.toml -o out";
        all_refused(directory.path(), &[(arguments, words), (arguments, &place)]);
    }
    let directory = empty();
    let mine = |name: &str, text: &str| fs::write(directory.path().join(name), text).expect("a file");
    mine("same.toml", &MACHINE.replacen(hbm, &with_value("4000"), 1));
    mine("up.toml", &MACHINE.replacen("\"h200-efa\"", "\"../up\"", 1));
    let rests = [
        (
            "--cluster 2x8 --machine same.toml",
            "name = \"h200-efa\" is that of data/machines/h200-efa.toml, which differs",
        ),
        ("--cluster 2x8 --machine up.toml", "allowed: letters, digits, - and _"),
    ];
    all_refused_of(directory.path(), "predict --kernel gemm_rs --m 4096 --n 4096 --k 256 {} -o out", &rests);
}

/// A copy of the repository's data.
fn copy_of_data(to: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data");
    for (path, content) in files(&root).into_iter().filter(|(path, _)| path.is_file()) {
        let target = to.join(path.strip_prefix(&root).expect("below the root"));
        fs::create_dir_all(target.parent().expect("a folder")).expect("a folder");
        fs::write(target, content).expect("a file");
    }
}

#[test]
fn who_edits_data_learns_of_the_field_before_the_hash() {
    let directory = empty();
    copy_of_data(&directory.path().join("data"));
    let csv = directory.path().join("data/published/figures.csv");
    let text = fs::read_to_string(&csv).expect("figures");
    let header = text.lines().position(|line| !line.starts_with('#')).expect("a header");
    let columns: Vec<&str> = text.lines().nth(header).expect("a header").split(',').collect();
    let kernel = columns.iter().position(|column| *column == "kernel").expect("a column");
    let row = text.lines().nth(header + 1).expect("a row");
    let mut fields: Vec<&str> = row.split(',').collect();
    fields[kernel] = "gem_rs";
    for (to, words) in [
        (fields.join(","), format!("figures.csv:{}: kernel = \"gem_rs\", allowed: ", header + 2)),
        (format!("{row},more"), format!("figures.csv:{}: ", header + 2)),
        (row.to_uppercase().to_lowercase() + " ", "blake3".to_owned()),
    ] {
        fs::write(&csv, text.replacen(row, &to, 1)).expect("a file");
        all_refused(directory.path(), &[("figures --data data", &words)]);
    }
    fs::remove_file(directory.path().join("data/published/figures.toml")).expect("provenance");
    all_refused(directory.path(), &[("figures --data data", "a CSV loads only with its provenance")]);
}

/// Two committed rows that `measure` wrote.
fn measured_rows() -> Vec<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/measured/h200-timelines-2026-11-30.csv");
    fs::read_to_string(file).expect("rows").lines().take(3).map(str::to_owned).collect()
}

#[test]
fn compare_says_where_rows_are_wrong() {
    let directory = empty();
    let rows = measured_rows();
    let columns: Vec<&str> = rows[0].split(',').collect();
    let with = |column: &str, value: &str| {
        let at = columns.iter().position(|name| *name == column).expect("a column");
        let mut fields: Vec<&str> = rows[2].split(',').collect();
        fields[at] = value;
        format!("{}\n{}\n{}\n", rows[0], rows[1], fields.join(","))
    };
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (
            with("time_us", "fast").into(),
            "x.csv:3: time_us = \"fast\", allowed: a number from 0.001 to 1e9, or nothing",
        ),
        (with("time_us", "0").into(), "x.csv:3: time_us = \"0\", allowed: a number from 0.001 to 1e9, or nothing"),
        (with("sm_mhz", "-1").into(), "x.csv:3: sm_mhz = \"-1\", allowed: a number from 0 to 1e9, or nothing"),
        (with("compute", "many").into(), "x.csv:3: compute = \"many\", allowed: a whole number, or nothing"),
        (with("form", "molten").into(), "x.csv:3: form = \"molten\", allowed: fused, unfused, bulk_synchronous"),
        (with("option_set", "ours").into(), "x.csv:3: option_set = \"ours\", allowed: tilewire, published"),
        (
            with("time_us", "1e300").into(),
            "x.csv:3: time_us = \"1e300\", allowed: a number from 0.001 to 1e9, or nothing",
        ),
        (with("kernel", "gemm").into(), "x.csv:3: kernel: no kernel \"gemm\", allowed: ag_gemm"),
        (with("cluster", "1by8").into(), "x.csv:3: cluster, machine: "),
        (with("m", "0").into(), "x.csv:3: m: 0, allowed: a whole number from 1"),
        (with("seq", "8").into(), "x.csv:3: seq: does not apply to "),
        (with("options", "colour=1").into(), "x.csv:3: options: kernel "),
        (with("compute", "900").into(), "x.csv:3: split compute=900"),
        (
            with("fabric", "foo").into(),
            "x.csv:3: fabric \"foo\" was measured, \"loopback\" is what this version builds",
        ),
        (with("options", "nan").into(), "x.csv:3: options: \"nan\", allowed: NAME=VALUE"),
        // The same with the line ends of another system.
        (with("n", "x").replace('\n', "\r\n").into(), "x.csv:3: n = \"x\", allowed: a whole number, or nothing"),
        (format!("# a comment\n{}\n{}\n", rows[0], &rows[1][..40]).into(), "x.csv:3: "),
        (
            format!("{}\n{},more\n", rows[0], rows[1]).into(),
            "x.csv:2: 61 fields, the header has 60: field 61 has no column",
        ),
        (Vec::new(), "x.csv: empty, expected a header line"),
        (b"experiment,device,kernel\n".to_vec(), "x.csv: rows of the host device"),
        ([with("form", "fu").as_bytes(), &b"gemm_rs,\xff\n"[..]].concat(), "x.csv:4: form = "),
    ];
    for (bytes, words) in cases {
        fs::write(directory.path().join("x.csv"), bytes).expect("a file");
        all_refused(directory.path(), &[("compare x.csv -o out", words)]);
    }
}

#[test]
fn what_is_given_is_read_before_hardware_is_looked_for() {
    let directory = empty();
    fs::write(directory.path().join("few.csv"), "quantity,reading\n").expect("a file");
    let columns = "rank,role,launch,kind,block,cta,lane,task,op,taken_ps,start_ps,free_ps,end_ps,waited_for\n";
    fs::write(directory.path().join("tasks.csv"), columns).expect("a file");
    let rows = measured_rows();
    fs::write(directory.path().join("twice.csv"), [&rows[0][..], &rows[1], &rows[1], ""].join("\n")).expect("a file");
    all_refused(
        directory.path(),
        &[
            ("calibrate --fills nosuch -o out", "nosuch/timelines: "),
            ("calibrate --readings few.csv -o out", "few.csv:1: no column \"value\""),
            ("calibrate --rows twice.csv -o out", "twice.csv:3: the point of twice.csv:2 again"),
            ("trace --measured tasks.csv -o out.json", "tasks.csv: no lines \"# NAME = VALUE\" above the columns"),
            ("measure few.csv --budget-s -1", "'-1' for '--budget-s <S>': allowed: a number from 0"),
        ],
    );
}

#[test]
fn a_directory_that_cannot_take_the_last_file_takes_none() {
    let directory = empty();
    fs::write(directory.path().join("rows.csv"), measured_rows().join("\n") + "\n").expect("a file");
    let predict = format!("predict {CASE} --split compute=118,send=6,reduce=8 -o out");
    let lines = [("compare rows.csv -o out", "out/shapes.csv"), ("compare rows.csv -o out", "out/phases.svg")];
    for (line, blocked) in lines.into_iter().chain([(&predict[..], "out/prediction.json")]) {
        fs::create_dir_all(directory.path().join(blocked)).expect("a directory");
        all_refused(directory.path(), &[(line, &format!("{blocked}: is a directory, where a file is to be written"))]);
        fs::remove_dir(directory.path().join(blocked)).expect("still empty");
    }
    fs::write(directory.path().join("out/machines"), "").expect("a file");
    all_refused(directory.path(), &[(&predict, "out/machines: is a file, where a directory is to be made")]);
}

#[test]
fn output_that_cannot_be_written_is_no_success() {
    let Ok(full) = fs::File::options().write(true).open("/dev/full") else { return };
    for arguments in [
        format!("predict {CASE} --split compute=118,send=6,reduce=8"),
        format!("schedule dump {CASE}"),
        "doctor".to_owned(),
        "--help".to_owned(),
        "predict --help".to_owned(),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_tilewire"))
            .args(arguments.split_whitespace())
            .stdout(Stdio::from(full.try_clone().expect("a handle")))
            .stderr(Stdio::piped())
            .output()
            .expect("the binary runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {stderr}");
        assert!(stderr.contains("standard output: No space left on device"), "{arguments}: {stderr}");
    }
}

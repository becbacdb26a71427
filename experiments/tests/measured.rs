//! What was measured on a GPU and committed: timelines open as traces, rows stand beside predictions, and what is not such
//! a file is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/measured").join(name)
}

fn tilewire(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.args(arguments).current_dir(directory).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn empty() -> TempDir {
    TempDir::new().expect("a temporary directory")
}

/// The committed timeline of a kernel whose split has so many CTAs that compute.
fn timeline(kernel: &str, compute: u32) -> PathBuf {
    let files = fs::read_dir(data("timelines")).expect("timelines").map(|entry| entry.expect("one").path());
    let is_it = |file: &PathBuf| {
        let text = fs::read_to_string(file).expect("text");
        text.contains(&format!("# kernel = {kernel}\n")) && text.contains(&format!("# compute = {compute}\n"))
    };
    files.into_iter().find(is_it).expect("it is committed")
}

#[test]
fn a_timeline_of_a_gpu_opens_beside_its_simulation_on_the_same_tracks() {
    let directory = empty();
    let file = timeline("moe_dispatch_gemm", 116);
    let output = tilewire(directory.path(), &["trace", "--measured", &file.display().to_string(), "--beside"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("measured: "), "{}", text(&output.stdout));
    let trace = fs::read_to_string(directory.path().join("trace.json")).expect("a trace");
    let trace: serde_json::Value = serde_json::from_str(&trace).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let mut tracks: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    let mut slices: BTreeMap<(u64, &str), usize> = BTreeMap::new();
    for event in events {
        let pid = event["pid"].as_u64().expect("a process");
        if event["name"] == "thread_name" {
            let name = event["args"]["name"].as_str().expect("a name");
            if !name.contains("writes") {
                tracks.entry(pid).or_default().insert(name);
            }
        } else if event["ph"] == "X" && event["cat"] != "wait" && event["cat"] != "writes" {
            *slices.entry((pid, event["name"].as_str().expect("a name"))).or_default() += 1;
        }
    }
    assert_eq!(tracks[&0], tracks[&1], "a CTA does one task at a time on both sides");
    for op in ["gemm_tile", "gather_rows"] {
        assert!(slices[&(0, op)] > 100, "{op}: {slices:?}");
        assert_eq!(slices[&(0, op)], slices[&(1, op)], "every task of both sides");
    }
    // What gathers cannot keep up with, tiles wait for: an arrow leads there.
    assert!(events.iter().any(|event| event["name"] == "wait rows" && event["pid"] == 0));
    assert!(events.iter().any(|event| event["ph"] == "f" && event["pid"] == 0));
}

#[test]
fn a_file_that_is_no_whole_timeline_is_refused_where_it_is_wrong() {
    let directory = empty();
    let good = fs::read_to_string(timeline("moe_dispatch_gemm", 116)).expect("text");
    let first = good.lines().position(|line| line.starts_with("0,")).expect("a task") + 1;
    let line = good.lines().nth(first - 1).expect("the task").to_owned();
    let fields: Vec<&str> = line.split(',').collect();
    let with = |column: usize, value: &str| {
        let mut changed = fields.clone();
        changed[column] = value;
        good.replacen(&line, &changed.join(","), 1)
    };
    let half: String = good.lines().take(first + 5).flat_map(|line| [line, "\n"]).collect();
    let hash = good.lines().find(|line| line.starts_with("# schedule_hash")).expect("a hash");
    let cases = [
        (with(0, "1"), format!("x.csv:{first}: rank = \"1\", allowed: a whole number below 1")),
        (with(3, "inter_send"), format!("x.csv:{first}: kind = \"inter_send\", allowed: {}", fields[3])),
        (with(7, "100000"), format!("x.csv:{first}: task = \"100000\", allowed: a whole number below")),
        (with(10, "-1"), format!("x.csv:{first}: start_ps = \"-1\", allowed: a whole number from")),
        (with(13, "nothing[0]"), format!("x.csv:{first}: waited_for = \"nothing[0]\", allowed: FLAG[SLOT]")),
        (half, "6 tasks, the schedule has".to_owned()),
        (format!("{good}{line}\n"), "task = \"".to_owned()),
        (good.replacen(hash, "# schedule_hash = 00", 1), "schedule 00 was recorded".to_owned()),
        (good.replacen("# clock = sustained\n", "", 1), "clock = \"\", allowed: sustained, cold".to_owned()),
        ("rank,role\n0,0\n".to_owned(), "allowed: a file that `tilewire measure --timelines`".to_owned()),
    ];
    for (text_of, words) in cases {
        fs::write(directory.path().join("x.csv"), text_of).expect("a file");
        let output = tilewire(directory.path(), &["trace", "--measured", "x.csv"]);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words}: {errors}");
        assert!(errors.contains(&words), "{words}: {errors}");
        assert!(!directory.path().join("trace.json").exists(), "{words}: wrote something");
    }
    // Whatever it is called, a timeline is not written over.
    fs::write(directory.path().join("x.csv"), &good).expect("a file");
    let output = tilewire(directory.path(), &["trace", "--measured", "x.csv", "-o", "./x.csv"]);
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(2) && errors.contains("is the timeline that is read"), "{errors}");
    assert_eq!(fs::read_to_string(directory.path().join("x.csv")).expect("there"), good);
}

#[test]
fn waits_stand_beside_predicted_ones_and_totals_that_deceive_are_called_out() {
    let directory = empty();
    let file = data("h200-timelines-2026-11-30.csv");
    let output = tilewire(directory.path(), &["compare", &file.display().to_string(), "-o", "out"]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let waits = fs::read_to_string(directory.path().join("out/waits.csv")).expect("waits");
    let starved = waits.lines().find(|line| line.contains("moe_dispatch_gemm") && line.contains("compute=116"));
    let fields: Vec<&str> = starved.expect("a recorded row").split(',').collect();
    assert_eq!(fields[6..9], ["compute", "rows", "intra_comm"], "tiles wait for gathered rows");
    let [measured, predicted] = [fields[9], fields[10]].map(|us| us.parse::<f64>().expect("us"));
    assert!((predicted / measured).ln().abs() < 0.15, "{measured} measured, {predicted} predicted");
    assert!(printed.contains("raised by"), "{printed}");
    // gemm_ar with 4 to 64 copying CTAs: near in all, off in communication alone.
    let all = fs::read_to_string(data("h200-mirror-judged-2026-11-30.csv")).expect("rows");
    let deceive = |line: &&str| line.starts_with("gemm_ar,") && line.contains(",16384,8192,1024,");
    let rows: Vec<&str> = all.lines().take(1).chain(all.lines().filter(deceive)).collect();
    fs::write(directory.path().join("x.csv"), rows.join("\n") + "\n").expect("a file");
    let output = tilewire(directory.path(), &["compare", "x.csv", "-o", "x"]);
    let printed = text(&output.stdout);
    let line = printed.lines().find(|line| line.contains("agree in total")).expect("the sentence");
    let pairs = fs::read_to_string(directory.path().join("x/pairs.csv")).expect("pairs");
    let head: Vec<&str> = pairs.lines().next().expect("a header").split(',').collect();
    let off = |row: &str, column: &str| {
        let at = head.iter().position(|name| *name == format!("predicted_over_measured_{column}")).expect("a column");
        row.split(',').nth(at).and_then(|text| text.parse::<f64>().ok()).expect("a ratio").ln().abs().exp_m1()
    };
    let communication =
        pairs.lines().skip(1).filter(|row| off(row, "time_us") <= 0.05 && off(row, "comm_only_us") > 0.1);
    let communication: Vec<f64> = communication.map(|row| off(row, "comm_only_us")).collect();
    let worst = communication.iter().fold(0.0, |worst: f64, &off| worst.max(off));
    let words = format!("comm_only_us by {:.1}%", 100.0 * worst);
    assert!(communication.len() > 3 && worst > 0.2, "{communication:?}: the case deceives no more, choose another");
    assert!(line.starts_with(&format!("{} rows agree in total (within 5.0%)", communication.len())), "{line}");
    assert!(line.contains(&words), "{line}: not {words}");
    for name in ["phase_errors.svg", "phases.svg", "scatter.svg"] {
        assert!(directory.path().join("out").join(name).exists(), "{name}");
    }
}

#[test]
fn a_fused_gain_is_over_bulk_synchronous_launches_where_those_were_measured() {
    let directory = empty();
    let all = fs::read_to_string(data("h200-phases-2026-11-30.csv")).expect("rows");
    let of = |line: &str, form: &str| {
        line.starts_with(&format!("moe_dispatch_gemm,{form},")) && line.contains(",2048,2048,2048,8,64,")
    };
    let head = all.lines().next().expect("a header");
    let some = |forms: &[&str]| {
        let rows = all.lines().filter(|line| forms.iter().any(|form| of(line, form)));
        std::iter::once(head).chain(rows).flat_map(|line| [line, "\n"]).collect::<String>()
    };
    let gain = |text_of: String, over: &str| {
        fs::write(directory.path().join("x.csv"), text_of).expect("a file");
        let output = tilewire(directory.path(), &["compare", "x.csv", "-o", "out"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let shapes = fs::read_to_string(directory.path().join("out/shapes.csv")).expect("shapes");
        let fused = shapes.lines().find(|line| line.contains(",fused,")).expect("a fused schedule").to_owned();
        assert!(fused.ends_with(over), "{fused}");
        let fields: Vec<f64> = fused.rsplit(',').skip(1).take(2).map(|text| text.parse().expect("a gain")).collect();
        (fields[1], fields[0])
    };
    let column = |name: &str| head.split(',').position(|field| field == name).expect("a column");
    let best = |form: &str| {
        let times = all.lines().filter(|line| of(line, form)).map(|line| line.split(',').nth(column("time_us")));
        times.map(|time| time.and_then(|text| text.parse::<f64>().ok()).expect("us")).fold(f64::INFINITY, f64::min)
    };
    let (measured, predicted) = gain(some(&["fused", "bulk_synchronous"]), "bulk-synchronous launches");
    let expected = best("bulk_synchronous") / best("fused") - 1.0;
    assert!((measured - expected).abs() < 1e-3, "{measured}, not {expected}");
    assert!((0.1..0.3).contains(&predicted), "{predicted}");
    let (sum, _) = gain(some(&["fused"]), "sum of its phases");
    assert!(sum > measured, "{sum}: what is added up knows no last wave and no shared clock");
}

#[test]
fn what_one_row_cannot_tell_is_not_told_and_not_passed() {
    let directory = empty();
    let all = fs::read_to_string(data("nvlink-judged-1x2-run4-2026-11-30.csv")).expect("rows");
    let some: String =
        all.lines().filter(|line| !line.starts_with('#')).take(2).flat_map(|line| [line, "\n"]).collect();
    fs::write(directory.path().join("x.csv"), some).expect("a file");
    let output = tilewire(directory.path(), &["compare", "x.csv", "-o", "out"]);
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("no schedule has several splits"), "{said}");
    let shapes = fs::read_to_string(directory.path().join("out/shapes.csv")).expect("shapes");
    assert!(!said.contains("NaN") && !shapes.contains("NaN"), "{said}\n{shapes}");
    let output = tilewire(directory.path(), &["compare", "x.csv", "-o", "out", "--max-split-cost", "2"]);
    let words = "cost of the recommended split, median over shapes is unknown, asked for 2 % at most";
    assert!(output.status.code() == Some(3) && text(&output.stderr).contains(words), "{}", text(&output.stderr));
}

/// Rows of two forms, more schedules than have plots: the worst rows are found by form, file and line, what has no plot is
/// counted.
#[test]
fn the_worst_rows_can_be_found_and_missing_plots_are_counted() {
    let directory = empty();
    let file = data("h200-phases-2026-11-30.csv");
    let output = tilewire(directory.path(), &["compare", &file.display().to_string(), "-o", "out"]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let worst: Vec<&str> = said.lines().skip_while(|line| !line.contains("worst rows")).skip(2).take(8).collect();
    let measured = fs::read_to_string(&file).expect("rows");
    for line in worst {
        let words: Vec<&str> = line.split_whitespace().collect();
        let place = words.last().expect("a place");
        let number: usize =
            place.strip_prefix("h200-phases-2026-11-30.csv:").and_then(|n| n.parse().ok()).expect(place);
        let row = measured.lines().nth(number - 1).expect("a row");
        assert!(row.starts_with(&format!("{},{},", words[0], words[2])), "{line}\n{row}");
    }
    assert!(said.contains("no plots of the splits of 16 more schedules"), "{said}");
    let plots = fs::read_dir(directory.path().join("out")).expect("the output");
    let names = plots.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"));
    assert!(names.into_iter().any(|name| name.contains("-ag_gemm-bulk_synchronous-1x8-")));
}

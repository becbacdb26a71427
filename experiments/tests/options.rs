//! Options of kernels as a user meets them: `kernels`, and `[set]` lists in tables, columns, plots and claims.

use std::fs;
use std::path::Path;
use std::process::Command;

fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tilewire")).args(arguments).current_dir(folder).output();
    let output = output.expect("the binary");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

const HEAD: &str = "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = \"2x2-h200-efa\"\n";
const SHAPE: &str = "shape = { m = [1024, 2048], n = 1024, k = 512 }\n";
const LISTS: &str = "[set]\nsend_order = [\"any\", \"in_order\"]\nchunk_tiles = 2\n[split]\ncompute = \"rest\"\n\
                     send = [2, 4]\nreduce = 8\n";

#[test]
fn what_varies_in_set_is_told_in_tables_columns_names_and_titles() {
    let folder = tempfile::tempdir().expect("a folder");
    let claim = "[[expect]]\nclaim = \"c\"\nof = \"every\"\ncolumn = \"time_us\"\nat_least = 0\n\
                 where = { set = \"chunk_tiles=2;send_order=in_order\" }\n";
    fs::write(folder.path().join("x.toml"), format!("{HEAD}{SHAPE}{LISTS}{claim}")).expect("a file");
    let (code, out, error) = run(folder.path(), &["sweep", "x.toml", "-o", "out"]);
    assert_eq!(code, Some(0), "{error}");
    for order in ["any", "in_order"] {
        // What all schedules share is in no cell.
        let rows = out.lines().filter(|line| line.contains(&format!("  send_order={order}  "))).count();
        assert_eq!(rows, 2, "{out}");
    }
    let mut rows = csv::Reader::from_path(folder.path().join("out/rows.csv")).expect("rows");
    let place = rows.headers().expect("columns").iter().position(|column| column == "set").expect("a column");
    let sets: Vec<String> = rows.records().map(|row| row.expect("a row")[place].to_owned()).collect();
    let [any, in_order] = ["any", "in_order"].map(|order| format!("chunk_tiles=2;send_order={order}"));
    let (any, in_order) = (any.as_str(), in_order.as_str());
    assert_eq!(sets, [any, any, in_order, in_order, any, any, in_order, in_order]);
    let plot = folder.path().join("out/time_send.03-gemm_rs-2x2-h200-efa-2048-send_order=in_order.svg");
    let plot = fs::read_to_string(&plot).unwrap_or_else(|error| panic!("{}: {error}", plot.display()));
    assert!(plot.contains("against inter_send SMs, send_order=in_order"), "the title");
    let lines = fs::read_to_string(folder.path().join("out/size.svg")).expect("a line for each order");
    assert!(lines.contains("send_order=any") && lines.contains("send_order=in_order"), "the legend");
}

/// That an option changes nothing is an answer; and file systems bound names, not what may vary.
#[test]
fn options_that_change_nothing_and_many_that_vary_keep_tables_and_plots() {
    let folder = tempfile::tempdir().expect("a folder");
    let shape = "shape = { m = 1024, n = 1024, k = 512 }\n";
    let split = "[split]\ncompute = \"rest\"\nsend = [2, 4]\nreduce = 8\n";
    let sweep = |set: &str| {
        fs::write(folder.path().join("x.toml"), format!("{HEAD}{shape}[set]\n{set}{split}")).expect("a file");
        let (code, out, error) = run(folder.path(), &["sweep", "x.toml", "-o", "out"]);
        assert_eq!(code, Some(0), "{error}");
        for file in fs::read_dir(folder.path().join("out")).expect("it was written") {
            let name = file.expect("a file").file_name();
            assert!(name.len() < 200, "{name:?}");
        }
        fs::remove_dir_all(folder.path().join("out")).expect("it was written");
        out
    };
    let same = sweep("queues = [4, 8]\n");
    let head = same.lines().find(|line| line.contains("  set  ")).expect("a table");
    assert!(["best split", "time_us", "bound_by"].iter().all(|column| head.contains(column)), "{same}");
    let long = "send_order = [\"any\", \"in_order\"]\nreduce_order = [\"any\", \"in_order\"]\nearly_ready = [true, false]\n\
                dead_store = [true, false]\nmain_loop = [\"pipelined\", \"wait_each_step\"]\nrecycle = [true, false]\n\
                reduce_in_flight_bytes = [16384, 32768]\noutput = [\"per_rank\", \"per_node\"]\nchunk_tiles = [2, 4]\n";
    let many = sweep(long);
    assert!(many.contains("no plots of the splits of 500 more schedules"), "{many}");
}

#[test]
fn a_mirror_with_noise_is_refused_before_anything_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = format!(
        "{HEAD}execution = \"mirror\"\nshape = {{ m = [1024, 2048], n = 1024, k = 512 }}\nsplit = \"compute=120,send=4,reduce=8\"\n\
         [[hypothesis]]\nclaim = \"c\"\ncolumn = \"time_us\"\nof = {{ m = 2048 }}\nthan = {{ m = 1024 }}\nat_least = 0.5\n"
    );
    fs::write(folder.path().join("x.toml"), text).expect("a file");
    let (code, _, error) = run(folder.path(), &["scale", "x.toml", "-o", "out"]);
    assert!(code == Some(2) && error.contains("noise makes ranks differ"), "{error}");
    assert!(!folder.path().join("out").exists());
}

#[test]
fn hypotheses_without_noise_are_decided_by_one_run_and_name_points_by_what_is_set() {
    let folder = tempfile::tempdir().expect("a folder");
    let study = |more: &str| {
        let text = format!(
            "{HEAD}noise = false\n{more}shape = {{ m = 2048, n = 1024, k = 512 }}\nsplit = \"compute=120,send=4,reduce=8\"\n\
             [set]\nsend_order = [\"any\", \"in_order\"]\n[[hypothesis]]\nclaim = \"c\"\ncolumn = \"time_us\"\n\
             of = {{ set = \"send_order=in_order\" }}\nthan = {{ set = \"send_order=any\" }}\nat_least = 0.5\n"
        );
        fs::write(folder.path().join("x.toml"), text).expect("a file");
        run(folder.path(), &["scale", "x.toml", "-o", "out"])
    };
    for wrong in ["replicates = 4\n", "confidence = 0.9\n"] {
        let (code, _, error) = study(wrong);
        assert!(code == Some(2) && error.contains("nothing is drawn without noise"), "{error}");
        assert!(!folder.path().join("out").exists());
    }
    let (code, out, error) = study("");
    assert_eq!(code, Some(0), "{error}");
    assert!(out.contains("one run decides") && !out.contains("interval"), "{out}");
    let rows = fs::read_to_string(folder.path().join("out/rows.csv")).expect("rows");
    assert!(rows.lines().count() == 3 && rows.contains(",folded,"), "{rows}");
}

#[test]
fn every_option_of_every_kernel_is_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let (code, list, _) = run(folder.path(), &["kernels"]);
    assert_eq!(code, Some(0));
    for kernel in tilewire_kernels::KERNELS {
        assert!(list.contains(kernel.name()) && list.contains(kernel.summary()), "{list}");
        let (code, text, _) = run(folder.path(), &["kernels", kernel.name()]);
        assert_eq!(code, Some(0));
        for spec in kernel.option_specs() {
            assert!(text.contains(&format!("\n  {}  {}\n", spec.name, spec.values)), "{}: {text}", spec.name);
        }
    }
    let (code, _, error) = run(folder.path(), &["kernels", "gemm"]);
    assert!(code == Some(2) && error.contains("no kernel \"gemm\", allowed: ag_gemm"), "{error}");
}

/// An option that nothing uses is named with its value and the reason; its default, and switched off, it is what it is anyway.
#[test]
fn options_that_change_nothing_in_a_case_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let case = |kernel: &str, cluster: &str, rest: &str| {
        let shape = if kernel == "ring_attention" { "--seq 3072" } else { "--m 4096 --n 2048 --k 512" };
        let line = format!("schedule show --kernel {kernel} --cluster {cluster} {shape} {rest}");
        run(folder.path(), &line.split(' ').collect::<Vec<_>>())
    };
    for (kernel, cluster, set, why) in [
        (
            "gemm_rs",
            "1x8-h200",
            "queues=8",
            "queues of gemm_rs is 8, which changes nothing on one node, where nothing is put",
        ),
        (
            "gemm_rs",
            "2x8-h200-efa",
            "cta_notice=true",
            "changes nothing unless drain = visible, where alone it is charged",
        ),
        ("gemm_ar", "2x8-h200-cx7", "efa_publish=separate_write", "changes nothing off efa-srd"),
        ("gemm_ar", "1x8-h200", "exchange=scatter_gather", "changes nothing on one node"),
        ("ring_attention", "1x8-h200", "nvls=true", "changes nothing with ring = true_ring, which has no barrier"),
    ] {
        let (code, out, error) = case(kernel, cluster, &format!("--set {set}"));
        assert!(code == Some(2) && out.is_empty() && error.lines().count() == 1, "{error}");
        assert!(error.starts_with("error: --set: option ") && error.contains(why), "{error}");
    }
    for (kernel, cluster, rest) in [
        ("gemm_rs", "1x8-h200", "--set queues=4"),
        ("gemm_rs", "2x8-h200-efa", "--options published --set drain=overlap --set cta_notice=false"),
        ("gemm_rs", "1x8-h200", "--set staging=helper_zero --set open_lead_tiles=0"),
        ("gemm_ar", "2x8-h200-efa", "--set efa_publish=separate_write"),
    ] {
        let (code, _, error) = case(kernel, cluster, rest);
        assert_eq!(code, Some(0), "{rest}: {error}");
    }
    let text = format!("{HEAD}{SHAPE}split = \"auto\"\n[set]\nstaging = \"helper_zero\"\nopen_lead_tiles = [0, 8]\n");
    fs::write(folder.path().join("x.toml"), text).expect("a file");
    let (code, _, error) = run(folder.path(), &["sweep", "x.toml", "-o", "out"]);
    let lead = "option open_lead_tiles of gemm_rs is 8, which changes nothing with staging = helper_zero";
    assert!(code == Some(2) && error.contains("x.toml:") && error.contains(lead), "{error}");
    assert!(!folder.path().join("out").exists());
}

/// That 33 nodes cannot share the sums makes `gemm_ar` some sixteen times slower: nobody should have to guess why.
#[test]
fn defaults_that_a_shape_forces_are_told_in_text_json_and_tables() {
    let folder = tempfile::tempdir().expect("a folder");
    let note =
        "exchange = direct, as n = 8192 is no multiple of 4224 (33 nodes share the sums by tiles of 128 columns)";
    let predict = |nodes: u32, rest: &str| {
        let line = format!(
            "predict --kernel gemm_ar --cluster {nodes}x1-h200-cx7 --m 1024 --n 8192 --k 64 --split compute=100,send=8,reduce=8{rest}"
        );
        let (code, out, error) = run(folder.path(), &line.split(' ').collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{error}");
        out
    };
    assert!(predict(33, "").contains(&format!("\nnote    {note}: 16.5 times the bytes")), "{}", predict(33, ""));
    assert!(predict(33, " --json").contains(&format!("\"{note}")));
    // It could be shared, it is not the shape's doing, or the user has it so.
    for rest in ["", " --options published --protocol fair", " --json"] {
        assert!(!predict(32, rest).contains("exchange = direct, as"));
    }
    assert!(!predict(33, " --options published --protocol fair").contains("note    "));
    let text = "question = \"?\"\nkernel = \"gemm_ar\"\ncluster = [\"32x1-h200-cx7\", \"33x1-h200-cx7\"]\n\
                shape = { m = 1024, n = 8192, k = 64 }\nsplit = \"compute=100,send=8,reduce=8\"\n";
    fs::write(folder.path().join("x.toml"), text).expect("a file");
    let (code, out, error) = run(folder.path(), &["sweep", "x.toml", "-o", "out"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(out.contains(&format!("note for gemm_ar m=1024,n=8192,k=64 on 33x1-h200-cx7: {note}")), "{out}");
    let mut rows = csv::Reader::from_path(folder.path().join("out/rows.csv")).expect("rows");
    let place = rows.headers().expect("columns").iter().position(|column| column == "notes").expect("a column");
    let notes: Vec<String> = rows.records().map(|row| row.expect("a row")[place].to_owned()).collect();
    assert!(notes[0].is_empty() && notes[1].starts_with(note), "{notes:?}");
}

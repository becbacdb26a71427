//! `report` through the real binary: every output below a directory is in the page.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

fn tilewire(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewire"));
    command.args(arguments.split_whitespace()).current_dir(folder).output().expect("the binary runs")
}

#[test]
fn outputs_at_any_depth_become_sections_in_the_order_of_paths() {
    let folder = TempDir::new().expect("a temporary directory");
    let predict =
        "predict --kernel gemm_rs --cluster 2x2-h200-efa --m 1024 --n 1024 --k 256 --split compute=120,send=4,reduce=8";
    for output in ["all/b", "all/a/late/deep", "all/a/early", "all/a.b"] {
        let ran = tilewire(folder.path(), &format!("{predict} -o {output}"));
        assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    }
    // A link back up is no reason to go round, nor to show an output twice.
    #[cfg(unix)]
    std::os::unix::fs::symlink("..", folder.path().join("all/b/up")).expect("a link");
    let ran = tilewire(folder.path(), "report all");
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    assert!(text.starts_with("4 sections: a/early, a/late/deep, a.b, b\n"), "{text}");
    let page = fs::read_to_string(folder.path().join("all/report.html")).expect("a page");
    assert_eq!(page.matches("<h2 id=").count(), 4, "{page}");
    assert!(page.contains("<a href=\"#a/late/deep\">") && page.contains("<h2 id=\"a/late/deep\">"), "{page}");
}

/// A table or plot of an earlier run would stand in the page as if it were of the last one; what a person put there stays.
#[test]
fn what_an_earlier_run_wrote_is_gone_and_what_a_person_wrote_is_not() {
    let folder = TempDir::new().expect("a temporary directory");
    let sweep = |split: &str| {
        let text = "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = \"2x2-h200-efa\"\n\
                    shape = { m = 1024, n = 1024, k = 256 }\n";
        fs::write(folder.path().join("x.toml"), format!("{text}split = {split}\n")).expect("a file");
        let ran = tilewire(folder.path(), "sweep x.toml -o out");
        assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    };
    let names = || {
        let entries = fs::read_dir(folder.path().join("out")).expect("the output");
        let mut names: Vec<_> =
            entries.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    };
    sweep("{ compute = \"rest\", send = [2, 4], reduce = [4, 8] }");
    assert!(names().contains(&"heat.svg".to_owned()), "{:?}", names());
    fs::write(folder.path().join("out/notes.csv"), "a,b\n").expect("a file");
    sweep("\"compute=120,send=4,reduce=8\"");
    assert_eq!(names(), ["experiment.toml", "machines", "notes.csv", "rows.csv", "run.toml"]);
    // Somebody's text in run.toml removes nothing elsewhere.
    fs::write(folder.path().join("kept.csv"), "a,b\n").expect("a file");
    fs::write(folder.path().join("out/run.toml"), "files = [\"../kept.csv\", \"experiment.toml\", 3]\n")
        .expect("a file");
    sweep("\"compute=120,send=4,reduce=8\"");
    assert!(folder.path().join("kept.csv").is_file() && names().contains(&"notes.csv".to_owned()));
}

/// Folders of a file are made as those of a directory are.
#[test]
fn a_trace_a_schedule_and_a_page_go_into_new_folders() {
    let folder = TempDir::new().expect("a temporary directory");
    let case = "--kernel gemm_rs --cluster 2x2-h200-efa --m 1024 --n 1024 --k 256 --split compute=120,send=4,reduce=8";
    for (line, file) in [
        (format!("predict {case} -o out"), "out/prediction.json"),
        (format!("trace {case} -o a/b/trace.json"), "a/b/trace.json"),
        (format!("schedule dump {case} -o c/d/schedule.json"), "c/d/schedule.json"),
        ("report out -o e/page.html".to_owned(), "e/page.html"),
    ] {
        let ran = tilewire(folder.path(), &line);
        assert_eq!(ran.status.code(), Some(0), "{line}: {}", String::from_utf8_lossy(&ran.stderr));
        assert!(folder.path().join(file).is_file(), "{file}");
    }
}

#[test]
fn a_directory_without_outputs_is_refused() {
    let folder = TempDir::new().expect("a temporary directory");
    fs::create_dir_all(folder.path().join("a/b/c")).expect("folders");
    fs::write(folder.path().join("file"), "").expect("a file");
    for (place, expected) in [("a", "no run.toml here or below"), ("file", "file: "), ("nosuch", "nosuch: ")] {
        let ran = tilewire(folder.path(), &format!("report {place} -o page.html"));
        let error = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(2), "{error}");
        assert!(error.contains(expected) && error.lines().count() <= 3, "{error}");
        assert!(!folder.path().join("page.html").exists());
    }
}

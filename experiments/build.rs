//! Embeds `data/`: writes a list of (path, text) of its TOML and CSV files, so that a new machine is a new file only.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let data = manifest.join("../data").canonicalize()?;
    let mut list = String::from("&[\n");
    for folder in ["machines", "measured", "published"] {
        println!("cargo::rerun-if-changed={}", data.join(folder).display());
        for file in files(&data.join(folder))? {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            println!("cargo::rerun-if-changed={}", file.display());
            writeln!(list, "    ({:?}, include_str!({:?})),", format!("{folder}/{name}"), file.display().to_string())
                .expect("writing to a string");
        }
    }
    list.push(']');
    revision(&manifest);
    fs::write(out.join("data_files.rs"), list)
}

/// The commit that is built, in `TILEWIRE_REVISION`; unset outside a checkout.
fn revision(manifest: &Path) {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(manifest).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    // Every commit and checkout appends to the log of HEAD.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        println!("cargo::rustc-env=TILEWIRE_REVISION={commit}");
    }
}

/// TOML and CSV files of a folder, sorted by name.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "toml" || e == "csv") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

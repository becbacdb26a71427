//! Embeds `data/`: writes a list of (path, text) of its TOML and CSV files, so that a new machine is a new file only.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
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
    fs::write(out.join("data_files.rs"), list)
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

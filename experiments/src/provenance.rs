//! Output directories: what a figure was made from stands beside it, so that one command makes it again.
//!
//! ```text
//!  run.toml             schema, version, revision, command, experiment and its hash, seed, machines, tables and plots
//!  experiment.toml      copy of the experiment, if there is one
//!  machines/NAME.toml   copy of each machine file that was used
//! ```

use crate::error::ExperimentError;
use crate::plan::Source;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tilewire_sim::Machine;
use tilewire_sim::machine::Kind;

/// Layout of an output directory.
pub const SCHEMA: u32 = 1;

/// Git revision that the program was built from, if it was built in a checkout.
pub const REVISION: Option<&str> = option_env!("TILEWIRE_REVISION");

/// Plots that are named one by one at most.
const NAMED_PLOTS: usize = 8;

/// What was written, for a person: every table, and plots, each as PNG and SVG, by name while they are few.
pub fn wrote(files: &[PathBuf]) -> String {
    let is = |file: &Path, kind: &str| file.extension().is_some_and(|known| known == kind);
    let (plots, others): (Vec<&PathBuf>, Vec<_>) = files.iter().partition(|file| is(file, "png") || is(file, "svg"));
    let pictures: Vec<&&PathBuf> = plots.iter().filter(|file| is(file, "png")).collect();
    let mut lines: Vec<String> = others.iter().map(|file| format!("wrote {}", file.display())).collect();
    match pictures[..] {
        [first, ..] if pictures.len() > NAMED_PLOTS => {
            let folder = first.parent().unwrap_or(first).display();
            lines.push(format!("wrote {} plots to {folder}, each as png and svg", pictures.len()));
        }
        _ => lines.extend(pictures.iter().map(|file| format!("wrote {} and .svg", file.display()))),
    }
    lines.into_iter().fold(String::new(), |text, line| text + &line + "\n")
}

/// A directory that a command writes to.
pub struct Output {
    root: PathBuf,
    manifest: Manifest,
}

/// What `run.toml` says.
#[derive(Debug, Serialize)]
struct Manifest {
    schema: u32,
    tilewire: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<&'static str>,
    command: String,
    /// Name of the experiment.
    #[serde(skip_serializing_if = "Option::is_none")]
    experiment: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    experiment_blake3: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    machines: Vec<String>,
    /// Tables and plots of a command whose plots follow from its rows: the next one takes them away.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files: Vec<String>,
    /// How much of it was done, when that was not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    partial: Option<String>,
    /// Parameters without a source of their own, by machine.
    assumed: BTreeMap<String, Vec<String>>,
}

/// The name, text and seed of an experiment.
#[derive(Clone, Copy, Debug)]
pub struct ExperimentText<'a> {
    /// Name.
    pub name: &'a str,
    /// Text.
    pub text: &'a str,
}

impl Output {
    /// Creates the directory and writes down what the command is about to use. `files` are those that it is going to write
    /// there. Tables and plots of the command that wrote there before are taken away, so that none stands beside a
    /// `run.toml` that it is not from.
    ///
    /// # Errors
    /// [`ExperimentError::Write`], before anything is written, when one of all these files cannot be.
    pub fn create(
        root: &Path,
        command: &str,
        seed: Option<u64>,
        experiment: Option<ExperimentText<'_>>,
        source: &Source,
        machines: &[&Machine],
        files: &[&str],
    ) -> Result<Self, ExperimentError> {
        let copies = machines.iter().map(|machine| format!("machines/{}.toml", machine.name));
        let own = ["run.toml", "experiment.toml"].iter().chain(files).map(|&name| name.to_owned());
        own.chain(copies).try_for_each(|name| free(root, &name))?;
        let manifest = Manifest {
            schema: SCHEMA,
            tilewire: env!("CARGO_PKG_VERSION"),
            revision: REVISION,
            command: command.to_owned(),
            experiment: experiment.map(|experiment| experiment.name.to_owned()),
            experiment_blake3: experiment.map(|e| blake3::hash(e.text.as_bytes()).to_string()),
            seed,
            machines: machines.iter().map(|machine| machine.name.clone()).collect(),
            files: Vec::new(),
            partial: None,
            assumed: machines.iter().map(|machine| (machine.name.clone(), unsourced(machine))).collect(),
        };
        // A file or a link in place of the directory is refused here, before anything is computed.
        fs::create_dir_all(root).map_err(|error| ExperimentError::write(root, error))?;
        remove_files_of_before(root)?;
        let output = Self { root: root.to_owned(), manifest };
        output.write_manifest()?;
        if let Some(experiment) = experiment {
            output.write("experiment.toml", experiment.text)?;
        }
        for machine in machines {
            output.write(&format!("machines/{}.toml", machine.name), &source.machine_text(machine)?)?;
        }
        Ok(output)
    }

    /// Writes down which tables and plots the command has written, and how much of it was done where that is not all.
    ///
    /// # Errors
    /// [`ExperimentError::Write`].
    pub fn finish(mut self, files: &[PathBuf], partial: Option<String>) -> Result<(), ExperimentError> {
        self.manifest.partial = partial;
        let names = files.iter().filter_map(|file| file.file_name()).map(|name| name.to_string_lossy().into_owned());
        self.manifest.files = names.collect();
        self.write_manifest()
    }

    fn write_manifest(&self) -> Result<(), ExperimentError> {
        let text = toml::to_string(&self.manifest).map_err(|error| ExperimentError::write(&self.root, error))?;
        self.write("run.toml", &text)
    }

    /// Path of a file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Writes a file, its folders included.
    ///
    /// # Errors
    /// [`ExperimentError::Write`].
    pub fn write(&self, name: &str, text: &str) -> Result<(), ExperimentError> {
        let path = self.path(name);
        make_folder_of(&path)?;
        fs::write(&path, text).map_err(|error| ExperimentError::write(&path, error))
    }
}

/// Removes the tables and plots that the `run.toml` of a directory names.
fn remove_files_of_before(root: &Path) -> Result<(), ExperimentError> {
    let manifest = fs::read_to_string(root.join("run.toml")).ok().and_then(|text| text.parse::<toml::Table>().ok());
    let files = manifest.as_ref().and_then(|manifest| manifest.get("files")?.as_array());
    for name in files.into_iter().flatten().filter_map(toml::Value::as_str) {
        // Whatever somebody wrote into the file: nothing outside the directory, and no other kind.
        let path = Path::new(name);
        let kind = path.extension().and_then(|kind| kind.to_str());
        if path.file_name() == Some(path.as_os_str()) && matches!(kind, Some("csv" | "png" | "svg")) {
            match fs::remove_file(root.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(ExperimentError::write(&root.join(name), error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Makes the folder of a file that is about to be written.
///
/// # Errors
/// [`ExperimentError::Write`].
pub fn make_folder_of(file: &Path) -> Result<(), ExperimentError> {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => {
            fs::create_dir_all(folder).map_err(|error| ExperimentError::write(folder, error))
        }
        _ => Ok(()),
    }
}

/// Refuses a file whose place is taken by a directory, or whose folder by a file, or which may not be written.
fn free(root: &Path, name: &str) -> Result<(), ExperimentError> {
    let file = &root.join(name);
    if file.is_dir() {
        return Err(ExperimentError::write(file, "is a directory, where a file is to be written"));
    }
    let below = file.ancestors().skip(1).take_while(|&folder| folder != root);
    if let Some(folder) = below.filter(|folder| folder.exists()).find(|folder| !folder.is_dir()) {
        return Err(ExperimentError::write(folder, "is a file, where a directory is to be made"));
    }
    if file.exists() {
        let open = fs::OpenOptions::new().append(true).open(file);
        return open.map(drop).map_err(|error| ExperimentError::write(file, error));
    }
    Ok(())
}

/// `section.name` of the parameters that are fitted or assumed.
pub fn unsourced(machine: &Machine) -> Vec<String> {
    let open = |kind: Kind| matches!(kind, Kind::Assumed | Kind::Fitted);
    machine.params().into_iter().filter(|(_, param)| open(param.kind)).map(|(name, _)| name).collect()
}

/// The last line of a plot: where its numbers come from.
pub fn footer(sources: &str) -> String {
    let revision = REVISION.map_or_else(String::new, |revision| format!(", commit {revision}"));
    format!("{sources}  |  tilewire {}{revision}", env!("CARGO_PKG_VERSION"))
}

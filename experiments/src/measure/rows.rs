//! The rows of a run: kept as they end, and gone on from.

use crate::error::ExperimentError;
use crate::experiment::Experiment;
use crate::measure_row::{self as row, MeasuredRow, Setting};
use crate::plan::Source;
use crate::provenance::{ExperimentText, Output};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

/// The rows of a run that was stopped.
///
/// # Errors
/// [`ExperimentError`] for rows that were made otherwise than this run would make them.
pub fn resumed(file: &Path, setting: &Setting) -> Result<Vec<MeasuredRow>, ExperimentError> {
    let rows = row::read(file)?;
    let facts = &setting.facts;
    let revision = crate::provenance::REVISION.unwrap_or_default();
    let now = [
        ("pacing", setting.pacing.as_str()),
        ("gpu", &facts.gpu),
        ("driver", &facts.driver),
        ("nvrtc", &facts.nvrtc),
        ("cubin", &facts.cubin),
        ("transport", &facts.transport),
        ("registration", &facts.registration),
        ("revision", revision),
    ];
    for row in &rows {
        for (name, value) in now {
            if row.text(name) != value {
                let problem =
                    format!("{name} \"{}\", here \"{value}\"; choose another directory with -o", row.text(name));
                return Err(ExperimentError::refused(row.place.clone(), problem));
            }
        }
    }
    Ok(rows)
}

/// Refuses to go on in a directory whose rows were measured for another experiment or with another machine file.
///
/// # Errors
/// [`ExperimentError::Refused`].
pub fn same_run(root: &Path, experiment: &Experiment, source: &Source) -> Result<(), ExperimentError> {
    let mut files = vec![(root.join("experiment.toml"), experiment.text.clone())];
    for group in &experiment.groups {
        let machine = &group.case.target.machine;
        files.push((root.join(format!("machines/{}.toml", machine.name)), source.machine_text(machine)?));
    }
    for (file, now) in files {
        if std::fs::read_to_string(&file).is_ok_and(|text| text != now) {
            let problem = "is not what this run would use; choose another directory with -o";
            return Err(ExperimentError::refused(file.display().to_string(), problem));
        }
    }
    Ok(())
}

/// Writes down what the rows are made from.
///
/// # Errors
/// [`ExperimentError::Write`].
pub fn output(experiment: &Experiment, source: &Source, root: &Path) -> Result<Output, ExperimentError> {
    let machines: BTreeMap<&str, _> =
        experiment.groups.iter().map(|g| (g.case.target.machine.name.as_str(), &g.case.target.machine)).collect();
    let text = ExperimentText { name: &experiment.name, text: &experiment.text };
    let machines: Vec<_> = machines.into_values().collect();
    Output::create(root, "measure", Some(experiment.seed), Some(text), source, &machines, &["rows.csv"])
}

/// The rows of a run, in the process that writes them.
pub struct Kept {
    file: PathBuf,
    /// Rows of the run before.
    pub known: Vec<MeasuredRow>,
    writer: csv::Writer<File>,
}

impl Kept {
    /// Opens the file behind the rows that it holds.
    ///
    /// # Errors
    /// [`ExperimentError::Write`].
    pub fn open(file: PathBuf, known: Vec<MeasuredRow>) -> Result<Self, ExperimentError> {
        let fresh = !file.exists();
        let open = OpenOptions::new().create(true).append(true).open(&file);
        let open = open.map_err(|error| ExperimentError::write(&file, error))?;
        let writer = csv::WriterBuilder::new().has_headers(false).from_writer(open);
        let mut kept = Self { file, known, writer };
        if fresh {
            kept.write(&row::columns().iter().map(|name| (name.clone(), name.clone())).collect())?;
        }
        Ok(kept)
    }

    /// Adds a row.
    ///
    /// # Errors
    /// [`ExperimentError::Write`].
    pub fn write(&mut self, fields: &BTreeMap<String, String>) -> Result<(), ExperimentError> {
        let columns = row::columns();
        let record = columns.iter().map(|name| fields.get(name).map_or("", String::as_str));
        self.writer.write_record(record).map_err(|error| ExperimentError::write(&self.file, error))?;
        self.writer.flush().map_err(|error| ExperimentError::write(&self.file, error))
    }
}

//! The data directory: machines, measured readings and published rows, each with its provenance.
//!
//! ```text
//!  machines/NAME.toml                    a Machine; every value has kind, source and date
//!  measured/NAME.csv + NAME.toml         readings taken on hardware by this project
//!  published/NAME.csv + NAME.toml        rows that others published, and what is known of how they came to be
//! ```
//!
//! A CSV without its TOML, or with another content than the TOML's `blake3`, does not load. The hash is of the file
//! with LF line ends and without a byte order mark, so that a checkout which rewrites line ends still loads.
//! The directory is embedded at build; [`Data::open`] reads the same layout from disk.

mod error;
mod published;
mod rows;
mod table;

pub use error::DataError;
pub use published::{
    EffectiveSplit, Figure, FitParameter, FitRow, JUDGED_FROM_SIZE, Judged, LeftOutError, Metric, PublishedProtocol,
    System,
};
pub use table::{Cell, Sheet, Table};

use published::Standing;
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use table::{plain, provenance};
use tilewire_sim::Machine;

/// Path below `data/` and text of every embedded file.
static EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/data_files.rs"));

/// The fused kernels, as published rows name them.
pub const FUSED: [&str; 5] = ["ag_gemm", "gemm_ar", "gemm_rs", "moe_dispatch_gemm", "ring_attention"];

/// What else published rows measure: shown beside, never predicted.
pub const OTHERS: &[&str] = &[
    "all_reduce",
    "all_reduce+rmsnorm fused",
    "llm_prefill_e2e",
    "moe_combine",
    "moe_combine_bf16",
    "moe_combine_bf16_ll",
    "moe_combine_ll",
    "moe_dispatch",
    "moe_dispatch (intranode)",
    "moe_dispatch_bf16",
    "moe_dispatch_bf16_ll",
    "moe_dispatch_fp8",
    "moe_dispatch_fp8_ll",
    "moe_dispatch_ll",
    "moe_layer0 ag+scatter+ggemm",
    "moe_layer1 ggemm+gather+rs",
    "moe_layer_fwd",
    "moe_training_step (DSV3-style 12 layers EP32)",
    "shmem_put_bw",
];

/// The data directory.
#[derive(Clone, Debug, Default)]
pub struct Data {
    /// None: the embedded one.
    root: Option<PathBuf>,
}

impl Data {
    /// The directory that was embedded at build.
    pub const fn embedded() -> Self {
        Self { root: None }
    }

    /// A directory of the same layout.
    ///
    /// # Errors
    /// [`DataError::Read`] when it is no directory.
    pub fn open(root: &Path) -> Result<Self, DataError> {
        if root.is_dir() {
            return Ok(Self { root: Some(root.to_owned()) });
        }
        Err(DataError::Read { file: root.display().to_string(), message: "no such directory".into() })
    }

    /// The embedded directory, or the one given by `--data`.
    ///
    /// # Errors
    /// As [`Data::open`].
    pub fn new(root: Option<&Path>) -> Result<Self, DataError> {
        root.map_or_else(|| Ok(Self::embedded()), Self::open)
    }

    /// Names of the machines, sorted.
    ///
    /// # Errors
    /// [`DataError::Read`].
    pub fn machine_names(&self) -> Result<Vec<String>, DataError> {
        self.list("machines", "toml")
    }

    /// A machine by name.
    ///
    /// # Errors
    /// [`DataError`] when no file has this name or it is no machine.
    pub fn machine(&self, name: &str) -> Result<Machine, DataError> {
        let names = self.machine_names()?;
        if !names.iter().any(|known| known == name) {
            return Err(DataError::UnknownMachine { name: name.to_owned(), known: names.join(", ") });
        }
        let path = format!("machines/{name}.toml");
        let machine = Machine::parse(&self.display(&path), &self.text(&path)?)?;
        if machine.name != name {
            return Err(DataError::MachineName {
                file: self.display(&path),
                name: machine.name,
                stem: name.to_owned(),
            });
        }
        Ok(machine)
    }

    /// Paths of all CSVs below the directory, sorted.
    ///
    /// # Errors
    /// [`DataError::Read`].
    pub fn csv_paths(&self) -> Result<Vec<String>, DataError> {
        let mut paths = Vec::new();
        for folder in ["measured", "published"] {
            paths.extend(self.list(folder, "csv")?.into_iter().map(|stem| format!("{folder}/{stem}.csv")));
        }
        Ok(paths)
    }

    /// A CSV by its path below the directory, checked against its provenance.
    ///
    /// # Errors
    /// [`DataError`] for anything but a rectangular CSV that its provenance describes.
    pub fn table(&self, path: &str) -> Result<Table, DataError> {
        self.checked(path, |table| Ok(table.clone()))
    }

    /// What `rows` makes of a CSV.
    ///
    /// The hash comes last: whoever edits a copy of the data learns of a wrong field before being asked for a new hash.
    fn read<T>(&self, path: &str, rows: impl FnOnce(&Sheet) -> Result<T, DataError>) -> Result<T, DataError> {
        self.checked(path, |table| rows(&table.sheet))
    }

    fn checked<T>(&self, path: &str, rows: impl FnOnce(&Table) -> Result<T, DataError>) -> Result<T, DataError> {
        let file = self.display(path);
        let toml_path = Path::new(path).with_extension("toml").display().to_string();
        let text = plain(&self.text(path)?);
        let provenance = provenance(&self.display(&toml_path), self.text(&toml_path))?;
        let table = Table { sheet: Sheet::parse(&file, &text)?, provenance };
        let header: BTreeSet<&str> = table.sheet.columns.iter().map(String::as_str).collect();
        let described: BTreeSet<&str> = table.provenance.columns.keys().map(String::as_str).collect();
        let problem = match (header.difference(&described).next(), described.difference(&header).next()) {
            (Some(column), _) => Some(format!("columns does not describe \"{column}\"")),
            (None, Some(column)) => Some(format!("columns describes \"{column}\", which the CSV lacks")),
            (None, None) => None,
        };
        if let Some(problem) = problem {
            return Err(DataError::Provenance { file: self.display(&toml_path), problem });
        }
        let read = rows(&table)?;
        let have = blake3::hash(text.as_bytes()).to_hex().to_string();
        if have != table.provenance.blake3 {
            return Err(DataError::Hash { file, have, want: table.provenance.blake3 });
        }
        Ok(read)
    }

    /// All rows of the published figures.
    ///
    /// # Errors
    /// [`DataError`] for a row that is not one.
    pub fn figures(&self) -> Result<Vec<Figure>, DataError> {
        self.read("published/figures.csv", rows::figures)
    }

    /// The rows that predictions are judged against, with the band of their replicates.
    ///
    /// # Errors
    /// As [`Data::figures`].
    pub fn judged(&self) -> Result<Vec<Judged>, DataError> {
        let figures = self.figures()?;
        let mut judged = Vec::new();
        for bar in figures.iter().filter(|figure| figure.standing == Standing::Judged) {
            let (Some(size), Some(tflops), Some(system), Some(machine)) =
                (bar.size, bar.tflops_per_gpu(), bar.base, bar.machine())
            else {
                continue;
            };
            let replicates: Vec<f64> = figures
                .iter()
                .filter(|other| other.standing == Standing::Replicate && other.same_case(bar))
                .filter_map(Figure::tflops_per_gpu)
                .collect();
            let low = replicates.iter().copied().fold(tflops, f64::min);
            let high = replicates.iter().copied().fold(tflops, f64::max);
            judged.push(Judged {
                kernel: bar.kernel.clone(),
                topology: bar.topology.clone(),
                machine,
                system,
                size,
                tflops_per_gpu: tflops,
                band_tflops: (low, high),
                num_replicates: replicates.len(),
                source: bar.source.clone(),
            });
        }
        Ok(judged)
    }

    /// The splits that the published kernels ran with.
    ///
    /// # Errors
    /// [`DataError`] for a row that is not one.
    pub fn effective_splits(&self) -> Result<Vec<EffectiveSplit>, DataError> {
        self.read("published/effective_splits.csv", rows::effective_splits)
    }

    /// The split that a published kernel ran with at one shape.
    ///
    /// # Errors
    /// [`DataError::NoSplit`] when none is published for this shape.
    pub fn effective_split(&self, kernel: &str, nodes: u16, size: u64) -> Result<EffectiveSplit, DataError> {
        let splits = self.effective_splits()?;
        let here = |split: &&EffectiveSplit| split.kernel == kernel && split.nodes == nodes;
        if let Some(split) = splits.iter().filter(here).find(|split| split.size == size) {
            return Ok(split.clone());
        }
        let sizes: Vec<String> = splits.iter().filter(here).map(|split| split.size.to_string()).collect();
        let known = if sizes.is_empty() { "none".to_owned() } else { sizes.join(", ") };
        Err(DataError::NoSplit { kernel: kernel.to_owned(), nodes, size, known })
    }

    /// How the published bars were measured.
    ///
    /// # Errors
    /// [`DataError`] for a row that is not one.
    pub fn protocols(&self) -> Result<Vec<PublishedProtocol>, DataError> {
        self.read("published/protocols.csv", rows::protocols)
    }

    /// The rows on which fitted machine parameters are chosen.
    ///
    /// # Errors
    /// [`DataError`].
    pub fn fit_rows(&self) -> Result<Vec<FitRow>, DataError> {
        self.read("published/fit_rows.csv", rows::fit_rows)
    }

    /// Errors on rows that a fit left out, as `tilewire fit --without all` found them.
    ///
    /// # Errors
    /// [`DataError`].
    pub fn left_out(&self) -> Result<Vec<LeftOutError>, DataError> {
        self.read("published/left_out.csv", rows::left_out)
    }

    /// The machine parameters that are fitted, in the order in which they are.
    ///
    /// # Errors
    /// [`DataError`].
    pub fn fit_parameters(&self) -> Result<Vec<FitParameter>, DataError> {
        self.read("published/fit_parameters.csv", rows::fit_parameters)
    }

    /// How a system's bar of one kernel and size was measured.
    ///
    /// # Errors
    /// [`DataError::NoProtocol`] when that is not known.
    pub fn protocol(&self, kernel: &str, system: System, size: u64) -> Result<PublishedProtocol, DataError> {
        let known = self.protocols()?;
        let is = |row: &PublishedProtocol| {
            row.kernel == kernel && row.system == system && row.up_to.is_none_or(|largest| size <= largest)
        };
        known.into_iter().find(is).ok_or_else(|| DataError::NoProtocol {
            file: self.display("published/protocols.csv"),
            kernel: kernel.to_owned(),
            system: system.name(),
        })
    }

    /// The text of a machine's file.
    ///
    /// # Errors
    /// [`DataError::Read`].
    pub fn machine_text(&self, name: &str) -> Result<String, DataError> {
        self.text(&format!("machines/{name}.toml"))
    }

    /// A path below the directory as errors and reports name it.
    fn display(&self, path: &str) -> String {
        match &self.root {
            None => format!("data/{path}"),
            Some(root) => root.join(path).display().to_string(),
        }
    }

    fn text(&self, path: &str) -> Result<String, DataError> {
        let refuse = |message: String| DataError::Read { file: self.display(path), message };
        match &self.root {
            None => EMBEDDED
                .iter()
                .find(|(name, _)| *name == path)
                .map(|(_, text)| (*text).to_owned())
                .ok_or_else(|| refuse("no such file".into())),
            Some(root) => read_text(&root.join(path)).map_err(refuse),
        }
    }

    /// Stems of the files of a folder with this extension, sorted.
    fn list(&self, folder: &str, extension: &str) -> Result<Vec<String>, DataError> {
        let mut names: Vec<PathBuf> = match &self.root {
            None => EMBEDDED
                .iter()
                .filter(|(name, _)| Path::new(name).parent() == Some(Path::new(folder)))
                .map(|(name, _)| PathBuf::from(name))
                .collect(),
            Some(root) => {
                let refuse =
                    |error: std::io::Error| DataError::Read { file: self.display(folder), message: error.to_string() };
                let entries = fs::read_dir(root.join(folder)).map_err(refuse)?;
                entries.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>().map_err(refuse)?
            }
        };
        names.retain(|name| name.extension().is_some_and(|e| e == extension));
        let mut stems: Vec<String> =
            names.iter().filter_map(|name| name.file_stem().map(|stem| stem.to_string_lossy().into_owned())).collect();
        stems.sort();
        Ok(stems)
    }
}

/// Bytes of an input file at most: what is longer is not what was meant.
const MAX_BYTES: u64 = 1 << 26;

/// The text of an input file.
///
/// # Errors
/// What the system says, or that the file is too long or no text.
pub fn read_text(file: &Path) -> Result<String, String> {
    String::from_utf8(read_bytes(file)?)
        .map_err(|error| format!("no text: not UTF-8 from byte {}", error.utf8_error().valid_up_to()))
}

fn read_bytes(file: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = fs::File::open(file).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("longer than {} MiB, which no input is", MAX_BYTES >> 20));
    }
    Ok(bytes)
}

/// A machine from a file anywhere, as `--machine FILE.toml` names it, and the file's text.
///
/// # Errors
/// [`DataError`] when it cannot be read or is no machine, or when it has the name of another one in `data`.
pub fn read_machine(file: &Path, data: &Data) -> Result<(Machine, String), DataError> {
    let name = file.display().to_string();
    let text = read_text(file).map_err(|message| DataError::Read { file: name.clone(), message })?;
    let machine = Machine::parse(&name, &plain(&text))?;
    if data.machine_names()?.contains(&machine.name) && plain(&data.machine_text(&machine.name)?) != plain(&text) {
        let known = data.display(&format!("machines/{}.toml", machine.name));
        return Err(DataError::MachineTaken { file: name, name: machine.name, known });
    }
    Ok((machine, text))
}

#[cfg(test)]
mod tests;

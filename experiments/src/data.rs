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

mod rows;

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tilewire_kernels::RoleSplit;
use tilewire_sim::machine::{Kind, MachineError};
use tilewire_sim::{Machine, Protocol};

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

/// Topologies whose rows are judged, and the machine that predicts each.
pub const JUDGED_TOPOLOGIES: [(&str, &str); 2] = [("2x8-h200-efa", "h200-efa"), ("2x8-h200-cx7", "h200-cx7")];

/// Smaller shapes are shown, not judged.
pub const JUDGED_FROM_SIZE: u64 = 8192;

/// Why data was refused.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file or directory cannot be read.
    #[error("{file}: {message}")]
    Read {
        /// File or directory.
        file: String,
        /// What the system says.
        message: String,
    },
    /// No machine file has this name.
    #[error("no machine \"{name}\"; there are {known}")]
    UnknownMachine {
        /// Name asked for.
        name: String,
        /// Names that exist.
        known: String,
    },
    /// A machine file that is not a machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// A machine file whose name is not its own.
    #[error("{file}: name = \"{name}\", must be \"{stem}\" as the file's")]
    MachineName {
        /// File.
        file: String,
        /// Name inside.
        name: String,
        /// Name of the file.
        stem: String,
    },
    /// A machine file elsewhere with the name of one in the directory.
    #[error("{file}: name = \"{name}\" is that of {known}, which differs; give this machine another name")]
    MachineTaken {
        /// File.
        file: String,
        /// Name of both.
        name: String,
        /// File in the directory.
        known: String,
    },
    /// A header line that names a column twice or not at all.
    #[error("{file}:{line}: column {column} of the header is {problem}")]
    Header {
        /// File.
        file: String,
        /// Line of the header.
        line: u64,
        /// Number of the column, from 1.
        column: usize,
        /// What is wrong.
        problem: String,
    },
    /// A row with more or fewer fields than the header.
    #[error("{file}:{line}: {have} fields, the header has {want}: {what}")]
    Ragged {
        /// File.
        file: String,
        /// Line.
        line: u64,
        /// Fields of the row.
        have: usize,
        /// Columns.
        want: usize,
        /// The first column without a field, or the first field without a column.
        what: String,
    },
    /// The header lacks a column.
    #[error("{file}:{line}: no column \"{column}\"; the header has {known}")]
    MissingColumn {
        /// File.
        file: String,
        /// Line of the header.
        line: u64,
        /// Column.
        column: String,
        /// Columns that it has.
        known: String,
    },
    /// A value out of range.
    #[error("{file}:{line}: {column} = \"{value}\", allowed: {allowed}")]
    Value {
        /// File.
        file: String,
        /// Line.
        line: u64,
        /// Column.
        column: String,
        /// Value.
        value: String,
        /// Legal values.
        allowed: String,
    },
    /// Provenance that is missing, unreadable or incomplete.
    #[error("{file}: {problem}; a CSV loads only with its provenance")]
    Provenance {
        /// Provenance file, with a line where one is known.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// A CSV that is not the one its provenance describes.
    #[error("{file}: blake3 is {have}, its provenance says {want}; update the provenance with the data")]
    Hash {
        /// CSV.
        file: String,
        /// Hash of the file.
        have: String,
        /// Hash in the provenance.
        want: String,
    },
    /// No published split for this shape.
    #[error("no published split for {kernel} at size {size} on {nodes} nodes; there are {known}")]
    NoSplit {
        /// Kernel.
        kernel: String,
        /// Nodes.
        nodes: u16,
        /// M, tokens or seq.
        size: u64,
        /// Sizes that have one.
        known: String,
    },
    /// Nothing is known of how a system's rows were measured.
    #[error("{file}: no protocol for kernel {kernel}, system {system}")]
    NoProtocol {
        /// File.
        file: String,
        /// Kernel.
        kernel: String,
        /// System.
        system: &'static str,
    },
}

/// Where a CSV comes from: the TOML file beside it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// How the values came to be known.
    pub kind: Kind,
    /// Machine, repository or page.
    #[serde(rename = "where")]
    pub place: String,
    /// Versions that matter.
    #[serde(default)]
    pub software: BTreeMap<String, String>,
    /// How the values were read.
    pub protocol: String,
    /// When.
    pub date: toml::value::Datetime,
    /// Hash of the CSV, see the module's text.
    pub blake3: String,
    /// Meaning and unit of every column.
    pub columns: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvenanceFile {
    source: Provenance,
}

/// A CSV whose rows all have the header's columns, and its provenance.
#[derive(Clone, Debug)]
pub struct Table {
    /// Path, as errors name it.
    pub file: String,
    /// Column names.
    pub columns: Vec<String>,
    /// Rows in the file's order.
    pub rows: Vec<Row>,
    /// Provenance.
    pub provenance: Provenance,
    header_line: u64,
}

/// A row of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Line of the file, from 1.
    pub line: u64,
    /// One field per column.
    pub fields: Vec<String>,
}

/// A field with its place, to be parsed.
#[derive(Clone, Copy, Debug)]
pub struct Cell<'a> {
    table: &'a Table,
    line: u64,
    column: usize,
    /// The field's text.
    pub text: &'a str,
}

/// A system whose published rows are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum System {
    /// The fused kernels.
    MKernel,
    /// cuBLAS, then (or after) an NCCL collective.
    CublasNccl,
    /// FlashAttention-2 after an NCCL all-gather.
    Fa2Nccl,
}

/// What a published row is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// A bar that a prediction is judged against.
    Judged,
    /// Another measurement of a bar's case: gives the noise band.
    Replicate,
    /// Shown only.
    Shown,
}

/// Unit of a published value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Useful FLOPs per GPU and time.
    TflopsPerGpu,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// GB/s.
    Gbs,
    /// Ratio of times.
    SpeedupVsTorchNccl,
}

/// A row of `published/figures.csv`.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Kernel.
    pub kernel: String,
    /// Nodes x GPUs per node - GPU - fabric.
    pub topology: String,
    /// System, as published.
    pub system: String,
    /// Tokens, seq or m, whichever indexes the figure.
    pub size: Option<u64>,
    /// Unit of the value.
    pub metric: Metric,
    /// Value; none where the figure shows a failure.
    pub value: Option<f64>,
    /// Caveats.
    pub notes: String,
    /// Where it can be checked.
    pub source: String,
    /// Use.
    pub standing: Standing,
    /// The judged system that this row measures, also as a replicate.
    pub base: Option<System>,
    /// Line of the file.
    pub line: u64,
}

/// A published bar and the band that its replicates span.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Kernel.
    pub kernel: String,
    /// Topology.
    pub topology: String,
    /// Machine file that predicts it.
    pub machine: &'static str,
    /// System.
    pub system: System,
    /// M, tokens or seq.
    pub size: u64,
    /// The bar.
    pub tflops_per_gpu: f64,
    /// Lowest and highest of the bar and its replicates.
    pub band_tflops: (f64, f64),
    /// Replicates.
    pub num_replicates: usize,
    /// Where the bar can be checked.
    pub source: String,
}

/// A row of `published/effective_splits.csv`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffectiveSplit {
    /// Kernel.
    pub kernel: String,
    /// Nodes of eight GPUs.
    pub nodes: u16,
    /// M, tokens or seq.
    pub size: u64,
    /// The split. Roles of different launches may exceed the SM count together.
    pub split: RoleSplit,
    /// Schedule options that differ by shape.
    pub options: Vec<(String, String)>,
    /// How it was found.
    pub note: String,
    /// Where it can be checked.
    pub source: String,
}

/// A row of `published/protocols.csv`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedProtocol {
    /// Kernel.
    pub kernel: String,
    /// System.
    pub system: System,
    /// Put arrivals of one launch satisfy the next ones.
    pub stale_arrivals: bool,
    /// Launches are timed one by one.
    pub isolated: bool,
    /// Launches of a loop, warm-up included.
    pub launches: u32,
    /// Whether the baseline's collectives could use NVLS.
    pub nvls_in_baseline: Option<bool>,
    /// What the loop does.
    pub note: String,
    /// Where it can be checked.
    pub source: String,
}

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
        self.read(path, |table| Ok(table.clone()))
    }

    /// What `rows` makes of a CSV.
    ///
    /// The hash comes last: whoever edits a copy of the data learns of a wrong field before being asked for a new hash.
    fn read<T>(&self, path: &str, rows: impl FnOnce(&Table) -> Result<T, DataError>) -> Result<T, DataError> {
        let file = self.display(path);
        let toml_path = Path::new(path).with_extension("toml").display().to_string();
        let text = plain(&self.text(path)?);
        let provenance = provenance(&self.display(&toml_path), self.text(&toml_path))?;
        let table = parse_table(&file, &text, provenance)?;
        let header: BTreeSet<&str> = table.columns.iter().map(String::as_str).collect();
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

    /// How a system's bars of one kernel were measured.
    ///
    /// # Errors
    /// [`DataError::NoProtocol`] when that is not known.
    pub fn protocol(&self, kernel: &str, system: System) -> Result<PublishedProtocol, DataError> {
        let known = self.protocols()?;
        known.into_iter().find(|row| row.kernel == kernel && row.system == system).ok_or_else(|| {
            DataError::NoProtocol {
                file: self.display("published/protocols.csv"),
                kernel: kernel.to_owned(),
                system: system.name(),
            }
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
    let mut bytes = Vec::new();
    let read = fs::File::open(file).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("longer than {} MiB, which no input is", MAX_BYTES >> 20));
    }
    String::from_utf8(bytes)
        .map_err(|error| format!("no text: not UTF-8 from byte {}", error.utf8_error().valid_up_to()))
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

impl Table {
    /// Positions of columns by name.
    ///
    /// # Errors
    /// [`DataError::MissingColumn`].
    pub fn find<const N: usize>(&self, names: [&str; N]) -> Result<[usize; N], DataError> {
        let mut found = [0; N];
        for (position, name) in found.iter_mut().zip(names) {
            *position =
                self.columns.iter().position(|column| column == name).ok_or_else(|| DataError::MissingColumn {
                    file: self.file.clone(),
                    line: self.header_line,
                    column: name.to_owned(),
                    known: self.columns.join(", "),
                })?;
        }
        Ok(found)
    }

    /// A field of one of the table's rows.
    pub fn cell<'a>(&'a self, row: &'a Row, column: usize) -> Cell<'a> {
        Cell { table: self, line: row.line, column, text: row.fields[column].trim() }
    }
}

impl<'a> Cell<'a> {
    /// The error that this field is not one of the allowed values.
    pub fn refuse(&self, allowed: impl Into<String>) -> DataError {
        DataError::Value {
            file: self.table.file.clone(),
            line: self.line,
            column: self.table.columns[self.column].clone(),
            value: self.text.to_owned(),
            allowed: allowed.into(),
        }
    }

    /// Text that is not empty.
    ///
    /// # Errors
    /// [`DataError::Value`].
    pub fn filled(&self) -> Result<&'a str, DataError> {
        if self.text.is_empty() { Err(self.refuse("some text")) } else { Ok(self.text) }
    }

    /// A value that passes `legal`.
    ///
    /// # Errors
    /// [`DataError::Value`].
    pub fn required<T: FromStr>(&self, allowed: &str, legal: impl Fn(&T) -> bool) -> Result<T, DataError> {
        self.text.parse().ok().filter(legal).ok_or_else(|| self.refuse(allowed))
    }

    /// A value that passes `legal`, or nothing.
    ///
    /// # Errors
    /// [`DataError::Value`].
    pub fn optional<T: FromStr>(&self, allowed: &str, legal: impl Fn(&T) -> bool) -> Result<Option<T>, DataError> {
        if self.text.is_empty() { Ok(None) } else { self.required(allowed, legal).map(Some) }
    }

    fn kernel(&self) -> Result<&'a str, DataError> {
        let known = || FUSED.iter().chain(OTHERS);
        if known().any(|name| *name == self.text) {
            return Ok(self.text);
        }
        Err(self.refuse(known().copied().collect::<Vec<_>>().join(", ")))
    }

    fn fused_kernel(&self) -> Result<&'a str, DataError> {
        if FUSED.contains(&self.text) { Ok(self.text) } else { Err(self.refuse(FUSED.join(", "))) }
    }

    fn metric(&self) -> Result<Metric, DataError> {
        Ok(match self.text {
            "tflops_per_gpu" => Metric::TflopsPerGpu,
            "ms" => Metric::Ms,
            "us" => Metric::Us,
            "gbps" => Metric::Gbs,
            "speedup_vs_torch_nccl" => Metric::SpeedupVsTorchNccl,
            _ => return Err(self.refuse("tflops_per_gpu, ms, us, gbps, speedup_vs_torch_nccl")),
        })
    }

    fn options(&self) -> Result<Vec<(String, String)>, DataError> {
        let pair = |text: &str| {
            let (name, value) = text.split_once('=').ok_or_else(|| self.refuse("name=value;name=value or nothing"))?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        };
        self.text.split(';').filter(|text| !text.trim().is_empty()).map(pair).collect()
    }
}

impl System {
    /// All judged systems.
    pub const ALL: [Self; 3] = [Self::MKernel, Self::CublasNccl, Self::Fa2Nccl];

    /// The name used in published rows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MKernel => "mKernel",
            Self::CublasNccl => "cuBLAS+NCCL",
            Self::Fa2Nccl => "FA2+NCCL",
        }
    }

    /// The unfused systems.
    pub const fn is_baseline(self) -> bool {
        !matches!(self, Self::MKernel)
    }

    fn exactly(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|system| system.name() == name)
    }

    /// The system of a name that may carry a suffix in brackets, as replicates do.
    fn of(name: &str) -> Option<Self> {
        Self::exactly(name.split_once(" (").map_or(name, |(base, _)| base))
    }
}

impl Figure {
    /// Useful FLOPs of the busiest GPU over time; none where the row does not tell.
    ///
    /// Model: `2 m^3 / W` for the GEMM kernels, whose published shapes are square but for one side of `m / W`;
    /// `2 * 8 * tokens * 7168 * 2048 / W` for the experts, padding not counted; `4 * 4 * 16 * 128 * seq^2 / W` for
    /// attention. `W` is the number of ranks. Source: `plots/plot_tflops_efa.py` of mKernel.
    pub fn tflops_per_gpu(&self) -> Option<f64> {
        let value = self.value?;
        let seconds = match self.metric {
            Metric::TflopsPerGpu => return Some(value),
            Metric::Ms => value * 1e-3,
            Metric::Us => value * 1e-6,
            Metric::Gbs | Metric::SpeedupVsTorchNccl => return None,
        };
        let size = self.size? as f64;
        let flops = match self.kernel.as_str() {
            "ag_gemm" | "gemm_ar" | "gemm_rs" => 2.0 * size.powi(3),
            "moe_dispatch_gemm" => 2.0 * 8.0 * size * 7168.0 * 2048.0,
            "ring_attention" => 4.0 * 4.0 * 16.0 * 128.0 * size * size,
            _ => return None,
        };
        Some(flops / self.ranks()? / seconds / 1e12)
    }

    /// The machine file that predicts this row; none unless the topology is a judged one.
    pub fn machine(&self) -> Option<&'static str> {
        JUDGED_TOPOLOGIES.iter().find(|(topology, _)| *topology == self.topology).map(|(_, machine)| *machine)
    }

    fn ranks(&self) -> Option<f64> {
        let (nodes, gpus) = self.topology.split('-').next()?.split_once('x')?;
        Some(nodes.parse::<f64>().ok()? * gpus.parse::<f64>().ok()?)
    }

    fn same_case(&self, other: &Self) -> bool {
        (&self.kernel, &self.topology, self.base, self.size) == (&other.kernel, &other.topology, other.base, other.size)
    }

    fn standing(&self) -> Standing {
        let sized = self.size.is_some_and(|size| size >= JUDGED_FROM_SIZE);
        let fused = FUSED.contains(&self.kernel.as_str());
        if !fused || !sized || self.base.is_none() || self.machine().is_none() || self.tflops_per_gpu().is_none() {
            return Standing::Shown;
        }
        let bar = self.source.contains(" plots/") && self.source.ends_with("(bar label)");
        if System::exactly(&self.system).is_some() {
            return if bar && self.metric == Metric::TflopsPerGpu { Standing::Judged } else { Standing::Shown };
        }
        let doubtful = ["SUSPECT", "ABNORMAL", "WITHDRAWN"];
        let refuted = doubtful.iter().any(|word| self.notes.contains(word) || self.source.contains(word));
        if refuted || self.system.contains("target") { Standing::Shown } else { Standing::Replicate }
    }
}

/// A published row on which machine parameters are fitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FitRow {
    /// Fused kernel.
    pub kernel: String,
    /// System of the bar.
    pub system: String,
    /// Test bed.
    pub topology: String,
    /// `m`, tokens or sequence.
    pub size: u64,
    /// Machine parameters that are chosen on it.
    pub parameters: Vec<String>,
}

impl FitRow {
    /// Whether this is the row of a kernel, topology, system and size.
    pub fn is(&self, kernel: &str, topology: &str, system: System, size: u64) -> bool {
        (self.kernel.as_str(), self.topology.as_str(), self.system.as_str(), self.size)
            == (kernel, topology, system.name(), size)
    }
}

/// Error on rows of a kernel, test bed and system that a fit left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOutError {
    /// What was left out, as `tilewire fit --without` names it.
    pub left_out: String,
    /// Fused kernel.
    pub kernel: String,
    /// Test bed.
    pub topology: String,
    /// System of the bars.
    pub system: String,
    /// Judged rows.
    pub rows: u64,
    /// exp(mean of |ln(predicted / published)|) - 1, to four digits after the point.
    pub error: f64,
    /// Size of the worst row.
    pub worst_size: u64,
    /// Its error.
    pub worst_error: f64,
}

/// A machine parameter that is fitted.
#[derive(Clone, Debug, PartialEq)]
pub struct FitParameter {
    /// `section.name`.
    pub parameter: String,
    /// Machines that share the value.
    pub machines: Vec<String>,
    /// Where the search begins, and the value where no row identifies it.
    pub start: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

impl PublishedProtocol {
    /// The protocol as the simulator takes it.
    pub const fn simulated(&self) -> Protocol {
        Protocol::Published { stale_arrivals: self.stale_arrivals, isolated: self.isolated, launches: self.launches }
    }
}

/// Text with LF line ends and without a byte order mark.
fn plain(text: &str) -> String {
    text.strip_prefix('\u{feff}').unwrap_or(text).replace("\r\n", "\n")
}

fn provenance(file: &str, text: Result<String, DataError>) -> Result<Provenance, DataError> {
    let refuse = |line: Option<usize>, problem: String| DataError::Provenance {
        file: line.map_or_else(|| file.to_owned(), |line| format!("{file}:{line}")),
        problem,
    };
    let text = text.map_err(|error| match error {
        DataError::Read { message, .. } => refuse(None, message),
        other => other,
    })?;
    let parsed: Result<ProvenanceFile, toml::de::Error> = toml::from_str(&text);
    let source = match parsed {
        Ok(parsed) => parsed.source,
        Err(error) => {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            return Err(refuse(line, error.message().replace('\n', " ")));
        }
    };
    let empty = [("where", &source.place), ("protocol", &source.protocol), ("blake3", &source.blake3)];
    if let Some((key, _)) = empty.iter().find(|(_, value)| value.trim().is_empty()) {
        return Err(refuse(None, format!("{key} is empty")));
    }
    Ok(source)
}

fn parse_table(file: &str, text: &str, provenance: Provenance) -> Result<Table, DataError> {
    // With a final line end, the line after a record is always the reader's, comments and quoted line ends included.
    let text = if text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") };
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .comment(Some(b'#'))
        .terminator(csv::Terminator::Any(b'\n'))
        .from_reader(text.as_bytes());
    let mut records = Vec::new();
    let mut record = csv::StringRecord::new();
    while reader
        .read_record(&mut record)
        .map_err(|error| DataError::Read { file: file.to_owned(), message: error.to_string() })?
    {
        let fields: Vec<String> = record.iter().map(str::to_owned).collect();
        let inside: usize = fields.iter().map(|field| field.matches('\n').count()).sum();
        records.push(Row { line: reader.position().line().saturating_sub(1 + inside as u64).max(1), fields });
    }
    let mut records = records.into_iter();
    let Some(header) = records.next() else {
        return Err(DataError::Read { file: file.to_owned(), message: "empty, expected a header line".into() });
    };
    let columns: Vec<String> = header.fields.iter().map(|name| name.trim().to_owned()).collect();
    for (i, column) in columns.iter().enumerate() {
        let problem = match columns[..i].iter().position(|earlier| earlier == column) {
            _ if column.is_empty() => "empty".to_owned(),
            Some(earlier) => format!("\"{column}\" as is column {}", earlier + 1),
            None => continue,
        };
        return Err(DataError::Header { file: file.to_owned(), line: header.line, column: i + 1, problem });
    }
    let rows: Vec<Row> = records.collect();
    for row in &rows {
        let (have, want) = (row.fields.len(), columns.len());
        let what = match columns.get(have) {
            Some(column) => format!("column \"{column}\" is missing"),
            None if have > want => format!("field {} has no column", want + 1),
            None => continue,
        };
        return Err(DataError::Ragged { file: file.to_owned(), line: row.line, have, want, what });
    }
    Ok(Table { file: file.to_owned(), columns, rows, provenance, header_line: header.line })
}

#[cfg(test)]
mod tests;

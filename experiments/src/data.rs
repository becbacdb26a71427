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

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
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
        let file = self.display(path);
        let toml_path = Path::new(path).with_extension("toml").display().to_string();
        let text = plain(&self.text(path)?);
        let provenance = provenance(&self.display(&toml_path), self.text(&toml_path))?;
        let have = blake3::hash(text.as_bytes()).to_hex().to_string();
        if have != provenance.blake3 {
            return Err(DataError::Hash { file, have, want: provenance.blake3 });
        }
        let table = parse_table(&file, &text, provenance)?;
        let header: BTreeSet<&str> = table.columns.iter().map(String::as_str).collect();
        let described: BTreeSet<&str> = table.provenance.columns.keys().map(String::as_str).collect();
        let problem = match (header.difference(&described).next(), described.difference(&header).next()) {
            (Some(column), _) => format!("columns does not describe \"{column}\""),
            (None, Some(column)) => format!("columns describes \"{column}\", which the CSV lacks"),
            (None, None) => return Ok(table),
        };
        Err(DataError::Provenance { file: self.display(&toml_path), problem })
    }

    /// All rows of the published figures.
    ///
    /// # Errors
    /// [`DataError`] for a row that is not one.
    pub fn figures(&self) -> Result<Vec<Figure>, DataError> {
        let table = self.table("published/figures.csv")?;
        let [kernel, topology, system, tokens, seq, shape_m, metric, value, notes, source] = table
            .find(["kernel", "topology", "system", "tokens", "seq", "shape_m", "metric", "value", "notes", "source"])?;
        let mut figures = Vec::with_capacity(table.rows.len());
        for row in &table.rows {
            let cell = |column| table.cell(row, column);
            let mut size = None;
            for column in [tokens, seq, shape_m] {
                size = size.or(cell(column).optional("a positive integer or nothing", |size: &u64| *size > 0)?);
            }
            let base = System::of(cell(system).text);
            let mut figure = Figure {
                kernel: cell(kernel).kernel()?.to_owned(),
                topology: cell(topology).filled()?.to_owned(),
                system: cell(system).filled()?.to_owned(),
                size,
                metric: cell(metric).metric()?,
                value: cell(value).optional("a positive number or nothing", |v: &f64| v.is_finite() && *v > 0.0)?,
                notes: cell(notes).text.to_owned(),
                source: cell(source).filled()?.to_owned(),
                standing: Standing::Shown,
                base,
                line: row.line,
            };
            figure.standing = figure.standing();
            figures.push(figure);
        }
        Ok(figures)
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
        let table = self.table("published/effective_splits.csv")?;
        let [kernel, nodes, size, compute, intra, send, reduce, options, note, source] = table
            .find(["kernel", "nodes", "size", "compute", "intra", "send", "reduce", "options", "note", "source"])?;
        let mut splits = Vec::with_capacity(table.rows.len());
        for row in &table.rows {
            let cell = |column| table.cell(row, column);
            let ctas = |column| cell(column).required("a number of CTAs", |ctas: &u32| *ctas <= 1024);
            splits.push(EffectiveSplit {
                kernel: cell(kernel).fused_kernel()?.to_owned(),
                nodes: cell(nodes).required("a positive integer", |nodes| *nodes > 0)?,
                size: cell(size).required("a positive integer", |size| *size > 0)?,
                split: RoleSplit {
                    compute: ctas(compute)?,
                    intra_comm: ctas(intra)?,
                    inter_send: ctas(send)?,
                    inter_reduce: ctas(reduce)?,
                },
                options: cell(options).options()?,
                note: cell(note).text.to_owned(),
                source: cell(source).filled()?.to_owned(),
            });
        }
        Ok(splits)
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
        let table = self.table("published/protocols.csv")?;
        let [kernel, system, stale, isolated, nvls, note, source] =
            table.find(["kernel", "system", "stale_arrivals", "isolated", "nvls_in_baseline", "note", "source"])?;
        let mut protocols = Vec::with_capacity(table.rows.len());
        for row in &table.rows {
            let cell = |column| table.cell(row, column);
            let name = cell(system);
            protocols.push(PublishedProtocol {
                kernel: cell(kernel).fused_kernel()?.to_owned(),
                system: System::exactly(name.text)
                    .ok_or_else(|| name.refuse(System::ALL.map(System::name).join(", ")))?,
                stale_arrivals: cell(stale).required("true or false", |_| true)?,
                isolated: cell(isolated).required("true or false", |_| true)?,
                nvls_in_baseline: cell(nvls).optional("true, false or nothing", |_| true)?,
                note: cell(note).text.to_owned(),
                source: cell(source).filled()?.to_owned(),
            });
        }
        Ok(protocols)
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
            Some(root) => fs::read_to_string(root.join(path)).map_err(|error| refuse(error.to_string())),
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

/// A machine from a file anywhere, as `--machine FILE.toml` names it.
///
/// # Errors
/// [`DataError`] when it cannot be read or is no machine.
pub fn read_machine(file: &Path) -> Result<Machine, DataError> {
    let name = file.display().to_string();
    let text =
        fs::read_to_string(file).map_err(|error| DataError::Read { file: name.clone(), message: error.to_string() })?;
    Ok(Machine::parse(&name, &plain(&text))?)
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

impl PublishedProtocol {
    /// The protocol as the simulator takes it.
    pub const fn simulated(&self) -> Protocol {
        Protocol::Published { stale_arrivals: self.stale_arrivals, isolated: self.isolated }
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
mod tests {
    use super::*;

    /// A copy of the embedded directory on disk, to be broken.
    fn copy() -> (tempfile::TempDir, Data) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for (path, text) in EMBEDDED {
            let file = dir.path().join(path);
            fs::create_dir_all(file.parent().expect("below the root")).expect("writable");
            fs::write(file, text).expect("writable");
        }
        let data = Data::open(dir.path()).expect("just made");
        (dir, data)
    }

    /// Writes a CSV and a provenance that fits it.
    fn write_csv(dir: &tempfile::TempDir, path: &str, text: &str) {
        let file = dir.path().join(path);
        let plain = plain(text);
        let header = plain.lines().find(|line| !line.starts_with('#')).unwrap_or_default();
        let columns: BTreeSet<&str> = header.split(',').collect();
        let columns: Vec<String> = columns.iter().map(|column| format!("\"{column}\" = \"a test\"")).collect();
        let source = format!(
            "[source]\nkind = \"assumed\"\nwhere = \"a test\"\nprotocol = \"none\"\ndate = 2026-11-29\n\
             blake3 = \"{}\"\n[source.columns]\n{}\n",
            blake3::hash(plain.as_bytes()).to_hex(),
            columns.join("\n")
        );
        fs::write(&file, text).expect("writable");
        fs::write(file.with_extension("toml"), source).expect("writable");
    }

    /// The error after the directory's own path, which must be a single line.
    fn refusal<T: std::fmt::Debug>(dir: &tempfile::TempDir, result: Result<T, DataError>) -> String {
        let message = result.expect_err("broken").to_string();
        assert_eq!(message.lines().count(), 1, "{message}");
        message.replace(&format!("{}/", dir.path().display()), "")
    }

    const SPLIT_HEADER: &str = "kernel,nodes,size,compute,intra,send,reduce,options,note,source";

    #[test]
    fn every_machine_parses_and_every_value_has_a_source() {
        let data = Data::embedded();
        let names = data.machine_names().expect("embedded");
        assert_eq!(names, ["h100-nvlink", "h200-1gpu", "h200-cx7", "h200-efa", "h200-nvlink"]);
        for name in names {
            let machine = data.machine(&name).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(machine.gemm.len(), 3, "{name}");
            for (key, param) in machine.params() {
                assert!(param.source.len() >= 8, "{name}: {key}: {}", param.source);
                let date = param.date.parse::<toml::value::Datetime>().expect("a TOML date");
                assert!(date.date.is_some() && date.time.is_none(), "{name}: {key}: {date}");
            }
        }
    }

    #[test]
    fn readings_that_machines_cite_are_there() {
        let data = Data::embedded();
        let readings = data.table("measured/h200-2026-11-29.csv").expect("embedded");
        for name in data.machine_names().expect("embedded") {
            for (key, param) in data.machine(&name).expect("tested above").params() {
                for folder in ["data/measured/", "data/published/"] {
                    for (start, _) in param.source.match_indices(folder) {
                        let path = &param.source[start + "data/".len()..];
                        let path = &path[..path.find(".csv").map_or(path.len(), |end| end + ".csv".len())];
                        data.table(path).unwrap_or_else(|error| panic!("{name}: {key}: {error}"));
                    }
                }
                if param.kind == Kind::Measured && !param.source.contains("header") {
                    let (text, source) = (param.value.to_string(), &param.source);
                    assert!(source.starts_with("data/measured/h200-2026-11-29.csv, row"), "{name}: {key}: {source}");
                    let is_cited = |row: &&Row| {
                        let quantity = row.fields[0].as_str();
                        let read = row.fields[2].parse::<f64>().is_ok_and(|read| read.to_string() == text);
                        source.contains(quantity) && (read || row.fields[4].starts_with(&text))
                    };
                    assert!(readings.rows.iter().any(|row| is_cited(&row)), "{name}: {key} = {text}: {source}");
                }
            }
        }
    }

    #[test]
    fn machines_differ_where_hardware_does() {
        let data = Data::embedded();
        let [cx7, efa, one] = ["h200-cx7", "h200-efa", "h200-1gpu"].map(|name| data.machine(name).expect("embedded"));
        assert_eq!(
            [cx7.fabric, efa.fabric, one.fabric].map(tilewire_kernels::Fabric::name),
            ["ib-rc", "efa-srd", "loopback"]
        );
        assert!(cx7.nic.rails.value < efa.nic.rails.value);
        assert!(cx7.network.latency_us.value < efa.network.latency_us.value);
        assert_ne!(cx7.library.all_reduce.bus_gbs, efa.library.all_reduce.bus_gbs);
        assert_eq!(one.peer_path, tilewire_sim::machine::PeerPath::Hbm);
    }

    #[test]
    fn every_csv_is_the_one_its_provenance_describes() {
        let data = Data::embedded();
        let paths = data.csv_paths().expect("embedded");
        let rows: Vec<(String, usize)> = paths
            .into_iter()
            .map(|path| {
                let table = data.table(&path).unwrap_or_else(|error| panic!("{error}"));
                (path, table.rows.len())
            })
            .collect();
        let expected = [
            ("measured/h200-2026-11-29.csv", 272),
            ("published/collectives.csv", 255),
            ("published/effective_splits.csv", 71),
            ("published/figures.csv", 628),
            ("published/kernels_single_gpu.csv", 69),
            ("published/links.csv", 119),
            ("published/mkernel_bench_splits.csv", 46),
            ("published/protocols.csv", 10),
            ("published/sm_sweeps.csv", 305),
        ];
        assert_eq!(rows, expected.map(|(path, count)| (path.to_owned(), count)));
    }

    #[test]
    fn kernels_of_sweeps_and_bench_splits_are_known() {
        let data = Data::embedded();
        for path in ["published/sm_sweeps.csv", "published/mkernel_bench_splits.csv"] {
            let table = data.table(path).expect("embedded");
            let [kernel] = table.find(["kernel"]).expect("has one");
            for row in &table.rows {
                table.cell(row, kernel).kernel().unwrap_or_else(|error| panic!("{error}"));
            }
        }
        for kernel in tilewire_kernels::KERNELS {
            assert!(FUSED.contains(&kernel.name()), "{}", kernel.name());
        }
    }

    #[test]
    fn judged_rows_are_the_bars_from_8192_on() {
        let judged = Data::embedded().judged().expect("embedded");
        let mut counts = BTreeMap::new();
        for row in &judged {
            assert!(row.size >= JUDGED_FROM_SIZE);
            assert!(row.band_tflops.0 <= row.tflops_per_gpu && row.tflops_per_gpu <= row.band_tflops.1);
            *counts.entry((row.kernel.as_str(), row.machine, row.system.name())).or_insert(0) += 1;
        }
        let expected = BTreeMap::from([
            (("ag_gemm", "h200-cx7", "cuBLAS+NCCL"), 3),
            (("ag_gemm", "h200-cx7", "mKernel"), 3),
            (("ag_gemm", "h200-efa", "cuBLAS+NCCL"), 4),
            (("ag_gemm", "h200-efa", "mKernel"), 4),
            (("gemm_ar", "h200-efa", "cuBLAS+NCCL"), 3),
            (("gemm_ar", "h200-efa", "mKernel"), 3),
            (("gemm_rs", "h200-efa", "cuBLAS+NCCL"), 3),
            (("gemm_rs", "h200-efa", "mKernel"), 3),
            (("moe_dispatch_gemm", "h200-efa", "cuBLAS+NCCL"), 5),
            (("moe_dispatch_gemm", "h200-efa", "mKernel"), 5),
            (("ring_attention", "h200-cx7", "FA2+NCCL"), 5),
            (("ring_attention", "h200-cx7", "mKernel"), 5),
            (("ring_attention", "h200-efa", "FA2+NCCL"), 5),
            (("ring_attention", "h200-efa", "mKernel"), 5),
        ]);
        assert_eq!(counts, expected);
        assert_eq!(judged.len(), 56);
    }

    #[test]
    fn replicates_give_a_band_in_the_bars_unit() {
        let judged = Data::embedded().judged().expect("embedded");
        let row = |kernel: &str, size| {
            judged.iter().find(|row| {
                (row.kernel.as_str(), row.machine, row.system, row.size) == (kernel, "h200-efa", System::MKernel, size)
            })
        };
        // Bar 448; replicates 451, 451, 450 TFLOPS, 9.514208 and 9.295692 ms of 2 * 32768^3 / 16 FLOP.
        let ag = row("ag_gemm", 32768).expect("judged");
        assert_eq!((ag.tflops_per_gpu, ag.band_tflops.0, ag.num_replicates), (448.0, 448.0, 5));
        assert!((ag.band_tflops.1 - 473.13).abs() < 0.01, "{:?}", ag.band_tflops);
        // The suspect replicate of 448 TFLOPS is left out.
        let moe = row("moe_dispatch_gemm", 32768).expect("judged");
        assert!(moe.band_tflops.1 < 400.0, "{moe:?}");
        // The author's target of 10.896 ms is no replicate; the result file that gives the same number is one.
        let ar = row("gemm_ar", 32768).expect("judged");
        assert_eq!((ar.tflops_per_gpu, ar.band_tflops.0, ar.num_replicates), (397.0, 388.0, 5));
        assert!((ar.band_tflops.1 - 403.6).abs() < 0.1, "{ar:?}");
    }

    #[test]
    fn judged_rows_have_splits_and_protocols() {
        let data = Data::embedded();
        for row in data.judged().expect("embedded") {
            let protocol = data.protocol(&row.kernel, row.system).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(protocol.nvls_in_baseline.is_some(), row.system.is_baseline());
            data.effective_split(&row.kernel, 2, row.size).unwrap_or_else(|error| panic!("{error}"));
        }
        let rs = data.protocol("gemm_rs", System::MKernel).expect("there");
        assert_eq!(rs.simulated(), Protocol::Published { stale_arrivals: false, isolated: true });
        assert!(data.protocol("gemm_rs", System::Fa2Nccl).is_err());
    }

    #[test]
    fn effective_splits_fill_132_sms() {
        for split in Data::embedded().effective_splits().expect("embedded") {
            let big_launch = match split.kernel.as_str() {
                "ring_attention" => split.split.compute + split.split.intra_comm,
                _ => u32::try_from(split.split.total()).expect("small"),
            };
            assert_eq!(big_launch, 132, "{split:?}");
        }
        let split = Data::embedded().effective_split("gemm_rs", 2, 32768).expect("there");
        assert_eq!(split.split, RoleSplit { compute: 120, intra_comm: 0, inter_send: 4, inter_reduce: 8 });
        assert_eq!(split.options, [("chunk_tiles".to_owned(), "8".to_owned())]);
        let error = Data::embedded().effective_split("gemm_ar", 3, 8192).expect_err("not published");
        assert_eq!(error.to_string(), "no published split for gemm_ar at size 8192 on 3 nodes; there are none");
    }

    #[test]
    fn a_directory_on_disk_reads_like_the_embedded_one() {
        let (_dir, data) = copy();
        assert_eq!(data.figures().expect("copied"), Data::embedded().figures().expect("embedded"));
        assert_eq!(data.machine("h200-efa").expect("copied"), Data::embedded().machine("h200-efa").expect("embedded"));
    }

    #[test]
    fn byte_order_marks_and_crlf_are_harmless() {
        let (dir, data) = copy();
        let file = dir.path().join("published/figures.csv");
        let text = fs::read_to_string(&file).expect("copied").replace('\n', "\r\n");
        fs::write(&file, format!("\u{feff}{text}")).expect("writable");
        assert_eq!(data.figures().expect("same rows"), Data::embedded().figures().expect("embedded"));
    }

    #[test]
    fn comments_and_quoted_line_ends_keep_line_numbers_right() {
        let (dir, data) = copy();
        let path = "published/effective_splits.csv";
        let row = "gemm_rs,2,8192,118,0,6,8,,\"two\nlines\",here";
        write_csv(&dir, path, &format!("# one\n# two\n{SPLIT_HEADER}\n{row}\n# three\n\ngemm_rs,2,x,1,0,0,0,,,here"));
        let table = data.table(path).expect("rectangular");
        assert_eq!(table.rows.iter().map(|row| row.line).collect::<Vec<_>>(), [4, 8]);
        let expected = "published/effective_splits.csv:8: size = \"x\", allowed: a positive integer";
        assert_eq!(refusal(&dir, data.effective_splits()), expected);
    }

    #[test]
    fn broken_rows_name_file_line_and_column() {
        let (dir, data) = copy();
        let path = "published/effective_splits.csv";
        let good = "gemm_rs,2,8192,118,0,6,8,chunk_tiles=4,,here";
        let cases = [
            (
                format!("{SPLIT_HEADER}\ngemm_rs,2,8192\n"),
                ":2: 3 fields, the header has 10: column \"compute\" is missing",
            ),
            (format!("{SPLIT_HEADER}\n{good},more\n"), ":2: 11 fields, the header has 10: field 11 has no column"),
            ("kernel,nodes\ngemm_rs,2\n".into(), ":1: no column \"size\"; the header has kernel, nodes"),
            ("kernel,kernel\na,b\n".into(), ":1: column 2 of the header is \"kernel\" as is column 1"),
            ("kernel,\na,b\n".into(), ":1: column 2 of the header is empty"),
            ("# nothing\n".into(), ": empty, expected a header line"),
            (
                format!("{SPLIT_HEADER}\n{}\n", good.replace("118", "-1")),
                ":2: compute = \"-1\", allowed: a number of CTAs",
            ),
            (
                format!("{SPLIT_HEADER}\n{}\n", good.replace("gemm_rs", "gemm_sr")),
                ":2: kernel = \"gemm_sr\", allowed: ag_gemm, gemm_ar, gemm_rs, moe_dispatch_gemm, ring_attention",
            ),
            (
                format!("{SPLIT_HEADER}\n{}\n", good.replace("chunk_tiles=4", "chunk_tiles")),
                ":2: options = \"chunk_tiles\", allowed: name=value;name=value or nothing",
            ),
            (format!("{SPLIT_HEADER}\n{}\n", good.replace("here", "")), ":2: source = \"\", allowed: some text"),
        ];
        for (text, expected) in cases {
            write_csv(&dir, path, &text);
            assert_eq!(refusal(&dir, data.effective_splits()), format!("{path}{expected}"));
        }
    }

    #[test]
    fn figures_refuse_values_that_are_none() {
        let (dir, data) = copy();
        let header = "kernel,topology,system,tokens,seq,shape_m,metric,value,notes,source";
        let good = "ag_gemm,2x8-h200-efa,mKernel,,,8192,ms,1.5,,here";
        for (from, to, expected) in [
            ("ag_gemm", "ag_gem", "kernel = \"ag_gem\", allowed: ag_gemm, gemm_ar, "),
            (",ms,", ",s,", "metric = \"s\", allowed: tflops_per_gpu, ms, us, "),
            ("1.5", "NaN", "value = \"NaN\", allowed: a positive number or nothing"),
            ("1.5", "inf", "value = \"inf\", allowed: a positive number or nothing"),
            ("1.5", "-1", "value = \"-1\", allowed: a positive number or nothing"),
            ("8192", "0", "shape_m = \"0\", allowed: a positive integer or nothing"),
            ("2x8-h200-efa", "", "topology = \"\", allowed: some text"),
        ] {
            write_csv(&dir, "published/figures.csv", &format!("{header}\n{}\n", good.replace(from, to)));
            let message = refusal(&dir, data.figures());
            assert!(message.starts_with(&format!("published/figures.csv:2: {expected}")), "{message}");
        }
    }

    #[test]
    fn provenance_is_required_and_must_fit() {
        let (dir, data) = copy();
        let (csv, toml) = ("published/links.csv", dir.path().join("published/links.toml"));
        let good = fs::read_to_string(&toml).expect("copied");
        let breaks: [(&str, &str, &str); 5] = [
            ("[source]", "[source]\nmood = \"good\"", "published/links.toml:2: unknown field `mood`"),
            ("kind = \"published\"", "kind = \"guessed\"", "published/links.toml:2: unknown variant `guessed`"),
            ("date = 2026-11-29", "", "published/links.toml:1: missing field `date`"),
            ("device = \"machine\"", "", "published/links.toml: columns does not describe \"device\""),
            ("device = \"machine\"", "device = \"\"\nx = \"\"", "published/links.toml: columns describes \"x\""),
        ];
        for (from, to, expected) in breaks {
            fs::write(&toml, good.replace(from, to)).expect("writable");
            let message = refusal(&dir, data.table(csv));
            assert!(message.starts_with(expected), "{message}");
        }
        fs::remove_file(&toml).expect("there");
        let message = refusal(&dir, data.table(csv));
        assert!(message.starts_with("published/links.toml: No such file"), "{message}");
        assert!(message.ends_with("a CSV loads only with its provenance"), "{message}");
    }

    #[test]
    fn changed_data_is_refused_until_its_provenance_says_so() {
        let (dir, data) = copy();
        let file = dir.path().join("published/figures.csv");
        let text = fs::read_to_string(&file).expect("copied");
        fs::write(&file, text.replacen("tflops_per_gpu,40", "tflops_per_gpu,41", 1)).expect("writable");
        let message = refusal(&dir, data.figures());
        assert!(message.starts_with("published/figures.csv: blake3 is "), "{message}");
    }

    #[test]
    fn machines_that_are_missing_or_misnamed_are_refused() {
        let (dir, data) = copy();
        let known = "h100-nvlink, h200-1gpu, h200-cx7, h200-efa, h200-nvlink";
        for name in ["h300", "../machines/h200-efa", ""] {
            let expected = format!("no machine \"{name}\"; there are {known}");
            assert_eq!(refusal(&dir, data.machine(name)), expected);
        }
        let machines = dir.path().join("machines");
        fs::copy(machines.join("h200-efa.toml"), machines.join("mine.toml")).expect("writable");
        let expected = "machines/mine.toml: name = \"h200-efa\", must be \"mine\" as the file's";
        assert_eq!(refusal(&dir, data.machine("mine")), expected);
        assert_eq!(read_machine(&machines.join("mine.toml")).expect("a machine").name, "h200-efa");
        assert!(refusal(&dir, read_machine(&machines.join("none.toml"))).starts_with("machines/none.toml: No such"));
        assert!(refusal(&dir, Data::open(&dir.path().join("nowhere"))).starts_with("nowhere: no such directory"));
        assert!(Data::new(None).expect("embedded").root.is_none());
    }

    #[test]
    fn values_of_machines_without_a_source_are_refused() {
        let (dir, data) = copy();
        let file = dir.path().join("machines/h200-efa.toml");
        let text = fs::read_to_string(&file).expect("copied");
        let start = text.find("rails = {").expect("a parameter");
        let source = text[start..].find("source = \"").expect("its source") + start + "source = \"".len();
        let end = text[source..].find('"').expect("closed") + source;
        fs::write(&file, format!("{}{}", &text[..source], &text[end..])).expect("writable");
        let expected = "machines/h200-efa.toml: nic.rails has no source; every value needs one";
        assert_eq!(refusal(&dir, data.machine("h200-efa")), expected);
    }

    #[test]
    fn text_that_is_not_utf8_is_refused() {
        let (dir, data) = copy();
        fs::write(dir.path().join("published/links.csv"), [b'a', 0xff, b'\n']).expect("writable");
        let message = refusal(&dir, data.table("published/links.csv"));
        assert!(message.starts_with("published/links.csv: ") && message.contains("UTF-8"), "{message}");
    }
}

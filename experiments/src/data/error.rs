//! Why data was refused.

use tilewire_sim::machine::MachineError;

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
    /// A quote without its end.
    #[error("{file}:{line}: the quote that opens field {column} is not closed; close it with \"")]
    OpenQuote {
        /// File.
        file: String,
        /// Line on which the row begins.
        line: u64,
        /// Number of the field, from 1.
        column: usize,
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

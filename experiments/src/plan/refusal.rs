//! Which part of a case was refused, and why.

use crate::data::DataError;

/// A part of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The kernel.
    Kernel,
    /// The cluster.
    Cluster,
    /// A field of the shape.
    Shape(&'static str),
    /// One option of the kernel.
    Set,
    /// The split.
    Split,
    /// The unfused form.
    Baseline,
    /// Which ranks are simulated.
    Execution,
}

impl Part {
    /// The flag that sets it.
    pub fn flag(self) -> String {
        match self {
            Self::Kernel => "--kernel".into(),
            Self::Cluster => "--cluster".into(),
            Self::Shape(field) => format!("--{}", field.replace('_', "-")),
            Self::Set => "--set".into(),
            Self::Split => "--split".into(),
            Self::Baseline => "--baseline".into(),
            Self::Execution => "--execution".into(),
        }
    }

    /// The columns of a measured row that hold it.
    pub const fn column(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Cluster => "cluster, machine",
            Self::Shape(field) => field,
            Self::Set => "options",
            Self::Split => "compute, intra_comm, inter_send, inter_reduce",
            Self::Baseline => "form",
            Self::Execution => "mode",
        }
    }
}

/// Why a draft is no case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The part that is wrong.
    pub part: Part,
    /// Its value, and what is allowed.
    pub problem: String,
}

impl Refusal {
    pub(super) fn new(part: Part, problem: impl Into<String>) -> Self {
        Self { part, problem: problem.into() }
    }
}

/// A refusal, or data that could not be read.
#[derive(Debug)]
pub enum ResolveError {
    /// The draft is wrong.
    Refused(Refusal),
    /// The data directory or machine file is.
    Data(DataError),
}

impl From<Refusal> for ResolveError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<DataError> for ResolveError {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

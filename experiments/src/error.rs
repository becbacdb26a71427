//! Why a command did not do all that was asked, and the exit code that says so.

use crate::data::DataError;
use std::path::{Path, PathBuf};
use tilewire_hw::device::HwError;
use tilewire_hw::host::HostError;
use tilewire_hw::transport::TransportError;
use tilewire_kernels::BuildError;
use tilewire_sim::SimError;

/// Everything that ends a command. A message is one to three lines: what, where, what is allowed, what to do.
#[derive(Debug, thiserror::Error)]
pub enum ExperimentError {
    /// Data that is missing or not what it says.
    #[error(transparent)]
    Data(#[from] DataError),
    /// An argument or a key of an experiment file.
    #[error("{place}: {problem}")]
    Refused {
        /// Flag, or file with line, column and key.
        place: String,
        /// Value and what is allowed.
        problem: String,
    },
    /// A file that cannot be read.
    #[error("{}: {message}", file.display())]
    Read {
        /// File.
        file: PathBuf,
        /// What the system says.
        message: String,
    },
    /// Output that cannot be written.
    #[error("{}: {message}; choose another directory with -o", path.display())]
    Write {
        /// File or directory.
        path: PathBuf,
        /// What the system says.
        message: String,
    },
    /// Standard output takes no more.
    #[error("standard output: {0}")]
    Output(String),
    /// A shape, cluster and options that do not fit together.
    #[error("{source}\n  in {case}")]
    Build {
        /// The case.
        case: String,
        /// The builder's words.
        source: BuildError,
    },
    /// A split that does not fit, or a run that got stuck.
    #[error("{source}\n  in {case}")]
    Sim {
        /// The case.
        case: String,
        /// The simulator's words.
        source: SimError,
    },
    /// A claim that does not hold, or a schedule with fatal findings.
    #[error("{0}")]
    Finding(String),
    /// No hardware here.
    #[error("{0}; nothing was run or written; `tilewire doctor` says what is here")]
    NoHardware(HwError),
    /// What the hardware, or its backend, did not do.
    #[error("{source}\n  in {case}")]
    Hardware {
        /// The case.
        case: String,
        /// The backend's words.
        source: HwError,
    },
    /// What the host device, or the wire between its ranks, did not do.
    #[error("{source}\n  in {case}")]
    Host {
        /// The rank and case.
        case: String,
        /// Its words.
        source: HostError,
    },
    /// Ranks that this process started and that failed; each has said why.
    #[error("{text}")]
    Ranks {
        /// Which, and how they ended.
        text: String,
        /// Exit code of the cause.
        code: u8,
    },
    /// Ctrl-C.
    #[error("interrupted: {done} of {points} points are done, {kept}")]
    Interrupted {
        /// What of them is kept.
        kept: &'static str,
        /// Rows that were written.
        done: usize,
        /// Points that were asked for.
        points: usize,
    },
}

impl ExperimentError {
    /// An argument or key that is refused.
    pub fn refused(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Refused { place: place.into(), problem: problem.into() }
    }

    /// A case that is refused, at the place in an experiment file that asks for it.
    pub fn at(self, place: &str) -> Self {
        match self {
            Self::Build { .. } | Self::Sim { .. } => Self::refused(place, self.to_string()),
            other => other,
        }
    }

    /// A failed write.
    pub fn write(path: &Path, error: impl std::fmt::Display) -> Self {
        Self::Write { path: path.to_owned(), message: error.to_string() }
    }

    /// 2 for input, 3 for a finding, 4 for missing or failing hardware, 130 after Ctrl-C.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Finding(_)
            | Self::Sim { source: SimError::Stuck { .. }, .. }
            | Self::Hardware {
                source:
                    HwError::Stuck(_)
                    | HwError::Puts(_)
                    | HwError::PutsPending { .. }
                    | HwError::Party(_)
                    | HwError::Wire(_),
                ..
            } => 3,
            Self::Host {
                source: HostError::Transport(TransportError::Missing { .. } | TransportError::NoWay { .. }),
                ..
            } => 4,
            Self::Host { .. } => 3,
            Self::NoHardware(_) | Self::Hardware { source: HwError::Cuda { .. }, .. } => 4,
            Self::Interrupted { .. } => 130,
            Self::Ranks { code, .. } => *code,
            _ => 2,
        }
    }
}

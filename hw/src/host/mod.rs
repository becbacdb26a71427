//! The host device: executes a rank of a Schedule with CPU threads as CTAs, its memory in a segment of host memory.
//!
//! ```text
//! rank (thread or process)                            node: segments that all its ranks map
//!   CTA threads ── loads, stores, atomic adds, flags ──▶ own and neighbours' segments
//!        └─ puts ─▶ Fifo ─▶ proxy threads ─▶ Transport ─▶ segment of a rank of another node
//! ```
//!
//! It proves order and transport with real concurrency, not speed: its arithmetic is that of the functional executor.
//! A run ends when all own puts are `sent` and all puts addressed to the rank have been noticed; a run that does not
//! move for a while ends with the list of the CTAs that wait.

mod cta;
mod memory;
mod plan;
mod run;
mod share;
pub mod speed;
mod watch;
mod wire;

pub use run::{HostConfig, RankReport, Setup, Wires, run_rank, run_threads};
pub use share::share;
pub use wire::{Memory, Wire};

use crate::bootstrap::BootstrapError;
use crate::transport::TransportError;
use crate::values::ExecError;
use crate::values::report::list;
use tilewire_kernels::Blocked;

/// Stands in [`Blocked::flag`] for a command FIFO without room.
pub const FIFO: &str = "(command FIFO)";

/// Why a rank did not run to its end with right values.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// What every executor can say: stuck, a wrong value, an illegal schedule.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// The transport.
    #[error("transport: {0}")]
    Transport(#[from] TransportError),
    /// Another rank failed, or ranks did not come together.
    #[error("{error}; this rank ended its run{}", list(.blocked))]
    Peer {
        /// Who and why.
        error: BootstrapError,
        /// What this rank waited for when it learned of it.
        blocked: Vec<Blocked>,
    },
    /// All tasks are done, but puts of this rank are not complete or puts to it did not arrive.
    #[error("stuck: {pending} of {pushed} puts of this rank are not complete, and of {expected} arrivals {missing} are missing{}", first(.words))]
    PutsPending {
        /// Writes not complete.
        pending: u64,
        /// Writes asked for.
        pushed: u64,
        /// Arrival words that never rose.
        missing: usize,
        /// Arrival words that the schedule raises on this rank.
        expected: usize,
        /// Names of the first missing words, and who was to raise them.
        words: Vec<String>,
    },
    /// An exercise of the wire.
    #[error(transparent)]
    Exercise(#[from] crate::transport::exercise::ExerciseError),
    /// Something that the host device does not do.
    #[error("the host device does not do {what}")]
    Unsupported {
        /// What.
        what: String,
    },
    /// Memory that cannot be had.
    #[error("segment of rank {rank}: {error}")]
    Segment {
        /// Rank number.
        rank: usize,
        /// The system's words.
        error: std::io::Error,
    },
}

impl From<BootstrapError> for HostError {
    fn from(error: BootstrapError) -> Self {
        Self::Peer { error, blocked: Vec::new() }
    }
}

fn first(words: &[String]) -> String {
    if words.is_empty() { String::new() } else { format!(": {}", words.join(", ")) }
}

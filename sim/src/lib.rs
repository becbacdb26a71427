//! What would happen: a discrete-event model that executes a Schedule on a machine.
//!
//! ```text
//!  Schedule ─┐
//!            ├─▶ compile: programs, cost records, flow classes ─▶ engine: rounds of events ─▶ predict: report
//!  Machine ──┘                                                      │
//!                                                                   └ share: who gets how much of which resource
//! ```
#![forbid(unsafe_code)]

mod average;
pub mod bound;
pub mod compile;
pub mod engine;
pub mod machine;
pub mod noise;
pub mod overlap;
pub mod predict;
pub mod share;
pub mod tree;
pub mod tune;

pub use average::Shown;
pub use machine::Machine;
pub use overlap::OverlapReason;
pub use predict::{Clock, Config, Execution, Loop, Prediction, Protocol, RoleReport, Simulation, WaitReport, predict};

use tilewire_kernels::{Blocked, RoleKind, RoleSplit};

/// Why a simulation cannot be made or did not end.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SimError {
    /// The split asks for more CTAs than the GPU has SMs.
    #[error("split {split} needs {need} SMs in launch \"{launch}\", the machine has {have}; lower one of the roles")]
    TooManyCtas {
        /// Split.
        split: RoleSplit,
        /// Launch.
        launch: String,
        /// CTAs asked for.
        need: u64,
        /// SMs.
        have: u64,
    },
    /// Launches that may run side by side do not fit the GPU together.
    #[error(
        "launches \"{first}\" and \"{second}\" may run side by side and need {need} SMs together, the machine has \
         {have}; give them fewer CTAs, or order one after the other"
    )]
    NoRoomBeside {
        /// The earlier one.
        first: String,
        /// The later one.
        second: String,
        /// CTAs of both.
        need: u64,
        /// SMs.
        have: u64,
    },
    /// A role has tasks, no CTAs, and nobody recycles into it.
    #[error("role {role} has {tasks} tasks in launch \"{launch}\" and no CTA to run them; give it at least 1")]
    NobodyForRole {
        /// Role.
        role: RoleKind,
        /// Launch.
        launch: String,
        /// Its tasks.
        tasks: u32,
    },
    /// CTAs for a role that has nothing to do.
    #[error("role {role} has no work in this schedule, but the split gives it {ctas} CTAs; set it to 0")]
    RoleWithoutWork {
        /// Role.
        role: RoleKind,
        /// CTAs.
        ctas: u32,
    },
    /// Mirror execution of a schedule whose ranks differ.
    #[error("{kernel} cannot run in mirror mode: {why}; use full execution")]
    NotSymmetric {
        /// Kernel.
        kernel: String,
        /// Why.
        why: &'static str,
    },
    /// No legal split leaves a CTA for every role with work.
    #[error("no split gives every role with work a CTA on this machine")]
    NoSplit,
    /// Every CTA waits.
    #[error("stuck at {at_us:.3} us, {} CTAs wait{}", blocked.len(), blocked.first().map_or(String::new(), |b| format!("; first: {b}")))]
    Stuck {
        /// When.
        at_us: f64,
        /// Who.
        blocked: Vec<Blocked>,
    },
}

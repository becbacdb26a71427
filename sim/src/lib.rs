//! What would happen: a discrete-event model that executes a Schedule on a machine.
#![forbid(unsafe_code)]

pub mod machine;
pub mod predict;

pub use machine::Machine;
pub use predict::{Config, Execution, Prediction, Protocol, predict};

use tilewire_kernels::{RoleSplit, Schedule};

/// Why a simulation cannot be made or did not end.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SimError {
    /// The split asks for more CTAs than the GPU has SMs.
    #[error(
        "split {split} needs {need} SMs in launch \"{launch}\", machine {machine} has {have}; lower one of the roles"
    )]
    TooManyCtas {
        /// Split.
        split: RoleSplit,
        /// Launch.
        launch: String,
        /// CTAs asked for.
        need: u64,
        /// SMs.
        have: u64,
        /// Machine.
        machine: String,
    },
}

/// A schedule prepared for a machine; runs any number of splits.
pub struct Simulation;

impl Simulation {
    /// Prepares a schedule.
    ///
    /// # Errors
    /// See [`SimError`].
    pub fn new(_schedule: &Schedule, _machine: &Machine, _config: &Config) -> Result<Self, SimError> {
        Ok(Self)
    }

    /// Runs one split and its reduced forms.
    ///
    /// # Errors
    /// See [`SimError`].
    pub fn predict(&self, _split: &RoleSplit) -> Result<Prediction, SimError> {
        unreachable!("the engine lands in the next commit")
    }
}

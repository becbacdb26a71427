//! From a schedule, a machine and a split to the numbers that a user reads.

use crate::machine::Machine;
use serde::Serialize;
use tilewire_kernels::{RoleKind, RoleSplit, Schedule};

/// Which ranks are simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Execution {
    /// As few ranks as the schedule's symmetry (and the network's) allows.
    #[default]
    Folded,
    /// One rank that stands for all; refused for schedules that are not symmetric.
    Mirror,
    /// Every rank.
    Full,
}

/// How launches follow each other, see [`Protocol`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// A fresh epoch per launch.
    #[default]
    Fair,
    /// What the published benchmark's loop did: see `stale_arrivals` and `launches`.
    Published {
        /// Put arrivals count as satisfied at once (flags of the launch before were never cleared).
        stale_arrivals: bool,
        /// Launches are timed one by one, so that skew and synchronisation of an isolated launch count.
        isolated: bool,
    },
}

/// How one prediction is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Which ranks are simulated.
    pub execution: Execution,
    /// Benchmark protocol.
    pub protocol: Protocol,
    /// Seed of the noise; no noise without one.
    pub noise_seed: Option<u64>,
    /// Keep the timeline of every task.
    pub timeline: bool,
}

/// What bounds a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum BoundBy {
    /// Matrix throughput of the compute CTAs.
    Compute,
    /// HBM bandwidth.
    Hbm,
    /// NVLink egress.
    NvlinkEgress,
    /// NVLink ingress.
    NvlinkIngress,
    /// NIC bandwidth or message rate.
    Nic,
    /// The proxy threads.
    Proxy,
    /// Nothing reaches 60 % of the time.
    Latency,
    /// The throughput of a communication role's CTAs.
    Role(RoleKind),
}

impl From<BoundBy> for String {
    fn from(bound: BoundBy) -> Self {
        match bound {
            BoundBy::Compute => "compute".into(),
            BoundBy::Hbm => "hbm".into(),
            BoundBy::NvlinkEgress => "nvlink_egress".into(),
            BoundBy::NvlinkIngress => "nvlink_ingress".into(),
            BoundBy::Nic => "nic".into(),
            BoundBy::Proxy => "proxy".into(),
            BoundBy::Latency => "latency".into(),
            BoundBy::Role(kind) => format!("role:{kind}"),
        }
    }
}

/// What the CTAs of a role did, on the slowest rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleReport {
    /// Role.
    pub role: RoleKind,
    /// CTAs over all launches that run side by side.
    pub ctas: u32,
    /// Tasks done.
    pub tasks: u64,
    /// Time in tasks, summed over CTAs.
    pub busy_us: f64,
    /// Time waiting for flags, summed over CTAs.
    pub wait_us: f64,
    /// Time with nothing to do, summed over CTAs.
    pub idle_us: f64,
    /// Busy share of the CTAs' time.
    pub utilisation: f64,
}

/// Whom a role waited for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaitReport {
    /// Role that waited.
    pub role: RoleKind,
    /// Flag family.
    pub flag: String,
    /// Role (or `proxy`, for flags raised by a NIC or host) that raises it.
    pub cause_role: String,
    /// Time, summed over CTAs of the slowest rank.
    pub us: f64,
    /// Share of all waiting.
    pub share: f64,
}

/// Everything that `predict` tells, named as in CSV columns and JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// From the first rank's launch command to the last write visible anywhere, helpers inside.
    pub time_us: f64,
    /// Useful floating-point operations over time, of the busiest rank.
    pub tflops_per_gpu: f64,
    /// The compute role alone.
    pub compute_only_us: f64,
    /// Communication alone.
    pub comm_only_us: f64,
    /// `(compute_only + comm_only - time) / min(compute_only, comm_only)`.
    pub overlap: f64,
    /// `time - compute_only`.
    pub exposed_comm_us: f64,
    /// The resource with the largest lower bound.
    pub bound_by: BoundBy,
    /// That bound.
    pub bound_us: f64,
    /// Roles.
    pub roles: Vec<RoleReport>,
    /// Wait breakdown, largest first.
    pub waits: Vec<WaitReport>,
    /// Bytes that a rank sends to other nodes over time.
    pub wire_gbs: f64,
    /// The same with bytes that stay on the node counted too, as expert-parallel benchmarks report it.
    pub logical_gbs: f64,
    /// Tasks that completed, over all simulated ranks.
    pub tasks: u64,
    /// Events that the engine handled.
    pub events: u64,
    /// Ranks that were simulated.
    pub simulated_ranks: usize,
}

/// Predicts one run. See [`crate::Simulation`] to run many splits of one schedule.
///
/// # Errors
/// [`crate::SimError`] for a split that does not fit, an execution that the schedule's symmetry forbids, or a stuck run.
pub fn predict(
    schedule: &Schedule,
    machine: &Machine,
    split: &RoleSplit,
    config: &Config,
) -> Result<Prediction, crate::SimError> {
    crate::Simulation::new(schedule, machine, config)?.predict(split)
}

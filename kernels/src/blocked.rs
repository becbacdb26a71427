//! What a run that got stuck looks like: the same type from the functional executor, the simulator and the watchdog.

use crate::cluster::Rank;
use crate::schedule::RoleKind;
use serde::Serialize;
use std::fmt;

/// A CTA that waits for a flag which nobody will raise.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Blocked {
    /// Rank of the CTA.
    pub rank: Rank,
    /// Launch.
    pub launch: String,
    /// Role whose list the task is on (a recycled CTA's present role).
    pub role: RoleKind,
    /// CTA of the role that the CTA started in.
    pub cta: u32,
    /// Task in the role's list; for an idle `Ready` CTA the first unclaimed one.
    pub task: u32,
    /// Flag family; [`Blocked::ALL_RANKS`] for a collective that not every rank has reached, [`Blocked::RING`] for a put
    /// that the device-to-host ring has no room for.
    pub flag: String,
    /// Slot of the family; 0 where there is none.
    pub slot: u32,
    /// Value of the flag; ranks that have reached the collective; free places of the ring.
    pub have: u32,
    /// Value that the task needs.
    pub need: u32,
}

impl Blocked {
    /// Stands in [`Blocked::flag`] for the rendezvous of a collective.
    pub const ALL_RANKS: &'static str = "(all ranks)";
    /// Stands in [`Blocked::flag`] for a place in the device-to-host ring.
    pub const RING: &'static str = "(ring)";
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, launch, role, cta, task, flag, slot, have, need } = self;
        write!(
            f,
            "rank {rank} {launch}/{role} CTA {cta} task {task}: waits for {flag}[{slot}], has {have}, needs {need}"
        )
    }
}

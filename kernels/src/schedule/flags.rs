//! Flags, and how tasks wait for them and raise them.

use super::At;
use serde::{Deserialize, Serialize};

/// Index of a flag family in [`Schedule::flags`](crate::Schedule::flags).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FamilyId(pub u16);

/// A family of flags: `slots` monotonic u32 counters on every rank, all zero when a run starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlagFamily {
    /// Name, unique in the schedule.
    pub name: String,
    /// Counters per rank and bank.
    pub slots: u32,
}

/// One flag: a slot of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Flag {
    /// Family.
    pub family: FamilyId,
    /// Slot in the family.
    pub slot: u32,
}

/// What a wait holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// The whole task.
    Start,
    /// Step `i` of an op with `K` steps waits for flag `floor(i * count / K)` of the run.
    KStep,
    /// The epilogue's writes only.
    Output,
}

/// A wait on a strided run of the own rank's flags: `count` flags, each at least `at_least`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Wait {
    /// First flag of the run.
    pub flag: Flag,
    /// Flags in the run.
    pub count: u32,
    /// Slots from one flag of the run to the next.
    pub stride: u32,
    /// Value that each flag must have reached.
    pub at_least: u32,
    /// What is held back.
    pub gate: Gate,
}

impl Wait {
    /// A start wait on a single flag.
    pub const fn on(family: FamilyId, slot: u32, at_least: u32) -> Self {
        Self { flag: Flag { family, slot }, count: 1, stride: 1, at_least, gate: Gate::Start }
    }

    /// A wait on `count` flags, `stride` slots apart.
    pub const fn run(family: FamilyId, slot: u32, count: u32, stride: u32, at_least: u32, gate: Gate) -> Self {
        Self { flag: Flag { family, slot }, count, stride, at_least, gate }
    }

    /// The slots of the run.
    pub fn slots(&self) -> impl Iterator<Item = u32> + use<> {
        let (slot, stride) = (self.flag.slot, self.stride);
        (0..self.count).map(move |i| slot + i * stride)
    }
}

/// Adds to a flag of some rank of the own node, after the op's writes to that rank are visible there (after all its
/// writes, where it writes nothing to that rank) and the op's reads are done. On a put it says only that the put was
/// posted: its source is read until `sent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signal {
    /// Whose flag.
    pub to: At,
    /// Which flag.
    pub flag: Flag,
    /// Amount added.
    pub add: u32,
    /// Published kernels only: raised without waiting for the op's writes. The checker reports it.
    pub early: bool,
}

impl Signal {
    /// Adds 1 to a flag at `to`.
    pub const fn one(to: At, family: FamilyId, slot: u32) -> Self {
        Self { to, flag: Flag { family, slot }, add: 1, early: false }
    }
}

//! What tasks of other ranks name, for the one rank of mirror mode that stands for all.

use super::unsupported;
use crate::device::HwError;
use tilewire_kernels::schedule::{At, GatherEntry, Region, Task};
use tilewire_kernels::{Cluster, Offset, Rank};

/// The rank at an offset that is no multicast.
pub(super) fn offset_of(at: At) -> Result<Offset, HwError> {
    match at {
        At::Offset(offset) => Ok(offset),
        At::AllLocal => Err(unsupported("NVLink SHARP places; use nvls = false")),
    }
}

/// Which tasks of other ranks a task of (0, 0) stands for.
pub(super) struct Peers {
    pub cluster: Cluster,
    /// By rank number; only that of (0, 0) outside mirror mode.
    pub lists: Vec<Vec<Task>>,
    /// Gather tables, likewise.
    pub tables: Vec<Vec<Option<GatherEntry>>>,
}

impl Peers {
    /// The region that lies on (0, 0) instead of the `index`-th access of its task `i`, which names `at`.
    pub fn mirrored(&self, i: usize, index: usize, at: At) -> Result<Region, HwError> {
        let back = self.cluster.negate(offset_of(at)?);
        let from = self.cluster.number(self.cluster.at(Rank { node: 0, gpu: 0 }, back));
        let mut found = None;
        let mut seen = 0;
        self.lists[from][i].op.for_each_access(|_, region, _| {
            if seen == index {
                found = Some(*region);
            }
            seen += 1;
        });
        found.ok_or_else(|| unsupported("ranks whose tasks differ"))
    }

    /// The row that lies on (0, 0) instead of entry `index` of its table, which names the GPU `dg` further.
    pub fn mirrored_row(&self, index: usize, dg: u16) -> Result<u32, HwError> {
        let back = self.cluster.negate(Offset::local(dg));
        let from = self.cluster.number(self.cluster.at(Rank { node: 0, gpu: 0 }, back));
        let entry = self.tables[from].get(index).copied().flatten();
        let same = entry.filter(|entry| entry.dg == dg).map(|entry| entry.row);
        same.ok_or_else(|| unsupported("ranks whose gather tables differ"))
    }
}

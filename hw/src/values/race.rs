//! Data races while a schedule runs: accesses that are open at the same time, overlap, and do not commute.
//!
//! An access is open from the moment its task may perform it until it is known to be done. Accesses are kept per rank
//! and buffer as sorted runs of bytes, so the cost grows with rows, not with bytes.

use super::report::{Race, TaskRef};
use std::collections::BTreeMap;
use tilewire_kernels::schedule::Access;

/// Handle of an open access.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle {
    cell: usize,
    id: u64,
}

struct Open {
    id: u64,
    owner: u64,
    access: Access,
    /// Sorted, not touching each other.
    runs: Vec<(u64, u64)>,
}

/// Accesses that are open now, and the races seen.
pub(super) struct Tracker {
    buffers: usize,
    cells: Vec<Vec<Open>>,
    next: u64,
    pub(super) races: BTreeMap<String, Race>,
}

impl Tracker {
    pub(super) fn new(ranks: usize, buffers: usize) -> Self {
        Self { buffers, cells: (0..ranks * buffers).map(|_| Vec::new()).collect(), next: 0, races: BTreeMap::new() }
    }

    /// Opens an access to runs of bytes `(start, end)` of a buffer and notes every race with what is open already.
    pub(super) fn open(
        &mut self,
        (rank, buffer, name): (usize, usize, &str),
        mut runs: Vec<(u64, u64)>,
        access: Access,
        owner: u64,
        name_of: &dyn Fn(u64) -> TaskRef,
    ) -> Handle {
        runs.sort_unstable();
        let cell = rank * self.buffers + buffer;
        for other in &self.cells[cell] {
            let commute = access == other.access && access != Access::Write;
            if commute || other.owner == owner {
                continue;
            }
            if let Some((start, end)) = first_overlap(&runs, &other.runs) {
                let race = Race {
                    buffer: name.to_owned(),
                    rank: rank as u32,
                    bytes: (start, end),
                    first: (name_of(other.owner), other.access),
                    second: (name_of(owner), access),
                    count: 0,
                };
                self.races.entry(race.signature()).or_insert(race).count += 1;
            }
        }
        let id = self.next;
        self.next += 1;
        self.cells[cell].push(Open { id, owner, access, runs });
        Handle { cell, id }
    }

    pub(super) fn close(&mut self, handle: Handle) {
        let cell = &mut self.cells[handle.cell];
        if let Some(at) = cell.iter().position(|open| open.id == handle.id) {
            cell.swap_remove(at);
        }
    }
}

/// The first bytes that two sorted lists of runs share.
fn first_overlap(a: &[(u64, u64)], b: &[(u64, u64)]) -> Option<(u64, u64)> {
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        let (start, end) = (a[i].0.max(b[j].0), a[i].1.min(b[j].1));
        if start < end {
            return Some((start, end));
        }
        if a[i].1 <= b[j].1 {
            i += 1;
        } else {
            j += 1;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::first_overlap;

    #[test]
    fn touching_runs_do_not_overlap() {
        assert_eq!(first_overlap(&[(0, 4), (8, 12)], &[(4, 8), (12, 16)]), None);
        assert_eq!(first_overlap(&[(0, 4), (8, 12)], &[(4, 9)]), Some((8, 9)));
        assert_eq!(first_overlap(&[(0, 100)], &[(200, 300)]), None);
    }
}

//! Opens and closes the accesses of tasks for the race tracker.

use super::super::memory::{for_each_part, ranks_of};
use super::super::ops;
use super::super::race::Handle;
use super::{Engine, Worker, task_name};
use tilewire_kernels::schedule::{Access, At, Op, Region, Task};

impl<'a> Engine<'a> {
    pub(super) fn close(&mut self, handles: impl Iterator<Item = Handle>) {
        if let Some(tracker) = &mut self.tracker {
            handles.for_each(|handle| tracker.close(handle));
        }
    }

    /// Opens an access to a region, or to some pieces of it.
    pub(super) fn open(
        &mut self,
        rank: usize,
        region: &Region,
        pieces: Option<Vec<(u64, u64)>>,
        access: Access,
        role: usize,
        task: usize,
    ) -> Option<Handle> {
        let tracker = self.tracker.as_mut()?;
        let runs = pieces.unwrap_or_else(|| {
            let mut runs = Vec::new();
            region.for_each_run(|start, len| runs.push((start, start + len)));
            runs
        });
        let owner = (role as u64) << 32 | task as u64;
        let (schedule, lists) = (self.schedule, self.lists);
        let name_of = |owner: u64| task_name(schedule, lists, (owner >> 32) as usize, owner as u32 as usize);
        let buffer = usize::from(region.buffer.0);
        Some(tracker.open((rank, buffer, &schedule.buffers[buffer].name), runs, access, owner, &name_of))
    }

    /// Opens those accesses of a task that `which(access, is a main loop panel)` accepts.
    pub(super) fn open_accesses(&mut self, worker: usize, task: &'a Task, which: impl Fn(Access, bool) -> bool) {
        if self.tracker.is_none() {
            return;
        }
        let (at, role, index) = (self.rank_of(worker), self.workers[worker].role, self.live(worker).task);
        let mut wanted = Vec::new();
        let mut nth = 0;
        task.op.for_each_access(|place, region, access| {
            let panel = match task.op {
                Op::GemmTile { .. } => nth < 2,
                Op::AttentionTile { .. } => nth == 1 || nth == 2,
                _ => false,
            };
            nth += 1;
            if which(access, panel) {
                for rank in ranks_of(self.schedule.cluster, at, place) {
                    wanted.push((rank, *region, access));
                }
            }
        });
        if let Op::GatherRows { table, src, dst, .. } = &task.op
            && which(Access::Read, false)
        {
            let entries = &self.lists.tables[self.workers[worker].rank];
            for entry in entries[table.start as usize..(table.start + table.len) as usize].iter().flatten() {
                let from = ranks_of(self.schedule.cluster, at, At::local(entry.dg))[0];
                wanted.push((from, ops::gathered_row(*src, dst, *entry), Access::Read));
            }
        }
        for (rank, region, access) in wanted {
            let Some(handle) = self.open(rank, &region, None, access, role, index) else { continue };
            let live = self.live(worker);
            if access == Access::Read { live.reads.push(handle) } else { live.held.push((rank, handle)) }
        }
    }

    /// Opens the parts of the operand panels that steps `from..to` read.
    pub(super) fn open_panels(&mut self, worker: usize, task: &'a Task, from: u32, to: u32) {
        if self.tracker.is_none() {
            return;
        }
        let Worker { rank, role, .. } = self.workers[worker];
        let index = self.live(worker).task;
        let (from, to) = (u64::from(from), u64::from(to));
        let rows = |region: &Region, row_bytes: u64, block: u64| {
            let mut runs = Vec::new();
            let (first, len) = (from * block * row_bytes, (to - from) * block * row_bytes);
            for_each_part(region, first, len, |start, len| runs.push((start, start + len)));
            (*region, runs)
        };
        let panels = match &task.op {
            Op::GemmTile { a, b, tile, .. } => {
                let [bm, bn, bk] = tile.map(u64::from);
                let pitch = a.bytes() / bm;
                let mut runs = Vec::new();
                for row in 0..bm {
                    let first = row * pitch + from * bk * 2;
                    for_each_part(a, first, (to - from) * bk * 2, |start, len| runs.push((start, start + len)));
                }
                [(*a, runs), rows(b, bn * 2, bk)]
            }
            Op::AttentionTile { k, v, tile, .. } => {
                let (row_bytes, block) = (u64::from(k.row_bytes), u64::from(tile[1]));
                [rows(k, row_bytes, block), rows(v, row_bytes, block)]
            }
            _ => return,
        };
        for (region, runs) in panels {
            if let Some(handle) = self.open(rank, &region, Some(runs), Access::Read, role, index) {
                self.live(worker).reads.push(handle);
            }
        }
    }
}

//! Which tasks touch the memory of a rank, cut into rectangles.
//!
//! A buffer is seen as rows of its most common pitch; a region is then a few rectangles, and the edges of all
//! rectangles cut the buffer into cells. Tasks that touch the same rectangle are one list, so that the work grows with
//! regions, not with bytes.

use super::order::{Mix, MixMap, MixSet, Node, Order, Upto};
use crate::cluster::{Offset, Rank};
use crate::schedule::{Access, At, Gate, GatherEntry, Op, Region, Schedule, Task};
use std::hash::{Hash, Hasher};

/// Where the touches of one signature (buffer and shape) are kept, to find those that are alike.
type Alike = MixMap<(u16, u32, u64), (usize, usize)>;

/// Rows `rows.0..rows.1`, bytes `cols.0..cols.1` of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Rect {
    rows: (u64, u64),
    cols: (u64, u64),
}

impl Rect {
    /// From its first byte to its last, what lies between its rows included.
    const fn span(&self, pitch: u64) -> (u64, u64) {
        (self.rows.0 * pitch + self.cols.0, (self.rows.1 - 1) * pitch + self.cols.1)
    }
}

/// An access to a rectangle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    rect: u32,
    pub(super) node: Node,
    pub(super) access: Access,
    /// The access begins when its task has passed these waits.
    pub(super) opens: Upto,
    /// Index into [`Touches::written`]: ranks that the task writes to.
    pub(super) written: u32,
}

/// Accesses to one buffer of a rank.
#[derive(Default)]
struct Cells {
    pitch: u64,
    rects: Vec<Rect>,
    ids: MixMap<Rect, u32>,
    touches: Vec<Touch>,
}

/// Accesses to the memory of a rank.
pub(super) struct Touches {
    cells: Vec<Cells>,
    /// Sets of ranks that tasks write to.
    pub(super) written: Vec<Vec<u32>>,
    /// Whether all ranks that reach this memory were streamed; else some of them, spread evenly over the cluster. Puts to
    /// others, and reads of what only others write, are left out then.
    pub(super) complete: bool,
}

/// Which accesses of a task are taken.
#[derive(Clone, Copy)]
enum Take<'a> {
    All,
    Writes,
    /// Reads of what may be written, by buffer: sorted runs of bytes that do not touch.
    ReadsOf(&'a [Vec<(u64, u64)>]),
}

impl Take<'_> {
    fn takes(self, buffer: usize, access: Access, span: (u64, u64)) -> bool {
        match self {
            Self::All => true,
            Self::Writes => access != Access::Read,
            Self::ReadsOf(written) => {
                let runs = &written[buffer];
                let at = runs.partition_point(|run| run.1 <= span.0);
                access == Access::Read && runs.get(at).is_some_and(|run| run.0 < span.1)
            }
        }
    }
}

/// Tasks of a role that are streamed, over the ranks from which it reaches a memory, before only some ranks are.
const STREAMED_TASKS: usize = 6_000_000;

/// Ranks that are streamed however long their lists are.
const FEWEST_SOURCES: usize = 8;

impl Touches {
    /// Streams the roles that reach the memory of `rank`, on all ranks from which they do. With `twins`, two of many equal
    /// reads stand for all.
    pub(super) fn new(schedule: &Schedule, order: &Order<'_>, rank: u32, reach: &Reach, twins: bool) -> Self {
        let mut touches = Self {
            cells: reach.pitches.iter().map(|&pitch| Cells { pitch, ..Cells::default() }).collect(),
            written: Vec::new(),
            complete: true,
        };
        let compact = order.compact;
        let roles = compact.roles.len() / compact.classes.len();
        let mut alike: Alike = MixMap::default();
        let mut sources: Vec<(u32, usize)> = Vec::new();
        // Of a role that is streamed from some ranks only: these ranks.
        let mut some: Vec<Option<MixSet<u32>>> = Vec::new();
        for (role, offsets) in reach.offsets.iter().enumerate() {
            let at = sources.len();
            for &(dn, dg) in offsets {
                let source = order.source(rank, Offset { dn, dg });
                let class = compact.class_of[source as usize] as usize;
                if role / roles == class {
                    sources.push((source, role));
                }
            }
            let most = (STREAMED_TASKS / (compact.roles[role].tasks as usize).max(1)).max(FEWEST_SOURCES);
            let found = sources.split_off(at);
            touches.complete &= found.len() <= most;
            // Evenly over the cluster, its first and last rank included.
            let last = found.len().saturating_sub(1);
            let keep = most.min(found.len());
            sources.extend((0..keep).map(|i| found[i * last / keep.saturating_sub(1).max(1)]));
            some.push((keep < found.len()).then(|| sources[at..].iter().map(|&(source, _)| source).collect()));
        }
        sources.sort_unstable();
        sources.dedup();
        let own: Vec<(u32, usize)> = sources.iter().copied().filter(|&(source, _)| source == rank).collect();
        let mut tables: MixMap<u32, Vec<Option<GatherEntry>>> = MixMap::default();
        let mut stream = |touches: &mut Self, (source, role): (u32, usize), take: Take<'_>| {
            let at = compact.roles[role];
            let from = schedule.cluster.rank(source as usize);
            let table = tables.entry(source).or_insert_with(|| schedule.source.table(from));
            let mut task_index = at.first;
            schedule.for_each_task(from, at.launch as usize, at.role as usize, |task| {
                let node = Node { task: task_index, rank: source };
                task_index += 1;
                if let (Some(some), Op::Put { dst, .. }) = (&some[role], &task.op) {
                    let mut goes_elsewhere = true;
                    for_each_rank(schedule, from, dst.at, |to| goes_elsewhere &= to != rank && !some.contains(&to));
                    if goes_elsewhere {
                        return;
                    }
                }
                if node.task < at.first + at.tasks {
                    let alike = twins.then_some(&mut alike);
                    touches.add_task(schedule, reach, (rank, from, table), node, &task, order, alike, take);
                }
            });
        };
        let complete = touches.complete;
        for &from in sources.iter().filter(|&&(source, _)| complete || source != rank) {
            stream(&mut touches, from, Take::All);
        }
        if !complete {
            for &from in &own {
                stream(&mut touches, from, Take::Writes);
            }
            let written = touches.written_bytes();
            for &from in &own {
                stream(&mut touches, from, Take::ReadsOf(&written));
            }
        }
        touches
    }

    /// By buffer: from the first to the last byte of every write, as runs.
    fn written_bytes(&self) -> Vec<Vec<(u64, u64)>> {
        let runs_of = |cells: &Cells| {
            let writes = cells.touches.iter().filter(|touch| touch.access != Access::Read);
            let span = |touch: &Touch| cells.rects[touch.rect as usize].span(cells.pitch);
            let mut runs: Vec<(u64, u64)> = writes.map(span).collect();
            runs.sort_unstable();
            runs.dedup_by(|next, run| {
                let joins = next.0 <= run.1;
                run.1 = if joins { run.1.max(next.1) } else { run.1 };
                joins
            });
            runs
        };
        self.cells.iter().map(runs_of).collect()
    }

    #[allow(clippy::too_many_arguments, reason = "one call")]
    fn add_task(
        &mut self,
        schedule: &Schedule,
        reach: &Reach,
        (rank, from, table): (u32, Rank, &[Option<GatherEntry>]),
        node: Node,
        task: &Task,
        order: &Order<'_>,
        mut alike: Option<&mut Alike>,
        take: Take<'_>,
    ) {
        // Tasks without signals that wait for the same come before nothing but the end of their launch, and after the
        // same: of those, the first and the last stand for all.
        let twin = std::cell::OnceCell::new();
        let twin_of = || {
            *twin.get_or_init(|| {
                (task.signals.is_empty() && !matches!(task.op, Op::Put { .. })).then(|| {
                    let mut key = Mix::default();
                    task.waits.hash(&mut key);
                    (order.launch_of(node.task), node.rank, task.op.name()).hash(&mut key);
                    key.finish()
                })
            })
        };
        let written = std::cell::OnceCell::new();
        for_each_touch(task, table, &mut |at: At, region: &Region, access, opens| {
            let buffer = usize::from(region.buffer.0);
            if !reach.written[buffer] || !reaches(schedule, from, at, rank) {
                return;
            }
            let set = *written.get_or_init(|| self.written.len() as u32);
            let cells = &mut self.cells[buffer];
            for rect in rects(region, cells.pitch) {
                if !take.takes(buffer, access, rect.span(cells.pitch)) {
                    continue;
                }
                let next = cells.rects.len() as u32;
                let id = *cells.ids.entry(rect).or_insert(next);
                if id == next {
                    cells.rects.push(rect);
                }
                let touch = Touch { rect: id, node, access, opens, written: set };
                let twin = if access == Access::Read { twin_of() } else { None };
                let (Some(twin), Some(alike)) = (twin, alike.as_deref_mut()) else {
                    cells.touches.push(touch);
                    continue;
                };
                let mut key = Mix::default();
                (twin, access as u8, opens).hash(&mut key);
                let at = cells.touches.len();
                match alike.get_mut(&(region.buffer.0, id, key.finish())) {
                    None => {
                        alike.insert((region.buffer.0, id, key.finish()), (at, at));
                        cells.touches.push(touch);
                    }
                    Some((first, last)) => {
                        let place = |touch: &Touch| order.position[touch.node.task as usize];
                        let (low, high) = (place(&cells.touches[*first]), place(&cells.touches[*last]));
                        if first == last {
                            *last = at;
                            cells.touches.push(touch);
                            if place(&touch) < low {
                                std::mem::swap(first, last);
                            }
                        } else if place(&touch) < low {
                            cells.touches[*first] = touch;
                        } else if place(&touch) > high {
                            cells.touches[*last] = touch;
                        }
                    }
                }
            }
        });
        if written.get().is_some() {
            let mut ranks = Vec::new();
            task.op.for_each_access(|at, _, access| {
                if access != Access::Read {
                    for_each_rank(schedule, from, at, |rank| ranks.push(rank));
                }
            });
            self.written.push(ranks);
        }
    }

    /// Calls `f(buffer, first byte, bytes, touches)` for the cells of the buffers; the touches of a cell are all accesses
    /// to it. Cells that the same rectangles cover are one.
    pub(super) fn for_each_cell(&self, mut f: impl FnMut(usize, (u64, u64), &mut Vec<Touch>)) {
        for (buffer, cells) in self.cells.iter().enumerate() {
            if cells.touches.is_empty() {
                continue;
            }
            let edges = |of: &dyn Fn(&Rect) -> (u64, u64)| {
                let mut edges: Vec<u64> = cells.rects.iter().map(of).flat_map(|(from, to)| [from, to]).collect();
                edges.sort_unstable();
                edges.dedup();
                edges
            };
            let (rows, cols) = (edges(&|rect| rect.rows), edges(&|rect| rect.cols));
            let find = |edges: &[u64], (from, to): (u64, u64)| {
                edges.partition_point(|&edge| edge < from)..edges.partition_point(|&edge| edge < to)
            };
            let mut covers: Vec<(u64, u32)> = Vec::new();
            for (id, rect) in cells.rects.iter().enumerate() {
                for row in find(&rows, rect.rows) {
                    for col in find(&cols, rect.cols) {
                        covers.push(((row * cols.len() + col) as u64, id as u32));
                    }
                }
            }
            covers.sort_unstable();
            let mut by_rect: Vec<u32> = (0..cells.touches.len() as u32).collect();
            by_rect.sort_by_key(|&touch| cells.touches[touch as usize].rect);
            let mut first = vec![0usize; cells.rects.len() + 1];
            for touch in &cells.touches {
                first[touch.rect as usize + 1] += 1;
            }
            for i in 1..first.len() {
                first[i] += first[i - 1];
            }
            let mut seen: MixSet<Vec<u32>> = MixSet::default();
            let mut list = Vec::new();
            for cell in covers.chunk_by(|a, b| a.0 == b.0) {
                let ids: Vec<u32> = cell.iter().map(|&(_, id)| id).collect();
                if ids.len() > 1 && !seen.insert(ids.clone()) {
                    continue;
                }
                list.clear();
                for id in ids {
                    let range = first[id as usize]..first[id as usize + 1];
                    list.extend(by_rect[range].iter().map(|&touch| cells.touches[touch as usize]));
                }
                let (row, col) = (cell[0].0 as usize / cols.len(), cell[0].0 as usize % cols.len());
                let start = rows[row] * cells.pitch + cols[col];
                f(buffer, (start, cols[col + 1] - cols[col]), &mut list);
            }
        }
    }
}

/// From where the roles of each class reach, and how buffers are cut.
pub(super) struct Reach {
    /// By role of [`super::compact::Compact::roles`]: offsets of the ranks that it touches.
    offsets: Vec<Vec<(u16, u16)>>,
    /// Whether a task writes to the buffer; what is only read cannot race.
    written: Vec<bool>,
    /// Row pitch that a buffer is cut by.
    pitches: Vec<u64>,
}

impl Reach {
    /// Streams one rank of each class.
    pub(super) fn new(schedule: &Schedule, order: &Order<'_>) -> Self {
        let buffers = schedule.buffers.len();
        let mut reach = Self { offsets: Vec::new(), written: vec![false; buffers], pitches: Vec::new() };
        let mut pitches: Vec<MixMap<u64, u64>> = (0..buffers).map(|_| MixMap::default()).collect();
        for role in &order.compact.roles {
            let rank = order.compact.classes[role.class as usize];
            let table = schedule.source.table(rank);
            let mut offsets: MixSet<(u16, u16)> = MixSet::default();
            let mut last = None;
            schedule.for_each_task(rank, role.launch as usize, role.role as usize, |task| {
                let mut see = |at: At, region: &Region, access: Access| {
                    let buffer = usize::from(region.buffer.0);
                    reach.written[buffer] |= access != Access::Read;
                    if last != Some(at) {
                        last = Some(at);
                        for_each_rank(schedule, rank, at, |to| {
                            let offset = schedule.cluster.offset(rank, schedule.cluster.rank(to as usize));
                            offsets.insert((offset.dn, offset.dg));
                        });
                    }
                    if region.rows > 1 && region.row_pitch > u64::from(region.row_bytes) {
                        *pitches[buffer].entry(region.row_pitch).or_default() += 1;
                    }
                };
                task.op.for_each_access(&mut see);
                if let Op::GatherRows { table: slice, src, dst, .. } = &task.op {
                    for entry in gathered(&table, slice.start, slice.len) {
                        see(At::local(entry.dg), &gathered_row(*src, dst, entry), Access::Read);
                    }
                }
            });
            let mut offsets: Vec<(u16, u16)> = offsets.into_iter().collect();
            offsets.sort_unstable();
            reach.offsets.push(offsets);
        }
        reach.pitches = pitches
            .iter()
            .zip(&schedule.buffers)
            .map(|(pitches, buffer)| {
                let common = pitches.iter().max_by_key(|&(&pitch, &count)| (count, pitch));
                common.map_or(buffer.bytes.max(1), |(&pitch, _)| pitch)
            })
            .collect();
        reach
    }
}

fn gathered(table: &[Option<GatherEntry>], start: u32, len: u32) -> impl Iterator<Item = GatherEntry> + '_ {
    table.iter().skip(start as usize).take(len as usize).flatten().copied()
}

/// The row that an entry names, of rows as long as those of `dst`.
fn gathered_row(src: crate::schedule::BufferId, dst: &Region, entry: GatherEntry) -> Region {
    Region::contiguous(src, u64::from(entry.row) * u64::from(dst.row_bytes), 1, dst.row_bytes)
}

fn for_each_rank(schedule: &Schedule, from: Rank, at: At, mut f: impl FnMut(u32)) {
    let cluster = schedule.cluster;
    match at {
        At::Offset(offset) => f(cluster.number(cluster.at(from, offset)) as u32),
        At::AllLocal => {
            (0..cluster.gpus_per_node).for_each(|gpu| f(cluster.number(Rank { node: from.node, gpu }) as u32));
        }
    }
}

fn reaches(schedule: &Schedule, from: Rank, at: At, rank: u32) -> bool {
    let cluster = schedule.cluster;
    match at {
        At::Offset(offset) => cluster.number(cluster.at(from, offset)) as u32 == rank,
        At::AllLocal => rank / u32::from(cluster.gpus_per_node) == u32::from(from.node),
    }
}

/// Calls `f` for each piece that a task touches, with the waits that it begins after.
fn for_each_touch(task: &Task, table: &[Option<GatherEntry>], f: &mut impl FnMut(At, &Region, Access, Upto)) {
    if matches!(&task.op, Op::Put { dst, .. } if dst.region.bytes() == 0) {
        // A flag only.
        return;
    }
    let gated = task.waits.iter().any(|wait| wait.gate == Gate::Output);
    let stepped = task.waits.iter().any(|wait| wait.gate == Gate::KStep);
    let mut nth = 0;
    task.op.for_each_access(|at, region, access| {
        let panel = match task.op {
            Op::GemmTile { .. } => nth < 2,
            Op::AttentionTile { .. } => nth == 1 || nth == 2,
            _ => false,
        };
        nth += 1;
        match access {
            Access::Read if panel && stepped => {
                for (from, to) in pieces(task) {
                    f(at, &panel_piece(task, region, nth == 1, (from, to)), access, Upto::Step(from));
                }
            }
            Access::Read => f(at, region, access, Upto::Start),
            _ => f(at, region, access, if gated { Upto::All } else { Upto::Start }),
        }
    });
    if let Op::GatherRows { table: slice, src, dst, .. } = &task.op {
        for entry in gathered(table, slice.start, slice.len) {
            f(At::local(entry.dg), &gathered_row(*src, dst, entry), Access::Read, Upto::Start);
        }
    }
}

/// Runs of steps that no further flag gates.
fn pieces(task: &Task) -> Vec<(u32, u32)> {
    let steps = task.op.steps();
    let mut cuts = vec![0, steps];
    for wait in task.waits.iter().filter(|wait| wait.gate == Gate::KStep) {
        // Step i is gated by flag floor(i * count / steps); count divides steps.
        let width = (steps / wait.count.max(1)).max(1);
        cuts.extend((1..wait.count).map(|i| i * width).filter(|&cut| cut < steps));
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|cut| (cut[0], cut[1])).collect()
}

/// The part of an operand panel that steps `from..to` read; all of it where it is not laid out by steps.
fn panel_piece(task: &Task, panel: &Region, left: bool, (from, to): (u32, u32)) -> Region {
    let (from, to) = (u64::from(from), u64::from(to));
    match &task.op {
        Op::GemmTile { tile: [bm, _, bk], .. } if left && panel.blocks == 1 && panel.rows == u32::from(*bm) => {
            let step = u64::from(*bk) * 2;
            Region { offset: panel.offset + from * step, row_bytes: ((to - from) * step) as u32, ..*panel }
        }
        Op::GemmTile { tile: [_, _, block], .. } | Op::AttentionTile { tile: [_, block], .. }
            if !left
                && panel.blocks == 1
                && u64::from(panel.rows) == u64::from(task.op.steps()) * u64::from(*block) =>
        {
            let rows = u64::from(*block);
            Region { offset: panel.offset + from * rows * panel.row_pitch, rows: ((to - from) * rows) as u32, ..*panel }
        }
        _ => *panel,
    }
}

/// A region as rectangles of rows of `pitch` bytes.
fn rects(region: &Region, pitch: u64) -> Vec<Rect> {
    let mut rects = Vec::new();
    let bytes = u64::from(region.row_bytes);
    let dense = region.row_pitch == bytes || region.rows == 1;
    if !dense && region.row_pitch == pitch && region.bytes() > 0 {
        for block in 0..u64::from(region.blocks) {
            let start = region.offset + block * region.block_pitch;
            let (row, col) = (start / pitch, start % pitch);
            if col + bytes <= pitch {
                rects.push(Rect { rows: (row, row + u64::from(region.rows)), cols: (col, col + bytes) });
            } else {
                (0..u64::from(region.rows)).for_each(|i| run(start + i * pitch, bytes, pitch, &mut rects));
            }
        }
        return rects;
    }
    region.for_each_run(|start, bytes| run(start, bytes, pitch, &mut rects));
    rects
}

/// A run of bytes as at most three rectangles.
fn run(start: u64, bytes: u64, pitch: u64, rects: &mut Vec<Rect>) {
    let end = start + bytes;
    let mut push = |from: u64, to: u64, cols: (u64, u64)| {
        if from < to {
            rects.push(Rect { rows: (from, to), cols });
        }
    };
    let (first, last) = (start / pitch, end / pitch);
    if first == last {
        return push(first, first + 1, (start % pitch, end % pitch));
    }
    let whole = if start.is_multiple_of(pitch) {
        first
    } else {
        push(first, first + 1, (start % pitch, pitch));
        first + 1
    };
    push(whole, last, (0, pitch));
    if !end.is_multiple_of(pitch) {
        push(last, last + 1, (0, end % pitch));
    }
}

//! From a Schedule to the structs that the device interpreter reads (`kernels/cuda/program.cuh`).
//!
//! ```text
//! Schedule, mode, split ──▶ Program: launches of CTAs, roles, tasks, waits, signals, regions, tensor maps, puts
//! ```
//!
//! Pure: it allocates nothing on a device. A place is an *arena* (a buffer of an instance) and an offset in it. An
//! instance is a rank in virtual and cluster mode; mirror mode has one, which stands for all.
//!
//! **Cluster.** One program per GPU: the tasks of its own rank. It names the arenas of all ranks and raises flags of any
//! GPU; flags that it waits for, cursors and claims are its own.
//!
//! **Mirror.** For a region that task i of rank (0, 0) names at offset d stands the region that task i of rank -d
//! names, which lies on (0, 0). Flags are part of the skeleton and are the same either way.

use crate::device::HwError;
use tilewire_kernels::schedule::{
    At, BufferId, Claim, CtaCount, Drain, Engine, Gate, GatherEntry, MainLoop, Op, Place, Region, Role, Task,
    WriteMode, side_by_side,
};
use tilewire_kernels::{Cluster, Offset, Rank, RoleSplit, Schedule};

pub use crate::program::{
    DeviceLaunch, DeviceRegion, DeviceRole, DeviceSignal, DeviceStart, DeviceTask, DeviceWait, MAX_MAPS, MapKind,
    MapSpec, NONE, Program, PutCopy, RoleName, code, flag,
};

/// Slots of shared memory for copies when outputs lie over the operand stages, in boxes.
const COPY_SLOTS: u32 = 8;
/// Warps that move data, in the smallest block.
const MOVER_WARPS: u32 = 8;
/// Rows and bytes across of a copy box.
const BOX: (u32, u32) = (128, 128);

/// How ranks share GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One rank on the whole GPU stands for all.
    Mirror,
    /// All ranks on one GPU.
    Virtual,
    /// One rank per GPU.
    Cluster,
}

/// Lowers a schedule for one GPU with `sms` SMs.
///
/// # Errors
/// [`HwError::Unsupported`] for what the interpreter does not do, [`HwError::TooManyCtas`].
pub fn lower(schedule: &Schedule, mode: Mode, split: &RoleSplit, sms: u32) -> Result<Program, HwError> {
    let ranks: Vec<Rank> = match mode {
        Mode::Mirror if !schedule.symmetry.is_full() => {
            return Err(unsupported("mirror mode needs a schedule with one skeleton for all ranks"));
        }
        Mode::Mirror => vec![Rank { node: 0, gpu: 0 }],
        Mode::Virtual => schedule.cluster.iter().collect(),
        Mode::Cluster => return Err(unsupported("a cluster by one program; lower it rank by rank")),
    };
    lower_ranks(schedule, mode, split, sms, &ranks)
}

/// Lowers a schedule for a GPU per rank, each with `sms` SMs; programs by rank number.
///
/// # Errors
/// As [`lower`].
pub fn lower_cluster(schedule: &Schedule, split: &RoleSplit, sms: u32) -> Result<Vec<Program>, HwError> {
    schedule.cluster.iter().map(|rank| lower_ranks(schedule, Mode::Cluster, split, sms, &[rank])).collect()
}

/// The program of the GPU that runs `ranks`.
fn lower_ranks(
    schedule: &Schedule,
    mode: Mode,
    split: &RoleSplit,
    sms: u32,
    ranks: &[Rank],
) -> Result<Program, HwError> {
    let mut families = Vec::new();
    let mut words = 0;
    for family in &schedule.flags {
        families.push(words);
        words += family.slots;
    }
    let instances = ranks.len() as u32;
    let (gpus, gpu, holders) = match mode {
        Mode::Cluster => {
            let all = schedule.cluster.ranks() as u32;
            (all, schedule.cluster.number(ranks[0]) as u32, all)
        }
        Mode::Mirror | Mode::Virtual => (1, 0, instances),
    };
    let mut program = Program {
        instances,
        gpus,
        gpu,
        arenas: (0..holders).flat_map(|_| schedule.buffers.iter().map(|b| b.bytes)).collect(),
        words: words * instances,
        families,
        words_per_instance: words,
        ..Program::default()
    };
    if !side_by_side(schedule.launches.iter().map(|launch| &launch.after[..])).is_empty() {
        return Err(unsupported("launches that may run side by side"));
    }
    for (l, launch) in schedule.launches.iter().enumerate() {
        let (first_role, roles) = (program.roles.len() as u32, launch.roles.len() as u32);
        for (instance, &rank) in ranks.iter().enumerate() {
            let first_role = program.roles.len() as u32;
            for r in 0..launch.roles.len() {
                let instance = gpu + instance as u32;
                program.lower_role(schedule, mode, rank, instance, (l, r), first_role)?;
            }
        }
        program.launches.push(DeviceLaunch { name: launch.name.clone(), starts: Vec::new(), first_role, roles });
    }
    program.apply_split(schedule, split, sms)?;
    if program.entry.is_empty() {
        program.entry = entry(MainLoop::WaitEachStep, Drain::Overlap)?;
    }
    program.threads = if program.entry == "attend_192" { 512 } else { 384 };
    if program.maps.len() > MAX_MAPS {
        return Err(unsupported(format!("{} tensor maps, at most {MAX_MAPS}", program.maps.len())));
    }
    Ok(program)
}

fn unsupported(what: impl Into<String>) -> HwError {
    HwError::Unsupported { what: what.into() }
}

fn entry(main_loop: MainLoop, drain: Drain) -> Result<String, HwError> {
    let main_loop = match main_loop {
        MainLoop::WaitEachStep => "wait",
        MainLoop::Pipelined => "pipelined",
        MainLoop::Library => return Err(unsupported("a library's main loop")),
    };
    let drain = match drain {
        Drain::Overlap => "overlap",
        Drain::SmemRead => "smem_read",
        Drain::Visible => "visible",
    };
    Ok(format!("interpret_{main_loop}_{drain}"))
}

fn cta_count(roles: &[Role], r: usize, split: &RoleSplit, sms: u32) -> u32 {
    let plain = |role: &Role| match role.ctas {
        CtaCount::FromSplit => split.get(role.kind),
        CtaCount::Fixed(n) => n,
        CtaCount::AllBut(_) => 0,
    };
    if let Some(spared) = roles[r].ctas.spared() {
        let others: u32 = roles.iter().map(plain).sum();
        return sms.saturating_sub(others + spared).max(1);
    }
    plain(&roles[r])
}

const fn is_tile(op: &Op) -> bool {
    matches!(op, Op::GemmTile { .. } | Op::AttentionTile { .. })
}

/// The rank at an offset that is no multicast.
fn offset_of(at: At) -> Result<Offset, HwError> {
    match at {
        At::Offset(offset) => Ok(offset),
        At::AllLocal => Err(unsupported("NVLink SHARP places; use nvls = false")),
    }
}

/// Which tasks of other ranks a task of (0, 0) stands for.
struct Peers {
    cluster: Cluster,
    /// By rank number; only that of (0, 0) outside mirror mode.
    lists: Vec<Vec<Task>>,
    /// Gather tables, likewise.
    tables: Vec<Vec<Option<GatherEntry>>>,
}

impl Peers {
    /// The region that lies on (0, 0) instead of the `index`-th access of its task `i`, which names `at`.
    fn mirrored(&self, i: usize, index: usize, at: At) -> Result<Region, HwError> {
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
    fn mirrored_row(&self, index: usize, dg: u16) -> Result<u32, HwError> {
        let back = self.cluster.negate(Offset::local(dg));
        let from = self.cluster.number(self.cluster.at(Rank { node: 0, gpu: 0 }, back));
        let entry = self.tables[from].get(index).copied().flatten();
        let same = entry.filter(|entry| entry.dg == dg).map(|entry| entry.row);
        same.ok_or_else(|| unsupported("ranks whose gather tables differ"))
    }
}

impl Program {
    /// Gives every role its CTAs; nothing else of a program depends on the split.
    ///
    /// # Errors
    /// [`HwError::TooManyCtas`].
    pub fn apply_split(&mut self, schedule: &Schedule, split: &RoleSplit, sms: u32) -> Result<(), HwError> {
        let mut next = 0;
        for (launch, spec) in self.launches.iter_mut().zip(&schedule.launches) {
            launch.starts.clear();
            for _ in 0..self.instances {
                for r in 0..spec.roles.len() {
                    // Instances share the SMs: a role that wants all of them gets its part.
                    let ctas = cta_count(&spec.roles, r, split, sms / self.instances);
                    self.roles[next].ctas = ctas;
                    launch.starts.extend((0..ctas).map(|cta| DeviceStart { role: next as u32, cta }));
                    next += 1;
                }
            }
            let ctas = launch.starts.len() as u32;
            if ctas > sms {
                return Err(HwError::TooManyCtas { launch: launch.name.clone(), ctas, sms });
            }
        }
        Ok(())
    }

    fn lower_role(
        &mut self,
        schedule: &Schedule,
        mode: Mode,
        rank: Rank,
        instance: u32,
        (l, r): (usize, usize),
        first_role: u32,
    ) -> Result<(), HwError> {
        let spec = &schedule.launches[l].roles[r];
        let cluster = schedule.cluster;
        let lists: Vec<Vec<Task>> = match mode {
            Mode::Mirror => cluster.iter().map(|rank| schedule.tasks(rank, l, r)).collect(),
            Mode::Virtual | Mode::Cluster => vec![schedule.tasks(rank, l, r)],
        };
        if lists.iter().any(|list| list.len() != lists[0].len()) {
            return Err(unsupported("ranks whose tasks differ"));
        }
        let tables = match mode {
            Mode::Mirror => cluster.iter().map(|rank| schedule.source.table(rank)).collect(),
            Mode::Virtual | Mode::Cluster => vec![schedule.source.table(rank)],
        };
        let peers = Peers { cluster, lists, tables };
        let count = peers.lists[0].len() as u32;
        let tiles = count > 0 && is_tile(&peers.lists[0][0].op);
        let mut role = DeviceRole {
            first_task: self.tasks.len() as u32,
            tasks: count,
            claim: 0,
            window: 0,
            lanes: spec.lanes.max(1),
            recycle: spec.recycle.map_or(NONE, |other| first_role + other as u32),
            tiles: u32::from(tiles),
            ctas: 0,
            cursor: self.words,
            claimed: self.words + 1,
            ..DeviceRole::default()
        };
        match spec.claim {
            Claim::Strided => {}
            Claim::Ticket => (role.claim, self.words) = (1, self.words + 1),
            Claim::Ready { window } => {
                (role.claim, role.window, self.words) = (2, window, self.words + 1 + count);
            }
        }
        if tiles && role.claim == 2 {
            return Err(unsupported("ready claims of tiles"));
        }
        if role.lanes > MOVER_WARPS {
            return Err(unsupported(format!("{} lanes of a CTA, at most {MOVER_WARPS}", role.lanes)));
        }
        for i in 0..peers.lists[0].len() {
            let task = &peers.lists[0][i];
            if is_tile(&task.op) != tiles {
                return Err(unsupported("a role of tiles and other work"));
            }
            let lanes = match task.op {
                Op::Put { .. } | Op::Sync => MOVER_WARPS,
                Op::Copy { engine: Engine::Bulk, .. } => COPY_SLOTS / 4 + 1,
                _ => 1,
            };
            if role.lanes > lanes {
                return Err(unsupported(format!("{} by one of {} lanes", task.op.name(), role.lanes)));
            }
            let lowered = self.lower_task(schedule, mode, rank, instance, &peers, i)?;
            self.tasks.push(lowered);
        }
        Self::check_recycling(schedule, rank, l, r)?;
        self.roles.push(role);
        self.role_names.push(Some(RoleName { rank, launch: l, kind: spec.kind }));
        Ok(())
    }

    /// A CTA comes to one role with tiles at most; one that began with other work ends with it.
    fn check_recycling(schedule: &Schedule, rank: Rank, l: usize, r: usize) -> Result<(), HwError> {
        let roles = &schedule.launches[l].roles;
        let of_tiles = |role: usize| {
            let mut is = false;
            schedule.for_each_task(rank, l, role, |task| is |= is_tile(&task.op));
            is
        };
        let mut chain = vec![of_tiles(r)];
        let mut at = r;
        while let Some(next) = roles[at].recycle {
            if roles[next].claim == Claim::Strided {
                return Err(unsupported("CTAs that join a role of strided claims"));
            }
            chain.push(of_tiles(next));
            at = next;
        }
        let tiles = chain.iter().filter(|tiles| **tiles).count();
        if tiles > 1 || (tiles == 1 && !chain[0] && chain.last() != Some(&true)) {
            return Err(unsupported("CTAs that go on from tiles to which they came from other work"));
        }
        Ok(())
    }

    fn lower_task(
        &mut self,
        schedule: &Schedule,
        mode: Mode,
        rank: Rank,
        instance: u32,
        peers: &Peers,
        i: usize,
    ) -> Result<DeviceTask, HwError> {
        let task = &peers.lists[0][i];
        let mut lowered = DeviceTask {
            number: i as u32,
            first_wait: self.waits.len() as u32,
            first_signal: self.signals.len() as u32,
            first_region: self.regions.len() as u32,
            ..DeviceTask::default()
        };
        for gate in [Gate::Start, Gate::KStep, Gate::Output] {
            for wait in task.waits.iter().filter(|wait| wait.gate == gate) {
                self.waits.push(DeviceWait {
                    word: self.word(instance, wait.flag).1,
                    count: wait.count,
                    stride: wait.stride,
                    at_least: wait.at_least,
                });
                match gate {
                    Gate::Start => lowered.start_waits += 1,
                    Gate::KStep => lowered.step_waits += 1,
                    Gate::Output => lowered.output_waits += 1,
                }
            }
        }
        let cluster = schedule.cluster;
        let target = |at: At| -> Result<u32, HwError> {
            let offset = offset_of(at)?;
            Ok(if mode == Mode::Mirror { 0 } else { cluster.number(cluster.at(rank, offset)) as u32 })
        };
        for signal in &task.signals {
            if signal.early {
                return Err(unsupported("signals before the write is visible"));
            }
            let (gpu, word) = self.word(target(signal.to)?, signal.flag);
            self.signals.push(DeviceSignal { address: u64::from(word), add: signal.add, gpu });
        }
        lowered.signals = task.signals.len() as u32;

        // Regions where they lie, in the order of `for_each_access`.
        let mut places = Vec::new();
        task.op.for_each_access(|at, region, _| places.push((at, *region)));
        let mut regions = Vec::new();
        for (index, &(at, region)) in places.iter().enumerate() {
            let region = if mode == Mode::Mirror && at != At::ME { peers.mirrored(i, index, at)? } else { region };
            regions.push((target(at)?, region));
        }
        let buffers = schedule.buffers.len() as u32;
        let arena = |instance: u32, buffer: BufferId| instance * buffers + u32::from(buffer.0);
        self.puts.push(None);
        let shape = |first: &Region| (first.blocks, first.rows, first.row_bytes);
        match &task.op {
            Op::GemmTile { outs, tile, drain, main_loop, .. } => {
                let name = entry(*main_loop, *drain)?;
                if *tile != [128, 256, 64] || (!self.entry.is_empty() && self.entry != name) {
                    return Err(unsupported("tiles other than 128 x 256 x 64, or of several kinds in one schedule"));
                }
                self.entry = name;
                lowered.op = code::GEMM;
                lowered.steps = task.op.steps();
                (lowered.inputs, lowered.outputs) = (2, outs.len() as u32);
                for (index, (on, region)) in regions.iter().enumerate() {
                    let kind = [MapKind::Rows, MapKind::Panel].get(index).copied().unwrap_or(MapKind::Output);
                    let mut device = self.region(arena(*on, region.buffer), region, Some(kind))?;
                    device.add = u32::from(index >= 2 && outs[index - 2].mode == WriteMode::Add);
                    self.regions.push(device);
                }
                let uneven = self.waits[(lowered.first_wait + lowered.start_waits) as usize..]
                    .iter()
                    .take(lowered.step_waits as usize)
                    .any(|wait| !lowered.steps.is_multiple_of(wait.count));
                if uneven {
                    return Err(unsupported("k step flags that do not divide the steps"));
                }
            }
            Op::AttentionTile { .. } => {
                self.lower_attention(&task.op, &mut lowered, &|region| arena(instance, region.buffer))?;
            }
            Op::AttentionMerge { parts, out } => {
                lowered.op = code::MERGE;
                (lowered.inputs, lowered.outputs) = (2 * parts.len() as u32, 2);
                (lowered.rows, lowered.row_bytes) = (out.o.rows, out.o.row_bytes);
                let shapes = regions.iter().enumerate().all(|(i, (_, region))| {
                    region.blocks == 1 && region.rows == out.o.rows && region.row_bytes == [256, 4][i % 2]
                });
                if parts.len() > 4 || !out.o.rows.is_multiple_of(2) || !shapes {
                    return Err(unsupported("merges of more than four parts, or of rows of other than 128 elements"));
                }
                for (on, region) in &regions {
                    let device = self.region(arena(*on, region.buffer), region, None)?;
                    self.regions.push(device);
                }
            }
            Op::GatherRows { table, src, dst, in_flight_rows, load_store_overlap } => {
                lowered.op = code::GATHER;
                lowered.outputs = 1;
                (lowered.blocks, lowered.rows, lowered.row_bytes) =
                    (u32::from(*in_flight_rows).max(1), dst.rows, dst.row_bytes);
                lowered.steps = self.sources.len() as u32;
                lowered.flags = if *load_store_overlap { flag::OVERLAP } else { 0 };
                if dst.blocks != 1 || dst.rows != table.len || !dst.row_bytes.is_multiple_of(16) {
                    return Err(unsupported("gathers into other than one block of rows of whole 16 bytes"));
                }
                for index in table.start as usize..(table.start + table.len) as usize {
                    let Some(entry) = peers.tables[0].get(index).copied().flatten() else {
                        self.sources.push(None);
                        continue;
                    };
                    let mirrored = mode == Mode::Mirror;
                    let row = if mirrored { peers.mirrored_row(index, entry.dg)? } else { entry.row };
                    let from = arena(target(At::local(entry.dg))?, *src);
                    self.sources.push(Some((from, u64::from(row) * u64::from(dst.row_bytes))));
                }
                let device = self.region(arena(regions[0].0, dst.buffer), dst, None)?;
                self.regions.push(device);
            }
            Op::Copy { engine: Engine::LdSt, .. } => {
                // A sum of one input.
                lowered.op = code::REDUCE;
                (lowered.inputs, lowered.outputs) = (1, regions.len() as u32 - 1);
                (lowered.blocks, lowered.rows, lowered.row_bytes) = shape(&regions[0].1);
                for (on, region) in &regions {
                    let device = self.region(arena(*on, region.buffer), region, None)?;
                    self.regions.push(device);
                }
            }
            Op::Copy { .. } => {
                lowered.op = code::COPY;
                (lowered.inputs, lowered.outputs) = (1, regions.len() as u32 - 1);
                (lowered.blocks, lowered.rows, lowered.row_bytes) = shape(&regions[0].1);
                if !lowered.rows.is_multiple_of(BOX.0) || !lowered.row_bytes.is_multiple_of(BOX.1) {
                    return Err(unsupported("copies that are no whole boxes of 128 rows and 128 bytes"));
                }
                for (on, region) in &regions {
                    let device = self.region(arena(*on, region.buffer), region, Some(MapKind::Rows))?;
                    self.regions.push(device);
                }
            }
            Op::Reduce { inputs, outputs, .. } => {
                lowered.op = code::REDUCE;
                (lowered.inputs, lowered.outputs) = (inputs.len() as u32, outputs.len() as u32);
                (lowered.blocks, lowered.rows, lowered.row_bytes) = shape(&regions[0].1);
                for (on, region) in &regions {
                    let device = self.region(arena(*on, region.buffer), region, None)?;
                    self.regions.push(device);
                }
            }
            Op::Fill { .. } => {
                lowered.op = code::FILL;
                lowered.outputs = 1;
                (lowered.blocks, lowered.rows, lowered.row_bytes) = shape(&regions[0].1);
                let device = self.region(arena(regions[0].0, regions[0].1.buffer), &regions[0].1, None)?;
                self.regions.push(device);
            }
            Op::Put { dst: Place { at, .. }, queue, arrived, sent, .. } => {
                lowered.op = code::PUT;
                let (src, dst) = (&regions[0], &regions[1]);
                let mut runs = Vec::new();
                for (_, region) in [src, dst] {
                    let mut end = region.offset;
                    let mut dense = true;
                    region.for_each_run(|start, bytes| {
                        dense &= start == end;
                        end = start + bytes;
                    });
                    runs.push(dense);
                }
                if runs.contains(&false) {
                    return Err(unsupported("puts of scattered bytes"));
                }
                let arrived = self.word(target(*at)?, *arrived);
                let sent = sent.map(|flag| self.word(instance, flag).1);
                let last = self.puts.len() - 1;
                self.puts[last] = Some(PutCopy {
                    src: (arena(src.0, src.1.buffer), src.1.offset),
                    dst: (arena(dst.0, dst.1.buffer), dst.1.offset),
                    bytes: src.1.bytes(),
                    queue: *queue,
                    arrived,
                    sent,
                });
            }
            Op::Sync => lowered.op = code::SYNC,
            Op::Collective { .. } => return Err(unsupported(task.op.name())),
        }
        let same = |d: &(u32, Region)| shape(&d.1) == shape(&regions[0].1);
        let alike = !matches!(lowered.op, code::GEMM | code::ATTENTION | code::MERGE);
        if alike && !regions.iter().all(same) {
            return Err(unsupported("moves between regions of different shapes"));
        }
        if matches!(lowered.op, code::REDUCE | code::FILL) && !lowered.row_bytes.is_multiple_of(16) {
            return Err(unsupported("rows that are no whole vectors of 16 bytes"));
        }
        Ok(lowered)
    }

    fn lower_attention(
        &mut self,
        op: &Op,
        lowered: &mut DeviceTask,
        arena: &dyn Fn(&Region) -> u32,
    ) -> Result<(), HwError> {
        let Op::AttentionTile { q, k, v, state, out, first, last, tile, stages, .. } = op else { return Ok(()) };
        let name = format!("attend_{}", tile[0]);
        if !matches!(tile, [128 | 192, 128]) || *stages != 2 || (!self.entry.is_empty() && self.entry != name) {
            return Err(unsupported("attention tiles other than 192 or 128 x 128 with 2 stages, or of several kinds"));
        }
        let heads = |region: &Region, rows: u32| {
            region.blocks == 1 && region.row_bytes == 256 && region.row_pitch == 256 && region.rows.is_multiple_of(rows)
        };
        if !heads(q, tile[0].into()) || !heads(k, 128) || !heads(v, 128) {
            return Err(unsupported("heads of other than 128 elements, or rows of Q, K or V that do not touch"));
        }
        self.entry = name;
        lowered.op = code::ATTENTION;
        lowered.steps = op.steps();
        lowered.flags = u32::from(*first) * flag::FIRST + u32::from(*last) * flag::LAST;
        lowered.inputs = 3;
        for (region, rows) in [(q, tile[0].into()), (k, 128), (v, 128)] {
            let device = self.region(arena(region), region, Some(MapKind::Heads(rows)))?;
            self.regions.push(device);
        }
        if let Some(state) = state.as_ref().filter(|_| !(*first && *last)) {
            let device = self.region(arena(state), state, None)?;
            self.regions.push(device);
            lowered.inputs += 1;
        }
        if let Some(out) = out.as_ref().filter(|_| *last) {
            lowered.outputs = 2;
            let o = self.region(arena(&out.o), &out.o, Some(MapKind::Heads(64)))?;
            let l = self.region(arena(&out.l), &out.l, None)?;
            self.regions.extend([o, l]);
        }
        Ok(())
    }

    fn region(&mut self, arena: u32, region: &Region, map: Option<MapKind>) -> Result<DeviceRegion, HwError> {
        let pitch = u32::try_from(region.row_pitch).map_err(|_| unsupported("rows 4 GiB apart"))?;
        let mut device = DeviceRegion {
            address: region.offset,
            block_pitch: region.block_pitch,
            row_pitch: pitch,
            arena,
            ..DeviceRegion::default()
        };
        let Some(kind) = map else { return Ok(device) };
        let within = region.offset % region.row_pitch;
        let whole = |bytes: u64| bytes.is_multiple_of(128);
        if !whole(region.row_pitch) || !whole(within) || !self.arenas[arena as usize].is_multiple_of(region.row_pitch) {
            return Err(unsupported("tiles that do not lie at multiples of 128 bytes"));
        }
        device.row = (region.offset / region.row_pitch) as u32;
        device.column_block = (within / 128) as u32;
        if region.blocks > 1 {
            if region.block_pitch.is_multiple_of(region.row_pitch) {
                device.block_rows = (region.block_pitch / region.row_pitch) as u32;
            } else if whole(region.block_pitch) && region.block_pitch < region.row_pitch {
                device.block_columns = (region.block_pitch / 128) as u32;
            } else {
                return Err(unsupported("blocks that lie askew"));
            }
        }
        let spec = MapSpec { arena, pitch, kind };
        let index = self.maps.iter().position(|map| *map == spec).unwrap_or_else(|| {
            self.maps.push(spec);
            self.maps.len() - 1
        });
        device.map = index as u32;
        Ok(device)
    }
}

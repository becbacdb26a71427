//! A task as the device interpreter reads it.

use super::peers::{Peers, offset_of};
use super::{Mode, unsupported};
use crate::device::HwError;
use crate::program::{
    DeviceRegion, DeviceSignal, DeviceTask, DeviceWait, MapKind, MapSpec, Program, PutCopy, code, flag,
};
use tilewire_kernels::schedule::{At, BufferId, Drain, Engine, Gate, MainLoop, Op, Place, Region, WriteMode};
use tilewire_kernels::{Rank, Schedule};

/// Rows and bytes across of a copy box.
const BOX: (u32, u32) = (128, 128);

/// The interpreter's entry for tiles of this kind.
///
/// # Errors
/// [`HwError::Unsupported`].
pub(super) fn entry(main_loop: MainLoop, drain: Drain) -> Result<String, HwError> {
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

impl Program {
    /// Lowers task `i` of a role: its waits, signals and regions are added to the program's.
    pub(super) fn lower_task(
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
            Op::GemmTile { outs, tile, drain, main_loop, notice, .. } => {
                if *notice > 0 {
                    return Err(unsupported("tiles whose CTA tells a chunk's owner (gemm_rs: set cta_notice=false)"));
                }
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
            Op::GatherRows { table, src, dst, in_flight_rows, load_store_overlap, box_bytes } => {
                lowered.op = code::GATHER;
                lowered.outputs = 1;
                (lowered.blocks, lowered.rows, lowered.row_bytes) =
                    (u32::from(*in_flight_rows).max(1), dst.rows, dst.row_bytes);
                lowered.steps = self.sources.len() as u32;
                lowered.flags = if *load_store_overlap { flag::OVERLAP } else { 0 };
                if *box_bytes > 0 {
                    return Err(unsupported("gathers by boxes (moe_dispatch_gemm: set gather_box_bytes=0)"));
                }
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

//! Values and times of a schedule on one GPU.
//!
//! **Inputs in mirror mode.** Rank (0, 0) gets random ones. A rank that it stands for has the same bytes in other places:
//! what task i of that rank reads of an input is what task i of (0, 0) reads. With these inputs the kernel's own
//! reference says what (0, 0) must end with.

use crate::cluster::ClusterRunner;
use crate::device::HwError;
use crate::launch::{MAX_BATCH, RunTime, Runner};
use crate::lower::{Mode, Program};
use crate::values::random::element;
use half::bf16;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tilewire_kernels::kernel::Slice;
use tilewire_kernels::schedule::{Access, At, BufferId, BufferUse, Op, Region};
use tilewire_kernels::{Kernel, Rank, Schedule, Spec};

pub use crate::samples::{Samples, compare_samples, samples};

/// Values compared with the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Compared {
    /// Elements.
    pub elements: u64,
    /// Elements out of bounds.
    pub wrong: u64,
    /// Largest error, as a part of its bound.
    pub worst: f64,
}

/// An error below this is never wrong.
const ABSOLUTE: f64 = 1e-6;

/// Bytes of a buffer; ranks that hold the same share them.
type Bytes = Arc<Vec<u8>>;

/// Input bytes of every rank, the same for every split.
pub struct Inputs {
    /// By rank number and buffer; empty for buffers that are no input.
    bytes: Vec<Vec<Bytes>>,
    /// Slices, with the number of the rank, by tensor and first row.
    slices: BTreeMap<(&'static str, u64), Vec<(usize, Slice)>>,
    /// By rank number, the first samples asked for and their count: they take long, and stay the same from split to split.
    pub(crate) sampled: Vec<OnceLock<(u64, Option<Samples>)>>,
}

/// Random inputs.
pub fn inputs(schedule: &Schedule, kernel: &dyn Kernel, spec: &Spec, mode: Mode, seed: u64) -> Inputs {
    let cluster = schedule.cluster;
    let mut slices: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for rank in cluster.iter() {
        for slice in kernel.inputs(spec, rank) {
            slices.entry((slice.tensor, slice.row)).or_default().push((cluster.number(rank), slice));
        }
    }
    let random = |rank| random_bytes(schedule, &kernel.inputs(spec, rank), seed);
    let bytes = match mode {
        Mode::Mirror => {
            let own = random(Rank { node: 0, gpu: 0 });
            cluster.iter().map(|rank| mirrored(schedule, &own, rank)).collect()
        }
        Mode::Virtual | Mode::Cluster => cluster.iter().map(random).collect(),
    };
    Inputs { bytes, slices, sampled: cluster.iter().map(|_| OnceLock::new()).collect() }
}

/// By buffer: random elements where a slice lies, poison elsewhere.
fn random_bytes(schedule: &Schedule, slices: &[Slice], seed: u64) -> Vec<Bytes> {
    let is_input = |b: &tilewire_kernels::schedule::Buffer| b.usage == BufferUse::Input;
    let blank = schedule.buffers.iter().map(|b| vec![0xFF; if is_input(b) { b.bytes as usize } else { 0 }]);
    let mut all: Vec<Vec<u8>> = blank.collect();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    for slice in slices {
        // Input slices are matrices of one block.
        let (pitch, bytes) = (slice.region.row_pitch as usize, &mut all[usize::from(slice.region.buffer.0)]);
        let from = slice.region.offset as usize;
        let end = bytes.len().min(from + slice.rows as usize * pitch);
        let rows_each = slice.rows.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, bytes) in (0..).zip(bytes[from..end].chunks_mut(rows_each as usize * pitch)) {
                scope.spawn(move || {
                    for (row, bytes) in (slice.row + part * rows_each..).zip(bytes.chunks_mut(pitch)) {
                        for (col, bytes) in (slice.col..slice.col + slice.cols).zip(bytes.chunks_exact_mut(2)) {
                            let value = bf16::from_f64(element(seed, slice.tensor, row, col));
                            bytes.copy_from_slice(&value.to_le_bytes());
                        }
                    }
                });
            }
        });
    }
    all.into_iter().map(Arc::new).collect()
}

/// What a rank holds that (0, 0) stands for, which holds `own`.
fn mirrored(schedule: &Schedule, own: &[Bytes], rank: Rank) -> Vec<Bytes> {
    let pairs = || {
        let from = input_reads(schedule, Rank { node: 0, gpu: 0 });
        from.into_iter().zip(input_reads(schedule, rank))
    };
    let moved: BTreeSet<BufferId> = pairs().filter(|(from, to)| from != to).map(|(from, _)| from.buffer).collect();
    let mut bytes = own.to_vec();
    for &buffer in &moved {
        let index = usize::from(buffer.0);
        let mut there = vec![0xFF; own[index].len()];
        let mut done = BTreeSet::new();
        for (from, to) in pairs().filter(|(from, _)| from.buffer == buffer) {
            if done.insert((to.offset, to.row_bytes, to.rows)) {
                copy_region(&own[index], &from, &mut there, &to);
            }
        }
        bytes[index] = Arc::new(there);
    }
    bytes
}

/// Regions of inputs that a rank's tasks read on the rank itself, and rows that gathers read anywhere.
fn input_reads(schedule: &Schedule, rank: Rank) -> Vec<Region> {
    let mut regions = Vec::new();
    let table = schedule.source.table(rank);
    let is_input = |buffer: BufferId| schedule.buffer(buffer).usage == BufferUse::Input;
    for (l, r) in schedule.role_indices() {
        schedule.for_each_task(rank, l, r, |task| {
            task.op.for_each_access(|at, region, access| {
                if at == At::ME && access == Access::Read && is_input(region.buffer) {
                    regions.push(*region);
                }
            });
            if let Op::GatherRows { table: slice, src, dst, .. } = task.op
                && is_input(src)
            {
                let entries = &table[slice.start as usize..][..slice.len as usize];
                regions.extend(entries.iter().flatten().map(|entry| {
                    let offset = u64::from(entry.row) * u64::from(dst.row_bytes);
                    Region::contiguous(src, offset, 1, dst.row_bytes)
                }));
            }
        });
    }
    regions
}

fn copy_region(src: &[u8], from: &Region, dst: &mut [u8], to: &Region) {
    for block in 0..u64::from(from.blocks) {
        for row in 0..u64::from(from.rows) {
            let at = |r: &Region| (r.offset + block * r.block_pitch + row * r.row_pitch) as usize;
            let bytes = from.row_bytes as usize;
            dst[at(to)..at(to) + bytes].copy_from_slice(&src[at(from)..at(from) + bytes]);
        }
    }
}

impl Inputs {
    /// Element (row, col) of a logical tensor, wherever it lies; NaN where no rank holds it.
    pub(crate) fn value(&self, tensor: &'static str, row: u64, col: u64) -> f64 {
        let inside = |s: &Slice| (s.row..s.row + s.rows).contains(&row) && (s.col..s.col + s.cols).contains(&col);
        let near = self.slices.range((tensor, 0)..=(tensor, row)).next_back().map_or(&[][..], |(_, near)| near);
        let Some((number, slice)) = near.iter().find(|(_, slice)| inside(slice)) else { return f64::NAN };
        let at = (slice.region.offset + (row - slice.row) * slice.region.row_pitch + (col - slice.col) * 2) as usize;
        let bytes = &self.bytes[*number][usize::from(slice.region.buffer.0)];
        f64::from(bf16::from_le_bytes([bytes[at], bytes[at + 1]]))
    }

    /// What an arena holds before a run: the inputs, or poison.
    pub fn arena(&self, program: &Program, arena: usize) -> Vec<u16> {
        let buffers = self.bytes[0].len();
        let bytes = &self.bytes[arena / buffers][arena % buffers];
        if bytes.is_empty() {
            return vec![u16::MAX; program.arenas[arena] as usize / 2];
        }
        bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    /// Compares what `read` says of the arenas with the kernel's reference.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn compare(
        &self,
        program: &Program,
        schedule: &Schedule,
        kernel: &dyn Kernel,
        spec: &Spec,
        read: impl Fn(usize) -> Result<Vec<u16>, HwError>,
    ) -> Result<Compared, HwError> {
        let buffers = schedule.buffers.len();
        let mut compared = Compared::default();
        let ranks = schedule.cluster.iter().enumerate();
        for (instance, rank) in ranks.skip(program.gpu as usize).take(program.instances as usize) {
            for expected in kernel.reference(spec, rank, &|tensor, row, col| self.value(tensor, row, col)) {
                let got = read(instance * buffers + usize::from(expected.region.buffer.0))?;
                let mut index = 0;
                let size = schedule.buffer(expected.region.buffer).dtype.bytes();
                expected.region.for_each_run(|start, bytes| {
                    for at in (start..start + bytes).step_by(size as usize) {
                        let have = number(&got, at, size);
                        compared.add(have, expected.values[index], expected.magnitudes[index], expected.roundings);
                        index += 1;
                    }
                });
            }
        }
        Ok(compared)
    }

    /// Poisons all memory of a runner and writes the inputs.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn load(&self, runner: &Runner<'_>) -> Result<(), HwError> {
        self.poison(runner)?;
        let buffers = self.bytes[0].len();
        for (index, arena) in (runner.first_arena()..).zip(&runner.arenas) {
            let bytes = &self.bytes[index / buffers][index % buffers];
            if !bytes.is_empty() {
                arena.write(0, &bytes[..])?;
            }
        }
        Ok(())
    }

    /// Poisons all memory of a runner that holds no inputs, so that no run passes by what the one before wrote.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn poison(&self, runner: &Runner<'_>) -> Result<(), HwError> {
        let buffers = self.bytes[0].len();
        let inputless = |index: &usize| self.bytes[index / buffers][index % buffers].is_empty();
        let arenas = (runner.first_arena()..).zip(&runner.arenas);
        arenas.filter(|(index, _)| inputless(index)).try_for_each(|(_, arena)| arena.set(0xFF))
    }
}

/// The bf16 or f32 number at a byte.
pub(crate) fn number(halves: &[u16], byte: u64, size: u64) -> f64 {
    let at = byte as usize / 2;
    if size == 2 {
        return f64::from(bf16::from_bits(halves[at]));
    }
    f64::from(f32::from_bits(u32::from(halves[at]) | u32::from(halves[at + 1]) << 16))
}

impl Compared {
    /// Takes what another comparison found.
    pub fn join(&mut self, other: Self) {
        self.elements += other.elements;
        self.wrong += other.wrong;
        self.worst = self.worst.max(other.worst);
    }

    pub(crate) fn add(&mut self, have: f64, want: f64, magnitude: f64, roundings: u32) {
        let bound = f64::from(roundings + 1) / 256.0 * magnitude + ABSOLUTE;
        let error = (have - want).abs();
        self.elements += 1;
        if error <= bound {
            self.worst = self.worst.max(error / bound);
        } else {
            self.wrong += 1;
        }
    }
}

/// Compares all outputs with the kernel's reference, which takes long for large shapes.
///
/// # Errors
/// [`HwError::Cuda`].
pub fn compare(
    runner: &Runner<'_>,
    schedule: &Schedule,
    kernel: &dyn Kernel,
    spec: &Spec,
    inputs: &Inputs,
) -> Result<Compared, HwError> {
    let program = runner.program();
    let read = |arena: usize| runner.arenas[arena - runner.first_arena()].read(program.arenas[arena] as usize / 2);
    inputs.compare(program, schedule, kernel, spec, read)
}

/// First quartile, median and third quartile; of no values, not numbers.
pub fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|i| values.get(values.len() * i / 4).copied().unwrap_or(f64::NAN))
}

/// What the card did before a program is timed: how its power limit has set the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// The same program without a pause, as in training.
    Sustained,
    /// Nothing for a while, as before a short benchmark.
    Cold,
}

/// Under sustained load the clock is steady after about 60 ms.
pub const SUSTAINED_WARM_UP_MS: f64 = 80.0;
/// After idling, the clock is that of a cold card for about 45 ms; timed runs end well before.
const COLD_MS: f64 = 30.0;
const IDLE: Duration = Duration::from_millis(200);
/// Runs before the timed ones of a cold card: they bring code and tables into the caches.
const COLD_WARM_UP: usize = 2;

/// Runs of a program that were timed, and how many came before.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Timed runs, one behind the other.
    pub runs: Vec<RunTime>,
    /// Runs before them.
    pub warm_up: usize,
}

/// A batch is that long at most, and the timed runs together that long, so that a slow program does not take minutes.
const BATCH_MS: f64 = 40.0;
const TIMED_MS: f64 = 400.0;
/// Timed runs at least.
const MIN_REPEATS: usize = 5;

/// Times `repeats` runs, one right after the other, under `load`; fewer when they are long, or would warm the card.
///
/// # Errors
/// As [`ClusterRunner::run`].
pub fn time(runner: &mut ClusterRunner<'_>, load: Load, repeats: usize) -> Result<Timed, HwError> {
    let total_ms = |runs: &[RunTime]| runs.iter().map(|run| run.time_us).sum::<f64>() * 1e-3;
    match load {
        Load::Sustained => {
            let (mut warm_ms, mut warm_up, mut one_ms) = (0.0, 0, BATCH_MS);
            while warm_ms < SUSTAINED_WARM_UP_MS {
                let runs = runner.back_to_back(((BATCH_MS / one_ms) as usize).clamp(1, MAX_BATCH))?;
                warm_ms += total_ms(&runs);
                one_ms = runs.last().map_or(one_ms, |run| run.time_us * 1e-3);
                warm_up += runs.len();
            }
            let repeats = repeats.min(((TIMED_MS / one_ms) as usize).max(MIN_REPEATS));
            Ok(Timed { runs: runner.back_to_back(repeats)?, warm_up })
        }
        Load::Cold => {
            std::thread::sleep(IDLE);
            let warm = runner.back_to_back(COLD_WARM_UP)?;
            let one_ms = total_ms(&warm[1..]).max(1e-3);
            let fit = ((COLD_MS - total_ms(&warm)) / one_ms).max(1.0) as usize;
            Ok(Timed { runs: runner.back_to_back(repeats.min(fit))?, warm_up: COLD_WARM_UP })
        }
    }
}

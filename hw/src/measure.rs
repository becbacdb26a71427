//! Values and times of a schedule on one GPU.
//!
//! **Inputs in mirror mode.** Rank (0, 0) gets random ones. A rank that it stands for has the same bytes in other places:
//! what task i of that rank reads of an input is what task i of (0, 0) reads. With these inputs the kernel's own
//! reference says what (0, 0) must end with.

use crate::device::HwError;
use crate::launch::{MAX_BATCH, RunTime, Runner};
use crate::lower::{Mode, Program};
use crate::memory::DeviceMemory;
use crate::values::random::{element, mix};
use half::bf16;
use std::time::Duration;
use tilewire_kernels::kernel::Slice;
use tilewire_kernels::schedule::{Access, At, BufferUse, Region};
use tilewire_kernels::{Kernel, Problem, Rank, Schedule, Spec};

/// Values compared with the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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

/// Input bytes of every rank, the same for every split.
pub struct Inputs {
    /// By rank number and buffer; empty for buffers that are no input.
    bytes: Vec<Vec<Vec<u8>>>,
    /// With the number of the rank.
    slices: Vec<(usize, Slice)>,
}

/// Random inputs.
pub fn inputs(schedule: &Schedule, kernel: &dyn Kernel, spec: &Spec, mode: Mode, seed: u64) -> Inputs {
    let cluster = schedule.cluster;
    let slices = cluster
        .iter()
        .flat_map(|rank| kernel.inputs(spec, rank).into_iter().map(move |slice| (cluster.number(rank), slice)))
        .collect();
    Inputs { bytes: input_bytes(schedule, kernel, spec, mode, seed), slices }
}

fn input_bytes(schedule: &Schedule, kernel: &dyn Kernel, spec: &Spec, mode: Mode, seed: u64) -> Vec<Vec<Vec<u8>>> {
    let blank = || {
        let bytes = |b: &tilewire_kernels::schedule::Buffer| {
            if b.usage == BufferUse::Input { vec![0xFF; b.bytes as usize] } else { Vec::new() }
        };
        schedule.buffers.iter().map(bytes).collect::<Vec<Vec<u8>>>()
    };
    let mut all: Vec<Vec<Vec<u8>>> = schedule.cluster.iter().map(|_| blank()).collect();
    for rank in schedule.cluster.iter() {
        let number = schedule.cluster.number(rank);
        if mode == Mode::Mirror && number > 0 {
            continue;
        }
        for slice in kernel.inputs(spec, rank) {
            let bytes = &mut all[number][usize::from(slice.region.buffer.0)];
            for_each_element(&slice, |row, col, at| {
                let value = bf16::from_f64(element(seed, slice.tensor, row, col));
                bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
            });
        }
    }
    if mode == Mode::Mirror {
        let origin = Rank { node: 0, gpu: 0 };
        let regions = |rank| {
            let mut regions = Vec::new();
            for (l, r) in schedule.role_indices() {
                schedule.for_each_task(rank, l, r, |task| {
                    task.op.for_each_access(|at, region, access| {
                        if at == At::ME && access == Access::Read {
                            regions.push(*region);
                        }
                    });
                });
            }
            regions
        };
        let own = regions(origin);
        let (first, rest) = all.split_at_mut(1);
        for (bytes, rank) in rest.iter_mut().zip(schedule.cluster.iter().skip(1)) {
            let mut done = std::collections::BTreeSet::new();
            for (from, to) in own.iter().zip(regions(rank)) {
                let buffer = usize::from(from.buffer.0);
                let input = schedule.buffers[buffer].usage == BufferUse::Input;
                if input && done.insert((buffer, to.offset, to.row_bytes, to.rows)) {
                    copy_region(&first[0][buffer], from, &mut bytes[buffer], &to);
                }
            }
        }
    }
    all
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

/// Calls `f(row, column, byte)` for the elements of a bf16 slice.
fn for_each_element(slice: &Slice, mut f: impl FnMut(u64, u64, usize)) {
    let mut index = 0;
    slice.region.for_each_run(|start, bytes| {
        for i in 0..bytes / 2 {
            f(slice.row + index / slice.cols, slice.col + index % slice.cols, (start + i * 2) as usize);
            index += 1;
        }
    });
}

impl Inputs {
    /// Element (row, col) of a logical tensor, wherever it lies; NaN where no rank holds it.
    fn value(&self, tensor: &'static str, row: u64, col: u64) -> f64 {
        let inside = |s: &Slice| {
            s.tensor == tensor && (s.row..s.row + s.rows).contains(&row) && (s.col..s.col + s.cols).contains(&col)
        };
        let Some((number, slice)) = self.slices.iter().find(|(_, slice)| inside(slice)) else { return f64::NAN };
        // Input slices are matrices of one block.
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
                expected.region.for_each_run(|start, bytes| {
                    for i in 0..bytes / 2 {
                        let have = f64::from(bf16::from_bits(got[(start / 2 + i) as usize]));
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
                arena.write(0, bytes)?;
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

impl Compared {
    /// Takes what another comparison found.
    pub fn join(&mut self, other: Self) {
        self.elements += other.elements;
        self.wrong += other.wrong;
        self.worst = self.worst.max(other.worst);
    }

    fn add(&mut self, have: f64, want: f64, magnitude: f64, roundings: u32) {
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

/// Elements that are not a number, of the first `elements`.
fn poisoned(arena: &DeviceMemory, elements: usize) -> Result<u64, HwError> {
    let mut part = vec![0_u16; elements.min(1 << 24)];
    let (mut at, mut found) = (0, 0);
    while at < elements {
        let part = &mut part[..(elements - at).min(1 << 24)];
        arena.read_into(at * 2, part)?;
        // All exponent bits and a bit of the mantissa.
        found += part.iter().filter(|&&bits| bits & 0x7FFF > 0x7F80).count() as u64;
        at += part.len();
    }
    Ok(found)
}

/// Where an output of a rank comes from, for kernels whose outputs are one matrix of products.
struct Product {
    /// Of the logical product.
    first_row: u64,
    /// Likewise.
    first_col: u64,
    depth: u64,
    rows: u64,
    cols: u64,
    roundings: u32,
}

fn product(kernel: &dyn Kernel, spec: &Spec, rank: Rank) -> Option<Product> {
    let Problem::Gemm { m, n, k } = spec.problem else { return None };
    let (cluster, ranks) = (spec.cluster, spec.cluster.ranks() as u64);
    let roundings = 2 * ranks as u32 + 3;
    let sum = Product { first_row: 0, first_col: 0, depth: ranks * k, rows: m, cols: n, roundings };
    match kernel.name() {
        "ag_gemm" => Some(Product { depth: k, roundings: 1, first_col: cluster.number(rank) as u64 * n, ..sum }),
        "gemm_rs" if spec.options.word("output") == "per_rank" => {
            let slice = u64::from(rank.gpu) * (m / u64::from(cluster.gpus_per_node));
            let first_row = slice + u64::from(rank.node) * (m / ranks);
            Some(Product { first_row, rows: m / ranks, ..sum })
        }
        "gemm_ar" => Some(sum),
        _ => None,
    }
}

/// Compares `count` outputs of the runner's first rank, spread over the whole matrix, and looks for poison in all others. None for
/// kernels whose outputs are no products.
///
/// # Errors
/// [`HwError::Cuda`].
pub fn compare_samples(
    runner: &Runner<'_>,
    schedule: &Schedule,
    kernel: &dyn Kernel,
    spec: &Spec,
    inputs: &Inputs,
    count: u64,
) -> Result<Option<Compared>, HwError> {
    let rank = schedule.cluster.rank(runner.program().gpu as usize);
    let Some(product) = product(kernel, spec, rank) else { return Ok(None) };
    let Some(output) = schedule.buffers.iter().position(|b| b.usage == BufferUse::Output) else { return Ok(None) };
    let (arena, elements) = (&runner.arenas[output], product.rows * product.cols);
    let mut compared = Compared { wrong: poisoned(arena, elements as usize)?, ..Compared::default() };
    for sample in 0..count {
        let at = mix(sample) % elements;
        let got: u16 = arena.read_at(at as usize * 2, 1)?[0];
        let (row, col) = (at / product.cols, at % product.cols);
        let (mut want, mut magnitude) = (0.0, 0.0);
        for depth in 0..product.depth {
            let term =
                inputs.value("a", product.first_row + row, depth) * inputs.value("b", depth, product.first_col + col);
            want += term;
            magnitude += f64::abs(term);
        }
        compared.add(f64::from(bf16::from_bits(got)), want, magnitude, product.roundings);
    }
    Ok(Some(compared))
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

/// Times `repeats` runs that are queued behind each other, under `load`; fewer when they are long, or would warm the card.
///
/// # Errors
/// As [`Runner::run`].
pub fn time(runner: &mut Runner<'_>, load: Load, repeats: usize) -> Result<Timed, HwError> {
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

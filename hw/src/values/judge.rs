//! A run's inputs, and its outputs against the kernel's reference.

use super::memory::Source;
use super::random::element;
use super::report::{ExecError, Mismatch, Report};
use tilewire_kernels::schedule::Region;
use tilewire_kernels::{Kernel, Rank, Schedule, Spec};

/// An error below this is never wrong: the reference may be zero where the result is a rounding of nothing.
const ABSOLUTE: f64 = 1e-6;

/// Calls `fill(region, values)` for every input region of a rank.
pub(crate) fn for_each_input(
    schedule: &Schedule,
    kernel: &dyn Kernel,
    spec: &Spec,
    seed: u64,
    rank: Rank,
    mut fill: impl FnMut(&Region, &[f32]),
) -> Result<(), ExecError> {
    for slice in kernel.inputs(spec, rank) {
        let buffer = schedule.buffer(slice.region.buffer);
        let elements = slice.region.bytes() / buffer.dtype.bytes();
        if slice.rows * slice.cols != elements || slice.region.end() > buffer.bytes {
            return Err(ExecError::Kernel {
                kernel: schedule.kernel.clone(),
                what: format!(
                    "input {} has {} x {} elements for a region of {elements} in {}",
                    slice.tensor, slice.rows, slice.cols, buffer.name
                ),
            });
        }
        let values: Vec<f32> = (slice.row..slice.row + slice.rows)
            .flat_map(|row| (slice.col..slice.col + slice.cols).map(move |col| (row, col)))
            .map(|(row, col)| element(seed, slice.tensor, row, col) as f32)
            .collect();
        fill(&slice.region, &values);
    }
    Ok(())
}

/// Compares the outputs of a rank and counts them; keeps the first wrong element with the number of all.
pub(crate) fn compare(
    memory: &impl Source,
    schedule: &Schedule,
    kernel: &dyn Kernel,
    spec: &Spec,
    seed: u64,
    rank: Rank,
    (report, first): (&mut Report, &mut Option<Mismatch>),
) -> Result<(), ExecError> {
    let reference = kernel.reference(spec, rank, &|tensor, row, col| element(seed, tensor, row, col));
    if reference.is_empty() {
        return Err(ExecError::Kernel {
            kernel: schedule.kernel.clone(),
            what: format!("no reference for rank {rank}"),
        });
    }
    for expected in reference {
        let region = expected.region;
        let got = memory.read_floats(schedule.cluster.number(rank), &region);
        if got.len() != expected.values.len() || got.len() != expected.magnitudes.len() {
            let what = format!("reference has {} values for a region of {} elements", expected.values.len(), got.len());
            return Err(ExecError::Kernel { kernel: schedule.kernel.clone(), what });
        }
        let scale = f64::from(expected.roundings + 1) / 256.0;
        let width = memory.dtype(&region).bytes();
        for (i, &got) in got.iter().enumerate() {
            let (want, got) = (expected.values[i], f64::from(got));
            let bound = scale * expected.magnitudes[i] + ABSOLUTE;
            let error = (got - want).abs();
            report.elements += 1;
            if error <= bound {
                report.worst = report.worst.max(error / bound);
                continue;
            }
            if let Some(first) = first {
                first.wrong += 1;
                continue;
            }
            let per_row = u64::from(region.row_bytes) / width;
            let (row, col) = (i as u64 / per_row, i as u64 % per_row);
            let (block, row_of_block) = (row / u64::from(region.rows), row % u64::from(region.rows));
            *first = Some(Mismatch {
                run: 0,
                seed: 0,
                rank,
                buffer: schedule.buffer(region.buffer).name.clone(),
                row,
                col,
                offset: region.offset + block * region.block_pitch + row_of_block * region.row_pitch + col * width,
                expected: want,
                got,
                bound,
                wrong: 1,
                writers: Vec::new(),
            });
        }
    }
    Ok(())
}

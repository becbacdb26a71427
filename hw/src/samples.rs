//! A part of the outputs of a large shape against what the inputs say, without the whole reference.

use crate::device::HwError;
use crate::launch::Runner;
use crate::measure::{Compared, Inputs, number};
use crate::values::random::mix;
use std::ops::Range;

use tilewire_kernels::schedule::{BufferId, BufferUse, Op};
use tilewire_kernels::{Kernel, Offset, Problem, Product, Rank, Schedule, Spec};

/// One output element: what it must be.
struct Element {
    buffer: BufferId,
    byte: u64,
    want: f64,
    magnitude: f64,
    roundings: u32,
}

/// Some outputs of a rank, spread over all of them, and what they must be.
pub struct Samples {
    elements: Vec<Element>,
    /// Bytes of the output that tasks of this rank write, in order; none where they write all. Buffers are as long as the
    /// rank with the most needs them.
    written: Option<Vec<Range<u64>>>,
}

/// `count` outputs of a rank; none for shapes that no rule here covers.
pub fn samples(
    schedule: &Schedule,
    kernel: &dyn Kernel,
    spec: &Spec,
    inputs: &Inputs,
    rank: Rank,
    count: u64,
) -> Option<Samples> {
    let mut written = None;
    let elements = match spec.problem {
        Problem::Gemm { .. } => {
            let (product, buffer) = (kernel.product(spec, rank)?, output(schedule)?);
            (0..count).map(|sample| element(&product, buffer, inputs, mix(sample))).collect()
        }
        Problem::Moe { .. } => {
            let experts = Experts::new(schedule, rank);
            written = Some(experts.written());
            (0..count).filter_map(|sample| experts.element(spec, inputs, mix(sample))).collect()
        }
        Problem::Attention { .. } => {
            let merges = if spec.options.word("ring") == "true_ring" { 0 } else { schedule.cluster.ranks() as u32 - 1 };
            // Rows take long: a few of them, and many columns of each.
            let row = |sample| attended(schedule, spec, rank, inputs, mix(sample), merges);
            (0..count.div_ceil(32)).flat_map(row).collect()
        }
    };
    Some(Samples { elements, written })
}

impl Samples {
    /// Compares them with what the runner's first rank holds, and looks for poison in all outputs that are written, and for
    /// numbers in those that are not.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn compare(&self, runner: &Runner<'_>, schedule: &Schedule) -> Result<Compared, HwError> {
        let mut compared = Compared::default();
        for (index, buffer) in schedule.buffers.iter().enumerate().filter(|(_, b)| b.usage == BufferUse::Output) {
            let (size, halves) = (buffer.dtype.bytes(), buffer.bytes / 2);
            let got: Vec<u16> = runner.arenas[index].read(halves as usize)?;
            let all = 0..buffer.bytes;
            compared.wrong += misplaced(&got, size, self.written.as_deref().unwrap_or(std::slice::from_ref(&all)));
            for element in self.elements.iter().filter(|element| usize::from(element.buffer.0) == index) {
                let have = number(&got, element.byte, size);
                compared.add(have, element.want, element.magnitude, element.roundings);
            }
        }
        Ok(compared)
    }
}

/// Elements of `size` bytes in `written` that are no numbers, and those outside that are. Counted by several threads:
/// outputs are large.
fn misplaced(halves: &[u16], size: u64, written: &[Range<u64>]) -> u64 {
    const PART: usize = 1 << 22;
    let count = |bytes: Range<u64>, poison: bool| {
        let elements = bytes.step_by(size as usize);
        elements.filter(|&byte| number(halves, byte, size).is_nan() == poison).count() as u64
    };
    let of_part = |part: Range<u64>| {
        let (mut wrong, mut at) = (0, part.start);
        let first = written.partition_point(|range| range.end <= part.start);
        for range in written[first..].iter().take_while(|range| range.start < part.end) {
            let (from, to) = (range.start.max(part.start), range.end.min(part.end));
            wrong += count(at..from, false) + count(from..to, true);
            at = to;
        }
        wrong + count(at..part.end, false)
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let bytes = halves.len() as u64 * 2;
    let each = halves.len().div_ceil(threads).next_multiple_of(PART).max(PART) as u64 * 2;
    let of_part = &of_part;
    std::thread::scope(|scope| {
        let starts = (0..bytes).step_by(each as usize);
        let parts: Vec<_> = starts.map(|start| scope.spawn(move || of_part(start..bytes.min(start + each)))).collect();
        parts.into_iter().map(|part| part.join().expect("counting does not panic")).sum()
    })
}

/// Compares `count` outputs of the runner's first rank: [`samples`], then [`Samples::compare`].
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
    let number = runner.program().gpu as usize;
    let draw = || samples(schedule, kernel, spec, inputs, schedule.cluster.rank(number), count);
    let (of, known) = inputs.sampled[number].get_or_init(|| (count, draw()));
    if *of == count {
        return known.as_ref().map(|samples| samples.compare(runner, schedule)).transpose();
    }
    draw().map(|samples| samples.compare(runner, schedule)).transpose()
}

fn output(schedule: &Schedule) -> Option<BufferId> {
    let index = schedule.buffers.iter().position(|b| b.usage == BufferUse::Output)?;
    Some(BufferId(index as u16))
}

/// An element of a product, chosen by a random number.
fn element(product: &Product, buffer: BufferId, inputs: &Inputs, random: u64) -> Element {
    let at = random % (product.rows * product.cols);
    let (row, col) = (product.first_row + at / product.cols, product.first_col + at % product.cols);
    let (mut want, mut magnitude) = (0.0, 0.0);
    for depth in 0..product.depth {
        let term = inputs.value("a", row, depth) * inputs.value("b", depth, col);
        want += term;
        magnitude += f64::abs(term);
    }
    Element { buffer, byte: at * 2, want, magnitude, roundings: product.roundings }
}

/// Outputs of a rank's experts, as its schedule places them.
struct Experts {
    cluster: tilewire_kernels::Cluster,
    rank: Rank,
    table: Vec<Option<tilewire_kernels::schedule::GatherEntry>>,
    /// Per tile: output region, row of the gather table, first weight row of the rank, first column.
    tiles: Vec<(tilewire_kernels::schedule::Region, u64, u64, u64)>,
}

impl Experts {
    fn new(schedule: &Schedule, rank: Rank) -> Self {
        let mut tiles = Vec::new();
        for (l, r) in schedule.role_indices() {
            schedule.for_each_task(rank, l, r, |task| {
                if let Op::GemmTile { a, b, outs, .. } = &task.op {
                    let column = b.offset % b.row_pitch / 2;
                    tiles.push((outs[0].place.region, a.offset / a.row_pitch, b.offset / b.row_pitch, column));
                }
            });
        }
        Self { cluster: schedule.cluster, rank, table: schedule.source.table(rank), tiles }
    }

    /// Bytes of the output in tiles, in order.
    fn written(&self) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        for (region, ..) in &self.tiles {
            region.for_each_run(|start, bytes| runs.push(start..start + bytes));
        }
        runs.sort_unstable_by_key(|run| run.start);
        let mut written: Vec<Range<u64>> = Vec::new();
        for run in runs {
            match written.last_mut() {
                Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
                _ => written.push(run),
            }
        }
        written
    }

    /// An output of one of the tiles; none on a rank whose experts nobody chose.
    fn element(&self, spec: &Spec, inputs: &Inputs, random: u64) -> Option<Element> {
        let Problem::Moe { tokens, hidden, experts, .. } = spec.problem else { unreachable!("a shape of experts") };
        let ranks = self.cluster.ranks() as u64;
        let tile = random.checked_rem(self.tiles.len() as u64)?;
        let (region, first_row, weight_row, first_col) = &self.tiles[tile as usize];
        let random = mix(random);
        let (row, col) = (random % u64::from(region.rows), mix(random) % u64::from(region.row_bytes / 2));
        let byte = region.offset + row * region.row_pitch + col * 2;
        let (mut want, mut magnitude) = (0.0, 0.0);
        if let Some(entry) = self.table[(first_row + row) as usize] {
            let local = tokens / ranks;
            let (slot, token) = (u64::from(entry.row) / local, u64::from(entry.row) % local);
            let home = self.cluster.at(self.rank, Offset { dn: slot as u16, dg: entry.dg });
            let token = self.cluster.number(home) as u64 * local + token;
            let weights = self.cluster.number(self.rank) as u64 * (experts / ranks * hidden) + weight_row;
            for depth in 0..hidden {
                let term = inputs.value("tokens", token, depth) * inputs.value("w", weights + depth, first_col + col);
                want += term;
                magnitude += f64::abs(term);
            }
        }
        Some(Element { buffer: region.buffer, byte, want, magnitude, roundings: 1 })
    }
}

/// 32 columns of a query, and its logarithm. Bounds as the kernel's reference has them.
fn attended(schedule: &Schedule, spec: &Spec, rank: Rank, inputs: &Inputs, random: u64, merges: u32) -> Vec<Element> {
    let Problem::Attention { seq, batch, heads, head_dim } = spec.problem else { return Vec::new() };
    let named = |name: &str| {
        let index = schedule.buffers.iter().position(|b| b.name == name && b.usage == BufferUse::Output);
        index.map(|index| BufferId(index as u16))
    };
    let (Some(out), Some(log)) = (named("out"), named("l")) else { return Vec::new() };
    let rows = seq / schedule.cluster.ranks() as u64;
    let at = random % (batch * heads * rows);
    let (head, row) = (at / rows, at % rows);
    let query = head * seq + schedule.cluster.number(rank) as u64 * rows + row;
    let q: Vec<f64> = (0..head_dim).map(|c| inputs.value("q", query, c)).collect();
    let score = |key: u64| {
        let sum: f64 = (0..head_dim).zip(&q).map(|(c, q)| q * inputs.value("k", head * seq + key, c)).sum();
        sum / (head_dim as f64).sqrt()
    };
    let scores: Vec<f64> = (0..seq).map(score).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let l = top + scores.iter().map(|score| (score - top).exp()).sum::<f64>().ln();
    let mut elements = vec![Element { buffer: log, byte: at * 4, want: l, magnitude: l.abs().max(1.0), roundings: 0 }];
    let step = (head_dim / 32).max(1);
    for col in (mix(random) % step..head_dim).step_by(step as usize) {
        let (mut want, mut magnitude) = (0.0, 0.0);
        for (key, score) in (0..).zip(&scores) {
            let term = (score - l).exp() * inputs.value("v", head * seq + key, col);
            want += term;
            magnitude += f64::abs(term);
        }
        elements.push(Element { buffer: out, byte: (at * head_dim + col) * 2, want, magnitude, roundings: 2 + merges });
    }
    elements
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_kernels::{Cluster, Fabric, OptionSet, kernel};

    #[test]
    fn poison_is_counted_by_elements_of_any_size() {
        let mut halves = vec![0x3F80_u16; (1 << 23) + 10];
        for at in [0, 5, 1 << 22, (1 << 23) + 9] {
            halves[at] = u16::MAX;
        }
        let all = 0..halves.len() as u64 * 2;
        assert_eq!(misplaced(&halves, 2, std::slice::from_ref(&all)), 4);
        // The upper half of an f32 says whether it is a number: only the odd places.
        assert_eq!(misplaced(&halves, 4, std::slice::from_ref(&all)), 2);
    }

    #[test]
    fn a_missing_output_and_a_number_where_none_belongs_do_not_cancel() {
        let written = [8..16, 1 << 23..(1 << 24) + 4];
        let mut halves = vec![u16::MAX; (1 << 23) + 10];
        for range in &written {
            halves[range.start as usize / 2..range.end as usize / 2].fill(0x3F80);
        }
        assert_eq!(misplaced(&halves, 2, &written), 0);
        halves[5] = u16::MAX;
        assert_eq!(misplaced(&halves, 2, &written), 1);
        halves[100] = 0x3F80;
        assert_eq!(misplaced(&halves, 2, &written), 2);
        assert_eq!(misplaced(&halves, 2, &[]), 4 + 1 + (1 << 22) + 2 - 1, "on a rank that writes nothing, any number");
    }

    #[test]
    fn a_rank_whose_experts_nobody_chose_has_nothing_to_compare() {
        let problem = Problem::Moe { tokens: 2, hidden: 256, inter: 512, topk: 1, experts: 2 };
        let cluster = Cluster { nodes: 1, gpus_per_node: 2 };
        let kernel = kernel("moe_dispatch_gemm").expect("a kernel");
        let mut options = kernel.options(OptionSet::Tilewire, &problem, cluster);
        options.set("routing", "multinomial").expect("a legal option");
        // Both tokens choose the same of two experts for half of the seeds.
        let empty = (0..32).find_map(|seed: u32| {
            options.set("routing_seed", &seed.to_string()).expect("a legal option");
            let spec = Spec { problem, cluster, fabric: Fabric::IbRc, options: options.clone() };
            let schedule = kernel.build(&spec).expect("it builds");
            let rank = cluster.iter().find(|&rank| Experts::new(&schedule, rank).tiles.is_empty())?;
            Some((spec, schedule, rank))
        });
        let (spec, schedule, rank) = empty.expect("a rank without tiles");
        let inputs = crate::measure::inputs(&schedule, kernel, &spec, crate::lower::Mode::Cluster, 0);
        let samples = samples(&schedule, kernel, &spec, &inputs, rank, 8).expect("a shape of experts");
        assert!(samples.elements.is_empty());
        assert_eq!(samples.written.as_deref(), Some(&[][..]));
    }

    #[test]
    fn a_rank_with_fewer_rows_than_another_leaves_the_end_of_its_outputs_alone() {
        let problem = Problem::Moe { tokens: 1024, hidden: 256, inter: 512, topk: 2, experts: 8 };
        let cluster = Cluster { nodes: 1, gpus_per_node: 2 };
        let kernel = kernel("moe_dispatch_gemm").expect("a kernel");
        let mut options = kernel.options(OptionSet::Tilewire, &problem, cluster);
        options.set("routing", "multinomial").expect("a legal option");
        let schedule = kernel.build(&Spec { problem, cluster, fabric: Fabric::IbRc, options }).expect("it builds");
        let out = output(&schedule).expect("an output");
        let bytes = schedule.buffer(out).bytes;
        let mut written: Vec<Vec<Range<u64>>> =
            cluster.iter().map(|rank| Experts::new(&schedule, rank).written()).collect();
        written.sort_unstable_by_key(|ranges| ranges.last().map(|range| range.end));
        // Row blocks of 128 rows and 512 columns. On two H200 one of the ranks had two fewer than the other.
        let ends: Vec<Vec<(u64, u64)>> =
            written.iter().map(|ranges| ranges.iter().map(|range| (range.start, range.end)).collect()).collect();
        assert_eq!(ends, [[(0, bytes - 2 * 128 * 512 * 2)], [(0, bytes)]]);
    }
}

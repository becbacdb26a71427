//! What each op computes: bf16 operands, f32 accumulation.

use super::memory::{Source, Write, bytes_of, floats};
use half::bf16;
use tilewire_kernels::Rank;
use tilewire_kernels::schedule::{At, BufferId, DType, GatherEntry, Op, Partial, Region, WriteMode};

/// What a tile carries from step to step.
pub(crate) enum Carry {
    /// Ops without steps.
    Nothing,
    /// f32 accumulators `[bm, bn]`.
    Gemm(Vec<f32>),
    /// Unnormalised output `[bq, d]`, running maximum (log2 units) and running sum per row.
    Attention(Vec<f32>, Vec<f32>, Vec<f32>),
}

/// Reads what a tile starts from.
pub(crate) fn begin(memory: &impl Source, rank: Rank, op: &Op) -> Carry {
    let me = memory.cluster().number(rank);
    match op {
        Op::GemmTile { tile, .. } => Carry::Gemm(vec![0.0; usize::from(tile[0]) * usize::from(tile[1])]),
        Op::AttentionTile { q, state, first, tile, .. } => {
            let rows = usize::from(tile[0]);
            let dim = (q.bytes() / 2) as usize / rows;
            match state {
                Some(state) if !first => {
                    let (mut o, mut top, mut sum) = (Vec::new(), Vec::new(), Vec::new());
                    for row in floats(DType::F32, &memory.read(me, state)).chunks_exact(dim + 2) {
                        o.extend_from_slice(&row[..dim]);
                        top.push(row[dim]);
                        sum.push(row[dim + 1]);
                    }
                    Carry::Attention(o, top, sum)
                }
                _ => Carry::Attention(vec![0.0; rows * dim], vec![f32::NEG_INFINITY; rows], vec![0.0; rows]),
            }
        }
        _ => Carry::Nothing,
    }
}

/// Runs steps `from..to`.
pub(crate) fn steps(memory: &impl Source, rank: Rank, op: &Op, carry: &mut Carry, from: u32, to: u32) {
    let me = memory.cluster().number(rank);
    match (op, carry) {
        (Op::GemmTile { a, b, tile, .. }, Carry::Gemm(sum)) => {
            let [bm, bn, bk] = tile.map(usize::from);
            let depth = (to - from) as usize * bk;
            let panel_a = read_columns(memory, me, a, bm as u64, u64::from(from) * bk as u64, depth as u64);
            let panel_b = read_rows(memory, me, b, bn as u64, u64::from(from) * bk as u64, depth as u64);
            for (row, sums) in sum.chunks_exact_mut(bn).enumerate() {
                for (k, b_row) in panel_b.chunks_exact(bn).enumerate() {
                    let factor = panel_a[row * depth + k];
                    sums.iter_mut().zip(b_row).for_each(|(sum, b)| *sum += factor * b);
                }
            }
        }
        (Op::AttentionTile { q, k, v, tile, .. }, Carry::Attention(o, top, sum)) => {
            let [bq, bkv] = tile.map(usize::from);
            let dim = (q.bytes() / 2) as usize / bq;
            let q = memory.read_floats(me, q);
            for step in from..to {
                let row = u64::from(step) * bkv as u64;
                let k = read_rows(memory, me, k, dim as u64, row, bkv as u64);
                let v = read_rows(memory, me, v, dim as u64, row, bkv as u64);
                attend(&q, &k, &v, dim, o, top, sum);
            }
        }
        _ => {}
    }
}

/// One KV block of online softmax. Probabilities are rounded to bf16 before they meet V, as the matrix unit needs
/// them; their sum is not.
fn attend(q: &[f32], k: &[f32], v: &[f32], dim: usize, o: &mut [f32], top: &mut [f32], sum: &mut [f32]) {
    let scale = std::f32::consts::LOG2_E / (dim as f32).sqrt();
    for (i, (q, o)) in q.chunks_exact(dim).zip(o.chunks_exact_mut(dim)).enumerate() {
        let scores: Vec<f32> =
            k.chunks_exact(dim).map(|k| scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>()).collect();
        let higher = scores.iter().copied().fold(top[i], f32::max);
        let shrink = (top[i] - higher).exp2();
        for o in o.iter_mut() {
            *o *= shrink;
        }
        sum[i] *= shrink;
        top[i] = higher;
        for (score, v) in scores.iter().zip(v.chunks_exact(dim)) {
            let p = (score - higher).exp2();
            sum[i] += p;
            let p = bf16::from_f32(p).to_f32();
            o.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
        }
    }
}

/// What an op writes, once its steps are done. Ops without steps read here.
pub(crate) fn finish(
    memory: &impl Source,
    rank: Rank,
    op: &Op,
    carry: &Carry,
    table: &[Option<GatherEntry>],
) -> Vec<Write> {
    let me = memory.cluster().number(rank);
    let mut writes = Vec::new();
    let mut own = |region: &Region, data| writes.push(Write { rank: me, region: *region, data, add: false });
    match (op, carry) {
        (Op::GemmTile { outs, .. }, Carry::Gemm(sum)) => {
            for out in outs {
                let data = bytes_of(memory.dtype(&out.place.region), sum);
                for to in memory.ranks_of(rank, out.place.at) {
                    let add = out.mode == WriteMode::Add;
                    writes.push(Write { rank: to, region: out.place.region, data: data.clone(), add });
                }
            }
        }
        (Op::AttentionTile { q, state, out, last, tile, .. }, Carry::Attention(o, top, sum)) => {
            let dim = (q.bytes() / 2) as usize / usize::from(tile[0]);
            if let (Some(state), false) = (state, last) {
                let values: Vec<f32> = o
                    .chunks_exact(dim)
                    .zip(top.iter().zip(sum))
                    .flat_map(|(o, (&top, &sum))| o.iter().copied().chain([top, sum]))
                    .collect();
                own(state, bytes_of(DType::F32, &values));
            }
            if let Some(Partial { o: o_out, l: l_out }) = out {
                let values: Vec<f32> =
                    o.chunks_exact(dim).zip(sum).flat_map(|(o, sum)| o.iter().map(move |o| o / sum)).collect();
                let l: Vec<f32> =
                    top.iter().zip(sum).map(|(top, sum)| (top + sum.log2()) * std::f32::consts::LN_2).collect();
                own(o_out, bytes_of(memory.dtype(o_out), &values));
                own(l_out, bytes_of(DType::F32, &l));
            }
        }
        (Op::AttentionMerge { parts, out }, _) => {
            let parts: Vec<(Vec<f32>, Vec<f32>)> = parts
                .iter()
                .map(|part| (memory.read_floats(me, &part.o), floats(DType::F32, &memory.read(me, &part.l))))
                .collect();
            let rows = (out.l.bytes() / 4) as usize;
            let dim = (out.o.bytes() / memory.dtype(&out.o).bytes()) as usize / rows;
            let (mut o, mut l) = (Vec::with_capacity(rows * dim), Vec::with_capacity(rows));
            for row in 0..rows {
                let top = parts.iter().map(|(_, l)| l[row]).fold(f32::NEG_INFINITY, f32::max);
                let total = parts.iter().map(|(_, l)| (l[row] - top).exp()).sum::<f32>().ln() + top;
                l.push(total);
                o.extend(
                    (0..dim).map(|i| parts.iter().map(|(o, l)| (l[row] - total).exp() * o[row * dim + i]).sum::<f32>()),
                );
            }
            own(&out.o, bytes_of(memory.dtype(&out.o), &o));
            own(&out.l, bytes_of(DType::F32, &l));
        }
        (Op::Copy { src, dsts, .. }, _) => {
            let data = memory.read_place(rank, src);
            for dst in dsts {
                for to in memory.ranks_of(rank, dst.at) {
                    writes.push(Write { rank: to, region: dst.region, data: data.clone(), add: false });
                }
            }
        }
        (Op::GatherRows { table: slice, src, dst, .. }, _) => {
            let mut data = Vec::with_capacity(dst.bytes() as usize);
            let entries = &table[slice.start as usize..(slice.start + slice.len) as usize];
            for entry in entries {
                match entry {
                    Some(entry) => {
                        let from = memory.ranks_of(rank, At::local(entry.dg))[0];
                        data.extend(memory.read(from, &gathered_row(*src, dst, *entry)));
                    }
                    None => data.resize(data.len() + dst.row_bytes as usize, 0),
                }
            }
            own(dst, data);
        }
        (Op::Reduce { inputs, outputs, .. }, _) => {
            let mut sum = vec![0f32; 0];
            for input in inputs {
                let values = floats(memory.dtype(&input.region), &memory.read_place(rank, input));
                sum.resize(values.len(), 0.0);
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            for output in outputs {
                let data = bytes_of(memory.dtype(&output.region), &sum);
                for to in memory.ranks_of(rank, output.at) {
                    writes.push(Write { rank: to, region: output.region, data: data.clone(), add: false });
                }
            }
        }
        (Op::Fill { dst }, _) => {
            for to in memory.ranks_of(rank, dst.at) {
                let data = vec![0; dst.region.bytes() as usize];
                writes.push(Write { rank: to, region: dst.region, data, add: false });
            }
        }
        // Puts are carried by the fabric and collectives by their rendezvous.
        _ => {}
    }
    writes
}

/// The source row of a gather entry.
pub(crate) fn gathered_row(src: BufferId, dst: &Region, entry: GatherEntry) -> Region {
    Region::contiguous(src, u64::from(entry.row) * u64::from(dst.row_bytes), 1, dst.row_bytes)
}

/// Columns `first..first + cols` of a row-major matrix of `rows` rows.
fn read_columns(memory: &impl Source, rank: usize, region: &Region, rows: u64, first: u64, cols: u64) -> Vec<f32> {
    let pitch = region.bytes() / rows;
    let mut bytes = Vec::with_capacity((rows * cols * 2) as usize);
    for row in 0..rows {
        memory.read_part(rank, region, row * pitch + first * 2, cols * 2, &mut bytes);
    }
    floats(DType::Bf16, &bytes)
}

/// Rows `first..first + rows` of a row-major matrix of `cols` columns.
fn read_rows(memory: &impl Source, rank: usize, region: &Region, cols: u64, first: u64, rows: u64) -> Vec<f32> {
    let mut bytes = Vec::with_capacity((rows * cols * 2) as usize);
    memory.read_part(rank, region, first * cols * 2, rows * cols * 2, &mut bytes);
    floats(DType::Bf16, &bytes)
}

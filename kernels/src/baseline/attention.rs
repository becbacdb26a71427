//! Attention unfused: all-gather of K and V, then every Q block over all keys.

use super::{ALL_K, ALL_V, ATTENDED, Baseline, K, L, Plan, Q, V, Work, buffer, collective};
use crate::cluster::Rank;
use crate::kernel::{BuildError, Kernel, Problem, Spec, divides, fits_u32};
use crate::schedule::{Buffer, BufferUse, CollectiveKind, DType, MainLoop, Op, Partial, Region, Task};

/// All-gather of K and V, then every Q block over all keys.
pub(super) struct Attention {
    ranks: u64,
    /// Of one head on a rank.
    rows: u64,
    /// Times batch.
    heads: u64,
    dim: u64,
    tile: [u64; 2],
    stages: u8,
    /// Heads of a piece.
    piece_heads: u64,
}

impl Attention {
    pub fn new(spec: &Spec) -> Result<Self, BuildError> {
        let name = Baseline::RingAttention.name();
        let Problem::Attention { seq, batch, heads, head_dim } = spec.problem else {
            let what = "needs an attention shape: seq, batch, heads and head_dim".into();
            return Err(BuildError::Unsupported { kernel: name, what });
        };
        let ranks = spec.cluster.ranks() as u64;
        let [bq, bkv] = [spec.options.int("tile_q"), spec.options.int("tile_kv")];
        let chunks = spec.options.int("chunks");
        divides(name, "seq", seq, ranks * bq, || format!("{ranks} ranks hold whole Q blocks of tile_q = {bq} rows"))?;
        divides(name, "seq", seq, bkv, || format!("KV blocks of tile_kv = {bkv} rows"))?;
        divides(name, "head_dim", head_dim, 8, || "16-byte pieces".into())?;
        divides(name, "batch", batch, 1, || "at least one".into())?;
        let heads = batch.saturating_mul(heads);
        divides(name, "batch times heads", heads, chunks, || format!("{chunks} pieces of whole heads"))?;
        fits_u32(name, "rows of all ranks (batch times heads times seq)", heads.saturating_mul(seq))?;
        fits_u32(name, "head_dim in bytes", head_dim * 2)?;
        Ok(Self {
            ranks,
            rows: seq / ranks,
            heads,
            dim: head_dim,
            tile: [bq, bkv],
            stages: spec.options.int("stages") as u8,
            piece_heads: heads / chunks,
        })
    }

    fn collectives(&self, piece: u64, sink: &mut dyn FnMut(Task)) {
        let (row_bytes, rows) = (self.dim * 2, self.piece_heads * self.rows);
        let region = |buffer, parts: u64| {
            let offset = piece * parts * rows * row_bytes;
            Region::contiguous(buffer, offset, (parts * rows) as u32, row_bytes as u32)
        };
        for (own, all) in [(K, ALL_K), (V, ALL_V)] {
            sink(collective(CollectiveKind::AllGather, region(own, 1), region(all, self.ranks)));
        }
    }

    fn attention_tasks(&self, piece: u64, sink: &mut dyn FnMut(Task)) {
        let ([bq, bkv], row_bytes) = (self.tile, self.dim * 2);
        let part = self.piece_heads * self.rows * row_bytes;
        for head in 0..self.piece_heads {
            // The gathered piece holds one part per rank, each with all heads of the piece.
            let keys = |buffer| Region {
                buffer,
                offset: piece * self.ranks * part + head * self.rows * row_bytes,
                blocks: self.ranks as u32,
                rows: self.rows as u32,
                row_bytes: row_bytes as u32,
                block_pitch: part,
                row_pitch: row_bytes,
            };
            let first = (piece * self.piece_heads + head) * self.rows;
            for row in (first..first + self.rows).step_by(bq as usize) {
                let matrix = |buffer| Region::contiguous(buffer, row * row_bytes, bq as u32, row_bytes as u32);
                sink(Task::new(Op::AttentionTile {
                    q: matrix(Q),
                    k: keys(ALL_K),
                    v: keys(ALL_V),
                    state: None,
                    out: Some(Partial { o: matrix(ATTENDED), l: Region::contiguous(L, row * 4, bq as u32, 4) }),
                    first: true,
                    last: true,
                    tile: [bq as u16, bkv as u16],
                    stages: self.stages,
                    main_loop: MainLoop::Library,
                }));
            }
        }
    }
}

impl Plan for Attention {
    fn buffers(&self) -> Vec<Buffer> {
        let rows = self.heads * self.rows;
        let bytes = rows * self.dim * 2;
        let l = Buffer { name: "l".into(), bytes: rows * 4, dtype: DType::F32, usage: BufferUse::Output };
        vec![
            buffer("q", bytes, BufferUse::Input),
            buffer("k", bytes, BufferUse::Input),
            buffer("v", bytes, BufferUse::Input),
            buffer("out", bytes, BufferUse::Output),
            l,
            buffer("all_k", self.ranks * bytes, BufferUse::Scratch),
            buffer("all_v", self.ranks * bytes, BufferUse::Scratch),
        ]
    }

    fn useful_flops(&self) -> u64 {
        (4 * self.heads * self.rows * self.dim).saturating_mul(self.ranks * self.rows)
    }

    fn tasks(&self, _rank: Rank, work: Work, piece: u64, sink: &mut dyn FnMut(Task)) {
        if work == Work::Collect {
            self.collectives(piece, sink);
        } else {
            self.attention_tasks(piece, sink);
        }
    }
}

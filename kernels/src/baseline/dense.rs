//! ag_gemm, gemm_ar and gemm_rs unfused: GEMM before or after a collective over its rows.

use super::gemm::{GemmRule, RowBlock};
use super::{A, Baseline, OUT, PARTS, Plan, Work, buffer, collective};
use crate::cluster::Rank;
use crate::kernel::{BuildError, Kernel, Spec, divides};
use crate::schedule::{Buffer, BufferUse, CollectiveKind, Region, Task};

/// GEMM before or after a collective over its rows.
pub(super) struct Dense {
    of: Baseline,
    m: u64,
    n: u64,
    k: u64,
    nodes: u64,
    gpus: u64,
    /// Rows of a piece, in each rank's part if there are parts.
    piece_rows: u64,
    rule: GemmRule,
}

impl Dense {
    /// Checks a shape whose rows are cut into `parts`, each into pieces.
    pub fn new(of: Baseline, spec: &Spec, parts: u64) -> Result<Self, BuildError> {
        let name = of.name();
        let (m, n, k) = spec.gemm(name)?;
        let rule = GemmRule::new(&spec.options);
        let [bm, bn, bk] = rule.tile;
        let chunks = spec.options.int("chunks");
        divides(name, "m", m, parts * chunks * bm, || {
            format!("{parts} parts in {chunks} pieces of whole row blocks of tile_m = {bm}")
        })?;
        divides(name, "n", n, bn, || format!("tiles of tile_n = {bn} columns"))?;
        divides(name, "k", k, bk, || format!("main loop steps of tile_k = {bk}"))?;
        Ok(Self {
            of,
            m,
            n,
            k,
            nodes: u64::from(spec.cluster.nodes),
            gpus: u64::from(spec.cluster.gpus_per_node),
            piece_rows: m / parts / chunks,
            rule,
        })
    }

    pub fn ag_gemm(spec: &Spec) -> Result<Self, BuildError> {
        Self::new(Baseline::AgGemm, spec, spec.cluster.ranks() as u64)
    }

    pub fn gemm_ar(spec: &Spec) -> Result<Self, BuildError> {
        Self::new(Baseline::GemmAr, spec, 1)
    }

    pub fn gemm_rs(spec: &Spec) -> Result<Self, BuildError> {
        Self::new(Baseline::GemmRs, spec, spec.cluster.ranks() as u64)
    }

    const fn ranks(&self) -> u64 {
        self.nodes * self.gpus
    }

    /// First row of the logical matrix in a piece of a rank's part.
    const fn first_row(&self, number: u64, piece: u64) -> u64 {
        let part = self.m / self.ranks();
        let start = match self.of {
            // Rank (i, g) ends with sub-slice i of slice g.
            Baseline::GemmRs => (number % self.gpus * self.nodes + number / self.gpus) * part,
            _ => number * part,
        };
        start + piece * self.piece_rows
    }

    /// Row blocks of a piece in the order of its parts.
    fn row_blocks(&self, piece: u64) -> Vec<RowBlock> {
        let (bm, rows) = (self.rule.tile[0], self.piece_rows);
        let (k_bytes, n_bytes) = (self.k * 2, self.n * 2);
        let parts = if self.of == Baseline::GemmAr { 1 } else { self.ranks() };
        let mut blocks = Vec::with_capacity((parts * rows / bm) as usize);
        for part in 0..parts {
            for row in (0..rows).step_by(bm as usize) {
                // In the logical matrix, and in the buffer whose pieces hold a part of every rank.
                let logical = if parts == 1 { piece * rows } else { self.first_row(part, piece) } + row;
                let packed = (piece * parts + part) * rows + row;
                let (a, out) = match self.of {
                    Baseline::AgGemm => ((PARTS, packed * k_bytes), (OUT, logical * n_bytes)),
                    Baseline::GemmAr => ((A, logical * k_bytes), (OUT, logical * n_bytes)),
                    _ => ((A, logical * k_bytes), (PARTS, packed * n_bytes)),
                };
                blocks.push(RowBlock { a, b: 0, out });
            }
        }
        blocks
    }

    fn collective(&self, piece: u64) -> Task {
        let (rows, ranks) = (self.piece_rows, self.ranks());
        let width = if self.of == Baseline::AgGemm { self.k } else { self.n } * 2;
        let one = |buffer| Region::contiguous(buffer, piece * rows * width, rows as u32, width as u32);
        let all =
            |buffer| Region::contiguous(buffer, piece * ranks * rows * width, (ranks * rows) as u32, width as u32);
        match self.of {
            Baseline::AgGemm => collective(CollectiveKind::AllGather, one(A), all(PARTS)),
            Baseline::GemmAr => collective(CollectiveKind::AllReduce, one(OUT), one(OUT)),
            _ => collective(CollectiveKind::ReduceScatter, all(PARTS), one(OUT)),
        }
    }
}

impl Plan for Dense {
    fn buffers(&self) -> Vec<Buffer> {
        let (m, n, k, ranks) = (self.m, self.n, self.k, self.ranks());
        let (a_rows, out_rows, parts) = match self.of {
            Baseline::AgGemm => (m / ranks, m, m * k),
            Baseline::GemmAr => (m, m, 0),
            _ => (m, m / ranks, m * n),
        };
        vec![
            buffer("a", a_rows * k * 2, BufferUse::Input),
            buffer("b", k * n * 2, BufferUse::Input),
            buffer("out", out_rows * n * 2, BufferUse::Output),
            buffer("parts", parts * 2, BufferUse::Scratch),
        ]
    }

    fn useful_flops(&self) -> u64 {
        2 * self.m * self.n * self.k
    }

    fn tasks(&self, _rank: Rank, work: Work, piece: u64, sink: &mut dyn FnMut(Task)) {
        if work == Work::Collect {
            sink(self.collective(piece));
        } else {
            self.rule.tiles(&self.row_blocks(piece), (self.n, self.k), sink);
        }
    }
}

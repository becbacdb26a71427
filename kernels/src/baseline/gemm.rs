//! Tiles of the library GEMM.

use super::B;
use crate::options::Options;
use crate::schedule::{BufferId, Drain, MainLoop, Op, Place, Region, Task, TileOut, WriteMode};
use smallvec::smallvec;

/// How the library GEMM computes tiles: 128 x 256 like its own Hopper kernels, super-groups of row blocks.
pub(super) struct GemmRule {
    pub tile: [u64; 3],
    pub stages: u8,
    pub super_m: usize,
}

/// A row block of a GEMM: rows of A, rows of the output, and the B that it meets.
pub(super) struct RowBlock {
    pub a: (BufferId, u64),
    pub b: u64,
    pub out: (BufferId, u64),
}

impl GemmRule {
    pub fn new(options: &Options) -> Self {
        Self {
            tile: [options.int("tile_m"), options.int("tile_n"), options.int("tile_k")],
            stages: options.int("stages") as u8,
            super_m: options.int("super_m") as usize,
        }
    }

    /// Streams the tiles of some row blocks, `n` columns wide and `k` deep.
    pub fn tiles(&self, blocks: &[RowBlock], (n, k): (u64, u64), sink: &mut dyn FnMut(Task)) {
        let [bm, bn, _] = self.tile;
        for group in blocks.chunks(self.super_m) {
            for col in (0..n).step_by(bn as usize) {
                for block in group {
                    let (out, offset) = block.out;
                    let out = Region::matrix(out, offset + col * 2, bm as u32, (bn * 2) as u32, n * 2);
                    sink(Task::new(Op::GemmTile {
                        a: Region::matrix(block.a.0, block.a.1, bm as u32, (k * 2) as u32, k * 2),
                        b: Region::matrix(B, block.b + col * 2, k as u32, (bn * 2) as u32, n * 2),
                        outs: smallvec![TileOut { place: Place::me(out), mode: WriteMode::Store }],
                        tile: self.tile.map(|size| size as u16),
                        stages: self.stages,
                        drain: Drain::Overlap,
                        main_loop: MainLoop::Library,
                        notice: 0,
                    }));
                }
            }
        }
    }
}

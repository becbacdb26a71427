//! Where data lies: buffers, regions of them, and whose.

use crate::cluster::Offset;
use serde::{Deserialize, Serialize};

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 16-bit brain float.
    Bf16,
    /// 32-bit float.
    F32,
    /// 32-bit unsigned integer.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::U32 => 4,
        }
    }
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BufferUse {
    /// Holds the input slices of its kernel before a run. What no slice names, tasks may write: landed tokens, for
    /// example, lie beside the own ones.
    Input,
    /// Holds the result after the run.
    Output,
    /// Anything else; zero before the first run only if a task fills it.
    Scratch,
}

/// Index of a buffer in [`Schedule::buffers`](crate::Schedule::buffers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BufferId(pub u16);

/// A buffer: same name and size on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// Name, unique in the schedule.
    pub name: String,
    /// Size on each rank.
    pub bytes: u64,
    /// Element type.
    pub dtype: DType,
    /// Role of the buffer in the run.
    pub usage: BufferUse,
}

/// A strided box of bytes in a buffer: `blocks` x `rows` x `row_bytes`.
///
/// The bytes of a region are ordered block by block, row by row: row-major and tile-major are both one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// Rows of a block.
    pub rows: u32,
    /// Contiguous bytes of a row.
    pub row_bytes: u32,
    /// Bytes from one block to the next.
    pub block_pitch: u64,
    /// Bytes from one row to the next.
    pub row_pitch: u64,
}

impl Region {
    /// `rows` rows of `row_bytes`, `row_pitch` apart.
    pub const fn matrix(buffer: BufferId, offset: u64, rows: u32, row_bytes: u32, row_pitch: u64) -> Self {
        Self { buffer, offset, blocks: 1, rows, row_bytes, block_pitch: 0, row_pitch }
    }

    /// A contiguous run of bytes, as rows of `row_bytes` (a row holds at most `u32::MAX` bytes).
    pub const fn contiguous(buffer: BufferId, offset: u64, rows: u32, row_bytes: u32) -> Self {
        Self::matrix(buffer, offset, rows, row_bytes, row_bytes as u64)
    }

    /// Payload bytes.
    pub const fn bytes(&self) -> u64 {
        self.blocks as u64 * self.rows as u64 * self.row_bytes as u64
    }

    /// One past the last byte touched, or `offset` when empty.
    pub const fn end(&self) -> u64 {
        if self.bytes() == 0 {
            return self.offset;
        }
        self.offset
            + (self.blocks as u64 - 1) * self.block_pitch
            + (self.rows as u64 - 1) * self.row_pitch
            + self.row_bytes as u64
    }

    /// Calls `f(start, bytes)` for each contiguous run, in order; neighbouring rows that touch are one run.
    pub fn for_each_run(&self, mut f: impl FnMut(u64, u64)) {
        if self.bytes() == 0 {
            return;
        }
        let dense = self.row_pitch == u64::from(self.row_bytes) || self.rows == 1;
        for block in 0..u64::from(self.blocks) {
            let start = self.offset + block * self.block_pitch;
            if dense {
                f(start, u64::from(self.rows) * u64::from(self.row_bytes));
            } else {
                for row in 0..u64::from(self.rows) {
                    f(start + row * self.row_pitch, u64::from(self.row_bytes));
                }
            }
        }
    }
}

/// Whose memory or flags are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum At {
    /// The rank at this offset from the task's own rank.
    Offset(Offset),
    /// Every GPU of the own node through NVLink SHARP: a store is a multicast, a read an in-switch sum.
    AllLocal,
}

impl At {
    /// The task's own rank.
    pub const ME: Self = Self::Offset(Offset::ME);

    /// The GPU `dg` further in the own node.
    pub const fn local(dg: u16) -> Self {
        Self::Offset(Offset::local(dg))
    }

    /// The same-index GPU `dn` nodes further.
    pub const fn node(dn: u16) -> Self {
        Self::Offset(Offset::node(dn))
    }
}

/// A region on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// Whose memory.
    pub at: At,
    /// Which bytes.
    pub region: Region,
}

impl Place {
    /// A region of the own rank.
    pub const fn me(region: Region) -> Self {
        Self { at: At::ME, region }
    }
}

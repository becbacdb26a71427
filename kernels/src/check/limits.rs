//! What a GPU, a proxy and a wire format have room for.
//!
//! Inside, offsets are u64 and indices u32. A transport that packs them into fewer bits narrows with [`narrow`], which
//! names the field, the value and the limit instead of wrapping; the rules `machine` and `wire` say beforehand whether
//! it would.

use crate::schedule::{Drain, Engine, Op};
use serde::Serialize;

/// Bits that a transport's command has for each field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WireFormat {
    /// Byte offset in the source or destination buffer.
    pub offset_bits: u32,
    /// Bytes of one put.
    pub length_bits: u32,
    /// Slot of the arrival word.
    pub slot_bits: u32,
    /// Number of a NIC queue.
    pub queue_bits: u32,
}

impl WireFormat {
    /// Everything as wide as the schedule has it. An immediate has 32 bits, of which one is the bank and one the family's.
    pub const WIDE: Self = Self { offset_bits: 64, length_bits: 32, slot_bits: 30, queue_bits: 16 };
    /// 32-bit offsets and 16-bit tile numbers, which mKernel had until its pull request 21.
    pub const NARROW: Self = Self { offset_bits: 32, length_bits: 32, slot_bits: 16, queue_bits: 8 };
}

/// What a schedule must fit into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// SMs of the GPU; asked of the device, for an architecture's name does not tell.
    pub sms: u32,
    /// Shared memory that one CTA may have.
    pub shared_bytes: u64,
    /// NIC queues of a rank.
    pub queues: u32,
    /// Commands that the device-to-host ring holds.
    pub fifo_depth: u32,
    /// Writes in flight per queue.
    pub in_flight: u32,
    /// Fields of a command.
    pub wire: WireFormat,
}

impl Limits {
    /// A GPU with so many SMs of compute capability 9.0 (227 KiB of shared memory per block, CUDA programming guide), 64
    /// queues, a ring of 2,048 commands and 256 writes in flight.
    pub const fn hopper(sms: u32) -> Self {
        let shared_bytes = 227 * 1024;
        Self { sms, shared_bytes, queues: 64, fifo_depth: 2048, in_flight: 256, wire: WireFormat::WIDE }
    }
}

/// A value that a field of a wire format does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{field} = {value} does not fit the wire format, which holds at most {limit}")]
pub struct TooWide {
    /// Field.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
    /// Largest value that fits.
    pub limit: u64,
}

/// The value, if a field of so many bits holds it.
///
/// # Errors
/// [`TooWide`] with the field, the value and the limit.
pub const fn narrow(field: &'static str, value: u64, bits: u32) -> Result<u64, TooWide> {
    let limit = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
    if value <= limit { Ok(value) } else { Err(TooWide { field, value, limit }) }
}

/// Shared memory that an op asks of its CTA.
///
/// Model: a GEMM tile keeps `stages` operand panels of bf16; with `drain = overlap` a strip of 64 columns of the output (as
/// wide as a 128-byte swizzle) beside them, else the output goes through a stage. An attention tile keeps Q and `stages`
/// blocks of K and of V. Bulk copies and gathers keep what they have in flight; the other ops work in registers.
pub fn shared_bytes(op: &Op) -> u64 {
    match op {
        Op::GemmTile { tile, stages, drain, .. } => {
            let [bm, bn, bk] = tile.map(u64::from);
            let strip = if *drain == Drain::Overlap { bm * bn.min(64) * 2 } else { 0 };
            u64::from(*stages) * (bm + bn) * bk * 2 + strip
        }
        Op::AttentionTile { q, k, tile, stages, .. } => {
            q.bytes() + u64::from(*stages) * 2 * u64::from(tile[1]) * u64::from(k.row_bytes)
        }
        Op::Copy { engine: Engine::Bulk, in_flight_bytes, .. } => u64::from(*in_flight_bytes),
        Op::GatherRows { dst, in_flight_rows, .. } => u64::from(*in_flight_rows) * u64::from(dst.row_bytes),
        _ => 0,
    }
}

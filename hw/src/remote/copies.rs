//! A GPU's side of the bounce buffer: pinned host memory, and copy engines between it and the GPU's.

use crate::device::{Device, HwError, check};
use crate::memory::SharedMemory;
use crate::proxy::{Stream, write};
use crate::transport::TransportError;
use crate::transport::bounce::Copier;
use crate::transport::segment::Segment;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::Arc;

#[allow(clippy::needless_pass_by_value, reason = "it is a conversion")]
pub(super) fn copies_failed(error: HwError) -> TransportError {
    TransportError::Copies(error.to_string())
}

/// A host segment whose pages the driver has pinned, so that copies run by themselves.
pub(super) struct Pinned {
    segment: Arc<Segment>,
}

impl Pinned {
    pub(super) fn new(device: Device, segment: Arc<Segment>) -> Result<Self, HwError> {
        device.make_current()?;
        // SAFETY: the segment's mapping lives as long as `self`, which takes the pages back.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(segment.address().cast(), segment.bytes() as usize, 0)
        })?;
        Ok(Self { segment })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: registered once. After a trap the call fails, and nothing is left to undo.
        unsafe { sys::cuMemHostUnregister(self.segment.address().cast()) };
    }
}

/// Copies by copy engines between a GPU's memory and the segment that stands for it.
pub(super) struct Copies {
    pinned: Arc<Pinned>,
    /// Device address of what lies at this offset of the segment.
    at: (u64, u64),
    streams: [Stream; 2],
    /// Copies out and in that have ended, written by the streams.
    ended: SharedMemory,
    begun: [u64; 2],
}

impl Copies {
    pub(super) fn new(device: Device, pinned: Arc<Pinned>, at: (u64, u64)) -> Result<Self, HwError> {
        device.make_current()?;
        Ok(Self { pinned, at, streams: [Stream::new()?, Stream::new()?], ended: SharedMemory::new(8)?, begun: [0; 2] })
    }

    fn begin(&mut self, way: usize, offset: u64, bytes: u64) -> Result<(), HwError> {
        let (gpu, from) = self.at;
        let (device, stream) = (gpu + offset - from, &self.streams[way]);
        let segment = &self.pinned.segment;
        assert!(offset + bytes <= segment.bytes(), "bytes {offset}..{} of a segment", offset + bytes);
        // SAFETY: inside the pinned segment, as just checked, and inside the GPU's memory, whose buffers lie alike; both
        // outlive the connection.
        unsafe {
            let host = segment.address().add(offset as usize).cast::<c_void>();
            match way {
                OUT => check("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(host, device, bytes as usize, stream.0))?,
                _ => check("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(device, host, bytes as usize, stream.0))?,
            }
        }
        self.begun[way] += 1;
        write(stream, self.ended.address + way as u64 * 4, self.begun[way] as u32)
    }

    fn ended(&self, way: usize) -> u64 {
        let seen: u32 = self.ended.get(way);
        // The word wraps, and is never 2^32 copies behind.
        self.begun[way] - u64::from((self.begun[way] as u32).wrapping_sub(seen))
    }
}

const OUT: usize = 0;
const IN: usize = 1;

impl Copier for Copies {
    fn name(&self) -> &'static str {
        "GPU memory through pinned host memory"
    }

    fn begin_out(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
        self.begin(OUT, offset, bytes).map_err(copies_failed)
    }

    fn begin_in(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
        self.begin(IN, offset, bytes).map_err(copies_failed)
    }

    fn ended(&mut self) -> Result<(u64, u64), TransportError> {
        Ok((Self::ended(self, OUT), Self::ended(self, IN)))
    }
}

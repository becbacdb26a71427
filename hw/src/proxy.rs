//! The loopback proxy: a host thread behind the device-to-host FIFO that carries puts out by the copy engine.
//!
//! ```text
//! CTA ── FIFO in host memory ──▶ proxy thread ──▶ stream of the queue: copy, then the arrival word
//! ```
//!
//! The FIFO is a [`Ring`], the one that [`crate::transport::ring::Puts`] serves over any transport; here the transport is
//! the copy engine, whose completions are a stream's. The arrival word is written by the stream after its copy, as an immediate arrives with its data.

use crate::device::{Device, HwError, Module, check};
use crate::memory::{DeviceMemory, SharedMemory};
use crate::transport::ring::Ring;
use cudarc::driver::sys;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A driver's copy from device memory to device memory of the same GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethod {
    /// A batch of one, asked to overlap with computation.
    Batch,
    /// One row of a matrix.
    Matrix,
    /// The plain copy.
    Plain,
    /// To pinned host memory and back.
    Host,
}

/// A put with its addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Posting {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    pub(crate) bytes: u64,
    pub(crate) queue: u16,
    /// Rank that sends it.
    pub(crate) link: u32,
    pub(crate) arrived: u64,
    /// Address of the counter of read sources, or 0.
    pub(crate) sent: u64,
}

/// Streams of the queues and the way to copy.
#[derive(Debug)]
pub struct Proxy {
    device: Device,
    queues: Vec<Queue>,
    /// How it copies.
    pub method: CopyMethod,
    /// What became of each method that was tried beside a kernel that owns every SM: time of 1 MiB, none if it starved.
    pub tried: Vec<(CopyMethod, Option<Duration>)>,
    /// Raises words apart from copies.
    words: Stream,
    /// By queue: copies done, counted over all runs.
    landed: SharedMemory,
    pacing: Option<Pacing>,
}

/// An emulated fabric. Every rank has one link, which takes its puts one after the other: each holds it for its bytes at
/// the bandwidth, and for no less than a message's share of the message rate. It lands a latency later, or when its copy
/// is done, if that is later: no fabric faster than the copy can be emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pacing {
    /// From the end of a put's time on the link to its arrival, on top of the proxy's own.
    pub latency_ns: u64,
    /// Of a link.
    pub bytes_per_s: u64,
    /// Of a link.
    pub messages_per_s: u64,
}

impl Pacing {
    /// Time that a put holds its link.
    fn service(&self, bytes: u64) -> Duration {
        let ns =
            |amount: u64, per_s: u64| (u128::from(amount) * 1_000_000_000).div_ceil(u128::from(per_s.max(1))) as u64;
        Duration::from_nanos(ns(bytes, self.bytes_per_s).max(ns(1, self.messages_per_s)))
    }
}

/// A put on its way.
struct Flying {
    put: Posting,
    /// Value of the queue's counter when its copy is done.
    copied: u32,
    /// When it lands.
    due: Instant,
}

/// A stream, and host memory for copies that go there.
#[derive(Debug)]
struct Queue {
    stream: Stream,
    bounce: SharedMemory,
    /// Copies that tell when they are done.
    posted: AtomicU32,
}

/// Bytes of a queue's host memory; larger puts go piece by piece.
const BOUNCE_BYTES: usize = 4 << 20;

/// A stream that waits for no other.
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) sys::CUstream);

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the handle is never written.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new() -> Result<Self, HwError> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` outlives the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self(stream))
    }

    /// Whether everything in it is over.
    pub(crate) fn is_done(&self) -> Result<bool, HwError> {
        // SAFETY: the stream is never destroyed.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuStreamQuery", result).map(|()| true),
        }
    }

    pub(crate) fn synchronize(&self) -> Result<(), HwError> {
        // SAFETY: the stream is never destroyed.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0) })
    }
}

fn copy(method: CopyMethod, dst: u64, src: u64, bytes: u64, queue: &Queue) -> Result<(), HwError> {
    let stream = &queue.stream;
    let (mut dst, mut src, mut bytes) = (dst, src, bytes as usize);
    // SAFETY: both ranges are inside allocations that outlive the stream's work; attributes outlive the call.
    unsafe {
        match method {
            CopyMethod::Host => {
                let host = queue.bounce.address;
                for at in (0..bytes).step_by(BOUNCE_BYTES) {
                    let part = BOUNCE_BYTES.min(bytes - at);
                    let (from, to) = (src + at as u64, dst + at as u64);
                    check("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(host as *mut c_void, from, part, stream.0))?;
                    check("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(to, host as *const c_void, part, stream.0))?;
                }
                Ok(())
            }
            CopyMethod::Plain => check("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(dst, src, bytes, stream.0)),
            CopyMethod::Matrix => {
                let row = if bytes.is_multiple_of(65_536) { 65_536 } else { bytes };
                let what = sys::CUDA_MEMCPY2D {
                    srcXInBytes: 0,
                    srcY: 0,
                    srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                    srcHost: std::ptr::null(),
                    srcDevice: src,
                    srcArray: std::ptr::null_mut(),
                    srcPitch: row,
                    dstXInBytes: 0,
                    dstY: 0,
                    dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                    dstHost: std::ptr::null_mut(),
                    dstDevice: dst,
                    dstArray: std::ptr::null_mut(),
                    dstPitch: row,
                    WidthInBytes: row,
                    Height: bytes / row,
                };
                check("cuMemcpy2DAsync", sys::cuMemcpy2DAsync_v2(&raw const what, stream.0))
            }
            CopyMethod::Batch => {
                let mut attributes: sys::CUmemcpyAttributes = std::mem::zeroed();
                attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
                attributes.flags = sys::CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as u32;
                let mut index = 0;
                let result = sys::cuMemcpyBatchAsync_v2(
                    &raw mut dst,
                    &raw mut src,
                    &raw mut bytes,
                    1,
                    &raw mut attributes,
                    &raw mut index,
                    1,
                    stream.0,
                );
                check("cuMemcpyBatchAsync", result)
            }
        }
    }
}

impl Proxy {
    /// A proxy with this many queues. Finds a copy to the memory of `to`, which may be another GPU, that runs beside a
    /// kernel that owns every SM.
    ///
    /// # Errors
    /// [`HwError::NoCopyEngine`], [`HwError::Cuda`].
    pub fn new(device: Device, module: Module, queues: u16, to: Device) -> Result<Self, HwError> {
        let queue = |_| {
            Ok(Queue { stream: Stream::new()?, bounce: SharedMemory::new(BOUNCE_BYTES)?, posted: AtomicU32::new(0) })
        };
        let queues = (0..queues.max(1)).map(queue).collect::<Result<Vec<_>, HwError>>()?;
        let mut tried = Vec::new();
        for method in [CopyMethod::Batch, CopyMethod::Matrix, CopyMethod::Plain, CopyMethod::Host] {
            tried.push((method, time_beside(device, module, method, &queues[0], to)?));
        }
        let Some(&(method, _)) = tried.iter().find(|(_, time)| time.is_some()) else {
            return Err(HwError::NoCopyEngine);
        };
        let landed = SharedMemory::new(queues.len() * 4)?;
        Ok(Self { device, queues, method, tried, words: Stream::new()?, landed, pacing: None })
    }

    /// From now on, emulates a fabric: see [`Pacing`].
    pub const fn pace(&mut self, pacing: Option<Pacing>) {
        self.pacing = pacing;
    }

    /// What this proxy emulates.
    pub const fn pacing(&self) -> Option<Pacing> {
        self.pacing
    }

    /// Carries out the puts of a run, whose commands come in these slots, until all have landed or `stop` is set with
    /// some never asked for.
    pub(crate) fn serve(
        &self,
        fifo: &SharedMemory,
        slots: Range<usize>,
        run: u32,
        postings: &[Posting],
        stop: &AtomicBool,
    ) -> Result<(), HwError> {
        self.device.make_current()?;
        let mut links = vec![Instant::now(); postings.iter().map(|put| put.link as usize + 1).max().unwrap_or(0)];
        let mut flying: Vec<VecDeque<Flying>> = self.queues.iter().map(|_| VecDeque::new()).collect();
        let mut sent: HashMap<u64, u32> = HashMap::new();
        let mut ring = Ring::new(fifo, slots, run);
        while !ring.is_over() || flying.iter().any(|queue| !queue.is_empty()) {
            // Before the look at the FIFO: what a launch asked for before it ended is there.
            let stopped = stop.load(Ordering::Acquire);
            if let Some(task) = ring.next_task() {
                let put = postings[task];
                let number = usize::from(put.queue) % self.queues.len();
                if let Some(lands) = self.post(&put, number, &mut links[put.link as usize])? {
                    flying[number].push_back(lands);
                }
            } else if stopped && !ring.is_over() {
                return Ok(());
            }
            for (number, queue) in flying.iter_mut().enumerate() {
                let landed: u32 = self.landed.get(number);
                let lands = |put: &mut Flying| reached(landed, put.copied) && Instant::now() >= put.due;
                while queue.front_mut().is_some_and(lands) {
                    let Some(Flying { put, .. }) = queue.pop_front() else { break };
                    write(&self.words, put.arrived, 1)?;
                    if put.sent != 0 {
                        let sent = sent.entry(put.sent).or_default();
                        *sent += 1;
                        write(&self.words, put.sent, *sent)?;
                    }
                }
            }
            if stopped {
                // A launch that failed takes its context along: no copy lands any more.
                self.queues.iter().try_for_each(|queue| queue.stream.is_done().map(drop))?;
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Starts a put's copy. Without pacing its arrival word follows in the stream; else, and when someone counts the puts
    /// that have left, the serving loop raises it.
    fn post(&self, put: &Posting, number: usize, link: &mut Instant) -> Result<Option<Flying>, HwError> {
        let queue = &self.queues[number];
        if put.bytes > 0 {
            copy(self.method, put.dst, put.src, put.bytes, queue)?;
        }
        if self.pacing.is_none() && put.sent == 0 {
            write(&queue.stream, put.arrived, 1)?;
            return Ok(None);
        }
        let now = Instant::now();
        let due = self.pacing.map_or(now, |pacing| {
            *link = now.max(*link) + pacing.service(put.bytes);
            *link + Duration::from_nanos(pacing.latency_ns)
        });
        let copied = queue.posted.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        write(&queue.stream, self.landed.address + number as u64 * 4, copied)?;
        Ok(Some(Flying { put: *put, copied, due }))
    }

    /// Waits until all posted puts are over.
    pub(crate) fn drain(&self) -> Result<(), HwError> {
        self.queues.iter().try_for_each(|queue| queue.stream.synchronize())?;
        self.words.synchronize()
    }
}

/// Writes a word of device or pinned memory behind whatever else is in the stream.
pub(crate) fn write(stream: &Stream, word: u64, value: u32) -> Result<(), HwError> {
    // SAFETY: the word is inside an allocation that outlives the stream's work.
    check("cuStreamWriteValue32", unsafe { sys::cuStreamWriteValue32_v2(stream.0, word, value, 0) })
}

/// Whether a counter that may wrap has come to a value.
const fn reached(counter: u32, value: u32) -> bool {
    counter.wrapping_sub(value) < 1 << 31
}

/// How long a copy and a word write to the memory of `to` take while a kernel owns every SM of `device`; none if they do
/// not end before it does.
fn time_beside(
    device: Device,
    module: Module,
    method: CopyMethod,
    queue: &Queue,
    to: Device,
) -> Result<Option<Duration>, HwError> {
    const BYTES: u64 = 1 << 20;
    const PATIENCE: Duration = Duration::from_millis(40);
    let words = SharedMemory::new(4 * (1 + 2 * device.sms as usize))?;
    to.make_current()?;
    let there = DeviceMemory::new(BYTES as usize + 256)?;
    device.make_current()?;
    let here = DeviceMemory::new(BYTES as usize)?;
    let holder = module.function("hold_all_sms", 0)?;
    let stream = &queue.stream;
    let blocks = 2 * device.sms;
    let all_begun = || (1..=blocks as usize).all(|block| words.get::<u32>(block) == 1);
    let on = Stream::new()?;
    // Whatever the driver loads at a first use must not wait for the kernel.
    if copy(method, there.address, here.address, BYTES, queue).is_err() {
        return Ok(None);
    }
    stream.synchronize()?;
    let (mut release, mut begun) = (words.address, words.address + 4);
    let mut parameters: [*mut c_void; 2] = [(&raw mut release).cast(), (&raw mut begun).cast()];
    // SAFETY: the entry takes two pointers; both are to memory that outlives the launch, which ends below.
    check("cuLaunchKernel", unsafe {
        let none = std::ptr::null_mut();
        sys::cuLaunchKernel(holder, blocks, 1, 1, 1024, 1, 1, 0, on.0, parameters.as_mut_ptr(), none)
    })?;
    let begin = Instant::now();
    while !all_begun() && begin.elapsed() < PATIENCE {
        std::hint::spin_loop();
    }
    let held = all_begun();
    let begin = Instant::now();
    let posted =
        copy(method, there.address, here.address, BYTES, queue).and_then(|()| write(stream, there.address + BYTES, 1));
    let mut done = None;
    while posted.is_ok() && done.is_none() && begin.elapsed() < PATIENCE {
        done = stream.is_done()?.then(|| begin.elapsed());
    }
    words.put(0, 1u32);
    on.synchronize()?;
    stream.synchronize()?;
    Ok(done.filter(|_| held))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_put_holds_its_link_for_its_bytes_or_its_share_of_the_message_rate() {
        let pacing = Pacing { latency_ns: 3_000, bytes_per_s: 50_000_000_000, messages_per_s: 1_000_000 };
        assert_eq!(pacing.service(500_000), Duration::from_micros(10));
        assert_eq!(pacing.service(0), Duration::from_micros(1));
    }

    #[test]
    fn counters_wrap() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(1, u32::MAX) && !reached(u32::MAX, 1));
    }
}

//! Runs a lowered program on a GPU: arenas, parameters, the launch, the proxy beside it, the watchdog's report.
//!
//! A GPU's memory is taken first ([`Memory`]), descriptors are written when the memory of all GPUs that they name is
//! there ([`Addresses`]).

mod arenas;
mod maps;

pub(crate) use arenas::place;
pub use arenas::{Addresses, Memory};

use crate::device::{Device, HwError, Module, check};
use crate::lower::{MAX_MAPS, MapSpec, Program};
use crate::memory::{DeviceMemory, SharedMemory};
use crate::proxy::{Posting, Proxy, Stream};
use crate::remote::Remote;
use crate::timeline::{self, CtaTimes, Stamps, TaskTime};
use crate::upload::Arrays;
use arenas::words_bytes;
use cudarc::driver::sys;
use maps::{TensorMap, tensor_map};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use tilewire_kernels::{Blocked, RoleKind, Schedule};

/// Shared memory of a block: all there is, so that one CTA owns an SM.
const SMEM_BYTES: u32 = 232_448;
/// Parties of a CTA that may wait. Source: `program.cuh`.
const BLOCKED_PER_CTA: usize = 4;
/// Head dimension of attention tiles. Source: `attention_tile.cuh`.
const HEAD_DIM: f32 = 128.0;
/// Runs at most that are queued behind each other.
pub const MAX_BATCH: usize = 32;

/// `Program` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    tasks: u64,
    waits: u64,
    signals: u64,
    regions: u64,
    roles: u64,
    starts: u64,
    orders: u64,
    sources: u64,
    words: u64,
    fifo: u64,
    blocked: u64,
    times: u64,
    stamps: u64,
    fifo_head: u32,
    run: u32,
    peers: u32,
    maps: u32,
    scale_log2: f32,
    unused: u32,
}

/// `Blocked` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct BlockedWord {
    task: u32,
    word: u32,
    have: u32,
    need: u32,
}

/// What a run took.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RunTime {
    /// From before the first launch to the end of the last one, by the device's events.
    pub time_us: f64,
    /// From the first CTA's begin to the last one's end.
    pub span_us: f64,
    /// Clock of the SMs: cycles over time of the CTAs.
    pub sm_mhz: f64,
}

/// A program with its memory on the GPU, ready to run again and again.
pub struct Runner<'a> {
    /// What carries puts to other nodes, before the memory that it reads.
    remote: Option<Remote>,
    device: Device,
    schedule: &'a Schedule,
    program: Program,
    /// One per buffer and instance that lives here.
    pub arenas: Vec<DeviceMemory>,
    words: DeviceMemory,
    addresses: Addresses,
    memory: Arrays,
    /// By run of a batch, launch and block.
    times: DeviceMemory,
    /// By task, when they are recorded.
    stamps: Option<DeviceMemory>,
    maps: Vec<TensorMap>,
    handles: Handles,
    fifo: SharedMemory,
    blocked: SharedMemory,
    postings: Vec<Posting>,
    puts: usize,
    proxy: &'a Proxy,
    stream: Stream,
    run: u32,
}

/// The driver's handles of a runner.
struct Handles {
    module: Module,
    function: sys::CUfunction,
    /// `tensor_maps` of `program.cuh`: what runs next is written there.
    maps: sys::CUdeviceptr,
    /// Before the first launch and after the last, for every run of a batch.
    events: Vec<[sys::CUevent; 2]>,
}

// SAFETY: handles may be used from any thread whose context is theirs; none is ever destroyed.
unsafe impl Send for Handles {}
// SAFETY: as above; they are never written.
unsafe impl Sync for Handles {}

/// Blocks of all launches.
fn blocks(program: &Program) -> usize {
    program.launches.iter().map(|launch| launch.starts.len()).sum()
}

fn cta_times_memory(program: &Program) -> Result<DeviceMemory, HwError> {
    DeviceMemory::new(MAX_BATCH * blocks(program) * size_of::<CtaTimes>())
}

impl<'a> Runner<'a> {
    /// Takes memory and uploads a program that needs no other GPU.
    ///
    /// # Errors
    /// [`HwError::Cuda`], for example when the GPU has too little memory.
    pub fn new(
        device: Device,
        module: Module,
        proxy: &'a Proxy,
        schedule: &'a Schedule,
        program: Program,
    ) -> Result<Self, HwError> {
        let memory = Memory::new(device, &program)?;
        let addresses = Addresses::of(std::iter::once(&memory));
        Self::with_memory(device, module, proxy, schedule, program, memory, &addresses)
    }

    /// Uploads a program that may name memory of other GPUs.
    ///
    /// # Errors
    /// [`HwError::Cuda`], for example when the GPU has too little memory.
    pub fn with_memory(
        device: Device,
        module: Module,
        proxy: &'a Proxy,
        schedule: &'a Schedule,
        program: Program,
        Memory { arenas, words }: Memory,
        addresses: &Addresses,
    ) -> Result<Self, HwError> {
        device.make_current()?;
        let events = (0..MAX_BATCH).map(|_| Ok([new_event()?, new_event()?])).collect::<Result<_, HwError>>()?;
        let mut runner = Self {
            remote: None,
            device,
            schedule,
            fifo: SharedMemory::new(0)?,
            blocked: SharedMemory::new(0)?,
            postings: Vec::new(),
            puts: 0,
            arenas,
            words,
            memory: Arrays::new(&program, addresses)?,
            times: cta_times_memory(&program)?,
            stamps: None,
            handles: Handles {
                module,
                function: module.function(&program.entry, SMEM_BYTES)?,
                maps: module.variable("tensor_maps", MAX_MAPS * size_of::<TensorMap>())?,
                events,
            },
            addresses: addresses.clone(),
            program: Program::default(),
            maps: Vec::new(),
            proxy,
            stream: Stream::new()?,
            run: 0,
        };
        runner.prepare(program)?;
        Ok(runner)
    }

    /// Runs another program of the same schedule from now on: another split, or a reduced form. Arenas stay as they are.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn replace(&mut self, program: Program) -> Result<(), HwError> {
        self.device.make_current()?;
        self.memory = Arrays::new(&program, &self.addresses)?;
        (self.times, self.stamps) = (cta_times_memory(&program)?, None);
        self.handles.function = self.handles.module.function(&program.entry, SMEM_BYTES)?;
        self.prepare(program)
    }

    fn prepare(&mut self, program: Program) -> Result<(), HwError> {
        let base = |arena: u32| self.addresses.arenas[arena as usize];
        let posting = |put: crate::lower::PutCopy| Posting {
            src: base(put.src.0) + put.src.1,
            dst: base(put.dst.0) + put.dst.1,
            bytes: put.bytes,
            queue: put.queue,
            link: put.src.0 / self.schedule.buffers.len().max(1) as u32,
            arrived: self.addresses.word(put.arrived.0, put.arrived.1),
            sent: put.sent.map_or(0, |sent| self.addresses.word(program.gpu, sent)),
        };
        let map = |map: &MapSpec| tensor_map(map, base(map.arena), program.arenas[map.arena as usize]);
        self.maps = program.maps.iter().map(map).collect::<Result<_, _>>()?;
        self.postings = program.puts.iter().map(|put| put.map_or_else(Posting::default, posting)).collect();
        self.puts = program.puts.iter().flatten().count();
        self.fifo = SharedMemory::new(MAX_BATCH * (self.puts + 1) * 8)?;
        self.blocked = SharedMemory::new(blocks(&program) * BLOCKED_PER_CTA * size_of::<BlockedWord>())?;
        self.program = program;
        Ok(())
    }

    /// From now on puts go by `remote`.
    pub(crate) fn reach(&mut self, remote: Remote) {
        assert_eq!(remote.tasks(), self.program.tasks.len(), "writes for every task of the program");
        self.remote = Some(remote);
    }

    /// Makes the GPU's context current in this thread.
    pub(crate) fn make_current(&self) -> Result<(), HwError> {
        self.device.make_current()
    }

    /// The lowered program.
    pub const fn program(&self) -> &Program {
        &self.program
    }

    /// Number of this GPU's first arena among those of all GPUs.
    pub fn first_arena(&self) -> usize {
        self.program.gpu as usize * self.arenas.len()
    }

    /// One run with fresh flags.
    ///
    /// # Errors
    /// [`HwError::Stuck`] when the watchdog ended it, [`HwError::Cuda`].
    pub fn run(&mut self) -> Result<RunTime, HwError> {
        self.reset()?;
        Ok(self.run_ready(|| true)?.expect("it was let start"))
    }

    /// Runs queued behind each other, each with fresh flags, so that the card stays under load.
    ///
    /// Other GPUs, and puts that no task waits for, could reach into the next run's flags: such programs run one by one.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn back_to_back(&mut self, count: usize) -> Result<Vec<RunTime>, HwError> {
        let alone = self.program.gpus == 1 && self.program.awaits_all_puts();
        let at_once = if alone { MAX_BATCH } else { 1 };
        let mut times = Vec::with_capacity(count);
        while times.len() < count {
            let batch = at_once.min(count - times.len());
            self.reset()?;
            self.batch(batch, || true)?;
            self.run += batch as u32 - 1;
            for index in 0..batch {
                times.push(self.time_of(index)?);
            }
        }
        Ok(times)
    }

    /// Fresh flags, and the module's maps are this program's; over when it returns.
    pub(crate) fn reset(&mut self) -> Result<(), HwError> {
        self.device.make_current()?;
        self.run += 1;
        self.clear_words()?;
        let (maps, bytes) = (self.maps.as_ptr().cast(), size_of_val(&*self.maps));
        // SAFETY: `Module::variable` has room for `MAX_MAPS`, and no program has more.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.handles.maps, maps, bytes, self.stream.0)
        })?;
        self.stream.synchronize()
    }

    fn clear_words(&self) -> Result<(), HwError> {
        let (words, bytes) = (self.words.address, words_bytes(&self.program));
        // SAFETY: the range is the allocation.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(words, 0, bytes, self.stream.0) })
    }

    /// A run after [`Runner::reset`], with `start` called just before the first launch command; none if it says no.
    pub(crate) fn run_ready(&self, start: impl FnOnce() -> bool) -> Result<Option<RunTime>, HwError> {
        if self.batch(1, start)? { self.time_of(0).map(Some) } else { Ok(None) }
    }

    /// Runs from `self.run` on; false if `start` says no.
    fn batch(&self, count: usize, start: impl FnOnce() -> bool) -> Result<bool, HwError> {
        let stop = AtomicBool::new(false);
        let ended = std::thread::scope(|scope| {
            let serve = || {
                (0..count).try_for_each(|index| {
                    let first = index * (self.puts + 1);
                    let (slots, run) = (first..first + self.puts, self.run + index as u32);
                    match &self.remote {
                        Some(remote) => remote.serve(&self.fifo, slots, run, &stop),
                        None => self.proxy.serve(&self.fifo, slots, run, &self.postings, &stop),
                    }
                })
            };
            let proxy = (self.puts > 0 || self.remote.is_some()).then(|| scope.spawn(serve));
            let go = start();
            let ended = if go { self.launch_and_wait(count) } else { Ok(()) };
            stop.store(true, Ordering::Release);
            let served = proxy.map_or(Ok(()), |proxy| proxy.join().expect("the proxy does not panic"));
            ended.and(served).and_then(|()| self.proxy.drain()).map(|()| go)
        });
        ended.map_err(|error| {
            let blocked = self.blocked_ctas();
            if blocked.is_empty() { error } else { HwError::Stuck(blocked) }
        })
    }

    fn launch_and_wait(&self, count: usize) -> Result<(), HwError> {
        let stream = self.stream.0;
        let mut first_block = 0;
        for (index, [begin, end]) in self.handles.events.iter().enumerate().take(count) {
            if index > 0 {
                self.clear_words()?;
            }
            // SAFETY: events and stream live as long as `self`.
            check("cuEventRecord", unsafe { sys::cuEventRecord(*begin, stream) })?;
            for (launch, starts) in self.program.launches.iter().zip(&self.memory.starts) {
                let mut parameters = Parameters {
                    tasks: self.memory.tasks.address,
                    waits: self.memory.waits.address,
                    signals: self.memory.signals.address,
                    regions: self.memory.regions.address,
                    roles: self.memory.roles.address,
                    starts: starts.address,
                    orders: self.memory.orders.address,
                    sources: self.memory.sources.address,
                    words: self.words.address,
                    fifo: self.fifo.address + (index * (self.puts + 1) * 8) as u64,
                    blocked: self.blocked.address,
                    times: self.times.address + (first_block * size_of::<CtaTimes>()) as u64,
                    stamps: self.stamps.as_ref().map_or(0, |stamps| stamps.address),
                    fifo_head: self.program.words,
                    run: self.run + index as u32,
                    peers: u32::from(self.program.gpus > 1),
                    maps: self.program.maps.len() as u32,
                    scale_log2: std::f32::consts::LOG2_E / f32::sqrt(HEAD_DIM),
                    unused: 0,
                };
                let mut list: [*mut c_void; 1] = [(&raw mut parameters).cast()];
                let (blocks, threads) = (launch.starts.len() as u32, self.program.threads);
                let (function, list, none) = (self.handles.function, list.as_mut_ptr(), std::ptr::null_mut());
                // SAFETY: memory lives as long as `self`; parameters are copied by the launch.
                check("cuLaunchKernel", unsafe {
                    sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, SMEM_BYTES, stream, list, none)
                })?;
                first_block += launch.starts.len();
            }
            // SAFETY: as above.
            check("cuEventRecord", unsafe { sys::cuEventRecord(*end, stream) })?;
        }
        while !self.stream.is_done()? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Times of the `index`-th run of the last batch.
    fn time_of(&self, index: usize) -> Result<RunTime, HwError> {
        let mut ms = 0.0;
        let [begin, end] = self.handles.events[index];
        // SAFETY: both events were recorded and are over.
        check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime_v2(&raw mut ms, begin, end) })?;
        let times = self.cta_times(index)?;
        let begin = times.iter().map(|t| t.begin_ns).min().unwrap_or(0);
        let end = times.iter().map(|t| t.end_ns).max().unwrap_or(0);
        let (cycles, ns) =
            times.iter().fold((0, 0), |(c, n), t| (c + (t.end_cycles - t.begin_cycles), n + (t.end_ns - t.begin_ns)));
        Ok(RunTime {
            time_us: f64::from(ms) * 1e3,
            span_us: (end - begin) as f64 * 1e-3,
            sm_mhz: cycles as f64 / ns.max(1) as f64 * 1e3,
        })
    }

    /// Of the `index`-th run of the last batch, all launches, block by block.
    fn cta_times(&self, index: usize) -> Result<Vec<CtaTimes>, HwError> {
        let blocks = blocks(&self.program);
        self.times.read_at(index * blocks * size_of::<CtaTimes>(), blocks)
    }

    /// From now on, runs record when each task went on, or no longer do. It costs a few stores per task.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn record(&mut self, on: bool) -> Result<(), HwError> {
        let bytes = self.program.tasks.len() * size_of::<Stamps>();
        self.device.make_current()?;
        self.stamps = if on { Some(DeviceMemory::new(bytes)?) } else { None };
        Ok(())
    }

    /// The tasks of the last [`Runner::run`], in the order in which they were taken; empty unless [`Runner::record`] was on.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn timeline(&self) -> Result<Vec<TaskTime>, HwError> {
        let Some(stamps) = &self.stamps else { return Ok(Vec::new()) };
        self.device.make_current()?;
        let stamps: Vec<Stamps> = stamps.read(self.program.tasks.len())?;
        let times = self.cta_times(0)?;
        Ok(timeline::task_times(&self.program, &stamps, &times))
    }

    /// What the CTAs wait for, as they last wrote it down.
    fn blocked_ctas(&self) -> Vec<Blocked> {
        let mut found = Vec::new();
        for slot in 0..blocks(&self.program) * BLOCKED_PER_CTA {
            let BlockedWord { task, word, have, need } = self.blocked.get(slot);
            let Some(index) = task.checked_sub(1) else { continue };
            let Some((role, name)) =
                self.program.role_of(index).and_then(|role| Some((role, self.program.role_names[role]?)))
            else {
                continue;
            };
            let (flag, slot_of_family) = self
                .program
                .flag_of(word)
                .map_or(("(unknown)", 0), |(_, family, slot)| (self.schedule.flags[family].name.as_str(), slot));
            found.push(Blocked {
                rank: name.rank,
                launch: self.schedule.launches[name.launch].name.clone(),
                role: if self.program.roles[role].tiles == 1 { RoleKind::Compute } else { name.kind },
                cta: (slot / BLOCKED_PER_CTA) as u32,
                task: self.program.tasks[index as usize].number,
                flag: flag.to_owned(),
                slot: slot_of_family,
                have,
                need,
            });
        }
        found
    }
}

fn new_event() -> Result<sys::CUevent, HwError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: `event` outlives the call; flag 0 keeps timing on.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, 0) })?;
    Ok(event)
}

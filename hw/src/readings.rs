//! Times that no schedule shows by itself: flags, words in host memory, the FIFO, barriers, launches.

use crate::device::{self, Device, HwError, Module, check};
use crate::memory::{DeviceMemory, SharedMemory};
use crate::proxy::Stream;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::time::Instant;
use tilewire_kernels::cuda::PROBES;

/// Shared memory of a block, so that one owns an SM, as the interpreter's do.
const SMEM_BYTES: u32 = 200 * 1024;
/// Turns of a probe, which are averaged.
const ROUNDS: u32 = 1000;
/// Launches in a row.
const LAUNCHES: usize = 32;
/// Readings of each quantity, after one that warms up.
const REPEATS: usize = 21;

/// A quantity and what was read of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantity {
    /// Name, unit last.
    pub name: &'static str,
    /// How it was read.
    pub how: &'static str,
    /// Readings, in order.
    pub readings: Vec<f64>,
}

/// Reads all quantities off the first GPU here.
///
/// # Errors
/// [`HwError`]; a machine without driver, compiler or GPU is one.
pub fn read() -> Result<Vec<Quantity>, HwError> {
    let cubin = device::compile(PROBES)?;
    let device = Device::open()?;
    let bench = Bench { device, module: device.load(&cubin.bytes)?, stream: Stream::new()? };
    let each = |what: &dyn Fn() -> Result<f64, HwError>| -> Result<Vec<f64>, HwError> {
        what()?;
        (0..REPEATS).map(|_| what()).collect()
    };
    let commands: Vec<(f64, f64)> = (0..=REPEATS).map(|_| bench.fifo()).collect::<Result<_, _>>()?;
    let (pushed, taken) = commands.into_iter().skip(1).unzip();
    let quantity = |name, how, readings| Quantity { name, how, readings };
    Ok(vec![
        quantity("flag_one_way_ns", "two CTAs by turns: fence, add, acquire", each(&|| bench.flags())?),
        quantity("host_round_trip_ns", "a word in host memory, answered by a spinning thread", each(&|| bench.host())?),
        quantity("fifo_push_ns", "commands of one thread, one behind the other", pushed),
        quantity("fifo_service_ns", "the same commands, taken by a spinning thread", taken),
        quantity("grid_barrier_ns", "one block of 384 threads on every SM", each(&|| bench.barrier())?),
        quantity(
            "launch_gap_ns",
            "last end of a launch to the first begin of the next one in its stream",
            bench.gaps()?,
        ),
    ])
}

struct Bench {
    device: Device,
    module: Module,
    stream: Stream,
}

impl Bench {
    /// Puts a kernel into the stream.
    fn launch(&self, name: &str, blocks: u32, threads: u32, smem: u32, arguments: &mut [u64]) -> Result<(), HwError> {
        let function = self.module.function(name, smem)?;
        let mut list: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
        let (stream, none) = (self.stream.0, std::ptr::null_mut());
        // SAFETY: arguments are as long as or longer than the kernel's, and are copied by the launch.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, smem, stream, list.as_mut_ptr(), none)
        })
    }

    fn flags(&self) -> Result<f64, HwError> {
        let (words, ns) = (DeviceMemory::new(1024)?, SharedMemory::new(8)?);
        words.set(0)?;
        self.launch("probe_flags", 2, 32, SMEM_BYTES, &mut [words.address, ROUNDS.into(), ns.address])?;
        self.stream.synchronize()?;
        Ok(ns.get::<u64>(0) as f64 / f64::from(2 * ROUNDS))
    }

    fn host(&self) -> Result<f64, HwError> {
        let (asked, answered, ns) = (SharedMemory::new(64)?, SharedMemory::new(64)?, SharedMemory::new(8)?);
        let mut arguments = [asked.address, answered.address, ROUNDS.into(), ns.address];
        self.launch("probe_host", 1, 32, SMEM_BYTES, &mut arguments)?;
        let mut last = 0;
        while last < ROUNDS {
            let now: u32 = asked.get(0);
            if now != last {
                answered.put(0, now);
                last = now;
            } else if self.stream.is_done()? {
                break;
            }
        }
        self.stream.synchronize()?;
        Ok(ns.get::<u64>(0) as f64 / f64::from(ROUNDS))
    }

    /// Per command: pushed by the device, taken by the host.
    fn fifo(&self) -> Result<(f64, f64), HwError> {
        let (head, fifo, ns) = (DeviceMemory::new(64)?, SharedMemory::new(ROUNDS as usize * 8)?, SharedMemory::new(8)?);
        head.set(0)?;
        let mut arguments = [head.address, fifo.address, ROUNDS.into(), ns.address];
        self.launch("probe_fifo", 1, 32, SMEM_BYTES, &mut arguments)?;
        let mut first = None;
        for slot in 0..ROUNDS as usize {
            let mut looks = 0_u32;
            while fifo.get::<u64>(slot) == 0 {
                looks += 1;
                // A kernel that failed fills no slot; its stream says so, but asking it takes longer than a look.
                if looks.is_multiple_of(1 << 16) {
                    self.stream.is_done()?;
                }
            }
            first.get_or_insert_with(Instant::now);
        }
        let seen_ns = first.map_or(0.0, |first| first.elapsed().as_secs_f64() * 1e9);
        self.stream.synchronize()?;
        Ok((ns.get::<u64>(0) as f64 / f64::from(ROUNDS), seen_ns / f64::from(ROUNDS - 1)))
    }

    fn barrier(&self) -> Result<f64, HwError> {
        let (word, ns) = (DeviceMemory::new(64)?, SharedMemory::new(8)?);
        word.set(0)?;
        self.launch("probe_barrier", self.device.sms, 384, SMEM_BYTES, &mut [word.address, ROUNDS.into(), ns.address])?;
        self.stream.synchronize()?;
        Ok(ns.get::<u64>(0) as f64 / f64::from(ROUNDS))
    }

    fn gaps(&self) -> Result<Vec<f64>, HwError> {
        let blocks = self.device.sms as usize;
        let (begins, ends) = (DeviceMemory::new(LAUNCHES * blocks * 8)?, DeviceMemory::new(LAUNCHES * blocks * 8)?);
        let at = |memory: &DeviceMemory, launch: usize| memory.address + (launch * blocks * 8) as u64;
        for launch in 0..LAUNCHES {
            let mut arguments = [at(&begins, launch), at(&ends, launch)];
            self.launch("probe_launch", self.device.sms, 384, SMEM_BYTES, &mut arguments)?;
        }
        self.stream.synchronize()?;
        let (begins, ends) = (begins.read::<u64>(LAUNCHES * blocks)?, ends.read::<u64>(LAUNCHES * blocks)?);
        let of = |times: &[u64], launch: usize| times[launch * blocks..][..blocks].to_vec();
        // The first ones find an idle stream.
        let gap = |launch: usize| {
            let end = of(&ends, launch - 1).into_iter().max().unwrap_or(0);
            let begin = of(&begins, launch).into_iter().min().unwrap_or(0);
            begin as f64 - end as f64
        };
        Ok((LAUNCHES - REPEATS..LAUNCHES).map(gap).collect())
    }
}

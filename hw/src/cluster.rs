//! The GPUs of one host that share a schedule, a program each: one process, a thread per GPU.
//!
//! ```text
//! every rank: fresh flags, then the barrier      outside the timed span
//! every rank: launch ── flags and bytes over NVLink ── end
//! time: from the first rank's launch command to the last rank's end
//! ```
//!
//! The barrier is a word of host memory that the threads spin on, so ranks start within some microseconds; by how much
//! is part of the result. A rank's end is its own event's: the time of rank r is the host's clock at its launch command,
//! less the first rank's, plus what its events say.

use crate::device::{Device, HwError, Module};
use crate::launch::{Addresses, Memory, RunTime, Runner};
use crate::lower::Program;
use crate::measure::{Compared, Inputs};
use crate::proxy::Proxy;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use tilewire_kernels::{Kernel, Schedule, Spec};

/// What a rank runs on.
#[derive(Debug)]
pub struct Seat {
    /// GPU.
    pub device: Device,
    /// The interpreter there.
    pub module: Module,
    /// The rank's proxy.
    pub proxy: Proxy,
}

impl Seat {
    /// The first `count` GPUs here, connected, each with the interpreter loaded and a proxy of `queues` queues.
    ///
    /// # Errors
    /// [`HwError::TooFewGpus`], and as [`Device::all`], [`Device::connect`] and [`Proxy::new`].
    pub fn first(count: usize, cubin: &[u8], queues: u16) -> Result<Vec<Self>, HwError> {
        let mut devices = Device::all()?;
        if devices.len() < count {
            return Err(HwError::TooFewGpus { ranks: count, gpus: devices.len() });
        }
        devices.truncate(count);
        Device::connect(&devices)?;
        let seat = |device: Device| {
            let module = device.load(cubin)?;
            Ok(Self { device, module, proxy: Proxy::new(device, module, queues)? })
        };
        devices.into_iter().map(seat).collect()
    }
}

/// What a run of all ranks took.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterTime {
    /// From the first rank's launch command to the last rank's end.
    pub time_us: f64,
    /// From the first rank's launch command to the last one's, by the host's clock.
    pub start_skew_us: f64,
    /// By rank number.
    pub ranks: Vec<RunTime>,
}

impl ClusterTime {
    /// One time for all ranks: the longest span and the slowest clock of any.
    pub fn slowest(&self) -> RunTime {
        RunTime {
            time_us: self.time_us,
            span_us: self.ranks.iter().map(|rank| rank.span_us).fold(0.0, f64::max),
            sm_mhz: self.ranks.iter().map(|rank| rank.sm_mhz).fold(f64::INFINITY, f64::min),
        }
    }
}

/// A schedule on several GPUs, ready to run again and again.
pub struct ClusterRunner<'a> {
    schedule: &'a Schedule,
    /// By rank number.
    pub ranks: Vec<Runner<'a>>,
}

/// Where the ranks meet before a launch.
struct Barrier {
    ranks: usize,
    arrived: AtomicUsize,
    broken: AtomicBool,
}

impl Barrier {
    /// Whether all ranks came.
    fn meet(&self) -> bool {
        self.arrived.fetch_add(1, Ordering::AcqRel);
        while self.arrived.load(Ordering::Acquire) < self.ranks {
            if self.broken.load(Ordering::Relaxed) {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }
}

impl<'a> ClusterRunner<'a> {
    /// Takes memory on every GPU and uploads the programs, by rank number.
    ///
    /// # Errors
    /// [`HwError::TooFewGpus`], [`HwError::Cuda`], for example when a GPU has too little memory.
    pub fn new(seats: &'a [Seat], schedule: &'a Schedule, programs: Vec<Program>) -> Result<Self, HwError> {
        if programs.len() > seats.len() {
            return Err(HwError::TooFewGpus { ranks: programs.len(), gpus: seats.len() });
        }
        let take = |(seat, program): (&Seat, &Program)| Memory::new(seat.device, program);
        let memory = seats.iter().zip(&programs).map(take).collect::<Result<Vec<_>, _>>()?;
        let addresses = Addresses::of(memory.iter());
        let ranks = seats
            .iter()
            .zip(programs)
            .zip(memory)
            .map(|((seat, program), memory)| {
                Runner::with_memory(seat.device, seat.module, &seat.proxy, schedule, program, memory, &addresses)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { schedule, ranks })
    }

    /// One run with fresh flags.
    ///
    /// # Errors
    /// [`HwError::Stuck`] with the blocked CTAs of all ranks when a watchdog ended it, [`HwError::Cuda`].
    pub fn run(&mut self) -> Result<ClusterTime, HwError> {
        let barrier = Barrier { ranks: self.ranks.len(), arrived: AtomicUsize::new(0), broken: AtomicBool::new(false) };
        let clock = Instant::now();
        let one = |runner: &mut Runner<'a>| {
            let mut launched_us = None;
            let time = runner.reset().and_then(|()| {
                runner.run_ready(|| {
                    if barrier.meet() {
                        launched_us = Some(clock.elapsed().as_secs_f64() * 1e6);
                    }
                    launched_us.is_some()
                })
            });
            barrier.broken.fetch_or(time.is_err(), Ordering::Relaxed);
            time.map(|time| launched_us.zip(time))
        };
        let ended: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = self.ranks.iter_mut().map(|runner| scope.spawn(|| one(runner))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank's thread does not panic")).collect()
        });
        let (mut ranks, mut failed, mut blocked) = (Vec::new(), None, Vec::new());
        for end in ended {
            match end {
                Ok(Some(rank)) => ranks.push(rank),
                Ok(None) => {}
                Err(HwError::Stuck(list)) => blocked.extend(list),
                Err(error) => failed = Some(error),
            }
        }
        if !blocked.is_empty() {
            return Err(HwError::Stuck(blocked));
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let first = ranks.iter().map(|&(at, _)| at).fold(f64::INFINITY, f64::min);
        let last = ranks.iter().map(|&(at, _)| at).fold(0.0, f64::max);
        let end = ranks.iter().map(|&(at, time)| at + time.time_us).fold(0.0, f64::max);
        Ok(ClusterTime {
            time_us: end - first,
            start_skew_us: last - first,
            ranks: ranks.into_iter().map(|(_, time)| time).collect(),
        })
    }

    /// Runs other programs of the same schedule from now on, by rank number.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn replace(&mut self, programs: Vec<Program>) -> Result<(), HwError> {
        self.ranks.iter_mut().zip(programs).try_for_each(|(runner, program)| runner.replace(program))
    }

    /// Many runs. One GPU queues them behind each other; several meet before each of them.
    ///
    /// # Errors
    /// As [`ClusterRunner::run`].
    pub fn back_to_back(&mut self, count: usize) -> Result<Vec<RunTime>, HwError> {
        if let [alone] = &mut self.ranks[..] {
            return alone.back_to_back(count);
        }
        (0..count).map(|_| self.run().map(|time| time.slowest())).collect()
    }

    /// Runs `warm_up` times, then `repeats` times; returns the latter.
    ///
    /// # Errors
    /// As [`ClusterRunner::run`].
    pub fn time(&mut self, warm_up: u32, repeats: u32) -> Result<Vec<ClusterTime>, HwError> {
        for _ in 0..warm_up {
            self.run()?;
        }
        (0..repeats).map(|_| self.run()).collect()
    }

    /// Poisons the memory of all ranks that holds no inputs.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn poison(&self, inputs: &Inputs) -> Result<(), HwError> {
        self.ranks.iter().try_for_each(|runner| inputs.poison(runner))
    }

    /// Poisons the memory of all ranks and writes the inputs.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn load(&self, inputs: &Inputs) -> Result<(), HwError> {
        self.ranks.iter().try_for_each(|runner| inputs.load(runner))
    }

    /// Compares all outputs of all ranks with the kernel's reference, which takes long for large shapes.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn compare(&self, kernel: &dyn Kernel, spec: &Spec, inputs: &Inputs) -> Result<Compared, HwError> {
        let mut all = Compared::default();
        for runner in &self.ranks {
            all.join(crate::measure::compare(runner, self.schedule, kernel, spec, inputs)?);
        }
        Ok(all)
    }

    /// Compares `count` outputs of every rank and looks for poison in all others. None for kernels whose outputs are no
    /// products.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn compare_samples(
        &self,
        kernel: &dyn Kernel,
        spec: &Spec,
        inputs: &Inputs,
        count: u64,
    ) -> Result<Option<Compared>, HwError> {
        let mut all = Compared::default();
        for runner in &self.ranks {
            match crate::measure::compare_samples(runner, self.schedule, kernel, spec, inputs, count)? {
                Some(compared) => all.join(compared),
                None => return Ok(None),
            }
        }
        Ok(Some(all))
    }
}

//! The GPUs of one host that share a schedule, a program each: one process with a thread per GPU, or a process per GPU.
//!
//! ```text
//! every rank: fresh flags, then the barrier      outside the timed span
//! every rank: launch ── flags and bytes over NVLink ── end
//! time: from the first rank's launch command to the last rank's end
//! ```
//!
//! The barrier is a word of host memory that the ranks spin on, so they start within some microseconds; by how much is
//! part of the result. A rank's end is its own event's: the time of rank r is the host's clock at its launch command, less
//! the first rank's, plus what its events say. That clock is the same for all processes of a host. Nodes have clocks of
//! their own: each counts from its own first command, behind a barrier over TCP, and the longest time counts. What nodes
//! start apart is in it as waiting of the earlier one.

use crate::bootstrap::Session;
use crate::device::{Device, HwError, Module};
use crate::exported::Mapping;
use crate::launch::{Addresses, Memory, RunTime, Runner, place};
use crate::lower::Program;
use crate::measure::{Compared, Inputs};
use crate::party::Party;
use crate::proxy::{Pacing, Proxy};
use crate::remote::{Remote, Settled};
use crate::timeline::TaskTime;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
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
        let seat = |(index, &device): (usize, &Device)| {
            let next = devices[(index + 1) % devices.len()];
            let module = device.load(cubin)?;
            Ok(Self { device, module, proxy: Proxy::new(device, module, queues, next)? })
        };
        devices.iter().enumerate().map(seat).collect()
    }

    /// GPU `index` of this host for a rank among processes that have one each: those of its node the GPUs `node`.
    ///
    /// # Errors
    /// [`HwError::TooFewGpus`], [`HwError::NoPeerAccess`], and as [`Device::all`] and [`Proxy::new`].
    pub fn of_rank(index: usize, node: Range<usize>, cubin: &[u8], queues: u16) -> Result<Self, HwError> {
        let gpus = Device::count()?;
        if gpus < node.end {
            return Err(HwError::TooFewGpus { ranks: node.end, gpus });
        }
        let device = Device::open_at(index as i32)?;
        node.filter(|&other| other != index).try_for_each(|other| device.reaches(other as i32))?;
        let module = device.load(cubin)?;
        Ok(Self { device, module, proxy: Proxy::new(device, module, queues, device)? })
    }

    /// From now on, puts of this rank go as over this fabric.
    pub const fn pace(&mut self, pacing: Option<Pacing>) {
        self.proxy.pace(pacing);
    }
}

/// What a run of all ranks took.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterTime {
    /// From the first rank's launch command to the last rank's end.
    pub time_us: f64,
    /// By rank number: its launch command after the first one of its node, by that host's clock.
    pub launched_us: Vec<f64>,
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

    /// Of ranks in order, so many on each node.
    fn of(ended: &[Ended], per_node: usize) -> Self {
        let nodes = ended.chunks(per_node.max(1)).map(Self::of_node);
        nodes.fold(Self { time_us: 0.0, launched_us: Vec::new(), ranks: Vec::new() }, |all, node| Self {
            time_us: all.time_us.max(node.time_us),
            launched_us: [all.launched_us, node.launched_us].concat(),
            ranks: [all.ranks, node.ranks].concat(),
        })
    }

    fn of_node(ended: &[Ended]) -> Self {
        let first = ended.iter().map(|rank| rank.launched_ns).min().unwrap_or(0);
        let after_us = |rank: &Ended| (rank.launched_ns - first) as f64 * 1e-3;
        Self {
            time_us: ended.iter().map(|rank| after_us(rank) + rank.time.time_us).fold(0.0, f64::max),
            launched_us: ended.iter().map(after_us).collect(),
            ranks: ended.iter().map(|rank| rank.time).collect(),
        }
    }
}

/// A rank's run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Ended {
    /// The host's clock at the launch command.
    launched_ns: u64,
    time: RunTime,
}

/// The host's clock.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A schedule on several GPUs, ready to run again and again.
pub struct ClusterRunner<'a> {
    schedule: &'a Schedule,
    /// Those of this process, by rank number.
    pub ranks: Vec<Runner<'a>>,
    party: Option<&'a Party>,
    /// Memory of other processes; mapped as long as programs name it.
    _peers: Vec<Mapping>,
}

/// Where the ranks meet before a launch.
pub(crate) struct Barrier<'a> {
    /// Ranks that came, over all meetings.
    pub(crate) arrived: &'a AtomicU32,
    /// Not 0 once a rank will not come.
    pub(crate) broken: &'a AtomicU32,
    /// What `arrived` is when all have come.
    pub(crate) goal: u32,
    /// Raised when a process is lost.
    pub(crate) stop: Option<&'a AtomicBool>,
    /// Where nodes meet first, if there are several.
    pub(crate) between: Option<&'a Session>,
}

impl Barrier<'_> {
    /// Whether all ranks came.
    pub(crate) fn meet(&self) -> bool {
        if self.between.is_some_and(|session| session.barrier().is_err()) {
            return false;
        }
        self.arrived.fetch_add(1, Ordering::AcqRel);
        let behind = || (self.arrived.load(Ordering::Acquire).wrapping_sub(self.goal) as i32) < 0;
        while behind() {
            if self.broken.load(Ordering::Relaxed) != 0 || self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }

    /// This rank will not come.
    pub(crate) fn fail(&self) {
        self.broken.store(1, Ordering::Relaxed);
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
        Ok(Self { schedule, ranks, party: None, _peers: Vec::new() })
    }

    /// As [`ClusterRunner::new`] for the rank of this process; all processes call it together. Ranks of other nodes are
    /// reached as was `settled`.
    ///
    /// # Errors
    /// [`HwError::Party`], [`HwError::Cuda`].
    pub fn joined(
        seat: &'a Seat,
        party: &'a Party,
        settled: Option<&Settled>,
        schedule: &'a Schedule,
        mut programs: Vec<Program>,
    ) -> Result<Self, HwError> {
        let program = programs.swap_remove(party.rank());
        let direct = settled.is_some_and(Settled::is_direct);
        let (memory, descriptor, bytes) = Memory::exported(seat.device, &program, direct)?;
        let sizes = party.exchange(&(bytes as u64).to_le_bytes())?;
        let descriptors = party.pass(descriptor.as_fd())?;
        let (mut bases, mut peers) = (Vec::new(), Vec::new());
        for (rank, (descriptor, size)) in descriptors.into_iter().zip(&sizes).enumerate() {
            let Some(descriptor) = descriptor else {
                // The memory of other nodes has no address here, and no task names one.
                bases.push(if rank == party.rank() { memory.base() } else { 0 });
                continue;
            };
            let bytes = <[u8; 8]>::try_from(&size[..]).map(u64::from_le_bytes);
            let bytes = bytes.map_err(|_| HwError::Party("a size of other than 8 bytes".into()))?;
            let peer = Mapping::import(seat.device, descriptor.as_fd(), bytes as usize)?;
            bases.push(peer.address);
            peers.push(peer);
        }
        let addresses = Addresses::mapped(&program, &bases);
        let Seat { device, module, proxy } = seat;
        let place = settled.map(|_| place(schedule, &program, memory.base(), bytes)).transpose()?;
        let mut runner = Runner::with_memory(*device, *module, proxy, schedule, program, memory, &addresses)?;
        if let Some((settled, place)) = settled.zip(place) {
            runner.reach(Remote::new(settled, *device, party.session(), schedule, &place)?);
        }
        Ok(Self { schedule, ranks: vec![runner], party: Some(party), _peers: peers })
    }

    /// One run with fresh flags.
    ///
    /// # Errors
    /// [`HwError::Stuck`] with the blocked CTAs of all ranks when a watchdog ended it, [`HwError::Cuda`],
    /// [`HwError::Party`].
    pub fn run(&mut self) -> Result<ClusterTime, HwError> {
        let (arrived, broken) = (AtomicU32::new(0), AtomicU32::new(0));
        let goal = self.ranks.len() as u32;
        let local = || Barrier { arrived: &arrived, broken: &broken, goal, stop: None, between: None };
        let barrier = self.party.map_or_else(local, Party::barrier);
        let one = |runner: &mut Runner<'a>| {
            let mut launched_ns = None;
            let time = runner.reset().and_then(|()| {
                runner.run_ready(|| {
                    if barrier.meet() {
                        launched_ns = Some(now_ns());
                    }
                    launched_ns.is_some()
                })
            });
            if time.is_err() {
                barrier.fail();
            }
            time.map(|time| launched_ns.zip(time).map(|(launched_ns, time)| Ended { launched_ns, time }))
        };
        let ended: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = self.ranks.iter_mut().map(|runner| scope.spawn(|| one(runner))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank's thread does not panic")).collect()
        });
        let own = whole(ended);
        let Some(party) = self.party else { return own.map(|ended| ClusterTime::of(&ended, ended.len())) };
        let per_node = usize::from(self.schedule.cluster.gpus_per_node);
        tell(party, own).map(|ended| ClusterTime::of(&ended.concat(), per_node))
    }

    /// Runs other programs of the same schedule from now on, by rank number.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn replace(&mut self, mut programs: Vec<Program>) -> Result<(), HwError> {
        if let Some(party) = self.party {
            programs = vec![programs.swap_remove(party.rank())];
        }
        self.ranks.iter_mut().zip(programs).try_for_each(|(runner, program)| runner.replace(program))
    }

    /// Many runs. One GPU queues them behind each other; several meet before each of them.
    ///
    /// # Errors
    /// As [`ClusterRunner::run`].
    pub fn back_to_back(&mut self, count: usize) -> Result<Vec<RunTime>, HwError> {
        if let ([alone], None) = (&mut self.ranks[..], self.party) {
            return alone.back_to_back(count);
        }
        (0..count).map(|_| self.run().map(|time| time.slowest())).collect()
    }

    /// A run whose tasks are recorded, after one that is recorded for nothing: what it took, and the tasks of all ranks.
    ///
    /// Every GPU has a clock of its own. A rank's times begin with its first CTA, which is placed at its launch command by
    /// the host's clock: ranks stand to each other within the few microseconds by which launches differ.
    ///
    /// # Errors
    /// As [`ClusterRunner::run`].
    pub fn recorded(&mut self) -> Result<(ClusterTime, Vec<TaskTime>), HwError> {
        self.ranks.iter_mut().try_for_each(|runner| runner.record(true))?;
        self.run()?;
        let time = self.run()?;
        let own = self.ranks.iter().map(Runner::timeline).collect::<Result<Vec<_>, _>>().map(|ranks| ranks.concat());
        self.ranks.iter_mut().try_for_each(|runner| runner.record(false))?;
        let mut tasks = match self.party {
            Some(party) => tell(party, own)?.concat(),
            None => own?,
        };
        for task in &mut tasks {
            let later_ps = (time.launched_us.get(task.rank as usize).copied().unwrap_or(0.0) * 1e6) as u64;
            for moment in [&mut task.taken, &mut task.start, &mut task.free, &mut task.end] {
                *moment += later_ps;
            }
        }
        Ok((time, tasks))
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
        let all = self.join(|runner| crate::measure::compare(runner, self.schedule, kernel, spec, inputs).map(Some))?;
        Ok(all.unwrap_or_default())
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
        self.join(|runner| crate::measure::compare_samples(runner, self.schedule, kernel, spec, inputs, count))
    }

    /// Comparisons of all ranks; none if one has none.
    fn join(
        &self,
        one: impl Fn(&Runner<'a>) -> Result<Option<Compared>, HwError> + Sync,
    ) -> Result<Option<Compared>, HwError> {
        let one = |runner: &Runner<'a>| runner.make_current().and_then(|()| one(runner));
        let own = std::thread::scope(|scope| {
            let threads: Vec<_> = self.ranks.iter().map(|runner| scope.spawn(|| one(runner))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a comparison does not panic")).collect()
        });
        let all = match self.party {
            Some(party) => tell::<Vec<_>>(party, own)?.concat(),
            None => own?,
        };
        let add = |mut sum: Compared, one: Option<Compared>| {
            sum.join(one?);
            Some(sum)
        };
        Ok(all.into_iter().try_fold(Compared::default(), add))
    }
}

/// What every process found, by rank number, or the first error.
fn tell<T: Serialize + for<'de> Deserialize<'de>>(party: &Party, own: Result<T, HwError>) -> Result<Vec<T>, HwError> {
    let words = own.as_ref().map_err(ToString::to_string);
    let text = serde_json::to_vec(&words).map_err(|error| HwError::Party(error.to_string()))?;
    let all = party.exchange(&text);
    // The own error says more than what the others make of it.
    own?;
    let read = |(rank, text): (usize, Vec<u8>)| {
        let said: Result<T, String> =
            serde_json::from_slice(&text).map_err(|error| HwError::Party(format!("rank {rank}: {error}")))?;
        said.map_err(|error| HwError::Party(format!("rank {rank}: {error}")))
    };
    all?.into_iter().enumerate().map(read).collect()
}

/// All ranks' runs, or what went wrong first: blocked CTAs of any say the most.
fn whole(ended: Vec<Result<Option<Ended>, HwError>>) -> Result<Vec<Ended>, HwError> {
    let (mut runs, mut failed, mut blocked, mut missing) = (Vec::new(), None, Vec::new(), false);
    for end in ended {
        match end {
            Ok(Some(rank)) => runs.push(rank),
            Ok(None) => missing = true,
            Err(HwError::Stuck(list)) => blocked.extend(list),
            Err(error) => failed = Some(error),
        }
    }
    if !blocked.is_empty() {
        return Err(HwError::Stuck(blocked));
    }
    match failed {
        Some(error) => Err(error),
        None if missing => Err(HwError::Party("a rank did not come to the barrier".into())),
        None => Ok(runs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_kernels::{Blocked, Rank, RoleKind};

    fn ended(launched_ns: u64, time_us: f64) -> Ended {
        Ended { launched_ns, time: RunTime { time_us, span_us: time_us - 10.0, sm_mhz: 1500.0 + time_us } }
    }

    #[test]
    fn a_cluster_s_time_is_from_the_first_command_to_the_last_end() {
        let all = [ended(7_000, 100.0), ended(5_000, 101.0), ended(6_500, 90.0)];
        let time = ClusterTime::of(&all, 3);
        let launched_us = vec![2.0, 0.0, 1.5];
        assert_eq!((time.time_us, &time.launched_us), (102.0, &launched_us), "rank 0 begins 2 us later and ends last");
        assert_eq!(time.slowest(), RunTime { time_us: 102.0, span_us: 91.0, sm_mhz: 1590.0 });
        let apart = ClusterTime::of(&all, 1);
        assert_eq!((apart.time_us, apart.launched_us), (101.0, vec![0.0; 3]), "clocks of three nodes");
    }

    #[test]
    fn blocked_ctas_come_before_other_errors() {
        let blocked = |gpu| Blocked {
            rank: Rank { node: 0, gpu },
            launch: "main".into(),
            role: RoleKind::Compute,
            cta: 0,
            task: 0,
            flag: "f".into(),
            slot: 0,
            have: 0,
            need: 1,
        };
        let cuda = || HwError::Cuda { call: "cuEventRecord", name: "lost".into() };
        let stuck = |gpu| Err(HwError::Stuck(vec![blocked(gpu)]));
        match whole(vec![stuck(0), Err(cuda()), stuck(2), Ok(None)]) {
            Err(HwError::Stuck(list)) => assert_eq!(list.iter().map(|b| b.rank.gpu).collect::<Vec<_>>(), [0, 2]),
            other => panic!("{other:?}"),
        }
        assert!(matches!(whole(vec![Ok(None), Err(cuda())]), Err(HwError::Cuda { .. })));
        assert!(matches!(whole(vec![Ok(None), Ok(Some(ended(0, 1.0)))]), Err(HwError::Party(_))));
        assert_eq!(whole(vec![Ok(Some(ended(0, 1.0)))]).expect("it ran").len(), 1);
    }
}

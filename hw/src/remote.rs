//! Puts of a GPU to ranks of other nodes: the device's ring, proxy threads, a transport, the GPU's memory at both ends.
//!
//! ```text
//! CTA ── ring in host memory ──▶ proxy threads ──▶ RDMA from the GPU's memory           (dmabuf, peermem)
//!                                      └─ copy out ──▶ RDMA from a host segment ─ copy in ──▶ GPU   (bounce)
//!                                      ◀── completions, immediates: `sent` and arrival words, written by a stream
//! ```
//!
//! The proxies and transports are the host device's. No machine with a GPU and an RDMA NIC was at hand: the bounce buffer
//! has met a GPU over loopback between processes, RDMA has met CPU memory only, and GPU memory has met no NIC.

mod copies;

use crate::bootstrap::{BootstrapError, Session};
use crate::device::{Device, HwError};
use crate::exported::Mapping;
use crate::host::{HostError, Memory, Wire, share};
use crate::memory::SharedMemory;
use crate::probe::rdma::Seat;
use crate::proxy::{Stream, write};
use crate::transport::arrivals::Arrivals;
use crate::transport::bounce::Copier;
use crate::transport::proxy::{Proxy, ProxyConfig, Raise};
use crate::transport::puts::{Incoming, commands};
use crate::transport::registration::Path;
use crate::transport::ring::{Puts, Ring};
use crate::transport::segment::{Layout, Segment};
use crate::transport::{Command, Told, Transport, TransportError, Word, Words};
use copies::{Copies, Pinned, copies_failed};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tilewire_kernels::schedule::Op;
use tilewire_kernels::{Cluster, Schedule};

/// How long puts may go on after their launch.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at a run's end.
const LOOK: Duration = Duration::from_micros(20);

/// How the ranks of several nodes are to reach each other.
#[derive(Clone, Debug)]
pub struct Link {
    /// What carries puts.
    pub wire: Wire,
    /// How NICs come to the GPU's memory; none for the first way that works on every rank.
    pub way: Option<Path>,
    /// Proxy threads of a rank.
    pub proxies: u16,
    /// Writes that a proxy posts together, at most; none for its own choice.
    pub batch: Option<usize>,
    /// Whether immediates replace flag writes.
    pub by_immediates: bool,
}

/// What all ranks agreed on.
#[derive(Clone, Debug)]
pub struct Settled {
    link: Link,
    /// How NICs come to the memory of every rank.
    pub(crate) way: Path,
    by_immediates: bool,
    seat: Seat,
    /// For records.
    pub(crate) name: String,
}

/// What a rank found out about itself.
#[derive(Serialize, Deserialize)]
struct Found {
    /// A way to its memory, or why there is none.
    way: Result<Path, String>,
    /// Whether its GPU sees what NICs write as they write it.
    sees: bool,
}

fn wire_error(error: impl Into<HostError>) -> HwError {
    HwError::Wire(Box::new(error.into()))
}

impl Link {
    /// Tries the way to the memory of every rank, agrees on one for all, and connects them once; all ranks call it
    /// together.
    ///
    /// # Errors
    /// [`HwError::Wire`]; a way that was asked for and that a rank does not have is one.
    pub(crate) fn settle(self, device: Device, session: &Session, cluster: Cluster) -> Result<Settled, HwError> {
        let rank = cluster.rank(session.place().rank as usize);
        let seat = Seat::of_gpu(&device.bus_id()?, usize::from(rank.gpu));
        let found = self.try_ways(device, &seat);
        if let Err(error) = &found {
            session.abort(&error.to_string());
        }
        let (found, _open) = found?;
        let text = serde_json::to_vec(&found).unwrap_or_default();
        let all = session.exchange(&text).map_err(wire_error)?;
        let read = |text: &Vec<u8>| serde_json::from_slice::<Found>(text);
        let all = all.iter().map(read).collect::<Result<Vec<_>, _>>();
        let all = all.map_err(|error| HwError::Party(format!("what a rank found cannot be read: {error}")))?;
        let refused = all.iter().enumerate().find_map(|(rank, found)| Some((rank, found.way.as_ref().err()?)));
        let (way, why) = match refused {
            None => {
                (all.iter().filter_map(|found| found.way.clone().ok()).max().unwrap_or(Path::Bounce), String::new())
            }
            Some((rank, why)) if self.way.is_some() => {
                return Err(wire_error(TransportError::NoWay { why: format!("rank {rank}: {why}") }));
            }
            Some((rank, why)) => (Path::Bounce, format!(" (rank {rank}: {why})")),
        };
        let by_immediates = self.by_immediates || all.iter().any(|found| !found.sees);
        let mut settled = Settled { link: self, way, by_immediates, seat, name: String::new() };
        // A connection of nothing but a word: so that whatever is wrong with the wire is told before anything is measured.
        let trial = Trial::new(device, way)?;
        let (wires, _host) = settled.connect(device, session, cluster, &trial.place(), &Arc::default())?;
        settled.name = wires.name() + &why;
        session.barrier().map_err(wire_error)?;
        Ok(settled)
    }

    /// The first way to this rank's memory that works here, tried on a little of it.
    fn try_ways(&self, device: Device, seat: &Seat) -> Result<(Found, Option<Trial>), HwError> {
        let asked = match (self.way, self.wire.maps_all()) {
            (Some(Path::Bounce), _) | (None, true) => return Ok((Found { way: Ok(Path::Bounce), sees: true }, None)),
            (Some(way), true) => {
                let why = format!("no {way}: loopback copies between segments of the host");
                return Ok((Found { way: Err(why), sees: true }, None));
            }
            (Some(way), false) => vec![way],
            (None, false) => Path::DIRECT.to_vec(),
        };
        let trial = Trial::new(device, Path::DmaBuf)?;
        let way = open(&self.wire, device, seat, &trial.place(), &asked);
        let sees = device.sees_writes_of_nics()?;
        match way {
            Ok(way) => Ok((Found { way: Ok(way), sees }, Some(trial))),
            Err(TransportError::NoWay { why }) => Ok((Found { way: Err(why), sees: true }, None)),
            Err(error) => Err(wire_error(error)),
        }
    }
}

/// Opens NICs with the GPU's memory registered, and closes them; the way that it went.
#[cfg(feature = "rdma")]
fn open(wire: &Wire, device: Device, seat: &Seat, place: &Place, ways: &[Path]) -> Result<Path, TransportError> {
    use crate::transport::verbs::Exposed;
    let devices = wire.open(seat, &Exposed::gpu(device, place.base, &place.layout, ways))?;
    Ok(devices.first().map_or(Path::Bounce, crate::transport::verbs::Device::way))
}

#[cfg(not(feature = "rdma"))]
fn open(_: &Wire, _: Device, _: &Seat, _: &Place, _: &[Path]) -> Result<Path, TransportError> {
    Err(TransportError::NoWay { why: "this build has no RDMA".to_owned() })
}

/// The memory of a rank on its GPU, one piece.
pub(crate) struct Place {
    /// Its address.
    pub(crate) base: u64,
    /// Buffers and words in it.
    pub(crate) layout: Layout,
    /// The same buffers and words in a segment of the host.
    pub(crate) beside: Layout,
}

/// A little memory to try a connection with.
struct Trial {
    memory: Mapping,
    layout: Layout,
}

impl Trial {
    fn new(device: Device, way: Path) -> Result<Self, HwError> {
        let layout = Layout::plain(1, 4096);
        let (memory, _) = Mapping::export(device, layout.bytes as usize, way != Path::Bounce)?;
        Ok(Self { memory, layout })
    }

    fn place(&self) -> Place {
        Place { base: self.memory.address, layout: self.layout.clone(), beside: self.layout.clone() }
    }
}

impl Settled {
    /// Whether NICs are to reach the GPU's memory itself.
    pub(crate) fn is_direct(&self) -> bool {
        self.way != Path::Bounce
    }

    /// How puts are told.
    fn told(&self) -> Told {
        let by_immediates = self.by_immediates || !self.is_direct();
        Told { order: self.link.wire.order(), by_immediates }
    }

    /// Connects a rank's memory; all ranks call it together. The host segment that stands for it, if one does, must live
    /// as long as the connection.
    fn connect(
        &self,
        device: Device,
        session: &Session,
        cluster: Cluster,
        place: &Place,
        incoming: &Arc<Incoming>,
    ) -> Result<(crate::host::Wires, Option<Arc<Pinned>>), HwError> {
        let (wire, proxies) = (&self.link.wire, self.link.proxies);
        #[cfg(feature = "rdma")]
        if self.is_direct() {
            use crate::transport::verbs::Exposed;
            let exposed = Exposed::gpu(device, place.base, &place.layout, &Path::DIRECT);
            let nics = wire.open(&self.seat, &exposed).inspect_err(|error| session.abort(&error.to_string()));
            let memory = Memory::Nics(nics.map_err(wire_error)?);
            let mut wires = wire.connect(session, cluster, &self.seat, memory, proxies).map_err(wire_error)?;
            wires.told = self.told();
            return Ok((wires, None));
        }
        let segments = share(session, &place.beside, &memory_directory(), |_| wire.maps_all()).map_err(wire_error)?;
        let own = segments[session.place().rank as usize].clone();
        let own = own.ok_or_else(|| HwError::Party("this rank has no segment".to_owned()))?;
        let pinned = Arc::new(Pinned::new(device, own)?);
        // Buffers lie alike in both, so that the first one tells where all are.
        let at = (place.base + place.layout.buffer(0).0, place.beside.buffer(0).0);
        let copier = |_: &Arc<Segment>| -> Result<Box<dyn Copier>, TransportError> {
            let copies = Copies::new(device, pinned.clone(), at);
            copies.map(|copies| Box::new(copies) as Box<dyn Copier>).map_err(copies_failed)
        };
        let landings = Arc::new(incoming.landings.clone());
        let memory = Memory::Bounce { segments: &segments, landings, copier: &copier };
        let wires = wire.connect(session, cluster, &self.seat, memory, proxies).map_err(wire_error)?;
        Ok((wires, Some(pinned)))
    }
}

/// Where segments of ranks of a node lie: in memory, if the system has such a directory.
fn memory_directory() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { std::env::temp_dir() }
}

/// The words of a GPU, raised by a stream.
struct DeviceWords {
    stream: Stream,
    base: u64,
    words: Words,
    /// Values so far, of the words that were raised in a run.
    values: Mutex<BTreeMap<u32, u32>>,
    /// NICs' writes are not seen without a flush.
    flush: bool,
    failed: Mutex<Option<HwError>>,
}

impl Raise for DeviceWords {
    fn raise(&self, word: Word) {
        let value = {
            let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
            let value = values.entry(word.slot()).or_default();
            *value += 1;
            *value
        };
        let flushed = if self.flush { Device::flush_writes_of_nics() } else { Ok(()) };
        let raised = flushed.and_then(|()| write(&self.stream, self.base + self.words.offset(word), value));
        if let Err(error) = raised {
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }
}

/// A rank's connection to those of other nodes, for one schedule.
pub(crate) struct Remote {
    // Before the memory that it reads and writes.
    transports: Mutex<Vec<Box<dyn Transport>>>,
    _host: Option<Arc<Pinned>>,
    device: Device,
    stop: Arc<AtomicBool>,
    /// By bank and task.
    writes: [Vec<Vec<Command>>; 2],
    incoming: Arc<Incoming>,
    words: DeviceWords,
    config: ProxyConfig,
}

impl Remote {
    /// Connects the rank of this process for a schedule, whose memory lies at `place`; all ranks call it together.
    ///
    /// # Errors
    /// [`HwError::Wire`], [`HwError::Cuda`].
    pub(crate) fn new(
        settled: &Settled,
        device: Device,
        session: &Session,
        schedule: &Schedule,
        place: &Place,
    ) -> Result<Self, HwError> {
        let cluster = schedule.cluster;
        let rank = cluster.rank(session.place().rank as usize);
        let told = settled.told();
        // Offsets of puts are those of the memory that the NIC sees.
        let layout = if settled.is_direct() { &place.layout } else { &place.beside };
        let incoming = Arc::new(Incoming::new(schedule, layout, rank, told).map_err(wire_error)?);
        let (wires, host) = settled.connect(device, session, cluster, place, &incoming)?;
        let writes = [0, 1].map(|bank| {
            let mut writes = Vec::new();
            for (l, r) in schedule.role_indices() {
                schedule.for_each_task(rank, l, r, |task| {
                    let puts = matches!(task.op, Op::Put { .. });
                    let of = |op| commands(schedule, layout, rank, op, bank, told);
                    writes.push(if puts { of(&task.op) } else { Vec::new() });
                });
            }
            writes
        });
        let flush = settled.is_direct() && !device.sees_writes_of_nics()?;
        let words = DeviceWords {
            stream: Stream::new()?,
            base: place.base,
            words: place.layout.words(),
            values: Mutex::default(),
            flush,
            failed: Mutex::default(),
        };
        let default = ProxyConfig { patience: 1 << 16, ..ProxyConfig::default() };
        let config = ProxyConfig { batch: settled.link.batch.unwrap_or(default.batch), ..default };
        let transports = Mutex::new(wires.transports);
        let stop = session.stop_flag();
        Ok(Self { transports, _host: host, device, stop, writes, incoming, words, config })
    }

    /// Whether the puts of these tasks are all that the device may ask for.
    pub(crate) fn tasks(&self) -> usize {
        self.writes[0].len()
    }

    /// Serves the puts of a run until all have left and all that others put here by immediates has come, or until the
    /// launch has ended (`over`) without asking for all of them.
    ///
    /// # Errors
    /// [`HwError::Puts`], [`HwError::PutsPending`], [`HwError::Party`] when another rank has failed.
    pub(crate) fn serve(
        &self,
        fifo: &SharedMemory,
        slots: Range<usize>,
        run: u32,
        over: &AtomicBool,
    ) -> Result<(), HwError> {
        let bank = run % 2;
        let writes = &self.writes[bank as usize];
        let all: u64 = writes.iter().map(|writes| writes.len() as u64).sum();
        let mut transports = self.transports.lock().unwrap_or_else(PoisonError::into_inner);
        let puts = Puts::new(Ring::new(fifo, slots, run), writes, transports.len());
        let arrivals = Arrivals::new(bank, self.incoming.immediates.clone());
        let (halt, end, done) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
        let (progress, failure) = (AtomicU64::new(0), Mutex::new(None));
        self.words.values.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let ended = std::thread::scope(|scope| {
            for (number, transport) in transports.iter_mut().enumerate() {
                let (puts, arrivals, done, end, halt) = (&puts, &arrivals, &done, &end, &halt);
                let (progress, failure) = (&progress, &failure);
                scope.spawn(move || {
                    let part = puts.of(number);
                    let proxy = Proxy {
                        fifo: &part,
                        words: &self.words,
                        arrivals,
                        stop: halt,
                        end,
                        done,
                        progress,
                        config: self.config,
                    };
                    let served = self.device.make_current().map_err(copies_failed);
                    if let Err(error) = served.and_then(|()| proxy.serve(transport.as_mut())) {
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        halt.store(true, Ordering::Release);
                    }
                });
            }
            let ended = self.watch(&puts, &arrivals, (&done, all), over, &halt);
            end.store(true, Ordering::Release);
            if !matches!(ended, Ok(true)) {
                halt.store(true, Ordering::Release);
            }
            ended
        });
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error.into());
        }
        ended?;
        if let Some(error) = self.words.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        self.words.stream.synchronize()
    }

    /// Waits for the end of a run: whether it is whole.
    fn watch(
        &self,
        puts: &Puts<'_, SharedMemory>,
        arrivals: &Arrivals,
        (done, all): (&AtomicU64, u64),
        over: &AtomicBool,
        halt: &AtomicBool,
    ) -> Result<bool, HwError> {
        let mut since = None;
        loop {
            // Before the look at the ring: what a launch asked for before it ended is there.
            let is_over = over.load(Ordering::Acquire);
            let asked = puts.look();
            let pending = all - done.load(Ordering::Acquire);
            if asked && pending == 0 && arrivals.missing() == 0 {
                return Ok(true);
            }
            if halt.load(Ordering::Acquire) || (is_over && !asked) {
                return Ok(false);
            }
            if self.stop.load(Ordering::Acquire) {
                return Err(HwError::Party("another rank has failed".to_owned()));
            }
            let waited = if is_over { since.get_or_insert_with(Instant::now).elapsed() } else { Duration::ZERO };
            if waited > PATIENCE {
                let missing = arrivals.missing();
                return Err(HwError::PutsPending { waited_s: waited.as_secs(), pending, missing });
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl From<BootstrapError> for HwError {
    fn from(error: BootstrapError) -> Self {
        Self::Party(error.to_string())
    }
}

//! GPUs that are ready to run programs: opened and connected, device code compiled and loaded, proxies proved.

use crate::cluster::{ClusterRunner, Seat};
use crate::device::{self, HwError};
use crate::lower::Program;
use crate::party::Party;
use crate::probe::{self, Driver};
use crate::proxy::Pacing;
use crate::remote::{Link, Settled};
use std::fs;
use std::path::Path;
use tilewire_kernels::cuda::{HEADERS, INTERPRETER};
use tilewire_kernels::{Cluster, Schedule};

/// Streams behind the proxy.
const QUEUES: u16 = 4;

/// What a record says of the GPU and of what ran on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Name of the GPU.
    pub gpu: String,
    /// Version of the kernel module and the CUDA version that it supports.
    pub driver: String,
    /// Version of the run-time compiler.
    pub nvrtc: String,
    /// First 16 hexadecimal digits of the BLAKE3 of the machine code.
    pub cubin: String,
    /// What carries bytes between ranks, and how.
    pub transport: String,
    /// How NICs come to the memory of ranks; `none` where no rank is on another node.
    pub registration: String,
}

/// GPUs of this host.
pub struct Gpus {
    seats: Vec<Seat>,
    /// The other processes, where every rank is one.
    party: Option<Party>,
    /// How ranks of other nodes are reached.
    settled: Option<Settled>,
    /// What records say.
    pub facts: Facts,
}

impl Gpus {
    /// Opens the first `count` GPUs. Machine code is kept in `cache`, by what it was compiled from. With `pacing`, puts
    /// between them go as over an emulated fabric.
    ///
    /// # Errors
    /// [`HwError`]; a machine without driver, compiler or so many GPUs is one.
    pub fn open(cache: &Path, count: usize, pacing: Option<Pacing>) -> Result<Self, HwError> {
        let nvrtc = nvrtc()?;
        let cubin = cubin(cache, &nvrtc)?;
        let mut seats = Seat::first(count, &cubin, QUEUES)?;
        for seat in &mut seats {
            seat.pace(pacing);
        }
        let copies = || format!("{:?}", seats[0].proxy.method).to_lowercase();
        let transport = match (seats.len(), pacing) {
            (1, _) => format!("loopback by {}", copies()),
            (gpus, None) => format!("peer access between {gpus} GPUs"),
            (gpus, Some(_)) => format!("emulated nodes: loopback by {} between {gpus} GPUs", copies()),
        };
        Self::new(seats, None, nvrtc, &cubin, transport)
    }

    /// Opens the GPU of this process's rank of a cluster. Without `link` all ranks are on this host, on the GPUs of their
    /// numbers; with it, a rank takes the GPU `first` plus its number in its node, and links reach the other nodes.
    ///
    /// # Errors
    /// As [`Gpus::open`], [`HwError::Party`], [`HwError::Wire`].
    pub fn join(
        cache: &Path,
        party: Party,
        cluster: Cluster,
        first: usize,
        link: Option<Link>,
    ) -> Result<Self, HwError> {
        let nvrtc = nvrtc()?;
        // One of a node compiles, the others find it in the cache.
        let compiles = party.rank() == party.node().start;
        let mine = if compiles { Some(cubin(cache, &nvrtc)) } else { None };
        party.exchange(&[])?;
        let cubin = mine.unwrap_or_else(|| cubin(cache, &nvrtc))?;
        let here = party.node().len();
        let seat = Seat::of_rank(first + party.rank() - party.node().start, first..first + here, &cubin, QUEUES)?;
        let settled = link.map(|link| link.settle(seat.device, party.session(), cluster)).transpose()?;
        let memory = format!("exported memory between {here} processes with a GPU each");
        let transport = settled.as_ref().map_or_else(
            || memory.clone(),
            |settled| {
                if here > 1 { format!("{}; {memory}", settled.name) } else { settled.name.clone() }
            },
        );
        let mut gpus = Self::new(vec![seat], Some(party), nvrtc, &cubin, transport)?;
        if let Some(settled) = &settled {
            settled.way.name().clone_into(&mut gpus.facts.registration);
        }
        Ok(Self { settled, ..gpus })
    }

    fn new(
        seats: Vec<Seat>,
        party: Option<Party>,
        nvrtc: String,
        cubin: &[u8],
        transport: String,
    ) -> Result<Self, HwError> {
        let (gpu, driver) = match probe::driver() {
            Driver::Present { cuda_version, module, gpus, .. } => (
                gpus.first().map_or_else(String::new, |gpu| gpu.name.clone()),
                format!("{} CUDA {}.{}", module.unwrap_or_default(), cuda_version / 1000, cuda_version % 1000 / 10),
            ),
            _ => return Err(HwError::NoDriver),
        };
        let cubin = blake3::hash(cubin).to_hex()[..16].to_owned();
        let registration = "none".to_owned();
        let facts = Facts { gpu, driver: driver.trim().to_owned(), nvrtc, cubin, transport, registration };
        Ok(Self { seats, party, settled: None, facts })
    }

    /// The other processes, where every rank is one.
    pub const fn party(&self) -> Option<&Party> {
        self.party.as_ref()
    }

    /// SMs of each.
    pub fn sms(&self) -> u32 {
        self.seats[0].device.sms
    }

    /// Programs with their memory, a GPU for each.
    ///
    /// # Errors
    /// As [`ClusterRunner::new`] and [`ClusterRunner::joined`].
    pub fn runner<'a>(&'a self, schedule: &'a Schedule, programs: Vec<Program>) -> Result<ClusterRunner<'a>, HwError> {
        match &self.party {
            Some(party) => ClusterRunner::joined(&self.seats[0], party, self.settled.as_ref(), schedule, programs),
            None => ClusterRunner::new(&self.seats, schedule, programs),
        }
    }
}

fn nvrtc() -> Result<String, HwError> {
    let (major, minor) = device::nvrtc_version()?;
    Ok(format!("{major}.{minor}"))
}

/// The interpreter's machine code, from the cache if it is there.
fn cubin(cache: &Path, nvrtc: &str) -> Result<Vec<u8>, HwError> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(nvrtc.as_bytes());
    for (name, text) in HEADERS.iter().chain([&INTERPRETER]) {
        hasher.update(name.as_bytes()).update(text.as_bytes());
    }
    let file = cache.join(format!("interpreter-{}.cubin", &hasher.finalize().to_hex()[..16]));
    if let Ok(bytes) = fs::read(&file) {
        return Ok(bytes);
    }
    let bytes = device::compile(INTERPRETER)?.bytes;
    // A cache that cannot be written costs the next run its time, nothing else.
    let _ = fs::create_dir_all(cache).and_then(|()| fs::write(&file, &bytes));
    Ok(bytes)
}

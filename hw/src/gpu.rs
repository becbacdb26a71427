//! GPUs that are ready to run programs: opened and connected, device code compiled and loaded, proxies proved.

use crate::cluster::{ClusterRunner, Seat};
use crate::device::{self, HwError};
use crate::lower::Program;
use crate::probe::{self, Driver};
use std::fs;
use std::path::Path;
use tilewire_kernels::Schedule;
use tilewire_kernels::cuda::{HEADERS, INTERPRETER};

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
}

/// GPUs of this host.
pub struct Gpus {
    seats: Vec<Seat>,
    /// What records say.
    pub facts: Facts,
}

impl Gpus {
    /// Opens the first `count` GPUs. Machine code is kept in `cache`, by what it was compiled from.
    ///
    /// # Errors
    /// [`HwError`]; a machine without driver, compiler or so many GPUs is one.
    pub fn open(cache: &Path, count: usize) -> Result<Self, HwError> {
        let (major, minor) = device::nvrtc_version()?;
        let nvrtc = format!("{major}.{minor}");
        let cubin = cubin(cache, &nvrtc)?;
        let seats = Seat::first(count, &cubin, QUEUES)?;
        let (gpu, driver) = match probe::driver() {
            Driver::Present { cuda_version, module, gpus, .. } => (
                gpus.first().map_or_else(String::new, |gpu| gpu.name.clone()),
                format!("{} CUDA {}.{}", module.unwrap_or_default(), cuda_version / 1000, cuda_version % 1000 / 10),
            ),
            _ => return Err(HwError::NoDriver),
        };
        let facts = Facts {
            gpu,
            driver: driver.trim().to_owned(),
            nvrtc,
            cubin: blake3::hash(&cubin).to_hex()[..16].to_owned(),
            transport: match &seats[..] {
                [alone] => format!("loopback by {:?}", alone.proxy.method).to_lowercase(),
                several => format!("peer access between {} GPUs", several.len()),
            },
        };
        Ok(Self { seats, facts })
    }

    /// SMs of each.
    pub fn sms(&self) -> u32 {
        self.seats[0].device.sms
    }

    /// Programs with their memory, a GPU for each.
    ///
    /// # Errors
    /// As [`ClusterRunner::new`].
    pub fn runner<'a>(&'a self, schedule: &'a Schedule, programs: Vec<Program>) -> Result<ClusterRunner<'a>, HwError> {
        ClusterRunner::new(&self.seats, schedule, programs)
    }
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

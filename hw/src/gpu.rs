//! One GPU that is ready to run programs: opened, its device code compiled and loaded, its proxy proved.

use crate::device::{self, Device, HwError, Module};
use crate::launch::Runner;
use crate::lower::Program;
use crate::probe::{self, Driver};
use crate::proxy::Proxy;
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
    /// What carries puts, and how.
    pub transport: String,
}

/// A GPU.
pub struct Gpu {
    /// Device.
    pub device: Device,
    /// Carries puts.
    pub proxy: Proxy,
    /// What records say.
    pub facts: Facts,
    module: Module,
}

impl Gpu {
    /// Opens the first GPU. Machine code is kept in `cache`, by what it was compiled from.
    ///
    /// # Errors
    /// [`HwError`]; a machine without driver, GPU or compiler is one.
    pub fn open(cache: &Path) -> Result<Self, HwError> {
        let device = Device::open()?;
        let (major, minor) = device::nvrtc_version()?;
        let nvrtc = format!("{major}.{minor}");
        let cubin = cubin(cache, &nvrtc)?;
        let module = device.load(&cubin)?;
        let proxy = Proxy::new(device, module, QUEUES)?;
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
            transport: format!("loopback by {:?}", proxy.method).to_lowercase(),
        };
        Ok(Self { device, proxy, facts, module })
    }

    /// A program with its memory.
    ///
    /// # Errors
    /// As [`Runner::new`].
    pub fn runner<'a>(&'a self, schedule: &'a Schedule, program: Program) -> Result<Runner<'a>, HwError> {
        Runner::new(self.device, self.module, &self.proxy, schedule, program)
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

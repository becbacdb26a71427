//! What this machine has: driver, GPUs, links between them, NVRTC, RDMA. A missing part is an answer, never a panic.
//!
//! The CUDA libraries are loaded at run time by a binding that panics where a library is absent, so every path into it
//! starts with its own question whether the library is there; RDMA devices are read from sysfs.

use cudarc::driver::sys as cuda;
use cudarc::nvrtc::sys as nvrtc;
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::path::Path;

pub mod rdma;

pub use rdma::RdmaDevice;

/// Everything that a machine was asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// CUDA driver and what it sees.
    pub driver: Driver,
    /// Run-time compiler.
    pub nvrtc: Library,
    /// RDMA library.
    pub verbs: Library,
    /// EFA extension of the RDMA library.
    pub efa: Library,
    /// RDMA devices.
    pub rdma: Vec<RdmaDevice>,
}

/// The CUDA driver.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Driver {
    /// No driver library.
    Missing,
    /// The library is there but does not answer.
    Failed {
        /// Call that failed.
        call: &'static str,
        /// Result code of the driver.
        code: u32,
    },
    /// A working driver.
    Present {
        /// Highest CUDA version that it supports, as 1000 * major + 10 * minor.
        cuda_version: u32,
        /// Version of the kernel module.
        module: Option<String>,
        /// GPUs.
        gpus: Vec<Gpu>,
        /// Pairs of GPUs.
        peers: Vec<Peer>,
    },
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Name.
    pub name: String,
    /// PCIe address, as `0000:17:00.0`.
    pub bus_id: String,
    /// Compute capability, major and minor.
    pub capability: [u32; 2],
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Memory.
    pub memory_bytes: u64,
    /// Whether a NIC can read and write its memory.
    pub gpu_direct_rdma: bool,
    /// Whether its memory can be exported as a dmabuf, as RDMA libraries want it.
    pub dma_buf: bool,
    /// Whether multicast objects (NVLS) can be made.
    pub multicast: bool,
}

/// What connects two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// First GPU.
    pub from: u32,
    /// Second GPU.
    pub to: u32,
    /// Loads and stores reach the other's memory.
    pub access: bool,
    /// So do atomics: NVLink, for PCIe carries none.
    pub atomics: bool,
}

/// A library that is loaded at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Library {
    /// Not found.
    Missing,
    /// Found.
    Present {
        /// Version, where the library tells one.
        version: Option<String>,
    },
}

/// Asks the machine for everything.
pub fn probe() -> Probe {
    Probe {
        driver: driver(),
        nvrtc: compiler(),
        verbs: library("libibverbs.so.1"),
        efa: library("libefa.so.1"),
        rdma: rdma::devices(Path::new("/sys/class/infiniband")),
    }
}

/// Turns a failed call into its answer.
macro_rules! call {
    ($name:ident($($argument:expr),*)) => {{
        // SAFETY: the library is present, as the caller has checked, and every pointer is to a live local of the type
        // that the call writes.
        let result = unsafe { cuda::$name($($argument),*) };
        if result != cuda::CUresult::CUDA_SUCCESS {
            return Err(Driver::Failed { call: stringify!($name), code: result as u32 });
        }
    }};
}

/// Asks for the driver and its GPUs only.
pub fn driver() -> Driver {
    // SAFETY: only opens the library, whose initialisers are NVIDIA's.
    if !unsafe { cuda::is_culib_present() } {
        return Driver::Missing;
    }
    ask_driver().unwrap_or_else(|failed| failed)
}

fn ask_driver() -> Result<Driver, Driver> {
    let (mut version, mut count) = (0, 0);
    call!(cuInit(0));
    call!(cuDriverGetVersion(&raw mut version));
    call!(cuDeviceGetCount(&raw mut count));
    let devices = (0..count).map(device).collect::<Result<Vec<_>, _>>()?;
    let gpus = devices.iter().map(|&device| gpu(device)).collect::<Result<_, _>>()?;
    let mut peers = Vec::new();
    for (from, &a) in devices.iter().enumerate() {
        for (to, &b) in devices.iter().enumerate().filter(|(to, _)| *to != from) {
            use cuda::CUdevice_P2PAttribute as Attribute;
            let access = peer(a, b, Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)?;
            let atomics = peer(a, b, Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)?;
            peers.push(Peer { from: from as u32, to: to as u32, access, atomics });
        }
    }
    Ok(Driver::Present { cuda_version: version as u32, module: module_version(), gpus, peers })
}

fn device(ordinal: c_int) -> Result<cuda::CUdevice, Driver> {
    let mut device = 0;
    call!(cuDeviceGet(&raw mut device, ordinal));
    Ok(device)
}

fn gpu(device: cuda::CUdevice) -> Result<Gpu, Driver> {
    use cuda::CUdevice_attribute as Attribute;
    let mut name: [c_char; 256] = [0; 256];
    let mut bus_id: [c_char; 32] = [0; 32];
    let mut memory_bytes = 0_usize;
    call!(cuDeviceGetPCIBusId(bus_id.as_mut_ptr(), 31, device));
    call!(cuDeviceGetName(name.as_mut_ptr(), 255, device));
    call!(cuDeviceTotalMem_v2(&raw mut memory_bytes, device));
    // SAFETY: the driver ends the name with a zero, and the last byte of the array is one in any case.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    // SAFETY: as above.
    let bus_id = unsafe { CStr::from_ptr(bus_id.as_ptr()) }.to_string_lossy().into_owned();
    let number = |attribute| attribute_of(device, attribute).map(|value| value as u32);
    let flag = |attribute| attribute_of(device, attribute).map(|value| value != 0);
    Ok(Gpu {
        name,
        bus_id,
        capability: [
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ],
        sms: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: memory_bytes as u64,
        gpu_direct_rdma: flag(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
        dma_buf: flag(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
        multicast: flag(Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)?,
    })
}

fn attribute_of(device: cuda::CUdevice, attribute: cuda::CUdevice_attribute) -> Result<c_int, Driver> {
    let mut value = 0;
    call!(cuDeviceGetAttribute(&raw mut value, attribute, device));
    Ok(value)
}

fn peer(from: cuda::CUdevice, to: cuda::CUdevice, attribute: cuda::CUdevice_P2PAttribute) -> Result<bool, Driver> {
    let mut value = 0;
    call!(cuDeviceGetP2PAttribute(&raw mut value, attribute, from, to));
    Ok(value != 0)
}

/// The word after "Kernel Module" of the module's own file.
fn module_version() -> Option<String> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(version).map(str::to_owned)
}

fn compiler() -> Library {
    // SAFETY: only opens the library, whose initialisers are NVIDIA's.
    if !unsafe { nvrtc::is_culib_present() } {
        return Library::Missing;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present, and both pointers are to live locals.
    let result = unsafe { nvrtc::nvrtcVersion(&raw mut major, &raw mut minor) };
    let known = result == nvrtc::nvrtcResult::NVRTC_SUCCESS;
    Library::Present { version: known.then(|| format!("{major}.{minor}")) }
}

fn library(name: &str) -> Library {
    // SAFETY: only opens a system library and closes it again; no symbol of it is used.
    match unsafe { libloading::Library::new(name) } {
        Ok(_) => Library::Present { version: None },
        Err(_) => Library::Missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_gets_an_answer() {
        let probe = probe();
        if let Driver::Present { gpus, peers, .. } = &probe.driver {
            assert_eq!(peers.len(), gpus.len() * gpus.len().saturating_sub(1));
        }
    }

    #[test]
    fn absent_parts_are_missing() {
        assert_eq!(library("libno-such-library.so.1"), Library::Missing);
    }
}

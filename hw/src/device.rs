//! The GPU: found at run time, never assumed. Errors, the context, and compiled modules.
//!
//! The driver library and NVRTC are loaded when first asked for; a machine without them gets a typed error.

use cudarc::driver::sys;
use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};
use std::ffi::{CStr, CString};
use std::fmt;
use tilewire_kernels::cuda::{HEADERS, Source};
use tilewire_kernels::{Blocked, BuildError};

/// Why something did not run on the hardware here.
#[derive(Debug, thiserror::Error)]
pub enum HwError {
    /// No driver library.
    #[error("no CUDA driver (libcuda.so.1) on this machine")]
    NoDriver,
    /// A driver without a GPU.
    #[error("the CUDA driver finds no GPU")]
    NoDevice,
    /// No run-time compiler.
    #[error("no NVRTC (libnvrtc.so.13) on this machine; it comes with CUDA 13 or the wheel nvidia-cuda-nvrtc")]
    NoNvrtc,
    /// The GPU is of another architecture.
    #[error("the GPU is sm_{0}{1}; the device code is for sm_90a (H100, H200)")]
    Architecture(i32, i32),
    /// A device source that does not compile.
    #[error("{name}: NVRTC: {log}")]
    Compile {
        /// Source.
        name: &'static str,
        /// The compiler's words.
        log: String,
    },
    /// A driver call that failed.
    #[error("{call}: {name}")]
    Cuda {
        /// Call.
        call: &'static str,
        /// The driver's name of the error.
        name: String,
    },
    /// Something that the interpreter does not do.
    #[error("the device interpreter does not do {what}")]
    Unsupported {
        /// What.
        what: String,
    },
    /// More blocks than SMs.
    #[error("launch {launch} needs {ctas} resident CTAs, the GPU has {sms} SMs; lower the split")]
    TooManyCtas {
        /// Launch.
        launch: String,
        /// Its CTAs.
        ctas: u32,
        /// SMs.
        sms: u32,
    },
    /// The watchdog ended the launch.
    #[error("stuck: the watchdog ended the launch{}", Lines(.0))]
    Stuck(Vec<Blocked>),
    /// GPUs that do not see each other's memory.
    #[error(
        "GPU {from} cannot read, write and add to the memory of GPU {to}; cluster mode needs NVLink or PCIe peers with native atomics"
    )]
    NoPeerAccess {
        /// Index of the GPU that asks.
        from: i32,
        /// Index of the owner.
        to: i32,
    },
    /// Fewer GPUs than ranks.
    #[error("the cluster has {ranks} ranks, this machine {gpus} GPUs; cluster mode takes one each")]
    TooFewGpus {
        /// Ranks.
        ranks: usize,
        /// GPUs.
        gpus: usize,
    },
    /// Ranks that are processes did not stay together, or one of them failed.
    #[error("ranks that are processes: {0}")]
    Party(String),
    /// Puts to other nodes.
    #[error("puts: {0}")]
    Puts(#[from] crate::transport::TransportError),
    /// Connecting to other nodes.
    #[error("connecting to other nodes: {0}")]
    Wire(Box<crate::host::HostError>),
    /// A launch is over, and puts of its rank or to it are not.
    #[error(
        "{waited_s} s after the launch {pending} writes of this rank to other nodes are not complete, and {missing} puts to it did not arrive"
    )]
    PutsPending {
        /// Time waited.
        waited_s: u64,
        /// Writes not complete.
        pending: u64,
        /// Puts that did not arrive.
        missing: usize,
    },
    /// No copy of the driver's runs beside a kernel that owns every SM.
    #[error("no copy of this driver runs beside a kernel that owns every SM: puts would starve")]
    NoCopyEngine,
    /// A shape that a kernel does not take.
    #[error(transparent)]
    Build(#[from] BuildError),
}

struct Lines<'a>(&'a [Blocked]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(16).try_for_each(|blocked| write!(f, "\n  {blocked}"))?;
        if self.0.len() > 16 { write!(f, "\n  and {} more", self.0.len() - 16) } else { Ok(()) }
    }
}

/// Turns a driver's result into ours.
pub(crate) fn check(call: &'static str, result: sys::CUresult) -> Result<(), HwError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(HwError::Cuda { call, name: format!("{result:?}") })
}

/// A GPU and the context of this process on it.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    context: sys::CUcontext,
    /// In the driver's order.
    pub index: i32,
    /// SMs.
    pub sms: u32,
    /// Compute capability.
    pub capability: (i32, i32),
}

// SAFETY: a context handle may be used from any thread that makes it current.
unsafe impl Send for Device {}
// SAFETY: as above; the handle is never written.
unsafe impl Sync for Device {}

impl Device {
    /// The first GPU.
    ///
    /// # Errors
    /// As [`Device::all`].
    pub fn open() -> Result<Self, HwError> {
        Self::open_at(0)
    }

    /// All GPUs of this machine, in the driver's order.
    ///
    /// # Errors
    /// [`HwError::NoDriver`], [`HwError::NoDevice`], [`HwError::Architecture`], [`HwError::Cuda`].
    pub fn all() -> Result<Vec<Self>, HwError> {
        (0..Self::count()? as i32).map(Self::open_at).collect()
    }

    /// GPUs of this machine.
    ///
    /// # Errors
    /// [`HwError::NoDriver`], [`HwError::NoDevice`], [`HwError::Cuda`].
    pub fn count() -> Result<usize, HwError> {
        // SAFETY: only tries to load the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(HwError::NoDriver);
        }
        let mut count = 0;
        // SAFETY: the library is there; `count` outlives the call.
        unsafe {
            if sys::cuInit(0) == sys::CUresult::CUDA_ERROR_NO_DEVICE {
                return Err(HwError::NoDevice);
            }
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
        }
        if count == 0 { Err(HwError::NoDevice) } else { Ok(count as usize) }
    }

    /// The GPU of an index; its context becomes current in this thread.
    ///
    /// # Errors
    /// [`HwError::NoDriver`], [`HwError::NoDevice`], [`HwError::Architecture`], [`HwError::Cuda`].
    pub(crate) fn open_at(index: i32) -> Result<Self, HwError> {
        use sys::CUdevice_attribute as A;
        Self::count()?;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        let attribute = |attribute, device| {
            let mut value = 0;
            // SAFETY: `value` outlives the call.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
            Ok::<i32, HwError>(value)
        };
        // SAFETY: the library is there and initialised; all pointers are to live locals.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, index))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)?;
        let sms = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)? as u32;
        if (major, minor) != (9, 0) {
            return Err(HwError::Architecture(major, minor));
        }
        let device = Self { context, index, sms, capability: (major, minor) };
        device.make_current()?;
        Ok(device)
    }

    /// Lets every GPU of a list read, write and add to the memory of every other one.
    ///
    /// # Errors
    /// [`HwError::NoPeerAccess`] where a pair lacks access or native atomics, [`HwError::Cuda`].
    pub fn connect(devices: &[Self]) -> Result<(), HwError> {
        for from in devices {
            from.make_current()?;
            for to in devices.iter().filter(|to| to.index != from.index) {
                from.reaches(to.index)?;
                // SAFETY: both contexts live as long as the process.
                let enabled = unsafe { sys::cuCtxEnablePeerAccess(to.context, 0) };
                if enabled != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
                    check("cuCtxEnablePeerAccess", enabled)?;
                }
            }
        }
        Ok(())
    }

    /// Whether this GPU can read, write and add to the memory of the GPU `to`, whose process may be another.
    ///
    /// # Errors
    /// [`HwError::NoPeerAccess`], [`HwError::Cuda`].
    pub(crate) fn reaches(&self, to: i32) -> Result<(), HwError> {
        use sys::CUdevice_P2PAttribute as A;
        for attribute in
            [A::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, A::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED]
        {
            let mut value = 0;
            // SAFETY: `value` outlives the call; device handles are indices.
            check("cuDeviceGetP2PAttribute", unsafe {
                sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, self.index, to)
            })?;
            if value == 0 {
                return Err(HwError::NoPeerAccess { from: self.index, to });
            }
        }
        Ok(())
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, HwError> {
        let mut value = 0;
        // SAFETY: `value` outlives the call; device handles are indices.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.index) })?;
        Ok(value)
    }

    /// Whether NICs can be let into mapped memory.
    pub(crate) fn lets_nics_in(&self) -> Result<bool, HwError> {
        let vmm = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        Ok(self.attribute(vmm)? != 0)
    }

    /// Whether this GPU's threads see what a NIC wrote, in its order, without being told to look again.
    pub(crate) fn sees_writes_of_nics(&self) -> Result<bool, HwError> {
        let ordering = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
        let owner = sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32;
        Ok(self.attribute(ordering)? >= owner)
    }

    /// Makes what NICs have written visible to the threads of the GPU whose context is current.
    pub(crate) fn flush_writes_of_nics() -> Result<(), HwError> {
        let target = sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: a call without pointers; it asks for the current context.
        check("cuFlushGPUDirectRDMAWrites", unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) })
    }

    /// The driver's name of this GPU's place on PCIe, `0000:17:00.0`.
    pub(crate) fn bus_id(&self) -> Result<String, HwError> {
        let mut text = [0; 32];
        // SAFETY: the call writes no more than it is told there is room for, with a zero at its end.
        let text = unsafe {
            check("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, self.index))?;
            CStr::from_ptr(text.as_ptr())
        };
        Ok(text.to_string_lossy().into_owned())
    }

    /// Makes the context current in this thread.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn make_current(&self) -> Result<(), HwError> {
        // SAFETY: the primary context is never released.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// The driver's version, as `13000`.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn driver_version(&self) -> Result<i32, HwError> {
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        Ok(version)
    }

    /// Loads a module.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn load(&self, cubin: &[u8]) -> Result<Module, HwError> {
        self.make_current()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a cubin is an ELF image that carries its own size.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, cubin.as_ptr().cast()) })?;
        Ok(Module { module })
    }
}

/// A loaded module; it lives as long as the process.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    module: sys::CUmodule,
}

impl Module {
    /// Address of a variable of `bytes` bytes.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    ///
    /// # Panics
    /// If the device has it in another size: one of the two sides was forgotten.
    pub(crate) fn variable(&self, name: &str, bytes: usize) -> Result<sys::CUdeviceptr, HwError> {
        let text = CString::new(name).unwrap_or_default();
        let (mut address, mut size) = (0, 0);
        // SAFETY: as in `function`.
        check("cuModuleGetGlobal", unsafe {
            sys::cuModuleGetGlobal_v2(&raw mut address, &raw mut size, self.module, text.as_ptr())
        })?;
        assert_eq!(size, bytes, "size of {name}");
        Ok(address)
    }

    /// An entry, allowed `smem` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub(crate) fn function(&self, name: &str, smem: u32) -> Result<sys::CUfunction, HwError> {
        let name = CString::new(name).unwrap_or_default();
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is never unloaded; `name` ends with a zero.
        unsafe {
            check("cuModuleGetFunction", sys::cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()))?;
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            check("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, attribute, smem as i32))?;
        }
        Ok(function)
    }
}

/// A cubin and what the compiler said (registers and spills of every entry).
#[derive(Clone, Debug)]
pub struct Cubin {
    /// Machine code.
    pub bytes: Vec<u8>,
    /// The compiler's words.
    pub log: String,
}

/// NVRTC's version; needs no GPU.
///
/// # Errors
/// [`HwError::NoNvrtc`].
pub fn nvrtc_version() -> Result<(i32, i32), HwError> {
    // SAFETY: only tries to load the library.
    if !unsafe { nvrtc_sys::is_culib_present() } {
        return Err(HwError::NoNvrtc);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to live locals. It fails for no other reason than null pointers.
    unsafe { nvrtc_sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    Ok((major, minor))
}

/// Compiles a device source for sm_90a; needs no GPU.
///
/// # Errors
/// [`HwError::NoNvrtc`], [`HwError::Compile`].
pub fn compile((name, text): Source) -> Result<Cubin, HwError> {
    nvrtc_version()?;
    let fail = |log: String| HwError::Compile { name, log };
    let c = |text: &str| CString::new(text).map_err(|_| fail("a zero byte in a source".into()));
    let source = c(text)?;
    let names = HEADERS.iter().map(|(name, _)| c(name)).collect::<Result<Vec<_>, _>>()?;
    let texts = HEADERS.iter().map(|(_, text)| c(text)).collect::<Result<Vec<_>, _>>()?;
    let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
    let (names, texts) = (pointers(&names), pointers(&texts));
    let file = c(name)?;
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings outlive the program, which ends here.
    unsafe {
        nvrtc_sys::nvrtcCreateProgram(
            &raw mut program,
            source.as_ptr(),
            file.as_ptr(),
            HEADERS.len() as i32,
            texts.as_ptr().cast_mut().cast(),
            names.as_ptr().cast_mut().cast(),
        )
        .result()
        .map_err(|error| fail(format!("{error:?}")))?;
        let options = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v"];
        let compiled = nvrtc::compile_program(program, &options);
        let log = nvrtc::get_program_log(program).unwrap_or_default();
        let log = if log.is_empty() { String::new() } else { CStr::from_ptr(log.as_ptr()).to_string_lossy().into() };
        let bytes = compiled.map_err(|_| fail(log.clone())).and_then(|()| {
            let mut size = 0;
            nvrtc_sys::nvrtcGetCUBINSize(program, &raw mut size).result().map_err(|e| fail(format!("{e:?}")))?;
            let mut bytes = vec![0u8; size];
            let to = bytes.as_mut_ptr().cast();
            nvrtc_sys::nvrtcGetCUBIN(program, to).result().map_err(|e| fail(format!("{e:?}")))?;
            Ok(bytes)
        });
        let _ = nvrtc::destroy_program(program);
        Ok(Cubin { bytes: bytes?, log })
    }
}

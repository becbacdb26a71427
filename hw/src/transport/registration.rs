//! How a NIC comes to the memory of a GPU: by dmabuf, by nvidia-peermem, else through pinned host memory.
//!
//! The first way that works is taken, and a record says which, and why those before it did not. The order and the reports
//! are tested with doubles; no GPU has met a NIC through this code.

use crate::device::{Device, HwError, check};
use crate::memory::SharedMemory;
use cudarc::driver::sys;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// A way to a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// The driver exports the memory as a dmabuf, which the RDMA library registers.
    DmaBuf,
    /// The kernel module nvidia-peermem lets a NIC register a device address like a host's.
    PeerMem,
    /// The NIC sees pinned host memory only; [`super::bounce`] copies between it and the GPU.
    Bounce,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DmaBuf => "dmabuf",
            Self::PeerMem => "nvidia-peermem",
            Self::Bounce => "pinned host bounce buffer",
        })
    }
}

/// A NIC that registers memory.
pub trait Nic {
    /// A registration.
    type Region;

    /// Registers an address of this process.
    ///
    /// # Errors
    /// The system's.
    fn register(&self, address: u64, bytes: u64) -> io::Result<Self::Region>;

    /// Registers `bytes` bytes from `offset` on of a dmabuf, which peers name by `address`.
    ///
    /// # Errors
    /// The system's.
    fn register_dmabuf(&self, fd: BorrowedFd<'_>, offset: u64, bytes: u64, address: u64) -> io::Result<Self::Region>;
}

/// A GPU whose memory is registered.
pub trait Gpu {
    /// Pinned host memory.
    type Pinned;

    /// A dmabuf that holds a range, which begins and ends at pages.
    ///
    /// # Errors
    /// The driver's.
    fn export(&self, address: u64, bytes: u64) -> Result<OwnedFd, HwError>;

    /// Pinned host memory and its address.
    ///
    /// # Errors
    /// The driver's.
    fn pin(&self, bytes: u64) -> Result<(Self::Pinned, u64), HwError>;
}

/// Registered memory of a GPU.
#[derive(Debug)]
pub struct Registered<R, P> {
    /// The NIC's registration.
    pub region: R,
    /// How it was come by.
    pub path: Path,
    /// The host memory that stands for the GPU's, behind [`Path::Bounce`], and its address.
    pub pinned: Option<(P, u64)>,
    /// What was tried before, and why it failed.
    pub refused: Vec<(Path, String)>,
}

impl<R, P> Registered<R, P> {
    /// For records.
    pub fn name(&self) -> String {
        let refused: Vec<String> = self.refused.iter().map(|(path, why)| format!("; no {path}: {why}")).collect();
        format!("GPU memory by {}{}", self.path, refused.concat())
    }
}

/// The driver exports whole pages of this size or a multiple.
const PAGE: u64 = 65_536;

/// Registers a range of a GPU's memory in the first way that works.
///
/// # Errors
/// [`HwError`] or the NIC's words of every way, when none works.
pub fn register<N: Nic, G: Gpu>(
    nic: &N,
    gpu: &G,
    address: u64,
    bytes: u64,
) -> Result<Registered<N::Region, G::Pinned>, super::TransportError> {
    let mut refused = Vec::new();
    let from = address / PAGE * PAGE;
    let exported = gpu.export(from, (address + bytes).next_multiple_of(PAGE) - from);
    let region = exported
        .map_err(|error| error.to_string())
        .and_then(|fd| {
            nic.register_dmabuf(fd.as_fd(), address - from, bytes, address).map_err(|error| error.to_string())
        })
        .map_err(|why| refused.push((Path::DmaBuf, why)));
    if let Ok(region) = region {
        return Ok(Registered { region, path: Path::DmaBuf, pinned: None, refused });
    }
    match nic.register(address, bytes) {
        Ok(region) => return Ok(Registered { region, path: Path::PeerMem, pinned: None, refused }),
        Err(error) => refused.push((Path::PeerMem, error.to_string())),
    }
    let pinned = gpu
        .pin(bytes)
        .map_err(|error| error.to_string())
        .and_then(|(memory, at)| Ok((nic.register(at, bytes).map_err(|error| error.to_string())?, memory, at)));
    match pinned {
        Ok((region, memory, at)) => Ok(Registered { region, path: Path::Bounce, pinned: Some((memory, at)), refused }),
        Err(why) => {
            refused.push((Path::Bounce, why));
            let ways: Vec<String> = refused.iter().map(|(path, why)| format!("{path}: {why}")).collect();
            let what = format!("no way for the NIC to {bytes} bytes of GPU memory: {}", ways.join("; "));
            Err(super::TransportError::Missing { what })
        }
    }
}

impl Gpu for Device {
    type Pinned = SharedMemory;

    fn export(&self, address: u64, bytes: u64) -> Result<OwnedFd, HwError> {
        self.make_current()?;
        let mut fd: i32 = -1;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: a handle of this kind is a file descriptor, an int, and `fd` outlives the call.
        check("cuMemGetHandleForAddressRange", unsafe {
            sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, bytes as usize, kind, 0)
        })?;
        // SAFETY: the call made it for its caller alone.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn pin(&self, bytes: u64) -> Result<(SharedMemory, u64), HwError> {
        self.make_current()?;
        let memory = SharedMemory::new(bytes as usize)?;
        let address = memory.host_address();
        Ok((memory, address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::os::fd::AsRawFd;

    /// A NIC and a GPU of which some ways fail, and what they were asked.
    struct Double {
        dmabuf: bool,
        peermem: bool,
        pinned: bool,
        export: bool,
        asked: RefCell<Vec<String>>,
    }

    const GPU: u64 = 0x7f00_0001_0100;
    const HOST: u64 = 0x1000;

    impl Double {
        fn with(ways: [bool; 4]) -> Self {
            let [export, dmabuf, peermem, pinned] = ways;
            Self { dmabuf, peermem, pinned, export, asked: RefCell::new(Vec::new()) }
        }

        fn answer(&self, works: bool, asked: String) -> io::Result<String> {
            self.asked.borrow_mut().push(asked.clone());
            if works { Ok(asked) } else { Err(io::Error::from_raw_os_error(95)) }
        }
    }

    impl Nic for Double {
        type Region = String;

        fn register(&self, address: u64, bytes: u64) -> io::Result<String> {
            let works = if address == HOST { self.pinned } else { self.peermem };
            self.answer(works, format!("register {address:#x} {bytes}"))
        }

        fn register_dmabuf(&self, fd: BorrowedFd<'_>, offset: u64, bytes: u64, address: u64) -> io::Result<String> {
            assert!(fd.as_raw_fd() > 2, "an open file");
            self.answer(self.dmabuf, format!("dmabuf {offset} {bytes} as {address:#x}"))
        }
    }

    impl Gpu for Double {
        type Pinned = ();

        fn export(&self, address: u64, bytes: u64) -> Result<OwnedFd, HwError> {
            self.asked.borrow_mut().push(format!("export {address:#x} {bytes}"));
            let failed = HwError::Cuda { call: "cuMemGetHandleForAddressRange", name: "not supported".to_owned() };
            if self.export { Ok(std::fs::File::open("/dev/null").expect("a file").into()) } else { Err(failed) }
        }

        fn pin(&self, _: u64) -> Result<((), u64), HwError> {
            Ok(((), HOST))
        }
    }

    #[test]
    fn the_first_way_that_works_is_taken_and_the_record_says_why_not_another() {
        let double = Double::with([true; 4]);
        let registered = register(&double, &double, GPU, 70_000).expect("dmabuf");
        assert_eq!(registered.name(), "GPU memory by dmabuf");
        // Whole pages are exported, the range inside them is registered, under its own address.
        assert_eq!(double.asked.take(), ["export 0x7f0000010000 131072", "dmabuf 256 70000 as 0x7f0000010100"]);
        for (ways, path, refused) in [
            ([false, true, true, true], Path::PeerMem, 1),
            ([true, false, true, true], Path::PeerMem, 1),
            ([true, false, false, true], Path::Bounce, 2),
        ] {
            let double = Double::with(ways);
            let registered = register(&double, &double, GPU, 4096).expect("some way");
            assert_eq!((registered.path, registered.refused.len()), (path, refused), "{ways:?}");
            assert_eq!(registered.pinned.is_some(), path == Path::Bounce);
            let name = registered.name();
            assert!(name.starts_with(&format!("GPU memory by {path}; no dmabuf: ")), "{name}");
        }
        let double = Double::with([false; 4]);
        let error = register(&double, &double, GPU, 4096).expect_err("no way").to_string();
        for way in ["dmabuf: ", "nvidia-peermem: ", "pinned host bounce buffer: "] {
            assert!(error.contains(way), "{error}");
        }
    }
}

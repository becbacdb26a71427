//! How a NIC comes to the memory of a rank: of a GPU by dmabuf or by nvidia-peermem, else through host memory.
//!
//! The first way that works is taken, and a record says which. Order and reports are tested with doubles; no GPU has met a
//! NIC through this code.

use crate::device::{Device, HwError, check};
use cudarc::driver::sys;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// A way to a rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Path {
    /// It is host memory, which the NIC registers as it is.
    Host,
    /// The driver exports GPU memory as a dmabuf, which the RDMA library registers.
    DmaBuf,
    /// The kernel module nvidia-peermem lets a NIC register a device address like a host's.
    PeerMem,
    /// The NIC sees other memory, of the host; [`super::bounce`] copies between it and the rank's.
    Bounce,
}

impl Path {
    /// All ways.
    pub const ALL: [Self; 4] = [Self::Host, Self::DmaBuf, Self::PeerMem, Self::Bounce];
    /// Ways to the memory of a GPU itself, the better one first.
    pub const DIRECT: [Self; 2] = [Self::DmaBuf, Self::PeerMem];

    /// Its name here and in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::DmaBuf => "dmabuf",
            Self::PeerMem => "peermem",
            Self::Bounce => "bounce",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A NIC that registers memory.
pub trait Nic {
    /// A registration, which ends when it is dropped.
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
    /// A dmabuf that holds a range, which begins and ends at pages.
    ///
    /// # Errors
    /// The driver's.
    fn export(&self, address: u64, bytes: u64) -> Result<OwnedFd, HwError>;
}

/// The driver exports whole pages of this size or a multiple.
const PAGE: u64 = 65_536;

/// Registers a range of a GPU's memory with every NIC, in the first of these ways that all of them take; the regions in
/// the order of the NICs.
///
/// # Errors
/// Why each way failed.
pub fn register<N: Nic, G: Gpu>(
    nics: &[N],
    gpu: &G,
    (address, bytes): (u64, u64),
    ways: &[Path],
) -> Result<(Vec<N::Region>, Path), Refused> {
    let mut refused = Vec::new();
    for &way in ways {
        let regions = match way {
            Path::DmaBuf => {
                let from = address / PAGE * PAGE;
                let exported = gpu.export(from, (address + bytes).next_multiple_of(PAGE) - from);
                exported.map_err(|error| error.to_string()).and_then(|file| {
                    let one = |nic: &N| nic.register_dmabuf(file.as_fd(), address - from, bytes, address);
                    nics.iter().map(one).collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())
                })
            }
            Path::PeerMem => {
                let one = |nic: &N| nic.register(address, bytes);
                nics.iter().map(one).collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())
            }
            Path::Host | Path::Bounce => Err("not a way to the memory of a GPU itself".to_owned()),
        };
        match regions {
            Ok(regions) => return Ok((regions, way)),
            Err(why) => refused.push((way, why)),
        }
    }
    Err(refused)
}

/// Ways that failed, and why.
pub type Refused = Vec<(Path, String)>;

/// Ways that failed, in words.
pub fn reasons(refused: &[(Path, String)]) -> String {
    refused.iter().map(|(path, why)| format!("no {path}: {why}")).collect::<Vec<_>>().join("; ")
}

impl Gpu for Device {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::os::fd::AsRawFd;

    /// A NIC and a GPU of which some ways fail, and what they were asked.
    #[derive(Default)]
    struct Double {
        dmabuf: bool,
        peermem: bool,
        export: bool,
        asked: RefCell<Vec<String>>,
    }

    const GPU: u64 = 0x7f00_0001_0100;

    impl Double {
        fn with([export, dmabuf, peermem]: [bool; 3]) -> Self {
            Self { dmabuf, peermem, export, ..Self::default() }
        }

        fn answer(&self, works: bool, asked: String) -> io::Result<String> {
            self.asked.borrow_mut().push(asked.clone());
            if works { Ok(asked) } else { Err(io::Error::from_raw_os_error(95)) }
        }
    }

    impl Nic for Double {
        type Region = String;

        fn register(&self, address: u64, bytes: u64) -> io::Result<String> {
            self.answer(self.peermem, format!("register {address:#x} {bytes}"))
        }

        fn register_dmabuf(&self, fd: BorrowedFd<'_>, offset: u64, bytes: u64, address: u64) -> io::Result<String> {
            assert!(fd.as_raw_fd() > 2, "an open file");
            self.answer(self.dmabuf, format!("dmabuf {offset} {bytes} as {address:#x}"))
        }
    }

    impl Gpu for Double {
        fn export(&self, address: u64, bytes: u64) -> Result<OwnedFd, HwError> {
            self.asked.borrow_mut().push(format!("export {address:#x} {bytes}"));
            let failed = HwError::Cuda { call: "cuMemGetHandleForAddressRange", name: "not supported".to_owned() };
            if self.export { Ok(std::fs::File::open("/dev/null").expect("a file").into()) } else { Err(failed) }
        }
    }

    #[test]
    fn the_first_way_that_every_nic_takes_is_taken() {
        let gpu = Double::with([true; 3]);
        let nics = [Double::with([true; 3]), Double::with([true; 3])];
        let (regions, path) = register(&nics, &gpu, (GPU, 70_000), &Path::DIRECT).expect("dmabuf");
        assert_eq!((regions.len(), path), (2, Path::DmaBuf));
        // Whole pages are exported, the range inside them is registered, under its own address.
        assert_eq!(gpu.asked.take(), ["export 0x7f0000010000 131072"]);
        assert_eq!(nics[1].asked.take(), ["dmabuf 256 70000 as 0x7f0000010100"]);
        for (export, second) in [(false, [false, true, true]), (true, [true, false, true])] {
            let (gpu, nics) = (Double::with([export; 3]), [Double::with([true; 3]), Double::with(second)]);
            let (_, path) = register(&nics, &gpu, (GPU, 4096), &Path::DIRECT).expect("peermem");
            assert_eq!(path, Path::PeerMem, "one NIC that refuses is enough");
        }
        let nothing = [Double::with([false; 3])];
        let refused = register(&nothing, &Double::with([true; 3]), (GPU, 4096), &Path::DIRECT).expect_err("no way");
        let text = reasons(&refused);
        assert!(text.starts_with("no dmabuf: ") && text.contains("; no peermem: "), "{text}");
        let asked = [Double::with([true; 3])];
        let refused = register(&asked, &Double::with([true; 3]), (GPU, 4096), &[Path::Bounce]).expect_err("not direct");
        assert!(reasons(&refused).contains("no bounce") && asked[0].asked.take().is_empty());
    }
}

//! Device memory that other processes of the host map: a file descriptor stands for it on its way.

use crate::device::{Device, HwError, check};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const HANDLE: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Physical memory of a GPU, mapped into this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) address: u64,
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Mapping {
    /// At least `bytes` bytes on `device`, and the descriptor that stands for them elsewhere. With `rdma`, a NIC is to
    /// reach them, where the driver can let it.
    pub(crate) fn export(device: Device, bytes: usize, rdma: bool) -> Result<(Self, OwnedFd), HwError> {
        device.make_current()?;
        let location = location(device);
        let wanted = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: HANDLE,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(rdma && device.lets_nics_in()?),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let bytes = whole_pages(&wanted, bytes)?;
        let mut handle = 0;
        // SAFETY: both pointers are to live locals.
        check("cuMemCreate", unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const wanted, 0) })?;
        let mapping = Self::map(device, handle, bytes)?;
        let mut descriptor: i32 = -1;
        // SAFETY: a handle of this kind is written as an int.
        check("cuMemExportToShareableHandle", unsafe {
            sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, HANDLE, 0)
        })?;
        // SAFETY: the driver has just opened it for us.
        Ok((mapping, unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    /// What another process exported with this many `bytes`, for use by `device`.
    pub(crate) fn import(device: Device, descriptor: BorrowedFd<'_>, bytes: usize) -> Result<Self, HwError> {
        device.make_current()?;
        let mut handle = 0;
        // SAFETY: a handle of this kind is passed as an int in a pointer's place; the driver keeps no descriptor.
        check("cuMemImportFromShareableHandle", unsafe {
            let descriptor = descriptor.as_raw_fd() as usize as *mut c_void;
            sys::cuMemImportFromShareableHandle(&raw mut handle, descriptor, HANDLE)
        })?;
        Self::map(device, handle, bytes)
    }

    /// Bytes that are mapped.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    fn map(device: Device, handle: sys::CUmemGenericAllocationHandle, bytes: usize) -> Result<Self, HwError> {
        // Whatever fails below, the memory is given back.
        let mut mapping = Self { address: 0, bytes, handle };
        // SAFETY: `address` outlives the call.
        check("cuMemAddressReserve", unsafe { sys::cuMemAddressReserve(&raw mut mapping.address, bytes, 0, 0, 0) })?;
        let address = mapping.address;
        let access = sys::CUmemAccessDesc {
            location: location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was just reserved, and is as long as the memory behind the handle.
        unsafe {
            check("cuMemMap", sys::cuMemMap(address, bytes, 0, handle, 0))?;
            check("cuMemSetAccess", sys::cuMemSetAccess(address, bytes, &raw const access, 1))?;
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: reserved, mapped and created once. After a trap the calls fail, and nothing is left to free.
        unsafe {
            if self.address != 0 {
                sys::cuMemUnmap(self.address, self.bytes);
                sys::cuMemAddressFree(self.address, self.bytes);
            }
            sys::cuMemRelease(self.handle);
        }
    }
}

const fn location(device: Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.index }
}

/// Such memory comes in pages.
fn whole_pages(wanted: &sys::CUmemAllocationProp, bytes: usize) -> Result<usize, HwError> {
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let mut page = 0;
    // SAFETY: both pointers are to live memory.
    check("cuMemGetAllocationGranularity", unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut page, wanted, least)
    })?;
    Ok(bytes.max(1).next_multiple_of(page.max(1)))
}

//! Memory that frees itself: on the device, and on the host where both sides see it.

use crate::device::{HwError, check};
use crate::exported::Mapping;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::Arc;

/// Device memory.
#[derive(Debug)]
pub struct DeviceMemory {
    pub(crate) address: u64,
    bytes: usize,
    /// What it is a part of, where it is no allocation of its own.
    part_of: Option<Arc<Mapping>>,
}

impl DeviceMemory {
    /// `bytes` bytes, at least one.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn new(bytes: usize) -> Result<Self, HwError> {
        let bytes = bytes.max(256);
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        Ok(Self { address, bytes, part_of: None })
    }

    /// `bytes` bytes of a mapping from byte `at` on.
    pub(crate) fn part(mapping: &Arc<Mapping>, at: usize, bytes: usize) -> Self {
        assert!(at + bytes <= mapping.bytes(), "{bytes} bytes at {at} of a mapping of {}", mapping.bytes());
        Self { address: mapping.address + at as u64, bytes, part_of: Some(mapping.clone()) }
    }

    /// Memory that holds `items`.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn of<T: Copy>(items: &[T]) -> Result<Self, HwError> {
        let memory = Self::new(size_of_val(items))?;
        memory.write(0, items)?;
        Ok(memory)
    }

    /// Copies `items` to byte `at`.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn write<T: Copy>(&self, at: usize, items: &[T]) -> Result<(), HwError> {
        let bytes = size_of_val(items);
        assert!(at + bytes <= self.bytes, "a write of {bytes} bytes at {at} to {} bytes", self.bytes);
        // SAFETY: both ranges are inside their allocations.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(self.address + at as u64, items.as_ptr().cast(), bytes) })
    }

    /// The first `count` items.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn read<T: Copy + Default>(&self, count: usize) -> Result<Vec<T>, HwError> {
        self.read_at(0, count)
    }

    /// `count` items from byte `at` on.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn read_at<T: Copy + Default>(&self, at: usize, count: usize) -> Result<Vec<T>, HwError> {
        let mut items = vec![T::default(); count];
        self.read_into(at, &mut items)?;
        Ok(items)
    }

    /// Fills `items` from byte `at` on.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn read_into<T: Copy>(&self, at: usize, items: &mut [T]) -> Result<(), HwError> {
        let bytes = size_of_val(items);
        assert!(at + bytes <= self.bytes, "a read of {bytes} bytes at {at} from {} bytes", self.bytes);
        let from = self.address + at as u64;
        // SAFETY: both ranges are inside their allocations.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(items.as_mut_ptr().cast(), from, bytes) })
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn set(&self, byte: u8) -> Result<(), HwError> {
        // SAFETY: the range is the allocation.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(self.address, byte, self.bytes) })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.part_of.is_none() {
            // SAFETY: allocated by cuMemAlloc and freed once. After a trap the call fails, and nothing is left to free.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Pinned host memory that the device sees; it stays readable after the device's context has failed.
#[derive(Debug)]
pub struct SharedMemory {
    host: *mut c_void,
    pub(crate) address: u64,
    bytes: usize,
}

// SAFETY: the pointer is to memory of its own; access goes through volatile reads and writes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `bytes` zero bytes.
    ///
    /// # Errors
    /// [`HwError::Cuda`].
    pub fn new(bytes: usize) -> Result<Self, HwError> {
        let bytes = bytes.max(64);
        let (mut host, mut address) = (std::ptr::null_mut(), 0);
        // SAFETY: the pointers are to live locals, and the memory is as long as is written.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut host, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP))?;
            host.cast::<u8>().write_bytes(0, bytes);
            check("cuMemHostGetDevicePointer", sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0))?;
        }
        Ok(Self { host, address, bytes })
    }

    /// Address in this process.
    pub fn host_address(&self) -> u64 {
        self.host as u64
    }

    /// Reads item `index` of an array of `T`.
    pub fn get<T: Copy>(&self, index: usize) -> T {
        assert!((index + 1) * size_of::<T>() <= self.bytes, "index {index} is inside");
        // SAFETY: inside the allocation, which is aligned to a page.
        unsafe { self.host.cast::<T>().add(index).read_volatile() }
    }

    /// Writes item `index` of an array of `T`.
    pub fn put<T: Copy>(&self, index: usize, value: T) {
        assert!((index + 1) * size_of::<T>() <= self.bytes, "index {index} is inside");
        // SAFETY: inside the allocation, which is aligned to a page.
        unsafe { self.host.cast::<T>().add(index).write_volatile(value) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemHostAlloc and freed once.
        unsafe { sys::cuMemFreeHost(self.host) };
    }
}

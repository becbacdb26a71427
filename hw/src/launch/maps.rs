//! Tensor maps, which the device's bulk copies go by.

use crate::device::{HwError, check};
use crate::lower::{MapKind, MapSpec};
use cudarc::driver::sys;
use std::ffi::c_void;

/// A tensor map as the driver writes it.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct TensorMap(pub [u64; 16]);

/// Rows of `pitch` bytes as (64 elements, rows, blocks of 64 elements), see `tma.cuh`.
///
/// # Errors
/// [`HwError::Cuda`].
pub(super) fn tensor_map(spec: &MapSpec, base: u64, bytes: u64) -> Result<TensorMap, HwError> {
    let pitch = u64::from(spec.pitch);
    let dimensions = [64, bytes / pitch, pitch / 128];
    let strides = [pitch, 128];
    let boxes: [u32; 3] = match spec.kind {
        MapKind::Rows => [64, 128, 1],
        MapKind::Panel => [64, 64, 4],
        MapKind::Output => [64, 64, 1],
        MapKind::Heads(rows) => [64, rows, 2],
    };
    let steps = [1u32; 3];
    let mut map = TensorMap([0; 16]);
    // SAFETY: all arrays outlive the call and have as many entries as the rank asks for.
    check("cuTensorMapEncodeTiled", unsafe {
        sys::cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            base as *mut c_void,
            dimensions.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    })?;
    Ok(map)
}

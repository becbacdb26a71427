//! Schedules of fused multi-GPU kernels.
//!
//! ```text
//!  problem, cluster, fabric, options ──▶ builder ──▶ Schedule ──▶ simulator          (tilewire-sim)
//!   (a Kernel: one file each)                           │      ├▶ functional executor (tilewire-hw)
//!                                                       │      └▶ GPU and RDMA        (tilewire-hw)
//!                                                       └▶ static checker, hash, JSON (here)
//! ```
//!
//! This crate writes schedules down and reasons about them. It does no I/O, reads no clock and knows no speed.
#![forbid(unsafe_code)]

pub mod ag_gemm;
pub mod baseline;
pub mod blocked;
pub mod check;
pub mod cluster;
pub mod cuda;
pub mod encode;
pub mod gemm_ar;
pub mod gemm_rs;
pub mod kernel;
pub mod moe_dispatch_gemm;
pub mod options;
pub mod phases;
mod reference;
pub mod ring_attention;
mod routing;
pub mod schedule;
pub mod text;

pub use baseline::baseline;
pub use blocked::Blocked;
pub use cluster::{Cluster, Fabric, Offset, Rank};
pub use encode::{ScheduleHash, schedule_hash};
pub use kernel::{BuildError, Kernel, Problem, ProblemKind, Product, Spec};
pub use options::{OptionSet, Options};
pub use phases::bulk_synchronous;
pub use schedule::{RoleKind, RoleSplit, Schedule, Task};

/// Every kernel. A new kernel is its file and a line here.
pub static KERNELS: &[&dyn Kernel] = &[
    &ag_gemm::AgGemm,
    &gemm_ar::GemmAr,
    &gemm_rs::GemmRs,
    &moe_dispatch_gemm::MoeDispatchGemm,
    &ring_attention::RingAttention,
];

/// The kernel with this name.
pub fn kernel(name: &str) -> Option<&'static dyn Kernel> {
    KERNELS.iter().copied().find(|kernel| kernel.name() == name)
}

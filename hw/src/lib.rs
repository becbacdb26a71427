//! What executes a Schedule with real data.
//!
//! ```text
//! Schedule ──▶ values: functional executor on the CPU, every interleaving legal   (this is what proves values)
//! machine  ──▶ probe: driver, GPUs, NVRTC and RDMA devices that are here, never a panic
//! ```
//!
//! Builds everywhere; nothing here predicts a time.

pub mod probe;
pub mod values;

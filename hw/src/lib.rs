//! What executes a Schedule with real data.
//!
//! ```text
//! Schedule ──▶ values: functional executor on the CPU, every interleaving legal   (this is what proves values)
//!    │
//!    └─ lower ─▶ Program ─▶ launch: device interpreter on a GPU     ◀── device: driver, NVRTC
//!                             │  FIFO in host memory                ◀── memory
//!                             │  cluster: a GPU per rank, peers over NVLink; party: where ranks are processes
//!                             ├▶ proxy: puts by the copy engines
//!                             └▶ remote: puts to other nodes, over a transport of below
//!                measure: inputs, comparison with the reference, times; timeline: of every task; reduced: compute or communication alone
//!                gpu: all of it opened at once; readings: flags, launches and the FIFO by themselves
//! Schedule ──▶ host: CPU threads as CTAs, one or more processes  ──▶ transport: loopback, RDMA   ◀── bootstrap: TCP
//! machine  ──▶ probe: driver, GPUs, NVRTC and RDMA devices that are here, never a panic
//! ```
//!
//! Builds everywhere; nothing here predicts a time.

pub mod bootstrap;
pub mod cluster;
pub mod device;
mod exported;
pub mod gpu;
pub mod host;
pub mod launch;
pub mod lower;
pub mod measure;
pub mod memory;
pub mod party;
pub mod probe;
pub mod program;
pub mod proxy;
pub mod readings;
pub mod reduced;
pub mod remote;
mod samples;
pub mod timeline;
pub mod transport;
mod upload;
pub mod values;

//! What executes a Schedule with real data.
//!
//! ```text
//! Schedule ──▶ values: functional executor on the CPU, every interleaving legal   (this is what proves values)
//! ```
//!
//! Builds everywhere; nothing here predicts a time.

pub mod values;

//! RDMA through libibverbs, loaded at run time: `verbs-rc` on InfiniBand and RoCE, `verbs-srd` on EFA.
//!
//! Types come from `ibverbs-sys`; no function of it is referenced, so that the binary also starts where the library is
//! missing. Every unsafe call is wrapped once, in [`device`] and the endpoints.
//!
//! Memory is registered without relaxed ordering: under it a NIC may make a flag visible before the data that the same
//! queue wrote earlier.

pub mod device;
pub mod library;
pub mod rc;
pub mod srd;

pub use device::{Device, Port};
pub use library::Library;

use crate::transport::TransportError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a rank tells its peers so that they can write to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    gid: [u8; 16],
    lid: u16,
    mtu: u32,
    /// Address, key and size of its segment.
    address: u64,
    key: u32,
    bytes: u64,
    /// Queue pairs by peer, then proxy, then index.
    queue_pairs: BTreeMap<u32, Vec<Vec<u32>>>,
}

impl Card {
    fn new(device: &Device, queue_pairs: BTreeMap<u32, Vec<Vec<u32>>>) -> Self {
        let Port { gid, lid, mtu, .. } = device.port;
        let (address, key, bytes) = (device.address(), device.remote_key(), device.segment.bytes());
        Self { gid, lid, mtu, address, key, bytes, queue_pairs }
    }
}

fn mismatch(peer: u32, what: &str) -> TransportError {
    TransportError::Missing { what: format!("rank {peer} {what}: run all ranks with the same options") }
}

/// How queues are made and used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VerbsConfig {
    /// Device; none takes the first with an active port.
    pub device: Option<String>,
    /// Port of it, from 1.
    pub port: u8,
    /// GID index; none takes the first RoCE v2 one over IPv4, or 0 on InfiniBand.
    pub gid_index: Option<u8>,
    /// Queue pairs to each peer, per proxy thread.
    pub queue_pairs: u16,
    /// Work requests that a send queue holds.
    pub send_depth: u32,
    /// Receives that wait for immediates, per queue pair.
    pub receive_depth: u32,
    /// Writes in flight per queue pair, at most.
    pub in_flight_max: u32,
    /// One completion for so many writes of a batch; the last write of a batch always has one.
    pub signal_every: u32,
    /// Flags travel in the work request instead of being fetched from memory.
    pub inline_flags: bool,
    /// Time to an acknowledgement, as the verbs count it: 4.096 us * 2^timeout.
    pub timeout: u8,
    /// Retries before a peer counts as gone.
    pub retries: u8,
}

impl Default for VerbsConfig {
    /// 4 queue pairs, 256 deep, 64 writes in flight, a completion for every 8, inline flags, 7 retries of 67 ms.
    fn default() -> Self {
        Self {
            device: None,
            port: 1,
            gid_index: None,
            queue_pairs: 4,
            send_depth: 256,
            receive_depth: 256,
            in_flight_max: 64,
            signal_every: 8,
            inline_flags: true,
            timeout: 14,
            retries: 7,
        }
    }
}

//! RDMA through libibverbs, loaded at run time: `verbs-rc` on InfiniBand and RoCE, `verbs-srd` on EFA.
//!
//! Types come from `ibverbs-sys`; no function of it is referenced, so that the binary also starts where the library is
//! missing. Every unsafe call is wrapped once, in [`device`] and the endpoints.
//!
//! Memory is registered without relaxed ordering: under it a NIC may make a flag visible before the data that the same
//! queue wrote earlier.

pub mod device;
mod health;
pub mod library;
pub mod rc;
pub mod srd;

pub use device::{Device, Exposed, Port};
pub use library::Library;

use crate::transport::TransportError;
use crate::transport::registration::Path as Way;
use ibverbs_sys as ffi;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

/// What a rank tells its peers so that they can write to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its NICs, in the order of its rails.
    rails: Vec<RailCard>,
    /// Address and size of its memory.
    address: u64,
    bytes: u64,
    /// Queue pairs by peer, then proxy, then index; index i is on rail i modulo the number of rails.
    queue_pairs: BTreeMap<u32, Vec<Vec<u32>>>,
}

/// A NIC, and the key by which it lets peers write its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RailCard {
    gid: [u8; 16],
    lid: u16,
    mtu: u32,
    key: u32,
}

impl Card {
    fn new(devices: &[Arc<Device>], queue_pairs: BTreeMap<u32, Vec<Vec<u32>>>) -> Self {
        let rail = |device: &Arc<Device>| {
            let Port { gid, lid, mtu, .. } = device.port;
            RailCard { gid, lid, mtu, key: device.remote_key() }
        };
        let (address, bytes) = (devices[0].address(), devices[0].bytes());
        Self { rails: devices.iter().map(rail).collect(), address, bytes, queue_pairs }
    }

    /// The numbers of the queue pairs for a peer and proxy, once rails, their number and the segment's size fit.
    fn numbers(&self, from: u32, me: u32, proxy: usize, count: usize, own: &[Rail]) -> Result<&[u32], TransportError> {
        let numbers = self.queue_pairs.get(&me).and_then(|proxies| proxies.get(proxy));
        match numbers {
            _ if self.rails.len() != own.len() => Err(mismatch(from, "has another number of rails")),
            _ if self.bytes != own[0].device.bytes() => Err(mismatch(from, "has memory of another size")),
            Some(numbers) if numbers.len() == count => Ok(numbers),
            _ => Err(mismatch(from, "has other proxies or queue pairs")),
        }
    }
}

fn mismatch(peer: u32, what: &str) -> TransportError {
    TransportError::Missing { what: format!("rank {peer} {what}: run all ranks with the same options") }
}

/// A NIC of a rank, as one proxy uses it.
struct Rail {
    device: Arc<Device>,
    completions: *mut ffi::ibv_cq,
}

// SAFETY: the handle may be used from any thread; an endpoint has its rails for itself.
unsafe impl Send for Rail {}

impl Drop for Rail {
    fn drop(&mut self) {
        // SAFETY: made in `all` and destroyed once; endpoints destroy their queue pairs before they drop their rails.
        unsafe { (self.device.library.ibv_destroy_cq)(self.completions) };
    }
}

impl Rail {
    fn all(devices: &[Arc<Device>], depth: u32) -> Result<Vec<Self>, TransportError> {
        let rail = |device: &Arc<Device>| {
            Ok(Self { completions: device.completion_queue(depth.max(16))?, device: device.clone() })
        };
        devices.iter().map(rail).collect()
    }

    /// Completions that are there, as many as fit.
    fn poll<'a>(&self, into: &'a mut Completions) -> Result<&'a [ffi::ibv_wc], TransportError> {
        let queue = self.completions;
        // SAFETY: the queue is live, and the array outlives the call and is as long as it says.
        let count = unsafe {
            let poll = (*(*queue).context).ops.poll_cq;
            poll.map_or(-1, |poll| poll(queue, into.len() as c_int, into.as_mut_ptr().cast()))
        };
        let count = usize::try_from(count)
            .map_err(|_| device::failed("ibv_poll_cq", self.device.name.clone(), std::io::Error::last_os_error()))?;
        // SAFETY: the call wrote so many.
        Ok(unsafe { std::slice::from_raw_parts(into.as_ptr().cast(), count) })
    }
}

/// Room for completions that are polled together.
type Completions = [MaybeUninit<ffi::ibv_wc>; 32];

/// What a record says of NICs and queues.
fn describe(transport: &str, config: &VerbsConfig, rails: &[Rail]) -> String {
    let nic = |rail: &Rail| {
        let Port { number, gid_index, .. } = rail.device.port;
        let software = if rail.device.software { ", in software" } else { "" };
        format!("{} port {number} gid {gid_index}{software}", rail.device.name)
    };
    let memory = match rails.first().map(|rail| rail.device.way) {
        Some(way @ (Way::DmaBuf | Way::PeerMem)) => format!("GPU memory by {way}"),
        _ => "host memory".to_owned(),
    };
    let VerbsConfig { queue_pairs, in_flight_max, signal_every, .. } = config;
    let inline = if config.inline_flags { "inline flags" } else { "flags from memory" };
    format!(
        "{transport} ({}; {memory}; {queue_pairs} queue pairs per peer and NIC, {in_flight_max} in flight, a completion for {signal_every}, {inline})",
        rails.iter().map(nic).collect::<Vec<_>>().join(" + ")
    )
}

/// How queues are made and used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    /// NICs by name, one for each rail; none takes the nearest with an active port.
    pub nics: Vec<String>,
    /// NICs that the queues of a rank are spread over, where none is named.
    pub rails: u16,
    /// Port of each, from 1.
    pub port: u8,
    /// GID index; none takes the first RoCE v2 one over IPv4, or 0 on InfiniBand.
    pub gid_index: Option<u8>,
    /// Queue pairs to each peer, per proxy thread and NIC.
    pub queue_pairs: u16,
    /// Receives that wait for immediates, per queue pair.
    pub receive_depth: u32,
    /// Writes in flight per queue pair, at most.
    pub in_flight_max: u32,
    /// One completion for so many writes of a batch; the last write of a batch always has one.
    pub signal_every: u32,
    /// Flags travel in the work request instead of being fetched from memory.
    pub inline_flags: bool,
    /// Time to an acknowledgement, as the verbs count it: 4.096 us * 2^timeout; none takes 67 ms, and 1 s of a device in
    /// software, whose acknowledgements wait for a processor: what it sends again needlessly it may send wrongly.
    pub timeout: Option<u8>,
    /// Retries before a peer counts as gone.
    pub retries: u8,
    /// How long a queue pair may complete nothing while writes are on their way: for devices that retry for ever.
    pub answer: Duration,
}

impl VerbsConfig {
    /// Time to an acknowledgement of a device.
    const fn timeout_of(&self, software: bool) -> u8 {
        match (self.timeout, software) {
            (Some(timeout), _) => timeout,
            (None, false) => 14,
            (None, true) => 18,
        }
    }

    /// Work requests that a send queue holds: of every write in flight its data and its flag, and one that is apart.
    pub const fn send_depth(&self) -> u32 {
        2 * self.in_flight_max + 2
    }
}

impl Default for VerbsConfig {
    /// One NIC, 4 queue pairs, 64 writes in flight, a completion for every 8, inline flags, 7 retries of 67 ms, 30 s for an
    /// answer.
    fn default() -> Self {
        Self {
            nics: Vec::new(),
            rails: 1,
            port: 1,
            gid_index: None,
            queue_pairs: 4,
            receive_depth: 256,
            in_flight_max: 64,
            signal_every: 8,
            inline_flags: true,
            timeout: None,
            retries: 7,
            answer: Duration::from_secs(30),
        }
    }
}

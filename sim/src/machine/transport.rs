//! How ranks use their NICs.

use super::MachineError;
use serde::{Deserialize, Serialize};

/// Choices of a transport, `[transport]` of a machine file. They describe no hardware, so that they have no source; what
/// is absent is left to the transport. Rails, proxy threads and writes in flight are `nic.rails`, `proxy.threads` and
/// `proxy.in_flight`, which the model needs too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Transport {
    /// How a receiver learns of a put where the fabric keeps order; absent: as the schedule says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub publish: Option<Publishing>,
    /// NICs of a rank by name, one for each rail, the same on every node; absent: the nearest by PCIe and NUMA.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<String>,
    /// Index of the address in a port's table; absent: the first RoCE v2 one over IPv4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid_index: Option<u8>,
    /// Queue pairs to each peer, for every proxy thread and NIC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_pairs: Option<u16>,
    /// Writes that a proxy posts together, at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<u32>,
    /// Writes of a batch for which there is one completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal_every: Option<u32>,
    /// Whether flags travel in the work request instead of being fetched from memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inline_flags: Option<bool>,
}

/// How a receiver learns of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Publishing {
    /// By a write of its flag on the same queue.
    SameQueueWrite,
    /// By an immediate, which the receiver's proxy turns into the flag.
    Immediate,
}

impl Transport {
    /// Checks ranges; `at` says where a name stands.
    pub(super) fn check(&self, at: &impl Fn(&str) -> String) -> Result<(), MachineError> {
        let counts = [
            ("queue_pairs", self.queue_pairs.map(u32::from), 1024),
            ("batch", self.batch, 1024),
            ("signal_every", self.signal_every, 1024),
        ];
        for (name, value, max) in counts {
            if let Some(value) = value.filter(|value| !(1..=max).contains(value)) {
                let name = format!("transport.{name}");
                let allowed = format!("a whole number from 1 to {max}");
                return Err(MachineError::Range { place: at(&name), name, value: f64::from(value), allowed });
            }
        }
        Ok(())
    }
}

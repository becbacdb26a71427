//! How ranks use their NICs.

use super::MachineError;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::ops::RangeInclusive;

/// Choices of a transport, `[transport]` of a machine file. They describe no hardware, so that they have no source; what
/// is absent is left to the transport. Rails, proxy threads and writes in flight are `nic.rails`, `proxy.threads` and
/// `proxy.in_flight`, which the model needs too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Transport {
    /// What carries puts; absent: loopback, unless the command line names another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub carrier: Option<Carrier>,
    /// How a receiver learns of a put where the fabric keeps order; absent: as the schedule says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub publish: Option<Publishing>,
    /// NICs of a rank by name, one for each rail, the same on every node; absent: the nearest by PCIe and NUMA.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<String>,
    /// Index of the address in a port's table; absent: the first RoCE v2 one over IPv4.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "gid_index")]
    pub gid_index: Option<u8>,
    /// Queue pairs to each peer, for every proxy thread and NIC.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "queue_pairs")]
    pub queue_pairs: Option<u16>,
    /// Writes that a proxy posts together, at most.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "batch")]
    pub batch: Option<u32>,
    /// Writes of a batch for which there is one completion.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "signal_every")]
    pub signal_every: Option<u32>,
    /// Whether flags travel in the work request instead of being fetched from memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inline_flags: Option<bool>,
}

/// A whole number in a range; any other is refused with name and range.
fn whole<'de, D: Deserializer<'de>, T: TryFrom<i64>>(
    name: &str,
    allowed: RangeInclusive<i64>,
    from: D,
) -> Result<Option<T>, D::Error> {
    let refused = |got: String| {
        let (min, max) = (allowed.start(), allowed.end());
        D::Error::custom(format!("transport.{name}: {got}, allowed: a whole number from {min} to {max}"))
    };
    let value = i64::deserialize(from).map_err(|error| refused(error.to_string()))?;
    let inside = Some(value).filter(|value| allowed.contains(value));
    inside.and_then(|value| T::try_from(value).ok()).map(Some).ok_or_else(|| refused(value.to_string()))
}

fn gid_index<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u8>, D::Error> {
    whole("gid_index", 0..=255, from)
}

fn queue_pairs<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    whole("queue_pairs", 1..=1024, from)
}

fn batch<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    whole("batch", 1..=1024, from)
}

fn signal_every<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    whole("signal_every", 1..=1024, from)
}

/// What carries puts between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carrier {
    /// Copies on one host.
    Loopback,
    /// InfiniBand or RoCE.
    VerbsRc,
    /// EFA.
    VerbsSrd,
}

impl Carrier {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Loopback, Self::VerbsRc, Self::VerbsSrd];

    /// Its name in files, options and records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::VerbsRc => "verbs-rc",
            Self::VerbsSrd => "verbs-srd",
        }
    }
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
    /// Checks the list of NICs, one for each of `rails`; `at` says where a name stands.
    pub(super) fn check(&self, rails: f64, at: &impl Fn(&str) -> String) -> Result<(), MachineError> {
        let refuse = |problem: String| {
            let name = "transport.nics".to_owned();
            Err(MachineError::Transport { place: at(&name), name, problem })
        };
        let nics = &self.nics;
        if nics.is_empty() {
            return Ok(());
        }
        let is_name =
            |name: &String| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
        if let Some(bad) = nics.iter().find(|name| !is_name(name)) {
            return refuse(format!("{bad:?} is no name of an RDMA device, as in \"mlx5_0\""));
        }
        if let Some(twice) = nics.iter().enumerate().find(|(at, name)| nics[..*at].contains(name)) {
            return refuse(format!("{:?} stands there twice; allowed: every NIC of a rank once", twice.1));
        }
        if nics.len() != rails as usize {
            return refuse(format!("{} NICs, allowed: as many as nic.rails, {rails}", nics.len()));
        }
        Ok(())
    }
}

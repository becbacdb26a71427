//! Connects a rank to those of other nodes.

use super::{HostError, Wires};
use crate::bootstrap::Session;
use crate::transport::loopback::{Loopback, Pacing};
use crate::transport::segment::Segment;
use crate::transport::{Order, Transport};
use std::sync::Arc;
use tilewire_kernels::{Cluster, Fabric};

/// What carries puts.
#[derive(Clone, Debug)]
pub enum Wire {
    /// Copies on one host; every rank maps every segment.
    Loopback(Option<Pacing>),
    /// Reliable connections. `spoil` changes the keys of peers, for a test of what a wrong one does.
    #[cfg(feature = "rdma")]
    VerbsRc {
        /// Queues.
        config: crate::transport::verbs::VerbsConfig,
        /// 0 outside that test.
        spoil: u32,
    },
    /// Scalable reliable datagrams of EFA; not run on hardware.
    #[cfg(feature = "rdma")]
    VerbsSrd(crate::transport::verbs::VerbsConfig),
}

impl Wire {
    /// Whether ranks of other nodes map this rank's segment too.
    pub const fn maps_all(&self) -> bool {
        matches!(self, Self::Loopback(_))
    }

    /// Whether schedules for a fabric may rely on what this orders.
    pub const fn carries(&self, fabric: Fabric) -> bool {
        match self {
            Self::Loopback(_) => matches!(fabric, Fabric::Loopback | Fabric::IbRc),
            #[cfg(feature = "rdma")]
            Self::VerbsRc { .. } => true,
            #[cfg(feature = "rdma")]
            Self::VerbsSrd(_) => matches!(fabric, Fabric::EfaSrd | Fabric::Loopback),
        }
    }

    /// Connects this rank; all ranks call it together. `segments` as of [`super::share`].
    ///
    /// # Errors
    /// [`HostError::Transport`], [`HostError::Peer`].
    #[cfg_attr(not(feature = "rdma"), expect(unused_variables, reason = "loopback needs no peers by name"))]
    pub fn connect(
        &self,
        session: &Session,
        cluster: Cluster,
        segments: &[Option<Arc<Segment>>],
        proxies: u16,
    ) -> Result<Wires, HostError> {
        let me = session.place().rank as usize;
        let own = segments[me]
            .clone()
            .ok_or_else(|| HostError::Segment { rank: me, error: std::io::Error::other("not among the segments") })?;
        let result: Result<Wires, HostError> = match self {
            Self::Loopback(pacing) => {
                let proxy =
                    |_| -> Box<dyn Transport> { Box::new(Loopback::new(own.clone(), segments.to_vec(), *pacing)) };
                Ok(Wires::new(Order::Queue, (0..proxies.max(1)).map(proxy).collect()))
            }
            #[cfg(feature = "rdma")]
            Self::VerbsRc { config, spoil } => {
                use crate::probe::rdma::Seat;
                use crate::transport::verbs::{Device, rc};
                let open = |devices| rc::prepare(devices, config, me as u32, &others(cluster, me), proxies);
                let seat = Seat::of_cpu(usize::from(cluster.rank(me).gpu));
                Device::open_all(config, "verbs-rc", &seat, &own)
                    .and_then(open)
                    .map_err(HostError::from)
                    .and_then(|(queues, card)| Ok(queues.connect(&exchange(session, &card)?, *spoil)?))
            }
            #[cfg(feature = "rdma")]
            Self::VerbsSrd(config) => {
                use crate::probe::rdma::Seat;
                use crate::transport::verbs::{Device, srd};
                let open = |devices| srd::prepare(devices, config, me as u32, &others(cluster, me), proxies);
                let seat = Seat::of_cpu(usize::from(cluster.rank(me).gpu));
                Device::open_all(config, "verbs-srd", &seat, &own)
                    .and_then(open)
                    .map_err(HostError::from)
                    .and_then(|(queues, card)| Ok(queues.connect(&exchange(session, &card)?)?))
            }
        };
        let wires = result.inspect_err(|error| session.abort(&error.to_string()))?;
        // Nobody writes before everybody can receive.
        session.barrier()?;
        Ok(wires)
    }
}

/// Ranks of other nodes.
#[cfg(feature = "rdma")]
fn others(cluster: Cluster, me: usize) -> Vec<u32> {
    let node = cluster.rank(me).node;
    (0..cluster.ranks()).filter(|&other| cluster.rank(other).node != node).map(|other| other as u32).collect()
}

#[cfg(feature = "rdma")]
fn exchange(
    session: &Session,
    card: &crate::transport::verbs::Card,
) -> Result<Vec<crate::transport::verbs::Card>, HostError> {
    let text = serde_json::to_vec(card).unwrap_or_default();
    let cards = session.exchange(&text)?;
    cards
        .iter()
        .enumerate()
        .map(|(rank, text)| {
            serde_json::from_slice(text).map_err(|error| {
                let why = format!("told an address that cannot be read: {error}");
                HostError::from(crate::bootstrap::BootstrapError::Peer { rank: rank as u32, why })
            })
        })
        .collect()
}

//! Connects a rank to those of other nodes.

use super::{HostError, Wires, share};
use crate::bootstrap::Session;
use crate::probe::rdma::Seat;
use crate::transport::bounce::{Between, Bounce, Copier, Landing};
use crate::transport::loopback::{Loopback, Pacing};
use crate::transport::puts::Incoming;
use crate::transport::registration::Path;
use crate::transport::segment::Segment;
#[cfg(feature = "rdma")]
use crate::transport::verbs::{Device, Exposed};
use crate::transport::{Order, Told, Transport, TransportError};
use std::collections::BTreeMap;
use std::sync::Arc;
use tilewire_kernels::{Cluster, Fabric, Schedule};

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

/// Makes a copier between a rank's memory and the segment that stands for it.
pub type MakeCopier<'a> = dyn Fn(&Arc<Segment>) -> Result<Box<dyn Copier>, TransportError> + 'a;

/// What a rank's puts read, and peers write.
pub enum Memory<'a> {
    /// Segments of host memory by rank number; of other ranks those that [`Wire::maps_all`] asks for.
    Host(&'a [Option<Arc<Segment>>]),
    /// Such segments, which stand for memory that the NIC does not reach.
    Bounce {
        /// By rank number.
        segments: &'a [Option<Arc<Segment>>],
        /// By slot of its arrival word, every put that comes to this rank.
        landings: Arc<BTreeMap<u32, Landing>>,
        /// Of each proxy.
        copier: &'a MakeCopier<'a>,
    },
    /// NICs with the memory of a GPU registered.
    #[cfg(feature = "rdma")]
    Nics(Vec<Device>),
}

impl Wire {
    /// What it keeps in order.
    pub const fn order(&self) -> Order {
        match self {
            Self::Loopback(_) => Order::Queue,
            #[cfg(feature = "rdma")]
            Self::VerbsRc { .. } => Order::Queue,
            #[cfg(feature = "rdma")]
            Self::VerbsSrd(_) => Order::Unordered,
        }
    }

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

    /// Connects this rank of a schedule, whose memory is on the host; all ranks call it together. `segments` are those of
    /// its node, and of all nodes where [`Wire::maps_all`] says so. The wire reaches them ([`Path::Host`]), or segments
    /// beside them in `directory` ([`Path::Bounce`]), as if they were a GPU's.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn attach(
        &self,
        session: &Session,
        schedule: &Schedule,
        segments: &[Option<Arc<Segment>>],
        (way, directory): (Path, &std::path::Path),
        proxies: u16,
    ) -> Result<Wires, HostError> {
        let (cluster, me) = (schedule.cluster, session.place().rank as usize);
        let seat = Seat::of_cpu(usize::from(cluster.rank(me).gpu));
        if way == Path::Host {
            return self.connect(session, cluster, &seat, Memory::Host(segments), proxies);
        }
        let layout = super::run::layout(schedule)?;
        let told = Told { order: self.order(), by_immediates: true };
        let landings = Arc::new(Incoming::new(schedule, &layout, cluster.rank(me), told)?.landings);
        let beside = share(session, &layout, directory, |_| self.maps_all())?;
        let own = segments[me].clone();
        let copier = |host: &Arc<Segment>| -> Result<Box<dyn Copier>, TransportError> {
            let missing = || TransportError::Missing { what: format!("no segment of rank {me}") };
            Ok(Box::new(Between::new(own.clone().ok_or_else(missing)?, host.clone())))
        };
        let memory = Memory::Bounce { segments: &beside, landings, copier: &copier };
        self.connect(session, cluster, &seat, memory, proxies)
    }

    /// Connects this rank, which is at `seat`; all ranks call it together.
    ///
    /// # Errors
    /// [`HostError::Transport`], [`HostError::Peer`].
    pub fn connect(
        &self,
        session: &Session,
        cluster: Cluster,
        seat: &Seat,
        memory: Memory<'_>,
        proxies: u16,
    ) -> Result<Wires, HostError> {
        let wires = self.join(session, cluster, seat, memory, proxies.max(1));
        let wires = wires.inspect_err(|error| session.abort(&error.to_string()))?;
        // Nobody writes before everybody can receive.
        session.barrier()?;
        Ok(wires)
    }

    /// Opens a rank's NICs and registers its memory with them.
    ///
    /// # Errors
    /// [`TransportError::Missing`], [`TransportError::Call`]; of loopback, which has none.
    #[cfg(feature = "rdma")]
    pub fn open(&self, seat: &Seat, exposed: &Exposed) -> Result<Vec<Device>, TransportError> {
        match self {
            Self::Loopback(_) => Err(TransportError::Missing { what: "loopback uses no NIC".to_owned() }),
            Self::VerbsRc { config, .. } => Device::open_all(config, "verbs-rc", seat, exposed),
            Self::VerbsSrd(config) => Device::open_all(config, "verbs-srd", seat, exposed),
        }
    }

    #[cfg_attr(not(feature = "rdma"), expect(unused_variables, reason = "loopback needs no peers by name"))]
    fn join(
        &self,
        session: &Session,
        cluster: Cluster,
        seat: &Seat,
        memory: Memory<'_>,
        proxies: u16,
    ) -> Result<Wires, HostError> {
        let me = session.place().rank as usize;
        // What NICs have registered needs no segment.
        let mut bounce = None;
        #[cfg(feature = "rdma")]
        let mut nics = None;
        let segments = match memory {
            Memory::Host(segments) => segments,
            Memory::Bounce { segments, landings, copier } => {
                bounce = Some((landings, copier));
                segments
            }
            #[cfg(feature = "rdma")]
            Memory::Nics(devices) => {
                nics = Some(devices);
                &[]
            }
        };
        let missing = || HostError::Segment { rank: me, error: std::io::Error::other("not among the segments") };
        let own = || segments.get(me).cloned().flatten().ok_or_else(missing);
        #[cfg(feature = "rdma")]
        let nics = || match nics {
            Some(devices) => Ok(devices),
            None => Ok::<_, HostError>(self.open(seat, &Exposed::host(&own()?))?),
        };
        let mut wires = match self {
            Self::Loopback(pacing) => {
                let own = own()?;
                let proxy = |index| -> Box<dyn Transport> {
                    let mut loopback = Loopback::new(own.clone(), segments.to_vec(), *pacing);
                    // One of them hears for all.
                    if let (Some((landings, _)), 0) = (&bounce, index) {
                        loopback.hear(landings.keys().copied());
                    }
                    Box::new(loopback)
                };
                Wires::new(self.order(), (0..proxies).map(proxy).collect())
            }
            #[cfg(feature = "rdma")]
            Self::VerbsRc { config, spoil } => {
                use crate::transport::verbs::rc;
                let devices = nics()?;
                let (queues, card) = rc::prepare(devices, config, me as u32, &others(cluster, me), proxies)?;
                queues.connect(&exchange(session, &card)?, *spoil)?
            }
            #[cfg(feature = "rdma")]
            Self::VerbsSrd(config) => {
                use crate::transport::verbs::srd;
                let devices = nics()?;
                let (queues, card) = srd::prepare(devices, config, me as u32, &others(cluster, me), proxies)?;
                queues.connect(&exchange(session, &card)?)?
            }
        };
        if let Some((landings, copier)) = bounce {
            let own = own()?;
            let behind = |inner| -> Result<Box<dyn Transport>, TransportError> {
                Ok(Box::new(Bounce::new(inner, copier(&own)?, landings.clone())))
            };
            wires.transports = wires.transports.into_iter().map(behind).collect::<Result<_, _>>()?;
            (wires.told.by_immediates, wires.registration) = (true, Path::Bounce);
        }
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

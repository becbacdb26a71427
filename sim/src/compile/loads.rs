//! What reads and writes take from memories and links.

use super::cost::Compiler;
use super::units::{rate, spread};
use super::{Demand, Flow, ResourceKind};
use crate::machine::PeerPath;
use smallvec::SmallVec;
use tilewire_kernels::Offset;
use tilewire_kernels::schedule::At;

pub(super) fn add_demand(demands: &mut Vec<Demand>, at: Offset, kind: ResourceKind, rate: u64) {
    match demands.iter_mut().find(|d| d.0 == at && d.1 == kind) {
        Some(demand) => demand.2 += rate,
        None if rate > 0 => demands.push((at, kind, rate)),
        None => {}
    }
}

/// Whom a schedule's plain reads, writes and adds reach over NVLink.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Peers {
    #[default]
    None,
    /// One GPU, this many ahead.
    One(u16),
    Many,
}

/// Bytes by resource while a flow's demands are gathered.
pub(super) type Loads = SmallVec<[(Offset, ResourceKind, u64); 8]>;

impl Compiler<'_> {
    pub(super) fn fold(&self, offset: Offset) -> Offset {
        Offset { dn: if self.fold_nodes { 0 } else { offset.dn }, dg: if self.fold_gpus { 0 } else { offset.dg } }
    }

    pub(super) fn class(&mut self, loads: &Loads, work: u64) -> u32 {
        let mut alone: Loads = Loads::new();
        for &(offset, kind, bytes) in loads {
            match alone.iter_mut().find(|d| d.0 == offset && d.1 == kind) {
                Some(load) => load.2 += bytes,
                None => alone.push((offset, kind, bytes)),
            }
        }
        // Rounded before ranks are folded: one rank that stands for several takes exactly what they take.
        let mut demands: Vec<Demand> = Vec::with_capacity(alone.len());
        for &(offset, kind, bytes) in &alone {
            add_demand(&mut demands, self.fold(offset), kind, spread(bytes, work));
        }
        demands.sort_unstable();
        self.class_with(demands)
    }

    pub(super) fn class_with(&mut self, demands: Vec<Demand>) -> u32 {
        if let Some(&class) = self.class_of.get(&demands) {
            return class;
        }
        let class = self.classes.len() as u32;
        self.classes.push(demands.clone());
        self.class_of.insert(demands, class);
        class
    }

    pub(super) fn flow(&mut self, loads: &Loads, work: u64) -> Flow {
        if work == 0 {
            return Flow::NOTHING;
        }
        Flow { class: self.class(loads, work), work }
    }

    pub(super) fn over_nvlink(&self, offset: Offset) -> bool {
        offset.dg != 0 && self.machine.peer_path == PeerPath::Nvlink
    }

    pub(super) fn reached(&self, peer: u16) {
        self.peers.set(match self.peers.get() {
            Peers::None => Peers::One(peer),
            Peers::One(one) if one == peer => Peers::One(one),
            _ => Peers::Many,
        });
    }

    /// GPUs of the node, as offsets.
    pub(super) fn node(&self) -> impl Iterator<Item = Offset> + use<> {
        (0..self.cluster.gpus_per_node).map(Offset::local)
    }

    /// What a write takes of a memory, in bytes of a read.
    pub(super) fn written(&self, bytes: u64) -> u64 {
        (bytes as f64 * self.machine.gpu.hbm_write_bytes_per_byte.value).round() as u64
    }

    /// A write of `bytes` to a place: loads on the links and on the target's memory.
    pub(super) fn load_write(&self, loads: &mut Loads, at: At, bytes: u64, add: bool) {
        let link =
            if add { (bytes as f64 * self.machine.nvlink.add_link_bytes_per_byte.value).round() as u64 } else { bytes };
        // An add reads, too. In the own memory, which stands for a peer's, it takes as much as the link would.
        let memory = match (add, self.machine.peer_path) {
            (true, PeerPath::Hbm) => link + self.written(link),
            (true, PeerPath::Nvlink) => bytes + self.written(bytes),
            (false, _) => self.written(bytes),
        };
        match at {
            At::Offset(offset) => {
                if self.over_nvlink(offset) {
                    self.reached(offset.dg);
                    loads.push((Offset::ME, ResourceKind::Egress, link));
                    loads.push((offset, ResourceKind::Ingress, link));
                    loads.push((offset, ResourceKind::Hbm, memory));
                } else {
                    loads.push((Offset::ME, ResourceKind::Hbm, memory));
                }
            }
            At::AllLocal => {
                // A multicast store leaves once; the switch copies it to every GPU of the node.
                loads.push((Offset::ME, ResourceKind::Egress, link));
                for offset in self.node() {
                    loads.push((offset, ResourceKind::Ingress, link));
                    loads.push((offset, ResourceKind::Hbm, memory));
                }
            }
        }
    }

    /// A read of `bytes` from a place.
    pub(super) fn load_read(&self, loads: &mut Loads, at: At, bytes: u64) {
        match at {
            At::Offset(offset) => {
                if self.over_nvlink(offset) {
                    self.reached(offset.dg);
                    loads.push((offset, ResourceKind::Egress, bytes));
                    loads.push((Offset::ME, ResourceKind::Ingress, bytes));
                    loads.push((offset, ResourceKind::Hbm, bytes));
                } else {
                    loads.push((Offset::ME, ResourceKind::Hbm, bytes));
                }
            }
            At::AllLocal => {
                // Every GPU is read; the switch sums and returns one stream.
                let link = (bytes as f64 * self.machine.nvlink.nvls_load_link_bytes_per_byte.value).round() as u64;
                loads.push((Offset::ME, ResourceKind::Ingress, link));
                for offset in self.node() {
                    loads.push((offset, ResourceKind::Egress, link));
                    loads.push((offset, ResourceKind::Hbm, bytes));
                }
            }
        }
    }

    pub(super) fn is_remote(&self, at: At) -> bool {
        match at {
            At::Offset(offset) => self.over_nvlink(offset),
            At::AllLocal => true,
        }
    }

    pub(super) fn write_rate(&self, at: At, add: bool) -> u64 {
        let sm = &self.machine.sm;
        rate(match (at, add) {
            (At::AllLocal, _) => sm.nvls_store_cta_gbs.value,
            (_, true) => sm.add_cta_gbs.value,
            (_, false) => sm.copy_cta_gbs.value,
        })
    }

    pub(super) fn latency_ns(&self, at: At) -> f64 {
        if at == At::AllLocal {
            self.machine.sm.nvls_load_latency_ns.value
        } else if self.is_remote(at) {
            self.machine.sm.nvlink_latency_ns.value
        } else {
            self.machine.sm.local_latency_ns.value
        }
    }

    /// What a sum takes beside what the switch does, whose slowest load takes `load_ns`.
    ///
    /// Threads load a vector of every input, wait for all of them, add and store, and begin again. Nobody waits for the stores.
    pub(super) fn sum_ns(&self, load_ns: f64, (read, written): (u64, u64), in_flight: u32, lanes: u32) -> f64 {
        let sm = &self.machine.sm;
        let cta = sm.reduce_cta_gbs.value / f64::from(lanes);
        let moved = (read + written) as f64;
        match self.machine.interpreter {
            // As the interpreter's values were fitted: two inputs and an output in flight together.
            Some(_) => load_ns + moved / cta.min(f64::from(in_flight) / load_ns.max(1e-3) * 1.5),
            None if read == 0 => moved / cta,
            None => {
                let wait_ns = sm.reduce_latency_ns.value + load_ns - sm.local_latency_ns.value;
                rounds(read, in_flight) * wait_ns + moved / cta
            }
        }
    }
}

/// How often the threads of a sum load what they have in flight.
pub(super) fn rounds(bytes: u64, in_flight: u32) -> f64 {
    (bytes as f64 / f64::from(in_flight)).max(1.0)
}

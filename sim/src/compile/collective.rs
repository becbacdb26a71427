//! Collectives of the unfused baselines.

use super::cost::Compiler;
use super::units::{PS_PER_S, rate, transfer};
use tilewire_kernels::schedule::CollectiveKind;

impl Compiler<'_> {
    /// Bytes that a rank sends in a collective whose larger buffer has `bytes`, as in the usual bus bandwidths.
    pub(super) fn wire_bytes(&self, kind: CollectiveKind, bytes: u64) -> f64 {
        let ranks = self.cluster.ranks() as f64;
        let passes = if kind == CollectiveKind::AllReduce { 2.0 } else { 1.0 };
        passes * bytes as f64 * (ranks - 1.0) / ranks
    }

    /// Bytes that a rank sends to other nodes in a collective.
    ///
    /// A ring enters each node once and leaves it once, whatever the GPUs of the node; they share what crosses. In an
    /// all-to-all every rank sends its parts itself.
    pub(super) fn node_bytes(&self, kind: CollectiveKind, bytes: u64) -> u64 {
        let (nodes, gpus) = (f64::from(self.cluster.nodes), f64::from(self.cluster.gpus_per_node));
        match kind {
            _ if nodes < 2.0 => 0,
            CollectiveKind::AllToAll => (bytes as f64 * (nodes - 1.0) / nodes).round() as u64,
            _ => (self.wire_bytes(kind, bytes) / gpus).round() as u64,
        }
    }

    /// Time of a collective.
    pub(super) fn collective_ps(&self, kind: CollectiveKind, bytes: u64, in_place: bool, ctas: u32) -> u64 {
        if self.cluster.ranks() == 1 {
            // Nobody to talk to: a copy, unless the result stands where it was.
            return if in_place {
                0
            } else {
                transfer(bytes + self.written(bytes), rate(self.machine.gpu.hbm_gbs.value))
            };
        }
        let pair = self.machine.library_pair.as_ref();
        let is_pair = self.cluster.nodes == 1 && self.cluster.gpus_per_node == 2;
        let library = pair.filter(|_| is_pair).unwrap_or(&self.machine.library);
        let collective = match kind {
            CollectiveKind::AllGather => &library.all_gather,
            CollectiveKind::ReduceScatter => &library.reduce_scatter,
            CollectiveKind::AllReduce => &library.all_reduce,
            CollectiveKind::AllToAll => &library.all_to_all,
        };
        // Every CTA drives its share of the channels.
        let driven = (f64::from(ctas) / collective.sms.value).min(1.0);
        // The channels of a ring leave a node through the NICs of its GPUs: fewer GPUs, fewer NICs.
        let nics = if self.cluster.nodes > 1 {
            (f64::from(self.cluster.gpus_per_node) / collective.bus_gpus.value).min(1.0)
        } else {
            1.0
        };
        let wire = self.wire_bytes(kind, bytes);
        let fill_wire = collective.fill_wire_mib.value * 1_048_576.0;
        let filled = if wire < fill_wire { wire / fill_wire } else { 1.0 };
        let ps = (collective.latency_us.value + collective.fill_us.value * filled) * 1e6
            + wire / (collective.bus_gbs.value * driven.min(nics) * 1e9) * PS_PER_S;
        ps.round() as u64
    }
}

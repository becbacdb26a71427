//! Ranks, offsets between ranks, and the fabric between nodes.

use serde::{Deserialize, Serialize};
use std::fmt;

/// `nodes` x `gpus_per_node` GPUs; one rank per GPU, numbered `node * gpus_per_node + gpu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cluster {
    /// Number of nodes, at least 1.
    pub nodes: u16,
    /// GPUs in each node, at least 1.
    pub gpus_per_node: u16,
}

/// One GPU of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank {
    /// Node index.
    pub node: u16,
    /// GPU index inside the node.
    pub gpu: u16,
}

/// A rank seen from another one: an element of `Z_nodes x Z_gpus`.
///
/// Schedules name peers only by offset, so that one skeleton can serve every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Offset {
    /// Nodes ahead, modulo the number of nodes.
    pub dn: u16,
    /// GPUs ahead inside a node, modulo the GPUs per node.
    pub dg: u16,
}

impl Offset {
    /// The rank itself.
    pub const ME: Self = Self { dn: 0, dg: 0 };

    /// An offset inside the own node.
    pub const fn local(dg: u16) -> Self {
        Self { dn: 0, dg }
    }

    /// The same-index GPU of another node.
    pub const fn node(dn: u16) -> Self {
        Self { dn, dg: 0 }
    }
}

impl Cluster {
    /// Number of ranks.
    pub fn ranks(self) -> usize {
        usize::from(self.nodes) * usize::from(self.gpus_per_node)
    }

    /// The rank at `offset` from `rank`.
    pub fn at(self, rank: Rank, offset: Offset) -> Rank {
        Rank { node: (rank.node + offset.dn) % self.nodes, gpu: (rank.gpu + offset.dg) % self.gpus_per_node }
    }

    /// The offset that leads from `from` to `to`.
    pub fn offset(self, from: Rank, to: Rank) -> Offset {
        Offset {
            dn: (to.node + self.nodes - from.node) % self.nodes,
            dg: (to.gpu + self.gpus_per_node - from.gpu) % self.gpus_per_node,
        }
    }

    /// The offset back: `at(at(r, d), negate(d)) == r`.
    pub fn negate(self, offset: Offset) -> Offset {
        Offset { dn: (self.nodes - offset.dn) % self.nodes, dg: (self.gpus_per_node - offset.dg) % self.gpus_per_node }
    }

    /// Rank number.
    pub fn number(self, rank: Rank) -> usize {
        usize::from(rank.node) * usize::from(self.gpus_per_node) + usize::from(rank.gpu)
    }

    /// Rank with this number.
    pub fn rank(self, number: usize) -> Rank {
        let gpus = usize::from(self.gpus_per_node);
        Rank { node: (number / gpus) as u16, gpu: (number % gpus) as u16 }
    }

    /// All ranks in order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Rank> {
        (0..self.ranks()).map(move |i| self.rank(i))
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.nodes, self.gpus_per_node)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.node, self.gpu)
    }
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "+({}, {})", self.dn, self.dg)
    }
}

/// What carries puts between nodes, and so which order a receiver may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fabric {
    /// InfiniBand or RoCE, reliable connection: writes of one queue are visible in order.
    IbRc,
    /// EFA scalable reliable datagram: no order, not even inside a queue.
    EfaSrd,
    /// Copies on one host; the immediate arrives with its data, nothing else is ordered.
    Loopback,
}

impl Fabric {
    /// The name used in machine files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::IbRc => "ib-rc",
            Self::EfaSrd => "efa-srd",
            Self::Loopback => "loopback",
        }
    }

    /// Whether a later write of the same queue can never be seen before an earlier one.
    pub const fn orders_within_queue(self) -> bool {
        matches!(self, Self::IbRc)
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

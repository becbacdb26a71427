//! The one type that every executor takes: [`Schedule`].
//!
//! ```text
//! Schedule ── launches ── roles ── tasks          a task: waits ─▶ op ─▶ signals
//!    │                      │                     waits: flags of the own rank
//!    │                      └ CTA count (from the split or fixed), claim rule, recycling
//!    ├ buffers (same on every rank), flag families
//!    └ symmetry: which rotations of the cluster leave the skeleton unchanged
//! ```
//!
//! A schedule is logical: bytes, flags and order, never a speed. It does not know the split: the number of CTAs of a
//! role is applied when the schedule is run. Peers are named by [`crate::Offset`] from the task's own rank, so tasks of
//! different ranks differ, at most, in the offsets of their regions; a task without these is its *skeleton*.
//!
//! A tiny schedule, one rank sends one block to the next node, which waits for it and copies it:
//!
//! ```text
//! inter_send   [0] Put x[0..1024] -> +(1, 0) y[0..1024]   raises arrived[0] there
//! intra_comm   [0] wait arrived[0] >= 1   Copy y[0..1024] -> out[0..1024]
//! ```

mod flags;
mod op;
mod place;
mod role;

pub use flags::{FamilyId, Flag, FlagFamily, Gate, Signal, Wait};
pub use op::{
    Access, CollectiveKind, Drain, Engine, GatherEntry, MainLoop, Op, Partial, Publish, TableSlice, TileOut, WriteMode,
};
pub use place::{At, Buffer, BufferId, BufferUse, DType, Place, Region};
pub use role::{Claim, CtaCount, Launch, Role, RoleKind, RoleSplit, Strides, side_by_side};

use crate::cluster::{Cluster, Fabric, Rank};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;

/// A unit of work with its waits and signals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The work.
    #[serde(flatten)]
    pub op: Op,
    /// Flags of the own rank that it waits for.
    pub waits: SmallVec<[Wait; 2]>,
    /// Flags that it raises.
    pub signals: SmallVec<[Signal; 2]>,
    /// In a strided list: worker 0 takes this task, and the others go on from there. See [`Strides`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restart: bool,
}

impl Task {
    /// A task without waits and signals.
    pub fn new(op: Op) -> Self {
        Self { op, waits: SmallVec::new(), signals: SmallVec::new(), restart: false }
    }

    /// Adds a wait.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.waits.push(wait);
        self
    }

    /// Adds a signal.
    #[must_use]
    pub fn signal(mut self, signal: Signal) -> Self {
        self.signals.push(signal);
        self
    }
}

/// Rotations of the cluster under which all skeletons are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Symmetry {
    /// Ranks (n, g) and (n', g) share a skeleton.
    pub nodes: bool,
    /// Ranks (n, g) and (n, g') share a skeleton.
    pub gpus: bool,
}

impl Symmetry {
    /// One skeleton for all ranks: such a schedule can be run in mirror mode.
    pub const FULL: Self = Self { nodes: true, gpus: true };
    /// A skeleton per rank.
    pub const NONE: Self = Self { nodes: false, gpus: false };

    /// Whether all ranks share one skeleton.
    pub const fn is_full(self) -> bool {
        self.nodes && self.gpus
    }

    /// The rank whose skeleton stands for `rank`'s.
    pub const fn representative(self, rank: Rank) -> Rank {
        Rank { node: if self.nodes { 0 } else { rank.node }, gpu: if self.gpus { 0 } else { rank.gpu } }
    }
}

/// Writes down the tasks of a schedule, role by role.
pub trait TaskSource: Send + Sync {
    /// Streams the tasks of one role of one rank in list order.
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task));

    /// The gather table of a rank; empty for kernels without [`Op::GatherRows`].
    fn table(&self, _rank: Rank) -> Vec<Option<GatherEntry>> {
        Vec::new()
    }
}

/// A fused kernel on a cluster, written down once and executed by the simulator, the functional executor and the GPU.
pub struct Schedule {
    /// Kernel name.
    pub kernel: String,
    /// Cluster.
    pub cluster: Cluster,
    /// Fabric whose puts it uses.
    pub fabric: Fabric,
    /// Problem and options in canonical text, as far as they shape the schedule.
    pub spec: String,
    /// Buffers.
    pub buffers: Vec<Buffer>,
    /// Flag families.
    pub flags: Vec<FlagFamily>,
    /// Launches; `after` edges lead to earlier ones.
    pub launches: Vec<Launch>,
    /// Which ranks share a skeleton.
    pub symmetry: Symmetry,
    /// Useful floating-point operations of the busiest rank, padding not counted.
    pub useful_flops: u64,
    /// Tasks and tables.
    pub source: Box<dyn TaskSource>,
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schedule")
            .field("kernel", &self.kernel)
            .field("cluster", &self.cluster)
            .field("fabric", &self.fabric)
            .field("spec", &self.spec)
            .field("launches", &self.launches)
            .finish_non_exhaustive()
    }
}

impl Schedule {
    /// Streams the tasks of one role of one rank in list order.
    pub fn for_each_task(&self, rank: Rank, launch: usize, role: usize, mut sink: impl FnMut(Task)) {
        self.source.tasks(rank, launch, role, &mut sink);
    }

    /// Collects the tasks of one role; for tests and small schedules.
    pub fn tasks(&self, rank: Rank, launch: usize, role: usize) -> Vec<Task> {
        let mut tasks = Vec::new();
        self.for_each_task(rank, launch, role, |task| tasks.push(task));
        tasks
    }

    /// `(launch, role)` pairs in order.
    pub fn role_indices(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.launches.iter().enumerate().flat_map(|(l, launch)| (0..launch.roles.len()).map(move |r| (l, r)))
    }

    /// Ranks that an execution must visit to see every skeleton.
    pub fn representatives(&self) -> Vec<Rank> {
        self.cluster.iter().filter(|&rank| self.symmetry.representative(rank) == rank).collect()
    }

    /// The buffer with this id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[usize::from(id.0)]
    }

    /// The flag family with this id.
    pub fn family(&self, id: FamilyId) -> &FlagFamily {
        &self.flags[usize::from(id.0)]
    }
}

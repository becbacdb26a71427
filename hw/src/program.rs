//! A lowered program: the structs that the device interpreter reads (`kernels/cuda/program.cuh`), and what the host keeps
//! beside them.

use std::collections::BTreeSet;
use tilewire_kernels::schedule::Flag;
use tilewire_kernels::{Rank, RoleKind};

/// No role, in [`DeviceRole::recycle`].
pub const NONE: u32 = u32::MAX;
/// Tensor maps of a program: as many as constant memory is kept for. Source: `program.cuh`.
pub const MAX_MAPS: usize = 64;

/// `Wait` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceWait {
    /// First flag.
    pub word: u32,
    /// Flags.
    pub count: u32,
    /// Words from one to the next.
    pub stride: u32,
    /// Level.
    pub at_least: u32,
}

/// `Signal` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSignal {
    /// Here the word of the flag on its GPU; its address when it is uploaded.
    pub address: u64,
    /// Amount.
    pub add: u32,
    /// Here the GPU; whether it is another one when it is uploaded.
    pub gpu: u32,
}

/// `Region` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRegion {
    /// Here the offset in the arena; the arena's base is added when it is uploaded.
    pub address: u64,
    /// Bytes.
    pub block_pitch: u64,
    /// Bytes.
    pub row_pitch: u32,
    /// Tensor map.
    pub map: u32,
    /// Row of block 0 in the map.
    pub row: u32,
    /// Of block 0, in 64 elements.
    pub column_block: u32,
    /// From a block to the next.
    pub block_rows: u32,
    /// Likewise, in 64 elements.
    pub block_columns: u32,
    /// Output that is added.
    pub add: u32,
    /// Here the arena.
    pub arena: u32,
}

/// `Task` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceTask {
    /// See [`code`].
    pub op: u32,
    /// Waits of the start, then of k steps, then of the output.
    pub first_wait: u32,
    /// Count.
    pub start_waits: u32,
    /// Count.
    pub step_waits: u32,
    /// Count.
    pub output_waits: u32,
    /// Signals.
    pub first_signal: u32,
    /// Count.
    pub signals: u32,
    /// Inputs, then outputs.
    pub first_region: u32,
    /// Count.
    pub inputs: u32,
    /// Count.
    pub outputs: u32,
    /// Of every region of a move; rows in flight of a gather.
    pub blocks: u32,
    /// Likewise.
    pub rows: u32,
    /// Likewise.
    pub row_bytes: u32,
    /// Steps of a tile; a gather's first entry in [`Program::sources`].
    pub steps: u32,
    /// Number in the role's list.
    pub number: u32,
    /// See [`flag`].
    pub flags: u32,
}

/// Codes of [`DeviceTask::op`].
pub mod code {
    /// GEMM tile.
    pub const GEMM: u32 = 0;
    /// Copy.
    pub const COPY: u32 = 1;
    /// Sum.
    pub const REDUCE: u32 = 2;
    /// Zeros.
    pub const FILL: u32 = 3;
    /// Put.
    pub const PUT: u32 = 4;
    /// Nothing.
    pub const SYNC: u32 = 5;
    /// Rows by a table.
    pub const GATHER: u32 = 6;
    /// Attention tile.
    pub const ATTENTION: u32 = 7;
    /// Partial results of attention joined.
    pub const MERGE: u32 = 8;
}

/// Bits of [`DeviceTask::flags`].
pub mod flag {
    /// An attention tile that starts from an empty state.
    pub const FIRST: u32 = 1;
    /// An attention tile that writes the finished block.
    pub const LAST: u32 = 2;
    /// A gather whose loads run ahead of its stores.
    pub const OVERLAP: u32 = 4;
}

/// `Role` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRole {
    /// Tasks.
    pub first_task: u32,
    /// Count.
    pub tasks: u32,
    /// 0 strided, 1 ticket, 2 ready.
    pub claim: u32,
    /// Window of ready claims.
    pub window: u32,
    /// Workers of a CTA.
    pub lanes: u32,
    /// Role joined afterwards.
    pub recycle: u32,
    /// Whether its tasks are GEMM or attention tiles.
    pub tiles: u32,
    /// CTAs that begin in it.
    pub ctas: u32,
    /// Word of the cursor or ticket.
    pub cursor: u32,
    /// First word of the claims.
    pub claimed: u32,
    /// First of its tiles among those of the program, when it is uploaded.
    pub first_order: u32,
    /// Padding.
    pub unused: u32,
}

/// `Start` of `program.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStart {
    /// Role.
    pub role: u32,
    /// CTA of the role.
    pub cta: u32,
}

/// What a tensor map is for: its box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapKind {
    /// 128 rows of 64 elements: left operands and copies.
    Rows,
    /// 64 rows of 4 x 64 elements: right operands.
    Panel,
    /// 64 rows of 64 elements: outputs of a GEMM tile.
    Output,
    /// So many rows of 2 x 64 elements: blocks of an attention tile.
    Heads(u32),
}

/// A tensor map of an arena seen as rows of `pitch` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSpec {
    /// Arena.
    pub arena: u32,
    /// Bytes of a row.
    pub pitch: u32,
    /// Box.
    pub kind: MapKind,
}

/// What the proxy does for a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutCopy {
    /// Source arena and offset.
    pub src: (u32, u64),
    /// Destination arena and offset.
    pub dst: (u32, u64),
    /// Bytes; 0 raises the flag only.
    pub bytes: u64,
    /// Queue.
    pub queue: u16,
    /// GPU and word raised to 1 when the bytes have landed.
    pub arrived: (u32, u32),
    /// Word of this GPU that counts the puts whose sources are read.
    pub sent: Option<u32>,
}

/// A launch: blocks by index, all in the same entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceLaunch {
    /// Name.
    pub name: String,
    /// Where each block begins.
    pub starts: Vec<DeviceStart>,
    /// Its first role among those of all launches and instances.
    pub first_role: u32,
    /// Roles of an instance.
    pub roles: u32,
}

/// A task's place in the schedule, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleName {
    /// Rank.
    pub rank: Rank,
    /// Launch.
    pub launch: usize,
    /// Role.
    pub kind: RoleKind,
}

/// A lowered schedule.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// Instances whose tasks these are: ranks, or the one that stands for all.
    pub instances: u32,
    /// GPUs that share the schedule, and which of them this one is.
    pub gpus: u32,
    /// Number of this GPU.
    pub gpu: u32,
    /// Bytes of every arena of all GPUs, instance by instance.
    pub arenas: Vec<u64>,
    /// Kernel entry.
    pub entry: String,
    /// Threads of a block.
    pub threads: u32,
    /// Launches, one after the other.
    pub launches: Vec<DeviceLaunch>,
    /// Roles of all launches and instances.
    pub roles: Vec<DeviceRole>,
    /// Where each role comes from.
    pub role_names: Vec<Option<RoleName>>,
    /// Tasks, role by role.
    pub tasks: Vec<DeviceTask>,
    /// Waits.
    pub waits: Vec<DeviceWait>,
    /// Signals.
    pub signals: Vec<DeviceSignal>,
    /// Regions.
    pub regions: Vec<DeviceRegion>,
    /// Tensor maps.
    pub maps: Vec<MapSpec>,
    /// Rows that gathers fetch: arena and offset; none for a row of zeros.
    pub sources: Vec<Option<(u32, u64)>>,
    /// Puts by task; none for other tasks.
    pub puts: Vec<Option<PutCopy>>,
    /// Flags, cursors and claims.
    pub words: u32,
    /// First word of every flag family in an instance.
    pub(crate) families: Vec<u32>,
    pub(crate) words_per_instance: u32,
}

impl Program {
    /// GPU of an instance's flags, and the word of one of them there.
    pub(crate) fn word(&self, instance: u32, flag: Flag) -> (u32, u32) {
        let within = self.families[usize::from(flag.family.0)] + flag.slot;
        if self.gpus > 1 { (instance, within) } else { (0, instance * self.words_per_instance + within) }
    }

    /// GPU of an arena.
    pub fn gpu_of(&self, arena: u32) -> u32 {
        arena / (self.arenas.len() as u32 / self.gpus)
    }

    /// The instance (the first that runs here: 0), family and slot of a word; none for cursors and claims.
    pub fn flag_of(&self, word: u32) -> Option<(u32, usize, u32)> {
        if word >= self.words_per_instance * self.instances {
            return None;
        }
        let (instance, within) = (word / self.words_per_instance, word % self.words_per_instance);
        let family = self.families.iter().rposition(|&first| first <= within)?;
        Some((instance, family, within - self.families[family]))
    }

    /// Whether every put's arrival is waited for, so that none lands after the launch.
    pub fn awaits_all_puts(&self) -> bool {
        let awaited: BTreeSet<u32> = self
            .waits
            .iter()
            .filter(|wait| wait.at_least > 0)
            .flat_map(|wait| (0..wait.count).map(|i| wait.word + i * wait.stride))
            .collect();
        // Words that say a put has left are written after its arrival, and seldom all awaited.
        self.puts.iter().flatten().all(|put| put.sent.is_none() && awaited.contains(&put.arrived.1))
    }

    /// The role that a task belongs to.
    pub fn role_of(&self, task: u32) -> Option<usize> {
        self.roles.iter().position(|r| (r.first_task..r.first_task + r.tasks).contains(&task))
    }
}

//! From a Schedule to the structs that the device interpreter reads (`kernels/cuda/program.cuh`).
//!
//! ```text
//! Schedule, mode, split ──▶ Program: launches of CTAs, roles, tasks, waits, signals, regions, tensor maps, puts
//! ```
//!
//! Pure: it allocates nothing on a device. A place is an *arena* (a buffer of an instance) and an offset in it. An
//! instance is a rank in virtual and cluster mode; mirror mode has one, which stands for all.
//!
//! **Cluster.** One program per GPU: the tasks of its own rank. It names the arenas of all ranks and raises flags of any
//! GPU; flags that it waits for, cursors and claims are its own.
//!
//! **Mirror.** For a region that task i of rank (0, 0) names at offset d stands the region that task i of rank -d
//! names, which lies on (0, 0). Flags are part of the skeleton and are the same either way.

mod peers;
mod task;

use crate::device::HwError;
use peers::Peers;
use task::entry;
use tilewire_kernels::schedule::{Claim, CtaCount, Drain, Engine, MainLoop, Op, Role, Task, side_by_side};
use tilewire_kernels::{Rank, RoleSplit, Schedule};

pub use crate::program::{
    DeviceLaunch, DeviceRegion, DeviceRole, DeviceSignal, DeviceStart, DeviceTask, DeviceWait, MAX_MAPS, MapKind,
    MapSpec, NONE, Program, PutCopy, RoleName, code, flag,
};

/// Slots of shared memory for copies when outputs lie over the operand stages, in boxes.
const COPY_SLOTS: u32 = 8;
/// Warps that move data, in the smallest block.
const MOVER_WARPS: u32 = 8;
/// How ranks share GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One rank on the whole GPU stands for all.
    Mirror,
    /// All ranks on one GPU.
    Virtual,
    /// One rank per GPU.
    Cluster,
}

/// Lowers a schedule for one GPU with `sms` SMs.
///
/// # Errors
/// [`HwError::Unsupported`] for what the interpreter does not do, [`HwError::TooManyCtas`].
pub fn lower(schedule: &Schedule, mode: Mode, split: &RoleSplit, sms: u32) -> Result<Program, HwError> {
    let ranks: Vec<Rank> = match mode {
        Mode::Mirror if !schedule.symmetry.is_full() => {
            return Err(unsupported("mirror mode needs a schedule with one skeleton for all ranks"));
        }
        Mode::Mirror => vec![Rank { node: 0, gpu: 0 }],
        Mode::Virtual => schedule.cluster.iter().collect(),
        Mode::Cluster => return Err(unsupported("a cluster by one program; lower it rank by rank")),
    };
    lower_ranks(schedule, mode, split, sms, &ranks)
}

/// Lowers a schedule for a GPU per rank, each with `sms` SMs; programs by rank number.
///
/// # Errors
/// As [`lower`].
pub fn lower_cluster(schedule: &Schedule, split: &RoleSplit, sms: u32) -> Result<Vec<Program>, HwError> {
    schedule.cluster.iter().map(|rank| lower_ranks(schedule, Mode::Cluster, split, sms, &[rank])).collect()
}

/// The program of the GPU that runs `ranks`.
fn lower_ranks(
    schedule: &Schedule,
    mode: Mode,
    split: &RoleSplit,
    sms: u32,
    ranks: &[Rank],
) -> Result<Program, HwError> {
    let mut families = Vec::new();
    let mut words = 0;
    for family in &schedule.flags {
        families.push(words);
        words += family.slots;
    }
    let instances = ranks.len() as u32;
    let (gpus, gpu, holders) = match mode {
        Mode::Cluster => {
            let all = schedule.cluster.ranks() as u32;
            (all, schedule.cluster.number(ranks[0]) as u32, all)
        }
        Mode::Mirror | Mode::Virtual => (1, 0, instances),
    };
    let mut program = Program {
        instances,
        gpus,
        gpu,
        arenas: (0..holders).flat_map(|_| schedule.buffers.iter().map(|b| b.bytes)).collect(),
        words: words * instances,
        families,
        words_per_instance: words,
        ..Program::default()
    };
    if !side_by_side(schedule.launches.iter().map(|launch| &launch.after[..])).is_empty() {
        return Err(unsupported("launches that may run side by side"));
    }
    for (l, launch) in schedule.launches.iter().enumerate() {
        let (first_role, roles) = (program.roles.len() as u32, launch.roles.len() as u32);
        for (instance, &rank) in ranks.iter().enumerate() {
            let first_role = program.roles.len() as u32;
            for r in 0..launch.roles.len() {
                let instance = gpu + instance as u32;
                program.lower_role(schedule, mode, rank, instance, (l, r), first_role)?;
            }
        }
        program.launches.push(DeviceLaunch { name: launch.name.clone(), starts: Vec::new(), first_role, roles });
    }
    program.apply_split(schedule, split, sms)?;
    if program.entry.is_empty() {
        program.entry = entry(MainLoop::WaitEachStep, Drain::Overlap)?;
    }
    program.threads = if program.entry == "attend_192" { 512 } else { 384 };
    if program.maps.len() > MAX_MAPS {
        return Err(unsupported(format!("{} tensor maps, at most {MAX_MAPS}", program.maps.len())));
    }
    Ok(program)
}

fn unsupported(what: impl Into<String>) -> HwError {
    HwError::Unsupported { what: what.into() }
}

fn cta_count(roles: &[Role], r: usize, split: &RoleSplit, sms: u32) -> u32 {
    let plain = |role: &Role| match role.ctas {
        CtaCount::FromSplit => split.get(role.kind),
        CtaCount::Fixed(n) => n,
        CtaCount::AllBut(_) => 0,
    };
    if let Some(spared) = roles[r].ctas.spared() {
        let others: u32 = roles.iter().map(plain).sum();
        return sms.saturating_sub(others + spared).max(1);
    }
    plain(&roles[r])
}

const fn is_tile(op: &Op) -> bool {
    matches!(op, Op::GemmTile { .. } | Op::AttentionTile { .. })
}

impl Program {
    /// Gives every role its CTAs; nothing else of a program depends on the split.
    ///
    /// # Errors
    /// [`HwError::TooManyCtas`].
    pub fn apply_split(&mut self, schedule: &Schedule, split: &RoleSplit, sms: u32) -> Result<(), HwError> {
        let mut next = 0;
        for (launch, spec) in self.launches.iter_mut().zip(&schedule.launches) {
            launch.starts.clear();
            for _ in 0..self.instances {
                for r in 0..spec.roles.len() {
                    // Instances share the SMs: a role that wants all of them gets its part.
                    let ctas = cta_count(&spec.roles, r, split, sms / self.instances);
                    self.roles[next].ctas = ctas;
                    launch.starts.extend((0..ctas).map(|cta| DeviceStart { role: next as u32, cta }));
                    next += 1;
                }
            }
            let ctas = launch.starts.len() as u32;
            if ctas > sms {
                return Err(HwError::TooManyCtas { launch: launch.name.clone(), ctas, sms });
            }
        }
        Ok(())
    }

    fn lower_role(
        &mut self,
        schedule: &Schedule,
        mode: Mode,
        rank: Rank,
        instance: u32,
        (l, r): (usize, usize),
        first_role: u32,
    ) -> Result<(), HwError> {
        let spec = &schedule.launches[l].roles[r];
        let cluster = schedule.cluster;
        let lists: Vec<Vec<Task>> = match mode {
            Mode::Mirror => cluster.iter().map(|rank| schedule.tasks(rank, l, r)).collect(),
            Mode::Virtual | Mode::Cluster => vec![schedule.tasks(rank, l, r)],
        };
        if lists.iter().any(|list| list.len() != lists[0].len()) {
            return Err(unsupported("ranks whose tasks differ"));
        }
        let tables = match mode {
            Mode::Mirror => cluster.iter().map(|rank| schedule.source.table(rank)).collect(),
            Mode::Virtual | Mode::Cluster => vec![schedule.source.table(rank)],
        };
        let peers = Peers { cluster, lists, tables };
        let count = peers.lists[0].len() as u32;
        let tiles = count > 0 && is_tile(&peers.lists[0][0].op);
        let mut role = DeviceRole {
            first_task: self.tasks.len() as u32,
            tasks: count,
            claim: 0,
            window: 0,
            lanes: spec.lanes.max(1),
            recycle: spec.recycle.map_or(NONE, |other| first_role + other as u32),
            tiles: u32::from(tiles),
            ctas: 0,
            cursor: self.words,
            claimed: self.words + 1,
            ..DeviceRole::default()
        };
        match spec.claim {
            Claim::Strided => {}
            Claim::Ticket => (role.claim, self.words) = (1, self.words + 1),
            Claim::Ready { window } => {
                (role.claim, role.window, self.words) = (2, window, self.words + 1 + count);
            }
        }
        if tiles && role.claim == 2 {
            return Err(unsupported("ready claims of tiles"));
        }
        if role.lanes > MOVER_WARPS {
            return Err(unsupported(format!("{} lanes of a CTA, at most {MOVER_WARPS}", role.lanes)));
        }
        for i in 0..peers.lists[0].len() {
            let task = &peers.lists[0][i];
            if is_tile(&task.op) != tiles {
                return Err(unsupported("a role of tiles and other work"));
            }
            if task.restart {
                return Err(unsupported("strides that begin anew (moe_dispatch_gemm: set claim=ticket)"));
            }
            let lanes = match task.op {
                Op::Put { .. } | Op::Sync => MOVER_WARPS,
                Op::Copy { engine: Engine::Bulk, .. } => COPY_SLOTS / 4 + 1,
                _ => 1,
            };
            if role.lanes > lanes {
                return Err(unsupported(format!("{} by one of {} lanes", task.op.name(), role.lanes)));
            }
            let lowered = self.lower_task(schedule, mode, rank, instance, &peers, i)?;
            self.tasks.push(lowered);
        }
        Self::check_recycling(schedule, rank, l, r)?;
        self.roles.push(role);
        self.role_names.push(Some(RoleName { rank, launch: l, kind: spec.kind }));
        Ok(())
    }

    /// A CTA comes to one role with tiles at most; one that began with other work ends with it.
    fn check_recycling(schedule: &Schedule, rank: Rank, l: usize, r: usize) -> Result<(), HwError> {
        let roles = &schedule.launches[l].roles;
        let of_tiles = |role: usize| {
            let mut is = false;
            schedule.for_each_task(rank, l, role, |task| is |= is_tile(&task.op));
            is
        };
        let mut chain = vec![of_tiles(r)];
        let mut at = r;
        while let Some(next) = roles[at].recycle {
            if roles[next].claim == Claim::Strided {
                return Err(unsupported("CTAs that join a role of strided claims"));
            }
            chain.push(of_tiles(next));
            at = next;
        }
        let tiles = chain.iter().filter(|tiles| **tiles).count();
        if tiles > 1 || (tiles == 1 && !chain[0] && chain.last() != Some(&true)) {
            return Err(unsupported("CTAs that go on from tiles to which they came from other work"));
        }
        Ok(())
    }
}

//! From a rich schedule and a machine to the compact program that the engine runs.
//!
//! A task is 16 bytes: the index of a cost record, its waits and its signals. Regions never enter the simulator; all
//! ranks that share a skeleton share one program. Three **forms** of every cost record serve the three runs that a
//! prediction needs: whole, compute only, communication only.

mod collective;
mod cost;
mod hash;
mod isolated;
mod key;
mod loads;
mod panels;
mod program;
mod rank;
mod resource;
mod times;
mod units;

pub use isolated::Late;
pub use program::{
    Cost, CostRecord, Flow, LaunchC, Program, PublishC, PutC, RoleC, SPAN, SignalC, SpanC, TaskC, WaitC, Work,
};
pub use resource::{Demand, ResourceKind};
pub use times::{Leaves, Power, Times};

use crate::SimError;
use crate::machine::{Machine, PowerLimit};
use crate::noise::Noise;
use crate::predict::{Config, Execution, Protocol};
use cost::Compiler;
use hash::FastMap;
use isolated::before_clock;
use rank::{account, compile_rank, set_countdowns};
use resource::{capacities, droop};
use std::cell::Cell;
use std::collections::HashMap;
use tilewire_kernels::schedule::side_by_side;
use tilewire_kernels::{Cluster, Rank, RoleKind, Schedule};
use units::rate;

/// No index.
pub const NONE: u32 = u32::MAX;

/// The three runs behind a prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Everything.
    Whole = 0,
    /// The compute role's tasks alone, outputs local.
    ComputeOnly = 1,
    /// Compute tiles take only the time of their remote writes.
    CommOnly = 2,
}

/// A compiled simulation.
pub struct Compiled {
    /// Ranks that are simulated.
    pub ranks: Vec<Rank>,
    /// Program of each simulated rank.
    pub program_of: Vec<u32>,
    /// Programs.
    pub programs: Vec<Program>,
    /// Launches, the same for all ranks.
    pub launches: Vec<LaunchC>,
    /// Pairs of launches that may run side by side, the earlier one first.
    pub side_by_side: Vec<(usize, usize)>,
    /// Cost records.
    pub costs: Vec<CostRecord>,
    /// Class templates.
    pub classes: Vec<Vec<Demand>>,
    /// Simulated cluster: nodes and GPUs per node after folding.
    pub folded: Cluster,
    /// Names of the flag families.
    pub families: Vec<String>,
    /// First flag of each family; one more at the end.
    pub family_base: Vec<u32>,
    /// Families raised by tasks of other roles than compute (dropped in compute-only runs).
    pub dropped: Vec<bool>,
    /// Roles that raise each family, and whether puts do.
    pub raisers: Vec<(Option<RoleKind>, bool)>,
    /// Timing constants.
    pub times: Times,
    /// Capacity and base demand of one rank's resources.
    pub capacities: Vec<(u64, u64)>,
    /// Every rank's flows cross the same of its own and of its peers' resources, which leaf switches end: bandwidth may be
    /// shared out once for all. Without, it is rank by rank, with the same result.
    pub ranks_alike: bool,
    /// Put arrivals count as satisfied from the start.
    pub stale_arrivals: bool,
    /// Noise, when asked for.
    pub noise: Option<Noise>,
    /// Each launch is timed by itself, on each rank from its own launch command.
    pub isolated: bool,
    /// Who comes late.
    pub late: Late,
    /// The power limit, when it acts on the average of a run.
    pub power: Option<Power>,
    /// Leaf switches, when they are oversubscribed and the cluster has more than one.
    pub leaves: Option<Leaves>,
}

impl Compiled {
    /// Compiles a schedule for a machine.
    ///
    /// # Errors
    /// [`SimError`] when the execution is impossible for the schedule's symmetry.
    pub fn new(schedule: &Schedule, machine: &Machine, config: &Config) -> Result<Self, SimError> {
        let cluster = schedule.cluster;
        let leafy = machine.network.oversubscription.value > 1.0
            && f64::from(cluster.nodes) > machine.network.nodes_per_leaf.value;
        let noisy = config.noise_seed.is_some();
        let (fold_nodes, fold_gpus) = match config.execution {
            Execution::Full => (false, false),
            Execution::Mirror => {
                if !schedule.symmetry.is_full() || leafy || noisy {
                    let why = if noisy {
                        "noise makes ranks differ"
                    } else if leafy {
                        "an oversubscribed leaf switch makes nodes differ"
                    } else {
                        "its ranks do not share one skeleton"
                    };
                    return Err(SimError::NotSymmetric { kernel: schedule.kernel.clone(), why });
                }
                (true, true)
            }
            Execution::Folded => (schedule.symmetry.nodes && !leafy && !noisy, schedule.symmetry.gpus && !noisy),
        };
        let folded = Cluster {
            nodes: if fold_nodes { 1 } else { cluster.nodes },
            gpus_per_node: if fold_gpus { 1 } else { cluster.gpus_per_node },
        };
        let ranks: Vec<Rank> = folded.iter().collect();
        let rails = machine.nic.rails.value as u32;
        let mut compiler = Compiler {
            machine,
            cluster,
            fold_nodes,
            fold_gpus,
            rails,
            peers: Cell::default(),
            classes: Vec::new(),
            class_of: HashMap::new(),
            keys: Vec::new(),
            cost_of: FastMap::default(),
            costs: Vec::new(),
            put_flow_of: FastMap::default(),
        };

        let mut family_base = vec![0_u32];
        for family in &schedule.flags {
            family_base.push(family_base[family_base.len() - 1] + family.slots);
        }
        let mut raisers: Vec<(Option<RoleKind>, bool)> = vec![(None, false); schedule.flags.len()];
        let mut dropped = vec![false; schedule.flags.len()];

        let mut launches = Vec::new();
        let mut first_role = 0;
        for (launch, before_clock) in schedule.launches.iter().zip(before_clock(schedule, config.protocol)) {
            launches.push(LaunchC {
                name: launch.name.clone(),
                after: launch.after.iter().map(|&l| l as u32).collect(),
                roles: first_role..first_role + launch.roles.len(),
                before_clock,
            });
            first_role += launch.roles.len();
        }

        let representatives = schedule.representatives();
        let mut programs = Vec::with_capacity(representatives.len());
        for &rank in &representatives {
            programs.push(compile_rank(
                &mut compiler,
                schedule,
                rank,
                &launches,
                &family_base,
                &mut raisers,
                &mut dropped,
            ));
        }
        compiler.make_records();
        let times = Times::new(machine);
        for program in &mut programs {
            account(program, &compiler, &times, &launches);
        }
        set_countdowns(&mut programs, schedule, &representatives, &family_base);

        let program_of = ranks
            .iter()
            .map(|&rank| {
                let representative = schedule.symmetry.representative(rank);
                representatives.iter().position(|&r| r == representative).unwrap_or(0) as u32
            })
            .collect();
        let stale_arrivals = matches!(config.protocol, Protocol::Published { stale_arrivals: true, .. });
        let noise = config.noise_seed.map(|seed| Noise {
            seed,
            network_sigma: machine.noise.network_sigma.value,
            flag_sigma: machine.noise.flag_sigma.value,
            clock_sigma: machine.noise.clock_sigma.value,
        });
        let late = Late::new(machine, noise.as_ref(), ranks.len());
        Ok(Self {
            ranks,
            program_of,
            programs,
            side_by_side: side_by_side(schedule.launches.iter().map(|launch| launch.after.as_slice())),
            launches,
            costs: compiler.costs,
            classes: compiler.classes,
            folded,
            families: schedule.flags.iter().map(|f| f.name.clone()).collect(),
            family_base,
            dropped,
            raisers,
            times,
            capacities: capacities(machine, config.clock, compiler.peers.get()),
            ranks_alike: !leafy,
            stale_arrivals,
            power: (machine.power_limit == PowerLimit::Average).then(|| {
                let (knee, fixed) = droop(machine, config.clock);
                Power { knee, fixed }
            }),
            noise,
            isolated: config.protocol.is_isolated(),
            late,
            leaves: leafy.then(|| {
                let nodes = machine.network.nodes_per_leaf.value;
                // A GPU that stands for all of its node brings its own share of the links.
                let rails = nodes * f64::from(folded.gpus_per_node);
                let link = rails * machine.nic.rail_gbs.value / machine.network.oversubscription.value;
                Leaves { nodes: nodes as u32, link: rate(link) }
            }),
        })
    }

    /// The tasks of a program that run while the clock does.
    pub fn timed_tasks<'a>(&self, program: &'a Program) -> impl Iterator<Item = (usize, &'a TaskC)> + use<'a, '_> {
        let timed = program.roles.iter().filter(|role| !self.launches[role.launch as usize].before_clock);
        let tasks = timed.flat_map(|role| role.first as usize..(role.first + role.tasks) as usize);
        tasks.map(|task| (task, &program.tasks[task]))
    }

    /// What a class takes from the links of its leaves: node offset, rail, bytes/s.
    pub fn leaf_demand(&self, class: &[Demand]) -> Option<(u16, u8, u64)> {
        let (to, rail) = class.iter().find_map(|d| match d.1 {
            ResourceKind::NicIn(rail) if d.0.dn != 0 => Some((d.0, rail)),
            _ => None,
        })?;
        // The NIC is held for the message's own cost too; what travels are its bytes, as over PCIe.
        let moved = class.iter().find(|d| d.0 == to && d.1 == ResourceKind::PcieIn)?;
        Some((to.dn, rail, moved.2))
    }

    /// What a rank's tiles draw of the power limit, for their arithmetic and their memory traffic, in FLOP of matrix work.
    pub fn power_flops(&self) -> u64 {
        let totals = self.programs.first().map(|program| program.totals.as_slice()).unwrap_or_default();
        totals.iter().find(|(kind, _)| *kind == ResourceKind::Chip).map_or(0, |&(_, flops)| flops)
    }

    /// The family that a flag belongs to.
    pub fn family_of(&self, flag: u32) -> usize {
        self.family_base.partition_point(|&base| base <= flag) - 1
    }
}

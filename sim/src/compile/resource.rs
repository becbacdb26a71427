//! What ranks share: resources and how much of each there is.

use super::loads::Peers;
use super::units::rate;
use crate::machine::{Machine, PowerLimit};
use crate::predict::Clock;
use tilewire_kernels::Offset;

/// Resource kinds of a rank, in the order of their indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ResourceKind {
    /// HBM, reads and writes.
    Hbm,
    /// Power of the chip, as FLOP/s of matrix work at full clock.
    Chip,
    /// NVLink out.
    Egress,
    /// NVLink in.
    Ingress,
    /// PCIe towards the NICs.
    PcieOut,
    /// PCIe from the NICs.
    PcieIn,
    /// A rail, out.
    NicOut(u8),
    /// A rail, in.
    NicIn(u8),
}

impl ResourceKind {
    /// Position among the resources of a rank.
    pub const fn index(self, rails: u32) -> u32 {
        match self {
            Self::Hbm => 0,
            Self::Chip => 1,
            Self::Egress => 2,
            Self::Ingress => 3,
            Self::PcieOut => 4,
            Self::PcieIn => 5,
            Self::NicOut(rail) => 6 + rail as u32,
            Self::NicIn(rail) => 6 + rails + rail as u32,
        }
    }

    /// Resources of a rank.
    pub const fn count(rails: u32) -> u32 {
        6 + 2 * rails
    }
}

/// Demand of a class at full speed on the resources of the rank at `offset`.
pub type Demand = (Offset, ResourceKind, u64);

/// Knee and static power of the droop, TFLOP/s.
pub(super) const fn droop(machine: &Machine, clock: Clock) -> (f64, f64) {
    let gpu = &machine.gpu;
    match clock {
        Clock::Sustained => (gpu.droop_knee_tflops.value, gpu.droop_static_tflops.value),
        Clock::Cold => (gpu.cold_knee_tflops.value, gpu.cold_static_tflops.value),
    }
}

pub(super) fn capacities(machine: &Machine, clock: Clock, peers: Peers) -> Vec<(u64, u64)> {
    let rails = machine.nic.rails.value as u32;
    let mut capacities = vec![(0, 0); ResourceKind::count(rails) as usize];
    let mut set = |kind: ResourceKind, value| capacities[kind.index(rails) as usize] = value;
    set(ResourceKind::Hbm, (rate(machine.gpu.hbm_gbs.value), 0));
    let power = |tflops: f64| (tflops * 1e12).round() as u64;
    let (knee, fixed) = droop(machine, clock);
    set(
        ResourceKind::Chip,
        match machine.power_limit {
            PowerLimit::Moment => (power(knee + fixed), power(fixed)),
            // Never binds: the clock of the whole run is lower instead.
            PowerLimit::Average => (u64::MAX / 4, 0),
        },
    );
    let share = if peers == Peers::Many { machine.nvlink.many_peers_share.value } else { 1.0 };
    set(ResourceKind::Egress, (rate(machine.nvlink.egress_gbs.value * share), 0));
    set(ResourceKind::Ingress, (rate(machine.nvlink.ingress_gbs.value * share), 0));
    set(ResourceKind::PcieOut, (rate(machine.nic.pcie_gbs.value), 0));
    set(ResourceKind::PcieIn, (rate(machine.nic.pcie_gbs.value), 0));
    for rail in 0..rails as u8 {
        set(ResourceKind::NicOut(rail), (rate(machine.nic.rail_gbs.value), 0));
        set(ResourceKind::NicIn(rail), (rate(machine.nic.rail_gbs.value), 0));
    }
    capacities
}

//! Constants of a machine that the engine needs beside costs: latencies, power, leaf switches.

use super::PublishC;
use super::units::{ps_from_ns, ps_from_us};
use crate::machine::Machine;

/// A power limit that acts on the average of a run, in TFLOP/s of matrix work at full clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Power {
    /// Average from which on the clock droops.
    pub knee: f64,
    /// Power that does not depend on the matrix work.
    pub fixed: f64,
}

impl Power {
    /// Slowdown, in millionths, of a run that draws the power of `flops` of matrix work and took `ps` with its tiles
    /// slowed by `slowdown`.
    pub fn slowdown(&self, flops: u64, ps: u64, slowdown: u64) -> u64 {
        let at_full_clock = flops as f64 / ps.max(1) as f64 * slowdown as f64 * 1e-6;
        ((self.fixed + at_full_clock) / (self.fixed + self.knee) * 1e6).round().max(1e6) as u64
    }
}

/// Leaf switches whose links to the spine carry less than those to the nodes. The network is rail-optimised: each rail
/// has its own plane, so that a leaf has an uplink and a downlink per rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaves {
    /// Nodes under one leaf.
    pub nodes: u32,
    /// Bytes/s of one rail's uplink, and of its downlink.
    pub link: u64,
}

/// Timing constants in picoseconds.
#[derive(Clone, Debug)]
pub struct Times {
    /// Flag latency inside a GPU.
    pub flag_local: u64,
    /// Flag latency over NVLink.
    pub flag_remote: u64,
    /// From the end of a task's writes until its flags are raised.
    pub raise: u64,
    /// From the last store of a tile's output until it is visible.
    pub store_visible: u64,
    /// Steps that a tile's main loop can do while the output of the tile before waits for its flags.
    pub ahead_steps: u64,
    /// What a flag that a step waits for costs a tile.
    pub step_flag: u64,
    /// Flag that the NIC wrote into the GPU's memory.
    pub flag_nic: u64,
    /// Word in the host's memory until a GPU that polls it sees it.
    pub flag_in_host: u64,
    /// Flag that a proxy raises until the waiter sees it: republished in the GPU's memory.
    pub flag_host: u64,
    /// CTA's time to push a command.
    pub push: u64,
    /// Push until the proxy can read it.
    pub fifo: u64,
    /// FIFO depth.
    pub fifo_depth: u32,
    /// Proxy threads.
    pub threads: u32,
    /// Posting time.
    pub post: u64,
    /// Completion handling time.
    pub completion: u64,
    /// Writes in flight per queue.
    pub in_flight: u32,
    /// One-way network latency.
    pub network: u64,
    /// Data in memory until the sender sees the completion.
    pub ack: u64,
    /// Messages of a queue arrive in the order in which they left.
    pub ordered: bool,
    /// Launch command to first CTA.
    pub launch: u64,
    /// Dependent launch.
    pub dependent: u64,
    /// Cost of an iteration of a loop.
    pub iteration: u64,
    /// What the host takes before an isolated launch, while its clock runs: on every rank, so that nobody waits for it.
    pub isolated: u64,
    /// Load until the clock is the sustained one.
    pub cold: u64,
    /// SMs.
    pub sms: u32,
    /// Rails.
    pub rails: u32,
}

impl Times {
    /// From when a NIC, or for [`PublishC::Proxy`] the receiver's proxy, raises a flag until it is visible.
    pub const fn flag_by(&self, publish: PublishC) -> u64 {
        match publish {
            PublishC::Nic => self.flag_nic,
            PublishC::NicToHost => self.flag_in_host,
            PublishC::Proxy => self.flag_host,
        }
    }

    pub(super) fn new(machine: &Machine) -> Self {
        let (flags, proxy, network, launch) = (&machine.flags, &machine.proxy, &machine.network, &machine.launch);
        Self {
            flag_local: ps_from_ns(flags.local_ns.value),
            flag_remote: ps_from_ns(flags.nvlink_ns.value),
            raise: machine.interpreter.as_ref().map_or(0, |i| ps_from_ns(i.raise_ns.value)),
            store_visible: machine.interpreter.as_ref().map_or(0, |i| ps_from_ns(i.store_visible_ns.value)),
            // Staging takes half of an output.
            ahead_steps: machine.interpreter.as_ref().map_or(0, |i| i.store_steps.value as u64 / 2),
            step_flag: machine.interpreter.as_ref().map_or(0, |i| ps_from_ns(i.step_flag_ns.value)),
            flag_nic: ps_from_ns(flags.nic_ns.value),
            flag_in_host: ps_from_ns(flags.host_ns.value),
            flag_host: ps_from_ns(flags.host_ns.value + flags.republish_ns.value),
            push: ps_from_ns(proxy.push_ns.value),
            fifo: ps_from_ns(proxy.fifo_latency_ns.value),
            fifo_depth: proxy.fifo_depth.value as u32,
            threads: proxy.threads.value as u32,
            post: ps_from_ns(proxy.post_ns.value),
            completion: ps_from_ns(proxy.completion_ns.value),
            in_flight: proxy.in_flight.value as u32,
            network: ps_from_us(network.latency_us.value),
            ack: ps_from_us(network.ack_us.value),
            ordered: machine.fabric.orders_within_queue(),
            launch: ps_from_us(launch.command_us.value),
            dependent: ps_from_us(launch.dependent_us.value),
            iteration: ps_from_us(launch.iteration_us.value),
            isolated: ps_from_us(launch.isolated_us.value),
            cold: ps_from_us(machine.gpu.cold_ms.value * 1e3),
            sms: machine.gpu.sms.value as u32,
            rails: machine.nic.rails.value as u32,
        }
    }
}

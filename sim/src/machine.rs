//! The physical model: every number that describes hardware, each with its source.
//!
//! A machine file is TOML; every parameter is written as
//! `name_unit = { value = 1.0, kind = "measured", source = "...", date = "2026-11-29" }`. Bandwidths are per direction.
//! Unknown and missing keys are errors that name line and column.

mod legal;
mod transport;

pub use transport::{Carrier, Publishing, Transport};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tilewire_kernels::Fabric;

/// How a value came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Read on hardware by this project.
    Measured,
    /// Published by somebody else.
    Published,
    /// A datasheet figure.
    Vendor,
    /// Computed from other sourced values; the source shows the formula.
    Derived,
    /// Fitted on published rows named in the source.
    Fitted,
    /// No source: listed in every report that used it.
    Assumed,
}

/// A value with its provenance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    /// The value, in the unit that ends the parameter's name.
    pub value: f64,
    /// How it is known.
    pub kind: Kind,
    /// Where it comes from.
    pub source: String,
    /// When it was read, `YYYY-MM-DD`.
    pub date: String,
}

macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: Param,)*
        }

        impl Section for $name {
            fn params(&self) -> Vec<(&'static str, &Param)> {
                vec![$((stringify!($field), &self.$field)),*]
            }

            fn params_mut(&mut self) -> Vec<(&'static str, &mut Param)> {
                vec![$((stringify!($field), &mut self.$field)),*]
            }
        }
    };
}

/// A group of parameters of a machine file.
trait Section {
    /// Names and values.
    fn params(&self) -> Vec<(&'static str, &Param)>;

    /// Names and values, to change them.
    fn params_mut(&mut self) -> Vec<(&'static str, &mut Param)>;
}

section! {
    /// The chip: counts, memory and the limits that all its SMs share.
    Gpu {
        /// Streaming multiprocessors; one CTA each.
        sms,
        /// Shared memory that one CTA can have.
        smem_kib,
        /// HBM bandwidth of reads.
        hbm_gbs,
        /// What a written byte takes of `hbm_gbs`, beside a byte read: the memory turns around between the two.
        hbm_write_bytes_per_byte,
        /// Operand panels touched within this many bytes, in issue order, are found in L2.
        l2_window_mib,
        /// Share of the operand panels of the wave before that are found in L2 beyond the window, once CTAs have drifted
        /// apart.
        l2_drift_hits,
        /// Matrix throughput of the chip from which on the clock droops: the power limit is reached.
        droop_knee_tflops,
        /// Power that does not depend on the matrix work, as matrix throughput of the same power at full clock. Above
        /// the knee all SMs slow down to `(knee + static) / (static + demand)` of their full speed.
        droop_static_tflops,
        /// FLOP of matrix work that draw as much power as a byte that tiles read from HBM or write to it.
        hbm_power_flop_per_byte,
        /// As `droop_knee_tflops`, for the first tens of milliseconds after the card was idle.
        cold_knee_tflops,
        /// As `droop_static_tflops`, for the first tens of milliseconds after the card was idle.
        cold_static_tflops,
        /// Load until the power limit takes hold of a card that was idle.
        cold_ms,
    }
}

section! {
    /// Cost of a GEMM tile on one SM for one kind of main loop.
    Gemm {
        /// Matrix throughput of one SM in its main loop, alone on the chip.
        sm_tflops,
        /// First operand load to first matrix instruction, when not hidden behind the tile before.
        fill_ns,
        /// Accumulators to shared memory and issue of the store.
        epilogue_ns,
        /// From the end of the store's transfer until shared memory may be reused, `drain = smem_read`.
        smem_read_ns,
        /// From the end of the store's transfer until it is visible, `drain = visible`.
        visible_ns,
    }
}

section! {
    /// Cost of an attention tile on one SM.
    Attention {
        /// Matrix throughput of one SM in the KV loop.
        sm_tflops,
        /// Q load, first KV load, and the epilogue of a block.
        block_ns,
    }
}

section! {
    /// What it costs to run a schedule through the device interpreter. A hard-wired kernel has none of it.
    Interpreter {
        /// To take a task that is no tile: claim, descriptor, hand-over to the CTA's threads.
        task_ns,
        /// What it adds to find and take a ready task: cursor, claims and flags of the window, then a try.
        claim_ns,
        /// Beside its transfer and its first load: to begin a bulk copy, and until its last store is visible.
        copy_ns,
        /// Rate at which a CTA loads a bulk copy's source; meanwhile it stores, at `sm.copy_cta_gbs` for each destination.
        copy_load_gbs,
        /// What a flag that a tile's steps wait for costs the loader, met or not.
        step_flag_ns,
        /// What a FLOP of attention takes of the power limit, beside a FLOP of a GEMM.
        attention_power,
        /// From the end of a task's writes until its flags are raised: by a warp of its own, in the model one task after the other.
        /// The CTA goes on.
        raise_ns,
        /// Of a gather, to look up a row and start its copy: one thread does it, row after row.
        gather_row_ns,
        /// Bulk copy of one lane of a CTA: it lets no more than two of its stores be under way.
        lane_gbs,
        /// Steps of the next tile's main loop over which an output with `drain = overlap` leaves.
        store_steps,
        /// From the last store of a tile's output until it is visible; the CTA goes on.
        store_visible_ns,
        /// What every other CTA that computes adds to a GEMM tile's time beside its steps: descriptors and operands come
        /// later from a memory that more CTAs use.
        crowd_ns,
        /// By what part of its time every CTA that computes lengthens a task that is no tile, which lives from the latency of
        /// the same memory.
        move_crowd_per_cta,
    }
}

section! {
    /// Copies, sums and stores by the SMs: one CTA.
    Sm {
        /// Bulk copy of one CTA, enough bytes in flight, local or NVLink.
        copy_cta_gbs,
        /// Load/store copy of one CTA, enough bytes in flight.
        ldst_cta_gbs,
        /// Latency of a local load: in-flight bytes over this bound a CTA's rate.
        local_latency_ns,
        /// Latency of a load or store over NVLink.
        nvlink_latency_ns,
        /// Remote or local atomic add of one CTA.
        add_cta_gbs,
        /// Sum of one CTA, bytes read and written together, beside its waits for what it loads.
        reduce_cta_gbs,
        /// Wait of a sum's threads for what they load from the own memory, once per `in_flight_bytes` that they read.
        reduce_latency_ns,
        /// Merge of partial attention results of one CTA, bytes read and written together.
        merge_cta_gbs,
        /// Row gather of one CTA with loads and stores overlapped.
        gather_cta_gbs,
        /// One instruction of a gather by boxes, a load or a store, at full clock: the copy engine takes one after the other.
        box_ns,
        /// FLOP of matrix work that draw as much power as such an instruction and what it moves.
        box_power_flop,
        /// Latency of an in-switch reduction (NVLS).
        nvls_load_latency_ns,
        /// In-switch reduction of one CTA, result bytes.
        nvls_load_cta_gbs,
        /// Multicast store of one CTA, bytes before fan-out.
        nvls_store_cta_gbs,
        /// Zero fill of one CTA.
        fill_cta_gbs,
    }
}

section! {
    /// NVLink of one GPU through the switch, per direction.
    Nvlink {
        /// Egress.
        egress_gbs,
        /// Ingress.
        ingress_gbs,
        /// Share of them that is reached when a GPU exchanges with more than one other by reads, writes and adds of
        /// its own. Multicast and a ring keep all of it.
        many_peers_share,
        /// Link bytes that one byte of a remote atomic add occupies.
        add_link_bytes_per_byte,
        /// Link bytes that one byte of an in-switch load (NVLS) occupies: four bytes a lane, as mKernel loads.
        nvls_load_link_bytes_per_byte,
        /// What `drain = visible` waits beyond the write itself when the output leaves over NVLink, beside the writes of
        /// the other SMs.
        fence_ns,
        /// What a CTA then waits in addition to tell another GPU itself: a fence for the whole system and an atomic that
        /// returns, beside those of the other SMs.
        notice_ns,
        /// GPUs that one NVLink domain can hold.
        domain_gpus,
    }
}

section! {
    /// One-way times from a release store to the waiter's next instruction.
    Flags {
        /// Inside a GPU.
        local_ns,
        /// Over NVLink.
        nvlink_ns,
        /// A host thread's store to pinned memory, polled by one warp of the GPU.
        host_ns,
        /// The republisher's store in device memory until the waiter sees it.
        republish_ns,
        /// A flag that the NIC writes into device memory, after the data of its put.
        nic_ns,
    }
}

section! {
    /// The proxy: host threads behind a device-to-host FIFO.
    Proxy {
        /// Time that a CTA spends to push one command.
        push_ns,
        /// From the push until the proxy can read the command.
        fifo_latency_ns,
        /// Commands that the FIFO holds.
        fifo_depth,
        /// Threads of one rank.
        threads,
        /// Time of a thread to take and post one command.
        post_ns,
        /// Time of a thread to handle one completion or one arrived immediate.
        completion_ns,
        /// Writes in flight per queue.
        in_flight,
    }
}

section! {
    /// The NICs of one rank.
    Nic {
        /// NICs (rails) of one GPU.
        rails,
        /// Payload bandwidth of a rail, each way.
        rail_gbs,
        /// Time of a rail per message, on top of its bytes.
        message_ns,
        /// PCIe bandwidth between one GPU and its NICs, each way.
        pcie_gbs,
    }
}

section! {
    /// The network between the nodes.
    Network {
        /// One way, from the post of a small write until its data is in remote memory.
        latency_us,
        /// From the data being in remote memory until the sender polls its completion.
        ack_us,
        /// Nodes under one leaf switch.
        nodes_per_leaf,
        /// Downlink over uplink bandwidth of a leaf.
        oversubscription,
    }
}

section! {
    /// Fixed costs.
    Launch {
        /// From the launch command until the first CTA of a kernel runs.
        command_us,
        /// From the end of a kernel until a dependent kernel's first CTA runs.
        dependent_us,
        /// Start of one block of a grid with more blocks than SMs.
        block_ns,
        /// Where launches are timed one by one, after a pause: what the host takes between its start event and the launch.
        isolated_us,
        /// What one iteration of a published loop costs beside its kernels.
        iteration_us,
    }
}

section! {
    /// Seeded noise, used only when asked for.
    Noise {
        /// Standard deviation of the logarithm of every network latency.
        network_sigma,
        /// Standard deviation of the logarithm of every flag latency.
        flag_sigma,
        /// Standard deviation of the relative speed of ranks.
        clock_sigma,
        /// Delay of one late rank.
        late_rank_us,
    }
}

section! {
    /// A library collective: `latency + fill * min(1, wire / fill_wire) + wire / bus`, wire bytes as in the usual bus
    /// bandwidth.
    ///
    /// A collective is a pipeline over its steps. Its pieces grow with the message until they are as large as the
    /// library's buffers; the time to fill the pipeline grows with the pieces, then stays.
    Collective {
        /// Time of the smallest message.
        latency_us,
        /// Time to fill the pipeline with the largest pieces.
        fill_us,
        /// Wire bytes of a rank from which on pieces are as large as they get.
        fill_wire_mib,
        /// Bandwidth of the slowest link on the path, per rank.
        bus_gbs,
        /// GPUs of a node whose NICs carry `bus_gbs` between nodes together: with fewer it shrinks in proportion. 1 where
        /// every rank sends through its own NIC only.
        bus_gpus,
        /// SMs that the library takes while it runs.
        sms,
    }
}

/// Costs of the unfused baselines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Library {
    /// All-gather.
    pub all_gather: Collective,
    /// Reduce-scatter.
    pub reduce_scatter: Collective,
    /// All-reduce.
    pub all_reduce: Collective,
    /// All-to-all.
    pub all_to_all: Collective,
}

impl Library {
    fn collectives(&self) -> [(&'static str, &Collective); 4] {
        [
            ("all_gather", &self.all_gather),
            ("reduce_scatter", &self.reduce_scatter),
            ("all_reduce", &self.all_reduce),
            ("all_to_all", &self.all_to_all),
        ]
    }

    fn collective_mut(&mut self, name: &str) -> Option<&mut dyn Section> {
        Some(match name {
            "all_gather" => &mut self.all_gather,
            "reduce_scatter" => &mut self.reduce_scatter,
            "all_reduce" => &mut self.all_reduce,
            "all_to_all" => &mut self.all_to_all,
            _ => return None,
        })
    }
}

/// A machine: GPUs, their node, and the network between nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name, equal to the file's stem.
    pub name: String,
    /// One sentence.
    pub about: String,
    /// What carries puts.
    pub fabric: Fabric,
    /// `nvlink`, or `hbm` when peers are emulated in the own memory.
    pub peer_path: PeerPath,
    /// Whether its nodes are GPUs of one host and its network is a pace that the sender keeps. Such machines are named for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub emulated: bool,
    /// How the power limit slows the chip.
    #[serde(default)]
    pub power_limit: PowerLimit,
    /// The chip.
    pub gpu: Gpu,
    /// GEMM tiles by main loop: `wait_each_step`, `pipelined`, `library`.
    pub gemm: BTreeMap<String, Gemm>,
    /// Attention tiles by main loop, as `gemm`.
    pub attention: BTreeMap<String, Attention>,
    /// The device interpreter, where schedules run through it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interpreter: Option<Interpreter>,
    /// Data movement by SMs.
    pub sm: Sm,
    /// NVLink.
    pub nvlink: Nvlink,
    /// Flag latencies.
    pub flags: Flags,
    /// Proxy.
    pub proxy: Proxy,
    /// NICs.
    pub nic: Nic,
    /// How ranks use their NICs.
    #[serde(default)]
    pub transport: Transport,
    /// Network.
    pub network: Network,
    /// Fixed costs.
    pub launch: Launch,
    /// Noise.
    pub noise: Noise,
    /// Baselines.
    pub library: Library,
    /// Collectives between the two GPUs of a node that has no more, where they are another matter: the library gives
    /// them fewer channels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library_pair: Option<Library>,
}

/// Where the bytes between GPUs of a node go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerPath {
    /// NVLink.
    Nvlink,
    /// The own HBM (one GPU stands for its peers).
    Hbm,
}

/// How the power limit slows the chip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PowerLimit {
    /// At every moment by the matrix work of that moment.
    #[default]
    Moment,
    /// Evenly, by the average of a run: its window is longer than runs that follow each other without a pause.
    Average,
}

/// Why a machine file was refused. Every message begins with file, line and column.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MachineError {
    /// Not TOML, an unknown key, a missing key, a wrong type.
    #[error("{place}: {message}")]
    Parse {
        /// File, line, column.
        place: String,
        /// Key, and the parser's words.
        message: String,
    },
    /// A value out of range.
    #[error("{place}: {name} = {value:?}, allowed: {allowed}")]
    Range {
        /// File, line, column.
        place: String,
        /// Parameter, with its sections.
        name: String,
        /// Value.
        value: f64,
        /// Legal values.
        allowed: String,
    },
    /// A choice of the transport that cannot be meant.
    #[error("{place}: {name}: {problem}")]
    Transport {
        /// File, line, column.
        place: String,
        /// Choice, with its section.
        name: String,
        /// What is wrong, and what is allowed.
        problem: String,
    },
    /// A value without a source.
    #[error("{place}: {name} has no source; every value needs one")]
    Provenance {
        /// File, line, column.
        place: String,
        /// Parameter.
        name: String,
    },
    /// A date that is none.
    #[error("{place}: {name}.date = \"{date}\", allowed: a day, YYYY-MM-DD")]
    Date {
        /// File, line, column.
        place: String,
        /// Parameter.
        name: String,
        /// What stands there.
        date: String,
    },
}

impl MachineError {
    /// File, line and column of a byte of a text.
    fn place(file: &str, text: &str, at: usize) -> String {
        let before = text.get(..at).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("{file}:{line}:{column}")
    }
}

impl Machine {
    /// Reads and validates a machine file.
    ///
    /// # Errors
    /// [`MachineError`] for anything that is not a complete, sourced, sensible machine.
    pub fn parse(file: &str, text: &str) -> Result<Self, MachineError> {
        legal::parse(file, text)
    }

    /// Every parameter as `section.name`, in a fixed order.
    pub fn params(&self) -> Vec<(String, &Param)> {
        self.sections()
            .into_iter()
            .flat_map(|(prefix, section)| {
                section.params().into_iter().map(move |(name, param)| (format!("{prefix}.{name}"), param))
            })
            .collect()
    }

    fn sections(&self) -> Vec<(String, &dyn Section)> {
        let mut sections: Vec<(String, &dyn Section)> = vec![("gpu".into(), &self.gpu)];
        for (name, gemm) in &self.gemm {
            sections.push((format!("gemm.{name}"), gemm));
        }
        for (name, attention) in &self.attention {
            sections.push((format!("attention.{name}"), attention));
        }
        if let Some(interpreter) = &self.interpreter {
            sections.push(("interpreter".into(), interpreter));
        }
        sections.extend([
            ("sm".into(), &self.sm as &dyn Section),
            ("nvlink".into(), &self.nvlink),
            ("flags".into(), &self.flags),
            ("proxy".into(), &self.proxy),
            ("nic".into(), &self.nic),
            ("network".into(), &self.network),
            ("launch".into(), &self.launch),
            ("noise".into(), &self.noise),
        ]);
        for (prefix, library) in [("library", Some(&self.library)), ("library_pair", self.library_pair.as_ref())] {
            let named = |(name, collective)| (format!("{prefix}.{name}"), collective as &dyn Section);
            sections.extend(library.into_iter().flat_map(Library::collectives).map(named));
        }
        sections
    }

    /// Changes one parameter, named as in [`Machine::params`]; for fits and what-if questions.
    ///
    /// Returns whether the parameter exists.
    pub fn set(&mut self, name: &str, value: f64) -> bool {
        let Some((prefix, field)) = name.rsplit_once('.') else { return false };
        let section: &mut dyn Section = match prefix {
            "gpu" => &mut self.gpu,
            "sm" => &mut self.sm,
            "nvlink" => &mut self.nvlink,
            "flags" => &mut self.flags,
            "proxy" => &mut self.proxy,
            "nic" => &mut self.nic,
            "network" => &mut self.network,
            "launch" => &mut self.launch,
            "noise" => &mut self.noise,
            _ => {
                let (kind, name) = prefix.split_once('.').unwrap_or((prefix, ""));
                let section = match kind {
                    "interpreter" => self.interpreter.as_mut().map(|s| s as &mut dyn Section),
                    "gemm" => self.gemm.get_mut(name).map(|s| s as &mut dyn Section),
                    "attention" => self.attention.get_mut(name).map(|s| s as &mut dyn Section),
                    "library" => self.library.collective_mut(name),
                    "library_pair" => self.library_pair.as_mut().and_then(|library| library.collective_mut(name)),
                    _ => None,
                };
                match section {
                    Some(section) => section,
                    None => return false,
                }
            }
        };
        for (name, param) in section.params_mut() {
            if name == field {
                param.value = value;
                return true;
            }
        }
        false
    }
}

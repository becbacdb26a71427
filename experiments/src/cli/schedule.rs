//! Flags of `schedule` and `check`: a schedule, printed or proved.

use super::parse::whole;
use super::{CaseArgs, OptionsArg};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use tilewire_hw::values::Scheduler;
use tilewire_kernels::check::{Limits, WireFormat};

/// `schedule`.
#[derive(Args, Debug)]
pub struct ScheduleArgs {
    /// What to print.
    #[command(subcommand)]
    pub action: ScheduleAction,
}

/// What `schedule` prints.
#[derive(Debug, Subcommand)]
pub enum ScheduleAction {
    /// JSON of a schedule, its tasks included.
    Dump(DumpArgs),
    /// Buffers, flags, roles and the first tasks of each role.
    Show(ShowArgs),
    /// What differs between two schedules of a case.
    Diff(DiffArgs),
}

/// `schedule dump`.
#[derive(Args, Debug)]
pub struct DumpArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// Split, which is part of the hash.
    #[arg(long, conflicts_with = "baseline")]
    pub split: Option<String>,
    /// Ranks whose tasks are written, `all` or numbers: 0,3. Default: one of each class.
    #[arg(long)]
    pub ranks: Option<String>,
    /// File instead of standard output.
    #[arg(short, long, value_name = "FILE.json")]
    pub output: Option<PathBuf>,
}

/// `schedule show`.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// Rank whose tasks are shown.
    #[arg(long, default_value = "0", value_parser = whole(0, 65_535))]
    pub rank: u64,
    /// Tasks of each role.
    #[arg(long, default_value = "4", value_parser = whole(0, 1_000_000))]
    pub limit: u64,
}

/// `schedule diff`.
#[derive(Args, Debug)]
pub struct DiffArgs {
    /// First schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// Option set of the second schedule [default: as the first].
    #[arg(long, value_enum)]
    pub with_options: Option<OptionsArg>,
    /// An option of the second schedule; may be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pub with_set: Vec<String>,
    /// Cluster of the second schedule [default: as the first].
    #[arg(long, value_name = "NxG-MACHINE")]
    pub with_cluster: Option<String>,
    /// Tasks of each role that are printed at most.
    #[arg(long, default_value = "4", value_parser = whole(0, 1_000_000))]
    pub limit: u64,
}

/// Seeds of a check at most.
const MAX_SEEDS: u64 = 1_000_000;

/// `check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Schedule.
    #[command(flatten)]
    pub case: CaseArgs,
    /// CTAs per role, to be counted against the SMs: compute=112,send=8,... or published. Without, every role counts as
    /// having CTAs, and --values gives each role two.
    #[arg(long, help_heading = "Schedule", conflicts_with = "baseline")]
    pub split: Option<String>,
    /// Room.
    #[command(flatten)]
    pub limits: LimitsArgs,
    /// Also run the schedule with real values on the CPU and compare them with the reference. For small shapes: see
    /// --set tile_m and its like.
    #[arg(long, help_heading = "Values")]
    pub values: bool,
    /// First seed of inputs and interleaving.
    #[arg(long, default_value = "0", value_parser = whole(0, u64::MAX - MAX_SEEDS), requires = "values", help_heading = "Values")]
    pub seed: u64,
    /// Seeds for each scheduler.
    #[arg(long, default_value = "2", value_parser = whole(1, MAX_SEEDS), requires = "values", help_heading = "Values")]
    pub seeds: u64,
    /// Who moves next; may be repeated [default: all].
    #[arg(long, value_parser = scheduler(), requires = "values", help_heading = "Values")]
    pub scheduler: Vec<Scheduler>,
    /// Runs in a row in the same memory, with fresh inputs and the flags of the other bank.
    #[arg(long, default_value = "2", value_parser = whole(1, 1000), requires = "values", help_heading = "Values")]
    pub runs: u64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Room that a schedule must fit into, where it is not the machine's.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Limits")]
pub struct LimitsArgs {
    /// SMs of a GPU [default: the machine's].
    #[arg(long, value_parser = whole(1, 1024))]
    pub sms: Option<u64>,
    /// Bytes of shared memory of a CTA [default: the machine's].
    #[arg(long, value_parser = whole(0, u64::from(u32::MAX)))]
    pub shared_bytes: Option<u64>,
    /// NIC queues of a rank [default: 64].
    #[arg(long, value_parser = whole(0, 65_536))]
    pub queues: Option<u64>,
    /// Commands that the device-to-host ring holds [default: the machine's].
    #[arg(long, value_parser = whole(0, u64::from(u32::MAX)))]
    pub fifo_depth: Option<u64>,
    /// Writes in flight per queue [default: the machine's].
    #[arg(long, value_parser = whole(0, u64::from(u32::MAX)))]
    pub in_flight: Option<u64>,
    /// Bits of a byte offset in the transport's command [default: 64].
    #[arg(long, value_parser = whole(1, 64))]
    pub offset_bits: Option<u64>,
    /// Bits of the bytes of a put [default: 32].
    #[arg(long, value_parser = whole(1, 64))]
    pub length_bits: Option<u64>,
    /// Bits of the slot of an arrival word [default: 30].
    #[arg(long, value_parser = whole(1, 64))]
    pub slot_bits: Option<u64>,
    /// Bits of the number of a queue [default: 16].
    #[arg(long, value_parser = whole(1, 64))]
    pub queue_bits: Option<u64>,
}

impl LimitsArgs {
    /// These limits where they are given, else those.
    pub fn over(self, limits: Limits) -> Limits {
        let or = |given: Option<u64>, known: u32| given.map_or(known, |given| given as u32);
        let wire = limits.wire;
        Limits {
            sms: or(self.sms, limits.sms),
            shared_bytes: self.shared_bytes.unwrap_or(limits.shared_bytes),
            queues: or(self.queues, limits.queues),
            fifo_depth: or(self.fifo_depth, limits.fifo_depth),
            in_flight: or(self.in_flight, limits.in_flight),
            wire: WireFormat {
                offset_bits: or(self.offset_bits, wire.offset_bits),
                length_bits: or(self.length_bits, wire.length_bits),
                slot_bits: or(self.slot_bits, wire.slot_bits),
                queue_bits: or(self.queue_bits, wire.queue_bits),
            },
        }
    }
}

fn scheduler() -> impl TypedValueParser<Value = Scheduler> {
    let named = |name: String| Scheduler::ALL.into_iter().find(|scheduler| scheduler.name() == name);
    PossibleValuesParser::new(Scheduler::ALL.map(Scheduler::name))
        .map(move |name| named(name).expect("the parser takes these names only"))
}

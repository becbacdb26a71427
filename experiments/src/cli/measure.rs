//! Flags of `measure` and `calibrate`: what runs on this machine, and the ranks that are processes.

use super::DataArgs;
use super::parse::{seconds, whole};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use tilewire_hw::transport::registration::Path as Registration;
use tilewire_sim::machine::Carrier;

/// `measure`.
#[derive(Args, Debug)]
pub struct MeasureArgs {
    /// Experiment, as for sweep.
    #[arg(value_name = "FILE.toml")]
    pub file: PathBuf,
    /// Output directory; a run that was stopped goes on from its rows [default: out/NAME-measured].
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Start no point that could end later than this after the start.
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub budget_s: Option<f64>,
    /// Also record the tasks of a run of each point, to timelines/ beside the rows; `trace --measured` shows them.
    #[arg(long)]
    pub timelines: bool,
    /// Measure schedules with hazards too, and do not look for them.
    #[arg(long)]
    pub unchecked: bool,
    /// Where compiled device code is kept [default: tilewire in the user's cache directory].
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// What executes: the GPUs here, one per rank, or CPU threads, one process per rank.
    #[arg(long, value_enum, default_value_t = DeviceArg::Gpu)]
    pub device: DeviceArg,
    /// Ranks that are processes.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Data.
    #[command(flatten)]
    pub data: DataArgs,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// `calibrate`.
#[derive(Args, Debug)]
pub struct CalibrateArgs {
    /// Rows that were measured before, which need no GPU; may be repeated.
    #[arg(long, value_name = "MEASURED.csv")]
    pub rows: Vec<PathBuf>,
    /// Calibrate the wire between two ranks that are processes, and the host device on both, instead of a GPU.
    #[arg(long, conflicts_with_all = ["rows", "readings", "fills", "cite", "cache"])]
    pub fabric: bool,
    /// Ranks that are processes.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Readings of flags, FIFO, launches and fills that `calibrate` wrote; without it they are read when rows are measured.
    /// May be repeated.
    #[arg(long, value_name = "READINGS.csv")]
    pub readings: Vec<PathBuf>,
    /// What `measure --timelines` wrote for experiments/measured/fit/gemm_fills.toml or attention_fills.toml; may be
    /// repeated.
    #[arg(long, value_name = "DIR")]
    pub fills: Vec<PathBuf>,
    /// What the machine file cites as the place of the rows.
    #[arg(long, value_name = "TEXT")]
    pub cite: Option<String>,
    /// Output directory; measuring that was stopped goes on from its rows.
    #[arg(short, long, value_name = "DIR", default_value = "out/calibrate")]
    pub output: PathBuf,
    /// Where compiled device code is kept [default: tilewire in the user's cache directory].
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Data; the machine is what is not fitted [default: h200-1gpu].
    #[command(flatten)]
    pub data: DataArgs,
}

/// What executes a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// The GPUs of this machine.
    Gpu,
    /// CPU threads: proves values and the wire, not speed.
    Host,
}

fn carrier(text: &str) -> Result<Carrier, String> {
    let named = Carrier::ALL.into_iter().find(|carrier| carrier.name() == text);
    named.ok_or_else(|| "allowed: loopback; verbs-rc and verbs-srd in builds with --features rdma".to_owned())
}

fn registration(text: &str) -> Result<Registration, String> {
    let named = Registration::ALL.into_iter().find(|way| way.name() == text);
    named.ok_or_else(|| "allowed: host, dmabuf, peermem, bounce".to_owned())
}

fn address(text: &str) -> Result<String, String> {
    let port =
        text.rsplit_once(':').filter(|(host, _)| !host.is_empty()).and_then(|(_, port)| port.parse::<u16>().ok());
    let allowed = || "allowed: HOST:PORT, a port from 1 to 65535".to_owned();
    port.filter(|&port| port > 0).map(|_| text.to_owned()).ok_or_else(allowed)
}

/// Ranks that are processes: who starts them, how they find each other, and what connects them.
#[derive(Args, Debug)]
#[command(next_help_heading = "Ranks as processes")]
pub struct RankArgs {
    /// Start every rank as a process of its own here, without mpirun or srun. On GPUs, ranks are threads of one process
    /// without it.
    #[arg(long)]
    pub spawn: bool,
    /// What carries puts: loopback; verbs-rc or verbs-srd in builds with the feature rdma [default: the machine's, else
    /// loopback].
    #[arg(long, value_name = "NAME", value_parser = carrier)]
    pub transport: Option<Carrier>,
    /// How NICs come to a rank's memory: host (CPU threads), dmabuf or peermem (GPUs), bounce (by copies through host
    /// memory) [default: the first that works].
    #[arg(long, value_name = "NAME", value_parser = registration)]
    pub registration: Option<Registration>,
    /// Where rank 0 listens [default: 127.0.0.1:7311, with --spawn a free port].
    #[arg(long, value_name = "HOST:PORT", value_parser = address)]
    pub address: Option<String>,
    /// RDMA devices of each node, or of one for all; a+b for two rails [default: the nearest active ones].
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub nics: Vec<String>,
    /// Proxy threads of a rank [default: the machine's].
    #[arg(long, value_name = "N", value_parser = whole(1, 64))]
    pub proxies: Option<u64>,
}

impl RankArgs {
    /// The first of these arguments that was given.
    pub fn given(&self) -> Option<&'static str> {
        let given = [("--spawn", self.spawn), ("--address", self.address.is_some())];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name).or_else(|| self.given_of_wire())
    }

    /// The first argument about NICs that was given.
    pub fn given_of_wire(&self) -> Option<&'static str> {
        let given = [
            ("--transport", self.transport.is_some()),
            ("--registration", self.registration.is_some()),
            ("--nics", !self.nics.is_empty()),
            ("--proxies", self.proxies.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

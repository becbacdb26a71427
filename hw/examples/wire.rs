//! Ranks as processes: the host device and exercises of the wire, over loopback or RDMA.
//!
//! `wire spawn WHAT key=value ...` starts the ranks of a node as processes and waits for them; `wire WHAT key=value ...`
//! is one rank, whose number comes from its launcher (mpirun, srun, or `spawn`). Keys, with what they are by default:
//! `cluster=2x2`, `node=all` (or a number: only that node's ranks are started here), `address=127.0.0.1:7311`,
//! `transport=loopback` (or `verbs-rc`), `proxies=1`, `dir=/dev/shm`, `patience_s=20`, `silence_s=10`, `runs=2`,
//! `other_build=` (the version that the last node claims), `spoil=0`, `rounds=10000`, `bytes=256`, `writes=200`, `fifo=64`, `devices=` (one for each node, `a+b` for two rails), `gid_index=`,
//! `queue_pairs=4`, `in_flight=64`, `signal_every=8`, `inline=1`, `immediates=0`, `timeout=`, `retries=7`, `answer_s=30`, `registration=host`, `kernel=all`, `delay_ms=0`.
//! The secret is `TILEWIRE_SECRET`. WHAT is `values`, `rounds`, `speed`, `listen` or `hold`.

#[path = "../../kernels/tests/small/mod.rs"]
#[allow(dead_code, reason = "an example uses a part of it")]
mod small;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;
use tilewire_hw::bootstrap::{Join, Session, VERSION, fresh_secret, place};
use tilewire_hw::host::{HostConfig, HostError, Memory, Setup, Wire, run_rank, share};
use tilewire_hw::probe::rdma::Seat;
use tilewire_hw::transport::Notice;
use tilewire_hw::transport::exercise::Pair;
use tilewire_hw::transport::registration::Path as Registration;
use tilewire_hw::transport::segment::Layout;
use tilewire_kernels::{Cluster, Fabric, KERNELS, OptionSet};

type Failure = Box<dyn Error>;

/// `key=value` arguments.
struct Keys(BTreeMap<String, String>);

impl Keys {
    fn text(&self, key: &str, default: &str) -> String {
        self.0.get(key).cloned().unwrap_or_else(|| default.to_owned())
    }

    fn number<T: std::str::FromStr>(&self, key: &str, default: T) -> Result<T, Failure> {
        match self.0.get(key) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| format!("{key}={text} is no number").into()),
        }
    }

    fn cluster(&self) -> Result<Cluster, Failure> {
        let text = self.text("cluster", "2x2");
        let parts = text.split_once('x').and_then(|(nodes, gpus)| Some((nodes.parse().ok()?, gpus.parse().ok()?)));
        let (nodes, gpus_per_node) = parts.ok_or_else(|| format!("cluster={text}: NODESxRANKS, as in 2x2"))?;
        Ok(Cluster { nodes, gpus_per_node })
    }
}

fn main() -> ExitCode {
    match begin() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn begin() -> Result<ExitCode, Failure> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let spawn = words.first().is_some_and(|word| word == "spawn");
    if spawn {
        words.remove(0);
    }
    let what = if words.is_empty() { String::new() } else { words.remove(0) };
    let pair = |word: &String| {
        word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).ok_or(format!("{word}: key=value"))
    };
    let keys = Keys(words.iter().map(pair).collect::<Result<_, _>>()?);
    if spawn { start(&what, &words, &keys) } else { rank(&what, &keys) }
}

/// Starts the ranks of a node, or of all, and waits for them.
fn start(what: &str, words: &[String], keys: &Keys) -> Result<ExitCode, Failure> {
    let cluster = keys.cluster()?;
    let secret = std::env::var("TILEWIRE_SECRET").unwrap_or_else(|_| fresh_secret());
    let node = keys.text("node", "all");
    let mut ranks = Vec::new();
    for rank in cluster.iter().filter(|rank| node == "all" || node == rank.node.to_string()) {
        let number = cluster.number(rank);
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(what).args(words).env("TILEWIRE_SECRET", &secret);
        command.env("RANK", number.to_string()).env("WORLD_SIZE", cluster.ranks().to_string());
        ranks.push((number, command.spawn()?));
    }
    let mut worst = 0;
    for (number, mut child) in ranks {
        let status = child.wait()?;
        if !status.success() {
            eprintln!("rank {number}: {status}");
        }
        // Killed by a signal: 9.
        worst = worst.max(status.code().unwrap_or(9));
    }
    Ok(ExitCode::from(worst as u8))
}

/// One rank.
fn rank(what: &str, keys: &Keys) -> Result<ExitCode, Failure> {
    let place = place(|name| std::env::var(name).ok())?.ok_or("no rank: start this by `wire spawn`, mpirun or srun")?;
    let cluster = keys.cluster()?;
    let last_node = cluster.rank(place.rank as usize).node + 1 == cluster.nodes;
    let join = Join {
        place,
        address: keys.text("address", "127.0.0.1:7311"),
        secret: std::env::var("TILEWIRE_SECRET").map_err(|_| "TILEWIRE_SECRET is not set")?,
        patience: Duration::from_secs(keys.number("patience_s", 20)?),
        silence: Duration::from_secs(keys.number("silence_s", 10)?),
        version: if last_node { keys.number("other_build", VERSION)? } else { VERSION },
    };
    // So that whatever else is to come to the port comes first.
    std::thread::sleep(Duration::from_millis(if place.rank == 0 { 0 } else { keys.number("delay_ms", 0)? }));
    let result = Session::join(&join).map_err(HostError::from).and_then(|session| {
        session.refused.iter().for_each(|text| println!("refused {text}"));
        match what {
            "values" => values(&session, keys),
            "rounds" | "speed" | "listen" => exercise(what, &session, keys),
            "hold" => hold(&session),
            _ => Err(HostError::Unsupported { what: format!("{what:?}; values, rounds, speed, listen or hold") }),
        }
    });
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("rank {} of {}: {error}", place.rank, place.ranks);
            Ok(ExitCode::from(3))
        }
    }
}

#[allow(clippy::needless_pass_by_value, reason = "it is a conversion")]
fn failed(error: impl ToString) -> HostError {
    HostError::Unsupported { what: error.to_string() }
}

/// What connects this rank to those of other nodes, and its proxies.
fn wire(session: &Session, keys: &Keys) -> Result<(Wire, u16), HostError> {
    let cluster = keys.cluster().map_err(failed)?;
    let wire = match keys.text("transport", "loopback").as_str() {
        "loopback" => Wire::Loopback(None),
        "verbs-rc" => verbs(cluster.rank(session.place().rank as usize).node, keys)?,
        other => return Err(failed(format!("transport={other}; loopback or verbs-rc"))),
    };
    Ok((wire, keys.number("proxies", 1).map_err(failed)?))
}

#[cfg(feature = "rdma")]
fn verbs(node: u16, keys: &Keys) -> Result<Wire, HostError> {
    use tilewire_hw::transport::verbs::VerbsConfig;
    let default = VerbsConfig::default();
    let names = |list: &str| list.split('+').filter(|name| !name.is_empty()).map(str::to_owned).collect::<Vec<_>>();
    let devices = keys.text("devices", "");
    let config = VerbsConfig {
        nics: devices.split(',').nth(usize::from(node)).map_or_else(Vec::new, names),
        gid_index: keys.0.get("gid_index").map(|text| text.parse()).transpose().map_err(failed)?,
        queue_pairs: keys.number("queue_pairs", default.queue_pairs).map_err(failed)?,
        in_flight_max: keys.number("in_flight", default.in_flight_max).map_err(failed)?,
        signal_every: keys.number("signal_every", default.signal_every).map_err(failed)?,
        inline_flags: keys.number("inline", 1u8).map_err(failed)? != 0,
        timeout: keys.0.get("timeout").map(|text| text.parse()).transpose().map_err(failed)?,
        retries: keys.number("retries", default.retries).map_err(failed)?,
        answer: Duration::from_secs(keys.number("answer_s", default.answer.as_secs()).map_err(failed)?),
        ..default
    };
    Ok(Wire::VerbsRc { config, spoil: keys.number("spoil", 0).map_err(failed)? })
}

#[cfg(not(feature = "rdma"))]
fn verbs(_: u16, _: &Keys) -> Result<Wire, HostError> {
    Err(failed("RDMA in this build; build with --features rdma"))
}

/// Runs kernels with values checked.
fn values(session: &Session, keys: &Keys) -> Result<(), HostError> {
    let cluster = keys.cluster().map_err(failed)?;
    let me = session.place().rank as usize;
    let transport = keys.text("transport", "loopback");
    let fabric = if transport == "loopback" { Fabric::Loopback } else { Fabric::IbRc };
    let wanted = keys.text("kernel", "all");
    let spoilt = |error: HostError| {
        session.abort(&error.to_string());
        error
    };
    for &kernel in KERNELS.iter().filter(|kernel| wanted == "all" || wanted == kernel.name()) {
        let case = small::case(kernel, OptionSet::Tilewire, cluster, fabric).map_err(|error| spoilt(failed(error)))?;
        let schedule = kernel.build(&case.spec).map_err(|error| spoilt(failed(error)))?;
        let patience = Duration::from_secs(keys.number("patience_s", 20).map_err(failed)?);
        let runs = keys.number("runs", 2).map_err(failed)?;
        let config = HostConfig {
            runs,
            patience,
            fifo_depth: keys.number("fifo", 64).map_err(failed)?,
            ..HostConfig::default()
        };
        let layout = Layout::new(&schedule).ok_or_else(|| failed("too many flags"))?;
        let node = cluster.rank(me).node;
        let near = |rank: usize| transport == "loopback" || cluster.rank(rank).node == node;
        let segments = share(session, &layout, &PathBuf::from(keys.text("dir", "/dev/shm")), near)?;
        let (wire, proxies) = wire(session, keys).map_err(spoilt)?;
        let way = match keys.text("registration", "host").as_str() {
            "host" => Registration::Host,
            "bounce" => Registration::Bounce,
            other => return Err(spoilt(failed(format!("registration={other}; host or bounce")))),
        };
        let directory = PathBuf::from(keys.text("dir", "/dev/shm"));
        let mut wires = wire.attach(session, &schedule, &segments, (way, &directory), proxies)?;
        wires.told.by_immediates |= keys.number("immediates", 0u8).map_err(failed)? != 0;
        let setup = Setup { schedule: &schedule, kernel, spec: &case.spec, config };
        let report = run_rank(&setup, session, segments, wires)?;
        let (done, served) = (&report.values, &report.served);
        let max_us = report.times_us.iter().copied().fold(0.0, f64::max);
        let line = format!(
            "{} tasks {} writes {} bytes {} elements {} worst {:.3} max_us {max_us:.0} over {}",
            done.runs, done.tasks, served.commands, served.bytes, done.elements, done.worst, report.transport
        );
        let lines = session.exchange(line.as_bytes())?;
        if me == 0 {
            for (rank, line) in lines.iter().enumerate() {
                println!("values {} {cluster} rank {rank} runs {}", kernel.name(), String::from_utf8_lossy(line));
            }
        }
    }
    Ok(())
}

/// Rounds with values checked, or latency and bandwidth, between rank r and its counterpart on the other node.
fn exercise(what: &str, session: &Session, keys: &Keys) -> Result<(), HostError> {
    const SLOTS: u32 = 64;
    const PAYLOAD: u64 = 4 << 20;
    let cluster = keys.cluster().map_err(failed)?;
    if cluster.nodes != 2 {
        return Err(failed(format!("cluster={cluster}: exercises take two nodes")));
    }
    let me = session.place().rank;
    let gpus = u32::from(cluster.gpus_per_node);
    let peer = if me < gpus { me + gpus } else { me - gpus };
    let layout = Layout::plain(SLOTS, PAYLOAD);
    let (data, _) = layout.buffer(0);
    let transport = keys.text("transport", "loopback");
    let near = |_: usize| transport == "loopback";
    let segments = share(session, &layout, &PathBuf::from(keys.text("dir", "/dev/shm")), near)?;
    let (wire, proxies) = wire(session, keys).inspect_err(|error| session.abort(&error.to_string()))?;
    let seat = Seat::of_cpu(usize::from(cluster.rank(me as usize).gpu));
    let mut wires = wire.connect(session, cluster, &seat, Memory::Host(&segments), proxies)?;
    let segment = segments[me as usize].clone().ok_or_else(|| failed("no own segment"))?;
    let patience = Duration::from_secs(keys.number("patience_s", 20).map_err(failed)?);
    let mut pair = Pair::new(session, &segment, data, wires.transports[0].as_mut(), peer, patience);
    session.barrier()?;
    let result: Result<String, HostError> = (|| {
        if what == "rounds" {
            let (rounds, bytes) =
                (keys.number("rounds", 10_000).map_err(failed)?, keys.number("bytes", 256).map_err(failed)?);
            println!("rank {me} begins");
            let time = pair.rounds(rounds, SLOTS, bytes, Notice::Write)?;
            let write = format!("{rounds} rounds of {bytes} bytes and a flag each way in {:.1} s", time.as_secs_f64());
            session.barrier()?;
            let time = pair.rounds(rounds / 10, SLOTS, bytes, Notice::Immediate)?;
            return Ok(format!(
                "{write}, {} with immediates in {:.1} s: all values right",
                rounds / 10,
                time.as_secs_f64()
            ));
        }
        if what == "listen" {
            println!("rank {me} begins");
            // Nothing comes, and nothing is sent: patience ends it, or what the transport notices.
            let time = pair.listen()?;
            return Ok(format!("nothing came for {:.1} s", time.as_secs_f64()));
        }
        let mut times = pair.latency_us(keys.number("rounds", 1000).map_err(failed)?, 0)?;
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        session.barrier()?;
        let mut text = format!("latency_us {median:.2}");
        let writes: u64 = keys.number("writes", 200).map_err(failed)?;
        let time_s = pair.stream(1 << 20, writes, 1, u64::MAX)?;
        session.barrier()?;
        let _ = write!(text, " bandwidth_1048576_mib_s {:.2}", writes as f64 / time_s);
        Ok(text)
    })();
    match result {
        Ok(text) => {
            let lines = session.exchange(text.as_bytes())?;
            if me == 0 {
                println!("{what} over {}: {}", pair.transport(), String::from_utf8_lossy(&lines[0]));
            }
            session.barrier()?;
            Ok(())
        }
        Err(error) => {
            session.abort(&error.to_string());
            Err(error)
        }
    }
}

/// Waits at a barrier that rank 1 never reaches.
fn hold(session: &Session) -> Result<(), HostError> {
    session.barrier()?;
    println!("rank {} holds", session.place().rank);
    if session.place().rank == 1 {
        std::thread::sleep(Duration::from_secs(600));
    }
    Ok(session.barrier()?)
}

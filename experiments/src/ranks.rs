//! Ranks as processes: who starts them, how they find each other, and what connects them.

use crate::cli::RankArgs;
use crate::error::ExperimentError;
use crate::spawned;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tilewire_hw::bootstrap::{
    BootstrapError, Join, Place, Session, VERSION, fresh_secret, launched_among_others, place,
};
use tilewire_hw::host::{HostError, Wire};
use tilewire_hw::remote::Link;
use tilewire_hw::transport::registration::Path as Registration;
use tilewire_kernels::Cluster;
use tilewire_sim::Machine;
use tilewire_sim::machine::{Carrier, Publishing};

/// Secret and address of a run, for processes that one launcher starts.
const SECRET: &str = "TILEWIRE_SECRET";
const ADDRESS: &str = "TILEWIRE_ADDRESS";
/// Where rank 0 listens unless told otherwise.
const LISTEN: &str = "127.0.0.1:7311";

/// What this process is.
pub enum Part {
    /// A rank among the others.
    Rank(Session),
    /// The parent of all ranks, which are over: they did and said everything.
    Parent,
}

/// Takes this process's part: joins the ranks that a launcher started, or starts all of them and waits. `what` names the
/// option that wants ranks; `ready` checks, in the parent, what can be checked before a rank starts, and what it returns
/// is kept until all have ended.
///
/// # Errors
/// [`ExperimentError`]; bad arguments before anything is started.
pub fn take_part<Kept>(
    args: &RankArgs,
    cluster: Cluster,
    what: &str,
    ready: impl FnOnce() -> Result<Kept, ExperimentError>,
) -> Result<Part, ExperimentError> {
    let starts = starts_ranks(args)?;
    let place = if starts { None } else { launched(cluster.ranks())? };
    check_nics(args, cluster)?;
    let Some(place) = place else {
        if starts {
            let _kept = ready()?;
            return spawn(args, cluster.ranks()).map(|()| Part::Parent);
        }
        let problem = "no launcher started this process; use mpirun or srun, or add --spawn";
        return Err(ExperimentError::refused(what, problem));
    };
    join(args, place).map(Part::Rank)
}

/// Whether this process is to start the ranks, whatever a launcher has left in its environment.
///
/// # Errors
/// [`ExperimentError::Refused`] when a launcher started several of it.
pub fn starts_ranks(args: &RankArgs) -> Result<bool, ExperimentError> {
    if !args.spawn || spawned::is_rank() {
        return Ok(false);
    }
    let Some(others) = launched_among_others(|name| std::env::var(name).ok()) else { return Ok(true) };
    let problem =
        format!("a launcher started several processes ({others}), and each would start all ranks; leave one out");
    Err(ExperimentError::refused("--spawn", problem))
}

/// The rank that a launcher gave this process, of as many as asked for; none without a launcher.
///
/// # Errors
/// [`ExperimentError::Refused`] for half a place, or another number of ranks.
pub fn launched(ranks: usize) -> Result<Option<Place>, ExperimentError> {
    let at_launcher = |error: BootstrapError| ExperimentError::refused("launcher", error.to_string());
    let Some(place) = place(|name| std::env::var(name).ok()).map_err(at_launcher)? else { return Ok(None) };
    if place.ranks as usize != ranks {
        let problem = format!("{} processes, the experiment's cluster has {ranks} ranks", place.ranks);
        return Err(ExperimentError::refused("launcher", problem));
    }
    Ok(Some(place))
}

/// Refuses names of NICs that cannot be meant.
///
/// # Errors
/// [`ExperimentError::Refused`]; [`ExperimentError::Host`] without a library or a device.
pub fn check_nics(args: &RankArgs, cluster: Cluster) -> Result<(), ExperimentError> {
    let refuse = |problem: String| Err(ExperimentError::refused("--nics", problem));
    let nodes = usize::from(cluster.nodes);
    match (args.transport, args.nics.len()) {
        (_, 0) => Ok(()),
        (None | Some(Carrier::Loopback), _) => {
            refuse("--transport loopback uses no NIC; name verbs-rc or verbs-srd".to_owned())
        }
        (_, count) if count != 1 && count != nodes => {
            refuse(format!("{count} nodes are named, allowed: one for all, or one for each of {nodes} nodes"))
        }
        _ => here(args),
    }
}

/// Refuses NICs that are not on this machine, which with --spawn is every node.
#[cfg(feature = "rdma")]
fn here(args: &RankArgs) -> Result<(), ExperimentError> {
    use tilewire_hw::probe::rdma;
    use tilewire_hw::transport::TransportError;
    let missing = |error: TransportError| ExperimentError::Host { case: "--nics".to_owned(), source: error.into() };
    tilewire_hw::transport::verbs::Library::get().map_err(missing)?;
    let names: Vec<String> = rdma::devices(Path::new(rdma::SYSFS)).into_iter().map(|device| device.name).collect();
    let unknown = args.nics.iter().flat_map(|nics| rails(nics)).find(|name| !names.contains(name));
    match unknown {
        Some(name) if names.is_empty() => Err(missing(TransportError::Missing { what: rdma::no_such(&name, &names) })),
        Some(name) if args.spawn => Err(ExperimentError::refused("--nics", rdma::no_such(&name, &names))),
        _ => Ok(()),
    }
}

#[cfg(not(feature = "rdma"))]
#[expect(clippy::unnecessary_wraps, reason = "a build with RDMA refuses")]
const fn here(_: &RankArgs) -> Result<(), ExperimentError> {
    Ok(())
}

/// The NICs of a node's ranks, `a+b` for two rails.
#[cfg(feature = "rdma")]
fn rails(text: &str) -> Vec<String> {
    text.split('+').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// What is to carry puts: the argument, else the machine file's choice, else copies on one host.
pub fn carrier(args: &RankArgs, machine: &Machine) -> Carrier {
    args.transport.or(machine.transport.carrier).unwrap_or(Carrier::Loopback)
}

/// How GPUs of a node reach those of other nodes.
///
/// # Errors
/// [`ExperimentError`] for what is not in this build, or no way to the memory of a GPU.
pub fn link(args: &RankArgs, machine: &Machine, node: u16) -> Result<Link, ExperimentError> {
    if args.transport.or(machine.transport.carrier).is_none() {
        let problem = format!(
            "{} has nodes of its own, and nothing says what carries puts between them; allowed: verbs-rc, verbs-srd, or \
             loopback, which copies between processes of one host; here or as `carrier` in [transport] of a machine file",
            machine.name
        );
        return Err(ExperimentError::refused("--transport", problem));
    }
    if args.registration == Some(Registration::Host) {
        let problem = "host is for the memory of CPU threads; allowed with --device gpu: dmabuf, peermem, bounce";
        return Err(ExperimentError::refused("--registration", problem));
    }
    Ok(Link {
        wire: wire(args, machine, node)?,
        way: args.registration,
        proxies: proxies(args, machine),
        batch: machine.transport.batch.map(|batch| batch as usize),
        by_immediates: machine.transport.publish == Some(Publishing::Immediate),
    })
}

/// What carries puts of a node's ranks, as the machine file and the arguments say.
///
/// # Errors
/// [`ExperimentError`] for a transport that this build does not have.
#[cfg(feature = "rdma")]
#[expect(clippy::unnecessary_wraps, reason = "a build without RDMA refuses")]
pub fn wire(args: &RankArgs, machine: &Machine, node: u16) -> Result<Wire, ExperimentError> {
    use tilewire_hw::transport::verbs::VerbsConfig;
    let (default, choice) = (VerbsConfig::default(), &machine.transport);
    let named = args.nics.get(usize::from(node)).or(args.nics.first());
    let config = VerbsConfig {
        nics: named.map_or_else(|| choice.nics.clone(), |nics| rails(nics)),
        rails: machine.nic.rails.value as u16,
        gid_index: choice.gid_index.or(default.gid_index),
        queue_pairs: choice.queue_pairs.unwrap_or(default.queue_pairs),
        in_flight_max: machine.proxy.in_flight.value as u32,
        signal_every: choice.signal_every.unwrap_or(default.signal_every),
        inline_flags: choice.inline_flags.unwrap_or(default.inline_flags),
        ..default
    };
    Ok(match carrier(args, machine) {
        Carrier::Loopback => Wire::Loopback(None),
        Carrier::VerbsSrd => Wire::VerbsSrd(config),
        Carrier::VerbsRc => Wire::VerbsRc { config, spoil: 0 },
    })
}

/// As above, in a build without RDMA.
///
/// # Errors
/// [`ExperimentError`] for a transport that this build does not have.
#[cfg(not(feature = "rdma"))]
pub fn wire(args: &RankArgs, machine: &Machine, _: u16) -> Result<Wire, ExperimentError> {
    match carrier(args, machine) {
        Carrier::Loopback => Ok(Wire::Loopback(None)),
        other => {
            let problem = format!(
                "{} is not in this build; allowed: loopback, or a build with --features rdma, which adds verbs-rc and verbs-srd",
                other.name()
            );
            Err(ExperimentError::refused("transport", problem))
        }
    }
}

/// Proxy threads of a rank.
pub fn proxies(args: &RankArgs, machine: &Machine) -> u16 {
    args.proxies.unwrap_or(machine.proxy.threads.value as u64) as u16
}

/// Refuses a directory that could not be written to, and leaves no trace.
///
/// # Errors
/// [`ExperimentError::Write`].
pub fn writable(root: &Path) -> Result<(), ExperimentError> {
    let mut at = root;
    while !at.exists() {
        at = match at.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => break,
        };
    }
    let trial = at.join(format!(".tilewire-{}", std::process::id()));
    std::fs::create_dir(&trial)
        .and_then(|()| std::fs::remove_dir(&trial))
        .map_err(|error| ExperimentError::write(root, error))
}

/// Comes to the other ranks.
///
/// # Errors
/// [`ExperimentError::Refused`] without a secret, [`ExperimentError::Host`] when they do not come together.
pub fn join(args: &RankArgs, place: Place) -> Result<Session, ExperimentError> {
    spawned::end_with_parent()?;
    let secret = secret()?
        .ok_or_else(|| ExperimentError::refused(SECRET, "not set; give every rank the same words of your choice"))?;
    let address = std::env::var(ADDRESS).ok().or_else(|| args.address.clone());
    let join = Join {
        place,
        address: address.unwrap_or_else(|| LISTEN.to_owned()),
        secret,
        patience: Duration::from_secs(120),
        silence: Duration::from_secs(60),
        version: VERSION,
    };
    let session = Session::join(&join).map_err(|error| lost("joining", error.into()))?;
    for refused in &session.refused {
        eprintln!("refused a connection: {refused}");
    }
    Ok(session)
}

/// The words that ranks know each other by, if they are given.
///
/// # Errors
/// [`ExperimentError::Refused`] for words that everybody knows.
fn secret() -> Result<Option<String>, ExperimentError> {
    match std::env::var(SECRET) {
        Ok(secret) if secret.is_empty() => {
            Err(ExperimentError::refused(SECRET, "empty; give every rank the same words of your choice, or unset it"))
        }
        Ok(secret) => Ok(Some(secret)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(ExperimentError::refused(SECRET, error.to_string())),
    }
}

/// What the backend of ranks that are processes says.
pub fn lost(case: impl Into<String>, source: HostError) -> ExperimentError {
    ExperimentError::Host { case: case.into(), source }
}

/// Starts this command once for each rank, and waits for all.
///
/// # Errors
/// [`ExperimentError::Refused`] for an address where nobody can listen, [`ExperimentError::Ranks`] that names every rank
/// that did not end well.
pub fn spawn(args: &RankArgs, ranks: usize) -> Result<(), ExperimentError> {
    let failed = |error: std::io::Error| ExperimentError::refused("--spawn", error.to_string());
    let address = args.address.as_deref();
    // Free now; whoever takes it before rank 0 does makes the run fail, not go wrong.
    let listener = TcpListener::bind(address.unwrap_or("127.0.0.1:0")).map_err(|error| {
        let problem = format!("{}: rank 0 cannot listen there: {error}", address.unwrap_or("127.0.0.1"));
        ExperimentError::refused("--address", problem)
    })?;
    let address = listener.local_addr().map_err(failed)?;
    drop(listener);
    let secret = secret()?.unwrap_or_else(fresh_secret);
    spawned::run(ranks, || {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1));
        command.env(SECRET, &secret).env(ADDRESS, address.to_string());
        Ok(command)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_can_be_made_is_writable_and_a_file_is_not() {
        let root = tempfile::tempdir().expect("a directory");
        assert!(writable(&root.path().join("a/b/c")).is_ok());
        std::fs::write(root.path().join("file"), "").expect("a file");
        for bad in ["file", "file/below"] {
            let error = writable(&root.path().join(bad)).expect_err(bad);
            assert_eq!(error.exit_code(), 2);
        }
        assert_eq!(std::fs::read_dir(root.path()).expect("a directory").count(), 1, "no trace is left");
    }
}

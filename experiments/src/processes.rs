//! Ranks that are processes: who this one is, how it comes to the others, and how to start them all.

use crate::cli::HostArgs;
use crate::error::ExperimentError;
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;
use tilewire_hw::bootstrap::{BootstrapError, Join, Place, Session, VERSION, fresh_secret, place};
use tilewire_hw::host::HostError;

/// Secret and address of a run, for processes that one launcher starts.
const SECRET: &str = "TILEWIRE_SECRET";
const ADDRESS: &str = "TILEWIRE_ADDRESS";

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

/// Comes to the other ranks.
///
/// # Errors
/// [`ExperimentError::Refused`] without a secret, [`ExperimentError::Host`] when they do not come together.
pub fn join(args: &HostArgs, place: Place) -> Result<Session, ExperimentError> {
    let secret = std::env::var(SECRET)
        .map_err(|_| ExperimentError::refused(SECRET, "not set; give every rank the same words of your choice"))?;
    let join = Join {
        place,
        address: std::env::var(ADDRESS).unwrap_or_else(|_| args.address.clone()),
        secret,
        patience: Duration::from_secs(60),
        silence: Duration::from_secs(20),
        version: VERSION,
    };
    Session::join(&join).map_err(|error| lost("joining", error.into()))
}

/// What the backend of ranks that are processes says.
pub fn lost(case: impl Into<String>, source: HostError) -> ExperimentError {
    ExperimentError::Host { case: case.into(), source }
}

/// Starts this command once for each rank, and waits for all.
///
/// # Errors
/// [`ExperimentError::Finding`] that names every rank that did not end well.
pub fn spawn(ranks: usize) -> Result<String, ExperimentError> {
    let failed = |error: std::io::Error| ExperimentError::refused("--spawn", error.to_string());
    // Free now; whoever takes it before rank 0 does makes the run fail, not go wrong.
    let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(failed)?;
    let secret = std::env::var(SECRET).unwrap_or_else(|_| fresh_secret());
    let mut children = Vec::new();
    for rank in 0..ranks {
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(std::env::args_os().skip(1));
        command.env(SECRET, &secret).env(ADDRESS, address.to_string());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        children.push(command.spawn().map_err(failed)?);
    }
    let mut bad = Vec::new();
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = child.wait().map_err(failed)?;
        if !status.success() {
            bad.push(format!("rank {rank}: {status}"));
        }
    }
    if bad.is_empty() { Ok(String::new()) } else { Err(ExperimentError::Finding(bad.join("; "))) }
}

//! Ranks that this process starts on its host: none outlives it, none keeps the others waiting.

use crate::error::ExperimentError;
use crate::progress;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use tilewire_hw::bootstrap::{RANK, RANKS};

/// Process that started a rank; set for ranks of `--spawn` only.
const PARENT: &str = "TILEWIRE_PARENT";

/// Between two looks at the ranks.
const LOOK: Duration = Duration::from_millis(20);
/// How long ranks may go on once one has failed: they learn of it at once.
const GRACE: Duration = Duration::from_secs(10);
/// How long a rank may be stopped by a signal while this process is not.
const STOPPED_MAX: Duration = Duration::from_secs(5);

/// Whether `--spawn` of another process started this one as a rank.
pub fn is_rank() -> bool {
    std::env::var_os(PARENT).is_some()
}

/// A rank of `--spawn` ends with who started it.
///
/// # Errors
/// [`ExperimentError::Refused`] when that process is gone.
pub fn end_with_parent() -> Result<(), ExperimentError> {
    let Ok(parent) = std::env::var(PARENT) else { return Ok(()) };
    let refuse = |problem: &str| Err(ExperimentError::refused(PARENT, problem));
    match parent.parse() {
        Ok(parent) if tilewire_hw::bootstrap::end_with(parent) => Ok(()),
        Ok(_) => refuse("the process that started this rank is gone"),
        Err(_) => refuse("set by --spawn for the ranks that it starts; unset it"),
    }
}

/// Ranks that were started; what still runs is killed when they are dropped.
struct Ranks(Vec<Rank>);

struct Rank {
    child: Child,
    ended: Option<ExitStatus>,
    stopped_since: Option<Instant>,
    killed: Option<&'static str>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in self.0.iter_mut().filter(|rank| rank.ended.is_none()) {
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

/// Starts `command` once for each of `ranks` ranks, and waits for all.
///
/// # Errors
/// [`ExperimentError::Refused`] when one cannot be started, and then none runs; [`ExperimentError::Ranks`] that names
/// every rank that did not end well.
pub fn run(ranks: usize, command: impl Fn() -> std::io::Result<Command>) -> Result<(), ExperimentError> {
    let failed = |error: std::io::Error| ExperimentError::refused("--spawn", error.to_string());
    // An interrupt reaches the ranks too, and they end in their own time.
    progress::catch_interrupt(true);
    let mut all = Ranks(Vec::new());
    for number in 0..ranks {
        let mut command = command().map_err(failed)?;
        for name in tilewire_hw::bootstrap::launcher_variables() {
            command.env_remove(name);
        }
        command.env(RANK, number.to_string()).env(RANKS, ranks.to_string());
        command.env(PARENT, std::process::id().to_string());
        let child = command.spawn().map_err(failed)?;
        all.0.push(Rank { child, ended: None, stopped_since: None, killed: None });
    }
    let mut first_failure = None;
    while all.0.iter().any(|rank| rank.ended.is_none()) {
        for rank in all.0.iter_mut().filter(|rank| rank.ended.is_none()) {
            rank.ended = rank.child.try_wait().map_err(failed)?;
            if rank.ended.is_some_and(|status| !status.success()) {
                first_failure.get_or_insert_with(Instant::now);
            }
            rank.stopped_since = is_stopped(&rank.child).then(|| rank.stopped_since.unwrap_or_else(Instant::now));
            let why = match (rank.stopped_since, first_failure) {
                (Some(since), _) if since.elapsed() > STOPPED_MAX => {
                    "was stopped by a signal, and the others waited for it"
                }
                (_, Some(since)) if since.elapsed() > GRACE => "did not end although another had failed",
                _ => continue,
            };
            if rank.killed.is_none() && rank.ended.is_none() {
                rank.killed = Some(why);
                rank.child.kill().map_err(failed)?;
            }
        }
        std::thread::sleep(LOOK);
    }
    verdict(&all.0)
}

/// What became of all.
fn verdict(ranks: &[Rank]) -> Result<(), ExperimentError> {
    let mut bad = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        let Some(status) = rank.ended.filter(|status| !status.success()) else { continue };
        let text = rank.killed.map_or_else(|| status.to_string(), |why| format!("{why}: killed"));
        bad.push((rank.killed.map_or(status.code(), |_| None), format!("rank {number}: {text}")));
    }
    if bad.is_empty() {
        return Ok(());
    }
    // Ranks that only learned of the failure of another end with 3.
    let cause = bad.iter().filter_map(|(code, _)| *code).find(|&code| code != 3).unwrap_or(3);
    let text = bad.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("; ");
    Err(ExperimentError::Ranks { text, code: u8::try_from(cause).unwrap_or(3) })
}

/// Whether a signal has stopped a process, as the kernel's table says.
fn is_stopped(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // The name in parentheses may hold anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

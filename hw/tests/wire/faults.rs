//! A run that cannot end well ends with words, on every rank.

use super::small::changed;
use super::{execute, loopback, split, two_by_two};
use std::time::{Duration, Instant};
use tilewire_hw::host::{FIFO, HostConfig, HostError, Wires};
use tilewire_hw::transport::{Command, Event, Order, Transport, TransportError};
use tilewire_hw::values::ExecError;
use tilewire_kernels::schedule::Op;
use tilewire_kernels::{Blocked, Fabric, OptionSet};

fn impatient() -> HostConfig {
    HostConfig { runs: 1, patience: Duration::from_secs(2), ..HostConfig::default() }
}

/// What the ranks say that CTAs wait for.
fn blocked(error: &HostError) -> &[Blocked] {
    match error {
        HostError::Exec(ExecError::Stuck { blocked, .. }) | HostError::Peer { blocked, .. } => blocked,
        _ => &[],
    }
}

#[test]
fn a_lost_signal_ends_with_the_ctas_that_wait_on_every_rank() {
    let case = two_by_two("gemm_rs", OptionSet::Tilewire, Fabric::IbRc);
    let schedule = case.kernel.build(&case.spec).expect("builds");
    let schedule = changed(schedule, |_, _, _, tasks| {
        if let Some(task) = tasks.iter_mut().find(|task| matches!(task.op, Op::GemmTile { .. })) {
            task.signals.clear();
        }
    });
    let ranks = execute(&schedule, &case, impatient(), |rank, _, segments| Ok(loopback(rank, segments, 1, None)));
    let errors: Vec<HostError> = ranks.into_iter().map(|rank| rank.expect_err("stuck")).collect();
    assert_eq!(errors.len(), 4);
    let stuck = |error: &&HostError| matches!(error, HostError::Exec(ExecError::Stuck { .. }));
    assert!(errors.iter().any(|error| stuck(&error)), "{errors:?}");
    for (rank, error) in errors.iter().enumerate() {
        let mine = schedule.cluster.rank(rank);
        assert!(blocked(error).iter().all(|blocked| blocked.rank == mine && blocked.have < blocked.need), "{error}");
        assert!(!blocked(error).is_empty(), "rank {mine}: {error}");
    }
}

/// Takes nothing, or loses everything that it takes.
struct Broken {
    takes: bool,
}

impl Transport for Broken {
    fn name(&self) -> String {
        "broken".to_owned()
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        Ok(if self.takes { commands.len() } else { 0 })
    }

    fn poll(&mut self, _events: &mut Vec<Event>) -> Result<(), TransportError> {
        Ok(())
    }
}

fn broken(takes: bool) -> Wires {
    Wires::new(Order::Queue, vec![Box::new(Broken { takes })])
}

#[test]
fn a_full_fifo_blocks_the_ctas_that_push_and_is_named() {
    let case = two_by_two("gemm_rs", OptionSet::Tilewire, Fabric::IbRc);
    let schedule = case.kernel.build(&case.spec).expect("builds");
    let mut config = HostConfig { fifo_depth: 1, split: split(1), ..impatient() };
    config.proxy.aside = 1;
    let ranks = execute(&schedule, &case, config, |_, _, _| Ok(broken(false)));
    let all: Vec<Blocked> = ranks.iter().flat_map(|rank| blocked(rank.as_ref().expect_err("stuck")).to_vec()).collect();
    let full: Vec<&Blocked> = all.iter().filter(|blocked| blocked.flag == FIFO).collect();
    assert!(!full.is_empty(), "{all:?}");
    assert!(full.iter().all(|blocked| (blocked.have, blocked.need) == (1, 2)), "{full:?}");
}

#[test]
fn writes_that_never_complete_are_counted_and_named() {
    // Everything is done but the last puts: nobody waits for a flag, so that the puts themselves must be watched.
    let case = two_by_two("ag_gemm", OptionSet::Tilewire, Fabric::IbRc);
    let schedule = case.kernel.build(&case.spec).expect("builds");
    let schedule = changed(schedule, |_, _, _, tasks| tasks.retain(|task| matches!(task.op, Op::Put { .. })));
    let ranks = execute(&schedule, &case, impatient(), |_, _, _| Ok(broken(true)));
    let text = ranks
        .iter()
        .filter_map(|rank| rank.as_ref().err())
        .find(|error| matches!(error, HostError::PutsPending { .. }))
        .expect("one rank notices first")
        .to_string();
    assert!(text.contains("puts of this rank are not complete") && text.contains("are missing: "), "{text}");
}

/// Fails at its first write.
struct Failing;

impl Transport for Failing {
    fn name(&self) -> String {
        "failing".to_owned()
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        let [command, ..] = *commands else { return Ok(0) };
        let status = "remote access error";
        let command = Box::new(command);
        Err(TransportError::Completion {
            peer: command.peer,
            queue: command.queue,
            status,
            code: 10,
            vendor: 0x88,
            command,
        })
    }

    fn poll(&mut self, _events: &mut Vec<Event>) -> Result<(), TransportError> {
        Ok(())
    }
}

#[test]
fn a_failed_write_ends_every_rank_at_once_with_peer_queue_status_and_command() {
    let case = two_by_two("gemm_rs", OptionSet::Tilewire, Fabric::IbRc);
    let schedule = case.kernel.build(&case.spec).expect("builds");
    let config = HostConfig { patience: Duration::from_secs(120), ..impatient() };
    let begin = Instant::now();
    let ranks = execute(&schedule, &case, config, |rank, _, segments| {
        if rank == 3 {
            return Ok(Wires::new(Order::Queue, vec![Box::new(Failing)]));
        }
        Ok(loopback(rank, segments, 1, None))
    });
    assert!(begin.elapsed() < Duration::from_secs(100), "nobody waits for the watchdog");
    for (rank, result) in ranks.into_iter().enumerate() {
        let text = result.expect_err("ends").to_string();
        assert!(text.contains("rank 1 queue 0: remote access error (status 10, vendor 0x88)"), "{rank}: {text}");
        assert_eq!(text.starts_with("rank 3: "), rank != 3, "{rank}: {text}");
    }
}

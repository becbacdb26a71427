//! What the host device's work takes on this CPU: one op after the other on one thread, flags between two.

use super::HostError;
use super::memory::Reach;
use crate::transport::proxy::rest;
use crate::transport::segment::{Layout, Segment};
use crate::values::{collect_rank, ops};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tilewire_kernels::Schedule;
use tilewire_kernels::schedule::Op;

/// An op that ran by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpTime {
    /// Its kind, as [`Op::name`] says.
    pub kind: &'static str,
    /// Steps of its main loop.
    pub steps: u32,
    /// Floating-point operations of a step.
    pub step_flops: u64,
    /// Time of begin and steps.
    pub steps_s: f64,
    /// Time to read what it has no steps for, and to write its output.
    pub output_s: f64,
    /// Bytes read by an op without steps.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Whether the output is added.
    pub adds: bool,
}

/// Runs every op of rank 0 that stays in its node, one after the other, on zeros, in memory of its own; puts and waits are left out.
///
/// # Errors
/// [`HostError`]: memory that cannot be had.
pub fn op_times(schedule: &Schedule) -> Result<Vec<OpTime>, HostError> {
    let too_many = || HostError::Unsupported { what: "schedules with more than 2^31 flags per bank".to_owned() };
    let layout = Arc::new(Layout::new(schedule).ok_or_else(too_many)?);
    let segment = |rank| match Segment::private(&layout) {
        Ok(segment) => Ok(Some(Arc::new(segment))),
        Err(error) => Err(HostError::Segment { rank, error }),
    };
    let segments = (0..schedule.cluster.ranks()).map(segment).collect::<Result<_, _>>()?;
    let reach = Reach { cluster: schedule.cluster, layout, segments };
    let rank = schedule.cluster.rank(0);
    let (tasks, table) = collect_rank(schedule, rank)?;
    let mut times = Vec::new();
    for task in tasks.iter().flatten() {
        let op = &task.op;
        if matches!(op, Op::Put { .. } | Op::Sync | Op::Collective { .. }) {
            continue;
        }
        let begin = Instant::now();
        let mut carry = ops::begin(&reach, rank, op);
        ops::steps(&reach, rank, op, &mut carry, 0, op.steps());
        let steps_s = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        let writes = ops::finish(&reach, rank, op, &carry, &table);
        for write in &writes {
            reach.write(write);
        }
        let output_s = begin.elapsed().as_secs_f64();
        let read_bytes = match op {
            Op::Reduce { inputs, .. } => inputs.iter().map(|input| input.region.bytes()).sum(),
            Op::Copy { src, .. } => src.region.bytes(),
            _ => 0,
        };
        let step_flops = match op {
            Op::GemmTile { tile, .. } => 2 * tile.iter().map(|&side| u64::from(side)).product::<u64>(),
            _ => 0,
        };
        times.push(OpTime {
            kind: op.name(),
            steps: op.steps(),
            step_flops,
            steps_s,
            output_s,
            read_bytes,
            written_bytes: writes.iter().map(|write| write.data.len() as u64).sum(),
            adds: writes.iter().any(|write| write.add),
        });
    }
    Ok(times)
}

/// Seconds from a store of a word until a thread that rests between its looks, as waiting CTAs and proxies do, sees it;
/// `count` times, each after the waiter has come to rest.
pub fn flag_latencies(count: u32) -> Vec<f64> {
    let (word, begin) = (AtomicU32::new(0), Instant::now());
    let ready = AtomicBool::new(false);
    let patience = crate::transport::proxy::ProxyConfig::default().patience;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut seen = Vec::new();
            for round in 1..=count {
                ready.store(true, Ordering::Release);
                let mut idle = 0;
                while word.load(Ordering::Acquire) < round {
                    idle = rest(idle, patience);
                }
                seen.push(begin.elapsed());
            }
            seen
        });
        let mut stored = Vec::new();
        for round in 1..=count {
            while !ready.swap(false, Ordering::AcqRel) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(2) + Duration::from_micros(u64::from(round) * 37 % 100));
            stored.push(begin.elapsed());
            word.store(round, Ordering::Release);
        }
        let seen = waiter.join().expect("a waiter does not panic");
        seen.into_iter().zip(stored).map(|(seen, stored)| seen.saturating_sub(stored).as_secs_f64()).collect()
    })
}

/// Ends threads that rest, however the work beside them ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Does `work` beside `count` threads that rest between their looks at something that does not come, as waiting CTAs,
/// proxies and watchers of a run do: where cores are few, they take a part of them.
pub fn beside_resting<T>(count: usize, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    let patience = crate::transport::proxy::ProxyConfig::default().patience;
    std::thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                let mut idle = 0;
                while !over.load(Ordering::Acquire) {
                    idle = rest(idle, patience);
                }
            });
        }
        let _over = Over(&over);
        work()
    })
}

/// Seconds to start `count` threads and to wait for all: what a launch costs beside its tasks.
pub fn launch_s(count: usize) -> f64 {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| ());
        }
    });
    begin.elapsed().as_secs_f64()
}

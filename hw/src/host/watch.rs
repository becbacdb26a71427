//! Watches a run: what each CTA waits for, whether anything moves, and what is left when nothing does.

use super::cta::{Run, Worker};
use super::{FIFO, HostError};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tilewire_kernels::Blocked;
use tilewire_kernels::schedule::Flag;

/// What a CTA waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) role: usize,
    pub(super) task: usize,
    pub(super) what: What,
}

/// The kinds of waiting that can go wrong.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    /// A flag, and the value needed.
    Flag(Flag, u32),
    /// Room in the FIFO of a proxy.
    Fifo(usize),
}

/// How a watch ended.
pub(super) enum Watched {
    /// All tasks done, all own writes complete, all puts to this rank noticed.
    Complete,
    /// Nothing moved for too long.
    Stuck,
    /// Some rank stopped the run.
    Stopped,
}

impl Run<'_> {
    /// Waits for the end of the run.
    pub(super) fn watch(&self, done: &std::sync::atomic::AtomicU64, patience: Duration) -> Watched {
        let (mut seen, mut since, mut noticed) = (0, Instant::now(), 0);
        loop {
            if self.stop.load(Ordering::Acquire) {
                return Watched::Stopped;
            }
            let arrivals = &self.plan.incoming.arrivals;
            while noticed < arrivals.len() && self.value(arrivals[noticed].0) > 0 {
                noticed += 1;
            }
            let complete = done.load(Ordering::Acquire);
            if self.ctas_left.load(Ordering::Acquire) == 0
                && noticed == arrivals.len()
                && complete == self.pushed.load(Ordering::Acquire)
            {
                return Watched::Complete;
            }
            let now = self.progress.load(Ordering::Relaxed) + noticed as u64;
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > patience {
                return Watched::Stuck;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// The CTAs that wait, in order of launch, role and CTA.
    pub(super) fn blocked(&self, workers: &[Worker]) -> Vec<Blocked> {
        let mut blocked: Vec<Blocked> = Vec::new();
        for worker in workers {
            let waiting = *worker.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(Waiting { role, task, what }) = waiting else { continue };
            let (launch, index) = self.pairs[role];
            let launch = &self.schedule.launches[launch];
            let (flag, slot, have, need) = match what {
                What::Flag(flag, need) => {
                    (self.schedule.family(flag.family).name.clone(), flag.slot, self.value(flag), need)
                }
                What::Fifo(proxy) => {
                    let depth = self.fifos[proxy].depth() as u32;
                    (FIFO.to_owned(), proxy as u32, depth, depth + 1)
                }
            };
            blocked.push(Blocked {
                rank: self.plan.rank,
                launch: launch.name.clone(),
                role: launch.roles[index].kind,
                cta: worker.cta,
                task: task as u32,
                flag,
                slot,
                have,
                need,
            });
        }
        blocked
    }

    /// What is missing when every task is done.
    pub(super) fn pending(&self, done: u64) -> HostError {
        let pushed = self.pushed.load(Ordering::Acquire);
        let arrivals = &self.plan.incoming.arrivals;
        let missing: Vec<(Flag, usize)> = arrivals.iter().copied().filter(|&(flag, _)| self.value(flag) == 0).collect();
        let name = |&(flag, from): &(Flag, usize)| {
            format!("{}[{}] of rank {from}", self.schedule.family(flag.family).name, flag.slot)
        };
        HostError::PutsPending {
            pending: pushed - done,
            pushed,
            missing: missing.len(),
            expected: arrivals.len(),
            words: missing.iter().take(8).map(name).collect(),
        }
    }
}

//! What goes wrong without a completion: a port that goes down, a peer that never answers.
//!
//! A queue pair without a write on its way learns nothing of its peer, and some devices retry for ever. So an endpoint
//! looks, now and then while it polls, at what its ports report and at how long its writes have waited.

use std::time::{Duration, Instant};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);
/// A pause between polls counts for so long at most: who was stopped has not waited.
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// Polls between two readings of the clock, which a tight loop should not pay for.
const POLLS: u32 = 64;

/// How long the queues of an endpoint have waited.
pub(super) struct Health {
    polls: u32,
    looked: Instant,
    queues: Vec<Waiting>,
}

#[derive(Clone, Copy, Default)]
struct Waiting {
    completed: u64,
    waited: Duration,
}

impl Health {
    /// Of `queues` queues.
    pub(super) fn new(queues: usize) -> Self {
        Self { polls: 0, looked: Instant::now(), queues: vec![Waiting::default(); queues] }
    }

    /// Called at every poll; from time to time the time since the last look.
    pub(super) fn look(&mut self) -> Option<Duration> {
        self.polls = self.polls.wrapping_add(1);
        if !self.polls.is_multiple_of(POLLS) {
            return None;
        }
        let now = Instant::now();
        let since = now.saturating_duration_since(self.looked);
        (since >= LOOK).then(|| {
            self.looked = now;
            since.min(PAUSE_MAX)
        })
    }

    /// How long a queue with something on its way has completed nothing. `completed` counts what it ever did.
    pub(super) fn waited(&mut self, queue: usize, pending: bool, completed: u64, since: Duration) -> Duration {
        let waiting = &mut self.queues[queue];
        if !pending || completed != waiting.completed {
            *waiting = Waiting { completed, waited: Duration::ZERO };
        } else {
            waiting.waited += since;
        }
        waiting.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_queue_that_completes_nothing_waits() {
        let mut health = Health::new(2);
        let second = Duration::from_secs(1);
        assert_eq!(health.waited(0, true, 5, second), Duration::ZERO, "it has completed since");
        assert_eq!(health.waited(0, true, 5, second), second);
        assert_eq!(health.waited(1, true, 0, second), second, "a queue of its own");
        assert_eq!(health.waited(0, true, 5, second), 2 * second);
        assert_eq!(health.waited(0, true, 6, second), Duration::ZERO);
        assert_eq!(health.waited(0, false, 6, second), Duration::ZERO, "nothing is on its way");
    }
}

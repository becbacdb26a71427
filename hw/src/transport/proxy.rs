//! The proxy: the thread that serves a command FIFO and a transport.
//!
//! One loop takes commands, posts them queue by queue, and serves completions and arrivals. It never blocks on a queue
//! that is full: commands for it wait aside while others go on. When too many wait, the FIFO fills up and blocks the
//! CTAs that push, and nobody else.

use super::arrivals::Arrivals;
use super::fifo::Source;
use super::{Command, Event, Transport, TransportError, Word};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How a proxy serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyConfig {
    /// Commands of one queue that are posted together, at most.
    pub batch: usize,
    /// Commands that may wait aside for full queues, over all queues.
    pub aside: usize,
    /// Rounds without work after which the thread yields its core, and after four times as many sleeps a little;
    /// `u32::MAX` polls for ever.
    pub patience: u32,
}

impl Default for ProxyConfig {
    /// Batches of 8, 256 aside, and a thread that soon lets others run.
    fn default() -> Self {
        Self { batch: 8, aside: 256, patience: 64 }
    }
}

/// Raises flag words of the own rank.
pub trait Raise: Sync {
    /// Counts the word up by one, after everything that was visible before.
    fn raise(&self, word: Word);
}

/// What a proxy shares with its run.
pub struct Proxy<'a> {
    /// Where commands come from.
    pub fifo: &'a dyn Source,
    /// Own flag words.
    pub words: &'a dyn Raise,
    /// What is to arrive.
    pub arrivals: &'a Arrivals,
    /// Ends the service at once.
    pub stop: &'a AtomicBool,
    /// Ends the service once nothing is on its way.
    pub end: &'a AtomicBool,
    /// Commands complete since the run began, over all proxies of the rank.
    pub done: &'a AtomicU64,
    /// Counts whatever moves, for the watchdog.
    pub progress: &'a AtomicU64,
    /// How to serve.
    pub config: ProxyConfig,
}

/// What a proxy did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Commands complete.
    pub commands: u64,
    /// Their payload.
    pub bytes: u64,
    /// Calls of [`Transport::post`] that took something.
    pub posts: u64,
    /// Most commands that were on their way at once.
    pub in_flight_max: u64,
    /// Arrivals noted.
    pub arrivals: u64,
}

impl Served {
    /// Adds what another proxy or run did.
    pub fn add(&mut self, other: &Self) {
        self.commands += other.commands;
        self.bytes += other.bytes;
        self.posts += other.posts;
        self.in_flight_max = self.in_flight_max.max(other.in_flight_max);
        self.arrivals += other.arrivals;
    }
}

impl Proxy<'_> {
    /// Serves until the run ends or stops.
    ///
    /// # Errors
    /// [`TransportError`] of the transport, or an arrival that the schedule does not have.
    pub fn serve(&self, transport: &mut dyn Transport) -> Result<Served, TransportError> {
        let mut served = Served::default();
        let mut lanes: BTreeMap<(u32, u16), VecDeque<Command>> = BTreeMap::new();
        let (mut aside, mut in_flight, mut idle) = (0usize, 0u64, 0u32);
        let mut events = Vec::new();
        let mut parts: BTreeMap<u32, u32> = BTreeMap::new();
        while !self.stop.load(Ordering::Relaxed) {
            // Asked before the FIFO: what was pushed before the end is served.
            let ending = self.end.load(Ordering::Acquire);
            let mut moved = false;
            while aside < self.config.aside.max(1) {
                let Some(command) = self.fifo.take() else { break };
                lanes.entry((command.peer, command.queue)).or_default().push_back(command);
                aside += 1;
            }
            for lane in lanes.values_mut().filter(|lane| !lane.is_empty()) {
                lane.make_contiguous();
                while !lane.is_empty() {
                    let batch = lane.len().min(self.config.batch.max(1));
                    let taken = transport.post(&lane.as_slices().0[..batch])?;
                    if taken == 0 {
                        break;
                    }
                    lane.drain(..taken);
                    aside -= taken;
                    in_flight += taken as u64;
                    served.posts += 1;
                    moved = true;
                }
            }
            served.in_flight_max = served.in_flight_max.max(in_flight);
            transport.poll(&mut events)?;
            moved |= !events.is_empty();
            for event in events.drain(..) {
                match event {
                    Event::Sent(command) => {
                        if let Some(word) = command.sent
                            && is_last(&mut parts, &command)
                        {
                            self.words.raise(word);
                        }
                        in_flight -= 1;
                        served.commands += 1;
                        served.bytes += u64::from(command.bytes);
                        self.done.fetch_add(1, Ordering::Release);
                    }
                    Event::Arrived(word) => {
                        served.arrivals += 1;
                        if self.arrivals.note(word)? {
                            self.words.raise(word);
                        }
                    }
                }
                self.progress.fetch_add(1, Ordering::Relaxed);
            }
            if moved {
                idle = 0;
                continue;
            }
            if aside == 0 && in_flight == 0 && ending {
                break;
            }
            idle = rest(idle, self.config.patience);
        }
        Ok(served)
    }
}

/// Whether a put is complete with this write, in whatever order its writes complete.
fn is_last(parts: &mut BTreeMap<u32, u32>, command: &Command) -> bool {
    if command.writes <= 1 {
        return true;
    }
    let done = parts.entry(command.put).or_default();
    *done += 1;
    let last = *done == command.writes;
    if last {
        parts.remove(&command.put);
    }
    last
}

/// Spins, yields or sleeps after `idle` rounds without work; returns the next count.
pub(crate) fn rest(idle: u32, patience: u32) -> u32 {
    if idle < patience {
        std::hint::spin_loop();
    } else if idle < patience.saturating_mul(4) {
        std::thread::yield_now();
    } else {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
    idle.saturating_add(1)
}

/// Words that nobody waits for, for measurements of the service alone.
impl Raise for AtomicU32 {
    fn raise(&self, _word: Word) {
        self.fetch_add(1, Ordering::Relaxed);
    }
}

//! Exercises a transport between two ranks: rounds whose values are checked, latency, bandwidth.
//!
//! Rank pairs call these together, after the same barrier. Every wait has a deadline.

use super::segment::Segment;
use super::{Command, Event, Notice, Transport, TransportError, Word};
use crate::bootstrap::{BootstrapError, Session};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Two ranks, seen from one of them.
pub struct Pair<'a> {
    session: &'a Session,
    segment: &'a Segment,
    data: u64,
    transport: &'a mut dyn Transport,
    peer: u32,
    patience: Duration,
    /// Polls so far; the clock, which may be slow, is read at every 1024th.
    polls: u64,
    /// Writes posted and not complete.
    on_way: u64,
    /// What came while a full queue was waited for.
    aside: Vec<Event>,
}

/// Why an exercise did not end.
#[derive(Debug, thiserror::Error)]
pub enum ExerciseError {
    /// The transport failed.
    #[error("transport: {0}")]
    Transport(#[from] TransportError),
    /// The peer did.
    #[error(transparent)]
    Peer(#[from] BootstrapError),
    /// Nothing happened for too long.
    #[error(
        "nothing came from rank {peer} for {patience_s} s after {done} of {of}; {on_way} writes of this rank to it are not complete; is it alive, is the link up?"
    )]
    Stuck {
        /// The other rank.
        peer: u32,
        /// How long.
        patience_s: u64,
        /// What was done: rounds or writes.
        done: u64,
        /// Of how many.
        of: u64,
        /// Writes posted without a completion.
        on_way: u64,
    },
    /// A value that is not what was sent.
    #[error("round {round} in slot {slot}: byte {at} is {got}, sent was {sent}")]
    Wrong {
        /// Round.
        round: u64,
        /// Slot.
        slot: u32,
        /// Byte of the payload.
        at: usize,
        /// What came.
        got: u8,
        /// What was sent.
        sent: u8,
    },
}

/// Byte `at` of what `from` sends in a round.
const fn pattern(from: u32, round: u64, at: usize) -> u8 {
    (round.wrapping_mul(31) ^ (round >> 8) ^ (at as u64).wrapping_mul(7) ^ (from as u64 * 101)) as u8
}

/// Marks in [`Pair::polls`] that something has happened since the clock was read.
const MOVED: u64 = 1 << 63;

impl<'a> Pair<'a> {
    /// The pair of the rank of `session` and `peer`. Of the own segment, one bank of flag words is used, and bytes from
    /// `data` on, where every segment has its payload. Nothing may happen for as long as `patience`.
    pub fn new(
        session: &'a Session,
        segment: &'a Segment,
        data: u64,
        transport: &'a mut dyn Transport,
        peer: u32,
        patience: Duration,
    ) -> Self {
        Self { session, segment, data, transport, peer, patience, polls: 0, on_way: 0, aside: Vec::new() }
    }

    /// Name of the transport.
    pub fn transport(&self) -> String {
        self.transport.name()
    }

    fn me(&self) -> u32 {
        self.session.place().rank
    }

    /// Polls; an error once the others have stopped or nothing has happened for long.
    fn poll(&mut self, since: &mut Instant, done: u64, of: u64) -> Result<Vec<Event>, ExerciseError> {
        let mut events = Vec::new();
        self.transport.poll(&mut events)?;
        self.on_way -= events.iter().filter(|event| matches!(event, Event::Sent(_))).count() as u64;
        self.polls += 1;
        if !events.is_empty() {
            self.polls |= MOVED;
        } else if self.polls.is_multiple_of(1024) {
            if self.polls & MOVED != 0 {
                (*since, self.polls) = (Instant::now(), 0);
            } else if since.elapsed() > self.patience {
                return Err(ExerciseError::Stuck {
                    peer: self.peer,
                    patience_s: self.patience.as_secs(),
                    done,
                    of,
                    on_way: self.on_way,
                });
            }
        }
        if !self.aside.is_empty() {
            events.splice(0..0, self.aside.drain(..));
        }
        if !self.session.stop().load(Ordering::Relaxed) {
            return Ok(events);
        }
        self.session.failure().map_or(Ok(events), |failure| Err(failure.into()))
    }

    fn post(&mut self, command: Command) -> Result<(), ExerciseError> {
        let mut since = Instant::now();
        while self.transport.post(&[command])? == 0 {
            // What comes meanwhile belongs to whoever polls next.
            self.aside = self.poll(&mut since, 0, 1)?;
        }
        self.on_way += 1;
        Ok(())
    }

    /// Both ranks send `rounds` payloads, each with its flag, `slots` at a time on as many queues, and check every byte
    /// that comes. Returns the time it took.
    ///
    /// # Errors
    /// [`ExerciseError`].
    pub fn rounds(
        &mut self,
        rounds: u64,
        slots: u32,
        bytes: u32,
        notice: fn(Word) -> Notice,
    ) -> Result<Duration, ExerciseError> {
        let begin = Instant::now();
        let (mut sent, mut received) = (vec![0u64; slots as usize], vec![0u64; slots as usize]);
        let share = |slot: u32| rounds / u64::from(slots) + u64::from(u64::from(slot) < rounds % u64::from(slots));
        let mut since = Instant::now();
        let me = self.me();
        // Both segments have a place for each side; the lower rank's is the first.
        let place = |lower: bool, slot: u32| self.data + u64::from(2 * slot + u32::from(!lower)) * u64::from(bytes);
        let lower = me < self.peer;
        let (sources, landings): (Vec<u64>, Vec<u64>) =
            (0..slots).map(|slot| (place(lower, slot), place(!lower, slot))).unzip();
        loop {
            let total: u64 = received.iter().sum();
            if total == rounds && sent.iter().sum::<u64>() == rounds && self.on_way == 0 {
                break;
            }
            for slot in 0..slots {
                let at = slot as usize;
                let word = Word::new(slot, 0);
                if self.segment.word(word).load(Ordering::Acquire) > 0 && received[at] < share(slot) {
                    let mut got = Vec::new();
                    self.segment.read(landings[at], u64::from(bytes), &mut got);
                    let round = received[at];
                    let wrong = got.iter().enumerate().find(|&(i, &got)| got != pattern(self.peer, round, i));
                    if let Some((i, &got)) = wrong {
                        let sent = pattern(self.peer, round, i);
                        return Err(ExerciseError::Wrong { round, slot, at: i, got, sent });
                    }
                    self.segment.word(word).store(0, Ordering::Release);
                    received[at] += 1;
                    since = Instant::now();
                }
                // A rank sends its next payload once it has the peer's, which tells that its own last one was read:
                // rank 0 begins.
                let may = if lower { sent[at] == received[at] } else { sent[at] < received[at] };
                if may && sent[at] < share(slot) {
                    let payload: Vec<u8> = (0..bytes as usize).map(|i| pattern(me, sent[at], i)).collect();
                    self.segment.write(sources[at], &payload);
                    // The peer's landing is at the same place as the own source.
                    let (src, dst) = (sources[at], sources[at]);
                    let command = Command {
                        src,
                        dst,
                        bytes,
                        peer: self.peer,
                        queue: slot as u16,
                        notice: notice(word),
                        writes: 1,
                        ..Command::default()
                    };
                    self.post(command)?;
                    sent[at] += 1;
                }
            }
            let events = self.poll(&mut since, total, rounds)?;
            if events.is_empty() {
                // Values are what counts here, and a software device may need this core to carry anything.
                std::thread::yield_now();
            }
            for event in events {
                if let Event::Arrived(word) = event {
                    self.segment.word(word).store(1, Ordering::Release);
                }
            }
        }
        Ok(begin.elapsed())
    }

    /// Half the time of `bytes` bytes with their flag there and back, for each of `rounds`, in microseconds.
    ///
    /// # Errors
    /// [`ExerciseError`].
    pub fn latency_us(&mut self, rounds: u32, bytes: u32) -> Result<Vec<f64>, ExerciseError> {
        let word = Word::new(0, 0);
        let (src, dst, notice) = (self.data, self.data, Notice::Write(word));
        let command = Command { src, dst, bytes, peer: self.peer, notice, writes: 1, ..Command::default() };
        let first = self.me() < self.peer;
        let mut times = Vec::new();
        let mut since = Instant::now();
        let mut begin = Instant::now();
        for round in 0..rounds {
            if first {
                self.post(command)?;
            }
            while self.segment.word(word).load(Ordering::Acquire) == 0 {
                self.poll(&mut since, u64::from(round), u64::from(rounds))?;
            }
            self.polls |= MOVED;
            self.segment.word(word).store(0, Ordering::Release);
            if !first {
                self.post(command)?;
            }
            let now = Instant::now();
            times.push((now - begin).as_secs_f64() * 1e6 / 2.0);
            begin = now;
        }
        self.settle()?;
        Ok(times)
    }

    /// Of each of `rounds` small writes with a flag, posted alone: microseconds in the post, from then to the completion,
    /// and in the poll that brought it. Takes a slot of the segment for each round and one more; the upper rank returns
    /// nothing at once.
    ///
    /// # Errors
    /// [`ExerciseError`].
    pub fn service_us(&mut self, rounds: u32) -> Result<Vec<[f64; 3]>, ExerciseError> {
        if self.me() > self.peer {
            return Ok(Vec::new());
        }
        let us = |from: Instant| from.elapsed().as_secs_f64() * 1e6;
        let mut times = Vec::new();
        for round in 0..rounds {
            // A word that nobody waits for.
            let notice = Notice::Write(Word::new(1 + round, 0));
            let command = Command { peer: self.peer, notice, writes: 1, ..Command::default() };
            let (begin, mut since) = (Instant::now(), Instant::now());
            self.post(command)?;
            let (posted, on_way) = (us(begin), Instant::now());
            let mut poll = Instant::now();
            while self.on_way > 0 {
                poll = Instant::now();
                self.poll(&mut since, u64::from(round), u64::from(rounds))?;
            }
            times.push([posted, us(on_way), us(poll)]);
        }
        Ok(times)
    }

    /// Sends nothing and hears nothing for as long as patience lasts; returns the time.
    ///
    /// # Errors
    /// [`ExerciseError`] when the transport or another rank fails.
    pub fn listen(&mut self) -> Result<Duration, ExerciseError> {
        let begin = Instant::now();
        while begin.elapsed() < self.patience {
            let mut events = Vec::new();
            self.transport.poll(&mut events)?;
            std::thread::yield_now();
            if let Some(failure) = self.session.failure() {
                return Err(failure.into());
            }
        }
        Ok(begin.elapsed())
    }

    /// Waits for the completions of what was posted, so that nothing of it is counted later.
    fn settle(&mut self) -> Result<(), ExerciseError> {
        let mut since = Instant::now();
        while self.on_way > 0 {
            self.poll(&mut since, 0, self.on_way)?;
        }
        Ok(())
    }

    /// Seconds that `count` writes of `bytes` take, from the lower rank to the other, over `queues` queues with at most
    /// `in_flight` on their way, until the last completion. The other rank returns 0 at once.
    ///
    /// # Errors
    /// [`ExerciseError`].
    pub fn stream(&mut self, bytes: u32, count: u64, queues: u16, in_flight: u64) -> Result<f64, ExerciseError> {
        if self.me() > self.peer {
            return Ok(0.0);
        }
        let (mut posted, mut since) = (0u64, Instant::now());
        let begin = Instant::now();
        let command = |queue| Command {
            src: self.data,
            dst: self.data,
            bytes,
            peer: self.peer,
            queue,
            writes: 1,
            ..Command::default()
        };
        let commands: Vec<Command> = (0..queues.max(1)).map(command).collect();
        while posted < count || self.on_way > 0 {
            let mut queue = posted as usize % commands.len();
            let mut full = 0;
            while posted < count && self.on_way < in_flight.max(1) && full < commands.len() {
                if self.transport.post(&commands[queue..=queue])? == 0 {
                    full += 1;
                } else {
                    (posted, full) = (posted + 1, 0);
                    self.on_way += 1;
                }
                queue = (queue + 1) % commands.len();
            }
            self.poll(&mut since, posted - self.on_way, count)?;
        }
        Ok(begin.elapsed().as_secs_f64())
    }
}

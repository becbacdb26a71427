//! Copies between segments of one host, as fast as the host can or paced to a chosen speed.

use super::segment::Segment;
use super::{Command, Event, Notice, Transport, TransportError, Word};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A speed to imitate: what a record made with it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pacing {
    /// From the post of a write to its arrival, beside its time on the wire.
    pub latency: Duration,
    /// Bytes per second of one proxy.
    pub bytes_per_s: u64,
    /// Writes per second of one proxy.
    pub messages_per_s: u64,
}

impl Pacing {
    fn on_wire(&self, bytes: u32) -> Duration {
        let per_message = 1e9 / self.messages_per_s.max(1) as f64;
        let of_bytes = f64::from(bytes) * 1e9 / self.bytes_per_s.max(1) as f64;
        Duration::from_nanos(per_message.max(of_bytes) as u64)
    }
}

/// Loopback for one proxy thread.
#[derive(Debug)]
pub struct Loopback {
    own: Arc<Segment>,
    peers: Vec<Option<Arc<Segment>>>,
    pacing: Option<Pacing>,
    free_at: Instant,
    flying: VecDeque<(Instant, Command)>,
    sent: Vec<Event>,
    /// Slots whose words are taken as arrivals, and which is looked at next.
    heard: (Vec<u32>, usize),
}

/// Slots that one poll looks at.
const HEARD_AT_ONCE: usize = 64;

impl Loopback {
    /// From `own` to the segments of peers by rank number.
    pub fn new(own: Arc<Segment>, peers: Vec<Option<Arc<Segment>>>, pacing: Option<Pacing>) -> Self {
        Self {
            own,
            peers,
            pacing,
            free_at: Instant::now(),
            flying: VecDeque::new(),
            sent: Vec::new(),
            heard: (Vec::new(), 0),
        }
    }

    /// From now on the words of these slots are taken away as they rise, and told as arrivals: for memory that is not this
    /// segment, but behind it.
    pub fn hear(&mut self, slots: impl Iterator<Item = u32>) {
        self.heard = (slots.collect(), 0);
    }

    fn listen(&mut self, events: &mut Vec<Event>) {
        let (slots, next) = &mut self.heard;
        for _ in 0..slots.len().min(HEARD_AT_ONCE) {
            for word in [0, 1].map(|bank| Word::new(slots[*next], bank)) {
                if self.own.word(word).load(Ordering::Relaxed) > 0 && self.own.word(word).swap(0, Ordering::AcqRel) > 0
                {
                    events.push(Event::Arrived(word));
                }
            }
            *next = (*next + 1) % slots.len();
        }
    }

    fn carry(&mut self, command: &Command) -> Result<(), TransportError> {
        let peer = command.peer;
        let Some(Some(to)) = self.peers.get(peer as usize) else {
            return Err(TransportError::Unreachable { transport: "loopback", peer });
        };
        self.own.copy_to(command.src, to, command.dst, u64::from(command.bytes));
        match command.notice {
            Notice::None => {}
            Notice::Write(word) | Notice::Immediate(word) | Notice::WriteOn(word, _) => {
                if to.word(word).fetch_add(1, Ordering::AcqRel) != 0 {
                    return Err(TransportError::Unexpected { slot: word.slot(), got: 2, expected: 1 });
                }
            }
        }
        self.sent.push(Event::Sent(*command));
        Ok(())
    }
}

impl Transport for Loopback {
    fn name(&self) -> String {
        match self.pacing {
            None => "loopback (host copies, unpaced)".to_owned(),
            Some(Pacing { latency, bytes_per_s, messages_per_s }) => format!(
                "loopback (host copies, paced to {} us, {} bytes/s, {} messages/s per proxy)",
                latency.as_micros(),
                bytes_per_s,
                messages_per_s
            ),
        }
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        match self.pacing {
            None => commands.iter().try_for_each(|command| self.carry(command))?,
            Some(pacing) => {
                for command in commands {
                    self.free_at = self.free_at.max(Instant::now()) + pacing.on_wire(command.bytes);
                    self.flying.push_back((self.free_at + pacing.latency, *command));
                }
            }
        }
        Ok(commands.len())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
        while let Some(&(due, command)) = self.flying.front() {
            if due > Instant::now() {
                break;
            }
            self.flying.pop_front();
            self.carry(&command)?;
        }
        events.append(&mut self.sent);
        self.listen(events);
        Ok(())
    }
}

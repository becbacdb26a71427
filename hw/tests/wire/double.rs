//! A stand-in for a fabric without order: data, immediates and completions of all writes, in any order and late.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tilewire_hw::host::Wires;
use tilewire_hw::transport::segment::Segment;
use tilewire_hw::transport::{Command, Event, Notice, Order, Transport, TransportError};

/// What the fabric guarantees of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarantee {
    /// The immediate comes after the data of its own write: what SRD promises.
    ImmediateAfterData,
    /// Not even that: a broken fabric, to show that the suite can tell.
    Nothing,
}

struct Flight {
    from: usize,
    command: Command,
    landed: bool,
    told: bool,
    sent: bool,
}

struct State {
    flights: Vec<Flight>,
    /// Events that wait for each rank.
    events: Vec<Vec<Event>>,
    random: u64,
}

/// The fabric between all ranks.
pub struct Fabric {
    segments: Vec<Arc<Segment>>,
    guarantee: Guarantee,
    state: Mutex<State>,
    /// Writes that landed while an older one of the same rank, peer and queue had not.
    pub overtaken: AtomicU64,
}

/// One rank's end.
struct End {
    rank: usize,
    fabric: Arc<Fabric>,
}

impl Fabric {
    pub fn new(segments: &[Arc<Segment>], guarantee: Guarantee, seed: u64) -> Arc<Self> {
        let events = segments.iter().map(|_| Vec::new()).collect();
        let state = Mutex::new(State { flights: Vec::new(), events, random: seed | 1 });
        Arc::new(Self { segments: segments.to_vec(), guarantee, state, overtaken: AtomicU64::new(0) })
    }

    pub fn wires(self: &Arc<Self>, rank: usize) -> Wires {
        Wires::new(Order::Unordered, vec![Box::new(End { rank, fabric: self.clone() })])
    }

    /// Moves some write a step: its data, its immediate or its completion.
    fn step(&self, state: &mut State) {
        // xorshift64: any choice will do.
        state.random ^= state.random << 13;
        state.random ^= state.random >> 7;
        state.random ^= state.random << 17;
        let at = (state.random >> 8) as usize % state.flights.len();
        let choice = state.random % 3;
        let lane = |flight: &Flight| (flight.from, flight.command.peer, flight.command.queue);
        let flight = &state.flights[at];
        let command = flight.command;
        // A broken fabric's data come long after their immediate.
        let held = self.guarantee == Guarantee::Nothing && (!flight.told || !(state.random >> 40).is_multiple_of(256));
        if choice == 0 && !flight.landed && !held {
            let overtakes = state.flights[..at].iter().any(|older| !older.landed && lane(older) == lane(flight));
            self.overtaken.fetch_add(u64::from(overtakes), Ordering::Relaxed);
            let to = &self.segments[command.peer as usize];
            self.segments[flight.from].copy_to(command.src, to, command.dst, u64::from(command.bytes));
            state.flights[at].landed = true;
        }
        let flight = &state.flights[at];
        if choice == 1 && !flight.told && (flight.landed || self.guarantee == Guarantee::Nothing) {
            if let Notice::Immediate(word) = command.notice {
                state.events[command.peer as usize].push(Event::Arrived(word));
            }
            state.flights[at].told = true;
        }
        if choice == 2 && !state.flights[at].sent && state.flights[at].landed {
            let from = state.flights[at].from;
            state.events[from].push(Event::Sent(command));
            state.flights[at].sent = true;
        }
        let flight = &state.flights[at];
        if flight.landed && flight.told && flight.sent {
            state.flights.remove(at);
        }
    }
}

impl Transport for End {
    fn name(&self) -> String {
        "double (reorders and delays)".to_owned()
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        let mut state = self.fabric.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A queue that is often full.
        if state.flights.len() > 12 {
            return Ok(0);
        }
        for &command in commands {
            let supported = matches!(command.notice, Notice::Immediate(_));
            assert!(supported, "every write of a put tells the receiver where nothing is ordered: {command}");
            state.flights.push(Flight { from: self.rank, command, landed: false, told: false, sent: false });
        }
        Ok(commands.len())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
        let mut state = self.fabric.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.flights.is_empty() {
            self.fabric.step(&mut state);
        }
        events.append(&mut state.events[self.rank]);
        Ok(())
    }
}

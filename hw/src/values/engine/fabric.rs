//! Puts on their way: the proxy takes them from the ring and posts them; they read, land, raise their word and are sent,
//! in any order that the fabric permits.
//!
//! The proxy takes the commands of a queue in order and holds them back where the queue has its cap of writes in flight;
//! no queue waits for another.

use super::super::memory::{Source, Write, ranks_of};
use super::super::race::Handle;
use super::{Engine, ExecError, Scheduler, Worker};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use tilewire_kernels::schedule::{Access, At, Op, Publish, Region};

impl Engine<'_> {
    /// Moves one put, perhaps. Returns whether it did.
    pub(super) fn fabric_moves(&mut self) -> Result<bool, ExecError> {
        if self.flights.is_empty() {
            return Ok(false);
        }
        let turn = match self.config.scheduler {
            Scheduler::DelayedPuts => false,
            Scheduler::ReorderedPuts => self.rng.one_in(8),
            _ => self.rng.one_in(3),
        };
        if !turn && !self.runnable.is_empty() {
            return Ok(false);
        }
        // Puts that lag move with the workers that lag.
        let hold_back = !self.runnable.is_empty() || (!self.lagging.is_empty() && !self.rng.one_in(2));
        let flights = self.flights.len();
        let start = self.rng.below(flights);
        for i in 0..flights {
            let at = match self.config.scheduler {
                // The youngest first, as far as the fabric permits.
                Scheduler::ReorderedPuts => flights - 1 - i,
                Scheduler::RoundRobin => i,
                _ => (start + i) % flights,
            };
            let moves = self.moves_of(at);
            if moves.is_empty() || (self.flights[at].lags && hold_back) {
                continue;
            }
            let mv = moves[self.rng.below(moves.len())];
            self.advance(at, mv)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// What the fabric may do next with a put.
    pub(super) fn moves_of(&self, at: usize) -> Vec<Move> {
        let flight = &self.flights[at];
        let Op::Put { queue, publish, .. } = self.task(flight.role, flight.task).op else { return Vec::new() };
        let state = &self.queues[&(flight.rank, queue)];
        if !flight.posted {
            let room = state.in_flight < self.config.in_flight as usize;
            return if room && state.in_ring.front() == Some(&flight.id) { vec![Move::Post] } else { Vec::new() };
        }
        let in_order = self.schedule.fabric.orders_within_queue();
        // Earlier puts of the same queue to the same rank, all of which a queue in order publishes first.
        let behind = in_order && state.to_publish[&flight.to].first().is_some_and(|&first| first < flight.id);
        let after_data = match publish {
            Publish::Immediate => true,
            Publish::SameQueueWrite => in_order,
            Publish::SeparateWrite { queue: flag_queue } => in_order && flag_queue == queue,
        };
        let mut moves = Vec::with_capacity(4);
        if !flight.read {
            moves.push(Move::Read);
        }
        if flight.read && !flight.landed && !behind {
            moves.push(Move::Land);
        }
        if !flight.published && (flight.landed || !after_data) && !behind {
            moves.push(Move::Publish);
        }
        if flight.read && !flight.sent {
            moves.push(Move::Sent);
        }
        moves
    }

    pub(super) fn ring_is_full(&self, rank: usize) -> bool {
        let queues = self.queues.range((rank, 0)..=(rank, u16::MAX));
        queues.map(|(_, queue)| queue.in_ring.len()).sum::<usize>() >= self.config.fifo_depth as usize
    }

    /// Notes a put that is on its way, behind all that are.
    pub(super) fn note(&mut self, mut flight: Flight) {
        let Op::Put { queue, .. } = self.task(flight.role, flight.task).op else { return };
        flight.id = self.flights.last().map_or(0, |last| last.id + 1);
        let state = self.queues.entry((flight.rank, queue)).or_default();
        if !flight.posted {
            state.in_ring.push_back(flight.id);
        } else if !flight.is_over() {
            state.in_flight += 1;
        }
        let to_publish = state.to_publish.entry(flight.to).or_default();
        if !flight.published {
            to_publish.insert(flight.id);
        }
        self.flights.push(flight);
    }

    /// Carries out a move.
    pub(super) fn advance(&mut self, at: usize, mv: Move) -> Result<(), ExecError> {
        let lists = self.lists;
        let (rank, role, task, to) = {
            let flight = &self.flights[at];
            (flight.rank, flight.role, flight.task, flight.to)
        };
        let Op::Put { src, dst, arrived, sent, queue, .. } = &lists.tasks[role][task].op else { return Ok(()) };
        let data = dst.region.bytes() != 0;
        let (id, was_over) = (self.flights[at].id, self.flights[at].is_over());
        match mv {
            Move::Post => {
                self.flights[at].posted = true;
                let state = self.queue(rank, *queue);
                state.in_ring.pop_front();
                state.in_flight += 1;
                for worker in std::mem::take(&mut self.at_ring[rank]) {
                    self.wake(worker as usize);
                }
            }
            Move::Read => {
                self.flights[at].data = data.then(|| self.memory.read(rank, src));
                self.flights[at].read = true;
            }
            Move::Land => {
                if let Some(data) = self.flights[at].data.take() {
                    self.memory.write(&Write { rank: to, region: dst.region, data, add: false });
                }
                // What has landed has been read.
                let handles = [self.flights[at].source.take(), self.flights[at].destination.take()];
                self.close(handles.into_iter().flatten());
                self.flights[at].landed = true;
            }
            Move::Publish => {
                self.flights[at].published = true;
                self.queue(rank, *queue).to_publish.entry(to).or_default().remove(&id);
                // Runs take banks by turns, and a word says its bank.
                let of_run = self.flights[at].run;
                if (self.run - of_run) % 2 == 1 {
                    return Err(ExecError::LateWord {
                        task: Box::new(self.name(role, task)),
                        rank: self.schedule.cluster.rank(to),
                        flag: self.schedule.family(arrived.family).name.clone(),
                        slot: arrived.slot,
                        of_run,
                        run: self.run,
                    });
                }
                if self.value(to, *arrived) != 0 {
                    return Err(ExecError::RaisedTwice {
                        task: Box::new(self.name(role, task)),
                        rank: self.schedule.cluster.rank(to),
                        flag: self.schedule.family(arrived.family).name.clone(),
                        slot: arrived.slot,
                    });
                }
                self.raise(to, *arrived, 1);
            }
            Move::Sent => {
                let handle = self.flights[at].source.take();
                self.close(handle.into_iter());
                self.flights[at].sent = true;
                if let Some(sent) = sent {
                    self.raise(rank, *sent, 1);
                }
            }
        }
        let flight = &self.flights[at];
        let (over, sent) = (flight.is_over(), flight.sent);
        if over && !was_over {
            self.queue(rank, *queue).in_flight -= 1;
        }
        if over && sent {
            // Keeps the order in which puts were posted.
            self.flights.remove(at);
        }
        Ok(())
    }

    fn queue(&mut self, rank: usize, queue: u16) -> &mut Queue {
        self.queues.entry((rank, queue)).or_default()
    }

    /// Pushes a put into the ring.
    pub(super) fn push(&mut self, worker: usize, src: &Region, dst: &Region, at: At) {
        let Worker { rank, role, .. } = self.workers[worker];
        let to = ranks_of(self.schedule.cluster, self.rank_of(worker), at)[0];
        let task = self.live(worker).task;
        let data = dst.bytes() != 0;
        let source = if data { self.open(rank, src, None, Access::Read, role, task) } else { None };
        let destination = if data { self.open(to, dst, None, Access::Write, role, task) } else { None };
        let lags = self.lags();
        self.note(Flight {
            id: 0,
            rank,
            role,
            task,
            to,
            run: self.run,
            data: None,
            posted: false,
            read: false,
            landed: false,
            published: false,
            sent: false,
            lags,
            source,
            destination,
        });
    }
}

/// The puts of a queue of a rank, by their ids.
#[derive(Default)]
pub(super) struct Queue {
    in_ring: VecDeque<u64>,
    /// Posted and not over.
    in_flight: usize,
    /// Not published, by target rank.
    to_publish: BTreeMap<usize, BTreeSet<u64>>,
}

/// A put on its way.
pub(in crate::values) struct Flight {
    /// Larger than those of all puts before it.
    id: u64,
    rank: usize,
    role: usize,
    task: usize,
    to: usize,
    run: u32,
    data: Option<Vec<u8>>,
    /// No longer in the ring.
    posted: bool,
    read: bool,
    landed: bool,
    published: bool,
    sent: bool,
    lags: bool,
    source: Option<Handle>,
    destination: Option<Handle>,
}

impl Flight {
    /// Whether nothing more of it will be seen at its target.
    const fn is_over(&self) -> bool {
        self.landed && self.published
    }
}

#[derive(Clone, Copy)]
pub(super) enum Move {
    Post,
    Read,
    Land,
    Publish,
    Sent,
}

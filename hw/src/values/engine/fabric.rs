//! Puts on their way: the proxy takes them from the ring and posts them; they read, land, raise their word and are sent,
//! in any order that the fabric permits.
//!
//! The proxy takes the commands of a queue in order and holds them back where the queue has its cap of writes in flight;
//! no queue waits for another.

use super::super::memory::{Source, Write, ranks_of};
use super::super::race::Handle;
use super::{Engine, ExecError, Scheduler, Worker};
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
        let start = self.rng.below(self.flights.len());
        let order: Vec<usize> = match self.config.scheduler {
            // The youngest first, as far as the fabric permits.
            Scheduler::ReorderedPuts => (0..self.flights.len()).rev().collect(),
            Scheduler::RoundRobin => (0..self.flights.len()).collect(),
            _ => (0..self.flights.len()).map(|i| (start + i) % self.flights.len()).collect(),
        };
        for at in order {
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
        if !flight.posted {
            return if self.may_post(at, queue) { vec![Move::Post] } else { Vec::new() };
        }
        let in_order = self.schedule.fabric.orders_within_queue();
        // Earlier puts of the same queue to the same rank, all of which a queue in order publishes first.
        let behind = in_order
            && self.flights[..at].iter().any(|other| {
                let same = other.rank == flight.rank && other.to == flight.to && !other.published;
                same && matches!(self.task(other.role, other.task).op, Op::Put { queue: q, .. } if q == queue)
            });
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

    fn is_on(&self, flight: &Flight, rank: usize, queue: u16) -> bool {
        flight.rank == rank
            && matches!(self.task(flight.role, flight.task).op, Op::Put { queue: other, .. } if other == queue)
    }

    /// Whether a command is the first of its queue in the ring, and the queue has room for it.
    fn may_post(&self, at: usize, queue: u16) -> bool {
        let on_queue = |flight: &&Flight| self.is_on(flight, self.flights[at].rank, queue);
        let in_flight =
            self.flights.iter().filter(on_queue).filter(|flight| flight.posted && !flight.is_over()).count();
        in_flight < self.config.in_flight as usize && self.flights[..at].iter().filter(on_queue).all(|f| f.posted)
    }

    pub(super) fn ring_is_full(&self, rank: usize) -> bool {
        let commands = self.flights.iter().filter(|flight| flight.rank == rank && !flight.posted).count();
        commands >= self.config.fifo_depth as usize
    }

    /// Carries out a move.
    pub(super) fn advance(&mut self, at: usize, mv: Move) -> Result<(), ExecError> {
        let lists = self.lists;
        let (rank, role, task, to) = {
            let flight = &self.flights[at];
            (flight.rank, flight.role, flight.task, flight.to)
        };
        let Op::Put { src, dst, arrived, sent, .. } = &lists.tasks[role][task].op else { return Ok(()) };
        let data = dst.region.bytes() != 0;
        match mv {
            Move::Post => {
                self.flights[at].posted = true;
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
        if flight.is_over() && flight.sent {
            // Keeps the order in which puts were posted.
            self.flights.remove(at);
        }
        Ok(())
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
        self.flights.push(Flight {
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

/// A put on its way.
pub(in crate::values) struct Flight {
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

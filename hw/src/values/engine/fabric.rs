//! Puts on their way: read, land, raise their word and are sent, in any order that the fabric permits.

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
        if flight.landed && flight.published && flight.sent {
            // Keeps the order in which puts were posted.
            self.flights.remove(at);
        }
        Ok(())
    }

    /// Hands a put to the fabric.
    pub(super) fn post(&mut self, worker: usize, src: &Region, dst: &Region, at: At) {
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
            data: None,
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
pub(super) struct Flight {
    rank: usize,
    role: usize,
    task: usize,
    to: usize,
    data: Option<Vec<u8>>,
    read: bool,
    landed: bool,
    published: bool,
    sent: bool,
    lags: bool,
    source: Option<Handle>,
    destination: Option<Handle>,
}

#[derive(Clone, Copy)]
pub(super) enum Move {
    Read,
    Land,
    Publish,
    Sent,
}

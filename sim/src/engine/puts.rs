//! Puts: from the CTA's push over the proxy's threads and the NIC's queues to the flag at the receiver.
//!
//! ```text
//! CTA ─push─▶ FIFO ─latency─▶ thread ─post─▶ queue (cap in flight) ─rails─▶ remote memory ─▶ NIC flag, or
//!                                ▲                                              │            receiver's thread ─▶ flag
//!                                └──────────── completion (sent) ◀──── ack ─────┘
//! ```

use super::timers::kind;
use super::{Engine, Here, RankState, ended};
use crate::compile::{NONE, PublishC};
use std::collections::VecDeque;
use tilewire_kernels::Offset;

#[derive(Clone, Copy)]
pub(super) enum Item {
    Post(u32),
    Completion(u32),
    Immediate(u32),
}

#[derive(Default)]
struct Thread {
    items: VecDeque<Item>,
    busy: Option<Item>,
}

#[derive(Default)]
struct Queue {
    in_flight: u32,
    /// Posted commands above the cap.
    backlog: VecDeque<u32>,
    /// In flight behind the active message: a queue sends one after the other, also where they may arrive in any order.
    waiting: VecDeque<u32>,
    active: bool,
    last_landed: u64,
}

/// The proxy and the NIC queues of a rank.
#[derive(Default)]
pub(super) struct Proxy {
    threads: Vec<Thread>,
    queues: Vec<Queue>,
    fifo_used: u32,
    /// CTAs whose push waits for room.
    fifo_waiters: VecDeque<u32>,
}

impl Proxy {
    /// Everything is empty after a run that was not stuck; after one that was, memory is given up.
    pub fn reset(&mut self, threads: usize, queues: usize) {
        self.threads.clear();
        self.threads.resize_with(threads, Thread::default);
        self.queues.clear();
        self.queues.resize_with(queues, Queue::default);
        self.fifo_used = 0;
        self.fifo_waiters.clear();
    }
}

impl<'a> Engine<'a> {
    fn thread_of(&self, queue: u16) -> usize {
        usize::from(queue) % self.c.times.threads as usize
    }

    /// A CTA's push is through, or finds the FIFO full.
    pub(super) fn pushed(&mut self, h: &Here<'a>, own: &mut RankState, w: u32) {
        let proxy = &mut own.proxy;
        if proxy.fifo_used >= self.c.times.fifo_depth {
            proxy.fifo_waiters.push_back(w);
            return;
        }
        proxy.fifo_used += 1;
        own.with_worker(w, |own, cta| {
            let put = h.tasks[cta.task as usize].put;
            self.s.timers.push(h.rank, self.s.timers.now + self.c.times.fifo, kind::FIFO, put, 0);
            self.complete(h, own, cta);
        });
        own.make_runnable(w);
    }

    /// A command can be read from the FIFO.
    pub(super) fn command(&mut self, h: &Here<'a>, own: &mut RankState, put: u32) {
        self.give(h, own, self.thread_of(h.program.puts[put as usize].queue), Item::Post(put));
    }

    /// An immediate has arrived.
    pub(super) fn immediate(&mut self, h: &Here<'a>, own: &mut RankState, flag: u32, queue: u32) {
        self.give(h, own, self.thread_of(queue as u16), Item::Immediate(flag));
    }

    /// The acknowledgement of a put is back.
    pub(super) fn acknowledged(&mut self, h: &Here<'a>, own: &mut RankState, put: u32) {
        self.give(h, own, self.thread_of(h.program.puts[put as usize].queue), Item::Completion(put));
    }

    fn give(&mut self, h: &Here<'a>, own: &mut RankState, thread: usize, item: Item) {
        own.proxy.threads[thread].items.push_back(item);
        self.serve(h, own, thread);
    }

    fn serve(&mut self, h: &Here<'a>, own: &mut RankState, thread: usize) {
        let proxy = &mut own.proxy;
        let state = &mut proxy.threads[thread];
        if state.busy.is_some() {
            return;
        }
        let Some(item) = state.items.pop_front() else { return };
        state.busy = Some(item);
        let times = &self.c.times;
        let time = match item {
            Item::Post(_) => times.post,
            Item::Completion(_) | Item::Immediate(_) => times.completion,
        };
        self.s.timers.push(h.rank, self.s.timers.now + time, kind::THREAD, thread as u32, 0);
        if let Item::Post(_) = item {
            proxy.fifo_used -= 1;
            if let Some(w) = proxy.fifo_waiters.pop_front() {
                self.pushed(h, own, w);
            }
        }
    }

    /// A thread is through with its item.
    pub(super) fn thread_done(&mut self, h: &Here<'a>, own: &mut RankState, thread: usize) {
        let Some(item) = own.proxy.threads[thread].busy.take() else { return };
        let proxy = &mut own.proxy;
        match item {
            Item::Post(put) => {
                let queue = usize::from(h.program.puts[put as usize].queue);
                let state = &mut proxy.queues[queue];
                if state.in_flight < self.c.times.in_flight {
                    state.in_flight += 1;
                    self.post(h, own, queue, put);
                } else {
                    state.backlog.push_back(put);
                }
            }
            Item::Completion(put) => {
                let put = &h.program.puts[put as usize];
                let queue = usize::from(put.queue);
                let state = &mut proxy.queues[queue];
                state.in_flight -= 1;
                let next = state.backlog.pop_front();
                state.in_flight += u32::from(next.is_some());
                if put.sent != NONE {
                    self.raise_from_host(h, own, put.sent);
                }
                if let Some(next) = next {
                    self.post(h, own, queue, next);
                }
            }
            Item::Immediate(flag) => {
                if !self.c.stale_arrivals {
                    self.raise_from_host(h, own, flag);
                }
            }
        }
        self.serve(h, own, thread);
    }

    fn raise_from_host(&mut self, h: &Here<'a>, own: &mut RankState, flag: u32) {
        let visible = self.s.timers.now + self.flag_latency(own, self.c.times.flag_by(PublishC::Proxy));
        self.s.flags.add(&mut self.s.timers, h.rank, flag, 1, visible);
    }

    /// Gives a message to the wire, behind the active one of its queue.
    fn post(&mut self, h: &Here<'a>, own: &mut RankState, queue: usize, put: u32) {
        let state = &mut own.proxy.queues[queue];
        if state.active {
            state.waiting.push_back(put);
            return;
        }
        state.active = true;
        let flow = h.program.puts[put as usize].flow;
        self.flow(h, flow, ended::MESSAGE | put, 1);
    }

    /// The last byte of a message has left.
    pub(super) fn message_ended(&mut self, h: &Here<'a>, own: &mut RankState, put: u32) {
        let p = &h.program.puts[put as usize];
        let mut landed = self.s.timers.now + self.network_latency(own, self.c.times.network);
        let queue = usize::from(p.queue);
        let state = &mut own.proxy.queues[queue];
        if self.c.times.ordered {
            // Noise does not let a message overtake the one before it.
            landed = landed.max(state.last_landed);
            state.last_landed = landed;
        }
        state.active = false;
        if let Some(next) = state.waiting.pop_front() {
            self.post(h, own, queue, next);
        }
        let folded = self.c.folded;
        let target = folded.number(folded.at(self.c.ranks[h.rank], Offset { dn: p.dn, dg: p.dg }));
        self.out.rank_ends[target] = self.out.rank_ends[target].max(landed);
        match p.publish {
            PublishC::Nic | PublishC::NicToHost => {
                if !self.c.stale_arrivals {
                    let visible = landed + self.flag_latency(own, self.c.times.flag_by(p.publish));
                    self.s.flags.add(&mut self.s.timers, target, p.arrived, 1, visible);
                }
            }
            PublishC::Proxy => {
                self.s.timers.push(target, landed, kind::IMMEDIATE, p.arrived, u32::from(p.queue));
            }
        }
        let acknowledged = landed + self.network_latency(own, self.c.times.ack);
        self.s.timers.push(h.rank, acknowledged, kind::ACK, put, 0);
    }
}

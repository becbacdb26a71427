//! Timers of the ranks and the order in which ranks have their turn.
//!
//! Each rank keeps its own timers; a tree over the ranks finds those whose next event (timer or end of a flow) comes first.
//! A timer set for the present time gives its rank another round at that time.
//!
//! Most timers run for one of a few constant latencies, so that those of one kind are set in the order in which they
//! fire: two queues take what comes in order, and a heap takes the rest.

use super::network::Network;
use super::state::bit_of;
use crate::share::NEVER;
use crate::tree::Tree;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Timer kinds, in the order in which simultaneous ones of a rank are handled.
pub(super) mod kind {
    pub const LAUNCH: u8 = 0;
    pub const FLAG_ADD: u8 = 1;
    pub const FLAG_WAKE: u8 = 2;
    pub const PUSHED: u8 = 3;
    pub const FIFO: u8 = 4;
    pub const THREAD: u8 = 5;
    pub const IMMEDIATE: u8 = 6;
    pub const ACK: u8 = 7;
    pub const COLLECTIVE: u8 = 8;
    pub const FILL: u8 = 9;
}

/// Largest value of a timer's second word.
pub(super) const MAX_WORD: u32 = 0xFF_FFFF;

/// A timer that fired.
#[derive(Clone, Copy)]
pub(super) struct Fired {
    pub kind: u8,
    pub a: u32,
    pub b: u32,
}

/// Workers of a word whose first loads are there at the same time.
#[derive(Clone, Copy)]
struct Fills {
    time: u64,
    word: u32,
    workers: u64,
}

/// Timers of a rank, as numbers that sort by time, kind, `a`, then `b`.
struct RankTimers {
    /// When the first of all but fills fires: asked for more often than it changes.
    next: u64,
    queues: [VecDeque<u128>; 2],
    heap: BinaryHeap<Reverse<u128>>,
    /// Ends of waits for first loads, in order of their times only.
    fills: VecDeque<Fills>,
}

impl RankTimers {
    const NEW: Self = Self {
        next: NEVER,
        queues: [VecDeque::new(), VecDeque::new()],
        heap: BinaryHeap::new(),
        fills: VecDeque::new(),
    };

    fn clear(&mut self) {
        self.next = NEVER;
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.heap.clear();
        self.fills.clear();
    }

    fn push(&mut self, key: u128) {
        self.next = self.next.min((key >> 64) as u64);
        for queue in &mut self.queues {
            if queue.back().is_none_or(|&last| last <= key) {
                queue.push_back(key);
                return;
            }
        }
        self.heap.push(Reverse(key));
    }

    /// The first of all timers but fills, and where it is: a queue, or behind them the heap.
    #[inline]
    fn first(&self) -> Option<(u128, usize)> {
        let heap = self.heap.peek().map_or(u128::MAX, |&Reverse(key)| key);
        let mut first = (heap, self.queues.len());
        for (place, queue) in self.queues.iter().enumerate() {
            if let Some(&key) = queue.front()
                && key < first.0
            {
                first = (key, place);
            }
        }
        (first.0 != u128::MAX).then_some(first)
    }

    fn pop(&mut self) -> Option<u128> {
        let (key, place) = self.first()?;
        match self.queues.get_mut(place) {
            Some(queue) => drop(queue.pop_front()),
            None => drop(self.heap.pop()),
        }
        self.next = self.first().map_or(NEVER, |(key, _)| (key >> 64) as u64);
        Some(key)
    }

    fn next_time(&self) -> u64 {
        self.next.min(self.fills.front().map_or(NEVER, |fills| fills.time))
    }
}

#[derive(Default)]
pub(super) struct Timers {
    pub now: u64,
    ranks: Vec<RankTimers>,
    tree: Tree,
    /// When the first flow of each rank ends.
    flows_end: Vec<u64>,
    /// Ranks whose next event may have moved.
    stale: Vec<u32>,
    is_stale: Vec<bool>,
    /// Ranks whose flows end at another time than before.
    ends_moved: Vec<bool>,
    next_round: Vec<u32>,
    in_round: Vec<bool>,
}

impl Timers {
    pub fn reset(&mut self, ranks: usize) {
        self.now = 0;
        self.ranks.resize_with(ranks, || RankTimers::NEW);
        self.ranks.iter_mut().for_each(RankTimers::clear);
        self.tree.reset(ranks);
        self.flows_end.clear();
        self.flows_end.resize(ranks, NEVER);
        self.stale.clear();
        self.is_stale.clear();
        self.is_stale.resize(ranks, false);
        self.ends_moved.clear();
        self.ends_moved.resize(ranks, false);
        self.next_round.clear();
        self.in_round.clear();
        self.in_round.resize(ranks, false);
    }

    /// Sets a timer; simultaneous timers of a rank fire by kind, then `a`, then `b`.
    pub fn push(&mut self, rank: usize, time: u64, kind: u8, a: u32, b: u32) {
        debug_assert!(b <= MAX_WORD);
        let key = u128::from(time) << 64 | u128::from(kind) << 56 | u128::from(a) << 24 | u128::from(b);
        self.ranks[rank].push(key);
        self.mark_stale(rank);
        if time <= self.now && !self.in_round[rank] {
            self.in_round[rank] = true;
            self.next_round.push(rank as u32);
        }
    }

    /// Sets the timer of a worker that waits for its first loads.
    pub fn push_fill(&mut self, rank: usize, time: u64, worker: u32) {
        let (word, set) = bit_of(worker);
        self.push_fills(rank, time, word, set);
    }

    /// As [`Timers::push_fill`], for workers of a word.
    pub fn push_fills(&mut self, rank: usize, time: u64, word: u32, mut workers: u64) {
        let fills = &mut self.ranks[rank].fills;
        match fills.back_mut() {
            Some(last) if last.time == time && last.word == word => last.workers |= workers,
            Some(last) if last.time > time => {
                while workers != 0 {
                    self.push(rank, time, kind::FILL, word * 64 + workers.trailing_zeros(), 0);
                    workers &= workers - 1;
                }
            }
            _ => {
                fills.push_back(Fills { time, word, workers });
                self.mark_stale(rank);
            }
        }
    }

    /// The next workers, as a word of their bits, whose first loads are there by now. Fills come last among simultaneous
    /// timers, and their order does not matter.
    pub fn pop_fill(&mut self, rank: usize) -> Option<(u32, u64)> {
        let fills = &mut self.ranks[rank].fills;
        let &Fills { word, workers, .. } = fills.front().filter(|fills| fills.time <= self.now)?;
        fills.pop_front();
        Some((word, workers))
    }

    /// The next timer of a rank that is due; those of [`Timers::push_fill`] apart.
    pub fn pop_due(&mut self, rank: usize) -> Option<Fired> {
        let timers = &mut self.ranks[rank];
        let key = if timers.next <= self.now { timers.pop() } else { None }?;
        Some(Fired { kind: (key >> 56) as u8, a: (key >> 24) as u32, b: key as u32 & MAX_WORD })
    }

    /// Whether a flow of a rank may end now.
    pub fn has_ends(&self, rank: usize) -> bool {
        self.flows_end[rank] <= self.now
    }

    pub fn mark_stale(&mut self, rank: usize) {
        if !self.is_stale[rank] {
            self.is_stale[rank] = true;
            self.stale.push(rank as u32);
        }
    }

    /// The first end of a rank's flows has moved.
    pub fn move_ends(&mut self, rank: usize) {
        self.ends_moved[rank] = true;
        self.mark_stale(rank);
    }

    /// Moves to the time of the next event and collects the ranks that have one then; false when none is left.
    pub fn advance(&mut self, round: &mut Vec<u32>) -> bool {
        let next = self.tree.min();
        if next == NEVER {
            return false;
        }
        debug_assert!(next >= self.now);
        self.now = next;
        round.clear();
        // A timer that was set for time 0 before the run began is found by the tree, not by its round.
        for rank in self.next_round.drain(..) {
            self.in_round[rank as usize] = false;
        }
        self.tree.ranks_at(next, round);
        true
    }

    /// The ranks that have another round at the present time.
    pub fn next_round(&mut self, round: &mut Vec<u32>) {
        round.clear();
        std::mem::swap(round, &mut self.next_round);
        round.sort_unstable();
        for &rank in &*round {
            self.in_round[rank as usize] = false;
        }
    }

    /// Finds the next event of every rank that changed.
    pub fn refresh(&mut self, network: &Network) {
        // Ranks that do the same change together.
        let many = 4 * self.stale.len() > self.ranks.len();
        for i in 0..self.stale.len() {
            let rank = self.stale[i] as usize;
            self.is_stale[rank] = false;
            if std::mem::take(&mut self.ends_moved[rank]) {
                self.flows_end[rank] = network.next_end(rank);
            }
            let next = self.ranks[rank].next_time().min(self.flows_end[rank]);
            if many {
                self.tree.set_leaf(rank, next);
            } else {
                self.tree.set(rank, next);
            }
        }
        if many {
            self.tree.rebuild();
        }
        self.stale.clear();
    }
}

//! The device-to-host ring that CTAs of a GPU push puts into, as a proxy reads it.
//!
//! ```text
//! slot:  run (upper 32 bits) | task + 1 (lower 32 bits)
//! ```
//!
//! A slot names its run, so that the ring needs no clearing, and it is as long as a run has puts, so that it is never full.

use super::Command;
use super::fifo::Source;
use crate::memory::SharedMemory;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Memory that the device writes slots into.
pub trait Slots: Sync {
    /// Slot `index`; what was written before it is visible to whoever sees it.
    fn slot(&self, index: usize) -> u64;
}

impl Slots for SharedMemory {
    fn slot(&self, index: usize) -> u64 {
        let slot = self.get(index);
        std::sync::atomic::fence(Ordering::Acquire);
        slot
    }
}

/// Host threads in place of a device.
impl Slots for [AtomicU64] {
    fn slot(&self, index: usize) -> u64 {
        self[index].load(Ordering::Acquire)
    }
}

/// What a device writes for a task's put.
pub const fn slot(run: u32, task: u32) -> u64 {
    (run as u64) << 32 | (task as u64 + 1)
}

/// The slots of one run, in the order in which the device fills them.
pub struct Ring<'a, S: Slots + ?Sized> {
    memory: &'a S,
    slots: Range<usize>,
    run: u32,
}

impl<'a, S: Slots + ?Sized> Ring<'a, S> {
    /// The slots of a run.
    pub const fn new(memory: &'a S, slots: Range<usize>, run: u32) -> Self {
        Self { memory, slots, run }
    }

    /// Task of the next put, once it was asked for.
    pub fn next_task(&mut self) -> Option<usize> {
        if self.is_over() {
            return None;
        }
        let slot = self.memory.slot(self.slots.start);
        (slot >> 32 == u64::from(self.run)).then(|| {
            self.slots.start += 1;
            (slot & u64::from(u32::MAX)) as usize - 1
        })
    }

    /// Whether every put of the run was asked for.
    pub const fn is_over(&self) -> bool {
        self.slots.start >= self.slots.end
    }
}

/// A ring as the source of several proxies, over any transport: a put is the writes that it consists of, and a queue
/// belongs to one proxy.
pub struct Puts<'a, S: Slots + ?Sized> {
    /// The writes of each task's put.
    writes: &'a [Vec<Command>],
    state: Mutex<State<'a, S>>,
}

struct State<'a, S: Slots + ?Sized> {
    ring: Ring<'a, S>,
    /// Writes that were asked for, by proxy.
    waiting: Vec<VecDeque<Command>>,
    /// Puts so far.
    puts: u32,
}

impl<'a, S: Slots + ?Sized> Puts<'a, S> {
    /// `writes[task]` are the writes of a task's put.
    pub fn new(ring: Ring<'a, S>, writes: &'a [Vec<Command>], proxies: usize) -> Self {
        let waiting = (0..proxies.max(1)).map(|_| VecDeque::new()).collect();
        Self { writes, state: Mutex::new(State { ring, waiting, puts: 0 }) }
    }

    /// What a proxy takes.
    pub const fn of(&self, proxy: usize) -> Part<'_, 'a, S> {
        Part { puts: self, proxy }
    }

    /// Takes what the device has asked for since; whether it has asked for all.
    pub fn look(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while self.move_one(&mut state) {}
        state.ring.is_over()
    }

    fn move_one(&self, state: &mut State<'_, S>) -> bool {
        let Some(task) = state.ring.next_task() else { return false };
        let proxies = state.waiting.len();
        for &write in &self.writes[task] {
            let command = Command { put: state.puts, ..write };
            state.waiting[usize::from(write.queue) % proxies].push_back(command);
        }
        state.puts += 1;
        true
    }
}

/// What one proxy takes of a ring.
pub struct Part<'p, 'a, S: Slots + ?Sized> {
    puts: &'p Puts<'a, S>,
    proxy: usize,
}

impl<S: Slots + ?Sized> Source for Part<'_, '_, S> {
    fn take(&self) -> Option<Command> {
        let mut state = self.puts.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.waiting[self.proxy].is_empty() && self.puts.move_one(&mut state) {}
        state.waiting[self.proxy].pop_front()
    }
}

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

/// A ring as a source of a [`super::proxy::Proxy`], over any transport: a put is the writes that it consists of.
pub struct Puts<'a, S: Slots + ?Sized> {
    /// The writes of each task's put.
    writes: &'a [Vec<Command>],
    state: Mutex<(Ring<'a, S>, VecDeque<Command>, u32)>,
}

impl<'a, S: Slots + ?Sized> Puts<'a, S> {
    /// `writes[task]` are the writes of a task's put.
    pub const fn new(ring: Ring<'a, S>, writes: &'a [Vec<Command>]) -> Self {
        Self { writes, state: Mutex::new((ring, VecDeque::new(), 0)) }
    }
}

impl<S: Slots + ?Sized> Source for Puts<'_, S> {
    fn take(&self) -> Option<Command> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (ring, waiting, put) = &mut *state;
        if waiting.is_empty() {
            let task = ring.next_task()?;
            waiting.extend(self.writes[task].iter().map(|&write| Command { put: *put, ..write }));
            *put += 1;
        }
        waiting.pop_front()
    }
}

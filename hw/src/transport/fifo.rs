//! The bounded command FIFO between CTAs and a proxy thread.

use super::Command;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where a proxy takes commands from: CTAs that are threads, or the ring of a GPU.
pub trait Source: Sync {
    /// The oldest command that waits. For one consumer at a time.
    fn take(&self) -> Option<Command>;
}

impl Source for Fifo<Command> {
    fn take(&self) -> Option<Command> {
        self.pop()
    }
}

/// A bounded queue with many producers and one consumer.
///
/// Each slot has a turn: `2 * lap` when it is free for that lap, `2 * lap + 1` when it holds that lap's item. Source of
/// the idea: D. Vyukov, "Bounded MPMC queue".
pub struct Fifo<T> {
    slots: Box<[Slot<T>]>,
    head: AtomicU64,
    tail: AtomicU64,
}

struct Slot<T> {
    turn: AtomicU64,
    item: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a slot's item is written by the producer that won its turn and read by the consumer after it saw the turn
// change; both changes release and acquire.
unsafe impl<T: Send> Send for Fifo<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Fifo<T> {}

impl<T: Copy> Fifo<T> {
    /// A queue for `depth` items, at least one.
    pub fn new(depth: usize) -> Self {
        let slot = |_| Slot { turn: AtomicU64::new(0), item: UnsafeCell::new(MaybeUninit::uninit()) };
        Self { slots: (0..depth.max(1)).map(slot).collect(), head: AtomicU64::new(0), tail: AtomicU64::new(0) }
    }

    /// Slots.
    pub fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Items pushed since it was made.
    pub fn pushed(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    fn lap(&self, at: u64) -> (&Slot<T>, u64) {
        let depth = self.slots.len() as u64;
        (&self.slots[(at % depth) as usize], at / depth)
    }

    /// Appends an item, or gives it back when the queue is full.
    ///
    /// # Errors
    /// The item.
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut at = self.head.load(Ordering::Relaxed);
        loop {
            let (slot, lap) = self.lap(at);
            let turn = slot.turn.load(Ordering::Acquire);
            match turn.cmp(&(2 * lap)) {
                std::cmp::Ordering::Less => return Err(item),
                std::cmp::Ordering::Greater => at = self.head.load(Ordering::Relaxed),
                std::cmp::Ordering::Equal => {
                    match self.head.compare_exchange_weak(at, at + 1, Ordering::AcqRel, Ordering::Relaxed) {
                        Ok(_) => {
                            // SAFETY: the exchange gave this slot's turn to this producer alone.
                            unsafe { (*slot.item.get()).write(item) };
                            slot.turn.store(2 * lap + 1, Ordering::Release);
                            return Ok(());
                        }
                        Err(now) => at = now,
                    }
                }
            }
        }
    }

    /// Takes the oldest item. For one consumer at a time.
    pub fn pop(&self) -> Option<T> {
        let at = self.tail.load(Ordering::Relaxed);
        let (slot, lap) = self.lap(at);
        if slot.turn.load(Ordering::Acquire) != 2 * lap + 1 {
            return None;
        }
        // SAFETY: the turn says that the producer is done, and it comes back to producers only below.
        let item = unsafe { (*slot.item.get()).assume_init() };
        slot.turn.store(2 * (lap + 1), Ordering::Release);
        self.tail.store(at + 1, Ordering::Relaxed);
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::Fifo;

    #[test]
    fn a_full_queue_gives_the_item_back_and_keeps_order() {
        let fifo = Fifo::new(2);
        assert_eq!((fifo.push(1), fifo.push(2), fifo.push(3)), (Ok(()), Ok(()), Err(3)));
        assert_eq!((fifo.pop(), fifo.push(3)), (Some(1), Ok(())));
        assert_eq!((fifo.pop(), fifo.pop(), fifo.pop(), fifo.pushed()), (Some(2), Some(3), None, 3));
    }

    #[test]
    fn many_producers_lose_and_double_nothing() {
        // A full queue of 7 ends a thread's turn: on a busy machine each costs milliseconds.
        const EACH: u64 = 3_000;
        let fifo = Fifo::new(7);
        let (mut last, mut in_order) = ([0u64; 3], true);
        std::thread::scope(|scope| {
            let fifo = &fifo;
            let producer = |producer: u64| {
                scope.spawn(move || {
                    for item in 1..=EACH {
                        while fifo.push((producer, item)).is_err() {
                            std::thread::yield_now();
                        }
                    }
                })
            };
            let producers: Vec<_> = (0..3).map(producer).collect();
            // Nothing is judged before all are done: they would wait for ever for room that nobody makes.
            loop {
                let over = producers.iter().all(std::thread::ScopedJoinHandle::is_finished);
                match fifo.pop() {
                    Some((producer, item)) => {
                        in_order &= item == last[producer as usize] + 1;
                        last[producer as usize] = item;
                    }
                    None if over => break,
                    None => std::thread::yield_now(),
                }
            }
        });
        assert!(in_order, "items of one producer keep their order");
        assert_eq!((last, fifo.pop()), ([EACH; 3], None));
    }
}

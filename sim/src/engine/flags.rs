//! Flags: what was added, when it is visible, and who waits.
//!
//! A *countdown* flag has one level that is also the sum of its adds: it counts down, remembers the latest time at which
//! an add becomes visible, and wakes its waiters once. Any other flag that somebody waits for counts up, and each add is
//! an event at the time when it becomes visible. Adds to a flag that nobody waits for change nothing.

use super::timers::{Timers, kind};
use super::{Engine, Here};
use crate::compile::{Compiled, NONE, SignalC};

/// A flag of a family without waits, in `Program::countdown`.
pub const UNWATCHED: u32 = u32::MAX;

/// Marks a waiter that is a window slot of a `Ready` role instead of a worker.
pub(super) const SLOT: u32 = 1 << 31;

/// Marks `left` of a flag that counts up.
const COUNTS_UP: u32 = 1 << 31;

#[derive(Clone, Copy)]
struct Flag {
    /// Adds still missing; with [`COUNTS_UP`], adds so far; [`UNWATCHED`].
    left: u32,
    /// First waiter.
    head: u32,
    /// When the latest add becomes visible.
    ready_at: u64,
}

const MET: Flag = Flag { left: 0, head: NONE, ready_at: 0 };

/// Flags of all ranks.
#[derive(Default)]
pub(super) struct Flags {
    per_rank: usize,
    state: Vec<Flag>,
    /// Initial flags of each program.
    fresh: Vec<Vec<Flag>>,
}

impl Flags {
    pub fn reset(&mut self, c: &Compiled, compute_only: bool) {
        if self.fresh.len() != c.programs.len() {
            let flag = |&level: &u32| Flag {
                left: match level {
                    UNWATCHED => UNWATCHED,
                    0 => COUNTS_UP,
                    level => level,
                },
                ..MET
            };
            self.fresh = c.programs.iter().map(|p| p.countdown.iter().map(flag).collect()).collect();
            self.per_rank = self.fresh[0].len();
        }
        self.state.clear();
        for &program in &c.program_of {
            self.state.extend_from_slice(&self.fresh[program as usize]);
        }
        let mut met = vec![false; c.dropped.len()];
        if compute_only {
            met.copy_from_slice(&c.dropped);
        }
        for rank in 0..c.ranks.len() {
            if c.stale_arrivals {
                for put in &c.programs[c.program_of[rank] as usize].puts {
                    met[c.family_of(put.arrived)] = true;
                }
            }
            let flags = &mut self.state[rank * self.per_rank..(rank + 1) * self.per_rank];
            for (family, _) in met.iter().enumerate().filter(|&(_, met)| *met) {
                flags[c.family_base[family] as usize..c.family_base[family + 1] as usize].fill(MET);
            }
        }
    }

    /// Adds to a flag; the add is visible at `visible`.
    #[inline]
    pub fn add(&mut self, timers: &mut Timers, rank: usize, flag: u32, add: u32, visible: u64) {
        let state = &mut self.state[rank * self.per_rank + flag as usize];
        if state.left < COUNTS_UP {
            if state.left == 0 {
                // Satisfied from the start: an epoch before left it so.
                return;
            }
            state.left = state.left.saturating_sub(add);
            state.ready_at = state.ready_at.max(visible);
            if state.left == 0 && state.head != NONE {
                timers.push(rank, state.ready_at, kind::FLAG_WAKE, flag, 0);
            }
        } else if state.left != UNWATCHED {
            timers.push(rank, visible, kind::FLAG_ADD, flag, add);
        }
    }

    /// An add to a flag that counts up becomes visible.
    pub fn count(&mut self, rank: usize, flag: u32, add: u32) {
        self.state[rank * self.per_rank + flag as usize].left += add;
    }

    /// Whether a flag has reached a level.
    #[inline]
    pub fn is_met(&self, rank: usize, flag: u32, level: u32, now: u64) -> bool {
        let state = &self.state[rank * self.per_rank + flag as usize];
        if state.left == 0 {
            return state.ready_at <= now;
        }
        level == 0 || (state.left >= COUNTS_UP && state.left & !COUNTS_UP >= level)
    }

    /// Puts a waiter before the others and returns who was first.
    fn enqueue(&mut self, timers: &mut Timers, rank: usize, flag: u32, waiter: u32) -> u32 {
        let state = &mut self.state[rank * self.per_rank + flag as usize];
        if state.left == 0 {
            timers.push(rank, state.ready_at, kind::FLAG_WAKE, flag, 0);
        }
        std::mem::replace(&mut state.head, waiter)
    }

    fn take_waiters(&mut self, rank: usize, flag: u32) -> u32 {
        std::mem::replace(&mut self.state[rank * self.per_rank + flag as usize].head, NONE)
    }

    /// Value of a flag of a program, visible or not.
    pub fn value(&self, c: &Compiled, rank: usize, flag: u32) -> u32 {
        let left = self.state[rank * self.per_rank + flag as usize].left;
        match c.programs[c.program_of[rank] as usize].countdown[flag as usize] {
            UNWATCHED => 0,
            0 => left & !COUNTS_UP,
            level => level - left,
        }
    }
}

impl<'a> Engine<'a> {
    /// Raises the signals of a task that are `early`, or those that are not.
    #[inline]
    pub(super) fn raise(&mut self, h: &Here<'a>, signals: &'a [SignalC], early: bool) {
        for (nth, signal) in signals.iter().enumerate() {
            if signal.early == early {
                self.raise_one(h, signal, nth);
            }
        }
    }

    /// Raises the `nth` flag of a task: a CTA raises one after the other.
    #[inline]
    pub(super) fn raise_one(&mut self, h: &Here<'a>, signal: &SignalC, nth: usize) {
        let mut gpu = h.gpu + usize::from(signal.dg);
        if gpu >= self.gpus {
            gpu -= self.gpus;
        }
        let latency = if signal.remote { self.flag_remote } else { self.flag_local };
        let latency = self.flag_latency(h.rank, latency);
        let visible = self.s.timers.now + latency + nth as u64 * self.c.times.signal;
        self.s.flags.add(&mut self.s.timers, h.node0 + gpu, signal.flag, signal.add, visible);
    }

    /// Lets those who wait for a flag look again.
    pub(super) fn wake(&mut self, h: &Here<'a>, flag: u32) {
        let mut waiter = self.s.flags.take_waiters(h.rank, flag);
        while waiter != NONE {
            if waiter & SLOT == 0 {
                let next = self.s.pauses[h.worker0 + waiter as usize].next;
                self.make_runnable(h, waiter);
                waiter = next;
            } else {
                let slot = (waiter & !SLOT) as usize;
                let next = self.s.slot_next[h.slot0 + slot];
                self.check_slot(h, slot);
                waiter = next;
            }
        }
    }

    /// Puts a waiter on a flag that is not met, and sees to it that it is woken.
    pub(super) fn register(&mut self, h: &Here<'a>, flag: u32, waiter: u32) {
        let behind = self.s.flags.enqueue(&mut self.s.timers, h.rank, flag, waiter);
        if waiter & SLOT == 0 {
            self.s.pauses[h.worker0 + waiter as usize].next = behind;
        } else {
            self.s.slot_next[h.slot0 + (waiter & !SLOT) as usize] = behind;
        }
    }

    /// The first unmet flag of some waits.
    #[inline]
    pub(super) fn first_unmet(&self, h: &Here<'a>, first: u32, count: u8) -> Option<u32> {
        match count {
            0 => None,
            1 => {
                let wait = &h.program.waits[first as usize];
                if wait.count != 1 {
                    return self.first_unmet_of_some(h, first, 1);
                }
                let met = self.s.flags.is_met(h.rank, wait.flag, wait.level, self.s.timers.now);
                (!met).then_some(wait.flag)
            }
            _ => self.first_unmet_of_some(h, first, count),
        }
    }

    fn first_unmet_of_some(&self, h: &Here<'a>, first: u32, count: u8) -> Option<u32> {
        let now = self.s.timers.now;
        for wait in &h.program.waits[first as usize..first as usize + usize::from(count)] {
            let mut flag = wait.flag;
            for _ in 0..wait.count {
                if !self.s.flags.is_met(h.rank, flag, wait.level, now) {
                    return Some(flag);
                }
                flag += wait.stride;
            }
        }
        None
    }
}

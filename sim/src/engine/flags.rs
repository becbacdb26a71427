//! Flags: what was added, when it is visible, and who waits.
//!
//! A *countdown* flag has one level that is also the sum of its adds: it counts down, remembers the latest time at which
//! an add becomes visible, and wakes its waiters once. Any other flag that somebody waits for counts up. An add that finds
//! the ones before it visible, or that becomes visible together with them, is only noted with its time, and is an event
//! when somebody waits for it then; other adds are events at the times when they become visible. Adds to a flag that
//! nobody waits for change nothing.

use super::timers::{Timers, kind};
use super::{Engine, Here, RankState};
use crate::compile::{Compiled, NONE, SPAN, SignalC, WaitC};

/// A flag of a family without waits, in `Program::countdown`.
pub const UNWATCHED: u32 = u32::MAX;

/// Marks a waiter that is a window slot of a `Ready` role instead of a worker.
pub(super) const SLOT: u32 = 1 << 31;

/// Marks `left` of a flag that counts up.
const COUNTS_UP: u32 = 1 << 31;

#[derive(Clone, Copy)]
struct Flag {
    /// Adds still missing; with [`COUNTS_UP`], the sum so far; [`UNWATCHED`].
    left: u32,
    /// First waiter.
    head: u32,
    /// When the latest add becomes visible. Of a flag that counts up: when the noted adds do.
    ready_at: u64,
}

/// What only a flag that counts up needs.
#[derive(Clone, Copy, Default)]
struct Counting {
    /// The lowest level that a waiter needs; holds while there is one.
    wanted: u32,
    /// Sum of the noted adds.
    noted: u32,
}

/// A span on a rank: its first flags are met, and those who wait for all of them wait here, so that only the span itself
/// waits for one flag after the other.
#[derive(Clone, Copy)]
pub(super) struct SpanState {
    /// Flags at the beginning that are met.
    reached: u32,
    /// The flag that it waits for, or waited for last.
    blocked: u32,
    /// First waiter.
    head: u32,
    /// Who waits for the same flag.
    next: u32,
}

impl Flag {
    /// The sum of the adds to a flag that counts up, noted ones that are not visible included.
    const fn sum(&self) -> u32 {
        self.left & !COUNTS_UP
    }
}

impl SpanState {
    pub const NEW: Self = Self { reached: 0, blocked: NONE, head: NONE, next: NONE };
}

const MET: Flag = Flag { left: 0, head: NONE, ready_at: 0 };

/// Flags of all ranks.
#[derive(Default)]
pub(super) struct Flags {
    per_rank: usize,
    state: Vec<Flag>,
    counting: Vec<Counting>,
    /// Initial flags of each program.
    fresh: Vec<Vec<Flag>>,
    /// Of the adds that become visible at this very moment, those to flags from here on are yet to come: simultaneous
    /// adds come in the order of their flags.
    horizon: u32,
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
        self.counting.clear();
        self.counting.resize(self.state.len(), Counting::default());
        self.horizon = u32::MAX;
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
    #[expect(clippy::inline_always, reason = "a call costs as much as the work")]
    #[inline(always)]
    pub fn add(&mut self, timers: &mut Timers, rank: usize, flag: u32, add: u32, visible: u64) {
        let state = &mut self.state[rank * self.per_rank + flag as usize];
        // One call, the last thing that happens: a function that ends so has no registers to save.
        let (time, kind, add) = if state.left < COUNTS_UP {
            if state.left == 0 {
                // Satisfied from the start: an epoch before left it so.
                return;
            }
            state.left = state.left.saturating_sub(add);
            state.ready_at = state.ready_at.max(visible);
            if state.left > 0 || state.head == NONE {
                return;
            }
            (state.ready_at, kind::FLAG_WAKE, 0)
        } else {
            if state.left == UNWATCHED {
                return;
            }
            let counting = &mut self.counting[rank * self.per_rank + flag as usize];
            if state.ready_at < timers.now {
                counting.noted = 0;
            }
            if state.ready_at < timers.now || state.ready_at == visible {
                let told = counting.noted > 0 && state.sum() >= counting.wanted;
                counting.noted += add;
                state.left += add;
                state.ready_at = visible;
                if state.head == NONE || told || state.sum() < counting.wanted {
                    return;
                }
                (visible, kind::FLAG_ADD, 0)
            } else {
                (visible, kind::FLAG_ADD, add)
            }
        };
        timers.push(rank, time, kind, flag, add);
    }

    /// An add to a flag that counts up becomes visible, 0 for one that was noted before; whether waiters should look.
    pub fn count(&mut self, rank: usize, flag: u32, add: u32) -> bool {
        let at = rank * self.per_rank + flag as usize;
        self.state[at].left += add;
        self.horizon = flag + 1;
        self.state[at].head != NONE && self.state[at].sum() >= self.counting[at].wanted
    }

    /// Sets which of the adds that become visible at this moment have come.
    pub fn adds_have_come(&mut self, all: bool) {
        self.horizon = if all { u32::MAX } else { 0 };
    }

    /// Whether a flag of the rank whose flags begin at `flag0` has reached a level.
    #[inline]
    pub fn is_met(&self, flag0: usize, flag: u32, level: u32, now: u64) -> bool {
        let state = &self.state[flag0 + flag as usize];
        if state.left == 0 {
            return state.ready_at <= now;
        }
        if level == 0 || state.left < COUNTS_UP || state.sum() < level {
            return level == 0;
        }
        state.ready_at < now
            || (state.ready_at == now && flag < self.horizon)
            || state.sum() - self.counting[flag0 + flag as usize].noted >= level
    }

    /// Puts a waiter before the others and returns who was first.
    fn enqueue(&mut self, timers: &mut Timers, rank: usize, flag: u32, level: u32, waiter: u32) -> u32 {
        let at = rank * self.per_rank + flag as usize;
        let state = &mut self.state[at];
        if state.left == 0 {
            timers.push(rank, state.ready_at, kind::FLAG_WAKE, flag, 0);
        } else if state.left >= COUNTS_UP {
            let wanted = &mut self.counting[at].wanted;
            *wanted = if state.head == NONE { level } else { level.min(*wanted) };
            if state.sum() >= level {
                timers.push(rank, state.ready_at, kind::FLAG_ADD, flag, 0);
            }
        }
        std::mem::replace(&mut state.head, waiter)
    }

    fn take_waiters(&mut self, rank: usize, flag: u32) -> u32 {
        std::mem::replace(&mut self.state[rank * self.per_rank + flag as usize].head, NONE)
    }

    /// When the last noted add becomes visible.
    pub fn last_noted(&self) -> u64 {
        let noted = self.state.iter().filter(|state| state.left >= COUNTS_UP).map(|state| state.ready_at);
        noted.max().unwrap_or(0)
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

impl RankState {
    /// The flag behind what somebody waits, or has waited, for.
    pub(super) fn flag_of(&self, on: u32) -> u32 {
        if on & SPAN == 0 { on } else { self.spans[(on & !SPAN) as usize].blocked }
    }
}

impl<'a> Engine<'a> {
    /// Raises a flag `after` from now.
    #[inline(never)]
    pub(super) fn raise_one(&mut self, h: &Here<'a>, own: &mut RankState, signal: &SignalC, after: u64) {
        let mut gpu = h.gpu + usize::from(signal.dg);
        if gpu >= self.gpus {
            gpu -= self.gpus;
        }
        let latency = if signal.remote { self.flag_remote } else { self.flag_local };
        if self.c.noise.is_some() {
            return self.add_unsteadily(own, h.node0 + gpu, signal, after, latency);
        }
        let visible = self.s.timers.now + after + latency;
        self.s.flags.add(&mut self.s.timers, h.node0 + gpu, signal.flag, signal.add, visible);
    }

    #[cold]
    #[inline(never)]
    fn add_unsteadily(&mut self, own: &mut RankState, rank: usize, signal: &SignalC, after: u64, latency: u64) {
        let visible = self.s.timers.now + after + self.flag_latency(own, latency);
        self.s.flags.add(&mut self.s.timers, rank, signal.flag, signal.add, visible);
    }

    /// Lets those who wait for a flag look again.
    pub(super) fn wake(&mut self, h: &Here<'a>, own: &mut RankState, flag: u32) {
        let mut waiter = self.s.flags.take_waiters(h.rank, flag);
        while waiter != NONE {
            waiter = if waiter & SLOT == 0 && waiter & SPAN != 0 {
                let span = waiter & !SPAN;
                let next = own.spans[span as usize].next;
                self.wake_span(h, own, span);
                next
            } else {
                self.wake_one(h, own, waiter)
            };
        }
    }

    /// Lets a worker or a window slot look again; returns who waits behind it.
    fn wake_one(&mut self, h: &Here<'a>, own: &mut RankState, waiter: u32) -> u32 {
        if waiter & SLOT == 0 {
            let next = own.pauses[waiter as usize].next;
            own.make_runnable(waiter);
            next
        } else {
            let slot = (waiter & !SLOT) as usize;
            let next = own.slot_next[slot];
            self.check_slot(h, own, slot);
            next
        }
    }

    /// The flag that held a span back is there: waits for the next one that is not, or wakes those who wait for all.
    fn wake_span(&mut self, h: &Here<'a>, own: &mut RankState, span: u32) {
        if self.block_span(h, own, span) {
            return;
        }
        let mut waiter = std::mem::replace(&mut own.spans[span as usize].head, NONE);
        while waiter != NONE {
            waiter = self.wake_one(h, own, waiter);
        }
    }

    /// Puts a span on its first unmet flag; false when all are met.
    fn block_span(&mut self, h: &Here<'a>, own: &mut RankState, span: u32) -> bool {
        let reached = self.reach(h, own, span);
        let run = &h.program.spans[span as usize];
        if reached == run.count {
            return false;
        }
        let flag = run.at(reached);
        let behind = self.s.flags.enqueue(&mut self.s.timers, h.rank, flag, run.level, SPAN | span);
        let state = &mut own.spans[span as usize];
        state.next = behind;
        state.blocked = flag;
        true
    }

    /// Puts a waiter on an unmet flag or span, and sees to it that it is woken.
    pub(super) fn register(&mut self, h: &Here<'a>, own: &mut RankState, wait: WaitC, waiter: u32) {
        let behind = if wait.on & SPAN == 0 {
            self.s.flags.enqueue(&mut self.s.timers, h.rank, wait.on, wait.level, waiter)
        } else {
            let span = wait.on & !SPAN;
            let behind = std::mem::replace(&mut own.spans[span as usize].head, waiter);
            if behind == NONE {
                self.block_span(h, own, span);
            }
            behind
        };
        if waiter & SLOT == 0 {
            own.pauses[waiter as usize].next = behind;
        } else {
            own.slot_next[(waiter & !SLOT) as usize] = behind;
        }
    }

    /// Flags at the beginning of a span that are met.
    pub(super) fn reach(&mut self, h: &Here<'a>, own: &mut RankState, span: u32) -> u32 {
        let run = &h.program.spans[span as usize];
        let (flags, now) = (&self.s.flags, self.s.timers.now);
        let state = &mut own.spans[span as usize];
        while state.reached < run.count && flags.is_met(h.flag0, run.at(state.reached), run.level, now) {
            state.reached += 1;
        }
        state.reached
    }

    /// Whether all that a wait is for is there.
    #[inline]
    pub(super) fn is_met(&mut self, h: &Here<'a>, own: &mut RankState, wait: WaitC) -> bool {
        if wait.on & SPAN == 0 {
            return self.s.flags.is_met(h.flag0, wait.on, wait.level, self.s.timers.now);
        }
        let span = wait.on & !SPAN;
        let count = h.program.spans[span as usize].count;
        // Most look at a span that is complete.
        own.spans[span as usize].reached == count || self.reach(h, own, span) == count
    }

    /// As [`Engine::is_met`], once the timers of this time have fired: a span that somebody waits for is not met then.
    pub(super) fn is_met_by_now(&mut self, h: &Here<'a>, own: &mut RankState, wait: WaitC) -> bool {
        let awaited = wait.on & SPAN != 0 && own.spans[(wait.on & !SPAN) as usize].head != NONE;
        debug_assert!(!awaited || !self.is_met(h, own, wait), "a waiter was not woken");
        !awaited && self.is_met(h, own, wait)
    }

    /// The first of some waits that is not met.
    #[inline]
    pub(super) fn first_unmet(&mut self, h: &Here<'a>, own: &mut RankState, first: u32, count: u8) -> Option<WaitC> {
        if count == 0 {
            return None;
        }
        let waits = &h.waits[first as usize..first as usize + usize::from(count)];
        waits.iter().copied().find(|&wait| !self.is_met(h, own, wait))
    }
}

//! A group: flows that progress alike.

use super::{FULL_SPEED, Flows, NEVER};

/// Flows of a class that end together.
#[derive(Clone, Copy)]
struct Batch {
    /// Value of the group's clock at which the flows end, low word.
    low: u64,
    /// The clock's high word.
    high: u64,
    flows: Flows,
}

impl Batch {
    const fn new(ends: u128, class: u32, tag: u32, set: u64) -> Self {
        Self { low: ends as u64, high: (ends >> 64) as u64, flows: Flows { class, tag, set } }
    }

    const fn ends(&self) -> u128 {
        (self.high as u128) << 64 | self.low as u128
    }
}

/// The clock of a group and its flows; one cache line.
pub(super) struct Group {
    pub v: u128,
    /// Time at which `v` holds.
    pub since: u64,
    pub theta: u64,
    /// By the value of the clock at which they end.
    list: Vec<Batch>,
    /// Those before have ended.
    head: u32,
    /// Had no members at the last solution: whatever the clock shows does not matter.
    pub idle: bool,
    pub touched: bool,
}

impl Group {
    pub const NEW: Self =
        Self { v: 0, since: 0, theta: FULL_SPEED, list: Vec::new(), head: 0, idle: true, touched: false };

    /// Removes all flows and keeps their memory.
    pub fn reset(&mut self) {
        self.list.clear();
        *self = Self { list: std::mem::take(&mut self.list), ..Self::NEW };
    }

    pub fn clock(&self, now: u64) -> u128 {
        self.v + u128::from(now - self.since) * u128::from(self.theta)
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Adds flows that have so much to do, 32 fractional bits. False if others end later.
    #[expect(clippy::inline_always, reason = "twice per task; a call costs as much as the work")]
    #[inline(always)]
    pub fn start(&mut self, now: u64, left: u128, flows: Flows) -> bool {
        if self.idle {
            (self.v, self.since, self.theta, self.idle) = (0, now, FULL_SPEED, false);
        }
        self.insert(self.clock(now) + left, flows.class, flows.tag, flows.set)
    }

    /// Its flows, and what they have left, 32 fractional bits: those that have ended by `now` were finished.
    pub fn live(&self, now: u64) -> impl Iterator<Item = (Flows, u128)> {
        let v = self.clock(now);
        self.list[self.head as usize..].iter().map(move |batch| {
            debug_assert!(batch.ends() > v, "flows that have ended");
            (batch.flows, batch.ends() - v)
        })
    }

    /// Adds flows. The parts of a batch are put together in their place: a processor that stores them one by one elsewhere
    /// and copies them together waits for the stores. False if others end later.
    #[inline]
    fn insert(&mut self, ends: u128, class: u32, tag: u32, set: u64) -> bool {
        if self.list.last().is_some_and(|last| last.ends() > ends) {
            self.insert_before_last(ends, class, tag, set);
            return false;
        }
        self.list.push(Batch::new(ends, class, tag, set));
        true
    }

    /// Adds flows to the last batch, if it is of this class and tag and that leaves its flows in the order in which they
    /// came.
    #[inline]
    pub fn join(&mut self, class: u32, tag: u32, set: u64) -> bool {
        self.list.last_mut().is_some_and(|last| last.flows.take(class, tag, set))
    }

    /// Rare: most flows of a group have the same work. Kept out of line so that the other case stays short.
    #[cold]
    #[inline(never)]
    fn insert_before_last(&mut self, ends: u128, class: u32, tag: u32, set: u64) {
        let head = self.head as usize;
        let at = head + self.list[head..].partition_point(|batch| batch.ends() <= ends);
        self.list.insert(at, Batch::new(ends, class, tag, set));
    }

    /// Drops the flows that have ended by `now` and appends them.
    pub fn finish(&mut self, now: u64, ended: &mut Vec<Flows>) {
        let v = self.clock(now);
        let head = self.head as usize;
        let live = &self.list[head..];
        let count = live.iter().position(|batch| batch.ends() > v).unwrap_or(live.len());
        ended.extend(live[..count].iter().map(|batch| batch.flows));
        let head = head + count;
        if head == self.list.len() {
            self.list.clear();
            self.head = 0;
        } else if head >= 32 && 2 * head >= self.list.len() {
            // Give back the room of those that ended; a batch is moved at most once for each one that went.
            self.list.drain(..head);
            self.head = 0;
        } else {
            self.head = head as u32;
        }
    }

    /// Changes the speed; true if that touches the group for the first time since the last solution.
    #[inline]
    pub fn set_theta(&mut self, now: u64, theta: u64) -> bool {
        if self.theta == theta {
            return false;
        }
        self.v = self.clock(now);
        self.since = now;
        self.theta = theta;
        !std::mem::replace(&mut self.touched, true)
    }

    /// When the first flow ends at the present speed.
    pub fn next_end(&self, now: u64) -> u64 {
        let Some(first) = self.list.get(self.head as usize) else { return NEVER };
        let left = first.ends().saturating_sub(self.clock(now));
        let wait = if self.theta == FULL_SPEED {
            left.div_ceil(1 << 32)
        } else if self.theta == 0 {
            return NEVER;
        } else if let Ok(left) = u64::try_from(left) {
            u128::from(left.div_ceil(self.theta))
        } else {
            left.div_ceil(u128::from(self.theta))
        };
        u64::try_from(u128::from(now) + wait).unwrap_or(NEVER)
    }
}

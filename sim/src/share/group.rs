//! A group: flows that progress alike.

use super::{FULL_SPEED, NEVER};

/// A flow of a group.
#[derive(Clone, Copy)]
pub(super) struct Member {
    /// Value of the group's clock at which the flow ends, low word.
    low: u64,
    /// The clock's high word.
    high: u64,
    /// High half: its class. Low half: what the caller attached.
    class_and_tag: u64,
}

impl Member {
    pub const fn new(ends: u128, class: u32, tag: u32) -> Self {
        Self { low: ends as u64, high: (ends >> 64) as u64, class_and_tag: (class as u64) << 32 | tag as u64 }
    }

    pub const fn ends(&self) -> u128 {
        (self.high as u128) << 64 | self.low as u128
    }

    pub const fn class_and_tag(&self) -> u64 {
        self.class_and_tag
    }
}

/// The clock of a group and its flows; one cache line.
pub(super) struct Group {
    pub v: u128,
    /// Time at which `v` holds.
    pub since: u64,
    pub theta: u64,
    /// Members by the value of the clock at which they end.
    list: Vec<Member>,
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

    /// Adds a flow. Its parts are put together in their place: a processor that stores them one by one elsewhere and copies
    /// them together waits for the stores.
    #[inline]
    pub fn insert(&mut self, ends: u128, class: u32, tag: u32) {
        if self.list.last().is_some_and(|last| last.ends() > ends) {
            self.insert_before_last(ends, class, tag);
        } else {
            self.list.push(Member::new(ends, class, tag));
        }
    }

    /// Rare: most flows of a group have the same work. Kept out of line so that the other case stays short.
    #[cold]
    #[inline(never)]
    fn insert_before_last(&mut self, ends: u128, class: u32, tag: u32) {
        let head = self.head as usize;
        let at = head + self.list[head..].partition_point(|m| m.ends() <= ends);
        self.list.insert(at, Member::new(ends, class, tag));
    }

    /// Drops the members that have ended by `now` and appends them: class in the high half, tag in the low half.
    pub fn finish(&mut self, now: u64, ended: &mut Vec<u64>) {
        let v = self.clock(now);
        let head = self.head as usize;
        let live = &self.list[head..];
        let count = live.iter().position(|m| m.ends() > v).unwrap_or(live.len());
        ended.extend(live[..count].iter().map(Member::class_and_tag));
        let head = head + count;
        if head == self.list.len() {
            self.list.clear();
            self.head = 0;
        } else if head >= 32 && 2 * head >= self.list.len() {
            // Give back the room of those that ended; a member is moved at most once for each one that went.
            self.list.drain(..head);
            self.head = 0;
        } else {
            self.head = head as u32;
        }
    }

    /// When the first member ends at the present speed.
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

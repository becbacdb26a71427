//! Who takes which task: strided lists, tickets, windows of ready tasks.

use super::flags::SLOT;
use super::state::Worker;
use super::tables::RoleRow;
use super::{Engine, Here, RankState, State};
use crate::compile::NONE;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tilewire_kernels::schedule::{Claim, Strides};

/// Window slots of a role: as many as the largest window has tasks, so that each task has its own, whatever the window.
pub(super) const WINDOW: usize = 32;

/// The slot of a role's task, over all roles.
const fn slot_of(role: usize, index: u32) -> usize {
    role * WINDOW + index as usize % WINDOW
}

/// The bit of a task's slot among those of its role.
const fn bit(index: u32) -> u32 {
    1 << (index % u32::BITS)
}

/// Claims of a role on a rank.
#[derive(Default)]
pub(super) struct RoleState {
    /// Next ticket, or the first task of the window that is not claimed.
    next: u32,
    /// Next task to enter the window.
    entered: u32,
    /// Slots whose task could start.
    ready: u32,
    /// Slots whose task was taken.
    claimed: u32,
    /// Workers without a task.
    idle: BinaryHeap<Reverse<u32>>,
    dirty: bool,
}

impl RoleState {
    pub fn reset(&mut self) {
        self.idle.clear();
        *self = Self { idle: std::mem::take(&mut self.idle), ..Self::default() };
    }
}

impl RankState {
    fn mark_dirty(&mut self, role: usize) {
        let state = &mut self.roles[role];
        if !state.dirty {
            state.dirty = true;
            self.dirty_roles.push(role as u32);
        }
    }
}

impl Here<'_> {
    pub(super) fn strides(&self, role: usize) -> Strides<'_> {
        let RoleRow { tasks, workers, .. } = self.roles[role];
        Strides { tasks, workers, restarts: &self.program.roles[role].restarts }
    }

    /// Whether another task of its role is left for a cta.
    pub(super) fn has_next(&self, own: &RankState, cta: &Worker) -> bool {
        let r = usize::from(cta.role);
        let role = &self.roles[r];
        match role.claim {
            Claim::Strided => cta.position < role.tasks,
            Claim::Ticket | Claim::Ready { .. } => own.roles[r].next < role.tasks,
        }
    }

    /// For a worker that looks for a ready task: the first task of the window that nobody has taken, and what that one
    /// waits for.
    pub(super) fn window_head(&self, own: &RankState, worker: &Worker) -> Option<(u32, u32)> {
        let r = usize::from(worker.role);
        let row = &self.roles[r];
        let (State::Idle, Claim::Ready { .. }) = (worker.state, row.claim) else { return None };
        let state = &own.roles[r];
        let first = (state.next..state.entered).find(|&index| state.claimed & bit(index) == 0)?;
        let on = own.slot_flag[slot_of(r, first)];
        (on != NONE).then_some((row.first + first, on))
    }
}

impl<'a> Engine<'a> {
    /// The next task for a free worker: `None` when it has to wait for one, or is done.
    #[inline]
    pub(super) fn claim(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker) -> Option<u32> {
        loop {
            let r = usize::from(cta.role);
            let role = &h.roles[r];
            match role.claim {
                Claim::Strided => {
                    let position = cta.position;
                    if position < role.tasks {
                        let next = || h.strides(r).next(position);
                        cta.position = if role.restarts { next() } else { position + role.workers };
                        return Some(role.first + position);
                    }
                }
                Claim::Ticket => {
                    let state = &mut own.roles[r];
                    if state.next < role.tasks {
                        state.next += 1;
                        return Some(role.first + state.next - 1);
                    }
                }
                Claim::Ready { .. } => {
                    let state = &mut own.roles[r];
                    // Tasks below `entered` are claimed or in the window; with nothing unclaimed the list is empty.
                    let open = state.entered - state.next - state.claimed.count_ones();
                    if open > 0 || state.entered < role.tasks {
                        state.idle.push(Reverse(cta.w));
                        cta.state = State::Idle;
                        own.pauses[cta.w as usize].since = self.s.timers.now;
                        if state.ready != 0 {
                            own.mark_dirty(r);
                        }
                        return None;
                    }
                }
            }
            if role.recycle == NONE {
                cta.state = State::Done;
                return None;
            }
            cta.role = role.recycle as u16;
        }
    }

    /// Moves the window of a role past claimed tasks and lets the next ones in.
    pub(super) fn fill_window(&mut self, h: &Here<'a>, own: &mut RankState, role: usize) {
        let row = &h.roles[role];
        let Claim::Ready { window } = row.claim else { return };
        loop {
            let state = &mut own.roles[role];
            while state.next < state.entered && state.claimed & bit(state.next) != 0 {
                state.claimed &= !bit(state.next);
                state.next += 1;
            }
            if state.entered >= row.tasks || state.entered >= state.next + window {
                return;
            }
            let slot = slot_of(role, state.entered);
            state.entered += 1;
            self.check_slot(h, own, slot);
        }
    }

    /// Looks whether the task in a window slot can start; registers the slot on its first unmet flag otherwise.
    pub(super) fn check_slot(&mut self, h: &Here<'a>, own: &mut RankState, slot: usize) {
        let (role, row) = (slot / WINDOW, &h.roles[slot / WINDOW]);
        let next = own.roles[role].next;
        let index = next + (slot as u32).wrapping_sub(next) % WINDOW as u32;
        let task = &h.tasks[(row.first + index) as usize];
        if let Some(wait) = self.first_unmet(h, own, task.wait0, task.waits[0]) {
            own.slot_flag[slot] = wait.on;
            self.register(h, own, wait, SLOT | slot as u32);
        } else {
            own.roles[role].ready |= bit(index);
            own.mark_dirty(role);
        }
    }

    /// Hands the ready tasks of one `Ready` role to its idle workers, lowest task to lowest worker; false when no role
    /// has any to hand out.
    pub(super) fn serve_ready_role(&mut self, h: &Here<'a>, own: &mut RankState) -> bool {
        let dirty = &mut own.dirty_roles;
        if dirty.len() > 1 {
            dirty.sort_unstable_by(|a, b| b.cmp(a));
        }
        let Some(role) = dirty.pop() else { return false };
        let r = role as usize;
        let row = &h.roles[r];
        own.roles[r].dirty = false;
        loop {
            let state = &mut own.roles[r];
            if state.ready == 0 {
                break;
            }
            let Some(Reverse(w)) = state.idle.pop() else { break };
            let index = state.next + state.ready.rotate_right(state.next).trailing_zeros();
            state.ready &= !bit(index);
            state.claimed |= bit(index);
            let flag = std::mem::replace(&mut own.slot_flag[slot_of(r, index)], NONE);
            self.fill_window(h, own, r);
            own.with_worker(w, |own, cta| {
                if self.take_found(h, own, cta, row.first + index, flag) {
                    self.go_on(h, own, cta);
                }
            });
        }
        // Workers left over when the list ran out are free to recycle or end.
        let state = &mut own.roles[r];
        if state.entered >= row.tasks && state.entered - state.next == state.claimed.count_ones() {
            while let Some(Reverse(w)) = own.roles[r].idle.pop() {
                own.with_worker(w, |own, cta| {
                    cta.state = State::Free;
                    self.go_on(h, own, cta);
                });
            }
        }
        true
    }

    /// Gives a task to a worker that looked for one: it has waited for the flag that made the task ready. When it was
    /// the window that held the task back, the worker was idle.
    fn take_found(&mut self, h: &Here<'a>, own: &mut RankState, cta: &mut Worker, id: u32, on: u32) -> bool {
        let (since, now) = (own.pauses[cta.w as usize].since, self.s.timers.now);
        if on == NONE || since == now {
            return self.take(h, own, cta, id);
        }
        let flag = own.flag_of(on);
        let family = usize::from(self.t.family_of[flag as usize]);
        let role = usize::from(cta.role);
        own.waits[role * self.t.families + family] += now - since;
        own.waited[usize::from(cta.home)] += now - since;
        self.take_after_wait(h, own, cta, id, since, flag)
    }
}

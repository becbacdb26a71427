//! Which workers go on, and what many do alike: tiles of a wave begin and end together.

use super::state::{RankState, State, Word, lowest_of};
use super::{Engine, Here, ended};
use crate::compile::{Flow, NONE, Work};
use tilewire_kernels::schedule::Claim;

impl<'a> Engine<'a> {
    /// Lets the workers that can go on do so, lowest first, then hands out ready tasks, until nothing moves.
    pub(super) fn advance_workers(&mut self, h: &Here<'a>, own: &mut RankState) {
        loop {
            // Put back at the end: nothing that happens here looks at other workers.
            let mut workers = std::mem::take(&mut own.workers);
            for (word, workers) in workers.iter_mut().enumerate() {
                let mut bits = std::mem::take(&mut own.runnable[word]);
                while bits != 0 {
                    let alike = match lowest_of(workers, bits).state {
                        State::Filling if self.steady => self.begin_alike(h, own, word, workers, bits),
                        State::Running if self.t.some_hold => self.end_alike(h, own, word, workers, bits),
                        State::Free if !self.timeline => self.take_alike(h, word, workers, bits),
                        _ => 0,
                    };
                    if alike == 0 {
                        self.go_on(h, own, lowest_of(workers, bits));
                        bits &= bits - 1;
                    } else {
                        bits &= !alike;
                    }
                }
            }
            own.workers = workers;
            if !self.serve_ready_role(h, own) {
                break;
            }
        }
    }

    /// Gives the first workers of a word whose bits are set, and that have no task, the next ones of their lists while these
    /// are tiles that wait for nothing but their first loads, for equally long, and returns their bits. As
    /// [`Engine::take_next`] does it one by one.
    #[inline(never)]
    fn take_alike(&mut self, h: &Here<'a>, word: usize, workers: &mut Word, bits: u64) -> u64 {
        let now = self.s.timers.now;
        let (mut left, mut delay) = (bits, 0);
        while left != 0 {
            let worker = lowest_of(workers, left);
            let role = &h.roles[usize::from(worker.role)];
            let listed = role.claim == Claim::Strided && !role.restarts && worker.position < role.tasks;
            if worker.state != State::Free || !listed {
                break;
            }
            let id = role.first + worker.position;
            let task = &h.tasks[id as usize];
            let row = &h.costs[usize::from(task.cost)];
            let loads = if worker.storing { 0 } else { row.fill } + role.block_ps;
            let waits = task.waits[0] > 0 || task.waits[1] > 0;
            if waits || row.work != Work::Tile || row.main == NONE || loads == 0 || (left != bits && loads != delay) {
                break;
            }
            delay = loads;
            worker.position += role.workers;
            worker.task = id;
            worker.step = row.steps;
            worker.start = now;
            worker.prefetched = worker.storing;
            worker.stalled = false;
            worker.state = State::Filling;
            left &= left - 1;
        }
        let taken = bits & !left;
        if taken != 0 {
            self.s.timers.push_fills(h.rank, now + delay, word as u32, taken);
        }
        taken
    }

    /// Begins equal tiles of the first workers of a word whose bits are set, whose first loads are there, and returns their
    /// bits. As [`Engine::begin`] does it one by one, where nothing but their cost decides how long they take.
    #[inline(never)]
    fn begin_alike(&mut self, h: &Here<'a>, own: &mut RankState, word: usize, workers: &mut Word, bits: u64) -> u64 {
        let (mut left, mut begun) = (bits, 0);
        let of = h.tasks[lowest_of(workers, bits).task as usize].cost;
        let row = &h.costs[usize::from(of)];
        if row.work != Work::Tile || row.crowd > 0 || row.whole == 0 {
            return 0;
        }
        while left != 0 {
            let worker = lowest_of(workers, left);
            let alike = worker.state == State::Filling && worker.step == row.steps;
            if !alike || h.tasks[worker.task as usize].cost != of {
                break;
            }
            worker.state = State::Running;
            worker.computing = true;
            begun |= left & left.wrapping_neg();
            left &= left - 1;
        }
        if begun != 0 {
            own.computing += begun.count_ones();
            self.flow(h, Flow { class: row.main, work: row.whole }, ended::MAIN | word as u32, begun);
        }
        begun
    }

    /// Lets the first workers of a word whose bits are set, whose main loops have ended, write equal tiles that nothing holds
    /// back and that hold back their CTAs, and returns their bits. As [`Engine::main_ended`] does it one by one.
    #[inline(never)]
    fn end_alike(&mut self, h: &Here<'a>, own: &mut RankState, word: usize, workers: &mut Word, bits: u64) -> u64 {
        let (mut left, mut over) = (bits, 0);
        let of = h.tasks[lowest_of(workers, bits).task as usize].cost;
        let row = &h.costs[usize::from(of)];
        if !row.holds() {
            return 0;
        }
        while left != 0 {
            let worker = lowest_of(workers, left);
            if worker.state != State::Running || worker.step != row.steps || worker.storing {
                break;
            }
            let task = &h.tasks[worker.task as usize];
            if task.cost != of || task.waits[2] > 0 {
                break;
            }
            worker.state = State::Store;
            worker.storing_task = worker.task;
            own.computing -= u32::from(std::mem::take(&mut worker.computing));
            over |= left & left.wrapping_neg();
            left &= left - 1;
        }
        if over != 0 {
            self.raise_early(h, own, workers, over);
            self.flow(h, row.out, ended::OUT | word as u32, over);
        }
        over
    }

    /// Raises what workers of a word raise before they write.
    fn raise_early(&mut self, h: &Here<'a>, own: &mut RankState, workers: &mut Word, mut set: u64) {
        while h.any_early && set != 0 {
            let task = lowest_of(workers, set).task;
            for signal in h.program.early_signals_of(&h.tasks[task as usize]) {
                self.raise_one(h, own, signal, 0);
            }
            set &= set - 1;
        }
    }
}

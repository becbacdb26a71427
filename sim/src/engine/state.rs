//! What changes during a run: of each rank, and of all together.

use super::claims::{RoleState, WINDOW};
use super::flags::{Flags, SpanState};
use super::launches::{LaunchState, Rendezvous};
use super::network::Network;
use super::puts::Proxy;
use super::tables::Tables;
use super::timers::Timers;
use crate::compile::{Compiled, NONE, ResourceKind};
use crate::noise::{Purpose, Stream};
use crate::share::Flows;

/// State of a run.
#[derive(Default)]
pub(super) struct RunState {
    pub network: Network,
    pub timers: Timers,
    pub flags: Flags,
    /// Apart from what ranks change of each other.
    pub ranks: Vec<RankState>,
    /// Launches of all ranks that have to end before the clock starts.
    pub helpers: usize,
    pub collectives: Vec<Rendezvous>,
    pub last_carried: Vec<Option<u64>>,
    pub ended: Vec<Flows>,
}

/// What only a rank itself changes. Handed to whatever happens on the rank: its tables are then found without going
/// through those of all ranks.
#[derive(Default)]
pub(super) struct RankState {
    pub spans: Vec<SpanState>,
    /// 64 at a time, as their bits.
    pub workers: Vec<Word>,
    pub pauses: Vec<Pause>,
    /// When a worker's warp that raises flags is free.
    pub signallers: Vec<u64>,
    /// Workers that can go on, a bit each.
    pub runnable: Vec<u64>,
    pub roles: Vec<RoleState>,
    /// Roles with ready tasks and idle workers.
    pub dirty_roles: Vec<u32>,
    /// Who waits for the same flag as a window slot.
    pub slot_next: Vec<u32>,
    /// Flag that a window slot has waited for last.
    pub slot_flag: Vec<u32>,
    pub launches: Vec<LaunchState>,
    pub proxy: Proxy,
    /// With noise.
    pub unsteady: Option<Unsteady>,
    /// Tiles whose main loop runs.
    pub computing: u32,
    /// By role that a CTA started in.
    pub busy: Vec<u64>,
    /// As `busy`.
    pub waited: Vec<u64>,
    /// By role that waited, and family.
    pub waits: Vec<u64>,
    /// Timeline entry whose store is in flight, by worker.
    pub entry_of_store: Vec<u32>,
}

/// How a rank differs from its nominal self.
pub(super) struct Unsteady {
    pub network: Stream,
    pub flags: Stream,
    pub slowdown: f64,
}

fn refill<T: Clone>(vector: &mut Vec<T>, len: usize, value: T) {
    vector.clear();
    vector.resize(len, value);
}

impl RankState {
    fn reset(&mut self, c: &Compiled, t: &Tables, rank: usize) {
        refill(&mut self.spans, t.spans, SpanState::NEW);
        self.workers.clear();
        let word = |word: u32| std::array::from_fn(|bit| Worker::absent(64 * word + bit as u32));
        self.workers.extend((0..t.words as u32).map(word));
        refill(&mut self.pauses, t.workers, Pause::NONE);
        refill(&mut self.signallers, t.workers, 0);
        refill(&mut self.runnable, t.words, 0);
        self.roles.resize_with(t.roles_per_program, RoleState::default);
        self.roles.iter_mut().for_each(RoleState::reset);
        self.dirty_roles.clear();
        refill(&mut self.slot_next, t.roles_per_program * WINDOW, NONE);
        refill(&mut self.slot_flag, t.roles_per_program * WINDOW, NONE);
        refill(&mut self.launches, t.launches, LaunchState::default());
        let puts = &c.programs[c.program_of[rank] as usize].puts;
        let queues = puts.iter().map(|put| put.queue + 1).max().unwrap_or(0);
        self.proxy.reset(c.times.threads as usize, usize::from(queues));
        self.unsteady = c.noise.as_ref().map(|noise| Unsteady {
            network: noise.stream(rank, Purpose::Network),
            flags: noise.stream(rank, Purpose::Flag),
            slowdown: noise.slowdown(rank),
        });
        self.computing = 0;
        refill(&mut self.busy, t.roles_per_program, 0);
        refill(&mut self.waited, t.roles_per_program, 0);
        refill(&mut self.waits, t.roles_per_program * t.families, 0);
        refill(&mut self.entry_of_store, t.workers, 0);
    }
}

impl RunState {
    pub fn reset(&mut self, c: &Compiled, t: &Tables) {
        let n = c.ranks.len();
        self.network.reset(c);
        self.timers.reset(n);
        self.flags.reset(c, t.compute_only);
        self.ranks.resize_with(n, RankState::default);
        for (rank, own) in self.ranks.iter_mut().enumerate() {
            own.reset(c, t, rank);
        }
        self.helpers = n * c.launches.iter().filter(|launch| launch.before_clock).count();
        self.collectives.clear();
        refill(&mut self.last_carried, ResourceKind::count(c.times.rails) as usize, None);
        self.ended.clear();
    }
}

/// Where a worker stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Its launch has not begun.
    Absent,
    /// Without a task.
    Free,
    /// Waits for a flag before the task.
    Start,
    /// Waits for a flag before a step.
    Step,
    /// Waits for the first loads, or for its block to start; goes on when they are there.
    Filling,
    /// A flow runs; goes on when it has ended.
    Running,
    /// The flow of a move has ended, what the CTAs that compute add to it has not; goes on when it has.
    Crowded,
    /// Waits for a flag before the outputs are written.
    Output,
    /// May write, once the store of the task before is done.
    StoreBusy,
    /// Waits for its own store.
    Store,
    /// Pushes a command, or waits for room in the FIFO.
    Push,
    /// Waits for the other ranks; goes on when the collective is over.
    Rendezvous,
    /// Looks for a ready task.
    Idle,
    /// Stands for all workers of its role, whose tasks only wait.
    Watch,
    /// Nothing is left to do.
    Done,
}

/// A lane of a CTA: what every task touches, two to a cache line.
#[derive(Clone, Copy)]
pub(super) struct Worker {
    /// Its place among the workers of its rank.
    pub w: u32,
    /// All start waits of the task were met.
    pub start: u64,
    pub task: u32,
    /// Of a tile, steps that have begun; of a move, CTAs that computed when it began.
    pub step: u32,
    /// Next task of a strided list.
    pub position: u32,
    /// Task whose store is in flight.
    pub storing_task: u32,
    pub role: u16,
    /// The role that it started in, whose busy and waiting times its own are, whatever role it has gone on to.
    pub home: u16,
    pub state: State,
    /// A store of the task before is in flight.
    pub storing: bool,
    /// The task could start when the CTA became free: its first loads were prefetched.
    pub prefetched: bool,
    /// The task has waited since it started: see [`Pause::stalled`].
    pub stalled: bool,
    /// A tile's main loop runs.
    pub computing: bool,
}

/// Workers whose bits stand together in a word.
pub(super) type Word = [Worker; 64];

/// What a worker needs only when it waits, and for the timeline.
#[derive(Clone, Copy)]
pub(super) struct Pause {
    /// Begin of the present wait.
    pub since: u64,
    /// The CTA took the task; kept for the timeline only.
    pub taken: u64,
    /// Time that the task has spent waiting for flags since it started.
    pub stalled: u64,
    /// What the next tile's main loop has done while the output of the one before waited.
    pub ahead: u64,
    /// Who waits for the same flag.
    pub next: u32,
    /// The flag that was waited for last; during a wait, the flag or span.
    pub waited_for: u32,
}

impl Worker {
    pub const fn absent(w: u32) -> Self {
        Self {
            w,
            start: 0,
            task: NONE,
            step: 0,
            position: 0,
            storing_task: NONE,
            role: 0,
            home: 0,
            state: State::Absent,
            storing: false,
            prefetched: false,
            stalled: false,
            computing: false,
        }
    }
}

impl Pause {
    pub const NONE: Self = Self { since: 0, taken: 0, stalled: 0, ahead: 0, next: NONE, waited_for: NONE };
}

/// Where a worker stands in words of workers: its word, and its bit there.
#[inline]
pub(super) fn bit_of(w: u32) -> (u32, u64) {
    (w / 64, 1 << (w % 64))
}

/// A worker among those of its rank.
#[inline]
pub(super) fn worker_of(workers: &mut [Word], w: u32) -> &mut Worker {
    &mut workers[w as usize / 64][w as usize % 64]
}

/// The worker of a word that the lowest of some bits stands for.
#[inline]
pub(super) fn lowest_of(word: &mut Word, bits: u64) -> &mut Worker {
    &mut word[bits.trailing_zeros() as usize % 64]
}

impl RankState {
    /// Does something with a worker, in its place: nothing that it does looks at the other workers of the rank. Copied to and
    /// fro, a worker would be read in wider pieces than it was written in, which a processor waits for.
    #[inline]
    pub fn with_worker<R>(&mut self, w: u32, with: impl FnOnce(&mut Self, &mut Worker) -> R) -> R {
        let mut workers = std::mem::take(&mut self.workers);
        let result = with(self, worker_of(&mut workers, w));
        self.workers = workers;
        result
    }

    pub fn make_runnable(&mut self, w: u32) {
        let (word, bit) = bit_of(w);
        self.runnable[word as usize] |= bit;
    }
}

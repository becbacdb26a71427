//! The compact program of a rank: tasks with their waits, signals and costs.

use super::{NONE, ResourceKind};
use tilewire_kernels::RoleKind;
use tilewire_kernels::schedule::{Claim, CtaCount, Drain};

/// A flow of a cost record: its class and its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flow {
    /// Class template, [`NONE`] for a flow that needs no shared resource and no time.
    pub class: u32,
    /// Picoseconds at full speed.
    pub work: u64,
}

impl Flow {
    pub(super) const NOTHING: Self = Self { class: NONE, work: 0 };
}

/// One form of a cost record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Main loop or transfer; its work is `fixed + steps * step`.
    pub main: u32,
    /// Time per step.
    pub step: u64,
    /// Time beside the steps.
    pub fixed: u64,
    /// Extra time at the start unless hidden behind the task before.
    pub fill: u64,
    /// Asynchronous store of the result.
    pub out: Flow,
    /// The same when another tile follows, over whose main loop it leaves; no flow where it does not wait.
    pub deferred: Flow,
    /// What every CTA that computes at its start adds: to a tile, picoseconds; to a move, billionths of its time.
    pub crowd: u64,
}

impl Cost {
    pub(super) const NOTHING: Self =
        Self { main: NONE, step: 0, fixed: 0, fill: 0, out: Flow::NOTHING, deferred: Flow::NOTHING, crowd: 0 };
}

/// What kind of work a cost record stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A tile with steps and maybe an asynchronous store.
    Tile,
    /// One flow.
    Move,
    /// A push to the proxy.
    Put,
    /// A rendezvous of all ranks.
    Collective,
    /// Nothing.
    Sync,
}

/// Cost record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostRecord {
    /// Kind.
    pub work: Work,
    /// Steps of the main loop.
    pub steps: u32,
    /// When the next task of the CTA may begin.
    pub drain: Drain,
    /// Costs by form.
    pub forms: [Cost; 3],
}

/// A task.
#[derive(Clone, Copy, Debug)]
pub struct TaskC {
    /// First wait.
    pub wait0: u32,
    /// First signal.
    pub signal0: u32,
    /// Cost record.
    pub cost: u16,
    /// Waits at the start, at k steps, at the output; in this order in the list.
    pub waits: [u8; 3],
    /// Signals; for puts without signals, zero.
    pub signals: u8,
    /// How many of them, the first ones, are raised at the end of the main loop.
    pub early: u8,
    /// Put record, [`NONE`] otherwise.
    pub put: u32,
}

/// A wait on a flag, or on a run of flags.
#[derive(Clone, Copy, Debug)]
pub struct WaitC {
    /// The flag, over all families; with [`SPAN`], an index of [`Program::spans`].
    pub on: u32,
    /// Value that the flag must reach.
    pub level: u32,
}

/// Marks what is waited for as a span instead of a flag.
pub const SPAN: u32 = 1 << 30;

/// A run of flags that tasks wait for together, each flag in its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanC {
    /// First flag, over all families.
    pub flag: u32,
    /// Flags in the run.
    pub count: u32,
    /// From one flag to the next.
    pub stride: u32,
    /// Value that each must reach.
    pub level: u32,
}

impl SpanC {
    /// A flag of the run.
    pub const fn at(&self, index: u32) -> u32 {
        self.flag + index * self.stride
    }

    /// All its flags.
    pub fn flags(self) -> impl Iterator<Item = u32> {
        (0..self.count).map(move |index| self.at(index))
    }
}

/// A signal.
#[derive(Clone, Copy, Debug)]
pub struct SignalC {
    /// Flag.
    pub flag: u32,
    /// Amount.
    pub add: u32,
    /// GPU offset, folded.
    pub dg: u16,
    /// Goes over NVLink.
    pub remote: bool,
}

/// A put.
#[derive(Clone, Copy, Debug)]
pub struct PutC {
    /// Node offset, folded.
    pub dn: u16,
    /// GPU offset, folded.
    pub dg: u16,
    /// NIC queue.
    pub queue: u16,
    /// How it is published.
    pub publish: PublishC,
    /// Flow on the wire.
    pub flow: Flow,
    /// Flag at the receiver.
    pub arrived: u32,
    /// Flag at the sender, [`NONE`] without one.
    pub sent: u32,
    /// Payload.
    pub bytes: u64,
}

/// Publish mode without its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishC {
    /// The NIC writes the flag into the GPU's memory, behind the data.
    Nic,
    /// The NIC writes the flag into the host's memory, where the waiter polls it.
    NicToHost,
    /// The receiver's proxy raises the flag.
    Proxy,
}

/// A role of a launch.
#[derive(Clone, Debug)]
pub struct RoleC {
    /// Kind.
    pub kind: RoleKind,
    /// CTA count.
    pub ctas: CtaCount,
    /// Workers per CTA.
    pub lanes: u32,
    /// Claim rule.
    pub claim: Claim,
    /// Role (over all launches) that it recycles into, [`NONE`] without one.
    pub recycle: u32,
    /// Launch.
    pub launch: u32,
    /// First task.
    pub first: u32,
    /// Number of tasks.
    pub tasks: u32,
    /// See [`Strides`](tilewire_kernels::schedule::Strides).
    pub restarts: Vec<u32>,
    /// Sum over tasks of the least time that they hold their CTA, whole form.
    pub work_ps: u128,
    /// Before each task: the start of a block, for one-task-per-block grids; the search for a ready task, by the
    /// interpreter.
    pub block_ps: u64,
    /// Its tasks are collectives: all CTAs work on each of them.
    pub collective: bool,
}

/// A launch.
#[derive(Clone, Debug)]
pub struct LaunchC {
    /// Name.
    pub name: String,
    /// Launches before it.
    pub after: Vec<u32>,
    /// Roles, over all launches.
    pub roles: std::ops::Range<usize>,
    /// It has ended on every rank when the clock starts.
    pub before_clock: bool,
}

/// What ranks with one skeleton execute.
#[derive(Debug, Default)]
pub struct Program {
    /// Tasks of all roles.
    pub tasks: Vec<TaskC>,
    /// Waits.
    pub waits: Vec<WaitC>,
    /// Runs of two flags or more that tasks wait for, each once.
    pub spans: Vec<SpanC>,
    /// Signals.
    pub signals: Vec<SignalC>,
    /// Puts.
    pub puts: Vec<PutC>,
    /// Roles of all launches.
    pub roles: Vec<RoleC>,
    /// Flags whose waits all name one level that is also the sum of their adds: that level; 0 otherwise.
    pub countdown: Vec<u32>,
    /// Bytes (FLOP for the chip) per resource of a rank, while the clock runs.
    pub totals: Vec<(ResourceKind, u64)>,
    /// Longest single task at full speed.
    pub longest_ps: u64,
    /// Bytes that the rank sends to other nodes, by puts and in collectives, while the clock runs.
    pub put_bytes: u64,
}

impl Program {
    /// The run of flags that a wait is for; a single flag is a run of one.
    pub fn awaited(&self, wait: &WaitC) -> SpanC {
        if wait.on & SPAN == 0 {
            SpanC { flag: wait.on, count: 1, stride: 0, level: wait.level }
        } else {
            self.spans[(wait.on & !SPAN) as usize]
        }
    }

    /// All signals of a task.
    pub fn signals_of(&self, task: &TaskC) -> &[SignalC] {
        &self.signals[task.signal0 as usize..task.signal0 as usize + usize::from(task.signals)]
    }

    /// The signals of a task that are raised at the end of its main loop.
    pub fn early_signals_of(&self, task: &TaskC) -> &[SignalC] {
        &self.signals_of(task)[..usize::from(task.early)]
    }

    /// The signals of a task that are raised when its outputs are written.
    pub fn late_signals_of(&self, task: &TaskC) -> &[SignalC] {
        &self.signals_of(task)[usize::from(task.early)..]
    }

    /// All waits of a task.
    pub fn waits_of(&self, task: &TaskC) -> &[WaitC] {
        let count: usize = task.waits.iter().map(|&n| usize::from(n)).sum();
        &self.waits[task.wait0 as usize..task.wait0 as usize + count]
    }
}

//! What a run reads and never writes: costs of its form, roles with their CTAs, the layout of per-rank state.

use crate::compile::{Compiled, Flow, Form, NONE, Program, SignalC, TaskC, WaitC, Work};
use std::collections::{BTreeMap, BTreeSet};
use tilewire_kernels::RoleKind;
use tilewire_kernels::schedule::{Claim, Drain};

/// A cost record in the form that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostRow {
    pub work: Work,
    pub drain: Drain,
    pub steps: u32,
    pub main: u32,
    pub step: u64,
    pub fixed: u64,
    /// All steps and what comes beside them.
    pub whole: u64,
    pub fill: u64,
    pub out: Flow,
    /// `out` when another tile follows.
    pub deferred: Flow,
    /// See [`crate::compile::Cost::crowd`].
    pub crowd: u64,
}

impl CostRow {
    /// A tile whose CTA is held until its output is written, the same whether another follows or not.
    pub fn holds(&self) -> bool {
        self.work == Work::Tile && self.out.class != NONE && self.drain != Drain::Overlap && self.deferred.class == NONE
    }
}

/// A role of a program, as this run sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoleRow {
    pub claim: Claim,
    pub first: u32,
    /// Tasks that this form runs.
    pub tasks: u32,
    pub recycle: u32,
    pub launch: u32,
    pub block_ps: u64,
    pub lanes: u32,
    /// First worker and number of workers on each rank.
    pub worker0: u32,
    pub workers: u32,
    /// Workers of a CTA; 0 in a form that does not run them.
    pub per_cta: u32,
    /// Its strides begin anew somewhere.
    pub restarts: bool,
    /// Tasks of the role that are not run, see [`Instant`].
    pub instant_tasks: u32,
    /// One worker stands for all: it waits for what the tasks wait for, as if that were one task.
    pub watches: bool,
}

/// Tasks of a role that take no time, as the tiles of most kernels in a run of communication alone, and need not be run
/// one by one. Either they wait for nothing: all that they raise is raised when their launch starts. Or they raise nothing:
/// they are done when the last flag has come that one of them waits for, however many CTAs there are.
#[derive(Default)]
pub(super) struct Instant {
    pub tasks: u32,
    /// One for all adds to a flag of a GPU.
    pub signals: Vec<SignalC>,
    /// What the tasks wait for, each once.
    pub waits: Vec<WaitC>,
}

impl Instant {
    fn of(c: &Compiled, program: &Program, number: usize) -> Self {
        let role = &program.roles[number];
        let tasks = &program.tasks[role.first as usize..(role.first + role.tasks) as usize];
        let timeless = |task: &TaskC| {
            let record = &c.costs[usize::from(task.cost)];
            let cost = &record.forms[Form::CommOnly as usize];
            record.work == Work::Tile && cost.main == NONE && cost.out.class == NONE
        };
        // With noise every flag has a latency of its own.
        if c.noise.is_some() || matches!(role.claim, Claim::Ready { .. }) || !tasks.iter().all(timeless) {
            return Self::default();
        }
        let recycles = role.recycle != NONE || program.roles.iter().any(|other| other.recycle as usize == number);
        if !recycles && tasks.iter().all(|task| task.signals == 0) {
            let mut seen = BTreeSet::new();
            let waits = tasks.iter().flat_map(|task| program.waits_of(task));
            let waits = waits.filter(|wait| seen.insert((wait.on, wait.level))).copied().collect();
            return Self { tasks: role.tasks, signals: Vec::new(), waits };
        }
        if tasks.iter().any(|task| task.waits != [0; 3]) {
            return Self::default();
        }
        let mut adds: BTreeMap<(u16, u32, bool), u32> = BTreeMap::new();
        for signal in tasks.iter().flat_map(|task| program.signals_of(task)) {
            *adds.entry((signal.dg, signal.flag, signal.remote)).or_default() += signal.add;
        }
        let signal = |((dg, flag, remote), add)| SignalC { flag, add, dg, remote };
        Self { tasks: role.tasks, signals: adds.into_iter().map(signal).collect(), waits: Vec::new() }
    }
}

/// Sizes and rows; rebuilt for every run, in the same memory.
#[derive(Default)]
pub(super) struct Tables {
    pub costs: Vec<CostRow>,
    /// Roles of all programs, `roles_per_program` each.
    pub roles: Vec<RoleRow>,
    /// Whether a program has signals that do not wait for the writes.
    pub any_early: Vec<bool>,
    /// For runs of communication alone, of all roles of all programs.
    pub instants: Vec<Instant>,
    /// Family of each flag: looked up at the end of every wait.
    pub family_of: Vec<u16>,
    pub roles_per_program: usize,
    /// Workers, words of worker bits, launches, families and flags of a rank.
    pub workers: usize,
    pub words: usize,
    pub launches: usize,
    pub families: usize,
    pub flags: usize,
    /// Spans of the program that has most.
    pub spans: usize,
    pub compute_only: bool,
    /// Some tiles hold their CTA, see [`CostRow::holds`].
    pub some_hold: bool,
}

impl Tables {
    pub fn prepare(&mut self, c: &Compiled, counts: &[u32], form: Form, timeline: bool) {
        self.compute_only = form == Form::ComputeOnly;
        self.costs.clear();
        self.costs.extend(c.costs.iter().map(|record| {
            let cost = &record.forms[form as usize];
            CostRow {
                work: record.work,
                drain: record.drain,
                steps: record.steps,
                main: cost.main,
                step: cost.step,
                fixed: cost.fixed,
                whole: u64::from(record.steps) * cost.step + cost.fixed,
                fill: cost.fill,
                out: cost.out,
                deferred: cost.deferred,
                crowd: cost.crowd,
            }
        }));
        self.some_hold = self.costs.iter().any(CostRow::holds);
        if self.any_early.len() != c.programs.len() {
            self.any_early = c.programs.iter().map(|p| p.tasks.iter().any(|task| task.early > 0)).collect();
            let slots = c.family_base.windows(2).map(|w| (w[1] - w[0]) as usize).enumerate();
            self.family_of = slots.flat_map(|(family, slots)| std::iter::repeat_n(family as u16, slots)).collect();
        }
        // A timeline shows every task.
        let instantly = form == Form::CommOnly && !timeline;
        if instantly && self.instants.is_empty() {
            let of = |program| (0..counts.len()).map(move |role| Instant::of(c, program, role));
            self.instants = c.programs.iter().flat_map(of).collect();
        }
        self.roles.clear();
        self.roles_per_program = counts.len();
        // Ranks have the same workers.
        let watches: Vec<bool> = (0..counts.len())
            .map(|role| {
                let all = if instantly { self.instants.as_slice() } else { &[] };
                !all.is_empty() && all.iter().skip(role).step_by(counts.len()).all(|instant| !instant.waits.is_empty())
            })
            .collect();
        for program in &c.programs {
            self.workers = 0;
            for ((role, &ctas), &watches) in program.roles.iter().zip(counts).zip(&watches) {
                let runs = !self.compute_only || role.kind == RoleKind::Compute;
                // CTAs that recycle help the compute role in a whole run, and so they do here, from the start.
                let per_cta = if !watches && (runs || role.recycle != NONE) { role.lanes } else { 0 };
                let workers = if watches { 1 } else { ctas * per_cta };
                let instant = instantly.then(|| &self.instants[self.roles.len()]);
                let instant_tasks = match instant {
                    Some(instant) if watches => instant.tasks - 1,
                    Some(instant) if instant.waits.is_empty() => instant.tasks,
                    _ => 0,
                };
                self.roles.push(RoleRow {
                    claim: role.claim,
                    first: role.first,
                    tasks: if runs { role.tasks - instant_tasks } else { 0 },
                    recycle: role.recycle,
                    launch: role.launch,
                    block_ps: role.block_ps,
                    lanes: role.lanes,
                    worker0: self.workers as u32,
                    workers,
                    per_cta,
                    restarts: !role.restarts.is_empty(),
                    instant_tasks,
                    watches,
                });
                self.workers += workers as usize;
            }
        }
        self.words = self.workers.div_ceil(64);
        self.launches = c.launches.len();
        self.families = c.dropped.len();
        self.spans = c.programs.iter().map(|p| p.spans.len()).max().unwrap_or(0);
        self.flags = c.family_base[c.family_base.len() - 1] as usize;
    }

    /// Role (of those of a program) whose CTA a worker is, and its number there.
    pub fn home(&self, worker: u32) -> (usize, u32) {
        let roles = &self.roles[..self.roles_per_program];
        let role = roles.partition_point(|r| r.worker0 + r.workers <= worker);
        (role, worker - roles[role].worker0)
    }
}

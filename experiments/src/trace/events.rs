//! A timeline as events of a Chrome trace.

use super::{Filter, Kept};
use crate::engine::Prepared;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use tilewire_kernels::schedule::Claim;
use tilewire_sim::compile::{Compiled, NONE, ResourceKind};
use tilewire_sim::engine::{Run, TaskTime};

/// Counter samples of each resource at most; loads change far more often than a screen has columns.
const MAX_SAMPLES: usize = 4000;

/// An array of events, one on a line.
struct Events<'a, W: Write> {
    writer: &'a mut W,
    first: bool,
}

impl<W: Write> Events<'_, W> {
    fn event(&mut self, event: &impl Serialize) -> io::Result<()> {
        write!(self.writer, "{}", if self.first { "\n" } else { ",\n" })?;
        self.first = false;
        Ok(serde_json::to_writer(&mut *self.writer, event)?)
    }
}

fn us(ps: u64) -> f64 {
    ps as f64 / 1e6
}

/// Threads of a process: CTAs, and beside each the writes that outlive its tasks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Track {
    role: u32,
    cta: u32,
    lane: u32,
    writes: bool,
    copy: u32,
}

/// A run as it is written: its processes, from `first_pid` on, are the ranks.
pub struct Part<'a> {
    /// Schedule and its compiled form.
    pub prepared: &'a Prepared,
    /// Timeline.
    pub run: &'a Run,
    /// Stands behind the ranks' names.
    pub label: &'a str,
    /// Process of the first rank.
    pub first_pid: u32,
}

/// Writes the tasks of all parts that the filter keeps.
///
/// # Errors
/// Those of the writer.
pub fn write<W: Write>(title: &str, parts: &[Part<'_>], filter: &Filter, writer: &mut W) -> io::Result<Kept> {
    write!(writer, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{},\"traceEvents\":[", json!({ "title": title }))?;
    let mut events = Events { writer, first: true };
    let mut kept = Kept::default();
    for part in parts {
        events_of(&mut events, part, filter, &mut kept)?;
    }
    writeln!(events.writer, "\n]}}")?;
    Ok(kept)
}

fn events_of<W: Write>(
    events: &mut Events<'_, W>,
    part: &Part<'_>,
    filter: &Filter,
    kept: &mut Kept,
) -> io::Result<()> {
    let (compiled, run) = (part.prepared.simulation.compiled(), part.run);
    let names = Names::new(part);
    let matches = |task: &&TaskTime| {
        let rank = compiled.ranks[task.rank as usize];
        let role = names.program(task.rank).roles[task.role as usize].kind;
        filter.ranks.as_ref().is_none_or(|ranks| ranks.contains(&rank))
            && filter.roles.as_ref().is_none_or(|roles| roles.contains(&role))
            && task.end > filter.from_ps
            && task.taken < filter.to_ps
    };
    let mut tasks: Vec<&TaskTime> = run.timeline.iter().filter(matches).collect();
    kept.all += run.timeline.len();
    kept.matching += tasks.len();
    tasks.sort_by_key(|task| (task.taken, task.rank, task.role, task.cta, task.lane, task.task));
    tasks.truncate(filter.max_tasks);
    kept.tasks += tasks.len();

    let threads = Threads::new(&tasks);
    metadata(events, &names, &threads)?;
    for (task, &threads) in tasks.iter().zip(&threads.of) {
        slices(events, &names, threads, task)?;
    }
    polls(events, &names, run, &threads, &tasks)?;
    kept.arrows = arrows(events, &names, &threads, &tasks, kept.arrows)?;
    counters(events, &names, run, filter)
}

/// Threads of the kept tasks.
struct Threads {
    /// Rank and track of each thread, in the order of their numbers.
    numbers: BTreeMap<(u32, Track), u32>,
    /// By task: its own thread, and that of its writes.
    of: Vec<(u32, Option<u32>)>,
}

impl Threads {
    /// Gives every CTA a thread, and its writes another. CTAs that join a role carry the number that they have in their
    /// own, so two of them may share one: whoever comes while a thread is taken gets the next.
    fn new(tasks: &[&TaskTime]) -> Self {
        let mut tracks = vec![[None; 2]; tasks.len()];
        for writes in [false, true] {
            let span = |task: &TaskTime| {
                if writes { (task.free, task.end) } else { (task.taken, task.free.max(task.start)) }
            };
            let mut order: Vec<usize> = (0..tasks.len()).filter(|&i| !writes || tasks[i].end > tasks[i].free).collect();
            order.sort_by_key(|&i| (span(tasks[i]), i));
            let mut free_at: BTreeMap<(u32, u32, u32, u32), Vec<u64>> = BTreeMap::new();
            for i in order {
                let task = tasks[i];
                let (from, to) = span(task);
                let threads = free_at.entry((task.rank, task.role, task.cta, task.lane)).or_default();
                let thread = threads.iter().position(|&free| free <= from).unwrap_or(threads.len());
                if thread == threads.len() {
                    threads.push(0);
                }
                threads[thread] = to;
                let TaskTime { role, cta, lane, .. } = *task;
                tracks[i][usize::from(writes)] = Some(Track { role, cta, lane, writes, copy: thread as u32 });
            }
        }
        let mut numbers: BTreeMap<(u32, Track), u32> = BTreeMap::new();
        for (task, tracks) in tasks.iter().zip(&tracks) {
            numbers.extend(tracks.iter().flatten().map(|&track| ((task.rank, track), 0)));
        }
        let mut next: BTreeMap<u32, u32> = BTreeMap::new();
        for ((rank, _), number) in &mut numbers {
            let next = next.entry(*rank).or_insert(1);
            *number = *next;
            *next += 1;
        }
        let number = |task: &TaskTime, track: Option<Track>| track.map(|track| numbers[&(task.rank, track)]);
        let of = tasks
            .iter()
            .zip(&tracks)
            .map(|(task, &[own, writes])| (number(task, own).unwrap_or(0), number(task, writes)))
            .collect();
        Self { numbers, of }
    }
}

/// What tasks and flags are called.
struct Names<'a> {
    compiled: &'a Compiled,
    label: &'a str,
    first_pid: u32,
    families: Vec<&'a str>,
    /// Op names by program and task.
    ops: Vec<Vec<&'static str>>,
}

impl<'a> Names<'a> {
    fn new(part: &Part<'a>) -> Self {
        let (schedule, compiled) = (&part.prepared.schedule, part.prepared.simulation.compiled());
        let ops = schedule
            .representatives()
            .into_iter()
            .map(|rank| {
                let mut ops = Vec::new();
                for (launch, role) in schedule.role_indices() {
                    schedule.for_each_task(rank, launch, role, |task| ops.push(task.op.name()));
                }
                ops
            })
            .collect();
        let families = schedule.flags.iter().map(|family| family.name.as_str()).collect();
        Self { compiled, label: part.label, first_pid: part.first_pid, families, ops }
    }

    const fn pid(&self, rank: u32) -> u32 {
        self.first_pid + rank
    }

    fn program(&self, rank: u32) -> &'a tilewire_sim::compile::Program {
        &self.compiled.programs[self.compiled.program_of[rank as usize] as usize]
    }

    fn op(&self, task: &TaskTime) -> &'static str {
        self.ops[self.compiled.program_of[task.rank as usize] as usize][task.task as usize]
    }

    fn flag(&self, flag: u32) -> String {
        let family = self.compiled.family_of(flag);
        let slot = flag - self.compiled.family_base[family];
        format!("{}[{slot}]", self.families[family])
    }

    fn raiser(&self, flag: u32) -> &'static str {
        match self.compiled.raisers[self.compiled.family_of(flag)] {
            (_, true) => "proxy",
            (Some(role), false) => role.name(),
            (None, false) => "none",
        }
    }
}

fn metadata<W: Write>(events: &mut Events<'_, W>, names: &Names<'_>, threads: &Threads) -> io::Result<()> {
    let mut processes = BTreeSet::new();
    for (&(rank, track), &tid) in &threads.numbers {
        let pid = names.pid(rank);
        if processes.insert(rank) {
            let name = format!("rank {}{}", names.compiled.ranks[rank as usize], names.label);
            events.event(&json!({ "ph": "M", "pid": pid, "name": "process_name", "args": { "name": name } }))?;
            let sort = json!({ "ph": "M", "pid": pid, "name": "process_sort_index", "args": { "sort_index": pid } });
            events.event(&sort)?;
        }
        let role = &names.program(rank).roles[track.role as usize];
        let launch = &names.compiled.launches[role.launch as usize].name;
        let lane = if role.lanes > 1 { format!(".{}", track.lane) } else { String::new() };
        let writes = if track.writes { " writes" } else { "" };
        let copy = if track.copy > 0 { format!(" ({})", track.copy + 1) } else { String::new() };
        let name = format!("{launch}/{} {}{lane}{writes}{copy}", role.kind, track.cta);
        events.event(&json!({ "ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": { "name": name } }))?;
        let sort = json!({ "sort_index": tid });
        events.event(&json!({ "ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": sort }))?;
    }
    Ok(())
}

fn slices<W: Write>(
    events: &mut Events<'_, W>,
    names: &Names<'_>,
    (tid, writes): (u32, Option<u32>),
    task: &TaskTime,
) -> io::Result<()> {
    let role = &names.program(task.rank).roles[task.role as usize];
    let number = task.task - role.first;
    let slice = |tid: u32, name: &str, category: &str, from: u64, to: u64, args: Value| {
        json!({
            "ph": "X", "pid": names.pid(task.rank), "tid": tid, "name": name, "cat": category,
            "ts": us(from), "dur": us(to - from), "args": args,
        })
    };
    let mut args = json!({ "role": role.kind.name(), "task": number });
    if task.waited_for != NONE {
        args["waited_for"] = names.flag(task.waited_for).into();
        args["raised_by"] = names.raiser(task.waited_for).into();
    }
    if task.start > task.taken && task.waited_for != NONE {
        let name = format!("wait {}", names.families[names.compiled.family_of(task.waited_for)]);
        events.event(&slice(tid, &name, "wait", task.taken, task.start, args.clone()))?;
    }
    events.event(&slice(tid, names.op(task), role.kind.name(), task.start, task.free.max(task.start), args.clone()))?;
    if let Some(tid) = writes {
        events.event(&slice(tid, names.op(task), "writes", task.free, task.end, args))?;
    }
    Ok(())
}

/// CTAs of roles that take what is ready have no task while they look for one.
fn polls<W: Write>(
    events: &mut Events<'_, W>,
    names: &Names<'_>,
    run: &Run,
    threads: &Threads,
    tasks: &[&TaskTime],
) -> io::Result<()> {
    // Of each thread: when its last task was over.
    let mut over: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (task, &(tid, _)) in tasks.iter().zip(&threads.of) {
        let role = &names.program(task.rank).roles[task.role as usize];
        let launched = run.launches[role.launch as usize].0;
        let since = over.insert((task.rank, tid), task.free.max(task.start)).unwrap_or(launched);
        if matches!(role.claim, Claim::Ready { .. }) && since < task.taken {
            events.event(&json!({
                "ph": "X", "pid": names.pid(task.rank), "tid": tid, "name": "poll", "cat": "wait",
                "ts": us(since), "dur": us(task.taken - since), "args": { "role": role.kind.name() },
            }))?;
        }
    }
    Ok(())
}

/// Flags that a task may have been held back by: the one that it waited for, or, where CTAs take what is ready, all that
/// made it so.
fn held_by(names: &Names<'_>, task: &TaskTime) -> Vec<u32> {
    let program = names.program(task.rank);
    if task.waited_for != NONE && task.start > task.taken {
        return vec![task.waited_for];
    }
    if !matches!(program.roles[task.role as usize].claim, Claim::Ready { .. }) {
        return Vec::new();
    }
    let compact = &program.tasks[task.task as usize];
    let first = compact.wait0 as usize;
    let waits = &program.waits[first..first + usize::from(compact.waits[0])];
    waits.iter().flat_map(|wait| program.awaited(wait).flags()).collect()
}

/// An arrow from the task that raised a flag last before a waiter went on, to the waiter; both must be kept. Returns how
/// many there are, with those `before`.
fn arrows<W: Write>(
    events: &mut Events<'_, W>,
    names: &Names<'_>,
    threads: &Threads,
    tasks: &[&TaskTime],
    before: usize,
) -> io::Result<usize> {
    // By rank that owns the flag, and flag: ends of the tasks that raise it.
    let mut raisers: BTreeMap<(u32, u32), Vec<(u64, usize)>> = BTreeMap::new();
    let folded = names.compiled.folded;
    for (i, task) in tasks.iter().enumerate() {
        let program = names.program(task.rank);
        let compact = &program.tasks[task.task as usize];
        let rank = names.compiled.ranks[task.rank as usize];
        let number = |dn: u16, dg: u16| folded.number(folded.at(rank, tilewire_kernels::Offset { dn, dg })) as u32;
        if compact.put != NONE {
            let put = &program.puts[compact.put as usize];
            raisers.entry((number(put.dn, put.dg), put.arrived)).or_default().push((task.end, i));
        }
        let first = compact.signal0 as usize;
        for signal in &program.signals[first..first + usize::from(compact.signals)] {
            raisers.entry((number(0, signal.dg), signal.flag)).or_default().push((task.end, i));
        }
    }
    for ends in raisers.values_mut() {
        ends.sort_unstable();
    }
    let mut count = before;
    for (task, &(tid, _)) in tasks.iter().zip(&threads.of) {
        let last = |flag: u32| {
            let ends = raisers.get(&(task.rank, flag))?;
            let before = ends.partition_point(|&(end, _)| end <= task.start);
            ends.get(before.checked_sub(1)?).map(|&(end, raiser)| (end, raiser, flag))
        };
        let Some((end, raiser, flag)) = held_by(names, task).into_iter().filter_map(last).max() else { continue };
        let from = tasks[raiser];
        count += 1;
        let flag = names.flag(flag);
        let (own, writes) = threads.of[raiser];
        events.event(&json!({
            "ph": "s", "id": count, "pid": names.pid(from.rank), "tid": writes.unwrap_or(own), "name": flag, "cat": "flag",
            "ts": us(end),
        }))?;
        events.event(&json!({
            "ph": "f", "bp": "e", "id": count, "pid": names.pid(task.rank), "tid": tid, "name": flag, "cat": "flag",
            "ts": us(task.start),
        }))?;
    }
    Ok(count)
}

/// Load of the first rank's shared resources.
fn counters<W: Write>(events: &mut Events<'_, W>, names: &Names<'_>, run: &Run, filter: &Filter) -> io::Result<()> {
    let compiled = names.compiled;
    if filter.ranks.as_ref().is_some_and(|ranks| !ranks.contains(&compiled.ranks[0])) {
        return Ok(());
    }
    let rails = compiled.times.rails;
    let mut resources = vec![
        (ResourceKind::Hbm, "HBM [GB/s]".to_owned()),
        (ResourceKind::Egress, "NVLink out [GB/s]".to_owned()),
        (ResourceKind::Ingress, "NVLink in [GB/s]".to_owned()),
    ];
    for rail in 0..rails.min(u32::from(u8::MAX)) as u8 {
        resources.push((ResourceKind::NicOut(rail), format!("NIC {rail} out [GB/s]")));
        resources.push((ResourceKind::NicIn(rail), format!("NIC {rail} in [GB/s]")));
    }
    for (kind, name) in resources {
        let index = kind.index(rails);
        let samples: Vec<(u64, u64)> = run
            .carried
            .iter()
            .filter(|&&(at, resource, _)| resource == index && (filter.from_ps..filter.to_ps).contains(&at))
            .map(|&(at, _, rate)| (at, rate))
            .collect();
        let stride = samples.len().div_ceil(MAX_SAMPLES).max(1);
        for (at, rate) in samples.into_iter().step_by(stride) {
            let args = json!({ "GB/s": rate as f64 / 1e9 });
            events.event(&json!({ "ph": "C", "pid": names.pid(0), "name": name, "ts": us(at), "args": args }))?;
        }
    }
    Ok(())
}

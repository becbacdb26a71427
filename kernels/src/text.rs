//! A schedule as text: JSON for machines, tables for people, and what differs between two.

use crate::cluster::Rank;
use crate::encode::{FORMAT_VERSION, schedule_hash};
use crate::schedule::{
    At, Claim, CtaCount, Flag, Gate, Op, Partial, Place, Publish, Region, RoleSplit, Schedule, Task, Wait, WriteMode,
};
use std::fmt::Write as _;
use std::io;

/// Streams a schedule as JSON, the tasks of these ranks included.
///
/// ```json
/// { "format": 1, "hash": "..." | null, "split": {...} | null,
///   "kernel": "gemm_rs", "cluster": {"nodes": 2, "gpus_per_node": 8}, "fabric": "ib-rc", "spec": "...",
///   "symmetry": {"nodes": true, "gpus": true}, "useful_flops": 1,
///   "buffers": [{"name", "bytes", "dtype", "usage"}], "flags": [{"name", "slots"}],
///   "launches": [{"name", "after": [launch], "roles": [{"kind", "ctas", "lanes", "claim", "recycle"}]}],
///   "ranks": [{"rank": {"node", "gpu"}, "table": [{"dg", "row"} | null],
///              "launches": [[[task, ...] of each role] of each launch]}] }
/// ```
///
/// A task is `{"op": name, fields of the op..., "waits": [...], "signals": [...]}` with the field names of
/// [`crate::schedule::Op`], [`Wait`] and [`crate::schedule::Signal`]; buffers and families are indices.
///
/// # Errors
/// Those of `writer`.
pub fn dump(
    schedule: &Schedule,
    split: Option<&RoleSplit>,
    ranks: &[Rank],
    writer: &mut impl io::Write,
) -> io::Result<()> {
    let mut fields = serde_json::Map::new();
    let mut field = |name: &str, value: serde_json::Result<serde_json::Value>| -> io::Result<()> {
        fields.insert(name.to_owned(), value?);
        Ok(())
    };
    field("format", serde_json::to_value(FORMAT_VERSION))?;
    field("hash", serde_json::to_value(split.map(|split| schedule_hash(schedule, split).to_string())))?;
    field("split", serde_json::to_value(split))?;
    field("kernel", serde_json::to_value(&schedule.kernel))?;
    field("cluster", serde_json::to_value(schedule.cluster))?;
    field("fabric", serde_json::to_value(schedule.fabric))?;
    field("spec", serde_json::to_value(&schedule.spec))?;
    field("symmetry", serde_json::to_value(schedule.symmetry))?;
    field("useful_flops", serde_json::to_value(schedule.useful_flops))?;
    field("buffers", serde_json::to_value(&schedule.buffers))?;
    field("flags", serde_json::to_value(&schedule.flags))?;
    field("launches", serde_json::to_value(&schedule.launches))?;
    let header = serde_json::to_string(&fields)?;
    // The tasks follow as the last field, one on a line; they are too many to be held at once.
    write!(writer, "{},\n\"ranks\":[", header.trim_end_matches('}'))?;
    for (i, &rank) in ranks.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        write!(writer, "{comma}\n{{\"rank\":{},\"table\":", serde_json::to_string(&rank)?)?;
        serde_json::to_writer(&mut *writer, &schedule.source.table(rank))?;
        write!(writer, ",\"launches\":[")?;
        for (launch, roles) in schedule.launches.iter().map(|launch| launch.roles.len()).enumerate() {
            write!(writer, "{}[", if launch == 0 { "" } else { "," })?;
            for role in 0..roles {
                write!(writer, "{}[", if role == 0 { "" } else { "," })?;
                dump_tasks(schedule, rank, (launch, role), writer)?;
                write!(writer, "]")?;
            }
            write!(writer, "]")?;
        }
        write!(writer, "]}}")?;
    }
    writeln!(writer, "]}}")
}

fn dump_tasks(
    schedule: &Schedule,
    rank: Rank,
    (launch, role): (usize, usize),
    writer: &mut impl io::Write,
) -> io::Result<()> {
    let mut result = Ok(());
    let mut first = true;
    schedule.for_each_task(rank, launch, role, |task| {
        if result.is_ok() {
            result = (|| {
                write!(writer, "{}", if first { "\n" } else { ",\n" })?;
                Ok(serde_json::to_writer(&mut *writer, &task)?)
            })();
            first = false;
        }
    });
    result
}

/// A schedule for a person: buffers, flags, roles with their ops, and the first `limit` tasks of each role of `rank`.
pub fn show(schedule: &Schedule, rank: Rank, limit: usize) -> String {
    let mut text = String::new();
    let out = &mut text;
    let _ = writeln!(out, "{} on {} over {}", schedule.kernel, schedule.cluster, schedule.fabric);
    let _ = writeln!(out, "{}", schedule.spec);
    let shared = match (schedule.symmetry.nodes, schedule.symmetry.gpus) {
        (true, true) => "all ranks share one skeleton",
        (true, false) => "ranks with one GPU index share a skeleton",
        (false, true) => "ranks of a node share a skeleton",
        (false, false) => "every rank has its own skeleton",
    };
    let _ = writeln!(out, "{shared}; this is rank {rank}");
    let _ = writeln!(out, "\nbuffer            bytes per rank  type  use");
    for buffer in &schedule.buffers {
        let (dtype, usage) = (word(&buffer.dtype), word(&buffer.usage));
        let _ = writeln!(out, "{:16} {:>15}  {dtype:4}  {usage}", buffer.name, buffer.bytes);
    }
    let _ = writeln!(out, "\nflags                     slots");
    for family in &schedule.flags {
        let _ = writeln!(out, "{:16} {:>14}", family.name, family.slots);
    }
    for (l, launch) in schedule.launches.iter().enumerate() {
        let after: Vec<&str> = launch.after.iter().map(|&after| schedule.launches[after].name.as_str()).collect();
        let after = if after.is_empty() { String::new() } else { format!(", after {}", after.join(" and ")) };
        let _ = writeln!(out, "\nlaunch {}{after}", launch.name);
        for (r, role) in launch.roles.iter().enumerate() {
            let recycle =
                role.recycle.map_or_else(String::new, |next| format!(", then joins {}", launch.roles[next].kind));
            let lanes = if role.lanes == 1 { String::new() } else { format!(", {} lanes", role.lanes) };
            let (ctas, claim) = (ctas_text(role.ctas), claim_text(role.claim));
            let (lines, summary) = tasks_text(schedule, rank, (l, r), limit);
            let _ = writeln!(out, "  {}: {ctas}, {claim}{lanes}{recycle}; {summary}", role.kind);
            out.push_str(&lines);
        }
    }
    text
}

fn tasks_text(schedule: &Schedule, rank: Rank, (launch, role): (usize, usize), limit: usize) -> (String, String) {
    let mut lines = String::new();
    let mut ops: Vec<(&'static str, usize)> = Vec::new();
    let mut count = 0;
    schedule.for_each_task(rank, launch, role, |task| {
        if count < limit {
            let _ = writeln!(lines, "    [{count}] {}", task_text(schedule, &task));
        }
        count += 1;
        match ops.iter_mut().find(|(name, _)| *name == task.op.name()) {
            Some((_, count)) => *count += 1,
            None => ops.push((task.op.name(), 1)),
        }
    });
    if count > limit {
        let _ = writeln!(lines, "    and {} more", count - limit);
    }
    let ops: Vec<String> = ops.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let summary = if ops.is_empty() { "no tasks".to_owned() } else { ops.join(", ") };
    (lines, summary)
}

fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn ctas_text(ctas: CtaCount) -> String {
    match ctas {
        CtaCount::FromSplit => "CTAs from the split".to_owned(),
        CtaCount::Fixed(ctas) => format!("{ctas} CTAs"),
        CtaCount::AllBut(0) => "all SMs that are left".to_owned(),
        CtaCount::AllBut(spared) => format!("all SMs that are left but {spared}"),
    }
}

fn claim_text(claim: Claim) -> String {
    match claim {
        Claim::Strided => "strided".to_owned(),
        Claim::Ticket => "next free CTA".to_owned(),
        Claim::Ready { window } => format!("first ready of {window}"),
    }
}

/// One line: what a task waits for, does and raises.
pub fn task_text(schedule: &Schedule, task: &Task) -> String {
    let mut text = String::from(if task.restart { "worker 0 again; " } else { "" });
    for wait in &task.waits {
        let _ = write!(text, "wait {}; ", wait_text(schedule, wait));
    }
    text.push_str(&op_text(schedule, &task.op));
    for signal in &task.signals {
        let (to, flag) = (at_text(signal.to), flag_text(schedule, signal.flag));
        let early = if signal.early { " early" } else { "" };
        let _ = write!(text, "; raise {to}{flag} by {}{early}", signal.add);
    }
    text
}

fn flag_text(schedule: &Schedule, flag: Flag) -> String {
    let name = schedule.flags.get(usize::from(flag.family.0)).map_or("?", |family| family.name.as_str());
    format!("{name}[{}]", flag.slot)
}

fn wait_text(schedule: &Schedule, wait: &Wait) -> String {
    let flag = flag_text(schedule, wait.flag);
    let run = match (wait.count, wait.stride) {
        (1, _) => String::new(),
        (count, 1) => format!(" x {count}"),
        (count, stride) => format!(" x {count} by {stride}"),
    };
    let gate = match wait.gate {
        Gate::Start => "",
        Gate::KStep => " at k steps",
        Gate::Output => " at output",
    };
    format!("{flag}{run} >= {}{gate}", wait.at_least)
}

fn at_text(at: At) -> String {
    match at {
        At::ME => String::new(),
        At::Offset(offset) => format!("{offset} "),
        At::AllLocal => "all local ".to_owned(),
    }
}

fn region_text(schedule: &Schedule, region: &Region) -> String {
    let name = schedule.buffers.get(usize::from(region.buffer.0)).map_or("?", |buffer| buffer.name.as_str());
    let Region { offset, blocks, rows, row_bytes, block_pitch, row_pitch, .. } = *region;
    let blocks = if blocks == 1 { String::new() } else { format!("{blocks} x {block_pitch}, ") };
    format!("{name}[{offset}: {blocks}{rows} x {row_bytes} / {row_pitch}]")
}

fn place_text(schedule: &Schedule, place: &Place) -> String {
    at_text(place.at) + &region_text(schedule, &place.region)
}

fn op_text(schedule: &Schedule, op: &Op) -> String {
    let region = |region: &Region| region_text(schedule, region);
    let partial = |part: &Partial| format!("{} {}", region(&part.o), region(&part.l));
    let places =
        |places: &[Place]| places.iter().map(|place| place_text(schedule, place)).collect::<Vec<_>>().join(", ");
    let name = op.name();
    match op {
        Op::GemmTile { a, b, outs, tile: [bm, bn, bk], .. } => {
            let outs: Vec<String> = outs
                .iter()
                .map(|out| {
                    let sign = if out.mode == WriteMode::Add { "+=" } else { "=" };
                    format!("{} {sign}", place_text(schedule, &out.place))
                })
                .collect();
            format!("{name} {bm}x{bn}x{bk} {} {} x {}", outs.join(" "), region(a), region(b))
        }
        Op::AttentionTile { q, k, v, state, out, first, last, tile: [bq, bkv], .. } => {
            let mut text = format!("{name} {bq}x{bkv} {} {} {}", region(q), region(k), region(v));
            if let Some(state) = state {
                let _ = write!(text, " state {}", region(state));
            }
            if let Some(out) = out {
                let _ = write!(text, " out {}", partial(out));
            }
            text + if *first { " first" } else { "" } + if *last { " last" } else { "" }
        }
        Op::AttentionMerge { parts, out } => {
            let parts: Vec<String> = parts.iter().map(partial).collect();
            format!("{name} {} -> {}", parts.join(" + "), partial(out))
        }
        Op::Copy { src, dsts, .. } => format!("{name} {} -> {}", place_text(schedule, src), places(dsts)),
        Op::GatherRows { table, src, dst, .. } => {
            let source = schedule.buffers.get(usize::from(src.0)).map_or("?", |buffer| buffer.name.as_str());
            format!("{name} {source} by table {}..{} -> {}", table.start, table.start + table.len, region(dst))
        }
        Op::Reduce { inputs, outputs, .. } => format!("{name} {} -> {}", places(inputs), places(outputs)),
        Op::Put { src, dst, queue, publish, arrived, sent } => {
            let publish = match publish {
                Publish::SameQueueWrite => "write on the same queue".to_owned(),
                Publish::Immediate => "immediate".to_owned(),
                Publish::SeparateWrite { queue } => format!("write on queue {queue}"),
            };
            let sent = sent.map_or_else(String::new, |sent| format!(", sent {}", flag_text(schedule, sent)));
            let (src, dst, arrived) = (region(src), place_text(schedule, dst), flag_text(schedule, *arrived));
            format!("{name} on queue {queue} {src} -> {dst}, arrived {arrived} by {publish}{sent}")
        }
        Op::Collective { kind, src, dst } => format!("{} {} -> {}", word(kind), region(src), region(dst)),
        Op::Fill { dst } => format!("{name} {} = 0", place_text(schedule, dst)),
        Op::Sync => name.to_owned(),
    }
}

/// What differs between two schedules, a line each, at most `limit` tasks per role; empty when nothing does.
pub fn diff(a: &Schedule, b: &Schedule, limit: usize) -> String {
    let mut text = String::new();
    let mut line = |what: &str, a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| {
        let (a, b) = (format!("{a:?}"), format!("{b:?}"));
        if a != b {
            let _ = writeln!(text, "{what}\n- {a}\n+ {b}");
        }
    };
    line("kernel", &a.kernel, &b.kernel);
    line("cluster", &a.cluster, &b.cluster);
    line("fabric", &a.fabric, &b.fabric);
    line("spec", &a.spec, &b.spec);
    line("symmetry", &a.symmetry, &b.symmetry);
    line("useful_flops", &a.useful_flops, &b.useful_flops);
    pairs(&a.buffers, &b.buffers, |i, a, b| line(&format!("buffer {i}"), &a, &b));
    pairs(&a.flags, &b.flags, |i, a, b| line(&format!("flag family {i}"), &a, &b));
    pairs(&a.launches, &b.launches, |i, a, b| line(&format!("launch {i}"), &a, &b));
    let same_roles = a.role_indices().eq(b.role_indices());
    if a.cluster != b.cluster || !same_roles {
        text.push_str("tasks are not compared: clusters or roles differ\n");
        return text;
    }
    let mut ranks = [a.representatives(), b.representatives()].concat();
    ranks.sort_unstable();
    ranks.dedup();
    for rank in ranks {
        for (launch, role) in a.role_indices() {
            diff_tasks((a, b), rank, (launch, role), limit, &mut text);
        }
        if a.source.table(rank) != b.source.table(rank) {
            let _ = writeln!(text, "rank {rank}: gather tables differ");
        }
    }
    text
}

fn diff_tasks(
    (a, b): (&Schedule, &Schedule),
    rank: Rank,
    (launch, role): (usize, usize),
    limit: usize,
    text: &mut String,
) {
    let old = a.tasks(rank, launch, role);
    let mut differing = 0;
    let mut count = 0;
    let name = format!("rank {rank} {}/{}", a.launches[launch].name, a.launches[launch].roles[role].kind);
    b.for_each_task(rank, launch, role, |new| {
        let before = old.get(count);
        if before != Some(&new) {
            differing += 1;
            if differing <= limit {
                let _ = writeln!(text, "{name} task {count}");
                if let Some(before) = before {
                    let _ = writeln!(text, "- {}", task_text(a, before));
                }
                let _ = writeln!(text, "+ {}", task_text(b, &new));
            }
        }
        count += 1;
    });
    for (i, task) in old.iter().enumerate().skip(count) {
        differing += 1;
        if differing <= limit {
            let _ = writeln!(text, "{name} task {i}\n- {}", task_text(a, task));
        }
    }
    if differing > limit {
        let _ = writeln!(text, "{name}: {} more tasks differ", differing - limit);
    }
}

/// Calls `f` with the elements of two lists side by side.
fn pairs<T>(a: &[T], b: &[T], mut f: impl FnMut(usize, Option<&T>, Option<&T>)) {
    for i in 0..a.len().max(b.len()) {
        f(i, a.get(i), b.get(i));
    }
}

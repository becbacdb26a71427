//! Measured timelines as files, beside the rows of the same run.
//!
//! ```text
//! # kernel = gemm_rs            the point, and everything that its row says of how it was measured
//! rank,role,launch,kind,block,cta,lane,task,op,taken_ps,start_ps,free_ps,end_ps,waited_for
//! 0,0,main,compute,3,3,0,3,gemm_tile,1200,1900,9100,10400,staged[3]
//! ```
//!
//! The times are those of the simulator's timeline: a task is taken, may start, lets its CTA go, ends. They begin with the
//! first CTA (on the host device: with the barrier before the run), not with the launch command.

use crate::data::{Cell, Sheet};
use crate::engine::Prepared;
use crate::error::ExperimentError;
use crate::measure_row::MeasuredRow;
use crate::plan::{Case, Source, in_row};
use crate::provenance::make_folder_of;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use tilewire_hw::timeline::TaskTime;
use tilewire_kernels::{RoleSplit, Schedule, schedule_hash};
use tilewire_sim::Execution;
use tilewire_sim::compile::{Compiled, NONE};
use tilewire_sim::engine::{self, Run};

/// Folder beside the rows.
pub const FOLDER: &str = "timelines";

const COLUMNS: [&str; 14] = [
    "rank",
    "role",
    "launch",
    "kind",
    "block",
    "cta",
    "lane",
    "task",
    "op",
    "taken_ps",
    "start_ps",
    "free_ps",
    "end_ps",
    "waited_for",
];

/// Where the timeline of a row lies, below the directory of the rows.
pub fn path(root: &Path, fields: &BTreeMap<String, String>) -> PathBuf {
    let field = |name: &str| fields.get(name).map_or("", String::as_str);
    let hash = field("schedule_hash").get(..16).unwrap_or_default();
    root.join(FOLDER).join(format!("{}-{hash}-{}-{}.csv", field("kernel"), field("machine"), field("clock")))
}

/// Refuses to go on from rows one of which has no timeline.
///
/// # Errors
/// [`ExperimentError::Refused`].
pub fn all_there<'a>(
    root: &Path,
    mut rows: impl Iterator<Item = &'a BTreeMap<String, String>>,
) -> Result<(), ExperimentError> {
    let Some(missing) = rows.find(|fields| !path(root, fields).exists()) else { return Ok(()) };
    let problem = "is not there, but its row is: measured without --timelines; choose another directory with -o";
    Err(ExperimentError::refused(path(root, missing).display().to_string(), problem))
}

/// Writes a timeline with the fields of its row.
///
/// # Errors
/// [`ExperimentError::Write`].
pub fn write(
    file: &Path,
    fields: &BTreeMap<String, String>,
    schedule: &Schedule,
    tasks: &[TaskTime],
) -> Result<(), ExperimentError> {
    make_folder_of(file)?;
    std::fs::write(file, text(fields, schedule, tasks)).map_err(|error| ExperimentError::write(file, error))
}

fn text(fields: &BTreeMap<String, String>, schedule: &Schedule, tasks: &[TaskTime]) -> String {
    let mut text = String::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
        let _ = writeln!(text, "# {name} = {}", value.replace(['\n', '\r'], " "));
    }
    text += &COLUMNS.join(",");
    text.push('\n');
    let roles: Vec<(usize, usize)> = schedule.role_indices().collect();
    let mut ops: BTreeMap<(u32, u32), Vec<&'static str>> = BTreeMap::new();
    for task in tasks {
        let (launch, role) = roles[task.role as usize];
        let ops = ops.entry((task.rank, task.role)).or_insert_with(|| {
            let mut names = Vec::new();
            schedule
                .for_each_task(schedule.cluster.rank(task.rank as usize), launch, role, |t| names.push(t.op.name()));
            names
        });
        let TaskTime { rank, role: number, block, cta, lane, task: index, taken, start, free, end, .. } = *task;
        let (name, kind) = (&schedule.launches[launch].name, schedule.launches[launch].roles[role].kind);
        let waited_for = task
            .waited_for
            .map_or_else(String::new, |(family, slot)| format!("{}[{slot}]", schedule.flags[family as usize].name));
        let op = ops[index as usize];
        let _ = writeln!(
            text,
            "{rank},{number},{name},{kind},{block},{cta},{lane},{index},{op},{taken},{start},{free},{end},{waited_for}"
        );
    }
    text
}

/// A timeline that was read, in the simulator's terms.
pub struct Measured {
    /// The case that was measured.
    pub case: Case,
    /// Its split.
    pub split: RoleSplit,
    /// Its schedule, compiled with the ranks that were measured.
    pub prepared: Prepared,
    /// Tasks, by rank and when they were taken, and the launches of rank 0 as the tasks show them.
    pub run: Run,
    /// What the file says of how it was measured.
    pub row: MeasuredRow,
}

impl Measured {
    /// Reads a file that `measure --timelines` wrote.
    ///
    /// # Errors
    /// [`ExperimentError`] with file, line and column for anything else, and when this version builds another schedule.
    pub fn read(file: &Path, source: &Source) -> Result<Self, ExperimentError> {
        let sheet = Sheet::read(file)?;
        let row = MeasuredRow::new(sheet.file.clone(), header(file)?);
        let refuse = |problem: String| ExperimentError::refused(sheet.file.clone(), problem);
        if row.fields().is_empty() {
            let problem = "no lines \"# NAME = VALUE\" above the columns, which say what was recorded; allowed: a file that \
                           `tilewire measure --timelines` wrote";
            return Err(refuse(problem.into()));
        }
        let draft = row.draft().map_err(|problem| {
            refuse(format!("{problem}; allowed: a file that `tilewire measure --timelines` of this version wrote"))
        })?;
        // A GPU or process per rank shows every rank, one GPU that stands for all shows one.
        let all = row.text("mode") != "mirror" || row.text("device") == "host";
        let execution = if all { Execution::Full } else { Execution::Mirror };
        let case = crate::plan::Draft { execution: Some(execution), ..draft }.resolve(source);
        let case = case.map_err(|error| in_row(&row.place, error))?;
        let prepared = Prepared::new(&case).map_err(|error| error.at(&row.place))?;
        let split = row.split().map_err(refuse)?;
        let hash = schedule_hash(&prepared.schedule, &split).to_string();
        if row.text("schedule_hash") != hash {
            let recorded = row.text("schedule_hash");
            return Err(refuse(format!(
                "schedule {recorded} was recorded, {hash} is what this version builds; record again"
            )));
        }
        let timeline = tasks(&sheet, &prepared)?;
        let run = run(prepared.simulation.compiled(), timeline);
        Ok(Self { case, split, prepared, run, row })
    }
}

/// Whether a file is the timeline of this very row: whatever both say of it is the same.
///
/// # Errors
/// [`ExperimentError::Read`].
pub fn is_of(file: &Path, row: &MeasuredRow) -> Result<bool, ExperimentError> {
    let said = header(file)?;
    Ok(!said.is_empty() && row.fields().iter().all(|(name, value)| said.get(name).is_none_or(|said| said == value)))
}

/// The fields above the columns.
fn header(file: &Path) -> Result<BTreeMap<String, String>, ExperimentError> {
    let text = crate::data::read_text(file);
    let text = text.map_err(|message| ExperimentError::Read { file: file.to_owned(), message })?;
    let comments = text.trim_start_matches('\u{feff}').lines().take_while(|line| line.starts_with('#'));
    let pairs = comments.filter_map(|line| line[1..].trim().split_once(" = "));
    Ok(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

/// Rank, launch, block and lane.
type Worker = [u32; 4];

/// A task as it stands in the file.
struct Line {
    worker: Worker,
    time: engine::TaskTime,
}

/// The tasks of a file, each of the schedule's once.
fn tasks(sheet: &Sheet, prepared: &Prepared) -> Result<Vec<engine::TaskTime>, ExperimentError> {
    let compiled = prepared.simulation.compiled();
    let columns = sheet.find(COLUMNS)?;
    let mut lines = Vec::with_capacity(sheet.rows.len());
    let mut seen = BTreeSet::new();
    for row in &sheet.rows {
        let cells = columns.map(|column| sheet.cell(row, column));
        let line = line(&cells, &prepared.schedule, compiled)?;
        if !seen.insert((line.time.rank, line.time.task)) {
            return Err(cells[7].refuse("each task of a rank once").into());
        }
        lines.push(line);
    }
    let all: usize = compiled.program_of.iter().map(|&program| compiled.programs[program as usize].tasks.len()).sum();
    if lines.len() != all {
        let problem = format!("{} tasks, the schedule has {all}; the file is not whole, record again", lines.len());
        return Err(ExperimentError::refused(sheet.file.clone(), problem));
    }
    Ok(in_turn(lines))
}

fn line(cells: &[Cell<'_>; 14], schedule: &Schedule, compiled: &Compiled) -> Result<Line, ExperimentError> {
    let [rank, role, launch, kind, block, cta, lane, task, _, taken, start, free, end, waited_for] = cells;
    let below = |cell: &Cell<'_>, count: usize| {
        cell.required(&format!("a whole number below {count}"), |&value: &u32| (value as usize) < count)
    };
    let any = |cell: &Cell<'_>| cell.required("a whole number", |_: &u32| true);
    let rank = below(rank, compiled.ranks.len())?;
    let program = &compiled.programs[compiled.program_of[rank as usize] as usize];
    let role = below(role, program.roles.len())?;
    let of = &program.roles[role as usize];
    let name = &compiled.launches[of.launch as usize].name;
    if launch.text != name {
        return Err(launch.refuse(format!("{name}, the launch of role {role}")).into());
    }
    if kind.text != of.kind.name() {
        return Err(kind.refuse(format!("{}, the kind of role {role}", of.kind)).into());
    }
    let index = below(task, of.tasks as usize)?;
    let after = |cell: &Cell<'_>, before: u64| {
        cell.required(&format!("a whole number from {before}, the moment before"), |&ps: &u64| ps >= before)
    };
    let taken = after(taken, 0)?;
    let start = after(start, taken)?;
    let (free, end) = (after(free, start)?, after(end, start)?);
    let flag = |text: &str| {
        let (family, slot) = text.strip_suffix(']')?.split_once('[')?;
        let family = schedule.flags.iter().position(|known| known.name == family)?;
        let slot = slot.parse().ok().filter(|&slot: &u32| slot < schedule.flags[family].slots)?;
        Some(compiled.family_base[family] + slot)
    };
    let waited_for = match waited_for.text {
        "" => NONE,
        text => flag(text).ok_or_else(|| waited_for.refuse("FLAG[SLOT] of the schedule, or nothing"))?,
    };
    let (cta, lane) = (any(cta)?, any(lane)?);
    let time = engine::TaskTime { rank, role, cta, lane, task: of.first + index, taken, start, free, end, waited_for };
    Ok(Line { worker: [rank, of.launch, any(block)?, lane], time })
}

/// A CTA does one task at a time, as the simulator's do: what it takes ahead, while the task before runs, counts from when
/// that one lets it go.
fn in_turn(mut lines: Vec<Line>) -> Vec<engine::TaskTime> {
    lines.sort_by_key(|line| (line.worker, line.time.taken, line.time.free));
    let mut before: Option<(Worker, u64)> = None;
    for Line { worker, time } in &mut lines {
        let free = before.filter(|(known, _)| known == worker).map_or(0, |(_, free)| free);
        time.taken = time.taken.max(free);
        time.start = time.start.max(time.taken);
        time.free = time.free.max(time.start);
        time.end = time.end.max(time.start);
        before = Some((*worker, time.free));
    }
    let mut tasks: Vec<engine::TaskTime> = lines.into_iter().map(|line| line.time).collect();
    tasks.sort_unstable_by_key(|t| (t.rank, t.taken, t.role, t.task));
    tasks
}

/// What the tasks show of a run.
fn run(compiled: &Compiled, timeline: Vec<engine::TaskTime>) -> Run {
    let launch_of = |task: &engine::TaskTime| {
        let program = &compiled.programs[compiled.program_of[task.rank as usize] as usize];
        program.roles[task.role as usize].launch as usize
    };
    // A launch that waits for another begins with its first task, for all that the tasks show.
    let launch = |launch: usize| {
        let of = || timeline.iter().filter(|task| launch_of(task) == launch);
        let begin = if launch == 0 { 0 } else { of().map(|task| task.taken).min().unwrap_or(0) };
        (begin, of().map(|task| task.end).max().unwrap_or(begin))
    };
    let launches = (0..compiled.launches.len()).map(launch).collect();
    Run { end: timeline.iter().map(|task| task.end).max().unwrap_or(0), launches, timeline, ..Run::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(block: u32, taken: u64, start: u64, free: u64) -> Line {
        let time = engine::TaskTime {
            rank: 0,
            role: 0,
            cta: block,
            lane: 0,
            task: 0,
            taken,
            start,
            free,
            end: free + 5,
            waited_for: NONE,
        };
        Line { worker: [0, 0, block, 0], time }
    }

    #[test]
    fn what_is_taken_ahead_counts_from_when_its_cta_is_free() {
        let tasks = in_turn(vec![line(0, 40, 90, 200), line(0, 0, 10, 100), line(1, 45, 50, 60)]);
        let times: Vec<_> = tasks.iter().map(|t| (t.cta, t.taken, t.start, t.free, t.end)).collect();
        assert_eq!(times, [(0, 0, 10, 100, 105), (1, 45, 50, 60, 65), (0, 100, 100, 200, 205)]);
    }
}

//! For whom each role waited, measured beside predicted: from the timelines of rows that were recorded.
//!
//! ```text
//! role waits       between taking a task and its start, for the flag of the start that came last
//!      or polls    between two tasks, where CTAs take what is ready: for all flags that make the task so
//! ```
//!
//! The same rule reads the simulator's timeline and the measured one. Waits inside a tile, for the flag of a step or of its
//! output, are part of the tile on both sides.

use crate::compare::{Joined, Pair};
use crate::compare_tables::{NAMED_BY, named};
use crate::engine::Prepared;
use crate::error::ExperimentError;
use crate::plan::Source;
use crate::plot::Frame;
use crate::plot::bars::{BarPlot, BarSeries, Fill};
use crate::plot::style::{FUSED, UNFUSED};
use crate::provenance::footer;
use crate::table::Table;
use crate::timeline::{self, Measured};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tilewire_kernels::RoleKind;
use tilewire_kernels::schedule::Claim;
use tilewire_sim::compile::NONE;
use tilewire_sim::engine::{Run, TaskTime};

/// Lines of a point that are printed and drawn.
const SHOWN: usize = 6;
/// Points that get a plot at most.
const MAX_PLOTS: usize = 24;

/// A role, the flag family it waits for, and who raises that.
type Cause = (RoleKind, String, String);

/// Waiting of a role, on the average of its CTAs.
#[derive(Clone, Debug)]
pub struct Wait {
    /// Who waits for what, raised by whom.
    cause: Cause,
    /// us per CTA.
    measured_us: f64,
    /// us per CTA.
    predicted_us: f64,
}

/// A row with a timeline.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Kernel, shape and split.
    title: String,
    /// As file names have it.
    name: String,
    /// As the CSV file has it.
    split: String,
    /// What else names it there.
    named: [String; 5],
    /// The longest first.
    waits: Vec<Wait>,
}

/// The rows whose timelines lie beside their file.
///
/// # Errors
/// [`ExperimentError`] for a timeline that cannot be read.
pub fn recorded(joined: &[Joined], source: &Source) -> Result<Vec<Recorded>, ExperimentError> {
    let pairs: Vec<(&Joined, &Pair)> = joined.iter().flat_map(|j| j.pairs.iter().map(move |pair| (j, pair))).collect();
    let one = |(j, pair): (&Joined, &Pair)| {
        let file = pair.row.place.rsplit_once(':').map_or("", |(file, _)| file);
        let folder = Path::new(file).parent().unwrap_or(Path::new(""));
        let timeline = timeline::path(folder, pair.row.fields());
        if !timeline.exists() || !timeline::is_of(&timeline, &pair.row)? {
            return Ok::<_, ExperimentError>(None);
        }
        let Measured { prepared, run, split, .. } = Measured::read(&timeline, source)?;
        let (measured, predicted) = (waits(&prepared, &run), waits(&prepared, &prepared.timeline(&split)?.0));
        let causes: BTreeSet<&Cause> = measured.keys().chain(predicted.keys()).collect();
        let us = |of: &BTreeMap<Cause, f64>, cause: &Cause| of.get(cause).copied().unwrap_or(0.0);
        let mut waits: Vec<Wait> = causes
            .into_iter()
            .map(|cause| Wait {
                cause: cause.clone(),
                measured_us: us(&measured, cause),
                predicted_us: us(&predicted, cause),
            })
            .collect();
        let most = |wait: &Wait| wait.measured_us.max(wait.predicted_us);
        waits.sort_by(|a, b| most(b).total_cmp(&most(a)));
        let text = split.to_string();
        Ok(Some(Recorded {
            title: format!("{}, {text}", j.case),
            name: format!("{}-{}-{}", j.case.name, j.case.target, text.replace([',', '='], "")),
            split: text.replace(',', ";"),
            named: named(j),
            waits,
        }))
    };
    let found: Vec<Option<Recorded>> = pairs.into_par_iter().map(one).collect::<Result<_, _>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// Time that the CTAs of each role waited, us on their average.
fn waits(prepared: &Prepared, run: &Run) -> BTreeMap<Cause, f64> {
    let compiled = prepared.simulation.compiled();
    let mut sums: BTreeMap<Cause, u64> = BTreeMap::new();
    let mut ctas: BTreeMap<RoleKind, BTreeSet<[u32; 4]>> = BTreeMap::new();
    let mut before: BTreeMap<[u32; 4], u64> = BTreeMap::new();
    for task in &run.timeline {
        let program = &compiled.programs[compiled.program_of[task.rank as usize] as usize];
        let role = &program.roles[task.role as usize];
        let TaskTime { rank, role: number, cta, lane, taken, start, free, .. } = *task;
        let worker = [rank, number, cta, lane];
        ctas.entry(role.kind).or_default().insert(worker);
        let launched = run.launches[role.launch as usize].0;
        let since = before.insert(worker, free.max(start)).unwrap_or(launched);
        let compact = &program.tasks[task.task as usize];
        let first = compact.wait0 as usize;
        let spans =
            program.waits[first..first + usize::from(compact.waits[0])].iter().map(|wait| program.awaited(wait));
        let mut families: Vec<usize> = Vec::new();
        for span in spans {
            let family = compiled.family_of(span.flag);
            if !families.contains(&family) {
                families.push(family);
            }
        }
        let polls = matches!(role.claim, Claim::Ready { .. });
        // A task that waited again inside names that flag: it is not what held its start.
        let last = (task.waited_for != NONE).then(|| compiled.family_of(task.waited_for));
        if let Some(last) = last.filter(|last| !polls && families.contains(last)) {
            families = vec![last];
        }
        let waited = if polls { start - since.min(taken) } else { start - taken };
        if waited == 0 || families.is_empty() || (!polls && last.is_none()) {
            continue;
        }
        let mut causes: Vec<&str> = families
            .iter()
            .map(|&family| match compiled.raisers[family] {
                (_, true) => "proxy",
                (raiser, false) => raiser.map_or("none", RoleKind::name),
            })
            .collect();
        causes.dedup();
        let flags: Vec<&str> = families.iter().map(|&family| compiled.families[family].as_str()).collect();
        *sums.entry((role.kind, flags.join("+"), causes.join("+"))).or_default() += waited;
    }
    let per_cta = |kind: RoleKind| ctas.get(&kind).map_or(1.0, |all| all.len() as f64);
    sums.into_iter().map(|(cause, ps)| (cause.clone(), ps as f64 * 1e-6 / per_cta(cause.0))).collect()
}

/// A line per row, role and flag.
pub fn csv(recorded: &[Recorded]) -> Vec<Vec<String>> {
    let head = ["split", "role", "flag", "cause_role", "measured_us_per_cta", "predicted_us_per_cta"];
    let mut rows = vec![NAMED_BY.into_iter().chain(head).map(str::to_owned).collect()];
    for (point, wait) in recorded.iter().flat_map(|point| point.waits.iter().map(move |wait| (point, wait))) {
        let (role, flag, cause) = &wait.cause;
        let times = [wait.measured_us, wait.predicted_us].map(|us| format!("{us:.3}"));
        let cause = [point.split.clone(), role.to_string(), flag.clone(), cause.clone()];
        rows.push(point.named.iter().cloned().chain(cause).chain(times).collect());
    }
    rows
}

/// The longest waits of each recorded row; nothing without one.
pub fn text(recorded: &[Recorded]) -> String {
    if recorded.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["recorded rows: who", "waits for", "raised by", "measured_us/CTA", "predicted_us/CTA"]);
    for point in recorded {
        let ([kernel, _, _, shape, _], split) = (&point.named, &point.split);
        table.row([format!("{kernel} {shape} {split}"), String::new(), String::new(), String::new(), String::new()]);
        if point.waits.is_empty() {
            table.row(["  nobody", "a start", "", "", ""].map(str::to_owned));
        }
        for wait in point.waits.iter().take(SHOWN) {
            let (role, flag, cause) = &wait.cause;
            let times = [wait.measured_us, wait.predicted_us].map(|us| format!("{us:.1}"));
            table.row([format!("  {role}"), flag.clone(), cause.clone()].into_iter().chain(times));
        }
    }
    format!("\n{}", table.render(2))
}

/// As [`self::csv()`], for `--json`.
pub fn json(recorded: &[Recorded]) -> Value {
    let wait = |wait: &Wait| {
        let (role, flag, cause) = &wait.cause;
        json!({
            "role": role.name(), "flag": flag, "cause_role": cause,
            "measured_us_per_cta": wait.measured_us, "predicted_us_per_cta": wait.predicted_us,
        })
    };
    recorded
        .iter()
        .map(|point| json!({ "case": point.title, "waits": point.waits.iter().map(wait).collect::<Vec<_>>() }))
        .collect()
}

/// Waits side by side, a plot for each recorded row.
pub fn plots(recorded: &[Recorded], sources: &str) -> Vec<(String, BarPlot)> {
    let plot = |(number, point): (usize, &Recorded)| {
        let waits: Vec<&Wait> = point.waits.iter().take(SHOWN).collect();
        let series = |name: &str, color, fill, us: fn(&Wait) -> f64| BarSeries {
            name: name.into(),
            color,
            fill,
            values: waits.iter().map(|wait| Some((us(wait), us(wait), us(wait)))).collect(),
        };
        let plot = BarPlot {
            frame: Frame {
                title: "What each role waited for, and who raises it; mean over its CTAs".into(),
                subtitle: point.title.clone(),
                footer: footer(sources),
            },
            x_name: "role: flag, raised by".into(),
            groups: waits.iter().map(|w| format!("{}: {}, {}", w.cause.0.short(), w.cause.1, w.cause.2)).collect(),
            y_name: "waiting [us per CTA]".into(),
            series: vec![
                series("measured", UNFUSED, Fill::Hatched, |wait| wait.measured_us),
                series("predicted", FUSED, Fill::Solid, |wait| wait.predicted_us),
            ],
        };
        (format!("waits.{number:02}-{}", point.name), plot)
    };
    recorded.iter().filter(|point| !point.waits.is_empty()).take(MAX_PLOTS).enumerate().map(plot).collect()
}

//! The plots of a sweep: chosen by what varies in it.
//!
//! | varies in a schedule's splits | plots |
//! |---|---|
//! | one role (beside one that takes the rest) | time and overlap against it |
//! | two roles or more | the same for each, best over the others; a heat map of the two that matter most |
//!
//! When the size varies and the split does not, TFLOPS and overlap against size, a line per schedule.

use crate::engine::Answer;
use crate::experiment::Experiment;
use crate::plan::Case;
use crate::plot::Frame;
use crate::plot::axis::Spread;
use crate::plot::heat::HeatMap;
use crate::plot::line::{LinePlot, Panel, Series};
use crate::plot::style::{FUSED, FUSED_SERIES, OVERLAP, QUIET, UNFUSED_SERIES};
use crate::progress;
use crate::provenance::footer;
use crate::row::Outcome;
use crate::shape;
use crate::sweep::Row;
use std::collections::{BTreeMap, BTreeSet};
use tilewire_kernels::{ProblemKind, RoleKind};

/// Schedules that get plots of their own at most.
pub const MAX_GROUPS: usize = 12;

/// Lines of a plot at most.
pub const MAX_LINES: usize = 8;

/// The name of the plot over sizes.
pub const BY_SIZE: &str = "size";

/// A plot of a sweep.
pub enum Plot {
    /// Lines.
    Line(LinePlot),
    /// Heat map.
    Heat(HeatMap),
}

impl Plot {
    fn frame(&mut self) -> &mut Frame {
        match self {
            Self::Line(line) => &mut line.frame,
            Self::Heat(heat) => &mut heat.frame,
        }
    }
}

/// Names and plots of the rows that there are, which each plot says where they are not all.
pub fn plots(experiment: &Experiment, rows: &[Row]) -> Vec<(String, Plot)> {
    let mut by_group: BTreeMap<usize, Vec<&Answer>> = BTreeMap::new();
    let mut left: Vec<usize> = experiment.groups.iter().map(|group| group.splits.len()).collect();
    for row in rows {
        left[row.group] -= 1;
        if let Outcome::Done(answer) = &row.outcome {
            by_group.entry(row.group).or_default().push(answer);
        }
    }
    let mut plots = Vec::new();
    let several = experiment.groups.len() > 1;
    for (&g, answers) in by_group.iter().take(MAX_GROUPS) {
        let case = &experiment.groups[g].case;
        let roles = varying(answers);
        let name =
            |what: &str| if several { format!("{what}.{}", file_name(experiment, g, case)) } else { what.to_owned() };
        for &role in &roles {
            plots.push((name(&format!("time_{}", role.short())), Plot::Line(against(experiment, case, answers, role))));
        }
        if let [x, y, ..] = roles[..] {
            plots.push((name("heat"), Plot::Heat(heat(experiment, case, answers, x, y))));
        }
    }
    // The best of some splits is not the best.
    by_group.retain(|&g, _| left[g] == 0);
    if let Some(plot) = by_size(experiment, &by_group) {
        plots.push((BY_SIZE.into(), Plot::Line(plot)));
    }
    if let Some(partial) = progress::partial(rows.len(), experiment.points()) {
        for (_, plot) in &mut plots {
            let frame = plot.frame();
            frame.subtitle = format!("partial, {partial}; {}", frame.subtitle);
        }
    }
    plots
}

fn file_name(experiment: &Experiment, g: usize, case: &Case) -> String {
    // The number tells files apart, and the title says it in full: file systems take some 255 bytes.
    let set: String = experiment.set_behind("-", case).chars().take(100).collect();
    format!("{g:02}-{}{}-{}-{}{set}", case.name, case.fusion.suffix(), case.target, case.problem.size())
}

/// Roles whose counts vary, those that vary freely: the one that takes the rest follows from the others.
fn varying(answers: &[&Answer]) -> Vec<RoleKind> {
    let counts = |kind| answers.iter().map(|answer| answer.split.get(kind)).collect::<BTreeSet<_>>().len();
    let mut roles: Vec<(RoleKind, usize)> =
        RoleKind::ALL.into_iter().map(|kind| (kind, counts(kind))).filter(|&(_, n)| n > 1).collect();
    let totals: BTreeSet<u64> = answers.iter().map(|answer| answer.split.total()).collect();
    // With the sum fixed one role is the rest: compute, as a rule.
    if totals.len() == 1 && roles.len() > 1 {
        roles.remove(0);
    }
    // The roles that were tried most finely first.
    roles.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    roles.into_iter().map(|(kind, _)| kind).collect()
}

fn subtitle(case: &Case) -> String {
    format!("{case}, {} options, {} protocol", case.set.name(), case.protocol_name())
}

fn sources<'a>(experiment: &Experiment, cases: impl IntoIterator<Item = &'a Case>) -> String {
    let machines: BTreeSet<&str> = cases.into_iter().map(|case| case.target.machine.name.as_str()).collect();
    let machines = machines.into_iter().collect::<Vec<_>>().join(", ");
    footer(&format!("experiment {}, seed {}, machine {machines}", experiment.name, experiment.seed))
}

/// Least time, and its overlap, for every value of a role.
fn against(experiment: &Experiment, case: &Case, answers: &[&Answer], role: RoleKind) -> LinePlot {
    let mut best: BTreeMap<u32, &Answer> = BTreeMap::new();
    let mut slowest: BTreeMap<u32, f64> = BTreeMap::new();
    for &answer in answers {
        let ctas = answer.split.get(role);
        let time = answer.prediction.time_us;
        best.entry(ctas)
            .and_modify(|b| {
                if time < b.prediction.time_us {
                    *b = answer;
                }
            })
            .or_insert(answer);
        slowest.entry(ctas).and_modify(|t| *t = t.max(time)).or_insert(time);
    }
    let points = |value: fn(&Answer) -> f64| best.iter().map(|(&ctas, &a)| (f64::from(ctas), value(a))).collect();
    let fastest = best.iter().min_by(|a, b| a.1.prediction.time_us.total_cmp(&b.1.prediction.time_us));
    let others = answers.len() > best.len();
    let mut time = Series::line("", FUSED, points(|answer| answer.prediction.time_us));
    if others {
        time.band = best.iter().map(|(&ctas, a)| (f64::from(ctas), a.prediction.time_us, slowest[&ctas])).collect();
    }
    time.mark = fastest.map(|(&ctas, a)| {
        let text = format!("best: {:.2} us at {}", a.prediction.time_us, a.split);
        ((f64::from(ctas), a.prediction.time_us), text)
    });
    let overlap = Series::line("", OVERLAP, points(|answer| answer.prediction.overlap * 100.0));
    let best_of = if others { "; line: best over the other roles, shaded: up to the worst" } else { "" };
    LinePlot {
        frame: Frame {
            title: format!(
                "{}: time and overlap against {} SMs{}",
                case.name,
                role.name(),
                experiment.set_behind(", ", case)
            ),
            subtitle: subtitle(case) + best_of,
            footer: sources(experiment, [case]),
        },
        x_name: format!("{} [SMs]", role.name()),
        x_spread: Spread::Linear,
        panels: vec![
            Panel { y_name: "time [us]".into(), with_zero: false, series: vec![time] },
            Panel { y_name: "overlap [%]".into(), with_zero: true, series: vec![overlap] },
        ],
    }
}

/// Least time over the other roles, for every pair of two roles.
fn heat(experiment: &Experiment, case: &Case, answers: &[&Answer], x: RoleKind, y: RoleKind) -> HeatMap {
    let axis = |kind| answers.iter().map(|a| a.split.get(kind)).collect::<BTreeSet<u32>>().into_iter().collect();
    let (xs, ys): (Vec<u32>, Vec<u32>) = (axis(x), axis(y));
    let mut values = vec![vec![None; xs.len()]; ys.len()];
    for answer in answers {
        let place = |axis: &[u32], kind| axis.iter().position(|&ctas| ctas == answer.split.get(kind));
        if let (Some(column), Some(row)) = (place(&xs, x), place(&ys, y)) {
            let cell: &mut Option<f64> = &mut values[row][column];
            let time = answer.prediction.time_us;
            *cell = Some(cell.map_or(time, |other| other.min(time)));
        }
    }
    let others = answers.len() > values.iter().flatten().flatten().count();
    HeatMap {
        frame: Frame {
            title: format!(
                "{}: time by {} and {} SMs{}",
                case.name,
                x.name(),
                y.name(),
                experiment.set_behind(", ", case)
            ),
            subtitle: subtitle(case) + if others { ", best over the other roles" } else { "" },
            footer: sources(experiment, [case]),
        },
        x_name: format!("{} [SMs]", x.name()),
        xs,
        y_name: format!("{} [SMs]", y.name()),
        ys,
        value_name: "time [us]".into(),
        values,
    }
}

/// Whether there are several sizes to draw something over.
pub fn several_sizes(experiment: &Experiment) -> bool {
    experiment.groups.iter().map(|group| group.case.problem.size()).collect::<BTreeSet<_>>().len() > 1
}

/// `name=value` of the fields of the shape beside the size that differ between cases.
fn other_fields(experiment: &Experiment, case: &Case) -> String {
    let all: BTreeSet<(&str, u64)> =
        experiment.groups.iter().flat_map(|group| shape::values(&group.case.problem)).collect();
    let varies = |name: &str| all.iter().filter(|(other, _)| *other == name).count() > 1;
    // The first field is the size.
    let fields = shape::values(&case.problem).into_iter().skip(1).filter(|(name, _)| varies(name));
    fields.fold(String::new(), |text, (name, value)| format!("{text}, {name}={value}"))
}

/// TFLOPS and overlap of the best row of every schedule against the size of the problem.
fn by_size(experiment: &Experiment, by_group: &BTreeMap<usize, Vec<&Answer>>) -> Option<LinePlot> {
    let differs = |of: fn(&Case) -> String| {
        experiment.groups.iter().map(|group| of(&group.case)).collect::<BTreeSet<_>>().len() > 1
    };
    // What all lines have in common is said once, in the subtitle.
    let parts: [fn(&Case) -> String; 5] = [
        |case| case.name.to_owned(),
        |case| case.target.to_string(),
        |case| format!("{} options", case.set.name()),
        |case| format!("{} protocol", case.protocol_name()),
        |case| case.fusion.name().to_owned(),
    ];
    let (varied, common): (Vec<_>, Vec<_>) = parts.into_iter().partition(|&part| differs(part));
    let words =
        |parts: &[fn(&Case) -> String], case: &Case| parts.iter().map(|part| part(case)).collect::<Vec<_>>().join(", ");
    let lines = |fields: bool| {
        let mut lines: BTreeMap<(bool, String), Vec<(f64, &Answer)>> = BTreeMap::new();
        for (&g, answers) in by_group {
            let case = &experiment.groups[g].case;
            let best = answers.iter().min_by(|a, b| a.prediction.time_us.total_cmp(&b.prediction.time_us))?;
            let fields = if fields { other_fields(experiment, case) } else { String::new() };
            let name = words(&varied, case) + &fields + &experiment.set_behind(", ", case);
            let line = lines.entry((case.is_unfused(), name.trim_start_matches(", ").to_owned())).or_default();
            line.push((case.problem.size() as f64, best));
        }
        Some(lines)
    };
    let unique = |line: &Vec<(f64, &Answer)>| {
        line.iter().map(|(size, _)| *size as u64).collect::<BTreeSet<_>>().len() == line.len()
    };
    // Several schedules of one size are no line: then other fields of the shape tell lines apart.
    let lines = lines(false).filter(|lines| lines.values().all(unique)).or_else(|| lines(true))?;
    let sizes: BTreeSet<u64> = lines.values().flatten().map(|(size, _)| *size as u64).collect();
    if sizes.len() < 2 || lines.len() > MAX_LINES || !lines.values().all(unique) {
        return None;
    }
    let series = |value: fn(&Answer) -> f64, named: bool| -> Vec<Series> {
        let mut fused = FUSED_SERIES.into_iter();
        let mut unfused = UNFUSED_SERIES.into_iter();
        lines
            .iter()
            .map(|((baseline, name), line)| {
                let points = line.iter().map(|&(size, answer)| (size, value(answer))).collect();
                let color = if *baseline { unfused.next() } else { fused.next() }.unwrap_or(QUIET);
                Series::line(if named { name.as_str() } else { "" }, color, points)
            })
            .collect()
    };
    let cases = || experiment.groups.iter().map(|group| &group.case);
    let case = cases().next()?;
    let kinds: Vec<ProblemKind> = cases().map(|case| case.kernel.problem_kind()).collect();
    let sizes_of = match kinds[0] {
        kind if kinds.iter().any(|&other| other != kind) => "size: m, tokens or sequence",
        ProblemKind::Gemm => "m [rows]",
        ProblemKind::Moe => "tokens over all GPUs",
        ProblemKind::Attention => "sequence over all GPUs",
    };
    Some(LinePlot {
        frame: Frame {
            title: experiment.question.clone(),
            subtitle: format!("{}; best split of each point", words(&common, case)),
            footer: sources(experiment, cases()),
        },
        x_name: sizes_of.into(),
        x_spread: Spread::Log,
        panels: vec![
            Panel {
                y_name: "TFLOPS per GPU".into(),
                with_zero: true,
                series: series(|answer| answer.prediction.tflops_per_gpu, true),
            },
            Panel {
                y_name: "overlap [%]".into(),
                with_zero: true,
                series: series(|answer| answer.prediction.overlap * 100.0, false),
            },
        ],
    })
}

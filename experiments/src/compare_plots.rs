//! The plots of a comparison: all rows against the line of equality, phases likewise, how far each phase is off, time
//! against the split, and who waited for whom.

use crate::compare::{Joined, Pair};
use crate::compare_waits::{self, Recorded};
use crate::plot::Frame;
use crate::plot::axis::Spread;
use crate::plot::bars::BarPlot;
use crate::plot::line::{LinePlot, Panel, Series};
use crate::plot::scatter::{DotSeries, ScatterPlot};
use crate::plot::style::{FUSED, KERNELS, OVERLAP, UNFUSED};
use crate::provenance::footer;
use std::collections::BTreeSet;
use tilewire_kernels::RoleKind;

/// Schedules that get plots of their own at most.
pub const MAX_SHAPES: usize = 24;
/// Deviation that is shaded.
const BAND: f64 = 0.05;

/// A plot.
pub enum Plot {
    /// Lines.
    Line(LinePlot),
    /// Dots against the line of equality.
    Scatter(ScatterPlot),
    /// Bars side by side.
    Bars(BarPlot),
}

/// Names and plots.
pub fn plots(joined: &[Joined], recorded: &[Recorded]) -> Vec<(String, Plot)> {
    let mut plots = vec![
        ("scatter".to_owned(), Plot::Scatter(totals(joined))),
        ("phases".into(), Plot::Scatter(phases(joined))),
        ("phase_errors".into(), Plot::Line(phase_errors(joined))),
    ];
    for (g, j) in joined.iter().enumerate().take(MAX_SHAPES) {
        if let Some(role) = varying(j) {
            let case = &j.case;
            let kernel = case.name.to_owned() + case.fusion.suffix();
            let name = format!("time_{}.{g:02}-{kernel}-{}-{}", role.short(), case.target, case.problem.size());
            plots.push((name, Plot::Line(against(j, role))));
        }
    }
    let waits = compare_waits::plots(recorded, &measured_by(joined)).into_iter();
    plots.extend(waits.map(|(name, plot)| (name, Plot::Bars(plot))));
    plots
}

fn measured_by(joined: &[Joined]) -> String {
    let row = &joined[0].pairs[0].row;
    format!("measured {} on {}, revision {}", row.text("date"), row.text("gpu"), row.text("revision"))
}

/// How many rows are off by how much, phase by phase.
fn phase_errors(joined: &[Joined]) -> LinePlot {
    let series = [("whole", FUSED, 0), ("compute alone", OVERLAP, 1), ("communication alone", UNFUSED, 2)]
        .into_iter()
        .filter_map(|(name, color, phase)| {
            let mut errors: Vec<f64> = joined.iter().flat_map(|j| j.errors(phase)).collect();
            errors.sort_by(f64::total_cmp);
            let share = |i: usize| (i + 1) as f64 / errors.len() as f64 * 100.0;
            let line: Vec<(f64, f64)> = errors.iter().enumerate().map(|(i, &e)| (share(i), e * 100.0)).collect();
            (!line.is_empty()).then(|| Series::line(name, color, line))
        })
        .collect();
    LinePlot {
        frame: Frame {
            title: "Error of the prediction, phase by phase".into(),
            subtitle: "the larger of predicted and measured over the smaller, less 1; rows in order of their own error"
                .into(),
            footer: footer(&measured_by(joined)),
        },
        x_name: "rows that are off by less [%]".into(),
        x_spread: Spread::Linear,
        panels: vec![Panel { y_name: "off by [%]".into(), with_zero: true, series }],
    }
}

fn sources(joined: &[Joined]) -> String {
    footer(&measured_by(joined))
}

fn totals(joined: &[Joined]) -> ScatterPlot {
    let names: BTreeSet<(&str, String)> = joined.iter().map(|j| (j.case.name, j.case.target.to_string())).collect();
    let series = names
        .iter()
        .enumerate()
        .map(|(i, (kernel, target))| DotSeries {
            name: format!("{kernel} {target}"),
            color: KERNELS[i % KERNELS.len()],
            hollow: i >= KERNELS.len(),
            points: joined
                .iter()
                .filter(|j| j.case.name == *kernel && j.case.target.to_string() == *target)
                .flat_map(|j| j.pairs.iter().map(|pair| pair.phases[0]))
                .collect(),
        })
        .collect();
    scatter(joined, "time of the whole schedule", "time", series)
}

fn phases(joined: &[Joined]) -> ScatterPlot {
    let series =
        [("compute alone", FUSED, 1), ("communication alone", UNFUSED, 2)].map(|(name, color, phase)| DotSeries {
            name: name.into(),
            color,
            hollow: true,
            points: joined
                .iter()
                .flat_map(|j| j.pairs.iter().map(move |pair| pair.phases[phase]))
                .filter(|times| times.0.is_finite())
                .collect(),
        });
    scatter(joined, "its phases alone", "time of a phase", series.to_vec())
}

fn scatter(joined: &[Joined], what: &str, name: &str, series: Vec<DotSeries>) -> ScatterPlot {
    ScatterPlot {
        frame: Frame {
            title: format!("Predicted against measured: {what}"),
            subtitle: format!("{} schedules, every split that was measured", joined.len()),
            footer: sources(joined),
        },
        x_name: format!("measured {name} [us]"),
        y_name: format!("predicted {name} [us]"),
        band: BAND,
        series,
    }
}

/// The role that varies most beside compute; compute when no other does.
fn varying(j: &Joined) -> Option<RoleKind> {
    let counts = |kind| j.pairs.iter().map(|pair| pair.answer.split.get(kind)).collect::<BTreeSet<_>>().len();
    let others = RoleKind::ALL.into_iter().filter(|&kind| kind != RoleKind::Compute && counts(kind) > 1);
    others.max_by_key(|&kind| counts(kind)).or_else(|| (counts(RoleKind::Compute) > 1).then_some(RoleKind::Compute))
}

/// Time, and the phases alone, against the CTAs of a role; the least of each over the other roles.
fn against(j: &Joined, role: RoleKind) -> LinePlot {
    let ctas: BTreeSet<u32> = j.pairs.iter().map(|pair| pair.answer.split.get(role)).collect();
    let least = |ctas: u32, of: &dyn Fn(&Pair) -> f64| {
        let at = j.pairs.iter().filter(|pair| pair.answer.split.get(role) == ctas);
        at.min_by(|a, b| of(a).total_cmp(&of(b))).expect("its own CTAs are one of them")
    };
    let series = |name: &str, color, phase: usize| {
        let line = ctas
            .iter()
            .map(|&n| (f64::from(n), least(n, &|pair: &Pair| pair.phases[phase].1).phases[phase].1))
            .collect();
        let mut series = Series::line(name, color, line);
        series.dots = ctas
            .iter()
            .map(|&n| {
                let pair = least(n, &|pair: &Pair| pair.phases[phase].0);
                let time = pair.phases[phase].0;
                let quartile = |name| pair.row.number(name).filter(|_| phase == 0).unwrap_or(time);
                (f64::from(n), time, quartile("time_q1_us"), quartile("time_q3_us"))
            })
            .filter(|dot| dot.1.is_finite())
            .collect();
        series
    };
    let panel = Panel {
        y_name: "time [us]".into(),
        with_zero: true,
        series: vec![
            series("whole", FUSED, 0),
            series("compute alone", OVERLAP, 1),
            series("communication alone", UNFUSED, 2),
        ],
    };
    LinePlot {
        frame: Frame {
            title: format!("{}: predicted (lines) and measured (dots)", j.case),
            subtitle: format!("{} clock, {} options; dots carry quartiles", j.clock, j.case.set.name()),
            footer: sources(std::slice::from_ref(j)),
        },
        x_name: format!("{role} [SMs]"),
        x_spread: Spread::Linear,
        panels: vec![panel],
    }
}

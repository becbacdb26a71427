//! The pictures of `figures`: bars of a kernel on a fabric, and every judged bar in one plot.

use super::{Bar, GroupError, log_error};
use crate::data::{JUDGED_FROM_SIZE, System};
use crate::engine::Answer;
use crate::plot::Frame;
use crate::plot::axis::label;
use crate::plot::bars::{BarPlot, BarSeries, Fill};
use crate::plot::scatter::{DotSeries, ScatterPlot};
use crate::plot::style::{FUSED, KERNELS, UNFUSED};
use crate::provenance::footer;
use std::collections::BTreeMap;

/// Deviation that is shaded in the plot of all bars.
const BAND: f64 = 0.10;

pub(super) fn bars(bars: &[Bar], errors: &[GroupError]) -> Vec<(String, BarPlot)> {
    let mut figures: BTreeMap<(&str, &str), Vec<&Bar>> = BTreeMap::new();
    for bar in bars {
        figures.entry((&bar.kernel, &bar.topology)).or_default().push(bar);
    }
    figures
        .into_iter()
        .map(|((kernel, topology), bars)| {
            let mut sizes: Vec<u64> = bars.iter().map(|bar| bar.size).collect();
            sizes.sort_unstable();
            sizes.dedup();
            let series = |name: String, baseline: bool, fill: Fill, value: fn(&Bar) -> (f64, f64, f64)| BarSeries {
                name,
                color: if baseline { UNFUSED } else { FUSED },
                fill,
                values: sizes
                    .iter()
                    .map(|&size| bars.iter().find(|b| b.size == size && b.system.is_baseline() == baseline))
                    .map(|bar| bar.map(|bar| value(bar)))
                    .collect(),
            };
            let as_published = |bar: &Bar| (bar.published, bar.band.0, bar.band.1);
            let predicted = |bar: &Bar| flat(&bar.predicted);
            let fair = |bar: &Bar| flat(&bar.fair);
            let unfused = bars.iter().find(|bar| bar.system.is_baseline()).map_or("unfused", |bar| bar.system.name());
            let error = |baseline: bool| {
                let system = if baseline { unfused } else { System::MKernel.name() };
                let group = errors.iter().find(|e| e.kernel == kernel && e.topology == topology && e.system == system);
                group.map_or("-".into(), |group| format!("{:.1} %", group.error * 100.0))
            };
            let x_name = match kernel {
                "moe_dispatch_gemm" => "tokens over all GPUs",
                "ring_attention" => "sequence over all GPUs",
                _ => "m, rows of the GEMM",
            };
            let plot = BarPlot {
                frame: Frame {
                    title: format!("{kernel} on {topology}: error {} fused, {} unfused", error(false), error(true)),
                    subtitle: format!(
                        "exp(mean |ln(predicted / published)|) - 1 over sizes from {JUDGED_FROM_SIZE}; published \
                         protocol unless named fair; whiskers: repeats of published bars"
                    ),
                    footer: footer(&format!(
                        "data/published/figures.csv, effective_splits.csv; machine {}",
                        bars.first().map_or("", |bar| bar.machine)
                    )),
                },
                x_name: x_name.into(),
                groups: sizes.iter().map(|&size| label(size as f64)).collect(),
                y_name: "TFLOPS per GPU".into(),
                series: vec![
                    series("mKernel published".into(), false, Fill::Hatched, as_published),
                    series("predicted".into(), false, Fill::Solid, predicted),
                    series("predicted, fair".into(), false, Fill::Pale, fair),
                    series(format!("{unfused} published"), true, Fill::Hatched, as_published),
                    series("predicted".into(), true, Fill::Solid, predicted),
                ],
            };
            (format!("{kernel}-{topology}"), plot)
        })
        .collect()
}

/// Predicted against published, all judged bars: kernels by colour, baselines hollow.
pub(super) fn all(bars: &[Bar]) -> ScatterPlot {
    let mut groups: BTreeMap<(&str, bool), Vec<(f64, f64)>> = BTreeMap::new();
    for bar in bars.iter().filter(|bar| bar.judged) {
        let point = (bar.published, bar.predicted.prediction.tflops_per_gpu);
        groups.entry((&bar.kernel, bar.system.is_baseline())).or_default().push(point);
    }
    let mut kernels: Vec<&str> = groups.keys().map(|(kernel, _)| *kernel).collect();
    kernels.dedup();
    let color = |kernel: &str| {
        let place = kernels.iter().position(|known| *known == kernel).unwrap_or(0);
        KERNELS[place % KERNELS.len()]
    };
    let judged = bars.iter().filter(|bar| bar.judged);
    let mean = judged.clone().map(log_error).sum::<f64>() / judged.clone().count().max(1) as f64;
    ScatterPlot {
        frame: Frame {
            title: format!("Predicted against published: error {:.1} %", mean.exp_m1() * 100.0),
            subtitle: format!("{} judged bars, sizes from {JUDGED_FROM_SIZE}, published protocols", judged.count()),
            footer: footer("data/published/figures.csv, effective_splits.csv; machines h200-cx7, h200-efa"),
        },
        x_name: "published TFLOPS per GPU".into(),
        y_name: "predicted TFLOPS per GPU".into(),
        band: BAND,
        series: groups
            .into_iter()
            .map(|((kernel, unfused), points)| DotSeries {
                name: format!("{kernel}{}", if unfused { ", unfused" } else { "" }),
                color: color(kernel),
                hollow: unfused,
                points,
            })
            .collect(),
    }
}

/// A bar without a band.
fn flat(answer: &Answer) -> (f64, f64, f64) {
    let tflops = answer.prediction.tflops_per_gpu;
    (tflops, tflops, tflops)
}

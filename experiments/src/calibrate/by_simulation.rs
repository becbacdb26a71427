//! Parameters that simulations of measured rows are closest with.

use super::Fitted;
use crate::compare::{self, Joined};
use crate::error::ExperimentError;
use crate::measure_row::MeasuredRow;
use crate::plan::Source;
use crate::progress;
use tilewire_sim::Machine;

/// Values tried for a parameter that is fitted by simulation, on each of two passes.
const TRIED: usize = 9;
/// A value as good as the best one, in logarithmic error.
const AS_GOOD: f64 = 0.005;

/// A parameter found by simulation.
struct Search {
    name: &'static str,
    /// Rows of these kernels, on this cluster.
    kernels: &'static [&'static str],
    cluster: &'static str,
    /// Of [`compare::PHASES`].
    phase: usize,
}

const fn search(name: &'static str, kernels: &'static [&'static str], cluster: &'static str, phase: usize) -> Search {
    Search { name, kernels, cluster, phase }
}

/// In this order, each with what the ones before it found; all of it twice.
const SEARCHED: [Search; 10] = [
    search("interpreter.raise_ns", &["gemm_rs"], "1x8", 2),
    search("interpreter.store_visible_ns", &["gemm_rs", "gemm_ar"], "1x8", 1),
    search("interpreter.copy_load_gbs", &["ring_attention"], "1x8", 2),
    search("interpreter.copy_ns", &["ring_attention"], "1x8", 2),
    search("interpreter.step_flag_ns", &["ag_gemm"], "1x8", 0),
    search("interpreter.move_crowd_per_cta", &["ag_gemm", "ring_attention"], "1x8", 0),
    search("interpreter.gather_row_ns", &["moe_dispatch_gemm"], "1x8", 2),
    search("sm.merge_cta_gbs", &["ring_attention"], "1x4", 1),
    search("proxy.post_ns", &["gemm_rs"], "2x8", 2),
    search("nic.rail_gbs", &["ag_gemm"], "2x8", 2),
];
const ROUNDS: usize = 2;

/// Searches every parameter of [`SEARCHED`]; the machine holds what was found.
///
/// # Errors
/// [`ExperimentError`] for rows that cannot be simulated.
pub fn by_simulation(
    rows: &[MeasuredRow],
    machine: &mut Machine,
    source: &Source,
) -> Result<Vec<Fitted>, ExperimentError> {
    let bar = progress::bar((SEARCHED.len() * 2 * TRIED * ROUNDS) as u64, "fitting");
    let mut fits: Vec<Fitted> = Vec::new();
    for Search { name, kernels, cluster, phase } in (0..ROUNDS).flat_map(|_| &SEARCHED) {
        let (name, phase) = (*name, *phase);
        let of_search = |row: &&MeasuredRow| kernels.contains(&row.text("kernel")) && row.text("cluster") == *cluster;
        let judged: Vec<MeasuredRow> = rows.iter().filter(of_search).cloned().collect();
        let Some(base) = machine.params().into_iter().find(|(known, _)| known == name).map(|(_, p)| p.value) else {
            continue;
        };
        if judged.is_empty() {
            continue;
        }
        let mut error = |value: f64| -> Result<f64, ExperimentError> {
            machine.set(name, value);
            bar.inc(1);
            Ok(median_error(&compare::join(judged.clone(), &source.with(machine.clone()))?, phase))
        };
        let mut tried: Vec<(f64, f64)> = Vec::new();
        let mut center = base.max(1e-6);
        for width in [8.0_f64, 1.6] {
            for i in 0..TRIED {
                let value = center * width.powf(2.0 * i as f64 / (TRIED - 1) as f64 - 1.0);
                tried.push((error(value)?, value));
            }
            tried.sort_by(|a, b| a.0.total_cmp(&b.0));
            center = tried[0].1;
        }
        let (least, value) = tried[0];
        machine.set(name, value);
        let as_good = tried.iter().filter(|(error, _)| *error <= least + AS_GOOD).map(|(_, value)| *value);
        let (low, high) = as_good.fold((value, value), |(low, high), value| (low.min(value), high.max(value)));
        let how = format!(
            "{} of {} on {cluster}, {} rows: closest simulation, median error {:.1} %",
            compare::PHASES[phase],
            kernels.join(" and "),
            judged.len(),
            (least.exp() - 1.0) * 100.0
        );
        fits.retain(|fit| fit.name != name);
        fits.push(Fitted { name, value, low, high, kind: "derived", how });
    }
    bar.finish_and_clear();
    Ok(fits)
}

/// Median of the logarithmic errors of a phase.
fn median_error(joined: &[Joined], phase: usize) -> f64 {
    let errors: Vec<f64> = joined
        .iter()
        .flat_map(|j| &j.pairs)
        .map(|pair| (pair.phases[phase].1 / pair.phases[phase].0).ln().abs())
        .collect();
    compare::quantile(&errors, 0.5)
}

//! What the first tile of a CTA takes beyond the ones after it, from timelines of tiles alone.
//!
//! ```text
//! start ▶│ fill │ tile │ tile │ .. │ tile │◀ free      n tiles of a CTA, one right behind the other: fill + n x tile
//! ```
//!
//! The same tiles on fewer CTAs give another n: two runs give the fill without knowing what a tile takes.

use crate::error::ExperimentError;
use crate::plan::Source;
use crate::timeline::Measured;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tilewire_hw::measure::spread;
use tilewire_kernels::Problem;
use tilewire_sim::engine::TaskTime;

/// What the first GEMM tile takes more.
pub const GEMM: &str = "gemm_fill_ns";
/// What the first attention tile takes more.
pub const ATTENTION: &str = "attention_fill_ns";
/// How.
pub const HOW: &str = "tiles alone, 1 to 8 on each of 32 to 4 CTAs, recorded: from the first start to the last free";

/// Name of the quantity, and the fills of all pairs of runs of one shape, ns.
///
/// # Errors
/// [`ExperimentError`] for files that are no timelines of tiles of one kind, or of one length only.
pub fn readings(files: &[PathBuf], source: &Source) -> Result<(&'static str, Vec<f64>), ExperimentError> {
    let place = files.first().map_or_else(String::new, |file| file.display().to_string());
    let refuse = |problem: &str| ExperimentError::refused(place.clone(), problem);
    let mut by_shape: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut names = BTreeSet::new();
    for file in files {
        let measured = Measured::read(file, source)?;
        let attention = matches!(measured.case.problem, Problem::Attention { .. });
        names.insert(if attention { ATTENTION } else { GEMM });
        let alone =
            measured.prepared.schedule.cluster.ranks() == 1 && measured.case.target.machine.interpreter.is_some();
        if !alone {
            return Err(refuse("not of one GPU; allowed: timelines of experiments/measured/fit/*_fills.toml"));
        }
        by_shape.entry(measured.case.problem.to_string()).or_default().extend(chain(&measured.run.timeline));
    }
    let readings: Vec<f64> = by_shape.into_values().flat_map(|chains| fills(&chains)).collect();
    match (&names.into_iter().collect::<Vec<_>>()[..], readings.is_empty()) {
        (&[name], false) => Ok((name, readings)),
        (&[_], true) => Err(refuse("no two runs of a shape with different numbers of tiles per CTA")),
        _ => Err(refuse("timelines of other than one kind of tile; allowed: one directory for each")),
    }
}

/// Timelines that lie beside rows, by name.
///
/// # Errors
/// [`ExperimentError::Read`].
pub fn files(root: &Path) -> Result<Vec<PathBuf>, ExperimentError> {
    let folder = root.join(crate::timeline::FOLDER);
    let fail = |error: std::io::Error| ExperimentError::Read { file: folder.clone(), message: error.to_string() };
    let entries = std::fs::read_dir(&folder).map_err(fail)?;
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>().map_err(fail)?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "csv"));
    files.sort();
    Ok(files)
}

/// Tiles of a CTA, and the median over CTAs from the first one's start until the last one lets its CTA go, ns. None where
/// CTAs have different numbers of tiles.
fn chain(timeline: &[TaskTime]) -> Option<(f64, f64)> {
    let mut ctas: BTreeMap<u32, (usize, u64, u64)> = BTreeMap::new();
    for task in timeline {
        let (tiles, start, free) = ctas.entry(task.cta).or_insert((0, task.start, task.free));
        *tiles += 1;
        *start = task.start.min(*start);
        *free = task.free.max(*free);
    }
    let (first, ..) = *ctas.values().next()?;
    let same = ctas.values().all(|&(tiles, ..)| tiles == first);
    let times = ctas.values().map(|&(_, start, free)| (free - start) as f64 * 1e-3).collect();
    same.then(|| (first as f64, spread(times)[1]))
}

/// The fill that each pair of chains of different lengths gives.
fn fills(chains: &[(f64, f64)]) -> Vec<f64> {
    let mut fills = Vec::new();
    for (i, &(n, time)) in chains.iter().enumerate() {
        for &(m, other) in chains[..i].iter().filter(|(m, _)| (m - n).abs() > 0.5) {
            fills.push(time - n * (other - time) / (m - n));
        }
    }
    fills
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_chains_give_what_comes_before_their_tiles() {
        let chain = |n: f64| (n, 700.0 + n * 5000.0);
        let found = fills(&[chain(1.0), chain(2.0), chain(4.0), chain(4.0)]);
        assert_eq!(found.len(), 5, "equal lengths give none");
        assert!(found.iter().all(|fill| (fill - 700.0).abs() < 1e-6), "{found:?}");
    }

    #[test]
    fn the_fill_of_a_simulated_timeline_is_the_machine_s() {
        let source = Source::new(None, None).expect("the embedded data");
        let text = include_str!("../measured/fit/gemm_fills.toml");
        let experiment = crate::experiment::Experiment::new(
            "gemm_fills".into(),
            &crate::document::Document::new("gemm_fills.toml".into(), text),
            &source,
            0,
        )
        .expect("an experiment");
        let group = &experiment.groups[0];
        let prepared = crate::engine::Prepared::new(&group.case).expect("it builds");
        let chains: Vec<(f64, f64)> = crate::measure::splits(group)
            .expect("splits")
            .iter()
            .filter_map(|split| chain(&prepared.timeline(split).expect("it runs").0.timeline))
            .collect();
        assert_eq!(chains.iter().map(|chain| chain.0).collect::<Vec<_>>(), [1.0, 2.0, 4.0, 8.0]);
        let fill = group.case.target.machine.gemm["pipelined"].fill_ns.value;
        let found = spread(fills(&chains))[1];
        // Every other CTA adds some ns to a tile, and 4 to 32 of them compute.
        assert!((found - fill).abs() < 150.0, "{found} found, {fill} in the machine file");
    }
}

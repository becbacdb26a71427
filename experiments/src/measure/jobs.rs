//! What is measured: schedules that are ready to run, and the order of their points.

use super::mode;
use crate::checked;
use crate::engine::{self, Prepared};
use crate::error::ExperimentError;
use crate::experiment::{Experiment, Group};
use crate::plan::SplitChoice;
use crate::progress;
use rayon::prelude::*;
use std::collections::BTreeMap;
use tilewire_hw::lower::{Mode, Program, lower, lower_cluster};
use tilewire_hw::measure::{Inputs, inputs};
use tilewire_kernels::check::report;
use tilewire_kernels::schedule::BufferUse;
use tilewire_kernels::{RoleSplit, Schedule, Spec};

/// Host memory that inputs may take.
const MAX_INPUT_BYTES: u64 = 64 << 30;

/// A group that is ready to run.
pub struct Job {
    /// Its schedule.
    pub schedule: Schedule,
    /// What it was built from.
    pub spec: Spec,
    /// A GPU each.
    pub programs: Vec<Program>,
    /// Values of its inputs.
    pub inputs: Inputs,
    /// Splits.
    pub splits: Vec<RoleSplit>,
    /// Hazards, or that nobody looked.
    pub hazards: String,
}

/// Builds, checks and lowers every schedule, and draws its inputs.
///
/// # Errors
/// [`ExperimentError`] for what does not fit the GPUs here, or has findings.
pub fn jobs(experiment: &Experiment, on_card: u32, unchecked: bool) -> Result<Vec<Job>, ExperimentError> {
    let bar = progress::bar(experiment.groups.len() as u64, "preparing");
    let job = |group: &Group| {
        let case = &group.case;
        let sms = case.target.machine.gpu.sms.value as u32;
        if sms != on_card {
            let problem =
                format!("{} has {sms} SMs, the GPU here {on_card}; name another machine", case.target.machine.name);
            return Err(ExperimentError::refused(case.to_string(), problem));
        }
        let schedule = engine::build(case)?;
        let hazards = hazards(group, &schedule, unchecked)?;
        let splits = splits(group)?;
        let at = |source| ExperimentError::Hardware { case: case.to_string(), source };
        let programs = match mode(group) {
            Mode::Cluster => lower_cluster(&schedule, &splits[0], on_card),
            mode => lower(&schedule, mode, &splits[0], on_card).map(|program| vec![program]),
        }
        .map_err(at)?;
        for split in &splits {
            programs[0].clone().apply_split(&schedule, split, on_card).map_err(at)?;
        }
        let spec = case.spec();
        let bytes = schedule.buffers.iter().filter(|b| b.usage == BufferUse::Input).map(|b| b.bytes).sum::<u64>();
        let all = bytes * schedule.cluster.ranks() as u64 * experiment.groups.len() as u64;
        if all > MAX_INPUT_BYTES {
            let problem =
                format!("about {} GiB of inputs, allowed: {}; split the experiment", all >> 30, MAX_INPUT_BYTES >> 30);
            return Err(ExperimentError::refused(case.to_string(), problem));
        }
        let inputs = inputs(&schedule, case.kernel, &spec, mode(group), case.seed);
        bar.inc(1);
        Ok(Job { schedule, spec, programs, inputs, splits, hazards })
    };
    let jobs: Vec<Result<Job, ExperimentError>> = experiment.groups.par_iter().map(job).collect();
    bar.finish_and_clear();
    jobs.into_iter().collect()
}

/// What stands in the column of hazards.
///
/// # Errors
/// [`ExperimentError::Finding`] for a schedule with findings, unless they are not looked for.
pub fn hazards(group: &Group, schedule: &Schedule, unchecked: bool) -> Result<String, ExperimentError> {
    if unchecked {
        return Ok("unchecked".into());
    }
    let report = report(schedule, &checked::limits(&group.case.target.machine), None);
    let Some(first) = report.findings.first() else { return Ok("0".into()) };
    Err(ExperimentError::Finding(format!(
        "{}: {} fatal findings, {} hazards; the first: {first}\n  `tilewire check` lists them; --unchecked measures all the same",
        group.case, report.fatal, report.hazards
    )))
}

/// The splits of a group, tuned where it asks for that.
///
/// # Errors
/// As tuning.
pub fn splits(group: &Group) -> Result<Vec<RoleSplit>, ExperimentError> {
    let split = |split: &SplitChoice| match split {
        SplitChoice::Fixed(split) => Ok(*split),
        SplitChoice::Auto => Prepared::new(&group.case)?.split(&group.case),
    };
    group.splits.iter().map(split).collect()
}

/// Group and split of every point: kernels alternate, then their shapes, and splits come coarse before fine.
pub fn order(experiment: &Experiment, jobs: &[Job]) -> Vec<(usize, usize)> {
    let names: Vec<&str> = experiment.groups.iter().map(|group| group.case.name).collect();
    let counts: Vec<usize> = jobs.iter().map(|job| job.splits.len()).collect();
    even_order(&names, &counts)
}

fn even_order(kernels: &[&str], splits: &[usize]) -> Vec<(usize, usize)> {
    let mut turn: BTreeMap<&str, usize> = BTreeMap::new();
    let mut groups: Vec<(usize, &str, usize)> = kernels
        .iter()
        .enumerate()
        .map(|(g, &kernel)| {
            let turn = turn.entry(kernel).or_default();
            *turn += 1;
            (*turn, kernel, g)
        })
        .collect();
    groups.sort_unstable();
    let coarse_first: Vec<Vec<usize>> = splits.iter().map(|&n| bit_reversed(n)).collect();
    let rounds = splits.iter().copied().max().unwrap_or(0);
    let at = |round: usize, g: usize| coarse_first[g].get(round).map(|&split| (g, split));
    (0..rounds).flat_map(|round| groups.iter().filter_map(move |&(.., g)| at(round, g))).collect()
}

/// The numbers below `n`, so that every prefix is spread over all of them.
fn bit_reversed(n: usize) -> Vec<usize> {
    let bits = usize::BITS - n.saturating_sub(1).leading_zeros();
    let reverse = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
    (0..1_usize << bits).map(reverse).filter(|&i| i < n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prefix_covers_kernels_shapes_and_splits() {
        let order = even_order(&["a", "a", "b", "b"], &[4, 4, 4, 2]);
        assert_eq!(order[..4], [(0, 0), (2, 0), (1, 0), (3, 0)], "kernels alternate before a split comes twice");
        assert_eq!(order[4..8], [(0, 2), (2, 2), (1, 2), (3, 1)], "the next split is far from the first");
        let mut all = order.clone();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 14, "every point once: {order:?}");
    }

    #[test]
    fn splits_come_coarse_before_fine() {
        assert!(bit_reversed(0).is_empty());
        assert_eq!(bit_reversed(1), [0]);
        assert_eq!(bit_reversed(6), [0, 4, 2, 1, 5, 3]);
    }
}

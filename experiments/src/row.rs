//! A row of a sweep: the columns of the CSV, unit last.

use crate::engine::Answer;
use crate::plan::Case;
use crate::shape;
use tilewire_kernels::{RoleKind, RoleSplit};
use tilewire_sim::{OverlapReason, Prediction};

/// What became of a point.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// A prediction.
    Done(Box<Answer>),
    /// The simulator's words.
    Failed(RoleSplit, String),
}

/// Names of the columns.
pub fn columns() -> Vec<String> {
    let mut columns: Vec<String> = ["kernel", "form", "cluster", "machine", "fabric"].map(str::to_owned).to_vec();
    columns.extend(shape::names().map(str::to_owned));
    columns.extend(RoleKind::ALL.map(|kind| kind.name().to_owned()));
    columns.extend(
        [
            "option_set",
            "options",
            "set",
            "protocol",
            "mode",
            "execution",
            "clock",
            "seed",
            "noise",
            "status",
            "time_us",
            "tflops_per_gpu",
            "compute_only_us",
            "comm_only_us",
            "overlap",
            "exposed_comm_us",
            "overlap_reason",
            "bound_by",
            "bound_us",
            "wire_gbs",
            "logical_gbs",
        ]
        .map(str::to_owned),
    );
    for kind in RoleKind::ALL {
        columns.push(format!("{kind}_utilisation"));
        columns.push(format!("{kind}_wait_us"));
    }
    columns.extend(["hazards", "schedule_hash", "notes"].map(str::to_owned));
    columns
}

/// Whether a column holds numbers in every row.
pub fn is_number(column: &str) -> bool {
    let words = ["kernel", "form", "cluster", "machine", "fabric", "option_set", "options", "set", "protocol"];
    let more =
        ["mode", "execution", "clock", "noise", "status", "overlap_reason", "bound_by", "schedule_hash", "notes"];
    !words.contains(&column) && !more.contains(&column)
}

/// The fields of a row.
pub fn fields(case: &Case, outcome: &Outcome) -> Vec<String> {
    let target = &case.target;
    let mut fields = vec![
        case.name.to_owned(),
        case.fusion.name().to_owned(),
        target.cluster.to_string(),
        target.machine.name.clone(),
        target.machine.fabric.name().to_owned(),
    ];
    let values = shape::values(&case.problem);
    for name in shape::names() {
        fields.push(values.iter().find(|(n, _)| *n == name).map_or_else(String::new, |(_, value)| value.to_string()));
    }
    let split = match outcome {
        Outcome::Done(answer) => &answer.split,
        Outcome::Failed(split, _) => split,
    };
    let clock = match outcome {
        Outcome::Done(answer) => answer.clock,
        Outcome::Failed(..) => case.clock.map_or("", crate::engine::clock_name),
    };
    fields.extend(RoleKind::ALL.map(|kind| split.get(kind).to_string()));
    fields.extend([
        case.set.name().to_owned(),
        case.options.to_string().replace(',', ";"),
        case.set_by_name(),
        case.protocol_name().to_owned(),
        case.mode().to_owned(),
        case.execution_name().to_owned(),
        clock.to_owned(),
        case.seed.to_string(),
        case.noise.to_string(),
    ]);
    match outcome {
        Outcome::Done(answer) => {
            fields.push(if answer.overridden.is_empty() { "ok" } else { "unchecked" }.into());
            fields.extend(measured(&answer.prediction));
            let hazards = answer.hazards.map_or_else(String::new, |hazards| hazards.to_string());
            fields.extend([hazards, answer.schedule_hash.clone(), answer.notes.join("; ")]);
        }
        Outcome::Failed(_, message) => {
            fields.push(message.replace('\n', " "));
            fields.resize(columns().len(), String::new());
        }
    }
    fields
}

fn measured(prediction: &Prediction) -> Vec<String> {
    let bound: String = prediction.bound_by.clone().into();
    let mut fields = vec![
        decimals(prediction.time_us),
        decimals(prediction.tflops_per_gpu),
        decimals(prediction.compute_only_us),
        decimals(prediction.comm_only_us),
        decimals(prediction.overlap),
        decimals(prediction.exposed_comm_us),
        prediction.overlap_reason.map_or("", OverlapReason::name).to_owned(),
        bound,
        decimals(prediction.bound_us),
        decimals(prediction.wire_gbs),
        decimals(prediction.logical_gbs),
    ];
    for kind in RoleKind::ALL {
        let role = prediction.roles.iter().find(|role| role.role == kind);
        fields.push(role.map_or_else(String::new, |role| decimals(role.utilisation)));
        fields.push(role.map_or_else(String::new, |role| decimals(role.wait_us)));
    }
    fields
}

/// Six decimals hold a picosecond in a column of microseconds.
fn decimals(value: f64) -> String {
    format!("{value:.6}")
}

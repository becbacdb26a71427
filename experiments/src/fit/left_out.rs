//! Rows left out of a fit, and what is predicted of them.
//!
//! What a launch costs is a property of a test bed's host, not of its fabric: no row of another test bed can tell it. So
//! leaving a fabric out keeps the rows of that test bed on which only `launch.*` is fitted, as long as no error is judged
//! on them. `fabric=NAME and its host` leaves these out too.

use super::{FigureRow, Fitted, Published, TestError, fabric, parameter_table};
use crate::cli::FitArgs;
use crate::data::LeftOutError;
use crate::error::ExperimentError;
use crate::figures;
use serde::Serialize;
use std::fmt::Write as _;

/// Rows that are left out of a fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeftOut {
    /// None.
    Nothing,
    /// Rows of the test bed with this fabric, but for those that tell its host's costs if these are kept.
    Fabric { name: String, keeps_host: bool },
    /// Rows of a kernel.
    Kernel(String),
}

impl LeftOut {
    fn fabric(name: &str) -> [Self; 2] {
        [true, false].map(|keeps_host| Self::Fabric { name: name.to_owned(), keeps_host })
    }

    fn parse(text: &str, published: &[Published]) -> Result<Vec<Self>, ExperimentError> {
        let mut fabrics: Vec<&str> = published.iter().map(|(figure, _)| fabric(&figure.topology)).collect();
        let mut kernels: Vec<&str> = published.iter().map(|(figure, _)| figure.kernel.as_str()).collect();
        for names in [&mut fabrics, &mut kernels] {
            names.sort_unstable();
            names.dedup();
        }
        match text.split_once('=') {
            _ if text == "all" => {
                let kernels = kernels.into_iter().map(|name| Self::Kernel(name.to_owned()));
                Ok(fabrics.into_iter().flat_map(Self::fabric).chain(kernels).collect())
            }
            Some(("fabric", name)) if fabrics.contains(&name) => Ok(Self::fabric(name).to_vec()),
            Some(("kernel", name)) if kernels.contains(&name) => Ok(vec![Self::Kernel(name.to_owned())]),
            _ => {
                let allowed = format!("fabric={}, kernel={}, all", fabrics.join("|"), kernels.join("|"));
                Err(ExperimentError::refused("--without", format!("\"{text}\", allowed: {allowed}")))
            }
        }
    }

    /// Whether a row takes no part in the fit.
    pub(super) fn leaves_out(&self, row: &FigureRow) -> bool {
        match self {
            Self::Nothing => false,
            Self::Fabric { name, keeps_host } => fabric(&row.topology) == name && !(*keeps_host && row.is_host_row()),
            Self::Kernel(kernel) => row.kernel == *kernel,
        }
    }

    /// Whether a row is fitted on although its fabric is left out.
    fn keeps(&self, row: &FigureRow) -> bool {
        matches!(self, Self::Fabric { name, .. } if fabric(&row.topology) == name) && !self.leaves_out(row)
    }
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Fabric { name, keeps_host: true } => write!(f, "fabric={name}"),
            Self::Fabric { name, keeps_host: false } => write!(f, "fabric={name} and its host"),
            Self::Kernel(name) => write!(f, "kernel={name}"),
        }
    }
}

/// The experiments that `--without` asks for, each once.
pub(super) fn experiments(args: &FitArgs, published: &[Published]) -> Result<Vec<LeftOut>, ExperimentError> {
    let mut experiments = Vec::new();
    for text in &args.without {
        for left_out in LeftOut::parse(text, published)? {
            if !experiments.contains(&left_out) {
                experiments.push(left_out);
            }
        }
    }
    Ok(experiments)
}

/// What a fit without some rows found.
#[derive(Serialize)]
pub(super) struct LeftOutReport {
    /// Rows of a left-out fabric that were fitted on, with the parameters that they tell.
    kept: Vec<String>,
    /// Parameters that no row tells any more, with where their value is from.
    not_identified: Vec<String>,
    parameters: Vec<Fitted>,
}

impl LeftOutReport {
    pub(super) fn new(left_out: &LeftOut, rows: &[FigureRow], parameters: Vec<Fitted>) -> Self {
        let kept = rows.iter().filter(|row| left_out.keeps(row)).map(|row| {
            let parameters = row.parameters.join(" ");
            format!("{} {} {} {} for {parameters}", row.kernel, row.system.name(), row.topology, row.size)
        });
        let lost = parameters.iter().filter(|fitted| fitted.rows == 0);
        let not_identified =
            lost.map(|p| format!("{} of {} ({} from {})", p.parameter, p.machines, p.value, p.from)).collect();
        Self { kept: kept.collect(), not_identified, parameters }
    }

    pub(super) fn text(&self, name: &str) -> String {
        let mut text = format!("\nwithout {name}:\n{}", parameter_table(&self.parameters).render(2));
        for kept in &self.kept {
            let _ = writeln!(text, "  kept, for its host: {kept}");
        }
        for lost in &self.not_identified {
            let _ = writeln!(text, "  not identified without {name}: {lost}");
        }
        text
    }
}

/// Digits after the point of an error in the table that is kept in the data.
fn rounded(error: f64) -> f64 {
    (error * 1e4).round() / 1e4
}

fn kept_in_data(errors: &[TestError]) -> Vec<LeftOutError> {
    let left_out = errors.iter().filter(|group| group.role == "left out");
    left_out
        .map(|group| LeftOutError {
            left_out: group.left_out.clone(),
            kernel: group.kernel.clone(),
            topology: group.topology.clone(),
            system: group.system.to_owned(),
            rows: group.rows as u64,
            error: rounded(group.error),
            worst_size: group.worst_size,
            worst_error: rounded(group.worst_error),
        })
        .collect()
}

/// The errors on rows left out as `data/published/left_out.csv` holds them.
pub(super) fn csv(errors: &[TestError]) -> String {
    figures::csv_of(&kept_in_data(errors))
}

/// Where the data hold another error than was found.
pub(super) fn stale(held: &[LeftOutError], errors: &[TestError]) -> Vec<String> {
    let found = kept_in_data(errors);
    let missing = held.iter().filter(|row| !found.contains(row)).chain(found.iter().filter(|row| !held.contains(row)));
    let mut stale: Vec<String> = missing
        .map(|row| format!("published/left_out.csv: {} {} {} {}", row.left_out, row.kernel, row.topology, row.system))
        .collect();
    stale.sort_unstable();
    stale.dedup();
    stale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(left_out: &str, error: f64) -> TestError {
        TestError {
            left_out: left_out.to_owned(),
            kernel: "k".into(),
            topology: "t".into(),
            system: "s",
            role: "left out",
            rows: 3,
            error,
            worst_size: 8192,
            worst_error: error,
        }
    }

    #[test]
    fn the_kept_table_notices_another_error_a_row_more_and_a_row_less() {
        let errors = [error("a", 0.123_44), error("b", 0.2)];
        let held = kept_in_data(&errors);
        assert!(stale(&held, &errors).is_empty());
        assert!(stale(&held, &[error("a", 0.123_41), error("b", 0.2)]).is_empty(), "four digits");
        assert_eq!(stale(&held, &[error("a", 0.123_6), error("b", 0.2)]).len(), 1);
        assert_eq!(stale(&held, &errors[..1]).len(), 1);
        assert_eq!(stale(&held[..1], &errors).len(), 1);
    }

    #[test]
    fn a_fabric_is_left_out_with_and_without_its_host() {
        let names: Vec<String> = LeftOut::fabric("cx7").iter().map(ToString::to_string).collect();
        assert_eq!(names, ["fabric=cx7", "fabric=cx7 and its host"]);
    }
}

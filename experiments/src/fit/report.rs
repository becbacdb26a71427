//! What a fit leaves: machine files with its values, tables, and the text for a person.

use super::{Fitted, Report, left_out};
use crate::error::ExperimentError;
use crate::figures;
use crate::plan::Source;
use crate::provenance::Output;
use crate::table::Table;
use std::collections::BTreeMap;

/// The text of a machine file with another value of a parameter; the parameter has a line of its own.
fn with_value(text: &str, parameter: &str, value: f64) -> Option<String> {
    let (section, name) = parameter.rsplit_once('.')?;
    let mut inside = false;
    let mut found = false;
    let lines = text.lines().map(|line| {
        if line.starts_with('[') {
            inside = line.trim() == format!("[{section}]");
        }
        let start = format!("{name} = {{ value = ");
        match line.strip_prefix(&start).filter(|_| inside).and_then(|rest| rest.split_once(',')) {
            Some((_, rest)) => {
                found = true;
                format!("{start}{value:?},{rest}\n")
            }
            None => format!("{line}\n"),
        }
    });
    let text = lines.collect();
    found.then_some(text)
}

/// Writes the values, the errors, and machine files that hold the values.
///
/// # Errors
/// [`ExperimentError`].
pub fn write(source: &Source, output: &Output, report: &Report) -> Result<(), ExperimentError> {
    let mut texts: BTreeMap<&str, String> = BTreeMap::new();
    for fitted in &report.parameters {
        for name in fitted.machines.split(' ') {
            let text = match texts.remove(name) {
                Some(text) => text,
                None => source.data.machine_text(name)?,
            };
            let missing = || ExperimentError::Finding(format!("machines/{name}.toml: no line of {}", fitted.parameter));
            texts.insert(name, with_value(&text, &fitted.parameter, fitted.value).ok_or_else(missing)?);
        }
    }
    for (name, text) in &texts {
        output.write(&format!("machines/{name}.toml"), text)?;
    }
    output.write("parameters.csv", &figures::csv_of(&report.parameters))?;
    if !report.left_out.is_empty() {
        output.write("left_out.csv", &left_out::csv(&report.errors))?;
    }
    output.write("errors.csv", &figures::csv_of(&report.errors))
}

/// The report for a person.
pub fn text(report: &Report) -> String {
    let mut text = format!("{}\n", parameter_table(&report.parameters).render(2));
    let percent = |value: f64| format!("{:.1} %", value * 100.0);
    let mut table =
        Table::new(["left out", "rows", "kernel", "topology", "system", "number", "error", "worst: size", "off by"]);
    for group in &report.errors {
        table.row([
            group.left_out.clone(),
            group.role.to_owned(),
            group.kernel.clone(),
            group.topology.clone(),
            group.system.to_owned(),
            group.rows.to_string(),
            percent(group.error),
            group.worst_size.to_string(),
            percent(group.worst_error),
        ]);
    }
    text += &table.render(2);
    for (name, left_out) in &report.left_out {
        text += &left_out.text(name);
    }
    text
}

/// The values as a table.
pub fn parameter_table(fitted: &[Fitted]) -> Table {
    let mut table = Table::new(["parameter", "machines", "value", "low", "high", "rows", "from"]);
    for fitted in fitted {
        table.row([
            fitted.parameter.clone(),
            fitted.machines.clone(),
            fitted.value.to_string(),
            fitted.low.to_string(),
            fitted.high.to_string(),
            fitted.rows.to_string(),
            fitted.from.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_written_into_its_own_section_only() {
        let text = "name = \"m\"\n[a]\nx = { value = 1.0, kind = \"fitted\" }\n[a.b]\nx = { value = 2.0, kind = \"fitted\" }\n";
        let want = text.replace("2.0", "7.5");
        assert_eq!(with_value(text, "a.b.x", 7.5), Some(want));
        assert_eq!(with_value(text, "a.y", 7.5), None);
    }
}

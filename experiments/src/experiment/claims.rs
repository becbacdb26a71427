//! Claims of an experiment file: what its rows must satisfy, and hypotheses about its points.

use crate::document::{Node, Table};
use crate::error::ExperimentError;

/// Hypotheses and the replicates that decide them.
#[derive(Clone, Debug)]
pub struct Study {
    /// Replicates, each with a seed of its own.
    pub replicates: u64,
    /// Level of the confidence intervals.
    pub confidence: f64,
    /// Hypotheses.
    pub hypotheses: Vec<Hypothesis>,
}

/// A claim about one point, or about the ratio of two.
#[derive(Clone, Debug)]
pub struct Hypothesis {
    /// In words.
    pub claim: String,
    /// Column with a number.
    pub column: String,
    /// The point, or the dividend.
    pub of: usize,
    /// The divisor.
    pub than: Option<usize>,
    /// Least value.
    pub at_least: Option<f64>,
    /// Largest value.
    pub at_most: Option<f64>,
}

/// A claim about the rows of an experiment.
#[derive(Clone, Debug)]
pub struct Expect {
    /// In words.
    pub claim: String,
    /// Which rows.
    pub of: Of,
    /// Column with a number.
    pub column: String,
    /// Columns and the values that a row must have.
    pub filter: Vec<(String, String)>,
    /// Least value.
    pub at_least: Option<f64>,
    /// Largest value.
    pub at_most: Option<f64>,
}

/// Rows that a claim is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// The one with the least time.
    Best,
    /// The one with the largest time.
    Worst,
    /// All.
    Every,
}

pub(super) fn expectations(node: &Node<'_>) -> Result<Vec<Expect>, ExperimentError> {
    let mut all = Vec::new();
    for node in node.list()? {
        let table =
            node.table().ok_or_else(|| node.refuse("allowed: a table with claim, of, column, at_least, at_most"))?;
        let column = number_column(&table.require("column")?)?;
        let filter = table.get("where").map_or_else(|| Ok(Vec::new()), |node| filter(&node))?;
        let expect = Expect {
            claim: table.require("claim")?.text()?.to_owned(),
            of: table.require("of")?.word(&[("best", Of::Best), ("worst", Of::Worst), ("every", Of::Every)])?,
            column,
            filter,
            at_least: table.get("at_least").map(|node| node.number()).transpose()?,
            at_most: table.get("at_most").map(|node| node.number()).transpose()?,
        };
        claims_something(&table, expect.at_least, expect.at_most)?;
        table.finish()?;
        all.push(expect);
    }
    Ok(all)
}

pub(super) fn claims_something(
    table: &Table<'_>,
    at_least: Option<f64>,
    at_most: Option<f64>,
) -> Result<(), ExperimentError> {
    match (at_least, at_most) {
        (None, None) => Err(table.refuse("claims nothing, allowed: at_least, at_most or both")),
        (Some(low), Some(high)) if low > high => {
            Err(table.refuse(&format!("at_least = {low} above at_most = {high}: nothing satisfies both")))
        }
        _ => Ok(()),
    }
}

/// Columns and the values that a row must have.
pub(super) fn filter(node: &Node<'_>) -> Result<Vec<(String, String)>, ExperimentError> {
    let table = node.table().ok_or_else(|| node.refuse("allowed: a table of columns and values"))?;
    let pair = |(name, value): (String, Node<'_>)| {
        known_column(&value, &name)?;
        value.scalar().map(|value| (name, value))
    };
    table.entries().into_iter().map(pair).collect()
}

/// A level of confidence.
pub(super) fn share(node: &Node<'_>) -> Result<f64, ExperimentError> {
    let level = node.number()?;
    let allowed = || node.refuse(format!("{level}, allowed: a number from 0.5 to 0.9999"));
    if (0.5..=0.9999).contains(&level) { Ok(level) } else { Err(allowed()) }
}

pub(super) fn known_column(node: &Node<'_>, name: &str) -> Result<(), ExperimentError> {
    let known = crate::row::columns();
    if known.iter().any(|column| column == name) {
        return Ok(());
    }
    Err(node.refuse(format!("no column \"{name}\", allowed: {}", known.join(", "))))
}

/// The name of a column of numbers.
pub(super) fn number_column(node: &Node<'_>) -> Result<String, ExperimentError> {
    let name = node.text()?;
    known_column(node, name)?;
    if crate::row::is_number(name) {
        return Ok(name.to_owned());
    }
    Err(node.refuse(format!("\"{name}\" holds words, allowed: a column of numbers")))
}

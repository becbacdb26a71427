//! Claims of an experiment file: what its rows must satisfy, and hypotheses about its points.

use super::{Experiment, Group};
use crate::document::{Node, Table};
use crate::error::ExperimentError;
use crate::plan::SplitChoice;
use crate::row::{self, Outcome};
use std::borrow::Cow;
use std::collections::BTreeSet;
use tilewire_kernels::{RoleKind, RoleSplit};

/// Values that a refusal names at most.
const MAX_NAMED: usize = 16;

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

impl Expect {
    /// A claim about the rows.
    pub(super) fn read(points: &Points, node: &Node<'_>) -> Result<Self, ExperimentError> {
        let table =
            node.table().ok_or_else(|| node.refuse("allowed: a table with claim, of, column, at_least, at_most"))?;
        let column = number_column(&table.require("column")?)?;
        let place = table.get("where");
        let expect = Self {
            claim: table.require("claim")?.text()?.to_owned(),
            of: table.require("of")?.word(&[("best", Of::Best), ("worst", Of::Worst), ("every", Of::Every)])?,
            column,
            filter: place.as_ref().map_or_else(|| Ok(Vec::new()), filter)?,
            at_least: table.get("at_least").map(|node| node.number()).transpose()?,
            at_most: table.get("at_most").map(|node| node.number()).transpose()?,
        };
        claims_something(&table, expect.at_least, expect.at_most)?;
        table.finish()?;
        // What only a run tells is looked up when it is over.
        let known = expect.filter.iter().filter(|(name, _)| points.knows(name));
        let left = points.that_have(&place.unwrap_or_else(|| node.clone()), known)?;
        if left.iter().all(|&point| points.lacks(point, &expect.column)) {
            return Err(node.refuse(format!("no point that the claim is about has {}", expect.column)));
        }
        Ok(expect)
    }
}

impl Hypothesis {
    /// A claim about one point or two.
    pub(super) fn read(points: &Points, node: &Node<'_>) -> Result<Self, ExperimentError> {
        let table = node
            .table()
            .ok_or_else(|| node.refuse("allowed: a table with claim, column, of, than, at_least, at_most"))?;
        let column = number_column(&table.require("column")?)?;
        let hypothesis = Self {
            claim: table.require("claim")?.text()?.to_owned(),
            column,
            of: points.the_one(&table.require("of")?)?,
            than: table.get("than").map(|node| points.the_one(&node)).transpose()?,
            at_least: table.get("at_least").map(|node| node.number()).transpose()?,
            at_most: table.get("at_most").map(|node| node.number()).transpose()?,
        };
        claims_something(&table, hypothesis.at_least, hypothesis.at_most)?;
        table.finish()?;
        if [hypothesis.of].into_iter().chain(hypothesis.than).any(|point| points.lacks(point, &hypothesis.column)) {
            return Err(node.refuse(format!("a point that the claim is about has no {}", hypothesis.column)));
        }
        if hypothesis.than == Some(hypothesis.of) {
            return Err(node.refuse("`of` and `than` are the same point, whose ratio is 1 whatever is predicted"));
        }
        Ok(hypothesis)
    }
}

/// The points of an experiment, as far as their rows are known before a run.
pub(super) struct Points {
    /// Columns of rows.csv.
    columns: Vec<String>,
    /// Those that are known, in order.
    known: Vec<usize>,
    /// A row for every group; splits are not in it.
    groups: Vec<Vec<String>>,
    /// Group and split of every point.
    all: Vec<(usize, SplitChoice)>,
}

impl Points {
    pub(super) fn new(experiment: &Experiment) -> Self {
        let columns = row::columns();
        let end = columns.iter().position(|column| column == "status").expect("a column of every row");
        let groups = &experiment.groups;
        let all: Vec<_> = groups
            .iter()
            .enumerate()
            .flat_map(|(g, group)| group.splits.iter().map(move |&split| (g, split)))
            .collect();
        let tuned = all.iter().any(|(_, split)| *split == SplitChoice::Auto);
        let found = |name: &str| {
            name == "clock" && groups.iter().any(|group| group.case.clock.is_none()) || tuned && role(name).is_some()
        };
        let known = (0..end).filter(|&column| !found(&columns[column])).collect();
        let row = |group: &Group| row::fields(&group.case, &Outcome::Failed(RoleSplit::default(), String::new()));
        Self { known, groups: groups.iter().map(row).collect(), all, columns }
    }

    fn knows(&self, name: &str) -> bool {
        self.known.iter().any(|&column| self.columns[column] == name)
    }

    fn field(&self, point: usize, column: usize) -> Cow<'_, str> {
        let (group, split) = self.all[point];
        match (split, role(&self.columns[column])) {
            (SplitChoice::Fixed(split), Some(kind)) => Cow::Owned(split.get(kind).to_string()),
            _ => Cow::Borrowed(&self.groups[group][column]),
        }
    }

    /// Whether a column will be empty, as the fields of other kernels' shapes are.
    fn lacks(&self, point: usize, name: &str) -> bool {
        let mut known = self.known.iter().filter(|&&column| self.columns[column] == name);
        known.any(|&column| self.field(point, column).is_empty())
    }

    /// The points that have all these values, in order; one at least.
    fn that_have<'a>(
        &self,
        node: &Node<'_>,
        filter: impl IntoIterator<Item = &'a (String, String)>,
    ) -> Result<Vec<usize>, ExperimentError> {
        let mut left: Vec<usize> = (0..self.all.len()).collect();
        for (name, value) in filter {
            let column = self.columns.iter().position(|column| column == name).expect("checked on reading");
            let fits = |&point: &usize| has(name, &self.field(point, column), value);
            if !left.iter().any(fits) {
                let there: BTreeSet<Cow<'_, str>> = left.iter().map(|&point| self.field(point, column)).collect();
                let there = there.iter().take(MAX_NAMED).map(|value| shown(value));
                let there = there.collect::<Vec<_>>().join(", ");
                return Err(node.refuse(format!("no point has {name} = {}, allowed here: {there}", shown(value))));
            }
            left.retain(fits);
        }
        Ok(left)
    }

    /// The one point that a filter leaves.
    fn the_one(&self, node: &Node<'_>) -> Result<usize, ExperimentError> {
        let names = |columns: &[usize]| {
            columns.iter().map(|&column| self.columns[column].as_str()).collect::<Vec<_>>().join(", ")
        };
        let filter = filter(node)?;
        if let Some((name, _)) = filter.iter().find(|(name, _)| !self.knows(name)) {
            let problem = format!("{name} is known only after a run; allowed: {}", names(&self.known));
            return Err(node.refuse(problem));
        }
        let left = self.that_have(node, &filter)?;
        if let [index] = left[..] {
            return Ok(index);
        }
        let differ =
            |&column: &usize| left.iter().any(|&point| self.field(point, column) != self.field(left[0], column));
        let differing: Vec<usize> = self.known.iter().copied().filter(differ).collect();
        Err(node.refuse(format!(
            "matches {} of {} points, allowed: one; these columns tell them apart: {}",
            left.len(),
            self.all.len(),
            names(&differing)
        )))
    }
}

/// A value in a message.
fn shown(value: &str) -> &str {
    if value.is_empty() { "\"\"" } else { value }
}

/// The role whose CTAs a column holds.
fn role(column: &str) -> Option<RoleKind> {
    RoleKind::ALL.into_iter().find(|kind| kind.name() == column)
}

/// Columns that hold `name=value;...`, of which a filter names some, in any order.
const OF_OPTIONS: [&str; 2] = ["options", "set"];

/// Whether the field of a row has what a filter asks of it.
pub fn has(column: &str, field: &str, value: &str) -> bool {
    field == value || OF_OPTIONS.contains(&column) && field.split(';').any(|option| option == value)
}

fn claims_something(table: &Table<'_>, at_least: Option<f64>, at_most: Option<f64>) -> Result<(), ExperimentError> {
    match (at_least, at_most) {
        (None, None) => Err(table.refuse("claims nothing, allowed: at_least, at_most or both")),
        (Some(low), Some(high)) if low > high => {
            Err(table.refuse(&format!("at_least = {low} above at_most = {high}: nothing satisfies both")))
        }
        _ => Ok(()),
    }
}

/// Columns and the values that a row must have, an entry for each option.
fn filter(node: &Node<'_>) -> Result<Vec<(String, String)>, ExperimentError> {
    let table = node.table().ok_or_else(|| node.refuse("allowed: a table of columns and values"))?;
    let mut filter = Vec::new();
    for (column, node) in table.entries() {
        known_column(&node, &column)?;
        let values = if OF_OPTIONS.contains(&column.as_str()) { options(&node)? } else { vec![node.scalar()?] };
        filter.extend(values.into_iter().map(|value| (column.clone(), value)));
    }
    Ok(filter)
}

/// `name=value` of every option in a table or in text; of none, the empty text.
fn options(node: &Node<'_>) -> Result<Vec<String>, ExperimentError> {
    let Some(table) = node.table() else {
        return Ok(node.scalar()?.split(';').map(|option| option.trim().to_owned()).collect());
    };
    let option = |(name, node): (String, Node<'_>)| node.scalar().map(|value| format!("{name}={value}"));
    let options: Vec<String> = table.entries().into_iter().map(option).collect::<Result<_, _>>()?;
    Ok(if options.is_empty() { vec![String::new()] } else { options })
}

/// A level of confidence.
pub(super) fn share(node: &Node<'_>) -> Result<f64, ExperimentError> {
    let level = node.number()?;
    let allowed = || node.refuse(format!("{level}, allowed: a number from 0.5 to 0.9999"));
    if (0.5..=0.9999).contains(&level) { Ok(level) } else { Err(allowed()) }
}

fn known_column(node: &Node<'_>, name: &str) -> Result<(), ExperimentError> {
    let known = row::columns();
    if known.iter().any(|column| column == name) {
        return Ok(());
    }
    Err(node.refuse(format!("no column \"{name}\", allowed: {}", known.join(", "))))
}

/// The name of a column of numbers.
fn number_column(node: &Node<'_>) -> Result<String, ExperimentError> {
    let name = node.text()?;
    known_column(node, name)?;
    if row::is_number(name) {
        return Ok(name.to_owned());
    }
    Err(node.refuse(format!("\"{name}\" holds words, allowed: a column of numbers")))
}

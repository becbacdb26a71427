//! Experiment files: one question, and the grid of cases that answers it.
//!
//! ```toml
//! question = "How many SMs should send and reduce?"
//! kernel   = "gemm_rs"                   # every value may be a list; lists multiply
//! cluster  = "2x8-h200-efa"
//! options  = "tilewire"                  # or "published"
//! protocol = "fair"                      # or "published"; default: as the options
//! baseline = [false, true]
//! seed     = 1
//! noise    = false
//! clock    = "sustained"                 # or "cold"; default: as the protocol's loops leave it
//! execution = "folded"                   # or "mirror", "full"
//!
//! [[shape]]                              # fields of the kernel's shape
//! m = 8192
//!
//! [set]                                  # single options of the kernel
//! send_order = ["any", "in_order"]
//!
//! [split]                                # or split = "auto", "published", "compute=118,send=6,reduce=8", or a list
//! compute = "rest"                       # what the other roles leave of the SMs
//! send    = { from = 2, to = 16, step = 2 }
//! reduce  = [4, 8]
//!
//! [[expect]]                             # checked on every run
//! claim    = "few SMs are enough to send"
//! of       = "best"                      # best (least time), worst, every
//! column   = "inter_send"
//! where    = { m = 8192 }
//! at_most  = 8
//! ```
//!
//! `scale` reads the same files, with these keys instead of `expect`; noise is drawn unless `noise = false`:
//!
//! ```toml
//! replicates = 30                        # seeds seed, seed + 1, ...
//! confidence = 0.95
//!
//! [[hypothesis]]
//! claim    = "at 64 nodes the fused form is at least 1.1 times as fast"
//! column   = "time_us"
//! of       = { form = "unfused", cluster = "64x8" }
//! than     = { form = "fused", cluster = "64x8" }    # the claim is about the ratio of / than; left out: about `of`
//! at_least = 1.1
//! ```

use crate::checked::Checks;
use crate::cli::ProtocolArg;
use crate::document::{Document, Node, Table};
use crate::error::ExperimentError;
use crate::plan::{self, Case, Draft, Part, ResolveError, Source, SplitChoice};
use crate::row::Outcome;
use crate::shape;
use std::collections::BTreeMap;
use std::path::Path;
use tilewire_kernels::{OptionSet, RoleKind, RoleSplit};
use tilewire_sim::Execution;
use tilewire_sim::predict::Clock;

/// Points of an experiment at most.
const MAX_POINTS: usize = 1_000_000;

/// Replicates of a study at most.
const MAX_REPLICATES: u64 = 10_000;

/// Seeds at most, so that every replicate has one of its own.
const MAX_SEED: u64 = u64::MAX - MAX_REPLICATES;

/// A question and its points.
pub struct Experiment {
    /// Name: the stem of the file.
    pub name: String,
    /// The question.
    pub question: String,
    /// Text of the file.
    pub text: String,
    /// Seed.
    pub seed: u64,
    /// Schedules, each with the splits that it is run with.
    pub groups: Vec<Group>,
    /// Grid points that were left out because their splits exceed the SMs.
    pub too_large: usize,
    /// Claims.
    pub expect: Vec<Expect>,
    /// Where the file says the shape, for builders that refuse it.
    pub shape_place: String,
    /// Where the file says the splits, for machines that they do not fit.
    pub split_place: String,
    /// What `scale` runs the points for.
    pub study: Option<Study>,
}

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

/// Points that share a schedule.
pub struct Group {
    /// The schedule's case; its own split is not used.
    pub case: Case,
    /// Splits.
    pub splits: Vec<SplitChoice>,
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

/// CTAs of a role in a grid.
enum Axis {
    Rest,
    Counts(Vec<u32>),
}

/// Splits of an experiment, before the machine is known.
enum Splits<'a> {
    List(Vec<(Node<'a>, String)>),
    Grid(Vec<(RoleKind, Axis)>),
}

/// Everything that multiplies, in the order of the nesting.
struct Axes<'a> {
    kernels: Vec<(Node<'a>, String)>,
    clusters: Vec<(Node<'a>, String)>,
    shapes: Vec<BTreeMap<&'static str, (Node<'a>, u64)>>,
    shape_node: Node<'a>,
    sets: Vec<OptionSet>,
    overrides: Vec<Vec<(Node<'a>, String, String)>>,
    protocols: Vec<Option<ProtocolArg>>,
    baselines: Vec<bool>,
    baseline_node: Option<Node<'a>>,
}

impl Experiment {
    /// Reads a file and resolves all of its points.
    ///
    /// # Errors
    /// [`ExperimentError`] with file, line, column and key.
    pub fn read(file: &Path, source: &Source) -> Result<Self, ExperimentError> {
        let name = file.file_stem().map_or_else(|| "experiment".into(), |stem| stem.to_string_lossy().into_owned());
        Self::new(name, &Document::read(file)?, source, 0)
    }

    /// The same points for another replicate: the seed is `replicate` larger.
    ///
    /// # Errors
    /// As [`Experiment::read`].
    pub fn replicate(&self, replicate: u64, source: &Source) -> Result<Self, ExperimentError> {
        Self::new(self.name.clone(), &Document::new(self.name.clone(), &self.text), source, replicate)
    }

    /// Resolves all points of a document, each of their seeds moved on by `replicate`.
    ///
    /// # Errors
    /// As [`Experiment::read`].
    pub fn new(name: String, document: &Document, source: &Source, replicate: u64) -> Result<Self, ExperimentError> {
        let parsed = document.parse()?;
        let root = document.root(&parsed);
        let question = root.require("question")?.text()?.to_owned();
        let hypothesis_node = root.get("hypothesis");
        let seed = root.get("seed").map_or(Ok(0), |node| node.whole(0, MAX_SEED))? + replicate;
        let noise = root.get("noise").map_or(Ok(hypothesis_node.is_some()), |node| node.boolean())?;
        let execution = root.get("execution").map_or(Ok(Execution::Folded), |node| node.word(EXECUTIONS))?;
        let clock = root.get("clock").map(|node| node.word(CLOCKS)).transpose()?;
        let axes = Axes::read(&root)?;
        let (split_node, splits) = match root.get("split") {
            // Launches of the unfused form take the SMs that they can get.
            None if axes.baselines == [true] => (axes.shape_node.clone(), Splits::List(Vec::new())),
            Some(node) if axes.baselines == [true] => {
                return Err(node.refuse("the unfused form has no split; remove it, or add false to baseline"));
            }
            _ => {
                let node = root.require("split")?;
                (node.clone(), Splits::read(&node)?)
            }
        };
        let expect = root.get("expect").map_or_else(|| Ok(Vec::new()), |node| expectations(&node))?;
        let replicates = root.get("replicates");
        let confidence = root.get("confidence");
        if let (None, Some(node)) = (&hypothesis_node, replicates.as_ref().or(confidence.as_ref())) {
            return Err(node.refuse("belongs to [[hypothesis]], and there is none"));
        }
        if let (Some(node), false) = (&hypothesis_node, expect.is_empty()) {
            return Err(node.refuse("stands beside [[expect]]; `scale` decides the one, `sweep` checks the other"));
        }
        root.finish()?;

        let mut experiment = Self {
            name,
            question,
            text: document.text().to_owned(),
            seed,
            groups: Vec::new(),
            too_large: 0,
            expect,
            shape_place: axes.shape_node.place(),
            split_place: split_node.place(),
            study: None,
        };
        let base = Draft {
            kernel: String::new(),
            cluster: String::new(),
            shape: Vec::new(),
            set: OptionSet::Tilewire,
            overrides: Vec::new(),
            split: Some("auto".into()),
            protocol: None,
            baseline: false,
            seed,
            noise,
            execution,
            clock,
            checks: Checks::default(),
        };
        axes.for_each(&base, source, |draft, case| experiment.add(case, draft, &splits, source, &split_node))?;
        if experiment.points() == 0 {
            return Err(split_node.refuse("no split of the grid fits the SMs of the machine; lower the counts"));
        }
        if let Some(node) = hypothesis_node {
            experiment.study = Some(Study {
                replicates: replicates.map_or(Ok(20), |node| node.whole(2, MAX_REPLICATES))?,
                confidence: confidence.map_or(Ok(0.95), |node| share(&node))?,
                hypotheses: node.list()?.iter().map(|node| experiment.hypothesis(node)).collect::<Result<_, _>>()?,
            });
        }
        Ok(experiment)
    }

    fn hypothesis(&self, node: &Node<'_>) -> Result<Hypothesis, ExperimentError> {
        let table = node
            .table()
            .ok_or_else(|| node.refuse("allowed: a table with claim, column, of, than, at_least, at_most"))?;
        let column = number_column(&table.require("column")?)?;
        let hypothesis = Hypothesis {
            claim: table.require("claim")?.text()?.to_owned(),
            column,
            of: self.point(&table.require("of")?)?,
            than: table.get("than").map(|node| self.point(&node)).transpose()?,
            at_least: table.get("at_least").map(|node| node.number()).transpose()?,
            at_most: table.get("at_most").map(|node| node.number()).transpose()?,
        };
        claims_something(&table, hypothesis.at_least, hypothesis.at_most)?;
        table.finish()?;
        Ok(hypothesis)
    }

    /// The same points, with what is asked of the checker.
    #[must_use]
    pub fn checked(mut self, checks: Checks) -> Self {
        self.groups.iter_mut().for_each(|group| group.case.checks = checks);
        self
    }

    /// Cases with their splits, in order.
    pub fn cases(&self) -> impl Iterator<Item = (&Case, SplitChoice)> {
        self.groups.iter().flat_map(|group| group.splits.iter().map(|&split| (&group.case, split)))
    }

    /// The one point that a filter leaves.
    fn point(&self, node: &Node<'_>) -> Result<usize, ExperimentError> {
        let filter = filter(node)?;
        let columns = crate::row::columns();
        let place = |name: &str| columns.iter().position(|column| column == name);
        let known = place("status").expect("a column of every row");
        if let Some((name, _)) = filter.iter().find(|(name, _)| place(name).is_none_or(|place| place >= known)) {
            return Err(
                node.refuse(format!("{name} is known only after a run; allowed: {}", columns[..known].join(", ")))
            );
        }
        let matches: Vec<usize> = self
            .cases()
            .enumerate()
            .filter(|(_, (case, split))| {
                let split = if let SplitChoice::Fixed(split) = split { *split } else { RoleSplit::default() };
                let fields = crate::row::fields(case, &Outcome::Failed(split, String::new()));
                filter.iter().all(|(name, value)| place(name).is_some_and(|place| fields[place] == *value))
            })
            .map(|(index, _)| index)
            .collect();
        match matches[..] {
            [index] => Ok(index),
            _ => Err(node.refuse(format!(
                "matches {} of {} points, allowed: one; name more columns or other values",
                matches.len(),
                self.points()
            ))),
        }
    }

    /// Number of points.
    pub fn points(&self) -> usize {
        self.groups.iter().map(|group| group.splits.len()).sum()
    }

    fn add(
        &mut self,
        case: Case,
        draft: &Draft,
        splits: &Splits<'_>,
        source: &Source,
        node: &Node<'_>,
    ) -> Result<(), ExperimentError> {
        let choices = if case.baseline {
            vec![case.split]
        } else {
            match splits {
                Splits::List(list) => {
                    let resolve = |(node, text): &(Node<'_>, String)| {
                        let draft = Draft { split: Some(text.clone()), ..draft.clone() };
                        draft.resolve(source).map(|case| case.split).map_err(|error| placed(error, |_| node.clone()))
                    };
                    let choices: Vec<SplitChoice> = list.iter().map(resolve).collect::<Result<_, _>>()?;
                    if let Some(i) = (1..choices.len()).find(|&i| choices[..i].contains(&choices[i])) {
                        return Err(list[i].0.refuse(format!("\"{}\" is a split that stands before", list[i].1)));
                    }
                    choices
                }
                Splits::Grid(grid) => {
                    let sms = case.target.machine.gpu.sms.value as u32;
                    let (fit, too_large) = grid_splits(grid, sms);
                    self.too_large += too_large;
                    fit.into_iter().map(SplitChoice::Fixed).collect()
                }
            }
        };
        if self.points() + choices.len() > MAX_POINTS {
            return Err(node.refuse(format!("more than {MAX_POINTS} points; widen the steps or shorten the lists")));
        }
        if !choices.is_empty() {
            self.groups.push(Group { case, splits: choices });
        }
        Ok(())
    }
}

const EXECUTIONS: &[(&str, Execution)] =
    &[("folded", Execution::Folded), ("mirror", Execution::Mirror), ("full", Execution::Full)];

const CLOCKS: &[(&str, Clock)] = &[("sustained", Clock::Sustained), ("cold", Clock::Cold)];

const SETS: &[(&str, OptionSet)] = &[("tilewire", OptionSet::Tilewire), ("published", OptionSet::Published)];

const PROTOCOLS: &[(&str, ProtocolArg)] = &[("fair", ProtocolArg::Fair), ("published", ProtocolArg::Published)];

/// An error of a draft at the value that is wrong.
fn placed<'a>(error: ResolveError, node: impl FnOnce(Part) -> Node<'a>) -> ExperimentError {
    match error {
        ResolveError::Refused(refusal) => node(refusal.part).refuse(refusal.problem),
        ResolveError::Data(error) => error.into(),
    }
}

fn texts<'a>(node: &Node<'a>) -> Result<Vec<(Node<'a>, String)>, ExperimentError> {
    node.list()?.into_iter().map(|node| node.text().map(|text| (node.clone(), text.to_owned()))).collect()
}

impl<'a> Axes<'a> {
    fn read(root: &Table<'a>) -> Result<Self, ExperimentError> {
        let shape_node = root.require("shape")?;
        let mut shapes = Vec::new();
        for node in shape_node.list()? {
            let table = node.table().ok_or_else(|| node.refuse("allowed: a table of the shape's fields"))?;
            shapes.extend(shapes_of(&table)?);
        }
        let protocols = match root.get("protocol") {
            None => vec![None],
            Some(node) => node.list()?.iter().map(|node| node.word(PROTOCOLS).map(Some)).collect::<Result<_, _>>()?,
        };
        let sets = match root.get("options") {
            None => vec![OptionSet::Tilewire],
            Some(node) => node.list()?.iter().map(|node| node.word(SETS)).collect::<Result<_, _>>()?,
        };
        let overrides = match root.get("set") {
            None => vec![Vec::new()],
            Some(node) => overrides_of(&node)?,
        };
        let baseline_node = root.get("baseline");
        let baselines = match &baseline_node {
            None => vec![false],
            Some(node) => node.list()?.iter().map(Node::boolean).collect::<Result<_, _>>()?,
        };
        Ok(Self {
            kernels: texts(&root.require("kernel")?)?,
            clusters: texts(&root.require("cluster")?)?,
            shapes,
            shape_node,
            sets,
            overrides,
            protocols,
            baselines,
            baseline_node,
        })
    }

    /// Calls `f` for every schedule, in order.
    fn for_each(
        &self,
        base: &Draft,
        source: &Source,
        mut f: impl FnMut(&Draft, Case) -> Result<(), ExperimentError>,
    ) -> Result<(), ExperimentError> {
        for (kernel_node, kernel) in &self.kernels {
            for (cluster_node, cluster) in &self.clusters {
                for shape in &self.shapes {
                    for &set in &self.sets {
                        for overrides in &self.overrides {
                            for &protocol in &self.protocols {
                                for &baseline in &self.baselines {
                                    let draft = Draft {
                                        kernel: kernel.clone(),
                                        cluster: cluster.clone(),
                                        shape: shape.iter().map(|(&name, (_, value))| (name, *value)).collect(),
                                        set,
                                        overrides: overrides.iter().map(|(_, n, v)| (n.clone(), v.clone())).collect(),
                                        protocol,
                                        baseline,
                                        ..base.clone()
                                    };
                                    let case = draft.resolve(source).map_err(|error| {
                                        placed(error, |part| match part {
                                            Part::Kernel => kernel_node.clone(),
                                            Part::Cluster | Part::Split => cluster_node.clone(),
                                            Part::Shape(field) => shape
                                                .get(field)
                                                .map_or_else(|| self.shape_node.clone(), |(node, _)| node.clone()),
                                            Part::Set => self.wrong_override(&draft, overrides, source),
                                            Part::Baseline => {
                                                self.baseline_node.clone().unwrap_or_else(|| kernel_node.clone())
                                            }
                                        })
                                    })?;
                                    f(&draft, case)?;
                                }
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The first of several options that is refused.
    fn wrong_override(&self, draft: &Draft, overrides: &[(Node<'a>, String, String)], source: &Source) -> Node<'a> {
        let refused = |(_, name, value): &&(Node<'a>, String, String)| {
            let alone = Draft { overrides: vec![(name.clone(), value.clone())], ..draft.clone() };
            matches!(alone.resolve(source), Err(ResolveError::Refused(refusal)) if refusal.part == Part::Set)
        };
        overrides.iter().find(refused).map_or_else(|| self.shape_node.clone(), |(node, ..)| node.clone())
    }
}

type Shape<'a> = BTreeMap<&'static str, (Node<'a>, u64)>;

/// The shapes of a table whose fields may be lists; lists multiply.
fn shapes_of<'a>(table: &Table<'a>) -> Result<Vec<Shape<'a>>, ExperimentError> {
    let mut shapes = vec![Shape::new()];
    for name in shape::names() {
        let Some(node) = table.get(name) else { continue };
        let mut next = Vec::new();
        for shape in &shapes {
            for element in node.list()? {
                let value = element.whole(1, shape::max(name))?;
                let mut shape = shape.clone();
                shape.insert(name, (element, value));
                next.push(shape);
            }
        }
        shapes = next;
    }
    table.finish()?;
    Ok(shapes)
}

type Overrides<'a> = Vec<(Node<'a>, String, String)>;

fn overrides_of<'a>(node: &Node<'a>) -> Result<Vec<Overrides<'a>>, ExperimentError> {
    let table = node.table().ok_or_else(|| node.refuse("allowed: a table of the kernel's options"))?;
    let mut all = vec![Vec::new()];
    for (name, node) in table.entries() {
        let mut next = Vec::new();
        for overrides in &all {
            for element in node.list()? {
                let value = element.scalar()?;
                let mut overrides = Clone::clone(overrides);
                Vec::push(&mut overrides, (element, name.clone(), value));
                next.push(overrides);
            }
        }
        all = next;
    }
    Ok(all)
}

impl<'a> Splits<'a> {
    fn read(node: &Node<'a>) -> Result<Self, ExperimentError> {
        let Some(table) = node.table() else { return Ok(Self::List(texts(node)?)) };
        let mut grid = Vec::new();
        for (name, node) in table.entries() {
            let known = || RoleKind::ALL.map(RoleKind::short).join(", ");
            let kind =
                plan::role(&name).ok_or_else(|| node.refuse(format!("no role \"{name}\", allowed: {}", known())))?;
            if grid.iter().any(|(other, _)| *other == kind) {
                return Err(node.refuse(format!("role {} twice", kind.short())));
            }
            grid.push((kind, axis(&node)?));
        }
        let rest = grid.iter().filter(|(_, axis)| matches!(axis, Axis::Rest)).count();
        if rest > 1 {
            return Err(node.refuse("\"rest\" for more than one role, allowed: one"));
        }
        if grid.is_empty() {
            return Err(node.refuse("an empty table, allowed: CTAs of one role or more"));
        }
        Ok(Self::Grid(grid))
    }
}

/// A count, a list of counts, `{ from, to, step }` or `"rest"`.
fn axis(node: &Node<'_>) -> Result<Axis, ExperimentError> {
    if let Some(range) = node.table() {
        let from = range.require("from")?.whole(0, 1024)?;
        let to_node = range.require("to")?;
        let to = to_node.whole(0, 1024)?;
        let step = range.get("step").map_or(Ok(1), |node| node.whole(1, 1024))?;
        range.finish()?;
        if to < from {
            return Err(to_node.refuse(format!("{to}, allowed: from ({from}) to 1024")));
        }
        return Ok(Axis::Counts((from..=to).step_by(step as usize).map(|ctas| ctas as u32).collect()));
    }
    if node.text().is_ok() {
        return node.word(&[("rest", ())]).map(|()| Axis::Rest);
    }
    let counts: Result<Vec<u32>, _> = node.list()?.iter().map(|node| node.whole(0, 1024).map(|n| n as u32)).collect();
    Ok(Axis::Counts(counts?))
}

/// The splits of a grid that fit, in order, and the number of those that do not.
fn grid_splits(grid: &[(RoleKind, Axis)], sms: u32) -> (Vec<RoleSplit>, usize) {
    let mut splits = vec![RoleSplit::default()];
    // In the order of roles, whatever the order of the file.
    for kind in RoleKind::ALL {
        let Some((_, Axis::Counts(counts))) = grid.iter().find(|(k, _)| *k == kind) else { continue };
        splits = splits
            .iter()
            .flat_map(|split| {
                counts.iter().map(|&ctas| {
                    let mut split = *split;
                    split.set(kind, ctas);
                    split
                })
            })
            .collect();
    }
    let all = splits.len();
    let rest = grid.iter().find(|(_, axis)| matches!(axis, Axis::Rest)).map(|&(kind, _)| kind);
    let fit: Vec<RoleSplit> = splits
        .into_iter()
        .filter_map(|mut split| {
            let left = u64::from(sms).checked_sub(split.total())?;
            match rest {
                Some(_) if left == 0 => return None,
                Some(kind) => split.set(kind, left as u32),
                None => {}
            }
            Some(split)
        })
        .collect();
    let too_large = all - fit.len();
    (fit, too_large)
}

fn expectations(node: &Node<'_>) -> Result<Vec<Expect>, ExperimentError> {
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

fn claims_something(table: &Table<'_>, at_least: Option<f64>, at_most: Option<f64>) -> Result<(), ExperimentError> {
    match (at_least, at_most) {
        (None, None) => Err(table.refuse("claims nothing, allowed: at_least, at_most or both")),
        (Some(low), Some(high)) if low > high => {
            Err(table.refuse(&format!("at_least = {low} above at_most = {high}: nothing satisfies both")))
        }
        _ => Ok(()),
    }
}

/// Columns and the values that a row must have.
fn filter(node: &Node<'_>) -> Result<Vec<(String, String)>, ExperimentError> {
    let table = node.table().ok_or_else(|| node.refuse("allowed: a table of columns and values"))?;
    let pair = |(name, value): (String, Node<'_>)| {
        known_column(&value, &name)?;
        value.scalar().map(|value| (name, value))
    };
    table.entries().into_iter().map(pair).collect()
}

/// A level of confidence.
fn share(node: &Node<'_>) -> Result<f64, ExperimentError> {
    let level = node.number()?;
    let allowed = || node.refuse(format!("{level}, allowed: a number from 0.5 to 0.9999"));
    if (0.5..=0.9999).contains(&level) { Ok(level) } else { Err(allowed()) }
}

fn known_column(node: &Node<'_>, name: &str) -> Result<(), ExperimentError> {
    let known = crate::row::columns();
    if known.iter().any(|column| column == name) {
        return Ok(());
    }
    Err(node.refuse(format!("no column \"{name}\", allowed: {}", known.join(", "))))
}

/// The name of a column of numbers.
fn number_column(node: &Node<'_>) -> Result<String, ExperimentError> {
    let name = node.text()?;
    known_column(node, name)?;
    if crate::row::is_number(name) {
        return Ok(name.to_owned());
    }
    Err(node.refuse(format!("\"{name}\" holds words, allowed: a column of numbers")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Experiment, ExperimentError> {
        let source = Source::new(None, None).expect("the embedded data");
        Experiment::new("x".into(), &Document::new("x.toml".into(), text), &source, 0)
    }

    const HEAD: &str = "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = \"2x8-h200-efa\"\n";

    fn refused(text: &str) -> String {
        read(&format!("{HEAD}{text}")).err().expect("a refusal").to_string()
    }

    #[test]
    fn lists_multiply_in_the_order_of_the_file() {
        let text = format!(
            "{HEAD}shape = {{ m = [8192, 16384], n = 8192, k = 512 }}\n[set]\nsend_order = [\"any\", \"in_order\"]\n\
             [split]\ncompute = \"rest\"\nsend = {{ from = 2, to = 6, step = 2 }}\nreduce = [4, 131]\n"
        );
        let experiment = read(&text).expect("an experiment");
        assert_eq!((experiment.groups.len(), experiment.points(), experiment.too_large), (4, 12, 12));
        let splits: Vec<String> = experiment.groups[0]
            .splits
            .iter()
            .map(|split| match split {
                SplitChoice::Fixed(split) => split.to_string(),
                SplitChoice::Auto => "auto".into(),
            })
            .collect();
        assert_eq!(
            splits,
            [
                "compute=126,intra=0,send=2,reduce=4",
                "compute=124,intra=0,send=4,reduce=4",
                "compute=122,intra=0,send=6,reduce=4"
            ]
        );
    }

    #[test]
    fn mistakes_are_found_where_they_are() {
        let shape = "shape = { m = 8192, n = 8192, k = 512 }\n";
        assert_eq!(
            refused("shape = { m = 0 }\nsplit = \"auto\""),
            "x.toml:4:15: shape.m: 0, allowed: a whole number from 1 to 1048576"
        );
        assert_eq!(
            refused("shape = { m = 8192, n = 1 }\nsplit = \"auto\""),
            "x.toml:4:9: shape: missing; gemm_rs needs m, n, k"
        );
        assert_eq!(
            refused("shape = { seq = 8192 }\nsplit = \"auto\""),
            "x.toml:4:17: shape.seq: does not apply to gemm_rs, whose shape is m, n, k"
        );
        assert_eq!(
            refused(&format!("{shape}split = {{ compute = \"rest\", reduce = {{ from = 9, to = 3 }} }}")),
            "x.toml:5:55: split.reduce.to: 3, allowed: from (9) to 1024"
        );
        assert!(
            refused(&format!("{shape}split = [\"auto\", \"comput=3\"]"))
                .starts_with("x.toml:5:18: split: role \"comput\"")
        );
        assert_eq!(
            refused(&format!("{shape}split = {{ compute = 133 }}")),
            "x.toml:5:9: split: no split of the grid fits the SMs of the machine; lower the counts"
        );
        assert!(
            refused(&format!("{shape}split = \"auto\"\n[set]\nrecycle = true\nno_such = 1"))
                .starts_with("x.toml:8:11: set.no_such: kernel gemm_rs has no option \"no_such\"")
        );
        assert!(
            refused(&format!("{shape}split = \"auto\"\n[[expect]]\nclaim=\"c\"\nof=\"best\"\ncolumn=\"speed\""))
                .starts_with("x.toml:9:8: expect.column: no column \"speed\"")
        );
    }
}

//! What multiplies in an experiment file: kernels, clusters, shapes, options, splits.

use crate::cli::ProtocolArg;
use crate::document::{Node, Table};
use crate::error::ExperimentError;
use crate::plan::{self, Case, Draft, Fusion, Part, ResolveError, Source};
use crate::shape;
use std::collections::{BTreeMap, BTreeSet};
use tilewire_kernels::{OptionSet, RoleKind, RoleSplit};

/// CTAs of a role in a grid.
pub(super) enum Axis {
    Rest,
    Counts(Vec<u32>),
}

/// Splits of an experiment, before the machine is known.
pub(super) enum Splits<'a> {
    List(Vec<(Node<'a>, String)>),
    Grid(Vec<(RoleKind, Axis)>),
}

/// Everything that multiplies, in the order of the nesting.
pub(super) struct Axes<'a> {
    kernels: Vec<(Node<'a>, String)>,
    clusters: Vec<(Node<'a>, String)>,
    shapes: Vec<BTreeMap<&'static str, (Node<'a>, u64)>>,
    pub(super) shape_node: Node<'a>,
    sets: Vec<OptionSet>,
    overrides: Vec<Vec<(Node<'a>, String, String)>>,
    protocols: Vec<Option<ProtocolArg>>,
    pub(super) fusions: Vec<Fusion>,
    baseline_node: Option<Node<'a>>,
    execution_node: Option<Node<'a>>,
}

const SETS: &[(&str, OptionSet)] = &[("tilewire", OptionSet::Tilewire), ("published", OptionSet::Published)];

const PROTOCOLS: &[(&str, ProtocolArg)] = &[("fair", ProtocolArg::Fair), ("published", ProtocolArg::Published)];

/// An error of a draft at the value that is wrong.
pub(super) fn placed<'a>(error: ResolveError, node: impl FnOnce(Part) -> Node<'a>) -> ExperimentError {
    match error {
        ResolveError::Refused(refusal) => node(refusal.part).refuse(refusal.problem),
        ResolveError::Data(error) => error.into(),
    }
}

fn texts<'a>(node: &Node<'a>) -> Result<Vec<(Node<'a>, String)>, ExperimentError> {
    node.list()?.into_iter().map(|node| node.text().map(|text| (node.clone(), text.to_owned()))).collect()
}

impl<'a> Axes<'a> {
    pub(super) fn read(root: &Table<'a>) -> Result<Self, ExperimentError> {
        let shape_node = root.require("shape")?;
        let (mut shapes, mut seen) = (Vec::new(), BTreeSet::new());
        for node in shape_node.list()? {
            let table = node.table().ok_or_else(|| node.refuse("allowed: a table of the shape's fields"))?;
            for shape in shapes_of(&table)? {
                let fields: Vec<(&str, u64)> = shape.iter().map(|(&name, &(_, value))| (name, value)).collect();
                if let Some(fields) = seen.replace(fields) {
                    let fields: Vec<String> = fields.iter().map(|(name, value)| format!("{name} = {value}")).collect();
                    return Err(node.refuse(format!("{} is a shape that stands before", fields.join(", "))));
                }
                shapes.push(shape);
            }
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
        let mut fusions = match &baseline_node {
            None => vec![Fusion::Fused],
            Some(node) => {
                let fusion = |unfused| if unfused { Fusion::Unfused } else { Fusion::Fused };
                node.list()?.iter().map(|node| node.boolean().map(fusion)).collect::<Result<_, _>>()?
            }
        };
        if let Some(node) = root.get("bulk_synchronous")
            && node.boolean()?
        {
            if baseline_node.is_some() {
                return Err(node.refuse("true beside baseline; allowed: one of the two"));
            }
            fusions = vec![Fusion::BulkSynchronous];
        }
        Ok(Self {
            kernels: texts(&root.require("kernel")?)?,
            clusters: texts(&root.require("cluster")?)?,
            shapes,
            shape_node,
            sets,
            overrides,
            protocols,
            fusions,
            baseline_node,
            execution_node: root.get("execution"),
        })
    }

    /// Names of options that have several values.
    pub(super) fn varied(&self) -> BTreeSet<String> {
        let mut values: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (_, name, value) in self.overrides.iter().flatten() {
            values.entry(name).or_default().insert(value);
        }
        values.into_iter().filter(|(_, values)| values.len() > 1).map(|(name, _)| name.to_owned()).collect()
    }

    /// Calls `f` for every schedule, in order.
    pub(super) fn for_each(
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
                                for &fusion in &self.fusions {
                                    let draft = Draft {
                                        kernel: kernel.clone(),
                                        cluster: cluster.clone(),
                                        shape: shape.iter().map(|(&name, (_, value))| (name, *value)).collect(),
                                        set,
                                        overrides: overrides.iter().map(|(_, n, v)| (n.clone(), v.clone())).collect(),
                                        protocol,
                                        fusion,
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
                                            Part::Execution => {
                                                self.execution_node.clone().unwrap_or_else(|| kernel_node.clone())
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
    pub(super) fn read(node: &Node<'a>) -> Result<Self, ExperimentError> {
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

/// The splits of a grid that fit, in order, and the number of those that do not; `by_turns`, compute and communication do
/// not share the SMs.
pub(super) fn grid_splits(grid: &[(RoleKind, Axis)], sms: u32, by_turns: bool) -> (Vec<RoleSplit>, usize) {
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
            // Compute and communication each have all SMs when they take turns.
            let others = RoleSplit { compute: 0, ..split };
            let turns = if by_turns {
                vec![RoleSplit { compute: split.compute, ..RoleSplit::default() }, others]
            } else {
                vec![split]
            };
            let left: Vec<u64> =
                turns.iter().map(|turn| u64::from(sms).checked_sub(turn.total())).collect::<Option<_>>()?;
            let left = if rest == Some(RoleKind::Compute) { left[0] } else { *left.last()? };
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

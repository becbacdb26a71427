//! Experiment files: one question, and the grid of cases that answers it.
//!
//! ```toml
#![doc = include_str!("experiment/keys.toml")]
//! ```

mod axes;
mod claims;

pub use claims::{Expect, Hypothesis, Of, Study, has};

use crate::checked::Checks;
use crate::document::{Document, Node};
use crate::error::ExperimentError;
use crate::plan::{Case, Draft, Fusion, Source, SplitChoice};
use axes::{Axes, Splits, grid_splits, placed};
use claims::{Points, share};
use std::collections::BTreeSet;
use std::path::Path;
use tilewire_kernels::OptionSet;
use tilewire_sim::Execution;
use tilewire_sim::predict::Clock;

/// Every key, explained.
pub const KEYS: &str = include_str!("experiment/keys.toml");

/// Keys of the file, outside its tables.
const ROOT: [&str; 18] = [
    "question",
    "kernel",
    "cluster",
    "options",
    "protocol",
    "baseline",
    "bulk_synchronous",
    "seed",
    "noise",
    "clock",
    "execution",
    "shape",
    "set",
    "split",
    "expect",
    "hypothesis",
    "replicates",
    "confidence",
];

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
    /// Names of `[set]` that hold several values.
    pub varied: BTreeSet<String>,
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

/// Points that share a schedule.
pub struct Group {
    /// The schedule's case; its own split is not used.
    pub case: Case,
    /// Splits.
    pub splits: Vec<SplitChoice>,
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
        root.only(&ROOT)?;
        let question = root.require("question")?.text()?.to_owned();
        let hypothesis_node = root.get("hypothesis");
        let seed = root.get("seed").map_or(Ok(0), |node| node.whole(0, MAX_SEED))? + replicate;
        let noise = root.get("noise").map_or(Ok(hypothesis_node.is_some()), |node| node.boolean())?;
        let execution = root.get("execution").map(|node| node.word(EXECUTIONS)).transpose()?;
        let clock = root.get("clock").map(|node| node.word(CLOCKS)).transpose()?;
        let axes = Axes::read(&root)?;
        let (split_node, splits) = match root.get("split") {
            // Launches of the unfused form take the SMs that they can get.
            None if axes.fusions == [Fusion::Unfused] => (axes.shape_node.clone(), Splits::List(Vec::new())),
            Some(node) if axes.fusions == [Fusion::Unfused] => {
                return Err(node.refuse("the unfused form has no split; remove it, or add false to baseline"));
            }
            _ => {
                let node = root.require("split")?;
                (node.clone(), Splits::read(&node)?)
            }
        };
        let expect_node = root.get("expect");
        let replicates = root.get("replicates");
        let confidence = root.get("confidence");
        if let (None, Some(node)) = (&hypothesis_node, replicates.as_ref().or(confidence.as_ref())) {
            return Err(node.refuse("belongs to [[hypothesis]], and there is none"));
        }
        if let (Some(node), true) = (&hypothesis_node, expect_node.is_some()) {
            return Err(node.refuse("stands beside [[expect]]; `scale` decides the one, `sweep` checks the other"));
        }

        let mut experiment = Self {
            name,
            question,
            text: document.text().to_owned(),
            seed,
            groups: Vec::new(),
            varied: axes.varied(),
            too_large: 0,
            expect: Vec::new(),
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
            fusion: Fusion::Fused,
            seed,
            noise,
            execution,
            clock,
            checks: Checks::default(),
            measured: false,
        };
        axes.for_each(&base, source, |draft, case| experiment.add(case, draft, &splits, source, &split_node))?;
        if experiment.points() == 0 {
            return Err(split_node.refuse("no split of the grid fits the SMs of the machine; lower the counts"));
        }
        if let Some(node) = expect_node {
            let points = Points::new(&experiment);
            experiment.expect =
                node.list()?.iter().map(|node| Expect::read(&points, node)).collect::<Result<_, _>>()?;
        }
        if let Some(node) = hypothesis_node {
            let draws = experiment.cases().any(|(case, _)| case.draws());
            if let (false, Some(node)) = (draws, replicates.as_ref().or(confidence.as_ref())) {
                return Err(node.refuse("nothing is drawn without noise, so one run decides; remove it"));
            }
            let replicates = replicates.map_or(Ok(20), |node| node.whole(2, MAX_REPLICATES))?;
            let points = Points::new(&experiment);
            experiment.study = Some(Study {
                replicates: if draws { replicates } else { 1 },
                confidence: confidence.map_or(Ok(0.95), |node| share(&node))?,
                hypotheses: node
                    .list()?
                    .iter()
                    .map(|node| Hypothesis::read(&points, node))
                    .collect::<Result<_, _>>()?,
            });
        }
        Ok(experiment)
    }

    /// The same points, with what is asked of the checker.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] for a claim about hazards that are not counted.
    pub fn checked(mut self, checks: Checks) -> Result<Self, ExperimentError> {
        let hypotheses = self.study.iter().flat_map(|study| &study.hypotheses);
        let mut claims =
            hypotheses.map(|h| (&h.claim, &h.column)).chain(self.expect.iter().map(|e| (&e.claim, &e.column)));
        if let (Some((claim, _)), false) = (claims.find(|(_, column)| *column == "hazards"), checks.hazards) {
            return Err(ExperimentError::refused(
                format!("claim \"{claim}\""),
                "hazards are counted with --hazards only; add it",
            ));
        }
        self.groups.iter_mut().for_each(|group| group.case.checks = checks);
        Ok(self)
    }

    /// `name=value` of the options whose values vary in the file, each behind some text: what tells a case from the others
    /// of its kernel.
    pub fn set_behind(&self, before: &str, case: &Case) -> String {
        case.options_behind(before, |name| self.varied.contains(name))
    }

    /// Cases with their splits, in order.
    pub fn cases(&self) -> impl Iterator<Item = (&Case, SplitChoice)> {
        self.groups.iter().flat_map(|group| group.splits.iter().map(|&split| (&group.case, split)))
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
        let choices = if case.is_unfused() {
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
                    let (fit, too_large) = grid_splits(grid, sms, case.fusion == Fusion::BulkSynchronous);
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
    fn the_explained_keys_are_those_that_are_read() {
        let experiment = read(KEYS).expect("an experiment");
        assert_eq!((experiment.groups.len(), experiment.points(), experiment.expect.len()), (4, 64, 1));
        let scale = KEYS.lines().filter_map(|line| line.strip_prefix("# ")).collect::<Vec<_>>().join("\n");
        let (_, scale) = scale.split_once("drawn either, one run decides").expect("the keys of scale");
        let scale = scale.split_once('\n').expect("lines").1;
        let (keys, hypothesis) = scale.split_once("[[hypothesis]]").expect("a hypothesis");
        let head = HEAD.replace("2x8-h200-efa", "64x8-h200-efa");
        let text = format!(
            "{head}{keys}baseline = [false, true]\nsplit = \"compute=120,send=4,reduce=8\"\n\
             shape = {{ m = 65536, n = 8192, k = 512 }}\n[[hypothesis]]{hypothesis}"
        );
        let study = read(&text).expect("a study").study.expect("a hypothesis");
        assert_eq!((study.replicates, study.hypotheses.len()), (20, 1));
        let problem = read(&format!("noise = false\n{text}")).err().expect("a refusal").to_string();
        assert!(problem.contains("replicates: nothing is drawn without noise"), "{problem}");
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
        assert!(
            refused(&format!("{shape}splits = \"auto\""))
                .starts_with("x.toml:5:1: splits: unknown key, allowed: question")
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

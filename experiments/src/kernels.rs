//! `kernels`: which kernels there are, and what the options of one mean.

use crate::cli::KernelsArgs;
use crate::error::ExperimentError;
use crate::plan;
use crate::shape;
use crate::table::Table;
use serde_json::json;
use std::fmt::Write as _;
use tilewire_kernels::{Cluster, KERNELS, Kernel, OptionSet, Options, Problem};

/// Defaults follow from size and cluster; these are the ones that are shown.
const SHOWN: (u64, Cluster) = (16_384, Cluster { nodes: 2, gpus_per_node: 8 });

/// Width of the explanation of an option.
const WIDTH: usize = 96;

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError::Refused`] for a name that no kernel has.
pub fn run(args: &KernelsArgs) -> Result<String, ExperimentError> {
    let Some(name) = &args.kernel else {
        let shapes = |kernel: &dyn Kernel| shape::fields(kernel.problem_kind()).iter().map(field).collect::<Vec<_>>();
        if args.json {
            let kernels: Vec<_> = KERNELS
                .iter()
                .map(|k| json!({ "kernel": k.name(), "summary": k.summary(), "shape": shapes(*k) }))
                .collect();
            return Ok(json!(kernels).to_string() + "\n");
        }
        let mut table = Table::new(["kernel", "what it does", "shape, with defaults"]);
        for kernel in KERNELS {
            table.row([kernel.name().to_owned(), kernel.summary().to_owned(), shapes(*kernel).join(", ")]);
        }
        return Ok(table.render(2) + "\ntilewire kernels KERNEL explains its options\n");
    };
    let kernel = plan::kernel(name).map_err(|refusal| ExperimentError::refused("KERNEL", refusal.problem))?;
    let problem = shown_problem(kernel);
    let defaults = [OptionSet::Tilewire, OptionSet::Published].map(|set| kernel.options(set, &problem, SHOWN.1));
    let value = |options: &Options, name: &str| {
        options.iter().find(|(known, _)| *known == name).map_or_else(String::new, |(_, value)| value.to_string())
    };
    if args.json {
        let options: Vec<_> = kernel
            .option_specs()
            .iter()
            .map(|spec| {
                json!({
                    "name": spec.name,
                    "doc": plain(spec.doc),
                    "allowed": spec.values.to_string(),
                    "tilewire": value(&defaults[0], spec.name),
                    "published": value(&defaults[1], spec.name),
                })
            })
            .collect();
        return Ok(json!({ "kernel": name, "problem": problem.to_string(), "cluster": SHOWN.1.to_string(), "options": options })
            .to_string()
            + "\n");
    }
    let mut text = format!(
        "{name}: {}\nOptions for --set NAME=VALUE and [set]; defaults of {problem} on {}\n",
        kernel.summary(),
        SHOWN.1
    );
    for spec in kernel.option_specs() {
        let [tilewire, published] = defaults.each_ref().map(|options| value(options, spec.name));
        let _ = writeln!(text, "\n  {}  {}", spec.name, spec.values);
        let defaults = if tilewire == published {
            format!("default {tilewire}")
        } else {
            format!("default {tilewire}, of --options published {published}")
        };
        let _ = writeln!(text, "      {defaults}");
        for line in wrapped(&plain(spec.doc)) {
            let _ = writeln!(text, "      {line}");
        }
    }
    Ok(text)
}

/// A field of a shape, with its default.
fn field(field: &shape::Field) -> String {
    field.default.map_or_else(|| field.name.to_owned(), |default| format!("{}={default}", field.name))
}

/// The shape that defaults are shown for.
fn shown_problem(kernel: &dyn Kernel) -> Problem {
    let (size, cluster) = SHOWN;
    shape::published_problem(kernel.name(), kernel.problem_kind(), size, cluster.ranks() as u64)
        .expect("every kind of problem has a size")
}

/// An explanation without the marks of its rustdoc.
fn plain(doc: &str) -> String {
    doc.replace('`', "")
}

/// Lines of at most [`WIDTH`] characters.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("one line or more");
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(word.to_owned());
        } else {
            *last += if last.is_empty() { "" } else { " " };
            *last += word;
        }
    }
    lines
}

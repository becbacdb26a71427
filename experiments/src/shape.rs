//! Shapes as a user names them: one list of fields per kind of problem, shared by flags and experiment files.

use tilewire_kernels::{Problem, ProblemKind};

/// One number of a shape.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Flag and key.
    pub name: &'static str,
    /// Value when it is not given; none: it must be.
    pub default: Option<u64>,
    /// Largest value.
    pub max: u64,
}

const fn required(name: &'static str, max: u64) -> Field {
    Field { name, default: None, max }
}

const fn published(name: &'static str, default: u64, max: u64) -> Field {
    Field { name, default: Some(default), max }
}

const GEMM: &[Field] = &[required("m", 1 << 20), required("n", 1 << 20), required("k", 1 << 20)];

/// Defaults. Source: the published MoE benchmark (DeepSeek-V3 sizes).
const MOE: &[Field] = &[
    required("tokens", 1 << 24),
    published("hidden", 7168, 1 << 17),
    published("inter", 2048, 1 << 17),
    published("topk", 8, 64),
    published("experts", 256, 1 << 16),
];

/// Defaults. Source: the published ring attention benchmark.
const ATTENTION: &[Field] = &[
    required("seq", 1 << 24),
    published("batch", 4, 1 << 12),
    published("heads", 16, 1 << 10),
    published("head_dim", 128, 1 << 10),
];

/// A whole number as people write it: digits, without a sign or leading zeros.
pub fn whole(text: &str) -> Option<u64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

/// The fields of a kind of problem.
pub const fn fields(kind: ProblemKind) -> &'static [Field] {
    match kind {
        ProblemKind::Gemm => GEMM,
        ProblemKind::Moe => MOE,
        ProblemKind::Attention => ATTENTION,
    }
}

/// The names of all fields of all kinds.
pub fn names() -> impl Iterator<Item = &'static str> {
    [GEMM, MOE, ATTENTION].into_iter().flatten().map(|field| field.name)
}

/// The largest value of a field.
pub fn max(name: &str) -> u64 {
    [GEMM, MOE, ATTENTION].into_iter().flatten().find(|field| field.name == name).map_or(1, |field| field.max)
}

/// A problem from values that are given by name.
///
/// # Errors
/// The name of a field that is missing.
pub fn problem(kind: ProblemKind, value: impl Fn(&str) -> Option<u64>) -> Result<Problem, &'static str> {
    let field = |name: &str| -> Result<u64, &'static str> {
        let field = fields(kind).iter().find(|field| field.name == name).expect("a field of this kind");
        value(name).or(field.default).ok_or(field.name)
    };
    Ok(match kind {
        ProblemKind::Gemm => Problem::Gemm { m: field("m")?, n: field("n")?, k: field("k")? },
        ProblemKind::Moe => Problem::Moe {
            tokens: field("tokens")?,
            hidden: field("hidden")?,
            inter: field("inter")?,
            topk: field("topk")?,
            experts: field("experts")?,
        },
        ProblemKind::Attention => Problem::Attention {
            seq: field("seq")?,
            batch: field("batch")?,
            heads: field("heads")?,
            head_dim: field("head_dim")?,
        },
    })
}

/// The values of a problem by name.
pub fn values(problem: &Problem) -> Vec<(&'static str, u64)> {
    match *problem {
        Problem::Gemm { m, n, k } => vec![("m", m), ("n", n), ("k", k)],
        Problem::Moe { tokens, hidden, inter, topk, experts } => {
            vec![("tokens", tokens), ("hidden", hidden), ("inter", inter), ("topk", topk), ("experts", experts)]
        }
        Problem::Attention { seq, batch, heads, head_dim } => {
            vec![("seq", seq), ("batch", batch), ("heads", heads), ("head_dim", head_dim)]
        }
    }
}

/// The shape that the published figures of a kernel index by `size`, on `ranks` GPUs; none for other kernels.
pub fn published_problem(kernel: &str, kind: ProblemKind, size: u64, ranks: u64) -> Option<Problem> {
    match kind {
        ProblemKind::Gemm if kernel == "ag_gemm" => Some(Problem::Gemm { m: size, n: size / ranks, k: size }),
        ProblemKind::Gemm => Some(Problem::Gemm { m: size, n: size, k: size / ranks }),
        ProblemKind::Moe => problem(kind, |name| (name == "tokens").then_some(size)).ok(),
        ProblemKind::Attention => problem(kind, |name| (name == "seq").then_some(size)).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_the_published_ones() {
        let moe = problem(ProblemKind::Moe, |name| (name == "tokens").then_some(8192)).expect("tokens are given");
        assert_eq!(moe.to_string(), "tokens=8192,hidden=7168,inter=2048,topk=8,experts=256");
        let attention =
            problem(ProblemKind::Attention, |name| (name == "seq").then_some(12_288)).expect("seq is given");
        assert_eq!(attention.to_string(), "seq=12288,batch=4,heads=16,head_dim=128");
    }

    #[test]
    fn a_missing_field_is_named() {
        assert_eq!(problem(ProblemKind::Gemm, |name| (name != "k").then_some(1)), Err("k"));
    }

    #[test]
    fn published_shapes_are_those_of_the_figures() {
        let text = |kernel, kind, size| published_problem(kernel, kind, size, 16).map(|p| p.to_string());
        assert_eq!(text("ag_gemm", ProblemKind::Gemm, 8192).as_deref(), Some("m=8192,n=512,k=8192"));
        assert_eq!(text("gemm_rs", ProblemKind::Gemm, 8192).as_deref(), Some("m=8192,n=8192,k=512"));
    }
}

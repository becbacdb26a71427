//! Structure of the GEMM-family schedules: task counts, bytes, symmetry, bounds, and errors of bad shapes.

mod ag_gemm;
mod case;
mod gemm_ar;
mod gemm_rs;
mod tally;

use case::{Case, SMALL_TILES};
use tilewire_kernels::OptionSet::{Published, Tilewire};
use tilewire_kernels::{KERNELS, ProblemKind};

/// What hardware runs are compared with, element by element, is what the executor's are, as a whole.
#[test]
fn products_say_what_the_references_say() {
    let value =
        |tensor: &'static str, row: u64, col: u64| (row * 7 + col * 3 + u64::from(tensor == "b")) as f64 % 11.0 - 5.0;
    let mut compared = 0;
    for kernel in KERNELS.iter().filter(|kernel| kernel.problem_kind() == ProblemKind::Gemm) {
        for (set, cluster) in [(Tilewire, (2, 2)), (Published, (2, 2)), (Tilewire, (1, 4))] {
            let mut cases = vec![Case::new(kernel.name(), set, cluster, [256, 128, 32]).with(&SMALL_TILES)];
            if kernel.name() == "gemm_rs" {
                for output in ["per_rank", "per_node"] {
                    cases.push(
                        Case::new("gemm_rs", set, cluster, [256, 128, 32])
                            .with(&SMALL_TILES)
                            .with(&[("output", output)]),
                    );
                }
            }
            for spec in cases.iter().map(Case::spec) {
                for rank in spec.cluster.iter() {
                    let product = kernel.product(&spec, rank).expect("a GEMM");
                    let [expected] = &kernel.reference(&spec, rank, &value)[..] else { panic!("one matrix") };
                    assert_eq!(expected.values.len() as u64, product.rows * product.cols, "{}", kernel.name());
                    assert!(expected.roundings <= product.roundings, "{}", kernel.name());
                    for (at, &want) in (0..).zip(&expected.values).step_by(97) {
                        let (row, col) = (product.first_row + at / product.cols, product.first_col + at % product.cols);
                        let sum: f64 = (0..product.depth).map(|k| value("a", row, k) * value("b", k, col)).sum();
                        assert!((sum - want).abs() < 0.5, "{} {rank:?} element {at}: {sum}, not {want}", kernel.name());
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 1000, "only {compared}");
}

//! Questions that users of such kernels and of such models have asked in public, put to the binary.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

type Row = BTreeMap<String, String>;

fn tilewire(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tilewire")).args(arguments).current_dir(folder).output().expect("the binary runs")
}

/// Tables of the published figures, by name.
fn figures(table: &str) -> Vec<Row> {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = TempDir::new().expect("a temporary directory");
        let output = tilewire(folder.path(), &["figures", "-o", "out"]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        folder
    });
    let mut reader = csv::Reader::from_path(folder.path().join("out/figures").join(table)).expect("a table");
    reader.deserialize().collect::<Result<_, _>>().expect("whole rows")
}

fn number(row: &Row, column: &str) -> f64 {
    row[column].parse().unwrap_or_else(|_| panic!("{column} = {}", row[column]))
}

/// Published and predicted TFLOP/s of a GPU, fused and unfused, by size, on two nodes over EFA.
fn series(kernel: &str) -> BTreeMap<u64, [[f64; 2]; 2]> {
    let mut series: BTreeMap<u64, [[f64; 2]; 2]> = BTreeMap::new();
    for row in figures("rows.csv").iter().filter(|row| row["kernel"] == kernel && row["topology"] == "2x8-h200-efa") {
        let form = match row["system"].as_str() {
            "mKernel" => 0,
            "cuBLAS+NCCL" => 1,
            _ => continue,
        };
        let values = ["published_tflops_per_gpu", "predicted_tflops_per_gpu"].map(|column| number(row, column));
        series.entry(row["size"].parse().expect("a size")).or_default()[form] = values;
    }
    series
}

/// Sizes at which whether the fused form is faster is predicted wrong.
fn wrong_signs(series: &BTreeMap<u64, [[f64; 2]; 2]>) -> Vec<u64> {
    let wins = |[fused, unfused]: &[[f64; 2]; 2], column: usize| fused[column] > unfused[column];
    series.iter().filter(|(_, pair)| wins(pair, 0) != wins(pair, 1)).map(|(&size, _)| size).collect()
}

/// C11, source: <https://github.com/zhongjiechen/mKernel>, labels of plots/gemm_rs_efa.png: small shapes lose to
/// cuBLAS + NCCL. Signs exact, 25 % from 8192 on and 50 % below.
#[test]
fn c11_small_shapes_of_gemm_rs_lose_to_libraries() {
    let series = series("gemm_rs");
    let published: Vec<[f64; 2]> = series.values().map(|[fused, unfused]| [fused[0], unfused[0]]).collect();
    assert_eq!(published, [[4.0, 8.0], [25.0, 36.0], [87.0, 92.0], [243.0, 219.0], [464.0, 381.0]]);
    assert_eq!(wrong_signs(&series), Vec::<u64>::new());
    for (size, pair) in series {
        let tolerance = if size < 8192 { 0.5 } else { 0.25 };
        for [published, predicted] in pair {
            assert!((predicted / published - 1.0).abs() <= tolerance, "{size}: {predicted} for {published}");
        }
    }
}

/// C14, source: <https://github.com/zhongjiechen/mKernel>, labels of plots/ag_gemm_efa.png and dispatch_gemm_efa.png: the
/// fused form wins at every point. Signs exact, 25 %.
///
/// The model is 27 % too slow for the unfused `ag_gemm` at 4096, a size that the README does not judge.
#[test]
fn c14_fused_ag_gemm_and_dispatch_win_everywhere() {
    let mut missed = Vec::new();
    for (kernel, sizes) in [("ag_gemm", 5), ("moe_dispatch_gemm", 5)] {
        let series = series(kernel);
        assert_eq!((series.len(), wrong_signs(&series)), (sizes, Vec::new()), "{kernel}");
        for (size, pair) in series {
            assert!(pair[0][1] > pair[1][1], "{kernel} {size}: {pair:?}");
            for ([published, predicted], form) in pair.into_iter().zip(["fused", "unfused"]) {
                if (predicted / published - 1.0).abs() > 0.25 {
                    missed.push((kernel, size, form));
                }
            }
        }
    }
    assert_eq!(missed, [("ag_gemm", 4096, "unfused")]);
}

/// C44, source: <https://github.com/SauersML/gam/issues/205>: a program that probes for a GPU must not panic where there is
/// no CUDA.
#[test]
fn c44_without_cuda_doctor_says_so_and_measure_ends_with_code_4() {
    let folder = TempDir::new().expect("a temporary directory");
    let output = tilewire(folder.path(), &["doctor"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    if !text.contains("CUDA driver not found") {
        assert!(text.lines().any(|line| line.starts_with("driver  yes")), "{text}");
        eprintln!("skipped: this machine has a CUDA driver");
        return;
    }
    assert!(text.contains("disables measure and calibrate"), "{text}");
    let experiment = "question = \"?\"\nkernel = \"gemm_rs\"\ncluster = \"1x1-h200-1gpu\"\n\
                      shape = { m = 1024, n = 1024, k = 512 }\nsplit = \"compute=100,reduce=8\"\n";
    fs::write(folder.path().join("x.toml"), experiment).expect("a file");
    let output = tilewire(folder.path(), &["measure", "x.toml", "-o", "out"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{error}");
    assert!(error.contains("`tilewire doctor` says what is here") && !error.contains("panicked"), "{error}");
}

/// C47, source: <https://github.com/astra-sim/astra-sim/pull/320>: a geometric-mean error of 17 % was published as validated.
/// Ours is stated with the worst size, by kernel, test bed and system.
#[test]
fn c47_errors_are_stated_by_kernel_and_fabric_and_stay_below_17_percent() {
    let errors = figures("errors.csv");
    for kernel in tilewire_kernels::KERNELS {
        assert!(errors.iter().any(|row| row["kernel"] == kernel.name() && row["system"] == "mKernel"));
    }
    let rows = figures("rows.csv");
    for stated in errors {
        let of = |row: &&Row| {
            row["judged"] == "true"
                && ["kernel", "topology", "system"].iter().all(|column| row[*column] == stated[*column])
        };
        let logs: Vec<f64> = rows
            .iter()
            .filter(of)
            .map(|row| (number(row, "predicted_tflops_per_gpu") / number(row, "published_tflops_per_gpu")).ln().abs())
            .collect();
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp_m1();
        let worst = logs.iter().copied().fold(0.0, f64::max).exp_m1();
        assert!((mean - number(&stated, "error")).abs() < 1e-6, "{stated:?}: {mean}");
        assert!((worst - number(&stated, "worst_error")).abs() < 1e-6, "{stated:?}: {worst}");
        assert!(mean <= 0.17, "{stated:?}");
    }
}

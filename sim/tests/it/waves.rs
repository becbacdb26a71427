//! Wave quantisation: what counts is how many tiles the busiest CTA gets.

use crate::support::*;
use tilewire_kernels::schedule::{At, Drain};
use tilewire_kernels::{Cluster, Fabric, OptionSet, Problem, Spec, kernel};
use tilewire_sim::{Config, predict};

/// End of 2048 tiles on this many CTAs; a tile takes 10.2 us, the first one 0.1 more, the last store 0.4.
fn end(ctas: u32) -> u64 {
    let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| vec![tile(10, At::ME, Drain::Overlap); 2048]);
    simulate(&toy, &round_machine(Fabric::IbRc), split(ctas, 0, 0, 0)).end
}

#[test]
fn whole_waves_only() {
    for (ctas, waves) in [(132, 16), (128, 16), (127, 17), (124, 17), (121, 17), (120, 18), (118, 18)] {
        assert_eq!(end(ctas), 3_500 * NS + waves * 10_200 * NS, "{ctas} CTAs");
    }
}

/// C06, source: wave counts as in <https://github.com/deepseek-ai/DeepGEMM/pull/44>.
#[test]
fn c06_four_sms_are_free_and_eight_are_not() {
    let slowdown = |ctas| end(ctas) as f64 / end(132) as f64 - 1.0;
    for (ctas, expected) in [(128, 0.0), (124, 0.0625), (118, 0.125)] {
        assert!((slowdown(ctas) - expected).abs() < 0.01, "{ctas} CTAs: {}", slowdown(ctas));
    }
}

/// Adds wait for the store of the owner's tile, which leaves during the tile after it: where both are of one wave, every
/// wave waits unless the CTAs of that store do nothing else, as they do when they are a multiple of a chunk's tiles.
#[test]
fn chunks_opened_half_a_wave_earlier_hold_no_wave_up() {
    let time_us = |name: &str, set: &[(&str, &str)], ctas: u32| {
        let problem = Problem::Gemm { m: 8192, n: 8192, k: 1024 };
        let cluster = Cluster { nodes: 1, gpus_per_node: 8 };
        let kernel = kernel(name).expect("a kernel");
        let mut options = kernel.options(OptionSet::Tilewire, &problem, cluster);
        for (option, value) in set {
            options.set(option, value).expect("an option");
        }
        let spec = Spec { problem, cluster, fabric: Fabric::IbRc, options };
        let schedule = kernel.build(&spec).expect("a schedule");
        let split = if name == "gemm_rs" { split(ctas, 0, 0, 132 - ctas) } else { split(ctas, 132 - ctas, 0, 0) };
        predict(&schedule, &shipped_machine("h200-nvlink"), &split, &Config::default()).expect("it ends").time_us
    };
    let before = [("open_lead_tiles", "0")];
    assert!(time_us("gemm_rs", &before, 124) > 1.1 * time_us("gemm_rs", &before, 128), "the cliff that a lead removes");
    for name in ["gemm_rs", "gemm_ar"] {
        let [even, odd] = [128, 124].map(|ctas| time_us(name, &[], ctas));
        // 2048 tiles are 16 waves of 128 CTAs and 17 of 124.
        assert!(odd < 17.0 / 16.0 * even, "{name}: {odd} us with 124 CTAs, {even} us with 128");
        assert!(even < 1.01 * time_us(name, &before, 128), "{name}: 128 CTAs are as fast as before");
    }
}

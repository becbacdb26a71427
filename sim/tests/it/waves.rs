//! Wave quantisation: what counts is how many tiles the busiest CTA gets.

use crate::support::*;
use tilewire_kernels::Fabric;
use tilewire_kernels::schedule::{At, Drain};

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

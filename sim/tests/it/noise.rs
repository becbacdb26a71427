//! Noise is off by default, seeded, and its consumers do not disturb each other.

use crate::support::*;
use tilewire_kernels::schedule::{At, Drain};
use tilewire_kernels::{Fabric, OptionSet};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine::{self, Run};
use tilewire_sim::noise::{Noise, Purpose};
use tilewire_sim::{Config, Execution, Machine, SimError};

fn run(case: &Case, machine: &Machine, noise_seed: Option<u64>) -> Run {
    let config = Config { noise_seed, ..full() };
    let compiled = Compiled::new(&case.schedule, machine, &config).expect("compiles");
    engine::run(&compiled, &case.usual_split(), Form::Whole, true).expect("runs")
}

#[test]
fn a_seed_is_a_result() {
    let machine = shipped_machine("h200-efa");
    for case in kernels(OptionSet::Tilewire, cluster(2, 2), Fabric::EfaSrd, 1) {
        assert_eq!(run(&case, &machine, Some(1)), run(&case, &machine, Some(1)), "{}", case.name);
        assert_ne!(run(&case, &machine, Some(1)).end, run(&case, &machine, Some(2)).end, "{}", case.name);
        assert_ne!(run(&case, &machine, Some(1)).end, run(&case, &machine, None).end, "{}", case.name);
    }
}

#[test]
fn no_amount_of_noise_is_no_noise() {
    let silent = [
        ("noise.network_sigma", 0.0),
        ("noise.flag_sigma", 0.0),
        ("noise.clock_sigma", 0.0),
        ("noise.late_rank_us", 0.0),
    ];
    for name in ["h200-efa", "h200-cx7"] {
        let machine = with(shipped_machine(name), &silent);
        for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 2), machine.fabric, 1)) {
            assert_eq!(run(&case, &machine, Some(3)), run(&case, &machine, None), "{}", case.name);
        }
    }
}

#[test]
fn needs_every_rank() {
    let machine = shipped_machine("h200-efa");
    let case = &kernels(OptionSet::Tilewire, cluster(2, 2), Fabric::EfaSrd, 1)[0];
    let with = |execution| {
        let config = Config { execution, noise_seed: Some(1), ..Config::default() };
        Compiled::new(&case.schedule, &machine, &config).map(|compiled| compiled.ranks.len())
    };
    assert_eq!(with(Execution::Folded), Ok(4));
    assert!(matches!(with(Execution::Mirror), Err(SimError::NotSymmetric { .. })));
}

#[test]
fn one_rank_is_late_by_its_delay() {
    let silent = [("noise.network_sigma", 0.0), ("noise.flag_sigma", 0.0), ("noise.clock_sigma", 0.0)];
    let machine = with(round_machine(Fabric::IbRc), &silent);
    let toy = Toy::node(4, vec![compute()]).symmetric().tasks(|_, _, _| vec![copy(At::ME, At::ME, 50_000)]);
    let compiled = Compiled::new(&toy, &machine, &Config { noise_seed: Some(5), ..full() }).expect("compiles");
    let mut ends = engine::run(&compiled, &split(1, 0, 0, 0), Form::Whole, false).expect("runs").rank_ends;
    ends.sort_unstable();
    assert_eq!(ends, [5 * US, 5 * US, 5 * US, 105 * US]);
}

#[test]
fn a_slow_clock_stretches_tiles_only() {
    let machine = with(round_machine(Fabric::IbRc), &[("noise.flag_sigma", 0.0), ("noise.late_rank_us", 0.0)]);
    let toy = Toy::node(4, vec![compute()]).symmetric().tasks(|_, _, _| vec![tile(10, At::ME, Drain::Overlap)]);
    let compiled = Compiled::new(&toy, &machine, &Config { noise_seed: Some(5), ..full() }).expect("compiles");
    let noise = compiled.noise.expect("asked for");
    let run = engine::run(&compiled, &split(1, 0, 0, 0), Form::Whole, false).expect("runs");
    for (rank, &end) in run.rank_ends.iter().enumerate() {
        // 3 us, first loads of 0.1 us, 10.2 us of tile at this rank's speed, 0.4 us of store.
        let tile = (10_200.0 * NS as f64 * noise.slowdown(rank)).round() as u64;
        assert_eq!(end, 3_500 * NS + tile, "rank {rank}");
    }
}

#[test]
fn streams_are_apart_and_normal() {
    let noise = Noise { seed: 7, network_sigma: 0.1, flag_sigma: 0.1, clock_sigma: 0.1 };
    let first = |rank, purpose| noise.stream(rank, purpose).normal();
    let mut seen = Vec::new();
    for rank in 0..50 {
        for purpose in [Purpose::Network, Purpose::Flag, Purpose::Clock] {
            seen.push(first(rank, purpose).to_bits());
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 150);
    let mut stream = noise.stream(0, Purpose::Network);
    let draws: Vec<f64> = (0..100_000).map(|_| stream.normal()).collect();
    let mean = draws.iter().sum::<f64>() / 1e5;
    let variance = draws.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / 1e5;
    assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
}

//! Random legal schedules: what the checker calls clean has right values under every interleaving tried.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod random;

use proptest::prelude::*;
use random::Random;
use tilewire_hw::values::{Config, Scheduler, check_values};
use tilewire_kernels::RoleSplit;
use tilewire_kernels::check::{Limits, report};

const TRIALS: [(Scheduler, u64); 5] = [
    (Scheduler::Random, 1),
    (Scheduler::Laggards, 2),
    (Scheduler::Laggards, 3),
    (Scheduler::DelayedPuts, 4),
    (Scheduler::ReorderedPuts, 5),
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn clean_schedules_compute_the_right_values(seed in any::<u64>(), size in 1u32..24, ctas in 1u32..12) {
        let program = Random::new(seed, size);
        let schedule = program.schedule();
        let split = RoleSplit { compute: ctas, intra_comm: ctas, inter_send: ctas, inter_reduce: ctas };
        let found = report(&schedule, &Limits::hopper(132), Some(&split));
        prop_assert!(found.is_clean(), "{}\n{program:?}", found);
        let config = Config { split, sms: 4 * ctas, ..Config::default() };
        let trials = check_values(&schedule, &program, &program.spec(), &config, &TRIALS, |_, _, _| ());
        prop_assert!(trials.is_clean(), "{:?} {:?}\n{program:?}", trials.failure, trials.races);
    }
}

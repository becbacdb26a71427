//! No split beats its lower bound, the bounds are tight where one thing decides, and the search finds the optimum.

use crate::metamorphic::{draw, narrow};
use crate::support::*;
use tilewire_kernels::schedule::{At, Claim, CtaCount, Drain};
use tilewire_kernels::{Fabric, OptionSet, RoleKind, RoleSplit, Schedule};
use tilewire_sim::bound::LowerBound;
use tilewire_sim::compile::Form;
use tilewire_sim::tune::{TuneConfig, tune};
use tilewire_sim::{Clock, Config, Execution, Loop, Machine, Protocol, Shown, Simulation};

fn counts(split: &RoleSplit) -> [u32; 4] {
    RoleKind::ALL.map(|kind| split.get(kind))
}

/// A split that gives every role of the schedule a CTA, and no other; the larger counts are as likely as the smaller.
fn random_split(schedule: &Schedule, random: &mut Random) -> RoleSplit {
    let mut split = RoleSplit::default();
    let mut left: u32 = 132;
    for role in schedule.launches.iter().flat_map(|launch| &launch.roles) {
        if role.ctas == CtaCount::FromSplit && split.get(role.kind) == 0 {
            // One for each of the three roles that may follow.
            let most = u64::from(left.saturating_sub(3).max(1));
            let ctas = most.min(1 << random.within(0, 7)).min(random.within(1, most)) as u32;
            split.set(role.kind, ctas);
            left -= ctas;
        }
    }
    split
}

/// Machines on which one thing after the other decides.
fn machines() -> Vec<Machine> {
    let of = |name: &str, changes: &[(&str, f64)]| with(shipped_machine(name), changes);
    vec![
        of("h200-efa", &[]),
        of("h200-cx7", &[("gpu.droop_knee_tflops", 20.0), ("gpu.droop_static_tflops", 60.0)]),
        of("h200-efa", &[("gpu.hbm_gbs", 60.0), ("nvlink.egress_gbs", 20.0)]),
        of("h200-efa", &[("proxy.post_ns", 9000.0), ("proxy.completion_ns", 7000.0), ("proxy.in_flight", 2.0)]),
        of("h200-cx7", &[("nic.rail_gbs", 2.0), ("nvlink.ingress_gbs", 20.0), ("proxy.completion_ns", 20_000.0)]),
        of("h200-nvlink", &[]),
        of("h200-nvlink", &[("nvlink.egress_gbs", 40.0)]),
        of("h200-efa", &[("noise.clock_sigma", 0.2), ("noise.flag_sigma", 0.5), ("gpu.droop_knee_tflops", 20.0)]),
    ]
}

fn configs() -> [Config; 7] {
    let of = |protocol| Config { protocol, ..full() };
    [
        Config::default(),
        full(),
        of(LOOPED),
        Config { noise_seed: Some(3), ..full() },
        of(ISOLATED),
        Config { execution: Execution::Folded, ..of(ISOLATED) },
        Config { noise_seed: Some(3), ..of(ISOLATED) },
    ]
}

#[test]
fn no_split_beats_its_lower_bound() {
    let mut random = Random(7);
    for machine in machines() {
        for (nodes, gpus) in [(1, 2), (2, 2), (2, 1)] {
            for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1)) {
                for config in configs() {
                    let simulation = Simulation::new(&case.schedule, &machine, &config).expect("compiles");
                    let bound = LowerBound::new(&simulation);
                    for _ in 0..4 {
                        let split = random_split(&case.schedule, &mut random);
                        let time = simulation.time_ps(&split).expect("runs");
                        let least = bound.at_most(counts(&split));
                        assert!(time >= least, "{} {split} {config:?}: {time} ps beats {least} ps", case.name);
                    }
                }
            }
        }
    }
}

/// The bound of a split, and how much longer the simulation takes.
fn excess(schedule: &Schedule, machine: &Machine, split: RoleSplit) -> f64 {
    let simulation = Simulation::new(schedule, machine, &full()).expect("compiles");
    let end = simulation.run(&split, Form::Whole, false).expect("runs").end;
    end as f64 / LowerBound::new(&simulation).at_most(counts(&split)) as f64 - 1.0
}

#[test]
fn bounds_are_tight_where_one_thing_decides() {
    // Tiles of 10.2 us and 10^7 FLOP. At 100 CTAs they ask for 98 TFLOPS of power, and get (40 + 60) / (98 + 60).
    let droop = [("gpu.droop_knee_tflops", 40.0), ("gpu.droop_static_tflops", 60.0)];
    let machine = with(round_machine(Fabric::IbRc), &droop);
    let tiles =
        |count| Toy::node(1, vec![compute()]).tasks(move |_, _, _| vec![tile(10, At::ME, Drain::Overlap); count]);
    for (ctas, count) in [(100, 10_000), (7, 700), (132, 13_200), (100, 10_001)] {
        let excess = excess(&tiles(count), &machine, split(ctas, 0, 0, 0));
        assert!((0.0..0.01).contains(&excess), "{count} tiles on {ctas} CTAs: {excess}");
    }
    // A thread that needs 0.8 us to post each of 1,000 small puts and 0.4 us for each completion.
    let puts = Toy::on(cluster(2, 1), vec![role(RoleKind::InterSend, Claim::Strided)]).symmetric();
    let puts = Toy { slots: 1000, ..puts }
        .tasks(|_, _, _| (0..1000).map(|i| put(8, 1, 0, publish(Fabric::IbRc), i, None)).collect());
    let proxy = with(round_machine(Fabric::IbRc), &[("proxy.in_flight", 20.0), ("proxy.push_ns", 100.0)]);
    let excess = excess(&puts, &proxy, split(0, 0, 1, 0));
    assert!((0.0..0.05).contains(&excess), "{excess}");
}

/// Layers of copies, each behind a copy of the layer before on some rank.
#[test]
fn chains_bound_random_layers_and_are_exact_where_nothing_is_scarce() {
    let wide: Vec<(&str, f64)> =
        ["nvlink.egress_gbs", "nvlink.ingress_gbs", "gpu.hbm_gbs"].map(|name| (name, 1e5)).to_vec();
    // As long as a few copies.
    let plenty = with(with(narrow(), &wide), &[("launch.isolated_us", 20.0)]);
    let mut closer = 0;
    for seed in 0..200 {
        let schedule = draw(seed, None);
        let narrow = Simulation::new(&schedule, &narrow(), &full()).expect("compiles");
        let bound = LowerBound::new(&narrow);
        let ends: Vec<u64> = (1..=12).map(|ctas| narrow.time_ps(&split(ctas, 0, 0, 0)).expect("runs")).collect();
        for (ctas, end) in (1..).zip(&ends) {
            let least = bound.at_most([ctas, 0, 0, 0]);
            assert!(least <= *end, "seed {seed}, {ctas} CTAs: {end} ps beats {least} ps");
            closer += u32::from(least as f64 > 0.8 * *end as f64);
        }
        let best = ends.iter().min().expect("twelve");
        assert!(bound.at_most([132, 0, 0, 0]) <= *best, "seed {seed}: {best} ps is the best found");
        for config in [full(), Config { protocol: ISOLATED, ..full() }] {
            let plenty = Simulation::new(&schedule, &plenty, &config).expect("compiles");
            let time = plenty.time_ps(&split(132, 0, 0, 0)).expect("runs");
            assert_eq!(LowerBound::new(&plenty).at_most([132, 0, 0, 0]), time, "seed {seed} {config:?}");
        }
    }
    assert!(closer > 2_200, "{closer} of 2400 bounds within 20 %");
}

/// Also of a loop of which some launches were cold.
#[test]
fn the_search_over_a_mixed_loop_beats_every_split_and_its_bound_none() {
    let timed = Loop { warm_up: 0, launches: 8, median: false };
    let protocol = Protocol::Published { stale_arrivals: true, isolated: false, waits_for_host: true, timed };
    let mut mixed = 0;
    for cold_ms in [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0] {
        let droop = [("gpu.sms", 12.0), ("gpu.cold_ms", cold_ms), ("gpu.droop_knee_tflops", 2.0)];
        let machine = with(shipped_machine("h200-efa"), &droop);
        for case in kernels(OptionSet::Tilewire, cluster(1, 2), machine.fabric, 1) {
            let of = |clock| {
                let config = Config { protocol, clock, ..full() };
                Simulation::new(&case.schedule, &machine, &config).expect("compiles")
            };
            let (cold, later) = (of(Clock::Cold), of(Clock::Sustained));
            let shown = Shown { cold: Some(&cold), later: &later };
            let tuned = tune(shown, &[], &TuneConfig::EXHAUSTIVE, &|_| ()).expect("a split");
            assert_eq!(shown.time_ps(&tuned.split), Ok(tuned.time_ps), "{}", case.name);
            let mut random = Random(3);
            for _ in 0..20 {
                let split = random_split(&case.schedule, &mut random);
                if let Ok(time) = shown.time_ps(&split) {
                    let (least, most) = (cold.time_ps(&split).expect("runs"), later.time_ps(&split).expect("runs"));
                    assert!(time >= tuned.lower_bound_ps && time >= tuned.time_ps, "{} {split}: {time} ps", case.name);
                    assert!((least..=most).contains(&time), "{} {split}: {least}, {time}, {most} ps", case.name);
                    mixed += u32::from(least < time && time < most);
                }
            }
        }
    }
    assert!(mixed > 50, "only {mixed}");
}

/// Simulations of the largest cases are few; the bound costs next to nothing.
#[test]
fn a_search_of_few_simulations_begins_where_no_step_has_a_lower_bound() {
    let machine = shipped_machine("h200-efa");
    for case in kernels(OptionSet::Tilewire, cluster(2, 4), machine.fabric, 4) {
        let simulation = Simulation::new(&case.schedule, &machine, &Config::default()).expect("compiles");
        let config = TuneConfig { budget: Some(1), gap: 0.0 };
        let tuned = tune(Shown { cold: None, later: &simulation }, &[], &config, &|_| ()).expect("a split");
        assert_eq!(tuned.tried.len(), 1);
        let (bound, first) = (LowerBound::new(&simulation), counts(&tuned.split));
        for (to, from) in (0..4).flat_map(|to| (0..5).map(move |from| (to, from))).filter(|(to, from)| to != from) {
            let mut step = first;
            step[to] += 1;
            if from < 4 {
                let Some(left) = step[from].checked_sub(1) else { continue };
                step[from] = left;
            }
            let legal = step.iter().sum::<u32>() <= 132 && (0..4).all(|k| (step[k] > 0) == (first[k] > 0));
            assert!(!legal || bound.at_most(step) >= bound.at_most(first), "{}: {first:?} to {step:?}", case.name);
        }
    }
}

#[test]
fn the_search_finds_what_trying_all_splits_finds() {
    let machine = with(shipped_machine("h200-efa"), &[("gpu.sms", 24.0)]);
    for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 1), machine.fabric, 1)) {
        let roles = case.split(1);
        if counts(&roles).iter().sum::<u32>() > 3 {
            continue;
        }
        let simulation = Simulation::new(&case.schedule, &machine, &full()).expect("compiles");
        let tuned =
            tune(Shown { cold: None, later: &simulation }, &[], &TuneConfig::EXHAUSTIVE, &|_| ()).expect("a split");
        // No CTAs too: a role may live on those that come from others.
        let range = |role: RoleKind| if roles.get(role) > 0 { 0..=24_u32 } else { 0..=0 };
        let mut best = u64::MAX;
        for compute in range(RoleKind::Compute) {
            for intra_comm in range(RoleKind::IntraComm) {
                for inter_send in range(RoleKind::InterSend) {
                    for inter_reduce in range(RoleKind::InterReduce) {
                        let split = RoleSplit { compute, intra_comm, inter_send, inter_reduce };
                        best = best.min(simulation.time_ps(&split).unwrap_or(u64::MAX));
                    }
                }
            }
        }
        assert_eq!((tuned.time_ps, tuned.lower_bound_ps), (best, best), "{}", case.name);
    }
}

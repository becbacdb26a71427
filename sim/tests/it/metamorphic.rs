//! What must happen to the time when the question changes.

use crate::support::*;
use std::collections::BTreeMap;
use tilewire_kernels::schedule::{At, Claim};
use tilewire_kernels::{Fabric, OptionSet, Problem, RoleKind, RoleSplit, Schedule, Spec, kernel};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::{Machine, engine};

/// A layered schedule drawn by seed: strided lists of copies to neighbours, each behind flags of the layer before.
pub fn draw(seed: u64, larger: Option<usize>) -> Schedule {
    let mut random = Random(seed);
    let (layers, width) = (random.within(2, 5) as u32, random.within(2, 12) as u32);
    let mut tasks = Vec::new();
    for layer in 0..layers {
        for i in 0..width {
            let size = 1_000 * random.within(1, 400) * if larger == Some(tasks.len()) { 3 } else { 1 };
            let to = At::local(random.within(0, 3) as u16);
            let mut task = copy(At::ME, to, size).signal(signal(to, layer * width + i));
            if layer > 0 {
                // Every flag has one raiser: the same task of the rank that it points away from.
                task = task.wait(wait((layer - 1) * width + random.within(0, u64::from(width) - 1) as u32));
            }
            tasks.push(task);
        }
    }
    Toy::node(4, vec![role(RoleKind::Compute, Claim::Strided)]).symmetric().tasks(move |_, _, _| tasks.clone())
}

fn end(schedule: &Schedule, machine: &Machine, shared: bool, late: Option<u64>) -> u64 {
    let noise_seed = late.map(|_| 1);
    let config = tilewire_sim::Config { noise_seed, ..full() };
    let mut compiled = Compiled::new(schedule, machine, &config).expect("compiles");
    if !shared {
        compiled.capacities.fill((1 << 60, 0));
    }
    engine::run(&compiled, &split(3, 0, 0, 0), Form::Whole, false).expect("runs").end
}

/// The round machine with links and memory that a few CTAs fill, and noise that only delays one rank.
pub fn narrow() -> Machine {
    with(
        round_machine(Fabric::IbRc),
        &[
            ("nvlink.egress_gbs", 80.0),
            ("nvlink.ingress_gbs", 90.0),
            ("gpu.hbm_gbs", 300.0),
            ("noise.network_sigma", 0.0),
            ("noise.flag_sigma", 0.0),
            ("noise.clock_sigma", 0.0),
            ("noise.late_rank_us", 5.0),
        ],
    )
}

#[test]
fn worse_is_never_faster_without_sharing_and_every_speed_up_with_sharing_has_a_witness() {
    let machine = narrow();
    let slower = with(narrow(), &[("sm.copy_cta_gbs", 37.0)]);
    let mut witnesses = Vec::new();
    for seed in 0..300 {
        let (before, more) = (draw(seed, None), draw(seed, Some(seed as usize % 10)));
        let changes: [(&str, &Schedule, &Machine, Option<u64>); 3] = [
            ("three times the bytes of a task", &more, &machine, None),
            ("less bandwidth per CTA", &before, &slower, None),
            ("a rank 5 us late", &before, &machine, Some(5)),
        ];
        for (what, schedule, machine, late) in changes {
            let alone = [end(&before, &narrow(), false, None), end(schedule, machine, false, late)];
            assert!(alone[1] >= alone[0], "seed {seed}, {what}, nothing shared: {alone:?}");
            let shared = [end(&before, &narrow(), true, None), end(schedule, machine, true, late)];
            if shared[1] < shared[0] {
                // A flow that comes later leaves others the link: possible, as long as sharing is the reason.
                witnesses.push(format!("seed {seed}, {what}: {shared:?} ps shared, {alone:?} ps alone"));
            }
        }
    }
    println!("{} speed-ups by sharing of 900 changes for the worse", witnesses.len());
    for witness in &witnesses {
        println!("  {witness}");
    }
    assert!(witnesses.len() < 90, "sharing inverts more than a tenth of all changes");
}

/// A run of one rank that stands for all, with the tasks of every worker in the order in which it took them.
///
/// Not `shared`: without the links, the memory and the power that CTAs share, and without what computing CTAs cost others.
fn taken(case: &Case, machine: &Machine, split: RoleSplit, shared: bool) -> (u64, BTreeMap<[u32; 3], Vec<u32>>) {
    let lonely = [("interpreter.crowd_ns", 0.0), ("interpreter.move_crowd_per_cta", 0.0)];
    let machine = if shared { machine.clone() } else { with(machine.clone(), &lonely) };
    let mut compiled = Compiled::new(&case.schedule, &machine, &mirror()).expect("compiles");
    if !shared {
        compiled.capacities.fill((1 << 60, 0));
        compiled.power = None;
    }
    let run = engine::run(&compiled, &split, Form::Whole, true).expect("runs");
    let mut taken: BTreeMap<_, Vec<(u64, u32)>> = BTreeMap::new();
    for task in &run.timeline {
        taken.entry([task.role, task.cta, task.lane]).or_default().push((task.taken, task.task));
    }
    let in_order = |mut tasks: Vec<(u64, u32)>| {
        tasks.sort_unstable();
        tasks.into_iter().map(|(_, task)| task).collect()
    };
    (run.end, taken.into_iter().map(|(worker, tasks)| (worker, in_order(tasks))).collect())
}

/// The judged attention that doubled flag costs speed up most: copies come later, when fewer CTAs compute beside them.
fn attention(machine: &Machine) -> Case {
    let problem = Problem::Attention { seq: 12_288, batch: 4, heads: 8, head_dim: 128 };
    let kernel = kernel("ring_attention").expect("in the registry");
    let options = kernel.options(OptionSet::Tilewire, &problem, cluster(1, 8));
    let spec = Spec { problem, cluster: cluster(1, 8), fabric: machine.fabric, options };
    let schedule = kernel.build(&spec).expect("a legal shape");
    Case { name: format!("ring_attention {problem}"), set: OptionSet::Tilewire, spec, schedule }
}

/// Each is reported with its witness: without what CTAs share it is gone, or else some CTA takes other tasks, as list
/// scheduling has it.
#[test]
fn every_speed_up_by_a_dearer_step_of_the_device_code_has_a_witness() {
    let machine = shipped_machine("h200-1gpu");
    let costs: Vec<(String, f64)> = machine
        .params()
        .into_iter()
        .filter(|(name, _)| name.ends_with("_ns") && (name.starts_with("interpreter.") || name.starts_with("flags.")))
        .map(|(name, param)| (name, param.value))
        .collect();
    let (mut changes, mut witnesses) = (0, Vec::new());
    let cases = kernels(OptionSet::Tilewire, cluster(1, 8), machine.fabric, 4).into_iter();
    for case in cases.chain([attention(&machine)]) {
        for others in [2, 6, 16, 40] {
            let split = RoleSplit { compute: 132 - others, ..case.split(others) };
            let before = [true, false].map(|shared| taken(&case, &machine, split, shared));
            for (name, ns) in &costs {
                let dearer = with(machine.clone(), &[(name, 2.0 * ns)]);
                let after = [true, false].map(|shared| taken(&case, &dearer, split, shared));
                let [shared, alone] = [0, 1].map(|i| [before[i].0, after[i].0]);
                let what = format!("{}, {split}, twice {name}: {shared:?} ps shared, {alone:?} ps alone", case.name);
                let order = before[1].1.iter().find(|&(worker, tasks)| after[1].1.get(worker) != Some(tasks));
                assert!(alone[1] >= alone[0] || order.is_some(), "{what}: nothing shared and the same order");
                changes += 1;
                if shared[1] < shared[0] {
                    let by = if alone[1] >= alone[0] { "by what is shared" } else { "by another order" };
                    witnesses.push((1.0 - shared[1] as f64 / shared[0] as f64, format!("{what}, {by}")));
                }
            }
        }
    }
    witnesses.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("{} speed-ups of {changes} dearer steps", witnesses.len());
    for (gain, witness) in &witnesses {
        println!("  {:.2} %: {witness}", gain * 100.0);
    }
    assert!(witnesses.len() * 10 < changes, "more than a tenth of all dearer steps are faster");
    assert!(witnesses.iter().all(|(gain, _)| *gain < 0.1), "by more than a tenth");
}

#[test]
fn halving_every_bandwidth_never_speeds_up_a_kernel() {
    for name in ["h200-efa", "h200-cx7"] {
        let machine = shipped_machine(name);
        let mut half = machine.clone();
        let rates: Vec<(String, f64)> = machine
            .params()
            .into_iter()
            .filter(|(name, _)| name.ends_with("_gbs"))
            .map(|(name, param)| (name, param.value / 2.0))
            .collect();
        for (name, value) in rates {
            assert!(half.set(&name, value));
        }
        for case in kernels(OptionSet::Published, cluster(2, 8), machine.fabric, 1) {
            let end = |machine: &Machine| simulate_whole(&case, machine);
            assert!(end(&half) >= end(&machine), "{}: {} < {}", case.name, end(&half), end(&machine));
        }
    }
}

/// What comes sooner can be in the way of others, as list scheduling and fair sharing have it: each such case is printed.
#[test]
fn a_resource_twice_as_fast_costs_little_where_it_costs_at_all() {
    let links: [&[&str]; 4] =
        [&["nic.rail_gbs"], &["nic.pcie_gbs"], &["nvlink.egress_gbs", "nvlink.ingress_gbs"], &["gpu.hbm_gbs"]];
    let (mut changes, mut slower) = (0, Vec::new());
    for name in ["h200-efa", "h200-cx7"] {
        let machine = shipped_machine(name);
        let value = |name: &str| {
            let params = machine.params();
            params.iter().find(|(known, _)| known == name).expect("a parameter").1.value
        };
        for (nodes, gpus) in [(2, 8), (4, 4), (3, 2)] {
            let cases = SETS.map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 4));
            for case in cases.into_iter().flatten() {
                let end = |machine: &Machine| {
                    let compiled =
                        Compiled::new(&case.schedule, machine, &tilewire_sim::Config::default()).expect("compiles");
                    engine::run(&compiled, &case.usual_split(), Form::Whole, false).expect("runs").end
                };
                let before = end(&machine);
                for link in links {
                    let doubled: Vec<(&str, f64)> = link.iter().map(|&name| (name, 2.0 * value(name))).collect();
                    let cost = end(&with(machine.clone(), &doubled)) as f64 / before as f64 - 1.0;
                    changes += 1;
                    if cost > 0.0 {
                        slower.push((cost, format!("{}, twice {}", case.name, link[0])));
                    }
                }
            }
        }
    }
    slower.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("{} of {changes} are slower", slower.len());
    for (cost, what) in &slower {
        println!("  {:.2} %: {what}", cost * 100.0);
    }
    assert!(changes > 200 && slower.len() * 10 < changes, "{} of {changes} are slower", slower.len());
    assert!(slower.iter().all(|(cost, _)| *cost < 0.03), "{}", slower[0].1);
}

fn simulate_whole(case: &Case, machine: &Machine) -> u64 {
    let compiled = Compiled::new(&case.schedule, machine, &full()).expect("compiles");
    engine::run(&compiled, &case.usual_split(), Form::Whole, false).expect("runs").end
}

/// C37, source: <https://github.com/aliyun/SimAI/issues/136>, <https://github.com/astra-sim/astra-sim/issues/207>.
#[test]
fn c37_doubling_a_communication_bound_payload_doubles_the_time() {
    for name in ["h200-efa", "h200-cx7"] {
        // Compute as good as free, so that communication decides.
        let fast = [("gemm.pipelined.sm_tflops", 1e4), ("gpu.droop_knee_tflops", 1e8), ("gpu.hbm_gbs", 1e5)];
        let machine = with(shipped_machine(name), &fast);
        let slower_nic = machine.nic.rail_gbs.value / 2.0;
        let slower = with(machine.clone(), &[("nic.rail_gbs", slower_nic)]);
        for kernel in ["gemm_rs", "gemm_ar", "ag_gemm"] {
            let case = |scale| {
                let cases = kernels(OptionSet::Tilewire, cluster(2, 4), machine.fabric, scale);
                cases.into_iter().find(|case| case.schedule.kernel == kernel).expect("the kernel is there")
            };
            let (one, two) = (simulate_whole(&case(16), &machine), simulate_whole(&case(32), &machine));
            let ratio = two as f64 / one as f64;
            assert!((1.8..=2.05).contains(&ratio), "{kernel} on {name}: {ratio}");
            assert!(simulate_whole(&case(16), &slower) > one, "{kernel} on {name}: the NIC is not connected");
        }
    }
}

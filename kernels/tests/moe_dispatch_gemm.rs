//! Structure of `moe_dispatch_gemm`: counts, bytes, symmetry, order, errors.

use std::collections::BTreeSet;
use tilewire_kernels::check::check;
use tilewire_kernels::schedule::{Gate, GatherEntry, Op, Symmetry, Task};
use tilewire_kernels::{Cluster, Fabric, Kernel, Offset, OptionSet, Problem, Rank, Schedule, Spec, kernel};

const COMPUTE: usize = 0;
const INTRA: usize = 1;
const SEND: usize = 2;
const REDUCE: usize = 3;

fn moe() -> &'static dyn Kernel {
    kernel("moe_dispatch_gemm").expect("registered")
}

/// The published layer.
const fn published(tokens: u64) -> Problem {
    Problem::Moe { tokens, hidden: 7168, inter: 2048, topk: 8, experts: 256 }
}

fn spec(set: OptionSet, problem: Problem, nodes: u16, gpus: u16, options: &[(&str, &str)]) -> Spec {
    let cluster = Cluster { nodes, gpus_per_node: gpus };
    let mut all = moe().options(set, &problem, cluster);
    for (name, value) in options {
        all.set(name, value).expect("a legal value");
    }
    Spec { problem, cluster, fabric: Fabric::EfaSrd, options: all }
}

fn build(set: OptionSet, problem: Problem, nodes: u16, gpus: u16, options: &[(&str, &str)]) -> Schedule {
    moe().build(&spec(set, problem, nodes, gpus, options)).expect("a legal shape")
}

const ME: Rank = Rank { node: 0, gpu: 0 };

#[test]
fn counts_and_bytes_are_those_of_the_published_kernel() {
    for (tokens, puts) in [(8192, 14), (16_384, 28), (32_768, 56), (65_536, 112), (131_072, 224)] {
        for set in [OptionSet::Published, OptionSet::Tilewire] {
            for nodes in [1, 2, 4] {
                let problem = published(tokens);
                let schedule = build(set, problem, nodes, 8, &[("routing", "uniform")]);
                let local = tokens / (u64::from(nodes) * 8);
                let (mut sent, mut bytes) = (0, 0);
                if nodes > 1 {
                    schedule.for_each_task(ME, 0, SEND, |task| {
                        let Op::Put { src, .. } = task.op else { panic!("{}", task.op.name()) };
                        sent += 1;
                        bytes += src.bytes();
                    });
                    assert_eq!(schedule.tasks(ME, 0, REDUCE).len() as u64, sent);
                } else {
                    assert_eq!(schedule.launches[0].roles.len(), 2);
                }
                assert_eq!(bytes, u64::from(nodes - 1) * local * 14_336);
                if nodes == 2 {
                    assert_eq!(sent, puts);
                }
                // Round robin fills every expert evenly: no padding.
                assert_eq!(schedule.tasks(ME, 0, COMPUTE).len() as u64, local * 8 / 128 * 8);
                assert_eq!(schedule.tasks(ME, 0, INTRA).len() as u64, local * 8 / 16);
                assert_eq!(schedule.useful_flops, 2 * local * 8 * 7168 * 2048);
            }
        }
    }
}

#[test]
fn rotated_routing_gives_every_rank_the_same_work() {
    for (nodes, gpus) in [(1, 4), (2, 2), (3, 2), (2, 8)] {
        let problem = published(8192 / 16 * u64::from(nodes * gpus));
        let problem = match problem {
            Problem::Moe { tokens, hidden, inter, topk, .. } => {
                Problem::Moe { tokens, hidden, inter, topk, experts: 16 * u64::from(nodes * gpus) }
            }
            other => other,
        };
        for set in [OptionSet::Published, OptionSet::Tilewire] {
            let schedule = build(set, problem, nodes, gpus, &[("routing", "rotated")]);
            assert_eq!(schedule.symmetry, Symmetry::FULL);
            for rank in schedule.cluster.iter() {
                assert_eq!(schedule.source.table(rank), schedule.source.table(ME));
                for (launch, role) in schedule.role_indices() {
                    assert_eq!(schedule.tasks(rank, launch, role), schedule.tasks(ME, launch, role));
                }
            }
            // Each of the W * t * topk choices once, spread evenly over the ranks by the rotation.
            assert_eq!(schedule.source.table(ME).iter().flatten().count(), 512 * 8);
        }
    }
}

/// Every token goes to exactly topk experts, whatever the routing.
#[test]
fn every_choice_is_gathered_once() {
    let problem = Problem::Moe { tokens: 6 * 96, hidden: 64, inter: 64, topk: 5, experts: 24 };
    let small = [("tile_m", "16"), ("tile_n", "32"), ("tile_k", "16"), ("slice_tokens", "4"), ("put_bytes", "496")];
    for routing in ["rotated", "uniform", "multinomial"] {
        for seed in ["0", "1", "18446744073709551615"] {
            let mut options = small.to_vec();
            options.extend([("routing", routing), ("routing_seed", seed)]);
            let schedule = build(OptionSet::Tilewire, problem, 3, 2, &options);
            let mut choices = vec![0; 6 * 96];
            for rank in schedule.cluster.iter() {
                for GatherEntry { dg, row } in schedule.source.table(rank).into_iter().flatten() {
                    let home = schedule.cluster.at(rank, Offset { dn: (row / 96) as u16, dg });
                    choices[schedule.cluster.number(home) * 96 + (row % 96) as usize] += 1;
                }
            }
            assert!(choices.iter().all(|&count| count == 5), "{routing} {seed}");
        }
    }
}

#[test]
fn multinomial_routing_is_uneven_and_claims_no_symmetry() {
    let schedule = build(OptionSet::Published, published(16_384), 2, 8, &[]);
    assert_eq!(schedule.symmetry, Symmetry::NONE);
    let rows: Vec<usize> =
        schedule.cluster.iter().map(|rank| schedule.source.table(rank).iter().flatten().count()).collect();
    assert_eq!(rows.iter().sum::<usize>(), 16_384 * 8);
    let (least, most) = (rows.iter().min().expect("ranks"), rows.iter().max().expect("ranks"));
    assert!(*most as f64 > 1.1 * *least as f64, "{rows:?}");
    // The same flops for all: padding and imbalance are costs, not work.
    assert_eq!(schedule.useful_flops, 2 * 16_384 * 8 * 7168 * 2048 / 16);
}

#[test]
fn the_own_node_comes_first_and_its_gathers_wait_for_nothing() {
    for set in [OptionSet::Published, OptionSet::Tilewire] {
        let schedule = build(set, published(32_768), 2, 8, &[("routing", "rotated")]);
        let table = schedule.source.table(ME);
        let local = 32_768 / 16;
        let mut remote_blocks = BTreeSet::new();
        let mut remote_seen = false;
        schedule.for_each_task(ME, 0, INTRA, |task| {
            let Op::GatherRows { table: slice, .. } = &task.op else { panic!("{}", task.op.name()) };
            let rows = &table[slice.start as usize..(slice.start + slice.len) as usize];
            let remote = rows.iter().flatten().any(|entry| entry.row >= local);
            assert_eq!(remote, !task.waits.is_empty());
            if remote {
                remote_blocks.insert(slice.start / 128);
                remote_seen = true;
            }
        });
        assert!(remote_seen);
        let blocks: Vec<u32> = schedule.tasks(ME, 0, COMPUTE).iter().map(|task| task.waits[0].flag.slot).collect();
        let first_remote = blocks.iter().position(|block| remote_blocks.contains(block)).expect("remote blocks");
        assert!(blocks[first_remote..].iter().all(|block| remote_blocks.contains(block)));
        assert!(first_remote > 0);
    }
}

/// Later passes never need less of the arriving tokens: levels of the prefix wait grow from pass to pass.
#[test]
fn tilewire_consumes_in_the_order_of_arrival() {
    let schedule = build(OptionSet::Tilewire, published(65_536), 2, 8, &[("remote_passes", "8")]);
    let level = |task: &Task| {
        assert!(task.waits.len() <= 1);
        task.waits.first().map_or(0, |wait| {
            assert_eq!((wait.count, wait.gate), (8, Gate::Start));
            wait.at_least
        })
    };
    let levels: Vec<u32> = schedule.tasks(ME, 0, INTRA).iter().map(level).collect();
    let passes: Vec<u32> = levels.chunks(8).map(|block| *block.iter().max().expect("slices") * 8 / 112).collect();
    let latest = passes.iter().rev().scan(u32::MAX, |min, &pass| {
        *min = pass.min(*min);
        Some(*min)
    });
    let latest: Vec<u32> = latest.collect();
    // Inside a pass blocks may need its first chunk or its last; passes follow each other.
    assert!(passes.iter().zip(latest.iter().rev()).all(|(pass, least_later)| *pass <= least_later + 1));
    assert_eq!(*levels.iter().max().expect("slices"), 112);
}

#[test]
fn the_checker_finds_nothing() {
    let small = [("tile_m", "16"), ("tile_n", "32"), ("tile_k", "16"), ("slice_tokens", "4"), ("put_bytes", "208")];
    for (nodes, gpus) in [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (4, 4)] {
        let ranks = u64::from(nodes * gpus);
        let problem = Problem::Moe { tokens: 48 * ranks, hidden: 64, inter: 64, topk: 2, experts: 2 * ranks };
        for set in [OptionSet::Published, OptionSet::Tilewire] {
            for routing in ["rotated", "uniform", "multinomial"] {
                let mut options = small.to_vec();
                options.extend([("routing", routing), ("efa_publish", "immediate")]);
                let schedule = build(set, problem, nodes, gpus, &options);
                let findings = check(&schedule, None);
                assert!(findings.is_empty(), "{nodes}x{gpus} {} {routing}: {}", set.name(), findings[0]);
            }
        }
    }
}

#[test]
fn errors_name_the_division_that_fails_and_the_nearest_legal_value() {
    let refuse = |problem, options: &[(&str, &str)]| {
        let spec = spec(OptionSet::Tilewire, problem, 2, 8, options);
        moe().build(&spec).expect_err("an illegal shape").to_string()
    };
    let Problem::Moe { hidden, inter, topk, .. } = published(1) else { unreachable!() };
    let cases = [
        (published(8200), "tokens = 8200 must be a positive multiple of 16", "nearest legal: 8192 or 8208"),
        (published(0), "tokens = 0", "nearest legal: 16"),
        (
            Problem::Moe { tokens: 8192, hidden, inter, topk, experts: 250 },
            "experts = 250 must be a positive multiple of 16",
            "nearest legal: 240 or 256",
        ),
        (
            Problem::Moe { tokens: 8192, hidden: 7100, inter, topk, experts: 256 },
            "hidden = 7100 must be a positive multiple of 64 (main loop steps of tile_k = 64",
            "nearest legal: 7040 or 7104",
        ),
        (
            Problem::Moe { tokens: 8192, hidden, inter: 2000, topk, experts: 256 },
            "inter = 2000 must be a positive multiple of 256",
            "nearest legal: 1792 or 2048",
        ),
        (
            Problem::Moe { tokens: 8192, hidden, inter, topk: 257, experts: 256 },
            "topk = 257",
            "from 1 to the number of experts, 256",
        ),
        (
            Problem::Moe { tokens: u64::MAX / 16 * 16, hidden, inter, topk, experts: 256 },
            "tokens times topk",
            "at most 4294967295",
        ),
        (
            Problem::Moe { tokens: 8192, hidden: u64::MAX / 64 * 64, inter, topk, experts: 256 },
            "hidden",
            "at most 1048576",
        ),
    ];
    for (problem, what, allowed) in cases {
        let error = refuse(problem, &[]);
        assert!(error.contains(what) && error.contains(allowed), "{error}");
    }
    let error = refuse(published(8192), &[("slice_tokens", "24")]);
    assert!(error.contains("tile_m = 128 must be a positive multiple of 24"), "{error}");
    let error = refuse(published(8192), &[("claim", "strided")]);
    assert!(error.contains("recycle = true needs claim = ticket"), "{error}");
}

//! ag_gemm.

use crate::case::{Case, SMALL_TILES, variants};
use crate::tally::{Traffic, check_findings, check_symmetry, error, task_counts, traffic};
use tilewire_kernels::OptionSet::{Published, Tilewire};
use tilewire_kernels::schedule::Op;
use tilewire_kernels::{Fabric, OptionSet, Rank};

const KERNEL: &str = "ag_gemm";

/// A row of the published table: m x m/16 x m on 2x8.
fn two_by_eight(set: OptionSet, size: u64) -> Case {
    Case::new(KERNEL, set, (2, 8), [size, size / 16, size])
}

#[test]
fn published_counts_match_the_table_of_the_kernel() {
    // size, GEMM tiles, 64 KiB copies per phase, RDMA writes per GPU and hop.
    for (size, tiles, copies, writes) in [
        (4096, 32, 32, 2),
        (8192, 128, 128, 4),
        (16_384, 512, 512, 8),
        (24_576, 1152, 1152, 12),
        (32_768, 2048, 2048, 16),
    ] {
        let schedule = two_by_eight(Published, size).build();
        assert_eq!(task_counts(&schedule), [tiles, 2 * copies, writes, 0], "size {size}");
        let shard = size * size / 8;
        let expected = Traffic { wire: shard, puts: writes as u64, multicast: 2 * shard, ..Traffic::default() };
        assert_eq!(traffic(&schedule, Rank { node: 1, gpu: 3 }), expected);
        assert_eq!(shard / writes as u64, 256 * size, "bytes of a write");
    }
}

#[test]
fn bytes_equal_their_closed_forms() {
    for (nodes, gpus) in [(1, 8), (2, 8), (3, 8), (4, 8), (2, 4), (4, 1)] {
        let ranks = u64::from(nodes) * u64::from(gpus);
        let size = 3072 * ranks;
        let shape = [size, size / ranks / 12 * 12, 1024];
        let shard = size / ranks * 1024 * 2;
        let (n, g) = (u64::from(nodes), u64::from(gpus));
        for options in [&[][..], &[("exchange", "ring")], &[("exchange", "ring"), ("copy_targets", "all")]] {
            let schedule = Case::new(KERNEL, Tilewire, (nodes, gpus), shape).with(options).build();
            let sum = traffic(&schedule, Rank { node: 0, gpu: 0 });
            // Own shard to the others, or own and forwarded shards to the next: the same bytes.
            assert_eq!(sum.wire, (n - 1) * shard, "{nodes}x{gpus} {options:?}");
            assert_eq!(sum.unicast, n * (g - 1) * shard, "{nodes}x{gpus} {options:?}");
            assert_eq!((sum.multicast, sum.in_switch, sum.remote_reads), (0, 0, 0));
        }
        let sum = traffic(&Case::new(KERNEL, Published, (nodes, gpus), shape).build(), Rank { node: 0, gpu: 0 });
        assert_eq!(sum.wire, (n - 1) * shard);
        assert_eq!(sum.multicast, if gpus > 1 { n * shard } else { 0 });
    }
}

#[test]
fn tilewire_counts_at_the_largest_published_shape() {
    let schedule = two_by_eight(Tilewire, 32_768).build();
    // 64 KiB copies of own and landed rows to 7 neighbours; 2 puts per row block of 128.
    let copies = 16 * (32_768 / 256) * 7 * 2;
    assert_eq!(task_counts(&schedule), [2048, copies, 32, 0]);
    assert_eq!(schedule.launches.len(), 1);
}

#[test]
fn launches_follow_the_options() {
    let names =
        |case: Case| case.build().launches.iter().map(|l| (l.name.clone(), l.after.clone())).collect::<Vec<_>>();
    let published = names(two_by_eight(Published, 4096));
    assert_eq!(published, [("prologue".into(), vec![]), ("main".into(), vec![0])]);
    let side = names(two_by_eight(Published, 4096).with(&[("first_hop", "side_prologue")]));
    assert_eq!(side, [("prologue".into(), vec![]), ("main".into(), vec![])]);
    let one_node = names(Case::new(KERNEL, Published, (1, 8), [4096, 512, 4096]));
    assert_eq!(one_node, [("main".into(), vec![])]);
}

#[test]
fn every_variant_is_sound() {
    for case in variants("ag_gemm", Fabric::EfaSrd) {
        let schedule = case.build();
        check_symmetry(&schedule);
        // Words of their own in the published set.
        check_findings(&schedule, case.set == Published);
    }
}

/// Between two GPUs a chunk has one copy task whatever `copy_targets` says, which is all that a forward by copies asks.
#[test]
fn two_gpus_forward_what_their_copies_published() {
    let forward = [("exchange", "ring"), ("forward", "after_publish")];
    let case = |gpus: u64| {
        let shape = [64 * 3 * gpus, 32, 64];
        Case::new(KERNEL, Tilewire, (3, gpus as u16), shape).with(&SMALL_TILES).with(&forward)
    };
    check_findings(&case(2).build(), false);
    assert!(error(&case(4)).contains("copy_targets = all"));
}

#[test]
fn published_visits_the_last_arrival_first_from_three_nodes_on() {
    let case = Case::new(KERNEL, Published, (4, 1), [64 * 4, 32, 64]).with(&SMALL_TILES);
    // Nodes whose rows rank (0, 0) multiplies. The ring brings node 3 first.
    for (order, expected) in [("ascending", [0, 1, 2, 3]), ("arrival", [0, 3, 2, 1])] {
        let mut case = Case { options: case.options.clone(), ..case };
        case.options.push(("remote_order", order));
        let mut nodes = Vec::new();
        case.build().for_each_task(Rank { node: 0, gpu: 0 }, 1, 0, |task| {
            if let Op::GemmTile { outs, .. } = &task.op {
                nodes.push(outs[0].place.region.offset / (64 * 32 * 2));
            }
        });
        nodes.dedup();
        assert_eq!(nodes, expected, "{order}");
    }
}

#[test]
fn bad_shapes_say_what_is_wrong_and_what_is_near() {
    assert_eq!(
        error(&Case::new(KERNEL, Published, (2, 8), [6000, 512, 4096])),
        "ag_gemm: m = 6000 must be a positive multiple of 4096 (16 ranks hold one shard each in units of 2 row blocks of \
         tile_m = 128); nearest legal: 4096 or 8192"
    );
    assert_eq!(
        error(&Case::new(KERNEL, Tilewire, (2, 8), [8192, 100, 4096])),
        "ag_gemm: n = 100 must be a positive multiple of 256 (tiles of tile_n = 256 columns); nearest legal: 256"
    );
    assert_eq!(
        error(&Case::new(KERNEL, Published, (2, 8), [8192, 256, 200])),
        "ag_gemm: k = 200 must be a positive multiple of 128 (chunks of 2 main loop steps of tile_k = 64); nearest legal: \
         128 or 256"
    );
    let forward =
        Case::new(KERNEL, Published, (3, 2), [3072, 256, 256]).with(&[("nvls", "false"), ("copy_targets", "each")]);
    assert!(error(&forward).contains("forward = after_publish needs one copy task per chunk"));
}

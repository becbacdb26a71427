//! gemm_ar.

use crate::case::{Case, variants};
use crate::tally::{Traffic, check_findings, check_symmetry, error, task_counts, traffic};
use tilewire_kernels::OptionSet::{Published, Tilewire};
use tilewire_kernels::schedule::{Claim, Op, Publish};
use tilewire_kernels::{Fabric, OptionSet, Rank};

const KERNEL: &str = "gemm_ar";
const FIRST: Rank = Rank { node: 0, gpu: 0 };

/// A row of the published table: m x m x m/W.
fn published_row(set: OptionSet, nodes: u16, size: u64) -> Case {
    Case::new(KERNEL, set, (nodes, 8), [size, size, size / u64::from(nodes) / 8])
}

#[test]
fn published_counts_match_the_table_of_the_kernel() {
    let scan = Claim::Ready { window: 32 };
    let steal = Claim::Ready { window: 16 };
    // nodes, size, GEMM tiles, slice tiles, chunks, reduce claim, epilogue.
    for (nodes, size, tiles, slice_tiles, chunks, claim, epilogue) in [
        (2, 2048, 128, 16, 4, Claim::Strided, false),
        (2, 4096, 512, 64, 16, Claim::Strided, false),
        (2, 8192, 2048, 256, 64, Claim::Strided, true),
        (2, 16_384, 8192, 1024, 256, scan, true),
        (2, 32_768, 32_768, 4096, 1024, steal, true),
        (4, 8192, 2048, 256, 64, Claim::Strided, true),
        (4, 12_288, 4608, 576, 144, scan, true),
        (4, 20_480, 12_800, 1600, 400, scan, true),
        (4, 22_528, 15_488, 1936, 484, scan, true),
    ] {
        let schedule = published_row(Published, nodes, size).build();
        let peers = usize::from(nodes) - 1;
        // The end of the launch: tell the node, a barrier word to each peer, wait.
        assert_eq!(
            task_counts(&schedule),
            [tiles, slice_tiles, chunks * peers, chunks + 2 + peers],
            "size {size} on {nodes} nodes"
        );
        assert_eq!(schedule.launches.len(), 1 + usize::from(epilogue));
        assert_eq!(schedule.launches[0].roles[3].claim, claim);
        let slice = 2 * size * size / 8;
        let sum = traffic(&schedule, FIRST);
        let expected = Traffic {
            wire: peers as u64 * slice,
            puts: (chunks * peers + peers) as u64,
            multicast: slice,
            in_switch: slice,
            ..Traffic::default()
        };
        assert_eq!(sum, expected);
    }
}

#[test]
fn bytes_equal_their_closed_forms() {
    for (nodes, gpus) in [(1, 8), (2, 8), (3, 8), (4, 8), (2, 4), (3, 1), (4, 1)] {
        let (n, g) = (u64::from(nodes), u64::from(gpus));
        let shape = [1024 * g, 3072 * n, 128];
        let slice = 2 * shape[0] * shape[1] / g;
        for (exchange, wire) in [("direct", (n - 1) * slice), ("scatter_gather", 2 * (n - 1) * slice / n)] {
            for publish in ["reduce", "copy"] {
                let case = Case::new(KERNEL, Tilewire, (nodes, gpus), shape);
                let schedule = case.with(&[("exchange", exchange), ("publish", publish)]).build();
                let sum = traffic(&schedule, FIRST);
                assert_eq!(sum.wire, wire, "{nodes}x{gpus} {exchange}");
                // Adds into the owners' slices, then the own slice to every neighbour.
                assert_eq!(sum.unicast, 2 * (g - 1) * slice, "{nodes}x{gpus} {exchange} {publish}");
                assert_eq!((sum.multicast, sum.in_switch, sum.remote_reads), (0, 0, 0));
            }
        }
    }
}

#[test]
fn tilewire_puts_fewer_bytes_on_the_wire_than_published_from_three_nodes_on() {
    let wire = |set, nodes, size| traffic(&published_row(set, nodes, size).build(), FIRST).wire;
    assert_eq!(wire(Tilewire, 2, 8192), wire(Published, 2, 8192));
    for size in [8192, 12_288, 16_384, 20_480, 22_528] {
        assert_eq!(2 * wire(Tilewire, 4, size), wire(Published, 4, size), "size {size}");
    }
}

#[test]
fn tilewire_counts_at_the_largest_published_shape() {
    let two = published_row(Tilewire, 2, 32_768).build();
    assert_eq!(task_counts(&two), [32_768, 0, 1024, 1024]);
    let four = published_row(Tilewire, 4, 16_384).build();
    // Each node sums 64 of the 256 chunks: puts 3 x 64 to sum, 3 x 64 sums, copies 3 x 64 landed ones.
    assert_eq!(task_counts(&four), [8192, 192, 384, 64]);
}

#[test]
fn one_node_needs_no_inter_node_role_and_one_gpu_no_intra_node_role() {
    for set in [Published, Tilewire] {
        let one_node = Case::new(KERNEL, set, (1, 8), [2048, 2048, 256]).build();
        assert_eq!(task_counts(&one_node)[2..], [0, 0]);
        for nodes in [1, 2, 4] {
            let one_gpu = Case::new(KERNEL, set, (nodes, 1), [2048, 4096, 256]).build();
            assert_eq!(task_counts(&one_gpu)[1], 0);
        }
    }
}

#[test]
fn published_flags_are_unordered_on_efa_alone() {
    for (fabric, expected) in [
        (Fabric::IbRc, Publish::SameQueueWrite),
        (Fabric::EfaSrd, Publish::SeparateWrite { queue: 0 }),
        (Fabric::Loopback, Publish::Immediate),
    ] {
        let mut case = published_row(Published, 2, 2048);
        case.fabric = fabric;
        let Op::Put { publish, .. } = case.build().tasks(FIRST, 0, 2)[0].op else { panic!("a put") };
        assert_eq!(publish, expected);
    }
}

#[test]
fn every_variant_is_sound() {
    for case in variants("gemm_ar", Fabric::EfaSrd) {
        let schedule = case.build();
        check_symmetry(&schedule);
        check_findings(&schedule, case.set == Published);
    }
}

#[test]
fn bad_shapes_say_what_is_wrong_and_what_is_near() {
    assert_eq!(
        error(&Case::new(KERNEL, Published, (2, 8), [3000, 4096, 256])),
        "gemm_ar: m = 3000 must be a positive multiple of 1024 (8 GPUs own a slice each in row blocks of tile_m = 128); \
         nearest legal: 2048 or 3072"
    );
    assert_eq!(
        error(&Case::new(KERNEL, Tilewire, (4, 8), [4096, 8192, 256]).with(&[("chunk_tiles", "16")])),
        "gemm_ar: n = 8192 must be a positive multiple of 16384 (chunks of 16 tiles of tile_n = 256 columns, shared by 4 \
         nodes under exchange = scatter_gather); nearest legal: 16384"
    );
    assert_eq!(
        error(&Case::new(KERNEL, Tilewire, (2, 8), [4096, 4096, 100])),
        "gemm_ar: k = 100 must be a positive multiple of 64 (main loop steps of tile_k = 64); nearest legal: 64 or 128"
    );
}

#[test]
fn nodes_share_the_sums_by_the_widest_tile_that_they_can() {
    // nodes, n: tile_n, exchange, chunk_tiles.
    for (nodes, n, want) in [
        (2, 8192, (256, "direct", 4)),
        (2, 8320, (128, "direct", 1)),
        (4, 8192, (256, "scatter_gather", 4)),
        (32, 8192, (256, "scatter_gather", 1)),
        (64, 8192, (128, "scatter_gather", 1)),
        (33, 8192, (256, "direct", 4)),
    ] {
        let options = Case::new(KERNEL, Tilewire, (nodes, 8), [8192, n, 512]).spec().options;
        let have = (options.int("tile_n"), options.word("exchange"), options.int("chunk_tiles"));
        assert_eq!(have, want, "n = {n} on {nodes} nodes");
    }
}

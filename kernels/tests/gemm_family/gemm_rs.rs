//! gemm_rs.

use crate::case::{Case, variants};
use crate::tally::{Traffic, check_findings, check_symmetry, task_counts, traffic};
use std::collections::BTreeMap;
use tilewire_kernels::OptionSet::{Published, Tilewire};
use tilewire_kernels::schedule::{Op, WriteMode};
use tilewire_kernels::{Fabric, Rank};

const FIRST: Rank = Rank { node: 0, gpu: 0 };

#[test]
fn every_variant_of_the_tilewire_set_is_sound() {
    for case in variants("gemm_rs", Fabric::EfaSrd).into_iter().filter(|case| case.set == Tilewire) {
        let schedule = case.build();
        check_symmetry(&schedule);
        check_findings(&schedule, false);
    }
}

/// Places in compute's list of the store that opens a tile of staging and, of a peer, the first add to it.
fn store_and_add(case: &Case) -> BTreeMap<u64, (usize, usize)> {
    let mut places = BTreeMap::new();
    for (i, task) in case.build().tasks(FIRST, 0, 0).into_iter().enumerate() {
        let Op::GemmTile { outs, .. } = &task.op else { panic!("a tile") };
        // All ranks of a node have one list, so my add to a peer's tile stands where a peer's add to mine does.
        let (out, none) = (&outs[0], (usize::MAX, usize::MAX));
        let (store, add) = places.entry(out.place.region.offset).or_insert(none);
        let first = if out.mode == WriteMode::Store { store } else { add };
        *first = i.min(*first);
    }
    places
}

/// An option that a kernel does not use is an error, not silence.
#[test]
fn a_lead_that_nothing_would_use_is_refused() {
    let refused = |kernel, cluster, options: &[(&'static str, &'static str)]| {
        let case = Case::new(kernel, Tilewire, cluster, [8192, 4096, 256]);
        let defaults = case.spec().options;
        let spec = case.with(&[("open_lead_tiles", "32")]).with(options).spec();
        let kernel = tilewire_kernels::kernel(kernel).expect("in the registry");
        kernel.check_used(&spec, &defaults).err().map_or_else(String::new, |error| error.to_string())
    };
    for (kernel, options, why) in [
        ("gemm_rs", ("staging", "helper_zero"), "with staging = helper_zero, where a helper opens all chunks"),
        ("gemm_ar", ("node_sum", "pull"), "with node_sum = pull, where nobody adds"),
        (
            "gemm_ar",
            ("slice_order", "absolute"),
            "with slice_order = absolute, where all GPUs walk the slices together",
        ),
    ] {
        let problem = format!("option open_lead_tiles of {kernel} is 32, which changes nothing {why}; leave it at 64");
        assert_eq!(refused(kernel, (1, 8), &[options]), problem);
        for unasked in ["0", "64"] {
            assert_eq!(refused(kernel, (1, 8), &[options, ("open_lead_tiles", unasked)]), "", "0 or the default");
        }
        assert_eq!(refused(kernel, (1, 8), &[]), "");
        assert!(refused(kernel, (2, 1), &[]).contains("changes nothing on nodes of one GPU"));
    }
}

#[test]
fn a_lead_moves_the_owners_tiles_ahead_and_nothing_else() {
    for (kernel, cluster) in [("gemm_rs", (1, 8)), ("gemm_rs", (2, 8)), ("gemm_ar", (1, 8)), ("gemm_ar", (2, 4))] {
        let shape = [8192, 4096, 256];
        let before = Case::new(kernel, Tilewire, cluster, shape).with(&[("open_lead_tiles", "0")]);
        for (text, lead) in [("1", 1), ("64", 64), ("132", 132)] {
            let case = Case::new(kernel, Tilewire, cluster, shape).with(&[("open_lead_tiles", text)]);
            let [schedule, old] = [&case, &before].map(Case::build);
            assert_eq!(task_counts(&schedule), task_counts(&old));
            let sums: [Traffic; 2] = [&schedule, &old].map(|schedule| traffic(schedule, FIRST));
            assert_eq!(sums[0], sums[1]);
            for (offset, (store, add)) in store_and_add(&case) {
                assert!(store < add, "{kernel} {cluster:?} lead {lead}: {offset} is opened after the first add");
                // The first chunks' own tiles stand at the start, and at the end none are left to go ahead of others.
                if (256..768).contains(&store) {
                    assert!(add - store >= lead, "{kernel} {cluster:?} {offset}: {store} to {add}, lead {lead}");
                }
            }
        }
    }
}

#[test]
fn schedules_from_before_there_was_a_lead_keep_their_names() {
    for (set, options) in [(Published, vec![]), (Tilewire, vec![("open_lead_tiles", "0")])] {
        for kernel in ["gemm_rs", "gemm_ar"] {
            let schedule = Case::new(kernel, set, (2, 8), [8192, 8192, 512]).with(&options).build();
            assert!(!schedule.spec.contains("open_lead_tiles"), "{}", schedule.spec);
        }
    }
}

#[test]
fn a_rank_has_sixteen_chunks_beyond_the_nodes_of_the_published_table() {
    // m, nodes: tiles of a chunk; a rank has m / (8 nodes) / 128 * 32 tiles.
    for (m, nodes, want) in [(65_536, 2, 32), (65_536, 16, 8), (65_536, 64, 2), (131_072, 64, 4), (8192, 8, 2)] {
        let options = Case::new("gemm_rs", Tilewire, (nodes, 8), [m, 8192, 512]).spec().options;
        assert_eq!(options.int("chunk_tiles"), want, "m = {m} on {nodes} nodes");
    }
}

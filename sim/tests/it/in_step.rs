//! Bandwidth that is shared out once for ranks that do the same equals bandwidth shared out rank by rank, to the picosecond.

use crate::support::*;
use tilewire_kernels::schedule::{At, Claim};
use tilewire_kernels::{Fabric, RoleKind};
use tilewire_sim::compile::{Compiled, Form, Late};
use tilewire_sim::engine::{Run, Scratch};
use tilewire_sim::{Config, Protocol};

/// Runs both ways, in memory that was used before; both are equal.
fn both_ways(compiled: &mut Compiled, scratch: &mut [Scratch; 2], case: &Case, ctas: u32, form: Form) -> Run {
    let mut runs = [true, false].into_iter().zip(scratch).map(|(alike, scratch)| {
        compiled.ranks_alike = alike;
        scratch.run(compiled, &case.split(ctas), form, true).expect("runs")
    });
    let (once, each) = (runs.next().expect("two"), runs.next().expect("two"));
    assert!(once == each, "{} {ctas} {form:?}: {} and {}", case.name, once.end, each.end);
    once
}

#[test]
fn every_kernel_shares_alike_once_or_rank_by_rank() {
    let machine = shipped_machine("h200-efa");
    for (nodes, gpus) in [(1, 4), (2, 2), (2, 4)] {
        for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(nodes, gpus), machine.fabric, 1)) {
            for (protocol, noise_seed) in [(Protocol::Fair, None), (ISOLATED, None), (ISOLATED, Some(7))] {
                let config = Config { protocol, noise_seed, ..full() };
                let mut compiled = Compiled::new(&case.schedule, &machine, &config).expect("compiles");
                let mut scratch = Default::default();
                for form in [Form::Whole, Form::ComputeOnly, Form::CommOnly] {
                    for ctas in [1, 5] {
                        both_ways(&mut compiled, &mut scratch, &case, ctas, form);
                    }
                }
            }
        }
    }
}

/// The rank is late by so little that flows of all ranks run when it parts from the others: by less than any latency, by
/// that of a flag, and by parts of tiles and transfers.
#[test]
fn ranks_part_while_flows_run() {
    let machine = shipped_machine("h200-efa");
    let mut ends = 0;
    for case in SETS.into_iter().flat_map(|set| kernels(set, cluster(2, 4), machine.fabric, 1)) {
        let config = Config { protocol: ISOLATED, ..full() };
        let mut compiled = Compiled::new(&case.schedule, &machine, &config).expect("compiles");
        let mut scratch = Default::default();
        let mut seen = Vec::new();
        for rank in [0, 3, 7] {
            for ps in [0, 1, 1_000, 777_777, 20_000_000] {
                compiled.late = Late { rank, ps };
                seen.push(both_ways(&mut compiled, &mut scratch, &case, 3, Form::Whole).end);
            }
        }
        seen.sort_unstable();
        seen.dedup();
        ends += seen.len();
    }
    assert!(ends > 40, "a late rank changes next to nothing: {ends}");
}

/// Copies at 50 GB/s over links that carry one of them: all ranks begin with the same, and all but the first go on.
#[test]
fn parted_ranks_share_what_is_left_to_them() {
    let links = [("nvlink.egress_gbs", 50.0), ("nvlink.ingress_gbs", 50.0)];
    let prompt = [("sm.local_latency_ns", 0.0), ("sm.nvlink_latency_ns", 0.0)];
    let machine = with(with(round_machine(Fabric::IbRc), &links), &prompt);
    let took = |sizes: &'static [u64], ctas: u32| {
        let schedule = Toy::node(4, vec![role(RoleKind::IntraComm, Claim::Strided)]).tasks(|rank, _, _| {
            let left_out = usize::from(rank.gpu == 0);
            let sizes = &sizes[..sizes.len() - left_out];
            sizes.iter().map(|&size| copy(At::ME, At::local(1), size)).collect()
        });
        let mut compiled = Compiled::new(&schedule, &machine, &full()).expect("compiles");
        let [once, each] = [true, false].map(|alike| {
            compiled.ranks_alike = alike;
            let run = Scratch::default().run(&compiled, &split(0, ctas, 0, 0), Form::Whole, false).expect("runs");
            run.launches_of.iter().map(|launches| launches[0].1 - launches[0].0).collect::<Vec<u64>>()
        });
        assert_eq!(once, each);
        once
    };
    // 2 us and 20 us, each at half its speed: after 4 us the long one has 18 us to go alone, or 16 us after another 4 us.
    assert_eq!(took(&[100_000, 1_000_000, 100_000], 2), [22 * US, 24 * US, 24 * US, 24 * US]);
    // Nothing runs when they part.
    assert_eq!(took(&[100_000, 100_000], 1), [2 * US, 4 * US, 4 * US, 4 * US]);
}

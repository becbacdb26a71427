//! Times worked out by hand, exact to the picosecond, on the machine of round numbers.
//!
//! A launch takes 3 us. A CTA copies at 50 GB/s after a latency of 1 us (NVLink: 2 us).

use crate::support::*;
use tilewire_kernels::schedule::{
    At, BufferId, Claim, CollectiveKind, CtaCount, Drain, Gate, GatherEntry, Op, Publish, Region, Role, Signal,
    TableSlice, TaskSource, Wait,
};
use tilewire_kernels::{Cluster, Fabric, Rank, RoleKind, Schedule, Task};
use tilewire_sim::compile::{Compiled, Form};
use tilewire_sim::engine;

fn ib() -> tilewire_sim::Machine {
    round_machine(Fabric::IbRc)
}

#[test]
fn one_copy() {
    let toy = |at: At| Toy::node(2, vec![compute()]).tasks(move |_, _, _| vec![copy(At::ME, at, 50_000)]);
    // 3 us launch + 1 us latency + 50,000 B / 50 GB/s = 1 us.
    assert_eq!(simulate(&toy(At::ME), &ib(), split(1, 0, 0, 0)).end, 5 * US);
    // A pull pays the latency of NVLink.
    let pull = Toy::node(2, vec![compute()]).tasks(|_, _, _| vec![copy(At::local(1), At::ME, 50_000)]);
    assert_eq!(simulate(&pull, &ib(), split(1, 0, 0, 0)).end, 7 * US, "in flight 50,000 B / 2 us = 25 GB/s: 2 us");
    // A push too keeps its bytes in flight for the time of a remote store.
    assert_eq!(simulate(&toy(At::local(1)), &ib(), split(1, 0, 0, 0)).end, 6 * US);
}

#[test]
fn bytes_in_flight_bound_a_copy() {
    let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| vec![copy_in_flight(At::ME, At::ME, 50_000, 10_000)]);
    // 10,000 B / 1 us = 10 GB/s: 5 us, after 1 us.
    assert_eq!(simulate(&toy, &ib(), split(1, 0, 0, 0)).end, 9 * US);
}

#[test]
fn one_tile() {
    let run = |drain| {
        let toy = Toy::node(1, vec![compute()]).tasks(move |_, _, _| vec![tile(10, At::ME, drain)]);
        simulate(&toy, &ib(), split(1, 0, 0, 0)).end
    };
    // 3 us, fill 0.1, ten steps of 1 us, epilogue 0.2, store 20,000 B / 50 GB/s = 0.4.
    assert_eq!(run(Drain::Overlap), 13_700 * NS);
    assert_eq!(run(Drain::SmemRead), 13_710 * NS);
    assert_eq!(run(Drain::Visible), 13_720 * NS);
}

#[test]
fn two_tiles_overlap_store_and_fill_only_where_the_drain_permits() {
    let run = |drain| {
        let toy =
            Toy::node(1, vec![compute()]).tasks(move |_, _, _| vec![tile(10, At::ME, drain), tile(10, At::ME, drain)]);
        simulate(&toy, &ib(), split(1, 0, 0, 0)).end
    };
    // 3 + 0.1 + 10.2 + 10.2 + 0.4: the second fill and the first store are hidden.
    assert_eq!(run(Drain::Overlap), 23_900 * NS);
    // 3 + 2 x (0.1 + 10.2 + 0.41).
    assert_eq!(run(Drain::SmemRead), 24_420 * NS);
}

#[test]
fn a_fence_holds_the_cta_whose_output_leaves_over_nvlink_and_must_be_visible() {
    let end = |to, drain, fence_ns| {
        let toy = Toy::node(2, vec![compute()]).tasks(move |_, _, _| vec![tile(10, to, drain), tile(10, to, drain)]);
        simulate(&toy, &with(ib(), &[("nvlink.fence_ns", fence_ns)]), split(1, 0, 0, 0)).end
    };
    let peer = At::local(1);
    assert_eq!(end(peer, Drain::Visible, 700.0) - end(peer, Drain::Visible, 0.0), 2 * 700 * NS);
    assert_eq!(end(At::ME, Drain::Visible, 700.0), end(At::ME, Drain::Visible, 0.0));
    assert_eq!(end(peer, Drain::SmemRead, 700.0), end(peer, Drain::SmemRead, 0.0));
}

#[test]
fn a_tile_in_so_many_also_waits_until_its_chunk_is_noticed() {
    let end = |to, drain, notice| {
        let tile = move || {
            let mut task = tile(10, to, drain);
            if let Op::GemmTile { notice: of, .. } = &mut task.op {
                *of = notice;
            }
            task
        };
        let toy = Toy::node(2, vec![compute()]).tasks(move |_, _, _| vec![tile(), tile()]);
        simulate(&toy, &with(ib(), &[("nvlink.notice_ns", 8000.0)]), split(1, 0, 0, 0)).end
    };
    let peer = At::local(1);
    // Each of the two tiles takes its share of the 8 us.
    assert_eq!(end(peer, Drain::Visible, 4) - end(peer, Drain::Visible, 0), 2 * 2 * US);
    assert_eq!(end(At::ME, Drain::Visible, 4), end(At::ME, Drain::Visible, 0));
    assert_eq!(end(peer, Drain::SmemRead, 4), end(peer, Drain::SmemRead, 0));
}

#[test]
fn one_store_is_outstanding() {
    // A store of 20,000 B at 5 GB/s takes 4 us, a tile of one step 1.2 us: the store binds from the second on.
    let machine = with(ib(), &[("sm.copy_cta_gbs", 5.0)]);
    let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| vec![tile(1, At::ME, Drain::Overlap); 4]);
    // 3 + 0.1 + 1.2, then four stores of 4 us back to back.
    assert_eq!(simulate(&toy, &machine, split(1, 0, 0, 0)).end, (4_300 + 16_000) * NS);
}

#[test]
fn output_gate_holds_the_store_only() {
    // The flag comes from a sync of the other role after a copy that ends at 3 + 1 + 20 us.
    let roles = vec![compute(), role(RoleKind::IntraComm, Claim::Strided)];
    let gated = |gate| {
        let toy = Toy::node(1, roles.clone()).tasks(move |_, _, role| {
            if role == 0 {
                vec![tile(10, At::ME, Drain::Overlap).wait(Wait { gate, ..wait(0) }), tile(10, At::ME, Drain::Overlap)]
            } else {
                vec![copy(At::ME, At::ME, 1_000_000).signal(signal(At::ME, 0))]
            }
        });
        simulate(&toy, &ib(), split(1, 1, 0, 0)).end
    };
    // Flag visible at 24.5 us. Output gate: main loop done at 13.3, store from 24.5 on, second tile 24.5 + 10.2 + 0.4.
    assert_eq!(gated(Gate::Output), 35_100 * NS);
    // Start gate: 24.5 + 0.1 + 10.2 + 10.2 + 0.4.
    assert_eq!(gated(Gate::Start), 45_400 * NS);
}

#[test]
fn k_step_gate_lets_the_steps_before_run() {
    // Two flags gate ten steps: the second one holds step 5, it is visible at 24.5 us.
    let roles = vec![compute(), role(RoleKind::IntraComm, Claim::Strided)];
    let toy = Toy::node(1, roles).tasks(|_, _, role| {
        if role == 0 {
            vec![tile(10, At::ME, Drain::Overlap).wait(Wait::run(FAMILY, 0, 2, 1, 1, Gate::KStep))]
        } else {
            vec![sync().signal(signal(At::ME, 0)), copy(At::ME, At::ME, 1_000_000).signal(signal(At::ME, 1))]
        }
    });
    // Steps 5..10 from 24.5 on, epilogue 0.2, store 0.4.
    assert_eq!(simulate(&toy, &ib(), split(1, 1, 0, 0)).end, 30_100 * NS);
}

#[test]
fn a_first_step_that_waits_pays_its_fill() {
    // The second tile's only flag comes at 24.5 us: nothing of it can have been loaded behind the first one.
    let roles = vec![compute(), role(RoleKind::IntraComm, Claim::Strided)];
    let toy = Toy::node(1, roles).tasks(|_, _, role| {
        if role == 0 {
            let gated = tile(10, At::ME, Drain::Overlap).wait(Wait::run(FAMILY, 0, 1, 1, 1, Gate::KStep));
            vec![tile(10, At::ME, Drain::Overlap), gated]
        } else {
            vec![copy(At::ME, At::ME, 1_000_000).signal(signal(At::ME, 0))]
        }
    });
    assert_eq!(simulate(&toy, &ib(), split(1, 1, 0, 0)).end, (24_500 + 100 + 10_200 + 400) * NS);
}

#[test]
fn an_interpreter_looks_at_each_flag_of_a_k_step() {
    let mut machine = ib();
    machine.interpreter = shipped_machine("h200-nvlink").interpreter;
    let looks = |step_flag_ns: f64, flags: u32| {
        let machine = with(machine.clone(), &[("interpreter.step_flag_ns", step_flag_ns)]);
        let roles = vec![compute(), role(RoleKind::IntraComm, Claim::Strided)];
        let toy = Toy::node(1, roles).tasks(move |_, _, role| {
            if role == 0 {
                let gated = Wait::run(FAMILY, 1, flags, 1, 1, Gate::KStep);
                vec![tile(10, At::ME, Drain::Visible).wait(wait(0)).wait(gated)]
            } else {
                let all = (1..=flags).map(|flag| sync().signal(signal(At::ME, flag)));
                all.chain([sync().signal(signal(At::ME, 0))]).collect()
            }
        });
        simulate(&toy, &machine, split(1, 1, 0, 0)).end
    };
    assert_eq!(looks(70.0, 5) - looks(0.0, 5), 350 * NS, "all of them were up before the tile began");
    assert_eq!(looks(70.0, 10) - looks(0.0, 10), 700 * NS);
}

#[test]
fn flag_chain() {
    // Sync i waits for flag i and raises flag i + 1: eight hops of 0.5 us.
    let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| {
        (0..9)
            .map(|i| {
                let task = sync().signal(signal(At::ME, i + 1));
                if i == 0 { task } else { task.wait(wait(i)) }
            })
            .collect()
    });
    assert_eq!(simulate(&toy, &ib(), split(9, 0, 0, 0)).end, 7 * US);
}

#[test]
fn ring_of_n() {
    // Every rank pushes a block to the right n - 1 times, each time after the one from the left: 1 us latency, 2 us of
    // bytes in flight over NVLink, 1 us for the flag.
    for n in [2_u16, 3, 8] {
        let toy = Toy::node(n, vec![compute()]).symmetric().tasks(move |_, _, _| {
            (0..u32::from(n) - 1)
                .map(|step| {
                    let task = copy(At::ME, At::local(1), 50_000).signal(signal(At::local(1), step + 1));
                    if step == 0 { task } else { task.wait(wait(step)) }
                })
                .collect()
        });
        let steps = u64::from(n) - 1;
        let expected = 3 * US + steps * 3 * US + (steps - 1) * US;
        let run = simulate(&toy, &ib(), split(1, 0, 0, 0));
        assert_eq!(run.end, expected, "{n} ranks");
        assert!(run.rank_ends.iter().all(|&end| end == expected));
    }
}

#[test]
fn launches_follow_each_other() {
    let one = |name: &str, after| launch(name, after, vec![Role { ctas: CtaCount::Fixed(1), ..compute() }]);
    let toy = Toy::node(1, Vec::new())
        .launches(vec![one("a", vec![]), one("b", vec![0]), one("c", vec![0]), one("d", vec![1, 2])])
        .tasks(|_, launch, _| vec![copy(At::ME, At::ME, [50_000, 100_000, 200_000, 50_000][launch])]);
    // a: 3..5; b and c begin at 6 and end at 9 and 11; d: 12..14.
    let run = simulate(&toy, &ib(), split(0, 0, 0, 0));
    let us = |from, to| (from * US, to * US);
    assert_eq!(run.launches, [us(3, 5), us(6, 9), us(6, 11), us(12, 14)]);
    assert_eq!(run.end, 14 * US);
}

#[test]
fn one_put() {
    // 250,000 B at 25 GB/s and 0.1 us a message: 10.1 us on the wire.
    let toy = |fabric| {
        let roles = vec![role(RoleKind::InterSend, Claim::Strided), role(RoleKind::InterReduce, Claim::Strided)];
        Toy::on(cluster(2, 1), roles).fabric(fabric).tasks(move |rank, _, role| match (rank.node, role) {
            (0, 0) => vec![put(250_000, 1, 0, publish(fabric), 0, Some(1))],
            (0, 1) => vec![sync().wait(wait(1))],
            (_, 1) => vec![sync().wait(wait(0))],
            _ => vec![sync()],
        })
    };
    let run = |fabric| simulate(&toy(fabric), &round_machine(fabric), split(0, 0, 1, 1));
    // Push 1, FIFO 1.5, post 0.8, wire 10.1, network 10, NIC flag 0.6: 3 + 24.0.
    let ib = run(Fabric::IbRc);
    assert_eq!(ib.rank_ends[1], 27 * US);
    // The sender: 26.4 + ack 5 + completion 0.4 + host flag 1.5 + 0.5.
    assert_eq!(ib.rank_ends[0], 33_800 * NS);
    // The receiver's thread takes 0.4 us for the immediate, its word 1.5 + 0.5 us: 26.4 + 2.4.
    let efa = run(Fabric::EfaSrd);
    assert_eq!(efa.rank_ends, [33_800 * NS, 28_800 * NS]);
}

#[test]
fn a_flag_that_is_written_by_itself_is_a_message_of_its_own() {
    let run = |publish: Publish| {
        let toy = Toy::on(cluster(2, 1), vec![role(RoleKind::InterSend, Claim::Strided)])
            .fabric(Fabric::EfaSrd)
            .symmetric()
            .tasks(move |_, _, _| vec![put(250_000, 1, 0, publish, 0, None)]);
        simulate(&toy, &round_machine(Fabric::EfaSrd), split(0, 0, 1, 0)).end
    };
    // The data lands at 26.4 us; the flag behind it takes the rail for 0.1 us more.
    assert_eq!(run(Publish::Immediate), 26_400 * NS);
    assert_eq!(run(Publish::SeparateWrite { queue: 0 }), 26_500 * NS);
}

#[test]
fn a_flag_that_is_written_by_itself_is_polled_in_the_memory_of_the_host() {
    let roles = vec![role(RoleKind::InterSend, Claim::Strided), role(RoleKind::InterReduce, Claim::Strided)];
    let toy = Toy::on(cluster(2, 1), roles).fabric(Fabric::EfaSrd).symmetric().tasks(|_, _, role| match role {
        0 => vec![put(250_000, 1, 0, Publish::SeparateWrite { queue: 0 }, 0, None)],
        _ => vec![sync().wait(wait(0))],
    });
    // Landed at 26.5 us; a GPU sees a word of its host 1.5 us later.
    assert_eq!(simulate(&toy, &round_machine(Fabric::EfaSrd), split(0, 0, 1, 1)).end, 28 * US);
}

#[test]
fn a_put_that_nobody_waits_for_still_ends_the_run() {
    let toy = Toy::on(cluster(2, 1), vec![role(RoleKind::InterSend, Claim::Strided)])
        .symmetric()
        .tasks(|_, _, _| vec![put(250_000, 1, 0, publish(Fabric::IbRc), 0, None)]);
    // The CTA is done at 4 us; the data lands at 26.4 us.
    assert_eq!(simulate(&toy, &ib(), split(0, 0, 1, 0)).end, 26_400 * NS);
}

#[test]
fn puts_of_a_queue_are_in_order_and_those_of_others_share_the_rail() {
    let toy = |fabric, queues: u16| {
        Toy::on(cluster(2, 1), vec![role(RoleKind::InterSend, Claim::Strided)]).fabric(fabric).tasks(
            move |rank, _, _| {
                let puts = if rank.node == 0 { 2 } else { 0 };
                (0..puts).map(|i| put(250_000, 1, i % queues, publish(fabric), u32::from(i), None)).collect()
            },
        )
    };
    let run = |fabric, queues| simulate(&toy(fabric, queues), &round_machine(fabric), split(0, 0, 1, 0)).end;
    // Pushed at 4 and 5 us, posted at 6.3 and 7.3 us. In one ordered queue the second begins at 16.4 us; sharing the
    // rail from 7.3 us on, the first ends at 25.5 and the second at 26.5 us: the last byte leaves at the same time.
    for (fabric, queues) in [(Fabric::IbRc, 1), (Fabric::IbRc, 2), (Fabric::EfaSrd, 1), (Fabric::EfaSrd, 2)] {
        assert_eq!(run(fabric, queues), 36_500 * NS, "{fabric} {queues}");
    }
}

#[test]
fn a_queue_sends_one_message_after_the_other_on_either_fabric() {
    let first = |fabric, queues: u16| {
        let roles = vec![role(RoleKind::InterSend, Claim::Strided), role(RoleKind::InterReduce, Claim::Strided)];
        let toy = Toy::on(cluster(2, 1), roles).fabric(fabric).tasks(move |rank, _, role| match (rank.node, role) {
            (0, 0) => (0..2).map(|i| put(250_000, 1, i % queues, publish(fabric), u32::from(i), None)).collect(),
            (1, 1) => vec![sync().wait(wait(0))],
            _ => vec![sync()],
        });
        let run = simulate(&toy, &round_machine(fabric), split(0, 0, 1, 1));
        run.timeline.iter().filter(|task| task.rank == 1).map(|task| task.end).max().expect("tasks")
    };
    // As above. The first leaves its queue at 16.4 us; beside another queue at 6.3 + 1 + 2 x 9.1 = 25.5 us. Then 10 us of
    // network, and the NIC's flag 0.6 us, or the proxy's 0.4 + 2 us.
    for (fabric, flag) in [(Fabric::IbRc, 600 * NS), (Fabric::EfaSrd, 2_400 * NS)] {
        assert_eq!(first(fabric, 1), 26_400 * NS + flag, "{fabric}");
        assert!(first(fabric, 2).abs_diff(35_500 * NS + flag) < 100, "{fabric}: {}", first(fabric, 2));
    }
}

#[test]
fn writes_in_flight_are_capped_until_their_completion() {
    // Cap 2, tiny puts posted at 6.3, 7.3, ... : the third leaves when the first is acknowledged and handled.
    let toy = Toy::on(cluster(2, 1), vec![role(RoleKind::InterSend, Claim::Strided)]).tasks(|rank, _, _| {
        let puts = if rank.node == 0 { 3 } else { 0 };
        (0..puts).map(|i| put(0, 1, 0, publish(Fabric::IbRc), i, None)).collect()
    });
    // First: wire 0.1, network 10, ack 5, completion 0.4: 6.3 + 15.5 = 21.8; third lands at 21.8 + 10.1.
    assert_eq!(simulate(&toy, &ib(), split(0, 0, 1, 0)).end, 31_900 * NS);
}

#[test]
fn a_full_fifo_blocks_the_cta_that_pushes() {
    // Depth 1, a thread that takes 10 us to post: pushes at 4, then each waits for the command before to be taken.
    let machine = with(ib(), &[("proxy.fifo_depth", 1.0), ("proxy.post_ns", 10_000.0), ("proxy.in_flight", 8.0)]);
    let toy = Toy::on(cluster(2, 1), vec![role(RoleKind::InterSend, Claim::Strided)]).tasks(|rank, _, _| {
        let puts = if rank.node == 0 { 3 } else { 0 };
        (0..puts).map(|i| put(0, 1, 0, publish(Fabric::IbRc), i, None)).collect()
    });
    let run = simulate(&toy, &machine, split(0, 0, 1, 0));
    // First pushed at 4, taken at 5.5. Second arrives at 5 and waits until 5.5, readable at 7, taken at 15.5. Third
    // arrives at 6.5 and waits until 15.5.
    let ends: Vec<u64> = run.timeline.iter().map(|t| t.free / NS).collect();
    assert_eq!(ends, [4_000, 5_500, 15_500]);
    // Third: readable at 17, taken at 25.5, posted at 35.5, lands 10.1 later.
    assert_eq!(run.end, 45_600 * NS);
}

#[test]
fn shared_bandwidth_is_shared() {
    // Two CTAs of 50 GB/s each, reading and writing: 200 GB/s of HBM for 100 GB/s.
    let machine = with(ib(), &[("gpu.hbm_gbs", 100.0)]);
    let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| vec![copy(At::ME, At::ME, 1_000_000); 2]);
    // 21 us alone: 40,000,000 B... each flow demands 2,000,000 B / 21 us; both together twice that, over 100 GB/s.
    let demand = (2_000_000_u64 * US + 10) / 21;
    let theta = (u128::from(100_000_000_000_u64) << 32) / u128::from(2 * demand);
    let expected = ((21 * u128::from(US)) << 32).div_ceil(theta) as u64;
    assert_eq!(simulate(&toy, &machine, split(2, 0, 0, 0)).end, 3 * US + expected);
    assert!(expected.abs_diff(40 * US) < 100, "4 MB at 100 GB/s: {expected}");
}

#[test]
fn links_carry_less_between_many_gpus_than_between_two() {
    let machine = with(ib(), &[("nvlink.egress_gbs", 10.0), ("nvlink.many_peers_share", 0.8)]);
    let end = |targets: [At; 2]| {
        let toy = Toy::node(3, vec![compute()])
            .tasks(move |_, _, _| targets.iter().map(|&at| copy(At::ME, at, 1_000_000)).collect());
        simulate(&toy, &machine, split(2, 0, 0, 0)).end
    };
    // 2 MB leave every GPU at 10 GB/s, or at 8.
    let (one, many) = (end([At::local(1); 2]), end([At::local(1), At::local(2)]));
    assert!(one.abs_diff(203 * US) < 1_000 && many.abs_diff(253 * US) < 1_000, "{one} {many}");
}

#[test]
fn loads_in_the_switch_take_their_factor_of_the_links() {
    let end = |factor| {
        let machine = with(ib(), &[("nvlink.egress_gbs", 10.0), ("nvlink.nvls_load_link_bytes_per_byte", factor)]);
        let toy =
            Toy::node(2, vec![compute()]).tasks(|_, _, _| vec![reduce(&[At::AllLocal], &[At::ME], 500_000, 500_000)]);
        simulate(&toy, &machine, split(1, 0, 0, 0)).end
    };
    // Every GPU is read by both: 1 MB at 10 GB/s, and 1.6 times that.
    assert!(end(1.0).abs_diff(103 * US) < 1_000 && end(1.6).abs_diff(163 * US) < 1_000, "{} {}", end(1.0), end(1.6));
}

#[test]
fn a_written_byte_takes_its_factor_of_the_memory() {
    // As above, a write at 1.5 of a read: 2 x (1 + 1.5) MB at 100 GB/s.
    let machine = with(ib(), &[("gpu.hbm_gbs", 100.0), ("gpu.hbm_write_bytes_per_byte", 1.5)]);
    let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| vec![copy(At::ME, At::ME, 1_000_000); 2]);
    let end = simulate(&toy, &machine, split(2, 0, 0, 0)).end;
    assert!(end.abs_diff(53 * US) < 100, "5 MB at 100 GB/s: {end}");
}

#[test]
fn traffic_of_tiles_draws_power() {
    // 100 tiles of 10 us at 1 TFLOPS on 100 CTAs: 98 of 60 + 98 TFLOPS. An output of 20,000 B at 500 FLOP/B draws as
    // much as the product of a tile again.
    let end = |flop_per_byte| {
        let droop = [("gpu.droop_knee_tflops", 40.0), ("gpu.droop_static_tflops", 60.0)];
        let machine = with(with(ib(), &droop), &[("gpu.hbm_power_flop_per_byte", flop_per_byte)]);
        let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| vec![tile(10, At::ME, Drain::Overlap); 10_000]);
        simulate(&toy, &machine, split(100, 0, 0, 0)).end as f64
    };
    let ratio = end(500.0) / end(0.0);
    let expected = (60.0 + 2.0 * 98.0) / (60.0 + 98.0);
    assert!((ratio / expected - 1.0).abs() < 0.01, "{ratio}, not {expected}");
}

#[test]
fn power_of_traffic_follows_its_average() {
    // As above, but only the first half of the tiles has an output: half as much power, of the second half, too.
    let ends = |flop_per_byte| {
        let droop = [("gpu.droop_knee_tflops", 40.0), ("gpu.droop_static_tflops", 60.0)];
        let machine = with(with(ib(), &droop), &[("gpu.hbm_power_flop_per_byte", flop_per_byte)]);
        let toy = Toy::node(1, vec![compute()]).tasks(|_, _, _| {
            let mut tiles = vec![tile(10, At::ME, Drain::Overlap); 10_000];
            for tile in &mut tiles[5_000..] {
                let Op::GemmTile { outs, .. } = &mut tile.op else { unreachable!("a tile") };
                outs.clear();
            }
            tiles
        });
        let run = simulate(&toy, &machine, split(100, 0, 0, 0));
        let half = run.timeline.iter().find(|t| t.task == 5_000).expect("the first of the second half").start;
        [half, run.end - half].map(|time| time as f64)
    };
    let expected = (60.0 + 1.5 * 98.0) / (60.0 + 98.0);
    for (half, (with_power, without)) in ends(500.0).into_iter().zip(ends(0.0)).enumerate() {
        let ratio = with_power / without;
        assert!((ratio / expected - 1.0).abs() < 0.01, "half {half}: {ratio}, not {expected}");
    }
}

#[test]
fn lanes_share_their_cta() {
    // Two lanes of one CTA at 25 GB/s each: two copies of 50,000 B take 2 us side by side.
    let lanes = Role { lanes: 2, ..compute() };
    let toy = Toy::node(1, vec![lanes]).tasks(|_, _, _| vec![copy(At::ME, At::ME, 50_000); 2]);
    let run = simulate(&toy, &ib(), split(1, 0, 0, 0));
    assert_eq!(run.end, 6 * US);
    assert_eq!(run.timeline.iter().map(|t| (t.cta, t.lane)).collect::<Vec<_>>(), [(0, 0), (0, 1)]);
}

#[test]
fn strides_may_begin_anew() {
    let end = |restarts: &'static [usize]| {
        let toy = Toy::node(1, vec![compute()]).tasks(move |_, _, _| {
            let task = |i| Task { restart: restarts.contains(&i), ..copy(At::ME, At::ME, 50_000) };
            (0..8).map(task).collect()
        });
        simulate(&toy, &ib(), split(3, 0, 0, 0)).end
    };
    // Copies of 2 us each. In one go each of three CTAs takes three at the most. The first takes 0, 3, and of the tasks after
    // a restart 4, 7.
    assert_eq!(end(&[]), (3 + 3 * 2) * US);
    assert_eq!(end(&[4]), (3 + 4 * 2) * US);
    // 0, then 1, 4, then 5.
    assert_eq!(end(&[1, 5]), (3 + 4 * 2) * US);
    // A part of one task is the first CTA's alone.
    assert_eq!(end(&[1, 2, 3, 4, 5, 6, 7]), (3 + 8 * 2) * US);
}

/// Four rows of 1000 bytes, of which some are there.
struct Rows {
    there: u32,
    box_bytes: u32,
}

impl TaskSource for Rows {
    fn tasks(&self, _: Rank, _: usize, _: usize, sink: &mut dyn FnMut(Task)) {
        sink(Task::new(Op::GatherRows {
            table: TableSlice { start: 0, len: 4 },
            src: BufferId(0),
            dst: Region::contiguous(BufferId(0), 0, 4, 1000),
            in_flight_rows: 4,
            load_store_overlap: true,
            box_bytes: self.box_bytes,
        }));
    }

    fn table(&self, _: Rank) -> Vec<Option<GatherEntry>> {
        (0..4).map(|row| (row < self.there).then_some(GatherEntry { dg: 0, row })).collect()
    }
}

#[test]
fn boxes_bound_a_gather() {
    let end = |there, box_bytes| {
        let empty = Toy::node(1, vec![compute()]).tasks(|_, _, _| Vec::new());
        let toy = Schedule { source: Box::new(Rows { there, box_bytes }), ..empty };
        simulate(&toy, &ib(), split(1, 0, 0, 0)).end
    };
    // Launch, 1 us of latency, and 4000 bytes in flight a microsecond.
    assert_eq!(end(4, 0), 5 * US);
    // 40 loads and 40 stores of 100 bytes, 30 ns each.
    assert_eq!(end(4, 100), 4 * US + 80 * 30 * NS);
    // 24 of them are not slower than the rows.
    assert_eq!(end(4, 334), 5 * US);
    // Rows that are not there are not loaded.
    assert_eq!(end(2, 100), 4 * US + 40 * 30 * NS);
}

#[test]
fn a_ready_role_takes_what_is_there() {
    // Tasks 0..3 wait for flags that come in reverse order, 10 us apart; the copies take 2 us.
    let roles =
        vec![role(RoleKind::IntraComm, Claim::Strided), role(RoleKind::InterReduce, Claim::Ready { window: 4 })];
    let toy = |window| {
        let mut roles = roles.clone();
        roles[1].claim = Claim::Ready { window };
        Toy::node(1, roles).tasks(|_, _, role| {
            if role == 0 {
                (0..4).map(|i| copy(At::ME, At::ME, 450_000).signal(signal(At::ME, 3 - i))).collect()
            } else {
                (0..4).map(|i| copy(At::ME, At::ME, 50_000).wait(wait(i))).collect()
            }
        })
    };
    // Flags at 3 + 10 i + 0.5: with the whole list in the window each is taken at once, the last at 43.5.
    let run = simulate(&toy(4), &ib(), split(0, 1, 0, 1));
    assert_eq!(run.end, 45_500 * NS);
    // The reducer waited for flags all the time that it did not copy.
    assert_eq!(run.waits[0][1], 10_500 * NS + 3 * 8 * US);
    // A window of 1 is the list order: all four after the last flag.
    assert_eq!(simulate(&toy(1), &ib(), split(0, 1, 0, 1)).end, 51_500 * NS);
}

#[test]
fn recycled_ctas_join_the_other_role() {
    let recycling = Role { recycle: Some(1), ..compute() };
    let reduce = role(RoleKind::InterReduce, Claim::Ticket);
    let toy =
        |first: Role| Toy::node(1, vec![first, reduce.clone()]).tasks(|_, _, _| vec![copy(At::ME, At::ME, 50_000); 4]);
    // Two CTAs do two rounds of their own; the reducer has done two by then, the other two are done by those.
    assert_eq!(simulate(&toy(recycling), &ib(), split(2, 0, 0, 1)).end, 9 * US);
    assert_eq!(simulate(&toy(compute()), &ib(), split(2, 0, 0, 1)).end, 11 * US);
}

#[test]
fn early_signals_do_not_wait_for_the_writes() {
    let toy = |early| {
        let roles = vec![compute(), role(RoleKind::IntraComm, Claim::Strided)];
        Toy::node(1, roles).tasks(move |_, _, role| {
            if role == 0 {
                vec![tile(10, At::ME, Drain::Overlap).signal(Signal { early, ..signal(At::ME, 0) })]
            } else {
                vec![copy(At::ME, At::ME, 50_000).wait(wait(0))]
            }
        })
    };
    // Main loop done at 13.3, store at 13.7; flag 0.5, copy 2.
    assert_eq!(simulate(&toy(true), &ib(), split(1, 1, 0, 0)).end, 15_800 * NS);
    assert_eq!(simulate(&toy(false), &ib(), split(1, 1, 0, 0)).end, 16_200 * NS);
}

#[test]
fn reduced_forms() {
    // One tile into a neighbour's memory, gated by a copy of the other role.
    let roles = vec![compute(), role(RoleKind::IntraComm, Claim::Strided)];
    let toy = Toy::node(2, roles).symmetric().tasks(|_, _, role| {
        if role == 0 {
            vec![tile(10, At::local(1), Drain::Overlap).wait(wait(0))]
        } else {
            vec![copy(At::ME, At::ME, 1_000_000).signal(signal(At::ME, 0))]
        }
    });
    let compiled = Compiled::new(&toy, &ib(), &full()).expect("compiles");
    let run = |form| engine::run(&compiled, &split(1, 1, 0, 0), form, false).expect("runs").end;
    // 24.5 + 0.1 + 10.2 + 0.4; the tile alone; copy, flag and store alone.
    assert_eq!(run(Form::Whole), 35_200 * NS);
    assert_eq!(run(Form::ComputeOnly), 13_700 * NS);
    assert_eq!(run(Form::CommOnly), 24_900 * NS);
}

#[test]
fn busy_and_wait_fill_the_time_of_a_cta() {
    // A CTA that waits 21.5 us at the start of its task, then copies for 2 us.
    let roles = vec![compute(), role(RoleKind::IntraComm, Claim::Strided)];
    let toy = Toy::node(1, roles).tasks(|_, _, role| {
        if role == 0 {
            vec![copy(At::ME, At::ME, 50_000).wait(wait(0))]
        } else {
            vec![copy(At::ME, At::ME, 1_000_000).signal(signal(At::ME, 0))]
        }
    });
    let run = simulate(&toy, &ib(), split(1, 1, 0, 0));
    assert_eq!(run.busy[0], [2 * US, 21 * US]);
    assert_eq!(run.waits[0], [21_500 * NS, 0]);
}

#[test]
fn a_collective_begins_when_the_last_rank_has_come() {
    // Rank 1 copies for 21 us first; the collective takes 10 us + 1,000,000 B x 3/4 / 100 GB/s.
    let once = Role { ctas: CtaCount::Fixed(1), ..compute() };
    let toy = Toy::node(4, Vec::new())
        .launches(vec![launch("own", vec![], vec![once.clone()]), launch("all", vec![0], vec![once])])
        .tasks(|rank, launch, _| {
            let (src, dst) = (bytes(250_000), bytes(1_000_000));
            match (launch, rank.gpu) {
                (0, 1) => vec![copy(At::ME, At::ME, 1_000_000)],
                (0, _) => vec![sync()],
                _ => vec![Task::new(Op::Collective { kind: CollectiveKind::AllGather, src, dst })],
            }
        });
    // One CTA drives an eighth of the library's channels: 12.5 GB/s, 60 us.
    let machine = with(ib(), &[("library.all_gather.fill_us", 0.0)]);
    assert_eq!(simulate(&toy, &machine, split(0, 0, 0, 0)).rank_ends, [(3 + 21 + 1 + 10 + 60) * US; 4]);
}

#[test]
fn two_gpus_alone_have_collectives_of_their_own() {
    // 10 us + 1,000,000 B x (G - 1)/G / 100 GB/s, driven by one of eight CTAs; between a pair 7 us instead of 10.
    let once = Role { ctas: CtaCount::Fixed(1), ..compute() };
    let time = |nodes: u16, gpus: u16| {
        let cluster = Cluster { nodes, gpus_per_node: gpus };
        let toy = Toy::on(cluster, vec![once.clone()]).tasks(move |_, _, _| {
            let (src, dst) = (bytes(1_000_000 / cluster.ranks() as u64), bytes(1_000_000));
            vec![Task::new(Op::Collective { kind: CollectiveKind::AllGather, src, dst })]
        });
        let mut machine = with(ib(), &[("library.all_gather.fill_us", 0.0)]);
        machine.library_pair = Some(machine.library.clone());
        let machine = with(machine, &[("library_pair.all_gather.latency_us", 7.0)]);
        simulate(&toy, &machine, split(0, 0, 0, 0)).rank_ends[0]
    };
    assert_eq!(time(1, 2), (3 + 7 + 40) * US);
    assert_eq!(time(1, 4), (3 + 10 + 60) * US);
    assert_eq!(time(2, 1), (3 + 10 + 40) * US);
}

#[test]
fn ring_all_reduce_on_an_alpha_beta_machine() {
    for ranks in [2, 16, 64] {
        let schedule = ring_all_reduce(ranks, 64 << 20);
        let end = simulate(&schedule, &alpha_beta_machine(2.0, 50.0), split(0, 0, 1, 0)).end as f64;
        let error = end / ring_all_reduce_ps(ranks, 64 << 20, 2.0, 50.0) - 1.0;
        assert!(error.abs() < 0.01, "{ranks} ranks: {error}");
    }
}

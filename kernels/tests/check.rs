//! The static checker over every kernel of the registry, and one broken schedule for each of its rules.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::{cases, changed};
use smallvec::smallvec;
use std::collections::BTreeSet;
use tilewire_kernels::check::{
    Finding, Limits, Problem, RaceKind, Rule, Severity, ShapeError, Verdict, WireFormat, check, check_fatal,
    check_residency, narrow, report, report_fatal,
};
use tilewire_kernels::schedule::{
    At, Buffer, BufferId, BufferUse, Claim, CtaCount, DType, Engine, FamilyId, Flag, FlagFamily, Gate, GatherEntry,
    Launch, Op, Place, Publish, Region, Role, Signal, Symmetry, TableSlice, TaskSource, Wait,
};
use tilewire_kernels::{Cluster, Fabric, Offset, OptionSet, Rank, RoleKind, RoleSplit, Schedule, Task};

fn text(findings: &[Finding]) -> String {
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

const X: BufferId = BufferId(0);
const Y: BufferId = BufferId(1);
const F: FamilyId = FamilyId(0);
const ARRIVED: FamilyId = FamilyId(1);
const SENT: FamilyId = FamilyId(2);

/// Lists of a rank: `[launch][role]`.
type Lists = Vec<Vec<Vec<Task>>>;

struct Fixed<L>(L);

impl<L: Fn(Rank) -> Lists + Send + Sync> TaskSource for Fixed<L> {
    fn tasks(&self, rank: Rank, launch: usize, role: usize, sink: &mut dyn FnMut(Task)) {
        (self.0)(rank)[launch][role].iter().cloned().for_each(sink);
    }

    fn table(&self, _rank: Rank) -> Vec<Option<GatherEntry>> {
        vec![Some(GatherEntry { dg: 0, row: 0 }), None, Some(GatherEntry { dg: 0, row: 64 })]
    }
}

/// Role kinds in the order of the roles of a hand-made launch.
fn roles(claims: &[Claim]) -> Vec<Role> {
    let role = |(kind, &claim)| Role::new(kind, claim);
    RoleKind::ALL.into_iter().zip(claims).map(role).collect()
}

/// A schedule of one launch on `nodes` x `gpus`, the same lists on every rank.
fn schedule(cluster: (u16, u16), claims: &[Claim], lists: Vec<Vec<Task>>) -> Schedule {
    by_rank(cluster, claims, move |_| vec![lists.clone()])
}

fn by_rank(
    (nodes, gpus_per_node): (u16, u16),
    claims: &[Claim],
    lists: impl Fn(Rank) -> Lists + Send + Sync + 'static,
) -> Schedule {
    let buffer = |name: &str, usage| Buffer { name: name.into(), bytes: 1024, dtype: DType::Bf16, usage };
    let family = |name: &str, slots| FlagFamily { name: name.into(), slots };
    Schedule {
        kernel: "test".into(),
        cluster: Cluster { nodes, gpus_per_node },
        fabric: Fabric::IbRc,
        spec: String::new(),
        buffers: vec![buffer("x", BufferUse::Input), buffer("y", BufferUse::Output)],
        flags: vec![family("f", 64), family("arrived", 8), family("sent", 4)],
        launches: vec![Launch { name: "main".into(), after: vec![], roles: roles(claims) }],
        symmetry: Symmetry::FULL,
        useful_flops: 0,
        source: Box::new(Fixed(lists)),
    }
}

fn row(buffer: BufferId, offset: u64) -> Region {
    Region::contiguous(buffer, offset, 1, 64)
}

fn sync() -> Task {
    Task::new(Op::Sync)
}

fn raises(slot: u32) -> Task {
    sync().signal(Signal::one(At::ME, F, slot))
}

fn put(dn: u16, slot: u32) -> Task {
    Task::new(Op::Put {
        src: row(X, 0),
        dst: Place { at: At::node(dn), region: row(Y, 0) },
        queue: 0,
        publish: Publish::SameQueueWrite,
        arrived: Flag { family: ARRIVED, slot },
        sent: None,
    })
}

fn copy(src: Region, dst: Region) -> Task {
    Task::new(Op::Copy {
        src: Place::me(src),
        dsts: smallvec![Place::me(dst)],
        engine: Engine::Bulk,
        in_flight_bytes: 1024,
        load_store_overlap: true,
    })
}

fn findings(schedule: &Schedule) -> Vec<Finding> {
    check_fatal(schedule, None)
}

/// The only finding, which is fatal.
fn fatal(schedule: &Schedule) -> Problem {
    let found = findings(schedule);
    assert_eq!(found.len(), 1, "{}", text(&found));
    assert_eq!(found[0].severity, Severity::Fatal, "{}", text(&found));
    found[0].problem.clone()
}

fn shape_of(task: Task) -> ShapeError {
    match fatal(&schedule((2, 1), &[Claim::Ticket], vec![vec![task]])) {
        Problem::Shape(error) => error,
        other => panic!("{other}"),
    }
}

/// The message of a cycle's finding.
fn cycle(schedule: &Schedule) -> String {
    match fatal(schedule) {
        cycle @ Problem::Cycle(_) => cycle.to_string(),
        other => panic!("{other}"),
    }
}

#[test]
fn tilewire_sets_have_no_findings() {
    for fabric in [Fabric::IbRc, Fabric::EfaSrd, Fabric::Loopback] {
        for case in cases(OptionSet::Tilewire, fabric) {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            let findings = check(&schedule, None);
            assert!(findings.is_empty(), "{}\n{}", case.name(), text(&findings));
        }
    }
}

/// What the checker finds in the published sets, per kernel and fabric, and nothing else.
#[test]
fn published_sets_have_known_hazards_only() {
    // On EFA every published kernel tells the receiver by a write that nothing orders after the data.
    let known = [
        ("gemm_rs", Fabric::IbRc, "early ready"),
        ("gemm_rs", Fabric::EfaSrd, "early ready"),
        ("gemm_rs", Fabric::EfaSrd, "order arrived"),
        ("gemm_ar", Fabric::EfaSrd, "order arrived"),
        ("ag_gemm", Fabric::EfaSrd, "order arrived"),
        ("moe_dispatch_gemm", Fabric::EfaSrd, "order arrived"),
        ("ring_attention", Fabric::EfaSrd, "order arrived"),
    ];
    for fabric in [Fabric::IbRc, Fabric::EfaSrd] {
        let mut found = BTreeSet::new();
        for case in cases(OptionSet::Published, fabric) {
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            for finding in check(&schedule, None) {
                let what = match &finding.problem {
                    Problem::EarlySignal { family, .. } => format!("early {family}"),
                    Problem::FabricOrder { family, .. } => format!("order {family}"),
                    _ => panic!("{}\n{finding}", case.name()),
                };
                assert_eq!(finding.severity, Severity::Hazard);
                found.insert((case.kernel.name(), what));
            }
        }
        let expected =
            known.iter().filter(|(_, on, _)| *on == fabric).map(|(kernel, _, what)| (*kernel, (*what).into()));
        assert_eq!(found, expected.collect(), "{fabric}");
    }
}

#[test]
fn lists_end_with_roles_that_have_no_ctas_but_are_recycled_into() {
    let lists = vec![vec![raises(0)], vec![sync().wait(Wait::on(F, 0, 1))]];
    let mut good = schedule((1, 1), &[Claim::Strided, Claim::Ticket], lists);
    let split = RoleSplit { compute: 1, ..RoleSplit::default() };
    let bad = check_fatal(&good, Some(&split));
    assert!(matches!(bad[..], [Finding { problem: Problem::NoCtas { tasks: 1 }, .. }]), "{}", text(&bad));
    good.launches[0].roles[0].recycle = Some(1);
    assert!(check_fatal(&good, Some(&split)).is_empty());
}

/// With CTAs of its own the second role runs beside the first; without, it comes after it.
#[test]
fn recycling_into_a_role_that_the_own_list_waits_for_is_a_cycle() {
    let lists = vec![vec![sync().wait(Wait::on(F, 0, 1))], vec![raises(0)]];
    let mut schedule = schedule((1, 1), &[Claim::Strided, Claim::Ticket], lists);
    schedule.launches[0].roles[0].recycle = Some(1);
    assert!(check_fatal(&schedule, Some(&RoleSplit { compute: 1, intra_comm: 1, ..RoleSplit::default() })).is_empty());
    let found = check_fatal(&schedule, Some(&RoleSplit { compute: 1, ..RoleSplit::default() }));
    assert!(matches!(found[..], [Finding { problem: Problem::Cycle(_), .. }]), "{}", text(&found));
}

#[test]
fn two_roles_that_wait_for_each_other_are_a_cycle_that_is_named() {
    let lists = vec![vec![sync().wait(Wait::on(F, 1, 1)), raises(0)], vec![sync().wait(Wait::on(F, 0, 1)), raises(1)]];
    let message = cycle(&schedule((1, 1), &[Claim::Strided, Claim::Ticket], lists));
    assert!(message.starts_with("cycle of 2 waits"), "{message}");
    assert!(message.contains("main/compute task 0 (sync) waits for f[1] of rank (0, 0) >= 1, has 0"), "{message}");
    assert!(message.contains("raised by rank (0, 0) main/intra_comm task 1 (sync)"), "{message}");
}

#[test]
fn a_wait_for_a_later_task_of_the_own_list_is_a_cycle_unless_it_lies_in_the_window() {
    let lists = || {
        let mut list = vec![sync().wait(Wait::on(F, 0, 1))];
        list.extend((1..8).map(|_| sync()));
        list.push(raises(0));
        vec![list]
    };
    assert!(cycle(&schedule((1, 1), &[Claim::Strided], lists())).starts_with("cycle of 1 waits"));
    cycle(&schedule((1, 1), &[Claim::Ticket], lists()));
    cycle(&schedule((1, 1), &[Claim::Ready { window: 8 }], lists()));
    assert!(findings(&schedule((1, 1), &[Claim::Ready { window: 9 }], lists())).is_empty());
}

#[test]
fn a_launch_that_an_earlier_one_waits_for_is_a_cycle() {
    let mut schedule =
        by_rank((1, 1), &[Claim::Strided], |_| vec![vec![vec![sync().wait(Wait::on(F, 0, 1))]], vec![vec![raises(0)]]]);
    schedule.launches.push(Launch { name: "second".into(), after: vec![], roles: roles(&[Claim::Strided]) });
    assert!(findings(&schedule).is_empty());
    schedule.launches[1].after = vec![0];
    cycle(&schedule);
}

/// Around the ring every rank waits for its left neighbour, which waits for its own: a cycle of all ranks.
#[test]
fn a_ring_in_which_everyone_waits_first_is_a_cycle() {
    let step = sync().wait(Wait::on(F, 0, 1)).signal(Signal::one(At::local(1), F, 0));
    let message = cycle(&schedule((1, 4), &[Claim::Ticket], vec![vec![step]]));
    assert!(message.contains("raised by rank (0, 3)"), "{message}");
}

/// The quotient by rotation has a cycle here: slot 0 on a rank waits for slot 0 next door. Levels make it end.
#[test]
fn stages_that_wait_for_the_neighbours_last_stage_end() {
    let stage = |s: u32| {
        let task = sync().signal(Signal::one(At::local(1), F, 0));
        if s == 0 { task } else { task.wait(Wait::on(F, 0, s)) }
    };
    let chained: Vec<Task> = (0..4).map(stage).collect();
    let found = findings(&schedule((1, 4), &[Claim::Ticket], vec![chained]));
    assert!(found.is_empty(), "{}", text(&found));
}

/// Per-rank lists: rank 0 sends to rank 1, which sends back; the reverse order on both waits for ever.
#[test]
fn asymmetric_lists_are_followed_rank_by_rank() {
    let build = |swap: bool| {
        let mut schedule = by_rank((1, 2), &[Claim::Ticket], move |rank| {
            let tell = sync().signal(Signal::one(At::local(1), F, 0));
            let hear = sync().wait(Wait::on(F, 0, 1));
            let first = rank.gpu == 0 && !swap;
            vec![vec![if first { vec![tell, hear] } else { vec![hear, tell] }]]
        });
        schedule.symmetry = Symmetry::NONE;
        schedule
    };
    assert!(findings(&build(false)).is_empty());
    let message = cycle(&build(true));
    assert!(message.starts_with("cycle of 2 waits"), "{message}");
}

#[test]
fn a_collective_behind_a_wait_for_its_own_list_is_a_cycle() {
    let meet = || {
        Task::new(Op::Collective {
            kind: tilewire_kernels::schedule::CollectiveKind::AllReduce,
            src: row(X, 0),
            dst: row(Y, 0),
        })
    };
    let build = |blocked: bool| {
        let mut schedule = by_rank((1, 2), &[Claim::Ticket, Claim::Ticket], move |rank| {
            // Rank 1 waits for a flag that it raises only after the collective.
            let (mut first, second) = (meet(), raises(0));
            if rank.gpu == 1 && blocked {
                first = first.wait(Wait::on(F, 0, 1));
                return vec![vec![vec![first, second], vec![]]];
            }
            vec![vec![vec![first, second], vec![sync().wait(Wait::on(F, 0, 1))]]]
        });
        schedule.symmetry = Symmetry::NONE;
        schedule
    };
    assert!(findings(&build(false)).is_empty());
    assert!(cycle(&build(true)).starts_with("cycle of 1"));
}

#[test]
fn a_wait_beyond_all_signals_is_unreachable() {
    let lists = vec![vec![raises(3), sync().wait(Wait::on(F, 3, 2))]];
    let found = findings(&schedule((1, 1), &[Claim::Ticket], lists));
    assert_eq!(found.len(), 1, "{}", text(&found));
    assert_eq!(
        found[0].to_string(),
        "fatal: rank (0, 0) main/compute task 1 (sync): waits for f[3] of rank (0, 0) >= 2, but all signals add up to 1"
    );
}

#[test]
fn a_wait_that_one_signal_too_many_satisfies_is_fatal() {
    let lists = vec![vec![raises(0), raises(0), sync().wait(Wait::on(F, 0, 1))]];
    let problem = fatal(&schedule((1, 1), &[Claim::Ticket], lists));
    assert!(matches!(problem, Problem::OverSatisfied { have: 2, need: 1, .. }), "{problem}");
}

#[test]
fn an_all_local_signal_counts_once_for_each_gpu() {
    let task = |level| vec![vec![sync().signal(Signal::one(At::AllLocal, F, 0)), sync().wait(Wait::on(F, 0, level))]];
    assert!(findings(&schedule((2, 4), &[Claim::Ticket], task(4))).is_empty());
    assert!(matches!(fatal(&schedule((2, 4), &[Claim::Ticket], task(3))), Problem::OverSatisfied { have: 4, .. }));
}

#[test]
fn an_arrival_word_belongs_to_one_put() {
    let lists = vec![vec![put(1, 0), put(1, 0), sync().wait(Wait::on(ARRIVED, 0, 1))]];
    let found = findings(&schedule((2, 1), &[Claim::Ticket], lists));
    assert!(found.iter().any(|f| matches!(f.problem, Problem::ArrivedAgain { have: 2, .. })), "{}", text(&found));
}

#[test]
fn a_family_has_one_kind_of_raiser() {
    let word = sync().signal(Signal::one(At::ME, ARRIVED, 1)).wait(Wait::on(ARRIVED, 0, 1));
    let lists = vec![vec![put(1, 0), word]];
    let problem = fatal(&schedule((2, 1), &[Claim::Ticket], lists));
    assert_eq!(problem.to_string(), "flag family arrived is raised by SMs and arriving puts");
}

#[test]
fn a_sent_counter_may_run_past_its_last_waiter() {
    let mut sends = vec![put(1, 0), put(1, 1), sync().wait(Wait::on(SENT, 0, 1))];
    for task in &mut sends {
        if let Op::Put { sent, .. } = &mut task.op {
            *sent = Some(Flag { family: SENT, slot: 0 });
        }
    }
    let found = findings(&schedule((2, 1), &[Claim::Ticket], vec![sends]));
    assert!(found.is_empty(), "{}", text(&found));
}

#[test]
fn a_family_that_nobody_waits_for_is_a_hazard() {
    let found = findings(&schedule((1, 1), &[Claim::Ticket], vec![vec![raises(0)]]));
    assert_eq!(text(&found), "hazard: flag family f is raised, but nobody waits for it");
}

#[test]
fn only_puts_leave_the_node() {
    assert_eq!(
        shape_of(sync().signal(Signal::one(At::node(1), F, 0))),
        ShapeError::SignalLeavesNode(Offset { dn: 1, dg: 0 })
    );
    let fill = Task::new(Op::Fill { dst: Place { at: At::node(1), region: row(Y, 0) } });
    assert_eq!(shape_of(fill), ShapeError::PlaceLeavesNode(Offset { dn: 1, dg: 0 }));
    assert!(matches!(shape_of(put(2, 0)), ShapeError::PutTarget(_)));
}

#[test]
fn regions_lie_in_their_buffers() {
    let error = shape_of(copy(row(X, 0), row(Y, 976)));
    assert_eq!(error, ShapeError::OutOfBuffer { buffer: "y".into(), end: 1040, bytes: 1024 });
    assert!(matches!(shape_of(copy(row(X, 0), row(BufferId(7), 0))), ShapeError::Unknown { index: 7, .. }));
}

#[test]
fn copies_have_equal_sizes_and_whole_pieces() {
    let error = shape_of(copy(row(X, 0), Region::contiguous(Y, 0, 1, 128)));
    assert_eq!(error, ShapeError::Size { what: "copy destination", have: 128, need: 64 });
    assert!(matches!(shape_of(copy(row(X, 8), row(Y, 0))), ShapeError::Multiple { have: 8, of: 16, .. }));
    assert!(matches!(
        shape_of(copy(Region::contiguous(X, 0, 1, 72), Region::contiguous(Y, 0, 1, 72))),
        ShapeError::Multiple { have: 72, of: 16, .. }
    ));
}

fn gemm(depth: u64, bk: u16) -> Task {
    Task::new(Op::GemmTile {
        a: Region::matrix(X, 0, 8, (depth * 2) as u32, depth * 2),
        b: Region::matrix(X, 0, depth as u32, 16, 16),
        outs: smallvec![tilewire_kernels::schedule::TileOut {
            place: Place::me(Region::matrix(Y, 0, 8, 16, 16)),
            mode: tilewire_kernels::schedule::WriteMode::Store,
        }],
        tile: [8, 8, bk],
        stages: 2,
        drain: tilewire_kernels::schedule::Drain::Overlap,
        main_loop: tilewire_kernels::schedule::MainLoop::Pipelined,
        notice: 0,
    })
}

#[test]
fn steps_are_whole_and_gates_divide_them() {
    assert_eq!(shape_of(gemm(32, 24)), ShapeError::Multiple { what: "depth K", have: 32, of: 24 });
    let gated = |count| gemm(32, 8).wait(Wait::run(F, 0, count, 1, 1, Gate::KStep));
    assert!(matches!(shape_of(gated(3)), ShapeError::Multiple { have: 4, of: 3, .. }));
    let step_on_sync = sync().wait(Wait::run(F, 0, 1, 1, 1, Gate::KStep));
    assert_eq!(shape_of(step_on_sync), ShapeError::Gate { gate: Gate::KStep, op: "sync" });
    let mut list: Vec<Task> = (0..4).map(raises).collect();
    list.push(gated(4));
    assert!(findings(&schedule((1, 1), &[Claim::Ticket], vec![list])).is_empty());
}

#[test]
fn slots_exist() {
    assert!(matches!(shape_of(raises(64)), ShapeError::Slot { slot: 64, slots: 64, .. }));
    let wait = sync().wait(Wait::run(F, 60, 3, 2, 1, Gate::Start));
    assert!(matches!(shape_of(wait), ShapeError::Slot { slot: 64, .. }));
    assert!(matches!(shape_of(put(1, 8)), ShapeError::Slot { slot: 8, slots: 8, .. }));
}

#[test]
fn gathers_stay_in_their_table_and_source() {
    let gather = |start, len| {
        Task::new(Op::GatherRows {
            table: TableSlice { start, len },
            src: X,
            dst: Region::contiguous(Y, 0, len, 16),
            in_flight_rows: 2,
            load_store_overlap: true,
            box_bytes: 0,
        })
    };
    assert!(findings(&schedule((1, 1), &[Claim::Ticket], vec![vec![gather(0, 2)]])).is_empty());
    assert_eq!(shape_of(gather(2, 2)), ShapeError::Table { start: 2, end: 4, entries: 3 });
    assert_eq!(shape_of(gather(2, 1)), ShapeError::OutOfBuffer { buffer: "x".into(), end: 1040, bytes: 1024 });
}

#[test]
fn a_ready_role_takes_few_start_waits() {
    let ready = |task: Task| match fatal(&schedule((1, 1), &[Claim::Ready { window: 4 }], vec![vec![task]])) {
        Problem::Shape(ShapeError::ReadyWait(what)) => what,
        other => panic!("{other}"),
    };
    let on = |slot| Wait::on(F, slot, 1);
    assert_eq!(ready(sync().wait(on(0)).wait(on(1)).wait(on(2))), "3 waits of 3 flags");
    assert_eq!(ready(sync().wait(Wait::run(F, 0, 33, 1, 1, Gate::Start))), "1 waits of 33 flags");
    assert_eq!(ready(gemm(32, 8).wait(Wait::run(F, 0, 1, 1, 1, Gate::Output))), "a Output wait");
}

#[test]
fn only_strides_begin_anew() {
    let of = |claim| schedule((1, 1), &[claim], vec![vec![sync(), Task { restart: true, ..sync() }]]);
    assert!(findings(&of(Claim::Strided)).is_empty());
    for claim in [Claim::Ticket, Claim::Ready { window: 4 }] {
        assert_eq!(fatal(&of(claim)), Problem::Shape(ShapeError::Restart));
    }
}

#[test]
fn roles_and_launches_are_well_formed() {
    let structure = |change: &dyn Fn(&mut Schedule)| {
        let mut schedule = schedule((1, 1), &[Claim::Ticket, Claim::Strided], vec![vec![], vec![]]);
        change(&mut schedule);
        match fatal(&schedule) {
            Problem::Structure(what) => what,
            other => panic!("{other}"),
        }
    };
    assert_eq!(
        structure(&|s| s.launches[0].roles[0].claim = Claim::Ready { window: 33 }),
        "main/compute has a window of 33 tasks, allowed 1 to 32"
    );
    assert_eq!(
        structure(&|s| s.launches[0].roles[0].recycle = Some(1)),
        "main/compute recycles into intra_comm, whose list is strided"
    );
    assert_eq!(structure(&|s| s.launches[0].roles[0].recycle = Some(0)), "main/compute recycles in a circle");
    assert_eq!(
        structure(&|s| s.launches[0].roles[0].recycle = Some(9)),
        "main/compute recycles into a role that does not exist"
    );
    assert_eq!(structure(&|s| s.launches[0].after = vec![0]), "launch main comes after launch 0, which is not earlier");
    assert_eq!(structure(&|s| s.launches[0].roles[1].lanes = 0), "main/intra_comm has no lanes");
}

#[test]
fn ctas_that_run_together_find_an_sm_each() {
    let split = RoleSplit { compute: 100, intra_comm: 20, inter_send: 10, inter_reduce: 2 };
    let launch = |name: &str, after: &[usize], ctas| Launch {
        name: name.into(),
        after: after.to_vec(),
        roles: vec![Role { ctas: CtaCount::Fixed(ctas), ..roles(&[Claim::Ticket]).remove(0) }],
    };
    let mut schedule = schedule((1, 1), &[Claim::Ticket; 4], vec![vec![], vec![], vec![], vec![]]);
    assert_eq!(check_residency(&schedule, &split, 132), None);
    let finding = check_residency(&schedule, &split, 78).expect("too many");
    assert_eq!(finding.to_string(), "fatal: main need 132 resident CTAs, the GPU has 78 SMs; take away 54");
    // A helper before it shares nothing with it, one beside it does; of a chain beside it only the widest counts.
    schedule.launches.insert(0, launch("zero", &[], 16));
    schedule.launches[1].after = vec![0];
    assert_eq!(check_residency(&schedule, &split, 132), None);
    schedule.launches.push(launch("beside", &[0], 3));
    schedule.launches.push(launch("then", &[2], 8));
    let finding = check_residency(&schedule, &split, 132).expect("too many");
    let Problem::TooManyCtas { launches, have: 140, .. } = finding.problem else { panic!("{finding}") };
    assert_eq!(launches, ["main", "then"]);
}

#[test]
fn a_collective_that_a_rank_does_not_have_never_runs() {
    let kind = tilewire_kernels::schedule::CollectiveKind::AllReduce;
    let mut schedule = by_rank((1, 2), &[Claim::Ticket], move |rank| {
        let meet = Task::new(Op::Collective { kind, src: row(X, 0), dst: row(Y, 0) });
        vec![vec![if rank.gpu == 0 { vec![meet] } else { vec![] }]]
    });
    schedule.symmetry = Symmetry::NONE;
    let problem = fatal(&schedule);
    assert!(matches!(problem, Problem::NeverRuns { left: 1 }), "{problem}");
}

#[test]
fn findings_serialise_with_their_values() {
    let lists = vec![vec![raises(3), sync().wait(Wait::on(F, 3, 2))]];
    let found = findings(&schedule((1, 1), &[Claim::Ticket], lists));
    let json = serde_json::to_value(&found[0]).expect("plain data");
    assert_eq!(json["severity"], "fatal");
    assert_eq!(json["at"]["task"], 1);
    assert_eq!(json["problem"]["unreachable"]["need"], 2);
    let shape = schedule((1, 1), &[Claim::Ticket], vec![vec![raises(64)]]);
    assert_eq!(serde_json::to_value(findings(&shape)).expect("plain data")[0]["problem"]["shape"]["slot"]["slot"], 64);
}

#[test]
fn more_flags_than_indices_are_told() {
    let mut schedule = schedule((1, 1), &[Claim::Ticket], vec![vec![]]);
    schedule.flags[0].slots = u32::MAX;
    assert!(matches!(fatal(&schedule), Problem::TooLarge { what: "flags", value } if value > u64::from(u32::MAX)));
}

#[test]
fn an_unordered_word_is_a_hazard_of_the_fabric() {
    let lists = || vec![vec![put(1, 0), sync().wait(Wait::on(ARRIVED, 0, 1))]];
    let mut schedule = schedule((2, 1), &[Claim::Ticket], lists());
    assert!(findings(&schedule).is_empty());
    schedule.fabric = Fabric::EfaSrd;
    let found = findings(&schedule);
    assert!(matches!(found[..], [Finding { problem: Problem::FabricOrder { .. }, .. }]), "{}", text(&found));
}

/// Every kernel claims a symmetry; one rank that differs in one wait, size or place is told.
#[test]
fn a_rank_that_differs_from_its_representative_is_told() {
    for case in cases(OptionSet::Tilewire, Fabric::IbRc) {
        let schedule = case.kernel.build(&case.spec).expect("a small case builds");
        let last = case.spec.cluster.rank(case.spec.cluster.ranks() - 1);
        if schedule.symmetry.representative(last) == last {
            continue;
        }
        let broken = changed(schedule, move |rank, _, _, tasks| {
            if rank == last
                && let Some(task) = tasks.last_mut()
            {
                task.signals.push(Signal::one(At::ME, F, 0));
            }
        });
        let found = check(&broken, None);
        assert!(
            found.iter().any(|finding| matches!(finding.problem, Problem::Asymmetric { .. })),
            "{}\n{}",
            case.name(),
            text(&found)
        );
    }
}

/// Case C24: 1 MB of data, then a flag as a write of its own. Nothing orders them on EFA; one reliable queue does.
#[test]
fn a_separate_flag_needs_one_ordered_queue() {
    let build = |fabric, queue| {
        let mut word = put(1, 0);
        if let Op::Put { publish, .. } = &mut word.op {
            *publish = Publish::SeparateWrite { queue };
        }
        let read = copy(row(Y, 0), row(Y, 512)).wait(Wait::on(ARRIVED, 0, 1));
        let mut schedule = schedule((2, 1), &[Claim::Ticket; 2], vec![vec![word], vec![read]]);
        schedule.fabric = fabric;
        report(&schedule, &Limits::hopper(132), None)
    };
    for (fabric, queue, clean) in
        [(Fabric::EfaSrd, 0, false), (Fabric::EfaSrd, 1, false), (Fabric::IbRc, 0, true), (Fabric::IbRc, 1, false)]
    {
        let report = build(fabric, queue);
        assert_eq!(report.is_clean(), clean, "{fabric} queue {queue}\n{report}");
        let landing = |f: &Finding| matches!(f.problem, Problem::Race { kind: RaceKind::PutLanding, .. });
        assert_eq!(report.findings.iter().any(landing), !clean, "{report}");
    }
}

/// Case C29: slots of 1.125 GiB. Slot 3 ends below 4 GiB plus one slot but starts at 3.375; slot 4 starts at 4.5 GiB.
#[test]
fn offsets_past_4_gib_do_not_wrap() {
    const SLOT: u64 = 9 << 27;
    let found = |slot: u64, wire| {
        let mut task = put(1, 0);
        if let Op::Put { dst, .. } = &mut task.op {
            dst.region.offset = slot * SLOT;
        }
        let mut schedule = schedule((2, 1), &[Claim::Ticket], vec![vec![task]]);
        schedule.buffers[1].bytes = 8 * SLOT;
        report_fatal(&schedule, &Limits { wire, ..Limits::hopper(132) }, None).findings
    };
    assert!(found(3, WireFormat::NARROW).is_empty());
    assert!(found(4, WireFormat::WIDE).is_empty());
    let message = text(&found(4, WireFormat::NARROW));
    assert!(message.contains("destination offset = 4831838271"), "{message}");
    assert!(message.contains("at most 4294967295"), "{message}");
    assert_eq!(narrow("offset", 3 * SLOT, 32), Ok(3 * SLOT));
    assert!(narrow("offset", 4 * SLOT, 32).is_err());
}

/// Case C31: a grid of 132 blocks on a GPU of the same architecture with 78 SMs.
#[test]
fn resident_ctas_are_counted_against_the_real_gpu() {
    let split = RoleSplit { compute: 132, ..RoleSplit::default() };
    let schedule = schedule((1, 1), &[Claim::Ticket], vec![vec![sync()]]);
    assert!(report(&schedule, &Limits::hopper(132), Some(&split)).is_clean());
    let report = report(&schedule, &Limits::hopper(78), Some(&split));
    assert!(matches!(report.findings[0].problem, Problem::TooManyCtas { have: 132, sms: 78, .. }), "{report}");
}

#[test]
fn what_a_machine_lacks_is_named() {
    let tile = gemm(32, 8);
    let small = Limits { shared_bytes: 100, ..Limits::hopper(132) };
    let one = schedule((2, 1), &[Claim::Ticket], vec![vec![tile, put(1, 0)]]);
    let message = text(&report_fatal(&one, &small, None).findings);
    assert!(message.contains("needs 640 bytes of shared memory of a CTA, there are 100"), "{message}");
    for limits in [
        Limits { queues: 0, ..Limits::hopper(132) },
        Limits { fifo_depth: 0, ..Limits::hopper(132) },
        Limits { in_flight: 0, ..Limits::hopper(132) },
    ] {
        let report = report_fatal(&one, &limits, None);
        assert_eq!(report.fatal, 1, "{report}");
        assert!(report.rules.iter().any(|result| (result.rule, result.verdict) == (Rule::Machine, Verdict::Fatal(1))));
    }
}

/// Offsets that only a later rank has, past the limit of the wire, are looked at too.
#[test]
fn the_last_ranks_offsets_are_narrowed_too() {
    let mut schedule = by_rank((2, 1), &[Claim::Ticket], |rank| {
        let mut task = put(1, 0);
        if let Op::Put { dst, .. } = &mut task.op {
            dst.region.offset = u64::from(rank.node) << 32;
        }
        vec![vec![vec![task]]]
    });
    schedule.buffers[1].bytes = 1 << 33;
    let limits = Limits { wire: WireFormat::NARROW, ..Limits::hopper(132) };
    let found = report_fatal(&schedule, &limits, None).findings;
    assert!(matches!(found[..], [Finding { problem: Problem::Width(_), .. }]), "{}", text(&found));
    assert_eq!(found[0].at.as_ref().map(|at| at.rank), Some(Rank { node: 1, gpu: 0 }));
}

/// Every rule says what it was asked of, and one that was not asked says so.
#[test]
fn a_report_says_what_was_not_looked_at() {
    let of = |report: &tilewire_kernels::check::Report, rule: Rule| {
        report.rules.iter().find(|result| result.rule == rule).expect("every rule has a line").verdict
    };
    let whole = schedule((1, 1), &[Claim::Ticket], vec![vec![raises(0), sync().wait(Wait::on(F, 0, 1))]]);
    let split = RoleSplit { compute: 1, ..RoleSplit::default() };
    let clean = report(&whole, &Limits::hopper(132), Some(&split));
    assert_eq!(clean.rules.iter().map(|result| result.rule).collect::<Vec<_>>(), Rule::ALL);
    assert!(clean.rules.iter().all(|result| result.verdict == Verdict::Ok), "{clean:?}");
    assert_eq!(of(&report(&whole, &Limits::hopper(132), None), Rule::Residency), Verdict::NotChecked);
    assert_eq!(of(&report_fatal(&whole, &Limits::hopper(132), None), Rule::Races), Verdict::NotChecked);
    // What comes after a fatal finding is not called clean.
    let stuck = schedule((1, 1), &[Claim::Ticket], vec![vec![sync().wait(Wait::on(F, 0, 1))]]);
    let stuck = report(&stuck, &Limits::hopper(132), None);
    assert_eq!((of(&stuck, Rule::Flags), of(&stuck, Rule::Races)), (Verdict::Fatal(1), Verdict::NotChecked));
    let bad = report(&schedule((1, 1), &[Claim::Ticket], vec![vec![raises(64)]]), &Limits::hopper(132), None);
    let verdicts = [Rule::Tasks, Rule::Flags, Rule::Progress, Rule::Symmetry].map(|rule| of(&bad, rule));
    assert_eq!(verdicts, [Verdict::Fatal(1), Verdict::NotChecked, Verdict::NotChecked, Verdict::NotChecked]);
}

//! Structure of `ring_attention`: counts, bytes, symmetry, errors.

use tilewire_kernels::check::{Severity, check};
use tilewire_kernels::schedule::{Access, At, Claim, Op};
use tilewire_kernels::{Cluster, Fabric, Kernel, OptionSet, Problem, Rank, RoleKind, Schedule, Spec, kernel};

const ME: Rank = Rank { node: 0, gpu: 0 };

fn ring() -> &'static dyn Kernel {
    kernel("ring_attention").expect("registered")
}

/// The published shape with `rows` positions per rank.
fn published(rows: u64, cluster: Cluster) -> Problem {
    Problem::Attention { seq: rows * cluster.ranks() as u64, batch: 4, heads: 16, head_dim: 128 }
}

fn spec(set: OptionSet, problem: Problem, cluster: Cluster, options: &[(&str, &str)]) -> Spec {
    let mut all = ring().options(set, &problem, cluster);
    for (name, value) in options {
        all.set(name, value).expect("a legal value");
    }
    Spec { problem, cluster, fabric: Fabric::EfaSrd, options: all }
}

fn build(set: OptionSet, problem: Problem, cluster: Cluster, options: &[(&str, &str)]) -> Schedule {
    ring().build(&spec(set, problem, cluster, options)).expect("a legal shape")
}

/// Bytes that rank (0, 0) sends to other nodes and writes to other GPUs of its node.
fn bytes_out(schedule: &Schedule) -> (u64, u64) {
    let (mut wire, mut nvlink) = (0, 0);
    for (launch, role) in schedule.role_indices() {
        schedule.for_each_task(ME, launch, role, |task| {
            task.op.for_each_access(|at, region, access| match (at, access) {
                (At::Offset(offset), Access::Write) if offset.dn != 0 => wire += region.bytes(),
                (At::Offset(offset), Access::Write) if offset.dg != 0 => nvlink += region.bytes(),
                _ => {}
            });
        });
    }
    (wire, nvlink)
}

fn count(schedule: &Schedule, prefix: &str, kind: RoleKind) -> Vec<usize> {
    let launches = schedule
        .role_indices()
        .filter(|&(l, r)| schedule.launches[l].name.starts_with(prefix) && schedule.launches[l].roles[r].kind == kind);
    launches.map(|(l, r)| schedule.tasks(ME, l, r).len()).collect()
}

const SHAPES: [(u64, usize, usize, usize); 5] = [
    (768, 256, 128, 96),
    (1536, 512, 256, 192),
    (3072, 1024, 512, 384),
    (6144, 2048, 1024, 768),
    (12_288, 4096, 2048, 1536),
];

#[test]
fn published_launches_and_counts_are_those_of_the_published_kernel() {
    for nodes in [1, 2, 4] {
        let cluster = Cluster { nodes, gpus_per_node: 8 };
        for (rows, blocks, merges, puts) in SHAPES {
            let schedule = build(OptionSet::Published, published(rows, cluster), cluster, &[]);
            // 26 N - 1; one node has no peer to send to and nothing to wait for before the first stage.
            let helpers = if nodes > 1 { 0 } else { 2 };
            assert_eq!(schedule.launches.len(), 26 * usize::from(nodes) - 1 - helpers);
            let stages = 8 * usize::from(nodes);
            assert_eq!(count(&schedule, "stage", RoleKind::Compute), vec![blocks; stages]);
            assert_eq!(count(&schedule, "merge", RoleKind::Compute), vec![merges; stages - 1]);
            assert_eq!(count(&schedule, "land", RoleKind::InterReduce), vec![puts; usize::from(nodes) - 1]);
            let sent = count(&schedule, "send", RoleKind::InterSend);
            assert_eq!(sent.iter().sum::<usize>(), puts * (usize::from(nodes) - 1));
            let kv = 32_768 * rows;
            let nodes = u64::from(nodes);
            assert_eq!(bytes_out(&schedule), ((nodes - 1) * kv, nodes * 8 * kv));
        }
    }
}

#[test]
fn true_ring_sends_what_it_must_and_no_more() {
    for (nodes, gpus) in [(1, 8), (2, 8), (4, 8), (2, 1), (1, 1), (3, 2)] {
        let cluster = Cluster { nodes, gpus_per_node: gpus };
        for (rows, blocks, ..) in SHAPES {
            let schedule = build(OptionSet::Tilewire, published(rows, cluster), cluster, &[]);
            assert_eq!(schedule.launches.len(), 1);
            assert_eq!(count(&schedule, "main", RoleKind::Compute), vec![blocks * cluster.ranks()]);
            let (nodes, gpus, kv) = (u64::from(nodes), u64::from(gpus), 32_768 * rows);
            assert_eq!(bytes_out(&schedule), ((nodes - 1) * kv, nodes * (gpus - 1) * kv));
            let kinds: Vec<RoleKind> = schedule.launches[0].roles.iter().map(|role| role.kind).collect();
            assert_eq!(kinds.contains(&RoleKind::IntraComm), gpus > 1);
            assert_eq!(kinds.contains(&RoleKind::InterSend), nodes > 1);
            assert_eq!(schedule.useful_flops, 32_768 * rows * rows * nodes * gpus);
        }
    }
}

/// The largest published case stays the size that was planned for: 89 k tasks per rank.
#[test]
fn true_ring_task_counts_at_the_largest_published_shape() {
    let cluster = Cluster { nodes: 2, gpus_per_node: 8 };
    let schedule = build(OptionSet::Tilewire, published(12_288, cluster), cluster, &[]);
    let counts: Vec<usize> = (0..3).map(|role| schedule.tasks(ME, 0, role).len()).collect();
    assert_eq!(counts, [65_536, 21_504, 1536]);
}

#[test]
fn ranks_share_their_tasks() {
    let cluster = Cluster { nodes: 2, gpus_per_node: 4 };
    for set in [OptionSet::Published, OptionSet::Tilewire] {
        let schedule = build(set, published(768, cluster), cluster, &[]);
        assert!(schedule.symmetry.is_full());
        for (launch, role) in schedule.role_indices() {
            let mine = schedule.tasks(ME, launch, role);
            for rank in cluster.iter() {
                assert_eq!(schedule.tasks(rank, launch, role), mine);
            }
        }
    }
}

/// Credits across nodes are puts of no bytes: one for each head and each landing use that is followed by another.
#[test]
fn credits_between_nodes_first_matter_at_four() {
    for (nodes, uses) in [(2, 0), (3, 0), (4, 1), (6, 3)] {
        let cluster = Cluster { nodes, gpus_per_node: 2 };
        let schedule = build(OptionSet::Tilewire, published(768, cluster), cluster, &[]);
        let credits = schedule.tasks(ME, 0, 2).into_iter().filter(|task| match &task.op {
            Op::Put { dst, .. } => dst.region.bytes() == 0,
            _ => false,
        });
        assert_eq!(credits.count(), uses * 64, "{nodes} nodes");
    }
}

#[test]
fn the_checker_finds_nothing() {
    let small = [("tile_q", "8"), ("tile_kv", "8"), ("chunk_rows", "16")];
    for (nodes, gpus) in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2), (7, 3)] {
        let cluster = Cluster { nodes, gpus_per_node: gpus };
        let problem = Problem::Attention { seq: 32 * cluster.ranks() as u64, batch: 2, heads: 3, head_dim: 16 };
        for set in [OptionSet::Published, OptionSet::Tilewire] {
            let schedule = build(set, problem, cluster, &small);
            let findings = check(&schedule, None);
            let fatal = findings.iter().find(|f| f.severity == Severity::Fatal || set == OptionSet::Tilewire);
            assert!(fatal.is_none(), "{cluster} {}: {}", set.name(), findings[0]);
        }
    }
}

#[test]
fn big_published_shapes_have_no_fatal_finding() {
    let cluster = Cluster { nodes: 2, gpus_per_node: 8 };
    for set in [OptionSet::Published, OptionSet::Tilewire] {
        let schedule = build(set, published(3072, cluster), cluster, &[("efa_publish", "immediate")]);
        let findings = check(&schedule, None);
        assert!(findings.is_empty(), "{}", findings[0]);
    }
}

#[test]
fn persistent_roles_scan_and_compute_takes_tickets() {
    let cluster = Cluster { nodes: 2, gpus_per_node: 2 };
    let schedule = build(OptionSet::Tilewire, published(768, cluster), cluster, &[]);
    let claims: Vec<Claim> = schedule.launches[0].roles.iter().map(|role| role.claim).collect();
    assert_eq!(claims, [Claim::Ticket, Claim::Ready { window: 32 }, Claim::Ready { window: 32 }]);
    assert!(schedule.launches[0].roles[1..].iter().all(|role| role.recycle == Some(0)));
}

#[test]
fn errors_name_the_division_that_fails_and_the_nearest_legal_value() {
    let cluster = Cluster { nodes: 2, gpus_per_node: 8 };
    let refuse = |problem, options: &[(&str, &str)]| {
        ring().build(&spec(OptionSet::Tilewire, problem, cluster, options)).expect_err("illegal").to_string()
    };
    let shape = |seq, batch, heads, head_dim| Problem::Attention { seq, batch, heads, head_dim };
    let cases = [
        // 16 ranks times lcm(192, 128).
        (shape(10_000, 4, 16, 128), "seq = 10000 must be a positive multiple of 6144", "nearest legal: 6144 or 12288"),
        (shape(0, 4, 16, 128), "seq = 0", "nearest legal: 6144"),
        (shape(12_288, 0, 16, 128), "batch = 0", "nearest legal: 1"),
        (shape(12_288, 4, 16, 100), "head_dim = 100 must be a positive multiple of 8", "nearest legal: 96 or 104"),
        (shape(12_288, 4, 16, u64::MAX / 8 * 8), "head_dim", "at most 4096"),
        (shape(12_288, u64::MAX, 16, 128), "rows of a rank", "at most 4294967295"),
        (shape(u64::MAX / 6144 * 6144, 4, 16, 128), "rows of a rank", "at most 4294967295"),
    ];
    for (problem, what, allowed) in cases {
        let error = refuse(problem, &[]);
        assert!(error.contains(what) && error.contains(allowed), "{error}");
    }
    let error = refuse(shape(12_288, 4, 16, 128), &[("chunk_rows", "200")]);
    assert!(error.contains("chunk_rows = 200 must be a positive multiple of 128"), "{error}");
    let error = refuse(shape(12_288, 4, 16, 128), &[("chunk_rows", "512")]);
    assert!(error.contains("seq = 12288 must be a positive multiple of 8192"), "{error}");
}

//! Suspected hazards of the published kernels, from their history and source comments, each put to the checker.
//!
//! `suspected.txt` beside this file is what comes out. A verdict is computed, never written down; only what lies outside
//! of a Schedule has a reason instead. Each witness is also shown by the command that stands with it.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use small::changed;
use std::fmt::Write as _;
use tilewire_kernels::check::{Finding, Limits, Problem, RaceKind, Severity, WireFormat, report, report_fatal};
use tilewire_kernels::{Cluster, Fabric, Kernel, OptionSet, Schedule, Spec, kernel};

/// The published schedule of the smallest shape, or of this one.
fn published(name: &str, (nodes, gpus_per_node): (u16, u16), fabric: Fabric) -> Schedule {
    let cluster = Cluster { nodes, gpus_per_node };
    let kernel = kernel(name).expect("a kernel");
    let case = small::case(kernel, OptionSet::Published, cluster, fabric).expect("a small case");
    kernel.build(&case.spec).expect("a small case builds")
}

fn sized(name: &str, size: u64, nodes: u16, options: &[(&str, &str)]) -> Schedule {
    use tilewire_kernels::Problem;
    let kernel: &dyn Kernel = kernel(name).expect("a kernel");
    let cluster = Cluster { nodes, gpus_per_node: 8 };
    let ranks = cluster.ranks() as u64;
    let problem = match name {
        "ag_gemm" => Problem::Gemm { m: size, n: size / ranks, k: size },
        "moe_dispatch_gemm" => Problem::Moe { tokens: size, hidden: 7168, inter: 2048, topk: 8, experts: 256 },
        "ring_attention" => Problem::Attention { seq: size, batch: 4, heads: 16, head_dim: 128 },
        _ => Problem::Gemm { m: size, n: size, k: size / ranks },
    };
    let mut chosen = kernel.options(OptionSet::Published, &problem, cluster);
    for (name, value) in options {
        chosen.set(name, value).expect("an option");
    }
    let spec = Spec { problem, cluster, fabric: Fabric::EfaSrd, options: chosen };
    kernel.build(&spec).expect("a published shape builds")
}

/// The same schedule, with the signals of ops of this name raised before their writes are visible.
fn early(schedule: Schedule, op: &'static str) -> Schedule {
    changed(schedule, move |_, _, _, tasks| {
        for task in tasks.iter_mut().filter(|task| task.op.name() == op) {
            task.signals.iter_mut().for_each(|signal| signal.early = true);
        }
    })
}

/// What the checker says first of a kind of race in a buffer.
fn race(schedule: &Schedule, kind: RaceKind, buffer: &str) -> Option<Finding> {
    let of =
        |problem: &Problem| matches!(problem, Problem::Race { kind: k, buffer: b, .. } if *k == kind && b == buffer);
    report(schedule, &Limits::hopper(132), None).findings.into_iter().find(|finding| of(&finding.problem))
}

/// A fatal finding of the linear rules.
fn fatal(schedule: &Schedule, wire: WireFormat) -> Option<Finding> {
    let limits = Limits { wire, ..Limits::hopper(132) };
    report_fatal(schedule, &limits, None).findings.into_iter().find(|finding| finding.severity == Severity::Fatal)
}

/// A list of suspicions as text.
struct List(String);

impl List {
    fn add(&mut self, claim: &str, verdict: &str, lines: &[&str]) {
        let _ = writeln!(self.0, "{claim}\n  {verdict}");
        for line in lines {
            let _ = writeln!(self.0, "  {line}");
        }
        let _ = writeln!(self.0);
    }

    /// Confirmed where there is a finding, else refuted.
    fn ask(&mut self, claim: &str, command: &str, found: Option<Finding>) {
        self.ask_if(claim, "", command, found);
    }

    /// As [`List::ask`], of a schedule that is not the published one but what a reading of its source says.
    fn ask_if(&mut self, claim: &str, reading: &str, command: &str, found: Option<Finding>) {
        let reading = if reading.is_empty() { String::new() } else { format!(", if {reading}") };
        match found {
            Some(finding) => {
                let text = finding.to_string();
                let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
                self.add(claim, &format!("CONFIRMED{reading}: {command}"), &lines);
            }
            None => self.add(claim, &format!("REFUTED as a property of the schedule{reading}: {command}"), &[]),
        }
    }

    fn out_of_reach(&mut self, claim: &str, why: &str) {
        self.add(claim, "OUT OF REACH", &[why]);
    }
}

fn suspected() -> String {
    let mut list = List(
        "Suspected hazards of the published kernels, put to their option sets as they are written down in kernels/src.\n\
         Nothing here was run on hardware.\n\n"
            .into(),
    );
    let check = |kernel: &str| format!("tilewire check --kernel {kernel} --options published");
    let narrow = |bits| WireFormat { offset_bits: bits, ..WireFormat::WIDE };

    list.ask(
        "ring_attention: the own K and V are overwritten while puts still read them",
        &check("ring_attention"),
        race(&published("ring_attention", (2, 2), Fabric::EfaSrd), RaceKind::PutSource, "k"),
    );
    list.ask(
        "gemm_rs: a chunk is signalled ready before the adds into it are visible",
        &check("gemm_rs"),
        race(&published("gemm_rs", (2, 2), Fabric::EfaSrd), RaceKind::EarlyRead, "staging"),
    );
    list.ask(
        "gemm_rs: tiles are added into the staging of a neighbour whose zeroing launch has not ended",
        &check("gemm_rs"),
        race(&published("gemm_rs", (2, 2), Fabric::EfaSrd), RaceKind::Writers, "staging"),
    );
    list.ask(
        "all on EFA, here gemm_ar: the flag is a write of its own and may be seen before the data",
        &check("gemm_ar"),
        race(&published("gemm_ar", (2, 2), Fabric::EfaSrd), RaceKind::PutLanding, "landing"),
    );
    list.ask(
        "gemm_ar on ConnectX-7: the same with data and flag on one reliable queue",
        &check("gemm_ar"),
        race(&published("gemm_ar", (2, 2), Fabric::IbRc), RaceKind::PutLanding, "landing"),
    );
    list.ask_if(
        "gemm_ar: the storer waits until shared memory has been read, not until its tile is visible, then signals",
        "its signals are early (the published option set here takes them not to be)",
        "kernels/tests/suspected.rs",
        race(&early(published("gemm_ar", (2, 2), Fabric::IbRc), "gemm_tile"), RaceKind::EarlyRead, "partial"),
    );
    list.ask_if(
        "ag_gemm: no system fence between a multicast store and its signal (fixed upstream on 2026-05-24)",
        "the signals of copies are early (the published option set here is as after the fix)",
        "kernels/tests/suspected.rs",
        race(&early(published("ag_gemm", (1, 2), Fabric::IbRc), "copy"), RaceKind::EarlyRead, "gathered"),
    );
    list.ask(
        "ag_gemm and gemm_rs: 32-bit offsets wrap at m = 49152 on four nodes",
        "the landing slots have a buffer of their own here and end below 4 GiB; with slots of 1.125 GiB the checker \
         refuses the fifth (case C29, kernels/tests/check.rs)",
        ["ag_gemm", "gemm_rs"].into_iter().find_map(|name| fatal(&sized(name, 49_152, 4, &[]), narrow(32))),
    );
    list.ask(
        "moe_dispatch_gemm and ring_attention: offsets in signed 32-bit integers, at the largest published shapes",
        "tilewire check --offset-bits 31",
        [("moe_dispatch_gemm", 131_072), ("ring_attention", 196_608)]
            .into_iter()
            .find_map(|(name, size)| fatal(&sized(name, size, 2, &[]), narrow(31))),
    );
    list.ask(
        "gemm_ar: with chunks of 32 tiles a receiver waits for ever at m = 32768 on four nodes",
        "flags and order are sound, so the cause is not among them",
        fatal(&sized("gemm_ar", 32_768, 4, &[("chunk_tiles", "32")]), WireFormat::WIDE),
    );
    list.ask(
        "ag_gemm: hangs at m = 57344 on four nodes",
        "flags and order are sound, so the cause is not among them",
        fatal(&sized("ag_gemm", 57_344, 4, &[]), WireFormat::WIDE),
    );
    for (claim, why) in [
        (
            "ag_gemm: loader and storer share a stage of shared memory",
            "An op is one piece: what its warps do to shared memory is not in a Schedule; `drain` only costs time.",
        ),
        (
            "all on ConnectX-7: memory is registered with relaxed ordering, so a flag may pass its data on PCIe",
            "Fabric ib-rc is taken to order a queue up to the receiver's memory; nothing in a Schedule could tell.",
        ),
        (
            "all on EFA: one 4-byte staging slot is the source of many flag writes",
            "An arrival word has no source memory in a Schedule.",
        ),
        (
            "gemm_rs: with several proxy threads a command reaches a thread that does not own its queue and is dropped",
            "Threads are the transport's; the put that is missing then is a fatal finding (mutation `drop a task`).",
        ),
        (
            "all: flags are reset by the host while a peer is in the next epoch; arrivals of one launch satisfy the next",
            "Not representable: two banks, and a run ends when its puts are noticed (hw/tests/rings_and_runs.rs). The \
             simulator can reproduce it: --protocol published.",
        ),
        (
            "all on EFA: the barrier's write overtakes writes of sibling queues",
            "The barrier between runs is not in a Schedule; inside one, a word on another queue is a hazard, as above.",
        ),
        (
            "ring_attention: 2 * chunks must not exceed the warps, and setmaxnreg must not over-subscribe registers",
            "Both are inside a CTA.",
        ),
    ] {
        list.out_of_reach(claim, why);
    }
    list.0
}

/// The snapshot stands beside this file; what a change to it means is for its reader to say.
#[test]
fn suspected_hazards_are_as_in_the_snapshot() {
    let found = suspected();
    assert!(found == include_str!("suspected.txt"), "suspected.txt should be:\n{found}");
}

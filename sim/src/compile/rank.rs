//! The program of one rank from its schedule.

use super::cost::Compiler;
use super::hash::FastMap;
use super::key::cost_key;
use super::panels::Panels;
use super::{
    Flow, LaunchC, NONE, Program, PublishC, PutC, ResourceKind, RoleC, SPAN, SignalC, SpanC, TaskC, Times, WaitC, Work,
};
use crate::bound::main_ps;
use crate::engine::UNWATCHED;
use smallvec::SmallVec;
use std::collections::HashMap;
use tilewire_kernels::schedule::{At, Claim, Drain, Gate, Op, Publish};
use tilewire_kernels::{Offset, Rank, RoleKind, Schedule};

/// A rank's program but for what follows from the costs of its tasks: see [`account`].
pub(super) fn compile_rank(
    compiler: &mut Compiler<'_>,
    schedule: &Schedule,
    rank: Rank,
    launches: &[LaunchC],
    family_base: &[u32],
    raisers: &mut [(Option<RoleKind>, bool)],
    dropped: &mut [bool],
) -> Program {
    let mut program = Program::default();
    let mut span_of: FastMap<SpanC, u32> = FastMap::default();
    let table = schedule.source.table(rank);
    for (l, launch) in schedule.launches.iter().enumerate() {
        for (r, role) in launch.roles.iter().enumerate() {
            let first = program.tasks.len() as u32;
            let mut panels = Panels::new(compiler.machine);
            let mut restarts = Vec::new();
            let timed = !launches[l].before_clock;
            let flag = |f: tilewire_kernels::schedule::Flag| family_base[usize::from(f.family.0)] + f.slot;
            schedule.for_each_task(rank, l, r, |task| {
                let key = cost_key(&task, &table, role, &mut panels);
                let cost = compiler.cost(launches[l].roles.start + r, key);
                let wait0 = program.waits.len() as u32;
                let mut counts = [0_u8; 3];
                for (i, gate) in [Gate::Start, Gate::KStep, Gate::Output].into_iter().enumerate() {
                    for wait in task.waits.iter().filter(|w| w.gate == gate) {
                        counts[i] += 1;
                        let (flag, level) = (flag(wait.flag), wait.at_least);
                        let on = if wait.count == 1 {
                            flag
                        } else {
                            let span = SpanC { flag, count: wait.count, stride: wait.stride, level };
                            SPAN | *span_of.entry(span).or_insert_with(|| {
                                program.spans.push(span);
                                program.spans.len() as u32 - 1
                            })
                        };
                        program.waits.push(WaitC { on, level });
                    }
                }
                let signal0 = program.signals.len() as u32;
                let raise = |raisers: &mut [(Option<RoleKind>, bool)], dropped: &mut [bool], family: usize, put| {
                    raisers[family].0 = raisers[family].0.or(Some(role.kind));
                    raisers[family].1 |= put;
                    dropped[family] |= put || role.kind != RoleKind::Compute;
                };
                // Those that are raised early come first.
                let those = |early: bool| task.signals.iter().filter(move |signal| signal.early == early);
                let mut early = 0;
                for signal in those(true).chain(those(false)) {
                    raise(raisers, dropped, usize::from(signal.flag.family.0), false);
                    let targets: SmallVec<[Offset; 8]> = match signal.to {
                        At::Offset(offset) => SmallVec::from_slice(&[offset]),
                        At::AllLocal => compiler.node().collect(),
                    };
                    for offset in targets {
                        program.signals.push(SignalC {
                            flag: flag(signal.flag),
                            add: signal.add,
                            dg: compiler.fold(offset).dg,
                            remote: compiler.over_nvlink(offset),
                        });
                        early += u8::from(signal.early);
                    }
                }
                if let Op::Collective { kind, src, dst } = &task.op {
                    let bytes = compiler.node_bytes(*kind, src.bytes().max(dst.bytes()));
                    program.put_bytes += if timed { bytes } else { 0 };
                }
                let mut put = NONE;
                if let Op::Put { src, dst, queue, publish, arrived, sent } = &task.op {
                    let At::Offset(offset) = dst.at else { unreachable!("a put names one rank") };
                    raise(raisers, dropped, usize::from(arrived.family.0), true);
                    if let Some(sent) = sent {
                        raise(raisers, dropped, usize::from(sent.family.0), true);
                    }
                    let bytes = if dst.region.bytes() == 0 { 0 } else { src.bytes() };
                    let rail = (u32::from(*queue) % compiler.rails) as u16;
                    // Behind the data in its queue a flag is posted with it, and too short to be seen.
                    let messages = if matches!(publish, Publish::SeparateWrite { .. }) && bytes > 0 { 2 } else { 1 };
                    let flow = compiler.put_flow(offset, rail, bytes, messages);
                    let folded = compiler.fold(offset);
                    put = program.puts.len() as u32;
                    program.put_bytes += if timed { bytes } else { 0 };
                    program.puts.push(PutC {
                        dn: folded.dn,
                        dg: folded.dg,
                        queue: *queue,
                        publish: match publish {
                            Publish::Immediate => PublishC::Proxy,
                            Publish::SameQueueWrite => PublishC::Nic,
                            Publish::SeparateWrite { .. } => PublishC::NicToHost,
                        },
                        flow,
                        arrived: flag(*arrived),
                        sent: sent.map_or(NONE, flag),
                        bytes,
                    });
                }
                if task.restart {
                    restarts.push(program.tasks.len() as u32 - first);
                }
                program.tasks.push(TaskC {
                    wait0,
                    signal0,
                    cost,
                    waits: counts,
                    signals: (program.signals.len() as u32 - signal0) as u8,
                    early,
                    put,
                });
            });
            let one_per_block = role.ctas.spared().is_some() && role.claim == Claim::Ticket;
            program.roles.push(RoleC {
                kind: role.kind,
                ctas: role.ctas,
                lanes: role.lanes,
                claim: role.claim,
                recycle: role.recycle.map_or(NONE, |r| (launches[l].roles.start + r) as u32),
                launch: l as u32,
                first,
                tasks: program.tasks.len() as u32 - first,
                restarts,
                work_ps: 0,
                collective: false,
                block_ps: compiler.take_ps(one_per_block, role.claim),
            });
        }
    }
    spread_lone_spans(&mut program);
    program
}

/// Flags of a run that is waited for one by one at most.
const SPREAD_FLAGS: u32 = 32;

/// Waits of a gate whose runs are waited for one by one at most; with [`SPREAD_FLAGS`], a byte counts the flags.
const SPREAD_WAITS: u8 = 7;

/// Waits for the flags of a run one by one where only one task waits for it: nobody shares what a span remembers. A step
/// needs to know its place in the run.
fn spread_lone_spans(program: &mut Program) {
    let mut tasks_of = vec![0_u32; program.spans.len()];
    for wait in program.waits.iter().filter(|wait| wait.on & SPAN != 0) {
        tasks_of[(wait.on & !SPAN) as usize] += 1;
    }
    let (waits, spans) = (std::mem::take(&mut program.waits), std::mem::take(&mut program.spans));
    let mut number = vec![NONE; spans.len()];
    let mut waits = waits.into_iter();
    for task in &mut program.tasks {
        task.wait0 = program.waits.len() as u32;
        for (gate, count) in [Gate::Start, Gate::KStep, Gate::Output].into_iter().zip(&mut task.waits) {
            let first = program.waits.len();
            for wait in waits.by_ref().take(usize::from(*count)) {
                if wait.on & SPAN == 0 {
                    program.waits.push(wait);
                    continue;
                }
                let id = (wait.on & !SPAN) as usize;
                let lone = tasks_of[id] == 1 && spans[id].count <= SPREAD_FLAGS && *count <= SPREAD_WAITS;
                if lone && gate != Gate::KStep {
                    program.waits.extend(spans[id].flags().map(|flag| WaitC { on: flag, level: wait.level }));
                    continue;
                }
                if number[id] == NONE {
                    number[id] = program.spans.len() as u32;
                    program.spans.push(spans[id]);
                }
                program.waits.push(WaitC { on: SPAN | number[id], ..wait });
            }
            *count = (program.waits.len() - first) as u8;
        }
    }
}

/// Sums over a program's tasks, once their costs are known; totals of those that run while the clock does.
pub(super) fn account(program: &mut Program, compiler: &Compiler<'_>, times: &Times, launches: &[LaunchC]) {
    let mut totals: HashMap<ResourceKind, u128> = HashMap::new();
    // By symmetry, others take from the own rank's resources what it takes from theirs.
    let mut add = |flow: Flow, count: u64| {
        if flow.class == NONE {
            return;
        }
        for &(_, kind, rate) in &compiler.classes[flow.class as usize] {
            *totals.entry(kind).or_default() += u128::from(rate) * u128::from(flow.work) * u128::from(count);
        }
    };
    let mut counts = vec![0_u64; compiler.costs.len()];
    for role in &mut program.roles {
        let timed = !launches[role.launch as usize].before_clock;
        counts.fill(0);
        for task in &program.tasks[role.first as usize..(role.first + role.tasks) as usize] {
            counts[usize::from(task.cost)] += 1;
            if timed && task.put != NONE {
                add(program.puts[task.put as usize].flow, 1);
            }
        }
        for (record, &count) in compiler.costs.iter().zip(&counts).filter(|(_, count)| **count > 0) {
            let form = record.forms[0];
            let main = form.fixed + form.step * u64::from(record.steps);
            // A store that overlaps the next tile holds its CTA for no time of its own.
            let overlapped = record.work == Work::Tile && record.drain == Drain::Overlap;
            let held = main_ps(times, record) + if overlapped { 0 } else { form.out.work };
            role.work_ps += u128::from(held) * u128::from(count);
            role.collective |= record.work == Work::Collective;
            program.longest_ps = program.longest_ps.max(main + form.out.work);
            if timed {
                add(Flow { class: form.main, work: main }, count);
                add(form.out, count);
            }
        }
    }
    program.totals = totals.into_iter().map(|(kind, total)| (kind, (total / 1_000_000_000_000) as u64)).collect();
    program.totals.sort_unstable();
}

/// Finds the flags that need one event in a run instead of one per signal.
pub(super) fn set_countdowns(
    programs: &mut [Program],
    schedule: &Schedule,
    representatives: &[Rank],
    family_base: &[u32],
) {
    let flags = family_base[family_base.len() - 1] as usize;
    let cluster = schedule.cluster;
    let index_of = |rank: Rank| {
        let representative = schedule.symmetry.representative(rank);
        representatives.iter().position(|&r| r == representative).unwrap_or(0)
    };
    let mut adds = vec![vec![0_u64; flags]; programs.len()];
    for (from, program) in programs.iter().enumerate() {
        let local: Vec<usize> = (0..cluster.gpus_per_node)
            .map(|dg| index_of(cluster.at(representatives[from], Offset::local(dg))))
            .collect();
        for signal in &program.signals {
            // A folded offset means "the representative", which is the only entry that matters then.
            adds[local[usize::from(signal.dg)]][signal.flag as usize] += u64::from(signal.add);
        }
        for put in &program.puts {
            let to = index_of(cluster.at(representatives[from], Offset { dn: put.dn, dg: put.dg }));
            adds[to][put.arrived as usize] += 1;
            if put.sent != NONE {
                adds[from][put.sent as usize] += 1;
            }
        }
    }
    for (program, adds) in programs.iter_mut().zip(adds) {
        let mut level = vec![0_u32; flags];
        let single = program.waits.iter().filter(|wait| wait.on & SPAN == 0).map(|wait| program.awaited(wait));
        for run in single.chain(program.spans.iter().copied()) {
            for flag in run.flags() {
                let level = &mut level[flag as usize];
                *level = if *level == 0 || *level == run.level { run.level } else { u32::MAX };
            }
        }
        for (level, adds) in level.iter_mut().zip(adds) {
            *level = match *level {
                0 => UNWATCHED,
                one if u64::from(one) == adds => one,
                _ => 0,
            };
        }
        program.countdown = level;
    }
}

//! The reduced forms of a program: its compute alone, its communication alone.
//!
//! They are what the simulator runs behind `compute_only_us` and `comm_only_us`, so that both sides of a comparison mean
//! the same thing.

use crate::lower::{DeviceTask, Program, code};
use std::collections::BTreeSet;
use tilewire_kernels::RoleKind;

/// Which part of a program is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Everything.
    Whole,
    /// The compute role's tasks; waits on flags that a removed task or a put raises are dropped.
    ComputeOnly,
    /// All but the arithmetic: a tile keeps its waits and signals. In mirror mode no write of a tile leaves the GPU.
    CommOnly,
}

/// The program with only this part of its work.
#[must_use]
pub fn reduced(program: &Program, part: Part) -> Program {
    let mut reduced = program.clone();
    match part {
        Part::Whole => {}
        Part::ComputeOnly => compute_only(&mut reduced),
        Part::CommOnly => comm_only(&mut reduced),
    }
    reduced
}

fn compute_only(program: &mut Program) {
    let names = program.role_names.clone();
    let is_compute = |r: usize| names[r].is_some_and(|name| name.kind == RoleKind::Compute);
    let mut dropped = BTreeSet::new();
    for (r, role) in program.roles.iter().enumerate() {
        for index in role.first_task..role.first_task + role.tasks {
            let task = &program.tasks[index as usize];
            let signals = &program.signals[task.first_signal as usize..][..task.signals as usize];
            let arrived = program.puts[index as usize].map(|put| put.arrived.1);
            let raised = signals.iter().map(|signal| signal.address as u32).filter(|_| !is_compute(r)).chain(arrived);
            dropped.extend(raised.filter_map(|word| program.flag_of(word)).map(|(_, family, _)| family));
        }
    }
    for r in 0..program.roles.len() {
        if !is_compute(r) {
            let role = &mut program.roles[r];
            program.puts[role.first_task as usize..][..role.tasks as usize].fill(None);
            role.tasks = 0;
        }
    }
    let kept = |program: &Program, word| program.flag_of(word).is_none_or(|(_, family, _)| !dropped.contains(&family));
    for index in 0..program.tasks.len() {
        let task = program.tasks[index];
        let mut first = task.first_wait as usize;
        let mut counts = [task.start_waits, task.step_waits, task.output_waits];
        let mut left = Vec::new();
        for count in &mut counts {
            let gate = first..first + *count as usize;
            first = gate.end;
            let before = left.len();
            left.extend(program.waits[gate].iter().copied().filter(|wait| kept(program, wait.word)));
            *count = (left.len() - before) as u32;
        }
        let [start_waits, step_waits, output_waits] = counts;
        // A list only shrinks: it fits where it was.
        program.waits[task.first_wait as usize..][..left.len()].copy_from_slice(&left);
        program.tasks[index] = DeviceTask { start_waits, step_waits, output_waits, ..task };
    }
}

fn comm_only(program: &mut Program) {
    for role in &mut program.roles {
        role.tiles = 0;
    }
    for task in program.tasks.iter_mut().filter(|task| matches!(task.op, code::GEMM | code::ATTENTION)) {
        task.op = code::SYNC;
        task.start_waits += task.step_waits + task.output_waits;
        (task.step_waits, task.output_waits) = (0, 0);
    }
}

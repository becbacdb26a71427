//! Lowered programs, run task by task on the CPU as the device interpreter does, give what the kernels' references say.

use half::bf16;
use tilewire_hw::device::{Device, HwError};
use tilewire_hw::lower::{DeviceRegion, DeviceTask, MapKind, Mode, Program, code, flag, lower, lower_cluster};
use tilewire_hw::measure::{Compared, Inputs, inputs};
use tilewire_hw::reduced::{Part, reduced};
use tilewire_kernels::{Cluster, Fabric, OptionSet, Problem, RoleSplit, Schedule, Spec, kernel};

/// Runs any task whose waits are met, of any GPU, until none is left. Panics when some are left and none can run.
struct Machine<'a> {
    programs: &'a [Program],
    arenas: Vec<Vec<u16>>,
    /// By GPU.
    words: Vec<Vec<u32>>,
}

impl Machine<'_> {
    fn run(&mut self) {
        let mut left: Vec<(usize, usize, usize)> = Vec::new();
        for (gpu, program) in self.programs.iter().enumerate() {
            for role in &program.roles {
                let tasks = (role.first_task..role.first_task + role.tasks).map(|task| task as usize);
                left.extend(tasks.map(|task| (gpu, launch_of(program, task), task)));
            }
        }
        while !left.is_empty() {
            let before = left.len();
            // A launch begins when the one before it has ended.
            let first_left = |gpu| left.iter().filter(|(g, ..)| *g == gpu).map(|(_, launch, _)| *launch).min();
            let running: Vec<Option<usize>> = (0..self.programs.len()).map(first_left).collect();
            left.retain(|&(gpu, launch, task)| running[gpu] != Some(launch) || !self.try_task(gpu, task));
            let (gpu, _, task) = *left.first().unwrap_or(&(0, 0, 0));
            let first = self.programs[gpu].tasks[task];
            assert!(left.len() < before, "{before} tasks are stuck, the first is {first:?} of GPU {gpu}");
        }
    }

    fn try_task(&mut self, gpu: usize, index: usize) -> bool {
        let program = &self.programs[gpu];
        let task = program.tasks[index];
        let first = task.first_wait as usize;
        let waits = &program.waits[first..first + (task.start_waits + task.step_waits + task.output_waits) as usize];
        let words = &self.words[gpu];
        if !waits.iter().all(|w| (0..w.count).all(|i| words[(w.word + i * w.stride) as usize] >= w.at_least)) {
            return false;
        }
        match task.op {
            code::GEMM => self.gemm(program, &task),
            code::PUT => {
                let put = program.puts[index].expect("a put has its copy");
                let (from, to, count) = (put.src.1 as usize / 2, put.dst.1 as usize / 2, put.bytes as usize / 2);
                let data = self.arenas[put.src.0 as usize][from..from + count].to_vec();
                self.arenas[put.dst.0 as usize][to..to + count].copy_from_slice(&data);
                self.words[put.arrived.0 as usize][put.arrived.1 as usize] += 1;
                if let Some(sent) = put.sent {
                    self.words[gpu][sent as usize] += 1;
                }
            }
            code::SYNC => {}
            code::GATHER => self.gather(program, &task),
            code::ATTENTION => self.attention(program, &task),
            code::MERGE => self.merge(program, &task),
            _ => self.moves(program, &task),
        }
        for signal in &program.signals[task.first_signal as usize..][..task.signals as usize] {
            self.words[signal.gpu as usize][signal.address as usize] += signal.add;
        }
        true
    }

    /// Sums, copies and zeros.
    fn moves(&mut self, program: &Program, task: &DeviceTask) {
        let regions = &program.regions[task.first_region as usize..][..(task.inputs + task.outputs) as usize];
        let (inputs, outputs) = regions.split_at(task.inputs as usize);
        for block in 0..u64::from(task.blocks) {
            for row in 0..u64::from(task.rows) {
                for column in 0..u64::from(task.row_bytes / 2) {
                    let at = |r: &DeviceRegion| {
                        let bytes = r.address + block * r.block_pitch + row * u64::from(r.row_pitch);
                        (r.arena as usize, (bytes / 2 + column) as usize)
                    };
                    let sum: f32 = inputs
                        .iter()
                        .map(at)
                        .map(|(arena, element)| bf16::from_bits(self.arenas[arena][element]).to_f32())
                        .sum();
                    for (arena, element) in outputs.iter().map(at) {
                        self.arenas[arena][element] = bf16::from_f32(sum).to_bits();
                    }
                }
            }
        }
    }

    fn gather(&mut self, program: &Program, task: &DeviceTask) {
        let dst = &program.regions[task.first_region as usize];
        for row in 0..task.rows as usize {
            let to = dst.address as usize / 2 + row * dst.row_pitch as usize / 2;
            let elements = task.row_bytes as usize / 2;
            let data = match program.sources[task.steps as usize + row] {
                None => vec![0; elements],
                Some((arena, offset)) => self.arenas[arena as usize][offset as usize / 2..][..elements].to_vec(),
            };
            self.arenas[dst.arena as usize][to..to + elements].copy_from_slice(&data);
        }
    }

    fn f32(&self, region: &DeviceRegion, index: usize) -> f32 {
        let at = region.address as usize / 2 + index * 2;
        let halves = &self.arenas[region.arena as usize];
        f32::from_bits(u32::from(halves[at]) | u32::from(halves[at + 1]) << 16)
    }

    fn set_f32(&mut self, region: &DeviceRegion, index: usize, value: f32) {
        let at = region.address as usize / 2 + index * 2;
        let halves = &mut self.arenas[region.arena as usize];
        (halves[at], halves[at + 1]) = (value.to_bits() as u16, (value.to_bits() >> 16) as u16);
    }

    /// Blocks of heads by their tensor maps; the state row by row, which the device lays out in its own way.
    fn attention(&mut self, program: &Program, task: &DeviceTask) {
        const DIM: usize = 128;
        let regions = &program.regions[task.first_region as usize..];
        let (first, last) = (task.flags & flag::FIRST != 0, task.flags & flag::LAST != 0);
        let state = (!(first && last)).then(|| regions[3]);
        let at = |r: &DeviceRegion, row: usize, column: usize| {
            let map = &program.maps[r.map as usize];
            assert_eq!((map.pitch, r.column_block), (256, 0));
            (map.arena as usize, (r.row as usize + row) * DIM + column)
        };
        let MapKind::Heads(rows) = program.maps[regions[0].map as usize].kind else { panic!("Q has boxes of heads") };
        let keys = task.steps as usize * 128;
        let floats = |r: &DeviceRegion, rows: usize| -> Vec<f32> {
            let places = (0..rows).flat_map(|row| (0..DIM).map(move |c| (row, c)));
            places
                .map(|(row, c)| at(r, row, c))
                .map(|(arena, i)| bf16::from_bits(self.arenas[arena][i]).to_f32())
                .collect()
        };
        let (q, k, v) = (floats(&regions[0], rows as usize), floats(&regions[1], keys), floats(&regions[2], keys));
        for (row, q) in q.chunks_exact(DIM).enumerate() {
            let old = |i: usize| state.map_or(0.0, |state| self.f32(&state, row * (DIM + 2) + i));
            let (mut o, mut top, mut sum) = (vec![0f32; DIM], f32::NEG_INFINITY, 0f32);
            if !first {
                (o, top, sum) = ((0..DIM).map(old).collect(), old(DIM), old(DIM + 1));
            }
            let scores: Vec<f32> = k
                .chunks_exact(DIM)
                .map(|k| q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() / (DIM as f32).sqrt())
                .collect();
            let new_top = scores.iter().copied().fold(top, f32::max);
            let rescale = (top - new_top).exp();
            for o in &mut o {
                *o *= rescale;
            }
            sum *= rescale;
            for (score, v) in scores.iter().zip(v.chunks_exact(DIM)) {
                let p = (score - new_top).exp();
                sum += p;
                o.iter_mut().zip(v).for_each(|(o, v)| *o += bf16::from_f32(p).to_f32() * v);
            }
            if last {
                let (out, log) = if first { (regions[3], regions[4]) } else { (regions[4], regions[5]) };
                for (c, o) in o.iter().enumerate() {
                    let (arena, element) = at(&out, row, c);
                    self.arenas[arena][element] = bf16::from_f32(o / sum).to_bits();
                }
                self.set_f32(&log, row, new_top + sum.ln());
            } else {
                let state = state.expect("a tile that is not the last has a state");
                o.into_iter().chain([new_top, sum]).enumerate().for_each(|(i, value)| {
                    self.set_f32(&state, row * (DIM + 2) + i, value);
                });
            }
        }
    }

    fn merge(&mut self, program: &Program, task: &DeviceTask) {
        let regions = &program.regions[task.first_region as usize..][..(task.inputs + 2) as usize];
        let (parts, out) = regions.split_at(task.inputs as usize);
        for row in 0..task.rows as usize {
            let logs: Vec<f32> = parts.chunks_exact(2).map(|part| self.f32(&part[1], row)).collect();
            let top = logs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let all: f32 = logs.iter().map(|log| (log - top).exp()).sum();
            for c in 0..128 {
                let at = |r: &DeviceRegion| (r.arena as usize, r.address as usize / 2 + row * 128 + c);
                let value = |(arena, i): (usize, usize)| bf16::from_bits(self.arenas[arena][i]).to_f32();
                let sum: f32 =
                    parts.chunks_exact(2).zip(&logs).map(|(part, log)| (log - top).exp() * value(at(&part[0]))).sum();
                let (arena, element) = at(&out[0]);
                self.arenas[arena][element] = bf16::from_f32(sum / all).to_bits();
            }
            self.set_f32(&out[1], row, top + all.ln());
        }
    }

    /// Operands and outputs by their tensor maps, as the copy engine sees them.
    fn gemm(&mut self, program: &Program, task: &DeviceTask) {
        let regions = &program.regions[task.first_region as usize..][..(2 + task.outputs) as usize];
        let at = |r: &DeviceRegion, row: usize, column: usize| {
            let map = &program.maps[r.map as usize];
            let within = r.column_block as usize * 64 + column;
            (map.arena as usize, (r.row as usize + row) * (map.pitch as usize / 2) + within)
        };
        let value = |(arena, element): (usize, usize)| bf16::from_bits(self.arenas[arena][element]).to_f32();
        let depth = task.steps as usize * 64;
        let b: Vec<f32> =
            (0..depth).flat_map(|k| (0..256).map(move |c| (k, c))).map(|(k, c)| value(at(&regions[1], k, c))).collect();
        let mut sums = vec![0f32; 128 * 256];
        for (row, sums) in sums.chunks_exact_mut(256).enumerate() {
            for (k, b) in b.chunks_exact(256).enumerate() {
                let a = value(at(&regions[0], row, k));
                sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
            }
        }
        for out in &regions[2..] {
            for (i, sum) in sums.iter().enumerate() {
                let (arena, element) = at(out, i / 256, i % 256);
                let old = if out.add == 1 { bf16::from_bits(self.arenas[arena][element]).to_f32() } else { 0.0 };
                self.arenas[arena][element] = bf16::from_f32(old + bf16::from_f32(*sum).to_f32()).to_bits();
            }
        }
    }
}

fn launch_of(program: &Program, task: usize) -> usize {
    let role = program.role_of(task as u32).expect("a task has a role") as u32;
    program.launches.iter().rposition(|launch| launch.first_role <= role).expect("a role has a launch")
}

/// Kernel, nodes and GPUs, shape: m, n, k, or tokens, hidden, inter, or seq, batch, heads.
struct Case(&'static str, (u16, u16), [u64; 3], &'static [(&'static str, &'static str)]);

impl Case {
    fn spec(&self) -> Spec {
        let cluster = Cluster { nodes: self.1.0, gpus_per_node: self.1.1 };
        let [a, b, c] = self.2;
        let problem = match self.0 {
            "moe_dispatch_gemm" => {
                Problem::Moe { tokens: a, hidden: b, inter: c, topk: 2, experts: 2 * cluster.ranks() as u64 }
            }
            "ring_attention" => Problem::Attention { seq: a, batch: b, heads: c, head_dim: 128 },
            _ => Problem::Gemm { m: a, n: b, k: c },
        };
        let mut options = kernel(self.0).expect("a kernel").options(OptionSet::Tilewire, &problem, cluster);
        for (name, value) in self.3 {
            options.set(name, value).expect("a legal option");
        }
        Spec { problem, cluster, fabric: Fabric::Loopback, options }
    }

    fn build(&self) -> (Spec, Schedule) {
        let spec = self.spec();
        let schedule = kernel(self.0).expect("a kernel").build(&spec).expect("it builds");
        (spec, schedule)
    }
}

const SPLIT: RoleSplit = RoleSplit { compute: 8, intra_comm: 4, inter_send: 2, inter_reduce: 4 };

fn compared(case: &Case, mode: Mode) -> Compared {
    let (spec, schedule) = case.build();
    let kernel = kernel(case.0).expect("a kernel");
    let programs = match mode {
        Mode::Cluster => lower_cluster(&schedule, &SPLIT, 132),
        _ => lower(&schedule, mode, &SPLIT, 132).map(|program| vec![program]),
    }
    .unwrap_or_else(|error| panic!("{}: {error}", case.0));
    let inputs: Inputs = inputs(&schedule, kernel, &spec, mode, 3);
    let arenas = (0..programs[0].arenas.len()).map(|arena| inputs.arena(&programs[0], arena)).collect();
    let words = programs.iter().map(|program| vec![0; program.words as usize]).collect();
    let mut machine = Machine { programs: &programs, arenas, words };
    machine.run();
    let mut all = Compared::default();
    for program in &programs {
        let read = |arena: usize| Ok(machine.arenas[arena].clone());
        all.join(inputs.compare(program, &schedule, kernel, &spec, read).expect("no device"));
    }
    all
}

#[test]
fn virtual_programs_of_the_gemm_family_give_the_reference() {
    for case in [
        Case("gemm_rs", (2, 2), [512, 1024, 64], &[]),
        Case("gemm_rs", (1, 2), [256, 1024, 64], &[]),
        Case("gemm_rs", (1, 2), [512, 1024, 64], &[("open_lead_tiles", "0")]),
        Case("gemm_rs", (1, 2), [768, 1024, 64], &[("open_lead_tiles", "1")]),
        Case("gemm_rs", (2, 1), [256, 1024, 64], &[("staging", "helper_zero"), ("open_lead_tiles", "0")]),
        Case("gemm_rs", (1, 2), [256, 1024, 64], &[("staging", "helper_zero"), ("open_lead_tiles", "0")]),
        Case("ag_gemm", (2, 2), [512, 256, 256], &[]),
        Case("gemm_ar", (2, 2), [512, 512, 64], &[("chunk_tiles", "1")]),
        Case(
            "gemm_ar",
            (1, 2),
            [256, 512, 64],
            &[("chunk_tiles", "1"), ("node_sum", "pull"), ("open_lead_tiles", "0")],
        ),
    ] {
        let compared = compared(&case, Mode::Virtual);
        assert!(compared.elements > 0 && compared.wrong == 0, "{} {:?}: {compared:?}", case.0, case.1);
    }
}

const MOE: [Case; 5] = [
    Case("moe_dispatch_gemm", (2, 2), [256, 64, 256], &[("put_bytes", "2048")]),
    Case("moe_dispatch_gemm", (1, 4), [256, 64, 256], &[]),
    Case("moe_dispatch_gemm", (2, 2), [256, 64, 256], &[("readiness", "per_chunk"), ("put_bytes", "4096")]),
    Case("moe_dispatch_gemm", (2, 1), [128, 64, 256], &[("claim", "strided"), ("recycle", "false")]),
    Case("moe_dispatch_gemm", (2, 2), [256, 64, 256], &[("routing", "multinomial")]),
];

const RING: [Case; 6] = [
    Case("ring_attention", (2, 2), [512, 1, 1], &[("tile_q", "128")]),
    Case("ring_attention", (1, 4), [512, 1, 1], &[("tile_q", "128")]),
    Case("ring_attention", (4, 1), [512, 1, 1], &[("tile_q", "128")]),
    Case("ring_attention", (1, 1), [384, 1, 1], &[]),
    Case("ring_attention", (2, 2), [512, 1, 1], &[("tile_q", "128"), ("ring", "all_peers_landing")]),
    Case("ring_attention", (1, 2), [256, 1, 2], &[("tile_q", "128"), ("ring", "all_peers_landing")]),
];

#[test]
fn programs_of_experts_and_rings_give_the_reference() {
    for case in MOE.iter().chain(&RING) {
        for mode in [Mode::Virtual, Mode::Mirror, Mode::Cluster] {
            if mode == Mode::Mirror && case.3.contains(&("routing", "multinomial")) {
                continue;
            }
            let compared = compared(case, mode);
            let name = format!("{} {:?} {:?} {mode:?}", case.0, case.1, case.3);
            assert!(compared.elements > 0 && compared.wrong == 0, "{name}: {compared:?}");
        }
    }
}

#[test]
fn cluster_programs_of_the_gemm_family_give_the_reference() {
    for case in [
        Case("gemm_rs", (1, 2), [256, 1024, 64], &[]),
        Case("gemm_rs", (2, 2), [512, 1024, 64], &[]),
        Case("gemm_rs", (1, 3), [384, 1024, 64], &[]),
        Case("gemm_rs", (1, 3), [1152, 1024, 64], &[("open_lead_tiles", "1")]),
        Case("ag_gemm", (1, 2), [256, 256, 256], &[]),
        Case("ag_gemm", (1, 2), [256, 256, 256], &[("row_order", "absolute")]),
        Case("ag_gemm", (2, 2), [512, 256, 256], &[]),
        Case("ag_gemm", (1, 4), [512, 256, 256], &[]),
        Case("gemm_ar", (1, 2), [256, 512, 64], &[("chunk_tiles", "1")]),
        Case(
            "gemm_ar",
            (1, 2),
            [256, 512, 64],
            &[("chunk_tiles", "1"), ("node_sum", "pull"), ("open_lead_tiles", "0")],
        ),
        Case("gemm_ar", (2, 2), [512, 512, 64], &[("chunk_tiles", "1")]),
    ] {
        let compared = compared(&case, Mode::Cluster);
        assert!(compared.elements > 0 && compared.wrong == 0, "{} {:?}: {compared:?}", case.0, case.1);
    }
}

/// As many GPUs as a node has; two nodes of them as they are emulated on one host.
#[test]
fn cluster_programs_of_eight_gpus_give_the_reference() {
    for case in [
        Case("gemm_rs", (1, 8), [1024, 256, 64], &[("chunk_tiles", "1")]),
        Case("gemm_rs", (1, 8), [2048, 512, 64], &[("chunk_tiles", "1"), ("open_lead_tiles", "16")]),
        Case("ag_gemm", (1, 8), [1024, 256, 256], &[]),
        Case("gemm_ar", (1, 8), [1024, 256, 64], &[("chunk_tiles", "1")]),
        Case("moe_dispatch_gemm", (1, 8), [256, 64, 256], &[]),
        Case("ring_attention", (1, 8), [1024, 1, 1], &[("tile_q", "128")]),
        Case("ring_attention", (4, 2), [1024, 1, 1], &[("tile_q", "128")]),
    ] {
        let compared = compared(&case, Mode::Cluster);
        assert!(compared.elements > 0 && compared.wrong == 0, "{} {:?}: {compared:?}", case.0, case.1);
    }
}

#[test]
fn a_cluster_program_holds_its_own_rank_and_reaches_the_others() {
    let (_, schedule) = Case("gemm_rs", (1, 4), [512, 1024, 64], &[]).build();
    let programs = lower_cluster(&schedule, &SPLIT, 132).expect("it lowers");
    let whole = lower(&schedule, Mode::Virtual, &SPLIT, 132).expect("it lowers");
    assert_eq!(programs.iter().map(|p| p.tasks.len()).sum::<usize>(), whole.tasks.len());
    for (gpu, program) in (0..).zip(&programs) {
        assert_eq!((program.gpu, program.gpus), (gpu, 4));
        let reached: std::collections::BTreeSet<u32> =
            program.regions.iter().map(|r| program.gpu_of(r.arena)).collect();
        assert_eq!(reached, (0..4).collect(), "tiles go to every owner");
        let told: std::collections::BTreeSet<u32> = program.signals.iter().map(|s| s.gpu).collect();
        assert_eq!(told, (0..4).collect(), "every owner is told");
        let own = program.waits.iter().map(|w| w.word + (w.count - 1) * w.stride);
        assert!(own.max().is_some_and(|word| word < program.words), "waits are for own flags");
    }
}

#[test]
fn mirror_programs_of_the_gemm_family_give_the_reference() {
    for case in [
        Case("gemm_rs", (2, 2), [512, 1024, 64], &[]),
        Case("ag_gemm", (2, 2), [512, 256, 256], &[]),
        Case("gemm_ar", (2, 2), [512, 512, 64], &[("chunk_tiles", "1")]),
        Case("gemm_rs", (2, 2), [1024, 1024, 64], &[("open_lead_tiles", "8")]),
        Case("gemm_ar", (2, 2), [512, 512, 64], &[("chunk_tiles", "1"), ("open_lead_tiles", "4")]),
    ] {
        let compared = compared(&case, Mode::Mirror);
        assert!(compared.elements > 0 && compared.wrong == 0, "{} {:?}: {compared:?}", case.0, case.1);
    }
}

#[test]
fn reduced_programs_end_and_do_their_part_only() {
    for case in [
        Case("gemm_rs", (2, 2), [512, 1024, 64], &[]),
        Case("ag_gemm", (2, 2), [512, 256, 256], &[]),
        Case("gemm_ar", (1, 2), [256, 512, 64], &[("chunk_tiles", "1")]),
    ] {
        let (spec, schedule) = case.build();
        let whole = lower(&schedule, Mode::Mirror, &SPLIT, 132).expect("it lowers");
        let inputs = inputs(&schedule, kernel(case.0).expect("a kernel"), &spec, Mode::Mirror, 3);
        for (part, gemm) in [(Part::ComputeOnly, true), (Part::CommOnly, false)] {
            let program = reduced(&whole, part);
            let arenas = (0..program.arenas.len()).map(|arena| inputs.arena(&program, arena)).collect();
            let words = vec![vec![0; program.words as usize]];
            Machine { programs: std::slice::from_ref(&program), arenas, words }.run();
            let has = |op| program.roles.iter().any(|r| r.tasks > 0 && program.tasks[r.first_task as usize].op == op);
            assert_eq!(has(code::GEMM), gemm, "{} {part:?}", case.0);
            let moves = program.roles.iter().any(|r| r.tasks > 0 && r.tiles == 0);
            assert_eq!(moves, !gemm, "{} {part:?}: only one kind of work is left", case.0);
            let puts = whole.puts.iter().flatten().count();
            assert_eq!(program.puts.iter().flatten().count(), if gemm { 0 } else { puts }, "{} {part:?}", case.0);
            assert!(whole.awaits_all_puts(), "{}: every put is noticed before a run ends", case.0);
        }
    }
}

#[test]
fn what_the_interpreter_does_not_do_is_refused() {
    let refused = |case: Case, mode| {
        let (_, schedule) = case.build();
        lower(&schedule, mode, &SPLIT, 132).expect_err("refused").to_string()
    };
    let small = Case("gemm_rs", (1, 2), [256, 1024, 64], &[("tile_m", "64")]);
    assert!(refused(small, Mode::Virtual).contains("tiles other than 128 x 256 x 64"));
    let multicast = Case("ag_gemm", (1, 2), [256, 256, 256], &[("nvls", "true")]);
    assert!(refused(multicast, Mode::Virtual).contains("nvls = false"));
    let absolute = Case("ag_gemm", (1, 2), [256, 256, 256], &[("row_order", "absolute")]);
    assert!(refused(absolute, Mode::Mirror).contains("one skeleton"));
    let early = Case("gemm_rs", (1, 2), [256, 1024, 64], &[("early_ready", "true")]);
    assert!(refused(early, Mode::Virtual).contains("before the write is visible"));
    let (_, schedule) = Case("gemm_rs", (1, 8), [1024, 1024, 64], &[]).build();
    let split = RoleSplit { compute: 100, inter_reduce: 33, ..RoleSplit::default() };
    let error = lower(&schedule, Mode::Mirror, &split, 132).expect_err("too many");
    assert!(matches!(error, HwError::TooManyCtas { ctas: 133, sms: 132, .. }), "{error}");
}

#[test]
fn a_machine_without_a_gpu_gets_a_typed_error() {
    match Device::open() {
        Ok(device) => println!("skipped: there is a GPU with {} SMs", device.sms),
        Err(HwError::NoDriver | HwError::NoDevice | HwError::Architecture(..)) => {}
        Err(error) => panic!("{error}"),
    }
}

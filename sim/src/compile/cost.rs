//! Cost records: how long each kind of task takes alone, and what it takes from shared resources.

use super::hash::FastMap;
use super::key::{CostKey, Where};
use super::loads::{Loads, Peers, add_demand, rounds};
use super::units::{loop_name, ps_from_ns, rate, spread, transfer};
use super::{Cost, CostRecord, Demand, Flow, NONE, ResourceKind, Work};
use crate::machine::{Machine, PeerPath};
use std::cell::Cell;
use std::collections::HashMap;
use tilewire_kernels::schedule::{At, Claim, Drain, Engine};
use tilewire_kernels::{Cluster, Offset};

pub(super) struct Compiler<'a> {
    pub machine: &'a Machine,
    pub cluster: Cluster,
    pub fold_nodes: bool,
    pub fold_gpus: bool,
    pub rails: u32,
    /// Whom the rank reaches over NVLink but by multicast.
    pub peers: Cell<Peers>,
    pub classes: Vec<Vec<Demand>>,
    pub class_of: HashMap<Vec<Demand>, u32>,
    /// What each record is made from: the role, the key, the number of tasks of all ranks.
    pub keys: Vec<(usize, CostKey, u64)>,
    pub cost_of: FastMap<(usize, CostKey), u16>,
    pub costs: Vec<CostRecord>,
    pub put_flow_of: FastMap<(u16, u16, u16, u64, u64), Flow>,
}

impl Compiler<'_> {
    /// The asynchronous store of a tile, over `at_least_ps`; `keep` selects which places count.
    pub(super) fn tile_out(
        &mut self,
        outs: &[Where],
        (hold_ps, at_least_ps): (u64, u64),
        local: bool,
        keep: impl Fn(&Self, At) -> bool,
    ) -> Flow {
        let mut loads = Loads::new();
        let mut work = 0;
        for out in outs {
            if !keep(self, out.at) {
                continue;
            }
            let at = if local { At::ME } else { out.at };
            work += transfer(out.bytes, self.write_rate(at, out.add));
            self.load_write(&mut loads, at, out.bytes, out.add);
        }
        if work == 0 {
            return Flow::NOTHING;
        }
        self.flow(&loads, (work + hold_ps).max(at_least_ps))
    }

    pub(super) fn one_flow(&mut self, loads: &Loads, work: u64) -> [Cost; 3] {
        let main = if work == 0 { NONE } else { self.class(loads, work) };
        let crowd = self.machine.interpreter.as_ref().map_or(0.0, |i| i.move_crowd_per_cta.value * 1e9).round() as u64;
        [Cost { main, fixed: work, crowd, ..Cost::NOTHING }; 3]
    }

    /// What taking a task costs that is no tile.
    pub(super) fn task_ps(&self) -> u64 {
        self.machine.interpreter.as_ref().map_or(0, |interpreter| ps_from_ns(interpreter.task_ns.value))
    }

    /// Before each task of a role.
    pub(super) fn take_ps(&self, one_per_block: bool, claim: Claim) -> u64 {
        match (&self.machine.interpreter, claim) {
            _ if one_per_block => ps_from_ns(self.machine.launch.block_ns.value),
            (Some(interpreter), Claim::Ready { .. }) => ps_from_ns(interpreter.claim_ns.value),
            _ => 0,
        }
    }

    /// `drawn`: power for the traffic of tiles, in parts of what their arithmetic takes.
    fn record(&mut self, key: &CostKey, drawn: f64) -> CostRecord {
        let machine = self.machine;
        let sm = &machine.sm;
        let simple = |work, forms| CostRecord { work, steps: 0, drain: Drain::Visible, forms };
        let nothing = [Cost::NOTHING; 3];
        match key {
            CostKey::Sync if self.task_ps() > 0 => {
                let forms = self.one_flow(&Loads::new(), self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Sync => simple(Work::Sync, nothing),
            CostKey::Put => {
                let mut forms = nothing;
                for form in &mut forms {
                    form.fixed = ps_from_ns(machine.proxy.push_ns.value) + self.task_ps();
                }
                simple(Work::Put, forms)
            }
            CostKey::Gemm { tile, steps, misses, main_loop, drain, notice, outs } => {
                let gemm = &machine.gemm[loop_name(*main_loop)];
                let [bm, bn, bk] = tile.map(u64::from);
                let step = (2.0 * (bm * bn * bk) as f64 / gemm.sm_tflops.value).round() as u64;
                let loop_ps = step * u64::from(*steps);
                let fixed = ps_from_ns(gemm.epilogue_ns.value);
                let work = loop_ps + fixed;
                let mut loads = Loads::new();
                let flops = key.flops() as f64;
                loads.push((Offset::ME, ResourceKind::Hbm, misses[0] + misses[1]));
                loads.push((Offset::ME, ResourceKind::Chip, (flops + flops * drawn).round() as u64));
                let main = self.class(&loads, work);
                let hold = ps_from_ns(match drain {
                    Drain::Overlap => 0.0,
                    Drain::SmemRead => gemm.smem_read_ns.value,
                    Drain::Visible => gemm.visible_ns.value,
                });
                let fenced = *drain == Drain::Visible && outs.iter().any(|out| self.is_remote(out.at));
                let told = if *notice > 0 { machine.nvlink.notice_ns.value / f64::from(*notice) } else { 0.0 };
                let fence = if fenced { ps_from_ns(machine.nvlink.fence_ns.value + told) } else { 0 };
                let fill = ps_from_ns(gemm.fill_ns.value);
                let whole = self.tile_out(outs, (hold + fence, 0), false, |_, _| true);
                let local = self.tile_out(outs, (hold, 0), true, |_, _| true);
                let remote = self.tile_out(outs, (0, 0), false, Self::is_remote);
                let tile = Cost { main, step, fixed, fill, ..Cost::NOTHING };
                let mut forms =
                    [Cost { out: whole, ..tile }, Cost { out: local, ..tile }, Cost { out: remote, ..Cost::NOTHING }];
                if let Some(interpreter) = &machine.interpreter {
                    let over = u64::from(*steps).min(interpreter.store_steps.value as u64);
                    let deferred_ps = over * step;
                    for (form, local) in forms[..2].iter_mut().zip([false, true]) {
                        form.crowd = ps_from_ns(interpreter.crowd_ns.value);
                        if *drain == Drain::Overlap {
                            form.deferred = self.tile_out(outs, (0, deferred_ps), local, |_, _| true);
                        }
                    }
                    // The interpreter runs a tile without its arithmetic as it runs any task.
                    forms[2] = Cost { out: remote, crowd: 0, ..self.one_flow(&Loads::new(), self.task_ps())[2] };
                }
                CostRecord { work: Work::Tile, steps: *steps, drain: *drain, forms }
            }
            CostKey::Attention { steps, read, written, streamed, main_loop, .. } => {
                let attention = &machine.attention[loop_name(*main_loop)];
                let flops = key.flops() as f64;
                let step = (flops / f64::from(*steps) / attention.sm_tflops.value).round() as u64;
                let fixed = ps_from_ns(attention.block_ns.value) + transfer(*streamed, rate(sm.copy_cta_gbs.value));
                let work = step * u64::from(*steps) + fixed;
                let mut loads = Loads::new();
                loads.push((Offset::ME, ResourceKind::Hbm, read + self.written(*written)));
                let power = machine.interpreter.as_ref().map_or(1.0, |i| i.attention_power.value);
                loads.push((Offset::ME, ResourceKind::Chip, (flops * power + flops * drawn).round() as u64));
                let main = self.class(&loads, work);
                let cost = Cost { main, step, fixed, ..Cost::NOTHING };
                let mut forms = [cost, cost, Cost::NOTHING];
                if machine.interpreter.is_some() {
                    forms[2] = Cost { crowd: 0, ..self.one_flow(&Loads::new(), self.task_ps())[2] };
                }
                CostRecord { work: Work::Tile, steps: *steps, drain: Drain::Visible, forms }
            }
            CostKey::Merge { read, written } => {
                let mut loads = Loads::new();
                loads.push((Offset::ME, ResourceKind::Hbm, read + self.written(*written)));
                let work =
                    transfer(read + written, rate(sm.merge_cta_gbs.value)) + ps_from_ns(sm.local_latency_ns.value);
                let forms = self.one_flow(&loads, work + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Copy { src, dsts, engine, in_flight, overlap, lanes } => {
                let mut loads = Loads::new();
                self.load_read(&mut loads, src.at, src.bytes);
                let lane = |cta_gbs: f64| cta_gbs / f64::from(*lanes);
                let interpreter = machine.interpreter.as_ref();
                let cta = match (engine, interpreter) {
                    (Engine::Bulk, Some(i)) => sm.copy_cta_gbs.value.min(i.lane_gbs.value),
                    (Engine::Bulk, None) => lane(sm.copy_cta_gbs.value),
                    (Engine::LdSt, _) => lane(sm.ldst_cta_gbs.value),
                };
                let load_ns = self.latency_ns(src.at);
                let mut work = 0.0;
                for dst in dsts {
                    self.load_write(&mut loads, dst.at, dst.bytes, false);
                    let cta = if dst.at == At::AllLocal { lane(sm.nvls_store_cta_gbs.value) } else { cta };
                    let store_ns = self.latency_ns(dst.at);
                    let bytes = dst.bytes as f64;
                    let flight = f64::from(*in_flight).min(bytes.max(1.0));
                    work += if *overlap {
                        // Bytes in flight over the slower of the two latencies, up to what a CTA can move.
                        bytes / cta.min(flight / load_ns.max(store_ns))
                    } else {
                        bytes / cta + (bytes / flight).ceil() * (load_ns + store_ns)
                    };
                }
                // The interpreter stores what it has loaded while it loads the rest, and while a lane waits for memory others
                // move on: whichever is slower.
                let (loading, ends_ns, together) = match (engine, interpreter) {
                    (Engine::Bulk, Some(i)) => {
                        let bytes: u64 = dsts.iter().map(|dst| dst.bytes).sum();
                        let loading = src.bytes as f64 / i.copy_load_gbs.value;
                        let all = f64::from(*lanes) * loading.max(bytes as f64 / sm.copy_cta_gbs.value);
                        (loading, i.copy_ns.value, all)
                    }
                    _ => (0.0, 0.0, 0.0),
                };
                let work = ps_from_ns((work.max(loading) + load_ns + ends_ns).max(together));
                let forms = self.one_flow(&loads, work + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Gather { local, remote, row_bytes, zero, in_flight, overlap, boxes } => {
                let bytes = |rows: u32| u64::from(rows) * u64::from(*row_bytes);
                let mut loads = Loads::new();
                let rows = local + remote + zero;
                // The share of remote rows in quarters: slices then fall into a handful of classes instead of hundreds.
                let remote_bytes = bytes(rows) * u64::from((4 * remote + rows / 2) / rows.max(1)) / 4;
                loads.push((
                    Offset::ME,
                    ResourceKind::Hbm,
                    bytes(local + remote) - remote_bytes.min(bytes(local + remote)) + self.written(bytes(rows)),
                ));
                let peers = u64::from(self.cluster.gpus_per_node) - 1;
                if remote_bytes > 0 && machine.peer_path == PeerPath::Nvlink {
                    // Rows of one slice come from many GPUs; each neighbour serves an equal share.
                    loads.push((Offset::ME, ResourceKind::Ingress, remote_bytes));
                    for offset in self.node().skip(1) {
                        self.reached(offset.dg);
                        loads.push((offset, ResourceKind::Egress, remote_bytes / peers));
                        loads.push((offset, ResourceKind::Hbm, remote_bytes / peers));
                    }
                } else {
                    loads.push((Offset::ME, ResourceKind::Hbm, remote_bytes));
                }
                let total = bytes(rows) as f64;
                let load_ns = if *remote > 0 { self.latency_ns(At::local(1)) } else { sm.local_latency_ns.value };
                let store_ns = sm.local_latency_ns.value;
                let flight = f64::from(*in_flight) * f64::from(*row_bytes);
                let (moving, waiting) = if *overlap {
                    (total / sm.gather_cta_gbs.value.min(flight / load_ns.max(store_ns)), load_ns)
                } else {
                    let rounds = (f64::from(rows) / f64::from(*in_flight)).ceil();
                    (total / sm.copy_cta_gbs.value, rounds * (load_ns + store_ns))
                };
                // Boxes are told one after the other, at the pace of the chip's clock; zero rows are not moved.
                let boxed = 2.0 * f64::from(local + remote) * f64::from(*boxes);
                if boxed > 0.0 {
                    loads.push((Offset::ME, ResourceKind::Chip, (boxed * sm.box_power_flop.value).round() as u64));
                }
                let work = moving.max(boxed * sm.box_ns.value) + waiting;
                let row_ns = machine.interpreter.as_ref().map_or(0.0, |i| i.gather_row_ns.value);
                let work = work.max(f64::from(rows) * row_ns);
                let forms = self.one_flow(&loads, ps_from_ns(work) + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Reduce { inputs, outputs, in_flight, lanes } => {
                let mut loads = Loads::new();
                let (mut read, mut written, mut load_ns) = (0, 0, 0.0_f64);
                let mut work = 0.0;
                for input in inputs {
                    self.load_read(&mut loads, input.at, input.bytes);
                    if input.at == At::AllLocal {
                        work += rounds(input.bytes, *in_flight) * self.latency_ns(input.at);
                        work += input.bytes as f64 / sm.nvls_load_cta_gbs.value;
                    } else {
                        read += input.bytes;
                        load_ns = load_ns.max(self.latency_ns(input.at));
                    }
                }
                for output in outputs {
                    self.load_write(&mut loads, output.at, output.bytes, false);
                    if output.at == At::AllLocal {
                        work += output.bytes as f64 / sm.nvls_store_cta_gbs.value;
                    } else {
                        written += output.bytes;
                    }
                }
                work += self.sum_ns(load_ns, (read, written), *in_flight, *lanes);
                let forms = self.one_flow(&loads, ps_from_ns(work) + self.task_ps());
                simple(Work::Move, forms)
            }
            CostKey::Collective { kind, bytes, in_place, ctas } => {
                let mut forms = nothing;
                for form in &mut forms {
                    form.fixed = self.collective_ps(*kind, *bytes, *in_place, *ctas);
                }
                simple(Work::Collective, forms)
            }
            CostKey::Fill { dst } => {
                let mut loads = Loads::new();
                self.load_write(&mut loads, dst.at, dst.bytes, false);
                let work = transfer(dst.bytes, rate(sm.fill_cta_gbs.value));
                let forms = self.one_flow(&loads, work + self.task_ps());
                simple(Work::Move, forms)
            }
        }
    }

    /// The number of the record that a task of a role will have.
    pub(super) fn cost(&mut self, role: usize, key: CostKey) -> u16 {
        let cost = *self.cost_of.entry((role, key)).or_insert_with_key(|(role, key)| {
            let cost = u16::try_from(self.keys.len()).expect("far fewer kinds of tasks than tasks");
            self.keys.push((*role, key.clone(), 0));
            cost
        });
        self.keys[usize::from(cost)].2 += 1;
        cost
    }

    /// Makes the records, once all tasks are known.
    ///
    /// **Model.** Power follows its average over milliseconds: what the traffic of all tiles of a role draws, of all ranks,
    /// is shared out among them by their FLOP. What a tile takes of the memory is its own.
    pub(super) fn make_records(&mut self) {
        let keys = std::mem::take(&mut self.keys);
        let roles = keys.iter().map(|&(role, ..)| role + 1).max().unwrap_or(0);
        let mut sums = vec![(0_u128, 0_u128); roles];
        for (role, key, tasks) in &keys {
            sums[*role].0 += u128::from(key.moved()) * u128::from(*tasks);
            sums[*role].1 += u128::from(key.flops()) * u128::from(*tasks);
        }
        for (role, key, _) in &keys {
            let (moved, flops) = sums[*role];
            let drawn = moved as f64 / flops.max(1) as f64 * self.machine.gpu.hbm_power_flop_per_byte.value;
            let record = self.record(key, drawn);
            self.costs.push(record);
        }
    }

    /// `messages`: of the put, beside its data also a flag that is written by itself.
    pub(super) fn put_flow(&mut self, offset: Offset, rail: u16, bytes: u64, messages: u64) -> Flow {
        let key = (offset.dn, offset.dg, rail, bytes, messages);
        if let Some(&flow) = self.put_flow_of.get(&key) {
            return flow;
        }
        let nic = &self.machine.nic;
        let rail_rate = rate(nic.rail_gbs.value);
        let work = (transfer(bytes, rail_rate) + messages * ps_from_ns(nic.message_ns.value)).max(1);
        let (rail, target) = (rail as u8, self.fold(offset));
        // A message holds its rail for its whole time, message cost included, so that a rail is also a message rate.
        let mut demands: Vec<Demand> =
            vec![(Offset::ME, ResourceKind::NicOut(rail), rail_rate), (target, ResourceKind::NicIn(rail), rail_rate)];
        let moved = spread(bytes, work);
        if moved > 0 {
            for (at, kind, taken) in [
                (Offset::ME, ResourceKind::Hbm, moved),
                (target, ResourceKind::Hbm, self.written(moved)),
                (Offset::ME, ResourceKind::PcieOut, moved),
                (target, ResourceKind::PcieIn, moved),
            ] {
                add_demand(&mut demands, at, kind, taken);
            }
        }
        demands.sort_unstable();
        let flow = Flow { class: self.class_with(demands), work };
        self.put_flow_of.insert(key, flow);
        flow
    }
}

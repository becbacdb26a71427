//! Memory that the NIC does not reach, as a GPU's behind a bounce buffer: every kernel's puts go through other segments.

use super::double::{Fabric as Double, Guarantee};
use super::small::cases;
use super::{split, succeed};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tilewire_hw::host::{HostConfig, Wires};
use tilewire_hw::transport::bounce::{Between, Bounce, Copier};
use tilewire_hw::transport::loopback::Loopback;
use tilewire_hw::transport::puts::Incoming;
use tilewire_hw::transport::segment::{Layout, Segment};
use tilewire_hw::transport::{Told, Transport, TransportError};
use tilewire_kernels::{Fabric, OptionSet, Rank, Schedule};

/// Copies that lag a poll behind, and how many were made.
struct Late {
    copies: Between,
    known: (u64, u64),
    made: Arc<AtomicU64>,
}

impl Copier for Late {
    fn name(&self) -> &'static str {
        "through a late buffer"
    }

    fn begin_out(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
        self.made.fetch_add(1, Ordering::Relaxed);
        self.copies.begin_out(offset, bytes)
    }

    fn begin_in(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
        self.made.fetch_add(1, Ordering::Relaxed);
        self.copies.begin_in(offset, bytes)
    }

    fn ended(&mut self) -> Result<(u64, u64), TransportError> {
        let now = self.copies.ended()?;
        Ok(std::mem::replace(&mut self.known, now))
    }
}

/// Puts the memory of a rank behind `host`.
fn behind(
    schedule: &Schedule,
    layout: &Layout,
    rank: Rank,
    (memory, host): (&Arc<Segment>, &Arc<Segment>),
    mut wires: Wires,
    made: &Arc<AtomicU64>,
) -> Wires {
    wires.told = Told { by_immediates: true, ..wires.told };
    let landings = Arc::new(Incoming::new(schedule, layout, rank, wires.told).expect("one put a word").landings);
    let wrap = |inner| -> Box<dyn Transport> {
        let copies = Between::new(memory.clone(), host.clone());
        let late = Late { copies, known: (0, 0), made: made.clone() };
        Box::new(Bounce::new(inner, Box::new(late), landings.clone()))
    };
    wires.transports = wires.transports.into_iter().map(wrap).collect();
    wires
}

#[test]
fn every_kernel_computes_right_values_with_its_memory_behind_a_bounce_buffer() {
    for fabric in [Fabric::IbRc, Fabric::EfaSrd] {
        let made = Arc::new(AtomicU64::new(0));
        let mut writes = 0;
        for (turn, case) in cases(OptionSet::Tilewire, fabric).iter().enumerate() {
            let cluster = case.spec.cluster;
            if cluster.nodes == 1 || cluster.ranks() > 4 {
                continue;
            }
            let schedule = case.kernel.build(&case.spec).expect("a small case builds");
            let (hosts, double) = (OnceLock::<Vec<Arc<Segment>>>::new(), OnceLock::new());
            let config =
                HostConfig { split: split(2), seed: turn as u64, fifo_depth: 4, runs: 3, ..HostConfig::default() };
            let reports = succeed(case, config, |rank, layout, segments| {
                let host = |_| Arc::new(Segment::private(layout).expect("memory"));
                let hosts = hosts.get_or_init(|| segments.iter().map(host).collect());
                let wires = if fabric == Fabric::EfaSrd {
                    double.get_or_init(|| Double::new(hosts, Guarantee::ImmediateAfterData, turn as u64)).wires(rank)
                } else {
                    let told = Told { order: tilewire_hw::transport::Order::Queue, by_immediates: true };
                    let incoming = Incoming::new(&schedule, layout, cluster.rank(rank), told).expect("one put a word");
                    let mut loopback =
                        Loopback::new(hosts[rank].clone(), hosts.iter().cloned().map(Some).collect(), None);
                    loopback.hear(incoming.landings.keys().copied());
                    Wires::new(told.order, vec![Box::new(loopback)])
                };
                let memory = (&segments[rank], &hosts[rank]);
                Ok(behind(&schedule, layout, cluster.rank(rank), memory, wires, &made))
            });
            writes += reports.iter().map(|report| report.served.commands).sum::<u64>();
            assert!(reports.iter().all(|report| report.transport.contains("through a late buffer")), "{reports:?}");
        }
        let made = made.load(Ordering::Relaxed);
        // Nearly every write is copied twice; some only tell.
        assert!(made > writes && made <= 2 * writes, "{fabric}: {made} copies of {writes} writes");
    }
}

#[test]
fn buffers_lie_alike_in_the_memory_of_a_gpu_and_beside_it() {
    for case in cases(OptionSet::Tilewire, Fabric::IbRc) {
        let schedule = case.kernel.build(&case.spec).expect("a small case builds");
        // As a GPU's memory is taken: a page at least for each, empty ones too, then the words.
        let (mut at, mut buffers) = (0, Vec::new());
        for buffer in &schedule.buffers {
            buffers.push(at);
            at = (at + buffer.bytes.max(1)).next_multiple_of(4096);
        }
        let (placed, beside) = Layout::placed(&schedule, &buffers, at, at + 8192).expect("few flags");
        let apart = |index: usize| beside.buffer(index).0 - placed.buffer(index).0;
        assert!((0..buffers.len()).all(|index| apart(index) == apart(0)), "{}", case.name());
        assert_eq!((placed.words().banks, placed.words().at, beside.words().at), (1, at, 0));
        let last = schedule.buffers.len() - 1;
        let end = beside.buffer(last).0 + beside.buffer(last).1;
        assert!(apart(0) >= 8 * u64::from(beside.slots) && end <= beside.bytes, "words before, all inside");
    }
}

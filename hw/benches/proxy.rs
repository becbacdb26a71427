//! How many commands a second one proxy thread serves: `cargo bench -p tilewire-hw --bench proxy`.
//!
//! Loopback, no payload: what remains is the FIFO, the proxy's loop and the words that it raises. One more thread pushes.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use tilewire_hw::transport::arrivals::Arrivals;
use tilewire_hw::transport::fifo::Fifo;
use tilewire_hw::transport::loopback::Loopback;
use tilewire_hw::transport::proxy::{Proxy, ProxyConfig};
use tilewire_hw::transport::segment::{Layout, Segment};
use tilewire_hw::transport::{Command, Word};

/// Commands of one measurement.
const COMMANDS: u64 = 1 << 18;

fn serve(queues: u16) -> std::time::Duration {
    let layout = Layout::plain(1, 4096);
    let segment = || Arc::new(Segment::private(&layout).expect("memory"));
    let (own, peer) = (segment(), segment());
    let mut transport = Loopback::new(own.clone(), vec![None, Some(peer)], None);
    let fifo = Fifo::new(4096);
    let arrivals = Arrivals::new(0, Vec::new());
    let (stop, end, done, progress) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let config = ProxyConfig { patience: u32::MAX, ..ProxyConfig::default() };
    let proxy = Proxy {
        fifo: &fifo,
        words: &*own,
        arrivals: &arrivals,
        stop: &stop,
        end: &end,
        done: &done,
        progress: &progress,
        config,
    };
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for at in 0..COMMANDS {
                let queue = at as u16 % queues;
                let command = Command { peer: 1, queue, sent: Some(Word::new(0, 0)), writes: 1, ..Command::default() };
                while fifo.push(command).is_err() {
                    std::hint::spin_loop();
                }
            }
            end.store(true, Ordering::Release);
        });
        let served = proxy.serve(&mut transport).expect("loopback does not fail");
        assert_eq!((served.commands, fifo.pushed()), (COMMANDS, COMMANDS));
    });
    begin.elapsed()
}

fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("proxy");
    group.throughput(Throughput::Elements(COMMANDS)).sample_size(20);
    for queues in [1u16, 8] {
        group.bench_function(format!("commands, {queues} queues"), |bencher| {
            bencher.iter_custom(|times| (0..times).map(|_| serve(queues)).sum());
        });
    }
    group.finish();
}

criterion_group!(proxy, benches);
criterion_main!(proxy);

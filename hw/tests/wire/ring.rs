//! The ring of a GPU is served over the transports of the host device; threads stand for the GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tilewire_hw::transport::arrivals::Arrivals;
use tilewire_hw::transport::fifo::Source;
use tilewire_hw::transport::loopback::Loopback;
use tilewire_hw::transport::proxy::{Proxy, ProxyConfig};
use tilewire_hw::transport::ring::{Puts, Ring, slot};
use tilewire_hw::transport::segment::{Layout, Segment};
use tilewire_hw::transport::{Command, Notice, Word};

#[test]
fn puts_of_a_ring_arrive_whole_in_the_order_asked_for_and_are_counted_as_sent() {
    const PUTS: u32 = 200;
    let layout = Layout::plain(PUTS + 1, u64::from(PUTS) * 64);
    let segment = || Arc::new(Segment::private(&layout).expect("memory"));
    let (own, peer) = (segment(), segment());
    let data = layout.buffer(0).0;
    let mut transport = Loopback::new(own.clone(), vec![None, Some(peer.clone())], None);
    // A put of task t is two writes of 32 bytes; the second tells.
    let sent = Word::new(PUTS, 0);
    let write = |task: u32, half: u32| Command {
        src: data + u64::from(task * 64 + half * 32),
        dst: data + u64::from(task * 64 + half * 32),
        bytes: 32,
        peer: 1,
        queue: (task % 3) as u16,
        notice: if half == 1 { Notice::Write(Word::new(task, 0)) } else { Notice::None },
        sent: Some(sent),
        writes: 2,
        ..Command::default()
    };
    let writes: Vec<Vec<Command>> = (0..PUTS).map(|task| vec![write(task, 0), write(task, 1)]).collect();
    (0..PUTS).for_each(|task| own.fill(data + u64::from(task * 64), 64, task as u8 + 1));
    // The ring still holds another run's slots.
    let slots: Vec<AtomicU64> = (0..PUTS).map(|task| AtomicU64::new(slot(6, task))).collect();
    let (stop, end, done, progress) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let puts = Puts::new(Ring::new(&slots[..], 0..PUTS as usize, 7), &writes, 1);
    let part = puts.of(0);
    let arrivals = Arrivals::new(0, Vec::new());
    let proxy = Proxy {
        fifo: &part,
        words: &*own,
        arrivals: &arrivals,
        stop: &stop,
        end: &end,
        done: &done,
        progress: &progress,
        config: ProxyConfig::default(),
    };
    let served = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The device asks for them in an order of its own.
            for (at, task) in (0..PUTS).rev().enumerate() {
                slots[at].store(slot(7, task), Ordering::Release);
            }
            end.store(true, Ordering::Release);
        });
        proxy.serve(&mut transport).expect("loopback does not fail")
    });
    assert!(puts.look(), "all were asked for");
    assert_eq!((served.commands, served.bytes), (2 * u64::from(PUTS), 64 * u64::from(PUTS)));
    assert_eq!(own.word(sent).load(Ordering::Acquire), PUTS, "a put is sent once, when both its writes are complete");
    for task in 0..PUTS {
        let mut got = Vec::new();
        peer.read(data + u64::from(task * 64), 64, &mut got);
        assert_eq!(got, vec![task as u8 + 1; 64], "put of task {task}");
        assert_eq!(peer.word(Word::new(task, 0)).load(Ordering::Acquire), 1);
    }
}

#[test]
fn a_queue_of_a_ring_belongs_to_one_proxy() {
    let write = |task: u16| vec![Command { queue: task % 4, bytes: u32::from(task), ..Command::default() }];
    let writes: Vec<Vec<Command>> = (0..12).map(write).collect();
    let slots: Vec<AtomicU64> = (0..12).map(|task| AtomicU64::new(slot(7, task))).collect();
    let puts = Puts::new(Ring::new(&slots[..], 0..12, 7), &writes, 2);
    let take = |proxy| std::iter::from_fn(|| puts.of(proxy).take()).map(|command| command.bytes).collect::<Vec<_>>();
    assert_eq!(take(1), [1, 3, 5, 7, 9, 11], "in order; the others wait for theirs");
    assert_eq!(take(0), [0, 2, 4, 6, 8, 10]);
    assert!(puts.look());
}

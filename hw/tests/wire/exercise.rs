//! The exercises between two ranks lose nothing, however often their queue is full.

use super::double::{Fabric as Double, Guarantee};
use std::sync::Arc;
use std::time::Duration;
use tilewire_hw::bootstrap::local;
use tilewire_hw::transport::Notice;
use tilewire_hw::transport::exercise::Pair;
use tilewire_hw::transport::segment::{Layout, Segment};

#[test]
fn rounds_over_a_queue_that_is_often_full_end_with_every_completion() {
    // 64 slots each way; the double takes 12 writes of both ranks together.
    const SLOTS: u32 = 64;
    const BYTES: u32 = 16;
    let layout = Layout::plain(SLOTS, u64::from(2 * SLOTS * BYTES));
    let segments: Vec<_> = (0..2).map(|_| Arc::new(Segment::private(&layout).expect("memory"))).collect();
    let double = Double::new(&segments, Guarantee::ImmediateAfterData, 5);
    let sessions = local(2).expect("joins");
    std::thread::scope(|scope| {
        for (rank, session) in sessions.iter().enumerate() {
            let (double, segments, data) = (&double, &segments, layout.buffer(0).0);
            scope.spawn(move || {
                let mut wires = double.wires(rank);
                let transport = wires.transports[0].as_mut();
                let peer = 1 - rank as u32;
                let mut pair = Pair::new(session, &segments[rank], data, transport, peer, Duration::from_secs(30));
                session.barrier().expect("nobody fails");
                pair.rounds(1000, SLOTS, BYTES, Notice::Immediate)
                    .unwrap_or_else(|error| panic!("rank {rank}: {error}"));
                session.barrier().expect("nobody fails");
            });
        }
    });
}

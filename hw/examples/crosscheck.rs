//! Our reliable connection against a peer that uses the safe crate `ibverbs`: a write with its flag, and a write with an
//! immediate, arrive as that crate sees them.
//!
//! `crosscheck OURS THEIRS`, names of RDMA devices that reach each other. Only this example links libibverbs.

use ibverbs::{Gid, QueuePairEndpoint, ibv_qp_type};
use ibverbs_sys as ffi;
use serde_json::{Value, json};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tilewire_hw::probe::rdma::{self, Seat};
use tilewire_hw::transport::segment::{Layout, Segment};
use tilewire_hw::transport::verbs::{Card, Device, Exposed, VerbsConfig, rc};
use tilewire_hw::transport::{Command, Event, Notice, Word};

/// Payload of a write.
const BYTES: usize = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [ours, theirs] = &names[..] else { return Err("crosscheck OURS THEIRS".into()) };
    let known = rdma::devices(Path::new(rdma::SYSFS));
    let port = known.iter().find(|device| device.name == *theirs).and_then(|device| device.ports.first());
    let gid_index = u32::from(port.ok_or("no such device")?.gid_index);

    // Their side, by the crate alone.
    let devices = ibverbs::devices()?;
    let named = |device: &ibverbs::Device<'_>| device.name().is_some_and(|name| name.to_string_lossy() == *theirs);
    let context = devices.iter().find(named).ok_or("the crate does not see the device")?.open()?;
    let (completions, domain) = (context.create_cq(16, 0)?, context.alloc_pd()?);
    let layout = Layout::plain(4, 4096);
    let memory = domain.allocate::<u8>(layout.bytes as usize)?;
    let mut receive = domain.allocate::<u8>(8)?;
    let prepared = domain
        .create_qp(&completions, &completions, ibv_qp_type::IBV_QPT_RC)
        .set_gid_index(gid_index)
        .allow_remote_rw()
        .set_max_recv_wr(4)
        .build()?;
    let gid = context.gid_table().iter().find(|entry| entry.gid_index == gid_index).ok_or("no such address")?.gid;

    // Our side.
    let segment = Arc::new(Segment::private(&layout)?);
    let config = VerbsConfig { nics: vec![ours.clone()], queue_pairs: 1, ..VerbsConfig::default() };
    let opened = Device::open_all(&config, "verbs-rc", &Seat::default(), &Exposed::host(&segment))?;
    let (unconnected, card) = rc::prepare(opened, &config, 0, &[1], 1)?;

    // What either side tells the other.
    let mine: Value = serde_json::to_value(&card)?;
    let number = mine["queue_pairs"]["1"][0][0].as_u64().ok_or("a queue pair")? as u32;
    let raw: [u8; 16] = serde_json::from_value(mine["rails"][0]["gid"].clone())?;
    let lid = mine["rails"][0]["lid"].as_u64().unwrap_or(0) as u16;
    let endpoint = prepared.endpoint();
    let their_gid: ffi::ibv_gid = gid.into();
    // SAFETY: both views of the union are plain bytes.
    let their_raw = unsafe { their_gid.raw };
    let peer: Card = serde_json::from_value(json!({
        "rails": [{ "gid": their_raw, "lid": endpoint.lid, "mtu": mine["rails"][0]["mtu"], "key": memory.rkey().key }],
        "address": memory.as_ptr() as u64,
        "bytes": layout.bytes,
        "queue_pairs": { "0": [[endpoint.num]] },
    }))?;
    let mut queue_pair =
        prepared.handshake(QueuePairEndpoint { num: number, lid, gid: Some(Gid::from(ffi::ibv_gid { raw })) })?;
    // SAFETY: the memory is held until the completion below.
    unsafe { queue_pair.post_receive(&mut receive, .., 7)? };
    let mut wires = unconnected.connect(&[card, peer], 0)?;
    let transport = wires.transports[0].as_mut();

    let data = layout.buffer(0).0;
    let pattern: Vec<u8> = (0..BYTES).map(|i| (i * 7 + 3) as u8).collect();
    segment.write(data, &pattern);
    let (flag, immediate) = (Word::new(2, 0), Word::new(3, 1));
    let write = |dst: u64, notice| Command {
        src: data,
        dst,
        bytes: BYTES as u32,
        peer: 1,
        notice,
        writes: 1,
        ..Command::default()
    };
    let commands = [write(data, Notice::Write(flag)), write(data + 2048, Notice::Immediate(immediate))];
    if transport.post(&commands)? != commands.len() {
        return Err("a queue that is empty takes two writes".into());
    }
    let (begin, mut sent, mut told) = (Instant::now(), 0, None);
    while sent < 2 || told.is_none() {
        let mut events = Vec::new();
        transport.poll(&mut events)?;
        sent += events.iter().filter(|event| matches!(event, Event::Sent(_))).count();
        let mut found = [ffi::ibv_wc::default(); 4];
        for completion in completions.poll(&mut found)? {
            if let Some((status, vendor)) = completion.error() {
                return Err(format!("the crate's peer sees status {status}, vendor {vendor}").into());
            }
            told = Some((completion.wr_id(), u32::from_be(completion.imm_data)));
        }
        if begin.elapsed() > Duration::from_secs(120) {
            return Err(format!("after 120 s {sent} of 2 writes are complete, told: {told:?}").into());
        }
    }
    let at = |from: u64| &memory[from as usize..from as usize + BYTES];
    let word = |word: Word| memory[layout.words().offset(word) as usize..][..4].to_vec();
    let checks = [
        ("bytes of the write with a flag", at(data) == pattern),
        ("bytes of the write with an immediate", at(data + 2048) == pattern),
        ("the flag", word(flag) == 1u32.to_le_bytes()),
        ("the word of the immediate, which no NIC writes", word(immediate) == [0; 4]),
        ("the immediate", told == Some((7, immediate.0))),
    ];
    for (what, holds) in checks {
        if !holds {
            return Err(format!("{what}: not as sent").into());
        }
    }
    println!("crosscheck {}: {} checks against the crate ibverbs hold", transport.name(), checks.len());
    Ok(())
}

//! Scalable reliable datagrams of EFA: RDMA WRITE with an immediate, no order at all.
//!
//! Not run on EFA hardware: none was at hand. The ordering rules it relies on (every write of a put tells, the receiver
//! counts, a put is `sent` when all its writes are complete) are the proxies' and tested over a stand-in that reorders.
//!
//! A queue pair serves all peers; a peer is an address handle, a queue pair number and the common key. Every request
//! completes on its own. An immediate consumes a receive.

use super::device::{NOT_THERE, failed, zero};
use super::health::Health;
use super::{Card, Completions, Device, Rail, VerbsConfig, describe};
use crate::host::Wires;
use crate::transport::{Command, Event, Notice, Order, Transport, TransportError, Word};
use ibverbs_sys as ffi;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

/// `struct efadv_qp_init_attr` of rdma-core's `efadv.h`, whose layout CI compares.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct EfaQpInit {
    comp_mask: u64,
    driver_qp_type: u32,
    flags: u16,
    service_level: u8,
    reserved: u8,
}

const _: () = {
    assert!(size_of::<EfaQpInit>() == 16);
    assert!(std::mem::offset_of!(EfaQpInit, driver_qp_type) == 8);
};

type CreateQp =
    unsafe extern "C" fn(*mut ffi::ibv_context, *mut ffi::ibv_qp_init_attr_ex, *mut EfaQpInit, u32) -> *mut ffi::ibv_qp;

/// `EFADV_QP_DRIVER_TYPE_SRD`.
const SRD: u32 = 0;

/// Key of all queue pairs: a mark against strays, no secret.
const QUEUE_KEY: u32 = 0x7157_1e57;

/// Marks receives in a work request's number.
const RECEIVE: u64 = 1 << 63;

fn create_qp() -> Result<CreateQp, TransportError> {
    let missing = |error: libloading::Error| TransportError::Missing {
        what: format!("no EFA library ({error}); install libefa1 or run over verbs-rc"),
    };
    // SAFETY: the library's initialisers are rdma-core's own. It is never unloaded.
    let library = Box::leak(Box::new(unsafe { libloading::Library::new("libefa.so.1") }.map_err(missing)?));
    // SAFETY: the type is that of the function in rdma-core's header.
    Ok(*unsafe { library.get::<CreateQp>(b"efadv_create_qp_ex\0") }.map_err(missing)?)
}

/// A peer as this endpoint reaches it.
struct Peer {
    /// By rail: its address and key.
    rails: Vec<(*mut ffi::ibv_ah, u32)>,
    address: u64,
    /// Its queue pairs of this proxy.
    queue_pairs: Vec<u32>,
}

/// One proxy's queue pairs.
struct Endpoint {
    rails: Vec<Rail>,
    config: VerbsConfig,
    /// Index i is on rail i modulo the number of rails.
    queue_pairs: Vec<(*mut ffi::ibv_qp, *mut ffi::ibv_qp_ex)>,
    /// Requests in flight, by queue pair.
    in_flight: Vec<u32>,
    /// Requests complete, by queue pair.
    completed: Vec<u64>,
    health: Health,
    peers: BTreeMap<u32, Peer>,
    /// Writes in flight by the number of their request, with their queue pair.
    posted: BTreeMap<u64, (usize, Option<Command>)>,
    next: u64,
    proxies: u16,
}

// SAFETY: the handles may be used from any thread, and this one has them for itself.
unsafe impl Send for Endpoint {}

/// Queue pairs that are made; peers are not known yet.
pub struct Unconnected {
    proxies: Vec<Endpoint>,
    peers: Vec<u32>,
    me: u32,
}

/// Makes queue pairs for `proxies` threads over one NIC for each rail.
///
/// # Errors
/// [`TransportError::Missing`] without EFA's library, [`TransportError::Call`] where the device is no EFA.
pub fn prepare(
    devices: Vec<Device>,
    config: &VerbsConfig,
    me: u32,
    peers: &[u32],
    proxies: u16,
) -> Result<(Unconnected, Card), TransportError> {
    let (devices, create) = (devices.into_iter().map(Arc::new).collect::<Vec<_>>(), create_qp()?);
    let endpoint = |_| Endpoint::new(&devices, config, create, proxies.max(1));
    let proxies = (0..proxies.max(1)).map(endpoint).collect::<Result<Vec<_>, _>>()?;
    let numbers: Vec<Vec<u32>> = proxies.iter().map(Endpoint::numbers).collect();
    let card = Card::new(&devices, peers.iter().map(|&peer| (peer, numbers.clone())).collect());
    Ok((Unconnected { proxies, peers: peers.to_vec(), me }, card))
}

impl Unconnected {
    /// Learns the peers by the cards of all ranks.
    ///
    /// # Errors
    /// [`TransportError`]: a card that does not fit, or a call that failed.
    pub fn connect(mut self, cards: &[Card]) -> Result<Wires, TransportError> {
        for (index, endpoint) in self.proxies.iter_mut().enumerate() {
            for &peer in &self.peers {
                let card = &cards[peer as usize];
                let each = endpoint.queue_pairs.len();
                let queue_pairs = card.numbers(peer, self.me, index, each, &endpoint.rails)?.to_vec();
                let rails = (0..endpoint.rails.len())
                    .map(|rail| Ok((endpoint.address_handle(peer, card, rail)?, card.rails[rail].key)))
                    .collect::<Result<_, TransportError>>()?;
                endpoint.peers.insert(peer, Peer { rails, address: card.address, queue_pairs });
            }
        }
        let transports = self.proxies.into_iter().map(|proxy| Box::new(proxy) as Box<dyn Transport>).collect();
        Ok(Wires::new(Order::Unordered, transports))
    }
}

impl Endpoint {
    fn new(
        devices: &[Arc<Device>],
        config: &VerbsConfig,
        create: CreateQp,
        proxies: u16,
    ) -> Result<Self, TransportError> {
        let count = config.queue_pairs.max(1);
        let mut endpoint = Self {
            rails: Rail::all(devices, u32::from(count) * (config.send_depth() + config.receive_depth))?,
            config: config.clone(),
            queue_pairs: Vec::new(),
            in_flight: Vec::new(),
            completed: Vec::new(),
            health: Health::new(usize::from(count) * devices.len()),
            peers: BTreeMap::new(),
            posted: BTreeMap::new(),
            next: 0,
            proxies,
        };
        for index in 0..usize::from(count) * devices.len() {
            endpoint.add(create, index % devices.len())?;
        }
        Ok(endpoint)
    }

    fn add(&mut self, create: CreateQp, rail: usize) -> Result<(), TransportError> {
        use ffi::ibv_qp_attr_mask as Mask;
        let Rail { device, completions } = &self.rails[rail];
        let library = device.library;
        // SAFETY: all-zero is a value of these plain structures; handles are live, see `Device`.
        let (handle, extended) = unsafe {
            let mut init: ffi::ibv_qp_init_attr_ex = std::mem::zeroed();
            (init.send_cq, init.recv_cq) = (*completions, *completions);
            init.cap = ffi::ibv_qp_cap {
                max_send_wr: self.config.send_depth(),
                max_recv_wr: self.config.receive_depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            };
            init.qp_type = ffi::ibv_qp_type::IBV_QPT_DRIVER;
            init.comp_mask = ffi::IBV_QP_INIT_ATTR_PD | ffi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.pd = device.domain;
            init.send_ops_flags =
                ffi::IBV_QP_EX_WITH_RDMA_WRITE as u64 | ffi::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM as u64;
            let mut efa = EfaQpInit { driver_qp_type: SRD, ..EfaQpInit::default() };
            let handle = create(device.context, &raw mut init, &raw mut efa, size_of::<EfaQpInit>() as u32);
            if handle.is_null() {
                let what = format!("{} as an EFA device", device.name);
                return Err(failed("efadv_create_qp_ex", what, std::io::Error::last_os_error()));
            }
            (handle, (library.ibv_qp_to_qp_ex)(handle))
        };
        self.queue_pairs.push((handle, extended));
        self.in_flight.push(0);
        self.completed.push(0);
        let states = [
            (
                ffi::ibv_qp_state::IBV_QPS_INIT,
                Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_QKEY,
            ),
            (ffi::ibv_qp_state::IBV_QPS_RTR, Mask::IBV_QP_STATE),
            (ffi::ibv_qp_state::IBV_QPS_RTS, Mask::IBV_QP_STATE | Mask::IBV_QP_SQ_PSN),
        ];
        for (state, mask) in states {
            // SAFETY: as above.
            let result = unsafe {
                let mut attributes: ffi::ibv_qp_attr = std::mem::zeroed();
                attributes.qp_state = state;
                (attributes.port_num, attributes.qkey) = (device.port.number, QUEUE_KEY);
                (library.ibv_modify_qp)(handle, &raw mut attributes, mask.0 as c_int)
            };
            zero("ibv_modify_qp", format!("to state {state}"), result)?;
        }
        (0..self.config.receive_depth).try_for_each(|_| self.receive(self.queue_pairs.len() - 1))
    }

    fn numbers(&self) -> Vec<u32> {
        // SAFETY: the queue pairs are live.
        self.queue_pairs.iter().map(|(handle, _)| unsafe { (**handle).qp_num }).collect()
    }

    fn address_handle(&self, peer: u32, card: &Card, rail: usize) -> Result<*mut ffi::ibv_ah, TransportError> {
        let device = &self.rails[rail].device;
        // SAFETY: all-zero is a value of this plain structure; the domain is live.
        let handle = unsafe {
            let mut attributes: ffi::ibv_ah_attr = std::mem::zeroed();
            (attributes.port_num, attributes.is_global) = (device.port.number, 1);
            attributes.grh.dgid.raw = card.rails[rail].gid;
            attributes.grh.sgid_index = device.port.gid_index;
            (device.library.ibv_create_ah)(device.domain, &raw mut attributes)
        };
        if handle.is_null() {
            return Err(failed("ibv_create_ah", format!("of rank {peer}"), std::io::Error::last_os_error()));
        }
        Ok(handle)
    }

    /// Posts an empty receive: immediates need one each.
    fn receive(&self, at: usize) -> Result<(), TransportError> {
        let handle = self.queue_pairs[at].0;
        // SAFETY: the request outlives the call, which copies it; the queue pair is live.
        let result = unsafe {
            let mut request: ffi::ibv_recv_wr = std::mem::zeroed();
            request.wr_id = RECEIVE | at as u64;
            let mut bad = std::ptr::null_mut();
            (*(*handle).context).ops.post_recv.map_or(NOT_THERE, |post| post(handle, &raw mut request, &raw mut bad))
        };
        zero("ibv_post_recv", "", result)
    }

    fn of(&self, queue: u16) -> usize {
        usize::from(queue / self.proxies) % self.queue_pairs.len()
    }

    /// Posts one write of `bytes` bytes at `local` (none: of the word that holds a 1).
    fn write(
        &mut self,
        at: usize,
        peer: u32,
        local: Option<(u64, u32)>,
        remote: u64,
        word: Option<Word>,
    ) -> Result<u64, TransportError> {
        let to = self.peers.get(&peer).ok_or(TransportError::Unreachable { transport: "verbs-srd", peer })?;
        let id = self.next;
        let queue_pair = self.queue_pairs[at].1;
        let rail = at % self.rails.len();
        let (device, (handle, remote_key)) = (&self.rails[rail].device, to.rails[rail]);
        // SAFETY: the registrations live as long as the device; sources stay in place until their completion.
        let (key, address, bytes) = unsafe {
            match local {
                Some((address, bytes)) => (device.local_key(), address, bytes),
                None => ((*device.one.1).lkey, &raw const *device.one.0 as u64, 4),
            }
        };
        // SAFETY: the queue pair was made with these operations, so that their functions are there; it is live, and so
        // is the address handle.
        let result = unsafe {
            let functions = &mut *queue_pair;
            let (Some(start), Some(set_address), Some(set_source), Some(complete)) =
                (functions.wr_start, functions.wr_set_ud_addr, functions.wr_set_sge, functions.wr_complete)
            else {
                return zero("ibv_wr_start", "no such operation", NOT_THERE).map(|()| id);
            };
            start(queue_pair);
            functions.wr_id = id;
            functions.wr_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
            match (word, functions.wr_rdma_write_imm, functions.wr_rdma_write) {
                (Some(word), Some(write), _) => write(queue_pair, remote_key, to.address + remote, word.0.to_be()),
                (None, _, Some(write)) => write(queue_pair, remote_key, to.address + remote),
                _ => return zero("ibv_wr_rdma_write", "no such operation", NOT_THERE).map(|()| id),
            }
            set_source(queue_pair, key, address, bytes);
            set_address(queue_pair, handle, to.queue_pairs[at], QUEUE_KEY);
            complete(queue_pair)
        };
        zero("ibv_wr_complete", format!("to rank {peer}"), result)?;
        self.next += 1;
        self.in_flight[at] += 1;
        Ok(id)
    }
}

impl Transport for Endpoint {
    fn name(&self) -> String {
        describe("verbs-srd", &self.config, &self.rails)
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        let words = self.rails[0].device.words();
        for (taken, command) in commands.iter().enumerate() {
            let at = self.of(command.queue);
            let flag_at = if let Notice::WriteOn(_, other) = command.notice { Some(self.of(other)) } else { None };
            if !has_room(&self.in_flight, &self.config, at, flag_at) {
                return Ok(taken);
            }
            let word = match command.notice {
                Notice::Immediate(word) => Some(word),
                Notice::None | Notice::WriteOn(..) => None,
                Notice::Write(_) => {
                    let what = format!("EFA orders nothing, so that no flag may follow its data: {command}");
                    return Err(TransportError::Missing { what });
                }
            };
            let local = Some((self.rails[0].device.address() + command.src, command.bytes));
            let id = self.write(at, command.peer, local, command.dst, word)?;
            self.posted.insert(id, (at, Some(*command)));
            if let Notice::WriteOn(word, _) = command.notice {
                let other = flag_at.unwrap_or(at);
                let id = self.write(other, command.peer, None, words.offset(word), None)?;
                self.posted.insert(id, (other, None));
            }
        }
        Ok(commands.len())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
        let mut room: Completions = [const { MaybeUninit::uninit() }; 32];
        for rail in 0..self.rails.len() {
            let found = self.rails[rail].poll(&mut room)?;
            found.iter().try_for_each(|completion| self.complete(completion, events))?;
        }
        match self.health.look() {
            Some(since) => self.look(since),
            None => Ok(()),
        }
    }
}

/// Whether a write fits on a queue pair, and the flag that it has on `flag_at`. The cap is for writes: a flag apart fits
/// as long as the queue does.
fn has_room(in_flight: &[u32], config: &VerbsConfig, at: usize, flag_at: Option<usize>) -> bool {
    in_flight[at] < config.in_flight_max.max(1)
        && flag_at.is_none_or(|flag_at| in_flight[flag_at] + 1 < config.send_depth())
}

impl Endpoint {
    /// Looks for what no completion says.
    fn look(&mut self, since: Duration) -> Result<(), TransportError> {
        self.rails.iter().try_for_each(|rail| rail.device.is_well())?;
        for at in 0..self.queue_pairs.len() {
            let waited = self.health.waited(at, self.in_flight[at] > 0, self.completed[at], since);
            if waited > self.config.answer {
                let oldest = self.posted.values().find(|(on, command)| *on == at && command.is_some());
                let command = oldest.and_then(|(_, command)| *command).unwrap_or_default();
                let (peer, waited_s) = (command.peer, waited.as_secs());
                return Err(TransportError::NoAnswer { peer, waited_s, command: Box::new(command) });
            }
        }
        Ok(())
    }

    /// What a completion says.
    fn complete(&mut self, completion: &ffi::ibv_wc, events: &mut Vec<Event>) -> Result<(), TransportError> {
        let id = completion.wr_id();
        let posted = if id & RECEIVE == 0 { self.posted.remove(&id) } else { None };
        if let Some((status, vendor)) = completion.error() {
            let command = posted.and_then(|(_, command)| command).unwrap_or_default();
            return Err(TransportError::Completion {
                peer: command.peer,
                queue: command.queue,
                status: self.rails[0].device.library.status(status),
                code: status,
                vendor,
                command: Box::new(command),
            });
        }
        if let Some((at, command)) = posted {
            self.in_flight[at] -= 1;
            self.completed[at] += 1;
            events.extend(command.map(Event::Sent));
            return Ok(());
        }
        events.push(Event::Arrived(Word(u32::from_be(completion.imm_data))));
        self.receive(id as u32 as usize)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // SAFETY: each handle was made here and is destroyed once, queue pairs before the completion queue of their rail.
        unsafe {
            for (index, (handle, _)) in self.queue_pairs.iter().enumerate() {
                (self.rails[index % self.rails.len()].device.library.ibv_destroy_qp)(*handle);
            }
            for peer in self.peers.values() {
                for (rail, (handle, _)) in self.rails.iter().zip(&peer.rails) {
                    (rail.device.library.ibv_destroy_ah)(*handle);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_write_in_flight_takes_its_flag_along() {
        let config = VerbsConfig { in_flight_max: 1, ..VerbsConfig::default() };
        assert!(has_room(&[0, 0], &config, 0, None));
        assert!(has_room(&[0, 0], &config, 0, Some(1)) && has_room(&[0, 0], &config, 0, Some(0)));
        assert!(!has_room(&[1, 0], &config, 0, None), "the cap");
        assert!(has_room(&[0, 2], &config, 0, Some(1)) && !has_room(&[0, 3], &config, 0, Some(1)), "the queue of 4");
    }
}

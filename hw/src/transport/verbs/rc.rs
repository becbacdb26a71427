//! Reliable connections: RDMA WRITE, with a flag write after it on the same queue pair or an immediate with it.
//!
//! A queue pair keeps order, so that the last write of a put tells of the whole put, and the completion of one request
//! is that of all before it. That is why a put stays on one NIC, however large: its flag would overtake the parts that
//! went by another. Queues are spread over the NICs instead, and a schedule has several.

use super::device::{NOT_THERE, failed, zero};
use super::health::Health;
use super::{Card, Completions, Device, Rail, VerbsConfig, describe};
use crate::host::Wires;
use crate::transport::{Command, Event, Notice, Order, Transport, TransportError, Word, Words};
use ibverbs_sys as ffi;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Queue pairs that are made, and not yet connected.
pub struct Unconnected {
    proxies: Vec<Endpoint>,
    me: u32,
}

/// Where a peer's segment is.
#[derive(Clone, Copy)]
struct Remote {
    address: u64,
    key: u32,
}

/// A write on its way, and the requests that it takes.
struct Posted {
    command: Option<Command>,
    requests: u32,
}

struct QueuePair {
    handle: *mut ffi::ibv_qp,
    rail: usize,
    peer: u32,
    remote: Remote,
    /// Oldest first; numbers are consecutive.
    posted: VecDeque<Posted>,
    oldest: u32,
    requests: u32,
}

/// One proxy's queue pairs.
struct Endpoint {
    rails: Vec<Rail>,
    config: VerbsConfig,
    queue_pairs: Vec<QueuePair>,
    /// Index of the first queue pair of each peer.
    first: BTreeMap<u32, usize>,
    /// A queue pair flushed its requests at this time, and nothing says why yet.
    flushed: Option<(Instant, u32)>,
    health: Health,
    /// For each schedule queue of this proxy, which one of a peer's queue pairs: queue / proxies.
    proxies: u16,
}

// SAFETY: the handles may be used from any thread, and this one has them for itself.
unsafe impl Send for Endpoint {}

/// How long a flushed queue pair's cause may take to be told.
const FLUSH_GRACE: Duration = Duration::from_secs(2);

/// Marks receives in a work request's number.
const RECEIVE: u64 = 1 << 63;

/// Makes queue pairs to `peers` for `proxies` threads over one NIC for each rail.
///
/// # Errors
/// [`TransportError::Call`].
pub fn prepare(
    devices: Vec<Device>,
    config: &VerbsConfig,
    me: u32,
    peers: &[u32],
    proxies: u16,
) -> Result<(Unconnected, Card), TransportError> {
    let devices: Vec<_> = devices.into_iter().map(Arc::new).collect();
    let endpoint = |_| Endpoint::new(&devices, config, peers, proxies);
    let proxies = (0..proxies.max(1)).map(endpoint).collect::<Result<Vec<_>, _>>()?;
    let queue_pairs =
        peers.iter().map(|&peer| (peer, proxies.iter().map(|proxy| proxy.numbers(peer)).collect())).collect();
    let card = Card::new(&devices, queue_pairs);
    Ok((Unconnected { proxies, me }, card))
}

impl Unconnected {
    /// Connects to every peer by the cards of all ranks. `spoil` changes the keys of peers, for a test of what a wrong
    /// one does.
    ///
    /// # Errors
    /// [`TransportError`]: a card that does not fit, or a call that failed.
    pub fn connect(mut self, cards: &[Card], spoil: u32) -> Result<Wires, TransportError> {
        for (index, endpoint) in self.proxies.iter_mut().enumerate() {
            let each = endpoint.each();
            for at in 0..endpoint.queue_pairs.len() {
                let QueuePair { peer, rail, .. } = endpoint.queue_pairs[at];
                let card = &cards[peer as usize];
                let numbers = card.numbers(peer, self.me, index, each, &endpoint.rails)?;
                let key = card.rails[rail].key ^ spoil;
                endpoint.queue_pairs[at].remote = Remote { address: card.address, key };
                endpoint.connect(at, card, numbers[at - endpoint.first[&peer]])?;
            }
        }
        let transports = self.proxies.into_iter().map(|proxy| Box::new(proxy) as Box<dyn Transport>).collect();
        Ok(Wires::new(Order::Queue, transports))
    }
}

impl Endpoint {
    fn new(devices: &[Arc<Device>], config: &VerbsConfig, peers: &[u32], proxies: u16) -> Result<Self, TransportError> {
        let mut config = config.clone();
        config.queue_pairs = config.queue_pairs.max(1);
        let count = peers.len() as u32 * u32::from(config.queue_pairs);
        let depth = count * (config.send_depth() + config.receive_depth);
        let mut endpoint = Self {
            rails: Rail::all(devices, depth)?,
            config,
            queue_pairs: Vec::new(),
            first: BTreeMap::new(),
            flushed: None,
            health: Health::new(0),
            proxies,
        };
        for &peer in peers {
            endpoint.first.insert(peer, endpoint.queue_pairs.len());
            for index in 0..endpoint.each() {
                endpoint.add(peer, index % devices.len())?;
            }
        }
        endpoint.health = Health::new(endpoint.queue_pairs.len());
        Ok(endpoint)
    }

    /// Queue pairs to each peer.
    fn each(&self) -> usize {
        self.rails.len() * usize::from(self.config.queue_pairs)
    }

    /// Makes a queue pair that takes immediates at once.
    fn add(&mut self, peer: u32, rail: usize) -> Result<(), TransportError> {
        use ffi::ibv_qp_attr_mask as Mask;
        let (Rail { device, completions }, config) = (&self.rails[rail], &self.config);
        // SAFETY: all-zero is a value of these plain structures; handles are live, see `Device`.
        let handle = unsafe {
            let mut init: ffi::ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq) = (*completions, *completions);
            init.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
            init.cap = ffi::ibv_qp_cap {
                max_send_wr: config.send_depth(),
                max_recv_wr: config.receive_depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: if config.inline_flags { 4 } else { 0 },
            };
            (device.library.ibv_create_qp)(device.domain, &raw mut init)
        };
        if handle.is_null() {
            let what = format!("to rank {peer}, {} sends, {} receives", config.send_depth(), config.receive_depth);
            return Err(failed("ibv_create_qp", what, std::io::Error::last_os_error()));
        }
        let (port, remote) = (device.port.number, Remote { address: 0, key: 0 });
        let posted = VecDeque::new();
        self.queue_pairs.push(QueuePair { handle, rail, peer, remote, posted, oldest: 0, requests: 0 });
        // SAFETY: as above.
        let mut attributes: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        attributes.port_num = port;
        attributes.qp_access_flags =
            (ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE).0;
        let mask = Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS;
        self.modify(handle, &mut attributes, mask, "to init")?;
        for _ in 0..self.config.receive_depth {
            self.receive(self.queue_pairs.len() - 1)?;
        }
        Ok(())
    }

    fn modify(
        &self,
        handle: *mut ffi::ibv_qp,
        attributes: &mut ffi::ibv_qp_attr,
        mask: ffi::ibv_qp_attr_mask,
        what: &str,
    ) -> Result<(), TransportError> {
        // SAFETY: the queue pair is live, the attributes outlive the call.
        zero("ibv_modify_qp", what, unsafe {
            (self.rails[0].device.library.ibv_modify_qp)(handle, attributes, mask.0 as c_int)
        })
    }

    fn numbers(&self, peer: u32) -> Vec<u32> {
        // SAFETY: the queue pairs are live.
        self.queue_pairs.iter().filter(|qp| qp.peer == peer).map(|qp| unsafe { (*qp.handle).qp_num }).collect()
    }

    fn connect(&self, at: usize, card: &Card, number: u32) -> Result<(), TransportError> {
        use ffi::ibv_qp_attr_mask as Mask;
        let qp = &self.queue_pairs[at];
        let (port, card) = (self.rails[qp.rail].device.port, &card.rails[qp.rail]);
        // SAFETY: all-zero is a value of these plain structures.
        let mut attributes: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ffi::ibv_qp_state::IBV_QPS_RTR;
        attributes.path_mtu = port.mtu.min(card.mtu) as _;
        (attributes.dest_qp_num, attributes.max_dest_rd_atomic, attributes.min_rnr_timer) = (number, 1, 12);
        let path = &mut attributes.ah_attr;
        (path.port_num, path.dlid) = (port.number, card.lid);
        if port.ethernet {
            path.is_global = 1;
            path.grh.dgid.raw = card.gid;
            (path.grh.sgid_index, path.grh.hop_limit) = (port.gid_index, 64);
        }
        let ready = Mask::IBV_QP_STATE
            | Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(qp.handle, &mut attributes, ready, &format!("to receive from rank {}", qp.peer))?;
        // SAFETY: as above.
        let mut attributes: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ffi::ibv_qp_state::IBV_QPS_RTS;
        let timeout = self.config.timeout_of(self.rails[qp.rail].device.software);
        (attributes.timeout, attributes.retry_cnt) = (timeout, self.config.retries);
        // 7 means: as long as it takes. A receiver without a receive is slow, not gone.
        (attributes.rnr_retry, attributes.max_rd_atomic) = (7, 1);
        let ready = Mask::IBV_QP_STATE
            | Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(qp.handle, &mut attributes, ready, &format!("to send to rank {}", qp.peer))
    }

    /// Posts an empty receive: immediates need one each.
    fn receive(&self, at: usize) -> Result<(), TransportError> {
        let handle = self.queue_pairs[at].handle;
        // SAFETY: the request outlives the call, which copies it; the queue pair is live.
        let result = unsafe {
            let mut request: ffi::ibv_recv_wr = std::mem::zeroed();
            request.wr_id = RECEIVE | at as u64;
            let mut bad = std::ptr::null_mut();
            (*(*handle).context).ops.post_recv.map_or(NOT_THERE, |post| post(handle, &raw mut request, &raw mut bad))
        };
        zero("ibv_post_recv", "", result)
    }

    /// The queue pair of a peer for a schedule's queue.
    fn of(&self, peer: u32, queue: u16) -> Result<usize, TransportError> {
        let first = *self.first.get(&peer).ok_or(TransportError::Unreachable { transport: "verbs-rc", peer })?;
        Ok(first + usize::from(queue / self.proxies.max(1)) % self.each())
    }

    fn device_of(&self, at: usize) -> &Device {
        &self.rails[self.queue_pairs[at].rail].device
    }

    fn room(&self, at: usize) -> u32 {
        self.config.send_depth() - self.queue_pairs[at].requests
    }

    /// The request that writes `bytes` bytes at `local` to `remote` of a peer.
    fn request(&self, at: usize, remote: u64, signalled: bool) -> ffi::ibv_send_wr {
        let qp = &self.queue_pairs[at];
        // SAFETY: all-zero is a value of this plain structure.
        let mut request: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
        request.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        request.wr.rdma.remote_addr = qp.remote.address + remote;
        request.wr.rdma.rkey = qp.remote.key;
        if signalled {
            request.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        request
    }

    /// Posts requests as one chain; scatter lists belong to requests of the same index.
    fn chain(
        &mut self,
        at: usize,
        requests: &mut [ffi::ibv_send_wr],
        lists: &mut [ffi::ibv_sge],
    ) -> Result<(), TransportError> {
        let count = requests.len();
        for i in 0..count {
            if requests[i].num_sge > 0 {
                requests[i].sg_list = &raw mut lists[i];
            }
            requests[i].next = if i + 1 < count { &raw mut requests[i + 1] } else { std::ptr::null_mut() };
        }
        let handle = self.queue_pairs[at].handle;
        let mut bad = std::ptr::null_mut();
        // SAFETY: requests and lists outlive the call, which copies them; sources are inside the registered segment,
        // which the device holds, and stay there until their completion.
        let result = unsafe {
            (*(*handle).context)
                .ops
                .post_send
                .map_or(NOT_THERE, |post| post(handle, &raw mut requests[0], &raw mut bad))
        };
        let qp = &mut self.queue_pairs[at];
        qp.requests += count as u32;
        zero("ibv_post_send", format!("{count} requests to rank {}", qp.peer), result)
    }

    /// The write of a 1 to a word.
    fn flag(&self, at: usize, word: Word, words: Words, signalled: bool) -> (ffi::ibv_send_wr, ffi::ibv_sge) {
        let mut request = self.request(at, words.offset(word), signalled);
        request.num_sge = 1;
        if self.config.inline_flags {
            request.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        let one = &self.device_of(at).one;
        // SAFETY: registered in `Device::open`.
        let lkey = unsafe { (*one.1).lkey };
        (request, ffi::ibv_sge { addr: &raw const *one.0 as u64, length: 4, lkey })
    }

    /// A completion that says that something failed.
    fn failure(&self, at: usize, number: u32, status: u32, vendor: u32) -> TransportError {
        let qp = &self.queue_pairs[at];
        let nth = number.wrapping_sub(qp.oldest) as usize;
        let command = qp.posted.get(nth).and_then(|posted| posted.command).unwrap_or_default();
        TransportError::Completion {
            peer: qp.peer,
            queue: command.queue,
            status: self.rails[0].device.library.status(status),
            code: status,
            vendor,
            command: Box::new(command),
        }
    }
}

impl Transport for Endpoint {
    fn name(&self) -> String {
        describe("verbs-rc", &self.config, &self.rails)
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        let Some(&Command { peer, queue, .. }) = commands.first() else { return Ok(0) };
        let at = self.of(peer, queue)?;
        let words = self.rails[0].device.words();
        let (mut requests, mut lists) =
            (Vec::with_capacity(2 * commands.len()), Vec::with_capacity(2 * commands.len()));
        let mut taken = 0;
        for command in commands {
            let flag = matches!(command.notice, Notice::Write(_));
            let data = command.bytes > 0 || matches!(command.notice, Notice::Immediate(_) | Notice::None);
            let needed = u32::from(flag) + u32::from(data);
            let in_flight = self.queue_pairs[at].posted.len() as u32;
            if requests.len() as u32 + needed > self.room(at) || in_flight >= self.config.in_flight_max {
                break;
            }
            // The other queue must have room before this one is committed.
            if let Notice::WriteOn(_, other) = command.notice
                && (self.of(peer, other)? != at && self.room(self.of(peer, other)?) == 0)
            {
                break;
            }
            let number = self.queue_pairs[at].oldest.wrapping_add(in_flight);
            let signalled = (taken as u32 + 1).is_multiple_of(self.config.signal_every.max(1));
            let first = requests.len();
            if data {
                let mut request = self.request(at, command.dst, signalled && !flag);
                request.num_sge = i32::from(command.bytes > 0);
                if let Notice::Immediate(word) = command.notice {
                    request.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
                    request.__bindgen_anon_1.imm_data = word.0.to_be();
                }
                let device = self.device_of(at);
                let addr = device.address() + command.src;
                requests.push(request);
                lists.push(ffi::ibv_sge { addr, length: command.bytes, lkey: device.local_key() });
            }
            if let Notice::Write(word) = command.notice {
                let (request, list) = self.flag(at, word, words, signalled);
                requests.push(request);
                lists.push(list);
            }
            for request in &mut requests[first..] {
                request.wr_id = (at as u64) << 32 | u64::from(number);
            }
            self.queue_pairs[at].posted.push_back(Posted { command: Some(*command), requests: needed });
            taken += 1;
            if let Notice::WriteOn(word, other) = command.notice {
                let other = self.of(peer, other)?;
                if other == at {
                    // One queue pair serves both queues.
                    let (mut request, list) = self.flag(at, word, words, false);
                    request.wr_id = (at as u64) << 32 | u64::from(number);
                    requests.push(request);
                    lists.push(list);
                    self.queue_pairs[at].posted.back_mut().expect("just pushed").requests += 1;
                } else {
                    self.post_alone(other, word, words)?;
                }
            }
        }
        if let Some(last) = requests.last_mut() {
            last.send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
            self.chain(at, &mut requests, &mut lists)?;
        }
        Ok(taken)
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
        let mut room: Completions = [const { MaybeUninit::uninit() }; 32];
        let mut all = 0;
        for rail in 0..self.rails.len() {
            let found = self.rails[rail].poll(&mut room)?;
            all += found.len();
            found.iter().try_for_each(|completion| self.complete(completion, events))?;
        }
        // The cause, here or on the peer, is worth more than the consequence.
        if let Some((since, peer)) = self.flushed
            && all == 0
            && since.elapsed() > FLUSH_GRACE
        {
            return Err(TransportError::Flushed { peer });
        }
        match self.health.look() {
            Some(since) => self.look(since),
            None => Ok(()),
        }
    }
}

impl Endpoint {
    /// Looks for what no completion says.
    fn look(&mut self, since: Duration) -> Result<(), TransportError> {
        self.rails.iter().try_for_each(|rail| rail.device.is_well())?;
        for (at, qp) in self.queue_pairs.iter().enumerate() {
            let waited = self.health.waited(at, !qp.posted.is_empty(), u64::from(qp.oldest), since);
            if waited > self.config.answer {
                // A flag that is posted alone has no command of its own.
                let command = qp.posted.iter().find_map(|posted| posted.command).unwrap_or_default();
                return Err(TransportError::NoAnswer {
                    peer: qp.peer,
                    waited_s: waited.as_secs(),
                    command: Box::new(command),
                });
            }
        }
        Ok(())
    }

    /// What a completion says.
    fn complete(&mut self, completion: &ffi::ibv_wc, events: &mut Vec<Event>) -> Result<(), TransportError> {
        let id = completion.wr_id();
        if let Some((status, vendor)) = completion.error() {
            let receive = id & RECEIVE != 0;
            let at = if receive { id as u32 as usize } else { (id >> 32) as usize };
            if receive || status == ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR {
                self.flushed.get_or_insert((Instant::now(), self.queue_pairs[at].peer));
                return Ok(());
            }
            return Err(self.failure(at, id as u32, status, vendor));
        }
        if id & RECEIVE != 0 {
            // A receive without memory completes by an immediate only.
            events.push(Event::Arrived(Word(u32::from_be(completion.imm_data))));
            return self.receive(id as u32 as usize);
        }
        let qp = &mut self.queue_pairs[(id >> 32) as usize];
        let complete = (id as u32).wrapping_sub(qp.oldest).wrapping_add(1);
        for posted in qp.posted.drain(..complete as usize) {
            qp.requests -= posted.requests;
            events.extend(posted.command.map(Event::Sent));
        }
        qp.oldest = qp.oldest.wrapping_add(complete);
        Ok(())
    }

    /// Posts a flag on a queue of its own.
    fn post_alone(&mut self, at: usize, word: Word, words: Words) -> Result<(), TransportError> {
        let (mut request, list) = self.flag(at, word, words, true);
        let qp = &mut self.queue_pairs[at];
        let number = qp.oldest.wrapping_add(qp.posted.len() as u32);
        request.wr_id = (at as u64) << 32 | u64::from(number);
        qp.posted.push_back(Posted { command: None, requests: 1 });
        self.chain(at, &mut [request], &mut [list])
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // SAFETY: each handle was made here and is destroyed once, before the completion queue of its rail.
        unsafe {
            for qp in &self.queue_pairs {
                (self.rails[qp.rail].device.library.ibv_destroy_qp)(qp.handle);
            }
        }
    }
}

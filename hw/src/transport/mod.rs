//! What carries puts between nodes: one small trait, and the proxy threads that serve it.
//!
//! ```text
//! CTA ── Fifo (bounded) ──▶ Proxy ── Transport::post ──▶ queue of a peer
//!                             │  ◀── Transport::poll ─── completions, immediates
//!                             └▶ raises `sent` words, and arrival words that came as immediates
//! ```
//!
//! A [`Command`] is one contiguous RDMA write with u64 offsets into the symmetric segments of sender and receiver. A put
//! whose regions fall into several runs is several commands. How the receiver learns of it depends on what the
//! transport orders, see [`Order`].

pub mod arrivals;
pub mod bounce;
pub mod exercise;
pub mod fifo;
pub mod loopback;
pub mod proxy;
pub mod puts;
pub mod registration;
pub mod ring;
pub mod segment;
#[cfg(feature = "rdma")]
pub mod verbs;

use std::fmt;

/// A flag word of a rank: its slot, counted over all families, and the bank in the top bit. An immediate carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Word(pub u32);

impl Word {
    /// Largest number of slots per bank.
    pub const SLOTS_MAX: u32 = 1 << 31;

    /// The word of a slot in a bank (0 or 1).
    pub const fn new(slot: u32, bank: u32) -> Self {
        Self(slot | bank << 31)
    }

    /// Slot.
    pub const fn slot(self) -> u32 {
        self.0 & (Self::SLOTS_MAX - 1)
    }

    /// Bank.
    pub const fn bank(self) -> u32 {
        self.0 >> 31
    }
}

/// Where the flag words of a rank lie in its memory, bank behind bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// First byte.
    pub at: u64,
    /// Slots of a bank.
    pub slots: u32,
    /// Banks: two that take turns, or one that is cleared before every run.
    pub banks: u32,
}

impl Words {
    /// Byte offset of a word.
    pub const fn offset(self, word: Word) -> u64 {
        self.at + ((word.bank() % self.banks) as u64 * self.slots as u64 + word.slot() as u64) * 4
    }
}

/// How the receiver of a write learns of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Notice {
    /// Not at all: a later write tells.
    #[default]
    None,
    /// A write of 1 to the word, after the data on the same queue.
    Write(Word),
    /// An immediate with the data.
    Immediate(Word),
    /// A write of 1 to the word on another queue: ordered with nothing.
    WriteOn(Word, u16),
}

/// One contiguous write to a peer's segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// Byte offset in the own segment.
    pub src: u64,
    /// Byte offset in the peer's segment.
    pub dst: u64,
    /// Bytes; 0 only tells.
    pub bytes: u32,
    /// Rank number of the peer.
    pub peer: u32,
    /// Queue.
    pub queue: u16,
    /// How the peer learns of it.
    pub notice: Notice,
    /// Word of the own rank to count up when the source of the whole put may be used again.
    pub sent: Option<Word>,
    /// Number of the put in its run.
    pub put: u32,
    /// Writes that the put consists of.
    pub writes: u32,
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { src, dst, bytes, peer, queue, notice, .. } = self;
        write!(f, "write of {bytes} bytes from {src} to {dst} of rank {peer}, queue {queue}, {notice:?}")
    }
}

/// Which writes of a queue a receiver sees in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// All of them: the last write of a put tells of the whole put.
    Queue,
    /// None: every write of a put carries an immediate, and the receiver counts.
    Unordered,
}

/// How receivers learn of the puts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// What the transport orders.
    pub order: Order,
    /// Whether an immediate replaces what the schedule publishes by a write on the same queue.
    pub by_immediates: bool,
}

/// What happened since a transport was last asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A write is complete: its source may be used again.
    Sent(Command),
    /// An immediate arrived, after its data.
    Arrived(Word),
}

/// Carries writes for one proxy thread.
pub trait Transport: Send {
    /// The name for records, with whatever slows it down on purpose.
    fn name(&self) -> String;

    /// Takes writes of one peer and queue, in order; returns how many. Fewer when a queue or a cap is full: ask again
    /// after [`Transport::poll`].
    ///
    /// # Errors
    /// [`TransportError`]: the connection is of no more use.
    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError>;

    /// Appends what happened since the last call.
    ///
    /// # Errors
    /// [`TransportError`]: the connection is of no more use.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError>;
}

/// Why a transport cannot go on, or cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A write that the NIC reports as failed.
    #[error("rank {peer} queue {queue}: {status} (status {code}, vendor {vendor:#x}) on {command}{}", hint(*.code))]
    Completion {
        /// Peer.
        peer: u32,
        /// Queue.
        queue: u16,
        /// The library's word for the status.
        status: &'static str,
        /// Its number.
        code: u32,
        /// The vendor's number.
        vendor: u32,
        /// The write.
        command: Box<Command>,
    },
    /// A connection that failed without a request of this rank as its cause.
    #[error("the connection with rank {peer} is in error: this rank refused a write of its peer, which says more")]
    Flushed {
        /// Peer.
        peer: u32,
    },
    /// A write that nothing is heard of, while the device reports no error.
    #[error("rank {peer} queue {}: does not answer: no write has completed for {waited_s} s, the oldest is a {command}; is the peer alive, is the link up?", .command.queue)]
    NoAnswer {
        /// Peer.
        peer: u32,
        /// How long nothing has completed.
        waited_s: u64,
        /// The oldest write on its way.
        command: Box<Command>,
    },
    /// A port that went down and stayed so.
    #[error(
        "{device} port {port} has been down for {down_s} s: is its link up? No rank of another node is reached through it"
    )]
    PortDown {
        /// NIC.
        device: String,
        /// Port.
        port: u8,
        /// How long.
        down_s: u64,
    },
    /// A NIC that gave up.
    #[error("{device} reports a fatal error; the kernel's log says more")]
    Fatal {
        /// NIC.
        device: String,
    },
    /// A call of the library that failed.
    #[error("{call}: {error}{}", if .what.is_empty() { String::new() } else { format!(" ({})", .what) })]
    Call {
        /// Call.
        call: &'static str,
        /// What for.
        what: String,
        /// The system's answer.
        error: std::io::Error,
    },
    /// The library or a device that is not here.
    #[error("{what}")]
    Missing {
        /// What is missing and what to do.
        what: String,
    },
    /// GPU memory that no NIC can be let into.
    #[error("no way for the NIC to the memory of the GPU: {why}; allowed: --registration bounce, through host memory")]
    NoWay {
        /// Every way that was tried, and why it failed.
        why: String,
    },
    /// A driver that does not copy, or not tell.
    #[error("copies of a GPU's memory: {0}")]
    Copies(String),
    /// A write to a rank that this transport does not reach.
    #[error("{transport} does not reach rank {peer}")]
    Unreachable {
        /// Transport.
        transport: &'static str,
        /// Peer.
        peer: u32,
    },
    /// A word came in the bank of another run.
    #[error("an arrival for slot {slot} came in bank {bank}, this run's is {run}: a put of another run is on its way")]
    WrongBank {
        /// Slot.
        slot: u32,
        /// Its bank.
        bank: u32,
        /// Bank of the run.
        run: u32,
    },
    /// More arrivals than the schedule has writes.
    #[error("slot {slot} got arrival {got} of {expected}: it belongs to one put, which is over")]
    Unexpected {
        /// Slot.
        slot: u32,
        /// Arrivals so far.
        got: u32,
        /// Arrivals that the schedule has.
        expected: u32,
    },
}

/// What the usual statuses mean; numbers of `ibv_wc_status`.
const fn hint(code: u32) -> &'static str {
    match code {
        10 => "; the peer refused the key or the address",
        12 => "; the peer does not answer: is it alive, is the link up?",
        13 => "; the peer takes no immediates: its proxy is slow or gone",
        _ => "",
    }
}

//! A connection between rank 0 and another rank: frames, heartbeats, and what a broken one means.

use super::{BootstrapError, Shared};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only says that the sender lives.
    Beat = 0,
    /// Part of an exchange.
    Data = 1,
    /// A rank failed: its number, then its words.
    Failed = 2,
    /// The sender leaves in peace.
    Bye = 3,
}

/// Longest frame. What ranks tell each other is small; a longer length is garbage.
const FRAME_MAX: u32 = 64 << 20;

/// One end of a connection.
pub(super) struct Link {
    pub(super) rank: u32,
    stream: Mutex<TcpStream>,
    inbox: Mutex<mpsc::Receiver<Vec<u8>>>,
}

/// The reading half.
pub(super) struct Receiver {
    stream: io::Result<TcpStream>,
    outbox: mpsc::Sender<Vec<u8>>,
}

impl Link {
    pub(super) fn new(rank: u32, stream: TcpStream) -> (Self, Receiver) {
        let (outbox, inbox) = mpsc::channel();
        // Frames are small and waited for.
        let _ = stream.set_nodelay(true);
        let receiver = Receiver { stream: stream.try_clone(), outbox };
        (Self { rank, stream: Mutex::new(stream), inbox: Mutex::new(inbox) }, receiver)
    }

    pub(super) fn send(&self, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        let frame = frame(kind, bytes);
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).write_all(&frame)
    }

    pub(super) fn close(&self) {
        let _ = self.stream.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
    }

    /// The next data, unless any rank fails first.
    pub(super) fn receive(&self, shared: &Shared) -> Result<Vec<u8>, BootstrapError> {
        let inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match inbox.recv_timeout(Duration::from_millis(20)) {
                Ok(bytes) => return Ok(bytes),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if let Some(failure) = shared.failure() {
                        return Err(failure);
                    }
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let left = BootstrapError::Peer { rank: self.rank, why: "left before the others".to_owned() };
                    return Err(shared.failure().unwrap_or(left));
                }
            }
        }
    }
}

fn frame(kind: Kind, bytes: &[u8]) -> Vec<u8> {
    [&[kind as u8][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

/// Tells a rank that joined that rank 0 gives up, and why.
pub(super) fn dismiss(stream: &mut TcpStream, why: &BootstrapError) {
    let bytes = [&0u32.to_le_bytes(), why.to_string().as_bytes()].concat();
    let _ = stream.write_all(&frame(Kind::Failed, &bytes));
}

/// Tells all peers, but for the one that told us, that a rank failed.
pub(super) fn tell(links: &[Link], rank: u32, why: &str, not_to: Option<u32>) {
    let bytes = [&rank.to_le_bytes(), why.as_bytes()].concat();
    for link in links.iter().filter(|link| Some(link.rank) != not_to) {
        let _ = link.send(Kind::Failed, &bytes);
    }
}

fn read_frame(stream: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
    if length > FRAME_MAX {
        return Err(io::Error::other(format!("a frame of {length} bytes, allowed are {FRAME_MAX}")));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    Ok((head[0], bytes))
}

/// Reads frames until the connection ends.
pub(super) fn read(links: &[Link], index: usize, receiver: Receiver, shared: &Shared, silence: Duration) {
    let peer = links[index].rank;
    let lost = |why: String| {
        let closing = shared.closing.load(Ordering::Acquire);
        if !closing && shared.fail(BootstrapError::Peer { rank: peer, why: why.clone() }) {
            tell(links, peer, &why, Some(peer));
        }
    };
    let mut stream = match receiver.stream {
        Ok(stream) => stream,
        Err(error) => return lost(format!("the connection cannot be read: {error}")),
    };
    let _ = stream.set_read_timeout(Some(silence));
    loop {
        match read_frame(&mut stream) {
            Ok((kind, bytes)) if kind == Kind::Data as u8 => {
                let _ = receiver.outbox.send(bytes);
            }
            Ok((kind, bytes)) if kind == Kind::Failed as u8 && bytes.len() >= 4 => {
                let rank = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let why = String::from_utf8_lossy(&bytes[4..]).into_owned();
                if shared.fail(BootstrapError::Peer { rank, why: why.clone() }) {
                    tell(links, rank, &why, Some(peer));
                }
            }
            Ok((kind, _)) if kind == Kind::Beat as u8 => {}
            Ok((kind, _)) if kind == Kind::Bye as u8 => return,
            Ok((kind, _)) => return lost(format!("sent a frame of unknown kind {kind}")),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return lost(format!("silent for {} s: dead, stopped, or the link is down", silence.as_secs_f64()));
            }
            Err(error) => return lost(format!("the connection broke ({error}): the process is gone")),
        }
    }
}

/// Tells peers that this process lives.
pub(super) fn beat(links: &[Link], shared: &Shared, every: Duration) {
    while !shared.closing.load(Ordering::Acquire) {
        for link in links {
            let _ = link.send(Kind::Beat, &[]);
        }
        std::thread::park_timeout(every);
    }
}

/// Several byte strings as one.
pub(super) fn pack(all: &[Vec<u8>]) -> Vec<u8> {
    all.iter().flat_map(|bytes| (bytes.len() as u32).to_le_bytes().into_iter().chain(bytes.iter().copied())).collect()
}

/// The reverse; none if it is not whole.
pub(super) fn unpack(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (item, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        all.push(item.to_vec());
        bytes = rest;
    }
    Some(all)
}

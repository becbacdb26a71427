//! The processes of a cluster, a rank and a GPU each: where they meet, what they tell each other.
//!
//! ```text
//! session (TCP)        results, decisions, bad news; the barrier before a launch, between nodes
//! segment in /dev/shm  that barrier inside a node: a counter that all spin on
//! Unix sockets         descriptors of exported device memory, inside a node
//! ```

use crate::bootstrap::Session;
use crate::cluster::Barrier;
use crate::device::HwError;
use crate::host::share;
use crate::transport::Word;
use crate::transport::segment::{Layout, Segment};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::fmt::Display;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Ranks that arrived, over all meetings; whether one failed.
const ARRIVED: Word = Word::new(0, 0);
/// See [`ARRIVED`].
const BROKEN: Word = Word::new(1, 0);

/// How long a descriptor may take between two processes that both are at it.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks for a connection.
const POLL: Duration = Duration::from_millis(1);

/// The processes of a cluster.
pub struct Party {
    session: Session,
    /// Rank numbers of this process's node.
    node: Range<usize>,
    meeting: Arc<Segment>,
    /// Meetings so far: all processes count alike.
    meetings: AtomicU32,
    descriptors: UnixListener,
    /// By rank number: names that are no files, so that none is left behind.
    sockets: Vec<Vec<u8>>,
}

impl Party {
    /// All processes come together, so many of them on each node; each calls this once.
    ///
    /// # Errors
    /// [`HwError::Party`].
    pub fn new(session: Session, per_node: usize) -> Result<Self, HwError> {
        let memory = Path::new("/dev/shm");
        let directory = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let rank = session.place().rank as usize;
        let first = rank - rank % per_node.max(1);
        let is_host = |rank: usize| rank == first;
        let mut segments = share(&session, &Layout::plain(2, 0), &directory, is_host).map_err(lost)?;
        let meeting = segments.swap_remove(first).ok_or_else(|| lost(format!("rank {first} has no segment")))?;
        let socket = format!("tilewire-{}", crate::bootstrap::fresh_secret()).into_bytes();
        let address = SocketAddr::from_abstract_name(&socket).map_err(lost)?;
        let descriptors = UnixListener::bind_addr(&address).map_err(lost)?;
        descriptors.set_nonblocking(true).map_err(lost)?;
        let sockets = session.exchange(&socket).map_err(lost)?;
        let node = first..(first + per_node.max(1)).min(sockets.len());
        Ok(Self { session, node, meeting, meetings: AtomicU32::new(0), descriptors, sockets })
    }

    /// Rank numbers of this process's node.
    pub fn node(&self) -> Range<usize> {
        self.node.clone()
    }

    /// What the processes speak through.
    pub(crate) const fn session(&self) -> &Session {
        &self.session
    }

    /// Number of this process's rank.
    pub fn rank(&self) -> usize {
        self.session.place().rank as usize
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.session.place().ranks as usize
    }

    /// Every process gives bytes and gets those of all, by rank number.
    ///
    /// # Errors
    /// [`HwError::Party`].
    pub fn exchange(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, HwError> {
        self.session.exchange(mine).map_err(lost)
    }

    /// What rank 0 says.
    ///
    /// # Errors
    /// [`HwError::Party`].
    pub fn told(&self, mine: &[u8]) -> Result<Vec<u8>, HwError> {
        Ok(self.exchange(mine)?.swap_remove(0))
    }

    /// Where the next launch's ranks meet.
    pub(crate) fn barrier(&self) -> Barrier<'_> {
        let meeting = self.meetings.fetch_add(1, Ordering::Relaxed) + 1;
        Barrier {
            arrived: self.meeting.word(ARRIVED),
            broken: self.meeting.word(BROKEN),
            goal: meeting.wrapping_mul(self.node.len() as u32),
            stop: Some(self.session.stop()),
            between: (self.node.len() < self.ranks()).then_some(&self.session),
        }
    }

    /// Every process gives a descriptor and gets those of the others of its node, by rank number; none of its own, and of
    /// other nodes.
    ///
    /// # Errors
    /// [`HwError::Party`].
    pub(crate) fn pass(&self, mine: BorrowedFd<'_>) -> Result<Vec<Option<OwnedFd>>, HwError> {
        let me = self.rank();
        let mut all: Vec<Option<OwnedFd>> = (0..self.ranks()).map(|_| None).collect();
        // A connection that nobody has accepted yet holds what was sent: no process waits for another to receive.
        let mut open = Vec::new();
        for rank in self.node().filter(|&rank| rank != me) {
            let address = SocketAddr::from_abstract_name(&self.sockets[rank]).map_err(lost)?;
            let stream = UnixStream::connect_addr(&address).map_err(lost)?;
            send(&stream, me as u32, mine)?;
            open.push(stream);
        }
        for _ in 1..self.node.len() {
            let stream = self.accept()?;
            let (rank, descriptor) = receive(&stream)?;
            let mate = self.node.contains(&(rank as usize)) && rank as usize != me;
            let place = all.get_mut(rank as usize).filter(|place| place.is_none() && mate);
            *place.ok_or_else(|| lost(format!("a descriptor of rank {rank} that nobody expects")))? = Some(descriptor);
        }
        self.session.barrier().map_err(lost)?;
        Ok(all)
    }

    /// The next process that connects, as long as none is lost and patience lasts.
    fn accept(&self) -> Result<UnixStream, HwError> {
        let begin = Instant::now();
        loop {
            match self.descriptors.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(lost)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(lost(error)),
                Err(_) if self.session.stop().load(Ordering::Relaxed) => return Err(lost("another rank failed")),
                Err(_) if begin.elapsed() > PATIENCE => {
                    return Err(lost(format!("no rank connected within {} s", PATIENCE.as_secs())));
                }
                Err(_) => std::thread::sleep(POLL),
            }
        }
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // Whoever still waits at the barrier waits for nobody: every run that ends well ends in an exchange behind it.
        self.meeting.word(BROKEN).store(1, Ordering::Release);
    }
}

fn lost(why: impl Display) -> HwError {
    HwError::Party(why.to_string())
}

fn send(stream: &UnixStream, rank: u32, descriptor: BorrowedFd<'_>) -> Result<(), HwError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(lost("no room for a descriptor"));
    }
    let bytes = rank.to_le_bytes();
    sendmsg(stream.as_fd(), &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).map_err(lost)?;
    Ok(())
}

fn receive(stream: &UnixStream) -> Result<(u32, OwnedFd), HwError> {
    stream.set_read_timeout(Some(PATIENCE)).map_err(lost)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let message = recvmsg(stream.as_fd(), &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).map_err(lost)?;
    let descriptor = control.drain().find_map(|item| match item {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    match descriptor {
        Some(descriptor) if message.bytes == bytes.len() => Ok((u32::from_le_bytes(bytes), descriptor)),
        _ => Err(lost("a message without a descriptor")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::local;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    fn party(ranks: u32, each: impl Fn(&Party) + Sync) {
        nodes(ranks, ranks as usize, each);
    }

    fn nodes(ranks: u32, per_node: usize, each: impl Fn(&Party) + Sync) {
        let sessions = local(ranks).expect("sessions of this process");
        std::thread::scope(|scope| {
            for session in sessions {
                let each = &each;
                scope.spawn(move || each(&Party::new(session, per_node).expect("all come")));
            }
        });
    }

    #[test]
    fn descriptors_come_from_every_other_rank() {
        let directory = std::env::temp_dir();
        party(3, |party| {
            for round in 0..2 {
                let path = directory.join(format!("tilewire-test-{}-{round}-{}", std::process::id(), party.rank()));
                let mut file =
                    File::options().read(true).write(true).create(true).truncate(true).open(&path).expect("a file");
                write!(file, "of rank {}", party.rank()).expect("it is written");
                let all = party.pass(file.as_fd()).expect("all pass theirs");
                std::fs::remove_file(&path).expect("it is there");
                for (rank, descriptor) in all.into_iter().enumerate() {
                    assert_eq!(descriptor.is_none(), rank == party.rank());
                    let Some(descriptor) = descriptor else { continue };
                    // Descriptors that were passed share one offset: two ranks that seek and read it would meet.
                    let expected = format!("of rank {rank}");
                    let mut text = vec![0; expected.len()];
                    File::from(descriptor).read_exact_at(&mut text, 0).expect("it reads");
                    assert_eq!(text, expected.as_bytes());
                }
                party.exchange(&[]).expect("all are here");
            }
        });
    }

    #[test]
    fn nobody_passes_a_barrier_alone_and_all_hear_of_a_failure() {
        let inside = AtomicU32::new(0);
        party(3, |party| {
            for meeting in 1..=50 {
                inside.fetch_add(1, Ordering::AcqRel);
                assert!(party.barrier().meet());
                assert!(inside.load(Ordering::Acquire) >= meeting * 3, "every rank had come");
            }
            let barrier = party.barrier();
            if party.rank() == 1 {
                barrier.fail();
            } else {
                assert!(!barrier.meet(), "one is missing and says so");
            }
        });
    }

    #[test]
    fn descriptors_stay_in_their_node_and_all_nodes_meet() {
        let inside = AtomicU32::new(0);
        nodes(4, 2, |party| {
            let mate = party.rank() ^ 1;
            let (reader, _writer) = std::io::pipe().expect("a pipe");
            let all = party.pass(reader.as_fd()).expect("all pass theirs");
            let got: Vec<usize> = (0..4).filter(|&rank| all[rank].is_some()).collect();
            assert_eq!(got, [mate]);
            for meeting in 1..=20 {
                inside.fetch_add(1, Ordering::AcqRel);
                assert!(party.barrier().meet());
                assert!(inside.load(Ordering::Acquire) >= meeting * 4, "every rank of both nodes had come");
            }
        });
    }

    #[test]
    fn rank_0_decides() {
        party(2, |party| assert_eq!(party.told(&[party.rank() as u8 + 7]).expect("it is said"), [7]));
    }
}

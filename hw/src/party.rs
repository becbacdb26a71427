//! The processes of a cluster on one host, a rank and a GPU each: where they meet, what they tell each other.
//!
//! ```text
//! session (TCP)        results, decisions, bad news
//! segment in /dev/shm  the barrier before a launch: a counter that all spin on
//! Unix sockets         descriptors of exported device memory
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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
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
    meeting: Arc<Segment>,
    /// Meetings so far: all processes count alike.
    meetings: AtomicU32,
    descriptors: UnixListener,
    /// By rank number.
    sockets: Vec<PathBuf>,
}

impl Party {
    /// All processes come together; each calls this once.
    ///
    /// # Errors
    /// [`HwError::Party`].
    pub fn new(session: Session) -> Result<Self, HwError> {
        let memory = Path::new("/dev/shm");
        let directory = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let rank = session.place().rank as usize;
        let is_host = |rank: usize| rank == 0;
        let segments = share(&session, &Layout::plain(2, 0), &directory, is_host).map_err(lost)?;
        let meeting = segments.into_iter().next().flatten().ok_or_else(|| lost("rank 0 has no segment"))?;
        let socket = std::env::temp_dir().join(format!("tilewire-{}", crate::bootstrap::fresh_secret()));
        let descriptors = UnixListener::bind(&socket).map_err(lost)?;
        descriptors.set_nonblocking(true).map_err(lost)?;
        let all = session.exchange(socket.to_string_lossy().as_bytes()).map_err(lost)?;
        let sockets = all.iter().map(|path| PathBuf::from(String::from_utf8_lossy(path).into_owned())).collect();
        debug_assert!(rank < all.len());
        Ok(Self { session, meeting, meetings: AtomicU32::new(0), descriptors, sockets })
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
            goal: meeting.wrapping_mul(self.ranks() as u32),
            stop: Some(self.session.stop()),
        }
    }

    /// Every process gives a descriptor and gets those of all others, by rank number; none of its own.
    ///
    /// # Errors
    /// [`HwError::Party`].
    pub(crate) fn pass(&self, mine: BorrowedFd<'_>) -> Result<Vec<Option<OwnedFd>>, HwError> {
        let me = self.rank();
        let mut all: Vec<Option<OwnedFd>> = (0..self.ranks()).map(|_| None).collect();
        // A connection that nobody has accepted yet holds what was sent: no process waits for another to receive.
        let mut open = Vec::new();
        for (_, socket) in self.sockets.iter().enumerate().filter(|&(rank, _)| rank != me) {
            let stream = UnixStream::connect(socket).map_err(lost)?;
            send(&stream, me as u32, mine)?;
            open.push(stream);
        }
        for _ in 1..self.ranks() {
            let stream = self.accept()?;
            let (rank, descriptor) = receive(&stream)?;
            let place = all.get_mut(rank as usize).filter(|place| place.is_none() && rank as usize != me);
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
        let _ = std::fs::remove_file(&self.sockets[self.rank()]);
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
    use std::io::{Read, Seek, Write};

    fn party(ranks: u32, each: impl Fn(&Party) + Sync) {
        let sessions = local(ranks).expect("sessions of this process");
        std::thread::scope(|scope| {
            for session in sessions {
                let each = &each;
                scope.spawn(move || each(&Party::new(session).expect("all come")));
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
                    let (mut other, mut text) = (File::from(descriptor), String::new());
                    other.rewind().expect("a file");
                    other.read_to_string(&mut text).expect("it reads");
                    assert_eq!(text, format!("of rank {rank}"));
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
    fn rank_0_decides() {
        party(2, |party| assert_eq!(party.told(&[party.rank() as u8 + 7]).expect("it is said"), [7]));
    }
}

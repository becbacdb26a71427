//! Brings the ranks of a run together: rendezvous over TCP at rank 0, exchange, barriers, and bad news.
//!
//! ```text
//! rank 1 ──hello, proof──▶ ┌────────┐ ◀── rank 2       a stranger: refused, and the others go on
//!        ◀──── proof ───── │ rank 0 │                  a lost or silent peer: every rank learns of it
//!                          └────────┘
//! ```
//!
//! Both sides prove that they know the secret (a keyed BLAKE3 hash over both nonces); it does not cross the network, and
//! nothing is encrypted. All waiting is bounded: a peer that closes, says that it failed, or falls silent ends every
//! wait with a [`BootstrapError`] that names it, and raises the flag of [`Session::stop`].

mod handshake;
mod link;
mod place;

pub use handshake::VERSION;
pub use place::{Place, RANK, RANKS, end_with, launched_among_others, launcher_variables, place};

use link::{Kind, Link};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a broken connection's reader may take to hand on what the peer said last.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How to join.
#[derive(Clone)]
pub struct Join {
    /// Who and how many.
    pub place: Place,
    /// Where rank 0 listens, host and port.
    pub address: String,
    /// What all ranks know and strangers do not.
    pub secret: String,
    /// How long to wait for the others.
    pub patience: Duration,
    /// How long a peer may be silent; it speaks four times as often.
    pub silence: Duration,
    /// Protocol version to claim: [`VERSION`], but for a test.
    pub version: u32,
}

/// Why ranks did not come or stay together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BootstrapError {
    /// Rank or number of ranks makes no sense.
    #[error("{0}")]
    Place(String),
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {address}: {error}")]
    Listen {
        /// Address.
        address: String,
        /// The system's words.
        error: String,
    },
    /// Rank 0 was not reached or did not accept.
    #[error("rank {rank} did not join rank 0 at {address}: {why}")]
    NotJoined {
        /// The rank that wants to join.
        rank: u32,
        /// Address.
        address: String,
        /// What happened last.
        why: String,
    },
    /// Ranks that did not come in time.
    #[error("ranks {ranks:?} did not come within {within_s} s{}", refused(.strangers))]
    Absent {
        /// Ranks.
        ranks: Vec<u32>,
        /// Patience.
        within_s: u64,
        /// Connections that were refused, and why.
        strangers: Vec<String>,
    },
    /// A peer that knows the secret is of another build.
    #[error("rank {rank} speaks protocol {theirs}, this build speaks {ours}: run the same build on every node")]
    Version {
        /// The peer.
        rank: u32,
        /// Its version.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// A peer that failed, closed or fell silent.
    #[error("rank {rank}: {why}")]
    Peer {
        /// The peer.
        rank: u32,
        /// What is known.
        why: String,
    },
}

fn refused(strangers: &[String]) -> String {
    if strangers.is_empty() { String::new() } else { format!("; refused: {}", strangers.join("; ")) }
}

/// What all threads of a session share.
#[derive(Default)]
struct Shared {
    failure: Mutex<Option<BootstrapError>>,
    stop: Arc<AtomicBool>,
    closing: AtomicBool,
}

impl Shared {
    /// Keeps the first failure. Whether this is it.
    fn fail(&self, failure: BootstrapError) -> bool {
        let mut kept = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let first = kept.is_none();
        kept.get_or_insert(failure);
        drop(kept);
        self.stop.store(true, Ordering::Release);
        first
    }

    fn failure(&self) -> Option<BootstrapError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A rank among the others.
pub struct Session {
    place: Place,
    shared: Arc<Shared>,
    /// Rank 0: a link to each other rank. Others: one, to rank 0.
    links: Arc<Vec<Link>>,
    heart: Option<std::thread::JoinHandle<()>>,
    readers: Vec<std::thread::JoinHandle<()>>,
    /// Connections that rank 0 refused, and why.
    pub refused: Vec<String>,
}

impl Session {
    /// Joins the others.
    ///
    /// # Errors
    /// [`BootstrapError`].
    pub fn join(join: &Join) -> Result<Self, BootstrapError> {
        join.place.check()?;
        if join.place.rank != 0 {
            return Self::come(join);
        }
        let listen =
            |error: io::Error| BootstrapError::Listen { address: join.address.clone(), error: error.to_string() };
        let listener = TcpListener::bind(&join.address).map_err(listen)?;
        Self::receive(join, &listener)
    }

    /// Joins as rank 0 at a listener that is there.
    ///
    /// # Errors
    /// [`BootstrapError`].
    pub fn receive(join: &Join, listener: &TcpListener) -> Result<Self, BootstrapError> {
        let (streams, refused) = handshake::accept_all(join, listener)?;
        Ok(Self::start(join, streams, refused))
    }

    fn come(join: &Join) -> Result<Self, BootstrapError> {
        let begin = Instant::now();
        let not_joined =
            |why: String| BootstrapError::NotJoined { rank: join.place.rank, address: join.address.clone(), why };
        loop {
            let why = match TcpStream::connect(&join.address) {
                Ok(stream) => match handshake::introduce(join, stream) {
                    Ok(stream) => return Ok(Self::start(join, vec![(0, stream)], Vec::new())),
                    Err(handshake::Refusal::Version(theirs)) => {
                        return Err(BootstrapError::Version { rank: 0, theirs, ours: join.version });
                    }
                    Err(handshake::Refusal::Final(why)) => return Err(not_joined(why)),
                    Err(handshake::Refusal::Broken(why)) => why,
                },
                Err(error) => error.to_string(),
            };
            if begin.elapsed() > join.patience {
                return Err(not_joined(format!("{why}, for {} s", join.patience.as_secs())));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn start(join: &Join, streams: Vec<(u32, TcpStream)>, refused: Vec<String>) -> Self {
        let shared = Arc::new(Shared::default());
        let (mut links, mut receivers) = (Vec::new(), Vec::new());
        for (rank, stream) in streams {
            let (link, receiver) = Link::new(rank, stream);
            links.push(link);
            receivers.push(receiver);
        }
        let links = Arc::new(links);
        let mut readers = Vec::new();
        for (index, receiver) in receivers.into_iter().enumerate() {
            let (links, shared, silence) = (links.clone(), shared.clone(), join.silence);
            readers.push(std::thread::spawn(move || link::read(&links, index, receiver, &shared, silence)));
        }
        let heart = {
            let (links, shared, every) = (links.clone(), shared.clone(), join.silence / 4);
            Some(std::thread::spawn(move || link::beat(&links, &shared, every)))
        };
        Self { place: join.place, shared, links, heart, readers, refused }
    }

    /// Who and how many.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Raised when any rank has failed.
    pub fn stop(&self) -> &AtomicBool {
        &self.shared.stop
    }

    /// The same flag, for threads that outlive a borrow.
    pub(crate) fn stop_flag(&self) -> Arc<AtomicBool> {
        self.shared.stop.clone()
    }

    /// The first failure that became known.
    pub fn failure(&self) -> Option<BootstrapError> {
        self.shared.failure()
    }

    /// Tells every rank that this one failed, and why.
    pub fn abort(&self, why: &str) {
        let rank = self.place.rank;
        if self.shared.fail(BootstrapError::Peer { rank, why: why.to_owned() }) {
            link::tell(&self.links, rank, why, None);
        }
    }

    /// Every rank gives bytes and gets those of all, in order of ranks.
    ///
    /// # Errors
    /// [`BootstrapError::Peer`].
    pub fn exchange(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        if self.place.rank == 0 {
            let mut all = vec![mine.to_vec()];
            for link in self.links.iter() {
                all.push(link.receive(&self.shared)?);
            }
            let packed = link::pack(&all);
            for link in self.links.iter() {
                self.send(link, &packed)?;
            }
            return Ok(all);
        }
        let link = &self.links[0];
        self.send(link, mine)?;
        let packed = link.receive(&self.shared)?;
        link::unpack(&packed).filter(|all| all.len() == self.place.ranks as usize).ok_or_else(|| BootstrapError::Peer {
            rank: 0,
            why: "sent a list that does not fit the number of ranks".to_owned(),
        })
    }

    /// Waits for every rank.
    ///
    /// # Errors
    /// [`BootstrapError::Peer`].
    pub fn barrier(&self) -> Result<(), BootstrapError> {
        self.exchange(&[]).map(|_| ())
    }

    fn send(&self, link: &Link, bytes: &[u8]) -> Result<(), BootstrapError> {
        link.send(Kind::Data, bytes).map_err(|error| {
            // A peer that gave up said why before it closed, and what it said can still be read.
            let begin = Instant::now();
            while self.shared.failure().is_none() && begin.elapsed() < LAST_WORDS {
                std::thread::sleep(Duration::from_millis(1));
            }
            let failure = BootstrapError::Peer { rank: link.rank, why: format!("lost: {error}") };
            self.shared.fail(failure.clone());
            self.shared.failure().unwrap_or(failure)
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        for link in self.links.iter() {
            let _ = link.send(Kind::Bye, &[]);
            link.close();
        }
        for thread in self.readers.drain(..).chain(self.heart.take()) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// `ranks` sessions of one process, for ranks that are threads.
///
/// # Errors
/// [`BootstrapError`].
pub fn local(ranks: u32) -> Result<Vec<Session>, BootstrapError> {
    let listen =
        |error: io::Error| BootstrapError::Listen { address: "127.0.0.1".to_owned(), error: error.to_string() };
    let listener = TcpListener::bind("127.0.0.1:0").map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?.to_string();
    let patience = Duration::from_secs(30);
    let secret = handshake::fresh_secret();
    let join = |rank| Join {
        place: Place { rank, ranks },
        address: address.clone(),
        secret: secret.clone(),
        patience,
        silence: patience,
        version: VERSION,
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..ranks)
            .map(|rank| {
                let join = join(rank);
                scope.spawn(move || Session::join(&join))
            })
            .collect();
        let mut sessions = vec![Session::receive(&join(0), &listener)?];
        for other in others {
            sessions.push(other.join().expect("joining does not panic")?);
        }
        Ok(sessions)
    })
}

/// A secret that nobody can guess, for the processes that one launcher starts.
pub fn fresh_secret() -> String {
    handshake::fresh_secret()
}

//! How a rank and rank 0 recognise each other. The form of these messages is the same in every version.

use super::{BootstrapError, Join, link};
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Version of everything that ranks say to each other after the handshake, and of what they write to each other.
pub const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"tilewire";

/// How long a connection may take to introduce itself.
const INTRODUCTION: Duration = Duration::from_secs(5);

/// Why a connection is not to be.
pub(super) enum Refusal {
    /// The other side has another version.
    Version(u32),
    /// Asking again will not help.
    Final(String),
    /// Perhaps it will.
    Broken(String),
}

/// Magic, version, rank, number of ranks, nonce.
struct Hello {
    version: u32,
    rank: u32,
    ranks: u32,
    nonce: [u8; 32],
}

const HELLO: usize = 8 + 3 * 4 + 32;

impl Hello {
    fn new(join: &Join) -> Self {
        Self { version: join.version, rank: join.place.rank, ranks: join.place.ranks, nonce: nonce() }
    }

    fn bytes(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(MAGIC);
        for (i, number) in [self.version, self.rank, self.ranks].into_iter().enumerate() {
            bytes[8 + 4 * i..12 + 4 * i].copy_from_slice(&number.to_le_bytes());
        }
        bytes[20..].copy_from_slice(&self.nonce);
        bytes
    }

    fn read(stream: &mut TcpStream) -> Result<Self, String> {
        let mut bytes = [0; HELLO];
        // The magic first: a stranger need not send more to be told apart.
        stream.read_exact(&mut bytes[..8]).map_err(|error| format!("said nothing of use: {error}"))?;
        if &bytes[..8] != MAGIC {
            return Err("is no tilewire rank".to_owned());
        }
        stream.read_exact(&mut bytes[8..]).map_err(|error| format!("broke off: {error}"))?;
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[20..]);
        Ok(Self { version: number(8), rank: number(12), ranks: number(16), nonce })
    }
}

/// Shows that `side` knows the secret, for this connection only.
fn proof(secret: &str, side: &str, client: &Hello, server: &Hello) -> blake3::Hash {
    let key = blake3::derive_key("tilewire bootstrap", secret.as_bytes());
    let text = [side.as_bytes(), &client.bytes(), &server.bytes()].concat();
    blake3::keyed_hash(&key, &text)
}

fn nonce() -> [u8; 32] {
    let mut bytes = [0; 32];
    for part in bytes.chunks_exact_mut(8) {
        // The keys of a fresh state come from the system's random numbers.
        part.copy_from_slice(&RandomState::new().hash_one(0u8).to_le_bytes());
    }
    *blake3::hash(&bytes).as_bytes()
}

pub(super) fn fresh_secret() -> String {
    blake3::hash(&[nonce(), nonce()].concat()).to_hex().to_string()
}

fn read_proof(stream: &mut TcpStream) -> Result<blake3::Hash, String> {
    let mut bytes = [0; 32];
    stream.read_exact(&mut bytes).map_err(|error| format!("broke off: {error}"))?;
    Ok(blake3::Hash::from_bytes(bytes))
}

/// The joining side.
pub(super) fn introduce(join: &Join, mut stream: TcpStream) -> Result<TcpStream, Refusal> {
    let broken = |error: String| Refusal::Broken(format!("rank 0 {error}"));
    let io = |error: std::io::Error| Refusal::Broken(error.to_string());
    stream.set_read_timeout(Some(INTRODUCTION)).map_err(io)?;
    let mine = Hello::new(join);
    stream.write_all(&mine.bytes()).map_err(io)?;
    let theirs = Hello::read(&mut stream).map_err(broken)?;
    stream.write_all(proof(&join.secret, "joining", &mine, &theirs).as_bytes()).map_err(io)?;
    let answer = read_proof(&mut stream)
        .map_err(|_| Refusal::Final("rank 0 refused: the secrets differ, or this rank is there already".to_owned()))?;
    if answer != proof(&join.secret, "receiving", &mine, &theirs) {
        return Err(Refusal::Final("whoever listens there does not know the secret".to_owned()));
    }
    if theirs.version != mine.version {
        return Err(Refusal::Version(theirs.version));
    }
    if theirs.ranks != mine.ranks {
        return Err(Refusal::Final(format!("rank 0 is one of {}, this rank of {}", theirs.ranks, mine.ranks)));
    }
    Ok(stream)
}

/// The receiving side: the peer's hello, once it has shown that it knows the secret.
fn recognise(join: &Join, mut stream: TcpStream) -> Result<(Hello, TcpStream), String> {
    let io = |error: std::io::Error| error.to_string();
    stream.set_read_timeout(Some(INTRODUCTION)).map_err(io)?;
    let theirs = Hello::read(&mut stream)?;
    let mine = Hello::new(join);
    stream.write_all(&mine.bytes()).map_err(io)?;
    if read_proof(&mut stream)? != proof(&join.secret, "joining", &theirs, &mine) {
        return Err("does not know the secret".to_owned());
    }
    stream.write_all(proof(&join.secret, "receiving", &theirs, &mine).as_bytes()).map_err(io)?;
    Ok((theirs, stream))
}

type Accepted = (Vec<(u32, TcpStream)>, Vec<String>);

/// Rank 0: waits for all other ranks; refuses strangers and goes on.
pub(super) fn accept_all(join: &Join, listener: &TcpListener) -> Result<Accepted, BootstrapError> {
    let begin = Instant::now();
    let listen =
        |error: std::io::Error| BootstrapError::Listen { address: join.address.clone(), error: error.to_string() };
    listener.set_nonblocking(true).map_err(listen)?;
    let (sender, known) = mpsc::channel();
    let mut streams: Vec<Option<TcpStream>> = (1..join.place.ranks).map(|_| None).collect();
    let mut refused = Vec::new();
    while streams.iter().any(Option::is_none) {
        if let Ok((stream, from)) = listener.accept() {
            // A stranger that says nothing must not keep the others waiting.
            let (join, sender) = (join.clone(), sender.clone());
            std::thread::spawn(move || {
                let result = stream.set_nonblocking(false).map_err(|error| error.to_string());
                let _ = sender.send((from, result.and_then(|()| recognise(&join, stream))));
            });
            continue;
        }
        match known.recv_timeout(Duration::from_millis(10)) {
            Ok((from, Err(why))) => refused.push(format!("{from} {why}")),
            Ok((from, Ok((hello, stream)))) => {
                let Hello { version, rank, ranks, .. } = hello;
                if version != join.version {
                    let error = BootstrapError::Version { rank, theirs: version, ours: join.version };
                    streams.iter_mut().flatten().for_each(|stream| link::dismiss(stream, &error));
                    return Err(error);
                }
                match streams.get_mut((rank as usize).wrapping_sub(1)) {
                    Some(place @ None) if ranks == join.place.ranks => *place = Some(stream),
                    _ => refused.push(format!("{from} says rank {rank} of {ranks}, which is taken or out of range")),
                }
            }
            Err(_) => {}
        }
        if begin.elapsed() > join.patience {
            let ranks = (1..).zip(&streams).filter(|(_, stream)| stream.is_none()).map(|(rank, _)| rank).collect();
            let within_s = join.patience.as_secs();
            let error = BootstrapError::Absent { ranks, within_s, strangers: refused };
            streams.iter_mut().flatten().for_each(|stream| link::dismiss(stream, &error));
            return Err(error);
        }
    }
    Ok(((1..).zip(streams.into_iter().flatten()).collect(), refused))
}

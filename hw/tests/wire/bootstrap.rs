//! Ranks come together, strangers do not get in, and a rank that is lost is missed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};
use tilewire_hw::bootstrap::{BootstrapError, Join, Place, Session, VERSION, local};

struct Host {
    listener: TcpListener,
    join: Join,
}

/// A listener, and how to join there as one of `ranks`.
fn host(ranks: u32) -> Host {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let join = Join {
        place: Place { rank: 0, ranks },
        address: listener.local_addr().expect("an address").to_string(),
        secret: "of all ranks".to_owned(),
        patience: Duration::from_secs(20),
        silence: Duration::from_secs(20),
        version: VERSION,
    };
    Host { listener, join }
}

impl Host {
    fn rank(&self, rank: u32) -> Join {
        Join { place: Place { rank, ..self.join.place }, ..self.join.clone() }
    }
}

#[test]
fn all_ranks_get_what_all_gave() {
    let sessions = local(5).expect("joins");
    std::thread::scope(|scope| {
        for session in &sessions {
            scope.spawn(move || {
                for round in 0..20u8 {
                    let rank = session.place().rank as u8;
                    let all = session.exchange(&vec![rank; usize::from(rank) + 1000 * usize::from(round % 2)]);
                    let all = all.expect("nobody fails");
                    for (rank, bytes) in all.iter().enumerate() {
                        assert_eq!(bytes, &vec![rank as u8; rank + 1000 * usize::from(round % 2)]);
                    }
                }
            });
        }
    });
}

#[test]
fn garbage_and_strangers_are_refused_and_the_others_join() {
    let host = host(2);
    let (session, stranger) = std::thread::scope(|scope| {
        let receive = scope.spawn(|| Session::receive(&host.join, &host.listener));
        let connect = || TcpStream::connect(&host.join.address).expect("connects");
        // One that says nothing for now, one that speaks another language, one without the secret.
        let silent = connect();
        let mut garbage = connect();
        garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sends");
        let mut answer = Vec::new();
        let _ = garbage.read_to_end(&mut answer);
        assert!(answer.is_empty(), "a stranger learns nothing: {answer:?}");
        let stranger = Session::join(&Join { secret: "another".to_owned(), ..host.rank(1) });
        let peer = Session::join(&host.rank(1)).expect("joins in spite of them");
        let session = receive.join().expect("no panic").expect("joins");
        drop((silent, peer));
        (session, stranger)
    });
    let text = stranger.err().expect("refused").to_string();
    assert!(text.contains("the secrets differ"), "{text}");
    assert_eq!(session.refused.len(), 2, "{:?}", session.refused);
    assert!(session.refused.iter().any(|text| text.ends_with("is no tilewire rank")), "{:?}", session.refused);
    assert!(session.refused.iter().any(|text| text.ends_with("does not know the secret")), "{:?}", session.refused);
}

#[test]
fn another_build_is_named_on_both_sides() {
    let host = host(2);
    let (ours, theirs) = std::thread::scope(|scope| {
        let receive = scope.spawn(|| Session::receive(&host.join, &host.listener));
        let other = Session::join(&Join { version: VERSION + 1, ..host.rank(1) });
        (receive.join().expect("no panic").err(), other.err())
    });
    assert_eq!(ours, Some(BootstrapError::Version { rank: 1, theirs: VERSION + 1, ours: VERSION }));
    assert_eq!(theirs, Some(BootstrapError::Version { rank: 0, theirs: VERSION, ours: VERSION + 1 }));
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let host = host(3);
    // Long enough for rank 1 to come on a busy machine.
    let join = Join { patience: Duration::from_secs(4), ..host.join.clone() };
    let error = std::thread::scope(|scope| {
        let receive = scope.spawn(|| Session::receive(&join, &host.listener));
        let peer = Session::join(&host.rank(1)).expect("joins");
        let error = receive.join().expect("no panic").err();
        let told = peer.barrier().expect_err("rank 0 gave up").to_string();
        assert!(told.starts_with("rank 0: ranks [2] did not come within"), "{told}");
        error
    });
    assert!(matches!(&error, Some(BootstrapError::Absent { ranks, .. }) if ranks == &[2]), "{error:?}");
}

#[test]
fn two_processes_of_one_rank_are_not_both_taken() {
    let host = host(3);
    let session = std::thread::scope(|scope| {
        let receive = scope.spawn(|| Session::receive(&host.join, &host.listener));
        let first = Session::join(&host.rank(1)).expect("joins");
        let second = Session::join(&host.rank(1)).expect("knows the secret, and is left aside");
        let other = Session::join(&host.rank(2)).expect("joins");
        let session = receive.join().expect("no panic").expect("joins");
        drop((first, second, other));
        session
    });
    assert!(session.refused[0].contains("says rank 1 of 3, which is taken"), "{:?}", session.refused);
}

#[test]
fn a_lost_rank_ends_every_wait_and_is_named() {
    let host = host(3);
    std::thread::scope(|scope| {
        let receive = scope.spawn(|| Session::receive(&host.join, &host.listener).expect("joins"));
        let doomed = Session::join(&host.rank(1)).expect("joins");
        let other = Session::join(&host.rank(2)).expect("joins");
        let root = receive.join().expect("no panic");
        let waits = [scope.spawn(move || (root.barrier(), root)), scope.spawn(move || (other.barrier(), other))];
        doomed.abort("wrong value");
        let expected = BootstrapError::Peer { rank: 1, why: "wrong value".to_owned() };
        for wait in waits {
            let (result, session) = wait.join().expect("no panic");
            assert_eq!(result, Err(expected.clone()));
            assert!(session.stop().load(std::sync::atomic::Ordering::Acquire));
        }
        assert!(doomed.barrier().is_err(), "who failed does not go on");
    });
}

/// A peer whose process hangs, or whose link is down: nothing is closed, and nothing comes.
#[test]
fn a_silent_rank_is_given_up() {
    let host = host(2);
    let join = Join { silence: Duration::from_millis(600), ..host.join.clone() };
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let receive = scope.spawn(|| Session::receive(&join, &host.listener).expect("joins"));
        // Speaks four times in its own, much longer silence: too seldom for rank 0.
        let mute = Session::join(&Join { silence: Duration::from_secs(60), ..host.rank(1) }).expect("joins");
        let root = receive.join().expect("no panic");
        let error = root.barrier().expect_err("rank 1 is silent");
        assert!(matches!(&error, BootstrapError::Peer { rank: 1, why } if why.contains("silent for 0.6 s")), "{error}");
        drop(mute);
    });
    assert!(begin.elapsed() < Duration::from_secs(15));
}

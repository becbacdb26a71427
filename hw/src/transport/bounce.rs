//! Puts of a GPU whose memory the NIC does not reach: through host memory on both sides.
//!
//! ```text
//! GPU ── copy out ──▶ host segment ══ inner transport ══▶ host segment ── copy in ──▶ GPU, then the flag
//! ```
//!
//! The receiver must copy before anyone sees the flag, so every put is told by an immediate, and a transport of this kind
//! knows which bytes each word tells of. Tested with doubles; no GPU has met a NIC through this code.

use super::{Command, Event, Notice, Transport, TransportError, Word};
use std::collections::BTreeMap;

/// Copies between a GPU's memory and the host segment that stands for it; offsets are the same in both.
pub trait Copier: Send {
    /// From the GPU; when this returns, the NIC may read.
    ///
    /// # Errors
    /// [`TransportError`].
    fn copy_out(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError>;

    /// To the GPU; when this returns, its threads may read.
    ///
    /// # Errors
    /// [`TransportError`].
    fn copy_in(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError>;
}

/// Bytes that a put lands in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landing {
    /// Immediates that tell of it.
    pub immediates: u32,
    /// Offset and size of its parts.
    pub parts: Vec<(u64, u64)>,
}

/// A transport between host segments, with a copy at either end.
pub struct Bounce<T, C> {
    inner: T,
    copier: C,
    /// By slot of the arrival word.
    landings: BTreeMap<u32, Landing>,
    came: BTreeMap<Word, u32>,
    events: Vec<Event>,
}

impl<T: Transport, C: Copier> Bounce<T, C> {
    /// `landings` holds, by slot of its arrival word, every put that comes to this rank.
    pub const fn new(inner: T, copier: C, landings: BTreeMap<u32, Landing>) -> Self {
        Self { inner, copier, landings, came: BTreeMap::new(), events: Vec::new() }
    }

    fn land(&mut self, word: Word) -> Result<(), TransportError> {
        let Some(landing) = self.landings.get(&word.slot()) else {
            return Err(TransportError::Unexpected { slot: word.slot(), got: 1, expected: 0 });
        };
        let came = self.came.entry(word).or_default();
        *came += 1;
        if *came == landing.immediates {
            self.came.remove(&word);
            landing.parts.iter().try_for_each(|&(offset, bytes)| self.copier.copy_in(offset, bytes))?;
        }
        Ok(())
    }
}

impl<T: Transport, C: Copier> Transport for Bounce<T, C> {
    fn name(&self) -> String {
        format!("{}, GPU memory through a pinned host bounce buffer", self.inner.name())
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        for (taken, command) in commands.iter().enumerate() {
            if matches!(command.notice, Notice::Write(_) | Notice::WriteOn(..)) {
                let what = format!("a flag that is written would be seen before its bytes are copied: {command}");
                return Err(TransportError::Missing { what });
            }
            self.copier.copy_out(command.src, u64::from(command.bytes))?;
            if self.inner.post(std::slice::from_ref(command))? == 0 {
                return Ok(taken);
            }
        }
        Ok(commands.len())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
        let mut found = std::mem::take(&mut self.events);
        self.inner.poll(&mut found)?;
        for event in &found {
            if let Event::Arrived(word) = event {
                self.land(*word)?;
            }
        }
        events.append(&mut found);
        self.events = found;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::segment::{Layout, Segment};
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    /// A GPU's memory beside its host segment.
    struct Memory {
        gpu: Arc<Segment>,
        host: Arc<Segment>,
    }

    impl Copier for Memory {
        fn copy_out(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
            self.gpu.copy_to(offset, &self.host, offset, bytes);
            Ok(())
        }

        fn copy_in(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
            self.host.copy_to(offset, &self.gpu, offset, bytes);
            Ok(())
        }
    }

    /// Immediates on their way to the other side.
    type Mail = Arc<Mutex<VecDeque<Word>>>;

    /// Copies between host segments and tells by immediates; takes one write at a time.
    struct Host {
        own: Arc<Segment>,
        peer: Arc<Segment>,
        out: Mail,
        inbox: Mail,
        sent: Vec<Event>,
    }

    impl Transport for Host {
        fn name(&self) -> String {
            "double".to_owned()
        }

        fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
            let Some(command) = commands.first().filter(|_| self.sent.is_empty()) else { return Ok(0) };
            self.own.copy_to(command.src, &self.peer, command.dst, u64::from(command.bytes));
            if let Notice::Immediate(word) = command.notice {
                self.out.lock().expect("not poisoned").push_back(word);
            }
            self.sent.push(Event::Sent(*command));
            Ok(1)
        }

        fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
            events.append(&mut self.sent);
            events.extend(self.inbox.lock().expect("not poisoned").drain(..).map(Event::Arrived));
            Ok(())
        }
    }

    #[test]
    fn bytes_are_in_the_gpu_before_their_word_is_told_and_not_before_the_put_is_whole() {
        let layout = Layout::plain(2, 4096);
        let segment = || Arc::new(Segment::private(&layout).expect("memory"));
        let (gpus, hosts, mail) = ([segment(), segment()], [segment(), segment()], [Mail::default(), Mail::default()]);
        let at = layout.buffer(0).0;
        let end = |me: usize, landings| {
            let peer = 1 - me;
            let (own, other) = (hosts[me].clone(), hosts[peer].clone());
            let host = Host { own, peer: other, out: mail[peer].clone(), inbox: mail[me].clone(), sent: Vec::new() };
            Bounce::new(host, Memory { gpu: gpus[me].clone(), host: hosts[me].clone() }, landings)
        };
        // A put of two writes, which land apart.
        let landing = Landing { immediates: 2, parts: vec![(at + 1000, 100), (at + 2000, 50)] };
        let (mut sender, mut receiver) = (end(0, BTreeMap::new()), end(1, BTreeMap::from([(1, landing)])));
        gpus[0].fill(at, 150, 7);
        let word = Word::new(1, 0);
        let write = |src, dst, bytes| Command {
            src: at + src,
            dst: at + dst,
            bytes,
            peer: 1,
            notice: Notice::Immediate(word),
            writes: 2,
            ..Command::default()
        };
        let read = |offset, bytes| {
            let mut data = Vec::new();
            gpus[1].read(at + offset, bytes, &mut data);
            data
        };
        let commands = [write(0, 1000, 100), write(100, 2000, 50)];
        let mut events = Vec::new();
        assert_eq!(sender.post(&commands).expect("posts"), 1, "the inner queue is full");
        receiver.poll(&mut events).expect("polls");
        assert_eq!((events.len(), read(1000, 100)), (1, vec![0; 100]), "half a put stays in the host");
        sender.poll(&mut events).expect("polls");
        assert_eq!(sender.post(&commands[1..]).expect("posts"), 1);
        receiver.poll(&mut events).expect("polls");
        assert_eq!((read(1000, 100), read(2000, 50)), (vec![7; 100], vec![7; 50]));
        assert_eq!(events.iter().filter(|event| **event == Event::Arrived(word)).count(), 2);
        let error = sender.post(&[Command { notice: Notice::Write(word), ..commands[0] }]).expect_err("a flag write");
        assert!(error.to_string().contains("would be seen before its bytes"), "{error}");
        assert!(sender.name().contains("through a pinned host bounce buffer"));
        mail[1].lock().expect("not poisoned").push_back(Word::new(0, 0));
        assert!(matches!(receiver.poll(&mut events), Err(TransportError::Unexpected { slot: 0, .. })));
    }
}

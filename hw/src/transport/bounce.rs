//! Puts of memory that the NIC does not reach: through host memory on both sides.
//!
//! ```text
//! GPU ── copy out ──▶ host segment ══ inner transport ══▶ host segment ── copy in ──▶ GPU, then the flag
//! ```
//!
//! The receiver must copy before anyone sees the flag, so every put is told by an immediate, and a transport of this kind
//! knows which bytes each word tells of. Copies run beside each other and beside the wire; nothing here waits for one.

use super::segment::Segment;
use super::{Command, Event, Notice, Transport, TransportError, Word};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Copies between the memory of a rank and the host segment that stands for it; offsets are those of the segment.
pub trait Copier: Send {
    /// What a record says of it.
    fn name(&self) -> &'static str;

    /// Begins a copy from the rank's memory; copies of this way end in the order in which they began.
    ///
    /// # Errors
    /// [`TransportError`].
    fn begin_out(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError>;

    /// Begins a copy to the rank's memory; likewise.
    ///
    /// # Errors
    /// [`TransportError`].
    fn begin_in(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError>;

    /// How many copies out and in have ended since the beginning: the NIC may read the former, the rank the latter.
    ///
    /// # Errors
    /// [`TransportError`].
    fn ended(&mut self) -> Result<(u64, u64), TransportError>;
}

/// Bytes that a put lands in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landing {
    /// Immediates that tell of it.
    pub immediates: u32,
    /// Offset and size of its parts.
    pub parts: Vec<(u64, u64)>,
}

/// Writes that are copied out, or wait for a full queue, at once.
const HELD_MAX: usize = 64;

/// A transport between host segments, with a copy at either end.
pub struct Bounce {
    inner: Box<dyn Transport>,
    copier: Box<dyn Copier>,
    /// By slot of the arrival word.
    landings: Arc<BTreeMap<u32, Landing>>,
    came: BTreeMap<Word, u32>,
    /// Writes in the order of their copies out, each with the number of copies that must have ended.
    leaving: VecDeque<(u64, Command)>,
    /// Writes whose copies have ended, by peer and queue.
    ready: BTreeMap<(u32, u16), VecDeque<Command>>,
    /// Writes in both.
    held: usize,
    /// Words that wait for copies in, likewise.
    landing: VecDeque<(u64, Word)>,
    /// Copies begun.
    begun: (u64, u64),
    events: Vec<Event>,
}

impl Bounce {
    /// `landings` holds, by slot of its arrival word, every put that comes to this rank.
    pub fn new(inner: Box<dyn Transport>, copier: Box<dyn Copier>, landings: Arc<BTreeMap<u32, Landing>>) -> Self {
        Self {
            inner,
            copier,
            landings,
            came: BTreeMap::new(),
            leaving: VecDeque::new(),
            ready: BTreeMap::new(),
            held: 0,
            landing: VecDeque::new(),
            begun: (0, 0),
            events: Vec::new(),
        }
    }

    /// Notes an immediate; with the last of a put its bytes begin to be copied.
    fn land(&mut self, word: Word) -> Result<(), TransportError> {
        let Some(landing) = self.landings.get(&word.slot()) else {
            return Err(TransportError::Unexpected { slot: word.slot(), got: 1, expected: 0 });
        };
        let came = self.came.entry(word).or_default();
        *came += 1;
        if *came == landing.immediates {
            self.came.remove(&word);
            for &(offset, bytes) in &landing.parts {
                self.copier.begin_in(offset, bytes)?;
                self.begun.1 += 1;
            }
        }
        // Earlier words of a put wait with the last one: the receiver counts them all.
        self.landing.push_back((self.begun.1, word));
        Ok(())
    }
}

impl Transport for Bounce {
    fn name(&self) -> String {
        format!("{}, {}", self.inner.name(), self.copier.name())
    }

    fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
        for (taken, command) in commands.iter().enumerate() {
            if matches!(command.notice, Notice::Write(_) | Notice::WriteOn(..)) {
                let what = format!("a flag that is written would be seen before its bytes are copied: {command}");
                return Err(TransportError::Missing { what });
            }
            if self.held >= HELD_MAX {
                return Ok(taken);
            }
            if command.bytes > 0 {
                self.copier.begin_out(command.src, u64::from(command.bytes))?;
                self.begun.0 += 1;
            }
            self.held += 1;
            self.leaving.push_back((self.begun.0, *command));
        }
        Ok(commands.len())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
        let (out, _) = self.copier.ended()?;
        while let Some(&(copies, command)) = self.leaving.front()
            && copies <= out
        {
            self.leaving.pop_front();
            self.ready.entry((command.peer, command.queue)).or_default().push_back(command);
        }
        for lane in self.ready.values_mut() {
            while !lane.is_empty() {
                let taken = self.inner.post(lane.make_contiguous())?;
                if taken == 0 {
                    break;
                }
                lane.drain(..taken);
                self.held -= taken;
            }
        }
        let mut found = std::mem::take(&mut self.events);
        self.inner.poll(&mut found)?;
        for event in found.drain(..) {
            match event {
                Event::Arrived(word) => self.land(word)?,
                Event::Sent(_) => events.push(event),
            }
        }
        self.events = found;
        let (_, into) = self.copier.ended()?;
        while let Some(&(copies, word)) = self.landing.front()
            && copies <= into
        {
            self.landing.pop_front();
            events.push(Event::Arrived(word));
        }
        Ok(())
    }
}

/// Copies between segments of this process, at once: for CPU threads in place of a GPU.
pub struct Between {
    memory: Arc<Segment>,
    host: Arc<Segment>,
    ended: (u64, u64),
}

impl Between {
    /// Between the memory of a rank and the segment that stands for it.
    pub const fn new(memory: Arc<Segment>, host: Arc<Segment>) -> Self {
        Self { memory, host, ended: (0, 0) }
    }
}

impl Copier for Between {
    fn name(&self) -> &'static str {
        "through a bounce buffer"
    }

    fn begin_out(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
        self.memory.copy_to(offset, &self.host, offset, bytes);
        self.ended.0 += 1;
        Ok(())
    }

    fn begin_in(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
        self.host.copy_to(offset, &self.memory, offset, bytes);
        self.ended.1 += 1;
        Ok(())
    }

    fn ended(&mut self) -> Result<(u64, u64), TransportError> {
        Ok(self.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::segment::Layout;
    use std::sync::Mutex;

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

    /// Copies that are made when the test lets them: how many out, how many in.
    struct Slow {
        copies: Between,
        out: VecDeque<(u64, u64)>,
        into: VecDeque<(u64, u64)>,
        allowed: Arc<Mutex<(usize, usize)>>,
    }

    impl Copier for Slow {
        fn name(&self) -> &'static str {
            "through a slow buffer"
        }

        fn begin_out(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
            self.out.push_back((offset, bytes));
            Ok(())
        }

        fn begin_in(&mut self, offset: u64, bytes: u64) -> Result<(), TransportError> {
            self.into.push_back((offset, bytes));
            Ok(())
        }

        fn ended(&mut self) -> Result<(u64, u64), TransportError> {
            let mut allowed = self.allowed.lock().expect("not poisoned");
            while let Some((offset, bytes)) = (allowed.0 > 0).then(|| self.out.pop_front()).flatten() {
                self.copies.begin_out(offset, bytes)?;
                allowed.0 -= 1;
            }
            while let Some((offset, bytes)) = (allowed.1 > 0).then(|| self.into.pop_front()).flatten() {
                self.copies.begin_in(offset, bytes)?;
                allowed.1 -= 1;
            }
            self.copies.ended()
        }
    }

    #[test]
    fn bytes_leave_after_their_copy_out_and_are_told_after_their_copy_in() {
        let layout = Layout::plain(2, 4096);
        let segment = || Arc::new(Segment::private(&layout).expect("memory"));
        let (gpus, hosts, mail) = ([segment(), segment()], [segment(), segment()], [Mail::default(), Mail::default()]);
        let at = layout.buffer(0).0;
        let allowed = [Arc::new(Mutex::new((0, 0))), Arc::new(Mutex::new((0, 0)))];
        let allow = |rank: usize, out, into| *allowed[rank].lock().expect("not poisoned") = (out, into);
        let end = |me: usize, landings| {
            let peer = 1 - me;
            let (own, other) = (hosts[me].clone(), hosts[peer].clone());
            let host = Host { own, peer: other, out: mail[peer].clone(), inbox: mail[me].clone(), sent: Vec::new() };
            let copies = Between::new(gpus[me].clone(), hosts[me].clone());
            let slow = Slow { copies, out: VecDeque::new(), into: VecDeque::new(), allowed: allowed[me].clone() };
            Bounce::new(Box::new(host), Box::new(slow), Arc::new(landings))
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
        let told = |events: &[Event]| events.iter().filter(|event| **event == Event::Arrived(word)).count();
        let commands = [write(0, 1000, 100), write(100, 2000, 50)];
        let (mut sent, mut events) = (Vec::new(), Vec::new());
        assert_eq!(sender.post(&commands).expect("posts"), 2, "it holds what is not copied yet");
        sender.poll(&mut sent).expect("polls");
        receiver.poll(&mut events).expect("polls");
        assert_eq!((sent.len(), events.len()), (0, 0), "no copy out, no write");
        allow(0, 2, 0);
        sender.poll(&mut sent).expect("polls");
        receiver.poll(&mut events).expect("polls");
        assert_eq!((sent.len(), told(&events)), (1, 1), "the inner queue takes one at a time");
        assert_eq!(read(1000, 100), vec![0; 100], "half a put stays in the host");
        sender.poll(&mut sent).expect("polls");
        receiver.poll(&mut events).expect("polls");
        assert_eq!((sent.len(), told(&events)), (2, 1), "its last word waits for the copies in");
        allow(1, 0, 1);
        receiver.poll(&mut events).expect("polls");
        assert_eq!((told(&events), read(1000, 100), read(2000, 50)), (1, vec![7; 100], vec![0; 50]));
        allow(1, 0, 1);
        receiver.poll(&mut events).expect("polls");
        assert_eq!((told(&events), read(2000, 50)), (2, vec![7; 50]));
        let error = sender.post(&[Command { notice: Notice::Write(word), ..commands[0] }]).expect_err("a flag write");
        assert!(error.to_string().contains("would be seen before its bytes"), "{error}");
        assert_eq!(sender.name(), "double, through a slow buffer");
        mail[1].lock().expect("not poisoned").push_back(Word::new(0, 0));
        assert!(matches!(receiver.poll(&mut events), Err(TransportError::Unexpected { slot: 0, .. })));
    }

    #[test]
    fn a_full_queue_keeps_back_nobody_else_and_so_much_is_held() {
        /// Takes nothing for queue 0.
        struct Deaf(Vec<Event>);
        impl Transport for Deaf {
            fn name(&self) -> String {
                "deaf".to_owned()
            }
            fn post(&mut self, commands: &[Command]) -> Result<usize, TransportError> {
                if commands[0].queue == 0 {
                    return Ok(0);
                }
                self.0.extend(commands.iter().map(|&command| Event::Sent(command)));
                Ok(commands.len())
            }
            fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransportError> {
                events.append(&mut self.0);
                Ok(())
            }
        }
        let layout = Layout::plain(2, 4096);
        let segment = || Arc::new(Segment::private(&layout).expect("memory"));
        let mut bounce =
            Bounce::new(Box::new(Deaf(Vec::new())), Box::new(Between::new(segment(), segment())), Arc::default());
        let to = |queue| vec![Command { queue, bytes: 4, ..Command::default() }; HELD_MAX];
        assert_eq!(bounce.post(&to(0)[..HELD_MAX - 1]).expect("posts"), HELD_MAX - 1);
        assert_eq!(bounce.post(&to(1)).expect("posts"), 1, "it is full");
        let mut events = Vec::new();
        bounce.poll(&mut events).expect("polls");
        assert!(matches!(events[..], [Event::Sent(Command { queue: 1, .. })]), "{events:?}");
    }
}

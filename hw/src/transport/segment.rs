//! The memory of a rank that peers reach: both banks of flag words, then the buffers. Same layout on every rank.

use half::bf16;
use memmap2::{MmapOptions, MmapRaw};
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use tilewire_kernels::Schedule;
use tilewire_kernels::schedule::{DType, Flag, Region};

use super::proxy::Raise;
use super::{Word, Words};

/// Where flag words and buffers lie in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Flag words of a bank.
    pub slots: u32,
    words: Words,
    families: Vec<u32>,
    buffers: Vec<(u64, u64, DType)>,
    /// Size of a segment.
    pub bytes: u64,
}

/// Buffers begin at multiples of this, so that no two share a cache line or a page table entry of a NIC.
const ALIGN: u64 = 4096;

impl Layout {
    /// The layout of a schedule; none if its flags do not fit an immediate's 31 bits.
    pub fn new(schedule: &Schedule) -> Option<Self> {
        let mut families = Vec::new();
        let mut slots = 0u32;
        for family in &schedule.flags {
            families.push(slots);
            slots = slots.checked_add(family.slots).filter(|&slots| slots < Word::SLOTS_MAX)?;
        }
        let mut at = (u64::from(slots) * 8).next_multiple_of(ALIGN);
        let mut buffers = Vec::new();
        for buffer in &schedule.buffers {
            buffers.push((at, buffer.bytes, buffer.dtype));
            at = (at + buffer.bytes).next_multiple_of(ALIGN);
        }
        let words = Words { at: 0, slots, banks: 2 };
        Some(Self { slots, words, families, buffers, bytes: at.max(ALIGN) })
    }

    /// The layout of a schedule in memory of `bytes` bytes whose buffers begin at these, with one bank of words elsewhere,
    /// and that of a segment beside it, in which buffers lie alike behind two banks of words; none as for [`Layout::new`].
    pub fn placed(schedule: &Schedule, buffers: &[u64], words_at: u64, bytes: u64) -> Option<(Self, Self)> {
        let mut beside = Self::new(schedule)?;
        let mut placed = beside.clone();
        let behind = (u64::from(beside.slots) * 8).next_multiple_of(ALIGN);
        for ((placed, beside), &at) in placed.buffers.iter_mut().zip(&mut beside.buffers).zip(buffers) {
            (placed.0, beside.0) = (at, behind + at);
        }
        (placed.words, placed.bytes) = (Words { at: words_at, slots: placed.slots, banks: 1 }, bytes);
        beside.bytes = behind + bytes;
        Some((placed, beside))
    }

    /// Where the flag words lie.
    pub const fn words(&self) -> Words {
        self.words
    }

    /// Flag words and nothing but bytes behind them, for exercises.
    pub fn plain(slots: u32, bytes: u64) -> Self {
        let at = (u64::from(slots) * 8).next_multiple_of(ALIGN);
        Self {
            slots,
            words: Words { at: 0, slots, banks: 2 },
            families: vec![0],
            buffers: vec![(at, bytes, DType::F32)],
            bytes: at + bytes.next_multiple_of(ALIGN),
        }
    }

    /// Slot of a flag, over all families.
    pub fn slot(&self, flag: Flag) -> u32 {
        self.families[usize::from(flag.family.0)] + flag.slot
    }

    /// First byte of a region's buffer.
    pub fn base(&self, region: &Region) -> u64 {
        self.buffers[usize::from(region.buffer.0)].0
    }

    /// Element type of a region.
    pub fn dtype(&self, region: &Region) -> DType {
        self.buffers[usize::from(region.buffer.0)].2
    }

    /// First byte and length of a buffer.
    pub fn buffer(&self, index: usize) -> (u64, u64) {
        (self.buffers[index].0, self.buffers[index].1)
    }
}

/// A segment, mapped into this process.
///
/// Safety contract: bytes are only reached through raw copies and atomic words, never through references, because other
/// threads, other processes and NICs write them. That no copy overlaps a conflicting one is the schedule's business: it
/// orders them by flags, which are raised with release and read with acquire order. A NIC raises a word by a write after
/// its data; on x86 whoever sees the word sees the data.
#[derive(Debug)]
pub struct Segment {
    map: MmapRaw,
    words: Words,
}

impl Segment {
    /// A segment of this process alone, all zero.
    ///
    /// # Errors
    /// The system's.
    pub fn private(layout: &Layout) -> io::Result<Self> {
        let map = MmapOptions::new().len(layout.bytes as usize).map_anon()?;
        Ok(Self { map: map.into(), words: layout.words })
    }

    /// A segment that other processes of the host can map: makes the file, which must not exist.
    ///
    /// # Errors
    /// The system's.
    pub fn create(layout: &Layout, path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(layout.bytes)?;
        Ok(Self { map: MmapRaw::map_raw(&file)?, words: layout.words })
    }

    /// Another process's segment.
    ///
    /// # Errors
    /// The system's, or that the file is of another size.
    pub fn open(layout: &Layout, path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let bytes = file.metadata()?.len();
        if bytes != layout.bytes {
            let what = format!("{} has {bytes} bytes, the schedule needs {}", path.display(), layout.bytes);
            return Err(io::Error::other(what));
        }
        Ok(Self { map: MmapRaw::map_raw(&file)?, words: layout.words })
    }

    /// First byte in this process.
    pub fn address(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Flag words of a bank.
    pub const fn slots(&self) -> u32 {
        self.words.slots
    }

    /// Where its flag words lie.
    pub const fn words(&self) -> Words {
        self.words
    }

    /// Size.
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    fn at(&self, at: u64, bytes: u64) -> *mut u8 {
        let end = at.checked_add(bytes).expect("an offset in a segment");
        assert!(end <= self.bytes(), "bytes {at}..{end} of a segment of {}", self.bytes());
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.map.as_mut_ptr().add(at as usize) }
    }

    /// A flag word.
    pub fn word(&self, word: Word) -> &AtomicU32 {
        let address = self.at(self.words.offset(word), 4);
        // SAFETY: inside the mapping, aligned because banks are arrays of u32 at its start, and only used atomically.
        unsafe { AtomicU32::from_ptr(address.cast()) }
    }

    /// Appends bytes.
    pub fn read(&self, at: u64, bytes: u64, into: &mut Vec<u8>) {
        let from = self.at(at, bytes);
        into.reserve(bytes as usize);
        // SAFETY: the source is inside the mapping, the destination was just reserved.
        unsafe {
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr().add(into.len()), bytes as usize);
            into.set_len(into.len() + bytes as usize);
        }
    }

    /// Overwrites bytes.
    pub fn write(&self, at: u64, data: &[u8]) {
        let to = self.at(at, data.len() as u64);
        // SAFETY: inside the mapping; `data` is no part of it, for no reference to it exists.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
    }

    /// Sets bytes.
    pub fn fill(&self, at: u64, bytes: u64, byte: u8) {
        let to = self.at(at, bytes);
        // SAFETY: inside the mapping.
        unsafe { to.write_bytes(byte, bytes as usize) };
    }

    /// Adds bf16 numbers to those at `at`, each atomically.
    pub fn add(&self, at: u64, data: &[u8]) {
        assert!(at.is_multiple_of(2), "an offset of bf16 numbers");
        #[allow(clippy::cast_ptr_alignment, reason = "the mapping is aligned to a page, the offset to two bytes")]
        let to = self.at(at, data.len() as u64).cast::<u16>();
        for (i, bytes) in data.chunks_exact(2).enumerate() {
            let add = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            // SAFETY: inside the range checked above, aligned, and other threads add atomically too.
            let element = unsafe { AtomicU16::from_ptr(to.add(i)) };
            let sum = |bits| Some(bf16::from_f32(bf16::from_bits(bits).to_f32() + add).to_bits());
            let _ = element.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
        }
    }

    /// Copies bytes to another segment.
    pub fn copy_to(&self, src: u64, to: &Self, dst: u64, bytes: u64) {
        let (from, to) = (self.at(src, bytes), to.at(dst, bytes));
        // SAFETY: both ranges are inside their mappings.
        unsafe { std::ptr::copy(from, to, bytes as usize) };
    }

    /// Clears the words of a bank.
    pub fn clear(&self, bank: u32) {
        for slot in 0..self.slots() {
            self.word(Word::new(slot, bank)).store(0, Ordering::Release);
        }
    }
}

impl Raise for Segment {
    fn raise(&self, word: Word) {
        self.word(word).fetch_add(1, Ordering::AcqRel);
    }
}

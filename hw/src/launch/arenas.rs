//! Memory that programs name: arenas and words of a GPU, and where those of all GPUs lie.

use crate::device::{Device, HwError};
use crate::exported::Mapping;
use crate::lower::Program;
use crate::memory::DeviceMemory;
use crate::remote::Place;
use crate::transport::segment::Layout;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tilewire_kernels::Schedule;

/// Memory of a GPU that programs name, of other GPUs too.
pub struct Memory {
    /// One per buffer and instance that lives here.
    pub(super) arenas: Vec<DeviceMemory>,
    pub(super) words: DeviceMemory,
}

impl Memory {
    /// Takes a program's arenas and words on its GPU.
    ///
    /// # Errors
    /// [`HwError::Cuda`], for example when the GPU has too little memory.
    pub fn new(device: Device, program: &Program) -> Result<Self, HwError> {
        device.make_current()?;
        let own = |&(arena, _): &(usize, &u64)| program.gpu_of(arena as u32) == program.gpu;
        let take = |(_, &bytes)| DeviceMemory::new(bytes as usize);
        let arenas = program.arenas.iter().enumerate().filter(own).map(take).collect::<Result<_, _>>()?;
        Ok(Self { arenas, words: DeviceMemory::new(words_bytes(program))? })
    }

    /// As [`Memory::new`], and a descriptor by which other processes can map it; with `rdma` NICs are to reach it too.
    ///
    /// # Errors
    /// As [`Memory::new`].
    pub(crate) fn exported(device: Device, program: &Program, rdma: bool) -> Result<(Self, OwnedFd, usize), HwError> {
        let places = places(program, program.gpu);
        let (mapping, descriptor) = Mapping::export(device, places.bytes, rdma)?;
        let mapping = Arc::new(mapping);
        let part = |(at, bytes): (usize, usize)| DeviceMemory::part(&mapping, at, bytes);
        let memory = Self { arenas: places.arenas.iter().copied().map(part).collect(), words: part(places.words) };
        Ok((memory, descriptor, mapping.bytes()))
    }

    /// Where memory that is one piece begins.
    pub(crate) fn base(&self) -> u64 {
        self.arenas.first().unwrap_or(&self.words).address
    }
}

/// Where buffers and words of the program's GPU lie in memory that is one piece, `bytes` long, and begins at `base`.
pub(crate) fn place(schedule: &Schedule, program: &Program, base: u64, bytes: usize) -> Result<Place, HwError> {
    let places = places(program, program.gpu);
    let buffers: Vec<u64> = places.arenas.iter().map(|&(at, _)| at as u64).collect();
    let too_many = || HwError::Unsupported { what: "schedules with more than 2^31 flags".to_owned() };
    let placed = Layout::placed(schedule, &buffers, places.words.0 as u64, bytes as u64);
    let (layout, beside) = placed.ok_or_else(too_many)?;
    Ok(Place { base, layout, beside })
}

/// Where arenas and words of a GPU lie in memory that is one piece: first byte and bytes.
struct Places {
    arenas: Vec<(usize, usize)>,
    words: (usize, usize),
    bytes: usize,
}

/// Arenas begin at multiples of this, more than any tensor map or copy asks for.
const ARENA_ALIGN: usize = 4096;

fn places(program: &Program, gpu: u32) -> Places {
    let mut end = 0;
    let mut place = |bytes: usize| {
        let at = end;
        end = (at + bytes.max(1)).next_multiple_of(ARENA_ALIGN);
        (at, bytes)
    };
    let own = (0..).zip(&program.arenas).filter(|&(arena, _)| program.gpu_of(arena) == gpu);
    let arenas = own.map(|(_, &bytes)| place(bytes as usize)).collect();
    let words = place(words_bytes(program));
    Places { arenas, words, bytes: end }
}

/// The FIFO's head is one word more.
pub(super) const fn words_bytes(program: &Program) -> usize {
    (program.words as usize + 1) * 4
}

/// Where the arenas of all GPUs lie, and the words of each.
#[derive(Clone)]
pub struct Addresses {
    pub(super) arenas: Vec<u64>,
    words: Vec<u64>,
}

impl Addresses {
    /// Of the memory of all GPUs, in their order.
    pub fn of<'m>(all: impl Iterator<Item = &'m Memory> + Clone) -> Self {
        Self {
            arenas: all.clone().flat_map(|memory| memory.arenas.iter().map(|arena| arena.address)).collect(),
            words: all.map(|memory| memory.words.address).collect(),
        }
    }

    /// Of memory of other processes that is mapped at these addresses, by GPU.
    pub(crate) fn mapped(program: &Program, bases: &[u64]) -> Self {
        let (mut arenas, mut words) = (Vec::new(), Vec::new());
        for (gpu, base) in (0..).zip(bases) {
            let places = places(program, gpu);
            arenas.extend(places.arenas.iter().map(|&(at, _)| base + at as u64));
            words.push(base + places.words.0 as u64);
        }
        Self { arenas, words }
    }

    /// An arena's first byte.
    pub(crate) fn arena(&self, arena: u32) -> u64 {
        self.arenas[arena as usize]
    }

    /// A word of a GPU.
    pub(crate) fn word(&self, gpu: u32, word: u32) -> u64 {
        self.words[gpu as usize] + u64::from(word) * 4
    }
}

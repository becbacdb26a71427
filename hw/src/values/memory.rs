//! Memory of all ranks as bytes, and the regions in it.

use half::bf16;
use tilewire_kernels::schedule::{At, Buffer, BufferUse, DType, Place, Region};
use tilewire_kernels::{Cluster, Rank};

/// Every byte of a poisoned buffer: a NaN in bf16 and in f32, and the largest u32.
pub(crate) const POISON: u8 = 0xFF;

/// One byte vector per rank and buffer.
pub(super) struct Memory {
    pub(super) cluster: Cluster,
    buffers: Vec<Buffer>,
    bytes: Vec<Vec<u8>>,
}

/// Bytes that a task is about to store or add.
pub(crate) struct Write {
    pub(crate) rank: usize,
    pub(crate) region: Region,
    pub(crate) data: Vec<u8>,
    pub(crate) add: bool,
}

/// What ops read: the memory of every rank that a task reaches.
pub(crate) trait Source {
    /// The cluster.
    fn cluster(&self) -> Cluster;

    /// Element type of a region's buffer.
    fn dtype(&self, region: &Region) -> DType;

    /// Bytes `from..from + len` of a region, counted in the region's own order.
    fn read_part(&self, rank: usize, region: &Region, from: u64, len: u64, into: &mut Vec<u8>);

    /// All bytes of a region.
    fn read(&self, rank: usize, region: &Region) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(region.bytes() as usize);
        self.read_part(rank, region, 0, region.bytes(), &mut bytes);
        bytes
    }

    /// The elements of a region as f32.
    fn read_floats(&self, rank: usize, region: &Region) -> Vec<f32> {
        floats(self.dtype(region), &self.read(rank, region))
    }

    /// The ranks that a place names, seen from `rank`.
    fn ranks_of(&self, rank: Rank, at: At) -> Vec<usize> {
        ranks_of(self.cluster(), rank, at)
    }

    /// The bytes of a place; for all GPUs of the node the sum, as the switch returns it: rounded to the storage type.
    fn read_place(&self, rank: Rank, place: &Place) -> Vec<u8> {
        let ranks = self.ranks_of(rank, place.at);
        if let [one] = ranks[..] {
            return self.read(one, &place.region);
        }
        let mut sum = vec![0f32; (place.region.bytes() / self.dtype(&place.region).bytes()) as usize];
        for &from in &ranks {
            sum.iter_mut().zip(self.read_floats(from, &place.region)).for_each(|(sum, value)| *sum += value);
        }
        bytes_of(self.dtype(&place.region), &sum)
    }
}

impl Source for Memory {
    fn cluster(&self) -> Cluster {
        self.cluster
    }

    fn dtype(&self, region: &Region) -> DType {
        self.buffers[usize::from(region.buffer.0)].dtype
    }

    fn read_part(&self, rank: usize, region: &Region, from: u64, len: u64, into: &mut Vec<u8>) {
        let bytes = self.of(rank, region);
        for_each_part(region, from, len, |start, len| {
            into.extend_from_slice(&bytes[start as usize..(start + len) as usize]);
        });
    }
}

impl Memory {
    /// Poisoned memory.
    pub(super) fn new(cluster: Cluster, buffers: &[Buffer]) -> Self {
        let bytes = (0..cluster.ranks()).flat_map(|_| buffers.iter().map(|b| vec![POISON; b.bytes as usize])).collect();
        Self { cluster, buffers: buffers.to_vec(), bytes }
    }

    /// Poisons what a run must write or be given; scratch keeps what the last run left.
    pub(super) fn poison_inputs_and_outputs(&mut self) {
        let count = self.buffers.len();
        for (i, bytes) in self.bytes.iter_mut().enumerate() {
            if self.buffers[i % count].usage != BufferUse::Scratch {
                bytes.fill(POISON);
            }
        }
    }

    fn of(&self, rank: usize, region: &Region) -> &[u8] {
        &self.bytes[rank * self.buffers.len() + usize::from(region.buffer.0)]
    }

    /// Stores or adds.
    pub(super) fn write(&mut self, write: &Write) {
        let dtype = self.dtype(&write.region);
        let data = if write.add {
            let old = self.read_floats(write.rank, &write.region);
            let sum: Vec<f32> = old.iter().zip(floats(dtype, &write.data)).map(|(old, new)| old + new).collect();
            &bytes_of(dtype, &sum)
        } else {
            &write.data
        };
        let bytes = &mut self.bytes[write.rank * self.buffers.len() + usize::from(write.region.buffer.0)];
        let mut at = 0;
        write.region.for_each_run(|start, len| {
            bytes[start as usize..(start + len) as usize].copy_from_slice(&data[at..at + len as usize]);
            at += len as usize;
        });
    }

    /// Overwrites a region with numbers of its buffer's type.
    pub(super) fn fill(&mut self, rank: usize, region: &Region, values: &[f32]) {
        let data = bytes_of(self.dtype(region), values);
        self.write(&Write { rank, region: *region, data, add: false });
    }
}

/// The ranks that `at` names, seen from `rank`.
pub(crate) fn ranks_of(cluster: Cluster, rank: Rank, at: At) -> Vec<usize> {
    match at {
        At::Offset(offset) => vec![cluster.number(cluster.at(rank, offset))],
        At::AllLocal => (0..cluster.gpus_per_node).map(|gpu| cluster.number(Rank { node: rank.node, gpu })).collect(),
    }
}

/// Calls `f(start, bytes)` for the contiguous pieces of bytes `from..from + len` of a region, in order.
pub(crate) fn for_each_part(region: &Region, from: u64, len: u64, mut f: impl FnMut(u64, u64)) {
    let (mut at, end) = (0, from + len);
    region.for_each_run(|start, run| {
        let (low, high) = (from.max(at), end.min(at + run));
        if low < high {
            f(start + low - at, high - low);
        }
        at += run;
    });
}

/// Decodes elements; an integer keeps its value as far as f32 holds it.
pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        DType::U32 => bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32).collect(),
    }
}

/// Encodes elements, rounding to the nearest.
pub(crate) fn bytes_of(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::U32 => values.iter().flat_map(|&v| (v as u32).to_le_bytes()).collect(),
    }
}

//! The segments that a rank reaches, as ops read and write them.

use crate::transport::segment::{Layout, Segment};
use crate::values::memory::{POISON, Source, Write, bytes_of, floats, for_each_part};
use std::sync::Arc;
use tilewire_kernels::schedule::{BufferUse, DType, Region};
use tilewire_kernels::{Cluster, Schedule};

/// The segments of the ranks of a node, by rank number; none for ranks of other nodes.
pub(super) struct Reach {
    pub(super) cluster: Cluster,
    pub(super) layout: Arc<Layout>,
    pub(super) segments: Vec<Option<Arc<Segment>>>,
}

impl Reach {
    /// The segment of a rank of the own node.
    pub(super) fn of(&self, rank: usize) -> &Arc<Segment> {
        self.segments[rank].as_ref().expect("tasks other than puts stay in their node: the shape check says so")
    }

    /// Stores or adds.
    pub(super) fn write(&self, write: &Write) {
        let (base, dtype) = (self.layout.base(&write.region), self.layout.dtype(&write.region));
        let segment = self.of(write.rank);
        let mut at = 0;
        write.region.for_each_run(|start, len| {
            let data = &write.data[at..at + len as usize];
            match (write.add, dtype) {
                (false, _) => segment.write(base + start, data),
                (true, DType::Bf16) => segment.add(base + start, data),
                // The shape check allows adds of bf16 only.
                (true, _) => unreachable!("an add to {dtype:?}"),
            }
            at += len as usize;
        });
    }

    /// Overwrites a region of a rank with numbers.
    pub(super) fn fill(&self, rank: usize, region: &Region, values: &[f32]) {
        let data = bytes_of(self.layout.dtype(region), values);
        self.write(&Write { rank, region: *region, data, add: false });
    }

    /// Poisons what a run of a rank must write or be given; scratch keeps what the last run left.
    pub(super) fn poison(&self, schedule: &Schedule, rank: usize, scratch_too: bool) {
        for (index, buffer) in schedule.buffers.iter().enumerate() {
            if scratch_too || buffer.usage != BufferUse::Scratch {
                let (at, bytes) = self.layout.buffer(index);
                self.of(rank).fill(at, bytes, POISON);
            }
        }
    }
}

impl Source for Reach {
    fn cluster(&self) -> Cluster {
        self.cluster
    }

    fn dtype(&self, region: &Region) -> DType {
        self.layout.dtype(region)
    }

    fn read_part(&self, rank: usize, region: &Region, from: u64, len: u64, into: &mut Vec<u8>) {
        let (base, segment) = (self.layout.base(region), self.of(rank));
        for_each_part(region, from, len, |start, len| segment.read(base + start, len, into));
    }

    fn read_floats(&self, rank: usize, region: &Region) -> Vec<f32> {
        floats(self.dtype(region), &self.read(rank, region))
    }
}

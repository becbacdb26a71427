//! MoE unfused: token copies, all-to-all, grouped GEMM.

use super::gemm::{GemmRule, RowBlock};
use super::{A, ARRANGED, COPY_ROWS, OUT, PARTS, Plan, RECEIVED, Work, buffer, collective};
use crate::cluster::{Cluster, Offset, Rank};
use crate::kernel::{BuildError, Problem, Spec, divides, fits_u32};
use crate::moe_dispatch_gemm::{self, OutputRows};
use crate::schedule::{
    Buffer, BufferId, BufferUse, CollectiveKind, GatherEntry, Op, Region, Symmetry, TableSlice, Task,
};

/// Copies that a rank gets, seen from it.
struct Inbox {
    /// By piece, then by number of the sender's offset: its tokens, in the order of the output rows.
    tokens: Vec<Vec<Vec<u32>>>,
    /// By output row: sender's offset and place among its copies of the piece.
    rows: Vec<Option<(u32, u32)>>,
    /// First row block of each piece, and one more.
    first_block: Vec<usize>,
    /// Local expert of each row block.
    experts: Vec<u32>,
}

/// Token copies, all-to-all, grouped GEMM. Copies are laid out by output row, piece by piece.
pub(super) struct Moe {
    cluster: Cluster,
    hidden: u64,
    inter: u64,
    topk: u64,
    local_tokens: u64,
    local_experts: u64,
    chunks: u64,
    rule: GemmRule,
    /// One for all ranks, or one per rank.
    inboxes: Vec<Inbox>,
    /// Rows of a part of each piece, and the first row of each piece's parts.
    part_rows: Vec<u64>,
    first_row: Vec<u64>,
    max_blocks: u64,
}

impl Moe {
    pub fn new(name: &'static str, spec: &Spec, fused: &Spec) -> Result<Self, BuildError> {
        let outputs = moe_dispatch_gemm::output_rows(fused)?;
        let Problem::Moe { tokens, hidden, inter, topk, experts } = spec.problem else {
            unreachable!("the fused kernel took the shape");
        };
        let cluster = spec.cluster;
        let ranks = cluster.ranks() as u64;
        let (local_tokens, local_experts, chunks) = (tokens / ranks, experts / ranks, spec.options.int("chunks"));
        divides(name, "experts", experts, ranks * chunks, || {
            format!("{ranks} ranks cut their experts into {chunks} pieces")
        })?;
        let per_piece = local_experts / chunks;
        let inboxes: Vec<Inbox> =
            outputs.iter().map(|rows| inbox(cluster, rows, (local_tokens, per_piece, chunks))).collect();
        let largest = |piece: usize| {
            let all = inboxes.iter().flat_map(|inbox| &inbox.tokens[piece]);
            all.map(|tokens| tokens.len() as u64).max().unwrap_or(0).max(1)
        };
        let part_rows: Vec<u64> = (0..chunks as usize).map(largest).collect();
        let first_row = part_rows
            .iter()
            .scan(0, |next, rows| {
                let first = *next;
                *next += rows * ranks;
                Some(first)
            })
            .collect();
        fits_u32(name, "rows of the all-to-all buffers", part_rows.iter().sum::<u64>() * ranks)?;
        let max_blocks = inboxes.iter().map(|inbox| inbox.experts.len() as u64).max().unwrap_or(0);
        Ok(Self {
            cluster,
            hidden,
            inter,
            topk,
            local_tokens,
            local_experts,
            chunks,
            rule: GemmRule::new(&spec.options),
            inboxes,
            part_rows,
            first_row,
            max_blocks,
        })
    }

    fn inbox(&self, rank: Rank) -> &Inbox {
        &self.inboxes[self.cluster.number(rank) % self.inboxes.len()]
    }

    /// Destinations by offset, so that all ranks have equally large tasks, with their tokens of a piece.
    fn outbox(&self, rank: Rank, piece: u64) -> impl Iterator<Item = (Rank, &[u32])> {
        self.cluster.iter().map(move |ahead| {
            let to = self.cluster.at(rank, Offset { dn: ahead.node, dg: ahead.gpu });
            let back = self.cluster.offset(to, rank);
            let sender = self.cluster.number(Rank { node: back.dn, gpu: back.dg });
            (to, self.inbox(to).tokens[piece as usize][sender].as_slice())
        })
    }

    /// First row of a rank's part in the buffers of an all-to-all.
    fn part(&self, piece: u64, rank: Rank) -> u64 {
        let piece = piece as usize;
        self.first_row[piece] + self.cluster.number(rank) as u64 * self.part_rows[piece]
    }

    fn gather(&self, src: BufferId, (dst, row): (BufferId, u64), start: u64, rows: u64) -> Task {
        let row_bytes = self.hidden * 2;
        Task::new(Op::GatherRows {
            table: TableSlice { start: start as u32, len: rows as u32 },
            src,
            dst: Region::contiguous(dst, row * row_bytes, rows as u32, row_bytes as u32),
            in_flight_rows: COPY_ROWS as u16,
            load_store_overlap: true,
            box_bytes: 0,
        })
    }

    /// The table begins with the copies of each piece by destination, as `outbox` lists them.
    fn pack_tasks(&self, rank: Rank, piece: u64, sink: &mut dyn FnMut(Task)) {
        let before = (0..piece).flat_map(|piece| self.outbox(rank, piece));
        let mut entry: u64 = before.map(|(_, tokens)| tokens.len() as u64).sum();
        for (to, tokens) in self.outbox(rank, piece) {
            let (first, count) = (self.part(piece, to), tokens.len() as u64);
            for row in (0..count).step_by(COPY_ROWS as usize) {
                let rows = COPY_ROWS.min(count - row);
                sink(self.gather(A, (PARTS, first + row), entry + row, rows));
            }
            entry += count;
        }
    }

    fn copies(&self, rank: Rank) -> u64 {
        (0..self.chunks).flat_map(|piece| self.outbox(rank, piece)).map(|(_, tokens)| tokens.len() as u64).sum()
    }

    /// The table ends with an entry per output row.
    fn arrange_tasks(&self, rank: Rank, piece: u64, sink: &mut dyn FnMut(Task)) {
        let bm = self.rule.tile[0];
        let (inbox, first_entry) = (self.inbox(rank), self.copies(rank));
        let blocks = inbox.first_block[piece as usize]..inbox.first_block[piece as usize + 1];
        for block in blocks {
            for row in (0..bm).step_by(COPY_ROWS as usize) {
                let at = block as u64 * bm + row;
                sink(self.gather(RECEIVED, (ARRANGED, at), first_entry + at, COPY_ROWS.min(bm - row)));
            }
        }
    }

    fn collective(&self, piece: u64) -> Task {
        let (first, rows) =
            (self.first_row[piece as usize], self.part_rows[piece as usize] * self.cluster.ranks() as u64);
        let all = |buffer| Region::contiguous(buffer, first * self.hidden * 2, rows as u32, (self.hidden * 2) as u32);
        collective(CollectiveKind::AllToAll, all(PARTS), all(RECEIVED))
    }

    fn gemm_tasks(&self, rank: Rank, piece: u64, sink: &mut dyn FnMut(Task)) {
        let (bm, inbox) = (self.rule.tile[0], self.inbox(rank));
        let blocks: Vec<RowBlock> = (inbox.first_block[piece as usize]..inbox.first_block[piece as usize + 1])
            .map(|block| {
                let row = block as u64 * bm;
                RowBlock {
                    a: (ARRANGED, row * self.hidden * 2),
                    b: u64::from(inbox.experts[block]) * self.hidden * self.inter * 2,
                    out: (OUT, row * self.inter * 2),
                }
            })
            .collect();
        self.rule.tiles(&blocks, (self.inter, self.hidden), sink);
    }
}

/// Sorts the output rows of a rank by piece and sender.
fn inbox(cluster: Cluster, output: &OutputRows, (local_tokens, per_piece, chunks): (u64, u64, u64)) -> Inbox {
    let bm = output.table.len() / output.experts.len().max(1);
    let mut tokens = vec![vec![Vec::new(); cluster.ranks()]; chunks as usize];
    let mut rows = Vec::with_capacity(output.table.len());
    for (entries, &expert) in output.table.chunks(bm.max(1)).zip(&output.experts) {
        let of_piece = &mut tokens[(u64::from(expert) / per_piece) as usize];
        rows.extend(entries.iter().map(|entry| {
            entry.map(|entry| {
                let row = u64::from(entry.row);
                let home = Rank { node: (row / local_tokens) as u16, gpu: entry.dg };
                let sender = cluster.number(home);
                of_piece[sender].push((row % local_tokens) as u32);
                (sender as u32, of_piece[sender].len() as u32 - 1)
            })
        }));
    }
    let first_block = (0..=chunks)
        .map(|piece| output.experts.partition_point(|&expert| u64::from(expert) < piece * per_piece))
        .collect();
    Inbox { tokens, rows, first_block, experts: output.experts.clone() }
}

impl Plan for Moe {
    fn buffers(&self) -> Vec<Buffer> {
        let row_bytes = self.hidden * 2;
        let parts = self.part_rows.iter().sum::<u64>() * self.cluster.ranks() as u64 * row_bytes;
        let rows = self.max_blocks * self.rule.tile[0];
        vec![
            buffer("tokens", self.local_tokens * row_bytes, BufferUse::Input),
            buffer("w", self.local_experts * self.hidden * self.inter * 2, BufferUse::Input),
            buffer("out", rows * self.inter * 2, BufferUse::Output),
            buffer("parts", parts, BufferUse::Scratch),
            buffer("received", parts, BufferUse::Scratch),
            buffer("arranged", rows * row_bytes, BufferUse::Scratch),
        ]
    }

    fn symmetry(&self) -> Symmetry {
        if self.inboxes.len() == 1 { Symmetry::FULL } else { Symmetry::NONE }
    }

    fn useful_flops(&self) -> u64 {
        (2 * self.local_tokens * self.topk).saturating_mul(self.hidden * self.inter)
    }

    fn tasks(&self, rank: Rank, work: Work, piece: u64, sink: &mut dyn FnMut(Task)) {
        match work {
            Work::Pack => self.pack_tasks(rank, piece, sink),
            Work::Collect => sink(self.collective(piece)),
            Work::Arrange => self.arrange_tasks(rank, piece, sink),
            Work::Compute => self.gemm_tasks(rank, piece, sink),
        }
    }

    fn table(&self, rank: Rank) -> Vec<Option<GatherEntry>> {
        let copies = (0..self.chunks).flat_map(|piece| self.outbox(rank, piece));
        let mut table: Vec<Option<GatherEntry>> =
            copies.flat_map(|(_, tokens)| tokens.iter().map(|&row| Some(GatherEntry { dg: 0, row }))).collect();
        let (inbox, bm) = (self.inbox(rank), self.rule.tile[0] as usize);
        for piece in 0..self.chunks {
            let blocks = inbox.first_block[piece as usize]..inbox.first_block[piece as usize + 1];
            table.extend(inbox.rows[blocks.start * bm..blocks.end * bm].iter().map(|row| {
                row.map(|(sender, place)| {
                    let ahead = self.cluster.rank(sender as usize);
                    let from = self.cluster.at(rank, Offset { dn: ahead.node, dg: ahead.gpu });
                    GatherEntry { dg: 0, row: (self.part(piece, from) + u64::from(place)) as u32 }
                })
            }));
        }
        table
    }
}

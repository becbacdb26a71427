//! Which operand panels a tile finds in L2.

use super::hash::FastMap;
use crate::machine::Machine;
use std::collections::VecDeque;

/// Operand panels that are in L2, in the order of their last use.
///
/// The tiles of a wave walk along K side by side, so that one fetch serves them all; between waves as many bytes stay as
/// the window holds. `kernels/cuda/bench/l2_window.py` is the same model, beside the reads of a profiler that the window
/// was fitted to. A wave has as many tiles as the chip has SMs, whatever the split: only how waves fall on rows of
/// tiles depends on it, not how far apart two uses of a panel are.
pub(super) struct Panels {
    /// Last use of the panels in L2.
    used: FastMap<(u16, u64), u32>,
    /// Uses in order: number of the use, panel, bytes. A panel was used again since unless `used` names this use.
    uses: VecDeque<(u32, (u16, u64), u64)>,
    next: u32,
    bytes: u64,
    tile: u32,
    window: u64,
    wave: u32,
}

impl Panels {
    pub(super) fn new(machine: &Machine) -> Self {
        Self {
            used: FastMap::default(),
            uses: VecDeque::new(),
            next: 0,
            bytes: 0,
            tile: 0,
            window: (machine.gpu.l2_window_mib.value * 1_048_576.0) as u64,
            wave: machine.gpu.sms.value as u32,
        }
    }

    /// Bytes that the use of a panel fetches from memory.
    pub(super) fn fetch(&mut self, buffer: u16, offset: u64, bytes: u64) -> u64 {
        let panel = (buffer, offset);
        self.uses.push_back((self.next, panel, bytes));
        let known = self.used.insert(panel, self.next).is_some();
        self.next += 1;
        if known {
            return 0;
        }
        self.bytes += bytes;
        bytes
    }

    /// The panels of the next use belong to the next tile.
    pub(super) fn next_tile(&mut self) {
        self.tile += 1;
        if !self.tile.is_multiple_of(self.wave) {
            return;
        }
        while self.bytes > self.window {
            let Some((use_, panel, bytes)) = self.uses.pop_front() else { break };
            if self.used.get(&panel) == Some(&use_) {
                self.used.remove(&panel);
                self.bytes -= bytes;
            }
        }
    }
}

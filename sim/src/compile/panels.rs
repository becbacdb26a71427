//! Which operand panels a tile finds in L2.

use super::hash::FastMap;
use crate::machine::Machine;
use std::collections::VecDeque;

/// Waves after which the CTAs have drifted apart: products of 4 to 16 waves show none of it, of 68 and more all.
const DRIFTED_WAVES: u32 = 16;

/// Operand panels that are in L2, in the order of their last use.
///
/// The tiles of a wave walk along K side by side, so that one fetch serves them all; between waves as many bytes stay as
/// the window holds. CTAs that have drifted apart find some panels of the wave before beyond that: who follows finds a
/// panel in L2, is faster for it and catches up with who leads. `kernels/cuda/bench/l2_window.py` is the same model,
/// beside the reads of a profiler that window and share were fitted to. A wave has as many tiles as the chip has SMs,
/// whatever the split: only how waves fall on rows of tiles depends on it, not how far apart two uses of a panel are.
pub(super) struct Panels {
    /// Last use of each panel.
    last: FastMap<(u16, u64), Use>,
    /// Uses in order: number of the use, panel, bytes. A panel was used again since unless `last` has this number.
    uses: VecDeque<(u32, (u16, u64), u64)>,
    next: u32,
    bytes: u64,
    tile: u32,
    window: u64,
    wave: u32,
    drift_hits: f64,
}

#[derive(Clone, Copy)]
struct Use {
    number: u32,
    wave: u32,
    in_window: bool,
}

impl Panels {
    pub(super) fn new(machine: &Machine) -> Self {
        Self {
            last: FastMap::default(),
            uses: VecDeque::new(),
            next: 0,
            bytes: 0,
            tile: 0,
            window: (machine.gpu.l2_window_mib.value * 1_048_576.0) as u64,
            wave: machine.gpu.sms.value as u32,
            drift_hits: machine.gpu.l2_drift_hits.value,
        }
    }

    /// Bytes that the use of a panel fetches from memory.
    pub(super) fn fetch(&mut self, buffer: u16, offset: u64, bytes: u64) -> u64 {
        let panel = (buffer, offset);
        let wave = self.tile / self.wave;
        self.uses.push_back((self.next, panel, bytes));
        let before = self.last.insert(panel, Use { number: self.next, wave, in_window: true });
        self.next += 1;
        if before.is_some_and(|before| before.in_window) {
            return 0;
        }
        self.bytes += bytes;
        if wave >= DRIFTED_WAVES && before.is_some_and(|before| before.wave + 1 == wave) {
            return (bytes as f64 * (1.0 - self.drift_hits)).round() as u64;
        }
        bytes
    }

    /// The panels of the next use belong to the next tile.
    pub(super) fn next_tile(&mut self) {
        self.tile += 1;
        if !self.tile.is_multiple_of(self.wave) {
            return;
        }
        while self.bytes > self.window {
            let Some((number, panel, bytes)) = self.uses.pop_front() else { break };
            if let Some(last) = self.last.get_mut(&panel).filter(|last| last.number == number) {
                last.in_window = false;
                self.bytes -= bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes fetched in each wave by tiles that use one panel each: `panel(tile)`.
    fn waves(panels: &mut Panels, count: u32, panel: impl Fn(u32) -> u64) -> Vec<u64> {
        let wave = panels.wave;
        let mut fetched = vec![0; count as usize];
        for tile in 0..count * wave {
            fetched[(tile / wave) as usize] += panels.fetch(0, panel(tile), 1000);
            panels.next_tile();
        }
        fetched
    }

    fn panels(window: u64, drift_hits: f64) -> Panels {
        Panels {
            last: FastMap::default(),
            uses: VecDeque::new(),
            next: 0,
            bytes: 0,
            tile: 0,
            window,
            wave: 10,
            drift_hits,
        }
    }

    #[test]
    fn a_window_that_holds_a_round_of_panels_fetches_them_once() {
        let fetched = waves(&mut panels(10_000, 0.3), 20, |tile| u64::from(tile % 10));
        assert_eq!(fetched.iter().sum::<u64>(), 10_000);
    }

    #[test]
    fn ctas_that_drifted_apart_find_a_share_of_the_wave_before_and_nothing_older() {
        // Ten panels, each used once a wave, and no window.
        let fetched = waves(&mut panels(0, 0.3), 18, |tile| u64::from(tile % 10));
        assert_eq!(fetched[..16], [10_000; 16]);
        assert_eq!(fetched[16..], [7_000; 2]);
        // Twenty panels: each was used two waves before.
        let fetched = waves(&mut panels(0, 0.3), 20, |tile| u64::from(tile % 20));
        assert_eq!(fetched, [10_000; 20]);
    }

    #[test]
    fn a_hit_by_drift_still_takes_its_place_in_the_window() {
        // Windows of all ten panels but one byte: the oldest leaves at the end of every wave and is all that is fetched.
        let fetched = waves(&mut panels(9_999, 0.3), 18, |tile| u64::from(tile % 10));
        assert_eq!(fetched[1..16], [1_000; 15]);
        assert_eq!(fetched[16..], [700; 2]);
    }
}

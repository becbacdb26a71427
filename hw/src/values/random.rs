//! Seeded numbers: the scheduler's choices and the inputs.

/// SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
pub(super) struct Rng(u64);

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64's output function: a bijection that mixes all bits.
pub(crate) const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// A seed for one purpose, so that a new consumer of numbers does not shift the others.
pub(crate) fn seed_for(seed: u64, run: u32, purpose: &str) -> u64 {
    mix(mix(seed.wrapping_add(GAMMA) ^ name_hash(purpose)).wrapping_add(u64::from(run).wrapping_mul(GAMMA)))
}

impl Rng {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// A number below `n`; the bias of a modulus by a small `n` does not matter to a scheduler.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// True once in `n`.
    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// FNV-1a of a name.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// Element (row, col) of a tensor, rounded to bf16.
///
/// Model: `s(row) s(col) u(tensor, row, col)`, u in \[1/2, 1), where s has a random sign and a size in \[1/4, 1) that
/// depends on the index alone, not on the tensor. The terms of a product `sum_k a[r, k] b[k, c]` then all have the sign
/// of `s(r) s(c)`: they do not cancel, so that the error bound, which grows with the sum of their sizes, stays a few
/// percent of the value and one missing or doubled term shows; and rows differ from each other in sign and size, so
/// that a misplaced row shows.
pub(crate) fn element(seed: u64, tensor: &str, row: u64, col: u64) -> f64 {
    let own = mix(seed ^ name_hash(tensor) ^ mix(row.wrapping_mul(GAMMA) ^ mix(col.wrapping_add(GAMMA))));
    let value = index_scale(seed, row) * index_scale(seed, col) * (0.5 + 0.5 * unit(own));
    f64::from(half::bf16::from_f64(value))
}

/// Sign and size of an index: a part that differs from index to index and one that blocks of 8 share, so that also
/// whole tiles and depth steps differ.
fn index_scale(seed: u64, index: u64) -> f64 {
    let fine = mix(seed ^ mix(index ^ 0x5EED));
    let coarse = mix(seed ^ mix((index / 8) ^ 0xB10C));
    let sign = if fine & 1 == 0 { 1.0 } else { -1.0 };
    sign * (0.5 + 0.5 * unit(fine)) * (0.5 + 0.5 * unit(coarse))
}

/// A number in [0, 1) from the upper bits.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

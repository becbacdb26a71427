//! Seeded noise: latency tails, ranks of different speed, which rank is late.
//!
//! Every consumer has its own stream, split off by a hash of (seed, rank, purpose): one more consumer shifts nothing that
//! another one draws. The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
//! OOPSLA 2014), normal variates come from the Box-Muller transform.

/// What a stream is for. The numbers are part of every seeded result: never reuse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Latencies of the network.
    Network = 1,
    /// Latencies of flags.
    Flag = 2,
    /// Speed of the rank.
    Clock = 3,
    /// Which rank is late.
    Late = 4,
}

/// Amounts of noise and the seed that they are drawn with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// Seed of the run.
    pub seed: u64,
    /// Standard deviation of the logarithm of every network latency.
    pub network_sigma: f64,
    /// Standard deviation of the logarithm of every flag latency.
    pub flag_sigma: f64,
    /// Standard deviation of the logarithm of a rank's speed.
    pub clock_sigma: f64,
}

impl Noise {
    /// The stream of a rank for a purpose.
    pub fn stream(&self, rank: usize, purpose: Purpose) -> Stream {
        Stream(mix(mix(mix(self.seed) ^ rank as u64) ^ purpose as u64))
    }

    /// How much longer than nominal the compute work of a rank takes.
    pub fn slowdown(&self, rank: usize) -> f64 {
        (self.clock_sigma * self.stream(rank, Purpose::Clock).normal()).exp()
    }

    /// The rank whose launch command comes late.
    pub fn late_rank(&self, ranks: usize) -> usize {
        (self.stream(0, Purpose::Late).next() % ranks.max(1) as u64) as usize
    }
}

/// A stream of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// In (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// A standard normal variate.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// `ps` times a log-normal factor of median 1; at least a picosecond.
    pub fn spread(&mut self, ps: u64, sigma: f64) -> u64 {
        ((ps as f64 * (sigma * self.normal()).exp()).round() as u64).max(1)
    }
}

/// SplitMix64's output function: a bijection that mixes all bits.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

//! Which experts a token chooses: weights of experts and draws without replacement.

/// SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    fn open_unit(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }
}

/// Experts with weights, drawn without replacement.
pub(crate) struct Urn {
    weights: Vec<f64>,
    /// Running sums of the weights.
    sums: Vec<f64>,
}

impl Urn {
    pub(crate) fn new(weights: Vec<f64>) -> Self {
        let sums = weights.iter().scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { sums: sums.collect(), weights }
    }

    /// Appends `count` different experts, each drawn by weight among those left.
    pub(crate) fn draw(&self, count: usize, random: &mut SplitMix64, chosen: &mut Vec<u32>) {
        /// Drawing again on a repeat has the right distribution, but may repeat long when few experts are left.
        const TRIES: usize = 16;
        let total = self.sums.last().copied().unwrap_or(0.0);
        for _ in 0..count {
            let new = (0..TRIES).find_map(|_| {
                let at = random.open_unit() * total;
                let expert = self.sums.partition_point(|&sum| sum <= at).min(self.sums.len() - 1) as u32;
                (!chosen.contains(&expert)).then_some(expert)
            });
            chosen.push(new.unwrap_or_else(|| self.draw_left(random, chosen)));
        }
    }

    /// One expert by weight among those not chosen.
    fn draw_left(&self, random: &mut SplitMix64, chosen: &[u32]) -> u32 {
        let left = |expert: &u32| !chosen.contains(expert);
        let experts = 0..self.weights.len() as u32;
        let total: f64 = experts.clone().filter(left).map(|e| self.weights[e as usize]).sum();
        let mut at = random.open_unit() * total;
        let mut last = 0;
        for expert in experts.filter(left) {
            last = expert;
            at -= self.weights[expert as usize];
            if at < 0.0 {
                break;
            }
        }
        last
    }
}

/// Weights that `torch.rand(experts, device="cuda")` draws with a generator seeded by `seed`: the first of the four words
/// of Philox4x32-10 at counter (0, 0, expert, 0), as a float in [0, 1).
///
/// One thread draws each number as long as there are at most 256. Sources: Salmon et al., "Parallel random numbers: as
/// easy as 1, 2, 3", SC 2011; the known answer in the tests is what PyTorch prints on CUDA devices.
pub(crate) fn torch_cuda_weights(seed: u64, experts: u64) -> Vec<f64> {
    let weight = |expert: u64| {
        let word = philox([0, 0, expert as u32, (expert >> 32) as u32], [seed as u32, (seed >> 32) as u32])[0];
        let uniform = word as f32 * (1.0 / 4_294_967_296.0) + 0.5 / 4_294_967_296.0;
        if uniform >= 1.0 { 0.0 } else { f64::from(uniform) }
    };
    (0..experts).map(weight).collect()
}

/// Philox4x32 with ten rounds.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let first = u64::from(counter[0]) * 0xD251_1F53;
        let second = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_has_its_published_answers() {
        // Random123's known answers: all zeros, and digits of pi.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let answer = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0]), answer);
    }

    #[test]
    fn weights_are_those_that_torch_draws_on_a_gpu() {
        // torch.manual_seed(0); torch.rand(10, device="cuda"), as printed.
        let printed = [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096];
        for (weight, printed) in torch_cuda_weights(0, 10).into_iter().zip(printed) {
            assert!((weight - printed).abs() < 5.1e-5, "{weight} {printed}");
        }
    }

    #[test]
    fn experts_are_drawn_by_weight_and_without_repeats() {
        let urn = Urn::new(vec![1.0, 0.0, 2.0, 1.0]);
        let mut random = SplitMix64(7);
        let mut counts = [0_u32; 4];
        for _ in 0..8000 {
            let mut chosen = Vec::new();
            urn.draw(2, &mut random, &mut chosen);
            assert_ne!(chosen[0], chosen[1]);
            counts[chosen[0] as usize] += 1;
        }
        assert_eq!(counts[1], 0);
        assert!((3700..4300).contains(&counts[2]), "{counts:?}");
    }
}

//! The device sources, embedded: what the hardware backend compiles at run time.

/// A source file: the name by which others include it, and its text.
pub type Source = (&'static str, &'static str);

/// The interpreter: an entry for each kind of tiles.
pub const INTERPRETER: Source = ("interpreter.cu", include_str!("../cuda/interpreter.cu"));

/// Small kernels that each read one time off the card.
pub const PROBES: Source = ("probes.cu", include_str!("../cuda/probes.cu"));

/// Every header that a device source includes.
pub const HEADERS: [Source; 16] = [
    ("attention_interpreter.cuh", include_str!("../cuda/attention_interpreter.cuh")),
    ("attention_tile.cuh", include_str!("../cuda/attention_tile.cuh")),
    ("base.cuh", include_str!("../cuda/base.cuh")),
    ("flags.cuh", include_str!("../cuda/flags.cuh")),
    ("gemm_interpreter.cuh", include_str!("../cuda/gemm_interpreter.cuh")),
    ("gemm_tile.cuh", include_str!("../cuda/gemm_tile.cuh")),
    ("mbarrier.cuh", include_str!("../cuda/mbarrier.cuh")),
    ("merge.cuh", include_str!("../cuda/merge.cuh")),
    ("moves.cuh", include_str!("../cuda/moves.cuh")),
    ("orders.cuh", include_str!("../cuda/orders.cuh")),
    ("program.cuh", include_str!("../cuda/program.cuh")),
    ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
    ("tasks.cuh", include_str!("../cuda/tasks.cuh")),
    ("tma.cuh", include_str!("../cuda/tma.cuh")),
    ("watchdog.cuh", include_str!("../cuda/watchdog.cuh")),
    ("wgmma.cuh", include_str!("../cuda/wgmma.cuh")),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_header_that_a_source_includes_is_embedded() {
        let included = |(source, text): &Source| -> Vec<(&str, String)> {
            let name = |line: &str| line.strip_prefix("#include \"")?.strip_suffix('"').map(str::to_owned);
            text.lines().filter_map(|line| Some((*source, name(line)?))).collect()
        };
        let all: Vec<_> = [INTERPRETER, PROBES].iter().chain(&HEADERS).flat_map(included).collect();
        assert!(all.len() > HEADERS.len(), "includes are found: {all:?}");
        let missing: Vec<_> = all.iter().filter(|(_, name)| HEADERS.iter().all(|(have, _)| have != name)).collect();
        assert!(missing.is_empty(), "not in HEADERS: {missing:?}");
    }
}

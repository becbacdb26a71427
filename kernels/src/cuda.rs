//! The device sources, embedded: what the hardware backend compiles at run time.

/// A source file: the name by which others include it, and its text.
pub type Source = (&'static str, &'static str);

/// The interpreter: an entry for each kind of tiles.
pub const INTERPRETER: Source = ("interpreter.cu", include_str!("../cuda/interpreter.cu"));

/// Small kernels that each read one time off the card.
pub const PROBES: Source = ("probes.cu", include_str!("../cuda/probes.cu"));

/// Every header that a device source includes.
pub const HEADERS: [Source; 17] = [
    ("attention_interpreter.cuh", include_str!("../cuda/attention_interpreter.cuh")),
    ("attention_tile.cuh", include_str!("../cuda/attention_tile.cuh")),
    ("base.cuh", include_str!("../cuda/base.cuh")),
    ("flags.cuh", include_str!("../cuda/flags.cuh")),
    ("gemm_interpreter.cuh", include_str!("../cuda/gemm_interpreter.cuh")),
    ("gemm_tile.cuh", include_str!("../cuda/gemm_tile.cuh")),
    ("interpreter.cuh", include_str!("../cuda/interpreter.cuh")),
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
    use std::collections::BTreeSet;

    /// NVRTC sees no folder: a header that is not embedded does not exist on a user's machine.
    #[test]
    fn headers_are_all_that_the_sources_include_directly_or_not() {
        let text = |name: &str| {
            let found = HEADERS.iter().find(|(header, _)| *header == name);
            found.unwrap_or_else(|| panic!("{name} is included and not among HEADERS")).1
        };
        let includes = |text: &'static str| {
            text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"')).collect::<Vec<_>>()
        };
        let mut open = [INTERPRETER, PROBES].iter().flat_map(|source| includes(source.1)).collect::<Vec<_>>();
        let mut used = BTreeSet::new();
        while let Some(name) = open.pop() {
            if used.insert(name) {
                open.extend(includes(text(name)));
            }
        }
        assert_eq!(used, HEADERS.iter().map(|(name, _)| *name).collect());
    }
}

//! The device sources, embedded: what the hardware backend compiles at run time.

/// A source file: the name by which others include it, and its text.
pub type Source = (&'static str, &'static str);

/// The interpreter of the GEMM family.
pub const INTERPRETER: Source = ("interpreter.cu", include_str!("../cuda/interpreter.cu"));

/// Every header that a device source includes.
pub const HEADERS: [Source; 9] = [
    ("base.cuh", include_str!("../cuda/base.cuh")),
    ("flags.cuh", include_str!("../cuda/flags.cuh")),
    ("gemm_tile.cuh", include_str!("../cuda/gemm_tile.cuh")),
    ("mbarrier.cuh", include_str!("../cuda/mbarrier.cuh")),
    ("program.cuh", include_str!("../cuda/program.cuh")),
    ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
    ("tma.cuh", include_str!("../cuda/tma.cuh")),
    ("watchdog.cuh", include_str!("../cuda/watchdog.cuh")),
    ("wgmma.cuh", include_str!("../cuda/wgmma.cuh")),
];

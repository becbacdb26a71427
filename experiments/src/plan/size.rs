//! How large a case may be.

use super::{Part, Refusal};
use tilewire_kernels::{Options, Problem};

/// Compute tiles of a rank at most: beyond, a schedule does not fit into memory.
const MAX_TILES: u64 = 1 << 24;

/// Refuses shapes that would not fit into memory, before anything is built.
///
/// # Errors
/// The field that decides.
pub fn limit_tiles(problem: &Problem, options: &Options) -> Result<(), Refusal> {
    let (field, tiles) = compute_tiles(problem, options);
    if tiles > MAX_TILES {
        let problem =
            format!("{problem} has {tiles} tiles, allowed: {MAX_TILES}; choose a smaller shape or larger tiles");
        return Err(Refusal::new(Part::Shape(field), problem));
    }
    Ok(())
}

/// Compute tiles of a rank, about, and the field of the shape that decides.
pub fn compute_tiles(problem: &Problem, options: &Options) -> (&'static str, u64) {
    let tile = |name: &str, default: u64| {
        options.iter().find(|(option, _)| *option == name).map_or(default, |(_, value)| match value {
            tilewire_kernels::options::Value::Int(value) => value.max(1),
            _ => default,
        })
    };
    let (field, rows, cols) = match *problem {
        Problem::Gemm { m, n, .. } => ("m", m, n),
        Problem::Moe { tokens, inter, topk, .. } => ("tokens", tokens * topk, inter),
        Problem::Attention { seq, batch, heads, .. } => ("seq", seq, batch * heads * tile("tile_n", 256)),
    };
    (field, rows.div_ceil(tile("tile_m", 128)).saturating_mul(cols.div_ceil(tile("tile_n", 256))))
}

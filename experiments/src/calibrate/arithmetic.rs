//! Parameters that rows of tiles alone give by themselves: differences, and lines through them.

use super::{Fitted, from_readings, line};
use crate::measure_row::MeasuredRow;
use tilewire_hw::measure::spread;

/// Tile of the interpreter.
const TILE: [f64; 3] = [128.0, 256.0, 64.0];
/// Rows of a Q and of a KV block of its attention, and their width.
const BLOCK: [f64; 3] = [192.0, 128.0, 128.0];

/// A row of tiles alone.
struct TileRow<'a> {
    row: &'a MeasuredRow,
    ctas: f64,
    /// Of the CTA with the most.
    tiles: f64,
    steps: f64,
    flops: f64,
}

impl TileRow<'_> {
    fn of(row: &MeasuredRow) -> Option<TileRow<'_>> {
        let [m, n, k, ctas] = ["m", "n", "k", "compute"].map(|name| row.number(name).unwrap_or(0.0));
        let is = row.text("kernel") == "gemm_ar" && row.text("cluster") == "1x1" && row.text("clock") == "sustained";
        let tiles = (m / TILE[0] * (n / TILE[1]) / ctas).ceil();
        is.then_some(TileRow { row, ctas, tiles, steps: k / TILE[2], flops: 2.0 * m * n * k })
    }

    fn number(&self, column: &str) -> f64 {
        self.row.number(column).unwrap_or(f64::NAN)
    }

    /// Time of a tile, first and last ones' edges spread over all.
    fn tile_ns(&self) -> f64 {
        self.number("span_us") * 1e3 / self.tiles
    }
}

/// Whether two counts are the same.
fn equal(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.5
}

/// Parameters that rows give by themselves.
pub fn arithmetic(rows: &[MeasuredRow]) -> Vec<Fitted> {
    let tiles: Vec<TileRow<'_>> = rows.iter().filter_map(TileRow::of).collect();
    let alone = |row: &&TileRow<'_>| row.ctas <= 16.0;
    let mut fits = Vec::new();
    let launch = tiles.iter().map(|row| row.number("time_us") - row.number("span_us")).collect();
    fits.extend(from_readings(
        "launch.command_us",
        launch,
        "tiles alone: events around a queued launch, less its span",
    ));
    // The same program with more tasks per CTA.
    let pairs = |same: fn(&TileRow<'_>, &TileRow<'_>) -> bool| {
        let tiles = &tiles;
        tiles.iter().flat_map(move |a| tiles.iter().filter(move |b| same(a, b)).map(move |b| (a, b)))
    };
    let longer = pairs(|a, b| equal(a.ctas, b.ctas) && equal(a.steps, b.steps) && b.tiles > a.tiles + 20.0);
    let task = longer.map(|(a, b)| (b.number("comm_only_us") - a.number("comm_only_us")) * 1e3 / (b.tiles - a.tiles));
    fits.extend(from_readings("interpreter.task_ns", task.collect(), "empty tasks in place of tiles, more less fewer"));
    let deeper = pairs(|a, b| equal(a.ctas, b.ctas) && equal(a.tiles, b.tiles) && b.steps > a.steps && a.steps >= 32.0);
    let step: Vec<f64> = deeper
        .filter(|(a, _)| a.ctas <= 16.0)
        .map(|(a, b)| (b.tile_ns() - a.tile_ns()) / (b.steps - a.steps))
        .collect();
    let step_ns = spread(step.clone())[1];
    let rate = |ns: f64| 2.0 * TILE.iter().product::<f64>() / ns * 1e-3;
    fits.extend(from_readings(
        "gemm.pipelined.sm_tflops",
        step.into_iter().map(rate).collect(),
        "tiles alone on 1 to 16 CTAs, k = 8192 less k = 2048",
    ));
    // Beside the steps: what a CTA alone takes, and what every other one adds. Rows with few tiles per CTA also hold
    // the first load and the last store.
    let beside: Vec<(f64, f64)> = tiles
        .iter()
        .filter(|row| row.ctas <= 64.0 && row.tiles >= 32.0)
        .map(|row| (row.ctas - 1.0, row.tile_ns() - row.steps * step_ns))
        .collect();
    if let Some((fixed, slope, residual)) = line(&beside) {
        let how =
            format!("time of tiles alone beside their steps, up to 64 CTAs: a line through {} rows", beside.len());
        let of = |name, value, residual: f64| Fitted {
            name,
            value,
            low: value - residual,
            high: value + residual,
            kind: "derived",
            how: how.clone(),
        };
        fits.push(of("gemm.pipelined.epilogue_ns", fixed, residual));
        fits.push(of("interpreter.crowd_ns", slope, residual / 32.0));
    }
    let full =
        spread(tiles.iter().filter(alone).filter(|row| row.steps >= 128.0).map(|row| row.number("sm_mhz")).collect())
            [1];
    let droop: Vec<(f64, f64)> = tiles
        .iter()
        .filter(|row| row.ctas >= 64.0 && row.steps >= 32.0)
        .flat_map(|row| [("time_us", "sm_mhz"), ("compute_only_us", "compute_only_mhz")].map(|names| (row, names)))
        .map(|(row, (time, clock))| (row.flops / row.number(time) * 1e-6, row.number(clock) / full))
        .filter(|&(_, speed)| speed < 0.985)
        .collect();
    if let Some((intercept, slope, residual)) = line(&droop) {
        let fixed = -1.0 / slope;
        let how = format!(
            "clock of tiles alone against their average TFLOP/s, {} readings that droop: speed = 1 + (knee - TFLOP/s) / static, residual {:.3}",
            droop.len(),
            residual
        );
        let of = |name, value: f64| Fitted {
            name,
            value,
            low: value * (1.0 - residual),
            high: value * (1.0 + residual),
            kind: "derived",
            how: how.clone(),
        };
        let knee = (intercept - 1.0) * fixed;
        fits.push(of("gpu.droop_knee_tflops", knee));
        fits.push(of("gpu.droop_static_tflops", fixed));
        fits.extend(attention_power(rows, knee, fixed));
    }
    fits.extend(attention(rows));
    fits
}

/// By what part of its FLOPs attention meets the power limit of a GEMM: from the clocks of tiles alone.
fn attention_power(rows: &[MeasuredRow], knee: f64, fixed: f64) -> Option<Fitted> {
    let of = |row: &MeasuredRow| {
        let [seq, batch, heads, time, mhz] =
            ["seq", "batch", "heads", "time_us", "sm_mhz"].map(|name| row.number(name).unwrap_or(f64::NAN));
        let is = row.text("kernel") == "ring_attention" && row.text("cluster") == "1x1";
        is.then_some((4.0 * batch * heads * seq * seq * BLOCK[2] / time * 1e-6, mhz))
    };
    let rows: Vec<(f64, f64)> = rows.iter().filter_map(of).collect();
    let full = rows.iter().map(|row| row.1).fold(0.0, f64::max);
    let drawn = rows
        .iter()
        .map(|&(rate, mhz)| (rate, mhz / full))
        .filter(|&(_, speed)| speed < 0.985)
        .map(|(rate, speed)| (knee + (1.0 - speed) * fixed) / rate);
    from_readings("interpreter.attention_power", drawn.collect(), "clock of attention tiles alone, where it droops")
}

/// Attention tiles: steps and what is beside them, from blocks of few CTAs, which meet no power limit.
fn attention(rows: &[MeasuredRow]) -> Vec<Fitted> {
    let point = |row: &MeasuredRow| {
        let [seq, batch, heads, ctas, span] =
            ["seq", "batch", "heads", "compute", "span_us"].map(|name| row.number(name).unwrap_or(f64::NAN));
        let is = row.text("kernel") == "ring_attention" && row.text("cluster") == "1x1" && ctas <= 16.0;
        let blocks = (batch * heads * seq / BLOCK[0] / ctas).ceil();
        is.then_some((seq / BLOCK[1], span * 1e3 / blocks))
    };
    let points: Vec<(f64, f64)> = rows.iter().filter_map(point).collect();
    let Some((fixed, step_ns, residual)) = line(&points) else { return Vec::new() };
    let how =
        format!("attention tiles alone on up to 16 CTAs against their steps: a line through {} rows", points.len());
    let rate = 4.0 * BLOCK.iter().product::<f64>() * 1e-3;
    let longest = points.iter().map(|p| p.0).fold(0.0, f64::max);
    let of =
        |name, value: f64, low: f64, high: f64| Fitted { name, value, low, high, kind: "derived", how: how.clone() };
    let spread_ns = residual / longest;
    vec![
        of("attention.pipelined.sm_tflops", rate / step_ns, rate / (step_ns + spread_ns), rate / (step_ns - spread_ns)),
        of("attention.pipelined.block_ns", fixed, fixed - residual, fixed + residual),
    ]
}

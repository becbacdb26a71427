//! Plots, as PNG and SVG: lines, heat maps, bars, scatter.
//!
//! One grammar everywhere: predicted is a solid line or bar, measured and published are dots or hatched bars, colours
//! mean the same thing in every plot, axes carry units, the footer names source and commit.

pub mod axis;
pub mod bars;
pub mod canvas;
pub mod heat;
pub mod line;
pub mod scatter;
pub mod style;

use crate::error::ExperimentError;
use canvas::{Canvas, Drawn};
use plotters::backend::{BitMapBackend, SVGBackend};
use plotters::drawing::IntoDrawingArea;
use plotters::prelude::DrawingBackend;
use std::fs;
use std::path::{Path, PathBuf};

/// Width and height of every plot.
pub const SIZE: (u32, u32) = (1200, 800);

/// Bitmaps are drawn this many times larger and averaged, which smooths every edge.
const OVERSAMPLING: u32 = 3;

/// The drawing library rounds to whole units: an SVG has this many of them in a pixel.
const SVG_GRID: u32 = 4;

/// Bitmap text centred at a point stands this share of its size too high: the font's line has room for accents.
const BITMAP_DROP: f64 = 0.11;

/// Something that can be drawn on any backend.
pub trait Drawing {
    /// Draws on a canvas of [`SIZE`].
    ///
    /// # Errors
    /// The backend's.
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Drawn;
}

/// Title, subtitle and footer of a plot.
#[derive(Clone, Debug, Default)]
pub struct Frame {
    /// What is shown.
    pub title: String,
    /// Under which conditions.
    pub subtitle: String,
    /// Sources and commit.
    pub footer: String,
}

/// Names of the files that [`save`] makes of a stem.
pub fn files(stem: &str) -> [String; 2] {
    // Appended, not `with_extension`: a stem may hold dots.
    ["png", "svg"].map(|extension| format!("{stem}.{extension}"))
}

/// Writes `stem.png` and `stem.svg`; returns their paths.
///
/// # Errors
/// [`ExperimentError::Write`].
pub fn save(drawing: &impl Drawing, stem: &Path) -> Result<[PathBuf; 2], ExperimentError> {
    style::register_fonts();
    let [png, svg] = files(&stem.display().to_string()).map(PathBuf::from);
    write_png(drawing, &png).map_err(|error| ExperimentError::write(&png, error))?;
    let text = svg_text(drawing).map_err(|error| ExperimentError::write(&svg, error))?;
    fs::write(&svg, text).map_err(|error| ExperimentError::write(&svg, error))?;
    Ok([png, svg])
}

fn svg_text(drawing: &impl Drawing) -> Result<String, String> {
    let fine = (SIZE.0 * SVG_GRID, SIZE.1 * SVG_GRID);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, fine).into_drawing_area();
        let canvas = Canvas::new(&area, f64::from(SVG_GRID), 0.0);
        drawing.draw(&canvas).and_then(|()| area.present().map_err(|e| e.to_string()))?;
    }
    // The view box keeps the fine grid; only the size on the page is set back.
    let (fine, size) = (page(fine), page(SIZE));
    Ok(text.replacen(&fine, &size, 1))
}

fn page((width, height): (u32, u32)) -> String {
    format!("width=\"{width}\" height=\"{height}\"")
}

fn write_png(drawing: &impl Drawing, path: &Path) -> Result<(), String> {
    let large = (SIZE.0 * OVERSAMPLING, SIZE.1 * OVERSAMPLING);
    let mut pixels = vec![255_u8; (large.0 * large.1 * 3) as usize];
    {
        let area = BitMapBackend::with_buffer(&mut pixels, large).into_drawing_area();
        let canvas = Canvas::new(&area, f64::from(OVERSAMPLING), BITMAP_DROP);
        drawing.draw(&canvas).and_then(|()| area.present().map_err(|e| e.to_string()))?;
    }
    let small = average(&pixels, large.0 as usize);
    let mut backend = BitMapBackend::new(path, SIZE);
    backend.blit_bitmap((0, 0), SIZE, &small).map_err(|e| e.to_string())?;
    backend.present().map_err(|e| e.to_string())
}

/// Averages squares of `OVERSAMPLING` pixels.
fn average(pixels: &[u8], width: usize) -> Vec<u8> {
    let n = OVERSAMPLING as usize;
    let (columns, rows) = (SIZE.0 as usize, SIZE.1 as usize);
    let mut small = Vec::with_capacity(columns * rows * 3);
    for row in 0..rows {
        for column in 0..columns {
            for channel in 0..3 {
                let mut sum = 0_usize;
                for dy in 0..n {
                    for dx in 0..n {
                        sum += usize::from(pixels[((row * n + dy) * width + column * n + dx) * 3 + channel]);
                    }
                }
                small.push((sum / (n * n)) as u8);
            }
        }
    }
    small
}

#[cfg(test)]
mod tests {
    use super::axis::Spread;
    use super::bars::{BarPlot, BarSeries, Fill};
    use super::heat::HeatMap;
    use super::line::{LinePlot, Panel, Series};
    use super::scatter::{DotSeries, ScatterPlot};
    use super::style::{FUSED, UNFUSED};
    use super::*;

    fn frame() -> Frame {
        let long = "a subtitle that is much longer than the plot is wide, ".repeat(6);
        Frame { title: "gemm_rs: a title".into(), subtitle: long, footer: "data/x.csv".into() }
    }

    fn drawn(drawing: &impl Drawing) {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for path in save(drawing, &directory.path().join("plot.v1")).expect("a plot") {
            assert!(fs::metadata(&path).expect("a file").len() > 1000, "{}", path.display());
        }
        let (a, b) = (svg_text(drawing), svg_text(drawing));
        assert_eq!(a, b, "equal input gives equal bytes");
    }

    fn line(points: &[(f64, f64)]) -> LinePlot {
        let mut series = Series::line("predicted", FUSED, points.to_vec());
        series.band = points.iter().map(|&(x, y)| (x, y * 0.9, y * 1.1)).collect();
        series.dots = points.iter().map(|&(x, y)| (x, y * 1.02, y * 0.95, y * 1.08)).collect();
        series.mark = points.first().map(|&point| (point, "best".into()));
        let panel = Panel { y_name: "time [us]".into(), with_zero: true, series: vec![series] };
        LinePlot { frame: frame(), x_name: "send [SMs]".into(), x_spread: Spread::Linear, panels: vec![panel] }
    }

    #[test]
    fn lines_are_drawn_whatever_their_points() {
        let many: Vec<_> = (1..50).map(|x| (f64::from(x), 400.0 + f64::from(x % 7))).collect();
        drawn(&line(&many));
        drawn(&line(&[(3.0, 0.0)]));
        drawn(&line(&[(1.0, f64::NAN), (2.0, 5.0), (4.0, f64::INFINITY)]));
        drawn(&line(&[]));
    }

    #[test]
    fn heat_maps_are_drawn_with_holes() {
        let values = vec![vec![Some(1.0), None, Some(9.0)], vec![None, Some(1.5), Some(2.0)]];
        let (x_name, y_name) = ("send [SMs]".into(), "reduce [SMs]".into());
        let mut map = HeatMap {
            frame: frame(),
            x_name,
            xs: vec![1, 2, 3],
            y_name,
            ys: vec![4, 8],
            value_name: "time [us]".into(),
            values,
        };
        drawn(&map);
        map.values = vec![vec![None; 3]; 2];
        drawn(&map);
    }

    #[test]
    fn bars_are_drawn_with_bands_and_gaps() {
        let series = |name: &str, color, fill, values| BarSeries { name: name.into(), color, fill, values };
        drawn(&BarPlot {
            frame: frame(),
            x_name: "m".into(),
            groups: vec!["4096".into(), "8192".into()],
            y_name: "TFLOPS per GPU".into(),
            series: vec![
                series("published", FUSED, Fill::Hatched, vec![Some((90.0, 80.0, 95.0)), None]),
                series("predicted", FUSED, Fill::Solid, vec![Some((91.0, 91.0, 91.0)), Some((4.0, 4.0, 4.0))]),
                series("fair", UNFUSED, Fill::Pale, vec![Some((70.0, 70.0, 70.0))]),
            ],
        });
    }

    #[test]
    fn scatter_plots_are_drawn() {
        let points = vec![(10.0, 11.0), (20.0, 19.0), (500.0, 480.0), (0.0, 3.0)];
        let series = |hollow| DotSeries { name: "gemm_rs".into(), color: FUSED, hollow, points: points.clone() };
        let plot = |series| ScatterPlot {
            frame: frame(),
            x_name: "published TFLOPS per GPU".into(),
            y_name: "predicted TFLOPS per GPU".into(),
            band: 0.08,
            series,
        };
        drawn(&plot(vec![series(false), series(true)]));
        drawn(&plot(Vec::new()));
    }
}

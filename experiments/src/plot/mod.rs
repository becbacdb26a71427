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

/// Writes `stem.png` and `stem.svg`; returns their paths.
///
/// # Errors
/// [`ExperimentError::Write`].
pub fn save(drawing: &impl Drawing, stem: &Path) -> Result<[PathBuf; 2], ExperimentError> {
    style::register_fonts();
    // Appended, not `with_extension`: a stem may hold dots.
    let path = |extension: &str| PathBuf::from(format!("{}.{extension}", stem.display()));
    let (png, svg) = (path("png"), path("svg"));
    write_png(drawing, &png).map_err(|error| ExperimentError::write(&png, error))?;
    let text = svg_text(drawing).map_err(|error| ExperimentError::write(&svg, error))?;
    fs::write(&svg, text).map_err(|error| ExperimentError::write(&svg, error))?;
    Ok([png, svg])
}

fn svg_text(drawing: &impl Drawing) -> Result<String, String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        drawing.draw(&Canvas::new(&area, 1.0, 0.0)).and_then(|()| area.present().map_err(|e| e.to_string()))?;
    }
    Ok(text)
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

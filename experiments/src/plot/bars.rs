//! Grouped bars: published beside predicted.

use super::axis::Axis;
use super::canvas::{Area, Canvas, Drawn, letters};
use super::style::{INK, PAPER, QUIET};
use super::{Drawing, Frame, SIZE};
use plotters::prelude::DrawingBackend;
use plotters::style::text_anchor::{HPos, VPos};
use plotters::style::{Color, RGBColor};

/// How a bar is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Predicted.
    Solid,
    /// Predicted under another protocol than the published one.
    Pale,
    /// Published or measured.
    Hatched,
}

/// Bars of one kind, one per group.
#[derive(Clone, Debug)]
pub struct BarSeries {
    /// Name in the legend.
    pub name: String,
    /// Colour.
    pub color: RGBColor,
    /// Fill.
    pub fill: Fill,
    /// Value, and the low and high end of its band; none where there is no row.
    pub values: Vec<Option<(f64, f64, f64)>>,
}

/// Groups of bars.
#[derive(Clone, Debug)]
pub struct BarPlot {
    /// Title and so on.
    pub frame: Frame,
    /// Name and unit of the groups.
    pub x_name: String,
    /// Labels of the groups.
    pub groups: Vec<String>,
    /// Name and unit of the values.
    pub y_name: String,
    /// Series, from left to right in each group.
    pub series: Vec<BarSeries>,
}

impl Drawing for BarPlot {
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Drawn {
        canvas.frame(&self.frame)?;
        self.legend(canvas)?;
        let area = Area { left: 112.0, top: 134.0, right: f64::from(SIZE.0) - 40.0, bottom: f64::from(SIZE.1) - 98.0 };
        // Room for the labels above the highest bar.
        let highest = self.series.iter().flat_map(|series| &series.values).flatten().map(|value| value.0.max(value.2));
        let y = Axis::linear(highest.map(|value| value * 1.06), true);
        y.draw_y(canvas, &area, &self.y_name)?;
        let group = area.width() / self.groups.len().max(1) as f64;
        let bar = (group * 0.86 / self.series.len().max(1) as f64).min(64.0);
        for (g, name) in self.groups.iter().enumerate() {
            let middle = area.left + (g as f64 + 0.5) * group;
            let first = middle - bar * self.series.len() as f64 / 2.0;
            for (s, series) in self.series.iter().enumerate() {
                let left = first + s as f64 * bar;
                if let Some(Some(value)) = series.values.get(g) {
                    draw_bar(canvas, series, *value, (left, bar), (&area, &y))?;
                }
            }
            canvas.text(name, (middle, area.bottom + 10.0), letters(15.0).at(HPos::Center, VPos::Top))?;
        }
        canvas.line((area.left, area.bottom), (area.right, area.bottom), INK, 1.0)?;
        let middle = (f64::midpoint(area.left, area.right), area.bottom + 38.0);
        canvas.text(&self.x_name, middle, letters(15.0).at(HPos::Center, VPos::Top))
    }
}

impl BarPlot {
    fn legend<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Drawn {
        let mut x = 112.0;
        let y = 106.0;
        for series in &self.series {
            paint(canvas, Area { left: x, top: y - 8.0, right: x + 24.0, bottom: y + 8.0 }, series)?;
            canvas.text(&series.name, (x + 32.0, y), letters(14.0))?;
            x += 32.0 + canvas.width(&series.name, letters(14.0)) + 26.0;
        }
        if self.series.iter().flat_map(|series| &series.values).flatten().any(|value| value.2 > value.1) {
            canvas.line((x + 6.0, y - 8.0), (x + 6.0, y + 8.0), INK, 1.5)?;
            canvas.line((x + 1.0, y - 8.0), (x + 11.0, y - 8.0), INK, 1.5)?;
            canvas.line((x + 1.0, y + 8.0), (x + 11.0, y + 8.0), INK, 1.5)?;
            canvas.text("repeats", (x + 20.0, y), letters(14.0).color(QUIET))?;
        }
        Ok(())
    }
}

fn draw_bar<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    series: &BarSeries,
    (value, low, high): (f64, f64, f64),
    (left, width): (f64, f64),
    (area, y): (&Area, &Axis),
) -> Drawn {
    let inset = (width * 0.06).min(3.0);
    let shape = Area { left: left + inset, top: y.y(area, value), right: left + width - inset, bottom: area.bottom };
    paint(canvas, shape, series)?;
    let middle = left + width / 2.0;
    if high > low {
        let (top, bottom) = (y.y(area, high), y.y(area, low));
        // A pale edge keeps the whisker readable on a hatched bar.
        canvas.line((middle, top), (middle, bottom), PAPER, 4.0)?;
        canvas.line((middle, top), (middle, bottom), INK, 1.5)?;
        for end in [top, bottom] {
            canvas.line((middle - 5.0, end), (middle + 5.0, end), INK, 1.5)?;
        }
    }
    let top = y.y(area, value.max(high));
    let text = if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    let size = (width / 2.6).clamp(9.0, 13.0);
    canvas.text(&text, (middle, top - 4.0), letters(size).at(HPos::Center, VPos::Bottom))
}

fn paint<DB: DrawingBackend>(canvas: &Canvas<'_, DB>, shape: Area, series: &BarSeries) -> Drawn {
    match series.fill {
        Fill::Solid => canvas.fill(shape, series.color.to_rgba()),
        Fill::Pale => {
            canvas.fill(shape, series.color.mix(0.28))?;
            canvas.outline(shape, series.color, 1.5)
        }
        Fill::Hatched => {
            canvas.fill(shape, series.color.mix(0.06))?;
            canvas.hatch(shape, series.color, 7.0, 1.5)?;
            canvas.outline(shape, series.color, 1.5)
        }
    }
}

//! Predicted against measured or published values, with the line on which they would be equal.

use super::axis::Axis;
use super::canvas::{Area, Canvas, Drawn, letters};
use super::style::{GRID, INK, PAPER, QUIET};
use super::{Drawing, Frame, SIZE};
use plotters::prelude::DrawingBackend;
use plotters::style::text_anchor::{HPos, VPos};
use plotters::style::{Color, RGBColor};

/// Dots of one kind: measured, predicted.
#[derive(Clone, Debug)]
pub struct DotSeries {
    /// Name in the legend.
    pub name: String,
    /// Colour.
    pub color: RGBColor,
    /// Dots are hollow, to tell a second property apart.
    pub hollow: bool,
    /// Measured or published value, predicted value.
    pub points: Vec<(f64, f64)>,
}

/// A scatter plot on logarithmic axes of equal range.
#[derive(Clone, Debug)]
pub struct ScatterPlot {
    /// Title and so on.
    pub frame: Frame,
    /// Name and unit of the measured or published values.
    pub x_name: String,
    /// Name and unit of the predicted values.
    pub y_name: String,
    /// Relative deviation that is shaded around the line: 0.08 is 8 %.
    pub band: f64,
    /// Series.
    pub series: Vec<DotSeries>,
}

impl Drawing for ScatterPlot {
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Drawn {
        canvas.frame(&self.frame)?;
        // Square, so that the line of equality is the diagonal; the legend stands beside it.
        let side = f64::from(SIZE.1) - 98.0 - 104.0;
        let area = Area { left: 130.0, top: 104.0, right: 130.0 + side, bottom: 104.0 + side };
        let values = self.series.iter().flat_map(|series| series.points.iter().flat_map(|&(x, y)| [x, y]));
        let positive: Vec<f64> = values.filter(|value| value.is_finite() && *value > 0.0).collect();
        let low = positive.iter().copied().fold(f64::INFINITY, f64::min);
        let high = positive.iter().copied().fold(1e-9, f64::max);
        let (low, high) = if low <= high { (low, high.max(low * 1.5)) } else { (1.0, 10.0) };
        let axis = Axis::logarithmic(low / 1.1, high * 1.1);
        axis.draw_y(canvas, &area, &self.y_name)?;
        axis.draw_x(canvas, &area, &self.x_name)?;
        let place = |x: f64, y: f64| (axis.x(&area, x), axis.y(&area, y));
        let (from, to) = (low / 1.1, high * 1.1);
        if self.band > 0.0 {
            let up = 1.0 + self.band;
            let corners = [place(from * up, from), place(to, to / up), place(to / up, to), place(from, from * up)];
            canvas.polygon(&corners, GRID.to_rgba())?;
        }
        canvas.line(place(from, from), place(to, to), QUIET, 1.5)?;
        for series in &self.series {
            for &(x, y) in series.points.iter().filter(|(x, y)| *x > 0.0 && *y > 0.0) {
                dot(canvas, place(x, y), series)?;
            }
        }
        let mut y = area.top + 8.0;
        for series in &self.series {
            dot(canvas, (area.right + 48.0, y), series)?;
            canvas.text(&series.name, (area.right + 64.0, y), letters(14.0))?;
            y += 26.0;
        }
        if self.band > 0.0 {
            let swatch = Area { left: area.right + 36.0, top: y - 8.0, right: area.right + 60.0, bottom: y + 8.0 };
            canvas.fill(swatch, GRID.to_rgba())?;
            let text = format!("within {:.0} %", self.band * 100.0);
            canvas.text(&text, (area.right + 68.0, y), letters(14.0).color(QUIET))?;
        }
        canvas.line((area.left, area.top), (area.left, area.bottom), INK, 1.0)?;
        let lettering = letters(13.0).color(QUIET).at(HPos::Left, VPos::Top);
        canvas.text("above the line: predicted higher", (area.left + 12.0, area.top + 8.0), lettering)
    }
}

fn dot<DB: DrawingBackend>(canvas: &Canvas<'_, DB>, at: (f64, f64), series: &DotSeries) -> Drawn {
    if series.hollow {
        canvas.ring(at, 5.0, series.color, 2.0)
    } else {
        canvas.dot(at, 6.5, PAPER)?;
        canvas.dot(at, 5.5, series.color)
    }
}

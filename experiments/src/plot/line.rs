//! Lines over a common x axis, in one panel or several stacked ones.

use super::axis::{Axis, Spread};
use super::canvas::{Area, Canvas, Drawn, Point, letters};
use super::style::{INK, PAPER};
use super::{Drawing, Frame, SIZE};
use plotters::prelude::DrawingBackend;
use plotters::style::{Color, RGBColor};

/// A line with an optional band and optional dots.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend; empty for none.
    pub name: String,
    /// Colour.
    pub color: RGBColor,
    /// Predicted points.
    pub line: Vec<Point>,
    /// x, low, high.
    pub band: Vec<(f64, f64, f64)>,
    /// Measured or published points: x, y, low, high.
    pub dots: Vec<(f64, f64, f64, f64)>,
    /// A point that is marked, and what is written of it above the panel: one of a panel.
    pub mark: Option<(Point, String)>,
}

/// Series with a common y axis.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Name and unit of the y axis.
    pub y_name: String,
    /// Whether the axis starts at zero.
    pub with_zero: bool,
    /// Series.
    pub series: Vec<Series>,
}

/// Panels over a common x axis.
#[derive(Clone, Debug)]
pub struct LinePlot {
    /// Title and so on.
    pub frame: Frame,
    /// Name and unit of the x axis.
    pub x_name: String,
    /// How x is spread.
    pub x_spread: Spread,
    /// From top to bottom.
    pub panels: Vec<Panel>,
}

impl Series {
    /// A line and nothing else.
    pub fn line(name: impl Into<String>, color: RGBColor, line: Vec<Point>) -> Self {
        Self { name: name.into(), color, line, band: Vec::new(), dots: Vec::new(), mark: None }
    }

    fn xs(&self) -> impl Iterator<Item = f64> + '_ {
        let dots = self.dots.iter().map(|dot| dot.0);
        self.line.iter().map(|point| point.0).chain(self.band.iter().map(|band| band.0)).chain(dots)
    }

    fn ys(&self) -> impl Iterator<Item = f64> + '_ {
        let band = self.band.iter().flat_map(|band| [band.1, band.2]);
        let dots = self.dots.iter().flat_map(|dot| [dot.1, dot.2, dot.3]);
        self.line.iter().map(|point| point.1).chain(band).chain(dots)
    }
}

impl Drawing for LinePlot {
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Drawn {
        canvas.frame(&self.frame)?;
        let marked = self.panels.first().is_some_and(|panel| panel.series.iter().any(|series| series.mark.is_some()));
        let top = self.legend(canvas)? + if marked { 10.0 } else { 0.0 };
        let whole = Area { left: 122.0, top, right: f64::from(SIZE.0) - 48.0, bottom: f64::from(SIZE.1) - 98.0 };
        let x = Axis::of(self.panels.iter().flat_map(|p| &p.series).flat_map(Series::xs), self.x_spread, 16);
        let gap = 28.0;
        // The first panel is the one that is read first, and twice as high as the others.
        let shares = self.panels.len() as f64 + 1.0;
        let unit = (whole.height() - gap * (self.panels.len() as f64 - 1.0)) / shares;
        let mut top = whole.top;
        for (i, panel) in self.panels.iter().enumerate() {
            let height = if i == 0 { 2.0 * unit } else { unit };
            let area = Area { top, bottom: top + height, ..whole };
            panel.draw(canvas, &area, &x)?;
            if i + 1 == self.panels.len() {
                x.draw_x(canvas, &area, &self.x_name)?;
            } else {
                canvas.line((area.left, area.bottom), (area.right, area.bottom), INK, 1.0)?;
            }
            top += height + gap;
        }
        Ok(())
    }
}

impl LinePlot {
    /// Names of the series, in as many lines as they need; returns where the panels begin.
    fn legend<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Result<f64, String> {
        const LEFT: f64 = 122.0;
        let (mut x, mut y) = (LEFT, 102.0);
        let mut any = false;
        for series in self.panels.iter().flat_map(|panel| &panel.series).filter(|series| !series.name.is_empty()) {
            let width = 34.0 + canvas.width(&series.name, letters(14.0));
            if any && x + width > f64::from(SIZE.0) - 48.0 {
                (x, y) = (LEFT, y + 22.0);
            }
            if !series.line.is_empty() {
                canvas.line((x, y), (x + 26.0, y), series.color, 3.0)?;
            }
            if !series.dots.is_empty() {
                canvas.dot((x + 13.0, y), 5.0, series.color)?;
            }
            canvas.text(&series.name, (x + 34.0, y), letters(14.0))?;
            x += width + 28.0;
            any = true;
        }
        Ok(if any { y + 28.0 } else { 104.0 })
    }
}

impl Panel {
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, area: &Area, x: &Axis) -> Drawn {
        let values = || self.series.iter().flat_map(Series::ys).filter(|value| value.is_finite());
        // An axis that spans less than a tenth of its values makes noise look like a result.
        let calm = values().max_by(f64::total_cmp).filter(|highest| *highest > 0.0).map(|highest| highest * 0.9);
        let y = Axis::linear(values().chain(calm), self.with_zero);
        y.draw_y(canvas, area, &self.y_name)?;
        let place = |(vx, vy): Point| (x.x(area, vx), y.y(area, vy));
        for series in &self.series {
            if series.band.len() > 1 {
                let low = series.band.iter().map(|&(x, low, _)| place((x, low)));
                let high = series.band.iter().rev().map(|&(x, _, high)| place((x, high)));
                canvas.polygon(&low.chain(high).collect::<Vec<_>>(), series.color.mix(0.18))?;
            }
        }
        for series in &self.series {
            let line: Vec<Point> = series.line.iter().map(|&point| place(point)).collect();
            if line.len() > 1 {
                canvas.path(&line, series.color.to_rgba(), 2.5)?;
            }
            // Points show where the model was run; many of them would only thicken the line.
            if line.len() <= 40 {
                for &point in &line {
                    canvas.dot(point, 3.5, series.color)?;
                }
            }
            for &(vx, vy, low, high) in &series.dots {
                if high > low {
                    canvas.line(place((vx, low)), place((vx, high)), series.color, 1.5)?;
                }
                canvas.dot(place((vx, vy)), 6.0, PAPER)?;
                canvas.dot(place((vx, vy)), 5.0, series.color)?;
            }
        }
        for series in &self.series {
            let Some((point, text)) = &series.mark else { continue };
            canvas.ring(place(*point), 7.0, series.color, 3.0)?;
            // Above, where neither the line nor its band can run through it.
            canvas.text(text, (area.left, area.top - 14.0), letters(14.0).bold().color(series.color))?;
        }
        Ok(())
    }
}

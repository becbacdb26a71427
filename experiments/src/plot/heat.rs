//! A heat map over two roles, with its best point marked and a colour bar.

use super::axis::label;
use super::canvas::{Area, Canvas, Drawn, letters};
use super::style::{self, INK, PAPER, QUIET};
use super::{Drawing, Frame, SIZE};
use plotters::prelude::DrawingBackend;
use plotters::style::Color;
use plotters::style::text_anchor::{HPos, VPos};

/// Cells at most that carry their value as text.
const MAX_LABELLED: usize = 320;

/// A value for every pair of two axes; none where nothing was run.
#[derive(Clone, Debug)]
pub struct HeatMap {
    /// Title and so on.
    pub frame: Frame,
    /// Name and unit of the x axis.
    pub x_name: String,
    /// Values along x.
    pub xs: Vec<u32>,
    /// Name and unit of the y axis.
    pub y_name: String,
    /// Values along y, from the bottom.
    pub ys: Vec<u32>,
    /// Name and unit of the value.
    pub value_name: String,
    /// By y, then x. The least is the best.
    pub values: Vec<Vec<Option<f64>>>,
}

impl HeatMap {
    /// The least value; of equal ones the one with the least x, then y.
    fn best(&self) -> Option<(usize, usize, f64)> {
        let cells = self.values.iter().enumerate();
        cells
            .flat_map(|(y, row)| row.iter().enumerate().filter_map(move |(x, value)| value.map(|value| (x, y, value))))
            .min_by(|a, b| a.2.total_cmp(&b.2).then((a.0, a.1).cmp(&(b.0, b.1))))
    }

    /// Least value, and the end of the colours: values far above the best are all equally bad.
    fn range(&self) -> (f64, f64) {
        let mut values: Vec<f64> = self.values.iter().flatten().flatten().copied().collect();
        values.sort_by(f64::total_cmp);
        let low = values.first().copied().unwrap_or(0.0);
        let high = values.last().copied().unwrap_or(1.0);
        let high = high.min(low * 2.0);
        (low, if high > low { high } else { low + low.abs().max(1.0) * 0.01 })
    }
}

impl Drawing for HeatMap {
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Drawn {
        canvas.frame(&self.frame)?;
        let area = Area { left: 122.0, top: 114.0, right: f64::from(SIZE.0) - 150.0, bottom: f64::from(SIZE.1) - 98.0 };
        let (columns, rows) = (self.xs.len().max(1), self.ys.len().max(1));
        let (width, height) = (area.width() / columns as f64, area.height() / rows as f64);
        let cell = |x: usize, y: usize| Area {
            left: area.left + x as f64 * width,
            top: area.bottom - (y + 1) as f64 * height,
            right: area.left + (x + 1) as f64 * width,
            bottom: area.bottom - y as f64 * height,
        };
        let (low, high) = self.range();
        let share = |value: f64| (value - low) / (high - low);
        let labelled = columns * rows <= MAX_LABELLED && width >= 34.0 && height >= 18.0;
        for (y, row) in self.values.iter().enumerate() {
            for (x, value) in row.iter().enumerate() {
                let cell = cell(x, y);
                let Some(value) = value else {
                    canvas.hatch(cell, style::GRID, 8.0, 1.0)?;
                    continue;
                };
                let color = style::heat(share(*value));
                canvas.fill(cell, color.to_rgba())?;
                if labelled {
                    let at = (f64::midpoint(cell.left, cell.right), f64::midpoint(cell.top, cell.bottom));
                    let size = (width / 4.0).min(height * 0.55).clamp(8.0, 14.0);
                    let lettering = letters(size).color(style::contrast(color)).at(HPos::Center, VPos::Center);
                    canvas.text(&short(*value, high), at, lettering)?;
                }
            }
        }
        if let Some((x, y, _)) = self.best() {
            let cell = cell(x, y);
            canvas.outline(cell, PAPER, 6.0)?;
            canvas.outline(cell, INK, 3.0)?;
        }
        self.ticks(canvas, &area, width, height)?;
        self.colour_bar(canvas, &area, low, high)
    }
}

impl HeatMap {
    fn ticks<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, area: &Area, width: f64, height: f64) -> Drawn {
        let stride = (34.0 / width).ceil().max(1.0) as usize;
        for (i, x) in self.xs.iter().enumerate().step_by(stride) {
            let at = (area.left + (i as f64 + 0.5) * width, area.bottom + 10.0);
            canvas.text(&x.to_string(), at, letters(14.0).at(HPos::Center, VPos::Top))?;
        }
        let stride = (18.0 / height).ceil().max(1.0) as usize;
        for (i, y) in self.ys.iter().enumerate().step_by(stride) {
            let at = (area.left - 10.0, area.bottom - (i as f64 + 0.5) * height);
            canvas.text(&y.to_string(), at, letters(14.0).at(HPos::Right, VPos::Center))?;
        }
        let middle = (f64::midpoint(area.left, area.right), area.bottom + 36.0);
        canvas.text(&self.x_name, middle, letters(15.0).at(HPos::Center, VPos::Top))?;
        let middle = (area.left - 72.0, f64::midpoint(area.top, area.bottom));
        canvas.text(&self.y_name, middle, letters(15.0).at(HPos::Center, VPos::Center).upwards())
    }

    fn colour_bar<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, area: &Area, low: f64, high: f64) -> Drawn {
        let bar = Area { left: area.right + 28.0, top: area.top + 26.0, right: area.right + 52.0, bottom: area.bottom };
        let steps = 160;
        for i in 0..steps {
            let (from, to) = (f64::from(i) / f64::from(steps), f64::from(i + 1) / f64::from(steps));
            let slice = Area { top: bar.bottom - to * bar.height(), bottom: bar.bottom - from * bar.height(), ..bar };
            canvas.fill(slice, style::heat(from).to_rgba())?;
        }
        canvas.outline(bar, QUIET, 1.0)?;
        let clipped = self.values.iter().flatten().flatten().any(|&value| value > high);
        for i in 0..=5 {
            let share = f64::from(i) / 5.0;
            let more = if i == 5 && clipped { " +" } else { "" };
            let text = format!("{}{more}", short(low + share * (high - low), high));
            let at = (bar.right + 8.0, bar.bottom - share * bar.height());
            canvas.text(&text, at, letters(13.0))?;
        }
        canvas.text(&self.value_name, (bar.left, area.top + 4.0), letters(14.0))?;
        if let Some((x, y, value)) = self.best() {
            let (x_name, y_name) = (bare(&self.x_name), bare(&self.y_name));
            let unit = self
                .value_name
                .split_once(" [")
                .map_or(String::new(), |(_, unit)| format!(" {}", unit.trim_end_matches(']')));
            let text = format!("best: {value:.2}{unit} at {x_name} {}, {y_name} {}", self.xs[x], self.ys[y]);
            canvas.text(&text, (area.left, area.top - 14.0), letters(14.0).bold())?;
        }
        Ok(())
    }
}

/// The name of an axis without its unit.
fn bare(name: &str) -> &str {
    name.split(" [").next().unwrap_or(name)
}

/// A value with as many digits as its neighbours need to differ.
fn short(value: f64, scale: f64) -> String {
    let decimals = if scale < 10.0 { 2 } else { usize::from(scale < 100.0) };
    label(format!("{value:.decimals$}").parse().unwrap_or(value))
}

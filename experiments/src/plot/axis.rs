//! Axes: ranges, round ticks, and their labels.

use super::canvas::{Area, Canvas, Drawn, letters};
use super::style::{GRID, INK, QUIET};
use plotters::prelude::DrawingBackend;
use plotters::style::text_anchor::{HPos, VPos};

/// How values are spread over an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Evenly.
    Linear,
    /// By their logarithm.
    Log,
}

/// An axis: its range and the values that carry labels.
#[derive(Clone, Debug)]
pub struct Axis {
    spread: Spread,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Axis {
    /// An axis with round ticks that holds all values, and zero if asked.
    pub fn linear(values: impl IntoIterator<Item = f64>, with_zero: bool) -> Self {
        let (low, high) = range(values.into_iter().chain(with_zero.then_some(0.0)));
        let step = round_step((high - low) / 7.0);
        let low = (low / step).floor() * step;
        let high = (high / step).ceil() * step;
        let count = ((high - low) / step).round() as i64;
        let ticks = (0..=count).map(|i| low + i as f64 * step).collect();
        Self { spread: Spread::Linear, low, high, ticks }
    }

    /// An axis whose ticks are the given values; where those are more than `most`, round ones if values are spread evenly,
    /// otherwise as few of them.
    pub fn of(values: impl IntoIterator<Item = f64>, spread: Spread, most: usize) -> Self {
        let mut ticks: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let (low, high) = range(ticks.iter().copied());
        if spread == Spread::Linear && ticks.len() > most {
            let step = round_step((high - low) / most as f64);
            let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
            ticks = (first..=last).map(|i| i as f64 * step).collect();
        }
        let stride = ticks.len().div_ceil(most.max(1)).max(1);
        let ticks = ticks.into_iter().step_by(stride).collect();
        // Half a step of air, so that points do not sit on the frame.
        let air = 0.03;
        let (low, high) = match spread {
            Spread::Linear => (low - (high - low) * air, high + (high - low) * air),
            Spread::Log => (low * (low / high).powf(air), high * (high / low).powf(air)),
        };
        Self { spread, low, high, ticks }
    }

    /// A logarithmic axis from `low` to `high` with ticks at 1, 2 and 5 times powers of ten.
    pub fn logarithmic(low: f64, high: f64) -> Self {
        let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let ticks = powers
            .flat_map(|power| [1.0, 2.0, 5.0].map(|n| n * 10_f64.powi(power)))
            .filter(|tick| (low..=high).contains(tick))
            .collect();
        Self { spread: Spread::Log, low, high, ticks }
    }

    /// The place of a value, 0 at the low end and 1 at the high one.
    pub fn share(&self, value: f64) -> f64 {
        match self.spread {
            Spread::Linear => (value - self.low) / (self.high - self.low),
            Spread::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    /// Horizontal place of a value.
    pub fn x(&self, area: &Area, value: f64) -> f64 {
        area.left + self.share(value) * area.width()
    }

    /// Vertical place of a value.
    pub fn y(&self, area: &Area, value: f64) -> f64 {
        area.bottom - self.share(value) * area.height()
    }

    /// Ticks, labels and name below the area.
    pub fn draw_x<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, area: &Area, name: &str) -> Drawn {
        for &tick in &self.ticks {
            let x = self.x(area, tick);
            canvas.line((x, area.bottom), (x, area.bottom + 5.0), INK, 1.0)?;
            canvas.text(&label(tick), (x, area.bottom + 10.0), letters(14.0).at(HPos::Center, VPos::Top))?;
        }
        canvas.line((area.left, area.bottom), (area.right, area.bottom), INK, 1.0)?;
        let middle = f64::midpoint(area.left, area.right);
        canvas.text(name, (middle, area.bottom + 36.0), letters(15.0).at(HPos::Center, VPos::Top))
    }

    /// Grid lines, labels and name left of the area.
    pub fn draw_y<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, area: &Area, name: &str) -> Drawn {
        for &tick in &self.ticks {
            let y = self.y(area, tick);
            canvas.line((area.left, y), (area.right, y), GRID, 1.0)?;
            let lettering = letters(14.0).color(QUIET).at(HPos::Right, VPos::Center);
            canvas.text(&label(tick), (area.left - 10.0, y), lettering)?;
        }
        let middle = f64::midpoint(area.top, area.bottom);
        let lettering = letters(15.0).at(HPos::Center, VPos::Center).upwards();
        canvas.text(name, (area.left - 72.0, middle), lettering)
    }
}

/// Least and largest value, a little apart if they are equal.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|value| value.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    if low > high {
        return (0.0, 1.0);
    }
    if high - low > high.abs() * 1e-4 {
        return (low, high);
    }
    let apart = if high == 0.0 { 1.0 } else { high.abs() * 0.05 };
    (low - apart, high + apart)
}

/// 1, 2 or 5 times a power of ten, at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|&round| round >= step * 0.999).unwrap_or(10.0 * power)
}

/// A tick's label: no more decimals than needed, thin spaces between thousands.
pub fn label(value: f64) -> String {
    let rounded = (value * 1e6).round() / 1e6;
    let mut text = format!("{}", rounded.abs());
    if let Some(dot) = text.find('.') {
        text.truncate((dot + 5).min(text.len()));
    }
    let whole = text.find('.').unwrap_or(text.len());
    if whole > 4 {
        for place in (1..whole).rev().filter(|place| (whole - place) % 3 == 0) {
            text.insert(place, '\u{2009}');
        }
    }
    if rounded < 0.0 { format!("\u{2212}{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_hold_all_values() {
        let axis = Axis::linear([412.0, 977.0], false);
        assert_eq!(axis.ticks, [400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0]);
        assert_eq!(Axis::linear([3.0], true).ticks.first(), Some(&0.0));
        assert!(Axis::linear([], false).ticks.len() > 1);
    }

    #[test]
    fn many_values_have_round_ticks_and_few_their_own() {
        let many = Axis::of((1..=240).map(|row| f64::from(row) / 2.4), Spread::Linear, 16);
        assert_eq!(many.ticks, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0]);
        let ctas = Axis::of((1..=20).map(f64::from), Spread::Linear, 16);
        assert_eq!(ctas.ticks, [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0]);
        assert_eq!(Axis::of([3.0, 7.0, 64.0], Spread::Linear, 16).ticks, [3.0, 7.0, 64.0]);
        assert_eq!(Axis::of((0..40).map(|i| 2_f64.powi(i)), Spread::Log, 16).ticks.len(), 14);
    }

    #[test]
    fn labels_are_short() {
        assert_eq!(label(0.300_000_000_1), "0.3");
        assert_eq!(label(32_768.0), "32\u{2009}768");
        assert_eq!(label(-8192.0), "\u{2212}8192");
    }
}

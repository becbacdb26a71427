//! The search: parameter by parameter, where the rows that name it are closest, until none moves.

use super::left_out::LeftOut;
use super::{FigureRow, Fitted, Machines, rows_of, set};
use crate::data::FitParameter;
use crate::error::ExperimentError;
use indicatif::ProgressBar;
use rayon::prelude::*;

/// Rounds over all parameters at most.
const ROUNDS: usize = 8;

/// Parts into which a search first divides what lies between the bounds.
const PLACES: usize = 8;

/// A search ends when its interval is this share of the parts beside the least place.
const TOLERANCE: f64 = 4e-3;

/// Digits of a fitted value.
const DIGITS: i32 = 3;

/// Sum of squared logarithms over some rows.
fn loss(rows: &[&FigureRow], machines: &Machines) -> Result<f64, ExperimentError> {
    let errors: Vec<f64> = rows.par_iter().map(|row| row.log_error(machines)).collect::<Result<_, _>>()?;
    Ok(errors.iter().map(|error| error * error).sum())
}

/// Values of all parameters, and the machines with them.
///
/// # Errors
/// [`ExperimentError`] for a row that does not run.
pub fn fit(
    parameters: &[FitParameter],
    base: &Machines,
    rows: &[FigureRow],
    left_out: &LeftOut,
    bar: &ProgressBar,
) -> Result<(Vec<Fitted>, Machines), ExperimentError> {
    let mut machines = base.clone();
    let used: Vec<Vec<&FigureRow>> = parameters.iter().map(|p| rows_of(p, rows, left_out)).collect();
    let mut values: Vec<f64> = parameters.iter().map(|p| p.start).collect();
    for _ in 0..ROUNDS {
        let mut moved = false;
        for (i, parameter) in parameters.iter().enumerate().filter(|(i, _)| !used[*i].is_empty()) {
            let value = rounded(least(parameter, |value| {
                bar.inc(1);
                set(&mut machines, parameter, value);
                loss(&used[i], &machines)
            })?);
            moved |= (value - values[i]).abs() > TOLERANCE * (parameter.high - parameter.low);
            values[i] = value;
            set(&mut machines, parameter, value);
        }
        if !moved {
            break;
        }
    }
    let mut from: Vec<String> = Vec::with_capacity(parameters.len());
    for (i, parameter) in parameters.iter().enumerate() {
        let other = parameters
            .iter()
            .enumerate()
            .find(|(j, other)| other.parameter == parameter.parameter && !used[*j].is_empty());
        from.push(match other {
            _ if !used[i].is_empty() => "rows".into(),
            Some((j, other)) => {
                values[i] = values[j];
                set(&mut machines, parameter, values[i]);
                other.machines.join(" ")
            }
            None => "start".into(),
        });
    }
    let fitted = parameters.iter().enumerate().map(|(i, parameter)| Fitted {
        parameter: parameter.parameter.clone(),
        machines: parameter.machines.join(" "),
        value: values[i],
        low: parameter.low,
        high: parameter.high,
        rows: used[i].len(),
        from: from[i].clone(),
        in_files: f64::NAN,
    });
    Ok((fitted.collect(), machines))
}

/// The place between the bounds where a function is least: golden-section search beside the least of a few places, so
/// that it does not end on the plain where a parameter has stopped to matter.
fn least(
    parameter: &FitParameter,
    mut of: impl FnMut(f64) -> Result<f64, ExperimentError>,
) -> Result<f64, ExperimentError> {
    let place = |i: usize| parameter.low + (parameter.high - parameter.low) * i as f64 / PLACES as f64;
    let (mut best, mut at_best) = (0, f64::INFINITY);
    for i in 0..=PLACES {
        let here = of(place(i))?;
        if here < at_best {
            (best, at_best) = (i, here);
        }
    }
    let ratio = (5_f64.sqrt() - 1.0) / 2.0;
    let (mut low, mut high) = (place(best.saturating_sub(1)), place((best + 1).min(PLACES)));
    let tolerance = TOLERANCE * (high - low);
    let mut left = high - ratio * (high - low);
    let mut right = low + ratio * (high - low);
    let (mut at_left, mut at_right) = (of(left)?, of(right)?);
    while high - low > tolerance {
        if at_left <= at_right {
            (high, right, at_right) = (right, left, at_left);
            left = high - ratio * (high - low);
            at_left = of(left)?;
        } else {
            (low, left, at_left) = (left, right, at_right);
            right = low + ratio * (high - low);
            at_right = of(right)?;
        }
    }
    Ok(f64::midpoint(low, high))
}

/// To the digits of a fitted value.
fn rounded(value: f64) -> f64 {
    if value == 0.0 {
        return 0.0;
    }
    let unit = DIGITS - 1 - value.abs().log10().floor() as i32;
    // Through its decimal text, so that the value is the one that a file holds.
    let scaled = (value * 10_f64.powi(unit)).round();
    format!("{scaled}e{}", -unit).parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_three_digits() {
        for (value, want) in [(0.0, 0.0), (5.804_9, 5.80), (1234.5, 1230.0), (23.06, 23.1), (0.031_25, 0.0313)] {
            assert!((rounded(value) - want).abs() <= 1e-12, "{value}");
        }
    }

    #[test]
    fn the_search_finds_the_bottom_of_a_valley_and_of_a_slope() {
        let parameter =
            FitParameter { parameter: "sm.a".into(), machines: Vec::new(), start: 1.0, low: 0.0, high: 10.0 };
        for (bottom, want) in [(3.3, 3.3), (-5.0, 0.0), (20.0, 10.0)] {
            let found = least(&parameter, |value| Ok((value - bottom).abs())).expect("never fails");
            assert!((found - want).abs() < 0.02, "{bottom}: {found}");
        }
    }

    #[test]
    fn the_search_does_not_end_on_a_plain() {
        // In-switch loads of 2.4 GB/s fit; from 10 on something else binds, and what is left falls by a hair.
        let parameter =
            FitParameter { parameter: "sm.a".into(), machines: Vec::new(), start: 1.0, low: 1.0, high: 30.0 };
        let loss = |value: f64| if value < 5.0 { (value - 2.4).abs() } else { 2.6 - 1e-3 * value };
        let found = least(&parameter, |value| Ok(loss(value))).expect("never fails");
        assert!((found - 2.4).abs() < 0.05, "{found}");
    }
}

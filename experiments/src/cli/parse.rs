//! Parsers of numbers, each with the range that it allows.

use crate::shape;

/// A parser of whole numbers in an inclusive range.
pub fn whole(min: u64, max: u64) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let allowed = || format!("allowed: a whole number from {min} to {max}");
        shape::whole(text).filter(|value| (min..=max).contains(value)).ok_or_else(allowed)
    }
}

/// A parser of a field of a shape.
pub fn size(field: &'static str) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    whole(1, shape::max(field))
}

/// A number in a range.
///
/// # Errors
/// What is allowed.
pub fn number(text: &str, min: f64, max: f64, unit: &str) -> Result<f64, String> {
    // Written as people write numbers: neither "+1" nor "inf" nor " 1".
    let plain = text.starts_with(|c: char| c.is_ascii_digit());
    let value: Option<f64> = text.parse().ok().filter(|value| plain && (min..=max).contains(value));
    value.ok_or_else(|| format!("allowed: a number from {min} to {max}{unit}"))
}

/// Percent.
///
/// # Errors
/// What is allowed.
pub fn percent(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1000.0, " %")
}

/// Seconds.
///
/// # Errors
/// What is allowed.
pub fn seconds(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1e6, " s")
}

/// Microseconds.
///
/// # Errors
/// What is allowed.
pub fn time(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1e12, " us")
}

//! Colours and fonts, the same in every plot.

use plotters::style::{FontStyle, RGBColor, register_font};
use std::sync::Once;

/// Text and axes.
pub const INK: RGBColor = RGBColor(33, 37, 41);
/// Secondary text.
pub const QUIET: RGBColor = RGBColor(108, 117, 125);
/// Grid lines.
pub const GRID: RGBColor = RGBColor(226, 230, 234);
/// Paper.
pub const PAPER: RGBColor = RGBColor(255, 255, 255);

/// Fused kernels.
pub const FUSED: RGBColor = RGBColor(0, 114, 178);
/// Unfused baselines.
pub const UNFUSED: RGBColor = RGBColor(213, 94, 0);
/// Overlap.
pub const OVERLAP: RGBColor = RGBColor(0, 158, 115);

/// Lines of fused kernels when there are several: blues and greens. Colour-blind safe (Okabe and Ito, 2008).
pub const FUSED_SERIES: [RGBColor; 5] =
    [FUSED, RGBColor(86, 180, 233), OVERLAP, RGBColor(27, 60, 110), RGBColor(120, 200, 170)];

/// Lines of unfused baselines when there are several: reds and yellows.
pub const UNFUSED_SERIES: [RGBColor; 5] =
    [UNFUSED, RGBColor(230, 159, 0), RGBColor(204, 121, 167), RGBColor(140, 50, 20), RGBColor(200, 180, 60)];

/// Dots of different kernels.
pub const KERNELS: [RGBColor; 6] =
    [FUSED, UNFUSED, OVERLAP, RGBColor(204, 121, 167), RGBColor(230, 159, 0), RGBColor(90, 90, 90)];

/// Stops of the heat map's colours, from least to largest: even steps in lightness (viridis).
const STOPS: [RGBColor; 9] = [
    RGBColor(253, 231, 37),
    RGBColor(173, 220, 48),
    RGBColor(94, 201, 98),
    RGBColor(40, 174, 128),
    RGBColor(33, 145, 140),
    RGBColor(44, 114, 142),
    RGBColor(59, 82, 139),
    RGBColor(71, 44, 122),
    RGBColor(68, 1, 84),
];

/// The heat map's colour at a share of the range from 0 to 1.
pub fn heat(share: f64) -> RGBColor {
    let place = share.clamp(0.0, 1.0) * (STOPS.len() - 1) as f64;
    let below = (place as usize).min(STOPS.len() - 2);
    let (a, b, part) = (STOPS[below], STOPS[below + 1], place - below as f64);
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * part).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// Black or white, whichever reads better on a colour.
pub fn contrast(RGBColor(r, g, b): RGBColor) -> RGBColor {
    let light = 0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b);
    if light > 140.0 { INK } else { PAPER }
}

/// Makes the embedded fonts known to the drawing library, which finds none by itself.
pub fn register_fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A font that is refused shows up as an error of the first text that is drawn.
        let _ = register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular());
        let _ = register_font("sans-serif", FontStyle::Bold, dejavu::sans::bold());
    });
}

//! Progress on stderr, and a polite end on Ctrl-C.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A bar of `length` steps; silent when stderr is no terminal.
pub fn bar(length: u64, what: &str) -> ProgressBar {
    let bar = if std::io::stderr().is_terminal() {
        ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr_with_hz(5))
    } else {
        ProgressBar::hidden()
    };
    let style = ProgressStyle::with_template("{msg:12} [{bar:40}] {pos}/{len} {elapsed} (ends in {eta})");
    if let Ok(style) = style {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}

/// A bar that nobody sees.
pub fn hidden() -> ProgressBar {
    ProgressBar::hidden()
}

/// A counter without a known end; silent when stderr is no terminal.
pub fn counter(what: &str) -> ProgressBar {
    let bar = if std::io::stderr().is_terminal() {
        ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5))
    } else {
        ProgressBar::hidden()
    };
    if let Ok(style) = ProgressStyle::with_template("{msg:12} {pos} {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}

/// From now on the first Ctrl-C lets work in progress finish; the second ends the program. It reaches all processes of a
/// terminal, of which one `says` so.
pub fn catch_interrupt(says: bool) {
    // Where no handler can be set, Ctrl-C ends the program at once, as it does by default.
    let _ = ctrlc::try_set_handler(move || {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        if !says {
            return;
        }
        eprintln!("\nfinishing the points in progress; press Ctrl-C again to stop at once");
    });
}

/// How many points are done, and how to get the others.
pub fn done(rows: usize, points: usize) -> String {
    let more = if rows < points {
        "; run again to go on where it stopped, with a larger --budget-s if it was that"
    } else {
        ""
    };
    format!("{rows} of {points} points{more}")
}

/// Whether Ctrl-C was pressed.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

//! Progress on stderr, and a polite end on Ctrl-C.

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A bar of `length` steps; silent when stderr is no terminal.
pub fn bar(length: u64, what: &str) -> ProgressBar {
    let bar = if std::io::stderr().is_terminal() {
        ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr_with_hz(5))
    } else {
        ProgressBar::hidden()
    };
    let style = ProgressStyle::with_template("{msg:12} [{bar:40}] {pos}/{len} {elapsed} (ends in {rest})");
    if let Ok(style) = style {
        bar.set_style(style.with_key("rest", rest()).progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    // Seconds pass on the screen while the first step takes its time.
    bar.enable_steady_tick(TICK);
    bar
}

/// How often a bar that makes no progress is drawn.
const TICK: Duration = Duration::from_secs(1);

/// How long the rest takes at the pace of the steps that are done. It is judged when a step ends: a step that takes long says
/// nothing of the pace before it has ended.
fn rest() -> impl Fn(&ProgressState, &mut dyn Write) + Clone + Send + Sync + 'static {
    let last = Arc::new(Mutex::new((0, Duration::ZERO)));
    move |state, out| {
        let Ok(mut last) = last.lock() else { return };
        let (done, elapsed) = (state.pos(), state.elapsed());
        if last.0 != done {
            *last = (done, elapsed);
        }
        let left = state.len().unwrap_or(done).saturating_sub(done) as f64;
        // Nothing is lost with a bar that cannot be drawn.
        let _ = if done == 0 {
            out.write_str("?")
        } else {
            let rest = last.1.mul_f64(left / done as f64).saturating_sub(elapsed.saturating_sub(last.1));
            write!(out, "{:#}", HumanDuration(rest))
        };
    }
}

/// A line about what is to come; silent when stderr is no terminal.
pub fn say(line: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{line}");
    }
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

/// How much of a run was done, when that is not all.
pub fn partial(rows: usize, points: usize) -> Option<String> {
    (rows < points).then(|| format!("{rows} of {points} points"))
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

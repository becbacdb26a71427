//! Points on all threads, their results in order.

use crate::progress;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// Runs every point and hands the results over in the order of the points.
///
/// Threads claim points in order, so that what was handed over does not depend on the number of threads, and after
/// Ctrl-C holds all points up to the last finished one.
///
/// # Errors
/// The first error of `take`; no further point is begun then.
pub fn in_order<P: Sync, R: Send, E>(
    points: &[P],
    run: impl Fn(&P) -> R + Sync,
    mut take: impl FnMut(R) -> Result<(), E>,
) -> Result<(), E> {
    progress::catch_interrupt(true);
    let bar = progress::bar(points.len() as u64, "points");
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        let (next, run) = (&next, &run);
        scope.spawn(move || {
            rayon::broadcast(|_| {
                while !progress::interrupted() {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(point) = points.get(index) else { break };
                    // The receiver is gone only after an error of `take`.
                    if sender.send((index, run(point))).is_err() {
                        break;
                    }
                }
            });
        });
        let mut early: BTreeMap<usize, R> = BTreeMap::new();
        let mut taken = 0;
        for (index, result) in receiver {
            early.insert(index, result);
            while let Some(result) = early.remove(&taken) {
                take(result)?;
                taken += 1;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(())
    })
}

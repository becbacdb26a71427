//! Runs of many splits of one case: their memory, and what splits have in common.
//!
//! A CTA that never takes a task changes nothing: it holds no resource, and what is ready goes to those before it. A run that
//! leaves the last CTAs of a role without a task is therefore also the run of every split that differs from it only in how
//! many such CTAs there are. In a grid of splits that is often most of them.

use super::{Run, Scratch, worker_counts};
use crate::SimError;
use crate::compile::{Compiled, Form};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tilewire_kernels::RoleSplit;

/// A run that left CTAs without a task.
struct Known {
    form: Form,
    /// CTAs of each role.
    ctas: Vec<u32>,
    /// Workers of a CTA of each role.
    per_cta: Vec<u32>,
    run: Run,
}

impl Known {
    fn is_of(&self, form: Form, ctas: &[u32]) -> bool {
        let mut roles = ctas.iter().zip(&self.ctas).zip(&self.run.used);
        form == self.form && roles.all(|((&now, &then), &used)| now == then || (used < then && used <= now))
    }

    /// The run with other CTAs that take no task.
    fn with(&self, ctas: &[u32]) -> Run {
        let mut run = self.run.clone();
        for ((workers, &ctas), &per_cta) in run.workers.iter_mut().zip(ctas).zip(&self.per_cta) {
            if per_cta > 0 {
                *workers = ctas * per_cta;
            }
        }
        run
    }
}

/// Memory of runs for any number of threads: each run takes a [`Scratch`] that is free, or makes one. Belongs to the one
/// [`Compiled`] that it is first used with.
#[derive(Default)]
pub struct Pool {
    free: Mutex<Vec<Scratch>>,
    known: Mutex<Vec<Known>>,
}

/// A panic elsewhere leaves nothing half done behind these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Runs one form of a compiled schedule, or finds that a split before had the same run.
    ///
    /// # Errors
    /// As [`Scratch::run`].
    pub fn run(&self, compiled: &Compiled, split: &RoleSplit, form: Form, timeline: bool) -> Result<Run, SimError> {
        let ctas = worker_counts(compiled, split)?;
        if !timeline && let Some(known) = lock(&self.known).iter().find(|known| known.is_of(form, &ctas)) {
            return Ok(known.with(&ctas));
        }
        let mut scratch = lock(&self.free).pop().unwrap_or_default();
        let run = scratch.run(compiled, split, form, timeline);
        let shared = |run: &&Run| !timeline && run.used.iter().zip(&ctas).any(|(used, ctas)| used < ctas);
        if let Some(run) = run.as_ref().ok().filter(shared).cloned() {
            let per_cta = scratch.per_cta();
            lock(&self.known).push(Known { form, ctas, per_cta, run });
        }
        lock(&self.free).push(scratch);
        run
    }
}

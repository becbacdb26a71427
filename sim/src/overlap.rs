//! Why `overlap` can lie outside 0 to 1.
//!
//! `overlap` compares a run with two reduced ones, and neither of these is a lower bound of it: they start from the same
//! lists, but what they leave out changes who has which CTA and who shares which link at what time. A number below 0 or
//! above 1 is therefore possible, and never shown without the reason.

use crate::compile::{Compiled, NONE, Program};
use crate::engine::Run;
use serde::Serialize;
use std::fmt;
use tilewire_kernels::RoleKind;

/// Why `overlap` lies outside 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OverlapReason {
    /// Below 0: `compute_only` has the help of CTAs that communication holds in the whole run.
    HelpHeld,
    /// Below 0: the whole run takes longer than both parts one after the other.
    PartsHinder,
    /// Above 1: the whole run is faster than its compute role alone.
    ComputeAloneSlower,
    /// Above 1: the whole run is faster than its communication alone.
    CommAloneSlower,
}

impl OverlapReason {
    /// Name in CSV and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HelpHeld => "help_held",
            Self::PartsHinder => "parts_hinder",
            Self::ComputeAloneSlower => "compute_alone_slower",
            Self::CommAloneSlower => "comm_alone_slower",
        }
    }

    /// The reason for a run that takes `time`, and whose parts alone take `compute` and `comm`; `None` where `overlap` is
    /// within 0 to 1.
    pub(crate) fn of(compiled: &Compiled, whole: &Run, [time, compute, comm]: [u64; 3]) -> Option<Self> {
        if time > compute.saturating_add(comm) {
            let helped = compiled.programs.iter().any(|program| helpers(program, &whole.workers));
            Some(if helped { Self::HelpHeld } else { Self::PartsHinder })
        } else if time < compute.max(comm) {
            Some(if compute > comm { Self::ComputeAloneSlower } else { Self::CommAloneSlower })
        } else {
            None
        }
    }
}

impl fmt::Display for OverlapReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HelpHeld => {
                "overlap below 0: CTAs of communication that recycle into compute help compute_only from its start; in the \
                 whole run communication holds them longer than its own transfers take"
            }
            Self::PartsHinder => {
                "overlap below 0: the whole run takes longer than both parts one after the other; they slow each other down \
                 on shared resources or wait for each other in turns"
            }
            Self::ComputeAloneSlower => {
                "overlap above 1: compute_only is slower than the whole run; its CTAs start together and meet each other's \
                 stores and the power limit in step"
            }
            Self::CommAloneSlower => {
                "overlap above 1: comm_only is slower than the whole run; without arithmetic the same transfers come \
                 earlier and in another order, and share links and CTAs worse"
            }
        })
    }
}

/// Whether CTAs that do not start in the compute role may come to it.
fn helpers(program: &Program, workers: &[u32]) -> bool {
    let reaches_compute = |mut role: usize| {
        // A chain of recycling visits every role once at most.
        for _ in 0..program.roles.len() {
            let next = program.roles[role].recycle;
            if next == NONE {
                return false;
            }
            role = next as usize;
            if program.roles[role].kind == RoleKind::Compute {
                return true;
            }
        }
        false
    };
    (0..program.roles.len())
        .any(|role| program.roles[role].kind != RoleKind::Compute && workers[role] > 0 && reaches_compute(role))
}

//! From the units of machine files to picoseconds and bytes per second.

use tilewire_kernels::schedule::MainLoop;

pub(super) const PS_PER_S: f64 = 1e12;

pub(super) fn ps_from_us(us: f64) -> u64 {
    (us * 1e6).round() as u64
}

pub(super) fn ps_from_ns(ns: f64) -> u64 {
    (ns * 1e3).round() as u64
}

pub(super) fn rate(gbs: f64) -> u64 {
    (gbs * 1e9).round() as u64
}

/// Time to move `bytes` at `rate` bytes/s, rounded up.
pub(super) fn transfer(bytes: u64, rate: u64) -> u64 {
    (u128::from(bytes) * 1_000_000_000_000).div_ceil(u128::from(rate.max(1))) as u64
}

/// `bytes` spread evenly over `work` picoseconds, in bytes/s, rounded to nearest.
pub(super) fn spread(bytes: u64, work: u64) -> u64 {
    if work == 0 {
        return 0;
    }
    ((u128::from(bytes) * 1_000_000_000_000 + u128::from(work / 2)) / u128::from(work)) as u64
}

/// The section of a machine file that describes a main loop.
pub(super) const fn loop_name(main_loop: MainLoop) -> &'static str {
    match main_loop {
        MainLoop::WaitEachStep => "wait_each_step",
        MainLoop::Pipelined => "pipelined",
        MainLoop::Library => "library",
    }
}

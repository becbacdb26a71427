// Bounds every launch: one otherwise idle thread of each CTA traps when the CTA takes too long.
// A hung launch would take a shared card from others; a trap only ends this process.
#pragma once
#include "mbarrier.cuh"

// `finished` is an mbarrier, completed when the CTA's roles are done: who sleeps instead ends the launch late.
DEVICE void watchdog_run(u32 finished) {
  const u64 begin = clock_cycles();
  while (!mbarrier_try_wait(finished, 0)) {
    if (clock_cycles() - begin > kWatchdogCycles) __trap();
  }
}

DEVICE void watchdog_finish(u32 finished) { mbarrier_arrive(finished); }
DEVICE void watchdog_init(u32 finished) { mbarrier_init(finished, 1); }

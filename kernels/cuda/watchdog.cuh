// Bounds every launch: one otherwise idle thread of each CTA traps when the CTA takes too long.
// A hung launch would take a shared card from others; a trap only ends this process.
#pragma once
#include "base.cuh"

// `finished` is a word in shared memory, cleared before the CTA's roles begin.
DEVICE void watchdog_run(u32 finished) {
  const u64 begin = clock_cycles();
  for (;;) {
    u32 v;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(finished) : "memory");
    if (v != 0) return;
    if (clock_cycles() - begin > kWatchdogCycles) __trap();
    __nanosleep(2000);
  }
}

DEVICE void watchdog_finish(u32 finished) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(finished), "r"(1) : "memory");
}

DEVICE void watchdog_clear(u32 finished) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(finished), "r"(0) : "memory");
}

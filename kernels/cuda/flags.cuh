// Flags in device memory: monotonic u32 counters, raised with release and awaited with acquire.
// System scope where the raiser and the waiter are different GPUs, GPU scope elsewhere.
#pragma once
#include "base.cuh"

DEVICE u32 flag_read_acquire(const u32* flag) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}

DEVICE u32 flag_read_acquire_system(const u32* flag) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}

DEVICE void flag_add_release_system(u32* flag, u32 add) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(flag), "r"(add) : "memory");
}

DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Behind a fence.
DEVICE void flag_add_relaxed(u32* flag, u32 add) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(add) : "memory");
}
DEVICE void flag_add_relaxed_system(u32* flag, u32 add) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(flag), "r"(add) : "memory");
}

DEVICE void flag_store_release(u32* flag, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

DEVICE void flag_add_release(u32* flag, u32 add) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(add) : "memory");
}

DEVICE void flag_wait_at_least(const u32* flag, u32 level) {
  if (flag_read_acquire(flag) >= level) return;
  const u64 begin = clock_cycles();
  while (flag_read_acquire(flag) < level) {
    if (clock_cycles() - begin > kWatchdogCycles) __trap();
  }
}

// All CTAs of the launch meet; `word` counts arrivals and never falls, so `round` starts at 1.
DEVICE void grid_barrier(u32* word, u32 ctas, u32 round) {
  __syncthreads();
  if (threadIdx.x == 0) {
    flag_add_release(word, 1);
    flag_wait_at_least(word, ctas * round);
  }
  __syncthreads();
}

// Small kernels that each read one time off the card, by the operations that the interpreter uses. Every loop is bounded.
//
// A probe's first thread leaves its time in `ns`, in nanoseconds.
#include "flags.cuh"

// Two blocks raise each other's flag by turns.
extern "C" __global__ void __launch_bounds__(32) probe_flags(u32* words, u32 rounds, u64* ns) {
  if (threadIdx.x != 0) return;
  u32* const mine = words + blockIdx.x * 64;
  u32* const other = words + (blockIdx.x ^ 1) * 64;
  const u64 begin = globaltimer_ns();
  for (u32 r = 1; r <= rounds; ++r) {
    if (blockIdx.x == 1) flag_wait_at_least(mine, r);
    fence_gpu();
    flag_add_relaxed(other, 1);
    if (blockIdx.x == 0) flag_wait_at_least(mine, r);
  }
  if (blockIdx.x == 0) *ns = globaltimer_ns() - begin;
}

// A word of host memory that a host thread answers by another.
extern "C" __global__ void __launch_bounds__(32) probe_host(u32* asked, const u32* answered, u32 rounds, u64* ns) {
  if (threadIdx.x != 0) return;
  const u64 start = clock_cycles(), begin = globaltimer_ns();
  for (u32 r = 1; r <= rounds; ++r) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(asked), "r"(r) : "memory");
    while (flag_read_acquire_system(answered) < r) {
      if (clock_cycles() - start > kWatchdogCycles) __trap();
    }
  }
  *ns = globaltimer_ns() - begin;
}

// Commands into a FIFO in host memory, as a CTA pushes puts.
extern "C" __global__ void __launch_bounds__(32) probe_fifo(u32* head, u64* fifo, u32 count, u64* ns) {
  if (threadIdx.x != 0) return;
  const u64 begin = globaltimer_ns();
  for (u32 i = 0; i < count; ++i) {
    const u32 slot = atomicAdd(head, 1u);
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(fifo + slot), "l"(u64(i + 1)) : "memory");
  }
  *ns = globaltimer_ns() - begin;
}

extern "C" __global__ void __launch_bounds__(384, 1) probe_barrier(u32* word, u32 rounds, u64* ns) {
  const u64 begin = globaltimer_ns();
  for (u32 r = 1; r <= rounds; ++r) grid_barrier(word, gridDim.x, r);
  if (blockIdx.x == 0 && threadIdx.x == 0) *ns = globaltimer_ns() - begin;
}

// Begin and end of every block: what lies between two launches is their gap.
extern "C" __global__ void __launch_bounds__(384, 1) probe_launch(u64* begins, u64* ends) {
  if (threadIdx.x != 0) return;
  begins[blockIdx.x] = globaltimer_ns();
  ends[blockIdx.x] = globaltimer_ns();
}

// mbarriers in shared memory, addressed by their 32-bit shared address.
#pragma once
#include "base.cuh"

DEVICE void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other CTAs of a cluster.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives on the barrier at the same shared address in CTA `cta` of the cluster. With the default (CTA) scope:
// it says only that this thread's wgmma reads are over, and a cluster-scope release would cost a GPU-wide
// memory barrier on every k step (seen in the SASS).
DEVICE void mbarrier_arrive_cluster(u32 bar, u32 cta) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
      "r"(cta)
      : "memory");
}

DEVICE void mbarrier_arrive_expect_bytes(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

DEVICE bool mbarrier_try_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// Asks without waiting (try_wait may sleep for microseconds before it says no).
DEVICE bool mbarrier_test(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// Unbounded: a launch that uses it keeps a watchdog thread (watchdog.cuh). A trap on this path would make
// ptxas give up the registers that setmaxnreg granted (seen with 13.0: it then spills at the launch's cap).
DEVICE void mbarrier_wait(u32 bar, u32 parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

// Traps by itself; for code that has registers to spare and no watchdog thread.
DEVICE void mbarrier_wait_bounded(u32 bar, u32 parity) {
  if (mbarrier_try_wait(bar, parity)) return;
  const u64 begin = clock_cycles();
  while (!mbarrier_try_wait(bar, parity)) {
    if (clock_cycles() - begin > kWatchdogCycles) __trap();
  }
}

DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

DEVICE u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// Barrier among `threads` threads of the CTA that name the same id (1..15).
DEVICE void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Whether `mine` holds in all `threads` threads that name this barrier id: the same answer in each of them.
DEVICE bool named_barrier_all(u32 id, u32 threads, bool mine) {
  u32 all;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.and.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(u32(mine)), "r"(id), "r"(threads)
      : "memory");
  return all != 0;
}

// A position in a ring of barriers: the slot, and the parity that a waiter passes.
struct RingPosition {
  u32 slot = 0;
  u32 parity = 0;
  template <u32 Slots>
  DEVICE void advance() {
    if (++slot == Slots) {
      slot = 0;
      parity ^= 1u;
    }
  }
};

// The same in one register, for code that is short of them.
template <u32 Slots>
struct PackedRing {
  u32 at = 0;  // 0 .. 2 * Slots - 1
  DEVICE u32 slot() const { return at % Slots; }
  DEVICE u32 parity() const { return at / Slots; }
  DEVICE u32 previous() const { return (at + Slots - 1) % Slots; }
  DEVICE void advance() { at = (at + 1) % (2 * Slots); }
};

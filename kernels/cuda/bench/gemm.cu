// The bench's GEMM kernels: one entry per main-loop variant, drain rule and cluster size.
// Blocks below `compute_ctas` compute, the others copy until the computing ones are done.
#include "copy.cuh"
#include "gemm_tile.cuh"

struct CtaStats {
  u64 begin_ns, end_ns, cycles, bytes;
};

struct CopyWork {
  const u8* src;
  u8* dst;
  u64 region_bytes;  // per copying CTA; walked round and round
  u32* done;         // raised once by each computing CTA
  u32* ping;         // if set, two idle CTAs play ping-pong on words 0 and 32 instead of copying
};

constexpr u32 kCopySlots = 12, kCopyChunk = 16384, kCopyStoresPending = 4;

// One-way latency of a flag while other CTAs compute: `bytes` counts round trips.
DEVICE void ping_until_done(const CopyWork& w, u32 index, u32 computing, CtaStats* stats) {
  if (threadIdx.x != 0 || index > 1) return;
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  u32 round = 0;
  u32* mine = w.ping + 32 * index;
  u32* other = w.ping + 32 * (index ^ 1);
  for (bool more = true; more; ) {
    ++round;
    if (index == 0) {
      // player 0 decides when to stop and says so by the value it sends
      more = round % 64 != 0 || (flag_read_acquire(w.done) < computing && clock_cycles() - c0 < kWatchdogCycles / 4);
      flag_store_release(other, more ? round : 0x80000000u + round);
      flag_wait_at_least(mine, round);
    } else {
      u32 v;
      while ((v = flag_read_acquire(mine)) < round) {
        if (clock_cycles() - c0 > kWatchdogCycles / 2) __trap();
      }
      more = v < 0x80000000u;
      flag_store_release(other, round);
    }
  }
  *stats = {begin, globaltimer_ns(), clock_cycles() - c0, round};
}

DEVICE void copy_until_done(u32 smem, const CopyWork& w, u32 index, u32 computing, CtaStats* stats) {
  const u32 bars = smem + kCopySlots * kCopyChunk;
  volatile u32* stop = reinterpret_cast<volatile u32*>(dynamic_smem + kCopySlots * kCopyChunk + kCopySlots * 8);
  if (threadIdx.x == 0) {
    *stop = 0;
    for (u32 s = 0; s < kCopySlots; ++s) mbarrier_init(bars + s * 8, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const u64 begin = globaltimer_ns();
    const u64 c0 = clock_cycles();
    const u64 bytes = copy_pipelined<kCopySlots, kCopyStoresPending>(smem, bars, kCopyChunk, w.src + index * w.region_bytes,
                                                                    w.dst + index * w.region_bytes, ~0ull, w.region_bytes, stop);
    *stats = {begin, globaltimer_ns(), clock_cycles() - c0, bytes};
  } else if (threadIdx.x == 32) {
    // the polling thread is not the copying one: a flag read costs about half a microsecond
    const u64 begin = globaltimer_ns();
    if (computing == 0) {
      while (globaltimer_ns() - begin < 3000000) __nanosleep(200);  // alone: copy for 3 ms
    }
    while (flag_read_acquire(w.done) < computing && globaltimer_ns() - begin < kWatchdogCycles / 4) __nanosleep(200);
    *stop = 1;
  }
}

template <class Tile, u32 Cluster>
DEVICE void gemm_body(const TensorMap& a, const TensorMap& b, const TensorMap& c, const GemmProblem& p, const CopyWork& w,
                      CtaStats* stats) {
  const u32 smem = smem_address(dynamic_smem);
  if (Cluster == 1 && blockIdx.x >= p.compute_ctas) {
    if (w.ping != nullptr) {
      ping_until_done(w, blockIdx.x - p.compute_ctas, p.compute_ctas, stats + blockIdx.x);
    } else {
      copy_until_done(smem, w, blockIdx.x - p.compute_ctas, p.compute_ctas, stats + blockIdx.x);
    }
    return;
  }
  const u32 rank = Cluster == 1 ? 0 : cluster_rank();
  const u32 first = blockIdx.x / Cluster;
  const u32 stride = p.compute_ctas / Cluster;
  const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    if (smem & 1023u) __trap();  // the swizzle pattern repeats every 1,024 bytes
    Tile::init_barriers(smem);
  }
  __syncthreads();
  if constexpr (Cluster > 1) cluster_sync();
  // Nothing may follow this if/else: code after the roles join again makes ptxas keep to the launch's register
  // cap in the consumers too. Each role therefore ends the CTA by itself.
  if (group < kConsumers) {
    registers_increase<232>();
    Tile::multiply(smem, p, first, stride, group);
    if constexpr (Cluster > 1) {
      __syncwarp();  // a warp that arrives in parts counts more than once
      cluster_sync();
    }
  } else {
    registers_decrease<40>();
    const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
    if (lane_id() == 0) {
      if (warp == 0) {
        tma_prefetch_map(&a);
        tma_prefetch_map(&b);
        Tile::load(smem, &a, &b, p, first, stride, rank);
      } else if (warp <= kConsumers) {
        const u64 begin = globaltimer_ns();
        const u64 c0 = clock_cycles();
        tma_prefetch_map(&c);
        Tile::store(smem, &c, p, first, stride, rank, warp - 1);
        if (warp == 1) {
          stats[blockIdx.x] = {begin, globaltimer_ns(), clock_cycles() - c0, 0};
          if (w.done != nullptr) flag_add_release(w.done, 1);
          watchdog_finish(smem + Tile::kFinished);
        }
      } else {
        watchdog_run(smem + Tile::kFinished);
      }
    }
    // A CTA must not end while its peer may still arrive on its barriers.
    if constexpr (Cluster > 1) {
      __syncwarp();
      cluster_sync();
    }
  }
}

#define GEMM_KERNEL(NAME, ATTRIBUTE, CLUSTER, ...)                                                                 \
  extern "C" __global__ void ATTRIBUTE __launch_bounds__(kGemmThreads, 1)                                            \
      NAME(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap c, \
           const __grid_constant__ GemmProblem p, const __grid_constant__ CopyWork w, CtaStats* stats) {              \
    gemm_body<GemmTile<__VA_ARGS__>, CLUSTER>(a, b, c, p, w, stats);                                                 \
  }
#define PAIR __cluster_dims__(2, 1, 1)

// name: loop (w, p), drain (d, o, s, v; o3: three stages), cluster (c2), B layout (nk)
GEMM_KERNEL(gemm_w_o, , 1, false, Drain::Overlap, 1, 4, 2, true)
GEMM_KERNEL(gemm_p_o, , 1, true, Drain::Overlap, 1, 4, 2, true)
GEMM_KERNEL(gemm_w_s, , 1, false, Drain::SmemRead, 1, 4, 4, true)
GEMM_KERNEL(gemm_p_s, , 1, true, Drain::SmemRead, 1, 4, 4, true)
GEMM_KERNEL(gemm_w_v, , 1, false, Drain::Visible, 1, 4, 4, true)
GEMM_KERNEL(gemm_p_v, , 1, true, Drain::Visible, 1, 4, 4, true)
GEMM_KERNEL(gemm_w_d, , 1, false, Drain::Deferred, 1, 4, 2, true)
GEMM_KERNEL(gemm_p_d, , 1, true, Drain::Deferred, 1, 4, 2, true)
GEMM_KERNEL(gemm_w_d_add, , 1, false, Drain::Deferred, 1, 4, 2, true, true)
GEMM_KERNEL(gemm_w_s_add, , 1, false, Drain::SmemRead, 1, 4, 4, true, true)
GEMM_KERNEL(gemm_w_o3, , 1, false, Drain::Overlap, 1, 3, 4, true)
GEMM_KERNEL(gemm_p_o3, , 1, true, Drain::Overlap, 1, 3, 4, true)
GEMM_KERNEL(gemm_p_o_nk, , 1, true, Drain::Overlap, 1, 4, 2, false)
GEMM_KERNEL(gemm_w_o_c2, PAIR, 2, false, Drain::Overlap, 2, 4, 2, true)
GEMM_KERNEL(gemm_p_d_c2, PAIR, 2, true, Drain::Deferred, 2, 4, 2, true)
GEMM_KERNEL(gemm_w_d_c2, PAIR, 2, false, Drain::Deferred, 2, 4, 2, true)
GEMM_KERNEL(gemm_p_o_c2, PAIR, 2, true, Drain::Overlap, 2, 4, 2, true)
GEMM_KERNEL(gemm_p_o3_c2, PAIR, 2, true, Drain::Overlap, 2, 3, 4, true)

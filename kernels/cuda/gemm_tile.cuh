// One CTA's part of C = A B, bf16 with f32 accumulation: 128 x 256 tiles, steps of 64 in k.
//
// Three warpgroups. Two consumers own 64 rows each and run wgmma m64n256k16. The third holds one loader
// thread (operands, by tensor map, into a ring of stages) and one storer thread per consumer, so that
// consumers never wait for a store's completion and the storer can raise a flag once it is visible.
#pragma once
#include "base.cuh"
#include "flags.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "watchdog.cuh"
#include "wgmma.cuh"

constexpr u32 kTileM = 128;
constexpr u32 kTileN = 256;
constexpr u32 kTileK = 64;
constexpr u32 kConsumers = 2;
constexpr u32 kGemmThreads = 384;
constexpr u32 kABytes = kTileM * kTileK * 2;
constexpr u32 kBBytes = kTileN * kTileK * 2;
constexpr u32 kStageBytes = kABytes + kBBytes;
constexpr u32 kChunkColumns = 64;  // columns of C per store: 64 rows x 64 columns, one swizzled box
constexpr u32 kChunkBytes = 64 * kChunkColumns * 2;
constexpr u32 kChunksPerTile = kTileN / kChunkColumns;

// What must be over before the next tile's first operand load.
enum class Drain {
  Deferred,  // nothing, and the output leaves the registers (as bf16) during the next tile's first k steps
  Overlap,   // nothing: output staging has its own memory
  SmemRead,  // the stores have read the staging, which lies over the input stages
  Visible,   // the stores are visible in global memory
};

struct GemmProblem {
  u32 m_tiles;       // in units of kTileM x cluster size
  u32 n_tiles;
  u32 k_steps;
  u32 group_m;       // tiles are walked down group_m rows before the next column: the operands of
                     // the tiles in flight then stay in L2
  u32 tiles;         // how many tiles of that order are computed
  u32 compute_ctas;  // CTAs with a lower block index compute, the others copy
  u32 gate_steps;    // one k_step flag for so many k steps; 0: none
  const u32* gates;  // [m tile][flag], each awaited to reach 1
  u32* chain;        // if set, tile t waits for chain[t] to reach kConsumers, which the stores of the CTA's tile before raise
};

struct TileAt {
  u32 m, n;
};

DEVICE TileAt tile_at(const GemmProblem& p, u32 index) {
  const u32 per_group = p.group_m * p.n_tiles;
  const u32 group = index / per_group;
  const u32 within = index - group * per_group;
  const u32 first = group * p.group_m;
  const u32 rows = min(p.m_tiles - first, p.group_m);
  const u32 n = within / rows;
  return {first + within - n * rows, n};
}

// LoopPipelined keeps one wgmma group in flight over the k step; otherwise each step is waited for.
// StoreBuffers counts chunk buffers per consumer. BIsKN: B is stored [K, N], else [N, K]. Adds: the output is
// added to what C holds.
template <bool LoopPipelined, Drain DrainRule, u32 Cluster, u32 Stages, u32 StoreBuffers, bool BIsKN, bool Adds = false>
struct GemmTile {
  static constexpr bool kAliased = DrainRule == Drain::SmemRead || DrainRule == Drain::Visible;
  static constexpr bool kDeferred = DrainRule == Drain::Deferred;
  static_assert(!kAliased || StoreBuffers == kChunksPerTile, "an aliased output is written whole");
  static_assert(kChunksPerTile % StoreBuffers == 0, "a tile's first chunk takes buffer 0");
  static constexpr u32 kStagingOffset = kAliased ? 0 : Stages * kStageBytes;
  static constexpr u32 kBarrierOffset =
      Stages * kStageBytes + (kAliased ? 0 : kConsumers * StoreBuffers * kChunkBytes);
  static constexpr u32 kFull = kBarrierOffset;
  static constexpr u32 kEmpty = kFull + Stages * 8;
  static constexpr u32 kReady = kEmpty + Stages * 8;
  static constexpr u32 kFree = kReady + kConsumers * StoreBuffers * 8;
  static constexpr u32 kDrained = kFree + kConsumers * StoreBuffers * 8;
  static constexpr u32 kFinished = kDrained + 8;  // the watchdog's barrier
  static constexpr u32 kSmemBytes = kFinished + 8;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");

  static DEVICE void init_barriers(u32 smem) {
    for (u32 s = 0; s < Stages; ++s) {
      mbarrier_init(smem + kFull + s * 8, 1);
      mbarrier_init(smem + kEmpty + s * 8, kConsumers * 4 * Cluster);  // one arrival per consumer warp
    }
    for (u32 i = 0; i < kConsumers * StoreBuffers; ++i) {
      mbarrier_init(smem + kReady + i * 8, 4);  // one arrival per warp
      mbarrier_init(smem + kFree + i * 8, 1);
    }
    mbarrier_init(smem + kDrained, kConsumers);
    watchdog_init(smem + kFinished);
    mbarrier_init_fence();
  }

  // The loader thread.
  static DEVICE void load(u32 smem, const TensorMap* a, const TensorMap* b, const GemmProblem& p, u32 first, u32 stride,
                          u32 rank) {
    RingPosition at;
    u32 done = 0;
    for (u32 t = first; t < p.tiles; t += stride, ++done) {
      const TileAt tile = tile_at(p, t);
      const u32 row = (tile.m * Cluster + rank) * kTileM;
      if (kAliased && done > 0) mbarrier_wait(smem + kDrained, (done - 1) & 1);
      if (p.chain != nullptr && done > 0) {
        flag_wait_at_least(p.chain + t, kConsumers);
        fence_global_to_async();
      }
      for (u32 k = 0; k < p.k_steps; ++k) {
        const u32 full = smem + kFull + at.slot * 8;
        const u32 stage = smem + at.slot * kStageBytes;
        const u32 empty = smem + kEmpty + at.slot * 8;
        if (p.gate_steps != 0 && k % p.gate_steps == 0) {
          flag_wait_at_least(p.gates + tile.m * (p.k_steps / p.gate_steps) + k / p.gate_steps, 1);
          fence_global_to_async();
        }
        if constexpr (Cluster == 1) {
          mbarrier_wait(empty, at.parity ^ 1);
          mbarrier_arrive_expect_bytes(full, kStageBytes);
          tma_load(stage, a, full, row, k);
          if constexpr (BIsKN) {
            tma_load(stage + kABytes, b, full, k * kTileK, tile.n * (kTileN / 64));
          } else {
            tma_load(stage + kABytes, b, full, tile.n * kTileN, k);
          }
        } else {
          // Each CTA fetches its share of B and delivers it to all: B is read from L2 once per cluster.
          // The slot must be free in every CTA that the multicast writes to.
          mbarrier_wait(empty, at.parity ^ 1);
          mbarrier_arrive_expect_bytes(full, kStageBytes);
          tma_load(stage, a, full, row, k);
          constexpr u16 kAll = (1u << Cluster) - 1;
          const u32 share = stage + kABytes + rank * (kBBytes / Cluster);
          if constexpr (BIsKN) {
            tma_load_multicast(share, b, full, k * kTileK, tile.n * (kTileN / 64) + rank * (kTileN / 64 / Cluster), kAll);
          } else {
            tma_load_multicast(share, b, full, tile.n * kTileN + rank * (kTileN / Cluster), k, kAll);
          }
        }
        at.advance<Stages>();
      }
    }
  }

  static DEVICE void release(u32 smem, u32 slot) {
    // Per warp, not per warpgroup: a warp knows only that its own share of a wgmma is over.
    if constexpr (Cluster == 1) {
      if (lane_id() == 0) mbarrier_arrive(smem + kEmpty + slot * 8);
    } else {
      if (lane_id() < Cluster) mbarrier_arrive_cluster(smem + kEmpty + slot * 8, lane_id());
    }
  }

  // Where one consumer thread is in its work.
  struct Consumer {
    u32 index;             // 0 or 1: rows 0..63 or 64..127 of the tile
    u64 a_base, b_base;    // operand descriptors of stage 0
    PackedRing<Stages> at;  // next stage
    u32 store_parity = 0;
  };

  // Issues one k step's products; the stage's operands have landed.
  static DEVICE void issue_step(Consumer& me, float (&acc)[128], bool accumulate_first) {
    constexpr u32 kAStep = 32 >> 4;
    constexpr u32 kBStep = (BIsKN ? 16 * 128 : 32) >> 4;
    const u64 a = me.a_base + me.at.slot() * (kStageBytes >> 4);
    const u64 b = me.b_base + me.at.slot() * (kStageBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < kTileK / 16; ++i) {
      wgmma_m64n256k16<BIsKN>(acc, a + i * kAStep, b + i * kBStep, i != 0 || accumulate_first);
    }
    wgmma_commit();
  }

  // Gives back the stage whose products are over.
  static DEVICE void finish_step(u32 smem, Consumer& me, bool first_step) {
    if constexpr (LoopPipelined) {
      wgmma_wait<1>();
      if (!first_step) release(smem, me.at.previous());
    } else {
      wgmma_wait<0>();
      release(smem, me.at.slot());
    }
    me.at.advance();
  }

  static DEVICE void finish_tile(u32 smem, const Consumer& me) {
    if constexpr (LoopPipelined) {
      wgmma_wait<0>();
      release(smem, me.at.previous());
    }
  }

  static DEVICE Consumer make_consumer(u32 smem, u32 index) {
    Consumer me;
    me.index = index;
    me.a_base = descriptor_k_major(smem + index * (64 * kTileK * 2));
    me.b_base = BIsKN ? descriptor_mn_major(smem + kABytes, kTileK * 128) : descriptor_k_major(smem + kABytes);
    return me;
  }

  // One consumer warpgroup.
  static DEVICE void multiply(u32 smem, const GemmProblem& p, u32 first, u32 stride, u32 consumer) {
    if constexpr (kDeferred) {
      multiply_deferred(smem, p, first, stride, consumer);
    } else {
      float acc[128];
      u32 packed[64];
      Consumer me = make_consumer(smem, consumer);
      for (u32 t = first; t < p.tiles; t += stride) {
        for (u32 k = 0; k < p.k_steps; ++k) {
          mbarrier_wait(smem + kFull + me.at.slot() * 8, me.at.parity());
          issue_step(me, acc, k != 0);
          finish_step(smem, me, k == 0);
        }
        finish_tile(smem, me);
        // Staging over the input stages: the other consumer must be done reading them too.
        if constexpr (kAliased) named_barrier_sync(1, kConsumers * 128);
        pack_output(acc, packed);
#pragma unroll
        for (u32 c = 0; c < kChunksPerTile; ++c) stage_chunk(smem, me, packed, c);
      }
    }
  }

  // The accumulators are packed to 64 registers at a tile's end, and chunk c goes to staging after step c of
  // the next tile was issued: the tensor cores wait only for the packing. The staged chunks are let go at
  // once whenever the next tile's operands are not there, because those may depend on this tile's output.
  static DEVICE void multiply_deferred(u32 smem, const GemmProblem& p, u32 first, u32 stride, u32 consumer) {
    float acc[128];
    u32 packed[64];
    bool pending = false;
    Consumer me = make_consumer(smem, consumer);
    for (u32 t = first; t < p.tiles; t += stride) {
      u32 k = 0;
#pragma unroll
      for (u32 c = 0; c < kChunksPerTile; ++c) {
        if (c < p.k_steps) {
          const u32 full = smem + kFull + me.at.slot() * 8;
          if (pending) {
            // All four warps must decide alike: one that stages while another waits at the wgmma would wait
            // for a buffer that only the other's chunk can free.
            if (!named_barrier_all(2 + me.index, 128, mbarrier_test(full, me.at.parity()))) {
#pragma unroll
              for (u32 rest = c; rest < kChunksPerTile; ++rest) stage_chunk(smem, me, packed, rest);
              pending = false;
            }
          }
          mbarrier_wait(full, me.at.parity());
          issue_step(me, acc, c != 0);
          if (pending) stage_chunk(smem, me, packed, c);
          finish_step(smem, me, c == 0);
          ++k;
        } else if (pending) {
          stage_chunk(smem, me, packed, c);
        }
      }
      for (; k < p.k_steps; ++k) {
        mbarrier_wait(smem + kFull + me.at.slot() * 8, me.at.parity());
        issue_step(me, acc, true);
        finish_step(smem, me, false);
      }
      finish_tile(smem, me);
      pack_output(acc, packed);
      pending = true;
    }
    if (pending) {
#pragma unroll
      for (u32 c = 0; c < kChunksPerTile; ++c) stage_chunk(smem, me, packed, c);
    }
  }

  static DEVICE void pack_output(const float (&acc)[128], u32 (&packed)[64]) {
#pragma unroll
    for (u32 i = 0; i < 64; ++i) packed[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
  }

  // Writes 64 rows x 64 columns to a staging buffer and hands it to the storer.
  static DEVICE void stage_chunk(u32 smem, Consumer& me, const u32 (&packed)[64], u32 c) {
    const u32 buffer = c % StoreBuffers;
    const u32 index = me.index * StoreBuffers + buffer;
    if constexpr (!kAliased) mbarrier_wait(smem + kFree + index * 8, me.store_parity ^ ((c / StoreBuffers) & 1) ^ 1);
    const u32 thread = thread_index();
    const u32 lane = thread & 31, warp = (thread >> 5) & 3;
    const u32 base = smem + kStagingOffset + index * kChunkBytes + (warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
    for (u32 g = 0; g < 8; g += 2) {
      const u32 address = base + (((g + (lane >> 4)) ^ (lane & 7)) << 4);
      const u32 e = c * 16 + g * 2;
      stmatrix_x4(address, packed[e], packed[e + 1], packed[e + 2], packed[e + 3]);
    }
    fence_smem_to_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kReady + index * 8);
    // With an even number of rounds through the buffers a tile ends with the parity that it began with.
    if (kChunksPerTile / StoreBuffers % 2 == 1 && buffer == StoreBuffers - 1) me.store_parity ^= 1;
  }

  // One storer thread; it serves one consumer.
  static DEVICE void store(u32 smem, const TensorMap* c_map, const GemmProblem& p, u32 first, u32 stride, u32 rank,
                           u32 consumer) {
    u32 parity = 0;
    for (u32 t = first; t < p.tiles; t += stride) {
      const TileAt tile = tile_at(p, t);
      const u32 row = (tile.m * Cluster + rank) * kTileM + consumer * 64;
#pragma unroll
      for (u32 c = 0; c < kChunksPerTile; ++c) {
        const u32 buffer = c % StoreBuffers;
        const u32 index = consumer * StoreBuffers + buffer;
        mbarrier_wait(smem + kReady + index * 8, parity);
        if constexpr (Adds) {
          tma_store_add(c_map, smem + kStagingOffset + index * kChunkBytes, row, tile.n * (kTileN / 64) + c);
        } else {
          tma_store(c_map, smem + kStagingOffset + index * kChunkBytes, row, tile.n * (kTileN / 64) + c);
        }
        store_commit();
        if constexpr (!kAliased) {
          store_wait_smem_read<0>();
          mbarrier_arrive(smem + kFree + index * 8);
        }
        if (buffer == StoreBuffers - 1) parity ^= 1;
      }
      if constexpr (DrainRule == Drain::SmemRead) store_wait_smem_read<0>();
      if constexpr (DrainRule == Drain::Visible) store_wait_visible<0>();
      if constexpr (kAliased) mbarrier_arrive(smem + kDrained);
      if (p.chain != nullptr) {
        store_wait_visible<0>();
        flag_add_release(p.chain + t + stride, 1);
      }
    }
    store_wait_visible<0>();
  }
};

// Interpreter of the GEMM family: one CTA per block, its role by its block index.
//
// Waits for: the flags of its tasks, in device memory. Reads and writes: the regions of its tasks.
// Signals: flags, after the task's writes are visible and its reads done; puts go to the host through a FIFO.
//
//   warps 0-7   two consumers: wgmma of the CTA's GEMM tasks; before, after, or at once, the movers
//   warp 8      loader: claims GEMM tasks, waits, fetches operands
//   warps 9-10  storers, one per consumer: output gate, stores, signals
//   warp 11     raises the flags of finished tasks; watchdog
//
// A CTA goes from role to role as the schedule says, through at most one with tiles: the loader and the storers learn
// of it when the consumers come to it.
#pragma once
#include "gemm_tile.cuh"
#include "moves.cuh"
#include "orders.cuh"

constexpr u32 kAhead = 4;     // steps of 0.6 us that the claim of a tile is ahead of its first load
constexpr u32 kEndSlots = 8;  // how far one storer may be ahead of the other, in tasks

// What the loader says of the operands in a stage.
enum StageNote : u32 { kMoreSteps, kLastStep, kLastOfAll };

template <bool LoopPipelined, Drain DrainRule>
struct GemmInterpreter {
  static constexpr bool kDeferred = DrainRule == Drain::Deferred;
  static constexpr u32 kStages = 4;
  using Tile = GemmTile<LoopPipelined, DrainRule, 1, kStages, kDeferred ? 2 : 4, true>;
  static constexpr u32 kNotes = Tile::kSmemBytes;
  static constexpr u32 kEnds = kNotes + kStages * 4;
  static constexpr u32 kJoin = (kEnds + kEndSlots * 4 + 7) / 8 * 8;  // the role with tiles is known
  static constexpr u32 kHasRole = kJoin + 8;
  static constexpr u32 kEndCount = kHasRole + 4;
  using Orders = OrderRing<(kEndCount + 4 + 15) / 16 * 16, 4, 3, kConsumers>;  // a, b, one output; the storers
  using Signals = Signaller<(Orders::kEnd + 15) / 16 * 16>;
  // Copies go through the operand stages, above an aliased output.
  using Moving = Moves<kConsumers * 128, kDeferred ? 12 : 8, kDeferred ? 0 : kConsumers * kChunksPerTile * kChunkBytes,
                       Signals::kEnd, Signals>;
  static constexpr u32 kSmemBytes = Moving::kEnd;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");

  // All of the CTA waits for it: four threads of as many warps. A barrier's address must be uniform, so that lanes
  // side by side would take turns.
  static DEVICE void init(u32 smem) {
    if (threadIdx.x == 0) {
      Tile::init_barriers(smem);
    } else if (threadIdx.x == 32) {
      Signals::init(smem);
      mbarrier_init_fence();
    } else if (threadIdx.x == 64) {
      mbarrier_init(smem + kJoin, 1);
      Orders::init(smem);
      mbarrier_init_fence();
      store_shared(smem + kEndCount, 0);
      for (u32 s = 0; s < kEndSlots; ++s) store_shared(smem + kEnds + s * 4, 0);
    } else if (threadIdx.x == 96) {
      Moving::init(smem);
      mbarrier_init_fence();
    }
  }

  // --- warp 8: the loader
  static DEVICE void load(u32 smem, const Program& p, const Maps& maps) {
    if (!Orders::begin(smem, p, kJoin, kHasRole)) return;
    RingPosition at;
    for (u32 turn = 0; Orders::await(smem, turn) != kNone; ++turn) {
      stamp_taken(p, Orders::index(smem, turn));
      const u32 steps = Orders::task(turn).steps, step_waits = Orders::task(turn).step_waits;
      const u32 waited_for = Orders::await_start(smem, p, turn);
      stamp_start(p, Orders::index(smem, turn), waited_for, 0);
      if (Tile::kAliased && turn > 0) mbarrier_wait(smem + Tile::kDrained, (turn - 1) & 1);
      const u32 a_map = Orders::region(turn, 0).map, a_row = Orders::region(turn, 0).row;
      const u32 a_column = Orders::region(turn, 0).column_block;
      const u32 b_map = Orders::region(turn, 1).map, b_row = Orders::region(turn, 1).row;
      const u32 b_column = Orders::region(turn, 1).column_block;
      for (u32 k = 0; k < steps; ++k) {
        if (k == Orders::claim_step(steps, kAhead)) Orders::claim(smem, p, turn + 1);
        if (step_waits > 0) Orders::await_step(smem, p, turn, step_waits, k, steps);
        const u32 full = smem + Tile::kFull + at.slot * 8;
        const u32 stage = smem + at.slot * kStageBytes;
        mbarrier_wait(smem + Tile::kEmpty + at.slot * 8, at.parity ^ 1);
        store_shared(smem + kNotes + at.slot * 4, k + 1 < steps ? kMoreSteps : Orders::index(smem, turn + 1) != kNone ? kLastStep : kLastOfAll);
        mbarrier_arrive_expect_bytes(full, kStageBytes);
        tma_load(stage, &maps.map[a_map], full, a_row, a_column + k);
        tma_load(stage + kABytes, &maps.map[b_map], full, b_row + k * kTileK, b_column);
        at.advance<kStages>();
      }
    }
  }

  // --- warps 9 and 10: the storers
  static DEVICE void store(u32 smem, const Program& p, const Maps& maps, u32 consumer) {
    u32 parity = 0;
    for (u32 turn = 0;; ++turn) {
      const u32 index = Orders::await(smem, turn);
      if (index == kNone) break;
      const volatile Task& task = Orders::task(turn);
      for (u32 i = 0, first = task.start_waits + task.step_waits; i < task.output_waits; ++i) {
        const Wait w = Orders::wait(p, turn, first + i);
        for (u32 f = 0; f < w.count; ++f) await(p, w.word + f * w.stride, w.at_least, index, 1 + consumer);
        fence_global_to_async();
      }
      const u32 outputs = task.outputs;
      const volatile Region& one = Orders::region(turn, 2);
      const u32 map = one.map, row = one.row + consumer * 64, column = one.column_block, add = one.add;
#pragma unroll 1
      for (u32 c = 0; c < kChunksPerTile; ++c) {
        constexpr u32 kBuffers = kDeferred ? 2 : 4;
        const u32 buffer = c % kBuffers;
        const u32 slot = consumer * kBuffers + buffer;
        const u32 from = smem + Tile::kStagingOffset + slot * kChunkBytes;
        mbarrier_wait(smem + Tile::kReady + slot * 8, parity);
        if (c == 0 && consumer == 0) stamp_free(p, index);
        store_chunk(maps, map, add, from, row, column + c);
#pragma unroll 1
        for (u32 o = 1; o < outputs; ++o) {
          const Region& more = p.regions[task.first_region + 2 + o];
          store_chunk(maps, more.map, more.add, from, more.row + consumer * 64, more.column_block + c);
        }
        store_commit();
        if constexpr (!Tile::kAliased) {
          store_wait_smem_read<0>();
          mbarrier_arrive(smem + Tile::kFree + slot * 8);
        }
        if (buffer == kBuffers - 1) parity ^= 1;
      }
      if constexpr (DrainRule == Drain::SmemRead) {
        store_wait_smem_read<0>();
        mbarrier_arrive(smem + Tile::kDrained);
      }
      store_wait_visible<0>();
      if constexpr (DrainRule == Drain::Visible) mbarrier_arrive(smem + Tile::kDrained);
      const u32 signals = task.signals, first_signal = task.first_signal;
      Orders::give_back(smem, turn);
      if (signals > 0 || p.stamps != nullptr) {
        // The second of the two storers speaks for both.
        if (add_shared(smem + kEnds + turn % kEndSlots * 4, 1) & 1) Signals::post(smem, p, index, signals, first_signal);
      }
    }
  }
  static DEVICE void store_chunk(const Maps& maps, u32 map, u32 add, u32 from, u32 row, u32 column) {
    if (add) {
      tma_store_add(&maps.map[map], from, row, column);
    } else {
      tma_store(&maps.map[map], from, row, column);
    }
  }

  // --- warps 0 to 7: the consumers
  // What a stage's note says is read while its products run: nothing but the next operands stands between two tiles.
  static DEVICE void multiply(u32 smem, u32 consumer) {
    if (Orders::await(smem, 0) == kNone) return;
    float acc[128];
    u32 packed[64];
    bool pending = false;
    typename Tile::Consumer me = Tile::make_consumer(smem, consumer);
    for (u32 note = kMoreSteps; note != kLastOfAll;) {
      note = kMoreSteps;
      if constexpr (kDeferred) {
#pragma unroll
        for (u32 c = 0; c < kChunksPerTile; ++c) {
          if (note == kMoreSteps) {
            const u32 full = smem + Tile::kFull + me.at.slot() * 8;
            if (pending) {
              // All four warps must decide alike, see GemmTile.
              if (!named_barrier_all(2 + consumer, 128, mbarrier_test(full, me.at.parity()))) {
#pragma unroll
                for (u32 rest = c; rest < kChunksPerTile; ++rest) Tile::stage_chunk(smem, me, packed, rest);
                pending = false;
              }
            }
            note = step(smem, me, acc, c == 0, [&] {
              if (pending) Tile::stage_chunk(smem, me, packed, c);
            });
          } else if (pending) {
            Tile::stage_chunk(smem, me, packed, c);
          }
        }
      } else {
        note = step(smem, me, acc, true, [] {});
      }
      while (note == kMoreSteps) note = step(smem, me, acc, false, [] {});
      Tile::finish_tile(smem, me);
      if constexpr (Tile::kAliased) named_barrier_sync(1, kConsumers * 128);
      Tile::pack_output(acc, packed);
      if constexpr (kDeferred) {
        pending = true;
      } else {
#pragma unroll
        for (u32 c = 0; c < kChunksPerTile; ++c) Tile::stage_chunk(smem, me, packed, c);
      }
    }
    if constexpr (kDeferred) {
#pragma unroll
      for (u32 c = 0; c < kChunksPerTile; ++c) Tile::stage_chunk(smem, me, packed, c);
    }
  }
  // One k step, `beside` done while its products run; what its stage's note says.
  template <class Beside>
  static DEVICE u32 step(u32 smem, typename Tile::Consumer& me, float (&acc)[128], bool first, Beside beside) {
    mbarrier_wait(smem + Tile::kFull + me.at.slot() * 8, me.at.parity());
    Tile::issue_step(me, acc, !first);
    const u32 note = __shfl_sync(~0u, load_shared(smem + kNotes + me.at.slot() * 4), 0);
    beside();
    Tile::finish_step(smem, me, first);
    return note;
  }

  // From role to role, up to one with tiles or to the end.
  static DEVICE u32 move_on(u32 smem, const Program& p, const Maps& maps, u32 role) {
    while (role != kNone && p.roles[role].tiles == 0) {
      role = Moving::move(smem, p, maps, role, Orders::start().cta, thread_index());
    }
    return role;
  }

  static DEVICE void run(const Program& p, const Maps& maps) {
    constexpr u32 kParties = 4;
    const u32 smem = smem_address(dynamic_smem);
    const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    begin_cta(p, maps, kGemmThreads);
    if (smem & 1023u) __trap();  // the swizzle pattern repeats every 1,024 bytes
    init(smem);
    if (threadIdx.x / 32 == kConsumers * 4) Orders::fetch_start(smem, p);
    __syncthreads();
    if (group < kConsumers) {
      registers_increase<232>();
      // The two orders are written out: with movers on both sides of them the products do not keep to their registers.
      if (Orders::start().of.tiles) {
        multiply(smem, group);
        named_barrier_sync(kMoverBarrier, kConsumers * 128);
        move_on(smem, p, maps, Orders::start().of.recycle);
      } else {
        const u32 role = move_on(smem, p, maps, Orders::start().role);
        join(smem, p, role);
        if (role != kNone) multiply(smem, group);
      }
      if (threadIdx.x == 0) end_party<Signals>(smem, p, kEndCount, kParties);
    } else {
      registers_decrease<40>();
      const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
      if (lane_id() == 0) {
        if (warp == 3) {
          Signals::run(smem, p);
        } else {
          if (warp == 0) {
            load(smem, p, maps);
          } else {
            store(smem, p, maps, warp - 1);
          }
          end_party<Signals>(smem, p, kEndCount, kParties);
        }
      }
    }
  }

  // The consumers have come to a role with tiles, or to the end.
  static DEVICE void join(u32 smem, const Program& p, u32 role) {
    if (threadIdx.x != 0) return;
    store_shared(smem + kHasRole, role != kNone);
    if (role != kNone) Orders::put_role(p.roles[role]);
    mbarrier_arrive(smem + kJoin);
  }
};

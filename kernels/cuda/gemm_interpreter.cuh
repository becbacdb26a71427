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
#include "interpreter.cuh"

constexpr u32 kAhead = 4;     // steps of 0.6 us that the claim of a tile is ahead of its first load
constexpr u32 kEndSlots = 8;  // how far one storer may be ahead of the other, in tasks

// What the loader says of the operands in a stage.
enum StageNote : u32 { kMoreSteps, kLastStep, kLastOfAll };

template <bool LoopPipelined, Drain DrainRule>
struct GemmInterpreter : Interpreter<GemmInterpreter<LoopPipelined, DrainRule>> {
  static constexpr u32 kGroups = kConsumers, kStorers = kConsumers;
  static constexpr u32 kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr bool kDeferred = DrainRule == Drain::Deferred;
  static constexpr u32 kStages = 4;
  using Tile = GemmTile<LoopPipelined, DrainRule, 1, kStages, kDeferred ? 2 : 4, true>;
  static constexpr u32 kNotes = Tile::kSmemBytes;
  static constexpr u32 kEnds = kNotes + kStages * 4;
  static constexpr u32 kJoin = (kEnds + kEndSlots * 4 + 7) / 8 * 8;  // the role with tiles is known
  static constexpr u32 kHasRole = kJoin + 8;
  using Orders = OrderRing<(kHasRole + 4 + 15) / 16 * 16, 4, 3, kConsumers>;  // a, b, one output; the storers
  using Signals = Signaller<(Orders::kEnd + 15) / 16 * 16>;
  // Copies go through the operand stages, above an aliased output.
  using Moving = Moves<kConsumers * 128, kDeferred ? 12 : 8, kDeferred ? 0 : kConsumers * kChunksPerTile * kChunkBytes,
                       Signals::kEnd, Signals>;
  static constexpr u32 kSmemBytes = Moving::kEnd;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");

  static DEVICE void init_words(u32 smem) {
    for (u32 s = 0; s < kEndSlots; ++s) store_shared(smem + kEnds + s * 4, 0);
  }

  // --- warp 8: the loader
  static DEVICE u32 load_ahead(u32 smem, const typename Orders::Counts& counts) {
    const u32 steps = min(Orders::claim_step(counts.steps, kAhead), kStages);
    const Place a = Orders::place(smem, 0, 0), b = Orders::place(smem, 0, 1);
    RingPosition at;
    for (u32 k = 0; k < steps; ++k) load_step(smem, at, a, b, k, kMoreSteps);
    return steps;
  }

  static DEVICE void load(u32 smem, const Program& p, u32 ahead) {
    RingPosition at = {ahead % kStages, ahead / kStages};
    if (!Orders::begin(smem, p, kJoin, kHasRole)) return;
    for (u32 turn = 0;; ++turn) {
      const u32 index = Orders::await(smem, turn);
      if (index == kNone) return;
      stamp_taken(p, index);
      const typename Orders::Counts counts = Orders::counts(smem, turn);
      const u32 waited_for = Orders::await_start(smem, p, turn, index, counts.start_waits);
      stamp_start(p, index, waited_for, 0);
      if (Tile::kAliased && turn > 0) mbarrier_wait(smem + Tile::kDrained, (turn - 1) & 1);
      const Place a = Orders::place(smem, turn, 0), b = Orders::place(smem, turn, 1);
      const u32 steps = counts.steps, claim_step = Orders::claim_step(steps, kAhead);
      for (u32 k = ahead; k < steps; ++k) {
        if (k == claim_step) Orders::claim(smem, p, turn + 1);
        if (__builtin_expect(counts.step_waits > 0, false)) Orders::await_step(smem, p, turn, index, counts, k);
        const u32 note = k + 1 < steps ? kMoreSteps : Orders::index(smem, turn + 1) != kNone ? kLastStep : kLastOfAll;
        mbarrier_wait(smem + Tile::kEmpty + at.slot * 8, at.parity ^ 1);
        load_step(smem, at, a, b, k, note);
      }
      ahead = 0;
    }
  }
  // The stage is free.
  static DEVICE void load_step(u32 smem, RingPosition& at, const Place& a, const Place& b, u32 k, u32 note) {
    const u32 full = smem + Tile::kFull + at.slot * 8, stage = smem + at.slot * kStageBytes;
    store_shared(smem + kNotes + at.slot * 4, note);
    mbarrier_arrive_expect_bytes(full, kStageBytes);
    tma_load(stage, &tensor_maps[a.map], full, a.row, a.column_block + k);
    tma_load(stage + kABytes, &tensor_maps[b.map], full, b.row + k * kTileK, b.column_block);
    at.advance<kStages>();
  }

  // --- warps 9 and 10: the storers
  static DEVICE void store(u32 smem, const Program& p, u32 consumer) {
    u32 parity = 0, turn = 0;
    for (u32 index = Orders::await(smem, 0); index != kNone; ++turn) {
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
        store_chunk(map, add, from, row, column + c);
#pragma unroll 1
        for (u32 o = 1; o < outputs; ++o) {
          const Region& more = p.regions[task.first_region + 2 + o];
          store_chunk(more.map, more.add, from, more.row + consumer * 64, more.column_block + c);
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
      if constexpr (DrainRule == Drain::Visible) {
        store_wait_visible<0>();
        mbarrier_arrive(smem + Tile::kDrained);
      }
      // Read while the stores become visible. The next tile was claimed before this one's last operands were loaded.
      const u32 signals = task.signals, first_signal = task.first_signal, next = Orders::await(smem, turn + 1);
      Orders::give_back(smem, turn);
      store_wait_visible<0>();
      if (signals > 0 || p.stamps != nullptr) {
        // The second of the two storers speaks for both.
        if (add_shared(smem + kEnds + turn % kEndSlots * 4, 1) & 1) Signals::post(smem, p, index, signals, first_signal);
      }
      index = next;
    }
  }
  static DEVICE void store_chunk(u32 map, u32 add, u32 from, u32 row, u32 column) {
    if (add) {
      tma_store_add(&tensor_maps[map], from, row, column);
    } else {
      tma_store(&tensor_maps[map], from, row, column);
    }
  }

  // --- warps 0 to 7: the consumers
  // What a stage's note says is read while its products run: nothing but the next operands stands between two tiles.
  static DEVICE void compute(u32 smem, const Program&, u32 consumer) {
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
};

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

constexpr u32 kTaskSlots = 4;
constexpr u32 kAhead = 3;     // steps of 0.64 us that fetching descriptors is ahead of their use
constexpr u32 kEndSlots = 8;  // how far one storer may be ahead of the other, in tasks

template <bool LoopPipelined, Drain DrainRule>
struct GemmInterpreter {
  static constexpr bool kDeferred = DrainRule == Drain::Deferred;
  using Tile = GemmTile<LoopPipelined, DrainRule, 1, 4, kDeferred ? 2 : 4, true>;
  static constexpr u32 kTaskFull = Tile::kSmemBytes;
  static constexpr u32 kTaskEmpty = kTaskFull + kTaskSlots * 8;
  static constexpr u32 kTaskIndex = kTaskEmpty + kTaskSlots * 8;
  static constexpr u32 kTaskSteps = kTaskIndex + kTaskSlots * 4;
  static constexpr u32 kEnds = kTaskSteps + kTaskSlots * 4;
  static constexpr u32 kJoin = kEnds + kEndSlots * 4;  // the role with tiles is known
  static constexpr u32 kRole = kJoin + 8;
  static constexpr u32 kEndCount = kRole + 4;
  using Next = NextTile<(kEndCount + 4 + 15) / 16 * 16, 2>;  // a and b
  using Signals = Signaller<Next::kEnd>;
  // Copies go through the operand stages, above an aliased output.
  using Moving = Moves<kConsumers * 128, kDeferred ? 12 : 8, kDeferred ? 0 : kConsumers * kChunksPerTile * kChunkBytes,
                       Signals::kEnd, Signals>;
  static constexpr u32 kSmemBytes = Moving::kEnd;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");

  static DEVICE void init(u32 smem) {
    Tile::init_barriers(smem);
    for (u32 s = 0; s < kTaskSlots; ++s) {
      mbarrier_init(smem + kTaskFull + s * 8, 1);
      mbarrier_init(smem + kTaskEmpty + s * 8, kConsumers * 4 + kConsumers);  // consumer warps and storers
    }
    for (u32 s = 0; s < kEndSlots; ++s) store_shared(smem + kEnds + s * 4, 0);
    mbarrier_init(smem + kJoin, 1);
    store_shared(smem + kEndCount, 0);
    Signals::init(smem);
    Moving::init(smem);
    mbarrier_init_fence();
  }

  // The role with tiles that the CTA comes to, or kNone.
  static DEVICE u32 await_role(u32 smem) {
    mbarrier_wait(smem + kJoin, 0);
    return load_shared(smem + kRole);
  }

  // --- warp 8: the loader
  static DEVICE void publish(u32 smem, RingPosition& at, u32 index, u32 steps) {
    mbarrier_wait(smem + kTaskEmpty + at.slot * 8, at.parity ^ 1);
    store_shared(smem + kTaskIndex + at.slot * 4, index);
    store_shared(smem + kTaskSteps + at.slot * 4, steps);
    mbarrier_arrive(smem + kTaskFull + at.slot * 8);
    at.advance<kTaskSlots>();
  }

  static DEVICE void load(u32 smem, const Program& p, const Maps& maps) {
    const u32 role = await_role(smem);
    if (role == kNone) return;
    const Role& r = p.roles[role];
    RingPosition at, task_at;
    u32 index = claim_tile(p, r, 0);
    Next::fetch_task(smem, p, 0, index);
    Next::fetch_rest(smem, p, 0, index);
    for (u32 turn = 0; index != kNone; ++turn) {
      stamp_taken(p, index);
      Next::arrived();
      const u32 steps = Next::task(turn).steps, step_waits = Next::task(turn).step_waits;
      publish(smem, task_at, index, steps);
      const u32 waited_for = Next::await_start(p, turn, index);
      stamp_start(p, index, waited_for, 0);
      if (Tile::kAliased && turn > 0) mbarrier_wait(smem + Tile::kDrained, (turn - 1) & 1);
      const volatile Region& a = Next::region(turn, 0);
      const volatile Region& b = Next::region(turn, 1);
      u32 next = kNone;
      for (u32 k = 0; k < steps; ++k) {
        if (step_waits > 0) Next::await_step(p, turn, index, step_waits, k, steps);
        const u32 full = smem + Tile::kFull + at.slot * 8;
        const u32 stage = smem + at.slot * kStageBytes;
        // Read anew at every step, because registers are dear, and before the wait, because after it every cycle counts.
        const u32 a_map = a.map, a_row = a.row, a_column = a.column_block + k;
        const u32 b_map = b.map, b_row = b.row + k * kTileK, b_column = b.column_block;
        mbarrier_wait(smem + Tile::kEmpty + at.slot * 8, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(full, kStageBytes);
        tma_load(stage, &maps.map[a_map], full, a_row, a_column);
        tma_load(stage + kABytes, &maps.map[b_map], full, b_row, b_column);
        at.advance<4>();
        if (k == Next::claim_step(steps, kAhead)) {
          next = claim_tile(p, r, turn + 1);
          Next::fetch_task(smem, p, turn + 1, next);
        }
        if (k == Next::rest_step(steps, kAhead)) Next::fetch_rest(smem, p, turn + 1, next);
      }
      index = next;
    }
    publish(smem, task_at, kNone, 0);
  }

  // --- warps 9 and 10: the storers
  static DEVICE void store(u32 smem, const Program& p, const Maps& maps, u32 consumer) {
    if (await_role(smem) == kNone) return;
    u32 parity = 0;
    RingPosition task_at;
    for (u32 turn = 0;; ++turn) {
      mbarrier_wait(smem + kTaskFull + task_at.slot * 8, task_at.parity);
      const u32 index = load_shared(smem + kTaskIndex + task_at.slot * 4);
      mbarrier_arrive(smem + kTaskEmpty + task_at.slot * 8);
      task_at.advance<kTaskSlots>();
      if (index == kNone) break;
      const Task task = p.tasks[index];
      for (u32 i = 0; i < task.output_waits; ++i) {
        const Wait w = p.waits[task.first_wait + task.start_waits + task.step_waits + i];
        for (u32 f = 0; f < w.count; ++f) await(p, w.word + f * w.stride, w.at_least, index, 1 + consumer);
        fence_global_to_async();
      }
#pragma unroll 1
      for (u32 c = 0; c < kChunksPerTile; ++c) {
        constexpr u32 kBuffers = kDeferred ? 2 : 4;
        const u32 buffer = c % kBuffers;
        const u32 slot = consumer * kBuffers + buffer;
        mbarrier_wait(smem + Tile::kReady + slot * 8, parity);
        if (c == 0 && consumer == 0) stamp_free(p, index);
        for (u32 o = 0; o < task.outputs; ++o) {
          const Region& out = p.regions[task.first_region + 2 + o];
          const TensorMap* map = &maps.map[out.map];
          const u32 from = smem + Tile::kStagingOffset + slot * kChunkBytes;
          if (out.add) {
            tma_store_add(map, from, out.row + consumer * 64, out.column_block + c);
          } else {
            tma_store(map, from, out.row + consumer * 64, out.column_block + c);
          }
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
      if (task.signals > 0 || p.stamps != nullptr) {
        // The second of the two storers speaks for both.
        if (add_shared(smem + kEnds + turn % kEndSlots * 4, 1) & 1) {
          Signals::post(smem, p, index, task.signals, task.first_signal);
        }
      }
    }
  }

  // --- warps 0 to 7: the consumers
  static DEVICE void multiply(u32 smem, u32 consumer) {
    float acc[128];
    u32 packed[64];
    bool pending = false;
    typename Tile::Consumer me = Tile::make_consumer(smem, consumer);
    PackedRing<kTaskSlots> task_at;
    for (;;) {
      const u32 published = smem + kTaskFull + task_at.slot() * 8;
      if constexpr (kDeferred) {
        if (pending && !named_barrier_all(2 + consumer, 128, mbarrier_test(published, task_at.parity()))) {
#pragma unroll
          for (u32 c = 0; c < kChunksPerTile; ++c) Tile::stage_chunk(smem, me, packed, c);
          pending = false;
        }
      }
      mbarrier_wait(published, task_at.parity());
      const u32 steps = load_shared(smem + kTaskSteps + task_at.slot() * 4);
      __syncwarp();
      if (lane_id() == 0) mbarrier_arrive(smem + kTaskEmpty + task_at.slot() * 8);
      task_at.advance();
      if (steps == 0) break;
      u32 k = 0;
      if constexpr (kDeferred) {
#pragma unroll
        for (u32 c = 0; c < kChunksPerTile; ++c) {
          if (c < steps) {
            const u32 full = smem + Tile::kFull + me.at.slot() * 8;
            if (pending) {
              if (!named_barrier_all(2 + consumer, 128, mbarrier_test(full, me.at.parity()))) {
#pragma unroll
                for (u32 rest = c; rest < kChunksPerTile; ++rest) Tile::stage_chunk(smem, me, packed, rest);
                pending = false;
              }
            }
            mbarrier_wait(full, me.at.parity());
            Tile::issue_step(me, acc, c != 0);
            if (pending) Tile::stage_chunk(smem, me, packed, c);
            Tile::finish_step(smem, me, c == 0);
            ++k;
          } else if (pending) {
            Tile::stage_chunk(smem, me, packed, c);
          }
        }
      }
      for (; k < steps; ++k) {
        mbarrier_wait(smem + Tile::kFull + me.at.slot() * 8, me.at.parity());
        Tile::issue_step(me, acc, k != 0);
        Tile::finish_step(smem, me, k == 0);
      }
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
      if (pending) {
#pragma unroll
        for (u32 c = 0; c < kChunksPerTile; ++c) Tile::stage_chunk(smem, me, packed, c);
      }
    }
  }

  // From role to role, up to one with tiles or to the end.
  static DEVICE u32 move_on(u32 smem, const Program& p, const Maps& maps, u32 role) {
    while (role != kNone && p.roles[role].tiles == 0) {
      role = Moving::move(smem, p, maps, role, p.starts[block_index()].cta, thread_index());
    }
    return role;
  }

  static DEVICE void run(const Program& p, const Maps& maps) {
    constexpr u32 kParties = 4;
    const u32 smem = smem_address(dynamic_smem);
    const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
      if (smem & 1023u) __trap();  // the swizzle pattern repeats every 1,024 bytes
      begin_cta(p);
      init(smem);
    }
    __syncthreads();
    if (group < kConsumers) {
      registers_increase<232>();
      // The two orders are written out: with movers on both sides of them the products do not keep to their registers.
      const u32 first = p.starts[block_index()].role;
      if (p.roles[first].tiles) {
        join(smem, first);
        multiply(smem, group);
        named_barrier_sync(kMoverBarrier, kConsumers * 128);
        move_on(smem, p, maps, p.roles[load_shared(smem + kRole)].recycle);
      } else {
        const u32 role = move_on(smem, p, maps, first);
        join(smem, role);
        if (role != kNone) multiply(smem, group);
      }
      if (threadIdx.x == 0) end_party(p, smem + kEndCount, kParties, smem + Tile::kFinished);
    } else {
      registers_decrease<40>();
      const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
      if (lane_id() == 0) {
        if (warp == 3) {
          Signals::run(smem, p, Tile::kFinished);
        } else {
          if (warp == 0) {
            load(smem, p, maps);
          } else {
            store(smem, p, maps, warp - 1);
          }
          end_party(p, smem + kEndCount, kParties, smem + Tile::kFinished);
        }
      }
    }
  }

  // The consumers have come to a role with tiles, or to the end.
  static DEVICE void join(u32 smem, u32 role) {
    if (threadIdx.x != 0) return;
    store_shared(smem + kRole, role);
    mbarrier_arrive(smem + kJoin);
  }
};

// Interpreter of attention: one CTA per block, its role by its block index.
//
// Waits for: the flags of its tasks, in device memory. Reads and writes: the regions of its tasks; the state of a Q block
// is laid out as attention_tile.cuh says, and nothing else reads it.
// Signals: flags, after the task's writes are visible and its reads done; puts go to the host through a FIFO.
//
//   warps of the consumers   attention tiles; before, after, or at once, the movers
//   next warp                loader: claims tiles, waits, fetches Q, K and V
//   next warp                storer: stores finished blocks, signals
//   last warp                raises the flags of finished tasks; watchdog
#pragma once
#include "attention_tile.cuh"
#include "moves.cuh"
#include "orders.cuh"

template <u32 Consumers, bool Overlapped>
struct AttentionInterpreter {
  using Tile = AttentionTile<Consumers, Overlapped, Overlapped, 2>;
  static constexpr u32 kThreads = (Consumers + 1) * 128;
  static constexpr u32 kConsumerRegisters = Consumers == 3 ? 160 : 232;
  static constexpr u32 kProducerRegisters = Consumers == 3 ? 32 : 40;
  static constexpr u32 kAheadSteps = 2;  // steps of 2 us that the claim of a tile is ahead of its first load
  static constexpr u32 kJoin = (Tile::kSmemBytes + 7) / 8 * 8;  // the role with tiles is known
  static constexpr u32 kHasRole = kJoin + 8;
  static constexpr u32 kEndCount = kHasRole + 4;
  // q, k, v, state, o, l; consumer warps and the storer
  using Orders = OrderRing<(kEndCount + 4 + 15) / 16 * 16, 4, 6, Consumers * 4 + 1>;
  using Signals = Signaller<(Orders::kEnd + 15) / 16 * 16>;
  // Copies go through Q, K and V; what is staged of O may still be read.
  using Moving = Moves<Consumers * 128, Tile::kO / kBoxBytes, 0, Signals::kEnd, Signals>;
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
    } else if (threadIdx.x == 96) {
      Moving::init(smem);
      mbarrier_init_fence();
    }
  }

  static DEVICE void load(u32 smem, const Program& p, const Maps& maps) {
    if (!Orders::begin(smem, p, kJoin, kHasRole)) return;
    RingPosition at;
    for (u32 turn = 0; Orders::await(smem, turn) != kNone; ++turn) {
      stamp_taken(p, Orders::index(smem, turn));
      const u32 steps = Orders::task(turn).steps;
      const u32 waited_for = Orders::await_start(smem, p, turn);
      fence_global_to_async();
      stamp_start(p, Orders::index(smem, turn), waited_for, 0);
      mbarrier_wait(smem + Tile::kQEmpty, (turn & 1) ^ 1);
      mbarrier_arrive_expect_bytes(smem + Tile::kQFull, Tile::kQBytes);
      tma_load(smem + Tile::kQ, &maps.map[Orders::region(turn, 0).map], smem + Tile::kQFull, Orders::region(turn, 0).row, 0);
      const u32 step_waits = Orders::task(turn).step_waits;
      const u32 k_map = Orders::region(turn, 1).map, v_map = Orders::region(turn, 2).map;
      const u32 k_row = Orders::region(turn, 1).row, v_row = Orders::region(turn, 2).row;
      for (u32 j = 0; j < steps; ++j) {
        if (j == Orders::claim_step(steps, kAheadSteps)) Orders::claim(smem, p, turn + 1);
        if (step_waits > 0) Orders::await_step(smem, p, turn, step_waits, j, steps);
        mbarrier_wait(smem + Tile::kKEmpty + at.slot * 8, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(smem + Tile::kKFull + at.slot * 8, kKvBytes);
        tma_load(smem + Tile::kK + at.slot * kKvBytes, &maps.map[k_map], smem + Tile::kKFull + at.slot * 8, k_row + j * kKvRows, 0);
        mbarrier_wait(smem + Tile::kVEmpty + at.slot * 8, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(smem + Tile::kVFull + at.slot * 8, kKvBytes);
        tma_load(smem + Tile::kV + at.slot * kKvBytes, &maps.map[v_map], smem + Tile::kVFull + at.slot * 8, v_row + j * kKvRows, 0);
        at.advance<2>();
      }
    }
  }

  static DEVICE void store(u32 smem, const Program& p, const Maps& maps) {
    for (u32 turn = 0;; ++turn) {
      const u32 index = Orders::await(smem, turn);
      if (index == kNone) return;
      const volatile Task& task = Orders::task(turn);
      const bool last = (task.flags & kLast) != 0;
      const volatile Region& o = Orders::region(turn, task.flags & kFirst ? 3 : 4);
      for (u32 c = 0; c < Consumers; ++c) {
        mbarrier_wait(smem + Tile::kOReady + c * 8, turn & 1);
        if (last) {
          tma_store(&maps.map[o.map], smem + Tile::kO + c * (64 * kHeadDim * 2), o.row + c * 64, 0);
          store_commit();
        }
      }
      stamp_free(p, index);
      if (last) store_wait_smem_read<0>();
      for (u32 c = 0; c < Consumers; ++c) mbarrier_arrive(smem + Tile::kOFree + c * 8);
      const u32 signals = task.signals, first_signal = task.first_signal;
      Orders::give_back(smem, turn);
      if (last) store_wait_visible<0>();
      Signals::post(smem, p, index, signals, first_signal);
    }
  }

  // A consumer; returns when the loader has no more tiles.
  static DEVICE void attend(u32 smem, const Program& p, u32 consumer) {
    typename Tile::Consumer me = Tile::make_consumer(smem, consumer);
    Tile::begin_turns(consumer);
    for (u32 turn = 0;; ++turn) {
      u32 steps, flags;
      Orders::await_steps(smem, turn, steps, flags);
      if (steps == 0) break;
      typename Tile::State state;
      // Two paths: what the products might have begun with costs each of their steps.
      if (flags & kFirst) {
        Tile::attend_block(smem, me, state, steps, p.scale_log2, nullptr);
      } else {
        Tile::attend_block(smem, me, state, steps, p.scale_log2, reinterpret_cast<const u8*>(Orders::region(turn, 3).address));
      }
      if (flags & kLast) {
        const u64 logs = Orders::region(turn, flags & kFirst ? 4 : 5).address;
        Tile::write_logs(state, p.scale_log2, reinterpret_cast<float*>(logs), consumer);
        Tile::stage_output(smem, state.o, state.row_sum, consumer, me.task_parity);
      } else {
        Tile::write_state(state, reinterpret_cast<u8*>(Orders::region(turn, 3).address), consumer);
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(smem + Tile::kOReady + consumer * 8);
      }
      me.task_parity ^= 1;
      __syncwarp();
      if (lane_id() == 0) Orders::give_back(smem, turn);
    }
    Tile::end_turns(consumer);
  }

  // From role to role, up to one with tiles or to the end.
  static DEVICE u32 move_on(u32 smem, const Program& p, const Maps& maps, u32 role) {
    while (role != kNone && p.roles[role].tiles == 0) {
      role = Moving::move(smem, p, maps, role, Orders::start().cta, thread_index());
    }
    return role;
  }

  static DEVICE void run(const Program& p, const Maps& maps) {
    constexpr u32 kParties = 3;
    const u32 smem = smem_address(dynamic_smem);
    const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    begin_cta(p, maps, kThreads);
    if (smem & 1023u) __trap();  // the swizzle pattern repeats every 1,024 bytes
    init(smem);
    if (threadIdx.x / 32 == Consumers * 4) Orders::fetch_start(smem, p);
    __syncthreads();
    if (group < Consumers) {
      registers_increase<kConsumerRegisters>();
      // The two orders are written out: with movers on both sides of them the tiles do not keep to their registers.
      if (Orders::start().of.tiles) {
        attend(smem, p, group);
        named_barrier_sync(kMoverBarrier, Consumers * 128);
        move_on(smem, p, maps, Orders::start().of.recycle);
      } else {
        const u32 role = move_on(smem, p, maps, Orders::start().role);
        join(smem, p, role);
        if (role != kNone) attend(smem, p, group);
      }
      if (threadIdx.x == 0) end_party<Signals>(smem, p, kEndCount, kParties);
    } else {
      registers_decrease<kProducerRegisters>();
      const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
      if (lane_id() == 0) {
        if (warp == 3) {
          Signals::run(smem, p);
        } else if (warp < 2) {
          if (warp == 0) {
            load(smem, p, maps);
          } else {
            store(smem, p, maps);
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

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

// What the loader tells of a tile, in shared memory.
struct AttentionOrder {
  u64 state;
  u64 logs;
  u32 index;
  u32 steps;  // 0: no more tiles
  u32 flags;
  u32 unused;
};

template <u32 Consumers, bool Overlapped>
struct AttentionInterpreter {
  using Tile = AttentionTile<Consumers, Overlapped, Overlapped, 2>;
  static constexpr u32 kThreads = (Consumers + 1) * 128;
  static constexpr u32 kConsumerRegisters = Consumers == 3 ? 160 : 232;
  static constexpr u32 kProducerRegisters = Consumers == 3 ? 32 : 40;
  static constexpr u32 kOrders = 2;
  static constexpr u32 kAheadSteps = 2;  // steps of 2 us that fetching descriptors is ahead of their use
  static constexpr u32 kOrder = (Tile::kSmemBytes + 7) / 8 * 8;
  static constexpr u32 kOrderFull = kOrder + kOrders * sizeof(AttentionOrder);
  static constexpr u32 kOrderEmpty = kOrderFull + kOrders * 8;
  static constexpr u32 kJoin = kOrderEmpty + kOrders * 8;  // the role with tiles is known
  static constexpr u32 kRole = kJoin + 8;
  static constexpr u32 kEndCount = kRole + 4;
  using Next = NextTile<(kEndCount + 4 + 15) / 16 * 16, 6>;  // q, k, v, state, o, l
  using Signals = Signaller<Next::kEnd>;
  // Copies go through Q, K and V; what is staged of O may still be read.
  using Moving = Moves<Consumers * 128, Tile::kO / kBoxBytes, 0, Signals::kEnd, Signals>;
  static constexpr u32 kSmemBytes = Moving::kEnd;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");
  static constexpr float kScaleLog2 = 1.4426950408889634f * 0.08838834764831845f;  // log2(e) / sqrt(128)

  static DEVICE void init(u32 smem) {
    Tile::init_barriers(smem);
    for (u32 s = 0; s < kOrders; ++s) {
      mbarrier_init(smem + kOrderFull + s * 8, 1);
      mbarrier_init(smem + kOrderEmpty + s * 8, Consumers * 4 + 1);  // consumer warps and the storer
    }
    mbarrier_init(smem + kJoin, 1);
    store_shared(smem + kEndCount, 0);
    Signals::init(smem);
    Moving::init(smem);
    mbarrier_init_fence();
  }

  static DEVICE volatile AttentionOrder& order(u32 slot) {
    return reinterpret_cast<volatile AttentionOrder*>(dynamic_smem + kOrder)[slot];
  }

  // The role with tiles that the CTA comes to, or kNone.
  static DEVICE u32 await_role(u32 smem) {
    mbarrier_wait(smem + kJoin, 0);
    return load_shared(smem + kRole);
  }

  static DEVICE void load(u32 smem, const Program& p, const Maps& maps) {
    const u32 role = await_role(smem);
    if (role == kNone) return;
    const Role& r = p.roles[role];
    RingPosition at;
    u32 index = claim_tile(p, r, 0);
    Next::fetch_task(smem, p, 0, index);
    Next::fetch_rest(smem, p, 0, index);
    for (u32 turn = 0;; ++turn) {
      const u32 slot = turn % kOrders;
      mbarrier_wait(smem + kOrderEmpty + slot * 8, (turn / kOrders & 1) ^ 1);
      volatile AttentionOrder& order_now = order(slot);
      const u32 order_full = smem + kOrderFull + slot * 8;
      order_now.index = index;
      order_now.steps = 0;
      if (index == kNone) {
        mbarrier_arrive(order_full);
        return;
      }
      stamp_taken(p, index);
      Next::arrived();
      const u32 flags = Next::task(turn).flags;
      const bool stateful = (flags & (kFirst | kLast)) != (kFirst | kLast);
      order_now.steps = Next::task(turn).steps;
      order_now.flags = flags;
      if (stateful) order_now.state = Next::region(turn, 3).address;
      if (flags & kLast) order_now.logs = Next::region(turn, stateful ? 5 : 4).address;
      mbarrier_arrive(order_full);
      const u32 waited_for = Next::await_start(p, turn, index);
      fence_global_to_async();
      stamp_start(p, index, waited_for, 0);
      mbarrier_wait(smem + Tile::kQEmpty, (turn & 1) ^ 1);
      mbarrier_arrive_expect_bytes(smem + Tile::kQFull, Tile::kQBytes);
      tma_load(smem + Tile::kQ, &maps.map[Next::region(turn, 0).map], smem + Tile::kQFull, Next::region(turn, 0).row, 0);
      u32 next = kNone;
      for (u32 j = 0; j < Next::task(turn).steps; ++j) {
        const u32 steps = Next::task(turn).steps;
        if (const u32 step_waits = Next::task(turn).step_waits) Next::await_step(p, turn, index, step_waits, j, Next::task(turn).steps);
        // Read anew at every step, because registers are dear, and before the wait, because after it every cycle counts.
        const u32 k_map = Next::region(turn, 1).map, k_row = Next::region(turn, 1).row + j * kKvRows;
        mbarrier_wait(smem + Tile::kKEmpty + at.slot * 8, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(smem + Tile::kKFull + at.slot * 8, kKvBytes);
        tma_load(smem + Tile::kK + at.slot * kKvBytes, &maps.map[k_map], smem + Tile::kKFull + at.slot * 8, k_row, 0);
        const u32 v_map = Next::region(turn, 2).map, v_row = Next::region(turn, 2).row + j * kKvRows;
        mbarrier_wait(smem + Tile::kVEmpty + at.slot * 8, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(smem + Tile::kVFull + at.slot * 8, kKvBytes);
        tma_load(smem + Tile::kV + at.slot * kKvBytes, &maps.map[v_map], smem + Tile::kVFull + at.slot * 8, v_row, 0);
        at.advance<2>();
        if (j == Next::claim_step(steps, kAheadSteps)) {
          next = claim_tile(p, r, turn + 1);
          Next::fetch_task(smem, p, turn + 1, next);
        }
        if (j == Next::rest_step(steps, kAheadSteps)) Next::fetch_rest(smem, p, turn + 1, next);
      }
      index = next;
    }
  }

  static DEVICE void store(u32 smem, const Program& p, const Maps& maps) {
    if (await_role(smem) == kNone) return;
    u32 parity = 0;
    RingPosition order_at;
    for (;;) {
      mbarrier_wait(smem + kOrderFull + order_at.slot * 8, order_at.parity);
      const u32 index = order(order_at.slot).index;
      mbarrier_arrive(smem + kOrderEmpty + order_at.slot * 8);
      order_at.advance<kOrders>();
      if (index == kNone) return;
      const Task task = p.tasks[index];
      const bool last = (task.flags & kLast) != 0;
      const u32 out = task.first_region + ((task.flags & kFirst) ? 3 : 4);
      for (u32 c = 0; c < Consumers; ++c) {
        mbarrier_wait(smem + Tile::kOReady + c * 8, parity);
        if (last) {
          const Region& o = p.regions[out];
          tma_store(&maps.map[o.map], smem + Tile::kO + c * (64 * kHeadDim * 2), o.row + c * 64, 0);
          store_commit();
        }
      }
      stamp_free(p, index);
      if (last) store_wait_smem_read<0>();
      for (u32 c = 0; c < Consumers; ++c) mbarrier_arrive(smem + Tile::kOFree + c * 8);
      parity ^= 1;
      if (last) store_wait_visible<0>();
      Signals::post(smem, p, index, task.signals, task.first_signal);
    }
  }

  // A consumer; returns when the loader has no more tiles.
  static DEVICE void attend(u32 smem, u32 consumer) {
    typename Tile::Consumer me = Tile::make_consumer(smem, consumer);
    RingPosition order_at;
    Tile::begin_turns(consumer);
    for (;;) {
      mbarrier_wait(smem + kOrderFull + order_at.slot * 8, order_at.parity);
      const u32 steps = order(order_at.slot).steps;
      if (steps == 0) break;
      const u8* from = order(order_at.slot).flags & kFirst ? nullptr : reinterpret_cast<u8*>(order(order_at.slot).state);
      typename Tile::State state;
      Tile::attend_block(smem, me, state, steps, kScaleLog2, from);
      if (order(order_at.slot).flags & kLast) {
        Tile::write_logs(state, kScaleLog2, reinterpret_cast<float*>(order(order_at.slot).logs), consumer);
        Tile::stage_output(smem, state.o, state.row_sum, consumer, me.task_parity);
      } else {
        Tile::write_state(state, reinterpret_cast<u8*>(order(order_at.slot).state), consumer);
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(smem + Tile::kOReady + consumer * 8);
      }
      me.task_parity ^= 1;
      __syncwarp();
      if (lane_id() == 0) mbarrier_arrive(smem + kOrderEmpty + order_at.slot * 8);
      order_at.advance<kOrders>();
    }
    Tile::end_turns(consumer);
  }

  // From role to role, up to one with tiles or to the end.
  static DEVICE u32 move_on(u32 smem, const Program& p, const Maps& maps, u32 role) {
    while (role != kNone && p.roles[role].tiles == 0) {
      role = Moving::move(smem, p, maps, role, p.starts[block_index()].cta, thread_index());
    }
    return role;
  }

  static DEVICE void run(const Program& p, const Maps& maps) {
    constexpr u32 kParties = 3;
    const u32 smem = smem_address(dynamic_smem);
    const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) {
      if (smem & 1023u) __trap();  // the swizzle pattern repeats every 1,024 bytes
      begin_cta(p);
      init(smem);
    }
    __syncthreads();
    if (group < Consumers) {
      registers_increase<kConsumerRegisters>();
      // The two orders are written out: with movers on both sides of them the tiles do not keep to their registers.
      const u32 first = p.starts[block_index()].role;
      if (p.roles[first].tiles) {
        join(smem, first);
        attend(smem, group);
        named_barrier_sync(kMoverBarrier, Consumers * 128);
        move_on(smem, p, maps, p.roles[load_shared(smem + kRole)].recycle);
      } else {
        const u32 role = move_on(smem, p, maps, first);
        join(smem, role);
        if (role != kNone) attend(smem, group);
      }
      if (threadIdx.x == 0) end_party(p, smem + kEndCount, kParties, smem + Tile::kFinished);
    } else {
      registers_decrease<kProducerRegisters>();
      const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
      if (lane_id() == 0) {
        if (warp == 3) {
          Signals::run(smem, p, Tile::kFinished);
        } else if (warp < 2) {
          if (warp == 0) {
            load(smem, p, maps);
          } else {
            store(smem, p, maps);
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

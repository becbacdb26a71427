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
#include "interpreter.cuh"

template <u32 Consumers, bool Overlapped>
struct AttentionInterpreter : Interpreter<AttentionInterpreter<Consumers, Overlapped>> {
  using Tile = AttentionTile<Consumers, Overlapped, Overlapped, 2>;
  static constexpr u32 kGroups = Consumers;
  static constexpr u32 kConsumerRegisters = Consumers == 3 ? 160 : 240;
  static constexpr u32 kProducerRegisters = Consumers == 3 ? 32 : 24;
  static constexpr u32 kStorers = 1;
  static constexpr u32 kAheadSteps = 2;  // steps of 2 us that the claim of a tile is ahead of its first load
  static constexpr u32 kJoin = (Tile::kSmemBytes + 7) / 8 * 8;  // the role with tiles is known
  static constexpr u32 kHasRole = kJoin + 8;
  // q, k, v, state, o, l; consumer warps and the storer
  using Orders = OrderRing<(kHasRole + 4 + 15) / 16 * 16, 4, 6, Consumers * 4 + 1>;
  using Signals = Signaller<(Orders::kEnd + 15) / 16 * 16>;
  // Copies go through Q, K and V; what is staged of O may still be read.
  using Moving = Moves<Consumers * 128, Tile::kO / kBoxBytes, 0, Signals::kEnd, Signals>;
  static constexpr u32 kSmemBytes = Moving::kEnd;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");

  static DEVICE void init_words(u32) {}

  static DEVICE typename Tile::Operands operands(u32 smem, u32 turn) {
    const Place q = Orders::place(smem, turn, 0), k = Orders::place(smem, turn, 1), v = Orders::place(smem, turn, 2);
    return {&tensor_maps[q.map], &tensor_maps[k.map], &tensor_maps[v.map], q.row, k.row, v.row};
  }

  static DEVICE u32 load_ahead(u32 smem, const typename Orders::Counts&) {
    typename Tile::Loader me(0);
    Tile::template load_step<true>(smem, me, operands(smem, 0), 0);
    return 1;
  }

  static DEVICE void load(u32 smem, const Program& p, u32 ahead) {
    typename Tile::Loader me(ahead);
    if (!Orders::begin(smem, p, kJoin, kHasRole)) return;
    for (u32 turn = 0;; ++turn) {
      const u32 index = Orders::await(smem, turn);
      if (index == kNone) return;
      stamp_taken(p, index);
      const typename Orders::Counts counts = Orders::counts(smem, turn);
      const u32 waited_for = Orders::await_start(smem, p, turn, index, counts.start_waits);
      stamp_start(p, Orders::index(smem, turn), waited_for, 0);  // read again: this warp has few registers
      const u32 claim_step = Orders::claim_step(counts.steps, kAheadSteps);
      Tile::load_task(smem, me, operands(smem, turn), ahead, counts.steps, [&](u32 j) {
        if (j == claim_step) Orders::claim(smem, p, turn + 1);
        if (counts.step_waits > 0) Orders::await_step(smem, p, turn, index, counts, j);
      });
      ahead = 0;
    }
  }

  static DEVICE void store(u32 smem, const Program& p, u32) {
    u32 turn = 0;
    for (u32 index = Orders::await(smem, 0); index != kNone; ++turn) {
      const volatile Task& task = Orders::task(turn);
      const bool last = (task.flags & kLast) != 0;
      const Place o = Orders::place(smem, turn, task.flags & kFirst ? 3 : 4);
      const TensorMap* const map = tensor_maps + o.map;
      for (u32 c = 0; c < Consumers; ++c) {
        mbarrier_wait(smem + Tile::kOReady + c * 8, turn & 1);
        if (last) {
          tma_store(map, smem + Tile::kO + c * (64 * kHeadDim * 2), o.row + c * 64, 0);
          store_commit();
        }
      }
      stamp_free(p, index);
      if (last) store_wait_smem_read<0>();
      for (u32 c = 0; c < Consumers; ++c) mbarrier_arrive(smem + Tile::kOFree + c * 8);
      // The next tile was claimed before this one's last operands were loaded.
      const u32 signals = task.signals, first_signal = task.first_signal, next = Orders::await(smem, turn + 1);
      Orders::give_back(smem, turn);
      if (last) store_wait_visible<0>();
      Signals::post(smem, p, index, signals, first_signal);
      index = next;
    }
  }

  // A consumer; returns when the loader has no more tiles.
  static DEVICE void compute(u32 smem, const Program& p, u32 consumer) {
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
};

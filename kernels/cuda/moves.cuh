// The movers of an interpreter: the CTA's consumer warps, while the CTA has a role without tiles. Copies, gathers, sums,
// zeros, merges, puts.
#pragma once
#include "merge.cuh"
#include "reduce.cuh"
#include "tasks.cuh"

constexpr u32 kMoverBarrier = 5;
constexpr u32 kBoxBytes = 16384;  // 128 rows of 64 elements: what a copy moves by one instruction

// Copies pass through Slots slots of shared memory from Base on; words and barriers lie from Control on. Signals raises
// the flags of finished tasks.
template <u32 Threads, u32 Slots, u32 Base, u32 Control, class Signals>
struct Moves {
  static_assert(Base % 1024 == 0 && Control % 8 == 0, "swizzled boxes, mbarriers");
  static constexpr u32 kFull = Control;
  static constexpr u32 kParity = kFull + Slots * 8;
  static constexpr u32 kTask = kParity + Slots * 4;
  static constexpr u32 kEnd = kTask + 4;

  static DEVICE void init(u32 smem) {
#pragma unroll
    for (u32 s = 0; s < Slots; ++s) mbarrier_init(smem + kFull + s * 8, 1);
#pragma unroll
    for (u32 s = 0; s < Slots; ++s) store_shared(smem + kParity + s * 4, 0);
  }

  static DEVICE void await_slot(u32 smem, u32 slot) {
    const u32 parity = load_shared(smem + kParity + slot * 4);
    mbarrier_wait(smem + kFull + slot * 8, parity);
    store_shared(smem + kParity + slot * 4, parity ^ 1);
  }

  // One thread moves `units` pieces through `slots` slots, first slot `first`: load(unit, slot address, barrier) starts
  // a load and says how many bytes come, store(unit, slot address) starts its stores. Loads lead stores by half the
  // slots, or, without overlap, a whole set of slots is loaded, then stored until that is visible.
  template <class Load, class Store>
  static DEVICE void pipe(u32 smem, u32 units, u32 first, u32 slots, bool overlap, Load load, Store store) {
    const u32 lead = overlap ? (slots + 1) / 2 : slots;
    for (u32 i = 0; i < units + lead; ++i) {
      if (i < units) {
        if (!overlap) {
          if (i % slots == 0 && i > 0) {
            for (u32 u = i - slots; u < i; ++u) store_one(smem, u, first, slots, store);
            store_wait_visible<0>();
          }
        } else if (i >= slots) {
          // slots - lead - 1 stores are younger than the one that used this slot.
          slots < 4 ? store_wait_smem_read<0>() : store_wait_smem_read<1>();
        }
        const u32 slot = first + i % slots;
        load(i, smem + Base + slot * kBoxBytes, smem + kFull + slot * 8);
      }
      if (overlap && i >= lead) store_one(smem, i - lead, first, slots, store);
    }
    if (!overlap && units > 0) {
      for (u32 u = (units - 1) / slots * slots; u < units; ++u) store_one(smem, u, first, slots, store);
    }
    store_wait_visible<0>();
  }
  template <class Store>
  static DEVICE void store_one(u32 smem, u32 unit, u32 first, u32 slots, Store store) {
    const u32 slot = first + unit % slots;
    await_slot(smem, slot);
    store(unit, smem + Base + slot * kBoxBytes);
    store_commit();
  }

  // Boxes of 128 rows and 64 elements.
  static DEVICE void copy(u32 smem, const Program& p, const Task& task, u32 first, u32 slots) {
    const Region src = p.regions[task.first_region];
    const u32 across = task.row_bytes / 128, each = across * (task.rows / 128);
    fence_global_to_async();
    pipe(
        smem, task.blocks * each, first, slots, true,
        [&](u32 unit, u32 slot, u32 bar) {
          const u32 block = unit / each, in_block = unit % each;
          mbarrier_arrive_expect_bytes(bar, kBoxBytes);
          tma_load(slot, &tensor_maps[src.map], bar, src.row + block * src.block_rows + in_block / across * 128,
                   src.column_block + block * src.block_columns + in_block % across);
        },
        [&](u32 unit, u32 slot) {
          const u32 block = unit / each, in_block = unit % each;
          for (u32 o = 0; o < task.outputs; ++o) {
            const Region& dst = p.regions[task.first_region + 1 + o];
            tma_store(&tensor_maps[dst.map], slot, dst.row + block * dst.block_rows + in_block / across * 128,
                      dst.column_block + block * dst.block_columns + in_block % across);
          }
        });
  }

  // One thread fetches the rows that there are; the other warps write the rows of zeros meanwhile. A row passes in
  // pieces of at most a slot.
  static DEVICE void gather(u32 smem, const Program& p, const Task& task, u32 thread) {
    const Region& dst = p.regions[task.first_region];
    u8* const base = reinterpret_cast<u8*>(dst.address);
    const u64* const sources = p.sources + task.steps;
    if (thread >= 32) {
      for (u32 row = 0; row < task.rows; ++row) {
        if (sources[row] != 0) continue;
        for (u32 at = (thread - 32) * 16; at < task.row_bytes; at += (Threads - 32) * 16) {
          store16(base + u64(row) * dst.row_pitch + at, {{0, 0, 0, 0}});
        }
      }
    } else if (thread == 0) {
      fence_global_to_async();
      const u32 pieces = (task.row_bytes + kBoxBytes - 1) / kBoxBytes;
      const u32 slots = min(task.blocks, Slots);  // rows in flight
      const auto bytes = [&](u32 unit) { return min(kBoxBytes, task.row_bytes - unit % pieces * kBoxBytes); };
      pipe(
          smem, task.rows * pieces, 0, slots, (task.flags & kOverlap) != 0,
          [&](u32 unit, u32 slot, u32 bar) {
            const u64 source = sources[unit / pieces];
            if (source == 0) {
              mbarrier_arrive(bar);
              return;
            }
            mbarrier_arrive_expect_bytes(bar, bytes(unit));
            bulk_load(slot, reinterpret_cast<const u8*>(source) + unit % pieces * kBoxBytes, bytes(unit), bar);
          },
          [&](u32 unit, u32 slot) {
            if (sources[unit / pieces] == 0) return;
            bulk_store(base + u64(unit / pieces) * dst.row_pitch + unit % pieces * kBoxBytes, slot, bytes(unit));
          });
    }
  }

  // All movers; every region has the task's blocks, rows and row bytes.
  template <u32 Unroll>
  static DEVICE void reduce(const Program& p, const Task& task, u32 thread) {
    const u32 per_row = task.row_bytes / 16, per_block = per_row * task.rows, vectors = per_block * task.blocks;
    for (u32 at = thread; at < vectors; at += Threads * Unroll) {
      float sum[Unroll][8];
      u32 row[Unroll], block[Unroll], column[Unroll];
#pragma unroll
      for (u32 u = 0; u < Unroll; ++u) {
        const u32 v = min(at + u * Threads, vectors - 1);
        block[u] = v / per_block;
        const u32 rest = v - block[u] * per_block;
        row[u] = rest / per_row;
        column[u] = (rest - row[u] * per_row) * 16;
      }
      for (u32 i = 0; i < task.inputs; ++i) {
        const Region& in = p.regions[task.first_region + i];
        const u8* base = reinterpret_cast<const u8*>(in.address);
        Vector16 x[Unroll];
#pragma unroll
        for (u32 u = 0; u < Unroll; ++u) x[u] = load16(base + block[u] * in.block_pitch + u64(row[u]) * in.row_pitch + column[u]);
#pragma unroll
        for (u32 u = 0; u < Unroll; ++u) {
#pragma unroll
          for (u32 j = 0; j < 4; ++j) {
            sum[u][2 * j] = bf16_low(x[u].x[j]) + (i == 0 ? 0.0f : sum[u][2 * j]);
            sum[u][2 * j + 1] = bf16_high(x[u].x[j]) + (i == 0 ? 0.0f : sum[u][2 * j + 1]);
          }
        }
      }
      for (u32 o = 0; o < task.outputs; ++o) {
        const Region& out = p.regions[task.first_region + task.inputs + o];
        u8* base = reinterpret_cast<u8*>(out.address);
#pragma unroll
        for (u32 u = 0; u < Unroll; ++u) {
          Vector16 y;
#pragma unroll
          for (u32 j = 0; j < 4; ++j) y.x[j] = pack_bf16(sum[u][2 * j], sum[u][2 * j + 1]);
          if (at + u * Threads < vectors) store16(base + block[u] * out.block_pitch + u64(row[u]) * out.row_pitch + column[u], y);
        }
      }
    }
  }

  static DEVICE void fill(const Program& p, const Task& task, u32 thread) {
    const Region& out = p.regions[task.first_region];
    const u32 per_row = task.row_bytes / 16, per_block = per_row * task.rows;
    for (u32 v = thread; v < per_block * task.blocks; v += Threads) {
      const u64 block = v / per_block, row = v % per_block / per_row, column = v % per_row * 16;
      store16(reinterpret_cast<u8*>(out.address) + block * out.block_pitch + row * out.row_pitch + column, {{0, 0, 0, 0}});
    }
  }

  // One warp by itself: copies, puts and syncs.
  static DEVICE void move_lane(u32 smem, const Program& p, const Role& r, u32 cta, u32 warp) {
    const u32 lane = lane_id(), slots = Slots / r.lanes;
    for (u32 turn = 0;; ++turn) {
      const u32 index = claim(p, r, warp * r.ctas + cta, r.ctas * r.lanes, turn, lane);
      if (index == kNone) return;
      if (lane == 0) stamp_taken(p, index);
      const Task task = p.tasks[index];
      const u32 waited_for = await_start(p, task, index, 3, lane, 32);
      __syncwarp();
      if (lane == 0) {
        stamp_start(p, index, waited_for, warp);
        if (task.op == kCopy) copy(smem, p, task, warp * slots, slots);
        if (task.op == kPut) push_put(p, index);
        stamp_free(p, index);
        Signals::post(smem, p, index, task.signals, task.first_signal);
      }
      __syncwarp();
    }
  }

  static DEVICE void move_task(u32 smem, const Program& p, u32 index, u32 thread) {
    const Task task = p.tasks[index];
    if (task.op == kReduce) {
      reduce<Threads == 256 ? 6 : 4>(p, task, thread);
    } else if (task.op == kFill) {
      fill(p, task, thread);
    } else if (task.op == kGather) {
      gather(smem, p, task, thread);
    } else if (task.op == kMerge) {
      merge<Threads>(p, task, thread);
    } else if (thread == 0) {
      if (task.op == kCopy) copy(smem, p, task, 0, Slots);
      if (task.op == kPut) push_put(p, index);
    }
    fence_global_to_async();  // sums may be read by the copy engine next
    named_barrier_sync(kMoverBarrier, Threads);
    if (thread == 0) {
      stamp_free(p, index);
      Signals::post(smem, p, index, task.signals, task.first_signal);
    }
  }

  // Does a role's tasks; returns the role that the CTA joins next, or kNone.
  static DEVICE u32 move(u32 smem, const Program& p, u32 role, u32 cta, u32 thread) {
    const Role r = p.roles[role];
    const u32 warp = thread / 32;
    if (r.lanes > 1) {
      if (warp < r.lanes) move_lane(smem, p, r, cta, warp);
      named_barrier_sync(kMoverBarrier, Threads);
      return r.recycle;
    }
    for (u32 turn = 0;; ++turn) {
      if (warp == 0) {
        const u32 index = claim(p, r, cta, r.ctas, turn, thread);
        u32 waited_for = kNone;
        if (index != kNone) {
          if (thread == 0) stamp_taken(p, index);
          waited_for = await_start(p, p.tasks[index], index, 3, thread, 32);
        }
        __syncwarp();
        if (thread == 0) {
          if (index != kNone) stamp_start(p, index, waited_for, 0);
          store_shared(smem + kTask, index);
        }
      }
      named_barrier_sync(kMoverBarrier, Threads);
      const u32 index = load_shared(smem + kTask);
      if (index == kNone) break;
      move_task(smem, p, index, thread);
    }
    named_barrier_sync(kMoverBarrier, Threads);  // the task word is read before it is written again
    return r.recycle;
  }
};

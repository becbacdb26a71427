// Tiles of a CTA: the loader claims them and has their orders fetched to shared memory while it still feeds the tile
// before; storers, and consumers of attention, read them there. A trip to device memory takes most of a microsecond.
#pragma once
#include "tasks.cuh"

// Where a region lies in its map: the second 16 bytes of a Region, but the first word.
struct Place {
  u32 map, row, column_block;
};
constexpr u32 kPlace = 16;

// A ring of orders in shared memory, behind what the CTA begins with, from Control on. A bulk copy fetches the task, the
// waits and the first Regions regions of an order. Readers are those who give a slot back.
template <u32 Control, u32 Slots, u32 Regions, u32 Readers>
struct OrderRing {
  static_assert(Control % 16 == 0 && sizeof(Task) % 16 == 0 && sizeof(Region) % 16 == 0 && sizeof(Wait) == 16, "16 bytes a piece");
  static_assert((Slots & (Slots - 1)) == 0 && Regions <= kOrderRegions, "slots by mask");
  static constexpr u32 kBytes = sizeof(Task) + kOrderWaits * sizeof(Wait) + Regions * sizeof(Region);
  static constexpr u32 kSteps = 13;  // word of a task
  static constexpr u32 kRegions = sizeof(Task) + kOrderWaits * sizeof(Wait);
  static constexpr u32 kHead = sizeof(Start) - sizeof(Order);
  static constexpr u32 kOrders = Control + kHead;
  static constexpr u32 kFull = kOrders + Slots * kBytes;
  static constexpr u32 kEmpty = kFull + Slots * 8;
  static constexpr u32 kIndex = kEmpty + Slots * 8;
  static constexpr u32 kEnd = kIndex + Slots * 4;

  static DEVICE void init(u32 smem) {
    for (u32 s = 0; s < Slots; ++s) {
      mbarrier_init(smem + kFull + s * 8, 1);
      mbarrier_init(smem + kEmpty + s * 8, Readers);
    }
  }

  // Where the CTA began; its role is the one that the tiles belong to.
  static DEVICE volatile Start& start() { return *reinterpret_cast<volatile Start*>(dynamic_smem + Control); }
  static DEVICE void put_role(const Role& r) {
    volatile Role& mine = start().of;
    mine.first_task = r.first_task;
    mine.tasks = r.tasks;
    mine.claim = r.claim;
    mine.ctas = r.ctas;
    mine.cursor = r.cursor;
    mine.first_order = r.first_order;
  }

  // One thread, turn by turn: claims the CTA's `turn`-th tile. Its order is on its way when this returns. The first tickets
  // are those of the CTAs that begin in the role, one each.
  static DEVICE void claim(u32 smem, const Program& p, u32 turn) {
    const volatile Role& r = start().of;
    const u32 t = r.claim == kStrided ? start().cta + turn * r.ctas : r.ctas + atomicAdd(p.words + r.cursor, 1u);
    const bool some = t < r.tasks;
    const u32 slot = turn % Slots, full = smem + kFull + slot * 8;
    mbarrier_wait(smem + kEmpty + slot * 8, (turn / Slots & 1) ^ 1);
    if (some) {
      store_shared(smem + kIndex + slot * 4, r.first_task + t);
      mbarrier_arrive_expect_bytes(full, kBytes);
      bulk_load(smem + kOrders + slot * kBytes, p.orders + (r.first_order + t), kBytes, full);
    } else {
      claim_none(smem, turn);
    }
  }
  static DEVICE void claim_none(u32 smem, u32 turn) {
    store_shared(smem + kIndex + turn % Slots * 4, kNone);
    store_shared(smem + kOrders + turn % Slots * kBytes + kSteps * 4, 0);
    mbarrier_arrive(smem + kFull + turn % Slots * 8);
  }
  // A warp, before the CTA meets: brings the CTA's start, a piece by each lane.
  static DEVICE Quad fetch_start(const Program& p) {
    Quad x;
    // All that comes after it waits for this: what a launch reads first is to stay in L2 over the launch before.
    asm volatile(
        "{\n.reg .b64 keep;\n"
        "createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n"
        "ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], keep;\n}"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(reinterpret_cast<const u8*>(p.starts + block_index()) + piece_at())
        : "memory");
    return x;
  }
  static DEVICE void keep_start(u32 smem, const Quad& x) {
    asm volatile("st.volatile.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem + Control + piece_at()), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
  static DEVICE u32 piece_at() {
    static_assert(kHead + kBytes <= 32 * 16 && kHead % 16 == 0, "a piece for each lane");
    return min(lane_id() * 16, kHead + kBytes - 16);
  }

  // The loader's thread: the CTA's first tile. Waits at `join` for the role, if the CTA begins with other work; false if it
  // comes to none with tiles.
  static DEVICE bool begin(u32 smem, const Program& p, u32 join, u32 has_role) {
    const u32 index = start().index;
    if (index != kNone) {
      store_shared(smem + kIndex, index);
      mbarrier_arrive(smem + kFull);
      return true;
    }
    if (start().of.tiles == 0) {
      mbarrier_wait(smem + join, 0);
      if (load_shared(smem + has_role) == 0) {
        claim_none(smem, 0);
        return false;
      }
    }
    claim(smem, p, 0);
    return true;
  }

  // The `turn`-th tile, or kNone; its order has come.
  static DEVICE u32 await(u32 smem, u32 turn) {
    mbarrier_wait(smem + kFull + turn % Slots * 8, turn / Slots & 1);
    return index(smem, turn);
  }
  // The steps of the `turn`-th tile, 0 if there is none, and its flags, by one load.
  static DEVICE void await_steps(u32 smem, u32 turn, u32& steps, u32& flags) {
    mbarrier_wait(smem + kFull + turn % Slots * 8, turn / Slots & 1);
    const Quad x = load_shared_quad(smem + kOrders + turn % Slots * kBytes + (kSteps - 1) * 4);
    // Uniform, and known to be: the loop over the steps keeps its positions in uniform registers.
    steps = __shfl_sync(~0u, x.y, 0);
    flags = __shfl_sync(~0u, x.w, 0);
  }
  // What a loader needs of the `turn`-th tile, by few loads that do not wait for each other.
  struct Counts {
    u32 start_waits, step_waits, steps;
  };
  static DEVICE Counts counts(u32 smem, u32 turn) {
    const u32 order = smem + kOrders + turn % Slots * kBytes;
    const Quad begin = load_shared_quad(order), end = load_shared_quad(order + (kSteps - 1) * 4);
    return {begin.z, begin.w, end.y};
  }
  static DEVICE Place place(u32 smem, u32 turn, u32 i) {
    const Quad x = load_shared_quad(smem + kOrders + turn % Slots * kBytes + kRegions + i * sizeof(Region) + kPlace);
    return {x.y, x.z, x.w};
  }
  static DEVICE u32 index(u32 smem, u32 turn) { return load_shared(smem + kIndex + turn % Slots * 4); }
  static DEVICE void give_back(u32 smem, u32 turn) { mbarrier_arrive(smem + kEmpty + turn % Slots * 8); }

  static DEVICE const volatile Task& task(u32 turn) {
    return *reinterpret_cast<const volatile Task*>(dynamic_smem + kOrders + turn % Slots * kBytes);
  }
  static DEVICE const volatile Region& region(u32 turn, u32 i) {
    return reinterpret_cast<const volatile Region*>(dynamic_smem + kOrders + turn % Slots * kBytes + kRegions)[i];
  }
  // The i-th wait of the task, start first.
  static DEVICE Wait wait(const Program& p, u32 turn, u32 i) {
    if (i >= kOrderWaits) return p.waits[task(turn).first_wait + i];
    const volatile Wait& w =
        reinterpret_cast<const volatile Wait*>(dynamic_smem + kOrders + turn % Slots * kBytes + sizeof(Task))[i];
    return {w.word, w.count, w.stride, w.at_least};
  }

  // Waits for the flags of the start; the word waited for last, or kNone.
  static DEVICE u32 await_start(u32 smem, const Program& p, u32 turn, u32 index, u32 waits) {
    u32 waited_for = kNone;
    if (__builtin_expect(waits == 0, true)) return waited_for;
    for (u32 i = 0; i < waits; ++i) {
      const Wait w = wait(p, turn, i);
      for (u32 f = 0; f < w.count; ++f) {
        if (::await(p, w.word + f * w.stride, w.at_least, index, 0)) waited_for = w.word + f * w.stride;
      }
    }
    fence_global_to_async();
    return waited_for;
  }

  // Waits for the flags that step `k` is the first to need.
  static DEVICE void await_step(u32 smem, const Program& p, u32 turn, u32 index, const Counts& counts, u32 k) {
    for (u32 i = 0; i < counts.step_waits; ++i) {
      const Wait w = wait(p, turn, counts.start_waits + i);
      const u32 steps_each = counts.steps / w.count;
      if (k % steps_each == 0) {
        ::await(p, w.word + k / steps_each * w.stride, w.at_least, index, 0);
        fence_global_to_async();
      }
    }
  }

  // The step of a tile before which the next one is claimed: late, so that a ticket goes to a CTA that is about to be
  // free, and `ahead` steps early, so that the order is there.
  static DEVICE u32 claim_step(u32 steps, u32 ahead) { return steps > ahead ? steps - ahead : steps > 1 ? 1 : 0; }
};

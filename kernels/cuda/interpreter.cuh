// What the interpreters share: how a CTA begins, goes from role to role, and ends.
#pragma once
#include "moves.cuh"
#include "orders.cuh"

// Of is the interpreter: its tile, where its words lie in shared memory, and what its warps do with tiles. kGroups groups of
// four warps compute, or move; then come a warp that loads, kStorers that store, and the last one, that signals.
template <class Of>
struct Interpreter {
  // All of the CTA waits for it: threads of different warps. A barrier's address must be uniform, so that lanes
  // side by side would take turns.
  static DEVICE void init(u32 smem) {
    if (threadIdx.x == 0) {
      Of::Signals::init(smem);
      mbarrier_init_fence();
    } else if (threadIdx.x == 32) {
      mbarrier_init(smem + Of::kJoin, 1);
      Of::Orders::init(smem);
      mbarrier_init_fence();
      Of::init_words(smem);
    } else if (threadIdx.x == 64) {
      Of::Moving::init(smem);
      mbarrier_init_fence();
    }
  }

  // The loader's warp: a trip to memory, the tile's barriers meanwhile, then what the first tile begins with, before the CTA
  // meets. Returns how many steps' operands are on their way.
  static DEVICE u32 begin_loads(u32 smem, const Program& p) {
    using Orders = typename Of::Orders;
    const Quad piece = Orders::fetch_start(p);
    if (lane_id() == 0) Of::Tile::init_barriers(smem);
    Orders::keep_start(smem, piece);
    __syncwarp();
    if (lane_id() != 0 || Orders::start().index == kNone) return 0;
    const typename Orders::Counts counts = Orders::counts(smem, 0);
    // The claim of the next tile comes before a later step; see Orders::claim_step.
    return counts.start_waits + counts.step_waits > 0 || counts.steps < 2 ? 0 : Of::load_ahead(smem, counts);
  }

  // From role to role, up to one with tiles or to the end.
  static DEVICE u32 move_on(u32 smem, const Program& p, u32 role) {
    while (role != kNone && p.roles[role].tiles == 0) {
      role = Of::Moving::move(smem, p, role, Of::Orders::start().cta, thread_index());
    }
    return role;
  }

  // The consumers have come to a role with tiles, or to the end.
  static DEVICE void join(u32 smem, const Program& p, u32 role) {
    if (threadIdx.x != 0) return;
    store_shared(smem + Of::kHasRole, role != kNone);
    if (role != kNone) Of::Orders::put_role(p.roles[role]);
    mbarrier_arrive(smem + Of::kJoin);
  }

  static DEVICE void run(const Program& p) {
    constexpr u32 kLoader = Of::kGroups * 4, kParties = 2 + Of::kStorers;
    const u32 smem = smem_address(dynamic_smem);
    const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    if (smem & 1023u) __trap();  // the swizzle pattern repeats every 1,024 bytes
    CtaTimes begun;
    u32 ahead = 0;
    if (threadIdx.x / 32 == kLoader) {
      ahead = begin_loads(smem, p);
    } else if (threadIdx.x / 32 == kLoader + 3) {
      begun = begin_cta(p);
    } else {
      init(smem);
    }
    __syncthreads();
    ahead = __shfl_sync(~0u, ahead, 0);  // uniform, and known to be: the loader's loop keeps its step in a uniform register
    if (group < Of::kGroups) {
      registers_increase<Of::kConsumerRegisters>();
      // The two orders are written out: with movers on both sides of them the products do not keep to their registers.
      if (Of::Orders::start().of.tiles) {
        Of::compute(smem, p, group);
        named_barrier_sync(kMoverBarrier, Of::kGroups * 128);
        move_on(smem, p, Of::Orders::start().of.recycle);
      } else {
        const u32 role = move_on(smem, p, Of::Orders::start().role);
        join(smem, p, role);
        if (role != kNone) Of::compute(smem, p, group);
      }
      if (threadIdx.x == 0) Of::Signals::leave(smem);
    } else {
      registers_decrease<Of::kProducerRegisters>();
      const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
      if (lane_id() == 0) {
        if (warp == 3) {
          note_begin(p, begun);
          Of::Signals::run(smem, p, kParties);
          note_end(p);
        } else if (warp <= Of::kStorers) {
          if (warp == 0) {
            Of::load(smem, p, ahead);
          } else {
            Of::store(smem, p, warp - 1);
          }
          Of::Signals::leave(smem);
        }
      }
    }
  }
};

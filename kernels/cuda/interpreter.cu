// Runs a schedule of the GEMM family: one CTA per block, its role by its block index.
//
// Waits for: the flags of its tasks, in device memory. Reads and writes: the regions of its tasks.
// Signals: flags, after the task's writes are visible and its reads done; puts go to the host through a FIFO.
//
//   warps 0-7   two consumers: wgmma of the CTA's GEMM tasks; then, or at once, the movers: copies, sums, puts
//   warp 8      loader: claims GEMM tasks, waits, fetches operands
//   warps 9-10  storers, one per consumer: output gate, stores, signals
//   warp 11     watchdog
#include "flags.cuh"
#include "gemm_tile.cuh"
#include "program.cuh"
#include "reduce.cuh"

constexpr u32 kTaskSlots = 4;
constexpr u32 kEndSlots = 8;  // how far one storer may be ahead of the other, in tasks
constexpr u32 kMovers = kConsumers * 128;
constexpr u32 kMoverBarrier = 5;
constexpr u32 kBoxBytes = 16384;  // 128 rows of 64 elements: what a copy moves by one instruction
constexpr u64 kReportCycles = 1ull << 22;

DEVICE u32 load_shared(u32 address) {
  u32 v;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
DEVICE void store_shared(u32 address, u32 value) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
DEVICE u32 add_shared(u32 address, u32 value) {
  u32 old;
  asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(address), "r"(value) : "memory");
  return old;
}
DEVICE u32 read_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

DEVICE u32 read_flag(const Program& p, u32 word) {
  return p.peers ? flag_read_acquire_system(p.words + word) : flag_read_acquire(p.words + word);
}

// Waits for a flag without a bound; a wait that lasts is written where the host finds it after the watchdog's trap.
DEVICE void await(const Program& p, u32 word, u32 level, u32 task, u32 party) {
  u32 have = read_flag(p, word);
  if (have >= level) return;
  const u64 begin = clock_cycles();
  bool reported = false;
  Blocked* report = p.blocked + blockIdx.x * kBlockedPerCta + party;
  while ((have = read_flag(p, word)) < level) {
    if (!reported && clock_cycles() - begin > kReportCycles) {
      reported = true;
      *report = {task + 1, word, have, level};
    }
  }
  if (reported) report->task = 0;
}

DEVICE bool reached(const Program& p, const Task& task) {
  for (u32 i = 0; i < task.start_waits; ++i) {
    const Wait w = p.waits[task.first_wait + i];
    for (u32 f = 0; f < w.count; ++f) {
      if (read_flag(p, w.word + f * w.stride) < w.at_least) return false;
    }
  }
  return true;
}

// The lanes of a warp share the flags of the start.
DEVICE void await_start(const Program& p, const Task& task, u32 index, u32 party, u32 lane, u32 lanes) {
  for (u32 i = 0; i < task.start_waits; ++i) {
    const Wait w = p.waits[task.first_wait + i];
    for (u32 f = lane; f < w.count; f += lanes) await(p, w.word + f * w.stride, w.at_least, index, party);
  }
}

DEVICE void signal(const Program& p, const Task& task) {
  for (u32 i = 0; i < task.signals; ++i) {
    const Signal s = p.signals[task.first_signal + i];
    u32* flag = reinterpret_cast<u32*>(s.address);
    if (s.remote) {
      flag_add_release_system(flag, s.add);
    } else {
      flag_add_release(flag, s.add);
    }
  }
}

// The `turn`-th task of a worker, or kNone. A warp calls it; Ready tasks come with their start waits met.
DEVICE u32 claim(const Program& p, const Role& r, u32 worker, u32 workers, u32 turn, u32 lane) {
  if (r.claim == kStrided) {
    const u64 t = u64(worker) + u64(turn) * workers;
    return t < r.tasks ? r.first_task + u32(t) : kNone;
  }
  if (r.claim == kTicket) {
    u32 t = lane == 0 ? atomicAdd(p.words + r.cursor, 1u) : 0;
    t = __shfl_sync(~0u, t, 0);
    return t < r.tasks ? r.first_task + t : kNone;
  }
  const u64 begin = clock_cycles();
  Blocked* report = p.blocked + blockIdx.x * kBlockedPerCta + 3;
  bool reported = false;
  for (;;) {
    const u32 base = __shfl_sync(~0u, read_relaxed(p.words + r.cursor), 0);
    if (base >= r.tasks) {
      if (reported) report->task = 0;
      return kNone;
    }
    const u32 t = base + lane;
    const bool inside = lane < r.window && t < r.tasks;
    const bool taken = !inside || read_relaxed(p.words + r.claimed + t) != 0;
    const bool ready = !taken && reached(p, p.tasks[r.first_task + t]);
    const u32 candidates = __ballot_sync(~0u, ready);
    const u32 passed = __ballot_sync(~0u, inside && taken);
    const u32 leading = __ffs(~passed) - 1;  // tasks at the window's begin that are taken
    if (leading > 0 && lane == 0) atomicMax(p.words + r.cursor, base + (leading > 32 ? 32 : leading));
    if (candidates != 0) {
      const u32 first = __ffs(candidates) - 1;
      u32 won = 0;
      if (lane == first) won = atomicCAS(p.words + r.claimed + t, 0u, 1u) == 0;
      if (__shfl_sync(~0u, won, first)) {
        if (reported) report->task = 0;
        return r.first_task + base + first;
      }
    } else if (!reported && lane == 0 && clock_cycles() - begin > kReportCycles) {
      const Task& task = p.tasks[r.first_task + base];
      for (u32 i = 0; i < task.start_waits; ++i) {
        const Wait w = p.waits[task.first_wait + i];
        for (u32 f = 0; f < w.count; ++f) {
          const u32 have = read_relaxed(p.words + w.word + f * w.stride);
          if (have < w.at_least) *report = {r.first_task + base + 1, w.word + f * w.stride, have, w.at_least};
        }
      }
      reported = true;
    }
  }
}

DEVICE void push_put(const Program& p, u32 task) {
  const u32 slot = atomicAdd(p.words + p.fifo_head, 1u);
  __threadfence_system();
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p.fifo + slot), "l"((u64(p.run) << 32) + task + 1) : "memory");
}

template <bool LoopPipelined, Drain DrainRule>
struct Interpreter {
  static constexpr bool kDeferred = DrainRule == Drain::Deferred;
  using Tile = GemmTile<LoopPipelined, DrainRule, 1, 4, kDeferred ? 2 : 4, true>;
  static constexpr u32 kTaskFull = Tile::kSmemBytes;
  static constexpr u32 kTaskEmpty = kTaskFull + kTaskSlots * 8;
  static constexpr u32 kTaskIndex = kTaskEmpty + kTaskSlots * 8;
  static constexpr u32 kTaskSteps = kTaskIndex + kTaskSlots * 4;
  static constexpr u32 kEnds = kTaskSteps + kTaskSlots * 4;
  static constexpr u32 kMoverTask = kEnds + kEndSlots * 4;
  // Copies go through the operand stages, above an aliased output.
  static constexpr u32 kCopySlots = kDeferred ? 12 : 8;
  static constexpr u32 kCopyBase = kDeferred ? 0 : kConsumers * kChunksPerTile * kChunkBytes;
  static constexpr u32 kCopyFull = (kMoverTask + 4 + 7) / 8 * 8;
  static constexpr u32 kCopyParity = kCopyFull + kCopySlots * 8;
  static constexpr u32 kEndCount = kCopyParity + kCopySlots * 4;
  static constexpr u32 kSmemBytes = kEndCount + 4;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");

  static DEVICE void init(u32 smem) {
    Tile::init_barriers(smem);
    for (u32 s = 0; s < kTaskSlots; ++s) {
      mbarrier_init(smem + kTaskFull + s * 8, 1);
      mbarrier_init(smem + kTaskEmpty + s * 8, kConsumers * 4 + kConsumers);  // consumer warps and storers
    }
    for (u32 s = 0; s < kEndSlots; ++s) store_shared(smem + kEnds + s * 4, 0);
    for (u32 s = 0; s < kCopySlots; ++s) {
      mbarrier_init(smem + kCopyFull + s * 8, 1);
      store_shared(smem + kCopyParity + s * 4, 0);
    }
    store_shared(smem + kEndCount, 0);
    mbarrier_init_fence();
  }

  // One of the CTA's parties is done; the watchdog goes home with the last one.
  static DEVICE void end(u32 smem, u32 parties) {
    if (add_shared(smem + kEndCount, 1) + 1 == parties) watchdog_finish(smem + Tile::kFinished);
  }

  // --- warp 8: the loader
  static DEVICE void publish(u32 smem, RingPosition& at, u32 index, u32 steps) {
    mbarrier_wait(smem + kTaskEmpty + at.slot * 8, at.parity ^ 1);
    store_shared(smem + kTaskIndex + at.slot * 4, index);
    store_shared(smem + kTaskSteps + at.slot * 4, steps);
    mbarrier_arrive(smem + kTaskFull + at.slot * 8);
    at.advance<kTaskSlots>();
  }

  static DEVICE void load(u32 smem, const Program& p, const Maps& maps, const Role& r, u32 cta) {
    RingPosition at, task_at;
    for (u32 turn = 0;; ++turn) {
      u32 index;
      if (r.claim == kStrided) {
        const u64 t = u64(cta) + u64(turn) * r.ctas;
        index = t < r.tasks ? r.first_task + u32(t) : kNone;
      } else {
        const u32 t = atomicAdd(p.words + r.cursor, 1u);
        index = t < r.tasks ? r.first_task + t : kNone;
      }
      if (index == kNone) break;
      const Task task = p.tasks[index];
      const Region a = p.regions[task.first_region], b = p.regions[task.first_region + 1];
      publish(smem, task_at, index, task.steps);
      await_start(p, task, index, 0, 0, 1);
      if (task.start_waits > 0) fence_global_to_async();
      if (Tile::kAliased && turn > 0) mbarrier_wait(smem + Tile::kDrained, (turn - 1) & 1);
      const TensorMap* a_map = &maps.map[a.map];
      const TensorMap* b_map = &maps.map[b.map];
      for (u32 k = 0; k < task.steps; ++k) {
        for (u32 i = 0; i < task.step_waits; ++i) {
          const Wait w = p.waits[task.first_wait + task.start_waits + i];
          const u32 steps_each = task.steps / w.count;
          if (k % steps_each == 0) {
            await(p, w.word + k / steps_each * w.stride, w.at_least, index, 0);
            fence_global_to_async();
          }
        }
        const u32 full = smem + Tile::kFull + at.slot * 8;
        const u32 stage = smem + at.slot * kStageBytes;
        mbarrier_wait(smem + Tile::kEmpty + at.slot * 8, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(full, kStageBytes);
        tma_load(stage, a_map, full, a.row, a.column_block + k);
        tma_load(stage + kABytes, b_map, full, b.row + k * kTileK, b.column_block);
        at.advance<4>();
      }
    }
    publish(smem, task_at, kNone, 0);
  }

  // --- warps 9 and 10: the storers
  static DEVICE void store(u32 smem, const Program& p, const Maps& maps, u32 consumer) {
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
      if (task.signals > 0) {
        __threadfence();
        // The second of the two storers signals for both.
        if (add_shared(smem + kEnds + turn % kEndSlots * 4, 1) & 1) signal(p, task);
      }
    }
  }

  // --- warps 0 to 7: the consumers
  static DEVICE void multiply(u32 smem, u32 consumer) {
    float acc[128];
    u32 packed[64];
    bool pending = false;
    typename Tile::Consumer me = Tile::make_consumer(smem, consumer);
    RingPosition task_at;
    for (;;) {
      const u32 published = smem + kTaskFull + task_at.slot * 8;
      if constexpr (kDeferred) {
        if (pending && !named_barrier_all(2 + consumer, 128, mbarrier_test(published, task_at.parity))) {
#pragma unroll
          for (u32 c = 0; c < kChunksPerTile; ++c) Tile::stage_chunk(smem, me, packed, c);
          pending = false;
        }
      }
      mbarrier_wait(published, task_at.parity);
      const u32 steps = load_shared(smem + kTaskSteps + task_at.slot * 4);
      __syncwarp();
      if (lane_id() == 0) mbarrier_arrive(smem + kTaskEmpty + task_at.slot * 8);
      task_at.advance<kTaskSlots>();
      if (steps == 0) break;
      u32 k = 0;
      if constexpr (kDeferred) {
#pragma unroll
        for (u32 c = 0; c < kChunksPerTile; ++c) {
          if (c < steps) {
            const u32 full = smem + Tile::kFull + me.at.slot * 8;
            if (pending) {
              if (!named_barrier_all(2 + consumer, 128, mbarrier_test(full, me.at.parity))) {
#pragma unroll
                for (u32 rest = c; rest < kChunksPerTile; ++rest) Tile::stage_chunk(smem, me, packed, rest);
                pending = false;
              }
            }
            mbarrier_wait(full, me.at.parity);
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
        mbarrier_wait(smem + Tile::kFull + me.at.slot * 8, me.at.parity);
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

  // --- warps 0 to 7: the movers

  // One thread copies boxes of 128 rows and 64 elements through `slots` slots of shared memory, first slot `first`.
  static DEVICE void copy(u32 smem, const Program& p, const Maps& maps, const Task& task, u32 first, u32 slots) {
    const Region src = p.regions[task.first_region];
    const u32 across = task.row_bytes / 128, down = task.rows / 128;
    const u32 units = task.blocks * across * down;
    const u32 lead = slots / 2;
    fence_global_to_async();
    for (u32 i = 0; i < units + lead; ++i) {
      if (i < units) {
        // The youngest store is that of box i - lead - 1; with two slots it is the one that must be over.
        if (i >= slots) slots < 3 ? store_wait_smem_read<0>() : store_wait_smem_read<1>();
        const u32 slot = first + i % slots, bar = smem + kCopyFull + slot * 8;
        const u32 block = i / (across * down), in_block = i % (across * down);
        mbarrier_arrive_expect_bytes(bar, kBoxBytes);
        tma_load(smem + kCopyBase + slot * kBoxBytes, &maps.map[src.map], bar,
                 src.row + block * src.block_rows + in_block / across * 128,
                 src.column_block + block * src.block_columns + in_block % across);
      }
      if (i >= lead) {
        const u32 u = i - lead, slot = first + u % slots;
        const u32 block = u / (across * down), in_block = u % (across * down);
        const u32 parity = load_shared(smem + kCopyParity + slot * 4);
        mbarrier_wait(smem + kCopyFull + slot * 8, parity);
        store_shared(smem + kCopyParity + slot * 4, parity ^ 1);
        for (u32 o = 0; o < task.outputs; ++o) {
          const Region& dst = p.regions[task.first_region + 1 + o];
          tma_store(&maps.map[dst.map], smem + kCopyBase + slot * kBoxBytes,
                    dst.row + block * dst.block_rows + in_block / across * 128,
                    dst.column_block + block * dst.block_columns + in_block % across);
        }
        store_commit();
      }
    }
    store_wait_visible<0>();
  }

  // All movers; every region has the task's blocks, rows and row bytes.
  template <u32 Unroll>
  static DEVICE void reduce(const Program& p, const Task& task, u32 thread) {
    const u32 per_row = task.row_bytes / 16, per_block = per_row * task.rows, vectors = per_block * task.blocks;
    for (u32 at = thread; at < vectors; at += kMovers * Unroll) {
      float sum[Unroll][8];
      u64 row[Unroll], block[Unroll];
      u32 column[Unroll];
#pragma unroll
      for (u32 u = 0; u < Unroll; ++u) {
        const u32 v = min(at + u * kMovers, vectors - 1);
        block[u] = v / per_block;
        const u32 rest = v - u32(block[u]) * per_block;
        row[u] = rest / per_row;
        column[u] = (rest - u32(row[u]) * per_row) * 16;
      }
      for (u32 i = 0; i < task.inputs; ++i) {
        const Region& in = p.regions[task.first_region + i];
        const u8* base = reinterpret_cast<const u8*>(in.address);
        Vector16 x[Unroll];
#pragma unroll
        for (u32 u = 0; u < Unroll; ++u) x[u] = load16(base + block[u] * in.block_pitch + row[u] * in.row_pitch + column[u]);
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
          if (at + u * kMovers < vectors) store16(base + block[u] * out.block_pitch + row[u] * out.row_pitch + column[u], y);
        }
      }
    }
  }

  static DEVICE void fill(const Program& p, const Task& task, u32 thread) {
    const Region& out = p.regions[task.first_region];
    const u32 per_row = task.row_bytes / 16, per_block = per_row * task.rows;
    for (u32 v = thread; v < per_block * task.blocks; v += kMovers) {
      const u64 block = v / per_block, row = v % per_block / per_row, column = v % per_row * 16;
      store16(reinterpret_cast<u8*>(out.address) + block * out.block_pitch + row * out.row_pitch + column, {{0, 0, 0, 0}});
    }
  }

  // One warp by itself: copies, puts and syncs.
  static DEVICE void move_lane(u32 smem, const Program& p, const Maps& maps, const Role& r, u32 cta, u32 warp) {
    const u32 lane = lane_id(), slots = kCopySlots / r.lanes;
    for (u32 turn = 0;; ++turn) {
      const u32 index = claim(p, r, warp * r.ctas + cta, r.ctas * r.lanes, turn, lane);
      if (index == kNone) return;
      const Task task = p.tasks[index];
      await_start(p, task, index, 3, lane, 32);
      __syncwarp();
      if (lane == 0) {
        if (task.op == kCopy) copy(smem, p, maps, task, warp * slots, slots);
        if (task.op == kPut) push_put(p, index);
        signal(p, task);
      }
      __syncwarp();
    }
  }

  static DEVICE void move(u32 smem, const Program& p, const Maps& maps, u32 role, u32 cta, u32 thread) {
    while (role != kNone) {
      const Role r = p.roles[role];
      const u32 warp = thread / 32;
      if (r.lanes > 1) {
        if (warp < r.lanes) move_lane(smem, p, maps, r, cta, warp);
        named_barrier_sync(kMoverBarrier, kMovers);
      } else {
        for (u32 turn = 0;; ++turn) {
          if (warp == 0) {
            const u32 index = claim(p, r, cta, r.ctas, turn, thread);
            if (index != kNone) await_start(p, p.tasks[index], index, 3, thread, 32);
            __syncwarp();
            if (thread == 0) store_shared(smem + kMoverTask, index);
          }
          named_barrier_sync(kMoverBarrier, kMovers);
          const u32 index = load_shared(smem + kMoverTask);
          if (index == kNone) break;
          const Task task = p.tasks[index];
          if (task.op == kReduce) {
            reduce<4>(p, task, thread);
          } else if (task.op == kFill) {
            fill(p, task, thread);
          } else if (thread == 0) {
            if (task.op == kCopy) copy(smem, p, maps, task, 0, kCopySlots);
            if (task.op == kPut) push_put(p, index);
          }
          fence_global_to_async();  // sums may be read by the copy engine next
          named_barrier_sync(kMoverBarrier, kMovers);
          if (thread == 0) signal(p, task);
        }
        named_barrier_sync(kMoverBarrier, kMovers);  // the task word is read before it is written again
      }
      role = r.recycle;
    }
  }

  static DEVICE void run(const Program& p, const Maps& maps) {
    const u32 smem = smem_address(dynamic_smem);
    const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    const Start start = p.starts[blockIdx.x];
    const bool gemm = p.roles[start.role].gemm != 0;
    const u32 parties = gemm ? 4 : 1;
    if (threadIdx.x == 0) {
      if (smem & 1023u) __trap();  // the swizzle pattern repeats every 1,024 bytes
      p.times[blockIdx.x].begin_ns = globaltimer_ns();
      p.times[blockIdx.x].cycles = clock_cycles();
      init(smem);
    }
    __syncthreads();
    if (group < kConsumers) {
      registers_increase<232>();
      u32 role = start.role;
      if (gemm) {
        multiply(smem, group);
        role = p.roles[role].recycle;
        named_barrier_sync(kMoverBarrier, kMovers);
      }
      move(smem, p, maps, role, start.cta, threadIdx.x);
      if (threadIdx.x == 0) {
        p.times[blockIdx.x].cycles = clock_cycles() - p.times[blockIdx.x].cycles;
        p.times[blockIdx.x].end_ns = globaltimer_ns();
        end(smem, parties);
      }
    } else {
      registers_decrease<40>();
      const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
      if (lane_id() == 0) {
        if (warp == 3) {
          watchdog_run(smem + Tile::kFinished);
        } else if (gemm) {
          if (warp == 0) {
            load(smem, p, maps, p.roles[start.role], start.cta);
          } else {
            store(smem, p, maps, warp - 1);
          }
          end(smem, parties);
        }
      }
    }
  }
};

#define INTERPRETER(NAME, ...)                                                                        \
  extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)                                       \
      NAME(const __grid_constant__ Program program, const __grid_constant__ Maps maps) {              \
    Interpreter<__VA_ARGS__>::run(program, maps);                                                     \
  }
// name: main loop (wait at each step, pipelined), drain
INTERPRETER(interpret_wait_overlap, false, Drain::Deferred)
INTERPRETER(interpret_pipelined_overlap, true, Drain::Deferred)
INTERPRETER(interpret_wait_smem_read, false, Drain::SmemRead)
INTERPRETER(interpret_pipelined_smem_read, true, Drain::SmemRead)
INTERPRETER(interpret_wait_visible, false, Drain::Visible)
INTERPRETER(interpret_pipelined_visible, true, Drain::Visible)

// Owns every SM until a host word is raised, for at most about a fifth of a second: shows that a copy needs no SM.
// Two blocks take all 2,048 threads of an SM, so that nothing else fits beside them.
extern "C" __global__ void __launch_bounds__(1024, 2) hold_all_sms(const volatile u32* release, u32* begun) {
  if (threadIdx.x == 0) {
    static_cast<volatile u32*>(begun)[blockIdx.x] = 1;  // a word each: host memory takes no atomics
    const u64 begin = clock_cycles();
    while (*release == 0 && clock_cycles() - begin < kWatchdogCycles / 10) __nanosleep(500);
  }
  __syncthreads();
}

// What every role of an interpreter does with a task: claims it, waits for its flags, raises flags, notes its times.
#pragma once
#include "flags.cuh"
#include "mbarrier.cuh"
#include "program.cuh"
#include "watchdog.cuh"

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
// Returns whether it had to wait.
DEVICE bool await(const Program& p, u32 word, u32 level, u32 task, u32 party) {
  u32 have = read_flag(p, word);
  if (have >= level) return false;
  const u64 begin = clock_cycles();
  bool reported = false;
  Blocked* report = p.blocked + block_index() * kBlockedPerCta + party;
  while ((have = read_flag(p, word)) < level) {
    if (!reported && clock_cycles() - begin > kReportCycles) {
      reported = true;
      *report = {task + 1, word, have, level};
    }
  }
  if (reported) report->task = 0;
  return true;
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

// The lanes of a warp share the flags of the start. Returns the word that this lane waited for last, or kNone.
DEVICE u32 await_start(const Program& p, const Task& task, u32 index, u32 party, u32 lane, u32 lanes) {
  u32 waited_for = kNone;
  for (u32 i = 0; i < task.start_waits; ++i) {
    const Wait w = p.waits[task.first_wait + i];
    for (u32 f = lane; f < w.count; f += lanes) {
      if (await(p, w.word + f * w.stride, w.at_least, index, party)) waited_for = w.word + f * w.stride;
    }
  }
  return waited_for;
}

DEVICE void stamp_taken(const Program& p, u32 index) {
  if (p.stamps != nullptr) p.stamps[index].taken = clock_cycles();
}
DEVICE void stamp_start(const Program& p, u32 index, u32 waited_for, u32 lane) {
  if (p.stamps == nullptr) return;
  Stamps& s = p.stamps[index];
  s.start = clock_cycles();
  s.block = block_index();
  s.lane = lane;
  s.waited_for = waited_for;
}
DEVICE void stamp_free(const Program& p, u32 index) {
  if (p.stamps != nullptr) p.stamps[index].free = clock_cycles();
}
DEVICE void stamp_end(const Program& p, u32 index) {
  if (p.stamps != nullptr) p.stamps[index].end = clock_cycles();
}

// One fence releases all flags of a task: a release per flag would wait for the one before it each time.
DEVICE void signal(const Program& p, const Task& task) {
  if (task.signals == 0) return;
  if (p.peers) {
    fence_system();
  } else {
    fence_gpu();
  }
  for (u32 i = 0; i < task.signals; ++i) {
    const Signal s = p.signals[task.first_signal + i];
    u32* flag = reinterpret_cast<u32*>(s.address);
    if (s.remote) {
      flag_add_relaxed_system(flag, s.add);
    } else {
      flag_add_relaxed(flag, s.add);
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
  Blocked* report = p.blocked + block_index() * kBlockedPerCta + 3;
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

// The `turn`-th tile of a CTA, or kNone. One thread calls it.
DEVICE u32 claim_tile(const Program& p, const Role& r, u32 turn) {
  const u32 cta = p.starts[block_index()].cta;
  const u32 t = r.claim == kStrided ? cta + turn * r.ctas : atomicAdd(p.words + r.cursor, 1u);
  return t < r.tasks ? r.first_task + t : kNone;
}
DEVICE void push_put(const Program& p, u32 task) {
  const u32 slot = atomicAdd(p.words + p.fifo_head, 1u);
  __threadfence_system();
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p.fifo + slot), "l"((u64(p.run) << 32) + task + 1) : "memory");
}


DEVICE void begin_cta(const Program& p) {
  CtaTimes& times = p.times[block_index()];
  times.begin_ns = globaltimer_ns();
  times.begin_cycles = clock_cycles();
}

// One of the CTA's parties is done; the watchdog goes home with the last one.
DEVICE void end_party(const Program& p, u32 count, u32 parties, u32 finished) {
  if (add_shared(count, 1) + 1 != parties) return;
  CtaTimes& times = p.times[block_index()];
  times.end_cycles = clock_cycles();
  times.end_ns = globaltimer_ns();
  watchdog_finish(finished);
}

// What every role of an interpreter does with a task: claims it, waits for its flags, raises flags, notes its times.
#pragma once
#include "flags.cuh"
#include "mbarrier.cuh"
#include "program.cuh"
#include "tma.cuh"
#include "watchdog.cuh"

constexpr u32 kReportCycles = 1u << 22;

DEVICE u32 load_shared(u32 address) {
  u32 v;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
struct Quad {
  u32 x, y, z, w;
};
DEVICE Quad load_shared_quad(u32 address) {
  Quad q;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "r"(address) : "memory");
  return q;
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
  if (read_flag(p, word) >= level) return false;
  const u32 begin = clock_low();
  bool reported = false;
  for (;;) {
    const u32 have = read_flag(p, word);
    if (have >= level) break;
    if (!reported && clock_low() - begin > kReportCycles) {
      reported = true;
      p.blocked[block_index() * kBlockedPerCta + party] = {task + 1, word, have, level};
    }
  }
  if (reported) p.blocked[block_index() * kBlockedPerCta + party].task = 0;
  return true;
}

// Whether all flags of a wait are there. It only looks: whoever claims the task acquires them in await_start.
DEVICE bool reached(const Program& p, const Wait& w) {
  bool all = true;
  for (u32 f = 0; f < w.count; ++f) all = all && read_relaxed(p.words + w.word + f * w.stride) >= w.at_least;
  return all;
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

// Raises the flags of finished tasks from a warp of its own. A fence waits until every write of the SM is acknowledged,
// microseconds beside traffic over NVLink; who computes or moves does not stand still for it, and one fence serves all
// tasks that have finished meanwhile. It sleeps at the barrier of the next post: a warp that polls takes issue slots from
// the consumers, 0.7 % of the time of attention with 192 rows. Shared words lie from Control on.
template <u32 Control>
struct Signaller {
  static_assert(Control % 16 == 0, "a post is 16 bytes");
  static constexpr u32 kSlots = 16;
  static constexpr u32 kPosted = Control + kSlots * 16;
  static constexpr u32 kHead = kPosted + kSlots * 8;
  static constexpr u32 kTail = kHead + 4;
  static constexpr u32 kEnd = kHead + 8;

  static DEVICE void init(u32 smem) {
#pragma unroll
    for (u32 s = 0; s < kSlots; ++s) mbarrier_init(smem + kPosted + s * 8, 1);
    store_shared(smem + kHead, 0);
    store_shared(smem + kTail, 0);
  }

  // The task's writes are done: by this thread, or by others that met with it.
  static DEVICE void post(u32 smem, const Program& p, u32 index, u32 signals, u32 first_signal) {
    if (signals == 0) {
      stamp_end(p, index);
      return;
    }
    put(smem, index, signals, first_signal);
  }
  // One of the CTA's parties is done, and posts no more.
  static DEVICE void leave(u32 smem) { put(smem, kNone, 0, 0); }

  static DEVICE void put(u32 smem, u32 index, u32 signals, u32 first_signal) {
    const u32 ticket = add_shared(smem + kHead, 1);
    while (ticket - load_shared(smem + kTail) >= kSlots) {
    }
    const u32 at = smem + Control + ticket % kSlots * 16;
    store_shared(at, index);
    store_shared(at + 4, first_signal);
    store_shared(at + 8, signals);
    mbarrier_arrive(smem + kPosted + ticket % kSlots * 8);
  }

  // One thread, until all of the CTA's parties have left and all is raised; it also bounds the launch.
  static DEVICE void run(u32 smem, const Program& p, u32 parties) {
    const u64 begin = clock_cycles();
    for (u32 tail = 0;;) {
      while (!mbarrier_try_wait(smem + kPosted + tail % kSlots * 8, tail / kSlots & 1)) {
        if (clock_cycles() - begin > kWatchdogCycles) __trap();
      }
      if (load_shared(smem + Control + tail % kSlots * 16) != kNone) {
        tail = raise(smem, p, tail);
      } else if (--parties > 0) {
        store_shared(smem + kTail, ++tail);
      } else {
        return;
      }
    }
  }

  // The flags of all tasks posted so far, of which the `tail`-th is one, behind one fence; returns how many posts were
  // raised in all.
  static DEVICE u32 raise(u32 smem, const Program& p, u32 tail) {
    u32 posts = 0, remote = 0;
    do {
      const u32 at = smem + Control + (tail + posts) % kSlots * 16;
      if (load_shared(at) == kNone) break;
      const u32 first = load_shared(at + 4), count = load_shared(at + 8);
      for (u32 i = 0; i < count; ++i) remote |= p.signals[first + i].remote;
      ++posts;
    } while (posts < kSlots && mbarrier_test(smem + kPosted + (tail + posts) % kSlots * 8, (tail + posts) / kSlots & 1));
    if (remote) {
      fence_system();
    } else {
      fence_gpu();
    }
    for (u32 n = 0; n < posts; ++n) {
      const u32 at = smem + Control + (tail + n) % kSlots * 16;
      const u32 first = load_shared(at + 4), count = load_shared(at + 8);
      for (u32 i = 0; i < count; ++i) {
        const Signal s = p.signals[first + i];
        u32* flag = reinterpret_cast<u32*>(s.address);
        if (s.remote) {
          flag_add_relaxed_system(flag, s.add);
        } else {
          flag_add_relaxed(flag, s.add);
        }
      }
      stamp_end(p, load_shared(at));
    }
    store_shared(smem + kTail, tail + posts);
    return tail + posts;
  }
};

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
  const u32 begin = clock_low();
  bool reported = false;
  for (;;) {
    const u32 base = __shfl_sync(~0u, read_relaxed(p.words + r.cursor), 0);
    if (base >= r.tasks) {
      if (reported) p.blocked[block_index() * kBlockedPerCta + 3].task = 0;
      return kNone;
    }
    const u32 t = base + lane;
    const bool inside = lane < r.window && t < r.tasks;
    // Loads that do not depend on each other are written side by side: a trip to memory takes most of a microsecond.
    const Task& task = p.tasks[r.first_task + min(t, r.tasks - 1)];
    const u32 waits = task.start_waits;
    const Wait* const first_wait = p.waits + task.first_wait;
    const bool taken = !inside || read_relaxed(p.words + r.claimed + t) != 0;
    bool ready = !taken;
    if (ready && waits > 0) {
      const Wait one = first_wait[0], two = first_wait[waits > 1 ? 1 : 0];  // a Ready task has two at most
      ready = reached(p, one) & reached(p, two);
    }
    const u32 candidates = __ballot_sync(~0u, ready);
    const u32 passed = __ballot_sync(~0u, inside && taken);
    const u32 leading = __ffs(~passed) - 1;  // tasks at the window's begin that are taken
    if (leading > 0 && lane == 0) atomicMax(p.words + r.cursor, base + (leading > 32 ? 32 : leading));
    if (candidates != 0) {
      // CTAs that all tried the lowest one would take one task per round trip between them: each begins elsewhere.
      u32 left = candidates;
      for (u32 skip = __popc(candidates) * (block_index() & 31) / 32; skip > 0; --skip) left &= left - 1;
      const u32 first = __ffs(left) - 1;
      u32 won = 0;
      if (lane == first) won = atomicCAS(p.words + r.claimed + t, 0u, 1u) == 0;
      if (__shfl_sync(~0u, won, first)) {
        if (reported) p.blocked[block_index() * kBlockedPerCta + 3].task = 0;
        return r.first_task + base + first;
      }
    } else if (!reported && lane == 0 && clock_low() - begin > kReportCycles) {
      const Task& task = p.tasks[r.first_task + base];
      for (u32 i = 0; i < task.start_waits; ++i) {
        const Wait w = p.waits[task.first_wait + i];
        for (u32 f = 0; f < w.count; ++f) {
          const u32 have = read_relaxed(p.words + w.word + f * w.stride);
          Blocked& report = p.blocked[block_index() * kBlockedPerCta + 3];
          if (have < w.at_least) report = {r.first_task + base + 1, w.word + f * w.stride, have, w.at_least};
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

// Before the CTA's barriers are there: its last warp, which has the least to do, has the tensor maps fetched and reads the
// clocks, which it writes down when the others are on their way.
DEVICE CtaTimes begin_cta(const Program& p) {
#pragma unroll 1
  for (u32 map = lane_id(); map < p.maps; map += 32) tma_prefetch_map(tensor_maps + map);
  return {globaltimer_ns(), 0, clock_cycles(), 0};
}
DEVICE void note_begin(const Program& p, const CtaTimes& begun) {
  CtaTimes& times = p.times[block_index()];
  times.begin_ns = begun.begin_ns;
  times.begin_cycles = begun.begin_cycles;
}
DEVICE void note_end(const Program& p) {
  CtaTimes& times = p.times[block_index()];
  times.end_cycles = clock_cycles();
  times.end_ns = globaltimer_ns();
}

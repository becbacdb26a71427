// nvlink COMMAND: what NVLink does between GPU 0 and another GPU of this host. Rows go to $LAB_RAW as
// bench,parameters,value,unit,note.
//
//   bandwidth     copies by mechanism, CTAs, chunk and bytes in flight, one way and both ways
//   adds          bf16 adds into the peer's memory, one way and both ways
//   tails         what the end of a tile's output costs: completion, fence and signal, by kind and load
//   flags         one-way latency by release and acquire scope, alone and beside copies
//   interference  a GEMM's time beside pushes, pulls and copy-engine copies, own and the peer's
//
// Plain allocations and peer access only. A rate is payload over the time from the first CTA's begin to the last one's
// end, by the timer of the GPU that runs the copy; both ways: of the slower GPU, whose CTAs begin together by a flag.
#include "gemm.cu"
#include "reduce.cuh"

#include "host.h"

struct LinkStats {
  u64 begin_ns, end_ns, cycles, bytes;
};

// CTAs of both GPUs begin together: `gate` lies on the own GPU, `peer_gate` on the other; null: no waiting.
struct Meeting {
  u32* gate;
  u32* peer_gate;
  u32 level;
};

DEVICE void meet(const Meeting& m) {
  if (m.gate == nullptr) return;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) flag_add_release_system(m.peer_gate, 1);
    const u64 begin = clock_cycles();
    while (flag_read_acquire_system(m.gate) < m.level) {
      if (clock_cycles() - begin > kWatchdogCycles) __trap();
    }
  }
  __syncthreads();
}

DEVICE void link_record(LinkStats* stats, u64 begin, u64 c0, u64 bytes) {
  __syncthreads();
  if (threadIdx.x == 0) stats[blockIdx.x] = {begin, globaltimer_ns(), clock_cycles() - c0, bytes};
}

template <u32 Slots, u32 Pending>
DEVICE void link_copy(u8* dst_all, const u8* src_all, u64 bytes, u64 wrap, u32 chunk, Meeting m, LinkStats* stats) {
  const u32 smem = smem_address(dynamic_smem), bars = smem + Slots * chunk;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < Slots; ++s) mbarrier_init(bars + s * 8, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  meet(m);
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  u64 moved = 0;
  if (threadIdx.x == 0) {
    moved = copy_pipelined<Slots, Pending>(smem, bars, chunk, src_all + blockIdx.x * wrap, dst_all + blockIdx.x * wrap, bytes,
                                           wrap, nullptr);
  }
  link_record(stats, begin, c0, moved);
}
#define LINK_COPY(NAME, SLOTS, PENDING)                                                                       \
  extern "C" __global__ void __launch_bounds__(32, 1)                                                        \
      NAME(u8* dst, const u8* src, u64 bytes, u64 wrap, u32 chunk, Meeting m, LinkStats* stats) {              \
    link_copy<SLOTS, PENDING>(dst, src, bytes, wrap, chunk, m, stats);                                        \
  }
LINK_COPY(link_copy_2, 2, 1)
LINK_COPY(link_copy_3, 3, 1)
LINK_COPY(link_copy_6, 6, 2)
LINK_COPY(link_copy_12, 12, 4)

// 16-byte loads and stores of 1,024 threads, 8 of each in flight per thread.
extern "C" __global__ void __launch_bounds__(1024, 1)
    link_ldst(u8* dst_all, const u8* src_all, u64 bytes, u64 wrap, u32, Meeting m, LinkStats* stats) {
  meet(m);
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  // Narrow offsets: the eight vectors take half of the 64 registers that 1,024 threads leave each other.
  const u8* src = src_all + blockIdx.x * wrap + threadIdx.x * 16;
  u8* dst = dst_all + blockIdx.x * wrap + threadIdx.x * 16;
  constexpr u32 kRound = 1024 * 16 * 8;
  u32 at = 0;
  for (u32 left = u32((bytes + kRound - 1) / kRound); left > 0; --left) {
    Vector16 v[8];
#pragma unroll
    for (u32 u = 0; u < 8; ++u) v[u] = load16(src + at + u * 1024 * 16);
#pragma unroll
    for (u32 u = 0; u < 8; ++u) store16(dst + at + u * 1024 * 16, v[u]);
    at = at + kRound == u32(wrap) ? 0 : at + kRound;
  }
  link_record(stats, begin, c0, bytes);
}

// Adds boxes of 64 rows x 64 columns from shared memory, as a GEMM tile's output does; `Pending` groups in flight.
template <bool Add>
DEVICE void link_tiles(const TensorMap* map, u64 boxes, u32 rows, Meeting m, LinkStats* stats) {
  const u32 smem = smem_address(dynamic_smem);
  for (u32 i = threadIdx.x; i < 4 * kChunkBytes / 4; i += 32) reinterpret_cast<u32*>(dynamic_smem)[i] = 0x3c003c00u;
  fence_smem_to_async();
  __syncthreads();
  meet(m);
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  if (threadIdx.x == 0) {
    const u32 band = rows / gridDim.x / 64;
    for (u64 i = 0; i < boxes; ++i) {
      const u32 row = (blockIdx.x * band + u32(i / 4 % band)) * 64, column = u32(i % 4);
      if (i >= 4) store_wait_smem_read<3>();
      if (Add) {
        tma_store_add(map, smem + u32(i % 4) * kChunkBytes, row, column);
      } else {
        tma_store(map, smem + u32(i % 4) * kChunkBytes, row, column);
      }
      store_commit();
    }
    store_wait_visible<0>();
  }
  link_record(stats, begin, c0, boxes * kChunkBytes);
}
extern "C" __global__ void __launch_bounds__(32, 1)
    link_tile_add(const __grid_constant__ TensorMap map, u64 boxes, u32 rows, Meeting m, LinkStats* stats) {
  link_tiles<true>(&map, boxes, rows, m, stats);
}
extern "C" __global__ void __launch_bounds__(32, 1)
    link_tile_store(const __grid_constant__ TensorMap map, u64 boxes, u32 rows, Meeting m, LinkStats* stats) {
  link_tiles<false>(&map, boxes, rows, m, stats);
}

// How a tile's output ends.
enum Tail : u32 { kNothing, kFence, kOwnGpu, kOwnSystem, kPeerSystem, kPeerRelaxed, kPeerSystemBoth };

// Two storers, as in the interpreter: four boxes each, completion, a tail; then `spin_ns` of something else.
template <bool Add>
DEVICE void link_tails(const TensorMap* map, u32 tiles, u32 rows, u32 tail, u32 spin_ns, u32* own, u32* peer, Meeting m,
                       LinkStats* stats) {
  const u32 smem = smem_address(dynamic_smem);
  for (u32 i = threadIdx.x; i < 4 * kChunkBytes / 4; i += 64) reinterpret_cast<u32*>(dynamic_smem)[i] = 0x3c003c00u;
  fence_smem_to_async();
  __syncthreads();
  meet(m);
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  u64 busy = 0;
  if (threadIdx.x % 32 == 0) {
    const u32 storer = threadIdx.x / 32, band = rows / gridDim.x / 128;
    u32* mine = own + 64 + blockIdx.x * 2 + storer;
    u32* theirs = peer + 64 + blockIdx.x * 2 + storer;
    for (u32 t = 0; t < tiles; ++t) {
      const u64 from = globaltimer_ns();
      const u32 row = (blockIdx.x * band + t % band) * 128 + storer * 64;
      for (u32 c = 0; c < 4; ++c) {
        const u32 at = smem + (storer * 2 + c % 2) * kChunkBytes;
        if (Add) {
          tma_store_add(map, at, row, c);
        } else {
          tma_store(map, at, row, c);
        }
        store_commit();
        store_wait_smem_read<0>();
      }
      store_wait_visible<0>();
      if (tail == kFence) __threadfence();
      if (tail == kOwnGpu) flag_add_release(mine, 1);
      if (tail == kOwnSystem) flag_add_release_system(mine, 1);
      if (tail == kPeerSystem) flag_add_release_system(theirs, 1);
      if (tail == kPeerRelaxed) asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(theirs) : "memory");
      if (tail == kPeerSystemBoth) {
        __threadfence();
        flag_add_release_system(theirs, 1);
        flag_add_release(mine, 1);
      }
      const u64 to = globaltimer_ns();
      busy += to - from;
      while (globaltimer_ns() - to < spin_ns) {
      }
    }
    if (storer == 1) stats[blockIdx.x + 512].bytes = busy;
  }
  link_record(stats, begin, c0, u64(tiles) * 8 * kChunkBytes);
}
extern "C" __global__ void __launch_bounds__(64, 1) link_tail_add(const __grid_constant__ TensorMap map, u32 tiles, u32 rows, u32 tail,
                                                                  u32 spin_ns, u32* own, u32* peer, Meeting m, LinkStats* stats) {
  link_tails<true>(&map, tiles, rows, tail, spin_ns, own, peer, m, stats);
}
extern "C" __global__ void __launch_bounds__(64, 1) link_tail_store(const __grid_constant__ TensorMap map, u32 tiles, u32 rows, u32 tail,
                                                                    u32 spin_ns, u32* own, u32* peer, Meeting m, LinkStats* stats) {
  link_tails<false>(&map, tiles, rows, tail, spin_ns, own, peer, m, stats);
}

// Ping-pong: each side raises the other's word and waits for its own. `Remote`: words on different GPUs, system scope.
template <bool SystemRelease, bool SystemAcquire>
DEVICE void link_ping(u32* mine, u32* other, u32 first, u32 rounds, LinkStats* stats) {
  if (threadIdx.x != 0) return;
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  for (u32 r = 1; r <= rounds; ++r) {
    if (first) SystemRelease ? flag_add_release_system(other, 1) : flag_add_release(other, 1);
    while ((SystemAcquire ? flag_read_acquire_system(mine) : flag_read_acquire(mine)) < r) {
      if (clock_cycles() - c0 > kWatchdogCycles) __trap();
    }
    if (!first) SystemRelease ? flag_add_release_system(other, 1) : flag_add_release(other, 1);
  }
  *stats = {begin, globaltimer_ns(), clock_cycles() - c0, rounds};
}
extern "C" __global__ void link_ping_remote(u32* mine, u32* other, u32 first, u32 rounds, LinkStats* stats) {
  link_ping<true, true>(mine, other, first, rounds, stats);
}
// Both sides on one GPU: block 0 and block 1.
extern "C" __global__ void link_ping_local_gpu(u32* words, u32 rounds, LinkStats* stats) {
  link_ping<false, false>(words + blockIdx.x * 32, words + (1 - blockIdx.x) * 32, blockIdx.x == 0, rounds, stats + blockIdx.x);
}
extern "C" __global__ void link_ping_local_system_acquire(u32* words, u32 rounds, LinkStats* stats) {
  link_ping<false, true>(words + blockIdx.x * 32, words + (1 - blockIdx.x) * 32, blockIdx.x == 0, rounds, stats + blockIdx.x);
}
extern "C" __global__ void link_ping_local_system(u32* words, u32 rounds, LinkStats* stats) {
  link_ping<true, true>(words + blockIdx.x * 32, words + (1 - blockIdx.x) * 32, blockIdx.x == 0, rounds, stats + blockIdx.x);
}

static const int kLinkSmem = 232448;
static const uint64_t kPool = 8ull << 30;
struct Gpu {
  int index;
  uint8_t* pool;
  LinkStats* stats;
  uint32_t* words;
  cudaStream_t stream, engine;
  uint32_t meetings = 0;
};
static Gpu gpus[2];

static void on(const Gpu& g) { CHECK(cudaSetDevice(g.index)); }
static void sync_all() {
  for (auto& g : gpus) {
    on(g);
    CHECK(cudaDeviceSynchronize());
  }
}

static void setup() {
  for (int i = 0; i < 2; ++i) {
    gpus[i].index = i;
    on(gpus[i]);
    CHECK(cudaDeviceEnablePeerAccess(1 - i, 0));
    CHECK(cudaMalloc(&gpus[i].pool, kPool));
    CHECK(cudaMalloc(&gpus[i].stats, 4096 * sizeof(LinkStats)));
    CHECK(cudaMalloc(&gpus[i].words, 4096));
    CHECK(cudaMemset(gpus[i].words, 0, 4096));
    CHECK(cudaStreamCreateWithFlags(&gpus[i].stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&gpus[i].engine, cudaStreamNonBlocking));
    random_bf16(gpus[i].pool, kPool / 2, 7 + i);
    for (const void* k : {(const void*)link_copy_2, (const void*)link_copy_3, (const void*)link_copy_6, (const void*)link_copy_12,
                          (const void*)link_tile_add, (const void*)link_tile_store, (const void*)link_tail_add,
                          (const void*)link_tail_store})
      CHECK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, kLinkSmem));
  }
  sync_all();
}

// GB/s of CTAs of one GPU.
static double rate(const Gpu& g, int ctas, double* mhz = nullptr) {
  std::vector<LinkStats> h(ctas);
  on(g);
  CHECK(cudaMemcpy(h.data(), g.stats, ctas * sizeof(LinkStats), cudaMemcpyDeviceToHost));
  uint64_t b = ~0ull, e = 0;
  double bytes = 0, cycles = 0, ns = 0;
  for (auto& s : h) {
    b = std::min<uint64_t>(b, s.begin_ns);
    e = std::max<uint64_t>(e, s.end_ns);
    bytes += s.bytes; cycles += s.cycles; ns += double(s.end_ns - s.begin_ns);
  }
  if (mhz) *mhz = cycles / ns * 1e3;
  return bytes / double(e - b);
}

// Runs `launch(gpu, meeting)` on one or both GPUs; the median of the slower one's rate.
static double rate_of(bool both, int ctas, int reps, const std::function<void(Gpu&, Meeting)>& launch) {
  std::vector<double> r;
  for (int i = 0; i < reps + 1; ++i) {
    for (auto& g : gpus) {
      if (!both && g.index == 1) continue;
      on(g);
      Meeting m = {};
      if (both) m = {g.words + 512, gpus[1 - g.index].words + 512, ++g.meetings};
      launch(g, m);
      CHECK(cudaGetLastError());
    }
    sync_all();
    double slow = rate(gpus[0], ctas);
    if (both) slow = std::min(slow, rate(gpus[1], ctas));
    if (i) r.push_back(slow);
  }
  return median(r);
}

static void bandwidth() {
  typedef void (*Copy)(u8*, const u8*, u64, u64, u32, Meeting, LinkStats*);
  struct Way { const char* name; Copy kernel; int slots, pending, threads; };
  const Way ways[] = {{"tma_bulk", link_copy_2, 2, 1, 32}, {"tma_bulk", link_copy_3, 3, 1, 32}, {"tma_bulk", link_copy_6, 6, 2, 32},
                      {"tma_bulk", link_copy_12, 12, 4, 32}, {"ldst", link_ldst, 0, 0, 1024}};
  for (bool both : {false, true})
    for (auto& w : ways)
      for (int chunk : {4096, 8192, 16384}) {
        if (!w.slots && chunk != 16384) continue;
        if (both && chunk != 16384) continue;
        for (bool pull : {false, true})
          for (int ctas : {1, 2, 4, 6, 8, 12, 16, 32, 64, 132}) {
            // About 200 us at 45 GB/s per CTA and 370 GB/s in all.
            const uint64_t wrap = 48ull << 20;
            uint64_t bytes = uint64_t(std::min(45.0, 370.0 / ctas) * 2e5) / 393216 * 393216;
            bytes = std::max<uint64_t>(bytes, 393216);
            double r = rate_of(both, ctas, 5, [&](Gpu& g, Meeting m) {
              uint8_t *mine = g.pool, *theirs = gpus[1 - g.index].pool;
              // Reads from the lower half, writes to the upper one.
              uint8_t* dst = (pull ? mine : theirs) + kPool / 2;
              const uint8_t* src = pull ? theirs : mine;
              w.kernel<<<ctas, w.threads, w.slots ? kLinkSmem : 0, g.stream>>>(dst, src, bytes, std::min<uint64_t>(wrap, kPool / 2 / ctas / 393216 * 393216),
                                                                              chunk, m, g.stats);
            });
            raw("%s,mechanism=%s_%s chunk_bytes=%d slots=%d loads_ahead=%d ctas=%d,%.1f,GB/s,payload of %.0f KiB per CTA\n",
                both ? "nvlink_copy_duplex" : "nvlink_copy", w.name, pull ? "pull" : "push", chunk, w.slots, w.slots - w.pending, ctas, r, bytes / 1024.0);
          }
      }
  // Copy engine, one stream or one each way.
  for (bool both : {false, true})
    for (uint64_t bytes : {64ull << 10, 256ull << 10, 1ull << 20, 4ull << 20, 16ull << 20, 64ull << 20, 256ull << 20}) {
      std::vector<double> t[2];
      for (int rep = 0; rep < 7; ++rep) {
        std::vector<EventPair> ev;
        const int n = std::max<int>(1, (64ull << 20) / bytes);
        for (auto& g : gpus) {
          on(g);
          ev.emplace_back();
          CHECK(cudaEventRecord(ev.back().a, g.engine));
          for (int i = 0; i < n && (both || g.index == 0); ++i)
            CHECK(cudaMemcpyPeerAsync(gpus[1 - g.index].pool + kPool / 2, 1 - g.index, g.pool, g.index, bytes, g.engine));
          CHECK(cudaEventRecord(ev.back().b, g.engine));
        }
        sync_all();
        for (int i = 0; i < 2; ++i) t[i].push_back(double(n) * bytes / (ev[i].us() * 1e3));
      }
      double r = median(t[0]);
      if (both) r = std::min(r, median(t[1]));
      raw("%s,mechanism=copy_engine_push copy_bytes=%llu,%.1f,GB/s,back to back in one stream per GPU\n", both ? "nvlink_copy_duplex" : "nvlink_copy",
          (unsigned long long)bytes, r);
    }
}

static void adds() {
  for (int what = 0; what < 3; ++what)  // add, store, add both into the own memory
    for (bool both : {false, true})
      for (int ctas : {1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 64, 128}) {
        if (what == 2 && both) continue;
        // A staging of 256 columns, tile-major, larger than L2.
        const uint32_t rows = 64 * 2048 * 8;
        TensorMap maps[2];
        for (int i = 0; i < 2; ++i) {
          on(gpus[i]);
          maps[i] = make_map((what == 2 ? gpus[i] : gpus[1 - i]).pool + kPool / 2, rows, 256, 64, 1);
        }
        const uint64_t boxes = std::max<uint64_t>(32, uint64_t(std::min(45.0, 370.0 / ctas) * 2e5) / kChunkBytes);
        double r = rate_of(both, ctas, 5, [&](Gpu& g, Meeting m) {
          if (what == 1) link_tile_store<<<ctas, 32, kLinkSmem, g.stream>>>(maps[g.index], boxes, rows, m, g.stats);
          else link_tile_add<<<ctas, 32, kLinkSmem, g.stream>>>(maps[g.index], boxes, rows, m, g.stats);
        });
        raw("%s,mechanism=tensor %s of 64x64 bf16 boxes %s in_flight=4 ctas=%d,%.1f,GB/s,payload; from shared memory\n",
            both ? "nvlink_tile_duplex" : what == 2 ? "local_tile" : "nvlink_tile", what == 1 ? "store" : "add", what == 2 ? "local" : "remote", ctas, r);
      }
}

static void tails() {
  const char* names[] = {"nothing", "fence.gpu", "red.release.gpu own", "red.release.sys own", "red.release.sys peer", "red.relaxed.sys peer",
                         "fence.gpu, red.release.sys peer, red.release.gpu own"};
  const uint32_t rows = 64 * 2048 * 8, tiles = 24;
  struct Kind { const char* name; bool add, remote; };
  for (Kind kind : {Kind{"adds to peer", true, true}, Kind{"stores to peer", false, true}, Kind{"stores to own memory", false, false}})
    for (int ctas : {1, 16, 64, 128})
      for (uint32_t spin : {0u, 40000u})
        for (uint32_t tail = 0; tail < 7; ++tail) {
          TensorMap maps[2];
          for (int i = 0; i < 2; ++i) {
            on(gpus[i]);
            maps[i] = make_map((kind.remote ? gpus[1 - i] : gpus[i]).pool + kPool / 2, rows, 256, 64, 1);
          }
          double r = rate_of(true, ctas, 3, [&](Gpu& g, Meeting m) {
            (kind.add ? link_tail_add : link_tail_store)<<<ctas, 64, kLinkSmem, g.stream>>>(maps[g.index], tiles, rows, tail, spin, g.words,
                                                                                            gpus[1 - g.index].words, m, g.stats);
          });
          std::vector<LinkStats> h(ctas);
          on(gpus[0]);
          CHECK(cudaMemcpy(h.data(), gpus[0].stats + 512, ctas * sizeof(LinkStats), cudaMemcpyDeviceToHost));
          double busy = 0;
          for (auto& s : h) busy += double(s.bytes) / ctas / tiles * 1e-3;
          raw("tile_tail,\"%s, then %s; ctas=%d spin_us=%u\",%.2f,us,a tile's output from first box to the signal; both GPUs; %.0f GB/s\n", kind.name,
              names[tail], ctas, spin / 1000, busy, r);
        }
}

static void clear_words() {
  for (auto& g : gpus) {
    on(g);
    CHECK(cudaMemset(g.words, 0, 1024));
  }
  sync_all();
}

// After clear_words.
static double ping(int what, int rounds) {
  if (what == 0) {
    for (auto& g : gpus) {
      on(g);
      link_ping_remote<<<1, 32, 0, g.stream>>>(g.words, gpus[1 - g.index].words, g.index == 0, rounds, g.stats + 1024);
    }
  } else {
    on(gpus[0]);
    auto k = what == 1 ? link_ping_local_gpu : what == 2 ? link_ping_local_system_acquire : link_ping_local_system;
    k<<<2, 32, 0, gpus[0].stream>>>(gpus[0].words, rounds, gpus[0].stats + 1024);
  }
  CHECK(cudaGetLastError());
  for (auto& g : gpus) {
    on(g);
    CHECK(cudaStreamSynchronize(g.stream));
  }
  LinkStats s;
  on(gpus[0]);
  CHECK(cudaMemcpy(&s, gpus[0].stats + 1024, sizeof s, cudaMemcpyDeviceToHost));
  return double(s.end_ns - s.begin_ns) / rounds / 2;
}

static void flags() {
  const char* names[] = {"remote, red.release.sys and ld.acquire.sys", "local, red.release.gpu and ld.acquire.gpu",
                         "local, red.release.gpu and ld.acquire.sys", "local, red.release.sys and ld.acquire.sys"};
  for (int i = 0; i < 4; ++i)
    for (int rep = 0; rep < 3; ++rep) {
      clear_words();
      raw("nvlink_flag_one_way,\"%s\",%.1f,ns,10000 round trips / 2\n", names[i], ping(i, 10000));
    }
  for (int ctas : {4, 8, 32}) {  // beside pushes of both GPUs
    clear_words();
    for (auto& g : gpus) {
      on(g);
      link_copy_12<<<ctas, 32, kLinkSmem, g.engine>>>(gpus[1 - g.index].pool + kPool / 2, g.pool, 393216ull * std::max(40, 4000 / ctas), 48 * 393216, 16384, Meeting{}, g.stats);
    }
    double ns = ping(0, 500);
    double r = 0;
    sync_all();
    for (auto& g : gpus) r = std::max(r, rate(g, ctas));
    raw("nvlink_flag_one_way,\"%s, beside pushes of both GPUs by %d CTAs each\",%.1f,ns,500 round trips / 2; pushes at %.0f GB/s\n", names[0], ctas, ns, r);
  }
}

// The GEMM of gemm.cu on GPU 0; what runs beside it is the experiment.
static void interference() {
  const int m = 8192, n = 8192;
  Gpu& g = gpus[0];
  on(g);
  void *A, *B, *C;
  CtaStats* stats;
  uint32_t* done;
  CHECK(cudaMalloc(&A, 1ull << 28)); CHECK(cudaMalloc(&B, 1ull << 28)); CHECK(cudaMalloc(&C, 1ull << 28));
  CHECK(cudaMalloc(&stats, 256 * sizeof(CtaStats)));
  CHECK(cudaMalloc(&done, 256));
  random_bf16(A, 1ull << 27, 1);
  random_bf16(B, 1ull << 27, 2);
  CHECK(cudaFuncSetAttribute((const void*)gemm_w_d, cudaFuncAttributeMaxDynamicSharedMemorySize, kLinkSmem));
  uint8_t* theirs = gpus[1].pool;
  // An inner loop of copies by the peer, long enough to span the GEMM.
  struct Beside { const char* name; int own_ctas; int peer_ctas; const uint8_t* src; uint8_t* dst; uint64_t region; };
  const uint64_t large = 24ull << 20, small = 393216;
  for (int k : {512, 2048, 8192}) {
    const int ctas = 100;
    const int copies[] = {8, 16, 32};
    for (int c : copies) {
      const Beside all[] = {
          {"nothing", 0, 0, nullptr, nullptr, 0},
          {"own CTAs push HBM to peer", c, 0, g.pool, theirs + kPool / 2, large},
          {"own CTAs push L2 to peer", c, 0, g.pool, theirs + kPool / 2, small},
          {"own CTAs pull peer to HBM", c, 0, theirs, g.pool + kPool / 2, large},
          {"own CTAs pull peer to L2", c, 0, theirs, g.pool + kPool / 2, small},
          {"own CTAs copy HBM to HBM", c, 0, g.pool, g.pool + kPool / 2, large},
          {"own CTAs copy L2 to L2", c, 0, g.pool, g.pool + kPool / 2, small},
          {"peer's CTAs push to this HBM", 0, c, theirs, g.pool + kPool / 2, large},
          {"peer's CTAs pull this HBM", 0, c, g.pool, theirs + kPool / 2, large},
          {"copy engine pushes to peer", 0, -1, g.pool, theirs + kPool / 2, large},
          {"copy engine brings from peer", 0, -2, theirs, g.pool + kPool / 2, large},
      };
      TensorMap ma, mb, mc;
      on(g);
      ma = make_map(A, m, k, 128, 1);
      mb = make_map(B, k, n, 64, 4);
      mc = make_map(C, m, n, 64, 1);
      for (auto& b : all) {
        if (b.name == all[0].name && c != copies[0]) continue;
        if (b.peer_ctas < 0 && c != copies[0]) continue;
        const double gemm_us = 2.0 * m * n * k / (ctas * 6.0) * 1e-6;
        std::vector<double> us, mhz, gbs;
        for (int rep = 0; rep < 9; ++rep) {
          GemmProblem p = {};
          p.m_tiles = m / 128; p.n_tiles = n / 256; p.k_steps = k / 64; p.group_m = 16;
          p.tiles = p.m_tiles * p.n_tiles; p.compute_ctas = ctas; p.gates = nullptr; p.chain = nullptr;
          on(g);
          CHECK(cudaMemsetAsync(done, 0, 4, g.stream));
          CHECK(cudaStreamSynchronize(g.stream));
          EventPair ev;
          const uint64_t total = uint64_t(gemm_us * 1.6 + 150) * 370000ull;
          if (b.peer_ctas > 0) {
            on(gpus[1]);
            const uint64_t each = uint64_t(std::min(45e3, 370e3 / c) * (gemm_us * 1.6 + 150)) / small * small;
            link_copy_12<<<c, 32, kLinkSmem, gpus[1].stream>>>(b.dst, b.src, each, large, 16384, Meeting{}, gpus[1].stats);
            on(g);
          } else if (b.peer_ctas < 0) {
            CHECK(cudaEventRecord(ev.a, g.engine));
            for (uint64_t at = 0; at < total; at += 64ull << 20)
              CHECK(cudaMemcpyPeerAsync(b.dst + at % (2ull << 30), b.peer_ctas == -1 ? 1 : 0, b.src + at % (2ull << 30), b.peer_ctas == -1 ? 0 : 1, 64 << 20, g.engine));
            CHECK(cudaEventRecord(ev.b, g.engine));
          }
          CopyWork w = {b.own_ctas ? b.src : nullptr, b.own_ctas ? b.dst : nullptr, b.region, done, nullptr};
          CtaStats* s = stats;
          void* args[] = {&ma, &mb, &mc, &p, &w, &s};
          CHECK(cudaLaunchKernel((const void*)gemm_w_d, dim3(ctas + b.own_ctas), dim3(kGemmThreads), args, kLinkSmem, g.stream));
          sync_all();
          on(g);
          std::vector<CtaStats> h(ctas + b.own_ctas);
          CHECK(cudaMemcpy(h.data(), stats, h.size() * sizeof(CtaStats), cudaMemcpyDeviceToHost));
          double ns = 0, cycles = 0, copied = 0;
          for (int i = 0; i < ctas; ++i) { ns += double(h[i].end_ns - h[i].begin_ns); cycles += double(h[i].cycles); }
          for (size_t i = ctas; i < h.size(); ++i) copied += double(h[i].bytes) / double(h[i].end_ns - h[i].begin_ns);
          if (b.peer_ctas > 0) copied = rate(gpus[1], c);
          if (b.peer_ctas < 0) copied = double((total + (64ull << 20) - 1) / (64ull << 20) * (64ull << 20)) / (ev.us() * 1e3);
          if (rep >= 2) { us.push_back(ns / ctas * 1e-3); mhz.push_back(cycles / ns * 1e3); gbs.push_back(copied); }
        }
        raw("gemm_beside_copies,k=%d gemm_ctas=%d beside=%s copy_ctas=%d,%.2f,us,mean CTA time; copies %.0f GB/s; %.0f MHz; %.0f kilocycles\n", k, ctas, b.name,
            b.own_ctas ? b.own_ctas : std::max(0, b.peer_ctas), median(us), median(gbs), median(mhz), median(us) * median(mhz) * 1e-3);
      }
    }
  }
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "nvlink bandwidth | adds | tails | flags | interference\n");
    return 2;
  }
  const std::string what = argv[1];
  setup();
  if (what == "bandwidth") bandwidth();
  else if (what == "adds") adds();
  else if (what == "tails") tails();
  else if (what == "flags") flags();
  else if (what == "interference") interference();
  else return 2;
  return 0;
}

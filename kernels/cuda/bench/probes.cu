// Small kernels that each read one number off the card.
#include "copy.cuh"
#include "flags.cuh"
#include "reduce.cuh"

// One box of a (columns, rows) map without swizzle.
DEVICE void tma_load_box(u32 dst, const TensorMap* map, u32 bar, u32 column, u32 row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
               "l"(map), "r"(bar), "r"(column), "r"(row)
               : "memory");
}
DEVICE void tma_store_box(const TensorMap* map, u32 src, u32 column, u32 row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(src), "r"(column), "r"(row)
               : "memory");
}

struct ProbeStats {
  u64 begin_ns, end_ns, cycles, bytes;
};

DEVICE void probe_record(ProbeStats* stats, u64 begin, u64 c0, u64 bytes) {
  __syncthreads();
  if (threadIdx.x == 0) stats[blockIdx.x] = {begin, globaltimer_ns(), clock_cycles() - c0, bytes};
}

#define REDUCE_VECTOR(NAME, THREADS, INPUTS, UNROLL)                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                       \
      NAME(u8* out, const u8* in, u64 input_pitch, u64 bytes, ProbeStats* stats) {                               \
    const u64 begin = globaltimer_ns(), c0 = clock_cycles();                                                     \
    reduce_vector<THREADS, INPUTS, UNROLL>(out + blockIdx.x * bytes, in + blockIdx.x * bytes, input_pitch, bytes); \
    probe_record(stats, begin, c0, bytes);                                                                       \
  }
REDUCE_VECTOR(reduce_2in_8k, 256, 2, 1)
REDUCE_VECTOR(reduce_2in_16k, 256, 2, 2)
REDUCE_VECTOR(reduce_2in_32k, 256, 2, 4)
REDUCE_VECTOR(reduce_2in_64k, 256, 2, 8)
REDUCE_VECTOR(reduce_2in_64k_t512, 512, 2, 4)
REDUCE_VECTOR(reduce_4in_16k, 256, 4, 1)
REDUCE_VECTOR(reduce_4in_32k, 256, 4, 2)
REDUCE_VECTOR(reduce_4in_64k, 256, 4, 4)
REDUCE_VECTOR(reduce_8in_32k, 256, 8, 1)
REDUCE_VECTOR(reduce_8in_64k, 256, 8, 2)

#define REDUCE_BULK(NAME, INPUTS, SLOTS, SLOT_BYTES)                                                            \
  extern "C" __global__ void __launch_bounds__(288, 1)                                                          \
      NAME(u8* out, const u8* in, u64 input_pitch, u64 bytes, ProbeStats* stats) {                              \
    const u64 begin = globaltimer_ns(), c0 = clock_cycles();                                                    \
    reduce_bulk<256, INPUTS, SLOTS, SLOT_BYTES>(smem_address(dynamic_smem), out + blockIdx.x * bytes,             \
                                                in + blockIdx.x * bytes, input_pitch, bytes);                   \
    probe_record(stats, begin, c0, bytes);                                                                      \
  }
REDUCE_BULK(reduce_2in_bulk96k, 2, 6, 8192)
REDUCE_BULK(reduce_2in_bulk192k, 2, 12, 8192)
REDUCE_BULK(reduce_4in_bulk192k, 4, 6, 8192)
REDUCE_BULK(reduce_8in_bulk192k, 8, 6, 4096)

#define COPY_KERNEL(NAME, SLOTS, CALL)                                                          \
  extern "C" __global__ void __launch_bounds__(32, 1)                                           \
      NAME(u8* dst_all, const u8* src_all, u64 bytes, u32 chunk, ProbeStats* stats) {           \
    const u32 smem = smem_address(dynamic_smem), bars = smem + SLOTS * chunk;                     \
    const u64 begin = globaltimer_ns(), c0 = clock_cycles();                                    \
    const u8* src = src_all + blockIdx.x * bytes;                                               \
    u8* dst = dst_all + blockIdx.x * bytes;                                                     \
    u64 moved = 0;                                                                              \
    if (threadIdx.x == 0) {                                                                     \
      for (u32 s = 0; s < SLOTS; ++s) mbarrier_init(bars + s * 8, 1);                           \
      mbarrier_init_fence();                                                                    \
      moved = CALL;                                                                             \
    }                                                                                           \
    probe_record(stats, begin, c0, moved);                                                      \
  }
COPY_KERNEL(copy_serial3_read, 3, (copy_serial<3, false>(smem, bars, chunk, src, dst, bytes, bytes)))
COPY_KERNEL(copy_serial3_visible, 3, (copy_serial<3, true>(smem, bars, chunk, src, dst, bytes, bytes)))
COPY_KERNEL(copy_serial1_visible, 1, (copy_serial<1, true>(smem, bars, chunk, src, dst, bytes, bytes)))
COPY_KERNEL(copy_pipelined3, 3, (copy_pipelined<3, 1>(smem, bars, chunk, src, dst, bytes, bytes, nullptr)))
COPY_KERNEL(copy_pipelined6, 6, (copy_pipelined<6, 2>(smem, bars, chunk, src, dst, bytes, bytes, nullptr)))
COPY_KERNEL(copy_pipelined12, 12, (copy_pipelined<12, 4>(smem, bars, chunk, src, dst, bytes, bytes, nullptr)))

#define GATHER_KERNEL(NAME, SLOTS, CALL)                                                        \
  extern "C" __global__ void __launch_bounds__(32, 1)                                           \
      NAME(u8* dst_all, const u8* table, const u32* rows_all, u32 count, u32 row_bytes, ProbeStats* stats) { \
    const u32 smem = smem_address(dynamic_smem), bars = smem + SLOTS * row_bytes;                 \
    const u64 begin = globaltimer_ns(), c0 = clock_cycles();                                    \
    const u32* rows = rows_all + blockIdx.x * count;                                            \
    u8* dst = dst_all + u64(blockIdx.x) * count * row_bytes;                                    \
    if (threadIdx.x == 0) {                                                                     \
      for (u32 s = 0; s < SLOTS; ++s) mbarrier_init(bars + s * 8, 1);                           \
      mbarrier_init_fence();                                                                    \
      CALL;                                                                                     \
    }                                                                                           \
    probe_record(stats, begin, c0, u64(count) * row_bytes);                                     \
  }
GATHER_KERNEL(gather_serial16_read, 16, (gather_serial<16, false>(smem, bars, row_bytes, table, rows, count, dst)))
GATHER_KERNEL(gather_serial16_visible, 16, (gather_serial<16, true>(smem, bars, row_bytes, table, rows, count, dst)))
GATHER_KERNEL(gather_serial1_visible, 1, (gather_serial<1, true>(smem, bars, row_bytes, table, rows, count, dst)))
GATHER_KERNEL(gather_pipelined16, 16, (gather_pipelined<16, 4>(smem, bars, row_bytes, table, rows, count, dst)))

// Rows of a table by boxes of 512 bytes, as a kernel without plain bulk copies moves vectors: 16 lanes of a warp load a row
// each, all boxes in flight, wait, store it box by box behind a proxy fence each, wait until it is visible, and raise a
// counter once for all. A tensor map's box takes 256 elements a side, so a row of 14,336 bytes is 28 of them.
extern "C" __global__ void __launch_bounds__(384, 1)
    gather_boxes(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, const u32* rows_all, u32 slices,
                 u32 boxes, u32* counters, ProbeStats* stats) {
  constexpr u32 kLanes = 16, kBoxElements = 256, kBoxBytes = 512;
  const u32 smem = smem_address(dynamic_smem), bars = smem + kLanes * boxes * kBoxBytes;
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  const u32 lane = threadIdx.x;
  if (lane < 32) {
    for (u32 s = 0; s < slices; ++s) {
      const u32 slice = blockIdx.x * slices + s;
      if (lane < kLanes) {
        const u32 row = rows_all[slice * kLanes + lane], bar = bars + lane * 8, here = smem + lane * boxes * kBoxBytes;
        mbarrier_init(bar, 1);
        mbarrier_arrive_expect_bytes(bar, boxes * kBoxBytes);
        for (u32 i = 0; i < boxes; ++i) tma_load_box(here + i * kBoxBytes, &from, bar, i * kBoxElements, row);
        mbarrier_wait_bounded(bar, 0);
        for (u32 i = 0; i < boxes; ++i) {
          fence_smem_to_async();
          tma_store_box(&to, here + i * kBoxBytes, i * kBoxElements, slice * kLanes + lane);
        }
        store_commit();
        store_wait_visible<0>();
      }
      __syncwarp();
      if (lane == 0) flag_add_release(counters + slice / 8, kLanes);
    }
  }
  probe_record(stats, begin, c0, u64(slices) * kLanes * boxes * kBoxBytes);
}

// Commands pushed into a ring in the host's memory, by one thread of each of the first `pushers` CTAs, with what mKernel's
// senders do around it: find a bit and clear it, mark the chunk, fence, claim a slot, look whether there is room, write 32
// bytes of which the first word is a release. The other CTAs poll one word of the host each, as its reducers do: 64 times
// without a pause, then with one of 100 ns. Cycles of each part are summed.
struct PushStats {
  u64 begin_ns, end_ns, cycles, find, mark, fence, claim, write, count;
};
DEVICE u32 poll_host(const u32* word) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}
extern "C" __global__ void __launch_bounds__(384, 1)
    push_commands(u32 pushers, u32 count, u64* ring, u64 slots, unsigned long long* head, const volatile u64* tail, volatile u64* room,
                  u32* bits, u32* marks, const u32* host_words, u32* ended, PushStats* stats) {
  PushStats sum = {globaltimer_ns(), 0, clock_cycles(), 0, 0, 0, 0, 0, 0};
  const u64 begin = sum.cycles;
  if (blockIdx.x < pushers) {
    u32* mine = bits + blockIdx.x * 32;
    for (u32 i = 0; i < count; ++i) {
      if (threadIdx.x == 0) {
        const u64 t0 = clock_cycles();
        const u32 old = flag_read_acquire(mine);
        if (atomicCAS(mine, old, old ^ 1) != old) __trap();  // Nobody else writes it; the branch waits for the answer.
        const u64 t1 = clock_cycles();
        flag_store_release(marks + blockIdx.x * count + i, 1);
        const u64 t2 = clock_cycles();
        __threadfence();
        const u64 t3 = clock_cycles();
        const u64 slot = atomicAdd(head, 1ull);
        while (slot >= slots + *room && clock_cycles() - begin < kWatchdogCycles) *room = *tail;
        const u64 t4 = clock_cycles();
        u64* at = ring + slot % slots * 4;
        for (u32 w = 1; w < 4; ++w) asm volatile("st.global.u64 [%0], %1;" ::"l"(at + w), "l"(slot) : "memory");
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(slot + 1) : "memory");
        const u64 t5 = clock_cycles();
        sum.find += t1 - t0; sum.mark += t2 - t1; sum.fence += t3 - t2; sum.claim += t4 - t3; sum.write += t5 - t4;
      }
      __syncthreads();
    }
    sum.count = count;
    if (threadIdx.x == 0) flag_add_release(ended, 1);
  } else if (threadIdx.x == 0) {
    const u32* word = host_words + blockIdx.x * 16;
    while (clock_cycles() - begin < kWatchdogCycles) {
      const u64 t0 = clock_cycles();
      if (poll_host(word) != 0) break;  // Nobody writes it; the branch waits for the answer.
      sum.find += clock_cycles() - t0;
      if (++sum.count > 64) __nanosleep(100);
      if (sum.count % 8 == 0 && flag_read_acquire(ended) >= pushers) break;
    }
  }
  if (threadIdx.x == 0) {
    sum.end_ns = globaltimer_ns();
    sum.cycles = clock_cycles() - begin;
    stats[blockIdx.x] = sum;
  }
}

// Every chunk is loaded, every `reads_per_write`-th also stored; 0: nothing is loaded, every chunk is stored. Twelve chunks
// are in flight, at most four of them still read by stores.
extern "C" __global__ void __launch_bounds__(32, 1)
    stream_mix(u8* dst_all, const u8* src_all, u64 bytes, u32 chunk, u32 reads_per_write, ProbeStats* stats) {
  constexpr u32 kSlots = 12, kLead = 8;
  const u32 smem = smem_address(dynamic_smem), bars = smem + kSlots * chunk;
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  const u8* src = src_all + blockIdx.x * bytes;
  u8* dst = dst_all + blockIdx.x * bytes;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < kSlots; ++s) mbarrier_init(bars + s * 8, 1);
    mbarrier_init_fence();
    const u64 chunks = bytes / chunk;
    if (reads_per_write == 0) {
      for (u64 i = 0; i < chunks; ++i) {
        if (i >= kSlots) store_wait_smem_read<kSlots - 1>();
        bulk_store(dst + i * chunk, smem + u32(i % kSlots) * chunk, chunk);
        store_commit();
      }
    } else {
      RingPosition load_at, used_at;
      for (u64 i = 0; i < chunks + kLead; ++i) {
        if (i < chunks) {
          // An empty group stands for a chunk that is not stored: groups count chunks.
          if (i >= kSlots) store_wait_smem_read<kSlots - kLead - 1>();
          const u32 bar = bars + load_at.slot * 8;
          mbarrier_arrive_expect_bytes(bar, chunk);
          bulk_load(smem + load_at.slot * chunk, src + i * chunk, chunk, bar);
          load_at.advance<kSlots>();
        }
        if (i >= kLead) {
          const u64 used = i - kLead;
          mbarrier_wait_bounded(bars + used_at.slot * 8, used_at.parity);
          if (used % reads_per_write == 0) bulk_store(dst + used * chunk, smem + used_at.slot * chunk, chunk);
          store_commit();
          used_at.advance<kSlots>();
        }
      }
    }
    store_wait_visible<0>();
  }
  probe_record(stats, begin, c0, bytes);
}

// Does nothing, with the resources of the real kernel.
extern "C" __global__ void __launch_bounds__(384, 1) probe_empty(u32* word) {
  if (word != nullptr && threadIdx.x == 5000) *word = dynamic_smem[0];
}

extern "C" __global__ void __launch_bounds__(128) probe_clear(u32* words, u32 count) {
  for (u32 i = blockIdx.x * 128 + threadIdx.x; i < count; i += gridDim.x * 128) words[i] = 0;
}

extern "C" __global__ void __launch_bounds__(384, 1) probe_grid_barrier(u32* word, u32 rounds, u32 first_round, ProbeStats* stats) {
  const u64 begin = globaltimer_ns(), c0 = clock_cycles();
  for (u32 r = 0; r < rounds; ++r) grid_barrier(word, gridDim.x, first_round + r);
  probe_record(stats, begin, c0, 0);
}

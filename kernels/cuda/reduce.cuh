// out = sum of the inputs, bf16 with f32 sums.
#pragma once
#include "base.cuh"
#include "flags.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

struct Vector16 {
  u32 x[4];
};

// Not the read-only path: in a fused kernel the inputs are written while it runs.
DEVICE Vector16 load16(const u8* p) {
  Vector16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void store16(u8* p, const Vector16& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x[0]), "r"(v.x[1]), "r"(v.x[2]),
               "r"(v.x[3])
               : "memory");
}
DEVICE Vector16 load16_shared(u32 p) {
  Vector16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
               : "r"(p)
               : "memory");
  return v;
}
DEVICE float bf16_low(u32 v) { return __uint_as_float(v << 16); }
DEVICE float bf16_high(u32 v) { return __uint_as_float(v & 0xffff0000u); }

template <u32 Inputs>
DEVICE Vector16 sum16(const Vector16 (&in)[Inputs]) {
  Vector16 out;
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    float low = bf16_low(in[0].x[j]), high = bf16_high(in[0].x[j]);
#pragma unroll
    for (u32 i = 1; i < Inputs; ++i) {
      low += bf16_low(in[i].x[j]);
      high += bf16_high(in[i].x[j]);
    }
    out.x[j] = pack_bf16(low, high);
  }
  return out;
}

// In flight: Threads x Unroll x Inputs x 16 bytes. All loads of a round are issued before the first add.
template <u32 Threads, u32 Inputs, u32 Unroll>
DEVICE void reduce_vector(u8* out, const u8* in, u64 input_pitch, u64 bytes) {
  constexpr u32 kRound = Threads * 16 * Unroll;
  for (u64 at = threadIdx.x * 16; at < bytes; at += kRound) {
    Vector16 v[Unroll][Inputs];
#pragma unroll
    for (u32 u = 0; u < Unroll; ++u)
#pragma unroll
      for (u32 i = 0; i < Inputs; ++i) v[u][i] = load16(in + i * input_pitch + at + u * (Threads * 16));
#pragma unroll
    for (u32 u = 0; u < Unroll; ++u) store16(out + at + u * (Threads * 16), sum16<Inputs>(v[u]));
  }
}

// Inputs come through a ring of shared-memory slots (SlotBytes of each input), so that the bytes in flight
// do not depend on registers. Warp 0 loads; the other warps add and store.
template <u32 AddThreads, u32 Inputs, u32 Slots, u32 SlotBytes>
DEVICE void reduce_bulk(u32 smem, u8* out, const u8* in, u64 input_pitch, u64 bytes) {
  constexpr u32 kSlot = Inputs * SlotBytes;
  const u32 full = smem + Slots * kSlot, empty = full + Slots * 8;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < Slots; ++s) {
      mbarrier_init(full + s * 8, 1);
      mbarrier_init(empty + s * 8, AddThreads / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  RingPosition at;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) {
      for (u64 offset = 0; offset < bytes; offset += SlotBytes) {
        mbarrier_wait_bounded(empty + at.slot * 8, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(full + at.slot * 8, kSlot);
        for (u32 i = 0; i < Inputs; ++i) {
          bulk_load(smem + at.slot * kSlot + i * SlotBytes, in + i * input_pitch + offset, SlotBytes, full + at.slot * 8);
        }
        at.advance<Slots>();
      }
    }
    return;
  }
  const u32 thread = threadIdx.x - 32;
  for (u64 offset = 0; offset < bytes; offset += SlotBytes) {
    mbarrier_wait_bounded(full + at.slot * 8, at.parity);
#pragma unroll 4
    for (u32 b = thread * 16; b < SlotBytes; b += AddThreads * 16) {
      Vector16 v[Inputs];
#pragma unroll
      for (u32 i = 0; i < Inputs; ++i) v[i] = load16_shared(smem + at.slot * kSlot + i * SlotBytes + b);
      store16(out + offset + b, sum16<Inputs>(v));
    }
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(empty + at.slot * 8);
    at.advance<Slots>();
  }
}

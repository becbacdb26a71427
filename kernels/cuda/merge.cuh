// Joins partial results of attention by their log-sum-exps.
#pragma once
#include "program.cuh"
#include "reduce.cuh"

constexpr u32 kMaxParts = 4;

DEVICE float load_float(const u8* p) {
  float v;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

// 16 lanes do a row of 128 elements: 16 bytes each. The result may overwrite a part: a row is read before it is written.
template <u32 Threads>
DEVICE void merge(const Program& p, const Task& task, u32 thread) {
  const u32 parts = task.inputs / 2, column = thread % 16;
  const auto region = [&](u32 i) -> const Region& { return p.regions[task.first_region + i]; };
  const auto at = [&](u32 i, u32 row) { return reinterpret_cast<u8*>(region(i).address) + u64(row) * region(i).row_pitch; };
  for (u32 row = thread / 16; row < task.rows; row += Threads / 16) {
    float log[kMaxParts];
    float top = -1e30f;
#pragma unroll
    for (u32 i = 0; i < kMaxParts; ++i) {
      log[i] = i < parts ? load_float(at(2 * i + 1, row)) : -1e30f;
      top = fmaxf(top, log[i]);
    }
    float all = 0.0f, sum[8] = {};
#pragma unroll
    for (u32 i = 0; i < kMaxParts; ++i) {
      if (i >= parts) break;
      const float weight = __expf(log[i] - top);
      all += weight;
      const Vector16 x = load16(at(2 * i, row) + column * 16);
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        sum[2 * j] += weight * bf16_low(x.x[j]);
        sum[2 * j + 1] += weight * bf16_high(x.x[j]);
      }
    }
    Vector16 y;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) y.x[j] = pack_bf16(sum[2 * j] / all, sum[2 * j + 1] / all);
    __syncwarp();
    store16(at(task.inputs, row) + column * 16, y);
    if (column == 0) *reinterpret_cast<float*>(at(task.inputs + 1, row)) = top + __logf(all);
  }
}

// One CTA's part of O = softmax(Q K^T / sqrt(128)) V, head dimension 128, bf16 with f32 softmax and sums, not causal.
//
// Each consumer warpgroup owns 64 query rows; one more warpgroup holds a loader thread and a storer thread
// per consumer. A task is one block of query rows of one head; K and V come in blocks of 128 rows through two
// rings, because a step needs K one step before it needs V.
#pragma once
#include "base.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "watchdog.cuh"
#include "wgmma.cuh"

constexpr u32 kHeadDim = 128;
constexpr u32 kKvRows = 128;
constexpr u32 kKvBytes = kKvRows * kHeadDim * 2;
constexpr u32 kKvBlockBytes = kKvRows * 128;  // one block of 64 columns

struct AttentionProblem {
  u32 q_blocks;   // of one head
  u32 kv_blocks;  // of one head
  u32 tasks;      // heads x q_blocks
  float scale_log2;  // log2(e) / sqrt(head dimension)
};

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Overlapped: the products of step j + 1's scores run under step j's softmax; it needs the registers of two
// consumers' budget. TurnTaking: consumers issue their products one after the other, so that one's products
// run under the other's softmax.
template <u32 Consumers, bool Overlapped, bool TurnTaking, u32 Stages>
struct AttentionTile {
  static constexpr u32 kQRows = Consumers * 64;
  static constexpr u32 kQBytes = kQRows * kHeadDim * 2;
  static constexpr u32 kQBlockBytes = kQRows * 128;
  static constexpr u32 kQ = 0;
  static constexpr u32 kK = kQBytes;
  static constexpr u32 kV = kK + Stages * kKvBytes;
  static constexpr u32 kO = kV + Stages * kKvBytes;
  static constexpr u32 kBarriers = kO + kQBytes;
  static constexpr u32 kQFull = kBarriers;
  static constexpr u32 kQEmpty = kQFull + 8;
  static constexpr u32 kKFull = kQEmpty + 8;
  static constexpr u32 kKEmpty = kKFull + Stages * 8;
  static constexpr u32 kVFull = kKEmpty + Stages * 8;
  static constexpr u32 kVEmpty = kVFull + Stages * 8;
  static constexpr u32 kOReady = kVEmpty + Stages * 8;
  static constexpr u32 kOFree = kOReady + Consumers * 8;
  static constexpr u32 kFinished = kOFree + Consumers * 8;
  static constexpr u32 kSmemBytes = kFinished + 8;
  static_assert(kSmemBytes <= 232448, "a block gets 227 KiB of shared memory");

  static DEVICE void init_barriers(u32 smem) {
    mbarrier_init(smem + kQFull, 1);
    mbarrier_init(smem + kQEmpty, Consumers * 4);
    for (u32 s = 0; s < Stages; ++s) {
      mbarrier_init(smem + kKFull + s * 8, 1);
      mbarrier_init(smem + kVFull + s * 8, 1);
      mbarrier_init(smem + kKEmpty + s * 8, Consumers * 4);
      mbarrier_init(smem + kVEmpty + s * 8, Consumers * 4);
    }
    for (u32 i = 0; i < Consumers; ++i) {
      mbarrier_init(smem + kOReady + i * 8, 4);
      mbarrier_init(smem + kOFree + i * 8, 1);
    }
    watchdog_init(smem + kFinished);
    mbarrier_init_fence();
  }

  // Where the loader is in its work: as it begins, or when the first task's first step, if `ahead` is 1, is loaded.
  struct Loader {
    RingPosition k_at, v_at;
    u32 q_parity;
    DEVICE explicit Loader(u32 ahead) : k_at{ahead, 0}, v_at{Overlapped ? 0 : ahead, 0}, q_parity(ahead ^ 1) {
      static_assert(Stages > 1, "one step ahead stays in the ring's first round");
    }
  };
  // Where a task's operands lie.
  struct Operands {
    const TensorMap *q, *k, *v;
    u32 q_row, k_row, v_row;
  };

  // What a step loads, in the order in which places come free: the first K before Q, which waits until the task before is
  // over with its own; with overlap K of a step before V of the step before it, because that V's place is free only half a
  // step before this K is needed.
  // Where Free, all places are known to be.
  template <bool Free>
  static DEVICE void load_step(u32 smem, Loader& me, const Operands& of, u32 j) {
    load_block<Free>(smem + kK, smem + kKFull, smem + kKEmpty, me.k_at, of.k, of.k_row + j * kKvRows);
    if (j == 0) {
      if constexpr (!Free) mbarrier_wait(smem + kQEmpty, me.q_parity);
      me.q_parity ^= 1;
      mbarrier_arrive_expect_bytes(smem + kQFull, kQBytes);
      tma_load(smem + kQ, of.q, smem + kQFull, of.q_row, 0);
    }
    if (!Overlapped || j > 0) load_v<Free>(smem, me, of, Overlapped ? j - 1 : j);
  }
  template <bool Free>
  static DEVICE void load_v(u32 smem, Loader& me, const Operands& of, u32 j) {
    load_block<Free>(smem + kV, smem + kVFull, smem + kVEmpty, me.v_at, of.v, of.v_row + j * kKvRows);
  }
  // A task from step `first` on. `before(j)` comes before step j's loads.
  template <class Before>
  static DEVICE void load_task(u32 smem, Loader& me, const Operands& of, u32 first, u32 steps, Before before) {
    for (u32 j = first; j < steps; ++j) {
      before(j);
      load_step<false>(smem, me, of, j);
    }
    if constexpr (Overlapped) load_v<false>(smem, me, of, steps - 1);
  }
  template <bool Free>
  static DEVICE void load_block(u32 to, u32 full, u32 empty, RingPosition& at, const TensorMap* map, u32 row) {
    if constexpr (!Free) mbarrier_wait(empty + at.slot * 8, at.parity ^ 1);
    mbarrier_arrive_expect_bytes(full + at.slot * 8, kKvBytes);
    tma_load(to + at.slot * kKvBytes, map, full + at.slot * 8, row, 0);
    at.template advance<Stages>();
  }

  static DEVICE void load(u32 smem, const TensorMap* q, const TensorMap* k, const TensorMap* v, const AttentionProblem& p,
                          u32 first, u32 stride) {
    Loader me(0);
    for (u32 t = first; t < p.tasks; t += stride) {
      const u32 kv_row = t / p.q_blocks * p.kv_blocks * kKvRows;
      // Heads follow each other: block t begins at row t * kQRows.
      load_task(smem, me, {q, k, v, t * kQRows, kv_row, kv_row}, 0, p.kv_blocks, [](u32) {});
    }
  }

  // One storer thread serves all consumers: they end a task at about the same time, and need their staging
  // again only at the end of the next one.
  static DEVICE void store(u32 smem, const TensorMap* o, const AttentionProblem& p, u32 first, u32 stride) {
    u32 parity = 0;
    for (u32 t = first; t < p.tasks; t += stride) {
      for (u32 c = 0; c < Consumers; ++c) {
        mbarrier_wait(smem + kOReady + c * 8, parity);
        tma_store(o, smem + kO + c * (64 * kHeadDim * 2), t * kQRows + c * 64, 0);
        store_commit();
      }
      store_wait_smem_read<0>();
      for (u32 c = 0; c < Consumers; ++c) mbarrier_arrive(smem + kOFree + c * 8);
      parity ^= 1;
    }
    store_wait_visible<0>();
  }

  static DEVICE void issue_scores(float (&s)[64], u64 q, u64 k) {
#pragma unroll
    for (u32 i = 0; i < kHeadDim / 16; ++i) {
      const u32 block = i / 4, within = (i % 4) * (32 >> 4);
      wgmma_m64n128k16<0>(s, q + block * (kQBlockBytes >> 4) + within, k + block * (kKvBlockBytes >> 4) + within, i != 0);
    }
    wgmma_commit();
  }

  static DEVICE void issue_values(float (&o)[64], const u32 (&probabilities)[32], u64 v, bool accumulate) {
#pragma unroll
    for (u32 i = 0; i < kKvRows / 16; ++i) {
      wgmma_m64n128k16_reg<1>(o, probabilities[4 * i], probabilities[4 * i + 1], probabilities[4 * i + 2],
                              probabilities[4 * i + 3], v + i * ((16 * 128) >> 4), i != 0 || accumulate);
    }
    wgmma_commit();
  }

  // A thread holds 32 columns of each of two rows; the four lanes of a quad hold the rest of these rows.
  static DEVICE void softmax(float (&s)[64], float (&row_max)[2], float (&row_sum)[2], float (&rescale)[2], float scale) {
    float m[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      m[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
      for (u32 i = 1; i < 16; ++i) m[r] = fmaxf(m[r], fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
    }
#pragma unroll
    for (u32 lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
      for (u32 r = 0; r < 2; ++r) m[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], lanes));
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      m[r] = fmaxf(m[r], row_max[r]);
      rescale[r] = exp2_fast((row_max[r] - m[r]) * scale);
      row_max[r] = m[r];
      const float offset = m[r] * scale;
      float sum = 0.0f;
#pragma unroll
      for (u32 i = 0; i < 16; ++i) {
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
          const float x = exp2_fast(fmaf(s[4 * i + 2 * r + e], scale, -offset));
          s[4 * i + 2 * r + e] = x;
          sum += x;
        }
      }
      row_sum[r] = row_sum[r] * rescale[r] + sum;
    }
  }

  static DEVICE void pack_probabilities(const float (&s)[64], u32 (&probabilities)[32]) {
#pragma unroll
    for (u32 i = 0; i < 32; ++i) probabilities[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  static DEVICE void rescale_output(float (&o)[64], const float (&rescale)[2]) {
#pragma unroll
    for (u32 i = 0; i < 64; ++i) o[i] *= rescale[(i >> 1) & 1];
  }

  static DEVICE void release(u32 bar) {
    if (lane_id() == 0) mbarrier_arrive(bar);
  }

  // Where one consumer is in its work.
  struct Consumer {
    u32 index;
    u64 q, k, v;  // operand descriptors of slot 0
    RingPosition k_at, v_at;
    u32 task_parity = 0;
  };

  // What a thread holds of a Q block between two KV blocks.
  struct State {
    float o[64];
    float row_max[2], row_sum[2];
  };

  static DEVICE Consumer make_consumer(u32 smem, u32 index) {
    Consumer me;
    me.index = index;
    me.q = descriptor_k_major(smem + kQ + index * (64 * 128));
    me.k = descriptor_k_major(smem + kK);
    me.v = descriptor_mn_major(smem + kV, kKvBlockBytes);
    return me;
  }

  // One consumer warpgroup; logarithms are left out if `logs` is null.
  static DEVICE void attend(u32 smem, const AttentionProblem& p, u32 first, u32 stride, u32 consumer, float* logs) {
    Consumer me = make_consumer(smem, consumer);
    begin_turns(consumer);
    for (u32 t = first; t < p.tasks; t += stride) {
      State state;
      attend_block(smem, me, state, p.kv_blocks, p.scale_log2, nullptr);
      if (logs != nullptr) write_logs(state, p.scale_log2, logs + t * kQRows, consumer);
      stage_output(smem, state.o, state.row_sum, consumer, me.task_parity);
      me.task_parity ^= 1;
    }
    end_turns(consumer);
  }

  // One Q block over `kv_blocks` blocks, from an empty state or from the one that lies at `from`.
  static DEVICE void attend_block(u32 smem, Consumer& me, State& state, u32 kv_blocks, float scale, const u8* from) {
    float s[64];
    u32 probabilities[32];
    float rescale[2];
    mbarrier_wait(smem + kQFull, me.task_parity);
    if constexpr (Overlapped) {
      mbarrier_wait(smem + kKFull + me.k_at.slot * 8, me.k_at.parity);
      if constexpr (TurnTaking) take_turn(me.index);
      wgmma_fence();
      issue_scores(s, me.q, me.k + me.k_at.slot * (kKvBytes >> 4));
      if constexpr (TurnTaking) pass_turn(me.index);
      begin_state(state, from, me.index);
      wgmma_wait<0>();
      release(smem + kKEmpty + me.k_at.slot * 8);
      me.k_at.template advance<Stages>();
      softmax(s, state.row_max, state.row_sum, rescale, scale);
      pack_probabilities(s, probabilities);
      if (from != nullptr) rescale_output(state.o, rescale);
      if (kv_blocks > 1) mbarrier_wait(smem + kKFull + me.k_at.slot * 8, me.k_at.parity);
      for (u32 j = 1; j < kv_blocks; ++j) {
        if constexpr (TurnTaking) take_turn(me.index);
        wgmma_fence();
        issue_scores(s, me.q, me.k + me.k_at.slot * (kKvBytes >> 4));
        mbarrier_wait(smem + kVFull + me.v_at.slot * 8, me.v_at.parity);
        wgmma_fence();  // o and the probabilities were written since the last one
        issue_values(state.o, probabilities, me.v + me.v_at.slot * (kKvBytes >> 4), j != 1 || from != nullptr);
        if constexpr (TurnTaking) pass_turn(me.index);
        wgmma_wait<1>();
        release(smem + kKEmpty + me.k_at.slot * 8);
        me.k_at.template advance<Stages>();
        // Long there. It ends a basic block: else ptxas may move the release of K below the softmax.
        mbarrier_wait(smem + kVFull + me.v_at.slot * 8, me.v_at.parity);
        softmax(s, state.row_max, state.row_sum, rescale, scale);
        wgmma_hold(s);
        // The next step's wait stands here because it is a loop: ptxas moves most of the softmax below the wgmma
        // wait, out of the products' shadow, unless a basic block ends in between.
        if (j + 1 < kv_blocks) mbarrier_wait(smem + kKFull + me.k_at.slot * 8, me.k_at.parity);
        wgmma_wait<0>();
        release(smem + kVEmpty + me.v_at.slot * 8);
        me.v_at.template advance<Stages>();
        rescale_output(state.o, rescale);
        pack_probabilities(s, probabilities);
      }
      release(smem + kQEmpty);
      mbarrier_wait(smem + kVFull + me.v_at.slot * 8, me.v_at.parity);
      wgmma_fence();
      issue_values(state.o, probabilities, me.v + me.v_at.slot * (kKvBytes >> 4), kv_blocks > 1 || from != nullptr);
      wgmma_wait<0>();
      release(smem + kVEmpty + me.v_at.slot * 8);
      me.v_at.template advance<Stages>();
    } else {
      begin_state(state, from, me.index);
      for (u32 j = 0; j < kv_blocks; ++j) {
        mbarrier_wait(smem + kKFull + me.k_at.slot * 8, me.k_at.parity);
        wgmma_fence();
        issue_scores(s, me.q, me.k + me.k_at.slot * (kKvBytes >> 4));
        wgmma_wait<0>();
        release(smem + kKEmpty + me.k_at.slot * 8);
        me.k_at.template advance<Stages>();
        softmax(s, state.row_max, state.row_sum, rescale, scale);
        const bool accumulate = j > 0 || from != nullptr;
        if (accumulate) rescale_output(state.o, rescale);
        pack_probabilities(s, probabilities);
        mbarrier_wait(smem + kVFull + me.v_at.slot * 8, me.v_at.parity);
        wgmma_fence();
        issue_values(state.o, probabilities, me.v + me.v_at.slot * (kKvBytes >> 4), accumulate);
        wgmma_wait<0>();
        release(smem + kVEmpty + me.v_at.slot * 8);
        me.v_at.template advance<Stages>();
      }
      release(smem + kQEmpty);
    }
  }

  // A consumer's 64 rows of state: its threads' outputs, 16 bytes of each thread side by side, then maximum and sum of
  // each row. f32, as many bytes as rows of (head dimension + 2).
  static constexpr u32 kStateBytes = 64 * (kHeadDim + 2) * 4;
  static constexpr u32 kStateRows = 64 * kHeadDim * 4;

  static DEVICE u64 state_row(u32 consumer, u32 r) {
    const u32 row = ((threadIdx.x >> 5) & 3) * 16 + r * 8 + (lane_id() >> 2);
    return u64(consumer) * kStateBytes + kStateRows + row * 8;
  }

  static DEVICE void begin_state(State& state, const u8* from, u32 consumer) {
    if (from != nullptr) {
      read_state(state, from, consumer);
    } else {
      state.row_max[0] = state.row_max[1] = -1e30f;
      state.row_sum[0] = state.row_sum[1] = 0.0f;
    }
  }

  static DEVICE void read_state(State& state, const u8* from, u32 consumer) {
    const u8* mine = from + u64(consumer) * kStateBytes + (threadIdx.x & 127) * 16;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
      asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(state.o[4 * i]), "=f"(state.o[4 * i + 1]), "=f"(state.o[4 * i + 2]), "=f"(state.o[4 * i + 3])
                   : "l"(mine + i * 2048)
                   : "memory");
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      asm volatile("ld.global.L1::no_allocate.v2.f32 {%0, %1}, [%2];"
                   : "=f"(state.row_max[r]), "=f"(state.row_sum[r])
                   : "l"(from + state_row(consumer, r))
                   : "memory");
      // The four lanes of a row hold parts of its sum.
      if ((lane_id() & 3) != 0) state.row_sum[r] = 0.0f;
    }
  }

  static DEVICE void write_state(State& state, u8* to, u32 consumer) {
    u8* mine = to + u64(consumer) * kStateBytes + (threadIdx.x & 127) * 16;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(mine + i * 2048), "f"(state.o[4 * i]),
                   "f"(state.o[4 * i + 1]), "f"(state.o[4 * i + 2]), "f"(state.o[4 * i + 3])
                   : "memory");
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const float sum = row_total(state.row_sum[r]);
      if ((lane_id() & 3) != 0) continue;
      asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to + state_row(consumer, r)), "f"(state.row_max[r]), "f"(sum)
                   : "memory");
    }
  }

  static DEVICE float row_total(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

  // Writes the natural logarithm of each row's sum of exponentials of scaled scores.
  static DEVICE void write_logs(const State& state, float scale, float* to, u32 consumer) {
    constexpr float kLn2 = 0.6931471805599453f;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const float sum = row_total(state.row_sum[r]);
      const u32 row = consumer * 64 + ((threadIdx.x >> 5) & 3) * 16 + r * 8 + (lane_id() >> 2);
      if ((lane_id() & 3) == 0) to[row] = (state.row_max[r] * scale + __log2f(sum)) * kLn2;
    }
  }

  // Consumer 0 goes first, and takes up the turn left over at the end.
  static DEVICE void begin_turns(u32 consumer) {
    if (TurnTaking && consumer == 1) pass_turn(1);
  }
  static DEVICE void end_turns(u32 consumer) {
    if (TurnTaking && consumer == 0) take_turn(0);
  }

  // Barrier 2 + c says that consumer c has issued its products; the other waits there.
  static DEVICE void take_turn(u32 consumer) { named_barrier_sync(2 + (consumer ^ 1), 256); }
  static DEVICE void pass_turn(u32 consumer) { named_barrier_arrive(2 + consumer, 256); }

  static DEVICE void stage_output(u32 smem, float (&o)[64], float (&row_sum)[2], u32 consumer, u32 parity) {
    float inverse[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      inverse[r] = 1.0f / row_total(row_sum[r]);
    }
    rescale_output(o, inverse);
    const u32 lane = lane_id(), warp = (threadIdx.x >> 5) & 3;
    mbarrier_wait(smem + kOFree + consumer * 8, parity ^ 1);
    const u32 base = smem + kO + consumer * (64 * kHeadDim * 2) + (warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
    for (u32 g = 0; g < 16; g += 2) {
      const u32 address = base + (g / 8) * kChunk + ((((g & 7) + (lane >> 4)) ^ (lane & 7)) << 4);
      stmatrix_x4(address, pack_bf16(o[4 * g], o[4 * g + 1]), pack_bf16(o[4 * g + 2], o[4 * g + 3]),
                  pack_bf16(o[4 * g + 4], o[4 * g + 5]), pack_bf16(o[4 * g + 6], o[4 * g + 7]));
    }
    fence_smem_to_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kOReady + consumer * 8);
  }
  static constexpr u32 kChunk = 64 * 128;
};

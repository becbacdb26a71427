// The attention kernels: two consumers with overlap (with and without taking turns), three without.
#include "attention_tile.cuh"

struct AttentionStats {
  u64 begin_ns, end_ns, cycles, bytes;
};

template <class Tile, u32 Consumers, u32 ConsumerRegisters, u32 ProducerRegisters>
DEVICE void attention_body(const TensorMap& q, const TensorMap& k, const TensorMap& v, const TensorMap& o,
                           const AttentionProblem& p, AttentionStats* stats, float* logs) {
  const u32 smem = smem_address(dynamic_smem);
  const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    if (smem & 1023u) __trap();
    Tile::init_barriers(smem);
  }
  __syncthreads();
  if (group < Consumers) {
    registers_increase<ConsumerRegisters>();
    Tile::attend(smem, p, blockIdx.x, gridDim.x, group, logs);
  } else {
    registers_decrease<ProducerRegisters>();
    const u32 warp = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0);
    if (lane_id() == 0) {
      if (warp == 0) {
        Tile::load(smem, &q, &k, &v, p, blockIdx.x, gridDim.x);
      } else if (warp == 1) {
        const u64 begin = globaltimer_ns(), c0 = clock_cycles();
        Tile::store(smem, &o, p, blockIdx.x, gridDim.x);
        stats[blockIdx.x] = {begin, globaltimer_ns(), clock_cycles() - c0, 0};
        watchdog_finish(smem + Tile::kFinished);
      } else if (warp == 2) {
        watchdog_run(smem + Tile::kFinished);
      }
    }
  }
}

#define ATTENTION_KERNEL(NAME, CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, ...)                              \
  extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * 128, 1)                                            \
      NAME(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, \
           const __grid_constant__ TensorMap o, const __grid_constant__ AttentionProblem p, AttentionStats* stats, float* logs) {  \
    attention_body<AttentionTile<CONSUMERS, __VA_ARGS__>, CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(q, k, v, o, p, stats, logs); \
  }
ATTENTION_KERNEL(attention_2_overlap_turns, 2, 240, 24, true, true, 2)
ATTENTION_KERNEL(attention_2_overlap, 2, 240, 24, true, false, 2)
ATTENTION_KERNEL(attention_2_plain, 2, 240, 24, false, false, 2)
ATTENTION_KERNEL(attention_3_plain, 3, 160, 24, false, false, 2)

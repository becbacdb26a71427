// Runs a lowered schedule: the entries, by what a schedule's tiles need.
#include "attention_interpreter.cuh"
#include "gemm_interpreter.cuh"

#define INTERPRETER(NAME, THREADS, ...)                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                               \
      NAME(const __grid_constant__ Program program) {                                     \
    __VA_ARGS__::run(program);                                                           \
  }
// name: main loop (wait at each step, pipelined), drain
INTERPRETER(interpret_wait_overlap, kGemmThreads, GemmInterpreter<false, Drain::Deferred>)
INTERPRETER(interpret_pipelined_overlap, kGemmThreads, GemmInterpreter<true, Drain::Deferred>)
INTERPRETER(interpret_wait_smem_read, kGemmThreads, GemmInterpreter<false, Drain::SmemRead>)
INTERPRETER(interpret_pipelined_smem_read, kGemmThreads, GemmInterpreter<true, Drain::SmemRead>)
INTERPRETER(interpret_wait_visible, kGemmThreads, GemmInterpreter<false, Drain::Visible>)
INTERPRETER(interpret_pipelined_visible, kGemmThreads, GemmInterpreter<true, Drain::Visible>)
// name: rows of a Q block
INTERPRETER(attend_192, 512, AttentionInterpreter<3, false>)
INTERPRETER(attend_128, 384, AttentionInterpreter<2, true>)

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

// Names that every device source uses. No toolkit header is included, so that the same text compiles
// with nvcc and with NVRTC (which has no stdint.h and no cuda.h).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Same size and alignment as the driver's CUtensorMap; the host fills it with cuTensorMapEncodeTiled.
// The copy engine reads it where it lies: in a `const __grid_constant__` parameter, or in constant memory.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// The one name of the launch's dynamic shared memory. Kernels keep no static shared memory: a static word
// would push the stages, which must lie at multiples of 1,024 bytes, up by a kilobyte.
extern __shared__ __align__(1024) u8 dynamic_smem[];

#define DEVICE __device__ __forceinline__

DEVICE u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE u64 globaltimer_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

DEVICE u64 clock_cycles() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}

DEVICE u32 clock_low() {
  u32 t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}

// Indices that the compiler does not know to be the same each time: what it
// keeps over the tiles costs them registers.
DEVICE u32 block_index() {
  u32 b;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b));
  return b;
}
DEVICE u32 thread_index() {
  u32 t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

DEVICE u32 lane_id() { return threadIdx.x & 31u; }

// Every spin in every kernel is bounded by this: a launch that hangs takes a shared card from others, a
// trap only ends this process. About two seconds, far above any launch here. SM cycles, because reading them
// costs a few cycles where the global timer costs many, and the read sits between two tries of a wait.
constexpr u64 kWatchdogCycles = 4000000000ull;

template <u32 Regs>
DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Regs));
}
template <u32 Regs>
DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Regs));
}

// What every bench here needs: errors, tensor maps, random inputs, timing, cuBLAS by dlopen.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define CHECK(call)                                                                             \
  do {                                                                                          \
    cudaError_t e_ = (call);                                                                    \
    if (e_ != cudaSuccess) {                                                                    \
      fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));     \
      exit(1);                                                                                  \
    }                                                                                           \
  } while (0)

static double median(std::vector<double> v) {
  if (v.empty()) return NAN;
  std::sort(v.begin(), v.end());
  size_t n = v.size();
  return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}
static double quantile(std::vector<double> v, double q) {
  std::sort(v.begin(), v.end());
  return v[std::min(v.size() - 1, size_t(q * (v.size() - 1) + 0.5))];
}

static TensorMap encode_map(void* base, std::vector<cuuint64_t> dims, std::vector<cuuint64_t> strides, std::vector<cuuint32_t> box,
                            CUtensorMapSwizzle swizzle) {
  typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult q;
    void* f = nullptr;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q));
    encode = (Encode)f;
  }
  CUtensorMap m;
  std::vector<cuuint32_t> unit(dims.size(), 1);
  CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, cuuint32_t(dims.size()), base, dims.data(), strides.data(), box.data(),
                      unit.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) {
    fprintf(stderr, "cuTensorMapEncodeTiled: %d (%lu x %lu)\n", int(r), dims[0], dims[1]);
    exit(1);
  }
  TensorMap t;
  static_assert(sizeof(t) == sizeof(m), "");
  memcpy(&t, &m, sizeof t);
  return t;
}
// Matrix as (64 columns, rows, column blocks): see tma.cuh. `box_blocks` column blocks per instruction.
static TensorMap make_map(void* base, uint64_t rows, uint64_t cols, uint32_t box_rows, uint32_t box_blocks) {
  return encode_map(base, {64, rows, cols / 64}, {cols * 2, 128}, {64, box_rows, box_blocks}, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Uniform in [-1, 1), a hash of the position: fresh for each seed.
__global__ void fill_random(uint16_t* p, uint64_t n, uint32_t seed) {
  for (uint64_t i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) {
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    x ^= x >> 32; x *= 0xD6E8FEB86659FD93ull; x ^= x >> 32; x *= 0xD6E8FEB86659FD93ull; x ^= x >> 32;
    float f = float(int32_t(uint32_t(x))) * (1.0f / 2147483648.0f);
    uint32_t b = __float_as_uint(f);
    p[i] = uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
  }
}
static void random_bf16(void* p, uint64_t n, uint32_t seed) {
  fill_random<<<1056, 256>>>((uint16_t*)p, n, seed);
  CHECK(cudaGetLastError());
}

// sums[0] = |x - ref|^2, sums[1] = |ref|^2, sums[2] = positions where either is not finite.
__global__ void compare_bf16(const uint16_t* x, const uint16_t* ref, uint64_t n, double* sums) {
  double d2 = 0, r2 = 0, bad = 0;
  for (uint64_t i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) {
    float a = __uint_as_float(uint32_t(x[i]) << 16), b = __uint_as_float(uint32_t(ref[i]) << 16);
    if (!(fabsf(a) < 1e30f) || !(fabsf(b) < 1e30f)) { bad += 1; continue; }
    d2 += double(a - b) * (a - b);
    r2 += double(b) * b;
  }
  atomicAdd(&sums[0], d2); atomicAdd(&sums[1], r2); atomicAdd(&sums[2], bad);
}
struct Difference { double relative; double bad; };
static Difference compare(const void* x, const void* ref, uint64_t n) {
  static double* sums = nullptr;
  if (!sums) CHECK(cudaMalloc(&sums, 24));
  CHECK(cudaMemset(sums, 0, 24));
  compare_bf16<<<1056, 256>>>((const uint16_t*)x, (const uint16_t*)ref, n, sums);
  double h[3];
  CHECK(cudaMemcpy(h, sums, 24, cudaMemcpyDeviceToHost));
  return {std::sqrt(h[0] / h[1]), h[2]};
}

struct Cublas {
  void* handle = nullptr;
  int (*gemm)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*, void*, int,
              int, int, int) = nullptr;
  Cublas() {
    void* lib = dlopen("libcublas.so.13", RTLD_NOW);
    if (!lib) { fprintf(stderr, "%s\n", dlerror()); exit(1); }
    auto create = (int (*)(void**))dlsym(lib, "cublasCreate_v2");
    gemm = (decltype(gemm))dlsym(lib, "cublasGemmEx");
    if (create(&handle)) { fprintf(stderr, "cublasCreate failed\n"); exit(1); }
    auto version = (int (*)(void*, int*))dlsym(lib, "cublasGetVersion_v2");
    int v = 0;
    version(handle, &v);
    fprintf(stderr, "cuBLAS %d\n", v);
  }
  // C[m,n] = A[m,k] B[k,n], all row-major (or B stored [n,k])
  void run(int m, int n, int k, const void* a, const void* b, void* c, bool b_is_nk = false) {
    float one = 1, zero = 0;
    int s = gemm(handle, b_is_nk ? 1 : 0, 0, n, m, k, &one, b, 14, b_is_nk ? k : n, a, 14, k, &zero, c, 14, n, 68, -1);
    if (s) { fprintf(stderr, "cublasGemmEx: %d\n", s); exit(1); }
  }
};

struct EventPair {
  cudaEvent_t a, b;
  EventPair() { CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&b)); }
  double us() { float ms; CHECK(cudaEventElapsedTime(&ms, a, b)); return ms * 1e3; }
};
static std::vector<EventPair>& events(size_t n) {
  static std::vector<EventPair> pool;
  while (pool.size() < n) pool.emplace_back();
  return pool;
}

static FILE* raw_file() {
  static FILE* f = nullptr;
  if (!f) {
    const char* name = getenv("LAB_RAW");
    f = fopen(name ? name : "raw.csv", "a");
    if (!f) {
      perror(name ? name : "raw.csv");
      exit(1);
    }
  }
  return f;
}
static void raw(const char* format, ...) {
  va_list ap;
  va_start(ap, format);
  vfprintf(raw_file(), format, ap);
  va_end(ap);
  fflush(raw_file());
}

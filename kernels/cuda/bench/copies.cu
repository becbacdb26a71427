// Which copies from device memory to the same device's memory end while a kernel owns every SM, and how fast they are.
// copies: one row per method and size: quantity,conditions,value,unit,notes
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <functional>
#include <string>
#include <vector>

#define CHECK(x)                                                                        \
  do {                                                                                  \
    cudaError_t e_ = (x);                                                               \
    if (e_ != cudaSuccess) {                                                            \
      printf("%s: %s\n", #x, cudaGetErrorString(e_));                                   \
      exit(1);                                                                          \
    }                                                                                   \
  } while (0)

// The driver's functions, loaded at run time: the compiler's package holds no library to link with.
#define NAME_(x) #x
#define NAME(x) NAME_(x)
#define DRIVER(x) ((decltype(&x))dlsym(dlopen("libcuda.so.1", RTLD_NOW), NAME(x)))

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// All threads of every SM, for at most 60 ms.
__global__ void __launch_bounds__(1024, 2) hold(const volatile unsigned* release, volatile unsigned* begun) {
  if (threadIdx.x == 0) {
    begun[blockIdx.x] = 1;
    const long long begin = clock64();
    while (*release == 0 && clock64() - begin < 120000000ll) __nanosleep(20000);  // seldom: reads of host memory take the link from the copies
  }
  __syncthreads();
}

static unsigned *release_word, *begun;
static int sms;
static cudaStream_t holder;

// Seconds that `post` and what it starts take beside the kernel; negative when they had not ended after 25 ms.
static double beside(const std::function<bool()>& post, const std::function<bool()>& done, bool* held) {
  *(volatile unsigned*)release_word = 0;
  memset(begun, 0, 4 * 2 * sms);
  hold<<<2 * sms, 1024, 0, holder>>>(release_word, begun);
  double begin = now();
  auto all = [&] {
    for (int i = 0; i < 2 * sms; ++i)
      if (((volatile unsigned*)begun)[i] == 0) return false;
    return true;
  };
  while (!all() && now() - begin < 0.02) {
  }
  *held = all();
  begin = now();
  double took = -1;
  bool posted = post();
  while (posted && now() - begin < 0.025) {
    if (done()) {
      took = now() - begin;
      break;
    }
  }
  if (!posted) took = -2;
  *(volatile unsigned*)release_word = 1;
  CHECK(cudaStreamSynchronize(holder));
  return took;
}

int main() {
  CHECK(cudaSetDevice(0));
  CHECK(cudaFree(0));
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  CHECK(cudaHostAlloc(&release_word, 64, cudaHostAllocMapped));
  CHECK(cudaHostAlloc(&begun, 4 * 2 * sms, cudaHostAllocMapped));
  CHECK(cudaStreamCreateWithFlags(&holder, cudaStreamNonBlocking));
  const size_t kBytes = 256 << 20;
  uint8_t *src, *dst, *host;
  CHECK(cudaMalloc(&src, kBytes));
  CHECK(cudaMalloc(&dst, kBytes));
  CHECK(cudaHostAlloc(&host, 64 << 20, cudaHostAllocDefault));
  CHECK(cudaMemset(src, 7, kBytes));
  CHECK(cudaMemset(dst, 9, kBytes));
  int low, high;
  CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
  printf("priorities %d %d\n", low, high);
  cudaStream_t s[8];
  for (auto& x : s) CHECK(cudaStreamCreateWithPriority(&x, cudaStreamNonBlocking, high));
  CUcontext first = nullptr, second = nullptr;
  DRIVER(cuCtxGetCurrent)(&first);
  CUctxCreateParams none = {};
  CUresult made = DRIVER(cuCtxCreate)(&second, &none, 0, 0);
  printf("second context: %d\n", made);
  CUstream other = nullptr;
  CUdeviceptr other_dst = 0;
  if (made == CUDA_SUCCESS) {
    DRIVER(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING);
    DRIVER(cuMemAlloc)(&other_dst, kBytes);
  }
  DRIVER(cuCtxSetCurrent)(first);
  // 256 byte elements wide arrays for the bounce through a block-linear array.
  cudaArray_t array;
  cudaChannelFormatDesc format = cudaCreateChannelDesc<uint4>();
  CHECK(cudaMallocArray(&array, &format, 4096, 1024));  // 64 MiB
  struct Method {
    std::string name;
    std::function<bool(size_t)> post;
    std::function<bool()> done;
  };
  auto query = [&] { return cudaStreamQuery(s[0]) == cudaSuccess; };
  std::vector<Method> methods = {
      {"plain", [&](size_t n) { return cudaMemcpyAsync(dst, src, n, cudaMemcpyDeviceToDevice, s[0]) == cudaSuccess; }, query},
      {"plain_odd", [&](size_t n) { return cudaMemcpyAsync(dst + 1, src + 1, n - 3, cudaMemcpyDeviceToDevice, s[0]) == cudaSuccess; }, query},
      {"plain_odd_apart", [&](size_t n) { return cudaMemcpyAsync(dst + 1, src + 2, n - 3, cudaMemcpyDeviceToDevice, s[0]) == cudaSuccess; }, query},
      {"matrix_pitched", [&](size_t n) { return cudaMemcpy2DAsync(dst, 65536, src, 65536, 32768, n / 65536 + 1, cudaMemcpyDeviceToDevice, s[0]) == cudaSuccess; }, query},
      {"matrix_pitched_odd", [&](size_t n) { return cudaMemcpy2DAsync(dst, 65537, src, 65536, 32767, n / 65536 + 1, cudaMemcpyDeviceToDevice, s[0]) == cudaSuccess; }, query},
      {"peer_same_context", [&](size_t n) { return DRIVER(cuMemcpyPeerAsync)((CUdeviceptr)dst, first, (CUdeviceptr)src, first, n, s[0]) == CUDA_SUCCESS; }, query},
      {"peer_other_context", [&](size_t n) { return other_dst && DRIVER(cuMemcpyPeerAsync)(other_dst, second, (CUdeviceptr)src, first, n, s[0]) == CUDA_SUCCESS; }, query},
      {"plain_from_other_context",
       [&](size_t n) {
         if (!other) return false;
         DRIVER(cuCtxSetCurrent)(second);
         CUresult r = DRIVER(cuMemcpyDtoDAsync)(other_dst, (CUdeviceptr)src, n, other);
         DRIVER(cuCtxSetCurrent)(first);
         return r == CUDA_SUCCESS;
       },
       [&] {
         DRIVER(cuCtxSetCurrent)(second);
         bool d = DRIVER(cuStreamQuery)(other) == CUDA_SUCCESS;
         DRIVER(cuCtxSetCurrent)(first);
         return d;
       }},
      {"to_array", [&](size_t n) { return cudaMemcpy2DToArrayAsync(array, 0, 0, src, 65536, 65536, n / 65536, cudaMemcpyDeviceToDevice, s[0]) == cudaSuccess; }, query},
      {"from_array", [&](size_t n) { return cudaMemcpy2DFromArrayAsync(dst, 65536, array, 0, 0, 65536, n / 65536, cudaMemcpyDeviceToDevice, s[0]) == cudaSuccess; }, query},
      {"to_host", [&](size_t n) { return cudaMemcpyAsync(host, src, n, cudaMemcpyDeviceToHost, s[0]) == cudaSuccess; }, query},
      {"from_host", [&](size_t n) { return cudaMemcpyAsync(dst, host, n, cudaMemcpyHostToDevice, s[0]) == cudaSuccess; }, query},
      {"memset", [&](size_t n) { return cudaMemsetAsync(dst, 3, n, s[0]) == cudaSuccess; }, query},
      {"batch_overlap",
       [&](size_t n) {
         CUdeviceptr d = (CUdeviceptr)dst, f = (CUdeviceptr)src;
         size_t bytes = n, index = 0;
         CUmemcpyAttributes a = {};
         a.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
         a.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
         return DRIVER(cuMemcpyBatchAsync)(&d, &f, &bytes, 1, &a, &index, 1, s[0]) == CUDA_SUCCESS;
       },
       query},
  };
  // A graph of one copy.
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t node;
  CHECK(cudaGraphAddMemcpyNode1D(&node, graph, nullptr, 0, dst, src, 1 << 20, cudaMemcpyDeviceToDevice));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  methods.push_back({"graph_1MiB", [&](size_t) { return cudaGraphLaunch(exec, s[0]) == cudaSuccess; }, query});
  for (auto& m : methods) {
    for (size_t n : {size_t(65536), size_t(1) << 20, size_t(16) << 20}) {
      if (!m.post(n)) printf("  (%s cannot be posted)\n", m.name.c_str());
      CHECK(cudaDeviceSynchronize());
      if (other) {
        DRIVER(cuCtxSetCurrent)(second);
        DRIVER(cuCtxSynchronize)();
        DRIVER(cuCtxSetCurrent)(first);
      }
      bool held;
      double took = beside([&] { return m.post(n); }, m.done, &held);
      cudaDeviceSynchronize();
      cudaGetLastError();
      if (took >= 0) {
        printf("copy_beside_us,%s %zu bytes,%.2f,us,%s\n", m.name.c_str(), n, took * 1e6, held ? "all SMs held" : "NOT HELD");
      } else {
        printf("copy_beside_us,%s %zu bytes,,us,%s\n", m.name.c_str(), n, took < -1.5 ? "refused" : "starved");
      }
    }
  }
  // Bandwidth of the bounce through host memory, by streams and piece size: a put is split over `streams` streams; each
  // piece goes down, then up, on its stream.
  for (int streams : {1, 2, 4, 8}) {
    for (size_t piece : {size_t(65536), size_t(262144), size_t(1) << 20, size_t(4) << 20}) {
      const size_t total = 128 << 20;
      double best = 1e9;
      for (int t = 0; t < 3; ++t) {
        bool held;
        double took = beside(
            [&] {
              size_t i = 0;
              for (size_t at = 0; at + piece <= total; at += piece, ++i) {
                cudaStream_t x = s[i % streams];
                uint8_t* h = host + (i % streams) * (4 << 20);
                cudaMemcpyAsync(h, src + at, piece, cudaMemcpyDeviceToHost, x);
                cudaMemcpyAsync(dst + at, h, piece, cudaMemcpyHostToDevice, x);
              }
              return true;
            },
            [&] {
              for (int i = 0; i < streams; ++i)
                if (cudaStreamQuery(s[i]) != cudaSuccess) return false;
              return true;
            },
            &held);
        CHECK(cudaDeviceSynchronize());
        if (took > 0 && took < best) best = took;
      }
      printf("bounce_gbs,%d streams piece %zu,%.2f,GB/s,128 MiB beside a kernel that holds all SMs\n", streams, piece, best < 1e8 ? total / best * 1e-9 : 0.0);
    }
  }
  // Cost of the calls themselves.
  for (size_t n : {size_t(4096), size_t(262144)}) {
    double begin = now();
    for (int i = 0; i < 200; ++i) cudaMemcpyAsync(host, src, n, cudaMemcpyDeviceToHost, s[0]);
    double posted = now() - begin;
    CHECK(cudaDeviceSynchronize());
    printf("call_us,cudaMemcpyAsync to host %zu,%.3f,us,posting 200\n", n, posted / 200 * 1e6);
    begin = now();
    for (int i = 0; i < 200; ++i) DRIVER(cuStreamWriteValue32)(s[0], (CUdeviceptr)dst, i, 0);
    posted = now() - begin;
    CHECK(cudaDeviceSynchronize());
    printf("call_us,cuStreamWriteValue32,%.3f,us,posting 200\n", posted / 200 * 1e6);
  }
  return 0;
}

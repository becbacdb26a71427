// lab COMMAND ...: see main(). One process per command; raw rows are appended to the file $LAB_RAW.
#include "gemm.cu"
#include "probes.cu"
#include <time.h>

#include "host.h"

struct Variant {
  const char* name;
  const void* kernel;
  int cluster;
  bool b_is_kn;
  uint32_t smem;
};
static const uint32_t kFullSmem = 232448;
static std::vector<Variant> variants() {
  return {
      {"gemm_w_o", (void*)gemm_w_o, 1, true, kFullSmem},       {"gemm_p_o", (void*)gemm_p_o, 1, true, kFullSmem},
      {"gemm_w_s", (void*)gemm_w_s, 1, true, kFullSmem},       {"gemm_p_s", (void*)gemm_p_s, 1, true, kFullSmem},
      {"gemm_w_v", (void*)gemm_w_v, 1, true, kFullSmem},       {"gemm_p_v", (void*)gemm_p_v, 1, true, kFullSmem},
      {"gemm_p_o3", (void*)gemm_p_o3, 1, true, kFullSmem},     {"gemm_p_o_nk", (void*)gemm_p_o_nk, 1, false, kFullSmem},
      {"gemm_w_o_c2", (void*)gemm_w_o_c2, 2, true, kFullSmem}, {"gemm_p_o_c2", (void*)gemm_p_o_c2, 2, true, kFullSmem},
      {"gemm_p_o3_c2", (void*)gemm_p_o3_c2, 2, true, kFullSmem},
      {"gemm_w_d", (void*)gemm_w_d, 1, true, kFullSmem},       {"gemm_p_d", (void*)gemm_p_d, 1, true, kFullSmem},
      {"gemm_w_o3", (void*)gemm_w_o3, 1, true, kFullSmem},     {"gemm_w_d_c2", (void*)gemm_w_d_c2, 2, true, kFullSmem},
      {"gemm_p_d_c2", (void*)gemm_p_d_c2, 2, true, kFullSmem},
      {"gemm_w_d_add", (void*)gemm_w_d_add, 1, true, kFullSmem}, {"gemm_w_s_add", (void*)gemm_w_s_add, 1, true, kFullSmem},
  };
}
static const Variant& variant(const std::string& name) {
  static std::vector<Variant> all = variants();
  for (auto& v : all)
    if (name == v.name) return v;
  fprintf(stderr, "no variant %s\n", name.c_str());
  exit(2);
}

static void *A, *B, *C, *R;  // 2 GiB each
static CtaStats* stats;
static uint32_t* done_word;
static uint32_t *gates, *ping_words;
static uint8_t* pool;
static uint64_t pool_bytes;
static const int kStatSlots = 2048;

struct Run {
  const Variant* v;
  int m, n, k, ctas, copy_ctas, group_m;
  long tiles;  // computed tiles, 0 = all
  TensorMap ma, mb, mc;
  GemmProblem p;
  Run(const std::string& name, int m_, int n_, int k_, int ctas_, int group = 16, long tiles_ = 0, int copy = 0)
      : v(&variant(name)), m(m_), n(n_), k(k_), ctas(ctas_), copy_ctas(copy), group_m(group), tiles(tiles_) {
    CHECK(cudaFuncSetAttribute(v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v->smem));
    ma = make_map(A, m, k, 128, 1);
    if (v->b_is_kn) mb = make_map(B, k, n, 64, 4 / v->cluster);
    else mb = make_map(B, n, k, 256 / v->cluster, 1);
    mc = make_map(C, m, n, 64, 1);
    p.m_tiles = m / 128 / v->cluster;
    p.n_tiles = n / 256;
    p.k_steps = k / 64;
    p.group_m = std::max(1, group / v->cluster);
    uint32_t all = p.m_tiles * p.n_tiles;
    p.tiles = tiles ? std::min<long>(all, tiles / v->cluster) : all;
    p.compute_ctas = ctas;
    p.gate_steps = 0;
    p.gates = gates;
    p.chain = nullptr;
  }
  bool ping = false;
  cudaStream_t stream = 0;
  void launch(int slot, bool with_done = false) {
    CopyWork w = {pool, pool ? pool + pool_bytes / 2 : nullptr, copy_ctas ? pool_bytes / 2 / 64 / 16384 / 12 * 16384 * 12 : 0,
                  (with_done || copy_ctas) ? done_word : nullptr, ping ? ping_words : nullptr};
    if (ping) CHECK(cudaMemsetAsync(ping_words, 0, 256));
    if (w.done) CHECK(cudaMemsetAsync(done_word, 0, 4));
    CtaStats* s = stats + (slot % kStatSlots) * 132;
    void* args[] = {&ma, &mb, &mc, &p, &w, &s};
    CHECK(cudaLaunchKernel(v->kernel, dim3(ctas + copy_ctas), dim3(kGemmThreads), args, v->smem, stream));
  }
};

struct Timing { double event_us, span_us, cta_mean_us, cta_max_us, mhz, copy_gbs; int reps; };

static Timing read_stats(int slot, int ctas, int copy_ctas) {
  static std::vector<CtaStats> h(132);
  CHECK(cudaMemcpy(h.data(), stats + (slot % kStatSlots) * 132, 132 * sizeof(CtaStats), cudaMemcpyDeviceToHost));
  Timing t = {};
  uint64_t b = ~0ull, e = 0;
  double ns = 0, cycles = 0;
  for (int i = 0; i < ctas; ++i) {
    b = std::min<uint64_t>(b, h[i].begin_ns);
    e = std::max<uint64_t>(e, h[i].end_ns);
    double d = double(h[i].end_ns - h[i].begin_ns);
    ns += d;
    cycles += h[i].cycles;
    t.cta_max_us = std::max(t.cta_max_us, d * 1e-3);
  }
  if (ctas) {
    t.span_us = (e - b) * 1e-3;
    t.cta_mean_us = ns / ctas * 1e-3;
    t.mhz = cycles / ns * 1e3;
  }
  for (int i = ctas; i < ctas + copy_ctas; ++i) t.copy_gbs += double(h[i].bytes) / double(h[i].end_ns - h[i].begin_ns);
  return t;
}

// Keeps the card busy for warm_ms first: clocks under load settle only after tens of milliseconds.
static Timing measure(Run& r, double warm_ms, int reps) {
  auto& ev = events(reps);
  CHECK(cudaEventRecord(ev[0].a));
  r.launch(0);
  r.launch(1);
  CHECK(cudaEventRecord(ev[0].b));
  CHECK(cudaDeviceSynchronize());
  double one = ev[0].us() / 2;
  int warm = std::min(1500, int(warm_ms * 1e3 / one) + 1);
  for (int i = 0; i < warm; ++i) r.launch(kStatSlots - 1);
  for (int i = 0; i < reps; ++i) {
    CHECK(cudaEventRecord(ev[i].a));
    r.launch(i);
    CHECK(cudaEventRecord(ev[i].b));
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<double> e, s, m, x, f, c;
  for (int i = 0; i < reps; ++i) {
    Timing t = read_stats(i, r.ctas, r.copy_ctas);
    e.push_back(ev[i].us()); s.push_back(t.span_us); m.push_back(t.cta_mean_us); x.push_back(t.cta_max_us);
    f.push_back(t.mhz); c.push_back(t.copy_gbs);
  }
  return {median(e), median(s), median(m), median(x), median(f), median(c), reps};
}

static void row(const char* bench, const Run& r, const Timing& t) {
  raw("%s,%s,%d,%d,%d,%d,%u,%d,%d,%.3f,%.3f,%.3f,%.3f,%.1f,%.2f,%d\n", bench, r.v->name, r.m, r.n, r.k, r.ctas,
      r.p.tiles * r.v->cluster, r.group_m, r.copy_ctas, t.event_us, t.span_us, t.cta_mean_us, t.cta_max_us, t.mhz, t.copy_gbs, t.reps);
}

static void setup(uint64_t bytes_each) {
  CHECK(cudaMalloc(&A, bytes_each)); CHECK(cudaMalloc(&B, bytes_each));
  CHECK(cudaMalloc(&C, bytes_each)); CHECK(cudaMalloc(&R, bytes_each));
  CHECK(cudaMalloc(&stats, kStatSlots * 132 * sizeof(CtaStats)));
  CHECK(cudaMemset(stats, 0, kStatSlots * 132 * sizeof(CtaStats)));
  CHECK(cudaMalloc(&done_word, 256));
  CHECK(cudaMemset(done_word, 0, 256));
  CHECK(cudaMalloc(&ping_words, 256));
  CHECK(cudaMalloc(&gates, 8 << 20));
  std::vector<uint32_t> ones(2 << 20, 1);
  CHECK(cudaMemcpy(gates, ones.data(), 8 << 20, cudaMemcpyHostToDevice));
  random_bf16(A, bytes_each / 2, 1);
  random_bf16(B, bytes_each / 2, 2);
  CHECK(cudaDeviceSynchronize());
}

// One variant against cuBLAS on fresh random inputs, outputs poisoned with NaN.
static int check(const std::string& name, const std::vector<std::vector<int>>& shapes) {
  Cublas blas;
  int failed = 0;
  uint32_t seed = 100;
  for (auto& s : shapes) {
    int m = s[0], n = s[1], k = s[2];
    random_bf16(A, uint64_t(m) * k, seed++);
    random_bf16(B, uint64_t(n) * k, seed++);
    CHECK(cudaMemset(C, 0xff, uint64_t(m) * n * 2));
    CHECK(cudaMemset(R, 0xff, uint64_t(m) * n * 2));
    Run r(name, m, n, k, s[3], s[4]);
    blas.run(m, n, k, A, B, R, !r.v->b_is_kn);
    r.launch(0);
    CHECK(cudaDeviceSynchronize());
    Difference d = compare(C, R, uint64_t(m) * n);
    bool ok = d.bad == 0 && d.relative < 3e-3;
    printf("check %-14s %6dx%6dx%6d ctas %3d: %s relative difference %.2e, not finite %.0f\n", name.c_str(), m, n, k, s[3],
           ok ? "ok  " : "FAIL", d.relative, d.bad);
    raw("check,%s,%d,%d,%d,%d,%s,%.3e,%.0f\n", name.c_str(), m, n, k, s[3], ok ? "ok" : "FAIL", d.relative, d.bad);
    failed += !ok;
  }
  return failed;
}

// Time per tile from two tile counts, so that launch and start-up drop out.
static void sweep_point(const char* bench, const std::string& name, int k, int ctas, int big, int small, double warm_ms, int group = 16) {
  Run a(name, 16384, 16384, k, ctas, group, long(ctas) * big), b(name, 16384, 16384, k, ctas, group, long(ctas) * small);
  Timing tb = measure(a, warm_ms, 9), ts = measure(b, warm_ms / 3, 9);
  row(bench, a, tb);
  row(bench, b, ts);
  double tile = (tb.cta_mean_us - ts.cta_mean_us) / (big - small);
  printf("%-8s %-12s k %5d ctas %3d: tile %8.3f us (max-cta %8.3f) = %6.1f ns per k step at %4.0f MHz = %6.0f cycles\n", bench, name.c_str(), k, ctas, tile,
         (tb.cta_max_us - ts.cta_max_us) / (big - small), tile * 1e3 / (k / 64.0), tb.mhz, tile * tb.mhz / (k / 64.0));
}

static void sweep_ctas(std::vector<std::string> names, std::vector<int> ctas, int k) {
  for (auto& n : names)
    for (int c : ctas) sweep_point("ctas", n, k, c, 9, 1, 60);
}

static void sweep_k(std::vector<std::string> names, std::vector<int> ctas, std::vector<int> ks) {
  for (auto& n : names)
    for (int c : ctas)
      for (int k : ks) {
        int big = k <= 512 ? 41 : k <= 2048 ? 25 : k <= 4096 ? 13 : 7;
        sweep_point("k", n, k, c, big, 1, 25);
      }
}

// Ours and cuBLAS alternating; ratio > 1 means ours is faster.
static void paired(const std::string& name, int m, int n, int k, int ctas, int group, int pairs) {
  static Cublas blas;
  Run r(name, m, n, k, ctas, group);
  double flops = 2.0 * m * n * k;
  int warm = std::max(2, int(40e-3 / (flops / 650e12)));
  warm = std::min(warm, 200);
  CHECK(cudaMemset(C, 0xff, uint64_t(m) * n * 2));
  CHECK(cudaMemset(R, 0xff, uint64_t(m) * n * 2));
  for (int i = 0; i < warm; ++i) { r.launch(0); blas.run(m, n, k, A, B, R, !r.v->b_is_kn); }
  auto& ev = events(2 * pairs);
  for (int i = 0; i < pairs; ++i) {
    CHECK(cudaEventRecord(ev[2 * i].a));
    r.launch(i);
    CHECK(cudaEventRecord(ev[2 * i].b));
    CHECK(cudaEventRecord(ev[2 * i + 1].a));
    blas.run(m, n, k, A, B, R, !r.v->b_is_kn);
    CHECK(cudaEventRecord(ev[2 * i + 1].b));
  }
  CHECK(cudaDeviceSynchronize());
  Difference d = compare(C, R, uint64_t(m) * n);
  std::vector<double> o, b, q, f, s;
  for (int i = 0; i < pairs; ++i) {
    o.push_back(ev[2 * i].us()); b.push_back(ev[2 * i + 1].us()); q.push_back(b.back() / o.back());
    Timing t = read_stats(i, ctas, 0);
    f.push_back(t.mhz); s.push_back(t.span_us);
  }
  printf("paired %-12s %5dx%5dx%5d ctas %3d group %2d: ours %9.1f us (%5.1f TFLOP/s, %4.0f MHz) cuBLAS %9.1f us (%5.1f) ratio %.3f [%.3f %.3f] diff %.1e bad %.0f\n",
         name.c_str(), m, n, k, ctas, group, median(o), flops / median(o) * 1e-6, median(f), median(b), flops / median(b) * 1e-6, median(q),
         quantile(q, .25), quantile(q, .75), d.relative, d.bad);
  raw("paired,%s,%d,%d,%d,%d,%d,%.3f,%.3f,%.3f,%.1f,%.4f,%.4f,%.4f,%d,%.3e,%.0f\n", name.c_str(), m, n, k, ctas, group, median(o),
      median(s), median(b), median(f), median(q), quantile(q, .25), quantile(q, .75), pairs, d.relative, d.bad);
}

// As a short benchmark sees it: 60 ms of idleness, then three launches, of which the third counts.
static void cold(const std::string& name, int m, int n, int k, int ctas, int group, int reps) {
  static Cublas blas;
  Run r(name, m, n, k, ctas, group);
  double flops = 2.0 * m * n * k;
  std::vector<double> o, b, f;
  EventPair e;
  struct timespec pause = {0, 60000000};
  r.launch(0);
  blas.run(m, n, k, A, B, R, !r.v->b_is_kn);
  for (int i = 0; i < reps; ++i)
    for (int who = 0; who < 2; ++who) {
      CHECK(cudaDeviceSynchronize());
      nanosleep(&pause, nullptr);
      for (int j = 0; j < 3; ++j) {
        if (j == 2) CHECK(cudaEventRecord(e.a));
        if (who) blas.run(m, n, k, A, B, R, !r.v->b_is_kn);
        else r.launch(j);
        if (j == 2) CHECK(cudaEventRecord(e.b));
      }
      CHECK(cudaDeviceSynchronize());
      (who ? b : o).push_back(e.us());
      if (!who) f.push_back(read_stats(2, ctas, 0).mhz);
    }
  printf("cold %-12s %5dx%5dx%5d ctas %3d: ours %9.1f us (%5.1f TFLOP/s, %4.0f MHz) cuBLAS %9.1f us (%5.1f) ratio %.3f\n", name.c_str(), m, n, k, ctas,
         median(o), flops / median(o) * 1e-6, median(f), median(b), flops / median(b) * 1e-6, median(b) / median(o));
  raw("cold,%s,%d,%d,%d,%d,%d,%.3f,%.3f,%.1f,%d\n", name.c_str(), m, n, k, ctas, group, median(o), median(b), median(f), reps);
}

static void interference(const std::string& name, int ctas, int k, int tiles_each) {
  if (!pool) {
    pool_bytes = 16ull << 30;
    CHECK(cudaMalloc(&pool, pool_bytes));
    random_bf16(pool, pool_bytes / 2, 9);
    CHECK(cudaDeviceSynchronize());
  }
  for (int copy : {8, 16, 24, 32}) {
    if (copy + ctas > 132) continue;
    Run with(name, 16384, 16384, k, ctas, 16, long(ctas) * tiles_each, copy), alone(name, 16384, 16384, k, ctas, 16, long(ctas) * tiles_each, 0);
    Run only(name, 16384, 16384, k, 0, 16, 0, copy);
    for (int i = 0; i < 30; ++i) { with.launch(0); alone.launch(1, true); }
    const int n = 15;
    for (int i = 0; i < n; ++i) { with.launch(3 * i); alone.launch(3 * i + 1, true); }
    for (int i = 0; i < 5; ++i) only.launch(3 * i + 2);
    CHECK(cudaDeviceSynchronize());
    std::vector<double> w, a, ratio, g, o, fw, fa;
    for (int i = 0; i < n; ++i) {
      Timing tw = read_stats(3 * i, ctas, copy), ta = read_stats(3 * i + 1, ctas, 0);
      w.push_back(tw.cta_mean_us); a.push_back(ta.cta_mean_us); ratio.push_back(w.back() / a.back()); g.push_back(tw.copy_gbs);
      fw.push_back(tw.mhz); fa.push_back(ta.mhz);
      if (i < 5) o.push_back(read_stats(3 * i + 2, 0, copy).copy_gbs);
    }
    printf("interference %s k %d ctas %d + copy %2d: gemm %.1f us with, %.1f alone, slowdown %.3f; copy %.0f GB/s with, %.0f alone; %.0f / %.0f MHz\n", name.c_str(), k, ctas, copy,
           median(w), median(a), median(ratio), median(g), median(o), median(fw), median(fa));
    raw("interference,%s,%d,%d,%d,%d,%.3f,%.3f,%.4f,%.2f,%.2f,%.1f,%.1f,%d\n", name.c_str(), k, ctas, copy, tiles_each, median(w), median(a),
        median(ratio), median(g), median(o), median(fw), median(fa), n);
  }
}

// Rate per launch = bytes / (last end - first begin) of the CTAs, by the device's own timer.
static double probe_mhz;
static double probe_rate(const std::function<void(int)>& launch, int ctas, double bytes_each, int reps) {
  std::vector<double> g, f;
  for (int i = 0; i < reps + 2; ++i) launch(i);
  CHECK(cudaDeviceSynchronize());
  for (int i = 2; i < reps + 2; ++i) {
    Timing t = read_stats(i, ctas, 0);
    g.push_back(bytes_each * ctas / (t.span_us * 1e3));
    f.push_back(t.mhz);
  }
  probe_mhz = median(f);
  return median(g);
}

static void copies_and_reductions() {
  pool_bytes = 48ull << 30;
  CHECK(cudaMalloc(&pool, pool_bytes));
  random_bf16(pool, pool_bytes / 2, 9);
  CHECK(cudaDeviceSynchronize());
  struct R { const char* name; const void* k; int inputs, threads; uint32_t smem; };
  std::vector<R> rs = {
      {"2in_vec_8KiB", (void*)reduce_2in_8k, 2, 256, 0},       {"2in_vec_16KiB", (void*)reduce_2in_16k, 2, 256, 0},
      {"2in_vec_32KiB", (void*)reduce_2in_32k, 2, 256, 0},     {"2in_vec_64KiB", (void*)reduce_2in_64k, 2, 256, 0},
      {"2in_vec_64KiB_t512", (void*)reduce_2in_64k_t512, 2, 512, 0},
      {"4in_vec_16KiB", (void*)reduce_4in_16k, 4, 256, 0},     {"4in_vec_32KiB", (void*)reduce_4in_32k, 4, 256, 0},
      {"4in_vec_64KiB", (void*)reduce_4in_64k, 4, 256, 0},     {"8in_vec_32KiB", (void*)reduce_8in_32k, 8, 256, 0},
      {"8in_vec_64KiB", (void*)reduce_8in_64k, 8, 256, 0},     {"2in_bulk_96KiB", (void*)reduce_2in_bulk96k, 2, 288, 99000},
      {"2in_bulk_192KiB", (void*)reduce_2in_bulk192k, 2, 288, 198000}, {"4in_bulk_192KiB", (void*)reduce_4in_bulk192k, 4, 288, 198000},
      {"8in_bulk_192KiB", (void*)reduce_8in_bulk192k, 8, 288, 198000}};
  for (auto& r : rs) {
    if (r.smem) CHECK(cudaFuncSetAttribute(r.k, cudaFuncAttributeMaxDynamicSharedMemorySize, r.smem));
    for (int c : {1, 8, 16, 32, 64, 132}) {
      if (r.inputs > 2 && c > 32) continue;
      uint64_t bytes = c <= 8 ? 16ull << 20 : 4ull << 20;
      uint64_t span = bytes * c;
      uint64_t step = (r.inputs + 1) * span;
      int sets = int(std::min<uint64_t>(12, pool_bytes / step));
      auto launch = [&](int i) {
        uint8_t* base = pool + uint64_t(i % sets) * step;  // another set each time: the last one may lie in L2
        uint8_t* out = base;
        const uint8_t* in = base + span;
        uint64_t pitch = span;
        CtaStats* s = stats + i * 132;
        void* args[] = {&out, &in, &pitch, &bytes, &s};
        CHECK(cudaLaunchKernel(r.k, dim3(c), dim3(r.threads), args, r.smem, 0));
      };
      double g = probe_rate(launch, c, double(bytes), 11);
      printf("reduce %-20s ctas %3d: %8.1f GB/s out (%.1f a CTA), traffic %.0f GB/s\n", r.name, c, g, g / c, g * (r.inputs + 1));
      raw("reduce,%s,%d,%d,%.2f,%.0f\n", r.name, r.inputs, c, g, probe_mhz);
    }
  }
  // value check of two of them
  for (auto& r : rs) {
    uint64_t bytes = 1 << 20, pitch = 8 << 20;
    std::vector<uint16_t> out(bytes / 2), in(bytes / 2 * r.inputs);
    uint8_t *o = pool, *i0 = pool + (64 << 20);
    CtaStats* s = stats;
    CHECK(cudaMemset(o, 0xff, bytes));
    void* args[] = {&o, &i0, &pitch, &bytes, &s};
    CHECK(cudaLaunchKernel(r.k, dim3(1), dim3(r.threads), args, r.smem, 0));
    CHECK(cudaMemcpy(out.data(), o, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < r.inputs; ++i) CHECK(cudaMemcpy(in.data() + i * (bytes / 2), i0 + i * pitch, bytes, cudaMemcpyDeviceToHost));
    double worst = 0;
    for (size_t j = 0; j < bytes / 2; ++j) {
      auto f = [](uint16_t h) { uint32_t u = uint32_t(h) << 16; float x; memcpy(&x, &u, 4); return double(x); };
      double sum = 0, mag = 0;
      for (int i = 0; i < r.inputs; ++i) { double x = f(in[i * (bytes / 2) + j]); sum += x; mag += std::fabs(x); }
      double e = std::fabs(f(out[j]) - sum) / (mag + 1e-9);
      if (!(e <= worst)) worst = e;
    }
    printf("reduce check %-20s worst error %.2e of the sum of magnitudes %s\n", r.name, worst, worst < 5e-3 ? "ok" : "FAIL");
    raw("reduce_check,%s,%.3e\n", r.name, worst);
  }
  struct K { const char* name; const void* k; int slots; };
  std::vector<K> ks = {{"serial1_visible", (void*)copy_serial1_visible, 1}, {"serial3_read", (void*)copy_serial3_read, 3},
                       {"serial3_visible", (void*)copy_serial3_visible, 3}, {"pipelined3", (void*)copy_pipelined3, 3},
                       {"pipelined6", (void*)copy_pipelined6, 6},           {"pipelined12", (void*)copy_pipelined12, 12}};
  for (auto& k : ks)
    for (uint32_t chunk : {16384u, 65536u, 4096u, 32768u}) {
      uint32_t smem = k.slots * chunk + 128;
      if (smem > kFullSmem) continue;
      CHECK(cudaFuncSetAttribute(k.k, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
      for (int c : {1, 8, 16, 32}) {
        uint64_t unit = uint64_t(chunk) * k.slots, bytes = ((c <= 8 ? 24ull << 20 : 8ull << 20) / unit) * unit;
        auto launch = [&](int i) {
          uint8_t* dst = pool + uint64_t(i % 12) * 2 * c * bytes;
          const uint8_t* src = dst + c * bytes;
          CtaStats* s = stats + i * 132;
          void* args[] = {&dst, &src, &bytes, &chunk, &s};
          CHECK(cudaLaunchKernel(k.k, dim3(c), dim3(32), args, smem, 0));
        };
        double g = probe_rate(launch, c, double(bytes), 11);
        printf("copy %-16s chunk %5u ctas %3d: %8.1f GB/s (%.1f a CTA)\n", k.name, chunk, c, g, g / c);
        raw("copy,%s,%d,%u,%d,%.2f,%.0f\n", k.name, k.slots, chunk, c, g, probe_mhz);
      }
    }
  std::vector<K> gs = {{"serial1_visible", (void*)gather_serial1_visible, 1}, {"serial16_read", (void*)gather_serial16_read, 16},
                       {"serial16_visible", (void*)gather_serial16_visible, 16}, {"pipelined16", (void*)gather_pipelined16, 16}};
  uint32_t row_bytes = 14336, table_rows = 1 << 20;  // 15 GB of rows
  std::vector<uint32_t> rows(132 * 4096);
  uint64_t x = 88172645463325252ull;
  for (auto& r : rows) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; r = uint32_t(x % table_rows); }
  uint32_t* drows;
  CHECK(cudaMalloc(&drows, rows.size() * 4));
  CHECK(cudaMemcpy(drows, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice));
  for (auto& k : gs) {
    uint32_t smem = k.slots * row_bytes + 128;
    CHECK(cudaFuncSetAttribute(k.k, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    for (int c : {1, 8, 16, 32}) {
      uint32_t count = c <= 8 ? 2048 : 1024;
      auto launch = [&](int i) {
        const uint8_t* table = pool;
        uint8_t* dst = pool + (16ull << 30) + uint64_t(i % 8) * (2ull << 30);
        const uint32_t* r = drows + (i % 3) * 1000;
        CtaStats* s = stats + i * 132;
        void* args[] = {&dst, &table, &r, &count, &row_bytes, &s};
        CHECK(cudaLaunchKernel(k.k, dim3(c), dim3(32), args, smem, 0));
      };
      double g = probe_rate(launch, c, double(count) * row_bytes, 11);
      printf("gather %-16s ctas %3d: %8.1f GB/s (%.1f a CTA)\n", k.name, c, g, g / c);
      raw("gather,%s,%d,%u,%d,%.2f,%.0f\n", k.name, k.slots, row_bytes, c, g, probe_mhz);
    }
  }
}

// Traffic of device memory by the share of reads in it: loads, stores and their sum. No byte is touched twice within 12 GB.
static void mixes() {
  const uint64_t half = 24ull << 30;
  CHECK(cudaMalloc(&pool, 2 * half));
  random_bf16(pool, half, 9);
  const uint32_t chunk = 16384, smem = 12 * chunk + 128;
  CHECK(cudaFuncSetAttribute((void*)stream_mix, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  for (int c : {132, 64, 32})
    for (uint32_t every : {1u, 2u, 4u, 8u, 16u, 1u << 30, 0u}) {
      const uint64_t bytes = (c == 132 ? 12ull : 24ull) << 20;
      const int sets = int(half / (bytes * c));
      auto launch = [&](int i) {
        uint8_t* dst = pool + half + uint64_t(i % sets) * bytes * c;
        const uint8_t* src = pool + uint64_t(i % sets) * bytes * c;
        CtaStats* s = stats + i * 132;
        void* args[] = {&dst, &src, (void*)&bytes, (void*)&chunk, &every, &s};
        CHECK(cudaLaunchKernel((void*)stream_mix, dim3(c), dim3(32), args, smem, 0));
      };
      const double g = probe_rate(launch, c, double(bytes), 15), chunks = double(bytes / chunk);
      const double writes = every == 0 ? 1 : std::ceil(chunks / every) / chunks, reads = every == 0 ? 0 : 1;
      printf("mix 1 write in %10u reads ctas %3d: reads %7.1f writes %7.1f sum %7.1f GB/s\n", every, c, g * reads, g * writes, g * (reads + writes));
      raw("mix,%u,%d,%.2f,%.2f,%.0f\n", every, c, g * reads, g * writes, probe_mhz);
    }
}

// A map of (columns, rows) whose box is 256 columns of one row, as gather_boxes takes them.
static TensorMap make_row_map(void* base, uint64_t rows, uint64_t cols) {
  return encode_map(base, {cols, rows}, {cols * 2}, {256, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Rows by boxes, alone and beside a GEMM that owns `ctas` SMs: two streams that stay full, read between 250 and 450 ms.
static void gathers() {
  const uint64_t row_bytes = 14336, table_rows = 1 << 16, out_rows = 132ull * 128 * 16;
  const uint32_t smem = 16 * row_bytes + 128;
  CHECK(cudaMalloc(&pool, (table_rows + out_rows) * row_bytes));
  random_bf16(pool, table_rows * row_bytes / 2, 9);
  uint8_t* out = pool + table_rows * row_bytes;
  std::vector<uint32_t> rows(out_rows);
  uint64_t x = 88172645463325252ull;
  for (auto& r : rows) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; r = uint32_t(x % table_rows); }
  uint32_t *drows, *counters;
  CHECK(cudaMalloc(&drows, rows.size() * 4));
  CHECK(cudaMemcpy(drows, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMalloc(&counters, out_rows));
  CHECK(cudaMemset(counters, 0, out_rows));
  const TensorMap from = make_row_map(pool, table_rows, row_bytes / 2), to = make_row_map(out, out_rows, row_bytes / 2);
  CHECK(cudaFuncSetAttribute((void*)gather_boxes, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  CHECK(cudaFuncSetAttribute((void*)gather_serial16_visible, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  CtaStats* gather_stats;
  CHECK(cudaMalloc(&gather_stats, kStatSlots * 132 * sizeof(CtaStats)));
  // By boxes, or as plain bulk copies of whole rows.
  auto gather = [&](bool by_boxes, int ctas, uint32_t slices, int slot, cudaStream_t stream, uint32_t box_count = 28) {
    CtaStats* s = gather_stats + (slot % kStatSlots) * 132;
    uint32_t count = slices * 16, bytes = row_bytes;
    void* boxed[] = {(void*)&from, (void*)&to, &drows, &slices, &box_count, &counters, &s};
    void* plain[] = {&out, &pool, &drows, &count, &bytes, &s};
    CHECK(cudaLaunchKernel(by_boxes ? (void*)gather_boxes : (void*)gather_serial16_visible, dim3(ctas), dim3(by_boxes ? 384 : 32),
                           by_boxes ? boxed : plain, smem, stream));
  };
  std::vector<CtaStats> g(size_t(kStatSlots) * 132), h(size_t(kStatSlots) * 132);
  auto read = [&](std::vector<CtaStats>& into, CtaStats* from_device) {
    CHECK(cudaMemcpy(into.data(), from_device, into.size() * sizeof(CtaStats), cudaMemcpyDeviceToHost));
  };
  // Every row where it belongs.
  CHECK(cudaMemset(out, 0xff, out_rows * row_bytes));
  gather(true, 132, 128, 0, 0);
  CHECK(cudaDeviceSynchronize());
  std::vector<uint8_t> there(row_bytes), here(row_bytes);
  int wrong = 0;
  for (uint64_t i = 0; i < out_rows; i += 997) {
    CHECK(cudaMemcpy(here.data(), out + i * row_bytes, row_bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(there.data(), pool + rows[i] * row_bytes, row_bytes, cudaMemcpyDeviceToHost));
    wrong += here != there;
  }
  printf("gather by boxes: %d of %d rows wrong\n", wrong, int(out_rows / 997 + 1));
  raw("gather_check,%d\n", wrong);
  const uint32_t slices = 64;
  for (uint32_t boxes : {28u, 14u, 7u, 1u, 0u})  // of a row; 0: the whole row as a plain bulk copy
    for (int ctas : {1, 32, 44, 132}) {
      std::vector<double> us, mhz;
      for (int i = 0; i < 13; ++i) gather(boxes != 0, ctas, slices, i, 0, boxes);
      CHECK(cudaDeviceSynchronize());
      read(g, gather_stats);
      for (int i = 2; i < 13; ++i)
        for (int c = 0; c < ctas; ++c) {
          const CtaStats& s = g[size_t(i) * 132 + c];
          us.push_back((s.end_ns - s.begin_ns) * 1e-3 / slices);
          mhz.push_back(double(s.cycles) / double(s.end_ns - s.begin_ns) * 1e3);
        }
      printf("gather, %2u boxes a row, ctas %3d alone: %.2f us a slice of 16 rows, %.0f MHz\n", boxes, ctas, median(us), median(mhz));
      raw("gather_slice,%u,%d,0,%.3f,%.0f,,\n", boxes, ctas, median(us), median(mhz));
    }
  cudaStream_t one, two;
  CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
  struct Beside { int compute, ctas, kind; };  // kind: 0 nothing, 1 boxes, 2 rows
  for (int turn = 0; turn < 2; ++turn)
  for (Beside b : {Beside{80, 44, 0}, Beside{80, 44, 1}, Beside{80, 44, 2}, Beside{92, 32, 0}, Beside{92, 32, 1}, Beside{72, 44, 0}, Beside{72, 44, 1}}) {
    Run r("gemm_w_o", 65536, 2048, 7168, b.compute, 1);
    r.stream = one;
    const int gemms = 160, launches = b.kind ? kStatSlots : 0;
    const uint32_t each = b.kind == 1 ? 12 : 60;  // of about half a millisecond, 160 GEMMs of 4
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemset(stats, 0, size_t(kStatSlots) * 132 * sizeof(CtaStats)));
    CHECK(cudaMemset(gather_stats, 0, size_t(kStatSlots) * 132 * sizeof(CtaStats)));
    int sent = 0;
    for (int i = 0; i < gemms; ++i) {
      r.launch(i);
      for (; sent < launches * (i + 1) / gemms; ++sent) gather(b.kind == 1, b.ctas, each, sent, two);
    }
    CHECK(cudaDeviceSynchronize());
    read(h, stats);
    read(g, gather_stats);
    const double tiles = double(r.p.tiles) / b.compute;
    const uint64_t start = h[0].begin_ns;
    std::vector<double> us, mhz, slice;
    uint64_t last = 0;
    for (int i = 0; i < launches; ++i)
      for (int c = 0; c < b.ctas; ++c) {
        const CtaStats& s = g[size_t(i) * 132 + c];
        const double ms = (double(s.begin_ns) - double(start)) * 1e-6;
        last = std::max<uint64_t>(last, s.end_ns);
        if (ms > 250 && ms < 450) slice.push_back((s.end_ns - s.begin_ns) * 1e-3 / each);
      }
    for (int i = 0; i < gemms; ++i)
      for (int c = 0; c < b.compute; ++c) {
        const CtaStats& s = h[size_t(i) * 132 + c];
        const double ms = (double(s.begin_ns) - double(start)) * 1e-6;
        if (ms > 250 && ms < 450) {
          us.push_back((s.end_ns - s.begin_ns) * 1e-3 / tiles);
          mhz.push_back(double(s.cycles) / double(s.end_ns - s.begin_ns) * 1e3);
        }
      }
    const char* kind = b.kind == 0 ? "nothing" : b.kind == 1 ? "boxes" : "rows";
    printf("gemm_w_o 65536x2048x7168 on %d CTAs beside %d that gather by %s: %.2f us a tile, %.0f MHz; %.2f us a slice (gathers end at %.0f ms)\n", b.compute,
           b.kind ? b.ctas : 0, kind, median(us), median(mhz), median(slice), (double(last) - double(start)) * 1e-6);
    raw("gather_slice,%d,%d,%d,%.3f,,%.3f,%.0f\n", b.kind == 1 ? 28 : 0, b.kind ? b.ctas : 0, b.compute, median(slice), median(us), median(mhz));
  }
}

static double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

// Commands pushed to the host by some CTAs, alone, beside CTAs that poll the host's memory, and beside a GEMM that adds its
// output, as mKernel's gemm_rs runs: what one push takes and of what. A thread of the host takes the commands.
static void pushes() {
  const uint64_t slots = 1 << 12;
  const uint32_t count = 256, smem = kFullSmem - 1024;
  volatile uint64_t* ring;
  volatile uint64_t* tail;
  uint32_t *words, *bits, *marks, *ended;
  unsigned long long* head;
  uint64_t* room;
  PushStats* out;
  CHECK(cudaHostAlloc((void**)&ring, slots * 32, cudaHostAllocMapped));
  CHECK(cudaHostAlloc((void**)&tail, 64, cudaHostAllocMapped));
  CHECK(cudaHostAlloc((void**)&words, 132 * 64, cudaHostAllocMapped));
  CHECK(cudaMalloc(&bits, 132 * 128)); CHECK(cudaMalloc(&marks, 132 * count * 4)); CHECK(cudaMalloc(&ended, 4));
  CHECK(cudaMalloc(&head, 8)); CHECK(cudaMalloc(&room, 8)); CHECK(cudaMalloc(&out, 132 * sizeof(PushStats)));
  CHECK(cudaMemset(bits, 0, 132 * 128));
  CHECK(cudaFuncSetAttribute((void*)push_commands, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  cudaStream_t one, two;
  CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
  memset((void*)words, 0, 132 * 64);
  struct Mix { int pushers, pollers, gemm; };
  for (int turn = 0; turn < 2; ++turn)
    for (Mix x : {Mix{1, 0, 0}, Mix{4, 0, 0}, Mix{6, 0, 0}, Mix{10, 0, 0}, Mix{4, 8, 0}, Mix{1, 0, 120}, Mix{4, 0, 120}, Mix{4, 8, 120},
                  Mix{6, 8, 118}, Mix{4, 32, 0}, Mix{4, 64, 0}, Mix{1, 128, 0}, Mix{4, 128, 0}, Mix{6, 126, 0}}) {
      std::vector<double> part[7], polled, mhz;
      for (int rep = 0; rep < 5; ++rep) {
        memset((void*)ring, 0, slots * 32);
        *tail = 0;
        CHECK(cudaMemset(head, 0, 8)); CHECK(cudaMemset(room, 0, 8)); CHECK(cudaMemset(ended, 0, 4));
        CHECK(cudaDeviceSynchronize());
        Run r("gemm_w_s_add", 16384, 16384, 1024, std::max(x.gemm, 1), 1);
        r.stream = one;
        if (x.gemm) for (int i = 0; i < 12; ++i) r.launch(i);
        uint32_t pushers = x.pushers, n = count;
        uint64_t depth = slots;
        void* args[] = {&pushers, &n, (void*)&ring, &depth, &head, (void*)&tail, &room, &bits, &marks, &words, &ended, &out};
        CHECK(cudaLaunchKernel((void*)push_commands, dim3(x.pushers + x.pollers), dim3(384), args, smem, two));
        const uint64_t all = uint64_t(x.pushers) * count;
        const double begin = now_us();
        for (uint64_t taken = 0; taken < all && now_us() - begin < 2e6; ++taken) {
          volatile uint64_t* at = ring + taken % slots * 4;
          while (__atomic_load_n(at, __ATOMIC_ACQUIRE) == 0 && now_us() - begin < 2e6) {}
          __atomic_store_n(at, 0, __ATOMIC_RELEASE);
          *tail = taken + 1;
        }
        CHECK(cudaDeviceSynchronize());
        std::vector<PushStats> h(132);
        CHECK(cudaMemcpy(h.data(), out, (x.pushers + x.pollers) * sizeof(PushStats), cudaMemcpyDeviceToHost));
        for (int i = 0; i < x.pushers + x.pollers; ++i) {
          const PushStats& s = h[i];
          const double rate = double(s.cycles) / double(s.end_ns - s.begin_ns), each = 1e-3 / rate / double(s.count);
          if (i >= x.pushers) { polled.push_back(s.find * each); continue; }
          const uint64_t parts[] = {s.cycles, s.find, s.mark, s.fence, s.claim, s.write};
          for (int p = 0; p < 6; ++p) part[p].push_back(parts[p] * each);
          mhz.push_back(rate * 1e3);
        }
      }
      printf("push: %2d CTAs, %3d poll the host, GEMM on %3d: %.2f us (find %.2f mark %.2f fence %.2f claim %.2f write %.2f); a poll %.2f us; %.0f MHz\n",
             x.pushers, x.pollers, x.gemm, median(part[0]), median(part[1]), median(part[2]), median(part[3]), median(part[4]), median(part[5]),
             polled.empty() ? 0.0 : median(polled), median(mhz));
      char how[64];
      snprintf(how, sizeof how, "ctas=%d polling=%d gemm_ctas=%d", x.pushers, x.pollers, x.gemm);
      raw("push,%s,%.3f,us,find %.3f mark %.3f fence %.3f claim %.3f write %.3f; %.0f MHz\n", how, median(part[0]), median(part[1]), median(part[2]),
          median(part[3]), median(part[4]), median(part[5]), median(mhz));
      if (x.pollers) raw("host_poll,%s,%.3f,us,%.0f MHz\n", how, median(polled), median(mhz));
    }
}

static void launch_costs() {
  CHECK(cudaFuncSetAttribute((void*)probe_empty, cudaFuncAttributeMaxDynamicSharedMemorySize, kFullSmem));
  uint32_t* words;
  CHECK(cudaMalloc(&words, 1 << 20));
  const int n = 1000;
  auto timed = [&](const char* what, const std::function<void()>& body) {
    std::vector<double> t;
    EventPair e;
    for (int rep = 0; rep < 9; ++rep) {
      CHECK(cudaEventRecord(e.a));
      for (int i = 0; i < n; ++i) body();
      CHECK(cudaEventRecord(e.b));
      CHECK(cudaDeviceSynchronize());
      t.push_back(e.us() / n);
    }
    printf("launch %-60s %.3f us\n", what, median(t));
    raw("launch,%s,%.4f\n", what, median(t));
  };
  auto big = [&] { probe_empty<<<132, 384, kFullSmem>>>(nullptr); };
  timed("empty 132x384 no smem", [&] { probe_empty<<<132, 384>>>(nullptr); });
  timed("empty 132x384 227KiB smem", big);
  timed("empty 1x32", [&] { probe_empty<<<1, 32>>>(nullptr); });
  timed("clear 16x128 of 16K words + empty 132x384 227KiB", [&] { probe_clear<<<16, 128>>>(words, 16384); big(); });
  timed("clear 1x128 of 128 words + empty 132x384 227KiB", [&] { probe_clear<<<1, 128>>>(words, 128); big(); });
  timed("cudaMemsetAsync 64 KiB + empty 132x384 227KiB", [&] { CHECK(cudaMemsetAsync(words, 0, 65536)); big(); });
  cudaEvent_t ev, ev2;
  CHECK(cudaEventCreate(&ev)); CHECK(cudaEventCreate(&ev2));
  timed("empty 132x384 227KiB + 1 event record", [&] { big(); CHECK(cudaEventRecord(ev)); });
  timed("event pair + empty 132x384 227KiB", [&] { CHECK(cudaEventRecord(ev2)); big(); CHECK(cudaEventRecord(ev)); });
  {  // what one event pair around one empty launch reads, and host time of a launch
    std::vector<double> t;
    EventPair e;
    for (int i = 0; i < 200; ++i) {
      CHECK(cudaEventRecord(e.a)); big(); CHECK(cudaEventRecord(e.b));
      CHECK(cudaDeviceSynchronize());
      t.push_back(e.us());
    }
    printf("launch event pair around one empty launch reads %.3f us\n", median(t));
    raw("launch,event pair around one isolated empty 132x384 227KiB launch reads,%.4f\n", median(t));
  }
  {  // the same back-to-back chain in one graph: no host in the way
    cudaStream_t s;
    CHECK(cudaStreamCreate(&s));
    for (int mode = 0; mode < 2; ++mode) {
      cudaGraph_t g;
      cudaGraphExec_t x;
      CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
      for (int i = 0; i < 200; ++i) {
        if (mode) probe_clear<<<16, 128, 0, s>>>(words, 16384);
        probe_empty<<<132, 384, kFullSmem, s>>>(nullptr);
      }
      CHECK(cudaStreamEndCapture(s, &g));
      CHECK(cudaGraphInstantiate(&x, g, 0));
      std::vector<double> t;
      EventPair e;
      for (int rep = 0; rep < 12; ++rep) {
        CHECK(cudaEventRecord(e.a, s));
        CHECK(cudaGraphLaunch(x, s));
        CHECK(cudaEventRecord(e.b, s));
        CHECK(cudaStreamSynchronize(s));
        if (rep > 2) t.push_back(e.us() / 200);
      }
      printf("launch graph %s: %.3f us a node group\n", mode ? "clear + empty" : "empty", median(t));
      raw("launch,graph replay %s,%.4f\n", mode ? "clear 16x128 + empty 132x384 227KiB" : "empty 132x384 227KiB", median(t));
    }
  }
  for (int c : {8, 32, 64, 100, 132}) {
    CHECK(cudaFuncSetAttribute((void*)probe_grid_barrier, cudaFuncAttributeMaxDynamicSharedMemorySize, kFullSmem));
    std::vector<double> t;
    for (int rep = 0; rep < 7; ++rep) {
      CHECK(cudaMemset(words, 0, 256));
      probe_grid_barrier<<<c, 384, kFullSmem>>>(words, 2000, 1, (ProbeStats*)stats);
      CHECK(cudaDeviceSynchronize());
      t.push_back(read_stats(0, c, 0).cta_mean_us / 2000);
    }
    printf("grid barrier %3d ctas: %.3f us\n", c, median(t));
    raw("grid_barrier,%d,%.4f\n", c, median(t));
  }
}

// SM clock over time: idle first, then one launch after the other. Also bursts of 10 after 50 ms of idleness,
// as benchmarks with few iterations run.
static void clock_trace(const std::string& name, int ctas, int k, int tiles_each) {
  Run r(name, 16384, 16384, k, ctas, 16, long(ctas) * tiles_each);
  r.launch(0);
  CHECK(cudaDeviceSynchronize());
  struct timespec pause = {0, 600000000};
  nanosleep(&pause, nullptr);
  const int n = 2000;
  for (int i = 0; i < n; ++i) r.launch(i);
  CHECK(cudaDeviceSynchronize());
  std::vector<CtaStats> h(size_t(kStatSlots) * 132);
  CHECK(cudaMemcpy(h.data(), stats, h.size() * sizeof(CtaStats), cudaMemcpyDeviceToHost));
  uint64_t t0 = h[0].begin_ns;
  double next = 0;
  printf("trace %s k %d ctas %d: ms:MHz(us a tile)", name.c_str(), k, ctas);
  for (int i = 0; i < n; ++i) {
    CtaStats& s = h[size_t(i) * 132];
    double ms = (s.begin_ns - t0) * 1e-6, us = (s.end_ns - s.begin_ns) * 1e-3, mhz = s.cycles / us;
    if (ms >= next) {
      printf(" %.0f:%.0f(%.2f)", ms, mhz, us / tiles_each);
      raw("trace,%s,%d,%d,%d,%.3f,%.1f,%.3f\n", name.c_str(), k, ctas, tiles_each, ms, mhz, us / tiles_each);
      next = ms < 20 ? ms + 2 : ms < 200 ? ms + 20 : ms + 200;
    }
  }
  printf("\n");
  pause.tv_nsec = 50000000;
  std::vector<std::vector<double>> f(10);
  for (int rep = 0; rep < 8; ++rep) {
    nanosleep(&pause, nullptr);
    for (int i = 0; i < 10; ++i) r.launch(i);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(h.data(), stats, 10 * 132 * sizeof(CtaStats), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 10; ++i) f[i].push_back(double(h[i * 132].cycles) / double(h[i * 132].end_ns - h[i * 132].begin_ns) * 1e3);
  }
  printf("bursts of 10 after 50 ms idle, MHz by launch:");
  for (int i = 0; i < 10; ++i) { printf(" %.0f", median(f[i])); raw("burst,%s,%d,%d,%d,%d,%.1f\n", name.c_str(), k, ctas, tiles_each, i, median(f[i])); }
  printf("\n");
}

// The two clock regimes of one load: its first 25 ms after idleness, and after 350 ms of it.
static void clocks(const std::string& name, int ctas, int k) {
  int each = std::max(1, std::min(int(600.0 / (k / 64 * 0.62 + 1.5)), 8192 / ctas));
  Run r(name, 16384, 16384, k, ctas, 16, long(ctas) * each);
  struct timespec pause = {0, 400000000};
  nanosleep(&pause, nullptr);
  double launch_us = each * (k / 64 * 0.6 + 1.2);
  int n = std::min(kStatSlots, int(500e3 / launch_us) + 1);
  for (int i = 0; i < n; ++i) r.launch(i);
  CHECK(cudaDeviceSynchronize());
  std::vector<CtaStats> h(size_t(n) * 132);
  CHECK(cudaMemcpy(h.data(), stats, h.size() * sizeof(CtaStats), cudaMemcpyDeviceToHost));
  std::vector<double> early, late, cycles, early_us, late_us;
  for (int i = 1; i < n; ++i) {
    double ms = (h[size_t(i) * 132].begin_ns - h[0].begin_ns) * 1e-6, us = 0, c = 0;
    for (int j = 0; j < ctas; ++j) { CtaStats& s = h[size_t(i) * 132 + j]; us += (s.end_ns - s.begin_ns) * 1e-3 / ctas; c += double(s.cycles) / ctas; }
    cycles.push_back(c / each);
    if (ms < 25) { early.push_back(c / us); early_us.push_back(us / each); }
    if (ms > 350) { late.push_back(c / us); late_us.push_back(us / each); }
  }
  printf("clocks %-12s k %5d ctas %3d: %4.0f MHz, %.3f us a tile in the first 25 ms; %4.0f MHz, %.3f us after 350 ms; %.0f cycles a tile (%d tiles a launch)\n",
         name.c_str(), k, ctas, median(early), median(early_us), median(late), median(late_us), median(cycles), each);
  raw("clocks,%s,%d,%d,%d,%.1f,%.3f,%.1f,%.3f,%.1f\n", name.c_str(), k, ctas, each, median(early), median(early_us), median(late), median(late_us), median(cycles));
}

// Random shapes, CTA counts and orders against cuBLAS: hunts for hangs and races.
static int soak(const std::string& name, int rounds, uint32_t seed) {
  Cublas blas;
  const Variant& v = variant(name);
  uint64_t x = 0x9E3779B97F4A7C15ull * (seed + 1);
  auto pick = [&](int n) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; return int((x >> 11) % n); };
  int bad = 0;
  for (int i = 0; i < rounds; ++i) {
    int m = 256 * (1 + pick(16)), n = 256 * (1 + pick(16)), k = 64 * (1 + pick(i % 2 ? 40 : 6)), c = 2 * (1 + pick(66)), g = 1 + pick(20);
    random_bf16(A, uint64_t(m) * k, 1000 + 2 * i + seed);
    random_bf16(B, uint64_t(n) * k, 1001 + 2 * i + seed);
    CHECK(cudaMemset(C, name.find("_add") == std::string::npos ? 0xff : 0, uint64_t(m) * n * 2));
    Run r(name, m, n, k, c, g);
    blas.run(m, n, k, A, B, R, !v.b_is_kn);
    r.launch(0);
    cudaError_t e = cudaDeviceSynchronize();
    if (e != cudaSuccess) { printf("soak %s %dx%dx%d ctas %d group %d round %d: %s\n", name.c_str(), m, n, k, c, g, i, cudaGetErrorString(e)); return 1; }
    Difference d = compare(C, R, uint64_t(m) * n);
    if (!(d.bad == 0 && d.relative < 3e-3)) { printf("soak %s %dx%dx%d ctas %d group %d: difference %.2e bad %.0f\n", name.c_str(), m, n, k, c, g, d.relative, d.bad); ++bad; }
  }
  printf("soak %s: %d of %d rounds wrong\n", name.c_str(), bad, rounds);
  raw("soak,%s,%d,%d\n", name.c_str(), rounds, bad);
  return bad;
}

// The loader acquires a flag, already raised, every so many k steps.
static void gated(const std::string& name, int ctas, int k) {
  for (int steps : {0, 8, 4, 2, 1}) {
    Run r(name, 16384, 16384, k, ctas, 16, long(ctas) * 8);
    r.p.gate_steps = steps;
    Timing t = measure(r, 60, 15);
    printf("gated %s k %d ctas %d: a flag every %d k steps: %.2f us a tile, %.0f cycles\n", name.c_str(), k, ctas, steps, t.cta_mean_us / 8, t.cta_mean_us * t.mhz / 8);
    raw("gated,%s,%d,%d,%d,%.3f,%.1f\n", name.c_str(), k, ctas, steps, t.cta_mean_us / 8, t.cta_mean_us * t.mhz / 8);
  }
}

// Every tile waits for a flag that the stores of the CTA's tile before raise: the deferred output must be let go
// although the next tile has not begun, and the time is that of a full turn-around.
static void chained(const std::string& name, int ctas, int k) {
  static uint32_t* chain = nullptr;
  const int each = 8;
  if (!chain) CHECK(cudaMalloc(&chain, 4 << 16));
  Run r(name, 16384, 16384, k, ctas, 16, long(ctas) * each);
  for (int on = 0; on < 2; ++on) {
    r.p.chain = on ? chain : nullptr;
    std::vector<double> us, cy;
    for (int i = 0; i < 30; ++i) {
      CHECK(cudaMemsetAsync(chain, 0, 4 << 16));
      r.launch(i);
    }
    CHECK(cudaDeviceSynchronize());
    for (int i = 10; i < 30; ++i) { Timing t = read_stats(i, ctas, 0); us.push_back(t.cta_mean_us / each); cy.push_back(t.cta_mean_us * t.mhz / each); }
    printf("chained %-9s k %d ctas %d: %s %.2f us = %.0f cycles a tile\n", name.c_str(), k, ctas, on ? "each tile waits for the one before" : "free", median(us), median(cy));
    raw("chained,%s,%d,%d,%d,%.3f,%.1f\n", name.c_str(), k, ctas, on, median(us), median(cy));
  }
}

// Flag latency between two CTAs of a launch whose other CTAs compute (or, with none, of an idle card).
static void flag_latency(const std::string& name, std::vector<int> ctas_list, int k) {
  for (int ctas : ctas_list) {
    Run r(name, 16384, 16384, k, ctas ? ctas : 2, 16, long(ctas ? ctas : 2) * 8, 2);
    r.ping = true;
    for (int i = 0; i < 80; ++i) r.launch(i);
    CHECK(cudaDeviceSynchronize());
    std::vector<double> ns, cy, mhz;
    for (int i = 60; i < 80; ++i) {
      std::vector<CtaStats> h(132);
      CHECK(cudaMemcpy(h.data(), stats + i * 132, 132 * sizeof(CtaStats), cudaMemcpyDeviceToHost));
      CtaStats& s = h[r.ctas];
      ns.push_back(double(s.end_ns - s.begin_ns) / s.bytes / 2);
      cy.push_back(double(s.cycles) / s.bytes / 2);
      mhz.push_back(double(s.cycles) / double(s.end_ns - s.begin_ns) * 1e3);
    }
    printf("flag latency with %d CTAs computing (k %d): %.1f ns one way = %.0f cycles at %.0f MHz\n", r.ctas, k, median(ns), median(cy), median(mhz));
    raw("flag_latency,%s,%d,%d,%.2f,%.1f,%.1f\n", name.c_str(), k, r.ctas, median(ns), median(cy), median(mhz));
  }
}

// Idle time of the card between dependent launches of about 100 us: last end to next begin, by the device's timer.
static void gaps() {
  Run r("gemm_w_d", 8192, 8192, 512, 132, 16);
  uint32_t* words;
  CHECK(cudaMalloc(&words, 1 << 20));
  auto span = [&](const char* what, int n, const std::function<void(int)>& body, bool graph) {
    cudaStream_t s = 0;
    cudaGraph_t g;
    cudaGraphExec_t x;
    (void)g; (void)x; (void)graph;
    for (int rep = 0; rep < 2; ++rep) {
      for (int i = 0; i < n; ++i) body(i);
      CHECK(cudaStreamSynchronize(s));
    }
    std::vector<CtaStats> h(size_t(n) * 132);
    CHECK(cudaMemcpy(h.data(), stats, h.size() * sizeof(CtaStats), cudaMemcpyDeviceToHost));
    std::vector<double> gap, skew;
    for (int i = 0; i + 1 < n; ++i) {
      uint64_t end = 0, begin = ~0ull, last = 0;
      for (int j = 0; j < 132; ++j) {
        end = std::max<uint64_t>(end, h[size_t(i) * 132 + j].end_ns);
        begin = std::min<uint64_t>(begin, h[size_t(i + 1) * 132 + j].begin_ns);
        last = std::max<uint64_t>(last, h[size_t(i + 1) * 132 + j].begin_ns);
      }
      gap.push_back(double(begin) - double(end));
      skew.push_back(double(last - begin));
    }
    printf("gap %-52s: %.0f ns from the last end to the first begin, %.0f ns from first to last begin\n", what, median(gap), median(skew));
    raw("gap,%s,%.1f,%.1f\n", what, median(gap), median(skew));
  };
  {
    cudaStream_t s;
    CHECK(cudaStreamCreate(&s));
    for (int mode = 0; mode < 2; ++mode) {
      const int n = 60;
      cudaGraph_t g;
      cudaGraphExec_t x;
      CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
      for (int i = 0; i < n; ++i) {
        if (mode) probe_clear<<<16, 128, 0, s>>>(words, 16384);
        CopyWork w = {};
        CtaStats* st = stats + i * 132;
        void* args[] = {&r.ma, &r.mb, &r.mc, &r.p, &w, &st};
        CHECK(cudaLaunchKernel(r.v->kernel, dim3(132), dim3(kGemmThreads), args, r.v->smem, s));
      }
      CHECK(cudaStreamEndCapture(s, &g));
      CHECK(cudaGraphInstantiate(&x, g, 0));
      for (int rep = 0; rep < 3; ++rep) CHECK(cudaGraphLaunch(x, s));
      CHECK(cudaStreamSynchronize(s));
      std::vector<CtaStats> h(size_t(n) * 132);
      CHECK(cudaMemcpy(h.data(), stats, h.size() * sizeof(CtaStats), cudaMemcpyDeviceToHost));
      std::vector<double> gap;
      for (int i = 0; i + 1 < n; ++i) {
        uint64_t end = 0, begin = ~0ull;
        for (int j = 0; j < 132; ++j) {
          end = std::max<uint64_t>(end, h[size_t(i) * 132 + j].end_ns);
          begin = std::min<uint64_t>(begin, h[size_t(i + 1) * 132 + j].begin_ns);
        }
        gap.push_back(double(begin) - double(end));
      }
      const char* what = mode ? "in one graph with clear 16x128 of 16K words between" : "in one graph";
      printf("gap %-52s: %.0f ns from the last end to the first begin\n", what, median(gap));
      raw("gap,%s,%.1f,\n", what, median(gap));
    }
  }
  span("back to back", 100, [&](int i) { r.launch(i); }, false);
  span("with clear 16x128 of 16K words between", 100, [&](int i) { probe_clear<<<16, 128>>>(words, 16384); r.launch(i); }, false);
  span("with clear 132x128 of 256K words between", 100, [&](int i) { probe_clear<<<132, 128>>>(words, 262144); r.launch(i); }, false);
  span("with cudaMemsetAsync of 64 KiB between", 100, [&](int i) { CHECK(cudaMemsetAsync(words, 0, 65536)); r.launch(i); }, false);
  cudaEvent_t e;
  CHECK(cudaEventCreate(&e));
  span("with an event record between", 100, [&](int i) { CHECK(cudaEventRecord(e)); r.launch(i); }, false);
}

static void timer_resolution() {
  std::vector<CtaStats> h(132);
  Run r("gemm_p_o", 16384, 16384, 512, 132, 16, 132);
  uint64_t g = 0;
  for (int i = 0; i < 5; ++i) {
    r.launch(i);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(h.data(), stats + i * 132, 132 * sizeof(CtaStats), cudaMemcpyDeviceToHost));
    for (auto& s : h) { uint64_t a = s.begin_ns, b; while (a) { b = g % a; g = a; a = b; } }
    for (auto& s : h) { uint64_t a = s.end_ns, b; while (a) { b = g % a; g = a; a = b; } }
  }
  printf("globaltimer: greatest common divisor of readings %lu ns\n", g);
  raw("timer,%lu\n", g);
}

int main(int argc, char** argv) {
  std::string cmd = argc > 1 ? argv[1] : "";
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (cmd == "check") {  // check VARIANT...: a hang or trap in one process leaves the others alone
    setup(512ull << 20);
    int bad = 0;
    for (int i = 2; i < argc; ++i)
      bad += check(argv[i], {{256, 256, 64, 2, 16}, {256, 512, 512, 4, 16}, {1024, 2048, 1024, 32, 4}, {4096, 4096, 512, 132, 16}, {2048, 2048, 8192, 100, 3}});
    return bad != 0;
  }
  auto list = [&](int i) {
    std::vector<std::string> v;
    std::string s = argv[i], w;
    for (char c : s + ",") { if (c == ',') { if (!w.empty()) v.push_back(w); w.clear(); } else w += c; }
    return v;
  };
  auto numbers = [&](int i) { std::vector<int> v; for (auto& s : list(i)) v.push_back(atoi(s.c_str())); return v; };
  if (cmd == "ctas") { setup(1ull << 30); timer_resolution(); sweep_ctas(list(2), numbers(3), atoi(argv[4])); return 0; }   // VARIANTS CTAS K
  if (cmd == "gated") { setup(1ull << 30); for (auto& v : list(2)) for (int k : numbers(4)) for (int c : numbers(3)) gated(v, c, k); return 0; }
  if (cmd == "chained") { setup(1ull << 30); for (auto& v : list(2)) for (int k : numbers(4)) for (int c : numbers(3)) chained(v, c, k); return 0; }
  if (cmd == "flags") { setup(1ull << 30); for (int k : numbers(4)) flag_latency(argv[2], numbers(3), k); return 0; }
  if (cmd == "gaps") { setup(1ull << 30); gaps(); return 0; }
  if (cmd == "sustained") {  // any number of VARIANT:m:n:k:ctas:group, each after 400 ms of itself
    setup(2ull << 30);
    for (int i = 2; i < argc; ++i) {
      char name[64]; int m, n, k, c, g;
      if (sscanf(argv[i], "%63[^:]:%d:%d:%d:%d:%d", name, &m, &n, &k, &c, &g) != 6) return 2;
      Run r(name, m, n, k, c, g);
      Timing t = measure(r, 400, 15);
      printf("sustained %-10s %5dx%5dx%5d ctas %3d group %3d: %9.1f us, %4.0f MHz\n", name, m, n, k, c, g, t.event_us, t.mhz);
      row("sustained", r, t);
    }
    return 0;
  }
  if (cmd == "one") {  // one launch each, for the profiler: VARIANT:m:n:k:ctas:group
    setup(2ull << 30);
    for (int i = 2; i < argc; ++i) {
      char name[64]; int m, n, k, c, g;
      if (sscanf(argv[i], "%63[^:]:%d:%d:%d:%d:%d", name, &m, &n, &k, &c, &g) != 6) return 2;
      Run r(name, m, n, k, c, g);
      r.launch(0);
      CHECK(cudaDeviceSynchronize());
      printf("one %s\n", argv[i]);
    }
    return 0;
  }
  if (cmd == "clocks") {  // VARIANTS CTAS KS
    setup(1ull << 30);
    for (auto& v : list(2)) for (int k : numbers(4)) for (int c : numbers(3)) clocks(v, c, k);
    return 0;
  }
  if (cmd == "soak") { setup(512ull << 20); return soak(argv[2], atoi(argv[3]), argc > 4 ? atoi(argv[4]) : 0) != 0; }
  if (cmd == "trace") {  // VARIANT CTAS K TILES_EACH
    setup(1ull << 30);
    for (int c : numbers(3)) clock_trace(argv[2], c, atoi(argv[4]), atoi(argv[5]));
    return 0;
  }
  if (cmd == "k") { setup(1ull << 30); sweep_k(list(2), numbers(3), numbers(4)); return 0; }                                 // VARIANTS CTAS KS
  if (cmd == "cold") {  // as paired
    setup(2ull << 30);
    for (int i = 2; i < argc; ++i) {
      char name[64]; int m, n, k, c, g, q;
      if (sscanf(argv[i], "%63[^:]:%d:%d:%d:%d:%d:%d", name, &m, &n, &k, &c, &g, &q) != 7) return 2;
      cold(name, m, n, k, c, g, q);
    }
    return 0;
  }
  if (cmd == "paired") {  // then any number of VARIANT:m:n:k:ctas:group:pairs
    setup(2ull << 30);
    for (int i = 2; i < argc; ++i) {
      char name[64]; int m, n, k, c, g, q;
      if (sscanf(argv[i], "%63[^:]:%d:%d:%d:%d:%d:%d", name, &m, &n, &k, &c, &g, &q) != 7) { fprintf(stderr, "bad %s\n", argv[i]); return 2; }
      paired(name, m, n, k, c, g, q);
    }
    return 0;
  }
  if (cmd == "interference") { setup(1ull << 30); for (auto& n : list(2)) for (int c : numbers(3)) { interference(n, c, 8192, 4); interference(n, c, 512, 40); } return 0; }
  if (cmd == "moves") { setup(64ull << 20); copies_and_reductions(); return 0; }
  if (cmd == "gathers") { setup(1ull << 30); gathers(); return 0; }
  if (cmd == "pushes") { setup(1ull << 30); pushes(); return 0; }
  if (cmd == "mixes") { setup(64ull << 20); mixes(); return 0; }
  if (cmd == "launch") { setup(64ull << 20); launch_costs(); return 0; }
  fprintf(stderr, "usage: lab check|one|clocks|ctas|soak|sustained|trace|k|cold|paired|chained|gated|gaps|flags|interference|moves|gathers|pushes|mixes|launch ...\n");
  return 2;
}

// What the interpreter costs: the same tiles by descriptors and hard-wired; with and without a timeline; attention from
// and to a state in memory and without. Variants alternate in one process; the rows hold the median of the paired ratios
// with a bootstrap interval of 95 %: quantity,conditions,value,unit,notes
#include "../interpreter.cu"
#include "attention.cu"
#include "gemm.cu"
#include "host.h"

constexpr int kSms = 132;
constexpr uint32_t kSmem = 232448;

template <class T>
static T* upload(const std::vector<T>& items) {
  T* p;
  CHECK(cudaMalloc(&p, std::max<size_t>(items.size(), 1) * sizeof(T)));
  CHECK(cudaMemcpy(p, items.data(), items.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

struct Side {
  std::string name;
  std::function<void()> launch;
};

static double bootstrap(const std::vector<double>& ratios, double q) {
  uint64_t x = 88172645463325252ull;
  std::vector<double> medians;
  for (int i = 0; i < 2000; ++i) {
    std::vector<double> sample;
    for (size_t j = 0; j < ratios.size(); ++j) {
      x ^= x << 13; x ^= x >> 7; x ^= x << 17;
      sample.push_back(ratios[x % ratios.size()]);
    }
    medians.push_back(median(sample));
  }
  return quantile(medians, q);
}

// Time of `a` over time of `b`.
static void pairs(const char* quantity, const std::string& conditions, const Side& a, const Side& b, int count) {
  EventPair first;
  CHECK(cudaEventRecord(first.a));
  a.launch();
  b.launch();
  CHECK(cudaEventRecord(first.b));
  CHECK(cudaDeviceSynchronize());
  const int warm = std::min(300, std::max(2, int(30e3 / first.us())));
  for (int i = 0; i < warm; ++i) { a.launch(); b.launch(); }
  auto& ev = events(2 * count);
  for (int i = 0; i < count; ++i) {
    for (int which = 0; which < 2; ++which) {
      const bool is_a = (which == 0) == (i % 2 == 0);  // who goes first changes from pair to pair
      EventPair& e = ev[2 * i + (is_a ? 0 : 1)];
      CHECK(cudaEventRecord(e.a));
      (is_a ? a : b).launch();
      CHECK(cudaEventRecord(e.b));
    }
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<double> ta, tb, ratios;
  for (int i = 0; i < count; ++i) {
    ta.push_back(ev[2 * i].us());
    tb.push_back(ev[2 * i + 1].us());
    ratios.push_back(ta.back() / tb.back());
  }
  char line[512];
  snprintf(line, sizeof line, "%s,%s,%.5f,ratio,%s %.2f us over %s %.2f us; %d alternating pairs; 95%% interval %.5f to %.5f", quantity,
           conditions.c_str(), median(ratios), a.name.c_str(), median(ta), b.name.c_str(), median(tb), count, bootstrap(ratios, .025),
           bootstrap(ratios, .975));
  printf("%s\n", line);
  raw("%s\n", line);
  fflush(stdout);
}

static uint32_t* words;
static Blocked* blocked;
static CtaTimes* times;
static Stamps* stamps;
static CtaStats* stats;
static AttentionStats* attention_stats;

struct Descriptors {
  Program program = {};
  std::vector<TensorMap> maps;
  void finish(const std::vector<Task>& tasks, const std::vector<Region>& regions, uint32_t claim) {
    Role role = {};
    role.tasks = uint32_t(tasks.size());
    role.claim = claim;
    role.lanes = 1;
    role.recycle = kNone;
    role.tiles = 1;
    role.ctas = kSms;
    role.cursor = 0;
    std::vector<Start> starts;
    std::vector<Order> orders;
    for (const Task& task : tasks) {
      Order order = {};
      order.task = task;
      for (uint32_t i = 0; i < task.inputs + task.outputs; ++i) order.regions[i] = regions[task.first_region + i];
      orders.push_back(order);
    }
    for (uint32_t i = 0; i < kSms; ++i) {
      const bool decided = i < tasks.size();
      starts.push_back({role, 0, i, decided ? i : kNone, 0, decided ? orders[i] : Order{}});
    }
    program.orders = upload(orders);
    program.tasks = upload(tasks);
    program.regions = upload(regions);
    program.roles = upload(std::vector<Role>{role});
    program.starts = upload(starts);
    program.waits = upload(std::vector<Wait>(1));
    program.signals = upload(std::vector<Signal>(1));
    CHECK(cudaMemcpyToSymbol(tensor_maps, maps.data(), maps.size() * sizeof(TensorMap)));
    program.maps = uint32_t(maps.size());
    program.words = words;
    program.blocked = blocked;
    program.times = times;
    program.scale_log2 = 0.127517432f;
  }
  template <class Kernel>
  Side side(const std::string& name, Kernel kernel, int threads, bool record, bool ticket = false) const {
    CHECK(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    Program p = program;
    p.stamps = record ? stamps : nullptr;
    return {name, [=] {
              if (ticket) CHECK(cudaMemsetAsync(words, 0, 256));
              void* args[] = {(void*)&p};
              CHECK(cudaLaunchKernel((const void*)kernel, dim3(kSms), dim3(threads), args, kSmem, 0));
            }};
  }
};

static void *A, *B, *C, *D;

static void gemm(int m, int n, int k, int count) {
  GemmProblem p = {};
  p.m_tiles = m / 128;
  p.n_tiles = n / 256;
  p.k_steps = k / 64;
  p.group_m = 16;
  p.tiles = p.m_tiles * p.n_tiles;
  p.compute_ctas = kSms;
  TensorMap ma = make_map(A, m, k, 128, 1), mb = make_map(B, k, n, 64, 4), mc = make_map(C, m, n, 64, 1);
  Descriptors d;
  d.maps = {ma, mb, make_map(D, m, n, 64, 1)};
  std::vector<Task> tasks;
  std::vector<Region> regions;
  for (uint32_t t = 0; t < p.tiles; ++t) {
    const uint32_t per_group = p.group_m * p.n_tiles, group = t / per_group, within = t % per_group;
    const uint32_t rows = std::min(p.m_tiles - group * p.group_m, p.group_m), col = within / rows;
    const uint32_t row = group * p.group_m + within - col * rows;
    Task task = {};
    task.op = kGemm;
    task.first_region = uint32_t(regions.size());
    task.inputs = 2;
    task.outputs = 1;
    task.steps = p.k_steps;
    tasks.push_back(task);
    Region a = {}, b = {}, c = {};
    a.map = 0; a.row = row * 128;
    b.map = 1; b.column_block = col * 4;
    c.map = 2; c.row = row * 128; c.column_block = col * 4;
    regions.insert(regions.end(), {a, b, c});
  }
  d.finish(tasks, regions, kStrided);
  Descriptors ticket = d;
  ticket.finish(tasks, regions, kTicket);
  const std::string shape = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
  for (bool pipelined : {true, false}) {
    auto wired_kernel = pipelined ? gemm_p_d : gemm_w_d;
    auto kernel = pipelined ? interpret_pipelined_overlap : interpret_wait_overlap;
    CHECK(cudaFuncSetAttribute((const void*)wired_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    Side wired = {pipelined ? "gemm_p_d" : "gemm_w_d", [=] {
                    CopyWork w = {};
                    CtaStats* s = stats;
                    void* args[] = {(void*)&ma, (void*)&mb, (void*)&mc, (void*)&p, (void*)&w, (void*)&s};
                    CHECK(cudaLaunchKernel((const void*)wired_kernel, dim3(kSms), dim3(kGemmThreads), args, kSmem, 0));
                  }};
    const std::string loop = pipelined ? "pipelined " : "wait_each_step ";
    Side plain = d.side("strided descriptors", kernel, kGemmThreads, false);
    pairs("interpretation", "gemm " + loop + shape, plain, wired, count);
    if (pipelined) {
      Difference x = compare(D, C, uint64_t(m) * n);
      if (x.bad != 0 || x.relative > 1e-6) printf("DIFFERS: relative %.2e not finite %.0f\n", x.relative, x.bad);
      pairs("interpretation", "gemm ticket " + loop + shape, ticket.side("ticket descriptors and clearing the words", kernel, kGemmThreads, false, true), wired, count);
      pairs("timeline", "gemm " + loop + shape, d.side("recorded", kernel, kGemmThreads, true), plain, count);
      pairs("null", "gemm " + loop + shape, plain, d.side("the same", kernel, kGemmThreads, false), count);
    }
  }
}

template <class Wired, class Kernel>
static void attention(const char* name, Wired wired_kernel, Kernel kernel, int consumers, int heads, int rows, int kv_rows, int count) {
  const uint32_t q_rows = consumers * 64;
  AttentionProblem p = {uint32_t(rows) / q_rows, uint32_t(kv_rows) / 128, uint32_t(heads) * (uint32_t(rows) / q_rows), 0.127517432f};
  TensorMap mq = make_map(A, uint64_t(heads) * rows, 128, q_rows, 2), mk = make_map(B, uint64_t(heads) * kv_rows, 128, 128, 2);
  TensorMap mv = make_map((uint16_t*)B + uint64_t(heads) * kv_rows * 128, uint64_t(heads) * kv_rows, 128, 128, 2);
  TensorMap mo = make_map(C, uint64_t(heads) * rows, 128, 64, 2);
  float* logs = (float*)((uint8_t*)D + (512ull << 20));
  const int threads = (consumers + 1) * 128;
  CHECK(cudaFuncSetAttribute((const void*)wired_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
  Side wired = {name, [=] {
                  AttentionStats* s = attention_stats;
                  float* l = logs;
                  void* args[] = {(void*)&mq, (void*)&mk, (void*)&mv, (void*)&mo, (void*)&p, (void*)&s, (void*)&l};
                  CHECK(cudaLaunchKernel((const void*)wired_kernel, dim3(kSms), dim3(threads), args, kSmem, 0));
                }};
  auto make = [&](uint32_t flags) {
    Descriptors d;
    d.maps = {mq, mk, mv, mo};
    std::vector<Task> tasks;
    std::vector<Region> regions;
    for (uint32_t t = 0; t < p.tasks; ++t) {
      const uint32_t head = t / p.q_blocks;
      Task task = {};
      task.op = kAttention;
      task.first_region = uint32_t(regions.size());
      task.steps = p.kv_blocks;
      task.flags = flags;
      task.inputs = flags == (kFirst | kLast) ? 3 : 4;  // the state is one of them
      task.outputs = flags & kLast ? 2 : 0;
      Region q = {}, k = {}, v = {}, state = {}, o = {}, l = {};
      q.map = 0; q.row = t * q_rows;
      k.map = 1; k.row = head * kv_rows;
      v.map = 2; v.row = head * kv_rows;
      state.address = uint64_t(D) + uint64_t(t) * q_rows * 520;
      o.map = 3; o.row = t * q_rows;
      l.address = uint64_t(logs + uint64_t(t) * q_rows);
      regions.insert(regions.end(), {q, k, v});
      if (flags != (kFirst | kLast)) regions.push_back(state);
      if (flags & kLast) regions.insert(regions.end(), {o, l});
      tasks.push_back(task);
    }
    d.finish(tasks, regions, kStrided);
    return d;
  };
  char shape[96];
  snprintf(shape, sizeof shape, "%s heads %d rows %d keys %d", name, heads, rows, kv_rows);
  Side whole = make(kFirst | kLast).side("descriptors", kernel, threads, false);
  pairs("interpretation", std::string("attention ") + shape, whole, wired, count);
  pairs("timeline", std::string("attention ") + shape, make(kFirst | kLast).side("recorded", kernel, threads, true), whole, count);
  Side writes = make(kFirst).side("writes its state", kernel, threads, false);
  pairs("state", std::string("write ") + shape, writes, whole, count);
  pairs("state", std::string("read and write ") + shape, make(0).side("reads and writes its state", kernel, threads, false), whole, count);
  pairs("state", std::string("read ") + shape, make(kLast).side("reads its state", kernel, threads, false), whole, count);
}

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 30;
  const uint64_t bytes = 1ull << 30;
  CHECK(cudaMalloc(&A, 2 * bytes)); CHECK(cudaMalloc(&B, bytes)); CHECK(cudaMalloc(&C, bytes)); CHECK(cudaMalloc(&D, bytes));
  random_bf16(A, bytes, 1);
  random_bf16(B, bytes / 2, 2);
  CHECK(cudaMemset(D, 0, bytes));
  CHECK(cudaMalloc(&words, 4096));
  CHECK(cudaMemset(words, 0, 4096));
  CHECK(cudaHostAlloc(&blocked, kSms * 4 * sizeof(Blocked), cudaHostAllocMapped));
  CHECK(cudaMalloc(&times, kSms * sizeof(CtaTimes)));
  CHECK(cudaMalloc(&stamps, (1 << 18) * sizeof(Stamps)));
  CHECK(cudaMalloc(&stats, kSms * sizeof(CtaStats)));
  CHECK(cudaMalloc(&attention_stats, kSms * sizeof(AttentionStats)));
  gemm(8192, 8192, 8192, count);
  gemm(8192, 8192, 512, count);
  gemm(16384, 16384, 1024, count);
  gemm(8192, 512, 8192, count);
  gemm(16384, 1024, 16384, count);
  gemm(32768, 2048, 32768, count);
  attention("attention_3_plain", attention_3_plain, attend_192, 3, 64, 1536, 1536, count);
  attention("attention_2_overlap_turns", attention_2_overlap_turns, attend_128, 2, 64, 1536, 1536, count);
  attention("attention_3_plain", attention_3_plain, attend_192, 3, 64, 3072, 3072, count);
  attention("attention_2_overlap_turns", attention_2_overlap_turns, attend_128, 2, 64, 3072, 3072, count);
  attention("attention_3_plain", attention_3_plain, attend_192, 3, 64, 768, 768, count);
  return 0;
}

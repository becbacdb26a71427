"""Readings and fits from the raw rows of the runs: make_csv.py RUNS_DIR OUT.csv

RUNS_DIR holds a folder per run (run.sh), named by its number. A reading is taken from the last run that made it.
"""
import csv, math, statistics, sys

import clock_fit
import l2_window

RUNS, OUT = sys.argv[1:3]
clock_fit.RUNS = RUNS
PROFILED = l2_window.profiled(RUNS)

NAMES = {"gemm_w_d": "loop=w drain=deferred", "gemm_p_d": "loop=p drain=deferred", "gemm_w_o": "loop=w drain=overlap", "gemm_p_o": "loop=p drain=overlap",
         "gemm_w_s": "loop=w drain=smem_read", "gemm_p_s": "loop=p drain=smem_read", "gemm_w_v": "loop=w drain=visible", "gemm_p_v": "loop=p drain=visible",
         "gemm_w_o3": "loop=w drain=overlap stages=3 staging=64KiB", "gemm_p_o3": "loop=p drain=overlap stages=3 staging=64KiB",
         "gemm_p_o_nk": "loop=p drain=overlap B=[N,K]", "gemm_w_d_c2": "loop=w drain=deferred cluster=2", "gemm_p_d_c2": "loop=p drain=deferred cluster=2",
         "gemm_w_d_add": "loop=w drain=deferred out=add", "gemm_w_s_add": "loop=w drain=smem_read out=add", "gemm_w_o_c2": "loop=w drain=overlap cluster=2"}
out = []

def add(quantity, conditions, value, unit, notes=""):
    out.append((quantity, conditions, value, unit, notes))

def raw(n):
    return list(csv.reader(open(f"{RUNS}/{n}/raw{n}.csv")))

# --- GEMM: cycles of a tile and its fixed part
fixed = {}
def k_rows(n, only=None):
    d = {}
    for r in raw(n):
        if r[0] == "k" and r[1] in NAMES and (only is None or r[1] in only):
            d.setdefault((r[1], int(r[5]), int(r[4])), []).append((int(r[6]) / int(r[5]), float(r[11]), float(r[13])))
    for (v, c, k), pair in d.items():
        if len(pair) < 2:
            continue
        (tb, mb, fb), (ts, ms, fs) = pair[:2]
        cycles = (mb * fb - ms * fs) / (tb - ts)
        us = (mb - ms) / (tb - ts)
        cond = f"{NAMES[v]} ctas={c} k={k}"
        add("gemm_tile_cycles", cond, f"{cycles:.0f}", "cycles", f"{us:.3f} us at {fb:.0f} MHz; slope between {ts:.0f} and {tb:.0f} tiles per CTA, median of 9")
        fixed.setdefault((v, c), {})[k] = cycles - 16 * k
        add("gemm_first_tile_cycles", cond, f"{ms * fs:.0f}", "cycles")
k_rows(9)
k_rows(6, {v for v in NAMES if v not in ("gemm_w_d", "gemm_p_d")})
k_rows(5, {"gemm_w_s_add"})
k_rows(4, {"gemm_p_o3", "gemm_p_o_nk"})
for (v, c), d in fixed.items():
    mid = [x for k, x in d.items() if 512 <= k <= 8192]
    small = d.get(128)
    if v.endswith("_add"):
        continue  # not a fixed cost: with many CTAs the additions' own rate (about 1.1 TB/s) binds at small k
    add("fit_gemm_fixed_cycles", f"{NAMES[v]} ctas={c}", f"{statistics.median(mid):.0f}", "cycles", "median over k = 512..8192" + (f"; k=128: {small:.0f}" if small is not None else ""))
add("fit_gemm_step_cycles", "any loop, drain, cluster, CTA count 8..132, k 128..16384", "1024", "cycles", "one 128x256x64 step = the tensor cores' own rate (2048 FMA a cycle and SM); no L2 or HBM stall seen, so the droop with many CTAs is the clock alone")

# --- clocks
for r in clock_fit.clocks():
    cond = f"{NAMES[r['variant']]} ctas={r['ctas']} k={r['k']}"
    add("sm_clock_cold", cond, f"{r['early_mhz']:.0f}", "MHz", f"median of the first 25 ms after 400 ms idle; tile {r['early_us']:.3f} us")
    add("sm_clock_sustained", cond, f"{r['late_mhz']:.0f}", "MHz", f"after 350 ms of the same load; tile {r['late_us']:.3f} us ({r['cycles']:.0f} cycles)")
for regime, name in (("early", "cold"), ("late", "sustained")):
    s, rms, worst, n, _ = clock_fit.fit(regime, 1775)
    add(f"fit_sm_clock_{name}", "GEMM only", f"min(1800; {s[0]:.0f} {s[1]:+.2f} * busy {s[2]:+.1f} * writes)", "MHz",
        f"busy = CTAs * 1024 * k_steps / tile cycles; writes = C in TB/s; {n} points, rms {rms:.0f}, worst {worst:.0f} MHz")
for n in (2, 7):
    for r in raw(n):
        if r[0] == "trace":
            add("sm_clock_trace", f"{NAMES[r[1]]} ctas={r[3]} k={r[2]} t={float(r[5]):.0f} ms after idle", f"{float(r[6]):.0f}", "MHz", f"run {n}; tile {r[7]} us")
        if r[0] == "burst":
            add("sm_clock_burst", f"{NAMES[r[1]]} ctas={r[3]} k={r[2]} launch {r[5]} of 10 after 50 ms idle", f"{float(r[6]):.0f}", "MHz", f"run {n}; median of 8 bursts")

# --- against cuBLAS
def paired(n_run, only=None, skip=()):
    for r in raw(n_run):
        if r[0] != "paired" or (only and r[1] not in only) or r[1] in skip:
            continue
        v, m, nn, k, c, g, ours, span, blas, mhz, q, lo, hi, pairs, diff, bad = r[1:]
        flops = 2.0 * int(m) * int(nn) * int(k)
        cond = f"{NAMES[v]} m={m} n={nn} k={k} ctas={c} group_m={g} under load"
        add("gemm_time", cond, ours, "us", f"{flops / float(ours) * 1e-6:.1f} TFLOP/s at {float(mhz):.0f} MHz; cuBLAS beside it {float(blas):.1f} us ({flops / float(blas) * 1e-6:.1f})")
        add("gemm_vs_cublas", cond, f"{float(q):.3f}", "ratio", f"cuBLAS time / ours, median of {pairs} alternating pairs, quartiles {float(lo):.3f} {float(hi):.3f}; cuBLAS 13.1.0 on 132 SMs; outputs differ by {diff} (relative); run {n_run}")
paired(9)
paired(7)
paired(4, {"gemm_p_o", "gemm_p_o_nk"})
paired(3, {"gemm_p_d", "gemm_p_d_c2"})
paired(2, {"gemm_w_o3"})
for r in raw(7):
    if r[0] == "cold":
        v, m, n, k, c, g, ours, blas, mhz, reps = r[1:]
        flops = 2.0 * int(m) * int(n) * int(k)
        add("gemm_time_cold", f"{NAMES[v]} m={m} n={n} k={k} ctas={c} group_m={g} third launch after 60 ms idle", ours, "us",
            f"{flops / float(ours) * 1e-6:.1f} TFLOP/s at {float(mhz):.0f} MHz; cuBLAS likewise {float(blas):.1f} us ({flops / float(blas) * 1e-6:.1f}), ratio {float(blas) / float(ours):.3f}; median of {reps}")

# --- interference
for n in (9, 4):
    for r in raw(n):
        if r[0] == "interference":
            v, k, c, copy, tiles, w, a, ratio, g, alone, fw, fa, reps = r[1:]
            cond = f"{NAMES[v]} k={k} ctas={c} + copy ctas={copy} (bulk 12 x 16 KiB, HBM to HBM, same launch)"
            add("gemm_slowdown_by_copies", cond, ratio, "ratio", f"GEMM time with / without, alternating, median of {reps}; {float(w):.1f} us at {float(fw):.0f} MHz / {float(a):.1f} us at {float(fa):.0f} MHz")
            add("copy_beside_gemm", cond, f"{float(g):.0f}", "GB/s", f"payload; alone on the card {float(alone):.0f}; {float(g) / int(copy):.1f} a CTA at {float(fw):.0f} MHz")

# --- moves (run 4: with clocks; the card ran at 1974 to 1980 MHz)
for r in raw(4):
    if r[0] == "reduce":
        name, inputs, c, g, mhz = r[1], int(r[2]), int(r[3]), float(r[4]), r[5]
        threads = 512 if "t512" in name else 256
        how = f"bulk loads into shared memory, {threads} adding threads" if "bulk" in name else f"16-byte ld/st, {threads} threads"
        add("reduce_throughput", f"inputs={inputs} in_flight={name.split('_')[2]} ctas={c} {how} local HBM", f"{g:.1f}", "GB/s", f"output bytes; HBM moves {inputs + 1} times that ({g * (inputs + 1):.0f}); {g / c:.2f} a CTA; {mhz} MHz")
    if r[0] == "copy":
        name, slots, chunk, c, g, mhz = r[1], r[2], r[3], int(r[4]), float(r[5]), r[6]
        kind = {"serial1_visible": "serial, one chunk: load, wait, store, wait visible", "serial3_read": "serial batches of 3 (store as each lands, then wait smem read)",
                "serial3_visible": "serial batches of 3 (store as each lands, then wait visible)"}.get(name, "pipelined")
        add("copy_throughput", f"mechanism=tma_bulk {kind} slots={slots} chunk_bytes={chunk} ctas={c} local HBM to HBM", f"{g:.1f}", "GB/s", f"payload; {g / c:.2f} a CTA; {mhz} MHz")
    if r[0] == "gather":
        name, slots, row, c, g, mhz = r[1], r[2], r[3], int(r[4]), float(r[5]), r[6]
        add("gather_throughput", f"mechanism=tma_bulk {name} rows_in_flight={slots} row_bytes={row} ctas={c} random rows of 15 GB, local HBM", f"{g:.1f}", "GB/s", f"payload; {g / c:.2f} a CTA; {mhz} MHz")

# --- launches, barriers, flags, gates
for r in raw(1):
    if r[0] == "launch":
        add("launch_cost", r[1], r[2], "us", "1000 launches back to back, median of 9; the host is the limit" if "graph" not in r[1] and "reads" not in r[1] else "")
    if r[0] == "grid_barrier":
        add("grid_barrier", f"ctas={r[1]} 384 threads, red.release + ld.acquire spin, 2000 rounds", r[2], "us", "idle card, 1980 MHz")
for r in raw(5):
    if r[0] == "gap":
        add("launch_gap", f"{r[1]} (132 CTAs x 384 threads, 227 KiB, 112 us each)", r[2], "ns", "last CTA's end of one launch to first CTA's begin of the next main launch, device timer, median of 99 or 59")
for r in raw(4):
    if r[0] == "flag_latency":
        add("flag_one_way_latency", f"st.release.gpu to ld.acquire.gpu spin, two CTAs, {r[3]} other CTAs in GEMM k={r[2]}", r[4], "ns", f"{r[5]} cycles at {r[6]} MHz")
for r in raw(9):
    if r[0] == "gated":
        add("gemm_tile_cycles_gated", f"{NAMES[r[1]]} ctas={r[3]} k={r[2]} loader acquires a raised flag every {r[4]} k steps (0 = never)", r[6], "cycles", f"{r[5]} us; ld.acquire.gpu + fence.proxy.async in the loader thread; 8 tiles a launch, start included")

    if r[0] == "chained":
        add("gemm_tile_cycles_chained", f"{NAMES[r[1]]} ctas={r[3]} k={r[2]} " + ("each tile waits for a flag raised after the CTA's tile before is visible" if r[4] == "1" else "no such flag"), r[6], "cycles", f"{r[5]} us; 8 tiles a launch, start included")

# --- device memory traffic
for name, d in PROFILED:
    v, m, n, k, c, g = name.split(":")
    cond = f"{NAMES[v]} m={m} n={n} k={k} ctas={c} group_m={g}"
    add("gemm_hbm_read", cond, f"{d['dram__bytes_read.sum'] / 1e9:.3f}", "GB", f"ncu dram__bytes_read, caches flushed before; L2 reads {d['lts__t_sectors_op_read.sum'] * 32 / 1e9:.1f} GB; operands once = {(int(m) + int(n)) * int(k) * 2 / 1e9:.3f}")
    add("gemm_hbm_write", cond, f"{d['dram__bytes_write.sum'] / 1e9:.3f}", "GB", f"ncu dram__bytes_write; C is {int(m) * int(n) * 2 / 1e9:.3f}")
best = []
for w in range(2, 61, 2):
    e = 0
    for name, d in PROFILED:
        m, n, k, c, g = map(int, name.split(":")[1:])
        e += abs(math.log(l2_window.reads(m, n, k, c, g, w * 1e6) / d["dram__bytes_read.sum"]))
    best.append((e / len(PROFILED), w))
best.sort()
add("fit_l2_window", "panels in last-used order, tiles of a wave in step (l2_window.py), 22 shapes", f"{best[0][1]}", "MB", f"mean |ln(model / read)| {best[0][0]:.3f}; next " + ", ".join(f"{w} MB {e:.3f}" for e, w in best[1:4]))

# --- attention
A = {"attention_2_overlap_turns": "128 query rows, 2 consumers, scores overlap softmax, consumers take turns", "attention_2_overlap": "128 query rows, 2 consumers, scores overlap softmax",
     "attention_2_plain": "128 query rows, 2 consumers, no overlap inside a consumer", "attention_3_plain": "192 query rows, 3 consumers, no overlap inside a consumer"}
steps = {}
for n in (3, 5):
    for r in csv.reader(open(f"{RUNS}/{n}/attention.csv")):
        name, s, heads, who, us, tf, ns, cyc, mhz, ratio, err = r
        cond = f"{A[name]}, kv block 128, head dim 128, seq={s} heads x batch={heads}"
        if who == name and (n == 5 or s == "16384"):
            add("attention_time", cond + " ctas=132", us, "us", f"{tf} TFLOP/s; error against f32 {err}")
            add("attention_step_cycles", cond + " ctas=132", cyc, "cycles", f"per KV step and CTA, task costs included; {ns} ns at {mhz} MHz")
            add("attention_vs_torch", cond + " ctas=132", ratio, "ratio", "best torch time (cuDNN) / ours, alternating, under load; torch 2.11.0+cu130")
        elif who.startswith("ctas=") and n == 5:
            add("attention_step_cycles", cond + " " + who, cyc, "cycles", f"per KV step and CTA, task costs included; {ns} ns at {mhz} MHz")
            if who == "ctas=128":
                steps.setdefault(name, {})[int(s) // 128] = float(cyc) * (int(s) // 128)
        elif who in ("flash", "cudnn") and n == 5:
            add("attention_torch", f"scaled_dot_product_attention backend={who} seq={s} heads x batch={heads} beside {name}", us, "us", f"{tf} TFLOP/s")
for name, d in steps.items():
    slope = (d[96] - d[48]) / 48
    add("fit_attention_step_cycles", A[name], f"{slope:.0f}", "cycles", f"slope between 48 and 96 KV steps a task, 128 CTAs; tensor cores alone need {1024 * (3 if '3_' in name else 2)}")
    add("fit_attention_task_cycles", A[name], f"{d[48] - 48 * slope:.0f}", "cycles", f"what a task costs beyond its steps (query load, softmax tail, output); at 12 steps {d[12] - 12 * slope:.0f}")

with open(OUT, "w", newline="") as f:
    f.write("# one NVIDIA H200 (132 SMs, 60 MB L2, max 1980 MHz, 700 W), driver 580.159.04, CUDA 13.0.88, cuBLAS 13.1.0, virtual machine, 2026-11-29\n")
    f.write("# made by kernels/cuda/bench/make_csv.py; random bf16 inputs (GEMM uniform in [-1, 1), attention normal). Values: GEMM against cuBLAS (paired rows: each; the sweeps: soak runs of the same binary in the same call), attention against f32 and cuDNN, reduce against f64, outputs poisoned; copies and gathers were timed only\n")
    f.write("# GEMM: persistent, tile 128x256x64, 2 consumer warpgroups (wgmma m64n256k16) + 1 producer, 4 stages, B=[K,N] row-major unless said otherwise; static stride\n")
    f.write("# loop=w: wgmma waited at every k step; loop=p: one group kept in flight. Cycles are SM cycles (clock64), times come from globaltimer (32 ns) or events\n")
    f.write("# clocks: MHz = clock64 / globaltimer of the CTAs themselves; nvidia-smi shows about 8 % more under tensor load. Times move with the clock, cycles do not\n")
    f.write("# gemm_tile_cycles: slope between few and many tiles per CTA; less 1024 cycles per k step of 64 it is what fill and drain cost that nothing hides. gemm_first_tile_cycles: a launch with one tile per CTA (barrier init, cold fill, steps, drain to visibility)\n")
    f.write("# left out: gemm_tile_fixed_cycles (gemm_tile_cycles - 16 * k) and a variant whose consumers ran a k step or two apart (no gain; 324 readings)\n")
    w = csv.writer(f, lineterminator="\n")
    w.writerow(["quantity", "conditions", "value", "unit", "notes"])
    w.writerows(out)
print(len(out), "rows")

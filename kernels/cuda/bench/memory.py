"""What HBM traffic costs, and how much of it the operands of GEMM tiles make: rows of run 10, and the fits on them.

memory.py rows DIR ...  rows of runs 10 in these folders, as data/measured/h200-hbm-*.csv holds them
memory.py               fits on data/measured: hbm_gbs, hbm_write_bytes_per_byte, l2_drift_hits and the five values of power
"""
import csv
import math
import re
import sys
from pathlib import Path

from clock_fit import lstsq
from l2_window import reads

DATA = Path(__file__).resolve().parents[3] / "data" / "measured"
DRAIN = {"gemm_w_s": "smem_read", "gemm_w_d": "deferred"}
FULL_MHZ, SM_TFLOPS, WINDOW = 1800, 7.3728, 16 << 20


def shape_words(variant, m, n, k, ctas, group):
    return f"loop=w drain={DRAIN[variant]} m={m} n={n} k={k} ctas={ctas} group_m={group}"


def write_rows(folders):
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(("quantity", "conditions", "value", "unit", "notes"))
    for folder in folders:
        for r in csv.reader(open(f"{folder}/raw10.csv")):
            if r[0] == "mix":
                every, ctas, read, write = int(r[1]), r[2], float(r[3]), float(r[4])
                what = "writes" if every == 0 else "reads" if every > 1000 else f"1 write in {every} reads"
                out.writerow(("hbm_mix", f"{what} ctas={ctas}", f"{read + write:.1f}", "GB/s", f"reads {read:.1f}, writes {write:.1f}; {r[5]} MHz; median of 15"))
            elif r[0] == "sustained":
                out.writerow(("gemm_clock_sustained", shape_words(r[1], *r[2:6], r[7]), r[13], "MHz", f"after 400 ms of it; {r[9]} us, median of {r[15]}"))
            elif r[0] == "cold":
                out.writerow(("gemm_clock_cold", shape_words(*r[1:7]), r[9], "MHz", f"third launch after 60 ms idle; {r[7]} us, median of {r[10]}"))
        counted = {}
        for r in csv.DictReader(line for line in open(f"{folder}/ncu.csv") if line.startswith('"')):
            counted.setdefault(int(r["ID"]), {})[r["Metric Name"]] = float(r["Metric Value"].replace(",", ""))
        for name, d in zip(open(f"{folder}/profiled.txt").read().split(), (counted[i] for i in sorted(counted))):
            words = shape_words(*name.split(":"))
            out.writerow(("gemm_hbm_read", words, f"{d['dram__bytes_read.sum'] / 1e9:.3f}", "GB", "ncu dram__bytes_read, caches flushed before"))
            out.writerow(("gemm_hbm_write", words, f"{d['dram__bytes_write.sum'] / 1e9:.3f}", "GB", "ncu dram__bytes_write"))


def measured(name, *quantities):
    found = []
    for r in csv.reader(line for line in open(next(DATA.glob(name))) if not line.startswith("#")):
        if r[0] in quantities:
            found.append((r[0], dict(w.split("=") for w in r[1].split() if "=" in w), r[1], float(r[2]), r[4]))
    return found


def mix():
    rows = []
    for _, words, conditions, total, notes in measured("h200-hbm-*.csv", "hbm_mix"):
        if words["ctas"] == "132" and not conditions.startswith("writes"):
            rows.append(tuple(map(float, re.search(r"reads ([\d.]+), writes ([\d.]+)", notes).groups())))
    best = min((sum(math.log((r + w * f) / 1e3 / c) ** 2 for r, w in rows), c, f)
               for c in (4.3 + 0.01 * i for i in range(50)) for f in (1 + 0.01 * i for i in range(60)))
    worst = max(abs((r + w * best[2]) / 1e3 / best[1] - 1) for r, w in rows)
    print(f"hbm_gbs {best[1] * 1e3:.0f}, hbm_write_bytes_per_byte {best[2]:.2f}: {len(rows)} mixes, worst {worst:.1%}")


def profiled():
    found = {}
    for name in ("h200-calibration-*.csv", "h200-hbm-*.csv"):
        for _, w, _, gb, _ in measured(name, "gemm_hbm_read"):
            found.setdefault(tuple(int(w[x]) for x in ("m", "n", "k", "ctas", "group_m")), []).append(gb)
    return found


def drift():
    found = profiled()
    print("\nHBM reads of GEMMs, GB: m n k ctas group_m; profiled; window alone; with drift_hits = 0.3")
    for hits in (0, 0.3):
        errors = [abs(math.log(reads(*s, WINDOW, hits) / 1e9 / gb)) for s, all_gb in found.items() for gb in all_gb if gb > 0.1]
        print(f"l2_drift_hits {hits}: {len(errors)} profiles above 0.1 GB, mean |ln(model / read)| {sum(errors) / len(errors):.3f}")
    for s, all_gb in sorted(found.items()):
        print(*s, "|", *all_gb, "|", *(f"{reads(*s, WINDOW, hits) / 1e9:.2f}" for hits in (0, 0.3)))


def clocks(regime):
    """(tile FLOP/s, HBM traffic, full clock / clock) of runs at the sustained or cold clock, in T/s: of the calibration with the
    window's traffic, and of run 10 with the profiled one."""
    modelled, counted = [], []
    for _, w, conditions, mhz, notes in measured("h200-calibration-*.csv", f"sm_clock_{regime}"):
        if "cluster" in conditions:
            continue
        k, ctas, us = int(w["k"]), int(w["ctas"]), float(re.search(r"tile ([\d.]+) us", notes)[1])
        each = max(1, min(int(600 / (k / 64 * 0.62 + 1.5)), 8192 // ctas))
        read = reads(16384, 16384, k, ctas, 16, WINDOW, 0, ctas * each) / each
        modelled.append((2 * 128 * 256 * k * ctas / us * 1e-6, (read + ctas * 65536) / us * 1e-6, FULL_MHZ / mhz))
    total = {}
    for name in ("gemm_hbm_read", "gemm_hbm_write"):
        for _, w, _, gb, _ in measured("h200-hbm-*.csv", name):
            total.setdefault((tuple(int(w[x]) for x in ("m", "n", "k", "ctas", "group_m")), w["drain"]), []).append(gb)
    for _, w, _, mhz, notes in measured("h200-hbm-*.csv", f"gemm_clock_{regime}"):
        shape = tuple(int(w[x]) for x in ("m", "n", "k", "ctas", "group_m"))
        gb = total.get((shape, w["drain"])) or total.get((shape, "smem_read"))
        us = float(re.search(r"([\d.]+) us", notes)[1])
        if gb:
            counted.append((2 * shape[0] * shape[1] * shape[2] / us * 1e-6, sum(gb[:2]) * 1e-3 / us * 1e6, FULL_MHZ / mhz))
    return modelled, counted


def power():
    """slowdown = (static + (TFLOP/s + power x TB/s) x slowdown) / (static + knee), where the clock droops."""
    print()
    for regime in ("sustained", "cold"):
        sets = dict(zip(("calibration", "run 10"), clocks(regime)))
        for name, rows in sets.items():
            droops = [r for r in rows if r[2] > 1.03]
            a, b, c = lstsq([(1, f * s, t * s) for f, t, s in droops], [s for *_, s in droops])
            print(f"{regime} clock, {name}: {len(droops)} rows, static {a / b:.0f}, knee {(1 - a) / b:.0f}, power {c / b:.0f} FLOP/B")
        fixed = 94
        droops = [r for r in sets["calibration"] if r[2] > 1.03]
        a, b = lstsq([(1, (f + fixed * t) * s) for f, t, s in droops], [s for *_, s in droops])
        for name, rows in sets.items():
            off = [max(1, a + b * (f + fixed * t) * s) / s - 1 for f, t, s in rows]
            rms = math.sqrt(sum(x * x for x in off) / len(off))
            print(f"  with {fixed} FLOP/B static {a / b:.0f}, knee {(1 - a) / b:.0f}; on {name}: mean {sum(off) / len(off):+.1%}, rms {rms:.1%}, worst {max(off, key=abs):+.1%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        write_rows(sys.argv[2:])
    else:
        mix()
        drift()
        power()

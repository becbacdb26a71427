"""Error of predictions beside the rows measured on two H200, from their CSVs and a tilewire binary.

Usage: python3 .ci/two_gpus.py path/to/tilewire
"""
import csv
import math
import subprocess
import sys
import tempfile

FIRST = "data/measured/nvlink-gemm-family-1x2-2026-11-29.csv"
THIRD = "data/measured/nvlink-judged-1x2-2026-11-30.csv"
JUDGED = "data/measured/nvlink-judged-1x2-run4-2026-11-30.csv"
UNFUSED = "data/measured/nvlink-unfused-1x2-2026-11-30.csv"
EMULATED = "data/measured/nvlink-emulated-{}-2x1-2026-11-30.csv"
FIT = "data/measured/nvlink-fit-1x2-2026-11-29.csv"
PROCESSES = "data/measured/nvlink-processes-1x2-2026-11-30.csv"
SIZES = ("m", "n", "k", "tokens", "hidden", "inter", "topk", "experts", "seq", "batch", "heads", "head_dim")


def read(path):
    with open(path) as file:
        return list(csv.DictReader(text for text in file if not text.startswith("#")))


def quantile(values, share):
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def percent(value):
    return f"{100 * value:.1f}%"


def line(name, errors, cost=""):
    median, p95 = (percent(math.expm1(quantile(errors, share))) for share in (0.5, 0.95))
    print(f"| {name} | {len(errors)} | {median} | {p95} | {cost} |")


def off(predicted, row):
    return abs(math.log(float(predicted) / float(row["time_us"])))


def shape(row):
    return ";".join(f"{name}={row[name]}" for name in SIZES if row.get(name))


def by_shape(rows):
    shapes = {}
    for row in rows:
        shapes.setdefault((row["kernel"], shape(row)), []).append(row)
    return shapes


def split_cost(rows, column):
    """What the split that `column` recommends costs beyond the best measured one: median and worst over shapes."""
    time = lambda row: float(row["time_us"])
    costs = [time(min(of, key=lambda row: float(row[column]))) / min(map(time, of)) - 1 for of in by_shape(rows).values()]
    return f"{percent(quantile(costs, 0.5))}, {percent(max(costs))}"


def now(path):
    """What this version predicts of the rows that `measure` wrote."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.argv[1], "compare", path, "-o", out], check=True, capture_output=True)
        return read(f"{out}/pairs.csv")


old = read(FIRST)
print("| predictions | rows | median | 95th percentile | recommended split costs, median and worst over shapes |")
print("|---|---|---|---|---|")
line("first run, predicted before it", [off(row["predicted_before_us"], row) for row in old if row["run"] == "1"])
line("second run, predicted before it", [off(row["predicted_before_us"], row) for row in old if row["run"] == "2"])
before = "predicted_before_us"
third, judged = read(THIRD), read(JUDGED)
for name, run in (("third", third), ("fourth", judged)):
    line(f"{name} run, predicted before it", [off(row[before], row) for row in run], split_cost(run, before))
for kernel in sorted({row["kernel"] for row in judged}):
    rows = [row for row in judged if row["kernel"] == kernel]
    line(f"of these {kernel}", [off(row[before], row) for row in rows], split_cost(rows, before))
pairs = now(JUDGED)
column = "predicted_time_us"
line("fourth run, predicted now", [off(row[column], row) for row in pairs], split_cost(pairs, column))
for fabric in ("ib", "efa"):
    rows = read(EMULATED.format(fabric))
    line(f"two emulated nodes, {fabric}, predicted before it", [off(row[before], row) for row in rows], split_cost(rows, before))

threads = {row["schedule_hash"]: float(row["time_us"]) for row in read(FIT) + third}
ratios = sorted(float(row["time_us"]) / threads[row["schedule_hash"]] for row in read(PROCESSES))
print()
print(f"A process per GPU over a thread per GPU, {len(ratios)} points: {quantile(ratios, 0.5):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")

print()
print("| kernel | unfused | shapes | unfused over fused | predicted before | off, median |")
print("|---|---|---|---|---|---|")
best = lambda rows, column: min(float(row[column]) for row in rows)
ratios = {}
for form in read(UNFUSED):
    rows = by_shape(judged)[form["kernel"], form["shape"]]
    measured = float(form["time_us"]) / best(rows, "time_us")
    predicted = float(form[before]) / best(rows, before) if form[before] else None
    ratios.setdefault((form["kernel"], form["system"]), []).append((measured, predicted))
for (kernel, system), pairs in ratios.items():
    measured, predicted = zip(*pairs)
    text = f"{min(measured):.2f} to {max(measured):.2f}"
    known = None not in predicted
    foreseen = f"{min(predicted):.2f} to {max(predicted):.2f}" if known else "-"
    error = percent(quantile([abs(p / m - 1) for m, p in pairs], 0.5)) if known else "-"
    print(f"| {kernel} | {system} | {len(pairs)} | {text} | {foreseen} | {error} |")

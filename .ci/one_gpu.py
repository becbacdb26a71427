"""Errors of the predictions that were written down before the judged rows of one H200 were measured, for the README."""

import csv
import math
from pathlib import Path

DATA = Path(__file__).parent.parent / "data" / "measured"


def rows(name):
    with open(DATA / name, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


before = {row["schedule_hash"]: row for row in rows("h200-mirror-predicted-2026-11-30.csv")}
measured = rows("h200-mirror-judged-2026-11-30.csv")
errors = sorted(
    math.exp(abs(math.log(float(before[row["schedule_hash"]]["time_us"]) / float(row["time_us"])))) - 1 for row in measured
)


def quantile(share):
    return errors[max(math.ceil(len(errors) * share), 1) - 1]


shapes = {}
for row in measured:
    shape = tuple(row[name] for name in ("kernel", "m", "n", "k", "tokens", "hidden", "seq", "batch"))
    shapes.setdefault(shape, []).append((float(before[row["schedule_hash"]]["time_us"]), float(row["time_us"])))
costs = sorted(min(pairs)[1] / min(time for _, time in pairs) - 1 for pairs in shapes.values())
cost = costs[math.ceil(len(costs) / 2) - 1]
print(f"| predicted before the run | {len(shapes)} | {len(errors)} | {quantile(0.5):.1%} | {quantile(0.95):.1%} | {cost:.1%} |")

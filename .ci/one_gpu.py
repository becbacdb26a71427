"""What was predicted before rows of one H200 were measured: errors of the judged rows, what opening chunks earlier gains, and
what it costs to let compute and communication take turns. For the README."""

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

# A lead of the stores that open chunks, in tiles: measured us, and predicted before.
leads = {}
for row in rows("h200-leads-2026-11-30.csv"):
    lead = int(dict(option.split("=") for option in row["options"].split(";"))["open_lead_tiles"])
    times = f"{float(row['time_us']):.0f} ({float(before[row['schedule_hash']]['time_us']):.0f})"
    leads.setdefault((row["kernel"], int(row["compute"])), {})[lead] = times
for (kernel, ctas), times in sorted(leads.items()):
    print(f"| {kernel} | {ctas} | {' | '.join(text for _, text in sorted(times.items()))} |")

# The best split of each form, measured and predicted before.
before = {row["schedule_hash"]: float(row["time_us"]) for row in rows("h200-phases-predicted-2026-11-30.csv")}
best = {}
for row in rows("h200-phases-2026-11-30.csv"):
    shape = tuple(row[name] for name in ("kernel", "m", "n", "k", "tokens", "hidden", "seq", "batch"))
    form = best.setdefault(shape, {}).setdefault(row["form"], [math.inf, math.inf])
    form[0] = min(form[0], float(row["time_us"]))
    form[1] = min(form[1], before[row["schedule_hash"]])
gains = {}
for shape, forms in best.items():
    turns, fused = forms["bulk_synchronous"], forms["fused"]
    gains.setdefault(shape[0], []).append([turns[side] / fused[side] - 1 for side in (0, 1)])
for kernel, shapes in sorted(gains.items()):
    spans = [f"{min(s[side] for s in shapes):.0%} to {max(s[side] for s in shapes):.0%}" for side in (0, 1)]
    same = sum((s[0] > 0) == (s[1] > 0) for s in shapes)
    print(f"| {kernel} | {len(shapes)} | {spans[0]} | {spans[1]} | {same} |")

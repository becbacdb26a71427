"""Error of predictions beside the rows measured on two H200, from their CSV and a tilewire binary.

Usage: python3 .ci/two_gpus.py path/to/tilewire
"""
import csv
import json
import math
import subprocess
import sys

FILE = "data/measured/nvlink-gemm-family-1x2-2026-11-29.csv"


def quantile(values, share):
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def line(name, errors):
    median, p95 = (f"{100 * math.expm1(quantile(errors, share)):.1f}%" for share in (0.5, 0.95))
    print(f"| {name} | {len(errors)} | {median} | {p95} |")


def off(predicted, row):
    return abs(math.log(float(predicted) / float(row["time_us"])))


def predict(row):
    split = ",".join(f"{role}={row[role]}" for role in ("compute", "intra", "send", "reduce"))
    command = [sys.argv[1], "predict", "--kernel", row["kernel"], "--cluster", "1x2-h200-nvlink", "--clock", row["clock"]]
    command += ["--m", row["m"], "--n", row["n"], "--k", row["k"], "--split", split, "--json"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert answer["schedule_hash"] == row["schedule_hash"], row
    return answer["time_us"]


with open(FILE) as file:
    rows = list(csv.DictReader(text for text in file if not text.startswith("#")))
second = [row for row in rows if row["run"] == "2"]
line("first run, predicted before it", [off(row["predicted_before_us"], row) for row in rows if row["run"] == "1"])
line("second run, predicted before it", [off(row["predicted_before_us"], row) for row in second])
line("second run, predicted now, rows that fit", [off(predict(row), row) for row in second if row["fitted_on"] == "yes"])
line("second run, predicted now, other rows", [off(predict(row), row) for row in second if row["fitted_on"] == "no"])

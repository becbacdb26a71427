"""Fits machine files to rows that `tilewire measure` wrote with a GPU per rank; prints what it found.

Usage: python3 .ci/fit_two_gpus.py path/to/tilewire            h200-nvlink, the rows of nvlink-fit-1x2
       python3 .ci/fit_two_gpus.py path/to/tilewire emulated   the proxy of the emulated machines

Coordinate search over grids, two rounds, from fixed starts. The loss is the mean over shapes of the mean error and 0.3 times
the worst, so that every shape counts alike. Some values trade against others: a later model finds another set that is as
good, and a value at a grid's end is as good as the rows can say, not more.
"""
import csv
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

NVLINK = {
    "interpreter.lane_gbs": [25.0, 27.0, 29.0, 31.0],
    "sm.copy_cta_gbs": [36.0, 38.0, 40.0, 43.0, 49.9],
    "interpreter.copy_ns": [0.0, 250.0, 500.0, 750.0, 1000.0],
    "interpreter.claim_ns": [0.0, 500.0, 1000.0, 2000.0],
    "interpreter.step_flag_ns": [150.0, 200.0, 250.0, 300.0, 350.0],
    "attention.pipelined.block_ns": [2000.0, 2603.0, 3200.0, 4000.0],
    "interpreter.attention_power": [0.7, 0.83, 1.0],
    "interpreter.raise_ns": [0.0, 500.0, 1170.0],
    "interpreter.crowd_ns": [6.0, 9.0, 12.0, 15.0, 20.0],
    "interpreter.store_visible_ns": [0.0, 318.2, 600.0, 900.0],
    "nvlink.egress_gbs": [330.0, 340.0, 350.0, 358.2],
    "interpreter.task_ns": [800.0, 1000.0, 1270.0, 1500.0],
    "interpreter.gather_row_ns": [600.0, 610.0, 620.0, 630.0],
}
NVLINK_START = {
    "interpreter.lane_gbs": 27.0,
    "interpreter.copy_ns": 500.0,
    "interpreter.claim_ns": 0.0,
    "interpreter.step_flag_ns": 250.0,
    "attention.pipelined.block_ns": 2603.0,
    "interpreter.attention_power": 1.0,
    "interpreter.raise_ns": 0.0,
    "interpreter.crowd_ns": 12.0,
    "interpreter.store_visible_ns": 900.0,
    "nvlink.egress_gbs": 358.2,
    "interpreter.task_ns": 1270.0,
    "interpreter.gather_row_ns": 630.0,
}
EMULATED = {"proxy.post_ns": [6000.0, 7000.0, 7500.0, 8000.0, 8500.0, 9682.0], "proxy.completion_ns": [0.0, 500.0, 1000.0]}
EMULATED_START = {"proxy.post_ns": 9682.0, "proxy.completion_ns": 1000.0}
SIZES = ("m", "n", "k", "tokens", "hidden", "inter", "topk", "experts", "seq", "batch", "heads")


def with_values(text, values):
    """A machine file's text with other values."""
    section, lines, left = "", [], dict(values)
    for line in text.splitlines():
        if match := re.match(r"\[(.+)\]", line):
            section = match[1]
        match = re.match(r"(\w+) = \{ value = ([^,]+),", line)
        if match and (value := left.pop(f"{section}.{match[1]}", None)) is not None:
            line = line.replace(f"value = {match[2]},", f"value = {value!r},", 1)
        lines.append(line)
    assert not left, left
    return "\n".join(lines) + "\n"


class Fit:
    """Rows by machine, and a copy of the data to try values in."""

    def __init__(self, out, rows):
        self.out, self.files = out, {}
        shutil.copytree("data", f"{out}/data")
        for machine in sorted({row["machine"] for row in rows}):
            self.files[machine] = f"{out}/{machine}.csv"
            with open(self.files[machine], "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(row for row in rows if row["machine"] == machine)

    def errors(self, values):
        errors = {}
        for machine, file in self.files.items():
            with open(f"data/machines/{machine}.toml") as known:
                text = with_values(known.read(), values)
            with open(f"{self.out}/data/machines/{machine}.toml", "w") as tried:
                tried.write(text)
            command = [sys.argv[1], "compare", file, "--data", f"{self.out}/data", "-o", f"{self.out}/compare"]
            subprocess.run(command, check=True, capture_output=True)
            with open(f"{self.out}/compare/pairs.csv") as pairs:
                for row in csv.DictReader(pairs):
                    off = abs(math.log(float(row["predicted_time_us"]) / float(row["time_us"])))
                    errors.setdefault((machine, row["kernel"], *(row[size] for size in SIZES)), []).append(off)
        return errors

    def loss(self, values):
        return statistics.mean(statistics.mean(of) + 0.3 * max(of) for of in self.errors(values).values())

    def search(self, grid, start):
        best, least = dict(start), self.loss(start)
        for _ in range(2):
            for name, values in grid.items():
                for value in values:
                    if best[name] != value and (loss := self.loss({**best, name: value})) < least - 1e-5:
                        best, least = {**best, name: value}, loss
        return best


def main():
    emulated = sys.argv[2:] == ["emulated"]
    name = "nvlink-emulated-fit-2x1-2026-11-29" if emulated else "nvlink-fit-1x2-2026-11-29"
    grid, start = (EMULATED, EMULATED_START) if emulated else (NVLINK, NVLINK_START)
    with open(f"data/measured/{name}.csv") as file:
        rows = list(csv.DictReader(file))
    with tempfile.TemporaryDirectory() as out:
        fit = Fit(out, rows)
        best = fit.search(grid, start)
        all_errors = sorted(error for of in fit.errors(best).values() for error in of)
    for name, value in best.items():
        print(f"{name} = {value:g}{' (end of its grid)' if value in (grid[name][0], grid[name][-1]) else ''}")
    print(f"{len(all_errors)} rows, median error {100 * math.expm1(all_errors[len(all_errors) // 2]):.1f} %")


if __name__ == "__main__":
    sys.argv[1] = os.path.abspath(sys.argv[1])
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    main()

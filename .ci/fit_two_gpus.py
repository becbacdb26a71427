"""Makes the machine files of GPUs behind NVLink: what the device code costs as on one GPU, four values fitted.

Usage: python3 .ci/fit_two_gpus.py path/to/tilewire           fails where a file says something else
       python3 .ci/fit_two_gpus.py path/to/tilewire --write   writes the files

The sections that tell what the interpreter and its tiles cost are those of h200-1gpu, which knows no row of two GPUs. Two
values of them, and two of the emulated machines' proxy, are searched over grids. The loss is the mean over shapes of the mean
error and 0.3 times the worst, so that every shape counts alike.
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

MACHINES = ["h200-nvlink", "h200-emulated-ib", "h200-emulated-efa"]
CARRIED = ("interpreter.", "gemm.pipelined.", "attention.pipelined.", "sm.copy_cta_gbs", "sm.merge_cta_gbs")
INTERPRETER = {
    "interpreter.copy_ns": [0.0, 250.0, 500.0, 750.0, 1000.0, 1250.0],
    "interpreter.crowd_ns": [0.0, 3.0, 6.0, 9.0, 12.0, 15.0],
}
PROXY = {"proxy.post_ns": [6000.0, 7000.0, 7500.0, 8000.0, 8500.0, 9682.0], "proxy.completion_ns": [0.0, 500.0, 1000.0]}
INTERPRETER_ROWS = "data/measured/nvlink-fit-1x2-2026-11-30.csv"
PROXY_ROWS = "data/measured/nvlink-emulated-fit-2x1-2026-11-29.csv"
SIZES = ("m", "n", "k", "tokens", "hidden", "inter", "topk", "experts", "seq", "batch", "heads")


def lines(machine):
    """Lines of a machine file with the parameters that they set, if any."""
    section, found = "", []
    with open(f"data/machines/{machine}.toml") as file:
        for line in file.read().splitlines():
            if match := re.match(r"\[(.+)\]", line):
                section = match[1]
            match = re.match(r"(\w+) = \{", line)
            found.append((match and f"{section}.{match[1]}", line))
    return found


def text(machine, values):
    """A machine file with what h200-1gpu knows and other values: name to value, source and date."""
    one, made = dict(lines("h200-1gpu")), []
    for name, line in lines(machine):
        if name and name.startswith(CARRIED):
            line = one[name].replace('", date = ', '; as h200-1gpu", date = ', 1)
        if name in values:
            value, source, date = values[name]
            line = f'{name.rpartition(".")[2]} = {{ value = {value}, kind = "derived", source = "{source}", date = "{date}" }}'
        made.append(line)
    return "\n".join(made) + "\n"


def search(tilewire, rows, grid, known):
    """The least loss over a grid: values by name, and the median error."""
    with open(rows) as file:
        reader = csv.DictReader(file)
        by_machine = {}
        for row in reader:
            by_machine.setdefault(row["machine"], []).append(row)
    with tempfile.TemporaryDirectory() as out:
        shutil.copytree("data", f"{out}/data")
        for machine, of in by_machine.items():
            with open(f"{out}/{machine}.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, reader.fieldnames)
                writer.writeheader()
                writer.writerows(of)

        def errors(values):
            found = {}
            for machine in by_machine:
                with open(f"{out}/data/machines/{machine}.toml", "w") as file:
                    file.write(text(machine, known | {name: (value, "tried", "2026-01-01") for name, value in values.items()}))
                command = [tilewire, "compare", f"{out}/{machine}.csv", "--data", f"{out}/data", "-o", f"{out}/compare"]
                subprocess.run(command, check=True, capture_output=True)
                with open(f"{out}/compare/pairs.csv") as pairs:
                    for row in csv.DictReader(pairs):
                        off = abs(math.log(float(row["predicted_time_us"]) / float(row["time_us"])))
                        found.setdefault((machine, row["kernel"], *(row[size] for size in SIZES)), []).append(off)
            return found

        def loss(values):
            return statistics.mean(statistics.mean(of) + 0.3 * max(of) for of in errors(values).values())

        best = {name: values[0] for name, values in grid.items()}
        least = loss(best)
        for _ in range(2):
            for name, values in grid.items():
                for value in values:
                    if best[name] != value and (tried := loss({**best, name: value})) < least - 1e-5:
                        best, least = {**best, name: value}, tried
        return best, statistics.median(error for of in errors(best).values() for error in of)


def main():
    tilewire, write = sys.argv[1], sys.argv[2:] == ["--write"]
    known = {}
    for rows, grid, machines in ((INTERPRETER_ROWS, INTERPRETER, MACHINES), (PROXY_ROWS, PROXY, MACHINES[1:])):
        best, error = search(tilewire, rows, grid, known)
        for name, value in best.items():
            source = (
                f"{rows}: of {', '.join(f'{tried:g}' for tried in grid[name])} the one with the least error, "
                f"{100 * math.expm1(error):.1f} % in the median (.ci/fit_two_gpus.py)"
            )
            known[name] = (value, source, re.search(r"\d{4}-\d\d-\d\d", rows)[0])
            print(f"{name} = {value:g}: {source}")
    stale = []
    for machine in MACHINES:
        made = text(machine, {name: value for name, value in known.items() if machine != "h200-nvlink" or name in INTERPRETER})
        with open(f"data/machines/{machine}.toml") as file:
            if file.read() != made:
                stale.append(machine)
        if write:
            with open(f"data/machines/{machine}.toml", "w") as file:
                file.write(made)
    if stale and not write:
        sys.exit(f"{', '.join(stale)}: not what these rows and h200-1gpu give; run this with --write")


if __name__ == "__main__":
    sys.argv[1] = os.path.abspath(sys.argv[1])
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    main()

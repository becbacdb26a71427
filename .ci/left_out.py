"""Prints data/published/left_out.csv, fused kernels only, as the rows of the README's table."""

import csv

with open("data/published/left_out.csv") as file:
    errors = {
        (row["kernel"], row["topology"], row["left_out"]): float(row["error"])
        for row in csv.DictReader(file)
        if row["system"] == "mKernel"
    }
for kernel, topology in sorted({key[:2] for key in errors}):
    fabric = topology.rsplit("-", 1)[1]
    cells = [
        f"{errors[kernel, topology, left_out]:.1%}"
        for left_out in (f"fabric={fabric}", f"fabric={fabric} and its host", f"kernel={kernel}")
    ]
    print("| " + " | ".join([kernel, fabric, *cells]) + " |")

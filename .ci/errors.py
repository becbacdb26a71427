"""Prints errors.csv as the rows of the README's table."""

import csv
import sys

for row in csv.DictReader(line for line in open(sys.argv[1]) if not line.startswith("#")):
    cells = [
        row["kernel"],
        row["topology"].removeprefix("2x8-h200-"),
        row["system"],
        row["rows"],
        f"{float(row['error']):.1%}",
        f"{float(row['test_error']):.1%}" if int(row["test_rows"]) else "-",
        f"{row['worst_size']}: {float(row['worst_error']):.0%}",
    ]
    print("| " + " | ".join(cells) + " |")

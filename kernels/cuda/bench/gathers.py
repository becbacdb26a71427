"""Gathers by boxes: the rows of run 11, and the fits on them.

gathers.py rows DIR  rows of run 11 in this folder, as data/measured/h200-gathers-*.csv holds them
gathers.py           sm.box_ns and sm.box_power_flop from data/measured
"""
import csv
import re
import statistics
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parents[3] / "data" / "measured"
FULL_MHZ, KNEE_TFLOPS, STATIC_TFLOPS = 1800, 533, 939  # gpu.droop_*
LANES, BOXES = 16, 28


def write_rows(folder):
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(("quantity", "conditions", "value", "unit", "notes"))
    for r in csv.reader(open(f"{folder}/raw11.csv")):
        if r[0] != "gather_slice":
            continue
        boxes, ctas, compute, slice_us, alone_mhz, tile_us, mhz = r[1:]
        how = f"boxes_a_row={boxes} ctas={ctas}" if ctas != "0" else "nothing"
        if compute == "0":
            out.writerow(("gather_slice", how + " alone", slice_us, "us", f"{alone_mhz} MHz; median over CTAs of 11 launches of 64 slices"))
            continue
        beside = f"beside GEMM tiles of k=7168 on {compute} CTAs"
        if ctas != "0":
            out.writerow(("gather_slice", f"{how} {beside}", slice_us, "us", "between 250 and 450 ms of it"))
        out.writerow(("gemm_tile", f"k=7168 ctas={compute} beside {how}", tile_us, "us", f"{mhz} MHz; between 250 and 450 ms of it"))


def measured():
    found = []
    for r in csv.reader(open(next(DATA.glob("h200-gathers-*.csv")))):
        words = dict(w.split("=") for w in r[1].split() if "=" in w)
        mhz = re.match(r"(\d+) MHz", r[4])
        found.append((r[0], words, r[1], r[2], float(mhz[1]) if mhz else None))
    return found


def fits():
    rows = measured()
    cycles = {(int(w["boxes_a_row"]), int(w["ctas"])): float(us) * mhz
              for quantity, w, how, us, mhz in rows if quantity == "gather_slice" and how.endswith("alone")}
    more = [(cycles[28, ctas] - cycles[few, ctas]) / (2 * LANES * (28 - few)) for ctas in (32, 44, 132) for few in (14, 7)]
    box_ns = statistics.median(more) / FULL_MHZ * 1e3
    print(f"{min(more):.1f} to {max(more):.1f} cycles for each more box that is loaded and stored; box_ns {box_ns:.1f}")
    rest = [(cycles[boxes, ctas] / 1980 - 2 * LANES * boxes * box_ns * FULL_MHZ / 1980 * 1e-3) for boxes in (28, 14, 7) for ctas in (32, 44)]
    print(f"beside them {min(rest):.2f} to {max(rest):.2f} us a slice: a load's and a store's wait")
    clock = {}
    for quantity, w, how, _, mhz in rows:
        if quantity == "gemm_tile":
            clock.setdefault((int(w["ctas"]) if how.endswith("nothing") else int(how.split()[1].split("=")[1]), how.split("beside ")[1]), []).append(mhz)
    powers = []
    for (compute, beside), mhz in sorted(clock.items()):
        words = dict(w.split("=") for w in beside.split() if "=" in w)
        if words.get("boxes_a_row") != str(BOXES):
            continue
        slow = [FULL_MHZ / statistics.mean(m) for m in (clock[compute, "nothing"], mhz)]
        more = (slow[1] - slow[0]) * (KNEE_TFLOPS + STATIC_TFLOPS) * 1e12
        each = 2 * LANES * BOXES
        per_s = int(words["ctas"]) * each / (each * box_ns * 1e-9 + 1.55e-6)
        powers.append(more / per_s)
        print(f"{compute} computing CTAs and {words['ctas']} gathering: {slow[0]:.3f} to {slow[1]:.3f} times slower, {more / per_s / 1e3:.0f} kFLOP a box")
    print(f"box_power_flop {statistics.mean(powers):.0f}")


if __name__ == "__main__":
    write_rows(sys.argv[2]) if sys.argv[1:2] == ["rows"] else fits()

"""Which L2 window explains the device-memory reads that the profiler counted?

Model: tiles in issue order, panels (one operand's rows or columns over all k) kept in least-recently-used order; a
panel is read again unless it is among the last W bytes touched. Tiles of one wave share panels for free (lockstep).
"""
import collections
import csv


def profiled(runs):
    """Pairs of shape (VARIANT:m:n:k:ctas:group) and its counters, from the profiler's run."""
    by = collections.OrderedDict()
    for r in csv.DictReader(line for line in open(f"{runs}/5/ncu5.csv") if line.startswith('"')):
        by.setdefault(int(r["ID"]), {})[r["Metric Name"]] = float(r["Metric Value"].replace(",", ""))
    names = [line.split()[1] for line in open(f"{runs}/5/log5.txt") if line.startswith("one gemm")]
    return [(name, by[i]) for i, name in enumerate(names)]


def order(mt, nt, g):
    for first in range(0, mt, g):
        rows = min(g, mt - first)
        for n in range(nt):
            for i in range(rows):
                yield first + i, n

def reads(m, n, k, ctas, g, window):
    a, b = 128 * k * 2, 256 * k * 2
    lru, total = collections.OrderedDict(), 0
    tiles = list(order(m // 128, n // 256, g))
    for w in range(0, len(tiles), ctas):
        wave = tiles[w:w + ctas]
        touched = [("a", i) for i in dict.fromkeys(t[0] for t in wave)] + [("b", j) for j in dict.fromkeys(t[1] for t in wave)]
        for p in touched:
            if p in lru:
                lru.move_to_end(p)
            else:
                total += a if p[0] == "a" else b
                lru[p] = a if p[0] == "a" else b
        size = sum(lru.values())
        while lru and size > window:
            size -= lru.popitem(last=False)[1]
    return total

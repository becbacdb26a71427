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

def reads(m, n, k, ctas, g, window, drift_hits=0.0, first_tiles=None):
    """Bytes read. From the 17th wave on, when the CTAs have drifted apart, `drift_hits` of the panels that the wave before
    used last are found all the same: who follows finds them in L2 and catches up with who leads."""
    a, b = 128 * k * 2, 256 * k * 2
    lru, last, total, size = collections.OrderedDict(), {}, 0, 0
    tiles = list(order(m // 128, n // 256, g))[:first_tiles]
    for w, start in enumerate(range(0, len(tiles), ctas)):
        for row, column in tiles[start:start + ctas]:
            for panel, bytes in ((("a", row), a), (("b", column), b)):
                if panel in lru:
                    lru.move_to_end(panel)
                else:
                    total += bytes * (1 - drift_hits) if w > 15 and last.get(panel) == w - 1 else bytes
                    lru[panel] = bytes
                    size += bytes
                last[panel] = w
        while size > window:
            size -= lru.popitem(last=False)[1]
    return total

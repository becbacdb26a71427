"""SM clock under GEMM load, fitted: MHz = min(top, a + b * busy + c * writes).

busy = tensor-busy CTAs = CTAs x 1024 cycles x k steps / cycles of a tile; writes = C bytes, TB/s. Two regimes: the first
25 ms after idleness, and after 350 ms of load.
"""
import csv

RUNS = "runs"

def lstsq(X, Y):
    n = len(X[0])
    A = [[sum(x[i] * x[j] for x in X) for j in range(n)] + [sum(x[i] * y for x, y in zip(X, Y))] for i in range(n)]
    for i in range(n):
        p = max(range(i, n), key=lambda r: abs(A[r][i]))
        A[i], A[p] = A[p], A[i]
        for r in range(n):
            if r != i:
                f = A[r][i] / A[i][i]
                A[r] = [a - f * b for a, b in zip(A[r], A[i])]
    return [A[i][n] / A[i][i] for i in range(n)]

def clocks():
    out = []
    for n in (3, 5, 6, 9):
        for r in csv.reader(open(f"{RUNS}/{n}/raw{n}.csv")):
            if r[0] == "clocks" and "_k" not in r[1]:  # not the skewed variants
                k, c, each, em, eus, lm, lus, cyc = map(float, r[2:])
                out.append(dict(variant=r[1], k=int(k), ctas=int(c), early_mhz=em, early_us=eus, late_mhz=lm, late_us=lus, cycles=cyc))
    return out

def fit(regime, top):
    X, Y, tags = [], [], []
    for r in clocks():
        mhz, us = r[regime + "_mhz"], r[regime + "_us"]
        if mhz < top:
            X.append((1.0, r["ctas"] * 16.0 * r["k"] / r["cycles"], r["ctas"] * 65536 / us * 1e-6))
            Y.append(mhz)
            tags.append(r)
    s = lstsq(X, Y)
    err = [sum(a * b for a, b in zip(s, x)) - y for x, y in zip(X, Y)]
    return s, (sum(e * e for e in err) / len(err)) ** 0.5, max(map(abs, err)), len(Y), sorted(zip(map(abs, err), [(t["variant"], t["k"], t["ctas"]) for t in tags]))[-3:]

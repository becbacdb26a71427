"""Unfused baselines on all GPUs of this host: cuBLAS through torch, then or before it an NCCL collective.

nccl.py OUT.csv: one process a GPU. NVLink SHARP stays off (NCCL_NVLS_ENABLE=0). Every time is the median over repeats of
the slowest rank's; ranks meet before each repeat. `gemm_us` and `collective_us` are the same two alone.
"""
import csv
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WARM_UP, REPEATS = 10, 21
# Per-rank GEMMs for two ranks; others scale the split dimension.
SHAPES = [
    ("gemm_rs", 8192, 8192, 8192), ("ag_gemm", 8192, 8192, 8192), ("gemm_ar", 8192, 8192, 8192),
    ("gemm_rs", 8192, 8192, 2048), ("ag_gemm", 8192, 2048, 8192), ("gemm_ar", 8192, 8192, 2048),
    ("gemm_rs", 4096, 4096, 4096), ("ag_gemm", 4096, 4096, 4096), ("gemm_ar", 4096, 4096, 4096),
    ("gemm_rs", 8192, 8192, 512),
    ("gemm_rs", 16384, 16384, 16384), ("ag_gemm", 16384, 16384, 16384), ("gemm_ar", 16384, 16384, 16384),
]


def rank_main(rank, ranks, out):
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", NCCL_NVLS_ENABLE="0")
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    meet = torch.zeros(1, device="cuda")
    rows = []

    def timed(run):
        times = []
        for i in range(WARM_UP + REPEATS):
            dist.all_reduce(meet)
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            if i >= WARM_UP:
                times.append(begin.elapsed_time(end) * 1e3)
        slowest = torch.tensor(times, device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    for kernel, m, n, k in SHAPES:
        torch.manual_seed(1 + rank)
        if kernel == "ag_gemm":
            n //= ranks
            shard = torch.rand(m // ranks, k, device="cuda").mul_(2).sub_(1).bfloat16()
            a = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
        else:
            k //= ranks
            a = torch.rand(m, k, device="cuda").mul_(2).sub_(1).bfloat16()
        b = torch.rand(k, n, device="cuda").mul_(2).sub_(1).bfloat16()
        c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        part = torch.empty(m // ranks, n, device="cuda", dtype=torch.bfloat16)
        gemm = lambda: torch.matmul(a, b, out=c)
        collective = {
            "ag_gemm": lambda: dist.all_gather_into_tensor(a, shard),
            "gemm_rs": lambda: dist.reduce_scatter_tensor(part, c),
            "gemm_ar": lambda: dist.all_reduce(c),
        }[kernel]
        both = (lambda: (collective(), gemm())) if kernel == "ag_gemm" else (lambda: (gemm(), collective()))
        total = timed(both)
        # Values of the last run: a few rows against the sum in f64.
        if kernel == "ag_gemm":
            want = a[:8].double() @ b.double()
            got = c[:8].double()
        elif kernel == "gemm_rs":
            starts = [r * (m // ranks) for r in range(ranks)]
            sums = [a[start:start + 8].double() @ b.double() for start in starts]
            for term in sums:
                dist.all_reduce(term)
            want, got = sums[rank], part[:8].double()
        else:
            want = a[:8].double() @ b.double()
            dist.all_reduce(want)
            both()
            got = c[:8].double()
        error = ((got - want).norm() / want.norm()).item()
        row = dict(kernel=kernel, cluster=f"1x{ranks}", m=m, n=n, k=k, system="cuBLAS+NCCL", time_us=f"{total:.2f}",
                   gemm_us=f"{timed(gemm):.2f}", collective_us=f"{timed(collective):.2f}", relative_error=f"{error:.2e}",
                   warm_up=WARM_UP, repeats=REPEATS, torch=torch.__version__,
                   nccl=".".join(map(str, torch.cuda.nccl.version())), nvls=os.environ["NCCL_NVLS_ENABLE"])
        rows.append(row)
        if rank == 0:
            print(*row.values(), flush=True)
            with open(out, "w", newline="") as file:
                writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        del a, b, c, part
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    ranks = torch.cuda.device_count()
    mp.spawn(rank_main, (ranks, sys.argv[1]), nprocs=ranks)

"""Unfused forms on all GPUs of this host, for the shapes of experiment files: cuBLAS or library attention, and NCCL.

nccl.py OUT.csv EXPERIMENT.toml...: one process a GPU. NVLink SHARP stays off (NCCL_NVLS_ENABLE=0). Every time is the median
over repeats of the slowest rank's; ranks meet before each repeat. `compute_us` and `collective_us` are the two parts alone.
Clocks as `tilewire measure` has them: cold is 200 ms of idling, two runs, then at most 30 ms; sustained 80 ms of load first.

    ag_gemm   all-gather, GEMM        moe_dispatch_gemm   pack, all-to-all, arrange, grouped GEMM
    gemm_rs   GEMM, reduce-scatter    ring_attention      all-gather of K and V, attention
    gemm_ar   GEMM, all-reduce
"""
import csv
import itertools
import os
import statistics
import sys
import time
import tomllib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

REPEATS, COLD_MS, WARM_MS = 21, 30.0, 80.0


def cases(files):
    for name in files:
        with open(name, "rb") as file:
            experiment = tomllib.load(file)
        for shape in experiment["shape"]:
            lists = [value if isinstance(value, list) else [value] for value in shape.values()]
            for values in itertools.product(*lists):
                yield experiment["kernel"], dict(zip(shape, values)), experiment.get("clock", "sustained")


def rand(*sizes):
    return torch.rand(*sizes, device="cuda").mul_(2).sub_(1).bfloat16()


def off(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def gemm(kernel, shape, rank, ranks):
    m, n, k = shape["m"], shape["n"], shape["k"]
    a, b = (torch.empty(m, k, device="cuda", dtype=torch.bfloat16), rand(k, n))
    shard = rand(m // ranks, k)
    if kernel != "ag_gemm":
        a.copy_(rand(m, k))
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    part = torch.empty(m // ranks, n, device="cuda", dtype=torch.bfloat16)
    compute = lambda: torch.matmul(a, b, out=c)
    collective = {
        "ag_gemm": lambda: dist.all_gather_into_tensor(a, shard),
        "gemm_rs": lambda: dist.reduce_scatter_tensor(part, c),
        "gemm_ar": lambda: dist.all_reduce(c),
    }[kernel]
    both = (lambda: (collective(), compute())) if kernel == "ag_gemm" else (lambda: (compute(), collective()))

    def error():
        both()
        if kernel == "gemm_rs":
            sums = [a[r * (m // ranks):][:8].double() @ b.double() for r in range(ranks)]
            for term in sums:
                dist.all_reduce(term)
            return off(part[:8], sums[rank])
        want = a[:8].double() @ b.double()
        if kernel == "gemm_ar":
            dist.all_reduce(want)
        return off(c[:8], want)

    yield "cuBLAS+NCCL", both, compute, collective, error


def experts(shape, rank, ranks):
    tokens, hidden, inter = shape["tokens"] // ranks, shape["hidden"], shape["inter"]
    own = shape["experts"] // ranks
    x = rand(tokens, hidden)
    weights = rand(own, hidden, inter)
    chosen = torch.rand(tokens, shape["experts"], device="cuda").topk(shape["topk"]).indices
    order = chosen.flatten().argsort(stable=True)
    rows, sorted_experts = order // shape["topk"], chosen.flatten()[order]
    sent = torch.bincount(sorted_experts, minlength=shape["experts"]).view(ranks, own)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    sends, receives = sent.sum(1).tolist(), came.sum(1).tolist()
    # Rows come sender by sender, in each by expert; they are wanted expert by expert.
    expert_of = torch.cat([torch.repeat_interleave(torch.arange(own, device="cuda"), came[r]) for r in range(ranks)])
    arrange = expert_of.argsort(stable=True)
    ends = came.sum(0).cumsum(0).to(torch.int32)
    landed = torch.empty(sum(receives), hidden, device="cuda", dtype=torch.bfloat16)
    out = {}

    def collective():
        dist.all_to_all_single(landed, x[rows], receives, sends)

    def grouped():
        out["y"] = torch._grouped_mm(landed[arrange], weights, offs=ends)

    bounds = [0, *ends.tolist()]
    y = torch.empty(sum(receives), inter, device="cuda", dtype=torch.bfloat16)

    def one_by_one():
        z = landed[arrange]
        for e in range(own):
            torch.matmul(z[bounds[e]:bounds[e + 1]], weights[e], out=y[bounds[e]:bounds[e + 1]])
        out["y"] = y

    def error():
        picked = [bounds[e] for e in range(own) if bounds[e] < bounds[e + 1]][:8]
        z = landed[arrange]
        want = torch.stack([z[at].double() @ weights[expert_of[arrange[at]]].double() for at in picked])
        return off(out["y"][picked], want)

    for system, compute in (("grouped_mm+NCCL", grouped), ("cuBLAS+NCCL", one_by_one)):
        yield system, lambda: (collective(), compute()), compute, collective, error


def attention(shape, rank, ranks):
    rows = shape["seq"] // ranks
    sizes = (rows, shape["batch"], shape["heads"], shape["head_dim"])
    # Sequence outermost: what an all-gather concatenates is the longer sequence.
    q, k, v = rand(*sizes), rand(*sizes), rand(*sizes)
    all_k, all_v = (torch.empty(shape["seq"], *sizes[1:], device="cuda", dtype=torch.bfloat16) for _ in "kv")
    heads = lambda x: x.permute(1, 2, 0, 3)
    out = {}

    def collective():
        dist.all_gather_into_tensor(all_k, k)
        dist.all_gather_into_tensor(all_v, v)

    def error():
        one = lambda x: heads(x)[0, 0].double()
        want = torch.softmax(one(q)[:8] @ one(all_k).T / shape["head_dim"] ** 0.5, -1) @ one(all_v)
        return off(out["o"][0, 0, :8], want)

    for system, backend in (("FA2+NCCL", SDPBackend.FLASH_ATTENTION), ("cuDNN+NCCL", SDPBackend.CUDNN_ATTENTION)):
        def compute():
            with sdpa_kernel(backend):
                out["o"] = F.scaled_dot_product_attention(heads(q), heads(all_k), heads(all_v))

        yield system, lambda: (collective(), compute()), compute, collective, error


def timed(run, clock, meet):
    """Median in us; runs before; runs timed."""
    def once():
        dist.all_reduce(meet)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end)], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    once()  # loads code
    if clock == "cold":
        time.sleep(0.2)
        warm = [once(), once()]
        repeats = int(max(1, min(REPEATS, (COLD_MS - sum(warm)) / warm[1])))
    else:
        warm = []
        while sum(warm) < WARM_MS:
            warm.append(once())
        repeats = int(max(5, min(REPEATS, 400 / warm[-1])))
    return 1e3 * statistics.median(once() for _ in range(repeats)), 1 + len(warm), repeats


def rank_main(rank, ranks, out, files):
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", NCCL_NVLS_ENABLE="0")
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    meet = torch.zeros(1, device="cuda")
    rows = []
    for kernel, shape, clock in cases(files):
        torch.manual_seed(1 + rank)
        forms = {"moe_dispatch_gemm": experts, "ring_attention": attention}.get(kernel)
        for system, both, compute, collective, error in (
                forms(shape, rank, ranks) if forms else gemm(kernel, shape, rank, ranks)):
            row = dict(kernel=kernel, cluster=f"1x{ranks}", shape=";".join(f"{k}={v}" for k, v in shape.items()), system=system, clock=clock)
            try:
                total, warm_up, repeats = timed(both, clock, meet)
                both()
                row.update(time_us=f"{total:.2f}", compute_us=f"{timed(compute, clock, meet)[0]:.2f}",
                           collective_us=f"{timed(collective, clock, meet)[0]:.2f}", relative_error=f"{error():.2e}",
                           warm_up=warm_up, repeats=repeats)
            except (RuntimeError, AttributeError) as problem:
                # All ranks run the same library and fail alike.
                if rank == 0:
                    print(*row.values(), "not run:", str(problem).splitlines()[0], flush=True)
                continue
            row.update(torch=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())),
                       nvls=os.environ["NCCL_NVLS_ENABLE"])
            rows.append(row)
            if rank == 0:
                print(*row.values(), flush=True)
                with open(out, "w", newline="") as file:
                    writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    ranks = torch.cuda.device_count()
    mp.spawn(rank_main, (ranks, sys.argv[1], sys.argv[2:]), nprocs=ranks)

"""Backward + synchronisation of a DDP model on two emulated hosts with a slow link.

    python -m tests.measure_overlap [megabits_per_second] [rounds]        # as root, on a quiet machine

Every round takes one step of each kind, in an order that alternates (forwards, backwards), so that drift cancels.
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lit_dp.collectives.cluster import Cluster
from lit_dp.collectives.hooks import GradientExchange, register

WIDTH, LAYERS, BATCH, WARM_UP = 1024, 8, 768, 6
KINDS = ("built-in", "halving_doubling", "ring", "built-in again", "blocking", "compute only")


def model_for(kind: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4, gradient_as_bucket_view=True)
    if kind in ("halving_doubling", "ring"):
        register(model, kind, torch.device("cpu"))
    if kind == "blocking":
        exchange = GradientExchange("halving_doubling", torch.device("cpu"))

        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = exchange.hook(state, bucket)
            future.wait()
            return future

        model.register_comm_hook(None, hook)  # pyright: ignore[reportArgumentType]
    return model


def step_seconds(model: DistributedDataParallel, kind: str, x: torch.Tensor) -> float:
    with model.no_sync() if kind == "compute only" else nullcontext():
        loss = model(x).square().mean()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        return time.perf_counter() - start


def host(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {kind: model_for(kind) for kind in KINDS}
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(WARM_UP + rounds):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            took = torch.tensor(step_seconds(models[kind], kind, x), dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                seconds[kind].append(took.item())
    if dist.get_rank() == 0:
        buckets = models["built-in"]._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        print("RESULT", json.dumps({"seconds": seconds, "buckets": buckets}), flush=True)
    dist.barrier()
    os._exit(0)


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:8.4g} [{low:.4g}, {high:.4g}]"


def main(megabits: float, rounds: int) -> None:
    with Cluster(2, megabits) as cluster:
        argv = [sys.executable, "-m", "tests.measure_overlap", "host", str(rounds)]
        ended = cluster.run([argv, argv], {"OMP_NUM_THREADS": "1"}, timeout=500)
    if any(code for code, _ in ended):
        sys.exit("\n".join(output for _, output in ended))
    line = next(line for line in ended[0].output.splitlines() if line.startswith("RESULT"))
    result = json.loads(line.removeprefix("RESULT "))
    seconds = result["seconds"]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {megabits:g} Mbit/s, {rounds} rounds")
    print("buckets (bytes):", result["buckets"])
    print(f"{'kind':18} milliseconds: median [quartiles]   ratio to built-in of the same round: median [quartiles]")
    for kind in KINDS:
        ratios = [mine / base for mine, base in zip(seconds[kind], seconds["built-in"], strict=True)]
        print(f"{kind:18} {quartiles([1000 * s for s in seconds[kind]])}   {quartiles(ratios)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        host(int(sys.argv[2]))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 600, int(sys.argv[2]) if len(sys.argv) > 2 else 30)

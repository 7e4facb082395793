"""Step time and peak memory of virtual ranks against plain accumulation of as many micro-batches.

    python -m tests.measure_virtual_ranks [repetitions] [steps]        # on a quiet machine
    python -m tests.measure_virtual_ranks memory

V = 8 on W = 1, 2, 4 and 8 processes of one thread, k = 8 / W micro-batches of 16 images a step, through lit_dp.Trainer.
A repetition is one training of each kind, in an order that alternates; the first five steps are not counted.
"""

import itertools
import logging
import os
import statistics
import sys
import time
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import ExactDDPStrategy, LitClassifier
from lit_dp.networks import SmallCNN
from tests.ranks import run_ranks
from tests.training import quiet_trainer

VIRTUAL_RANKS, BATCH, WARM_UP = 8, 16, 5
KINDS = ("virtual ranks", "accumulation")


class Clock(Callback):
    """When each optimizer step began."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.at: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.k == 0:
            self.at.append(time.perf_counter())


def train(kind: str, k: int, steps: int, network: nn.Module, callbacks: list[Callback]) -> None:
    samples = BATCH * VIRTUAL_RANKS * steps
    data = TensorDataset(torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,)))
    virtual = kind == KINDS[0]
    trainer = quiet_trainer(
        strategy=ExactDDPStrategy(virtual_ranks=VIRTUAL_RANKS if virtual else None),
        accumulate_grad_batches=1 if virtual else k,
        max_epochs=1,
        callbacks=callbacks,
    )
    trainer.fit(LitClassifier(network, 10), DataLoader(data, BATCH, shuffle=True))


def peak_copies(kind: str, k: int) -> float:
    """Most bytes that torch's CPU allocator had given out in 3 steps of a 33 MB network, in copies of its gradient."""
    layers = [nn.Linear(784, 1024), *(nn.Linear(1024, 1024) for _ in range(7)), nn.Linear(1024, 10)]
    network = nn.Sequential(nn.Flatten(), *layers)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(kind, k, 3, network, [])
    assert profiled.profiler is not None
    events: Any = profiled.profiler.kineto_results.events()  # pyright: ignore
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    return max(itertools.accumulate(changes)) / sum(p.numel() * p.element_size() for p in network.parameters())


def main_memory() -> None:
    print(f"torch {torch.__version__}; peak memory of rank 0 in copies of the gradient")
    print(f"| k | W | {' | '.join(KINDS)} | above | log2 k |")
    for world_size in (1, 2, 4):
        k = VIRTUAL_RANKS // world_size
        peaks = [run_ranks(world_size, peak_copies, kind, k)[0] for kind in KINDS]
        cells = " | ".join(f"{peak:.3f}" for peak in (*peaks, peaks[0] - peaks[1]))
        print(f"| {k} | {world_size} | {cells} | {k.bit_length() - 1} |", flush=True)


def step_seconds(kind: str, k: int, steps: int) -> list[float]:
    """Seconds of each counted step on this rank."""
    seed_everything(0, verbose=False)
    clock = Clock(k)
    train(kind, k, WARM_UP + steps + 1, SmallCNN(10), [clock])
    return [after - before for before, after in zip(clock.at[WARM_UP:-1], clock.at[WARM_UP + 1 :], strict=True)]


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def main(repetitions: int, steps: int) -> None:
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, {os.cpu_count()} cores"
    print(f"{versions}; {repetitions} x {steps} steps, milliseconds a step; median [quartiles]")
    print(f"| k | W | {' | '.join(KINDS)} | ratio |")
    for world_size in (1, 2, 4, 8):
        k = VIRTUAL_RANKS // world_size
        milliseconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for repetition in range(repetitions):
            for kind in KINDS if repetition % 2 else reversed(KINDS):
                by_rank = run_ranks(world_size, step_seconds, kind, k, steps, env={"LIT_DP_CPU_THREADS": "1"})
                slowest = [1000 * max(step) for step in zip(*by_rank, strict=True)]
                milliseconds[kind].append(statistics.median(slowest))
        ratios = [a / b for a, b in zip(*milliseconds.values(), strict=True)]
        cells = [quartiles(milliseconds[kind]) for kind in KINDS]
        print(f"| {k} | {world_size} | {' | '.join(cells)} | {quartiles(ratios)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if sys.argv[1:] == ["memory"]:
        main_memory()
    else:
        main(*(int(arg) for arg in sys.argv[1:3] or (8, 20)))

"""Step time of virtual ranks against plain accumulation of as many micro-batches.

    python -m tests.measure_virtual_ranks [repetitions] [steps]        # on a quiet machine

V = 8 on W = 1, 2 and 4 processes of one thread, k = 8 / W micro-batches of 16 images a step, through lit_dp.Trainer. A
repetition is one training of each kind, in an order that alternates; the first five steps are not counted.
"""

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


def step_seconds(kind: str, k: int, steps: int) -> list[float]:
    """Seconds of each counted step on this rank."""
    seed_everything(0, verbose=False)
    clock = Clock(k)
    samples = BATCH * VIRTUAL_RANKS * (WARM_UP + steps + 1)
    data = TensorDataset(torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,)))
    virtual = kind == KINDS[0]
    trainer = quiet_trainer(
        strategy=ExactDDPStrategy(virtual_ranks=VIRTUAL_RANKS if virtual else None),
        accumulate_grad_batches=1 if virtual else k,
        max_epochs=1,
        callbacks=[clock],
    )
    trainer.fit(LitClassifier(SmallCNN(10), 10), DataLoader(data, BATCH, shuffle=True))
    return [after - before for before, after in zip(clock.at[WARM_UP:-1], clock.at[WARM_UP + 1 :], strict=True)]


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def main(repetitions: int, steps: int) -> None:
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, {os.cpu_count()} cores"
    print(f"{versions}; {repetitions} x {steps} steps, milliseconds a step; median [quartiles]")
    print(f"| k | W | {' | '.join(KINDS)} | ratio |")
    for world_size in (1, 2, 4):
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
    main(*(int(arg) for arg in sys.argv[1:3] or (8, 20)))

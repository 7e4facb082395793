"""What it costs that nothing is lost: step time with guards, ledger and preemption, and how long a save holds up.

    python -m tests.measure_safety [repetitions] [steps]        # on a quiet machine

Two gloo processes of one thread. A step is a small CNN's on 4 images a process, 5 to 9 ms with `ddp`. Kinds, in one
run, in an order that alternates: Lightning's `ddp` (which broadcasts on every step to look for SIGTERM), `exact_ddp` as
the command line runs it, and the same without guards, ledger and preemption. The first five steps are not counted. Then
one save of 20 million parameters with momentum (240 MB), through Lightning's CheckpointIO and through ours.
"""

import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import ExactDDPStrategy, LitClassifier
from lit_dp.engine.checkpoint import DurableCheckpointIO
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.monitored import MonitoredValues
from lit_dp.engine.nonfinite import NonFinite
from lit_dp.engine.preemption import Preemption
from lit_dp.engine.replicas import Replicas
from tests.measure_virtual_ranks import Clock
from tests.ranks import run_ranks
from tests.training import leave, quiet_trainer

KINDS = ("ddp", "exact_ddp", "exact_ddp, bare")
BATCH, WARM_UP = 4, 5
SAFETY = (Ledger, MonitoredValues, NonFinite, Preemption, Replicas)


def network() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2), nn.ReLU(), nn.Conv2d(24, 24, 3)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(384, 10))


def step_seconds(kind: str, steps: int) -> float:
    """Median of a training's steps, on this rank."""
    seed_everything(0, verbose=False)
    data = TensorDataset(torch.rand(2 * BATCH * steps, 1, 28, 28), torch.randint(10, (2 * BATCH * steps,)))
    bare = kind == KINDS[2]
    strategy: Any = "ddp" if kind == KINDS[0] else ExactDDPStrategy(nonfinite="ignore" if bare else "stop")
    clock, ledger = Clock(1), [] if bare or kind == KINDS[0] else [Ledger()]
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=[clock, *ledger])
    if bare:
        callbacks: Any = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        trainer.callbacks = [c for c in callbacks if not isinstance(c, SAFETY)]  # type: ignore
    trainer.fit(LitClassifier(network(), 10), DataLoader(data, BATCH, shuffle=True))
    durations = [b - a for a, b in zip(clock.at, clock.at[1:], strict=False)][WARM_UP:]
    return statistics.median(durations)


def measure(repetitions: int, steps: int) -> dict[str, list[float]]:
    """Median step seconds by kind, one a repetition."""
    quieten()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repetition in range(repetitions):
        for kind in KINDS if repetition % 2 == 0 else reversed(KINDS):
            seconds[kind].append(step_seconds(kind, steps))
    leave()
    return seconds


class Saves(Callback):
    """How long each CheckpointIO holds up a rank that saves, in turn."""

    def __init__(self, folder: Path, repetitions: int) -> None:
        self.folder, self.repetitions = folder, repetitions
        self.seconds: dict[str, list[float]] = {"Lightning": [], "lit_dp": []}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        kinds = {"Lightning": TorchCheckpointIO(), "lit_dp": DurableCheckpointIO()}
        for repetition in range(self.repetitions):
            for name in kinds if repetition % 2 == 0 else reversed(kinds):
                trainer.strategy.checkpoint_io = kinds[name]
                start = time.perf_counter()
                trainer.save_checkpoint(self.folder / f"{name}.ckpt")
                self.seconds[name].append(time.perf_counter() - start)


def save_seconds(folder: Path, repetitions: int) -> dict[str, list[float]]:
    quieten()
    model = LitClassifier(nn.Sequential(nn.Flatten(), nn.Linear(784, 25_000), nn.Linear(25_000, 10)), 10, momentum)
    saves = Saves(folder, repetitions)
    data = TensorDataset(torch.rand(4, 1, 28, 28), torch.randint(10, (4,)))
    quiet_trainer(max_epochs=1, callbacks=[saves]).fit(model, DataLoader(data, 2))
    return saves.seconds


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def quieten() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.4g} [{low:.4g}, {high:.4g}]"


def main(repetitions: int = 8, steps: int = 200) -> None:
    print(f"torch {torch.__version__}, lightning {lightning.__version__}, {repetitions} repetitions of {steps} steps")
    seconds = run_ranks(2, measure, repetitions, steps, timeout=3600)[0]
    for kind, values in seconds.items():
        ratios = [value / base for value, base in zip(values, seconds[KINDS[0]], strict=True)]
        print(f"{kind:16}  {quartiles([1000 * v for v in values])} ms a step, of ddp's {quartiles(ratios)}")
    with tempfile.TemporaryDirectory() as folder:
        saves = run_ranks(2, save_seconds, Path(folder), repetitions, timeout=3600)[0]
    for name, values in saves.items():
        ratios = [value / base for value, base in zip(values, saves["Lightning"], strict=True)]
        print(f"a save, {name:9}  {quartiles(values)} s, of Lightning's {quartiles(ratios)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

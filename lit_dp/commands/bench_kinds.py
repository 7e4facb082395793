"""The kinds of training that `bench overhead` compares, each as one function with the same arguments."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lit_dp.commands import bench_bare, bench_fit, bench_lightning, bench_loops
from lit_dp.commands.bench_clock import Clock
from lit_dp.commands.bench_jobs import JOBS, LEARNING_RATE, MOMENTUM, Data
from lit_dp.commands.bench_lightning import StepClock

VIRTUAL_RANKS = 4


@dataclass(frozen=True)
class Training:
    """One training, whatever its kind: which samples, how long, on how many processes.

    `root` is a folder that a Trainer may write to.
    """

    data: Data
    processes: int
    epochs: int
    root: Path


class Timing(NamedTuple):
    """What a training took on this rank.

    Attributes:
        steps: seconds of each optimizer step; an epoch's last is not known.
        epoch: seconds of an epoch with its validation and whatever else the kind does.
        accuracy: of the last validation.
    """

    steps: list[float]
    epoch: float
    accuracy: float

    @classmethod
    def of(cls, clock: Clock, training: Training, accuracy: float) -> "Timing":
        assert clock.seconds is not None, "the training has not ended"
        return cls(clock.steps(), clock.seconds / training.epochs, accuracy)


class Kind(NamedTuple):
    """A letter stands for it in options and tables."""

    title: str
    train: Callable[[Training], Timing]


def _tutorial(training: Training) -> Timing:
    clock = Clock()
    _, validated = bench_loops.tutorial(JOBS[training.data.job], training.data, training.epochs, clock)
    return Timing.of(clock, training, validated.accuracy)


def _tuned(training: Training) -> Timing:
    clock = Clock()
    _, validated = bench_loops.tuned(JOBS[training.data.job], training.data, training.epochs, clock)
    return Timing.of(clock, training, validated.accuracy)


def _lightning(training: Training) -> Timing:
    data, root = training.data, str(training.root)
    settings: dict[str, Any] = {"max_epochs": training.epochs, "callbacks": [StepClock()]}
    trainer = bench_lightning.train(JOBS[data.job], data, training.processes, root, **settings)
    return _timed(trainer, training, "val_acc")


def _exact_ddp(training: Training) -> Timing:
    return _fit(training, None)


def _virtual_ranks(training: Training) -> Timing:
    return _fit(training, virtual_ranks_on(training.processes))


def _fit(training: Training, virtual_ranks: int | None) -> Timing:
    data, processes, epochs, root = (getattr(training, field) for field in ("data", "processes", "epochs", "root"))
    return _timed(bench_fit.train(data, processes, epochs, root, virtual_ranks), training, "val/acc")


def _timed(trainer: Trainer, training: Training, accuracy: str) -> Timing:
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    clock = next(callback.clock for callback in callbacks if isinstance(callback, StepClock))
    return Timing.of(clock, training, float(trainer.callback_metrics[accuracy]))


def _accelerate(training: Training) -> Timing:
    """Its loop as its documentation writes it, on the tutorial's samples."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports] # optional

    job, data, clock = JOBS[training.data.job], training.data, Clock()
    os.environ["RANK"] = os.environ.get("LOCAL_RANK", "0")  # it looks for what torchrun sets
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    del os.environ["RANK"]
    network = job.build(plain=True)
    optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, MOMENTUM)
    loaders = [DataLoader(data.tutorial(train), job.batch, shuffle=train) for train in (True, False)]  # pyright: ignore
    model, optimizer, train_loader, val_loader = accelerator.prepare(network, optimizer, *loaders)
    correct = samples = 0
    clock.begin()
    for _ in range(training.epochs):
        model.train()
        clock.epoch()
        for images, labels in train_loader:
            clock.tick()
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
        model.eval()
        correct = samples = 0
        with torch.no_grad():
            for images, labels in val_loader:
                predicted, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
                correct += (predicted == labels).sum().item()
                samples += len(labels)
    clock.end()
    return Timing.of(clock, training, correct / samples)


def _bare(training: Training) -> Timing:
    clock, validated = bench_bare.train(JOBS[training.data.job], training.data, training.processes, training.epochs)
    return Timing.of(clock, training, validated.accuracy)


KINDS = {
    "a": Kind("tutorial loop", _tutorial),
    "b": Kind("tuned loop", _tuned),
    "c": Kind("Lightning ddp", _lightning),
    "d": Kind("exact_ddp (fit)", _exact_ddp),
    "e": Kind(f"exact_ddp, {VIRTUAL_RANKS} virtual ranks", _virtual_ranks),
    "f": Kind("accelerate", _accelerate),
    "g": Kind("Lightning, bare", _bare),
}


def virtual_ranks_on(processes: int) -> int:
    """As many as are named, or one a process where there are more of these."""
    return max(VIRTUAL_RANKS, processes)


def left_out(kind: str, job: str, processes: int) -> str | None:
    """Why this kind cannot be measured here, or None."""
    if kind == "f" and importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed"
    if kind == "e" and processes & (processes - 1):
        return f"virtual ranks need a power of two of processes, not {processes}"
    if kind == "e" and JOBS[job].batch * processes % virtual_ranks_on(processes):
        return f"a step's {JOBS[job].batch * processes} samples have no {virtual_ranks_on(processes)} equal parts"
    return None

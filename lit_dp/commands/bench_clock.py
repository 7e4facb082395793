"""When steps begin, and how long a training takes; the same clock for a loop by hand and for a Trainer.

On CUDA a step is timed by events on the stream, which the host does not wait for; the host waits at the borders only.
"""

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lit_dp.engine.marks import mark, seconds_between, settle_device


class Clock:
    """Times one training on this rank.

    Attributes:
        seconds: from `begin` to `end`; None before.
    """

    def __init__(self) -> None:
        self._epochs: list[list[Any]] = []
        self._begun = 0.0
        self._on_cuda = torch.cuda.is_available()  # asking takes longer than a tick
        self.seconds: float | None = None

    def begin(self) -> None:
        """Where a training begins. All ranks call it, and leave it together."""
        settle()
        self._begun = time.perf_counter()

    def epoch(self) -> None:
        """An epoch begins: what lies between the last step of one and the first of the next is not a step."""
        self._epochs.append([])

    def tick(self) -> None:
        """A step begins: its batch has been read."""
        self._epochs[-1].append(mark(self._on_cuda))

    def end(self) -> None:
        """Where a training ends. All ranks call it."""
        settle()
        self.seconds = time.perf_counter() - self._begun

    def steps(self) -> list[float]:
        """Seconds of each step, from the fetch of its batch to that of the next; an epoch's last is not known."""
        settle_device()
        return [seconds_between(a, b) for marks in self._epochs for a, b in pairwise(marks)]


def settle() -> None:
    """Wait until this rank's device has done all that it was given, and then for the other ranks."""
    settle_device()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def peak_megabytes() -> float | None:
    """Most memory that this process has held so far, shared pages included (VmHWM); None where it is not told."""
    return _status("VmHWM")


def held_megabytes() -> float | None:
    """What it holds now (VmRSS)."""
    return _status("VmRSS")


def _status(name: str) -> float | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    kibibytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(kibibytes) * 1024 / 1e6


def note_first_step(file: str) -> None:
    """Write when this rank has taken its first step, and its peak memory until then, to `file.RANK`."""
    settle_device()
    now = time.time()
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    partial = Path(f"{file}.{rank}.partial")
    partial.write_text(f"{now} {peak_megabytes() or float('nan')}")
    partial.rename(f"{file}.{rank}")  # who waits for it finds it whole

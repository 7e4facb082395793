"""Moments on the device that computes: on CUDA events of the stream, which the host does not wait for."""

import time
from typing import Any

import torch


def mark(on_cuda: bool) -> Any:
    """Now, for `seconds_between`. Whether there is CUDA takes longer to ask than the rest: the caller knows."""
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(a: Any, b: Any) -> float:
    """Of two marks. The device must have passed both: see `settle_device`."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1000


def settle_device() -> None:
    """Wait until this process's device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

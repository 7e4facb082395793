"""Exact evaluation: what a rank that has no sample of its own does, and what of it is taken back."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric


@contextmanager
def taken_back(module: nn.Module, logged: Any) -> Iterator[None]:
    """Run a step on a borrowed sample without leaving a trace in metrics.

    A rank without samples must still log the same keys and join the same reductions as the others. Metrics objects in
    `module` get back the states they had; logged means and sums are as if nothing had been added. What the step keeps
    elsewhere (a list of outputs in the module) is not seen here.

    Args:
        module: the LightningModule whose step runs.
        logged: Lightning's results of the running loop, by key.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    states = [copy.deepcopy(metric.metric_state) for metric in metrics]
    yield
    for metric, state in zip(metrics, states, strict=True):
        _restore(metric, state)
    for result in logged.values():
        if result.is_tensor:
            _restore(result, {name: result._defaults[name] for name in result.metric_state})


def _restore(metric: Metric, state: dict[str, Any]) -> None:
    metric._computed = None
    for name, value in state.items():
        setattr(metric, name, value.to(metric.device) if isinstance(value, torch.Tensor) else value)


def level_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers; all ranks call it.

    DDP does so before a forward pass in training only. BatchNorm's running statistics differ between ranks until then,
    and metrics would depend on which rank a sample is evaluated on (FAULTS 21).
    """
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)

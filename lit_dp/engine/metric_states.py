"""What metrics hold, where ranks hold unequal numbers of samples: traces are taken back, and lists made to match."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


@contextmanager
def taken_back(module: nn.Module, logged: Any) -> Iterator[None]:
    """Run a step on a borrowed sample without leaving a trace in metrics.

    A rank without samples must still log the same keys and join the same reductions as the others. Metrics objects in
    `module` get back the states they had; so do logged means and sums. What the step keeps elsewhere (a list of outputs
    in the module) is not seen here.

    Args:
        module: the LightningModule whose step runs.
        logged: Lightning's results of the running loop, by key.
    """
    metrics = metrics_of(module)
    states = [copy.deepcopy(metric.metric_state) for metric in metrics]
    earlier = {key: dict(result.metric_state) for key, result in logged.items() if result.is_tensor}
    yield
    for metric, state in zip(metrics, states, strict=True):
        _restore(metric, state)
    for key, result in logged.items():
        if result.is_tensor:
            _restore(result, earlier.get(key) or {name: result._defaults[name] for name in result.metric_state})


def _restore(metric: Metric, state: dict[str, Any]) -> None:
    metric._computed = None
    for name, value in state.items():
        now = getattr(metric, name)
        if isinstance(value, list):
            added = [item for item in now[len(value) :] if isinstance(item, Tensor)]
            # Not an empty list: from it other ranks could not tell the dtype and dimensions that they gather.
            value = value + [_no_rows(item) for item in added[:1]]
        elif isinstance(value, Tensor):
            value = value.to(now)  # a step may widen float32 to float64: then all ranks reduce float64
        setattr(metric, name, value)


def widen(logged: Any) -> None:
    """Let means and sums of logged numbers go on in float64: float32 terms then leave 29 bits for the carry, and the
    sum does not depend on their order, hence on the number of processes. Called after a step, it loses nothing: until
    then there is one term. Apple's GPUs do not have float64.

    Args:
        logged: Lightning's results of the running loop, by key.
    """
    for result in (logged or {}).values():
        if result.is_tensor and result.meta.on_epoch and _is_sum_of_float32(result):
            result.value = result.value.double()


def _is_sum_of_float32(result: Any) -> bool:
    summed = result.meta.is_mean_reduction or result.meta.is_sum_reduction
    return summed and result.value.dtype == torch.float32 and result.value.device.type != "mps"


def _no_rows(item: Tensor) -> Tensor:
    return item.reshape(-1)[:0] if item.ndim == 0 else item[:0]


def metrics_of(module: nn.Module) -> list[Metric]:
    return [part for part in module.modules() if isinstance(part, Metric)]


def level_lists(module: nn.Module, gather: Callable[[Any], list[Any]]) -> None:
    """Until `unlevel_lists`, let metrics that keep lists without a reduction be computed from unequal numbers of items.

    torchmetrics gathers such lists (of detection and retrieval metrics) item by item, so ranks with fewer items would
    leave the others waiting. They are filled up with items of no rows. Only metrics that have such lists pay for it.

    Args:
        module: the LightningModule whose metrics they are.
        gather: everybody's value, by rank.
    """
    for metric in metrics_of(module):
        if _unreduced_lists(metric):
            metric._sync_dist = partial(_sync_level, metric, gather)


def unlevel_lists(module: nn.Module) -> None:
    for metric in metrics_of(module):
        if "_sync_dist" in metric.__dict__:
            del metric._sync_dist  # the class's own again


def _sync_level(metric: Metric, gather: Callable[[Any], list[Any]], *args: Any, **kwargs: Any) -> None:
    names = _unreduced_lists(metric)
    lengths = gather([len(getattr(metric, name)) for name in names])
    for name, by_rank in zip(names, zip(*lengths, strict=True), strict=True):
        items = getattr(metric, name)
        if missing := max(by_rank) - len(items):
            empty = _no_rows(items[-1]) if items else torch.tensor([], device=metric.device)
            setattr(metric, name, items + [empty] * missing)
    type(metric)._sync_dist(metric, *args, **kwargs)


def _unreduced_lists(metric: Metric) -> list[str]:
    return [
        name
        for name, reduction in metric._reductions.items()
        if isinstance(metric._defaults[name], list) and reduction is not dim_zero_cat
    ]

"""Values logged on a step, as means over the whole global batch where a step has several virtual ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_dp.engine.peers import Peers


class StepValues:
    """Collects what each micro-batch of a step logged with `on_step=True`, and puts the mean of all in its place (the
    sum, min or max, where `reduce_fx` is that).

    Lightning keeps the last micro-batch's value of one process. Ranks exchange only on steps that are logged.

    Attributes:
        collecting: whether a micro-batch is running: what it logs is its own virtual rank's, with sync_dist=True too.
    """

    def __init__(self, trainer: Trainer, peers: Peers) -> None:
        self.trainer, self.peers = trainer, peers
        self.collecting = False
        self._values: dict[str, list[float]] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Around a micro-batch's step."""
        self.collecting = True
        try:
            yield
        finally:
            self.collecting = False

    def note(self, last: bool) -> None:
        """After a micro-batch has logged; `last` of the step: every process calls it together then."""
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps:  # pyright: ignore
            return
        results = {key: result for key, result in (self.trainer._results or {}).items() if _on_step(result)}
        for key, result in results.items():
            self._values.setdefault(key, []).append(float(result._forward_cache))
        if last:
            self._set_means(results)
            self._values = {}

    def _set_means(self, results: dict[str, Any]) -> None:
        by_rank = self.peers.gather(self._values)
        for key, result in results.items():
            # In the order of the virtual ranks: the same sum on any number of processes.
            values = [value for of_rank in by_rank for value in of_rank.get(key, [])]
            result._forward_cache = _reduced(values, result.meta).to(result._forward_cache)


def _reduced(values: list[float], meta: Any) -> Tensor:
    of_all = torch.tensor(values, dtype=torch.float64)
    if meta.is_sum_reduction:
        return of_all.sum()
    return of_all.max() if meta.is_max_reduction else of_all.min() if meta.is_min_reduction else of_all.mean()


def _on_step(result: Any) -> bool:
    """Whether a logged result (Lightning's _ResultMetric) is a plain number that is logged on steps."""
    return result.is_tensor and result.meta.on_step and result._forward_cache is not None

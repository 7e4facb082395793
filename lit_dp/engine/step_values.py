"""Values logged on a step, as means over the whole global batch where a step has several virtual ranks."""

from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_dp.engine.peers import Peers


class StepValues:
    """Collects what each micro-batch of a step logged with `on_step=True`, and puts the mean of all in its place.

    Lightning keeps the last micro-batch's value of one process. Ranks exchange only on steps that are logged.
    """

    def __init__(self, trainer: Trainer, peers: Peers) -> None:
        self.trainer, self.peers = trainer, peers
        self._values: dict[str, list[float]] = {}

    def note(self, last: bool) -> None:
        """After a micro-batch has logged; `last` of the step: every process calls it together then."""
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps:  # pyright: ignore
            return
        results = {key: result for key, result in (self.trainer._results or {}).items() if _on_step(result)}
        for key, result in results.items():
            self._values.setdefault(key, []).append(float(result._forward_cache))
        if last and results:
            self._set_means(results)
            self._values = {}

    def _set_means(self, results: dict[str, Any]) -> None:
        by_rank = self.peers.gather(self._values)
        for key, result in results.items():
            # In the order of the virtual ranks: the same sum on any number of processes.
            values = torch.tensor([value for of_rank in by_rank for value in of_rank[key]], dtype=torch.float64)
            result._forward_cache = values.mean().to(result._forward_cache)


def _on_step(result: Any) -> bool:
    """Whether a logged result (Lightning's _ResultMetric) is a plain number that is logged on steps."""
    return result.is_tensor and result.meta.on_step and result._forward_cache is not None

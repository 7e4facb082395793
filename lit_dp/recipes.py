"""Recipes: how a learning rate changes while training."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dp.errors import ConfigError


class WarmupCosine(LRScheduler):
    """Linear warm-up, then half a cosine down to zero (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts).

    After t calls of `step()` the learning rate of every parameter group is its initial one times

        start + (1 - start) * t / warmup                             for t < warmup
        (1 + cos(pi * (t - warmup) / (total - warmup))) / 2          for warmup <= t < total
        0                                                            for total <= t

    Each value follows from t alone, not from the one before it, so a resumed run has the bits of one that was not
    stopped; `state_dict` holds numbers only. What a call counts, an epoch or an optimizer step, is the caller's choice,
    and `total` and `warmup` are given in it.

    Raises:
        ConfigError: not 0 <= warmup < total, or not 0 <= start <= 1.
    """

    def __init__(self, optimizer: Optimizer, total: int, warmup: int = 0, start: float = 0.01) -> None:
        if not 0 <= warmup < total:
            raise ConfigError(f"warmup is {warmup}, total {total}: set warmup to 0 or more, and total above it")
        if not 0 <= start <= 1:
            raise ConfigError(f"start is {start}: give the share of the learning rate to begin with, 0 to 1")
        self.total, self.warmup, self.start = total, warmup, start
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group after `last_epoch` calls of `step()`."""
        return [base * self._factor(self.last_epoch) for base in self.base_lrs]  # pyright: ignore[reportReturnType]

    def _factor(self, calls: int) -> float:
        if calls < self.warmup:
            return self.start + (1 - self.start) * calls / self.warmup
        if calls >= self.total:
            return 0.0
        return (1 + math.cos(math.pi * (calls - self.warmup) / (self.total - self.warmup))) / 2

"""Recipes: how a learning rate changes while training."""

from math import cos, pi

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dp.errors import ConfigError


class WarmupCosine(LRScheduler):
    """Linear warm-up, then half a cosine down to zero (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts).

    After t calls of `step()` the learning rate of every parameter group is its initial one times

        start + (1 - start) * t / warmup                       for t < warmup
        (1 + cos(pi * (t - warmup) / (total - warmup))) / 2    for t >= warmup, and 0 from t = total on

    Each value follows from t alone, so a resumed run has the bits of one that was not stopped; `state_dict` holds plain
    numbers. What a call counts, epochs or optimizer steps, is the caller's choice: `total` and `warmup` count the same.

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

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch < self.warmup:
            factor = self.start + (1 - self.start) * self.last_epoch / self.warmup
        else:
            factor = (1 + cos(pi * min(1.0, (self.last_epoch - self.warmup) / (self.total - self.warmup)))) / 2
        return [base * factor for base in self.base_lrs]

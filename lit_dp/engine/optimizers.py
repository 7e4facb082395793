"""What `configure_optimizers` may return, for a loop that is written by hand."""

from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dp.errors import ConfigError


def optimizer_and_schedulers(module: LightningModule) -> tuple[Optimizer, list[dict[str, Any]]]:
    """What `configure_optimizers` returned, in one shape.

    Raises:
        ConfigError: several optimizers, or a scheduler that follows a metric: this loop is for the plain case.
    """
    configured: Any = module.configure_optimizers()
    if isinstance(configured, dict):
        optimizers, schedulers = [configured["optimizer"]], [configured.get("lr_scheduler")]
    elif isinstance(configured, tuple):
        optimizers, schedulers = configured
    else:
        optimizers, schedulers = [configured] if isinstance(configured, Optimizer) else configured, []
    if len(optimizers) != 1:
        raise ConfigError(f"raw_ddp trains with one optimizer; configure_optimizers returned {len(optimizers)}")
    entries = [s if isinstance(s, dict) else {"scheduler": s} for s in schedulers if s is not None]
    if any("monitor" in entry or not isinstance(entry["scheduler"], LRScheduler) for entry in entries):
        raise ConfigError("raw_ddp steps schedulers per epoch or per step; this one follows a metric")
    return optimizers[0], entries


def step_schedulers(schedulers: list[dict[str, Any]], interval: str) -> None:
    """Advance the schedulers that count in `interval` ("epoch", the default of Lightning, or "step")."""
    for entry in schedulers:
        if entry.get("interval", "epoch") == interval:
            entry["scheduler"].step()

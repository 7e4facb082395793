"""Lightning's Trainer, with defaults under which what runs is really data parallel."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_dp.errors import ConfigError

CPU_PROCESSES = 2
"""Processes of one host without an accelerator: the least that exchanges gradients."""


class Trainer(pl.Trainer):
    """Every argument of Lightning's Trainer, and these defaults: all accelerators, otherwise two CPU processes.

    Args:
        accelerator: `auto` takes the accelerator that is there, or the CPU.
        devices: devices a host; `auto` takes all accelerators, or as many CPU processes as the launcher
            started on this host, or two.
        strategy: `ddp` is Lightning's own.

    Raises:
        ConfigError: Lightning refuses the arguments, or the strategy is DataParallel.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        devices: list[int] | str | int = "auto",
        strategy: str | Strategy = "ddp",
        **kwargs: Any,
    ) -> None:
        if strategy == "dp":
            raise ConfigError(
                "strategy 'dp' is torch.nn.DataParallel: one process, all traffic through one GPU, gone from"
                " Lightning since 2.0; use --trainer.strategy ddp, one process a device"
            )
        if devices == "auto" and _runs_on_cpu(accelerator):
            devices = int(os.environ.get("LOCAL_WORLD_SIZE", CPU_PROCESSES))
        try:
            super().__init__(accelerator=accelerator, devices=devices, strategy=strategy, **kwargs)
        except (MisconfigurationException, ValueError) as error:
            raise ConfigError(f"the trainer cannot be built: {error}") from error


def _runs_on_cpu(accelerator: str | Accelerator) -> bool:
    return accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())

"""Lightning's Trainer, with defaults under which what runs is really data parallel, and a check of who started it."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_dp.engine import launch
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError


class Trainer(pl.Trainer):
    """Every argument of Lightning's Trainer, and these defaults: all accelerators, otherwise two CPU processes.

    Args:
        accelerator: `auto` takes the accelerator that is there, or the CPU.
        devices: devices a host; `auto` takes all accelerators, or as many CPU processes as the launcher
            started on this host, or two.
        num_nodes: hosts.
        strategy: `exact_ddp` is ours, `ddp` Lightning's own.
        use_distributed_sampler: False leaves every loader as it is, on all ranks.

    Raises:
        ConfigError: Lightning refuses the arguments, the strategy is DataParallel, or the launcher started another
            number of processes than the trainer would use.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        strategy: str | Strategy = "exact_ddp",
        use_distributed_sampler: bool = True,
        **kwargs: Any,
    ) -> None:
        if strategy == "dp":
            raise ConfigError(
                "strategy 'dp' is torch.nn.DataParallel: one process, all traffic through one GPU, gone from"
                " Lightning since 2.0; use --trainer.strategy ddp, one process a device"
            )
        self.launch = launch.detect()
        available = 0 if accelerator == "cpu" else torch.accelerator.device_count()
        devices = launch.processes_per_host(self.launch, devices, available)
        single = isinstance(strategy, SingleDeviceStrategy) or (strategy == "auto" and _count(devices, available) == 1)
        launch.check(self.launch, _count(devices, available), num_nodes, distributed=not single)
        exact = strategy == "exact_ddp" or isinstance(strategy, ExactDDPStrategy)
        try:
            super().__init__(
                accelerator=accelerator,
                devices=devices,
                num_nodes=num_nodes,
                strategy=strategy,
                # exact_ddp shares loaders out itself, and can only where Lightning has not done so before
                use_distributed_sampler=use_distributed_sampler and not exact,
                **kwargs,
            )
        except (MisconfigurationException, ValueError) as error:
            raise ConfigError(f"the trainer cannot be built: {error}") from error
        if isinstance(self.strategy, ExactDDPStrategy):
            self.strategy.shards_data = use_distributed_sampler


def _count(devices: Any, available: int) -> int:
    """Processes a host that Lightning makes of its `devices` argument."""
    if isinstance(devices, str):
        devices = [d for d in devices.split(",") if d] if "," in devices else int(devices)
    if isinstance(devices, int):
        return available if devices == -1 else devices
    return len(devices)

"""Lightning's Trainer, with defaults under which what runs is really data parallel, and a check of who started it."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from lit_dp.engine import launch
from lit_dp.engine.checkpoints import LastCheckpoint
from lit_dp.engine.exchange_state import ExchangeState
from lit_dp.engine.guards import MonitoredValues
from lit_dp.engine.logged_state import LoggedState
from lit_dp.engine.peers import Peers
from lit_dp.engine.plan import Placement, plan_rows, table
from lit_dp.engine.resume import Resume
from lit_dp.engine.sharding import Sharder
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
        virtual_ranks = getattr(strategy, "virtual_ranks", None)
        threads, why = launch.set_cpu_threads(self.launch, _count(devices, available), virtual_ranks=virtual_ranks)
        self.cpu_threads = f"{threads} ({why})"
        exact = strategy == "exact_ddp" or isinstance(strategy, ExactDDPStrategy)
        if exact:
            own = [MonitoredValues(), ExchangeState(), Resume(), LoggedState()]
            callbacks = [*own, *_as_list(kwargs.get("callbacks"))]
            kwargs["callbacks"] = sorted(callbacks, key=lambda c: not isinstance(c, LastCheckpoint))
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

    def plan(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        devices: int | str | None = None,
        nodes: int | None = None,
    ) -> str:
        """Print what a training would do, without training.

        Args:
            model: the module to train.
            datamodule: its data; without one, the module's own train_dataloader.
            devices: devices a host, whether they are here or not; those of the config by default.
            nodes: hosts; those of the config by default.

        Returns:
            The table that was printed.
        """
        exact = self.strategy if isinstance(self.strategy, ExactDDPStrategy) else ExactDDPStrategy()
        available = torch.accelerator.device_count()
        a_host = _count(launch.processes_per_host(self.launch, devices or self.num_devices, available), available)
        kind = str(torch.accelerator.current_accelerator()) if available else "cpu"
        threads, why = launch.set_cpu_threads(self.launch, a_host, virtual_ranks=exact.virtual_ranks)
        place = Placement(self.launch.why, nodes or self.num_nodes, a_host, kind, f"{threads} ({why})")
        if datamodule is not None:
            datamodule.trainer = self
            datamodule.planned_world_size = place.world_size  # pyright: ignore[reportAttributeAccessIssue]
            datamodule.prepare_data()
            datamodule.setup("fit")
        model.trainer = self
        self.strategy.connect(model)
        self.strategy.setup_optimizers(self)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        sharder = Sharder(Peers(0, place.world_size), seed, exact.tail, exact.seeded_draws, exact.virtual_ranks)
        batches = sharder.train_batches((datamodule or model).train_dataloader())
        rows = plan_rows(place, self, model, batches)
        print(table(rows))
        return table(rows)


def _as_list(callbacks: Any) -> list[Any]:
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks is not None else []


def _count(devices: Any, available: int) -> int:
    """Processes a host that Lightning makes of its `devices` argument."""
    if isinstance(devices, str):
        devices = [d for d in devices.split(",") if d] if "," in devices else int(devices)
    if isinstance(devices, int):
        return available if devices == -1 else devices
    return len(devices)

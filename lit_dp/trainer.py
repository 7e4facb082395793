"""Lightning's Trainer, with defaults under which what runs is really data parallel, and a check of who started it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import RunningStage

from lit_dp.engine import launch, restart, resume_choice
from lit_dp.engine.checkpoints import LastCheckpoint
from lit_dp.engine.configured import Configured
from lit_dp.engine.exchange_state import ExchangeState
from lit_dp.engine.guards import guards
from lit_dp.engine.lean import NoProfiler, lean
from lit_dp.engine.logged_state import LoggedState
from lit_dp.engine.peers import Peers
from lit_dp.engine.plan import Placement, plan_rows, table
from lit_dp.engine.preemption import Preemption
from lit_dp.engine.rank import FirstToHear
from lit_dp.engine.resume import Resume
from lit_dp.engine.sharding import Sharder
from lit_dp.engine.step_profile import StepProfile
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError


class Trainer(pl.Trainer):
    """Every argument of Lightning's Trainer, and these defaults: all accelerators, otherwise two CPU processes.

    Args:
        accelerator: `auto` takes the accelerator that is there, or the CPU.
        devices: devices a host; `auto` takes all accelerators, or as many CPU processes as the launcher
            started on this host, or two.
        num_nodes: hosts; `auto` takes as many as the launcher says, which may differ when it starts the job again.
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
        num_nodes: int | Literal["auto"] = 1,
        strategy: str | Strategy = "exact_ddp",
        use_distributed_sampler: bool = True,
        **kwargs: Any,
    ) -> None:
        if strategy == "dp":
            raise ConfigError(
                "strategy 'dp' is torch.nn.DataParallel: one process, all traffic through one GPU, gone from"
                " Lightning since 2.0; use --trainer.strategy ddp, one process a device"
            )
        self.step_profile: StepProfile | None = None
        """Of the last `fit` with `profile`."""
        self.launch = launch.detect()
        available = 0 if accelerator == "cpu" else torch.accelerator.device_count()
        devices = launch.processes_per_host(self.launch, devices, available)
        num_nodes = launch.hosts(self.launch, num_nodes)
        single = isinstance(strategy, SingleDeviceStrategy) or (strategy == "auto" and _count(devices, available) == 1)
        launch.check(self.launch, _count(devices, available), num_nodes, distributed=not single)
        virtual_ranks = getattr(strategy, "virtual_ranks", None)
        threads, why = launch.set_cpu_threads(self.launch, _count(devices, available), virtual_ranks=virtual_ranks)
        self.cpu_threads = f"{threads} ({why})"
        exact = strategy == "exact_ddp" or isinstance(strategy, ExactDDPStrategy)
        if exact:
            own = [
                *guards(getattr(strategy, "nonfinite", "stop")),
                FirstToHear(),
                ExchangeState(),
                Configured(),
                Resume(),
                LoggedState(),
                Preemption(),
            ]
            callbacks = [*own, *_as_list(kwargs.get("callbacks"))]
            kwargs["callbacks"] = sorted(callbacks, key=lambda c: not isinstance(c, LastCheckpoint))
        kwargs["callbacks"] = [*_as_list(kwargs.get("callbacks")), restart.JobMark()]
        if not kwargs.get("barebones"):
            kwargs["profiler"] = kwargs.get("profiler") or NoProfiler()
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

    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        resume: str | None = None,
        resume_force: bool = False,
        profile: Literal["step"] | None = None,
    ) -> None:
        """Train, from the beginning or from a checkpoint.

        Args:
            model: module to train.
            train_dataloaders: as Lightning's.
            val_dataloaders: as Lightning's.
            datamodule: as Lightning's.
            ckpt_path: as `resume`; Lightning's name for it.
            weights_only: as Lightning's; checkpoints are loaded so unless False is given.
            resume: auto, the newest valid checkpoint of the run folder, if there is one; required, fails without one;
                never; or a checkpoint's path. A job that torchrun or Slurm has started again goes on from what it has
                saved itself, if nothing or anything but never is given.
            resume_force: resume although batch size, data or ranks have changed, so that it cannot be exact.
            profile: step splits the time of every step into parts, printed when the training ends (`StepProfile`).

        Raises:
            ConfigError: there is nothing to resume from, or it cannot be resumed exactly.
        """
        restart.begin_fit()
        path = resume_choice.agreed(self, restart.mode(resume, ckpt_path))
        for callback in self.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Resume):
                callback.force = resume_force
        try:
            with lean(), self._profiled(profile):
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, weights_only)
        finally:
            resume_choice.forget()

    @contextmanager
    def _profiled(self, what: str | None) -> Iterator[None]:
        self.step_profile = StepProfile() if what == "step" else None
        if self.step_profile is None:
            yield
            return
        if not isinstance(self.profiler, NoProfiler):  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError("--profile step and --trainer.profiler measure one another: use one of them")
        callbacks: list[Any] = self.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks.append(self.step_profile)
        try:
            yield
        finally:
            callbacks.remove(self.step_profile)

    @property
    def training(self) -> bool:
        """As Lightning's, which compares texts in lower case, and is asked 25 times a step."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pl.Trainer.training.__set__(self, value)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """As Lightning's. All ranks call it."""
        if isinstance(self.strategy, ExactDDPStrategy):
            self.strategy.meet("save_checkpoint")
        super().save_checkpoint(filepath, weights_only, storage_options)

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

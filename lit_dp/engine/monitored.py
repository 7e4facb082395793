"""What callbacks act upon must be the same on all ranks: a value of one rank's own is found before it is used."""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dp.engine.peers import Peers
from lit_dp.errors import ConfigError

TOLERANCE = 1e-6
"""Relative: a value that all ranks computed from the same gathered numbers may differ in its last bits on GPUs."""


class MonitoredValues(Callback):
    """Stops the run, on all ranks, where a monitored value differs between ranks (FAULTS 22).

    Monitored is what a callback (ModelCheckpoint, EarlyStopping) or a scheduler (ReduceLROnPlateau) names in `monitor`.
    Costs one small gather an end of validation and of a training epoch. Lightning runs ModelCheckpoint last, so that
    nothing is saved under a wrong value; one logged in the module's own `on_train_epoch_end` is only seen thereafter.
    """

    def __init__(self) -> None:
        self._late: set[str] = set()  # names without a value when the last training epoch ended

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._compare(trainer, monitored(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = monitored(trainer)
        self._late = names - trainer.callback_metrics.keys()
        self._compare(trainer, names - self._late)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._compare_late(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._compare_late(trainer)

    def _compare_late(self, trainer: Trainer) -> None:
        if self._late:
            self._compare(trainer, self._late)
            self._late = set()

    def _compare(self, trainer: Trainer, names: set[str]) -> None:
        if trainer.world_size == 1:
            return
        metrics = trainer.callback_metrics  # reduces what is not reduced yet: all ranks must read it
        mine = {name: float(metrics[name]) for name in sorted(names) if name in metrics}
        values = Peers(trainer.global_rank, trainer.world_size).gather(mine)
        for name in sorted(set().union(*values)):
            require_agreement(name, [of_rank.get(name) for of_rank in values])


def monitored(trainer: Trainer) -> set[str]:
    """Names of the values that callbacks and schedulers of `trainer` act upon."""
    callbacks = [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # pyright: ignore
    schedulers = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return {name for name in (*callbacks, *schedulers) if isinstance(name, str)}


def require_agreement(name: str, values: list[Any]) -> None:
    """Raise ConfigError if values by rank differ; None stands for a rank that has none."""
    if all(_same(value, values[0]) for value in values):
        return
    listed = ", ".join(f"rank {rank}: {'not logged' if v is None else v}" for rank, v in enumerate(values))
    raise ConfigError(
        f"{name!r} is monitored and differs between ranks ({listed}), which would act on it differently: log it with"
        " sync_dist=True, or log a torchmetrics object"
    )


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))

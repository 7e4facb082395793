"""Which checkpoints a run keeps: the best one and the last one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor

from lit_dp.engine.position import Moment
from lit_dp.engine.resume import Resume
from lit_dp.errors import ConfigError


class BestCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that gives ties to the later epoch: on a small validation set the first of many equal values is
    the least trained. It saves between steps, not between the micro-batches of one. Arguments are ModelCheckpoint's."""

    def __init__(
        self,
        filename: str | None = "best",
        monitor: str | None = "val/acc",
        mode: str = "max",
        enable_version_counter: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filename=filename, monitor=monitor, mode=mode, enable_version_counter=enable_version_counter, **kwargs
        )

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        tie = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        return tie or super().check_monitor_top_k(trainer, current)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        # With every_n_train_steps Lightning looks again after each micro-batch: the gradients of those before are in no
        # file, and which they are depends on the number of processes.
        if not trainer.fit_loop._should_accumulate():
            super().on_train_batch_end(trainer, *args)


class LastCheckpoint(Callback):
    """Keeps `checkpoints/last.ckpt` in the run folder. It is saved between two steps, when everything that belongs to
    the last one is over (validation, schedulers, logging): a run goes on from it as if it had not been stopped.

    Args:
        every_n_steps: optimizer steps between two saves; None saves when an epoch is over, as is done in any case.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"last.every_n_steps is {every_n_steps}: give 1 or more, or leave it out")
        self.every_n_steps = every_n_steps
        self._path: str | None = None
        self._saved_at = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._path, self._saved_at = last_path(trainer), trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        steps = trainer.global_step
        if steps == self._saved_at or batch_idx % trainer.accumulate_grad_batches:
            return
        if batch_idx == 0 or (self.every_n_steps is not None and steps % self.every_n_steps == 0):
            self.save(trainer, "step")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes before other callbacks' (see Trainer): one may put averaged weights in the place of trained ones."""
        if trainer.global_step != self._saved_at:
            self.save(trainer, "other")

    def save(self, trainer: Trainer, moment: Moment) -> str:
        """On all ranks, where nothing of a step is under way; `moment` says what comes next. Returns the file."""
        assert self._path is not None, "on_train_start comes first"
        save(trainer, self._path, moment)
        self._saved_at = trainer.global_step
        return self._path


def last_path(trainer: Trainer) -> str:
    """Of the last checkpoint; on all ranks: rank 0's folder is broadcast."""
    return os.path.join(trainer.log_dir or trainer.default_root_dir, "checkpoints", "last.ckpt")


def save(trainer: Trainer, path: str, moment: Moment) -> None:
    """Save a checkpoint that says what comes next. All ranks call it, between two steps or within a validation."""
    resume = next((c for c in trainer.callbacks if isinstance(c, Resume)), None)  # pyright: ignore
    if resume is not None:
        resume.moment = moment
    try:
        with _trained_weights(trainer) if moment == "validation" else nullcontext():
            trainer.save_checkpoint(path)
    finally:
        if resume is not None:
            resume.moment = "other"


@contextmanager
def _trained_weights(trainer: Trainer) -> Iterator[None]:
    """Within a validation averaged weights stand in the module, and the trained ones in their callback."""
    callbacks: list[Any] = [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # pyright: ignore
    try:
        for callback in reversed(callbacks):
            callback._swap_models(trainer.lightning_module)
        yield
    finally:
        for callback in callbacks:
            callback._swap_models(trainer.lightning_module)

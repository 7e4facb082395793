"""What a run prints while it goes: one line an epoch, on rank 0."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

SECONDS_BETWEEN_LINES = 30.0


class EpochLines(Callback):
    """Prints a plain line with all metrics after each epoch, and a short one twice a minute within long epochs.

    Works in a terminal, above Lightning's progress bar, and in a log file, where a bar would be noise.
    """

    def __init__(self) -> None:
        self._epoch_start = self._last_line = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_start = self._last_line = time.monotonic()  # where it goes on in the midst of an epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_start = self._last_line = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES or not trainer.is_global_zero:
            return
        self._last_line = now
        loss = f"  loss {float(outputs['loss']):.4g}" if isinstance(outputs, dict) and "loss" in outputs else ""
        print(f"{_epoch(trainer)}  batch {batch_idx + 1:,}/{trainer.num_training_batches:,}{loss}", flush=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics  # reduces what is not reduced yet: all ranks must read it
        if trainer.is_global_zero:
            values = "  ".join(f"{name} {_short(value)}" for name, value in sorted(metrics.items()))
            print(f"{_epoch(trainer)}  {values}  {time.monotonic() - self._epoch_start:.1f} s", flush=True)


def _epoch(trainer: Trainer) -> str:
    last = trainer.max_epochs if trainer.max_epochs not in (None, -1) else "?"
    return f"epoch {trainer.current_epoch + 1:>{len(str(last))}}/{last}"


def _short(value: Tensor | float) -> str:
    return f"{float(value):.4f}"

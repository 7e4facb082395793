"""Which checkpoints a run keeps: the best one and the last one."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor


class BestCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that gives ties to the later epoch: on a small validation set the first of many equal values is
    the least trained. Arguments are ModelCheckpoint's."""

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


def last_checkpoint() -> ModelCheckpoint:
    """Keeps checkpoints/last.ckpt. ModelCheckpoint(save_last=True) would write it only when a new best was found."""
    return ModelCheckpoint(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)

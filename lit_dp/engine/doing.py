"""What a rank is doing, for the message of a failure: which step or batch, with which samples."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lit_dp.engine.loaders import last_delivered

SAMPLES = 8


def doing(trainer: Trainer) -> tuple[str, str]:
    """Where in the training or evaluation this rank is, and the samples of the batch in use: `, on samples 3, 1`."""
    stage = trainer.state.stage
    if stage is None or trainer.state.fn is None:
        return "", ""
    epoch, step = trainer.current_epoch + 1, trainer.global_step
    of_fit = trainer.state.fn.value == "fit"
    if not of_fit or not trainer.training:
        loop: Any = trainer._active_loop
        batch = loop.batch_progress.current if loop is not None else None
        after = f" after epoch {epoch}, step {step:,}" if of_fit else ""
        if batch is None or batch.ready == batch.completed:
            return f"{stage.value}{after}", ""
        return f"{stage.value}{after}, batch {batch.ready:,}", _samples(_evaluated(trainer))
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if not epochs.started:
        return "before the first step", ""
    if batch.ready == batch.completed:
        return f"epoch {epoch}, after step {step:,}", ""
    if batch.processed == batch.ready and batch.ready % trainer.accumulate_grad_batches == 0:
        return f"epoch {epoch}, at the end of step {step:,}", _samples(trainer.train_dataloader)
    return f"epoch {epoch}, step {step + 1:,}", _samples(trainer.train_dataloader)


def _evaluated(trainer: Trainer) -> Any:
    if trainer.testing:
        return trainer.test_dataloaders
    return trainer.predict_dataloaders if trainer.predicting else trainer.val_dataloaders


def _samples(loaders: Any) -> str:
    samples = [str(s) for loader in CombinedLoader(loaders, "sequential").flattened for s in last_delivered(loader)]
    more = " ..." if len(samples) > SAMPLES else ""
    return f", on samples {', '.join(samples[:SAMPLES])}{more}" if samples else ""

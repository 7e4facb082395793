"""(c) Lightning's `ddp` as it comes: a LightningModule as the docs write it, a plain loader, the Trainer's defaults.

    python -m lit_dp.commands.bench_lightning --job cnn --data ../shared/data --root FOLDER --first-step FILE

stops after one step, and says when that was: nothing of ours is imported that would be slow.
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lit_dp.commands.bench_clock import Clock, note_first_step
from lit_dp.commands.bench_jobs import JOBS, LEARNING_RATE, MOMENTUM, Data, Job


class Plain(LightningModule):
    """What one writes after reading Lightning's introduction."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self.network(images)
        self.log("val_loss", cross_entropy(logits, labels), sync_dist=True)
        self.log("val_acc", (logits.argmax(dim=1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE, MOMENTUM)


class StepClock(Callback):
    """A `Clock` in a Trainer. The training begins when the sanity check is over, and ends when everything has ended.

    An optimizer step of several micro-batches begins with the first of them.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self._begun = False

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._begun:  # there was no sanity check
            self._begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.clock.tick()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.end()

    def _begin(self) -> None:
        self.clock.begin()
        self._begun = True


class FirstStep(Callback):
    """Notes when this rank has taken its first step, by `note_first_step`."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            note_first_step(self.file)


def train(job: Job, data: Data, processes: int, root: str, **settings: Any) -> Trainer:
    """Train; the Trainer that did. `settings` are the Trainer's."""
    trainer = Trainer(
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        default_root_dir=root,
        logger=CSVLogger(root),
        **{"accelerator": "gpu" if torch.cuda.is_available() else "cpu", **settings},
    )
    train_loader, val_loader = (DataLoader(data.tutorial(train), job.batch, shuffle=train) for train in (True, False))
    trainer.fit(Plain(job.build(plain=True)), train_loader, val_loader)
    return trainer


def main() -> None:
    """Until the first step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--data", default="data")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--root", required=True)
    parser.add_argument("--first-step", required=True)
    options = parser.parse_args()
    data, callbacks = Data(options.job, options.data), [FirstStep(options.first_step)]
    train(JOBS[options.job], data, options.processes, options.root, max_steps=1, callbacks=callbacks)


if __name__ == "__main__":
    main()

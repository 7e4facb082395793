"""(g) Lightning with nothing: `Trainer(barebones=True)` around the tuned loop's own batches, nothing logged or saved.

What lies between this and the tuned loop is what Lightning's loops take: no LightningModule is trained for less.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from lit_dp.commands.bench_clock import Clock
from lit_dp.commands.bench_jobs import LEARNING_RATE, MOMENTUM, Data, Images, Job, scaled
from lit_dp.commands.bench_lightning import StepClock
from lit_dp.commands.bench_loops import Validated, gathered, over_ranks, place


class Bare(LightningModule):
    """The tuned loop's step and validation, and no `self.log`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.validated = Validated(0.0, 0.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.network(scaled(images)), labels)

    def on_validation_epoch_start(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.network(scaled(images))
        self._sums[0] += cross_entropy(logits, labels).double() * len(labels)
        self._sums[1] += (logits.argmax(dim=1) == labels).sum()
        self._sums[2] += len(labels)

    def on_validation_epoch_end(self) -> None:
        self.validated = over_ranks(self._sums)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE, MOMENTUM)


class Batches:
    """This rank's, gathered from memory: a loader without a DataLoader."""

    def __init__(self, data: Images, batch: int, shuffle: bool) -> None:
        self.device, world_size, rank = place()
        self.data, self.batch, self.epoch = data, batch, 0
        own: Any = range(len(data.labels))
        self._order: Any = DistributedSampler(own, world_size, rank) if shuffle else own[rank::world_size]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(self._order, DistributedSampler):
            self._order.set_epoch(self.epoch)
        self.epoch += 1
        for indices in torch.tensor(list(self._order)).split(self.batch):
            yield gathered(self.data, indices, self.device)

    def __len__(self) -> int:
        return -(-len(self._order) // self.batch)


def train(job: Job, data: Data, processes: int, epochs: int) -> tuple[Clock, Validated]:
    """Train; when its steps began, and the last validation."""
    clock = StepClock()
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=processes,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if processes > 1 else "auto",
        max_epochs=epochs,
        callbacks=[clock],
        use_distributed_sampler=False,
        barebones=True,
    )
    module = Bare(job.build())
    train_batches, val_batches = (Batches(data.held(train), job.batch, shuffle=train) for train in (True, False))
    trainer.fit(module, train_batches, val_batches)
    return clock.clock, module.validated

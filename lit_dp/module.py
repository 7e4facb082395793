"""The starter's LightningModule: image (or any) classification with a network, optimizer and schedule from YAML.

Read it beside `raw_ddp.py`; replace it by your own with `--model.class_path`.
"""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from lit_dp.errors import ConfigError

Batch = tuple[Tensor, ...]
"""(inputs (B, ...), labels int64 (B,)) and, from ImageDataModule, the samples' indices int64 (B,)."""


class LitClassifier(LightningModule):
    """Cross-entropy training of any network that maps (B, ...) to logits (B, num_classes).

    Metrics are torchmetrics objects: every epoch value comes from counts pooled over batches and ranks, not from
    a mean of means. Logged: `train/loss`; `val/` and `test/` `loss`, `acc`, `f1` (macro) and, above 5 classes, `top5`.

    Args:
        network: the torch.nn.Module to train: ours, torchvision's or your own, by class_path.
        num_classes: classes that the labels count; the network must give as many logits.
        optimizer: any torch optimizer; AdamW if none is given.
        lr_scheduler: any torch LR scheduler; none keeps the learning rate.
        lr_interval: whether the scheduler steps once an `epoch` or once an optimizer `step`.
        label_smoothing: share of each target spread evenly over all classes, 0 to 1.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        # No save_hyperparameters: the run's config.yaml says how to build this module again, and a checkpoint with
        # classes in it would not load with weights_only=True.
        self.network = network
        self.num_classes = num_classes
        # Not the argument's default: jsonargparse would hand its settings on to any other class that a config names.
        self.make_optimizer = optimizer or torch.optim.AdamW
        self.make_lr_scheduler = lr_scheduler
        self.lr_interval = lr_interval
        self.label_smoothing = label_smoothing
        self.metrics = nn.ModuleDict({"val": _metrics(num_classes, "val/"), "test": _metrics(num_classes, "test/")})
        self.losses = nn.ModuleDict({"val": MeanMetric(), "test": MeanMetric()})
        self.confusion = MulticlassConfusionMatrix(num_classes)
        self.confusion_matrix: Tensor | None = None
        """Counts (true class, predicted class) int64 of the last `test`, over all ranks; None before."""

    def setup(self, stage: str) -> None:
        """Compare what the data holds with what the network gives, before the first step; on every rank.

        Raises:
            ConfigError: the numbers of classes differ.
        """
        for loss in self.losses.values():
            loss.set_dtype(_sums(self.device))  # pyright: ignore[reportCallIssue]
        data = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        self.check(data)
        if shape := getattr(data, "sample_shape", None):
            self.example_input_array = torch.zeros(1, *shape)

    def check(self, data: Any) -> None:
        """Compare the classes of a data module, where it tells them, with this module's.

        Raises:
            ConfigError: the numbers differ.
        """
        in_data = getattr(data, "num_classes", None)
        if in_data is not None and in_data != self.num_classes:
            raise ConfigError(
                f"the data has {in_data} classes, model.num_classes is {self.num_classes}: set"
                f" --model.num_classes {in_data} and give the network as many outputs"
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (B, num_classes) of inputs (B, ...)."""
        logits = self.network(inputs)
        if logits.shape[-1] != self.num_classes:
            raise ConfigError(
                f"the network gives {logits.shape[-1]} outputs a sample, model.num_classes is {self.num_classes}:"
                " make them equal in the config"
            )
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, labels, *_ = batch
        loss = cross_entropy(self(inputs), labels, label_smoothing=self.label_smoothing)
        self.log(
            "train/loss",
            loss.to(_sums(loss.device)),
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(labels),
        )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.confusion.update(self._evaluate(batch, "test"), batch[1])

    def on_test_epoch_end(self) -> None:
        self.confusion_matrix = self.confusion.compute()
        self.confusion.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Class and its probability, (B,) each, and the samples' indices where the batch holds them."""
        inputs, *rest = batch if isinstance(batch, (tuple, list)) else (batch,)
        probability, predicted = self(inputs).softmax(dim=-1).max(dim=-1)
        index = {"index": rest[1]} if len(rest) > 1 else {}
        return {**index, "class": predicted, "probability": probability}

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_lr_scheduler is None:
            return optimizer
        scheduler = self.make_lr_scheduler(optimizer)
        entry: dict[str, Any] = {"scheduler": scheduler, "interval": self.lr_interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            entry["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": entry}

    def _evaluate(self, batch: Batch, stage: str) -> Tensor:
        inputs, labels, *_ = batch
        logits = self(inputs)
        loss: Any = self.losses[stage]
        metrics: Any = self.metrics[stage]
        # Without smoothing, so that losses of differently trained models can be compared.
        loss.update(cross_entropy(logits, labels), weight=len(labels))
        metrics.update(logits, labels)
        self.log(f"{stage}/loss", loss, batch_size=len(labels))
        self.log_dict(metrics, batch_size=len(labels))
        return logits


def _sums(device: torch.device) -> torch.dtype:
    """Sums in float64 do not depend on the order of their terms, and so not on the number of processes: float32 losses
    leave 29 bits for the carry. Apple's GPUs do not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _metrics(num_classes: int, prefix: str) -> MetricCollection:
    metrics = {"acc": MulticlassAccuracy(num_classes, average="micro"), "f1": MulticlassF1Score(num_classes)}
    if num_classes > 5:
        metrics["top5"] = MulticlassAccuracy(num_classes, average="micro", top_k=5)
    # Compute groups merge metrics whose counts are equal after the first batch: top-5 would become accuracy wherever
    # the first batch is all right (torchmetrics 1.9.0).
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)  # pyright: ignore[reportArgumentType]

"""`self.log` again: the values that Lightning's own gives, epoch by epoch, whatever is logged and how."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lit_dp.engine import lean, lean_log
from tests.training import quiet_trainer

EPOCHS, BATCHES = 3, 5
REDUCTIONS: dict[str, Any] = {"mean": "mean", "max": torch.max, "min": "min", "sum": sum}


class Logs(LightningModule):
    """Logs in every way that there is, and keeps what has become of it after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.metric, self.epochs = nn.Linear(2, 1), MeanMetric(), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        each = self.layer(batch[0])
        loss = each.square().mean()
        for name, reduction in REDUCTIONS.items():
            self.log(name, loss, on_step=False, on_epoch=True, reduce_fx=reduction)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=1 + batch_idx)
        self.log("positional", loss, False, False, False, True)
        self.log("number", 0.5 * batch_idx, on_epoch=True)
        self.log("shape (1,)", each[0], on_epoch=True)
        self.log("half", loss.half(), on_epoch=True)
        self.log("twice", loss, on_step=False, on_epoch=True)
        self.log("twice", 2 * loss, on_step=False, on_epoch=True)
        self.metric.update(each.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from another hook", float(batch_idx), on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.layer(batch[0]).mean())
        self.log(f"sum {dataloader_idx}", self.layer(batch[0]).sum(), add_dataloader_idx=False)
        if dataloader_idx == 0:
            if batch_idx == 0:
                self.log("alike", self.layer(batch[0]).sum())
            self.log("alike", self.layer(batch[0]).mean(), add_dataloader_idx=False)

    def on_train_epoch_end(self) -> None:
        metrics = {**self.trainer.callback_metrics, **self.trainer.logged_metrics, **self.trainer.progress_bar_metrics}
        self.epochs.append({name: float(value) for name, value in metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def epochs_of(monkeypatch: pytest.MonkeyPatch, log: Any, module: LightningModule | None = None) -> Any:
    """What has been logged after each epoch, with `log` as LightningModule's."""
    kept = [replacement for replacement in lean._REPLACEMENTS if replacement[1] != "log"]
    monkeypatch.setattr(lean, "_REPLACEMENTS", [*kept, (LightningModule, "log", log)])
    torch.manual_seed(0)
    module = module or Logs()
    data = TensorDataset(torch.rand(2 * BATCHES - 1, 2))  # the last batch has one sample
    train, val = DataLoader(data, 2), [DataLoader(data, 2), DataLoader(data, 3)]
    quiet_trainer(devices=1, max_epochs=EPOCHS, num_sanity_val_steps=1).fit(module, train, val)
    return module.epochs


def test_every_value_is_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (epochs_of(monkeypatch, log) for log in (lean_log.log, lean_log._log))
    assert len(theirs) == EPOCHS
    assert {"mean", "both_step", "both_epoch", "twice", "metric", "val/dataloader_idx_1"} <= set(theirs[-1])
    assert theirs[0] != theirs[1]
    assert ours == theirs


def calls_of_lightnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that Lightning's own `log` was called with in a training."""
    names: list[str] = []
    lightnings = lean_log._log

    def noted(module: Any, name: str, *args: Any, **kwargs: Any) -> None:
        names.append(name)
        lightnings(module, name, *args, **kwargs)

    monkeypatch.setattr(lean_log, "_log", noted)
    epochs_of(monkeypatch, lean_log.log)
    return names


def test_lightning_is_asked_once_an_epoch_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    names = calls_of_lightnings(monkeypatch)
    assert names.count("mean") == EPOCHS  # the first of a step: an epoch begins with it
    for name in (*REDUCTIONS, "both", "number", "shape (1,)", "half", "metric"):
        assert 1 <= names.count(name) <= EPOCHS, name
    assert names.count("positional") == EPOCHS * BATCHES


def test_a_log_that_forgets_how_many_samples_there_are_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = epochs_of(monkeypatch, lean_log._log)
    monkeypatch.setattr(_ResultCollection, "_extract_batch_size", lambda *_: 1)
    ours = epochs_of(monkeypatch, lean_log.log)
    assert ours[0]["both_epoch"] != theirs[0]["both_epoch"]


def test_other_arguments_are_refused_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Otherwise(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 3:
                self.log("mean", loss, on_step=True, on_epoch=True)
            return loss

    with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
        epochs_of(monkeypatch, lean_log.log, Otherwise())


def test_nothing_is_kept_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs_of(monkeypatch, lean_log.log)
    assert lean_log._known == {}

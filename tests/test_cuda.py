"""On CUDA the host runs ahead of the device: a step does not wait for it. Needs a GPU."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import ExactDDPStrategy, LitClassifier, Trainer
from lit_dp.engine.nonfinite import Mode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
STEPS, WARM_UP = 12, 5


class WatchSyncs(Callback):
    """Has torch warn of every operation for which the host waits, from a batch's start to its end."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("warn" if batch_idx >= WARM_UP else "default")

    def on_train_batch_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


class Waits(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        loss.item()


def syncs_per_step(nonfinite: Mode, *callbacks: Callback) -> float:
    data = TensorDataset(torch.rand(8 * STEPS, 1, 8, 8), torch.randint(10, (8 * STEPS,)))
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        strategy=ExactDDPStrategy(nonfinite=nonfinite),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[WatchSyncs(), *callbacks],
    )
    loader = DataLoader(data, 8, pin_memory=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(LitClassifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10), loader, loader)
    waited = [warning for warning in said if "synchronizing CUDA operation" in str(warning.message)]
    return len(waited) / (STEPS - WARM_UP)


def test_a_step_waits_for_nothing() -> None:
    assert syncs_per_step("ignore") == 0


def test_the_guard_waits_once() -> None:
    """Before a step it must know whether the gradients are finite."""
    assert syncs_per_step("stop") == 1


def test_a_step_that_waits_is_seen() -> None:
    assert syncs_per_step("ignore", Waits()) >= 1

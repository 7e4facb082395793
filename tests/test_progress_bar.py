"""The bar is drawn at a bounded rate, and shows an epoch's last batch."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from torch.utils.data import DataLoader, TensorDataset

from lit_dp.engine import progress_bar
from lit_dp.engine.progress_bar import DRAWINGS_PER_SECOND, ProgressBar
from tests.test_lean import Watched
from tests.training import quiet_trainer

BATCHES = 40


def shown(monkeypatch: pytest.MonkeyPatch, seconds_a_batch: float) -> list[int]:
    """Batches after which it looks up what it shows, when each takes that long by a clock of our own."""
    looked: list[int] = []
    now = [0.0]

    def clock() -> float:
        now[0] += seconds_a_batch
        return now[0]

    def look(self: Any, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        looked.append(batch_idx)

    monkeypatch.setattr(RichProgressBar, "on_train_batch_end", look)
    monkeypatch.setattr(progress_bar, "monotonic", clock)
    loader = DataLoader(TensorDataset(torch.rand(BATCHES, 2)), 1)
    trainer = quiet_trainer(
        devices=1, max_epochs=1, limit_val_batches=0, callbacks=[ProgressBar()], enable_progress_bar=True
    )
    trainer.fit(Watched(), loader, loader)
    return looked


def test_it_is_looked_up_as_often_as_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProgressBar().refresh_rate == DRAWINGS_PER_SECOND == 1
    assert shown(monkeypatch, 0.25) == [*range(0, BATCHES, 4), BATCHES - 1]


def test_slow_batches_are_all_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, 1.5) == list(range(BATCHES))

"""From a loader to a step: draws on the way have a cause, if there are any; the starter's batches are moved whole."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import DataHooks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import ImageDataModule
from lit_dp.datasets import Batch
from lit_dp.engine import strategy
from lit_dp.engine.randomness import TRANSFER_HOOKS, draws_on_the_way
from tests.training import quiet_trainer


class Steps(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Ones(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 1)), 2)


class Noisy(Ones):
    """Draws on the way, as augmentation on the device does."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.drawn.append(float(torch.rand(())))
        return batch


@pytest.mark.parametrize("hook", TRANSFER_HOOKS)
def test_a_hook_of_ones_own_may_draw(hook: str) -> None:
    assert not draws_on_the_way(Steps(), None)
    assert not draws_on_the_way(Steps(), Ones())
    of_class = type("Own", (Ones,), {hook: lambda self, batch, *_: batch})
    assert draws_on_the_way(Steps(), of_class())
    assert draws_on_the_way(type("OwnModule", (Steps,), {hook: lambda self, batch, *_: batch})(), Ones())
    of_object = Steps()
    setattr(of_object, hook, lambda batch, *_: batch)
    assert draws_on_the_way(of_object, None)
    says_no = type("SaysNo", (of_class,), {"draws": False})
    assert not draws_on_the_way(Steps(), says_no())
    assert hasattr(DataHooks, hook)


def drawn(history: int) -> list[float]:
    """What a training draws on the way, after `history` other draws."""
    data = Noisy()
    trainer = quiet_trainer(devices=1, max_epochs=1)
    torch.rand(history)
    trainer.fit(Steps(), datamodule=data)
    return data.drawn


def test_what_is_drawn_there_does_not_depend_on_history(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(drawn(0))) == 2
    assert drawn(0) == drawn(5)
    monkeypatch.setattr(strategy, "draws_on_the_way", lambda *_: False)
    assert drawn(0) != drawn(5)


def test_the_starters_batch_is_moved_as_lightning_moves_it() -> None:
    data = ImageDataModule()
    batch = Batch(torch.ones(2, 1, 3, 3, dtype=torch.uint8), torch.arange(2), torch.arange(2))
    for device in (torch.device("cpu"), torch.device("meta")):
        ours = data.transfer_batch_to_device(batch, device, 0)
        theirs = LightningDataModule.transfer_batch_to_device(data, batch, device, 0)
        assert type(ours) is type(theirs) is Batch
        assert [column.device for column in ours] == [column.device for column in theirs] == [device] * 3
    example = torch.zeros(1, 1, 3, 3)  # Lightning passes `example_input_array` through here
    assert data.transfer_batch_to_device(example, torch.device("meta"), 0).device.type == "meta"


def test_nothing_is_drawn_on_the_starters_way() -> None:
    assert not draws_on_the_way(Steps(), ImageDataModule())
    data = ImageDataModule(dataset="digits", batch_size=4)
    data.setup()
    state = torch.get_rng_state()
    batch = next(iter(data.train_dataloader()))
    after_reading = torch.get_rng_state()
    data.on_after_batch_transfer(data.transfer_batch_to_device(batch, torch.device("cpu"), 0))
    assert torch.equal(torch.get_rng_state(), after_reading)
    assert not torch.equal(after_reading, state)  # shuffling draws, so a draw would be seen

"""Which checkpoints a run keeps, and when the last one is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lit_dp.engine.checkpoints import BestCheckpoint, LastCheckpoint
from lit_dp.engine.position import KEY
from lit_dp.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import Job, quiet_trainer

VALUES = [0.5, 0.9, 0.7, 0.9, 0.8]


class Scripted(Callback):
    """Gives the epochs' validation values, whatever the module learned."""

    def on_validation_epoch_end(self, trainer, pl_module) -> None:  # type: ignore
        pl_module.log("val/scripted", VALUES[trainer.current_epoch], sync_dist=True)


def kept(folder: Path, kind: type[ModelCheckpoint]) -> dict[str, int]:
    """Epoch that comes next after every checkpoint that training leaves."""
    module, data = Job(samples=8).build()
    best = kind(
        dirpath=folder / "checkpoints",
        filename="best",
        monitor="val/scripted",
        mode="max",
        enable_version_counter=False,
    )
    trainer = quiet_trainer(
        max_epochs=len(VALUES),
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[Scripted(), best, LastCheckpoint()],
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=data)
    return {stem: read(folder, stem)[KEY]["epoch"] for stem in ("best", "last")}


def read(folder: Path, stem: str = "last") -> dict[str, Any]:
    return torch.load(folder / f"checkpoints/{stem}.ckpt", weights_only=True)


def test_the_best_is_the_later_of_equals_and_the_last_is_the_last(tmp_path: Path) -> None:
    assert run_ranks(2, kept, tmp_path, BestCheckpoint)[0] == {"best": 4, "last": 5}


def test_lightnings_own_keeps_the_first_of_equals(tmp_path: Path) -> None:
    """Fails when upstream has an option for it: use that."""
    assert run_ranks(2, kept, tmp_path, ModelCheckpoint)[0]["best"] == 2


class Saves(Callback):
    """Notes after how many steps was saved, and what comes next then; and how far within a step."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, str]] = []
        self.within = 0

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:  # type: ignore
        self.noted.append((trainer.global_step, checkpoint[KEY]["moment"]))
        self.within = max(self.within, checkpoint[KEY]["within"])


def saves(folder: Path, every_n_steps: int | None, callbacks: Any = (), **options: Any) -> list[tuple[int, str]]:
    """Of two epochs of three steps, of two micro-batches each."""
    module, data = Job(samples=24).build()
    noting = Saves()
    trainer = quiet_trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[*callbacks, LastCheckpoint(every_n_steps), noting],
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, datamodule=data)
    return noting.noted


@pytest.mark.parametrize(
    ("every", "expected"),
    [(None, [3, 6]), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 3, 4, 6]), (100, [3, 6])],
)
def test_the_last_is_saved_between_two_steps(every: int | None, expected: list[int], tmp_path: Path) -> None:
    noted = run_ranks(1, saves, tmp_path, every)[0]
    assert noted == [(step, "step" if step < 6 else "epoch") for step in expected]


def test_every_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"last\.every_n_steps is 0: give 1 or more"):
        LastCheckpoint(0)


def averaged(folder: Path) -> None:
    saves(folder, None, [EMAWeightAveraging(decay=0.5)])


def test_the_last_of_all_holds_trained_weights_beside_averaged_ones(tmp_path: Path) -> None:
    """When training ends EMAWeightAveraging puts averaged weights into the module: it comes after."""
    run_ranks(1, averaged, tmp_path)
    last = read(tmp_path)
    trained, average = last["current_model_state"], last["state_dict"]
    assert all(not torch.equal(trained[name], average[name]) for name in ("network.5.weight", "network.0.weight"))


class Falling(Callback):
    """Gives a value that each validation makes better."""

    def on_validation_epoch_end(self, trainer, pl_module) -> None:  # type: ignore
        pl_module.log("val/scripted", -float(trainer.global_step), sync_dist=True)


def how_far_within(folder: Path, kind: type[ModelCheckpoint]) -> int:
    """Of checkpoints that are saved every so many steps, where a step has two micro-batches."""
    module, data = Job(samples=24).build()
    saves, options = Saves(), {"monitor": "val/scripted", "mode": "min", "every_n_train_steps": 1}
    trainer = quiet_trainer(
        accumulate_grad_batches=2,
        val_check_interval=2,
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[Falling(), kind(dirpath=folder, **options), saves],
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=data)
    assert saves.noted
    return saves.within


def test_the_best_is_saved_between_two_steps(tmp_path: Path) -> None:
    """Lightning's own looks again after the first micro-batch of the next step. Fails when upstream has mended it."""
    assert run_ranks(1, how_far_within, tmp_path / "ours", BestCheckpoint)[0] == 0
    assert run_ranks(1, how_far_within, tmp_path / "theirs", ModelCheckpoint)[0] == 1

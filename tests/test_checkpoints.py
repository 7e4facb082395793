"""Which checkpoints a run keeps."""

from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dp.engine.checkpoints import BestCheckpoint, last_checkpoint
from tests.ranks import run_ranks
from tests.training import Job, quiet_trainer

VALUES = [0.5, 0.9, 0.7, 0.9, 0.8]


class Scripted(Callback):
    """Gives the epochs' validation values, whatever the module learned."""

    def on_validation_epoch_end(self, trainer, pl_module) -> None:  # type: ignore
        pl_module.log("val/scripted", VALUES[trainer.current_epoch], sync_dist=True)


def kept(folder: Path, kind: type[ModelCheckpoint]) -> dict[str, int]:
    """Epoch of every checkpoint that training leaves."""
    module, data = Job(samples=8).build()
    best = kind(dirpath=folder, filename="best", monitor="val/scripted", mode="max", enable_version_counter=False)
    last = last_checkpoint()
    last.dirpath = str(folder)
    trainer = quiet_trainer(
        max_epochs=len(VALUES),
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[Scripted(), best, last],
    )
    trainer.fit(module, datamodule=data)
    return {path.stem: torch.load(path, weights_only=True)["epoch"] for path in folder.glob("*.ckpt")}


def test_the_best_is_the_later_of_equals_and_the_last_is_the_last(tmp_path: Path) -> None:
    assert run_ranks(2, kept, tmp_path, BestCheckpoint)[0] == {"best": 3, "last": 4}


def test_lightnings_own_keeps_the_first_of_equals(tmp_path: Path) -> None:
    """Fails when upstream has an option for it: use that."""
    assert run_ranks(2, kept, tmp_path, ModelCheckpoint)[0]["best"] == 1

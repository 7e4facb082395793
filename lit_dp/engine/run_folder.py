"""One folder a run: which one it is, and the metrics.csv and config.yaml in it."""

import re
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only


class RunFolder(CSVLogger):
    """A CSVLogger whose log_dir is `ROOT/NAME`, and a new folder for every run.

    If the folder is there already the number at the end of its name is counted up: digits, digits-2, digits-3.
    Rank 0 makes it when it is first needed; other ranks learn it through `trainer.log_dir`, which broadcasts.

    Args:
        root: folder of all runs.
        name: wished name of this one; may hold slashes.
    """

    def __init__(self, root: str | Path, name: str) -> None:
        # Epoch values are few: write each at once, so that the file is complete whenever the run is killed.
        super().__init__(save_dir=root, name=name, version="", flush_logs_every_n_steps=1)
        self._claimed: str | None = None

    @property
    def name(self) -> str:
        if self._claimed is None and rank_zero_only.rank == 0:
            self._claimed = claim(Path(self.save_dir), self._name)
        return self._claimed or self._name


def claim(root: Path, name: str) -> str:
    """Make the first folder of `name`, `name-2`, `name-3`, ... that is not there yet; return its name.

    Safe against other runs that claim at the same time: mkdir is atomic.
    """
    root.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).mkdir()
            return name
        except FileExistsError:
            stem, number = re.fullmatch(r"(.*?)(?:-(\d+))?", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
            name = f"{stem}-{int(number or 1) + 1}"


class SaveRunConfig(SaveConfigCallback):
    """Saves config.yaml, which re-runs the run unchanged, with the name that the run's folder really got."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.logger, RunFolder) and stage == "fit":
            self.config.name = trainer.logger.name
        super().setup(trainer, pl_module, stage)


def run_folder_of(checkpoint: Any) -> Path | None:
    """The run folder that a checkpoint path lies in, or None: `runs/digits/checkpoints/best.ckpt` -> `runs/digits`."""
    path = Path(checkpoint) if isinstance(checkpoint, (str, Path)) else None
    return path.parent.parent if path is not None and path.parent.name == "checkpoints" else None

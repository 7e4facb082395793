"""One folder a run: which one it is, and the metrics.csv and config.yaml in it."""

import csv
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from lit_dp.engine.restart import made_by


class RunFolder(CSVLogger):
    """A CSVLogger whose log_dir is `ROOT/NAME`, and a new folder for every run.

    If the folder is there already the number at the end of its name is counted up: digits, digits-2, digits-3.
    Rank 0 makes it when it is first needed; other ranks learn it through `trainer.log_dir`, which broadcasts.

    Args:
        root: folder of all runs.
        name: wished name of this one; may hold slashes.
        resume: how the run is resumed, as `restart.mode`: `auto` and `required` go on in the folder of that name. A
            job that its launcher has started again goes on in the folder that it made, but with `never`.

    Attributes:
        job: what this job was started as before: `restart.started_as` of all ranks, which the Trainer sets.
    """

    def __init__(self, root: str | Path, name: str, resume: str = "never") -> None:
        # Epoch values are few: write each at once, so that the file is complete whenever the run is killed.
        super().__init__(save_dir=root, name=name, version="", flush_logs_every_n_steps=1)
        self._claimed: str | None = None
        self.resume = resume
        self.job: Collection[str] = ()

    @property
    def name(self) -> str:
        if self._claimed is None and rank_zero_only.rank == 0:
            self._claimed = self._claim(Path(self.save_dir), self._name)
        return self._claimed or self._name

    def _claim(self, root: Path, name: str) -> str:
        own = made_by(self.job, root / name) if self.resume != "never" else []
        if not own and self.resume not in ("auto", "required"):
            return claim(root, name)
        chosen = own[0] if own else root / name
        chosen.mkdir(parents=True, exist_ok=True)
        return str(chosen.relative_to(root))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            os.makedirs(self.log_dir, exist_ok=True)
            self._experiment = Rows(self.log_dir)
        return self._experiment


class Rows(ExperimentWriter):
    """Writes metrics.csv. Rows that are there already stay, up to where the run goes on."""

    def _check_log_dir_exists(self) -> None:
        """Lightning deletes the file here."""
        self._goes_on = Path(self.metrics_file_path).is_file()

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if self._goes_on and step is not None:
            self._goes_on = False
            self._drop_from(step, set(metrics_dict))
        super().log_metrics(metrics_dict, step)

    def _drop_from(self, step: int, names: set[str]) -> None:
        """Drop what was logged after the checkpoint that the run goes on from: it is logged again."""
        with open(self.metrics_file_path, newline="") as file:
            reader = csv.DictReader(file)
            rows, header = list(reader), list(reader.fieldnames or [])
        kept = [row for row in rows if (at := int(row["step"])) < step or (at == step and not _filled(row) & names)]
        partial = Path(f"{self.metrics_file_path}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=header)
            writer.writeheader()
            writer.writerows(kept)
        partial.replace(self.metrics_file_path)
        self.metrics_keys = header


def _filled(row: dict[str, str]) -> set[str]:
    return {name for name, value in row.items() if value} - {"step", "epoch"}


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
            self.config.name, self.overwrite = trainer.logger.name, True  # the folder is this run's own
            for name in ("resume", "resume_force", "profile"):  # of fit only; the file is for test and predict, too
                self.config.pop(name, None)
        super().setup(trainer, pl_module, stage)


def run_folder_of(checkpoint: Any) -> Path | None:
    """The run folder that a checkpoint path lies in, or None: `runs/digits/checkpoints/best.ckpt` -> `runs/digits`."""
    path = Path(checkpoint) if isinstance(checkpoint, (str, Path)) else None
    return path.parent.parent if path is not None and path.parent.name == "checkpoints" else None

"""One file of predictions, in the dataset's order, each sample once, whatever number of processes predicted it.

Every rank writes pieces as it goes, a record a batch. At the end rank 0 reads them twice: first only to see whether
every sample is there once, then to merge them into a file beside the target, which it puts in the target's place.
"""

import csv
import heapq
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

from lit_dp.engine.loaders import take_delivered
from lit_dp.engine.samplers import EvalBatches
from lit_dp.errors import ConfigError, RunError

EXAMPLES = 5


class Record(NamedTuple):
    """One batch: sample indices int64 (B,), and what `predict_step` returned for them, on the CPU."""

    indices: Tensor
    prediction: Any


class PredictionFile(Callback):
    """Writes what `predict_step` returns to one file a loader, in the dataset's order.

    A dict of tensors (B,) becomes `predictions.csv`, its keys the columns after `index`, the sample's position in the
    dataset. Anything else becomes `predictions.pt`: {"index": int64 (N,), "prediction": ...}, where tensors (B, ...) are
    joined to (N, ...), or to lists of N where shapes differ between batches, inside any dicts, lists and tuples; lists
    without tensors are taken for a value a sample. Several loaders have `predictions-0.csv`, `predictions-1.csv`, ...

    The folder must be one that all hosts share. Ranks hold a batch at a time; rank 0 holds 8 bytes a sample, and all
    of a `.pt` at its end. Lightning itself keeps everything unless `predict(return_predictions=False)`.

    Args:
        folder: where to; None takes the trainer's `log_dir`, the run folder.
        name: of the file, without its ending.

    Raises:
        ConfigError: on every rank: a loader does not tell which samples a batch holds.
        RunError: on every rank: samples are missing or predicted twice, or rows cannot be told apart.
    """

    def __init__(self, folder: str | Path | None = None, name: str = "predictions") -> None:
        self.folder, self.name = folder, name
        self.files: list[Path] = []
        self._loaders: list[Any] = []
        self._pieces = Path()
        self._open: dict[int, BinaryIO] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)  # all ranks: log_dir broadcasts
        self._loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
        self._pieces = _agreed(trainer, lambda: _fresh_folder(folder, self.name))
        self._pieces.mkdir(parents=True, exist_ok=True)
        piece = str(trainer.global_rank)
        self._open = {i: (self._pieces / f"{piece}-{i}").open("wb") for i in range(len(self._loaders))}

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = self._loaders[dataloader_idx]
        indices = _indices(loader, batch_idx)
        sampler = getattr(loader, "sampler", None)
        if not (isinstance(sampler, EvalBatches) and sampler.borrowed):
            pickle.dump(Record(indices, _on_cpu(outputs)), self._open[dataloader_idx])

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for piece in self._open.values():
            piece.close()
        trainer.strategy.barrier("predictions are written")
        self.files = _agreed(trainer, lambda: self._merge(trainer))

    def _merge(self, trainer: Trainer) -> list[Path]:
        files = []
        for i, loader in enumerate(self._loaders):
            pieces = [self._pieces / f"{rank}-{i}" for rank in range(trainer.world_size)]
            name = self.name if len(self._loaders) == 1 else f"{self.name}-{i}"
            files.append(merge(pieces, expected(trainer, i, loader), self._pieces.parent / name))
            print(f"predictions {files[-1]}", flush=True)
        shutil.rmtree(self._pieces)
        return files


def expected(trainer: Trainer, number: int, loader: Any) -> Tensor | None:
    """The sample indices, int64 (n,), that all ranks predict together; None where nobody knows them."""
    batches = trainer.num_predict_batches[number]
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, EvalBatches):
        elements, size = sampler.elements, sampler.batch_size or 1
        elements = range(sampler.total) if isinstance(elements, int) else elements.last  # pyright: ignore
    else:
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)
        plain = isinstance(sampler, SequentialSampler) or isinstance(sampler, DistributedSampler)
        if not plain: return None
        elements, size = range(len(loader.dataset)), loader.batch_sampler.batch_size
    ...

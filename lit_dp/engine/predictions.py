"""One file of predictions, in the dataset's order, each sample once, whatever number of processes predicted it.

Every rank writes a piece as it goes, a record a batch. At the end rank 0 reads the pieces twice: first to see whether
every sample is there once, then to merge them into a file that takes the target's place when it is complete.
"""

import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

from lit_dp.engine.loaders import take_delivered
from lit_dp.engine.pieces import Record, kept, merge
from lit_dp.engine.promise import sample_indices
from lit_dp.engine.samplers import EvalBatches
from lit_dp.errors import ConfigError, RunError


class PredictionFile(Callback):
    """Writes what `predict_step` returns to one file a loader, in the dataset's order, and prints where it is.

    A dict of tensors (B,) becomes `predictions.csv`: a column a key, after `index`, the sample's position in the
    dataset. All else becomes `predictions.pt`, a dict of `index` (N,) and `prediction`: in any nesting of dicts and
    tuples, tensors (B, ...) are joined to (N, ...), or to a list of N where shapes differ, and lists of B to a list of
    N. Several loaders have `predictions-0.csv`, `predictions-1.csv`, ... A step that returns None leaves no file.

    The folder must be one that all hosts share. A rank holds one batch at a time, rank 0 at the end 8 bytes a sample,
    and the whole of a `.pt`. Lightning itself keeps everything unless `predict(..., return_predictions=False)`.

    Args:
        folder: where to; None takes the trainer's `log_dir`, the run folder.
        name: of the file, without its ending.

    Raises:
        ConfigError: on every rank: a loader does not tell which samples a batch holds.
        RunError: on every rank: predictions are missing, are there twice, or do not have a row a sample.
    """

    def __init__(self, folder: str | Path | None = None, name: str = "predictions") -> None:
        self.folder, self.name = folder, name
        self.files: list[Path] = []
        self._loaders: list[Any] = []
        self._pieces = Path()  # a folder that no other run knows
        self._open: list[BinaryIO] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
        for loader in self._loaders:
            _require_indices(loader)
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)  # all ranks: log_dir broadcasts
        self._pieces = _agreed(trainer, lambda: _fresh_folder(folder, self.name))
        self._pieces.mkdir(parents=True, exist_ok=True)
        self._open = [self._piece(trainer.global_rank, number).open("wb") for number in range(len(self._loaders))]

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
        record = Record(_indices(loader, batch_idx), kept(outputs, batched=loader.batch_sampler is not None))
        if not getattr(loader.sampler, "borrowed", False):  # otherwise the sample is another rank's
            pickle.dump(record, self._open[dataloader_idx])

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for piece in self._open:
            piece.close()
        trainer.strategy.barrier("all pieces are written")
        self.files = _agreed(trainer, lambda: self._merge(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for piece in self._open:
            piece.close()
        if self._open and trainer.is_global_zero:
            shutil.rmtree(self._pieces, ignore_errors=True)

    def _piece(self, rank: int, number: int) -> Path:
        return self._pieces / f"rank-{rank}-loader-{number}"

    def _merge(self, trainer: Trainer) -> list[Path]:
        try:
            files = [self._merge_loader(trainer, number) for number in range(len(self._loaders))]
        finally:
            shutil.rmtree(self._pieces, ignore_errors=True)
        for file in filter(None, files):
            print(f"predictions {file}", flush=True)
        return [file for file in files if file is not None]

    def _merge_loader(self, trainer: Trainer, number: int) -> Path | None:
        pieces = [self._piece(rank, number) for rank in range(trainer.world_size)]
        wanted = _wanted(self._loaders[number], trainer.num_predict_batches[number], trainer.world_size)
        name = self.name if len(self._loaders) == 1 else f"{self.name}-{number}"
        return merge(pieces, wanted, self._pieces.parent / name)


def _wanted(loader: Any, batches: int | float, world_size: int) -> Tensor | None:
    """The indices of the first `batches` batches of all ranks; None where a sampler of the user's does not tell."""
    sampler = loader.sampler
    if isinstance(sampler, EvalBatches):
        size = sampler.batch_size or 1
        elements = getattr(sampler.elements, "last", None) or range(sampler.total)
    else:
        sampler = getattr(loader.batch_sampler, "sampler", None)  # Lightning's DistributedSampler is around another one
        inner = getattr(sampler, "dataset", loader.dataset)
        if not isinstance(sampler, (SequentialSampler, DistributedSampler)) or len(inner) != len(loader.dataset):
            return None
        size, elements = loader.batch_sampler.batch_size, range(len(loader.dataset))
    return sample_indices(list(elements[: int(min(len(elements), batches * size * world_size))]))


def _require_indices(loader: Any) -> None:
    if not hasattr(loader, "delivered") and not hasattr(getattr(loader, "batch_sampler", None), "seen_batch_indices"):
        raise ConfigError(
            f"a {type(loader).__name__} for {type(getattr(loader, 'dataset', None)).__name__} does not tell which"
            " samples a batch holds: predict from a dataset with indices, or without PredictionFile"
        )


def _indices(loader: Any, batch_idx: int) -> Tensor:
    # Lightning notes indices for its own writers: all there is under `strategy: ddp`.
    elements = take_delivered(loader) or loader.batch_sampler.seen_batch_indices[batch_idx]
    if (indices := sample_indices(elements)) is None:
        raise ConfigError(f"the sampler yields {elements[0]!r}, which is no position in a dataset: no order is known")
    return indices


def _fresh_folder(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))


def _agreed(trainer: Trainer, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank, or its error. All ranks call it."""
    value, error = None, None
    if trainer.is_global_zero:
        try:
            value = make()
        except Exception as caught:
            error = caught
    value, message = trainer.strategy.broadcast((value, str(error) if error is not None else None))
    if message is not None:
        raise error if error is not None else RunError(message)
    return value

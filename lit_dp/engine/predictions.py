"""One file of predictions, in the dataset's order, each sample once, whatever number of processes predicted it.

Every rank writes a piece as it goes, a record a batch. At the end rank 0 reads the pieces twice: first to see whether
every sample is there once, then to merge them into a file that takes the target's place when it is complete.
"""

import csv
import heapq
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

from lit_dp.engine.ledger import sample_indices
from lit_dp.engine.loaders import take_delivered
from lit_dp.engine.samplers import EvalBatches
from lit_dp.errors import ConfigError, RunError

EXAMPLES = 5


class Record(NamedTuple):
    """One batch: sample indices int64 (B,), and what `predict_step` returned for them, on the CPU."""

    indices: Tensor
    prediction: Any


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
        record = Record(_indices(loader, batch_idx), _kept(outputs, batched=loader.batch_sampler is not None))
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


def merge(pieces: list[Path], wanted: Tensor | None, target: Path) -> Path | None:
    """Make `target`.csv or `target`.pt of all ranks' pieces; on one rank. The pieces stay.

    Args:
        pieces: files of Records.
        wanted: the samples that must be there, int64 (n,), each as often as it is listed; None if that is not known.
        target: path without an ending.

    Returns:
        The file; None where nothing was predicted.
    """
    indices, columns = _survey(pieces)
    _require_complete(torch.cat(indices), wanted)
    if columns is None:
        return None
    file = target.with_name(f"{target.name}.{'csv' if columns else 'pt'}")
    draft = pieces[0].parent / file.name
    _write_csv(draft, pieces, indices, columns) if columns else _write_pt(draft, pieces, torch.cat(indices))
    os.replace(draft, file)  # one folder lies in the other, so on one filesystem
    return file


def _survey(pieces: list[Path]) -> tuple[list[Tensor], list[str] | None]:
    """The indices in every piece; and the columns that all records have, [] for no table, None for no predictions."""
    indices, tables = [], []
    for piece in pieces:
        found = [torch.zeros(0, dtype=torch.int64)]
        for record in _records(piece):
            found.append(record.indices)
            tables.append(_columns(record))
        indices.append(torch.cat(found))
    if all(table is None for table in tables):
        return indices, None
    return indices, tables[0] if all(table == tables[0] for table in tables) else []


def _records(piece: Path) -> Iterator[Record]:
    """Of a piece as far as it goes: what a lost or torn one lacks is found by the indices."""
    if not piece.exists():
        return
    with piece.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


def _columns(record: Record) -> list[str] | None:
    """Names of a table's columns, [] where the prediction is no table, None where there is none.

    Raises RunError where the prediction has not one row for each sample.
    """
    prediction, samples = record.prediction, len(record.indices)
    if prediction is None:
        return None
    if (rows := _rows(prediction)) != {samples}:
        raise RunError(
            f"predict_step returned {' or '.join(map(str, rows))} rows for a batch of {samples} samples: return tensors"
            " or lists with one row a sample, in dicts or tuples"
        )
    flat = isinstance(prediction, dict) and all(isinstance(v, Tensor) and v.ndim == 1 for v in prediction.values())
    if flat and "index" in prediction and not prediction["index"].equal(record.indices):
        raise RunError("predict_step returns an `index` that is not the sample's position in the dataset: rename it")
    return [name for name in prediction if name != "index"] if flat else []


def _rows(prediction: Any) -> set[Any]:
    if isinstance(prediction, (dict, tuple)):
        parts = prediction.values() if isinstance(prediction, dict) else prediction
        return set().union(*map(_rows, parts))
    return {len(prediction)} if isinstance(prediction, list) or getattr(prediction, "ndim", 0) else {"no"}


def _require_complete(found: Tensor, wanted: Tensor | None) -> None:
    if wanted is None:
        return
    size = 1 + max(int(indices.max()) if len(indices) else 0 for indices in (found, wanted))
    excess = found.bincount(minlength=size) - wanted.bincount(minlength=size)
    for what, wrong in (("missing", excess < 0), ("there too often", excess > 0)):
        if count := int(wrong.sum()):
            examples = ", ".join(map(str, wrong.nonzero().flatten()[:EXAMPLES].tolist()))
            raise RunError(
                f"predictions of {count:,} of {len(wanted):,} samples are {what} (samples {examples}"
                f"{', …' if count > EXAMPLES else ''}): no file is written; let all hosts share the run folder"
            )


def _write_csv(file: Path, pieces: list[Path], indices: list[Tensor], columns: list[str]) -> None:
    streams = []
    for piece, order in zip(pieces, indices, strict=True):
        rows = _table(piece, columns)
        streams.append(rows if bool((order.diff() >= 0).all()) else sorted(rows, key=itemgetter(0)))
    with file.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")  # writes floats as repr: they are read back with equal bits
        writer.writerow(["index", *columns])
        writer.writerows(heapq.merge(*streams, key=itemgetter(0)))


def _table(piece: Path, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    for indices, prediction in _records(piece):
        yield from zip(indices.tolist(), *(prediction[name].tolist() for name in columns), strict=True)


def _write_pt(file: Path, pieces: list[Path], indices: Tensor) -> None:
    order = indices.argsort(stable=True)
    parts = [record.prediction for piece in pieces for record in _records(piece)]
    torch.save({"index": indices[order], "prediction": _joined(parts, order)}, file)


def _joined(parts: list[Any], order: Tensor) -> Any:
    """Predictions of batches as one prediction of all samples, rows in `order`."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts], order) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(column), order) for column in zip(*parts, strict=True))
    if isinstance(first, Tensor) and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)[order]
    rows = [row.clone() if isinstance(row, Tensor) else row for part in parts for row in part]
    return [rows[position] for position in order.tolist()]


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


def _kept(prediction: Any, batched: bool) -> Any:
    """A copy on the CPU: pickled views would drag their whole storage along. Without batching, a batch of one."""
    if isinstance(prediction, Tensor):
        copied = prediction.detach().cpu().clone()
        return copied if batched else copied[None]
    if isinstance(prediction, dict):
        return {name: _kept(value, batched) for name, value in prediction.items()}
    if isinstance(prediction, tuple):
        return tuple(_kept(value, batched) for value in prediction)
    if isinstance(prediction, list):
        return [_kept(value, True) for value in prediction] if batched else [_kept(prediction, True)]
    return prediction if batched or prediction is None else [prediction]


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

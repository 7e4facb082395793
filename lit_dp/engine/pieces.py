"""Pieces of predictions, one a rank, and how they become one file in the dataset's order."""

import csv
import heapq
import os
import pickle
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_dp.errors import RunError

EXAMPLES = 5


class Record(NamedTuple):
    """One batch: sample indices int64 (B,), and what `predict_step` returned for them, on the CPU."""

    indices: Tensor
    prediction: Any


def kept(prediction: Any, batched: bool) -> Any:
    """A copy on the CPU: pickled views would drag their whole storage along. Without batching, a batch of one."""
    if isinstance(prediction, Tensor):
        copied = prediction.detach().cpu().clone()
        return copied if batched else copied[None]
    if isinstance(prediction, dict):
        return {name: kept(value, batched) for name, value in prediction.items()}
    if isinstance(prediction, tuple):
        return tuple(kept(value, batched) for value in prediction)
    if isinstance(prediction, list):
        return [kept(value, True) for value in prediction] if batched else [kept(prediction, True)]
    return prediction if batched or prediction is None else [prediction]


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

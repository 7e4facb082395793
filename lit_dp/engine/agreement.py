"""Do all ranks see the same dataset? A split or a file list that differs is found before the first step (FAULTS 16)."""

import hashlib
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lit_dp.engine.peers import Peers

BYTES_READ = 2**20
"""Of every tensor; the rest is taken at even distances."""
ITEMS_READ = 2**17
"""Of every list, likewise."""
LISTS = ("samples", "imgs", "targets", "labels", "data", "images", "tensors", "paths", "files")
"""Attributes in which datasets keep what they hold: torchvision's names, and usual ones."""


def require_same_dataset(dataset: Any, stage: str, peers: Peers) -> None:
    """Compare lengths and contents over all ranks; every rank calls it.

    Contents are a Subset's indices, and the lists and tensors that datasets usually hold. Nothing is read from disk.

    Raises:
        ConfigError: on every rank, with the ranks and the first sample that differ.
    """
    if peers.world_size == 1:
        return
    mine = (_length(dataset), fingerprint(dataset))
    values = peers.gather(mine)
    if all(value == values[0] for value in values):
        return
    explanation = _first_difference(peers.gather(_indices(dataset)), [length for length, _ in values])
    peers.require_equal(
        f"the {stage} dataset",
        mine,
        "build it from a seed that is equal on all ranks, as in random_split(dataset, lengths,"
        " generator=torch.Generator().manual_seed(0))",
        lambda _: explanation,
    )


def fingerprint(dataset: Any) -> str:
    """SHA-256 of what a dataset is made of, as far as that is to be had without reading samples."""
    digest = hashlib.sha256()
    _add_dataset(digest, dataset)
    return digest.hexdigest()


def _add_dataset(digest: Any, dataset: Any) -> None:
    digest.update(f"{type(dataset).__qualname__} {_length(dataset)}\n".encode())
    if isinstance(dataset, Subset):
        _add(digest, torch.as_tensor(_indices(dataset)))
        _add_dataset(digest, dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            _add_dataset(digest, part)
    else:
        held = getattr(dataset, "__dict__", {})  # not getattr(dataset, name): a property may load everything
        for name in LISTS:
            if name in held:
                digest.update(name.encode())
                _add(digest, held[name])


def _add(digest: Any, value: Any) -> None:
    """Add what is equal in two processes if the values are: no addresses, no order of a set, nothing from a file."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() * flat.element_size() // BYTES_READ)]
        digest.update(memoryview(some.cpu().contiguous().view(torch.uint8).numpy()))  # pyright: ignore
    elif isinstance(value, np.memmap):
        digest.update(f"{value.filename} {value.dtype} {value.shape}".encode())
    elif isinstance(value, np.ndarray):
        numbers = value.dtype.kind in "biufc" and value.dtype.isnative
        _add(digest, torch.from_numpy(np.array(value).view(np.uint8)) if numbers and value.ndim else value.tolist())
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value[:: max(1, len(value) // ITEMS_READ)]:
            _add(digest, item)
    elif isinstance(value, dict):
        _add(digest, list(value.items()))
    elif isinstance(value, str | int | float | bytes | PurePath | None):
        digest.update(f"{value!r};".encode(errors="surrogateescape"))
    else:
        digest.update(type(value).__qualname__.encode())


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _indices(dataset: Any) -> list[int]:
    indices: Any = dataset.indices if isinstance(dataset, Subset) else []
    return indices.tolist() if hasattr(indices, "tolist") else list(indices)


def _first_difference(indices: list[list[int]], lengths: list[int | None]) -> str:
    if len(set(lengths)) > 1:
        return f"lengths by rank are {', '.join(map(str, lengths))}"
    for other in indices[1:]:
        for position, (a, b) in enumerate(zip(indices[0], other, strict=False)):
            if a != b:
                return f"position {position} holds sample {a} on rank 0 and sample {b} there"
    return "equal lengths, other contents"

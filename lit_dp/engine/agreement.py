"""Do all ranks see the same dataset? A split or a file list that differs is found before the first step (FAULTS 16)."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lit_dp.engine.peers import Peers

BYTES_READ = 2**20
"""Of every tensor; the rest is taken at even distances."""
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
    _update(digest, dataset)
    return digest.hexdigest()


def _update(digest: Any, dataset: Any) -> None:
    digest.update(f"{type(dataset).__qualname__} {_length(dataset)}\n".encode())
    if isinstance(dataset, Subset):
        digest.update(repr(list(dataset.indices)).encode())
        _update(digest, dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            _update(digest, part)
    else:
        for name in LISTS:
            _update_with(digest, name, getattr(dataset, name, None))


def _update_with(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().reshape(-1)
        every = max(1, flat.numel() * flat.element_size() // BYTES_READ)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(flat[::every].contiguous().view(torch.uint8).numpy())
    elif hasattr(value, "tobytes"):  # numpy
        _update_with(digest, name, torch.from_numpy(value))
    elif isinstance(value, (list, tuple)) and all(isinstance(item, Tensor) for item in value):
        for item in value:
            _update_with(digest, name, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{name} {value!r}".encode())


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _indices(dataset: Any) -> list[int]:
    return list(dataset.indices) if isinstance(dataset, Subset) else []


def _first_difference(indices: list[list[int]], lengths: list[int | None]) -> str:
    if len(set(lengths)) > 1:
        return f"lengths by rank are {', '.join(map(str, lengths))}"
    for other in indices[1:]:
        for position, (a, b) in enumerate(zip(indices[0], other, strict=False)):
            if a != b:
                return f"position {position} holds sample {a} on rank 0 and sample {b} there"
    return "equal lengths, other contents"

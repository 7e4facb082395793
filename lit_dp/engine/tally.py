"""Which samples one rank has used, and how often. Batches are counted many at a time: a step only notes its indices."""

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_dp.engine.promise import sample_indices

TOGETHER = 64
"""Batches that are counted at a time."""
NONE = torch.zeros(0, dtype=torch.uint8)


@dataclass
class Tally:
    """This rank's uses of one loader's samples: a byte a sample, four once one was used more than 255 times.

    Attributes:
        samples: N; None for a stream, whose counts grow.
        counts: uint8 or int32 (N,); of the batches that are counted, as all that follows (see `settle`).
        batches, blind: as in Account, of this rank. `taken` are those that this process took from its loader.
        descents: how often an index came after a higher one.
    """

    samples: int | None
    counts: Tensor = NONE
    batches: int = 0
    taken: int = 0
    blind: int = 0
    descents: int = 0

    def __post_init__(self) -> None:
        self.heads: list[int] = []
        """First indices of the last batches, one a virtual rank of this process."""
        self._waiting: list[tuple[Any, int]] = []
        self.grow(self.samples or 0)

    def add(self, used: list[Any] | Tensor | None, stride: int = 1) -> None:
        """Note a batch: what its loader read, or its indices; None where they are not known. Batches of the same
        virtual rank come every `stride` batches."""
        self._waiting.append((used, stride))
        if len(self._waiting) >= TOGETHER:
            self.settle()

    def settle(self) -> "Tally":
        """Count what has been noted; itself."""
        waiting, self._waiting = self._waiting, []
        known = [(found, stride) for used, stride in waiting if (found := self._found(used)) is not None]
        self.blind += len(waiting) - len(known)
        if known:
            together = np.concatenate([found for found, _ in known])
            samples, times = np.unique(together, return_counts=True)
            self.grow(int(samples[-1]) + 1)
            self._use(torch.from_numpy(samples), torch.from_numpy(times))
        for found, stride in known:
            self.descents += int((found[1:] < found[:-1]).sum())
            if len(self.heads) >= stride:
                self.descents += int(self.heads[-stride] > found[0])
            self.heads = [*self.heads[-stride:], int(found[0])]
        return self

    def grow(self, samples: int) -> None:
        if samples > len(self.counts):
            self.counts = torch.cat((self.counts, self.counts.new_zeros(samples - len(self.counts))))

    def _use(self, samples: Tensor, times: Tensor) -> None:
        counts = self.counts[samples] + times
        self.counts = self.counts.int() if int(counts.max()) > 255 else self.counts
        self.counts[samples] = counts.to(self.counts.dtype)

    def _found(self, used: Any) -> Any:
        """Indices of a batch, int64 (B,), or None where they are not to be had, or not of this dataset."""
        if isinstance(used, Tensor):
            indices = used.flatten().cpu().numpy()
        elif used is None:
            return None
        else:
            try:
                indices = np.fromiter(map(operator.index, used), np.int64, len(used))
            except TypeError:  # lists of indices, or keys of another kind
                found = sample_indices(used)
                indices = found.numpy() if found is not None else None
        if indices is None or not len(indices) or indices.min() < 0:
            return None
        return None if self.samples is not None and indices.max() >= self.samples else indices

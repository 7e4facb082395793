"""Random draws as a function of what they are for, never of history or of the number of workers (law L6).

- in a step: of (seed, epoch, micro-batch, virtual rank)
- in a dataset's `__getitem__`: of (seed, epoch, sample index)
- in a custom sampler: of (seed, epoch), equal on all ranks
"""

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from lit_dp.engine.wrapping import Wrapping


def derive(*key: int | str) -> int:
    """A 63-bit seed from a key: equal keys give equal seeds, different keys unrelated ones (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed torch, numpy and random in this process, and `device` where it is an accelerator."""
    # torch.manual_seed would also queue a call for every accelerator library that is not initialised: slow, and growing
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - the global state is what users' datasets draw from
    random.seed(seed)


def seed_step(
    seed: int,
    epoch: int,
    micro_batch: int,
    virtual_rank: int,
    purpose: str = "step",
    device: torch.device | None = None,
) -> None:
    """Make the draws that follow those of one micro-batch of one virtual rank, whatever was drawn before.

    Args:
        seed: of the run, equal on all ranks.
        epoch: from 0.
        micro_batch: index in the epoch, from 0.
        virtual_rank: whose draws they are.
        purpose: what they are for: "transfer" to the device, or the "step" itself.
        device: the accelerator to seed beside the CPU.
    """
    seed_all(derive(seed, epoch, micro_batch, virtual_rank, purpose), device)


_aside = np.random.MT19937(0)


@contextmanager
def isolated() -> Iterator[None]:
    """Leave the CPU generators of torch, numpy and random as they were found. Within it draws need a seed of their own.

    numpy's generator is changed for another, which takes 3 microseconds where copying its state takes 100. What is lost
    is the second of a pair of normal numbers, which numpy keeps beside it.
    """
    global _aside
    states = torch.get_rng_state(), random.getstate()
    found, ours = np.random.get_bit_generator(), _aside  # pyright: ignore[reportAttributeAccessIssue]
    _aside = np.random.MT19937(0) if found is ours else ours
    np.random.set_bit_generator(_aside)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_bit_generator(found)  # pyright: ignore[reportAttributeAccessIssue]
        _aside = ours


class EpochIndices(list[Any]):
    """A batch of sample indices that knows its epoch: it carries the seed's key into worker processes."""

    def __init__(self, indices: list[Any], epoch: int) -> None:
        super().__init__(indices)
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochIndices, (list(self), self.epoch)


class EpochIndex(int):
    """A single sample index that knows its epoch, for loaders without automatic batching."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> "EpochIndex":
        self = super().__new__(cls, index)
        self.epoch = epoch
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochIndex, (int(self), self.epoch)


_key: tuple[int, int] | None = None  # (seed, epoch) of the fetch that is going on in this process


def begin_sample(index: Any, purpose: str = "read") -> None:
    """Seed the draws for one sample: for datasets that read whole batches in `__getitems__`.

    Outside a seeded loader nothing happens. Different purposes (to read it, to augment it) have draws of their own.
    """
    if _key is not None:
        with suppress(TypeError):  # 3, numpy's 3 and a tensor of 3 are the same sample
            index = operator.index(index)
        seed_all(derive(*_key, index, purpose))


class SeededDataset(Wrapping, Dataset[Any]):
    """A dataset whose draws depend on (seed, epoch, sample index) only. Everything else is the inner dataset's.

    Where that reads whole batches (`__getitems__`) it calls `begin_sample` before it draws for a sample; if it does
    not, its draws depend on the batch's first index. A seed of None leaves the draws as they come. A dataset that never
    draws may say so with an attribute `draws = False`, which saves the seeding.
    """

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self.__dict__.update(inner=dataset, seed=seed)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: Any) -> Any:
        with self._keyed(index):
            return self._item(_plain(index))

    def __getitems__(self, indices: list[Any]) -> Any:
        with self._keyed(indices):
            if reads_batches(self.inner):
                return self.inner.__getitems__(_plain(indices))
            return [self._read(index) for index in indices]

    def _read(self, index: Any) -> Any:
        begin_sample(index)
        return self._item(index)

    def _item(self, index: Any) -> Any:
        try:
            return self.inner[index]
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"(while reading sample {index})")  # pyright: ignore
            raise

    @contextmanager
    def _keyed(self, asked: Any) -> Iterator[None]:
        """Draws are those of what is `asked` for: an index, or a list of them."""
        global _key
        if self.seed is None or not getattr(self.inner, "draws", True):
            yield
            return
        # Loading in the training process must not move the draws of the step.
        with nullcontext() if get_worker_info() is not None else isolated():
            _key = (self.seed, getattr(asked, "epoch", 0))
            try:
                begin_sample(asked if not isinstance(asked, list) else asked[0] if asked else 0)
                yield
            finally:
                _key = None


def _plain(asked: Any) -> Any:
    return int(asked) if isinstance(asked, EpochIndex) else list(asked) if isinstance(asked, EpochIndices) else asked


def reads_batches(dataset: Any) -> bool:
    """Whether `__getitems__` is the user's doing: torch's own wrappers only pass it on, or read sample by sample."""
    read = getattr(dataset, "__getitems__", None)
    if not callable(read):
        return False
    if not getattr(read, "__module__", "").startswith("torch.utils.data"):
        return True
    parts = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    return any(reads_batches(part) for part in (parts.values() if isinstance(parts, dict) else parts))

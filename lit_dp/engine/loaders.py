"""A user's DataLoader, made to read what the schedule says and to tell which samples it delivered.

The loader is copied, not built again: whatever class it is of and whatever it was built with stays as it is. Only its
batch sampler, dataset and collate function are replaced, by ones that hold the user's.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, get_worker_info

from lit_dp.engine.randomness import EpochIndex, SeededDataset

DELIVERIES_KEPT = 16
"""More than any prefetching holds between a delivery and the step that uses it."""


class Delivery(NamedTuple):
    """A batch on its way out of a (worker) process, with the indices that it was made of."""

    indices: list[Any]
    batch: Any


class KeptDraw:
    """A draw that keeps what it gave last: the ledger compares with it, and a second draw might be another one.

    Attributes:
        last: elements of the last draw; empty before the first.
    """

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.last: list[Any] = []

    def __len__(self) -> int:
        return len(self.draw)

    def __call__(self, epoch: int) -> list[Any]:
        self.last = self.draw(epoch)
        return self.last


class TaggedDataset(SeededDataset):
    """A seeded dataset that sends the indices along with what it read."""

    def __getitem__(self, index: Any) -> Any:
        indices = list(index) if isinstance(index, list) else [int(index) if isinstance(index, EpochIndex) else index]
        return Delivery(indices, super().__getitem__(index))

    def __getitems__(self, indices: list[Any]) -> Any:
        return Delivery(list(indices), super().__getitems__(indices))


class TaggedCollate:
    """The user's collate function, on what a TaggedDataset read."""

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self.inner = inner

    def __call__(self, delivery: Delivery) -> Delivery:
        return Delivery(delivery.indices, self.inner(delivery.batch))


SECONDS_AFTER_SIGTERM = 5


class WorkerStart:
    """Begins a loader worker. SIGTERM, which Slurm and others send to all processes of a job, lets it go on for a
    while: its rank needs it until it has saved; so do other signals of a job's. A user's worker_init_fn finds the
    user's own dataset in torch's worker info, not our wrapping.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self.inner = inner

    def __call__(self, worker: int) -> None:
        if threading.current_thread() is threading.main_thread():  # torch has workers that are threads, too
            signal.signal(signal.SIGTERM, lambda *_: signal.alarm(SECONDS_AFTER_SIGTERM) and None)
            for signum in (signal.SIGINT, signal.SIGUSR1):
                signal.signal(signum, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if self.inner is None:
            return
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.inner)  # it is frozen
        self.inner(worker)


class Delivering:
    """Mixin over a DataLoader's class: takes the indices off every batch and keeps them in `delivered`.

    Attributes:
        delivered: indices of the batches handed out and not yet asked for, oldest first (see `take_delivered`).
    """

    delivered: deque[list[Any]]

    def __iter__(self) -> Iterator[Any]:
        self.delivered.clear()
        inner = super().__iter__()  # pyright: ignore[reportAttributeAccessIssue]
        return self._unpacked(inner)

    def _unpacked(self, inner: Iterator[Delivery]) -> Iterator[Any]:
        for indices, batch in inner:
            self.delivered.append(indices)
            yield batch


def follow(loader: DataLoader[Any], batches: Any, seed: int | None) -> DataLoader[Any]:
    """A copy of `loader` that reads `batches` (a batch sampler, or a sampler where the loader does not batch).

    Args:
        loader: the user's.
        batches: yields lists of indices, or single ones.
        seed: of the draws in the dataset; None leaves them to history.
    """
    for name in ("draw", "elements"):  # of TrainBatches and of EvalBatches
        if callable(draw := getattr(batches, name, None)):
            setattr(batches, name, KeptDraw(draw))
    changed: dict[str, Any] = {"sampler": batches, "worker_init_fn": WorkerStart(loader.worker_init_fn)}
    if loader.batch_sampler is not None:
        changed["batch_sampler"] = _around(loader.batch_sampler, batches)
    if type(loader).__iter__ is not DataLoader.__iter__:  # one with its own way to iterate must not meet our wrapping
        return copy_with(loader, None, dataset=SeededDataset(loader.dataset, seed), **changed)
    return copy_with(
        loader,
        Delivering,
        dataset=TaggedDataset(loader.dataset, seed),
        collate_fn=TaggedCollate(loader.collate_fn),
        delivered=deque(maxlen=DELIVERIES_KEPT),
        **changed,
    )


def copy_with(loader: DataLoader[Any], mixin: type | None, **attributes: Any) -> DataLoader[Any]:
    """A copy of a loader that is also a `mixin`, with other attributes.

    Neither called nor set as usual: its class may have any arguments, and DataLoader.__setattr__ refuses to replace a
    sampler or dataset, lest it be done by accident.
    """
    kind = (
        type(loader) if mixin is None else type(f"{mixin.__name__}{type(loader).__name__}", (mixin, type(loader)), {})
    )
    copied = kind.__new__(kind)
    copied.__dict__.update(loader.__dict__, _iterator=None, **attributes)
    return copied


def _around(batch_sampler: Any, batches: Any) -> Any:
    """For prediction Lightning wraps the batch sampler to note indices for its writers: keep that wrapper."""
    if isinstance(batch_sampler, BatchSampler) or not hasattr(batch_sampler, "seen_batch_indices"):
        return batches
    return type(batch_sampler)(batches)


def last_delivered(loader: Any) -> list[Any]:
    """Indices of the batch handed out last, which may be in use; empty where the loader does not tell them."""
    delivered = getattr(loader, "delivered", None)
    return delivered[-1] if delivered else []


def take_delivered(loader: Any) -> list[Any] | None:
    """Indices of the oldest batch not yet asked for; None where the loader does not tell them."""
    delivered = getattr(loader, "delivered", None)
    return delivered.popleft() if delivered else None

"""Iterable datasets: each process, and each worker of its loader, reads its own shard, or nobody reads anything."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lit_dp.engine.loaders import copy_with
from lit_dp.engine.peers import Peers
from lit_dp.errors import ConfigError, RunError


class ShardedStream(IterableDataset[Any]):
    """An iterable dataset of which every reader (process x loader worker) gets a part of its own.

    Args:
        inner: has `shard(index, count)`, which returns an iterable of the index-th of count disjoint parts; or asks
            `torch.utils.data.get_worker_info()` which part to read, and is told its place among all readers.
        rank: of this process.
        world_size: processes.
    """

    def __init__(self, inner: Any, rank: int, world_size: int) -> None:
        self.inner, self.rank, self.world_size = inner, rank, world_size

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "__getstate__", "__setstate__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        """Raises ConfigError at the first sample if the dataset has no way to read a part."""
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        place = _Place(self.rank * workers + worker, self.world_size * workers)
        if callable(shard := getattr(self.inner, "shard", None)):
            return iter(shard(place.index, place.count))  # pyright: ignore[reportArgumentType]
        return self._asking(place)

    def _asking(self, place: "_Place") -> Iterator[Any]:
        with place.told():
            inner = iter(self.inner)
        while True:
            try:
                with place.told():
                    sample = next(inner)
            except StopIteration:
                return
            if not place.asked and place.count > 1:
                raise ConfigError(self._refusal(place.count))
            yield sample

    def _refusal(self, readers: int) -> str:
        return (
            f"{type(self.inner).__name__} would be read whole by each of {readers} readers ({self.world_size} processes"
            f" x {readers // self.world_size} loader workers): give it a method shard(index, count) that returns the"
            " index-th of count disjoint parts, or let its __iter__ ask torch.utils.data.get_worker_info()"
        )


class _Place:
    """What get_worker_info() says: the index-th of count readers. Notes whether anybody asked."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.asked = index, count, False

    @contextmanager
    def told(self) -> Iterator[None]:
        # torch offers no public way to say it: get_worker_info returns this module's variable.
        real = torch_worker._worker_info
        torch_worker._worker_info = _Info(self, real)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torch_worker._worker_info = real


class _Info(SimpleNamespace):
    def __init__(self, place: _Place, real: Any) -> None:
        super().__init__(seed=real.seed if real else torch.initial_seed(), dataset=real.dataset if real else None)
        self._place = place

    @property
    def id(self) -> int:
        self._place.asked = True
        return self._place.index

    @property
    def num_workers(self) -> int:
        self._place.asked = True
        return self._place.count


_END = object()


class InStep:
    """Mixin over a DataLoader's class: ranks end together, whatever the lengths of their shards.

    Lengths are not known beforehand, so every batch costs a small exchange. Without it the rank that has more would
    wait in the next reduction until the timeout.
    """

    peers: Peers
    together: bool

    def __iter__(self) -> Iterator[Any]:
        inner = super().__iter__()  # pyright: ignore[reportAttributeAccessIssue]
        return self._together(inner) if self.together else self._none_without(inner)

    def _together(self, inner: Iterator[Any]) -> Iterator[Any]:
        for count in itertools.count():
            batch = next(inner, _END)
            more = self.peers.gather(batch is not _END)
            if not all(more):
                ended = ", ".join(str(rank) for rank, has in enumerate(more) if not has)
                if any(more) and self.peers.rank == 0:
                    print(
                        f"rank {ended} ran out of data after {count} batches: all ranks end the epoch here", flush=True
                    )
                return
            yield batch

    def _none_without(self, inner: Iterator[Any]) -> Iterator[Any]:
        first = next(inner, _END)
        some = self.peers.gather(first is not _END)
        if first is not _END and all(some):
            yield first
            yield from inner
        elif any(some):
            empty = ", ".join(str(rank) for rank, has in enumerate(some) if not has)
            raise RunError(
                f"the shard of rank {empty} is empty, and metrics need every rank: use fewer processes, or more shards"
            )


def stream_loader(loader: DataLoader[Any], stream: ShardedStream, peers: Peers, together: bool) -> DataLoader[Any]:
    """A copy of `loader` that reads `stream`; `together` in training, where every rank must take the same steps."""
    if peers.world_size == 1 and loader.num_workers < 2:
        return loader
    return copy_with(loader, InStep, dataset=stream, peers=peers, together=together)

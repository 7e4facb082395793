"""Iterable datasets: each process, and each worker of its loader, reads its own shard, or nobody reads anything."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lit_dp.engine.loaders import copy_with
from lit_dp.engine.peers import Peers
from lit_dp.engine.wrapping import Wrapping
from lit_dp.errors import ConfigError, RunError


class ShardedStream(Wrapping, IterableDataset[Any]):
    """An iterable dataset of which every reader (process x loader worker) gets a part of its own.

    Args:
        inner: has `shard(index, count)`, which returns an iterable of the index-th of count disjoint parts; or asks
            `torch.utils.data.get_worker_info()` which part to read, and is told its place among all readers. A
            `worker_init_fn` of the loader may do the asking.
        rank: of this process.
        world_size: processes.
    """

    def __init__(self, inner: Any, rank: int, world_size: int) -> None:
        self.__dict__.update(inner=inner, rank=rank, world_size=world_size, _asked_at_start=False)

    def place(self) -> "_Place":
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        return _Place(self.rank * workers + worker, self.world_size * workers, self.inner, self._asked_at_start)

    def __iter__(self) -> Iterator[Any]:
        """Raises ConfigError at the first sample if the dataset has no way to read a part."""
        place = self.place()
        if callable(shard := getattr(self.inner, "shard", None)):
            return iter(_shard(shard, place.index, place.count))
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
            if place.count > 1 and not place.asked:
                raise ConfigError(f"{self._name} would be read whole by each of {self._readers(place)}: {GIVE_A_SHARD}")
            if self.world_size > 1 and (how := place.asked_otherwise or self._knows_its_rank()):
                raise ConfigError(
                    f"{self._name} asks get_worker_info(), which counts the {self._readers(place)} here, and {how}: it"
                    f" would read a part of a part; {GIVE_A_SHARD}; or set use_distributed_sampler to false, which"
                    " leaves all loaders as they are"
                )
            yield sample

    @property
    def _name(self) -> str:
        return type(self.inner).__name__

    def _readers(self, place: "_Place") -> str:
        return f"{place.count} readers ({self.world_size} processes x {place.count // self.world_size} loader workers)"

    def _knows_its_rank(self) -> str:
        known = {"rank", "global_rank", "num_replicas", "world_size"} & getattr(self.inner, "__dict__", {}).keys()
        return f"has the attribute {min(known)!r}" if known else ""


GIVE_A_SHARD = (
    "give it a method shard(index, count) that returns the index-th of count disjoint parts, or let its __iter__ ask"
    " torch.utils.data.get_worker_info(), and nothing else, which part to read"
)


def _shard(shard: Callable[..., Any], index: int, count: int) -> Any:
    if "num_shards" in inspect.signature(shard).parameters:  # as the `datasets` library names it
        return shard(num_shards=count, index=index)
    return shard(index, count)


class _Place:
    """What get_worker_info() says: the index-th of count readers. Notes who was asked for a place."""

    def __init__(self, index: int, count: int, dataset: Any, asked: bool = False) -> None:
        self.index, self.count, self.dataset, self.asked, self.asked_otherwise = index, count, dataset, asked, ""

    @contextmanager
    def told(self) -> Iterator[None]:
        # torch offers no public way to say it: get_worker_info returns this module's variable.
        real, asked = torch_worker._worker_info, {name: getattr(dist, name) for name in ("get_rank", "get_world_size")}
        torch_worker._worker_info = _Info(self, real)  # pyright: ignore[reportAttributeAccessIssue]
        for name, function in asked.items():
            setattr(dist, name, self._noting(function))
        try:
            yield
        finally:
            torch_worker._worker_info = real
            for name, function in asked.items():
                setattr(dist, name, function)

    def _noting(self, function: Callable[..., int]) -> Callable[..., int]:
        def noted(*args: Any, **kwargs: Any) -> int:
            self.asked_otherwise = f"torch.distributed.{function.__name__}()"
            return function(*args, **kwargs)

        return noted


class _Info(SimpleNamespace):
    def __init__(self, place: _Place, real: Any) -> None:
        super().__init__(seed=real.seed if real else torch.initial_seed(), dataset=place.dataset)
        self._place = place

    @property
    def id(self) -> int:
        self._place.asked = True
        return self._place.index

    @property
    def num_workers(self) -> int:
        self._place.asked = True
        return self._place.count


class AskingAtStart:
    """A user's worker_init_fn, which may be what asks for a stream's part to read, and sets it in the dataset."""

    def __init__(self, inner: Callable[[int], None]) -> None:
        self.inner = inner

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        stream = info.dataset if info is not None else None
        if not isinstance(stream, ShardedStream):
            return self.inner(worker)
        place = stream.place()
        with place.told():
            self.inner(place.index)
        stream.__dict__["_asked_at_start"] = place.asked
        return None


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
    changed = {} if loader.worker_init_fn is None else {"worker_init_fn": AskingAtStart(loader.worker_init_fn)}
    return copy_with(loader, InStep, dataset=stream, peers=peers, together=together, **changed)

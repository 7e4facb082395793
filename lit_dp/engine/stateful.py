"""Loaders that keep a position of their own: what goes into a checkpoint is that of the batch in use, on every rank."""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from lit_dp.engine.wrapping import Wrapping

READ_AHEAD = 3
"""States kept: a checkpoint is saved before the batch that was read last, or before the one before that."""


class InUse(Wrapping):
    """A loader with `state_dict` and `load_state_dict`, which tells what its state was so many batches ago.

    Lightning asks for the state when it has read on: the next batch before a step begins, and one more where the loader
    has no length. A training that went on from there would leave these out.

    Args:
        inner: the loader.
    """

    first: int
    """Batches that training had taken in this epoch when the reading began."""

    def __init__(self, inner: Any) -> None:
        self.__dict__.update(inner=inner, first=0, _read=0, _before=deque(maxlen=READ_AHEAD))

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self._before.clear()
        self.__dict__["_read"] = 0
        return self._noting(iter(self.inner))

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            state = copy.deepcopy(self.inner.state_dict())
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._before.append(state)
            self.__dict__["_read"] += 1
            yield batch

    def begin_at(self, taken: int) -> None:
        """Say how many batches of the epoch had been taken when the iteration that goes on began."""
        self.__dict__["first"] = taken

    def state_after(self, taken: int) -> Any:
        """The state when so many batches of the epoch had been read."""
        ahead = self._read - (taken - self.first)
        return self._before[-ahead] if 0 < ahead <= len(self._before) else self.inner.state_dict()


def has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

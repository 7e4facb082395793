"""Counted point-to-point messages between the ranks of a group: all that an all-reduce is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]
"""(peer, contiguous tensor): the tensor is sent to, or filled from, rank `peer` of the wire."""


@dataclass
class Traffic:
    """What this rank sent: payload bytes, messages that were not empty, and steps.

    A step is one round of the lock-step algorithm: the messages in it are posted together and awaited together. A rank
    that has nothing to do in a round counts it as well, so `steps` is the critical path and equal on all ranks.
    `uncounted` is how many all-reduces went through the backend's own algorithm, which tells nobody what it sends.
    """

    bytes_sent: int = 0
    messages_sent: int = 0
    steps: int = 0
    uncounted: int = 0


_counting = threading.Lock()  # lanes of a gradient exchange count into the same block
_counters: ContextVar[tuple[Traffic, ...]] = ContextVar("_counters", default=())


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this rank's calls to `all_reduce` send inside the block, in this thread only. Blocks can be nested."""
    traffic = Traffic()
    token = _counters.set((*_counters.get(), traffic))
    try:
        yield traffic
    finally:
        _counters.reset(token)


_connected: WeakSet[dist.ProcessGroup] = WeakSet()


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL builds its communicator in the first call of a group, which every rank must join; a step need not."""
    if device.type == "cuda" and group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


class Wire:
    """The ranks of `group` as one of them sees them: `rank`, `size`, and steps in which messages pass.

    Ranks count from 0 within the group. Every rank of the group must build one at the same time.

    Raises:
        ValueError: this process is not in `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.group is None or self.rank < 0:
            raise ValueError(
                f"all_reduce: global rank {dist.get_rank()} is not in the group: call it only on the group's own ranks"
            )
        self.members: Sequence[int] = range(self.size)
        self._counters = _counters.get()
        _connect(self.group, device)

    def among(self, members: Sequence[int]) -> Wire:
        """The same wire for `members` only, renumbered from 0: `rank` is the position of this rank among them."""
        wire = copy(self)
        wire.members, wire.rank, wire.size = members, members.index(self.rank), len(members)
        return wire

    def exchange(self, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> None:
        """One step: post all messages, wait for all. Empty tensors are not sent; both ends know their size.

        Several messages from one rank to another in one step arrive in the order of both lists.
        """
        self.rest(steps=1)
        with _counting:
            for traffic in self._counters:
                traffic.bytes_sent += sum(tensor.nbytes for _, tensor in sends)
                traffic.messages_sent += sum(tensor.numel() > 0 for _, tensor in sends)
        posts = [*self._posts(dist.irecv, receives), *self._posts(dist.isend, sends)]
        for work in dist.batch_isend_irecv(posts) if posts else ():
            work.wait()

    def rest(self, steps: int) -> None:
        """Nothing to do for `steps` steps."""
        with _counting:
            for traffic in self._counters:
                traffic.steps += steps

    def backend_all_reduce(self, x: Tensor) -> None:
        """The backend's own algorithm. What it sends is not known here."""
        for traffic in self._counters:
            traffic.uncounted += 1
        dist.all_reduce(x, group=self.group)

    def _posts(self, op: Callable[..., dist.Work | None], messages: Sequence[Message]) -> Iterator[dist.P2POp]:
        """Raw bytes, so that any dtype passes any backend; `group_peer` is translated to a global rank by torch."""
        for peer, tensor in messages:
            if tensor.numel():
                payload = tensor.view(torch.uint8)
                yield dist.P2POp(op, payload, group=self.group, group_peer=self.members[peer])


def span(x: Tensor, first: int, last: int, of: int) -> Tensor:
    """View of blocks `first` .. `last` - 1 of 1-D `x` cut in `of` nearly equal blocks: block i starts at i S // of."""
    size = x.numel()
    return x[first * size // of : last * size // of]

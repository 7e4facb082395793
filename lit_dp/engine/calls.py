"""Calls that all ranks must make together (barriers, broadcasts, reductions): who makes one alone is found, and named.

By itself such a call would wait for ever; or meet another one of its kind, and both would go on with wrong values; or
gloo would end the process.
"""

import sys
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lit_dp.engine.peers import Peers
from lit_dp.engine.places import place
from lit_dp.engine.randomness import derive
from lit_dp.errors import RunError


class JointCalls:
    """Before a call is made ranks find out whether all of them make it. All ranks build it together.

    Args:
        peers: all ranks.
        timeout: after which a call that not all ranks make is an error.
    """

    def __init__(self, peers: Peers, timeout: timedelta | None) -> None:
        self.peers = peers
        # Of its own: nothing else can come between. On the CPU, beside NCCL too: no device has to wait.
        self._group: Any = dist.new_group(timeout=timeout, backend="gloo")
        self.gradients: Any = dist.new_group(timeout=timeout) if dist.get_backend() == "gloo" else None
        """For DistributedDataParallel on gloo: it would take a user's own all-reduce, made by one rank, for its own."""

    def meet(self, kind: str) -> None:
        """Every rank is about to make a call of that kind.

        The same call is one from the same function of Lightning's, or of ours, called from the same function of the
        user's; or one that the user makes directly, from anywhere: `if` and `else` may do it in two functions.

        Raises:
            RunError: on all ranks, where their calls differ.
        """
        here = place(sys._getframe(1))
        own = derive(kind, here.logged, here.library, here.function if here.library else "") >> 2
        both = torch.tensor([own, -own])
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        if both.tolist() != [own, -own]:
            self._refuse(f"{kind}: {here}")

    def _refuse(self, call: str) -> None:
        calls: list[Any] = [None] * self.peers.world_size
        dist.all_gather_object(calls, call, self._group)
        said = "; ".join(f"rank {rank} in {other}" for rank, other in enumerate(calls))
        raise RunError(f"ranks meet in different calls: {said}. Make each of them on all ranks, in the same order")


_made: WeakKeyDictionary[Any, dict[timedelta | None, JointCalls]] = WeakKeyDictionary()


def joint_calls(peers: Peers, timeout: timedelta | None) -> JointCalls:
    """Groups have threads and connections: one trainer after another uses the same, until the ranks part."""
    of_world = _made.setdefault(dist.group.WORLD, {})
    if timeout not in of_world:
        of_world[timeout] = JointCalls(peers, timeout)
    return of_world[timeout]


class JointStrategy(DDPStrategy):
    """Lightning's DDP, in which a call that only some ranks make ends in an error that says which."""

    calls: JointCalls | None = None

    def setup_distributed(self) -> None:
        super().setup_distributed()
        self.calls = joint_calls(Peers(self.global_rank, self.world_size), self._timeout)

    def meet(self, kind: str, group: Any = None) -> None:
        """See `JointCalls.meet`. In a `group` of some ranks only nothing is known of the others."""
        if self.calls is not None and dist.is_initialized() and group in (None, dist.group.WORLD):
            self.calls.meet(kind)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.meet("barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.meet("broadcast")
        return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor):
            self.meet("reduce", group)
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self.meet("all_gather", group)
        return super().all_gather(tensor, group, sync_grads)

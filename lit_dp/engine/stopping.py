"""On which step do all ranks stop? Agreed without a collective, and at no cost while nobody asks."""

import threading
from collections.abc import Callable
from typing import Any

from lit_dp.engine.channel import Message

ASK, AT = "stop", "at"
Tick = tuple[int, ...]
"""A place in the training, in the order of time: the same sequence on all ranks, where some may leave out some."""


class StopAgreement:
    """Makes all ranks stop before the same piece of work.

    Ranks are never far apart, but not in step either: one may be told to stop while another is in the next step,
    waiting for the first one's gradients. So when one asks, every rank says, in a thread of its own, which piece of
    work it has begun, and the furthest of them is what all of them finish.

    Args:
        world_size: ranks that have to agree.
        post: says something to all ranks, as Channel.post.
    """

    def __init__(self, world_size: int, post: Callable[[str, Any], None]) -> None:
        self.world_size, self._post = world_size, post
        self.asked: Message | None = None
        """Who asked first, and why (its content)."""
        self._begun: Tick = (0,)
        self._begun_by: dict[int, Tick] = {}
        self._lock, self._complete = threading.Lock(), threading.Event()

    def ask(self, why: Any) -> None:
        """Any rank, any thread, as often as one likes."""
        if self.asked is None:
            self._post(ASK, why)

    def receive(self, message: Message) -> None:
        """In the channel's thread."""
        if message.kind == ASK and self.asked is None:
            with self._lock:  # what is begun from here on is begun in the knowledge of it
                self.asked, begun = message, self._begun
            self._post(AT, begun)
        elif message.kind == AT:
            self._begun_by[message.rank] = message.content
            if len(self._begun_by) == self.world_size:
                self._complete.set()

    def stops_before(self, tick: Tick) -> bool:
        """Called on every rank before it begins a piece of work: whether not to. Waits only where a stop was asked for.

        Nothing that ranks do together may lie between two ticks that one rank passes and another does not.
        """
        with self._lock:
            if self.asked is None:
                self._begun = tick
                return False
        self._complete.wait()  # other ranks answer whatever they are doing; if one is lost, this process is ended
        return tick > max(self._begun_by.values())

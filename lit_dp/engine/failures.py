"""The first failure of a run is known on all ranks: who fails because another did says nothing, and nobody stays.

The first to fail also ends first: a launcher takes what ends first for the cause.
"""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lit_dp.engine.causes import LOST_PEER, NOT_ALL_JOINED, Report, brief, cause, say, say_when_uncaught
from lit_dp.engine.channel import Channel
from lit_dp.engine.peers import Peers
from lit_dp.engine.places import place
from lit_dp.engine.relay import BYE, GONE, LOST, Message
from lit_dp.errors import REPORT, ConfigError, RunError

FAILED, IN = "failed", "in"
FIRST_SECONDS = 5.0
"""What the first that fails gets to end, before the others do."""
GRACE_SECONDS = 2.0
"""What the others get after that to end by themselves; then they are ended, whatever they wait for."""
TURN_SECONDS = 0.02
"""Before a rank speaks of one that died: whoever ended that may be ending all."""
UNWIND_SECONDS = 0.1
"""Before another rank says where it is: an exception may be on its way out of there, and then it is nowhere."""
NEWS_SECONDS = 5.0
"""How long a rank that lost its connections waits to hear why."""
IN_GLOO = re.compile(r"\[/\S+\] *")


class Failures:
    """Tells all ranks of the first that fails, and ends this process where it does not end by itself.

    All ranks build it together, in the main thread.

    Args:
        peers: all ranks.
        host: rank 0's, as Channel's.
        doing: says what this rank is doing (epoch, step), and with which samples.
    """

    def __init__(self, peers: Peers, host: str, doing: Callable[[], tuple[str, str]]) -> None:
        self.peers, self.host, self._tell_doing = peers, socket.gethostname(), doing
        self.first: Message | None = None
        self._news, self._known = threading.Event(), threading.Event()
        self._first_gone, self._left = threading.Event(), threading.Event()
        self._places: dict[int, str] = {}
        self._placed, self._saying_where = threading.Event(), threading.Lock()
        self._finished: set[int] = set()
        self._was_at = ""  # when the first failed
        self._main = threading.get_ident()
        self.listeners: list[Callable[[Message], None]] = []
        """Take all messages, too, in the channel's thread."""
        self.channel = Channel(peers, host, self._receive)

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank fails, and keep in the exception what is to be said of it (`causes.told`): it
        may be caught. Once for an exception.

        Of another rank's failure this one's may be an echo. Then there is nothing to say, but to end after the other.
        """
        if REPORT in error.__dict__:
            return
        if _is_echo(error):
            self._news.wait(NEWS_SECONDS)
        if self.first is None:
            self.channel.post(FAILED, (self.host, f", {''.join(self._doing())}: {brief(error)}"))
            self._known.wait(NEWS_SECONDS)
        self._say_where()
        error.__dict__[REPORT] = Report(after=self._end_of_first) if self.of_another else Report(self._told(error))
        say_when_uncaught()

    @property
    def of_another(self) -> bool:
        """Whether another rank was the first that failed."""
        return self.first is not None and self.first.rank != self.peers.rank

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def leave(self) -> None:
        """This rank ends by itself, or goes on to something else."""
        self._left.set()
        self.channel.close(until_the_end=self.first is not None)

    # --- words ---

    def _told(self, error: BaseException) -> str:
        at, samples = self._doing()
        words, said = "", IN_GLOO.sub("", str(error))
        if self.peers.world_size > 1 and NOT_ALL_JOINED.search(str(error)) and not isinstance(error, RunError):
            words = f"not all ranks joined the same exchange: {self._where_ranks_are()}; call it on all ranks ({said})"
        elif LOST_PEER.search(str(error)) and self._finished:
            others = ", ".join(map(str, sorted(self._finished)))
            words = f"rank {others} has ended its training before this one: all must take equally many steps ({said})"
        return cause(error, f"rank {self.peers.rank} on {self.host}{', ' * bool(at)}{at}", samples, words)

    def _end_of_first(self) -> str:
        """Wait until the first that failed has ended; returns what this rank has to say of it."""
        self._first_gone.wait(FIRST_SECONDS)
        words = self._echo()
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's agent started this rank
            # It looks every now and then, and of several that have ended it takes any for the first.
            time.sleep(GRACE_SECONDS)
        return words

    def _echo(self) -> str:
        """Nothing, where the same launcher hears of the failure first hand."""
        assert self.first is not None
        rank, (host, words) = self.first.rank, self.first.content
        if self.first.kind == LOST:
            time.sleep(TURN_SECONDS)
            if host == self.host and self.peers.rank == min({0, 1} - {rank}):
                line = f"error: rank {rank} on {host}{words}; rank {self.peers.rank} was at {self._was_at}"
                print(line, file=sys.stderr, flush=True)
        return "" if host == self.host and self._first_gone.is_set() else f"error: rank {rank} on {host}{words}"

    def _where_ranks_are(self) -> str:
        self._placed.wait(NEWS_SECONDS)
        return "; ".join(f"rank {rank} {place}" for rank, place in sorted(self._places.items()))

    def _say_where(self) -> None:
        """Once."""
        if self._saying_where.acquire(blocking=False):
            self.channel.post(IN, self._where_i_am())

    def _where_i_am(self) -> str:
        return f"is in {place(sys._current_frames().get(self._main))} ({self._doing()[0]})"

    def _doing(self) -> tuple[str, str]:
        with suppress(Exception):  # of a trainer that is being taken apart
            return self._tell_doing()
        return "", ""

    # --- in the channel's thread ---

    def _receive(self, message: Message) -> None:
        if message.kind in (FAILED, LOST) and self.first is None:
            self._begin_to_end(message)
        if self.first is not None and message.rank == self.first.rank and message.kind in (LOST, GONE):
            self._first_gone.set()
        if message.kind == BYE:
            self._finished.add(message.rank)
            self._news.set()
        if message.kind in (IN, BYE):
            self._places.setdefault(message.rank, message.content or "has ended its training")
            if len(self._places) == self.peers.world_size:
                self._placed.set()
        for listener in self.listeners:
            listener(message)

    def _begin_to_end(self, message: Message) -> None:
        if message.kind == LOST:
            words = " ended without a word (killed? out of memory? see dmesg there)"
            message = message._replace(content=(message.content, words))
        self._was_at, self.first = "".join(self._doing()), message
        self._known.set()
        self._news.set()
        if message.rank != self.peers.rank:
            threading.Thread(target=self._end_soon, name="lit_dp end", daemon=True).start()

    def _end_soon(self) -> None:
        time.sleep(UNWIND_SECONDS)
        self._say_where()
        self._first_gone.wait(FIRST_SECONDS)
        if self._left.wait(GRACE_SECONDS):
            return
        say(self._echo())
        threading.Timer(1.0, os._exit, [1]).start()  # whoever does not read what is printed
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _is_echo(error: BaseException) -> bool:
    """Whether another rank's end explains it."""
    return not isinstance(error, ConfigError | RunError) and bool(LOST_PEER.search(str(error)))

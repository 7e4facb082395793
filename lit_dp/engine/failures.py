"""The first failure of a run is known on all ranks: who fails because another did says nothing, and nobody stays."""

import linecache
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from lit_dp.engine.channel import LOST, Channel, Message
from lit_dp.engine.peers import Peers
from lit_dp.errors import REPORT, ConfigError, RunError

FAILED, IN = "failed", "in"
GRACE_SECONDS = 3.0
"""What a rank gets to end by itself after another has failed; then its process is ended, whatever it waits for."""
NEWS_SECONDS = 5.0
"""How long a rank that lost its connections waits to hear why."""
LOST_PEER = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed", re.IGNORECASE)
NOT_ALL_JOINED = re.compile(r"timed? ?out|op\.preamble\.length", re.IGNORECASE)
NOT_OF_THE_USER = ("lightning", "torch", "lit_dp", "jsonargparse")


class Failures:
    """Tells all ranks of the first that fails, and ends this process where it does not end by itself.

    All ranks build it together.

    Args:
        peers: all ranks.
        host: rank 0's, as Channel's.
        doing: says what this rank is doing, for messages: epoch, step, samples.
    """

    def __init__(self, peers: Peers, host: str, doing: Callable[[], str]) -> None:
        self.peers, self._doing = peers, doing
        self.first: Message | None = None
        self._known, self._left = threading.Event(), threading.Event()
        self._places: dict[int, str] = {}
        self._placed = threading.Event()
        self._main = threading.get_ident()
        self.listeners: list[Callable[[Message], None]] = []
        """Take all other messages, in the channel's thread."""
        self.channel = Channel(peers, host, self._receive)

    def report(self, error: BaseException) -> bool:
        """Tell the others why this rank fails, and keep it in the exception (`errors.REPORT`). Of the main thread.

        Returns:
            Whether it is the first failure of the run: otherwise the cause is another rank's, and this rank's is noise.
        """
        if LOST_PEER.search(str(error)) and not isinstance(error, ConfigError | RunError):
            self._known.wait(NEWS_SECONDS)
        if self.first is None:
            self.channel.post(FAILED, None)
            self._known.wait(NEWS_SECONDS)
        own = self.first is None or self.first.rank == self.peers.rank
        error.__dict__[REPORT] = self._told(error) if own else ""
        return own

    def leave(self) -> None:
        """This rank ends by itself, or goes on to something else."""
        self._left.set()
        self.channel.close()

    def _told(self, error: BaseException) -> str:
        where = f"rank {self.peers.rank} on {socket.gethostname()}, {self._doing()}"
        words = " ".join(str(error).split())
        if isinstance(error, ConfigError | RunError):
            return f"error: {where}: {words}"
        if NOT_ALL_JOINED.search(words) and self.peers.world_size > 1:
            words = f"not all ranks joined the same exchange: {self._where_ranks_are()}; call it on all ranks ({words})"
        return f"{''.join(traceback.format_exception(error))[-3000:]}error: {where}: {type(error).__name__}: {words}"

    def _where_ranks_are(self) -> str:
        self._placed.wait(NEWS_SECONDS)
        return "; ".join(f"rank {rank} is in {place}" for rank, place in sorted(self._places.items()))

    def _receive(self, message: Message) -> None:
        if message.kind in (FAILED, LOST) and self.first is None:
            self.first = message
            self.channel.post(IN, place_of(sys._current_frames().get(self._main), self._doing()))
            self._known.set()
            if message.rank != self.peers.rank:
                threading.Thread(target=self._end_soon, args=[message], name="lit_dp end", daemon=True).start()
        elif message.kind == IN:
            self._places[message.rank] = message.content
            if len(self._places) == self.peers.world_size:
                self._placed.set()
        for listener in self.listeners:
            listener(message)

    def _end_soon(self, message: Message) -> None:
        if message.kind == LOST and self.peers.rank == min({0, 1} - {message.rank}):
            print(
                f"error: rank {message.rank} ended without a word (killed? out of memory? see dmesg on its host);"
                f" rank {self.peers.rank} was at {self._doing()}",
                file=sys.stderr,
                flush=True,
            )
        if not self._left.wait(GRACE_SECONDS):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)


def place_of(frame: FrameType | None, doing: str) -> str:
    """Where a thread is, as a person would look for it: the innermost line of the user's own code, if there is one."""
    while frame is not None and _is_library(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    if frame is None:
        return doing
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} `{line}` ({doing})"


def _is_library(file: str, module: str) -> bool:
    return module.split(".")[0] in NOT_OF_THE_USER or "importlib" in file or "/lib/python" in file or file[:1] == "<"

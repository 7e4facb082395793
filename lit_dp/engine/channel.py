"""Messages between ranks beside torch.distributed: they arrive while ranks wait in a collective, and tell who is gone.

Rank 0 relays. Every rank gets every message, its own too, and all get them in the same order: what came first is the
same on all ranks, with no further agreement. The system closes the connections of a process that dies, however it
dies, so its end is a message too. Nothing runs while nobody speaks.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any
from weakref import WeakSet

from lit_dp.engine.peers import Peers
from lit_dp.engine.relay import BYE, GONE, LOST, Message, Offer, Relay, over, wait_for_ever
from lit_dp.errors import RunError

SECONDS_TO_CONNECT = 10
SECONDS_TO_LEAVE = 1.0


class Channel:
    """Every rank's end. All ranks build it together; `receive` is called in a thread of its own, message by message.

    Args:
        peers: all ranks.
        host: name or address of rank 0's host, as the others know it.
        receive: takes a message. It must be quick, and must not use torch.distributed.

    Raises:
        RunError: rank 0 cannot be reached.
    """

    def __init__(self, peers: Peers, host: str, receive: Callable[[Message], None]) -> None:
        self.rank, self._receive, self._sending = peers.rank, receive, threading.Lock()
        self._connection: Connection | None = None
        self._relay = Relay(peers.world_size, host) if peers.world_size > 1 and peers.rank == 0 else None
        self._relay_left, self._goodbye = False, threading.Event()
        self._left = self._stays = False
        _drop_what_is_left()
        if peers.world_size == 1:
            return
        offer: Offer = peers.from_first(self._relay.offer if self._relay is not None else None)
        self._connection = _connected(offer, peers.rank)
        _open.add(self)
        listening = [self._connection, offer.hosts[-1]]
        threading.Thread(target=self._listen, args=listening, name="lit_dp channel", daemon=True).start()

    def post(self, kind: str, content: Any = None) -> None:
        """Say something to all ranks; of any thread. Where nobody is left to hear it nothing happens."""
        message = Message(kind, self.rank, content)
        if self._connection is None:
            self._receive(message)
            return
        with self._sending, suppress(OSError):  # it is closed, or rank 0 is gone
            self._connection.send(message)

    def close(self, until_the_end: bool = False) -> None:
        """Say goodbye: the end of this process is then no loss. Waits until all others are told.

        Args:
            until_the_end: stay connected and listen for as long as this process lives, or until it builds another
                channel: others then learn when it is `GONE`. Otherwise it is so at once.
        """
        if self._connection is None:
            return
        self._left, self._stays = True, until_the_end
        self.post(BYE)
        self._goodbye.wait(SECONDS_TO_LEAVE)

    def drop(self) -> None:
        """End what `until_the_end` has kept."""
        if self._connection is not None and not self._connection.closed:
            with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as link:
                link.shutdown(socket.SHUT_RDWR)  # wakes the listener up

    def forget(self) -> None:
        """In a forked child: as long as a loader worker held it open too, the end of this rank would not be noticed."""
        for end in (self._connection, self._relay):
            if end is not None:
                end.close()

    def _listen(self, connection: Connection, relays_host: str) -> None:
        said_goodbye = False
        try:
            while not said_goodbye or self._stays:
                message = connection.recv()
                self._relay_left |= message[:2] == (BYE, 0)
                self._receive(message)
                if message[:2] == (BYE, self.rank):
                    said_goodbye = True
                    self._goodbye.set()
        except (EOFError, OSError):
            self._receive(Message(GONE if self._relay_left else LOST, 0, relays_host))
        with self._sending:
            connection.close()
        self._goodbye.set()


_open: "WeakSet[Channel]" = WeakSet()


def _drop_what_is_left() -> None:
    for channel in list(_open):
        if channel._left:
            channel.drop()


def _forget_all() -> None:
    for channel in _open:
        channel.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _connected(offer: Offer, rank: int) -> Connection:
    reasons = []
    for host in (*["127.0.0.1"] * (rank == 0), *offer.hosts):
        try:
            link = socket.create_connection((host, offer.port), SECONDS_TO_CONNECT)
            connection = over(link, 4 * SECONDS_TO_CONNECT)  # others may come first
            answer_challenge(connection, offer.key)
            deliver_challenge(connection, offer.key)
            connection.send((rank, socket.gethostname()))
            wait_for_ever(connection)
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            reasons.append(f"{host}: {error or type(error).__name__}")
    raise RunError(f"rank {rank} on {socket.gethostname()} cannot reach rank 0 ({'; '.join(reasons)})")

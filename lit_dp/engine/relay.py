"""Rank 0's part of the channel between ranks: it passes every message on to all of them, one after the other."""

import os
import pickle
import secrets
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, NamedTuple

BYE, GONE, LOST = "bye", "gone", "lost"
HANDSHAKE_SECONDS = 5
"""What a stranger gets to say nothing, while ranks wait."""
SILENT_SECONDS = 60
"""After which a host that answers nothing any more (no power, no network) counts as lost."""


class Message(NamedTuple):
    """What `rank` says.

    When its connection has ended `LOST` is said of it, or `GONE` if it had said `BYE`; the content is its host.
    """

    kind: str
    rank: int
    content: Any = None


class Offer(NamedTuple):
    """Where rank 0 listens: `hosts` to try in turn, and a key that both sides have to know."""

    hosts: tuple[str, ...]
    port: int
    key: bytes


class Relay:
    """Works in a thread of its own until all ranks are gone.

    Args:
        world_size: ranks that will connect, rank 0 among them.
        host: name or address of this host, as other ranks know it.
    """

    def __init__(self, world_size: int, host: str) -> None:
        self._missing = world_size
        self._server = _server(host)
        self.offer = Offer((host, socket.gethostname()), self._server.getsockname()[1], secrets.token_bytes(32))
        self._ranks: dict[Connection, tuple[int, str]] = {}  # rank and host
        self._left: set[int] = set()
        self._said: list[bytes] = []  # before the last rank came
        threading.Thread(target=self._run, name="lit_dp relay", daemon=True).start()

    def close(self) -> None:
        """Close what a forked child has of it."""
        for end in (self._server, *self._ranks):
            end.close()

    def _run(self) -> None:
        while self._missing or self._ranks:
            for ready in wait([*self._ranks, *[self._server] * bool(self._missing)]):
                if isinstance(ready, Connection):
                    self._hear(ready)
                else:
                    self._admit()

    def _admit(self) -> None:
        connection = None
        try:
            connection = over(self._server.accept()[0], HANDSHAKE_SECONDS)
            deliver_challenge(connection, self.offer.key)
            answer_challenge(connection, self.offer.key)
            known = connection.recv()
        except (OSError, EOFError, AuthenticationError):  # a stranger, or a rank that died just now
            if connection is not None:
                connection.close()
            return
        wait_for_ever(connection)
        self._ranks[connection] = known
        for data in self._said:
            _send(connection, data)
        self._missing -= 1
        if not self._missing:
            self._said.clear()
            self._server.close()

    def _hear(self, connection: Connection) -> None:
        rank, host = self._ranks[connection]
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            del self._ranks[connection]
            connection.close()
            data = pickle.dumps(Message(GONE if rank in self._left else LOST, rank, host))
        if pickle.loads(data).kind == BYE:
            self._left.add(rank)
        if self._missing:
            self._said.append(data)
        # Rank 0 last: when it has heard all others have, and its process, which this one lives in, may end.
        for other in sorted(self._ranks, key=lambda other: self._ranks[other][0] == 0):
            _send(other, data)


def over(link: socket.socket, seconds: int) -> Connection:
    """A connection over a socket; that its other end is gone is noticed, and for now it is waited for only so long."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    idle = {"TCP_KEEPIDLE": SILENT_SECONDS // 2, "TCP_KEEPINTVL": SILENT_SECONDS // 6, "TCP_KEEPCNT": 3}
    for name, value in {**idle, "TCP_USER_TIMEOUT": SILENT_SECONDS * 1000}.items():
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    link.setblocking(True)
    for option in options:
        link.setsockopt(*option)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
    return Connection(link.detach())


def wait_for_ever(connection: Connection) -> None:
    """The other side has shown who it is."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _send(connection: Connection, data: bytes) -> None:
    with suppress(OSError):
        connection.send_bytes(data)


def _server(host: str) -> socket.socket:
    """Listens on all of this host's addresses: which of them others know it by is not known here."""
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server(("127.0.0.1", 0), backlog=128)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)

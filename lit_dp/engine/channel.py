"""Messages between ranks beside torch.distributed: they arrive while ranks wait in a collective, and tell who is gone.

Rank 0 relays. Every rank gets every message, its own too, and all get them in the same order: what came first is the
same on all ranks, with no further agreement. The system closes the connections of a process that dies, however it
dies, so its end is a message too.
"""

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NamedTuple

from lit_dp.engine.peers import Peers
from lit_dp.errors import RunError

BYE, LOST = "bye", "lost"
SECONDS_TO_LEAVE = 1.0


class Message(NamedTuple):
    """What `rank` says. `LOST` is said of it: its connection broke before it said `BYE`."""

    kind: str
    rank: int
    content: Any = None


class Channel:
    """Every rank's end. All ranks build it together; `receive` is called in a thread of its own, message by message.

    Args:
        peers: all ranks.
        host: name or address of rank 0's host, as the others see it.
        receive: takes a message. It must be quick, and must not use torch.distributed.

    Raises:
        RunError: rank 0 cannot be reached.
    """

    def __init__(self, peers: Peers, host: str, receive: Callable[[Message], None]) -> None:
        self.rank, self._receive, self._sending = peers.rank, receive, threading.Lock()
        self._connection: Connection | None = None
        self._relay_left, self._ended = False, threading.Event()
        if peers.world_size == 1:
            return
        relay = _Relay(peers.world_size, host) if peers.rank == 0 else None
        address, key = peers.from_first((relay.address, relay.key) if relay is not None else None)
        try:
            self._connection = Client(address, authkey=key)
        except OSError as error:
            raise RunError(f"rank {peers.rank} cannot reach rank 0's host at {address}: {error.strerror}") from error
        self._connection.send(peers.rank)
        threading.Thread(target=self._listen, name="lit_dp channel", daemon=True).start()

    def post(self, kind: str, content: Any = None) -> None:
        """Say something to all ranks; of any thread. Where nobody is left to hear it nothing happens."""
        message = Message(kind, self.rank, content)
        if self._connection is None:
            self._receive(message)
            return
        with self._sending, suppress(OSError):
            self._connection.send(message)

    def close(self) -> None:
        """Say goodbye: the end of this process is then no loss. Waits until all others are told."""
        if self._connection is not None:
            self.post(BYE)
            self._ended.wait(SECONDS_TO_LEAVE)

    def _listen(self) -> None:
        assert self._connection is not None
        message = Message("", self.rank)
        try:
            while message != (BYE, self.rank, None):
                message = self._connection.recv()
                self._relay_left |= message == (BYE, 0, None)
                self._receive(message)
        except (EOFError, OSError):
            if not self._relay_left:
                self._receive(Message(LOST, 0))
        self._ended.set()


class _Relay:
    """Rank 0's part: passes every message on to all ranks, one after the other."""

    def __init__(self, world_size: int, host: str) -> None:
        self.key = secrets.token_bytes(32)
        self._listener = _listener(host, world_size, self.key)
        self.address = self._listener.address
        if self.address[0] == "0.0.0.0":
            self.address = (socket.gethostbyname(socket.gethostname()), self.address[1])
        threading.Thread(target=self._run, args=[world_size], name="lit_dp relay", daemon=True).start()

    def _run(self, world_size: int) -> None:
        ranks: dict[Connection, int] = {}
        while len(ranks) < world_size:
            connection = self._listener.accept()
            ranks[connection] = connection.recv()
        self._listener.close()
        while ranks:
            for connection in wait(list(ranks)):
                rank = ranks[connection]  # pyright: ignore[reportArgumentType]
                try:
                    message = connection.recv()  # pyright: ignore
                except (EOFError, OSError):
                    message = Message(LOST, rank)
                if message.kind in (BYE, LOST):
                    del ranks[connection]  # pyright: ignore[reportArgumentType]
                for other in ranks:
                    _send(other, message)
                if message.kind == BYE:  # it leaves when all others have heard of it
                    _send(connection, message)


def _send(connection: Any, message: Message) -> None:
    with suppress(OSError):
        connection.send(message)


def _listener(host: str, backlog: int, key: bytes) -> Listener:
    try:
        return Listener((host, 0), backlog=backlog, authkey=key)
    except OSError:  # a name that leads here, but is no address of this host's own: a service in front of it
        return Listener(("0.0.0.0", 0), backlog=backlog, authkey=key)

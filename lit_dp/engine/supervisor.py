"""The typed command as a supervisor: it starts the ranks of this host as its children, and watches over them.

A rank leads a process group of its own, so that it is killed together with its loader workers, and so that a terminal's
Ctrl-C reaches the supervisor alone, which sends the ranks one SIGTERM. In return what a terminal does to its foreground
job has to be handed on (Ctrl-Z), and ranks cannot read from it: their standard input is empty.

Neither torch nor Lightning is imported here.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator

from lit_dp.engine.lifeline import CAUSE_FD, die_with_parent
from lit_dp.engine.signal_pipe import SignalPipe
from lit_dp.engine.watch import SIGNALS, Watch
from lit_dp.errors import RunError


def supervise(ranks: int, hosts: int = 1, command: list[str] | None = None) -> int:
    """Start this host's ranks and watch over them. Returns in each rank, and never in the process that calls it.

    A rank has a launcher's variables: LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and
    LIT_DP_SUPERVISED. It gets SIGTERM if the supervisor dies.

    Args:
        ranks: processes of this host.
        hosts: of the whole run. With several, NODE_RANK, MASTER_ADDR and MASTER_PORT are set and tell which this is.
        command: what a rank executes in place of returning, where this process must not be forked.

    Returns:
        The rank, of `ranks * hosts`.

    Raises:
        SystemExit: in the supervisor. The code is that of the first rank that failed, 128 + n if signal n killed it;
            without a failure 75 if one saved and left, otherwise 0; after a second SIGINT 130.
        RunError: the system starts no more processes.
    """
    signals = SignalPipe(SIGNALS)
    told, tell = os.pipe()
    os.set_blocking(told, False)
    os.set_blocking(tell, False)
    parent = os.getpid()
    first = ranks * int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))
    with _reserved_port() as port:
        pids = _forked(ranks, signals)
        if os.getpid() == parent:
            os.close(tell)
            sys.exit(Watch(pids, first, signals, told).until_all_have_ended())
    os.close(told)
    os.setpgid(0, 0)
    die_with_parent(signal.SIGTERM, parent)
    signals.close()
    _set_variables(ranks, hosts, port, local_rank=len(pids), cause_fd=f"{tell}:{os.fstat(tell).st_ino}")
    if command is not None:
        os.set_inheritable(tell, True)
        os.execv(command[0], command)
    return first + len(pids)


def _forked(ranks: int, signals: SignalPipe) -> list[int]:
    """Process ids of all ranks, in the supervisor; in a rank, those of the ranks before it."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # what was imported is shared: collections, and the end of the interpreter, would copy it page by page
    signals.hold_back()
    pids: list[int] = []
    try:
        while len(pids) < ranks:
            pid = os.fork()
            if pid == 0:
                return pids
            pids.append(pid)
    except OSError as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        raise RunError(f"the system starts only {len(pids)} of {ranks} processes: {error.strerror}") from error
    signals.let_in()
    return pids


def _set_variables(ranks: int, hosts: int, port: str, local_rank: int, cause_fd: str) -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)  # who reads a terminal in the background is stopped, and the others would wait for it
    os.close(empty)
    os.environ.pop("RANK", None)  # an image's or a pod's, not this process's
    os.environ.update(
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(ranks * hosts),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        MASTER_PORT=port,
        LIT_DP_SUPERVISED="1",
        **{CAUSE_FD: cause_fd},
    )


@contextlib.contextmanager
def _reserved_port() -> Iterator[str]:
    """MASTER_PORT, or a free port that nobody else is given until rank 0 listens there."""
    if "MASTER_PORT" in os.environ:
        yield os.environ["MASTER_PORT"]
        return
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = str(held.getsockname()[1])
        if sys.platform != "linux":  # elsewhere rank 0 could not listen on it
            held.close()
        yield port

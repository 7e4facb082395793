"""What ties a process to the one that started it: it dies with it, and hands it the cause of its own failure.

Imports nothing heavy: loader workers and error paths use it.
"""

import ctypes
import os
import select
import signal
import sys

CAUSE_FD = "LIT_DP_CAUSE_FD"
"""Where a rank finds the pipe to its supervisor: `descriptor:inode`."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signum: int = signal.SIGTERM, parent: int | None = None) -> bool:
    """Have the kernel send `signum` to this process when its parent dies, however it dies; False where it cannot.

    Linux only. It holds through exec and is not handed on to children. What counts as the parent is the thread that
    forked: a process started from a short-lived thread dies with that thread.

    Args:
        signum: the signal; SIGKILL for what has nothing to save.
        parent: who must still be the parent, where that is known from before the fork: if it has died in between, the
            signal is sent at once. By default whoever is the parent now.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform != "linux":
        return False
    number = ctypes.c_ulong
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number(signum), number(0), number(0), number(0)) != 0:
        return False
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)
    return True


def tell_cause(text: str) -> bool:
    """Hand the supervisor what made this rank fail, to be printed last, once all ranks are gone; never waits.

    Only what a first rank tells is printed, so a rank tells its own cause and prints nothing.

    Returns:
        False where there is no supervisor (any more): then the rank prints it itself.
    """
    fd, _, inode = os.environ.get(CAUSE_FD, "").partition(":")
    message = f"{os.environ.get('LOCAL_RANK', '0')} {text}".encode(errors="replace")
    try:
        if not fd or os.fstat(int(fd)).st_ino != int(inode):  # a process of the rank's, which did not inherit it
            return False
        # so short that it arrives in one piece
        os.write(int(fd), message.replace(b"\0", b"")[: select.PIPE_BUF - 1] + b"\0")
    except OSError:
        return False
    return True

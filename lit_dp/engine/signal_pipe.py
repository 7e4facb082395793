"""Signals as bytes in a pipe: one `select` waits for them and for all else, and none is lost between two looks."""

import contextlib
import os
import select
import signal
from collections.abc import Callable, Set
from typing import Any


class SignalPipe:
    """While it is open, the signals it hears do nothing but arrive in `read`. For the main thread.

    Args:
        signals: those to hear. What nohup or a shell's `&` has set to be ignored stays ignored; except for SIGCHLD.
    """

    def __init__(self, signals: Set[signal.Signals]) -> None:
        self._signals = signals
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        heard = {s for s in signals if s == signal.SIGCHLD or signal.getsignal(s) is not signal.SIG_IGN}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers: dict[signal.Signals, Any] = {s: signal.signal(s, _nothing) or signal.SIG_DFL for s in heard}

    def fileno(self) -> int:
        """For `select`."""
        return self._read

    def read(self) -> list[int]:
        """Those that have come since the last time, in their order; does not wait."""
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self._read, 4096))
        return []

    def wait(self) -> list[int]:
        """Those that come next, for a thread that does nothing else; empty after `wake`."""
        select.select([self._read], [], [])
        return [signum for signum in self.read() if signum in self._signals]  # others with handlers come here, too

    def wake(self) -> None:
        """End a `wait` before `close`: a descriptor that is closed may belong to somebody else a moment later."""
        os.write(self._write, b"\0")

    def hold_back(self) -> None:
        """Have the system keep signals until `let_in` or `close`: around a fork, until each side has its handlers."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def let_in(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def replace(self, signum: signal.Signals, handler: Callable[..., object]) -> None:
        """The handler that a signal will have after `close`; not where it stays ignored."""
        if signum in self._handlers:
            self._handlers[signum] = handler

    def close(self) -> None:
        """Give each signal the handler back that it had; after a fork only in the process that calls this."""
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        os.close(self._read)
        os.close(self._write)
        self.let_in()

    def stop_this_process(self) -> None:
        """Do what Ctrl-Z does where it is not heard; returns when the shell lets the job go on."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _nothing)


def _nothing(*_: object) -> None:
    """A handler, so that the signal is written to the pipe."""

"""What the supervisor does while ranks run: hand signals on, end what does not end by itself, find the first cause.

What fails first is the cause and the rest follows from it, so events are kept in their order: a rank fails when it
tells a cause (`lifeline.tell_cause`), or ends without one. The cause is printed when everything else has been.
"""

import contextlib
import os
import select
import signal
import socket
import time

from lit_dp.engine.signal_pipe import SignalPipe
from lit_dp.errors import SAVED

GRACE_SECONDS = 5.0
"""What the other ranks get to end by themselves after the first has failed; then they are killed."""
GONE_SECONDS = 4.0
"""What the kernel gets to end those that are killed; it takes longer only where one waits for a disk."""

_HANDED_ON: dict[int, signal.Signals] = {  # what comes to the supervisor: what the ranks get
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # the terminal was closed
    signal.SIGINT: signal.SIGTERM,
}
SIGNALS = {*map(signal.Signals, _HANDED_ON), signal.SIGTSTP, signal.SIGCHLD}
"""All that the supervisor hears."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory? see dmesg)",
    signal.SIGBUS: " (shared memory full? see df /dev/shm)",
    signal.SIGSEGV: " (PYTHONFAULTHANDLER=1 before python shows where)",
}


class Watch:
    """Watches over the ranks of this host until all have ended.

    Args:
        pids: of the ranks, by local rank; each leads a process group.
        first: the rank of the first of them.
        signals: those that the supervisor gets.
        told: the pipe of `lifeline.tell_cause`, not blocking.
    """

    def __init__(self, pids: list[int], first: int, signals: SignalPipe, told: int) -> None:
        self._living = dict(enumerate(pids))
        self._first, self._signals = first, signals
        self._sources: list[int] = [signals.fileno(), told]
        self._told, self._unread = told, b""
        self._failing: list[int] = []  # local ranks
        self._causes: dict[int, str] = {}
        self._ended: dict[int, int] = {}  # exit code, or minus the signal
        self._handed_on: dict[int, int] = {}  # signal that ranks got: signal that we got
        self._interrupts = 0
        self._killed = False
        self._deadline: float | None = None

    def until_all_have_ended(self) -> int:
        """Watch; then say what failed first, as the last line of all. Returns the exit code."""
        while self._living:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            select.select(self._sources, [], [], left)
            for signum in self._signals.read():
                self._on_signal(signum)
            self._bury()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._killed:
                    break
                self._kill_all()
        self._read_causes()
        code, words = self._outcome()
        for local, pid in self._living.items():
            words += f"\nerror: rank {self._first + local} was killed and is still there: process {pid}"
        _say(words.lstrip())
        return code

    # --- signals ---

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGTSTP:
            self._pause()
        elif signum in _HANDED_ON:
            self._interrupts += signum == signal.SIGINT
            if self._interrupts > 1:
                self._kill_all()
                return
            if signum == signal.SIGINT:
                _say("stopping: all ranks are asked to end; Ctrl-C again kills them")
            self._handed_on.setdefault(_HANDED_ON[signum], signum)
            for pid in self._living.values():
                os.kill(pid, _HANDED_ON[signum])  # not its loader workers: it needs them until it has saved

    def _pause(self) -> None:
        """Ctrl-Z stops the supervisor's process group only."""
        for pid in self._living.values():
            _kill_group(pid, signal.SIGSTOP)
        self._signals.stop_this_process()
        for pid in self._living.values():
            _kill_group(pid, signal.SIGCONT)

    def _kill_all(self) -> None:
        for pid in self._living.values():
            os.kill(pid, signal.SIGKILL)  # its loader workers are when it is buried
        self._killed, self._deadline = True, time.monotonic() + GONE_SECONDS

    # --- events ---

    def _bury(self) -> None:
        """Note which ranks have ended, and end what they left. Of several at once, one killed by a signal was first."""
        ended = {local: code for local, pid in self._living.items() if (code := _exit_code(pid)) is not None}
        self._read_causes()  # who tells a cause ends only then
        for local, code in sorted(ended.items(), key=lambda item: item[1] >= 0):
            self._ended[local] = code
            pid = self._living.pop(local)
            if code not in (0, SAVED):
                _kill_group(pid, signal.SIGKILL)  # its loader workers
                if not self._killed:
                    self._failing.append(local)
                    self._deadline = self._deadline or time.monotonic() + GRACE_SECONDS

    def _read_causes(self) -> None:
        while self._told in self._sources:
            try:
                data = os.read(self._told, 1 << 16)
            except BlockingIOError:
                return
            if not data:  # no process has its other end
                self._sources.remove(self._told)
            *messages, self._unread = (self._unread + data).split(b"\0")
            for message in messages:
                local, _, text = message.decode(errors="ignore").partition(" ")
                self._failing.append(int(local))
                self._causes.setdefault(int(local), text)

    # --- the end ---

    def _outcome(self) -> tuple[int, str]:
        """Exit code and last words."""
        if self._interrupts > 1:
            return 128 + signal.SIGINT, "error: killed by a second Ctrl-C; nothing was saved"
        failed = [local for local in self._failing if self._ended.get(local) not in (0, SAVED)]
        if not failed:
            return max(self._ended.values()), ""
        local = failed[0]
        code = self._ended.get(local, -signal.SIGKILL)
        if local in self._causes:
            by_us = self._killed and code == -signal.SIGKILL  # it told why it fails, but did not end
            return 1 if by_us else _shown(code), self._causes[local]
        if -code in self._handed_on:
            asked = signal.Signals(self._handed_on[-code])
            return 128 + asked, f"error: stopped by {asked.name}"
        return _shown(code), f"error: rank {self._first + local} on {socket.gethostname()} {_how(code)}"


def _say(words: str) -> None:
    if words:
        with contextlib.suppress(OSError):  # the terminal may be gone; the exit code still counts
            os.write(2, f"{words}\n".encode(errors="replace"))  # not buffered: Python would try again at its end


def _shown(code: int) -> int:
    """As a shell shows it."""
    return code if code >= 0 else 128 - code


def _how(code: int) -> str:
    if code > 0:
        return f"was the first to end, with exit code {code}"
    names = {int(known): known.name for known in signal.Signals}  # without most of the real-time signals
    return f"was killed by {names.get(-code, f'signal {-code}')}{_HINTS.get(-code, '')}"


def _exit_code(pid: int) -> int | None:
    """Of a child that has ended; minus the signal that killed it."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _kill_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # there is none yet, or any more
        os.killpg(pid, signum)

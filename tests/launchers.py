"""Ranks as a launcher starts and watches over them, forked from the test's own process: no imports are paid for.

What runs is the launcher's real code: our supervisor, or torchrun's agent. `python -m lit_dp` itself, from a fresh
interpreter, is for the few tests that are about it.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_only

from lit_dp.__main__ import guarded
from lit_dp.engine.supervisor import supervise
from tests.ranks import free_port

LAUNCHERS = ("lit_dp", "torchrun")
Run = Callable[..., None]


class Elastic(NamedTuple):
    """One of the one or two hosts of a torchrun job, which may come and go; the one that `is_first` must stay."""

    port: int
    is_first: bool = True
    run_id: str = "none"


class Launched:
    """A launcher and its ranks, which run `function(*args)` as `python -m lit_dp` runs its commands.

    Args:
        launcher: "lit_dp" or "torchrun".
        ranks: how many on this host.
        function: what each rank runs; it may call `announce`.
        folder: of this run's output and notes; must be there and empty.
        max_restarts: torchrun's.
        elastic: of torchrun; each host has its own `Launched`.
    """

    def __init__(
        self,
        launcher: str,
        ranks: int,
        function: Run,
        *args: Any,
        folder: Path,
        max_restarts: int = 0,
        elastic: Elastic | None = None,
    ) -> None:
        self.folder = folder
        self._begun = time.monotonic()
        start = _supervised if launcher == "lit_dp" else partial(_under_torchrun, elastic)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()  # the group is what is left behind
            for name, stream in (("out", 1), ("err", 2)):
                os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not pytest's
            faulthandler.enable(2)
            gc.freeze()  # what is there is not looked at again, and so stays shared
            _end(lambda: start(ranks, folder, max_restarts, function, args))

    def wait_for(self, name: str, count: int = 1, seconds: float = 30) -> None:
        """Until `count` notes of that name have been made (see `note`)."""
        deadline = time.monotonic() + seconds
        while len(self.notes(name)) < count:
            assert time.monotonic() < deadline, f"no {name} in time: {self.err[-3000:]}"
            assert self._alive() or len(self.notes(name)) >= count, f"ended before {name}: {self.err[-3000:]}"
            time.sleep(0.005)

    def notes(self, name: str) -> list[str]:
        """What ranks noted under that name, in its order."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def rank(self, rank: int) -> int:
        """Process id of a rank that has called `announce`; of the last one, where it was started again."""
        return [int(line.split()[1]) for line in self.notes("pids") if line.split()[0] == str(rank)][-1]

    def wait(self, seconds: float = 60) -> int:
        """The launcher's exit code, minus the signal that killed it. Kills all where it takes longer."""
        deadline = time.monotonic() + seconds
        while self._alive():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not ended in {seconds} s: {self.err[-3000:]}")
            time.sleep(0.005)
        return self._code

    def survivors(self, seconds: float = 0.0) -> list[int]:
        """Announced processes that are still there after at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (alive := [p for p in self._announced() if _is_alive(p)]) and time.monotonic() < deadline:
            time.sleep(0.005)
        return alive

    def kill(self) -> None:
        """End whatever is left."""
        for pid in [self.pid, *self._announced()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._alive()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def _announced(self) -> list[int]:
        return [int(line.split()[1]) for line in self.notes("pids")]

    _ended = False
    _code = 0

    def _alive(self) -> bool:
        if not self._ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended, self._code = True, os.waitstatus_to_exitcode(status)
        return not self._ended


def note(folder: Path, name: str, text: str = "") -> None:
    """Append a line, in one piece, whoever else does."""
    file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{text}\n".encode())
    os.close(file)


def announce(folder: Path) -> None:
    """Note which process this rank is. Loader workers may do so as rank -1."""
    note(folder, "pids", f"{os.environ['RANK'] if 'RANK' in os.environ else os.environ['LOCAL_RANK']} {os.getpid()}")


@contextmanager
def launched(*args: Any, **kwargs: Any) -> Iterator[Launched]:
    """A `Launched` of which nothing is left afterwards."""
    run = Launched(*args, **kwargs)
    try:
        yield run
    finally:
        run.kill()


def _supervised(ranks: int, folder: Path, max_restarts: int, function: Run, args: tuple) -> None:
    supervise(ranks)
    _run(folder, function, args)  # `_end` of the caller is this rank's


def _under_torchrun(
    elastic: Elastic | None, ranks: int, folder: Path, max_restarts: int, function: Run, args: tuple
) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A host that is lost is missed after 5 s; one that may still come is waited for a second.
    quickly = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 5, "timeout": 30}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1 if elastic is None else 2,
        nproc_per_node=ranks,
        run_id=f"test-{os.getpid()}" if elastic is None else elastic.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{free_port() if elastic is None else elastic.port}",
        rdzv_configs={} if elastic is None else {**quickly, "is_host": elastic.is_first},
        local_addr=None if elastic is None else "127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(config, _run)(folder, function, args)


def _run(folder: Path, function: Run, args: tuple) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's, which a forked rank has
    rank_zero_only.rank = int(os.environ.get("RANK", os.environ["LOCAL_RANK"]))  # it was looked for before the fork
    announce(folder)
    guarded(lambda: function(*args))


def _end(run: Callable[[], None]) -> None:
    """Run, and end the process as an interpreter would, without pytest's own end."""
    code: Any = 0
    try:
        run()
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

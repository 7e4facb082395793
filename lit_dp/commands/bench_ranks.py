"""The processes that a benchmark runs in: started, heard, and gone, and each of them at a terminal of its own.

They are forked where nothing forbids it, so that all kinds of training begin with the same imports. Their variables are
set in them only: the process that starts them keeps its own.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from lit_dp.engine.lifeline import die_with_parent
from lit_dp.errors import ConfigError, RunError

GRACE_SECONDS = 5.0
"""What the other ranks get after one has failed."""
_meeting: Any = None  # of the ranks that were started together, whether they have a process group or not


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, joined: bool = True, timeout: float = 6 * 3600
) -> list[Any]:
    """Call `function(*args)` in new processes; results by rank.

    Args:
        ranks: processes.
        function: of a module's top level, as its arguments and its result it may have to be pickled.
        args: its arguments.
        joined: each has the variables that `fit` sets for its ranks, and can join the others. False: each is a world of
            its own.
        timeout: in seconds, after which they are killed.

    Raises:
        RunError: a rank raised or died; its traceback is printed. All ranks are gone by then.
        ConfigError, RunError, SystemExit: as the first rank that raised it.
    """
    context: Any = multiprocessing.get_context("fork" if _may_fork() else "spawn")
    meeting, port = context.Barrier(ranks), _free_port()
    started: list[tuple[Any, Connection]] = []
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            variables = _variables(rank, ranks, port, joined)
            arguments = (os.getpid(), rank, variables, meeting, theirs, function, args)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            theirs.close()
            started.append((process, ours))
        return _results(started, time.monotonic() + timeout)
    finally:
        for process, pipe in started:
            _kill(process)
            process.join()
            pipe.close()


def meet() -> None:
    """Wait until all ranks that were started together have come here. In a process without others: go on."""
    if _meeting is not None:
        _meeting.wait(600)


def pinned() -> dict[str, str]:
    """The variables that pin the number of CPU threads, for whoever reads them: ours go before other launchers'."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {"OMP_NUM_THREADS": threads, "LIT_DP_CPU_THREADS": threads}


def join() -> None:
    """Make the process group that all kinds of training share."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world_size)


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Within it standard output and error are a terminal: progress bars are drawn as they are for a person, and what is
    drawn is thrown away by another process. Where the system has none, they are a null device."""
    out, err = sys.stdout, sys.stderr
    out.flush()
    err.flush()
    saved = [os.dup(fd) for fd in (1, 2)]
    screen, reader = _screen()
    for fd in (1, 2):
        os.dup2(screen, fd)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(screen), "w", buffering=1) for _ in range(2))
    os.close(screen)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.close()
        sys.stdout, sys.stderr = out, err
        for fd, before in zip((1, 2), saved, strict=True):
            os.dup2(before, fd)
            os.close(before)
        if reader is not None:
            reader.kill()
            reader.wait()


def _screen() -> tuple[int, subprocess.Popen[bytes] | None]:
    if os.name != "posix":
        return os.open(os.devnull, os.O_WRONLY), None
    master, slave = os.openpty()
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(master)
    return slave, reader


def _may_fork() -> bool:
    return sys.platform == "linux" and not torch.cuda.is_available()


def _variables(rank: int, ranks: int, port: int, joined: bool) -> dict[str, str]:
    if joined and ranks > 1:
        counts = {"LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        there = {"MASTER_ADDR": "127.0.0.1", "LIT_DP_SUPERVISED": "1"}
        return there | {name: str(count) for name, count in counts.items()}
    if not torch.cuda.is_available():
        return {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[rank]}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    parent: int,
    rank: int,
    variables: dict[str, str],
    meeting: Any,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    global _meeting
    _meeting = meeting
    if os.name == "posix":
        os.setpgid(0, 0)  # killed together with what it starts
    die_with_parent(signal.SIGKILL, parent)
    os.environ.update({"TERM": "xterm", **os.environ, **variables, **pinned()})
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _tell_rank(rank if variables.get("WORLD_SIZE") else 0)
    _quieten()
    try:
        answer = (True, pickle.dumps(function(*args)))
    except (ConfigError, RunError, SystemExit) as error:
        answer = (False, error)
    except BaseException:
        answer = (False, traceback.format_exc())
    with contextlib.suppress(OSError):
        pipe.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # what the parent does at its exit is not ours to do


def _tell_rank(rank: int) -> None:
    """Lightning and torchmetrics looked for LOCAL_RANK on import, before the fork."""
    from lightning.pytorch.utilities import rank_zero_only as lightnings
    from torchmetrics.utilities.prints import rank_zero_only as torchmetrics

    for rank_zero_only in (lightnings, torchmetrics):
        rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]


def _quieten() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _results(started: list[tuple[Any, Connection]], deadline: float) -> list[Any]:
    """Answers by rank. The first failure counts: those of the others follow from it."""
    pending = {pipe: rank for rank, (_, pipe) in enumerate(started)}
    results: dict[int, Any] = {}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RunError(f"no answer in time from ranks {sorted(pending.values())} of the benchmark")
        for pipe in ready:
            rank = pending.pop(pipe)  # pyright: ignore[reportArgumentType]
            try:
                well, answer = pipe.recv()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            except EOFError:
                started[rank][0].join(GRACE_SECONDS)
                raise RunError(f"rank {rank} of the benchmark ended, exit code {started[rank][0].exitcode}") from None
            if isinstance(answer, BaseException):
                raise answer
            if not well:
                print(answer, file=sys.stderr, flush=True)
                raise RunError(f"rank {rank} of the benchmark failed: {answer.strip().splitlines()[-1]}")
            results[rank] = pickle.loads(answer)
    return [results[rank] for rank in range(len(started))]


def _kill(process: Any) -> None:
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):  # AttributeError: not on Windows
        os.killpg(process.pid, signal.SIGKILL)

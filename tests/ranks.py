"""Run a function on several ranks that are forked from the test's own process: no new interpreter, no imports."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 90, env: dict[str, str] | None = None
) -> list[Any]:
    """Call `function(*args)` on `world_size` forked ranks, with the variables that torchrun sets; results by rank.

    Raises:
        RankFailed: with the traceback of the first rank that failed. All other ranks are gone by then.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, world_size, port, theirs, function, args, env or {}))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _results(ranks, time.monotonic() + timeout)
    finally:
        for process, _ in ranks:
            process.kill()
            _kill_workers(process.pid)
            process.join()


def _kill_workers(rank: int) -> None:
    """Loader workers outlive a rank that is killed: one that had not yet looked who its parent is waits for ever."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none are left
        os.killpg(rank, signal.SIGKILL)


def torchrun_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"test on {port}",  # another job each time, none that is started again
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int, world_size: int, port: int, pipe: Connection, function: Callable, args: tuple, env: dict[str, str]
) -> None:
    os.setpgrp()
    os.environ.update(torchrun_env(rank, world_size, port) | env)
    torch.set_num_threads(1)
    try:
        answer = (True, pickle.dumps(function(*args)))
    except BaseException:
        answer = (False, pickle.dumps(traceback.format_exc()))
    pipe.send(answer)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # the parent's atexit handlers are not ours to run


def _results(ranks: list[tuple[Any, Connection]], deadline: float) -> list[Any]:
    pending = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    results: dict[int, Any] = {}
    failures: list[str] = []
    while pending:
        ready = wait(list(pending), timeout=2.0 if failures else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pending.pop(pipe)  # pyright: ignore
            try:
                ok, answer = pipe.recv()  # pyright: ignore
            except EOFError:
                ok, answer = False, pickle.dumps(f"exit code {ranks[rank][0].exitcode}, without a word")
            if ok:
                results[rank] = pickle.loads(answer)
            else:
                failures.append(f"rank {rank}: {pickle.loads(answer)}")
    if failures:
        raise RankFailed("\n".join(failures))
    if pending:
        raise RankFailed(f"no answer in time from ranks {sorted(pending.values())}")
    return [results[rank] for rank in range(len(ranks))]

"""A meeting point of the ranks that no earlier attempt of their job has used.

torchrun's agent keeps a store for its ranks, and keeps it when it starts them again: with the addresses in it that the
ranks before have written (PyTorch 135712). Who reads one of those waits for a process that is gone.
"""

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lit_dp.errors import RunError

SECONDS = 60.0
"""Ranks are started together; this is for imports and for slow disks."""

_served: list[TCPStore] = []


def renew(seconds: float = SECONDS) -> None:
    """Give the ranks that torchrun has started a store of rank 0's: MASTER_PORT is changed. Does nothing a second time,
    nor under another launcher. All ranks call it before they build a process group.

    Raises:
        RunError: they do not meet.
    """
    env = os.environ
    if _served or dist.is_initialized() or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, rank, timeout = env["MASTER_ADDR"], int(env["RANK"]), timedelta(seconds=seconds)
    try:
        agents = TCPStore(host, int(env["MASTER_PORT"]), is_master=False, timeout=timeout)
        if rank == 0:
            own = _serve(agents, host, int(env["WORLD_SIZE"]), time.monotonic() + seconds)
        else:
            own = TCPStore(host, _ask(agents, rank), is_master=False, timeout=timeout)
            own.set(_key("here", rank), "")
    except dist.DistError as error:
        raise RunError(
            f"ranks do not meet at {host}:{env['MASTER_PORT']} within {seconds:g} s: {error}. Where hosts come and go,"
            " start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        ) from error
    _served.append(own)
    env["MASTER_PORT"] = str(own.port)


def _ask(agents: TCPStore, rank: int) -> int:
    """The port, told to nobody but the process that asks now."""
    question = secrets.token_hex(8)
    agents.set(_key("asks", rank), question)
    return int(agents.get(_key("answer to", question)))


def _serve(agents: TCPStore, host: str, world_size: int, deadline: float) -> TCPStore:
    own = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    missing, answered = set(range(1, world_size)), {""}
    while missing:
        for rank in sorted(missing):
            question = agents.get(asks).decode() if agents.check([asks := _key("asks", rank)]) else ""
            if question not in answered:  # one of an earlier attempt is answered, too, and nobody hears it
                agents.set(_key("answer to", question), str(own.port))
                answered.add(question)
            if own.check([_key("here", rank)]):
                missing.remove(rank)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"no word from rank {', '.join(map(str, sorted(missing)[:8]))}")
        time.sleep(0.005)
    return own


def _key(*words: object) -> str:
    return f"lit_dp {' '.join(map(str, words))}"

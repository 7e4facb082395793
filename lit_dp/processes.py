"""From the trainer's config to the processes of this host: the typed command becomes the supervisor of its ranks."""

import importlib
import os
import sys
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities import rank_zero_only as _lightnings
from torchmetrics.utilities.prints import rank_zero_only as _torchmetrics

from lit_dp.engine import launch
from lit_dp.trainer import _count


def _threads() -> int:
    """Threads of this process, of whatever library; 0 where the system does not say."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


_THREADS_OF_IMPORTS = _threads()  # OpenBLAS, which knows of forks


def start_ranks(trainer: Any) -> None:
    """Return in every rank of this host: in this process if it is all there is, or if its launcher started them.

    Otherwise this process becomes their supervisor (`engine.supervisor`) and does not return. A strategy that starts
    processes by itself (ddp_spawn, ddp_fork, ddp_notebook, XLA) is left to do so.

    Args:
        trainer: the trainer's part of the parsed config, nothing of it instantiated.

    Raises:
        ConfigError: several hosts, and nothing tells which this is.
    """
    started = launch.detect()
    if started.launcher != "lit_dp" or "LOCAL_RANK" in os.environ or os.name != "posix":
        return
    available = 0 if trainer.accelerator == "cpu" else torch.accelerator.device_count()
    try:
        ranks = _count(launch.processes_per_host(started, trainer.devices, available), available)
    except ValueError:
        return  # no number; the trainer says so
    if ranks < 2 or not _is_started_from_outside(trainer):
        return
    hosts = launch.hosts(started, trainer.num_nodes)
    launch.check(started, ranks, hosts, distributed=True)  # ranks find the variables that we set
    from lit_dp.engine.supervisor import supervise  # not on Windows

    command = None if _may_fork(available) else [sys.executable, *sys.orig_argv[1:]]
    rank = supervise(ranks, hosts, command)
    for rank_zero_only in (_lightnings, _torchmetrics):  # they looked for LOCAL_RANK on import, before the fork
        rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]


def _is_started_from_outside(trainer: Any) -> bool:
    """Whether the strategy takes LOCAL_RANK for the sign that its processes are there."""
    if trainer.accelerator in ("tpu", "hpu", "mps"):
        return False
    kind, arguments = _strategy(trainer.strategy)
    if not (isinstance(kind, type) and issubclass(kind, ParallelStrategy)) or issubclass(kind, XLAStrategy):
        return False
    environment = arguments.get("cluster_environment")
    plugins = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
    named = [str(getattr(plugin, "class_path", plugin)) for plugin in (*plugins, environment)]
    own = [name for name in named if name.endswith("Environment") and not name.endswith("LightningEnvironment")]
    return arguments.get("start_method", "popen") == "popen" and not own


def _strategy(configured: Any) -> tuple[Any, Any]:
    """Class and arguments of a strategy, which a config gives by name or by class."""
    if not isinstance(configured, str):
        module, _, name = configured.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name), configured.get("init_args") or {}
    if configured == "auto":
        return DDPStrategy, {}  # on several devices
    if configured.lower() not in StrategyRegistry:
        return None, {}  # the trainer says so
    entry = StrategyRegistry[configured.lower()]
    return entry["strategy"], entry["init_params"]


def _may_fork(accelerators: int) -> bool:
    """Whether a forked child can compute: not with CUDA, nor OpenMP, once the parent has used it.

    A driver that was asked something is not told from one that was not, so with accelerators ranks are new
    interpreters. OpenMP's threads, like those of anything else that the user's modules start on import, are seen.
    """
    return sys.platform == "linux" and not (
        accelerators or torch.cuda.is_initialized() or _threads() > _THREADS_OF_IMPORTS
    )

"""Which checkpoint a training goes on from: rank 0 looks, and all ranks go on from what it has chosen."""

import os
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lit_dp.engine import restart
from lit_dp.engine.checkpoints import last_path
from lit_dp.engine.peers import Peers
from lit_dp.engine.rendezvous import renew
from lit_dp.engine.run_folder import RunFolder
from lit_dp.errors import ConfigError

_CHOSEN = "LIT_DP_RESUME_FROM"


def agreed(trainer: Any, resume: str) -> str | None:
    """The checkpoint that rank 0 chooses, on all ranks; None to begin anew. All ranks that run call it.

    Args:
        trainer: before its fit.
        resume: as `restart.mode`.

    Raises:
        ConfigError: there is nothing to resume from where there must be.
    """
    if resume == "never":
        return None
    if trainer.global_rank and _CHOSEN in os.environ:  # started by rank 0, which has chosen
        return os.environ[_CHOSEN] or None
    environment = getattr(trainer.strategy, "cluster_environment", None)
    all_there = environment is not None and environment.creates_processes_externally
    peers = _joined(trainer) if all_there else Peers(0, 1)
    job = [name for of_rank in peers.gather(restart.started_as()) for name in of_rank]
    for logger in trainer.loggers:
        if isinstance(logger, RunFolder):
            logger.job = job
    folder = os.path.dirname(last_path(trainer))  # on all ranks
    choice = peers.from_first(restart.choose(resume, folder, job) if peers.rank == 0 else None)
    if choice.refusal is not None:
        raise ConfigError(choice.refusal)
    if not all_there:  # Lightning's launcher starts the others
        os.environ[_CHOSEN] = choice.path or ""
    if trainer.is_global_zero:
        said = [f"{line}: passed over" for line in choice.passed_over]
        said += [f"goes on from {choice.path}"] if choice.path not in (None, resume) else []
        print("".join(f"resume: {line}\n" for line in said), end="", flush=True)
    return choice.path


def forget() -> None:
    """The ranks that rank 0 starts next are told nothing."""
    os.environ.pop(_CHOSEN, None)


def _joined(trainer: Any) -> Peers:
    """All ranks, which can talk from here on; each alone where the strategy is not of DDP's kind."""
    if trainer.world_size == 1 or not isinstance(trainer.strategy, DDPStrategy):
        return Peers(0, 1)
    assert trainer.strategy.accelerator is not None
    trainer.strategy.accelerator.setup_device(trainer.strategy.root_device)
    renew()
    trainer.strategy.setup_distributed()
    return Peers(trainer.global_rank, trainer.world_size)

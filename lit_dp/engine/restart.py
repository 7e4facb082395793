"""Which checkpoint a training goes on from, and whether its launcher has started this job before."""

import os
import shlex
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_dp.engine.checkpoint_files import FilePath, located, newest
from lit_dp.engine.checkpoints import LastCheckpoint, last_path
from lit_dp.engine.peers import Peers
from lit_dp.errors import ConfigError

MODES = ("auto", "required", "never", "again")
LIGHTNINGS = ("best", "hpc", "registry")
"""What Lightning has names for."""
JOB = ".job"
"""File in a run folder: the names of the launcher's job that made it, a line each."""


class Choice(NamedTuple):
    """The checkpoint to go on from, None to begin anew; or why there is none that is required."""

    path: str | None = None
    passed_over: tuple[str, ...] = ()
    refusal: str | None = None


def mode(resume: str | None, ckpt_path: str | Path | None, env: Mapping[str, str] = os.environ) -> str:
    """One of MODES, or a path, from what was typed. Where nothing was, `again` if a launcher may start this job again:
    go on from what the job itself has saved; else `never`.

    Raises:
        ConfigError: both were typed.
    """
    if ckpt_path is not None and resume is not None:
        raise ConfigError(f"ckpt_path is {ckpt_path} and resume is {resume}: give one of them")
    if ckpt_path == "last":
        return "required"
    return str(ckpt_path or resume or ("again" if names(env) else "never"))


def choose(resume: str, folder: FilePath, job: Collection[str] = ()) -> Choice:
    """The checkpoint that `resume` means, as this process sees the files.

    Args:
        resume: `auto` is the newest valid checkpoint, if there is one; `required` fails where there is none; `never`
            begins anew; anything else is the path of a checkpoint, or of a folder to take the newest from. A job that
            was started again goes on from what it has saved itself, if it has, wherever it began; not with `never`.
        folder: of the run's checkpoints.
        job: `started_as` of all ranks.
    """
    if resume == "never":
        return Choice()
    folder, faults = located(folder), []
    for made in made_by(job, folder.parent) if isinstance(folder, Path) else []:
        path, passed_over = newest(made / Path(folder).name)
        faults += passed_over
        if path is not None:
            return Choice(str(path), tuple(faults))
    if resume == "again":
        return Choice(passed_over=tuple(faults))
    if resume not in MODES:
        given = located(resume)
        if not isinstance(given, Path) or given.is_file() or resume.split(":")[0] in LIGHTNINGS:
            return Choice(resume)  # the load says what is wrong with it
        if not given.is_dir():
            return Choice(refusal=f"there is no checkpoint {resume}: give a file, a run folder, {', '.join(MODES[:3])}")
        resume, folder = "required", given / "checkpoints" if (given / "checkpoints").is_dir() else given
    path, passed_over = newest(folder)
    if path is None and resume == "required":
        said = "".join(f"; {line}" for line in passed_over)
        return Choice(refusal=f"no valid checkpoint to resume from in {folder}{said}; --resume auto begins anew then")
    return Choice(None if path is None else str(path), tuple(passed_over))


_fits = 0  # of this process


def begin_fit() -> None:
    """Called once for each training: a job may have several, one after the other, as it does when started again."""
    global _fits
    _fits += 1


def names(env: Mapping[str, str] = os.environ) -> list[str]:
    """What this training can be known by when its launcher starts the job again; empty where no launcher does so.

    Every torchrun's agent names it: a job lives as long as one of its agents does. The run id alone does not, since
    people use one again.
    """
    known = []
    if (run_id := env.get("TORCHELASTIC_RUN_ID")) is not None:
        known += [f"torchrun {run_id} {socket.gethostname()} {_parent()}", f"torchrun {run_id}"]
    if (job_id := env.get("SLURM_JOB_ID")) is not None:  # a script may type several commands
        known.append(f"slurm {job_id} {env.get('SLURM_STEP_ID', '')} {shlex.join(sys.argv)!r}")
    return [f"{name}, fit {_fits}" for name in known]


def started_as(env: Mapping[str, str] = os.environ) -> list[str]:
    """Those of `names` that say that the job has been started before, where they are found in a run folder.

    torchrun counts failures only, not that hosts came or went (TORCHELASTIC_RESTART_COUNT stays 0 then).
    """
    run_id = env.get("TORCHELASTIC_RUN_ID")
    by_id = run_id != "none" and _positive(env, "TORCHELASTIC_RESTART_COUNT")
    doubtful = () if by_id else (f"torchrun {run_id}, fit {_fits}",)
    slurm_again = _positive(env, "SLURM_RESTART_COUNT")
    return [name for name in names(env) if name not in doubtful and (slurm_again or not name.startswith("slurm "))]


def made_by(job: Collection[str], folder: Path) -> list[Path]:
    """The run folder `folder`, and those beside it, that the job has made; the last one first."""
    if not job:
        return []
    marks = {path.resolve(): path for path in (folder / JOB, *folder.parent.glob(f"*/{JOB}")) if path.is_file()}
    own = [path for path in marks.values() if not {*path.read_text().splitlines()}.isdisjoint(job)]
    return [path.parent for path in sorted(own, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


class JobMark(Callback):
    """Notes in the folder of a run by what its job can be known: at the start where it has a folder of its own, which
    a logger makes, otherwise when it saves a checkpoint there."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        saves = any(isinstance(c, Checkpoint | LastCheckpoint) for c in trainer.callbacks)  # pyright: ignore
        if stage != "fit" or not saves or not names():
            return
        of_ranks = Peers(trainer.global_rank, trainer.world_size).gather(names())
        self._lines = list(dict.fromkeys(f"{name}\n" for of_rank in of_ranks for name in of_rank))
        if trainer.logger is not None:
            self._write(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._lines:
            return
        own, callbacks = os.path.dirname(last_path(trainer)), trainer.callbacks  # pyright: ignore
        if any(isinstance(c, LastCheckpoint) or getattr(c, "dirpath", None) == own for c in callbacks):
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        folder = located(os.path.dirname(os.path.dirname(last_path(trainer))))
        if isinstance(folder, Path) and trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JOB).write_text("".join(lines))


def _parent() -> str:
    """The process that started this one, told from another one that gets its number later."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.is_file() else ""  # see proc(5): starttime
    return f"{parent} {began}"


def _positive(env: Mapping[str, str], name: str) -> bool:
    count = env.get(name, "")
    return count.isdecimal() and int(count) > 0

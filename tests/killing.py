"""A training that is killed at chosen or random moments, and started again on any number of processes (laws L3, L4)."""

import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lit_dp import ExactDDPStrategy, LitClassifier
from lit_dp.collectives import hooks
from lit_dp.engine import checkpoint_write
from lit_dp.engine.checkpoints import LastCheckpoint
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.parity import sha256
from tests.launchers import launched, note
from tests.training import Points, momentum, network, quiet_trainer, seed_everything

SECONDS_TO_BE_GONE = 10.0


@dataclass(frozen=True)
class Training:
    """What is trained; virtual ranks are what its bits depend on, processes what they do not.

    Attributes:
        every: optimizer steps between two saves.
        pace: seconds that a step takes more.
    """

    virtual_ranks: int = 4
    samples: int = 46
    epochs: int = 4
    every: int = 2
    workers: int = 0
    pace: float = 0.0


@dataclass(frozen=True)
class Kill:
    """Ranks kill themselves in the `call`th call of a place (see `Struck`)."""

    at: str
    ranks: tuple[int, ...] = (0,)
    call: int = 1


class Read(Dataset[Any]):
    """Tells of the workers that it is read in."""

    def __init__(self, inner: Any, folder: Path) -> None:
        self.inner, self.folder, self.told = inner, folder, False

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None and not self.told:
            note(self.folder, "pids", f"-1 {os.getpid()}")
            note(self.folder, "workers", str(os.getpid()))
            self.told = True
        return self.inner[index]


class Data(Points):
    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training.samples, batch_size=2)
        self.read, self.workers = Read(self.dataset, folder), training.workers

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.read, self.batch_size, shuffle=True, num_workers=self.workers)


class Struck(Callback):
    """Counts the calls of every place, and kills this process in the one that it is told to.

    Places: "forward", "backward", "all-reduce" (its lanes, while others wait), "validation" (a forward pass of it),
    "save" (before any of its system calls, but those that write), "write", and the names of callback hooks.
    """

    def __init__(self, folder: Path, kill: Kill | None, pace: float) -> None:
        self.folder, self.kill, self.pace, self.calls = folder, kill, pace, 0

    def at(self, place: str) -> None:
        if self.kill is None or place != self.kill.at or int(os.environ["LOCAL_RANK"]) not in self.kill.ranks:
            return
        self.calls += 1
        if self.calls == self.kill.call:
            note(self.folder, "killed", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.at("setup")
        module = pl_module.network
        module.register_forward_hook(lambda *_: self.at("forward" if module.training else "validation"))
        next(module.parameters()).register_hook(lambda _: self.at("backward"))
        hooks.all_reduce = _before(hooks.all_reduce, lambda: self.at("all-reduce"))
        _before_system_calls(self.at)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_start")
        time.sleep(self.pace / trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_end")
        if trainer.is_global_zero:
            note(self.folder, "steps", str(trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.at("on_train_epoch_end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.at("on_validation_end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.at("on_train_end")


def _before(function: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    def looked(*args: Any, **kwargs: Any) -> Any:
        look()
        return function(*args, **kwargs)

    return looked


SYSTEM_CALLS = ("mkdir", "unlink", "open", "fsync", "link", "replace", "close")


def _before_system_calls(look: Callable[[str], None]) -> None:
    """Of the writer of checkpoints, whose file the disk gets piece by piece as torch.save hands them over."""
    calls = {name: _before(getattr(os, name), lambda: look("save")) for name in SYSTEM_CALLS}
    checkpoint_write.os = SimpleNamespace(**{**vars(os), **calls})  # type: ignore
    write = checkpoint_write._Watched.write

    def flushed(self: Any, data: Any) -> int:
        look("write")
        written = write(self, data)
        self.flush()
        return written

    checkpoint_write._Watched.write = flushed  # type: ignore


class Accounts(Callback):
    """Notes what the ledger says of every epoch. It comes after the ledger."""

    def __init__(self, ledger: Ledger, root: Path) -> None:
        self.ledger, self.root = ledger, root

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            account = self.ledger.accounts[-1]
            clean = account.clean and account.used == account.samples
            note(self.root, "accounts", f"{account.epoch} {'clean' if clean else account}")


def train(folder: Path, root: Path, training: Training, kill: Kill | None = None) -> None:
    """One life of a training: from its newest checkpoint on, if there is one."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    seed_everything(3, verbose=False)
    module, ledger = LitClassifier(network(), 4, momentum), Ledger()  # pyright: ignore[reportArgumentType]
    trainer = quiet_trainer(
        strategy=ExactDDPStrategy(virtual_ranks=training.virtual_ranks, timeout=20),
        max_epochs=training.epochs,
        num_sanity_val_steps=0,
        callbacks=[LastCheckpoint(training.every), Struck(folder, kill, training.pace), ledger, Accounts(ledger, root)],
        default_root_dir=str(root),
    )
    trainer.fit(module, datamodule=Data(training, folder), resume="auto")
    if trainer.is_global_zero:
        momenta = {str(i): s["momentum_buffer"] for i, s in enumerate(trainer.optimizers[0].state.values())}
        note(root, "end", f"{trainer.global_step} {sha256(module.state_dict())} {sha256(momenta)}")


class Life(NamedTuple):
    """How a life ended: the launcher's exit code, and whether the training was over."""

    code: int
    over: bool
    err: str


def live(
    root: Path,
    training: Training,
    ranks: int,
    kill: Kill | Callable[[Any], None] | None = None,
    launcher: str = "lit_dp",
) -> Life:
    """Start the training in `root`, kill it, and see that nothing is left of it in time.

    Args:
        kill: what the ranks do, or what is done to them; None lets them train to the end.
    """
    folder = root / f"life {len(list(root.glob('life *')))}"
    folder.mkdir()
    outside = kill if callable(kill) and not isinstance(kill, Kill) else None
    with launched(
        launcher, ranks, train, folder, root, training, kill if outside is None else None, folder=folder
    ) as run:
        if outside is not None:
            outside(run)
            note(folder, "killed", str(time.monotonic()))
        code = run.wait(120)
        assert outside is not None or kill is None or run.notes("killed"), f"not killed: {run.err}"
        if killed := run.notes("killed"):
            left = max(0.0, float(killed[0]) + SECONDS_TO_BE_GONE - time.monotonic())
            assert run.survivors(left) == [], run.err
        else:
            assert run.survivors(SECONDS_TO_BE_GONE) == []
        return Life(code, (root / "end").exists(), run.err)


def end(root: Path) -> str:
    """Steps and digests of the finished training; its ledger must count every sample of every epoch once."""
    lines = (root / "accounts").read_text().splitlines()
    lost = [line for line in lines if not line.endswith(" clean")]
    assert not lost, lost
    epochs = sorted({int(line.split()[0]) for line in lines})
    assert epochs == list(range(len(epochs))), epochs
    ends = set((root / "end").read_text().splitlines())
    assert len(ends) == 1, ends
    return ends.pop()


def kill_at_random(draw: random.Random, steps: int, of: tuple[int, ...] = (signal.SIGKILL,)) -> Callable[[Any], None]:
    """Kills some of the ranks, or the supervisor, up to 50 ms after up to so many steps; with one of the signals."""
    after, pause, signum = draw.randint(0, steps), draw.uniform(0, 0.05), draw.choice(of)
    victims, supervisor = draw.getrandbits(8), draw.random() < 0.1

    def kill(run: Any) -> None:
        run.wait_for("pids")
        with contextlib.suppress(AssertionError):  # it has ended
            run.wait_for("steps", after, 60)
        time.sleep(pause)
        ranks = [int(pid) for rank, pid in map(str.split, run.notes("pids")) if rank != "-1"]
        chosen = [pid for bit, pid in enumerate(ranks) if victims >> bit & 1] or ranks[:1]
        for pid in [run.pid] if supervisor else chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    return kill

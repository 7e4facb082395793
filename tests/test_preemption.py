"""Law L4 under signals (FAULTS 23, 29): whoever gets one when, all ranks stop at one place, save once, and lose nothing."""

import contextlib
import inspect
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset

from lit_dp import LitClassifier
from lit_dp.engine import preemption, stopping
from lit_dp.engine.channel import Message
from lit_dp.engine.checkpoints import LastCheckpoint
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.parity import sha256
from lit_dp.engine.preemption import SAVED
from lit_dp.engine.stopping import StopAgreement, Tick
from tests.launchers import LAUNCHERS, Launched, announce, launched, note
from tests.ranks import run_ranks
from tests.training import Points, faulty_copy, momentum, network, quiet_trainer, seed_everything

SECONDS_TO_LEAVE = 5.0
STEPS = 8  # an epoch
EPOCHS = 3
BOTH_CODES = {"lit_dp": SAVED, "torchrun": 1}
"""The launcher's exit code when its ranks end with 75: torchrun has only 1 to say that."""


# --- what is trained ---


class Classifier(LitClassifier):
    """Its learning rate hangs on every validation: one too many or too few, or with wrong weights, changes the end."""

    def __init__(self) -> None:
        super().__init__(network(), 4, momentum)  # pyright: ignore[reportArgumentType]

    def configure_optimizers(self) -> Any:
        optimizer = momentum(self.parameters())
        plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss/dataloader_idx_0"}}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch[1]))


class Data(Points):
    """Two validation loaders, of which two ranks have unequal numbers of batches: 7 and 6, 3 and 2."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__(samples=4 * STEPS - 1, batch_size=2)
        self.workers = workers

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return [DataLoader(Subset(self.dataset, range(n)), 1) for n in (13, 5)]


@dataclass(frozen=True)
class Case:
    """One training, and where a rank of it sends itself a signal, or takes its time.

    Attributes:
        at: hook of a callback, in the `call`th call of which rank `rank` does so.
        signum: what the rank sends itself there; 0 waits there for `pause` seconds.
        slow: rank that takes 30 ms for a batch of a validation.
    """

    at: str = ""
    rank: int = 0
    call: int = 1
    signum: int = signal.SIGTERM
    pause: float = 0.4
    slow: int | None = None
    accumulate: int = 1
    workers: int = 0
    sanity: int = 0
    check_every: int | None = None
    strategy: Any = "exact_ddp"
    averaged: bool = False


def fit(folder: Path, root: Path, case: Case) -> None:
    """What a rank runs: trains to the end, from the last checkpoint in `root` if there is one."""
    seed_everything(3, verbose=False)
    module, data, ledger = Classifier(), Data(case.workers), Ledger()
    callbacks = [Watched(folder), LastCheckpoint(), ledger, *([Averaged()] if case.averaged else [])]
    if case.at:
        callbacks.append(signaller(folder, case))
    trainer = quiet_trainer(
        strategy=case.strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=case.accumulate,
        num_sanity_val_steps=case.sanity,
        val_check_interval=case.check_every,
        default_root_dir=str(root),
        callbacks=callbacks,
        devices=2,
    )
    rank = trainer.global_rank
    try:
        trainer.fit(module, datamodule=data, resume="auto" if case.strategy == "exact_ddp" else None)
    except SystemExit as exit_:
        note(folder, "left", f"{rank} {exit_.code}")
        raise
    if rank == 0:
        for account in ledger.accounts:
            note(folder, "epochs", f"{account.used} {account.uses} {account.missing.count} {account.repeated.count}")
        note(folder, "sha", sha256(module.state_dict()))


class Watched(Callback):
    """Notes steps, and saves with who made them; announces loader workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step > self.steps:
            note(self.folder, "steps", f"{trainer.global_step} {sha256(pl_module.state_dict())}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            by_a_stop = any(frame.function == "_stop_before" for frame in inspect.stack(0))
            note(self.folder, "saves", f"{'stop' if by_a_stop else 'regular'} {trainer.global_step}")


class Averaged(WeightAveraging):
    """An exponential average of the weights, which stands in for them in every validation."""

    def __init__(self) -> None:
        super().__init__(avg_fn=_ema)


def _ema(averaged: Tensor, current: Tensor, _: Any) -> Tensor:
    return averaged * 0.9 + current * 0.1


def signaller(folder: Path, case: Case) -> Callback:
    """A callback whose hook `case.at` does once what the case asks for."""

    def at(self: Any, trainer: Trainer, *_: Any, **__: Any) -> None:
        if case.slow == trainer.global_rank and "validation_batch" in case.at:
            time.sleep(0.03)
        self.calls += 1
        if trainer.global_rank == case.rank and self.calls == case.call:
            note(folder, "there")
            if case.signum:
                os.kill(os.getpid(), case.signum)
            else:
                time.sleep(case.pause)

    return type("Signaller", (Callback,), {case.at: at, "calls": 0})()


# --- how a stop is judged ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Digests of the training that is not stopped: of all steps, and of its `end`."""
    known: dict[Case, dict[str, str]] = {}

    def of(case: Case) -> dict[str, str]:
        plain = replace(case, at="", rank=0, call=1, signum=0, slow=None, sanity=0)
        if plain not in known:
            folder, root = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("root")
            with launched("lit_dp", 2, fit, folder, root, plain, folder=folder) as run:
                assert run.wait() == 0, run.err
            known[plain] = {**dict(line.split() for line in run.notes("steps")), "end": run.notes("sha")[0]}
        return known[plain]

    return of


def stop(launcher: str, case: Case, root: Path, send: Callable[[Launched], None] | None = None) -> Launched:
    """Run until a signal has stopped it: all ranks with exit code 75, one checkpoint, in time, and nobody stays."""
    folder = Path(tempfile.mkdtemp(dir=root))
    with launched(launcher, 2, fit, folder, root, case, folder=folder) as run:
        run.wait_for("there")
        begun = time.monotonic()
        if send is not None:
            send(run)
        code = run.wait()
        assert time.monotonic() - begun < SECONDS_TO_LEAVE
        assert run.survivors() == []
    assert code == (SAVED if launcher == "lit_dp" else 1), run.err  # all that torchrun can say
    assert sorted(run.notes("left")) == [f"0 {SAVED}", f"1 {SAVED}"]
    assert [line.split()[0] for line in run.notes("saves")].count("stop") == 1, run.notes("saves")
    assert "stopped after step" in run.err
    return run


def goes_on(launcher: str, case: Case, root: Path, before: list[Launched], whole: Any) -> None:
    """Run to the end: the same bits at every step as without a stop, every sample once in every epoch."""
    folder = Path(tempfile.mkdtemp(dir=root))
    with launched(launcher, 2, fit, folder, root, replace(case, at="", sanity=0), folder=folder) as run:
        assert run.wait() == 0, run.err
    digests, steps = whole(case), [line for part in (*before, run) for line in part.notes("steps")]
    assert {step: digest for step, digest in map(str.split, steps) if digests[step] != digest} == {}
    assert run.notes("sha") == [digests["end"]]
    taken = [int(line.split()[0]) for line in steps]
    assert taken == list(range(1, EPOCHS * STEPS // case.accumulate + 1))
    assert set(run.notes("epochs")) == {f"{4 * STEPS - 1} {4 * STEPS} 0 0"}  # one sample is padded


# --- the signal matrix ---


def _to(*targets: int | str, delay: float = 0.0, signum: int = signal.SIGTERM) -> Callable[[Launched], None]:
    """Signals ranks, or "launcher", one after the other."""

    def send(run: Launched) -> None:
        for number, target in enumerate(targets):
            time.sleep(delay if number else 0)
            with contextlib.suppress(ProcessLookupError):  # out already
                os.kill(run.pid if target == "launcher" else run.rank(int(target)), signum)

    return send


PATTERNS = {
    "rank 0": _to(0),
    "rank 1": _to(1),
    "both": _to(0, 1),
    "0, then 1 after 50 ms": _to(0, 1, delay=0.05),
    "1, then 0 after 50 ms": _to(1, 0, delay=0.05),
    "0, then 1 after 300 ms": _to(0, 1, delay=0.3),
    "1, then 0 after 300 ms": _to(1, 0, delay=0.3),
    "the launcher": _to("launcher"),
    "SIGUSR1 to rank 1": _to(1, signum=signal.SIGUSR1),
    "SIGINT to both": _to(0, 1, signum=signal.SIGINT),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_whoever_gets_a_signal_at_whatever_distance(launcher: str, tmp_path: Path, whole: Any) -> None:
    """One training, stopped in each way, one after the other. The signals come while rank 1 is late for a step that
    rank 0 waits in: the last of them, after 300 ms, too."""
    case = Case(at="on_train_batch_start", rank=1, call=2, signum=0)
    stops = [stop(launcher, case, tmp_path, send) for send in PATTERNS.values()]
    goes_on(launcher, case, tmp_path, stops, whole)


MOMENTS = {
    "before all ranks are there": Case(at="on_fit_start"),
    "in the sanity check": Case(at="on_validation_batch_start", sanity=2),
    "before the first step": Case(at="on_train_start"),
    "in a step": Case(at="on_before_optimizer_step", call=5),
    "after a step": Case(at="on_train_batch_end", call=5),
    "at the end of an epoch": Case(at="on_train_epoch_end"),
    "in a save": Case(at="on_save_checkpoint"),
    "before a validation": Case(at="on_validation_start"),
    "in its first batch": Case(at="on_validation_batch_start"),
    "in its midst": Case(at="on_validation_batch_end", call=3, slow=0),
    "in the last batch of a loader": Case(at="on_validation_batch_end", call=6, slow=1),
    "in the last loader": Case(at="on_validation_batch_start", call=8, slow=1),
    "at its end": Case(at="on_validation_epoch_end"),
    "in an accumulation window": Case(at="on_train_batch_end", call=6, accumulate=4),
    "in a validation within a window": Case(at="on_validation_batch_end", call=3, accumulate=4, check_every=2),
    "in a validation with averaged weights": Case(at="on_validation_batch_end", call=3, averaged=True),
    "with loader workers": Case(at="on_train_batch_end", call=3, workers=2),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("rank", "launcher"), list(enumerate(LAUNCHERS)))
def test_whenever_a_signal_comes(moment: str, rank: int, launcher: str, tmp_path: Path, whole: Any) -> None:
    case = replace(MOMENTS[moment], rank=rank)
    before = stop(launcher, case, tmp_path)
    goes_on(launcher, case, tmp_path, [before], whole)

"""Law L4 under signals (FAULTS 23, 29): whoever gets one when, all ranks stop at one place, save once, lose nothing."""

import contextlib
import inspect
import itertools
import os
import pty
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset, get_worker_info

from lit_dp import LitClassifier
from lit_dp.engine import loaders, preemption, stopping
from lit_dp.engine.channel import Message
from lit_dp.engine.checkpoints import LastCheckpoint
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.parity import sha256
from lit_dp.engine.stopping import StopAgreement, Tick
from lit_dp.errors import SAVED
from tests.launchers import LAUNCHERS, Launched, launched, note
from tests.ranks import run_ranks
from tests.training import Points, faulty_copy, momentum, network, quiet_trainer, seed_everything

pytestmark = pytest.mark.matrix

SECONDS_TO_LEAVE = 5.0
STEPS = 8  # an epoch
BOTH_CODES = {"lit_dp": SAVED, "torchrun": 1}
"""The launcher's exit code when its ranks end with 75: torchrun has only 1 to say that."""


# --- what is trained ---


class Classifier(LitClassifier):
    """Its learning rate hangs on every validation: one too many or too few, or with wrong weights, changes the end."""

    def __init__(self, monitor: str) -> None:
        super().__init__(network(), 4, momentum)  # pyright: ignore[reportArgumentType]
        self.monitor = monitor

    def configure_optimizers(self) -> Any:
        optimizer = momentum(self.parameters())
        plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = batch[1] if isinstance(batch[0], list) else batch
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch[1]))


class Data(Points):
    """Two validation loaders, of which two ranks have unequal numbers of batches: 7 and 6, 3 and 2."""

    def __init__(self, folder: Path, case: "Case") -> None:
        super().__init__(samples=4 * STEPS - 1, batch_size=2)
        self.folder, self.case = folder, case

    def setup(self, stage: str) -> None:
        if self.case.at == "setup" and self.trainer.global_rank != self.case.rank:  # pyright: ignore
            note(self.folder, "there")
            time.sleep(self.case.pause)

    def train_dataloader(self) -> DataLoader:
        def begin(worker: int) -> None:
            assert get_worker_info().dataset is self.dataset  # pyright: ignore[reportOptionalMemberAccess]
            note(self.folder, "workers", str(os.getpid()))

        workers = self.case.workers
        return DataLoader(self.dataset, self.batch_size, shuffle=True, num_workers=workers, worker_init_fn=begin)

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(Subset(self.dataset, range(n)), 1) for n in (13, 5)]
        return CombinedLoader(loaders, "min_size") if self.case.together else loaders


@dataclass(frozen=True)
class Case:
    """One training, and where a rank of it sends itself a signal, or takes its time.

    Attributes:
        at: hook of a callback, in the `call`th call of which rank `rank` does so; in "setup" all others wait.
        signum: what the rank sends itself there; 0 waits there for `pause` seconds.
        slow: rank that takes 30 ms for a batch of a validation.
    """

    at: str = ""
    epochs: int = 2
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
    together: bool = False  # whether both validation loaders are read at once


def fit(folder: Path, root: Path, case: Case) -> None:
    """What a rank runs: trains to the end, from the last checkpoint in `root` if there is one."""
    seed_everything(3, verbose=False)
    monitor = "val/loss" if case.together else "val/loss/dataloader_idx_0"
    module, data, ledger = Classifier(monitor), Data(folder, case), Ledger()
    callbacks = [Watched(folder), LastCheckpoint(), ledger, *([Averaged()] if case.averaged else [])]
    if case.at not in ("", "setup"):
        callbacks.append(signaller(folder, case))
    trainer = quiet_trainer(
        strategy=case.strategy,
        max_epochs=case.epochs,
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
        assert time.monotonic() - begun < SECONDS_TO_LEAVE, run.err
        assert run.survivors() == []
    assert code == (SAVED if launcher == "lit_dp" else 1), run.err  # all that torchrun can say
    assert sorted(run.notes("left")) == [f"0 {SAVED}", f"1 {SAVED}"]
    assert [line.split()[0] for line in run.notes("saves")].count("stop") == 1, run.notes("saves")
    assert "stopped after step" in run.err
    return run


def goes_on(launcher: str, case: Case, root: Path, before: list[Launched], whole: Any) -> list[int]:
    """Run to the end: the same bits at every step as without a stop, every sample once in every epoch.

    The steps that were taken before and since, in their order: each once, if nothing was lost (`every_step`).
    """
    folder = Path(tempfile.mkdtemp(dir=root))
    with launched(launcher, 2, fit, folder, root, replace(case, at="", sanity=0), folder=folder) as run:
        assert run.wait() == 0, run.err
    digests, steps = whole(case), [line for part in (*before, run) for line in part.notes("steps")]
    assert {step: digest for step, digest in map(str.split, steps) if digests[step] != digest} == {}
    assert run.notes("sha") == [digests["end"]]
    assert set(run.notes("epochs")) == {f"{4 * STEPS - 1} {4 * STEPS} 0 0"}  # one sample is padded
    return [int(line.split()[0]) for line in steps]


def every_step(case: Case) -> list[int]:
    return list(range(1, case.epochs * STEPS // case.accumulate + 1))


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
    case = Case(at="on_train_batch_start", epochs=3, rank=1, call=2, signum=0)
    stops = [stop(launcher, case, tmp_path, send) for send in PATTERNS.values()]
    assert goes_on(launcher, case, tmp_path, stops, whole) == every_step(case)


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
    "in a validation of loaders read together": Case(at="on_validation_batch_end", call=2, slow=0, together=True),
    "with loader workers": Case(at="on_train_batch_end", call=3, workers=2),
}


BY_RANK = [(name, 0, LAUNCHERS[number % 2]) for number, name in enumerate(MOMENTS)]
BY_RANK += [
    (name, 1, LAUNCHERS[1 - number % 2]) for number, name in enumerate(MOMENTS) if MOMENTS[name].slow is not None
]


@pytest.mark.parametrize(("moment", "rank", "launcher"), BY_RANK)
def test_whenever_a_signal_comes(moment: str, rank: int, launcher: str, tmp_path: Path, whole: Any) -> None:
    case = replace(MOMENTS[moment], rank=rank)
    before = stop(launcher, case, tmp_path)
    assert goes_on(launcher, case, tmp_path, [before], whole) == every_step(case)


def test_a_signal_that_comes_before_all_ranks_listen(tmp_path: Path, whole: Any) -> None:
    case = Case(at="setup", rank=0, signum=0)

    def later(run: Launched) -> None:
        time.sleep(case.pause / 2)
        os.kill(run.rank(0), signal.SIGTERM)

    assert goes_on("lit_dp", case, tmp_path, [stop("lit_dp", case, tmp_path, later)], whole) == every_step(case)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_after_the_last_step_is_too_late(launcher: str, tmp_path: Path, whole: Any) -> None:
    case = Case(at="on_train_end")
    with launched(launcher, 2, fit, tmp_path, tmp_path, case, folder=tmp_path) as run:
        assert run.wait() == 0, run.err
        assert run.survivors() == []
    assert run.notes("sha") == [whole(case)["end"]]
    assert run.notes("left") == []
    assert f"stop {case.epochs * STEPS}" not in run.notes("saves")


def _to_all(run: Launched, signum: int, launcher: bool) -> None:
    workers = [int(line) for line in run.notes("workers")]
    assert len(workers) == 4
    for pid in [*workers, run.rank(0), run.rank(1), *([run.pid] if launcher else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


@pytest.mark.parametrize(
    ("launcher", "signum"), [(of, signal.SIGTERM) for of in LAUNCHERS] + [("lit_dp", signal.SIGUSR1)]
)
def test_a_signal_to_every_process_of_the_job(launcher: str, signum: int, tmp_path: Path, whole: Any) -> None:
    """As Slurm sends it: loader workers get it first of all."""
    case = Case(at="on_train_batch_start", call=2, signum=0, workers=2)
    before = stop(launcher, case, tmp_path, partial(_to_all, signum=signum, launcher=True))
    assert not any(map(_is_there, before.notes("workers")))
    assert goes_on(launcher, case, tmp_path, [before], whole) == every_step(case)


def test_loader_workers_that_heed_it_lose_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders.WorkerStart, "__call__", lambda self, worker: self.inner(worker))
    case = Case(at="on_train_batch_start", call=2, signum=0, workers=2)
    with pytest.raises(AssertionError, match="DataLoader worker"):
        stop("lit_dp", case, tmp_path, partial(_to_all, signum=signal.SIGTERM, launcher=True))


def _is_there(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


SLOW = """
import pathlib, time, lit_dp

class Slow(lit_dp.LitClassifier):
    def training_step(self, batch, batch_idx):
        if pathlib.Path("block").exists():
            pathlib.Path("blocked").touch()
            time.sleep(60)
        return super().training_step(batch, batch_idx)
"""


def test_ctrl_c_at_a_terminal(tmp_path: Path) -> None:
    """`python -m lit_dp fit` itself. Once: saved, 75. Twice, in a step that does not end: gone at once, 130."""
    (tmp_path / "slow.py").write_text(SLOW)
    command = [
        "fit",
        "--config",
        "digits",
        "--model.class_path",
        "slow.Slow",
        "--trainer.max_epochs",
        "900",
        "--trainer.devices",
        "2",
    ]
    once = Terminal([*command, "--trainer.accelerator", "cpu"], tmp_path)
    once.read_until("epoch 2")
    once.type("\x03")
    assert once.ends() == SAVED, once.said
    assert "saved runs/digits/checkpoints/last.ckpt; --resume auto goes on" in once.text
    (tmp_path / "block").touch()
    twice = Terminal([*command, "--trainer.accelerator", "cpu", "--resume", "auto"], tmp_path)
    twice.read_until("goes on from runs/digits/checkpoints/last.ckpt")
    while not (tmp_path / "blocked").exists():
        time.sleep(0.02)
    twice.type("\x03")
    twice.read_until("Ctrl-C again kills them")
    assert twice.is_running()
    twice.type("\x03")
    assert twice.ends() == 128 + signal.SIGINT, twice.said


class Terminal:
    """`python -m lit_dp` in a terminal of its own. The last process that has it open is the last one that is there."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # however pytest was started
            os.execv(sys.executable, [sys.executable, "-m", "lit_dp", *command])
        self.said = ""

    @property
    def text(self) -> str:
        """What it has said, without colours, on one line."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]", "", self.said)

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def read_until(self, text: str | None, seconds: float = 60) -> None:
        """Until it says `text`, or with None until all processes are gone."""
        deadline = time.monotonic() + seconds
        while text is None or text not in self.text:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.screen], [], [], left)[0]
            assert ready, f"no {text!r} in: {self.said[-3000:]}"
            try:
                self.said += os.read(self.screen, 65536).decode(errors="replace")
            except OSError:
                assert text is None, self.said
                return

    def is_running(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def ends(self) -> int:
        """The exit code, in time; nobody stays."""
        self.read_until(None, SECONDS_TO_LEAVE)
        os.close(self.screen)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


# --- without us ---


@pytest.mark.parametrize("pattern", ["rank 1", "0, then 1 after 50 ms"])
def test_lightning_loses_what_it_trained(pattern: str, tmp_path: Path) -> None:
    """FAULTS 23: it waits until the timeout, or is aborted as ranks exchange different things. Tells us when upstream
    has mended it (PL 20806, 21406)."""
    strategy = DDPStrategy(timeout=timedelta(seconds=3))
    case = Case(at="on_train_batch_start", rank=1, call=4, signum=0, pause=0.2, strategy=strategy)
    with launched("lit_dp", 2, fit, tmp_path, tmp_path, case, folder=tmp_path) as run:
        run.wait_for("there")
        PATTERNS[pattern](run)
        assert run.wait() not in (0, SAVED)
    assert run.notes("saves") == []


def _exchanges(strategy: Any) -> list[Counter[str]]:
    """Of each step but the first: how often which function of torch.distributed was called."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in (
        "broadcast",
        "all_reduce",
        "all_gather",
        "barrier",
        "send",
        "recv",
        "isend",
        "irecv",
        "all_gather_object",
    ):
        setattr(dist, name, counted(name, getattr(dist, name)))
    steps: list[Counter[str]] = []

    class Steps(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            steps.append(Counter(calls))

    seed_everything(3, verbose=False)
    data = Points(samples=4 * STEPS, batch_size=2)
    quiet_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0, callbacks=[Steps()]).fit(
        Plain(), datamodule=data
    )
    return [after - before for before, after in itertools.pairwise(steps)]


class Plain(LitClassifier):
    """Logs nothing, so that what remains is the trainer's own."""

    def __init__(self) -> None:
        super().__init__(network(), 4, momentum)  # pyright: ignore[reportArgumentType]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])


def test_no_exchange_in_a_step_but_that_of_the_gradients() -> None:
    """FAULTS 29: Lightning broadcasts before every step. DDP's own exchange is C++, and not counted."""
    assert run_ranks(2, _exchanges, "exact_ddp") == [[Counter()] * (STEPS - 1)] * 2
    assert run_ranks(2, _exchanges, "ddp") == [[Counter(broadcast=1)] * (STEPS - 1)] * 2


def test_what_is_switched_off_in_lightning_is_still_there() -> None:
    trainer = quiet_trainer(devices=1)
    assert callable(trainer._signal_connector.register_signal_handlers)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(trainer.fit_loop.epoch_loop).advance)
    assert "self._signal_connector.register_signal_handlers()" in inspect.getsource(Trainer._run)


# --- the agreement ---


class Piece(NamedTuple):
    """Work that a rank begins after it has asked whether to stop before `tick`; `joint`: it ends on all at once."""

    tick: Tick
    joint: bool

    @property
    def place(self) -> int:
        return self.tick[0]


def programs(random: Random, last: Any = preemption.LAST) -> list[list[Piece]]:
    """What ranks do: steps, and validations of several loaders, of unequal numbers of batches, without an exchange."""
    ranks: list[list[Piece]] = [[] for _ in range(random.randint(1, 3))]
    for phase in range(1, random.randint(2, 5)):
        loaders = random.choice([0, 0, 1, 2])
        for pieces in ranks:
            for loader in range(loaders):
                batches = random.randint(1, 4)
                pieces += [Piece((phase, loader, batch), False) for batch in range(batches - 1)]
                pieces.append(Piece((phase, loader, last or batches - 1), loader == loaders - 1))
            if not loaders:
                pieces.append(Piece((phase,), True))
    return ranks


class Simulated:
    """A rank: begins piece after piece, gets the messages of the relay in their order, and signals at any moment."""

    def __init__(self, pieces: list[Piece], world_size: int, module: Any) -> None:
        self.pieces, self.begun, self.busy, self.stopped = pieces, 0, False, False
        self.posted: list[tuple[str, Any]] = []
        self.heard, self.signals = 0, 0
        self.agreement: StopAgreement = module.StopAgreement(world_size, lambda *message: self.posted.append(message))

    @property
    def free(self) -> bool:
        """Whether the main thread is about to begin something, and need not wait to know whether it may."""
        knows = self.agreement.asked is None or self.agreement._complete.is_set()
        return not self.busy and not self.stopped and self.begun < len(self.pieces) and knows

    def begin(self) -> None:
        piece = self.pieces[self.begun]
        self.stopped = self.agreement.stops_before(piece.tick)
        if not self.stopped:
            self.begun, self.busy = self.begun + 1, True

    @property
    def end(self) -> Any:
        return ("stopped", self.pieces[self.begun].place) if self.stopped else self.begun == len(self.pieces) and "done"


def outcome(random: Random, module: Any = stopping, last: Any = preemption.LAST) -> set[Any]:
    """How ranks end when everything that can happen does so in a random order."""
    pieces = programs(random, last)
    ranks = [Simulated(mine, len(pieces), module) for mine in pieces]
    relay: list[Message] = []
    for rank in random.choices(ranks, k=random.randint(0, 3)):
        rank.signals += 1

    def may_end(rank: Simulated) -> bool:
        piece = rank.pieces[rank.begun - 1]
        together = [other.pieces[other.begun - 1] for other in ranks if other.begun]
        there = sum(other.place > piece.place or (other.place == piece.place and other.joint) for other in together)
        return rank.busy and (not piece.joint or there == len(ranks))

    while True:
        events: list[Callable[[], Any]] = [rank.begin for rank in ranks if rank.free]
        events += [partial(setattr, rank, "busy", False) for rank in ranks if may_end(rank)]
        for number, rank in enumerate(ranks):
            if rank.posted:
                events.append(lambda n=number, r=rank: relay.append(Message(r.posted[0][0], n, r.posted.pop(0)[1])))
            if rank.heard < len(relay):
                events.append(partial(_hear, rank, relay))
            if rank.signals:
                events.append(partial(_signal, rank))
        if not events:
            return {rank.end for rank in ranks}
        random.choice(events)()


def _hear(rank: Simulated, relay: list[Message]) -> None:
    rank.heard += 1
    rank.agreement.receive(relay[rank.heard - 1])


def _signal(rank: Simulated) -> None:
    rank.signals -= 1
    rank.agreement.ask("SIGTERM")


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_all_ranks_end_at_one_place_in_whatever_order_things_happen(random: Random) -> None:
    ends = outcome(random)
    assert len(ends) == 1, ends
    assert False not in ends


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("        self._complete.wait()", "        return True\n        self._complete.wait()"),  # at its own next step
        ("tick > max(", "tick >= max("),
        ("max(self._begun_by", "min(self._begun_by"),
        ("                self._begun = tick\n", ""),
    ],
)
def test_other_rules_do_not_hold(right: str, wrong: str) -> None:
    faulty = faulty_copy(stopping, right, wrong)
    assert any(len(ends := outcome(Random(seed), faulty)) > 1 or False in ends for seed in range(500))


def test_last_batches_have_to_be_told() -> None:
    """Without `LAST` a rank whose loader is at its end would wait for one that stops in the midst of it."""
    assert any(len(outcome(Random(seed), last=None)) > 1 for seed in range(500))

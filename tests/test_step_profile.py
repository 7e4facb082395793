"""`fit --profile step`: every moment of a step belongs to one part, and the rank that others wait for is named."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lit_dp.engine import marks
from lit_dp.engine.step_parts import PARTS, Parts, StepTimes
from lit_dp.engine.step_profile import WARM_UP, Marks, StepProfile
from lit_dp.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import leave, quiet_trainer

STEPS = WARM_UP + 4


class Clock:
    """Time that passes only where a test lets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(marks, "time", clock)
    return clock  # type: ignore[return-value]


class Samples(Dataset[Tensor]):
    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.clock.now += 0.001
        return torch.ones(2)


class Slowly(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.clock.now += 0.004
        return gradient, None


class SlowSGD(torch.optim.SGD):
    def __init__(self, parameters: Any, clock: Clock) -> None:
        super().__init__(parameters, lr=0.1)
        self.clock = clock

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.clock.now += 0.005
        return loss


class SlowLogger(CSVLogger):
    clock: Clock

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.clock.now += 0.006


class Module(LightningModule):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = nn.Linear(2, 1), clock

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.clock.now += 0.002
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += 0.003
        loss = Slowly.apply(self.layer(batch), self.clock).mean()  # type: ignore[union-attr]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 100

    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters(), self.clock)


class SlowCallback(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *args: Any) -> None:
        self.clock.now += 0.0005

    def on_train_epoch_end(self, *args: Any) -> None:
        self.clock.now += 100


def profiled(clock: Clock, root: Path, accumulate: int = 1, **settings: Any) -> Any:
    """A trainer that has taken `STEPS` steps of one sample a micro-batch, in two epochs of unequal length."""
    logger = SlowLogger(root)
    logger.clock = clock
    trainer = quiet_trainer(
        devices=1,
        max_steps=STEPS,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[SlowCallback(clock)],
        **settings,
    )
    module = Module(clock)
    module.layer.requires_grad_(True)
    loader = DataLoader(Samples(clock, (STEPS - 2) * accumulate))
    trainer.fit(module, loader, DataLoader(Samples(clock, 2)), profile="step")
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_moment_belongs_to_one_part(clock: Clock, tmp_path: Path, accumulate: int) -> None:
    times = profiled(clock, tmp_path, accumulate).step_profile.times
    assert len(times.ranks[0].busy) == STEPS - WARM_UP
    expected = {
        "data": 1 * accumulate,
        "copy": 2 * accumulate,
        "forward": 3 * accumulate,
        "backward": 4 * accumulate,
        "optimizer": 5,
        "logging": 6,
        "callbacks": 0.5 * accumulate,
    }
    measured = {part: times.milliseconds(part)[0] for part in PARTS}
    assert {part: value for part, value in measured.items() if value} == pytest.approx(expected)
    assert 1000 * times.ranks[0].step == pytest.approx(sum(expected.values()))


def test_what_comes_between_steps_would_be_seen(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Marks, "pause", lambda self: None)
    times = profiled(clock, tmp_path).step_profile.times
    assert times.ranks[0].step > 50


def test_a_part_within_another_is_not_counted_twice(clock: Clock) -> None:
    noted, parts = Marks(on_cuda=False), Parts()
    noted.start("train_dataloader_next")
    noted.stop("train_dataloader_next")
    with noted.profile("[LightningModule]M.optimizer_step"):
        clock.now += 1
        with noted.profile("[Strategy]S.training_step"):
            clock.now += 2
            noted.begin("logging")
            clock.now += 4
            noted.end()
            clock.now += 8
        clock.now += 16
    clock.now += 32
    taken = noted.cut()
    parts.add((part, b - a) for (part, a), (_, b) in pairwise(taken))
    assert parts.seconds == dict.fromkeys(PARTS, 0) | {"optimizer": 17, "forward": 10, "logging": 4, "rest": 32}
    assert noted.profile("[Strategy]S.on_train_batch_start") is noted.profile("anything")


def test_nothing_stays(clock: Clock, tmp_path: Path) -> None:
    trainer = profiled(clock, tmp_path)
    assert "log" not in trainer.lightning_module.__dict__
    assert not {"log_metrics", "save"} & trainer.logger.__dict__.keys()
    assert not isinstance(trainer.profiler, Marks)
    assert not any(isinstance(callback, StepProfile) for callback in trainer.callbacks)


def test_nothing_stays_of_a_failure(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> None:
        assert "log" in self.__dict__
        raise KeyError("wrong")

    monkeypatch.setattr(Module, "on_train_batch_end", fail)
    after: list[bool] = []
    leave_it = StepProfile.on_exception

    def left(self: Any, trainer: Any, module: LightningModule, error: BaseException) -> None:
        leave_it(self, trainer, module, error)
        after.append("log" in module.__dict__)

    monkeypatch.setattr(StepProfile, "on_exception", left)
    with pytest.raises(KeyError, match="wrong"):
        profiled(clock, tmp_path)
    assert after == [False]


def test_another_profiler_is_refused(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="measure one another"):
        profiled(clock, tmp_path, profiler=SimpleProfiler())


# --- several ranks ---


class OneIsSlow(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.02 * (self.global_rank == 1))
        return super().training_step(batch, batch_idx)


def weights_and_times(profile: Any, of: type[Module] = Module) -> tuple[Any, Any, int]:
    torch.manual_seed(0)
    trainer = quiet_trainer(devices=2, max_steps=STEPS, max_epochs=-1, limit_val_batches=0)
    module = of(Clock())
    loader = DataLoader(Samples(Clock(), 2 * STEPS))
    trainer.fit(module, loader, loader, profile=profile)
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())  # type: ignore[attr-defined]
    weights = [p.tolist() for p in module.parameters()]
    leave()
    return weights, trainer.step_profile and trainer.step_profile.times, hooks


def test_the_rank_that_others_wait_for_is_named() -> None:
    _, times, hooks = run_ranks(2, weights_and_times, "step", OneIsSlow)[0]
    rank, share, seconds = times.lag()
    assert (rank, share > 0.5, seconds > 0.01) == (1, True, True)
    assert "straggler: rank 1 is the last in" in str(times)
    waiting, slow = times.milliseconds("exchange")
    assert waiting > 10  # rank 0 has its gradients and waits for those of rank 1, which sleeps twice as long
    assert waiting > slow
    assert hooks == 0


def test_profiled_or_not_the_bits_are_the_same() -> None:
    (with_it, times, _), (without, none, _) = (
        run_ranks(2, weights_and_times, profile)[0] for profile in ("step", None)
    )
    assert with_it == without
    assert times is not None
    assert none is None


def of_ranks(*busy: list[float]) -> StepTimes:
    ranks = []
    for seconds in busy:
        ranks.append(Parts())
        for step in seconds:
            ranks[-1].add([("forward", step), ("exchange", max(map(max, busy)) - step), (None, 50.0)])
    return StepTimes(ranks)


def test_who_is_last_by_how_much() -> None:
    times = of_ranks([1.0, 1.0, 1.0, 3.0], [2.0, 2.5, 4.0, 1.0], [1.5, 1.5, 1.5, 1.5])
    assert times.lag() == (1, 0.75, 1.0)
    assert str(times).endswith("straggler: rank 1 is the last in 75% of steps; the others wait 1000.00 ms for it")


def test_ranks_that_take_turns_are_no_stragglers() -> None:
    assert "no straggler" in str(of_ranks([1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]))
    assert "no straggler" in str(of_ranks([1.0] * 4, [1.001] * 4))


def test_of_many_ranks_the_least_and_the_most_are_told() -> None:
    lines = str(of_ranks(*[[float(n)] for n in range(1, 7)])).splitlines()
    assert lines[1].split() == ["ms", "a", "step", "mean", "least", "most", "share"]
    assert lines[2].split() == ["forward", "3500.000", "1000.000", "6000.000", "58.3", "%"]


def test_one_rank_waits_for_nobody() -> None:
    assert "straggler" not in str(of_ranks([1.0, 2.0]))


def test_on_cuda_time_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = None

        def record(self) -> None:
            self.at = next(passed)

        def elapsed_time(self, later: Any) -> float:
            return later.at - self.at

    passed = iter([5.0, 8.0])
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event))
    assert marks.seconds_between(marks.mark(True), marks.mark(True)) == 0.003

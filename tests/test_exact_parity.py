"""L1 and L7 for `exact_ddp`: the raw loop's bits at every step, and a gradient that is the global batch's mean."""

from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import raw_ddp
from lit_dp.engine.parity import Difference, Trace, first_difference, sha256
from lit_dp.engine.schedule import Schedule
from lit_dp.engine.strategy import ExactDDPStrategy
from tests.ranks import run_ranks
from tests.training import (
    SEED,
    Job,
    adamw,
    cosine,
    faulty_copy,
    quiet_trainer,
    through_exact,
    through_lightning,
    through_raw_loop,
)

exact = partial(ExactDDPStrategy, timeout=20)

JOBS = {
    "momentum": Job(),
    "padding": Job(samples=61, optimizer=adamw),
    "drop_last": Job(samples=61, drop_last=True),
    "accumulate": Job(samples=128, accumulate=4),
    "short last window": Job(samples=40, accumulate=4),
    "short last window, padding": Job(samples=75, accumulate=4, optimizer=adamw, clip_norm=0.5),
    "validation": Job(samples=61, validate=True, optimizer=adamw, lr_scheduler=cosine),
    "bf16": Job(bf16=True),
    "schedule per step": Job(lr_scheduler=cosine, lr_interval="step"),
    "everything": Job(101, 4, 3, adamw, cosine, "step", accumulate=2, clip_norm=1.0, bf16=True, validate=True),
}


def compare(job: Job, world_size: int, loop: Any = raw_ddp) -> tuple[Difference | None, list[Trace], list[Trace]]:
    ours = run_ranks(world_size, through_exact, job)
    raw = run_ranks(world_size, through_raw_loop, job, loop, True)
    return first_difference(ours, raw), ours, raw


ON_FOUR = ("padding", "drop_last", "short last window, padding", "everything")
CASES = [(name, 2) for name in JOBS] + [(name, 4) for name in ON_FOUR]


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_every_step_has_equal_bits(name: str, world_size: int) -> None:
    job = JOBS[name]
    difference, ours, _ = compare(job, world_size)
    assert difference is None
    schedule = Schedule(job.samples, job.batch_size * world_size, world_size, tail="drop" if job.drop_last else "pad")
    steps = -(-schedule.steps_per_epoch // job.accumulate) * job.epochs
    assert [len(trace) for trace in ours] == [steps] * world_size
    assert ours[0][0]["losses/0"] != ours[1][0]["losses/0"]


def test_step_seeds_are_part_of_it() -> None:
    """Without the same seeds a step's dropout differs: the comparison sees it at once."""
    ours = run_ranks(2, through_exact, Job())
    unseeded = run_ranks(2, through_raw_loop, Job())
    assert first_difference(ours, unseeded) == Difference(step=0, tensor="losses/0", ranks=(0, 1))


def test_a_loop_that_forgets_the_short_window_is_found() -> None:
    loop = faulty_copy(raw_ddp, "(loss * correction(index, accumulate, loader, sampler)).backward()", "loss.backward()")
    difference, _, _ = compare(JOBS["short last window"], 2, loop)
    assert difference is not None
    assert (difference.step, difference.part) == (1, "gradients")


# --- the mean over the global batch ---


class Regression(LightningModule):
    """Float64, no draws; notes the gradient of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.layer.parameters() if p.grad is not None]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def inputs(samples: int) -> Tensor:
    return torch.randn(samples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def exact_tail(
    samples: int, batch_size: int, accumulate: int, tail: Literal["pad", "exact"]
) -> tuple[list[list[float]], float]:
    seed_everything(SEED, verbose=False)
    module = Regression()
    trainer = quiet_trainer(
        strategy=exact(tail=tail), max_epochs=2, accumulate_grad_batches=accumulate, limit_val_batches=0
    )
    trainer.fit(module, DataLoader(TensorDataset(inputs(samples)), batch_size, shuffle=True))
    return [gradient.tolist() for gradient in module.gradients], float(trainer.callback_metrics["loss"])


def full_batches(samples: int, step: int) -> tuple[list[Tensor], float]:
    """The same training on one process without batches per rank: `step` samples at once, the last step short."""
    seed_everything(SEED, verbose=False)
    module, data = Regression(), inputs(samples)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    total = 0.0
    for epoch in range(2):
        total = 0.0
        for chosen in torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch)).split(step):
            optimizer.zero_grad()
            loss = module.layer(data[chosen]).square().mean()
            loss.backward()
            module.on_before_optimizer_step(optimizer)
            optimizer.step()
            total += float(loss.detach()) * len(chosen)
    return module.gradients, total / samples


TAILS = [
    (16, 2, 1, 2),  # nothing left over
    (17, 2, 1, 2),  # one rank has a sample, the other none
    (18, 2, 1, 4),  # two of four have none
    (19, 4, 1, 3),  # 3, 2, 2
    (21, 2, 3, 2),  # a short window with a short micro-batch
    (17, 4, 2, 2),  # ... in which a rank has no sample
    (1, 4, 1, 3),  # a dataset of one sample
]


@pytest.mark.parametrize(("samples", "batch_size", "accumulate", "world_size"), TAILS)
def test_exact_tail_is_the_mean_over_the_global_batch(
    samples: int, batch_size: int, accumulate: int, world_size: int
) -> None:
    right, loss = full_batches(samples, batch_size * accumulate * world_size)
    for gradients, logged in run_ranks(world_size, exact_tail, samples, batch_size, accumulate, "exact"):
        assert len(gradients) == len(right)
        for ours, theirs in zip(gradients, right, strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=1e-12, atol=1e-14)
        if accumulate == 1:  # else the weights move between what is compared
            assert logged == pytest.approx(loss, rel=1e-6)


def test_a_padded_tail_is_not() -> None:
    right, _ = full_batches(17, 4)
    gradients, _ = run_ranks(2, exact_tail, 17, 2, 1, "pad")[0]
    last = len(gradients) // 2 - 1
    assert not torch.allclose(torch.tensor(gradients[last], dtype=torch.float64), right[last], rtol=1e-3)


class Ones(LightningModule):
    """The gradient of each micro-batch is 1."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.weight = nn.Parameter(torch.zeros(()))
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.weight * batch[0].mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore
        self.manual_backward(loss)
        assert self.weight.grad is not None
        self.gradients.append(float(self.weight.grad))
        optimizer.step()  # type: ignore
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            assert self.weight.grad is not None
            self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def window(strategy: Any, accumulate: int = 4, values: Tensor | None = None, manual: bool = False) -> list[float]:
    module = Ones(manual)
    values = torch.ones(10, 1) if values is None else values
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate, limit_val_batches=0)
    trainer.fit(module, DataLoader(TensorDataset(values), 1))
    return module.gradients


def test_fault_9_the_last_window() -> None:
    """PL 19987: 5 micro-batches, accumulate 4. Fails when upstream has mended `ddp`."""
    assert run_ranks(2, window, exact()) == [[1.0, 1.0]] * 2
    assert run_ranks(2, window, "ddp") == [[1.0, 0.25]] * 2
    assert run_ranks(1, window, exact()) == [[1.0, 1.0, 1.0]]  # 10 micro-batches of one process


def test_manual_optimization_weighs_too() -> None:
    """5 samples on 2 ranks, in order: means of 0 and 1, of 2 and 3, and 4 alone."""
    values = torch.arange(5.0).unsqueeze(1)
    assert run_ranks(2, window, exact(tail="exact"), 1, values, True) == [[0.5, 2.5, 4.0]] * 2


# --- one process ---


class Plain(Callback):
    """Notes whether the module that trains is wrapped."""

    wrapped = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.wrapped = isinstance(trainer.strategy.model, DistributedDataParallel)


def alone(strategy: Any, job: Job) -> tuple[Trace, bool, bool]:
    watch = Plain()
    return through_lightning(job, strategy, [watch]), watch.wrapped, dist.is_initialized()


def test_one_process_has_no_wrapper_and_no_process_group() -> None:
    job = Job(samples=61, validate=True, accumulate=2)
    ours, wrapped, group = run_ranks(1, alone, exact(), job)[0]
    assert (wrapped, group) == (False, False)
    assert first_difference([ours], run_ranks(1, through_raw_loop, job, raw_ddp, True)) is None
    assert run_ranks(1, alone, "ddp", job)[0][1:] == (True, True)  # what it would cost


def without_dropout(strategy: Any) -> tuple[list[list[float]], str]:
    """Ordered, since Lightning's single-device strategy leaves the shuffle to the generator's history."""
    seed_everything(SEED, verbose=False)
    module = Regression()
    trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, DataLoader(TensorDataset(inputs(17)), 4))
    return [gradient.tolist() for gradient in module.gradients], sha256(module.state_dict())


def test_one_process_has_the_bits_of_the_single_device_strategy() -> None:
    assert run_ranks(1, without_dropout, exact()) == run_ranks(1, without_dropout, SingleDeviceStrategy("cpu"))

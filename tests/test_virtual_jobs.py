"""L2 for what people train with: each job leaves the same on 1, 2 and 4 processes, or is refused with the reason."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lit_dp.engine import evaluation
from lit_dp.engine.parity import sha256
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import quiet_trainer

V = 4


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(1)))


class Plain(LightningModule):
    """BatchNorm, draws in training and in validation, and plain float32 values logged in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(torch.relu(self.norm(self.first(inputs))), 0.3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - 1).square().mean()
        self.log("step", loss, on_step=True, sync_dist=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=True, reduce_fx="max", sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", (self(batch[0]) * torch.rand(())).square().mean(), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SometimesUnused(Plain):
    """A layer that virtual ranks 0 and 2 use: on two processes none of the last micro-batches does."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        k = V // self.trainer.world_size
        virtual_rank = self.global_rank * k + batch_idx % k
        return super().training_step([self.extra(batch[0])] if virtual_rank % 2 == 0 else batch, batch_idx)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Checkpointed(Plain):
    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(super().forward, inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]


class CountsItsSteps(Plain):
    """Asks in its `setup` how many steps there will be, and so for its loaders."""

    def setup(self, stage: str) -> None:
        self.steps = self.trainer.estimated_stepping_batches

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=int(self.steps))
        return [optimizer], [vars(LRSchedulerConfig(schedule, interval="step")) | {"reduce_on_plateau": False}]


class NewBuffer(Plain):
    """Puts a new tensor in the place of a buffer in every step."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen = self.seen + batch[0].mean(dim=0).detach()
        return super().training_step(batch, batch_idx)


class Kept(Callback):
    """What the run showed: all values after each step and each validation, and the number of steps taken then."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        if not trainer.fit_loop._should_accumulate():
            self.rows.append(_values(trainer.logged_metrics))

    def on_validation_end(self, trainer, pl_module) -> None:  # type: ignore
        self.rows.append((trainer.global_step, _values(trainer.callback_metrics)))


def _values(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def fit(module: type[LightningModule], more: dict[str, Any], train: Any = None) -> tuple[list[Any], str]:
    """What the run showed, and SHA-256 of the weights and buffers, on this rank."""
    seed_everything(1, verbose=False)
    built, kept, more = module(), Kept(), dict(more)
    options = {"virtual_ranks": V, "timeout": 20, **more.pop("strategy", {})}
    trainer = quiet_trainer(
        strategy=ExactDDPStrategy(**options),
        max_epochs=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=[kept, *[make() for make in more.pop("callbacks", [])]],
        **more,
    )
    loader = DataLoader(rows(40), 2, shuffle=True) if train is None else train()
    trainer.fit(built, loader, DataLoader(rows(37), 2))
    return kept.rows, sha256(built.state_dict())


JOBS: dict[str, tuple[type[LightningModule], dict[str, Any]]] = {
    "plain": (Plain, {}),
    "unused in some micro-batches": (SometimesUnused, {"strategy": {"find_unused_parameters": True}}),
    "frozen": (Frozen, {}),
    "gradient checkpointing": (Checkpointed, {}),
    "EMA": (Plain, {"callbacks": [EMAWeightAveraging]}),
    "steps counted in setup, and a limit": (CountsItsSteps, {"limit_train_batches": 3}),
    "a buffer that is made anew": (NewBuffer, {}),
    "validation in midst of an epoch": (Plain, {"val_check_interval": 2, "limit_val_batches": 2}),
    "overfitting": (Plain, {"overfit_batches": 2}),
    "fast_dev_run": (Plain, {"fast_dev_run": True}),
}


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_same_on_any_number_of_processes(job: tuple[type[LightningModule], dict[str, Any]]) -> None:
    alone = run_ranks(1, fit, *job)[0]
    assert alone[0]
    for world_size in (2, 4):
        assert run_ranks(world_size, fit, *job)[0] == alone, f"{world_size} processes"


def test_buffers_of_an_average_are_levelled_when_they_are_in_the_module() -> None:
    """EMAWeightAveraging puts them there after `on_validation_start`, where other buffers could be levelled."""
    job = Plain, {"callbacks": [EMAWeightAveraging]}
    right, early = run_ranks(2, fit, *job)[0], run_ranks(2, _levelled_early, *job)[0]
    assert right[1] == early[1]
    assert right[0] != early[0]


def _levelled_early(module: type[LightningModule], more: dict[str, Any]) -> tuple[list[Any], str]:
    start = evaluation.ExactEvaluation._start

    def early(self: Any, loaders: Any) -> None:
        start(self, loaders)
        evaluation.level_buffers(self.module)
        self._levelled = True

    evaluation.ExactEvaluation._start = early
    return fit(module, more)


# --- refused ---


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows(8))

    def shard(self, index: int, count: int) -> list[Any]:
        return list(self)[index::count]


def stream() -> DataLoader:
    return DataLoader(Stream(), 2)


def shared_by_user() -> DataLoader:
    return DataLoader(rows(40), 2, sampler=DistributedSampler(rows(40), 2, int(os.environ["RANK"])))


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "more", "train", "message"),
    [
        (Plain, {"limit_train_batches": 0.5}, None, "limit_train_batches 0.5 is a fraction"),
        (Plain, {"limit_val_batches": 0.5}, None, "limit_val_batches 0.5 is a fraction"),
        (Plain, {"val_check_interval": 0.5}, None, "val_check_interval 0.5 is a fraction"),
        (Plain, {}, stream, "no stream"),
        (Plain, {}, shared_by_user, "without a DistributedSampler"),
        (Plain, {"use_distributed_sampler": False}, None, "use_distributed_sampler"),
        (Lbfgs, {}, None, "LBFGS"),
        (Plain, {"callbacks": [lambda: StochasticWeightAveraging(0.01)]}, None, "StochasticWeightAveraging"),
        (Plain, {"sync_batchnorm": True}, None, "SyncBatchNorm"),
    ],
)
def test_refused(module: type[LightningModule], more: dict[str, Any], train: Any, message: str) -> None:
    for said in run_ranks(2, _refusal, module, more, train):
        assert message in said


def _refusal(module: type[LightningModule], more: dict[str, Any], train: Any) -> str:
    try:
        fit(module, more, train)
    except ConfigError as error:
        return str(error)
    return ""

"""L4: stopped anywhere, resumed on any allowed number of processes, a training shows and leaves the same bits."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset
from torchmetrics import Metric

from lit_dp.engine import checkpoints, logged_state, position, resume, samplers, stateful, strategy, taking_up
from lit_dp.engine.differences import rounding
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError
from tests.ranks import RankFailed, run_ranks
from tests.resuming import (
    V4,
    BeforeSteps,
    Everything,
    InValidation,
    Job,
    best,
    fit,
    loaders,
    rows,
    saved_on,
    unlike,
    users,
    validation,
)
from tests.training import faulty_copy, quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes"),  # on one core
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric"),  # until the first validation
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]
NO_RANKS: dict[str, Any] = {}
ALL = (BeforeSteps, InValidation)


def stops(names: Any, *some: int) -> list[str]:
    listed = list(names)
    return [listed[i] for i in some] if some else listed


# --- every step, saved and resumed on 1, 2 and 4 processes ---


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_step_on_every_number_of_processes(world_size: int, tmp_path: Path) -> None:
    job = Job()
    whole = saved_on(world_size, job, tmp_path)
    assert len(whole.steps) == len(whole.stops) == 6
    assert [name for row in whole.rows for name in row[1] if name == "train/even_step"]
    on = {1: stops(whole.stops), 2: stops(whole.stops, 1, 5), 4: stops(whole.stops, world_size)}
    assert unlike(whole, job, tmp_path, on) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_step_without_virtual_ranks(accumulate: int, workers: int, tmp_path: Path) -> None:
    """Five micro-batches an epoch: the last window holds one."""
    options = {"accumulate_grad_batches": accumulate}
    job = Job(data=loaders(num_workers=workers), strategy=NO_RANKS, options=options)
    whole = saved_on(2, job, tmp_path)
    assert len(whole.stops) == (4 if accumulate == 4 else 10)
    some = stops(whole.stops) if accumulate == 4 else stops(whole.stops, 1, 4, 5, 9)
    assert unlike(whole, job, tmp_path, {2: some}) == []


class AtEnd(Callback):
    """Saves as LastCheckpoint does when training ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, pl_module) -> None:  # type: ignore
        trainer.save_checkpoint(f"{self.folder}/end.ckpt")


def test_a_training_that_was_over_goes_on(tmp_path: Path) -> None:
    whole = saved_on(1, Job(), tmp_path)
    saved_on(2, Job(savers=(AtEnd,), options={"max_epochs": 1}), tmp_path)
    whole.stops["end"] = whole.stops["steps-3"]
    assert unlike(whole, Job(), tmp_path, {1: ["end"]}) == []


def validated(folder: Path) -> None:
    seed_everything(3, verbose=False)
    trainer = quiet_trainer(default_root_dir=folder)
    trainer.validate(Everything(), validation(), verbose=False)
    trainer.save_checkpoint(f"{folder}/validated.ckpt")


def test_what_was_only_validated_is_trained(tmp_path: Path) -> None:
    whole = saved_on(1, Job(), tmp_path)
    run_ranks(1, validated, tmp_path)
    whole.stops["validated"] = whole.stops["steps-0"]
    assert unlike(whole, Job(), tmp_path, {1: ["validated"]}) == []


# --- within a validation ---


def on_plateau(interval: str) -> Callable[[], LightningModule]:
    def schedule(optimizer: Any) -> dict[str, Any]:
        # An improvement by 10 is never made: every validation halves the learning rate.
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"scheduler": plateau, "interval": interval, "monitor": "val/loss", "strict": False}

    return lambda: Everything(schedule)


def soon_stopped() -> EarlyStopping:
    return EarlyStopping("val/loss", patience=1, min_delta=5.0, check_on_train_epoch_end=False)


VALIDATIONS = {
    "in the midst of epochs": Job(
        module=on_plateau("step"),
        savers=(InValidation, best(every_n_train_steps=1)),
        options={"val_check_interval": 1},
    ),
    "at the ends of epochs": Job(
        module=on_plateau("epoch"),
        callbacks=(soon_stopped,),
        savers=(InValidation, best()),
        options={"max_epochs": 4},
    ),
}


@pytest.mark.parametrize("job", VALIDATIONS.values(), ids=VALIDATIONS.keys())
def test_a_validation_begins_anew(job: Job, tmp_path: Path) -> None:
    """Whichever of its batches comes next, and then all goes on: ReduceLROnPlateau, EarlyStopping, the best so far."""
    whole = saved_on(2, job, tmp_path)
    rates = [step[2] for step in whole.steps]
    assert rates[0] > rates[-1]
    names = [name for name in whole.stops if name.startswith("validation")]
    assert {name[-2:] for name in names} == {".0", ".1"}
    assert unlike(whole, job, tmp_path, {1: names[::3], 2: stops(names, 1, -2)}) == []


def test_a_training_that_had_stopped_early_stays_stopped(tmp_path: Path) -> None:
    job = Job(callbacks=(soon_stopped,), savers=(users(),), options={"max_epochs": 6, "val_check_interval": 2})
    whole = saved_on(2, job, tmp_path)
    assert len(whole.steps) == 5
    assert list(whole.stops) == ["users-2", "users-5"]
    assert unlike(whole, job, tmp_path, {1: ["users-2", "users-5"]}) == []
    assert len(run_ranks(1, fit, job, tmp_path, "users-5", True)[0].steps) > 0


# --- checkpoints of a user's own ModelCheckpoint ---

USERS: dict[str, tuple[Job, int]] = {
    # What a step, or an epoch, logs is logged after the hook in which these save: those rows are in no file if the run
    # is killed right then.
    "after every step": (
        Job(
            module=on_plateau("step"),
            savers=(users(every_n_train_steps=1, save_last=True),),
            options={"val_check_interval": 2},
        ),
        1,
    ),
    "after every step, without validation": (
        Job(savers=(users(every_n_train_steps=1),), options={"limit_val_batches": 0, "limit_train_batches": 2}),
        1,
    ),
    "after an epoch": (
        Job(module=on_plateau("epoch"), savers=(users(save_on_train_epoch_end=True),), options={"max_epochs": 3}),
        1,
    ),
    "after validations": (
        Job(
            module=on_plateau("step"),
            savers=(users(save_on_train_epoch_end=False),),
            options={"val_check_interval": 2},
        ),
        0,
    ),
    "after an epoch's validation": (
        Job(module=on_plateau("epoch"), savers=(users(save_on_train_epoch_end=False),), options={"max_epochs": 3}),
        0,
    ),
}


@pytest.mark.parametrize(("job", "unlogged"), USERS.values(), ids=USERS.keys())
def test_a_model_checkpoint_of_the_users(job: Job, unlogged: int, tmp_path: Path) -> None:
    whole = saved_on(2, job, tmp_path)
    names = stops(whole.stops)
    if unlogged and job.options.get("max_epochs") == 3:
        names.pop()  # nothing is left to train: nothing happens
    assert unlike(whole, job, tmp_path, {1: names, 2: names[:1] + names[-1:]}, unlogged) == []


class Fails(Callback):
    """In a step, or in a validation, on all ranks."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:  # type: ignore
        if trainer.global_step == 4:
            raise RuntimeError("in a step")

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:  # type: ignore
        if trainer.global_step == 3 and batch_idx == 1 and trainer.max_epochs == 2:
            raise RuntimeError("in a validation")


def fails(job: Job, folder: Path) -> str:
    try:
        fit(job, folder)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("epochs", "place", "stop"), [(2, "in a validation", "validation-3.1"), (3, "in a step", "steps-4")]
)
def test_a_checkpoint_that_is_saved_when_training_fails(epochs: int, place: str, stop: str, tmp_path: Path) -> None:
    job = Job(savers=ALL, options={"max_epochs": epochs})
    whole = saved_on(1, job, tmp_path)
    saves = users(save_on_exception=True, save_top_k=0, filename="exception")
    assert set(run_ranks(2, fails, replace(job, callbacks=(Fails,), savers=(saves,)), tmp_path)) == {place}
    whole.stops["exception"] = whole.stops[stop]
    assert unlike(whole, job, tmp_path, {1: ["exception"]}) == []


# --- what people train with ---


class OneCycle(Everything):
    """Asks in `configure_optimizers` how many steps there will be, and so for its loaders."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AsksInSetup(Everything):
    def setup(self, stage: str) -> None:
        self.steps = self.trainer.estimated_stepping_batches


class OfSeveral(Everything):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part for part in batch.values() if part is not None]
        return super().training_step([torch.cat([part[i] for part in parts]) for i in (0, 1)], batch_idx)


class OfSingles(Everything):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part[None] for part in batch], batch_idx)


class Manual(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()  # pyright: ignore
        return loss


def combined(mode: Any) -> Callable[[], Any]:
    return lambda: (
        CombinedLoader(
            {"long": DataLoader(rows(30), 3, shuffle=True), "short": DataLoader(rows(14), 2, shuffle=True)}, mode
        ),
        validation(),
    )


class Drawn(Sampler):
    """Draws with replacement, or whole batches, from torch's own generator."""

    def __init__(self, batches: bool = False) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 10 if self.batches else 30

    def __iter__(self) -> Iterator[Any]:
        drawn = torch.randint(30, (30,)).tolist()
        return (drawn[i : i + 3] for i in range(0, 30, 3)) if self.batches else iter(drawn)


def drawn(**options: Any) -> Callable[[], Any]:
    return lambda: (DataLoader(rows(30), **options), validation())


def shared_by_the_user(workers: int = 0) -> tuple[Any, Any]:
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sampler = DistributedSampler(rows(30), replicas, rank, seed=4)
    return DataLoader(rows(30), 3, sampler=sampler, num_workers=workers), validation()


class Position:
    """An iterable that knows where it is, as `state_dict` loaders do: a part of its own on each rank."""

    def __init__(self, indices: list[int]) -> None:
        self.indices, self.at, self.resumed = indices, 0, 0

    def shard(self, index: int, count: int) -> "Position":
        return type(self)(self.indices[index::count])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "of": self.indices[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == self.indices[0], "another rank's state"
        self.resumed = state["at"]

    def __iter__(self) -> Iterator[Any]:
        (self.at, self.resumed), data = (self.resumed, 0), rows(30)
        while self.at < len(self.indices) // 3:
            self.at += 1
            yield [torch.stack(part) for part in zip(*[data[i] for i in self._batch(self.at - 1)], strict=True)]

    def _batch(self, number: int) -> list[int]:
        return self.indices[3 * number : 3 * number + 3]


class SizedPosition(Position):
    def __len__(self) -> int:
        return len(self.indices) // 3


def positioned(kind: type[Position]) -> Callable[[], Any]:
    return lambda: (kind(list(range(30))), validation())


ON_1, ON_2 = (1,), (2,)

JOBS: dict[str, tuple[Job, tuple[int, ...]]] = {
    "tail exact": (Job(data=loaders(26), strategy={**V4, "tail": "exact"}), ON_1),
    "EMA": (Job(callbacks=(lambda: EMAWeightAveraging(decay=0.8),), savers=ALL), ON_1),
    "EMA of epochs": (
        Job(
            callbacks=(lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=3, update_starting_at_epoch=0),),
            savers=ALL,
        ),
        ON_1,
    ),
    "accumulation that grows": (
        Job(
            strategy=NO_RANKS,
            callbacks=(lambda: GradientAccumulationScheduler({0: 1, 1: 3}),),
            savers=ALL,
        ),
        ON_2,
    ),
    "one cycle": (Job(module=OneCycle), ON_1),
    "loaders asked for in setup, workers": (Job(module=AsksInSetup, data=loaders(num_workers=1)), ON_1),
    "powersgd": (Job(strategy={"all_reduce": "powersgd"}), ON_2),
    "clipping, bf16": (Job(options={"gradient_clip_val": 0.1, "precision": "bf16-mixed"}), ON_1),
    "max_steps": (
        Job(module=on_plateau("epoch"), savers=ALL, options={"max_epochs": -1, "max_steps": 7}),
        ON_1,
    ),
    "max_steps, after epochs": (
        Job(
            module=on_plateau("epoch"),
            savers=(users(save_on_train_epoch_end=True),),
            options={"max_epochs": -1, "max_steps": 7},
        ),
        ON_1,
    ),
    "validation every second step of all": (
        Job(savers=ALL, options={"val_check_interval": 2, "check_val_every_n_epoch": None}),
        ON_1,
    ),
    "validation every second epoch, a limit": (
        Job(savers=ALL, options={"check_val_every_n_epoch": 2, "limit_train_batches": 2, "max_epochs": 3}),
        ON_1,
    ),
    "max_size_cycle": (Job(module=OfSeveral, data=combined("max_size_cycle")), ON_1),
    "min_size": (Job(module=OfSeveral, data=combined("min_size")), ON_1),
    "without batching": (Job(module=OfSingles, data=drawn(batch_size=None, shuffle=True)), ON_1),
    "a sampler": (Job(data=drawn(batch_size=3, sampler=Drawn(), num_workers=1)), ON_1),
    "a batch sampler": (Job(data=drawn(batch_sampler=Drawn(batches=True))), ON_1),
    "a DistributedSampler": (Job(data=lambda: shared_by_the_user(1), strategy=NO_RANKS), ON_2),
    "loaders anew every epoch": (
        Job(data=loaders(num_workers=1), savers=ALL, options={"reload_dataloaders_every_n_epochs": 1}),
        ON_1,
    ),
    "manual optimization": (Job(module=Manual, strategy=NO_RANKS, savers=ALL), ON_2),
    "a loader with a state": (Job(data=positioned(Position), strategy=NO_RANKS, savers=ALL), ON_2),
    "a sized loader with a state": (
        Job(module=AsksInSetup, data=positioned(SizedPosition), strategy=NO_RANKS, savers=ALL),
        ON_2,
    ),
}


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize(("job", "on"), JOBS.values(), ids=JOBS.keys())
def test_what_people_train_with(job: Job, on: tuple[int, ...], tmp_path: Path) -> None:
    whole = saved_on(2, job, tmp_path)
    names = stops(whole.stops)
    steps = [name for name in names if name.startswith("steps")]
    validations = [name for name in names if name.startswith("validation")]
    of_users = [name for name in names if name.startswith("users")][:-1]
    chosen = [*steps[1 :: len(steps) // 2 + 1], *validations[:1], *validations[-1:], *of_users]
    unlogged = int(not steps)
    assert unlike(whole, job, tmp_path, dict.fromkeys(on, chosen), unlogged) == []


# --- what has changed is refused ---


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows(16))

    def shard(self, index: int, count: int) -> list[Any]:
        return list(self)[index::count]


class WithinSteps(Callback):
    """As ModelCheckpoint's train_time_interval may do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        if batch_idx == 0 and trainer.global_step == 1:
            trainer.save_checkpoint(f"{self.folder}/within.ckpt")


def streamed() -> tuple[Any, Any]:
    return DataLoader(Stream(), 2), validation()


def others() -> tuple[Any, Any]:
    features, labels = rows(16).tensors
    return DataLoader(TensorDataset(features + 1, labels), 2, shuffle=True), validation()


SMALL = loaders(16, 2)
PLAIN = Job(data=SMALL, strategy=NO_RANKS)


def changed(**what: Any) -> Job:
    return Job(**{"data": SMALL, "strategy": NO_RANKS, **what})


ON_TWO: dict[str, Job] = {
    "samples a step: 4 before, 2 now": changed(data=loaders(16, 1)),
    "samples a step: 4 before, 8 now": changed(options={"accumulate_grad_batches": 2}),
    "ranks were 2 and are 4 (--trainer.strategy.virtual_ranks 2 keeps them)": changed(data=loaders(16, 1), strategy=V4),
    "samples in the training dataset: 16 before, 18 now": changed(data=loaders(18, 2)),
    "the training dataset holds something else": changed(data=others),
    "seed: 3 before, 4 now": changed(seed=4),
    "tail: pad before, exact now": changed(strategy={"tail": "exact"}),
    "tail: pad before, drop now": changed(data=loaders(16, 2, drop_last=True)),
    "shuffle: True before, False now": changed(data=loaders(16, 2, shuffle=False)),
    "draws follow their history (seeded_draws is false)": changed(strategy={"seeded_draws": False}),
}
OF_OTHERS: list[tuple[str, Job, str, int]] = [
    # what a run on two processes saved cannot go on on so many
    ("processes were 2 and are 1", changed(data=positioned(Position)), "steps-2", 1),
    ("processes were 2 and are 1", changed(data=shared_by_the_user), "steps-2", 1),
    ("cannot say which batches were read", changed(data=streamed), "steps-2", 2),
    ("of its loaders were exhausted", changed(module=OfSeveral, data=combined("max_size")), "steps-2", 2),
    (
        "it was saved within a step, after 1 micro-batch of 4",
        changed(savers=(WithinSteps,), options={"accumulate_grad_batches": 4}),
        "within",
        2,
    ),
]


def refusals(jobs: list[Job], folder: Path, stop: str) -> list[str]:
    return [_refusal(job, folder, stop) for job in jobs]


def _refusal(job: Job, folder: Path, stop: str) -> str:
    try:
        fit(job, folder, stop)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_has_changed_is_refused_on_all_ranks(tmp_path: Path) -> None:
    saved_on(2, PLAIN, tmp_path)
    for said in run_ranks(2, refusals, list(ON_TWO.values()), tmp_path, "steps-2"):
        for words, sentence in zip(ON_TWO, said, strict=True):
            assert f"steps-2.ckpt cannot be resumed exactly: {words}; --resume.force" in sentence
    alone = run_ranks(1, refusals, [PLAIN, changed(strategy={"virtual_ranks": 2})], tmp_path, "steps-2")[0]
    assert "ranks were 2 and are 1 (--trainer.strategy.virtual_ranks 2 keeps them)" in alone[0]
    assert alone[1] == ""


@pytest.mark.parametrize(("words", "job", "stop", "world_size"), OF_OTHERS)
def test_what_cannot_go_on_there_is_refused(words: str, job: Job, stop: str, world_size: int, tmp_path: Path) -> None:
    saved_on(2, job, tmp_path)
    for sentence in run_ranks(world_size, _refusal, job, tmp_path, stop):
        assert words in sentence
        assert "--resume.force" in sentence


def test_a_stream_is_resumed_where_an_epoch_begins(tmp_path: Path) -> None:
    job = changed(data=streamed)
    whole = saved_on(2, job, tmp_path)
    assert unlike(whole, job, tmp_path, {2: ["steps-0", "steps-4"]}) == []


class Rate(Metric):
    """What two ranks hold of it cannot be put together."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rate", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: Tensor) -> None:
        self.rate = 0.9 * self.rate + 0.1 * value

    def compute(self) -> Tensor:
        return self.rate


class Rated(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.rate = Rate()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.rate.update(loss.detach())
        return loss


def test_a_metric_that_cannot_be_put_together_is_named_on_all_ranks(tmp_path: Path) -> None:
    job = Job(module=Rated)
    whole = saved_on(2, job, tmp_path)
    assert unlike(whole, job, tmp_path, {2: ["steps-2"]}) == []
    for sentence in run_ranks(4, _refusal, job, tmp_path, "steps-2"):
        assert "rate of Rate holds 'rate', which cannot be put together" in sentence


# --- forced ---


def forced(jobs: list[Job], folder: Path) -> list[Any]:
    return [fit(job, folder, "steps-2", force=True).accounts for job in jobs]


def test_forced_it_goes_on_at_the_next_unseen_sample(tmp_path: Path) -> None:
    """FAULTS 7: 8 of 16 samples were used on two processes."""
    saved_on(2, PLAIN, tmp_path)
    larger, asked = changed(data=loaders(16, 4)), changed(module=AsksInSetup)
    for world_size, jobs in {1: [PLAIN, larger, asked], 2: [larger], 4: [PLAIN]}.items():
        for accounts in run_ranks(world_size, forced, jobs, tmp_path)[0]:
            assert [account.clean and account.uses for account in accounts] == [16, 16]


# --- FAULTS 5 to 8: the right values, and what Lightning does ---


class Numbers(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index


class Noting(LightningModule):
    """Notes the samples of every batch, and a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batches: list[list[int]] = []
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[1].tolist())
        self.draws.append(float(torch.rand(())))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class AtBatch(Callback):
    """Saves when a batch ends, as Lightning's own checkpoints do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")


def noted(strategy: str, folder: Path, stop: int | None = None, workers: int = 0, force: bool = False) -> Noting:
    seed_everything(0, verbose=False)
    module = Noting()
    callbacks = [AtBatch(folder)] if stop is None else []
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, callbacks=callbacks, default_root_dir=folder)
    path = folder / f"{stop}.ckpt" if stop is not None else None
    loader = DataLoader(Numbers(), 2, shuffle=True, num_workers=workers)
    trainer.fit(module, loader, ckpt_path=path, weights_only=True, resume_force=force)
    return module


def what_was_noted(*args: Any) -> tuple[list[list[int]], list[float]]:
    module = noted(*args)
    return module.batches, module.draws


EPOCHS = [[[12, 9], [11, 13], [2, 15], [4, 7]], [[5, 6], [11, 7], [1, 9], [10, 13]]]
LIGHTNING_WARNS = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")


@LIGHTNING_WARNS
@pytest.mark.parametrize(
    ("strategy", "rest"), [("exact_ddp", EPOCHS[0][2:]), ("ddp", EPOCHS[0][:2])], ids=["exact_ddp", "ddp"]
)
def test_faults_5_an_epoch_goes_on_where_it_was_stopped(strategy: str, rest: Any, tmp_path: Path) -> None:
    """`ddp` fails when upstream has mended PL 18780: then Lightning's own loaders may be trusted."""
    assert run_ranks(2, what_was_noted, strategy, tmp_path)[0][0] == [*EPOCHS[0], *EPOCHS[1]]
    assert run_ranks(2, what_was_noted, strategy, tmp_path, 2)[0][0] == [*rest, *EPOCHS[1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_faults_6_the_first_epoch_after_a_resume(workers: int, tmp_path: Path) -> None:
    """The last line fails when upstream has mended PL 21938: then `_before_epoch` and `read_from` need not."""
    for name in ("ddp", "exact_ddp"):
        run_ranks(2, one_epoch, name, tmp_path, workers)
    assert run_ranks(2, after_one_epoch, "exact_ddp", tmp_path, workers)[0] == EPOCHS[1]
    assert run_ranks(2, after_one_epoch, "ddp", tmp_path, workers)[0] == EPOCHS[0 if workers else 1]


def one_epoch(strategy: str, folder: Path, workers: int) -> None:
    seed_everything(0, verbose=False)
    saved = ModelCheckpoint(folder, strategy, save_on_train_epoch_end=True)
    options = {"strategy": strategy, "default_root_dir": folder, "enable_checkpointing": True}
    trainer = quiet_trainer(max_epochs=1, callbacks=[saved], **options)
    trainer.fit(Noting(), DataLoader(Numbers(), 2, shuffle=True, num_workers=workers))


def after_one_epoch(strategy: str, folder: Path, workers: int) -> list[list[int]]:
    seed_everything(0, verbose=False)
    module = Noting()
    trainer = quiet_trainer(max_epochs=2, strategy=strategy, default_root_dir=folder)
    loader = DataLoader(Numbers(), 2, shuffle=True, num_workers=workers)
    trainer.fit(module, loader, ckpt_path=folder / f"{strategy}.ckpt", weights_only=True)
    return module.batches


@LIGHTNING_WARNS
def test_faults_7_another_number_of_processes(tmp_path: Path) -> None:
    """Of Lightning's `ddp`: 8 samples twice, 4 never."""
    for name in ("ddp", "exact_ddp"):
        (tmp_path / name).mkdir()
    half = run_ranks(2, what_was_noted, "ddp", tmp_path / "ddp")
    rest = run_ranks(1, what_was_noted, "ddp", tmp_path / "ddp", 2)[0][0][:6]
    uses = Counter(itertools.chain(*(batch for of_rank in half for batch in of_rank[0][:2]), *rest))
    assert sorted(Counter(uses.values()).items()) == [(1, 4), (2, 8)]
    half = run_ranks(2, what_was_noted, "exact_ddp", tmp_path / "exact_ddp")
    rest = run_ranks(1, what_was_noted, "exact_ddp", tmp_path / "exact_ddp", 2, 0, True)[0][0][:4]
    uses = Counter(itertools.chain(*(batch for of_rank in half for batch in of_rank[0][:2]), *rest))
    assert uses == Counter(range(16))


@LIGHTNING_WARNS
def test_faults_8_draws_after_a_resume(tmp_path: Path) -> None:
    """Of Lightning's `ddp` those of the first epoch come again."""
    for name in ("ddp", "exact_ddp"):
        whole = run_ranks(2, what_was_noted, name, tmp_path)[0][1]
        rest = run_ranks(2, what_was_noted, name, tmp_path, 4)[0][1]
        assert rest == (whole[4:] if name == "exact_ddp" else whole[:4])


# --- faulty versions ---


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def from_the_start(trainer: Any) -> tuple[int, int]:
    return position.next_to_read(trainer)[0], 0


def as_now(loader: Any, taken: int) -> Any:
    return loader.inner.state_dict()


def reset_by_iterating(batches: Any) -> Any:
    inner = right_iteration(batches)
    batches.start = 0
    return inner


right_iteration = samplers.TrainBatches.__iter__
RESCALE = "    _rescale(progress, saved.micro_batches if saved is not None else micro_batches, micro_batches)\n"

FAULTY: dict[str, tuple[Job, str, list[tuple[Any, str, Any]], str]] = {
    "counts of another number of processes": (
        Job(),
        "steps-2",
        [(resume, "place", faulty_copy(position, RESCALE, "").place)],
        "steps",
    ),
    "the epoch is read anew": (
        Job(),
        "steps-2",
        [(m, "next_to_read", from_the_start) for m in (strategy, taking_up)],
        "accounts",
    ),
    "sums of the epoch so far are lost": (
        Job(),
        "steps-2",
        [(logged_state.LoggedState, "on_train_start", nothing)],
        "rows",
    ),
    "a loader with workers begins two iterations": (
        Job(data=loaders(num_workers=1)),
        "steps-2",
        [(samplers.TrainBatches, "__iter__", reset_by_iterating)],
        "steps",
    ),
    "averaged weights are saved as the trained ones": (
        JOBS["EMA"][0],
        "validation-3.1",
        [(checkpoints, "_trained_weights", lambda trainer: nullcontext())],
        "steps",
    ),
    "loaders asked for before the checkpoint was read": (
        JOBS["one cycle"][0],
        "steps-2",
        [(resume, "read_from", nothing)],
        "steps",
    ),
    "the end of the epoch is left out": (USERS["after an epoch"][0], "users-3", [(resume, "finish", nothing)], "steps"),
    "a loader's state is that of the batch read ahead": (
        JOBS["a sized loader with a state"][0],
        "steps-2",
        [(stateful.InUse, "state_after", as_now)],
        "steps",
    ),
}


@pytest.mark.parametrize(("job", "stop", "faults", "part"), FAULTY.values(), ids=FAULTY.keys())
def test_faulty_versions(
    job: Job, stop: str, faults: list[Any], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name, wrong in faults:
        monkeypatch.setattr(owner, name, wrong)
    whole = saved_on(2, job, tmp_path)
    world_size = 1 if job.strategy else 2
    found = unlike(whole, job, tmp_path, {world_size: [stop]}, int(stop.startswith("users")))
    assert any(f"{stop}: {part}: " in line for line in found)


def test_faults_28_each_rank_gets_the_state_of_its_own_loader_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right above, among what people train with. Lightning gives all of them rank 0's."""
    job = JOBS["a loader with a state"][0]
    whole = saved_on(2, job, tmp_path)
    monkeypatch.setattr(resume, "_give_back_loaders", nothing)
    with pytest.raises(RankFailed, match="another rank's state"):
        unlike(whole, job, tmp_path, {2: ["steps-2"]})


# --- how gradients meet ---


def met(all_reduce: str, world_size: int, ranks: int) -> position.Position:
    return position.Position(0, 1, "step", 1, world_size, True, [{"ranks": ranks}], all_reduce=all_reduce)


def test_another_order_of_additions_is_said() -> None:
    for before, after in (("tree", "butterfly"), ("halving_doubling", "halving_doubling")):
        assert rounding(met(before, 4, 4), met(after, 2, 4)) == []
    assert rounding(met("native", 2, 2), met("halving_doubling", 1, 2)) == []
    assert rounding(met("native", 4, 4), met("native", 4, 4)) == []
    said = "gradients met by native on 4 processes, and do by a binary tree: the last bits of their sums may differ"
    assert rounding(met("native", 4, 4), met("halving_doubling", 2, 4)) == [said]
    assert rounding(met("native", 2, 2), met("bf16", 2, 2)) != []


class Large(Everything):
    """More than the first megabyte, for which DDP makes a bucket of its own after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))


class Usual(ExactDDPStrategy):
    """Begins with one bucket, whatever the run that saved had."""

    def _setup_model(self, model: Any) -> Any:
        self.resumed = None if self.resumed is None else replace(self.resumed, buckets=[])
        return super()._setup_model(model)


def test_gradients_meet_in_the_buckets_of_the_run_that_saved(tmp_path: Path) -> None:
    """On more than two ranks the order in which a native all-reduce adds depends on them."""
    job = Job(module=Large, strategy=NO_RANKS, options={"max_epochs": 1, "limit_val_batches": 0})
    whole = saved_on(3, job, tmp_path)
    assert unlike(whole, job, tmp_path, {3: ["steps-1"]}) == []
    assert unlike(whole, replace(job, kind=Usual), tmp_path, {3: ["steps-1"]}) != []

"""L6: draws are a function of (seed, epoch, step, rank) or of (seed, epoch, sample), never of history or workers."""

import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split
from torchvision.transforms import v2

from lit_dp import ImageDataModule
from lit_dp.engine.parity import sha256
from lit_dp.engine.randomness import begin_sample, derive, isolated, seed_step
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError
from tests.ranks import run_ranks
from tests.test_data_sharing import unstriped
from tests.training import quiet_trainer

SEED = 7
exact = partial(ExactDDPStrategy, timeout=20)

Draw = tuple[float, float, float]


def draw() -> Draw:
    """One number of each generator that people use."""
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002


# --- in a step ---


class Dropping(LightningModule):
    """Notes what is drawn in every step of every epoch, and which units dropout leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(1, 1), nn.Dropout(0.5)
        self.steps: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.transferred: Draw | None = None

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred = draw()  # where augmentation on the device happens
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = "".join(map(str, (self.dropout(torch.ones(32)) > 0).int().tolist()))
        self.steps[self.current_epoch, batch_idx] = (kept, draw(), self.transferred)
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Spendthrift(Callback):
    """Draws where a logger or a user's hook might."""

    def on_train_batch_start(self, *args: Any) -> None:
        draw()

    def on_train_batch_end(self, *args: Any) -> None:
        torch.rand(5)


def ones(samples: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 1)), 2)


def steps(strategy: Any, callbacks: tuple[Callback, ...] = (), validate: bool = False) -> dict[tuple[int, int], Any]:
    seed_everything(SEED, verbose=False)
    module = Dropping()
    limit = None if validate else 0
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=2, callbacks=list(callbacks), limit_val_batches=limit, num_sanity_val_steps=0
    )
    trainer.fit(module, ones(8), ones(3))
    return module.steps


def test_draws_of_a_step_follow_from_seed_epoch_step_and_rank() -> None:
    ranks = run_ranks(2, steps, exact())
    for rank, by_step in enumerate(ranks):
        assert list(by_step) == [(epoch, step) for epoch in range(2) for step in range(2)]
        for (epoch, step), (kept, drawn, _) in by_step.items():
            with isolated():
                seed_step(SEED, epoch, step, rank)
                again = "".join(map(str, (nn.functional.dropout(torch.ones(32)) > 0).int().tolist()))
                assert (kept, drawn) == (again, draw())
    everything = [value for by_step in ranks for value in by_step.values()]
    for part in zip(*everything, strict=True):
        assert len(set(part)) == 8, "draws of different ranks, epochs or steps are equal"


def test_history_moves_nothing() -> None:
    plain = run_ranks(2, steps, exact())
    assert run_ranks(2, steps, exact(), (Spendthrift(),)) == plain
    assert run_ranks(2, steps, exact(), (), True) == plain


def test_fault_15_upstream_drops_out_alike_on_all_ranks() -> None:
    """Fails when upstream has mended `ddp`. There, history moves the draws too."""
    first, second = run_ranks(2, steps, "ddp")
    assert first == second
    assert run_ranks(2, steps, "ddp", (Spendthrift(),))[0] != first


def test_one_switch_turns_it_off() -> None:
    assert run_ranks(2, steps, exact(seeded_draws=False)) == run_ranks(2, steps, "ddp")


def resumed(strategy: Any, folder: Path) -> tuple[Any, Any]:
    """The second epoch's draws, in one go and after a new start."""
    whole = steps(strategy())
    for epochs, path in ((1, None), (2, folder / "last.ckpt")):
        seed_everything(SEED, verbose=False)
        module = Dropping()
        trainer = quiet_trainer(strategy=strategy(), max_epochs=epochs, limit_val_batches=0)
        trainer.fit(module, ones(8), ones(3), ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(folder / "last.ckpt")
    return {key: value for key, value in whole.items() if key[0] == 1}, module.steps


def test_fault_8_a_resumed_epoch_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    for whole, again in run_ranks(2, resumed, exact, tmp_path):
        assert whole == again
    for whole, again in run_ranks(2, resumed, lambda: "ddp", tmp_path):  # fails when upstream has mended it
        assert whole != again


class DrawingInValidation(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((self.transferred, draw()))


def validated(callbacks: tuple[Callback, ...]) -> list[Any]:
    seed_everything(SEED, verbose=False)
    module = DrawingInValidation()
    trainer = quiet_trainer(strategy=exact(), max_epochs=2, callbacks=list(callbacks), num_sanity_val_steps=0)
    trainer.fit(module, ones(8), ones(7))
    return module.validated


def test_draws_in_validation_have_a_cause_too() -> None:
    ranks = run_ranks(2, validated, ())
    assert ranks == run_ranks(2, validated, (Spendthrift(),))
    everything = [value for drawn in ranks for value in drawn]
    assert [len(drawn) for drawn in ranks] == [4, 4]  # 2 epochs of 2 batches
    for part in zip(*everything, strict=True):
        assert len(set(part)) == 8


# --- in a dataset ---


class Noisy(Dataset[Any]):
    """A sample is its index and one draw of each generator."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return float(index), *draw()


class NoisyByBatch(Noisy):
    """Reads whole batches, and says when it begins a sample."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = []
        for index in indices:
            begin_sample(index)
            samples.append((float(index), *draw()))
        return samples


DATASETS: dict[str, Any] = {
    "plain": Noisy,
    "by batch": NoisyByBatch,
    "subset": lambda: Subset(Noisy(), range(13)),
    "subset of a subset": lambda: Subset(Subset(Noisy(), range(13)), range(13)),
    "subset by batch": lambda: Subset(NoisyByBatch(), range(13)),
    "concatenated": lambda: ConcatDataset([Noisy()]),
}


class Noting(LightningModule):
    """Notes draws by epoch and sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[tuple[int, int], Draw] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        columns = [column.tolist() if isinstance(column, Tensor) else [column] for column in batch]
        for index, *drawn in zip(*columns, strict=True):
            self.seen[self.current_epoch, int(index)] = tuple(drawn)
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def noise(kinds: list[dict[str, Any]], strategy: Any = None) -> list[dict[tuple[int, int], Draw]]:
    """What this rank's samples drew, for each kind of loader."""
    results = []
    for kind in kinds:
        seed_everything(SEED, verbose=False)
        module = Noting()
        trainer = quiet_trainer(strategy=strategy or exact(), max_epochs=2, limit_val_batches=0)
        dataset = DATASETS[kind["dataset"]]()
        trainer.fit(module, DataLoader(dataset, **{name: kind[name] for name in kind if name != "dataset"}))
        results.append(module.seen)
    return results


def pooled(ranks: list[list[dict[tuple[int, int], Draw]]]) -> list[dict[tuple[int, int], Draw]]:
    return [{key: value for seen in kind for key, value in seen.items()} for kind in zip(*ranks, strict=True)]


LOADERS = [
    {"dataset": "plain", "batch_size": 3, "shuffle": True},
    {"dataset": "plain", "batch_size": 5},
    {"dataset": "plain", "batch_size": None},
    {"dataset": "plain", "batch_size": 3, "num_workers": 2, "shuffle": True},
    {"dataset": "plain", "batch_size": 3, "num_workers": 2, "persistent_workers": True},
    {"dataset": "plain", "batch_size": None, "num_workers": 1},
    *({"dataset": name, "batch_size": 4, "shuffle": True} for name in DATASETS if name != "plain"),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_draws_of_a_sample_follow_from_seed_epoch_and_index(world_size: int) -> None:
    """Whatever reads it: how many workers and ranks, in which batch, through which of torch's wrappers."""
    first, *others = pooled(run_ranks(world_size, noise, LOADERS))
    for loader, other in zip(LOADERS[1:], others, strict=True):
        assert other == first, loader
    assert sorted(first) == [(epoch, index) for epoch in range(2) for index in range(13)]
    for generator in zip(*first.values(), strict=True):
        assert len(set(generator)) == 26, "draws of different samples or epochs are equal"
    with isolated():
        seed_everything(SEED, verbose=False)
        torch.default_generator.manual_seed(derive(SEED, 1, 4, "read"))
        assert first[1, 4][0] == pytest.approx(float(torch.rand(())))


def test_upstream_draws_depend_on_the_number_of_workers() -> None:
    loaders = [{"dataset": "plain", "batch_size": 3, "num_workers": workers} for workers in (0, 2)]
    without, with_two = pooled(run_ranks(2, noise, loaders, "ddp"))
    assert without.keys() == with_two.keys()
    assert without != with_two


def test_reading_does_not_move_the_draws_of_a_step() -> None:
    """Reading happens in the training process where there are no workers."""
    quiet, noisy = TensorDataset(torch.ones(8, 1)), _NoisyOnes()
    state = []
    for dataset in (quiet, noisy):
        torch.manual_seed(1)
        from lit_dp.engine.randomness import SeededDataset

        SeededDataset(dataset, 3)[0]
        state.append(float(torch.rand(())))
    assert state[0] == state[1]


class _NoisyOnes(Dataset[Any]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


# --- what all ranks share ---


class Weights(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.read: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read += batch[:, 0].long().tolist()
        return self.layer(batch).sum() * 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def seeded_by_rank(strategy: Any, stage: str = "fit") -> tuple[str, list[int]]:
    import os

    seed_everything(int(os.environ["RANK"]), verbose=False)
    module = Weights()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0)
    data = torch.arange(8.0).unsqueeze(1).expand(8, 3)
    trainer.fit(module, DataLoader(data, 2, shuffle=True))  # type: ignore
    return sha256(module.state_dict()), module.read


def test_weights_and_order_agree_whatever_the_seed_of_a_rank() -> None:
    (weights, order), (other_weights, other_order) = run_ranks(2, seeded_by_rank, exact())
    assert weights == other_weights
    assert sorted(order + other_order) == list(range(8))
    (weights, order), (other_weights, other_order) = run_ranks(2, seeded_by_rank, "ddp")
    assert weights == other_weights
    assert sorted(order + other_order) != list(range(8))  # FAULTS 41: fails when upstream has mended it


def split_by_rank(strategy: Any) -> Any:
    import os

    torch.manual_seed(int(os.environ["RANK"]))
    train, val = random_split(TensorDataset(torch.arange(10.0).unsqueeze(1).expand(10, 3)), [7, 3])
    module = FromTuples()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*DistributedSampler.*")
            trainer.fit(module, DataLoader(train, 2), DataLoader(val, 2))
    except ConfigError as error:
        return str(error)
    return set(module.read), set(module.validated)


class FromTuples(Weights):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch[0][:, 0].long().tolist()


def test_fault_16_a_split_that_differs_between_ranks_is_found_and_named() -> None:
    """PL 7728. Upstream trains on one rank what it validates on the other: fails when that is mended."""
    messages = run_ranks(2, split_by_rank, exact())
    assert messages[0] == messages[1]
    for part in ("the training dataset of rank 1 differs", "position 0 holds sample", "generator=", "random_split"):
        assert part in messages[0]
    (trained, validated), (other_trained, other_validated) = run_ranks(2, split_by_rank, "ddp")
    assert trained & other_validated or validated & other_trained


def lists_by_rank(strategy: Any) -> str:
    """As many files on both ranks, but others."""
    import os

    class Files(Dataset[Tensor]):
        def __init__(self) -> None:
            self.samples = [f"{os.environ['RANK']}/{i}.png" for i in range(4)]

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return torch.zeros(3)

    try:
        quiet_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(Weights(), DataLoader(Files()))
    except ConfigError as error:
        return str(error)
    return ""


def test_lists_of_samples_that_differ_between_ranks_are_found() -> None:
    for message in run_ranks(2, lists_by_rank, exact()):
        assert "the training dataset of rank 1 differs from rank 0's" in message


# --- images ---


class Images(LightningModule):
    """Notes the images that it is given, by epoch and sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[tuple[int, int], str] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _, indices = batch
        for image, index in zip(images, indices.tolist(), strict=True):
            self.seen[self.current_epoch, index] = sha256({"image": image})
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def augmented(workers: int, strategy: Any) -> list[dict[tuple[int, int], str]]:
    seed_everything(SEED, verbose=False)
    module = Images()
    data = ImageDataModule(batch_size=8, num_workers=workers, augmentation=[v2.RandomCrop(8, padding=2)])
    trainer: Trainer = quiet_trainer(strategy=strategy, max_epochs=2, limit_train_batches=3, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    return [module.seen]


def test_augmented_images_do_not_depend_on_workers() -> None:
    without, with_two = (pooled(run_ranks(2, augmented, workers, exact()))[0] for workers in (0, 2))
    assert without == with_two
    assert len(without) == 2 * 2 * 3 * 8
    without, with_two = (pooled(run_ranks(2, augmented, workers, "ddp"))[0] for workers in (0, 2))
    assert without != with_two


def test_order_helper() -> None:
    assert unstriped([[[0, 2], [4]], [[1, 3]]]) == [0, 1, 2, 3, 4]

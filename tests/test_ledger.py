"""L3 in training: the ledger says which samples an epoch used, and tells what was promised from what went wrong."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from lit_dp.engine.account import Account, Some
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.samplers import TrainBatches
from lit_dp.engine.strategy import ExactDDPStrategy
from tests.ranks import run_ranks
from tests.training import quiet_trainer


class Numbers(Dataset):
    """Sample i is (float(i), i)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index


class Stream(IterableDataset):
    """The same samples, without a length or indices."""

    def __init__(self, samples: int) -> None:
        self.data = Numbers(samples)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


class Shards(Stream):
    def shard(self, index: int, count: int) -> list[Any]:
        return [self.data[i] for i in range(index, len(self.data), count)]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch[0], (list, tuple)) else [batch]
        return sum((self.layer(x).mean() for x, _ in parts), torch.tensor(0.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def index_of(batch: Any) -> Tensor:
    return batch[1]


def train(
    loader: Any,
    strategy: Any = "exact_ddp",
    indices_of: Callable[[Any], Tensor] | None = None,
    trainer: Callable[..., pl.Trainer] = quiet_trainer,
    ckpt_path: Path | None = None,
    **options: Any,
) -> list[Account]:
    """The accounts of a training on this rank."""
    ledger = Ledger(indices_of)
    callbacks = [ledger, *options.pop("callbacks", [])]
    options = {"devices": 2, "max_epochs": 1, "strategy": strategy, "num_sanity_val_steps": 0, **options}
    trainer(callbacks=callbacks, **options).fit(Module(), loader, ckpt_path=ckpt_path)
    return ledger.accounts


def on_two_ranks(*args: Any, **options: Any) -> Account:
    """The one account of a training on two ranks, which must be the same on both."""
    first, second = run_ranks(2, passed, args, options)
    assert first == second
    assert len(first) == 1
    return first[0]


def passed(args: tuple[Any, ...], options: dict[str, Any]) -> list[Account]:
    return train(*args, **options)


def lines(accounts: list[Account]) -> list[str]:
    return [str(account) for account in accounts]


# --- runs that are as they should be ---


def shapes(world_size: int) -> list[tuple[Any, ...]]:
    """Accounts of every tail and of many shapes, in one start of the ranks."""
    found = []
    for samples in (1, 2, 5, 8, 10):
        for batch_size in (1, 3):
            data = Numbers(samples)
            for tail in ("pad", "exact"):
                loader = DataLoader(data, batch_size, shuffle=True)
                strategy = ExactDDPStrategy(tail=tail)
                found.append((samples, batch_size, tail, train(loader, strategy, devices=world_size)[0]))
            if samples >= batch_size * world_size:
                loader = DataLoader(data, batch_size, shuffle=True, drop_last=True)
                found.append((samples, batch_size, "drop", train(loader, devices=world_size)[0]))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_the_schedule_promises_is_kept(world_size: int) -> None:
    ranks = run_ranks(world_size, shapes, world_size)
    assert all(rank == ranks[0] for rank in ranks)
    for samples, batch_size, tail, account in ranks[0]:
        used = samples // (batch_size * world_size) * batch_size * world_size if tail == "drop" else samples
        padded = -samples % world_size if tail == "pad" else 0
        assert account.clean
        assert (account.samples, account.used, account.uses) == (samples, used, used + padded)
        assert (account.padded.count, account.dropped.count) == (padded, samples - used)


def test_the_line_of_an_epoch() -> None:
    def line(samples: int, **options: Any) -> str:
        return str(on_two_ranks(DataLoader(Numbers(samples), 4, shuffle=True, **options)))

    assert line(64) == "epoch 1: 64 samples, each used once"
    assert line(61).startswith("epoch 1: 61 samples, each used once; 1 padded (")
    assert line(61, drop_last=True).startswith("epoch 1: 56 of 61 samples used, each once; 5 dropped (")
    clean = on_two_ranks(DataLoader(Numbers(64), 4, shuffle=True))
    assert str(replace(clean, epoch=3, samples=60_000, used=60_000)) == "epoch 4: 60,000 samples, each used once"
    wrong = replace(clean, missing=Some(8, (2, 3, 5, 7, 11)), repeated=Some(1, (4,)), used=56)
    assert str(wrong) == "epoch 1: 56 of 64 samples used; 8 MISSING (2, 3, 5, 7, 11, …); 1 REPEATED (4)"


def test_every_epoch_has_its_line_on_rank_0(capfd: pytest.CaptureFixture) -> None:
    run_ranks(2, passed, (DataLoader(Numbers(8), 2, shuffle=True),), {"max_epochs": 3})
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("epoch")]
    assert printed == [f"epoch {epoch + 1}: 8 samples, each used once" for epoch in range(3)]


def test_an_epoch_that_is_stopped_says_so() -> None:
    loader = DataLoader(Numbers(64), 4, shuffle=True)
    for options in ({"limit_train_batches": 3}, {"max_steps": 3}):
        account = on_two_ranks(loader, **options)
        assert str(account) == "epoch 1: 24 of 64 samples used, each once (stopped after 3 of 8 batches)"
        assert account.clean


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_read_ahead_and_are_not_counted(workers: int) -> None:
    account = on_two_ranks(DataLoader(Numbers(64), 4, shuffle=True, num_workers=workers), max_steps=3)
    assert (account.used, account.uses, account.clean) == (24, 24, True)


def test_a_custom_sampler_is_held_to_what_it_drew() -> None:
    loader = DataLoader(Numbers(16), 4, sampler=WeightedRandomSampler([1.0] * 8 + [0.0] * 8, 64))
    account = on_two_ranks(loader)
    assert account.clean
    assert account.uses == 64
    assert str(account) == f"epoch 1: {account.used} of 16 samples used, each as often as drawn"


def test_a_sample_drawn_more_often_than_a_byte_holds() -> None:
    account = on_two_ranks(DataLoader(Numbers(4), 32, sampler=WeightedRandomSampler([1.0, 0, 0, 0], 640)))
    assert (account.clean, account.used, account.uses) == (True, 1, 640)


def test_a_custom_batch_sampler() -> None:
    account = on_two_ranks(DataLoader(Numbers(12), batch_sampler=BatchSampler(range(12), 3, False)))
    assert str(account) == "epoch 1: 12 samples, each used as often as drawn, in the dataset's order"


def test_several_loaders_have_an_account_each() -> None:
    long, short = DataLoader(Numbers(24), 4, shuffle=True), DataLoader(Numbers(6), 2, shuffle=True)
    accounts = run_ranks(2, passed, ([long, short],), {})[1]
    assert lines(accounts) == [
        "epoch 1, loader 0: 24 samples, each used once",
        "epoch 1, loader 1: 6 samples, each used as often as 1.5 passes ask for",
    ]
    assert all(account.clean for account in accounts)
    accounts = run_ranks(2, passed, (CombinedLoader([long, short], "min_size"),), {})[0]
    assert lines(accounts)[0].endswith("16 of 24 samples used, each once (stopped after 2 of 3 batches)")


def test_nothing_is_known_of_a_stream_without_indices() -> None:
    account = on_two_ranks(DataLoader(Shards(16), 4))
    assert str(account) == "epoch 1: nothing is known of the samples used: the 4 batches came without indices"
    assert not account.clean


# --- runs that are not: each fault through Lightning's own ddp, then the same job through exact_ddp ---


def test_a_rank_that_reads_anothers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TrainBatches.__iter__

    def wrong(self: TrainBatches) -> Iterator[Any]:
        self.share = replace(self.share, virtual_ranks=range(1))
        return right(self)

    monkeypatch.setattr(TrainBatches, "__iter__", wrong)
    account = on_two_ranks(DataLoader(Numbers(8), 2))
    assert str(account) == "epoch 1: 4 of 8 samples used; 4 MISSING (1, 3, 5, 7); 4 REPEATED (0, 2, 4, 6)"


def stopped(folder: Path, strategy: str, world_size: int) -> list[str]:
    saver = ModelCheckpoint(folder, "middle", every_n_train_steps=2, save_on_train_epoch_end=False)
    options = {"devices": world_size, "max_steps": 2, "enable_checkpointing": True, "callbacks": [saver]}
    return lines(train(DataLoader(Numbers(16), 2, shuffle=True), strategy, index_of, **options))


def resumed(folder: Path, strategy: str, world_size: int) -> list[str]:
    loader = DataLoader(Numbers(16), 2, shuffle=True)
    return lines(train(loader, strategy, index_of, ckpt_path=folder / "middle.ckpt", devices=world_size))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create")
@pytest.mark.parametrize("world_size", [2, 1])
def test_faults_5_and_7_a_resumed_epoch_starts_anew(world_size: int, tmp_path: Path) -> None:
    before = run_ranks(2, stopped, tmp_path, "ddp", 2)[0]
    assert before == ["epoch 1: 8 of 16 samples used, each once (stopped after 2 of 4 batches)"]
    (account,) = run_ranks(world_size, resumed, tmp_path, "ddp", world_size)[0]
    assert "MISSING (" in account
    assert "REPEATED (" in account
    if world_size == 2:
        assert account.startswith("epoch 1: 8 of 16 samples used; 8 MISSING (")


def boundary(folder: Path) -> list[str]:
    loader = DataLoader(Numbers(16), 2, shuffle=True)
    saver = ModelCheckpoint(folder, "end", save_on_train_epoch_end=True)
    before = train(loader, enable_checkpointing=True, callbacks=[saver])
    return lines([*before, *train(loader, ckpt_path=folder / "end.ckpt", max_epochs=2)])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create")
def test_an_epoch_after_a_resume_is_counted_from_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, boundary, tmp_path)[0] == [f"epoch {i}: 16 samples, each used once" for i in (1, 2)]


def alone(strategy: Any) -> list[str]:
    def trainer(**options: Any) -> pl.Trainer:  # ours refuses to be built
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        return pl.Trainer(accelerator="cpu", **dict.fromkeys(off, False), **options)  # pyright: ignore

    return lines(train(DataLoader(Numbers(8), 2, shuffle=True), strategy, index_of, trainer, devices=1))


def test_fault_11_two_whole_trainings() -> None:
    for (line,) in run_ranks(2, alone, "auto"):
        assert line == (
            "epoch 1: 8 samples, each used once;"
            " torchrun started 2 processes, the trainer counts 1: each trains by itself"
        )


def test_fault_12_a_stream_that_every_rank_reads_whole() -> None:
    account = on_two_ranks(DataLoader(Stream(8), 2), "ddp", index_of)
    assert str(account) == "epoch 1: 8 samples used; 8 REPEATED (0, 1, 2, 3, 4, …)"
    sharded = on_two_ranks(DataLoader(Shards(8), 2), "exact_ddp", index_of)
    assert sharded.clean
    assert str(sharded).startswith("epoch 1: 8 samples, each used once")


def test_fault_13_an_order_that_was_asked_for() -> None:
    loader = DataLoader(Numbers(16), 2, shuffle=False)
    shuffled = on_two_ranks(loader, "ddp", index_of)
    assert str(shuffled) == "epoch 1: 16 samples, each used once"
    assert not shuffled.ordered
    assert str(on_two_ranks(loader)) == "epoch 1: 16 samples, each used once, in the dataset's order"
    assert on_two_ranks(DataLoader(Numbers(15), 2)).ordered  # the padded sample comes last, and is no disorder


def test_padding_by_lightnings_ddp_is_told_from_faults() -> None:
    account = on_two_ranks(DataLoader(Numbers(9), 2, shuffle=True), "ddp", index_of)
    assert account.clean
    assert account.padded.count == 1
    stopped = on_two_ranks(DataLoader(Numbers(9), 2, shuffle=True), "ddp", index_of, limit_train_batches=2)
    assert str(stopped) == "epoch 1: 8 of 9 samples used, each once (stopped after 2 of 3 batches)"

"""L3: every sample of an epoch is used exactly once, whatever the loader is made of, and ranks stop together."""

import copy
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lit_dp.engine.agreement import fingerprint
from lit_dp.engine.loaders import TaggedDataset
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.engine.streams import ShardedStream
from lit_dp.errors import ConfigError
from tests.ranks import RankFailed, run_ranks
from tests.training import quiet_trainer

SAMPLES, EPOCHS, SEED = 21, 3, 5

exact = partial(ExactDDPStrategy, timeout=20)
Epochs = list[list[list[int]]]
"""What one rank read: epochs of batches of samples."""


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


class NumbersByBatch(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        assert type(indices) is list
        return indices


class Reader(LightningModule):
    """Trains on nothing and notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.epochs: list[list[Any]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.epochs[-1].append(plain(batch))
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain(batch: Any) -> Any:
    """Lists of numbers in place of tensors."""
    if isinstance(batch, Tensor):
        return batch.reshape(-1).tolist()
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    return [batch] if isinstance(batch, int) else batch


def read(build: Callable[[], Any], strategy: Any = None, epochs: int = EPOCHS, **trainer: Any) -> Epochs:
    """What this rank trains on."""
    module = Reader()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers|.*max_epochs|.*DistributedSampler")
        quiet_trainer(strategy=strategy or exact(), max_epochs=epochs, limit_val_batches=0, **trainer).fit(
            module, build()
        )
    return module.epochs


def read_all(kinds: dict[str, Callable[[], Any]], strategy: Any = None) -> dict[str, Epochs]:
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    return {name: read(build, strategy and strategy()) for name, build in kinds.items()}


def unstriped(batches: list[list[Any]], one_each: bool = False) -> list[Any]:
    """One rank after the other, an element at a time: the order in which one process would have read them."""
    columns = batches if one_each else [[sample for batch in of_rank for sample in batch] for of_rank in batches]
    longest = max(map(len, columns))
    return [column[i] for i in range(longest) for column in columns if i < len(column)]


# --- loaders of every kind ---


class Reversed(Sampler[int]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))


class Unsized(Sampler[int]):
    """No length; torch's, numpy's and random's generators."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES).tolist()
        random.shuffle(order)
        np.random.shuffle(order)  # noqa: NPY002
        return iter(order)


class Entropy(Sampler[int]):
    """Draws from the system: no seed makes it equal on two ranks."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.SystemRandom().shuffle(order)
        return iter(order)


class Buckets(Sampler[list[int]]):
    """Batches of unequal lengths, another order of them each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(i * (i + 1) // 2, (i + 1) * (i + 2) // 2)) for i in range(6)]  # 1, 2, ... 6 samples
        random.Random(self.epoch).shuffle(batches)
        return iter(batches)


class Tagged(DataLoader[Any]):
    """A subclass that cannot be built again from the arguments that Lightning would guess."""

    def __init__(self, dataset: Any, purpose: str, *, factor: int) -> None:
        super().__init__(dataset, batch_size=factor, shuffle=True)
        self.purpose = purpose


class Doubled(DataLoader[Any]):
    """A subclass that changes what is read on its way."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore
        return (batch + 100 for batch in super().__iter__())


def weighted(generator: bool = False) -> DataLoader[int]:
    own = torch.Generator().manual_seed(1) if generator else None
    sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1).tolist(), SAMPLES, generator=own)
    return DataLoader(Numbers(), 4, sampler=sampler)


def with_batch_sampler(sampler: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 4, False))


def with_workers(persistent: bool, **kwargs: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), 4, num_workers=2, persistent_workers=persistent, **kwargs)


KINDS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "shuffled, own generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator()),
    "ordered": lambda: DataLoader(Numbers(), 4),
    "ordered, of a part": lambda: DataLoader(Numbers(), 4, sampler=SequentialSampler(range(10))),
    "custom sampler": lambda: DataLoader(Numbers(), 4, sampler=Reversed()),
    "sampler without a length": lambda: DataLoader(Numbers(), 4, sampler=Unsized()),
    "list as sampler": lambda: DataLoader(Numbers(), 4, sampler=list(range(0, SAMPLES, 2))),
    "weighted": weighted,
    "weighted, own generator": partial(weighted, generator=True),
    "subset": lambda: DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(3, 16))),
    "ready-made batch sampler": lambda: with_batch_sampler(Reversed()),
    "ready-made batch sampler, random": lambda: with_batch_sampler(Unsized()),
    "reads by batch": lambda: DataLoader(NumbersByBatch(), 4, shuffle=True),
    "subclass with arguments": lambda: Tagged(Numbers(), "training", factor=4),
    "subclass with its own way to iterate": lambda: Doubled(Numbers(), 4, shuffle=True),
    "workers": partial(with_workers, False, shuffle=True),
    "persistent workers": partial(with_workers, True, shuffle=True),
    "workers, custom sampler": partial(with_workers, True, sampler=Unsized()),
    "no batching": lambda: DataLoader(Numbers(), batch_size=None, sampler=Unsized()),
    "shorter than a global batch": lambda: DataLoader(Numbers(5), 4, shuffle=True),
    "shorter than the world": lambda: DataLoader(Numbers(1), 4, shuffle=True),
}


@pytest.fixture(scope="module")
def by_one() -> dict[str, Epochs]:
    return run_ranks(1, read_all, KINDS)[0]


@pytest.fixture(scope="module", params=[2, 3])
def by_several(request: pytest.FixtureRequest) -> list[dict[str, Epochs]]:
    return run_ranks(request.param, read_all, KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stripe_what_one_process_reads(
    kind: str, by_one: dict[str, Epochs], by_several: list[dict[str, Epochs]]
) -> None:
    world_size = len(by_several)
    for epoch in range(EPOCHS):
        alone = unstriped([by_one[kind][epoch]])
        together = unstriped([of_rank[kind][epoch] for of_rank in by_several])
        padded = -len(alone) % world_size
        assert together == alone + (alone * world_size)[:padded], f"epoch {epoch}"
        assert len({len(of_rank[kind][epoch]) for of_rank in by_several}) == 1, "steps differ between ranks"


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_differ_where_the_order_is_random(kind: str, by_one: dict[str, Epochs]) -> None:
    epochs = [unstriped([batches]) for batches in by_one[kind]]
    plain_kinds = (
        "ordered",
        "ordered, of a part",
        "custom sampler",
        "list as sampler",
        "ready-made batch sampler",
        "shorter than the world",
    )
    assert (epochs[0] == epochs[1]) == (kind in plain_kinds)
    if kind == "ordered":
        assert epochs[0] == list(range(SAMPLES))
    elif "custom" in kind and kind in plain_kinds:
        assert epochs[0] == list(range(SAMPLES - 1, -1, -1))
    elif "weighted" not in kind and len(epochs[0]) == SAMPLES:
        assert sorted(sample % 100 for sample in epochs[0]) == list(range(SAMPLES))


def test_shuffled_is_distributed_samplers_order(by_several: list[dict[str, Epochs]]) -> None:
    world_size = len(by_several)
    for rank, read_by_rank in enumerate(by_several):
        sampler = DistributedSampler(Numbers(), world_size, rank, seed=SEED)
        for epoch, batches in enumerate(read_by_rank["shuffled"]):
            sampler.set_epoch(epoch)
            order = list(sampler)
            assert batches == [order[i : i + 4] for i in range(0, len(order), 4)]


def test_a_sampler_that_draws_from_the_system_is_drawn_once() -> None:
    for epochs in zip(*run_ranks(2, read, lambda: DataLoader(Numbers(), 4, sampler=Entropy())), strict=True):
        order = unstriped(list(epochs))
        assert sorted(order[:SAMPLES]) == list(range(SAMPLES))
        assert order[SAMPLES:] == order[:1]


def test_batches_of_a_batch_sampler_are_dealt_whole() -> None:
    kinds = {"buckets": lambda: DataLoader(Numbers(), batch_sampler=Buckets())}
    ranks = run_ranks(4, read_all, kinds)
    for epoch in range(EPOCHS):
        sampler = Buckets()
        sampler.set_epoch(epoch)
        batches = list(sampler)
        dealt = unstriped([rank["buckets"][epoch] for rank in ranks], one_each=True)
        assert dealt == batches + batches[:2]


def keys(strategy: Any) -> list[Any]:
    """A loader without batching whose sampler yields keys that are no numbers."""

    class Keyed(Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, key: Any) -> int:
            return {("a", 1): 1, ("b", 2): 2, (1, 2): 3}.get(key, -1) if isinstance(key, tuple) else sum(key)

    loader = DataLoader(Keyed(), batch_size=None, sampler=[("a", 1), ("b", 2), [3, 4], [5, 6, 7]])  # type: ignore
    return read(lambda: loader, strategy, epochs=1)


def test_keys_reach_the_dataset_as_they_are() -> None:
    first, second = run_ranks(2, keys, exact())
    assert (first, second) == ([[[1], [7]]], [[[2], [18]]])


# --- tails ---


def test_drop_last_drops_what_one_process_would() -> None:
    ranks = run_ranks(2, read, lambda: DataLoader(Numbers(), 4, drop_last=True))
    assert [list(epochs[0]) for epochs in ranks] == [
        [[0, 2, 4, 6], [8, 10, 12, 14]],
        [[1, 3, 5, 7], [9, 11, 13, 15]],
    ]


def refusal(build: Callable[[], Any], strategy: Any = None, **trainer: Any) -> str:
    """The error of this rank; a rank that has none would hang the others, so it must be on all."""
    try:
        read(build, strategy, **trainer)
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_refused(world_size: int, build: Callable[[], Any], *parts: str, strategy: Any = None) -> None:
    for message in run_ranks(world_size, refusal, build, strategy):
        assert "ConfigError" in message
        for part in parts:
            assert part in message


def test_drop_last_that_leaves_nothing_is_refused() -> None:
    assert_refused(2, lambda: DataLoader(Numbers(5), 4, drop_last=True), "4 x 2 ranks = 8", "at most 2")


def test_an_empty_dataset_is_refused() -> None:
    assert_refused(2, lambda: DataLoader(Numbers(0), 4), "empty")
    assert_refused(2, lambda: DataLoader(Numbers(), batch_sampler=[]), "empty")


@pytest.mark.parametrize(
    ("samples", "last"), [(9, [[8], [0]]), (10, [[8], [9]]), (11, [[8, 10], [9]]), (1, [[0], [0]])]
)
def test_exact_tail(samples: int, last: list[list[int]]) -> None:
    """Nothing is padded; a rank without a sample borrows one, and takes part with weight 0 (see test_exact_parity)."""
    ranks = run_ranks(2, read, lambda: DataLoader(Numbers(samples), 4), exact(tail="exact"), 1)
    assert [epochs[0][-1] for epochs in ranks] == last
    used = unstriped([epochs[0] for epochs in ranks])
    assert used[:samples] == list(range(samples))


def test_exact_tail_of_several_loaders_is_refused() -> None:
    """Weights of the last step are known for one loader only."""
    loaders = lambda: [DataLoader(Numbers(9), 4), DataLoader(Numbers(9), 4)]  # noqa: E731
    assert_refused(2, loaders, "tail", "pad", strategy=exact(tail="exact"))


# --- several loaders ---


def combined(mode: str) -> Callable[[], Any]:
    return lambda: CombinedLoader(
        {"a": DataLoader(Numbers(), 4, shuffle=True), "b": DataLoader(Numbers(9), 4)},
        mode,  # type: ignore
    )


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_combined_loaders(mode: str) -> None:
    ranks = run_ranks(2, read, combined(mode))
    steps = {"min_size": 2, "max_size_cycle": 3, "max_size": 3}[mode]
    for epoch in range(EPOCHS):
        assert [len(rank[epoch]) for rank in ranks] == [steps] * 2
        a, b = ([[batch[name] or [] for batch in rank[epoch]] for rank in ranks] for name in "ab")  # type: ignore
        if mode != "min_size":
            assert sorted(unstriped(a)[:SAMPLES]) == sorted(range(SAMPLES))
        assert unstriped([of_rank[:2] for of_rank in b]) == [*range(9), 0]


def test_a_list_of_loaders() -> None:
    ranks = run_ranks(2, read, lambda: [DataLoader(Numbers(), 4), DataLoader(Numbers(), 4, sampler=Reversed())])
    firsts = [[batch[0].tolist() for batch in rank[0]] for rank in ranks]  # type: ignore
    seconds = [[batch[1].tolist() for batch in rank[0]] for rank in ranks]  # type: ignore
    assert unstriped(firsts)[:SAMPLES] == list(range(SAMPLES))
    assert unstriped(seconds)[:SAMPLES] == list(range(SAMPLES))[::-1]


@pytest.mark.parametrize("loader", [[torch.zeros(1)], [torch.tensor([i]) for i in range(4)]])
def test_a_list_of_batches_is_refused(loader: list[Tensor]) -> None:
    """Lightning takes each element for a loader of its own."""
    assert_refused(2, lambda: loader, "Tensor", "DataLoader")


class Batches:
    """Any iterable of batches; with `shard` it says how to read a part."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([i]) for i in range(self.index, 8, self.count))


class ShardedBatches(Batches):
    def shard(self, index: int, count: int) -> "ShardedBatches":
        return ShardedBatches(index, count)


def test_an_iterable_that_is_no_data_loader() -> None:
    assert_refused(2, Batches, "Batches is no torch DataLoader", "shard(index, count)")
    ranks = run_ranks(2, read, ShardedBatches, None, 1)
    assert ranks[0] == [[[0], [2], [4], [6]]]
    assert ranks[1] == [[[1], [3], [5], [7]]]


# --- a DistributedSampler of the user's own ---


def own_sampler(world_size: int, rank: int | None, **kwargs: Any) -> Callable[[], Any]:
    def build() -> DataLoader[int]:
        place = dist.get_rank() if rank is None else rank
        return DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), world_size, place, **kwargs))

    return build


def read_later(make: Callable[[], Callable[[], Any]], strategy: Any = None) -> Epochs:
    """As `read`, with a loader that is built when the process group is up."""

    class Later(Reader):
        def train_dataloader(self) -> Any:
            return make()

    module = Later()
    quiet_trainer(strategy=strategy or exact(), max_epochs=2, limit_val_batches=0).fit(module)
    return module.epochs


def test_the_users_own_distributed_sampler_is_left_alone() -> None:
    ranks = run_ranks(2, read_later, own_sampler(2, None, seed=11))
    for rank, epochs in enumerate(ranks):
        sampler = DistributedSampler(Numbers(), 2, rank, seed=11)
        for epoch, batches in enumerate(epochs):
            sampler.set_epoch(epoch)
            assert unstriped([batches]) == list(sampler)


@pytest.mark.parametrize(("replicas", "rank"), [(1, 0), (4, None), (2, 0)])
def test_a_distributed_sampler_for_another_place_is_refused_on_all_ranks(replicas: int, rank: int | None) -> None:
    def build() -> str:
        try:
            read_later(own_sampler(replicas, rank))
        except ConfigError as error:
            return str(error)
        return ""

    for message in run_ranks(2, build):
        assert f"num_replicas={replicas}, rank=0" in message
        assert "leave the sampler out" in message


# --- faults, with Lightning's own strategy ---


def test_fault_13_upstream_shuffles_what_is_ordered() -> None:
    """PL 10170, 21131: fails when upstream has mended `ddp`."""
    kinds = {"ordered": KINDS["ordered"], "custom sampler": KINDS["custom sampler"]}
    upstream = run_ranks(2, read_all, kinds, lambda: "ddp")
    ours = run_ranks(2, read_all, kinds)
    for kind, first in (("ordered", [0, 1, 2, 3]), ("custom sampler", [20, 19, 18, 17])):
        assert unstriped([rank[kind][0] for rank in ours])[:4] == first
        assert unstriped([rank[kind][0] for rank in upstream])[:4] != first


def test_fault_14_upstream_never_calls_a_batch_samplers_set_epoch() -> None:
    """PL 13316: fails when upstream has mended `ddp`."""
    build = lambda: DataLoader(Numbers(), batch_sampler=Buckets())  # noqa: E731
    strategy = DDPStrategy(timeout=timedelta(seconds=20))
    upstream = run_ranks(2, partial(read, build, strategy, use_distributed_sampler=False))
    assert upstream[0][0] == upstream[0][1] == upstream[1][0]
    ours = run_ranks(2, read, build)
    assert ours[0][0] != ours[0][1]
    assert ours[0][0] != ours[1][0]


# --- streams ---


class Stream(IterableDataset[int]):
    """The numbers below `length`; subclasses know how to read a part."""

    def __init__(self, length: int = 24) -> None:
        self.start, self.step, self.length = 0, 1, length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.length, self.step))


class WithShard(Stream):
    def shard(self, index: int, count: int) -> Iterator[int]:
        return iter(range(index, self.length, count))


class WithNamedShard(Stream):
    """As the `datasets` library names the arguments."""

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Iterator[int]:
        return iter(range(index, self.length, num_shards))


class AsksModule(Stream):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        index, count = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from range(index, self.length, count)


class AsksImported(Stream):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, self.length, info.num_workers) if info is not None else range(self.length))


class AsksBoth(Stream):
    """Right under plain torch, where get_worker_info counts one process's workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        index, count = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(range(dist.get_rank() * count + index, self.length, dist.get_world_size() * count))


class KnowsItsRank(AsksImported):
    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = 0, 1


def init_worker(worker: int) -> None:
    """The second way of torch's documentation: each worker's copy of the dataset is told its part."""
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Stream
    info.dataset.start, info.dataset.step = info.id, info.num_workers


def stream(dataset: type[Stream], workers: int, **kwargs: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(), 2, num_workers=workers, **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [WithShard, WithNamedShard, AsksModule, AsksImported])
@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_are_read_once(dataset: type[Stream], workers: int, world_size: int) -> None:
    ranks = run_ranks(world_size, read, stream(dataset, workers), None, 2)
    for epoch in range(2):
        samples = [sample for rank in ranks for batch in rank[epoch] for sample in batch]
        assert sorted(samples) == list(range(24))


@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_told_their_part_by_worker_init_fn(world_size: int) -> None:
    build = stream(Stream, 2, worker_init_fn=init_worker, persistent_workers=True)
    ranks = run_ranks(world_size, read, build, None, 2)
    for epoch in range(2):
        samples = [sample for rank in ranks for batch in rank[epoch] for sample in batch]
        assert sorted(samples) == list(range(24))


@pytest.mark.parametrize(
    ("dataset", "workers", "world_size", "parts"),
    [
        (Stream, 0, 2, ["Stream would be read whole by each of 2 readers (2 processes x 1 loader workers)"]),
        (Stream, 2, 2, ["4 readers (2 processes x 2 loader workers)"]),
        (Stream, 2, 1, ["2 readers (1 processes x 2 loader workers)", "shard(index, count)"]),
        (AsksBoth, 0, 2, ["torch.distributed.get_", "part of a part", "use_distributed_sampler"]),
        (KnowsItsRank, 0, 2, ["attribute 'rank'", "part of a part"]),
    ],
)
def test_streams_that_would_be_read_wrongly_are_refused(
    dataset: type[Stream], workers: int, world_size: int, parts: list[str]
) -> None:
    for message in run_ranks(world_size, refusal, stream(dataset, workers)):
        for part in parts:
            assert part in message


def test_a_stream_that_shares_by_itself_is_left_alone_on_request() -> None:
    ranks = run_ranks(2, partial(read, stream(AsksBoth, 2), epochs=1, use_distributed_sampler=False))
    assert sorted(sample for rank in ranks for batch in rank[0] for sample in batch) == list(range(24))


def test_fault_12_upstream_reads_streams_whole() -> None:
    """PL 15734: by every rank, and by every worker. Fails when upstream has mended `ddp`."""
    ranks = run_ranks(2, read, stream(Stream, 2), "ddp", 1)
    samples = [sample for rank in ranks for batch in rank[0] for sample in batch]
    assert sorted(samples) == sorted([*range(24)] * 4)


# --- unequal lengths ---


class Uneven(Stream):
    """Rank 0's part is three times as long."""

    def shard(self, index: int, count: int) -> Iterator[int]:
        return iter(range(12) if index == 0 else range(12, 16))

    def __iter__(self) -> Iterator[int]:
        return self.shard(dist.get_rank(), 2)


def read_uneven(capture: bool) -> tuple[Epochs, str]:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        epochs = read(stream(Uneven, 0), None, 2)
    return epochs, said.getvalue()


def test_ranks_stop_together() -> None:
    (long, said), (short, silent) = run_ranks(2, read_uneven, True)
    assert long == [[[0, 1], [2, 3]]] * 2
    assert short == [[[12, 13], [14, 15]]] * 2
    assert said.count("rank 1 ran out of data after 2 batches") == 2
    assert silent == ""


def test_fault_26_upstream_waits_for_the_rank_that_ran_out() -> None:
    """Fails when upstream has mended `ddp`. The timeout is short; by default it is half an hour."""
    with pytest.raises(RankFailed, match=r"Timed out|Connection (closed|reset)"):
        run_ranks(2, read, stream(Uneven, 0), DDPStrategy(timeout=timedelta(seconds=2)), 1)


class Measuring(Reader):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.float().mean(), sync_dist=True, batch_size=len(batch))


def validate_stream(dataset: type[Stream], length: int) -> float | str:
    trainer = quiet_trainer(strategy=exact())
    try:
        trainer.validate(Measuring(), DataLoader(dataset(length), 2), verbose=False)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return float(trainer.callback_metrics["mean"])


def test_evaluation_of_unequal_streams() -> None:
    assert run_ranks(2, validate_stream, Uneven, 0) == [7.5, 7.5]
    assert run_ranks(3, validate_stream, WithShard, 7) == [3.0] * 3


def test_evaluation_of_an_empty_stream_names_the_rank() -> None:
    for message in run_ranks(3, validate_stream, WithShard, 2):
        assert "the shard of rank 2 is empty" in str(message)


# --- do ranks see the same dataset? ---


class Held(Numbers):
    """Holds what people hold."""

    def __init__(self, **held: Any) -> None:
        super().__init__(4)
        self.__dict__.update(held)

    @property
    def data(self) -> Any:
        raise RuntimeError("loads everything")


class Thing:
    """Its repr is an address."""


def hold(kind: str, folder: Path) -> Dataset[Any]:
    """Equal on all ranks, though made by each of them."""
    rank = int(os.environ["RANK"])
    ballast = [Thing() for _ in range(rank)]  # moves what is allocated later
    held = {
        "objects": [Thing() for _ in range(4)],
        "sets": [{f"{i}" for i in (range(9) if rank else reversed(range(9)))}],
        "texts": np.array(["a", "b"]),
        "things": np.array([Thing(), None], dtype=object),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mapped": np.memmap(folder / f"{kind}{rank}", np.uint8, "w+", shape=(4,)) if kind == "mapped" else None,
        "swapped": np.arange(3, dtype=">i4"),
        "scalar": np.array(3.0),
        "complex": np.array([1j]),
        "sparse": torch.eye(2).to_sparse(),
    }[kind]
    del ballast
    return Held(samples=held if kind != "mapped" else [held])


def fingerprints(folder: Path) -> dict[str, str]:
    kinds = ("objects", "sets", "texts", "things", "half", "swapped", "scalar", "complex", "sparse")
    return {kind: fingerprint(hold(kind, folder)) for kind in kinds}


def test_equal_datasets_have_equal_fingerprints(tmp_path: Path) -> None:
    first, second = run_ranks(2, fingerprints, tmp_path)
    assert first == second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Held(samples=[("a.png", 0), ("b.png", 1)]), Held(samples=[("b.png", 1), ("a.png", 0)])),
        (Held(labels=torch.tensor([0, 1])), Held(labels=torch.tensor([1, 0]))),
        (Held(labels=np.array([0, 1])), Held(labels=np.array([1, 0]))),
        (Held(paths=np.array(["a", "b"])), Held(paths=np.array(["b", "a"]))),
        (Subset(Numbers(), [0, 1]), Subset(Numbers(), [0, 2])),
        (Subset(Numbers(), torch.tensor([0, 1])), Subset(Numbers(), torch.tensor([0, 2]))),  # type: ignore
        (ConcatDataset([Held(files=["a"])]), ConcatDataset([Held(files=["b"])])),
        (Held(samples=[{"file": "a"}]), Held(samples=[{"file": "b"}])),
        (Held(samples=[["ab"]]), Held(samples=[["a", "b"]])),
        (Numbers(4), Numbers(5)),
    ],
)
def test_other_datasets_have_other_fingerprints(one: Dataset[Any], other: Dataset[Any]) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(pickle.loads(pickle.dumps(one)))


# --- copies of loaders ---


def test_wrapped_datasets_can_be_sent_to_spawned_workers() -> None:
    for wrapped in (TaggedDataset(NumbersByBatch(), 3), ShardedStream(WithShard(), 1, 2)):
        again = pickle.loads(pickle.dumps(wrapped))
        assert type(again) is type(wrapped)
        assert again.inner.length == wrapped.inner.length
        assert copy.deepcopy(wrapped).length == wrapped.inner.length


def test_what_is_set_in_a_wrapped_dataset_reaches_the_users() -> None:
    for dataset, wrap in (
        (Numbers(), partial(TaggedDataset, seed=3)),
        (Stream(), partial(ShardedStream, rank=0, world_size=2)),
    ):
        wrapped: Any = wrap(dataset)
        wrapped.length = 7
        assert dataset.length == 7
        assert not hasattr(wrapped, "no such thing")


class Reloading(Reader):
    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(8), 2, shuffle=True, num_workers=2, persistent_workers=True)


def resumed(folder: Path, strategy: Callable[[], Any]) -> tuple[Epochs, Epochs]:
    """The epochs in one go, and the second after a new start."""
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    whole, again = Reloading(), Reloading()
    for module, epochs, path in ((whole, 2, None), (Reloading(), 1, None), (again, 2, folder / "last.ckpt")):
        trainer = quiet_trainer(strategy=strategy(), max_epochs=epochs, limit_val_batches=0)
        trainer.fit(module, ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(folder / "last.ckpt")
    return whole.epochs[1:], again.epochs


def test_fault_6_the_first_epoch_after_a_resume(tmp_path: Path) -> None:
    """PL 21938, seen with workers only. Fails when upstream has mended `ddp`."""
    for whole, again in run_ranks(2, resumed, tmp_path, exact):
        assert whole == again
    for whole, again in run_ranks(2, resumed, tmp_path, lambda: "ddp"):
        assert whole != again


def reloaded() -> Epochs:
    module = Reloading()
    quiet_trainer(strategy=exact(), max_epochs=3, limit_val_batches=0, reload_dataloaders_every_n_epochs=1).fit(module)
    return module.epochs


def test_loaders_that_are_made_anew_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    ranks = run_ranks(2, reloaded)
    for epoch in range(3):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert unstriped([rank[epoch] for rank in ranks]) == order


class AsksForSteps(Reader):
    """Lightning asks for the loader then, before anything else is set up."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.steps = early, 0

    def setup(self, stage: str) -> None:
        if self.early:
            self.steps = int(self.trainer.estimated_stepping_batches)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self.early:
            self.steps = int(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


def asked_for_steps(early: bool) -> tuple[int, int]:
    module = AsksForSteps(early)
    trainer = quiet_trainer(strategy=exact(), max_epochs=3, limit_val_batches=0, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(Numbers(), 4))
    return module.steps, trainer.global_step


@pytest.mark.parametrize("early", [False, True])
def test_the_number_of_steps_is_known_beforehand(early: bool) -> None:
    assert run_ranks(2, asked_for_steps, early) == [(6, 6)] * 2

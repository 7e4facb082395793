"""The schedule as batch samplers of a DataLoader: this rank's share of what a user's loader would read.

What a loader reads in an epoch is its draw: a list of elements (sample indices, or whatever a custom sampler yields, or
whole batches of a custom batch sampler). The draw is the same on all ranks; the schedule says who reads which part.
"""

import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from lit_dp.engine.randomness import EpochIndex, EpochIndices, derive, isolated, seed_all
from lit_dp.engine.schedule import Schedule, evaluation_indices, placement


@dataclass(frozen=True)
class Share:
    """Which part of every draw this process reads: `virtual_ranks` of the schedule's, as process `rank` of W."""

    rank: int
    world_size: int
    virtual_ranks: range

    @property
    def ranks(self) -> int:
        """V, the virtual ranks of all processes."""
        return self.world_size * len(self.virtual_ranks)

    def virtual_ranks_of(self, rank: int) -> range:
        """Those of another process."""
        return placement(self.ranks, self.world_size, rank)


class Draw:
    """The elements that a user's sampler yields in an epoch, equal on all ranks.

    Args:
        sampler: a Sampler or BatchSampler.
        seed: of the run; a sampler's own generator is seeded from its own seed and the epoch.
        agree: gives every rank what rank 0 passes to it; all ranks call it.
        whole: whether an element is a batch of indices, of any type that can be iterated over.
    """

    def __init__(self, sampler: Any, seed: int, agree: Callable[[Any], Any], whole: bool = False) -> None:
        self.sampler, self.seed, self._agree, self.whole = sampler, seed, agree, whole
        self._length = len(sampler) if hasattr(sampler, "__len__") else len(self(0))

    def __len__(self) -> int:
        return self._length

    def __call__(self, epoch: int) -> list[Any]:
        with isolated(), ExitStack() as undone:
            seed_all(derive(self.seed, "sampler", epoch))
            for part in (self.sampler, getattr(self.sampler, "sampler", None)):
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(epoch)
                if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                    undone.callback(generator.set_state, generator.get_state())  # the next epoch starts from the same
                    generator.manual_seed(derive(generator.initial_seed(), epoch))
            elements = [list(element) for element in self.sampler] if self.whole else list(self.sampler)
        # A sampler may draw from a source of its own (the system's entropy, a file): one draw is right, two are not.
        return self._agree(elements)


class TrainBatches(Sampler[Any]):
    """This process's micro-batches of every step of an epoch, in order.

    Attributes:
        start: micro-batches that an iteration leaves out, since a training that is resumed has taken them; whole steps.
            Until the next `set_epoch`, not until the next iteration: a loader with workers begins two.
        begun: (epoch, start) of the last iteration; None before the first.

    Args:
        schedule: its `samples` are the elements of a draw; for a custom draw they are taken anew every epoch.
        share: what of it this process reads.
        draw: a custom sampler's, or None for the schedule's own order.
        batched: False yields single elements (loaders without automatic batching).
    """

    def __init__(self, schedule: Schedule, share: Share, draw: Draw | None = None, batched: bool = True) -> None:
        self.schedule, self.share, self.draw, self.batched = schedule, share, draw, batched
        self.epoch = self.start = 0
        self.begun: tuple[int, int] | None = None

    @property
    def sampler(self) -> "TrainBatches":
        """Itself: where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        """Micro-batches of this process in an epoch, wherever it starts."""
        return self.schedule.steps_per_epoch * len(self.share.virtual_ranks)

    def __iter__(self) -> Iterator[Any]:
        # Drawn here and not at the first `next`: all ranks come by here together, and a draw may need all of them.
        elements = self.draw(self.epoch) if self.draw is not None else None
        if elements is not None:
            self.schedule = replace(self.schedule, samples=max(1, len(elements)), shuffle=False)
        self.begun = self.epoch, self.start
        first_step = self.start // len(self.share.virtual_ranks)
        steps = self.schedule.iterate(self.epoch, self.share.virtual_ranks, first_step)
        return (batch for _, _, positions in steps for batch in self._batches(positions, elements))

    @property
    def equal(self) -> bool:
        """Whether all processes have equally many samples in every micro-batch."""
        return self.schedule.tail != "exact" or self.schedule.samples % self.schedule.virtual_ranks == 0

    def counts(self, micro_batch: int) -> list[int]:
        """Samples of every process in the micro-batch of this index in the epoch, W numbers."""
        step, nth = divmod(micro_batch, len(self.share.virtual_ranks))
        of_virtual_rank = self.schedule.step_counts(step)
        return of_virtual_rank[nth :: len(self.share.virtual_ranks)]

    def _batches(self, positions: Tensor, elements: list[Any] | None) -> Iterator[Any]:
        # A rank without samples still takes part in the step: it borrows one, which `counts` weighs with 0.
        chosen = positions.tolist() or [0]
        batch = chosen if elements is None else [elements[i] for i in chosen]
        if self.batched:
            yield EpochIndices(batch, self.epoch)
        else:
            yield from (tag(element, self.epoch) for element in batch)


class EvalBatches(Sampler[Any]):
    """This process's batches of an evaluation or prediction: every element once over all processes, nothing padded.

    Batches are those of its virtual ranks, in turn, so that they are the same on any number of processes.

    A process without any element borrows one (`borrowed`), so that it takes part in what the others do; the strategy
    takes back whatever comes of it.

    Args:
        elements: how many a draw has, or the draw.
        batch_size: elements a batch; None yields single ones.
        drop_last: leave out what would not fill the last batch of one process.
        share: which part this process reads.
    """

    def __init__(self, elements: int | Draw, batch_size: int | None, drop_last: bool, share: Share) -> None:
        self.elements, self.batch_size, self.drop_last, self.share = elements, batch_size, drop_last, share
        self.epoch = 0

    @property
    def sampler(self) -> "EvalBatches":
        """Itself: where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def total(self) -> int:
        """Elements that all processes read together."""
        samples = self.elements if isinstance(self.elements, int) else len(self.elements)
        return samples // self.batch_size * self.batch_size if self.drop_last and self.batch_size else samples

    @property
    def borrowed(self) -> bool:
        """Whether this process has no element of its own while others have."""
        return 0 < self.total <= self.share.virtual_ranks.start

    @property
    def equal(self) -> bool:
        """Whether all processes have equally many batches."""
        return self._batches_of(0) == self._batches_of(self.share.world_size - 1)

    def _batches_of(self, rank: int) -> int:
        own = [evaluation_indices(self.total, self.share.ranks, v) for v in self.share.virtual_ranks_of(rank)]
        return sum(-(-len(positions) // (self.batch_size or 1)) for positions in own) or min(1, self.total)

    def __len__(self) -> int:
        return self._batches_of(self.share.rank)

    def __iter__(self) -> Iterator[Any]:
        elements = range(self.total) if isinstance(self.elements, int) else self.elements(self.epoch)
        if self.borrowed:
            return self._batches([elements[0]])
        shares = [evaluation_indices(self.total, self.share.ranks, v) for v in self.share.virtual_ranks]
        of_ranks = [self._batches([elements[i] for i in share]) for share in shares]
        rounds = itertools.zip_longest(*of_ranks)  # in turn, so that a limit cuts all virtual ranks alike
        return (batch for batches in rounds for batch in batches if batch is not None)

    def _batches(self, own: list[Any]) -> Iterator[Any]:
        if self.batch_size is None:
            return (tag(element, self.epoch) for element in own)
        size = self.batch_size
        return (EpochIndices(own[i : i + size], self.epoch) for i in range(0, len(own), size))


class AsGiven(Sampler[Any]):
    """What a sampler reads that shares out by itself (a DistributedSampler), with the epoch told to what it yields.

    Attributes:
        start, begun: as in TrainBatches.

    Args:
        inner: a loader's batch sampler, or its sampler where the loader does not batch.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.epoch = self.start = 0
        self.begun: tuple[int, int] | None = None

    @property
    def sampler(self) -> "AsGiven":
        """Itself: where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start = epoch, 0
        for part in (self.inner, getattr(self.inner, "sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self.begun = self.epoch, self.start
        return (tag(element, self.epoch) for element in itertools.islice(self.inner, self.start, None))


def stand(batches: TrainBatches | AsGiven, epoch: int, taken: int) -> None:
    """Let the next iteration be that of `epoch`, without the batches that this process has taken of it."""
    batches.set_epoch(epoch)
    # A loader is read anew from its beginning where it is cycled beside a longer one.
    batches.start = taken % len(batches) if taken and taken > len(batches) else taken


def shares_by_itself(sampler: Any) -> bool:
    """Whether a sampler yields one rank's share: torch's DistributedSampler, and what has its attributes."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def tag(element: Any, epoch: int) -> Any:
    """An element that carries its epoch, where it can: an index, or a list of them."""
    if isinstance(element, list):
        return EpochIndices(element, epoch)
    try:
        return EpochIndex(operator.index(element), epoch)
    except TypeError:  # a key of another kind, such as a name
        return element


def plain_order(sampler: Any) -> bool | None:
    """True for DataLoader's own shuffle, False for the dataset's order, None for anything else."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return True
    return None

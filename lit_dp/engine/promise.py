"""What a loader's sampler promises that all ranks together read of an epoch: the ledger's other column."""

import copy
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from lit_dp.engine.account import UNKNOWN
from lit_dp.engine.samplers import AsGiven, TrainBatches, plain_order
from lit_dp.engine.sharding import sampler_of


class Promise:
    """What a loader's sampler says that all ranks together read. Counts are int32 (N,).

    Attributes:
        whole: batches of one rank in an epoch, None for a stream without a length.
    """

    def __init__(self, loader: Any, samples: int) -> None:
        self.loader, self.samples, self.sampler = loader, samples, training_sampler(loader)
        schedule = self.sampler if isinstance(self.sampler, TrainBatches) else None
        self.stride = len(schedule.share.virtual_ranks) if schedule else 1
        self.whole = schedule.schedule.steps_per_epoch * self.stride if schedule else length(loader)

    def draw(self, used: Tensor) -> tuple[Tensor, str]:
        """How often an epoch draws each sample, and the same in words."""
        if (draw := getattr(self.sampler, "draw", None)) is not None:
            drawn = sample_indices(draw.last)
            return (used, UNKNOWN) if drawn is None else (self._counts(drawn), "as often as drawn")
        once = isinstance(self.sampler, TrainBatches) or self._plain
        return (torch.ones_like(used), "once") if once else (used, UNKNOWN)

    def due(self, batches: int) -> Tensor | None:
        """How often each sample is to be used in so many batches a rank; None where no rule is known."""
        passes, rest = divmod(batches, self.whole) if self.whole else (0, batches)
        parts = [self._read(taken) for taken in [self.whole or 0] * min(passes, 1) + [rest] * (rest > 0)]
        if any(part is None for part in parts):
            return None
        counts = [self._counts(part) for part in parts if part is not None]
        return sum(counts[1:], counts[0] * max(passes, 1)) if counts else None

    def _counts(self, indices: Tensor) -> Tensor:
        return indices.bincount(minlength=self.samples).int()

    @property
    def _plain(self) -> bool:
        """Whether an epoch is to read each sample of the dataset once."""
        dataset = self.loader.dataset if hasattr(self.loader, "dataset") else None
        own = (dataset, getattr(dataset, "inner", None))
        shared = isinstance(self.sampler, DistributedSampler) and any(self.sampler.dataset is d for d in own)
        return shared or isinstance(dataset, IterableDataset) or plain_order(self.sampler) is not None

    def _read(self, batches: int) -> Tensor | None:
        """Indices of the first batches of all ranks, in any order; None where no rule is known."""
        loader, sampler = self.loader, self.sampler
        if isinstance(sampler, TrainBatches):
            return self._scheduled(sampler, batches)
        size = getattr(loader, "batch_size", None)
        if size is None or not self._plain:
            return None
        if isinstance(sampler, DistributedSampler):
            replicas = [copy.copy(sampler) for _ in range(sampler.num_replicas)]
            for rank, replica in enumerate(replicas):
                replica.rank = rank
            return torch.cat([torch.tensor(list(replica)[: batches * size]) for replica in replicas])
        if isinstance(sampler, SequentialSampler) or (batches == self.whole and not loader.drop_last):
            return torch.arange(self.samples)[: batches * size]
        return None

    def _scheduled(self, batches: TrainBatches, taken: int) -> Tensor | None:
        schedule, stride = batches.schedule, self.stride
        steps, rest = divmod(taken, stride)
        order = schedule.order(batches.epoch)
        last = [schedule.split(order, steps, v) for v in range(schedule.virtual_ranks) if v % stride < rest]
        positions = torch.cat((order[: steps * schedule.global_batch], *last))
        if batches.draw is None:
            return positions
        drawn = getattr(batches.draw, "last", [])
        return sample_indices([drawn[i] for i in positions.tolist()])


def sample_indices(elements: list[Any]) -> Tensor | None:
    """Indices int64 (n,) of a batch's or a draw's elements: integers, or lists of them; None if they are others."""
    flat = [i for element in elements for i in (element if isinstance(element, (list, tuple)) else (element,))]
    try:
        indices = torch.tensor([operator.index(i) for i in flat], dtype=torch.int64)
    except TypeError:
        return None
    return indices if len(indices) and int(indices.min()) >= 0 else None


def training_sampler(loader: Any) -> Any:
    """The sampler that decides what a loader reads."""
    sampler = sampler_of(loader) if hasattr(loader, "sampler") else None
    return getattr(sampler.inner, "sampler", sampler.inner) if isinstance(sampler, AsGiven) else sampler


def length(sized: Any) -> int | None:
    """Its length, or None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None

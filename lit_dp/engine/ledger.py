"""The ledger: which samples an epoch really used, beside what its schedule promised (law L3). One line an epoch.

Counted is what the loaders delivered to completed steps, on every rank; the counts meet once, when the epoch ends.
"""

import copy
import math
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from lit_dp.engine import launch
from lit_dp.engine.loaders import take_delivered
from lit_dp.engine.samplers import AsGiven, TrainBatches, plain_order
from lit_dp.engine.sharding import sampler_of

STATE = "lit_dp.ledger"
EXAMPLES = 5
UNKNOWN = "as its sampler drew it"
_NONE = torch.zeros(0, dtype=torch.uint8)


class Some(NamedTuple):
    """How many samples, and the indices of the first few of them."""

    count: int
    examples: tuple[int, ...]

    def said(self, what: str) -> list[str]:
        more = ", …" if self.count > len(self.examples) else ""
        return [f"{self.count:,} {what} ({', '.join(map(str, self.examples))}{more})"] if self.count else []


@dataclass(frozen=True)
class Account:
    """What became of one loader's samples in one epoch, over all ranks. Its `str` is the line that is printed.

    Attributes:
        epoch: from 0.
        loader: which of several training loaders; None for an only one.
        samples: in the dataset; None for a stream.
        used: different samples that were used, in `uses` uses.
        promise: how often each was to be used, in words.
        padded: used once more to fill the last step, dropped: left out for not filling it; as the schedule promises.
        missing: used less often than the batches taken promised, repeated: more often. Faults.
        batches: a rank took, before a resume too; of `whole` in the epoch, where that is known.
        blind: batches, over all ranks, whose indices are not known. Then none are known to be missing.
        ordered: every rank read in the dataset's order.
        apart: says that the launcher started processes that the trainer does not know, and that do not exchange.
    """

    epoch: int
    loader: int | None
    samples: int | None
    used: int
    uses: int
    promise: str
    padded: Some
    dropped: Some
    missing: Some
    repeated: Some
    batches: int
    whole: int | None
    blind: int
    ordered: bool
    apart: str

    @property
    def clean(self) -> bool:
        """Whether every sample is known to have been used as often as promised."""
        return not (self.missing.count or self.repeated.count or self.blind or self.apart or self.promise == UNKNOWN)

    def __str__(self) -> str:
        loader = f", loader {self.loader}" if self.loader is not None else ""
        stopped = self.whole is not None and self.batches < self.whole
        after = f" (stopped after {self.batches:,} of {self.whole:,} batches)" if stopped else ""
        return f"epoch {self.epoch}{loader}: {'; '.join([self._amount(), *self._exceptions()])}{after}"

    def _amount(self) -> str:
        if self.blind and not self.uses:
            return f"nothing is known of the samples used: the {self.blind:,} batches came without indices"
        of = f" of {self.samples:,}" if self.samples not in (None, self.used) else ""
        if self.missing.count or self.repeated.count:
            return f"{self.used:,}{of} samples used"
        order = ", in the dataset's order" if self.ordered else ""
        each = f" used, each {self.promise}" if of else f", each used {self.promise}"
        return f"{self.used:,}{of} samples{each}{order}"

    def _exceptions(self) -> list[str]:
        return [
            *self.padded.said("padded"),
            *self.dropped.said("dropped"),
            *self.missing.said("MISSING"),
            *self.repeated.said("REPEATED"),
            *([f"{self.blind:,} batches came without indices"] if self.blind and self.uses else []),
            *([self.apart] if self.apart else []),
        ]


@dataclass
class Tally:
    """This rank's uses of one loader's samples: a byte a sample, four once one was used more than 255 times.

    Attributes:
        samples: N; None for a stream, whose counts grow.
        counts: uint8 or int32 (N,).
        batches, blind: as in Account, of this rank. `taken` are those that this process took from its loader.
        descents: how often an index came after a higher one.
    """

    samples: int | None
    counts: Tensor = _NONE
    batches: int = 0
    taken: int = 0
    blind: int = 0
    descents: int = 0

    def __post_init__(self) -> None:
        self.heads: list[int] = []
        self.grow(self.samples or 0)

    def add(self, indices: Tensor | None, stride: int = 1) -> None:
        """Count a batch, int64 (B,). Batches of the same virtual rank come every `stride` batches."""
        if indices is None or (self.samples is not None and int(indices.max()) >= self.samples):
            self.blind += 1
            return
        self.grow(int(indices.max()) + 1)
        samples, times = indices.unique(return_counts=True)
        counts = self.counts[samples] + times
        self.counts = self.counts.int() if int(counts.max()) > 255 else self.counts
        self.counts[samples] = counts.to(self.counts.dtype)
        self.heads.append(int(indices[0]))
        follows = len(self.heads) <= stride or self.heads[-1 - stride] <= self.heads[-1]
        self.descents += int((indices.diff() < 0).sum()) + (not follows)

    def grow(self, samples: int) -> None:
        if samples > len(self.counts):
            self.counts = torch.cat((self.counts, self.counts.new_zeros(samples - len(self.counts))))


class Ledger(Callback):
    """Counts what training used and prints one line an epoch, on rank 0. Keeps `accounts` of all loaders and epochs.

    Costs this process a byte a sample and one reduction (of four bytes a sample) an epoch; a stream's size takes one
    more. A checkpoint in the midst of an epoch costs a reduction too, and the account goes on after a resume.

    Args:
        indices_of: sample indices int64 (B,) in a batch, for loaders that do not tell them: those of `strategy: ddp`,
            and streams. Used where there is one training loader.
    """

    def __init__(self, indices_of: Callable[[Any], Tensor] | None = None) -> None:
        self.indices_of = indices_of
        self.accounts: list[Account] = []
        self._loaders: list[Any] = []
        self._tallies: list[Tally] = []
        self._restored: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._tallies, self._restored = [], {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._tallies:  # not in on_train_epoch_start, which Lightning leaves out where an epoch is resumed
            self._begin(trainer, batch_idx)
        for loader, tally in zip(self._loaders, self._tallies, strict=True):
            self._take(loader, tally, batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for number, (loader, tally) in enumerate(zip(self._loaders, self._tallies, strict=True)):
            which = number if len(self._loaders) > 1 else None
            account = _account(trainer, loader, _reduced(trainer, tally), which)
            self.accounts.append(account)
            if trainer.is_global_zero:
                print(account, flush=True)
        self._loaders, self._tallies = [], []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """On all ranks, as Trainer.save_checkpoint."""
        tallies = [asdict(_reduced(trainer, tally)) for tally in self._tallies]
        checkpoint[STATE] = {"epoch": trainer.current_epoch, "tallies": tallies}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get(STATE, {})

    def _begin(self, trainer: Trainer, batch_idx: int) -> None:
        self._loaders = CombinedLoader(trainer.train_dataloader, "sequential").flattened
        self._tallies = [Tally(_length(getattr(loader, "dataset", None))) for loader in self._loaders]
        known = self._restored.get("tallies", []) if self._restored.get("epoch") == trainer.current_epoch else []
        if len(known) == len(self._tallies):  # rank 0 takes over what all ranks had counted
            mine = {} if trainer.is_global_zero else {"counts": _NONE, "blind": 0, "descents": 0}
            self._tallies = [Tally(**{**state, **mine, "taken": 0}) for state in known]
        elif batch_idx:  # resumed from a checkpoint without an account
            self._tallies = [Tally(tally.samples, batches=batch_idx, blind=batch_idx) for tally in self._tallies]
        self._restored = {}

    def _take(self, loader: Any, tally: Tally, batch: Any) -> None:
        sampler, tells = _sampler(loader), hasattr(loader, "delivered")
        elements = take_delivered(loader)
        if tells and elements is None:  # a CombinedLoader may take no batch of a loader in a step
            return
        indices = sample_indices(elements) if elements is not None else None
        if not tells and self.indices_of is not None and len(self._loaders) == 1:
            indices = self.indices_of(batch).flatten().cpu()
        if not isinstance(sampler, TrainBatches):
            tally.add(indices)
        elif sampler.counts(tally.taken % len(sampler))[sampler.share.rank]:  # otherwise the sample is borrowed
            tally.add(indices, stride=len(sampler.share.virtual_ranks))
        tally.batches += 1
        tally.taken += 1


def _reduced(trainer: Trainer, tally: Tally) -> Tally:
    """The tally of all ranks, on all ranks; all ranks call it."""
    strategy = trainer.strategy
    if tally.samples is None:
        size = torch.tensor(len(tally.counts), device=strategy.root_device)
        tally.grow(int(strategy.reduce(size, reduce_op="max")))  # pyright: ignore[reportArgumentType]
    own = torch.cat((tally.counts.int(), torch.tensor([tally.blind, tally.descents], dtype=torch.int32)))
    total: Any = strategy.reduce(own.to(strategy.root_device), reduce_op="sum")
    blind, descents = total[-2:].tolist()
    return replace(tally, counts=total[:-2].cpu(), blind=blind, descents=descents)


def _account(trainer: Trainer, loader: Any, tally: Tally, number: int | None) -> Account:
    used, batches = tally.counts, tally.batches
    promise = Promise(loader, len(used))
    passes = batches / promise.whole if promise.whole else 1.0
    draw, words = promise.draw(used)
    due = None if tally.blind else promise.due(batches)
    due = used.minimum(draw * math.ceil(passes)) if due is None else due
    complete = passes == 1 and not tally.blind and tally.samples is not None
    padded = _some(due - draw, passes <= 1)
    return Account(
        epoch=trainer.current_epoch,
        loader=number,
        samples=tally.samples,
        used=int((used > 0).sum()),
        uses=int(used.sum()),
        promise=words if passes <= 1 else f"as often as {passes:.3g} passes ask for",
        padded=padded,
        dropped=_some(draw - due, complete),
        missing=_some(due - used),
        repeated=_some(used - due),
        batches=batches,
        whole=promise.whole,
        blind=tally.blind,
        ordered=passes <= 1 and tally.descents <= padded.count,
        apart=_apart(trainer.world_size),
    )


class Promise:
    """What a loader's sampler says that all ranks together read. Counts are int32 (N,).

    Attributes:
        whole: batches of one rank in an epoch, None for a stream without a length.
    """

    def __init__(self, loader: Any, samples: int) -> None:
        self.loader, self.samples, self.sampler = loader, samples, _sampler(loader)
        schedule = self.sampler if isinstance(self.sampler, TrainBatches) else None
        self.stride = len(schedule.share.virtual_ranks) if schedule else 1
        self.whole = schedule.schedule.steps_per_epoch * self.stride if schedule else _length(loader)

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


def _sampler(loader: Any) -> Any:
    sampler = sampler_of(loader) if hasattr(loader, "sampler") else None
    return getattr(sampler.inner, "sampler", sampler.inner) if isinstance(sampler, AsGiven) else sampler


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _some(uses: Tensor, applies: bool = True) -> Some:
    uses = uses.clamp(min=0) * applies
    return Some(int(uses.sum()), tuple(uses.nonzero().flatten()[:EXAMPLES].tolist()))


def _apart(world_size: int) -> str:
    started = launch.detect()
    if started.world_size in (None, world_size):
        return ""
    harm = "each trains by itself" if world_size == 1 else "shares of the others are used by nobody"
    return f"{started.launcher} started {started.world_size} processes, the trainer counts {world_size}: {harm}"

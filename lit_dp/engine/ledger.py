"""The ledger: which samples an epoch really used, beside what its schedule promised (law L3). One line an epoch.

Counted is what the loaders delivered to completed steps, on every rank; the counts meet once, when the epoch ends.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lit_dp.engine import launch
from lit_dp.engine.account import EXAMPLES, Account, Some
from lit_dp.engine.loaders import take_delivered
from lit_dp.engine.peers import Peers
from lit_dp.engine.promise import Promise, length, training_sampler
from lit_dp.engine.samplers import TrainBatches
from lit_dp.engine.tally import NONE, Tally

STATE = "lit_dp.ledger"


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
        if not self._tallies and self._restored:  # resumed after the last batch
            progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
            self._begin(trainer, progress.processed)
        for number, (loader, tally) in enumerate(zip(self._loaders, self._tallies, strict=True)):
            which = number if len(self._loaders) > 1 else None
            account = _account(trainer, loader, _reduced(trainer, tally), which)
            self.accounts.append(account)
            if trainer.is_global_zero:
                print(account, flush=True)
        self._loaders, self._tallies = [], []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """On all ranks, as Trainer.save_checkpoint."""
        heads = [
            tally.settle().heads[-_stride(loader) :] for loader, tally in zip(self._loaders, self._tallies, strict=True)
        ]
        by_rank = Peers(trainer.global_rank, trainer.world_size).gather(heads)
        tallies = [
            {**asdict(_reduced(trainer, tally)), "heads": [head for of_rank in by_rank for head in of_rank[number]]}
            for number, tally in enumerate(self._tallies)
        ]
        micro_batches = int(trainer.accumulate_grad_batches)
        checkpoint[STATE] = {"epoch": trainer.current_epoch, "tallies": tallies, "micro_batches": micro_batches}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get(STATE, {})

    def _begin(self, trainer: Trainer, batch_idx: int) -> None:
        self._loaders = CombinedLoader(trainer.train_dataloader, "sequential").flattened
        self._tallies = [Tally(length(getattr(loader, "dataset", None))) for loader in self._loaders]
        known = self._restored.get("tallies", []) if self._restored.get("epoch") == trainer.current_epoch else []
        if len(known) == len(self._tallies):
            now, then = int(trainer.accumulate_grad_batches), self._restored.get("micro_batches", 1)
            for loader, state in zip(self._loaders, known, strict=True):
                # An only loader has given a batch each; several may be counted otherwise by their CombinedLoader.
                taken = {name: state[name] * now // then for name in ("batches", "taken")}
                state.update(taken if len(known) > 1 else dict.fromkeys(taken, batch_idx))
                state["heads"] = _heads_of(loader, state["heads"], trainer)
                if not trainer.is_global_zero:  # rank 0 takes over what all ranks had counted
                    state.update(counts=NONE, blind=0, descents=0)
            self._tallies = [_tally(state) for state in known]
        elif batch_idx:  # resumed from a checkpoint without an account
            self._tallies = [
                Tally(tally.samples, batches=batch_idx, taken=batch_idx, blind=batch_idx) for tally in self._tallies
            ]
        self._restored = {}

    def _take(self, loader: Any, tally: Tally, batch: Any) -> None:
        sampler, tells = training_sampler(loader), hasattr(loader, "delivered")
        elements = take_delivered(loader)
        if tells and elements is None:  # a CombinedLoader may take no batch of a loader in a step
            return
        used: Any = elements
        if not tells and self.indices_of is not None and len(self._loaders) == 1:
            used = self.indices_of(batch)
        if not isinstance(sampler, TrainBatches):
            tally.add(used)
        elif sampler.equal or sampler.counts(tally.taken % len(sampler))[sampler.share.rank]:  # or else it is borrowed
            tally.add(used, _stride(loader))
        tally.batches += 1
        tally.taken += 1


def _stride(loader: Any) -> int:
    sampler = training_sampler(loader)
    return len(sampler.share.virtual_ranks) if isinstance(sampler, TrainBatches) else 1


def _heads_of(loader: Any, heads: list[int], trainer: Trainer) -> list[int]:
    """Those of this process; `heads` are the first indices of the last batches of all virtual ranks."""
    stride = _stride(loader)
    known = len(heads) == stride * trainer.world_size
    return heads[trainer.global_rank * stride :][:stride] if known else []


def _tally(state: dict[str, Any]) -> Tally:
    tally = Tally(**{name: value for name, value in state.items() if name != "heads"})
    tally.heads = list(state["heads"])
    return tally


def _reduced(trainer: Trainer, tally: Tally) -> Tally:
    """The tally of all ranks, on all ranks; all ranks call it."""
    tally.settle()
    if tally.samples is None:
        tally.grow(int(_met(trainer, torch.tensor(len(tally.counts)), dist.ReduceOp.MAX)))
    own = torch.cat((tally.counts.int(), torch.tensor([tally.blind, tally.descents], dtype=torch.int32)))
    total = _met(trainer, own, dist.ReduceOp.SUM)
    blind, descents = total[-2:].tolist()
    return replace(tally, counts=total[:-2], blind=blind, descents=descents)


def _met(trainer: Trainer, own: Tensor, operation: Any) -> Tensor:
    """Not strategy.reduce: within a validation that leaves every rank with its own."""
    together = own.to(trainer.strategy.root_device)
    if trainer.world_size > 1:
        dist.all_reduce(together, operation)
    return together.cpu()


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


def _some(uses: Tensor, applies: bool = True) -> Some:
    uses = uses.clamp(min=0) * applies
    return Some(int(uses.sum()), tuple(uses.nonzero().flatten()[:EXAMPLES].tolist()))


def _apart(world_size: int) -> str:
    started = launch.detect()
    if started.world_size in (None, world_size):
        return ""
    harm = "each trains by itself" if world_size == 1 else "shares of the others are used by nobody"
    return f"{started.launcher} started {started.world_size} processes, the trainer counts {world_size}: {harm}"

"""Who brought a number that is not finite into a step: what each rank knows of it, and all of it in one sentence."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lit_dp.engine.metric_states import taken_back
from lit_dp.engine.randomness import isolated

SAMPLES_NAMED, MICRO_BATCHES_NAMED = 8, 4
"""What an error lists at most."""
MICRO_BATCHES_KEPT = 1024
"""A limit for manual optimization that never takes a step."""


@dataclass
class MicroBatch:
    """A micro-batch of the step that is being computed.

    Attributes:
        index: in the epoch.
        samples: elements that the loader's sampler gave for it; None where the loader does not tell.
        losses: that went backward; they stay on the device.
    """

    index: int
    samples: list[Any] | None
    losses: list[Tensor] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        return not are_finite(self.losses)


class Window:
    """This rank's micro-batches since the last optimizer step."""

    def __init__(self) -> None:
        self.micro_batches: deque[MicroBatch] = deque(maxlen=MICRO_BATCHES_KEPT)

    def begin(self, trainer: Trainer, index: int) -> None:
        self.micro_batches.append(MicroBatch(index, _samples(trainer)))

    def add(self, loss: Tensor) -> None:
        if self.micro_batches:
            self.micro_batches[-1].losses.append(loss.detach())

    def forget_losses(self) -> None:
        for micro_batch in self.micro_batches:
            micro_batch.losses.clear()

    def clear(self) -> None:
        self.micro_batches.clear()


@dataclass(frozen=True)
class Suspect:
    """A micro-batch that did it. `where` names its rank; `samples` are the first of `count`, which is None where they
    are not known."""

    where: str
    index: int
    samples: tuple[str, ...] = ()
    count: int | None = None

    @classmethod
    def of(cls, micro_batch: MicroBatch, trainer: Trainer) -> "Suspect":
        where, index = _rank(trainer, micro_batch.index), micro_batch.index
        if micro_batch.samples is None:
            return cls(where, index)
        flat = [i for e in micro_batch.samples for i in (e if isinstance(e, (list, tuple)) else (e,))]
        return cls(where, index, tuple(map(str, flat[:SAMPLES_NAMED])), len(flat))

    def __str__(self) -> str:
        if self.count is None:
            return f"{self.where}batch {self.index:,} of the epoch (its loader does not tell samples)"
        more = f", … ({self.count:,} in all)" if self.count > len(self.samples) else ""
        return f"{self.where}sample{'s' * (self.count != 1)} {', '.join(self.samples)}{more}"


@dataclass(frozen=True)
class Evidence:
    """What one rank knows.

    Attributes:
        suspects: its micro-batches whose loss is not finite or, where all losses are, whose own gradient is not.
        seen: number of micro-batches that were looked at.
        gradient: first parameter with a gradient that is not finite; the same on all ranks.
        weight: first parameter that is not finite itself.
    """

    suspects: tuple[Suspect, ...]
    seen: int
    gradient: str | None
    weight: str | None


def describe(by_rank: list[Evidence], of_loss: bool, step: int, epoch: int) -> str:
    """What happened, and where.

    Args:
        by_rank: every rank's evidence.
        of_loss: whether a loss is not finite; otherwise a gradient is, and was computed again to find whose.
        step, epoch: counted from 1.
    """
    what = "loss" if of_loss else f"gradient of {by_rank[0].gradient}"
    head = f"non-finite {what} at step {step:,} (epoch {epoch})"
    suspects = [str(suspect) for evidence in by_rank for suspect in evidence.suspects]
    seen = sum(evidence.seen for evidence in by_rank)
    if weight := next((evidence.weight for evidence in by_rank if evidence.weight), None):
        return f"{head}: parameter {weight} is not finite itself since an earlier step"
    if not seen:
        return f"{head}; losses are finite, and whose gradient it was is not known, as they are sums over ranks already"
    if not suspects:
        return (
            f"{head}; losses are finite, and so is what each rank's last micro-batch alone gives: an earlier one does"
            " not, or the sum is too large for the type in which all_reduce exchanges it"
        )
    finite = "" if of_loss else ", where losses are finite,"
    where = f"in all {seen:,} micro-batches: " if len(suspects) == seen > 1 else "on "
    more = f"; and {len(suspects) - MICRO_BATCHES_NAMED:,} more" if len(suspects) > MICRO_BATCHES_NAMED else ""
    return f"{head}{finite} {where}{'; '.join(suspects[:MICRO_BATCHES_NAMED])}{more}"


def are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(values_of(tensor).isfinite().all()) for tensor in tensors)


def values_of(tensor: Tensor) -> Tensor:
    """What is stored: of a sparse gradient (of nn.Embedding(sparse=True)) the rows that are there."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def bad_alone(trainer: Trainer, module: LightningModule, batch: Any, index: int) -> bool | None:
    """Compute a micro-batch once more on this rank alone, with the same draws: is a gradient not finite?

    It leaves no trace in gradients, buffers, metrics, logs and generators, only in what the step itself writes
    elsewhere. All ranks call it, since the step may hold collectives.

    Returns:
        None where it could not be computed.
    """
    parameters, strategy = [p for p in module.parameters() if p.requires_grad], trainer.strategy
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return None  # the step takes its batches itself
    try:
        with _without_trace(trainer, module):
            if (seed_draws := getattr(strategy, "seed_draws", None)) is not None:
                seed_draws("step", index)
            with torch.enable_grad(), strategy.precision_plugin.train_step_context():
                takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
                output: Any = module.training_step(batch, index) if takes_index else module.training_step(batch)
            loss = output["loss"] if isinstance(output, Mapping) else output
            # Not backward: it would start DDP's reduction.
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except Exception:  # whatever a user's step raises when it is called out of turn; the first error is what matters
        return None
    return not are_finite(gradient for gradient in gradients if gradient is not None)


@contextmanager
def _without_trace(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    device, buffers = trainer.strategy.root_device, copies(module)
    module.log = module.log_dict = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    devices = [device] if device.type == "cuda" else []
    try:
        with isolated(), torch.random.fork_rng(devices), taken_back(module, {}):
            yield
    finally:
        del module.log, module.log_dict  # the class's own again
        put_back(module, buffers)


def copies(module: nn.Module) -> dict[str, Tensor]:
    """Copies of its buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


@torch.no_grad()
def put_back(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Write the copies into the buffers; a step may have put new tensors in their place."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def _rank(trainer: Trainer, index: int) -> str:
    virtual, processes = getattr(trainer.strategy, "virtual_ranks", None), trainer.world_size
    k = virtual // processes if virtual else 1
    if k > 1:
        return f"virtual rank {trainer.global_rank * k + index % k} (process {trainer.global_rank}): "
    return f"rank {trainer.global_rank}: " if processes > 1 else ""


def _samples(trainer: Trainer) -> list[Any] | None:
    """Elements of the batch that is about to be used, of a loader that tells (see `loaders.Delivering`), without taking
    them: the ledger will."""
    loader: Any = trainer.train_dataloader
    if isinstance(loader, (list, tuple, dict)):
        loaders = CombinedLoader(loader, "sequential").flattened
        loader = loaders[0] if len(loaders) == 1 else None
    delivered, fetcher = getattr(loader, "delivered", None), trainer.fit_loop._data_fetcher
    if not delivered or fetcher is None:
        return None
    ahead = fetcher.fetched - trainer.fit_loop.epoch_loop.batch_progress.current.ready  # of prefetched batches
    return delivered[-1 - ahead] if 0 <= ahead < len(delivered) else None

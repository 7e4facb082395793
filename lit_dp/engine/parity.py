"""What one optimizer step leaves behind, and where two runs of the same training part.

The raw loop and Lightning's Trainer report the same `StepReport` after every step, so that they can be compared
bit for bit (law L1).
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

PARTS = ("losses", "gradients", "weights", "buffers", "optimizer_state")


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of one rank. The tensors are the live ones: read or copy them before the next step.

    Attributes:
        epoch: epoch the step belongs to, from 0.
        step: optimizer steps taken before this one, over all epochs.
        losses: scalars that `backward` ran on, one a micro-batch, by "0", "1", ...
        gradients: as the optimizer used them (reduced and clipped), by parameter name.
        weights: after the step, by parameter name.
        buffers: after the step, by buffer name.
        optimizer_state: after the step, by "parameter/entry" (momentum, exp_avg, step, ...).
    """

    epoch: int
    step: int
    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer_state: dict[str, Tensor]

    @classmethod
    def of(
        cls, module: nn.Module, optimizer: Optimizer, epoch: int, step: int, losses: Iterable[Tensor]
    ) -> "StepReport":
        """Collect what `module` and `optimizer` hold right after a step, before gradients are cleared."""
        parameters = dict(module.named_parameters())
        state = {
            f"{name}/{entry}": torch.as_tensor(value)
            for name, parameter in parameters.items()
            for entry, value in optimizer.state.get(parameter, {}).items()
            if value is not None
        }
        return cls(
            epoch=epoch,
            step=step,
            losses={str(i): loss.detach() for i, loss in enumerate(losses)},
            gradients={name: p.grad for name, p in parameters.items() if p.grad is not None},
            weights={name: p.detach() for name, p in parameters.items()},
            buffers=dict(module.named_buffers()),
            optimizer_state=state,
        )

    def digests(self) -> dict[str, str]:
        """SHA-256 of every tensor, by "part/name": equal digests mean equal bits."""
        return {f"{part}/{name}": sha256({name: t}) for part in PARTS for name, t in getattr(self, part).items()}


class StepReporter(Callback):
    """Calls `on_step(StepReport)` after every optimizer step that a Trainer takes, on every rank.

    Optimizer steps of automatic optimization with one optimizer are seen.
    """

    def __init__(self, on_step: Callable[[StepReport], None]) -> None:
        self._on_step = on_step
        self._losses: list[Tensor] = []
        self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"])
        if trainer.global_step == self._steps:  # still accumulating
            return
        self._on_step(StepReport.of(pl_module, trainer.optimizers[0], trainer.current_epoch, self._steps, self._losses))
        self._steps, self._losses = trainer.global_step, []


def sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and bits of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part: `tensor` is "part/name", `ranks` those whose bits differ there."""

    step: int
    tensor: str
    ranks: tuple[int, ...]

    @property
    def part(self) -> str:
        """One of `PARTS`."""
        return self.tensor.split("/")[0]


Trace = list[dict[str, str]]
"""One rank's digests, a dict an optimizer step."""


def first_difference(a: list[Trace], b: list[Trace]) -> Difference | None:
    """Compare two runs, each a list of traces by rank; None if all bits of all steps are equal.

    Within a step the parts are looked at in the order in which a step computes them, so that the cause is named
    before its consequences: losses, gradients, weights, buffers, optimizer state.
    """
    steps = max(len(trace) for trace in (*a, *b))
    for step in range(steps):
        pairs = [(_at(x, step), _at(y, step)) for x, y in zip(a, b, strict=True)]
        names = dict.fromkeys(name for x, y in pairs for name in (*x, *y))
        for name in sorted(names, key=lambda n: PARTS.index(n.split("/")[0])):
            ranks = tuple(rank for rank, (x, y) in enumerate(pairs) if x.get(name) != y.get(name))
            if ranks:
                return Difference(step, name, ranks)
    return None


def _at(trace: Trace, step: int) -> dict[str, str]:
    return trace[step] if step < len(trace) else {}

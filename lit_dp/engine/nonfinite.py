"""A loss or gradient that is not finite stops all ranks before the optimizer uses it, or has that step left out."""

import math
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_dp.engine.peers import Peers
from lit_dp.engine.suspects import (
    Evidence,
    MicroBatch,
    Suspect,
    Window,
    are_finite,
    bad_alone,
    copies,
    describe,
    put_back,
    values_of,
)
from lit_dp.errors import ConfigError, RunError

Mode = Literal["stop", "skip", "ignore"]
ADVICE = "mend the samples or the loss, or leave such steps out with --trainer.strategy.nonfinite skip"
ADVICE_ON_WEIGHTS = "lower the learning rate or set --trainer.gradient_clip_val, and resume from an earlier checkpoint"


def poisoned(loss: Tensor) -> Tensor:
    """The loss, bit for bit, if it is finite; otherwise NaN, and so its gradients.

    A loss can be non-finite while its gradients are finite, being off by a constant: no other rank would notice. The
    host does not wait for a device.
    """
    if loss.is_cpu and loss.numel() == 1 and math.isfinite(loss.item()):  # as it mostly is: a tenth of the time
        return loss
    return loss * (1 + 0 * loss.detach())


def look_finite(gradients: list[Tensor]) -> bool:
    """A quick look: False where an element is not finite, but also where a sum of finite ones is too large."""
    if not gradients:
        return True
    if all(gradient.is_cpu for gradient in gradients):
        return math.isfinite(sum(gradient.sum().item() for gradient in gradients))
    return math.isfinite(get_total_norm([values_of(gradient) for gradient in gradients]).item())


class NonFinite(Callback):
    """Acts before a step in which a loss or a gradient of any rank is not finite reaches the weights (FAULTS 19).

    Gradients are sums over ranks: one rank's NaN is everybody's, and all come to the same verdict by looking at their
    own. A healthy step has no communication for it (on an accelerator the host waits for the gradients once a step).
    Only otherwise do ranks tell each other whose losses are not finite, and of which samples. Where all losses are
    finite, each computes the last micro-batch's gradient once more, alone, to find whose it was.

    `stop` raises RunError on all ranks. `skip` takes no step: the optimizer finds no gradients, which torch's pass
    over, and buffers are again what they were before the step. What it logged or told a metrics object stays, and
    Lightning and its schedulers count it. `ignore` does not look. `skip` stops where parameters are not finite.

    - A GradScaler (16-mixed) lets gradients overflow and leaves such steps out by itself, so only losses count. A
      skipped step lowers its scale, as an overflow does.
    - In manual optimization each `optimizer.step()` is judged, by the losses given to `manual_backward` since the last.
      All ranks must hold the same gradients: do not step on ones that `no_sync` kept apart.
    - LBFGS computes several losses a step. If it is not the first that is not finite, the weights are those of a trial.

    Args:
        mode: what to do.
    """

    def __init__(self, mode: Mode = "stop") -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"nonfinite is {mode!r}: choose one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self.skipped = 0
        self._window = Window()
        self._judged = True  # whether the window's step has been taken, or left out
        self._batch: Any = None
        self._buffers: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises ConfigError where a step cannot be left out."""
        self._judged = True
        if self.mode == "skip":
            _refuse_to_skip(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.mode == "ignore":
            return
        if self._judged:
            self._window.clear()
            self._judged = False
            self._keep_buffers(pl_module)
        self._window.begin(trainer, batch_idx)
        self._batch = batch

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._window.add(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.mode == "ignore":
            return
        again, self._judged = self._judged, True
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        finite = look_finite(gradients) or are_finite(map(values_of, gradients))
        what = None if finite else self._what_happened(trainer, pl_module, optimizer)
        self._window.forget_losses()  # in manual optimization another step may follow in this batch
        if finite and not pl_module.automatic_optimization:
            self._keep_buffers(pl_module)
        if what is None:
            return
        if self.mode == "stop":
            weights = "those of a trial" if again and pl_module.automatic_optimization else "as before it"
            raise RunError(f"{what}. The step was not taken, weights are {weights}; {ADVICE}")
        self.skipped += 1
        if trainer.is_global_zero:
            print(f"step left out: {what}", flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None  # held no longer than by Lightning

    def _keep_buffers(self, module: LightningModule) -> None:
        if self.mode == "skip":
            self._buffers = copies(module)

    def _what_happened(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> str | None:
        """Called on all ranks, as all hold the same gradients; takes these away. None: a scaler's overflow.

        Raises RunError where parameters are not finite: then no later step will be better.
        """
        peers = Peers(trainer.global_rank, trainer.world_size)
        bad = [micro_batch for micro_batch in self._window.micro_batches if micro_batch.bad]
        of_loss, seen = any(peers.gather(bool(bad))), len(self._window.micro_batches)
        if not of_loss and getattr(trainer.precision_plugin, "scaler", None) is not None:
            return None
        gradient, weight = _first_bad(module, "grad"), _first_bad(module, "data")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        put_back(module, self._buffers)
        if not of_loss:
            bad, seen = self._computed_again(trainer, module)
        mine = Evidence(tuple(Suspect.of(micro_batch, trainer) for micro_batch in bad), seen, gradient, weight)
        by_rank = peers.gather(mine)
        what = describe(by_rank, of_loss, trainer.global_step + 1, trainer.current_epoch + 1)
        if any(evidence.weight for evidence in by_rank):
            raise RunError(f"{what}. The step was not taken; {ADVICE_ON_WEIGHTS}")
        return what

    def _computed_again(self, trainer: Trainer, module: LightningModule) -> tuple[list[MicroBatch], int]:
        """The last micro-batch if it does it alone, and how many were looked at. Earlier ones are not in memory."""
        if not module.automatic_optimization or self._batch is None:
            return [], 0
        last = self._window.micro_batches[-1]
        bad = bad_alone(trainer, module, self._batch, last.index)
        return [last] if bad else [], int(bad is not None)


def _first_bad(module: nn.Module, attribute: Literal["grad", "data"]) -> str | None:
    named = ((name, getattr(parameter, attribute)) for name, parameter in module.named_parameters())
    return next((name for name, tensor in named if tensor is not None and not are_finite([tensor])), None)


def _refuse_to_skip(trainer: Trainer) -> None:
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise ConfigError("nonfinite 'skip' cannot undo the trials of LBFGS within a step: use nonfinite 'stop'")
    if isinstance(getattr(trainer.strategy, "exchange", None), PowerSGDState):
        raise ConfigError(
            "nonfinite 'skip' and all_reduce 'powersgd': what is left out of a NaN is NaN, and is added to every later"
            " gradient; use nonfinite 'stop' or another all_reduce"
        )

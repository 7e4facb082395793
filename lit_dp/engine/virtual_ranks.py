"""V virtual ranks on W processes: gradients and buffers as V processes would have them (law L2).

A process runs k = V / W micro-batches a step, each as one virtual rank. Their gradients are added along the tree that
V processes use: neighbours first, then neighbouring pairs, and so on. `CarryStack` is the part of the tree inside a
process; recursive halving-doubling, whose partners are at distance 1, 2, 4, ..., is the part between processes.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_dp.collectives.hooks import CHOICES
from lit_dp.engine.carry_stack import CarryStack
from lit_dp.engine.evaluation import level_buffers
from lit_dp.engine.peers import Peers
from lit_dp.errors import ConfigError


class Buffers:
    """A module's buffers (BatchNorm's statistics) as V processes have them: every virtual rank begins a step with rank
    0's, and what rank 0 makes of them is what remains.

    Args:
        module: whose buffers they are; a step may put new tensors in the place of old ones.
        world_size: processes.
    """

    def __init__(self, module: nn.Module, world_size: int) -> None:
        self.module, self.world_size = module, world_size
        self._at_start: dict[str, Tensor] = {}
        self._of_first: dict[str, Tensor] = {}

    def begin(self, nth: int) -> None:
        """Before the nth micro-batch of a step on this process; every process calls it together."""
        if nth == 0:
            if self.world_size > 1:
                level_buffers(self.module)
            self._at_start = self._copied()
        else:
            self._set(self._at_start)

    def end(self, nth: int, of: int) -> None:
        """After the nth of k micro-batches has gone backward."""
        if nth == 0:
            self._of_first = self._copied()
        if nth == of - 1 and of > 1:
            self._set(self._of_first)

    def _copied(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.module.named_buffers():
            buffer.copy_(values[name])


LIMITS = (*(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")), "val_check_interval")


def claim(trainer: Trainer, k: int) -> None:
    """Make the trainer run k micro-batches a step, and count its limits in batches of a virtual rank.

    Raises:
        ConfigError: accumulation is configured too, or by a callback, or a limit is a fraction.
    """
    asked = trainer.accumulate_grad_batches
    if asked != 1 or any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks):  # pyright: ignore
        raise ConfigError(
            f"virtual_ranks says what a step is, and accumulate_grad_batches (here {asked}) would say it again: leave"
            " it out, and give a step more samples by more virtual ranks or a larger batch_size"
        )
    if k > 1 and any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks):  # pyright: ignore
        raise ConfigError(
            "StochasticWeightAveraging sets accumulate_grad_batches for an epoch of its own, as virtual_ranks does:"
            " use lightning.pytorch.callbacks.EMAWeightAveraging, or as many processes as virtual ranks"
        )
    for name in LIMITS:  # Lightning rounds a fraction of this process's micro-batches: it would end in midst of a step
        limit = getattr(trainer, name)
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise ConfigError(f"{name} {limit} is a fraction, and virtual_ranks counts batches: give a whole number")
    trainer.accumulate_grad_batches = k
    for name in LIMITS:
        if isinstance(limit := getattr(trainer, name), int):
            setattr(trainer, name, limit * k)


class VirtualRanks:
    """What a process does so that its k micro-batches a step are k virtual ranks.

    Args:
        k: virtual ranks a process.
        peers: all processes.
        module: what is trained; not yet wrapped.
        sync_batchnorm: whether the trainer is about to put SyncBatchNorm into it.

    Raises:
        ConfigError: the module cannot be trained so.
    """

    def __init__(self, k: int, peers: Peers, module: LightningModule, sync_batchnorm: bool = False) -> None:
        _refuse(module, k, sync_batchnorm)
        self.k, self.peers = k, peers
        self.stack = CarryStack(module.parameters())
        self.buffers = Buffers(module, peers.world_size)

    def refuse_at_start(self, scheduled: bool, optimizers: list[Optimizer]) -> None:
        """Raise ConfigError where k micro-batches would not be k virtual ranks.

        Args:
            scheduled: whether the schedule shares out every training loader.
            optimizers: that take the steps.
        """
        if not scheduled:
            raise ConfigError(
                "virtual_ranks needs training loaders that it can share out: a DataLoader of a dataset with __len__ and"
                " __getitem__ (no stream), without a DistributedSampler, and use_distributed_sampler at its default"
            )
        if self.k > 1 and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ConfigError(
                f"LBFGS computes the loss of a step several times, and each process runs its {self.k} virtual ranks"
                " once: use another optimizer, or as many processes as virtual ranks"
            )

    def begin(self, micro_batch: int) -> None:
        """Before the forward pass of a micro-batch. A step begins with its first: a resume leaves out whole steps."""
        nth = micro_batch % self.k
        if nth == 0:
            self.stack.clear()
        self.buffers.begin(nth)

    def before_backward(self, micro_batch: int, loss: Tensor) -> None:
        """Between forward and backward, where DDP looks for unused parameters."""
        if micro_batch % self.k == self.k - 1 and self.peers.world_size > 1:
            self.stack.lend_zeros(loss)

    def end(self, micro_batch: int) -> bool:
        """After its backward pass; whether it was the step's last."""
        nth = micro_batch % self.k
        if nth < self.k - 1:
            self.stack.push()
        elif self.peers.world_size == 1:
            self.stack.fold()
        self.buffers.end(nth, self.k)
        return nth == self.k - 1


TREES = ("halving_doubling", "butterfly", "tree")
"""Algorithms that sum 2^n ranks along the same binary tree."""


def exchange_for(all_reduce: str, virtual_ranks: int | None) -> str:
    """The algorithm to use.

    Raises:
        ConfigError: there is none of that name, or it does not sum along the tree that virtual ranks need.
    """
    if all_reduce not in CHOICES:
        raise ConfigError(f"all_reduce is {all_reduce!r}: choose one of {', '.join(CHOICES)}")
    if virtual_ranks is None or all_reduce in TREES:
        return all_reduce
    if all_reduce != "native":
        raise ConfigError(
            f"all_reduce {all_reduce!r} adds in another order than virtual ranks do: use one of {', '.join(TREES)}"
        )
    return TREES[0]


def _refuse(module: LightningModule, k: int, sync_batchnorm: bool) -> None:
    if not module.automatic_optimization:
        raise ConfigError("virtual_ranks needs automatic optimization: a manual step cannot be cut into micro-batches")
    if k > 1 and (sync_batchnorm or any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())):
        raise ConfigError(
            f"SyncBatchNorm needs all virtual ranks at once, and each process runs {k} one after the other: use"
            " BatchNorm, or as many processes as virtual ranks"
        )


def micro_batches_per_process(virtual_ranks: int, world_size: int) -> int:
    """k = V / W.

    Raises:
        ConfigError: V is no power of two, or W does not divide it.
    """
    if virtual_ranks < 1 or virtual_ranks & (virtual_ranks - 1):
        raise ConfigError(
            f"virtual_ranks is {virtual_ranks}: set it to a power of two (1, 2, 4, 8, ...), as sums follow a tree"
        )
    if virtual_ranks % world_size:
        powers = ", ".join(str(1 << i) for i in range(virtual_ranks.bit_length()))
        raise ConfigError(f"{virtual_ranks} virtual ranks cannot be placed on {world_size} processes: use {powers}")
    return virtual_ranks // world_size

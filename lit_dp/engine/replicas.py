"""Replicas hold the same: compared over ranks while training goes on, and no parameter is trained apart (law L8)."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lit_dp.engine.checksums import checksums
from lit_dp.engine.peers import Peers
from lit_dp.engine.randomness import derive
from lit_dp.errors import ConfigError, RunError

NAMED = 5
"""Parameters that an error lists by name."""


class Replicas(Callback):
    """Stops the run, on all ranks, where replicas differ or are about to.

    Compared are the parameters, and the state and settings (learning rate, ...) of the optimizers: by checksums taken
    on the device, of which ranks exchange one number. Only where that differs they exchange all, to name the first
    tensor and the ranks that are not like the others. That is done every `every_n_steps` optimizer steps, when training
    ends, and before each checkpoint, so that none is written of replicas that have parted (but for those of weights
    only, for which Lightning calls no callback).

    Buffers are compared only where nothing levels them, which is with DDP's `forward_sync_buffers=False` and no
    virtual ranks. Otherwise every forward pass begins with rank 0's, and in between each rank's BatchNorm has its own
    statistics, as it should.

    Before each step the optimizer's parameters are looked through for ones whose gradients no other rank hears of,
    since they did not require gradients when DDP (or the virtual ranks' sum) was set up (PL 20340, FAULTS 17).

    One process without virtual ranks is compared with nothing. Not looked at is what is meant to differ: parameters
    that `_ddp_params_and_buffers_to_ignore` names, state of an optimizer that shards it, and a model that is averaged
    every so many steps only (post-local SGD).

    Args:
        every_n_steps: optimizer steps between comparisons.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"every_n_steps is {every_n_steps}: compare replicas after 1 step or more")
        self.every_n_steps = every_n_steps
        self._compared = 0  # optimizer steps taken when replicas were last found equal

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._compared = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        reduced = getattr(trainer.strategy, "reduced", None)
        if reduced is None:
            return
        apart = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in reduced and p.requires_grad]
        if apart:
            raise ConfigError(_apart(apart, pl_module, trainer.global_step + 1))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step - self._compared >= self.every_n_steps:
            self._compare(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """On all ranks, as Trainer.save_checkpoint."""
        self._compare(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._compare(trainer, pl_module)

    def _compare(self, trainer: Trainer, module: LightningModule) -> None:
        before, self._compared = self._compared, trainer.global_step
        averaged_at_times = getattr(trainer.strategy, "_model_averager", None) is not None
        if trainer.world_size == 1 or averaged_at_times or not dist.is_initialized():
            return
        sums, peers = checksums(dict(held(trainer, module))), Peers(trainer.global_rank, trainer.world_size)
        if len(set(peers.gather(derive(repr(sorted(sums.items())))))) > 1:
            raise RunError(parted(peers.gather(sums), trainer.global_step, before))


def held(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Any]]:
    """What all ranks must hold alike, with the words that name it. Causes come before what follows from them."""
    wrapper = trainer.strategy.model
    wrapper = wrapper if isinstance(wrapper, DistributedDataParallel) else None
    ignored = wrapper.parameters_to_ignore if wrapper is not None else set()
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if name not in ignored}
    for number, optimizer in enumerate(trainer.optimizers):
        which = f" of optimizer {number}" if len(trainer.optimizers) > 1 else ""
        for group, settings in enumerate(optimizer.param_groups):
            for key, value in settings.items():
                if key not in ("params", "param_names"):
                    yield from _plain(f"{key} of param group {group}{which}", value)
    yield from ((f"parameter {name}", parameter) for parameter, name in names.items())
    virtual = getattr(trainer.strategy, "virtual_ranks", None) is not None
    if wrapper is not None and not wrapper.forward_sync_buffers and not virtual:
        yield from ((f"buffer {name}", b) for name, b in module.named_buffers() if name not in ignored)
    for optimizer in trainer.optimizers:
        if not hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer's mark, for Lightning too
            yield from _state(optimizer, names)


def _state(optimizer: Optimizer, names: dict[Tensor, str]) -> Iterator[tuple[str, Any]]:
    for parameter, entries in optimizer.state.items():
        if parameter in names:
            for entry, value in entries.items():
                for name, item in _plain(f"optimizer state {entry} of {names[parameter]}", value):
                    if isinstance(item, Tensor):  # not a number: LBFGS keeps the loss that it saw, its rank's own
                        yield name, item


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value if it is a tensor or a number, or else the items of a list (betas; LBFGS keeps lists of tensors)."""
    if isinstance(value, (Tensor, int, float, complex)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _plain(f"{name}[{i}]", item)


def parted(by_rank: list[dict[str, int]], step: int, before: int) -> str:
    """The error, where checksums by rank are not equal.

    Args:
        by_rank: checksum by name of everything that a rank holds.
        step, before: optimizer steps after which they were taken, and after which they were equal last.
    """
    names = dict.fromkeys(name for sums in by_rank for name in sums)
    different = [name for name in names if len({sums.get(name) for sums in by_rank}) > 1]
    first = [sums.get(different[0]) for sums in by_rank]
    usual = Counter(first).most_common(1)[0][0]  # on a tie that of the lower rank
    ranks = [str(rank) for rank, value in enumerate(first) if value != usual]
    of = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
    more = f" (and {len(different) - 1:,} more tensors or settings)" if len(different) > 1 else ""
    cause = (
        "each rank keeps its own with forward_sync_buffers=False: leave that at its default"
        if different[0].startswith("buffer")
        else "a callback or hook wrote on some ranks only, or drew without a seed: do the same on all"
    )
    anew = f"resume from a checkpoint of step {before:,} or earlier" if before else "start anew"
    return (
        f"replicas differ after {step:,} steps: {different[0]} of {of}{more} is not that of rank {first.index(usual)}."
        f" When last looked at, after {before:,} steps, they were equal. Probably {cause}, and {anew}"
    )


def _apart(parameters: list[Tensor], module: nn.Module, step: int) -> str:
    names = {id(p): name for name, p in module.named_parameters()}
    listed = ", ".join(names.get(id(p), "one that is not in the module") for p in parameters[:NAMED])
    more = f" and {len(parameters) - NAMED:,} more" if len(parameters) > NAMED else ""
    return (
        f"parameters that did not require gradients, or did not exist, when the training began are trained at step"
        f" {step:,}: {listed}{more}. Their gradients would stay on each rank, and replicas would part (PL 20340). Let"
        " them require gradients from the start (in configure_model at the latest) and hold them still with a param"
        " group of learning rate 0; or unfreeze them, and call fit anew with ckpt_path"
    )

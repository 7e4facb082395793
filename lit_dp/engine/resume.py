"""Exact resume (law L4): a checkpoint says where it was saved and what was trained; what has changed is refused."""

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_dp.engine.differences import content, described, differences, overridden, rounding
from lit_dp.engine.peers import Peers
from lit_dp.engine.position import KEY, Moment, Position, accumulation, next_to_read, place
from lit_dp.engine.stateful import InUse
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.engine.taking_up import FORCE, finish, read_from, say, stay_stopped, training_loaders
from lit_dp.errors import ConfigError

LOADERS, MONITORED = "lit_dp.loaders", "lit_dp.monitored"


class Resume(Callback):
    """Writes the position into every checkpoint, and compares when a training goes on from one.

    Attributes:
        force: go on where the training cannot be the same.
        moment: what comes next when a checkpoint is saved; set around a save that is made between two steps.
        saved: position of the checkpoint that this training goes on from, or None.
    """

    def __init__(self) -> None:
        self.force = False
        self.moment: Moment = "other"
        self.saved: Position | None = None
        self._begins = False  # whether the first batch after a resume is still to come
        self._monitored: dict[str, torch.Tensor] = {}
        self._loaders: list[Any] = []
        self._contents: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.saved, self._monitored = None, {}
        if isinstance(trainer.strategy, ExactDDPStrategy):
            trainer.strategy.resumed = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """On all ranks, as Trainer.save_checkpoint."""
        checkpoint[KEY] = Position.now(trainer, self.moment, self._described(trainer)).saved()
        checkpoint[MONITORED] = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
        if states := _loader_states(trainer):
            # Lightning keeps rank 0's alone (FAULTS 28).
            checkpoint[LOADERS] = Peers(trainer.global_rank, trainer.world_size).gather(states)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Before Lightning's loops read what they had counted."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        # Lightning warns of what is mended here.
        warnings.filterwarnings("ignore", ".*You're resuming from a checkpoint that ended before the epoch ended")
        self.saved = place(checkpoint, trainer)
        self._monitored = checkpoint.get(MONITORED, {})
        if isinstance(trainer.strategy, ExactDDPStrategy):
            trainer.strategy.resumed = self.saved
        _give_back_loaders(checkpoint, trainer.global_rank)
        for line in overridden(checkpoint.get("hyper_parameters", {}), dict(pl_module.hparams)):
            say(trainer, line)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises ConfigError, on all ranks, where the training would not be the one that was saved."""
        if not trainer.fit_loop.is_resuming:
            return
        self._refuse(trainer)
        read_from(trainer, self.saved)
        device = trainer.strategy.root_device
        trainer.callback_metrics.update({name: value.to(device) for name, value in self._monitored.items()})
        if self.saved is not None:
            finish(trainer, self.saved)
        if not self.force:
            stay_stopped(trainer, self.saved)
        self._begins = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for loader in training_loaders(trainer):
            if isinstance(loader, InUse):
                loader.begin_at(0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._go_on(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._go_on(trainer)

    def _go_on(self, trainer: Trainer) -> None:
        """The first thing after a resume has begun: from here on nothing is different from a run that was not stopped.
        Lightning would leave out ReduceLROnPlateau at the end of the epoch, and an epoch after one without a batch."""
        if self._begins:
            self._begins = False
            trainer.fit_loop._restarting = trainer.fit_loop.epoch_loop._restarting = False
            # GradientAccumulationScheduler does so at the start of an epoch, and refuses to find it done before.
            epochs: Any = trainer.fit_loop.epoch_progress.current
            trainer.accumulate_grad_batches = accumulation(trainer, epochs.completed)

    def _refuse(self, trainer: Trainer) -> None:
        saved, (_, taken), notes = self.saved, next_to_read(trainer), []
        if saved is None:
            changes = ["it was saved in the midst of an epoch, and does not say of which samples"] if taken else []
        else:
            now = Position.now(trainer, "other", self._described(trainer))
            anew = saved.moment == "epoch" and trainer.reload_dataloaders_every_n_epochs > 0  # pyright: ignore
            changes, notes = differences(saved, now, another_dataset=anew), rounding(saved, now)
            if taken and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                changes += _without_position(trainer)
        if changes and not self.force:
            raise ConfigError(f"{trainer.ckpt_path} cannot be resumed exactly: {'; '.join(changes)}; {FORCE}")
        if changes or notes:
            say(trainer, "; ".join([*(["resumed all the same"] if changes else []), *changes, *notes]))

    def _described(self, trainer: Trainer) -> list[dict[str, Any]]:
        loaders = training_loaders(trainer)
        if len(loaders) != len(self._loaders) or any(a is not b for a, b in zip(loaders, self._loaders, strict=True)):
            self._loaders, self._contents = loaders, [content(loader) for loader in loaders]
        epochs: Any = trainer.fit_loop.epoch_progress.current
        micro_batches = accumulation(trainer, epochs.processed)
        return [described(of, loader, micro_batches) for of, loader in zip(self._contents, loaders, strict=True)]


def _without_position(trainer: Trainer) -> list[str]:
    """Loaders that cannot be read from the midst of an epoch on."""
    combined: Any = trainer.fit_loop._combined_loader
    loaders = training_loaders(trainer)
    blind, stateful = [], sum(isinstance(loader, InUse) for loader in loaders)
    for loader in loaders:
        if not isinstance(loader, InUse) and not hasattr(getattr(loader, "sampler", None), "start"):
            blind.append(f"{type(loader).__name__} cannot say which batches were read (it has no state_dict)")
    if stateful and stateful != len(loaders):
        blind.append("loaders with and without a state of their own feed this training")
    if combined is not None and combined._mode == "max_size" and len(combined.flattened) > 1:
        blind.append("a CombinedLoader of mode max_size does not tell which of its loaders were exhausted")
    return blind


def _give_back_loaders(checkpoint: dict[str, Any], rank: int) -> None:
    """Put this rank's states of stateful loaders where Lightning looks for rank 0's."""
    loops: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    if not loops:
        return
    loops["state_dict"].pop("combined_loader", None)
    in_midst = checkpoint.get(KEY, {}).get("step") and not loops["epoch_loop.batch_progress"]["is_last_batch"]
    if in_midst and rank < len(by_rank := checkpoint.get(LOADERS, [])):  # an epoch begins as any other
        loops["state_dict"]["combined_loader"] = by_rank[rank]


def _loader_states(trainer: Trainer) -> list[dict[str, Any]]:
    taken: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return [loader.state_after(taken.processed) for loader in training_loaders(trainer) if isinstance(loader, InUse)]

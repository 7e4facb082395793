"""Exact resume (law L4): a checkpoint says where it was saved and what was trained; what has changed is refused."""

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lit_dp.engine.differences import content, described, differences, overridden
from lit_dp.engine.peers import Peers
from lit_dp.engine.position import KEY, Moment, Position, accumulation, move, next_to_read, place, validation_due
from lit_dp.engine.samplers import AsGiven, TrainBatches, stand
from lit_dp.engine.stateful import InUse
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError

LOADERS, MONITORED = "lit_dp.loaders", "lit_dp.monitored"
FORCE = "--resume.force (resume_force=True in Python) goes on all the same"


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
        if trainer.is_global_zero:
            for line in overridden(checkpoint.get("hyper_parameters", {}), dict(pl_module.hparams)):
                print(line, flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises ConfigError, on all ranks, where the training would not be the one that was saved."""
        if not trainer.fit_loop.is_resuming:
            return
        self._refuse(trainer)
        _read_from(trainer, self.saved)
        device = trainer.strategy.root_device
        trainer.callback_metrics.update({name: value.to(device) for name, value in self._monitored.items()})
        if self.saved is not None:
            _finish(trainer, self.saved)
        if not self.force:
            _stay_stopped(trainer)
        self._begins = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for loader in _loaders(trainer):
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
        changes = self._changes(trainer)
        if changes and not self.force:
            raise ConfigError(f"{trainer.ckpt_path} cannot be resumed exactly: {'; '.join(changes)}; {FORCE}")
        if changes and trainer.is_global_zero:
            print(f"resumed all the same: {'; '.join(changes)}", flush=True)

    def _changes(self, trainer: Trainer) -> list[str]:
        saved, (_, taken) = self.saved, next_to_read(trainer)
        if saved is None:
            return ["it was saved in the midst of an epoch, and does not say of which samples"] if taken else []
        now = Position.now(trainer, "other", self._described(trainer))
        anew = saved.moment == "epoch" and trainer.reload_dataloaders_every_n_epochs > 0  # pyright: ignore
        changes = differences(saved, now, another_dataset=anew)
        if taken and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            changes += _without_position(trainer)
        return changes

    def _described(self, trainer: Trainer) -> list[dict[str, Any]]:
        loaders = _loaders(trainer)
        if len(loaders) != len(self._loaders) or any(a is not b for a, b in zip(loaders, self._loaders, strict=True)):
            self._loaders, self._contents = loaders, [content(loader) for loader in loaders]
        epochs: Any = trainer.fit_loop.epoch_progress.current
        micro_batches = accumulation(trainer, epochs.processed)
        return [described(of, loader, micro_batches) for of, loader in zip(self._contents, loaders, strict=True)]


def _read_from(trainer: Trainer, saved: Position | None) -> None:
    """Let the loaders begin where the training goes on. They do already, unless the module asked for them before the
    checkpoint was read: for the number of steps, in its `setup` or for a schedule in `configure_optimizers`."""
    loop = trainer.fit_loop
    (epoch, taken), loaders = next_to_read(trainer), _loaders(trainer)
    late = bool(loop._combined_loader_states_to_load) and loop.restarting
    for loader in loaders:
        batches = getattr(loader, "sampler", None)
        if isinstance(loader, InUse):
            loader.begin_at(taken)
        if isinstance(batches, TrainBatches | AsGiven):
            stand(batches, epoch, taken)
            late |= batches.begun != (epoch, batches.start)
        elif callable(getattr(batches, "set_epoch", None)):  # with use_distributed_sampler=False
            batches.set_epoch(epoch)
            late |= epoch > 0
    for loader in loaders if late and saved is not None else []:
        move(trainer, saved, loader)
    if late:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)  # pyright: ignore[reportArgumentType]


def _finish(trainer: Trainer, saved: Position) -> None:
    """Do what Lightning would leave out, as it came after the hooks that the checkpoint was saved in; and bring counts
    to what they were, now that Lightning has read from them where to go on."""
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    if saved.cut == "epoch":
        epochs.completed -= 1
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1
    if saved.cut == "batch" and not saved.within and not validation_due(trainer):
        loop.on_advance_end(trainer.fit_loop._data_fetcher)  # pyright: ignore[reportArgumentType]
        loop.val_loop._has_run = loop.batch_progress.is_last_batch  # otherwise one more batch would be read
    if saved.moment == "step":
        loop.batch_progress.total.ready = loop.batch_progress.total.completed
    elif saved.moment == "validation":
        loop.val_loop.batch_progress.total.reset()
    elif saved.moment == "epoch":
        for part in (trainer.fit_loop, loop, loop.val_loop):
            part._restarting = False  # Lightning says it is where max_steps ends the training


def _stay_stopped(trainer: Trainer) -> None:
    """What EarlyStopping has decided is in its state; that training is to end is not."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, EarlyStopping) and callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            trainer.should_stop = True
            if trainer.is_global_zero:
                print(f"EarlyStopping had stopped this training: {callback.stopping_reason_message}; {FORCE}")


def _without_position(trainer: Trainer) -> list[str]:
    """Loaders that cannot be read from the midst of an epoch on."""
    combined: Any = trainer.fit_loop._combined_loader
    loaders = _loaders(trainer)
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
    return [loader.state_after(taken.processed) for loader in _loaders(trainer) if isinstance(loader, InUse)]


def _loaders(trainer: Trainer) -> list[Any]:
    return CombinedLoader(trainer.train_dataloader, "sequential").flattened

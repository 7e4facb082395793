"""Going on where Lightning's loops have been told to: what they would leave out is done, and only that."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lit_dp.engine.position import Position, move, next_to_read, validation_due
from lit_dp.engine.samplers import AsGiven, TrainBatches, stand
from lit_dp.engine.stateful import InUse

FORCE = "--resume.force (resume_force=True in Python) goes on all the same"


def read_from(trainer: Trainer, saved: Position | None) -> None:
    """Let the loaders begin where the training goes on. They do already, unless the module asked for them before the
    checkpoint was read: for the number of steps, in its `setup` or for a schedule in `configure_optimizers`."""
    loop = trainer.fit_loop
    (epoch, taken), loaders = next_to_read(trainer), training_loaders(trainer)
    fetcher: Any = loop._data_fetcher
    late = bool(loop._combined_loader_states_to_load) and loop.restarting
    for loader in loaders:
        batches = getattr(loader, "sampler", None)
        if isinstance(loader, InUse):
            loader.begin_at(taken)
        if isinstance(batches, TrainBatches | AsGiven):
            stand(batches, epoch, taken)
            late |= batches.begun != (epoch, batches.start)
        elif callable(set_epoch := getattr(batches, "set_epoch", None)):  # with use_distributed_sampler=False
            set_epoch(epoch)
            late |= epoch > 0
    if not late:
        return
    for loader in loaders if saved is not None else []:
        move(trainer, saved, loader)  # pyright: ignore[reportArgumentType]
    loop._load_combined_loader_states()
    iter(fetcher)


def finish(trainer: Trainer, saved: Position) -> None:
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
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in saved.saved_at:
            _remind(callback, trainer.global_step, saved)
    if saved.moment == "step":
        loop.batch_progress.total.ready = loop.batch_progress.total.completed
    elif saved.moment == "validation":
        loop.val_loop.batch_progress.total.reset()
    elif saved.moment == "epoch":
        for part in (trainer.fit_loop, loop, loop.val_loop):
            part._restarting = False  # Lightning says it is where max_steps ends the training


def _remind(checkpoint: ModelCheckpoint, steps: int, saved: Position) -> None:
    """What is not in its state. The one that saved would save again otherwise, in the midst of the next step and in the
    place of the file that is resumed from: it notes when it saved after it has."""
    key, every = checkpoint.state_key, checkpoint._every_n_train_steps
    waited = key in saved.deferred
    in_its_turn = saved.cut == "batch" and not waited and every > 0 and steps % every == 0
    after_validation = saved.moment == "other" and waited
    checkpoint._last_global_step_saved = steps if in_its_turn or after_validation else saved.saved_at[key]
    checkpoint._defer_save_until_validation = waited and not after_validation


def stay_stopped(trainer: Trainer, saved: Position | None) -> None:
    """What EarlyStopping has decided is in its state; that training is to end is not."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, EarlyStopping) and callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            say(trainer, f"EarlyStopping had stopped this training: {callback.stopping_reason_message}; {FORCE}")
            moment = saved.moment if saved is not None else "other"
            if moment == "epoch":
                trainer.should_stop = True
            elif moment == "other":  # after a validation: what follows one comes first
                _stop_at(trainer, trainer.fit_loop.epoch_loop, "on_advance_end")
            else:
                _stop_at(trainer, trainer.fit_loop, "on_advance_start")


def _stop_at(trainer: Trainer, loop: Any, method: str) -> None:
    """Once Lightning has taken up the epoch: otherwise it would not be ended as any other."""
    usual = getattr(loop, method)

    def stopping(*args: Any) -> None:
        trainer.should_stop = True
        setattr(loop, method, usual)
        usual(*args)

    setattr(loop, method, stopping)


def say(trainer: Trainer, line: str) -> None:
    if trainer.is_global_zero:
        print(line, flush=True)


def training_loaders(trainer: Trainer) -> list[Any]:
    """As they are shared out; none where nothing has been trained."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else CombinedLoader(loaders, "sequential").flattened

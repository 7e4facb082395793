"""Exact resume (law L4): a checkpoint says where it was saved and what was trained; what has changed is refused."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lit_dp.engine.peers import Peers
from lit_dp.engine.position import KEY, Moment, Position, described, place
from lit_dp.engine.samplers import TrainBatches
from lit_dp.engine.strategy import ExactDDPStrategy
from lit_dp.errors import ConfigError

LOADERS = "lit_dp.loaders"
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
        self._described: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """On all ranks, as Trainer.save_checkpoint."""
        checkpoint[KEY] = self._position(trainer).saved()
        if states := _loader_states(trainer):
            # Lightning keeps rank 0's alone (FAULTS 28).
            checkpoint[LOADERS] = Peers(trainer.global_rank, trainer.world_size).gather(states)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Before Lightning's loops read what they had counted."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self.saved = place(checkpoint, int(trainer.accumulate_grad_batches))
        if isinstance(trainer.strategy, ExactDDPStrategy):
            trainer.strategy.resumed = self.saved
        _give_back_loaders(checkpoint, trainer.global_rank)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises ConfigError, on all ranks, where the training would not be the one that was saved."""
        self._described = []
        if self.saved is None:
            return
        _follow_accumulation(trainer)
        now = self._position(trainer)
        changes = differences(self.saved, now)
        if self.saved.step:
            changes += _without_position(trainer)
        if changes and not self.force:
            raise ConfigError(f"{trainer.ckpt_path} cannot be resumed exactly: {'; '.join(changes)}; {FORCE}")
        if changes and trainer.is_global_zero:
            print(f"resumed all the same: {'; '.join(changes)}", flush=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _go_on(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _go_on(trainer)

    def _position(self, trainer: Trainer) -> Position:
        accumulate = int(trainer.accumulate_grad_batches)
        if not self._described:
            self._described = [described(loader, accumulate) for loader in _loaders(trainer)]
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        epochs: Any = trainer.fit_loop.epoch_progress.current
        done = epochs.processed == epochs.ready
        return Position(
            epoch=epochs.processed,
            step=0 if done else -(-progress.processed // accumulate),
            moment=self.moment,
            micro_batches=accumulate,
            world_size=trainer.world_size,
            seeded_draws=getattr(trainer.strategy, "seeded_draws", False),
            loaders=self._described,
        )


def differences(saved: Position, now: Position) -> list[str]:
    """What has changed so that the training cannot go on as it would have, in words."""
    changes = [] if now.seeded_draws and saved.seeded_draws else ["draws follow their history (seeded_draws is false)"]
    if len(saved.loaders) != len(now.loaders):
        return [*changes, f"{len(saved.loaders)} training loaders were read, now {len(now.loaders)}"]
    for before, after in zip(saved.loaders, now.loaders, strict=True):
        changes += [
            _change(what, before.get(what), value) for what, value in after.items() if before.get(what) != value
        ]
        if "ranks" not in after and saved.world_size != now.world_size:
            changes.append(f"processes were {saved.world_size} and are {now.world_size}")
    return changes


def _change(what: str, before: Any, after: Any) -> str:
    if what == "ranks":
        return f"ranks were {before} and are {after} (--trainer.strategy.virtual_ranks {before} keeps them)"
    if what.startswith("fingerprint"):
        return "the training dataset holds something else"
    return f"{what}: {before} before, {after} now"


def _without_position(trainer: Trainer) -> list[str]:
    """Loaders that cannot be read from the midst of an epoch on."""
    combined: Any = trainer.fit_loop._combined_loader
    blind, stateful = [], 0
    for loader in _loaders(trainer):
        batches = getattr(loader, "sampler", None)
        if _has_state(loader) and not isinstance(batches, TrainBatches):
            stateful += 1
        elif not hasattr(batches, "start"):
            blind.append(f"{type(loader).__name__} cannot say which batches were read (it has no state_dict)")
    if stateful and stateful != len(_loaders(trainer)):
        blind.append("loaders with and without a state of their own feed this training")
    if combined is not None and combined._mode == "max_size" and len(combined.flattened) > 1:
        blind.append("a CombinedLoader of mode max_size does not tell which of its loaders were exhausted")
    return blind


def _give_back_loaders(checkpoint: dict[str, Any], rank: int) -> None:
    """Put this rank's states of stateful loaders where Lightning looks for rank 0's."""
    fit: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    by_rank = checkpoint.get(LOADERS, [])
    fit.pop("combined_loader", None)
    if rank < len(by_rank):
        fit["combined_loader"] = by_rank[rank]


def _loader_states(trainer: Trainer) -> list[dict[str, Any]]:
    return [loader.state_dict() for loader in _loaders(trainer) if _has_state(loader)]


def _has_state(loader: Any) -> bool:
    scheduled = isinstance(getattr(loader, "sampler", None), TrainBatches)  # their position is the schedule's
    return not scheduled and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _loaders(trainer: Trainer) -> list[Any]:
    return CombinedLoader(trainer.train_dataloader, "sequential").flattened


def _go_on(trainer: Trainer) -> None:
    """The first thing after a resume has begun: from here on nothing is different from a run that was not stopped.
    Lightning would leave out ReduceLROnPlateau at the end of the epoch."""
    trainer.fit_loop._restarting = False


def _follow_accumulation(trainer: Trainer) -> None:
    """Lightning calls this callback at the start of an epoch only, hence not where one is resumed in its midst."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)

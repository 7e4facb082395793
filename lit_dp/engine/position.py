"""Where a training stands, as (epoch, optimizer step): a checkpoint says so whatever number of processes reads it.

Lightning counts the batches of one process. With k micro-batches a step on each process, k being another number on
another number of processes, these counts are multiplied when a checkpoint is read; and brought to a form from which
Lightning goes on with the next thing to do: a step, the validation that was under way, or an epoch.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from lit_dp.engine.buckets import Layout, layout
from lit_dp.engine.evaluation import scheduled
from lit_dp.engine.samplers import TrainBatches, stand

KEY = "lit_dp.position"
Moment = Literal["step", "validation", "epoch", "other"]
Counts = dict[str, int]


@dataclass(frozen=True)
class Position:
    """What a resume needs to know of the run that saved.

    Attributes:
        epoch: from 0.
        step: optimizer steps taken in it.
        moment: what comes next: a "step", the "validation" after a step from its beginning, or an "epoch"; "other" is
            what follows a validation.
        micro_batches: that each process runs a step.
        world_size: processes.
        seeded_draws: whether draws follow (seed, epoch, step, rank).
        loaders: what is read, one entry a training loader (see `differences.described`).
        cut: in the hooks at whose end it was saved, so that Lightning had still something to do there.
        within: micro-batches of a step that was not completed; what they left in the gradients is lost.
        all_reduce, buckets: how gradients met.
        saved_at: the step at which each ModelCheckpoint saved last.
        deferred: those that wait for the end of a validation.
    """

    epoch: int
    step: int
    moment: Moment
    micro_batches: int
    world_size: int
    seeded_draws: bool
    loaders: list[dict[str, Any]] = field(default_factory=list)
    cut: Literal["batch", "epoch"] | None = None
    within: int = 0
    all_reduce: str = "native"
    buckets: Layout = field(default_factory=list)
    saved_at: dict[str, int] = field(default_factory=dict)
    deferred: list[str] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """As plain containers, which load with weights_only=True."""
        return asdict(self)

    @classmethod
    def now(cls, trainer: Trainer, moment: Moment, loaders: list[dict[str, Any]]) -> "Position":
        """That of a running training; `moment` "other" is told from Lightning's counts. All ranks call it."""
        epochs: Any = trainer.fit_loop.epoch_progress.current
        progress = trainer.fit_loop.epoch_loop.batch_progress
        batches: Any = progress.current
        checkpoints = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        moment = _coming(trainer) if moment == "other" else moment
        micro_batches = accumulation(trainer, epochs.processed)
        over = progress.is_last_batch and batches.processed == batches.ready
        step, within = divmod(0 if moment == "epoch" else batches.processed, micro_batches)
        return cls(
            epoch=epochs.processed,
            step=step + bool(over and within),  # Lightning steps on the last batch of an epoch
            moment=moment,
            micro_batches=micro_batches,
            world_size=trainer.world_size,
            seeded_draws=getattr(trainer.strategy, "seeded_draws", False),
            loaders=loaders,
            cut=_cut(trainer),
            within=0 if over else within,
            all_reduce=getattr(trainer.strategy, "all_reduce", "native"),
            buckets=layout(trainer.strategy.model),
            saved_at={c.state_key: c._last_global_step_saved for c in checkpoints},
            deferred=[c.state_key for c in checkpoints if c._defer_save_until_validation],
        )


def accumulation(trainer: Trainer, epoch: int) -> int:
    """Micro-batches that each process runs a step in this epoch."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return int(trainer.accumulate_grad_batches)


def _coming(trainer: Trainer) -> Moment:
    """What comes next where a save was made in any hook."""
    loop = trainer.fit_loop.epoch_loop
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = loop.batch_progress.current
    seen: Any = loop.val_loop.batch_progress.current
    if epochs.started == epochs.processed:
        return "epoch"
    if trainer.validating:
        return "validation" if seen.completed < max(1, seen.ready) else "other"
    if batches.completed == batches.processed < batches.ready:
        return "step"
    if batches.completed < batches.processed:
        return "validation" if loop.batch_progress.is_last_batch or validation_due(trainer) else "step"
    return "other"


def _cut(trainer: Trainer) -> Literal["batch", "epoch"] | None:
    epochs: Any = trainer.fit_loop.epoch_progress.current
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches: Any = progress.current
    if epochs.completed < epochs.processed:
        return "epoch" if progress.is_last_batch else None
    return "batch" if batches.completed < batches.processed else None


def validation_due(trainer: Trainer) -> bool:
    """Whether Lightning validates after the batch that was taken last."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def place(checkpoint: dict[str, Any], trainer: Trainer) -> Position | None:
    """Rewrite Lightning's counts in a checkpoint for the processes of `trainer`.

    Returns:
        What the checkpoint says of its position; None where it was saved without one.
    """
    saved = Position(**checkpoint[KEY]) if KEY in checkpoint else None
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None:
        return saved
    progress = loops["epoch_loop.batch_progress"]
    moment = saved.moment if saved is not None else _moment(loops)
    epoch = saved.epoch if saved is not None else loops["epoch_progress"]["current"]["processed"]
    micro_batches = accumulation(trainer, epoch)
    _rescale(progress, saved.micro_batches if saved is not None else micro_batches, micro_batches)
    if moment != "other":
        for counts in (progress["total"], progress["current"]):
            counts.update(dict.fromkeys(counts, counts["processed"]))
    if moment == "epoch":
        _before_epoch(loops)
    elif moment == "step":
        # Before the next batch begins. Lightning counts a step more for its loggers where it restarts so.
        progress["is_last_batch"] = False
        progress["total"]["ready"] += 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        _set_validation(loops, begun=0)
    elif moment == "validation":
        _set_validation(loops, begun=1)
    return saved


def _moment(loops: dict[str, Any]) -> Moment:
    """Of a checkpoint that does not say it."""
    progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    if epochs["processed"] == epochs["started"]:
        return "epoch"
    # Of a checkpoint that was saved when an epoch's last batch ended Lightning leaves out the validation and the end of
    # the epoch.
    at_batch_end = progress["total"]["completed"] < progress["total"]["processed"]
    return "validation" if at_batch_end and progress["is_last_batch"] else "other"


def _rescale(progress: dict[str, Any], before: int, now: int) -> None:
    """Counts of batches from `before` to `now` a step; of a step that was not completed none remain."""
    total, current = progress["total"], progress["current"]
    taken = current["processed"]
    over = progress["is_last_batch"] and taken == current["ready"]
    whole = taken if over and before == now else taken // before * now
    earlier = (total["processed"] - taken) * now // before
    _add(total, earlier + whole - total["processed"])
    _add(current, whole - taken)


def _before_epoch(loops: dict[str, Any]) -> None:
    """No epoch is under way. Lightning's own count is still that of the one which is over (PL 21938, FAULTS 6)."""
    for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
        counts.update(dict.fromkeys(counts, counts["processed"]))
    progress = loops["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], 0)
    progress["is_last_batch"] = False
    _set_validation(loops, begun=0)


def _set_validation(loops: dict[str, Any], begun: int) -> None:
    """Make the validation loop begin anew; `begun` says that one was under way."""
    progress = loops["epoch_loop.val_loop.batch_progress"]
    progress["total"] = {"ready": begun, "completed": 0, "started": begun, "processed": 0}
    progress["current"] = dict.fromkeys(progress["total"], 0)
    progress["is_last_batch"] = False


def _add(counts: Counts, number: int) -> None:
    for name in counts:
        counts[name] += number


def next_to_read(trainer: Trainer) -> tuple[int, int]:
    """The epoch that is read next, and how many batches of it this process has taken already.

    Lightning begins to read the loaders of a training before it counts the epoch (PL 21938, FAULTS 6): what counts is
    which epochs were processed.
    """
    loop = trainer.fit_loop
    taken: Any = loop.epoch_loop.batch_progress.current
    epochs: Any = loop.epoch_progress.current
    in_midst = loop.restarting and epochs.processed < epochs.ready
    return epochs.processed, taken.processed if in_midst else 0


def move(trainer: Trainer, saved: Position, loader: Any) -> None:
    """Let a resume that was forced, with another number of samples a step, go on at the step that holds the next unseen
    sample. Called before the loader is read."""
    batches = scheduled(loader)
    step_before = saved.loaders[0].get("samples a step", 0) if len(saved.loaders) == 1 else 0
    if not isinstance(batches, TrainBatches) or not step_before or not batches.start:
        return
    k, accumulate = len(batches.share.virtual_ranks), accumulation(trainer, saved.epoch)
    step_now = batches.schedule.global_batch * max(1, accumulate // k)
    if step_now == step_before:
        return
    steps = min(saved.step * step_before // step_now, len(batches) // accumulate)
    stand(batches, batches.epoch, steps * accumulate)
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    _add(current.__dict__, batches.start - current.processed)  # pyright: ignore[reportAttributeAccessIssue]

"""Where a training stands, as (epoch, optimizer step): a checkpoint says so whatever number of processes reads it.

Lightning counts the batches of one process. With k micro-batches a step on each process, k being another number on
another number of processes, these counts are multiplied when a checkpoint is read; and brought to a form from which
Lightning goes on with the next thing to do: a step, or the validation that was under way.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning.pytorch import Trainer

from lit_dp.engine.agreement import fingerprint
from lit_dp.engine.evaluation import scheduled
from lit_dp.engine.samplers import AsGiven, TrainBatches
from lit_dp.engine.wrapping import Wrapping

KEY = "lit_dp.position"
Moment = Literal["step", "validation", "other"]
Counts = dict[str, int]


@dataclass(frozen=True)
class Position:
    """What a resume needs to know of the run that saved.

    Attributes:
        epoch: from 0.
        step: optimizer steps taken in it.
        moment: what comes next: a "step", or the "validation" after a step from its beginning; "other" is whatever
            hook the save was called in.
        micro_batches: that each process runs a step.
        world_size: processes.
        seeded_draws: whether draws follow (seed, epoch, step, rank).
        loaders: what is read, one entry a training loader (see `described`).
    """

    epoch: int
    step: int
    moment: Moment
    micro_batches: int
    world_size: int
    seeded_draws: bool
    loaders: list[dict[str, Any]] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """As plain containers, which load with weights_only=True."""
        return asdict(self)


def described(loader: Any, accumulate: int) -> dict[str, Any]:
    """What must not change of a training loader, in words that a person reads when it has.

    Args:
        loader: as the strategy has shared it out.
        accumulate: micro-batches that each process runs a step.
    """
    batches = getattr(loader, "sampler", None)
    if isinstance(batches, TrainBatches):
        schedule, k = batches.schedule, len(batches.share.virtual_ranks)
        return {
            "samples in the training dataset": schedule.samples,
            "samples a step": schedule.global_batch * max(1, accumulate // k),
            "ranks": schedule.virtual_ranks,
            "shuffle": schedule.shuffle,
            "seed": schedule.seed,
            "tail": schedule.tail,
            "custom sampler": batches.draw is not None,
            "fingerprint of the training dataset": fingerprint(_own(loader.dataset)),
        }
    kind = "a sampler that shares out by itself" if isinstance(batches, AsGiven) else "a stream"
    return {"reads": kind, "batches a step": accumulate}


def _own(dataset: Any) -> Any:
    while isinstance(dataset, Wrapping):
        dataset = dataset.inner
    return dataset


def place(checkpoint: dict[str, Any], micro_batches: int) -> Position | None:
    """Rewrite Lightning's counts in a checkpoint for processes that run `micro_batches` a step each.

    Returns:
        What the checkpoint says of its position; None where it was saved without one.
    """
    saved = Position(**checkpoint[KEY]) if KEY in checkpoint else None
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None:
        return saved
    progress = loops["epoch_loop.batch_progress"]
    if saved is not None and saved.micro_batches != micro_batches:
        for counts in (progress["total"], progress["current"]):
            _add(counts, counts["processed"] // saved.micro_batches * micro_batches - counts["processed"])
    moment = _moment(saved, progress, loops)
    if moment == "step":
        # Before the next batch begins. Lightning counts a step more for its loggers where it restarts so.
        progress["is_last_batch"] = False
        progress["current"]["ready"] = progress["current"]["processed"]
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        _set_validation(loops, begun=0)
    elif moment == "validation":
        progress["total"]["completed"] = progress["total"]["processed"]
        progress["current"]["completed"] = progress["current"]["processed"]
        _set_validation(loops, begun=1)
    return saved


def _moment(saved: Position | None, progress: dict[str, Any], loops: dict[str, Any]) -> Moment:
    total, epochs = progress["total"], loops["epoch_progress"]["current"]
    if saved is not None and saved.moment != "other":
        return saved.moment if epochs["processed"] < epochs["ready"] else "other"
    at_batch_end = total["ready"] == total["started"] == total["processed"] == total["completed"] + 1
    # Of a checkpoint that was saved when an epoch's last batch ended Lightning leaves out the validation and the end of
    # the epoch.
    return "validation" if at_batch_end and progress["is_last_batch"] else "other"


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

    Lightning begins to read the loaders of a resumed training while its own count is still that of the epoch which the
    checkpoint was saved at the end of (PL 21938, FAULTS 6): what counts is which epochs were processed.
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
    k, accumulate = len(batches.share.virtual_ranks), int(trainer.accumulate_grad_batches)
    step_now = batches.schedule.global_batch * max(1, accumulate // k)
    if step_now == step_before:
        return
    steps = min(saved.step * step_before // step_now, len(batches) // accumulate)
    batches.start = steps * accumulate
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    _add(current.__dict__, batches.start - current.processed)  # pyright: ignore[reportAttributeAccessIssue]

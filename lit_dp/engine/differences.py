"""What must be the same for a training to go on as if it had not been stopped, and what of it has changed, in words."""

from typing import Any

from lit_dp.collectives import Algorithm
from lit_dp.engine.agreement import fingerprint
from lit_dp.engine.position import Position
from lit_dp.engine.samplers import AsGiven, TrainBatches
from lit_dp.engine.virtual_ranks import TREES
from lit_dp.engine.wrapping import Wrapping

SAMPLES, CONTENT = "samples in the training dataset", "fingerprint of the training dataset"
Described = dict[str, Any]


def content(loader: Any) -> Described:
    """What a training loader reads, in words that a person reads when it has changed.

    Args:
        loader: as the strategy has shared it out.
    """
    batches = getattr(loader, "sampler", None)
    if isinstance(batches, TrainBatches):
        return {
            SAMPLES: batches.schedule.samples,
            "ranks": batches.schedule.virtual_ranks,
            "shuffle": batches.schedule.shuffle,
            "seed": batches.schedule.seed,
            "tail": batches.schedule.tail,
            "custom sampler": batches.draw is not None,
            CONTENT: fingerprint(_own(loader.dataset)),
        }
    size = {"batch size": getattr(loader, "batch_size", None)}
    if isinstance(batches, AsGiven):
        of_sampler = getattr(batches.inner, "sampler", batches.inner)
        known = {name: getattr(of_sampler, name, None) for name in ("seed", "shuffle", "drop_last")}
        dataset = _own(loader.dataset)
        return {
            "reads": type(of_sampler).__name__,
            **size,
            **known,
            SAMPLES: len(dataset),
            CONTENT: fingerprint(dataset),
        }
    return {"reads": "a stream", **size}


def described(of_loader: Described, loader: Any, accumulate: int) -> Described:
    """`content`, and how much of it a step takes: `accumulate` micro-batches on each process."""
    batches = getattr(loader, "sampler", None)
    if not isinstance(batches, TrainBatches):
        return {**of_loader, "batches a step": accumulate}
    k = len(batches.share.virtual_ranks)
    return {"samples a step": batches.schedule.global_batch * max(1, accumulate // k), **of_loader}


def _own(dataset: Any) -> Any:
    while isinstance(dataset, Wrapping):
        dataset = dataset.inner
    return dataset


def differences(saved: Position, now: Position, another_dataset: bool = False) -> list[str]:
    """What has changed so that the training cannot go on as it would have.

    Args:
        saved: by the run that was stopped.
        now: of the one that goes on.
        another_dataset: whether it may read another dataset than the one of the epoch before.
    """
    changes = [] if now.seeded_draws and saved.seeded_draws else ["draws follow their history (seeded_draws is false)"]
    if saved.within:
        batches = "micro-batch" if saved.within == 1 else "micro-batches"
        changes.append(f"it was saved within a step, after {saved.within} {batches} of {saved.micro_batches}")
    if not saved.loaders:  # nothing had been trained
        return changes
    if len(saved.loaders) != len(now.loaders):
        return [*changes, f"{len(saved.loaders)} training loaders were read, now {len(now.loaders)}"]
    for before, after in zip(saved.loaders, now.loaders, strict=True):
        changed = [what for what, value in after.items() if before.get(what) != value]
        if another_dataset:
            changed = [what for what in changed if what not in (SAMPLES, CONTENT)]
        if SAMPLES in changed:
            changed = [what for what in changed if what != CONTENT]
        changes += [_change(what, before.get(what), after[what]) for what in changed]
        if "ranks" not in after and saved.world_size != now.world_size:
            changes.append(f"processes were {saved.world_size} and are {now.world_size}")
    return changes


def _change(what: str, before: Any, after: Any) -> str:
    if what == "ranks":
        power = isinstance(before, int) and before & (before - 1) == 0
        return f"ranks were {before} and are {after}" + (
            f" (--trainer.strategy.virtual_ranks {before} keeps them)" if power else ""
        )
    if what == CONTENT:
        return "the training dataset holds something else"
    return f"{what}: {before} before, {after} now"


def rounding(saved: Position, now: Position) -> list[str]:
    """A line where gradients are added in another order than before: the training is the same, but for the last bits of
    sums."""
    ranks = max([loader.get("ranks", saved.world_size) for loader in saved.loaders], default=1)
    before, after = (_adding(position, ranks) for position in (saved, now))
    return [f"gradients met by {before}, and do by {after}: the last bits of their sums may differ"] * (before != after)


def _adding(position: Position, ranks: int) -> str:
    name = position.all_reduce
    if name in TREES or (ranks <= 2 and name in {algorithm.value for algorithm in Algorithm}):
        return "a binary tree"
    return f"{name} on {position.world_size} processes"


def overridden(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for every hyperparameter that is not the checkpoint's."""
    both = [name for name in saved if name in now and not name.startswith("_") and saved[name] != now[name]]
    return [f"hyperparameter {name}: {now[name]!r} is used, {saved[name]!r} is the checkpoint's" for name in both]

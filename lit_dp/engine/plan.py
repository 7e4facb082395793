"""The plan of a training: every derived number once, before it costs device hours."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn

from lit_dp.engine.launch import detect
from lit_dp.engine.samplers import TrainBatches

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DistributedDataParallel's, where bucket_cap_mb is not given."""
HORIZONS = ("total", "total_steps", "T_max", "total_iters")
"""Attributes in which schedulers keep how long they run."""


@dataclass(frozen=True)
class Placement:
    """Where the training runs: `hosts` x `devices` processes of an `accelerator`, `threads` CPU threads each."""

    launcher: str
    hosts: int
    devices: int
    accelerator: str
    threads: str

    @property
    def world_size(self) -> int:
        return self.hosts * self.devices


def plan_rows(
    placement: Placement, trainer: Trainer, module: nn.Module, batches: TrainBatches | None
) -> list[tuple[str, str]]:
    """(name, what) rows of the plan; nothing is communicated and nothing is run.

    Args:
        placement: where it runs.
        trainer: its settings, and its strategy's optimizers and schedulers.
        module: what is trained.
        batches: what a process reads; None where no single schedule feeds the training.
    """
    epochs = trainer.max_epochs
    k = len(batches.share.virtual_ranks) if batches is not None else 1
    accumulate = k if k > 1 else trainer.accumulate_grad_batches
    rows = [("launcher", placement.launcher), ("processes", _processes(placement))]
    steps = None
    if batches is not None:
        limit = trainer.num_training_batches  # infinite before the loaders are set up
        micro_batches = len(batches) if limit in (0, math.inf) else min(int(limit), len(batches))
        steps = -(-micro_batches // accumulate)
        rows += _virtual_rows(placement, batches)
        rows += _data_rows(batches, accumulate, micro_batches, steps)
        if epochs is not None and epochs > 0:
            rows.append(("training", f"{epochs:,} epochs x {steps:,} = {epochs * steps:,} steps"))
    for optimizer in trainer.strategy.optimizers:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        rows.append(
            ("learning rate", f"{', '.join(f'{rate:.4g}' for rate in rates)} at the start ({type(optimizer).__name__})")
        )
    rows += [("lr schedule", _schedule(entry, epochs, steps)) for entry in trainer.strategy.lr_scheduler_configs]
    if placement.world_size > 1:
        total, buckets = gradient_buckets(module)
        rows.append(("all-reduce", f"{total:,} bytes of gradients a step, in {_count(buckets, 'bucket')}"))
    return rows


def _processes(placement: Placement) -> str:
    shape = f"{_count(placement.hosts, 'host')} x {_count(placement.devices, 'device')} = {placement.world_size}"
    return f"{shape} ({placement.accelerator}), CPU threads each: {placement.threads}"


def _virtual_rows(placement: Placement, batches: TrainBatches) -> list[tuple[str, str]]:
    ranks, k = batches.share.ranks, len(batches.share.virtual_ranks)
    if ranks == placement.world_size:
        return []
    return [
        (
            "virtual ranks",
            f"{ranks} on {_count(placement.world_size, 'process')}: {_count(k, 'micro-batch')} each a step",
        )
    ]


def _data_rows(batches: TrainBatches, accumulate: int, micro_batches: int, steps: int) -> list[tuple[str, str]]:
    schedule, k = batches.schedule, len(batches.share.virtual_ranks)
    size, ranks, windows = schedule.per_rank_batch, schedule.virtual_ranks, accumulate // k
    a_step = size * ranks * windows
    of_it = [f"{what} {count:,}" for what, count in (("pads", schedule.padded), ("drops", schedule.dropped)) if count]
    left = len(batches) - micro_batches
    cut = [f"stops {left:,} batches before the end"] if left else []
    last = _last_step(batches, accumulate, micro_batches)
    short = [f"the last of {last:,}"] if last != a_step else []
    what_rank = "device" if k == 1 else "virtual rank"
    what = "a custom sampler's draw" if batches.draw is not None else "shuffled" if schedule.shuffle else "in order"
    return [
        ("batch", f"{size:,} a {what_rank} x {ranks:,} x {windows:,} accumulated = {a_step:,} a step"),
        ("epoch", ", ".join([f"{schedule.samples:,} samples in {_count(steps, 'step')}", *short, *of_it, *cut])),
        ("order", f"{what}, seed {schedule.seed}"),
    ]


def _last_step(batches: TrainBatches, accumulate: int, micro_batches: int) -> int:
    start = (micro_batches - 1) // accumulate * accumulate
    return sum(sum(batches.counts(index)) for index in range(start, micro_batches))


def _schedule(config: LRSchedulerConfig, epochs: int | None, steps: int | None) -> str:
    scheduler, by_epoch = config.scheduler, config.interval == "epoch"
    name = f"{type(scheduler).__name__} once {'an epoch' if by_epoch else 'a step'}"
    horizon = next((getattr(scheduler, n) for n in HORIZONS if isinstance(getattr(scheduler, n, None), int)), None)
    of_run = epochs if by_epoch else epochs * steps if epochs and steps else None
    if horizon is None or of_run is None or of_run < 0:
        return name
    same = "" if horizon == of_run else f": it ends {'before' if horizon < of_run else 'after'} the training"
    return f"{name}, over {horizon:,} of {of_run:,}{same}"


def gradient_buckets(module: nn.Module) -> tuple[int, int]:
    """Bytes of all gradients, and the number of buckets in which DistributedDataParallel reduces them.

    As in its reducer: parameters in reverse order; a bucket closes when it has reached its limit.
    """
    total, buckets, filled, limit = 0, 0, 0, FIRST_BUCKET_BYTES
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        size = parameter.numel() * parameter.element_size()
        total, filled = total + size, filled + size
        if filled >= limit:
            buckets, filled, limit = buckets + 1, 0, BUCKET_BYTES
    return total, buckets + bool(filled)


def table(rows: list[tuple[str, str]]) -> str:
    """Rows as aligned lines."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {what}" for name, what in rows)


class PrintPlan(Callback):
    """Prints the plan on rank 0 when training starts."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir  # all ranks: it broadcasts
        if not trainer.is_global_zero:
            return
        launcher = getattr(trainer, "launch", None) or detect()
        threads = getattr(trainer, "cpu_threads", str(torch.get_num_threads()))
        placement = Placement(
            launcher.why, trainer.num_nodes, trainer.num_devices, trainer.strategy.root_device.type, threads
        )
        rows = plan_rows(placement, trainer, pl_module, getattr(trainer.strategy, "train_batches", None))
        resumes = f"from {trainer.ckpt_path}, step {trainer.global_step:,}" if trainer.ckpt_path else "no"
        rows += [("run folder", str(Path(folder)) if folder else "none: nothing is written"), ("resumes", resumes)]
        print(table(rows), flush=True)


def _count(number: int, thing: str) -> str:
    plural = "es" if thing.endswith(("s", "ch")) else "s"
    return f"{number:,} {thing}{'' if number == 1 else plural}"

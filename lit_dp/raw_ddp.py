"""The training loop written by hand with DistributedDataParallel: what Lightning's Trainer does for `module.py`.

    torchrun --nproc-per-node 2 -m lit_dp.raw_ddp --config digits

It takes the same steps, bit for bit, as `python -m lit_dp fit --config digits` on as many processes (law L1,
tests/test_parity.py). It is written to be read: each line that a tutorial tends to get wrong says why.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lit_dp.collectives.hooks import GradientExchange, bucket_limits, register
from lit_dp.engine.loaders import follow
from lit_dp.engine.optimizers import optimizer_and_schedulers, step_schedulers
from lit_dp.engine.parity import StepReport, sha256
from lit_dp.engine.randomness import seed_step
from lit_dp.engine.samplers import AsGiven
from lit_dp.errors import ConfigError


class TrainingStep(nn.Module):
    """DDP reduces gradients only for what runs through its own `forward`: so make `training_step` that forward."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, batch_idx: int) -> Tensor:
        output: Any = self.module.training_step(batch, batch_idx)
        return output["loss"] if isinstance(output, dict) else output


def fit(
    module: LightningModule,
    datamodule: LightningDataModule,
    *,
    epochs: int,
    accumulate: int = 1,
    clip_norm: float | None = None,
    bf16: bool = False,
    all_reduce: str = "native",
    seed: int = 0,
    seeded_draws: bool = False,
    on_step: Callable[[StepReport], None] | None = None,
    on_epoch: Callable[[int], None] | None = None,
    save_to: Path | None = None,
) -> None:
    """Train `module` in place. Every rank calls this, with the variables set that torchrun sets.

    Args:
        module: anything with `training_step` and `configure_optimizers` (one optimizer; schedulers per epoch or step).
        datamodule: its `train_dataloader` gives the dataset, batch size per rank, workers and collate function.
        epochs: passes over the dataset.
        accumulate: micro-batches a step; the gradient is the mean over all samples of the step.
        clip_norm: largest 2-norm of the gradient, taken over all parameters.
        bf16: run the forward pass in bfloat16 autocast.
        all_reduce: how gradients meet: the backend's own way, or one of `lit_dp.collectives.Algorithm`.
        seed: of the order of samples, equal on all ranks, and of dropout.
        seeded_draws: dropout follows (seed, epoch, micro-batch, rank), and draws in the dataset (seed, epoch, sample),
            as in `exact_ddp`; without it all ranks drop out alike, as after any `seed_everything` equal on all ranks.
        on_step: called on every rank after each optimizer step.
        on_epoch: called on every rank after each epoch, with the process group still up.
        save_to: where rank 0 writes the weights at the end.
    """
    with process_group() as device:
        seed_everything(seed, verbose=False)
        set_up_data(datamodule)
        loader, sampler = sharded(datamodule.train_dataloader(), seed)
        if seeded_draws:
            loader = follow(loader, AsGiven(loader.batch_sampler), seed)
        module.to(device).train()
        module.log = module.log_dict = lambda *args, **kwargs: None  # there is no Trainer to log to
        model = DistributedDataParallel(
            TrainingStep(module),
            device_ids=[device.index] if device.type == "cuda" else None,
            **bucket_limits(all_reduce, module, device),
        )
        exchange = register(model, all_reduce, device)
        optimizer, schedulers = optimizer_and_schedulers(module)
        autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)

        step, losses = 0, []
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined] # without it every epoch has the order of the first
            for index, batch in enumerate(loader):
                if index % accumulate == 0:
                    optimizer.zero_grad()
                batch = datamodule.on_after_batch_transfer(move_data_to_device(batch, device), 0)
                last = (index + 1) % accumulate == 0 or index + 1 == len(loader)
                if seeded_draws:
                    seed_step(seed, epoch, index, dist.get_rank(), device=device)
                # The forward pass belongs inside no_sync too: it is forward that arms the reduction of backward.
                with nullcontext() if last else model.no_sync():
                    with autocast:
                        loss = model(batch, index)  # through the wrapper: model.module(...) would not synchronise
                    loss = loss / accumulate
                    # DDP averages gradients over ranks here, not in optimizer.step()
                    (loss * correction(index, accumulate, loader, sampler)).backward()
                losses.append(loss)
                if not last:
                    continue
                if clip_norm is not None:  # after the reduction, or each rank would clip by its own norm
                    nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
                optimizer.step()
                step_schedulers(schedulers, "step")
                if on_step is not None:
                    on_step(StepReport.of(module, optimizer, epoch, step, losses))
                step, losses = step + 1, []
            step_schedulers(schedulers, "epoch")
            if on_epoch is not None:
                on_epoch(epoch)
                module.train()

        if isinstance(exchange, GradientExchange):
            exchange.close()
        if save_to is not None and dist.get_rank() == 0:  # replicas are equal: one rank writes
            torch.save(model.module.module.state_dict(), save_to)  # model.state_dict() would prefix every name


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the other ranks; yields this rank's device. Leaves in order: an undestroyed gloo group aborts some exits."""
    if "RANK" not in os.environ:
        raise ConfigError("raw_ddp needs a launcher: torchrun --nproc-per-node 2 -m lit_dp.raw_ddp --config digits")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def set_up_data(datamodule: LightningDataModule) -> None:
    """Download on one process a host, then build the datasets on all."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        datamodule.prepare_data()
    dist.barrier()
    datamodule.setup("fit")


def sharded(loader: DataLoader, seed: int) -> tuple[DataLoader, DistributedSampler]:
    """The same loader, reading only this rank's share.

    The seed must be equal on all ranks: the shards are disjoint because all ranks draw the same permutation and
    rank r takes every W-th sample of it, from the r-th on.
    """
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = DistributedSampler(loader.dataset, shuffle=shuffle, seed=seed, drop_last=loader.drop_last)  # type: ignore
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        drop_last=loader.drop_last,
    ), sampler


def correction(index: int, accumulate: int, loader: DataLoader, sampler: DistributedSampler) -> float:
    """What micro-batch `index` counts in the mean over its accumulation window, times `accumulate`.

    1 in a full window, where dividing by `accumulate` is right. The last window of an epoch may be shorter, and its
    last micro-batch smaller: without this factor its gradient would be too small.
    """
    batch_size = loader.batch_size or 1
    samples = len(sampler) // batch_size * batch_size if loader.drop_last else len(sampler)
    window_start = index // accumulate * accumulate * batch_size
    window = min(accumulate * batch_size, samples - window_start)
    return accumulate * min(batch_size, samples - index * batch_size) / window


def accuracy(module: LightningModule, datamodule: LightningDataModule) -> float:
    """Share of validation samples whose largest logit is the label, over all ranks, each sample counted once.

    DistributedSampler would pad the shares to equal length and count some samples twice: so deal them out by hand.
    No reduction happens inside the loop, so ranks may have different numbers of batches.
    """
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's running statistics: DDP levels them only at the next forward
    loader = datamodule.val_dataloader()
    share = range(dist.get_rank(), len(loader.dataset), dist.get_world_size())
    counts = torch.zeros(2, dtype=torch.int64, device=module.device)
    module.eval()
    with torch.no_grad():
        for batch in DataLoader(loader.dataset, loader.batch_size, sampler=share, collate_fn=loader.collate_fn):
            batch = move_data_to_device(batch, module.device)
            inputs, labels, *_ = datamodule.on_after_batch_transfer(batch, 0)
            counts[0] += (module(inputs).argmax(dim=1) == labels).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    """Train what a config describes: model, data and the trainer's plain settings are read, the rest is this file."""
    from lit_dp.cli import LitCLI
    from lit_dp.engine.strategy import ExactDDPStrategy

    cli = LitCLI(run=False)
    # As that strategy: its seeds of draws and its all-reduce, so that bits are equal
    exact = cli.trainer.strategy if isinstance(cli.trainer.strategy, ExactDDPStrategy) else None
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if exact is not None and exact.virtual_ranks not in (None, world_size):
        raise ConfigError(
            f"virtual_ranks is {exact.virtual_ranks}, and {world_size} processes run: in this loop a rank is a process;"
            f" torchrun --nproc-per-node {exact.virtual_ranks}"
        )

    def report(epoch: int) -> None:
        share = accuracy(cli.model, cli.datamodule)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}  val/acc {share:.4f}  weights SHA-256 {sha256(cli.model.state_dict())[:16]}",
                flush=True,
            )

    fit(
        cli.model,
        cli.datamodule,
        epochs=cli.trainer.max_epochs or 1,
        accumulate=cli.trainer.accumulate_grad_batches,
        clip_norm=cli.trainer.gradient_clip_val,
        bf16=cli.trainer.precision == "bf16-mixed",
        seed=cli.config.seed_everything,
        seeded_draws=exact is not None and exact.seeded_draws,
        all_reduce=exact.all_reduce if exact is not None else "native",
        on_epoch=report,
        save_to=Path(f"{cli.config.name}.pt"),
    )
    if os.environ["RANK"] == "0":
        print(f"weights in {cli.config.name}.pt")


if __name__ == "__main__":
    from lit_dp.__main__ import guarded

    guarded(main)

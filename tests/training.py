"""Small trainings for tests: the same module and data through Lightning's Trainer and through the raw loop."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dp import LitClassifier, Trainer, raw_ddp
from lit_dp.engine.parity import StepReporter, Trace

SEED = 3


class Points(LightningDataModule):
    """`samples` random 6x6 images of 4 classes, the same in every process."""

    def __init__(self, samples: int = 64, batch_size: int = 4, drop_last: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(samples, 1, 6, 6, generator=generator)
        labels = torch.randint(4, (samples,), generator=generator)
        self.dataset = TensorDataset(images, labels, torch.arange(samples))
        self.batch_size, self.drop_last = batch_size, drop_last

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, self.batch_size, shuffle=True, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, self.batch_size)


def network() -> nn.Module:
    """Everything that tends to differ between two loops: BatchNorm's buffers, dropout's draws, unused biases."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 4)
    )


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


@dataclass(frozen=True)
class Job:
    """One small training."""

    samples: int = 64
    batch_size: int = 4
    epochs: int = 2
    optimizer: Callable[..., Any] = momentum
    lr_scheduler: Callable[..., Any] | None = None
    lr_interval: str = "epoch"
    accumulate: int = 1
    clip_norm: float | None = None
    bf16: bool = False
    validate: bool = False
    drop_last: bool = False

    def build(self) -> tuple[LitClassifier, Points]:
        seed_everything(SEED, verbose=False)
        module = LitClassifier(network(), 4, self.optimizer, self.lr_scheduler, self.lr_interval)  # type: ignore
        return module, Points(self.samples, self.batch_size, self.drop_last)


def through_lightning(job: Job, strategy: Any = "ddp", callbacks: Any = ()) -> Trace:
    """Digests of every step, on this rank, of Lightning's Trainer."""
    trace: Trace = []
    module, data = job.build()
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=job.epochs,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=job.clip_norm,
        precision="bf16-mixed" if job.bf16 else "32-true",
        limit_val_batches=None if job.validate else 0,
        num_sanity_val_steps=0,
        callbacks=[StepReporter(lambda step: trace.append(step.digests())), *callbacks],
    )
    trainer.fit(module, datamodule=data)
    return trace


def through_exact(job: Job) -> Trace:
    """Digests of every step, on this rank, of our strategy."""
    return through_lightning(job, "exact_ddp")


def through_raw_loop(job: Job, loop: Any = raw_ddp, step_seeds: bool = False, all_reduce: str = "native") -> Trace:
    """Digests of every step, on this rank, of the raw loop (or of a faulty copy of it)."""
    trace: Trace = []
    module, data = job.build()
    validate = partial(_accuracy, loop, module, data) if job.validate else None
    loop.fit(
        module,
        data,
        epochs=job.epochs,
        accumulate=job.accumulate,
        clip_norm=job.clip_norm,
        bf16=job.bf16,
        all_reduce=all_reduce,
        seed=SEED,
        seeded_draws=step_seeds,
        on_step=lambda step: trace.append(step.digests()),
        on_epoch=validate,
    )
    return trace


def _accuracy(loop: Any, module: LitClassifier, data: Points, epoch: int) -> Tensor:
    return loop.accuracy(module, data)


def quiet_trainer(**kwargs: Any) -> Trainer:
    """A CPU Trainer on all ranks of the process that it is built in, which writes and prints nothing."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return Trainer(**{"accelerator": "cpu", **dict.fromkeys(off, False), **kwargs})  # pyright: ignore


def faulty_copy(module: Any, right: str, wrong: str) -> Any:
    """The module with `right`, which must stand in its source once, replaced by `wrong`."""
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1, f"{right!r} stands {source.count(right)} times in {module.__file__}"
    spec = importlib.util.spec_from_loader("faulty", loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules["faulty"] = copy  # dataclasses look their module up
    exec(compile(source.replace(right, wrong), "faulty", "exec"), copy.__dict__)
    return copy


def leave() -> None:
    """Destroy the process group that a Trainer leaves behind."""
    if dist.is_initialized():
        dist.destroy_process_group()

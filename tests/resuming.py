"""Small trainings that are stopped and resumed, for the tests of law L4: what each showed, and where two part."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric
from torchmetrics.classification import MulticlassAccuracy

from lit_dp.engine.checkpoints import save
from lit_dp.engine.ledger import Ledger
from lit_dp.engine.parity import StepReport, sha256
from lit_dp.engine.strategy import ExactDDPStrategy
from tests.ranks import run_ranks
from tests.training import quiet_trainer

V4 = {"virtual_ranks": 4}


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator))


def validation() -> DataLoader:
    """As many batches on every rank, so that all can save before any of them."""
    return DataLoader(rows(8), 2)


class Everything(LightningModule):
    """What a resume could forget: BatchNorm, dropout, momenta, a schedule by steps, means of steps and of epochs,
    a value that is logged in every second step only, a torchmetrics object that is logged, and one that is not."""

    def __init__(self, schedule: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Unflatten(1, (8, 2)), nn.BatchNorm1d(8), nn.Flatten(), nn.ReLU(), nn.Dropout(0.3)
        )
        self.head = nn.Linear(16, 3)
        self.accuracy, self.largest, self.right = MulticlassAccuracy(3), MaxMetric(), MulticlassAccuracy(3)
        self.schedule = schedule or (lambda optimizer: {"scheduler": cosine(optimizer), "interval": "step"})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        outputs = self.head(self.net(inputs))
        loss = nn.functional.cross_entropy(outputs, labels)
        size: dict[str, Any] = {"batch_size": len(labels), "sync_dist": True}
        self.log("train/loss", loss, on_step=True, on_epoch=True, **size)
        self.log("train/most", loss, on_step=False, on_epoch=True, reduce_fx="max", **size)
        if self.global_step % 2 == 0:
            self.log("train/even", loss, on_step=True, on_epoch=True, **size)
        self.accuracy.update(outputs, labels)
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True)
        self.largest.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/largest", self.largest.compute(), sync_dist=True)
        self.largest.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        outputs = self.head(self.net(inputs))
        self.right.update(outputs, labels)
        self.log("val/acc", self.right, batch_size=len(labels))
        self.log("val/loss", nn.functional.cross_entropy(outputs, labels), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)


def loaders(samples: int = 30, batch_size: int = 3, **options: Any) -> Callable[[], tuple[Any, Any]]:
    """30 samples, three a virtual rank: two are padded, and the third step of an epoch is short."""
    return lambda: (DataLoader(rows(samples), batch_size, **{"shuffle": True, **options}), validation())


class Rows(Logger):
    """Keeps what is logged. Of W processes all keep the same: what is in metrics.csv."""

    name, version = "rows", 0  # pyright: ignore

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Watch(Callback):
    """Keeps every step, and how much had been shown when a checkpoint was saved."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.stops: dict[str, tuple[int, int, int]] = {}
        self._at = 0

    def on_train_start(self, trainer, pl_module) -> None:  # type: ignore
        self._at = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore
        if trainer.global_step == self._at:
            return
        self._at = trainer.global_step
        report = StepReport.of(pl_module, trainer.optimizers[0], trainer.current_epoch, self._at, [])
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.steps.append((self._at, trainer.current_epoch, rates, report.digests()))

    def note(self, trainer: Any, name: str) -> None:
        self.stops[name] = (len(self.steps), len(trainer.logger.rows), len(_one(trainer, Ledger).accounts))


class BeforeSteps(Callback):
    """Saves `steps-N.ckpt` before every optimizer step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:  # type: ignore
        if batch_idx % trainer.accumulate_grad_batches == 0:
            _save(trainer, self.folder, f"steps-{trainer.global_step}", "step")


class InValidation(Callback):
    """Saves `validation-N.M.ckpt` before every batch M of the validations after N steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:  # type: ignore
        _save(trainer, self.folder, f"validation-{trainer.global_step}.{batch_idx}", "validation")


def _save(trainer: Any, folder: Path, name: str, moment: Any) -> None:
    _one(trainer, Watch).note(trainer, name)
    save(trainer, f"{folder}/{name}.ckpt", moment)


class Users(ModelCheckpoint):
    """A user's own, with file names that say when it saved."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"filename": "users-{step}", "save_top_k": -1, "auto_insert_metric_name": False, **options}
        super().__init__(folder, enable_version_counter=False, **options)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        _one(trainer, Watch).note(trainer, Path(filepath).stem)
        super()._save_checkpoint(trainer, filepath)


def users(**options: Any) -> Callable[[Path], Callback]:
    return lambda folder: Users(folder, **options)


def best(**options: Any) -> Callable[[Path], Callback]:
    """Saves where no stop of a test is saved: another run does not overwrite them."""
    return lambda folder: Users(folder / "best", **{"monitor": "val/loss", "save_top_k": 1, **options})


def _one(trainer: Any, kind: type) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


@dataclass(frozen=True)
class Job:
    """One small training: two epochs, validation after each. `savers` are built with the folder that they save to."""

    module: Callable[[], LightningModule] = Everything
    data: Callable[[], tuple[Any, Any]] = field(default_factory=loaders)
    strategy: dict[str, Any] = field(default_factory=lambda: dict(V4))
    callbacks: tuple[Callable[[], Callback], ...] = ()
    savers: tuple[Callable[[Path], Callback], ...] = (BeforeSteps,)
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 3
    kind: type[ExactDDPStrategy] = ExactDDPStrategy


@dataclass
class Shown:
    """What a run showed on one rank: every step, row and account; what it held at its end; and at which stops it was
    saved, with how much it had shown then."""

    steps: list[Any]
    rows: list[Any]
    accounts: list[Any]
    end: dict[str, Any]
    stops: dict[str, tuple[int, int, int]]

    def unlike(self, stop: str, rest: "Shown", unlogged: int = 0) -> list[str]:
        """In what `rest`, a run that was resumed from this one's stop, differs; `unlogged` rows it cannot show."""
        steps, shown, accounts = self.stops[stop]
        pairs = {
            "steps": (self.steps[steps:], rest.steps),
            "rows": (self.rows[shown + unlogged :], rest.rows),
            "accounts": (self.accounts[accounts:], rest.accounts),
            **{name: (self.end[name], rest.end[name]) for name in self.end},
        }
        return [f"{stop}: {name}: {_first(*pair)}" for name, pair in pairs.items() if pair[0] != pair[1]]


def _first(whole: Any, rest: Any) -> str:
    if isinstance(whole, list):
        index = next((i for i, pair in enumerate(zip(whole, rest, strict=False)) if pair[0] != pair[1]), -1)
        return f"{len(whole)} and {len(rest)}; {whole[index : index + 1]} and {rest[index : index + 1]}"[:800]
    return f"{whole} and {rest}"[:800]


def fit(job: Job, folder: Path, stop: str | None = None, force: bool = False) -> Shown:
    """The whole training on this rank, or what is left of it after a stop."""
    seed_everything(job.seed, verbose=False)
    module, logger, watch, ledger = job.module(), Rows(), Watch(), Ledger()
    savers = [make(folder) for make in job.savers]
    if stop is not None:
        savers = [saver for saver in savers if isinstance(saver, ModelCheckpoint)]
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "log_every_n_steps": 1, **job.options}
    trainer = quiet_trainer(
        strategy=job.kind(timeout=30, **job.strategy),
        default_root_dir=folder,
        logger=logger,
        enable_checkpointing=any(isinstance(saver, ModelCheckpoint) for saver in savers),
        callbacks=[watch, ledger, *[make() for make in job.callbacks], *savers],
        **options,
    )
    path = folder / f"{stop}.ckpt" if stop is not None else None
    trainer.fit(module, *job.data(), ckpt_path=path, weights_only=True, resume_force=force)
    return Shown(watch.steps, logger.rows, [_in_steps(a, trainer) for a in ledger.accounts], _end(trainer), watch.stops)


def _in_steps(account: Any, trainer: Any) -> Any:
    """Batches of an account are one process's."""
    k = trainer.accumulate_grad_batches
    return dataclasses.replace(account, batches=account.batches // k, whole=account.whole and account.whole // k)


def _end(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop
    return {
        "weights and buffers": sha256(trainer.lightning_module.state_dict()),
        "optimizers": plain([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "schedules": plain([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "callbacks": plain({c.state_key: state for c in trainer.callbacks if (state := c.state_dict())}),
        "counts": (
            trainer.current_epoch,
            trainer.global_step,
            loop.epoch_loop.total_batch_idx // trainer.accumulate_grad_batches,
            loop.epoch_loop._batches_that_stepped,
            dataclasses.asdict(loop.epoch_progress),
        ),
    }


def plain(value: Any) -> Any:
    """Comparable with ==. Lightning does not give a ModelCheckpoint its `current_score` back, which only its own next
    save uses."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items() if name != "current_score"}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def several(job: Job, folder: Path, stops: list[str], force: bool = False) -> list[Shown]:
    """What is left after each stop, one after the other in the same process."""
    return [fit(job, folder, stop, force) for stop in stops]


def saved_on(world_size: int, job: Job, folder: Path) -> Shown:
    """The training that is not stopped, and saves all its stops to `folder`."""
    folder.mkdir(exist_ok=True)
    return run_ranks(world_size, fit, job, folder)[0]


def unlike(whole: Shown, job: Job, folder: Path, stops: dict[int, list[str]], unlogged: int = 0) -> list[str]:
    """In what resumed runs differ from the one that was not stopped.

    Args:
        whole: that one.
        job: the same, or a faulty one.
        folder: with the stops.
        stops: to resume from, by the number of processes that do.
        unlogged: rows after a stop that cannot be logged again.
    """
    found: list[str] = []
    for world_size, names in stops.items():
        rests = run_ranks(world_size, several, job, folder, names)[0]
        for stop, rest in zip(names, rests, strict=True):
            found += [f"on {world_size}: {line}" for line in whole.unlike(stop, rest, unlogged)]
    return found

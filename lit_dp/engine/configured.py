"""What optimizers and schedulers were configured with. A checkpoint's state overwrites it; what a person has changed
since is put back, so that the command line and the config beat the checkpoint (FAULTS 18)."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

KEY = "lit_dp.configured"
Options = dict[str, Any]
_FOLLOWS = ("_last_lr", "base_lrs")
"""Of a scheduler: said already by its optimizer's learning rate."""


class Configured(Callback):
    """Saves what was configured, and compares when a training goes on: what differs was changed on purpose."""

    def __init__(self) -> None:
        self._now: Options = {}
        self._saved: Options = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._saved = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(KEY, {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Between `configure_optimizers` and the state in the checkpoint."""
        self._now = {
            "optimizers": [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
            "schedulers": [_plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = self._now

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._saved:
            return
        said: list[str] = []
        for optimizer, *configured in zip(trainer.optimizers, *_both(self, "optimizers"), strict=False):
            for group, before, now in zip(optimizer.param_groups, *configured, strict=False):
                said += _put_back(group, before, now, "optimizer")
        for config, before, now in zip(trainer.lr_scheduler_configs, *_both(self, "schedulers"), strict=False):
            said += _put_back_in_scheduler(config.scheduler, before, now)
        for line in dict.fromkeys(said) if trainer.is_global_zero else []:
            print(line, flush=True)


def _both(configured: Configured, what: str) -> tuple[Any, Any]:
    return configured._saved[what], configured._now[what]


def _options(group: Options) -> Options:
    """Of a parameter group, before any scheduler."""
    options = _plain({name: value for name, value in group.items() if name not in ("params", "initial_lr")})
    return {**options, "lr": _plain(group.get("initial_lr", group["lr"]))}


def _put_back(group: Options, before: Options, now: Options, what: str) -> list[str]:
    """A line for each option that has changed."""
    changed = [name for name in now if name in before and now[name] != before[name]]
    for name in changed:
        if name != "lr":
            group[name] = tuple(now[name]) if isinstance(group[name], tuple) else now[name]
            continue
        # What a schedule has made of it until now it would have made of the new one.
        group["lr"] = group["lr"] * (now["lr"] / before["lr"]) if before["lr"] else now["lr"]
        if "initial_lr" in group:
            group["initial_lr"] = now["lr"]
    return [f"{what} {name}: {now[name]!r} is used, {before[name]!r} is the checkpoint's" for name in changed]


def _put_back_in_scheduler(scheduler: Any, before: Options, now: Options) -> list[str]:
    said: list[str] = []
    parts = (getattr(scheduler, "_schedulers", []), before.pop("_schedulers", []), now.get("_schedulers", []))
    for part in zip(*parts, strict=False):  # of SequentialLR and ChainedScheduler
        said += _put_back_in_scheduler(*part)
    attributes = {name: value for name, value in now.items() if name not in ("_schedulers", "_last_lr")}
    said += _put_back(scheduler.__dict__, before, attributes, type(scheduler).__name__)
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    return [line for line in said if not any(name in line for name in _FOLLOWS)]


def _plain(value: Any) -> Any:
    """Without what would not load with weights_only=True; None stands for it."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str) else None

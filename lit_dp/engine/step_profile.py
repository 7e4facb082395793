"""Where the time of a step goes, on each rank (`fit --profile step`). Off by default; nothing waits for the device."""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lit_dp.engine.lean import CALLBACKS, NoProfiler
from lit_dp.engine.marks import mark, seconds_between, settle_device
from lit_dp.engine.peers import Peers
from lit_dp.engine.step_parts import Parts, StepTimes

WARM_UP = 5
"""Steps that are not counted: DDP's buckets settle in the first three."""
AT_ONCE = 50
"""Steps whose marks are kept before they are added up."""
ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "copy",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "save_checkpoint": "checkpoints",
    CALLBACKS: "callbacks",
}
"""The part that an action belongs to, of those that Lightning tells its profiler: by the last word of its name."""


class Marks(NoProfiler):
    """Notes when parts of a step begin. Each moment belongs to the innermost part that has begun and not ended.

    Args:
        on_cuda: whether time is the device's.
    """

    def __init__(self, on_cuda: bool) -> None:
        super().__init__()
        self.on_cuda = on_cuda
        self.taken: list[tuple[str | None, Any]] = []  # what begins, and when; None: what is not counted
        self._open = ["rest"]
        self._runs = False
        self._within = {part: _Within(self, part) for part in ACTIONS.values()}

    def profile(self, action_name: str) -> Any:
        part = ACTIONS.get(action_name[action_name.rfind(".") + 1 :])
        return super().profile(action_name) if part is None else self._within[part]

    def start(self, action_name: str) -> None:
        part = ACTIONS.get(action_name[action_name.rfind(".") + 1 :])
        self._runs = self._runs or part == "data"
        self.begin(part or self._open[-1])

    def stop(self, action_name: str) -> None:
        self.end()

    def begin(self, part: str) -> None:
        self._open.append(part)
        self.note(part)

    def end(self) -> None:
        self._open.pop()
        self.note(self._open[-1])

    def note(self, part: str | None) -> None:
        """From now on time is `part`'s."""
        if self._runs:
            self.taken.append((part, mark(self.on_cuda)))

    def pause(self) -> None:
        """Until the next batch is asked for nothing is counted."""
        self.note(None)
        self._runs = False

    def cut(self) -> list[tuple[str | None, Any]]:
        """A step has ended: its marks, of which the last begins the next one."""
        self.note(self._open[-1])
        taken, self.taken = self.taken, self.taken[-1:]
        return taken


class _Within:
    def __init__(self, marks: Marks, part: str) -> None:
        self.marks, self.part = marks, part

    def __enter__(self) -> None:
        self.marks.begin(self.part)

    def __exit__(self, *_: object) -> None:
        self.marks.end()


class StepProfile(Callback):
    """Splits every optimizer step into parts, on every rank; rank 0 prints them when the training ends.

    Parts are waiting for data, its copy to the device, forward, backward, exposed communication (from the moment when
    the last gradient is computed until all are reduced), optimizer, logging (`self.log` and loggers), checkpoints,
    other callbacks, and the rest: Lightning's loop. What comes between steps (validation, the end of an epoch) is not
    counted. In manual optimization the backward pass is part of the forward pass.

    On CUDA time is what passes on the device: data that is loaded while it computes costs nothing.

    Attributes:
        times: what was measured, once the training has ended; None before, and where it had no steps to count.
    """

    def __init__(self) -> None:
        self.times: StepTimes | None = None
        self._marks = Marks(on_cuda=False)
        self._hooks: list[Any] = []
        self._restore: list[Callable[[], None]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.times, self._parts, self._steps = None, Parts(), trainer.global_step
        self._counted_from, self._kept = trainer.global_step + WARM_UP, []
        self._marks = Marks(trainer.strategy.root_device.type == "cuda")
        usual = trainer.profiler  # pyright: ignore[reportAttributeAccessIssue]
        trainer.profiler = self._marks  # pyright: ignore[reportAttributeAccessIssue]
        self._restore.append(lambda: setattr(trainer, "profiler", usual))
        self._time(pl_module, "log", "logging")
        for logger in trainer.loggers:
            self._time(logger, "log_metrics", "logging")
            self._time(logger, "save", "logging")
        if trainer.world_size > 1:
            self._find_last_gradient(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps:  # gradients are accumulated
            return
        self._steps = trainer.global_step
        taken = self._marks.cut()
        if self._steps <= self._counted_from:
            if self._steps == self._counted_from:
                self._keep_last_gradient()
            return
        self._kept.append(taken)
        if len(self._kept) == AT_ONCE:
            self._add_up()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._marks.pause()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._marks.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """On all ranks, which gather what each has measured."""
        self._leave()
        self._add_up()
        by_rank = Peers(trainer.global_rank, trainer.world_size).gather(self._parts)
        if by_rank[0].busy:
            self.times = StepTimes(by_rank)
            if trainer.is_global_zero:
                print(self.times, flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    def _add_up(self) -> None:
        settle_device()
        for taken in self._kept:
            self._parts.add((part, seconds_between(a, b)) for (part, a), (_, b) in pairwise(taken))
        self._kept = []

    def _leave(self) -> None:
        while self._restore:
            self._restore.pop()()
        while self._hooks:
            self._hooks.pop()[1].remove()

    def _time(self, owner: Any, name: str, part: str) -> None:
        """Let what a method of one object takes be a part's."""
        method = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._marks.begin(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._marks.end()

        owner.__dict__[name] = timed
        self._restore.append(lambda: owner.__dict__.pop(name, None))

    # --- the moment when the last gradient is computed ---

    def _find_last_gradient(self, module: nn.Module) -> None:
        self._last: nn.Parameter | None = None

        def computed(parameter: nn.Parameter) -> None:
            self._last = parameter

        trained = [p for p in module.parameters() if p.requires_grad]
        self._hooks = [(p, p.register_post_accumulate_grad_hook(computed)) for p in trained]

    def _keep_last_gradient(self) -> None:
        """A hook takes microseconds: from now on there is one."""
        for _, hook in self._hooks:
            hook.remove()
        if self._hooks and self._last is not None:
            hook = self._last.register_post_accumulate_grad_hook(lambda _: self._marks.note("exchange"))
            self._hooks = [(self._last, hook)]

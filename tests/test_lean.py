"""A step's bookkeeping without what has no effect: the same hooks, in the same order, and the same logged values."""

import dis
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dp.engine import lean
from tests.training import quiet_trainer

EMPTY = [instruction.opname for instruction in dis.get_instructions(lambda: None)]
HOOKS = sorted(name for name in dir(Callback) if name.startswith("on_") and name not in ("on_exception",))


class Watched(LightningModule):
    """Notes its hooks, and in which of them Lightning takes it to be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[tuple[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(("training_step", self._current_fx_name))
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).mean())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(("on_before_zero_grad", self._current_fx_name))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def all_hooks(seen: list[tuple[str, Any]]) -> Callback:
    """A callback that notes every hook."""

    def noting(name: str) -> Callable[..., None]:
        def hook(self: Callback, trainer: Any, module: LightningModule, *args: Any, **kwargs: Any) -> None:
            seen.append((name, module._current_fx_name))
            if name == "on_train_batch_end":
                module.log("from_callback", torch.tensor(float(len(seen))))

        return hook

    return type("AllHooks", (Callback,), {name: noting(name) for name in HOOKS})()


def run(lean_too: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[tuple[str, Any]], Any, Any]:
    """Hooks in the order in which they came, logged values and weights."""
    if not lean_too:
        monkeypatch.setattr(lean, "_REPLACEMENTS", [])
    torch.manual_seed(0)
    module = Watched()
    loader = DataLoader(TensorDataset(torch.rand(12, 2)), 2)
    callbacks = [Callback(), all_hooks(module.seen), Callback()]
    trainer = quiet_trainer(devices=1, max_epochs=2, callbacks=callbacks, **settings)
    trainer.fit(module, loader, loader)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.seen, logged, [parameter.tolist() for parameter in module.parameters()]


def fit_once(module: LightningModule, **settings: Any) -> None:
    run_steps(module, 1, **settings)


def run_steps(module: LightningModule, steps: int, **settings: Any) -> None:
    loader = DataLoader(TensorDataset(torch.rand(2 * steps, 2)), 2)
    quiet_trainer(devices=1, max_steps=steps, limit_val_batches=0, **settings).fit(module, loader, loader)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_hooks_values_and_bits(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"accumulate_grad_batches": accumulate}
    ours, theirs = run(True, monkeypatch, **settings), run(False, monkeypatch, **settings)
    assert len(ours[0]) > 100
    assert ours == theirs


def test_a_hook_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lean._own_hooks
    theirs = run(False, monkeypatch)[0]
    monkeypatch.undo()
    monkeypatch.setattr(lean, "_own_hooks", cache(lambda kind: own(kind) - {"on_after_backward"}))
    assert run(True, monkeypatch)[0] != theirs


def test_what_is_not_called_is_empty() -> None:
    """Upstream may put something into them."""

    for owner, names in ((LightningModule, lean.EMPTY), (Callback, {*HOOKS, "setup", "teardown", "on_exception"})):
        for name in names:
            assert [i.opname for i in dis.get_instructions(getattr(owner, name))] == EMPTY, (owner, name)


def test_a_hook_set_on_one_object_is_called() -> None:
    seen: list[str] = []
    callback = Callback()
    callback.on_train_batch_end = lambda *args: seen.append("on one object")  # type: ignore[method-assign]
    by_lambda = LambdaCallback(on_train_batch_start=lambda *args: seen.append("by a lambda"))
    module = Watched()
    module.on_before_backward = lambda loss: seen.append("on the module")  # type: ignore[method-assign]
    fit_once(module, callbacks=[callback, by_lambda])
    assert seen == ["by a lambda", "on the module", "on one object"]


def test_a_hook_that_a_class_gets_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fit_once(Watched())
    monkeypatch.setattr(Watched, "on_before_backward", lambda self, loss: seen.append("called"))
    fit_once(Watched())
    assert seen == ["called"]


def test_a_callback_that_a_setup_adds_is_set_up() -> None:
    seen: list[str] = []

    class Added(Callback):
        def setup(self, *args: Any, **kwargs: Any) -> None:
            seen.append("set up")

    class Adds(Callback):
        def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            trainer.callbacks.append(Added())

    fit_once(Watched(), callbacks=[Adds()])
    assert seen == ["set up"]


def originals() -> Iterator[Any]:
    for owner, name, ours in lean._REPLACEMENTS:
        yield getattr(owner, name) is not ours


def test_nothing_stays_replaced() -> None:
    class Fails(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            assert not any(originals())
            raise KeyError("wrong")

    with pytest.raises(KeyError, match="wrong"):
        fit_once(Watched(), callbacks=[Fails()])
    assert all(originals())


def test_another_profiler_hears_of_every_hook() -> None:
    profiler = SimpleProfiler()
    fit_once(Watched(), callbacks=[Callback()], profiler=profiler)
    assert "[Callback]Callback.on_train_batch_end" in profiler.recorded_durations
    assert "[LightningModule]Watched.on_train_batch_start" in profiler.recorded_durations


def test_a_callback_that_comes_or_goes_in_a_training_is_noticed() -> None:
    seen: list[str] = []

    class Says(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append("said")

    class Changes(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
            callbacks = trainer.callbacks
            if batch_idx == 1:
                callbacks.append(says)
            if batch_idx == 3:
                callbacks.remove(says)

    says = Says()
    run_steps(Watched(), 5, callbacks=[Changes()])
    assert seen == ["said", "said"]


def test_signatures_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def has(hook: Any, param: str, explicit: bool = False, min_args: int | None = None) -> bool:
        looked.append(hook)
        return False

    monkeypatch.setattr(lean, "_signature_has", lean.lru_cache(maxsize=32)(has))
    module = Watched()
    for _ in range(3):
        assert not lean._has_parameter(module.training_step, "dataloader_iter", explicit=True)
    assert looked == [Watched.training_step]
    assert lean._has_parameter(_Unhashable(), "anything")
    assert lean._has_parameter(module.training_step, "batch") is False


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, anything: int) -> None: ...


def test_lightning_looks_each_time() -> None:
    """Once it does not, drop the replacement."""
    assert not hasattr(training_epoch_loop.is_param_in_hook_signature, "cache_info")  # pyright: ignore
    assert call._call_callback_hooks is lean._call_callback_hooks

"""A step's bookkeeping without what has no effect: of a small net's step it is most of what Lightning takes.

While a training runs some of Lightning's private functions are replaced by ones that do the same; its loops are not.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loops import evaluation_loop, training_epoch_loop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lit_dp.engine import lean_log

CALLBACKS = "callbacks"
"""What a profiler is told of all of them together."""
EMPTY = {
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
}
"""Hooks of every step that do nothing in a LightningModule that does not define them."""
_NOTHING = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Lightning's default profiles nothing, too, but makes a generator for each hook of a step."""

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # pyright: ignore
        return _NOTHING


@contextmanager
def lean() -> Iterator[None]:
    """Within it a hook that is empty is not called, a value that is logged as before only adds to its result
    (`lean_log`), and a function's signature is looked at once. With another profiler than `NoProfiler` hooks are called
    as ever."""
    with ExitStack() as undone:
        for forget in (_own_hooks.cache_clear, _listening.clear, lean_log.forget):
            forget()  # a class may have been changed since the last training
            undone.callback(forget)
        for owner, name, ours in _REPLACEMENTS:
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours)
        yield


def _callback_hooks(
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    """`monitoring_callbacks`: True for those that watch a metric only, False for all others, None for all."""
    if not isinstance(trainer.profiler, NoProfiler):
        _call_callback_hooks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    module = trainer.lightning_module
    with trainer.profiler.profile(CALLBACKS), _current_hook(module, hook_name):
        for callback in _listeners(trainer.callbacks, hook_name):
            if monitoring_callbacks in (None, isinstance(callback, EarlyStopping | Checkpoint)):
                getattr(callback, hook_name)(trainer, module, *args, **kwargs)


def _listeners(callbacks: list[Callback], hook_name: str) -> Iterable[Callback]:
    """Those that have such a hook, in their order. Of every step's they are looked for once, and again where the list
    has changed. Others may add to the list while it is gone through, as a callback's `setup` does."""
    if hook_name not in EMPTY:
        return (callback for callback in callbacks if _has(callback, hook_name))
    among, found = _listening.get(hook_name, ([], []))
    if len(among) != len(callbacks) or any(a is not b for a, b in zip(among, callbacks, strict=True)):
        found = [callback for callback in callbacks if _has(callback, hook_name)]
        _listening[hook_name] = list(callbacks), found
    return found


def _has(callback: Callback, hook_name: str) -> bool:
    return hook_name in _own_hooks(type(callback)) or hook_name in callback.__dict__


def _module_hook(trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
    module = pl_module or trainer.lightning_module
    if not isinstance(trainer.profiler, NoProfiler) or module is None:
        return _call_lightning_module_hook(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    if hook_name in EMPTY and hook_name not in _own_hooks(type(module)) and hook_name not in module.__dict__:
        return None
    return _called(trainer, module, module, hook_name, args, kwargs)


def _strategy_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(trainer.profiler, NoProfiler):
        return _call_strategy_hook(trainer, hook_name, *args, **kwargs)
    return _called(trainer, trainer.lightning_module, trainer.strategy, hook_name, args, kwargs)


def _called(trainer: Any, module: Any, owner: Any, hook_name: str, args: Any, kwargs: Any) -> Any:
    function = getattr(owner, hook_name)
    if not callable(function):
        return None
    with _current_hook(module, hook_name), trainer.profiler.profile(hook_name):
        return function(*args, **kwargs)


class _current_hook:
    """While it is called a LightningModule knows which hook it is in: `self.log` asks."""

    def __init__(self, module: LightningModule | None, hook_name: str) -> None:
        # Past nn.Module.__setattr__, which looks whether a string is a parameter, a buffer or a module.
        self.attributes, self.hook_name = module.__dict__ if module is not None else {}, hook_name

    def __enter__(self) -> None:
        self.previous = self.attributes.get("_current_fx_name")
        self.attributes["_current_fx_name"] = self.hook_name

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:  # as Lightning's, which leaves it where a hook raises
            self.attributes["_current_fx_name"] = self.previous


@cache
def _own_hooks(kind: type) -> set[str]:
    """Names that a Callback's or LightningModule's class does not inherit from that."""
    base = Callback if issubclass(kind, Callback) else LightningModule
    return {name for name in dir(kind) if getattr(kind, name) is not getattr(base, name, call)}


def _has_parameter(hook_fx: Any, param: str, explicit: bool = False, min_args: int | None = None) -> bool:
    try:
        return _signature_has(getattr(hook_fx, "__func__", hook_fx), param, explicit, min_args)
    except TypeError:  # a callable that cannot be hashed
        return is_param_in_hook_signature(hook_fx, param, explicit, min_args)


_signature_has = lru_cache(maxsize=32)(is_param_in_hook_signature)
_call_callback_hooks, _call_lightning_module_hook = call._call_callback_hooks, call._call_lightning_module_hook
_call_strategy_hook = call._call_strategy_hook
_listening: dict[str, tuple[list[Callback], list[Callback]]] = {}
_REPLACEMENTS: list[tuple[Any, str, Any]] = [
    (call, "_call_callback_hooks", _callback_hooks),
    (call, "_call_lightning_module_hook", _module_hook),
    (call, "_call_strategy_hook", _strategy_hook),
    (LightningModule, "log", lean_log.log),
    (training_epoch_loop, "is_param_in_hook_signature", _has_parameter),
    (evaluation_loop, "is_param_in_hook_signature", _has_parameter),
]

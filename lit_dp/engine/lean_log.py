"""`self.log` again, as on the step before: what Lightning then checks and builds is what it already has (PL 20388)."""

from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

_log = LightningModule.log
_known: dict[tuple[Any, ...], "_Logged"] = {}


class _Logged(NamedTuple):
    """A call that has gone Lightning's way: its arguments beside value and batch size, and where it led."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: Any
    key: str
    result: Any


def forget() -> None:
    """Let the next call of every name go Lightning's way."""
    _known.clear()


def log(
    module: LightningModule, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any
) -> None:
    """`LightningModule.log`. Called again from the same hook with the same arguments, it only updates the result."""
    trainer, hook, arguments = module._trainer, module._current_fx_name, (args, kwargs)
    results = trainer._results if trainer is not None else None
    if results is None or torch.compiler.is_compiling():
        _log(module, name, value, *args, batch_size=batch_size, **kwargs)
        return
    place = (hook, name, results.dataloader_idx)
    known = _known.get(place)
    usual = known is not None and known.arguments == arguments and _still_there(known, results, value)
    if known is not None and usual and not _starts_anew(trainer, hook):
        result = known.result
        value = value.detach() if isinstance(value, Tensor) else value
        result.forward(value, results._extract_batch_size(result, batch_size, result.meta))
        result.has_reset = False
        trainer._logger_connector._current_fx = hook  # pyright: ignore[reportOptionalMemberAccess]
        return
    _log(module, name, value, *args, batch_size=batch_size, **kwargs)
    key = f"{hook}.{name}" if results.dataloader_idx is None else f"{hook}.{name}.{results.dataloader_idx}"
    if key in results and not results[key].meta.enable_graph:
        _known[place] = _Logged(arguments, results, key, results[key])


def _still_there(known: _Logged, results: Any, value: Any) -> bool:
    """Whether the value can be added to the result as it is."""
    if known.results is not results or results.get(known.key) is not known.result:
        return False
    held = known.result.value
    if not known.result.is_tensor:
        return value is held
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point() and value.device == held.device


def _starts_anew(trainer: Any, hook: str | None) -> bool:
    """Whether an epoch begins, in which what the hook logs is set to zero first."""
    return trainer._logger_connector.should_reset_tensors(hook)

"""`self.log` again, as on the step before: what Lightning then checks and builds is what it already has (PL 20388)."""

from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype
from torch import Tensor

_log = LightningModule.log
_known: dict[tuple[Any, ...], "_Logged"] = {}


class _Logged(NamedTuple):
    """A call that has gone Lightning's way: its arguments beside value and batch size, and where it led."""

    arguments: dict[str, Any]
    results: Any
    key: str
    result: Any


def forget() -> None:
    """Let the next call of every name go Lightning's way."""
    _known.clear()


def log(module: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """`LightningModule.log`. Called again from the same hook with the same arguments, it only updates the result."""
    trainer, hook, batch_size = module._trainer, module._current_fx_name, kwargs.pop("batch_size", None)
    sized = {} if batch_size is None else {"batch_size": batch_size}
    results = trainer._results if trainer is not None else None
    # Positional arguments, and a key that is made otherwise, are rare: they go Lightning's way every time.
    if results is None or args or "add_dataloader_idx" in kwargs or torch.compiler.is_compiling():
        _log(module, name, value, *args, **kwargs, **sized)
        return
    place = (hook, name, results.dataloader_idx, batch_size is None)
    known = _known.get(place)
    usual = known is not None and known.arguments == kwargs and _still_there(known, results, value)
    if known is not None and usual and not _starts_anew(trainer, hook):
        result = known.result
        if result.is_tensor:
            number = not isinstance(value, Tensor)
            value = torch.tensor(value, dtype=_get_default_dtype(), device=module.device) if number else value.detach()
            value = value.squeeze()
        result.forward(value, results._extract_batch_size(result, batch_size, result.meta))
        result.has_reset = False
        trainer._logger_connector._current_fx = hook  # pyright: ignore[reportOptionalMemberAccess]
        return
    _log(module, name, value, **kwargs, **sized)
    key = f"{hook}.{name}" if results.dataloader_idx is None else f"{hook}.{name}.{results.dataloader_idx}"
    if key in results and not results[key].meta.enable_graph:
        _known[place] = _Logged(kwargs, results, key, results[key])


def _still_there(known: _Logged, results: Any, value: Any) -> bool:
    """Whether the value can be added to the result as it is."""
    if known.results is not results or results.get(known.key) is not known.result:
        return False
    held = known.result.value
    if not known.result.is_tensor:
        return value is held
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point() and value.device == held.device
    return isinstance(value, Number)


def _starts_anew(trainer: Any, hook: str | None) -> bool:
    """Whether an epoch begins, in which what the hook logs is set to zero first."""
    return trainer._logger_connector.should_reset_tensors(hook)

"""What a checkpoint may hold: plain values, which load with weights_only=True. And whether its weights are finite."""

import io
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_dp.engine.checkpoint_files import content_without_tensors, unsafe_classes
from lit_dp.errors import ConfigError

PLAIN = (Tensor, nn.Parameter, int, float, str, bool, bytes, type(None))
"""Exact types that always load; everything else is tried."""


def require_plain(checkpoint: dict[str, Any], path: object) -> None:
    """Raise ConfigError that names the first entry which torch.load would refuse, before anything is written.

    Costs a walk over the entries; only what is not of a `PLAIN` type is pickled.
    """
    for key, value in checkpoint.items():
        for name, kind in _misfits(str(key), value):
            raise ConfigError(
                f"{path} is not saved: it would not load with weights_only=True, because {name} is {kind}."
                f" {_remedy(name)}"
            )


def all_finite(state: dict[str, Any]) -> bool:
    """Whether no tensor of a state_dict holds nan or infinity. Makes no copies (except of float8).

    A tensor of zeros and infinities of one sign, which attention masks and best-so-far values are, counts as finite.
    """
    return all(_is_finite(value.detach()) for value in state.values() if isinstance(value, Tensor))


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # torch orders no float8
        tensor = tensor.float()
    low, high = (bound.item() for bound in tensor.aminmax())  # both nan if one is; isfinite() would make copies
    meant = {low, high} <= {0.0, math.inf} or {low, high} <= {0.0, -math.inf}
    return meant or (math.isfinite(low) and math.isfinite(high))


def _misfits(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """How an entry is reached, `hyper_parameters['optimizer']`, and its class, of all that would be refused."""
    if type(value) in PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for key, inner in value.items():
            yield from _misfits(f"a key of {name}", key)
            yield from _misfits(f"{name}[{key!r}]", inner)
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            yield from _misfits(f"{name}[{index}]", inner)
    else:
        kind = _refused(value)
        if kind:
            yield name, kind


def _refused(value: Any) -> str | None:
    """None if `value` loads back with weights_only=True, else its class and those in it that do not."""
    file = io.BytesIO()
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    try:
        torch.save(value, file)
    except Exception:  # lambdas, locks, open files: pickle raises several kinds
        return f"a {kind}"
    try:
        content_without_tensors(file)
    except Exception:
        refused = unsafe_classes(file)
        return f"a {kind}" if refused in ("", kind) else f"a {kind} (of {refused})"
    return None


def _remedy(name: str) -> str:
    entry, _, rest = name.partition("['")
    if entry == "hyper_parameters" and rest:
        argument = rest.partition("'")[0]
        return f'Leave it out: self.save_hyperparameters(ignore=["{argument}"])'
    return (
        "Keep tensors, numbers, strings, lists and dicts only, or allow the class wherever the checkpoint is saved and"
        " loaded: torch.serialization.add_safe_globals([...])"
    )

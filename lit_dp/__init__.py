"""Data-parallel training that proves itself: a reference trainer on PyTorch Lightning, beside the same loop by hand."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_dp.data import ImageDataModule
    from lit_dp.engine.schedule import Schedule
    from lit_dp.engine.strategy import ExactDDPStrategy
    from lit_dp.module import LitClassifier
    from lit_dp.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["ExactDDPStrategy", "ImageDataModule", "LitClassifier", "Schedule", "Trainer"]

_HOMES = {
    "ExactDDPStrategy": "engine.strategy",
    "ImageDataModule": "data",
    "LitClassifier": "module",
    "Schedule": "engine.schedule",
    "Trainer": "trainer",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import lit_dp` itself stays free of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_dp' has no attribute {name!r}")
    return getattr(import_module(f"lit_dp.{_HOMES[name]}"), name)

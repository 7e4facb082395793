"""A torch Dataset class as a source of images: torchvision's or the user's own, by import path."""

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lit_dp.datasets import Contents, DecodedImages, ImageDataset, InMemoryImages, Source, channels_first, one_line
from lit_dp.errors import ConfigError, RunError

IN_MEMORY_LIMIT_BYTES = 2**30


@dataclass(frozen=True)
class DatasetClass(Source):
    """A torch `Dataset` class of (image, label), torchvision's or the user's own.

    Its argument `train` or `split` names the part to read; without one, or where `dataset_args` fixes it, the class
    has a single part.
    """

    name: str
    dataset: type[Dataset[Any]]
    root: str | None
    arguments: dict[str, Any]
    local = False

    def check(self) -> None:
        try:
            inspect.signature(self.dataset).bind(**self._arguments(**self._parts()["train"][0]))
        except TypeError as error:
            raise ConfigError(f"{self.name}: {error}: mend dataset_args") from error

    def prepare(self) -> None:
        if "download" not in self._accepted:
            return
        try:  # a root that is read-only, or a host without network, is fine when the files are there
            self._open(download=False)
        except (RuntimeError, OSError):
            self._download()

    def load(self) -> Contents:
        try:
            parts = self._open(download=False)
        except (RuntimeError, OSError) as error:
            if "download" not in self._accepted:
                raise  # the user's own code: its traceback says more than we can
            raise RunError(f"{self.name} cannot be read below {self._folder}: {one_line(error)}") from error
        classes = self._classes(parts["train"])
        return Contents(classes, {name: _holder(part, len(classes)) for name, part in parts.items()})

    @property
    def _accepted(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.dataset).parameters

    @property
    def _folder(self) -> Path:
        return Path(self.root or "data").absolute()

    def _arguments(self, **ours: Any) -> dict[str, Any]:
        """What the class accepts of root, download and the part's name, and `dataset_args`, which go first."""
        has_default = "root" in self._accepted and self._accepted["root"].default is not inspect.Parameter.empty
        if self.root is not None or not has_default:
            ours["root"] = self.root or "data"
        return {name: value for name, value in ours.items() if name in self._accepted} | self.arguments

    def _parts(self) -> dict[str, list[dict[str, Any]]]:
        """Each part and the arguments that may select it, to be tried in turn; one part where there are none."""
        if self._varies("train", bool):
            return {"train": [{"train": True}], "test": [{"train": False}]}
        if self._varies("split", str):  # some call the held-out part val, as theirs for tests has no labels
            names = {"train": ("train", "trainval"), "test": ("test", "val", "valid")}
            return {part: [{"split": name} for name in tried] for part, tried in names.items()}
        return {"train": [{}]}

    def _open(self, download: bool) -> dict[str, Dataset[Any]]:
        return {part: self._first(selections, download) for part, selections in self._parts().items()}

    def _construct(self, **ours: Any) -> Dataset[Any]:
        try:
            return self.dataset(**self._arguments(**ours))
        except ImportError as error:
            raise RunError(f"{self.name} needs the package {error.name}: pip install {error.name}") from error

    def _varies(self, name: str, kind: type) -> bool:
        default = self._accepted[name].default if name in self._accepted else None
        return name not in self.arguments and (default is inspect.Parameter.empty or isinstance(default, kind))

    def _first(self, selections: list[dict[str, Any]], download: bool) -> Dataset[Any]:
        """The part under the first name that the class knows: it raises ValueError for one that it does not."""
        for selection in selections[:-1]:
            with contextlib.suppress(ValueError):
                return self._construct(download=download, **selection)
        try:
            return self._construct(download=download, **selections[-1])
        except ValueError as error:
            if len(selections) == 1:
                raise
            raise ConfigError(f"{self.name}: {one_line(error)}: give the split to read in dataset_args") from error

    def _download(self) -> None:
        try:
            self._open(download=True)
        except (RuntimeError, OSError) as error:  # urllib's errors are OSErrors
            raise RunError(
                f"{self.name} is not below {self._folder} and cannot be downloaded ({one_line(error)}): "
                "give the folder that holds it as --data.root"
            ) from error

    def _classes(self, train: Dataset[Any]) -> list[str]:
        if (names := getattr(train, "classes", None)) is not None:
            return [str(name) for name in names]
        if (count := getattr(train, "num_classes", None)) is not None:
            return [str(label) for label in range(count)]
        if (labels := _labels(train)) is not None:
            return [str(label) for label in range(int(labels.max()) + 1)]
        raise ConfigError(f"{self.name} names no classes: give it `classes` (names) or `num_classes`")


def import_dataset(path: str, choices: str) -> type[Dataset[Any]]:
    """The class at an import path; a ConfigError with the `choices` where there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import the dataset {path!r} ({one_line(error)}). {choices}") from error
    if not (isinstance(found, type) and issubclass(found, Dataset)):
        raise ConfigError(f"{path} is not a torch Dataset class. {choices}")
    if issubclass(found, IterableDataset):
        # Every rank and every worker would read the whole of it.
        raise ConfigError(f"{path} is an IterableDataset: write a Dataset with __len__ and __getitem__ instead")
    return found


def _labels(dataset: Dataset[Any]) -> Tensor | None:
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    return None if labels is None else torch.as_tensor(labels).long()


def _holder(dataset: Dataset[Any], num_classes: int) -> ImageDataset:
    """In memory where torchvision holds the decoded images itself; what a user's `__getitem__` does is kept."""
    data, labels = getattr(dataset, "data", None), _labels(dataset)
    if (
        not type(dataset).__module__.startswith("torchvision.datasets.")
        or getattr(dataset, "transforms", None) is not None
        or not isinstance(data, Tensor | np.ndarray)
        or labels is None
    ):
        return DecodedImages(dataset, num_classes)
    images = torch.as_tensor(data)
    if images.dtype != torch.uint8 or images.nbytes > IN_MEMORY_LIMIT_BYTES or labels.shape != images.shape[:1]:
        return DecodedImages(dataset, num_classes)
    if not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ConfigError(f"{type(dataset).__name__} has labels outside 0 to {num_classes - 1}: choose another part")
    return InMemoryImages(channels_first(images), labels)

"""Image datasets by name: what a name stands for, and how a batch is read from one of its parts.

A source answers three questions, the cheap one first: `check` (can this configuration work? downloads nothing),
`prepare` (download, once a node) and `load` (the parts, on every process).
"""

import contextlib
import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, is_image_file
from torchvision.transforms.v2.functional import pil_to_tensor

from lit_dp.errors import ConfigError, RunError

IN_MEMORY_LIMIT_BYTES = 2**30
_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
NAMES = ("digits", *_TORCHVISION, "image_folder")


class SampleError(RunError):
    """A sample cannot be read; the message stays one line when it was raised in a worker process.

    torch re-raises a worker's error as `type(error)(text)`, text being the worker's whole traceback
    (`torch._utils.ExceptionWrapper`). A traceback ends with the message, so the last line is the one to keep.
    """

    def __init__(self, message: str) -> None:
        last_line = message.strip().splitlines()[-1]
        super().__init__(last_line.removeprefix(f"{SampleError.__module__}.{SampleError.__qualname__}: "))


class Batch(NamedTuple):
    """A tuple; a named one because pinning memory turns every other tuple into a list."""

    images: Tensor  # uint8 (B, C, H, W); floating point once it is on the device
    labels: Tensor  # int64 (B,)
    indices: Tensor  # int64 (B,): positions in the part (train, val or test) that the batch was read from


class ImageDataset(Dataset[Batch]):
    """One part of a dataset. It is read a batch at a time: `DataLoader` prefers `__getitems__` where there is one."""

    transform: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, indices: list[int]) -> tuple[Tensor | list[Tensor], Tensor]:
        """Images (uint8, one (B, C, H, W) or B times (C, H, W)) and labels (int64 (B,)) at `indices`."""
        raise NotImplementedError

    def subset(self, positions: Tensor) -> "ImageDataset":
        """The part of this part at `positions`, in that order."""
        raise NotImplementedError

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        """Per channel, for pixel values scaled to 0..1."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        return Batch(*(column[0] for column in self.__getitems__([index])))

    def __getitems__(self, indices: list[int]) -> Batch:
        images, labels = self.read(indices)
        if self.transform is not None:
            # A v2 transform draws its parameters once a call: given the batch, it would crop every image alike.
            images = [self.transform(image) for image in images]
        return Batch(images if isinstance(images, Tensor) else _stack(images), labels, torch.tensor(indices))


class InMemoryImages(ImageDataset):
    """Images (uint8 (N, C, H, W)) and labels (int64 (N,)) that are held as two tensors: a batch is one gather."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.contiguous(), labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        positions = torch.tensor(indices)
        return self.images.index_select(0, positions), self.labels[positions]

    def subset(self, positions: Tensor) -> "InMemoryImages":
        return InMemoryImages(self.images[positions], self.labels[positions])

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        # From integer histograms: the same bits on every process, whatever its number of threads.
        counts = [torch.bincount(channel.flatten(), minlength=256) for channel in self.images.unbind(1)]
        levels = torch.arange(256, dtype=torch.float64) / 255
        means = [float((count * levels).sum() / count.sum()) for count in counts]
        squares = [float((count * levels**2).sum() / count.sum()) for count in counts]
        variances = [max(0.0, square - mean**2) for square, mean in zip(squares, means, strict=True)]
        return means, [variance**0.5 or 1.0 for variance in variances]  # a channel of one value is left unscaled


class DecodedImages(ImageDataset):
    """A map-style dataset of (image, label), read sample by sample: in worker processes, as decoding takes time.

    `positions` are those of the part in `dataset`; a tensor, since forked workers would copy a list page by page.
    """

    def __init__(self, dataset: Dataset[Any], num_classes: int, positions: Tensor | None = None) -> None:
        self.dataset, self.num_classes = dataset, num_classes
        self.positions = torch.arange(len(dataset)) if positions is None else positions  # pyright: ignore[reportArgumentType]

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, indices: list[int]) -> tuple[list[Tensor], Tensor]:
        samples = [self._sample(position) for position in self.positions[indices].tolist()]
        return [image for image, _ in samples], torch.tensor([label for _, label in samples])

    def subset(self, positions: Tensor) -> "DecodedImages":
        return DecodedImages(self.dataset, self.num_classes, self.positions[positions])

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        channels = len(self.read([0])[0][0])
        return _IMAGENET if channels == 3 else ([0.5] * channels, [0.5] * channels)

    def _sample(self, position: int) -> tuple[Tensor, int]:
        image, label = self.dataset[position][:2]
        if not 0 <= int(label) < self.num_classes:
            raise SampleError(f"sample {position} has the label {label}: labels are 0 to {self.num_classes - 1}")
        return _to_uint8(image, position), int(label)


@dataclass(frozen=True)
class Contents:
    """A source's classes, by label, and its parts: `train`, and `val` and `test` where it has them."""

    classes: list[str]
    parts: dict[str, ImageDataset]


def cut_missing(parts: dict[str, ImageDataset], fractions: dict[str, float], seed: int) -> dict[str, ImageDataset]:
    """All of train, val and test: those that are missing are cut from train by `fractions`, in the dataset's order.

    Raises:
        ConfigError: a part would be empty.
    """
    length = len(parts["train"])
    lengths = {name: round(length * fraction) for name, fraction in fractions.items() if name not in parts}
    lengths["train"] = length - sum(lengths.values())
    if min(lengths.values()) < 1:
        counts = ", ".join(f"{count} for {name}" for name, count in lengths.items())
        raise ConfigError(f"{length} images would be cut into {counts}: change val_fraction or test_fraction")
    # Its own generator: under a seed that differs between ranks, one would validate on what another trains on.
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    pieces = zip(lengths, order.split(list(lengths.values())), strict=True)
    return parts | {name: parts["train"].subset(positions.sort().values) for name, positions in pieces}


class Source(Protocol):
    """Where a dataset comes from. `local`: its parts can be loaded, and so checked, without a download."""

    local: bool

    def check(self) -> None: ...
    def prepare(self) -> None: ...
    def load(self) -> Contents: ...


def find_source(dataset: str, root: str | None, arguments: dict[str, Any]) -> Source:
    """The source that `dataset` stands for: a known name, or the import path of a `Dataset` class.

    Raises:
        ConfigError: it is neither, or cannot be imported.
    """
    key = _plain(dataset)
    known = {_plain(name): name for name in NAMES}
    if key not in known and "." not in dataset:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {known[near[0]]}?" if near else ""
        raise ConfigError(f"unknown dataset {dataset!r}.{hint} {_CHOICES}")
    name = known.get(key, dataset)
    if name in ("digits", "image_folder") and arguments:
        raise ConfigError(f"{name} takes no dataset_args (got {', '.join(arguments)}): leave them out")
    if name == "digits":
        return Digits()
    if name == "image_folder":
        return ImageFolderTree(_existing_folder(root))
    path = f"torchvision.datasets.{_TORCHVISION[name]}" if name in _TORCHVISION else name
    return DatasetClass(name, _import_dataset(path), root, arguments)


class Digits:
    """The 1,797 digits that come with this package; `assets/digits.LICENSE.md` says whose they are."""

    local = True

    def check(self) -> None:
        """Nothing can be wrong."""

    def prepare(self) -> None:
        """Nothing to download."""

    def load(self) -> Contents:
        with np.load(Path(__file__).parent / "assets" / "digits.npz") as file:
            images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
        # 0..16 counts the ink in a 4 x 4 block: spread it over the range that augmentations expect of uint8.
        spread = (images.int() * 255 // 16).to(torch.uint8)
        return Contents([str(digit) for digit in range(10)], {"train": InMemoryImages(spread[:, None], labels)})


@dataclass(frozen=True)
class ImageFolderTree:
    """Class folders below root/train, root/val and root/test, or one tree of class folders below root."""

    root: Path
    local = True

    def _trees(self) -> dict[str, Path]:
        # A folder `train` that holds no folders is a class of that name, in one tree.
        if not any(entry.is_dir() for entry in (self.root / "train").glob("*")):
            return {"train": self.root}
        return {name: self.root / name for name in ("train", "val", "test") if (self.root / name).is_dir()}

    def check(self) -> None:
        """Every tree has the same classes, and every class an image."""
        classes = {name: {e.name for e in tree.iterdir() if e.is_dir()} for name, tree in self._trees().items()}
        for name, tree in self._trees().items():
            empty = [label for label in sorted(classes[name]) if not any(map(is_image_file, _files(tree / label)))]
            if empty or not classes[name]:
                raise ConfigError(
                    f"no images in {tree.joinpath(*empty[:1])}: put them into one folder a class (root/CLASS/IMAGE, or "
                    f"root/train/CLASS/IMAGE), with one of the extensions {' '.join(IMG_EXTENSIONS)}"
                )
            if differing := sorted(classes[name] ^ classes["train"]):
                raise ConfigError(
                    f"{tree} and {self.root / 'train'} differ in the class folders {', '.join(differing)}: "
                    "give both the same"
                )

    def prepare(self) -> None:
        """Nothing to download."""

    def load(self) -> Contents:
        folders = {name: ImageFolder(str(tree), loader=_read_image) for name, tree in self._trees().items()}
        classes = folders["train"].classes
        return Contents(classes, {name: DecodedImages(folder, len(classes)) for name, folder in folders.items()})


@dataclass(frozen=True)
class DatasetClass:
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
        return self._construct(download=download, **selections[-1])

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


_CHOICES = (
    f"Type one of {', '.join(NAMES)}, or the import path of a torch Dataset class "
    "(torchvision.datasets.SVHN, my_package.MyData)"
)


def one_line(error: BaseException) -> str:
    """The error's text, or its type where it has none, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _existing_folder(root: str | None) -> Path:
    if root is None:
        raise ConfigError("image_folder needs the folder that holds the class folders: give it as --data.root")
    if not Path(root).is_dir():
        raise ConfigError(f"there is no folder {Path(root).absolute()}: give the one with the images as --data.root")
    return Path(root)


def _import_dataset(path: str) -> type[Dataset[Any]]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import the dataset {path!r} ({one_line(error)}). {_CHOICES}") from error
    if not (isinstance(found, type) and issubclass(found, Dataset)):
        raise ConfigError(f"{path} is not a torch Dataset class. {_CHOICES}")
    if issubclass(found, IterableDataset):
        # Every rank and every worker would read the whole of it.
        raise ConfigError(f"{path} is an IterableDataset: write a Dataset with __len__ and __getitem__ instead")
    return found


def _files(folder: Path) -> Iterator[str]:
    return (name for _, _, names in os.walk(folder, followlinks=True) for name in names)


def _read_image(path: str) -> Image.Image:
    try:
        with open(path, "rb") as file:
            return Image.open(file).convert("RGB")
    except Exception as error:  # a damaged file makes the decoders raise almost anything
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else one_line(error)
        raise SampleError(f"cannot read the image {path} ({reason}): mend it or remove it") from error


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
    return InMemoryImages(_channels_first(images), labels)


def _channels_first(images: Tensor) -> Tensor:
    """(N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W)."""
    if images.ndim == 3:
        return images[:, None]
    return images.movedim(-1, 1) if images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3) else images


def _to_uint8(image: Any, position: int) -> Tensor:
    """A PIL image, array or tensor as uint8 (C, H, W)."""
    if isinstance(image, Image.Image):
        image = pil_to_tensor(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    pixels = image if isinstance(image, Tensor) else torch.tensor(image)
    if pixels.is_floating_point() and 0 <= pixels.min() <= pixels.max() <= 1:
        pixels = (pixels * 255).round().to(torch.uint8)
    if pixels.dtype != torch.uint8 or pixels.ndim not in (2, 3):
        raise SampleError(
            f"the image of sample {position} is {pixels.dtype} {tuple(pixels.shape)}: give a PIL image, uint8, or "
            "floating point within 0..1 (images are normalised later, on the device)"
        )
    return _channels_first(pixels[None])[0]


def _stack(images: list[Tensor]) -> Tensor:
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise SampleError(f"the images of a batch differ in shape ({shapes[0]}, {shapes[-1]}): set --data.image_size")
    return torch.stack(images)

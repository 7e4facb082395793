"""Image datasets by name: digits, torchvision's, class folders, or the import path of a Dataset class."""

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, is_image_file

from lit_dp.dataset_class import DatasetClass, import_dataset
from lit_dp.datasets import Contents, DecodedImages, ImageDataset, InMemoryImages, SampleError, Source, one_line
from lit_dp.errors import ConfigError

_TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
NAMES = ("digits", *_TORCHVISION, "image_folder")
CHOICES = (
    f"Type one of {', '.join(NAMES)}, or the import path of a torch Dataset class "
    "(torchvision.datasets.SVHN, my_package.MyData)"
)


def find_source(dataset: str, root: str | None, arguments: dict[str, Any]) -> Source:
    """The source that `dataset` stands for: a known name, or the import path of a `Dataset` class.

    Raises:
        ConfigError: it is neither, or cannot be imported.
    """
    key = _plain(dataset)
    known = {_plain(name): name for name in NAMES}
    is_path = "." in dataset and all(part.isidentifier() for part in dataset.split("."))
    if key not in known and not is_path:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {known[near[0]]}?" if near else ""
        raise ConfigError(f"unknown dataset {dataset!r}.{hint} {CHOICES}")
    name = known.get(key, dataset)
    if name in ("digits", "image_folder") and arguments:
        raise ConfigError(f"{name} takes no dataset_args (got {', '.join(arguments)}): leave them out")
    if name == "digits":
        return Digits()
    if name == "image_folder":
        return ImageFolderTree(_existing_folder(root))
    path = f"torchvision.datasets.{_TORCHVISION[name]}" if name in _TORCHVISION else name
    return DatasetClass(name, import_dataset(path, CHOICES), root, arguments)


def cut_missing(parts: dict[str, ImageDataset], fractions: dict[str, float], seed: int) -> dict[str, ImageDataset]:
    """All of train, val and test: those that are missing are cut from train by `fractions`, in the dataset's order.

    Raises:
        ConfigError: a part would be empty.
    """
    length = len(parts["train"])
    if length and fractions.keys() <= parts.keys():
        return parts  # and no copy of them
    lengths = {name: round(length * fraction) for name, fraction in fractions.items() if name not in parts}
    lengths["train"] = length - sum(lengths.values())
    if min(lengths.values()) < 1:
        counts = ", ".join(f"{count} for {name}" for name, count in lengths.items())
        raise ConfigError(f"{length} images would be cut into {counts}: change val_fraction or test_fraction")
    # Its own generator: under a seed that differs between ranks, one would validate on what another trains on.
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    pieces = zip(lengths, order.split(list(lengths.values())), strict=True)
    return parts | {name: parts["train"].subset(positions.sort().values) for name, positions in pieces}


class Digits(Source):
    """The 1,797 digits that come with this package; `assets/digits.LICENSE.md` says whose they are."""

    def load(self) -> Contents:
        with np.load(Path(__file__).parent / "assets" / "digits.npz") as file:
            images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
        # 0..16 counts the ink in a 4 x 4 block: spread it over the range that augmentations expect of uint8.
        spread = (images.int() * 255 // 16).to(torch.uint8)
        return Contents([str(digit) for digit in range(10)], {"train": InMemoryImages(spread[:, None], labels)})


@dataclass(frozen=True)
class ImageFolderTree(Source):
    """Class folders below root/train, root/val and root/test, or one tree of class folders below root."""

    root: Path

    def _trees(self) -> dict[str, Path]:
        # A folder `train` that holds no folders is a class of that name, in one tree.
        if not any(entry.is_dir() for entry in (self.root / "train").glob("*")):
            return {"train": self.root}
        trees = {name: self.root / name for name in ("train", "val", "test") if (self.root / name).is_dir()}
        # ImageNet and many others come with train and val only: val is then what one tests on.
        return {"test": trees["val"], **trees} if "val" in trees else trees

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

    def load(self) -> Contents:
        folders = {name: ImageFolder(str(tree), loader=_read_image) for name, tree in self._trees().items()}
        classes = folders["train"].classes
        return Contents(classes, {name: DecodedImages(folder, len(classes)) for name, folder in folders.items()})


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _existing_folder(root: str | None) -> Path:
    if root is None:
        raise ConfigError("image_folder needs the folder that holds the class folders: give it as --data.root")
    if not Path(root).is_dir():
        raise ConfigError(f"there is no folder {Path(root).absolute()}: give the one with the images as --data.root")
    return Path(root)


def _files(folder: Path) -> Iterator[str]:
    return (name for _, _, names in os.walk(folder, followlinks=True) for name in names)


def _read_image(path: str) -> Image.Image:
    try:
        with open(path, "rb") as file:
            return Image.open(file).convert("RGB")
    except Exception as error:  # a damaged file makes the decoders raise almost anything
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else one_line(error)
        raise SampleError(f"cannot read the image {path} ({reason}): mend it or remove it") from error

"""What is trained in `bench overhead`: three nets and their images, in a tutorial's form and held in memory.

No Lightning here: a loop by hand would not import it, and the seconds to its first step are measured.
"""

import functools
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

CLASSES, WARM_UP = 10, 5
LEARNING_RATE, MOMENTUM = 0.05, 0.9
TRAINING, VALIDATION = 60_000, 10_000
"""Samples, as many as Fashion-MNIST's."""


@dataclass(frozen=True)
class Job:
    """A net, its images and how many of them a rank takes a step.

    `network` is an import path, as a config names it. `plain` is the net as a tutorial writes it, where ours lies
    otherwise in memory.
    """

    title: str
    shape: tuple[int, int, int]
    batch: int
    network: str
    arguments: dict[str, Any]
    plain: str | None = None
    dataset: str | None = None

    def build(self, plain: bool = False) -> nn.Module:
        """The net, with the same weights whenever and wherever it is built."""
        torch.manual_seed(0)
        module, _, name = ((self.plain if plain else None) or self.network).rpartition(".")
        return getattr(import_module(module), name)(**self.arguments)


def resnet18(num_classes: int) -> nn.Module:
    """torchvision's ResNet-18, its weights in channels_last as those of our own nets."""
    return torchvision.models.resnet18(num_classes=num_classes).to(memory_format=torch.channels_last)  # pyright: ignore


_OURS, _TENS = "lit_dp.networks", {"num_classes": CLASSES}
JOBS = {
    "mlp": Job("MLP 32-32-10, batch 8", (1, 4, 8), 8, f"{_OURS}.MLP", {"in_features": 32, "hidden": [32], **_TENS}),
    "cnn": Job("SmallCNN, batch 64", (1, 28, 28), 64, f"{_OURS}.SmallCNN", _TENS, dataset="fashion_mnist"),
    "resnet18": Job(
        "ResNet-18, 64x64 images, batch 8",
        (3, 64, 64),
        8,
        f"{__name__}.resnet18",
        _TENS,
        plain="torchvision.models.resnet18",
    ),
    "digits": Job("SmallCNN, digits, batch 64", (1, 8, 8), 64, f"{_OURS}.SmallCNN", _TENS, dataset="digits"),
}


def network(job: str) -> nn.Module:
    """A job's net, for a config: every kind of training begins with the same weights."""
    return JOBS[job].build()


class Images(NamedTuple):
    """Images uint8 (N, C, H, W) and labels int64 (N,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Data:
    """Where a job's samples come from, and how many are read; the same on every process.

    Attributes:
        job: one of `JOBS`.
        root: folder of FashionMNIST/.
        samples: of the training, the first ones; None for all, and all of the validation's.
    """

    job: str
    root: str = "data"
    samples: int | None = None

    @property
    def real(self) -> bool:
        """Whether there is a dataset: otherwise samples are synthetic."""
        kind = JOBS[self.job].dataset
        return kind == "digits" or (kind == "fashion_mnist" and (Path(self.root) / "FashionMNIST/raw").is_dir())

    @property
    def origin(self) -> str:
        return str(JOBS[self.job].dataset) if self.real else f"synthetic {'x'.join(map(str, JOBS[self.job].shape))}"

    def held(self, train: bool) -> Images:
        """All samples as two tensors."""
        count = self._count(train)
        if self.real:
            return Images(*(column[:count] for column in _read(self.job, self.root, train)))
        return _synthetic(JOBS[self.job].shape, count or (TRAINING if train else VALIDATION), int(train))

    def tutorial(self, train: bool) -> Dataset[Any]:
        """The samples as a tutorial has them: (float32 (C, H, W), int), one at a time."""
        if JOBS[self.job].dataset == "fashion_mnist" and self.real:
            dataset = FashionMNIST(self.root, train=train, transform=ToTensor())
            dataset.data, dataset.targets = (c[: self._count(train)] for c in (dataset.data, dataset.targets))
            return dataset
        images, labels = self.held(train)
        return TensorDataset(scaled(images), labels) if self.job == "mlp" else Pictures(images, labels)

    def _count(self, train: bool) -> int | None:
        if train or self.samples is None:
            return self.samples
        return min(VALIDATION, 2 * max(1, self.samples // 32))  # equal shares of two ranks


class Pictures(Dataset[Any]):
    """Images that are read as torchvision's datasets read those that they hold: by way of PIL."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels, self.transform = images, labels, ToTensor()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        return self.transform(Image.fromarray(pixels.numpy())), int(self.labels[index])


def scaled(images: Tensor) -> Tensor:
    """uint8 as float32 0 to 1: the bits that ToTensor gives."""
    return images.float().div(255)


@functools.cache
def _read(job: str, root: str, train: bool) -> Images:
    if JOBS[job].dataset == "fashion_mnist":
        dataset = FashionMNIST(root, train=train)
        return Images(dataset.data[:, None], dataset.targets)
    from lit_dp.sources import Digits

    part: Any = Digits().load().parts["train"]  # 1,797, of which the last 360 validate
    return Images(*((column[:1437] if train else column[1437:]) for column in (part.images, part.labels)))


@functools.cache
def _synthetic(shape: tuple[int, int, int], count: int, seed: int) -> Images:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)
    return Images(images, torch.randint(CLASSES, (count,), generator=generator))

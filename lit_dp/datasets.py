"""Images by the batch: how a part of a dataset is held and read, and what a source of such parts is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2.functional import pil_to_tensor

from lit_dp.engine.randomness import begin_sample
from lit_dp.errors import RunError

_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


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
            images = [self._augmented(index, image) for index, image in zip(indices, images, strict=True)]
        return Batch(images if isinstance(images, Tensor) else _stack(images), labels, torch.tensor(indices))

    def _augmented(self, index: int, image: Tensor) -> Tensor:
        assert self.transform is not None
        begin_sample(index, "augment")  # the draws are this sample's, whoever reads it beside which others
        return self.transform(image)


class InMemoryImages(ImageDataset):
    """Images (uint8 (N, C, H, W)) and labels (int64 (N,)) that are held as two tensors: a batch is one gather."""

    @property
    def draws(self) -> bool:
        """Whether a read draws random numbers."""
        return self.transform is not None

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.contiguous(), labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        positions = torch.tensor(indices)
        return self.images.index_select(0, positions), self.labels.index_select(0, positions)

    def subset(self, positions: Tensor) -> "InMemoryImages":
        return InMemoryImages(self.images[positions], self.labels[positions])

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        pairs = [_mean_and_std(channel) for channel in self.images.unbind(1)]
        return [mean for mean, _ in pairs], [std for _, std in pairs]


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
        samples = [self._sample(index, int(self.positions[index])) for index in indices]
        return [image for image, _ in samples], torch.tensor([label for _, label in samples])

    def subset(self, positions: Tensor) -> "DecodedImages":
        return DecodedImages(self.dataset, self.num_classes, self.positions[positions])

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        channels = len(self.read([0])[0][0])
        return _IMAGENET if channels == 3 else ([0.5] * channels, [0.5] * channels)

    def _sample(self, index: int, position: int) -> tuple[Tensor, int]:
        begin_sample(index)
        image, label = self.dataset[position][:2]
        if not 0 <= int(label) < self.num_classes:
            raise SampleError(f"sample {position} has the label {label}: labels are 0 to {self.num_classes - 1}")
        return _to_uint8(image, position), int(label)


@dataclass(frozen=True)
class Contents:
    """A source's classes, by label, and its parts: `train`, and `val` and `test` where it has them."""

    classes: list[str]
    parts: dict[str, ImageDataset]


class Source:
    """Where a dataset comes from. It answers three questions, the cheap one first: `check`, `prepare`, `load`.

    `local`: it can be loaded, and so checked, without a download.
    """

    local = True

    def check(self) -> None:
        """Refuse what cannot be loaded, as far as it can be told at once."""

    def prepare(self) -> None:
        """Download what is missing; on one process a node."""

    def load(self) -> Contents:
        """The parts, on every process."""
        raise NotImplementedError


def one_line(error: BaseException) -> str:
    """The error's text, or its type where it has none, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def channels_first(images: Tensor) -> Tensor:
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
    return channels_first(pixels[None])[0]


def _mean_and_std(pixels: Tensor) -> tuple[float, float]:
    """From a histogram, in integers: the same bits on every process, whatever its number of threads."""
    counts = torch.bincount(pixels.flatten(), minlength=256)
    levels = torch.arange(256)
    first, second, size = int((counts * levels).sum()), int((counts * levels**2).sum()), pixels.numel()
    variance = (size * second - first**2) / size**2
    return first / size / 255, variance**0.5 / 255 or 1.0  # a channel of one value is left unscaled


def _stack(images: list[Tensor]) -> Tensor:
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise SampleError(f"the images of a batch differ in shape ({shapes[0]}, {shapes[-1]}): set --data.image_size")
    return torch.stack(images)

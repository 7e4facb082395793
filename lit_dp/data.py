"""The data module: which images a rank trains on, is evaluated on and predicts, in batches of which size.

Its loaders are plain, `shuffle` aside: which sample goes to which rank is the strategy's affair (and Lightning's
`DistributedSampler`'s with `strategy: ddp`). Images stay uint8 until they are on the device: a quarter of the bytes.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lit_dp.datasets import Batch, DecodedImages, ImageDataset, Source
from lit_dp.errors import ConfigError, RunError
from lit_dp.sources import cut_missing, find_source

DEFAULT_BATCH_SIZE = 32
MAX_WORKERS = 8


class ImageDataModule(LightningDataModule):
    """Images and their classes, from a dataset that is given by name.

    A batch is the tuple (images uint8 (B, C, H, W), labels int64 (B,), indices int64 (B,)); `on_after_batch_transfer`
    makes the images float32 of mean 0 and standard deviation 1. An index is the sample's position in its part.

    Attributes (after `setup`):
        classes: The classes' names, in the order of the labels.
        num_classes: Their number.
        sample_shape: (C, H, W) of every image.
        mean: A channel's mean, for pixel values scaled to 0..1: the training part's own where it is held in memory,
            else ImageNet's.
        std: The standard deviation likewise.

    Args:
        dataset: digits, mnist, fashion_mnist, cifar10, cifar100, image_folder, or the import path of a torch Dataset
            class whose samples are (image, label), such as torchvision.datasets.SVHN or my_package.MyData.
        root: Folder that holds the dataset; torchvision's are downloaded to it, "data" by default. For image_folder:
            root/train, root/val and root/test with a folder a class in each (val also tests where there is no test),
            or one tree of class folders.
        batch_size: Images a batch on each process; 32 if global_batch_size is not given either.
        global_batch_size: Images a batch over all processes, shared equally between them.
        augmentation: torchvision.transforms.v2 transforms, applied to one uint8 training image after the other.
        image_size: Height and width in pixels: the shorter side is resized to it and the centre cropped. In training
            after the augmentation, so that an image which that has brought to this size is left as it is.
        val_fraction: Share of the training images that is kept for validation, where there is no such part; of all
            images, where test_fraction is cut from them too.
        test_fraction: Share of all images that is kept for testing, where the dataset has no test part of its own.
        split_seed: Seed of these cuts; no other seed moves them.
        num_workers: Worker processes a loader; by default none for a dataset in memory, else the cores there are for
            each process, at most 8.
        dataset_args: More arguments of the dataset's class.
    """

    classes: list[str]
    num_classes: int
    sample_shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]

    def __init__(
        self,
        dataset: str = "digits",
        root: str | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        augmentation: list[torch.nn.Module] | None = None,
        image_size: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        split_seed: int = 0,
        num_workers: int | None = None,
        dataset_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.root = root
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.augmentation = augmentation or []
        self.image_size = image_size
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.dataset_args = dataset_args or {}
        self.planned_world_size: int | None = None  # processes to plan for, where they do not run
        self._parts: dict[str, ImageDataset] = {}
        self._pixel_stats: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def check(self, world_size: int) -> None:
        """Refuse what cannot work, before another process is started. Nothing is downloaded; any rank may call it.

        Raises:
            ConfigError: with what to type instead.
        """
        self._batch_size_a_process(world_size)
        for name, least in (("image_size", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: give {least} or more")
        for name in ("val_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number between 0 and 1")
        source = self._source()
        source.check()
        if source.local and not self._parts:
            self._parts = self._load(source)

    def prepare_data(self) -> None:
        """Download what is missing; Lightning calls it on one process a node.

        Raises:
            RunError: neither the files nor the network are there.
        """
        self._source().prepare()

    def setup(self, stage: str | None = None) -> None:
        """Load all parts, whatever the stage: equal on all ranks, with no communication. Every rank calls it."""
        self.check(self._world_size())
        if not self._parts:
            self._parts = self._load(self._source())

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Normalise the images, on the device that they have reached. Needs no trainer.

        Anything but a batch of uint8 images is returned as it is: Lightning passes `example_input_array` through here.
        """
        if not (isinstance(batch, tuple | list) and len(batch) == 3 and batch[0].dtype == torch.uint8):
            return batch
        images, labels, indices = batch
        mean, std = self._pixel_stats_on(images.device)
        images = (images.float() - mean) / std
        if self.trainer is not None:
            # Lightning has converted the batch to its `precision` already, but that leaves integers as they are.
            images = self.trainer.precision_plugin.convert_input(images)
        return Batch(images, labels, indices)

    def _source(self) -> Source:
        return find_source(self.dataset, self.root, self.dataset_args)

    def _load(self, source: Source) -> dict[str, ImageDataset]:
        contents = source.load()
        fractions = {"test": self.test_fraction, "val": self.val_fraction}
        parts = cut_missing(contents.parts, fractions, self.split_seed)
        fit = [] if self.image_size is None else [v2.Resize(self.image_size), v2.CenterCrop(self.image_size)]
        for name, part in parts.items():
            transforms = [*self.augmentation, *fit] if name == "train" else fit
            part.transform = v2.Compose(transforms) if transforms else None
        self.classes, self.num_classes = contents.classes, len(contents.classes)
        self.mean, self.std = parts["train"].mean_and_std()
        self.sample_shape = self._common_shape(parts)
        return parts

    def _common_shape(self, parts: dict[str, ImageDataset]) -> tuple[int, int, int]:
        """(C, H, W) of an image of the training and of the evaluation parts, which must agree."""
        with torch.random.fork_rng(devices=[]):  # trying the augmentation must not move the run's random numbers
            trained = parts["train"][0].images
        evaluated = parts["val"][0].images
        if trained.dtype != torch.uint8 or trained.shape != evaluated.shape:
            raise ConfigError(
                f"training images are {trained.dtype} {tuple(trained.shape)}, evaluation images {evaluated.dtype} "
                f"{tuple(evaluated.shape)}: augmentation must keep uint8, and --data.image_size makes sizes equal"
            )
        channels, height, width = evaluated.shape
        return channels, height, width

    def _loader(self, name: str, shuffle: bool = False) -> DataLoader[Batch]:
        if not self._parts:
            raise RunError("no dataset is loaded yet: call prepare_data() and setup() before asking for a loader")
        part = self._parts[name]
        workers = self._workers_for(part)
        return DataLoader(
            part,
            batch_size=self._batch_size_a_process(self._world_size()),
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_read,
            pin_memory=torch.cuda.is_available(),
        )

    def _batch_size_a_process(self, world_size: int) -> int:
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ConfigError(
                f"batch_size is {self.batch_size} and global_batch_size {self.global_batch_size}: give one, batch_size "
                "for each process or global_batch_size for all of them together"
            )
        name = "batch_size" if self.global_batch_size is None else "global_batch_size"
        value = getattr(self, name)
        if value is None:
            return DEFAULT_BATCH_SIZE
        if value < 1:
            raise ConfigError(f"{name} is {value}: give 1 or more")
        if name == "batch_size":
            return value
        share, rest = divmod(value, world_size)
        if rest:
            fitting = " or ".join(str(count * world_size) for count in (share, share + 1) if count)
            raise ConfigError(f"global_batch_size {value} cannot be shared by {world_size} processes: give {fitting}")
        return share

    def _world_size(self) -> int:
        """Ranks that share a global batch: virtual ones, where the strategy has them."""
        virtual_ranks = getattr(getattr(self.trainer, "strategy", None), "virtual_ranks", None)
        if virtual_ranks is not None:
            return virtual_ranks
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size()
        if self.planned_world_size is not None:
            return self.planned_world_size
        return 1 if self.trainer is None else self.trainer.num_devices * self.trainer.num_nodes

    def _workers_for(self, part: ImageDataset) -> int:
        if self.num_workers is not None:
            return self.num_workers
        if not isinstance(part, DecodedImages):
            return 0
        if self.trainer is not None:
            processes = self.trainer.num_devices
        else:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size()))
        return min(MAX_WORKERS, _cores() // processes)

    def _pixel_stats_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of pixel values 0..255, (C, 1, 1); copied once, as a copy makes a GPU wait."""
        if device not in self._pixel_stats:
            mean, std = (255 * torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
            self._pixel_stats[device] = mean.to(device), std.to(device)
        return self._pixel_stats[device]


def _as_read(batch: Any) -> Batch:
    return batch  # the dataset has collated it


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

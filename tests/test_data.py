"""The data module: every image in one part, equal on all ranks, in the order and the number that was asked for."""

import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchvision import datasets as torchvision_datasets
from torchvision.transforms import v2

from lit_dp.data import MAX_WORKERS, ImageDataModule, _cores
from lit_dp.datasets import DecodedImages, InMemoryImages
from lit_dp.errors import ConfigError, RunError
from lit_dp.sources import cut_missing
from tests.ranks import run_ranks

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_fashion_mnist = pytest.mark.skipif(not (SHARED / "FashionMNIST").is_dir(), reason="no Fashion-MNIST at hand")
PARTS = ("train", "val", "test")
BAD_IMAGE = b"\xff\xd8\xff not a picture"


def loaded(**options: Any) -> ImageDataModule:
    data = ImageDataModule(**options)
    data.prepare_data()
    data.setup()
    return data


def loader(data: ImageDataModule, part: str) -> torch.utils.data.DataLoader:
    return getattr(data, f"{part}_dataloader")()


def drain(batches: torch.utils.data.DataLoader) -> None:
    """Read all batches. After an error the workers are stopped here: if the garbage collector comes upon the iterator
    in the traceback's cycle, torch waits 5 s for each of them."""
    iterator: Any = iter(batches)
    try:
        list(iterator)
    finally:
        if batches.num_workers:
            iterator._shutdown_workers()


def images_of(data: ImageDataModule, part: str) -> Tensor:
    """(N, C, H, W) in the dataset's order."""
    dataset = loader(data, part).dataset
    return dataset.__getitems__(list(range(len(dataset)))).images  # pyright: ignore


def lengths(data: ImageDataModule) -> list[int]:
    return [len(loader(data, part).dataset) for part in PARTS]  # pyright: ignore[reportArgumentType]


def attached(data: ImageDataModule, devices: int, nodes: int = 1) -> ImageDataModule:
    data.trainer = SimpleNamespace(num_devices=devices, num_nodes=nodes, precision_plugin=Precision())  # pyright: ignore
    return data


def make_tree(root: Path, images: int = 10, classes: tuple[str, ...] = ("ant", "bee"), size: int = 8) -> Path:
    """A folder a class of grey images whose every pixel is the image's number in the tree."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(images):
            level = label * images + number
            Image.fromarray(np.full((size, size, 3), level, np.uint8)).save(root / name / f"{number:03}.png")
    return root


class Squares(Dataset):
    """What a user writes: sample i is a uint8 image of the level i, of class i % 3."""

    classes = ("a", "b", "c")

    def __init__(self, size: int = 60, image: Callable[[int], Any] | None = None) -> None:
        self.size, self.image = size, image or (lambda index: torch.full((3, 4, 4), index, dtype=torch.uint8))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.image(index), index % 3


class SquaresWithTrain(Squares):
    def __init__(self, train: bool) -> None:
        super().__init__(50 if train else 20)


class SquaresWithSplit(Squares):
    def __init__(self, split: str = "train") -> None:
        if split not in ("train", "val"):  # such as ImageNet's
            raise ValueError(f"unknown split {split}")
        super().__init__(50 if split == "train" else 20)


class SquaresWithOddSplits(Squares):
    def __init__(self, split: str = "train-standard") -> None:
        if split not in ("train-standard", "val-standard"):  # such as Places365's
            raise ValueError(f"unknown split {split}")
        super().__init__(20)


class SquaresOfFraction(Squares):
    """`split` is not the name of a part here, and must be left alone."""

    def __init__(self, split: float = 0.5) -> None:
        super().__init__(int(100 * split))


class Stream(IterableDataset):
    pass


class NoClasses(Dataset):
    def __len__(self) -> int:
        return 10


class ManyLabels(Squares):
    classes = ("only one",)


class NeedsScipy(Squares):
    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")


def here(cls: type) -> str:
    return f"{__name__}.{cls.__name__}"


# What a batch is


def test_a_batch_is_a_tuple_of_images_labels_and_positions() -> None:
    data = loaded(batch_size=16)
    images, labels, indices = batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, tuple)
    assert (images.dtype, labels.dtype, indices.dtype) == (torch.uint8, torch.int64, torch.int64)
    assert (images.shape, labels.shape, indices.shape) == ((16, 1, 8, 8), (16,), (16,))
    train: Any = data.train_dataloader().dataset
    for image, label, index in zip(images, labels, indices.tolist(), strict=True):
        assert torch.equal(image, train[index].images)
        assert label == train[index].labels


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", ["digits", "folder"])
def test_workers_change_nothing(source: str, workers: int, tmp_path: Path) -> None:
    options = (
        {"dataset": "digits"} if source == "digits" else {"dataset": "image_folder", "root": str(make_tree(tmp_path))}
    )
    expected = list(loaded(**options, batch_size=7, num_workers=0).val_dataloader())
    batches = list(loaded(**options, batch_size=7, num_workers=workers).val_dataloader())
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert type(batch) is type(other)
        assert all(map(torch.equal, batch, other))


def test_digits_are_the_1797_of_uci() -> None:
    data = loaded()
    assert (data.classes, data.num_classes, data.sample_shape) == ([str(d) for d in range(10)], 10, (1, 8, 8))
    assert lengths(data) == [1797 - 180 - 359, 180, 359]
    images = torch.cat([images_of(data, part) for part in PARTS])
    labels = torch.cat([loader(data, part).dataset.labels for part in PARTS])  # pyright: ignore
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI counts them
    assert sorted(images.unique().tolist()) == [level * 255 // 16 for level in range(17)]


def test_every_image_is_in_one_part() -> None:
    data = loaded(dataset=here(Squares), split_seed=3)
    levels = [images_of(data, part)[:, 0, 0, 0].tolist() for part in PARTS]
    assert sorted(itertools.chain(*levels)) == list(range(60))
    assert [len(part) for part in levels] == [42, 6, 12]


def test_an_epoch_has_every_sample_once_with_the_last_partial_batch() -> None:
    data = loaded(batch_size=64)
    for part, length in zip(PARTS, lengths(data), strict=True):
        batches = [batch.indices for batch in loader(data, part)]
        assert sorted(torch.cat(batches).tolist()) == list(range(length))
        assert len(batches[-1]) == length % 64


@pytest.mark.parametrize("part", ["val", "test", "predict"])
def test_evaluation_and_prediction_keep_the_datasets_order(part: str) -> None:
    data = loaded(dataset=here(Squares), batch_size=4)
    batches = list(loader(data, part))
    assert torch.cat([batch.indices for batch in batches]).tolist() == list(range(sum(len(b.labels) for b in batches)))
    levels = torch.cat([batch.images[:, 0, 0, 0] for batch in batches]).tolist()
    assert levels == sorted(levels)


def test_training_is_shuffled() -> None:
    indices = torch.cat([batch.indices for batch in loaded().train_dataloader()])
    assert not torch.equal(indices, indices.sort().values)


# The cut


def test_the_cut_follows_split_seed_and_no_other() -> None:
    torch.manual_seed(1)
    first = images_of(loaded(), "val")
    torch.manual_seed(2)
    assert torch.equal(first, images_of(loaded(), "val"))
    assert not torch.equal(first, images_of(loaded(split_seed=1), "val"))


@pytest.mark.parametrize("augmentation", [None, [v2.RandomHorizontalFlip()]])
def test_setup_leaves_the_global_random_numbers_alone(augmentation: list | None, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    loaded(augmentation=augmentation)
    loaded(dataset="image_folder", root=str(make_tree(tmp_path)), augmentation=augmentation)
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_test_part_does_not_move_with_val_fraction() -> None:
    assert torch.equal(images_of(loaded(), "test"), images_of(loaded(val_fraction=0.3), "test"))


def test_only_what_is_missing_is_cut_and_copied() -> None:
    part = InMemoryImages(torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64))
    whole: dict[str, Any] = {"train": part, "val": part.subset(torch.arange(2)), "test": part.subset(torch.arange(3))}
    fractions = {"test": 0.2, "val": 0.2}
    assert all(cut is whole[name] for name, cut in cut_missing(whole, fractions, 0).items())
    lacking = cut_missing({name: whole[name] for name in ("train", "test")}, fractions, 0)
    assert lacking["train"] is not part
    assert {name: len(cut) for name, cut in lacking.items()} == {"train": 8, "test": 3, "val": 2}


def _cut_under_the_ranks_own_seed() -> bytes:
    torch.manual_seed(int(os.environ["RANK"]))
    return images_of(loaded(), "val").numpy().tobytes()


def test_ranks_with_different_seeds_cut_alike() -> None:
    first, second = run_ranks(2, _cut_under_the_ranks_own_seed)
    assert first == second


# Normalisation


def test_training_images_have_mean_0_and_deviation_1() -> None:
    data = loaded()
    train = images_of(data, "train")
    images, *_ = data.on_after_batch_transfer((train, train[:, 0, 0, 0].long(), torch.arange(len(train))), 0)
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 1e-5
    assert abs(float(images.std(correction=0)) - 1) < 1e-5
    assert data.mean == pytest.approx([float(train.double().mean() / 255)])


def test_channels_are_normalised_each_by_its_own() -> None:
    levels = torch.tensor([[[0, 255], [255, 0]], [[10, 10], [30, 30]], [[7, 7], [7, 7]]], dtype=torch.uint8)
    mean, std = InMemoryImages(levels[None], torch.zeros(1, dtype=torch.int64)).mean_and_std()
    assert mean == pytest.approx([0.5, 20 / 255, 7 / 255])
    assert std == pytest.approx([0.5, 10 / 255, 1.0])  # a constant channel is not divided by 0
    for level in range(256):
        constant = torch.full((3, 1, 5, 5), level, dtype=torch.uint8)
        assert InMemoryImages(constant, torch.zeros(3, dtype=torch.int64)).mean_and_std()[1] == [1.0]


def test_what_is_no_batch_of_ours_passes() -> None:
    data, example = loaded(), torch.zeros(1, 1, 8, 8)
    assert data.on_after_batch_transfer(example, 0) is example
    pair = (torch.zeros(2, 1, 8, 8), torch.zeros(2))
    assert data.on_after_batch_transfer(pair, 0) is pair


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # true of digits, which need none
def test_lightning_normalises_in_its_precision_and_predicts_in_order(precision: Any, dtype: torch.dtype) -> None:
    seen = []

    class Probe(LightningModule):
        def predict_step(self, batch: Any) -> Tensor:
            seen.append(batch.images.dtype)
            return batch.indices

    data = ImageDataModule(batch_size=100)
    trainer = Trainer(accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False)
    order: Any = trainer.predict(Probe(), data)
    assert torch.cat(order).tolist() == list(range(359))
    assert set(seen) == {dtype}


# Augmentation


def test_every_image_of_a_batch_is_augmented_by_itself() -> None:
    class Level(torch.nn.Module):
        """Draws once a call, as v2 transforms do."""

        def forward(self, image: Tensor) -> Tensor:
            assert image.shape == (1, 8, 8)
            return torch.full_like(image, int(torch.randint(256, ())))

    data = loaded(augmentation=[Level()], batch_size=32)
    images = next(iter(data.train_dataloader())).images
    assert len(images[:, 0, 0, 0].unique()) > 16
    assert images_of(data, "val").equal(images_of(loaded(), "val"))  # training only


def test_a_flip_flips_some_images_of_a_batch() -> None:
    plain, flipped = loaded(), loaded(augmentation=[v2.RandomHorizontalFlip()])
    indices = list(range(64))
    before, after = (data.train_dataloader().dataset.__getitems__(indices).images for data in (plain, flipped))  # pyright: ignore
    turned = [torch.equal(a.flip(-1), b) and not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert 10 < sum(turned) < 54
    assert all(torch.equal(a, b) or turn for a, b, turn in zip(before, after, turned, strict=True))


def test_image_size_resizes_every_part_and_keeps_a_fitting_augmentation(tmp_path: Path) -> None:
    options: Any = {"dataset": "image_folder", "root": str(make_tree(tmp_path, size=20))}
    data = loaded(**options, image_size=12, augmentation=[v2.RandomResizedCrop(12), v2.RandomHorizontalFlip()])
    assert data.sample_shape == (3, 12, 12)
    assert [next(iter(loader(data, part))).images.shape[1:] for part in PARTS] == [(3, 12, 12)] * 3
    pixels = torch.randint(256, (3, 12, 12), dtype=torch.uint8)
    assert torch.equal(v2.CenterCrop(12)(v2.Resize(12)(pixels)), pixels)


# Sources


@needs_fashion_mnist
def test_fashion_mnist_is_read_from_a_folder_that_may_be_read_only() -> None:
    data = loaded(dataset="Fashion-MNIST", root=str(SHARED), batch_size=64)
    assert lengths(data) == [54_000, 6_000, 10_000]
    assert (data.num_classes, data.sample_shape, data.classes[9]) == (10, (1, 28, 28), "Ankle boot")
    assert data.mean == pytest.approx([0.2860], abs=1e-3)
    assert data.std == pytest.approx([0.3530], abs=1e-3)
    reference = torchvision_datasets.FashionMNIST(SHARED, train=False)
    assert torch.equal(images_of(data, "test")[:, 0], reference.data)
    assert data.test_dataloader().num_workers == 0


@pytest.mark.parametrize("cls", [SquaresWithTrain, SquaresWithSplit])
def test_a_class_with_parts_keeps_its_test_part(cls: type) -> None:
    data = loaded(dataset=here(cls))
    assert lengths(data) == [45, 5, 20]
    assert images_of(data, "test")[:, 0, 0, 0].tolist() == list(range(20))


def test_a_part_fixed_in_dataset_args_is_cut() -> None:
    assert lengths(loaded(dataset=here(SquaresWithSplit), dataset_args={"split": "val"})) == [14, 2, 4]
    assert lengths(loaded(dataset=here(SquaresOfFraction))) == [35, 5, 10]
    assert lengths(loaded(dataset=here(Squares), dataset_args={"size": 20})) == [14, 2, 4]


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (lambda i: Image.new("RGB", (4, 4), (9, 8, 7)), [9, 8, 7]),
        (lambda i: Image.new("RGBA", (4, 4), (9, 8, 7, 255)), [9, 8, 7]),
        (lambda i: Image.new("L", (4, 4), 9), [9]),
        (lambda i: np.full((4, 4, 3), [9, 8, 7], np.uint8), [9, 8, 7]),
        (lambda i: np.full((4, 4), 9, np.uint8), [9]),
        (lambda i: torch.full((1, 4, 4), 9, dtype=torch.uint8), [9]),
        (lambda i: torch.full((1, 4, 4), 9 / 255), [9]),
    ],
)
def test_a_sample_may_be_an_image_an_array_or_a_tensor(image: Callable, pixel: list[int]) -> None:
    data = loaded(dataset=here(Squares), dataset_args={"image": image})
    images = images_of(data, "train")
    assert images.dtype == torch.uint8
    assert images[0, :, 0, 0].tolist() == pixel
    assert images.shape[1:] == (len(pixel), 4, 4) == data.sample_shape


def test_floating_point_images_are_rounded_to_the_nearest_level() -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    data = loaded(dataset=here(Squares), dataset_args={"image": lambda index: (levels / 255 - 0.4 / 255).relu()})
    assert torch.equal(images_of(data, "train")[0], levels)


class FakeSVHN(Dataset):
    """Arrays laid out as torchvision's SVHN holds them, without the files."""

    __module__ = "torchvision.datasets.svhn"

    def __init__(self, root: str, split: str = "train", download: bool = False) -> None:
        self.data, self.labels = np.arange(240, dtype=np.uint8).reshape(20, 3, 2, 2), np.arange(20) % 3


class FakeCIFAR(FakeSVHN):
    __module__ = "torchvision.datasets.cifar"

    def __init__(self, root: str, train: bool, download: bool = False) -> None:
        super().__init__(root)
        self.targets, self.data = self.labels.tolist(), self.data.transpose(0, 2, 3, 1)


@pytest.mark.parametrize("cls", [FakeSVHN, FakeCIFAR])
def test_torchvisions_arrays_are_held_channels_first(cls: type) -> None:
    data = loaded(dataset=f"{__name__}.{cls.__name__}")
    test: Any = data.test_dataloader().dataset
    assert isinstance(test, InMemoryImages)
    assert test[0].images.flatten().tolist() == list(range(12))
    assert (data.classes, data.sample_shape) == (["0", "1", "2"], (3, 2, 2))


def test_one_tree_is_cut_and_read_in_order(tmp_path: Path) -> None:
    data = loaded(dataset="image-folder", root=str(make_tree(tmp_path)))
    assert (data.classes, lengths(data)) == (["ant", "bee"], [14, 2, 4])
    levels = [images_of(data, part)[:, 0, 0, 0].tolist() for part in PARTS]
    assert sorted(itertools.chain(*levels)) == list(range(20))
    assert all(part == sorted(part) for part in levels)


@pytest.mark.parametrize(
    ("trees", "expected"), [(PARTS, [8, 6, 4]), (("train", "test"), [7, 1, 4]), (("train",), [6, 1, 1])]
)
def test_a_tree_a_part(trees: tuple[str, ...], expected: list[int], tmp_path: Path) -> None:
    for tree in trees:
        make_tree(tmp_path / tree, images={"train": 4, "val": 3, "test": 2}[tree])
    assert lengths(loaded(dataset="image_folder", root=str(tmp_path), test_fraction=0.13)) == expected


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    assert loaded(dataset="image_folder", root=str(make_tree(tmp_path, classes=("plane", "train")))).num_classes == 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # the twelve cores are pretended; no worker starts
def test_default_workers_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_dp.data._cores", lambda: 12)
    data = loaded(dataset="image_folder", root=str(make_tree(tmp_path)))
    assert data.train_dataloader().num_workers == MAX_WORKERS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert data.train_dataloader().num_workers == 3
    assert attached(data, devices=2, nodes=2).train_dataloader().num_workers == 6
    assert attached(data, devices=24).train_dataloader().num_workers == 0
    assert data.train_dataloader().persistent_workers is False
    assert loaded().train_dataloader().num_workers == 0
    assert _cores() >= 1


# Batch sizes


def test_batch_size_is_per_process_and_global_batch_size_is_shared() -> None:
    assert loaded().train_dataloader().batch_size == 32
    assert attached(loaded(batch_size=24), 2).train_dataloader().batch_size == 24
    data = loaded(global_batch_size=48)
    assert data.train_dataloader().batch_size == 48
    assert attached(data, devices=2, nodes=3).val_dataloader().batch_size == 8


def _batch_size_in_a_group() -> int | None:
    torch.distributed.init_process_group("gloo")
    try:
        return loaded(global_batch_size=48).train_dataloader().batch_size
    finally:
        torch.distributed.destroy_process_group()


def test_the_process_group_tells_the_world_size() -> None:
    assert run_ranks(2, _batch_size_in_a_group) == [24, 24]


# Errors: one line that says what to type


def one_line_error(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dataset": "fashion_mnits"},
            "unknown dataset 'fashion_mnits'. Did you mean fashion_mnist? Type one of digits, ",
        ),
        (
            {"dataset": "zzz"},
            "unknown dataset 'zzz'. Type one of digits, mnist, fashion_mnist, cifar10, cifar100, image_folder",
        ),
        ({"dataset": "no_such_package.Data"}, "cannot import the dataset 'no_such_package.Data' (No module named"),
        ({"dataset": "torchvision.datasets.SVNH"}, "has no attribute 'SVNH'"),
        ({"dataset": ".Data"}, "unknown dataset '.Data'. Type one of"),
        ({"dataset": "pathlib.Path"}, "pathlib.Path is not a torch Dataset class"),
        ({"dataset": here(Stream)}, "is an IterableDataset: write a Dataset with __len__ and __getitem__"),
        (
            {"dataset": here(Squares), "dataset_args": {"siez": 3}},
            "unexpected keyword argument 'siez': mend dataset_args",
        ),
        ({"dataset_args": {"size": 3}}, "digits takes no dataset_args (got size)"),
        ({"dataset": "image_folder"}, "give it as --data.root"),
        ({"dataset": "image_folder", "root": "no/such"}, "no/such: give the one with the images as --data.root"),
        ({"batch_size": 2, "global_batch_size": 4}, "batch_size is 2 and global_batch_size 4: give one"),
        ({"batch_size": 0}, "batch_size is 0: give 1 or more"),
        ({"global_batch_size": -3}, "global_batch_size is -3: give 1 or more"),
        ({"global_batch_size": 100}, "global_batch_size 100 cannot be shared by 3 processes: give 99 or 102"),
        ({"global_batch_size": 2}, "global_batch_size 2 cannot be shared by 3 processes: give 3"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0: give a number between 0 and 1"),
        ({"val_fraction": 0.0}, "val_fraction is 0.0: give a number between 0 and 1"),
        ({"test_fraction": -0.1}, "test_fraction is -0.1: give a number between 0 and 1"),
        ({"test_fraction": float("nan")}, "test_fraction is nan: give a number"),
        ({"val_fraction": 0.0001}, "1797 images would be cut into 359 for test, 0 for val, 1438 for train: change"),
        ({"val_fraction": 0.8}, "1797 images would be cut into 359 for test, 1438 for val, 0 for train: change"),
        ({"num_workers": -1}, "num_workers is -1: give 0 or more"),
        ({"image_size": 0}, "image_size is 0: give 1 or more"),
        (
            {"augmentation": [v2.ToDtype(torch.float32)]},
            "training images are torch.float32 (1, 8, 8), evaluation images",
        ),
        ({"augmentation": [v2.CenterCrop(4)]}, "(1, 4, 4), evaluation images torch.uint8 (1, 8, 8): augmentation must"),
    ],
)
def test_check_refuses(options: dict[str, Any], message: str) -> None:
    assert message in one_line_error(ConfigError, lambda: ImageDataModule(**options).check(world_size=3))


def test_setup_checks_too() -> None:
    data = attached(ImageDataModule(global_batch_size=9), devices=2)
    assert "give 8 or 10" in one_line_error(ConfigError, data.setup)


@pytest.mark.parametrize(
    ("cls", "kind", "message"),
    [
        (NoClasses, ConfigError, "NoClasses names no classes: give it `classes` (names) or `num_classes`"),
        (NeedsScipy, RunError, "NeedsScipy needs the package scipy: pip install scipy"),
        (SquaresWithOddSplits, ConfigError, "unknown split trainval: give the split to read in dataset_args"),
        (ManyLabels, RunError, "labels are 0 to 0"),
    ],
)
def test_a_class_that_cannot_serve(cls: type, kind: type[Exception], message: str) -> None:
    def read_all() -> None:
        images_of(loaded(dataset=here(cls)), "train")

    assert message in one_line_error(kind, read_all)


def test_images_that_are_already_normalised_are_refused() -> None:
    options: Any = {"dataset": here(Squares), "dataset_args": {"image": lambda index: torch.full((3, 4, 4), -1.5)}}
    assert "give a PIL image, uint8, or floating point within 0..1" in one_line_error(
        RunError, lambda: loaded(**options)
    )


@pytest.mark.parametrize("empty", ["", "bee"])
def test_folders_without_images_are_named(empty: str, tmp_path: Path) -> None:
    if empty:
        make_tree(tmp_path, classes=("ant",))
    (tmp_path / empty).mkdir(exist_ok=True)
    (tmp_path / empty / "notes.txt").write_text("no image")
    data = ImageDataModule(dataset="image_folder", root=str(tmp_path))
    text = one_line_error(ConfigError, lambda: data.check(world_size=1))
    assert f"no images in {tmp_path / empty}: " in text
    assert ".jpg .jpeg .png" in text


def test_trees_of_different_classes_are_refused(tmp_path: Path) -> None:
    make_tree(tmp_path / "train", classes=("ant", "bee", "cow"))
    make_tree(tmp_path / "test", classes=("ant", "bee", "dog"))
    data = ImageDataModule(dataset="image_folder", root=str(tmp_path))
    text = one_line_error(ConfigError, lambda: data.check(world_size=1))
    assert "differ in the class folders cow, dog" in text
    assert str(tmp_path / "test") in text


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["garbage", "truncated"])
def test_a_corrupt_image_is_named(damage: str, workers: int, tmp_path: Path) -> None:
    for tree in PARTS:
        make_tree(tmp_path / tree)
    bad = tmp_path / "test" / "bee" / "003.png"
    bad.write_bytes(BAD_IMAGE if damage == "garbage" else bad.read_bytes()[:-30])
    data = loaded(dataset="image_folder", root=str(tmp_path), num_workers=workers, batch_size=4)
    text = one_line_error(RunError, lambda: drain(data.test_dataloader()))
    assert text.startswith(f"cannot read the image {bad} (")
    assert text.endswith("): mend it or remove it")


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_several_sizes_ask_for_image_size(workers: int, tmp_path: Path) -> None:
    make_tree(tmp_path)
    Image.new("RGB", (5, 6)).save(tmp_path / "ant" / "zzz.png")
    data = ImageDataModule(
        dataset="image_folder", root=str(tmp_path), num_workers=workers, test_fraction=0.5, val_fraction=0.4
    )

    def read_all() -> None:
        data.setup()
        for part in PARTS:
            drain(loader(data, part))

    # Whichever part it fell in: ConfigError where setup meets it, RunError where a batch does.
    assert "--data.image_size" in one_line_error((ConfigError, RunError), read_all)  # pyright: ignore


def test_a_download_that_fails_says_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Network is unreachable\nat all")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", unreachable)
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", unreachable)
    for dataset in ("mnist", "cifar10"):
        data = ImageDataModule(dataset=dataset, root=str(tmp_path))
        data.check(world_size=1)
        text = one_line_error(RunError, data.prepare_data)
        assert text.startswith(f"{dataset} is not below {tmp_path} and cannot be downloaded (")
        assert text.endswith("): give the folder that holds it as --data.root")
        assert f"{dataset} cannot be read below {tmp_path}" in one_line_error(RunError, data.setup)


def test_a_loader_before_setup_is_refused() -> None:
    assert "call prepare_data() and setup()" in one_line_error(RunError, ImageDataModule().train_dataloader)


# The surface


def test_every_argument_is_described_for_help() -> None:
    arguments = list(inspect.signature(ImageDataModule).parameters)
    described = re.findall(r"^        (\w+): ", (ImageDataModule.__doc__ or "").split("Args:")[1], re.MULTILINE)
    assert described == arguments


def test_scikit_learn_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # importing it would now fail
    assert len(images_of(loaded(), "train"))


def test_decoded_parts_share_the_dataset(tmp_path: Path) -> None:
    data = loaded(dataset="image_folder", root=str(make_tree(tmp_path)))
    parts: list[Any] = [loader(data, part).dataset for part in PARTS]
    assert all(isinstance(part, DecodedImages) and part.dataset is parts[0].dataset for part in parts)

"""The command line: what a run leaves behind, and one clear line for everything a person may get wrong."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from lit_dp.networks import SmallCNN
from lit_dp.usage import shipped_configs, with_shipped_configs
from tests.command import Ended, lit_dp

SHARED = Path(__file__).parents[2] / "shared/data"
FEW = ("--trainer.max_epochs", "2", "--trainer.enable_model_summary", "false")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A short run of the default job on two ranks, and its folder."""
    cwd = tmp_path_factory.mktemp("run")
    first, second = lit_dp("fit", *FEW, ranks=2, cwd=cwd)
    assert first.code == second.code == 0, first.err + second.err
    assert second.out == ""  # rank 0 speaks
    return cwd / "runs/digits", first


def test_fit_leaves_one_folder(run: tuple[Path, Ended]) -> None:
    folder, _ = run
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {"config.yaml", "metrics.csv", "curves.png", "checkpoints/best.ckpt", "checkpoints/last.ckpt"}
    with (folder / "metrics.csv").open() as file:
        accuracies = [float(row["val/acc"]) for row in csv.DictReader(file) if row["val/acc"]]
    assert len(accuracies) == 2
    assert max(accuracies) > 0.5
    with Image.open(folder / "curves.png") as picture:
        assert picture.size[0] > 500
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 2


def test_fit_says_the_best_value_where_it_is_and_what_to_type_next(run: tuple[Path, Ended]) -> None:
    folder, ended = run
    lines = ended.out.splitlines()
    epochs = [line.split()[1] for line in lines if line.startswith("epoch ") and "val/acc" in line]
    assert epochs == ["1/2", "2/2"]
    printed = {line.split()[0]: line for line in lines}
    best = float(printed["best"].split()[-1])
    assert printed["checkpoint"] == "checkpoint runs/digits/checkpoints/best.ckpt"
    command = printed["next:"].removeprefix("next: python -m lit_dp ").split()
    assert command[0] == "test"
    assert lit_dp(*command, cwd=folder.parents[1])[0].code == 0
    assert (folder / "test/confusion.png").exists()

    command[0] = "validate"
    for ranks in (1, 2):
        ended = lit_dp(*command, ranks=ranks, cwd=folder.parents[1])[0]
        found = re.search(r"val/acc\W+([\d.]+)", ended.out)
        assert found is not None, ended
        assert f"{float(found[1]):.4f}" == f"{best:.4f}"  # the table prints more digits of the same number


def test_saved_config_runs_again_unchanged(run: tuple[Path, Ended]) -> None:
    folder, first = run
    again = lit_dp("fit", "--config", "runs/digits/config.yaml", ranks=2, cwd=folder.parents[1])[0]
    assert again.code == 0
    weights = [line for line in first.out.splitlines() if line.startswith("weights")]
    assert weights[0] in again.out
    saved = [yaml.safe_load((folder.parent / name / "config.yaml").read_text()) for name in ("digits", "digits-2")]
    assert [config.pop("name") for config in saved] == ["digits", "digits-2"]
    assert saved[0] == saved[1]


def test_checkpoint_loads_without_lightning_into_the_bare_network(run: tuple[Path, Ended], tmp_path: Path) -> None:
    script = f"""
import sys, torch
checkpoint = torch.load({str(run[0] / "checkpoints/best.ckpt")!r}, weights_only=True)
assert not any(name.split(".")[0] in ("lightning", "lit_dp") for name in sys.modules)
weights = {{k.removeprefix("network."): v for k, v in checkpoint["state_dict"].items() if k.startswith("network.")}}
torch.save(weights, {str(tmp_path / "bare.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    network = SmallCNN(num_classes=10).eval()
    before = network(torch.ones(1, 1, 8, 8))
    network.load_state_dict(torch.load(tmp_path / "bare.pt", weights_only=True), strict=True)
    assert not torch.equal(network(torch.ones(1, 1, 8, 8)), before)


# --- what a person may get wrong: one line, and the exit code ---


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """An ImageFolder tree of two classes, 6 images each."""
    for name in ("cats", "dogs"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (16, 16), (40 * i, 80, 120)).save(tmp_path / "pictures" / name / f"{i}.png")
    return tmp_path / "pictures"


TWO_CLASSES = ("--model.num_classes", "2", "--model.network.num_classes", "2", "--model.network.in_channels", "3")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--data.dataset", "digitz"], 2, ["digitz", "Did you mean digits", "fashion_mnist", "image_folder"]),
        (["--data.dataset", "image_folder"], 2, ["root"]),
        (["--data.dataset", "image_folder", "--data.root", "nowhere"], 2, ["nowhere"]),
        (["--data.dataset", "image_folder", "--data.root", "empty"], 2, ["empty", ".png"]),
        (["--data.global_batch_size", "33", "--data.batch_size", "null"], 2, ["33", "2 processes", "32", "34"]),
        (["--model.num_classes", "7"], 2, ["data has 10 classes", "model.num_classes is 7"]),
        (["--model.network.num_classes", "12"], 2, ["12 outputs", "model.num_classes is 10"]),
        (["--trainer.accelerator", "gpu", "--trainer.devices", "2"], 2, ["gpu"]),
        (["--trainer.devices", "8"], 2, ["8", "WORLD_SIZE=2"]),
        (["--trainer.strategy", "dp"], 2, ["DataParallel", "--trainer.strategy ddp"]),
        (["--trainer.strategy", "ddpp"], 2, ["ddpp"]),
        (["--trainer.epochs", "3"], 2, ["--trainer.epochs", "--trainer."]),
        (["--model.network.widht", "3"], 2, ["SmallCNN has no argument 'widht'", "did you mean width?"]),
        (["--model.optimizer", "Adm"], 2, ["Adm names no class", "torch.optim.SGD"]),
        (["--config", "digitz"], 2, ["digitz", "did you mean digits?"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_wrong_usage_is_one_line(args: list[str], code: int, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty/cats").mkdir(parents=True)
    first, second = lit_dp("fit", *FEW, *args, ranks=2, cwd=tmp_path)
    assert (first.code, second.code) == (code, code), first.err
    assert first.out == ""
    said = "".join({first.err, second.err})  # by the first that finds it, or by both in the same words
    assert len(said.splitlines()) == 1, said
    assert len(said) < 600
    assert said.startswith("error: ")
    for word in words:
        assert word in said
    assert not list(tmp_path.rglob("*.ckpt"))


def test_corrupt_image_is_named_with_its_path(pictures: Path, tmp_path: Path) -> None:
    (pictures / "dogs/3.png").write_bytes(b"no picture")
    args = ["--data.dataset", "image_folder", "--data.root", pictures, "--data.image_size", "16", *TWO_CLASSES]
    ended = lit_dp("fit", *FEW, *args, "--data.num_workers", "0", ranks=2, cwd=tmp_path)
    assert [rank.code for rank in ended] == [1, 1]
    lines = [line for rank in ended for line in rank.err.splitlines() if line.startswith("error: ")]
    assert any("dogs/3.png" in line for line in lines)
    assert len(lines) <= 2
    assert not any("Traceback" in rank.err for rank in ended)


# --- configs and help ---


def test_every_shipped_config_runs(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_downloads(tmp_path / "data", monkeypatch)
    tiny = ["--data.image_size", "32", "--data.num_workers", "0", "--model.num_classes", "2"]
    more = {
        "image_folder": ["--data.root", pictures, *tiny, "--model.network.num_classes", "2"],
        "imagenet_resnet50": ["--data.root", pictures, *tiny, "--model.network.num_classes", "2"],
        **{name: ["--data.root", tmp_path / "data"] for name in ("mnist", "fashion_mnist", "cifar10")},
    }
    for name in shipped_configs():
        args = ["--config", name, *more.get(name, []), "--trainer.fast_dev_run", "true"]
        ended = lit_dp("fit", *args, cwd=tmp_path)[0]
        assert ended.code == 0, f"{name}: {ended.err}"
        assert "epoch" in ended.out


def _fake_downloads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny files in torchvision's layouts: MNIST's and FashionMNIST's idx files, CIFAR-10's pickles."""
    import pickle

    import numpy as np
    from torchvision.datasets import CIFAR10

    for name in ("MNIST", "FashionMNIST"):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "t10k"):
            images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
            (raw / f"{part}-images-idx3-ubyte").write_bytes(
                b"".join(n.to_bytes(4, "big") for n in (0x803, 40, 28, 28)) + images.tobytes()
            )
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(
                b"".join(n.to_bytes(4, "big") for n in (0x801, 40)) + bytes(range(10)) * 4
            )
    folder = root / CIFAR10.base_folder
    folder.mkdir()
    entry = {"data": np.zeros((40, 3072), dtype=np.uint8), "labels": list(range(10)) * 4}
    for file, _ in CIFAR10.train_list + CIFAR10.test_list:
        (folder / file).write_bytes(pickle.dumps(entry))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)


def test_config_names_are_resolved() -> None:
    digits = str(shipped_configs()["digits"])
    assert with_shipped_configs(["fit"]) == ["fit", "--config", digits]
    assert with_shipped_configs(["fit", "--config", "digits"]) == ["fit", "--config", digits]
    assert with_shipped_configs(["fit", "--config=digits"]) == ["fit", f"--config={digits}"]
    assert with_shipped_configs(["fit", "--model", "my.Module"]) == ["fit", "--model", "my.Module"]
    assert with_shipped_configs(["--help"]) == ["--help"]


def test_help_fits_on_a_screen(tmp_path: Path) -> None:
    ended = lit_dp("fit", "--help", cwd=tmp_path)[0]
    assert ended.code == 0
    assert len(ended.out.splitlines()) < 30
    for word in ("--trainer.devices", "--data", "digits", "--print_config"):
        assert word in ended.out


def test_print_config_shows_what_is_set_and_runs(tmp_path: Path) -> None:
    ended = lit_dp("fit", "--print_config", cwd=tmp_path)[0]
    assert ended.code == 0
    config = yaml.safe_load(ended.out)
    assert config["model"]["class_path"] == "lit_dp.LitClassifier"
    assert None not in config["trainer"].values()
    (tmp_path / "mine.yaml").write_text(ended.out)
    ended = lit_dp("fit", "--config", "mine.yaml", "--trainer.fast_dev_run", "true", cwd=tmp_path)[0]
    assert ended.code == 0, ended.err


def test_an_optimizer_gets_no_settings_of_another_class(tmp_path: Path) -> None:
    """jsonargparse keeps settings where the class changes: SGD without weight_decay would have AdamW's 0.01."""
    config = tmp_path / "sgd.yaml"
    config.write_text(
        "model: {class_path: lit_dp.LitClassifier, init_args: {num_classes: 10,"
        " network: {class_path: lit_dp.networks.MLP, init_args: {in_features: 64, num_classes: 10}},"
        " optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}}}\n"
    )
    ended = lit_dp("fit", "--config", config, "--print_config=", cwd=tmp_path)[0]
    assert ended.code == 0, ended
    assert "weight_decay: 0.0" in ended.out
    assert "weight_decay: 0.01" not in ended.out

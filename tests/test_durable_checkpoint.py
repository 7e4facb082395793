"""A checkpoint is durable: whatever call of a save fails or is the last, a complete one is found, and no wrong one."""

import contextlib
import errno
import functools
import io
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from torch.serialization import set_crc32_options
from torch.utils.data import DataLoader

from lit_dp.engine import checkpoint, checkpoint_content, checkpoint_files, checkpoint_write
from lit_dp.engine.checkpoint import DurableCheckpointIO
from lit_dp.engine.checkpoint_files import examine, newest
from lit_dp.errors import ConfigError, RunError
from tests.ranks import run_ranks
from tests.training import faulty_copy

ERRORS = [errno.ENOSPC, errno.EACCES, errno.EIO]
NAN = float("nan")

# Where Slurm is installed Lightning warns of a Trainer without srun, whatever the Trainer is for.
on_a_cluster = pytest.mark.filterwarnings("ignore:The `srun` command is available")


def content(step: int, weight: float | None = None) -> dict[str, Any]:
    """A checkpoint whose tensors all tell its step."""
    weights = {"w": torch.full((50,), float(step) if weight is None else weight), "count": torch.tensor(step)}
    momenta = {"state": {0: {"momentum": torch.full((50,), float(step))}}}
    return {"epoch": step // 2, "global_step": step, "state_dict": weights, "optimizer_states": [momenta]}


def save(path: Path | str, step: int, weight: float | None = None, io: CheckpointIO | None = None) -> None:
    (io or DurableCheckpointIO()).save_checkpoint(content(step, weight), path)


def step_of(path: Path | str | None) -> int:
    """The step of the file, all of whose tensors must be that step's."""
    assert path is not None
    loaded = DurableCheckpointIO().load_checkpoint(path)
    step = loaded["global_step"]
    torch.testing.assert_close(loaded["optimizer_states"], content(step)["optimizer_states"], rtol=0, atol=0)
    assert loaded["state_dict"]["count"] == step
    assert loaded["state_dict"]["w"].isnan().all() or (loaded["state_dict"]["w"] == step).all()
    return step


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- one save after another -------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "it" / "last.ckpt"
    for step in (1, 2, 3):
        save(path, step)
    assert names(path.parent) == {"last.ckpt", "last.previous.ckpt"}
    assert (step_of(path), step_of(path.with_name("last.previous.ckpt"))) == (3, 2)
    assert newest(path.parent) == (path, [])
    found = examine(str(path))
    assert (found.fault, found.epoch, found.global_step, found.finite) == (None, 1, 3, True)
    assert abs(found.when / 1e9 - time.time()) < 60
    DurableCheckpointIO().remove_checkpoint(tmp_path / "not there.ckpt")


def test_loads_on_the_cpu_with_names_that_are_not_ascii(tmp_path: Path) -> None:
    path = tmp_path / "époque" / "acc=0.9 é.ckpt"
    save(f"file://{path}", 4)
    assert step_of(path) == 4
    assert newest(path.parent)[0] == path
    assert DurableCheckpointIO().load_checkpoint(path)["state_dict"]["w"].device.type == "cpu"


def test_the_newest_is_by_step_then_epoch_then_time(tmp_path: Path) -> None:
    for name, step in [("c", 3), ("a", 5), ("b", 4), (".hidden", 9)]:
        save(tmp_path / f"{name}.ckpt", step)
    (tmp_path / "folder.ckpt").mkdir()
    assert newest(tmp_path)[0] == tmp_path / "a.ckpt"
    save(tmp_path / "d.ckpt", 5)
    os.utime(tmp_path / "a.ckpt", ns=(0, 2_000))
    os.utime(tmp_path / "d.ckpt", ns=(0, 2_001))
    assert newest(tmp_path)[0] == tmp_path / "d.ckpt"
    assert newest(tmp_path, but=[tmp_path / "d.ckpt"])[0] == tmp_path / "a.ckpt"
    assert newest(tmp_path / "nowhere") == (None, [])


def test_leftovers_of_killed_saves_are_overwritten_and_never_harm_a_good_file(tmp_path: Path) -> None:
    last, old = tmp_path / "last.ckpt", tmp_path / ".epoch=3.ckpt.partial"
    save(last, 1)
    # Killed between link and rename: the leftover is a second name of a good file, and is where that one is staged.
    os.link(last, tmp_path / ".last.previous.ckpt.partial")
    save(tmp_path / "last.previous.ckpt", 2)
    assert (step_of(last), step_of(tmp_path / "last.previous.ckpt")) == (1, 2)
    for leftover in (tmp_path / ".last.ckpt.partial", tmp_path / ".young.ckpt.partial", old):
        leftover.write_bytes(b"PK\x03\x04 torn")
    os.utime(old, (0, 0))
    save(last, 3)
    assert names(tmp_path) == {"last.ckpt", "last.previous.ckpt", ".young.ckpt.partial"}  # may be another run's
    assert (newest(tmp_path), step_of(last)) == ((last, []), 3)


def test_a_save_killed_between_its_two_renames_is_followed_by_a_good_one(tmp_path: Path) -> None:
    """Both names are one file then, which a rename would leave as they are."""
    save(tmp_path / "last.ckpt", 1)
    os.link(tmp_path / "last.ckpt", tmp_path / "last.previous.ckpt")
    save(tmp_path / "last.ckpt", 2)
    assert names(tmp_path) == {"last.ckpt", "last.previous.ckpt"}
    assert (step_of(tmp_path / "last.ckpt"), step_of(tmp_path / "last.previous.ckpt")) == (2, 1)


# --- damaged files ----------------------------------------------------------------------------------------------------


def differs(path: Path, expected: dict[str, Any]) -> bool:
    """Whether torch alone loads something else from `path`."""
    loaded = torch.load(path, weights_only=True)
    try:
        torch.testing.assert_close(loaded, {**expected, checkpoint_files.FINITE: True}, rtol=0, atol=0)
    except AssertionError:
        return True
    return False


def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 7)
    good = path.read_bytes()
    draw, found = random.Random(0), 0
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        if examine(path).fault:
            found += 1
        else:  # torch pads records to 64 bytes, and reads sizes and checksums in one of their two places
            assert not differs(path, content(7)), position
    assert found > len(good) / 2


def test_every_truncation_and_every_zeroed_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 7)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        fault = examine(path, every_record=False).fault
        assert fault in ("is torn: its end is missing", "is empty", "is not a checkpoint (of torch.save's zip format)")
    for start in range(0, len(good), 512):  # sectors that never reached the disk
        path.write_bytes(good[:start] + bytes(512) + good[start + 512 :])
        assert examine(path).fault
    path.write_bytes(good)
    assert examine(path).healthy


def test_tensors_that_torch_reads_wrong_without_a_word_are_refused(tmp_path: Path) -> None:
    """torch.load verifies no checksum: where this fails it does, and `damage` may become simpler."""
    path = tmp_path / "last.ckpt"
    save(path, 7)
    good = path.read_bytes()
    in_tensor = good.index(content(7)["state_dict"]["w"].numpy().tobytes()) + 9
    folder_flag = good.rindex(b"archive/data/0") - 8  # MS-DOS's, in the zip's directory
    for position, bit in [(in_tensor, 1), (folder_flag, 16)]:
        flipped = bytearray(good)
        flipped[position] ^= bit
        path.write_bytes(flipped)
        assert any(differs(path, content(7)) for _ in range(20))  # memory that torch leaves as it was may be right
        assert (examine(path).fault or "").startswith("is corrupt")
        with pytest.raises(RunError, match="is corrupt"):
            DurableCheckpointIO().load_checkpoint(path)
    trusting = faulty_copy(checkpoint_files, "record.external_attr or ", "")
    assert trusting.examine(path).healthy


def test_a_broken_file_is_named_with_the_one_to_use_instead(tmp_path: Path) -> None:
    last, before = tmp_path / "last.ckpt", tmp_path / "last.previous.ckpt"
    save(last, 1)
    save(last, 2)
    last.write_bytes(last.read_bytes()[:1000])
    assert newest(tmp_path) == (before, [f"{last} is torn: its end is missing"])
    with pytest.raises(RunError) as raised:
        DurableCheckpointIO().load_checkpoint(last)
    assert str(raised.value) == f"checkpoint {last} is torn: its end is missing. Use {before} instead"
    before.unlink()
    torch.save([torch.ones(3)], before)
    assert "no epoch and global_step" in newest(tmp_path)[1][1]
    for name, written, fault in [
        ("none", None, "does not exist"),
        ("empty", b"", "is empty"),
        ("text", b"x" * 99, "is not a"),
    ]:
        path = tmp_path / f"{name}.ckpt"
        if written is not None:
            path.write_bytes(written)
        with pytest.raises(RunError, match=f"{name}.ckpt {fault}.*No other valid checkpoint is in"):
            DurableCheckpointIO().load_checkpoint(path)


def test_a_rotten_newest_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    save(last, 1)
    save(last, 2)
    rotten = bytearray(last.read_bytes())
    rotten[rotten.index(torch.full((50,), 2.0).numpy().tobytes()) + 9] ^= 1
    last.write_bytes(rotten)
    path, passed = newest(tmp_path)
    assert step_of(path) == 1
    assert re.fullmatch(rf"{last} is corrupt: Bad CRC-32 for file '.*/data/\d'", passed[0])
    assert faulty_copy(checkpoint_files, "if every_record or ", "if ").newest(tmp_path)[0] == last


def test_checksums_are_written_where_they_were_switched_off(tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        save(tmp_path / "last.ckpt", 1)
        assert not torch.serialization.get_crc32_options()
        torch.save(content(1), tmp_path / "plain.ckpt")
    finally:
        set_crc32_options(True)
    assert examine(tmp_path / "last.ckpt").healthy
    assert not examine(tmp_path / "plain.ckpt").healthy


# --- what a checkpoint may hold ---------------------------------------------------------------------------------------


class Config:
    """Not plain."""


MISFITS = {
    "a functools.partial": functools.partial(torch.optim.SGD, lr=0.1),
    "a type (of torch.nn.modules.activation.ReLU)": torch.nn.ReLU,
    "a function": lambda: 1,
    "a tests.test_durable_checkpoint.Config": Config(),
    "a pathlib.PosixPath": Path("/data"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_would_not_load_is_named_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    last = tmp_path / "last.ckpt"
    save(last, 1)
    hparams = {"lr": 0.1, "optimizer": {"kinds": [1, MISFITS[kind]]}}
    with pytest.raises(ConfigError) as raised:
        DurableCheckpointIO().save_checkpoint({**content(2), "hyper_parameters": hparams}, last)
    message = str(raised.value)
    assert f"hyper_parameters['optimizer']['kinds'][1] is {kind}" in message
    assert 'self.save_hyperparameters(ignore=["optimizer"])' in message
    assert names(tmp_path) == {"last.ckpt"}
    assert step_of(last) == 1


def test_other_places_get_other_advice_and_allowed_classes_pass(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    with pytest.raises(ConfigError, match=r"callbacks\['Mine'\]\['config'\] is a .*Config.*add_safe_globals"):
        DurableCheckpointIO().save_checkpoint({**content(2), "callbacks": {"Mine": {"config": Config()}}}, last)
    with torch.serialization.safe_globals([Config]):
        DurableCheckpointIO().save_checkpoint({**content(2), "callbacks": {"Mine": {"config": Config()}}}, last)
        assert step_of(last) == 2
    assert "holds tests.test_durable_checkpoint.Config: it loads" in newest(tmp_path)[1][0]
    with pytest.raises(RunError, match=r"last.ckpt holds tests\.test_durable_checkpoint\.Config, .*weights_only=False"):
        DurableCheckpointIO().load_checkpoint(last)
    assert isinstance(
        DurableCheckpointIO().load_checkpoint(last, weights_only=False)["callbacks"]["Mine"]["config"], Config
    )


def test_a_file_that_would_not_load_never_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the walk over the entries stands the file itself."""
    save(tmp_path / "last.ckpt", 1)
    monkeypatch.setattr(checkpoint, "require_plain", lambda *_: None)
    with pytest.raises(ConfigError, match=r"last.ckpt is not saved: .*functools\.partial"):
        DurableCheckpointIO().save_checkpoint({**content(2), "f": functools.partial(print)}, tmp_path / "last.ckpt")
    assert names(tmp_path) == {"last.ckpt"}
    assert step_of(tmp_path / "last.ckpt") == 1


class Linear(LightningModule):
    """A module that saves a class with its hyperparameters, as jsonargparse's callables are."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).mean() * (NAN if self.global_step >= 2 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(5, 1))  # pyright: ignore[reportArgumentType]


def lightnings_trainer(**kwargs: Any) -> Trainer:
    """Lightning's own, which does not look for nan."""
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(accelerator="cpu", devices=1, **off, **kwargs)


@on_a_cluster
def test_a_lightning_modules_hyperparameters(tmp_path: Path) -> None:
    trainer = lightnings_trainer(max_steps=1, enable_checkpointing=False, plugins=[DurableCheckpointIO()])
    trainer.fit(Linear())
    with pytest.raises(ConfigError, match=r"hyper_parameters\['optimizer'\] is a type \(of torch.optim.sgd.SGD\)"):
        trainer.save_checkpoint(tmp_path / "last.ckpt")


# --- weights that are nan ---------------------------------------------------------------------------------------------


def test_finite_is_what_every_float_says() -> None:
    inf, kinds = float("inf"), (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2)
    for kind, bad, place in itertools.product(kinds, (NAN, inf, -inf), (0, 7, 98)):
        values = torch.linspace(-1, 1, 99).to(kind)
        assert checkpoint_content.all_finite({"ints": torch.tensor(3), "name": "x", "none": torch.ones(0), "w": values})
        values[place] = bad
        assert not checkpoint_content.all_finite({"ints": torch.tensor(3), "w": values})
    assert not checkpoint_content.all_finite({"w": torch.tensor([1j, complex(0, NAN)]).conj()})
    assert not checkpoint_content.all_finite({"w": torch.tensor([[0.0, NAN]]).to_sparse()})
    assert not checkpoint_content.all_finite({"w": torch.tensor([0.0, inf, -inf])})
    mask = torch.full((4, 4), -inf).triu(1)
    assert checkpoint_content.all_finite({"attention.mask": mask, "best": torch.tensor(inf)})


def test_a_finite_checkpoint_is_not_pushed_out_by_nan(tmp_path: Path) -> None:
    last, before = tmp_path / "last.ckpt", tmp_path / "last.previous.ckpt"
    save(last, 1)
    for step in (2, 3, 4):
        save(last, step, NAN)
        assert not examine(last).finite
        assert (step_of(before), examine(before).finite) == (1, True)
        assert newest(tmp_path) == (before, [f"{last} holds weights that are nan or infinite"])
    save(last, 5)
    assert (step_of(before), newest(tmp_path)) == (1, (last, []))
    save(last, 6)
    assert step_of(before) == 5


def test_neither_by_nan_over_a_file_that_is_rotten(tmp_path: Path) -> None:
    last, before = tmp_path / "last.ckpt", tmp_path / "last.previous.ckpt"
    save(last, 1)
    save(last, 2)
    rotten = bytearray(last.read_bytes())
    rotten[rotten.index(torch.full((50,), 2.0).numpy().tobytes()) + 9] ^= 1
    last.write_bytes(rotten)
    save(last, 3, NAN)
    assert step_of(before) == 1


def removed(folder: Path, io: CheckpointIO, *saves: tuple[str, float | None]) -> set[str]:
    """What is left after saves with one name each, each followed by the removal of the one before."""
    for step, (name, weight) in enumerate(saves):
        save(folder / f"{name}.ckpt", step, weight, io)
        if step:
            io.remove_checkpoint(str(folder / f"{saves[step - 1][0]}.ckpt"))
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt")}


def test_rotation_spares_the_last_finite_checkpoint(tmp_path: Path) -> None:
    healthy = [("a", None), ("b", None), ("c", None)]
    assert removed(tmp_path / "1", DurableCheckpointIO(), *healthy) == {"c.ckpt"}
    turned = [*healthy[:2], ("c", NAN), ("d", NAN), ("e", NAN)]
    with pytest.warns(UserWarning, match="b.ckpt is kept: no other checkpoint with finite weights is left") as said:
        left = removed(tmp_path / "2", DurableCheckpointIO(), *turned)
    assert (left, len(said)) == ({"b.ckpt", "e.ckpt"}, 1)
    assert removed(tmp_path / "3", TorchCheckpointIO(), *turned) == {"e.ckpt"}


def test_rotation_between_folders_and_of_hidden_files_removes(tmp_path: Path) -> None:
    moving = [("a/x", None), ("b/x", None), ("c/.tuner", None), ("c/.tuner2", NAN)]
    assert removed(tmp_path, DurableCheckpointIO(), *moving) == {"c/.tuner2.ckpt"}


def test_removal_takes_the_one_before_along_unless_it_is_the_last_finite(tmp_path: Path) -> None:
    io, best, before = DurableCheckpointIO(), tmp_path / "best.ckpt", tmp_path / "best.previous.ckpt"
    for step in (1, 2):
        save(best, step, io=io)
    save(tmp_path / "last.ckpt", 3, io=io)
    io.remove_checkpoint(best)
    assert names(tmp_path) == {"last.ckpt"}
    for path in (best, tmp_path / "last.ckpt"):
        save(path, 4, io=io)
        save(path, 5, NAN, io=io)
        save(path, 6, NAN, io=io)
    (tmp_path / "last.previous.ckpt").unlink()
    (tmp_path / "link.ckpt").symlink_to(before.name)
    with pytest.warns(UserWarning, match="best.previous.ckpt is kept"):
        io.remove_checkpoint(best)
    assert (step_of(before), best.exists()) == (4, False)


class Turning(Linear):
    """Its loss is nan from the third step on, and nobody stops it."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.layer = torch.nn.Linear(1, 1, bias=False)


@on_a_cluster
@pytest.mark.parametrize("ours", [True, False])
def test_a_run_that_turns_to_nan_can_go_back(tmp_path: Path, ours: bool) -> None:
    """Fails for False when upstream keeps it: see whether `remove_checkpoint` is still needed."""
    rotating = ModelCheckpoint(tmp_path, "{step}", save_top_k=1, every_n_train_steps=1)
    plugins = [DurableCheckpointIO()] if ours else []
    trainer = lightnings_trainer(max_epochs=1, callbacks=[rotating], plugins=plugins)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is kept: no other checkpoint")
        trainer.fit(Turning())
    steps = {path.name for path in tmp_path.glob("*.ckpt")}
    assert steps == ({"step=2.ckpt", "step=5.ckpt"} if ours else {"step=5.ckpt"})
    loads = [
        torch.load(path, weights_only=True)["state_dict"]["layer.weight"].isfinite() for path in tmp_path.glob("*")
    ]
    assert any(loads) == ours


# --- memory -----------------------------------------------------------------------------------------------------------


def _kilobytes(key: str) -> int:
    return int(re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def copies_in_memory(folder: Path, io: CheckpointIO) -> float:
    """Highest memory of a save above what was held before, in sizes of the model: one tensor of 160 MB."""
    weights = {"w": torch.ones(40_000_000)}
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _kilobytes("VmRSS")
    io.save_checkpoint({"epoch": 0, "global_step": 1, "state_dict": weights}, str(folder / "last.ckpt"))
    assert examine(folder / "last.ckpt").healthy or isinstance(io, TorchCheckpointIO)
    return (_kilobytes("VmHWM") - before) * 1024 / (weights["w"].numel() * 4)


def test_no_second_copy_in_memory(tmp_path: Path) -> None:
    assert run_ranks(1, copies_in_memory, tmp_path, DurableCheckpointIO())[0] < 0.2
    assert run_ranks(1, copies_in_memory, tmp_path, TorchCheckpointIO())[0] > 0.8


# --- every call fails, every call is the last -------------------------------------------------------------------------

SCENES = {
    "over two": ([(1, None), (2, None)], (3, None)),
    "nan over two": ([(1, None), (2, None)], (3, NAN)),
    "over nan": ([(1, None), (2, NAN)], (3, None)),
    "the first": ([], (3, None)),
}
"""What was saved before, and what is saved: (step, weight)."""


class Injection:
    """Counts the calls with which a save changes the disk, and lets `act` be in place of the one numbered `at`."""

    def __init__(self, at: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.at, self.act = at, act
        self.calls: list[str] = []

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 != self.at:
                return real(*args, **kwargs)
            if name == "write":
                real(args[0], args[1][: len(args[1]) // 2])  # a write may be cut anywhere
            elif name == "close":
                real(*args, **kwargs)  # Linux closes also when it says an error
            self.act()
            return None

        return wrapped

    def install(self, patch: Callable[..., None], module: Any) -> None:
        for name in ("open", "close", "fsync", "link", "replace", "unlink", "mkdir"):
            patch(os, name, self.wrap(name, getattr(os, name)))
        raw = type(
            "Raw", (io.FileIO,), {name: self.wrap(name, getattr(io.FileIO, name)) for name in ("write", "close")}
        )

        def opened(path: Path, mode: str, *_: int) -> Any:
            return io.BufferedWriter(raw(path, "x"), 600) if mode == "xb" else open(path, mode)  # pyright: ignore

        patch(module, "open", self.wrap("open", opened))


def raiser(code: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepared(folder: Path, scene: str) -> Path:
    """Where the scene's checkpoint is saved, among those that were saved before."""
    template = folder / f"template {scene}"
    if not template.exists():
        template.mkdir()
        for step, weight in SCENES[scene][0]:
            save(template / "last.ckpt", step, weight)
    shutil.rmtree(folder / "run", ignore_errors=True)
    shutil.copytree(template, folder / "run")
    return folder / "run" / ("last.ckpt" if SCENES[scene][0] else "new/last.ckpt")


def exit_code(path: Path, scene: str) -> int:
    """0: saved; 3: a RunError that says all."""
    try:
        save(path, *SCENES[scene][1])
    except RunError as error:
        said = str(error)
        return 3 if f"cannot save checkpoint {path}: " in said and "Earlier checkpoints are intact. " in said else 4
    return 0


def problems(path: Path, scene: str, code: int, allow_partial: bool) -> list[str]:
    """What is wrong in the folder after a save that ended with `code`, and after the save that follows it."""
    saved, (step, weight) = SCENES[scene]
    old = max([old for old, value in saved if value is None], default=None)
    right = {old} if weight is not None else {step} if code == 0 else {old, step}
    wrong = [] if code in (0, 3, -signal.SIGKILL) else [f"exit code {code}"]
    found, passed = newest(path.parent)
    try:
        if (found and step_of(found)) not in right:
            wrong.append(f"newest is {found}")
        wrong += [line for line in passed if not line.endswith("holds weights that are nan or infinite")]
        if saved and not path.exists():
            wrong.append("the name is gone")
        if code in (0, 3) and not allow_partial and list(path.parent.glob(".*")):
            wrong.append("a partial file remains")
        save(path, step + 1)
        if newest(path.parent)[0] != path or step_of(path) != step + 1 or list(path.parent.glob(".*")):
            wrong.append("the next save is not right")
    except (RunError, AssertionError, OSError) as error:
        wrong.append(repr(error))
    return wrong


def calls_of(folder: Path, scene: str, module: Any) -> list[str]:
    path, injection = prepared(folder, scene), Injection()
    with pytest.MonkeyPatch.context() as patch:
        injection.install(functools.partial(patch.setattr, raising=False), module)
        exit_code(path, scene)
    return injection.calls


def after_errors(folder: Path, scene: str, module: Any) -> Iterator[str]:
    """What is wrong after each call failed with each error."""
    calls = calls_of(folder, scene, module)
    for (at, name), code in itertools.product(enumerate(calls), ERRORS):
        path = prepared(folder, scene)
        with pytest.MonkeyPatch.context() as patch:
            Injection(at, raiser(code)).install(functools.partial(patch.setattr, raising=False), module)
            try:
                status = exit_code(path, scene)
            except Exception as error:
                status = 5
                yield f"call {at} ({name}) fails: {error!r}"
        for wrong in problems(path, scene, status, allow_partial=name == "unlink"):
            yield f"call {at} ({name}) fails with {errno.errorcode[code]}: {wrong}"


def dying(path: Path, scene: str, at: int, module: Any) -> None:
    Injection(at, die).install(setattr, module)
    os._exit(exit_code(path, scene))


def in_child(function: Callable[..., None], *args: Any) -> int:
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def after_deaths(folder: Path, scene: str, module: Any) -> Iterator[str]:
    """What is wrong after the process died at each call."""
    for at, name in enumerate(calls_of(folder, scene, module)):
        path = prepared(folder, scene)
        status = in_child(dying, path, scene, at, module)
        assert status == -signal.SIGKILL
        for wrong in problems(path, scene, status, allow_partial=True):
            yield f"dies at call {at} ({name}): {wrong}"


@pytest.mark.parametrize("scene", SCENES)
def test_every_call_may_fail(tmp_path: Path, scene: str) -> None:
    assert list(after_errors(tmp_path, scene, checkpoint_write)) == []


@pytest.mark.parametrize("scene", SCENES)
def test_every_call_may_be_the_last(tmp_path: Path, scene: str) -> None:
    assert list(after_deaths(tmp_path, scene, checkpoint_write)) == []


def test_without_hard_links_the_old_file_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda *_: raiser(errno.EPERM)())
    for step in (1, 2, 3):
        save(tmp_path / "last.ckpt", step)
    assert names(tmp_path) == {"last.ckpt", "last.previous.ckpt"}
    assert (step_of(tmp_path / "last.ckpt"), step_of(tmp_path / "last.previous.ckpt")) == (3, 2)


def test_data_is_on_the_disk_before_its_name_and_names_before_the_end(tmp_path: Path) -> None:
    """The order that survives a power cut, which no test can make."""
    assert re.sub(r"(write )+", "write ", " ".join(calls_of(tmp_path, "over two", checkpoint_write))) == (
        "unlink open write fsync close open unlink link replace unlink replace open fsync close"
    )
    made = "mkdir open fsync close"  # the parent's names
    first = " ".join(calls_of(tmp_path, "the first", checkpoint_write))
    assert first.startswith(made)
    assert first.endswith("replace open fsync close")


FAULTY = {
    "written in place": (
        "over two",
        after_deaths,
        'return target.with_name(f".{target.name}.partial")',
        "return target",
    ),
    "two renames": (
        "over two",
        after_deaths,
        "        os.link(target, link)",
        "        raise OSError(errno.EPERM, '')",
    ),
    "no one before": ("nan over two", after_deaths, "            _keep(target, previous)", "            pass"),
    "leftovers stay": (
        "the first",
        after_errors,
        "                os.unlink(leftover)\n        raise",
        "                pass\n        raise",
    ),
    "leftovers are kept": ("the first", after_deaths, "        os.unlink(partial)  #", "        pass  #"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_the_injections_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    scene, inject, right, wrong = FAULTY[fault]
    module = faulty_copy(checkpoint_write, right, wrong)
    monkeypatch.setattr(checkpoint, "write_durably", module.write_durably)
    found = next(inject(tmp_path, scene, module), None)
    assert found is not None
    print(found)


def test_a_copy_without_fsync_has_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = calls_of(tmp_path, "over two", checkpoint_write)
    hasty = faulty_copy(checkpoint_write, "        os.fsync(file.fileno())\n", "")
    monkeypatch.setattr(checkpoint, "write_durably", hasty.write_durably)
    assert calls_of(tmp_path, "over two", hasty) == [
        call for at, call in enumerate(right) if at != right.index("fsync")
    ]


class FullDisk(io.RawIOBase):
    """Takes so many writes, and no more."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def write(self, data: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.left -= 1
        if self.left < 0:
            raiser(errno.ENOSPC)()
        return len(data)


@pytest.mark.parametrize("write", [checkpoint_write.write_checksummed, torch.save])
def test_the_disks_own_error_comes_out_of_every_write(write: Callable[..., None]) -> None:
    """torch.save, which makes a RuntimeError of half of them, is the faulty version."""
    disk, kinds = FullDisk(sys.maxsize), []
    write(content(1), disk)
    for writes in range(sys.maxsize - disk.left):
        with pytest.raises((OSError, RuntimeError)) as raised:
            write(content(1), FullDisk(writes))
        kinds.append(getattr(raised.value, "errno", None))
    assert len(kinds) > 30
    assert (set(kinds) == {errno.ENOSPC}) == (write is not torch.save)


def moved_by_lightning(path: Path, staging: Path) -> None:
    tempfile.tempdir = str(staging)
    for name in ("sendfile", "copy_file_range"):
        setattr(os, name, lambda *_: die())
    save(str(path), 3, io=TorchCheckpointIO())
    os._exit(0)


def test_lightnings_own_save_loses_the_checkpoint(tmp_path: Path) -> None:
    """PL 21253: staged in $TMPDIR, a filesystem of its own here. Fails when upstream stages beside the target."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm as a second filesystem")
    path = tmp_path / "last.ckpt"
    save(path, 2)
    with tempfile.TemporaryDirectory(dir=memory) as staging:
        assert in_child(moved_by_lightning, path, Path(staging)) == -signal.SIGKILL
    assert newest(tmp_path) == (None, [f"{path} is empty"])


# --- disks that are really full, and places that are not on a disk ----------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    disk, last = tmp_path / "disk", tmp_path / "disk" / "last.ckpt"
    with mounted(disk, "size=64k"):
        for step in (1, 2):
            save(last, step)
        with pytest.raises(RunError) as raised:
            DurableCheckpointIO().save_checkpoint({**content(3), "state_dict": {"w": torch.ones(50_000)}}, last)
        assert str(raised.value) == (
            f"cannot save checkpoint {last}: No space left on device (ENOSPC). Earlier checkpoints are intact. Free"
            f" some space in {disk}, or save elsewhere: trainer.default_root_dir"
        )
        assert (names(disk), newest(disk), step_of(last)) == ({"last.ckpt", "last.previous.ckpt"}, (last, []), 2)
        save(last, 3)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(RunError, match=rf"Read-only file system \(EROFS\).* Make {disk} writable"):
            save(last, 4)
        with pytest.raises(RunError, match=r"cannot remove checkpoint .*EROFS"):
            DurableCheckpointIO().remove_checkpoint(last)
        assert (step_of(last), newest(disk)) == (3, (last, []))


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.ckpt").mkdir()
    for place, code in [
        ("file/last.ckpt", "ENOTDIR"),
        ("folder.ckpt", "EISDIR"),
        ("a" * 250 + ".ckpt", "ENAMETOOLONG"),
    ]:
        with pytest.raises(RunError, match=rf"cannot save checkpoint .* \({code}\)"):
            save(tmp_path / place, 1)
    assert names(tmp_path) == {"file", "folder.ckpt"}
    DurableCheckpointIO().remove_checkpoint(tmp_path / "folder.ckpt")  # Lightning's sharded checkpoints are folders
    assert names(tmp_path) == {"file"}
    with pytest.raises(ConfigError, match="no storage_options"):
        DurableCheckpointIO().save_checkpoint(content(1), tmp_path / "last.ckpt", storage_options={})


@pytest.fixture
def remote() -> Iterator[str]:
    folder = "memory://bucket/run"
    yield folder
    get_filesystem(folder).rm("memory://bucket", recursive=True)


def test_remote_checkpoints(remote: str) -> None:
    io, last = DurableCheckpointIO(), f"{remote}/last.ckpt"
    assert newest(remote) == (None, [])
    for step in (1, 2):
        save(last, step, io=io)
    assert (step_of(last), examine(last).global_step, newest(remote)) == (2, 2, (last, []))
    save(last, 3, NAN, io)
    before = newest(remote)[0]
    assert (before, step_of(before)) == (f"{remote}/last.previous.ckpt", 2)
    save(f"{remote}/other.ckpt", 4, io=io)
    io.remove_checkpoint(last)
    assert get_filesystem(remote).ls(remote, detail=False) == ["/bucket/run/other.ckpt"]
    with pytest.warns(UserWarning, match="other.ckpt is kept"):
        io.remove_checkpoint(f"{remote}/other.ckpt")
    with pytest.raises(RunError, match=r"last.ckpt does not exist. Use memory://bucket/run/other.ckpt instead"):
        io.load_checkpoint(last)
    get_filesystem(remote).pipe_file(last, b"PK\x03\x04 torn")
    with pytest.raises(RunError, match=rf"checkpoint {last} is torn"):
        io.load_checkpoint(last)


def test_an_upload_that_fails_is_not_seen(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    last = f"{remote}/last.ckpt"
    save(last, 1)
    disk, file = FullDisk(20), type(get_filesystem(remote).open(last))
    monkeypatch.setattr(file, "write", lambda _, data: disk.write(data))
    with pytest.raises(RunError, match=rf"cannot save checkpoint {last}: No space left on device \(ENOSPC\)"):
        save(last, 2)
    monkeypatch.undo()
    assert step_of(last) == 1
    save(last, 2)
    assert step_of(last) == 2


# --- the same with real system calls ----------------------------------------------------------------------------------

CHANGING = {"write", "fsync", "close", "link", "rename", "unlink", "mkdir", "open"}


def waiting(path: Path, scene: str, ready: Connection) -> None:
    checkpoint_write.BUFFER_BYTES = 1500  # several writes
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    ready.send(True)
    signal.sigwait({signal.SIGUSR1})
    os.access("/begin", os.F_OK)
    code = 5
    with contextlib.suppress(Exception):
        code = exit_code(path, scene)
    os.access("/end", os.F_OK)
    os._exit(code)


def under_strace(path: Path, scene: str, *options: str, log: Path = Path(os.devnull)) -> int:
    """Exit code, negative for a signal, of a child that saves. strace is attached just before, so that counts agree."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=waiting, args=(path, scene, theirs))
    process.start()
    ours.recv()
    command = ["strace", "-p", str(process.pid), "-o", str(log), "-e", "trace=%file,%desc", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        if "attached" not in said:
            process.kill()
            pytest.skip(f"may not trace: {said.strip()}")
        os.kill(process.pid or 0, signal.SIGUSR1)
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def system_calls(log: str) -> list[tuple[str, int]]:
    """(name, how many-th of that name since the tracer came) of each call between the two markers."""
    seen: dict[str, int] = {}
    calls, inside, before = [], False, ""
    for name, rest in re.findall(r"^(\w+)\((.*)$", log, re.MULTILINE):
        seen[name] = seen.get(name, 0) + 1
        if '"/begin"' in rest or '"/end"' in rest:
            inside = '"/begin"' in rest
        elif inside and name not in ("mmap", "munmap") and name + rest != before:  # memory; the same again and again
            calls.append((name, seen[name]))
        before = name + rest
    return calls


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace: apt-get install strace")


@needs_strace
def test_every_system_call_may_fail_or_be_the_last(tmp_path: Path) -> None:
    """Calls that only read fail with EIO; a death at one of them leaves what a death at the next that changes does."""
    scene, wrong = "over two", []
    assert under_strace(prepared(tmp_path, scene), scene, log=tmp_path / "log") == 0
    calls = system_calls((tmp_path / "log").read_text())
    kinds = {name: re.sub("at2?$", "", name) for name, _ in calls}  # some machines have renameat2 only
    assert {"link", "rename", "fsync"} <= set(kinds.values())
    for name, number in calls:
        changing = kinds[name] in CHANGING
        codes = ERRORS if changing else [errno.EIO]
        for action in [f"error={errno.errorcode[code]}" for code in codes] + ["signal=KILL"] * changing:
            path = prepared(tmp_path, scene)
            code = under_strace(path, scene, "-e", f"inject={name}:{action}:when={number}")
            assert (code == -signal.SIGKILL) == (action == "signal=KILL")
            found = problems(path, scene, code, allow_partial=kinds[name] == "unlink")
            wrong += [f"{name} {number} {action}: {what}" for what in found]
    assert wrong == []


@needs_strace
def test_a_real_kill_finds_the_copy_that_writes_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, _, right, wrong = FAULTY["written in place"]
    module = faulty_copy(checkpoint_write, right, wrong)
    module.BUFFER_BYTES = 600
    monkeypatch.setattr(checkpoint, "write_durably", module.write_durably)
    path = prepared(tmp_path, scene)
    code = under_strace(path, scene, "-e", "inject=write:signal=KILL:when=2")
    assert "is torn" in str(problems(path, scene, code, allow_partial=True))
